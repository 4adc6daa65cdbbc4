"""The reference programs: what every fused op must equal, in plain functional collectives and matmuls.

`run` is the program of any call, whose arguments are checked already; the ops run it wherever no kernel takes over.
The functions with the callers' names check their arguments, take any spelling of a process group and are meant to be
called by hand.

Numerics: every matmul is rounded once to its output dtype (bias included), converted to `sum_dtype` if there is one,
and multiplied by its factor if there are `factors`. Then the matmuls are added in list order, `added` last; that is
multiplied if there is a factor for it. Rows after the `real_rows` become zeros, and the collective sums. All is in the
dtype that the matmuls have. On CPU `"avg"` is the sum divided by the number of ranks, since gloo has no average in
every supported torch; elsewhere the backend's own average is used.

A scaled matmul of operands that are not fp8 is rounded to their dtype before it is scaled in fp32, as programs do; of
int8 it is exact, in int32.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.ops.callers import Callers
from asynctp_passes.ops.calls import OPS, SIGNATURES, Call, GatherCall, ReduceCall
from asynctp_passes.ops.plain_collectives import (
    Mover,
    all_reduce,
    gather_with,
    reduce_scatter,
)
from asynctp_passes.ops.recipes import BLOCK, FP8_DTYPES, Recipe, padded, recipe_of
from asynctp_passes.torch_private import torch_ops


# --- the programs --------------------------------------------------------------------------------------------------
def run(call: Call, mover: Mover | None = None) -> Any:
    """The results of a call without overlap, as its op gives them; the arguments are checked already.

    mover: The group's own wire; None: plain collectives.
    """
    if isinstance(call, GatherCall):
        return _gather_then_multiply(call, mover)
    total = _sum(call, mover)
    if call.scatter_dim is None:
        return all_reduce(total, call.reduce_op, call.group_name, mover, in_place=True)
    assert call.group_size is not None, "the op that scatters is told"
    if call.real_rows is not None:
        total.narrow(call.scatter_dim, call.real_rows, total.shape[call.scatter_dim] - call.real_rows).zero_()
    return reduce_scatter(total, call.reduce_op, call.scatter_dim, call.group_size, call.group_name, mover)


def _gather_then_multiply(call: GatherCall, mover: Mover | None) -> list[Tensor]:
    where = (call.gather_dim, call.group_size, call.group_name)
    a_full, row_numbers = gather_with(call.a_shard, call.row_numbers, *where, mover)
    scale = row_numbers if call.gather_a_scale and row_numbers is not None else call.a_scale
    outs = [_matmul(call, i, taken(a_full, call.rows_of(i)), scale, mover) for i in range(len(call.bs))]
    outs += [a_full] if call.return_a_full else []
    return [*outs, row_numbers] if call.along_shard is not None and row_numbers is not None else outs


def taken(a_full: Tensor, rows: tuple[int, int, int] | None) -> Tensor:
    """The rows of the gathered A that an operand takes, as a matrix; all of it where it has no `rows`."""
    if rows is None:
        return a_full
    first, end, every = rows
    flat = _rows(a_full)
    return flat.view(flat.shape[0] // max(every, 1), every, flat.shape[1])[:, first:end].flatten(0, 1)


# --- matmuls --------------------------------------------------------------------------------------------------------
def _rows(a: Tensor) -> Tensor:
    return a.flatten(0, -2)


def _sum(call: ReduceCall, mover: Mover | None) -> Tensor:
    """The matmuls in list order, `added` last, in `sum_dtype`, to which they are converted first; None: their own."""
    scales: Sequence[Tensor | None] = [None] * len(call.a_parts) if call.a_scales is None else call.a_scales
    pairs = enumerate(zip(call.a_parts, scales, strict=True))
    matmuls = [_matmul(call, i, a, a_scale, mover) for i, (a, a_scale) in pairs]
    terms = matmuls if call.sum_dtype is None else [one.to(call.sum_dtype) for one in matmuls]
    each, of_sum = split_factors(call.factors, len(matmuls))
    total, *others = [multiplied(*pair) for pair in zip(terms, each, strict=True)]
    for term in [*others, *([] if call.added is None else [call.added])]:
        total = total + term
    return multiplied(total, of_sum)


def _matmul(call: Call, i: int, a: Tensor, a_scale: Tensor | None, mover: Mover | None) -> Tensor:
    """`a` by operand `i` of the call; by the mover, if that has to make it."""
    b, bias = call.bs[i] if isinstance(call, GatherCall) else call.b_parts[i], call.biases[i]
    if mover is not None and mover.invariant and 0 not in (*a.shape, b.shape[1]):
        scales = [] if a_scale is None or call.b_scales is None else [a_scale, call.b_scales[i]]
        made: Tensor = mover.multiply(_rows(a), b, bias, scales, call.out_dtype or a.dtype, call.use_fast_accum)
        return made.view(*a.shape[:-1], b.shape[1])
    if a_scale is None or call.b_scales is None or call.out_dtype is None:
        return product(a, b, bias)
    return scaled_product(a, b, a_scale, call.b_scales[i], bias, call.out_dtype, call.use_fast_accum)


def split_factors(factors: Sequence[float] | None, count: int) -> tuple[list[float], float]:
    """The factors of so many products, and that of their sum."""
    if factors is None:
        return [1.0] * count, 1.0
    return list(factors[:count]), factors[count] if len(factors) > count else 1.0


def multiplied(tensor: Tensor, factor: float) -> Tensor:
    """The tensor times a number, in its dtype; the tensor itself if that is 1."""
    return tensor if factor == 1 else tensor * factor


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`a @ b + bias`, rounded once; of int8 in int32, without a bias."""
    if a.dtype == torch.int8:
        flat = torch_ops.int_mm(_rows(a), b)
    else:
        flat = torch.mm(_rows(a), b) if bias is None else torch.addmm(bias, _rows(a), b)
    return flat.view(*a.shape[:-1], b.shape[1])


def scaled_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`(a × a_scale) @ (b × b_scale) + bias`, rounded once to `out_dtype`."""
    rows, recipe = _rows(a), recipe_of((a_scale, a.shape), (b_scale, b.shape))
    if recipe is not None and recipe.in_blocks:
        flat = _product_in_blocks(rows, b, _rows(a_scale), b_scale, recipe, bias, out_dtype, use_fast_accum)
    elif recipe is not None and a.dtype not in FP8_DTYPES:
        exact = product(rows, b, None).float()
        flat = _finish(exact, a_scale.reshape(-1, 1), b_scale.reshape(1, -1), bias, out_dtype)
    else:
        row_scale = a_scale.reshape(()) if a_scale.numel() == 1 else a_scale.reshape(-1, 1)
        column_scale = b_scale.reshape(()) if b_scale.numel() == 1 else b_scale
        flat = _scaled_mm(rows, b, row_scale, column_scale, bias, out_dtype, use_fast_accum)
    return flat.view(*a.shape[:-1], b.shape[1])


def _product_in_blocks(
    rows: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    recipe: Recipe,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`scaled_product` of matrices with scales of blocks: cuBLAS's on CUDA, in fp32 on CPU."""
    if rows.device.type == "cpu":
        product = (rows.float() * _each(a_scale, rows.shape)) @ (b.float() * _each(b_scale, b.shape))
        return (product if bias is None else product + bias.float()).to(out_dtype)
    if b.stride(0) != 1:
        b = b.t().contiguous().t()
    of_a = _columns_first(a_scale) if recipe.a.lines == 1 else _padded_columns(a_scale.t())
    of_b = _columns_first(b_scale.t()) if recipe.b.lines == 1 else _padded_columns(b_scale)
    operands = (rows, b, of_a, of_b, recipe.scaling_types)
    fits = bias is None or bias.dtype == out_dtype != torch.float32
    if fits:
        row = None if bias is None else bias.reshape(-1)
        return torch_ops.scaled_mm_in_blocks(*operands, row, out_dtype, use_fast_accum)
    assert bias is not None
    return (torch_ops.scaled_mm_in_blocks(*operands, None, torch.float32, use_fast_accum) + bias.float()).to(out_dtype)


def _each(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Scales of blocks, one for each element of a matrix."""
    for dim in (0, 1):
        if scale.shape[dim] != shape[dim]:
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale


def _columns_first(scale: Tensor) -> Tensor:
    """Scales of 1x128 blocks as torch wants them: [M or N, K/128], strides (1, M or N)."""
    return torch.empty_strided(scale.shape, (1, scale.shape[0]), dtype=scale.dtype, device=scale.device).copy_(scale)


def _padded_columns(scale: Tensor) -> Tensor:
    """Scales of 128x128 blocks as torch wants them: [K/128, *], columns contiguous, padded to a multiple of 4 rows."""
    depth, columns = scale.shape
    out = scale.new_zeros((columns, padded(depth))).t()
    out[:depth].copy_(scale)
    return out


def _finish(
    product: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    scaled = product * row_scale * column_scale
    return (scaled if bias is None else scaled + bias.float()).to(out_dtype)


def _scaled_mm(
    rows: Tensor,
    b: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`torch._scaled_mm` where it takes the scales, bias and dtype; else the same product in fp32, scaled after it."""
    if b.stride(0) != 1:
        b = b.t().contiguous().t()
    tensorwise = row_scale.ndim == 0 and column_scale.ndim == 0
    rowwise = row_scale.ndim == 2 and column_scale.ndim == 2 and out_dtype == torch.bfloat16 and rows.is_cuda
    bias_fits = bias is None or (bias.dtype == out_dtype and out_dtype != torch.float32)
    if (tensorwise or rowwise) and bias_fits:
        row = None if bias is None else bias.reshape(-1)
        return torch_ops.scaled_mm(rows, b, row_scale, column_scale, row, out_dtype, use_fast_accum)
    one = row_scale.new_ones(())
    product = torch_ops.scaled_mm(rows, b, one, one, None, torch.float32, use_fast_accum)
    return _finish(product, row_scale, column_scale, bias, out_dtype)


# --- the functions of this module ----------------------------------------------------------------------------------
def _run(op: str, *arguments: Any) -> Any:
    names = SIGNATURES[op].names
    return run(SIGNATURES[op].named(dict(zip(names, arguments, strict=False))))


_callers = Callers(types.SimpleNamespace(**{op: functools.partial(_run, op) for op in OPS}), checks=True)
all_gather_matmul = _callers.all_gather_matmul
matmul_reduce_scatter = _callers.matmul_reduce_scatter
matmul_all_reduce = _callers.matmul_all_reduce
