"""Mark places in a graph: where new nodes go, while the nodes that are there now are erased."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from asynctp_passes.matching.chains import Chain
from asynctp_passes.rewriting.builder import RewriteState


def mark_front(state: RewriteState, place: fx.Node) -> fx.Node:
    """A new mark in front of a node. It stays where that is erased."""
    return _mark(state, place, _asynctp_front)


def mark_items(state: RewriteState, call: fx.Node) -> list[fx.Node]:
    """A mark for each tensor of a collective of several, in their order, whichever of them this rank takes in."""
    inputs = call.args[0]
    assert isinstance(inputs, list | tuple)
    marks = [_mark(state, call, _asynctp_item) for _ in inputs]
    state.items |= {user: marks[int(user.args[1])] for user in call.users}  # type: ignore[arg-type]
    return marks


def place_of(state: RewriteState, chain: Chain) -> fx.Node:
    """The node that a chain's fused op comes before: a mark, where it follows another node, or is an item."""
    if chain.follows is None:
        return max(state.items.get(one.node, one.start) for one in chain.placed_by)
    last = chain.follows
    while last.next.target is _asynctp_place:
        last = last.next
    with state.graph.inserting_after(last):
        mark = state.graph.call_function(_asynctp_place)
    state.segment[mark] = state.segment[chain.follows]
    return mark


def erase_marks(graph: fx.Graph) -> None:
    """Erase all marks."""
    for mark in [node for node in graph.nodes if node.target in (_asynctp_place, _asynctp_item, _asynctp_front)]:
        graph.erase_node(mark)


def _mark(state: RewriteState, place: fx.Node, kind: Callable[[], None]) -> fx.Node:
    with state.graph.inserting_before(place):
        mark = state.graph.call_function(kind)
    state.segment[mark] = state.segment[place]
    return mark


def _asynctp_front() -> None:
    """Marks a place in a graph: in front of a node, in the order of what comes before it."""


def _asynctp_place() -> None:
    """Marks a place in a graph: after a node, in the order of what follows it."""


def _asynctp_item() -> None:
    """Marks a place in a graph: of one tensor of several that are communicated together."""
