"""The matmul of few rows: every program reads its columns of the weight once, and all of K, in order.

    A [M, K] x B, B, … → C, C, …      a tile is BM rows by BN columns of one of them

With few rows the time is that of reading the weight. So tiles are narrow, for as many SMs to read as there are, and
TMA's loads are many stages ahead. A library fills SMs by cutting K instead, and adds the parts up. Here a sum walks K
in order, as `gemm_kernels` does, with the same instructions: a row has the same bits in both, whatever the tile.

The tensor cores' instruction has 64 rows. Where A has 16 or 32, B takes their place (`SWAP`): the tile of C is made
transposed, [BN, BM], in the same order over K.
"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from asynctp_kernels.cuda.gemm.gemm_kernels import ends_of, multiply
from asynctp_kernels.numerics import exact_f32, round_to, scale_and_bias

#: what launches may differ in from the example that the kernel is compiled for, but for addresses
PROMISES = {
    "do_not_specialize_on_alignment": [
        *("a_scale", "b_scale0", "b_scale1", "b_scale2", "b_scale3", "bias0", "bias1", "bias2", "bias3"),
    ],
    "do_not_specialize": ["m", "k", "n0", "n1", "n2", "n3"],
}


@triton.jit(**PROMISES)
def few_rows_kernel(
    a,
    b0,
    b1,
    b2,
    b3,
    c0,
    c1,
    c2,
    c3,
    a_scale,
    b_scale0,
    b_scale1,
    b_scale2,
    b_scale3,
    bias0,
    bias1,
    bias2,
    bias3,
    m,
    k,
    n0,
    n1,
    n2,
    n3,
    COUNT: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    OUT: tl.constexpr,
    FACTOR: tl.constexpr,
    IMPRECISE: tl.constexpr,
    TOGETHER: tl.constexpr,
    SWAP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """a [m, k] by each of `COUNT` Bs, [n, k] or [k, n], into c [m, n]: scaled, biased, rounded to OUT, times FACTOR.

    A scale is absent (0), one element (1, 3), or one per row or column (2). Rows of c begin at a multiple of `TOGETHER`
    elements. `IMPRECISE` is as of `multiply`.
    """
    tiles_m = tl.cdiv(m, BM)
    tile = tl.program_id(0)
    row = tile % tiles_m * BM  # neighbours share B
    tile_n = tile // tiles_m
    e1, e2, e3, _e4, _end = ends_of(n0, n1, n2, n3, BN, COUNT)
    b = b0
    c = c0
    b_scale = b_scale0
    bias = bias0
    n = n0
    first_tile = 0
    if COUNT > 1:
        if tile_n >= e1:
            b = b1
            c = c1
            b_scale = b_scale1
            bias = bias1
            n = n1
            first_tile = e1
    if COUNT > 2:
        if tile_n >= e2:
            b = b2
            c = c2
            b_scale = b_scale2
            bias = bias2
            n = n2
            first_tile = e2
    if COUNT > 3:
        if tile_n >= e3:
            b = b3
            c = c3
            b_scale = b_scale3
            bias = bias3
            n = n3
            first_tile = e3
    col = (tile_n - first_tile) * BN
    if SWAP:
        acc = tl.zeros((BN, BM), dtype=tl.float32)
    else:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(k, BK)):
        at_k = step * BK
        a_tile = a.load([row, at_k])
        if B_K_MAJOR:
            b_tile = b.load([col, at_k])
        else:
            b_tile = b.load([at_k, col])
        if SWAP:
            acc = multiply(b_tile if B_K_MAJOR else b_tile.T, a_tile, acc, True, IMPRECISE)
        else:
            acc = multiply(a_tile, b_tile, acc, B_K_MAJOR, IMPRECISE)
    if SWAP:
        acc = acc.T
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    if not BIAS:
        bias = None
    acc = scale_and_bias(acc, a_scale, rows, rows < m, b_scale, bias, cols, cols < n, A_SCALE, B_SCALE)
    if FACTOR != 1.0:
        acc = exact_f32(round_to(acc, OUT)) * FACTOR
    pitch = n // TOGETHER * TOGETHER  # which it is a multiple of: rows are stored in wide parts
    places = c + rows[:, None] * pitch + cols[None, :]
    tl.store(places, round_to(acc, OUT), mask=(rows < m)[:, None] & (cols < pitch)[None, :])
