"""Sums of reductions that are drawn at random, or have symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from graph_builder import GraphBuilder
from hypothesis import given, note
from hypothesis import strategies as st
from passes import copied, run_pass
from programs import Builder
from sum_graphs import added, check_same, reduced, reductions_left, scattered, summed_up
from torch.fx import Node

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


SHAPE = (2, 4, 6)


# --- symbolic sizes ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size_is_read", [False, True])
def test_of_any_number_of_rows(size_is_read: bool) -> None:
    """No guard is added. Where the second term's shape is read off the first one's result, both stay."""
    b = GraphBuilder(ranks=2)
    a, other = (b.input(name, [6, 5], dynamic=[0]) for name in "ab")
    w, v = (b.input(name, [5, 8]) for name in "wv")
    one = b.all_reduce(b.mm(a, w))
    rows = b.call(aten.sym_size.int, one if size_is_read else a, 0)
    two = b.all_reduce(b.mm(b.reshape(other, [rows, 5]), v))
    graph = b.returns(b.add(one, two))
    guards = list(b.mode.shape_env.guards)
    report = run_pass(graph, strict="all", expect=2)
    assert (len(report.fused), summed_up(graph)) == (2, [1, 1] if size_is_read else [2])
    assert b.mode.shape_env.guards == guards


@pytest.mark.parametrize("joined", [False, True])
def test_sizes_of_a_product_that_shape_another_of_the_sum(joined: bool) -> None:
    """They are read off what needs no product, and small all-reduces beside the sum still become one."""
    b = GraphBuilder(ranks=2)
    a, other = (b.input(name, [6, 8], dynamic=[0]) for name in "ab")
    w, v = (b.input(name, [8, 8]) for name in "wv")
    one = b.mm(a, w)
    rows = b.call(aten.sym_size.int, one, 0)
    two = b.mm(b.reshape(other, [rows, 8]), v)
    total = b.add(b.all_reduce(one), b.all_reduce(two)) if joined else b.all_reduce(b.add(one, two))
    largest = [b.all_reduce(b.call(aten.amax.default, b.input(name, [4])), "max") for name in "xy"]
    graph = b.returns(total, *largest)
    report = run_pass(graph, strict="all")
    assert (summed_up(graph), len(report.buckets)) == ([2], 1)


# --- random sums -------------------------------------------------------------------------------------------------
@given(st.data(), st.integers(0, 2**16))
def test_random_sums_compute_the_same(data: st.DataObject, seed: int) -> None:
    """Any tree, in any order, through views, with leaks; what has none of these is one op."""
    b = Builder(lambda options: data.draw(st.sampled_from(list(options))), 2)
    terms, spoiled = random_sum(b)
    b.graph.output(tuple(terms))
    graph = copied(b.graph)
    report = run_pass(graph)
    graph.lint()
    note(f"{b.notes}\n{b.graph}\nbecomes\n{graph}")
    assert not report.missed
    assert len(report.fused) + reductions_left(graph) == reductions_left(b.graph)
    assert spoiled or (len(summed_up(graph)), reductions_left(graph)) == (1, 0)
    check_same(b, graph, seed)


def random_sum(b: Builder) -> tuple[list[Node], bool]:
    """The sum of two to five reductions, most of products, and what leaks; and whether it may not be one reduction."""
    dtype = b.choose([torch.float32, torch.float64, torch.bfloat16])
    scatters, spoils, turn = b.chance(3), b.chance(2), b.choose([0, 1, 2, 5])
    full = [(2 if scatters else 1) * SHAPE[0], *SHAPE[1:]]
    terms: list[Node] = []
    leaks: list[Node] = []
    spoiled, left = False, b.choose([2, 3, 4, 5])
    while left or len(terms) > 1:
        step = b.choose(["member"] * bool(left) + ["add", "sub"] * (len(terms) > 1))
        if step == "member":
            product = b.call(aten.mm.default, *(b.placeholder(size, dtype) for size in ((4 * full[0], 3), (3, 6))))
            average = spoils and b.chance(4)
            left, spoiled = left - 1, spoiled or average
            whole = b.reshape(product, full)
            if left and b.chance(3):  # one at least is of a product alone
                other = b.placeholder(tuple(full), dtype)
                whole = b.choose([other, added(b, whole, other)])
            term = scattered(b, whole) if scatters else reduced(b, whole, "avg" if average else "sum")
            if b.chance(4):
                term = added(b, *b.choose([(term, b.placeholder(SHAPE, dtype)), (b.placeholder(SHAPE, dtype), term)]))
            terms.append(b.call(aten.permute.default, term, [1, 0, 2]) if left >= turn else term)
        else:
            one, two = (terms.pop(b.choose(range(len(terms)))) for _ in range(2))
            if one.meta["val"].shape != two.meta["val"].shape:
                two = b.call(aten.permute.default, two, [1, 0, 2])
            terms.append(b.call(aten.add.Tensor if step == "add" else aten.sub.Tensor, one, two))
        if spoils and b.chance(4):
            leaks, spoiled = [*leaks, b.call(aten.relu.default, b.choose(terms))], spoiled or bool(left or terms[1:])
    return [*terms, *leaks], spoiled
