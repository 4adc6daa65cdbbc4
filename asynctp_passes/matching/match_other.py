"""Say why collectives of other kinds, and those that cannot be read, are left alone. Pure."""

from __future__ import annotations

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.calls import Collective
from asynctp_passes.ir.collectives import unknown_group
from asynctp_passes.ir.nodes import called_name, describe, mutates, op_name, tensor_of
from asynctp_passes.ir.registry import can_promise, collective_op, kind_of_other
from asynctp_passes.matching.chains import Candidate
from asynctp_passes.matching.match_context import MatchContext
from asynctp_passes.reasons import Refusal

__all__ = ["match_other"]


def match_other(context: MatchContext, collective: Collective) -> Candidate:
    """Collectives of other kinds, and those that cannot be read."""
    nodes = context.sorted([collective.node, *collective.waits])
    return Candidate(collective, None, (_other_refusal(context, collective),), nodes)


def _other_refusal(context: MatchContext, collective: Collective) -> Refusal:
    name = called_name(collective.node)
    if collective.is_unused:
        return Refusal(reasons.RESULT_UNUSED, f"{describe(collective.input)} of {name}")
    if name.startswith("symm_mem.fused"):
        return Refusal(reasons.ALREADY_FUSED, name)
    op = collective_op(op_name(collective.node))
    kind = kind_of_other(name) if op is None else op.kind
    if kind == "other" and not can_promise(name):
        return Refusal(reasons.OTHER_COLLECTIVE, name)
    reached = (kind in ("all_gather", "other") and _results_reach_matmul(context, collective.node)) or (
        kind != "all_gather" and _inputs_reach_matmul(context, collective.node)
    )
    known = op is not None and tensor_of(collective.node) is not None
    facts = f"{name} makes {describe(collective.node)} of {describe(collective.input)}" if known else name
    if (group := unknown_group(collective.call or collective.node)) is not None:
        facts = (
            f"{name} over {group!r}, which no process group here is called: register it with groups={{{group!r}: ...}}"
        )
    return Refusal(reasons.COLLECTIVE_NOT_UNDERSTOOD if reached else reasons.NO_MATMUL, facts)


def _results_reach_matmul(context: MatchContext, own: fx.Node) -> bool:
    """True when what an op returns, or what it writes to, leads to a matmul's left operand."""
    results = [own, *(user for user in own.users if op_name(user) == "getitem")]
    written = own.all_input_nodes if mutates(own) else []
    later = [(source, user) for source in written for user in source.users if context.order[user] > context.order[own]]
    uses = [(result, user) for result in results for user in result.users] + later
    return any(context.ways_down.path(user, source) for source, user in uses)


def _inputs_reach_matmul(context: MatchContext, own: fx.Node) -> bool:
    """True when a matmul leads to what an op reads."""
    return any(context.ways_up.path(source, own) for source in own.all_input_nodes)
