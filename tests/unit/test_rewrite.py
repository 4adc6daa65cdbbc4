"""What the main forms look like before and after the pass. `EXPECTTEST_ACCEPT=1` writes the expectations anew."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from dumps import CORPUS, load
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, c10d, show
from passes import before_and_after, run_pass
from serving_ops import registered
from torch.fx import Graph, Node

from asynctp_passes import Config, Report, run

FP8 = torch.float8_e4m3fn


def fuse(graph: Graph) -> Report:
    """Run the pass; nothing may be missed."""
    return run_pass(graph, strict="all", expect=1)


def rewritten(graph: Graph) -> str:
    """The graph, and what it becomes."""
    text, _ = before_and_after(graph, strict="all", expect=1)
    return text


def fp8_operands(b: GraphBuilder, rows: int, width: int, columns: int) -> tuple[Node, Node]:
    """A left operand, and a column-major right one."""
    return b.input("x", [rows, width], FP8), b.input("w", [width, columns], FP8, column_major=True)


# --- gather side: where the gathered dimension goes --------------------------------------------------------
def test_gather_of_rows() -> None:
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 16])
    assert_expected_inline(
        rewritten(b.returns(b.mm(b.gather(x), w))),
        """\
x: f32[4, 8]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
mm = mm(wait_tensor, w)  # f32[16, 16]
return (mm)

=== becomes ===

x: f32[4, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 16]
return (getitem)
""",
    )


def test_gather_of_a_middle_dimension() -> None:
    """Split and cat bring the ranks' blocks to dimension 1 of a batch."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 4, 8]), b.input("w", [8, 16])
    whole = b.cat(b.chunks(b.gather(x)), dim=1)
    out = b.reshape(b.mm(b.reshape(whole, [24, 8]), w), [3, 8, 16])
    assert_expected_inline(
        rewritten(b.returns(out)),
        """\
x: f32[3, 4, 8]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[6, 4, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6, 4, 8]
split = split(wait_tensor, 3, 0)  # (f32[3, 4, 8], f32[3, 4, 8])
getitem = getitem(split, 0)  # f32[3, 4, 8]
getitem_1 = getitem(split, 1)  # f32[3, 4, 8]
cat = cat([getitem, getitem_1], 1)  # f32[3, 8, 8]
reshape = reshape(cat, [24, 8])  # f32[24, 8]
mm = mm(reshape, w)  # f32[24, 16]
reshape_1 = reshape(mm, [3, 8, 16])  # f32[3, 8, 16]
return (reshape_1)

=== becomes ===

x: f32[3, 4, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp')  # (f32[3, 8, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # f32[3, 8, 16]
reshape_default = reshape(getitem_2, [24, 16])  # f32[24, 16]
reshape_1 = reshape(reshape_default, [3, 8, 16])  # f32[3, 8, 16]
return (reshape_1)
""",
    )


def test_gather_of_a_middle_dimension_in_a_batch_of_one() -> None:
    """Torch traces reshapes only: the ranks' blocks are in place already."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [1, 4, 8]), b.input("w", [8, 16])
    whole = b.reshape(b.gather(x), [1, 8, 8])
    out = b.reshape(b.mm(b.reshape(whole, [8, 8]), w), [1, 8, 16])
    assert_expected_inline(
        rewritten(b.returns(out)),
        """\
x: f32[1, 4, 8]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[2, 4, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[2, 4, 8]
reshape = reshape(wait_tensor, [1, 8, 8])  # f32[1, 8, 8]
reshape_1 = reshape(reshape, [8, 8])  # f32[8, 8]
mm = mm(reshape_1, w)  # f32[8, 16]
reshape_2 = reshape(mm, [1, 8, 16])  # f32[1, 8, 16]
return (reshape_2)

=== becomes ===

x: f32[1, 4, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp')  # (f32[1, 8, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[1, 8, 16]
reshape_default = reshape(getitem, [8, 16])  # f32[8, 16]
reshape_2 = reshape(reshape_default, [1, 8, 16])  # f32[1, 8, 16]
return (reshape_2)
""",
    )


def test_gather_by_slice_and_cat() -> None:
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 4, 8]), b.input("w", [8, 16])
    gathered = b.gather(x)
    pieces = [b.call(aten.slice.Tensor, gathered, 0, 3 * rank, 3 * rank + 3) for rank in range(2)]
    assert_expected_inline(
        rewritten(b.returns(b.mm(b.reshape(b.cat(pieces, dim=1), [24, 8]), w))),
        """\
x: f32[3, 4, 8]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[6, 4, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6, 4, 8]
slice_1 = slice(wait_tensor, 0, 0, 3)  # f32[3, 4, 8]
slice_2 = slice(wait_tensor, 0, 3, 6)  # f32[3, 4, 8]
cat = cat([slice_1, slice_2], 1)  # f32[3, 8, 8]
reshape = reshape(cat, [24, 8])  # f32[24, 8]
mm = mm(reshape, w)  # f32[24, 16]
return (mm)

=== becomes ===

x: f32[3, 4, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp')  # (f32[3, 8, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[3, 8, 16]
reshape_default = reshape(getitem, [24, 16])  # f32[24, 16]
return (reshape_default)
""",
    )


def test_gather_of_the_contraction() -> None:
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [6, 4]), b.input("w", [8, 16])
    assert_expected_inline(
        rewritten(b.returns(b.mm(b.cat(b.chunks(b.gather(x)), dim=1), w))),
        """\
x: f32[6, 4]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[12, 4]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[12, 4]
split = split(wait_tensor, 6, 0)  # (f32[6, 4], f32[6, 4])
getitem = getitem(split, 0)  # f32[6, 4]
getitem_1 = getitem(split, 1)  # f32[6, 4]
cat = cat([getitem, getitem_1], 1)  # f32[6, 8]
mm = mm(cat, w)  # f32[6, 16]
return (mm)

=== becomes ===

x: f32[6, 4]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp')  # (f32[6, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # f32[6, 16]
return (getitem_2)
""",
    )


def test_gather_of_a_permuted_shard() -> None:
    """The rows end as [batch, rank, row] although the shard is [row, batch, width]: the shard is permuted instead."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [4, 3, 8]), b.input("w", [8, 16])
    rows = b.reshape(b.permute(b.gather(x), [1, 0, 2]), [24, 8])
    assert_expected_inline(
        rewritten(b.returns(b.mm(rows, w))),
        """\
x: f32[4, 3, 8]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[8, 3, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[8, 3, 8]
permute = permute(wait_tensor, [1, 0, 2])  # f32[3, 8, 8]s[8, 24, 1]
reshape = reshape(permute, [24, 8])  # f32[24, 8]
mm = mm(reshape, w)  # f32[24, 16]
return (mm)

=== becomes ===

x: f32[4, 3, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=2, group_name='tp')  # (f32[8, 3, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[8, 3, 16]
reshape_default = reshape(getitem, [2, 4, 3, 16])  # f32[2, 4, 3, 16]
permute_default = permute(reshape_default, [2, 0, 1, 3])  # f32[3, 2, 4, 16]s[16, 192, 48, 1]
reshape_default_1 = reshape(permute_default, [24, 16])  # f32[24, 16]
return (reshape_default_1)
""",
    )


def test_gather_of_a_dynamic_sequence() -> None:
    """The sizes of the results are read off the shard; no tensor of the old chain stays alive for them."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 24, 8], dynamic=1), b.input("w", [8, 16])
    whole = b.cat(b.chunks(b.gather(x)), dim=1)
    length = b.call(aten.sym_size.int, whole, 1)
    out = b.reshape(b.mm(b.reshape(whole, [-1, 8]), w), [3, length, 16])
    assert_expected_inline(
        rewritten(b.returns(out)),
        """\
x: f32[3, s, 8]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[6, s, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6, s, 8]
split = split(wait_tensor, 3, 0)  # (f32[3, s, 8], f32[3, s, 8])
getitem = getitem(split, 0)  # f32[3, s, 8]
getitem_1 = getitem(split, 1)  # f32[3, s, 8]
cat = cat([getitem, getitem_1], 1)  # f32[3, 2*s, 8]
sym_size = sym_size(cat, 1)  # 2*s
reshape = reshape(cat, [-1, 8])  # f32[6*s, 8]
mm = mm(reshape, w)  # f32[6*s, 16]
reshape_1 = reshape(mm, [3, sym_size, 16])  # f32[3, 2*s, 16]
return (reshape_1)

=== becomes ===

x: f32[3, s, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp')  # (f32[3, 2*s, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # f32[3, 2*s, 16]
reshape_default = reshape(getitem_2, [-1, 16])  # f32[6*s, 16]
sym_size_int = sym_size(x, 1)  # s
mul = mul(sym_size_int, 2)  # 2*s
reshape_1 = reshape(reshape_default, [3, mul, 16])  # f32[3, 2*s, 16]
return (reshape_1)
""",
    )


# --- gather side: what is computed ---------------------------------------------------------------------------
def test_gather_for_several_matmuls_that_is_saved_too() -> None:
    """One op computes both products; what autograd saves becomes a second result, in the operand's shape."""
    b = GraphBuilder(ranks=2)
    x, wq, wk = b.input("x", [3, 4, 8]), b.input("wq", [8, 16]), b.input("wk", [8, 4])
    rows = b.reshape(b.cat(b.chunks(b.gather(x)), dim=1), [24, 8])
    assert_expected_inline(
        rewritten(b.returns(b.mm(rows, wq), b.mm(rows, wk), rows)),
        """\
x: f32[3, 4, 8]
wq: f32[8, 16]
wk: f32[8, 4]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[6, 4, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6, 4, 8]
split = split(wait_tensor, 3, 0)  # (f32[3, 4, 8], f32[3, 4, 8])
getitem = getitem(split, 0)  # f32[3, 4, 8]
getitem_1 = getitem(split, 1)  # f32[3, 4, 8]
cat = cat([getitem, getitem_1], 1)  # f32[3, 8, 8]
reshape = reshape(cat, [24, 8])  # f32[24, 8]
mm = mm(reshape, wq)  # f32[24, 16]
mm_1 = mm(reshape, wk)  # f32[24, 4]
return (mm, mm_1, reshape)

=== becomes ===

x: f32[3, 4, 8]
wq: f32[8, 16]
wk: f32[8, 4]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[wq, wk], biases=[None, None], gather_dim=1,
    return_a_full=True, group_size=2, group_name='tp')  # (f32[3, 8, 16], f32[3, 8, 4], f32[3, 8, 8])
getitem_2 = getitem(all_gather_matmul_default, 0)  # f32[3, 8, 16]
reshape_default = reshape(getitem_2, [24, 16])  # f32[24, 16]
getitem_3 = getitem(all_gather_matmul_default, 1)  # f32[3, 8, 4]
reshape_default_1 = reshape(getitem_3, [24, 4])  # f32[24, 4]
getitem_4 = getitem(all_gather_matmul_default, 2)  # f32[3, 8, 8]
reshape_default_2 = reshape(getitem_4, [24, 8])  # f32[24, 8]
return (reshape_default, reshape_default_1, reshape_default_2)
""",
    )


def test_gather_whose_own_result_is_saved() -> None:
    """The op returns rows in operand order; the collective's own order is rebuilt from them."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 4, 8]), b.input("w", [8, 16])
    gathered = b.gather(x)
    rows = b.reshape(b.cat(b.chunks(gathered), dim=1), [24, 8])
    assert_expected_inline(
        rewritten(b.returns(b.mm(rows, w), gathered)),
        """\
x: f32[3, 4, 8]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[6, 4, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6, 4, 8]
split = split(wait_tensor, 3, 0)  # (f32[3, 4, 8], f32[3, 4, 8])
getitem = getitem(split, 0)  # f32[3, 4, 8]
getitem_1 = getitem(split, 1)  # f32[3, 4, 8]
cat = cat([getitem, getitem_1], 1)  # f32[3, 8, 8]
reshape = reshape(cat, [24, 8])  # f32[24, 8]
mm = mm(reshape, w)  # f32[24, 16]
return (mm, wait_tensor)

=== becomes ===

x: f32[3, 4, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=True, group_size=2, group_name='tp')  # (f32[3, 8, 16], f32[3, 8, 8])
getitem_2 = getitem(all_gather_matmul_default, 0)  # f32[3, 8, 16]
reshape_default = reshape(getitem_2, [24, 16])  # f32[24, 16]
getitem_3 = getitem(all_gather_matmul_default, 1)  # f32[3, 8, 8]
reshape_default_1 = reshape(getitem_3, [3, 2, 4, 8])  # f32[3, 2, 4, 8]
permute_default = permute(reshape_default_1, [1, 0, 2, 3])  # f32[2, 3, 4, 8]s[32, 64, 8, 1]
clone_default = clone(permute_default, memory_format=torch.contiguous_format)  # f32[2, 3, 4, 8]
reshape_default_2 = reshape(clone_default, [6, 4, 8])  # f32[6, 4, 8]
return (reshape_default, reshape_default_2)
""",
    )


def test_gather_for_addmm() -> None:
    b = GraphBuilder()
    x, w, bias = b.input("x", [4, 8]), b.input("w", [8, 16]), b.input("bias", [16])
    assert_expected_inline(
        rewritten(b.returns(b.call(aten.addmm.default, bias, b.gather(x), w))),
        """\
x: f32[4, 8]
w: f32[8, 16]
bias: f32[16]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
addmm = addmm(bias, wait_tensor, w)  # f32[16, 16]
return (addmm)

=== becomes ===

x: f32[4, 8]
w: f32[8, 16]
bias: f32[16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[bias], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 16]
return (getitem)
""",
    )


def test_gather_for_a_product_that_a_low_rank_one_is_added_to() -> None:
    """LoRA: Inductor makes one addmm of the sum. What is added comes from the op itself, and is added behind it."""
    b = GraphBuilder()
    x, w, down, up = b.input("x", [4, 8]), b.input("w", [8, 16]), b.input("down", [8, 2]), b.input("up", [2, 16])
    whole = b.gather(x)
    low = b.mul(b.mm(b.mm(whole, down), up), 0.5)
    assert_expected_inline(
        rewritten(b.returns(b.call(aten.addmm.default, low, whole, w))),
        """\
x: f32[4, 8]
w: f32[8, 16]
down: f32[8, 2]
up: f32[2, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
mm = mm(wait_tensor, down)  # f32[16, 2]
mm_1 = mm(mm, up)  # f32[16, 16]
mul = mul(mm_1, 0.5)  # f32[16, 16]
addmm = addmm(mul, wait_tensor, w)  # f32[16, 16]
return (addmm)

=== becomes ===

x: f32[4, 8]
w: f32[8, 16]
down: f32[8, 2]
up: f32[2, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[down, w], biases=[None, None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 2], f32[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 2]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f32[16, 16]
mm_1 = mm(getitem, up)  # f32[16, 16]
mul = mul(mm_1, 0.5)  # f32[16, 16]
add_tensor = add(getitem_1, mul)  # f32[16, 16]
return (add_tensor)
""",
    )


def test_gather_for_a_tensorwise_scaled_matmul() -> None:
    """The bytes travel as uint8 in the program; the fused op takes the fp8 shard itself."""
    b = GraphBuilder()
    x, w = fp8_operands(b, 4, 32, 16)
    a_scale, b_scale = b.input("a_scale", []), b.input("b_scale", [])
    gathered = b.gather(b.call(aten.view.dtype, x, torch.uint8))
    out = b.scaled_mm(b.call(aten.view.dtype, gathered, FP8), w, a_scale, b_scale)
    assert_expected_inline(
        rewritten(b.returns(out)),
        """\
x: f8[4, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[]
b_scale: f32[]
view = view(x, u8)  # u8[4, 32]
all_gather_into_tensor = all_gather_into_tensor(view, 4, 'tp')  # u8[16, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # u8[16, 32]
view_1 = view(wait_tensor, f8)  # f8[16, 32]
_scaled_mm = _scaled_mm(view_1, w, a_scale, b_scale, out_dtype=bf16)  # bf16[16, 16]
return (_scaled_mm)

=== becomes ===

x: f8[4, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[]
b_scale: f32[]
view = view(x, u8)  # u8[4, 32]
view_dtype = view(view, f8)  # f8[4, 32]
all_gather_scaled_matmul_default = asynctp::all_gather_scaled_matmul(a_shard=view_dtype, a_scale=a_scale, bs=[w],
    b_scales=[b_scale], biases=[None], gather_dim=0, gather_a_scale=False, out_dtype=bf16, use_fast_accum=False,
    return_a_full=False, group_size=4, group_name='tp')  # (bf16[16, 16])
getitem = getitem(all_gather_scaled_matmul_default, 0)  # bf16[16, 16]
return (getitem)
""",
    )


def test_gather_for_a_rowwise_scaled_matmul_whose_scales_are_gathered_too() -> None:
    """Two collectives become one op."""
    b = GraphBuilder()
    x, w = fp8_operands(b, 4, 32, 16)
    a_scale, b_scale = b.input("a_scale", [4, 1]), b.input("b_scale", [1, 16])
    graph = b.returns(b.scaled_mm(b.gather(x), w, b.gather(a_scale), b_scale))
    assert_expected_inline(
        rewritten(graph),
        """\
x: f8[4, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[4, 1]
b_scale: f32[1, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f8[16, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f8[16, 32]
all_gather_into_tensor_1 = all_gather_into_tensor(a_scale, 4, 'tp')  # f32[16, 1]
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)  # f32[16, 1]
_scaled_mm = _scaled_mm(wait_tensor, w, wait_tensor_1, b_scale, out_dtype=bf16)  # bf16[16, 16]
return (_scaled_mm)

=== becomes ===

x: f8[4, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[4, 1]
b_scale: f32[1, 16]
all_gather_scaled_matmul_default = asynctp::all_gather_scaled_matmul(a_shard=x, a_scale=a_scale, bs=[w],
    b_scales=[b_scale], biases=[None], gather_dim=0, gather_a_scale=True, out_dtype=bf16, use_fast_accum=False,
    return_a_full=False, group_size=4, group_name='tp')  # (bf16[16, 16])
getitem = getitem(all_gather_scaled_matmul_default, 0)  # bf16[16, 16]
return (getitem)
""",
    )


def test_gather_of_data_and_scales_along_a_middle_dimension() -> None:
    """Both in three dimensions, each by pieces of its own."""
    b = GraphBuilder(ranks=2)
    x, scales = b.input("x", [3, 4, 32], FP8), b.input("a_scale", [3, 4, 1])
    rows = b.reshape(b.cat(b.chunks(b.gather(x)), dim=1), [24, 32])
    a_scale = b.reshape(b.cat(b.chunks(b.gather(scales)), dim=1), [24, 1])
    w = b.input("w", [32, 16], FP8, column_major=True)
    assert_expected_inline(
        rewritten(b.returns(b.scaled_mm(rows, w, a_scale, b.input("b_scale", [1, 16])))),
        """\
x: f8[3, 4, 32]
a_scale: f32[3, 4, 1]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f8[6, 4, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f8[6, 4, 32]
split = split(wait_tensor, 3, 0)  # (f8[3, 4, 32], f8[3, 4, 32])
getitem = getitem(split, 0)  # f8[3, 4, 32]
getitem_1 = getitem(split, 1)  # f8[3, 4, 32]
cat = cat([getitem, getitem_1], 1)  # f8[3, 8, 32]
reshape = reshape(cat, [24, 32])  # f8[24, 32]
all_gather_into_tensor_1 = all_gather_into_tensor(a_scale, 2, 'tp')  # f32[6, 4, 1]
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)  # f32[6, 4, 1]
split_1 = split(wait_tensor_1, 3, 0)  # (f32[3, 4, 1], f32[3, 4, 1])
getitem_2 = getitem(split_1, 0)  # f32[3, 4, 1]
getitem_3 = getitem(split_1, 1)  # f32[3, 4, 1]
cat_1 = cat([getitem_2, getitem_3], 1)  # f32[3, 8, 1]
reshape_1 = reshape(cat_1, [24, 1])  # f32[24, 1]
w: f8[32, 16]s[1, 32]
b_scale: f32[1, 16]
_scaled_mm = _scaled_mm(reshape, w, reshape_1, b_scale, out_dtype=bf16)  # bf16[24, 16]
return (_scaled_mm)

=== becomes ===

x: f8[3, 4, 32]
a_scale: f32[3, 4, 1]
w: f8[32, 16]s[1, 32]
b_scale: f32[1, 16]
all_gather_scaled_matmul_default = asynctp::all_gather_scaled_matmul(a_shard=x, a_scale=a_scale, bs=[w],
    b_scales=[b_scale], biases=[None], gather_dim=1, gather_a_scale=True, out_dtype=bf16, use_fast_accum=False,
    return_a_full=False, group_size=2, group_name='tp')  # (bf16[3, 8, 16])
getitem_4 = getitem(all_gather_scaled_matmul_default, 0)  # bf16[3, 8, 16]
reshape_default = reshape(getitem_4, [24, 16])  # bf16[24, 16]
return (reshape_default)
""",
    )


def test_gather_for_a_rowwise_scaled_matmul_whose_scales_are_whole() -> None:
    b = GraphBuilder()
    x, w = fp8_operands(b, 4, 32, 16)
    a_scale, b_scale = b.input("a_scale", [16, 1]), b.input("b_scale", [1, 16])
    assert_expected_inline(
        rewritten(b.returns(b.scaled_mm(b.gather(x), w, a_scale, b_scale))),
        """\
x: f8[4, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[16, 1]
b_scale: f32[1, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f8[16, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f8[16, 32]
_scaled_mm = _scaled_mm(wait_tensor, w, a_scale, b_scale, out_dtype=bf16)  # bf16[16, 16]
return (_scaled_mm)

=== becomes ===

x: f8[4, 32]
w: f8[32, 16]s[1, 32]
a_scale: f32[16, 1]
b_scale: f32[1, 16]
all_gather_scaled_matmul_default = asynctp::all_gather_scaled_matmul(a_shard=x, a_scale=a_scale, bs=[w],
    b_scales=[b_scale], biases=[None], gather_dim=0, gather_a_scale=False, out_dtype=bf16, use_fast_accum=False,
    return_a_full=False, group_size=4, group_name='tp')  # (bf16[16, 16])
getitem = getitem(all_gather_scaled_matmul_default, 0)  # bf16[16, 16]
return (getitem)
""",
    )


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
    reduce_op='sum', scatter_dim=1, group_size=4, group_name='tp', sum_dtype=None, added=relu, factors=[-1.0])  #
    bf16[2, 2, 12]
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
scaled_matmul_reduce_scatter_default = asynctp::scaled_matmul_reduce_scatter(a_parts=[reshape_default], b_parts=[w],
    a_scales=[reshape_default_1], b_scales=[b_scale], biases=[None], reduce_op='sum', scatter_dim=1, out_dtype=bf16,
    use_fast_accum=False, group_size=2, group_name='tp')  # bf16[3, 2, 16]
return (scaled_matmul_reduce_scatter_default)
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
scaled_matmul_reduce_scatter_default = asynctp::scaled_matmul_reduce_scatter(a_parts=[reshape_default,
    reshape_default_1], b_parts=[q_w, k_w], a_scales=[reshape_default_2, reshape_default_3], b_scales=[q_column,
    k_column], biases=[None, None], reduce_op='sum', scatter_dim=1, out_dtype=bf16, use_fast_accum=False,
    group_size=2, group_name='tp')  # bf16[3, 2, 16]
return (scaled_matmul_reduce_scatter_default)
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
scaled_matmul_all_reduce_default = asynctp::scaled_matmul_all_reduce(a_parts=[x], b_parts=[w], a_scales=[a_scale],
    b_scales=[b_scale], biases=[None], reduce_op='sum', out_dtype=bf16, use_fast_accum=True, group_name='tp')  #
    bf16[6, 16]
return (scaled_matmul_all_reduce_default)
""",
    )


# --- both, and how groups are named ----------------------------------------------------------------------------
def test_matmul_between_goes_to_the_scatter_when_the_gather_has_another() -> None:
    b = GraphBuilder()
    x, w, v = b.input("x", [4, 8]), b.input("w", [8, 12]), b.input("v", [8, 6])
    whole = b.gather(x)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.mm(whole, w)), b.mm(whole, v))),
        """\
x: f32[4, 8]
w: f32[8, 12]
v: f32[8, 6]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
mm = mm(wait_tensor, w)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(mm, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
mm_1 = mm(wait_tensor, v)  # f32[16, 6]
return (wait_tensor_1, mm_1)

=== becomes ===

x: f32[4, 8]
w: f32[8, 12]
v: f32[8, 6]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[v], biases=[None], gather_dim=0,
    return_a_full=True, group_size=4, group_name='tp')  # (f32[16, 6], f32[16, 8])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 6]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f32[16, 8]
reshape_default = reshape(getitem_1, [4, 4, 8])  # f32[4, 4, 8]
reshape_default_1 = reshape(reshape_default, [16, 8])  # f32[16, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default_1], b_parts=[w],
    biases=[None], reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[4, 12]
return (matmul_reduce_scatter_default, getitem)
""",
    )


def test_matmul_between_goes_to_the_gather_when_it_is_the_only_one() -> None:
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 12])
    graph = b.returns(b.scatter(b.mm(b.gather(x), w)))
    text, report = before_and_after(graph)
    assert [(remark.outcome, remark.name) for remark in report.remarks] == [("FUSED", ""), ("SKIPPED", "MATMUL_TAKEN")]
    assert_expected_inline(
        text,
        """\
x: f32[4, 8]
w: f32[8, 12]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
mm = mm(wait_tensor, w)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(mm, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor_1)

=== becomes ===

x: f32[4, 8]
w: f32[8, 12]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 12])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(getitem, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor_1)
""",
    )


def test_group_as_a_node() -> None:
    """Under compile_on_one_rank a graph carries the process group as an object."""
    module = load(CORPUS / "torch2.13_compile_on_one_rank" / "funcol_ag_2d_dim0__0.txt")
    assert_expected_inline(
        rewritten(module.graph),
        """\
arg0_1: Opaque
arg1_1: f32[8, 32]
arg2_1: f32[32, 16]
_opaque_obj0: NoneType
all_gather_into_tensor = all_gather_into_tensor(arg1_1, 4, _opaque_obj0)  # f32[32, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[32, 32]
mm = mm(wait_tensor, arg2_1)  # f32[32, 16]
return (mm)

=== becomes ===

arg0_1: Opaque
arg1_1: f32[8, 32]
arg2_1: f32[32, 16]
_opaque_obj0: NoneType
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=arg1_1, bs=[arg2_1], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name=_opaque_obj0)  # (f32[32, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[32, 16]
return (getitem)
""",
    )


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
all_gather_scaled_matmul_default = asynctp::all_gather_scaled_matmul(a_shard=x, a_scale=a_scale, bs=[w],
    b_scales=[reshape_default], biases=[None], gather_dim=0, gather_a_scale=True, out_dtype=bf16, use_fast_accum=True,
    return_a_full=False, group_size=4, group_name='tp')  # (bf16[64, 16])
getitem = getitem(all_gather_scaled_matmul_default, 0)  # bf16[64, 16]
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
all_gather_scaled_matmul_default = asynctp::all_gather_scaled_matmul(a_shard=x, a_scale=a_scale, bs=[w],
    b_scales=[slice_tensor], biases=[None], gather_dim=0, gather_a_scale=True, out_dtype=bf16, use_fast_accum=False,
    return_a_full=False, group_size=4, group_name='tp')  # (bf16[16, 144])
getitem = getitem(all_gather_scaled_matmul_default, 0)  # bf16[16, 144]
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
all_gather_scaled_matmul_default = asynctp::all_gather_scaled_matmul(a_shard=reshape_default_1,
    a_scale=reshape_default_2, bs=[w], b_scales=[b_scale], biases=[None], gather_dim=1, gather_a_scale=True,
    out_dtype=bf16, use_fast_accum=False, return_a_full=False, group_size=2, group_name='tp')  # (bf16[3, 8, 144])
getitem_2 = getitem(all_gather_scaled_matmul_default, 0)  # bf16[3, 8, 144]
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
scaled_matmul_reduce_scatter_default = asynctp::scaled_matmul_reduce_scatter(a_parts=[reshape_default,
    reshape_default_1], b_parts=[gate_w, up_w], a_scales=[reshape_default_2, reshape_default_3], b_scales=[gate_scale,
    up_scale], biases=[None, None], reduce_op='sum', scatter_dim=1, out_dtype=bf16, use_fast_accum=False,
    group_size=4, group_name='tp')  # bf16[3, 2, 144]
return (scaled_matmul_reduce_scatter_default)
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
scaled_matmul_all_reduce_default = asynctp::scaled_matmul_all_reduce(a_parts=[a], b_parts=[w],
    a_scales=[permute_default], b_scales=[permute_default_1], biases=[None], reduce_op='sum', out_dtype=bf16,
    use_fast_accum=False, group_name='tp')  # bf16[256, 16]
return (scaled_matmul_all_reduce_default)
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
    (op,) = graph.find_nodes(op="call_function", target=torch.ops.asynctp.all_gather_scaled_matmul.default)
    assert op.args[6], "the scales travel"


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
all_gather_scaled_matmul_default = asynctp::all_gather_scaled_matmul(a_shard=x, a_scale=a_scale, bs=[w],
    b_scales=[b_scale], biases=[None], gather_dim=0, gather_a_scale=True, out_dtype=bf16, use_fast_accum=False,
    return_a_full=False, group_size=2, group_name='tp')  # (bf16[32, 16])
getitem_2 = getitem(all_gather_scaled_matmul_default, 0)  # bf16[32, 16]
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
scaled_matmul_reduce_scatter_default = asynctp::scaled_matmul_reduce_scatter(a_parts=[a], b_parts=[w],
    a_scales=[a_scale], b_scales=[b_scale], biases=[None], reduce_op='sum', scatter_dim=1, out_dtype=bf16,
    use_fast_accum=False, group_size=2, group_name='tp')  # bf16[12, 8]
return (scaled_matmul_reduce_scatter_default)
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


# --- what holds for every rewrite ------------------------------------------------------------------------------
def test_new_nodes_say_where_they_come_from() -> None:
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 16])
    out = b.mm(b.gather(x), w)
    for node in b.graph.nodes:
        node.meta["stack_trace"] = f'File "model.py", line {len(node.name)}, in forward'
    graph = b.returns(b.relu(out))
    made = {node.name for node in graph.nodes}
    fuse(graph)
    for node in graph.nodes:
        assert node.name in made or node.meta["stack_trace"].startswith('File "model.py"')


def test_a_second_run_changes_nothing() -> None:
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 16])
    graph = b.returns(b.mm(b.gather(x), w))
    fuse(graph)
    after = show(graph)
    assert run(graph, Config(strict="all")).remarks == ()
    assert show(graph) == after


def test_the_rewrite_adds_no_guard() -> None:
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 24, 8], dynamic=1), b.input("w", [8, 16])
    rows = b.reshape(b.cat(b.chunks(b.gather(x)), dim=1), [-1, 8])
    graph = b.returns(b.scatter(b.reshape(b.relu(b.mm(rows, w)), [-1, 16])))
    shape_env = b.mode.shape_env
    guards, replacements = list(shape_env.guards), copy.copy(shape_env.replacements)
    run_pass(graph)
    assert shape_env.guards == guards
    assert shape_env.replacements == replacements


@pytest.mark.parametrize("name", ["block_sp_2dmesh_tp2__0", "mlp_sp_dim1_3d_B2__1"])
def test_groups_as_nodes_reach_the_fused_ops(name: str) -> None:
    graph = load(CORPUS / "torch2.13_compile_on_one_rank" / f"{name}.txt").graph
    groups = {node.args[-1] for node in graph.nodes if "all_gather_into" in str(node.target)}
    fuse(graph)
    fused = [node for node in graph.nodes if str(node.target).startswith("asynctp.")]
    assert fused
    assert {node.args[-1] for node in fused} == groups
    assert all(isinstance(group, Node) for group in groups)
