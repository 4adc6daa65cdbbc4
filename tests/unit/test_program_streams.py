"""Fusion keeps the order of a program's own streams, which torch notes in the graph."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.variables.streams  # defines the ops
from graph_builder import GraphBuilder
from passes import run_pass
from reason_rows_of_limits import on_stream
from torch._functorch._aot_autograd import streams
from torch.fx import Graph, GraphModule, Node

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


# --- waits for events -----------------------------------------------------------------------------------------------
_STREAMS = torch.ops.streams


def with_waits(graph: Graph) -> Graph:
    """The graph, whose ops that order streams are as torch hands them to passes: since 2.13, in `control_deps`."""
    module = GraphModule(torch.nn.Module(), graph)
    wrap = getattr(streams, "wrap_all_sync_nodes_with_control_deps", lambda module: None)
    wrap(module)
    return module.graph


def is_wait(node: Node, op: object = _STREAMS.wait_event.default) -> bool:
    module = node.graph.owning_module
    inner = [getattr(module, str(one.target)).graph for one in node.all_input_nodes if one.op == "get_attr"]
    targets = [node.target, *(one.target for graph in inner for one in graph.nodes)]
    return op in targets


@pytest.mark.parametrize("stream", [None, 2])
def test_a_gather_does_not_start_before_the_event_that_its_shard_waits_for(stream: int | None) -> None:
    """It would run beside the product before that, and its shard depends on the event's record alone."""
    b = GraphBuilder(ranks=2)
    shard = on_stream(b.relu(b.input("x", [4, 8])), 1)
    b.graph.call_function(_STREAMS.record_event.default, (3, 1))
    sums = b.scatter(b.mm(b.input("a", [8, 6]), b.input("v", [6, 8])))
    product = b.mm(b.input("c", [8, 6]), b.input("w", [6, 8]))
    for node in (sums, sums.args[0], sums.args[0].args[0], product) if stream else ():
        on_stream(node, stream)
    b.graph.call_function(_STREAMS.wait_event.default, (3, 0))
    graph = with_waits(b.returns(sums, product, b.mm(b.input("dy", [6, 8]), b.gather(shard))))
    run_pass(graph)
    nodes = [*graph.nodes]
    gather = next(node for node in nodes if "all_gather" in str(node.target))
    wait = next(node for node in nodes if is_wait(node))
    assert nodes.index(wait) < nodes.index(gather)


def test_no_chain_spans_a_wait_for_an_event() -> None:
    """The weight is there after it, and the fused op would stand before it."""
    b = GraphBuilder()
    whole = b.gather(b.input("x", [64, 64], **GPU))
    weight = on_stream(b.relu(b.input("w", [64, 64], **GPU)), 1)
    b.graph.call_function(_STREAMS.record_event.default, (3, 1))
    b.graph.call_function(_STREAMS.wait_event.default, (3, 0))
    graph = with_waits(b.returns(b.mm(whole, weight)))
    (remark,) = run_pass(graph).remarks
    named = any(name in remark.message for name in ("control_deps", "wait_event"))
    assert (remark.name, named) == ("SEVERAL_STREAMS", True)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_what_is_ordered_on_the_way_is_named(kind: str) -> None:
    """The collective runs on a stream of its own, and the default one waits for it, or it for that."""
    b = GraphBuilder()
    x, w = b.input("x", [64, 64], **GPU), b.input("w", [64, 64], **GPU)
    first = b.gather(x) if kind == "gather" else b.mm(x, w)
    for node in (first, first.all_input_nodes[0]) if kind == "gather" else (first,):
        on_stream(node, 1)
    if not hasattr(streams, "wrap_all_sync_nodes_with_control_deps"):
        pytest.skip("this torch hands tensors on past an event as they are")
    b.graph.call_function(_STREAMS.record_event.default, (3, 1))
    b.graph.call_function(_STREAMS.wait_event.default, (3, 0))
    (remark,) = run_pass(with_waits(b.returns(b.mm(first, w) if kind == "gather" else b.scatter(first)))).remarks
    assert (remark.name, "[control_deps " in remark.message) == ("SEVERAL_STREAMS", True)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_a_chain_before_a_wait_for_an_event(kind: str) -> None:
    """The chain is fused; a `control_deps` that named all of its nodes names the last one."""
    b = GraphBuilder()
    x, w = b.input("x", [64, 64], **GPU), b.input("w", [64, 64], **GPU)
    other = on_stream(b.relu(b.input("y", [64, 64], **GPU)), 1)
    b.graph.call_function(_STREAMS.record_event.default, (3, 1))
    made = b.mm(b.gather(x), w) if kind == "gather" else b.scatter(b.mm(x, w))
    b.graph.call_function(_STREAMS.wait_event.default, (3, 0))
    graph = with_waits(b.returns(b.relu(made), b.relu(other)))
    run_pass(graph)
    fused = next(node for node in graph.nodes if "matmul" in str(node.target))
    assert [str(node.target) for node in graph.nodes].count("aten.mm.default") == 0
    assert kind == "scatter" or fused.args[4] is False  # the gathered tensor is not returned
    wait = next(node for node in graph.nodes if is_wait(node))
    assert [*graph.nodes].index(fused) < [*graph.nodes].index(wait)


def test_a_record_of_an_event_stays_before_its_wait() -> None:
    """It makes nothing, so what it hands on does not tell that it is done."""
    if not hasattr(streams, "wrap_all_sync_nodes_with_control_deps"):
        pytest.skip("this torch names nothing that comes before an event")
    b = GraphBuilder()
    first = on_stream(b.relu(b.input("x", [8, 8])), 1)
    b.graph.call_function(_STREAMS.record_event.default, (3, 1))
    b.graph.call_function(_STREAMS.synchronize_event.default, (3,))
    graph = with_waits(b.returns(b.mm(b.gather(first), b.input("w", [8, 8]))))
    wait, record = (
        next(node for node in graph.nodes if is_wait(node, op.default))
        for op in (_STREAMS.synchronize_event, _STREAMS.record_event)
    )
    run_pass(graph)
    assert record in wait.all_input_nodes
