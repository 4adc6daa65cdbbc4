"""The documentation is complete, its code runs, and its links lead somewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import asynctp_kernels
import page_parts
import pytest
import reasons_page
import support_page
from scripts import run_script

import asynctp_passes
from asynctp_passes.reasons import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OUTPUT = re.compile(r"^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"\S+\.py:\d+")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PAGES_THAT_RUN = sorted(
    [
        ROOT / "README.md",
        DOCS / "tutorial.md",
        DOCS / "how-to" / "custom-ops.md",
        DOCS / "how-to" / "fail-ci-on-a-miss.md",
        DOCS / "how-to" / "my-fusion-did-not-apply.md",
        DOCS / "reference" / "config.md",
        DOCS / "reference" / "ops.md",
    ]
)


_README_MODEL = "model, batch = make_mlp(), torch.randn(2, 16, 64, requires_grad=True)\nimport asynctp_passes"
"""What the README's first block takes from its reader's program: here, the tutorial's model."""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _code(path: Path) -> str:
    """All Python blocks of a page as one program, which calls the tests that it defines."""
    blocks = _BLOCK.findall(path.read_text(encoding="utf-8"))
    if path == ROOT / "README.md":
        tutorial = _BLOCK.findall((DOCS / "tutorial.md").read_text(encoding="utf-8"))
        blocks = [tutorial[0], _README_MODEL, *blocks]
    code = "\n".join(blocks)
    calls = re.findall(r"^def (test_\w+)\(\)", code, re.MULTILINE)
    return "\n".join([code, *(f"{name}()" for name in calls)])


def test_reasons_page_is_the_catalogue() -> None:
    written = reasons_page.PAGE.read_text(encoding="utf-8")
    assert written == reasons_page.page(), "write it anew: python tests/support/reasons_page.py"


def test_support_page_is_the_table_of_forms() -> None:
    written = support_page.PAGE.read_text(encoding="utf-8")
    assert written == support_page.page(), "write it anew: python tests/support/support_page.py"


@pytest.mark.parametrize("form", [form for forms in support_page.SECTIONS.values() for form in forms], ids=str)
def test_a_supported_form_is_shown_by_tests_with_that_outcome(form: support_page.Form) -> None:
    assert form.shown_by
    assert list(form.faults()) == []


def test_reasons_named_in_pages_exist() -> None:
    known = {reason.code: reason.name for reason in CATALOGUE.values()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for code, name in re.findall(r"(ATP\d{3})(?: ([A-Z][A-Z_]{3,}))?", text):
            assert code in known, f"{_name(page)} names {code}"
            assert name in ("", known[code]), f"{_name(page)} calls {code} {name}; it is {known[code]}"


@pytest.mark.parametrize("page", page_parts.PARTS)
def test_parts_of_a_page_are_those_of_the_code(page: str) -> None:
    is_there = (page_parts.FOLDER / page).read_text(encoding="utf-8")
    assert is_there == page_parts.written(page), "write it anew: python tests/support/page_parts.py"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in _LINK.findall(text):
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{_name(page)} links to {link}"
        assert not anchor or anchor in _anchors(path), f"{_name(page)} links to {link}"


def _anchors(path: Path) -> set[str]:
    if path.suffix == ".png":  # which of two pictures GitHub and the site show
        return {"gh-light-mode-only", "gh-dark-mode-only"}
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = {(DOCS / link).resolve() for link in _LINK.findall(index)}
    assert {page for page in DOCS.rglob("*.md") if page.name != "README.md"} <= linked


def test_api_page_has_every_public_name() -> None:
    named = re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    public = {f"{module.__name__}.{name}" for module in (asynctp_passes, asynctp_kernels) for name in module.__all__}
    assert public <= set(named)
    assert len(named) == len(set(named))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_code_compiles(page: Path) -> None:
    compile(_code(page), _name(page), "exec")


def test_readme_step_fuses_all_chains_of_the_model(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(_code(ROOT / "README.md"), encoding="utf-8")
    assert "4 of 4 chains fused, 0 missed" in run_script(script, cwd=tmp_path)


@pytest.mark.parametrize("page", _PAGES_THAT_RUN, ids=_name)
def test_code_runs_and_prints_the_output_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "page.py"
    blocks = _OUTPUT.findall(page.read_text(encoding="utf-8"))
    if blocks:  # a report that comes from Inductor's cache says so
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    script.write_text(_code(page), encoding="utf-8")
    printed = _PLACE.sub("", run_script(script, cwd=tmp_path)).splitlines()
    shown = [_PLACE.sub("", line) for block in blocks for line in block.splitlines()]
    assert [line for line in shown if line not in printed and line != "..."] == []


def test_private_names_of_torch_on_the_page_of_hooks_are_used() -> None:
    page = (DOCS / "explanation" / "hooks.md").read_text(encoding="utf-8")
    _, section = page.split("\n## Private names\n")
    rows = re.findall(r"^\| (`.*?) \|", section.split("\n## ")[0], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) >= 20
    package = ROOT / "asynctp_passes"
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []


def test_version_is_the_same_everywhere() -> None:
    """In the package, for pip, and as the newest section of the changelog."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    versions = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == versions
    assert versions == [asynctp_passes.__version__]
    assert re.findall(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)[0] == versions[0]


def test_readme_commands_exist() -> None:
    """The commands of the first screen are the scripts that CI keeps working."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in re.findall(r"^(\.ci/\w+)", readme, re.MULTILINE):
        assert os.access(ROOT / command, os.X_OK), command


_NO_FIGURES = re.compile(r"^```.*?^```|`[^`]*`|(?<=\])\([^)]*\)", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"(?<![\w.-])\d+(?:[.,]\d+)*(?!\w)")


def figures(markdown: str) -> list[str]:
    """Numbers of a page's text and tables: not those of code and links, nor a part of a word (`70B`) or of a date."""
    return _FIGURE.findall(_NO_FIGURES.sub("", markdown))


def test_figures_are_counted() -> None:
    text = "On 4 × H200, 2026-11-28: 70B in fp8 at 1.30×, 8,192 tokens ([0.83](results-2.md)), `x[3]`.\n```\n5\n```\n"
    assert figures(text) == ["4", "2026", "1.30", "8,192", "0.83"]


def test_readme_is_read_in_a_minute() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 900
    assert "[^" not in readme
    assert len(figures(readme)) <= 25


_RESULTS = DOCS / "results"
_GENERATED = {reasons_page.PAGE, support_page.PAGE}


def _words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_docs_are_short() -> None:
    """All pages together, without those of raw results."""
    assert sum(_words(page) for page in DOCS.rglob("*.md") if _RESULTS not in page.parents) <= 40_000


def test_no_page_for_users_is_long() -> None:
    """Generated ones excepted, which are looked up and not read; internals are for those who change the code."""
    left_out = (_RESULTS, DOCS / "internals")
    pages = [page for page in DOCS.rglob("*.md") if not set(left_out) & set(page.parents) and page not in _GENERATED]
    assert {_name(page): _words(page) for page in pages if _words(page) > 2_500} == {}


def test_raw_results_are_small() -> None:
    assert sum(path.stat().st_size for path in _RESULTS.rglob("*") if path.is_file()) <= 1_500_000


def test_figures_of_the_readme_are_those_of_the_raw_results() -> None:
    """Its table of steps: plain Inductor's milliseconds, and the speeds of both others."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    kinds = {"rowwise fp8": "fp8-rowwise", "tensorwise fp8": "fp8", "bf16": "bf16"}
    folder = DOCS / "results" / "2026-11-28-h200x4-later"
    raw = "".join((folder / name).read_text(encoding="utf-8") for name in ("steps.txt", "steps-bf16.txt"))
    rows = re.findall(
        r"^\| (70B|8B), ([a-z0-9 ]+) \| ([\d.]+) ms \| ([\d.]+)× \| \*\*([\d.]+)×\*\* \|$", readme, re.MULTILINE
    )
    assert len(rows) == 5
    for size, kind, plain, intree, ours in rows:
        measured = {
            name: (f"{float(step):.1f}", speed)
            for name, step, speed in re.findall(
                rf"^{size.lower()} +{kinds[kind]} +1x8192 +sp step +(\w+) +([\d.]+) +([\d.]+)x", raw, re.MULTILINE
            )
        }
        assert (measured["inductor"][0], measured["intree"][1], measured["asynctp"][1]) == (plain, intree, ours)


def test_releases_of_the_changelog_are_short() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for release in changelog.split("\n## ")[1:]:
        assert len(release.split()) <= 600, release.splitlines()[0]
