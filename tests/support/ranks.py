"""Ranks: one function on several real ones, which are spawned processes in a gloo group, or as one of imagined ones."""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from internal_state import forget_internal_errors
from interpreter import interpret_quickly
from torch.testing._internal.distributed.fake_pg import FakeStore

#: How many times longer than usual ranks may take: for a machine that does other things too.
PATIENCE = float(os.environ.get("RANKS_PATIENCE", "1"))


@contextlib.contextmanager
def imagined_ranks(count: int, store: dist.Store | None = None) -> Iterator[None]:
    """Let this process be the first rank of a group whose others do not exist: what collectives give means nothing."""
    dist.init_process_group("fake", store=store or FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def overwrite_memory(group: Any) -> None:
    """Fill a group's symmetric memory, words aside, between two barriers: so that no call reads what none has written.

    Collective.
    """
    from asynctp_kernels.cuda.runtime.memory import existing_memory

    dist.barrier(group)
    memory = existing_memory(group)
    assert memory is not None, "the kernels have no memory: something else ran"
    for name, area in memory.areas.items():
        if "words" not in name:
            area.memory.fill_(0xFF)
    dist.barrier(group)


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on each rank and return what each returned, in rank order.

    `fn` must be importable (a module-level function): ranks are forked from a process that has imported torch, not from
    this one. The default group is gloo. Every rank's result is saved with `torch.save`, so tensors come back as they
    were.

    Raises:
        RuntimeError: a rank raised (its traceback is the message), or did not end within `timeout_s` times `PATIENCE`.
    """
    with tempfile.TemporaryDirectory() as folder:
        context, environment = forking(), dict(os.environ)
        ranks = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, environment, fn, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _join(ranks, timeout_s * PATIENCE, Path(folder))
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


#: imported before ranks are forked
_PRELOADED = [
    "torch",
    "torch._inductor.compile_fx",
    "torch._inductor.kernel_template_choice",
    "torch._inductor.cudagraph_trees",
    "torch.distributed.tensor.experimental._attention",
    "torch.distributed.tensor.parallel",
    "torch.utils.cpp_extension",
    "asynctp_passes.steps",
    "asynctp_passes.remat.joint",
    "asynctp_passes.remat.partition",
    "asynctp_kernels.cuda",
    "pytest",
    "hypothesis",
    "warm",
]
_READ_AT_IMPORT = ("OMP_", "TORCH", "PYTORCH", "TRITON_", "PYTHON")
_READ_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHELASTIC_RESTART_COUNT")
#: `take_environment` does what torch does with it at import
_NO_CACHES = ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
#: what is known of the process from which others are forked, by the environment that it read; the last is in use
_servers: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}


def forking() -> Any:
    """A context for processes that are forked from one with torch, which read this environment when it was imported.

    There is one such process for each environment, as long as this process lives: torch takes seconds to import.
    """
    read = frozenset(
        item
        for item in os.environ.items()
        if item[0].startswith(_READ_AT_IMPORT) and item[0] not in _READ_LATER and item != _NO_CACHES
    )
    if not _servers or next(reversed(_servers)) != read:
        state = vars(multiprocessing.forkserver._forkserver)  # type: ignore[attr-defined]
        if _servers:
            _servers[next(reversed(_servers))] = dict(state)
        _servers[read] = _servers.pop(read, None) or vars(multiprocessing.forkserver.ForkServer())
        state.update(_servers[read])
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # Python 3.11 does not tell that process where modules are, and passes over those that are not found
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        if _NO_CACHES in os.environ.items():
            del os.environ[_NO_CACHES[0]]
        multiprocessing.forkserver.ensure_running()
    return context


def take_environment(environment: Mapping[str, str]) -> None:
    """On a process that was forked: have this environment, and no other."""
    assert "warm" in sys.modules, "the process from which this one was forked has not imported what is preloaded"
    os.environ.clear()
    os.environ.update(environment)
    if _NO_CACHES in environment.items():
        torch.compiler.config.force_disable_caches = True


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    take_environment(environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    interpret_quickly()
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        result = fn(rank, world_size, *args)
        told = forget_internal_errors()
        assert not told, f"asynctp failed: {told}"
        torch.save(result, Path(folder, f"{rank}.pt"))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.err").write_text(traceback.format_exc())
        raise


def _join(ranks: list[Any], timeout_s: float, folder: Path) -> None:
    """Wait for every rank; stop at the first failure, since its peers would wait for it in vain."""
    until = time.monotonic() + timeout_s
    while running := [process.sentinel for process in ranks if process.is_alive()]:
        if any(process.exitcode not in (None, 0) for process in ranks):
            break
        if time.monotonic() > until:
            raise RuntimeError(f"ranks did not end within {timeout_s} s")
        wait(running, timeout=until - time.monotonic())
    failed = [(i, p.exitcode) for i, p in enumerate(ranks) if p.exitcode not in (None, 0)]
    if failed:
        errors = "\n".join(path.read_text() for path in sorted(folder.glob("*.err")))
        raise RuntimeError(f"ranks failed (rank, exit code): {failed}\n{errors}")
