"""Which gathers of a forward are worth being made again in the backward. Pure: `joint` marks them.

A gathered tensor is most of what a layer with sequence parallelism keeps for its backward. A gather is worth making
again if a fused op of the forward takes it in, the backward needs more of it than what products made, and activation
checkpointing has not tagged it. Its group has to communicate in the backward anyway: another rank may run no backward
in which it need not communicate. `"auto"` also asks that it is known to be worth a call, and that matmuls of the
backward in no fused op, beside which the link is free, take as long as all such gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import mutates
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.traversal import reachable, tangents_of
from asynctp_passes.matching.chains import Decision, fused_chains
from asynctp_passes.planning import cost_model
from asynctp_passes.remat.expressible import repeatable_uses
from asynctp_passes.torch_private import partitioner

LEAST_BYTES = 32 << 20
"""`"auto"` leaves a gather by which a rank receives fewer: the host takes as long to start it (0.1 ms), and a program
that moves so little waits for the host. Source: `docs/results/2026-11-22-h200x2/regather.txt`.
"""


def rematerialization_candidates(
    graph: fx.Graph, decisions: Sequence[Decision], rematerialize: str
) -> list[Collective]:
    """The gathers of a joint graph, not yet partitioned, that are worth being made again in the backward, in order."""
    if rematerialize == "never":
        return []
    backward = {node for node in reachable(tangents_of(graph), lambda node: node.users) if node.op == "call_function"}
    groups = {one.candidate.collective.group_key for one in decisions if one.candidate.collective.node in backward}
    gathers = [
        one.candidate.collective
        for one in decisions
        if _is_taken_in(one, backward)
        and one.candidate.collective.group_key in groups
        and _is_needed(one.candidate.collective, backward)
    ]
    return gathers if rematerialize == "always" else _overlapped(gathers, decisions, backward)


def _is_taken_in(decision: Decision, backward: set[fx.Node]) -> bool:
    """True for a gather that a fused op of the forward takes in, or would, but for what else needs it."""
    chain, own = decision.candidate.chain, decision.candidate.collective
    fused = decision.refusal is None or decision.refusal.reason is reasons.MOVES_MORE
    if chain is None or chain.collective.kind != "all_gather" or own.call is not None or mutates(own.node):
        return False
    return fused and any(one.node not in backward for one in chain.matmuls)


def _is_needed(gather: Collective, backward: set[fx.Node]) -> bool:
    """True where the backward needs a gather of the forward, or what is computed of it, and nobody has tagged that."""
    nodes = repeatable_uses(gather)
    tagged = any(partitioner.recompute_tag(node) is not None for node in (*gather.nodes, *nodes))
    return not tagged and any(user in backward for node in nodes for user in node.users)


def _overlapped(
    gathers: Sequence[Collective], decisions: Sequence[Decision], backward: set[fx.Node]
) -> list[Collective]:
    """Those of the gathers that are worth a call, if products in no fused op take as long as all of them."""
    received = ((gather, cost_model.received_bytes(gather.node, gather.group_size)) for gather in gathers)
    large = [(gather, size) for gather, size in received if size is not None and size >= LEAST_BYTES]
    fused = {node for chain in fused_chains(decisions) for node in nodes_of(chain.matmuls)}
    work = [cost_model.work_of(node) for node in backward if is_matmul(node) and node not in fused]
    overlap = large and cost_model.covers(work, sum(size for _, size in large), gathers[0].node)
    return [gather for gather, _ in large] if overlap else []
