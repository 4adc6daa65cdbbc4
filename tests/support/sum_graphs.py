"""Graphs of summed reductions, and checks of what becomes of them."""

from __future__ import annotations

import torch
from lockstep import differences, evaluate, op_name
from programs import Builder
from torch.fx import Graph, Node

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
custom_all_reduce = torch.ops.vllm_like.all_reduce.default


def reduced(b: Builder, full: Node, reduce_op: str = "sum", group: str = "tp") -> Node:
    return b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, full, reduce_op, group))


def scattered(b: Builder, full: Node) -> Node:
    result = b.call(c10d.reduce_scatter_tensor.default, full, "sum", b.world_size, "tp")
    return b.call(c10d.wait_tensor.default, result)


def added(b: Builder, *terms: Node) -> Node:
    """The terms, added one after the other."""
    total = terms[0]
    for other in terms[1:]:
        total = b.call(aten.add.Tensor, total, other)
    return total


def summed_up(graph: Graph) -> list[int]:
    """The number of products of each fused reduction."""
    return [len(node.args[0]) for node in graph.nodes if op_name(node.target).startswith("asynctp::matmul_")]


def reductions_left(graph: Graph) -> int:
    """The number of tensors that are summed over the ranks by collectives of their own."""
    ops = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default, custom_all_reduce)
    plain = sum(node.target in ops and "max" not in node.args for node in graph.nodes)
    return plain + sum(len(node.args[0]) for node in graph.nodes if node.target is c10d.all_reduce_coalesced.default)


def check_same(b: Builder, graph: Graph, seed: int) -> None:
    def inputs() -> list[list[torch.Tensor]]:
        generators = [torch.Generator().manual_seed(seed * 8 + rank) for rank in range(b.world_size)]
        return [[value.make(generator) for value in b.inputs] for generator in generators]

    assert differences(evaluate(b.graph, inputs()), evaluate(graph, inputs())) == []
