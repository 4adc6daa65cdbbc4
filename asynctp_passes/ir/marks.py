"""Notes in the `meta` of nodes, by which the joint graph of a forward and its backward, and its halves, are one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from asynctp_passes.ir.order import communications
from asynctp_passes.ir.records import Question

CANDIDATE = "asynctp_candidate"
"""On a gather of the forward that is worth being made again: its place among those of its group."""

REMATERIALIZED = "asynctp_rematerialized"
"""On a gather of a backward that was one of the forward: the bytes gathered, 0 where symbolic."""

_JOINT = "asynctp_joint"


def note_joint(graph: fx.Graph, asked: Mapping[str, Question]) -> None:
    """Note, in all that communicates in a graph, what the ranks of each group were asked about it, with the answers."""
    for node in communications(graph.nodes) if asked else ():
        before: Mapping[str, tuple[Question, ...]] = node.meta.get(_JOINT, {})
        node.meta[_JOINT] = {**before, **{group: (*before.get(group, ()), one) for group, one in asked.items()}}


def joint_questions(graph: fx.Graph) -> dict[str, tuple[Question, ...]]:
    """Read what was noted of a graph, by group."""
    found: dict[str, dict[Question, None]] = {}
    for node in communications(graph.nodes):
        for group, asked in node.meta.get(_JOINT, {}).items():
            found.setdefault(group, {}).update(dict.fromkeys(asked))
    return {group: tuple(sorted(asked, key=lambda one: one.phase)) for group, asked in found.items()}
