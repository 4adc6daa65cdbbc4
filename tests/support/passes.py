"""The pass on a graph: run quietly, shown before and after, on a copy."""

from __future__ import annotations

import copy
from typing import Any

from graph_builder import show
from torch.fx import Graph, Node

from asynctp_passes import Config, Report, run

__all__ = ["before_and_after", "copied", "outcomes", "run_pass"]


def run_pass(graph: Graph, **options: Any) -> Report:
    """Run the pass, without a log. `options` are fields of `Config`; without `strict` nothing is raised."""
    report = run(graph, Config(**{"strict": "off", **options}))
    assert not report.internal_errors
    return report


def before_and_after(graph: Graph, **options: Any) -> tuple[str, Report]:
    """Run the pass likewise: the graph and what it becomes, as text, and the report."""
    before = show(graph)
    report = run_pass(graph, **options)
    return f"{before}\n=== becomes ===\n\n{show(graph)}", report


def outcomes(report: Report) -> list[str]:
    """What became of each collective, in graph order: "F" for fused, a code for others."""
    return ["F" if remark.outcome == "FUSED" else remark.code for remark in report.remarks]


def copied(graph: Graph) -> Graph:
    """A copy with the same names and fake values, and the same subgraphs."""
    twin = Graph()
    twin.owning_module = graph.owning_module
    values: dict[Node, Node] = {}
    twin.output(twin.graph_copy(graph, values))
    for node, other in values.items():
        other.meta = copy.copy(node.meta)
    return twin
