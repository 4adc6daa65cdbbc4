"""Let ranks on CPUs compare what they run, before a graph communicates in a group.

x → all_reduce                becomes                asynctp::run_check(x),   x → all_reduce
"""

from __future__ import annotations

import torch
from torch import fx

from asynctp_passes.ir.nodes import tensor_of, value_of
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.order import communicates
from asynctp_passes.rewriting.builder import RewriteState, mark_front
from asynctp_passes.torch_private import symbolic_sizes

Checks = list[tuple[list[Collective], fx.Node]]
"""The collectives of a group, each with the node or the mark in front of which its ranks compare."""


def mark_run_checks(state: RewriteState) -> Checks:
    """Mark where groups compare: before each collective, or of a graph with an accord before the first one.

    Not earlier: ranks of another group may have to go on first, so that those that are awaited come at all.
    """
    marked: Checks = []
    for group, made in state.plan.checked.items():
        together: dict[fx.Node, list[Collective]] = {}
        for one in made:
            together.setdefault(made[0].start if state.plan.accord(group) else one.start, []).append(one)
        marked += [(ones, mark_front(state, start)) for start, ones in together.items()]
    return marked


def placed(marked: Checks) -> Checks:
    """The checks, each with what communicates next after its mark, or the graph's output."""
    return [(ones, _next_communication(mark)) for ones, mark in marked]


def _next_communication(mark: fx.Node) -> fx.Node:
    node = mark.next
    while node.op != "output" and not communicates(node):
        node = node.next
    return node


def emit_run_checks(state: RewriteState, checks: Checks) -> None:
    """Insert each check in front of its node."""
    op = torch.ops.asynctp.run_check.default
    for ones, first in checks:
        beside, one = _beside(first), ones[0]
        told = (state.plan.accord(one.group_key), len(ones))
        with state.graph.inserting_before(first):
            node = state.graph.call_function(op, (beside, *told, one.group))
        with symbolic_sizes.without_guards(value_of(beside)):
            node.meta["val"] = op(value_of(beside), *told, one.group_key)


def _beside(first: fx.Node) -> fx.Node:
    """A tensor that is there before a node: it decides on which device ranks compare."""
    node = next((one for one in first.all_input_nodes if tensor_of(one) is not None), first)
    while tensor_of(node) is None:
        node = node.prev
    return node
