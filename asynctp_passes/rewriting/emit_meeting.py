"""Let ranks meet before a group's first call of a graph that sends otherwise than its program does.

x → all_reduce                becomes                asynctp::meet(x),   x → all_reduce

A group meets where the program first communicates in it, and no earlier. Ranks of another group, of an earlier call,
may have to go on first, so that those that are awaited come at all.
"""

from __future__ import annotations

import hashlib

import torch
from torch import fx

from asynctp_passes import compat
from asynctp_passes.ir.nodes import tensor_of, value_of
from asynctp_passes.ir.order import communicates
from asynctp_passes.ir.records import Ballot
from asynctp_passes.ops import meeting  # noqa: F401  (it registers torch.ops.asynctp.meet)
from asynctp_passes.rewriting.builder import RewriteState
from asynctp_passes.rewriting.places import mark_front

__all__ = ["Meetings", "emit_meetings", "mark_meetings", "placed"]

Meetings = list[tuple[Ballot, fx.Node]]
"""Ballots, each with the node that its group meets in front of, or with a mark of that place."""


def mark_meetings(state: RewriteState) -> Meetings:
    """Mark where the groups that meet communicate first in the program; only in a graph that is compiled."""
    meetings = state.plan.meetings if compat.is_compiled(state.graph) else []
    firsts = {one.candidate.collective.group_key: one.candidate.collective for one in reversed(state.plan.decisions)}
    return [(ballot, mark_front(state, firsts[ballot.group].start)) for ballot in meetings]


def placed(marked: Meetings) -> Meetings:
    """The meetings, each with what communicates next after its mark, or the graph's output."""
    return [(ballot, _next_communication(mark)) for ballot, mark in marked]


def _next_communication(mark: fx.Node) -> fx.Node:
    node = mark.next
    while node.op != "output" and not communicates(node):
        node = node.next
    return node


def emit_meetings(graph: fx.Graph, meetings: Meetings) -> None:
    """Insert each meeting in front of its node."""
    op = torch.ops.asynctp.meet.default
    for ballot, first in meetings:
        beside = _beside(first)
        told = "; ".join(sorted(ballot.deviations))
        key = hashlib.sha256(f"{ballot.key} {told}".encode()).hexdigest()[:16]
        with graph.inserting_before(first):
            node = graph.call_function(op, (beside, key, told, ballot.group))
        with compat.without_guards(value_of(beside)):
            node.meta["val"] = op(value_of(beside), key, told, ballot.group)


def _beside(first: fx.Node) -> fx.Node:
    """A tensor that is there before a node: it decides on which device ranks meet."""
    node = next((one for one in first.all_input_nodes if tensor_of(one) is not None), first)
    while tensor_of(node) is None:
        node = node.prev
    return node
