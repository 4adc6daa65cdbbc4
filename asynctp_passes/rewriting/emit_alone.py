"""Make collectives without a matmul asynctp's own: in place, or anew as one of a single tensor along dim 0.

(x, y) → all_reduce_coalesced → wait+         becomes   x → all_reduce → wait,   y → all_reduce → wait
(x → all_reduce → wait)+                      becomes   x+ → cat → all_reduce → wait → split → clone+
x → all_reduce → wait → view* → own part      becomes   x → reduce_scatter → wait → view?
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from asynctp_passes import ops
from asynctp_passes.ir.collectives import WAIT, left_items
from asynctp_passes.ir.nodes import arguments, is_size, op_name, tensor_of, value_of
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.sizes import divided
from asynctp_passes.layout.propagation import views_of
from asynctp_passes.matching.chains import Bucket, OwnPart
from asynctp_passes.ops.calls import INVARIANT
from asynctp_passes.planning.legality import on_wire
from asynctp_passes.rewriting.builder import Builder, RewriteState, mark_items
from asynctp_passes.rewriting.cleanup import erase_unused, shared_by
from asynctp_passes.torch_private import symbolic_sizes

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
OWN_OPS = {
    "all_gather": torch.ops.asynctp.all_gather.default,
    "reduce_scatter": torch.ops.asynctp.reduce_scatter.default,
    "all_reduce": torch.ops.asynctp.all_reduce.default,
}
"""The ops of asynctp, by kind."""
_TORCHS = {
    "all_gather": _c10d.all_gather_into_tensor.default,
    "reduce_scatter": _c10d.reduce_scatter_tensor.default,
    "all_reduce": _c10d.all_reduce.default,
}


def emit_left_items(state: RewriteState) -> None:
    """Mark the place of each tensor of collectives of several, and emit those tensors that nothing takes."""
    several = [one for chain in state.plan.chains for one in chain.collectives] + state.plan.alone
    for call in dict.fromkeys(one.call for one in several if one.call is not None):
        marks = mark_items(state, call)
        for index, item in left_items(call).items():  # they would go with those that are taken in
            _emit(Builder(state, item, marks[index]), item)


def emit_alone(state: RewriteState) -> None:
    """Emit each of the plan's collectives without a matmul, then erase the nodes that they were."""
    old: set[fx.Node] = set()
    shared: dict[fx.Node, None] = {}
    for collective in state.plan.alone:
        place = state.items.get(collective.node, collective.start)
        shares = shared_by((collective,))
        build = Builder(state, collective, place)
        _emit(build, collective)
        if build.made:  # else it stays where it is, and has become ours
            old |= {*collective.nodes, *shares, *(() if collective.call is None else collective.call.users)}
            shared |= dict.fromkeys(shares)
    old &= {*state.graph.nodes}  # with a chain goes an item beside it that nothing uses
    erase_unused(state.graph, old, shared)


def _emit(build: Builder, collective: Collective) -> None:
    """Make a collective one of a single tensor, along dim 0, by asynctp's op where that goes by its transport.

    Torch's own stay where they are, and become ours; others give way to new nodes, and so do items of several.
    """
    state, node, value = build.state, collective.node, tensor_of(collective.node)
    torchs = op_name(node).startswith(("_c10d_functional.", "_c10d_functional_autograd."))
    if collective.call is None and torchs and value is not None and symbolic_sizes.is_contiguous(value):
        use_own_op(collective, options_of(state, collective, node in state.kept_by_all))
        return
    ours = state.plan.is_own(collective) and on_wire(collective)
    options = options_of(state, collective, node in state.kept_by_all) if ours else {}
    op = (OWN_OPS if ours else _TORCHS)[collective.kind]
    done = build.call(_c10d.wait_tensor.default, build.call(op, *_started_with(build, collective), **options))
    if collective.is_unused:
        return
    result = _as_it_was(build, collective, done)
    build.replace(node, result, unless=collective.waits)
    for wait in collective.waits:
        build.replace(wait, result)


def emit_own_parts(state: RewriteState) -> None:
    """Replace each all-reduce by a reduce-scatter where all ranks use their own parts only."""
    for candidate in state.plan.own_parts:
        collective, part = candidate.collective, candidate.own_part
        assert part is not None
        build = Builder(state, collective, collective.start)
        for reader in [user for node in collective.results for user in node.users if is_size(user)]:
            reader.args = (build.now(collective.source), *reader.args[1:])
        blocks = build.reshape(build.now(collective.source), (collective.group_size, *part.shape))
        ours = on_wire(collective)
        op, options = (OWN_OPS if ours else _TORCHS)["reduce_scatter"], options_of(state, collective) if ours else {}
        how = (collective.reduce_op, collective.group_size, collective.group)
        done = build.call(_c10d.wait_tensor.default, build.call(op, build.contiguous(blocks), *how, **options))
        give_own_part(build, collective, part, build.reshape(done, part.shape))
        erase_unused(state.graph, {*part.nodes, *collective.results})


def give_own_part(build: Builder, collective: Collective, part: OwnPart, own: fx.Node) -> None:
    """Replace a sum by this rank's part of it. Users that index the whole sum get the part between zeros."""
    for node in part.ends:
        build.replace(node, build.reshape(own, build.shape(node)))
    if not part.by_place:
        return
    around = [part.rank, collective.group_size - 1 - part.rank]
    first = build.reshape(own, (1, *part.shape))
    whole = build.call(_aten.constant_pad_nd.default, first, [*[0, 0] * len(part.shape), *around], 0)
    whole = build.reshape(whole, build.shape(collective.node))
    for node in collective.results:
        build.replace(node, whole, unless=collective.waits)


def _started_with(build: Builder, collective: Collective) -> list[Any]:
    """The arguments of the op of a single tensor: the tensor with the ranks' blocks first, row-major, then how."""
    source, dim, ranks = build.now(collective.source), collective.dim, collective.group_size
    if collective.kind == "reduce_scatter" and dim:
        own = build.shape(source)
        blocks = build.reshape(source, (*own[:dim], ranks, divided(own[dim], ranks), *own[dim + 1 :]))
        source = build.permute(blocks, [dim, *(axis for axis in range(len(own) + 1) if axis != dim)])
    reduction = [collective.reduce_op] if collective.kind != "all_gather" else []
    size = [ranks] if collective.kind != "all_reduce" else []
    return [build.contiguous(source), *reduction, *size, collective.group]


def _as_it_was(build: Builder, collective: Collective, done: fx.Node) -> fx.Node:
    """The result of such an op, with the ranks in their dimension, and strides as the program's collective had them."""
    value, dim, own = value_of(collective.node), collective.dim, build.shape(collective.source)
    if collective.kind == "all_gather" and dim:
        ranks_first = build.reshape(done, (collective.group_size, *own))
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(own) + 1)]
        done = build.permute(ranks_first, order)
    done = build.contiguous(build.reshape(done, build.shape(collective.node)))
    if symbolic_sizes.is_contiguous(value):
        return done
    axes = symbolic_sizes.axes_by_stride(value)
    assert axes is not None, "`can_be_alone` lets no other through"
    back = [axes.index(axis) for axis in range(len(axes))]
    return build.permute(build.contiguous(build.permute(done, axes)), back)


def use_own_op(collective: Collective, options: Mapping[str, Any]) -> None:
    """Make torch's collective asynctp's, which leaves the GPU's SMs to what runs beside it, with its `options_of`."""
    node, values = collective.node, arguments(collective.node)
    reduction = (collective.reduce_op,) if collective.kind != "all_gather" else ()
    size = (collective.group_size,) if collective.kind != "all_reduce" else ()
    node.target = OWN_OPS[collective.kind]
    node.args, node.kwargs = (values["input"], *reduction, *size, collective.group), dict(options)
    node.meta.pop("eager_input_vals", None)  # of torch's op: Inductor would lay out its inputs by them


def options_of(state: RewriteState, collective: Collective, kept_by_all: bool = True) -> dict[str, Any]:
    """The arguments of asynctp's op for a collective that the program does not have.

    kept_by_all: Of a gather, whether every rank keeps it, which is told where it goes by a transport of asynctp's.
    """
    kept = collective.kind == "all_gather" and ops.on_wire(value_of(collective.source).device.type)
    invariant = INVARIANT if state.plan.context.config.invariant == "batch" else 0
    accord = state.plan.accord(collective.group_key) | invariant
    return {**({"all_keep": kept_by_all} if kept else {}), **({"accord": accord} if accord else {})}


# --- several as one --------------------------------------------------------------------------------------------
def emit_bucket(state: RewriteState, bucket: Bucket, front: fx.Node) -> fx.Node:
    """Make one all-reduce of all members' elements, and return these; each result is memory of its own, as it was.

    It comes before `front`, where no fused op stands there.
    """
    anchor = state.starts[state.fused[bucket.place]] if bucket.place in state.fused else front
    build = Builder(state, bucket.collective, anchor, bucket.inputs)
    values = [value_of(node) for node in bucket.inputs]
    lengths = [math.prod(value.shape) for value in values]
    flat = [build.reshape(build.now(node), (length,)) for node, length in zip(bucket.inputs, lengths, strict=True)]
    joined, first = build.call(_aten.cat.default, flat), bucket.collective
    ours = state.plan.is_own(first) and on_wire(first)
    op, options = (OWN_OPS["all_reduce"], options_of(state, first)) if ours else (_TORCHS["all_reduce"], {})
    total = build.call(op, joined, first.reduce_op, first.group, computes=_like_first, **options)
    done = build.call(_c10d.wait_tensor.default, total, computes=_like_first)
    pieces = build.call(_aten.split_with_sizes.default, done, lengths)
    for index, (member, value) in enumerate(zip(bucket.members, values, strict=True)):
        piece = build.call(operator.getitem, pieces, index, like=member.node)
        result = build.call(_aten.clone.default, build.reshape(piece, tuple(value.shape)), like=member.node)
        again = [node for node in views_of(member.waits) if node not in member.waits and op_name(node) == WAIT]
        for wait in again:  # for what has been waited for already, or a view of it
            build.replace(wait, wait.args[0])  # type: ignore[arg-type]  # a node
            build.graph.erase_node(wait)
        for wait in member.waits:
            build.replace(wait, result)
    erase_unused(state.graph, {node for member in bucket.members for node in member.results})
    return joined


def _like_first(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The fake result of a collective that keeps the shape: groups need not exist."""
    return torch.empty_like(tensor)
