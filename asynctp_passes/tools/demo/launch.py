"""Start one process a rank on this machine, and stop all of them when one fails."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankError(RuntimeError):
    """A rank failed, or the ranks did not end in time; the message carries the rank's own error."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 900) -> Any:
    """Call `fn(rank, world_size, *args)` on each rank of a new group (nccl with GPUs, else gloo).

    Args:
        world_size: Number of processes.
        fn: A module-level function (ranks are spawned, so it is imported by name).
        args: Its other arguments; they must pickle.
        timeout_s: Seconds after which the ranks are stopped.

    Returns:
        What `fn` returned on rank 0.

    Raises:
        RankError: A rank raised or died, or `timeout_s` passed.
    """
    with tempfile.TemporaryDirectory(prefix="asynctp-") as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, fn, args), daemon=False)
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, timeout_s, Path(folder))
            return torch.load(Path(folder, "result.pt"), weights_only=False)
        finally:
            _stop(ranks)


def _rank_main(rank: int, world_size: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        backend = _set_up(rank, world_size)
        store = f"file://{folder}/store"
        dist.init_process_group(
            backend, init_method=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
        )
        result = fn(rank, world_size, *args)
        if rank == 0:
            torch.save(result, Path(folder, "result.pt"))
        dist.barrier()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BaseException:
        Path(folder, f"{rank}.error").write_text(f"{time.time()}\n{traceback.format_exc()}")
        os._exit(1)  # a peer may wait for us in a collective: leave without joining it


def _set_up(rank: int, world_size: int) -> str:
    """Share the cores among the ranks, or give each its GPU; returns the backend of the group."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        return "nccl"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    return "gloo"


def _wait(ranks: Sequence[BaseProcess], timeout_s: float, folder: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode not in (None, 0) for process in ranks):
            break
        if time.monotonic() > deadline:
            raise RankError(f"the {len(ranks)} ranks did not end within {timeout_s:.0f} s")
        time.sleep(0.05)
    failed = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
    if failed:
        raise RankError(_first_error(folder, failed))


def _first_error(folder: Path, failed: Mapping[int, int | None]) -> str:
    """The cause: a rank that died without a word, else the first error. Peers' errors only say that it went away."""
    errors = {}
    for path in folder.glob("*.error"):
        when, _, text = path.read_text().partition("\n")
        errors[int(path.stem)] = (float(when), text)
    silent = {rank: code for rank, code in failed.items() if rank not in errors}
    if silent or not errors:
        deaths = ", ".join(f"rank {rank} died with exit code {code}" for rank, code in silent.items())
        return f"{deaths} and left no error (a code of -9 is a kill, often for want of memory)"
    rank = min(errors, key=lambda rank: errors[rank][0])
    return f"rank {rank} failed:\n{errors[rank][1]}"


def _stop(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
        if process.pid is not None:
            process.join()
