"""Find all-reduces whose rank uses only its own part of the result: they can be reduce-scatters. Pure.

    x → all_reduce → wait → {view, pointwise op}* → slice → …       the slice is part r of R equal ones on rank r of R
    x → reduce_scatter → wait → …                                   gives the same, if all ranks do so

A part is a run of elements in the order of the sum, as a reduce-scatter along the first dimension gives it to a rank.
Each rank's graph has the place of the slice as a constant, and says nothing of other ranks. So it is a deviation.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from asynctp_passes.ir.collectives import rank_of
from asynctp_passes.ir.nodes import is_pointwise, is_random, is_size, mutates, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.sizes import Size, express, product, quotient, same, same_sizes
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import arranged, incomplete, locate_scatter
from asynctp_passes.layout.propagation import propagate, views_of
from asynctp_passes.matching.chains import Candidate, OwnPart, ScatterChain
from asynctp_passes.matching.match_context import MatchContext
from asynctp_passes.ops.checks import REDUCE_OPS
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import symbolic_sizes


def own_part(context: MatchContext, collective: Collective) -> OwnPart | None:
    """This rank's part of a sum, if the rank uses it alone; None where it uses any other element.

    Pointwise ops may come before the part is taken: of their results elements are in the places of those they are of.
    """
    node, ranks = collective.node, collective.group_size
    if collective.kind != "all_reduce" or collective.call is not None or mutates(node) or ranks < 2:
        return None
    whole, rank = tensor_of(node), rank_of(collective)
    if collective.reduce_op not in REDUCE_OPS or whole is None or not symbolic_sizes.is_contiguous(whole):
        return None
    sizes = context.sizes.of(whole)
    count = quotient(product(sizes), ranks)
    if rank is None or count is None or same(count, 0):
        return None
    rows = quotient(sizes[0], ranks) if sizes else None
    part = _Part(context, collective, count * rank, count)
    if not part.is_all(IndexMap.identity(sizes)) or not part.taken:
        return None
    shape = (count,) if rows is None else (rows, *sizes[1:])
    views = context.sorted(part.views.keys() - set(collective.results))
    found = OwnPart(rank, shape, context.sorted(part.ends), views, part.by_place)
    sources = context.sizes.sources([collective.source])
    shapes = [shape, *(context.sizes.of(value_of(end)) for end in (*found.ends, node))]
    return found if all(express(size, sources) is not None for shape in shapes for size in shape) else None


class _Part:
    """A search for all that uses a sum: from node to node, until these are of a rank's part alone.

    `taken` tells that there are such nodes. `ends`, `views` and `by_place` are those of `OwnPart`.
    """

    def __init__(self, context: MatchContext, collective: Collective, start: Size, count: Size) -> None:
        self.taken = self.by_place = False
        self.ends: dict[fx.Node, None] = {}
        self.views: dict[fx.Node, None] = {}
        self._context, self._collective, self._start, self._count = context, collective, start, count
        self._computed: dict[fx.Node, IndexMap] = {}

    def is_all(self, index_map: IndexMap) -> bool:
        """Whether the rank uses nothing else of the sum, which has this map."""
        source = self._collective.node
        if not self._follows(source, index_map):
            return False
        done: set[fx.Node] = set()
        while left := [node for node in self._computed if node not in done]:
            done.update(left)
            if not all(self._follows(node, self._computed[node]) for node in left):
                return False
        return True

    def _follows(self, source: fx.Node, index_map: IndexMap) -> bool:
        """Whether all uses of the sum, or of what a pointwise op makes of it, are of the part, or computed from it."""
        context, own = self._context, self._collective
        maps = propagate(context.sorted(views_of([source])), {source: index_map}, context.sizes)
        stack, seen = [source], {source}
        while stack:
            node = stack.pop()
            for user in node.users:
                if user in seen or (is_size(user) and node in own.results):
                    continue
                if context.segments[user] != context.segments[own.node]:
                    return False
                if maps.has(user):
                    seen.add(user)
                    if not (user in maps.maps and self._takes(user, maps.maps[user], source is own.node)):
                        stack.append(user)
                        self.views |= {user: None} if source is own.node else {}
                    elif any(traits_of(one).view is View.OPAQUE for one in views_of([user])):
                        return False  # it says itself where in memory it takes elements from
                elif node not in maps.maps or not self._computes(user, node, maps.maps[node]):
                    return False
        return True

    def _takes(self, node: fx.Node, index_map: IndexMap, of_sum: bool) -> bool:
        """Whether a view has the part's elements, and no others: in any order, but then by their places."""
        from_start = replace(index_map, offset=0)
        if not same(index_map.offset, self._start) or incomplete(from_start, self._count) is not None:
            return False
        self.taken, value = True, value_of(node)
        alike = value.dtype == value_of(self._collective.node).dtype and symbolic_sizes.is_contiguous(value)
        if of_sum and alike and arranged(from_start).is_reshape:
            self.ends[node] = None
        else:
            self.by_place = True
        return True

    def _computes(self, node: fx.Node, operand: fx.Node, index_map: IndexMap) -> bool:
        """Whether each element of a node is computed from those of operands in its place: all with the operand's map.

        Operands that are not of the sum may be anything.
        """
        value = tensor_of(node)
        if value is None or not is_pointwise(node) or mutates(node) or is_random(node):
            return False
        before, after = (self._context.sizes.of(one) for one in (value_of(operand), value))
        self.by_place = True
        return same_sizes(before, after) and self._computed.setdefault(node, index_map) == index_map


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
    nodes = candidate.nodes if part.by_place else context.sorted([*candidate.nodes, *part.nodes])
    chain = replace(chain, placement=placement, own_part=part)
    return replace(candidate, chain=chain, own_part=part, nodes=nodes)
