"""Rewrite fused chains: the only file that edits a graph. Everything was checked before; nothing here can refuse.

    gather    shard → all_gather → wait → view* → mm+       becomes   shard → view? → all_gather_matmul → view → ...
    scatter   mm+ → view* → add* → reduce_scatter → wait    becomes   a+, b+ → view? → matmul_reduce_scatter → view?
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from asynctp_passes import compat, ops
from asynctp_passes.chain import GatherChain, Matmul, ScatterChain
from asynctp_passes.fxview import Sizes, op_name, segments, tensor_of
from asynctp_passes.shapes import Rearrangement, Size, product, quotient, same

__all__ = ["rewrite"]

_aten = torch.ops.aten
_INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "from_node", "seq_nr", "custom")


def rewrite(graph: fx.Graph, chains: Sequence[GatherChain | ScatterChain]) -> dict[fx.Node, fx.Node]:
    """Replace each chain by one fused op; returns the op's node for each collective's node.

    Unused nodes are erased, the order is restored where an operand of a later matmul moved, and the graph is linted.
    """
    segment = segments(graph)
    sizes = Sizes(graph, (chain.collective.group_size for chain in chains))
    fused: dict[fx.Node, fx.Node] = {}
    for chain in chains:
        builder = _Builder(graph, sizes, chain)
        emit = _emit_gather if isinstance(chain, GatherChain) else _emit_scatter
        fused[chain.collective.node] = emit(builder, chain)  # type: ignore[arg-type]
        for node in builder.made:
            segment[node] = segment[builder.anchor]
    _restore_order(graph, segment)
    graph.lint()
    return fused


# --- building nodes ---------------------------------------------------------------------------------------
class _Builder:
    """Makes nodes for one chain in front of `anchor`, each with a fake tensor and the origin of the chain."""

    def __init__(self, graph: fx.Graph, sizes: Sizes, chain: GatherChain | ScatterChain) -> None:
        self.graph = graph
        self.sizes = sizes
        self.collective = chain.collective
        self.anchor = chain.matmuls[0].node if isinstance(chain, GatherChain) else chain.collective.node
        self.made: list[fx.Node] = []
        inputs = [chain.shard] if isinstance(chain, GatherChain) else [matmul.a for matmul in chain.matmuls]
        self._size_sources = inputs

    def call(self, target: Callable[..., Any], *args: Any, like: fx.Node | None = None) -> fx.Node:
        """A call of `target`; its value is computed on fake tensors."""
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args)
        origin = like or self.collective.node
        node.meta.update({key: origin.meta[key] for key in _INHERITED if key in origin.meta})
        node.meta["val"] = self._value(target, args)
        self.made.append(node)
        return node

    def _value(self, target: Callable[..., Any], args: Any) -> Any:
        fake = tensor_of(self._size_sources[0])
        assert fake is not None
        with compat.without_guards(fake):
            return target(*fx.map_arg(args, lambda node: node.meta["val"]))

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """`node` with another shape; the node itself when it has that shape."""
        value = tensor_of(node)
        assert value is not None
        old = self.sizes.of(value)
        if len(old) == len(shape) and all(same(a, b) for a, b in zip(old, shape, strict=True)):
            return node
        return self.call(_aten.reshape.default, node, self._shape(shape))

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """`node` with dimensions reordered; the node itself when the order is the identity."""
        return node if list(order) == list(range(len(order))) else self.call(_aten.permute.default, node, list(order))

    def bitcast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`node` seen as another dtype of the same size; the node itself when it has that dtype."""
        value = tensor_of(node)
        assert value is not None
        return node if value.dtype == dtype else self.call(_aten.view.dtype, node, dtype)

    def _shape(self, shape: Sequence[Size]) -> list[Any]:
        """Sizes as reshape takes them: integers, at most one -1, and nodes for what else is symbolic."""
        symbolic = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
        return [-1 if axis in symbolic[:1] else self.size(size) for axis, size in enumerate(shape)]

    def size(self, size: Size) -> int | fx.Node:
        """An integer, or a node that computes a symbolic size from the sizes of the chain's inputs."""
        if isinstance(size, int):
            return size
        for known, node in self._known_sizes():
            if same(known, size):
                return node()
            times = quotient(size, known)
            if isinstance(times, int):
                return self.call(operator.mul, node(), times)
            part = quotient(known, size)
            if isinstance(part, int):
                return self.call(operator.floordiv, node(), part)
        if isinstance(size, sympy.Mul | sympy.Add):
            combine = operator.mul if isinstance(size, sympy.Mul) else operator.add
            parts = [self.size(int(arg) if arg.is_Integer else arg) for arg in size.args]
            result = parts[0]
            for part in parts[1:]:
                result = self.call(combine, result, part)
            return result
        raise AssertionError(f"no input of {self.collective.node.name} carries the size {size}")

    def _known_sizes(self) -> Iterable[tuple[Size, Callable[[], fx.Node]]]:
        """Sizes that nodes before the chain carry, each with a way to get the node."""
        for node in self.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt):
                yield self.sizes.read(node), lambda node=node: node
        holders = [*self._size_sources, *(node for node in self.graph.nodes if node.op == "placeholder")]
        for node in holders:
            value = tensor_of(node)
            for axis, size in enumerate(() if value is None else self.sizes.of(value)):
                if not isinstance(size, int):
                    yield size, lambda node=node, axis=axis: self.call(_aten.sym_size.int, node, axis)


# --- gather side ----------------------------------------------------------------------------------------
def _emit_gather(build: _Builder, chain: GatherChain) -> fx.Node:
    value, lead = tensor_of(chain.matmuls[0].a), chain.matmuls[0]
    assert value is not None
    shard = build.bitcast(chain.shard, value.dtype)
    shard, gather_dim = _shard_as_op_wants(build, chain, shard)
    op, outs = _call_gather(build, chain, shard, gather_dim)
    for index, matmul in enumerate(chain.matmuls):
        out = build.call(operator.getitem, op, index, like=matmul.node)
        old = tensor_of(matmul.node)
        assert old is not None
        out = build.reshape(out, build.sizes.of(old))
        out.meta["val"] = old
        matmul.node.replace_all_uses_with(out)
        build.graph.erase_node(matmul.node)
    if outs > len(chain.matmuls):
        _return_gathered(build, chain, lead, build.call(operator.getitem, op, len(chain.matmuls)), gather_dim)
    _drop_sizes(build, [*chain.collective.results, *chain.views])
    _erase_unused(build.graph, chain.collective)
    if chain.scale is not None:
        _drop_sizes(build, _downstream(chain.scale.node))
        _erase_unused(build.graph, chain.scale)
    return op


def _shard_as_op_wants(build: _Builder, chain: GatherChain, shard: fx.Node) -> tuple[fx.Node, int]:
    """Bring the shard into the form [outer, inner, width] (rows) or [outer, width] (contraction); and its gather dim.

    A shard whose own dimensions are grouped that way is taken as it is, which leaves its strides alone.
    """
    place, value = chain.placement, tensor_of(shard)
    assert value is not None
    own = build.sizes.of(value)
    if place.shard.is_reshape and len(own) > 1 and same(own[-1], place.width):
        if place.axis == "contraction":
            return shard, len(own) - 1
        for axis in reversed(range(len(own) - 1)):
            if same(product(own[:axis]), place.outer):
                return shard, axis
    shard = _rearranged(build, shard, place.shard)
    if place.axis == "contraction":
        return build.reshape(shard, (place.outer, place.width)), 1
    if same(place.outer, 1):
        return build.reshape(shard, (place.inner, place.width)), 0
    return build.reshape(shard, (place.outer, place.inner, place.width)), 1


def _rearranged(build: _Builder, node: fx.Node, way: Rearrangement) -> fx.Node:
    """Reshape and permute, unless nothing moves."""
    return node if way.is_reshape else build.permute(build.reshape(node, way.sizes), way.order)


def _call_gather(build: _Builder, chain: GatherChain, shard: fx.Node, gather_dim: int) -> tuple[fx.Node, int]:
    """Emit the fused op; returns its node and how many tensors it returns."""
    gather, matmuls = chain.collective, chain.matmuls
    bs, biases = [matmul.b for matmul in matmuls], [_row_bias(build, matmul) for matmul in matmuls]
    scaled = [matmul.scaled for matmul in matmuls if matmul.scaled is not None]
    if not scaled:
        op = build.call(
            torch.ops.asynctp.all_gather_matmul.default,
            *(shard, bs, biases, gather_dim, chain.saved, gather.group_size, gather.group),
        )
    else:
        scale = _gather_scale(build, chain, shard, gather_dim)
        op = build.call(
            torch.ops.asynctp.all_gather_scaled_matmul.default,
            *(shard, scale, bs, [options.b_scale for options in scaled], biases, gather_dim),
            *(chain.scale is not None, scaled[0].out_dtype, scaled[0].use_fast_accum),
            *(chain.saved, gather.group_size, gather.group),
        )
    return op, len(matmuls) + chain.saved


def _row_bias(build: _Builder, matmul: Matmul) -> fx.Node | None:
    """The bias as a vector [N]."""
    value = tensor_of(matmul.bias)
    if matmul.bias is None or value is None or value.dim() == 1:
        return matmul.bias
    return build.reshape(matmul.bias, build.sizes.of(value)[-1:])


def _gather_scale(build: _Builder, chain: GatherChain, shard: fx.Node, gather_dim: int) -> fx.Node:
    """The scale of A: one number, or one per row in the shard's (or the gathered tensor's) own dimensions."""
    scaled, value = chain.matmuls[0].scaled, tensor_of(shard)
    assert scaled is not None
    assert value is not None
    own = list(build.sizes.of(value))
    if chain.scale is not None:
        assert chain.scale.input is not None
        return build.reshape(chain.scale.input, [*own[:-1], 1])
    scale = tensor_of(scaled.a_scale)
    assert scale is not None
    if same(product(build.sizes.of(scale)), 1):
        return scaled.a_scale
    if gather_dim < len(own) - 1:
        own[gather_dim] = own[gather_dim] * chain.collective.group_size
    return build.reshape(scaled.a_scale, [*own[:-1], 1])


def _return_gathered(build: _Builder, chain: GatherChain, lead: Matmul, full: fx.Node, gather_dim: int) -> None:
    """Give the gathered tensor to its other users.

    Users of a matmul operand take the returned tensor as it is (reshaped). When others remain, the collective's own
    result is rebuilt from it and the views stay.
    """
    for operand in dict.fromkeys(matmul.a for matmul in chain.matmuls):
        value = tensor_of(operand)
        assert value is not None
        if operand.users and operand not in chain.collective.results and value.is_contiguous():
            taken = build.reshape(full, build.sizes.of(value))
            operand.replace_all_uses_with(taken)
            taken.meta["val"] = value
    _drop_sizes(build, [*chain.collective.results, *chain.views])
    _erase_unused(build.graph, chain.collective)
    if any(not _is_erased(node) and node.users for node in chain.collective.results):
        whole = _as_collective_result(build, chain, full, gather_dim)
        for node in chain.collective.results:
            if not _is_erased(node):
                node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in chain.collective.waits)


def _as_collective_result(build: _Builder, chain: GatherChain, full: fx.Node, gather_dim: int) -> fx.Node:
    """The gathered tensor as the collective returned it: ranks outermost, then the shard's own dimensions."""
    value, place = tensor_of(chain.collective.node), chain.placement
    assert value is not None
    ranks = chain.collective.group_size
    way = place.shard
    sizes = [way.sizes[axis] for axis in way.order]
    leading = way.lengths[0]
    whole = build.reshape(full, [*sizes[:leading], ranks, *sizes[leading:]])
    inverse = [way.order.index(axis) for axis in range(len(way.order))]
    whole = build.permute(whole, [leading, *(axis + (axis >= leading) for axis in inverse)])
    whole = build.bitcast(build.reshape(whole, build.sizes.of(value)), value.dtype)
    if not _contiguous(whole):
        whole = build.call(_aten.clone.default, whole)
        whole = build.reshape(whole, build.sizes.of(value))
    whole.meta["val"] = value
    return whole


def _contiguous(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.is_contiguous()


# --- scatter side -----------------------------------------------------------------------------------------
def _emit_scatter(build: _Builder, chain: ScatterChain) -> fx.Node:
    place, scatter = chain.placement, chain.collective
    a_parts = [_product_rows(build, chain, matmul.a) for matmul in chain.matmuls]
    first = tensor_of(a_parts[0])
    assert first is not None
    scatter_dim = first.dim() - 1 if place.axis == "columns" else first.dim() - 2
    op = _call_scatter(build, chain, a_parts, scatter_dim)
    value = tensor_of(scatter.node)
    assert value is not None
    out = build.reshape(_rearranged(build, op, place.out), build.sizes.of(value))
    if not _contiguous(out):
        out = build.call(_aten.clone.default, out)
    if out is not op:
        out.meta["val"] = value
    for node in (*scatter.waits, scatter.node):
        node.replace_all_uses_with(out)
    _drop_sizes(build, [*chain.views, *(matmul.node for matmul in chain.matmuls)])
    _erase_unused(build.graph, scatter)
    return op


def _product_rows(build: _Builder, chain: ScatterChain, a: fx.Node) -> fx.Node:
    """A left operand [M, K] with its rows as [outer, ranks * inner], so that the scatter dim is one of its own."""
    place, value = chain.placement, tensor_of(a)
    assert value is not None
    if place.axis == "columns" or same(place.outer, 1):
        return a
    width = build.sizes.of(value)[-1]
    return build.reshape(a, (place.outer, place.inner * chain.collective.group_size, width))


def _call_scatter(build: _Builder, chain: ScatterChain, a_parts: list[fx.Node], scatter_dim: int) -> fx.Node:
    scatter, matmuls = chain.collective, chain.matmuls
    b_parts, biases = [matmul.b for matmul in matmuls], [_row_bias(build, matmul) for matmul in matmuls]
    ending = (scatter.group_size, scatter.group)
    scaled = [matmul.scaled for matmul in matmuls if matmul.scaled is not None]
    if not scaled:
        return build.call(
            torch.ops.asynctp.matmul_reduce_scatter.default,
            *(a_parts, b_parts, biases, scatter.reduce_op, scatter_dim, *ending),
        )
    a_scales = [_row_scale(build, options.a_scale, a) for options, a in zip(scaled, a_parts, strict=True)]
    return build.call(
        torch.ops.asynctp.scaled_matmul_reduce_scatter.default,
        *(a_parts, b_parts, a_scales, [options.b_scale for options in scaled], biases, scatter.reduce_op, scatter_dim),
        *(scaled[0].out_dtype, scaled[0].use_fast_accum, *ending),
    )


def _row_scale(build: _Builder, scale: fx.Node, a: fx.Node) -> fx.Node:
    """One number as it is; a scale per row in the dimensions of `a`."""
    value, rows = tensor_of(scale), tensor_of(a)
    assert value is not None
    assert rows is not None
    if same(product(build.sizes.of(value)), 1):
        return scale
    return build.reshape(scale, [*build.sizes.of(rows)[:-1], 1])


# --- tidying up --------------------------------------------------------------------------------------------
def _drop_sizes(build: _Builder, nodes: Iterable[fx.Node]) -> None:
    """Read sizes of vanishing tensors off the chain's inputs instead, so that nothing keeps them alive."""
    for node in nodes:
        if _is_erased(node):
            continue
        for user in [user for user in node.users if op_name(user).startswith("aten.sym_")]:
            size = build.size(build.sizes.read(user))
            user.replace_all_uses_with(size)  # type: ignore[arg-type]
            build.graph.erase_node(user)


def _downstream(node: fx.Node) -> list[fx.Node]:
    seen = {node: None}
    for current in seen:
        pass
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user not in seen:
                seen[user] = None
                stack.append(user)
    return list(seen)


def _erase_unused(graph: fx.Graph, collective: Any) -> None:
    """Erase what nobody uses any more among the nodes around a collective, last first."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and _may_erase(node, collective):
            graph.erase_node(node)


def _may_erase(node: fx.Node, collective: Any) -> bool:
    return node in collective.results or not node.is_impure()


def _is_erased(node: fx.Node) -> bool:
    return bool(getattr(node, "_erased", False))


def _restore_order(graph: fx.Graph, segment: dict[fx.Node, int]) -> None:
    """Move nodes behind their inputs, keeping the order else, and never across an in-place operation."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    if all(position[source] < position[node] for node in position for source in node.all_input_nodes):
        return
    waiting = {node: len(node.all_input_nodes) for node in position}
    ready = [(segment[node], position[node]) for node, count in waiting.items() if not count]
    by_position = list(position)
    heapq.heapify(ready)
    cursor: fx.Node | None = None
    while ready:
        node = by_position[heapq.heappop(ready)[1]]
        if cursor is not None:
            cursor.append(node)
        cursor = node
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (segment[user], position[user]))
