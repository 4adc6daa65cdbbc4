"""The page of benchmarks says what the raw files say, and the raw files stay few and small."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benchmarks_page
import pytest
from benchmarks_page import CALLS, PAGE, RESULTS, RUNS, TABLES, Run


def test_tables_are_those_of_the_raw_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert benchmarks_page.written(page) == page, "write them anew: python tests/support/benchmarks_page.py"


def test_every_table_is_in_the_page_once() -> None:
    assert list(benchmarks_page.names(PAGE.read_text(encoding="utf-8"))) == list(TABLES)


def told(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("run", "path"),
    [(run, path) for run in RUNS for path in run.paths() if path.suffix == ".json"],
    ids=lambda each: "/".join(each.parts[-2:]) if isinstance(each, Path) else each.commit,
)
def test_heads_are_those_of_the_raw_results(run: Run, path: Path) -> None:
    raw = told(path)
    assert (benchmarks_page.gpus(raw["machine"]), raw["date"]) == (run.machine, run.date)
    assert raw["torch"].startswith(f"{run.torch}.")
    given, named = (dict(re.findall(r"(--[\w-]+)(?: ([^-\s]\S*))?", text)) for text in (raw["command"], run.command))
    if "again" in path.name or len(run.files) == 2:  # a run for each kind, or of some rows
        named = {option: given.get(option) for option in named}
    assert named.items() <= given.items()


def test_means_are_of_all_rows() -> None:
    counts = []
    for run in CALLS:
        found = [call.raw["op"] for call in benchmarks_page.calls(run)]
        counts.append((found.count("gather"), found.count("scatter")))
    assert counts == [(36, 27), (2 * 20, 12 + 15), (3 * 36, 3 * 27), (3 * 36, 3 * 27)]


def test_one_wrong_result_is_not_called_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, *others = benchmarks_page.CHECKS.read_text(encoding="utf-8").splitlines()
    changed = tmp_path / "checks.jsonl"
    changed.write_text("\n".join([json.dumps({**json.loads(first), "wrong": 1}), *others]), encoding="utf-8")
    monkeypatch.setattr(benchmarks_page, "CHECKS", changed)
    with pytest.raises(AssertionError):
        benchmarks_page.checks()


# --- raw files -------------------------------------------------------------------------------------------------------
def test_raw_results_are_small() -> None:
    """A clone has them all. The index names the commits that have what left."""
    assert sum(path.stat().st_size for path in [RESULTS, *RESULTS.rglob("*")]) <= 1_500_000


def test_the_index_has_every_raw_file() -> None:
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    listed: set[str] = set()
    for section in re.split(r"^## ", index, flags=re.MULTILINE):
        folder = section.partition("\n")[0] + "/" if re.match(r"\d{4}-", section) else ""
        listed |= {
            folder + name
            for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
            for name in cell[1:-1].split("`, `")
        }
    files = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()}
    assert listed == files - {"README.md"}


def test_every_raw_file_is_read() -> None:
    """By a page, a test, or the comment of a program that rests on it, which names the folder too."""
    root = RESULTS.parents[1]
    rooms = ("docs", "asynctp_passes", "kernels", "tests", "examples")
    paths = [
        *root.glob("*.md"),
        *(path for room in rooms for end in ("md", "py") for path in (root / room).rglob(f"*.{end}")),
    ]
    readers = [path.read_text(encoding="utf-8") for path in paths if RESULTS not in path.parents]
    unread = [
        path.relative_to(RESULTS).as_posix()
        for path in RESULTS.rglob("*")
        if path.is_file()
        and path.name != "README.md"
        and not any(path.name in text and path.parent.name in text for text in readers)
    ]
    assert unread == []


# --- the page of dropped designs -------------------------------------------------------------------------------------
MEASUREMENTS = RESULTS.parent / "internals" / "measurements.md"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_NO_FIGURE = re.compile(r"\[.*|\d × H\d00|fp\d+|bf16|L1|70B|8B")
_RAW = re.compile(r"\]\(\.\./results/([^)]+)\)")


def measured() -> Iterator[tuple[str, str, list[Path]]]:
    """Figures in cells of tables, each with its cell, and the raw files of the row or of the text above."""
    files: list[Path] = []
    for line in MEASUREMENTS.read_text(encoding="utf-8").splitlines():
        files = [RESULTS / name for name in _RAW.findall(line)] or files
        if line.startswith("| "):
            cells = line.strip("| ").split(" | ")[1:]
            yield from ((number, cell, files) for cell in cells for number in _NUMBER.findall(_NO_FIGURE.sub("", cell)))


def test_figures_of_designs_are_those_of_the_raw_results() -> None:
    found = list(measured())
    numbers = {
        path: [float(each) for each in _NUMBER.findall(path.read_text("utf-8"))]
        for *_, paths in found
        for path in paths
    }
    faults = []
    for number, cell, files in found:
        digits = len(number.partition(".")[2])
        raw = [each for path in files for each in numbers[path]]
        if not any(abs(each - float(number)) <= 0.501 * 10**-digits for each in raw):
            faults.append(f"{number} of {cell!r} is not in {[path.name for path in files]}")
    assert faults == []
    assert len(found) > 100
