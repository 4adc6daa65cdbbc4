"""Reduce-scatters and all-reduces before and after the pass. `EXPECTTEST_ACCEPT=1` writes the expectations anew."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten
from rewritten import FP8, fp8_operands, fuse, rewritten
from torch.fx import Node


# --- scatter side ----------------------------------------------------------------------------------------------
def test_scatter_of_rows() -> None:
    b = GraphBuilder()
    a, w = b.input("a", [16, 8]), b.input("w", [8, 12])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.mm(a, w)))),
        """\
a: f32[16, 8]
w: f32[8, 12]
mm = mm(a, w)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(mm, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor)

=== becomes ===

a: f32[16, 8]
w: f32[8, 12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_middle_dimension() -> None:
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [3, 4, 8]), b.input("w", [8, 12])
    product = b.reshape(b.mm(b.reshape(a, [12, 8]), w), [3, 4, 12])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat(b.chunks(product, dim=1))))),
        """\
a: f32[3, 4, 8]
w: f32[8, 12]
reshape = reshape(a, [12, 8])  # f32[12, 8]
mm = mm(reshape, w)  # f32[12, 12]
reshape_1 = reshape(mm, [3, 4, 12])  # f32[3, 4, 12]
split = split(reshape_1, 2, 1)  # (f32[3, 2, 12]s[48, 12, 1], f32[3, 2, 12]s[48, 12, 1])
getitem = getitem(split, 0)  # f32[3, 2, 12]s[48, 12, 1]
getitem_1 = getitem(split, 1)  # f32[3, 2, 12]s[48, 12, 1]
cat = cat([getitem, getitem_1], 0)  # f32[6, 2, 12]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # f32[3, 2, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[3, 2, 12]
return (wait_tensor)

=== becomes ===

a: f32[3, 4, 8]
w: f32[8, 12]
reshape = reshape(a, [12, 8])  # f32[12, 8]
reshape_default = reshape(reshape, [3, 4, 8])  # f32[3, 4, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp')  # f32[3, 2, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_the_last_dimension() -> None:
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [6, 8]), b.input("w", [8, 12])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat(b.chunks(b.mm(a, w), dim=1))))),
        """\
a: f32[6, 8]
w: f32[8, 12]
mm = mm(a, w)  # f32[6, 12]
split = split(mm, 6, 1)  # (f32[6, 6]s[12, 1], f32[6, 6]s[12, 1])
getitem = getitem(split, 0)  # f32[6, 6]s[12, 1]
getitem_1 = getitem(split, 1)  # f32[6, 6]s[12, 1]
cat = cat([getitem, getitem_1], 0)  # f32[12, 6]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # f32[6, 6]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[6, 6]
return (wait_tensor)

=== becomes ===

a: f32[6, 8]
w: f32[8, 12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp')  # f32[6, 6]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_the_last_dimension_of_rows_that_move() -> None:
    """The collective takes the rows of each rank's columns in another order: the rows of A move instead."""
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [6, 8]), b.input("w", [8, 12])
    blocks = b.permute(b.reshape(b.mm(a, w), [3, 2, 2, 6]), [2, 1, 0, 3])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.reshape(blocks, [12, 6])))),
        """\
a: f32[6, 8]
w: f32[8, 12]
mm = mm(a, w)  # f32[6, 12]
reshape = reshape(mm, [3, 2, 2, 6])  # f32[3, 2, 2, 6]
permute = permute(reshape, [2, 1, 0, 3])  # f32[2, 2, 3, 6]s[6, 12, 24, 1]
reshape_1 = reshape(permute, [12, 6])  # f32[12, 6]
reduce_scatter_tensor = reduce_scatter_tensor(reshape_1, 'sum', 2, 'tp')  # f32[6, 6]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[6, 6]
return (wait_tensor)

=== becomes ===

a: f32[6, 8]
w: f32[8, 12]
reshape_default = reshape(a, [3, 2, 8])  # f32[3, 2, 8]
permute_default = permute(reshape_default, [1, 0, 2])  # f32[2, 3, 8]s[8, 16, 1]
reshape_default_1 = reshape(permute_default, [6, 8])  # f32[6, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default_1], b_parts=[w],
    biases=[None], reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp')  # f32[6, 6]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_sum_of_three() -> None:
    """The input gradient of a QKV projection."""
    b = GraphBuilder()
    pairs = [(b.input(f"a{index}", [16, 8]), b.input(f"w{index}", [8, 12])) for index in range(3)]
    q, k, v = (b.mm(a, w) for a, w in pairs)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.add(b.add(q, k), v)))),
        """\
a0: f32[16, 8]
w0: f32[8, 12]
a1: f32[16, 8]
w1: f32[8, 12]
a2: f32[16, 8]
w2: f32[8, 12]
mm = mm(a0, w0)  # f32[16, 12]
mm_1 = mm(a1, w1)  # f32[16, 12]
mm_2 = mm(a2, w2)  # f32[16, 12]
add = add(mm, mm_1)  # f32[16, 12]
add_1 = add(add, mm_2)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(add_1, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor)

=== becomes ===

a0: f32[16, 8]
w0: f32[8, 12]
a1: f32[16, 8]
w1: f32[8, 12]
a2: f32[16, 8]
w2: f32[8, 12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a0, a1, a2], b_parts=[w0, w1, w2],
    biases=[None, None, None], reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def typed(b: GraphBuilder, name: str, rows: int = 16, dynamic: int | None = None) -> Node:
    """A product of bf16."""
    a = b.input(f"a{name}", [rows, 8], torch.bfloat16, dynamic=dynamic)
    return b.mm(a, b.input(f"w{name}", [8, 12], torch.bfloat16))


def wide(b: GraphBuilder, x: Node) -> Node:
    return b.call(torch.ops.prims.convert_element_type.default, x, torch.float32)


def test_scatter_of_a_product_that_is_converted() -> None:
    """As in the backward of a column-parallel layer under autocast, along the sequence."""
    b = GraphBuilder()
    full = wide(b, b.reshape(typed(b, ""), [2, 8, 12]))
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat(b.chunks(full, 1))))),
        """\
a: bf16[16, 8]
w: bf16[8, 12]
mm = mm(a, w)  # bf16[16, 12]
reshape = reshape(mm, [2, 8, 12])  # bf16[2, 8, 12]
convert_element_type = convert_element_type(reshape, f32)  # f32[2, 8, 12]
split = split(convert_element_type, 2, 1)  # (f32[2, 2, 12]s[96, 12, 1], f32[2, 2, 12]s[96, 12, 1], f32[2, 2, 12]s[96,
    12, 1], f32[2, 2, 12]s[96, 12, 1])
getitem = getitem(split, 0)  # f32[2, 2, 12]s[96, 12, 1]
getitem_1 = getitem(split, 1)  # f32[2, 2, 12]s[96, 12, 1]
getitem_2 = getitem(split, 2)  # f32[2, 2, 12]s[96, 12, 1]
getitem_3 = getitem(split, 3)  # f32[2, 2, 12]s[96, 12, 1]
cat = cat([getitem, getitem_1, getitem_2, getitem_3], 0)  # f32[8, 2, 12]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 4, 'tp')  # f32[2, 2, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[2, 2, 12]
return (wait_tensor)

=== becomes ===

a: bf16[16, 8]
w: bf16[8, 12]
reshape_default = reshape(a, [2, 8, 8])  # bf16[2, 8, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=1, group_size=4, group_name='tp', sum_dtype=f32)  # f32[2, 2, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_sum_of_converted_products() -> None:
    b = GraphBuilder()
    total = b.add(wide(b, typed(b, "0")), wide(b, typed(b, "1")))
    assert_expected_inline(
        rewritten(b.returns(b.scatter(total))),
        """\
a0: bf16[16, 8]
w0: bf16[8, 12]
mm = mm(a0, w0)  # bf16[16, 12]
convert_element_type = convert_element_type(mm, f32)  # f32[16, 12]
a1: bf16[16, 8]
w1: bf16[8, 12]
mm_1 = mm(a1, w1)  # bf16[16, 12]
convert_element_type_1 = convert_element_type(mm_1, f32)  # f32[16, 12]
add = add(convert_element_type, convert_element_type_1)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(add, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor)

=== becomes ===

a0: bf16[16, 8]
w0: bf16[8, 12]
a1: bf16[16, 8]
w1: bf16[8, 12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a0, a1], b_parts=[w0, w1], biases=[None,
    None], reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp', sum_dtype=f32)  # f32[4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_all_reduce_of_a_converted_view() -> None:
    """The rows of A move, so that what travels is in the order of what the collective takes."""
    b = GraphBuilder()
    turned = wide(b, b.permute(b.reshape(typed(b, "", 24), [4, 6, 12]), [1, 0, 2]))
    copy_ = b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    assert_expected_inline(
        rewritten(b.returns(b.all_reduce(copy_))),
        """\
a: bf16[24, 8]
w: bf16[8, 12]
mm = mm(a, w)  # bf16[24, 12]
reshape = reshape(mm, [4, 6, 12])  # bf16[4, 6, 12]
permute = permute(reshape, [1, 0, 2])  # bf16[6, 4, 12]s[12, 72, 1]
convert_element_type = convert_element_type(permute, f32)  # f32[6, 4, 12]s[12, 72, 1]
clone = clone(convert_element_type, memory_format=torch.contiguous_format)  # f32[6, 4, 12]
all_reduce = all_reduce(clone, 'sum', 'tp')  # f32[6, 4, 12]
wait_tensor = wait_tensor(all_reduce)  # f32[6, 4, 12]
return (wait_tensor)

=== becomes ===

a: bf16[24, 8]
w: bf16[8, 12]
reshape_default = reshape(a, [4, 6, 8])  # bf16[4, 6, 8]
permute_default = permute(reshape_default, [1, 0, 2])  # bf16[6, 4, 8]s[8, 48, 1]
reshape_default_1 = reshape(permute_default, [24, 8])  # bf16[24, 8]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[reshape_default_1], b_parts=[w], biases=[None],
    reduce_op='sum', group_name='tp', sum_dtype=f32)  # f32[24, 12]
reshape_default_2 = reshape(matmul_all_reduce_default, [6, 4, 12])  # f32[6, 4, 12]
return (reshape_default_2)
""",
    )


def test_all_reduce_of_a_view_of_a_sum_that_lay_as_a_transposed_tensor() -> None:
    """The op's result does not lie in memory as that sum did: the view behind it copies."""
    b = GraphBuilder()
    total = b.add(b.input("x", [16, 12], column_major=True), wide(b, typed(b, "")))
    turned = b.call(aten.view.default, b.permute(total, [1, 0]), [4, 48])
    back = b.permute(b.call(aten.view.default, turned, [12, 16]), [1, 0])
    assert_expected_inline(
        rewritten(b.returns(b.all_reduce(back))),
        """\
x: f32[16, 12]s[1, 16]
a: bf16[16, 8]
w: bf16[8, 12]
mm = mm(a, w)  # bf16[16, 12]
convert_element_type = convert_element_type(mm, f32)  # f32[16, 12]
add = add(x, convert_element_type)  # f32[16, 12]s[1, 16]
permute = permute(add, [1, 0])  # f32[12, 16]
view = view(permute, [4, 48])  # f32[4, 48]
view_1 = view(view, [12, 16])  # f32[12, 16]
permute_1 = permute(view_1, [1, 0])  # f32[16, 12]s[1, 16]
all_reduce = all_reduce(permute_1, 'sum', 'tp')  # f32[16, 12]
wait_tensor = wait_tensor(all_reduce)  # f32[16, 12]
return (wait_tensor)

=== becomes ===

x: f32[16, 12]s[1, 16]
a: bf16[16, 8]
w: bf16[8, 12]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[a], b_parts=[w], biases=[None], reduce_op='sum',
    group_name='tp', sum_dtype=f32, added=x)  # f32[16, 12]
permute = permute(matmul_all_reduce_default, [1, 0])  # f32[12, 16]s[1, 12]
view = reshape(permute, [4, 48])  # f32[4, 48]
view_1 = reshape(view, [12, 16])  # f32[12, 16]
permute_1 = permute(view_1, [1, 0])  # f32[16, 12]s[1, 16]
clone_default = clone(permute_1, memory_format=torch.contiguous_format)  # f32[16, 12]
return (clone_default)
""",
    )


def test_scatter_of_a_product_and_routed_tokens() -> None:
    """As in a mixture of experts whose shared expert's output is a part of the sum."""
    b = GraphBuilder()
    tokens = b.call(aten.relu.default, b.input("tokens", [2, 8, 12], torch.bfloat16))
    total = b.call(aten.sub.Tensor, tokens, b.reshape(typed(b, ""), [2, 8, 12]))
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat(b.chunks(total, 1))))),
        """\
tokens: bf16[2, 8, 12]
relu = relu(tokens)  # bf16[2, 8, 12]
a: bf16[16, 8]
w: bf16[8, 12]
mm = mm(a, w)  # bf16[16, 12]
reshape = reshape(mm, [2, 8, 12])  # bf16[2, 8, 12]
sub = sub(relu, reshape)  # bf16[2, 8, 12]
split = split(sub, 2, 1)  # (bf16[2, 2, 12]s[96, 12, 1], bf16[2, 2, 12]s[96, 12, 1], bf16[2, 2, 12]s[96, 12, 1],
    bf16[2, 2, 12]s[96, 12, 1])
getitem = getitem(split, 0)  # bf16[2, 2, 12]s[96, 12, 1]
getitem_1 = getitem(split, 1)  # bf16[2, 2, 12]s[96, 12, 1]
getitem_2 = getitem(split, 2)  # bf16[2, 2, 12]s[96, 12, 1]
getitem_3 = getitem(split, 3)  # bf16[2, 2, 12]s[96, 12, 1]
cat = cat([getitem, getitem_1, getitem_2, getitem_3], 0)  # bf16[8, 2, 12]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 4, 'tp')  # bf16[2, 2, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # bf16[2, 2, 12]
return (wait_tensor)

=== becomes ===

tokens: bf16[2, 8, 12]
relu = relu(tokens)  # bf16[2, 8, 12]
a: bf16[16, 8]
w: bf16[8, 12]
reshape_default = reshape(a, [2, 8, 8])  # bf16[2, 8, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=1, group_size=4, group_name='tp', factors=[-1.0], added=relu)  # bf16[2, 2, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_all_reduce_of_a_converted_product_and_terms() -> None:
    """One of them in bf16, of symbolic size."""
    b = GraphBuilder()
    first = b.call(aten.relu.default, b.input("x", [24, 12], torch.bfloat16, dynamic=0))
    second = b.call(aten.relu.default, b.input("y", [24, 12], torch.float32, dynamic=0))
    total = b.add(wide(b, b.add(first, typed(b, "", 24, dynamic=0))), second)
    assert_expected_inline(
        rewritten(b.returns(b.all_reduce(total))),
        """\
x: bf16[s, 12]
relu = relu(x)  # bf16[s, 12]
y: f32[s, 12]
relu_1 = relu(y)  # f32[s, 12]
a: bf16[s, 8]
w: bf16[8, 12]
mm = mm(a, w)  # bf16[s, 12]
add = add(relu, mm)  # bf16[s, 12]
convert_element_type = convert_element_type(add, f32)  # f32[s, 12]
add_1 = add(convert_element_type, relu_1)  # f32[s, 12]
all_reduce = all_reduce(add_1, 'sum', 'tp')  # f32[s, 12]
wait_tensor = wait_tensor(all_reduce)  # f32[s, 12]
return (wait_tensor)

=== becomes ===

x: bf16[s, 12]
relu = relu(x)  # bf16[s, 12]
y: f32[s, 12]
relu_1 = relu(y)  # f32[s, 12]
a: bf16[s, 8]
w: bf16[8, 12]
convert_element_type_default = convert_element_type(relu, f32)  # f32[s, 12]
add_tensor = add(convert_element_type_default, relu_1)  # f32[s, 12]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[a], b_parts=[w], biases=[None], reduce_op='sum',
    group_name='tp', sum_dtype=f32, added=add_tensor)  # f32[s, 12]
return (matmul_all_reduce_default)
""",
    )


def test_what_is_added_to_products_is_reported() -> None:
    b = GraphBuilder()
    tokens = b.call(aten.relu.default, b.input("tokens", [16, 12], torch.bfloat16))
    (remark,) = fuse(b.returns(b.scatter(b.add(tokens, typed(b, ""))))).fused
    assert remark.message == "computed before, and added to the products: bf16[16, 12] of aten.relu.default"


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_sent_of_converted_products_is_reported(count: int) -> None:
    b = GraphBuilder()
    total = wide(b, typed(b, "0"))
    total = total if count == 1 else b.add(total, wide(b, typed(b, "1")))
    (remark,) = fuse(b.returns(b.scatter(total))).fused
    assert remark.comm_bytes == 3 * 4 * 12 * 4, "to 3 ranks, 4 x 12 of 4 bytes"
    assert remark.message == "each bf16[16, 12] is converted before it is sent, for f32[4, 12]"


def test_scatter_of_an_average_with_a_bias() -> None:
    b = GraphBuilder()
    a, w, bias = b.input("a", [16, 8]), b.input("w", [8, 12]), b.input("bias", [12])
    graph = b.returns(b.scatter(b.call(aten.addmm.default, bias, a, w), "avg"))
    assert_expected_inline(
        rewritten(graph),
        """\
a: f32[16, 8]
w: f32[8, 12]
bias: f32[12]
addmm = addmm(bias, a, w)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(addmm, 'avg', 4, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor)

=== becomes ===

a: f32[16, 8]
w: f32[8, 12]
bias: f32[12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[w], biases=[bias],
    reduce_op='avg', scatter_dim=0, group_size=4, group_name='tp')  # f32[4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_rowwise_scaled_matmul() -> None:
    """The scales get the rows' two dimensions, so that the op can scatter the inner one."""
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [12, 32], FP8), b.input("w", [32, 16], FP8, column_major=True)
    a_scale, b_scale = b.input("a_scale", [12, 1]), b.input("b_scale", [1, 16])
    product = b.reshape(b.scaled_mm(a, w, a_scale, b_scale), [3, 4, 16])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat(b.chunks(product, dim=1))))),
        """\
a: f8[12, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[12, 1]
b_scale: f32[1, 16]
_scaled_mm = _scaled_mm(a, w, a_scale, b_scale, out_dtype=bf16)  # bf16[12, 16]
reshape = reshape(_scaled_mm, [3, 4, 16])  # bf16[3, 4, 16]
split = split(reshape, 2, 1)  # (bf16[3, 2, 16]s[64, 16, 1], bf16[3, 2, 16]s[64, 16, 1])
getitem = getitem(split, 0)  # bf16[3, 2, 16]s[64, 16, 1]
getitem_1 = getitem(split, 1)  # bf16[3, 2, 16]s[64, 16, 1]
cat = cat([getitem, getitem_1], 0)  # bf16[6, 2, 16]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # bf16[3, 2, 16]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # bf16[3, 2, 16]
return (wait_tensor)

=== becomes ===

a: f8[12, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[12, 1]
b_scale: f32[1, 16]
reshape_default = reshape(a, [3, 4, 32])  # f8[3, 4, 32]
reshape_default_1 = reshape(a_scale, [3, 4, 1])  # f32[3, 4, 1]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp', a_scales=[reshape_default_1], b_scales=[b_scale],
    out_dtype=bf16, use_fast_accum=False)  # bf16[3, 2, 16]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_whose_result_is_returned_before_the_wait() -> None:
    """A reduce-scatter in flight that the graph returns is complete once it is fused."""
    b = GraphBuilder()
    a, w = b.input("a", [16, 8]), b.input("w", [8, 12])
    waited = b.scatter(b.mm(a, w))
    (unwaited,) = waited.all_input_nodes
    assert_expected_inline(
        rewritten(b.returns(waited, unwaited)),
        """\
a: f32[16, 8]
w: f32[8, 12]
mm = mm(a, w)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(mm, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor, reduce_scatter_tensor)

=== becomes ===

a: f32[16, 8]
w: f32[8, 12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[4, 12]
return (matmul_reduce_scatter_default, matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_scaled_matmul_whose_scales_come_after_it() -> None:
    """torchao's rowwise backward, of two matmuls: the scales are an outer product, applied in fp32."""
    b = GraphBuilder(ranks=2)
    one = b.call(aten.full.default, [], 1, dtype=torch.float32)
    terms = []
    for name in ("q", "k"):
        a, w = b.input(f"{name}_a", [12, 32], FP8), b.input(f"{name}_w", [32, 16], FP8, column_major=True)
        outer = b.call(aten.mul.Tensor, b.input(f"{name}_row", [12, 1]), b.input(f"{name}_column", [1, 16]))
        scaled = b.call(aten.mul.Tensor, b.scaled_mm(a, w, one, one), outer)
        rounded = b.call(torch.ops.prims.convert_element_type.default, scaled, torch.bfloat16)
        terms.append(b.reshape(rounded, [3, 4, 16]))
    graph = b.returns(b.scatter(b.cat(b.chunks(b.add(*terms), dim=1))))
    assert_expected_inline(
        rewritten(graph),
        """\
full = full([], 1, dtype=f32)  # f32[]
q_a: f8[12, 32]
q_w: f8[32, 16]s[1, 32]
q_row: f32[12, 1]
q_column: f32[1, 16]
mul = mul(q_row, q_column)  # f32[12, 16]
_scaled_mm = _scaled_mm(q_a, q_w, full, full, out_dtype=bf16)  # bf16[12, 16]
mul_1 = mul(_scaled_mm, mul)  # f32[12, 16]
convert_element_type = convert_element_type(mul_1, bf16)  # bf16[12, 16]
reshape = reshape(convert_element_type, [3, 4, 16])  # bf16[3, 4, 16]
k_a: f8[12, 32]
k_w: f8[32, 16]s[1, 32]
k_row: f32[12, 1]
k_column: f32[1, 16]
mul_2 = mul(k_row, k_column)  # f32[12, 16]
_scaled_mm_1 = _scaled_mm(k_a, k_w, full, full, out_dtype=bf16)  # bf16[12, 16]
mul_3 = mul(_scaled_mm_1, mul_2)  # f32[12, 16]
convert_element_type_1 = convert_element_type(mul_3, bf16)  # bf16[12, 16]
reshape_1 = reshape(convert_element_type_1, [3, 4, 16])  # bf16[3, 4, 16]
add = add(reshape, reshape_1)  # bf16[3, 4, 16]
split = split(add, 2, 1)  # (bf16[3, 2, 16]s[64, 16, 1], bf16[3, 2, 16]s[64, 16, 1])
getitem = getitem(split, 0)  # bf16[3, 2, 16]s[64, 16, 1]
getitem_1 = getitem(split, 1)  # bf16[3, 2, 16]s[64, 16, 1]
cat = cat([getitem, getitem_1], 0)  # bf16[6, 2, 16]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # bf16[3, 2, 16]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # bf16[3, 2, 16]
return (wait_tensor)

=== becomes ===

q_a: f8[12, 32]
q_w: f8[32, 16]s[1, 32]
q_row: f32[12, 1]
q_column: f32[1, 16]
k_a: f8[12, 32]
k_w: f8[32, 16]s[1, 32]
k_row: f32[12, 1]
k_column: f32[1, 16]
reshape_default = reshape(q_a, [3, 4, 32])  # f8[3, 4, 32]
reshape_default_1 = reshape(k_a, [3, 4, 32])  # f8[3, 4, 32]
reshape_default_2 = reshape(q_row, [3, 4, 1])  # f32[3, 4, 1]
reshape_default_3 = reshape(k_row, [3, 4, 1])  # f32[3, 4, 1]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default, reshape_default_1],
    b_parts=[q_w, k_w], biases=[None, None], reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp',
    a_scales=[reshape_default_2, reshape_default_3], b_scales=[q_column, k_column], out_dtype=bf16,
    use_fast_accum=False)  # bf16[3, 2, 16]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_product_padded_over_the_contraction() -> None:
    """What Inductor's `pad_mm` adds are zeros to the sum; the padding stays, of operands of the fused op."""
    b = GraphBuilder()
    a, w = b.input("a", [16, 6]), b.input("w", [6, 12])
    pad = aten.constant_pad_nd.default
    graph = b.returns(b.scatter(b.mm(b.call(pad, a, [0, 2]), b.call(pad, w, [0, 0, 0, 2]))))
    assert_expected_inline(
        rewritten(graph),
        """\
a: f32[16, 6]
w: f32[6, 12]
constant_pad_nd = constant_pad_nd(a, [0, 2])  # f32[16, 8]
constant_pad_nd_1 = constant_pad_nd(w, [0, 0, 0, 2])  # f32[8, 12]
mm = mm(constant_pad_nd, constant_pad_nd_1)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(mm, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor)

=== becomes ===

a: f32[16, 6]
w: f32[6, 12]
constant_pad_nd = constant_pad_nd(a, [0, 2])  # f32[16, 8]
constant_pad_nd_1 = constant_pad_nd(w, [0, 0, 0, 2])  # f32[8, 12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[constant_pad_nd], b_parts=[constant_pad_nd_1],
    biases=[None], reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[4, 12]
return (matmul_reduce_scatter_default)
""",
    )


# --- padded products --------------------------------------------------------------------------------------------
def zeros(b: GraphBuilder, shape: Sequence[Any]) -> Node:
    return b.call(aten.full.default, list(shape), 0, dtype=torch.float32)


def test_scatter_of_a_padded_product() -> None:
    """15 rows on four ranks: the op multiplies a 16th row, and each rank sets to zero what is padding in its block."""
    b = GraphBuilder()
    a, w = b.input("a", [15, 8]), b.input("w", [8, 12])
    padded = b.call(aten.constant_pad_nd.default, b.mm(a, w), [0, 0, 0, 1])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(padded))),
        """\
a: f32[15, 8]
w: f32[8, 12]
mm = mm(a, w)  # f32[15, 12]
constant_pad_nd = constant_pad_nd(mm, [0, 0, 0, 1])  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(constant_pad_nd, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor)

=== becomes ===

a: f32[15, 8]
w: f32[8, 12]
constant_pad_nd_default = constant_pad_nd(a, [0, 0, 0, 1], 0)  # f32[16, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[constant_pad_nd_default], b_parts=[w],
    biases=[None], reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp', real_rows=15)  # f32[4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_product_joined_with_zeros() -> None:
    """With a residual, which is padded beside."""
    b = GraphBuilder()
    a, w, other = b.input("a", [15, 8]), b.input("w", [8, 12]), b.input("other", [15, 12])
    product = b.add(b.mm(a, w), other)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat([product, zeros(b, [1, 12])])))),
        """\
a: f32[15, 8]
w: f32[8, 12]
other: f32[15, 12]
mm = mm(a, w)  # f32[15, 12]
add = add(mm, other)  # f32[15, 12]
full = full([1, 12], 0, dtype=f32)  # f32[1, 12]
cat = cat([add, full], 0)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor)

=== becomes ===

a: f32[15, 8]
w: f32[8, 12]
other: f32[15, 12]
constant_pad_nd_default = constant_pad_nd(a, [0, 0, 0, 1], 0)  # f32[16, 8]
constant_pad_nd_default_1 = constant_pad_nd(other, [0, 0, 0, 1], 0)  # f32[16, 12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[constant_pad_nd_default], b_parts=[w],
    biases=[None], reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp', added=constant_pad_nd_default_1,
    real_rows=15)  # f32[4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_product_written_into_zeros() -> None:
    """A batch, padded and scattered along the sequence."""
    b = GraphBuilder(ranks=2)
    a, w, whole = b.input("a", [21, 8]), b.input("w", [8, 12]), zeros(b, [3, 8, 12])
    part = b.call(aten.slice.Tensor, whole, 1, 0, 7)
    written = b.call(aten.copy.default, part, b.reshape(b.mm(a, w), [3, 7, 12]))
    padded = b.call(aten.slice_scatter.default, whole, written, 1, 0, 7)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat(b.chunks(padded, dim=1))))),
        """\
a: f32[21, 8]
w: f32[8, 12]
full = full([3, 8, 12], 0, dtype=f32)  # f32[3, 8, 12]
slice_1 = slice(full, 1, 0, 7)  # f32[3, 7, 12]s[96, 12, 1]
mm = mm(a, w)  # f32[21, 12]
reshape = reshape(mm, [3, 7, 12])  # f32[3, 7, 12]
copy = copy(slice_1, reshape)  # f32[3, 7, 12]s[96, 12, 1]
slice_scatter = slice_scatter(full, copy, 1, 0, 7)  # f32[3, 8, 12]
split = split(slice_scatter, 4, 1)  # (f32[3, 4, 12]s[96, 12, 1], f32[3, 4, 12]s[96, 12, 1])
getitem = getitem(split, 0)  # f32[3, 4, 12]s[96, 12, 1]
getitem_1 = getitem(split, 1)  # f32[3, 4, 12]s[96, 12, 1]
cat = cat([getitem, getitem_1], 0)  # f32[6, 4, 12]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # f32[3, 4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[3, 4, 12]
return (wait_tensor)

=== becomes ===

a: f32[21, 8]
w: f32[8, 12]
reshape_default = reshape(a, [3, 7, 8])  # f32[3, 7, 8]
constant_pad_nd_default = constant_pad_nd(reshape_default, [0, 0, 0, 1], 0)  # f32[3, 8, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[constant_pad_nd_default], b_parts=[w],
    biases=[None], reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp', real_rows=7)  # f32[3, 4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_uneven_shards() -> None:
    """As DTensor pads them: the last piece of the product alone."""
    b = GraphBuilder(ranks=2)
    split = b.call(aten.split.Tensor, b.mm(b.input("a", [7, 8]), b.input("w", [8, 12])), 4)
    first, last = (b.call(operator.getitem, split, index) for index in range(2))
    padded = b.call(aten.constant_pad_nd.default, last, [0, 0, 0, 1])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat([first, padded])))),
        """\
a: f32[7, 8]
w: f32[8, 12]
mm = mm(a, w)  # f32[7, 12]
split = split(mm, 4)  # (f32[4, 12], f32[3, 12])
getitem = getitem(split, 0)  # f32[4, 12]
getitem_1 = getitem(split, 1)  # f32[3, 12]
constant_pad_nd = constant_pad_nd(getitem_1, [0, 0, 0, 1])  # f32[4, 12]
cat = cat([getitem, constant_pad_nd], 0)  # f32[8, 12]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # f32[4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor)

=== becomes ===

a: f32[7, 8]
w: f32[8, 12]
constant_pad_nd_default = constant_pad_nd(a, [0, 0, 0, 1], 0)  # f32[8, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[constant_pad_nd_default], b_parts=[w],
    biases=[None], reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp', real_rows=7)  # f32[4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_padded_product_of_any_number_of_rows() -> None:
    b = GraphBuilder()
    a, w = b.input("a", [15, 8], dynamic=0), b.input("w", [8, 12])
    more = b.call(operator.mod, b.call(operator.neg, b.call(aten.sym_size.int, a, 0)), 4)
    padded = b.call(aten.constant_pad_nd.default, b.mm(a, w), [0, 0, 0, more])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(padded))),
        """\
a: f32[s, 8]
w: f32[8, 12]
sym_size = sym_size(a, 0)  # s
neg = neg(sym_size)  # -s
mod = mod(neg, 4)  # PythonMod(-s, 4)
mm = mm(a, w)  # f32[s, 12]
constant_pad_nd = constant_pad_nd(mm, [0, 0, 0, mod])  # f32[s + (PythonMod(-s, 4)), 12]
reduce_scatter_tensor = reduce_scatter_tensor(constant_pad_nd, 'sum', 4, 'tp')  # f32[((s + (PythonMod(-s,
    4)))//4), 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[((s + (PythonMod(-s, 4)))//4), 12]
return (wait_tensor)

=== becomes ===

a: f32[s, 8]
w: f32[8, 12]
sym_size = sym_size(a, 0)  # s
neg = neg(sym_size)  # -s
mod = mod(neg, 4)  # PythonMod(-s, 4)
sym_size_int = sym_size(a, 0)  # s
mul = mul(sym_size_int, -1)  # -s
mod_1 = mod(mul, 4)  # PythonMod(-s, 4)
constant_pad_nd_default = constant_pad_nd(a, [0, 0, 0, mod_1], 0)  # f32[s + (PythonMod(-s, 4)), 8]
sym_size_int_1 = sym_size(a, 0)  # s
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[constant_pad_nd_default], b_parts=[w],
    biases=[None], reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp', real_rows=sym_size_int_1)  #
    f32[((s + (PythonMod(-s, 4)))//4), 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_padded_product_with_scales_of_rows() -> None:
    """fp8 operands are padded as bytes, and scales too."""
    b = GraphBuilder(ranks=2)
    x, w = fp8_operands(b, 7, 32, 16)
    product = b.scaled_mm(x, w, b.input("a_scale", [7, 1]), b.input("b_scale", [1, 16]))
    padded = b.call(aten.constant_pad_nd.default, product, [0, 0, 0, 1])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(padded))),
        """\
x: f8[7, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[7, 1]
b_scale: f32[1, 16]
_scaled_mm = _scaled_mm(x, w, a_scale, b_scale, out_dtype=bf16)  # bf16[7, 16]
constant_pad_nd = constant_pad_nd(_scaled_mm, [0, 0, 0, 1])  # bf16[8, 16]
reduce_scatter_tensor = reduce_scatter_tensor(constant_pad_nd, 'sum', 2, 'tp')  # bf16[4, 16]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # bf16[4, 16]
return (wait_tensor)

=== becomes ===

x: f8[7, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[7, 1]
b_scale: f32[1, 16]
view_dtype = view(x, u8)  # u8[7, 32]
constant_pad_nd_default = constant_pad_nd(view_dtype, [0, 0, 0, 1], 0)  # u8[8, 32]
view_dtype_1 = view(constant_pad_nd_default, f8)  # f8[8, 32]
constant_pad_nd_default_1 = constant_pad_nd(a_scale, [0, 0, 0, 1], 0)  # f32[8, 1]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[view_dtype_1], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp', a_scales=[constant_pad_nd_default_1],
    b_scales=[b_scale], out_dtype=bf16, use_fast_accum=False, real_rows=7)  # bf16[4, 16]
return (matmul_reduce_scatter_default)
""",
    )


# --- all-reduces -----------------------------------------------------------------------------------------------
def test_all_reduce() -> None:
    """The op is not told how many ranks there are: its result is as large as the product."""
    b = GraphBuilder()
    a, w, bias = b.input("a", [2, 3, 8]), b.input("w", [8, 12]), b.input("bias", [12])
    product = b.call(aten.addmm.default, bias, b.reshape(a, [6, 8]), w)
    assert_expected_inline(
        rewritten(b.returns(b.all_reduce(b.reshape(product, [2, 3, 12])))),
        """\
a: f32[2, 3, 8]
w: f32[8, 12]
bias: f32[12]
reshape = reshape(a, [6, 8])  # f32[6, 8]
addmm = addmm(bias, reshape, w)  # f32[6, 12]
reshape_1 = reshape(addmm, [2, 3, 12])  # f32[2, 3, 12]
all_reduce = all_reduce(reshape_1, 'sum', 'tp')  # f32[2, 3, 12]
wait_tensor = wait_tensor(all_reduce)  # f32[2, 3, 12]
return (wait_tensor)

=== becomes ===

a: f32[2, 3, 8]
w: f32[8, 12]
bias: f32[12]
reshape = reshape(a, [6, 8])  # f32[6, 8]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[reshape], b_parts=[w], biases=[bias], reduce_op='sum',
    group_name='tp')  # f32[6, 12]
reshape_1 = reshape(matmul_all_reduce_default, [2, 3, 12])  # f32[2, 3, 12]
return (reshape_1)
""",
    )


def test_scatter_of_dynamic_columns() -> None:
    """Each dynamic size is known to be a multiple of the ranks if a guard says so, not only the graph's first."""
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [6, 8], dynamic=0), b.input("w", [8, 12], dynamic=1)
    assert w.meta["val"].shape[1] % 2 == 0  # the guard, which the collective's own check makes
    half = b.call(operator.floordiv, b.call(aten.sym_size.int, w, 1), 2)
    pieces = b.call(aten.split.Tensor, b.mm(a, w), half, 1)
    whole = b.cat([b.call(operator.getitem, pieces, index) for index in (0, 1)])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(whole))),
        """\
a: f32[s, 8]
w: f32[8, s]
sym_size = sym_size(w, 1)  # s
floordiv = floordiv(sym_size, 2)  # (s//2)
mm = mm(a, w)  # f32[s, s]
split = split(mm, floordiv, 1)  # (f32[s, (s//2)]s[s, 1], f32[s, s - ((s//2))]s[s, 1])
getitem = getitem(split, 0)  # f32[s, (s//2)]s[s, 1]
getitem_1 = getitem(split, 1)  # f32[s, s - ((s//2))]s[s, 1]
cat = cat([getitem, getitem_1], 0)  # f32[2*s, (s//2)]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # f32[s, (s//2)]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[s, (s//2)]
return (wait_tensor)

=== becomes ===

a: f32[s, 8]
w: f32[8, s]
sym_size = sym_size(w, 1)  # s
floordiv = floordiv(sym_size, 2)  # (s//2)
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp')  # f32[s, (s//2)]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_dynamic_rows() -> None:
    """A functional collective makes no guard, and the op that replaces it checks what that would have."""
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [6, 8], dynamic=0), b.input("w", [8, 12])
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.mm(a, w)))),
        """\
a: f32[s, 8]
w: f32[8, 12]
mm = mm(a, w)  # f32[s, 12]
reduce_scatter_tensor = reduce_scatter_tensor(mm, 'sum', 2, 'tp')  # f32[(s//2), 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[(s//2), 12]
return (wait_tensor)

=== becomes ===

a: f32[s, 8]
w: f32[8, 12]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp')  # f32[(s//2), 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_all_reduce_of_a_sum_in_a_view() -> None:
    """The views of the first term stay, behind the op; what is read of sizes is read off the inputs."""
    b = GraphBuilder()
    a, w = b.input("a", [24, 8], dynamic=0), b.input("w", [8, 12])
    terms = [b.call(aten.unsqueeze.default, b.mm(x, w), 1) for x in (a, b.relu(a))]
    total = b.call(aten.clone.default, b.add(*terms), memory_format=torch.contiguous_format)
    length = b.call(aten.sym_size.int, total, 0)
    assert_expected_inline(
        rewritten(b.returns(b.all_reduce(total, "avg"), length)),
        """\
a: f32[s, 8]
w: f32[8, 12]
relu = relu(a)  # f32[s, 8]
mm = mm(a, w)  # f32[s, 12]
unsqueeze = unsqueeze(mm, 1)  # f32[s, 1, 12]
mm_1 = mm(relu, w)  # f32[s, 12]
unsqueeze_1 = unsqueeze(mm_1, 1)  # f32[s, 1, 12]
add = add(unsqueeze, unsqueeze_1)  # f32[s, 1, 12]
clone = clone(add, memory_format=torch.contiguous_format)  # f32[s, 1, 12]
sym_size = sym_size(clone, 0)  # s
all_reduce = all_reduce(clone, 'avg', 'tp')  # f32[s, 1, 12]
wait_tensor = wait_tensor(all_reduce)  # f32[s, 1, 12]
return (wait_tensor, sym_size)

=== becomes ===

a: f32[s, 8]
w: f32[8, 12]
relu = relu(a)  # f32[s, 8]
sym_size_int = sym_size(a, 0)  # s
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[a, relu], b_parts=[w, w], biases=[None, None],
    reduce_op='avg', group_name='tp')  # f32[s, 12]
unsqueeze = unsqueeze(matmul_all_reduce_default, 1)  # f32[s, 1, 12]
clone = clone(unsqueeze, memory_format=torch.contiguous_format)  # f32[s, 1, 12]
return (clone, sym_size_int)
""",
    )


def test_all_reduce_of_a_scaled_matmul() -> None:
    b = GraphBuilder()
    a, w = fp8_operands(b, 6, 32, 16)
    a_scale, b_scale = b.input("a_scale", [6, 1]), b.input("b_scale", [1, 16])
    product = b.scaled_mm(a, w, a_scale, b_scale, use_fast_accum=True)
    assert_expected_inline(
        rewritten(b.returns(b.all_reduce(product))),
        """\
x: f8[6, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[6, 1]
b_scale: f32[1, 16]
_scaled_mm = _scaled_mm(x, w, a_scale, b_scale, out_dtype=bf16, use_fast_accum=True)  # bf16[6, 16]
all_reduce = all_reduce(_scaled_mm, 'sum', 'tp')  # bf16[6, 16]
wait_tensor = wait_tensor(all_reduce)  # bf16[6, 16]
return (wait_tensor)

=== becomes ===

x: f8[6, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[6, 1]
b_scale: f32[1, 16]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[x], b_parts=[w], biases=[None], reduce_op='sum',
    group_name='tp', a_scales=[a_scale], b_scales=[b_scale], out_dtype=bf16, use_fast_accum=True)  # bf16[6, 16]
return (matmul_all_reduce_default)
""",
    )


def test_all_reduce_of_int8_weights_with_a_scale_of_each_column() -> None:
    """torchao's weight-only linear: the product of bf16 is scaled in the fused op, by numbers of fp32."""
    b = GraphBuilder(ranks=2)
    x, w, scale = b.input("x", [6, 32], torch.bfloat16), b.input("w", [16, 32], torch.int8), b.input("scale", [16, 1])
    convert = torch.ops.prims.convert_element_type.default
    product = b.mm(x, b.call(convert, b.permute(w, [1, 0]), torch.bfloat16))
    scaled = b.mul(product, b.reshape(b.call(convert, scale, torch.bfloat16), [16]))
    assert_expected_inline(
        rewritten(b.returns(b.all_reduce(b.reshape(scaled, [2, 3, 16])))),
        """\
x: bf16[6, 32]
w: int8[16, 32]
scale: f32[16, 1]
permute = permute(w, [1, 0])  # int8[32, 16]s[1, 32]
convert_element_type = convert_element_type(permute, bf16)  # bf16[32, 16]s[1, 32]
mm = mm(x, convert_element_type)  # bf16[6, 16]
convert_element_type_1 = convert_element_type(scale, bf16)  # bf16[16, 1]
reshape = reshape(convert_element_type_1, [16])  # bf16[16]
mul = mul(mm, reshape)  # bf16[6, 16]
reshape_1 = reshape(mul, [2, 3, 16])  # bf16[2, 3, 16]
all_reduce = all_reduce(reshape_1, 'sum', 'tp')  # bf16[2, 3, 16]
wait_tensor = wait_tensor(all_reduce)  # bf16[2, 3, 16]
return (wait_tensor)

=== becomes ===

x: bf16[6, 32]
w: int8[16, 32]
scale: f32[16, 1]
permute = permute(w, [1, 0])  # int8[32, 16]s[1, 32]
convert_element_type = convert_element_type(permute, bf16)  # bf16[32, 16]s[1, 32]
convert_element_type_1 = convert_element_type(scale, bf16)  # bf16[16, 1]
reshape = reshape(convert_element_type_1, [16])  # bf16[16]
full_default = full([], 1.0, dtype=f32, device=cpu)  # f32[]
convert_element_type_default = convert_element_type(reshape, f32)  # f32[16]
reshape_default = reshape(convert_element_type_default, [1, 16])  # f32[1, 16]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[x], b_parts=[convert_element_type], biases=[None],
    reduce_op='sum', group_name='tp', a_scales=[full_default], b_scales=[reshape_default], out_dtype=bf16,
    use_fast_accum=False)  # bf16[6, 16]
reshape_1 = reshape(matmul_all_reduce_default, [2, 3, 16])  # bf16[2, 3, 16]
return (reshape_1)
""",
    )


def test_scatter_of_int8_activations_and_weights() -> None:
    """torchao's W8A8: products of int8 are exact in int32, then come the scales of rows and columns."""
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [6, 32], torch.int8), b.input("w", [16, 32], torch.int8)
    convert = torch.ops.prims.convert_element_type.default
    product = b.call(convert, b.call(aten._int_mm.default, a, b.permute(w, [1, 0])), torch.float32)
    by_rows = b.call(convert, b.mul(product, b.input("rows", [6, 1])), torch.bfloat16)
    scaled = b.call(convert, b.mul(by_rows, b.input("columns", [16])), torch.bfloat16)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(scaled))),
        """\
a: int8[6, 32]
w: int8[16, 32]
permute = permute(w, [1, 0])  # int8[32, 16]s[1, 32]
_int_mm = _int_mm(a, permute)  # int32[6, 16]
convert_element_type = convert_element_type(_int_mm, f32)  # f32[6, 16]
rows: f32[6, 1]
mul = mul(convert_element_type, rows)  # f32[6, 16]
convert_element_type_1 = convert_element_type(mul, bf16)  # bf16[6, 16]
columns: f32[16]
mul_1 = mul(convert_element_type_1, columns)  # f32[6, 16]
convert_element_type_2 = convert_element_type(mul_1, bf16)  # bf16[6, 16]
reduce_scatter_tensor = reduce_scatter_tensor(convert_element_type_2, 'sum', 2, 'tp')  # bf16[3, 16]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # bf16[3, 16]
return (wait_tensor)

=== becomes ===

a: int8[6, 32]
w: int8[16, 32]
permute = permute(w, [1, 0])  # int8[32, 16]s[1, 32]
rows: f32[6, 1]
columns: f32[16]
reshape_default = reshape(columns, [1, 16])  # f32[1, 16]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[permute], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp', a_scales=[rows], b_scales=[reshape_default],
    out_dtype=bf16, use_fast_accum=False)  # bf16[3, 16]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_gated_product_and_routed_tokens() -> None:
    """A shared expert with a gate of rows: the gate is a scale of rows, and the routed tokens are added."""
    b = GraphBuilder(ranks=2)
    gate = b.call(aten.sigmoid.default, b.input("gate", [6, 1]))
    gated = b.mul(b.mm(b.input("hidden", [6, 8]), b.input("down", [8, 16])), gate)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.add(b.relu(b.input("routed", [6, 16])), gated)))),
        """\
gate: f32[6, 1]
sigmoid = sigmoid(gate)  # f32[6, 1]
hidden: f32[6, 8]
down: f32[8, 16]
mm = mm(hidden, down)  # f32[6, 16]
mul = mul(mm, sigmoid)  # f32[6, 16]
routed: f32[6, 16]
relu = relu(routed)  # f32[6, 16]
add = add(relu, mul)  # f32[6, 16]
reduce_scatter_tensor = reduce_scatter_tensor(add, 'sum', 2, 'tp')  # f32[3, 16]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[3, 16]
return (wait_tensor)

=== becomes ===

gate: f32[6, 1]
sigmoid = sigmoid(gate)  # f32[6, 1]
hidden: f32[6, 8]
down: f32[8, 16]
routed: f32[6, 16]
relu = relu(routed)  # f32[6, 16]
full_default = full([], 1.0, dtype=f32, device=cpu)  # f32[]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[hidden], b_parts=[down], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp', a_scales=[sigmoid], b_scales=[full_default],
    out_dtype=f32, use_fast_accum=False, added=relu)  # f32[3, 16]
return (matmul_reduce_scatter_default)
""",
    )
