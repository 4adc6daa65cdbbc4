"""Contain errors that nobody foresaw: the graph stays as it was, everyone is told, and other ranks wait for nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.errors import AsyncTPError
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.records import Answer, Answers, Question
from asynctp_passes.planning.deviations import communicated
from asynctp_passes.planning.plan import Plan, questions_of, unfused
from asynctp_passes.ranks.accord import ask, refuse
from asynctp_passes.reporting import internal
from asynctp_passes.reporting.build import report_of_failure
from asynctp_passes.reporting.report import Report
from asynctp_passes.reporting.strictness import raise_if_strict
from asynctp_passes.rewriting import toposort
from asynctp_passes.rewriting.rewrite import rewrite
from asynctp_passes.torch_private import dynamo, fx_graphs

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class UndoOnError:
    """Leaves a graph exactly as it was where the body raises. An error that nobody foresaw ends there.

    Args:
        phase: As in reports, or "joint", or "partition".
        other: Another graph that is left as it was, too.
        keys: Of two halves of a graph, a hash of what each group communicates in both; found in the graph if None.

    Attributes:
        questions: What the other ranks were asked; None before.
        answers: Their answers, once there are any.
    """

    def __init__(
        self,
        graph: fx.Graph,
        config: Config,
        phase: str,
        *,
        other: fx.Graph | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self.questions: list[Question] | None = None
        self.answers: list[Answer] | None = None
        self._graph, self._config, self._phase, self._keys = graph, config, phase, keys
        self._records = [fx_graphs.GraphRecord(one) for one in (graph, other) if one is not None]
        self._error: Exception | None = None

    def ask(self, questions: list[Question]) -> Answers:
        """Ask the other ranks, once."""
        self.questions = questions
        self.answers = ask(questions, self._config)
        return {one.group: answer for one, answer in zip(questions, self.answers, strict=True)}

    def agree(
        self, keys: Mapping[str, str], wanted: Mapping[tuple[str, str], _T]
    ) -> tuple[list[_T], dict[str, Question]]:
        """Ask the other ranks, once, about deviations of a graph of forward and backward, or of its two halves.

        Args:
            keys: For each group that communicates in the graph, a hash of that (`communicated`).
            wanted: The deviations, by group and by the text that ranks compare.

        Returns:
            Those that all ranks of the group do; the others are logged. And what was asked, by group, with the answer.
        """
        texts: dict[str, list[str]] = {}
        for group, text in wanted:
            texts.setdefault(group, []).append(text)
        questions = [
            Question(group, self._phase, key, tuple(sorted(texts.get(group, ())))) for group, key in keys.items()
        ]
        answers = self.ask(questions)
        done: list[_T] = []
        for (group, text), one in wanted.items():
            if (refused := answers[group].refuses(text)) is None:
                done.append(one)
            else:
                log.warning("asynctp: %s is left out, since a rank does not do it: %s", text, refused)
        told = {one.group: one.with_answer(answers[one.group]) for one in questions if one.deviations}
        return done, told

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
        doing = f"work on {dynamo.compile_name()} ({self._phase})"
        outcome = "The graph is as it was, and runs without asynctp"
        summary = internal.tell(error, doing, outcome, lambda: str(self._graph))
        report = report_of_failure(self._graph, self._config, self._phase, summary)
        refuse(self.questions or [], self.answers)
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
        if self._phase in ("joint", "partition"):
            if self.questions is None:
                keys = communicated(read_collectives(self._graph)) if self._keys is None else self._keys
                self.agree(keys, {})
            return None
        if self.questions is None:
            self.ask(questions_of(unfused(self._graph, self._config, {})))
        asked = self.questions or []
        answers = dict(zip([one.group for one in asked], self.answers or [Answer()] * len(asked), strict=True))
        return unfused(self._graph, self._config, answers)


def _move_all(graph: fx.Graph, plan: Plan) -> None:
    """Let a graph's collectives go by asynctp's transport, and fuse none: other ranks' calls wait for them there."""
    if not (plan.alone or plan.checked):
        return
    record = fx_graphs.GraphRecord(graph)
    try:
        toposort.sort(graph)
        rewrite(graph, plan)
    except BaseException:
        record.restore()
        raise
