"""The order of the steps: find, decide, vote with the other ranks, report, raise if strict, and only then rewrite."""

from __future__ import annotations

import dataclasses
import functools
import logging

from torch import fx

from asynctp_passes import compat
from asynctp_passes.config import Config
from asynctp_passes.ir.nodes import phase_of, tangents_of
from asynctp_passes.ir.order import communications, record_order, unrecorded
from asynctp_passes.ir.read import called_name, read_collectives
from asynctp_passes.ir.records import Ballot
from asynctp_passes.planning.decide import decide_graph
from asynctp_passes.planning.deviations import Words, communicated
from asynctp_passes.planning.legality import on_wire
from asynctp_passes.planning.materialize_scales import scales_to_store
from asynctp_passes.planning.plan import Plan, ballots_of, planned, unfused
from asynctp_passes.planning.rematerialize import AGREED, REMATERIALIZED, rematerializations
from asynctp_passes.reporting import internal
from asynctp_passes.reporting.agree import Votes, agreed_before, refuse, vote
from asynctp_passes.reporting.build import report_of, report_of_failure, with_call
from asynctp_passes.reporting.errors import AsyncTPError, raise_if_strict
from asynctp_passes.reporting.report import Report
from asynctp_passes.rewriting import toposort
from asynctp_passes.rewriting.ordering import keep_order, restore_program_order
from asynctp_passes.rewriting.rewrite import rewrite, store

__all__ = ["run", "run_joint"]

log = logging.getLogger(__name__)


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
    communicates = bool(communications(graph.nodes))
    if communicates:
        toposort.sort(graph)
        if phase_of(graph) == "inference":  # the partitioner, who copies and leaves out, orders the others
            _warn_of_moves(graph)
            restore_program_order(graph)
    follow = functools.partial(_following, config=config)
    plan = planned(graph, config, follow=follow)
    votes = attempt.vote(ballots_of(plan))
    left_out = {at: reason for at, reason in votes.items() if reason is not None}
    if left_out:
        plan = planned(graph, config, votes, follow)
    report = report_of(graph, plan, config, left_out)
    raise_if_strict(report, config)
    if not plan.decisions:
        if communicates:
            keep_order(graph, {})
        return report
    calls = rewrite(graph, plan)
    if plan.chains and config.store_scales:
        store(graph, scales_to_store(graph))
    remarks = tuple(with_call(remark, calls.get(remark.collective, {})) for remark in report.remarks)
    return dataclasses.replace(report, remarks=remarks)


def _warn_of_moves(graph: fx.Graph) -> None:
    """Say that ranks may communicate in unlike orders: this pass alone does not see the order of the program."""
    moved = unrecorded(graph) if compat.is_compiled(graph) and compat.inductor_option("reorder_for_locality") else []
    if moved:
        log.warning(
            "asynctp: %s: Inductor may have moved %s to where the results are used, and so differently on ranks that "
            "compute different things. Remedy: give it RematerializePass() as joint_custom_post_pass too, which notes "
            "the order of the program",
            *(compat.compile_name(), ", ".join(dict.fromkeys(map(called_name, moved)))),
        )


def _require_graph(graph: object) -> None:
    if not isinstance(graph, fx.Graph):
        remedy = "of a GraphModule pass its `graph`, and call its `recompile()` afterwards"
        raise TypeError(f"asynctp: graph={type(graph).__name__} is not valid; it must be an fx.Graph: {remedy}")


def run_joint(graph: fx.Graph, config: Config) -> Report | None:
    """Tag, in a graph of a forward and its backward, the gathers that are made again in the backward (`rematerialize`).

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
    found = rematerializations(graph, decisions, config.rematerialize)
    chosen = [one for one in found if one.chosen]
    texts: dict[str, list[str]] = {}
    for one in chosen:
        texts.setdefault(one.gather.group_key, []).append(context.words.of_rematerialized(one.gather))
    keys = communicated((one.candidate.collective for one in decisions), "joint")
    ballots = {group: Ballot(group, key, tuple(texts.get(group, ())), joint=True) for group, key in keys.items()}
    votes = attempt.vote(list(ballots.values()))
    for one in chosen:
        group, text = one.gather.group_key, context.words.of_rematerialized(one.gather)
        if votes[group, text] is None:
            compat.recompute_in_backward(one.nodes)
            one.gather.node.meta[REMATERIALIZED] = one.bytes or 0
            one.gather.node.meta[AGREED] = Ballot(group, ballots[group].key, (text,), joint=True)
        else:
            log.warning("asynctp: %s is left out, since a rank does not do it: %s", text, votes[group, text])


# --- the plan ---------------------------------------------------------------------------------------------
def _following(plan: Plan, config: Config) -> Plan:
    """The plan that does what all ranks have agreed on before, and this one need not: peers may still run that graph.

    Gathers are kept, and the collectives of groups without a fused chain stay torch's.
    """
    words, keys = plan.context.words, plan.keys
    fused = {chain.collective.group_key for chain in plan.chains}
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
        report = report_of_failure(self._graph, self._config, self._phase, summary)
        refuse(self.ballots or [], self.votes, self._config)
        plan: Plan | None = None
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

    def _all_alone(self) -> Plan | None:
        """The plan in which nothing is fused; the other ranks know what this one does now."""
        if self._phase == "joint":
            if self.ballots is None:
                keys = communicated(read_collectives(self._graph), self._phase)
                self.vote([Ballot(group, key, (), joint=True) for group, key in keys.items()])
            return None
        if self.ballots is not None:  # the other ranks know that this graph has none of what they agreed on
            return unfused(self._graph, self._config, {})
        plan = unfused(self._graph, self._config, _agreed(self._graph, self._config))
        votes = self.vote(ballots_of(plan))
        return unfused(self._graph, self._config, votes)


def _agreed(graph: fx.Graph, config: Config) -> Votes:
    """The deviations that all ranks have agreed on before, and that a graph can do in which nothing is fused."""
    collectives = read_collectives(graph)
    words = Words(collectives)
    found: Votes = {}
    for group, key in communicated(collectives, phase_of(graph)).items():
        kept = (words.of_kept(one) for one in collectives if one.group_key == group and one.kind == "all_gather")
        agreed = agreed_before(Ballot(group, key, (words.of_plain(), *kept)), config)
        found |= dict.fromkeys(((group, text) for text in agreed), None)
    return found


def _move_all(graph: fx.Graph, plan: Plan) -> None:
    """Let a graph's collectives go by asynctp's transport, and fuse none: other ranks' calls wait for them there."""
    if not plan.alone:
        return
    record = compat.GraphRecord(graph)
    try:
        toposort.sort(graph)
        rewrite(graph, plan)
    except BaseException:
        record.restore()
        raise
