"""Gathers before and after the pass. `EXPECTTEST_ACCEPT=1` writes the expectations anew."""

from __future__ import annotations

import operator
from collections.abc import Callable
from operator import getitem
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, snapshot
from lockstep import differences, evaluate, op_name
from passes import outcomes, run_pass
from rewritten import FP8, fp8_operands, rewritten
from serving_ops import registered
from torch.fx import Graph, Node

from asynctp_passes import Config, run
from asynctp_passes.ir.order import communications
from asynctp_passes.planning import legality, plan
from asynctp_passes.planning.deviations import LOCAL
from asynctp_passes.planning.plan import planned, questions_of
from asynctp_passes.torch_private import process_groups

cast = torch.ops.prims.convert_element_type.default


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


def test_slice_that_begins_before_the_first_row() -> None:
    """As Python has it, it begins at the first one."""
    b = GraphBuilder(ranks=2)
    gathered, w = b.gather(b.input("x", [3, 4, 8])), b.input("w", [8, 16])
    pieces = [b.call(aten.slice.Tensor, gathered, 0, *ends) for ends in ((-100, 3), (3, 100))]
    assert outcomes(run_pass(b.returns(b.mm(b.reshape(b.cat(pieces, dim=1), [24, 8]), w)))) == ["F"]


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


def test_gather_whose_padding_is_cut_off() -> None:
    """15 rows on four ranks."""
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 16])
    rows = b.call(aten.slice.Tensor, b.gather(x), 0, 0, 15)
    assert_expected_inline(
        rewritten(b.returns(b.mm(rows, w))),
        """\
x: f32[4, 8]
w: f32[8, 16]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
slice_1 = slice(wait_tensor, 0, 0, 15)  # f32[15, 8]
mm = mm(slice_1, w)  # f32[15, 16]
return (mm)

=== becomes ===

x: f32[4, 8]
w: f32[8, 16]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 16]
slice_tensor = slice(getitem, 0, 0, 15)  # f32[15, 16]
return (slice_tensor)
""",
    )


def test_gather_whose_padding_is_cut_off_for_any_number_of_rows() -> None:
    """The tokens are padded to a multiple of the ranks, and a rank has its part of them."""
    b = GraphBuilder()
    tokens, w = b.input("tokens", [15, 8], dynamic=0), b.input("w", [8, 16])
    count = b.call(aten.sym_size.int, tokens, 0)
    more = b.call(operator.mod, b.call(operator.neg, count), 4)
    padded = b.call(aten.constant_pad_nd.default, tokens, [0, 0, 0, more])
    part = b.call(operator.floordiv, b.call(aten.sym_size.int, padded, 0), 4)
    rows = b.gather(b.call(aten.slice.Tensor, padded, 0, 0, part))
    assert_expected_inline(
        rewritten(b.returns(b.mm(b.call(aten.slice.Tensor, rows, 0, 0, count), w))),
        """\
tokens: f32[s, 8]
w: f32[8, 16]
sym_size = sym_size(tokens, 0)  # s
neg = neg(sym_size)  # -s
mod = mod(neg, 4)  # PythonMod(-s, 4)
constant_pad_nd = constant_pad_nd(tokens, [0, 0, 0, mod])  # f32[s + (PythonMod(-s, 4)), 8]
sym_size_1 = sym_size(constant_pad_nd, 0)  # s + (PythonMod(-s, 4))
floordiv = floordiv(sym_size_1, 4)  # ((s + (PythonMod(-s, 4)))//4)
slice_1 = slice(constant_pad_nd, 0, 0, floordiv)  # f32[((s + (PythonMod(-s, 4)))//4), 8]
all_gather_into_tensor = all_gather_into_tensor(slice_1, 4, 'tp')  # f32[4*(((s + (PythonMod(-s, 4)))//4)), 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[4*(((s + (PythonMod(-s, 4)))//4)), 8]
slice_2 = slice(wait_tensor, 0, 0, sym_size)  # f32[s, 8]
mm = mm(slice_2, w)  # f32[s, 16]
return (mm)

=== becomes ===

tokens: f32[s, 8]
w: f32[8, 16]
sym_size = sym_size(tokens, 0)  # s
neg = neg(sym_size)  # -s
mod = mod(neg, 4)  # PythonMod(-s, 4)
constant_pad_nd = constant_pad_nd(tokens, [0, 0, 0, mod])  # f32[s + (PythonMod(-s, 4)), 8]
sym_size_1 = sym_size(constant_pad_nd, 0)  # s + (PythonMod(-s, 4))
floordiv = floordiv(sym_size_1, 4)  # ((s + (PythonMod(-s, 4)))//4)
slice_1 = slice(constant_pad_nd, 0, 0, floordiv)  # f32[((s + (PythonMod(-s, 4)))//4), 8]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=slice_1, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[4*(((s + (PythonMod(-s, 4)))//4)), 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[4*(((s + (PythonMod(-s, 4)))//4)), 16]
sym_size_int = sym_size(tokens, 0)  # s
slice_tensor = slice(getitem, 0, 0, sym_size_int)  # f32[s, 16]
return (slice_tensor)
""",
    )


def test_gather_whose_padding_is_cut_off_a_sequence() -> None:
    """As DTensor has it, with the weight gradient beside: the gathered tensor is returned, and cut for that."""
    b = GraphBuilder(ranks=2)
    x, w, hidden = b.input("x", [3, 4, 8]), b.input("w", [8, 16]), b.input("hidden", [21, 5])
    whole = b.call(aten.slice.Tensor, b.cat(b.chunks(b.gather(x)), dim=1), 1, 0, 7)
    rows = b.reshape(b.call(aten.clone.default, whole, memory_format=torch.contiguous_format), [21, 8])
    out = b.reshape(b.mm(rows, w), [3, 7, 16])
    assert_expected_inline(
        rewritten(b.returns(out, b.mm(b.permute(rows, [1, 0]), hidden))),
        """\
x: f32[3, 4, 8]
w: f32[8, 16]
hidden: f32[21, 5]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # f32[6, 4, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6, 4, 8]
split = split(wait_tensor, 3, 0)  # (f32[3, 4, 8], f32[3, 4, 8])
getitem = getitem(split, 0)  # f32[3, 4, 8]
getitem_1 = getitem(split, 1)  # f32[3, 4, 8]
cat = cat([getitem, getitem_1], 1)  # f32[3, 8, 8]
slice_1 = slice(cat, 1, 0, 7)  # f32[3, 7, 8]s[64, 8, 1]
clone = clone(slice_1, memory_format=torch.contiguous_format)  # f32[3, 7, 8]
reshape = reshape(clone, [21, 8])  # f32[21, 8]
mm = mm(reshape, w)  # f32[21, 16]
reshape_1 = reshape(mm, [3, 7, 16])  # f32[3, 7, 16]
permute = permute(reshape, [1, 0])  # f32[8, 21]s[1, 8]
mm_1 = mm(permute, hidden)  # f32[8, 5]
return (reshape_1, mm_1)

=== becomes ===

x: f32[3, 4, 8]
w: f32[8, 16]
hidden: f32[21, 5]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=True, group_size=2, group_name='tp')  # (f32[3, 8, 16], f32[3, 8, 8])
getitem_2 = getitem(all_gather_matmul_default, 0)  # f32[3, 8, 16]
slice_tensor = slice(getitem_2, 1, 0, 7)  # f32[3, 7, 16]s[128, 16, 1]
clone_default = clone(slice_tensor, memory_format=torch.contiguous_format)  # f32[3, 7, 16]
reshape_default = reshape(clone_default, [21, 16])  # f32[21, 16]
getitem_3 = getitem(all_gather_matmul_default, 1)  # f32[3, 8, 8]
slice_tensor_1 = slice(getitem_3, 1, 0, 7)  # f32[3, 7, 8]s[64, 8, 1]
clone_default_1 = clone(slice_tensor_1, memory_format=torch.contiguous_format)  # f32[3, 7, 8]
reshape_default_1 = reshape(clone_default_1, [21, 8])  # f32[21, 8]
reshape_1 = reshape(reshape_default, [3, 7, 16])  # f32[3, 7, 16]
permute = permute(reshape_default_1, [1, 0])  # f32[8, 21]s[1, 8]
mm_1 = mm(permute, hidden)  # f32[8, 5]
return (reshape_1, mm_1)
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
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=view_dtype, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp', a_scale=a_scale, b_scales=[b_scale], gather_a_scale=False,
    out_dtype=bf16, use_fast_accum=False)  # (bf16[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[16, 16]
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
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp', a_scale=a_scale, b_scales=[b_scale], gather_a_scale=True,
    out_dtype=bf16, use_fast_accum=False)  # (bf16[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[16, 16]
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
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=1,
    return_a_full=False, group_size=2, group_name='tp', a_scale=a_scale, b_scales=[b_scale], gather_a_scale=True,
    out_dtype=bf16, use_fast_accum=False)  # (bf16[3, 8, 16])
getitem_4 = getitem(all_gather_matmul_default, 0)  # bf16[3, 8, 16]
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
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp', a_scale=a_scale, b_scales=[b_scale], gather_a_scale=False,
    out_dtype=bf16, use_fast_accum=False)  # (bf16[16, 16])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[16, 16]
return (getitem)
""",
    )


def quantized_to_int8(b: GraphBuilder, whole: Node, rows: int | Node) -> Graph:
    """A gathered tensor as int8 over its rows' maxima, which zeros of all rows limit, times int8."""
    w, convert = b.input("w", [64, 16], torch.int8), torch.ops.prims.convert_element_type.default
    zeros = b.call(aten.full.default, [rows, 1], 0, dtype=torch.bfloat16)
    most = b.call(aten.maximum.default, b.call(aten.amax.default, whole, [1], True), zeros)
    scale = b.call(convert, b.call(aten.div.Tensor, most, 127.5), torch.float32)
    rounded = b.call(aten.round.default, b.call(aten.div.Tensor, whole, scale))
    product = b.call(aten._int_mm.default, b.call(convert, rounded, torch.int8), w)
    return b.returns(b.mul(b.call(convert, product, torch.float32), scale))


@pytest.mark.parametrize(("rows", "dynamic"), [(3, None), (5, None), (3, 0)])
def test_text_of_a_gather_that_is_quantized_with_a_constant(rows: int, dynamic: int | None) -> None:
    """One rank may compile for static rows and another for dynamic ones: none of its sizes is in the text."""
    b = GraphBuilder(ranks=2)
    whole = b.gather(b.input("x", [rows, 64], torch.bfloat16, dynamic=dynamic))
    count = 2 * rows if dynamic is None else b.call(aten.sym_size.int, whole, 0)
    (question,) = questions_of(planned(quantized_to_int8(b, whole, count), Config()))
    scale = (
        "prims.convert_element_type.default(aten.div.Tensor(aten.maximum.default("
        "aten.amax.default(own[*, 64], [1], True), 0 of torch.bfloat16), 0x1.fe00000000000p+6), torch.float32)"
    )
    (text,) = question.deviations
    assert text.startswith("hoist: all_gather 0 sends ")
    assert text.endswith(f", apart {scale}")
    assert LOCAL not in text


def test_gather_that_is_quantized_to_int8_with_a_constant_for_every_row() -> None:
    """torchao's W8A8: int8 is gathered instead, and the scales of rows beside it. One row of zeros does for all."""
    b = GraphBuilder(ranks=2)
    whole = b.gather(b.input("x", [3, 64], torch.bfloat16))
    assert_expected_inline(
        rewritten(quantized_to_int8(b, whole, 6)),
        """\
x: bf16[3, 64]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp')  # bf16[6, 64]
wait_tensor = wait_tensor(all_gather_into_tensor)  # bf16[6, 64]
w: int8[64, 16]
full = full([6, 1], 0, dtype=bf16)  # bf16[6, 1]
amax = amax(wait_tensor, [1], True)  # bf16[6, 1]
maximum = maximum(amax, full)  # bf16[6, 1]
div = div(maximum, 127.5)  # bf16[6, 1]
convert_element_type = convert_element_type(div, f32)  # f32[6, 1]
div_1 = div(wait_tensor, convert_element_type)  # f32[6, 64]
round_1 = round(div_1)  # f32[6, 64]
convert_element_type_1 = convert_element_type(round_1, int8)  # int8[6, 64]
_int_mm = _int_mm(convert_element_type_1, w)  # int32[6, 16]
convert_element_type_2 = convert_element_type(_int_mm, f32)  # f32[6, 16]
mul = mul(convert_element_type_2, convert_element_type)  # f32[6, 16]
return (mul)

=== becomes ===

x: bf16[3, 64]
amax_default = amax(x, [1], True)  # bf16[3, 1]
w: int8[64, 16]
full = full([6, 1], 0, dtype=bf16)  # bf16[6, 1]
slice_tensor = slice(full, 0, 0, 1)  # bf16[1, 1]
maximum_default = maximum(amax_default, slice_tensor)  # bf16[3, 1]
div_tensor = div(maximum_default, 127.5)  # bf16[3, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[3, 1]
div_tensor_1 = div(x, convert_element_type_default)  # f32[3, 64]
round_default = round(div_tensor_1)  # f32[3, 64]
convert_element_type_default_1 = convert_element_type(round_default, int8)  # int8[3, 64]
all_gather_into_tensor_default = all_gather_into_tensor(convert_element_type_default, 2, 'tp')  # f32[6, 1]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default_1, bs=[w], biases=[None],
    gather_dim=0, return_a_full=False, group_size=2, group_name='tp')  # (int32[6, 16])
getitem = getitem(all_gather_matmul_default, 0)  # int32[6, 16]
convert_element_type_2 = convert_element_type(getitem, f32)  # f32[6, 16]
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)  # f32[6, 1]
mul = mul(convert_element_type_2, wait_tensor_default)  # f32[6, 16]
return (mul)
""",
    )


# --- a gather that stays, and whose fused op comes late ------------------------------------------------------
def late_beside_draws(draws: int) -> Graph:
    """A gather that is returned, and whose quantized form waits for an all-reduce after so many draws."""
    b = GraphBuilder(ranks=2)
    scale = b.all_reduce(b.call(aten.amax.default, b.input("z", [4])), "max")
    whole, noise = b.gather(b.input("x", [4, 32])), b.input("y", [16, 32])
    kept = b.call(aten.cumsum.default, whole, 0)
    for _ in range(draws):
        noise = b.call(aten.bernoulli.p, noise, 0.5)
    weight = b.permute(b.call(cast, b.all_reduce(noise), FP8), [1, 0])
    rows = b.call(cast, b.call(aten.mul.Tensor, whole, scale), FP8)
    return b.returns(kept, b.scaled_mm(rows, weight, b.one(), b.one()))


def order_of(graph: Graph) -> list[str]:
    return [op_name(node.target).split("::")[1] for node in communications(graph.nodes)]


@pytest.mark.parametrize(("draws", "code"), [(0, "F"), (1, "F"), (2, "ATP209")])
def test_a_gather_that_stays_moves_with_its_op_or_neither_does(draws: int, code: str) -> None:
    """Ranks that draw several random numbers keep these in place, with the gather before them."""
    graph = late_beside_draws(draws)
    assert outcomes(run_pass(graph))[1] == code
    late = ["all_reduce", "all_reduce", "all_gather_matmul", "all_gather"]
    assert order_of(graph) == (late if code == "F" else ["all_reduce", "all_gather_into_tensor", "all_reduce"])


@pytest.mark.usefixtures("internal_errors")
def test_an_order_that_is_not_as_planned_is_an_error_of_the_package() -> None:
    """Whatever check was missing: the ranks would call the gather in unlike orders."""
    graph = late_beside_draws(2)
    checks = tuple(check for check in legality.CHECKS if check is not legality.kept_gather_can_move)
    with mock.patch.object(plan, "CHECKS", checks):
        report = run(graph, Config(strict="off"))
    (error,) = report.internal_errors
    assert "the order of communication is not as planned" in error
    assert order_of(graph) == ["all_reduce", "all_gather_into_tensor", "all_reduce"]


# --- an all-to-all -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rank", "device", "code"), [(1, "cpu", "ATP015"), (0, "cpu", "ATP103"), (1, "cuda", "ATP103")]
)
@pytest.mark.parametrize("split", [aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default])
def test_an_all_to_all_is_left_alone(
    split: Callable[..., object], rank: int, device: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the number of the piece, and on CPU only: on GPUs DTensor calls one collective."""
    monkeypatch.setattr(process_groups, "rank_in_group", lambda group: rank)
    b = GraphBuilder(ranks=2)
    sizes = {aten.split.Tensor: 4, aten.chunk.default: 2, aten.split_with_sizes.default: [4, 4]}
    pieces = b.call(split, b.gather(b.input("x", [4, 8], device=device)), sizes[split], 1)
    own = b.call(aten.clone.default, b.call(getitem, pieces, 1), memory_format=torch.contiguous_format)
    graph = b.returns(b.mm(own, b.input("w", [4, 6], device=device)), b.permute(own, [1, 0]))
    before = snapshot(graph)
    assert outcomes(run_pass(graph)) == [code]
    assert device == "cuda" or snapshot(graph) == before  # the gather of a group goes by asynctp's transport there


@pytest.mark.parametrize(
    ("dim", "shape", "matrix"),
    [(1, [2, 3, 4, 2], [12, 8]), (2, [2, 2, 3, 8], [24, 8]), (2, [2, 3, 6], [6, 12]), (3, [2, 3, 2, 4], [12, 8])],
)
def test_what_a_gather_along_another_dimension_returns(dim: int, shape: list[int], matrix: list[int]) -> None:
    """A registered op's, of which the matmul has a view with other dimensions, and which is returned as it came."""

    def build() -> Graph:
        b = GraphBuilder(ranks=2)
        whole = b.call(torch.ops.vllm_like.all_gather.default, b.input("x", shape), dim, 2, "tp")
        return b.returns(b.mm(b.reshape(whole, matrix), b.input("w", [matrix[1], 5])), whole)

    with registered():
        before, after = build(), build()
        assert outcomes(run_pass(after)) == ["F"]
        values = [[torch.rand(shape), torch.rand(matrix[1], 5)] for _ in range(2)]
        assert differences(evaluate(before, values), evaluate(after, values)) == []
