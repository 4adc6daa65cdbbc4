"""Docstrings name the thing first, and the glossary has every word of ours that pages and messages use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for folder in ("asynctp_passes", "kernels", "examples") for path in sorted((ROOT / folder).rglob("*.py"))
]
_PUT_OFF = re.compile(r"\W*(What|Of|Likewise|Another)\b")
TERMS = (
    *("chain", "shard", "stage", "push", "pull", "in flight", "exposed", "enrolled", "hoist", "rematerialize"),
    *("signal word", "box", "bucket", "deviation", "sequential", "overlap", "transport", "plan", "wire", "row numbers"),
)


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    found = [text.splitlines()[0] for text in docstrings(ast.parse(path.read_text("utf-8"))) if _PUT_OFF.match(text)]
    assert found == []


def test_the_glossary_defines_our_words() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    defined = re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.MULTILINE)
    assert defined == sorted(defined, key=lambda word: word.strip("`").lower())
    assert set(TERMS) <= set(defined)
