"""Requests of plans to the driver, waits for peers, and memory that grows, on one rank without a GPU."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import SymmetricMemoryError
from asynctp_kernels.cuda.choose.tiles import Tiles
from asynctp_kernels.cuda.choose.wire import DIRECT, PULL, PUSH
from asynctp_kernels.cuda.plans import decomposed, direct, fused
from asynctp_kernels.cuda.runtime import driver, interpreted, memory, watch
from asynctp_kernels.cuda.runtime.memory import NO_BOUND
from cuda_stubs import (
    COPY,
    FP8,
    MAIN,
    REDUCE,
    SMS,
    Awaited,
    Copied,
    Launched,
    Machine,
    Recorded,
    Waited,
    Wrote,
    gather_call,
    machine,
    scatter_call,
)
from expecttest import assert_expected_inline
from plan_runs import RANK, ROWWISE, SMALL, WORLD, gather_plan, op, scatter_plan, tiles_of
from torch.distributed.distributed_c10d import default_pg_timeout


@pytest.fixture
def here() -> Iterator[Machine]:
    with machine(RANK, WORLD) as made:
        cuda_emulated.emulate(made)
        yield made


# --- what the driver is asked for --------------------------------------------------------------------------------
def test_trace_of_a_gather() -> None:
    with machine(rank=1, world=3) as here:
        call = gather_call((256,), 64, (72,), world=3, kept=True)
        plan = fused.FusedGather(call, here.memory, tiles_of(torch.bfloat16), 2, SMS)
        *_, full = plan.run(call.a_shard, call.bs, call.biases, None, (), None)
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr(), gathered=full.data_ptr()),
            """\
main   record start
copy   await start
copy   launch stage_kernel
copy   copy 16384 B to gathered + 65536 from box of 2 + 0
copy   write arrivals[2] = 1
copy   copy 16384 B to gathered + 81920 from box of 2 + 16384
copy   write arrivals[2] = 2
copy   copy 16384 B to gathered + 0 from box of 0 + 0
copy   write arrivals[0] = 1
copy   copy 16384 B to gathered + 16384 from box of 0 + 16384
copy   write arrivals[0] = 2
copy   copy 32768 B to gathered + 32768 from own + 0
copy   record end
main   launch gemm_kernel
main   await end
main   record last""",
        )


def test_trace_of_a_gather_with_scales_and_an_outer_dim() -> None:
    with machine(rank=0, world=2) as here:
        call = gather_call((2, 64), 64, (72,), dim=1, world=2, **ROWWISE, travels=True, kept=True)
        plan = fused.FusedGather(call, here.memory, tiles_of(FP8), 1, SMS)
        plan.run(call.a_shard, call.bs, call.biases, call.a_scale, call.b_scales, None)
        arguments = here.launched("gemm_kernel").arguments
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr(), gathered=arguments["a1"].address, scales=arguments["a_scale1"]),
            """\
main   record start
copy   await start
copy   launch stage_kernel
copy   copy 256 B to scales + 256 from box of 1 + 8192
copy   copy 256 B to scales + 768 from box of 1 + 8448
copy   copy 4096 B to gathered + 4096 from box of 1 + 0
copy   copy 4096 B to gathered + 12288 from box of 1 + 4096
copy   write arrivals[1] = 1
copy   copy 4096 B to gathered + 0 from own + 0
copy   copy 4096 B to gathered + 8192 from own + 4096
copy   record end
main   launch gemm_kernel
main   await end
main   record last""",
        )


def test_trace_of_a_fused_gather_that_pushes() -> None:
    """Rank 0 is first, since it begins with what comes from rank 1."""
    with machine(rank=1, world=4) as here:
        call = gather_call((2, 128), 64, (72,), dim=1, world=4, **ROWWISE, travels=True)
        plan = fused.FusedGather(call, here.memory, tiles_of(FP8), 2, SMS)
        plan.run(call.a_shard, call.bs, call.biases, call.a_scale, call.b_scales, None)
        assert call.a_scale is not None
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr(), scales=call.a_scale.data_ptr()),
            """\
main   record start
copy   await start
copy   write free of 2 [1] = call
copy   write free of 3 [1] = call
copy   write free of 0 [1] = call
copy   write awaited = call
copy   wait free of 1 [2] == call
copy   wait free of 1 [3] == call
copy   wait free of 1 [0] == call
copy   write free of 1 [2] = 0
copy   write free of 1 [3] = 0
copy   write free of 1 [0] = 0
copy   write awaited = 0
copy   copy 1024 B to box of 0 + 49152 from scales + 0
copy   copy 8192 B to box of 0 + 0 from own + 0
copy   write landed of 0 [1] = 2
copy   copy 8192 B to box of 0 + 8192 from own + 8192
copy   write landed of 0 [1] = 4
copy   copy 1024 B to box of 3 + 50176 from scales + 0
copy   copy 16384 B to box of 3 + 16384 from own + 0
copy   write landed of 3 [1] = 4
copy   copy 1024 B to box of 2 + 50176 from scales + 0
copy   copy 8192 B to box of 2 + 16384 from own + 0
copy   write landed of 2 [1] = 2
copy   copy 8192 B to box of 2 + 24576 from own + 8192
copy   write landed of 2 [1] = 4
copy   record end
main   launch gemm_kernel
main   await end
main   record last""",
        )


def test_trace_of_a_fused_gather_that_pushes_and_is_kept() -> None:
    """The rows are copied from the inbox beside the GEMM; both read the words, which the main stream clears last."""
    with machine(rank=1, world=3) as here:
        call = gather_call((256,), 64, (72,), world=3, full=True)
        plan = fused.FusedGather(call, here.memory, tiles_of(torch.bfloat16), 2, SMS)
        *_, full = plan.run(call.a_shard, call.bs, call.biases, None, (), None)
        assert here.launched("gemm_kernel").prepared.constants["CLEARS"] is False
        rows = [each.arguments for each in here.of(Launched) if each.prepared.name == "keep_kernel"]
        assert [each["source"] for each in rows] == [1, 2, 0]
        box = here.parts("box")[1].data_ptr()
        assert [each["received_ptr"] for each in rows] == [call.a_shard.data_ptr(), box + 32768, box]
        assert {each["whole_ptr"] for each in rows} == {full.data_ptr()}
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr()),
            """\
main   record start
copy   await start
copy   write free of 2 [1] = call
copy   write free of 0 [1] = call
copy   write awaited = call
copy   wait free of 1 [2] == call
copy   wait free of 1 [0] == call
copy   write free of 1 [2] = 0
copy   write free of 1 [0] = 0
copy   write awaited = 0
copy   copy 16384 B to box of 0 + 0 from own + 0
copy   write landed of 0 [1] = 2
copy   copy 16384 B to box of 0 + 16384 from own + 16384
copy   write landed of 0 [1] = 4
copy   copy 16384 B to box of 2 + 32768 from own + 0
copy   write landed of 2 [1] = 2
copy   copy 16384 B to box of 2 + 49152 from own + 16384
copy   write landed of 2 [1] = 4
copy   record end
reduce await start
reduce launch keep_kernel
reduce wait landed of 1 [2] >= 4
reduce launch keep_kernel
reduce wait landed of 1 [0] >= 4
reduce launch keep_kernel
reduce record reduced
main   launch gemm_kernel
main   await end
main   await reduced
main   write landed of 1 [2] = 0
main   write landed of 1 [0] = 0
main   record last""",
        )


def test_trace_of_the_graph_of_a_gather_that_pushes() -> None:
    with machine(rank=0, world=2) as here:
        here.edits = True
        call = gather_call((256,), 64, (72,), world=2)
        plan = fused.FusedGather(call, here.memory, tiles_of(torch.bfloat16), 1, SMS)
        for _ in range(2):
            plan.run(call.a_shard, call.bs, call.biases, None, (), None)
        assert here.launched("gemm_kernel").arguments["words"] == here.memory.landed.at(0)
        (here.log,) = here.graphs
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr()),
            """\
graph  record start
copy   await start
copy   await flown at launch
copy   write free of 1 [0] = call
copy   write awaited = call
copy   wait free of 0 [1] == call
copy   write free of 0 [1] = 0
copy   write awaited = 0
copy   copy 32768 B to box of 1 + 0 from own + 0
copy   write landed of 1 [0] = 4
copy   record end
graph  launch gemm_kernel
graph  await end""",
        )


def test_trace_of_a_gather_that_pushes() -> None:
    with machine(rank=1, world=3) as here:
        call = gather_call((2, 64), 64, (72,), dim=1, world=3, **ROWWISE, travels=True)
        plan = decomposed.DecomposedGather(call, here.memory)
        plan.run(call.a_shard, call.bs, call.biases, call.a_scale, call.b_scales, None)
        assert call.a_scale is not None
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr(), scales=call.a_scale.data_ptr()),
            """\
main   record start
copy   await start
copy   write free of 2 [1] = call
copy   write free of 0 [1] = call
copy   write awaited = call
copy   wait free of 1 [2] == call
copy   wait free of 1 [0] == call
copy   write free of 1 [2] = 0
copy   write free of 1 [0] = 0
copy   write awaited = 0
copy   copy 512 B to box of 0 + 16384 from scales + 0
copy   copy 4096 B to box of 0 + 0 from own + 0
copy   write landed of 0 [1] = 2
copy   copy 4096 B to box of 0 + 4096 from own + 4096
copy   write landed of 0 [1] = 4
copy   copy 512 B to box of 2 + 16896 from scales + 0
copy   copy 4096 B to box of 2 + 8192 from own + 0
copy   write landed of 2 [1] = 2
copy   copy 4096 B to box of 2 + 12288 from own + 4096
copy   write landed of 2 [1] = 4
copy   record end
main   wait landed of 1 [2] >= 2
main   wait landed of 1 [2] >= 4
main   write landed of 1 [2] = 0
main   wait landed of 1 [0] >= 2
main   wait landed of 1 [0] >= 4
main   write landed of 1 [0] = 0
main   await end
main   record last""",
        )


def test_trace_of_a_gather_that_pushes_and_is_kept() -> None:
    with machine(rank=0, world=2) as here:
        call = gather_call((256,), 64, (72,), world=2, full=True)
        decomposed.DecomposedGather(call, here.memory).run(call.a_shard, call.bs, call.biases, None, (), None)
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr()),
            """\
main   record start
copy   await start
copy   write free of 1 [0] = call
copy   write awaited = call
copy   wait free of 0 [1] == call
copy   write free of 0 [1] = 0
copy   write awaited = 0
copy   copy 32768 B to box of 1 + 0 from own + 0
copy   write landed of 1 [0] = 4
copy   record end
reduce await start
reduce launch keep_kernel
reduce wait landed of 0 [1] >= 4
reduce launch keep_kernel
reduce record reduced
main   wait landed of 0 [1] >= 4
main   await end
main   await reduced
main   write landed of 0 [1] = 0
main   record last""",
        )


def test_trace_of_a_scatter() -> None:
    with machine(rank=1, world=3) as here:
        call = scatter_call((768,), (64,), 72, world=3)
        plan = fused.FusedScatter(call, here.memory, tiles_of(torch.bfloat16), 2, SMS)
        plan.run(call.a_parts, call.b_parts, call.biases, (), (), None)
        staging = here.launched("gemm_kernel").arguments["c0"].address
        assert_expected_inline(
            here.trace(staging=staging),
            """\
main   record start
copy   await start
main   launch gemm_kernel
copy   write free of 2 [1] = call
copy   write free of 0 [1] = call
copy   write awaited = call
copy   wait free of 1 [2] == call
copy   wait free of 1 [0] == call
copy   write free of 1 [2] = 0
copy   write free of 1 [0] = 0
copy   write awaited = 0
copy   wait progress[2, 0] >= 1
copy   write progress[2, 0] = 0
copy   record running
copy   copy 18432 B to box of 2 + 36864 from staging + 73728
copy   write full of 2 [1] = 2
copy   wait progress[2, 1] >= 1
copy   write progress[2, 1] = 0
copy   copy 18432 B to box of 2 + 55296 from staging + 92160
copy   write full of 2 [1] = 4
copy   wait progress[0, 0] >= 1
copy   write progress[0, 0] = 0
copy   copy 18432 B to box of 0 + 0 from staging + 0
copy   write full of 0 [1] = 2
copy   wait progress[0, 1] >= 1
copy   write progress[0, 1] = 0
copy   copy 18432 B to box of 0 + 18432 from staging + 18432
copy   write full of 0 [1] = 4
reduce await running
reduce launch reduce_kernel
reduce record reduced
copy   record end
main   await end
main   await reduced
main   record last""",
        )


def test_trace_of_a_decomposed_scatter() -> None:
    with machine(rank=0, world=2) as here:
        call = scatter_call((256,), (64,), 72, world=2)
        plan = decomposed.DecomposedScatter(call, here.memory)
        plan.run(call.a_parts, call.b_parts, call.biases, (), (), None)
        staging = here.launched("reduce_kernel").arguments["own_ptr"]
        assert_expected_inline(
            here.trace(staging=staging),
            """\
main   record start
copy   await start
main   record event[4]
main   record event[0]
copy   write free of 1 [0] = call
copy   write awaited = call
copy   wait free of 0 [1] == call
copy   write free of 0 [1] = 0
copy   write awaited = 0
copy   await event[4]
copy   copy 18432 B to box of 1 + 0 from staging + 18432
copy   write full of 1 [0] = 4
reduce await event[0]
reduce launch reduce_kernel
reduce record reduced
copy   record end
main   await end
main   await reduced
main   record last""",
        )


def test_trace_of_a_direct_call() -> None:
    with machine(rank=0, world=2) as here:
        call = gather_call((256,), 64, (72,), world=2)
        direct.DirectGather(call, here.memory).run(call.a_shard, call.bs, call.biases, None, (), None)
        assert_expected_inline(
            here.trace(),
            """\
main   launch push_gather_kernel
main   record last""",
        )


PLANS: dict[str, Callable[[Machine], Callable[[], object]]] = {
    "gather-fused-pulled": lambda here: _gather_runner(here, "fused", kept=True),
    "gather-fused-pushed": lambda here: _gather_runner(here, "fused"),
    "gather-fused-pushed-kept": lambda here: _gather_runner(here, "fused", full=True),
    "gather-decomposed-pulled": lambda here: _gather_runner(here, "decomposed", kept=True),
    "gather-decomposed-pushed": lambda here: _gather_runner(here, "decomposed"),
    "gather-decomposed-pushed-kept": lambda here: _gather_runner(here, "decomposed", full=True),
    "gather-direct": lambda here: _gather_runner(here, "direct"),
    "scatter-fused": lambda here: _scatter_runner(here, "fused"),
    "scatter-decomposed": lambda here: _scatter_runner(here, "decomposed"),
    "scatter-direct": lambda here: _scatter_runner(here, "direct"),
    "all-reduce-direct": lambda here: _all_reduce_runner(here),
}


def _gather_runner(here: Machine, implementation: str, **options: bool) -> Callable[[], object]:
    call = gather_call((192,), 64, (72,), **options)
    plan = gather_plan(call, here, implementation)
    return lambda: plan.run(call.a_shard, call.bs, call.biases, None, (), None)


def _all_reduce_runner(here: Machine) -> Callable[[], object]:
    call = replace(scatter_call((7,), (64,), 72), scatter_dim=None)
    plan = direct.DirectAllReduce(call, here.memory)
    return lambda: plan.run(call.a_parts, call.b_parts, call.biases, (), (), None)


def _scatter_runner(here: Machine, implementation: str) -> Callable[[], object]:
    call = scatter_call((768,), (64,), 72)
    plan = scatter_plan(call, here, implementation)
    return lambda: plan.run(call.a_parts, call.b_parts, call.biases, (), (), None)


@pytest.mark.parametrize("name", PLANS)
def test_every_stream_is_joined(name: str) -> None:
    """Everything on a side stream comes after the start of the call, and before its end, where the caller goes on."""
    with machine(RANK, WORLD) as here:
        run = PLANS[name](here)
        run()
        order = happens_before(here.log)
        main = [i for i, entry in enumerate(here.log) if entry.stream == MAIN]
        side = [i for i, entry in enumerate(here.log) if entry.stream in (COPY, REDUCE)]
        last = main[-1]
        assert isinstance(here.log[last], Recorded)
        assert here.log[last].event == here.memory.last
        work = [i for i in side if not isinstance(here.log[i], Recorded)]
        assert all(last in order[i] for i in work)
        starts = [i for i in work if isinstance(here.log[i], Copied | Launched | Wrote)]
        assert all(any(i in order[first] for first in main) for i in starts)


def happens_before(log: Sequence[Any]) -> list[set[int]]:
    """For each entry the later ones that wait for it: those of its stream, and what awaits an event behind it."""
    after: list[set[int]] = [set() for _ in log]
    for i in reversed(range(len(log))):
        following = next((j for j in range(i + 1, len(log)) if log[j].stream == log[i].stream), None)
        direct = {following} - {None}
        if isinstance(log[i], Recorded):
            again = (j for j in range(i + 1, len(log)) if isinstance(log[j], Recorded) and log[j].event == log[i].event)
            until = next(again, len(log))
            direct |= {j for j in range(i + 1, until) if isinstance(log[j], Awaited) and log[j].event == log[i].event}
        after[i] = direct.union(*(after[j] for j in direct))
    return after


def test_staging_comes_first_where_it_does_not_fit_beside_the_gemm() -> None:
    for registers, stream in ((40, COPY), (255, MAIN)):
        with machine(RANK, WORLD) as here:
            here.registers = registers  # of the staging kernel and of the GEMM
            call = gather_call((512,), 64, (512,), kept=True)
            plan = fused.FusedGather(call, here.memory, Tiles(128, 256, 64, warps=8, stages=3), 2, SMS)
            plan.run(call.a_shard, call.bs, call.biases, None, (), None)
            assert here.launched("stage_kernel").stream == stream
            assert here.launched("gemm_kernel").stream == MAIN


def test_calls_on_two_streams_come_one_after_the_other(here: Machine) -> None:
    run = PLANS["gather-direct"](here)
    run()
    assert here.of(Awaited) == []
    run()
    assert here.of(Awaited) == [], "a stream keeps its own order"
    here.current_stream = REDUCE
    run()
    assert here.of(Awaited) == [Awaited(REDUCE, here.memory.last)]
    here.log.clear()
    here.capturing = 1
    run()
    assert here.of(Awaited) == [], "a capture cannot wait for an event from outside"
    here.current_stream = MAIN
    run()
    assert here.of(Awaited) == [Awaited(MAIN, here.memory.last_captured)], "two streams of one capture"
    here.log.clear()
    here.capturing, here.current_stream = 2, REDUCE
    run()
    assert here.of(Awaited) == [], "nor for one of another capture"
    here.capturing, here.current_stream = 0, MAIN
    run()
    assert here.of(Awaited) == [Awaited(MAIN, here.memory.last)], "the eager call before the captures"


def test_calls_of_two_threads_come_one_after_the_other(here: Machine) -> None:
    """One that is between its begin and its end holds back the other, which then waits for its end."""
    plan = PLANS["gather-direct"](here)
    plan()
    here.log.clear()
    enqueue, entered, go_on = here.memory.run, threading.Event(), threading.Event()

    def slowly(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert go_on.wait(10)
        enqueue(*args)

    here.memory.run = slowly  # type: ignore[method-assign]
    first = threading.Thread(target=plan)
    first.start()
    assert entered.wait(10)
    second = threading.Thread(target=plan)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert here.of(Launched) == []
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert [type(entry) for entry in here.log] == [Launched, Recorded] * 2


# --- waits for peers, and who watches over them ------------------------------------------------------------------
@pytest.mark.parametrize("name", PLANS)
def test_every_wait_for_a_peer_is_for_its_call(name: str) -> None:
    """A stream or a kernel waits for FREE to be exactly the call's signature, of every peer, before anything moves.

    Meanwhile a word of this rank's own has it, too.
    A kernel that nobody watches over (`direct`) has a bound, and tells its call; others wait as long as they are let.
    """
    for seconds in (0, 5):
        with machine(RANK, WORLD, timeout_s=seconds) as here:
            PLANS[name](here)()
            memory = here.memory
            (signature,) = memory.calls._told
            assert memory.bound == int((seconds or default_pg_timeout.total_seconds()) * 1e9)
            launches = [entry.arguments for entry in here.of(Launched)]
            waiting = [arguments for arguments in launches if "timeout_ns" in arguments]
            direct = name.endswith("direct")
            assert {each["timeout_ns"] for each in waiting} <= {memory.bound if direct else NO_BOUND}
            assert {each["signature"] for each in waiting} <= {signature}
            assert {each["awaited"] for each in waiting} == {signature} if direct else True
            free = [wait for wait in here.of(Waited) if wait.exactly]
            met = {memory.free.at(RANK, peer) for peer in range(WORLD) if peer != RANK}
            assert bool(waiting) != bool(free)
            assert not free or {wait.address for wait in free} == met
            told = [(wrote.address, wrote.value) for wrote in here.of(Wrote)]
            pointer, own = ("doing_ptr", memory.doing) if direct else ("awaited_ptr", memory.awaited)
            assert {each[pointer] for each in waiting} <= {own.data_ptr()}
            awaited = [value for address, value in told if address == memory.awaited.data_ptr()]
            assert awaited == [signature, 0] * bool(free)
            assert all(wait.value == signature for wait in free)
            copied = [i for i, entry in enumerate(here.log) if isinstance(entry, Copied)]
            assert not free or max(here.log.index(wait) for wait in free) < min(copied)


def test_a_wait_that_is_not_over_is_told(here: Machine) -> None:
    """Each look that could tell something, and when."""
    memory = here.memory
    signatures = {name: gather_call((rows,)).wire.signature(how) for name, rows, how in
                  (("mine", 8, PUSH), ("other", 16, PUSH), ("direct", 8, DIRECT), ("pull", 8, PULL))}  # fmt: skip
    for rows in (8, 16):
        for how in (PUSH, DIRECT):
            memory.signature(gather_call((rows,)).wire, how)
    mine, other, direct = signatures["mine"], signatures["other"], signatures["direct"]
    nothing, bound = dict.fromkeys((0, 2, 3), 0), memory.bound / 1e9

    def told(look: watch.Look, seconds: float, before: watch.Look | None = None) -> str:
        """What the second of two looks tells, so many seconds after the first."""
        watching = watch.Watch(memory)
        assert watching.judge(before or look, 100.0) is None
        return str(watching.judge(look, 100.0 + seconds) or "")

    def look(**changed: Any) -> watch.Look:
        words = {"free": nothing, "awaited": 0, "ahead": {}, "told": nothing, "status": [0, -1, 0]}
        return watch.Look(**({"doing": 0, "ended": (1, 2)} | words | changed))

    assert told(look(), bound * 2) == "", "nothing is awaited"
    assert told(look(awaited=mine), bound - 1) == ""
    assert told(look(awaited=mine), bound + 1).startswith(f"all_gather (8192 bytes a rank): rank 1 waited {bound:g}")
    assert "for the same call of rank 0" in told(look(awaited=mine), bound + 1)
    assert "of rank 3" in told(look(awaited=mine, free={**nothing, 0: mine, 2: mine}), bound + 1)
    assert told(look(awaited=mine), bound + 1, look(awaited=mine, ended=(1, 1))) == "", "calls end"
    assert told(look(awaited=mine), bound + 1, look()) == "", "it has only now been posted"
    met = look(awaited=mine, free={**nothing, 2: other})
    said = "rank 1 makes all_gather (8192 bytes a rank), rank 2 makes all_gather (16384 bytes a rank)"
    assert told(met, 0.5) == ""
    assert said in told(met, 1.5)
    assert said not in told(look(awaited=mine, free={**nothing, 2: mine}), 1.5)
    assert "rank 3 makes all_gather (8192" in told(look(awaited=mine, ahead={3: direct}), 1.5), "by another transport"
    assert "rank 0 makes all_gather (16384" in told(look(doing=direct, free={**nothing, 0: other}), 1.5)
    assert told(look(doing=direct), bound + 1) == "", "the kernel tells that itself"


def test_a_record_of_a_kernel_is_told(here: Machine) -> None:
    memory = here.memory
    mine, other = (memory.signature(gather_call((rows,)).wire, DIRECT) for rows in (8, 16))
    assert watch.error_in(memory, [0, 0, 0]) is None
    assert watch.error_in(memory, [1, 2, mine]) is None, "it is being written"
    assert watch.error_in(memory, [2, -1, 0]) is None, "set by the host"
    assert "rank 1 waited 1800 s for the same call of rank 2" in str(watch.error_in(memory, [2, 2, mine]))
    said = str(watch.error_in(memory, [2, 2, (other << 31) + mine]))
    assert "rank 1 makes all_gather (8192 bytes a rank), rank 2 makes all_gather (16384 bytes a rank)" in said
    cuda_emulated.int32(memory.free.at(RANK, 2)).value = other
    assert "rank 2 makes all_gather (16384" in str(watch.error_in(memory, [2, 2, mine])), "it is at another call"


def test_a_failed_group_makes_no_call(here: Machine) -> None:
    memory = here.memory
    memory.fail(watch.unlike(memory, 3, 4, 5))
    said = r"since: UnlikeCalls: unlike calls have met: rank 1 makes an unknown call \(4\), rank 3 .*release\(group\)"
    for name in ("gather", "scatter"):
        with pytest.raises(SymmetricMemoryError, match=said):
            op(here, SMALL[name]())


def test_the_interpreter_has_what_plans_call_of_a_driver() -> None:
    """`machine.driver` is one of two modules; captures are on GPUs alone."""
    root = Path(memory.__file__).parents[1]
    users = [text for path in root.rglob("*.py") if "machine import driver" in (text := path.read_text("utf-8"))]
    names = {name for text in users for name in re.findall(r"\bdriver\.(\w+)\(", text)}
    assert len(names) > 15
    assert {name for name in names if not hasattr(interpreted, name)} == {"capture_id", "wait_event_at_launch"}
    for name in names - {"MemOps"} & vars(interpreted).keys():
        theirs, ours = (getattr(module, name) for module in (driver, interpreted))
        if inspect.isfunction(theirs) and "args" not in inspect.signature(theirs).parameters:
            needed = [one for one in inspect.signature(theirs).parameters.values() if one.default is one.empty]
            assert len(needed) == len(inspect.signature(ours).parameters), name
