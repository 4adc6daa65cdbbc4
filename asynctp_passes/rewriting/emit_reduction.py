"""Make the fused op of a reduction's chain, and give its result to the users of the collective.

mm+ → view* → add* → reduce_scatter → wait    becomes   a+, b+ → view? → matmul_reduce_scatter → view?
(mm, x)+ → view* → add* → reduce_scatter …    becomes   a+, b+, x+ → view? → add* → matmul_reduce_scatter …
mm+ → view* → add* → pad → reduce_scatter …   becomes   a+ → pad, b+ → matmul_reduce_scatter(real_rows) → view?
mm+ → view* → add* → all_reduce → wait        becomes   a+, b+ → matmul_all_reduce → view*
mm+ → view* → … → wait → view* → own part     becomes   a+, b+ → view? → matmul_reduce_scatter → view?
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.nodes import traits_of, value_of
from asynctp_passes.ir.operations import ScaledOptions
from asynctp_passes.ir.sizes import Size, product, same, same_strides
from asynctp_passes.layout.placement import ScatterPlacement
from asynctp_passes.layout.propagation import is_sum
from asynctp_passes.matching.chains import ScatterChain, Term
from asynctp_passes.rewriting.builder import Builder, column_scale, right_operand, row_bias, row_scale, shape_of_scales
from asynctp_passes.rewriting.cleanup import read_sizes_elsewhere
from asynctp_passes.rewriting.emit_alone import give_own_part, options_of

_aten = torch.ops.aten


def emit_reduction(build: Builder, chain: ScatterChain) -> fx.Node:
    """The fused op of a chain; its result has taken the place of that of the collective."""
    place = chain.placement
    read_sizes_elsewhere(build, chain)
    return _emit_all_reduce(build, chain) if place is None else _emit_scatter(build, chain, place)


def _emit_scatter(build: Builder, chain: ScatterChain, place: ScatterPlacement) -> fx.Node:
    scatter = chain.collective
    a_parts = [_product_rows(build, chain, place, build.now(matmul.a)) for matmul in chain.matmuls]
    scatter_dim = value_of(a_parts[0]).dim() - (1 if place.axis == "columns" else 2)
    op = _call_reduction(build, chain, a_parts, scatter_dim)
    shape = build.shape(scatter.node) if chain.own_part is None else chain.own_part.shape
    out = build.reshape(build.contiguous(op), shape)
    _give_result(build, chain, out)
    return op


def _padded(build: Builder, chain: ScatterChain, rows: fx.Node, width: Size | None = None) -> fx.Node:
    """Rows of a product, or of what belongs to them, padded as the product is: by zeros.

    Elements of 8 bits are padded as bytes: torch pads no fp8. `width` is that of a row, if not the last dimension.
    """
    padding, dtype = chain.padding, value_of(rows).dtype
    if padding is None:
        return rows
    width, behind = build.shape(rows)[-1] if width is None else width, len(padding.before) - 1 - padding.dim
    rows = build.reshape(rows, (*padding.before[:-1], width))
    rows = build.bitcast(rows, torch.uint8) if dtype.itemsize == 1 else rows
    rows = build.call(_aten.constant_pad_nd.default, rows, [*[0, 0] * behind, 0, build.size(padding.more)], 0)
    return build.bitcast(rows, dtype)


def _emit_all_reduce(build: Builder, chain: ScatterChain) -> fx.Node:
    """The views of one product stay, after the op; a sum becomes that product, which the op has added up.

    Views of products that are converted see what they are converted to, and conversions go as sums do. After a sum
    that lay in memory otherwise than that product, as one with a transposed tensor, a view may have to copy.
    """
    if not chain.sent.is_reshape:
        op = _call_reduction(build, chain, [_rows_as_sent(build, chain, build.now(one.a)) for one in chain.matmuls])
        _give_result(build, chain, build.reshape(op, build.shape(chain.collective.source)))
        return op
    wide = chain.sum_dtype is not None
    sums = [node for node in chain.views if is_sum(node) or (wide and traits_of(node).converts)]
    gone = _first_within(sums, {*chain.views, *(matmul.node for matmul in chain.matmuls)})
    turned = not all(same_strides(node, source) for node, source in gone.items())
    a_parts = [_as_rows(build, build.now(matmul.a)) for matmul in chain.matmuls]
    op = _call_reduction(build, chain, a_parts)
    for matmul in chain.matmuls:
        build.replace(matmul.node, build.reshape(op, build.shape(matmul.node)))
    for node in chain.views:
        if node in gone:
            build.replace(node, build.now(gone[node]))
        elif wide or turned:
            if turned and traits_of(node).needs_strides:
                node.target, node.args = _aten.reshape.default, node.args[:2]
            build.evaluate(node)
    out = build.contiguous(build.now(chain.collective.source))
    _give_result(build, chain, out)
    return op


def _call_reduction(build: Builder, chain: ScatterChain, a_parts: list[fx.Node], *scatter_dim: int) -> fx.Node:
    """The fused op; only that of a reduce-scatter is told where to scatter, and the group's size."""
    matmuls, collective = chain.matmuls, chain.collective
    b_parts = [right_operand(build, matmul) for matmul in matmuls]
    biases = [row_bias(build, matmul) for matmul in matmuls]
    shapes = [build.shape(a) for a in a_parts]
    optional: dict[str, Any] = {"sum_dtype": chain.sum_dtype, "factors": list(chain.factors) or None}
    optional["added"] = _added(build, chain, (*shapes[0][:-1], build.shape(matmuls[0].node)[-1]))
    optional["real_rows"] = None if chain.padding is None else build.size(chain.padding.real_rows)
    if optional["added"] is not None and not chain.sent.is_reshape:
        optional["added"] = _rows_as_sent(build, chain, optional["added"])
    scaled, scales = [matmul.scaled for matmul in matmuls if matmul.scaled is not None], list[Any]()
    if scaled:  # by their places: each name takes 0.2 us of a call
        a_scales = [_left_scale(build, chain, one, shape) for one, shape in zip(scaled, shapes, strict=True)]
        b_scales = [column_scale(build, one) for one in scaled]
        scales = [a_scales, b_scales, scaled[0].out_dtype, scaled[0].use_fast_accum]
    given = {name: value for name, value in optional.items() if value is not None}
    op = getattr(torch.ops.asynctp, chain.kind).default
    size = (collective.group_size,) if scatter_dim else ()
    how = (collective.reduce_op, *scatter_dim, *size, collective.group)
    return build.call(op, a_parts, b_parts, biases, *how, *scales, **given, **options_of(build.state, collective))


def _product_rows(build: Builder, chain: ScatterChain, place: ScatterPlacement, a: fx.Node) -> fx.Node:
    """A left operand [M, K] with its rows as [outer, ranks * inner], so that the scatter dim is one of its own."""
    if not chain.sent.is_reshape:
        return _rows_as_sent(build, chain, a)
    a = _padded(build, chain, a)
    if place.axis == "columns" or same(place.outer, 1):
        return _as_rows(build, a)
    return build.reshape(a, (place.outer, place.inner * chain.collective.group_size, build.shape(a)[-1]))


def _as_rows(build: Builder, a: fx.Node) -> fx.Node:
    """A left operand [..., K] as a matrix."""
    *lines, width = build.shape(a)
    return build.reshape(a, (product(lines), width))


def _rows_as_sent(build: Builder, chain: ScatterChain, node: fx.Node) -> fx.Node:
    """Rows of the product [M, *], or of what belongs to them, as a matrix in the order that the collective has.

    Those of a reduce-scatter by the ranks' blocks.
    """
    place, (*_, width) = chain.placement, build.shape(node)
    columns = build.shape(chain.matmuls[0].node)[-1] if place is None else place.width
    rows = chain.sent.of_rows(columns)
    assert rows is not None, "checked before: whole rows move"
    count, order = product(build.shape(node)[:-1]), [*rows.order, len(rows.order)]
    if place is None or place.axis == "columns":
        return build.reshape(build.permute(build.reshape(node, (*rows.sizes, width)), order), (count, width))
    ranks = chain.collective.group_size
    blocks = build.reshape(node, (place.outer, ranks, place.inner, width))
    node = build.reshape(build.permute(blocks, (1, 0, 2, 3)), (ranks, *rows.sizes, width))
    return build.reshape(build.permute(node, [0, *(1 + axis for axis in order)]), (count, width))


def _left_scale(build: Builder, chain: ScatterChain, scaled: ScaledOptions, a: Sequence[Size]) -> fx.Node:
    """The scales of a left operand of these sizes, in the order of its rows."""
    own = None if scaled.a_scale is None else product(build.shape(build.now(scaled.a_scale)))
    if chain.padding is not None and own is not None and not same(own, 1):
        scale = row_scale(build, scaled, (*chain.padding.before[:-1], a[-1]))
        return build.reshape(_padded(build, chain, scale), shape_of_scales(a, scaled))
    scale = row_scale(build, scaled, a)
    if chain.sent.is_reshape or same(product(build.shape(scale)), 1):
        return scale
    return _rows_as_sent(build, chain, scale)


def _added(build: Builder, chain: ScatterChain, shape: Sequence[Size]) -> fx.Node | None:
    """The sum of the terms that are no products, in the shape and the dtype of the products' sum; None without any."""
    total: fx.Node | None = None
    for term in chain.added:
        node = build.reshape(_padded(build, chain, _early(build, term), shape[-1]), shape)
        if chain.sum_dtype not in (None, value_of(node).dtype):
            node = build.call(torch.ops.prims.convert_element_type.default, node, chain.sum_dtype, like=term.node)
        node = _times(build, node, term)
        total = node if total is None else build.call(_aten.add.Tensor, total, node, like=term.node)
    return total


def _early(build: Builder, term: Term) -> fx.Node:
    """A term's tensor, or the sum of it that the program has after its reduction."""
    node, early = build.now(term.node), term.early
    if early is None:
        return node
    seen = build.reshape(node, (early.outer, early.count, early.inner))
    return build.call(_aten.sum.dim_IntList, seen, [1], like=early.total)


def _times(build: Builder, node: fx.Node, term: Term) -> fx.Node:
    """A node as many times as a term counts."""
    return node if term.factor == 1 else build.call(_aten.mul.Tensor, node, term.factor, like=term.node)


def _give_result(build: Builder, chain: ScatterChain, out: fx.Node) -> None:
    """Give the reduced tensor to the users of the collective's result, or of the part that the rank uses.

    Where it is the sum of several results, each gives way to it, and so does each addition after them; what else these
    add is added here.
    """
    if chain.own_part is not None:
        give_own_part(build, chain.collective, chain.own_part, out)
        return
    for term in chain.added_after:
        shaped = build.reshape(build.now(term.node), build.shape(out))
        out = build.call(_aten.add.Tensor, out, _times(build, shaped, term))
    results = [node for collective in chain.collectives for node in collective.results]
    gone = _first_within(filter(is_sum, chain.after), {*results, *chain.after})
    for collective in chain.collectives:
        early = chain.early.get(collective.node)
        ends = collective.results if early is None else (early.total,)
        shaped = build.reshape(out, build.shape(ends[0]))
        for node in ends:
            build.replace(node, shaped, unless=collective.waits)
    for node, source in gone.items():
        build.replace(node, build.now(source))


def _first_within(sums: Iterable[fx.Node], inside: Container[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For sums, what stands for each: its first term that is inside of the chain, and has become the sum."""
    return {node: next(source for source in node.all_input_nodes if source in inside) for node in sums}
