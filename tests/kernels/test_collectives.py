"""The copy-engine all-gather and reduce-scatter: on one rank without a GPU (`cuda_stubs`), and their ops over gloo."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import asynctp_kernels.torch_private as kernels_private
import cuda_emulated
from asynctp_kernels import cuda
from asynctp_kernels.cuda import moves
from asynctp_kernels.cuda.choose.wire import DIRECT, PUSH, Wire
from asynctp_kernels.cuda.plans.collectives import BulkGather, BulkScatter, CopiedGather, DirectSum
from asynctp_kernels.cuda.plans.collectives import gather_facts as bulk_call
from asynctp_kernels.cuda.plans.collectives import scatter_facts as bulk_sum
from asynctp_kernels.cuda.plans.decomposed import DecomposedGather
from asynctp_kernels.cuda.plans.direct import DirectGather
from asynctp_kernels.cuda.runtime.memory import FLIGHTS, MAX_CHUNKS, MAX_WORLD
from cuda_stubs import (
    COPY,
    MAIN,
    REDUCE,
    STREAMS,
    Awaited,
    Copied,
    Launched,
    Machine,
    Recorded,
    gather_call,
    machine,
    tensor,
)
from expecttest import assert_expected_inline
from ranks import run_ranks
from torch import Tensor

import asynctp_passes.ops  # noqa: F401  (registers the ops)
from asynctp_passes.ops.calls import signature

RANK, WORLD = 1, 4


@pytest.fixture
def here() -> Iterator[Machine]:
    with machine(RANK, WORLD) as made:
        cuda_emulated.emulate(made)
        yield made


def bits(tensor: Tensor) -> Tensor:
    return cuda_emulated.raw(tensor)


# --- what the streams are asked for -------------------------------------------------------------------------------
#: every rank keeps the result: it is pulled; or one may not: it is pushed
WAYS = pytest.mark.parametrize("kept", [True, False], ids=["pulled", "pushed"])


def gather_plan(here: Machine, shard: Tensor, kept: bool = True) -> BulkGather:
    return BulkGather(bulk_call(rows(shard), None, WORLD, kept), here.memory)


def scatter_plan(here: Machine, whole: Tensor, reduce_op: str = "sum") -> BulkScatter:
    return BulkScatter(bulk_sum(rows(whole), reduce_op, WORLD), here.memory)


def rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim > 1 else tensor.unsqueeze(1)


def others() -> list[int]:
    return [rank for rank in range(WORLD) if rank != RANK]


def peers_come(here: Machine, words: Any, parts: list[Tensor], signature: int) -> None:
    """The other ranks have come to the call, and have pushed their parts to the inbox."""
    slot_bytes = -(-len(bits(parts[RANK])) // 16) * 16
    for rank in others():
        cuda_emulated.int32(here.memory.free.at(RANK, rank)).value = signature
        cuda_emulated.int32(words.at(RANK, rank)).value = MAX_CHUNKS
        first, part = (rank - (rank > RANK)) * slot_bytes, bits(parts[rank])
        here.parts("box")[RANK][first : first + len(part)] = part


def gathered(here: Machine, shards: list[Tensor], kept: bool = True) -> Tensor:
    """One gather, with what the other ranks stage or push in place."""
    plan = gather_plan(here, shards[RANK], kept)
    if kept:
        for rank, outbox in enumerate(here.parts("box")):
            data = bits(shards[rank])
            outbox[: len(data)] = data if rank != RANK else 0
    else:
        (signature,) = here.memory.calls._told
        peers_come(here, here.memory.landed, shards, signature)
    here.log.clear()
    under_way = plan.start_bulk(rows(shards[RANK]))
    assert under_way.source.data_ptr() == shards[RANK].data_ptr(), "what the copy stream reads is held"
    assert own_words(here).count_nonzero() == 0
    return under_way.result


def own_words(here: Machine) -> Tensor:
    return cuda_emulated.at(here.memory.signals.peers[RANK], (3, MAX_WORLD), torch.int32)


@WAYS
@pytest.mark.parametrize("shape", [(256, 64), (1, 8), (130, 7), (5, 1), (6, 64, 1), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64])
def test_gather(shape: tuple[int, ...], dtype: torch.dtype, kept: bool, here: Machine) -> None:
    shards = [tensor(*shape, dtype=dtype) for _ in range(WORLD)]
    full = gathered(here, shards, kept)
    assert torch.equal(bits(full), torch.cat([bits(shard) for shard in shards]))


@pytest.mark.parametrize(
    ("shape", "dtype", "unit"),
    [
        ((6, 64, 1), torch.bfloat16, torch.int32),
        ((8, 1), torch.float8_e4m3fn, torch.int32),
        ((3, 5, 2), torch.float8_e4m3fn, torch.int16),
        ((3, 5, 7), torch.float8_e4m3fn, torch.uint8),
    ],
)
def test_a_shard_is_moved_in_the_largest_units_that_all_of_it_has(
    shape: tuple[int, ...], dtype: torch.dtype, unit: torch.dtype, here: Machine
) -> None:
    """Not its last dimension, which may be 1: it lies in one piece in the result too."""
    for kept in (True, False):
        gather_plan(here, tensor(*shape, dtype=dtype), kept)
    staging, keeping = here.prepared
    assert (staging.name, keeping.name) == ("stage_kernel", "keep_kernel")
    assert staging.args[0].dtype == keeping.args[0].dtype == unit


def test_gather_trace(here: Machine) -> None:
    """The main stream only marks where it is: it waits for nothing."""
    shards = [tensor(256, 64) for _ in range(WORLD)]
    full = gathered(here, shards)
    assert_expected_inline(
        here.trace(gathered=full.data_ptr(), shard=shards[RANK].data_ptr()),
        """\
main   record start
copy   await start
copy   launch stage_kernel
copy   copy 32768 B to gathered + 65536 from box of 2 + 0
copy   copy 32768 B to gathered + 98304 from box of 3 + 0
copy   copy 32768 B to gathered + 0 from box of 0 + 0
copy   record flight
copy   record flown
reduce await flight
copy   record flight
main   record last""",
    )
    assert not [entry for entry in here.of(Awaited) + here.of(Launched) if STREAMS[entry.stream] == STREAMS[MAIN]]


def test_trace_of_a_gather_that_is_pushed(here: Machine) -> None:
    """What came is copied from the inbox on the copy stream, source by source, before the next call may fill it."""
    shards = [tensor(256, 64) for _ in range(WORLD)]
    gathered(here, shards, kept=False)
    assert_expected_inline(
        here.trace(shard=shards[RANK].data_ptr()),
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
copy   copy 32768 B to box of 0 + 0 from shard + 0
copy   write landed of 0 [1] = 4
copy   copy 32768 B to box of 3 + 32768 from shard + 0
copy   write landed of 3 [1] = 4
copy   copy 32768 B to box of 2 + 32768 from shard + 0
copy   write landed of 2 [1] = 4
copy   launch keep_kernel
copy   wait landed of 1 [2] >= 4
copy   launch keep_kernel
copy   wait landed of 1 [3] >= 4
copy   launch keep_kernel
copy   wait landed of 1 [0] >= 4
copy   launch keep_kernel
copy   write landed of 1 [2] = 0
copy   write landed of 1 [3] = 0
copy   write landed of 1 [0] = 0
copy   record flight
copy   record flown
reduce await flight
copy   record flight
main   record last""",
    )
    assert not [entry for entry in here.of(Awaited) + here.of(Launched) if STREAMS[entry.stream] == STREAMS[MAIN]]


@WAYS
def test_a_gather_that_the_stream_waits_for(kept: bool, here: Machine) -> None:
    """For products that are made elsewhere; numbers too, whose own place is where the caller wants them."""
    call = bulk_call(tensor(1, 24), torch.rand(1, 6), WORLD, kept)
    plan = CopiedGather(call, here.memory)
    here.kernels.clear()
    found, numbers = plan.run(call.a_shard, (), (), None, (), call.along_shard)
    assert (found.shape, numbers.shape) == ((WORLD, 24), (WORLD, 6))
    streams = [STREAMS[entry.stream] for entry in here.log]
    joined = [entry.event for entry in here.of(Awaited) if entry.stream == MAIN]
    assert joined[-1] == (here.memory.end if kept else here.memory.reduced)
    assert streams[0] == streams[-1] == "main"
    sizes = sorted(entry.size for entry in here.of(Copied))
    others_get = [24, 24, 24, 48, 48, 48]  # the numbers, then the shard
    assert sizes == (sorted([*others_get, 24]) if kept else others_get), "the own numbers go to their place as well"


def scattered(here: Machine, whole: Tensor, for_us: list[Tensor], reduce_op: str = "sum") -> Tensor:
    """One scatter, with what the other ranks push in place."""
    plan = scatter_plan(here, whole, reduce_op)
    (signature,) = here.memory.calls._told
    peers_come(here, here.memory.full, for_us, signature)
    here.log.clear()
    under_way = plan.start_bulk(whole)
    assert under_way.source.data_ptr() == whole.data_ptr(), "what the copy stream and the reducer read is held"
    return under_way.result


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("shape", [(512, 64), (4, 8), (520, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scatter(shape: tuple[int, int], dtype: torch.dtype, reduce_op: str, here: Machine) -> None:
    whole = tensor(*shape, dtype=dtype)
    mine = whole.chunk(WORLD)
    for_us = [tensor(*mine[0].shape, dtype=dtype) for _ in range(WORLD)]
    for_us[RANK] = mine[RANK]
    out = scattered(here, whole, for_us, reduce_op)
    total = sum((part.float() for part in for_us), torch.zeros(())) / (WORLD if reduce_op == "avg" else 1)
    assert torch.equal(out, total.to(dtype))
    for rank in set(range(WORLD)) - {RANK}:
        part = bits(mine[rank])
        slot = RANK - (rank < RANK)
        assert torch.equal(here.parts("box")[rank][slot * len(part) : (slot + 1) * len(part)], part)
    assert own_words(here).count_nonzero() == 0
    (signature,) = here.memory.calls._told
    for rank in others():
        theirs = cuda_emulated.at(here.memory.signals.peers[rank], (3, MAX_WORLD), torch.int32)
        assert theirs[:, RANK].tolist() == [MAX_CHUNKS, signature, 0]


def test_scatter_trace(here: Machine) -> None:
    """No SM waits: the sum is launched behind stream waits. The copy stream goes on when the inbox has been read."""
    whole = tensor(1024, 64)
    scattered(here, whole, list(whole.chunk(WORLD)))
    assert_expected_inline(
        here.trace(whole=whole.data_ptr()),
        """\
main   record start
copy   await start
copy   record running
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
copy   copy 32768 B to box of 2 + 32768 from whole + 65536
copy   write full of 2 [1] = 4
copy   copy 32768 B to box of 3 + 32768 from whole + 98304
copy   write full of 3 [1] = 4
copy   copy 32768 B to box of 0 + 0 from whole + 0
copy   write full of 0 [1] = 4
reduce await running
reduce wait full of 1 [2] >= 4
reduce wait full of 1 [3] >= 4
reduce wait full of 1 [0] >= 4
reduce launch reduce_kernel
reduce record reduced
copy   record end
copy   await reduced
copy   record flight
copy   record flown
reduce await flight
main   record last""",
    )
    assert not [entry for entry in here.of(Awaited) + here.of(Launched) if STREAMS[entry.stream] == STREAMS[MAIN]]


@pytest.mark.parametrize("op", ["gather", "pushed gather", "scatter"])
def test_what_comes_again_is_launched_on_the_copy_stream(op: str, here: Machine) -> None:
    """As it was enqueued there, behind the call's stream and what is in flight, and with that stream's priority."""
    here.edits = True
    here.kernels.clear()
    shard, whole = tensor(8, 64), tensor(32, 64)
    plan: Any = scatter_plan(here, whole) if op == "scatter" else gather_plan(here, shard, op == "gather")
    for number in range(3):
        here.log.clear()
        plan.start_bulk(whole if op == "scatter" else shard)
        assert here.memory.launched == number
        assert [STREAMS[entry.stream] for entry in here.log][:2] == ["main", "copy"]
        launched = {STREAMS[entry.stream] for entry in here.of(Launched) + here.of(Copied)}
        assert launched == ({"copy", "reduce"} if op == "scatter" else {"copy"})
    assert here.urgent == [True]


# --- calls that follow ---------------------------------------------------------------------------------------------
def test_a_call_that_stages_first_waits_for_what_is_in_flight(here: Machine) -> None:
    """Its staging is not on the copy stream, and would fill the outbox that the others still read."""
    shard = tensor(256, 512)
    done = gather_plan(here, shard).start_bulk(shard).done
    call = gather_call((256,), 512, (512,), kept=True)
    plan = DecomposedGather(call, here.memory)
    here.log.clear()
    plan.run(call.a_shard, call.bs, call.biases, None, (), None)
    stage = next(i for i, entry in enumerate(here.log) if isinstance(entry, Launched))
    assert Awaited(MAIN, done) in here.log[:stage]


def test_calls_of_another_group_come_behind_what_is_in_flight() -> None:
    with machine(RANK, WORLD) as here:
        cuda_emulated.emulate(here)
        here._streams = iter([COPY, REDUCE, 103, 104])
        memory = here.memory
        shard = tensor(256, 64)
        done = gather_plan(here, shard).start_bulk(shard).done
        here.group = type(here.group)(RANK, WORLD)
        here.log.clear()
        here.memory.begin(MAIN)
        assert here.of(Awaited) == [Awaited(MAIN, done)]
        here.log.clear()
        memory.begin(MAIN)
        assert here.of(Awaited) == []


def test_what_is_in_flight_in_a_capture_concerns_no_other(here: Machine) -> None:
    shard = tensor(256, 64)
    plan = gather_plan(here, shard)
    here.capturing = 7
    plan.start_bulk(shard)
    here.capturing = 0
    here.log.clear()
    here.memory.begin(MAIN)
    here.memory.land(MAIN)
    assert here.of(Awaited) == []


def test_captures_take_over_no_event_of_what_is_in_flight(here: Machine) -> None:
    """However many calls they have; the driver refuses to wait for such an event elsewhere (`Machine.do`)."""
    shard = tensor(256, 64)
    plan = gather_plan(here, shard)
    bulk = plan.start_bulk(shard)
    here.capturing = 7
    for _ in range(FLIGHTS):
        plan.start_bulk(shard)
    here.capturing = 0
    here.log.clear()
    moves.wait_for(bulk)
    here.memory.begin(MAIN)
    here.memory.land(MAIN)
    assert here.of(Awaited) == [Awaited(MAIN, bulk.done)] * 2


# --- through the package's entry points ------------------------------------------------------------------------------
def unchecked() -> None:
    """The arguments are right."""


def refuse() -> None:
    """The arguments are wrong."""
    raise ValueError("not valid")


def by_copy_engine() -> Any:
    """As of many bytes, which copy engines move."""
    return cuda.forced("fused")


def test_few_bytes_are_moved_by_one_kernel(here: Machine) -> None:
    """Complete when they return, in order on the stream: nothing is left in flight, and nothing is to be waited for."""
    here.kernels.clear()
    with mock.patch.object(moves, "register_wait") as waited:
        full = cuda.run_bulk_gather(tensor(8, 3, 5), WORLD, here.group, unchecked)
        out = cuda.run_bulk_scatter(tensor(8, 3, 5), "sum", WORLD, here.group, unchecked)
        cuda.run_bulk_gather(tensor(8, 3, 5), WORLD, here.group, unchecked, kept_by_all=False)
    assert waited.call_count == 0
    assert full is not None
    assert out is not None
    assert (full.shape, out.shape) == ((32, 3, 5), (2, 3, 5))
    launched = [(entry.prepared.name, STREAMS[entry.stream]) for entry in here.of(Launched)]
    names = ["push_gather_kernel", "push_reduce_kernel", "push_gather_kernel"]
    assert launched == [(name, "main") for name in names]
    assert cuda.last_implementation(here.group) == "direct"
    plans = list(here.memory.plans.values())
    assert [type(plan) for plan in plans] == [DirectGather, DirectSum, DirectGather]
    wires = [bulk_call(tensor(8, 15), None, WORLD, kept).wire for kept in (True, False)]
    told = set(here.memory.calls._told)
    assert {wire.signature(DIRECT) for wire in wires} < told, "kept and not kept are unlike calls"
    assert not {wire.signature(PUSH) for wire in wires} & told


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("implementation", ["direct", "fused"])
def test_only_what_is_in_flight_reads_a_copy(
    here: Machine, implementation: str, copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may write to the input once the op has returned, which comes after a kernel of the same stream."""
    here.kernels.clear()
    shard, whole = tensor(8, 3, 8), tensor(8, 3, 8)
    sources: list[Tensor] = []
    waits = mock.patch.object(moves, "_waited", lambda bulk, result: (sources.append(bulk.source), result)[1])
    clone, cloned = Tensor.clone, list[Tensor]()
    monkeypatch.setattr(Tensor, "clone", lambda given: (cloned.append(given), clone(given))[1])
    with cuda.forced(implementation), waits:
        cuda.run_bulk_gather(shard, WORLD, here.group, unchecked, True, copy)
        cuda.run_bulk_scatter(whole, "sum", WORLD, here.group, unchecked, copy)
    in_flight = implementation == "fused"
    assert len(cloned) == (2 if copy and in_flight else 0)
    same = [source.data_ptr() == given.data_ptr() for source, given in zip(sources, (shard, whole), strict=False)]
    assert same == ([not copy] * 2 if in_flight else [])


def test_a_small_maximum_is_made_by_the_kernel_of_sums(here: Machine) -> None:
    """Each kind has a plan of its own, which is made once; what is large, or of fp8, is NCCL's."""
    here.kernels.clear()
    asked = mock.Mock()
    for dtype, how in ((torch.bfloat16, "max"), (torch.bfloat16, "min"), (torch.bool, "max"), (torch.bfloat16, "max")):
        total = cuda.run_bulk_all_reduce(tensor(3, 5).to(dtype), how, here.group, asked)
        assert total is not None
        assert (total.shape, total.dtype) == ((3, 5), dtype)
    assert [prepared.name for prepared in here.prepared] == ["push_all_reduce_kernel"] * 3
    assert len(here.of(Launched)) == 4
    assert asked.call_count == 3, "once a plan"
    assert [prepared.constants["REDUCE"] for prepared in here.prepared] == ["max", "min", "max"]
    wires = [Wire("all_reduce", WORLD, 30, torch.bfloat16, how) for how in ("max", "min")]
    assert {wire.signature(DIRECT) for wire in wires} < set(here.memory.calls._told)
    assert cuda.run_bulk_all_reduce(tensor(1 << 18), "max", here.group, unchecked) is None
    assert cuda.run_bulk_all_reduce(tensor(8, dtype=torch.float8_e4m3fn), "max", here.group, unchecked) is None
    with cuda.forced("sequential"):
        assert cuda.run_bulk_all_reduce(tensor(8), "max", here.group, unchecked) is None


def test_the_result_is_complete_when_waited_for(here: Machine) -> None:
    """`wait_tensor` makes the stream that is then current wait for the event behind the copies."""
    here.kernels.clear()
    waits: list[Any] = []
    with by_copy_engine(), mock.patch.object(moves, "register_wait", lambda result, wait: waits.append((result, wait))):
        full = cuda.run_bulk_gather(tensor(8, 3, 8), WORLD, here.group, unchecked)
        out = cuda.run_bulk_scatter(tensor(8, 3, 8), "sum", WORLD, here.group, unchecked)
    assert full is not None
    assert out is not None
    assert (full.shape, out.shape) == ((32, 3, 8), (2, 3, 8))
    assert [result is given for (result, _), given in zip(waits, (full, out), strict=True)] == [True, True]
    flights = {next(here.memory.flights) for _ in range(FLIGHTS)}
    recorded = [entry.event for entry in here.of(Recorded) if entry.event in flights]
    assert len(recorded) == 2
    here.log.clear()
    for _, wait in waits:
        wait()
    assert here.of(Awaited) == [Awaited(MAIN, event) for event in recorded]


def test_a_wait_on_another_stream_keeps_the_source_from_its_own(here: Machine) -> None:
    """The allocator would give it out again on the stream that it is from, which waits for nothing."""
    here.kernels.clear()
    waits: list[Any] = []
    shard = tensor(8, 8)
    with by_copy_engine(), mock.patch.object(moves, "register_wait", lambda result, wait: waits.append(wait)):
        cuda.run_bulk_gather(shard, WORLD, here.group, unchecked)
        cuda.run_bulk_gather(shard, WORLD, here.group, unchecked)
    waits[0]()
    assert here.kept == []
    here.log.clear()
    here.current_stream = 42
    waits[1]()
    assert [entry.stream for entry in here.of(Awaited)] == [42]
    assert here.kept == [(shard.data_ptr(), 42)]


def test_plans_are_kept(here: Machine) -> None:
    with by_copy_engine(), mock.patch.object(moves, "register_wait"):
        for kept in (True, True, False, False, True):
            cuda.run_bulk_gather(tensor(8, 8), WORLD, here.group, unchecked, kept)
    assert [prepared.name for prepared in here.prepared] == ["stage_kernel", "keep_kernel"]
    assert cuda.last_implementation(here.group) == "copy engine"


@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 3, 5)])
@pytest.mark.parametrize("forced", ["fused", "direct"])
def test_results_have_the_shapes_of_the_collectives(forced: str, shape: tuple[int, ...], here: Machine) -> None:
    here.kernels.clear()
    with cuda.forced(forced), mock.patch.object(moves, "register_wait"):
        full = cuda.run_bulk_gather(tensor(*shape), WORLD, here.group, unchecked)
        out = cuda.run_bulk_scatter(tensor(*shape), "avg", WORLD, here.group, unchecked)
    assert full is not None
    assert out is not None
    assert (full.shape, out.shape) == ((32, *shape[1:]), (2, *shape[1:]))
    assert full.is_contiguous()
    assert out.is_contiguous()


def test_arguments_are_checked_when_a_plan_is_made(here: Machine) -> None:
    """Once; and before anything is asked of the driver, with other arguments again. A refused gather is made."""
    here.kernels.clear()
    shard, whole = tensor(8, 8), tensor(8, 8)
    with by_copy_engine(), mock.patch.object(moves, "register_wait"):
        for check in (unchecked, unchecked, refuse):  # memory may grow for the first ones
            assert cuda.run_bulk_gather(shard, WORLD, here.group, check) is not None
            assert cuda.run_bulk_scatter(whole, "sum", WORLD, here.group, check) is not None
        here.log.clear()
        for wrong in (
            lambda: cuda.run_bulk_scatter(whole, "sum", 3, here.group, refuse),
            lambda: cuda.run_bulk_scatter(whole, "avg", WORLD, here.group, refuse),
            lambda: cuda.run_bulk_scatter(tensor(7, 8), "sum", WORLD, here.group, refuse),
        ):
            with pytest.raises(ValueError, match="not valid"):
                wrong()
    assert here.log == []
    assert here.memory.failure is None, "nothing has begun"


def test_an_operand_on_another_device_is_checked_again(here: Machine) -> None:
    """Its address would mean nothing to a kernel here."""
    here.kernels.clear()
    dtype = torch.bfloat16
    shard, b = tensor(8, 8, dtype=dtype), torch.empty(16, 8, dtype=dtype).t()

    group = here.group

    def gather(b: torch.Tensor, check: Any) -> Any:
        call = signature("all_gather_matmul").call(shard, [b], [None], 0, False, WORLD, group)
        return cuda.run(call, lambda _: check(), lambda call, mover: None)

    def scatter(b: torch.Tensor, check: Any) -> Any:
        call = signature("matmul_reduce_scatter").call([shard], [b], [None], "sum", 0, WORLD, group)
        return cuda.run(call, lambda _: check(), lambda call, mover: None)

    for run in (gather, scatter):
        with cuda.forced("fused"):
            run(b, unchecked)
            run(b, refuse)  # was checked before
            with pytest.raises(ValueError, match="not valid"):
                run(b.to("meta"), refuse)


def test_what_nccl_has_to_do(here: Machine) -> None:
    """Nothing to move, a sum that is not in fp32, or NCCL asked for."""
    assert cuda.run_bulk_gather(tensor(0, 8), WORLD, here.group, unchecked) is None
    assert cuda.run_bulk_scatter(tensor(8, 8, dtype=torch.int32), "sum", WORLD, here.group, unchecked) is None
    with cuda.forced("sequential"):
        assert cuda.run_bulk_gather(tensor(8, 8), WORLD, here.group, unchecked) is None
    assert here.of(Copied) == []


def test_a_registered_wait_is_called_by_wait_tensor() -> None:
    called: list[bool] = []
    result = torch.zeros(4)
    kernels_private.register_wait(result, lambda: called.append(True))
    torch.ops._c10d_functional.wait_tensor(result)
    assert called == [True]


def test_what_a_wait_refers_to_is_freed_by_it() -> None:
    """At once, not by the garbage collector: it is memory of the size of activations."""

    class Held:
        def wait(self) -> None:
            pass

    result, held = torch.zeros(4), Held()
    alive = weakref.ref(held)
    kernels_private.register_wait(result, held.wait)
    del held
    gc.disable()
    try:
        assert alive() is not None
        torch.ops._c10d_functional.wait_tensor(result)
        assert alive() is None
    finally:
        gc.enable()


# --- the ops, over gloo ----------------------------------------------------------------------------------------------
def ops_on_ranks(rank: int, world: int) -> None:
    wait, group, ours = torch.ops._c10d_functional.wait_tensor, dist.group.WORLD, torch.ops.asynctp
    assert group is not None
    name = group.group_name
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        shards = [torch.randn(3, 5, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
        full = wait(ours.all_gather(shards[rank], world, name))
        assert torch.equal(full.float(), torch.cat(shards).float())
    for reduce_op in ("sum", "avg"):
        wholes = [torch.randn(2 * world, 5, generator=torch.Generator().manual_seed(r)) for r in range(world)]
        out = wait(ours.reduce_scatter(wholes[rank], reduce_op, world, name))
        total = torch.stack(wholes).sum(0) / (world if reduce_op == "avg" else 1)
        torch.testing.assert_close(out, total[2 * rank : 2 * rank + 2])

    for reduce_op in ("sum", "avg", "max", "min"):
        wholes = torch.stack([torch.randn(3, 5, generator=torch.Generator().manual_seed(r)) for r in range(world)])
        total = wait(ours.all_reduce(wholes[rank], reduce_op, name))
        wanted = {"sum": wholes.sum(0), "avg": wholes.mean(0), "max": wholes.amax(0), "min": wholes.amin(0)}
        torch.testing.assert_close(total, wanted[reduce_op])

    # Inductor may write to an input as soon as the op has returned
    for gathers in (True, False):
        mine = torch.full((1 << 18, 2), float(rank + 1))
        flying = ours.all_gather(mine, world, name) if gathers else ours.reduce_scatter(mine, "sum", world, name)
        mine.fill_(torch.nan)
        total = wait(flying)
        assert total.sum() == (1 << 19) * (world * (world + 1) / 2 if gathers else 1.5)

    def program(x: Tensor) -> Tensor:
        name = group.group_name
        full = torch.ops.asynctp.all_gather(x.relu(), world, name)
        independent = x @ x.t()
        part = torch.ops.asynctp.reduce_scatter(wait(full) * 2, "sum", world, name)
        return wait(part) + independent.sum()

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(torch.compile(program, fullgraph=True)(x), program(x))


def test_ops_over_gloo() -> None:
    run_ranks(2, ops_on_ranks)


def test_bad_arguments_over_gloo() -> None:
    run_ranks(1, errors_on_ranks)


def errors_on_ranks(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="reduce_op='max' is not valid"):
        torch.ops.asynctp.reduce_scatter(x, "max", 1, name)
    with pytest.raises(ValueError, match=r"reduce_op='product' is not valid; it must be one of .*'max', 'min'"):
        torch.ops.asynctp.all_reduce(x, "product", name)
    with pytest.raises(ValueError, match="without dimensions"):
        torch.ops.asynctp.all_gather(torch.tensor(1.0), 1, name)
    with pytest.raises(ValueError, match="group_size=2 is not valid"):
        torch.ops.asynctp.all_gather(x, 2, name)
    with pytest.raises(NotImplementedError, match="no gradient"):
        torch.ops.asynctp.all_gather(x.requires_grad_(), 1, name).sum().backward()
