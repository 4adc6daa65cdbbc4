"""Make the fused op of a gather's chain, and give its results to the users of the matmuls and of the gather.

shard → all_gather → wait → view* → mm+       becomes   shard → view? → all_gather_matmul → view → ...
shard → all_gather → wait → op* → mm+         becomes   shard → op* → view? → all_gather_matmul → view → ...

Small tensors beside it are gathered on their own, and maxima over all ranks' rows are made of each rank's.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.collectives import is_only_awaited
from asynctp_passes.ir.matmuls import added_matrix
from asynctp_passes.ir.nodes import is_random, traits_of, value_of
from asynctp_passes.ir.op_traits import Reduction
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.sizes import product, same
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.placement import GatherPlacement
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.chains import CrossRankReduction, GatherChain, Hoist, Part, SideGather
from asynctp_passes.planning.legality import on_wire
from asynctp_passes.rewriting.builder import Builder, column_scale, right_operand, row_bias, row_scale, shape_of_scales
from asynctp_passes.rewriting.cleanup import read_sizes_elsewhere
from asynctp_passes.rewriting.emit_alone import OWN_OPS, options_of, use_own_op
from asynctp_passes.torch_private import inductor_options, symbolic_sizes

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


def emit_gather(build: Builder, chain: GatherChain) -> fx.Node:
    """The fused op of a chain; its results have taken the places of those of the matmuls and of the gather."""
    parts = parts_on_shard(build, chain)
    shard = parts[chain.collective.node if chain.hoist is None else chain.hoist.operand]
    shard = build.bitcast(shard, value_of(chain.matmuls[0].a).dtype)
    shard, gather_dim = _shard_as_op_wants(build, chain, shard)
    side_gathers = start_side_gathers(build, chain, parts)
    op = _call_gather(build, chain, shard, gather_dim, parts)
    for index, matmul in enumerate(chain.matmuls):
        out = build.call(operator.getitem, op, index, like=matmul.node)
        rows = out if chain.takes_ranges else _rows_of(build, chain, matmul.a, out)
        out = build.reshape(rows, build.shape(matmul.node))
        if (added := added_matrix(matmul.node)) is not None:
            out = build.call(_aten.add.Tensor, out, build.now(added), like=matmul.node, before=matmul.node)
        build.replace(matmul.node, out)
    last = len(chain.matmuls)
    if chain.returned is not None:
        _return_gathered(build, chain, chain.returned, build.call(operator.getitem, op, last))
        last += 1
    row_numbers = None if chain.gathered_row_numbers is None else build.call(operator.getitem, op, last)
    if chain.row_numbers is not None and row_numbers is not None:
        row_numbers = _rows_in_place(build, chain, row_numbers)
        build.replace(chain.row_numbers.end, build.reshape(row_numbers, build.shape(chain.row_numbers.end)))
    if chain.hoist is not None:
        finish_side_gathers(build, chain.hoist, side_gathers, row_numbers)
    read_sizes_elsewhere(build, chain)
    return op


def _shard_as_op_wants(build: Builder, chain: GatherChain, shard: fx.Node) -> tuple[fx.Node, int]:
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
    shard = build.rearranged(shard, place.shard)
    if place.axis == "contraction":
        return build.reshape(shard, (place.outer, place.width)), 1
    if same(place.outer, 1):
        return build.reshape(shard, (place.inner, place.width)), 0
    return build.reshape(shard, (place.outer, place.inner, place.width)), 1


def _call_gather(
    build: Builder,
    chain: GatherChain,
    shard: fx.Node,
    gather_dim: int,
    parts: dict[fx.Node, fx.Node],
) -> fx.Node:
    """The fused op: it returns a list of one product per matmul, then the gathered tensor if others use it."""
    gather, matmuls = chain.collective, chain.matmuls
    bs, biases = [right_operand(build, matmul) for matmul in matmuls], [row_bias(build, matmul) for matmul in matmuls]
    alone = len(matmuls) == 1 and chain.returned is None and chain.gathered_row_numbers is None
    returns = chain.returned is not None or (alone and inductor_options.misreads_lists_of_one())
    ending = (returns, gather.group_size, gather.group)
    scales = _scales(build, chain, shard, gather_dim, parts)
    options = options_of(build.state, gather, gather.node in build.state.kept_by_all)
    if chain.takes_ranges:
        options["b_rows"] = [number for matmul in matmuls for number in _range_of(build, chain, matmul.a)]
    op = torch.ops.asynctp.all_gather_matmul.default
    return build.call(op, shard, bs, biases, gather_dim, *ending, *scales, **options)


def _scales(
    build: Builder, chain: GatherChain, shard: fx.Node, gather_dim: int, parts: dict[fx.Node, fx.Node]
) -> list[Any]:
    """The arguments of a fused op with scales, in its schema's order; none without.

    They are not given by name: each name takes 0.2 us of a call.
    """
    scaled = [matmul.scaled for matmul in chain.matmuls if matmul.scaled is not None]
    if not scaled:
        return []
    a_scale = _gather_scale(build, chain, shard, gather_dim, parts)
    b_scales = [column_scale(build, one) for one in scaled]
    how = [chain.scale_placement is not None, scaled[0].out_dtype, scaled[0].use_fast_accum]
    numbers = chain.gathered_row_numbers
    along = [] if numbers is None else [_part_of_row_numbers(build, chain, shard, parts[numbers])]
    return [a_scale, b_scales, *how, *along]


def _part_of_row_numbers(build: Builder, chain: GatherChain, shard: fx.Node, part: fx.Node) -> fx.Node:
    """The row numbers, one per row in the shard's own dimensions."""
    if chain.row_numbers is not None:
        part = _part_as_sent(build, chain, build.rearranged(part, chain.row_numbers.placement.shard), 1)
    return build.reshape(part, [*build.shape(shard)[:-1], 1])


def _part_as_sent(build: Builder, chain: GatherChain, part: fx.Node, numbers: int) -> fx.Node:
    """Numbers of a shard's rows, so many to each, moved from the operand's order to that of the shard itself."""
    rows = chain.placement.row_order
    if chain.hoist is not None or chain.placement.shard.is_reshape or rows is None:
        return part
    sizes = [*(rows.sizes[axis] for axis in rows.order), numbers]
    order = [*(rows.order.index(axis) for axis in range(len(rows.order))), len(rows.order)]
    return build.permute(build.reshape(part, sizes), order)


def _gather_scale(
    build: Builder, chain: GatherChain, shard: fx.Node, gather_dim: int, parts: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The scale of A: one number, or per row or block in the shard's (or the gathered tensor's) own dimensions."""
    scaled, own = chain.matmuls[0].scaled, list(build.shape(shard))
    assert scaled is not None
    if chain.gathered_scale is not None and chain.scale_placement is not None:
        part = build.bitcast(parts[chain.gathered_scale], torch.float32)
        part = _part_as_sent(build, chain, build.rearranged(part, chain.scale_placement.shard), scaled.of_a.numbers)
        return build.reshape(part, shape_of_scales(own, scaled))
    if gather_dim < len(own) - 1:
        own[gather_dim] = own[gather_dim] * chain.collective.group_size
    count = product(build.shape(build.now(scaled.given_a_scale)))
    if chain.placement.shard.is_reshape or chain.hoist is not None or same(count, 1):
        return row_scale(build, scaled, own)
    rows = row_scale(build, scaled, (product(own[:-1]), own[-1]))
    return build.reshape(_rows_in_place(build, chain, rows, back=True), shape_of_scales(own, scaled))


def _return_gathered(build: Builder, chain: GatherChain, returned: fx.Node, full: fx.Node) -> None:
    """Give the gathered tensor to its other users.

    Users of the matmuls' one operand take the returned tensor as it is, reshaped, or copied. When there are others, the
    collective's own result is rebuilt from it and the views stay, so that the same tensors share memory as before.
    """
    results = chain.collective.results
    if returned not in results:
        if not set(nodes_of(chain.matmuls)).issuperset(returned.users):
            gathered = build.reshape(_rows_of(build, chain, returned, full), build.shape(returned))
            build.replace(returned, gathered, unless=nodes_of(chain.matmuls))
        for node in () if chain.hoist is None else chain.hoist.copies:
            build.replace(node, build.call(_aten.clone.default, build.reshape(full, build.shape(node))))
        return
    gathered = _as_collective_result(build, chain, full)
    for node in results:
        build.replace(node, gathered, unless=results)


def _as_collective_result(build: Builder, chain: GatherChain, full: fx.Node) -> fx.Node:
    """The gathered tensor as the collective returned it: the shard's own dimensions, and the ranks before `dim`."""
    collective, way = chain.collective, _placement_as_sent(chain).shard
    ranks, dim, own = collective.group_size, collective.dim, build.shape(chain.shard)
    sizes, leading = [way.sizes[axis] for axis in way.order], way.lengths[0]
    gathered = build.reshape(full, [*sizes[:leading], ranks, *sizes[leading:]])
    same_sizes = len(own) == len(way.sizes) and all(same(a, b) for a, b in zip(own, way.sizes, strict=True))
    order = [axis + (axis >= leading) for axis in (way.order.index(axis) for axis in range(len(way.order)))]
    order.insert(dim if same_sizes else 0, leading)
    gathered = build.permute(gathered, order)
    if dim and not same_sizes:
        gathered = build.reshape(gathered, (ranks, *own))
        gathered = build.permute(gathered, [*range(1, dim + 1), 0, *range(dim + 1, len(own) + 1)])
    gathered = build.reshape(build.contiguous(gathered), build.shape(collective.node))
    return build.bitcast(gathered, value_of(collective.node).dtype)


def _rows_of(build: Builder, chain: GatherChain, operand: fx.Node, tensor: fx.Node) -> fx.Node:
    """Bring rows as they were sent to where an operand has them, without those that were cut off it."""
    tensor = _rows_in_place(build, chain, tensor)
    cut = next((cut for cut in chain.cuts if cut.operand is operand), None)
    if cut is None:
        return tensor
    tensor = build.reshape(tensor, (*build.shape(cut.whole)[:-1], build.shape(tensor)[-1]))
    ends = build.size(cut.first), build.size(cut.end)
    return build.contiguous(build.call(_aten.slice.Tensor, tensor, cut.dim, *ends))


def _range_of(build: Builder, chain: GatherChain, operand: fx.Node) -> list[int | fx.Node]:
    """The first row of an operand, the one after its last, and the rows of the gathered tensor until the next such."""
    cut = next(cut for cut in chain.cuts if cut.operand is operand)
    lines = build.shape(cut.whole)[cut.dim : -1]
    return [build.size(product((size, *lines[1:]))) for size in (cut.first, cut.end, lines[0])]


def _rows_in_place(build: Builder, chain: GatherChain, tensor: fx.Node, *, back: bool = False) -> fx.Node:
    """Bring rows as they were sent to where the operand has them; or `back`, from there to how they are sent."""
    place, rows = chain.placement, chain.placement.row_order
    if chain.hoist is not None or place.shard.is_reshape or rows is None:
        return tensor
    width, ranks = build.shape(tensor)[-1], [chain.collective.group_size] if place.axis == "rows" else []
    sizes, first = [*ranks, *rows.sizes, width], len(ranks)
    order = [first + axis for axis in rows.order]
    if ranks:
        order.insert(place.shard.lengths[0], 0)
    order.append(len(sizes) - 1)
    if back:
        sizes, order = [sizes[axis] for axis in order], [order.index(axis) for axis in range(len(order))]
    return build.reshape(build.permute(build.reshape(tensor, sizes), order), (product(sizes[:-1]), width))


def _placement_as_sent(chain: GatherChain) -> GatherPlacement:
    """Where the fused op's rows are: the shard travels as the collective has it, and what is hoisted as it is taken."""
    return chain.placement if chain.hoist is not None else chain.placement.as_sent


# --- on the shard: what the program computes of the gathered tensor, and gathers of what is small of that -------------
def parts_on_shard(build: Builder, chain: GatherChain) -> dict[fx.Node, fx.Node]:
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


def _find_over_ranks(build: Builder, gather: Collective, one: CrossRankReduction, part: fx.Node) -> None:
    """The maximum of what the ranks have found, each in its part; it may come late if the fused op can do without."""
    call = partial(build.call, like=one.step.node)
    row = build.contiguous(build.reshape(part, (1, *build.shape(part))))
    started = _start_gather(build, gather, row, one.step.node)
    first = len(build.made)
    each = call(_c10d.wait_tensor.default, started)
    most = traits_of(one.step.node).reduces is Reduction.MAX
    found = call(_aten.amax.default if most else _aten.amin.default, each, [0])
    for node in one.nodes:
        build.replace(node, found if node is one.nodes[0] else build.call(_aten.clone.default, found))
    build.late += [] if one.needed else build.made[first:]


def _arranged(build: Builder, source: fx.Node, part: Part, like: fx.Node) -> fx.Node:
    """The part of a view, from that of its root; row-major where the whole view is, so that ops run as they did."""
    value = value_of(like)
    seen = build.bitcast(source, value.dtype)
    arranged = build.reshape(build.rearranged(seen, part.way), part.shape)
    return build.contiguous(arranged) if symbolic_sizes.is_contiguous(value) else arranged


def start_side_gathers(build: Builder, chain: GatherChain, parts: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Start to gather the small tensors on their own, before the fused op; equal ones once."""
    hoist = chain.hoist
    if hoist is None:
        return {}
    roots = dict.fromkeys(one.root for one in hoist.side_gathers if one.root is not hoist.row_numbers)
    return {root: _start_gather(build, chain.collective, build.contiguous(parts[root]), root) for root in roots}


def _start_gather(build: Builder, gather: Collective, part: fx.Node, like: fx.Node) -> fx.Node:
    """Start to gather small parts along dim 0, by the transport of the gather that they belong to."""
    ours = build.state.plan.is_own(gather) and on_wire(gather)
    start = OWN_OPS["all_gather"] if ours else _c10d.all_gather_into_tensor.default
    options = options_of(build.state, gather) if ours else {}
    return build.call(start, part, gather.group_size, gather.group, like=like, **options)


def finish_side_gathers(
    build: Builder, hoist: Hoist, started: dict[fx.Node, fx.Node], row_numbers: fx.Node | None
) -> None:
    """Wait for small tensors after the fused op, and give them to their users; equal ones do not share memory."""
    first = len(build.made)
    done: dict[fx.Node, fx.Node] = {}
    for one in hoist.side_gathers:
        if one.root in done:
            gathered = build.call(_aten.clone.default, build.reshape(done[one.root], build.shape(one.node)))
        elif one.root is hoist.row_numbers and row_numbers is not None:
            gathered = done[one.root] = build.reshape(row_numbers, build.shape(one.node))
        else:
            gathered = done[one.root] = _ranks_in_place(build, one, started[one.root])
        build.replace(one.node, gathered)
    build.late += build.made[first:]


def _ranks_in_place(build: Builder, one: SideGather, started: fx.Node) -> fx.Node:
    """Wait for a small tensor, which comes with the ranks outermost, and bring them to where they were."""
    ranks = started.args[1]
    gathered = build.call(_c10d.wait_tensor.default, started)
    if not same(one.outer, 1):
        gathered = build.permute(build.reshape(gathered, (ranks, one.outer, one.inner)), [1, 0, 2])
    return build.reshape(gathered, build.shape(one.node))


def nodes_after_kept_gather(build: Builder, chain: GatherChain) -> set[fx.Node]:
    """Make a gather that stays asynctp's, after the fused op, and give the nodes that may come late.

    Those are the waits for it and for the gathers beside the fused op, and what has to follow them in front of the
    first matmul, but for other collectives. A gather that nothing waits for is over when it returns.
    """
    gather, first = chain.collective, min(nodes_of(chain.matmuls))
    if is_only_awaited(gather):
        use_own_op(gather, options_of(build.state, gather))
    late = {*gather.waits, *build.late}

    def comes_late(node: fx.Node) -> bool:
        return node in late or (node < first and near_miss.transparent(node) and not is_random(node))

    return reachable(late, lambda node: node.users, comes_late)
