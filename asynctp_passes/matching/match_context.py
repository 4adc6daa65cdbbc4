"""A graph being searched for chains: what all searches ask of it, found once. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.matmuls import feeds_left_operand, is_matmul
from asynctp_passes.ir.nodes import is_pointwise, is_random, is_size, mutates, tensor_of, value_of, written_by
from asynctp_passes.ir.operations import Collective, Matmul
from asynctp_passes.ir.order import communications, is_opaque, latest_communication
from asynctp_passes.ir.sizes import Size, Sizes, product, same, same_sizes
from asynctp_passes.ir.traversal import phase_of, reachable, segments
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.propagation import Propagation, is_view, propagate, shares_memory, views_of
from asynctp_passes.matching import near_miss
from asynctp_passes.matching.scaled_epilogue import read_scaled_result, scalings
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import partitioner


class MatchContext:
    """A graph being searched.

    Attributes:
        order: Where each of the nodes stands.
        propagations: For each gather the index maps from its result on, or why nothing can be said about it.
        matmul_of: `read_scaled_result`, each node read once.
        fixed: Gathers whose fused op stands where they do, whatever that costs.
        allowed: True for a candidate (`chains.Candidate`) whose chain may be fused.
    """

    def __init__(
        self, graph: fx.Graph, collectives: Sequence[Collective], sizes: Sizes, allowed: Callable[[Any], bool]
    ) -> None:
        self.graph, self.collectives, self.sizes, self.allowed = graph, collectives, sizes, allowed
        self.nodes = list(graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.propagations = {c.node: self._propagation(c) for c in collectives if c.kind == "all_gather"}
        self.matmul_of = functools.cache(read_scaled_result)
        self.fixed: set[fx.Node] = set()

    def _propagation(self, gather: Collective) -> Propagation | Refusal:
        whole, shard = tensor_of(gather.node), tensor_of(gather.input)
        if whole is None or shard is None:
            return Refusal(reasons.SHAPE_UNKNOWN, gather.node.name)
        sizes, own = self.sizes.of(whole), self.sizes.of(shard)
        if same(product(own), 0):
            return Refusal(reasons.NO_ELEMENTS, gather.node.name)
        if not in_blocks(gather, sizes, own):
            facts = f"{list(sizes)} is not {gather.group_size} shards of {list(own)} along dimension {gather.dim}"
            return Refusal(reasons.SIZES_NOT_PROVEN, facts)
        order = [*range(1, gather.dim + 1), 0, *range(gather.dim + 1, len(own) + 1)]
        blocks = IndexMap.identity((gather.group_size, *own)).permute(order)
        source = IndexMap.identity(sizes) if gather.dim == 0 else blocks.reshape(sizes)
        if isinstance(source, Refusal):
            return source
        return propagate(self.sorted(views_of([gather.node])), {gather.node: source}, self.sizes)

    def propagation_of(self, gather: Collective) -> Propagation:
        """The index maps from a gather's result on, where there are such."""
        propagation = self.propagations[gather.node]
        assert isinstance(propagation, Propagation)
        return propagation

    @functools.cached_property
    def gather_of(self) -> dict[fx.Node, Collective]:
        """The gather whose result a node is a view of."""
        propagations = ((gather, self.propagations.get(gather.node)) for gather in self.collectives)
        return {
            node: gather
            for gather, propagation in propagations
            if isinstance(propagation, Propagation)
            for node in propagation.maps
        }

    @functools.cached_property
    def ways_down(self) -> near_miss.Ways:
        """Ways to matmuls as left operands."""
        return near_miss.Ways(reversed(self.nodes), near_miss.users_next_to, feeds_left_operand)

    @functools.cached_property
    def ways_up(self) -> near_miss.Ways:
        """Ways back to matmuls."""
        return near_miss.Ways(self.nodes, near_miss.inputs_next_to)

    @functools.cached_property
    def rows_down(self) -> near_miss.Ways:
        """Ways of rows to matmuls as left operands, by ops of any kind."""
        return near_miss.Ways(reversed(self.nodes), near_miss.takers_of, feeds_left_operand)

    @functools.cached_property
    def rows_up(self) -> near_miss.Ways:
        """Ways of rows back to matmuls, by ops of any kind."""
        return near_miss.Ways(self.nodes, near_miss.sources_of)

    @functools.cached_property
    def segments(self) -> dict[fx.Node, int]:
        """Number of in-place operations before each node."""
        return segments(self.graph)

    @functools.cached_property
    def changed(self) -> set[fx.Node]:
        """The tensors that are changed in place, with what they are views of, and all views of that."""
        written = (source for node in self.nodes for source in written_by(node))
        whole = reachable(written, lambda node: node.all_input_nodes if shares_memory(node) else ())
        return reachable(whole, lambda node: filter(shares_memory, node.users))

    @functools.cached_property
    def parameters(self) -> set[fx.Node]:
        """The inputs that are parameters, as far as torch knows; of a backward, their gradients."""
        return partitioner.parameters(self.graph, phase_of(self.graph) == "backward")

    @functools.cached_property
    def scalings(self) -> set[fx.Node]:
        """The multiplications that scale matmuls' results."""
        return scalings(filter(is_matmul, self.nodes))

    def alike(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """The first node that holds what a node does for a user: the same views and pointwise ops made both.

        Only where nothing is written in between: a copy that is written then is like no other copy.
        """
        return self._alike.get(node, node) if self.segments[node] == self.segments[user] else node

    @functools.cached_property
    def _alike(self) -> dict[fx.Node, fx.Node]:
        first, found = dict[Any, fx.Node](), dict[fx.Node, fx.Node]()
        for node in filter(is_pure, self.nodes):
            key = self._key(node, found)
            found[node] = first.setdefault(key, node)
        return found

    def _key(self, node: fx.Node, firsts: dict[fx.Node, fx.Node]) -> Any:
        segment = self.segments[node]

        def key_of(operand: fx.Node) -> fx.Node:
            return firsts.get(operand, operand) if self.segments[operand] == segment else operand

        return node.target, frozen((node.args, sorted(node.kwargs.items())), key_of), segment

    @functools.cached_property
    def above_matmuls(self) -> set[fx.Node]:
        """The nodes that a matmul is computed from."""
        operands = (source for node in self.nodes if is_matmul(node) for source in node.all_input_nodes)
        return reachable(operands, where=lambda node: not is_size(node))

    @functools.cached_property
    def _gathers_above(self) -> dict[fx.Node, int]:
        """The gathers that each node is computed from, a bit for each, as `_bits` has them."""
        found: dict[fx.Node, int] = {}
        for node in self.nodes:
            bits = self._bits.get(node, 0)
            for source in () if is_size(node) else node.all_input_nodes:
                bits |= found[source]
            found[node] = bits
        return found

    @functools.cached_property
    def _bits(self) -> dict[fx.Node, int]:
        return {gather: 1 << index for index, gather in enumerate(self.propagations)}

    def depends(self, node: fx.Node, gather: fx.Node) -> bool:
        """True when `node` is a gather, or is computed from its values."""
        return bool(self._gathers_above[node] & self._bits[gather])

    @functools.cached_property
    def latest(self) -> dict[fx.Node, int]:
        """For each node the place of the last communication that it depends on, as `latest_communication`."""
        return latest_communication(self.graph, self._items)

    @functools.cached_property
    def _latest_sure(self) -> dict[fx.Node, int]:
        """`latest`, if no opaque op communicated."""
        return latest_communication(self.graph, self._items, surely=True)

    @functools.cached_property
    def _items(self) -> set[fx.Node]:
        return {one.node for one in self.collectives if one.call is not None}

    @functools.cached_property
    def _communications(self) -> list[fx.Node]:
        return communications(self.nodes)

    def until(self, gather: Collective, *, opaque: bool = True) -> int:
        """The place of the last communication that the fused op of a gather may follow: none after it needs the gather.

        With `opaque`, none of them is opaque either. Of a `fixed` gather it is the place of its own.
        """
        start, stops = self.order[gather.node], self._opaque if opaque else ()
        if gather.node in self.fixed:
            return start
        later = (node for node in self._communications if self.order[node] > start)
        ends = (self.order[node] for node in later if node in stops or self.depends(node, gather.node))
        return next(ends, len(self.nodes)) - 1

    def opaque_passed(self, gather: Collective, node: fx.Node) -> list[fx.Node]:
        """The opaque ops that keep a tensor from being there in time for a gather's fused op; none if others do."""
        start, last = self.order[gather.node], self.latest[node]
        found = [one for one in self._opaque if start < self.order[one] <= last]
        return found if found and self._latest_sure[node] <= self.until(gather, opaque=False) else []

    @functools.cached_property
    def _opaque(self) -> dict[fx.Node, None]:
        """The opaque ops, which may communicate: collectives keep their places among them."""
        return dict.fromkeys(filter(is_opaque, self._communications))

    def can_add(self, a: Matmul, b: Matmul) -> bool:
        """True for products of one shape, dtype and kind, which an op can add."""
        one, other = value_of(a.node), value_of(b.node)
        (*lines, columns), (*other_lines, other_columns) = self.sizes.of(one), self.sizes.of(other)
        one_shape = same(product(lines), product(other_lines)) and same(columns, other_columns)
        scaled = [None if m.scaled is None else (m.scaled.out_dtype, m.scaled.use_fast_accum) for m in (a, b)]
        return one.dtype == other.dtype and one_shape and scaled[0] == scaled[1]

    def sorted(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """Nodes in graph order, without repetition."""
        return tuple(sorted(set(nodes), key=self.order.__getitem__))


def in_blocks(collective: Collective, whole: Sequence[Size], part: Sequence[Size]) -> bool:
    """True when the sizes of a whole are those of its parts, one a rank along the collective's dimension."""
    parts = [size * collective.group_size if axis == collective.dim else size for axis, size in enumerate(part)]
    return same_sizes(whole, parts)


def is_pure(node: fx.Node) -> bool:
    """True for ops whose result is decided by their tensors: views, casts, pointwise ops."""
    if is_view(node):
        return True
    return is_pointwise(node) and not mutates(node) and not is_random(node) and tensor_of(node) is not None


def frozen(argument: Any, key_of: Callable[[fx.Node], Any]) -> Any:
    """A key for arguments of nodes: equal for numbers of one type and value, and for nodes of equal keys."""
    if isinstance(argument, list | tuple):
        return tuple(frozen(item, key_of) for item in argument)
    if isinstance(argument, fx.Node):
        return key_of(argument)
    if isinstance(argument, slice):  # Python has no hash of it before 3.12
        return slice, frozen((argument.start, argument.stop, argument.step), key_of)
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):  # they have no hash
        return type(argument), argument.node.expr
    return (type(argument), argument.hex() if isinstance(argument, float) else argument)
