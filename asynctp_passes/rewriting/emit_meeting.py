"""Let ranks meet before a graph that sends otherwise than its program, where its transport does not compare calls.

x → all_reduce                becomes                asynctp::meet(x),   x → all_reduce
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import fx

from asynctp_passes import compat
from asynctp_passes.ir.nodes import tensor_of, value_of
from asynctp_passes.ir.order import communications
from asynctp_passes.ir.records import Ballot
from asynctp_passes.ops import meeting  # noqa: F401  (it registers torch.ops.asynctp.meet)

__all__ = ["emit_meetings"]


def emit_meetings(graph: fx.Graph, ballots: Iterable[Ballot]) -> None:
    """Insert a meeting for each ballot in front of what communicates first; only in a graph that is compiled.

    Args:
        graph: A graph with at least one tensor.
        ballots: The deviations of each group, which all its ranks do.
    """
    if not compat.is_compiled(graph):
        return
    first = next(iter(communications(graph.nodes)), graph.output_node())
    for ballot in ballots:
        beside = _beside(first)
        told = "; ".join(sorted(ballot.deviations))
        key = hashlib.sha256(f"{ballot.key} {told}".encode()).hexdigest()[:16]
        op = torch.ops.asynctp.meet.default
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
