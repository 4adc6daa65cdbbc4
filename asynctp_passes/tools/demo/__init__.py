"""`asynctp demo`: train a small tensor-parallel transformer with and without asynctp, on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from asynctp_passes.config import can_be_written
from asynctp_passes.reporting import files
from asynctp_passes.reporting.graph_index import INDEX
from asynctp_passes.reporting.report import Report
from asynctp_passes.tools.demo.launch import RankError, run_ranks
from asynctp_passes.tools.demo.model import collectives_per_direction
from asynctp_passes.tools.demo.show import TOLERANCE, chart, judge
from asynctp_passes.tools.demo.train import TEXT, Result, Settings, train_both
from asynctp_passes.tools.progress import Steps

__all__ = ["DemoError", "RankError", "default_ranks", "missing_compiler", "missing_headers", "run_demo"]

REPORTS = "reports.jsonl"


class DemoError(RuntimeError):
    """The demo cannot run here; the message says what is missing and how to get it."""


def default_ranks() -> int:
    """One rank a GPU, in powers of two up to 8; two where there are fewer than two GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((ranks for ranks in (8, 4) if gpus >= ranks), 2)


def run_demo(steps: int = 60, ranks: int | None = None, out: str | Path = "asynctp-out") -> bool:
    """Train twice, print what came out, and write the graph pages.

    Args:
        steps: Training steps of each run.
        ranks: Number of processes; `default_ranks()` when None.
        out: Folder for the graph pages (in `graphs/`) and the reports (appended to `reports.jsonl`).

    Returns:
        True when the losses agree within the tolerance and every collective next to a matmul was fused.

    Raises:
        DemoError: A setting is out of range, or a compiler or a second GPU is missing.
        RankError: A rank failed.
    """
    world_size = default_ranks() if ranks is None else ranks
    folder = Path(out)
    _check(steps, world_size, folder)
    graphs = folder / "graphs"
    graphs.mkdir(parents=True, exist_ok=True)
    earlier = set(graphs.glob("*.html"))
    settings = Settings(steps=steps, graph_dir=str(graphs.resolve()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(_introduction(settings, world_size, device), flush=True)
    progress = Steps("demo")
    progress.begin(f"start {world_size} processes, and train in them")
    result: Result = run_ranks(world_size, train_both, settings)
    progress.begin("compare the losses, and write the reports")
    reports = [Report.from_json(text) for text in result.reports]
    files.write(folder / REPORTS, "".join(f"{text}\n" for text in result.reports), append=True)
    verdict = judge(result.losses, reports, collectives_per_direction(settings.sizes), TOLERANCE[device])
    print(_outcome(result, reports, verdict.lines))
    written = sorted(set(graphs.glob("*.html")) - earlier - {graphs / INDEX})
    print(_written(folder, [graphs / INDEX, *written] if written else []))
    print("demo: passed" if verdict.good else "demo: FAILED, see the lines above")
    return verdict.good


def _check(steps: int, ranks: int, folder: Path) -> None:
    if steps < 2:
        raise DemoError(f"--steps {steps} is not valid; it must be at least 2")
    if ranks not in (2, 4, 8):
        raise DemoError(f"--ranks {ranks} is not valid; it must be 2, 4 or 8")
    writable = can_be_written(str(folder / "graphs"), folder=True) and can_be_written(
        str(folder / REPORTS), folder=False
    )
    if not writable:
        raise DemoError(f"--out {folder} is not valid; it must be a folder that can be written, or made")
    if torch.cuda.is_available():
        if torch.cuda.device_count() < ranks:
            raise DemoError(
                f"{ranks} ranks need {ranks} GPUs and there are {torch.cuda.device_count()}; "
                'hide the GPUs to run on the CPU: CUDA_VISIBLE_DEVICES="" asynctp demo'
            )
        return
    for problem in (missing_compiler(), missing_headers()):
        if problem:
            raise DemoError(problem)


def missing_compiler() -> str:
    """The remedy for a missing C++ compiler, which torch.compile needs on the CPU; empty when there is one."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler):
        return ""
    return (
        f"torch.compile needs a C++ compiler on the CPU, and {compiler!r} was not found; install one "
        "('apt install g++', 'dnf install gcc-c++', 'xcode-select --install') or name yours in CXX"
    )


def missing_headers() -> str:
    """The remedy for missing Python headers, which torch.compile's C++ code includes; empty when they are there."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.is_file():
        return ""
    return (
        f"torch.compile needs Python's C headers on the CPU, and {header} is not there; install them "
        "('apt install python3-dev', 'dnf install python3-devel')"
    )


def _introduction(settings: Settings, ranks: int, device: str) -> str:
    sizes = settings.sizes
    where = "GPUs over nccl" if device == "cuda" else "processes over gloo, on the CPU"
    return (
        f"Training a transformer ({sizes.layers} blocks, width {sizes.width}, {sizes.heads} heads) with tensor and "
        f"sequence parallelism on {ranks} {where}:\n{settings.steps} steps of {settings.batch} x {sizes.sequence} "
        f'bytes of {TEXT.name} (Newton, 1730), first with torch.compile alone, then with backend="asynctp".'
    )


def _outcome(result: Result, reports: Sequence[Report], verdict: Sequence[str]) -> str:
    times = [
        f"  {name:<11}first step (with compilation) {first:.0f} s, the others {rest:.1f} s"
        for name, (first, rest) in result.seconds.items()
    ]
    forward = next((report for report in reports if report.phase == "forward"), None)
    return "\n".join(
        ["", chart(result.losses), "", *verdict, *times, "", "The report of the forward graph:", "", str(forward), ""]
    )


def _written(folder: Path, pages: Sequence[Path]) -> str:
    lines = [f"  {page}" for page in pages] or ["  none written"]
    reports = f"All reports, newest last: {_own_command()} report {folder / REPORTS}"
    return "\n".join(["Graphs before and after, for a browser:", *lines, reports])


def _own_command() -> str:
    """The shell command for `asynctp`: its name, or its path where that is not found by its name."""
    script = Path(sys.executable).with_name("asynctp")
    if shutil.which("asynctp") is not None or not script.exists():
        return "asynctp"
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else str(script)
