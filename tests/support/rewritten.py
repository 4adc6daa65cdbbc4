"""Rewrite a graph of which nothing may be missed, and print it."""

from __future__ import annotations

import torch
from graph_builder import GraphBuilder
from passes import before_and_after, run_pass
from torch.fx import Graph, Node

from asynctp_passes import Report

FP8 = torch.float8_e4m3fn


def fuse(graph: Graph) -> Report:
    """Run the pass; nothing may be missed."""
    return run_pass(graph, strict="all", expect=1)


def rewritten(graph: Graph) -> str:
    """The graph, and what it becomes."""
    text, _ = before_and_after(graph, strict="all", expect=1)
    return text


def fp8_operands(b: GraphBuilder, rows: int, width: int, columns: int) -> tuple[Node, Node]:
    """A left operand, and a column-major right one."""
    return b.input("x", [rows, width], FP8), b.input("w", [width, columns], FP8, column_major=True)
