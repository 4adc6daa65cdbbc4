"""Programs that have streams of their own, as torch notes them in the graph: what is replaced stays on one of them."""

from __future__ import annotations

import pytest
import torch
from graph_builder import GraphBuilder
from passes import run_pass
from reason_rows_of_limits import on_stream
from torch.fx import Graph, Node

GPU = {"dtype": torch.bfloat16, "device": "cuda"}


def chain_and_gather(start: int | None, wait: int | None) -> Graph:
    """A gather that is multiplied, and one of the same group that is not, on streams of the program."""
    b = GraphBuilder()
    multiplied = b.mm(b.gather(b.input("x", [64, 64], **GPU)), b.input("w", [64, 64], **GPU))
    whole = b.gather(b.input("y", [64, 64], **GPU))
    for node, number in ((whole, wait), (whole.all_input_nodes[0], start)):
        if number is not None:
            on_stream(node, number)
    return b.returns(multiplied, b.relu(whole))


def names_of(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def find(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if str(node.target) == name)


@pytest.mark.parametrize("stream", [None, 1])
def test_a_gather_that_is_waited_for_where_it_starts(stream: int | None) -> None:
    graph = chain_and_gather(stream, stream)
    run_pass(graph)
    assert "asynctp.all_gather_matmul.default" in names_of(graph)
    gather = find(graph, "asynctp.all_gather.default")
    assert gather.meta.get("custom", {}).get("stream") == stream  # Inductor calls it there


@pytest.mark.parametrize(("start", "wait"), [(1, None), (None, 1), (1, 2)])
def test_a_gather_that_is_waited_for_on_another_stream(start: int | None, wait: int | None) -> None:
    """Its wait orders the two streams. That of an op which gathers on the stream that it is called on does not."""
    graph = chain_and_gather(start, wait)
    run_pass(graph)
    names = names_of(graph)
    assert "asynctp.all_gather_matmul.default" in names
    assert "_c10d_functional.all_gather_into_tensor.default" in names
    assert "asynctp.all_gather.default" not in names
