"""Sums of reductions: what several collectives reduce, and only the sum of is used, is reduced once. Pure.

    mm → view* → all_reduce → wait → view* ┐                       mm → view* ┐
    mm → view* → all_reduce → wait → view* ┴ add → ...   becomes   mm → view* ┴ add → all_reduce → wait → view* → ...

A reduction is linear: `AR(x) + AR(y) = AR(x + y)`, and so is a reduce-scatter whose blocks lie alike. Layers that share
an input, and each all-reduce their own gradient of it, write such sums (queries, keys and values; gate and up).

Members are chains that could each be fused alone, and differ in their products only. The sum behind them is followed
from their results as sums in front of a collective are from products (`views.follow`): an addition joins equal maps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from asynctp_passes.chain import Candidate, ScatterChain, anchor
from asynctp_passes.fxview import reachable, tensor_of
from asynctp_passes.read import identical
from asynctp_passes.scene import Scene
from asynctp_passes.views import Flow, adds, follow, is_conversion, is_sum, is_view, seeds_of

__all__ = ["summed"]


def summed(
    scene: Scene, candidates: Mapping[fx.Node, Candidate], allowed: Callable[[Candidate], bool]
) -> dict[fx.Node, Candidate]:
    """What becomes of the reductions that are summed: the last of a sum has the chain of all, which the others join.

    Args:
        scene: The graph being searched.
        candidates: Of all gathers and reductions, by collective, in graph order.
        allowed: True for a candidate whose chain may be fused.
    """
    chains = {node: one.chain for node, one in candidates.items() if one.chain is not None and allowed(one)}
    kinds: dict[object, dict[fx.Node, ScatterChain]] = {}
    for node, chain in chains.items():
        if isinstance(chain, ScatterChain) and (kind := _kind(scene, candidates[node])) is not None:
            kinds.setdefault(kind, {})[node] = chain
    places = sorted(scene.order[anchor(chain)] for chain in chains.values())
    found: dict[fx.Node, Candidate] = {}
    for reductions in kinds.values():
        flow = _flow(scene, reductions) if len(reductions) > 1 else Flow()
        ends = [node for node in flow.maps if adds(node) and len(flow.terms[node]) > 1]
        for end in reversed([node for node in ends if reductions.keys() >= flow.terms[node].keys()]):
            members = [reductions[node] for node in scene.sorted(flow.terms[end])]
            if any(member.collective.node in found for member in members):
                continue
            behind = _behind(flow, end, members)
            if behind is None or not _are_next(scene, members, places) or not _fit(scene, members):
                continue
            own = [candidates[member.collective.node] for member in members]
            nodes = scene.sorted([*(node for one in own for node in one.nodes), *behind])
            whole = replace(own[-1], chain=_joined(scene, members, flow.terms[end], behind), nodes=nodes)
            if allowed(whole):
                found[whole.collective.node] = whole
                found |= {one.collective.node: replace(one, chain=None, joins=whole) for one in own[:-1]}
    return found


def _kind(scene: Scene, candidate: Candidate) -> object:
    """What members of one sum have in common; None for what is left alone.

    That is one of several tensors of a collective, and what is reduced in float16: a rank's part of the sum may be too
    large for it where the sums over the ranks, and their sum, are not.
    """
    one, value = candidate.collective, tensor_of(candidate.collective.node)
    if value is None or one.call is not None or value.dtype == torch.float16 or not value.is_contiguous():
        return None
    group = (one.group_key, one.group_size)
    return (one.kind, group, one.reduce_op, one.dim, value.dtype, scene.sizes.of(value), candidate.weights)


# --- the sum --------------------------------------------------------------------------------------------------
def _flow(scene: Scene, reductions: Iterable[fx.Node]) -> Flow:
    """The views and sums of what these collectives give. Conversions round, or would not: they end it."""
    steps = (node for node in scene.nodes if (is_view(node) or is_sum(node)) and not is_conversion(node))
    return follow(steps, seeds_of(reductions, scene.sizes), scene.sizes, sums=True)


def _behind(flow: Flow, end: fx.Node, members: Sequence[ScatterChain]) -> set[fx.Node] | None:
    """The nodes that make `end` of the members' results; None if one has another user, be it for its size.

    Or if an addition's result lies in memory otherwise than its first term, which is to stand for it.
    """
    starts = {member.collective.node for member in members}
    inside = reachable([end], lambda node: () if node in starts else node.all_input_nodes, flow.maps.__contains__)
    alone = all(inside.issuperset(node.users) for node in inside if node is not end)
    same_strides = all(_lie_alike(tensor_of(node), tensor_of(node.args[0])) for node in inside if adds(node))
    return inside - starts if inside >= starts and alone and same_strides else None


def _lie_alike(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and all(map(identical, a.stride(), b.stride()))


# --- its members ----------------------------------------------------------------------------------------------
def _are_next(scene: Scene, members: Sequence[ScatterChain], places: Sequence[int]) -> bool:
    """True where no other chain stands between the members' collectives; `places` has where each stands.

    All wait for the last one. Those of many layers, which read what one encoder made, would keep all their operands
    until then.
    """
    first, last = (scene.order[member.collective.node] for member in (members[0], members[-1]))
    return bisect_right(places, last) - bisect_left(places, first) == len(members)


def _fit(scene: Scene, members: Sequence[ScatterChain]) -> bool:
    """True for chains whose products are alike, and go to the collective in one way, with nothing added to them."""
    first = members[0]
    plain = ScatterChain(first.collective, (), first.way, first.placement, (), first.sum_dtype)
    if any(replace(member, collective=first.collective, matmuls=(), views=()) != plain for member in members):
        return False
    return all(scene.can_add(first.matmuls[0], matmul) for member in members[1:] for matmul in member.matmuls)


def _joined(
    scene: Scene, members: Sequence[ScatterChain], times: Mapping[fx.Node, float], behind: Iterable[fx.Node]
) -> ScatterChain:
    """The one chain of all members, the last one's products first, in its place: there all that is reduced exists."""
    counts = [(member, times[member.collective.node]) for member in (members[-1], *members[:-1])]
    return replace(
        members[-1],
        matmuls=tuple(replace(one, factor=one.factor * count) for member, count in counts for one in member.matmuls),
        views=scene.sorted(node for member in members for node in member.views),
        joined=tuple(member.collective for member in members[:-1]),
        behind=scene.sorted(behind),
    )
