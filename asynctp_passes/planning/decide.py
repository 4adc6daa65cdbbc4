"""Decide, for every candidate, whether it is fused, or why not. Pure: nothing is edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.ir.collectives import read_collectives, read_sizes
from asynctp_passes.ir.nodes import has_side_effect, mutates, op_name
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.order import communications, is_opaque
from asynctp_passes.ir.records import Answers
from asynctp_passes.ir.traversal import phase_of, reachable, segments, tangents_of
from asynctp_passes.matching.chains import Candidate, Decision
from asynctp_passes.matching.find import find
from asynctp_passes.planning.deviations import Words
from asynctp_passes.planning.legality import CHECKS, Context, blind_calls, is_tensor_parallel, ranks_alike
from asynctp_passes.reasons import GATHER_IS_RIGHT_OPERAND as RIGHT_OPERAND
from asynctp_passes.reasons import RANKS_DIFFER, RESULT_DROPPED, Refusal
from asynctp_passes.torch_private import partitioner


def decide_graph(graph: fx.Graph, config: Config, answers: Answers | None = None) -> tuple[list[Decision], Context]:
    """One decision per collective of a graph, in order, and what they were made with, as the ranks' `answers` allow."""
    collectives = read_collectives(graph)
    unused = unused_collectives(graph, collectives, config)
    sizes = read_sizes(graph, collectives, erased=unused)
    context = Context(
        graph,
        sizes,
        config,
        segments(graph),
        unused,
        words=Words(collectives),
        answers=answers or {},
        blind=blind_calls(collectives, config),
        opaque=[node for node in communications(graph.nodes) if is_opaque(node)],
    )
    context = replace(context, unused=_dropped_everywhere(collectives, context))
    candidates = find(graph, collectives, context.sizes, lambda candidate: allowed(candidate, context))
    return decide(candidates, context), context


def unused_collectives(graph: fx.Graph, collectives: Sequence[Collective], config: Config) -> frozenset[fx.Node]:
    """Collectives of enrolled groups whose result nothing uses, where these can go: what the partitioner left.

    It copies to each half of a training step all that can be computed there, and misses collectives whose users it
    erases afterwards. What is no such copy stays, those of a forward, of inference, or of the gradients that come in: a
    program may leave the result unused on some ranks only, and all of them take part.
    """
    phase = phase_of(graph)
    if phase == "inference":
        return frozenset()
    left = [one for one in collectives if phase == "backward" or partitioner.is_of_backward(one.node)]
    of_gradients = reachable(tangents_of(graph), lambda node: node.users)
    torchs = (one for one in left if op_name(one.node).startswith("_c10d_functional.") and not mutates(one.node))
    single = [one for one in torchs if one.kind != "other" and config.enrolls(one.group_key)]
    ours = {one.node: one for one in single if one.node not in of_gradients}
    waits = {wait for one in ours.values() for wait in one.waits}
    others = [node for node in graph.nodes if node not in ours and node not in waits and has_side_effect(node)]
    gone = frozenset(ours) - reachable(others)
    return frozenset(node for node in gone if _serves_own_group(ours[node], ours))


def _serves_own_group(collective: Collective, unused: Mapping[fx.Node, Collective]) -> bool:
    """True where all unused collectives that need this one are of its group: its ranks decide on all of them at once.

    Others have ranks that may decide otherwise, and the collective would be needed.
    """
    after = reachable([collective.node], lambda node: node.users)
    return all(unused[node].group_key == collective.group_key for node in after if node in unused)


def _dropped_everywhere(collectives: Sequence[Collective], context: Context) -> frozenset[fx.Node]:
    """Those of the unused collectives that all ranks of their group leave out."""
    groups: dict[str, list[Collective]] = {}
    for one in collectives:
        if one.node in context.unused and context.compares_all(one.group_key):
            groups.setdefault(one.group_key, []).append(one)
    gone = (found for group, found in groups.items() if not context.refused(group, context.words.of_dropped(found)))
    return frozenset(one.node for found in gone for one in found)


def allowed(candidate: Candidate, context: Context) -> bool:
    """True when a candidate with a chain passes every check."""
    return candidate.chain is not None and _verdict(candidate, context) is None


def decide(candidates: Sequence[Candidate], context: Context) -> list[Decision]:
    """One decision per candidate, in the same order: the first failed check, or FUSED.

    A collective that is part of another one's chain shares its fate.
    """
    right = [one for one in candidates if one.weights and one.refusals[:1] and one.refusals[0].reason is RIGHT_OPERAND]
    with_weights = frozenset(one.collective.group_key for one in right)
    groups = frozenset(one.collective.group_key for one in candidates if is_tensor_parallel(one, with_weights))
    context = replace(context, tensor_parallel=groups, with_weights=with_weights)
    return [Decision(candidate, _verdict(candidate.joins or candidate, context)) for candidate in candidates]


def _verdict(candidate: Candidate, context: Context) -> Refusal | None:
    return next((refusal for check in CHECKS if (refusal := check(candidate, context)) is not None), None)


def without(decisions: Sequence[Decision], context: Context) -> tuple[list[Decision], Context]:
    """The decisions from before the ranks were asked, without the refused deviations, and their context.

    No other decision takes the place of a refused one.
    """
    collectives = [one.candidate.collective for one in decisions]
    context = replace(context, unused=_dropped_everywhere(collectives, context))
    return [_as_refused(one, context) for one in decisions], context


def _as_refused(decision: Decision, context: Context) -> Decision:
    """A decision that is MISSED where its deviations are refused."""
    candidate = decision.candidate
    if decision.refusal is None:
        return replace(decision, refusal=ranks_alike(candidate.joins or candidate, context))
    if decision.refusal.reason is RESULT_DROPPED and candidate.collective.node not in context.unused:
        return replace(decision, refusal=Refusal(RANKS_DIFFER, decision.refusal.facts))
    return decision
