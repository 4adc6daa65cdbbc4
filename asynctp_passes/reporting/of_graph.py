"""The report of a graph by itself: what it is, what crosses its border, and what torch does wrong in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.ir.crossings import crossings_of
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.traversal import phase_of
from asynctp_passes.reporting import torch_notes
from asynctp_passes.reporting.report import Bucketed, Remark, Report
from asynctp_passes.torch_private import dynamo


def report_of_graph(
    graph: fx.Graph,
    config: Config,
    remarks: tuple[Remark, ...] = (),
    buckets: tuple[Bucketed, ...] = (),
    unfused: Iterable[Collective] = (),
) -> Report:
    """The report of a graph; without the other arguments, of one without collectives.

    Args:
        graph: The graph, as it was before it was rewritten.
        remarks: One for each collective.
        buckets: The sets of all-reduces that become one.
        unfused: The collectives that may have their matmul in another graph.
    """
    phase = phase_of(graph)
    return Report(
        graph=dynamo.compile_name(),
        phase=phase,
        remarks=remarks,
        torch_version=str(torch.__version__),
        config_digest=config.digest(),
        plan_digest=plan_digest(remarks, buckets),
        buckets=buckets,
        notes=torch_notes.notes(graph),
        matmuls=sum(map(is_matmul, graph.nodes)),
        crossings=() if phase == "backward" else crossings_of(graph, unfused),
    )


def plan_digest(remarks: Sequence[Remark], buckets: Sequence[Bucketed]) -> str:
    """A hash of what was decided, which ranks that traced the same program share."""
    plan = [(remark.outcome, remark.kind, remark.code, remark.nodes, remark.shapes) for remark in remarks]
    return hashlib.sha256(repr((plan, [entry.collectives for entry in buckets])).encode()).hexdigest()[:16]
