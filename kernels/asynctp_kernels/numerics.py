"""Conversions inside kernels, and where the interpreter needs help with them.

The contract: operands are multiplied exactly as they are, sums are fp32, scales and bias are applied in fp32,
and a result is rounded once, to nearest even. Compiled Triton does this by itself. The interpreter (seen in
Triton 3.9) does not: it truncates fp32 to bf16, multiplies bf16 operands of `tl.dot` as if their bits were
integers, takes subnormal bf16 for other numbers, and decodes the NaNs and infinities of fp8 as large numbers.
`exact_f32` and `round_to` replace those.
"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from .signals import INTERPRETED


@triton.jit
def exact_f32(x: tl.tensor) -> tl.tensor:
    """`x` (bf16, fp16, fp32, e4m3fn or e5m2) as fp32, without loss, NaNs and infinities included."""
    if INTERPRETED and x.dtype == tl.float8e5:
        # e5m2 is the upper byte of an fp16
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    if INTERPRETED and x.dtype == tl.bfloat16:
        # the upper half of an fp32
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if INTERPRETED and x.dtype == tl.float8e4nv:
        is_nan = (x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
        return tl.where(is_nan, float("nan"), x.to(tl.float32))
    return x.to(tl.float32)


@triton.jit
def round_to(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 `x` rounded once to `DTYPE`, to nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits.to(tl.int64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def scale_and_bias(
    acc: tl.tensor,
    a_scale_ptr: tl.tensor,
    a_rows: tl.tensor,
    row_mask: tl.tensor,
    b_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cols: tl.tensor,
    col_mask: tl.tensor,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
) -> tl.tensor:
    """acc * a_scale * b_scale + bias, all in fp32.

    A scale is absent (0), one element (1) or rowwise, read at `a_rows` and `cols` (2). B's one element is multiplied by
    A's first, as cuBLAS has fp8's, or not (3). `bias_ptr` may be None. The scale of one row has one element, too: so
    the order may not depend on which of both A's is.
    """
    if A_SCALE == 1:
        factor = tl.load(a_scale_ptr)
        if B_SCALE == 1:
            factor = factor * tl.load(b_scale_ptr)
        acc = acc * factor
    if A_SCALE == 2:
        of_rows = tl.load(a_scale_ptr + a_rows, mask=row_mask, other=0.0)
        if B_SCALE == 1:
            of_rows = of_rows * tl.load(b_scale_ptr)
        acc = acc * of_rows[:, None]
    if B_SCALE == 3:
        acc = acc * tl.load(b_scale_ptr)
    if B_SCALE == 2:
        acc = acc * tl.load(b_scale_ptr + cols, mask=col_mask, other=0.0)[None, :]
    if bias_ptr is not None:
        acc = acc + exact_f32(tl.load(bias_ptr + cols, mask=col_mask, other=0.0))[None, :]
    return acc
