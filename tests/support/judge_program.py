"""Judge programs that differ by rank by hand, and print the smallest part of each that has the same fault.

python tests/support/judge_program.py "focused('later', 0, 2)"            in lockstep
python tests/support/judge_program.py --ranks "mixed(7, 4)"               on real ranks
python tests/support/judge_program.py "Program(origin=..., ...)"          as a failing test prints it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import rank_programs
import rank_writer
from rank_lockstep import Verdict, check
from rank_pool import judge_on_ranks
from rank_programs import Program, smaller

__all__ = ["on_ranks", "report"]


def on_ranks(program: Program) -> Verdict:
    """What real ranks find."""
    return judge_on_ranks([program])[0]


def report(program: Program, verdict: Verdict, judge: Callable[[Program], Verdict] | None) -> str:
    """A fault, and the smallest part of the program that has one of the same kind; the program without a `judge`."""
    small = program if judge is None else smaller(program, lambda one: judge(one).fault == verdict.fault)
    return f"{program.origin}: {verdict.fault}: {verdict.text}\n\n{small}"


def main(arguments: Sequence[str]) -> int:
    """Judge each argument; 1 if one has a fault."""
    judge = on_ranks if "--ranks" in arguments else check
    names = {**vars(rank_programs), **vars(rank_writer)}
    faults = 0
    for text in arguments:
        if not text.startswith("--"):
            program: Program = eval(text, names)
            verdict = judge(program)
            print(report(program, verdict, judge) if verdict else f"{program}\nright", flush=True)
            faults += bool(verdict)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
