"""Match a gather: prove the chains of the matmuls that take it, with gathers of scales that can travel along. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from asynctp_passes.ir.matmuls import contracts_rows, is_matmul
from asynctp_passes.ir.nodes import dtype_of, tensor_of
from asynctp_passes.ir.operations import Collective, ScaledOptions, ScalesOfA, nodes_of
from asynctp_passes.ir.sizes import product
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.placement import GatherPlacement
from asynctp_passes.layout.propagation import Propagation
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.chains import Candidate, GatherChain, RowNumbers
from asynctp_passes.matching.gather_chains import PlacedMatmul, chains_of, placed_matmuls, placed_scales
from asynctp_passes.matching.match_context import MatchContext
from asynctp_passes.matching.missed_gather import missed_gather
from asynctp_passes.matching.scaled_epilogue import scalings
from asynctp_passes.matching.shard_region import ShardRegion
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import symbolic_sizes

_Searched = tuple[ShardRegion, list[PlacedMatmul], dict[fx.Node, Refusal]]
"""A region, those of its matmuls that may be fused, and what `placed_matmuls` says of other matmuls."""


def match_gather(context: MatchContext, gather: Collective, wanted: set[fx.Node]) -> Candidate:
    """A gather with its chain, the first that is allowed if there are several.

    What is computed of the gathered tensor is hoisted where no view of it will do.
    """
    propagation = context.propagations[gather.node]
    if isinstance(propagation, Refusal):
        return Candidate(gather, None, (propagation,), (gather.node,))
    region = ShardRegion(context, gather)
    placed, missed = placed_matmuls(region)
    searched, hoisted, refused = [(region, placed, missed)], list[PlacedMatmul](), dict[fx.Node, Refusal]()
    followed: list[Propagation] = []
    if any(user in context.ways_down for user in propagation.all_users()):
        grown, not_hoisted = ShardRegion(context, gather), {one.matmul.node for one in placed}
        grown.grow()
        computed, why = placed_matmuls(grown)
        hoisted = [one for one in computed if one.matmul.node not in not_hoisted]
        searched.insert(1 if _in_rows(placed) else 0, (grown, _in_rows(hoisted) if placed else hoisted, why))
        refused = {**grown.refused, **why}
        followed = [root.propagation for root in grown.roots.values() if root.node is not gather.node]
    late: dict[fx.Node, Refusal] = {}
    found = _with_chains(context, searched, [*placed, *hoisted], wanted, late)
    first = next(found, None)
    if first is None:
        return missed_gather(region, {**missed, **late}, refused, followed)
    return first if context.allowed(first) else next(filter(context.allowed, found), first)


def _with_chains(
    context: MatchContext,
    searched: Iterable[_Searched],
    all_placed: Sequence[PlacedMatmul],
    wanted: set[fx.Node],
    late: dict[fx.Node, Refusal],
) -> Iterator[Candidate]:
    """A gather with each of its chains; matmuls that are not `wanted` elsewhere are preferred.

    Not those whose scales are gathered too late, by a gather that cannot become part of this one: they go to `late`.
    """
    for region, placed, missed in searched:
        free = [one for one in placed if one.matmul.node not in wanted] or placed
        for chain in chains_of(region, free):
            joined = _joined(region, chain)
            for one in (joined,) if joined is chain else (joined, chain):
                followed = following(context, one)
                scaled = followed.matmuls[0].scaled
                refusal = None if scaled is None or followed.scale_placement else region.late(scaled.given_a_scale)
                if refusal is not None:
                    late |= {matmul.node: refusal for matmul in followed.matmuls}
                else:
                    yield candidate_of(context, followed, _left_out(context, followed, all_placed, {**missed, **late}))


def _in_rows(placed: Iterable[PlacedMatmul]) -> list[PlacedMatmul]:
    return [one for one in placed if one.placement.axis == "rows"]


def candidate_of(context: MatchContext, chain: GatherChain, left_out: Iterable[str]) -> Candidate:
    """A gather with its chain."""
    gathers = (node for gather in chain.collectives for node in gather.nodes)
    nodes = context.sorted([*gathers, *chain.members])
    return Candidate(chain.collective, chain, (), nodes, left_out=tuple(left_out))


def following(context: MatchContext, chain: GatherChain) -> GatherChain:
    """The chain with the communication, after its own, that it has to follow."""
    last = max((context.latest[node] for node in chain.needs), default=-1)
    return replace(chain, follows=context.nodes[last]) if last > context.order[chain.collective.node] else chain


def _left_out(
    context: MatchContext, chain: GatherChain, placed: Iterable[PlacedMatmul], missed: Mapping[fx.Node, Refusal]
) -> tuple[str, ...]:
    """Notes on other matmuls of the gathered tensor, which the fused op returns to them unless its gather stays."""
    fused = {matmul.node for matmul in chain.matmuls}
    use_gather = () if chain.hoist is None else chain.hoist.still_needed_by
    others = [one.matmul.node for one in placed if one.matmul.node not in fused and one.matmul.node not in use_gather]
    takers = [*others, *(node for node, refusal in missed.items() if refusal.reason.serves_others)]
    gradients = [node.name for node in context.sorted(takers) if contracts_rows(node) and node not in use_gather]
    views = set(context.propagation_of(chain.collective).all_users())
    notes = [
        f"{node.name}{'' if node in views else ', of what is computed from it,'} stays a matmul of its own"
        for node in others
        if not contracts_rows(node)
    ]
    known = [one for node, one in missed.items() if not (one.reason.serves_others and contracts_rows(node))]
    facts = [f"{refusal.reason.name} ({refusal.facts})" for refusal in known]
    told = {*fused, *others, *missed, *use_gather}
    ways = _other_ways(context, chain, told)
    facts += [f"{way[-1].name}, which it reaches by {near_miss.names(way)}, is not fused" for way in ways]
    taken = [f"the same gather serves the weight gradients {', '.join(gradients)}"]
    return (*(taken if gradients else ()), *notes, *facts)


def _other_ways(context: MatchContext, chain: GatherChain, told: Container[fx.Node]) -> Iterator[list[fx.Node]]:
    """Ways of the gathered rows to matmuls that nothing is `told` of, and that do not need the chain's results."""
    members, later = set(chain.members), None
    for source, user in context.propagation_of(chain.collective).uses():
        if is_matmul(user) or user in members or user in told or not near_miss.carries(user, source):
            continue
        way = context.rows_down.path(user, source)
        if not way or way[-1] in told:
            continue
        later = reachable(nodes_of(chain.matmuls), lambda node: node.users) if later is None else later
        if later.isdisjoint(way):
            yield way


def _joined(data: ShardRegion, chain: GatherChain) -> GatherChain:
    """The chain with a gather of scales that its op can take in: what is hoisted has its own from the same gather."""
    place, scaled = chain.placement, chain.matmuls[0].scaled
    if chain.hoist is not None or place.axis != "rows" or scaled is None:
        return chain
    return _with_scales(data, chain, scaled) or _with_row_numbers(data, chain) or chain


def _with_scales(data: ShardRegion, chain: GatherChain, scaled: ScaledOptions) -> GatherChain | None:
    """With the gather of the scales of the same shard, of rows or blocks, if the matmuls are all that use it."""
    context = data.context
    scale = context.gather_of.get(scaled.given_a_scale)
    if scale is None or scale is chain.collective or not _of_one_group(scale, chain.collective):
        return None
    region = ShardRegion(context, scale)
    if region.used_elsewhere(set(nodes_of(chain.matmuls))) or data.late(scale.source) is not None:
        return None
    given = scaled.given_a_scale
    placement = placed_scales(region, given, region.view(given), scaled.of_a, chain.placement)
    if not isinstance(placement, GatherPlacement):
        return None
    views = region.views_to(matmul.scaled.given_a_scale for matmul in chain.matmuls if matmul.scaled is not None)
    return replace(chain, scale=scale, scale_placement=placement, views=context.sorted([*chain.views, *views]))


def _with_row_numbers(data: ShardRegion, chain: GatherChain) -> GatherChain | None:
    """With a gather of one number per row, used only to scale the matmuls' results: it can travel with the data.

    The numbers come with the fused op then, so that nothing which that needs may be computed from them.
    """
    context, gather, matmul_nodes = data.context, chain.collective, [matmul.node for matmul in chain.matmuls]
    needed = [gather.source, *(node for matmul in chain.matmuls for node in matmul.operands)]
    multiplications = scalings(matmul_nodes)
    for other in context.collectives:
        followed = other.node is not gather.node and isinstance(context.propagations.get(other.node), Propagation)
        if not followed or dtype_of(other.node) != torch.float32 or not _of_one_group(other, gather):
            continue
        region = ShardRegion(context, other)
        row_numbers = _rows_that_scale(region, chain.placement, multiplications)
        if row_numbers is None or any(context.depends(node, other.node) for node in needed):
            continue
        if data.late(other.source) is not None:
            continue
        views = region.views_to([row_numbers.end])
        if len({context.segments[node] for node in (*gather.nodes, *matmul_nodes, *other.nodes, *views)}) == 1:
            return replace(chain, row_numbers=row_numbers, views=context.sorted([*chain.views, *views]))
    return None


def _rows_that_scale(region: ShardRegion, data: GatherPlacement, multiplications: set[fx.Node]) -> RowNumbers | None:
    """A gather whose one view that is used, by `multiplications`, is one number per row of the data."""
    used = region.used_elsewhere(set())
    end, users = next(iter(used.items())) if len(used) == 1 else (None, ())
    value = tensor_of(end)
    if end is None or end in region.cut_steps or value is None or not symbolic_sizes.is_contiguous(value):
        return None
    if not all(near_miss.only_scales(multiplications, one) for one in users):
        return None
    numbers = region.view(end).reshape((product(region.context.sizes.of(value)), 1))
    if isinstance(numbers, Refusal):
        return None
    placement = placed_scales(region, end, numbers, ScalesOfA(), data)
    return RowNumbers(region.gather, placement, end) if isinstance(placement, GatherPlacement) else None


def _of_one_group(a: Collective, b: Collective) -> bool:
    return (a.group_key, a.group_size) == (b.group_key, b.group_size)
