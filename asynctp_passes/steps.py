"""The order of the steps: find, plan, ask the other ranks, report, raise if strict, and only then rewrite."""

from __future__ import annotations

from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.ir.traversal import phase_of
from asynctp_passes.ops import call_sites
from asynctp_passes.planning.plan import planned, questions_of, without_refused
from asynctp_passes.ranks.undo import UndoOnError
from asynctp_passes.reporting.build import report_of, with_calls
from asynctp_passes.reporting.report import Report
from asynctp_passes.reporting.strictness import raise_if_strict
from asynctp_passes.rewriting.ordering import put_in_program_order
from asynctp_passes.rewriting.rewrite import rewrite
from asynctp_passes.rewriting.ungroup import name_last_only, ungroup


def run(graph: fx.Graph, config: Config) -> Report:
    """Fuse every chain of a graph that can be proven, as `pipeline.run`, with a configuration that is obeyed."""
    attempt = UndoOnError(graph, config, phase_of(graph))
    with attempt:
        return _fuse(graph, config, attempt)
    return attempt.fall_back()


def _fuse(graph: fx.Graph, config: Config, attempt: UndoOnError) -> Report:
    put_in_program_order(graph)
    ungroup(graph)
    name_last_only(graph)
    wanted = planned(graph, config)  # finds the chains, and decides
    questions = questions_of(wanted)
    answers = attempt.ask(questions)
    plan = without_refused(wanted, answers)
    report = report_of(graph, plan, config, questions, answers)
    raise_if_strict(graph, report, config)
    calls = rewrite(graph, plan)
    groups = [chain.collective.group for chain in plan.chains]
    return with_calls(report, calls, call_sites.mark(graph, groups, config.direct))
