"""Contain errors that nobody foresaw: the graph stays as it was, everyone is told, and other ranks wait for nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch import fx

from asynctp_passes import compat
from asynctp_passes.agreement.vote import Votes, agreed_before, refuse, vote
from asynctp_passes.config import Config
from asynctp_passes.errors import AsyncTPError
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.records import Ballot
from asynctp_passes.planning.deviations import communicated
from asynctp_passes.planning.plan import Plan, ballots_of, unfused
from asynctp_passes.reporting import internal
from asynctp_passes.reporting.build import report_of_failure
from asynctp_passes.reporting.report import Report
from asynctp_passes.reporting.strictness import raise_if_strict
from asynctp_passes.rewriting import toposort
from asynctp_passes.rewriting.rewrite import rewrite

__all__ = ["Attempt"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Attempt:
    """Leaves a graph exactly as it was where the body raises. An error that nobody foresaw ends there.

    Args:
        graph: The graph.
        config: The configuration.
        phase: As in reports, or "joint".
        other: Another graph that is left as it was, too.
        keys: Of a joint graph, a hash of what each group communicates there; found in the graph if None.
        told: The phase that such keys are of; `phase` if None.

    Attributes:
        ballots: What was put to the vote of the other ranks; None before.
        votes: The outcome, once there is one.
    """

    def __init__(
        self,
        graph: fx.Graph,
        config: Config,
        phase: str,
        *,
        other: fx.Graph | None = None,
        keys: Mapping[str, str] | None = None,
        told: str | None = None,
    ) -> None:
        self.ballots: list[Ballot] | None = None
        self.votes: Votes | None = None
        self._graph, self._config, self._phase = graph, config, phase
        self._keys, self._told = keys, told or phase
        self._records = [compat.GraphRecord(one) for one in (graph, other) if one is not None]
        self._error: Exception | None = None

    def vote(self, ballots: list[Ballot]) -> Votes:
        """Ask the other ranks, once."""
        self.ballots = ballots
        self.votes = vote(ballots, self._config)
        return self.votes

    def agree(self, keys: Mapping[str, str], wanted: Mapping[tuple[str, str], _T]) -> Iterator[tuple[_T, Ballot]]:
        """Ask the other ranks, once, about deviations of a graph of forward and backward.

        Args:
            keys: For each group that communicates in the graph, a hash of that (`communicated`).
            wanted: The deviations, by group and by the text that ranks compare.

        Yields:
            Those that all ranks of the group do, each with its ballot. The others are logged.
        """
        texts: dict[str, list[str]] = {}
        for group, text in wanted:
            texts.setdefault(group, []).append(text)
        votes = self.vote([Ballot(group, key, tuple(texts.get(group, ())), joint=True) for group, key in keys.items()])
        for (group, text), one in wanted.items():
            if (refused := votes[group, text]) is None:
                yield one, Ballot(group, keys[group], (text,), joint=True)
            else:
                log.warning("asynctp: %s is left out, since a rank does not do it: %s", text, refused)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        for record in self._records:
            record.restore()
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
        refuse(self.ballots or [], self.votes)
        plan: Plan | None = None
        with internal.contained("tell the other ranks"):
            plan = self._all_alone()
        try:
            raise_if_strict(self._graph, report, self._config)
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
                keys = self._keys
                if keys is None:
                    keys = communicated(read_collectives(self._graph), self._told)
                self.vote([Ballot(group, key, (), joint=True) for group, key in keys.items()])
            return None
        if self.ballots is not None:  # what is accepted any graph can do: `refuse` raises on all else
            return unfused(self._graph, self._config, self.votes or {})
        agreed = agreed_before(self._graph, self._config)
        plan = unfused(self._graph, self._config, dict.fromkeys(agreed))
        votes = self.vote(ballots_of(plan))
        return unfused(self._graph, self._config, votes)


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
