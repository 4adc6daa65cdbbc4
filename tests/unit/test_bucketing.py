"""Small all-reduces become one where none waits for another, bit by bit the same, and nothing else changes its order.

`EXPECTTEST_ACCEPT=1` writes the expectations anew.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dumps import CORPUS, load
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, c10d, show
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from lockstep import differences, evaluate, op_name
from passes import before_and_after, copied, run_pass
from profiles import THOROUGH
from torch import Tensor
from torch.fx import Graph, Node

from asynctp_passes import Report
from asynctp_passes.planning.legality import SMALL_BYTES


def all_reduce(b: GraphBuilder, x: Node, op: str = "max", group: str = "tp") -> Node:
    """all_reduce → wait."""
    return b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, x, op, group))


def amax(b: GraphBuilder, x: Node, op: str = "max", group: str = "tp") -> Node:
    """What a quantization begins with: the largest magnitude on all ranks."""
    return all_reduce(b, b.call(aten.max.default, b.call(aten.abs.default, x)), op, group)


def scaled(b: GraphBuilder, x: Node, **kwargs: Any) -> Node:
    """A tensor over its amax."""
    return b.call(aten.div.Tensor, x, amax(b, x, **kwargs))


def reduces(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if op_name(node.target) == "_c10d_functional::all_reduce"]


def sets_of(report: Report) -> list[tuple[str, ...]]:
    return [entry.collectives for entry in report.buckets]


# --- what it looks like ------------------------------------------------------------------------------------
def test_a_weights_amax_travels_with_the_activations() -> None:
    """The weight's is computed later in the program; it moves up, and the matmul stays where it is."""
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 8])
    graph = b.returns(b.mm(scaled(b, x), scaled(b, w)))
    text, report = before_and_after(graph)
    assert_expected_inline(
        f"{text}\n{report}",
        """\
x: f32[4, 8]
w: f32[8, 8]
abs_1 = abs(x)  # f32[4, 8]
max_1 = max(abs_1)  # f32[]
all_reduce = all_reduce(max_1, 'max', 'tp')  # f32[]
wait_tensor = wait_tensor(all_reduce)  # f32[]
div = div(x, wait_tensor)  # f32[4, 8]
abs_2 = abs(w)  # f32[8, 8]
max_2 = max(abs_2)  # f32[]
all_reduce_1 = all_reduce(max_2, 'max', 'tp')  # f32[]
wait_tensor_1 = wait_tensor(all_reduce_1)  # f32[]
div_1 = div(w, wait_tensor_1)  # f32[8, 8]
mm = mm(div, div_1)  # f32[4, 8]
return (mm)

=== becomes ===

x: f32[4, 8]
w: f32[8, 8]
abs_1 = abs(x)  # f32[4, 8]
max_1 = max(abs_1)  # f32[]
reshape_default = reshape(max_1, [1])  # f32[1]
abs_2 = abs(w)  # f32[8, 8]
max_2 = max(abs_2)  # f32[]
reshape_default_1 = reshape(max_2, [1])  # f32[1]
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
div = div(x, clone_default)  # f32[4, 8]
div_1 = div(w, clone_default_1)  # f32[8, 8]
mm = mm(div, div_1)  # f32[4, 8]
return (mm)

asynctp: graph (inference): 0 of 0 chains fused, 0 missed, 2 other collectives: 2 bucketed
= BUCKETED 2 all_reduce(max) over group 'tp' into one of 8 B: all_reduce, all_reduce_1
= BUCKETED 2 x ATP002 NO_MATMUL: no matmul of this graph takes what is gathered, or makes what is
    reduced""",
    )


def test_shapes_are_kept() -> None:
    """Vectors, as rowwise recipes have them, travel beside numbers."""
    b = GraphBuilder()
    x, w = b.input("x", [2, 3, 8]), b.input("w", [8, 4])
    rows = all_reduce(b, b.call(aten.amax.default, b.call(aten.abs.default, x), [-1], True))
    columns = all_reduce(b, b.call(aten.amax.default, b.call(aten.abs.default, w), [0], True))
    graph = b.returns(b.call(aten.div.Tensor, x, rows), b.call(aten.div.Tensor, w, columns), rows)
    run_pass(graph)
    assert_expected_inline(
        show(graph),
        """\
x: f32[2, 3, 8]
w: f32[8, 4]
abs_1 = abs(x)  # f32[2, 3, 8]
amax = amax(abs_1, [-1], True)  # f32[2, 3, 1]
reshape_default = reshape(amax, [6])  # f32[6]
abs_2 = abs(w)  # f32[8, 4]
amax_1 = amax(abs_2, [0], True)  # f32[1, 4]
reshape_default_1 = reshape(amax_1, [4])  # f32[4]
cat_default = cat([reshape_default, reshape_default_1])  # f32[10]
all_reduce_default = all_reduce(cat_default, 'max', 'tp')  # f32[10]
wait_tensor_default = wait_tensor(all_reduce_default)  # f32[10]
split_with_sizes_default = split_with_sizes(wait_tensor_default, [6, 4])  # (f32[6], f32[4])
getitem = getitem(split_with_sizes_default, 0)  # f32[6]
reshape_default_2 = reshape(getitem, [2, 3, 1])  # f32[2, 3, 1]
clone_default = clone(reshape_default_2)  # f32[2, 3, 1]
getitem_1 = getitem(split_with_sizes_default, 1)  # f32[4]
reshape_default_3 = reshape(getitem_1, [1, 4])  # f32[1, 4]
clone_default_1 = clone(reshape_default_3)  # f32[1, 4]
div = div(x, clone_default)  # f32[2, 3, 8]
div_1 = div(w, clone_default_1)  # f32[8, 4]
return (div, div_1, clone_default)
""",
    )


def test_a_result_that_is_waited_for_twice() -> None:
    """Under torch.compile `funcol.all_reduce` waits, and so does a program that was written for eager mode."""
    b = GraphBuilder()
    x, y = b.input("x", [4, 8]), b.input("y", [6, 8])
    once = b.call(c10d.wait_tensor.default, b.reshape(amax(b, x), [1]))
    twice = b.call(c10d.wait_tensor.default, b.call(c10d.wait_tensor.default, amax(b, y)))
    graph = b.returns(once, twice, b.call(aten.div.Tensor, y, twice))
    run_pass(graph)
    assert_expected_inline(
        show(graph),
        """\
x: f32[4, 8]
y: f32[6, 8]
abs_1 = abs(x)  # f32[4, 8]
max_1 = max(abs_1)  # f32[]
reshape_default = reshape(max_1, [1])  # f32[1]
abs_2 = abs(y)  # f32[6, 8]
max_2 = max(abs_2)  # f32[]
reshape_default_1 = reshape(max_2, [1])  # f32[1]
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
reshape = reshape(clone_default, [1])  # f32[1]
div = div(y, clone_default_1)  # f32[6, 8]
return (reshape, clone_default_1, div)
""",
    )


def test_beside_a_fused_chain() -> None:
    """The gathered tensor's amax waits for the fused op, and so stays behind it; the other two go together."""
    b = GraphBuilder()
    x, w, v = b.input("x", [4, 8]), b.input("w", [8, 8]), b.input("v", [8, 8])
    out = b.mm(b.gather(scaled(b, x)), scaled(b, w))
    graph = b.returns(b.mm(scaled(b, out), v))
    report = run_pass(graph)
    assert len(report.fused) == 1
    assert sets_of(report) == [("all_reduce", "all_reduce_1")]
    assert_expected_inline(
        show(graph),
        """\
x: f32[4, 8]
w: f32[8, 8]
v: f32[8, 8]
abs_1 = abs(x)  # f32[4, 8]
max_1 = max(abs_1)  # f32[]
reshape_default = reshape(max_1, [1])  # f32[1]
abs_2 = abs(w)  # f32[8, 8]
max_2 = max(abs_2)  # f32[]
reshape_default_1 = reshape(max_2, [1])  # f32[1]
cat_default = cat([reshape_default, reshape_default_1])  # f32[2]
all_reduce_default = all_reduce(cat_default, 'max', 'tp')  # f32[2]
wait_tensor_default = wait_tensor(all_reduce_default)  # f32[2]
split_with_sizes_default = split_with_sizes(wait_tensor_default, [1, 1])  # (f32[1], f32[1])
getitem_1 = getitem(split_with_sizes_default, 0)  # f32[1]
reshape_default_2 = reshape(getitem_1, [])  # f32[]
clone_default = clone(reshape_default_2)  # f32[]
getitem_2 = getitem(split_with_sizes_default, 1)  # f32[1]
reshape_default_3 = reshape(getitem_2, [])  # f32[]
clone_default_1 = clone(reshape_default_3)  # f32[]
div = div(x, clone_default)  # f32[4, 8]
div_1 = div(w, clone_default_1)  # f32[8, 8]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=div, bs=[div_1], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 8])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 8]
abs_3 = abs(getitem)  # f32[16, 8]
max_3 = max(abs_3)  # f32[]
all_reduce_2 = all_reduce(max_3, 'max', 'tp')  # f32[]
wait_tensor_3 = wait_tensor(all_reduce_2)  # f32[]
div_2 = div(getitem, wait_tensor_3)  # f32[16, 8]
mm_1 = mm(div_2, v)  # f32[16, 8]
return (mm_1)
""",
    )


def test_beside_a_chain_one_of_whose_operands_is_made_with_its_size() -> None:
    """The size is read off the shard when the gather goes: it ties the operand to the chain's inputs alone."""
    b = GraphBuilder()
    x, w = b.input("x", [6, 8], dynamic=0), b.input("w", [8, 5])
    full = b.gather(x)
    rows = b.call(aten.sym_size.int, full, 0)
    number = b.call(aten.mul.Tensor, amax(b, w), rows)
    graph = b.returns(b.mm(full, b.call(aten.div.Tensor, w, number)), scaled(b, b.input("y", [4])))
    report = run_pass(graph)
    assert len(report.fused) == 1
    assert sets_of(report) == [("all_reduce", "all_reduce_1")]
    assert_expected_inline(
        show(graph),
        """\
x: f32[s, 8]
w: f32[8, 5]
abs_1 = abs(w)  # f32[8, 5]
max_1 = max(abs_1)  # f32[]
reshape_default = reshape(max_1, [1])  # f32[1]
y: f32[4]
abs_2 = abs(y)  # f32[4]
max_2 = max(abs_2)  # f32[]
reshape_default_1 = reshape(max_2, [1])  # f32[1]
cat_default = cat([reshape_default, reshape_default_1])  # f32[2]
all_reduce_default = all_reduce(cat_default, 'max', 'tp')  # f32[2]
wait_tensor_default = wait_tensor(all_reduce_default)  # f32[2]
split_with_sizes_default = split_with_sizes(wait_tensor_default, [1, 1])  # (f32[1], f32[1])
getitem_1 = getitem(split_with_sizes_default, 0)  # f32[1]
reshape_default_2 = reshape(getitem_1, [])  # f32[]
clone_default = clone(reshape_default_2)  # f32[]
getitem_2 = getitem(split_with_sizes_default, 1)  # f32[1]
reshape_default_3 = reshape(getitem_2, [])  # f32[]
clone_default_1 = clone(reshape_default_3)  # f32[]
sym_size_int = sym_size(x, 0)  # s
mul_1 = mul(sym_size_int, 4)  # 4*s
mul = mul(clone_default, mul_1)  # f32[]
div = div(w, mul)  # f32[8, 5]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[div], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[4*s, 5])
getitem = getitem(all_gather_matmul_default, 0)  # f32[4*s, 5]
div_1 = div(y, clone_default_1)  # f32[4]
return (getitem, div_1)
""",
    )


@pytest.mark.parametrize("kind", ["gathers", "scatters"])
def test_beside_chains_of_one_collective(kind: str) -> None:
    """Two tensors are gathered (scattered) at once, each for a chain of its own: the chains are no one step."""
    b = GraphBuilder()
    x, y, w = b.input("x", [8, 8]), b.input("y", [8, 8]), scaled(b, b.input("w", [8, 8]))
    if kind == "gathers":
        first, second = b.gather_list(x, y)
        narrow = b.scatter(b.relu(b.mm(first, w)))
        outs = (b.mm(second, narrow),)
    else:
        products = [b.mm(x, w), b.mm(y, w)]
        sums = b.call(c10d.reduce_scatter_tensor_coalesced.default, products, "sum", b.ranks, b.group)
        outs = tuple(b.wait_list(sums, 2))
    graph = b.returns(*outs, scaled(b, b.input("z", [4])))
    report = run_pass(graph)
    assert len(report.fused) == 2
    assert sets_of(report) == [("all_reduce", "all_reduce_1")]


def test_a_question_tells_how_many_collectives_come_before() -> None:
    """A bucket in a member's place, and one in front of a fused chain, which lies between the members."""
    b = GraphBuilder()
    in_its_place = b.returns(b.all_reduce(b.input("p", [8])), *(scaled(b, b.input(name, [4])) for name in "xy"))
    b = GraphBuilder()
    x, w, v = b.input("x", [4, 8]), b.input("w", [8, 8]), b.input("v", [8, 8])
    weight, product = scaled(b, w), b.mm(w, v)
    before_a_chain = b.returns(b.mm(b.gather(x), weight), scaled(b, product))
    for graph, members in ((in_its_place, "[1, 2]"), (before_a_chain, "[0, 2]")):
        (question,) = run_pass(graph).questions
        assert question.deviations == (f"bucket: all_reduce(max) of torch.float32 for {members}, after the first 1",)


# --- beside a late gather ----------------------------------------------------------------------------------
def late(b: GraphBuilder, weight: Node, after: Node, whole: Node) -> Node:
    """A matmul of a gathered tensor, whose weight is reduced after the gather."""
    return b.mm(whole, b.call(aten.mul.Tensor, weight, after))


def needed_by_its_weight(b: GraphBuilder) -> tuple[Node, ...]:
    """A member goes into a matmul that the late gather waits for, which comes after the late gather's place."""
    whole, first = b.gather(b.input("x", [4, 8])), amax(b, b.input("v", [8]))
    product = b.mm(b.input("a", [8, 8]), b.input("u", [8, 8]))
    total = all_reduce(b, product, "sum")
    weight = b.mm(b.call(aten.mul.Tensor, b.input("w", [8, 8]), first), b.input("y", [8, 8]))
    return total, late(b, weight, total, whole), amax(b, product)


def needed_by_what_waits_for_it(b: GraphBuilder) -> tuple[Node, ...]:
    """A member goes into a matmul that waits for the late gather, and comes before that one's place."""
    whole, first = b.gather(b.input("x", [4, 8])), amax(b, b.input("v", [8]))
    product = b.mm(b.relu(whole), b.call(aten.mul.Tensor, b.input("u", [8, 8]), first))
    total = all_reduce(b, b.input("w", [8, 8]), "sum")
    out = late(b, b.input("y", [8, 8]), total, whole)
    return product, out, amax(b, out)


@pytest.mark.parametrize("build", [needed_by_its_weight, needed_by_what_waits_for_it])
def test_a_bucket_beside_a_late_gather(build: Callable[[GraphBuilder], tuple[Node, ...]]) -> None:
    b = GraphBuilder(ranks=2)
    graph = b.returns(*build(b))
    rewritten = copied(graph)
    report = run_pass(rewritten)
    assert [len(members) for members in sets_of(report)] == [2]
    assert any(text.startswith("late: ") for one in report.questions for text in one.deviations)
    generator = torch.Generator().manual_seed(0)
    shapes = [node.meta["val"].shape for node in graph.nodes if node.op == "placeholder"]
    values = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)]
    assert differences(*(evaluate(one, values) for one in (graph, rewritten))) == []


# --- what stays apart --------------------------------------------------------------------------------------
def two(b: GraphBuilder, first: Callable[[Node], Node], second: Callable[[Node], Node]) -> Graph:
    return b.returns(first(b.input("x", [4])), second(b.input("y", [4])))


APART: dict[str, Callable[[GraphBuilder], Graph]] = {
    "other group": lambda b: two(b, lambda x: all_reduce(b, x), lambda y: all_reduce(b, y, group="dp")),
    "other op": lambda b: two(b, lambda x: all_reduce(b, x), lambda y: all_reduce(b, y, "min")),
    "sum": lambda b: two(b, lambda x: all_reduce(b, x, "sum"), lambda y: all_reduce(b, y, "sum")),
    "other dtype": lambda b: two(
        b, lambda x: all_reduce(b, x), lambda y: all_reduce(b, b.call(aten._to_copy.default, y, dtype=torch.float64))
    ),
    "one needs the other": lambda b: two(b, lambda x: all_reduce(b, b.relu(all_reduce(b, x))), b.relu),
    "one needs the other's matmul": lambda b: matmul_between(b),
    "large": lambda b: b.returns(*(all_reduce(b, b.input(name, [SMALL_BYTES // 4 + 1])) for name in ("x", "y"))),
    "symbolic": lambda b: b.returns(*(all_reduce(b, b.input(name, [6], dynamic=0)) for name in ("x", "y"))),
    "in place": lambda b: in_place_between(b),
    "not waited for": lambda b: two(
        b, lambda x: all_reduce(b, x), lambda y: b.call(c10d.all_reduce.default, y, "max", "tp")
    ),
    "also used before it is waited for": lambda b: used_early(b),
    "scatters": lambda b: two(b, lambda x: b.scatter(x, "max"), lambda y: b.scatter(y, "max")),
    "used by nothing": lambda b: unused(b),
    "on another stream": lambda b: two(b, lambda x: all_reduce(b, x), lambda y: on_streams(all_reduce(b, y), 1, 1)),
    "waited for on another stream": lambda b: two(
        b, lambda x: on_streams(all_reduce(b, x), 1, 2), lambda y: on_streams(all_reduce(b, y), 1, 2)
    ),
    "between random numbers": lambda b: random_in_order(b),
}


def on_streams(waited: Node, start: int, wait: int) -> Node:
    """A reduction that the program starts on one of its streams and waits for on another, as torch notes that."""
    for node, number in ((waited, wait), (waited.all_input_nodes[0], start)):
        node.meta["custom"] = {"stream": number}
    return waited


def matmul_between(b: GraphBuilder) -> Graph:
    x, w = b.input("x", [4, 8]), b.input("w", [8, 8])
    return b.returns(scaled(b, b.mm(scaled(b, x), w)))


def used_early(b: GraphBuilder) -> Graph:
    first, second = (b.call(c10d.all_reduce.default, b.input(name, [4]), "max", "tp") for name in "xy")
    waited = [b.call(c10d.wait_tensor.default, reduced) for reduced in (first, second)]
    return b.returns(b.relu(first), *waited)


def unused(b: GraphBuilder) -> Graph:
    values = [b.input(name, [4]) for name in "xy"]
    for value in values:
        b.call(c10d.all_reduce.default, value, "max", "tp")
    return b.returns(*values)


def random_in_order(b: GraphBuilder) -> Graph:
    """The first is needed for a draw, and the second needs the one after that."""

    def drawn(x: Node) -> Node:
        return b.call(operator.getitem, b.call(aten.native_dropout.default, x, 0.5, True), 0)

    first = drawn(all_reduce(b, b.input("x", [4])))
    return b.returns(first, all_reduce(b, drawn(b.input("y", [4]))))


def in_place_between(b: GraphBuilder) -> Graph:
    """Both read x; between them x changes."""
    x = b.input("x", [4])
    first = all_reduce(b, x)
    b.call(aten.mul_.Tensor, x, 2)
    return b.returns(first, all_reduce(b, x))


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    graph = APART[name](GraphBuilder())
    before = show(graph)
    assert sets_of(run_pass(graph)) == []
    assert show(graph) == before


def test_the_switch() -> None:
    b = GraphBuilder()
    graph = two(b, lambda x: all_reduce(b, x), lambda y: all_reduce(b, y))
    before = show(graph)
    assert sets_of(run_pass(graph, skip="bucket")) == []
    assert show(graph) == before
    assert len(run_pass(graph).buckets) == 1


def test_groups_that_are_not_enrolled_are_left_alone() -> None:
    b = GraphBuilder()
    graph = b.returns(*(all_reduce(b, b.input(f"x{i}", [4]), group=group) for i, group in enumerate("aabb")))
    assert sets_of(run_pass(graph, groups="b")) == [("all_reduce_2", "all_reduce_3")]


def test_a_bucket_is_as_small_as_one_of_them_may_be() -> None:
    """One that does not fit begins another set, and a later one that does still joins the first."""
    half, elements = SMALL_BYTES // 8, SMALL_BYTES // 4
    for sizes, wanted in {
        (half, half, half, half, half): [[0, 1], [2, 3]],
        (half, half + 1, half): [[0, 2]],
        (elements, 1, 1): [[1, 2]],
        (elements - 2, 1, 1, 1, 1): [[0, 1, 2], [3, 4]],
    }.items():
        b = GraphBuilder()
        graph = b.returns(*(all_reduce(b, b.input(f"x{number}", [size])) for number, size in enumerate(sizes)))
        names = [node.name for node in reduces(graph)]
        report = run_pass(graph)
        assert [[names.index(member) for member in members] for members in sets_of(report)] == wanted
        assert all(entry.bytes <= SMALL_BYTES for entry in report.buckets)


def test_dependent_ones_take_the_next() -> None:
    """Two levels of two: those of a level go together."""
    b = GraphBuilder()
    x, y, w = b.input("x", [8, 8]), b.input("y", [8, 8]), b.input("w", [8, 8])
    first = [b.mm(scaled(b, x), w), b.mm(scaled(b, y), w)]
    graph = b.returns(*(scaled(b, value) for value in first))
    assert sets_of(run_pass(graph)) == [("all_reduce", "all_reduce_1"), ("all_reduce_2", "all_reduce_3")]


def test_many_at_once_keep_the_order_of_matmuls() -> None:
    b = GraphBuilder()
    x = b.input("x", [8, 8])
    for index in range(6):
        x = b.mm(scaled(b, x), scaled(b, b.input(f"w{index}", [8, 8])))
    graph = b.returns(x)
    before = slow_ops(graph)
    report = run_pass(graph)
    assert [len(members) for members in sets_of(report)] == [7]
    assert len(reduces(graph)) == 6
    assert slow_ops(graph) == before


def slow_ops(graph: Graph) -> list[str]:
    """Matmuls, gathers and scatters, in order."""
    words = ("mm", "all_gather", "reduce_scatter")
    return [node.name for node in graph.nodes if any(word in op_name(node.target) for word in words)]


# --- real programs -----------------------------------------------------------------------------------------
LEFT = """
# graph                          all-reduces  left
torchao_rowwise_block__0         9            2
torchao_rowwise_block__1         8            2
torchao_rowwise_block_full_ac__0 9            2
torchao_rowwise_block_full_ac__1 12           3
torchao_rowwise_swiglu__0        4            1
torchao_rowwise_swiglu__1        4            1
torchao_tensorwise_block__0      11           4
torchao_tensorwise_block__1      7            4
torchao_tensorwise_swiglu__0     5            2
torchao_tensorwise_swiglu__1     3            2
"""


@pytest.mark.parametrize("row", [line for line in LEFT.splitlines() if line and not line.startswith("#")])
def test_corpus(row: str) -> None:
    """test_corpus evaluates these graphs too; here is how many all-reduces are left."""
    name, had, left = row.split()
    graph = load(CORPUS / "torch2.13" / f"{name}.txt").graph
    assert len(reduces(graph)) == int(had)
    report = run_pass(graph)
    assert len(reduces(graph)) == int(left)
    dropped = sum(remark.code == "ATP014" for remark in report.remarks)
    assert sum(len(members) - 1 for members in sets_of(report)) == int(had) - int(left) - dropped
    named = {remark.collective for remark in report.remarks}
    assert all(member in named for members in sets_of(report) for member in members)


# --- random programs ---------------------------------------------------------------------------------------
GROUPS = {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3)), "tp": ((0, 1, 2, 3),)}
SIDE = 4


@dataclass
class Random:
    """Draws one random program of matrices [4, 4] and numbers, on four ranks in three groups."""

    draw: Callable[[Sequence[Any]], Any]

    def program(self) -> Graph:
        b = GraphBuilder()
        matrices = [b.input(f"x{index}", [SIDE, SIDE]) for index in range(3)]
        numbers: list[Node] = []
        for _ in range(self.draw(range(4, 24))):
            self._step(b, matrices, numbers)
        return b.returns(*matrices[3:], *numbers, matrices[0])

    def _step(self, b: GraphBuilder, matrices: list[Node], numbers: list[Node]) -> None:
        x = self.draw(matrices)
        kind = self.draw(["amax"] * 5 + ["rows", "divide", "divide", "add", "mm", "chain", "again", "sum", "in_place"])
        group, op = self.draw([*GROUPS, "tp"]), self.draw(["max", "max", "min"])
        if kind == "amax":
            numbers.append(amax(b, x, op, group))
        elif kind == "rows":
            rows = b.call(aten.amax.default, x, [1], True)
            matrices.append(b.add(x, all_reduce(b, rows, op, group)))
        elif kind == "divide" and numbers:
            matrices.append(b.add(x, self.draw(numbers)))
        elif kind == "add":
            matrices.append(b.add(x, self.draw(matrices)))
        elif kind == "mm":
            matrices.append(b.mm(x, self.draw(matrices)))
        elif kind == "chain":
            out = b.mm(b.gather(x), self.draw(matrices))
            matrices.append(b.scatter(b.relu(out)) if self.draw([True, False]) else b.scatter(out))
        elif kind == "again" and numbers:
            numbers.append(all_reduce(b, b.relu(self.draw(numbers)), op, group))
        elif kind == "sum":
            numbers.append(amax(b, x, "sum", group))
        elif kind == "in_place":
            b.call(aten.mul_.Tensor, matrices[0], 2)


@given(choices=st.randoms(use_true_random=False), seed=st.integers(0, 2**16))
@settings(
    max_examples=10_000 if THOROUGH else 80,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_random_programs_give_the_same_bits(choices: Any, seed: int) -> None:
    graph = Random(choices.choice).program()
    note(show(graph))
    plain, buckets = copied(graph), copied(graph)
    run_pass(plain, skip="bucket")
    order = slow_ops(plain)
    report = run_pass(buckets)
    note(show(buckets))
    note(str(report))
    assert len(reduces(buckets)) == len(reduces(plain)) - sum(len(members) - 1 for members in sets_of(report))
    assert slow_ops(buckets) == order
    for members in sets_of(report):
        by_name = {node.name: node for node in graph.nodes}
        assert len({by_name[name].args[1:] for name in members}) == 1, "groups or reductions are mixed"
    expected, actual = (evaluate(one, inputs(seed), GROUPS) for one in (plain, buckets))
    for left, right in zip(expected, actual, strict=True):
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True))


def inputs(seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(SIDE, SIDE, generator=generator) for _ in range(3)] for _ in range(4)]
