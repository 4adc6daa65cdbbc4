"""Find all-reduces of which a rank uses its own part alone: ranks that all do so can reduce-scatter. Pure.

    x → all_reduce → wait → view* → slice → …       where the slice is part r of R equal ones, on rank r of R
    x → reduce_scatter → wait → view → …            gives the same, if all ranks do so

A part is a run of elements in the order of the sum, as a reduce-scatter along the first dimension gives it to a rank.
Each rank's graph has the place of the slice as a constant, and says nothing of other ranks. So it is a deviation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from asynctp_passes.ir.calls import Collective
from asynctp_passes.ir.collectives import rank_of
from asynctp_passes.ir.nodes import is_size, mutates, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Size, express, product, quotient, same
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import arranged, incomplete, locate_scatter
from asynctp_passes.layout.propagation import propagate, sources_of, views_of
from asynctp_passes.matching.chains import Candidate, OwnPart, ScatterChain
from asynctp_passes.matching.match_context import MatchContext
from asynctp_passes.ops.checks import REDUCE_OPS
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import symbolic_sizes

__all__ = ["own_part", "scattered"]


def own_part(context: MatchContext, collective: Collective) -> OwnPart | None:
    """The views of a sum that hold this rank's part of it; None where anything else of it is used."""
    node, ranks = collective.node, collective.group_size
    if collective.kind != "all_reduce" or collective.call is not None or mutates(node) or ranks < 2:
        return None
    whole, rank = tensor_of(node), rank_of(collective)
    if collective.reduce_op not in REDUCE_OPS or whole is None or not symbolic_sizes.is_contiguous(whole):
        return None
    count = quotient(product(context.sizes.of(whole)), ranks)
    if rank is None or count is None or same(count, 0):
        return None
    maps = propagate(context.sorted(views_of([node])), sources_of([node], context.sizes), context.sizes)
    views, ends = dict.fromkeys(collective.results), dict[fx.Node, None]()
    stack = list(views)
    while stack:
        source = stack.pop()
        for user in source.users:
            if user in views or user in ends or (is_size(user) and source in collective.results):
                continue
            if not maps.has(user):
                return None
            if user in maps.maps and _is_part(user, maps.maps[user], collective, count * rank, count):
                ends[user] = None
            else:
                views[user] = None
                stack.append(user)
    together = len({context.segments[one] for one in (*views, *ends)}) == 1
    if not ends or not together or _sees_storage(ends) or not _is_expressible(context, collective, ends):
        return None
    return OwnPart(rank, context.sorted(views.keys() - set(collective.results)), context.sorted(ends))


def scattered(context: MatchContext, candidate: Candidate, part: OwnPart) -> Candidate | None:
    """The candidate of an all-reduced sum of matmuls that scatters it instead; None where no parts of rows or columns.

    Its ranks use their `part` of the sum alone.
    """
    chain = candidate.chain
    if not isinstance(chain, ScatterChain) or chain.joined:
        return None
    *lines, columns = context.sizes.of(value_of(chain.matmuls[0].node))
    placement = locate_scatter(chain.way, product(lines), columns, candidate.collective.group_size)
    if isinstance(placement, Refusal):
        return None
    nodes = context.sorted([*candidate.nodes, *part.nodes])
    chain = replace(chain, placement=placement, own_part=part)
    return replace(candidate, chain=chain, own_part=part, nodes=nodes)


def _is_part(node: fx.Node, index_map: IndexMap, collective: Collective, start: Size, count: Size) -> bool:
    """True for `count` elements of the sum in their order, from `start` on, that lie so in memory, too."""
    value, from_start = value_of(node), replace(index_map, offset=0)
    if not same(index_map.offset, start) or incomplete(from_start, count) is not None:
        return False
    alike = value.dtype == value_of(collective.node).dtype and symbolic_sizes.is_contiguous(value)
    return alike and arranged(from_start).is_reshape


def _sees_storage(nodes: Iterable[fx.Node]) -> bool:
    """True where an op says itself where in memory it takes elements from."""
    return any(traits_of(node).view is View.OPAQUE for node in views_of(nodes))


def _is_expressible(context: MatchContext, collective: Collective, nodes: Iterable[fx.Node]) -> bool:
    """True where the sizes of tensors follow from what is reduced."""
    sources = context.sizes.sources([collective.source])
    sizes = (size for node in nodes for size in context.sizes.of(value_of(node)))
    return all(express(size, sources) is not None for size in sizes)
