"""Numbers that are gathered beside fp8 data and scale only the products of it travel with the data, bit by bit.

    all_gather(fp8 rows) → _scaled_mm(rows, w, 1, 1) ┐
    all_gather(one fp32 number per row) → …           × → cast

The arithmetic of the program stays as it is, in its order and dtypes: only the gather is another one.
`EXPECTTEST_ACCEPT=1` writes the expected graphs anew.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, c10d
from lockstep import differences, evaluate
from passes import before_and_after, outcomes, run_pass
from torch.fx import Graph, Node

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
cast = torch.ops.prims.convert_element_type.default
Build = Callable[[GraphBuilder], "Node | tuple[Node, ...]"]


def product(b: GraphBuilder, rows: Node, name: str = "w", one: Node | None = None) -> Node:
    """Rows [M, 32] times a weight [32, 16], unscaled, in bf16."""
    one, w = one or b.one(), b.input(name, [32, 16], FP8, column_major=True)
    return b.scaled_mm(rows, w, one, one)


def outer(b: GraphBuilder, numbers: Node) -> Node:
    """Numbers [M, 1] times one per column, [M, 16]."""
    return b.mul(numbers, b.input("column_scale", [1, 16]))


def in_rows(b: GraphBuilder, gathered: Node) -> Node:
    """What was gathered from [2, 4, *] along dimension 1, as rows."""
    return b.reshape(b.cat(b.chunks(gathered), dim=1), [-1, gathered.meta["val"].shape[-1]])


# --- what becomes of graphs --------------------------------------------------------------------------------------
def test_row_numbers_travel_with_rows() -> None:
    b = GraphBuilder(ranks=2)
    rows, numbers = b.gather(b.input("x", [8, 32], FP8)), b.gather(b.input("x_scale", [8, 1]))
    scaled = b.call(cast, b.mul(product(b, rows), outer(b, numbers)), BF16)
    graph = b.returns(scaled)
    text, report = before_and_after(graph)
    assert outcomes(report) == ["F", "F"]
    assert_expected_inline(
        f"{text}\n{report.remarks[1].message}\n",
        """\
x: f8[8, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f8[16, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f8[16, 32]
x_scale: f32[8, 1]
all_gather_into_tensor_1 = all_gather_into_tensor(x_scale, 2, 'tp')  # f32[16, 1]
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)  # f32[16, 1]
full = full([], 1.0, dtype=f32)  # f32[]
w: f8[32, 16]s[1, 32]
_scaled_mm = _scaled_mm(wait_tensor, w, full, full, out_dtype=bf16)  # bf16[16, 16]
column_scale: f32[1, 16]
mul = mul(wait_tensor_1, column_scale)  # f32[16, 16]
mul_1 = mul(_scaled_mm, mul)  # f32[16, 16]
convert_element_type = convert_element_type(mul_1, bf16)  # bf16[16, 16]
return (convert_element_type)

=== becomes ===

x: f8[8, 32]
x_scale: f32[8, 1]
full = full([], 1.0, dtype=f32)  # f32[]
w: f8[32, 16]s[1, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=2, group_name='tp', a_scale=full, b_scales=[full], gather_a_scale=False,
    out_dtype=bf16, use_fast_accum=False, along_shard=x_scale)  # (bf16[16, 16], f32[16, 1])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[16, 16]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f32[16, 1]
column_scale: f32[1, 16]
mul = mul(getitem_1, column_scale)  # f32[16, 16]
mul_1 = mul(getitem, mul)  # f32[16, 16]
convert_element_type = convert_element_type(mul_1, bf16)  # bf16[16, 16]
return (convert_element_type)

the scales travel with the data of all_gather_into_tensor
""",
    )


@pytest.mark.parametrize("joins", ["scales", "numbers"])
def test_other_users_of_rows_take_them_from_the_op_as_they_are(joins: str) -> None:
    """Not rearranged into what the collective returned, and back: also where another gather joins."""
    b = GraphBuilder()
    rows = in_rows(b, b.gather(b.input("x", [2, 4, 32], FP8)))
    numbers = in_rows(b, b.gather(b.input("x_scale", [2, 4, 1])))
    if joins == "scales":
        w, w_scale = b.input("w", [32, 16], FP8, column_major=True), b.input("column_scale", [1, 16])
        scaled = b.scaled_mm(rows, w, numbers, w_scale)
    else:
        scaled = b.mul(product(b, rows), outer(b, numbers))
    graph = b.returns(scaled, b.call(aten.view.dtype, rows, torch.uint8))
    before = evaluate(graph, inputs_of(graph))
    assert outcomes(run_pass(graph)) == ["F", "F"]
    assert differences(before, evaluate(graph, inputs_of(graph))) == []
    moves = (aten.cat.default, aten.permute.default, aten.clone.default)
    assert not [node.name for node in graph.nodes if node.target in moves]


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("changed", [None, "between the views", "between the matmuls"])
def test_scales_that_each_matmul_has_a_view_of(changed: str | None, gathered: bool) -> None:
    """Graphs for inference have a view for each, as the program does. Those of one tensor are one scale."""
    b = GraphBuilder()
    given = b.input("x_scale", [2, 4, 1] if gathered else [8, 4, 1])
    scale, rows = b.gather(given) if gathered else given, b.gather(b.input("x", [2, 4, 32], FP8))
    views, out = [b.reshape(rows, [32, 32]) for _ in range(2)], []
    scales = [] if changed == "between the views" else [b.reshape(scale, [32, 1]) for _ in views]
    for index, view in enumerate(views):
        w, w_scale = b.input(f"w{index}", [32, 16], FP8, column_major=True), b.input(f"column_scale{index}", [1, 16])
        out.append(b.scaled_mm(view, w, scales[index] if scales else b.reshape(scale, [32, 1]), w_scale))
        if changed and not index:
            b.call(aten.mul_.Tensor, scale, 3.0)
    graph = b.returns(*out)
    before = evaluate(graph, inputs_of(graph))
    report = run_pass(graph)
    assert differences(before, evaluate(graph, inputs_of(graph))) == []
    left = [node for node in graph.nodes if node.target is aten._scaled_mm.default]
    if changed:
        assert len(left) > 0
    else:
        assert (outcomes(report), left) == (["F", "F"] if gathered else ["F"], [])


def test_both_gathered_in_three_dimensions() -> None:
    b = GraphBuilder(ranks=2)
    rows = in_rows(b, b.gather(b.input("x", [2, 4, 32], FP8)))
    numbers = in_rows(b, b.gather(b.input("x_scale", [2, 4, 1])))
    scaled = b.mul(b.mul(product(b, rows), numbers), b.input("column_scale", [1, 16]))
    graph = b.returns(b.call(cast, scaled, BF16))
    text, report = before_and_after(graph)
    assert outcomes(report) == ["F", "F"]
    assert_expected_inline(
        text,
        """\
x: f8[2, 4, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f8[4, 4, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f8[4, 4, 32]
split = split(wait_tensor, 2, 0)  # (f8[2, 4, 32], f8[2, 4, 32])
getitem = getitem(split, 0)  # f8[2, 4, 32]
getitem_1 = getitem(split, 1)  # f8[2, 4, 32]
cat = cat([getitem, getitem_1], 1)  # f8[2, 8, 32]
reshape = reshape(cat, [-1, 32])  # f8[16, 32]
x_scale: f32[2, 4, 1]
all_gather_into_tensor_1 = all_gather_into_tensor(x_scale, 2, 'tp')  # f32[4, 4, 1]
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)  # f32[4, 4, 1]
split_1 = split(wait_tensor_1, 2, 0)  # (f32[2, 4, 1], f32[2, 4, 1])
getitem_2 = getitem(split_1, 0)  # f32[2, 4, 1]
getitem_3 = getitem(split_1, 1)  # f32[2, 4, 1]
cat_1 = cat([getitem_2, getitem_3], 1)  # f32[2, 8, 1]
reshape_1 = reshape(cat_1, [-1, 1])  # f32[16, 1]
full = full([], 1.0, dtype=f32)  # f32[]
w: f8[32, 16]s[1, 32]
_scaled_mm = _scaled_mm(reshape, w, full, full, out_dtype=bf16)  # bf16[16, 16]
mul = mul(_scaled_mm, reshape_1)  # f32[16, 16]
column_scale: f32[1, 16]
mul_1 = mul(mul, column_scale)  # f32[16, 16]
convert_element_type = convert_element_type(mul_1, bf16)  # bf16[16, 16]
return (convert_element_type)

=== becomes ===

x: f8[2, 4, 32]
x_scale: f32[2, 4, 1]
full = full([], 1.0, dtype=f32)  # f32[]
w: f8[32, 16]s[1, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp', a_scale=full, b_scales=[full], gather_a_scale=False,
    out_dtype=bf16, use_fast_accum=False, along_shard=x_scale)  # (bf16[2, 8, 16], f32[2, 8, 1])
getitem_4 = getitem(all_gather_matmul_default, 0)  # bf16[2, 8, 16]
reshape_default = reshape(getitem_4, [16, 16])  # bf16[16, 16]
getitem_5 = getitem(all_gather_matmul_default, 1)  # f32[2, 8, 1]
reshape_default_1 = reshape(getitem_5, [16, 1])  # f32[16, 1]
mul = mul(reshape_default, reshape_default_1)  # f32[16, 16]
column_scale: f32[1, 16]
mul_1 = mul(mul, column_scale)  # f32[16, 16]
convert_element_type = convert_element_type(mul_1, bf16)  # bf16[16, 16]
return (convert_element_type)
""",
    )


def test_the_gathered_data_is_returned_before_the_numbers() -> None:
    b = GraphBuilder(ranks=2)
    rows, numbers = b.gather(b.input("x", [8, 32], FP8)), b.gather(b.input("x_scale", [8, 1]))
    one = b.one()
    left, right = (b.mul(product(b, rows, name, one), numbers) for name in ("w0", "w1"))
    graph = b.returns(left, right, rows)
    run_pass(graph)
    (op,) = [node for node in graph.nodes if "asynctp" in str(node.target)]
    assert [tuple(value.shape) for value in op.meta["val"]] == [(16, 16), (16, 16), (16, 32), (16, 1)]
    assert [node.target for node in graph.nodes].count(c10d.all_gather_into_tensor.default) == 0


# --- variants: what becomes of the gather of numbers, which comes second ------------------------------------------
VARIANTS: list[tuple[str, Build]] = []


def variant(outcome: str) -> Callable[[Build], Build]:
    """Add a graph to the table: `F` is FUSED, `M` MISSED, `S` neither, with the code's number."""

    def add(build: Build) -> Build:
        VARIANTS.append((outcome, build))
        return build

    return add


def both(b: GraphBuilder) -> tuple[Node, Node]:
    return b.gather(b.input("x", [4, 32], FP8)), b.gather(b.input("x_scale", [4, 1]))


@variant("F")
def numbers_inverted_after_the_gather(b: GraphBuilder) -> Node:
    rows, numbers = both(b)
    return b.mul(product(b, rows), b.call(aten.reciprocal.default, numbers))


@variant("F")
def numbers_first_in_a_next_matmul(b: GraphBuilder) -> Node:
    """The scaled product goes on to another matmul: its scale is no near miss of that."""
    rows, numbers = both(b)
    scaled = b.call(cast, b.mul(product(b, rows), outer(b, numbers)), BF16)
    return b.mm(b.relu(scaled), b.input("next", [16, 8], BF16))


@variant("F")
def numbers_in_the_dimensions_of_the_product(b: GraphBuilder) -> Node:
    rows = in_rows(b, b.gather(b.input("x", [2, 4, 32], FP8)))
    numbers = b.cat(b.chunks(b.gather(b.input("x_scale", [2, 4, 1]))), dim=1)
    return b.mul(b.reshape(product(b, rows), [2, 16, 16]), numbers)


@variant("F")
def numbers_in_one_dimension(b: GraphBuilder) -> Node:
    rows, numbers = b.gather(b.input("x", [4, 32], FP8)), b.gather(b.input("x_scale", [4]))
    return b.mul(product(b, rows), b.call(aten.unsqueeze.default, numbers, 1))


@variant("S007")
def numbers_in_another_order(b: GraphBuilder) -> Node:
    """The data's rows are [batch, ranks, sequence], the numbers' [ranks, batch, sequence]."""
    rows = in_rows(b, b.gather(b.input("x", [2, 4, 32], FP8)))
    numbers = b.reshape(b.gather(b.input("x_scale", [2, 4, 1])), [32, 1])
    return b.mul(product(b, rows), numbers)


@variant("S007")
def numbers_of_another_group(b: GraphBuilder) -> Node:
    rows = b.gather(b.input("x", [4, 32], FP8))
    start = b.call(c10d.all_gather_into_tensor.default, b.input("x_scale", [4, 1]), 4, "other")
    return b.mul(product(b, rows), b.call(c10d.wait_tensor.default, start))


@variant("S007")
def numbers_in_bf16(b: GraphBuilder) -> Node:
    rows, numbers = b.gather(b.input("x", [4, 32], FP8)), b.gather(b.input("x_scale", [4, 1], BF16))
    return b.mul(product(b, rows), numbers)


@variant("S007")
def numbers_per_column(b: GraphBuilder) -> Node:
    rows, numbers = b.gather(b.input("x", [2, 32], FP8)), b.gather(b.input("w_scale", [4, 1]))
    return b.mul(product(b, rows), b.reshape(numbers, [1, 16]))


@variant("F")
def numbers_per_column_as_many_as_rows(b: GraphBuilder) -> Node:
    """What travels is only moved, whatever it scales."""
    rows, numbers = both(b)
    return b.mul(product(b, rows), b.reshape(numbers, [1, 16]))


@variant("S007")
def numbers_that_scale_unlike_matmuls(b: GraphBuilder) -> tuple[Node, Node]:
    """Their own scales are two tensors, so that one op computes one of them only."""
    rows, numbers = both(b)
    return b.mul(product(b, rows, "w0"), numbers), b.mul(product(b, rows, "w1"), numbers)


@variant("S007")
def numbers_that_scale_another_product_too(b: GraphBuilder) -> tuple[Node, Node]:
    rows, numbers = both(b)
    other = product(b, b.input("y", [16, 32], FP8), "v")
    return b.mul(product(b, rows), numbers), b.mul(other, numbers)


@variant("S007")
def numbers_beside_a_scale_that_travels(b: GraphBuilder) -> Node:
    """One set of numbers travels: the matmul's own."""
    rows, numbers = both(b)
    scale, w = b.gather(b.input("own_scale", [4, 1])), b.input("w", [32, 16], FP8, column_major=True)
    return b.mul(b.scaled_mm(rows, w, scale, b.input("b_scale", [1, 16])), numbers)


@variant("S007")
def numbers_that_are_returned_too(b: GraphBuilder) -> tuple[Node, Node]:
    rows, numbers = both(b)
    return b.mul(product(b, rows), numbers), b.relu(numbers)


@variant("S007")
def numbers_behind_an_operation_in_place(b: GraphBuilder) -> tuple[Node, Node]:
    rows = b.gather(b.input("x", [4, 32], FP8))
    scale, state = b.input("x_scale", [4, 1]), b.input("state", [4])
    first = product(b, rows)
    b.call(aten.add_.Tensor, state, 1.0)
    return b.mul(first, b.gather(scale)), state


@variant("F")
def numbers_of_a_product_that_is_computed_twice(b: GraphBuilder) -> tuple[Node, Node]:
    """Both products take the numbers, through one outer product."""
    rows, numbers = both(b)
    factor, one = outer(b, numbers), b.one()
    return b.mul(product(b, rows, "w0", one), factor), b.mul(product(b, rows, "w1", one), factor)


@variant("S007")
def numbers_that_the_weight_is_computed_from(b: GraphBuilder) -> Node:
    """The outer product scales the result, and the column scale of the same matmul is made from it: a cycle."""
    rows, numbers = both(b)
    factor = outer(b, numbers)
    column = b.call(aten.amax.default, factor, [0], True)
    w, one = b.input("w", [32, 16], FP8, column_major=True), b.call(aten.reciprocal.default, b.input("s", [4, 1]))
    row = b.call(aten.expand.default, b.call(aten.amax.default, one, [0], True), [16, 1])
    return b.mul(b.scaled_mm(rows, w, b.call(aten.clone.default, row), column), factor)


@variant("S002")
def a_gathered_activation_that_gates_a_product(b: GraphBuilder) -> Node:
    """As large as the product: no scale."""
    rows = b.gather(b.input("x", [4, 32], FP8))
    return b.mul(product(b, rows), b.gather(b.input("gate", [4, 16])))


@variant("S002")
def the_largest_of_a_gathered_activation(b: GraphBuilder) -> Node:
    rows, other = b.gather(b.input("x", [4, 32], FP8)), b.gather(b.input("y", [4, 64]))
    return b.mul(product(b, rows), b.call(aten.amax.default, other, [-1], True))


# --- one block of the contraction is one row ---------------------------------------------------------------------
@pytest.mark.parametrize("column_scale", [[1, 1], [1, 128]])
def test_scales_of_blocks_that_are_rowwise_are_fused_as_such(column_scale: list[int]) -> None:
    """K = 128: scales of 1x128 blocks are those of rows, whatever torch calls them, and travel with them."""

    def build(b: GraphBuilder) -> Node:
        rows, numbers = b.gather(b.input("x", [4, 128], FP8)), b.gather(b.input("x_scale", [4, 1]))
        w = b.input("w", [128, 128], FP8, column_major=True)
        return b.scaled_mm(rows, w, numbers, b.input("w_scale", column_scale))

    graph, original = graph_of(build), graph_of(build)
    assert outcomes(run_pass(graph)) == ["F", "F"]
    outs, wanted = (evaluate(one, inputs_of(one)) for one in (graph, original))
    for values, expected in zip(outs, wanted, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-2, atol=0)


def graph_of(build: Build) -> Graph:
    b = GraphBuilder()
    out = build(b)
    return b.returns(*(out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize(("outcome", "build"), VARIANTS, ids=[build.__name__ for _, build in VARIANTS])
def test_variants(outcome: str, build: Build) -> None:
    """The data's chain is fused in all of them, and the graph computes the same, to the bit."""
    graph, original = graph_of(build), graph_of(build)
    numbers = [node.name for node in graph.nodes if node.target is c10d.all_gather_into_tensor.default][1]
    remarks = {remark.collective: remark for remark in run_pass(graph).remarks}
    assert next(remark.outcome for name, remark in remarks.items() if name != numbers) == "FUSED"
    found = remarks[numbers]
    letter = {"FUSED": "F", "MISSED": "M"}.get(found.outcome, "S")
    assert letter + found.code.removeprefix("ATP") == outcome, found
    outs, wanted = (evaluate(one, inputs_of(one)) for one in (graph, original))
    for rank, values in enumerate(wanted):
        for out, value in zip(outs[rank], values, strict=True):
            assert torch.equal(out, value)


def inputs_of(graph: Graph) -> list[list[torch.Tensor]]:
    """For each of four ranks, tensors of its own like the graph's inputs, all scales positive."""
    values = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    ranks = []
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        made = [torch.rand(value.shape, generator=generator) + 0.5 for value in values]
        ranks.append([_like(tensor, value) for tensor, value in zip(made, values, strict=True)])
    return ranks


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    cast_to = tensor.to(value.dtype)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(cast_to)
