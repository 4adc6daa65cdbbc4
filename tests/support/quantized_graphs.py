"""Graphs that quantize between a gather and a matmul, and what the pass makes of them."""

from __future__ import annotations

import textwrap

import torch
from graph_builder import GraphBuilder, aten
from passes import before_and_after, run_pass
from torch.fx import Graph, Node

from asynctp_passes import Remark

FP8 = torch.float8_e4m3fn
cast = torch.ops.prims.convert_element_type.default


def fuse(graph: Graph) -> Remark:
    """Run the pass on a graph of one chain; nothing may be missed."""
    (remark,) = run_pass(graph, strict="all", expect=1).remarks
    return remark


def rewritten(graph: Graph) -> str:
    """The graph, what it becomes, and what is said of it."""
    text, report = before_and_after(graph, strict="all", expect=1)
    (remark,) = report.remarks
    return f"{text}\n{textwrap.fill(remark.message, 110)}\n"


def quantize(b: GraphBuilder, rows: Node) -> tuple[Node, Node]:
    """Rows in fp8, and what to multiply them by to have the rows again, in the shape [..., 1]."""
    scale = b.call(aten.div.Tensor, b.call(aten.amax.default, b.call(aten.abs.default, rows), [-1], True), 448.0)
    scale = b.call(cast, scale, torch.float32)
    return b.call(cast, b.call(aten.div.Tensor, b.call(cast, rows, torch.float32), scale), FP8), scale


def weight(b: GraphBuilder, name: str = "w", columns: int = 16) -> tuple[Node, Node]:
    """A weight [32, columns] in fp8, and its scales."""
    scale = b.input(f"{name}_scale", [1, columns])
    return b.input(name, [32, columns], FP8, column_major=True), scale


def _values(graph: Graph, seed: int) -> list[torch.Tensor]:
    """Random values for a graph's placeholders."""
    generator = torch.Generator().manual_seed(seed)
    fakes = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    made = [torch.randn(fake.shape, generator=generator).abs() for fake in fakes]
    return [torch.empty_strided(f.shape, f.stride(), dtype=f.dtype).copy_(v) for f, v in zip(fakes, made, strict=True)]
