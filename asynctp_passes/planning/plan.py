"""The plan of a graph: all that is to be done to it, decided before any of it is done. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Set

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.config import Config
from asynctp_passes.ir.calls import Collective
from asynctp_passes.ir.collectives import read_collectives, read_sizes
from asynctp_passes.ir.records import Ballot
from asynctp_passes.ir.traversal import phase_of, segments
from asynctp_passes.matching.chains import (
    Bucket,
    Candidate,
    Chain,
    Decision,
    GatherChain,
    dropped_collectives,
    fused_chains,
)
from asynctp_passes.ops.checks import EXTREMES
from asynctp_passes.planning.bucketing import deviations_beside, find_buckets
from asynctp_passes.planning.decide import decide_graph, without
from asynctp_passes.planning.deviations import Words, communicated
from asynctp_passes.planning.legality import (
    Context,
    Verdict,
    can_be_alone,
    groups_of_parameters,
    groups_on_wire,
    on_wire,
)
from asynctp_passes.planning.overlap import plan_overlap
from asynctp_passes.planning.rematerialize import REMATERIALIZED, agreed_jointly
from asynctp_passes.reasons import RESULT_DROPPED, Outcome, Refusal

__all__ = ["Plan", "ballots_of", "outcome_of", "planned", "unfused", "untouched", "without_refused"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is to be done to a graph, and the facts by which that was decided."""

    decisions: list[Decision]
    context: Context
    buckets: list[Bucket]
    followed: frozenset[fx.Node] = frozenset()
    followed_plain: frozenset[str] = frozenset()
    accords: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def accord(self, group: str) -> int:
        """The number of what a group's ranks agreed that this graph does otherwise than its program; 0: nothing."""
        return self.accords.get(group, 0)

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """The candidate of each collective, in graph order."""
        return [one.candidate for one in self.decisions]

    @functools.cached_property
    def keys(self) -> dict[str, str]:
        """For each group what it communicates (`communicated`)."""
        return communicated((one.collective for one in self.candidates), phase_of(self.context.graph))

    @functools.cached_property
    def wire(self) -> frozenset[str]:
        """The groups whose collectives all go by asynctp's own transport."""
        return self._own_transport - self.plain

    @functools.cached_property
    def plain(self) -> frozenset[str]:
        """The groups that could use asynctp's transport, and whose collectives all ranks leave to torch."""
        found = groups_of_parameters(self.candidates, self.context.config) | self.followed_plain
        text = self.context.words.of_plain()
        return frozenset(group for group in found & self.movable if self.context.refused(group, text) is None)

    @functools.cached_property
    def movable(self) -> frozenset[str]:
        """The groups that could use asynctp's transport, and have a gather or sum for which it has an op."""
        collectives = (one.collective for one in self.candidates if one.collective.reduce_op not in EXTREMES)
        return self._own_transport & {one.group_key for one in collectives if on_wire(one) and can_be_alone(one)}

    def is_own(self, collective: Collective) -> bool:
        """True for one that goes by asynctp's own transport, on devices that have it.

        Maxima do so too in a group that is left to torch, whose collectives are of parameters. They are small, and a
        bucket of them is no call of its peers that have none.
        """
        groups = self._own_transport if collective.reduce_op in EXTREMES else self.wire
        return collective.group_key in groups

    @functools.cached_property
    def _own_transport(self) -> frozenset[str]:
        return groups_on_wire(self.candidates, self.context.config)

    @functools.cached_property
    def alone(self) -> list[Collective]:
        """The collectives without a matmul that go by it or are tensors of a list, but for those beside matmuls."""
        return [
            one.candidate.collective
            for one in self.decisions
            if one.refusal is not None and not one.overlaps_with and one.refusal.reason is not RESULT_DROPPED
            if one.candidate.collective.node not in self._bucketed and self._goes_alone(one.candidate)
        ]

    @functools.cached_property
    def _bucketed(self) -> set[fx.Node]:
        return {member.node for bucket in self.buckets for member in bucket.members}

    @functools.cached_property
    def accelerated(self) -> set[fx.Node]:
        """The nodes of the collectives that go by an op of asynctp's own, without a matmul.

        Not those tensors of a list that become a collective of torch's each, on a device without that transport.
        """
        return {collective.node for collective in self.alone if on_wire(collective)}

    def outcome(self, decision: Decision) -> Outcome:
        """The outcome of a collective of this plan. Its reason comes first: strict counts a miss whatever is done."""
        node, found = decision.candidate.collective.node, outcome_of(decision)
        if found != "SKIPPED":
            return found
        if node in self._bucketed:
            return "BUCKETED"
        if REMATERIALIZED in node.meta and self._is_backward:
            return "REMATERIALIZED"
        return "ACCELERATED" if node in self.accelerated else "SKIPPED"

    @functools.cached_property
    def _is_backward(self) -> bool:
        return phase_of(self.context.graph) == "backward"

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
    def fused_gathers(self) -> list[GatherChain]:
        """Those of gathers."""
        return [chain for chain in self.chains if isinstance(chain, GatherChain)]

    @property
    def overlapped(self) -> list[Decision]:
        """The decisions of collectives that run beside matmuls."""
        return [decision for decision in self.decisions if decision.overlaps_with]

    @property
    def kept(self) -> list[Collective]:
        """The gathers that go by it whose result this rank keeps, of fused chains too, or its peers do (`followed`)."""
        found = [one.collective for one in self.fused_gathers if one.returned is not None]
        found += [one.collective for one in self.fused_gathers if one.collective.node in self.followed]
        found += [one for one in self.alone if one.kind == "all_gather"]
        found += [one.candidate.collective for one in self.overlapped]
        found = [one for one in found if one.kind == "all_gather" and on_wire(one)]
        refused = self.context.refused
        return [one for one in found if refused(one.group_key, self.context.words.of_kept(one)) is None]

    @functools.cached_property
    def meetings(self) -> list[Ballot]:
        """The deviations before which ranks meet at run time: of groups that have torch's collectives alone.

        Not on GPUs: there unlike calls are found in symmetric memory, and the host waits for nobody.
        """
        collectives = [one.collective for one in self.candidates]
        blind = {one.group_key for one in collectives if not on_wire(one)}
        joint: dict[str, list[str]] = {}
        for one in collectives:
            if (agreed := agreed_jointly(one.node, in_backward=self._is_backward)) is not None:
                joint.setdefault(one.group_key, []).extend(agreed.deviations)
        found = [
            dataclasses.replace(ballot, deviations=(*ballot.deviations, *joint.get(ballot.group, ())))
            for ballot in ballots_of(self)
            if ballot.group in blind
        ]
        return [ballot for ballot in found if ballot.deviations]

    @property
    def dropped(self) -> list[Collective]:
        """The collectives that are not made, since nothing uses them."""
        return dropped_collectives(self.decisions)


def outcome_of(decision: Decision) -> Outcome:
    """The outcome of a collective by its own decision alone."""
    return "FUSED" if decision.refusal is None else decision.refusal.reason.outcome


def planned(
    graph: fx.Graph,
    config: Config,
    agreed: Set[tuple[str, str]] = frozenset(),
    verdict: Verdict | None = None,
    left: frozenset[str] = frozenset(),
) -> Plan:
    """Plan a graph.

    Args:
        graph: The graph.
        config: The configuration.
        agreed: The deviations, by group and text, on which all ranks have agreed in earlier graphs.
        verdict: What the ranks said to deviations; None before they were asked, when all are planned.
        left: Groups that are known to be left to torch, whose collectives nothing compares on GPUs.
    """
    return _planned(*decide_graph(graph, config, verdict, left), agreed)


def _planned(found: list[Decision], context: Context, agreed: Set[tuple[str, str]]) -> Plan:
    """The plan of these decisions."""
    graph, left = context.graph, context.left
    decisions = plan_overlap(graph, found)
    buckets = find_buckets(decisions, context)
    told = ((bucket, context.words.of_bucket(bucket)) for bucket in buckets)
    alike = [bucket for bucket, text in told if context.refused(bucket.collective.group_key, text) is None]
    plan = _following(Plan(decisions, context, alike), agreed)
    dropped = {one.group_key for one in plan.dropped if on_wire(one) and one.reduce_op not in EXTREMES}
    if blind := dropped & (plan.plain - left):
        return planned(graph, context.config, agreed, context.verdict, left | blind)
    shown = [
        before if after.overlaps_with and after.candidate.collective.group_key in plan.plain else after
        for before, after in zip(found, decisions, strict=True)
    ]  # what runs beside products goes by asynctp's transport
    return dataclasses.replace(plan, decisions=shown)


def without_refused(plan: Plan, verdict: Verdict, agreed: Set[tuple[str, str]] = frozenset()) -> Plan:
    """The plan without the deviations that a rank does not do; the same plan where all ranks do all of them.

    Args:
        plan: The plan that the ranks were asked about.
        verdict: What they said.
        agreed: As for `planned`.
    """
    accepted = {at for at, reason in verdict.items() if reason is None}
    if len(accepted) == len(verdict):
        return plan
    context, told = plan.context, agreed | accepted
    again = planned(context.graph, context.config, told, verdict)
    made, kept = (set(deviations_beside(each.decisions, context.words)) for each in (plan, again))
    if made & accepted <= kept:
        return again
    # a chain that took the place of a refused one stands in another's way: that one's peers do it
    found, first = decide_graph(context.graph, context.config, None, context.left)
    return _planned(*without(found, dataclasses.replace(first, verdict=verdict)), told)


def _following(plan: Plan, agreed: Set[tuple[str, str]]) -> Plan:
    """The plan that does what all ranks have agreed on before, and this one need not: peers may still run that graph.

    Gathers are kept, and the collectives of groups without a fused chain stay torch's.
    """
    words, fused = plan.context.words, {chain.collective.group_key for chain in plan.chains}
    plain = frozenset(group for group in plan.movable - plan.plain - fused if (group, words.of_plain()) in agreed)
    plan = dataclasses.replace(plan, followed_plain=plain)
    own = [chain.collective for chain in plan.fused_gathers if chain.returned is None and on_wire(chain.collective)]
    kept = frozenset(one.node for one in own if (one.group_key, words.of_kept(one)) in agreed)
    return dataclasses.replace(plan, followed=kept)


def ballots_of(plan: Plan) -> list[Ballot]:
    """For each group that communicates in a graph what changes what its ranks send, or nothing."""
    words = plan.context.words
    texts: dict[str, list[str]] = {}
    for group, text in deviations_beside(plan.decisions, words):
        texts.setdefault(group, []).append(text)
    for bucket in plan.buckets:
        texts.setdefault(bucket.collective.group_key, []).append(words.of_bucket(bucket))
    for group in plan.plain:
        texts.setdefault(group, []).append(words.of_plain())
    for gather in plan.kept:
        texts.setdefault(gather.group_key, []).append(words.of_kept(gather))
    return [Ballot(group, key, tuple(texts.get(group, ()))) for group, key in plan.keys.items()]


def unfused(graph: fx.Graph, config: Config, verdict: Verdict) -> Plan:
    """The plan in which all collectives go by asynctp's transport, and none is fused.

    Args:
        graph: The graph.
        config: The configuration.
        verdict: What the ranks said to what they had agreed on before.
    """
    collectives = read_collectives(graph)
    sizes, words = read_sizes(graph, collectives), Words(collectives)
    context = Context(graph, sizes, config, segments(graph), frozenset(), words=words, verdict=verdict)
    decisions = [untouched(one, config, "", True) for one in collectives]
    plain = frozenset(group for (group, text), reason in verdict.items() if text == words.of_plain() and reason is None)
    return Plan(decisions, context, [], followed_plain=plain)


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
