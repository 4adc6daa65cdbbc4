"""Parts of pages that are made of the code: each stands between two comments that name it.

python tests/support/page_parts.py     writes them into docs/reference/config.md, report.md and tried.md
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import found_programs
import strict_kinds

from asynctp_passes.config import RUNTIME_VARIABLES, STEPS, Config

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"

_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def _fields() -> str:
    """The fields of `Config`, by its docstring."""
    attributes = inspect.getdoc(Config).split("Attributes:\n")[1]  # type: ignore[union-attr]
    meaning = {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(attributes)}
    lines = ["| Field | Variable | Default | Meaning |", "|---|---|---|---|"]
    for name in Config.field_names():
        default = repr(getattr(Config(), name)).replace("'", '"')
        lines.append(f"| `{name}` | `ASYNCTP_{name.upper()}` | `{default}` | {meaning[name]} |")
    return "\n".join(lines)


def _variables() -> str:
    rows = [f"| `ASYNCTP_{name.upper()}` | {text[0].upper()}{text[1:]}. |" for name, text in RUNTIME_VARIABLES.items()]
    return "\n".join(["| Variable | Meaning |", "|---|---|", *rows])


def _steps() -> str:
    return "\n".join(f"- `{name}`: {text}." for name, text in STEPS.items())


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "config.md": {"fields": _fields, "steps": _steps, "variables": _variables},
    "report.md": {"strictness": strict_kinds.markdown},
    "tried.md": {"found": found_programs.markdown},
}
"""What writes each part, by the page and the part's name."""


def written(page: str) -> str:
    """A page with its parts as they are now."""
    text = (FOLDER / page).read_text(encoding="utf-8")
    for name, write in PARTS[page].items():
        begin, end = f"<!-- {name}: written by tests/support/page_parts.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{write()}\n\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for page in PARTS:
        (FOLDER / page).write_text(written(page), encoding="utf-8")
