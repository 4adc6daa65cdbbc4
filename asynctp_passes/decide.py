"""Decide, for every candidate, between FUSED, SKIPPED and MISSED. Pure: nothing is edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from asynctp_passes.chain import Candidate, Decision
from asynctp_passes.checks import CHECKS, Context, is_tensor_parallel
from asynctp_passes.config import Config
from asynctp_passes.find import find
from asynctp_passes.fxview import Sizes, live, phase_of, segments
from asynctp_passes.read import read_collectives
from asynctp_passes.reasons import Refusal

__all__ = ["allowed", "context_of", "decide", "decide_graph"]


def decide_graph(graph: fx.Graph, config: Config) -> tuple[list[Decision], Context]:
    """One decision per collective of a graph, in order, and what they were made with."""
    collectives = read_collectives(graph)
    context = context_of(graph, Sizes(graph, (collective.group_size for collective in collectives)), config)
    candidates = find(graph, collectives, context.sizes, lambda candidate: allowed(candidate, context))
    return decide(candidates, context), context


def context_of(graph: fx.Graph, sizes: Sizes, config: Config) -> Context:
    """What the checks know before there are candidates."""
    used = None if phase_of(graph) == "inference" else live(graph)
    return Context(graph, sizes, config, frozenset(), segments(graph), used)


def allowed(candidate: Candidate, context: Context) -> bool:
    """True when a candidate with a chain passes every check."""
    return candidate.chain is not None and _verdict(candidate, context) is None


def decide(candidates: Sequence[Candidate], context: Context) -> list[Decision]:
    """One decision per candidate, in the same order: the first failed check, or FUSED.

    A gather of scales shares the fate of the gather of its data.
    """
    groups = frozenset(one.collective.group_key for one in candidates if is_tensor_parallel(one))
    context = replace(context, tensor_parallel=groups)
    verdicts = [_verdict(candidate, context) for candidate in candidates]
    of_node = {candidate.collective.node: refusal for candidate, refusal in zip(candidates, verdicts, strict=True)}
    return [
        Decision(candidate, refusal if candidate.joins is None else of_node[candidate.joins.node])
        for candidate, refusal in zip(candidates, verdicts, strict=True)
    ]


def _verdict(candidate: Candidate, context: Context) -> Refusal | None:
    return next((refusal for check in CHECKS if (refusal := check(candidate, context)) is not None), None)
