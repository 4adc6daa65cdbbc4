"""Find chains: every collective of a graph, with a proven chain around it or the reasons why there is none. Pure.

    gather    shard → all_gather → wait → view* → {mm, addmm, _scaled_mm}+
    gather    shard → all_gather → wait → {view, row-wise op}* → {mm, addmm, _scaled_mm}+     (`rowwise`)
    scatter   {mm, addmm, _scaled_mm (× scales)}+ → view* → (add → view*)* → {reduce_scatter, all_reduce} → wait
              where products of 16 bits may be converted to float32 on the way, and other tensors may be added
    summed    (mm → view* → {reduce_scatter, all_reduce} → wait → view*)+ → add*                      (`summed`)

Structure is proven by `index_map` on maps that `propagate` carries; no spelling of a view chain is enumerated.

What looks like FSDP's is marked (`Candidate.weights`), for groups that have nothing else in the graph: a gather of a
right operand or of a vector (parameters), a reduction of a product that contracts over rows, and that no matmul goes on
with, or of a vector (gradients). Reports say where that decided the scope, and by what it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from asynctp_passes import compat, reasons
from asynctp_passes.ir.calls import Collective, Matmul, ScaledOptions, ScalesOfA, nodes_of
from asynctp_passes.ir.collectives import unknown_group
from asynctp_passes.ir.crossings import multiplied_by, product_of
from asynctp_passes.ir.matmuls import added_matrix, contracts_rows, is_matmul
from asynctp_passes.ir.nodes import (
    called_name,
    describe,
    is_size,
    mutates,
    nodes_in,
    op_name,
    subgraphs_of,
    tensor_of,
    traits_of,
    value_of,
)
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.registry import collective_op
from asynctp_passes.ir.sizes import Size, Sizes, product, quotient, same
from asynctp_passes.ir.traversal import steps_of
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import GatherPlacement, ScatterPlacement, incomplete, locate_scatter
from asynctp_passes.layout.propagation import Propagation, is_sum, is_view, pads_at_end, propagate, sources_of
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.all_to_all import own_piece
from asynctp_passes.matching.chains import Candidate, GatherChain, Passenger, ScatterChain, Term
from asynctp_passes.matching.collapsed import collapsed
from asynctp_passes.matching.linear_sums import summed
from asynctp_passes.matching.match_context import MatchContext, in_blocks
from asynctp_passes.matching.scaled_epilogue import scalings
from asynctp_passes.matching.shard_region import PlacedMatmul, ShardRegion, chains_of, placed_matmuls, placed_scales
from asynctp_passes.ops.checks import WIDENED
from asynctp_passes.reasons import Refusal

__all__ = ["find"]


def find(
    graph: fx.Graph, collectives: Sequence[Collective], sizes: Sizes, allowed: Callable[[Candidate], bool]
) -> list[Candidate]:
    """One candidate per collective, in the same order. Does not change the graph.

    A matmul between a gather and a scatter can be fused with one of them: with the scatter when the gather has other
    matmuls to overlap with, else with the gather. Only a chain that is `allowed` to be fused has a claim to it.
    Scatters whose results are only used in a sum become one.
    """
    context = MatchContext(graph, collectives, sizes)
    scatters = {c.node: _scatter(context, c) for c in collectives if c.kind in ("reduce_scatter", "all_reduce")}
    gathers = _gathers(context, _fused_matmuls(filter(allowed, scatters.values())), allowed)
    taken = _fused_matmuls(filter(allowed, gathers.values()))
    found = {**gathers, **{node: _unless_taken(candidate, taken) for node, candidate in scatters.items()}}
    found |= summed(context, found, allowed)
    return [found.get(collective.node) or _other(context, collective) for collective in collectives]


def _fused_matmuls(candidates: Iterable[Candidate]) -> set[fx.Node]:
    chains = [candidate.chain for candidate in candidates if candidate.chain is not None]
    return {node for chain in chains for node in nodes_of(chain.matmuls)}


def _unless_taken(candidate: Candidate, taken: set[fx.Node]) -> Candidate:
    names = sorted(node.name for node in _fused_matmuls([candidate]) & taken)
    if not names:
        return candidate
    return replace(candidate, chain=None, refusals=(Refusal(reasons.MATMUL_TAKEN, ", ".join(names)),))


# --- gather side ------------------------------------------------------------------------------------------
def _gathers(
    context: MatchContext, wanted: set[fx.Node], allowed: Callable[[Candidate], bool]
) -> dict[fx.Node, Candidate]:
    """Candidates of all gathers; a gather of scales joins the chain whose data it scales.

    A matmul of what is computed from two gathers is fused with the first that may be.
    """
    found = _searched(context, wanted, allowed)
    while stuck := _following_on_cycles(context, found):
        context.fixed |= stuck
        found = _searched(context, wanted, allowed)
    for node in _on_cycles(context, _gather_chains(found)):
        found[node] = _without_passenger(context, found[node])
    for node, refusal in _cycles(context, found).items():
        found[node] = replace(found[node], chain=None, refusals=(refusal,))
    for candidate in list(found.values()):
        chain = candidate.chain
        for joined in chain.joined if chain is not None else ():
            other = found[joined.node]
            found[joined.node] = replace(other, joins=candidate, nodes=candidate.nodes, refusals=())
    return found


def _searched(
    context: MatchContext, wanted: set[fx.Node], allowed: Callable[[Candidate], bool]
) -> dict[fx.Node, Candidate]:
    """The candidates of all gathers, each alone; of those that would take the same matmul, the first may."""
    found = {c.node: _gather(context, c, wanted, allowed) for c in context.collectives if c.kind == "all_gather"}
    taken: set[fx.Node] = set()
    for node, candidate in found.items():
        found[node] = candidate = _unless_taken(candidate, taken)
        if candidate.chain is not None and candidate.chain.hoist is not None and allowed(candidate):
            taken |= _fused_matmuls([candidate])
    return found


def _following_on_cycles(context: MatchContext, found: Mapping[fx.Node, Candidate]) -> set[fx.Node]:
    """Gathers that lie on a cycle where each chain becomes one node, and have chains that follow something."""
    chains = _gather_chains(found)
    if not any(chain.follows for chain in chains.values()):
        return set()
    return {node for node in _on_cycles(context, chains) if chains[node].follows is not None}


def _without_passenger(context: MatchContext, candidate: Candidate) -> Candidate:
    """A candidate whose chain has no passenger that is only returned."""
    chain = candidate.chain
    if not isinstance(chain, GatherChain) or chain.passenger is None:
        return candidate
    propagation = context.propagation_of(chain.passenger.gather)
    views = tuple(node for node in chain.views if not propagation.has(node))
    alone = replace(chain, passenger=None, views=views, follows=None)
    return _candidate(context, _following(context, alone), candidate.left_out)


def _candidate(context: MatchContext, chain: GatherChain, left_out: Iterable[str]) -> Candidate:
    """A gather with its chain."""
    gathers = (node for gather in chain.collectives for node in gather.nodes)
    nodes = context.sorted([*gathers, *chain.members])
    return Candidate(chain.collective, chain, (), nodes, left_out=tuple(left_out))


_Searched = tuple[ShardRegion, list[PlacedMatmul], dict[fx.Node, Refusal]]
"""A region, those of its products that may be fused, and what `placed_matmuls` says of other matmuls."""


def _gather(
    context: MatchContext, gather: Collective, wanted: set[fx.Node], allowed: Callable[[Candidate], bool]
) -> Candidate:
    """A gather with its chain, the first that is allowed if there are several.

    What is computed of the gathered tensor is hoisted where no view of it will do.
    """
    propagation = context.propagations[gather.node]
    if isinstance(propagation, Refusal):
        return Candidate(gather, None, (propagation,), (gather.node,))
    region = ShardRegion(context, gather)
    products, missed = placed_matmuls(region)
    searched, hoisted, refused = [(region, products, missed)], list[PlacedMatmul](), dict[fx.Node, Refusal]()
    if any(user in context.ways_down for user in propagation.all_users()):
        grown, plain = ShardRegion(context, gather), {one.matmul.node for one in products}
        grown.grow()
        computed, why = placed_matmuls(grown)
        hoisted = [one for one in computed if one.matmul.node not in plain]
        searched.insert(1 if _in_rows(products) else 0, (grown, _in_rows(hoisted) if products else hoisted, why))
        refused = {**grown.refused, **why}
    late: dict[fx.Node, Refusal] = {}
    found = _with_chains(context, searched, [*products, *hoisted], wanted, late)
    first = next(found, None)
    if first is None:
        return _unfused(region, {**missed, **late}, refused)
    return first if allowed(first) else next(filter(allowed, found), first)


def _with_chains(
    context: MatchContext,
    searched: Iterable[_Searched],
    all_products: Sequence[PlacedMatmul],
    wanted: set[fx.Node],
    late: dict[fx.Node, Refusal],
) -> Iterator[Candidate]:
    """A gather with each of its chains; products that are not `wanted` elsewhere are preferred.

    Not those whose scales are gathered too late, by a gather that cannot become part of this one: they go to `late`.
    """
    for region, products, missed in searched:
        free = [one for one in products if one.matmul.node not in wanted] or products
        for chain in chains_of(region, free):
            joined = _joined(region, chain)
            for one in (joined,) if joined is chain else (joined, chain):
                followed = _following(context, one)
                scaled = followed.matmuls[0].scaled
                refusal = None if scaled is None or followed.scale_placement else region.late(scaled.given_a_scale)
                if refusal is not None:
                    late |= {matmul.node: refusal for matmul in followed.matmuls}
                else:
                    yield _candidate(context, followed, _left_out(context, followed, all_products, {**missed, **late}))


def _in_rows(products: Iterable[PlacedMatmul]) -> list[PlacedMatmul]:
    return [one for one in products if one.placement.axis == "rows"]


def _unfused(region: ShardRegion, own: Mapping[fx.Node, Refusal], refused: Mapping[fx.Node, Refusal]) -> Candidate:
    """A gather without a chain: why its `own` matmuls are not fused, and those after what is `refused`."""
    gather, sort = region.gather, region.context.sorted
    piece = own_piece(gather, region.context.propagation_of(gather), region.context.sizes)
    if piece is not None:
        refusal = Refusal(reasons.ALL_TO_ALL, f"{piece.name} is piece {piece.args[1]} of {gather.group_size}")
        return Candidate(gather, None, (refusal,), gather.results)  # what follows has other names on other ranks
    misses = [_Miss(why, (*sort(region.views_to(matmul.all_input_nodes)), matmul)) for matmul, why in own.items()]
    misses = [_named(gather, miss) for miss in (*misses, *_near_gather(region, refused))]
    misses.sort(key=_informative)
    nodes = sort([*gather.results, *misses[0].nodes])
    weights = misses[0].refusal.reason is reasons.GATHER_IS_RIGHT_OPERAND or _is_vector(gather.input)
    return Candidate(gather, None, tuple(miss.refusal for miss in misses), nodes, weights=weights)


@dataclass(frozen=True)
class _Miss:
    """A matmul that the gathered tensor reaches in a way that is not fused: why, and the nodes on the way."""

    refusal: Refusal
    nodes: tuple[fx.Node, ...] = ()


def _named(gather: Collective, miss: _Miss) -> _Miss:
    """A miss for want of pieces that were only padding is one for uneven shards."""
    cut = next((node for node in miss.nodes if _unpads(node, gather.group_size)), None)
    if cut is None or miss.refusal.reason is not reasons.PIECES_MISSING:
        return miss
    return replace(miss, refusal=Refusal(reasons.UNEVEN_SHARDS, f"{op_name(cut)} {cut.name}: {miss.refusal.facts}"))


def _unpads(node: fx.Node, ranks: int) -> bool:
    """True for picking rows of which there are as many as, padded to a multiple of the ranks, there were before."""
    picks = traits_of(node).view in (View.SLICE, View.NARROW, View.PICK)
    before, after = tensor_of(node.args[0]) if picks else None, tensor_of(node)
    if before is None or after is None or before.dim() != after.dim():
        return False
    pairs = zip(before.shape, after.shape, strict=True)
    known = [(whole, kept) for whole, kept in pairs if isinstance(whole, int) and isinstance(kept, int)]
    return any(kept < whole == -(-kept // ranks) * ranks for whole, kept in known)


def _left_out(
    context: MatchContext, chain: GatherChain, products: Iterable[PlacedMatmul], missed: Mapping[fx.Node, Refusal]
) -> tuple[str, ...]:
    """Notes on other matmuls of the gathered tensor, which the fused op returns to them unless its gather stays."""
    fused, kept = {matmul.node for matmul in chain.matmuls}, () if chain.hoist is None else chain.hoist.kept
    others = [one.matmul.node for one in products if one.matmul.node not in fused and one.matmul.node not in kept]
    shared = (reasons.GATHER_IS_RIGHT_OPERAND, reasons.ROWS_CONTRACTED, reasons.ADDMM_SCALED)
    takers = [*others, *(node for node, refusal in missed.items() if refusal.reason in shared)]
    gradients = [node.name for node in context.sorted(takers) if contracts_rows(node) and node not in kept]
    views = set(context.propagation_of(chain.collective).all_users())
    side_gathers = [
        f"{node.name}{'' if node in views else ', of what is computed from it,'} stays a matmul of its own"
        for node in others
        if not contracts_rows(node)
    ]
    known = [refusal for node, refusal in missed.items() if refusal.reason not in shared or not contracts_rows(node)]
    facts = [f"{refusal.reason.name} ({refusal.facts})" for refusal in known]
    taken = [f"the same gather serves the weight gradients {', '.join(gradients)}"]
    return (*(taken if gradients else ()), *side_gathers, *facts)


def _informative(miss: _Miss) -> int:
    """A rank for sorting misses: the most specific reason first, then those about a left operand."""
    last = (
        *(reasons.ROWS_CONTRACTED, reasons.GATHER_IS_RIGHT_OPERAND, reasons.GATHERED_SCALE),
        *(reasons.PRODUCT_GATHERED, reasons.OUTSIDE_GRAPH, reasons.NO_MATMUL),
    )
    if miss.refusal.reason in last:
        return 2 + last.index(miss.refusal.reason)
    return int(miss.refusal.reason is not reasons.QUANTIZED_AFTER_GATHER)


def _following(context: MatchContext, chain: GatherChain) -> GatherChain:
    """The chain with the communication, after its own, that it has to follow."""
    last = context.last_needed(chain.needs)
    return replace(chain, follows=context.nodes[last]) if last > context.order[chain.collective.node] else chain


def _joined(data: ShardRegion, chain: GatherChain) -> GatherChain:
    """The chain with a gather of scales that its op can take in: what is hoisted has its own from the same gather."""
    place, scaled = chain.placement, chain.matmuls[0].scaled
    if chain.hoist is not None or place.axis != "rows" or scaled is None:
        return chain
    return _with_scales(data, chain, scaled) or _with_passenger(data, chain) or chain


def _with_scales(data: ShardRegion, chain: GatherChain, scaled: ScaledOptions) -> GatherChain | None:
    """With the gather of the scales of the same shard, of rows or blocks, if the matmuls are all that use it."""
    context = data.context
    scale = context.gather_of.get(scaled.given_a_scale)
    if scale is None or scale is chain.collective or not _of_one_group(scale, chain.collective):
        return None
    region = ShardRegion(context, scale)
    if region.used_elsewhere(set(nodes_of(chain.matmuls))) or data.late(scale.source) is not None:
        return None
    placement = placed_scales(region, scale.node, region.view(scaled.given_a_scale), scaled.of_a, chain.placement)
    if not isinstance(placement, GatherPlacement):
        return None
    views = region.views_to(matmul.scaled.given_a_scale for matmul in chain.matmuls if matmul.scaled is not None)
    return replace(chain, scale=scale, scale_placement=placement, views=context.sorted([*chain.views, *views]))


def _with_passenger(data: ShardRegion, chain: GatherChain) -> GatherChain | None:
    """With a gather of one number per row, used only to scale the matmuls' results: it can travel with the data.

    The numbers come with the fused op then, so that nothing which that needs may be computed from them.
    """
    context, gather, products = data.context, chain.collective, [matmul.node for matmul in chain.matmuls]
    needed = [gather.source, *(node for matmul in chain.matmuls for node in matmul.operands)]
    multiplications = scalings(products)
    for other in context.collectives:
        followed = other.node is not gather.node and isinstance(context.propagations.get(other.node), Propagation)
        if not followed or _dtype(other.node) != torch.float32 or not _of_one_group(other, gather):
            continue
        region = ShardRegion(context, other)
        passenger = _rows_that_scale(region, chain.placement, multiplications)
        if passenger is None or any(context.depends(node, other.node) for node in needed):
            continue
        if data.late(other.source) is not None:
            continue
        views = region.views_to([passenger.end])
        if len({context.segments[node] for node in (*gather.nodes, *products, *other.nodes, *views)}) == 1:
            return replace(chain, passenger=passenger, views=context.sorted([*chain.views, *views]))
    return None


def _of_one_group(a: Collective, b: Collective) -> bool:
    return (a.group_key, a.group_size) == (b.group_key, b.group_size)


def _rows_that_scale(region: ShardRegion, data: GatherPlacement, multiplications: set[fx.Node]) -> Passenger | None:
    """A gather whose one view that is used, by `multiplications`, is one number per row of the data."""
    used = region.used_elsewhere(set())
    end, users = next(iter(used.items())) if len(used) == 1 else (None, ())
    value = tensor_of(end)
    if end is None or value is None or not compat.is_contiguous(value):
        return None
    if not all(_only_scales(multiplications, one) for one in users):
        return None
    numbers = region.view(end).reshape((product(region.context.sizes.of(value)), 1))
    if isinstance(numbers, Refusal):
        return None
    placement = placed_scales(region, end, numbers, ScalesOfA(), data)
    return Passenger(region.gather, placement, end) if isinstance(placement, GatherPlacement) else None


def _dtype(node: fx.Node | None) -> torch.dtype | None:
    value = tensor_of(node)
    return None if value is None else value.dtype


def _gather_chains(found: Mapping[fx.Node, Candidate]) -> dict[fx.Node, GatherChain]:
    """The chains of gathers, by gather."""
    return {node: candidate.chain for node, candidate in found.items() if isinstance(candidate.chain, GatherChain)}


def _on_cycles(context: MatchContext, chains: Mapping[fx.Node, GatherChain]) -> set[fx.Node]:
    """The chains, by gather, that lie on a cycle (or after one) when each becomes one node."""
    steps = steps_of(
        context.graph, *collapsed(context.graph, context.sizes, [*chains.values()]), context.order.__getitem__
    )
    return chains.keys() - {step[0] for step in steps}


def _cycles(context: MatchContext, found: dict[fx.Node, Candidate]) -> dict[fx.Node, Refusal]:
    """Gathers to leave alone because fusing them beside the others would make the graph cyclic.

    A scatter's op cannot: its result depends on all that goes into it before the fusion too.
    """
    chains = _gather_chains(found)
    dropped: dict[fx.Node, Refusal] = {}
    while True:
        stuck = _on_cycles(context, chains)
        if not stuck:
            return dropped
        last = max(stuck, key=context.order.__getitem__)
        dropped[last] = Refusal(reasons.OPERAND_DEPENDS_ON_GATHER, "through the matmul of another chain")
        del chains[last]


def _near_gather(region: ShardRegion, refused: Mapping[fx.Node, Refusal]) -> list[_Miss]:
    """Why a gather that feeds no provable matmul does not, if it reaches one at all.

    `refused` says of nodes why they cannot be computed on the shard.
    """
    context, propagation = region.context, region.context.propagation_of(region.gather)
    reached: list[_Miss] = []
    scaled: list[_Miss] = []
    for source, node in propagation.uses():
        if is_matmul(node):  # matmuls next to a view have been judged
            continue
        if _only_scales(context.scalings, node):
            scaled.append(_Miss(Refusal(reasons.GATHERED_SCALE, node.name), (node,)))
        elif way := context.ways_down.path(node, source):
            refusal = next((refused[step] for step in way if step in refused), propagation.refused.get(node))
            reached.append(_Miss(_on_the_way(way, refusal), (*context.sorted(region.views_to([source])), *way)))
    return reached or scaled[:1] or [_Miss(_goes_elsewhere(context, region.gather, propagation))]


def _goes_elsewhere(context: MatchContext, gather: Collective, propagation: Propagation) -> Refusal:
    """The users of a gathered tensor that no matmul takes, or the matmul that it comes from."""
    way = context.ways_up.path(gather.source, gather.node)
    if way and not any(map(near_miss.reduces, way)):
        return Refusal(reasons.PRODUCT_GATHERED, near_miss.names([*way[::-1], gather.node]))
    if region := next((user for source, user in propagation.uses() if multiplied_by(user, source)), None):
        return Refusal(reasons.MATMUL_IN_ANOTHER_GRAPH, f"{gather.node.name} is multiplied in {region.name}")
    users = context.sorted(user for _, user in propagation.uses())
    return Refusal(_absent(users, "output"), f"{gather.node.name}: used by {_callers(users)}")


def _absent(nodes: Sequence[fx.Node], border: str) -> reasons.Reason:
    """Why no matmul is among these users or makers of a tensor: all are in other graphs, or they are other ops."""

    def is_outside(node: fx.Node) -> bool:
        ran = node.all_input_nodes if op_name(node) == "getitem" else [node]
        return node.op == border or any(map(subgraphs_of, ran))

    return reasons.OUTSIDE_GRAPH if nodes and all(map(is_outside, nodes)) else reasons.NO_MATMUL


def _callers(nodes: Iterable[fx.Node]) -> str:
    """Ops, for people: at most three; where a graph begins and ends is said too."""
    ends = {"placeholder": "an input of the graph", "output": "what takes the graph's results"}
    found = dict.fromkeys(ends.get(node.op) or called_name(node) or node.name for node in nodes)
    names = list(found)[:3] + (["..."] if len(found) > 3 else [])
    return ", ".join(names) or "nothing"


def _only_scales(scalings: Container[fx.Node], node: fx.Node) -> bool:
    """True when a node is one of these multiplications, or only such take it, element by element."""
    stack = [node]
    while stack:
        step = stack.pop()
        if step in scalings:
            continue
        users = [user for user in step.users if not is_size(user)]
        if not users or len(step.all_input_nodes) != 1 or near_miss.reduces(step) or not near_miss.transparent(step):
            return False
        stack += users
    return True


def _on_the_way(way: Sequence[fx.Node], refusal: Refusal | None) -> Refusal:
    """Why a way from a gather to a matmul is not fused: what is known of one of its nodes, or that it computes."""
    padded = traits_of(way[0]).view is View.PAD and is_matmul(way[1])
    if padded and pads_at_end(way[0].args[1]):  # type: ignore[arg-type]
        return Refusal(reasons.MATMUL_PADDED, near_miss.names(way))
    if refusal is not None and refusal.reason is not reasons.COMPUTED_BETWEEN:
        return Refusal(refusal.reason, f"{near_miss.names(way)}; {refusal.facts}")
    quantized = any(near_miss.quantizes(step) for step in way)
    reason = reasons.QUANTIZED_AFTER_GATHER if quantized else reasons.COMPUTED_BETWEEN
    return Refusal(reason, near_miss.names(way) + (f"; {refusal.facts}" if refusal else ""))


# --- scatter side -------------------------------------------------------------------------------------------
def _scatter(context: MatchContext, scatter: Collective) -> Candidate:
    """A reduce-scatter or an all-reduce: a sum of matmuls, or why it is not seen as one."""
    region, leaves = _region(context, scatter.source)
    products = context.sorted(leaf for leaf in leaves if context.product(leaf) is not None)
    way = _way_up(context, scatter, leaves)
    chain = (
        _scatter_chain(context, scatter, region, products) if products else _near_scatter(context, scatter, leaves, way)
    )
    if isinstance(chain, Refusal):
        trimmed = chain.reason is reasons.PIECES_MISSING
        if trimmed and (pad := _padding(leaf for leaf in products if is_matmul(leaf))) is not None:
            chain = Refusal(reasons.MATMUL_PADDED, pad)
        others = context.sorted(leaves.difference(products))
        if chain.reason is reasons.SUM_HAS_OTHER_TERM and others:
            chain = Refusal(chain.reason, f"{chain.facts}; no matmul: {_callers(others)}")
        shown = [*region, *products, *scatter.nodes, *way] if chain.reason.in_scope else scatter.results
        return Candidate(
            scatter, None, (chain,), context.sorted(shown), weights=_reduces_weights(context, scatter, shown)
        )
    nodes = context.sorted([*chain.views, *nodes_of(chain.matmuls), *scatter.nodes])
    return Candidate(scatter, chain, (), nodes, weights=_reduces_weights(context, scatter, nodes))


def _reduces_weights(context: MatchContext, collective: Collective, nodes: Iterable[fx.Node]) -> bool:
    """True when the reduced tensor looks like a parameter's gradient.

    It is a vector, or each matmul that it comes from contracts over rows, and no matmul goes on with it: that would
    make it an activation, whatever its strides.
    """
    products = [node for node in nodes if is_matmul(node)]
    if _is_vector(collective.input):
        return True
    return bool(products) and all(map(contracts_rows, products)) and collective.node not in context.above_matmuls


def _is_vector(node: fx.Node | None) -> bool:
    value = tensor_of(node)
    return value is not None and value.dim() < 2


def _region(context: MatchContext, end: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """The views and sums above `end`, and the nodes (leaves) where they start."""
    region: set[fx.Node] = set()
    leaves: set[fx.Node] = set()
    stack = [end]
    while stack:
        node = stack.pop()
        if node in region or node in leaves:
            continue
        sources = [source for source in node.all_input_nodes if _holds_tensors(source)]
        follows = is_view(node) or is_sum(node)
        if follows and sources and context.product(node) is None:
            region.add(node)
            stack.extend(sources)
        else:
            leaves.add(node)
            stack.extend(source for source in [added_matrix(node)] if source is not None)
    return region, leaves


def _holds_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | tuple | list) or value is None


def _scatter_chain(
    context: MatchContext, scatter: Collective, region: set[fx.Node], products: Sequence[fx.Node]
) -> ScatterChain | Refusal:
    """Prove that the collective's input is a sum of matmuls, arranged by rank (or in any way, to be all-reduced)."""
    matmuls = _read_terms(context, products)
    if isinstance(matmuls, Refusal):
        return matmuls
    alike = _most_alike(context, matmuls)
    odd = next((one for one in matmuls if one not in alike and added_matrix(one.node) is not None), None)
    if odd is not None:  # its result has other terms of the sum in it
        return Refusal(reasons.SUM_TERMS_DISAGREE, f"{alike[0].node.name} and {odd.node.name}")
    out = value_of(alike[0].node)
    *lines, columns = context.sizes.of(out)
    rows = product(lines)
    if same(rows * columns, 0):
        return Refusal(reasons.NO_ELEMENTS, scatter.node.name)
    nodes = context.sorted([*region, *products])
    now = context.segments[scatter.node]  # a copy of a product that was changed since then is a term like any other
    sources = [one.node for one in matmuls if one in alike or context.segments[one.node] == now]
    propagation = propagate(nodes, sources_of(sources, context.sizes), context.sizes, sums=True)
    whole = propagation.maps.get(scatter.source)
    if whole is None:
        return _first_refusal(propagation, nodes, scatter)
    sum_dtype = _dtype(scatter.input)
    if sum_dtype != out.dtype and not (sum_dtype == torch.float32 and out.dtype in WIDENED):
        return Refusal(reasons.COMPUTED_BETWEEN, f"{out.dtype} summed as {sum_dtype}")
    placement = _placement(context, scatter, whole, rows, columns)
    if isinstance(placement, Refusal):
        return placement
    terms = propagation.terms[scatter.source]
    summed = tuple(replace(matmul, factor=terms.counts[matmul.node]) for matmul in alike)
    own = {matmul.node for matmul in alike}
    inside = {
        node for node in nodes if node in propagation.terms and not own.isdisjoint(propagation.terms[node].counts)
    }
    elsewhere = _outside_users(scatter, inside, alike)
    if elsewhere is not None:
        return Refusal(reasons.PRODUCT_HAS_OTHER_USERS, elsewhere)
    added = tuple(Term(node, terms.counts[node]) for node in context.sorted(terms.counts.keys() - own))
    converted = sum_dtype if sum_dtype != out.dtype else None
    return ScatterChain(scatter, summed, whole, placement, context.sorted(inside - own), converted, added, terms.factor)


def _placement(
    context: MatchContext, scatter: Collective, whole: IndexMap, rows: Size, columns: Size
) -> ScatterPlacement | Refusal | None:
    """Where the ranks' parts are in the product; None for an all-reduce, which takes its elements in any order."""
    if scatter.kind == "all_reduce":
        return incomplete(whole, rows * columns)
    blocks = _blocks_first(context, scatter, whole)
    return locate_scatter(blocks, rows, columns, scatter.group_size) if isinstance(blocks, IndexMap) else blocks


def _blocks_first(context: MatchContext, scatter: Collective, whole: IndexMap) -> IndexMap | Refusal:
    """The map of what is scattered with the ranks' blocks as its first dimension."""
    value, part = tensor_of(scatter.input), tensor_of(scatter.node)
    if value is None or part is None:
        return Refusal(reasons.SHAPE_UNKNOWN, scatter.node.name)
    sizes, dim = context.sizes.of(value), scatter.dim
    if not in_blocks(scatter, sizes, context.sizes.of(part)):
        return Refusal(
            reasons.SIZES_NOT_PROVEN, f"{list(part.shape)} is not a part of {list(sizes)} along dimension {dim}"
        )
    if dim == 0:
        return whole
    inner = quotient(sizes[dim], scatter.group_size)
    if inner is None:
        return Refusal(reasons.SIZES_NOT_PROVEN, f"{sizes[dim]} in blocks for {scatter.group_size} ranks")
    blocks = whole.reshape((*sizes[:dim], scatter.group_size, inner, *sizes[dim + 1 :]))
    if isinstance(blocks, Refusal):
        return blocks
    return blocks.permute([dim, *(axis for axis in range(len(sizes) + 1) if axis != dim)])


def _read_terms(context: MatchContext, products: Sequence[fx.Node]) -> tuple[Matmul, ...] | Refusal:
    """Read the matmuls of a sum."""
    matmuls: list[Matmul] = []
    for node in products:
        matmul = context.product(node)
        assert matmul is not None
        if isinstance(matmul, Refusal):
            return matmul
        matmuls.append(matmul)
    return tuple(matmuls)


def _most_alike(context: MatchContext, matmuls: Sequence[Matmul]) -> list[Matmul]:
    """Those that an op can add: of one form, which has the longest contraction over all. The others are added to it."""
    forms: list[list[Matmul]] = []
    for matmul in matmuls:
        own = next((form for form in forms if context.can_add(form[0], matmul)), None)
        if own is None:
            forms.append([matmul])
        else:
            own.append(matmul)
    return max(forms, key=_contracted)


def _contracted(matmuls: Sequence[Matmul]) -> int:
    """Over how much matmuls contract, as far as that is a number."""
    depths = [value.shape[-1] for value in (tensor_of(matmul.a) for matmul in matmuls) if value is not None]
    return sum(depth for depth in depths if isinstance(depth, int))


def _first_refusal(propagation: Propagation, region: Sequence[fx.Node], scatter: Collective) -> Refusal:
    refused = next((propagation.refused[node] for node in region if node in propagation.refused), None)
    return refused or Refusal(reasons.VIEW_NOT_UNDERSTOOD, f"the input of {scatter.node.name}")


def _padding(matmuls: Iterable[fx.Node]) -> str | None:
    """The padding of an operand of these matmuls, if one is padded."""
    operands = (source for matmul in matmuls for source in matmul.all_input_nodes)
    return next((node.name for node in operands if traits_of(node).view is View.PAD), None)


def _outside_users(scatter: Collective, inside: set[fx.Node], matmuls: Sequence[Matmul]) -> str | None:
    """The first use of the unreduced product that is not on the way to the collective: as another's operand, say."""
    taken = {operand: matmul.node for matmul in matmuls for operand in (matmul.a, *matmul.operands)}
    for node in sorted(inside, key=lambda member: member.name):
        outside = (user for user in node.users if user not in inside and not is_size(user))
        user = next((user for user in outside if not _takes_once(scatter, user, node)), taken.get(node))
        if user is not None:
            return f"{node.name} is used by {user.name}"
    return None


def _takes_once(scatter: Collective, user: fx.Node, node: fx.Node) -> bool:
    """True for the collective itself, if a node is what it reduces, and no other one of its tensors."""
    taken = nodes_in((user.args, user.kwargs))
    return user is (scatter.call or scatter.node) and node is scatter.input and taken.count(node) == 1


def _near_scatter(context: MatchContext, scatter: Collective, leaves: set[fx.Node], way: Sequence[fx.Node]) -> Refusal:
    """Why a reduction that no matmul feeds is not fused. An all-reduce of statistics of products is no miss."""
    statistics = scatter.kind == "all_reduce" and any(map(near_miss.reduces, way))
    if way and not statistics:
        return Refusal(reasons.COMPUTED_BETWEEN, near_miss.names(way[::-1]))
    made = context.sorted(leaves)
    if region := next(filter(_is_product_of_region, made), None):
        return Refusal(reasons.MATMUL_IN_ANOTHER_GRAPH, f"{scatter.node.name} is of a matmul in {region.name}")
    return Refusal(_absent(made, "placeholder"), f"{scatter.node.name}: made by {_callers(made)}")


def _is_product_of_region(node: fx.Node) -> bool:
    """True for a result of a higher-order op that is a matmul's in a graph which that op runs."""
    if op_name(node) != "getitem":
        return product_of(node, 0)
    region, item = node.args
    return isinstance(region, fx.Node) and isinstance(item, int) and product_of(region, item)


def _way_up(context: MatchContext, scatter: Collective, leaves: set[fx.Node]) -> list[fx.Node]:
    """The way from a leaf of the scattered sum up to a matmul; empty when there is none."""
    ways = (context.ways_to_reduced.path(leaf, scatter.node) for leaf in context.sorted(leaves))
    return next((way for way in ways if way), [])


# --- the rest -------------------------------------------------------------------------------------------------
def _other(context: MatchContext, collective: Collective) -> Candidate:
    """Collectives of other kinds, and ops that look like a collective."""
    nodes = context.sorted([collective.node, *collective.waits])
    return Candidate(collective, None, (_other_refusal(context, collective),), nodes)


def _other_refusal(context: MatchContext, collective: Collective) -> Refusal:
    name = called_name(collective.node)
    if collective.is_unused:
        return Refusal(reasons.RESULT_UNUSED, f"{describe(collective.input)} of {name}")
    if name.startswith("symm_mem.fused"):
        return Refusal(reasons.ALREADY_FUSED, name)
    op = collective_op(op_name(collective.node))
    does = name if op is None else op.kind
    if not any(word in does for word in ("gather", "reduce_scatter", "reducescatter", "all_reduce", "allreduce")):
        return Refusal(reasons.OTHER_COLLECTIVE, name)
    reaches = _results_reach_matmul if "gather" in does else _inputs_reach_matmul
    reached = reaches(context, collective.node)
    known = op is not None and tensor_of(collective.node) is not None
    facts = f"{name} makes {describe(collective.node)} of {describe(collective.input)}" if known else name
    if (group := unknown_group(collective.call or collective.node)) is not None:
        facts = (
            f"{name} over {group!r}, which no process group here is called: register it with groups={{{group!r}: ...}}"
        )
    return Refusal(reasons.COLLECTIVE_NOT_UNDERSTOOD if reached else reasons.NO_MATMUL, facts)


def _results_reach_matmul(context: MatchContext, own: fx.Node) -> bool:
    """True when what an op returns, or what it writes to, leads to a matmul's left operand."""
    results = [own, *(user for user in own.users if op_name(user) == "getitem")]
    written = own.all_input_nodes if mutates(own) else []
    later = [(source, user) for source in written for user in source.users if context.order[user] > context.order[own]]
    uses = [(result, user) for result in results for user in result.users] + later
    return any(context.ways_down.path(user, source) for source, user in uses)


def _inputs_reach_matmul(context: MatchContext, own: fx.Node) -> bool:
    """True when a matmul leads to what an op reads."""
    return any(context.ways_up.path(source, own) for source in own.all_input_nodes)
