"""Draw the loss curves of several runs of train_llama.py into one picture, and say how far apart they are.

    python examples/plot_losses.py plain.jsonl fp8.jsonl --out losses.svg

Each file is what `--loss-log` wrote; a run that was resumed into the same file is one curve. The picture needs
matplotlib; without it the table is printed all the same. The curves are smoothed (`--smooth`), the table's figures are
means of the same number of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asynctp_passes.tools.plots import pyplot


class LogError(Exception):
    """A file is no log, or a picture cannot be written; the message says what to do."""


@dataclass
class Run:
    """A log: the loss by step, and the model's size, torch's version, the device and the day."""

    losses: dict[int, float] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """Read a log.

    Raises:
        LogError: The file cannot be read, or has no step.
    """
    run = Run()
    where = str(path)
    try:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path}:{number}"
            line = json.loads(text) if text.strip() else {"event": ""}
            if line["event"] == "step":
                run.losses[int(line["step"])] = float(line["loss"])
            elif line["event"] == "start":
                told = {"size": line.get("options", {}).get("size"), "torch": line.get("torch")}
                parts = [
                    *(f"{name} {value}" for name, value in told.items() if value),
                    line.get("device"),
                    line.get("date"),
                ]
                run.about += [part for part in parts if part and part not in run.about]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LogError(f"{where} is no log ({error!r}); give a file that train_llama.py --loss-log wrote") from error
    if not run.losses:
        raise LogError(f"{path} has no step; give a file that train_llama.py --loss-log wrote")
    run.losses = dict(sorted(run.losses.items()))
    return run


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Each file by its name, or by its path where several have the same name."""
    stems = [path.stem for path in paths]
    return {path.stem if stems.count(path.stem) == 1 else str(path): path for path in paths}


def smoothed(losses: dict[int, float], window: int) -> dict[int, float]:
    """The mean of the last `window` losses at each step, of fewer at the beginning."""
    steps, values = list(losses), list(losses.values())
    return {step: statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i, step in enumerate(steps)}


def table(curves: dict[str, dict[int, float]]) -> str:
    """Each curve's first and last value, and the largest distance from the first curve at a step that both have."""
    base = next(iter(curves.values()))
    width = max(len(name) for name in curves)
    lines = [f"{'':{width}}  {'steps':>6} {'first':>8} {'last':>8}  largest difference"]
    for name, curve in curves.items():
        values = list(curve.values())
        common = base.keys() & curve.keys()
        distance = max((abs(curve[step] - base[step]) for step in common), default=float("nan"))
        lines.append(f"{name:{width}}  {len(curve):>6} {values[0]:>8.4f} {values[-1]:>8.4f}  {distance:.4f}")
    return "\n".join(lines)


def draw(curves: dict[str, dict[int, float]], path: Path, title: str) -> bool:
    """Write the picture, in the format of the file's ending; False without matplotlib.

    Raises:
        LogError: It cannot be written.
    """
    plots = pyplot()
    if plots is None:
        return False
    figure, axis = plots.subplots(figsize=(7, 4.4), layout="constrained")
    for name, curve in curves.items():
        axis.plot(list(curve), list(curve.values()), label=name, linewidth=1)
    axis.set(xlabel="step", ylabel="loss (nats per byte)")
    axis.set_title(title, fontsize=9, wrap=True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(2, len(curves)), frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: of an ending that matplotlib does not know
        raise LogError(f"--out {path} cannot be written ({error}); give a file as losses.svg or losses.png") from error
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done, 2 a file is no log, or the picture cannot be written."""
    parser = argparse.ArgumentParser(prog="plot_losses", description="Draw loss curves of train_llama.py.")
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG.jsonl")
    parser.add_argument("--out", type=Path, default=Path("losses.svg"), help="the picture (default: %(default)s)")
    parser.add_argument("--smooth", type=int, default=10, metavar="N", help="mean over N steps (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.smooth < 1:
        parser.error(f"--smooth {options.smooth} is not valid; it must be at least 1")
    try:
        runs = {name: read_run(path) for name, path in named(options.logs).items()}
        curves = {name: smoothed(run.losses, options.smooth) for name, run in runs.items()}
        print(table(curves))
        print(f"(each loss is the mean of the last {options.smooth} steps; --smooth 1 shows them as they are)")
        about = dict.fromkeys(part for run in runs.values() for part in run.about)
        drawn = draw(curves, options.out, ", ".join(["Llama 3 by train_llama.py", *about]))
    except LogError as error:
        print(f"plot_losses: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}" if drawn else "no picture: it needs matplotlib (pip install matplotlib)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
