"""The order of the steps: find, decide, vote with the other ranks, report, raise if strict, and only then rewrite."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes import compat, ops, reasons
from asynctp_passes.config import Config
from asynctp_passes.ir.calls import Collective
from asynctp_passes.ir.nodes import (
    Sizes,
    describe,
    module_of,
    phase_of,
    plain,
    segments,
    source_of,
    tangents_of,
    value_of,
)
from asynctp_passes.ir.order import communications, record_order, unrecorded
from asynctp_passes.ir.read import called_name, is_matmul, read_collectives
from asynctp_passes.matching.chains import (
    Bundle,
    Candidate,
    Decision,
    GatherChain,
    Hoist,
    ScatterChain,
    Term,
    fused_chains,
)
from asynctp_passes.planning import cost_model
from asynctp_passes.planning.bucketing import coalesce
from asynctp_passes.planning.decide import decide_graph
from asynctp_passes.planning.deviations import Words, communicated
from asynctp_passes.planning.legality import Context, can_be_alone, groups_of_parameters, groups_on_wire
from asynctp_passes.planning.materialize_scales import scales_to_store
from asynctp_passes.planning.overlap import hide
from asynctp_passes.planning.rematerialize import again
from asynctp_passes.reasons import RESULT_DROPPED, Refusal
from asynctp_passes.reporting import internal, torch_notes
from asynctp_passes.reporting.agree import Votes, agreed_before, refuse, vote
from asynctp_passes.reporting.errors import AsyncTPError, raise_if_strict
from asynctp_passes.reporting.report import Ballot, Coalesced, Remark, Report
from asynctp_passes.rewriting import toposort
from asynctp_passes.rewriting.rewrite import keep_order, on_wire, rewrite, store
from asynctp_passes.rewriting.schedule import restore_program_order

__all__ = ["REGATHERED", "run", "run_joint"]

log = logging.getLogger(__name__)

REGATHERED = "asynctp_regathered"
"""Of a gather that the backward makes again, in its `meta`: the bytes that were gathered, 0 where that is symbolic."""

_AGREED = "asynctp_agreed"
"""Of such a gather, in its `meta`: the ballot on which the ranks agreed to make it again."""

_LIKE_WEIGHTS = (
    "it looks like a weight's gradient, as FSDP reduces them, and is taken for tensor parallelism, since its group "
    "moves activations elsewhere in this graph or is named in Config(groups=...), where you can decide that"
)
_SCALES = "the scales travel with the data of"
_SUM = "only a sum is used, which is reduced once, by"
_UNSHARDED = (
    "at best the sum hides behind the matmul, and sending it to all ranks does not; shard activations over the "
    "sequence (SequenceParallel, Shard(1) outputs) to hide that too"
)


def run(graph: fx.Graph, config: Config | None = None) -> Report:
    """Fuse every chain of a graph that can be proven, in place, and report on every collective.

    The graph's nodes may come in any order; if it communicates, they are sorted afterwards.

    Args:
        graph: A functional graph of aten and `_c10d_functional` ops, with fake tensors in `meta["val"]`: what
            Inductor hands to a post-grad pass, or `make_fx` under fake tensors gives.
        config: The configuration; the environment's and the defaults when None.

    Returns:
        The report. No process group need exist: sizes of groups are read from the graph.

    Raises:
        DisagreementError: asynctp failed on the graph after all ranks had agreed on something; the graph is untouched.
        StrictError: Chains were missed, or asynctp itself failed, and `config.strict` forbids it; the graph is
            untouched.
        ExpectError: Fewer chains can be fused than `config.expect`; the graph is untouched.
        TypeError: `graph` is no graph, but a GraphModule, say.
    """
    _require_graph(graph)
    config = Config.given(config)
    attempt = _Attempt(graph, config, phase_of(graph))
    with attempt:
        return _fuse(graph, config, attempt)
    return attempt.fall_back()


def _fuse(graph: fx.Graph, config: Config, attempt: _Attempt) -> Report:
    if communications(graph.nodes):
        toposort.sort(graph)
        if phase_of(graph) == "inference":  # the partitioner, who copies and leaves out, orders the others
            _warn_of_moves(graph)
            restore_program_order(graph)
    plan = _planned(graph, config)
    votes = attempt.vote(_ballots(plan))
    left_out = {at: reason for at, reason in votes.items() if reason is not None}
    if left_out:
        plan = _planned(graph, config, votes)
    report = _report(graph, plan, config, left_out)
    raise_if_strict(report, config)
    if not plan.decisions:
        keep_order(graph)
        return report
    decisions, context = plan.decisions, plan.context
    chains = fused_chains(decisions)
    kept = frozenset(gather.node for gather in plan.kept)
    hidden = [decision for decision in decisions if decision.behind]
    calls = rewrite(graph, chains, context.sizes, hidden, plan.bundles, plan.dropped, plan.alone, plan.wire, kept)
    if chains and config.store_scales:
        store(graph, scales_to_store(graph))
    remarks = tuple(_with_call(remark, calls.get(remark.collective, {})) for remark in report.remarks)
    return dataclasses.replace(report, remarks=remarks)


def _warn_of_moves(graph: fx.Graph) -> None:
    """Say that ranks may communicate in unlike orders: this pass alone does not see the order of the program."""
    moved = unrecorded(graph) if compat.is_compiled(graph) and compat.inductor_option("reorder_for_locality") else []
    if moved:
        log.warning(
            "asynctp: %s: Inductor may have moved %s to where the results are used, and so differently on ranks that "
            "compute different things. Remedy: give it RegatherPass() as joint_custom_post_pass too, which notes the "
            "order of the program",
            *(compat.compile_name(), ", ".join(dict.fromkeys(map(called_name, moved)))),
        )


def _require_graph(graph: object) -> None:
    if not isinstance(graph, fx.Graph):
        remedy = "of a GraphModule pass its `graph`, and call its `recompile()` afterwards"
        raise TypeError(f"asynctp: graph={type(graph).__name__} is not valid; it must be an fx.Graph: {remedy}")


def run_joint(graph: fx.Graph, config: Config) -> Report | None:
    """Tag, in a graph of a forward and its backward, the gathers that are made again in the backward (`regather`).

    Tags change nothing that is computed: the partitioner, which comes next, follows them. In any graph the order of
    communication is noted, for `run` to restore.

    Args:
        graph: A joint graph, as Inductor hands it to a joint pass.
        config: The configuration.

    Returns:
        A report where asynctp itself failed, which left the graph as it was; else None: both graphs get reports.

    Raises:
        DisagreementError: asynctp failed on the graph after all ranks had agreed on something; the graph is untouched.
        StrictError: asynctp itself failed, and `config.strict` forbids it; the graph is untouched.
    """
    attempt = _Attempt(graph, config, "joint")
    with attempt:
        if communications(graph.nodes):  # any other graph is left to Inductor, which sorts it after this pass
            toposort.sort(graph)
            record_order(graph)
            if tangents_of(graph):
                _tag(graph, config, attempt)
        return None
    return attempt.fall_back()


def _tag(graph: fx.Graph, config: Config, attempt: _Attempt) -> None:
    decisions, context = decide_graph(graph, config)
    found = again(graph, decisions, config.regather)
    chosen = [one for one in found if one.chosen]
    texts: dict[str, list[str]] = {}
    for one in chosen:
        texts.setdefault(one.gather.group_key, []).append(context.words.of_again(one.gather))
    keys = communicated((one.candidate.collective for one in decisions), "joint")
    ballots = {group: Ballot(group, key, tuple(texts.get(group, ())), joint=True) for group, key in keys.items()}
    votes = attempt.vote(list(ballots.values()))
    for one in chosen:
        group, text = one.gather.group_key, context.words.of_again(one.gather)
        if votes[group, text] is None:
            compat.recompute_in_backward(one.nodes)
            one.gather.node.meta[REGATHERED] = one.bytes or 0
            one.gather.node.meta[_AGREED] = Ballot(group, ballots[group].key, (text,), joint=True)
        else:
            log.warning("asynctp: %s is left out, since a rank does not do it: %s", text, votes[group, text])


# --- the plan ---------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is to be done to a graph, and what was known when that was decided."""

    decisions: list[Decision]
    context: Context
    bundles: list[Bundle]
    followed: frozenset[fx.Node] = frozenset()
    followed_plain: frozenset[str] = frozenset()

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
        """The groups that could use asynctp's transport, and have a collective for which it has an op."""
        found = {one.collective.group_key for one in self.candidates if on_wire(one.collective) and can_be_alone(one)}
        return self._own_transport & found

    @functools.cached_property
    def _own_transport(self) -> frozenset[str]:
        return groups_on_wire(self.candidates, self.context.config)

    @property
    def alone(self) -> list[Collective]:
        """The collectives without a matmul that go by it or are tensors of a list, but for those beside products."""
        taken = {member.node for bundle in self.bundles for member in bundle.members}
        return [
            one.candidate.collective
            for one in self.decisions
            if one.refusal is not None and not one.behind and one.refusal.reason is not RESULT_DROPPED
            if one.candidate.collective.node not in taken and self._goes_alone(one.candidate)
        ]

    def _goes_alone(self, candidate: Candidate) -> bool:
        """True for a collective that goes by it, and for a tensor of a list: a peer may multiply that one."""
        own, collective = can_be_alone(candidate), candidate.collective
        return own and collective.group_key in self.wire and (collective.call is not None or on_wire(collective))

    @property
    def fused_gathers(self) -> list[GatherChain]:
        """The chains of gathers that are fused."""
        return [chain for chain in fused_chains(self.decisions) if isinstance(chain, GatherChain)]

    @property
    def kept(self) -> list[Collective]:
        """The gathers that go by it whose result this rank keeps, of fused chains too, or its peers do (`followed`)."""
        found = [one.collective for one in self.fused_gathers if one.returned is not None]
        found += [one.collective for one in self.fused_gathers if one.collective.node in self.followed]
        found += [one for one in self.alone if one.kind == "all_gather"]
        found += [one.candidate.collective for one in self.decisions if one.behind]
        found = [one for one in found if one.kind == "all_gather" and on_wire(one)]
        refused = self.context.refused
        return [one for one in found if refused(one.group_key, self.context.words.of_kept(one)) is None]

    @property
    def dropped(self) -> list[Collective]:
        """The collectives that are not made, since nothing uses them."""
        refused = ((one.candidate.collective, one.refusal) for one in self.decisions)
        return [collective for collective, refusal in refused if refusal and refusal.reason is RESULT_DROPPED]


def _planned(graph: fx.Graph, config: Config, votes: Votes | None = None) -> _Plan:
    """What is to be done; of what changes what ranks send, only that for which they voted, once they did."""
    found, context = decide_graph(graph, config, votes)
    decisions = hide(graph, found)
    bundles = coalesce(decisions, context)
    told = ((bundle, context.words.of_bundle(bundle)) for bundle in bundles)
    alike = [bundle for bundle, text in told if context.refused(bundle.collective.group_key, text) is None]
    plan = _following(_Plan(decisions, context, alike), config)
    shown = [
        before if after.behind and after.candidate.collective.group_key in plan.plain else after
        for before, after in zip(found, decisions, strict=True)
    ]  # what runs beside products goes by asynctp's transport
    return dataclasses.replace(plan, decisions=shown)


def _following(plan: _Plan, config: Config) -> _Plan:
    """The plan that does what all ranks have agreed on before, and this one need not: peers may still run that graph.

    Gathers are kept, and the collectives of groups without a fused chain stay torch's.
    """
    words, keys = plan.context.words, plan.keys
    fused = {chain.collective.group_key for chain in fused_chains(plan.decisions)}
    plain = [
        group
        for group in plan.movable - plan.plain - fused
        if agreed_before(Ballot(group, keys[group], (words.of_plain(),)), config)
    ]
    plan = dataclasses.replace(plan, followed_plain=frozenset(plain))
    asked: dict[str, dict[str, fx.Node]] = {}
    for chain in plan.fused_gathers:
        gather = chain.collective
        if chain.returned is None and on_wire(gather):
            asked.setdefault(gather.group_key, {})[words.of_kept(gather)] = gather.node
    followed = [
        nodes[text]
        for group, nodes in asked.items()
        for text in agreed_before(Ballot(group, keys[group], tuple(nodes)), config)
    ]
    return dataclasses.replace(plan, followed=frozenset(followed))


def _ballots(plan: _Plan) -> list[Ballot]:
    """For each group that communicates in a graph what changes what its ranks send, or nothing."""
    words = plan.context.words
    texts: dict[str, list[str]] = {}
    for chain in fused_chains(plan.decisions):
        texts.setdefault(chain.collective.group_key, []).extend(words.of_chain(chain))
    for bundle in plan.bundles:
        texts.setdefault(bundle.collective.group_key, []).append(words.of_bundle(bundle))
    for group in plan.plain:
        texts.setdefault(group, []).append(words.of_plain())
    for gather in plan.kept:
        texts.setdefault(gather.group_key, []).append(words.of_kept(gather))
    dropped: dict[str, list[Collective]] = {}
    for collective in plan.dropped:
        dropped.setdefault(collective.group_key, []).append(collective)
    for group, members in dropped.items():
        texts.setdefault(group, []).append(words.of_dropped(members))
    return [Ballot(group, key, tuple(texts.get(group, ()))) for group, key in plan.keys.items()]


def _agreed_before(decisions: Sequence[Decision]) -> list[Ballot]:
    """What the ranks agreed on about gathers of this graph when it was one with its forward."""
    nodes = (one.candidate.collective.node for one in decisions)
    return [node.meta[_AGREED] for node in nodes if _AGREED in node.meta]


# --- errors that nobody foresaw -------------------------------------------------------------------------------
class _Attempt:
    """Leaves a graph exactly as it was where the body raises. An error that nobody foresaw ends there.

    Attributes:
        ballots: What was put to the vote of the other ranks; None before.
        votes: The outcome, once there is one.
    """

    def __init__(self, graph: fx.Graph, config: Config, phase: str) -> None:
        self.ballots: list[Ballot] | None = None
        self.votes: Votes | None = None
        self._graph, self._config, self._phase = graph, config, phase
        self._record = compat.GraphRecord(graph)
        self._error: Exception | None = None

    def vote(self, ballots: list[Ballot]) -> Votes:
        """Ask the other ranks, once."""
        self.ballots = ballots
        self.votes = vote(ballots, self._config)
        return self.votes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        self._record.restore()
        if not isinstance(error, Exception) or isinstance(error, internal.FORESEEN):
            return False
        self._error = error
        return True

    def fall_back(self) -> Report:
        """Tell everyone of the error, the other ranks too, and report on the graph as it is.

        Raises:
            DisagreementError: All ranks have agreed on something that this one cannot do.
            StrictError, ExpectError: As `config` asks for where something is missed.
        """
        error = self._error
        assert error is not None
        doing = f"work on {compat.compile_name()} ({self._phase})"
        outcome = "The graph is as it was, and runs without asynctp"
        summary = internal.tell(error, doing, outcome, lambda: str(self._graph))
        report = _plain_report(self._graph, self._config, self._phase, summary)
        refuse(self.ballots or [], self.votes, self._config)
        plan: _Plan | None = None
        with internal.contained("tell the other ranks"):
            plan = self._all_alone()
        try:
            raise_if_strict(report, self._config)
        except AsyncTPError as raised:
            raise raised from error
        if plan is not None:
            with internal.contained("let collectives meet those of other ranks"):
                _move_all(self._graph, plan)
        return report

    def _all_alone(self) -> _Plan | None:
        """The plan in which nothing is fused; the other ranks know what this one does now."""
        if self._phase == "joint":
            if self.ballots is None:
                keys = communicated(read_collectives(self._graph), self._phase)
                self.vote([Ballot(group, key, (), joint=True) for group, key in keys.items()])
            return None
        if self.ballots is not None:  # the other ranks know that this graph has none of what they agreed on
            return _unfused(self._graph, self._config, {})
        plan = _unfused(self._graph, self._config, None)
        votes = self.vote(_ballots(plan))
        return _unfused(self._graph, self._config, votes)


def _unfused(graph: fx.Graph, config: Config, votes: Votes | None) -> _Plan:
    """The plan in which all collectives go by asynctp's transport, and none is fused.

    Args:
        graph: The graph.
        config: The configuration.
        votes: The outcome for what ranks have agreed on before; None to put that to the vote again.
    """
    collectives = read_collectives(graph)
    words, keys = Words(collectives), communicated(collectives, phase_of(graph))
    verdict = votes
    if verdict is None:
        verdict = {}
        for group, key in keys.items():
            kept = (words.of_kept(one) for one in collectives if one.group_key == group and one.kind == "all_gather")
            agreed = agreed_before(Ballot(group, key, (words.of_plain(), *kept)), config)
            verdict |= dict.fromkeys(((group, text) for text in agreed), None)
    sizes = Sizes(graph, (collective.group_size for collective in collectives))
    context = Context(graph, sizes, config, segments(graph), frozenset(), words=words, verdict=verdict)
    decisions = [_untouched(one, config, "", True) for one in collectives]
    plain = frozenset(group for (group, text), reason in verdict.items() if text == words.of_plain() and reason is None)
    return _Plan(decisions, context, [], followed_plain=plain)


def _move_all(graph: fx.Graph, plan: _Plan) -> None:
    """Let a graph's collectives go by asynctp's transport, and fuse none: other ranks' calls wait for them there."""
    if not plan.alone:
        return
    sizes, record = plan.context.sizes, compat.GraphRecord(graph)
    try:
        toposort.sort(graph)
        rewrite(graph, [], sizes, alone=plan.alone, wire=plan.wire, kept=frozenset(one.node for one in plan.kept))
    except BaseException:
        record.restore()
        raise


def _plain_report(graph: fx.Graph, config: Config, phase: str, summary: str) -> Report:
    """On a graph that stays as it is since asynctp failed: each collective that it may have fused is MISSED."""
    remarks: tuple[Remark, ...] = ()
    with internal.contained("list the collectives of the graph"):
        multiplies = any(map(is_matmul, graph.nodes))
        collectives = read_collectives(graph) if phase != "joint" else []
        remarks = tuple(_remark(_untouched(one, config, summary, multiplies), phase, set()) for one in collectives)
    return Report(
        graph=compat.compile_name(),
        phase=phase,
        remarks=remarks,
        torch_version=str(torch.__version__),
        config_digest=config.digest(),
        plan_digest=_plan_digest(remarks, ()),
        internal_errors=(summary,),
    )


def _untouched(collective: Collective, config: Config, summary: str, multiplies: bool) -> Decision:
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


# --- the report -------------------------------------------------------------------------------------------
def _report(graph: fx.Graph, plan: _Plan, config: Config, left_out: Mapping[tuple[str, str], str]) -> Report:
    coalesced, phase = tuple(_coalesced(bundle) for bundle in plan.bundles), phase_of(graph)
    alone = {collective.node for collective in plan.alone}
    remarks = tuple(_remark(decision, phase, alone) for decision in plan.decisions)
    agreed = _agreed_before(plan.decisions) if phase == "backward" else []
    ranks_differ = [f"not done, since ranks differ: {reason}" for reason in left_out.values()]
    return Report(
        graph=compat.compile_name(),
        phase=phase,
        remarks=remarks,
        torch_version=str(torch.__version__),
        config_digest=config.digest(),
        plan_digest=_plan_digest(remarks, coalesced),
        coalesced=coalesced,
        ballots=(*_ballots(plan), *agreed),
        notes=(*torch_notes.notes(graph, phase), *ranks_differ),
    )


def _plan_digest(remarks: Sequence[Remark], coalesced: Sequence[Coalesced]) -> str:
    """A hash of what was decided, which ranks that traced the same program share."""
    plan = [(remark.outcome, remark.kind, remark.code, remark.nodes, remark.shapes) for remark in remarks]
    return hashlib.sha256(repr((plan, [entry.collectives for entry in coalesced])).encode()).hexdigest()[:16]


def _coalesced(bundle: Bundle) -> Coalesced:
    return Coalesced(
        collectives=tuple(member.node.name for member in bundle.members),
        group=bundle.collective.group_key,
        reduce_op=bundle.collective.reduce_op,
        dtype=str(value_of(bundle.inputs[0]).dtype).removeprefix("torch."),
        bytes=sum(cost_model.bytes_of(node) or 0 for node in bundle.inputs),
    )


def _remark(decision: Decision, phase: str, alone: Container[fx.Node]) -> Remark:
    candidate, refusal = decision.candidate, decision.refusal
    collective = candidate.collective
    kind = _kind(candidate)
    common = {
        "kind": kind,
        "collective": collective.node.name,
        "nodes": tuple(node.name for node in candidate.nodes),
        "source": _first(source_of, candidate),
        "module": _first(module_of, candidate),
        "group": collective.group_key,
        "group_size": collective.group_size,
        "shapes": _shapes(candidate),
        "regathered_bytes": collective.node.meta.get(REGATHERED, 0) if phase == "backward" else 0,
    }
    if refusal is not None:
        reason = refusal.reason
        outcome = "MISSED" if reason.in_scope else "SKIPPED"
        return Remark(
            outcome=outcome,  # type: ignore[arg-type]
            code=reason.code,
            name=reason.name,
            message=str(refusal),
            hint=reason.hint,
            op=f"asynctp::{collective.kind}" if collective.node in alone else "",
            **common,  # type: ignore[arg-type]
        )
    return Remark(outcome="FUSED", **_fused_facts(candidate, kind), **common)  # type: ignore[arg-type]


def _kind(candidate: Candidate) -> str:
    chain, collective = candidate.chain, candidate.collective
    if candidate.joins is not None:
        return _kind(candidate.joins)
    if chain is None:
        return called_name(collective.node) if collective.kind == "other" else collective.kind
    scaled = "scaled_" if chain.matmuls[0].scaled is not None else ""
    if isinstance(chain, GatherChain):
        return f"all_gather_{scaled}matmul"
    return f"{scaled}matmul_{collective.kind}"


def _first(place_of: Callable[[fx.Node], str | None], candidate: Candidate) -> str | None:
    """A place of the first of the matmuls and the collective that has one."""
    own = [node for node in candidate.nodes if is_matmul(node)] if candidate.joins is not None else []
    matmuls = own if candidate.chain is None else [matmul.node for matmul in candidate.chain.matmuls]
    places = (place_of(node) for node in (*matmuls, candidate.collective.node))
    return next((place for place in places if place is not None), None)


def _shapes(candidate: Candidate) -> dict[str, str]:
    collective, chain = candidate.collective, candidate.chain
    shapes = {"input": describe(collective.input), "output": describe(collective.node)}
    if chain is not None:
        products = [f"{describe(matmul.a)} @ {describe(matmul.b)}" for matmul in chain.matmuls]
        shapes["matmul"] = (", " if isinstance(chain, GatherChain) else " + ").join(products)
    return shapes


def _fused_facts(candidate: Candidate, kind: str) -> dict[str, object]:
    chain, device = candidate.chain, value_of(candidate.collective.node).device.type
    facts: dict[str, object] = {"op": f"asynctp::{kind}", "implementation": ops.implementation(device)}
    if candidate.joins is not None:
        lead = candidate.joins.collective
        facts["message"] = f"{_SCALES if lead.kind == 'all_gather' else _SUM} {lead.node.name}"
    elif isinstance(chain, GatherChain) and chain.hoist is not None:
        own = [*_place_facts(chain), *_hoist_facts(chain, chain.hoist)]
        facts["message"] = "; ".join([*own, *candidate.left_out])
        facts["keeps_gather"] = bool(chain.hoist.kept)
    elif isinstance(chain, GatherChain):
        returned = [f"the gathered tensor is returned too: {'; '.join(candidate.left_out)}"]
        notes = [*_place_facts(chain), *(returned if candidate.left_out else [])]
        facts |= {"message": "; ".join(notes)} if notes else {}
    elif isinstance(chain, ScatterChain):
        unsharded = [_UNSHARDED] if candidate.collective.kind == "all_reduce" else []
        weights = [_LIKE_WEIGHTS] if candidate.weights else unsharded
        notes = [*_summed(chain), *_added(chain), *_multiplied(chain), *_converted(chain), *weights]
        facts |= {"message": "; ".join(notes)} if notes else {}
    if chain is not None:
        costs = cost_model.cost_of(chain)
        facts |= {
            "comm_bytes": costs.comm_bytes,
            "flops": costs.flops,
            "estimate_us": costs.estimate_us(cost_model.machine_for(chain.matmuls[0].a)),
        }
    return facts


def _summed(chain: ScatterChain) -> list[str]:
    """The collectives besides its own that the op stands for, since only the sum of all is used."""
    others = ", ".join(collective.node.name for collective in chain.joined)
    return [f"one {chain.collective.kind} of the sum, for {others} too"] if others else []


def _added(chain: ScatterChain) -> list[str]:
    """What is no product of the fused op's."""
    notes = {"computed before, and added to the products": chain.added, "added to the result": chain.added_behind}
    return [f"{note}: {', '.join(map(_named, terms))}" for note, terms in notes.items() if terms]


def _named(term: Term) -> str:
    count = "" if term.factor == 1 else f"{term.factor:g} times "
    return f"{count}{describe(term.node)} of {called_name(term.node) or term.node.name}"


def _multiplied(chain: ScatterChain) -> list[str]:
    """The factors by which the fused op multiplies its products and their sum."""
    products = [matmul.factor for matmul in chain.matmuls]
    notes = [] if set(products) == {1.0} else [f"products multiplied by {_numbers(products)}"]
    return notes + ([] if chain.factor == 1 else [f"their sum multiplied by {chain.factor:g}"])


def _numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _converted(chain: ScatterChain) -> list[str]:
    """What is sent where products are converted before they are summed."""
    if chain.sum_dtype is None:
        return []
    product, whole = describe(chain.matmuls[0].node), describe(chain.collective.node)
    return [f"each {product} is converted before it is sent, for {whole}"]


def _place_facts(chain: GatherChain) -> list[str]:
    """That a gather changes its place among what communicates."""
    follows = chain.follows
    return [] if follows is None else [f"it follows {follows.name}, which what its matmuls need depends on"]


def _hoist_facts(chain: GatherChain, hoist: Hoist) -> list[str]:
    """What is gathered in place of the gathered tensor and beside it, with the bytes that a rank receives."""
    gather, ranks = chain.collective.node, chain.collective.group_size
    facts = [f"computed on the shard and gathered: {' and '.join(_amount(node, ranks) for node in hoist.travels)}"]
    if hoist.overall:
        found = ", ".join(f"{called_name(one.step.node)} {one.step.node.name}" for one in hoist.overall)
        facts.append(f"over all ranks' rows, found by each rank in its own and gathered: {found}")
    apart = [one.node for one in hoist.apart if one.root is not hoist.along]
    if apart:
        facts.append(f"gathered on their own: {', '.join(_amount(node, ranks) for node in apart)}")
    if not hoist.kept:
        return [*facts, f"the gather of {_amount(gather, ranks)} is gone"]
    users = ", ".join(node.name for node in hoist.kept)
    return [*facts, f"the gather of {_amount(gather, ranks)} stays for {users}, and is waited for after the fused op"]


def _amount(whole: fx.Node, ranks: int) -> str:
    """A gathered tensor, with the bytes that a rank receives of it."""
    count = cost_model.received_bytes(whole, ranks)
    return describe(whole) + ("" if count is None else f" ({count} bytes)")


def _with_call(remark: Remark, call: Mapping[str, Any]) -> Remark:
    """The remark with what the fused op is called with, and what that makes it run here."""
    told = plain(call)
    if not told:
        return remark
    name = remark.op.removeprefix("asynctp::")
    runs = ops.expected_implementation(name, call, remark.group_size)
    return dataclasses.replace(remark, call=told, implementation=runs)
