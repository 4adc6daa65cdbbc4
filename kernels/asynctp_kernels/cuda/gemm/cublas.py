"""cuBLAS matmuls as the pipelines need them: into a given place, with scales and bias.

A plain matmul is a public torch op; a scaled one has no public equivalent with an output argument (`torch_private`).
cuBLAS scales fp8 only. The matmul of other operands is made in their own dtype, in int32 of int8, and multiplied after
it.

Scales of blocks of 128 along K are fp32 too: of 1 or 128 rows of A ([M, K/128], [M/128, K/128]), and of 1 or 128
columns of B ([K/128, N], [K/128, N/128]), sizes rounded up. cuBLAS takes them in pairs (`IN_BLOCKS`), each laid out in
its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asynctp_kernels.cuda.runtime.launch import aligned
from asynctp_kernels.signals import IS_INTERPRETED
from asynctp_kernels.torch_private import int_mm, scaled_mm, scaled_mm_in_blocks

BLOCK = 128
Recipe = tuple[str, str]
"""Blocks that the scales of A and of B are of, as in `IN_BLOCKS`."""
#: of A and of B. Source: the cuBLAS documentation, "Element 1D and 128x128 2D Block Scaling for FP8 Data Types"
IN_BLOCKS = (("1x128", "128x128"), ("128x128", "1x128"), ("1x128", "1x128"))
#: `torch.nn.functional.ScalingType`, by its values
_SCALING_TYPES = {"1x128": 4, "128x128": 5}
#: numbers between two columns of K/128 scales: cuBLAS reads 16 bytes at a time. So it does rows of A with a scale each.
SCALES_TOGETHER = 4
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Scaling:
    """How an fp8 matmul is scaled: what does not change from call to call."""

    out_dtype: torch.dtype
    fast: bool


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    scaling: Scaling | None,
    out: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """`a @ b (+ bias)`, or the same scaled. a: [M, K], b: [K, N], out: [M, N] contiguous (made when None).

    a_scale: one element, or [M, 1]; b_scale: one element, or [1, N]; or both of blocks. bias: [N] or [1, N]. factor: a
    power of two, or the negative of one, that the rounded matmul is multiplied by.
    """
    if factor != 1 and not (IS_INTERPRETED or scaling is not None or bias is not None or a.dtype == torch.float16):
        # cuBLAS multiplies before it rounds: that gives the same number, or one that is not too large. In float16 a
        # matmul may be too large, and has to stay infinite, and so may a bias.
        out = a.new_empty((a.shape[0], b.shape[1])) if out is None else out
        return out.addmm_(a, b, beta=0, alpha=factor)
    if factor != 1:
        return matmul(a, b, bias, a_scale, b_scale, scaling, out).mul_(factor)
    if IS_INTERPRETED:
        return _in_fp32(a, b, bias, a_scale, b_scale, _own_dtype(a) if scaling is None else scaling.out_dtype, out)
    if scaling is None:
        if bias is None:
            return _plain(a, b, out)
        return torch.addmm(bias, a, b, out=out)
    assert a_scale is not None
    assert b_scale is not None
    if a.dtype not in FP8_DTYPES:
        return _scaled_after(_plain(a, b, None), bias, a_scale, b_scale, scaling.out_dtype, out)
    row = None if bias is None else bias.reshape(-1)
    if (recipe := block_recipe(a.shape[0], b, a_scale, b_scale)) is not None:
        scales = _as_read(a_scale.reshape(-1, a_scale.shape[-1]), recipe[0]), _as_read(b_scale.t(), recipe[1])
        types = _SCALING_TYPES[recipe[0]], _SCALING_TYPES[recipe[1]]
        return scaled_mm_in_blocks(a, b, *scales, types, row, scaling.out_dtype, scaling.fast, out)
    rows, columns = _matching(a_scale, b_scale, a.shape[0], b.shape[1])
    return scaled_mm(a, b, rows, columns, row, scaling.out_dtype, scaling.fast, out)


def _plain(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """`a @ b` in the operands' dtype, or in int32 of int8."""
    return int_mm(a, b, out) if a.dtype == torch.int8 else torch.mm(a, b, out=out)


def _own_dtype(a: Tensor) -> torch.dtype:
    """The dtype of a matmul without scales: int32 of int8."""
    return torch.int32 if a.dtype == torch.int8 else a.dtype


def _scaled_after(
    plain: Tensor,
    bias: Tensor | None,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """`matmul` of operands that cuBLAS does not scale: `plain` in their dtype, scaled in fp32, and rounded again."""
    by_rows, columns = plain * a_scale.reshape(-1, 1), b_scale.reshape(1, -1)  # fp32: neither scale is a number
    out = plain.new_empty(plain.shape, dtype=out_dtype) if out is None else out
    if bias is None:
        return torch.mul(by_rows, columns, out=out)
    return out.copy_(by_rows.mul_(columns).add_(bias.reshape(1, -1)))


def multiply(place: Tensor, factor: float) -> None:
    """Multiply in place, unless by 1."""
    if factor != 1:
        place.mul_(factor)


def ranges(rows: Tensor, count: int) -> Sequence[Tensor]:
    """As many ranges of rows of equal size, or of numbers that belong to rows: [*, *, n] each from [*, n]."""
    return rows.reshape(count, -1, rows.shape[-1]).unbind()


def block_recipe(rows: int, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Recipe | None:
    """Which of `IN_BLOCKS` these scales of an A [rows, K] and of `b` are; None when they are one number, or by rows."""
    k, n = b.shape
    along_k, counts = _blocks(k), (a_scale.numel(), b_scale.numel())
    if counts[0] in (1, rows) and counts[1] in (1, n) and (along_k == 1 or counts[0] == 1 or a_scale.shape[-1] == 1):
        return None
    of_a = {"1x128": rows * along_k, "128x128": _blocks(rows) * along_k}
    of_b = {"1x128": n * along_k, "128x128": _blocks(n) * along_k}
    return next((pair for pair in IN_BLOCKS if counts == (of_a[pair[0]], of_b[pair[1]])), None)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _as_read(scale: Tensor, kind: str) -> Tensor:
    """Scales [M or N, K/128] as cuBLAS wants them: with columns contiguous, or so [K/128, M/128 or N/128], padded."""
    return _columns_first(scale) if kind == "1x128" else _padded_columns(scale.t())


def _columns_first(scale: Tensor) -> Tensor:
    """A matrix of strides (1, rows) exactly, those of single rows and columns too; itself if it is one."""
    strides = (1, scale.shape[0])
    if scale.stride() == strides:
        return scale
    return torch.empty_strided(scale.shape, strides, dtype=scale.dtype, device=scale.device).copy_(scale)


def _padded_columns(scale: Tensor) -> Tensor:
    """A matrix [K/128, *] whose columns are contiguous, with zeros up to a multiple of `SCALES_TOGETHER`."""
    depth, columns = scale.shape
    padded = -(-depth // SCALES_TOGETHER) * SCALES_TOGETHER
    if padded == depth:
        return _columns_first(scale)
    out = torch.zeros((columns, padded), dtype=scale.dtype, device=scale.device).t()
    out[:depth].copy_(scale)
    return out


def _in_fp32(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """`matmul` on CPU tensors: summed, scaled and biased in fp32 (or wider operands' own dtype), rounded once."""
    wide = torch.float32 if a.is_floating_point() and a.itemsize < 4 else _own_dtype(a)
    rows, columns = a.to(wide), b.to(wide)
    scales = None if a_scale is None or b_scale is None else (a_scale, b_scale)
    in_blocks = scales is not None and block_recipe(a.shape[0], b, *scales) is not None
    if scales is not None and in_blocks:
        rows = rows * _each(scales[0].reshape(-1, scales[0].shape[-1]), a.shape)
        columns = columns * _each(scales[1], b.shape)
    found = rows @ columns
    if scales is not None and not in_blocks:
        found = found * scales[0].reshape(-1, 1) * scales[1].reshape(1, -1)
    found = (found if bias is None else found + bias.reshape(1, -1).to(found.dtype)).to(out_dtype)
    return found if out is None else out.copy_(found)


def _each(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales of blocks, one for each element of a matrix."""
    for dim in (0, 1):
        if scale.shape[dim] != shape[dim]:
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale


def _matching(a_scale: Tensor, b_scale: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Both scales tensorwise or both rowwise: cuBLAS takes no mixture, so a single one is repeated.

    Of several, it takes those at a multiple of 16 bytes: the scales of one range of rows of many may be at none.
    """
    if a_scale.numel() == 1 and b_scale.numel() == 1:
        return a_scale.reshape(()), b_scale.reshape(())
    if a_scale.shape != (m, 1):  # a view takes the host most of a microsecond, also one that changes nothing
        a_scale = a_scale.reshape(-1, 1).expand(m, 1)
    if b_scale.shape != (1, n):
        b_scale = b_scale.reshape(1, -1).expand(1, n)
    return aligned(a_scale), aligned(b_scale)


def scaled_matmul_supported(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    travels: bool,
    in_blocks: bool = False,
) -> bool:
    """Whether `matmul` can run this scaled matmul on cuBLAS; of operands that are not fp8, with scales after it.

    travels: the A scale is not one number, however many there are; in_blocks: scales are of blocks (`block_recipe`).
    """
    if IS_INTERPRETED or a.dtype not in FP8_DTYPES:
        return True
    tensorwise = a_scale.numel() == 1 and b_scale.numel() == 1 and not travels
    aligned = a.shape[-1] % 16 == 0 and b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0
    column_major = b.stride(0) == 1 and b.stride(1) % 16 == 0 and b.stride(1) >= b.shape[0]
    bias_fits = bias is None or (bias.dtype == out_dtype and out_dtype != torch.float32)
    wide = (a.dtype, b.dtype).count(torch.float8_e5m2)
    types_fit = wide < 2 if tensorwise else wide == 0 and (in_blocks or out_dtype == torch.bfloat16)
    return aligned and column_major and bias_fits and types_fit


def refused_blocks(recipe: Recipe | None, rows: int, capability: int) -> str | None:
    """Why cuBLAS does not make a matmul with `rows` rows and scales of blocks, on a GPU of this major capability."""
    if recipe is None or (IS_INTERPRETED and recipe[0] == "1x128"):
        return None
    if capability != 9 and not IS_INTERPRETED:
        return f"scales of blocks of 128: cuBLAS takes them on compute capability 9 only, not {capability}"
    multiple = SCALES_TOGETHER if recipe[0] == "1x128" else BLOCK
    return f"{rows} rows with scales of {recipe[0]} blocks: not a multiple of {multiple}" if rows % multiple else None
