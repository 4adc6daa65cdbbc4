"""Graphs whose nodes are in any order: sorted, they are what they were, and nothing but inputs moves a node."""

from __future__ import annotations

import operator
import random
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._dynamo.variables.streams  # defines the ops
from dumps import dump_paths, example_inputs, load
from graph_builder import GraphBuilder, aten, c10d, snapshot
from lockstep import differences, evaluate
from passes import run_pass
from serving_ops import registered
from test_corpus import ROUNDING, group_size, id_of
from torch.fx import Graph, Node

from asynctp_passes import Config, Remark, StrictError, run
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.nodes import is_random, mutates
from asynctp_passes.remat.joint import run_joint
from asynctp_passes.rewriting import toposort
from asynctp_passes.rewriting.toposort import CannotSort


def arrange(graph: Graph, order: list[Node]) -> Graph:
    """Bring all nodes but the placeholders and the output into an order."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for before, node in pairwise([*inputs, *order, graph.output_node()]):
        before.append(node)
    return graph


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def called(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


# --- stable ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", dump_paths()[::6], ids=id_of)
def test_a_sorted_graph_stays_as_it_is(path: Path) -> None:
    graph = load(path).graph
    before = snapshot(graph)
    toposort.sort(graph)
    assert snapshot(graph) == before


def late_attention(b: GraphBuilder) -> tuple[Graph, dict[str, Node]]:
    """As the pattern matcher leaves it: what a reduce-scatter of the forward takes comes in the backward."""
    x, w, dy = b.input("primals_1", [4, 8]), b.input("primals_2", [8, 8]), b.input("tangents_1", [4, 8])
    h = b.gather(x)
    q = b.mm(h, w)
    attention = b.relu(q)
    y = b.scatter(b.mm(attention, w))
    dh = b.gather(dy)
    grad = b.mm(dh, w)
    graph = b.returns(y, grad)
    nodes = called(graph)
    nodes.remove(attention)
    nodes.insert(nodes.index(grad), attention)
    return arrange(graph, nodes), {"attention": attention, "y": y, "dh": dh, "q": q}


def test_late_inputs_move_up_to_their_first_user() -> None:
    b = GraphBuilder()
    graph, nodes = late_attention(b)
    assert not toposort.is_sorted(graph)
    rest = [node for node in names(graph) if node != nodes["attention"].name]
    toposort.sort(graph)
    graph.lint()
    assert toposort.is_sorted(graph)
    assert [node for node in names(graph) if node != nodes["attention"].name] == rest, "all else stays"
    assert nodes["q"] < nodes["attention"] < nodes["y"] < nodes["dh"]


@pytest.mark.parametrize("joint", [False, True])
def test_both_passes_sort(joint: bool) -> None:
    graph, _ = late_attention(GraphBuilder())
    config = Config(strict="all")
    if joint:
        assert run_joint(graph, config) is None
    else:
        assert len(run(graph, config).fused) == 3
    assert toposort.is_sorted(graph)


def test_a_graph_that_does_not_communicate_is_left_to_inductor() -> None:
    b = GraphBuilder()
    x = b.input("x", [4, 4])
    first = b.relu(x)
    graph = b.returns(b.mm(first, x))
    arrange(graph, called(graph)[::-1])
    before = snapshot(graph)
    run_pass(graph)
    assert run_joint(graph, Config()) is None
    assert snapshot(graph) == before


def test_an_error_leaves_the_order_too() -> None:
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 8]))
    reordered = b.cat(b.chunks(whole)[::-1])
    graph = b.returns(b.mm(reordered, b.input("w", [8, 4])))
    nodes = called(graph)
    arrange(graph, [*nodes[-2:], *nodes[:-2]])
    before = snapshot(graph)
    with pytest.raises(StrictError):
        run(graph, Config())
    assert snapshot(graph) == before


# --- what a program does ---------------------------------------------------------------------------------------
def test_collectives_keep_their_order() -> None:
    """The first takes what is made last."""
    b = GraphBuilder()
    x, y = b.input("x", [4, 8]), b.input("y", [4, 8])
    late = b.relu(x)
    first, second = b.all_reduce(late), b.all_reduce(y)
    graph = b.returns(first, second)
    nodes = called(graph)
    arrange(graph, [*nodes[1:], late])
    toposort.sort(graph)
    assert [one.waits for one in read_collectives(graph)] == [(first,), (second,)]
    assert list(graph.nodes)[2] is late


def test_inputs_win_over_the_order_of_collectives() -> None:
    """Of a, b and c in the graph's order, a needs c: c comes first, and b after a as before."""
    b = GraphBuilder()
    x, y = b.input("x", [4, 8]), b.input("y", [4, 8])
    c = b.call(c10d.all_reduce.default, x, "sum", "tp")
    a = b.call(c10d.all_reduce.default, b.relu(b.call(c10d.wait_tensor.default, c)), "sum", "tp")
    other = b.call(c10d.all_reduce.default, y, "sum", "tp")
    graph = b.returns(a, other)
    rest = [node for node in called(graph) if node not in (a, other, c)]
    arrange(graph, [a, other, c, *rest])
    toposort.sort(graph)
    order = [one.node for one in read_collectives(graph)]
    assert order.index(c) < order.index(a) < order.index(other)


def test_draws_keep_their_order_and_collectives_theirs() -> None:
    """A collective takes a draw that is made late: it moves with the draws before it, and not behind the other one."""
    b = GraphBuilder()
    x, y = b.input("x", [4, 8]), b.input("y", [4, 8])
    one = b.call(aten.rand_like.default, y)
    two = b.call(aten.rand_like.default, x)
    first, second = b.all_reduce(two), b.all_reduce(y)
    graph = b.returns(one, first, second)
    nodes = [node for node in called(graph) if node not in (one, two)]
    arrange(graph, [*nodes, one, two])
    toposort.sort(graph)
    assert [node for node in graph.nodes if is_random(node)] == [one, two]
    assert [each.waits for each in read_collectives(graph)] == [(first,), (second,)]
    assert two < first


def written_in_place(b: GraphBuilder) -> tuple[Graph, Node, Node, Node]:
    x, y = b.input("x", [4, 8]), b.input("y", [4, 8])
    view = b.call(aten.view.default, x, [8, 4])
    read = b.relu(view)
    write = b.call(aten.copy_.default, x, y)
    again = b.relu(view)
    total = b.all_reduce(b.add(read, again))
    return b.returns(total), read, write, again


def test_reads_stay_on_their_side_of_a_write() -> None:
    graph, read, write, again = written_in_place(GraphBuilder())
    view, *nodes = called(graph)
    arrange(graph, [*nodes, view])
    toposort.sort(graph)
    assert toposort.is_sorted(graph)
    assert view < read < write < again


def test_a_read_that_cannot_stay_there_is_an_error() -> None:
    """An input of what comes before a write reads after it: either place would be another value."""
    b = GraphBuilder()
    x, y = b.input("x", [4, 8]), b.input("y", [4, 8])
    read = b.relu(x)
    early = b.add(read, x)
    write = b.call(aten.copy_.default, x, y)
    graph = b.returns(b.all_reduce(early))
    rest = [node for node in called(graph) if node not in (early, write, read)]
    arrange(graph, [early, write, read, *rest])
    before = snapshot(graph)
    with pytest.raises(CannotSort, match="relu"):
        toposort.sort(graph)
    assert snapshot(graph) == before


@pytest.mark.parametrize("behind", [False, True])
def test_nothing_moves_past_what_orders_streams(behind: bool) -> None:
    """A late input moves up to its user where no wait for an event lies between: `behind` it does."""
    b = GraphBuilder()
    x, y = b.input("x", [4, 8]), b.input("y", [4, 8])
    late = b.relu(x)
    total = b.all_reduce(late)
    other = b.call(operator.neg, y)
    wait = b.graph.call_function(torch.ops.streams.wait_event.default, (3, 0))
    graph = b.returns(total, other)
    rest = [node for node in called(graph) if node not in (late, wait, other)]
    arrange(graph, [other, *rest, *((wait, late) if behind else (late, wait))])
    if behind:
        with pytest.raises(CannotSort, match="streams"):
            toposort.sort(graph)
        return
    toposort.sort(graph)
    assert called(graph) == [other, late, *rest, wait]


def test_a_cycle_is_an_error() -> None:
    b = GraphBuilder()
    x = b.input("x", [4, 8])
    one = b.relu(x)
    two = b.add(one, x)
    graph = b.returns(b.all_reduce(two))
    one.args = (two,)
    before = snapshot(graph)
    with pytest.raises(CannotSort, match=r"relu -> add|add -> relu"):
        toposort.sort(graph)
    assert snapshot(graph) == before


# --- any order -------------------------------------------------------------------------------------------------
def shuffled(graph: Graph, seed: int) -> None:
    """Any permutation that keeps the order of inputs, collectives, draws and in-place operations."""
    nodes, drawn = list(graph.nodes), random.Random(seed)
    communicate = {one.call or one.node for one in read_collectives(graph)}
    fixed = {
        node for node in nodes if node.op in ("placeholder", "output") or is_random(node) or mutates(node)
    } | communicate
    kept, order = (node for node in nodes if node in fixed), list(nodes)
    drawn.shuffle(order)
    for before, node in pairwise([next(kept) if node in fixed else node for node in order]):
        before.append(node)


def told(remark: Remark) -> tuple[object, ...]:
    return remark.outcome, remark.kind, remark.collective, remark.code, remark.op, remark.shapes, set(remark.nodes)


@pytest.mark.parametrize("path", [p for p in dump_paths() if p.parent.name == "torch2.13"][::5], ids=id_of)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_report_of_any_order_is_the_same(path: Path, seed: int) -> None:
    original, other = load(path), load(path)
    shuffled(other.graph, seed)
    with registered():
        reports = run_pass(original.graph), run_pass(other.graph)
    assert [told(remark) for remark in reports[0].remarks] == [told(remark) for remark in reports[1].remarks]


@pytest.mark.parametrize("path", [p for p in dump_paths() if p.parent.name == "torch2.13"][::8], ids=id_of)
def test_any_order_computes_the_same(path: Path) -> None:
    original, other = load(path), load(path)
    shuffled(other.graph, 2)
    with registered():
        run_pass(other.graph)
    other.graph.lint()
    ranks = range(group_size(original.graph))
    outs, others = (evaluate(one, [example_inputs(one, seed=rank) for rank in ranks]) for one in (original, other))
    assert differences(outs, others, ROUNDING) == []


def test_a_sort_takes_linear_time() -> None:
    """Thousands of nodes, each listed before its input."""
    b = GraphBuilder()
    node = b.input("x", [4])
    for _ in range(1500):
        node = b.call(operator.neg, node)
    graph = b.returns(b.all_reduce(node))
    arrange(graph, called(graph)[::-1])
    with mock.patch.object(toposort, "steps_of", wraps=toposort.steps_of) as steps:
        toposort.sort(graph)
    assert steps.call_count == 2
    assert toposort.is_sorted(graph)
    assert torch.is_tensor(node.meta["val"])
