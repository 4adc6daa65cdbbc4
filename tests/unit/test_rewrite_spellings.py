"""Other spellings of matmuls and collectives. `EXPECTTEST_ACCEPT=1` writes the expectations anew."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, c10d
from passes import before_and_after
from rewritten import FP8, fp8_operands, fuse, rewritten
from serving_ops import registered
from torch.fx import Node

from asynctp_passes.ir.nodes import arguments


# --- other spellings of a matmul -----------------------------------------------------------------------------------
def test_bmm_with_one_weight() -> None:
    """The rows of all batches are those of one matmul; the weight is taken as it was before it was expanded."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 4, 8]), b.input("w", [16, 8])
    whole = b.cat(b.chunks(b.gather(x)), dim=1)
    weights = b.permute(b.call(aten.expand.default, w, [3, 16, 8]), [0, 2, 1])
    out = b.call(aten.bmm.default, whole, weights)
    assert_expected_inline(
        rewritten(b.returns(out)),
        """\
x: f32[3, 4, 8]
w: f32[16, 8]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[6, 4, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6, 4, 8]
split = split(wait_tensor, 3, 0)  # (f32[3, 4, 8], f32[3, 4, 8])
getitem = getitem(split, 0)  # f32[3, 4, 8]
getitem_1 = getitem(split, 1)  # f32[3, 4, 8]
cat = cat([getitem, getitem_1], 1)  # f32[3, 8, 8]
expand = expand(w, [3, 16, 8])  # f32[3, 16, 8]s[0, 8, 1]
permute = permute(expand, [0, 2, 1])  # f32[3, 8, 16]s[0, 1, 8]
bmm = bmm(cat, permute)  # f32[3, 8, 16]
return (bmm)

=== becomes ===

x: f32[3, 4, 8]
w: f32[16, 8]
permute_default = permute(w, [1, 0])  # f32[8, 16]s[1, 8]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[permute_default], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp')  # (f32[3, 8, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # f32[3, 8, 16]
return (getitem_2)
""",
    )


def test_linear_with_a_bias() -> None:
    """As in a graph that is traced before the dispatcher decomposes it."""
    b = GraphBuilder(ranks=2)
    x, w, bias = b.input("x", [3, 8, 16]), b.input("w", [12, 16]), b.input("bias", [12])
    product = b.call(aten.linear.default, x, w, bias)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.cat(b.chunks(product, dim=1))))),
        """\
x: f32[3, 8, 16]
w: f32[12, 16]
bias: f32[12]
linear = linear(x, w, bias)  # f32[3, 8, 12]
split = split(linear, 4, 1)  # (f32[3, 4, 12]s[96, 12, 1], f32[3, 4, 12]s[96, 12, 1])
getitem = getitem(split, 0)  # f32[3, 4, 12]s[96, 12, 1]
getitem_1 = getitem(split, 1)  # f32[3, 4, 12]s[96, 12, 1]
cat = cat([getitem, getitem_1], 0)  # f32[6, 4, 12]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 2, 'tp')  # f32[3, 4, 12]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # f32[3, 4, 12]
return (wait_tensor)

=== becomes ===

x: f32[3, 8, 16]
w: f32[12, 16]
bias: f32[12]
permute_default = permute(w, [1, 0])  # f32[16, 12]s[1, 16]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[x], b_parts=[permute_default], biases=[bias],
    reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp')  # f32[3, 4, 12]
return (matmul_reduce_scatter_default)
""",
    )


def test_scaled_mm_with_recipes() -> None:
    """Rowwise scales, gathered beside the data; the column scale may be a column."""
    b = GraphBuilder()
    x, w = fp8_operands(b, 16, 32, 16)
    a_scale, b_scale = b.gather(b.input("a_scale", [16, 1])), b.input("b_scale", [16, 1])
    whole = b.gather(x)
    with b.mode:
        value = torch.empty(64, 16, dtype=torch.bfloat16)
    sides = [[a_scale], [1], [], [b_scale], [1], []]
    out = b.call_like(value, aten._scaled_mm_v2.default, whole, w, *sides, None, torch.bfloat16, [], True)
    assert_expected_inline(
        rewritten(b.returns(out)),
        """\
x: f8[16, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[16, 1]
all_gather_into_tensor = all_gather_into_tensor(a_scale, 4, 'tp')  # f32[64, 1]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[64, 1]
b_scale: f32[16, 1]
all_gather_into_tensor_1 = all_gather_into_tensor(x, 4, 'tp')  # f8[64, 32]
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)  # f8[64, 32]
_scaled_mm_v2 = _scaled_mm_v2(wait_tensor_1, w, [wait_tensor], [1], [], [b_scale], [1], [], None, bf16, [], True)  #
    bf16[64, 16]
return (_scaled_mm_v2)

=== becomes ===

x: f8[16, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[16, 1]
b_scale: f32[16, 1]
reshape_default = reshape(b_scale, [1, 16])  # f32[1, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp', a_scale=a_scale, b_scales=[reshape_default],
    gather_a_scale=True, out_dtype=bf16, use_fast_accum=True)  # (bf16[64, 16])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[64, 16]
return (getitem)
""",
    )


def test_views_and_collectives_of_a_graph_that_inductor_has_not_normalized() -> None:
    """What `make_fx` gives of the autograd forms: `view`, `_unsafe_view`, `t`, `detach`."""
    b = GraphBuilder()
    autograd = torch.ops._c10d_functional_autograd
    x, up, down = b.input("x", [2, 8]), b.input("up", [16, 8]), b.input("down", [8, 16])
    full = b.call(c10d.wait_tensor.default, b.call(autograd.all_gather_into_tensor.default, x, 4, "tp"))
    rows = b.call(aten.view.default, b.call(aten.detach.default, full), [8, 8])
    hidden = b.relu(b.call(aten._unsafe_view.default, b.mm(rows, b.call(aten.t.default, up)), [8, 16]))
    out = b.call(aten._unsafe_view.default, b.mm(hidden, b.call(aten.t.default, down)), [1, 8, 8])
    back = b.call(aten.view.default, out, [8, 8])
    scattered = b.call(autograd.reduce_scatter_tensor.default, back, "sum", 4, "tp")
    assert_expected_inline(
        rewritten(b.returns(b.call(c10d.wait_tensor.default, scattered))),
        """\
x: f32[2, 8]
up: f32[16, 8]
down: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[8, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[8, 8]
detach = detach(wait_tensor)  # f32[8, 8]
view = view(detach, [8, 8])  # f32[8, 8]
t = t(up)  # f32[8, 16]s[1, 8]
mm = mm(view, t)  # f32[8, 16]
_unsafe_view = _unsafe_view(mm, [8, 16])  # f32[8, 16]
relu = relu(_unsafe_view)  # f32[8, 16]
t_1 = t(down)  # f32[16, 8]s[1, 16]
mm_1 = mm(relu, t_1)  # f32[8, 8]
_unsafe_view_1 = _unsafe_view(mm_1, [1, 8, 8])  # f32[1, 8, 8]
view_1 = view(_unsafe_view_1, [8, 8])  # f32[8, 8]
reduce_scatter_tensor = reduce_scatter_tensor(view_1, 'sum', 4, 'tp')  # f32[2, 8]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)  # f32[2, 8]
return (wait_tensor_1)

=== becomes ===

x: f32[2, 8]
up: f32[16, 8]
down: f32[8, 16]
t = t(up)  # f32[8, 16]s[1, 8]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[t], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[8, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[8, 16]
_unsafe_view = _unsafe_view(getitem, [8, 16])  # f32[8, 16]
relu = relu(_unsafe_view)  # f32[8, 16]
t_1 = t(down)  # f32[16, 8]s[1, 16]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[relu], b_parts=[t_1], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[2, 8]
return (matmul_reduce_scatter_default)
""",
    )


# --- scales of blocks ------------------------------------------------------------------------------------------------
def in_blocks(b: GraphBuilder, a: Node, w: Node, scales: tuple[Node, Node], recipe: tuple[int, int] = (4, 5)) -> Node:
    """`scaled_mm` with recipes of 1x128 (4) or 128x128 (5) blocks."""
    with b.mode:
        value = torch.empty(a.meta["val"].shape[0], w.meta["val"].shape[1], dtype=torch.bfloat16)
    sides = ([scales[0]], [recipe[0]], [], [scales[1]], [recipe[1]], [])
    return b.call_like(value, aten._scaled_mm_v2.default, a, w, *sides, None, torch.bfloat16)


def columns_first(b: GraphBuilder, scale: Node) -> Node:
    """As cuBLAS wants the scales of 1x128 blocks."""
    columns = b.call(aten.clone.default, b.permute(scale, [1, 0]), memory_format=torch.contiguous_format)
    return b.permute(columns, [1, 0])


def test_gather_for_scales_of_blocks_that_are_gathered_too() -> None:
    """The scales travel with their rows; those of B lose the padding that `scaled_mm` wants."""
    b = GraphBuilder()
    x, w = b.input("x", [4, 256], FP8), b.input("w", [256, 144], FP8, column_major=True)
    a_scale, b_scale = b.input("a_scale", [4, 2]), b.input("b_scale", [4, 2], column_major=True)
    whole = b.gather(x)
    graph = b.returns(in_blocks(b, whole, w, (columns_first(b, b.gather(a_scale)), b_scale)))
    assert_expected_inline(
        rewritten(graph),
        """\
x: f8[4, 256]
w: f8[256, 144]s[1, 256]
a_scale: f32[4, 2]
b_scale: f32[4, 2]s[1, 4]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f8[16, 256]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f8[16, 256]
all_gather_into_tensor_1 = all_gather_into_tensor(a_scale, 4, 'tp')  # f32[16, 2]
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)  # f32[16, 2]
permute = permute(wait_tensor_1, [1, 0])  # f32[2, 16]s[1, 2]
clone = clone(permute, memory_format=torch.contiguous_format)  # f32[2, 16]
permute_1 = permute(clone, [1, 0])  # f32[16, 2]s[1, 16]
_scaled_mm_v2 = _scaled_mm_v2(wait_tensor, w, [permute_1], [4], [], [b_scale], [5], [], None, bf16)  # bf16[16, 144]
return (_scaled_mm_v2)

=== becomes ===

x: f8[4, 256]
w: f8[256, 144]s[1, 256]
a_scale: f32[4, 2]
b_scale: f32[4, 2]s[1, 4]
slice_tensor = slice(b_scale, 0, 0, 2)  # f32[2, 2]s[1, 4]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp', a_scale=a_scale, b_scales=[slice_tensor], gather_a_scale=True,
    out_dtype=bf16, use_fast_accum=False)  # (bf16[16, 144])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[16, 144]
return (getitem)
""",
    )


def test_gather_of_a_middle_dimension_quantized_in_blocks() -> None:
    """Blocks of 128 of each row are quantized on the shard, and fp8 and scales are gathered."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 4, 512], torch.bfloat16), b.input("w", [512, 144], FP8, column_major=True)
    b_scale = b.input("b_scale", [4, 2], column_major=True)
    blocks = b.reshape(b.cat(b.chunks(b.gather(x)), dim=1), [24, 4, 128])
    scale = b.call(aten.amax.default, b.call(aten.abs.default, blocks), [-1], True)
    fp8 = b.call(torch.ops.prims.convert_element_type.default, b.call(aten.div.Tensor, blocks, scale), FP8)
    a_scale = b.reshape(b.call(torch.ops.prims.convert_element_type.default, scale, torch.float32), [24, 4])
    graph = b.returns(in_blocks(b, b.reshape(fp8, [24, 512]), w, (columns_first(b, a_scale), b_scale)))
    assert_expected_inline(
        rewritten(graph),
        """\
x: bf16[3, 4, 512]
w: f8[512, 144]s[1, 512]
b_scale: f32[4, 2]s[1, 4]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # bf16[6, 4, 512]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[6, 4, 512]
split = split(wait_tensor, 3, 0)  # (bf16[3, 4, 512], bf16[3, 4, 512])
getitem = getitem(split, 0)  # bf16[3, 4, 512]
getitem_1 = getitem(split, 1)  # bf16[3, 4, 512]
cat = cat([getitem, getitem_1], 1)  # bf16[3, 8, 512]
reshape = reshape(cat, [24, 4, 128])  # bf16[24, 4, 128]
abs_1 = abs(reshape)  # bf16[24, 4, 128]
amax = amax(abs_1, [-1], True)  # bf16[24, 4, 1]
div = div(reshape, amax)  # bf16[24, 4, 128]
convert_element_type = convert_element_type(div, f8)  # f8[24, 4, 128]
convert_element_type_1 = convert_element_type(amax, f32)  # f32[24, 4, 1]
reshape_1 = reshape(convert_element_type_1, [24, 4])  # f32[24, 4]
reshape_2 = reshape(convert_element_type, [24, 512])  # f8[24, 512]
permute = permute(reshape_1, [1, 0])  # f32[4, 24]s[1, 4]
clone = clone(permute, memory_format=torch.contiguous_format)  # f32[4, 24]
permute_1 = permute(clone, [1, 0])  # f32[24, 4]s[1, 24]
_scaled_mm_v2 = _scaled_mm_v2(reshape_2, w, [permute_1], [4], [], [b_scale], [5], [], None, bf16)  # bf16[24, 144]
return (_scaled_mm_v2)

=== becomes ===

x: bf16[3, 4, 512]
w: f8[512, 144]s[1, 512]
b_scale: f32[4, 2]s[1, 4]
reshape_default = reshape(x, [12, 4, 128])  # bf16[12, 4, 128]
abs_default = abs(reshape_default)  # bf16[12, 4, 128]
amax_default = amax(abs_default, [-1], True)  # bf16[12, 4, 1]
div_tensor = div(reshape_default, amax_default)  # bf16[12, 4, 128]
convert_element_type_default = convert_element_type(div_tensor, f8)  # f8[12, 4, 128]
convert_element_type_default_1 = convert_element_type(amax_default, f32)  # f32[12, 4, 1]
reshape_default_1 = reshape(convert_element_type_default, [3, 4, 512])  # f8[3, 4, 512]
reshape_default_2 = reshape(convert_element_type_default_1, [3, 4, 4])  # f32[3, 4, 4]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=reshape_default_1, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp', a_scale=reshape_default_2, b_scales=[b_scale],
    gather_a_scale=True, out_dtype=bf16, use_fast_accum=False)  # (bf16[3, 8, 144])
getitem_2 = getitem(all_gather_matmul_default, 0)  # bf16[3, 8, 144]
reshape_default_3 = reshape(getitem_2, [24, 144])  # bf16[24, 144]
return (reshape_default_3)
""",
    )


def test_scatter_of_a_middle_dimension_of_products_with_scales_of_blocks() -> None:
    """The input gradient of a gate and up pair: scales of A keep their rows' dimensions."""
    b = GraphBuilder()
    terms = []
    for name in ("gate", "up"):
        a, w = b.input(f"{name}_a", [24, 512], FP8), b.input(f"{name}_w", [512, 144], FP8, column_major=True)
        a_scale = b.input(f"{name}_a_scale", [24, 4], column_major=True)
        terms.append(in_blocks(b, a, w, (a_scale, b.input(f"{name}_scale", [4, 2], column_major=True))))
    total = b.reshape(b.add(*terms), [3, 8, 144])
    graph = b.returns(b.scatter(b.cat(b.chunks(total, dim=1))))
    assert_expected_inline(
        rewritten(graph),
        """\
gate_a: f8[24, 512]
gate_w: f8[512, 144]s[1, 512]
gate_a_scale: f32[24, 4]s[1, 24]
gate_scale: f32[4, 2]s[1, 4]
_scaled_mm_v2 = _scaled_mm_v2(gate_a, gate_w, [gate_a_scale], [4], [], [gate_scale], [5], [], None, bf16)  # bf16[24,
    144]
up_a: f8[24, 512]
up_w: f8[512, 144]s[1, 512]
up_a_scale: f32[24, 4]s[1, 24]
up_scale: f32[4, 2]s[1, 4]
_scaled_mm_v2_1 = _scaled_mm_v2(up_a, up_w, [up_a_scale], [4], [], [up_scale], [5], [], None, bf16)  # bf16[24, 144]
add = add(_scaled_mm_v2, _scaled_mm_v2_1)  # bf16[24, 144]
reshape = reshape(add, [3, 8, 144])  # bf16[3, 8, 144]
split = split(reshape, 2, 1)  # (bf16[3, 2, 144]s[1152, 144, 1], bf16[3, 2, 144]s[1152, 144, 1], bf16[3, 2,
    144]s[1152, 144, 1], bf16[3, 2, 144]s[1152, 144, 1])
getitem = getitem(split, 0)  # bf16[3, 2, 144]s[1152, 144, 1]
getitem_1 = getitem(split, 1)  # bf16[3, 2, 144]s[1152, 144, 1]
getitem_2 = getitem(split, 2)  # bf16[3, 2, 144]s[1152, 144, 1]
getitem_3 = getitem(split, 3)  # bf16[3, 2, 144]s[1152, 144, 1]
cat = cat([getitem, getitem_1, getitem_2, getitem_3], 0)  # bf16[12, 2, 144]
reduce_scatter_tensor = reduce_scatter_tensor(cat, 'sum', 4, 'tp')  # bf16[3, 2, 144]
wait_tensor = wait_tensor(reduce_scatter_tensor)  # bf16[3, 2, 144]
return (wait_tensor)

=== becomes ===

gate_a: f8[24, 512]
gate_w: f8[512, 144]s[1, 512]
gate_a_scale: f32[24, 4]s[1, 24]
gate_scale: f32[4, 2]s[1, 4]
up_a: f8[24, 512]
up_w: f8[512, 144]s[1, 512]
up_a_scale: f32[24, 4]s[1, 24]
up_scale: f32[4, 2]s[1, 4]
reshape_default = reshape(gate_a, [3, 8, 512])  # f8[3, 8, 512]
reshape_default_1 = reshape(up_a, [3, 8, 512])  # f8[3, 8, 512]
reshape_default_2 = reshape(gate_a_scale, [3, 8, 4])  # f32[3, 8, 4]s[8, 1, 24]
reshape_default_3 = reshape(up_a_scale, [3, 8, 4])  # f32[3, 8, 4]s[8, 1, 24]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default, reshape_default_1],
    b_parts=[gate_w, up_w], biases=[None, None], reduce_op='sum', scatter_dim=1, group_size=4, group_name='tp',
    a_scales=[reshape_default_2, reshape_default_3], b_scales=[gate_scale, up_scale], out_dtype=bf16,
    use_fast_accum=False)  # bf16[3, 2, 144]
return (matmul_reduce_scatter_default)
""",
    )


def test_all_reduce_of_a_product_with_blocks_of_rows_of_a() -> None:
    """Scales of 128x128 blocks of A come transposed; those of 1x128 blocks of B, too."""
    b = GraphBuilder()
    a, w = b.input("a", [256, 256], FP8), b.input("w", [256, 16], FP8, column_major=True)
    scales = b.input("a_scale", [4, 2], column_major=True), b.input("b_scale", [16, 2], column_major=True)
    graph = b.returns(b.all_reduce(in_blocks(b, a, w, scales, (5, 4))))
    assert_expected_inline(
        rewritten(graph),
        """\
a: f8[256, 256]
w: f8[256, 16]s[1, 256]
a_scale: f32[4, 2]s[1, 4]
b_scale: f32[16, 2]s[1, 16]
_scaled_mm_v2 = _scaled_mm_v2(a, w, [a_scale], [5], [], [b_scale], [4], [], None, bf16)  # bf16[256, 16]
all_reduce = all_reduce(_scaled_mm_v2, 'sum', 'tp')  # bf16[256, 16]
wait_tensor = wait_tensor(all_reduce)  # bf16[256, 16]
return (wait_tensor)

=== becomes ===

a: f8[256, 256]
w: f8[256, 16]s[1, 256]
a_scale: f32[4, 2]s[1, 4]
b_scale: f32[16, 2]s[1, 16]
slice_tensor = slice(a_scale, 0, 0, 2)  # f32[2, 2]s[1, 4]
permute_default = permute(slice_tensor, [1, 0])  # f32[2, 2]s[4, 1]
permute_default_1 = permute(b_scale, [1, 0])  # f32[2, 16]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[a], b_parts=[w], biases=[None], reduce_op='sum',
    group_name='tp', a_scales=[permute_default], b_scales=[permute_default_1], out_dtype=bf16, use_fast_accum=False)
    # bf16[256, 16]
return (matmul_all_reduce_default)
""",
    )


@pytest.mark.parametrize("early", [True, False], ids=["quantized, then gathered", "gathered, then quantized"])
def test_scales_of_blocks_of_a_dynamic_sequence_add_no_guard(early: bool) -> None:
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 24, 256], torch.bfloat16, dynamic=1), b.input("w", [256, 144], FP8, column_major=True)
    b_scale = b.input("b_scale", [4, 2], column_major=True)
    blocks = b.reshape(x if early else b.gather(x), [-1, 2, 128])
    scale = b.call(aten.amax.default, b.call(aten.abs.default, blocks), [-1], True)
    fp8 = b.call(torch.ops.prims.convert_element_type.default, b.call(aten.div.Tensor, blocks, scale), FP8)
    scale = b.call(torch.ops.prims.convert_element_type.default, scale, torch.float32)
    both = [b.reshape(one, [-1, width]) for one, width in ((fp8, 256), (scale, 2))]
    rows, scales = [b.gather(one) for one in both] if early else both
    graph = b.returns(in_blocks(b, rows, w, (scales, b_scale)))
    shape_env = b.mode.shape_env
    guards, replacements = list(shape_env.guards), copy.copy(shape_env.replacements)
    assert [remark.outcome for remark in fuse(graph).remarks] == ["FUSED"] * (2 if early else 1)
    assert shape_env.guards == guards
    assert shape_env.replacements == replacements
    (op,) = graph.find_nodes(op="call_function", target=torch.ops.asynctp.all_gather_matmul.default)
    assert arguments(op)["gather_a_scale"], "the scales travel"


# --- other spellings of a collective ---------------------------------------------------------------------------------
def test_gather_of_a_list_of_tensors() -> None:
    """What is not fused is still gathered."""
    b = GraphBuilder()
    x, norm = b.gather_list(b.input("x", [4, 8]), b.input("norm", [3]))
    graph = b.returns(b.mm(x, b.input("w", [8, 16])), norm)
    text, report = before_and_after(graph)
    assert [(remark.outcome, remark.name) for remark in report.remarks] == [("FUSED", ""), ("SKIPPED", "OUTSIDE_GRAPH")]
    assert_expected_inline(
        text,
        """\
x: f32[4, 8]
norm: f32[3]
all_gather_into_tensor_coalesced = all_gather_into_tensor_coalesced([x, norm], 4, 'tp')  # (f32[16, 8], f32[12])
getitem = getitem(all_gather_into_tensor_coalesced, 0)  # f32[16, 8]
wait_tensor = wait_tensor(getitem)  # f32[16, 8]
getitem_1 = getitem(all_gather_into_tensor_coalesced, 1)  # f32[12]
wait_tensor_1 = wait_tensor(getitem_1)  # f32[12]
w: f32[8, 16]
mm = mm(wait_tensor, w)  # f32[16, 16]
return (mm, wait_tensor_1)

=== becomes ===

x: f32[4, 8]
norm: f32[3]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # f32[16, 16]
all_gather_into_tensor_default = all_gather_into_tensor(norm, 4, 'tp')  # f32[12]
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)  # f32[12]
return (getitem_2, wait_tensor_default)
""",
    )


def waited_for_at_once(b: GraphBuilder, call: Node) -> list[Node]:
    """The results of a collective of several tensors, as torch 2.15 waits for them."""
    items = [b.call(operator.getitem, call, index) for index in range(len(call.meta["val"]))]
    waited = b.call(c10d.wait_tensors.default, items)
    return [b.call(operator.getitem, waited, index) for index in range(len(items))]


def test_gathers_that_are_waited_for_at_once() -> None:
    """The wait goes on for what is not fused."""
    b = GraphBuilder()
    shards = [b.input("norm", [3]), b.input("x", [4, 8]), b.input("y", [2, 8])]
    norm, x, y = waited_for_at_once(b, b.call(c10d.all_gather_into_tensor_coalesced.default, shards, 4, "tp"))
    w = b.input("w", [8, 16])
    assert_expected_inline(
        rewritten(b.returns(b.mm(x, w), norm, b.mm(y, w))),
        """\
norm: f32[3]
x: f32[4, 8]
y: f32[2, 8]
all_gather_into_tensor_coalesced = all_gather_into_tensor_coalesced([norm, x, y], 4, 'tp')  # (f32[12], f32[16, 8],
    f32[8, 8])
getitem = getitem(all_gather_into_tensor_coalesced, 0)  # f32[12]
getitem_1 = getitem(all_gather_into_tensor_coalesced, 1)  # f32[16, 8]
getitem_2 = getitem(all_gather_into_tensor_coalesced, 2)  # f32[8, 8]
wait_tensors = wait_tensors([getitem, getitem_1, getitem_2])  # (f32[12], f32[16, 8], f32[8, 8])
getitem_3 = getitem(wait_tensors, 0)  # f32[12]
getitem_4 = getitem(wait_tensors, 1)  # f32[16, 8]
getitem_5 = getitem(wait_tensors, 2)  # f32[8, 8]
w: f32[8, 16]
mm = mm(getitem_4, w)  # f32[16, 16]
mm_1 = mm(getitem_5, w)  # f32[8, 16]
return (mm, getitem_3, mm_1)

=== becomes ===

norm: f32[3]
x: f32[4, 8]
y: f32[2, 8]
all_gather_into_tensor_default = all_gather_into_tensor(norm, 4, 'tp')  # f32[12]
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)  # f32[12]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 16])
getitem_6 = getitem(all_gather_matmul_default, 0)  # f32[16, 16]
all_gather_matmul_default_1 = asynctp::all_gather_matmul(a_shard=y, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[8, 16])
getitem_7 = getitem(all_gather_matmul_default_1, 0)  # f32[8, 16]
return (getitem_6, wait_tensor_default, getitem_7)
""",
    )


def test_scatters_that_are_waited_for_at_once() -> None:
    """Nothing is left to wait for."""
    b = GraphBuilder()
    w = b.input("w", [8, 16])
    products = [b.mm(b.input(name, [rows, 8]), w) for name, rows in (("x", 16), ("y", 8))]
    call = b.call(c10d.reduce_scatter_tensor_coalesced.default, products, "sum", 4, "tp")
    assert_expected_inline(
        rewritten(b.returns(*waited_for_at_once(b, call))),
        """\
w: f32[8, 16]
x: f32[16, 8]
mm = mm(x, w)  # f32[16, 16]
y: f32[8, 8]
mm_1 = mm(y, w)  # f32[8, 16]
reduce_scatter_tensor_coalesced = reduce_scatter_tensor_coalesced([mm, mm_1], 'sum', 4, 'tp')  # (f32[4, 16], f32[2,
    16])
getitem = getitem(reduce_scatter_tensor_coalesced, 0)  # f32[4, 16]
getitem_1 = getitem(reduce_scatter_tensor_coalesced, 1)  # f32[2, 16]
wait_tensors = wait_tensors([getitem, getitem_1])  # (f32[4, 16], f32[2, 16])
getitem_2 = getitem(wait_tensors, 0)  # f32[4, 16]
getitem_3 = getitem(wait_tensors, 1)  # f32[2, 16]
return (getitem_2, getitem_3)

=== becomes ===

w: f32[8, 16]
x: f32[16, 8]
y: f32[8, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[x], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[4, 16]
matmul_reduce_scatter_default_1 = asynctp::matmul_reduce_scatter(a_parts=[y], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[2, 16]
return (matmul_reduce_scatter_default, matmul_reduce_scatter_default_1)
""",
    )


def test_all_reduces_in_a_list() -> None:
    """A product, and what no matmul made."""
    b = GraphBuilder()
    whole = [b.mm(b.input("x", [16, 8]), b.input("w", [8, 16])), b.relu(b.input("norm", [3]))]
    both = b.call(c10d.all_reduce_coalesced.default, whole, "sum", "tp")
    assert_expected_inline(
        rewritten(b.returns(*b.wait_list(both, 2))),
        """\
x: f32[16, 8]
w: f32[8, 16]
mm = mm(x, w)  # f32[16, 16]
norm: f32[3]
relu = relu(norm)  # f32[3]
all_reduce_coalesced = all_reduce_coalesced([mm, relu], 'sum', 'tp')  # (f32[16, 16], f32[3])
getitem = getitem(all_reduce_coalesced, 0)  # f32[16, 16]
wait_tensor = wait_tensor(getitem)  # f32[16, 16]
getitem_1 = getitem(all_reduce_coalesced, 1)  # f32[3]
wait_tensor_1 = wait_tensor(getitem_1)  # f32[3]
return (wait_tensor, wait_tensor_1)

=== becomes ===

x: f32[16, 8]
w: f32[8, 16]
norm: f32[3]
relu = relu(norm)  # f32[3]
matmul_all_reduce_default = asynctp::matmul_all_reduce(a_parts=[x], b_parts=[w], biases=[None], reduce_op='sum',
    group_name='tp')  # f32[16, 16]
all_reduce_default = all_reduce(relu, 'sum', 'tp')  # f32[3]
wait_tensor_default = wait_tensor(all_reduce_default)  # f32[3]
return (matmul_all_reduce_default, wait_tensor_default)
""",
    )


def test_data_and_scale_gathered_as_one_list() -> None:
    b = GraphBuilder(ranks=2)
    x, w = fp8_operands(b, 16, 32, 16)
    scale, whole = b.gather_list(b.input("a_scale", [16, 1]), x)
    assert_expected_inline(
        rewritten(b.returns(b.scaled_mm(whole, w, scale, b.input("b_scale", [1, 16])))),
        """\
x: f8[16, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[16, 1]
all_gather_into_tensor_coalesced = all_gather_into_tensor_coalesced([a_scale, x], 2, 'tp')  # (f32[32, 1], f8[32, 32])
getitem = getitem(all_gather_into_tensor_coalesced, 0)  # f32[32, 1]
wait_tensor = wait_tensor(getitem)  # f32[32, 1]
getitem_1 = getitem(all_gather_into_tensor_coalesced, 1)  # f8[32, 32]
wait_tensor_1 = wait_tensor(getitem_1)  # f8[32, 32]
b_scale: f32[1, 16]
_scaled_mm = _scaled_mm(wait_tensor_1, w, wait_tensor, b_scale, out_dtype=bf16)  # bf16[32, 16]
return (_scaled_mm)

=== becomes ===

x: f8[16, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[16, 1]
b_scale: f32[1, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=2, group_name='tp', a_scale=a_scale, b_scales=[b_scale], gather_a_scale=True,
    out_dtype=bf16, use_fast_accum=False)  # (bf16[32, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # bf16[32, 16]
return (getitem_2)
""",
    )


def test_registered_gather_along_a_middle_dimension() -> None:
    """A custom op that gathers along any dimension; who else uses its result gets it in the same shape."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 4, 8]), b.input("w", [8, 16])
    whole = b.call(torch.ops.vllm_like.all_gather.default, x, 1, 2, "tp:0")
    product = b.mm(b.reshape(whole, [24, 8]), w)
    graph = b.returns(product, b.relu(whole))
    with registered("tp"):
        text = rewritten(graph)
    assert_expected_inline(
        text,
        """\
x: f32[3, 4, 8]
w: f32[8, 16]
all_gather = all_gather(x, 1, 2, 'tp:0')  # f32[3, 8, 8]
reshape = reshape(all_gather, [24, 8])  # f32[24, 8]
mm = mm(reshape, w)  # f32[24, 16]
relu = relu(all_gather)  # f32[3, 8, 8]
return (mm, relu)

=== becomes ===

x: f32[3, 4, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=True, group_size=2, group_name='tp')  # (f32[3, 8, 16], f32[3, 8, 8])
getitem = getitem(all_gather_matmul_default, 0)  # f32[3, 8, 16]
reshape_default = reshape(getitem, [24, 16])  # f32[24, 16]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f32[3, 8, 8]
reshape_default_1 = reshape(getitem_1, [3, 2, 4, 8])  # f32[3, 2, 4, 8]
reshape_default_2 = reshape(reshape_default_1, [3, 8, 8])  # f32[3, 8, 8]
relu = relu(reshape_default_2)  # f32[3, 8, 8]
return (reshape_default, relu)
""",
    )


def test_registered_scatter_of_a_registered_matmul() -> None:
    """The matmul writes its result into an argument, so a compiled graph has it inside of `auto_functionalized`."""
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [12, 32], FP8), b.input("w", [32, 16], FP8, column_major=True)
    out, a_scale, b_scale = b.input("out", [12, 16], torch.bfloat16), b.input("a_scale", []), b.input("b_scale", [1])
    arguments = {"out": out, "a": a, "b": w, "a_scales": a_scale, "b_scales": b_scale, "bias": None}
    op = torch.ops.vllm_like.cutlass_scaled_mm.default
    value = (None, out.meta["val"])
    call = b.call_like(value, torch.ops.higher_order.auto_functionalized, op, **arguments)
    product = b.call(operator.getitem, call, 1)
    graph = b.returns(b.call(torch.ops.vllm_like.reduce_scatter.default, product, -1, 2, "tp:0"))
    with registered("tp"):
        text = rewritten(graph)
    assert_expected_inline(
        text,
        """\
a: f8[12, 32]
w: f8[32, 16]s[1, 32]
out: bf16[12, 16]
a_scale: f32[]
b_scale: f32[1]
auto_functionalized = auto_functionalized(vllm_like.cutlass_scaled_mm.default, out=out, a=a, b=w, a_scales=a_scale,
    b_scales=b_scale, bias=None)  # (NoneType, bf16[12, 16])
getitem = getitem(auto_functionalized, 1)  # bf16[12, 16]
reduce_scatter = reduce_scatter(getitem, -1, 2, 'tp:0')  # bf16[12, 8]
return (reduce_scatter)

=== becomes ===

a: f8[12, 32]
w: f8[32, 16]s[1, 32]
out: bf16[12, 16]
a_scale: f32[]
b_scale: f32[1]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=1, group_size=2, group_name='tp', a_scales=[a_scale], b_scales=[b_scale],
    out_dtype=bf16, use_fast_accum=False)  # bf16[12, 8]
return (matmul_reduce_scatter_default)
""",
    )


def test_scatter_of_a_sum_that_inductor_made_addmm_of() -> None:
    """`mm + mm` without views in between arrives as `addmm(mm, …)`."""
    b = GraphBuilder()
    pairs = [(b.input(f"a{i}", [16, 8]), b.input(f"w{i}", [8, 12])) for i in range(3)]
    total = b.mm(*pairs[0])
    for pair in pairs[1:]:
        total = b.call(aten.addmm.default, total, *pair)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(total))),
        """\
a0: f32[16, 8]
w0: f32[8, 12]
a1: f32[16, 8]
w1: f32[8, 12]
a2: f32[16, 8]
w2: f32[8, 12]
mm = mm(a0, w0)  # f32[16, 12]
addmm = addmm(mm, a1, w1)  # f32[16, 12]
addmm_1 = addmm(addmm, a2, w2)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(addmm_1, 'sum', 4, 'tp')  # f32[4, 12]
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
