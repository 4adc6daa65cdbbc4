"""Decide, for every candidate, between FUSED, SKIPPED and MISSED. Pure: nothing is edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

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
    """Groups that move activations: with a chain or a miss that does not look like one of parameters or gradients."""
    return frozenset(candidate.collective.group_key for candidate in candidates if _moves_activations(candidate))


def _moves_activations(candidate: Candidate) -> bool:
    missed = any(refusal.reason.in_scope for refusal in candidate.refusals)
    return not candidate.weights and (candidate.chain is not None or missed)
