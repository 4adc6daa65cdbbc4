"""Let ranks on CPUs compare what they run, before a graph first communicates in a group.

x → all_reduce                becomes                asynctp::run_check(x),   x → all_reduce
"""

from __future__ import annotations

import torch
from torch import fx

from asynctp_passes import compat
from asynctp_passes.ir.nodes import tensor_of, value_of
from asynctp_passes.ir.order import communicates
from asynctp_passes.ops import run_check  # noqa: F401  (it registers torch.ops.asynctp.run_check)
from asynctp_passes.rewriting.builder import RewriteState
from asynctp_passes.rewriting.places import mark_front

__all__ = ["Checks", "emit_run_checks", "mark_run_checks", "placed"]

Checks = list[tuple[str, fx.Node]]
"""Groups, each with the node in front of which its ranks compare, or with a mark of that place."""


def mark_run_checks(state: RewriteState) -> Checks:
    """Mark where the groups that compare communicate first in the program.

    Not earlier: ranks of another group may have to go on first, so that those that are awaited come at all.
    """
    return [(group, mark_front(state, made[0].start)) for group, made in state.plan.checked.items()]


def placed(marked: Checks) -> Checks:
    """The checks, each with what communicates next after its mark, or the graph's output."""
    return [(group, _next_communication(mark)) for group, mark in marked]


def _next_communication(mark: fx.Node) -> fx.Node:
    node = mark.next
    while node.op != "output" and not communicates(node):
        node = node.next
    return node


def emit_run_checks(state: RewriteState, checks: Checks) -> None:
    """Insert each check in front of its node."""
    op = torch.ops.asynctp.run_check.default
    for group, first in checks:
        beside = _beside(first)
        accord, made = state.plan.accord(group), state.plan.checked[group]
        with state.graph.inserting_before(first):
            node = state.graph.call_function(op, (beside, accord, len(made), made[0].group))
        with compat.without_guards(value_of(beside)):
            node.meta["val"] = op(value_of(beside), accord, len(made), group)


def _beside(first: fx.Node) -> fx.Node:
    """A tensor that is there before a node: it decides on which device ranks compare."""
    node = next((one for one in first.all_input_nodes if tensor_of(one) is not None), first)
    while tensor_of(node) is None:
        node = node.prev
    return node
