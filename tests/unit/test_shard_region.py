"""Row-wise computation between a gather and a matmul moves to the shard: the graphs, and what is said of them.

`EXPECTTEST_ACCEPT=1` writes the expected graphs anew.
"""

from __future__ import annotations

import operator
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, c10d
from lockstep import differences, evaluate
from passes import run_pass
from quantized_graphs import FP8, _values, cast, fuse, quantize, rewritten, weight
from torch.fx import Graph, Node

from asynctp_passes import Remark
from asynctp_passes.planning import cost_model


# --- what becomes of graphs ----------------------------------------------------------------------------------
def test_quantized_rows_and_their_scales_travel() -> None:
    b = GraphBuilder(ranks=2)
    x, (w, w_scale) = b.input("x", [3, 4, 32], torch.bfloat16), weight(b)
    rows, scale = quantize(b, b.cat(b.chunks(b.gather(x)), dim=1))
    out = b.scaled_mm(b.reshape(rows, [24, 32]), w, b.reshape(scale, [24, 1]), w_scale)
    assert_expected_inline(
        rewritten(b.returns(out)),
        """\
x: bf16[3, 4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # bf16[6, 4, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[6, 4, 32]
split = split(wait_tensor, 3, 0)  # (bf16[3, 4, 32], bf16[3, 4, 32])
getitem = getitem(split, 0)  # bf16[3, 4, 32]
getitem_1 = getitem(split, 1)  # bf16[3, 4, 32]
cat = cat([getitem, getitem_1], 1)  # bf16[3, 8, 32]
abs_1 = abs(cat)  # bf16[3, 8, 32]
amax = amax(abs_1, [-1], True)  # bf16[3, 8, 1]
div = div(amax, 448.0)  # bf16[3, 8, 1]
convert_element_type = convert_element_type(div, f32)  # f32[3, 8, 1]
convert_element_type_1 = convert_element_type(cat, f32)  # f32[3, 8, 32]
div_1 = div(convert_element_type_1, convert_element_type)  # f32[3, 8, 32]
convert_element_type_2 = convert_element_type(div_1, f8)  # f8[3, 8, 32]
reshape = reshape(convert_element_type_2, [24, 32])  # f8[24, 32]
reshape_1 = reshape(convert_element_type, [24, 1])  # f32[24, 1]
_scaled_mm = _scaled_mm(reshape, w, reshape_1, w_scale, out_dtype=bf16)  # bf16[24, 16]
return (_scaled_mm)

=== becomes ===

x: bf16[3, 4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
abs_default = abs(x)  # bf16[3, 4, 32]
amax_default = amax(abs_default, [-1], True)  # bf16[3, 4, 1]
div_tensor = div(amax_default, 448.0)  # bf16[3, 4, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[3, 4, 1]
convert_element_type_default_1 = convert_element_type(x, f32)  # f32[3, 4, 32]
div_tensor_1 = div(convert_element_type_default_1, convert_element_type_default)  # f32[3, 4, 32]
convert_element_type_default_2 = convert_element_type(div_tensor_1, f8)  # f8[3, 4, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default_2, bs=[w], biases=[None],
    gather_dim=1, return_a_full=False, group_size=2, group_name='tp', a_scale=convert_element_type_default,
    b_scales=[w_scale], gather_a_scale=True, out_dtype=bf16, use_fast_accum=False)  # (bf16[3, 8, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # bf16[3, 8, 16]
reshape_default = reshape(getitem_2, [24, 16])  # bf16[24, 16]
return (reshape_default)

computed on the shard and gathered: f8e4m3[3, 8, 32] (384 bytes) and f32[3, 8, 1] (48 bytes); the gather of
bf16[6, 4, 32] (768 bytes) is gone
""",
    )


def test_the_gather_stays_for_the_weight_gradient() -> None:
    """Its wait, and the copy that other users take, come as late as those users do."""
    b = GraphBuilder(ranks=2)
    x, (w, w_scale) = b.input("x", [4, 32], torch.bfloat16), weight(b)
    whole = b.gather(x)
    columns = b.permute(whole, [1, 0])
    rows, scale = quantize(b, whole)
    out = b.relu(b.scaled_mm(rows, w, scale, w_scale))
    gradient = b.mm(columns, b.input("y", [8, 8], torch.bfloat16))
    assert_expected_inline(
        rewritten(b.returns(out, gradient)),
        """\
x: bf16[4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # bf16[8, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[8, 32]
permute = permute(wait_tensor, [1, 0])  # bf16[32, 8]s[1, 32]
abs_1 = abs(wait_tensor)  # bf16[8, 32]
amax = amax(abs_1, [-1], True)  # bf16[8, 1]
div = div(amax, 448.0)  # bf16[8, 1]
convert_element_type = convert_element_type(div, f32)  # f32[8, 1]
convert_element_type_1 = convert_element_type(wait_tensor, f32)  # f32[8, 32]
div_1 = div(convert_element_type_1, convert_element_type)  # f32[8, 32]
convert_element_type_2 = convert_element_type(div_1, f8)  # f8[8, 32]
_scaled_mm = _scaled_mm(convert_element_type_2, w, convert_element_type, w_scale, out_dtype=bf16)  # bf16[8, 16]
relu = relu(_scaled_mm)  # bf16[8, 16]
y: bf16[8, 8]
mm = mm(permute, y)  # bf16[32, 8]
return (relu, mm)

=== becomes ===

x: bf16[4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
abs_default = abs(x)  # bf16[4, 32]
amax_default = amax(abs_default, [-1], True)  # bf16[4, 1]
div_tensor = div(amax_default, 448.0)  # bf16[4, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[4, 1]
convert_element_type_default_1 = convert_element_type(x, f32)  # f32[4, 32]
div_tensor_1 = div(convert_element_type_default_1, convert_element_type_default)  # f32[4, 32]
convert_element_type_default_2 = convert_element_type(div_tensor_1, f8)  # f8[4, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default_2, bs=[w], biases=[None],
    gather_dim=0, return_a_full=False, group_size=2, group_name='tp', a_scale=convert_element_type_default,
    b_scales=[w_scale], gather_a_scale=True, out_dtype=bf16, use_fast_accum=False)  # (bf16[8, 16])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[8, 16]
all_gather_into_tensor = asynctp::all_gather(shard=x, group_size=2, group_name='tp', copy=False)  # bf16[8, 32]
relu = relu(getitem)  # bf16[8, 16]
y: bf16[8, 8]
wait_tensor = asynctp::wait(result=all_gather_into_tensor, source=x)  # bf16[8, 32]
permute = permute(wait_tensor, [1, 0])  # bf16[32, 8]s[1, 32]
mm = mm(permute, y)  # bf16[32, 8]
return (relu, mm)

computed on the shard and gathered: f8e4m3[8, 32] (128 bytes) and f32[8, 1] (16 bytes); the gather of bf16[8,
32] (256 bytes) stays for mm, and is waited for after the fused op
""",
    )


def test_scales_used_after_the_matmul_travel_along() -> None:
    """What torchao's backward does. The scales start before the large gather, so that they do not queue behind it."""
    b = GraphBuilder(ranks=2)
    x, (w, w_scale) = b.input("x", [3, 4, 32], torch.bfloat16), weight(b)
    whole = b.reshape(b.cat(b.chunks(b.gather(x)), dim=1), [24, 32])
    rows, scale = quantize(b, whole)
    outer, one = b.call(aten.mul.Tensor, scale, w_scale), b.one()
    out = b.call(aten.mul.Tensor, b.scaled_mm(rows, w, one, one), outer)
    assert_expected_inline(
        rewritten(b.returns(out, b.call(aten.sum.dim_IntList, whole, [0]))),
        """\
x: bf16[3, 4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # bf16[6, 4, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[6, 4, 32]
split = split(wait_tensor, 3, 0)  # (bf16[3, 4, 32], bf16[3, 4, 32])
getitem = getitem(split, 0)  # bf16[3, 4, 32]
getitem_1 = getitem(split, 1)  # bf16[3, 4, 32]
cat = cat([getitem, getitem_1], 1)  # bf16[3, 8, 32]
reshape = reshape(cat, [24, 32])  # bf16[24, 32]
abs_1 = abs(reshape)  # bf16[24, 32]
amax = amax(abs_1, [-1], True)  # bf16[24, 1]
div = div(amax, 448.0)  # bf16[24, 1]
convert_element_type = convert_element_type(div, f32)  # f32[24, 1]
convert_element_type_1 = convert_element_type(reshape, f32)  # f32[24, 32]
div_1 = div(convert_element_type_1, convert_element_type)  # f32[24, 32]
convert_element_type_2 = convert_element_type(div_1, f8)  # f8[24, 32]
mul = mul(convert_element_type, w_scale)  # f32[24, 16]
full = full([], 1.0, dtype=f32)  # f32[]
_scaled_mm = _scaled_mm(convert_element_type_2, w, full, full, out_dtype=bf16)  # bf16[24, 16]
mul_1 = mul(_scaled_mm, mul)  # f32[24, 16]
sum_1 = sum(reshape, [0])  # bf16[32]
return (mul_1, sum_1)

=== becomes ===

x: bf16[3, 4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
reshape_default = reshape(x, [12, 32])  # bf16[12, 32]
abs_default = abs(reshape_default)  # bf16[12, 32]
amax_default = amax(abs_default, [-1], True)  # bf16[12, 1]
div_tensor = div(amax_default, 448.0)  # bf16[12, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[12, 1]
convert_element_type_default_1 = convert_element_type(reshape_default, f32)  # f32[12, 32]
div_tensor_1 = div(convert_element_type_default_1, convert_element_type_default)  # f32[12, 32]
convert_element_type_default_2 = convert_element_type(div_tensor_1, f8)  # f8[12, 32]
reshape_default_1 = reshape(convert_element_type_default_2, [3, 4, 32])  # f8[3, 4, 32]
reshape_default_2 = reshape(convert_element_type_default, [3, 4, 1])  # f32[3, 4, 1]
full = full([], 1.0, dtype=f32)  # f32[]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=reshape_default_1, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp', a_scale=full, b_scales=[full], gather_a_scale=False,
    out_dtype=bf16, use_fast_accum=False, along_shard=reshape_default_2)  # (bf16[3, 8, 16], f32[3, 8, 1])
getitem_2 = getitem(all_gather_matmul_default, 0)  # bf16[3, 8, 16]
reshape_default_3 = reshape(getitem_2, [24, 16])  # bf16[24, 16]
getitem_3 = getitem(all_gather_matmul_default, 1)  # f32[3, 8, 1]
all_gather_into_tensor = asynctp::all_gather(shard=x, group_size=2, group_name='tp', copy=False)  # bf16[6, 4, 32]
reshape_default_4 = reshape(getitem_3, [24, 1])  # f32[24, 1]
mul = mul(reshape_default_4, w_scale)  # f32[24, 16]
mul_1 = mul(reshape_default_3, mul)  # f32[24, 16]
wait_tensor = asynctp::wait(result=all_gather_into_tensor, source=x)  # bf16[6, 4, 32]
split = split(wait_tensor, 3, 0)  # (bf16[3, 4, 32], bf16[3, 4, 32])
getitem = getitem(split, 0)  # bf16[3, 4, 32]
getitem_1 = getitem(split, 1)  # bf16[3, 4, 32]
cat = cat([getitem, getitem_1], 1)  # bf16[3, 8, 32]
reshape = reshape(cat, [24, 32])  # bf16[24, 32]
sum_1 = sum(reshape, [0])  # bf16[32]
return (mul_1, sum_1)

computed on the shard and gathered: f8e4m3[24, 32] (384 bytes) and f32[24, 1] (48 bytes); the gather of
bf16[6, 4, 32] (768 bytes) stays for sum_1, and is waited for after the fused op
""",
    )


def test_rows_quantized_three_times_are_gathered_once() -> None:
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 32], torch.bfloat16))
    outs = []
    for name in ("q", "k", "v"):
        rows, scale = quantize(b, whole)
        w, w_scale = weight(b, name)
        outs.append(b.scaled_mm(rows, w, scale, w_scale))
    assert_expected_inline(
        rewritten(b.returns(*outs)),
        """\
x: bf16[4, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # bf16[16, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[16, 32]
abs_1 = abs(wait_tensor)  # bf16[16, 32]
amax = amax(abs_1, [-1], True)  # bf16[16, 1]
div = div(amax, 448.0)  # bf16[16, 1]
convert_element_type = convert_element_type(div, f32)  # f32[16, 1]
convert_element_type_1 = convert_element_type(wait_tensor, f32)  # f32[16, 32]
div_1 = div(convert_element_type_1, convert_element_type)  # f32[16, 32]
convert_element_type_2 = convert_element_type(div_1, f8)  # f8[16, 32]
q_scale: f32[1, 16]
q: f8[32, 16]s[1, 32]
_scaled_mm = _scaled_mm(convert_element_type_2, q, convert_element_type, q_scale, out_dtype=bf16)  # bf16[16, 16]
abs_2 = abs(wait_tensor)  # bf16[16, 32]
amax_1 = amax(abs_2, [-1], True)  # bf16[16, 1]
div_2 = div(amax_1, 448.0)  # bf16[16, 1]
convert_element_type_3 = convert_element_type(div_2, f32)  # f32[16, 1]
convert_element_type_4 = convert_element_type(wait_tensor, f32)  # f32[16, 32]
div_3 = div(convert_element_type_4, convert_element_type_3)  # f32[16, 32]
convert_element_type_5 = convert_element_type(div_3, f8)  # f8[16, 32]
k_scale: f32[1, 16]
k: f8[32, 16]s[1, 32]
_scaled_mm_1 = _scaled_mm(convert_element_type_5, k, convert_element_type_3, k_scale, out_dtype=bf16)  # bf16[16, 16]
abs_3 = abs(wait_tensor)  # bf16[16, 32]
amax_2 = amax(abs_3, [-1], True)  # bf16[16, 1]
div_4 = div(amax_2, 448.0)  # bf16[16, 1]
convert_element_type_6 = convert_element_type(div_4, f32)  # f32[16, 1]
convert_element_type_7 = convert_element_type(wait_tensor, f32)  # f32[16, 32]
div_5 = div(convert_element_type_7, convert_element_type_6)  # f32[16, 32]
convert_element_type_8 = convert_element_type(div_5, f8)  # f8[16, 32]
v_scale: f32[1, 16]
v: f8[32, 16]s[1, 32]
_scaled_mm_2 = _scaled_mm(convert_element_type_8, v, convert_element_type_6, v_scale, out_dtype=bf16)  # bf16[16, 16]
return (_scaled_mm, _scaled_mm_1, _scaled_mm_2)

=== becomes ===

x: bf16[4, 32]
abs_default = abs(x)  # bf16[4, 32]
amax_default = amax(abs_default, [-1], True)  # bf16[4, 1]
div_tensor = div(amax_default, 448.0)  # bf16[4, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[4, 1]
convert_element_type_default_1 = convert_element_type(x, f32)  # f32[4, 32]
div_tensor_1 = div(convert_element_type_default_1, convert_element_type_default)  # f32[4, 32]
convert_element_type_default_2 = convert_element_type(div_tensor_1, f8)  # f8[4, 32]
q_scale: f32[1, 16]
q: f8[32, 16]s[1, 32]
k_scale: f32[1, 16]
k: f8[32, 16]s[1, 32]
v_scale: f32[1, 16]
v: f8[32, 16]s[1, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default_2, bs=[q, k, v],
    biases=[None, None, None], gather_dim=0, return_a_full=False, group_size=4, group_name='tp',
    a_scale=convert_element_type_default, b_scales=[q_scale, k_scale, v_scale], gather_a_scale=True, out_dtype=bf16,
    use_fast_accum=False)  # (bf16[16, 16], bf16[16, 16], bf16[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[16, 16]
getitem_1 = getitem(all_gather_matmul_default, 1)  # bf16[16, 16]
getitem_2 = getitem(all_gather_matmul_default, 2)  # bf16[16, 16]
return (getitem, getitem_1, getitem_2)

computed on the shard and gathered: f8e4m3[16, 32] (384 bytes) and f32[16, 1] (48 bytes); the gather of
bf16[16, 32] (768 bytes) is gone
""",
    )


def test_quantized_rows_that_are_saved_come_from_the_fused_op() -> None:
    b = GraphBuilder()
    (w, w_scale), x = weight(b), b.input("x", [4, 32], torch.bfloat16)
    rows, scale = quantize(b, b.gather(x))
    assert_expected_inline(
        rewritten(b.returns(b.scaled_mm(rows, w, scale, w_scale), rows)),
        """\
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
x: bf16[4, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # bf16[16, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[16, 32]
abs_1 = abs(wait_tensor)  # bf16[16, 32]
amax = amax(abs_1, [-1], True)  # bf16[16, 1]
div = div(amax, 448.0)  # bf16[16, 1]
convert_element_type = convert_element_type(div, f32)  # f32[16, 1]
convert_element_type_1 = convert_element_type(wait_tensor, f32)  # f32[16, 32]
div_1 = div(convert_element_type_1, convert_element_type)  # f32[16, 32]
convert_element_type_2 = convert_element_type(div_1, f8)  # f8[16, 32]
_scaled_mm = _scaled_mm(convert_element_type_2, w, convert_element_type, w_scale, out_dtype=bf16)  # bf16[16, 16]
return (_scaled_mm, convert_element_type_2)

=== becomes ===

w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
x: bf16[4, 32]
abs_default = abs(x)  # bf16[4, 32]
amax_default = amax(abs_default, [-1], True)  # bf16[4, 1]
div_tensor = div(amax_default, 448.0)  # bf16[4, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[4, 1]
convert_element_type_default_1 = convert_element_type(x, f32)  # f32[4, 32]
div_tensor_1 = div(convert_element_type_default_1, convert_element_type_default)  # f32[4, 32]
convert_element_type_default_2 = convert_element_type(div_tensor_1, f8)  # f8[4, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default_2, bs=[w], biases=[None],
    gather_dim=0, return_a_full=True, group_size=4, group_name='tp', a_scale=convert_element_type_default,
    b_scales=[w_scale], gather_a_scale=True, out_dtype=bf16, use_fast_accum=False)  # (bf16[16, 16], f8[16, 32])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[16, 16]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f8[16, 32]
return (getitem, getitem_1)

computed on the shard and gathered: f8e4m3[16, 32] (384 bytes) and f32[16, 1] (48 bytes); the gather of
bf16[16, 32] (768 bytes) is gone
""",
    )


def quantize_by_one_scale(b: GraphBuilder, rows: Node) -> tuple[Node, Node]:
    """Rows in fp8, and the number to multiply them by to have the rows again: torchao's tensorwise recipe."""
    largest = b.call(cast, b.call(aten.max.default, b.call(aten.abs.default, rows)), torch.float64)
    scale = b.call(cast, b.call(aten.div.Tensor, 448.0, b.call(aten.clamp_min.default, largest, 1e-12)), torch.float32)
    return b.call(cast, b.call(aten.mul.Tensor, rows, scale), FP8), b.call(aten.reciprocal.default, scale)


def by_one_scale(b: GraphBuilder, rows: int = 4, width: int = 32) -> tuple[Node, Node, Node]:
    """The product of what is gathered, and what is quantized; and that once more, in other dimensions."""
    w, b_scale = b.input("w", [width, 16], FP8, column_major=True), b.input("b_scale", [])
    whole = b.gather(b.input("x", [1, rows, width], torch.bfloat16))
    quantized, scale = quantize_by_one_scale(b, whole)
    matrix = b.reshape(quantized, [b.ranks * rows, width])
    again, _ = quantize_by_one_scale(b, b.reshape(whole, [b.ranks * rows, width]))
    return b.scaled_mm(matrix, w, scale, b_scale), matrix, again


def test_one_scale_for_all_rows_is_found_from_the_shards() -> None:
    """What is quantized once more, in other dimensions, as for a weight's gradient, comes from the fused op."""
    b = GraphBuilder()
    product, _, again = by_one_scale(b)
    columns = b.permute(b.call(aten.clone.default, b.permute(again, [1, 0])), [1, 0])
    assert_expected_inline(
        rewritten(b.returns(product, columns)),
        """\
w: f8[32, 16]s[1, 32]
b_scale: f32[]
x: bf16[1, 4, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # bf16[4, 4, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[4, 4, 32]
abs_1 = abs(wait_tensor)  # bf16[4, 4, 32]
max_1 = max(abs_1)  # bf16[]
convert_element_type = convert_element_type(max_1, float64)  # float64[]
clamp_min = clamp_min(convert_element_type, 1e-12)  # float64[]
div = div(448.0, clamp_min)  # float64[]
convert_element_type_1 = convert_element_type(div, f32)  # f32[]
mul = mul(wait_tensor, convert_element_type_1)  # bf16[4, 4, 32]
convert_element_type_2 = convert_element_type(mul, f8)  # f8[4, 4, 32]
reciprocal = reciprocal(convert_element_type_1)  # f32[]
reshape = reshape(convert_element_type_2, [16, 32])  # f8[16, 32]
reshape_1 = reshape(wait_tensor, [16, 32])  # bf16[16, 32]
abs_2 = abs(reshape_1)  # bf16[16, 32]
max_2 = max(abs_2)  # bf16[]
convert_element_type_3 = convert_element_type(max_2, float64)  # float64[]
clamp_min_1 = clamp_min(convert_element_type_3, 1e-12)  # float64[]
div_1 = div(448.0, clamp_min_1)  # float64[]
convert_element_type_4 = convert_element_type(div_1, f32)  # f32[]
mul_1 = mul(reshape_1, convert_element_type_4)  # bf16[16, 32]
convert_element_type_5 = convert_element_type(mul_1, f8)  # f8[16, 32]
reciprocal_1 = reciprocal(convert_element_type_4)  # f32[]
_scaled_mm = _scaled_mm(reshape, w, reciprocal, b_scale, out_dtype=bf16)  # bf16[16, 16]
permute = permute(convert_element_type_5, [1, 0])  # f8[32, 16]s[1, 32]
clone = clone(permute)  # f8[32, 16]s[1, 32]
permute_1 = permute(clone, [1, 0])  # f8[16, 32]
return (_scaled_mm, permute_1)

=== becomes ===

w: f8[32, 16]s[1, 32]
b_scale: f32[]
x: bf16[1, 4, 32]
abs_default = abs(x)  # bf16[1, 4, 32]
max_default = max(abs_default)  # bf16[]
reshape_default = reshape(max_default, [1])  # bf16[1]
all_gather_into_tensor_default = all_gather_into_tensor(reshape_default, 4, 'tp')  # bf16[4]
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)  # bf16[4]
amax_default = amax(wait_tensor_default, [0])  # bf16[]
clone_default = clone(amax_default)  # bf16[]
convert_element_type = convert_element_type(amax_default, float64)  # float64[]
clamp_min = clamp_min(convert_element_type, 1e-12)  # float64[]
div = div(448.0, clamp_min)  # float64[]
convert_element_type_1 = convert_element_type(div, f32)  # f32[]
mul_tensor = mul(x, convert_element_type_1)  # bf16[1, 4, 32]
convert_element_type_default = convert_element_type(mul_tensor, f8)  # f8[1, 4, 32]
reciprocal = reciprocal(convert_element_type_1)  # f32[]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default, bs=[w], biases=[None],
    gather_dim=1, return_a_full=True, group_size=4, group_name='tp', a_scale=reciprocal, b_scales=[b_scale],
    gather_a_scale=False, out_dtype=bf16, use_fast_accum=False)  # (bf16[1, 16, 16], f8[1, 16, 32])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[1, 16, 16]
reshape_default_1 = reshape(getitem, [16, 16])  # bf16[16, 16]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f8[1, 16, 32]
reshape_default_2 = reshape(getitem_1, [16, 32])  # f8[16, 32]
clone_default_1 = clone(reshape_default_2)  # f8[16, 32]
convert_element_type_3 = convert_element_type(clone_default, float64)  # float64[]
clamp_min_1 = clamp_min(convert_element_type_3, 1e-12)  # float64[]
div_1 = div(448.0, clamp_min_1)  # float64[]
convert_element_type_4 = convert_element_type(div_1, f32)  # f32[]
reciprocal_1 = reciprocal(convert_element_type_4)  # f32[]
permute = permute(clone_default_1, [1, 0])  # f8[32, 16]s[1, 32]
clone = clone(permute)  # f8[32, 16]s[1, 32]
permute_1 = permute(clone, [1, 0])  # f8[16, 32]
return (reshape_default_1, permute_1)

computed on the shard and gathered: f8e4m3[4, 4, 32] (384 bytes); over all ranks' rows, found by each rank in
its own and gathered: aten.max.default max_1; the gather of bf16[4, 4, 32] (768 bytes) is gone
""",
    )


def test_both_of_what_is_quantized_twice_are_memory_of_their_own() -> None:
    b = GraphBuilder()
    graph = b.returns(*by_one_scale(b))
    assert not fuse(graph).keeps_gather
    _, matrix, again = (node.meta["val"] for node in graph.output_node().args[0])
    assert matrix.untyped_storage()._cdata != again.untyped_storage()._cdata


def test_both_of_equal_scales_that_are_returned_are_memory_of_their_own() -> None:
    b = GraphBuilder()
    whole, (w, w_scale) = b.gather(b.input("x", [4, 32], torch.bfloat16)), weight(b)
    (rows, scale), (_, again) = quantize(b, whole), quantize(b, whole)
    graph = b.returns(b.scaled_mm(rows, w, scale, w_scale), scale, again)
    assert fuse(graph).outcome == "FUSED"
    _, one, other = (node.meta["val"] for node in graph.output_node().args[0])
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_a_gather_that_stays_is_what_others_take_their_maximum_of() -> None:
    """Without it, what another needs of all rows is found from the shards, beside the fused op."""
    for stays in (False, True):
        b = GraphBuilder()
        whole, (w, w_scale) = b.gather(b.input("x", [4, 32], torch.bfloat16)), weight(b)
        rows, scale = quantize(b, whole)
        outputs = [b.scaled_mm(rows, w, scale, w_scale), b.call(aten.max.default, whole)]
        graph = b.returns(*outputs, *([b.relu(whole)] if stays else []))
        with mock.patch("asynctp_passes.planning.cost_model.machine_for", return_value=H200 if not stays else None):
            remark = fused_alike(graph)
        assert remark.keeps_gather == stays
        assert ("over all ranks' rows" in remark.message) == (not stays)
        assert "max_1" in remark.message


def test_what_is_computed_from_the_returned_operand_keeps_no_gather() -> None:
    b = GraphBuilder()
    product, matrix, again = by_one_scale(b)
    wide = [b.call(cast, one, torch.float32) for one in (matrix, again)]
    assert not fuse(b.returns(product, matrix, again, *wide)).keeps_gather


@pytest.mark.parametrize(("rows", "outcome"), [(32, "SKIPPED"), (128, "FUSED")])
def test_one_scale_for_few_rows_is_not_worth_a_gather_of_its_own(rows: int, outcome: str) -> None:
    """A rank receives 768 KiB or 3 MiB of bf16."""
    b = GraphBuilder()
    graph = b.returns(by_one_scale(b, rows, 4096)[0])
    with mock.patch("asynctp_passes.planning.cost_model.machine_for", return_value=H200):
        (remark,) = run_pass(graph).remarks
    assert (remark.outcome, remark.name) == (outcome, "" if outcome == "FUSED" else "MOVES_MORE")
    assert outcome == "FUSED" or remark.message.endswith("after a gather of each rank's max_1]")


def test_a_cast_moves_to_the_shard() -> None:
    """As autocast leaves it; half the bytes are gathered."""
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 16], torch.bfloat16)
    graph = b.returns(b.mm(b.call(cast, b.gather(x), torch.bfloat16), w))
    assert_expected_inline(
        rewritten(graph),
        """\
x: f32[4, 8]
w: bf16[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
convert_element_type = convert_element_type(wait_tensor, bf16)  # bf16[16, 8]
mm = mm(convert_element_type, w)  # bf16[16, 16]
return (mm)

=== becomes ===

x: f32[4, 8]
w: bf16[8, 16]
convert_element_type_default = convert_element_type(x, bf16)  # bf16[4, 8]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default, bs=[w], biases=[None],
    gather_dim=0, return_a_full=False, group_size=4, group_name='tp')  # (bf16[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[16, 16]
return (getitem)

computed on the shard and gathered: bf16[16, 8] (192 bytes); the gather of f32[16, 8] (384 bytes) is gone
""",
    )


def test_a_dynamic_sequence() -> None:
    b = GraphBuilder(ranks=2)
    x, (w, w_scale) = b.input("x", [3, 6, 32], torch.bfloat16, dynamic=1), weight(b)
    whole = b.cat(b.chunks(b.gather(x)), dim=1)
    rows, scale = quantize(b, whole)
    out = b.scaled_mm(b.reshape(rows, [-1, 32]), w, b.reshape(scale, [-1, 1]), w_scale)
    shape_env = b.mode.shape_env
    guards = list(shape_env.guards)
    assert_expected_inline(
        rewritten(b.returns(out)),
        """\
x: bf16[3, s, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # bf16[6, s, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[6, s, 32]
split = split(wait_tensor, 3, 0)  # (bf16[3, s, 32], bf16[3, s, 32])
getitem = getitem(split, 0)  # bf16[3, s, 32]
getitem_1 = getitem(split, 1)  # bf16[3, s, 32]
cat = cat([getitem, getitem_1], 1)  # bf16[3, 2*s, 32]
abs_1 = abs(cat)  # bf16[3, 2*s, 32]
amax = amax(abs_1, [-1], True)  # bf16[3, 2*s, 1]
div = div(amax, 448.0)  # bf16[3, 2*s, 1]
convert_element_type = convert_element_type(div, f32)  # f32[3, 2*s, 1]
convert_element_type_1 = convert_element_type(cat, f32)  # f32[3, 2*s, 32]
div_1 = div(convert_element_type_1, convert_element_type)  # f32[3, 2*s, 32]
convert_element_type_2 = convert_element_type(div_1, f8)  # f8[3, 2*s, 32]
reshape = reshape(convert_element_type_2, [-1, 32])  # f8[6*s, 32]
reshape_1 = reshape(convert_element_type, [-1, 1])  # f32[6*s, 1]
_scaled_mm = _scaled_mm(reshape, w, reshape_1, w_scale, out_dtype=bf16)  # bf16[6*s, 16]
return (_scaled_mm)

=== becomes ===

x: bf16[3, s, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
abs_default = abs(x)  # bf16[3, s, 32]
amax_default = amax(abs_default, [-1], True)  # bf16[3, s, 1]
div_tensor = div(amax_default, 448.0)  # bf16[3, s, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[3, s, 1]
convert_element_type_default_1 = convert_element_type(x, f32)  # f32[3, s, 32]
div_tensor_1 = div(convert_element_type_default_1, convert_element_type_default)  # f32[3, s, 32]
convert_element_type_default_2 = convert_element_type(div_tensor_1, f8)  # f8[3, s, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default_2, bs=[w], biases=[None],
    gather_dim=1, return_a_full=False, group_size=2, group_name='tp', a_scale=convert_element_type_default,
    b_scales=[w_scale], gather_a_scale=True, out_dtype=bf16, use_fast_accum=False)  # (bf16[3, 2*s, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # bf16[3, 2*s, 16]
reshape_default = reshape(getitem_2, [-1, 16])  # bf16[6*s, 16]
return (reshape_default)

computed on the shard and gathered: f8e4m3[3, 2*s49, 32] and f32[3, 2*s49, 1]; the gather of bf16[6, s49, 32]
is gone
""",
    )
    assert shape_env.guards == guards


# --- what other users need ---------------------------------------------------------------------------------------
def fused_alike(graph: Graph, **options: Any) -> Remark:
    """What is said of the one chain of a graph, which computes the same as before."""
    inputs = [_values(graph, rank) for rank in range(4)]
    before = evaluate(graph, inputs)
    (remark,) = [one for one in run_pass(graph, strict="all", **options).remarks if one.outcome == "FUSED"]
    graph.lint()
    assert differences(before, evaluate(graph, inputs)) == []
    return remark


def test_what_is_waited_for_beside_it_is_no_user_of_a_gathered_tensor() -> None:
    """A wait for a list of tensors: of one of them nothing but what is computed on the shard is used."""
    b = GraphBuilder()
    x, other, (w, w_scale) = b.input("x", [4, 32], torch.bfloat16), b.input("other", [2, 5]), weight(b)
    called = b.call(c10d.all_gather_into_tensor_coalesced.default, [x, other], b.ranks, b.group)
    items = [b.call(operator.getitem, called, index) for index in range(2)]
    waited = b.call(c10d.wait_tensors.default, items)
    whole, neighbour = (b.call(operator.getitem, waited, index) for index in range(2))
    rows, scale = quantize(b, whole)
    remark = fused_alike(b.returns(b.scaled_mm(rows, w, scale, w_scale), b.relu(neighbour)))
    assert not remark.keeps_gather


def test_views_of_quantized_rows_come_from_the_fused_op() -> None:
    """As the rows themselves do."""
    b = GraphBuilder()
    (w, w_scale), x = weight(b), b.input("x", [4, 32], torch.bfloat16)
    rows, scale = quantize(b, b.gather(x))
    bits = b.call(aten.view.dtype, b.reshape(rows, [4, 4, 32]), torch.uint8)
    remark = fused_alike(b.returns(b.scaled_mm(rows, w, scale, w_scale), rows, bits))
    assert remark.call["return_a_full"]
    assert not remark.keeps_gather


def test_products_of_one_tensor_in_several_shapes_are_one_op() -> None:
    """The rows of a batch, and the same rows in one dimension."""
    b = GraphBuilder()
    x, w, v = b.input("x", [4, 2, 8]), b.input("w", [8, 16], torch.bfloat16), b.input("v", [8, 12], torch.bfloat16)
    rows = b.call(cast, b.gather(x), torch.bfloat16)
    batch = b.call(aten.linear.default, rows, b.permute(v, [1, 0]))
    remark = fused_alike(b.returns(b.mm(b.reshape(rows, [32, 8]), w), batch))
    assert remark.shapes["matmul"] == "bf16[16, 2, 8] @ bf16[12, 8], bf16[32, 8] @ bf16[8, 16]"
    assert not remark.keeps_gather


def test_the_first_product_that_pays_leads() -> None:
    """Rows in more bits come first, which are not worth to be gathered; those in fewer are."""
    b = GraphBuilder()
    (w, w_scale), whole = weight(b), b.gather(b.input("x", [4, 32], torch.bfloat16))
    wide = b.mm(b.call(cast, whole, torch.float32), b.input("v", [32, 8]))
    rows, scale = quantize(b, whole)
    remark = fused_alike(b.returns(wide, b.scaled_mm(rows, w, scale, w_scale)))
    assert remark.op == "asynctp::all_gather_matmul"
    assert remark.keeps_gather


@pytest.mark.parametrize("bias", ["apart", "computed"])
def test_a_matrix_is_added_to_a_product_of_what_is_computed(bias: str) -> None:
    """It is added behind the fused op, and may be computed from what is gathered."""
    b = GraphBuilder()
    rows = b.call(cast, b.gather(b.input("x", [4, 8])), torch.bfloat16)
    added = rows if bias == "computed" else b.input("c", [16, 8], torch.bfloat16)
    remark = fused_alike(b.returns(b.call(aten.addmm.default, added, rows, b.input("w", [8, 8], torch.bfloat16))))
    assert remark.call["return_a_full"] == (bias == "computed")
    assert not remark.keeps_gather


def test_ranks_in_two_dimensions_of_what_is_computed() -> None:
    """Four ranks that a view shows as two times two are in order, all the same."""
    b = GraphBuilder()
    x, w = b.input("x", [3, 8]), b.input("w", [8, 16], torch.bfloat16)
    batch = b.reshape(b.call(cast, b.gather(x), torch.bfloat16), [2, 2, 3, 8])
    assert fused_alike(b.returns(b.call(aten.linear.default, batch, b.permute(w, [1, 0])))).op


def test_other_matmuls_of_what_is_computed_are_told_apart() -> None:
    """As those of a gathered tensor itself are, but that its gather stays for weight gradients."""
    b = GraphBuilder()
    w, w_scale = weight(b)
    whole = b.gather(b.input("x", [4, 32], torch.bfloat16))
    rows, scale = quantize(b, whole)
    right = b.mm(b.input("y", [8, 16], torch.bfloat16), whole)
    half = b.mm(b.call(aten.slice.Tensor, whole, 0, 0, 8), b.input("v", [32, 8], torch.bfloat16))
    gradient = b.mm(b.permute(whole, [1, 0]), b.input("dy", [16, 8], torch.bfloat16))
    remark = fused_alike(b.returns(b.scaled_mm(rows, w, scale, w_scale), right, half, gradient))
    assert "stays for mm, mm_1, mm_2," in remark.message
    assert remark.message.endswith(
        "; GATHER_IS_RIGHT_OPERAND (mm); PIECES_MISSING (mm_1: covers 256 elements from 0 of 512)"
    )


def test_a_product_of_the_gathered_tensor_comes_before_those_of_what_is_computed() -> None:
    """As a router's does, whose experts are in fp8: these stay as they are, and the remark says so."""
    b = GraphBuilder()
    (w, w_scale), whole = weight(b), b.gather(b.input("x", [4, 32], torch.bfloat16))
    rows, scale = quantize(b, whole)
    router = b.mm(whole, b.input("v", [32, 8], torch.bfloat16))
    remark = fused_alike(b.returns(router, b.scaled_mm(rows, w, scale, w_scale)))
    assert remark.op == "asynctp::all_gather_matmul"
    assert remark.message.startswith("the gathered tensor is returned too: ")
    assert "_scaled_mm, of what is computed from it, stays a matmul of its own" in remark.message


def test_what_is_computed_is_hoisted_where_the_product_of_the_gathered_tensor_may_not_be_fused() -> None:
    """A router's has fewer operations than the program asks for."""
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 8]))
    router, rows = b.mm(whole, b.input("v", [8, 8])), b.call(cast, whole, torch.bfloat16)
    graph = b.returns(router, b.mm(rows, b.input("w", [8, 16], torch.bfloat16)))
    remark = fused_alike(graph, min_flops=2 * 16 * 8 * 16)
    assert remark.keeps_gather
    assert "stays for mm, " in remark.message


# --- the order of nodes ------------------------------------------------------------------------------------------
def position(graph: Graph, target: object) -> list[int]:
    return [index for index, node in enumerate(graph.nodes) if node.target is target]


def test_no_wait_comes_before_the_fused_op() -> None:
    """Not even for users that came before the matmul; and a wait never crosses an operation in place."""
    b = GraphBuilder()
    (w, w_scale), whole = weight(b), b.gather(b.input("x", [4, 32], torch.bfloat16))
    early = b.call(aten.sum.dim_IntList, whole, [0])
    rows, scale = quantize(b, whole)
    out = b.scaled_mm(rows, w, scale, w_scale)
    changed = b.call(aten.add_.Tensor, b.input("state", [1]), 1.0)
    graph = b.returns(out, b.relu(early), changed, b.call(aten.sum.dim_IntList, whole, [0]))
    assert fuse(graph).keeps_gather
    started = torch.ops.asynctp.all_gather.default  # it leaves the SMs to the products that it runs beside
    (gather,), (wait,) = position(graph, started), position(graph, torch.ops.asynctp.wait.default)
    (fused,) = position(graph, torch.ops.asynctp.all_gather_matmul.default)
    (barrier,) = position(graph, aten.add_.Tensor)
    assert fused < gather < wait < barrier


def test_a_gather_that_nothing_waits_for_comes_after_the_fused_op() -> None:
    """It is over when it returns, as the gathers of serving frameworks are."""
    b = GraphBuilder()
    (w, w_scale), x = weight(b), b.input("x", [4, 32], torch.bfloat16)
    whole = b.call(c10d.all_gather_into_tensor.default, x, b.ranks, b.group)
    rows, scale = quantize(b, whole)
    out = b.relu(b.scaled_mm(rows, w, scale, w_scale))
    graph = b.returns(out, b.call(aten.sum.dim_IntList, whole, [0]))
    assert fuse(graph).keeps_gather
    (gather,) = position(graph, c10d.all_gather_into_tensor.default)
    (fused,) = position(graph, torch.ops.asynctp.all_gather_matmul.default)
    assert fused < gather


# --- what it costs --------------------------------------------------------------------------------------------------
H200 = cost_model.Machine("H200", 370e3, 710e6)


@pytest.mark.parametrize(("columns", "outcome"), [(64, "SKIPPED"), (8192, "FUSED")])
def test_a_gather_that_stays_needs_matmuls_to_hide_behind(columns: int, outcome: str) -> None:
    """16 MiB of fp8 in 4096 rows take 34 us on the link; the matmul takes 2 us or 198."""
    b = GraphBuilder()
    x, w_scale = b.input("x", [1024, 4096], torch.bfloat16), b.input("w_scale", [1, columns])
    w, whole = b.input("w", [4096, columns], FP8, column_major=True), b.gather(x)
    rows, scale = quantize(b, whole)
    graph = b.returns(b.scaled_mm(rows, w, scale, w_scale), whole)
    with mock.patch("asynctp_passes.planning.cost_model.machine_for", return_value=H200):
        (remark,) = run_pass(graph).remarks
    assert (remark.outcome, remark.name) == (outcome, "" if outcome == "FUSED" else "MOVES_MORE")


def test_the_remark_counts_what_travels() -> None:
    b = GraphBuilder()
    (w, w_scale), whole = weight(b), b.gather(b.input("x", [4, 32], torch.bfloat16))
    rows, scale = quantize(b, whole)
    remark = fuse(b.returns(b.scaled_mm(rows, w, scale, w_scale)))
    received = 3 * 4  # rows of three other ranks
    assert (remark.comm_bytes, remark.keeps_gather) == (received * (32 + 4), False)


def rows_times(b: GraphBuilder, whole: Node, least: Node, columns: int) -> Node:
    """The product of rows in int8 with a weight of its own, by torchao's W8A8: `least` limits the rows' maxima."""
    most = b.call(aten.maximum.default, b.call(aten.amax.default, b.call(aten.abs.default, whole), [1], True), least)
    scale = b.call(cast, b.call(aten.div.Tensor, most, 127.5), torch.float32)
    rounded = b.call(aten.round.default, b.call(aten.div.Tensor, whole, scale))
    product = b.call(aten._int_mm.default, b.call(cast, rounded, torch.int8), b.input("w", [64, columns], torch.int8))
    return b.mul(b.call(cast, product, torch.float32), scale)


def tiny(b: GraphBuilder, number: float = 1e-4) -> Node:
    return b.call(aten.full.default, [24, 1], number, dtype=torch.bfloat16)


def test_rows_quantized_twice_with_a_constant_of_its_own_each() -> None:
    """In inference torch merges no equal ops: each layer that takes the gathered rows has its own constant."""
    b = GraphBuilder()
    whole = b.gather(b.input("x", [6, 64], torch.bfloat16))
    remark = fused_alike(b.returns(rows_times(b, whole, tiny(b), 16), rows_times(b, whole, tiny(b), 8)))
    assert not remark.keeps_gather
    assert remark.shapes["matmul"] == "int8[24, 64] @ int8[64, 16], int8[24, 64] @ int8[64, 8]"


def test_rows_quantized_twice_with_a_constant_that_was_written_to() -> None:
    b = GraphBuilder()
    one, two = tiny(b), tiny(b)
    b.call(aten.add_.Tensor, one, 100)
    whole = b.gather(b.input("x", [6, 64], torch.bfloat16))
    assert fused_alike(b.returns(rows_times(b, whole, one, 16), rows_times(b, whole, two, 8))).keeps_gather


def test_rows_quantized_twice_with_other_constants() -> None:
    b = GraphBuilder()
    whole = b.gather(b.input("x", [6, 64], torch.bfloat16))
    graph = b.returns(rows_times(b, whole, tiny(b), 16), rows_times(b, whole, tiny(b, 100), 8))
    assert fused_alike(graph).keeps_gather
