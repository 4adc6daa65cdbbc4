"""Tensors that every rank can compute its part of from its own shard: a gathered one, and what is computed of it.

    shard → all_gather → wait → {view, pointwise op, cast, amax of a row}* → matmul

A *region* begins as a gathered tensor with its views. Where no matmul takes these with the ranks in its rows it grows
by the ops of `_RULES`. Each of its tensors is [outer, ranks, inner] along one of its dimensions, and the part of a rank
is its [outer, inner]. The same ops on parts, in the same order and dtypes, give the parts bit by bit. Maxima do not
depend on the order in which they are taken, so one over all ranks' rows is made of each rank's (`cross_rank`). Sums
round in an order that may depend on the number of rows, so they end a region, as does whatever is not listed.

What comes from outside the graph may differ by rank, and so may a number in it. A tensor is the same on all ranks if a
collective made it so. Numbers are taken to be the same in a quantization, and in an op that is registered so.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.matmuls import added_matrix, is_matmul
from asynctp_passes.ir.nodes import (
    arguments,
    filling_of,
    is_pointwise,
    is_random,
    is_size,
    mutates,
    op_name,
    tensor_of,
    traits_of,
    value_of,
)
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.sizes import Size, are_one, product, quotient, same, same_sizes
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import GatherPlacement, RankPlacement, locate_gather, locate_ranks
from asynctp_passes.layout.propagation import Propagation, changes_elements, propagate, views_of
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.cut_rows import find_cuts, find_ranges
from asynctp_passes.matching.match_context import MatchContext, frozen, is_pure
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import symbolic_sizes, torch_ops, triton_kernels

_SMALL = 8  # A tensor of that many times fewer bytes than the gathered one is cheap to gather on its own.


@dataclass(frozen=True)
class _Root:
    """A tensor of the region that is not a view: [outer, ranks, block] row-major, with its views.

    `twin` is the first root that is computed by the same ops from the same values, which nothing changed in between;
    `numbers` tells that a number of the graph takes part in computing it.
    """

    node: fx.Node
    outer: Size
    block: Size
    propagation: Propagation
    twin: fx.Node
    numbers: bool = False


Users = dict[fx.Node, tuple[fx.Node, ...]]
_Place = tuple[int, Size, Size]
"""Dimension of the ranks, counted from the last one (-1), and how many [outer] and [inner] indices are around them."""


class ShardRegion:
    """The tensors that every rank can compute its part of from its own shard.

    It begins as the gathered tensor with its views, and has what is computed from these once it is told to `grow`.

    Attributes:
        roots: The gathered tensor, and what is computed.
        members: All tensors, views included, and where the ranks are in them; none before the region has grown.
        home: The root of every member, of what lies between members (pieces of a split), and of views that are none.
        cross_rank: The maxima and minima over all ranks' rows: each rank finds that of its own rows first. Those of
            one value stand together, by the first of them.
        known: Values that every rank has before the gather is complete: `cross_rank`, and what is computed from those
            alone. Filled when asked for, with the first node that has the same values.
        refused: Users of members that are not members, and why.
        cuts: Left operands that have the rows of the gathered tensor but for some at the end, or a range of them.
        cut_steps: These, and what lies between: nodes at home in the gathered tensor that have no map of their own.
    """

    def __init__(self, context: MatchContext, gather: Collective) -> None:
        self.context = context
        self.gather = gather
        self.roots: dict[fx.Node, _Root] = {}
        self.members: dict[fx.Node, RankPlacement] = {}
        self.home: dict[fx.Node, fx.Node] = {}
        self.cross_rank: dict[fx.Node, list[fx.Node]] = {}
        self.known: dict[fx.Node, fx.Node] = {}
        self.refused: dict[fx.Node, Refusal] = {}
        self._until = context.until(gather)
        self._unknown: set[fx.Node] = set()
        self._twins: dict[Any, fx.Node] = {}
        self._waiting: list[int] = []
        block = product(context.sizes.of(value_of(gather.input)))
        self._add(_Root(gather.node, 1, block, context.propagation_of(gather), gather.node))
        propagation, sizes = context.propagation_of(gather), context.sizes
        found = [*find_cuts(propagation, gather.group_size, sizes), *find_ranges(propagation, gather.group_size, sizes)]
        self.cuts = {cut.operand: cut for cut in found if any(map(is_matmul, cut.operand.users))}
        self.cut_steps = {step for cut in self.cuts.values() for step in cut.steps}
        self.home.update(dict.fromkeys(self.cut_steps, gather.node))

    def grow(self) -> None:
        """Add what is computed: the users of members in graph order, so that operands are known before their users."""
        self._spread(self.roots[self.gather.node])
        while self._waiting:
            node = self.context.nodes[heapq.heappop(self._waiting)]
            if node in self.members or node in self.refused or node in self.known:
                continue
            place = _place_in(self, node)
            if place is None:  # views of a tensor have maxima of the same value, and perhaps of another shape
                self.known[node] = self._first(node, self.context.sizes.of(value_of(node)))
                self.cross_rank.setdefault(self.known[node], []).append(node)
                self._uniform_nodes.add(node)
            elif isinstance(place, Refusal):
                of_operand = place in self.refused.values()  # which it names
                named = place if of_operand else Refusal(place.reason, f"{op_name(node)} {node.name}: {place.facts}")
                self.refused[node] = named
            else:
                root = self._root(node, place)
                self._add(root)
                self._spread(root)

    def view(self, node: fx.Node) -> IndexMap:
        """The map of a tensor at home in the region into its root."""
        return self.roots[self.home[node]].propagation.maps[node]

    def rows_of(self, operand: fx.Node) -> IndexMap | Refusal:
        """The map of a matmul's left operand as a matrix; of one that is cut, that of all rows."""
        if operand in self.cuts:
            return self.cuts[operand].rows
        *rows, width = self.context.sizes.of(value_of(operand))
        return self.view(operand) if len(rows) == 1 else self.view(operand).reshape((product(rows), width))

    def is_range(self, operand: fx.Node) -> bool:
        """True for a left operand that is a range of the gathered rows."""
        return operand in self.cuts and self.cuts[operand].is_range

    def located(self, node: fx.Node, view: IndexMap) -> GatherPlacement | Refusal:
        """Where the ranks are in a matrix: a view of a node's root."""
        root = self.roots[self.home[node]]
        before, after = value_of(root.node).dtype, value_of(node).dtype
        if before.itemsize != after.itemsize:
            return changes_elements(before, after)
        return locate_gather(view, root.block, self.gather.group_size, root.outer)

    def views_to(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """The nodes between the gather and `ends`, these included."""
        return reachable(ends, where=self.home.__contains__) - set(self.gather.results)

    def used_elsewhere(self, fused: set[fx.Node]) -> Users:
        """The nodes that others than the fused matmuls use outside of the region, with those users. In graph order.

        A matmul `c + a @ b` is such a user of its `c`, which is added after the fused op.
        """
        used: Users = {}
        for node in self.context.sorted(self.home):
            users = (user for user in self.roots[self.home[node]].propagation.users(node) if user not in self.home)
            others = (user for user in users if user not in fused or added_matrix(user) is node)
            if outside := self.context.sorted(user for user in others if not (is_size(user) or user in self.known)):
                used[node] = outside
        return used

    def needs_gather(self, node: fx.Node) -> bool:
        """True for what is computed from the gathered tensor, but for what is `known` before that is there."""
        if self.context.depends(node, self.gather.node):
            self._learn(node)
            return node not in self.known
        return False

    def late(self, node: fx.Node) -> Refusal | None:
        """Why a tensor that a rank needs besides its shard is not there where the fused op may stand."""
        if self.context.latest[node] <= self._until:
            return None
        passed = self.context.opaque_passed(self.gather, node)
        if passed:
            return Refusal(reasons.OPAQUE_OP_BETWEEN, f"{node.name} needs {near_miss.to_register(passed)}")
        return Refusal(reasons.OPERAND_COMMUNICATED_LATER, node.name)

    def twin(self, node: fx.Node) -> fx.Node:
        """The first root that holds what the root of a member holds."""
        return self.roots[self.home[node]].twin

    def sources(self, root: fx.Node) -> list[fx.Node]:
        """The members that a root is computed from."""
        return [source for source in root.all_input_nodes if source in self.members]

    def cause(self, node: fx.Node) -> Refusal | None:
        """Why a node that is computed from the gathered tensor is no member: the refusal it all began with."""
        order, gather = self.context.order, self.gather.node
        above = reachable([node], where=lambda step: order[step] > order[gather] and not is_size(step))
        return next((self.refused[step] for step in self.context.sorted(above) if step in self.refused), None)

    def _add(self, root: _Root) -> None:
        self.roots[root.node] = root
        self.home.update(dict.fromkeys((*root.propagation.maps, *root.propagation.pieces), root.node))
        self.refused |= {node: why for node, why in root.propagation.refused.items() if not traits_of(node).casts}

    def _spread(self, root: _Root) -> None:
        """Find the members among a root's views, and line up what is computed from them."""
        for node, view in root.propagation.maps.items():
            value = tensor_of(node)
            if value is None or value.dtype.itemsize != value_of(root.node).dtype.itemsize:
                continue
            place = locate_ranks(view, root.block, self.gather.group_size, root.outer)
            if isinstance(place, RankPlacement):
                self.members[node] = place
        for user in {user for node in root.propagation.maps if node in self.members for user in node.users}:
            if not (root.propagation.has(user) or is_size(user) or is_matmul(user) or user.op == "output"):
                heapq.heappush(self._waiting, self.context.order[user])

    def _learn(self, end: fx.Node) -> None:
        """Find out whether a node is known, which it is if all is that it is computed from."""

        def is_open(node: fx.Node) -> bool:
            settled = node in self.known or node in self._unknown or node in self.home
            return not settled and self.context.depends(node, self.gather.node) and is_pure(node)

        for node in self.context.sorted(reachable([end] if self.cross_rank else [], where=is_open)):
            needed = (one for one in node.all_input_nodes if self.context.depends(one, self.gather.node))
            if all(one in self.known for one in needed):
                self.known[node] = self._first(node, ())
            else:
                self._unknown.add(node)

    def _root(self, node: fx.Node, place: _Place) -> _Root:
        shape = self.context.sizes.of(value_of(node))
        axis = len(shape) + place[0]
        outer, block = product(shape[:axis]) * place[1], place[2] * product(shape[axis + 1 :])
        views = self.context.sorted(views_of([node]))
        propagation = propagate(views, {node: IndexMap.identity(shape)}, self.context.sizes)
        twin = self._first(node, (outer, block))
        return _Root(node, outer, block, propagation, twin, _takes_number(node, self.members))

    def _first(self, node: fx.Node, shape: tuple[Size, ...]) -> fx.Node:
        """The first node that computes what this one does, laid out alike, with no in-place operation in between."""
        return self._twins.setdefault((self._computation(node), shape, self.context.segments[node]), node)

    def _computation(self, node: fx.Node) -> Any:
        """A key for the value of a node: its op and arguments. Members, constants, known nodes count by their values.

        Where that is done element by element, it does not matter in which dimensions elements are.
        """
        segments = self.context.segments
        by_elements = not self.members.keys().isdisjoint(node.all_input_nodes) and self._by_elements(node)

        def key_of(operand: fx.Node) -> Any:
            if operand in self.members:
                view = self.view(operand)
                return self.twin(operand), (view.digits, view.offset) if by_elements else view, value_of(operand).dtype
            if traits_of(operand).constant is not None and segments[operand] == segments[node]:  # nothing wrote to it
                return called(operand)
            return self.known.get(operand, operand)

        def called(call: fx.Node) -> Any:
            return call.target, frozen((call.args, sorted(call.kwargs.items())), key_of)

        return called(node)

    def _by_elements(self, node: fx.Node) -> bool:
        """True for a reduction of all elements, and for an op on members of the result's shape and on numbers."""
        if near_miss.is_registered_rowwise(node):
            return False
        own, *others = (self.context.sizes.of(value_of(one)) for one in (node, *node.all_input_nodes))
        if near_miss.reduces(node):
            return same(product(own), 1)
        return all(same_sizes(sizes, own) or same(product(sizes), 1) for sizes in others)

    def place_of(self, member: fx.Node) -> _Place:
        """The place of the ranks in a member."""
        place = self.members[member]
        return place.dim - len(self.view(member).dims), place.outer, place.inner

    def is_filled(self, node: fx.Node) -> bool:
        """True for a tensor whose elements are all one number, made in the graph from numbers, and never changed."""
        stack = [node]
        while stack:
            step = stack.pop()
            traits, sources = traits_of(step), [one for one in step.all_input_nodes if not is_size(one)]
            if step in self.context.changed or tensor_of(step) is None:
                return False
            if traits.constant is not None:
                if not isinstance(filling_of(step), int | float):
                    return False
            elif not sources or not is_pure(step) or traits.takes_part or (traits.view and len(sources) > 1):
                return False
            else:
                stack.extend(sources)
        return True

    @functools.cached_property
    def _uniform_nodes(self) -> set[fx.Node]:
        """The nodes that are known to be the same on all ranks: at first, what their group gathered or reduced."""
        own = [one for one in self.context.collectives if one.group_key == self.gather.group_key != ""]
        return {result for one in own if one.kind in ("all_gather", "all_reduce") for result in one.results}

    def is_uniform(self, node: fx.Node) -> bool:
        """True when a tensor is provably the same on all ranks of the group, and stays so."""
        seen, stack = set[fx.Node](), [node]
        while stack:
            step = stack.pop()
            if step in self.context.changed:
                return False
            if step in seen or step in self._uniform_nodes:
                continue
            seen.add(step)
            sources = step.all_input_nodes
            traits = traits_of(step)
            if not (is_pure(step) and not traits.takes_part if sources else traits.constant is not None):
                return False
            stack.extend(sources)
        self._uniform_nodes |= seen
        return True


# --- the rules: where the ranks are in the result of an op, or why no rank can compute its part --------------------
_Found = _Place | Refusal | None
"""None stands for a value that all ranks have before the gather is complete: `ShardRegion.cross_rank`."""


def _place_in(region: ShardRegion, node: fx.Node) -> _Found:
    """The place of the ranks in what is computed of members, by the first row of `_RULES` that the op is of."""
    if (refusal := _not_pure(node)) is not None:
        return refusal
    for is_of_kind, rule in _RULES:
        if is_of_kind(node):
            return rule(region, node)
    return Refusal(reasons.COMPUTED_BETWEEN, f"neither a view nor {near_miss.known_rowwise(node)}")


def _not_pure(node: fx.Node) -> Refusal | None:
    """Why an op on parts, done by any rank at any time, need not give a part of the same tensor."""
    if "val" not in node.meta:
        return Refusal(reasons.SHAPE_UNKNOWN, "no tensor")
    if triton_kernels.called_by(node) is not None:
        return Refusal(reasons.COMPUTED_BETWEEN, f"not {near_miss.known_rowwise(node)}")
    if not torch_ops.is_op(node.target) or mutates(node):
        return Refusal(reasons.COMPUTED_BETWEEN, "not a pure operation")
    if is_random(node):
        return Refusal(reasons.RANDOM_BETWEEN, "every rank would draw other numbers")
    return None


def _by_elements(region: ShardRegion, node: fx.Node) -> _Found:
    """Each element comes from elements of one rank, and from values that are the same for all rows of all ranks."""
    places = [region.place_of(operand) for operand in node.all_input_nodes if operand in region.members]
    if not all(same_sizes(place, places[0]) for place in places):
        return Refusal(reasons.MIXES_RANKS, "its operands have the ranks in different places")
    others = (operand for operand in node.all_input_nodes if operand not in region.members)
    refused = next((refusal for other in others if (refusal := _other_operand(region, other, places[0][0]))), None)
    return refused or _of_one_device(region, node) or places[0]


def _by_extrema(region: ShardRegion, node: fx.Node) -> _Found:
    """A maximum or minimum has the same bits in any order: over a rank's own, and then over those of all ranks."""
    reduced = _reduced(region, node)
    if isinstance(reduced, Refusal):
        return reduced
    axes, axis, (dim, outer, inner) = reduced
    if axis in axes:
        return _cross_rank(region, node)
    kept = 0 if arguments(node).get("keepdim") else sum(one > axis for one in axes)
    return dim + kept, outer, inner


def _by_whole_rows(region: ShardRegion, node: fx.Node) -> Refusal:
    """No rank does it in parts: sums and means may round otherwise for other numbers of rows.

    Nor are ops of several tensors followed.
    """
    several = tensor_of(node) is None  # as a variance and its mean, or maxima and where they are
    reduced = _reduced(region, node) if near_miss.reduces(node) else None
    if isinstance(reduced, tuple) and reduced[1] in reduced[0]:
        return Refusal(reasons.MIXES_RANKS, "reduces over the ranks' rows")
    if isinstance(reduced, Refusal) and not several:
        return reduced
    rounds, other = "rounds in an order that may depend on the number of rows", near_miss.unknown([node])
    return Refusal(reasons.COMPUTED_BETWEEN, f"not an operation that returns one tensor{other}" if several else rounds)


def _by_rows(region: ShardRegion, node: fx.Node) -> _Found:
    """Each row comes from the same row of the operands, as its registration promises, and a rank has whole rows."""
    members = [operand for operand in node.all_input_nodes if operand in region.members]
    places = [region.place_of(member) for member in members]
    rows, *others = (region.context.sizes.of(value_of(one))[:-1] for one in (node, *members))
    if not all(same_sizes(sizes, rows) for sizes in others):
        return Refusal(reasons.COMPUTED_BETWEEN, "its result has other rows than what it is computed from")
    if places[0][0] == -1 or not all(same_sizes(place, places[0]) for place in places):
        return Refusal(reasons.MIXES_RANKS, "a row has parts of several ranks")
    shared = (operand for operand in node.all_input_nodes if operand not in region.members)
    refused = next((refusal for one in shared if (refusal := _shared_operand(region, one)) is not None), None)
    return refused or _of_one_device(region, node) or _not_on_a_part(region, node, places[0][0]) or places[0]


_RULES: tuple[tuple[Callable[[fx.Node], bool], Callable[[ShardRegion, fx.Node], _Found]], ...] = (
    (lambda node: tensor_of(node) is None, _by_whole_rows),
    (lambda node: is_pointwise(node) or traits_of(node).casts, _by_elements),
    (lambda node: traits_of(node).is_exact_reduction, _by_extrema),
    (near_miss.reduces, _by_whole_rows),
    (near_miss.is_registered_rowwise, _by_rows),
)
"""The kinds of ops that are computed of parts, and the rule of each, whose first line says what it proves. Views are no
kind: `placement.locate_ranks` finds the ranks in them.
"""


# --- what the rules ask of the operands ------------------------------------------------------------------------
def _reduced(region: ShardRegion, node: fx.Node) -> tuple[set[int], int, _Place] | Refusal:
    """The dimensions over which an op reduces a member, that of the ranks there, and their place."""
    values = arguments(node)
    source = next(iter(values.values()))
    if source not in region.members:
        return Refusal(reasons.COMPUTED_BETWEEN, "reduces another tensor")
    rank, dims, place = len(region.view(source).dims), values.get("dim"), region.place_of(source)
    axes = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
    return axes, rank + place[0], place


def _cross_rank(region: ShardRegion, node: fx.Node) -> Refusal | None:
    """Why an extremum over all ranks' rows is not found from what each rank finds."""
    if not (is_small(region, node) and value_of(node).dtype.is_floating_point):
        return Refusal(reasons.MIXES_RANKS, "reduces over the ranks' rows")
    unchanged = region.context.segments[node] == region.context.segments[region.gather.node]
    return None if unchanged else Refusal(reasons.MUTATED_IN_BETWEEN, "comes after an in-place operation")


def _not_in_time(region: ShardRegion, operand: fx.Node) -> Refusal | None:
    """Why an operand from outside the region is no tensor that a rank has when it computes its part."""
    if tensor_of(operand) is None:
        return Refusal(reasons.SIZES_NOT_PROVEN, f"{operand.name} is no tensor")
    if region.needs_gather(operand):
        return region.cause(operand) or Refusal(reasons.COMPUTED_BETWEEN, f"{operand.name} needs the whole gather")
    return region.late(operand)


def _other_operand(region: ShardRegion, operand: fx.Node, dim: int) -> Refusal | None:
    """Why an operand from outside the region does not meet every rank's part in the same way."""
    if (refusal := _not_in_time(region, operand)) is not None or region.is_filled(operand):
        return refusal
    shape, uniform = region.context.sizes.of(value_of(operand)), region.is_uniform(operand)
    if len(shape) >= -dim and not same(shape[dim], 1):
        reason = reasons.COMPUTED_BETWEEN if uniform else reasons.MAY_DIFFER_BY_RANK
        return Refusal(reason, f"{operand.name} has a value for each row")
    return None if uniform else Refusal(reasons.MAY_DIFFER_BY_RANK, f"{operand.name}")


def _shared_operand(region: ShardRegion, operand: fx.Node) -> Refusal | None:
    """Why an operand from outside the region is not one that every rank has, by the promise of a row-wise op."""
    if (refusal := _not_in_time(region, operand)) is not None:
        return refusal
    value, rows = value_of(operand), value_of(region.gather.node).shape[:-1]
    counts = [value.numel(), *rows, product(rows)]
    is_known = value.dim() <= 1 and all(isinstance(count, int) for count in counts)
    if not are_one(value.shape) and not (is_known and value.numel() not in counts[1:]):
        return Refusal(reasons.COMPUTED_BETWEEN, f"{operand.name} may have a number for each of the op's rows")
    return None


def _of_one_device(region: ShardRegion, node: fx.Node) -> Refusal | None:
    device = value_of(node).device
    moved = device != value_of(region.gather.node).device
    return Refusal(reasons.COMPUTED_BETWEEN, f"moves to {device}") if moved else None


def _not_on_a_part(region: ShardRegion, node: fx.Node, dim: int) -> Refusal | None:
    """Why an op's fake implementation does not make a rank's part of a result from its parts of the operands."""

    def part_of(value: torch.Tensor) -> torch.Tensor:
        return value.narrow(dim, 0, value.shape[dim] // region.gather.group_size)

    def argument(operand: fx.Node) -> torch.Tensor:
        return part_of(value_of(operand)) if operand in region.members else value_of(operand)

    assert torch_ops.is_op(node.target)
    try:
        with symbolic_sizes.without_guards(value_of(node)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
            made, wanted = node.target(*args, **kwargs), part_of(value_of(node))
    except Exception as error:  # of the program's own code
        facts = f"its fake implementation fails for a rank's rows: {type(error).__name__}: {error}"
        return Refusal(reasons.COMPUTED_BETWEEN, facts[:200])
    if made.dtype == wanted.dtype and same_sizes(made.shape, wanted.shape):
        return None
    return Refusal(reasons.COMPUTED_BETWEEN, f"of a rank's rows its fake implementation makes {list(made.shape)}")


def _takes_number(node: fx.Node, members: Container[fx.Node]) -> bool:
    """True when a pointwise op takes a number, or a tensor that is not computed from the gathered one."""
    traits = traits_of(node)
    if traits.casts or traits.is_exact_reduction or near_miss.is_registered_rowwise(node):
        return False
    numbers = (one for one in (*node.args, *node.kwargs.values()) if isinstance(one, int | float | complex))
    others = any(operand not in members for operand in node.all_input_nodes)
    return others or not all(isinstance(number, bool) for number in numbers)


def is_small(region: ShardRegion, root: fx.Node) -> bool:
    """True for one number, and for a row-major tensor of far fewer bytes than the gathered one."""
    value, whole = value_of(root), value_of(region.gather.node)
    sizes = region.context.sizes
    count = product(sizes.of(value))
    times = quotient(product(sizes.of(whole)), count)
    small = isinstance(times, int) and times * whole.dtype.itemsize >= _SMALL * value.dtype.itemsize
    return (small or same(count, 1)) and symbolic_sizes.is_contiguous(value)
