"""Ranges of the gathered rows, each for weights of its own: graphs before and after the pass, and what they compute.

`EXPECTTEST_ACCEPT=1` writes the expectations anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import getitem, neg

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten
from lockstep import differences, evaluate
from passes import copied, outcomes, run_pass
from rewritten import FP8, rewritten
from torch.fx import Graph, Node

END = 2**63 - 1


def rows(b: GraphBuilder, whole: Node, first: int, end: int, dim: int = 0) -> Node:
    return b.call(aten.slice.Tensor, whole, dim, first, end)


def test_two_ranges_of_rows() -> None:
    """With the weight gradient of the second, for which the gathered tensor is returned."""
    b = GraphBuilder()
    x, v, w, grad = b.input("x", [4, 8]), b.input("v", [8, 6]), b.input("w", [8, 12]), b.input("grad", [11, 12])
    whole = b.gather(x)
    text, image = rows(b, whole, 0, 5), rows(b, whole, 5, END)
    assert_expected_inline(
        rewritten(b.returns(b.mm(text, v), b.mm(image, w), b.mm(b.permute(image, [1, 0]), grad))),
        """\
x: f32[4, 8]
v: f32[8, 6]
w: f32[8, 12]
grad: f32[11, 12]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
slice_1 = slice(wait_tensor, 0, 0, 5)  # f32[5, 8]
slice_2 = slice(wait_tensor, 0, 5, 9223372036854775807)  # f32[11, 8]
mm = mm(slice_1, v)  # f32[5, 6]
mm_1 = mm(slice_2, w)  # f32[11, 12]
permute = permute(slice_2, [1, 0])  # f32[8, 11]s[1, 8]
mm_2 = mm(permute, grad)  # f32[8, 12]
return (mm, mm_1, mm_2)

=== becomes ===

x: f32[4, 8]
v: f32[8, 6]
w: f32[8, 12]
grad: f32[11, 12]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[v, w], biases=[None, None], gather_dim=0,
    return_a_full=True, group_size=4, group_name='tp', b_rows=[0, 5, 16, 5, 16, 16])  # (f32[5, 6], f32[11, 12],
    f32[16, 8])
getitem = getitem(all_gather_matmul_default, 0)  # f32[5, 6]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f32[11, 12]
getitem_2 = getitem(all_gather_matmul_default, 2)  # f32[16, 8]
reshape_default = reshape(getitem_2, [4, 4, 8])  # f32[4, 4, 8]
reshape_default_1 = reshape(reshape_default, [16, 8])  # f32[16, 8]
slice_2 = slice(reshape_default_1, 0, 5, 9223372036854775807)  # f32[11, 8]
permute = permute(slice_2, [1, 0])  # f32[8, 11]s[1, 8]
mm_2 = mm(permute, grad)  # f32[8, 12]
return (getitem, getitem_1, mm_2)
""",
    )


def test_ranges_of_a_sequence_with_residuals_and_biases() -> None:
    b = GraphBuilder(ranks=2)
    x, v, w = b.input("x", [3, 4, 8]), b.input("v", [8, 6]), b.input("w", [8, 12])
    bias, other = b.input("bias", [6]), b.input("other", [15, 12])
    parts = b.call(aten.split_with_sizes.default, b.cat(b.chunks(b.gather(x)), dim=1), [3, 5], 1)
    text, image = (b.call(getitem, parts, index) for index in range(2))
    first = b.call(aten.addmm.default, bias, b.reshape(text, [9, 8]), v)
    second = b.call(aten.addmm.default, other, b.reshape(image, [15, 8]), w)
    assert_expected_inline(
        rewritten(b.returns(first, second)),
        """\
x: f32[3, 4, 8]
v: f32[8, 6]
w: f32[8, 12]
bias: f32[6]
other: f32[15, 12]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[6, 4, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6, 4, 8]
split = split(wait_tensor, 3, 0)  # (f32[3, 4, 8], f32[3, 4, 8])
getitem = getitem(split, 0)  # f32[3, 4, 8]
getitem_1 = getitem(split, 1)  # f32[3, 4, 8]
cat = cat([getitem, getitem_1], 1)  # f32[3, 8, 8]
split_with_sizes = split_with_sizes(cat, [3, 5], 1)  # (f32[3, 3, 8]s[64, 8, 1], f32[3, 5, 8]s[64, 8, 1])
getitem_2 = getitem(split_with_sizes, 0)  # f32[3, 3, 8]s[64, 8, 1]
getitem_3 = getitem(split_with_sizes, 1)  # f32[3, 5, 8]s[64, 8, 1]
reshape = reshape(getitem_2, [9, 8])  # f32[9, 8]
addmm = addmm(bias, reshape, v)  # f32[9, 6]
reshape_1 = reshape(getitem_3, [15, 8])  # f32[15, 8]
addmm_1 = addmm(other, reshape_1, w)  # f32[15, 12]
return (addmm, addmm_1)

=== becomes ===

x: f32[3, 4, 8]
v: f32[8, 6]
w: f32[8, 12]
bias: f32[6]
other: f32[15, 12]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[v, w], biases=[bias, None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp', b_rows=[0, 3, 8, 3, 8, 8])  # (f32[9, 6], f32[15, 12])
getitem_4 = getitem(all_gather_matmul_default, 0)  # f32[9, 6]
getitem_5 = getitem(all_gather_matmul_default, 1)  # f32[15, 12]
add_tensor = add(getitem_5, other)  # f32[15, 12]
return (getitem_4, add_tensor)
""",
    )


def test_ranges_of_any_number_of_rows() -> None:
    b = GraphBuilder()
    x, v, w = b.input("x", [4, 8], dynamic=0), b.input("v", [8, 6]), b.input("w", [8, 12])
    whole = b.gather(x)
    assert_expected_inline(
        rewritten(b.returns(b.mm(rows(b, whole, 0, 5), v), b.mm(rows(b, whole, 5, END), w))),
        """\
x: f32[s, 8]
v: f32[8, 6]
w: f32[8, 12]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[4*s, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[4*s, 8]
slice_1 = slice(wait_tensor, 0, 0, 5)  # f32[5, 8]
mm = mm(slice_1, v)  # f32[5, 6]
slice_2 = slice(wait_tensor, 0, 5, 9223372036854775807)  # f32[4*s - 5, 8]
mm_1 = mm(slice_2, w)  # f32[4*s - 5, 12]
return (mm, mm_1)

=== becomes ===

x: f32[s, 8]
v: f32[8, 6]
w: f32[8, 12]
sym_size_int = sym_size(x, 0)  # s
mul = mul(sym_size_int, 4)  # 4*s
sym_size_int_1 = sym_size(x, 0)  # s
mul_1 = mul(sym_size_int_1, 4)  # 4*s
sym_size_int_2 = sym_size(x, 0)  # s
mul_2 = mul(sym_size_int_2, 4)  # 4*s
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[v, w], biases=[None, None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp', b_rows=[0, 5, mul, 5, mul_1, mul_2])  # (f32[5, 6], f32[4*s
    - 5, 12])
getitem = getitem(all_gather_matmul_default, 0)  # f32[5, 6]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f32[4*s - 5, 12]
return (getitem, getitem_1)
""",
    )


def test_a_border_that_another_input_tells() -> None:
    """Its end is a number, though the range begins at a symbol."""
    b = GraphBuilder()
    whole, text = b.gather(b.input("x", [4, 8])), b.input("text", [5, 3], dynamic=0)
    border = b.call(aten.sym_size.int, text, 0)
    parts = [b.call(aten.slice.Tensor, whole, 0, *ends) for ends in ((0, border), (border, END))]
    check(b.returns(*[b.mm(part, b.input(f"w{i}", [8, 6])) for i, part in enumerate(parts)]), 4, expected=["F"])


def test_a_range_that_is_taken_twice() -> None:
    """Torch leaves two equal slices in an inference graph, and no row is left out."""
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 8]))
    outs = streams(b, whole, (0, 5), (5, END))
    check(b.returns(*outs, b.relu(rows(b, whole, 0, 5)), b.mm(rows(b, whole, 5, END), b.input("t", [8, 3]))), 4, ["F"])


def test_ranges_of_a_range() -> None:
    """Whether a matmul takes the other rows or not."""
    for last in (lambda b, part: b.relu(part), lambda b, part: b.mm(part, b.input("u", [8, 3]))):
        b = GraphBuilder()
        whole = b.gather(b.input("x", [4, 8]))
        most = rows(b, whole, 0, 10)
        graph = b.returns(*streams(b, most, (0, 4), (4, END)), last(b, rows(b, whole, 10, END)))
        check(graph, 4, expected=["F"])
        assert sum("mm.default" in str(node.target) for node in graph.nodes) == 0


def test_ranges_that_are_narrowed() -> None:
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 8]))
    parts = [b.call(aten.narrow.default, whole, 0, *place) for place in ((0, 5), (5, 11))]
    check(b.returns(*[b.mm(part, b.input(f"w{i}", [8, 6])) for i, part in enumerate(parts)]), 4, expected=["F"])


def test_a_border_that_is_counted_from_the_end() -> None:
    b = GraphBuilder()
    whole, border = b.gather(b.input("x", [4, 8], dynamic=0)), b.input("text", [5, 3], dynamic=0)
    count = b.call(neg, b.call(aten.sym_size.int, border, 0))
    parts = [b.call(aten.slice.Tensor, whole, 0, *ends) for ends in ((0, count), (count, END))]
    graph = b.returns(*[b.mm(part, b.input(f"w{i}", [8, 6])) for i, part in enumerate(parts)])
    assert outcomes(run_pass(graph)) == ["F"]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_steps_that_are_selected(batch_first: bool, at_once: bool) -> None:
    """A batch of two, or sequences of two steps: each index is multiplied by a weight of its own."""
    b = GraphBuilder()
    whole = b.reshape(b.gather(b.input("x", [4, 8])), [2, 8, 8] if batch_first else [8, 2, 8])
    dim = 0 if batch_first else 1
    both = b.call(aten.unbind.int, whole, dim) if at_once else None
    parts = [b.call(aten.select.int, whole, dim, i - 2) if both is None else b.call(getitem, both, i) for i in range(2)]
    check(b.returns(*[b.mm(part, b.input(f"w{i}", [8, 6])) for i, part in enumerate(parts)]), 4, expected=["F"])


# --- what stays -----------------------------------------------------------------------------------------------------
def streams(b: GraphBuilder, whole: Node, *ends: tuple[int, int], weights: int = 2, dim: int = 0) -> list[Node]:
    """Products of ranges, by so many weights in turn."""
    parts = [rows(b, whole, *each, dim) for each in ends]
    made = [b.input(f"w{index}", [parts[index].meta["val"].shape[-1], 12]) for index in range(weights)]
    return [b.mm(part, made[index % weights]) for index, part in enumerate(parts)]


def by_one_weight_in_two_layouts(b: GraphBuilder) -> list[Node]:
    whole, w = b.gather(b.input("x", [4, 8])), b.input("w", [12, 8])
    first, last = rows(b, whole, 0, 5), rows(b, whole, 5, END)
    return [b.mm(first, b.permute(w, [1, 0])), b.mm(last, b.call(aten.t.default, w))]


def by_one_part_of_a_weight(taken: str) -> Callable[[GraphBuilder], list[Node]]:
    """Taken for each chunk anew, as a head's half of the words, or converted for each."""

    def part(b: GraphBuilder, w: Node, place: int) -> Node:
        if taken == "rows":
            return b.permute(b.call(aten.slice.Tensor, w, 0, 6, END if place else 12), [1, 0])
        if taken == "transposed":
            columns = b.permute(w, [1, 0])
            return b.call(aten.slice.Tensor, columns, 1, 6, 12) if place else b.permute(rows(b, w, 6, 12), [1, 0])
        if taken == "split":
            return b.permute(b.call(getitem, b.call(aten.split.Tensor, w, 6), 1), [1, 0])
        if taken == "all":
            return b.permute(b.call(aten.slice.Tensor, b.call(aten.slice.Tensor, w, 0, 0, END), 1, 0, END), [1, 0])
        return b.permute(b.call(torch.ops.prims.convert_element_type.default, w, torch.float32), [1, 0])

    def build(b: GraphBuilder) -> list[Node]:
        whole = b.gather(b.input("x", [4, 8]))
        w = b.input("w", [12, 8], torch.bfloat16 if taken == "converted" else torch.float32)
        ends = ((0, 5), (5, END))
        return [b.mm(rows(b, whole, *each), part(b, w, place)) for place, each in enumerate(ends)]

    return build


def of_a_contraction(b: GraphBuilder) -> list[Node]:
    """Each element of a product needs all ranks' columns."""
    return streams(b, b.cat(b.chunks(b.gather(b.input("x", [16, 2]))), dim=1), (0, 5), (5, END))


def with_scales(b: GraphBuilder) -> list[Node]:
    whole, scale = b.gather(b.input("x", [8, 32], FP8)), b.input("scale", [])
    weights = [b.input(name, [32, 16], FP8, column_major=True) for name in "vw"]
    ends = zip(weights, ((0, 16), (16, END)), strict=True)
    return [b.scaled_mm(rows(b, whole, *each), weight, scale, scale) for weight, each in ends]


def of_rearranged_shards(b: GraphBuilder) -> list[Node]:
    """The rows of each shard are in another order than the rank sends them."""
    whole = b.reshape(b.permute(b.reshape(b.gather(b.input("x", [4, 8])), [4, 2, 2, 8]), [0, 2, 1, 3]), [16, 8])
    return streams(b, whole, (0, 5), (5, END))


STAYS: dict[str, tuple[Callable[[GraphBuilder], list[Node]], str]] = {
    "chunks": (lambda b: streams(b, b.gather(b.input("x", [4, 8])), (0, 5), (5, END), weights=1), "TAKEN_IN_PARTS"),
    "one of three weights twice": (
        lambda b: streams(b, b.gather(b.input("x", [4, 8])), (0, 5), (5, 9), (9, END)),
        "TAKEN_IN_PARTS",
    ),
    "one weight in two layouts": (by_one_weight_in_two_layouts, "TAKEN_IN_PARTS"),
    **{
        f"one weight, {taken}": (by_one_part_of_a_weight(taken), "TAKEN_IN_PARTS")
        for taken in ("rows", "transposed", "split", "all", "converted")
    },
    "rows that are left out": (
        lambda b: streams(b, b.gather(b.input("x", [4, 8])), (0, 5), (7, END)),
        "PIECES_MISSING",
    ),
    "rows that overlap": (lambda b: streams(b, b.gather(b.input("x", [4, 8])), (0, 9), (5, END)), "PIECES_MISSING"),
    "five ranges": (
        lambda b: streams(b, b.gather(b.input("x", [4, 8])), (0, 3), (3, 5), (5, 6), (6, 9), (9, END), weights=5),
        "TAKEN_IN_PARTS",
    ),
    "columns": (lambda b: streams(b, b.gather(b.input("x", [4, 8])), (0, 5), (5, END), dim=1), "TAKEN_IN_PARTS"),
    "a contraction": (of_a_contraction, "TAKEN_IN_PARTS"),
    "scales": (with_scales, "TAKEN_IN_PARTS"),
    "another order": (of_rearranged_shards, "TAKEN_IN_PARTS"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str) -> None:
    build, reason = STAYS[name]
    b = GraphBuilder()
    graph = b.returns(*build(b))
    before = [str(node.target) for node in graph.nodes]
    (remark,) = run_pass(graph).remarks
    assert (remark.name, remark.hint != "") == (reason, True)
    assert [str(node.target) for node in graph.nodes] == before


def test_ranges_beside_a_matmul_of_all_rows() -> None:
    """That one is fused; the others take what is returned."""
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 8]))
    check(b.returns(*streams(b, whole, (0, 5), (5, END)), b.mm(whole, b.input("all", [8, 3]))), 4, expected=["F"])


@pytest.mark.parametrize("halves", ["rows", "columns", "pieces"])
def test_parts_of_one_tensor_are_weights_of_their_own(halves: str) -> None:
    b = GraphBuilder()
    whole, w = b.gather(b.input("x", [4, 8])), b.input("w", [8, 12] if halves == "columns" else [16, 6])
    if halves == "pieces":
        pieces = b.call(aten.split.Tensor, w, 8)
        parts = [b.call(getitem, pieces, index) for index in range(2)]
    else:
        dim, half = (1, 6) if halves == "columns" else (0, 8)
        parts = [b.call(aten.slice.Tensor, w, dim, *ends) for ends in ((0, half), (half, END))]
    outs = [b.mm(rows(b, whole, *ends), part) for part, ends in zip(parts, ((0, 5), (5, END)), strict=True)]
    check(b.returns(*outs), 4, expected=["F"])


def test_a_range_whose_matmul_is_refused_leaves_the_others() -> None:
    """It takes its rows of what is returned."""
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 8]))
    text, image = rows(b, whole, 0, 4), rows(b, whole, 4, END)
    of_each = b.call(aten.bmm.default, b.reshape(text, [2, 2, 8]), b.input("v", [2, 8, 6]))
    graph = b.returns(of_each, b.mm(image, b.input("w", [8, 12])))
    check(graph, 4, expected=["F"])


def test_ranges_of_rows_of_all_ranks_in_turn() -> None:
    b = GraphBuilder()
    whole = b.reshape(b.permute(b.reshape(b.gather(b.input("x", [4, 8])), [4, 4, 8]), [1, 0, 2]), [16, 8])
    check(b.returns(*streams(b, whole, (0, 5), (5, END))), 4, expected=["F"])


def test_a_weight_that_needs_the_other_product() -> None:
    """One fused op cannot make both; it makes the first, and returns what it has gathered."""
    b = GraphBuilder()
    whole, v, w = b.gather(b.input("x", [4, 8])), b.input("v", [8, 12]), b.input("w", [8, 12])
    first = b.mm(rows(b, whole, 0, 5), v)
    weight = b.mul(w, b.call(aten.sum.default, first))
    graph = b.returns(first, b.mm(rows(b, whole, 5, END), weight))
    check(graph, 4, expected=["F"])


def test_a_node_without_value_is_no_crash() -> None:
    """Whichever it is."""

    def graph() -> Graph:
        b = GraphBuilder()
        pieces = b.call(aten.split_with_sizes.default, b.gather(b.input("x", [4, 8])), [5, 11])
        first, last = (b.call(getitem, pieces, index) for index in range(2))
        transposed = b.permute(b.input("w", [12, 8]), [1, 0])
        return b.returns(b.mm(rows(b, first, 0, 5), b.input("v", [8, 12])), b.mm(last, transposed))

    for place, _ in enumerate(graph().nodes):
        damaged = graph()
        [*damaged.nodes][place].meta.pop("val", None)
        assert run_pass(damaged).remarks
        damaged.lint()


# --- what they compute ----------------------------------------------------------------------------------------------
def check(graph: Graph, ranks: int, expected: list[str]) -> None:
    """The pass does that, and ranks compute the same."""
    before = copied(graph)
    assert outcomes(run_pass(graph)) == expected
    shapes = [node.meta["val"].shape for node in graph.nodes if node.op == "placeholder"]
    values = [[torch.randn([int(size) for size in shape]) for shape in shapes] for _ in range(ranks)]
    wanted, found = (evaluate(each, [[value.clone() for value in of] for of in values]) for each in (before, graph))
    assert not differences(wanted, found, 1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_any_ranges_compute_the_same(seed: int) -> None:
    """Random ranges: of any number of ranks, in any order, some of padded rows or of a range, with any users."""
    draw = random.Random(seed)
    ranks, outer, inner, padding = draw.choice((2, 4)), draw.choice((1, 1, 3)), draw.randint(2, 6), draw.randint(0, 1)
    b = GraphBuilder(ranks=ranks)
    shard = b.input("x", [outer, inner, 8] if outer > 1 else [inner, 8])
    whole = b.cat(b.chunks(b.gather(shard)), dim=1) if outer > 1 else b.gather(shard)
    dim, size = whole.meta["val"].dim() - 2, inner * ranks - padding
    if padding and draw.random() < 0.5:  # cut off at once, or by the last range
        whole = rows(b, whole, 0, size, dim)
    cuts = sorted(draw.sample(range(1, size), min(size - 1, draw.randint(1, 3))))
    ends = list(zip([0, *cuts], [*cuts, size], strict=True))
    draw.shuffle(ends)
    nested = draw.random() < 0.3
    most = rows(b, whole, 0, cuts[-1], dim) if nested else whole
    outs: list[Node] = []
    for place, (first, end) in enumerate(ends):
        part = rows(b, most if end <= cuts[-1] else whole, first, end, dim)
        flat = b.reshape(part, [outer * (end - first), 8])
        outs += [b.mm(flat, b.input(f"w{place}_{i}", [8, draw.randint(1, 9)])) for i in range(draw.randint(1, 2))]
        outs += [b.relu(part)] * draw.randint(0, 1)
    check(b.returns(*outs), ranks, expected=["F"])
