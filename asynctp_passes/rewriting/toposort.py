"""Bring a graph's nodes into an order in which each comes after its inputs.

Inductor runs custom passes after its pattern matcher and before it sorts. The matcher puts all that it makes in front
of a pattern's last result, so that users of the first result may come before it. Such a node moves up to its first
user. What a program does besides computing keeps its order: collectives among each other, random draws among each
other, and what reads or writes memory that an in-place operation changes. Nothing moves past an op that orders streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import fx

from asynctp_passes.ir.nodes import is_known_collective, is_random, mutates, orders_streams, written_by
from asynctp_passes.ir.order import communications
from asynctp_passes.ir.traversal import reachable, steps_of
from asynctp_passes.layout.propagation import shares_memory
from asynctp_passes.torch_private import torch_ops

_Pair = tuple[fx.Node, fx.Node]


class CannotSort(RuntimeError):
    """A graph has a cycle, or an order in which values are read that its inputs contradict."""


def is_sorted(graph: fx.Graph) -> bool:
    """True when every node comes after its inputs."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        seen.add(node)
    return True


def sort(graph: fx.Graph) -> None:
    """Sort a graph topologically, in place; one that is sorted stays as it is.

    A node that comes after one of its users moves up to that user, with all that it needs. Everything else keeps its
    place relative to the rest. Placeholders come first, and the output last.

    Raises:
        CannotSort: There is no such order; the graph is untouched.
    """
    if not is_sorted(graph):
        for before, node in pairwise(_order(list(graph.nodes))):
            before.append(node)


def _order(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    graph, place = nodes[0].graph, {node: index for index, node in enumerate(nodes)}
    kept = _KeptOrder(nodes)
    while True:
        inputs = kept.inputs()
        order = [node for (node,) in steps_of(graph, {}, inputs, place.__getitem__)]
        if len(order) == len(place):
            wanted = _wanted_places(order, inputs, place)
            return [node for (node,) in steps_of(graph, {}, inputs, wanted.__getitem__)]
        done = set(order)
        kept.give_up_one_of(_cycle([node for node in nodes if node not in done], inputs))


def _wanted_places(
    order: Sequence[fx.Node], inputs: Mapping[fx.Node, Sequence[fx.Node]], place: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Each node's own place, or that of an earlier one that needs it. `order` is any sorted one."""
    wanted = {node: {"placeholder": -1, "output": len(order)}.get(node.op, place[node]) for node in order}
    for node in reversed(order):
        for source in inputs[node]:
            wanted[source] = min(wanted[source], wanted[node])
    return wanted


def _cycle(left: Sequence[fx.Node], inputs: Mapping[fx.Node, Sequence[fx.Node]]) -> list[_Pair]:
    """The steps of a cycle, each from a node to one that comes after it. All of `left` wait for one of `left`."""
    waiting, node = set(left), left[0]
    way: dict[fx.Node, None] = {}
    while node not in way:
        way[node] = None
        node = next(source for source in inputs[node] if source in waiting)
    circle = list(way)[list(way).index(node) :]
    return [(source, user) for user, source in pairwise([*circle, node])]


class _KeptOrder:
    """The order of a graph: nodes after their inputs, and pairs that keep their order where the inputs allow it."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._nodes = nodes
        called = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]
        self._fixed = {*_accesses(nodes), *_around_borders(called)}
        draws, impure = list(filter(is_random, called)), [node for node in called if node.is_impure()]
        others = {node for node in impure if not is_random(node) and not is_known_collective(node)}  # prints, asserts
        effects = [node for node in called if mutates(node) or node in others]
        calls = communications(called)
        self._pairs = {
            pair: rank for rank, sequence in enumerate((draws, effects, calls)) for pair in pairwise(sequence)
        }
        self._given_up: set[_Pair] = set()

    def inputs(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the nodes that it comes after."""
        found = {node: list(node.all_input_nodes) for node in self._nodes}
        for first, then in (*self._pairs, *self._fixed):
            found[then].append(first)
        return found

    def give_up_one_of(self, cycle: Sequence[_Pair]) -> None:
        """Give up the order of one pair of a cycle: of draws before that of collectives. Its neighbours keep theirs.

        Raises:
            CannotSort: All of the cycle is inputs, reads and writes of the same memory, and what orders streams.
        """
        free = [pair for pair in cycle if pair in self._pairs and pair[0] not in pair[1].all_input_nodes]
        if not free:
            names = " -> ".join(user.name for _, user in [*cycle, cycle[0]])
            raise CannotSort(f"a cycle of inputs, of reads and writes of memory, or of what orders streams: {names}")
        first, then = pair = min(free, key=self._pairs.__getitem__)
        rank = self._pairs.pop(pair)
        self._given_up.add(pair)
        around = [(before, then) for before, end in self._pairs if end is first]
        around += [(first, after) for start, after in self._pairs if start is then]
        self._pairs |= {one: rank for one in around if one[0] is not one[1] and one not in self._given_up}


def _around_borders(nodes: Sequence[fx.Node]) -> Iterator[_Pair]:
    """For each op that orders streams, the pairs of it and each other node, in the graph's order."""
    for place, border in enumerate(nodes):
        if orders_streams(border):
            yield from ((before, border) for before in nodes[:place])
            yield from ((border, after) for after in nodes[place + 1 :])


def _accesses(nodes: Sequence[fx.Node]) -> Iterator[_Pair]:
    """For each in-place operation, the pairs of it and what reads or writes the same memory, in the graph's order."""
    place = {node: index for index, node in enumerate(nodes)}
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for source in node.all_input_nodes:
            readers[source].append(node)
    for write in filter(mutates, nodes):
        whole = reachable(written_by(write), lambda node: node.all_input_nodes if shares_memory(node) else ())
        views = reachable(whole, lambda node: filter(shares_memory, node.users))
        for access in {reader for view in views for reader in readers[view]} - {write}:
            is_alias = not mutates(access) and torch_ops.may_alias(access)  # a view reads nothing
            if access.op != "output" and not is_alias:
                yield (access, write) if place[access] < place[write] else (write, access)
