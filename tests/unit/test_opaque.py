"""Ops of which nothing is known are fixed points of a graph: what is fused, summed and bucketed passes none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from graph_builder import GraphBuilder, aten
from lockstep import differences, evaluate
from passes import outcomes, run_pass
from torch.fx import Graph, Node

from asynctp_passes import Config, Report, register_local, unregister
from asynctp_passes import run as run_asynctp
from asynctp_passes.ir.order import communications

_ops = torch.library.Library("opaque_test", "FRAGMENT")
_ops.define("mix(Tensor x) -> Tensor")
_ops.impl("mix", lambda x: x.clone(), "CPU")
torch.library.register_fake("opaque_test::mix", torch.empty_like, lib=_ops)
MIX = torch.ops.opaque_test.mix.default
Build = Callable[[GraphBuilder], tuple[Node, ...]]


@contextlib.contextmanager
def local() -> Iterator[None]:
    register_local("opaque_test::*")
    try:
        yield
    finally:
        unregister("opaque_test::*")


def amax(b: GraphBuilder, x: Node) -> Node:
    return b.all_reduce(b.call(aten.amax.default, x), "max")


def maxima(b: GraphBuilder) -> tuple[Node, ...]:
    """Three small maxima, an op after the first of them."""
    x, y, z, w = (b.input(name, [4, 4]) for name in "xyzw")
    first = amax(b, x)
    mixed = b.call(MIX, w)
    return first, mixed, amax(b, y), amax(b, z), b.mm(b.gather(x), w)


def sum_of_two(b: GraphBuilder) -> tuple[Node, ...]:
    x, y, w = (b.input(name, [4, 4]) for name in "xyw")
    one = b.all_reduce(b.mm(x, w))
    mixed = b.call(MIX, w)
    return b.add(b.all_reduce(b.mm(y, w)), one), mixed


def data_and_scale(b: GraphBuilder) -> tuple[Node, ...]:
    """The scale's gather would join the data's, which comes before the op."""
    x, w = b.input("x", [16, 32], torch.float8_e4m3fn), b.input("w", [16, 32], torch.float8_e4m3fn)
    one, rows = b.input("one", [1, 16]), b.input("rows", [16, 1])
    data = b.gather(x)
    mixed = b.call(MIX, one)
    scale = b.gather(rows)
    right = b.permute(w, [1, 0])
    out = b.call(aten._scaled_mm.default, data, right, scale, one, out_dtype=torch.bfloat16)
    return out, mixed


def late_weight(b: GraphBuilder) -> tuple[Node, ...]:
    """The weight is gathered after the op, which needs nothing."""
    x, y, w = b.input("x", [4, 4]), b.input("y", [4, 4]), b.input("w", [2, 6])
    whole = b.gather(x)
    mixed = b.call(MIX, y)
    return b.mm(whole, b.gather(w)), mixed


def run(build: Build) -> tuple[Graph, Report, list[str]]:
    """The graph, its report, and what communicates, in order."""
    b = GraphBuilder(ranks=2)
    graph = b.returns(*build(b))
    report = run_pass(graph)
    return graph, report, [node.name for node in communications(graph.nodes)]


def test_small_maxima_become_one_on_one_side_of_an_opaque_op() -> None:
    _, report, order = run(maxima)
    assert [len(bucket.collectives) for bucket in report.buckets] == [2]
    at = order.index("mix")
    assert len(order[:at]) == 1
    assert len(order[at + 1 :]) == 2
    with local():
        _, report, _ = run(maxima)
        assert [len(bucket.collectives) for bucket in report.buckets] == [3]


def test_reductions_on_both_sides_of_an_opaque_op_are_not_summed() -> None:
    _, report, order = run(sum_of_two)
    assert outcomes(report) == ["F", "F"]
    assert [name == "mix" for name in order] == [False, True, False]
    with local():
        _, _, order = run(sum_of_two)
        assert len(order) == 1


def test_a_gather_of_scales_joins_none_on_the_other_side() -> None:
    _, report, order = run(data_and_scale)
    assert order.index("mix") == 1, "after the data's gather, and before that of the scale"
    assert "F" not in outcomes(report)
    assert 'register_local("opaque_test::mix")' in report.remarks[0].message
    with local():
        _, report, _ = run(data_and_scale)
        assert outcomes(report)[0] == "F"


def test_a_late_gather_passes_no_opaque_op() -> None:
    _, report, order = run(late_weight)
    assert outcomes(report)[0] == "ATP213"
    assert order[1] == "mix"
    with local():
        _, report, _ = run(late_weight)
        assert outcomes(report)[0] == "F"


@pytest.mark.parametrize("build", [maxima, sum_of_two, late_weight])
def test_values_are_the_same(build: Build) -> None:
    b = GraphBuilder(ranks=2)
    original = b.returns(*build(b))
    graph, _, _ = run(build)
    values = [[torch.rand(node.meta["val"].shape) for node in original.nodes if node.op == "placeholder"] for _ in "01"]
    assert differences(evaluate(original, values), evaluate(graph, values)) == []


def test_an_opaque_op_alone_changes_nothing() -> None:
    """Its graph is not sorted: Inductor does that, after the pass."""
    b = GraphBuilder(ranks=2)
    x = b.input("x", [4, 4])
    mixed = b.call(MIX, x)
    graph = b.returns(mixed)
    with graph.inserting_after(mixed):
        mixed.args = (graph.call_function(aten.relu.default, (x,)),)
    before = [node.name for node in graph.nodes]
    run_asynctp(graph, Config(strict="off"))
    assert [node.name for node in graph.nodes] == before
