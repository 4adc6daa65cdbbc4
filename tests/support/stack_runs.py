"""Run the programs of `tests/stacks`, each in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run_stack(
    program: Path, *arguments: object, launcher: tuple[str, ...] = (), environment: Mapping[str, str] | None = None,
    paths: Mapping[str, list[Path]] | None = None, cwd: Path | None = None, timeout_s: float = 1200,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run it on CPUs, without a network, and without `ASYNCTP_*` variables but those given; errors go to its output.

    Args:
        program: The program.
        arguments: Its arguments.
        launcher: Python's arguments before the program, as `TWO_RANKS`.
        environment: Variables for it.
        paths: Folders that come first in variables such as `PYTHONPATH`.
        cwd: Where it runs.
        timeout_s: Seconds after which it is ended.
    """
    given = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCTP_")}
    given |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
    for name, folders in (paths or {}).items():
        given[name] = os.pathsep.join(filter(None, [*map(str, folders), given.get(name, "")]))
    return subprocess.run(
        [sys.executable, *launcher, str(program), *map(str, arguments)],
        cwd=cwd,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Its output; the test fails if it did."""
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def written_by_two_ranks(program: Path, folder: Path, *arguments: str, **options: Any) -> list[dict[str, Any]]:
    """Run a program that writes FOLDER/RANK.json on each of two ranks, and read those; `options` are `run_stack`'s."""
    output_of(run_stack(program, folder, *arguments, launcher=TWO_RANKS, **options))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
