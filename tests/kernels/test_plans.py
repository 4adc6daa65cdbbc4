"""The plans of `asynctp_kernels.cuda`, run on one rank without a GPU: see `cuda_stubs` and `cuda_emulated`.

Every launch of every test is checked against the kernel's signature (`cuda_stubs.check_promises`). Snapshots are
written anew by `EXPECTTEST_ACCEPT=1`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import SymmetricMemoryError, cuda
from asynctp_kernels.cuda.choose.tiles import Tiles
from asynctp_kernels.cuda.choose.wire import DIRECT, PULL, PUSH
from asynctp_kernels.cuda.gemm import products
from asynctp_kernels.cuda.plans import gather, scatter
from asynctp_kernels.cuda.plans.gather import GatherCall
from asynctp_kernels.cuda.plans.scatter import ScatterCall
from asynctp_kernels.cuda.runtime import watch
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, MAX_WORLD, NO_BOUND, GroupMemory, Words
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
    expected_products,
    gather_call,
    machine,
    result_dtype,
    scatter_call,
    tensor,
    whole,
)
from expecttest import assert_expected_inline
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

RANK, WORLD = 1, 4
ROWWISE: dict[str, Any] = {"dtype": FP8, "scales": "row"}
TENSORWISE: dict[str, Any] = {"dtype": FP8, "scales": "tensor"}


@pytest.fixture
def here() -> Iterator[Machine]:
    with machine(RANK, WORLD) as made:
        cuda_emulated.emulate(made)
        yield made


def tiles_of(dtype: torch.dtype) -> Tiles:
    return Tiles(128, 128, 128 if dtype.itemsize == 1 else 64, warps=4, stages=4, split=2)


def bits(tensor: Tensor) -> Tensor:
    return cuda_emulated.raw(tensor)


def own_counts(here: Machine) -> Tensor:
    """This rank's own words up to the constant: progress and arrivals, which a call leaves cleared."""
    memory = here.memory
    return memory.local[: (memory.one - memory.local.data_ptr()) // 4]


def own_words(here: Machine) -> Tensor:
    """This rank's signal words: FULL, FREE and LANDED, by peer."""
    return words_of(here, RANK)


def words_of(here: Machine, rank: int) -> Tensor:
    """[3, MAX_WORLD]"""
    return cuda_emulated.at(here.memory.signals.peers[rank], (3, MAX_WORLD), torch.int32)


# --- gather: the op on one rank, against the whole ---------------------------------------------------------------
GATHERS: dict[str, dict[str, Any]] = {
    "rows": {"shard": (500,), "k": 64, "ns": (72,)},
    "one row": {"shard": (1,), "k": 8, "ns": (8,)},
    "ragged": {"shard": (130,), "k": 72, "ns": (264,)},
    "several": {"shard": (192,), "k": 64, "ns": (136, 72, 8)},
    "four": {"shard": (192,), "k": 64, "ns": (136, 72, 8, 264), "bias": True},
    "outer": {"shard": (3, 140), "k": 64, "ns": (72,), "dim": 1},
    "outer, several": {"shard": (5, 3, 2), "k": 64, "ns": (72, 136), "dim": 1, "bias": True},
    "inner": {"shard": (5, 30), "k": 64, "ns": (72,), "dim": 0},
    "n-major": {"shard": (192,), "k": 64, "ns": (72,), "k_major": False},
    "fp16": {"shard": (192,), "k": 64, "ns": (72,), "dtype": torch.float16},
    "fp8": {"shard": (192,), "k": 64, "ns": (72, 136), **TENSORWISE},
    "fp8 to fp16": {"shard": (192,), "k": 64, "ns": (72,), **TENSORWISE, "out_dtype": torch.float16, "bias": True},
    "rows of scales": {"shard": (300,), "k": 80, "ns": (72, 136), **ROWWISE, "travels": True},
    "one row and its scale": {"shard": (1,), "k": 64, "ns": (72,), **ROWWISE, "travels": True},
    "rows of scales, outer": {"shard": (2, 100), "k": 64, "ns": (72,), "dim": 1, **ROWWISE, "travels": True},
    "numbers along": {"shard": (300,), "k": 80, "ns": (72, 136), **TENSORWISE, "along": True},
    "numbers along, outer": {"shard": (2, 100), "k": 64, "ns": (72,), "dim": 1, **TENSORWISE, "along": True},
    "numbers along scales that stay": {"shard": (192,), "k": 64, "ns": (72,), **ROWWISE, "along": True},
    "rows of scales that stay": {"shard": (192,), "k": 64, "ns": (72,), **ROWWISE},
    "rows of scales that stay, outer": {"shard": (2, 100), "k": 64, "ns": (72,), "dim": 1, **ROWWISE},
    "columns": {"shard": (50,), "k": 40, "ns": (72, 8), "dim": 1},
    "odd": {"shard": (3, 5), "k": 7, "ns": (9, 1), "dim": 1},
    "odd, in one piece": {"shard": (3, 4), "k": 7, "ns": (9, 1)},
}


#: whose rows are longer than a chunk, so that no tile would know what to wait for
LONG_ROWS = ("one row and its scale",)


def gather_implementations(kept: bool = False) -> Iterator[Any]:
    """(case, implementation) for all that can run it; `kept`: where every rank keeps the gathered A."""
    for case, options in GATHERS.items():
        outer, along_last = gather_call(**options).outer, case == "columns"
        aligned = not case.startswith("odd")
        for implementation, able in (
            ("fused", aligned and not along_last and (kept or case not in LONG_ROWS)),
            ("decomposed", outer <= MAX_CHUNKS and not along_last),
            ("sequential", outer == 1 and not along_last),
            ("direct", True),
        ):
            if able:
                yield pytest.param(case, implementation, id=f"{case}-{implementation}")


def returned() -> Iterator[Any]:
    """(case, implementation, kept) where the gathered A is returned: by this rank, or by every rank."""
    for kept, name in ((False, "pushed"), (True, "pulled")):
        for param in gather_implementations(kept):
            yield pytest.param(*param.values, kept, id=f"{param.id}-{name}")


def gather_plan(call: GatherCall, here: Machine, implementation: str, chunks: int = 3) -> gather.GatherPlan:
    if implementation == "fused":
        return gather.fused_gather(call, here.memory, tiles_of(call.a_shard.dtype), chunks, SMS)
    made: dict[str, Callable[[GatherCall, GroupMemory], gather.GatherPlan]] = {
        "decomposed": gather.decomposed_gather,
        "direct": gather.DirectGather,
        "sequential": gather.SequentialGather,
    }
    return made[implementation](call, here.memory)


def others(call: GatherCall) -> tuple[list[Tensor], list[Tensor]]:
    """All ranks' shards and row scales; ours are those of the call."""
    shards = [tensor(*call.a_shard.shape, dtype=call.a_shard.dtype) for _ in range(WORLD)]
    shards[RANK] = call.a_shard
    scales = []
    if call.travels is not None:
        scales = [torch.rand_like(call.travels) + 0.5 for _ in range(WORLD)]
        scales[RANK] = call.travels
    return shards, scales


def fill_outboxes(here: Machine, shards: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    """What the other ranks' staging kernels do."""
    for rank, outbox in enumerate(here.parts("box")):
        if rank != RANK:
            data = bits(shards[rank])
            outbox[: len(data)] = data
            if scales:
                start = -(-len(data) // 256) * 256
                outbox[start : start + scales[rank].numel() * 4] = bits(scales[rank])


def fill_inbox(
    here: Machine, plan: gather.PushedGather, shards: Sequence[Tensor], scales: Sequence[Tensor], signature: int
) -> None:
    """The other ranks have taken part, and have pushed theirs to us; scales behind all shards."""
    data = [bits(shard) for shard in shards]
    parts = [torch.cat([each, each.new_zeros(-len(each) % 16)]) for each in data]
    peers_come(here, here.memory.landed, parts, signature)
    for rank in (set(range(WORLD)) - {RANK}) if scales else ():
        size = scales[rank].numel() * 4
        start = plan.scale_offset + (rank - (rank > RANK)) * size
        here.parts("box")[RANK][start : start + size] = bits(scales[rank])


def peers_give(
    here: Machine, plan: gather.GatherPlan, call: GatherCall, shards: Sequence[Tensor], scales: Sequence[Tensor]
) -> None:
    """What a plan takes from the other ranks lies where it does."""
    if isinstance(plan, gather.PushedGather):
        fill_inbox(here, plan, shards, scales, call.wire.signature(PUSH))
    elif "box" in here.memory.areas:
        fill_outboxes(here, shards, scales)
    here.kernels["push_gather_kernel"] = functools.partial(cuda_emulated.landed, parts=shards, scales=scales)
    here.gathered = [shards, scales] if scales else [shards]


def run_gather(call: GatherCall, here: Machine, plan: gather.GatherPlan) -> tuple[list[Tensor], Tensor, Any]:
    """Run the plan on data of its own; gives its results, the gathered A and the scale of that.

    Numbers that travel along are the last result; they are checked here.
    """
    fresh = replace(call, a_shard=tensor(*call.a_shard.shape, dtype=call.a_shard.dtype))
    shards, scales = others(fresh)
    peers_give(here, plan, call, shards, scales)
    outs = plan.run(fresh.a_shard, fresh.a_scale, fresh.bs, fresh.b_scales, fresh.biases, fresh.along)
    full = torch.cat([shard.float() for shard in shards], call.dim).to(call.a_shard.dtype)
    if call.along is not None:
        assert torch.equal(outs.pop(), torch.cat(scales, call.dim))
    return outs, full, torch.cat(scales, call.dim) if call.scale_travels else fresh.a_scale


RETURNED = pytest.mark.parametrize("kept", [False, True], ids=["pushed", "pulled"])


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


IN_ROWS = [case for case in GATHERS if not case.startswith(("columns", "odd"))]


@pytest.mark.parametrize("chunks", range(1, MAX_CHUNKS + 1))
@pytest.mark.parametrize("case", IN_ROWS)
def test_bytes_that_a_gather_pulls(case: str, chunks: int, here: Machine) -> None:
    """The copies move each shard of another rank once, its scales with it, and the own ones that are returned."""
    call = gather_call(**GATHERS[case], kept=True)
    run_gather(call, here, gather_plan(call, here, "fused", chunks))
    shard = call.a_shard.numel() * call.a_shard.itemsize
    scales = 0 if call.travels is None else call.travels.numel() * 4
    copies, own = here.of(Copied), shard + (0 if call.along is None else scales)
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
    assert isinstance(plan, gather.PushedGather)
    run_gather(call, here, plan)
    shard = call.a_shard.numel() * call.a_shard.itemsize
    scales = 0 if call.travels is None else call.travels.numel() * 4
    copies, boxes = here.of(Copied), here.parts("box")
    assert sum(copy.size for copy in copies) == (WORLD - 1) * (shard + scales)
    kept = ["keep_kernel"] * WORLD if full else []
    assert [entry.prepared.name for entry in here.of(Launched)] == kept + ["gemm_kernel"] * (implementation == "fused")
    for peer in set(range(WORLD)) - {RANK}:
        slot, box = RANK - (peer < RANK), boxes[peer].data_ptr()
        start, end = box + slot * plan.slot_bytes, box + (slot + 1) * plan.slot_bytes
        rows = sorted((copy for copy in copies if start <= copy.dst < end), key=lambda copy: copy.dst)
        assert sum(copy.size for copy in rows) == shard
        assert [copy.dst - start for copy in rows] == [copy.src - rows[0].src for copy in rows]
        start = box + plan.scale_offset + slot * scales
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
    assert isinstance(plan, gather.PushedGather)
    wire, rows = plan.wire_chunks, plan.chunk_rows
    announcing = [b for b in range(wire.size + 1) if wire.complete(b) != wire.complete(b - 1)]
    for end in range(1, call.layout.rows + 1):
        chunk = min((end - 1) // rows, MAX_CHUNKS - 1)
        assert chunk >= wire.covering(end * plan.row_bytes)
        least = next(b for b in announcing if wire.complete(b) >= chunk + 1)
        assert least >= end * plan.row_bytes, "with so many bytes the chunk is announced, and these rows are there"
    if plan.outer <= MAX_CHUNKS:
        decomposed = gather_plan(call, here, "decomposed")
        here.log.clear()
        run_gather(call, here, decomposed)
        for source in plan.sources:
            word = here.memory.landed.at(RANK, source)
            waited = [wait.value for wait in here.of(Waited) if wait.address == word and wait.stream == MAIN]
            needed = [
                wire.covering((block + 1) * call.layout.inner * plan.row_bytes) + 1 for block in range(plan.outer)
            ]
            assert waited == sorted(set(needed))


def test_a_shard_with_gaps_is_made_whole_first(here: Machine) -> None:
    wide = tensor(192, 128)
    ways = itertools.product(((True, False), (False, False), (True, True)), ("fused", "decomposed", "direct"))
    for (full, kept), implementation in ways:
        call = replace(gather_call((192,), 64, (72,), full=full, kept=kept), a_shard=wide[:, ::2])
        plan = gather_plan(call, here, implementation)
        shards, _ = others(call)
        peers_give(here, plan, call, shards, [])
        out, *gathered = plan.run(call.a_shard, None, call.bs, (), call.biases)
        assert torch.equal(out, expected_products(call, torch.cat(shards), None)[0].view(out.shape))
        assert [torch.equal(each, torch.cat(shards)) for each in gathered] == [True] * full


# --- scatter -----------------------------------------------------------------------------------------------------
CONVERTED, AVERAGE, ADDED = {"sum_dtype": torch.float32}, {"reduce_op": "avg"}, {"added": True}
SCATTERS: dict[str, dict[str, Any]] = {
    "rows": {"rows": (2000,), "ks": (64,), "n": 72},
    "few rows": {"rows": (4,), "ks": (8,), "n": 8},
    "ragged": {"rows": (520,), "ks": (72,), "n": 264},
    "average": {"rows": (520,), "ks": (64,), "n": 72, "reduce_op": "avg"},
    "several": {"rows": (768,), "ks": (64, 72, 8), "n": 136},
    "four": {"rows": (768,), "ks": (64, 72, 8, 136), "n": 136},
    "bias": {"rows": (768,), "ks": (64,), "n": 72, "bias": True},
    "outer": {"rows": (3, 520), "ks": (64,), "n": 72, "dim": 1},
    "outer, several": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1},
    "inner": {"rows": (8, 30), "ks": (64,), "n": 72, "dim": 0},
    "n-major": {"rows": (768,), "ks": (64,), "n": 72, "k_major": False},
    "fp16": {"rows": (768,), "ks": (64,), "n": 72, "dtype": torch.float16},
    "fp8": {"rows": (768,), "ks": (64,), "n": 72, **TENSORWISE},
    "rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, "bias": True},
    "rows of scales, outer": {"rows": (2, 400), "ks": (64,), "n": 72, "dim": 1, **ROWWISE},
    "several scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **ROWWISE},
    "four scaled": {"rows": (520,), "ks": (64, 96, 96, 16), "n": 264, **TENSORWISE, "reduce_op": "avg"},
    "four scaled, precise": {"rows": (520,), "ks": (64, 96, 96, 16), "n": 264, **TENSORWISE, "fast": False},
    "several scaled, bias": {"rows": (768,), "ks": (80, 64), "n": 72, **TENSORWISE, "bias": True},
    "several scaled, bias, outer": {
        "rows": (2, 400),
        "ks": (64, 16, 80),
        "n": 72,
        "dim": 1,
        **ROWWISE,
        "bias": True,
    },
    "several scaled, outer": {"rows": (2, 400), "ks": (64, 16, 80), "n": 72, "dim": 1, **ROWWISE},
    "columns": {"rows": (50,), "ks": (40, 8), "n": 72, "dim": 1},
    "odd": {"rows": (3, 20), "ks": (7,), "n": 9, "dim": 1},
    "odd rows": {"rows": (12,), "ks": (7,), "n": 9},
    "converted": {"rows": (768,), "ks": (64,), "n": 72, "bias": True, **CONVERTED},
    "converted fp16, average": {"rows": (520,), "ks": (64,), "n": 72, "dtype": torch.float16, **CONVERTED, **AVERAGE},
    "converted, outer": {"rows": (3, 520), "ks": (64,), "n": 72, "dim": 1, **CONVERTED},
    "converted, several": {"rows": (768,), "ks": (64, 72, 8), "n": 136, **CONVERTED},
    "converted, outer, several": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1, **CONVERTED},
    "converted columns": {"rows": (50,), "ks": (40, 8), "n": 72, "dim": 1, **CONVERTED},
    "converted rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, **CONVERTED},
    "converted, several scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **ROWWISE, **CONVERTED},
    "odd converted": {"rows": (12,), "ks": (7, 3), "n": 9, **CONVERTED},
    "added": {"rows": (768,), "ks": (64,), "n": 72, "bias": True, **ADDED},
    "added, outer, several": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1, **ADDED},
    "added rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, **ADDED},
    "added, converted": {"rows": (768,), "ks": (64,), "n": 72, **CONVERTED, **AVERAGE, **ADDED},
    "added columns": {"rows": (50,), "ks": (40,), "n": 72, "dim": 1, **ADDED},
    "multiplied": {"rows": (768,), "ks": (64,), "n": 72, "factors": (-0.25,)},
    "multiplied, bias": {"rows": (768,), "ks": (64,), "n": 72, "bias": True, "factors": (8.0,)},
    "multiplied fp16, average": {
        "rows": (520,),
        "ks": (64,),
        "n": 72,
        "dtype": torch.float16,
        "factors": (0.125,),
        **AVERAGE,
    },
    "multiplied rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, "factors": (2.0,)},
    "multiplied, converted": {"rows": (768,), "ks": (64,), "n": 72, **CONVERTED, "factors": (2.0**-30,)},
    "multiplied sum": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1, "factors": (1.0, 1.0, 4.0)},
    "multiplied sum, scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **TENSORWISE, "factors": (1.0, 1.0, 0.5)},
    "multiplied apart": {"rows": (768,), "ks": (64, 72, 8), "n": 136, "factors": (1.0, -1.0, 0.5)},
    "multiplied apart fp16": {"rows": (768,), "ks": (64, 8), "n": 72, "dtype": torch.float16, "factors": (2.0, 0.5)},
    "multiplied apart, converted": {"rows": (768,), "ks": (64, 8), "n": 72, **CONVERTED, "factors": (0.5, -2.0)},
    "multiplied apart, scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **ROWWISE, "factors": (-1.0, 0.25)},
    "multiplied apart, added": {
        "rows": (768,),
        "ks": (64, 8),
        "n": 72,
        **ADDED,
        "factors": (1.0, 0.5, 0.25),
        "bias": True,
    },
    "multiplied apart, and in all": {"rows": (768,), "ks": (64, 8), "n": 72, "factors": (0.5, 2.0, 4.0)},
    "multiplied columns": {"rows": (50,), "ks": (40, 8), "n": 72, "dim": 1, "factors": (2.0, -4.0, 0.5)},
}


def scatter_implementations() -> Iterator[Any]:
    """(case, implementation) for all that can run it."""
    for case, options in SCATTERS.items():
        outer, along_last = scatter_call(**options).outer, case.endswith("columns")
        in_gemm = not case.startswith(("odd", "added", "several scaled, bias", "multiplied apart"))
        in_gemm &= "sum_dtype" not in options or len(options["ks"]) == 1
        for implementation, able in (
            ("fused", in_gemm and not along_last),
            ("decomposed", outer <= MAX_CHUNKS and not along_last),
            ("sequential", outer == 1 and not along_last),
            ("direct", True),
        ):
            if able:
                yield pytest.param(case, implementation, id=f"{case}-{implementation}")


def scatter_plan(call: ScatterCall, here: Machine, implementation: str, chunks: int = 3) -> scatter.ScatterPlan:
    if implementation == "fused":
        return scatter.FusedScatter(call, here.memory, tiles_of(call.a_parts[0].dtype), chunks, SMS)
    made = {
        "decomposed": scatter.DecomposedScatter,
        "direct": scatter.DirectScatter,
        "sequential": scatter.SequentialScatter,
    }
    return made[implementation](call, here.memory)


def peers_come(here: Machine, full: Words, parts: Sequence[Tensor], signature: int) -> None:
    """The other ranks have come to the call, and have pushed what they have for us, as the words `full` say."""
    size = parts[RANK].numel() * parts[RANK].itemsize
    for rank in set(range(WORLD)) - {RANK}:
        cuda_emulated.int32(here.memory.free.at(RANK, rank)).value = signature
        cuda_emulated.int32(full.at(RANK, rank)).value = MAX_CHUNKS
        slot = rank - (rank > RANK)
        here.parts("box")[RANK][slot * size : (slot + 1) * size] = bits(parts[rank])


def run_scatter(call: ScatterCall, here: Machine, plan: scatter.ScatterPlan) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the plan on data of its own; gives its result, what it must be, and our parts for all ranks."""
    fresh = replace(call, a_parts=[tensor(*a.shape, dtype=a.dtype) for a in call.a_parts])
    if call.added is not None:
        fresh = replace(fresh, added=tensor(*call.added.shape, dtype=call.added.dtype))
    mine = whole(fresh, plan.name).chunk(WORLD, call.dim)  # type: ignore[attr-defined]
    for_us = [tensor(*mine[RANK].shape, dtype=mine[RANK].dtype) for _ in range(WORLD)]
    for_us[RANK] = mine[RANK].contiguous()
    if "box" in here.memory.areas:
        peers_come(here, here.memory.full, for_us, call.wire.signature(PUSH))
    here.kernels["push_reduce_kernel"] = functools.partial(cuda_emulated.landed, parts=for_us)
    here.scattered = for_us
    out = plan.run(fresh.a_parts, fresh.b_parts, fresh.a_scales, fresh.b_scales, fresh.biases, fresh.added)
    total = sum((part.float() for part in for_us), torch.zeros(()))
    return out, (total * (1 / WORLD if call.reduce_op == "avg" else 1)).to(result_dtype(call)), list(mine)


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


def check_pushes(here: Machine, implementation: str, mine: Sequence[Tensor]) -> None:
    """Every other rank's inbox has our part for it, where the reduction there looks for it."""
    if implementation in ("direct", "sequential"):
        assert here.of(Copied) == []
        return
    for rank in set(range(WORLD)) - {RANK}:
        part = bits(mine[rank])
        slot = RANK - (rank < RANK)
        assert torch.equal(here.parts("box")[rank][slot * len(part) : (slot + 1) * len(part)], part)


def check_words(here: Machine, implementation: str, call: ScatterCall) -> None:
    """Every wait of a stream is for a word that says so, exactly where it is the call's; none is left over."""
    signature = call.wire.signature(PUSH)
    for wait in here.of(Waited):
        assert wait.found == wait.value if wait.exactly else wait.found >= wait.value
        assert wait.exactly == (wait.value == signature)
    assert own_counts(here).count_nonzero() == 0
    assert own_words(here).count_nonzero() == 0
    for rank in set(range(WORLD)) - {RANK} if implementation in ("fused", "decomposed") else ():
        theirs, full = words_of(here, rank), here.memory.full.at(rank, RANK)
        posted = [write.value for write in here.of(Wrote) if write.address == full]
        assert posted == sorted(set(posted))
        assert theirs[:2, RANK].tolist() == [MAX_CHUNKS, signature]
        theirs[:2, RANK] = 0
        assert theirs.count_nonzero() == 0


@pytest.mark.parametrize("case", ["several scaled", "four scaled", "four scaled, precise", "several scaled, outer"])
def test_sums_of_scaled_products_are_one_gemm(case: str, here: Machine) -> None:
    """Nothing is made before it, and each product has its own scales."""
    call = scatter_call(**SCATTERS[case])
    run_scatter(call, here, scatter_plan(call, here, "fused"))
    gemm = here.launched("gemm_kernel")
    count = len(call.b_parts)
    assert gemm.prepared.constants["COUNT"] == count
    assert [gemm.arguments[f"c{i}"] for i in (1, 2, 3)] == [None] * 3
    for name, scales in (("a_scale", call.a_scales), ("s", call.b_scales)):
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


# --- calls that come again -----------------------------------------------------------------------------------------
@pytest.fixture
def recording(here: Machine) -> Machine:
    here.records = True
    return here


def at_the_same_place(plan: Any, names: Sequence[str]) -> None:
    """From its first call on, the plan has its tensors where that call had them, with what each call brings."""
    make, kept = plan.tensors, []

    def tensors(*args: Any) -> Any:
        call = make(*args)
        kept.append(call)
        for name in names:
            pairs = zip(several(getattr(kept[0], name)), several(getattr(call, name)), strict=True)
            for old, new in pairs:
                bits(old).copy_(bits(new))
        return kept[0]

    plan.tensors = tensors


def several(found: Tensor | Sequence[Tensor] | None) -> Sequence[Tensor]:
    return [] if found is None else [found] if isinstance(found, Tensor) else found


def recorded_cases(cases: Iterator[Any]) -> list[Any]:
    return [case for case in cases if case.values[1] != "sequential"]


@pytest.mark.parametrize(("case", "implementation", "kept"), recorded_cases(returned()))
def test_recorded_gather(case: str, implementation: str, kept: bool, recording: Machine) -> None:
    """The second call on the same memory is recorded, the later ones only launch that: each on its own data.

    Not so copies of many ranges, which a graph that is launched cannot be told other memory of.
    """
    call = gather_call(**GATHERS[case], full=True, kept=kept)
    plan = gather_plan(call, recording, implementation)
    at_the_same_place(plan, ("shard", "a_scale", "numbers"))
    for number in range(4):
        (*outs, gathered), full, a_scale = run_gather(call, recording, plan)
        assert torch.equal(bits(gathered), bits(full))
        for out, wanted in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(wanted.shape), wanted)
        flat = all(copied.height == 1 for copied in recording.of(Copied))
        assert len(recording.recordings) == (number > 0)
        assert len(recording.memory.recordings) == (number > 0 and flat)
        assert flat == (implementation == "direct" or case != "outer, several" or not kept)


@pytest.mark.parametrize(("case", "implementation"), recorded_cases(scatter_implementations()))
def test_recorded_scatter(case: str, implementation: str, recording: Machine) -> None:
    call = scatter_call(**SCATTERS[case])
    plan = scatter_plan(call, recording, implementation)
    at_the_same_place(plan, ("a_parts", "added"))
    for number in range(4):
        recording.log.clear()
        out, wanted, mine = run_scatter(call, recording, plan)
        assert torch.equal(out, wanted)
        check_pushes(recording, implementation, mine)
        check_words(recording, implementation, call)
        assert len(recording.memory.recordings) == len(recording.recordings) == (number > 0)


def test_trace_of_a_recorded_gather() -> None:
    """The copy stream is a branch of the graph, which comes behind what was left in flight on the stream itself."""
    with machine(rank=0, world=2) as here:
        here.records = True
        call = gather_call((256,), 64, (72,), world=2, kept=True)
        plan = gather.fused_gather(call, here.memory, tiles_of(torch.bfloat16), 1, SMS)
        at_the_same_place(plan, ())
        for _ in range(2):
            plan.run(call.a_shard, None, call.bs, (), call.biases)
        gathered = here.launched("gemm_kernel").arguments["a1"].address
        assert here.urgent == [False]
        (here.log,) = here.recordings
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr(), gathered=gathered),
            """\
graph  record start
copy   await start
copy   await flown at launch
copy   launch stage_kernel
copy   copy 32768 B to gathered + 32768 from box of 1 + 0
copy   write arrivals[1] = 1
copy   copy 32768 B to gathered + 0 from own + 0
copy   record end
graph  launch gemm_kernel
graph  await end""",
        )


def test_trace_of_a_recorded_scatter() -> None:
    """So is the reducer: the words of parts in flight and of its own are the same."""
    with machine(rank=0, world=2) as here:
        here.records = True
        call = scatter_call((512,), (64,), 72, world=2)
        plan = scatter.FusedScatter(call, here.memory, tiles_of(torch.bfloat16), 1, SMS)
        at_the_same_place(plan, ())
        for _ in range(2):
            plan.run(call.a_parts, call.b_parts, (), (), call.biases)
        staging = here.launched("gemm_kernel").arguments["c0"].address
        (here.log,) = here.recordings
        assert_expected_inline(
            here.trace(staging=staging),
            """\
graph  record start
copy   await start
copy   await flown at launch
graph  launch gemm_kernel
copy   write free of 1 [0] = call
copy   write awaited = call
copy   wait free of 0 [1] == call
copy   write free of 0 [1] = 0
copy   write awaited = 0
copy   wait progress[1, 0] >= 2
copy   write progress[1, 0] = 0
copy   record running
copy   copy 36864 B to box of 1 + 0 from staging + 36864
copy   write full of 1 [0] = 4
copy   record end
reduce await running
reduce await flown at launch
reduce launch reduce_kernel
reduce record reduced
graph  await end
graph  await reduced""",
        )


def otherwise(how: str, rows: int, cols: int) -> Tensor:
    """A matrix that no kernel takes as it lies."""
    return tensor(cols, rows).t() if how == "transposed" else tensor(rows * cols + 1)[1:].view(rows, cols)


@RETURNED
@pytest.mark.parametrize("how", ["transposed", "unaligned"])
@pytest.mark.parametrize("implementation", ["fused", "decomposed", "direct"])
def test_what_a_gather_has_to_copy_first_is_recorded(
    implementation: str, how: str, kept: bool, recording: Machine
) -> None:
    """Its copy is made in the recording, of what is there at each launch."""
    call, place = gather_call((256,), 64, (72,), full=True, kept=kept), otherwise(how, 256, 64)
    plan = gather_plan(replace(call, a_shard=place), recording, implementation)
    make = plan.tensors
    plan.tensors = lambda operands: make((place.copy_(operands[0]), *operands[1:]))  # type: ignore[method-assign]
    at_the_same_place(plan, ())
    for number in range(3):
        (out, gathered), full, _ = run_gather(call, recording, plan)
        assert torch.equal(bits(gathered), bits(full))
        assert torch.equal(out, expected_products(call, full, None)[0])
        assert len(recording.recordings) == (number > 0)


@pytest.mark.parametrize(
    ("implementation", "how"), [("fused", "unaligned"), ("direct", "unaligned"), ("direct", "transposed")]
)
def test_what_a_scatter_has_to_copy_first_is_recorded(implementation: str, how: str, recording: Machine) -> None:
    call, place = scatter_call((512,), (64,), 72), otherwise(how, 512, 64)
    plan = scatter_plan(replace(call, a_parts=[place]), recording, implementation)
    make = plan.tensors
    plan.tensors = lambda operands: make(([place.copy_(operands[0][0])], *operands[1:]))  # type: ignore[method-assign]
    at_the_same_place(plan, ())
    for number in range(3):
        out, wanted, _ = run_scatter(call, recording, plan)
        assert torch.equal(out, wanted)
        assert len(recording.recordings) == (number > 0)


@RETURNED
@pytest.mark.parametrize("implementation", ["fused", "decomposed", "direct"])
def test_other_memory_is_enqueued_anew(implementation: str, kept: bool, recording: Machine) -> None:
    """Whichever tensor of a call lies elsewhere, it is another call."""
    call = gather_call((256,), 64, (72, 136), **ROWWISE, travels=True, bias=True, full=True, kept=kept)
    plan = gather_plan(call, recording, implementation)
    recording.kernels.clear()
    first = plan.tensors((call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases, None))
    calls = [first, first]
    for name, tensors in first._asdict().items():
        for i, one in enumerate(several(tensors)):
            moved = one.clone(memory_format=torch.preserve_format)
            lists = isinstance(tensors, Sequence) and not isinstance(tensors, Tensor)
            calls.append(first._replace(**{name: [*tensors[:i], moved, *tensors[i + 1 :]] if lists else moved}))
    whole = kept or implementation == "direct"
    assert len(calls) == 2 + 12 + whole, "the gathered scales are not returned: only where they are needed, they are"
    for number, made in enumerate(calls):
        plan.tensors = lambda *args, made=made: made  # type: ignore[method-assign]
        plan.run(call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases)
        assert len(recording.recordings) == (number > 0)
    assert len({made.addresses() for made in calls}) == len(calls) - 1


def test_a_call_in_a_capture_is_enqueued(recording: Machine) -> None:
    """It belongs to the program's graph, whatever has been recorded; and it is no reason to record."""
    call = gather_call((256,), 64, (72,), kept=True)
    plan = gather_plan(call, recording, "fused")
    at_the_same_place(plan, ())
    for capturing, recorded in ((7, 0), (7, 0), (0, 0), (0, 1), (7, 1)):
        recording.capturing = capturing
        recording.log.clear()
        plan.run(call.a_shard, None, call.bs, (), call.biases)
        assert len(recording.recordings) == recorded
        assert [entry.prepared.name for entry in recording.of(Launched)] == ["stage_kernel", "gemm_kernel"]


def test_growth_and_release_forget_what_was_recorded(recording: Machine) -> None:
    call = gather_call((256,), 64, (72,), kept=True)
    plan = gather_plan(call, recording, "fused")
    at_the_same_place(plan, ())
    for _ in range(2):
        plan.run(call.a_shard, None, call.bs, (), call.biases)
    memory = recording.memory
    assert len(memory.recordings) == 1
    memory.require("box", memory.areas["box"].size + 1)
    assert len(memory.recordings) == 0
    fresh = gather_plan(call, recording, "fused")
    at_the_same_place(fresh, ())
    for _ in range(2):
        fresh.run(call.a_shard, None, call.bs, (), call.biases)
    assert len(memory.recordings) == 1
    cuda.release(recording.group)
    assert len(memory.recordings) == 0


# --- what the driver is asked for --------------------------------------------------------------------------------
def test_trace_of_a_gather() -> None:
    with machine(rank=1, world=3) as here:
        call = gather_call((256,), 64, (72,), world=3, kept=True)
        plan = gather.fused_gather(call, here.memory, tiles_of(torch.bfloat16), 2, SMS)
        *_, full = plan.run(call.a_shard, None, call.bs, (), call.biases)
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
        plan = gather.fused_gather(call, here.memory, tiles_of(FP8), 1, SMS)
        plan.run(call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases)
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
        plan = gather.fused_gather(call, here.memory, tiles_of(FP8), 2, SMS)
        plan.run(call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases)
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
        plan = gather.fused_gather(call, here.memory, tiles_of(torch.bfloat16), 2, SMS)
        *_, full = plan.run(call.a_shard, None, call.bs, (), call.biases)
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


def test_trace_of_a_recorded_gather_that_pushes() -> None:
    with machine(rank=0, world=2) as here:
        here.records = True
        call = gather_call((256,), 64, (72,), world=2)
        plan = gather.fused_gather(call, here.memory, tiles_of(torch.bfloat16), 1, SMS)
        at_the_same_place(plan, ())
        for _ in range(2):
            plan.run(call.a_shard, None, call.bs, (), call.biases)
        assert here.launched("gemm_kernel").arguments["words"] == here.memory.landed.at(0)
        (here.log,) = here.recordings
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
        gather.DecomposedPush(call, here.memory).run(call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases)
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
        gather.DecomposedPush(call, here.memory).run(call.a_shard, None, call.bs, (), call.biases)
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
        plan = scatter.FusedScatter(call, here.memory, tiles_of(torch.bfloat16), 2, SMS)
        plan.run(call.a_parts, call.b_parts, (), (), call.biases)
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
copy   record end
reduce await running
reduce launch reduce_kernel
reduce record reduced
main   await end
main   await reduced
main   record last""",
        )


def test_trace_of_a_decomposed_scatter() -> None:
    with machine(rank=0, world=2) as here:
        call = scatter_call((256,), (64,), 72, world=2)
        plan = scatter.DecomposedScatter(call, here.memory)
        plan.run(call.a_parts, call.b_parts, (), (), call.biases)
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
copy   record end
reduce await event[0]
reduce launch reduce_kernel
reduce record reduced
main   await end
main   await reduced
main   record last""",
        )


def test_trace_of_a_direct_call() -> None:
    with machine(rank=0, world=2) as here:
        call = gather_call((256,), 64, (72,), world=2)
        gather.DirectGather(call, here.memory).run(call.a_shard, None, call.bs, (), call.biases)
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
}


def _gather_runner(here: Machine, implementation: str, **options: bool) -> Callable[[], object]:
    call = gather_call((192,), 64, (72,), **options)
    plan = gather_plan(call, here, implementation)
    return lambda: plan.run(call.a_shard, None, call.bs, (), call.biases)


def _scatter_runner(here: Machine, implementation: str) -> Callable[[], object]:
    call = scatter_call((768,), (64,), 72)
    plan = scatter_plan(call, here, implementation)
    return lambda: plan.run(call.a_parts, call.b_parts, (), (), call.biases)


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
            plan = gather.fused_gather(call, here.memory, Tiles(128, 256, 64, warps=8, stages=3), 2, SMS)
            plan.run(call.a_shard, None, call.bs, (), call.biases)
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


def test_calls_of_two_threads_come_one_after_the_other(recording: Machine) -> None:
    """One that is between its begin and its end holds back the other, which then waits for its end."""
    plan = PLANS["gather-direct"](recording)
    plan()
    recording.log.clear()
    enqueue, entered, go_on = recording.memory.run, threading.Event(), threading.Event()

    def slowly(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert go_on.wait(10)
        enqueue(*args)

    recording.memory.run = slowly  # type: ignore[method-assign]
    first = threading.Thread(target=plan)
    first.start()
    assert entered.wait(10)
    second = threading.Thread(target=plan)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert recording.of(Launched) == []
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert [type(entry) for entry in recording.log] == [Launched, Recorded] * 2


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


# --- growth, capture --------------------------------------------------------------------------------------------
def op(here: Machine, call: GatherCall | ScatterCall, check: Callable[[], None] = lambda: None) -> Any:
    """The call as the op makes it."""
    if isinstance(call, GatherCall):
        return cuda.run_gather(
            call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases, call.dim, call.scale_travels,
            call.out_dtype, call.fast, call.return_a_full, call.world, here.group, check, call.along, call.kept,
        )  # fmt: skip
    return cuda.run_scatter(
        call.a_parts, call.b_parts, call.a_scales, call.b_scales, call.biases, call.reduce_op, call.dim, call.out_dtype,
        call.fast, call.world, here.group, check, call.sum_dtype, call.added, call.factors)  # fmt: skip


IMPLEMENTATIONS = ("fused", "decomposed", "direct")


# --- all-reduces: the plan of a scatter, and a gather --------------------------------------------------------------
def all_reduce(here: Machine, call: ScatterCall, check: Callable[[], None] = lambda: None) -> Tensor | None:
    """The sum of a call's products as the op makes it."""
    return cuda.run_all_reduce(
        call.a_parts, call.b_parts, call.a_scales, call.b_scales, call.biases, call.reduce_op, call.out_dtype,
        call.fast, here.group, check, call.sum_dtype, call.added, call.factors)  # fmt: skip


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was given to the all-gather, which takes all ranks' rows to be ours."""
    given: list[Tensor] = []

    def all_gather(shard: Tensor, group: object) -> Tensor:
        given.append(shard)
        return torch.cat([shard] * WORLD)

    monkeypatch.setattr(cuda, "all_gather", all_gather)
    return given


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{}, {**ROWWISE, "fast": False}], ids=["bf16", "rows of scales, slow"])
def test_all_reduce(implementation: str, options: dict[str, Any], here: Machine, shards: list[Tensor]) -> None:
    """Rows of all dimensions together are scattered, by the implementation that is asked for, and gathered."""
    call, checked = scatter_call((2, 96, 2), (64,), 80, dim=1, **options), []
    rows = replace(call, a_parts=[call.a_parts[0].view(384, 64)], dim=0)
    part = whole(rows, implementation).chunk(WORLD)
    here.kernels["push_reduce_kernel"] = functools.partial(cuda_emulated.landed, parts=[part[RANK]] * WORLD)
    with cuda.forced(implementation):
        for _ in range(2):
            if implementation != "direct":
                here.memory.require("box", part[RANK].numel() * 2 * WORLD)
                signature = replace(rows, unscaled_op="matmul_all_reduce").wire.signature(PUSH)
                peers_come(here, here.memory.full, [part[RANK].contiguous()] * WORLD, signature)
            out = all_reduce(here, call, lambda: checked.append(1))
            assert out is not None
            assert (out.shape, out.dtype) == ((2, 96, 2, 80), torch.bfloat16)
            assert torch.equal(shards.pop(), (part[RANK].float() * WORLD).bfloat16())
    assert checked == [1], "once for each plan"
    assert here.memory.last_implementation == implementation


def test_all_reduce_of_rows_that_cannot_be_divided(here: Machine, shards: list[Tensor]) -> None:
    checked: list[int] = []
    for _ in range(2):
        assert all_reduce(here, scatter_call((7,), (64,), 72), lambda: checked.append(1)) is None
    assert (checked, shards, here.memory.last_implementation) == ([1], [], "sequential")
    with cuda.forced("direct"), pytest.raises(RuntimeError, match="7 rows are not divisible by 4 ranks"):
        all_reduce(here, scatter_call((7,), (64,), 72))


def test_all_reduce_and_scatter_of_one_shape_are_chosen_apart(here: Machine, shards: list[Tensor]) -> None:
    """64 rows: a scatter is fastest direct, an all-reduce by NCCL."""
    call = scatter_call((64,), (64,), 72)
    assert all_reduce(here, call) is None
    assert op(here, call) is not None
    assert here.memory.last_implementation == "direct"
    assert all_reduce(here, call) is None
    assert shards == []


SMALL: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather_call((192,), 64, (72,), kept=True),
    "scatter": lambda: scatter_call((768,), (64,), 72),
}
LARGE: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather_call((4608,), 256, (8,), kept=True),
    "scatter": lambda: scatter_call((8192,), (8,), 264),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_growth_during_a_capture_is_refused(name: str, implementation: str) -> None:
    with machine(RANK, WORLD) as here, cuda.forced(implementation):
        small, large = SMALL[name](), LARGE[name]()
        assert op(here, small) is not None
        here.capturing = 1
        assert op(here, small) is not None
        for _ in range(2):
            with pytest.raises(SymmetricMemoryError, match=r"group 'tp' has \d+ bytes of \w+ memory .* Run .*once"):
                op(here, large)
        here.capturing = 0
        assert op(here, large) is not None
        here.capturing = 1
        assert op(here, large) is not None


def test_a_first_call_cannot_be_captured() -> None:
    with machine(RANK, WORLD) as here:
        here.capturing = 1
        for _ in range(2):
            with pytest.raises(SymmetricMemoryError, match=r"first call of a group cannot be captured: run .* once"):
                op(here, SMALL["gather"]())
        here.capturing = 0
        assert op(here, SMALL["gather"]()) is not None, "the refusal is not for good"


def test_an_interrupt_ends_what_makes_memory_too() -> None:
    """It is made on another thread, which would wait for its peers until its time is up."""
    stopped = threading.Event()
    told: list[BaseException] = []

    def stop(error: BaseException) -> None:
        told.append(error)
        stopped.set()

    interrupt = KeyboardInterrupt()
    with (
        machine(RANK, WORLD),
        mock.patch("concurrent.futures.Future.result", side_effect=interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        cuda.runtime.driver.outside_pools(torch.device("cpu"), lambda: stopped.wait(60), stop)
    assert told == [interrupt]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_memory_is_made_outside_the_pools_of_the_calling_thread(implementation: str) -> None:
    """`mode="reduce-overhead"` raises if a program's first run leaves anything in its graph's pool."""
    with machine(RANK, WORLD) as here, cuda.forced(implementation):
        op(here, LARGE["gather"]())
        op(here, LARGE["scatter"]())
        assert len(here.makers) >= 2, "the words, and the areas"
        assert threading.current_thread() not in here.makers


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_plans_are_kept_until_the_memory_grows(name: str, implementation: str) -> None:
    checked: list[str] = []
    with machine(RANK, WORLD) as here, cuda.forced(implementation):
        small, large = SMALL[name](), LARGE[name]()
        for _ in range(3):
            op(here, small, lambda: checked.append("small"))
        assert checked == ["small"]
        kernels = len(here.prepared)
        op(here, large, lambda: checked.append("large"))
        op(here, large, lambda: checked.append("large"))
        assert checked == ["small", "large"]
        for _ in range(2):
            op(here, small, lambda: checked.append("small"))
        assert checked == ["small", "large", "small"], "the plan of the small call held old addresses"
        assert len(here.prepared) == 3 * kernels


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_after_growth_only_new_memory_is_used(name: str, here: Machine) -> None:
    area = "box"
    with cuda.forced("fused"):
        small = SMALL[name]()
        here.memory.require(area, 1)
        old = here.parts(area)
        here.memory.require(area, 8 << 20)
        new = here.parts(area)
        here.log.clear()
        if name == "gather":
            (*_, gathered), full, _ = run_gather(small, here, gather_plan(small, here, "fused"))
            assert torch.equal(gathered, full)
        else:
            out, wanted, _ = run_scatter(small, here, scatter_plan(small, here, "fused"))
            assert torch.equal(out, wanted)
    ends = [end for copy in here.of(Copied) for end in (copy.src, copy.dst)]
    assert not [end for end in ends if within(end, old)]
    assert [end for end in ends if within(end, new)]


def within(address: int, parts: Sequence[Tensor]) -> bool:
    return any(part.data_ptr() <= address < part.data_ptr() + len(part) for part in parts)


def test_one_plan_for_each_list_of_factors(here: Machine) -> None:
    with cuda.forced("direct"):
        for factors in ((), (1.0,), (2.0,), (2.0,), (-2.0,)):
            op(here, scatter_call((64,), (64,), 72, factors=factors))
    assert len(here.memory.plans) == 3, "nothing, or all by 1, is one"


def test_one_plan_for_each_shape_and_no_more_than_some(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_PLANS", 3)
    with cuda.forced("direct"):
        for rows in range(1, 9):
            op(here, gather_call((rows,), 64, (72,)))
            assert 1 <= len(here.memory.plans) <= 3


def test_a_plan_holds_no_operand(here: Machine) -> None:
    """A plan outlives the call that it was made for."""
    here.kernels.clear()
    for name in ("gather", "scatter"):
        for implementation in IMPLEMENTATIONS:
            with cuda.forced(implementation):
                call = SMALL[name]()
                operands = [call.a_shard, *call.bs] if name == "gather" else [*call.a_parts, *call.b_parts]
                watched = [weakref.ref(operand) for operand in operands]
                op(here, call)
                here.prepared.clear()
                here.log.clear()
                del call, operands
                gc.collect()
                assert [reference() for reference in watched] == [None] * len(watched), (name, implementation)


def test_a_released_group_starts_anew(here: Machine) -> None:
    with cuda.forced("direct"):
        op(here, SMALL["gather"]())
        before = here.memory
        here._streams = iter([COPY, REDUCE])
        cuda.release(here.group)
        with pytest.raises(
            SymmetricMemoryError,
            match=r"group 'tp' is out of step since: it was released.* asynctp_kernels.release\(group\)",
        ):
            before.require("box", 1)
        op(here, SMALL["gather"]())
        assert here.memory is not before


def test_memory_goes_with_its_group(here: Machine) -> None:
    here.kernels.clear()
    with cuda.forced("fused"):
        op(here, SMALL["gather"]())
    watched = [weakref.ref(here.group), weakref.ref(here.memory.signals.memory), weakref.ref(here.parts("box")[0])]
    here.group = None
    here.log.clear()
    here.prepared.clear()
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3


def test_a_call_that_fails_half_way_closes_the_memory(here: Machine) -> None:
    """Its other ranks wait for what did not come: nothing may be added to that until all have given up."""

    def fail(launched: Launched) -> None:
        raise RuntimeError("no more launches")

    here.kernels.clear()
    with cuda.forced("fused"):
        op(here, SMALL["gather"]())
        here.kernels["gemm_kernel"] = fail
        with pytest.raises(RuntimeError, match="no more launches"):
            op(here, SMALL["gather"]())
        here.kernels.clear()
        here.log.clear()
        for name in ("gather", "scatter"):
            with pytest.raises(SymmetricMemoryError, match="out of step since: RuntimeError: no more launches"):
                op(here, SMALL[name]())
        assert here.log == []
        here._streams = iter([COPY, REDUCE])
        cuda.release(here.group)
        assert op(here, SMALL["gather"]()) is not None


def test_the_current_device_has_to_be_that_of_the_tensors(here: Machine) -> None:
    here.current_device = 1
    for name in ("gather", "scatter"):
        with pytest.raises(RuntimeError, match=r"tensors on cpu while cuda:1 is the current device; call torch\.cuda"):
            op(here, SMALL[name]())
    here.current_device = None
    assert op(here, SMALL["gather"]()) is not None


def test_a_group_chooses_by_the_table_that_it_agreed_on(here: Machine) -> None:
    here.kernels.clear()
    call = gather_call((4096,), 512, (72,))
    (*_, name), problem = cuda.runtime.driver.machine(0), cuda._gather_problem(call)
    for wanted in ("decomposed", "fused"):
        here.memory.plans.clear()
        here.memory.table = {name: {problem.key: {str(problem.rows): wanted}}}
        op(here, call)
        assert cuda.last_implementation(here.group) == wanted


def test_a_group_of_two_hosts_runs_sequentially(caplog: pytest.LogCaptureFixture) -> None:
    with machine(RANK, WORLD) as here:
        here.hosts = ["a", "a", "b", "b"]
        assert [op(here, SMALL["gather"]()) for _ in range(2)] == [None, None]
        assert cuda.last_implementation(here.group) == "sequential"
    assert [record.getMessage() for record in caplog.records] == [
        "group tp runs the unfused program: its ranks are on 2 hosts (a, b), not on one"
    ]


@pytest.mark.parametrize("world", [1, 9])
def test_a_group_of_a_size_without_kernels_runs_sequentially(world: int, caplog: pytest.LogCaptureFixture) -> None:
    with machine(0, world) as here:
        assert op(here, gather_call((8,), 64, (72,), world=world)) is None
        assert f"{world} ranks; the overlapped ops run on 2 to 8" in caplog.text
        with cuda.forced("sequential"):
            assert op(here, gather_call((8,), 64, (72,), world=world)) is None
        with cuda.forced("fused"), pytest.raises(RuntimeError, match=rf"'fused' was asked for and cannot run: {world}"):
            op(here, gather_call((8,), 64, (72,), world=world))


@pytest.mark.parametrize("world", [4, 9])
def test_arguments_are_checked_before_a_call_is_left_to_the_unfused_program(world: int) -> None:
    checked: list[bool] = []
    with machine(0, world) as here, cuda.forced("sequential"):
        for _ in range(2):
            assert op(here, gather_call((8, 2), 64, (72,), dim=1, world=world), lambda: checked.append(True)) is None
            assert op(here, scatter_call((2, 72), (64,), 72, dim=1, world=world), lambda: checked.append(True)) is None
    assert checked == [True] * (2 if world == 4 else 4), "once for each plan, or each call without any"


def refuse() -> None:
    raise ValueError("asynctp: no")


def moves(here: Machine) -> list[str]:
    """What was sent, and launched."""
    return [f"{entry.size} B" if isinstance(entry, Copied) else entry.prepared.name
            for entry in here.log if isinstance(entry, Copied | Launched)]  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "kept", "wanted"),
    [
        ("fused", False, ["24576 B"] * (WORLD - 1) + ["keep_kernel"] * WORLD),
        ("fused", True, ["stage_kernel"] + ["24576 B"] * (WORLD - 1)),
        ("direct", False, ["push_gather_kernel"]),
    ],
)
def test_a_rank_whose_gather_is_refused_sends_its_shard(
    implementation: str, kept: bool, wanted: list[str], here: Machine
) -> None:
    """The peers' calls are right, and those that follow are the same on all ranks."""
    here.kernels.clear()
    call = gather_call((192,), 64, (72,), kept=kept)
    with cuda.forced(implementation):
        for _ in range(2):
            here.log.clear()
            with pytest.raises(ValueError, match="asynctp: no"):
                op(here, call, refuse)
            assert moves(here) == wanted
        assert op(here, call) is not None
    assert list(here.memory.calls._told) == [call.wire.signature(call.wire.transport(implementation))]
    assert here.memory.failure is None
    assert here.memory.skipped == 0


def test_a_rank_whose_scatter_is_refused_tells_so_by_its_next_calls(here: Machine) -> None:
    """It has nothing to send: the peers must not take its next call for this one."""
    here.kernels.clear()
    scatter, gather = scatter_call((768,), (64,), 72), gather_call((192,), 64, (72,))
    with cuda.forced("fused"):
        assert op(here, scatter) is not None
        for made in range(1, 3):
            here.log.clear()
            with pytest.raises(ValueError, match="asynctp: no"):
                op(here, replace(scatter, dim=-2), refuse)
            assert here.log == []
            assert here.memory.skipped == made
        assert op(here, scatter) is not None
        assert op(here, gather) is not None
    told = list(here.memory.calls._told.values())
    assert told[0] == "reduce_scatter (27648 bytes a rank of bfloat16, sum)"
    after = ", after 2 calls that ended with an error there"
    assert told[1:] == [f"{told[0][:-1]}{after})", f"all_gather (24576 bytes a rank{after})"]
    assert here.memory.failure is None


def test_collectives_without_a_matmul_are_refused_in_the_same_way(here: Machine) -> None:
    here.kernels.clear()
    with cuda.forced("fused"), mock.patch.object(cuda, "register_wait"):
        assert cuda.run_bulk_scatter(tensor(8, 8), "sum", WORLD, here.group, lambda: None) is not None
        for number, run in enumerate((
            lambda: cuda.run_bulk_scatter(tensor(8, 8), "max", WORLD, here.group, refuse),
            lambda: cuda.run_bulk_scatter(tensor(7, 8), "sum", WORLD, here.group, refuse),
            lambda: cuda.run_bulk_all_reduce(tensor(8, 8), "max", here.group, refuse),
        )):  # fmt: skip
            with pytest.raises(ValueError, match="asynctp: no"):
                run()
            assert here.memory.skipped == number + 1
        here.log.clear()
        with pytest.raises(ValueError, match="asynctp: no"):
            cuda.run_bulk_gather(tensor(8, 8), 3, here.group, refuse)
        assert here.of(Copied), "the shard is sent"


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
    if "fused" not in cuda.explain_scatter(call).refused:
        out, wanted, _ = run_scatter(call, here, scatter_plan(call, here, "fused"))
        assert torch.equal(out, wanted)


def fused_or_refused(call: GatherCall, here: Machine) -> list[Tensor] | None:
    """What the fused implementation gives; None if it refuses the call."""
    if "fused" in cuda.explain_gather(call).refused:
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


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_a_refused_implementation_leaves_the_group_usable(kind: str, here: Machine) -> None:
    """All ranks refuse alike, before anything has begun: the next call runs as if nothing had been asked for."""
    call = gather_call((5, 64), 64, (72,), dim=1) if kind == "gather" else scatter_call((5, 64), (64,), 72, dim=1)
    with cuda.forced("decomposed"), pytest.raises(RuntimeError, match="cannot run: 5 separate row ranges"):
        op(here, call)
    assert here.memory.failure is None
    here.kernels.clear()
    with cuda.forced("fused"):
        op(here, call)
    assert cuda.last_implementation(here.group) == "fused"


@pytest.mark.parametrize(("first", "rows", "columns"), [(50, 50, 8), (1, 1, 8), (3, 50, 1), (4, 50, 8)])
def test_scales_of_some_rows_are_where_cublas_takes_them(first: int, rows: int, columns: int) -> None:
    """Those of a rank's second range begin anywhere in the gathered ones; cuBLAS wants multiples of 16 bytes."""
    gathered, b_scale = torch.rand(128), torch.rand(1 + columns)[1:].view(1, columns)
    a_scale = gathered[first : first + rows].view(rows, 1)
    of_a, of_b = products._matching(a_scale, b_scale, 50, 8)
    assert torch.equal(of_a, a_scale.expand(50, 1))
    assert torch.equal(of_b, b_scale.expand(1, 8))
    for scale in (of_a, of_b):
        assert scale.is_contiguous()
        assert scale.data_ptr() % 16 == 0
