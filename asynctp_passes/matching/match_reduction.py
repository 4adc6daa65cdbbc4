"""Match a reduction: prove that it reduces a sum of matmuls, arranged by rank, or say why not. Pure.

`find` shows the form. Rows of zeros may pad the end of the sum before its reduce-scatter (`padding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.crossings import product_of
from asynctp_passes.ir.matmuls import added_matrix, contracts_rows, is_matmul
from asynctp_passes.ir.nodes import (
    dtype_of,
    handed_on_by,
    is_number,
    is_size,
    nodes_in,
    op_name,
    tensor_of,
    traits_of,
    value_of,
)
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.operations import Collective, Matmul, nodes_of
from asynctp_passes.ir.sizes import Size, product, quotient, same
from asynctp_passes.ir.traversal import phase_of
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import ScatterPlacement, incomplete, locate_scatter
from asynctp_passes.layout.propagation import is_sum, is_view, propagate, sources_of, views_of
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.chains import Candidate, ScatterChain, Term
from asynctp_passes.matching.cut_rows import held
from asynctp_passes.matching.match_context import MatchContext, in_blocks
from asynctp_passes.matching.padding import Padding, find_padding, gathers_by_sum
from asynctp_passes.ops.checks import WIDENED
from asynctp_passes.reasons import Refusal


def match_reduction(context: MatchContext, scatter: Collective) -> Candidate:
    """A reduce-scatter or an all-reduce: a sum of matmuls, or why it is not seen as one."""
    padding = find_padding(context, scatter.source) if scatter.kind == "reduce_scatter" else None
    region, leaves = _region(context, scatter.source if padding is None else padding.source)
    matmul_nodes = context.sorted(leaf for leaf in leaves if context.matmul_of(leaf) is not None)
    way = _way_up(context, scatter, leaves)
    statistics = _is_of_statistics(scatter, [*region, *way])
    looked_up = {node for node in region if traits_of(node).view is View.PICK}  # the table may come from anywhere
    chain = (
        _scatter_chain(context, scatter, region, matmul_nodes, padding)
        if matmul_nodes and not statistics
        else _near_scatter(context, scatter, looked_up or leaves, [] if statistics else way)
    )
    if isinstance(chain, Refusal):
        operands = (source for leaf in matmul_nodes if is_matmul(leaf) for source in leaf.all_input_nodes)
        padded = next((one.name for one in operands if traits_of(one).view is View.PAD), None)
        if chain.reason is reasons.PIECES_MISSING and padded is not None:
            chain = Refusal(reasons.MATMUL_PADDED, padded)
        if scatter.kind == "all_reduce" and chain.reason.in_scope:
            parts = (node for node in context.sorted(region) if gathers_by_sum(context, node, scatter.group_size))
            if (part := next(parts, None)) is not None:
                facts = f"{part.name} puts a part among zeros, so that the sum gathers the parts of all ranks"
                chain = Refusal(reasons.VIEW_NOT_UNDERSTOOD, facts)
        backward = phase_of(context.graph) == "backward"
        slices = scatter.kind == "reduce_scatter" and any(traits_of(node).view is View.WRITE for node in region)
        if chain.reason is reasons.VIEW_NOT_UNDERSTOOD and slices and backward:
            chain = Refusal(chain.reason, f"{chain.facts}: where the program takes a slice, gather that by itself")
        others = context.sorted(leaves.difference(matmul_nodes))
        if chain.reason is reasons.SUM_HAS_OTHER_TERM and others:
            chain = Refusal(chain.reason, f"{chain.facts}; no matmul: {near_miss.callers(others)}")
        shown = [*region, *matmul_nodes, *scatter.nodes, *way] if chain.reason.in_scope else scatter.results
        gradient = backward and not context.parameters.isdisjoint(views_of(scatter.results))
        weights = _weights_of(context, scatter, shown, gradient)
        return Candidate(scatter, None, (chain,), context.sorted(shown), weights=weights, may_be_weights=gradient)
    nodes = context.sorted([*chain.views, *nodes_of(chain.matmuls), *scatter.nodes])
    return Candidate(scatter, chain, (), nodes, weights=_weights_of(context, scatter, nodes))


def _scatter_chain(
    context: MatchContext,
    scatter: Collective,
    region: set[fx.Node],
    matmul_nodes: Sequence[fx.Node],
    padding: Padding | None,
) -> ScatterChain | Refusal:
    """Prove that the collective's input is a sum of matmuls, arranged by rank (or in any way, to be all-reduced).

    With a `padding`, the tensor that is padded has to be such a sum, in the order of the matmuls' results.
    """
    read = [context.matmul_of(node) for node in matmul_nodes]
    if (unread := next((one for one in read if isinstance(one, Refusal)), None)) is not None:
        return unread
    matmuls = [one for one in read if isinstance(one, Matmul)]
    alike = _most_alike(context, matmuls)
    out = value_of(alike[0].node)
    *lines, columns = context.sizes.of(out)
    rows = product(lines)
    if same(rows * columns, 0):
        return Refusal(reasons.NO_ELEMENTS, scatter.node.name)
    nodes = context.sorted([*region, *matmul_nodes])
    now = context.segments[scatter.node]  # a copy of a product that was changed since then is a term like any other
    sources = [one.node for one in matmuls if one in alike or context.segments[one.node] == now]
    propagation = propagate(nodes, sources_of(sources, context.sizes), context.sizes, sums=True)
    end = scatter.source if padding is None else padding.source
    index_map = propagation.maps.get(end)
    others = [one for one in matmuls if one not in alike and added_matrix(one.node) is not None]  # with other terms
    odd = Refusal(reasons.SUM_TERMS_DISAGREE, f"{alike[0].node.name} and {others[0].node.name}") if others else None
    if index_map is None:
        unknown = Refusal(reasons.VIEW_NOT_UNDERSTOOD, f"the input of {scatter.node.name}")
        refusal = next((propagation.refused[node] for node in nodes if node in propagation.refused), unknown)
        if refusal.reason is not reasons.TAKEN_IN_PARTS:
            return odd or refusal
        weights = {held(one.b, context.sizes) for one in matmuls}
        return Refusal(reasons.PRODUCTS_JOINED, refusal.facts) if len(weights) == len(matmuls) else refusal
    if odd is not None:
        return odd
    sum_dtype = dtype_of(scatter.input)
    if sum_dtype != out.dtype and not (sum_dtype == torch.float32 and out.dtype in WIDENED):
        return Refusal(reasons.COMPUTED_BETWEEN, f"{out.dtype} summed as {sum_dtype}")
    if padding is not None:
        is_product = index_map == IndexMap.identity(padding.before) and same(padding.before[-1], columns)
        if not is_product or not same(product(padding.before[:-1]), rows):
            return Refusal(reasons.VIEW_NOT_UNDERSTOOD, f"{padding.nodes[0].name} pads a rearranged or cut product")
        if any(one.scaled is not None and one.scaled.of_a.rows > 1 for one in alike):
            return Refusal(reasons.SCALES_BLOCKWISE, f"{padding.nodes[0].name} pads what has scales of 128 rows")
        index_map, rows = padding.way, padding.rows
    placement = _placement(context, scatter, index_map, rows, columns)
    if isinstance(placement, Refusal):
        return placement
    if padding is not None and not (placement and padding.is_in_blocks(placement, scatter.group_size)):
        return Refusal(reasons.UNEVEN_SHARDS, f"{padding.nodes[0].name} pads another dimension than ranks divide")
    terms = propagation.terms[end]
    summed = tuple(replace(matmul, factor=terms.counts[matmul.node]) for matmul in alike)
    own = {matmul.node for matmul in alike}
    followed = (node for node in nodes if node in propagation.terms)
    inside = {node for node in followed if not own.isdisjoint(propagation.terms[node].counts)}
    inside.update(() if padding is None else padding.nodes)
    elsewhere = _outside_users(scatter, inside, alike)
    if elsewhere is not None:
        return Refusal(reasons.PRODUCT_HAS_OTHER_USERS, elsewhere)
    added = tuple(Term(node, terms.counts[node]) for node in context.sorted(terms.counts.keys() - own))
    converted = sum_dtype if sum_dtype != out.dtype else None
    how = (index_map, placement, context.sorted(inside - own), converted, added, terms.factor)
    return ScatterChain(scatter, summed, *how, padding=padding)


def _region(context: MatchContext, end: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """The views and sums above `end`, and the nodes (leaves) where they start."""
    region: set[fx.Node] = set()
    leaves: set[fx.Node] = set()
    stack = [end]
    while stack:
        node = stack.pop()
        if node in region or node in leaves:
            continue
        sources = [source for source in node.all_input_nodes if not is_number(source)]
        sources = sources[:1] if traits_of(node).view is View.PICK else sources
        follows = (is_view(node) or is_sum(node)) and handed_on_by(node) is None
        if follows and sources and context.matmul_of(node) is None:
            region.add(node)
            stack.extend(sources)
        else:
            leaves.add(node)
            stack.extend(source for source in [added_matrix(node)] if source is not None)
    return region, leaves


def _placement(
    context: MatchContext, scatter: Collective, index_map: IndexMap, rows: Size, columns: Size
) -> ScatterPlacement | Refusal | None:
    """Where the ranks' parts are in the product; None for an all-reduce, which takes its elements in any order."""
    if scatter.kind == "all_reduce":
        return incomplete(index_map, rows * columns)
    blocks = _blocks_first(context, scatter, index_map)
    return locate_scatter(blocks, rows, columns, scatter.group_size) if isinstance(blocks, IndexMap) else blocks


def _blocks_first(context: MatchContext, scatter: Collective, index_map: IndexMap) -> IndexMap | Refusal:
    """The map of what is scattered with the ranks' blocks as its first dimension."""
    value, part = tensor_of(scatter.input), tensor_of(scatter.node)
    if value is None or part is None:
        return Refusal(reasons.SHAPE_UNKNOWN, scatter.node.name)
    sizes, dim = context.sizes.of(value), scatter.dim
    if not in_blocks(scatter, sizes, context.sizes.of(part)):
        facts = f"{list(part.shape)} is not a part of {list(sizes)} along dimension {dim}"
        return Refusal(reasons.SIZES_NOT_PROVEN, facts)
    if dim == 0:
        return index_map
    inner = quotient(sizes[dim], scatter.group_size)
    if inner is None:
        return Refusal(reasons.SIZES_NOT_PROVEN, f"{sizes[dim]} in blocks for {scatter.group_size} ranks")
    blocks = index_map.reshape((*sizes[:dim], scatter.group_size, inner, *sizes[dim + 1 :]))
    if isinstance(blocks, Refusal):
        return blocks
    return blocks.permute([dim, *(axis for axis in range(len(sizes) + 1) if axis != dim)])


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


def _weights_of(context: MatchContext, one: Collective, nodes: Iterable[fx.Node], gradient: bool = False) -> str:
    """The evidence that the reduced tensor is a parameter's gradient; empty without any.

    It is a vector, or each matmul that it comes from contracts over rows, and no matmul goes on with it: that would
    make it an activation, whatever its strides. Or it is returned as a `gradient`.
    """
    matmul_nodes = context.sorted(filter(is_matmul, nodes))
    if near_miss.is_vector(one.input):
        return "a vector"
    if gradient:
        return f"{one.node.name} is returned as a parameter's gradient"
    if not matmul_nodes or not all(map(contracts_rows, matmul_nodes)) or one.node in context.above_matmuls:
        return ""
    names = ", ".join(node.name for node in matmul_nodes)
    return f"by strides, the left operand of {names} is transposed, and no matmul follows"


def _near_scatter(context: MatchContext, scatter: Collective, leaves: set[fx.Node], way: Sequence[fx.Node]) -> Refusal:
    """Why a reduction that no matmul feeds is not fused."""
    if way:
        if waits := near_miss.ordered_on(way):
            return Refusal(reasons.SEVERAL_STREAMS, f"{waits} behind {way[-1].name}")
        if others := near_miss.by_others(way):
            return Refusal(reasons.NOT_ROWWISE, f"{near_miss.names(way[::-1])}; {others}")
        return Refusal(reasons.COMPUTED_BETWEEN, near_miss.names(way[::-1]) + near_miss.unknown(way))
    made = context.sorted(leaves)
    if region := next(filter(_is_product_of_region, made), None):
        return Refusal(reasons.MATMUL_IN_ANOTHER_GRAPH, f"{scatter.node.name} is of a matmul in {region.name}")
    return Refusal(near_miss.absent(made, "placeholder"), f"{scatter.node.name}: made by {near_miss.callers(made)}")


def _is_of_statistics(scatter: Collective, nodes: Iterable[fx.Node]) -> bool:
    """True for an all-reduce of statistics of matmuls' results, or of one number picked of each row: that is no miss.

    So are the maxima, the sums and the targets' logits of a cross-entropy over a sharded vocabulary.
    """
    taken = (near_miss.reduces(node) or near_miss.picks_one_a_row(node) for node in nodes)
    return scatter.kind == "all_reduce" and any(taken)


def _is_product_of_region(node: fx.Node) -> bool:
    """True for a result of a higher-order op that is a matmul's in a graph which that op runs."""
    if op_name(node) != "getitem":
        return product_of(node, 0)
    region, item = node.args
    return isinstance(region, fx.Node) and isinstance(item, int) and product_of(region, item)


def _way_up(context: MatchContext, scatter: Collective, leaves: set[fx.Node]) -> list[fx.Node]:
    """The way from a leaf of the scattered sum up to a matmul; empty when there is none.

    None is by other ops than row-wise ones in a backward, where no matmul goes on with the sum: that is of gradients.
    """
    ways = (context.rows_up.path(leaf, scatter.node) for leaf in context.sorted(leaves))
    found = [way for way in ways if way]
    if phase_of(context.graph) == "backward" and scatter.node not in context.above_matmuls:
        found = [way for way in found if not near_miss.by_others(way)]
    return min(found, key=lambda way: bool(near_miss.by_others(way)), default=[])
