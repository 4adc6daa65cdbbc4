"""Collectives that nothing uses: where the partitioner copied them, gone with what was for them; else kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, c10d, show
from passes import outcomes, run_pass
from torch.fx import Graph, Node

Build = Callable[[GraphBuilder], tuple[Node, ...]]


def chain(b: GraphBuilder) -> Node:
    """A matmul and a reduce-scatter, as a backward has them."""
    return b.scatter(b.mm(b.input("tangents_1", [8, 6]), b.input("primals_1", [6, 8])))


def largest(b: GraphBuilder, name: str = "primals_2", group: str = "tp") -> Node:
    """The all-reduced maximum of a weight."""
    maximum = b.call(aten.max.default, b.call(aten.abs.default, b.input(name, [6, 8])))
    return b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, maximum, "max", group))


def unused(b: GraphBuilder) -> tuple[Node, ...]:
    largest(b)
    return (chain(b),)


def unused_behind_what_is_computed(b: GraphBuilder) -> tuple[Node, ...]:
    b.relu(b.relu(largest(b)))
    return (chain(b),)


def unused_among_used(b: GraphBuilder) -> tuple[Node, ...]:
    """What is used becomes one all-reduce, without the others."""
    found = [largest(b, f"primals_{index}") for index in range(2, 6)]
    return chain(b), found[1], found[3]


def unused_one_after_the_other(b: GraphBuilder) -> tuple[Node, ...]:
    again = b.call(c10d.all_reduce.default, b.relu(largest(b)), "max", "tp")
    b.call(c10d.wait_tensor.default, again)
    return (chain(b),)


def unused_product(b: GraphBuilder) -> tuple[Node, ...]:
    """A chain that nothing wants is no chain."""
    b.scatter(b.mm(b.input("primals_2", [8, 6]), b.input("primals_3", [6, 8])))
    return (chain(b),)


def unused_gather_of_a_used_input(b: GraphBuilder) -> tuple[Node, ...]:
    shard = b.relu(b.input("primals_2", [4, 8]))
    b.relu(b.gather(shard))
    return chain(b), shard


def used(b: GraphBuilder) -> tuple[Node, ...]:
    return chain(b), largest(b)


def used_by_a_mutation(b: GraphBuilder) -> tuple[Node, ...]:
    found = largest(b)
    b.call(aten.copy_.default, b.input("primals_history", []), found)
    return (chain(b),)


def in_place(b: GraphBuilder) -> tuple[Node, ...]:
    """Who holds the tensor sees what came of it."""
    reduced = b.call(c10d.all_reduce_.default, b.input("primals_2", [4]), "max", "tp")
    b.call(c10d.wait_tensor.default, reduced)
    return (chain(b),)


def wait_of_an_input(b: GraphBuilder) -> tuple[Node, ...]:
    """Its collective is in another graph."""
    b.call(c10d.wait_tensor.default, b.input("primals_2", [4]))
    return (chain(b),)


def used_by_a_check(b: GraphBuilder) -> tuple[Node, ...]:
    found = b.call(aten.ne.Scalar, largest(b), 0)
    b.call_like(None, aten._assert_async.msg, found, "no weights")
    return (chain(b),)


def used_by_chance(b: GraphBuilder) -> tuple[Node, ...]:
    """What draws random numbers stays, and so does all that it takes."""
    b.call(aten.bernoulli.default, largest(b))
    return (chain(b),)


def waited_for_behind_a_view(b: GraphBuilder) -> tuple[Node, ...]:
    started = b.call(c10d.all_reduce.default, b.input("primals_2", [4, 2]), "max", "tp")
    b.call(c10d.wait_tensor.default, b.reshape(started, [8]))
    return (chain(b),)


def broadcast(b: GraphBuilder) -> tuple[Node, ...]:
    b.call(c10d.wait_tensor.default, b.call(c10d.broadcast.default, b.input("primals_2", [4]), 0, "tp"))
    return (chain(b),)


def broadcast_that_nobody_waits_for(b: GraphBuilder) -> tuple[Node, ...]:
    b.call(c10d.broadcast.default, b.input("primals_2", [4]), 0, "tp")
    return (chain(b),)


def one_of_a_list(b: GraphBuilder) -> tuple[Node, ...]:
    one, other = b.gather_list(b.input("primals_2", [4, 8]), b.input("primals_3", [4, 8]))
    b.relu(one)
    return chain(b), b.relu(other)


def of_the_incoming_gradient(b: GraphBuilder) -> tuple[Node, ...]:
    """No partitioner copies it: a backward of the program's own, where another rank may use the result."""
    tangent = b.input("tangents_2", [6, 8])
    b.relu(b.all_reduce(b.call(aten.sum.default, b.mm(tangent, b.input("primals_2", [8, 4])))))
    return (chain(b),)


CASES: dict[Build, list[str]] = {
    unused: ["ATP014", "F"],
    unused_behind_what_is_computed: ["ATP014", "F"],
    unused_among_used: ["ATP014", "ATP002", "ATP014", "ATP002", "F"],
    unused_one_after_the_other: ["ATP014", "ATP014", "F"],
    unused_product: ["ATP014", "F"],
    unused_gather_of_a_used_input: ["ATP014", "F"],
    used: ["F", "ATP002"],
    used_by_a_mutation: ["ATP002", "F"],
    in_place: ["ATP013", "F"],
    wait_of_an_input: ["F"],
    used_by_a_check: ["ATP002", "F"],
    used_by_chance: ["ATP002", "F"],
    waited_for_behind_a_view: ["ATP013", "F"],
    broadcast: ["ATP006", "F"],
    broadcast_that_nobody_waits_for: ["ATP006", "F"],
    one_of_a_list: ["ATP002", "ATP002", "F"],
    of_the_incoming_gradient: ["ATP002", "F"],
}


def built(build: Build) -> Graph:
    b = GraphBuilder(ranks=2)
    return b.returns(*build(b))


def calls(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_outcome(build: Build) -> None:
    graph = built(build)
    report = run_pass(graph)
    assert outcomes(report) == CASES[build]
    assert {remark.code for remark in report.with_outcome("ERASED")} <= {"ATP014"}
    gone = {remark.collective for remark in report.remarks if remark.code == "ATP014"}
    assert gone.isdisjoint(calls(graph))
    kept = {remark.collective for remark in report.remarks if remark.code in ("ATP002", "ATP006", "ATP013")}
    apart = {"getitem", "getitem_1"} if build is one_of_a_list else set()  # each becomes a collective of its own
    assert apart <= kept
    assert kept - apart <= {*calls(graph), *(name for bucket in report.buckets for name in bucket.collectives)}
    assert apart.isdisjoint(calls(graph))


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_inference_keeps_them(build: Build) -> None:
    """No partitioner has seen it, so that they are the program's own."""
    graph = built(build)
    for node in graph.nodes:
        node.name = node.name.replace("primals", "arg").replace("tangents", "arg_t")
    assert "ATP014" not in outcomes(run_pass(graph))


@pytest.mark.parametrize(("group", "code"), [("dp", "ATP002"), ("tp", "ATP014")])
def test_groups_that_are_not_enrolled_keep_them(group: str, code: str) -> None:
    b = GraphBuilder(ranks=2)
    largest(b, group=group)
    graph = b.returns(chain(b))
    before = calls(graph)[:4]
    assert outcomes(run_pass(graph, groups="tp")) == [code, "F"]
    assert (calls(graph)[:4] == before) == (code == "ATP002")


def test_those_of_other_groups_stay_where_ours_take_their_result() -> None:
    b = GraphBuilder(ranks=2)
    theirs = b.call(c10d.all_reduce.default, b.input("primals_2", [4]), "max", "dp")
    b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, b.relu(theirs), "max", "tp"))
    graph = b.returns(chain(b))
    assert outcomes(run_pass(graph, groups="tp"))[1] == "ATP014"
    assert calls(graph) == ["all_reduce", "matmul_reduce_scatter_default"]


def test_what_those_of_other_groups_take_stays() -> None:
    b = GraphBuilder(ranks=2)
    b.call(c10d.all_reduce.default, b.relu(largest(b)), "max", "dp")
    graph = b.returns(chain(b))
    before = calls(graph)[:6]
    assert "ATP014" not in outcomes(run_pass(graph, groups="tp"))
    assert calls(graph)[:6] == before


@pytest.mark.parametrize(("tag", "code"), [(None, "ATP002"), ("is_forward", "ATP002"), ("is_backward", "ATP014")])
def test_forward_graphs_lose_those_of_the_backward(tag: str | None, code: str) -> None:
    """The program's own stay: another rank may use the result, and would wait for this one forever."""
    b = GraphBuilder(ranks=2)
    largest(b, "primals_1")
    graph = b.returns(b.mm(b.gather(b.input("primals_2", [4, 6])), b.input("primals_3", [6, 8])))
    for node in graph.nodes if tag else ():
        node.meta["partitioner_tag"] = tag if "all_reduce" in node.name else "is_forward"
    assert outcomes(run_pass(graph)) == [code, "F"]
    assert ("all_reduce" in calls(graph)) == (code == "ATP002")


def test_what_becomes_of_the_graph() -> None:
    graph = built(unused_among_used)
    run_pass(graph)
    assert_expected_inline(
        show(graph),
        """\
primals_2: f32[6, 8]
primals_3: f32[6, 8]
abs_2 = abs(primals_3)  # f32[6, 8]
max_2 = max(abs_2)  # f32[]
reshape_default = reshape(max_2, [1])  # f32[1]
primals_4: f32[6, 8]
primals_5: f32[6, 8]
abs_4 = abs(primals_5)  # f32[6, 8]
max_4 = max(abs_4)  # f32[]
reshape_default_1 = reshape(max_4, [1])  # f32[1]
cat_default = cat([reshape_default, reshape_default_1])  # f32[2]
all_reduce_default = all_reduce(cat_default, 'max', 'tp')  # f32[2]
wait_tensor_default = wait_tensor(all_reduce_default)  # f32[2]
split_with_sizes_default = split_with_sizes(wait_tensor_default, [1, 1])  # (f32[1], f32[1])
getitem = getitem(split_with_sizes_default, 0)  # f32[1]
reshape_default_2 = reshape(getitem, [])  # f32[]
clone_default = clone(reshape_default_2)  # f32[]
getitem_1 = getitem(split_with_sizes_default, 1)  # f32[1]
reshape_default_3 = reshape(getitem_1, [])  # f32[]
clone_default_1 = clone(reshape_default_3)  # f32[]
tangents_1: f32[8, 6]
primals_1: f32[6, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[tangents_1], b_parts=[primals_1],
    biases=[None], reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp')  # f32[4, 8]
return (matmul_reduce_scatter_default, clone_default, clone_default_1)
""",
    )


def test_all_that_goes_is_what_was_for_them() -> None:
    graph = built(unused_gather_of_a_used_input)
    run_pass(graph)
    assert calls(graph) == ["relu", "matmul_reduce_scatter_default"]


def test_random_numbers_stay_in_step() -> None:
    """What draws them stays, so that later draws are what they were."""
    b = GraphBuilder(ranks=2)
    noise = b.call(aten.rand.default, [4, 8])
    b.gather(noise)
    graph = b.returns(chain(b), b.call(aten.rand.default, [4]))
    run_pass(graph)
    assert calls(graph) == ["rand", "matmul_reduce_scatter_default", "rand_1"]
