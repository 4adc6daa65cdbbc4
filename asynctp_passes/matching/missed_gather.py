"""Say why a gather has no chain: the matmuls that its result reaches all the same, and what is on the way. Pure.

A gather may also be an all-to-all, `shard → all_gather → wait → view* → split → this rank's piece`. DTensor moves a
sharding to another dimension so on CPU, where gloo has no all-to-all. A program may also take a piece that is the same
on all ranks, and one rank's graph does not show the difference. So such a gather counts as an all-to-all on CPU alone,
where nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.collectives import rank_of
from asynctp_passes.ir.crossings import multiplied_by
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import first_tensor, is_size, op_name, tensor_of, traits_of, users_past, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.sizes import Sizes, product, same
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import RankPlacement, locate_ranks
from asynctp_passes.layout.propagation import Propagation, is_view, pads_at_end, views_of
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.chains import Candidate
from asynctp_passes.matching.cut_rows import all_parts, cut_dimension, find_ranges
from asynctp_passes.matching.match_context import MatchContext
from asynctp_passes.matching.shard_region import ShardRegion
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import symbolic_sizes


def missed_gather(
    region: ShardRegion,
    own: Mapping[fx.Node, Refusal],
    refused: Mapping[fx.Node, Refusal],
    computed: Sequence[Propagation],
) -> Candidate:
    """A gather without a chain: why its `own` matmuls are not fused, and those after what is `refused`.

    computed: Of what ranks can compute of the gathered rows.
    """
    gather, sort = region.gather, region.context.sorted
    piece = _own_piece(gather, region.context.propagation_of(gather), region.context.sizes)
    if piece is not None:
        refusal = Refusal(reasons.ALL_TO_ALL, f"{piece.name} is piece {piece.args[1]} of {gather.group_size}")
        return Candidate(gather, None, (refusal,), gather.results)  # what follows has other names on other ranks
    misses = [_Miss(why, (*sort(region.views_to(matmul.all_input_nodes)), matmul)) for matmul, why in own.items()]
    misses = [_named(gather, region, miss) for miss in (*misses, *_near_gather(region, refused))]
    missing = [miss for miss in misses if miss.refusal.reason is reasons.PIECES_MISSING]
    if missing and (parts := _in_all_parts(region, computed)):
        misses = [replace(miss, refusal=parts) if miss in missing else miss for miss in misses]
    misses.sort(key=lambda miss: miss.refusal.reason.rank)
    nodes = sort([*gather.results, *misses[0].nodes])
    given = _given(gather.source)
    may_be, weights = given is not None and misses[0].refusal not in own.values(), ""
    if near_miss.is_vector(gather.input):
        weights = "a vector"
    elif misses[0].refusal.reason is reasons.GATHER_IS_RIGHT_OPERAND:
        weights = f"the right operand of {misses[0].nodes[-1].name}"
    elif given is not None and (picks := _computes_with_rows(misses[0].nodes)):
        weights = f"{picks} picks rows of an input of the graph"
    elif may_be and given in region.context.parameters:
        weights = f"{nodes[-1].name} is of a parameter"
    refusals = tuple(miss.refusal for miss in misses)
    return Candidate(gather, None, refusals, nodes, weights=weights, may_be_weights=may_be)


def _computes_with_rows(way: Sequence[fx.Node]) -> str:
    """The op by which rows of a matrix are looked up on a way, if more is computed before they are multiplied."""
    tables = {node.name: tensor_of(first_tensor(node)) for node in way if traits_of(node).view is View.PICK}
    looked_up = next((name for name, value in tables.items() if value is not None and value.dim() == 2), "")
    return "" if all(is_view(node) or is_matmul(node) for node in way) else looked_up


def _given(node: fx.Node) -> fx.Node | None:
    """The graph input that a node is a view of, or picks rows of, in any dtype; None if there is none."""
    while node.op != "placeholder":
        source = first_tensor(node)
        if source is None or not is_view(node):
            return None
        node = source
    return node


@dataclass(frozen=True)
class _Miss:
    """A matmul that the gathered tensor reaches in a way that is not fused: why, and the nodes on the way."""

    refusal: Refusal
    nodes: tuple[fx.Node, ...] = ()


def _named(gather: Collective, region: ShardRegion, miss: _Miss) -> _Miss:
    """A miss for want of pieces that were only padding, behind all ranks' pieces, is one for uneven shards.

    Not where other elements are dropped, too: without the padding these would still be missing.
    """
    maps, sizes = region.context.propagation_of(gather).maps, region.context.sizes
    cuts = [node for node in miss.nodes if node.args and node.args[0] in maps]
    cut = next((node for node in cuts if _cuts_last_shard(node, gather, maps[node.args[0]], sizes)), None)  # type: ignore
    is_all = cut is None or not any(node is not cut and _drops(node, sizes) for node in miss.nodes)
    if cut is None or not is_all or miss.refusal.reason is not reasons.PIECES_MISSING:
        return miss
    return replace(miss, refusal=Refusal(reasons.UNEVEN_SHARDS, f"{op_name(cut)} {cut.name}: {miss.refusal.facts}"))


def _drops(node: fx.Node, sizes: Sizes) -> bool:
    """True for a view of some elements of a tensor."""
    before, after = tensor_of(node.args[0]) if node.args else None, tensor_of(node)
    if not is_view(node) or before is None or after is None:
        return False
    return not same(product(sizes.of(before)), product(sizes.of(after)))


def _cuts_last_shard(node: fx.Node, gather: Collective, whole: IndexMap, sizes: Sizes) -> bool:
    """True for cutting few last indices off the dimension along which the ranks' shards are."""
    found = locate_ranks(whole, product(sizes.of(value_of(gather.input))), gather.group_size)
    axis = cut_dimension(node, gather.group_size, sizes)
    return axis is not None and isinstance(found, RankPlacement) and found.dim == axis


def _near_gather(region: ShardRegion, refused: Mapping[fx.Node, Refusal]) -> list[_Miss]:
    """Why a gather that feeds no provable matmul does not, if it reaches one at all.

    `refused` says of nodes why they cannot be computed on the shard.
    """
    context, propagation = region.context, region.context.propagation_of(region.gather)
    reached, scaled, mixed = list[_Miss](), list[_Miss](), list[_Miss]()
    uses = [(source, past) for source, user in propagation.uses() for past in users_past(user, source)]
    for source, node in uses:
        if is_matmul(node):  # matmuls next to a view have been judged
            continue
        if near_miss.only_scales(context.scalings, node):
            scaled.append(_Miss(Refusal(reasons.GATHERED_SCALE, node.name), (node,)))
        elif way := context.rows_down.path(node, source) if near_miss.carries(node, source) else []:
            refusal = next((refused[step] for step in way if step in refused), propagation.refused.get(node))
            others = near_miss.by_others(way)
            why = Refusal(reasons.NOT_ROWWISE, f"{near_miss.names(way)}; {others}") if others else None
            found = _Miss(why or _on_the_way(way, refusal), (*context.sorted(region.views_to([source])), *way))
            (mixed if others else reached).append(found)
    return reached or scaled[:1] or mixed or [_Miss(_goes_elsewhere(context, region.gather, propagation))]


def _goes_elsewhere(context: MatchContext, gather: Collective, propagation: Propagation) -> Refusal:
    """The users of a gathered tensor that no matmul takes, or the matmul that it comes from."""
    way = context.ways_up.path(gather.source, gather.node)
    if way and not any(map(near_miss.reduces, way)):
        return Refusal(reasons.PRODUCT_GATHERED, near_miss.names([*way[::-1], gather.node]))
    if region := next((user for source, user in propagation.uses() if multiplied_by(user, source)), None):
        return Refusal(reasons.MATMUL_IN_ANOTHER_GRAPH, f"{gather.node.name} is multiplied in {region.name}")
    users = context.sorted(user for _, user in propagation.uses())
    return Refusal(near_miss.absent(users, "output"), f"{gather.node.name}: used by {near_miss.callers(users)}")


def _on_the_way(way: Sequence[fx.Node], refusal: Refusal | None) -> Refusal:
    """Why a way from a gather to a matmul is not fused: what is known of one of its nodes, or that it computes."""
    if waits := near_miss.ordered_on(way):
        return Refusal(reasons.SEVERAL_STREAMS, f"{waits} before {way[-1].name}")
    padded = traits_of(way[0]).view is View.PAD and is_matmul(way[1])
    if padded and pads_at_end(amounts := way[0].args[1]) and all(isinstance(one, int) for one in amounts):  # type: ignore
        return Refusal(reasons.MATMUL_PADDED, near_miss.names(way))
    if refusal is not None and refusal.reason is not reasons.COMPUTED_BETWEEN:
        return Refusal(refusal.reason, f"{near_miss.names(way)}; {refusal.facts}")
    quantized = any(near_miss.quantizes(step) for step in way)
    reason = reasons.QUANTIZED_AFTER_GATHER if quantized else reasons.COMPUTED_BETWEEN
    return Refusal(reason, near_miss.names(way) + (f"; {refusal.facts}" if refusal else ""))


# --- parts that are all of a gathered tensor -------------------------------------------------------------------
def _in_all_parts(region: ShardRegion, computed: Sequence[Propagation]) -> Refusal | None:
    """That a tensor is taken in parts which are all of it: one that is followed, or of what is `computed`.

    No fused op multiplies chunks by one weight: it would make the result of all chunks at once, which they are to save.
    Ranges of what is computed would be fused if that were gathered.
    """
    own, sizes = region.context.propagation_of(region.gather), region.context.sizes
    ranks = region.gather.group_size
    for propagation in (own, *computed):
        for whole, parts in all_parts(propagation, ranks, sizes):
            shown = [f"{part.steps[-1].name} [{part.start}, {part.end})" for part in parts]
            more = f" and {len(shown) - 3} more" if shown[3:] else ""
            before = propagation is not own and any(True for _ in find_ranges(propagation, ranks, sizes))
            reason = reasons.COMPUTED_BETWEEN if before else reasons.TAKEN_IN_PARTS
            return Refusal(reason, f"of {whole.name}: {', '.join(shown[:3])}{more}")
    return None


# --- all-to-alls -----------------------------------------------------------------------------------------------
def _own_piece(gather: Collective, propagation: Propagation, sizes: Sizes) -> fx.Node | None:
    """The piece that is all of a gathered tensor that this rank uses, where the gather stands for an all-to-all."""
    rank = rank_of(gather)
    if rank is None or value_of(gather.node).device.type != "cpu":
        return None
    splits = (node for node in propagation.pieces if traits_of(node).view is View.SPLIT)
    pieces = (_only_piece(node) for node in splits if _cuts_every_shard(node, gather, propagation, sizes))
    own = next((piece for piece in pieces if piece is not None and piece.args[1] == rank), None)
    if own is None:
        return None
    copies = (traits_of(user).view is View.SAME and traits_of(user).copies for user in own.users if not is_size(user))
    if not (symbolic_sizes.is_contiguous(value_of(own)) or all(copies)):  # DTensor returns it so, or a copy
        return None
    kept = {own, *views_of([own])}
    return own if all(source in kept for source, _ in propagation.uses()) else None


def _cuts_every_shard(split: fx.Node, gather: Collective, propagation: Propagation, sizes: Sizes) -> bool:
    """True for a split of all that is gathered, across the shards, into one equal piece for each rank."""
    whole, pieces = split.args[0], split.meta["val"]
    block = product(sizes.of(value_of(gather.input)))
    found = locate_ranks(propagation.maps[whole], block, gather.group_size)  # type: ignore[index]
    if not isinstance(found, RankPlacement) or len(pieces) != gather.group_size:
        return False
    before, after = sizes.of(value_of(whole)), [sizes.of(piece) for piece in pieces]
    cut = [axis for axis, size in enumerate(before) if not same(size, after[0][axis])]
    equal = all(same(a, b) for other in after[1:] for a, b in zip(after[0], other, strict=True))
    return equal and len(cut) == 1 and cut[0] != found.dim


def _only_piece(split: fx.Node) -> fx.Node | None:
    """The one piece of a split that is taken."""
    items = [user for user in split.users if op_name(user) == "getitem"]
    taken = [item for item in items if item.users]
    return taken[0] if len(taken) == 1 and len(items) == len(split.users) else None
