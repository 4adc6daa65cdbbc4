"""Raw kernels of the gather side: push the shard, multiply chunks as they land, collect the gathered A.

Landing area of slot s, on every rank, indexed by the source rank (own part unused):

    slot s:  [ part of rank 0 | part of rank 1 | ... ],  part: [ rows x cols elements | rows fp32 scales ]

Symmetric memory is passed as addresses, never as tensors: the interpreter copies tensor arguments back onto
themselves after a launch, which must not happen to memory that peers are writing.

Chunks are runs of `chunk_rows` shard rows. Word (src, chunk) of a rank's flags says up to which epoch that
chunk of `src` has landed there. Why a landing is never overwritten before it is read: see `workspace`.
"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import dot, round_to, scale_and_bias
from .signals import post_word, wait_word


@triton.jit
def publish_kernel(
    a_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    stride_row: tl.tensor,
    stride_col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    chunk_rows: tl.tensor,
    buffers: tl.tensor,
    pads: tl.tensor,
    flags_offset: tl.tensor,
    slot_bytes: tl.tensor,
    part_bytes: tl.tensor,
    scales_offset: tl.tensor,
    epoch_ptr: tl.tensor,
    rank: tl.tensor,
    world: tl.tensor,
    MAX_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store one chunk of the own shard into one peer's landing, then post the peer's word for it.

    Program (i, chunk). Peers come in the order rank-1, rank-2, ...: rank-1 wants our shard first. Never waits.
    One program stores the whole chunk and then releases, so that release (`post_word`) covers all of it.
    """
    chunk = tl.program_id(1)
    peer = (rank - 1 - tl.program_id(0) + world) % world
    epoch = tl.load(epoch_ptr)
    part = tl.load(buffers.to(tl.pointer_type(tl.int64)) + peer) + (epoch % 2) * slot_bytes + rank * part_bytes
    landing = part.to(tl.pointer_type(a_ptr.dtype.element_ty))
    stop = tl.minimum((chunk + 1) * chunk_rows, rows)
    for row0 in range(chunk * chunk_rows, stop, BLOCK_M):
        row = row0 + tl.arange(0, BLOCK_M).to(tl.int64)
        for col0 in range(0, cols, BLOCK_K):
            col = col0 + tl.arange(0, BLOCK_K).to(tl.int64)
            mask = (row < stop)[:, None] & (col < cols)[None, :]
            values = tl.load(a_ptr + row[:, None] * stride_row + col[None, :] * stride_col, mask=mask)
            tl.store(landing + row[:, None] * cols + col[None, :], values, mask=mask)
        if a_scale_ptr is not None:
            scales = (part + scales_offset).to(tl.pointer_type(tl.float32))
            tl.store(scales + row, tl.load(a_scale_ptr + row, mask=row < stop), mask=row < stop)
    pad = tl.load(pads.to(tl.pointer_type(tl.int64)) + peer)
    post_word(pad + flags_offset + (rank * MAX_CHUNKS + chunk) * 8, epoch)


@triton.jit
def gather_matmul_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    b_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_am: tl.tensor,
    stride_ak: tl.tensor,
    stride_bk: tl.tensor,
    stride_bn: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    inner: tl.tensor,
    chunk_rows: tl.tensor,
    slots: tl.tensor,
    flags: tl.tensor,
    slot_bytes: tl.tensor,
    part_bytes: tl.tensor,
    scales_offset: tl.tensor,
    epoch_ptr: tl.tensor,
    timeout_ns: tl.tensor,
    status_ptr: tl.tensor,
    rank: tl.tensor,
    world: tl.tensor,
    ALONG_K: tl.constexpr,
    SCALE_TRAVELS: tl.constexpr,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of all_gather(A) @ B, computed once its rows have landed.

    Rows gathered (not ALONG_K): tile order is own shard first, read in place, then rank+1, rank+2, ...; a tile
    belongs to one source and one chunk (`chunk_rows` is a multiple of BLOCK_M) and waits for that word alone.
    Contraction dim gathered (ALONG_K): every tile needs every source. They are added in rank order, not own
    first, so that ranks with equal operands get equal bits.

    Memory order: `wait_word` acquires (chunk, src) before the first load of what landed there.
    """
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    step = pid // (tiles_m * tiles_n)
    tile_m = (pid // tiles_n) % tiles_m
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    col = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    row_mask = row < rows
    col_mask = col < n
    chunk = (tile_m * BLOCK_M) // chunk_rows
    epoch = tl.load(epoch_ptr)
    slot = slots + (epoch % 2) * slot_bytes
    first = (rank + step) % world
    sources = 1
    if ALONG_K:
        first = rank * 0
        sources = world

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(sources):
        src = first + i
        base = a_ptr
        stride_row = stride_am
        stride_col = stride_ak
        if src != rank:
            wait_word(flags + (src * MAX_CHUNKS + chunk) * 8, epoch, timeout_ns, status_ptr, src, chunk)
            base = (slot + src * part_bytes).to(tl.pointer_type(a_ptr.dtype.element_ty))
            stride_row = k
            stride_col = k * 0 + 1
        for k0 in range(0, k, BLOCK_K):
            kk = k0 + tl.arange(0, BLOCK_K).to(tl.int64)
            a_mask = row_mask[:, None] & (kk < k)[None, :]
            b_mask = (kk < k)[:, None] & col_mask[None, :]
            a = tl.load(base + row[:, None] * stride_row + kk[None, :] * stride_col, mask=a_mask, other=0.0)
            b = tl.load(b_ptr + (i * k + kk)[:, None] * stride_bk + col[None, :] * stride_bn, mask=b_mask, other=0.0)
            acc = dot(a, b, acc)

    out_row = row
    if not ALONG_K:
        out_row = (row // inner) * (world * inner) + first * inner + row % inner
    scale_row = out_row
    scale_base = a_scale_ptr
    if SCALE_TRAVELS:
        scale_row = row
        if first != rank:
            scale_base = (slot + first * part_bytes + scales_offset).to(tl.pointer_type(tl.float32))
    acc = scale_and_bias(acc, scale_base, scale_row, row_mask, b_scale_ptr, bias_ptr, col, col_mask, A_SCALE, B_SCALE)
    out = round_to(acc, out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * n + col[None, :], out, mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def collect_kernel(
    a_ptr: tl.tensor,
    full_ptr: tl.tensor,
    stride_row: tl.tensor,
    stride_col: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    inner: tl.tensor,
    chunk_rows: tl.tensor,
    slots: tl.tensor,
    flags: tl.tensor,
    slot_bytes: tl.tensor,
    part_bytes: tl.tensor,
    epoch_ptr: tl.tensor,
    timeout_ns: tl.tensor,
    status_ptr: tl.tensor,
    rank: tl.tensor,
    world: tl.tensor,
    ALONG_K: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Copy one row block of one source into the gathered A, which is ordinary memory.

    Program (step, row block), own shard first. Memory order: as in `gather_matmul_kernel`.
    """
    src = (rank + tl.program_id(0)) % world
    tile_m = tl.program_id(1)
    chunk = (tile_m * BLOCK_M) // chunk_rows
    epoch = tl.load(epoch_ptr)
    base = a_ptr
    if src != rank:
        wait_word(flags + (src * MAX_CHUNKS + chunk) * 8, epoch, timeout_ns, status_ptr, src, chunk)
        part = slots + (epoch % 2) * slot_bytes + src * part_bytes
        base = part.to(tl.pointer_type(a_ptr.dtype.element_ty))
        stride_row = cols
        stride_col = cols * 0 + 1
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    full_row = (row // inner) * (world * inner) + src * inner + row % inner
    full_cols = cols
    col_base = cols * 0
    if ALONG_K:
        full_row = row
        full_cols = cols * world
        col_base = src * cols
    for col0 in range(0, cols, BLOCK_K):
        col = col0 + tl.arange(0, BLOCK_K).to(tl.int64)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        values = tl.load(base + row[:, None] * stride_row + col[None, :] * stride_col, mask=mask)
        tl.store(full_ptr + full_row[:, None] * full_cols + (col_base + col)[None, :], values, mask=mask)
