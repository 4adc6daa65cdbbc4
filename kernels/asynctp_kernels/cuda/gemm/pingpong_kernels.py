"""The persistent GEMM in warps that each have one thing to do.

    loader         1 warp     awaits the chunk of each tile, and asks TMA for its A and B, stage after stage
    multipliers    2 x 4      each has every other tile of the CTA: matmuls, scales, bias
    storer         1 warp     stores finished tiles, and counts them (scatter)

It takes the arguments of `gemm_kernels.gemm_kernel`, whose docstring says what they are, and does the same with the
same words; the results are the same bits. There all warps of a CTA do everything, so that the tensor cores wait while
a tile is scaled, stored and counted. Here the multipliers take turns: while one is at the end of its tile, the other
multiplies. Which GEMM a call gets is in its tiles (`tiles.tiles_for`).

What they tell each other through mbarriers, of which each phase is one use of the memory it guards:

    full, empty          each stage       loader -> multiplier (TMA arrives), multiplier -> loader
    turns                each multiplier  the other one has asked for all its matmuls
    c_full, c_empty      each multiplier  multiplier -> storer, storer -> multiplier, of its part of a tile

A wait names a phase by its parity only. So who waits must never be two phases behind: a multiplier looks at a stage
only when it has its turn, and all steps before its own are in.

This is Gluon, the dialect below Triton: Triton itself (3.6 to 3.9) gives Hopper's warps no tasks of their own. Gluon
has no interpreter: where Triton interprets, `gemm_kernels` runs.

Memory order, with the source of every fence (what is not here is as in `gemm_kernels`):
- `await_by_warp`: each lane of the loader polls with ld.acquire.sys, and fence.proxy.async orders the TMA loads behind
  it that this lane may issue (PTX ISA, "Async proxy"). A multiplier reads scales that came with the data when a stage
  of the tile is full: the loader's own arrival there is after its acquire, arrivals have release and waits acquire
  semantics (PTX ISA, "mbarrier"), and causality order is transitive.
- `publish_by_warp`: cp.async.bulk.wait_group 0 waits for the writes of this lane's TMA stores, whose completion is
  followed by an implicit proxy fence (PTX ISA, "Async proxy"); bar.warp.sync joins the lanes, and one red.release.gpu
  makes all of it visible to whoever sees the count. An explicit fence.proxy.async costs up to 6 % of a GEMM here.
- `fence_async_shared` orders a multiplier's stores to shared memory and the storer's TMA store, after `c_full`.
"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from asynctp_kernels.cuda.gemm import gemm_kernels

DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
}
#: warps of a multiplier; the first one has the kernel's own
MULTIPLIER = gl.constexpr(4)
#: Registers of a thread. The loader and the storer share a warpgroup, and the first multiplier has what is left of
#: 3 x 128 (`Tiles.registers`).
MANY, FEW = gl.constexpr(176), gl.constexpr(32)

# names differ between Triton 3.6 and 3.8
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# what has integers only is the same function in both languages
tile_of = gluon.jit(gemm_kernels.tile_of.fn)
ends_of = gluon.jit(gemm_kernels.ends_of.fn)
share_of = gluon.jit(gemm_kernels.share_of.fn)


def with_layout(descriptor: Any) -> TensorDescriptor:
    """A descriptor as Gluon takes it: it says how its blocks lie in shared memory."""
    layout = gl.NVMMASharedLayout.get_default_for(descriptor.block_shape, DTYPES[descriptor.base.dtype])
    return TensorDescriptor(
        descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape, layout, descriptor.padding
    )


@gluon.jit
def await_by_warp(word: tl.tensor, value: tl.tensor, known: tl.tensor) -> None:
    """As `gemm_kernels.await_word`, by one warp, for what it asks TMA for after this."""
    gl.inline_asm_elementwise(
        """{
            .reg .pred p, q; .reg .s32 v;
            setp.ne.s32 q, $3, 0;
            @q bra.uni KNOWN;
          POLL:
            ld.acquire.sys.global.s32 v, [$1];
            setp.lt.s32 p, v, $2;
            @p bra POLL;
            bar.warp.sync 0xffffffff;
            fence.proxy.async;
          KNOWN:
            mov.u32 $0, 0; }""",
        "=r,l,r,r",
        [word, value, known.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def publish_by_warp(counter: tl.tensor) -> None:
    """Add 1 to the int32 at `counter` once every TMA store of this warp so far is visible to this GPU."""
    gl.inline_asm_elementwise(
        """{
            .reg .pred p; .reg .u32 t;
            cp.async.bulk.wait_group 0;
            bar.warp.sync 0xffffffff;
            mov.u32 t, %laneid; setp.eq.u32 p, t, 0;
            @p red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, 0; }""",
        "=r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def operand_of(at: tl.tensor, ends: tl.tuple, COUNT: gl.constexpr) -> tl.tuple:
    """(number of the B whose column tile `at` is, or of the pair whose step over K it is, the first of those)."""
    number = 0
    first = 0
    if COUNT > 1:
        if at >= ends[0]:
            number = 1
            first = ends[0]
    if COUNT > 2:
        if at >= ends[1]:
            number = 2
            first = ends[1]
    if COUNT > 3:
        if at >= ends[2]:
            number = 3
            first = ends[2]
    return number, first


@gluon.jit
def pick(number: tl.tensor, of: tl.tuple, COUNT: gl.constexpr) -> Any:
    """The one of the first `COUNT` that has this number."""
    found = of[0]
    if COUNT > 1:
        if number == 1:
            found = of[1]
    if COUNT > 2:
        if number == 2:
            found = of[2]
    if COUNT > 3:
        if number == 3:
            found = of[3]
    return found


@gluon.jit
def block_of(
    step: tl.tensor,
    peer: tl.tensor,
    p: tl.tensor,
    rank: tl.tensor,
    world: tl.tensor,
    outer: tl.tensor,
    OWN: gl.constexpr,
    INBOX: gl.constexpr,
) -> tl.tensor:
    """The block of A's that a tile is of, and of scales that came with it."""
    block = p * world + peer
    if INBOX:
        block = (peer - (peer > rank).to(gl.int32)) * outer + p
    if OWN:
        block = gl.where(step == 0, p, block)
    return block


@gluon.jit
def load_tiles(
    as_: tl.tuple,
    bs: tl.tuple,
    words: tl.tensor,
    value: tl.tensor,
    sizes: tl.tuple,
    ends: tl.tuple,
    stages: tl.tuple,
    GATHER: gl.constexpr,
    OWN: gl.constexpr,
    INBOX: gl.constexpr,
    COUNT: gl.constexpr,
    CHUNKS: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    GROUP_M: gl.constexpr,
    SLOTS: gl.constexpr,
    PROGRAMS: gl.constexpr,
) -> None:
    """The loader."""
    OUTS: gl.constexpr = COUNT if GATHER else 1
    outer, inner, rank, world, chunk_size, own_tiles, tiles_m, tiles_n, steps_k = sizes
    a_stages, b_stages, full, empty = stages
    STAGES: gl.constexpr = a_stages.type.shape[0]
    BM: gl.constexpr = a_stages.type.shape[1]
    BK: gl.constexpr = a_stages.type.shape[2]
    BN: gl.constexpr = b_stages.type.shape[1 if B_K_MAJOR else 2]
    tiles_q = gl.cdiv(inner, BM)
    awaited = -1  # the chunk that was awaited last
    at = 0  # the step over K, among all of this CTA's
    first_tile, end = share_of(gl.program_id(0), tiles_m * tiles_n * world, SLOTS, PROGRAMS)
    for tile in range(first_tile, end, SLOTS):
        step, peer, tile_m, tile_n, chunk = tile_of(
            tile, tiles_m, tiles_n, rank, world, chunk_size, own_tiles, inner, GATHER, CHUNKS, GROUP_M, BM
        )
        a = as_[0]
        a_block = block_of(step, peer, tile_m // tiles_q, rank, world, outer, OWN, INBOX)
        if GATHER:
            known = chunk == awaited
            awaited = chunk
            if OWN:
                known = known | (step == 0)
                if step > 0:
                    a = as_[1]
                await_by_warp(words + peer, chunk - peer * CHUNKS + 1, known)
            else:
                await_by_warp(words + chunk, value, known)
        row = (tile_m % tiles_q) * BM
        number, first = operand_of(tile_n, ends, OUTS)
        b = pick(number, bs, OUTS)
        col = (tile_n - first) * BN
        for step_k in range(steps_k):
            at_k = step_k * BK
            if not GATHER and COUNT > 1:
                number, first = operand_of(step_k, ends, COUNT)
                a = pick(number, as_, COUNT)
                b = pick(number, bs, COUNT)
                at_k = (step_k - first) * BK
            stage = at % STAGES
            mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), as_[0].block_type.nbytes + bs[0].block_type.nbytes)
            load_block(a, [a_block, row, at_k], full.index(stage), a_stages.index(stage).reshape((1, BM, BK)))
            if B_K_MAJOR:
                load_block(b, [col, at_k], full.index(stage), b_stages.index(stage))
            else:
                load_block(b, [at_k, col], full.index(stage), b_stages.index(stage))
            at += 1


@gluon.jit
def multiply_tiles(
    WHICH: gl.constexpr,
    scales: tl.tuple,
    columns: tl.tuple,
    real_rows: tl.tensor,
    sizes: tl.tuple,
    ends: tl.tuple,
    stages: tl.tuple,
    turns: gl.shared_memory_descriptor,
    results: tl.tuple,
    A_SCALE: gl.constexpr,
    SCALE_TRAVELS: gl.constexpr,
    B_SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    FACTOR: gl.constexpr,
    PADDED: gl.constexpr,
    GATHER: gl.constexpr,
    OWN: gl.constexpr,
    INBOX: gl.constexpr,
    COUNT: gl.constexpr,
    CHUNKS: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    GROUP_M: gl.constexpr,
    SLOTS: gl.constexpr,
    PROGRAMS: gl.constexpr,
) -> None:
    """The multiplier of tiles 0, 2, 4, … of this CTA's, or of 1, 3, 5, …"""
    outer, inner, rank, world, chunk_size, own_tiles, tiles_m, tiles_n, steps_k = sizes
    a_stages, b_stages, full, empty = stages
    a_scales, b_scales, biases = scales
    c_buffers, c_full, c_empty = results
    STAGES: gl.constexpr = a_stages.type.shape[0]
    BM: gl.constexpr = a_stages.type.shape[1]
    BN: gl.constexpr = b_stages.type.shape[1 if B_K_MAJOR else 2]
    PART: gl.constexpr = c_buffers.type.shape[2]
    PARTS: gl.constexpr = BN // PART
    DEPTH: gl.constexpr = 256 // a_stages.dtype.primitive_bitwidth  # of an instruction
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[MULTIPLIER, 1], instr_shape=[16, BN, DEPTH])
    PART_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], warps_per_cta=[MULTIPLIER, 1], instr_shape=[16, PART, DEPTH]
    )
    tiles_q = gl.cdiv(inner, BM)
    at = WHICH * steps_k  # the step over K, among all of this CTA's
    made = 0
    first_tile, end = share_of(gl.program_id(0), tiles_m * tiles_n * world, SLOTS, PROGRAMS)
    for tile in range(first_tile + WHICH * SLOTS, end, 2 * SLOTS):
        step, peer, tile_m, tile_n, _chunk = tile_of(
            tile, tiles_m, tiles_n, rank, world, chunk_size, own_tiles, inner, GATHER, CHUNKS, GROUP_M, BM
        )
        mbarrier.wait(turns.index(WHICH), (made & 1) ^ (1 - WHICH))
        acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
        for step_k in range(steps_k):
            stage = at % STAGES
            mbarrier.wait(full.index(stage), at // STAGES & 1)
            b = b_stages.index(stage)
            if B_K_MAJOR:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a_stages.index(stage), b, acc, is_async=True, use_acc=step_k > 0)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            # nothing of the step before this one is under way any more
            mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1, pred=step_k > 0)
            at += 1
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1)
        at += steps_k  # the other multiplier's

        number, first = operand_of(tile_n, ends, COUNT)
        n = pick(number, columns, COUNT)
        if A_SCALE == 1:
            of_rows = gl.load(a_scales[0])
            if B_SCALE == 1:
                of_rows = of_rows * gl.load(pick(number, b_scales, COUNT))
        if A_SCALE == 2:
            p = tile_m // tiles_q
            in_block = (tile_m % tiles_q) * BM + gl.arange(0, BM, gl.SliceLayout(1, PART_LAYOUT))
            a_scale = a_scales[0]
            if SCALE_TRAVELS:
                rows = block_of(step, peer, p, rank, world, outer, OWN, INBOX) * inner + in_block
                if step > 0:
                    a_scale = a_scales[1]
            else:
                rows = (p * world + peer) * inner + in_block
            of_rows = gl.load(a_scale + rows, mask=in_block < inner, other=0.0)[:, None]
            if B_SCALE == 1:
                of_rows = of_rows * gl.load(pick(number, b_scales, COUNT))
        if PADDED:
            row = peer * inner + (tile_m % tiles_q) * BM + gl.arange(0, BM, gl.SliceLayout(1, PART_LAYOUT))
            is_real = (row < real_rows)[:, None]
        # parts of the columns, so that few numbers beside the sums need registers
        parts = acc.reshape((BM, PARTS, PART)).permute((0, 2, 1)).split()
        for i in gl.static_range(PARTS):
            part = gl.convert_layout(parts[i], PART_LAYOUT, assert_trivial=True)
            cols = (tile_n - first) * BN + i * PART + gl.arange(0, PART, gl.SliceLayout(0, PART_LAYOUT))
            if A_SCALE > 0:
                part = part * of_rows
            if B_SCALE == 3:
                part = part * gl.load(pick(number, b_scales, COUNT))
            if B_SCALE == 2:
                part = part * gl.load(pick(number, b_scales, COUNT) + cols, mask=cols < n, other=0.0)[None, :]
            if BIAS:
                bias = gl.load(pick(number, biases, COUNT) + cols, mask=cols < n, other=0.0)
                part = part + bias.to(gl.float32)[None, :]
            rounded = part.to(c_buffers.dtype)
            if FACTOR != 1.0:
                rounded = (rounded.to(gl.float32) * FACTOR).to(c_buffers.dtype)
            if PADDED:
                rounded = gl.where(is_real, rounded, gl.zeros_like(rounded))
            mbarrier.wait(c_empty.index(WHICH), (made * PARTS + i & 1) ^ 1)
            c_buffers.index(WHICH).store(rounded)
            fence_async_shared()
            mbarrier.arrive(c_full.index(WHICH), count=1)
        made += 1  # noqa: SIM113 - the dialect has no `enumerate`


@gluon.jit
def store_tiles(
    cs: tl.tuple,
    words: tl.tensor,
    sizes: tl.tuple,
    ends: tl.tuple,
    results: tl.tuple,
    BM: gl.constexpr,
    BN: gl.constexpr,
    GATHER: gl.constexpr,
    COUNT: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUP_M: gl.constexpr,
    SLOTS: gl.constexpr,
    PROGRAMS: gl.constexpr,
) -> None:
    """The storer."""
    outer, inner, rank, world, chunk_size, own_tiles, tiles_m, tiles_n, _steps_k = sizes
    c_buffers, c_full, c_empty = results
    PART: gl.constexpr = c_buffers.type.shape[2]
    PARTS: gl.constexpr = BN // PART
    tiles_q = gl.cdiv(inner, BM)
    made = 0
    first_tile, end = share_of(gl.program_id(0), tiles_m * tiles_n * world, SLOTS, PROGRAMS)
    for tile in range(first_tile, end, SLOTS):
        _step, peer, tile_m, tile_n, chunk = tile_of(
            tile, tiles_m, tiles_n, rank, world, chunk_size, own_tiles, inner, GATHER, CHUNKS, GROUP_M, BM
        )
        p = tile_m // tiles_q
        c_block = p * world + peer
        if not GATHER:
            c_block = peer * outer + p
        number, first = operand_of(tile_n, ends, COUNT)
        c = pick(number, cs, COUNT)
        row = (tile_m % tiles_q) * BM
        col = (tile_n - first) * BN
        which = made % 2
        for i in gl.static_range(PARTS):
            mbarrier.wait(c_full.index(which), made // 2 * PARTS + i & 1)
            store_block(c, [c_block, row, col + i * PART], c_buffers.index(which).reshape((1, BM, PART)))
            tma.store_wait(0)  # until it was read
            mbarrier.arrive(c_empty.index(which), count=1)
        made += 1  # noqa: SIM113 - the dialect has no `enumerate`
        if not GATHER:
            publish_by_warp(words + chunk)


@gluon.jit(**gemm_kernels.PROMISES)
def gemm_kernel(
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,
    c0,
    c1,
    c2,
    c3,
    a_scale0,
    a_scale1,
    a_scale2,
    a_scale3,
    b_scale0,
    b_scale1,
    b_scale2,
    b_scale3,
    bias0,
    bias1,
    bias2,
    bias3,
    words,
    done_ptr,
    outer,
    inner,
    k0,
    k1,
    k2,
    k3,
    n0,
    n1,
    n2,
    n3,
    rank,
    world,
    chunk_size,
    own_tiles,
    value,
    real_rows,
    GATHER: gl.constexpr,
    OWN: gl.constexpr,
    INBOX: gl.constexpr,
    CLEARS: gl.constexpr,
    COUNT: gl.constexpr,
    CHUNKS: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    A_SCALE: gl.constexpr,
    SCALE_TRAVELS: gl.constexpr,
    B_SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP_M: gl.constexpr,
    SLOTS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    FACTOR: gl.constexpr,
    PADDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `gemm_kernels.gemm_kernel`: fast sums, tiles in two parts, several matmuls of a scatter without scales."""
    PART: gl.constexpr = BN // SPLIT
    a_stages = gl.allocate_shared_memory(a0.dtype, [STAGES, BM, BK], b0.layout)
    b_stages = gl.allocate_shared_memory(b0.dtype, [STAGES, BN, BK] if B_K_MAJOR else [STAGES, BK, BN], b0.layout)
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, PART], c0.dtype)
    c_buffers = gl.allocate_shared_memory(c0.dtype, [2, BM, PART], C_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for which in gl.static_range(2):
        mbarrier.init(turns.index(which), count=1)
        mbarrier.init(c_full.index(which), count=1)
        mbarrier.init(c_empty.index(which), count=1)

    if GATHER:
        e1, e2, e3, _e4, tiles_n = ends_of(n0, n1, n2, n3, BN, COUNT)
        steps_k = gl.cdiv(k0, BK)
    else:
        e1, e2, e3, _e4, steps_k = ends_of(k0, k1, k2, k3, BK, COUNT)
        tiles_n = gl.cdiv(n0, BN)
    OUTS: gl.constexpr = COUNT if GATHER else 1
    as_ = (a0, a1, a2, a3)
    bs = (b0, b1, b2, b3)
    cs = (c0, c1, c2, c3)
    columns = (n0, n1, n2, n3)
    ends = (e1, e2, e3)
    tiles_m = outer * gl.cdiv(inner, BM)
    sizes = (outer, inner, rank, world, chunk_size, own_tiles, tiles_m, tiles_n, steps_k)
    scales = ((a_scale0, a_scale1), (b_scale0, b_scale1, b_scale2, b_scale3), (bias0, bias1, bias2, bias3))
    stages = (a_stages, b_stages, full, empty)
    results = (c_buffers, c_full, c_empty)
    # fmt: off
    gl.warp_specialize(
        [
            (multiply_tiles, (
                0, scales, columns, real_rows, sizes, ends, stages, turns, results,
                A_SCALE, SCALE_TRAVELS, B_SCALE, BIAS, FACTOR, PADDED,
                GATHER, OWN, INBOX, OUTS, CHUNKS, B_K_MAJOR, GROUP_M, SLOTS, PROGRAMS,
            )),
            (multiply_tiles, (
                1, scales, columns, real_rows, sizes, ends, stages, turns, results,
                A_SCALE, SCALE_TRAVELS, B_SCALE, BIAS, FACTOR, PADDED,
                GATHER, OWN, INBOX, OUTS, CHUNKS, B_K_MAJOR, GROUP_M, SLOTS, PROGRAMS,
            )),
            (load_tiles, (
                as_, bs, words, value, sizes, ends, stages,
                GATHER, OWN, INBOX, COUNT, CHUNKS, B_K_MAJOR, GROUP_M, SLOTS, PROGRAMS,
            )),
            (store_tiles, (
                cs, words, sizes, ends, results,
                BM, BN, GATHER, OUTS, CHUNKS, GROUP_M, SLOTS, PROGRAMS,
            )),
        ],
        [MULTIPLIER, 1, 1],
        [MANY, FEW, FEW],
    )
    # fmt: on
    if OWN:
        # every program is done with the words: count the call, and leave them cleared for the next one
        barrier()
        if gl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
            gl.store(done_ptr, 0)
            gl.store(done_ptr + 1, gl.load(done_ptr + 1) + 1)
            if CLEARS:
                gl.store(words + gl.arange(0, 8, gl.BlockedLayout([1], [32], [MULTIPLIER], [0])), 0)
