"""The page of all reasons, made of the catalogue and of the programs that show each reason.

python tests/support/reasons_page.py     writes docs/reference/reasons.md
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from pathlib import Path

from asynctp_passes.reasons import CATALOGUE, Reason
from asynctp_passes.tools.reason_programs import PROGRAMS, RANKS, Program

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "reasons.md"

_INTRODUCTION = f"""\
# Reasons

Find a code of a report here: why a [chain](../glossary.md) was not fused, and how to mend the program.

- A MISSED chain is in scope: it is a warning, and [may raise](report.md#strictness). For a SKIPPED collective there is
  nothing to do, where no remedy says otherwise. [Other outcomes](report.md#outcomes) say what is done instead.
- A second remedy, "reduced", is for a reduce-scatter or an all-reduce.
- Of a program, lines with `-` give the reason, and those with `+` are fused, on {RANKS} ranks. `gather`, `scatter` and
  `reduce` are the functional collectives: sums, of dimension 0. `asynctp reasons CODE` prints both as a script.
- A MISSED code without a program needs a GPU, or a graph that `torch.compile` does not make."""

_SHORTER = {
    "all_gather_tensor(": "gather(",
    "reduce_scatter_tensor(": "scatter(",
    "all_reduce(": "reduce(",
    ', "sum", 0, group)': ")",
    ', "sum", group)': ")",
    ", 0, group)": ")",
    ", group)": ")",
    "torch.float8_e4m3fn": "float8_e4m3fn",
    "torch.int32": "int32",
}
_FAMILIES = {
    "0": ("Scope", "SKIPPED"),
    "1": ("Structure", "MISSED"),
    "2": ("Legality", "MISSED"),
    "3": ("Kernel limits", "MISSED"),
    "4": ("Cost", "SKIPPED"),
    "9": ("Internal", "MISSED"),
}
"""The families of codes, by their first digit, and what becomes of a collective that has one of them."""

_NOTHING = "nothing to do"


def page() -> str:
    """The whole page, as Markdown."""
    lines = [_INTRODUCTION]
    family = ""
    for reason in sorted(CATALOGUE.values(), key=lambda entry: entry.code):
        if reason.code[3] != family:
            family = reason.code[3]
            title, outcome = _FAMILIES[family]
            lines += ["", f"## {family}xx {title}: {outcome}"]
        lines += ["", f"### {reason.code} {reason.name}", "", _text(reason)]
        if reason.code in PROGRAMS:
            lines += ["", *_difference(*PROGRAMS[reason.code])]
    return "\n".join(lines) + "\n"


def _text(reason: Reason) -> str:
    """What is the case, and the remedies, a paragraph each."""
    told = "" if reason.outcome == _FAMILIES[reason.code[3]][1] else f"{reason.outcome}: "
    text = f"{told}{reason.text}."
    paragraphs = [text if text.startswith("asynctp") else text[0].upper() + text[1:]]
    for title, hint in zip(("Remedy", "Reduced"), reason.remedies().values(), strict=False):
        if hint != _NOTHING:
            paragraphs.append(f"{title}: {hint}.")
    return "\n\n".join(paragraphs)


def _difference(missed: Program, mended: Program) -> list[str]:
    """Both programs as one difference, with sizes of tensors where they are what differs."""
    sizes, others = _sizes(missed), _sizes(mended)
    differ = {name for name in sizes.keys() & others.keys() if sizes[name] != others[name]}
    before, after = _lines(missed, differ), _lines(mended, differ)
    lines = list(difflib.unified_diff(before, after, n=len(before), lineterm=""))[3:]
    return ["```diff", *(f" # {name}={value}" for name, value in missed.options.items()), *lines, "```"]


def _sizes(program: Program) -> dict[str, str]:
    """The sizes of each tensor of a program on one rank, and its dtype where that is not float32."""
    names = inspect.signature(program.call).parameters
    return {name: _shortened(str(sizes)) for name, sizes in zip(names, program.tensors, strict=False)}


def _lines(program: Program, sized: set[str]) -> list[str]:
    """The lines of a program, after the sizes of some tensors."""
    sizes = ", ".join(f"{name}: {sizes}" for name, sizes in _sizes(program).items() if name in sized)
    source = inspect.getsource(program.call)
    body = textwrap.dedent(source[source.index(":\n", source.index("->")) + 2 :])
    return [*([f"# {sizes}"] if sized else []), *_shortened(body).splitlines()]


def _shortened(source: str) -> str:
    for long, short in _SHORTER.items():
        source = source.replace(long, short)
    return source


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
