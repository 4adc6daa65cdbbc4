"""Ops of several tensors between communication and matmuls become one for each, and others stay."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from graph_builder import GraphBuilder, aten, show
from lockstep import differences, evaluate
from passes import copied, outcomes, run_pass
from torch.fx import Graph, Node

from asynctp_passes.errors import StrictError


def each(b: GraphBuilder, op: Any, tensors: list[Node], *args: Any, **kwargs: Any) -> list[Node]:
    call = b.call(op, tensors, *args, **kwargs)
    return [b.call(operator.getitem, call, index) for index in range(len(tensors))]


def two_chains(op: Any, *args: Any, **kwargs: Any) -> Graph:
    """Two gathered tensors, on which one call works, and their matmuls."""
    b = GraphBuilder(ranks=2)
    shards = [b.input("x", [4, 8]), b.input("y", [6, 8])]
    weights = [b.input("v", [8, 3]), b.input("w", [8, 5])]
    found = each(b, op, [b.gather(shard) for shard in shards], *args, **kwargs)
    return b.returns(*map(b.mm, found, weights))


def same_results(before: Graph, after: Graph) -> bool:
    values = [node.meta["val"] for node in before.nodes if node.op == "placeholder"]
    inputs = [[torch.randn(tuple(value.shape), dtype=value.dtype) for value in values] for _ in range(2)]
    return not differences(evaluate(before, inputs), evaluate(after, inputs))


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        (aten._foreach_abs.default, (), {}, ["F", "F"]),
        (aten._foreach_neg.default, (), {}, ["F", "F"]),
        (aten._foreach_mul.Scalar, (0.5,), {}, ["ATP208", "ATP208"]),
        (aten._foreach_mul.ScalarList, ([0.5, 2.0],), {}, ["ATP208", "ATP208"]),
        (aten._foreach_clamp_min.Scalar, (0.0,), {}, ["ATP208", "ATP208"]),
        (aten._foreach_maximum.Scalar, (0.5,), {}, ["ATP208", "ATP208"]),
        (aten._foreach_minimum.ScalarList, ([0.5, 2.0],), {}, ["ATP208", "ATP208"]),
        (aten._foreach_norm.Scalar, (), {}, ["ATP002", "ATP002"]),
    ],
)
def test_the_decision_is_that_of_the_single_ops(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[str]
) -> None:
    graph = two_chains(op, *args, **kwargs) if "norm" not in str(op) else of_norms()
    before = copied(graph)
    report = run_pass(graph)
    assert outcomes(report) == expected
    assert same_results(before, graph)
    if expected[0] == "ATP208":
        assert all("_foreach_" in str(remark) for remark in report.remarks)


@pytest.mark.parametrize(
    ("op", "value"),
    [
        (aten._foreach_addcmul.Scalar, 0.5),
        (aten._foreach_addcmul.ScalarList, [1.0, 0.5]),
        (aten._foreach_addcdiv.Scalar, 2),
        (aten._foreach_addcdiv.ScalarList, [1.0, 0.5]),
    ],
)
def test_ops_of_three_lists_and_numbers_are_single_ones(op: Any, value: Any) -> None:
    b = GraphBuilder(ranks=2)
    products = [b.mm(b.input("x", [8, 4]), b.input("v", [4, 6])), b.mm(b.input("y", [6, 4]), b.input("w", [4, 6]))]
    terms = [b.input("s", [8, 6]), b.input("t", [6, 6])]
    graph = b.returns(*map(b.all_reduce, each(b, op, products, terms, terms, value)))
    before = copied(graph)
    report = run_pass(graph)
    assert outcomes(report) == ["ATP105", "ATP105"]
    assert not [node for node in graph.nodes if "_foreach_" in str(node.target)]
    assert same_results(before, graph)


def copied_into(dtype: torch.dtype = torch.float32) -> Graph:
    """Two gathered tensors, copied into buffers by one call, and their matmuls."""
    b = GraphBuilder(ranks=2)
    shards = [b.input("x", [4, 8]), b.input("y", [6, 8])]
    weights = [b.input("v", [8, 3], dtype), b.input("w", [8, 5], dtype)]
    buffers = [b.call(aten.full.default, [rows, 8], 0.0, dtype=dtype) for rows in (8, 12)]
    found = each(b, aten._foreach_copy.default, buffers, [b.gather(shard) for shard in shards])
    return b.returns(*map(b.mm, found, weights))


@pytest.mark.parametrize(("dtype", "outcome"), [(torch.float32, "F"), (torch.float64, "ATP105")])
def test_copies_into_buffers_are_copies(dtype: torch.dtype, outcome: str) -> None:
    graph = copied_into(dtype)
    before = copied(graph)
    assert outcomes(run_pass(graph)) == [outcome] * 2
    assert same_results(before, graph)


def of_norms() -> Graph:
    """No pointwise ops: they stay what they are."""
    b = GraphBuilder(ranks=2)
    found = each(b, aten._foreach_norm.Scalar, [b.gather(b.input("x", [4, 8])), b.gather(b.input("y", [6, 8]))])
    return b.returns(*found)


def test_a_sum_of_products_that_one_call_makes() -> None:
    b = GraphBuilder(ranks=2)
    products = [b.mm(b.input(f"a{i}", [4, 8]), b.input(f"w{i}", [8, 6])) for i in range(4)]
    sums = each(b, aten._foreach_add.List, products[:2], products[2:])
    graph = b.returns(*map(b.scatter, sums))
    before = copied(graph)
    assert outcomes(run_pass(graph)) == ["F", "F"]
    assert "_foreach" not in show(graph)
    assert same_results(before, graph)


def test_an_optimizer_stays() -> None:
    """What comes after all reductions lies on no way to a matmul."""
    b = GraphBuilder(ranks=2)
    grads = [b.scatter(b.mm(b.input(f"a{i}", [4, 8]), b.input(f"w{i}", [8, 6]))) for i in range(2)]
    steps = each(b, aten._foreach_mul.Scalar, grads, -0.1)
    graph = b.returns(*each(b, aten._foreach_add.List, [b.input(f"p{i}", [2, 6]) for i in range(2)], steps))
    assert outcomes(run_pass(graph)) == ["F", "F"]
    assert show(graph).count("_foreach_mul(") == 1


def test_a_graph_that_strict_refuses_has_them_again() -> None:
    graph = two_chains(aten._foreach_mul.Scalar, 0.5)
    before = show(graph)
    with pytest.raises(StrictError):
        run_pass(graph, strict="all")
    assert show(graph) == before
