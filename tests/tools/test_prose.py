"""The pages of `docs` are plain English: short sentences, one parenthesis in each, and the words of the glossary.

`python tests/tools/test_prose.py` prints the faults of each page, and with the name of a page its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if "results" not in page.parts)

WORDS = {
    "'behind' (after)": r"\bbehind\b",
    "'likewise'": r"\blikewise\b",
    "'hide' (overlap)": r"\bhid(?:e|es|den|ing)?\b",
    "'product' (matmul)": r"\bproducts?\b",
    "'regather' (rematerialize)": r"\bregather\w*",
    "'bundle' (bucket)": r"\bbundles?\b",
}
_NO_PROSE = re.compile(r"^```.*?^```|^ {4}.*?$|^:::.*?$|^\|[-:| ]+\|$", re.MULTILINE | re.DOTALL)
_BLOCKS = re.compile(r"\n\s*\n|\n(?=#|\s*[-*|] |\s*\d+\. |\|)|(?<=[^\\])\||^#.*$", re.MULTILINE)


def sentences(markdown: str) -> Iterator[str]:
    """Sentences of paragraphs, items of lists and cells of tables. Code in a line counts as one word."""
    for block in _BLOCKS.split(_NO_PROSE.sub("", markdown)):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`+[^`]+`+", "CODE", block))
        text = re.sub(r"[*_]{2}|^\s*(?:[-*]|\d+\.) ", "", " ".join(text.split()))
        yield from re.split(r"(?<=[.?!]) ", text)


def faults(markdown: str) -> list[str]:
    """Faults of a page, each with its sentence."""
    found = []
    for sentence in sentences(markdown):
        words = len(re.findall(r"[^\W_]\S*", sentence))
        kinds = [f"{words} words"] if words > 25 else []
        kinds += ["more than one parenthesis"] if sentence.count("(") > 1 else []
        kinds += ["begins with 'What'"] if re.match(r"What\b.*\.$", sentence) else []
        kinds += [kind for kind, word in WORDS.items() if re.search(word, sentence, re.IGNORECASE)]
        found += [f"{kind}: {sentence}" for kind in kinds]
    return found


def faults_of(page: str) -> list[str]:
    return faults((DOCS / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_page_has_no_faults(page: str) -> None:
    assert faults_of(page) == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("word " * 26, "26 words"),
        ("A sum (of two) and one (of three).", "more than one parenthesis"),
        ("What is gathered is a shard.", "begins with 'What'"),
        ("| x | It runs behind the matmul. |", "'behind' (after)"),
        ("- Scatters likewise.", "'likewise'"),
        ("Two products.", "'product' (matmul)"),
    ],
)
def test_fault_is_found(text: str, kind: str) -> None:
    assert [fault.split(":")[0] for fault in faults(text)] == [kind]


def test_code_and_questions_are_no_faults() -> None:
    sentence = "What is a shard? `f(x)(y)` (of `g(behind)`)."
    blocks = "```python\n# behind\n```\n\n    likewise"
    assert faults("\n\n".join([sentence, blocks, "Word. " * 30])) == []


if __name__ == "__main__":
    for page in sys.argv[1:] or PAGES:
        print(*(f"{page}: {fault}" for fault in faults_of(page)), sep="\n", end="\n" if faults_of(page) else "")
