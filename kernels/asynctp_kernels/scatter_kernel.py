"""Raw kernel of the scatter side: partial products go to their owners as they are finished; owners reduce.

Landing area of slot s, on every rank, indexed by the source rank (own part unused):

    slot s:  [ part of rank 0 | part of rank 1 | ... ],  part: [ rows x cols elements of the wire dtype ]

Word (src, chunk) of a rank's flags says up to which epoch that chunk of `src`'s partial product has landed.
Symmetric memory is passed as addresses, for the reason given in `gather_kernel`.
"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import dot, exact_f32, round_to, scale_and_bias
from .signals import post_word, wait_word


@triton.jit
def partial_tile(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_rows: tl.tensor,
    row_mask: tl.tensor,
    cols: tl.tensor,
    col_mask: tl.tensor,
    k: tl.tensor,
    stride_am: tl.tensor,
    stride_ak: tl.tensor,
    stride_bk: tl.tensor,
    stride_bn: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """A[a_rows] @ B[:, cols] in fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, k, BLOCK_K):
        kk = k0 + tl.arange(0, BLOCK_K).to(tl.int64)
        a_mask = row_mask[:, None] & (kk < k)[None, :]
        b_mask = (kk < k)[:, None] & col_mask[None, :]
        a = tl.load(a_ptr + a_rows[:, None] * stride_am + kk[None, :] * stride_ak, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + kk[:, None] * stride_bk + cols[None, :] * stride_bn, mask=b_mask, other=0.0)
        acc = dot(a, b, acc)
    return acc


@triton.jit
def matmul_scatter_kernel(
    a_ptrs: tuple[tl.tensor, ...],
    b_ptrs: tuple[tl.tensor, ...],
    bias_ptrs: tuple[tl.tensor, ...],
    a_scale_ptrs: tuple[tl.tensor, ...],
    b_scale_ptrs: tuple[tl.tensor, ...],
    ks: tuple[tl.tensor, ...],
    strides: tuple[tuple[tl.tensor, ...], ...],
    out_ptr: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    inner: tl.tensor,
    chunk_rows: tl.tensor,
    buffers: tl.tensor,
    pads: tl.tensor,
    flags_offset: tl.tensor,
    slot_bytes: tl.tensor,
    part_bytes: tl.tensor,
    counters_ptr: tl.tensor,
    epoch_ptr: tl.tensor,
    timeout_ns: tl.tensor,
    status_ptr: tl.tensor,
    rank: tl.tensor,
    world: tl.tensor,
    PARTS: tl.constexpr,
    A_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    ALONG_N: tl.constexpr,
    AVERAGE: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of the partial product sum_i A_i @ B_i: sent to its owner, or reduced if it is our own.

    Tile order: destinations rank+1, rank+2, ..., own last. Tiles for peers never wait, and every tile that
    waits comes after all of them in launch order, so all ranks' pushes finish whatever the waits do.

    Memory order. Sending: each tile stores, then adds one to the (destination, chunk) counter with acq_rel at
    gpu scope (the barrier before it is the fence between threads); the tile that completes the chunk has thus
    observed all its tiles' stores, zeroes the counter for the next call, and releases the owner's word at sys
    scope (`post_word`). Reading: `wait_word` acquires (src, chunk) before the first load of what landed.

    Numerics: a peer's partial product is rounded once, to the wire dtype (that of `out_ptr`); our own stays in
    fp32. The sum is fp32, in rank order from 0, the same on every run, and rounded once.
    """
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    dest = (rank + 1 + pid // (tiles_m * tiles_n)) % world
    tile_m = (pid // tiles_n) % tiles_m
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    col = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    row_mask = row < rows
    col_mask = col < n
    mask = row_mask[:, None] & col_mask[None, :]
    chunk = (tile_m * BLOCK_M) // chunk_rows
    epoch = tl.load(epoch_ptr)
    wire_offset = row[:, None] * n + col[None, :]
    full_row = row
    full_col = col
    if ALONG_N:
        full_col = dest * n + col
    else:
        full_row = (row // inner) * (world * inner) + dest * inner + row % inner

    partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in tl.static_range(PARTS):
        product = partial_tile(
            a_ptrs[i], b_ptrs[i], full_row, row_mask, full_col, col_mask, ks[i],
            strides[i][0], strides[i][1], strides[i][2], strides[i][3], BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        partial += scale_and_bias(
            product, a_scale_ptrs[i], full_row, row_mask, b_scale_ptrs[i], bias_ptrs[i], full_col, col_mask,
            A_SCALES[i], B_SCALES[i],
        )  # fmt: skip

    slot = tl.load(buffers.to(tl.pointer_type(tl.int64)) + dest) + (epoch % 2) * slot_bytes
    if dest != rank:
        landing = (slot + rank * part_bytes).to(tl.pointer_type(out_ptr.dtype.element_ty))
        tl.store(landing + wire_offset, round_to(partial, out_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()
        counter = counters_ptr + dest * MAX_CHUNKS + chunk
        chunk_tiles = tl.cdiv(tl.minimum(chunk_rows, rows - chunk * chunk_rows), BLOCK_M) * tiles_n
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == chunk_tiles - 1:
            tl.store(counter, 0)
            pad = tl.load(pads.to(tl.pointer_type(tl.int64)) + dest)
            post_word(pad + flags_offset + (rank * MAX_CHUNKS + chunk) * 8, epoch)
    else:
        flags = tl.load(pads.to(tl.pointer_type(tl.int64)) + rank) + flags_offset
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for src in range(world):
            if src == rank:
                total += partial
            else:
                wait_word(flags + (src * MAX_CHUNKS + chunk) * 8, epoch, timeout_ns, status_ptr, src, chunk)
                landed = (slot + src * part_bytes).to(tl.pointer_type(out_ptr.dtype.element_ty))
                total += exact_f32(tl.load(landed + wire_offset, mask=mask, other=0.0))
        if AVERAGE:
            total = total / world
        tl.store(out_ptr + wire_offset, round_to(total, out_ptr.dtype.element_ty), mask=mask)
