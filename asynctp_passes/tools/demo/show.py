"""Parts of what the demo prints: a chart of the losses, and the verdict on losses and fusions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asynctp_passes.reporting.report import Report

#: Largest difference of two losses that is put down to rounding. Both runs do the same sums in another order.
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-2}

_BOTH, _FIRST, _SECOND = "*", "o", "x"


def chart(curves: Mapping[str, Sequence[float]], width: int = 64, height: int = 12) -> str:
    """Draw two curves of equal length over the steps: `o` and `x`, and `*` where they fall on one place."""
    (first, a), (second, b) = curves.items()
    low, high = min(*a, *b), max(*a, *b)
    columns = min(width, len(a))
    grid = [[" "] * columns for _ in range(height)]
    for mark, values in ((_FIRST, a), (_SECOND, b)):
        for column in range(columns):
            value = values[column * (len(values) - 1) // max(1, columns - 1)]
            row = round((high - value) / ((high - low) or 1.0) * (height - 1))
            grid[row][column] = mark if grid[row][column] in (" ", mark) else _BOTH
    lines = []
    for row, cells in enumerate(grid):
        label = f"{high - (high - low) * row / (height - 1):6.2f}"
        lines.append(f"{label if row % 3 == 0 or row == height - 1 else '':>6} |{''.join(cells)}")
    lines.append(f"{'':>6} +{'-' * columns}")
    lines.append(f"{'loss':>6}  step 1 to {len(a)}:  {_FIRST} {first}   {_SECOND} {second}   {_BOTH} both")
    return "\n".join(lines)


@dataclass(frozen=True)
class Verdict:
    """Whether the demo showed what it claims, with the lines that say so."""

    good: bool
    lines: tuple[str, ...]


def judge(curves: Mapping[str, Sequence[float]], reports: Sequence[Report], expected: int, tolerance: float) -> Verdict:
    """Compare the two loss curves and count the fused collectives.

    Args:
        curves: Losses of each step, by backend: two of them.
        reports: The reports of the asynctp run.
        expected: Collectives next to a matmul in the forward graph, and in the backward graph.
        tolerance: The largest difference of losses that passes.
    """
    agree, curve_lines = _judge_curves(curves, tolerance)
    fused, fused_lines = _judge_fusions(reports, expected)
    return Verdict(agree and fused, (*curve_lines, *fused_lines))


def _judge_curves(curves: Mapping[str, Sequence[float]], tolerance: float) -> tuple[bool, list[str]]:
    names = list(curves)
    a, b = curves.values()
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    worst = max(differences, key=lambda value: (math.isnan(value), value))
    middle = len(a) // 2
    lines = [f"  step {'':<6}{'1':>9}{middle + 1:>9}{len(a):>9}"]
    lines += [f"  {name:<11}{v[0]:>9.4f}{v[middle]:>9.4f}{v[-1]:>9.4f}" for name, v in curves.items()]
    agree = worst <= tolerance
    sign, word = ("<=", "agree") if agree else (">", "DISAGREE")
    lines.append(f"  {names[0]} and {names[1]} {word}: largest difference {worst:.2g} {sign} tolerance {tolerance:g}")
    return agree, lines


def _judge_fusions(reports: Sequence[Report], expected: int) -> tuple[bool, list[str]]:
    good = True
    lines = []
    for phase in ("forward", "backward"):
        mine = [report for report in reports if report.phase == phase]
        fused = sum(len(report.fused) for report in mine)
        missed = sum(len(report.missed) for report in mine)
        good = good and fused == expected and not missed
        lines.append(f"  {phase:<9} {fused} of {expected} collectives next to a matmul are fused, {missed} missed")
        others = Counter((one.outcome.lower(), one.code, one.name) for report in mine for one in report.others)
        lines += [f"            {count} others {done}: {code} {name}" for (done, code, name), count in others.items()]
    return good, lines
