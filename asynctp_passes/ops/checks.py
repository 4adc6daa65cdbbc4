"""Checks of calls: all arguments, and the scales that go together. Without sizes, no guard is added."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from asynctp_passes.ops.arguments import check_group, check_lengths, group_and_size, normalize_dim, require
from asynctp_passes.ops.calls import Call, GatherCall, ReduceCall
from asynctp_passes.ops.plain_collectives import gathered_shape
from asynctp_passes.ops.recipes import (
    FP8_DTYPES,
    RECIPES,
    SCALE_DTYPE,
    SCALED_AFTER_DTYPES,
    Cover,
    recipe_of,
)

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALED_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDENED = (torch.bfloat16, torch.float16)
"""Dtypes of products that can be summed in float32."""
REDUCE_OPS = ("sum", "avg")
EXTREMES = ("max", "min")  # of an all-reduce without a matmul
LARGEST_EXPONENT = 60
"""A factor is at most 2 to this power, or at least 2 to its negative: the product of two is normal in float32."""


def check(call: Call, *, sizes: bool = True) -> None:
    """Check a call's arguments; without `sizes` only what adds no guard under dynamic shapes.

    Raises:
        ValueError: Names the argument, its value, the limit and the remedy.
    """
    if isinstance(call, GatherCall):
        _check_gather(call, sizes)
    else:
        _check_reduction(call, sizes)


def check_in_group(call: Call) -> None:
    """Check that the group exists and has the size that the call says, then its arguments.

    Raises:
        ValueError: Names the argument, its value, the limit and the remedy.
    """
    if call.group_size is None:
        group_and_size(call.group_name)
    else:
        check_group(call.op, call.group_size, call.group_name)
    check(call)


# --- gathers -------------------------------------------------------------------------------------------------------
def _check_gather(call: GatherCall, sizes: bool) -> None:
    op, a_shard = call.op, call.a_shard
    check_lengths(op, len(call.bs), {"bs": call.bs, "biases": call.biases})
    dim = _check_dim(op, "gather_dim", call.gather_dim, a_shard.ndim)
    _check_scales_given(call, call.a_scale)
    for i, (b, bias) in enumerate(zip(call.bs, call.biases, strict=True)):
        _check_product(op, ("a_shard", f"bs[{i}]", f"biases[{i}]"), a_shard, b, bias, call.out_dtype)
    if call.b_scales is not None:
        check_lengths(op, len(call.bs), {"b_scales": call.b_scales})
        rowwise_in_contraction = call.gather_a_scale and dim == a_shard.ndim - 1
        limit = "False when the last dimension is gathered: one row would have another scale on every rank"
        require(not rowwise_in_contraction, op, "gather_a_scale", True, limit)
    _check_along(call, dim)
    if call.b_rows is not None:
        _check_rows(call, dim, sizes)
    if sizes:
        _check_gather_sizes(call, dim)


def _check_along(call: GatherCall, dim: int) -> None:
    op, along, ndim = call.op, call.along_shard, call.a_shard.ndim
    if along is not None:
        limit = "absent without scales, where a_scale is gathered, or the last dimension: it is gathered with the data"
        free = call.a_scale is not None and not call.gather_a_scale and dim < ndim - 1
        require(free, op, "along_shard", _describe(along), limit)
        fits = along.ndim == ndim and along.dtype == torch.float32
        require(fits, op, "along_shard", _describe(along), f"float32, of {ndim} dimensions as a_shard")


def _check_rows(call: GatherCall, dim: int, sizes: bool) -> None:
    op, given, count = call.op, list(call.b_rows or ()), 3 * len(call.bs)
    limit = "absent with scales, or where the last dimension is gathered"
    require(call.a_scale is None and dim < call.a_shard.ndim - 1, op, "b_rows", given, limit)
    require(len(given) == count, op, "b_rows", given, f"{count} numbers: first, end and every for each operand")
    rows = math.prod(gathered_shape(call.a_shard.shape, dim, call.group_size)[:-1])
    for i in range(len(call.bs)) if sizes else ():
        first, end, every = map(int, given[3 * i : 3 * i + 3])
        fits = 0 <= first <= end <= every and (rows == 0 or (every > 0 and rows % every == 0))
        require(fits, op, f"b_rows of bs[{i}]", (first, end, every), f"0 <= first <= end <= every, a divisor of {rows}")


def _check_gather_sizes(call: GatherCall, dim: int) -> None:
    op, shard = call.op, call.a_shard.shape
    full = gathered_shape(shard, dim, call.group_size)
    for i, (b, bias) in enumerate(zip(call.bs, call.biases, strict=True)):
        _check_inner(op, "gathered A", full, f"bs[{i}]", b)
        _check_bias(op, f"biases[{i}]", bias, b)
    if call.a_scale is not None and call.b_scales is not None:
        rows = shard if call.gather_a_scale else full
        _check_a_scale(op, "a_scale", call.a_scale, rows, one_allowed=not call.gather_a_scale)
        if (along := call.along_shard) is not None:
            limit = f"of shape {[*shard[:-1], 1]}: one number per row"
            require(tuple(along.shape) == (*shard[:-1], 1), op, "along_shard", _describe(along), limit)
        for i, (b, b_scale) in enumerate(zip(call.bs, call.b_scales, strict=True)):
            _check_b_scale(op, f"b_scales[{i}]", b_scale, b)
            _check_pair(op, f"a_scale and b_scales[{i}]", (call.a_scale, rows), (b_scale, b))


# --- reductions ----------------------------------------------------------------------------------------------------
def _check_reduction(call: ReduceCall, sizes: bool) -> None:
    op, a_parts, b_parts = call.op, call.a_parts, call.b_parts
    check_lengths(op, len(a_parts), {"a_parts": a_parts, "b_parts": b_parts, "biases": call.biases})
    require(call.reduce_op in REDUCE_OPS, op, "reduce_op", call.reduce_op, f"one of {REDUCE_OPS}")
    _check_ndim(op, a_parts[0].ndim)
    _check_scales_given(call, call.a_scales)
    scaled = call.out_dtype is not None
    for i, (a, b, bias) in enumerate(zip(a_parts, b_parts, call.biases, strict=True)):
        _check_product(op, (f"a_parts[{i}]", f"b_parts[{i}]", f"biases[{i}]"), a, b, bias, call.out_dtype)
        alike = a.ndim == a_parts[0].ndim and (scaled or a.dtype == a_parts[0].dtype)
        limit = f"of the rank and dtype of a_parts[0], {_describe(a_parts[0])}"
        require(alike, op, f"a_parts[{i}]", _describe(a), limit)
    if call.a_scales is not None and call.b_scales is not None:
        check_lengths(op, len(a_parts), {"a_scales": call.a_scales, "b_scales": call.b_scales})
    _check_optional(call)
    if sizes:
        _check_sum_sizes(call)
    if call.scatter_dim is not None:
        dim = _check_dim(op, "scatter_dim", call.scatter_dim, a_parts[0].ndim)
        if sizes:
            _check_parts(call, dim)


def _check_optional(call: ReduceCall) -> None:
    op, first, added = call.op, call.a_parts[0], call.added
    products = call.out_dtype or first.dtype
    _check_sum_dtype(op, products, call.sum_dtype)
    _check_factors(op, len(call.a_parts), call.factors)
    if added is not None:
        dtype = call.sum_dtype or products
        limit = f"a tensor of the result's {dtype} on {first.device}, where A is; convert it first"
        fits = added.dtype == dtype and added.device == first.device
        require(fits and added.ndim == first.ndim, op, "added", _describe(added), limit)


def _check_parts(call: ReduceCall, dim: int) -> None:
    size, ranks = (*call.a_parts[0].shape[:-1], call.b_parts[0].shape[1])[dim], call.group_size
    assert ranks is not None, "the op that scatters is told"
    limit = f"a multiple of the group's {ranks} ranks; pad that dimension"
    require(size % ranks == 0, call.op, f"size of dimension {dim} of the product", size, limit)
    if call.real_rows is not None:
        limit = f"from 0 to {size}, the size of dimension {dim}, which must not be the last"
        require(
            dim < call.a_parts[0].ndim - 1 and 0 <= call.real_rows <= size, call.op, "real_rows", call.real_rows, limit
        )


def _check_sum_dtype(op: str, products: torch.dtype, sum_dtype: torch.dtype | None) -> None:
    fits = sum_dtype in (None, products) or (sum_dtype == torch.float32 and products in WIDENED)
    limit = f"None, the products' {products}, or torch.float32 for products of a dtype in {WIDENED}"
    require(fits, op, "sum_dtype", sum_dtype, limit)


def _check_factors(op: str, count: int, factors: Sequence[float] | None) -> None:
    if factors is None:
        return
    limit = f"{count}, one for each product, or {count + 1}, one more for their sum"
    require(count <= len(factors) <= count + 1, op, "len(factors)", len(factors), limit)
    for i, factor in enumerate(factors):
        fraction, exponent = math.frexp(factor)
        limit = f"a power of two from 2^-{LARGEST_EXPONENT} to 2^{LARGEST_EXPONENT}, or the negative of one"
        require(abs(fraction) == 0.5 and abs(exponent - 1) <= LARGEST_EXPONENT, op, f"factors[{i}]", factor, limit)


def _check_sum_sizes(call: ReduceCall) -> None:
    op, added, product = call.op, call.added, (*call.a_parts[0].shape[:-1], call.b_parts[0].shape[1])
    for i, (a, b, bias) in enumerate(zip(call.a_parts, call.b_parts, call.biases, strict=True)):
        _check_inner(op, f"a_parts[{i}]", a.shape, f"b_parts[{i}]", b)
        _check_bias(op, f"biases[{i}]", bias, b)
        same = (*a.shape[:-1], b.shape[1]) == product
        limit = f"of the first product's shape {product}, since the products are added"
        require(same, op, f"product {i}", (*a.shape[:-1], b.shape[1]), limit)
    for i, (a_scale, b_scale) in enumerate(zip(call.a_scales or (), call.b_scales or (), strict=True)):
        a, b = call.a_parts[i], call.b_parts[i]
        _check_a_scale(op, f"a_scales[{i}]", a_scale, a.shape)
        _check_b_scale(op, f"b_scales[{i}]", b_scale, b)
        _check_pair(op, f"a_scales[{i}] and b_scales[{i}]", (a_scale, a.shape), (b_scale, b))
    limit = f"of the products' shape {list(product)}; expand it first"
    require(added is None or added.shape == product, op, "added", added is not None and _describe(added), limit)


def _check_scales_given(call: Call, of_a: Tensor | Sequence[Tensor] | None) -> None:
    """All that says how a call is scaled is there, or nothing of it."""
    name = "a_scale" if isinstance(call, GatherCall) else "a_scales"
    parts = {name: of_a, "b_scales": call.b_scales, "out_dtype": call.out_dtype}
    given = [each for each, value in parts.items() if value is not None]
    limit = f"all of {', '.join(parts)}, or none of them"
    require(len(given) in (0, len(parts)), call.op, "given", given, limit)
    gathered = isinstance(call, GatherCall) and call.gather_a_scale
    for each, value in (("gather_a_scale", gathered), ("use_fast_accum", call.use_fast_accum)):
        require(bool(given) or not value, call.op, each, value, "False without scales")


# --- of each matmul ------------------------------------------------------------------------------------------------
def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _check_ndim(op: str, ndim: int) -> None:
    require(ndim >= 2, op, "dimensions of A", ndim, "at least 2 (rows and contraction); unsqueeze a vector first")


def _check_dim(op: str, name: str, dim: int, ndim: int) -> int:
    _check_ndim(op, ndim)
    require(-ndim <= dim < ndim, op, name, dim, f"between {-ndim} and {ndim - 1} for an operand of {ndim} dimensions")
    return normalize_dim(dim, ndim)


def _check_product(
    op: str,
    names: tuple[str, str, str],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    """Ranks, dtypes and devices of one matmul's operands: facts that are static under dynamic shapes.

    out_dtype: None of a matmul without scales.
    """
    a_name, b_name, bias_name = names
    require(b.ndim == 2, op, b_name, _describe(b), "a matrix [K, N]; flatten or transpose it first")
    require(a.device == b.device, op, b_name, _describe(b), f"on the device of {a_name}, {a.device}")
    if out_dtype is None:
        plain = (*PLAIN_DTYPES, torch.int8) if op.startswith("all_gather") else PLAIN_DTYPES
        require(a.dtype in plain, op, a_name, _describe(a), f"of a dtype in {plain}")
        require(b.dtype == a.dtype, op, b_name, _describe(b), f"of the dtype of {a_name}, {a.dtype}; cast one of them")
    else:
        scaled = (*FP8_DTYPES, *SCALED_AFTER_DTYPES)
        for name, operand in ((a_name, a), (b_name, b)):
            require(operand.dtype in scaled, op, name, _describe(operand), f"of a dtype in {scaled}")
        alike = a.dtype == b.dtype or (a.dtype in FP8_DTYPES and b.dtype in FP8_DTYPES)
        require(alike, op, b_name, _describe(b), f"of the dtype of {a_name}, {a.dtype}; only fp8 dtypes mix")
        require(out_dtype in SCALED_OUT_DTYPES, op, "out_dtype", out_dtype, f"in {SCALED_OUT_DTYPES}")
    if bias is not None:
        own = () if a.dtype == torch.int8 else (a.dtype,)
        dtypes = own if out_dtype is None else SCALED_OUT_DTYPES
        fits = bias.ndim in (1, 2) and bias.dtype in dtypes and bias.device == a.device
        limit = f"a vector [N] or a row [1, N] of a dtype in {dtypes} on {a.device}"
        require(fits, op, bias_name, _describe(bias), limit)


def _check_inner(op: str, a_name: str, a_shape: Sequence[int], b_name: str, b: Tensor) -> None:
    limit = f"of {a_shape[-1]} rows, the last size of {a_name} {list(a_shape)}"
    require(a_shape[-1] == b.shape[0], op, b_name, _describe(b), limit)


def _check_bias(op: str, name: str, bias: Tensor | None, b: Tensor) -> None:
    if bias is not None:
        n = b.shape[1]
        fits = tuple(bias.shape) in ((n,), (1, n))
        require(fits, op, name, _describe(bias), f"of shape [{n}] or [1, {n}]: one number per output column")


def _check_a_scale(op: str, name: str, scale: Tensor, a: Sequence[int], one_allowed: bool = True) -> None:
    covers = {each.a: each.a.shape_of_a(a) for each in RECIPES if each.a.lines}
    _check_scale(op, name, scale, covers, one_allowed)


def _check_b_scale(op: str, name: str, scale: Tensor, b: Tensor) -> None:
    _check_scale(op, name, scale, {each.b: each.b.shape_of_b(b.shape) for each in RECIPES if each.b.lines})


def _check_scale(
    op: str, name: str, scale: Tensor, shapes: dict[Cover, tuple[int, ...] | None], one_allowed: bool = True
) -> None:
    """A scale has one of these shapes; None: an operand has no whole blocks."""
    fits = tuple(scale.shape) in shapes.values() or (one_allowed and scale.numel() == 1)
    told = " or ".join(f"{list(shape)} ({cover.name})" for cover, shape in shapes.items() if shape is not None)
    limit = f"float32, {'one number, or ' if one_allowed else ''}of shape {told}"
    require(fits and scale.dtype == SCALE_DTYPE, op, name, _describe(scale), limit)


def _check_pair(op: str, names: str, of_a: tuple[Tensor, Sequence[int]], of_b: tuple[Tensor, Tensor]) -> None:
    shapes, dtype = [list(of_a[0].shape), list(of_b[0].shape)], of_b[1].dtype
    recipe = recipe_of(of_a, (of_b[0], of_b[1].shape))
    limit = f"scaled in one of these ways: {', '.join(' x '.join(each.names) for each in RECIPES)}"
    require(recipe is not None, op, names, shapes, limit)
    limit = "one number or by rows: only fp8 operands have scales of blocks"
    require(recipe is None or dtype in recipe.dtypes, op, names, shapes, limit)
