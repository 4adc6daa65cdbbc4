"""Rewrite fused chains: makes and erases nodes. Everything was checked before; nothing here can refuse.

gather    shard → all_gather → wait → view* → mm+       becomes   shard → view? → all_gather_matmul → view → ...
gather    shard → all_gather → wait → op* → mm+         becomes   shard → op* → view? → all_gather_matmul → view → ...
scatter   mm+ → view* → add* → reduce_scatter → wait    becomes   a+, b+ → view? → matmul_reduce_scatter → view?
          (mm, x)+ → view* → add* → reduce_scatter …    becomes   a+, b+, x+ → view? → add* → matmul_reduce_scatter …
          mm+ → view* → add* → all_reduce → wait        becomes   a+, b+ → matmul_all_reduce → view*
bucket    (x → all_reduce → wait)+                      becomes   x+ → cat → all_reduce → wait → split → clone+
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from asynctp_passes import compat
from asynctp_passes.ir.calls import Collective, Matmul, ScaledOptions, nodes_of
from asynctp_passes.ir.nodes import (
    SizeExpression,
    Sizes,
    call_of,
    called_op,
    express,
    has_side_effect,
    is_random,
    is_size,
    name_of,
    op_name,
    reachable,
    segments,
    tensor_of,
    traits_of,
    value_of,
)
from asynctp_passes.ir.op_traits import Reduction
from asynctp_passes.ir.order import communications
from asynctp_passes.ir.read import WAIT, added_matrix, is_only_awaited, left_items, same_strides, waits_for_several
from asynctp_passes.ir.sizes import Size, divided, product, same
from asynctp_passes.layout.placement import GatherPlacement, Rearrangement, ScatterPlacement
from asynctp_passes.layout.propagation import is_sum, is_view, views_of
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.chains import (
    Bucket,
    Chain,
    CrossRankReduction,
    GatherChain,
    Hoist,
    Part,
    ScatterChain,
    SideGather,
    Term,
)
from asynctp_passes.ops import collectives  # noqa: F401  (they register torch.ops.asynctp)
from asynctp_passes.planning import cost_model
from asynctp_passes.planning.legality import on_wire
from asynctp_passes.planning.plan import Plan
from asynctp_passes.rewriting.schedule import Moves, keep_option, leave_sms, schedule

__all__ = ["rewrite", "store"]

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "from_node", "seq_nr", "custom")
_TORCHS = ("_c10d_functional", "c10d.", "_dtensor.")
"""Namespaces of collectives that Inductor knows, or that no graph of its own has."""


def rewrite(graph: fx.Graph, plan: Plan) -> dict[str, dict[str, Any]]:
    """Replace each chain by one fused op; `meta["asynctp_collective"]` of its node names the collective it replaced.

    Collectives that are `alone` become asynctp's too, as all of the groups in `wire` are, where the device allows that;
    tensors of a list become collectives of their own on any device. The all-reduces of a bucket become one, and what
    that waits for moves in front of it. Unused nodes are erased, the `dropped` collectives too, nodes move to where
    they belong (`schedule`), overlapped collectives beside their matmuls, and the graph is linted.

    Args:
        graph: The graph.
        plan: All that is done to it.

    Returns:
        What each fused op is called with (`call_of`), by the name of the collective that it replaced.
    """
    chains, sizes, buckets = plan.chains, plan.context.sizes, plan.buckets
    alone, dropped, wire = plan.alone, plan.dropped, plan.wire
    kept = frozenset(gather.node for gather in plan.kept)  # by every rank
    segment = segments(graph)
    moved: dict[fx.Node, fx.Node] = {}
    moves = Moves(kept_by_all=kept)
    fused: dict[fx.Node, fx.Node] = {}
    starts: dict[fx.Node, fx.Node] = {}
    in_front = [_mark(graph, bucket.place, _asynctp_bucket, segment) for bucket in buckets]
    several = [one for chain in chains for one in chain.collectives] + [*alone]
    items: dict[fx.Node, fx.Node] = {}
    for call in dict.fromkeys(one.call for one in several if one.call is not None):
        marks = _items_marked(graph, call, segment)
        items |= {user: marks[int(user.args[1])] for user in call.users}  # type: ignore[arg-type]
        for index, item in left_items(call).items():  # they would go with those that are taken in
            build = _Builder(graph, sizes, Bucket((item,), call), moved, marks[index])
            _emit_alone(build, item, ours=item.group_key in wire and on_wire(item), kept_by_all=item.node in kept)
            segment.update((node, segment[build.anchor]) for node in build.made)
    places = {chain.collective.node: _place(graph, chain, segment, items) for chain in chains}
    for chain in chains:
        build = _Builder(graph, sizes, chain, moved, places[chain.collective.node])
        shared = _shared_by(chain.collectives)
        old = {*_old_nodes(chain), *shared}
        op = (
            _emit_gather(build, chain, chain.collective.node in kept)
            if isinstance(chain, GatherChain)
            else _emit_reduction(build, chain)
        )
        op.meta["asynctp_collective"] = chain.collective.node.name
        fused |= dict.fromkeys([chain.collective.node, *(matmul.node for matmul in chain.matmuls)], op)
        starts[op] = communications(build.made)[0]
        segment.update((node, segment[build.anchor]) for node in build.made)
        if isinstance(chain, ScatterChain):
            old.update(node for node in build.made if node is not op)  # shapes of terms that went into a sum
        else:
            moves.early += communications(build.made)
            if chain.hoist is not None:
                moves.late |= _come_after(build, chain)
                moves.kept.append((chain.collective, op))
        _erase_unused(graph, old)
        for node in shared:
            if node in old:
                _shrink(node)
                _erase_unused(graph, old)
    _emit_all_alone(graph, sizes, moved, segment, items, alone, kept)
    for bucket, mark in zip(buckets, in_front, strict=True):
        build = _Builder(graph, sizes, bucket, moved, starts[fused[bucket.place]] if bucket.place in fused else mark)
        moves.early.append(_emit_bucket(build, bucket))
        segment.update((node, segment[build.anchor]) for node in build.made)
        _erase_unused(graph, {node for member in bucket.members for node in member.results})
    for mark in [node for node in graph.nodes if node.target in (_asynctp_place, _asynctp_item, _asynctp_bucket)]:
        graph.erase_node(mark)
    _drop(graph, dropped)
    for decision in plan.overlapped:
        moves.beside.append((decision.candidate.collective, [fused.get(node, node) for node in decision.overlaps_with]))
    work = {fused[chain.collective.node]: cost_model.cost_of(chain).work for chain in chains}
    ordered = schedule(graph, moves, work, segment)
    # an op that is kept in order is wrapped in another: what it is called with is read before
    calls = {chain.collective.node.name: call_of(fused[chain.collective.node]) for chain in chains}
    keep_order(graph, ordered)
    graph.lint()
    return calls


def keep_order(graph: fx.Graph, ordered: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Have Inductor keep the order of what communicates, and run each node after those that `ordered` lists for it."""
    after = {node: list(earlier) for node, earlier in ordered.items()}
    starts = communications(graph.nodes) if compat.is_compiled(graph) else []
    called = {op for op in map(called_op, starts) if op is not None and not name_of(op).startswith(_TORCHS)}
    if not compat.lower_in_order(called):
        for before, node in pairwise(starts):
            after.setdefault(node, []).append(before)
    compat.keep_order(graph, after)


def _place(graph: fx.Graph, chain: Chain, segment: dict[fx.Node, int], items: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node in front of which the fused op of a chain comes: a mark, where it follows another node, or is an item.

    Args:
        graph: The graph.
        chain: The chain.
        segment: In which segment each node is; the mark's is added.
        items: The marks of collectives that are items of one of several tensors.
    """
    if chain.follows is None:
        return max(items.get(one.node, one.start) for one in chain.placed_by)
    last = chain.follows
    while last.next.target is _asynctp_place:
        last = last.next
    with graph.inserting_after(last):
        mark = graph.call_function(_asynctp_place)
    segment[mark] = segment[chain.follows]
    return mark


def _items_marked(graph: fx.Graph, call: fx.Node, segment: dict[fx.Node, int]) -> list[fx.Node]:
    """A mark for each tensor of a collective of several, in their order, whichever of them this rank takes in."""
    inputs = call.args[0]
    assert isinstance(inputs, list | tuple)
    return [_mark(graph, call, _asynctp_item, segment) for _ in inputs]


def _mark(graph: fx.Graph, place: fx.Node, kind: Callable[[], None], segment: dict[fx.Node, int]) -> fx.Node:
    """A new mark in front of `place`, in its segment. It stays where `place` is erased."""
    with graph.inserting_before(place):
        mark = graph.call_function(kind)
    segment[mark] = segment[place]
    return mark


def _asynctp_bucket() -> None:
    """Marks a place in a graph: in front of a node, in the order of what comes before it."""


def _asynctp_place() -> None:
    """Marks a place in a graph: after a node, in the order of what follows it."""


def _asynctp_item() -> None:
    """Marks a place in a graph: of one tensor of several that are communicated together."""


def store(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Let Inductor store these tensors and read them from memory, instead of computing them in each kernel again."""
    for node in nodes:
        with graph.inserting_after(node):
            stored = graph.call_function(compat.stored_op(), (node, value_of(node).stride()))
        stored.meta = {name: node.meta[name] for name in ("val", *_INHERITED) if name in node.meta}
        node.replace_all_uses_with(stored, delete_user_cb=partial(operator.is_not, stored))


# --- building nodes ---------------------------------------------------------------------------------------
class _Builder:
    """Makes nodes for one chain in front of `anchor`, each with a fake tensor and the origin of the chain.

    `moved` maps nodes that earlier chains have replaced to what stands for them now: the result of one chain is
    often the input of the next.
    """

    def __init__(
        self,
        graph: fx.Graph,
        sizes: Sizes,
        chain: Chain | Bucket,
        moved: dict[fx.Node, fx.Node],
        anchor: fx.Node,
    ) -> None:
        self.graph = graph
        self.moved = moved
        self.sizes = sizes
        self.collective = chain.collective
        self.anchor = anchor
        self.made: list[fx.Node] = []
        self.late: list[fx.Node] = []
        self._sources = sizes.sources([self.now(node) for node in chain.inputs])
        self._fake = value_of(chain.inputs[0])

    def now(self, node: fx.Node) -> fx.Node:
        """The node that stands for a node of the original graph now."""
        while node in self.moved:
            node = self.moved[node]
        return node

    def replace(self, old: fx.Node, new: fx.Node, *, unless: Container[fx.Node] = ()) -> None:
        """Give `new` to the users of `old`, but for those in `unless`, which are about to go."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in unless)
        self.moved[old] = new

    def call(
        self,
        target: Callable[..., Any],
        *args: Any,
        like: fx.Node | None = None,
        before: fx.Node | None = None,
        computes: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """A call of `target`; its value is computed on fake tensors, by `computes` where `target` cannot."""
        with self.graph.inserting_before(before or self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        origin = like or self.collective.node
        node.meta.update({key: origin.meta[key] for key in _INHERITED if key in origin.meta})
        self.evaluate(node, computes)
        self.made.append(node)
        return node

    def evaluate(self, node: fx.Node, computes: Callable[..., Any] | None = None) -> None:
        """Compute the value of a call on fake tensors, by `computes` where its target cannot."""
        assert callable(node.target)
        with compat.without_guards(self._fake):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
            node.meta["val"] = (computes or node.target)(*args, **kwargs)

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        """The sizes of a node's tensor."""
        return self.sizes.of(value_of(node))

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """`node` with another shape; the node itself when it has that shape."""
        old = self.shape(node)
        if len(old) == len(shape) and all(same(a, b) for a, b in zip(old, shape, strict=True)):
            return node
        return self.call(_aten.reshape.default, node, self._lengths(shape))

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """`node` with dimensions reordered; the node itself when the order is the identity."""
        return node if list(order) == list(range(len(order))) else self.call(_aten.permute.default, node, list(order))

    def first_rows(self, node: fx.Node, count: int) -> fx.Node:
        """The first rows of a matrix; the node itself when it has no more."""
        if same(self.shape(node)[0], count):
            return node
        return self.call(_aten.slice.Tensor, node, 0, 0, count)

    def bitcast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`node` seen as another dtype of the same size; the node itself when it has that dtype."""
        return node if value_of(node).dtype == dtype else self.call(_aten.view.dtype, node, dtype)

    def _lengths(self, shape: Sequence[Size]) -> list[Any]:
        """Sizes as reshape takes them: integers, at most one -1, and nodes for what else is symbolic."""
        symbolic = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
        return [-1 if axis in symbolic[:1] else self.size(size) for axis, size in enumerate(shape)]

    def contiguous(self, node: fx.Node) -> fx.Node:
        """`node` in row-major memory; the node itself when it is."""
        if compat.is_contiguous(value_of(node)):
            return node
        return self.call(_aten.clone.default, node, memory_format=torch.contiguous_format)

    def one(self) -> fx.Node:
        """The fp32 number 1, on the device of the chain."""
        return self.call(_aten.full.default, [], 1.0, dtype=torch.float32, device=self._fake.device)

    def size(self, size: Size) -> int | fx.Node:
        """An integer, or a node that computes a symbolic size from the sizes of the chain's inputs."""
        plan = express(size, self._sources)
        assert plan is not None, f"checked before: an input of {self.collective.node.name} carries the size {size}"
        return self._compute(plan)

    def _compute(self, plan: SizeExpression) -> int | fx.Node:
        if isinstance(plan, int):
            return plan
        kind, left, right = plan
        if kind == "of":
            return left.node if left.axis is None else self.call(_aten.sym_size.int, left.node, left.axis)
        return self.call(getattr(operator, kind), self._compute(left), self._compute(right))


# --- gather side ----------------------------------------------------------------------------------------
def _emit_gather(build: _Builder, chain: GatherChain, kept_by_all: bool) -> fx.Node:
    parts = _parts(build, chain)
    shard = parts[chain.collective.node if chain.hoist is None else chain.hoist.operand]
    shard = build.bitcast(shard, value_of(chain.matmuls[0].a).dtype)
    shard, gather_dim = _shard_as_op_wants(build, chain, shard)
    side_gathers = _start_side_gathers(build, chain, parts)
    op = _call_gather(build, chain, shard, gather_dim, parts, keep_option(chain.collective, kept_by_all))
    for index, matmul in enumerate(chain.matmuls):
        out = build.call(operator.getitem, op, index, like=matmul.node)
        out = build.reshape(_rows_in_place(build, chain, out), build.shape(matmul.node))
        if (added := added_matrix(matmul.node)) is not None:
            out = build.call(_aten.add.Tensor, out, build.now(added), like=matmul.node, before=matmul.node)
        build.replace(matmul.node, out)
    last = len(chain.matmuls)
    if chain.returned is not None:
        _return_gathered(build, chain, chain.returned, build.call(operator.getitem, op, last))
        last += 1
    passenger = None if chain.whole_passenger is None else build.call(operator.getitem, op, last)
    if chain.passenger is not None and passenger is not None:
        passenger = _rows_in_place(build, chain, passenger)
        build.replace(chain.passenger.end, build.reshape(passenger, build.shape(chain.passenger.end)))
    if chain.hoist is not None:
        _finish_side_gathers(build, chain.hoist, side_gathers, passenger)
    _read_sizes_elsewhere(build, chain)
    return op


def _shard_as_op_wants(build: _Builder, chain: GatherChain, shard: fx.Node) -> tuple[fx.Node, int]:
    """Bring the shard into the form [outer, inner, width] (rows) or [outer, width] (contraction); and its gather dim.

    A shard whose own dimensions are grouped that way is taken as it is, which leaves its strides alone.
    """
    place, own, scaled = _placement_as_sent(chain), build.shape(shard), chain.matmuls[0].scaled
    tall = scaled is not None and scaled.of_a.rows > 1  # blocks of rows, which are in one dimension then
    if place.shard.is_reshape and len(own) > 1 and same(own[-1], place.width) and (len(own) == 2 or not tall):
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


def _placement_as_sent(chain: GatherChain) -> GatherPlacement:
    """Where the fused op's rows are: the shard travels as the collective has it, and what is hoisted as it is taken."""
    return chain.placement if chain.hoist is not None else chain.placement.as_sent


def _rows_in_place(build: _Builder, chain: GatherChain, whole: fx.Node, *, back: bool = False) -> fx.Node:
    """Bring rows as they were sent to where the operand has them; or `back`, from there to how they are sent."""
    place, rows = chain.placement, chain.placement.row_order
    if chain.hoist is not None or place.shard.is_reshape or rows is None:
        return whole
    width, ranks = build.shape(whole)[-1], [chain.collective.group_size] if place.axis == "rows" else []
    sizes, first = [*ranks, *rows.sizes, width], len(ranks)
    order = [first + axis for axis in rows.order]
    if ranks:
        order.insert(place.shard.lengths[0], 0)
    order.append(len(sizes) - 1)
    if back:
        sizes, order = [sizes[axis] for axis in order], [order.index(axis) for axis in range(len(order))]
    return build.reshape(build.permute(build.reshape(whole, sizes), order), (product(sizes[:-1]), width))


def _part_as_sent(build: _Builder, chain: GatherChain, part: fx.Node, numbers: int) -> fx.Node:
    """Numbers of a shard's rows, so many to each, moved from the operand's order to that of the shard itself."""
    rows = chain.placement.row_order
    if chain.hoist is not None or chain.placement.shard.is_reshape or rows is None:
        return part
    sizes = [*(rows.sizes[axis] for axis in rows.order), numbers]
    order = [*(rows.order.index(axis) for axis in range(len(rows.order))), len(rows.order)]
    return build.permute(build.reshape(part, sizes), order)


def _rearranged(build: _Builder, node: fx.Node, way: Rearrangement) -> fx.Node:
    """Reshape and permute, unless nothing moves."""
    return node if way.is_reshape else build.permute(build.reshape(node, way.sizes), way.order)


def _call_gather(
    build: _Builder,
    chain: GatherChain,
    shard: fx.Node,
    gather_dim: int,
    parts: dict[fx.Node, fx.Node],
    kept: dict[str, Any],
) -> fx.Node:
    """The fused op: it returns a list of one product per matmul, then the gathered tensor if others use it."""
    gather, matmuls = chain.collective, chain.matmuls
    bs, biases = [_right(build, matmul) for matmul in matmuls], [_row_bias(build, matmul) for matmul in matmuls]
    scaled = [matmul.scaled for matmul in matmuls if matmul.scaled is not None]
    ending = (chain.returned is not None, gather.group_size, gather.group)
    if not scaled:
        return build.call(torch.ops.asynctp.all_gather_matmul.default, shard, bs, biases, gather_dim, *ending, **kept)
    scale = _gather_scale(build, chain, shard, gather_dim, parts)
    b_scales = [_column_scale(build, one) for one in scaled]
    options = (chain.scale_placement is not None, scaled[0].out_dtype, scaled[0].use_fast_accum)
    passenger = (
        [] if chain.whole_passenger is None else [_along_part(build, chain, shard, parts[chain.whole_passenger])]
    )
    return build.call(
        torch.ops.asynctp.all_gather_scaled_matmul.default,
        *(shard, scale, bs, b_scales, biases, gather_dim, *options, *ending, *passenger),
        **kept,
    )


def _along_part(build: _Builder, chain: GatherChain, shard: fx.Node, part: fx.Node) -> fx.Node:
    """The passenger's numbers, one per row in the shard's own dimensions."""
    if chain.passenger is not None:
        part = _part_as_sent(build, chain, _rearranged(build, part, chain.passenger.placement.shard), 1)
    return build.reshape(part, [*build.shape(shard)[:-1], 1])


def _right(build: _Builder, matmul: Matmul) -> fx.Node:
    """The right operand as [K, N]."""
    b = build.now(matmul.b)
    b = build.reshape(b, build.shape(b)[-2:])
    return build.permute(b, [1, 0]) if matmul.b_transposed else b


def _column_scale(build: _Builder, scaled: ScaledOptions) -> fx.Node:
    """The scale of the right operand: one number as it is, [1, N], or of blocks [K/128, N or N/128]."""
    scale, blocks = _fp32_scale(build, scaled.b_scale), scaled.blocks
    if blocks is not None:
        return build.first_rows(build.permute(scale, (1, 0)) if blocks.b_transposed else scale, blocks.depth)
    count = product(build.shape(scale))
    return scale if same(count, 1) else build.reshape(scale, (1, count))


def _fp32_scale(build: _Builder, scale: fx.Node | None) -> fx.Node:
    """A scale in fp32, which holds all that a scale of 16 bits does; None stands for 1."""
    if scale is None:
        return build.one()
    node = build.now(scale)
    if value_of(node).dtype == torch.float32:
        return node
    return build.call(torch.ops.prims.convert_element_type.default, node, torch.float32, like=scale)


def _row_bias(build: _Builder, matmul: Matmul) -> fx.Node | None:
    """The bias as a vector [N]."""
    if matmul.bias is None:
        return None
    bias = build.now(matmul.bias)
    return build.reshape(bias, build.shape(bias)[-1:])


def _gather_scale(
    build: _Builder, chain: GatherChain, shard: fx.Node, gather_dim: int, parts: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The scale of A: one number, or per row or block in the shard's (or the gathered tensor's) own dimensions."""
    scaled, own = chain.matmuls[0].scaled, list(build.shape(shard))
    assert scaled is not None
    if chain.whole_scale is not None and chain.scale_placement is not None:
        part = build.bitcast(parts[chain.whole_scale], torch.float32)
        part = _part_as_sent(build, chain, _rearranged(build, part, chain.scale_placement.shard), scaled.of_a.numbers)
        return build.reshape(part, _scales_of(own, scaled))
    if gather_dim < len(own) - 1:
        own[gather_dim] = own[gather_dim] * chain.collective.group_size
    if chain.placement.shard.is_reshape or chain.hoist is not None or same(product(_shape_of_scale(build, scaled)), 1):
        return _row_scale(build, scaled, own)
    rows = _row_scale(build, scaled, (product(own[:-1]), own[-1]))
    return build.reshape(_rows_in_place(build, chain, rows, back=True), _scales_of(own, scaled))


def _shape_of_scale(build: _Builder, scaled: ScaledOptions) -> Sequence[Size]:
    return build.shape(build.now(scaled.given_a_scale))


def _scales_of(rows: Sequence[Size], scaled: ScaledOptions) -> list[Size]:
    """The dimensions of the scales of an A with these: a number per row, or those of blocks."""
    return [*rows[:-2], divided(rows[-2], scaled.of_a.rows), scaled.of_a.numbers]


# --- gather side: what is computed on the shard -----------------------------------------------------------
def _parts(build: _Builder, chain: GatherChain) -> dict[fx.Node, fx.Node]:
    """This rank's parts of the gathered tensors and of what the hoisted ops compute from them, by the whole tensors."""
    parts = {gather.node: build.now(gather.source) for gather in chain.collectives}
    local: dict[fx.Node, fx.Node] = {}
    for step in () if chain.hoist is None else chain.hoist.computed:
        local |= {operand: build.now(operand) for operand in step.others}
        local |= {one: build.call(_aten.slice.Tensor, local[one], dim, 0, 1, like=one) for one, dim in step.filled}
        for operand, part in step.parts:
            if operand not in local:
                local[operand] = _arranged(build, parts[part.root], part, like=operand)
        args, kwargs = fx.map_arg((step.args, step.kwargs), local.__getitem__)
        parts[step.node] = build.call(step.target, *args, like=step.node, **kwargs)
    for one in () if chain.hoist is None else chain.hoist.cross_rank:
        _find_over_ranks(build, chain.collective, one, parts[one.step.node])
    return parts


def _find_over_ranks(build: _Builder, gather: Collective, one: CrossRankReduction, part: fx.Node) -> None:
    """The maximum of what the ranks have found, each in its part; it may come late if the fused op can do without."""
    call = partial(build.call, like=one.step.node)
    row = build.contiguous(build.reshape(part, (1, *build.shape(part))))
    started = call(_c10d.all_gather_into_tensor.default, row, gather.group_size, gather.group)
    first = len(build.made)
    each = call(_c10d.wait_tensor.default, started)
    most = traits_of(one.step.node).reduces is Reduction.MAX
    found = call(_aten.amax.default if most else _aten.amin.default, each, [0])
    for node in one.nodes:
        build.replace(node, found if node is one.nodes[0] else build.call(_aten.clone.default, found))
    build.late += [] if one.needed else build.made[first:]


def _arranged(build: _Builder, source: fx.Node, part: Part, like: fx.Node) -> fx.Node:
    """The part of a view, from that of its root; row-major where the whole view is, so that ops run as they did."""
    whole = value_of(like)
    seen = build.bitcast(source, whole.dtype)
    arranged = build.reshape(_rearranged(build, seen, part.way), part.shape)
    return build.contiguous(arranged) if compat.is_contiguous(whole) else arranged


def _start_side_gathers(build: _Builder, chain: GatherChain, parts: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Start to gather the small tensors on their own, before the fused op; equal ones once."""
    hoist = chain.hoist
    roots = (
        []
        if hoist is None
        else dict.fromkeys(one.root for one in hoist.side_gathers if one.root is not hoist.passenger)
    )
    gather, start = chain.collective, _c10d.all_gather_into_tensor.default
    return {
        root: build.call(start, build.contiguous(parts[root]), gather.group_size, gather.group, like=root)
        for root in roots
    }


def _finish_side_gathers(
    build: _Builder, hoist: Hoist, started: dict[fx.Node, fx.Node], passenger: fx.Node | None
) -> None:
    """Wait for small tensors after the fused op, and give them to their users; equal ones do not share memory."""
    first = len(build.made)
    done: dict[fx.Node, fx.Node] = {}
    for one in hoist.side_gathers:
        if one.root in done:
            whole = build.call(_aten.clone.default, build.reshape(done[one.root], build.shape(one.node)))
        elif one.root is hoist.passenger and passenger is not None:
            whole = done[one.root] = build.reshape(passenger, build.shape(one.node))
        else:
            whole = done[one.root] = _ranks_in_place(build, one, started[one.root])
        build.replace(one.node, whole)
    build.late += build.made[first:]


def _ranks_in_place(build: _Builder, one: SideGather, started: fx.Node) -> fx.Node:
    """Wait for a small tensor, which comes with the ranks outermost, and bring them to where they were."""
    ranks = started.args[1]
    whole = build.call(_c10d.wait_tensor.default, started)
    if not same(one.outer, 1):
        whole = build.permute(build.reshape(whole, (ranks, one.outer, one.inner)), [1, 0, 2])
    return build.reshape(whole, build.shape(one.node))


def _come_after(build: _Builder, chain: GatherChain) -> set[fx.Node]:
    """The nodes that may come late, where a gather stays, which comes after the fused op.

    Those are the waits for it and for the gathers beside the fused op, and what has to follow them in front of the
    first matmul, but for other collectives. A gather that nothing waits for is over when it returns.
    """
    gather, first = chain.collective, min(nodes_of(chain.matmuls))
    if is_only_awaited(gather):
        leave_sms(gather)
    late = {*gather.waits, *build.late}

    def comes_late(node: fx.Node) -> bool:
        return node in late or (node < first and near_miss.transparent(node) and not is_random(node))

    return reachable(late, lambda node: node.users, comes_late)


def _return_gathered(build: _Builder, chain: GatherChain, returned: fx.Node, full: fx.Node) -> None:
    """Give the gathered tensor to its other users.

    Users of the matmuls' one operand take the returned tensor as it is, reshaped, or copied. When there are others, the
    collective's own result is rebuilt from it and the views stay, so that the same tensors share memory as before.
    """
    results = chain.collective.results
    if returned not in results:
        if not set(nodes_of(chain.matmuls)).issuperset(returned.users):
            whole = build.reshape(_rows_in_place(build, chain, full), build.shape(returned))
            build.replace(returned, whole, unless=nodes_of(chain.matmuls))
        for node in () if chain.hoist is None else chain.hoist.copies:
            build.replace(node, build.call(_aten.clone.default, build.reshape(full, build.shape(node))))
        return
    whole = _as_collective_result(build, chain, full)
    for node in results:
        build.replace(node, whole, unless=results)


def _as_collective_result(build: _Builder, chain: GatherChain, full: fx.Node) -> fx.Node:
    """The gathered tensor as the collective returned it: the shard's own dimensions, and the ranks before `dim`."""
    collective, way = chain.collective, _placement_as_sent(chain).shard
    ranks, dim, own = collective.group_size, collective.dim, build.shape(chain.shard)
    sizes, leading = [way.sizes[axis] for axis in way.order], way.lengths[0]
    whole = build.reshape(full, [*sizes[:leading], ranks, *sizes[leading:]])
    side_gathers = len(own) == len(way.sizes) and all(same(a, b) for a, b in zip(own, way.sizes, strict=True))
    order = [axis + (axis >= leading) for axis in (way.order.index(axis) for axis in range(len(way.order)))]
    order.insert(dim if side_gathers else 0, leading)
    whole = build.permute(whole, order)
    if dim and not side_gathers:
        whole = build.reshape(whole, (ranks, *own))
        whole = build.permute(whole, [*range(1, dim + 1), 0, *range(dim + 1, len(own) + 1)])
    whole = build.reshape(build.contiguous(whole), build.shape(collective.node))
    return build.bitcast(whole, value_of(collective.node).dtype)


# --- scatter side -----------------------------------------------------------------------------------------
def _emit_reduction(build: _Builder, chain: ScatterChain) -> fx.Node:
    place = chain.placement
    _read_sizes_elsewhere(build, chain)
    return _emit_all_reduce(build, chain) if place is None else _emit_scatter(build, chain, place)


def _emit_scatter(build: _Builder, chain: ScatterChain, place: ScatterPlacement) -> fx.Node:
    scatter = chain.collective
    if chain.sent.is_reshape:
        a_parts = [_product_rows(build, chain, place, build.now(matmul.a)) for matmul in chain.matmuls]
    else:
        a_parts = [_rows_as_sent(build, chain, build.now(matmul.a)) for matmul in chain.matmuls]
    scatter_dim = value_of(a_parts[0]).dim() - (1 if place.axis == "columns" else 2)
    op = _call_reduction(build, chain, a_parts, (scatter_dim,), (scatter.group_size,))
    out = build.reshape(build.contiguous(op), build.shape(scatter.node))
    _give_result(build, chain, out)
    return op


def _emit_all_reduce(build: _Builder, chain: ScatterChain) -> fx.Node:
    """The views of one product stay, after the op; a sum becomes that product, which the op has added up.

    Views of products that are converted see what they are converted to, and conversions go as sums do. Behind a sum
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


def _give_result(build: _Builder, chain: ScatterChain, out: fx.Node) -> None:
    """Give the reduced tensor to the users of the collective's result.

    Where it is the sum of several results, each gives way to it, and so does each addition after them; what else these
    add is added here.
    """
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


def _times(build: _Builder, node: fx.Node, term: Term) -> fx.Node:
    """A node as many times as a term counts."""
    return node if term.factor == 1 else build.call(_aten.mul.Tensor, node, term.factor, like=term.node)


def _early(build: _Builder, term: Term) -> fx.Node:
    """A term's tensor, or the sum of it that the program has after its reduction."""
    node, early = build.now(term.node), term.early
    if early is None:
        return node
    seen = build.reshape(node, (early.outer, early.count, early.inner))
    return build.call(_aten.sum.dim_IntList, seen, [1], like=early.total)


def _added(build: _Builder, chain: ScatterChain, shape: Sequence[Size]) -> fx.Node | None:
    """The sum of the terms that are no products, in the shape and the dtype of the products' sum; None without any."""
    total: fx.Node | None = None
    for term in chain.added:
        node = build.reshape(_early(build, term), shape)
        if chain.sum_dtype not in (None, value_of(node).dtype):
            node = build.call(torch.ops.prims.convert_element_type.default, node, chain.sum_dtype, like=term.node)
        node = _times(build, node, term)
        total = node if total is None else build.call(_aten.add.Tensor, total, node, like=term.node)
    return total


def _product_rows(build: _Builder, chain: ScatterChain, place: ScatterPlacement, a: fx.Node) -> fx.Node:
    """A left operand [M, K] with its rows as [outer, ranks * inner], so that the scatter dim is one of its own."""
    if place.axis == "columns" or same(place.outer, 1):
        return _as_rows(build, a)
    return build.reshape(a, (place.outer, place.inner * chain.collective.group_size, build.shape(a)[-1]))


def _as_rows(build: _Builder, a: fx.Node) -> fx.Node:
    """A left operand [..., K] as a matrix."""
    *lines, width = build.shape(a)
    return build.reshape(a, (product(lines), width))


def _call_reduction(
    build: _Builder,
    chain: ScatterChain,
    a_parts: list[fx.Node],
    where: tuple[int, ...] = (),
    size: tuple[int, ...] = (),
) -> fx.Node:
    """The fused op; only that of a reduce-scatter is told `where` to scatter, and the group's `size`."""
    matmuls, namespace, collective = chain.matmuls, torch.ops.asynctp, chain.collective.kind
    b_parts, biases = [_right(build, matmul) for matmul in matmuls], [_row_bias(build, matmul) for matmul in matmuls]
    how, ending = (chain.collective.reduce_op, *where), [*size, chain.collective.group]
    shapes = [build.shape(a) for a in a_parts]
    added = _added(build, chain, (*shapes[0][:-1], build.shape(matmuls[0].node)[-1]))
    if added is not None and not chain.sent.is_reshape:
        added = _rows_as_sent(build, chain, added)
    optional = [chain.sum_dtype, added, list(chain.factors) or None]
    while optional and optional[-1] is None:
        optional.pop()
    ending += optional
    scaled = [matmul.scaled for matmul in matmuls if matmul.scaled is not None]
    if not scaled:
        op = getattr(namespace, f"matmul_{collective}").default
        return build.call(op, a_parts, b_parts, biases, *how, *ending)
    a_scales = [_left_scale(build, chain, one, shape) for one, shape in zip(scaled, shapes, strict=True)]
    b_scales = [_column_scale(build, one) for one in scaled]
    op = getattr(namespace, f"scaled_matmul_{collective}").default
    options = (scaled[0].out_dtype, scaled[0].use_fast_accum)
    return build.call(op, a_parts, b_parts, a_scales, b_scales, biases, *how, *options, *ending)


def _rows_as_sent(build: _Builder, chain: ScatterChain, node: fx.Node) -> fx.Node:
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


def _left_scale(build: _Builder, chain: ScatterChain, scaled: ScaledOptions, a: Sequence[Size]) -> fx.Node:
    """The scales of a left operand of these sizes, in the order of its rows."""
    scale = _row_scale(build, scaled, a)
    if chain.sent.is_reshape or same(product(build.shape(scale)), 1):
        return scale
    return _rows_as_sent(build, chain, scale)


def _row_scale(build: _Builder, scaled: ScaledOptions, a: Sequence[Size]) -> fx.Node:
    """The scales of an A of these sizes: one number as it is; per row or block, in its dimensions."""
    scale, blocks = _fp32_scale(build, scaled.a_scale), scaled.blocks
    if blocks is None and same(product(build.shape(scale)), 1):
        return scale
    if blocks is not None and blocks.a_transposed:
        scale = build.permute(build.first_rows(scale, blocks.depth), (1, 0))
    return build.reshape(scale, _scales_of(a, scaled))


# --- all-reduces -------------------------------------------------------------------------------------------
def _emit_bucket(build: _Builder, bucket: Bucket) -> fx.Node:
    """One all-reduce of all members' elements; each member's result is memory of its own, as it was."""
    values = [value_of(node) for node in bucket.inputs]
    lengths = [math.prod(value.shape) for value in values]
    flat = [build.reshape(build.now(node), (length,)) for node, length in zip(bucket.inputs, lengths, strict=True)]
    joined, first = build.call(_aten.cat.default, flat), bucket.collective
    total = build.call(_c10d.all_reduce.default, joined, first.reduce_op, first.group, computes=_like_first)
    done = build.call(_c10d.wait_tensor.default, total, computes=_like_first)
    pieces = build.call(_aten.split_with_sizes.default, done, lengths)
    for index, (member, value) in enumerate(zip(bucket.members, values, strict=True)):
        piece = build.call(operator.getitem, pieces, index, like=member.node)
        result = build.call(_aten.clone.default, build.reshape(piece, tuple(value.shape)), like=member.node)
        for wait in _waits_again(member):
            build.replace(wait, wait.args[0])  # type: ignore[arg-type]  # a node
            build.graph.erase_node(wait)
        for wait in member.waits:
            build.replace(wait, result)
    return joined


def _waits_again(member: Collective) -> list[fx.Node]:
    """The waits for a result that has been waited for already, or for a view of it."""
    return [node for node in views_of(member.waits) if node not in member.waits and op_name(node) == WAIT]


def _like_first(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """The fake result of a collective that keeps the shape: groups need not exist."""
    return torch.empty_like(tensor)


# --- collectives without a matmul --------------------------------------------------------------------------
_IN_PLACE_OF = {
    "all_gather": (torch.ops.asynctp.all_gather.default, _c10d.all_gather_into_tensor.default),
    "reduce_scatter": (torch.ops.asynctp.reduce_scatter.default, _c10d.reduce_scatter_tensor.default),
    "all_reduce": (torch.ops.asynctp.all_reduce.default, _c10d.all_reduce.default),
}


def _emit_alone(build: _Builder, collective: Collective, *, ours: bool, kept_by_all: bool) -> None:
    """Make a collective one of a single tensor, along dim 0, by asynctp's op if that is `ours`.

    Torch's own stay where they are, and become ours; others give way to new nodes, and so do items of several.
    """
    node, value = collective.node, tensor_of(collective.node)
    torchs = op_name(node).startswith(("_c10d_functional.", "_c10d_functional_autograd."))
    if collective.call is None and torchs and value is not None and compat.is_contiguous(value):
        leave_sms(collective, kept_by_all)
        return
    kept = keep_option(collective, kept_by_all) if ours else {}
    started = build.call(_IN_PLACE_OF[collective.kind][not ours], *_started_with(build, collective), **kept)
    done = build.call(_c10d.wait_tensor.default, started)
    if collective.is_unused:
        return
    result = _as_it_was(build, collective, done)
    build.replace(node, result, unless=collective.waits)
    for wait in collective.waits:
        build.replace(wait, result)


def _emit_all_alone(
    graph: fx.Graph,
    sizes: Sizes,
    moved: dict[fx.Node, fx.Node],
    segment: dict[fx.Node, int],
    items: dict[fx.Node, fx.Node],
    alone: Sequence[Collective],
    kept: Container[fx.Node],
) -> None:
    """Emit each of them (`_emit_alone`), then erase the nodes that they were."""
    old: set[fx.Node] = set()
    shared: dict[fx.Node, None] = {}
    for collective in alone:
        place = items.get(collective.node, collective.start)
        shares = _shared_by((collective,))
        build = _Builder(graph, sizes, Bucket((collective,), place), moved, place)
        _emit_alone(build, collective, ours=on_wire(collective), kept_by_all=collective.node in kept)
        segment.update((node, segment[build.anchor]) for node in build.made)
        if build.made:  # else it stays where it is, and has become ours
            old |= {*collective.nodes, *shares, *(() if collective.call is None else collective.call.users)}
            shared |= dict.fromkeys(shares)
    old &= {*graph.nodes}  # with a chain goes an item beside it that nothing uses
    _erase_unused(graph, old)
    for node in shared:
        if node in old:
            _shrink(node)


def _started_with(build: _Builder, collective: Collective) -> list[Any]:
    """The argument of the op of a single tensor: the ranks' blocks first, in row-major order."""
    source, dim, ranks = build.now(collective.source), collective.dim, collective.group_size
    if collective.kind == "reduce_scatter" and dim:
        own = build.shape(source)
        blocks = build.reshape(source, (*own[:dim], ranks, divided(own[dim], ranks), *own[dim + 1 :]))
        source = build.permute(blocks, [dim, *(axis for axis in range(len(own) + 1) if axis != dim)])
    reduction = [collective.reduce_op] if collective.kind != "all_gather" else []
    size = [ranks] if collective.kind != "all_reduce" else []
    return [build.contiguous(source), *reduction, *size, collective.group]


def _as_it_was(build: _Builder, collective: Collective, done: fx.Node) -> fx.Node:
    """The result of such an op, with the ranks in their dimension, and strides as the program's collective had them."""
    value, dim, own = value_of(collective.node), collective.dim, build.shape(collective.source)
    if collective.kind == "all_gather" and dim:
        ranks_first = build.reshape(done, (collective.group_size, *own))
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(own) + 1)]
        done = build.permute(ranks_first, order)
    done = build.contiguous(build.reshape(done, build.shape(collective.node)))
    if compat.is_contiguous(value):
        return done
    axes = compat.axes_by_stride(value)
    assert axes is not None, "`can_be_alone` lets no other through"
    back = [axes.index(axis) for axis in range(len(axes))]
    return build.permute(build.contiguous(build.permute(done, axes)), back)


# --- tidying up --------------------------------------------------------------------------------------------
def _read_sizes_elsewhere(build: _Builder, chain: Chain) -> None:
    """Read sizes of vanishing tensors off the chain's inputs instead, so that nothing keeps them alive."""
    for node in chain.size_readers:
        size = build.size(build.sizes.read(node))
        for reader in list(node.users):
            reader.args = _with(reader.args, node, size)
            reader.kwargs = _with(reader.kwargs, node, size)


def _with(args: Any, old: fx.Node, new: int | fx.Node) -> Any:
    """Arguments with a node exchanged, for an integer too."""
    return fx.map_arg(args, lambda node: new if node is old else node)


def _shared_by(own: Sequence[Collective]) -> list[fx.Node]:
    """The waits for results of collectives together with other tensors, then the collectives of these."""
    waits = [wait for collective in own for wait in collective.waits]
    joint = dict.fromkeys(node for wait in waits for node in wait.all_input_nodes if waits_for_several(node))
    calls = dict.fromkeys(one.call for one in own if one.call is not None)
    return [*(node for node in joint if all(op_name(user) == "getitem" for user in node.users)), *calls]


def _old_nodes(chain: Chain) -> set[fx.Node]:
    """The nodes that a fused op may leave without users: its chain's collectives, views, matmuls, and their sizes.

    Also the views that only lead from a tensor to a matmul, or to a collective that joins the chain's. Of a collective
    of several tensors, other items too: of one that nothing uses nothing is left.
    """
    takers = [*nodes_of(chain.matmuls), *(joined.call or joined.node for joined in chain.joined)]
    taken = [source for node in takers for source in node.all_input_nodes]  # as they are now: some were replaced
    nodes = {*chain.replaceable, *nodes_of(chain.matmuls), *reachable(taken, where=is_view)}
    nodes.update(node for one in (chain.hoist.cross_rank if chain.hoist else ()) for node in one.nodes)
    for collective in chain.collectives:
        nodes.update(collective.nodes, () if collective.call is None else collective.call.users)
    inside = [node for matmul in chain.matmuls for node in matmul.epilogue]
    nodes |= {node for step in inside for node in step.all_input_nodes if op_name(node) and not node.all_input_nodes}
    return nodes | {user for node in nodes for user in node.users if is_size(user)}


def _erase_unused(graph: fx.Graph, candidates: set[fx.Node]) -> None:
    """Erase those of some nodes that have no users, or no others than such."""
    stack = list(candidates)
    while stack:
        node = stack.pop()
        if node in candidates and not node.users:
            candidates.discard(node)
            stack += node.all_input_nodes
            graph.erase_node(node)


def _shrink(call: fx.Node) -> None:
    """Leave in a collective of several tensors, or a wait for them, only those whose results are used."""
    inputs, *rest = call.args
    assert isinstance(inputs, list | tuple)
    users = sorted(call.users, key=lambda user: int(user.args[1]))  # type: ignore[arg-type]
    kept = [int(user.args[1]) for user in users]  # type: ignore[arg-type]
    call.args = ([inputs[index] for index in kept], *rest)
    call.meta["val"] = [call.meta["val"][index] for index in kept]
    for place, user in enumerate(users):
        user.args = (call, place)


def _drop(graph: fx.Graph, unused: Sequence[Collective]) -> None:
    """Erase collectives that no result of the graph needs, with what is computed from them, and for them alone."""
    gone = {node for collective in unused for node in collective.results}
    around = reachable(gone) | reachable(gone, lambda node: node.users)
    for node in reversed(graph.nodes):
        if node in around and not node.users and (node in gone or not has_side_effect(node)):
            graph.erase_node(node)
    nodes = set(graph.nodes)
    left = [collective.node.name for collective in unused if collective.node in nodes]
    assert not left, f"{left} are used after all"
