"""Draw the figures of the README and the documentation from raw results: `python tests/support/figures.py`.

Needs matplotlib. The figures have their numbers from the tables of `asynctp bench --e2e` under docs/results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asynctp_passes.tools.plots import pyplot

ROOT = Path(__file__).resolve().parents[2]
RESULTS, IMAGES = ROOT / "docs" / "results", ROOT / "docs" / "images"
#: machine, date, tables (a later one counts where two have a bar), and the sizes that are drawn
STEPS = (
    (
        "4 × H200\n2026-11-28",
        ("2026-11-28-h200x4-later/steps.txt", "2026-11-28-h200x4-later/steps-bf16.txt"),
        ("70b", "8b"),
    ),
    ("2 × H100\n2026-11-25", ("2026-11-25-h100x2/e2e.txt",), ("70b", "8b")),
    ("4 × H100\n2026-11-28", ("2026-11-28-h100x4/steps-2.15.txt",), ("70b", "8b")),
)
KINDS = {"bf16": "bf16", "fp8": "fp8 tensorwise", "fp8-rowwise": "fp8 rowwise"}
BACKENDS = {"intree": ("PyTorch's async TP", "#d98200"), "asynctp": ("asynctp", "#1f6feb")}
_ROW = re.compile(r"(\S+) +(\S+) +1x8192 +(?:sp step +)?(\S+) +\S+ +([\d.]+)x")


def speeds(tables: Iterable[str]) -> dict[tuple[str, str, str], float]:
    """(size, kind, backend) → a training step's speed, as times plain Inductor's, with 8192 tokens."""
    found = (_ROW.match(line) for table in tables for line in (RESULTS / table).read_text().splitlines())
    return {match.group(1, 2, 3): float(match[4]) for match in found if match is not None}


def draw_steps(plots: Any, path: Path) -> None:
    """Bars of how much faster both are than plain Inductor: a group a model and dtype, a panel a machine."""
    panels = [(title, speeds(tables), sizes) for title, tables, sizes in STEPS]
    groups = [[(s, k) for s in sizes for k in KINDS if (s, k, "asynctp") in found] for _, found, sizes in panels]
    figure, axes = plots.subplots(
        1, len(panels), figsize=(10, 3.6), sharey=True, layout="constrained", width_ratios=[len(one) for one in groups]
    )
    for axis, (title, found, _), group in zip(axes, panels, groups, strict=True):
        for index, (backend, (label, color)) in enumerate(BACKENDS.items()):
            heights = [100 * (found[(*one, backend)] - 1) for one in group]
            places = [place + 0.4 * index - 0.2 for place in range(len(group))]
            bars = axis.bar(places, heights, 0.38, color=color, label=label if axis is axes[0] else None)
            axis.bar_label(bars, [f"{one:.0f}" for one in heights], fontsize=7)
        axis.axhline(0, color="#57606a", linewidth=0.8)
        axis.set_xticks(
            range(len(group)), [f"{size.upper()}\n{KINDS[kind]}".replace(" ", "\n") for size, kind in group], fontsize=7
        )
        axis.set_title(title, fontsize=9)
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("training step: % faster\nthan plain Inductor", fontsize=8)
    figure.suptitle("Two blocks of Llama 3, 8192 tokens, forward and backward", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    plots = pyplot()
    if plots is None:
        print("matplotlib is not installed: pip install matplotlib", file=sys.stderr)
        return 1
    plots.rcParams["svg.hashsalt"] = "asynctp"
    plots.rcParams["savefig.facecolor"] = "white"
    IMAGES.mkdir(exist_ok=True)
    draw_steps(plots, IMAGES / "steps.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
