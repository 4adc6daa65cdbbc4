"""The order of communication: which nodes of a graph start to communicate, and that they keep their order. Pure.

Ranks share the order in which they call collectives, and nothing else: what a rank computes beside them is its own.
So each node that communicates stays after the one before it, whatever is done to the graph. A wait is no communication.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from torch import fx

from asynctp_passes import compat
from asynctp_passes.ir.collectives import looks_collective
from asynctp_passes.ir.nodes import called_op, is_size, name_of, op_name, subgraphs_of
from asynctp_passes.ir.registry import collective_op

__all__ = [
    "communicates",
    "communications",
    "in_turn",
    "latest_communication",
    "program_order",
    "record_order",
    "recorded_place",
    "unrecorded",
]

_PLACE = "asynctp_place"
"""In a node's `meta`: its place in the order in which the program communicates."""

_WITH_WAITS = "_c10d_functional"
"""The namespaces of ops that Inductor does not move, since waits follow them, begin so."""

_OWN_WAIT = "asynctp.wait.default"
_OTHER_WORDS = re.compile(r"(?:^|_)(?:broadcast|send|recv|isend|irecv|barrier|dispatch|combine|all2all)(?:_|$)")
"""Words in the names of ops that may communicate, besides those of collectives. To keep their order costs little."""


def communicates(node: fx.Node) -> bool:
    """True for a node that starts to communicate with other ranks, or runs one that does; it may only look as if."""
    if node.op != "call_function":
        return False
    op = called_op(node)
    ops = [node.target] if op is None else [op]
    named = ops if compat.is_op(node.target) else [*ops, *filter(compat.is_op, node.args)]  # an op that runs an op
    if any(_communicates(name_of(one)) for one in named if compat.is_op(one)):
        return True
    return any(communicates(step) for graph in subgraphs_of(node) for step in graph.nodes)


def _communicates(name: str) -> bool:
    return _is_named_so(name) or collective_op(name) is not None


@functools.cache
def _is_named_so(name: str) -> bool:
    namespace, _, rest = name.partition(".")
    if namespace in ("aten", "prims"):
        return False
    if namespace == "asynctp":
        return name != _OWN_WAIT
    return looks_collective(name) or bool(_OTHER_WORDS.search(rest.partition(".")[0]))


def communications(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of some nodes that communicate, in the same order."""
    return [node for node in nodes if communicates(node)]


def in_turn(starts: Sequence[fx.Node], inputs: Mapping[fx.Node, Sequence[fx.Node]]) -> dict[fx.Node, Sequence[fx.Node]]:
    """The inputs of nodes, and for each of `starts` the one before it, too.

    Args:
        starts: What communicates, in order.
        inputs: What nodes are computed from, where that is not `all_input_nodes`.
    """
    found = dict(inputs)
    for before, node in pairwise(starts):
        found[node] = [*found.get(node, node.all_input_nodes), before]
    return found


def record_order(graph: fx.Graph) -> None:
    """Note the order of what communicates in its nodes' `meta`, before Inductor moves nodes to where they are used."""
    for place, node in enumerate(communications(graph.nodes)):
        node.meta[_PLACE] = place


def program_order(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that communicate, in the order that was recorded; one without a record keeps its place."""
    found = communications(graph.nodes)
    recorded = iter(sorted(filter(_is_recorded, found), key=lambda node: node.meta[_PLACE]))
    return [next(recorded) if _is_recorded(node) else node for node in found]


def recorded_place(node: fx.Node) -> int:
    """The place of a node in the order that was recorded; 0 for one without a record."""
    return int(node.meta.get(_PLACE, 0))


def unrecorded(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that communicate without a wait of torch's and have no record: Inductor may have moved them.

    Empty where any node has a record: one without came into the graph later.
    """
    found = communications(graph.nodes)
    if any(map(_is_recorded, found)):
        return []
    return [node for node in found if not op_name(node).startswith(_WITH_WAITS)]


def _is_recorded(node: fx.Node) -> bool:
    return _PLACE in node.meta


def latest_communication(graph: fx.Graph, items: Container[fx.Node] = ()) -> dict[fx.Node, int]:
    """For each node the place in the graph of the last communication that its values depend on; -1 without any.

    Of several tensors that are communicated together each of the `items` counts as communicated where it stands.
    """
    found: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        above = (found[source] for source in _read(node))
        found[node] = place if node in items or communicates(node) else max(above, default=-1)
    return found


def _read(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose values a node reads."""
    return iter(()) if is_size(node) else iter(node.all_input_nodes)
