"""The plan of a graph: all that is to be done to it, decided before any of it is done. Pure."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.config import Config
from asynctp_passes.ir.collectives import read_collectives, read_sizes
from asynctp_passes.ir.nodes import has_side_effect, mutates, op_name, value_of
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.order import REMATERIALIZED, communications, is_opaque, joint_questions
from asynctp_passes.ir.records import Answers, Question
from asynctp_passes.ir.traversal import phase_of, reachable, segments, tangents_of
from asynctp_passes.matching.chains import (
    Bucket,
    Candidate,
    Chain,
    Decision,
    GatherChain,
    dropped_collectives,
    fused_chains,
)
from asynctp_passes.matching.find import find
from asynctp_passes.ops.checks import EXTREMES, PLAIN_DTYPES
from asynctp_passes.planning.bucketing import deviations_of, find_buckets
from asynctp_passes.planning.deviations import Words, communicated
from asynctp_passes.planning.legality import (
    CHECKS,
    Context,
    blind_calls,
    can_be_alone,
    goes_by_wire,
    is_tensor_parallel,
    on_wire,
    ranks_alike,
)
from asynctp_passes.planning.overlap import plan_overlap
from asynctp_passes.reasons import Outcome, Refusal
from asynctp_passes.torch_private import inductor_order, partitioner


# --- decisions: one for each collective -----------------------------------------------------------------------------
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
    context = dataclasses.replace(context, unused=_dropped_everywhere(collectives, context))

    def allowed(candidate: Candidate) -> bool:
        return candidate.chain is not None and _verdict(candidate, context) is None

    return decide(find(graph, collectives, sizes, allowed), context), context


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


def decide(candidates: Sequence[Candidate], context: Context) -> list[Decision]:
    """One decision per candidate, in the same order: the first failed check, or FUSED.

    A collective that is part of another one's chain shares its fate.
    """
    refused = [one for one in candidates if one.weights and one.refusals]
    right = [one for one in refused if one.refusals[0].reason is reasons.GATHER_IS_RIGHT_OPERAND]
    with_weights = frozenset(one.collective.group_key for one in right)
    groups = frozenset(one.collective.group_key for one in candidates if is_tensor_parallel(one, with_weights))
    context = dataclasses.replace(context, tensor_parallel=groups, with_weights=with_weights)
    return [Decision(candidate, _verdict(candidate.joins or candidate, context)) for candidate in candidates]


def _verdict(candidate: Candidate, context: Context) -> Refusal | None:
    return next((refusal for check in CHECKS if (refusal := check(candidate, context)) is not None), None)


def _as_all_do(decisions: Sequence[Decision], context: Context) -> tuple[list[Decision], Context]:
    """The decisions from before the ranks were asked, without the refused deviations, and their context.

    No other decision takes the place of a refused one.
    """
    collectives = [one.candidate.collective for one in decisions]
    context = dataclasses.replace(context, unused=_dropped_everywhere(collectives, context))
    return [_as_refused(one, context) for one in decisions], context


def _as_refused(decision: Decision, context: Context) -> Decision:
    """A decision that is MISSED where its deviations are refused."""
    candidate = decision.candidate
    if decision.refusal is None:
        return dataclasses.replace(decision, refusal=ranks_alike(candidate.joins or candidate, context))
    if decision.refusal.reason is reasons.RESULT_DROPPED and candidate.collective.node not in context.unused:
        return dataclasses.replace(decision, refusal=Refusal(reasons.RANKS_DIFFER, decision.refusal.facts))
    return decision


# --- the plan -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is to be done to a graph, and the facts by which that was decided."""

    decisions: list[Decision]
    context: Context
    buckets: list[Bucket]

    def accord(self, group: str) -> int:
        """The number that every call of the graph in a group carries: what its ranks have agreed on; 0 for nothing."""
        answer = self.context.answers.get(group)
        return 0 if answer is None else answer.accord

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """The candidate of each collective, in graph order."""
        return [one.candidate for one in self.decisions]

    @functools.cached_property
    def wire(self) -> frozenset[str]:
        """The groups whose collectives go by asynctp's ops, without a matmul too: a peer may have one there."""
        found = (one.collective for one in self.candidates)
        return frozenset(one.group_key for one in found if goes_by_wire(one, self.context.config))

    @functools.cached_property
    def checked(self) -> dict[str, list[Collective]]:
        """By group, the collectives before which ranks compare what they run (`ops.run_check`): of those on CPUs.

        On GPUs unlike calls are found in symmetric memory, and the host waits for nobody. Only compiled graphs check.
        """
        found: dict[str, list[Collective]] = {}
        for one in (one.collective for one in self.candidates if inductor_order.is_compiled(self.context.graph)):
            if one.group_key in self.wire and one.group_size != 1 and not on_wire(one):
                found.setdefault(one.group_key, []).append(one)
        return found

    def is_own(self, collective: Collective) -> bool:
        """True for one that goes by asynctp's own transport, on devices that have it."""
        return collective.group_key in self.wire

    @functools.cached_property
    def own_parts(self) -> list[Candidate]:
        """Those whose all-reduce becomes a reduce-scatter without a matmul, on any device."""
        left = [one.candidate for one in self.decisions if one.refusal is not None and not one.overlaps_with]
        dropped = {one.node for one in self.dropped}
        found = [one for one in left if one.own_part is not None and one.collective.node not in dropped]
        return [one for one in found if self._scatters_alone(one.collective)]

    def _scatters_alone(self, collective: Collective) -> bool:
        """True where all ranks of a group on the wire reduce-scatter in place of an all-reduce."""
        own = self.is_own(collective) and can_be_alone(collective)
        if not own or value_of(collective.source).dtype not in PLAIN_DTYPES:
            return False
        text = self.context.words.of_own_part(collective)
        return self.context.refused(collective.group_key, text, collective) is None

    @functools.cached_property
    def alone(self) -> list[Collective]:
        """Collectives that are not fused, bucketed, overlapped or scattered, and that become an op of asynctp's.

        Tensors of a list become a collective each, also on devices without that transport: a peer may multiply one.
        """
        others = {*self._bucketed, *(one.collective.node for one in self.own_parts)}
        return [
            one.candidate.collective
            for one in self.decisions
            if one.refusal is not None and not one.overlaps_with and one.refusal.reason is not reasons.RESULT_DROPPED
            if one.candidate.collective.node not in others and self._goes_alone(one.candidate)
        ]

    @functools.cached_property
    def _bucketed(self) -> set[fx.Node]:
        return {member.node for bucket in self.buckets for member in bucket.members}

    @functools.cached_property
    def accelerated(self) -> set[fx.Node]:
        """The nodes of the collectives that go by an op of asynctp's own, without a matmul.

        Not those tensors of a list that become a collective of torch's each, on a device without that transport.
        """
        own_parts = (one.collective for one in self.own_parts)
        return {collective.node for collective in (*self.alone, *own_parts) if on_wire(collective)}

    def op_alone(self, collective: Collective) -> str:
        """The op of asynctp's by which a collective goes without a matmul; empty where it does not."""
        if collective.node not in self.accelerated:
            return ""
        scatters = any(one.collective is collective for one in self.own_parts)
        return "asynctp::reduce_scatter" if scatters else f"asynctp::{collective.kind}"

    def outcome(self, decision: Decision) -> Outcome:
        """The outcome of a collective of this plan. Its reason comes first: strict counts a miss whatever is done."""
        node, found = decision.candidate.collective.node, outcome_of(decision)
        if found != "SKIPPED":
            return found
        if node in self._bucketed:
            return "BUCKETED"
        if REMATERIALIZED in node.meta and phase_of(self.context.graph) == "backward":
            return "REMATERIALIZED"
        return "ACCELERATED" if node in self.accelerated else "SKIPPED"

    def _goes_alone(self, candidate: Candidate) -> bool:
        """True for a collective that goes by it, and for a tensor of a list: a peer may multiply that one."""
        collective = candidate.collective
        moves = on_wire(collective) or (collective.call is not None and collective.reduce_op not in EXTREMES)
        return moves and self.is_own(collective) and can_be_alone(collective)

    @functools.cached_property
    def chains(self) -> list[Chain]:
        """The chains that become one op each, in the order of their collectives."""
        return fused_chains(self.decisions)

    @property
    def overlapped(self) -> list[Decision]:
        """The decisions of collectives that run beside matmuls."""
        return [decision for decision in self.decisions if decision.overlaps_with]

    @functools.cached_property
    def used(self) -> dict[fx.Node, bool]:
        """For each gather on asynctp's wire whether its result is used, beside matmuls or without."""
        found = {one.collective: one.returned is not None for one in self.chains if isinstance(one, GatherChain)}
        found |= dict.fromkeys([*self.alone, *(one.candidate.collective for one in self.overlapped)], True)
        return {one.node: is_used for one, is_used in found.items() if one.kind == "all_gather" and on_wire(one)}

    @functools.cached_property
    def kept_by_all(self) -> list[Collective]:
        """Gathers on asynctp's wire whose result is used, on this rank or by its peers. All ranks pull them."""
        found = [one.collective for one in self.candidates if one.collective.node in self.used]
        answers, words = self.context.answers, self.context.words

        def is_kept_by_all(one: Collective) -> bool:
            answer = answers.get(one.group_key)
            return self.used[one.node] if answer is None else words.of_kept(one) in answer.agreed

        return [one for one in found if is_kept_by_all(one)]

    @property
    def dropped(self) -> list[Collective]:
        """The collectives that are not made, since nothing uses them."""
        return dropped_collectives(self.decisions)


def outcome_of(decision: Decision) -> Outcome:
    """The outcome of a collective by its own decision alone."""
    return "FUSED" if decision.refusal is None else decision.refusal.reason.outcome


def planned(graph: fx.Graph, config: Config, answers: Answers | None = None) -> Plan:
    """Plan a graph, as the ranks' `answers` allow; before they were asked, without answers, with all deviations."""
    return _planned(*decide_graph(graph, config, answers))


def _planned(found: list[Decision], context: Context) -> Plan:
    """The plan of these decisions."""
    decisions = plan_overlap(context.graph, found)
    if "overlap" in context.config.skip:  # what could be fused is, and what would run beside matmuls is left alone
        refusal = Refusal(reasons.STEP_SKIPPED, "overlap")
        decisions = [
            dataclasses.replace(was, refusal=refusal) if was.refusal is not None and one.overlaps_with else was
            for was, one in zip(found, decisions, strict=True)
        ]
    buckets = []
    for one in find_buckets(decisions, context):
        group, text = one.collective.group_key, context.words.of_bucket(one)
        if context.refused(group, text, *one.members, until=one.place) is None:
            buckets.append(one)
    return Plan(decisions, context, buckets)


def without_refused(plan: Plan, answers: Answers) -> Plan:
    """The plan as the answers allow: made anew or, if that loses what was agreed, without what was refused."""
    context = dataclasses.replace(plan.context, answers=answers)
    if not any(answer.refused for answer in answers.values()):
        return dataclasses.replace(plan, context=context)
    again = planned(context.graph, context.config, answers)
    agreed = {(group, text) for group, answer in answers.items() for text in answer.agreed}
    made, left = (set(deviations_of(one.decisions, context.words)) & agreed for one in (plan, again))
    if made <= left:
        return again
    # a chain that took the place of a refused one stands in another's way: that one's peers do it
    found, first = decide_graph(context.graph, context.config)
    return _planned(*_as_all_do(found, dataclasses.replace(first, answers=answers)))


def questions_of(plan: Plan) -> list[Question]:
    """For each group that communicates in a graph what is asked about it, also where that is nothing."""
    words, graph = plan.context.words, plan.context.graph
    texts, keeps, could = (collections.defaultdict[str, list[str]](list) for _ in range(3))
    for group, text in deviations_of(plan.decisions, words):
        texts[group].append(text)
    for bucket in plan.buckets:
        texts[bucket.collective.group_key].append(words.of_bucket(bucket))
    for part in plan.own_parts:
        texts[part.collective.group_key].append(words.of_own_part(part.collective))
    scattered = [*(one.candidate for one in plan.decisions if one.refusal is None), *plan.own_parts]
    ranks = {one.collective.group_key: one.own_part.rank for one in scattered if one.own_part is not None}
    for gather in (one.collective for one in plan.candidates if one.collective.node in plan.used):
        (keeps if plan.used[gather.node] else could)[gather.group_key].append(words.of_kept(gather))
    communicates, joint = communicated(one.collective for one in plan.candidates), joint_questions(graph)
    return [
        Question(
            group,
            phase_of(graph),
            key,
            deviations=tuple(sorted(texts[group])),
            keeps=tuple(sorted(keeps[group])),
            can_keep=tuple(sorted(could[group])),
            joint=joint.get(group, ()),
            rank=ranks.get(group, -1),
        )
        for group, key in communicates.items()
    ]


def unfused(graph: fx.Graph, config: Config, answers: Answers) -> Plan:
    """The plan in which all collectives go by asynctp's transport, and none is fused."""
    collectives = read_collectives(graph)
    sizes = read_sizes(graph, collectives)
    context = Context(graph, sizes, config, segments(graph), frozenset(), words=Words(collectives), answers=answers)
    return Plan([untouched(one, config, "", True) for one in collectives], context, [])


def untouched(collective: Collective, config: Config, summary: str, multiplies: bool) -> Decision:
    refusal = Refusal(reasons.INTERNAL_ERROR, summary)
    out_of_scope = {
        reasons.OTHER_COLLECTIVE: collective.kind == "other",
        reasons.GROUP_NOT_ENROLLED: not config.enrolls(collective.group_key),
        reasons.SINGLE_RANK: collective.group_size == 1,
        reasons.NO_MATMUL: not multiplies,
    }
    for reason, holds in out_of_scope.items():
        if holds:
            refusal = Refusal(reason)
            break
    return Decision(Candidate(collective, None, (refusal,), collective.nodes), refusal)
