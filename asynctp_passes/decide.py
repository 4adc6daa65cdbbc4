"""Decide, for every candidate, between FUSED, SKIPPED and MISSED. Pure: nothing is edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.chain import Candidate, Decision
from asynctp_passes.checks import CHECKS, Context
from asynctp_passes.config import Config
from asynctp_passes.fxview import Sizes, segments
from asynctp_passes.reasons import Refusal

__all__ = ["allowed", "context_of", "decide"]


def context_of(graph: fx.Graph, sizes: Sizes, config: Config) -> Context:
    """What the checks know before there are candidates."""
    return Context(graph, sizes, config, frozenset(), segments(graph))


def allowed(candidate: Candidate, context: Context) -> bool:
    """True when a candidate with a chain passes every check."""
    return candidate.chain is not None and _verdict(candidate, context) is None


def decide(candidates: Sequence[Candidate], context: Context) -> list[Decision]:
    """One decision per candidate, in the same order: the first failed check, or FUSED."""
    context = replace(context, tensor_parallel=_tensor_parallel_groups(candidates))
    verdicts = {candidate.collective.node: _verdict(candidate, context) for candidate in candidates}
    return [Decision(candidate, _joined(candidate, verdicts)) for candidate in candidates]


def _verdict(candidate: Candidate, context: Context) -> Refusal | None:
    return next((refusal for check in CHECKS if (refusal := check(candidate, context)) is not None), None)


def _joined(candidate: Candidate, verdicts: dict[fx.Node, Refusal | None]) -> Refusal | None:
    """A gather of scales shares the fate of the gather of its data."""
    if candidate.joins is None:
        return verdicts[candidate.collective.node]
    return verdicts[candidate.joins.node]


def _tensor_parallel_groups(candidates: Sequence[Candidate]) -> frozenset[str]:
    """Groups that move activations: with a chain, or a miss that is not merely a gathered right operand."""
    out = set()
    for candidate in candidates:
        misses = [refusal.reason for refusal in candidate.refusals if refusal.reason.in_scope]
        if candidate.chain is not None or any(reason is not reasons.GATHER_IS_RIGHT_OPERAND for reason in misses):
            out.add(candidate.collective.group_key)
    return frozenset(out)
