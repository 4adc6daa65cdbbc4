"""The plans of `asynctp_kernels.cuda`, run on one rank without a GPU: see `cuda_stubs` and `cuda_emulated`.

Every launch of every test is checked against the kernel's signature (`cuda_stubs.check_promises`). Snapshots are
written anew by `EXPECTTEST_ACCEPT=1`.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import SymmetricMemoryError, cuda
from asynctp_kernels.cuda.choose.wire import PUSH
from asynctp_kernels.cuda.facts import GatherFacts
from asynctp_kernels.cuda.gemm import cublas
from asynctp_kernels.cuda.plans import decomposed, fused
from asynctp_kernels.cuda.plans.gather_transports import GatherPush
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS
from cuda_stubs import (
    MAIN,
    Copied,
    Launched,
    Machine,
    Waited,
    Wrote,
    expected_products,
    gather_call,
    machine,
    result_dtype,
    scatter_call,
    tensor,
)
from plan_runs import (
    GATHERS,
    IMPLEMENTATIONS,
    LONG_ROWS,
    RANK,
    ROWWISE,
    SCATTERS,
    SMALL,
    WORLD,
    bits,
    check_pushes,
    check_words,
    gather_implementations,
    gather_plan,
    op,
    others,
    own_counts,
    own_words,
    peers_give,
    returned,
    run_gather,
    run_scatter,
    scatter_implementations,
    scatter_plan,
)
from torch import Tensor


@pytest.fixture
def here() -> Iterator[Machine]:
    with machine(RANK, WORLD) as made:
        cuda_emulated.emulate(made)
        yield made


# --- gather: the op on one rank, against the whole ---------------------------------------------------------------
@pytest.mark.parametrize(("case", "implementation", "kept"), list(returned()))
def test_gather(case: str, implementation: str, kept: bool, here: Machine) -> None:
    """Twice, since a call has to leave its words as it found them; the gathered A is asked for, and so is complete."""
    call = gather_call(**GATHERS[case], full=True, kept=kept)
    plan = gather_plan(call, here, implementation)
    for _ in range(2):
        (*outs, gathered), full, a_scale = run_gather(call, here, plan)
        assert torch.equal(bits(gathered), bits(full))
        assert [out.dtype for out in outs] == [call.out_dtype] * len(outs)
        for out, wanted in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(wanted.shape), wanted)
        assert own_counts(here).count_nonzero() == 0
        assert own_words(here).count_nonzero() == 0


@pytest.mark.parametrize(("case", "implementation"), list(gather_implementations()))
def test_gather_without_the_gathered(case: str, implementation: str, here: Machine) -> None:
    """Twice again; own rows are never copied when nobody asks for them."""
    call = gather_call(**GATHERS[case])
    plan = gather_plan(call, here, implementation)
    for _ in range(2):
        outs, full, a_scale = run_gather(call, here, plan)
        assert len(outs) == len(call.bs)
        for out, wanted in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(wanted.shape), wanted)
        assert own_counts(here).count_nonzero() == 0
        assert own_words(here).count_nonzero() == 0


IN_ROWS = [case for case in GATHERS if not case.startswith(("columns", "odd", "ranges"))]


@pytest.mark.parametrize("chunks", range(1, MAX_CHUNKS + 1))
@pytest.mark.parametrize("case", IN_ROWS)
def test_bytes_that_a_gather_pulls(case: str, chunks: int, here: Machine) -> None:
    """The copies move each shard of another rank once, its scales with it, and the own ones that are returned."""
    call = gather_call(**GATHERS[case], kept=True)
    run_gather(call, here, gather_plan(call, here, "fused", chunks))
    shard = call.a_shard.numel() * call.a_shard.itemsize
    scales = 0 if call.row_numbers is None else call.row_numbers.numel() * 4
    copies, own = here.of(Copied), shard + (0 if call.along_shard is None else scales)
    assert sum(copy.size for copy in copies) == (WORLD - 1) * (shard + scales) + own
    boxes = [part.data_ptr() for part in here.parts("box")]
    for peer in set(range(WORLD)) - {RANK}:
        pulled = [copy for copy in copies if boxes[peer] <= copy.src < boxes[peer] + here.memory.areas["box"].size]
        assert sum(copy.size for copy in pulled) == shard + scales
    assert not [copy for copy in copies if boxes[RANK] <= copy.src < boxes[RANK] + here.memory.areas["box"].size]


def pushed_gathers() -> Iterator[tuple[str, str, int]]:
    """(case, implementation, chunks)"""
    for case in IN_ROWS:
        counts = () if case in LONG_ROWS else range(1, MAX_CHUNKS + 1)
        yield from ((case, "fused", chunks) for chunks in counts)
        if gather_call(**GATHERS[case]).outer <= MAX_CHUNKS:
            yield case, "decomposed", 1


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("case", "implementation", "chunks"), list(pushed_gathers()))
def test_bytes_that_a_gather_pushes(case: str, implementation: str, chunks: int, full: bool, here: Machine) -> None:
    """Each other rank gets the shard and its scales once, from where they are and in order; nothing else moves.

    What this rank returns is copied by a kernel, each source's rows by themselves.
    """
    call = gather_call(**GATHERS[case], full=full)
    plan = gather_plan(call, here, implementation, chunks)
    assert isinstance(plan, fused.FusedGather | decomposed.DecomposedGather)
    push = plan.transport
    assert isinstance(push, GatherPush)
    run_gather(call, here, plan)
    shard = call.a_shard.numel() * call.a_shard.itemsize
    scales = 0 if call.row_numbers is None else call.row_numbers.numel() * 4
    copies, boxes = here.of(Copied), here.parts("box")
    assert sum(copy.size for copy in copies) == (WORLD - 1) * (shard + scales)
    kept = ["keep_kernel"] * WORLD if full else []
    assert [entry.prepared.name for entry in here.of(Launched)] == kept + ["gemm_kernel"] * (implementation == "fused")
    for peer in set(range(WORLD)) - {RANK}:
        slot, box = RANK - (peer < RANK), boxes[peer].data_ptr()
        start, end = box + slot * push.slot_bytes, box + (slot + 1) * push.slot_bytes
        rows = sorted((copy for copy in copies if start <= copy.dst < end), key=lambda copy: copy.dst)
        assert sum(copy.size for copy in rows) == shard
        assert [copy.dst - start for copy in rows] == [copy.src - rows[0].src for copy in rows]
        start = box + push.scale_offset + slot * scales
        assert [copy.size for copy in copies if start <= copy.dst < start + scales] == [scales] * bool(scales)
        posted = [write.value for write in here.of(Wrote) if write.address == here.memory.landed.at(peer, RANK)]
        assert posted == sorted(set(posted)), "a count of chunks, which grows"
        assert posted[-1] == MAX_CHUNKS


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("case", IN_ROWS)
def test_a_gather_reads_what_has_been_announced(case: str, full: bool, here: Machine) -> None:
    """Each GEMM tile, each range and each copy reads bytes that the chunks it waits for cover."""
    if case in LONG_ROWS:
        pytest.skip("a row is longer than a chunk: the GEMM is refused")
    call = gather_call(**GATHERS[case], full=full)
    plan = gather_plan(call, here, "fused")
    assert isinstance(plan, fused.FusedGather)
    push = plan.transport
    assert isinstance(push, GatherPush)
    wire, rows, row_bytes = push.wire_chunks, push.chunk_rows, push.sizes.row_bytes
    announcing = [b for b in range(wire.size + 1) if wire.complete(b) != wire.complete(b - 1)]
    for end in range(1, call.layout.rows + 1):
        chunk = min((end - 1) // rows, MAX_CHUNKS - 1)
        assert chunk >= wire.covering(end * row_bytes)
        least = next(b for b in announcing if wire.complete(b) >= chunk + 1)
        assert least >= end * row_bytes, "with so many bytes the chunk is announced, and these rows are there"
    if plan.outer <= MAX_CHUNKS:
        here.log.clear()
        run_gather(call, here, gather_plan(call, here, "decomposed"))
        for source in push.sources:
            word = here.memory.landed.at(RANK, source)
            waited = [wait.value for wait in here.of(Waited) if wait.address == word and wait.stream == MAIN]
            needed = [wire.covering((block + 1) * call.layout.inner * row_bytes) + 1 for block in range(plan.outer)]
            assert waited == sorted(set(needed))


def test_a_shard_with_gaps_is_made_whole_first(here: Machine) -> None:
    wide = tensor(192, 128)
    ways = itertools.product(((True, False), (False, False), (True, True)), ("fused", "decomposed", "direct"))
    for (full, kept), implementation in ways:
        call = replace(gather_call((192,), 64, (72,), full=full, kept=kept), a_shard=wide[:, ::2])
        plan = gather_plan(call, here, implementation)
        shards, _ = others(call)
        peers_give(here, plan, call, shards, [])
        out, *gathered = plan.run(call.a_shard, call.bs, call.biases, None, (), None)
        assert torch.equal(out, expected_products(call, torch.cat(shards), None)[0].view(out.shape))
        assert [torch.equal(each, torch.cat(shards)) for each in gathered] == [True] * full


# --- scatter -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("case", "implementation"), list(scatter_implementations()))
def test_scatter(case: str, implementation: str, here: Machine) -> None:
    """Twice, since a call has to leave its words as it found them."""
    call = scatter_call(**SCATTERS[case])
    plan = scatter_plan(call, here, implementation)
    for _ in range(2):
        here.log.clear()
        out, wanted, mine = run_scatter(call, here, plan)
        assert out.dtype == result_dtype(call)
        assert torch.equal(out, wanted)
        check_pushes(here, implementation, mine)
        check_words(here, implementation, call)


@pytest.mark.parametrize("case", ["several scaled", "four scaled", "four scaled, precise", "several scaled, outer"])
def test_sums_of_scaled_products_are_one_gemm(case: str, here: Machine) -> None:
    """Nothing is made before it, and each product has its own scales."""
    call = scatter_call(**SCATTERS[case])
    run_scatter(call, here, scatter_plan(call, here, "fused"))
    gemm = here.launched("gemm_kernel")
    count = len(call.b_parts)
    assert gemm.prepared.constants["COUNT"] == count
    assert [gemm.arguments[f"c{i}"] for i in (1, 2, 3)] == [None] * 3
    for name, scales in (("a_scale", call.a_scales), ("b_scale", call.b_scales)):
        for i, scale in enumerate(scales):
            found = cuda_emulated.at(gemm.arguments[f"{name}{i}"], (scale.numel(),), torch.float32)
            assert torch.equal(found, scale.flatten())


@pytest.mark.parametrize("chunks", range(1, MAX_CHUNKS + 1))
@pytest.mark.parametrize("case", [param.values[0] for param in scatter_implementations() if param.values[1] == "fused"])
def test_bytes_of_a_scatter(case: str, chunks: int, here: Machine) -> None:
    """The copies move every other rank's part once, in the dtype of the program's collective."""
    call = scatter_call(**SCATTERS[case])
    run_scatter(call, here, scatter_plan(call, here, "fused", chunks))
    part = call.layout.rows * call.layout.cols * call.wire_dtype.itemsize
    copies = here.of(Copied)
    assert sum(copy.size for copy in copies) == (WORLD - 1) * part
    for rank, box in enumerate(here.parts("box")):
        pushed = [copy for copy in copies if box.data_ptr() <= copy.dst < box.data_ptr() + len(box)]
        assert sum(copy.size for copy in pushed) == (0 if rank == RANK else part)


def test_words_of_peers_can_be_copied() -> None:
    """Where a stream cannot write to another GPU (CUDA 13.1), 4 bytes are copied instead."""
    with machine(RANK, WORLD, peer_writes=False) as here:
        cuda_emulated.emulate(here)
        call = scatter_call((1024,), (64,), 72)
        out, wanted, mine = run_scatter(call, here, scatter_plan(call, here, "fused", 2))
        assert torch.equal(out, wanted)
        check_pushes(here, "fused", mine)
        own = {here.memory.signals.peers[RANK]: 512, here.memory.local.data_ptr(): here.memory.local.nbytes}
        for write in here.of(Wrote):
            assert any(start <= write.address < start + size for start, size in own.items()), (
                "a stream writes to our words only"
            )
        small = [copy for copy in here.of(Copied) if copy.size == 4]
        assert len(small) == (WORLD - 1) * (1 + 2), "FREE for each peer, FULL for each of its chunks"
        values = {cuda_emulated.int32(copy.src).value for copy in small}
        assert values == {call.wire.signature(PUSH), MAX_CHUNKS // 2, MAX_CHUNKS}
        sources = [copy.src for copy in small]
        assert len(set(sources)) == len(values), "constants, which are kept"


# --- operands that are not laid out as the kernels read them -----------------------------------------------------
def test_strided_biases_are_read_right(here: Machine) -> None:
    pair = tensor(72, 2)
    call = replace(gather_call((192,), 64, (72,), full=True), biases=[pair[:, 1]])
    outs = fused_or_refused(call, here)
    if outs is not None:
        full = outs[-1]
        assert torch.equal(outs[0], expected_products(call, full, None)[0])


def test_strided_column_scales_are_read_right(here: Machine) -> None:
    pair = torch.rand(72, 2)
    call = replace(gather_call((192,), 64, (72,), **ROWWISE, full=True), b_scales=[pair[:, 1:].t()])
    outs = fused_or_refused(call, here)
    if outs is not None:
        assert torch.equal(outs[0], expected_products(call, outs[-1], call.a_scale)[0])


def test_expanded_column_scales_are_read_right(here: Machine) -> None:
    call = replace(scatter_call((768,), (64,), 72, **ROWWISE), b_scales=[torch.rand(1, 1).expand(1, 72)])
    if "fused" not in cuda.choice_for(call).refused:
        out, wanted, _ = run_scatter(call, here, scatter_plan(call, here, "fused"))
        assert torch.equal(out, wanted)


def fused_or_refused(call: GatherFacts, here: Machine) -> list[Tensor] | None:
    """What the fused implementation gives; None if it refuses the call."""
    if "fused" in cuda.choice_for(call).refused:
        return None
    outs, _, _ = run_gather(call, here, gather_plan(call, here, "fused"))
    return outs


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_plan_is_not_used_for_memory_of_another_alignment(implementation: str, here: Machine) -> None:
    """Kernels are compiled for what the first call's addresses are multiples of."""
    call = gather_call((192,), 64, (80,), **ROWWISE, travels=True)
    assert call.a_scale is not None
    room = torch.rand(200)
    here.kernels.clear()
    with cuda.forced(implementation):
        for first in (0, 1):
            op(here, replace(call, a_scale=room[first : first + 192].view(192, 1)))


def test_memory_that_a_graph_may_use_outlives_growth(here: Machine) -> None:
    """A captured graph holds addresses; replaying it after a larger call must not touch memory that is gone."""
    with cuda.forced("direct"):
        small = SMALL["gather"]()
        op(here, small)
        here.capturing = 1
        op(here, small)
        here.capturing = 0
        captured = weakref.ref(here.memory.areas["direct"].memory)
        here.memory.require("direct", 4 << 20)
        assert captured() is not None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("full", [False, True])
def test_memory_that_has_grown_goes_at_once(full: bool, implementation: str, here: Machine) -> None:
    """No plan keeps it in a cycle, until Python next looks for such."""
    here.kernels.clear()
    with cuda.forced(implementation):
        for options in ({}, {**ROWWISE, "travels": True}, {**ROWWISE, "along": True}):
            op(here, gather_call((192,), 64, (80,), full=full, **options))
    gc.collect()
    old = [weakref.ref(area.memory) for area in here.memory.areas.values()]
    gc.disable()
    try:
        for name in list(here.memory.areas):
            here.memory.require(name, 8 << 20)
        here.log.clear()
        here.prepared.clear()
        assert [reference() for reference in old] == [None] * len(old)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("CUDA driver error: out of memory", "The GPU has no room for it: use less of it elsewhere"),
        ("no peer access", "All ranks must be on one host with peer access"),
    ],
)
@pytest.mark.parametrize("part", ["reserve", "share"])
def test_memory_that_cannot_be_shared_says_why(part: str, error: str, hint: str) -> None:
    group: Any = mock.Mock(group_name="tp")
    meet = Machine(RANK, WORLD).meet
    with (
        mock.patch.object(cuda.runtime.memory, "meet", meet),
        mock.patch.object(cuda.runtime.memory.driver, part, side_effect=RuntimeError(error)),
        mock.patch.object(cuda.runtime.memory.driver, "reserve" if part == "share" else "share"),
        pytest.raises(SymmetricMemoryError, match=f"4096 bytes on group 'tp': {error}. {hint}"),
    ):
        cuda.runtime.memory._share(group, torch.device("cpu"), 4096, None)


def test_memory_grows_in_whole_granules(here: Machine) -> None:
    box, direct = (here.memory.require(name, size) for name, size in (("box", 1), ("direct", (2 << 20) + 1)))
    assert (box.size, direct.size) == (2 << 20, 4 << 20)
    assert here.memory.require("box", 2 << 20) is box, "it was large enough"
    assert here.memory.growing == ""


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_a_refused_implementation_leaves_the_group_usable(kind: str, here: Machine) -> None:
    """All ranks refuse alike, before anything has begun: the next call runs. One that refuses alone has told so."""
    call = gather_call((5, 64), 64, (72,), dim=1) if kind == "gather" else scatter_call((5, 64), (64,), 72, dim=1)
    with cuda.forced("decomposed"), pytest.raises(RuntimeError, match="cannot run: 5 separate row ranges"):
        op(here, call)
    assert here.memory.failure is None
    here.kernels.clear()
    with cuda.forced("fused"):
        op(here, call)
    assert cuda.last_implementation(here.group) == "fused"
    assert here.memory.skipped == 1
    (told,) = here.memory.calls._told.values()
    assert told.text.endswith("after 1 calls that ended with an error there)")


@pytest.mark.parametrize(("first", "rows", "columns"), [(50, 50, 8), (1, 1, 8), (3, 50, 1), (4, 50, 8)])
def test_scales_of_some_rows_are_where_cublas_takes_them(first: int, rows: int, columns: int) -> None:
    """Those of a rank's second range begin anywhere in the gathered ones; cuBLAS wants multiples of 16 bytes."""
    gathered, b_scale = torch.rand(128), torch.rand(1 + columns)[1:].view(1, columns)
    a_scale = gathered[first : first + rows].view(rows, 1)
    of_a, of_b = cublas._matching(a_scale, b_scale, 50, 8)
    assert torch.equal(of_a, a_scale.expand(50, 1))
    assert torch.equal(of_b, b_scale.expand(1, 8))
    for scale in (of_a, of_b):
        assert scale.is_contiguous()
        assert scale.data_ptr() % 16 == 0
