"""Reductions of which only the sum is used become one: when, when not, and that the graph computes the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, snapshot
from passes import before_and_after, copied, run_pass
from programs import Builder
from serving_ops import registered
from sum_graphs import added, check_same, custom_all_reduce, reduced, reductions_left, scattered, summed_up
from torch.fx import Node

from asynctp_passes import Config, StrictError, run
from asynctp_passes.planning.plan import planned, questions_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


convert = torch.ops.prims.convert_element_type.default
Sums = Callable[[Builder], list[Node]]
SHAPE = (2, 4, 6)


# --- what the graph becomes ------------------------------------------------------------------------------------
def test_gradients_of_three_layers_with_one_input() -> None:
    """Queries, keys and values: each layer all-reduces its own gradient of the input."""
    b = GraphBuilder(ranks=2)
    reduced = []
    for name in "vkq":
        a, w = b.input(name, [2, 4, 6]), b.input(f"{name}_w", [6, 8])
        reduced.append(b.all_reduce(b.reshape(b.mm(b.reshape(a, [8, 6]), w), [2, 4, 8])))
    text, report = before_and_after(b.returns(b.add(b.add(reduced[0], reduced[1]), reduced[2])), strict="all", expect=3)
    assert_expected_inline(
        text,
        """\
v: f32[2, 4, 6]
v_w: f32[6, 8]
reshape = reshape(v, [8, 6])  # f32[8, 6]
mm = mm(reshape, v_w)  # f32[8, 8]
reshape_1 = reshape(mm, [2, 4, 8])  # f32[2, 4, 8]
all_reduce = all_reduce(reshape_1, 'sum', 'tp')  # f32[2, 4, 8]
wait_tensor = wait_tensor(all_reduce)  # f32[2, 4, 8]
k: f32[2, 4, 6]
k_w: f32[6, 8]
reshape_2 = reshape(k, [8, 6])  # f32[8, 6]
mm_1 = mm(reshape_2, k_w)  # f32[8, 8]
reshape_3 = reshape(mm_1, [2, 4, 8])  # f32[2, 4, 8]
all_reduce_1 = all_reduce(reshape_3, 'sum', 'tp')  # f32[2, 4, 8]
wait_tensor_1 = wait_tensor(all_reduce_1)  # f32[2, 4, 8]
q: f32[2, 4, 6]
q_w: f32[6, 8]
reshape_4 = reshape(q, [8, 6])  # f32[8, 6]
mm_2 = mm(reshape_4, q_w)  # f32[8, 8]
reshape_5 = reshape(mm_2, [2, 4, 8])  # f32[2, 4, 8]
all_reduce_2 = all_reduce(reshape_5, 'sum', 'tp')  # f32[2, 4, 8]
wait_tensor_2 = wait_tensor(all_reduce_2)  # f32[2, 4, 8]
add = add(wait_tensor, wait_tensor_1)  # f32[2, 4, 8]
add_1 = add(add, wait_tensor_2)  # f32[2, 4, 8]
return (add_1)

=== becomes ===

v: f32[2, 4, 6]
v_w: f32[6, 8]
reshape = reshape(v, [8, 6])  # f32[8, 6]
k: f32[2, 4, 6]
k_w: f32[6, 8]
reshape_2 = reshape(k, [8, 6])  # f32[8, 6]
q: f32[2, 4, 6]
q_w: f32[6, 8]
reshape_4 = reshape(q, [8, 6])  # f32[8, 6]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[reshape_4, reshape, reshape_2], b_parts=[q_w, v_w,
    k_w], biases=[None, None, None], reduce_op='sum', group_name='tp')  # f32[8, 8]
reshape_5 = reshape(matmul_all_reduce_default, [2, 4, 8])  # f32[2, 4, 8]
return (reshape_5)
""",
    )
    notes = [remark.message.split("; ")[0] for remark in report.remarks]
    assert notes == [
        "only a sum is used, which is reduced once, by all_reduce_2",
        "only a sum is used, which is reduced once, by all_reduce_2",
        "one all_reduce of the sum, for all_reduce, all_reduce_1 too",
    ]
    assert {remark.op for remark in report.remarks} == {"asynctp::matmul_all_reduce"}


def test_scatters_along_a_middle_dimension_seen_as_rows() -> None:
    b = GraphBuilder(ranks=2)
    scattered = []
    for name in "xy":
        a, w = b.input(name, [8, 6]), b.input(f"{name}_w", [6, 8])
        blocks = b.cat(b.chunks(b.reshape(b.mm(a, w), [2, 4, 8]), dim=1))
        scattered.append(b.reshape(b.scatter(blocks), [4, 8]))
    text, _ = before_and_after(b.returns(b.call(aten.sub.Tensor, *scattered)), strict="all", expect=2)
    assert_expected_inline(
        text,
        """\
x: f32[8, 6]
x_w: f32[6, 8]
mm = mm(x, x_w)  # f32[8, 8]
reshape = reshape(mm, [2, 4, 8])  # f32[2, 4, 8]
split = split(reshape, 2, 1)  # (f32[2, 2, 8]s[32, 8, 1], f32[2, 2, 8]s[32, 8, 1])
getitem = getitem(split, 0)  # f32[2, 2, 8]s[32, 8, 1]
getitem_1 = getitem(split, 1)  # f32[2, 2, 8]s[32, 8, 1]
cat = cat([getitem, getitem_1], 0)  # f32[4, 2, 8]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # f32[2, 2, 8]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[2, 2, 8]
reshape_1 = reshape(wait_tensor, [4, 8])  # f32[4, 8]
y: f32[8, 6]
y_w: f32[6, 8]
mm_1 = mm(y, y_w)  # f32[8, 8]
reshape_2 = reshape(mm_1, [2, 4, 8])  # f32[2, 4, 8]
split_1 = split(reshape_2, 2, 1)  # (f32[2, 2, 8]s[32, 8, 1], f32[2, 2, 8]s[32, 8, 1])
getitem_2 = getitem(split_1, 0)  # f32[2, 2, 8]s[32, 8, 1]
getitem_3 = getitem(split_1, 1)  # f32[2, 2, 8]s[32, 8, 1]
cat_1 = cat([getitem_2, getitem_3], 0)  # f32[4, 2, 8]
reduce_scatter_tensor_1 = reduce_scatter_tensor(cat_1, 'sum', 2, 'tp')  # f32[2, 2, 8]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor_1)  # f32[2, 2, 8]
reshape_3 = reshape(wait_tensor_1, [4, 8])  # f32[4, 8]
sub = sub(reshape_1, reshape_3)  # f32[4, 8]
return (sub)

=== becomes ===

x: f32[8, 6]
x_w: f32[6, 8]
y: f32[8, 6]
y_w: f32[6, 8]
reshape_default = reshape(y, [2, 4, 6])  # f32[2, 4, 6]
reshape_default_1 = reshape(x, [2, 4, 6])  # f32[2, 4, 6]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default, reshape_default_1],
    b_parts=[y_w, x_w], biases=[None, None], reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp',
    factors=[-1.0, 1.0])  # f32[2, 2, 8]
reshape_1 = reshape(matmul_reduce_scatter_default, [4, 8])  # f32[4, 8]
return (reshape_1)
""",
    )


def test_a_strict_failure_leaves_the_sum_as_it_was() -> None:
    b = GraphBuilder()
    sum_ = b.add(*(b.all_reduce(b.mm(b.input(f"{name}", [8, 6]), b.input(f"{name}_w", [6, 4]))) for name in "xy"))
    missed = b.mm(b.relu(b.mul(b.gather(b.input("z", [2, 6])), b.input("number", []))), b.input("z_w", [6, 4]))
    graph = b.returns(sum_, missed)
    before = snapshot(graph)
    with pytest.raises(StrictError):
        run(graph, Config(strict="all"))
    assert snapshot(graph) == before


def test_a_product_that_a_gather_takes_is_added_to_the_others() -> None:
    """It is the only one that its gather can overlap with."""
    b = GraphBuilder(ranks=2)
    w = [b.input(f"w{index}", [6, 4]) for index in range(3)]
    taken, *free = b.gather(b.input("x", [4, 6])), b.input("y", [8, 6]), b.input("z", [8, 6])
    reduced = [b.all_reduce(b.mm(a, one)) for a, one in zip((*free, taken), w, strict=True)]
    text, report = before_and_after(b.returns(b.add(b.add(reduced[0], reduced[1]), reduced[2])), strict="all", expect=4)
    assert_expected_inline(
        text.split("=== becomes ===")[1],
        """\


w0: f32[6, 4]
w1: f32[6, 4]
w2: f32[6, 4]
x: f32[4, 6]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w2], biases=[None], gather_dim=0,
    return_a_full=False, group_size=2, group_name='tp')  # (f32[8, 4])
getitem = getitem(all_gather_matmul_default, 0)  # f32[8, 4]
y: f32[8, 6]
z: f32[8, 6]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[z, y], b_parts=[w1, w0], biases=[None, None],
    reduce_op='sum', group_name='tp', added=getitem)  # f32[8, 4]
return (matmul_all_reduce_default)
""",
    )
    assert "added to the products: f32[8, 4] of aten.mm.default; " in report.remarks[2].message


def test_routed_tokens_and_a_residual_between_reductions() -> None:
    """Both are reduced apart, and a residual is added to the first: one reduction, and one addition behind it."""
    b = GraphBuilder(ranks=2)
    tokens, w, residual = b.input("tokens", [4, 2, 6]), b.input("w", [6, 8]), b.input("residual", [4, 1, 8])
    routed = b.scatter(b.cat(b.chunks(b.relu(b.input("routed", [4, 2, 8])), dim=1)))
    shared = b.reshape(b.mm(b.reshape(tokens, [8, 6]), w), [4, 2, 8])
    shared = b.scatter(b.cat(b.chunks(shared, dim=1)))
    text, report = before_and_after(b.returns(b.add(b.add(residual, routed), shared)), strict="all", expect=2)
    assert_expected_inline(
        text.split("=== becomes ===")[1],
        """\


tokens: f32[4, 2, 6]
w: f32[6, 8]
residual: f32[4, 1, 8]
routed: f32[4, 2, 8]
relu = relu(routed)  # f32[4, 2, 8]
reshape = reshape(tokens, [8, 6])  # f32[8, 6]
reshape_default = reshape(reshape, [4, 2, 6])  # f32[4, 2, 6]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp', added=relu)  # f32[4, 1, 8]
add_tensor = add(matmul_reduce_scatter_default, residual)  # f32[4, 1, 8]
return (add_tensor)
""",
    )
    assert [remark.message for remark in report.remarks] == [
        "only a sum is used, which is reduced once, by reduce_scatter_tensor_1",
        "one reduce_scatter of the sum, for reduce_scatter_tensor too; computed before, and added to the products: "
        "f32[4, 2, 8] of aten.relu.default; added to the result: f32[4, 1, 8] of residual",
    ]


def test_experts_that_are_reduced_one_by_one_and_then_summed() -> None:
    """As Llama 4 in transformers: a shared expert, and 3 others. They are summed first, and reduced with it."""
    b = GraphBuilder(ranks=2)
    shared = b.all_reduce(b.mm(b.input("tokens", [4, 6]), b.input("w", [6, 8])))
    experts = b.call(aten.bmm.default, b.input("hidden", [3, 4, 5]), b.input("down", [3, 5, 8]))
    routed = b.all_reduce(b.reshape(experts, [12, 8]))
    total = b.add(shared, b.call(aten.sum.dim_IntList, b.reshape(routed, [3, 4, 8]), [0]))
    graph = b.returns(total)
    assert_expected_inline(
        before_and_after(graph, strict="all", expect=2)[0],
        """\
tokens: f32[4, 6]
w: f32[6, 8]
mm = mm(tokens, w)  # f32[4, 8]
all_reduce = all_reduce(mm, 'sum', 'tp')  # f32[4, 8]
wait_tensor = wait_tensor(all_reduce)  # f32[4, 8]
hidden: f32[3, 4, 5]
down: f32[3, 5, 8]
bmm = bmm(hidden, down)  # f32[3, 4, 8]
reshape = reshape(bmm, [12, 8])  # f32[12, 8]
all_reduce_1 = all_reduce(reshape, 'sum', 'tp')  # f32[12, 8]
wait_tensor_1 = wait_tensor(all_reduce_1)  # f32[12, 8]
reshape_1 = reshape(wait_tensor_1, [3, 4, 8])  # f32[3, 4, 8]
sum_1 = sum(reshape_1, [0])  # f32[4, 8]
add = add(wait_tensor, sum_1)  # f32[4, 8]
return (add)

=== becomes ===

tokens: f32[4, 6]
w: f32[6, 8]
hidden: f32[3, 4, 5]
down: f32[3, 5, 8]
bmm = bmm(hidden, down)  # f32[3, 4, 8]
reshape = reshape(bmm, [12, 8])  # f32[12, 8]
reshape_default = reshape(reshape, [1, 3, 32])  # f32[1, 3, 32]
sum_dim_int_list = sum(reshape_default, [1])  # f32[1, 32]
reshape_default_1 = reshape(sum_dim_int_list, [4, 8])  # f32[4, 8]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[tokens], b_parts=[w], biases=[None], reduce_op='sum',
    group_name='tp', added=reshape_default_1)  # f32[4, 8]
return (matmul_all_reduce_default)
""",
    )


def test_ranks_are_asked_about_a_sum_that_is_done_before_its_reduction() -> None:
    """Its text says over how many, and how far apart they lie, and no number of rows, which may be symbolic."""
    told = []
    for shape, dim in (([3, 4, 6], 0), ([2, 3, 12], 1)):
        b = Builder(operator.itemgetter(0), 2)
        whole = b.placeholder((12, 6), torch.float64)
        early = experts_sum(b, reduced(b, whole), shape, dim, [4, 6])
        product = b.call(aten.mm.default, b.placeholder((4, 5), torch.float64), b.placeholder((5, 6), torch.float64))
        b.graph.output((added(b, early, reduced(b, product)),))
        (question,) = questions_of(planned(b.graph, Config(groups="auto")))
        told.append(question.deviations)
    assert told == [
        ("sum: all_reduce(sum) in place of 1 * sum over 3 of 0 + 1 * 1",),
        ("sum: all_reduce(sum) in place of 1 * sum over 3 that are 12 apart of 0 + 1 * 1",),
    ]


# --- which sums ------------------------------------------------------------------------------------------------
def term(b: Builder, dtype: torch.dtype = torch.float64, width: int = 5) -> Node:
    """A product of one input and another, [2, 4, 6]."""
    a, w = b.placeholder((8, width), dtype), b.placeholder((width, 6), dtype)
    return b.call(aten.reshape.default, b.call(aten.mm.default, a, w), list(SHAPE))


SUMS: dict[str, tuple[Sums, list[int], int]] = {}


def sums(*products: int, left: int = 0) -> Callable[[Sums], Sums]:
    """Add a graph to the table: the fused ops that it becomes, by the products that each sums up, and other sums."""

    def add(build: Sums) -> Sums:
        SUMS[build.__name__] = build, list(products), left
        return build

    return add


@sums(4)
def of_sums_in_a_tree(b: Builder) -> list[Node]:
    one, two, three, four = (reduced(b, term(b)) for _ in range(4))
    return [added(b, added(b, four, two), added(b, one, three))]


@sums(3)
def of_a_sum_and_a_product(b: Builder) -> list[Node]:
    return [added(b, reduced(b, added(b, term(b), term(b))), reduced(b, term(b)))]


@sums(3)
def with_signs_and_powers_of_two(b: Builder) -> list[Node]:
    one, two, three = (reduced(b, term(b)) for _ in range(3))
    negated = b.call(aten.neg.default, b.call(aten.sub.Tensor, one, two))
    return [added(b, negated, b.call(aten.mul.Tensor, three, 0.5))]


@sums(1, 1)
def with_a_number_above_one(b: Builder) -> list[Node]:
    """What the ranks send may be too large then, where what they add up to is not."""
    return [added(b, b.call(aten.mul.Tensor, reduced(b, term(b)), 2), reduced(b, term(b)))]


@sums(3)
def of_a_sum_that_is_halved(b: Builder) -> list[Node]:
    halved = b.call(aten.div.Tensor, added(b, term(b), term(b)), 2)
    return [b.call(aten.sub.Tensor, reduced(b, term(b)), reduced(b, halved))]


@sums(2, 1)
def of_a_sum_that_is_doubled(b: Builder) -> list[Node]:
    doubled = b.call(aten.mul.Tensor, added(b, term(b), term(b)), 2)
    return [added(b, reduced(b, doubled), reduced(b, term(b)))]


@sums(2)
def of_products_that_are_multiplied(b: Builder) -> list[Node]:
    one, two = (b.call(aten.mul.Tensor, term(b), number) for number in (4, -0.25))
    return [b.call(aten.sub.Tensor, reduced(b, one), reduced(b, two))]


@sums(1, 1)
def of_a_doubled_product_whose_sum_is_halved(b: Builder) -> list[Node]:
    doubled = reduced(b, b.call(aten.mul.Tensor, term(b), 2))
    return [added(b, b.call(aten.mul.Tensor, doubled, 0.5), reduced(b, term(b)))]


@sums(2)
def of_averages(b: Builder) -> list[Node]:
    return [added(b, reduced(b, term(b), "avg"), reduced(b, term(b), "avg"))]


@sums(2)
def in_views(b: Builder) -> list[Node]:
    views = [b.call(aten.permute.default, reduced(b, term(b)), [1, 0, 2]) for _ in range(2)]
    return [added(b, *views)]


@sums(2)
def used_several_times(b: Builder) -> list[Node]:
    total = added(b, reduced(b, term(b)), reduced(b, term(b)))
    return [total, b.call(aten.relu.default, total), b.call(aten.permute.default, total, [2, 0, 1])]


@sums(2)
def waited_for_late(b: Builder) -> list[Node]:
    started = [b.call(c10d.all_reduce.default, term(b), "sum", "tp") for _ in range(2)]
    return [added(b, *(b.call(c10d.wait_tensor.default, one) for one in started))]


@sums(2)
def of_biased_products(b: Builder) -> list[Node]:
    terms = [
        b.call(aten.addmm.default, *(b.placeholder(shape, torch.float64) for shape in ((6,), (8, 5), (5, 6))))
        for _ in range(2)
    ]
    return [b.call(aten.sub.Tensor, *(reduced(b, one) for one in terms))]


@sums(2)
def of_products_converted_before(b: Builder) -> list[Node]:
    wide = [b.call(convert, term(b, torch.bfloat16), torch.float32) for _ in range(2)]
    return [added(b, *(reduced(b, one) for one in wide))]


@sums(2)
def of_scatters(b: Builder) -> list[Node]:
    return [added(b, scattered(b, term(b)), scattered(b, term(b, width=3)))]


@sums(2)
def with_other_collectives_in_between(b: Builder) -> list[Node]:
    """Small maxima, which become one, as fp8 recipes have them."""
    first, x = reduced(b, term(b)), b.placeholder((4,), torch.float64)
    largest = [reduced(b, b.call(aten.amax.default, x), "max") for _ in range(2)]
    return [added(b, first, reduced(b, term(b))), *largest]


@sums(2)
def of_registered_collectives(b: Builder) -> list[Node]:
    return [added(b, *(b.call(custom_all_reduce, term(b), "tp:0") for _ in range(2)))]


def tensor(b: Builder, dtype: torch.dtype = torch.float64) -> Node:
    return b.placeholder(SHAPE, dtype)


@sums(1)
def one_of_which_no_matmul_made(b: Builder) -> list[Node]:
    return [added(b, reduced(b, term(b)), reduced(b, tensor(b)))]


@sums(2)
def some_of_which_no_matmul_made(b: Builder) -> list[Node]:
    """They come before, in between and behind, with signs and powers of two."""
    first, *others = (reduced(b, tensor(b)) for _ in range(3))
    half = b.call(aten.mul.Tensor, others[0], 0.5)
    total = added(b, first, reduced(b, term(b)), half, reduced(b, term(b)))
    return [b.call(aten.sub.Tensor, total, others[1])]


@sums(1)
def one_of_which_is_computed_behind_the_product(b: Builder) -> list[Node]:
    """Where the program reduces the product, what is added to it does not exist yet."""
    product = reduced(b, term(b))
    return [added(b, product, reduced(b, b.call(aten.relu.default, tensor(b))))]


@sums(1)
def one_of_which_is_of_a_product_that_is_used_elsewhere(b: Builder) -> list[Node]:
    product = term(b)
    return [added(b, reduced(b, product), reduced(b, term(b))), b.call(aten.relu.default, product)]


@sums(2)
def whose_tensors_have_other_dimensions(b: Builder) -> list[Node]:
    """Rows of tokens, as routed ones, and sequences of them; the elements are the same."""
    rows = reduced(b, b.call(aten.relu.default, b.placeholder((8, 6), torch.float64)))
    product = reduced(b, b.call(aten.reshape.default, term(b), [8, 6]))
    seen = [b.call(aten.reshape.default, one, list(SHAPE)) for one in (rows, product)]
    return [added(b, *seen, reduced(b, term(b)))]


@sums(2)
def of_scatters_of_other_dimensions(b: Builder) -> list[Node]:
    whole = b.call(aten.reshape.default, term(b), [8, 6])
    return [added(b, b.call(aten.reshape.default, scattered(b, whole), [1, 4, 6]), scattered(b, term(b)))]


@sums(1)
def scattered_by_columns_and_no_product(b: Builder) -> list[Node]:
    """Both are cut along a middle dimension, which is undone for what is added."""
    whole = [term(b), tensor(b)]
    cut = [b.call(aten.cat.default, list(b.items(b.call(aten.split.Tensor, one, 2, 1)))) for one in whole]
    return [added(b, *(scattered(b, one) for one in cut))]


@sums(1)
def of_autocast_and_no_product(b: Builder) -> list[Node]:
    wide = b.call(convert, term(b, torch.bfloat16), torch.float32)
    return [added(b, reduced(b, wide), reduced(b, tensor(b, torch.float32)))]


@sums(2)
def of_a_product_that_another_tensor_is_added_to(b: Builder) -> list[Node]:
    residual = b.placeholder(SHAPE, torch.float64)
    return [added(b, reduced(b, added(b, term(b), residual)), reduced(b, term(b)))]


@sums(2)
def of_products_that_one_tensor_is_added_to(b: Builder) -> list[Node]:
    residual = b.placeholder(SHAPE, torch.float64)
    return [added(b, *(reduced(b, added(b, term(b), residual)) for _ in range(2)))]


@sums(2)
def of_another_tensor_too(b: Builder) -> list[Node]:
    """As a residual that comes in between: it is added to what is reduced."""
    return [added(b, reduced(b, term(b)), tensor(b), reduced(b, term(b)))]


@sums(3)
def of_other_tensors_with_signs_and_powers_of_two(b: Builder) -> list[Node]:
    one, two, three = (reduced(b, term(b)) for _ in range(3))
    inner = b.call(aten.neg.default, b.call(aten.sub.Tensor, tensor(b), one))
    inner = b.call(aten.mul.Tensor, added(b, inner, two), 0.5)
    return [added(b, b.call(aten.sub.Tensor, inner, tensor(b)), three)]


@sums(2)
def of_another_tensor_that_is_seen_otherwise_behind(b: Builder) -> list[Node]:
    """It is added in the results' own order, and turned with them."""
    turned = b.call(aten.permute.default, added(b, tensor(b), reduced(b, term(b))), [1, 0, 2])
    return [added(b, turned, b.call(aten.permute.default, reduced(b, term(b)), [1, 0, 2]))]


@sums(2)
def of_another_tensor_in_the_shape_of_a_view(b: Builder) -> list[Node]:
    rows = [b.call(aten.reshape.default, reduced(b, term(b)), [8, 6]) for _ in range(2)]
    return [added(b, b.placeholder((8, 6), torch.float64), *rows)]


@sums(2)
def of_another_tensor_laid_out_by_columns(b: Builder) -> list[Node]:
    residual = b.placeholder(SHAPE, torch.float64, strides=(4, 1, 8))
    return [added(b, added(b, reduced(b, term(b)), residual), reduced(b, term(b)))]


@sums(1, 2)
def of_one_that_is_used_elsewhere_and_others(b: Builder) -> list[Node]:
    """It stays, and is a tensor as any other to the others' sum."""
    one, two, three = (reduced(b, term(b)) for _ in range(3))
    return [added(b, one, two, three), b.call(aten.relu.default, one)]


@sums(2, 2)
def of_layers_with_one_residual(b: Builder) -> list[Node]:
    """Attention and MLP read the same, and are added to it one after the other."""
    stream, seen = tensor(b), []
    for _ in range(2):
        stream = added(b, stream, reduced(b, term(b)), reduced(b, term(b)))
        seen.append(b.call(aten.relu.default, stream))
    return [stream, *seen]


@sums(2)
def with_another_tensor_behind(b: Builder) -> list[Node]:
    """It stays where it was."""
    return [added(b, reduced(b, term(b)), reduced(b, term(b)), tensor(b))]


@sums(2, 1)
def some_of_which_are_used_elsewhere(b: Builder) -> list[Node]:
    """The sum of the first two has another user, and is one; the third stays."""
    inner = added(b, reduced(b, term(b)), reduced(b, term(b)))
    return [added(b, inner, reduced(b, term(b))), inner]


def experts_sum(b: Builder, whole: Node, seen: list[int], dim: int, shape: list[int], op: Any = None) -> Node:
    """The sum over a dimension of a view of what is reduced, in another shape."""
    total = b.call(op or aten.sum.dim_IntList, b.call(aten.reshape.default, whole, seen), [dim])
    return b.call(aten.reshape.default, total, shape)


def of_experts(b: Builder, dtype: torch.dtype = torch.float64) -> Node:
    """Three tensors of the sum's shape, one after the other."""
    return b.placeholder((24, 6), dtype)


@sums(1)
def of_what_is_summed_over_experts(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b)), [3, 8, 6], 0, list(SHAPE))
    return [added(b, reduced(b, term(b)), early)]


@sums(1)
def of_what_is_summed_over_experts_inside(b: Builder) -> list[Node]:
    """The experts are neither the first dimension nor the last one, and come before the product."""
    early = experts_sum(b, reduced(b, of_experts(b)), [2, 3, 4, 6], -3, list(SHAPE))
    return [added(b, early, reduced(b, term(b)))]


@sums(2)
def of_what_is_summed_over_experts_with_signs(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b)), [3, 8, 6], 0, list(SHAPE))
    half = b.call(aten.mul.Tensor, early, -0.5)
    return [b.call(aten.sub.Tensor, added(b, reduced(b, term(b)), half), reduced(b, term(b)))]


@sums(1)
def of_what_is_summed_over_experts_twice(b: Builder) -> list[Node]:
    """Two layers of experts."""
    early = [experts_sum(b, reduced(b, of_experts(b)), [3, 8, 6], 0, list(SHAPE)) for _ in range(2)]
    return [added(b, reduced(b, term(b)), *early)]


@sums(1)
def of_averages_that_are_summed_over_experts(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b), "avg"), [3, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b), "avg"))]


@sums(1)
def of_what_is_summed_over_experts_in_bfloat16(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b, torch.bfloat16)), [3, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b, torch.bfloat16)))]


# --- and which not: all are fused as they are --------------------------------------------------------------------
@sums(1, left=1)
def summed_over_experts_in_float16(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b, torch.float16)), [3, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b, torch.float16)))]


@sums(1, left=1)
def summed_over_experts_and_used_elsewhere(b: Builder) -> list[Node]:
    whole = reduced(b, of_experts(b))
    early = experts_sum(b, whole, [3, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b))), b.call(aten.relu.default, whole)]


@sums(1, left=1)
def summed_over_experts_twice(b: Builder) -> list[Node]:
    """One part of each pair is summed, and the other one."""
    whole = reduced(b, of_experts(b))
    both = [experts_sum(b, whole, [3, 8, 6], 0, list(SHAPE)) for _ in range(2)]
    return [added(b, both[0], reduced(b, term(b))), both[1]]


@sums(1, left=1)
def summed_over_experts_whose_sum_is_used_elsewhere(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b)), [3, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b))), b.call(aten.relu.default, early)]


@sums(1, left=1)
def averaged_over_experts(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b)), [3, 8, 6], 0, list(SHAPE), aten.mean.dim)
    return [added(b, early, reduced(b, term(b)))]


@sums(1, left=1)
def the_largest_of_experts(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b)), [3, 8, 6], 0, list(SHAPE), aten.amax.default)
    return [added(b, early, reduced(b, term(b)))]


@sums(1, left=1)
def summed_over_experts_that_are_turned(b: Builder) -> list[Node]:
    turned = b.call(aten.permute.default, reduced(b, of_experts(b)), [1, 0])
    early = experts_sum(b, turned, [3, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b)))]


@sums(1, left=1)
def summed_over_some_experts(b: Builder) -> list[Node]:
    part = b.call(aten.slice.Tensor, reduced(b, of_experts(b)), 0, 0, 16)
    return [added(b, experts_sum(b, part, [2, 8, 6], 0, list(SHAPE)), reduced(b, term(b)))]


@sums(1, left=1)
def summed_over_experts_and_more(b: Builder) -> list[Node]:
    seen = b.call(aten.reshape.default, reduced(b, b.placeholder((48, 6), torch.float64)), [2, 3, 8, 6])
    early = b.call(aten.reshape.default, b.call(aten.sum.dim_IntList, seen, [0, 1]), list(SHAPE))
    return [added(b, early, reduced(b, term(b)))]


@sums(1, left=1)
def summed_over_experts_in_another_dtype(b: Builder) -> list[Node]:
    seen = b.call(aten.reshape.default, reduced(b, of_experts(b, torch.float32)), [3, 8, 6])
    early = b.call(aten.sum.dim_IntList, seen, [0], dtype=torch.float64)
    return [added(b, b.call(aten.reshape.default, early, list(SHAPE)), reduced(b, term(b)))]


@sums(1, left=1)
def summed_over_experts_after_a_change(b: Builder) -> list[Node]:
    whole = reduced(b, of_experts(b))
    b.call(aten.add_.Tensor, whole, 1)
    return [added(b, experts_sum(b, whole, [3, 8, 6], 0, list(SHAPE)), reduced(b, term(b)))]


@sums(1, left=1)
def summed_over_experts_of_another_group(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b), group="other"), [3, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b)))]


@sums(1, left=1)
def averages_that_are_summed_over_experts(b: Builder) -> list[Node]:
    early = experts_sum(b, reduced(b, of_experts(b), "avg"), [3, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b)))]


@sums(1, 1)
def products_that_are_summed_over_experts(b: Builder) -> list[Node]:
    """The first has a matmul of one weight, which the fused op makes whole."""
    early = experts_sum(b, reduced(b, long_term(b)), [2, 8, 6], 0, list(SHAPE))
    return [added(b, early, reduced(b, term(b)))]


@sums(left=1)
def summed_over_experts_alone(b: Builder) -> list[Node]:
    return [experts_sum(b, reduced(b, of_experts(b)), [3, 8, 6], 0, list(SHAPE))]


@sums(1, 1)
def one_of_which_is_used_elsewhere(b: Builder) -> list[Node]:
    one, two = reduced(b, term(b)), reduced(b, term(b))
    return [added(b, one, two), b.call(aten.relu.default, one)]


@sums(1, 1)
def one_of_which_is_returned(b: Builder) -> list[Node]:
    one, two = reduced(b, term(b)), reduced(b, term(b))
    return [added(b, one, two), two]


@sums(1, 1)
def one_of_which_is_used_before_the_wait(b: Builder) -> list[Node]:
    started = b.call(c10d.all_reduce.default, term(b), "sum", "tp")
    return [added(b, b.call(c10d.wait_tensor.default, started), reduced(b, term(b))), started]


@sums(1, 1)
def of_parts(b: Builder) -> list[Node]:
    """The sum is a matrix of its own, and the first part one with gaps."""
    return [added(b, *(b.call(aten.slice.Tensor, reduced(b, term(b)), 1, 1, 3) for _ in range(2)))]


@sums(1, 1)
def another_part_of_one_is_used(b: Builder) -> list[Node]:
    one, two = reduced(b, term(b)), reduced(b, term(b))
    pieces = [b.items(b.call(aten.split.Tensor, whole, 1, 0)) for whole in (one, two)]
    return [added(b, pieces[0][0], pieces[1][0]), pieces[1][1]]


@sums(1, 1)
def over_two_groups(b: Builder) -> list[Node]:
    return [added(b, reduced(b, term(b)), reduced(b, term(b), group="other"))]


@sums(1, 1)
def of_a_sum_and_an_average(b: Builder) -> list[Node]:
    return [added(b, reduced(b, term(b)), reduced(b, term(b), "avg"))]


@sums(1, 1)
def of_an_all_reduce_and_a_scatter(b: Builder) -> list[Node]:
    both = [reduced(b, term(b)), scattered(b, b.call(aten.reshape.default, long_term(b), [4, 4, 6]))]
    return [added(b, *both)]


def long_term(b: Builder) -> Node:
    a, w = b.placeholder((16, 5), torch.float64), b.placeholder((5, 6), torch.float64)
    return b.call(aten.mm.default, a, w)


@sums(1, 1)
def of_products_laid_out_differently(b: Builder) -> list[Node]:
    other = b.call(aten.reshape.default, term(b), [4, 2, 6])
    other = b.call(aten.clone.default, b.call(aten.permute.default, other, [1, 0, 2]))
    other = b.call(aten.clone.default, other, memory_format=torch.contiguous_format)
    return [added(b, reduced(b, term(b)), reduced(b, other))]


@sums(1, 1)
def in_another_layout(b: Builder) -> list[Node]:
    """Results whose rows lie in memory otherwise than those of the fused op."""
    terms = [b.call(aten.view.default, long_term(b), [4, 4, 6]) for _ in range(2)]
    turned = [b.call(aten.permute.default, one, [1, 0, 2]) for one in terms]
    return [b.call(aten.relu.default, added(b, *(b.call(custom_all_reduce, one, "tp:0") for one in turned)))]


@sums(1, 1)
def of_a_scaled_product_and_another(b: Builder) -> list[Node]:
    fp8 = torch.float8_e4m3fn
    a, w = b.placeholder((8, 16), fp8), b.placeholder((16, 16), fp8, strides=(1, 16))
    scales = [b.placeholder((), torch.float32, "scale") for _ in range(2)]
    other = b.call(aten.mm.default, *(b.placeholder(shape, torch.bfloat16) for shape in ((8, 5), (5, 16))))
    one = b.call(aten._scaled_mm.default, a, w, *scales, None, None, torch.bfloat16)
    return [added(b, reduced(b, other), reduced(b, one))]


@sums(1, 1)
def of_results_laid_out_differently(b: Builder) -> list[Node]:
    other = b.call(aten.reshape.default, reduced(b, term(b)), [4, 2, 6])
    return [added(b, reduced(b, term(b)), b.call(aten.permute.default, other, [1, 0, 2]))]


@sums(1, 1)
def scaled(b: Builder) -> list[Node]:
    return [b.call(aten.add.Tensor, reduced(b, term(b)), reduced(b, term(b)), alpha=3)]


@sums(1)
def of_one_twice(b: Builder) -> list[Node]:
    one = reduced(b, term(b))
    return [added(b, one, one)]


@sums(1, 1)
def with_one_twice(b: Builder) -> list[Node]:
    one, two = reduced(b, term(b)), reduced(b, term(b))
    return [added(b, one, two, one)]


@sums(1, 1)
def in_float16(b: Builder) -> list[Node]:
    """A rank's part of the sum may be too large for it."""
    return [added(b, reduced(b, term(b, torch.float16)), reduced(b, term(b, torch.float16)))]


@sums(1, 1)
def converted_behind(b: Builder) -> list[Node]:
    """What is added is float32, and what would be sent bfloat16."""
    total = added(b, *(b.call(convert, reduced(b, term(b, torch.bfloat16)), torch.float32) for _ in range(2)))
    return [b.call(convert, total, torch.bfloat16)]


@sums(1, 1)
def added_as_integers(b: Builder) -> list[Node]:
    bits = [b.call(aten.view.dtype, reduced(b, term(b)), torch.int64) for _ in range(2)]
    return [b.call(aten.view.dtype, added(b, *bits), torch.float64)]


@sums(1, 1)
def an_operand_is_changed_in_between(b: Builder) -> list[Node]:
    a, w = b.placeholder((8, 5), torch.float64), b.placeholder((5, 6), torch.float64)
    one = reduced(b, b.call(aten.mm.default, a, w))
    b.call(aten.add_.Tensor, a, 1)
    return [added(b, one, reduced(b, b.call(aten.mm.default, a, w)))]


@sums(1, 1)
def a_result_is_changed_before(b: Builder) -> list[Node]:
    one, two = reduced(b, term(b)), reduced(b, term(b))
    b.call(aten.add_.Tensor, one, 1)
    return [added(b, one, two)]


@sums(1, 1, 1)
def another_chain_stands_in_between(b: Builder) -> list[Node]:
    """Those of another layer: the first one's operands would be kept until then."""
    first = reduced(b, term(b))
    other = reduced(b, term(b))
    return [added(b, first, reduced(b, term(b))), b.call(aten.relu.default, other)]


@sums(1, 1)
def of_one_list(b: Builder) -> list[Node]:
    both = b.call(c10d.all_reduce_coalesced.default, [term(b), term(b)], "sum", "tp")
    return [added(b, *(b.call(c10d.wait_tensor.default, item) for item in b.items(both)))]


@sums(2, 1, 1)
def mixed_with_averages(b: Builder) -> list[Node]:
    """An addition is in one sum only: the averages are tensors as any other to the sums."""
    one, two, mean, other = (reduced(b, term(b), op) for op in ("sum", "sum", "avg", "avg"))
    return [b.call(aten.sub.Tensor, added(b, one, mean), b.call(aten.sub.Tensor, two, other))]


@sums(1, 1, 1)
def each_of_which_a_product_is_added_to(b: Builder) -> list[Node]:
    """The additions are in front of another reduction, whose terms they make."""
    one, two = reduced(b, term(b)), reduced(b, term(b))
    return [reduced(b, added(b, term(b), one, two))]


@sums(left=2)
def none_of_which_a_matmul_made(b: Builder) -> list[Node]:
    return [added(b, reduced(b, tensor(b)), reduced(b, tensor(b)))]


@sums(1, left=1)
def of_what_no_matmul_made_laid_out_differently(b: Builder) -> list[Node]:
    turned = b.call(aten.permute.default, b.placeholder((4, 2, 6), torch.float64), [1, 0, 2])
    cut = [b.call(aten.split.Tensor, one, 2, 1) for one in (term(b), turned)]
    halves = [b.call(aten.cat.default, list(b.items(one))) for one in cut]
    return [added(b, scattered(b, halves[0]), scattered(b, b.call(aten.clone.default, turned_again(b, halves[1]))))]


def turned_again(b: Builder, node: Node) -> Node:
    seen = b.call(aten.reshape.default, node, [2, 4, 6])
    return b.call(aten.reshape.default, b.call(aten.permute.default, seen, [1, 0, 2]), [4, 2, 6])


@sums(1, 1, left=2)
def beside_one_of_which_no_matmul_made_anything(b: Builder) -> list[Node]:
    """Products are reduced, but none of them in this sum."""
    both = [added(b, reduced(b, tensor(b)), reduced(b, tensor(b)))]
    return [*both, *(b.call(aten.relu.default, reduced(b, term(b))) for _ in range(2))]


def turned_for(b: Builder, node: Node) -> Node:
    """Laid out otherwise, as rows that two dimensions make."""
    turned = b.call(aten.permute.default, b.call(aten.reshape.default, node, [4, 2, 6]), [1, 0, 2])
    return b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)


@sums(1, 1)
def of_a_reduced_product(b: Builder) -> list[Node]:
    """A product that is reduced, and then again in a sum: the op that takes its place there goes in once."""
    return [added(b, reduced(b, reduced(b, term(b))), reduced(b, term(b)))]


@sums(1)
def of_what_no_matmul_made_turned_alike(b: Builder) -> list[Node]:
    other = b.placeholder((8, 6), torch.float64)
    return [added(b, *(reduced(b, turned_for(b, one)) for one in (term(b), other)))]


@sums(1)
def of_a_part_of_what_no_matmul_made_turned_alike(b: Builder) -> list[Node]:
    """Its first rows are as many as the product's: they are added, not the whole."""
    part = b.call(aten.slice.Tensor, b.placeholder((16, 6), torch.float64), 0, 0, 8)
    return [added(b, *(reduced(b, turned_for(b, one)) for one in (term(b), part)))]


@sums(1)
def of_bits_of_what_no_matmul_made_turned_alike(b: Builder) -> list[Node]:
    bits = b.call(aten.view.dtype, b.placeholder((8, 6), torch.int64), torch.float64)
    return [added(b, *(reduced(b, turned_for(b, one)) for one in (term(b), bits)))]


@sums(1)
def of_what_no_matmul_made_flipped_and_turned_alike(b: Builder) -> list[Node]:
    """What is flipped is added: from there on it goes in the products' way."""
    flipped = b.call(aten.flip.default, b.placeholder((8, 6), torch.float64), [0])
    return [added(b, *(reduced(b, turned_for(b, one)) for one in (term(b), flipped)))]


@sums(1, 1)
def of_another_tensor_whose_columns_the_sum_has(b: Builder) -> list[Node]:
    """It comes first, so that the sum lies in memory as it does: the fused op's result would not."""
    residual = b.placeholder((8, 6), torch.float64, strides=(1, 8))
    rows = [b.call(aten.reshape.default, reduced(b, term(b)), [8, 6]) for _ in range(2)]
    return [b.call(aten.permute.default, added(b, residual, *rows), [1, 0])]


@sums(1, 1)
def of_another_tensor_in_another_order(b: Builder) -> list[Node]:
    """It is added to a view that is no reshape."""
    turned = [b.call(aten.permute.default, reduced(b, term(b)), [1, 0, 2]) for _ in range(2)]
    return [added(b, turned[0], b.placeholder((4, 2, 6), torch.float64), turned[1])]


@sums(1, 1)
def of_another_tensor_that_comes_from_one(b: Builder) -> list[Node]:
    one, two = reduced(b, term(b)), reduced(b, term(b))
    return [added(b, one, b.call(aten.relu.default, one), two)]


@sums(1, 1)
def of_a_number_too(b: Builder) -> list[Node]:
    return [added(b, b.call(aten.add.Scalar, reduced(b, term(b)), 1), reduced(b, term(b)))]


@sums(1, 1)
def another_tensor_is_changed_in_between(b: Builder) -> list[Node]:
    residual = tensor(b)
    one = added(b, reduced(b, term(b)), residual)
    b.call(aten.add_.Tensor, residual, 1)
    return [added(b, one, reduced(b, term(b)))]


@pytest.mark.parametrize("name", SUMS)
def test_products_of_each_op_and_results(name: str) -> None:
    build, products, left = SUMS[name]
    b = Builder(operator.itemgetter(0), 2)
    b.graph.output(tuple(build(b)))
    graph = copied(b.graph)
    with registered("tp"):
        report = run_pass(graph)
    graph.lint()
    assert (summed_up(graph), reductions_left(graph)) == (products, left)
    assert not report.missed
    assert len(report.fused) == reductions_left(b.graph) - left
    check_same(b, graph, 0)
