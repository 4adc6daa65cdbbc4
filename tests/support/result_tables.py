"""The tables of measured figures in `docs/explanation`, from the raw results and the table of picks that is shipped.

    python tests/support/result_tables.py        writes them anew

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asynctp_kernels.cuda.choose.names import RENAMED

from asynctp_passes.tools.bench import NOISE

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "explanation" / "results.md",)
RESULTS = ROOT / "docs" / "results"
SHIPPED = ROOT / "kernels" / "asynctp_kernels" / "cuda" / "choose" / "measured.json"
FEW_ROWS, BESIDE = "2026-11-28-h100x4", "2026-11-28-h200x4/beside.jsonl"
FOUR, TWO, H100 = "2026-11-28-h200x4-later", "2026-11-25-h200x2", "2026-11-25-h100x2"
DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp8-rowwise": "float8_e4m3fn"}
KINDS = {"bf16": "bf16", "fp8": "fp8, tensorwise", "fp8-rowwise": "fp8, rowwise"}
SHOWN = (64, 512, 2048, 4096, 8192, 16384)
COLUMNS = [(op, mode) for op in ("gather", "scatter") for mode in ("graph", "eager")]
AS_RUN = "asynctp"


@dataclass(frozen=True)
class Row:
    """One problem of a run: raw, and the implementation that the shipped table picks for it."""

    raw: dict[str, Any]
    picked: str

    def time(self, name: str, mode: str) -> float:
        """Microseconds."""
        return float(self.raw["timings"][name][mode])

    def speedup(self, peers: Sequence[str], mode: str, ours: str) -> float:
        """How many times as fast as the best of the peers that ran `ours` is."""
        return min(self.time(name, mode) for name in peers if name in self.raw["timings"]) / self.time(ours, mode)

    @property
    def efficiency(self) -> float:
        """The bound over what is picked, in a graph."""
        return float(self.raw["bound"]) / self.time(self.picked, "graph")


def rows(folder: str) -> list[Row]:
    """All of a folder's runs; of those that were measured again, with a later version, the last."""
    picks, found = read(SHIPPED), {}
    for path in (RESULTS / folder / "bench.json", *sorted((RESULTS / folder).glob("bench-*.json"))):
        run = read(path)
        for raw in run["rows"]:
            raw["timings"] = {RENAMED.get(name, name): times for name, times in raw["timings"].items()}
            key = f"{raw['op']}:{raw['world']}:{DTYPES[raw['kind']]}:{raw['k']}:{raw['n']}"
            row = Row(raw, picks[run["machine"].partition(" x ")[2]][key][str(raw["m"])])
            found[raw["kind"], key, raw["m"]] = row
    return list(found.values())


def kinds_of(found: Iterable[Row]) -> list[str]:
    """In the order of `KINDS`."""
    there = {row.raw["kind"] for row in found}
    return [kind for kind in KINDS if kind in there]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines_with(head, lines)).replace("| --- ", "|---") + "\n"


def lines_with(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterable[Sequence[str]]:
    return [head, ["---"] * len(head), *lines]


def every_row(folder: str, op: str) -> str:
    """The rows in bf16 with M of `SHOWN`."""
    head = ("M × K × N", "cuBLAS", "+ NCCL", "in-tree", "asynctp", "runs", "efficiency", "graph", "eager")
    lines = []
    for row in rows(folder):
        if (row.raw["op"], row.raw["kind"]) == (op, "bf16") and row.raw["m"] in SHOWN:
            names = ("cublas", "nccl", "intree", row.picked)
            times = [f"{row.time(name, 'graph'):.0f} / {row.time(name, 'eager'):.0f}" for name in names]
            speedups = [f"{row.speedup(('nccl', 'intree'), mode, row.picked):.2f}×" for mode in ("graph", "eager")]
            sizes = " × ".join(str(row.raw[name]) for name in "mkn")
            lines.append((sizes, *times, row.picked, f"{row.efficiency:.2f}", *speedups))
    return table(head, lines)


def means(folder: str) -> str:
    """Geometric means of speedups: of what is picked, by the same run, and of what ran."""
    found = rows(folder)
    kinds = kinds_of(found)
    lines = []
    for kind in kinds:
        mine = [row for row in found if row.raw["kind"] == kind]
        for peers, label in PEERS:
            lines.append((name_of(kind, kinds) + label, *(mean(mine, *column, peers, None) for column in COLUMNS)))
        best = (name_of(kind, kinds) + "the better of the two, as run",)
        lines.append((*best, *(mean(mine, *column, ("nccl", "intree"), AS_RUN) for column in COLUMNS)))
    return table(("asynctp against", "gather, graph", "gather, eager", "scatter, graph", "scatter, eager"), lines)


PEERS = ((("nccl",), "cuBLAS + NCCL"), (("intree",), "in-tree"), (("nccl", "intree"), "the better of the two"))


def name_of(kind: str, kinds: Sequence[str]) -> str:
    return f"{KINDS[kind]}: " if len(kinds) > 1 else ""


def mean(found: Sequence[Row], op: str, mode: str, peers: Sequence[str], ours: str | None) -> str:
    speedups = [row.speedup(peers, mode, ours or row.picked) for row in found if row.raw["op"] == op]
    return f"{statistics.geometric_mean(speedups):.2f}×"


def summary() -> str:
    """Geometric means of all runs: the picks against the better of the two others."""
    lines = []
    for folder, label, run in RUNS:
        found = rows(folder)
        for kind in kinds_of(found):
            mine = [row for row in found if row.raw["kind"] == kind]
            cells = (mean(mine, *column, ("nccl", "intree"), None) for column in COLUMNS)
            lines.append((label, KINDS[kind], *cells, run))
    return table(("GPUs", "dtype", "gather, graph", "gather, eager", "scatter, graph", "scatter, eager", "run"), lines)


RUNS = (
    (FOUR, "4 × H200", "[2026-11-28](#four-h200s)"),
    (TWO, "2 × H200", "[2026-11-25](#two-h200s)"),
    (H100, "2 × H100", "[2026-11-25](#two-h100s)"),
)


def slower(folder: str) -> str:
    """How many rows are slower than the better of the two others."""
    found = rows(folder)

    def count(mode: str, ours: str | None) -> int:
        return sum(row.speedup(("nccl", "intree"), mode, ours or row.picked) < NOISE for row in found)

    return (
        f"Of {len(found)} rows {count('graph', None)} in a graph and {count('eager', None)} eager are more than "
        f"{100 * (1 - NOISE):.0f} % slower than the better of the two.\n"
        f"As run, {count('graph', AS_RUN)} and {count('eager', AS_RUN)} are.\n"
    )


def efficiencies(folder: str) -> str:
    """Least and greatest of the shapes."""
    found = rows(folder)
    kinds = kinds_of(found)
    columns = [(op, kind) for op in ("gather", "scatter") for kind in kinds]
    lines = []
    for m in SHOWN[1:]:
        cells = []
        for op, kind in columns:
            values = [
                row.efficiency for row in found if (row.raw["op"], row.raw["kind"], row.raw["m"]) == (op, kind, m)
            ]
            cells.append(f"{min(values):.2f}–{max(values):.2f}" if values else "")
        lines.append((str(m), *cells))
    return table(("M", *(f"{op} {KINDS[kind]}" for op, kind in columns)), lines)


def few_rows() -> str:
    """Gathers and scatters of few rows, of two runs: before and after a change."""
    runs = [read(RESULTS / FEW_ROWS / f"few-rows{which}.json")["rows"] for which in ("-before", "")]
    pairs = zip(*[sorted(run, key=lambda raw: (raw["op"], raw["m"], raw["n"], raw["k"])) for run in runs], strict=True)
    lines = []
    for before, raw in pairs:
        assert before["key"] == raw["key"]
        old, new = ({name: each["graph"] for name, each in run["timings"].items()} for run in (before, raw))
        size = f"{raw['op']}, {raw['m']} × {raw['k']} × {raw['n']}"
        times = [
            f"{new['cublas']:.0f}",
            f"{old['nccl']:.0f}, {new['nccl']:.0f}",
            f"{old[AS_RUN]:.0f}",
            f"{new[AS_RUN]:.0f}",
        ]
        lines.append([size, *times, f"{raw['bound'] / new[AS_RUN]:.2f}"])
    head = ["M × K × N", "cuBLAS", "+ NCCL, two runs", "asynctp before", "asynctp", "efficiency"]
    return table(head, lines)


def beside() -> str:
    """Calls by themselves, and beside NCCL kernels of another group."""
    found: dict[str, dict[str, str]] = {}
    for line in (RESULTS / BESIDE).read_text(encoding="utf-8").splitlines():
        raw = json.loads(line)
        size = f"{raw['op']} {raw['m']} × {raw['k']} × {' + '.join(map(str, raw['n']))}"
        found.setdefault(size, {})[raw["way"]] = f"{raw['alone']:.0f} / {raw['beside']:.0f}"
    ways = ["plain", "cuBLAS alone", "decomposed", *(f"shares {count}" for count in (1, 2, 3, 4))]
    head = ["M × K × N", "plain", "cuBLAS", "`decomposed`", "`fused`, 1 share", "2", "3", "4"]
    return table(head, [[size, *(times[way] for way in ways)] for size, times in found.items()])


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "gathers on four GPUs": lambda: every_row(FOUR, "gather"),
    "scatters on four GPUs": lambda: every_row(FOUR, "scatter"),
    "means on four GPUs": lambda: means(FOUR),
    "efficiency on four GPUs": lambda: efficiencies(FOUR),
    "slower on four GPUs": lambda: slower(FOUR),
    "means on two GPUs": lambda: means(TWO),
    "efficiency on two GPUs": lambda: efficiencies(TWO),
    "slower on two GPUs": lambda: slower(TWO),
    "means on two H100s": lambda: means(H100),
    "efficiency on two H100s": lambda: efficiencies(H100),
    "slower on two H100s": lambda: slower(H100),
    "few rows on four H100s": few_rows,
    "beside other groups' kernels": beside,
}
_PLACE = re.compile(r"(<!-- table: (.*?) -->\n\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """The page with its tables made anew."""
    return _PLACE.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], page)


def names(page: str) -> list[str]:
    """Names of the tables in a page."""
    return [found[2] for found in _PLACE.finditer(page)]


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
