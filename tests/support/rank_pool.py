"""Judge programs that differ by rank on real ranks: many programs in one pool of processes, each eager and compiled.

    parent ── programs ─▶ rank 0 ┐  eager; compiled, with plain ops or with kernels in Triton's interpreter
                        ▶ rank 1 ┘  and a verdict of each rank for each program, in a file
           ◀─ verdicts ──

Nothing waits without end: a group's collectives, the kernels' waits and each program have bounds. After a fault the
ranks may be anywhere, so they are killed, and new ones go on with the next program. The processes are forked from one
that has imported torch, which makes that cheap.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from interpreter import interpret_quickly
from rank_lockstep import RIGHT, Verdict, difference
from rank_programs import Program
from ranks import PATIENCE, forking

__all__ = ["SABOTAGES", "judge_on_ranks"]

WAIT_S = 30 * PATIENCE
"""Seconds that a call waits for its peers; ranks compile for unlike times."""

PROGRAM_S = 120 * PATIENCE
"""Seconds that a program may take."""

_LINGER_S = 1.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TRITON_INTERPRET": "1",
    "ASYNCTP_TIMEOUT_S": str(WAIT_S),
}
_OPTIONS: dict[str, Any] = {"strict": "off"}
_GLOO_ENDED = (
    "Timed out waiting",
    "Wait timeout",
    "Connection closed by peer",
    "Connection reset by peer",
    "pair closure",
)
_ENDED = (*_GLOO_ENDED, "PeerTimeout")


@dataclass(frozen=True)
class _Task:
    """What ranks do with programs: see `judge_on_ranks`."""

    kernels: bool
    sabotage: str
    backend: str
    wait_s: float = WAIT_S


def judge_on_ranks(
    programs: Sequence[Program],
    kernels: bool = True,
    sabotage: str = "",
    backend: str = "asynctp",
    wait_s: float = WAIT_S,
) -> list[Verdict]:
    """Run programs on real ranks, eager and compiled, and compare.

    Args:
        programs: The programs, of one number of ranks.
        kernels: Whether to run the compiled code with the interpreted kernels, too.
        sabotage: One of `SABOTAGES`, which rank 1 applies to the package: the check has to find it.
        backend: What compiles; `"inductor"` shows what a program does without the package.
        wait_s: Seconds that a collective of gloo waits for its peers.

    Returns:
        A verdict for each program: the first rank's that found a fault; `"inductor"` where plain Inductor has one too,
        which moves collectives by what a rank's memory is used for (`reorder_for_peak_memory`).
    """
    with _forkserver() as context:
        verdicts = _run(context, programs, _Task(kernels, sabotage, backend, wait_s))
        failed = [index for index, verdict in enumerate(verdicts) if verdict]
        if failed and backend == "asynctp" and not sabotage:
            plain = _run(context, [programs[index] for index in failed], _Task(False, "", "inductor"))
            for index, verdict in zip(failed, plain, strict=True):
                if verdict:
                    verdicts[index] = Verdict("inductor", f"{verdict.fault}: {verdict.text}")
    return verdicts


def _run(context: Any, programs: Sequence[Program], task: _Task) -> list[Verdict]:
    verdicts: list[Verdict] = []
    while len(verdicts) < len(programs):
        verdicts += _run_pool(context, programs[len(verdicts) :], task)
    return verdicts


@contextmanager
def _forkserver() -> Iterator[Any]:
    """A context whose processes are forked from one that has imported torch, and have the environment of a rank."""
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        yield forking()


def _run_pool(context: Any, programs: Sequence[Program], task: _Task) -> list[Verdict]:
    """Verdicts up to the first fault."""
    world = programs[0].world
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, folder, programs, task, dict(_ENVIRONMENT)))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            return _collected(Path(folder), ranks, len(programs))
        finally:
            Path(folder, "end").touch()
            for process in ranks:
                process.join(5 if all(one.exitcode == 0 for one in ranks) else 0.2)
                process.kill()
                process.join()


def _collected(folder: Path, ranks: Sequence[Any], count: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    while len(verdicts) < count:
        verdicts.append(_of_program(folder, ranks, len(verdicts)))
        if verdicts[-1]:
            break
    return verdicts


def _of_program(folder: Path, ranks: Sequence[Any], index: int) -> Verdict:
    """What the ranks found; once one has found a fault, the others have a moment to say what they did."""
    until = time.monotonic() + PROGRAM_S
    found: dict[int, Verdict] = {}
    while len(found) < len(ranks) and time.monotonic() < until:
        gone = any(process.exitcode is not None for process in ranks)
        for rank in set(range(len(ranks))) - set(found):
            file = folder / f"{index}.{rank}"
            if file.exists():
                found[rank] = Verdict(*json.loads(file.read_text()))
        if gone or any(found.values()):
            until = min(until, time.monotonic() + _LINGER_S)
        time.sleep(0.02)
    faults = {rank: verdict for rank, verdict in sorted(found.items()) if verdict}
    silent = sorted(set(range(len(ranks))) - set(found))
    if faults:
        first = min(faults, key=lambda rank: faults[rank].fault == "hang")  # a peer's, where others waited in vain
        return Verdict(faults[first].fault, "\n".join(f"rank {rank}: {one.text}" for rank, one in faults.items()))
    return Verdict("hang", f"ranks {silent} did not end, of {ranks}") if silent else RIGHT


# --- on a rank ------------------------------------------------------------------------------------------------
def _rank(rank: int, folder: str, programs: Sequence[Program], task: _Task, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    interpret_quickly()
    warnings.simplefilter("ignore")
    wait = timedelta(seconds=task.wait_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=programs[0].world, timeout=wait
    )
    from asynctp_passes.planning import overlap

    overlap.LEAST_BYTES = 0  # type: ignore[misc]
    if task.sabotage and rank == 1:
        SABOTAGES[task.sabotage]()
    groups = _groups(programs[0], rank)
    for index, program in enumerate(programs):
        try:
            verdict = _judge(program, rank, groups, task)
        except BaseException as error:
            verdict = _of_error(error)
        file = Path(folder, f"{index}.{rank}")
        file.with_suffix(f".{rank}.new").write_text(json.dumps([verdict.fault, verdict.text]))
        file.with_suffix(f".{rank}.new").rename(file)
        if verdict:  # peers may wait for what this rank keeps
            while not Path(folder, "end").exists():
                time.sleep(0.05)
            break
    with suppress(RuntimeError):  # a peer had a fault
        dist.barrier()  # a collective whose result is dropped may still be under way
    sys.stdout.flush()
    dist.destroy_process_group()


def _groups(program: Program, rank: int) -> dict[str, tuple[str, int]]:
    """The names and sizes of this rank's groups."""
    found = {}
    for name, members in program.outline.groups().items():
        made = [dist.group.WORLD if name == "ALL" else dist.new_group(list(ranks)) for ranks in members]
        own = next(group for group, ranks in zip(made, members, strict=True) if rank in ranks)
        found[name] = (own.group_name, own.size())
    return found


def _judge(program: Program, rank: int, groups: dict[str, tuple[str, int]], task: _Task) -> Verdict:
    """Eager, then compiled: with plain ops, or twice with the kernels, as a second call meets what the first left."""
    import asynctp_passes.ops

    torch._dynamo.reset()
    os.environ["ASYNCTP_CPU_IMPLEMENTATION"] = mode = "interpreted" if task.kernels else "reference"
    asynctp_passes.ops.refresh()
    function, inputs = program.function(rank, groups), program.make_inputs(rank)
    with torch.no_grad():
        expected = function(*inputs)
        options = {"fallback_by_default": True, **(_OPTIONS if task.backend == "asynctp" else {})}
        compiled = torch.compile(function, backend=task.backend, options=options, dynamic=program.dynamic[rank])
        for _ in range(2 if task.kernels else 1):
            for index, pair in enumerate(zip(expected, compiled(*inputs), strict=True)):
                if text := difference(*pair, program.tolerance()):
                    return Verdict("values", f"{mode}: result {index}: {text}")
    return RIGHT


def _of_error(error: BaseException) -> Verdict:
    """A hang where a bounded wait ended, else a crash."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) and inner not in chain:
        chain.append(inner)
    text = " ".join(f"{type(chain[-1]).__name__}: {chain[-1]}".split())[:600]
    hung = any(sign in f"{type(each).__name__} {each}" for each in chain for sign in _ENDED)
    return Verdict("hang" if hung else "crash", text or traceback.format_exc(limit=-3))


# --- faults on purpose ----------------------------------------------------------------------------------------
def _wrong_values() -> None:
    """Let the rewrite multiply an operand of every fused op by 1.5."""
    _after_rewrite(lambda graph, op: _replace_first(graph, op, 1.5))


def _another_call() -> None:
    """Let the rewrite make one more communicating op."""

    def add(graph: Any, op: Any) -> None:
        group = next(arg for arg in reversed(op.args) if isinstance(arg, str) and arg != "sum")
        source = next(iter(graph.nodes))
        with graph.inserting_before(op):
            extra = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (source, "sum", group))
            extra.meta["val"] = source.meta["val"]
            waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (extra,))
            waited.meta["val"] = source.meta["val"]

    _after_rewrite(add)


def _replace_first(graph: Any, op: Any, number: float) -> None:
    source = op.all_input_nodes[0]
    with graph.inserting_before(op):
        scaled = graph.call_function(torch.ops.aten.mul.Tensor, (source, number))
    scaled.meta.update(source.meta)
    op.replace_input_with(source, scaled)


def _after_rewrite(spoil: Callable[[Any, Any], None]) -> None:
    """Spoil the first fused op of every graph, after it has been rewritten, and before it is wrapped to keep order."""
    from asynctp_passes.rewriting import rewrite

    keep_order = rewrite.keep_order

    def spoiled(graph: Any, ordered: Any) -> None:
        fused = [node for node in graph.nodes if "asynctp" in str(node.target) and "matmul" in str(node.target)]
        for op in fused[:1]:
            spoil(graph, op)
        keep_order(graph, ordered)

    rewrite.keep_order = spoiled


SABOTAGES: dict[str, Callable[[], None]] = {"wrong values": _wrong_values, "another call": _another_call}
"""Deliberately wrong rewrites, by name."""
