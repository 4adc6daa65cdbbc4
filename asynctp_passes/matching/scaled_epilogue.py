"""Read a matmul together with scales that are applied after it.

    _scaled_mm(a, b, 1, 1) → cast? → (× factors)+ → cast?       reads as       _scaled_mm(a, b, a_scale, b_scale)
    {mm, _int_mm}(a, b) → {cast, view, × factor}+               reads as       the same, scaled by a_scale and b_scale

when all factors are, in any association, one per row [M, 1] and one per column [1, N], or a number in place of either.

The program rounds the product, scales it and rounds again. The scaled matmul scales its sum in fp32 and rounds once. So
a scale of a product of 16 bits or int8 may round to bfloat16, which has the range of fp32. Nothing but the last result
may become float16, in which the program's number may be infinite. The order, rows and then columns, may be another one
where that cannot leave the range of fp32 in between. Products of fp8 and int8 are 0 or of 2^-32 to 2^32 · K. Others may
be near its ends, as masks are: then the order is the program's, or the first factor is at most 1.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.matmuls import is_matmul, read_matmul, read_term, rows_of
from asynctp_passes.ir.nodes import arguments, filling_of, is_size, mutates, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.operations import Matmul, ScaledOptions
from asynctp_passes.ir.sizes import are_one, identical, same
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.propagation import is_view, scaling_of, shares_memory, widens
from asynctp_passes.reasons import Refusal

_ROUNDED = {torch.bfloat16, torch.float16, torch.float32}

Kind = Literal["row", "column", "number"]
Factor = tuple[Kind, fx.Node]


def read_scaled_result(node: fx.Node) -> Matmul | Refusal | None:
    """The matmul that `node` is, or is the scaled result of; why its form is not rewritten; None for other nodes."""
    if is_matmul(node):
        return read_term(node)
    way = [] if scaling_of(node) is not None or widens(node) else _way_from_matmul(node)
    if not any(map(_multiplies, way)):
        return None
    matmul = read_matmul(way[0])
    if isinstance(matmul, Refusal):
        return None
    if matmul.scaled is None:
        return _scaled_after(matmul, way)
    refusal = _used_elsewhere(way) or _not_plain(matmul, matmul.scaled) or _not_fp32(way)
    return refusal or _with_scales(matmul, matmul.scaled, way)


def _way_from_matmul(end: fx.Node) -> list[fx.Node]:
    """The one matmul that `end` casts and multiplies, and all steps down to `end`; empty when there is no such way."""
    seen: set[fx.Node] = set()
    found: list[fx.Node] = []
    stack = [end] if _scales(end) else []
    while stack:
        node = stack.pop()
        if node in seen or not _has_rows_of(node, end):
            continue
        seen.add(node)
        if is_matmul(node):
            found.append(node)
        elif _scales(node) or traits_of(node).view in (View.RESHAPE, View.SAME):
            stack.extend(node.all_input_nodes)
    way = found if len(found) == 1 else []
    while way and way[-1] is not end:
        steps = [user for user in way[-1].users if user in seen]
        way = [*way, steps[0]] if len(steps) == 1 else []
    return way


def _scales(node: fx.Node) -> bool:
    return _multiplies(node) or traits_of(node).casts


def _multiplies(node: fx.Node) -> bool:
    return traits_of(node).multiplies > 0


def _has_rows_of(node: fx.Node, other: fx.Node) -> bool:
    """True for two tensors on one device whose rows are as long, and as many: of one shape, or one a view of such."""
    a, b = tensor_of(node), tensor_of(other)
    if a is None or b is None or a.dim() < 2 or b.dim() < 2 or a.device != b.device:
        return False
    return identical(a.shape[-1], b.shape[-1]) and same(rows_of(a), rows_of(b))


def scalings(products: Iterable[fx.Node]) -> set[fx.Node]:
    """The multiplications that scale matmuls' results after them, through views and casts.

    By a factor that is broadcast, as one per row; or by the outer product of two, which is a multiplication too.
    """
    found: set[fx.Node] = set()
    stack = list(products)
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in found:
                continue
            factor = _multiplicand(user, node)
            if is_view(user):
                stack.append(user)
            elif factor is not None and (_broadcast(factor, node) or _is_outer(factor, node)):
                found |= {user} if _broadcast(factor, node) else {user, factor}
                stack.append(user)
    return found


def _multiplicand(step: fx.Node, node: fx.Node) -> fx.Node | None:
    """The other tensor of a multiplication of `node`."""
    if not _multiplies(step):
        return None
    others = [source for source in step.all_input_nodes if source is not node and tensor_of(source) is not None]
    return others[0] if len(others) == 1 else None


def _broadcast(factor: fx.Node, node: fx.Node) -> bool:
    """True for a tensor that is repeated along a dimension of `node` to be multiplied with it."""
    value, out = tensor_of(factor), tensor_of(node)
    if value is None or out is None or value.dim() > out.dim():
        return False
    missing = out.dim() - value.dim()
    sizes = zip(value.shape, out.shape[missing:], strict=True)
    return missing > 0 or any(identical(own, 1) and not identical(size, 1) for own, size in sizes)


def _is_outer(factor: fx.Node, node: fx.Node) -> bool:
    """True for the product of two tensors that are both repeated along dimensions of `node`."""
    sources = factor.all_input_nodes
    return _multiplies(factor) and len(sources) == 2 and all(_broadcast(source, node) for source in sources)


# --- what the steps must be ----------------------------------------------------------------------------------
def _used_elsewhere(way: Sequence[fx.Node]) -> Refusal | None:
    for node, step in pairwise(way):
        for user in node.users:
            if user is not step and not is_size(user):
                return Refusal(reasons.PRODUCT_HAS_OTHER_USERS, f"{node.name} is used by {user.name}")
    return None


def _not_plain(matmul: Matmul, scaled: ScaledOptions) -> Refusal | None:
    """Scales after the product may replace its own only where those are 1, and may not reach a bias."""
    name, out = matmul.node.name, tensor_of(matmul.node)
    if matmul.bias is not None:
        return Refusal(reasons.COMPUTED_BETWEEN, f"{name} has a bias, which is scaled with the product")
    if not all(scale is not None and _is_one(scale) for scale in (scaled.a_scale, scaled.b_scale)):
        return Refusal(reasons.COMPUTED_BETWEEN, f"{name} is scaled, and its own scales are not the constant 1")
    if out is None or out.dtype not in _ROUNDED:
        return Refusal(reasons.COMPUTED_BETWEEN, f"{name} is scaled after it was rounded to {scaled.out_dtype}")
    return None


def _is_one(node: fx.Node) -> bool:
    """True for one fp32 number that is made as 1 in this graph, and that nothing here changes in place."""
    number, value = filling_of(node), tensor_of(node)
    if number is None or value is None or value.dtype != torch.float32 or not are_one(value.shape):
        return False
    memory = reachable([node], lambda one: filter(shares_memory, one.users))
    changed = any(mutates(user) for one in memory for user in one.users)
    return isinstance(number, int | float) and number == 1 and not changed


def _not_fp32(way: Sequence[fx.Node]) -> Refusal | None:
    """All products with factors are in fp32, and nothing is rounded between them; the last step may be a cast."""
    for step in way[1:]:
        value = tensor_of(step)
        last = step is way[-1] and traits_of(step).casts
        if not last and (value is None or value.dtype != torch.float32):
            dtype = None if value is None else value.dtype
            return Refusal(reasons.COMPUTED_BETWEEN, f"{step.name} scales the product in {dtype}, not in fp32")
    return None


# --- products that are not fp8 ----------------------------------------------------------------------------------
_SCALED_AFTER = {torch.bfloat16, torch.float16, torch.float32, torch.int32}
"""Dtypes of matmuls that have no scales of their own."""
_WIDE = {torch.bfloat16, torch.float32}
"""Dtypes that have the range of fp32. Only products of fp32 have numbers so near its ends that bfloat16 rounds them to
infinity, or to 0."""


def _scaled_after(matmul: Matmul, way: Sequence[fx.Node]) -> Matmul | None:
    """A matmul without scales, with the factors after it as its scales; None where it is a tensor as any other."""
    if matmul.bias is not None or value_of(matmul.node).dtype not in _SCALED_AFTER:
        return None
    if _used_elsewhere(way) is not None or not _keeps_range(way):
        return None
    found = _with_scales(matmul, ScaledOptions(None, None, value_of(way[-1]).dtype, False), way)
    return None if isinstance(found, Refusal) else found


def _keeps_range(way: Sequence[fx.Node]) -> bool:
    """True where the program has no infinite number, or 0, on the way that scales in fp32 do not give."""
    steps = [(before, step) for before, step in pairwise(way) if _scales(step)]
    for before, step in steps:
        dtype, last = value_of(step).dtype, step is steps[-1][1]
        if dtype == torch.float16:
            if not (last and (traits_of(step).casts or value_of(before).dtype == dtype)):
                return False
        elif dtype not in _WIDE or (dtype == torch.bfloat16 and not last and value_of(way[0]).dtype == torch.float32):
            return False
    return True


def _in_order(factors: Sequence[Factor], scales: Sequence[fx.Node | None], outer: bool) -> bool:
    """True where the op's scales are multiplied by in the program's order, or the first is no larger than 1."""
    first, *others = [scale for scale in scales if scale is not None]
    alike = not outer and [factor for _, factor in factors] == [first, *others]
    return alike or not others or _is_gate(first)


def _is_gate(factor: fx.Node) -> bool:
    """True for a sigmoid, through views and conversions."""
    while traits_of(factor).keeps_values and len(factor.all_input_nodes) == 1:
        (factor,) = factor.all_input_nodes
    return traits_of(factor).at_most_one


# --- factors ---------------------------------------------------------------------------------------------------
def _with_scales(matmul: Matmul, scaled: ScaledOptions, way: Sequence[fx.Node]) -> Matmul | Refusal:
    """The matmul with the factors of all steps as its scales."""
    found: list[Factor] = []
    outer: list[fx.Node] = []
    for before, step in pairwise(way):
        if not _multiplies(step):
            continue
        values = arguments(step)
        other = values["other"] if values["self"] is before else values["self"]
        factors = None if other is before else _factors(other, step, scaled)
        if factors is None:
            what = f"{other.name} {_shape(other)}" if isinstance(other, fx.Node) else str(other)
            return Refusal(
                reasons.COMPUTED_BETWEEN,
                f"{step.name} multiplies by {what}, which is no fp32 factor per row or column of {_shape(step)}",
            )
        found += factors
        outer += [other] if isinstance(other, fx.Node) and len(factors) == 2 else []
    scales = _assigned(found, scaled)
    end = way[-1]
    if scales is None:
        names = ", ".join(f"{factor.name} per {kind}" for kind, factor in found)
        return Refusal(reasons.COMPUTED_BETWEEN, f"{end.name} has more factors than one per row and column: {names}")
    bounded = scaled.a_scale is not None or value_of(matmul.node).dtype == torch.int32
    if not (bounded or _in_order(found, scales, bool(outer))):
        return Refusal(reasons.COMPUTED_BETWEEN, f"{end.name} has its factors in another order than rows, columns")
    options = replace(scaled, a_scale=scales[0], b_scale=scales[1], out_dtype=value_of(end).dtype, blocks=None)
    return replace(matmul, node=end, scaled=options, epilogue=(*outer, *way[:-1]))


def _factors(node: object, step: fx.Node, scaled: ScaledOptions) -> list[Factor] | None:
    """A factor, or the two whose outer product a node is; None for what is neither."""
    kind = _kind(node, step, scaled)
    if isinstance(node, fx.Node) and kind is not None:
        return [(kind, node)]
    if not isinstance(node, fx.Node) or not _multiplies(node):
        return None
    value = tensor_of(node)
    values = arguments(node)
    kinds = [(_kind(values[name], step, scaled), values[name]) for name in ("self", "other")]
    if value is None or value.dtype != torch.float32:
        return None
    return [(kind, factor) for kind, factor in kinds if kind is not None] if all(kind for kind, _ in kinds) else None


def _dtypes(step: fx.Node, scaled: ScaledOptions) -> Container[torch.dtype]:
    """Dtypes of factors: of fp8 fp32; else any that fp32 holds, which a product in float16 must not narrow."""
    if scaled.a_scale is not None:
        return {torch.float32}
    return {torch.float16} if value_of(step).dtype == torch.float16 else _ROUNDED


def _kind(node: object, step: fx.Node, scaled: ScaledOptions) -> Kind | None:
    """How a tensor varies over a step's rows and columns; None when it is no factor of it. Factors of fp8 are 2-D."""
    value, out = tensor_of(node), tensor_of(step)
    if value is None or out is None or value.dtype not in _dtypes(step, scaled) or value.device != out.device:
        return None
    if are_one(value.shape):
        return "number"
    if scaled.a_scale is not None and value.dim() != 2:
        return None
    *lines, columns = value.shape
    if are_one(lines) and value.dim() <= out.dim() and identical(columns, out.shape[-1]):
        return "column"
    alike = value.dim() == out.dim() and all(map(identical, lines, out.shape[:-1]))
    return "row" if alike and identical(columns, 1) else None


def _assigned(factors: Sequence[Factor], scaled: ScaledOptions) -> tuple[fx.Node | None, fx.Node | None] | None:
    """The scales of A and B: the factor per row and per column, a number where there is none, else the constant 1."""
    kinds = ("row", "column", "number")
    rows, columns, numbers = ([factor for kind, factor in factors if kind == own] for own in kinds)
    if len(rows) > 1 or len(columns) > 1 or len(factors) > 2:
        return None
    a_scale = rows[0] if rows else numbers.pop(0) if numbers else scaled.a_scale
    b_scale = columns[0] if columns else numbers.pop(0) if numbers else scaled.b_scale
    return a_scale, b_scale


def _shape(node: fx.Node) -> list[object]:
    value = tensor_of(node)
    return [] if value is None else list(value.shape)
