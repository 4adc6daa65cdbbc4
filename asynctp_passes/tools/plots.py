"""Pictures of measurements, for those who have matplotlib: the extra `plots`.

They are drawn from what `bench.json` and `e2e.json` hold, so a picture can be drawn again from a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: (K, N) per rank: what Llama-3 70B (TP 4) and 8B multiply after a gather and before a scatter
GATHER_SHAPES = ((8192, 2560), (8192, 14336), (4096, 7168), (8192, 3584))
SCATTER_SHAPES = ((2048, 8192), (7168, 8192), (3584, 4096))

_CALLS = {
    "nccl": ("cuBLAS + NCCL", "#7d8590"),
    "intree": ("PyTorch's async TP", "#d98200"),
    "oneshot": ("PyTorch's one-shot", "#8250df"),
    "twoshot": ("PyTorch's two-shot", "#bf3989"),
    "asynctp": ("asynctp", "#1f6feb"),
}
"""Variants of calls, with their names and colours."""
_STEPS = {"inductor": ("plain Inductor", "#9aa5b1"), **{name: _CALLS[name] for name in ("intree", "asynctp")}}
_COLUMNS = (4, 3, 5)
"""Panels in a line, where there are so many: what leaves the fewest places free."""


def pyplot() -> Any:
    """`matplotlib.pyplot`, which draws into files only; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_calls(told: Mapping[str, Any], path: Path) -> bool:
    """Draw how near calls come to their bound, over M: a panel for each op, kind of operands, K and N.

    Args:
        told: What `bench.json` holds.
        path: Where to write; its ending names the format.

    Returns:
        False without matplotlib, or where no variant gave a right result.
    """
    plots = pyplot()
    panels = _panels(told["rows"])
    if plots is None or not panels:
        return False
    figure = _calls(plots, panels)
    figure.suptitle(f"Time of calls, {_model(told['rows'])}: {_machine(told)}")
    figure.savefig(path)
    plots.close(figure)
    return True


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The points of each variant by panel: (M, bound / time in a CUDA graph)."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        for name in _CALLS:
            if name in row["timings"] and name not in row["wrong"]:
                curves = panels.setdefault(f"{row['op']} {row['kind']}, K={row['k']}, N={row['n']}", {})
                curves.setdefault(name, []).append((row["m"], row["bound"] / row["timings"][name]["graph"]))
    return panels


def _calls(plots: Any, panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> Any:
    """The figure, without its title."""
    columns = min(len(panels), min(_COLUMNS, key=lambda count: -len(panels) % count))
    lines = -(-len(panels) // columns)
    size = (max(6.5, 3.6 * columns), 2.5 * lines + 1.2)
    figure, axes = plots.subplots(
        lines, columns, figsize=size, squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    handles: dict[str, Any] = {}
    for index, (axis, (title, curves)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        for name, points in curves.items():
            label, colour = _CALLS[name]
            places, values = zip(*sorted(points), strict=True)
            (handles[label],) = axis.plot(places, values, marker="o", markersize=4, color=colour, label=label)
        axis.axhline(1, color="#57606a", linewidth=0.6)
        axis.set_title(title, fontsize=9)
        if index + columns >= len(panels):
            axis.set_xlabel("M (rows)", fontsize=8)
            axis.tick_params(labelbottom=True)
    every = [point for curves in panels.values() for points in curves.values() for point in points]
    marks = sorted({rows for rows, _ in every})
    first = axes[0][0]
    first.set_xscale("log", base=2)
    first.set_xticks(marks[:: -(-len(marks) // 6)], [_rows(one) for one in marks[:: -(-len(marks) // 6)]])
    first.minorticks_off()
    first.set_ylim(0, 1.06 * max(1.0, *(value for _, value in every)))
    figure.supylabel("bound / time, in a CUDA graph (1: nothing but the bound)", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _rows(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _model(rows: Sequence[Mapping[str, Any]]) -> str:
    """The model that the shapes are of, where they are the built-in ones."""
    known = {"gather": GATHER_SHAPES, "scatter": SCATTER_SHAPES, "all_reduce": SCATTER_SHAPES}
    built_in = all((row["k"], row["n"]) in known.get(row["op"], ()) for row in rows)
    return "shapes of Llama 3 70B and 8B" if built_in else "shapes of one's own"


def _machine(told: Mapping[str, Any]) -> str:
    """`4 × NVIDIA H200, torch 2.11.0+cu130, 2026-11-22`."""
    machine = str(told["machine"]).replace(" x ", " × ", 1)
    return f"{machine}, torch {told['torch']}, {told['date']}" if "torch" in told else f"{machine}, {told['date']}"


def draw_steps(told: Mapping[str, Any], path: Path) -> bool:
    """Draw how fast each backend is against plain compile: bars with their values, a group for each problem.

    Args:
        told: What `e2e.json` holds.
        path: Where to write; its ending names the format.

    Returns:
        False without matplotlib, or rows.
    """
    plots = pyplot()
    if plots is None or not told["rows"]:
        return False
    on_cpu = "CPU" in told["machine"]  # PyTorch's async TP does nothing there: its rows are plain Inductor again
    figure = _bars(plots, [row for row in told["rows"] if row["backend"] != "intree" or not on_cpu])
    sizes = " and ".join(dict.fromkeys(str(row["problem"]["size"]).upper() for row in told["rows"]))
    figure.suptitle(f"Blocks of Llama 3 {sizes}: {_machine(told)}", fontsize=10, wrap=True)
    figure.savefig(path)
    plots.close(figure)
    return True


def _bars(plots: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """The figure, without its title."""
    base = {_problem(row): row for row in rows if row["backend"] == "inductor"}
    figure, axes = plots.subplots(1, 2, figsize=(5 + 2.6 * len(base), 4.2), sharey=True, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, (part, title) in zip(axes, (("step", "training step"), ("forward", "forward")), strict=True):
        asked = [problem for problem, row in base.items() if row[part] is not None]
        for index, (backend, (label, colour)) in enumerate(_STEPS.items()):
            mine = [row for row in rows if row["backend"] == backend and _problem(row) in asked]
            speeds = [base[_problem(row)][part] / row[part] for row in mine]
            places = [asked.index(_problem(row)) + 0.28 * (index - 1) for row in mine]
            bars = axis.bar(places, speeds, 0.26, color=colour)
            texts = [f"{one:.2f}" if row["right"] else "WRONG" for one, row in zip(speeds, mine, strict=True)]
            axis.bar_label(bars, texts, fontsize=8, padding=1)
            if mine:
                handles[label] = bars
        axis.axhline(1, color="#57606a", linewidth=0.6)
        axis.set_xticks(range(len(asked)), [each.replace(" ", "\n") for each in asked], fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.1)
    axes[0].set_ylabel("times as fast as plain Inductor", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _problem(row: Mapping[str, Any]) -> str:
    each = row["problem"]
    parallel = f" tp {each['part']}" if each.get("parallel") == "tp" else ""  # older files do not name it
    return f"{each['size'].upper()} {each['kind']} {each['batch']}x{each['sequence']}{parallel}"
