"""Compute on a rank's shard what the program computes of the gathered tensor, and gather what is small of that."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from asynctp_passes.ir.collectives import is_only_awaited
from asynctp_passes.ir.nodes import is_random, traits_of, value_of
from asynctp_passes.ir.op_traits import Reduction
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.sizes import same
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.chains import CrossRankReduction, GatherChain, Hoist, Part, SideGather
from asynctp_passes.planning.legality import on_wire
from asynctp_passes.rewriting.builder import Builder
from asynctp_passes.rewriting.emit_alone import OWN_OPS, options_of, use_own_op
from asynctp_passes.torch_private import symbolic_sizes

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


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
    """The nodes that may come late, where a gather stays, which comes after the fused op.

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
