"""Graphs that once were rewritten wrongly, crashed the pass, or were refused without need.

One function a graph: it builds the graph and returns its outputs. The table below says what becomes of each collective,
in graph order (`F` is FUSED, else the code), and every graph must compute the same before and after.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lockstep import differences, evaluate
from passes import copied, outcomes, run_pass
from programs import Builder
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from asynctp_passes import Report

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FP8, OTHER_FP8 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GROUP = "tp"
Attack = Callable[[Builder], list[Node]]


def gathered(b: Builder, shard: Node) -> Node:
    """All-gather and wait."""
    return b.call(c10d.wait_tensor.default, b.call(c10d.all_gather_into_tensor.default, shard, b.world_size, GROUP))


def scattered(b: Builder, full: Node) -> Node:
    """Reduce-scatter and wait."""
    result = b.call(c10d.reduce_scatter_tensor.default, full, "sum", b.world_size, GROUP)
    return b.call(c10d.wait_tensor.default, result)


def scattered_by_columns(b: Builder, full: Node) -> Node:
    return scattered(b, chunks(b, full, full.meta["val"].shape[1] // b.world_size, 1, 0))


def inputs(b: Builder, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Node]:
    return [b.placeholder(shape, dtype) for shape in shapes]


def chunks(b: Builder, x: Node, size: int, dim: int, into: int) -> Node:
    """`cat(x.split(size, dim), into)`."""
    return b.call(aten.cat.default, b.items(b.call(aten.split.Tensor, x, size, dim)), into)


def in_region(b: Builder, inner: Graph, result: torch.Tensor, *operands: Node) -> Node:
    """The result of a subgraph, as `torch.compiler.nested_compile_region` makes one."""
    holder = torch.nn.Module()
    holder.region = torch.fx.GraphModule({}, inner)
    b.graph.owning_module = holder  # type: ignore[assignment]
    call = b.graph.get_attr("region"), "region", *operands
    (node,) = b.items(b.call_like((result,), torch.ops.higher_order.invoke_subgraph, *call))
    return node


# --- memory: which tensors share it must not change ----------------------------------------------------
def copy_of_gathered_then_mutated(b: Builder) -> list[Node]:
    """The operand is a copy, so adding to the gathered tensor does not reach it."""
    x, w = inputs(b, (4, 6), (6, 8))
    full = gathered(b, x)
    operand = b.call(aten.clone.default, full)
    product = b.call(aten.mm.default, operand, w)
    b.call(aten.add_.Tensor, full, 1)
    return [product, operand, full]


def operand_mutated_in_a_region(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 8))
    full, inner = gathered(b, x), Graph()
    changed = inner.call_function(aten.add_.Tensor, (inner.placeholder("full"), 1.0))
    inner.output((inner.call_function(aten.neg.default, (changed,)),))
    return [in_region(b, inner, full.meta["val"], full), b.call(aten.mm.default, full, w)]


def base_of_operand_mutated(b: Builder) -> list[Node]:
    """The operand is a view, so adding to its base does reach it."""
    x, w = inputs(b, (2, 4, 6), (6, 8))
    base = chunks(b, gathered(b, x), 2, 0, 1)
    operand = b.call(aten.view.default, base, [16, 6])
    product = b.call(aten.mm.default, operand, w)
    b.call(aten.add_.Tensor, base, 1)
    return [product, operand, base]


# --- dtypes seen as others ---------------------------------------------------------------------------------
def bytes_as_two_fp8_types(b: Builder) -> list[Node]:
    (x,) = inputs(b, (16, 32), dtype=FP8)
    w = b.placeholder((32, 16), FP8, strides=(1, 32))
    one = b.placeholder((), torch.float32, "scale")
    full = gathered(b, b.call(aten.view.dtype, x, torch.uint8))
    seen = [b.call(aten.view.dtype, full, dtype) for dtype in (FP8, OTHER_FP8)]
    return [b.call(aten._scaled_mm.default, a, w, one, one, None, None, torch.bfloat16) for a in seen]


def words_as_two_half_types(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 8), dtype=torch.bfloat16)
    (other,) = inputs(b, (6, 8), dtype=torch.float16)
    full = gathered(b, b.call(aten.view.dtype, x, torch.int16))
    seen = [b.call(aten.view.dtype, full, dtype) for dtype in (torch.bfloat16, torch.float16)]
    return [b.call(aten.mm.default, a, weight) for a, weight in zip(seen, (w, other), strict=True)]


def product_summed_as_integers(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 8))
    return [scattered(b, b.call(aten.view.dtype, b.call(aten.mm.default, x, w), torch.int64))]


def terms_added_as_integers(b: Builder) -> list[Node]:
    x, y, w = inputs(b, (4, 6), (4, 6), (6, 8))
    terms = [b.call(aten.view.dtype, b.call(aten.mm.default, a, w), torch.int64) for a in (x, y)]
    return [scattered(b, b.call(aten.view.dtype, b.call(aten.add.Tensor, *terms), torch.float64))]


def bits_negated(bits: torch.dtype, dtype: torch.dtype, times: bool = False) -> Attack:
    """Minus the product's bits, as an integer: another number than minus the product."""

    def attack(b: Builder) -> list[Node]:
        x, w = inputs(b, (4, 6), (6, 8), dtype=torch.bfloat16)
        product = b.call(aten.mm.default, x, w)
        if dtype != torch.bfloat16:
            product = b.call(torch.ops.prims.convert_element_type.default, product, dtype)
        seen = b.call(aten.view.dtype, product, bits)
        seen = b.call(aten.mul.Tensor, seen, -1) if times else b.call(aten.neg.default, seen)
        return [scattered(b, b.call(aten.view.dtype, seen, dtype))]

    return attack


# --- gathered scales -----------------------------------------------------------------------------------------
def rowwise(
    b: Builder, data_order: list[int] | None, scale_order: list[int] | None, wire: torch.dtype = torch.float32
) -> list[Node]:
    """Data [3, 4, 16] and its scales are gathered, then their dimensions [ranks, 3, 4] are permuted into rows."""
    x, scale = b.placeholder((3, 4, 16), FP8), b.placeholder((3, 4, 1), torch.float32, "scale")
    w, w_scale = b.placeholder((16, 16), FP8, strides=(1, 16)), b.placeholder((1, 16), torch.float32, "scale")
    sent = b.call(aten.view.dtype, scale, wire) if wire != torch.float32 else scale
    rows = []
    for shard, order in ((x, data_order), (sent, scale_order)):
        *_, width = shard.meta["val"].shape
        full = b.call(aten.view.default, gathered(b, shard), [b.world_size, 3, 4, width])
        full = full if order is None else b.call(aten.permute.default, full, order)
        rows.append(b.call(aten.reshape.default, full, [-1, width]))
    a_scale = b.call(aten.view.dtype, rows[1], torch.float32) if wire != torch.float32 else rows[1]
    return [b.call(aten._scaled_mm.default, rows[0], w, a_scale, w_scale, None, None, torch.bfloat16)]


def scaled_bias(b: Builder, shape: tuple[int, ...], dtype: torch.dtype) -> list[Node]:
    x, w = b.placeholder((16, 32), FP8), b.placeholder((32, 16), FP8, strides=(1, 32))
    one, bias = b.placeholder((), torch.float32, "scale"), b.placeholder(shape, dtype)
    return [b.call(aten._scaled_mm.default, gathered(b, x), w, one, one, bias, None, torch.bfloat16)]


# --- quantized between the gather and the matmul ----------------------------------------------------------------
def cast(b: Builder, x: Node, dtype: torch.dtype) -> Node:
    return b.call(torch.ops.prims.convert_element_type.default, x, dtype)


def amax(b: Builder, x: Node, dims: list[int]) -> Node:
    """Of absolute values, at least 1."""
    return b.call(aten.clamp_min.default, b.call(aten.amax.default, b.call(aten.abs.default, x), dims, True), 1.0)


def scaled_product(b: Builder, rows: Node, scale: Node) -> Node:
    """Of fp8 rows [m, 32] with their scales [m, 1]."""
    w, w_scale = b.placeholder((32, 16), FP8, strides=(1, 32)), b.placeholder((1, 16), torch.float32, "scale")
    return b.call(aten._scaled_mm.default, rows, w, scale, w_scale, None, None, torch.bfloat16)


def divided(b: Builder, x: Node, scale: Node) -> Node:
    return cast(b, b.call(aten.div.Tensor, x, scale), FP8)


Scale = Callable[[Builder, Node], Node]


def quantized(b: Builder, scale_of: Scale, used: Scale | None = None) -> list[Node]:
    """A gathered tensor [8, 32] over one scale, and the product of that with it, or with another one."""
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    return [scaled_product(b, divided(b, whole, scale_of(b, whole)), (used or scale_of)(b, whole))]


def of_rows(b: Builder, x: Node) -> Node:
    return amax(b, x, [-1])


def of_everything(b: Builder, x: Node) -> Node:
    one = b.call(aten.expand.default, amax(b, x, [0, 1]), [8, 1])
    return b.call(aten.clone.default, one, memory_format=torch.contiguous_format)


def by_one_scale(scale_of: Scale, used: Scale | None = None, then: Scale | None = None) -> Attack:
    """A gathered tensor [8, 32] over a scale that has no value for each row, and a product with one number as scale.

    What is made of the gathered tensor `then` is returned too.
    """

    def attack(b: Builder) -> list[Node]:
        (x,) = inputs(b, (4, 32), dtype=torch.float32)
        whole = gathered(b, x)
        scale = scale_of(b, whole)
        w, one = b.placeholder((32, 16), FP8, strides=(1, 32)), b.placeholder((), torch.float32, "scale")
        of_a = one if used is None else used(b, whole)
        quantized = divided(b, whole, scale)
        product = b.call(aten._scaled_mm.default, quantized, w, of_a, one, None, None, torch.bfloat16)
        return [product] if then is None else [product, then(b, whole)]

    return attack


def one_of(reduction: Any, *args: Any) -> Scale:
    """Of absolute values, at least 1."""

    def scale(b: Builder, x: Node) -> Node:
        return b.call(aten.clamp_min.default, b.call(reduction, b.call(aten.abs.default, x), *args), 1.0)

    return scale


def largest_without_abs(b: Builder, x: Node) -> Node:
    return b.call(aten.clamp_min.default, b.call(aten.max.default, x), 1.0)


def largest_of_what_is_scaled(b: Builder, x: Node) -> Node:
    """Known from what is computed with what is known already."""
    first = one_of(aten.max.default)(b, x)
    return one_of(aten.amax.default, [0, 1])(b, b.call(aten.div.Tensor, x, first))


def largest_times_that_of_each_rank(b: Builder, x: Node) -> Node:
    """Known to every rank, and not the same on all."""
    return b.call(aten.mul.Tensor, one_of(aten.max.default)(b, x), b.placeholder((), torch.float32))


def largest_changed_in_place(b: Builder, x: Node) -> Node:
    largest = one_of(aten.max.default)(b, x)
    b.call(aten.mul_.Tensor, largest, 2.0)
    return largest


def largest_behind_a_change(b: Builder, x: Node) -> Node:
    """Of the gathered tensor as it was before."""
    b.call(aten.add_.Tensor, b.placeholder((4, 32), torch.float32), 1.0)
    return one_of(aten.max.default)(b, x)


def largest_of_several_views(b: Builder, x: Node) -> Node:
    """One number, twice."""
    flat = one_of(aten.max.default)(b, b.call(aten.view.default, x, [256]))
    return b.call(aten.maximum.default, flat, one_of(aten.max.default)(b, x))


def largest_of_a_part(b: Builder, x: Node) -> Node:
    """Of the rows of one rank."""
    return one_of(aten.max.default)(b, b.call(aten.slice.Tensor, x, 0, 0, 4))


def largest_of_some_columns(b: Builder, x: Node) -> Node:
    """Several tensors, each known to every rank."""
    of_columns = b.call(aten.amax.default, b.call(aten.abs.default, x), [0])
    first, second = b.items(b.call(aten.split.Tensor, of_columns, 16))
    return b.call(aten.maximum.default, first, second)


def once_more_behind_a_change(b: Builder, x: Node) -> Node:
    """Of other values."""
    b.call(aten.mul_.Tensor, x, 3.0)
    return divided(b, x, one_of(aten.max.default)(b, x))


def over_the_old_scale_behind_a_change(b: Builder, x: Node) -> Node:
    """The same op of the same tensor, which was changed in between, over the same scale."""
    scale = one_of(aten.max.default)(b, x)
    b.call(aten.mul_.Tensor, x, 3.0)
    return divided(b, x, scale)


def reciprocals_of_scales_in_two_shapes(b: Builder) -> list[Node]:
    """The same few numbers, gathered on their own once, for users of a tensor of theirs each."""
    whole = gathered(b, b.placeholder((2, 4, 32), torch.float32))
    scale = amax(b, whole, [-1])
    rows = b.call(aten.view.default, divided(b, whole, scale), [16, 32])
    column = b.call(aten.view.default, scale, [16, 1])
    reciprocals = [b.call(aten.reciprocal.default, one) for one in (scale, column)]
    return [scaled_product(b, rows, column), *reciprocals]


def largest_bits(b: Builder, x: Node) -> Node:
    """Of positive numbers those of the largest; communication libraries do not take all integers."""
    bits = b.call(aten.view.dtype, cast(b, b.call(aten.abs.default, x), torch.bfloat16), torch.int16)
    return b.call(aten.clamp_min.default, cast(b, b.call(aten.max.default, bits), torch.float32), 1.0)


def mean_of_all(b: Builder, x: Node) -> Node:
    return one_of(aten.mean.default)(b, x)


BY_ONE_SCALE: dict[str, tuple[Attack, str]] = {
    "the largest": (by_one_scale(one_of(aten.max.default)), "F"),
    "the largest, for the matmul too": (by_one_scale(*[one_of(aten.max.default)] * 2), "F"),
    "the largest, in two dimensions": (by_one_scale(one_of(aten.amax.default, [0, 1], True)), "F"),
    "the smallest": (by_one_scale(one_of(aten.min.default)), "F"),
    "the smallest, by dimensions": (by_one_scale(one_of(aten.amin.default, [-1, -2])), "F"),
    "the largest of each column": (by_one_scale(one_of(aten.amax.default, [0])), "F"),
    "the largest, negative too": (by_one_scale(largest_without_abs), "F"),
    "the largest of what is scaled": (by_one_scale(largest_of_what_is_scaled), "F"),
    "the largest of several views": (by_one_scale(largest_of_several_views), "F"),
    "the largest, another for the matmul": (by_one_scale(one_of(aten.max.default), largest_of_what_is_scaled), "F"),
    "the largest times that of each rank": (by_one_scale(largest_times_that_of_each_rank), "ATP208"),
    "the largest times that of each rank, for the matmul": (
        by_one_scale(one_of(aten.max.default), largest_times_that_of_each_rank),
        "F",
    ),
    "the largest, changed in place": (by_one_scale(largest_changed_in_place), "ATP208"),
    "the largest, changed in place for the matmul": (
        by_one_scale(one_of(aten.max.default), largest_changed_in_place),
        "ATP204",
    ),
    "the largest, behind a change of something else": (by_one_scale(largest_behind_a_change), "ATP204"),
    "the largest of some columns": (by_one_scale(one_of(aten.max.default), then=largest_of_some_columns), "F"),
    "the largest, again behind a change": (
        by_one_scale(one_of(aten.max.default), then=once_more_behind_a_change),
        "F",
    ),
    "the largest, for other values behind a change": (
        by_one_scale(one_of(aten.max.default), then=over_the_old_scale_behind_a_change),
        "F",
    ),
    "the largest of a part": (by_one_scale(largest_of_a_part), "ATP106"),
    "the largest bits": (by_one_scale(largest_bits), "ATP117"),
    "the mean": (by_one_scale(mean_of_all), "ATP117"),
}


def of_pairs_of_rows(b: Builder, x: Node) -> Node:
    """Rows r and r + 4, of different ranks, share a scale."""
    shared = amax(b, b.call(aten.view.default, x, [2, 4, 32]), [0, 2])
    return b.call(aten.reshape.default, b.call(aten.cat.default, [shared, shared]), [8, 1])


def of_neighbours(b: Builder, x: Node) -> Node:
    """Rows 2 r and 2 r + 1, of one rank, share a scale: computed by parts, but repeated for the matmul."""
    shared = amax(b, b.call(aten.view.default, x, [4, 2, 32]), [1, 2])
    return b.call(aten.reshape.default, b.call(aten.expand.default, shared, [4, 2, 1]), [8, 1])


def of_rows_reversed(b: Builder, x: Node) -> Node:
    return b.call(aten.flip.default, of_rows(b, x), [0])


def of_rows_of_other_rank(b: Builder, x: Node) -> Node:
    """The ranks' scales, swapped."""
    return b.call(aten.cat.default, b.items(b.call(aten.split.Tensor, of_rows(b, x), 4))[::-1])


def of_transposed_parts(b: Builder, x: Node) -> Node:
    """The rows' scales with the rows of each rank in another order: every rank has its own part, but of other rows."""
    parts = b.call(aten.view.default, of_rows(b, x), [2, 2, 2, 1])
    return b.call(aten.reshape.default, b.call(aten.permute.default, parts, [0, 2, 1, 3]), [8, 1])


def of_half_a_row(b: Builder, x: Node) -> Node:
    return of_rows(b, b.call(aten.slice.Tensor, x, 1, 0, 16))


def given_by_each_rank(b: Builder, x: Node) -> Node:
    """Scales for all rows from outside: each rank has its own."""
    return b.placeholder((8, 1), torch.float32, "scale")


def one_by_each_rank(b: Builder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, of_rows(b, x), b.placeholder((1,), torch.float32, "scale"))


def reduced_over(b: Builder, group: str) -> Node:
    """The largest of the ranks' numbers, over a group."""
    (number,) = inputs(b, (1,), dtype=torch.float32)
    largest = b.call(c10d.all_reduce.default, b.call(aten.abs.default, number), "max", group)
    return b.call(c10d.wait_tensor.default, largest)


def one_by_all_ranks(b: Builder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, of_rows(b, x), b.call(aten.add.Tensor, reduced_over(b, GROUP), 1.0))


def one_by_ranks_of_another_group(b: Builder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, of_rows(b, x), b.call(aten.add.Tensor, reduced_over(b, "dp"), 1.0))


def one_by_row_number(b: Builder, x: Node) -> Node:
    numbers = b.call(aten.arange.default, 8, dtype=torch.float32)
    return b.call(aten.add.Tensor, of_rows(b, x), b.call(aten.view.default, numbers, [8, 1]))


def quantized_piece_by_piece(b: Builder) -> list[Node]:
    """Another scale for each rank's piece, each computed from that piece alone."""
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    pieces = b.items(b.call(aten.split.Tensor, gathered(b, x), 4))
    rows = b.call(aten.cat.default, [divided(b, piece, amax(b, piece, [-1])) for piece in pieces])
    return [scaled_product(b, rows, b.call(aten.cat.default, [amax(b, piece, [-1]) for piece in pieces]))]


def half_quantized(b: Builder) -> list[Node]:
    """The first rank's rows are scaled, the other's are not: pieces of two tensors in one."""
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    scaled = b.call(aten.div.Tensor, whole, of_rows(b, whole))
    first, second = (b.items(b.call(aten.split.Tensor, part, 4))[index] for index, part in enumerate((scaled, whole)))
    return [scaled_product(b, cast(b, b.call(aten.cat.default, [first, second]), FP8), of_rows(b, whole))]


def with_numbers_of_rows(numbers_of: Scale) -> Attack:
    """Rows [3, ranks * 4] are quantized by their own scales, and numbers of rows are returned too."""

    def build(b: Builder) -> list[Node]:
        (x,) = inputs(b, (3, 4, 32), dtype=torch.float32)
        whole = gathered(b, x)
        rows = b.call(aten.reshape.default, chunks(b, whole, 3, 0, 1), [24, 32])
        own = b.call(aten._scaled_mm.default, divided(b, rows, of_rows(b, rows)), *weight_and_numbers(b))
        return [own, numbers_of(b, whole)]

    return build


def weight_and_numbers(b: Builder) -> tuple[Any, ...]:
    """A weight and one scale each, of a product in bf16."""
    scales = [b.placeholder((), torch.float32, "scale") for _ in range(2)]
    return b.placeholder((32, 16), FP8, strides=(1, 32)), *scales, None, None, torch.bfloat16


def of_rows_by_rank(b: Builder, whole: Node) -> Node:
    """One for each row, in the order of the ranks."""
    return of_rows(b, whole)


def of_rows_in_bf16(b: Builder, whole: Node) -> Node:
    """One for each row, in their order, in fewer bits."""
    return of_rows(b, cast(b, chunks(b, whole, 3, 0, 1), torch.bfloat16))


def with_scales_of_rows_by_rank(b: Builder) -> list[Node]:
    """The matmul takes the rows [3, ranks * 4], and their scales [ranks * 3, 4] as if they were in that order."""
    (x,) = inputs(b, (3, 4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    rows = b.call(aten.reshape.default, chunks(b, whole, 3, 0, 1), [24, 32])
    by_rank = b.call(aten.reshape.default, of_rows(b, whole), [24, 1])
    return [scaled_product(b, divided(b, rows, of_rows(b, rows)), by_rank)]


def of_rows_without_their_dimension(b: Builder, x: Node) -> Node:
    largest = b.call(aten.amax.default, b.call(aten.abs.default, x), [-1])
    return b.call(aten.unsqueeze.default, b.call(aten.clamp_min.default, largest, 1.0), -1)


def one_by_parts(b: Builder, x: Node) -> Node:
    """Each rank has another part of a sum."""
    (numbers,) = inputs(b, (2,), dtype=torch.float32)
    part = scattered(b, b.call(aten.abs.default, numbers))
    return b.call(aten.mul.Tensor, of_rows(b, x), b.call(aten.add.Tensor, part, 1.0))


def mantissas_quantized(b: Builder) -> list[Node]:
    """By an op that works element by element, and returns two tensors."""
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    mantissa = b.call(operator.getitem, b.call(aten.frexp.Tensor, gathered(b, x)), 0)
    return [b.call(aten._scaled_mm.default, cast(b, mantissa, FP8), *weight_and_numbers(b))]


def quantized_by_what_each_rank_changes(b: Builder) -> list[Node]:
    """The largest of all ranks, to which each adds its own."""
    largest, (own, x) = reduced_over(b, GROUP), inputs(b, (1,), (4, 32), dtype=torch.float32)
    b.call(aten.add_.Tensor, largest, b.call(aten.abs.default, own))
    return [b.call(aten._scaled_mm.default, divided(b, gathered(b, x), largest), *weight_and_numbers(b))]


def quantized_then_mutated(b: Builder) -> list[Node]:
    """The gathered tensor changes after it was read, and another user sees that."""
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    (product,) = [scaled_product(b, divided(b, whole, of_rows(b, whole)), of_rows(b, whole))]
    b.call(aten.add_.Tensor, whole, 1)
    return [product, whole]


def mutated_then_quantized(b: Builder) -> list[Node]:
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    scale = of_rows(b, whole)
    b.call(aten.add_.Tensor, whole, 1)
    return [scaled_product(b, divided(b, whole, scale), scale)]


def shard_mutated_while_quantized(b: Builder) -> list[Node]:
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    b.call(aten.add_.Tensor, x, 1)
    return [scaled_product(b, divided(b, whole, of_rows(b, whole)), of_rows(b, whole))]


def quantized_rows_and_a_view_of_them_saved(b: Builder) -> list[Node]:
    """Two results share memory, as before."""
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    rows = divided(b, whole, of_rows(b, whole))
    view = b.call(aten.view.default, rows, [2, 4, 32])
    return [scaled_product(b, rows, of_rows(b, whole)), rows, view]


def zeros_of_two_signs(b: Builder) -> list[Node]:
    """Numbers that are equal and not the same: 0.0 and -0.0."""
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    return [
        scaled_product(b, divided(b, b.call(aten.mul.Tensor, whole, zero), of_rows(b, whole)), of_rows(b, whole))
        for zero in (0.0, -0.0)
    ]


def weight_from_quantized_rows(b: Builder) -> list[Node]:
    """Both operands are computed from the gathered tensor."""
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    rows, scale = divided(b, whole, of_rows(b, whole)), of_rows(b, whole)
    columns, column_scale = b.call(aten.permute.default, rows, [1, 0]), b.call(aten.view.default, scale, [1, 8])
    return [b.call(aten._scaled_mm.default, rows, columns, scale, column_scale, None, None, torch.bfloat16)]


def block_scales_by_shape(a_scale: tuple[int, int], b_scale: tuple[int, int]) -> Attack:
    """`_scaled_mm` is told by shapes of which blocks scales are: here of [256, 512] @ [512, 144]."""

    def attack(b: Builder) -> list[Node]:
        x, w = b.placeholder((128, 512), FP8), b.placeholder((512, 144), FP8, strides=(1, 512))
        scales = [b.placeholder(shape, torch.float32, "scale") for shape in (a_scale, b_scale)]
        with b.mode:
            value = torch.empty(256, 144, dtype=torch.bfloat16)
        args = (gathered(b, x), w, *scales, None, None, torch.bfloat16)
        return [b.call_like(value, aten._scaled_mm.default, *args)]

    return attack


# --- one weight for all matrices of a batch ----------------------------------------------------------------------
def batch_times(*steps: tuple[Any, ...], weight: tuple[int, ...] = (6, 6)) -> Attack:
    """A gathered batch [6, 4, 6] times a weight that is repeated for all of it, and then seen in other ways."""

    def attack(b: Builder) -> list[Node]:
        x, right = inputs(b, (3, 4, 6), weight)
        right = b.call(aten.expand.default, right, [6, 6, 6])
        for target, *arguments in steps:
            right = b.call(target, right, *arguments)
        return [b.call(aten.bmm.default, gathered(b, x), right)]

    return attack


def batch_times_ones(b: Builder) -> list[Node]:
    (x,) = inputs(b, (3, 4, 6))
    return [b.call(aten.bmm.default, gathered(b, x), b.call(aten.full.default, [6, 6, 6], 1.0, dtype=torch.float64))]


# --- gathered scales of blocks -----------------------------------------------------------------------------------
def blockwise(b: Builder, rows: Node, a_scale: Node, kinds: tuple[int, int] = (4, 5)) -> list[Node]:
    """The product of fp8 rows [m, k] with scales of blocks, as `scaled_mm` takes them: 1x128 (4) or 128x128 (5)."""
    (m, k), n = rows.meta["val"].shape, 144
    w = b.placeholder((k, n), FP8, strides=(1, k))
    depth, padded = -(-k // 128), -(-k // 512) * 4
    shape = (n, depth) if kinds[1] == 4 else (padded, 2)
    w_scale = b.placeholder(shape, torch.float32, "scale", strides=(1, shape[0]))
    with b.mode:
        value = torch.empty(m, n, dtype=torch.bfloat16)
    sides = ([a_scale], [kinds[0]], [], [w_scale], [kinds[1]], [])
    return [b.call_like(value, aten._scaled_mm_v2.default, rows, w, *sides, None, torch.bfloat16)]


def gathered_blocks(
    data_order: list[int] | None,
    scale_order: list[int] | None,
    after: Callable[[Builder, Node], Node] = lambda b, scale: scale,
    group: str = GROUP,
) -> Attack:
    """Data [3, 4, 512] and its scales are gathered, and their dimensions [ranks, 3, 4] are permuted into rows."""

    def attack(b: Builder) -> list[Node]:
        x, scale = b.placeholder((3, 4, 512), FP8), b.placeholder((3, 4, 4), torch.float32, "scale")
        rows = []
        for shard, order, name in ((x, data_order, GROUP), (scale, scale_order, group)):
            *_, width = shard.meta["val"].shape
            call = b.call(c10d.all_gather_into_tensor.default, shard, b.world_size, name)
            full = b.call(aten.view.default, b.call(c10d.wait_tensor.default, call), [b.world_size, 3, 4, width])
            full = full if order is None else b.call(aten.permute.default, full, order)
            rows.append(b.call(aten.reshape.default, full, [-1, width]))
        columns = b.call(aten.clone.default, b.call(aten.t.default, after(b, rows[1])))
        return blockwise(b, rows[0], b.call(aten.t.default, columns))

    return attack


def blocks_flipped(b: Builder, scale: Node) -> Node:
    return b.call(aten.flip.default, scale, [1])


def blocks_of_two_pieces(b: Builder, scale: Node) -> Node:
    """The first and the second half of K, the other way round."""
    return b.call(aten.cat.default, b.items(b.call(aten.split.Tensor, scale, 2, 1))[::-1], 1)


def blocks_interleaved(b: Builder, scale: Node) -> Node:
    """The blocks 0, 2, 1, 3 of K: every rank has them all."""
    pairs = b.call(aten.view.default, scale, [24, 2, 2])
    return b.call(aten.reshape.default, b.call(aten.permute.default, pairs, [0, 2, 1]), [24, 4])


def ranks_swapped(b: Builder, scale: Node) -> Node:
    return b.call(aten.cat.default, b.items(b.call(aten.split.Tensor, scale, 12))[::-1])


def first_block_for_all(b: Builder, scale: Node) -> Node:
    return b.call(aten.cat.default, [b.call(aten.slice.Tensor, scale, 1, 0, 1)] * 4, 1)


def seen_by_columns(b: Builder, scale: Node) -> Node:
    """The same numbers, in the order of their transpose."""
    return b.call(aten.reshape.default, b.call(aten.clone.default, b.call(aten.t.default, scale)), [24, 4])


def tall_blocks(rows: int, gathers: bool) -> Attack:
    """Scales of 128x128 blocks of a gathered A, which are gathered with it, or are the same on all ranks."""

    def attack(b: Builder) -> list[Node]:
        whole, shape = gathered(b, b.placeholder((rows, 512), FP8)), (2 * rows // 128, 4)
        one_rank = (rows // 128, 4) if gathers else shape
        scale = b.placeholder(one_rank, torch.float32, "scale")
        return blockwise(b, whole, b.call(aten.t.default, gathered(b, scale) if gathers else scale), (5, 4))

    return attack


def tall_blocks_of_rows(rows: int, reduce: Callable[[Builder, Node], Node]) -> Attack:
    def attack(b: Builder) -> list[Node]:
        a, scale = b.placeholder((rows, 512), FP8), b.placeholder((4, -(-rows // 128)), torch.float32, "scale")
        return [reduce(b, *blockwise(b, a, scale, (5, 4)))]

    return attack


def block_scales_of_several_columns(strides: tuple[int, int]) -> Attack:
    """`_scaled_mm` has two blocks of K, and scales of B with these strides: cuBLAS takes their columns as padded."""

    def attack(b: Builder) -> list[Node]:
        x, w = b.placeholder((4, 256), FP8), b.placeholder((256, 144), FP8, strides=(1, 256))
        scales = [b.placeholder((8, 2), torch.float32, "scale", strides=(1, 8))]
        scales += [b.placeholder((2, 2), torch.float32, "scale", strides=strides)]
        with b.mode:
            value = torch.empty(8, 144, dtype=torch.bfloat16)
        args = (gathered(b, x), w, *scales, None, None, torch.bfloat16)
        return [b.call_like(value, aten._scaled_mm.default, *args)]

    return attack


def quantized_in_blocks(scale_of: Scale, used: Scale | None = None) -> Attack:
    """A gathered tensor [8, 256] over one scale for each block, and the product of that with it, or with another."""

    def attack(b: Builder) -> list[Node]:
        (x,) = inputs(b, (4, 256), dtype=torch.float32)
        blocks = b.call(aten.view.default, gathered(b, x), [8, 2, 128])
        rows = b.call(aten.reshape.default, divided(b, blocks, scale_of(b, blocks)), [8, 256])
        return blockwise(b, rows, b.call(aten.reshape.default, (used or scale_of)(b, blocks), [8, 2]))

    return attack


def of_blocks(b: Builder, blocks: Node) -> Node:
    return amax(b, blocks, [-1])


def of_blocks_of_other_rank(b: Builder, blocks: Node) -> Node:
    return b.call(aten.cat.default, b.items(b.call(aten.split.Tensor, of_blocks(b, blocks), 4))[::-1])


def of_blocks_swapped(b: Builder, blocks: Node) -> Node:
    """Each row's two scales, the other way round: every rank has its own."""
    return b.call(aten.cat.default, b.items(b.call(aten.split.Tensor, of_blocks(b, blocks), 1, 1))[::-1], 1)


def of_blocks_of_all_rows(b: Builder, blocks: Node) -> Node:
    one = b.call(aten.expand.default, amax(b, blocks, [0, 2]), [8, 2, 1])
    return b.call(aten.clone.default, one, memory_format=torch.contiguous_format)


def of_blocks_of_two_ranks(b: Builder, blocks: Node) -> Node:
    """Blocks of two rows, of different ranks."""
    shared = amax(b, b.call(aten.view.default, blocks, [2, 4, 2, 128]), [0, 3])
    return b.call(aten.reshape.default, b.call(aten.cat.default, [shared, shared]), [8, 2, 1])


def of_blocks_by_sums(b: Builder, blocks: Node) -> Node:
    return b.call(aten.sum.dim_IntList, b.call(aten.abs.default, blocks), [-1], True)


# --- computed between, not quantized ------------------------------------------------------------------------------
def computed(b: Builder, compute: Callable[[Builder, Node], Node]) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 8))
    return [b.call(aten.mm.default, compute(b, gathered(b, x)), w)]


def times_input(shape: tuple[int, ...]) -> Callable[[Builder, Node], Node]:
    return lambda b, x: b.call(aten.mul.Tensor, x, b.placeholder(shape, torch.float64))


def softmaxed(b: Builder, x: Node) -> Node:
    """Over the rows of all ranks, in pointwise ops and reductions."""
    powers = b.call(aten.exp.default, b.call(aten.sub.Tensor, x, b.call(aten.amax.default, x, [0], True)))
    return b.call(aten.div.Tensor, powers, b.call(aten.sum.dim_IntList, powers, [0], True))


def gathered_last_and_reduced(b: Builder) -> list[Node]:
    """The ranks lie along the contraction, over which the amax is taken."""
    x, w = inputs(b, (4, 6), (12, 8))
    whole = chunks(b, gathered(b, x), 4, 0, 1)
    return [b.call(aten.mm.default, b.call(aten.mul.Tensor, whole, b.call(aten.amax.default, whole, [-1], True)), w)]


def gathered_last_and_negated(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (12, 8))
    return [b.call(aten.mm.default, b.call(aten.neg.default, chunks(b, gathered(b, x), 4, 0, 1)), w)]


# --- views and terms that look like others ---------------------------------------------------------------------
def last_dimensions_swapped(b: Builder) -> list[Node]:
    x, w = inputs(b, (2, 3, 4), (3, 5))
    whole = b.call(aten.transpose.int, gathered(b, x), 1, 2)
    return [b.call(aten.mm.default, b.call(aten.reshape.default, whole, [16, 3]), w)]


def seen_as_fewer_elements(b: Builder) -> list[Node]:
    x, w = b.placeholder((4, 16), torch.float32), b.placeholder((8, 5), torch.float64)
    return [b.call(aten.mm.default, b.call(aten.view.dtype, gathered(b, x), torch.float64), w)]


def expanded_to_more_dimensions(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 8), (8, 5))
    repeated = b.call(aten.expand.default, gathered(b, x), [8, 8, 8])
    return [b.call(aten.mm.default, b.call(aten.reshape.default, repeated, [64, 8]), w)]


def square_product_and(shape: tuple[int, ...], first: bool = False) -> Attack:
    """A square product that a tensor is added to, which repeats it."""

    def build(b: Builder) -> list[Node]:
        a, w, other = inputs(b, (8, 5), (5, 8), shape)
        terms = [b.call(aten.mm.default, a, w), other]
        return [scattered(b, b.call(aten.add.Tensor, *(terms[::-1] if first else terms)))]

    return build


def product_divided_by_zero(b: Builder) -> list[Node]:
    a, w = inputs(b, (8, 5), (5, 6))
    return [scattered(b, b.call(aten.div.Tensor, b.call(aten.mm.default, a, w), 0.0))]


def half_product_times_float(b: Builder) -> list[Node]:
    """A product of 16 bits times one of 32 has 32, and is no conversion."""
    a, w = inputs(b, (8, 5), (5, 6), dtype=torch.bfloat16)
    factor = b.placeholder((8, 6), torch.float32)
    return [scattered(b, b.call(aten.mul.Tensor, b.call(aten.mm.default, a, w), factor))]


def half_product_as_the_other_half(b: Builder) -> list[Node]:
    a, w = inputs(b, (8, 5), (5, 6), dtype=torch.float16)
    return [scattered(b, cast(b, b.call(aten.mm.default, a, w), torch.bfloat16))]


# --- sizes, mutation, pieces -----------------------------------------------------------------------------------
def kernel_that_mutates(b: Builder) -> list[Node]:
    """A user's Triton kernel is a higher-order op: it has no schema that would say that it writes."""
    x, w = inputs(b, (4, 6), (6, 8))
    full = gathered(b, x)
    kernel = b.graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation, (), {"kwargs": {"x": x}})
    kernel.meta["val"] = None
    return [b.call(aten.mm.default, full, w)]


def finer_split_of_moved_blocks(b: Builder) -> list[Node]:
    """The pieces of the second split start at 0, 1, 4, 5: they count, but not at one distance."""
    x, w = inputs(b, (1, 2, 2), (4, 3))
    moved = chunks(b, gathered(b, x), 1, 0, 2)
    return [b.call(aten.mm.default, b.call(aten.reshape.default, chunks(b, moved, 1, 2, 2), [2, 4]), w)]


def finer_pieces_swapped(b: Builder) -> list[Node]:
    x, w = inputs(b, (1, 2, 2), (4, 3))
    pieces = b.items(b.call(aten.split.Tensor, chunks(b, gathered(b, x), 1, 0, 2), 1, 2))
    swapped = b.call(aten.cat.default, [pieces[place] for place in (0, 1, 3, 2)], 2)
    return [b.call(aten.mm.default, b.call(aten.reshape.default, swapped, [2, 4]), w)]


# --- lists of tensors, and one weight for a batch -------------------------------------------------------------------
def gathered_list(b: Builder, *shards: Node) -> Node:
    return b.call(c10d.all_gather_into_tensor_coalesced.default, list(shards), b.world_size, GROUP)


def waited_items(b: Builder, results: Node) -> list[Node]:
    return [b.call(c10d.wait_tensor.default, item) for item in b.items(results)]


def items_of_a_list_by(*places: int) -> Attack:
    def attack(b: Builder) -> list[Node]:
        x, y, w = inputs(b, (4, 6), (4, 6), (6, 8))
        results = gathered_list(b, x, y)
        items = [b.call(operator.getitem, results, place) for place in places]
        return [b.call(aten.mm.default, b.call(c10d.wait_tensor.default, item), w) for item in items]

    return attack


def shard_of_a_list_mutated(b: Builder) -> list[Node]:
    """Between the collective and the place where its item is taken."""
    x, w = inputs(b, (4, 6), (6, 8))
    results = gathered_list(b, x)
    b.call(aten.add_.Tensor, x, 1)
    return [b.call(aten.mm.default, full, w) for full in waited_items(b, results)]


def one_shard_twice_in_a_list(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 8))
    return [b.call(aten.mm.default, full, w) for full in waited_items(b, gathered_list(b, x, x))]


def items_of_a_list_joined(b: Builder) -> list[Node]:
    """The blocks of two gathers: no gather of either."""
    x, y, w = inputs(b, (4, 6), (4, 6), (6, 8))
    joined = b.call(aten.cat.default, waited_items(b, gathered_list(b, x, y)))
    return [b.call(aten.mm.default, joined, w)]


def product_and_its_transpose_in_one_list(b: Builder) -> list[Node]:
    """Each is reduced: neither collective may take the other one's tensor for its own."""
    product = b.call(aten.mm.default, *inputs(b, (8, 5), (5, 6)))
    turned = b.call(aten.clone.default, b.call(aten.t.default, product), memory_format=torch.contiguous_format)
    return waited_items(b, b.call(c10d.all_reduce_coalesced.default, [product, turned], "sum", GROUP))


def one_sum_all_reduced_twice(b: Builder) -> list[Node]:
    total = b.call(aten.add.Tensor, product_of(b), routed(b, (6, 8)))
    return waited_items(b, b.call(c10d.all_reduce_coalesced.default, [total, total], "sum", GROUP))


def one_product_scattered_twice(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 8))
    product = b.call(aten.mm.default, x, w)
    operands = ([product, product], "sum", b.world_size, GROUP)
    return waited_items(b, b.call(c10d.reduce_scatter_tensor_coalesced.default, *operands))


def items_that_need_each_other(b: Builder) -> list[Node]:
    """The weight of a matmul of each gather comes from the other's: one that needs the later gather is by itself."""
    x, y, w = inputs(b, (4, 8), (4, 8), (8, 8))
    first, second = waited_items(b, gathered_list(b, x, y))
    products = [b.call(aten.mm.default, full, w) for full in (first, second)]
    return [b.call(aten.mm.default, first, products[1]), b.call(aten.mm.default, second, products[0])]


def weight_mutated_after_it_was_expanded(b: Builder) -> list[Node]:
    x, w = inputs(b, (2, 4, 6), (6, 8))
    weights = b.call(aten.expand.default, w, [2, 6, 8])
    b.call(aten.add_.Tensor, w, 1)
    return [b.call(aten.bmm.default, chunks(b, gathered(b, x), 2, 0, 1), weights)]


def weight_copied_before_it_is_mutated(b: Builder) -> list[Node]:
    """A copy of the expanded weight is not seen through."""
    x, w = inputs(b, (2, 4, 6), (6, 8))
    weights = b.call(aten.clone.default, b.call(aten.expand.default, w, [2, 6, 8]))
    b.call(aten.add_.Tensor, w, 1)
    return [b.call(aten.bmm.default, chunks(b, gathered(b, x), 2, 0, 1), weights)]


def batch_of_weights_that_looks_like_one(b: Builder) -> list[Node]:
    """Two matrices seen as one more: the view keeps the last two sizes, and the matrices differ."""
    x, w = inputs(b, (2, 4, 6), (2, 1, 6, 8))
    return [b.call(aten.bmm.default, chunks(b, gathered(b, x), 2, 0, 1), b.call(aten.view.default, w, [2, 6, 8]))]


def weight_transposed_once_in_the_batch(b: Builder) -> list[Node]:
    x, w = inputs(b, (2, 4, 6), (6, 6))
    weights = b.call(aten.permute.default, b.call(aten.expand.default, w, [2, 6, 6]), [0, 2, 1])
    return [b.call(aten.bmm.default, chunks(b, gathered(b, x), 2, 0, 1), weights)]


# --- chains that meet ----------------------------------------------------------------------------------------
def scatter_feeds_gather(b: Builder) -> list[Node]:
    x, w, v = inputs(b, (4, 6), (6, 8), (8, 5))
    return [b.call(aten.mm.default, gathered(b, scattered(b, b.call(aten.mm.default, x, w))), v)]


def gather_feeds_weight_of_gather(b: Builder) -> list[Node]:
    x, w, y = inputs(b, (4, 6), (6, 8), (3, 8))
    return [b.call(aten.mm.default, gathered(b, y), b.call(aten.mm.default, gathered(b, x), w))]


def three_gathers_in_a_circle(b: Builder) -> list[Node]:
    *shards, w = inputs(b, (4, 8), (4, 8), (4, 8), (8, 8))
    fulls = [gathered(b, shard) for shard in shards]
    products = [b.call(aten.mm.default, full, w) for full in fulls]
    crossed = [b.call(aten.mm.default, fulls[i], products[(i + 1) % 3]) for i in range(3)]
    return [*products, *crossed]


# --- sums that are addmm -----------------------------------------------------------------------------------
def term_added_by_addmm_and_again(b: Builder) -> list[Node]:
    """`mm + (mm + a @ w)`: the first product counts twice."""
    a, w, c, v = inputs(b, (8, 4), (4, 6), (8, 4), (4, 6))
    one = b.call(aten.mm.default, a, w)
    return [scattered(b, b.call(aten.add.Tensor, one, b.call(aten.addmm.default, one, c, v)))]


def bias_as_long_as_there_are_rows(b: Builder) -> list[Node]:
    x, w, bias = inputs(b, (4, 6), (6, 8), (8,))
    return [b.call(aten.addmm.default, bias, gathered(b, x), w)]


def residual_added_by_addmm(b: Builder) -> list[Node]:
    a, w, residual = inputs(b, (8, 4), (4, 6), (8, 6))
    return [scattered(b, b.call(aten.addmm.default, residual, a, w))]


def operand_added_to_its_product(by_addmm: bool) -> Attack:
    """`p + p @ w`, of a product `p`."""

    def attack(b: Builder) -> list[Node]:
        x, w, other = inputs(b, (8, 4), (4, 4), (4, 4))
        first = b.call(aten.mm.default, x, w)
        if by_addmm:
            return [scattered(b, b.call(aten.addmm.default, first, first, other))]
        return [all_reduced(b, b.call(aten.add.Tensor, first, b.call(aten.mm.default, first, other)))]

    return attack


def gathered_added_to_its_product(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 6))
    full = gathered(b, x)
    return [b.call(aten.addmm.default, full, full, w)]


def routed(b: Builder, shape: tuple[int, ...] = (8, 8), dtype: torch.dtype = torch.float64) -> Node:
    """What is computed of an input without a matmul, row by row."""
    return b.call(aten.relu.default, b.placeholder(shape, dtype))


def product_and(*shape: int, order: Callable[[Node, Node], tuple[Node, Node]] = lambda p, x: (p, x)) -> Attack:
    """A product in this shape and a tensor are added, and scattered along the first dimension."""

    def attack(b: Builder) -> list[Node]:
        out = b.call(aten.view.default, b.call(aten.mm.default, *inputs(b, (8, 4), (4, 8))), list(shape))
        return [scattered(b, b.call(aten.add.Tensor, *order(out, routed(b, shape))))]

    return attack


def routed_tokens_of_a_batch(b: Builder) -> list[Node]:
    """Sharded along the second of three dimensions; the sum is transposed after, and its term used elsewhere too."""
    out = b.call(aten.view.default, b.call(aten.mm.default, *inputs(b, (12, 4), (4, 8))), [3, 4, 8])
    term = routed(b, (3, 4, 8))
    total = b.call(aten.add.Tensor, term, out)
    return [scattered(b, b.call(aten.clone.default, b.call(aten.permute.default, total, [1, 0, 2]))), term]


def term_with_strides(b: Builder) -> list[Node]:
    term = b.call(aten.permute.default, routed(b, (6, 8)), [1, 0])
    sums = [b.call(aten.sub.Tensor, term, b.call(aten.mm.default, *inputs(b, (8, 4), (4, 6)))) for _ in range(2)]
    return [scattered(b, sums[0]), all_reduced(b, sums[1])]


def terms_at_every_level(number: float, dtype: torch.dtype = FP64, whole: float = 1.0) -> Attack:
    """(-((p + x) / -2 - (q - y) * number) + z) * whole in views of their own."""

    def attack(b: Builder) -> list[Node]:
        p, q = (b.call(aten.mm.default, *inputs(b, (8, 4), (4, 6), dtype=dtype)) for _ in range(2))
        seen = b.call(aten.view.default, q, [2, 4, 6])
        first = b.call(aten.div.Tensor, b.call(aten.add.Tensor, p, routed(b, (8, 6), dtype)), -2.0)
        second = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, seen, routed(b, (2, 4, 6), dtype)), number)
        both = b.call(aten.sub.Tensor, first, b.call(aten.view.default, second, [8, 6]))
        total = b.call(aten.add.Tensor, b.call(aten.neg.default, both), routed(b, (8, 6), dtype))
        return [scattered(b, total if whole == 1 else b.call(aten.mul.Tensor, total, whole))]

    return attack


def sum_multiplied(*numbers: float, dtype: torch.dtype = FP64, wide: bool = False) -> Attack:
    """(p + q) times numbers, converted to fp32 or not."""

    def attack(b: Builder) -> list[Node]:
        p, q = (b.call(aten.mm.default, *inputs(b, (8, 4), (4, 6), dtype=dtype)) for _ in range(2))
        total = b.call(aten.add.Tensor, p, q)
        for number in numbers:
            total = b.call(aten.mul.Tensor, total, number)
        return [scattered(b, rounded(b, total, FP32) if wide else total)]

    return attack


def term_changed_in_place(before: bool) -> Attack:
    """The term changes before it is added, or between that and the collective."""

    def attack(b: Builder) -> list[Node]:
        a, w, term = inputs(b, (8, 4), (4, 6), (8, 6))
        if before:
            b.call(aten.add_.Tensor, term, 1)
        total = b.call(aten.add.Tensor, b.call(aten.mm.default, a, w), term)
        if not before:
            b.call(aten.add_.Tensor, term, 1)
        return [scattered(b, total)]

    return attack


def copy_of_a_product_that_was_changed(b: Builder) -> list[Node]:
    """The copy is the term: the product of another kind that it was made of is another tensor by then."""
    other = fp8_product(b, factor(b, ()))
    term = b.call(aten.clone.default, other)
    b.call(aten.add_.Tensor, other, 100)
    product = b.call(aten.mm.default, *inputs(b, (8, 64), (64, 16), dtype=BF16))
    return [scattered(b, b.call(aten.add.Tensor, product, term))]


def reduced_copy_of_what_was_changed(b: Builder) -> list[Node]:
    """Of two that are summed, one reduces a transposed copy, whose source is another tensor by then."""
    a, w, x = inputs(b, (8, 4), (4, 6), (8, 6))
    copies = [transposed_copy(b, x)]
    b.call(aten.add_.Tensor, x, 1)
    copies.append(transposed_copy(b, b.call(aten.mm.default, a, w)))
    return [b.call(aten.add.Tensor, *(all_reduced(b, copy) for copy in copies))]


def transposed_copy(b: Builder, x: Node) -> Node:
    return b.call(aten.clone.default, b.call(aten.t.default, x), memory_format=torch.contiguous_format)


def columns_added_by_addmm(b: Builder) -> list[Node]:
    """What is added lies in memory by columns, the sum by rows."""
    x, w = inputs(b, (4, 6), (6, 8))
    out = b.call(aten.addmm.default, b.placeholder((8, 8), torch.float64, strides=(1, 8)), gathered(b, x), w)
    return [out, b.call(aten.view.default, out, [64])]


def scales_changed_once_their_list_is_gathered(behind: bool) -> Attack:
    """What takes them from the list comes later. `behind`: they scale the product behind it."""

    def attack(b: Builder) -> list[Node]:
        scales, w = factor(b, (4, 1)), b.placeholder((32, 16), FP8, strides=(1, 32))
        call = b.call(c10d.all_gather_into_tensor_coalesced.default, [scales, factor(b, (2,))], b.world_size, GROUP)
        b.call(aten.mul_.Tensor, scales, 3)
        of_rows, other = (b.call(c10d.wait_tensor.default, item) for item in b.items(call))
        own = [unit(b), unit(b)] if behind else [of_rows, factor(b, (1, 16))]
        rows = gathered(b, b.placeholder((4, 32), FP8))
        out = b.call(aten._scaled_mm.default, rows, w, *own, None, None, torch.bfloat16)
        return [times(b, rounded(b, out, FP32), of_rows) if behind else out, other]

    return attack


def term_computed_of_the_product(b: Builder) -> list[Node]:
    out = b.call(aten.mm.default, *inputs(b, (8, 4), (4, 6)))
    return [scattered(b, b.call(aten.add.Tensor, out, b.call(aten.relu.default, out)))]


def term_gathered_with_its_product(b: Builder) -> list[Node]:
    """The term is a product that a gather is fused with."""
    x, w, y, v = inputs(b, (4, 6), (6, 8), (8, 6), (6, 8))
    first = b.call(aten.relu.default, b.call(aten.mm.default, gathered(b, x), w))
    return [scattered(b, b.call(aten.add.Tensor, b.call(aten.mm.default, y, v), first))]


def products_of_two_shapes(b: Builder) -> list[Node]:
    """One is added to the other, which contracts over more."""
    a, w, c, v = inputs(b, (8, 4), (4, 6), (16, 6), (6, 3))
    other = b.call(aten.view.default, b.call(aten.mm.default, c, v), [8, 6])
    return [all_reduced(b, b.call(aten.add.Tensor, b.call(aten.mm.default, a, w), other))]


def products_of_two_kinds(b: Builder) -> list[Node]:
    """One in fp8 and one in bf16, which is computed before, and used elsewhere too."""
    plain = b.call(aten.mm.default, *inputs(b, (8, 4), (4, 16), dtype=torch.bfloat16))
    scaled = rounded(b, times(b, fp8_product(b, unit(b)), factor(b, (8, 1))))
    return [scattered(b, b.call(aten.add.Tensor, plain, scaled)), plain]


def product_of_another_kind_by_addmm(depth: int, *, adds_the_other: bool) -> Attack:
    """A product in bf16 that a tensor is added to, or the one in fp8, and that is a term beside that."""

    def attack(b: Builder) -> list[Node]:
        a, w, tensor = inputs(b, (8, depth), (depth, 16), (8, 16), dtype=torch.bfloat16)
        scaled = rounded(b, times(b, fp8_product(b, unit(b)), factor(b, (8, 1))))
        if adds_the_other:
            return [scattered(b, b.call(aten.addmm.default, scaled, a, w))]
        return [scattered(b, b.call(aten.add.Tensor, b.call(aten.addmm.default, tensor, a, w), scaled))]

    return attack


def transposed_product_added_by_addmm(b: Builder) -> list[Node]:
    a, w, c, v = inputs(b, (8, 4), (4, 8), (8, 4), (4, 8))
    one = b.call(aten.permute.default, b.call(aten.mm.default, a, w), [1, 0])
    return [scattered(b, b.call(aten.addmm.default, one, c, v))]


def scaled_addmm_of_a_product(b: Builder) -> list[Node]:
    a, w, c, v = inputs(b, (8, 4), (4, 6), (8, 4), (4, 6))
    return [scattered(b, b.call(aten.addmm.default, b.call(aten.mm.default, a, w), c, v, beta=2))]


def products_added_by_addmm(b: Builder) -> list[Node]:
    a, w, c, v = inputs(b, (8, 4), (4, 6), (8, 4), (4, 6))
    total = b.call(aten.addmm.default, b.call(aten.mm.default, a, w), c, v)
    return [scattered(b, b.call(aten.reshape.default, total, [2, 4, 6]))]


def gathered_rows_added_to(b: Builder) -> list[Node]:
    """A gather's addmm with a matrix for a bias."""
    x, w, bias = inputs(b, (4, 6), (6, 8), (8, 8))
    return [b.call(aten.addmm.default, bias, gathered(b, x), w)]


def gathered_rows_added_to_another_gathers(b: Builder) -> list[Node]:
    """The first op makes an operand of the second one, whose result is what the first one's is added to."""
    x, y, w, v, u = inputs(b, (4, 6), (4, 6), (6, 8), (6, 8), (6, 6))
    one, other = gathered(b, x), gathered(b, y)
    operand = b.call(aten.permute.default, b.call(aten.mm.default, one, u), [1, 0])
    total = b.call(aten.addmm.default, b.call(aten.mm.default, other, v), one, w)
    return [total, b.call(aten.mm.default, other, operand)]


def gathered_rows_added_to_what_they_make(b: Builder) -> list[Node]:
    """The second op needs a sum that the first one's result is added to."""
    x, y, w, v, u = inputs(b, (4, 6), (4, 6), (6, 8), (6, 8), (8, 6))
    one, other = gathered(b, x), gathered(b, y)
    low = b.call(aten.mm.default, b.call(aten.mm.default, one, v), b.call(aten.mm.default, u, v))
    total = b.call(aten.addmm.default, low, one, w)
    return [total, b.call(aten.addmm.default, total, other, v)]


# --- scales behind the product --------------------------------------------------------------------------------
def unit(b: Builder, value: float = 1.0) -> Node:
    return b.call(aten.full.default, [], value, dtype=torch.float32)


def fp8_product(b: Builder, scale: Node, bias: Node | None = None, rows: int = 8, b_scale: Node | None = None) -> Node:
    """`_scaled_mm` with one scale for both operands, or two, and slow accumulation: its argument is left out."""
    x, w = b.placeholder((rows, 32), FP8), b.placeholder((32, 16), FP8, strides=(1, 32))
    return b.call(aten._scaled_mm.default, x, w, scale, b_scale or scale, bias, None, torch.bfloat16)


def factor(b: Builder, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Node:
    return b.placeholder(shape, dtype, "scale")


def times(b: Builder, *nodes: Node) -> Node:
    """The product of all, from the left."""
    first, *others = nodes
    for other in others:
        first = b.call(aten.mul.Tensor, first, other)
    return first


def rounded(b: Builder, x: Node, dtype: torch.dtype = torch.bfloat16) -> Node:
    return b.call(torch.ops.prims.convert_element_type.default, x, dtype)


def scaled_by(*shapes: tuple[int, ...], outer: bool = False, first: bool = False) -> Attack:
    """Factors of these shapes: one after the other, or their product at once; before the product, or behind it."""

    def attack(b: Builder) -> list[Node]:
        out, factors = fp8_product(b, unit(b)), [factor(b, shape) for shape in shapes]
        factors = [times(b, *factors)] if outer else factors
        return [scattered(b, rounded(b, times(b, *factors, out) if first else times(b, out, *factors)))]

    return attack


def scaled_with_own(make: Callable[[Builder], Node]) -> Attack:
    """The matmul's own scales are not known to be 1."""
    return lambda b: [scattered(b, rounded(b, times(b, fp8_product(b, make(b)), factor(b, (8, 1)))))]


def scaled_with_two(a_scale: float, b_scale: float) -> Attack:
    """Only one of the matmul's own scales is 1."""

    def attack(b: Builder) -> list[Node]:
        out = fp8_product(b, unit(b, a_scale), b_scale=unit(b, b_scale))
        return [scattered(b, rounded(b, times(b, out, factor(b, (8, 1)), factor(b, (1, 16)))))]

    return attack


def unit_changed_in_place(b: Builder) -> Node:
    one = unit(b)
    b.call(aten.add_.Tensor, b.call(aten.view.default, one, [1]), 1)
    return one


def unit_changed_by_its_diagonal(b: Builder) -> Node:
    """No view that is followed, but the same memory."""
    one = unit(b)
    b.call(aten.add_.Tensor, b.call(aten.diagonal.default, b.call(aten.view.default, one, [1, 1])), 1)
    return one


def scaled_bias_too(b: Builder) -> list[Node]:
    out = fp8_product(b, unit(b), b.placeholder((16,), torch.bfloat16))
    return [scattered(b, rounded(b, times(b, out, factor(b, (8, 1)))))]


def scaled_and_kept(which: int) -> Attack:
    """The product, its scaled form or its rounded form is returned too."""

    def attack(b: Builder) -> list[Node]:
        out = fp8_product(b, unit(b))
        steps = [out, times(b, out, factor(b, (8, 1)))]
        steps.append(rounded(b, steps[1]))
        return [steps[which], scattered(b, steps[2])]

    return attack


def scaled_in_half(b: Builder) -> list[Node]:
    return [scattered(b, times(b, fp8_product(b, unit(b)), factor(b, (8, 1), torch.bfloat16)))]


def rounded_to_fp8_before_it_is_scaled(b: Builder) -> list[Node]:
    """The fused op would not round to fp8."""
    x, w, one = b.placeholder((8, 32), FP8), b.placeholder((32, 16), FP8, strides=(1, 32)), unit(b)
    out = rounded(b, b.call(aten._scaled_mm.default, x, w, one, one, None, None, FP8), torch.float32)
    return [scattered(b, rounded(b, times(b, out, factor(b, (8, 1)))))]


def scaled_by_a_number_of_no_dimension(b: Builder) -> list[Node]:
    """Such a number does not promote: the product is scaled in bf16."""
    return [scattered(b, times(b, fp8_product(b, unit(b)), factor(b, ())))]


def rounded_between_scales(b: Builder) -> list[Node]:
    half = rounded(b, times(b, fp8_product(b, unit(b)), factor(b, (8, 1))))
    return [scattered(b, rounded(b, times(b, half, factor(b, (1, 16)))))]


def squared(b: Builder) -> list[Node]:
    """One row: the product has the shape of a factor per column."""
    out = rounded(b, fp8_product(b, unit(b), rows=1), torch.float32)
    return [all_reduced(b, times(b, out, out))]


def scale_changed_after_the_outer_product(b: Builder) -> list[Node]:
    row, column, one = factor(b, (8, 1)), factor(b, (1, 16)), unit(b)
    outer = times(b, row, column)
    b.call(aten.add_.Tensor, row, 1)
    return [scattered(b, rounded(b, times(b, fp8_product(b, one), outer))), row]


def gathered_then_scaled_then_scattered(b: Builder) -> list[Node]:
    """The gather takes the matmul, its scales stay behind it."""
    x, w, one = b.placeholder((4, 32), FP8), b.placeholder((32, 16), FP8, strides=(1, 32)), unit(b)
    out = b.call(aten._scaled_mm.default, gathered(b, x), w, one, one, None, None, torch.bfloat16)
    return [scattered(b, rounded(b, times(b, out, factor(b, (8, 1)))))]


# --- products that are converted before they are added --------------------------------------------------------------
def typed_product(b: Builder, dtype: torch.dtype = torch.bfloat16) -> Node:
    return b.call(aten.mm.default, *inputs(b, (8, 6), (6, 8), dtype=dtype))


def converted(*dtypes: torch.dtype, reduced: bool = False) -> Attack:
    """A product of the first dtype, converted to the others one after the other."""

    def attack(b: Builder) -> list[Node]:
        out = typed_product(b, dtypes[0])
        for dtype in dtypes[1:]:
            out = rounded(b, out, dtype)
        return [all_reduced(b, out) if reduced else scattered(b, out)]

    return attack


def sum_of(*terms: Callable[[Builder], Node]) -> Attack:
    def attack(b: Builder) -> list[Node]:
        first, *others = [term(b) for term in terms]
        for other in others:
            first = b.call(aten.add.Tensor, first, other)
        return [scattered(b, first)]

    return attack


def wide(dtype: torch.dtype = torch.bfloat16) -> Callable[[Builder], Node]:
    """A product, converted to fp32."""
    return lambda b: rounded(b, typed_product(b, dtype), torch.float32)


def residual_and_converted(b: Builder) -> list[Node]:
    """A term of 16 bits and one of 32, before and behind the conversion."""
    total = b.call(aten.add.Tensor, typed_product(b), routed(b, dtype=torch.bfloat16))
    return [scattered(b, b.call(aten.sub.Tensor, rounded(b, total, torch.float32), routed(b, dtype=torch.float32)))]


def sum_converted(b: Builder) -> list[Node]:
    """Added in bf16, which is rounded, and converted then."""
    total = b.call(aten.add.Tensor, typed_product(b), typed_product(b))
    return [scattered(b, rounded(b, total, torch.float32))]


def converted_and_added_at_every_level(b: Builder) -> list[Node]:
    """(p + q in bf16, converted) + (r converted, times 4, in a view of its own), its rows moved, all-reduced."""
    pair = rounded(b, b.call(aten.add.Tensor, typed_product(b), typed_product(b)), torch.float32)
    split = b.call(aten.view.default, typed_product(b), [2, 4, 8])
    single = b.call(aten.mul.Tensor, rounded(b, split, torch.float32), 4)
    total = b.call(aten.sub.Tensor, pair, b.call(aten.view.default, single, [8, 8]))
    halves = b.call(aten.permute.default, b.call(aten.view.default, total, [2, 4, 8]), [1, 0, 2])
    return [all_reduced(b, halves, "avg")]


def seen_as(dtype: torch.dtype, back: torch.dtype | None = None, reduced: bool = True) -> Attack:
    """A product's bits seen as another dtype (and back), then converted."""

    def attack(b: Builder) -> list[Node]:
        out = b.call(aten.view.dtype, b.call(aten.t.default, typed_product(b)), dtype)
        out = out if back is None else b.call(aten.view.dtype, out, back)
        out = rounded(b, rounded(b, out, dtype if back is None else back), torch.float32)
        out = b.call(aten.view.dtype, b.call(aten.view.dtype, out, torch.int32), torch.float32)
        return [all_reduced(b, out) if reduced else scattered(b, out)]

    return attack


def times_powers_of_two(*numbers: float, dtype: torch.dtype = torch.float32, wide: bool = False) -> Attack:
    def attack(b: Builder) -> list[Node]:
        product = b.call(aten.mm.default, *inputs(b, (8, 4), (4, 8), dtype=dtype))
        for number in numbers:
            product = b.call(aten.mul.Tensor, product, number)
        return [scattered(b, rounded(b, product, FP32) if wide else product)]

    return attack


def converted_times(number: float, dtype: torch.dtype) -> Attack:
    return lambda b: [scattered(b, b.call(aten.mul.Tensor, wide(dtype)(b), number))]


def converted_and_kept(which: int) -> Attack:
    def attack(b: Builder) -> list[Node]:
        product = typed_product(b)
        steps = [product, rounded(b, product, torch.float32)]
        return [steps[which], scattered(b, steps[1])]

    return attack


def converted_scaled_product(count: int, before: bool = False) -> Attack:
    """fp8 products to bf16, scaled behind in fp32 and rounded again (or not at all), then converted and added."""

    def term(b: Builder) -> Node:
        out = fp8_product(b, unit(b))
        return rounded(b, out if before else rounded(b, times(b, out, factor(b, (8, 1)))), torch.float32)

    return sum_of(*[term] * count)


# --- all-reduces ------------------------------------------------------------------------------------------------
def all_reduced(b: Builder, full: Node, reduce_op: str = "sum", group: str = GROUP) -> Node:
    """All-reduce and wait."""
    return b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, full, reduce_op, group))


def product_of(b: Builder, rows: int = 6) -> Node:
    return b.call(aten.mm.default, *inputs(b, (rows, 6), (6, 8)))


def view_all_reduced(target: Any, *args: Any) -> Attack:
    """A view of a product is all-reduced."""
    return lambda b: [all_reduced(b, b.call(target, product_of(b), *args))]


def terms_in_views_of_their_own(b: Builder) -> list[Node]:
    """Rows that no number of ranks divides; the views of the first term are kept, those of the others go."""
    terms = [b.call(aten.view.default, product_of(b, 7), [1, 7, 8]), product_of(b, 7), product_of(b, 7)]
    terms[1] = b.call(aten.view.default, b.call(aten.permute.default, terms[1], [0, 1]), [1, 7, 8])
    terms[2] = b.call(aten.unsqueeze.default, terms[2], 0)
    total = b.call(aten.add.Tensor, b.call(aten.add.Tensor, *terms[:2]), terms[2])
    return [all_reduced(b, b.call(aten.permute.default, total, [2, 0, 1]), "avg")]


def all_reduced_then_mutated(b: Builder) -> list[Node]:
    out = all_reduced(b, b.call(aten.view.default, product_of(b), [2, 3, 8]))
    b.call(aten.add_.Tensor, out, 1)
    return [out]


def all_reduced_in_place(b: Builder, early: bool = False) -> list[Node]:
    """The product's own memory is reduced; `early`: and read before the wait."""
    out = product_of(b)
    result = b.call(c10d.all_reduce_.default, out, "sum", GROUP)
    read = [b.call(aten.clone.default, out)] if early else []
    return [b.call(c10d.wait_tensor.default, result), *read]


def all_reduced_and_scattered(b: Builder) -> list[Node]:
    out = product_of(b)
    return [all_reduced(b, out), scattered(b, out)]


def all_reduced_twice(b: Builder) -> list[Node]:
    """The second one's matmul takes the first one's result."""
    (v,) = inputs(b, (8, 3))
    return [all_reduced(b, b.call(aten.mm.default, all_reduced(b, product_of(b)), v))]


def operand_changed_before_the_all_reduce(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 8))
    out = b.call(aten.mm.default, x, w)
    b.call(aten.add_.Tensor, w, 1)
    return [all_reduced(b, out)]


def gathered_then_all_reduced(b: Builder) -> list[Node]:
    x, w = inputs(b, (4, 6), (6, 8))
    return [all_reduced(b, b.call(aten.mm.default, gathered(b, x), w))]


GRAPHS: dict[str, tuple[Attack, list[str]]] = {
    "copy of gathered, mutated": (copy_of_gathered_then_mutated, ["F"]),
    "operand, mutated in a region": (operand_mutated_in_a_region, ["ATP204"]),
    "base of operand, mutated": (base_of_operand_mutated, ["F"]),
    "bytes as two fp8 types": (bytes_as_two_fp8_types, ["F"]),
    "words as two half types": (words_as_two_half_types, ["F"]),
    "product summed as integers": (product_summed_as_integers, ["ATP105"]),
    "terms added as integers": (terms_added_as_integers, ["ATP111"]),
    "bits negated as integers": (bits_negated(torch.int16, torch.bfloat16), ["ATP105"]),
    "bits of fp32 negated as integers": (bits_negated(torch.int32, torch.float32), ["ATP105"]),
    "bits times -1 as integers": (bits_negated(torch.int16, torch.bfloat16, times=True), ["ATP105"]),
    "scales as they come": (lambda b: rowwise(b, None, None), ["F", "F"]),
    "scales and data transposed": (lambda b: rowwise(b, [0, 2, 1, 3], [0, 2, 1, 3]), ["F", "F"]),
    "scales transposed": (lambda b: rowwise(b, None, [0, 2, 1, 3]), ["F", "F"]),
    "data transposed": (lambda b: rowwise(b, [0, 2, 1, 3], None), ["F", "F"]),
    "rank in the middle": (lambda b: rowwise(b, [2, 0, 1, 3], [2, 0, 1, 3]), ["F", "F"]),
    "scales travel as integers": (lambda b: rowwise(b, None, None, wire=torch.int32), ["F", "F"]),
    "blocks' scales as they come": (gathered_blocks(None, None), ["F", "F"]),
    "blocks' scales transposed": (gathered_blocks(None, [0, 2, 1, 3]), ["F", "F"]),
    "blocks' data transposed": (gathered_blocks([0, 2, 1, 3], None), ["F", "F"]),
    "blocks with the rank in the middle": (gathered_blocks([2, 0, 1, 3], [2, 0, 1, 3]), ["F", "F"]),
    "blocks with the rank in the middle of the scales": (gathered_blocks(None, [2, 0, 1, 3]), ["F", "ATP007"]),
    "blocks of K in another order": (gathered_blocks(None, None, blocks_interleaved), ["F", "F"]),
    "blocks of K swapped": (gathered_blocks(None, None, blocks_of_two_pieces), ["F", "ATP002"]),
    "blocks of K flipped": (gathered_blocks(None, None, blocks_flipped), ["F", "ATP002"]),
    "blocks' scales of the other rank": (gathered_blocks(None, None, ranks_swapped), ["F", "ATP002"]),
    "first block's scales for all": (gathered_blocks(None, None, first_block_for_all), ["F", "ATP002"]),
    "blocks' scales by columns": (gathered_blocks(None, None, seen_by_columns), ["F", "ATP007"]),
    "blocks' scales over another group": (gathered_blocks(None, None, group="dp"), ["F", "ATP007"]),
    "1x128 and 1x128 by shape": (block_scales_by_shape((256, 4), (4, 144)), ["F"]),
    "1x128 and 128x128 by shape": (block_scales_by_shape((256, 4), (4, 2)), ["F"]),
    "128x128 and 1x128 by shape": (block_scales_by_shape((2, 4), (4, 144)), ["F"]),
    "batch": (batch_times(), ["F"]),
    "batch, transposed": (batch_times((aten.transpose.int, 1, 2)), ["F"]),
    "batch, transposed from the end": (batch_times((aten.transpose.int, -1, -2)), ["F"]),
    "batch, permuted": (batch_times((aten.permute.default, [0, 2, 1])), ["F"]),
    "batch, transposed twice": (batch_times((aten.transpose.int, 1, 2), (aten.permute.default, [0, 2, 1])), ["F"]),
    "batch, permuted to what it was": (batch_times((aten.permute.default, [0, 1, 2])), ["ATP115"]),
    "batch, matrices and rows permuted": (batch_times((aten.permute.default, [1, 0, 2])), ["ATP115"]),
    "batch, matrices and rows transposed": (batch_times((aten.transpose.int, 0, 1)), ["ATP115"]),
    "batch, matrices and columns transposed": (batch_times((aten.transpose.int, 2, 0)), ["ATP115"]),
    "batch, of a row": (batch_times(weight=(6,)), ["ATP115"]),
    "batch, of one row": (batch_times(weight=(1, 6)), ["ATP115"]),
    "batch, of ones": (batch_times_ones, ["ATP115"]),
    "tall blocks": (tall_blocks(128, gathers=True), ["F", "F"]),
    "tall blocks that all ranks know": (tall_blocks(256, gathers=False), ["F"]),
    "tall blocks of two ranks": (tall_blocks(64, gathers=False), ["ATP306"]),
    "tall blocks scattered": (tall_blocks_of_rows(256, scattered), ["F"]),
    "tall blocks of two ranks scattered": (tall_blocks_of_rows(384, scattered), ["ATP306"]),
    "tall blocks scattered by columns": (tall_blocks_of_rows(384, scattered_by_columns), ["F"]),
    "tall blocks all-reduced": (tall_blocks_of_rows(384, all_reduced), ["F"]),
    "tall blocks, one of them in part, all-reduced": (tall_blocks_of_rows(192, all_reduced), ["ATP306"]),
    "scales of padded columns": (block_scales_of_several_columns((1, 4)), ["F"]),
    "scales of columns that are not padded": (block_scales_of_several_columns((1, 2)), ["ATP306"]),
    "scale of blocks": (quantized_in_blocks(of_blocks), ["F"]),
    "scale of blocks swapped": (quantized_in_blocks(of_blocks_swapped), ["ATP101"]),
    "scale of blocks swapped for the matmul": (quantized_in_blocks(of_blocks, of_blocks_swapped), ["ATP101"]),
    "scale of blocks of other rank": (quantized_in_blocks(of_blocks_of_other_rank), ["ATP101"]),
    "scale of blocks of other rank for the matmul": (
        quantized_in_blocks(of_blocks, of_blocks_of_other_rank),
        ["ATP101"],
    ),
    "scale of blocks of all rows": (quantized_in_blocks(of_blocks_of_all_rows), ["ATP106"]),
    "scale of blocks of two ranks": (quantized_in_blocks(of_blocks_of_two_ranks, of_blocks), ["ATP106"]),
    "scale of blocks by sums": (quantized_in_blocks(of_blocks_by_sums), ["ATP106"]),
    "scaled bias of one number": (lambda b: scaled_bias(b, (), torch.bfloat16), ["ATP205"]),
    "scaled bias of one element": (lambda b: scaled_bias(b, (1,), torch.bfloat16), ["ATP205"]),
    "scaled bias in float64": (lambda b: scaled_bias(b, (16,), torch.float64), ["ATP301"]),
    "scale of rows": (lambda b: quantized(b, of_rows), ["F"]),
    "scale of everything": (lambda b: quantized(b, of_everything), ["ATP106"]),
    "scale of pairs of rows": (lambda b: quantized(b, of_pairs_of_rows, of_rows), ["ATP106"]),
    **{f"one scale: {name}": (attack, [outcome]) for name, (attack, outcome) in BY_ONE_SCALE.items()},
    "reciprocals of scales in two shapes": (reciprocals_of_scales_in_two_shapes, ["F"]),
    "scale of neighbours": (lambda b: quantized(b, of_rows, of_neighbours), ["ATP102"]),
    "scale of rows reversed": (lambda b: quantized(b, of_rows_reversed), ["ATP101"]),
    "scale of rows reversed for the matmul": (lambda b: quantized(b, of_rows, of_rows_reversed), ["ATP101"]),
    "scale of rows of other rank": (lambda b: quantized(b, of_rows_of_other_rank), ["ATP101"]),
    "scale of rows of other rank for the matmul": (lambda b: quantized(b, of_rows, of_rows_of_other_rank), ["ATP101"]),
    "scale of transposed parts": (lambda b: quantized(b, of_transposed_parts), ["F"]),
    "scale of transposed parts for the matmul": (lambda b: quantized(b, of_rows, of_transposed_parts), ["F"]),
    "scale of half a row": (lambda b: quantized(b, of_half_a_row), ["ATP106"]),
    "scale of each rank": (lambda b: quantized(b, given_by_each_rank), ["ATP208"]),
    "scale of each rank for the matmul": (lambda b: quantized(b, of_rows, given_by_each_rank), ["F"]),
    "factor of each rank": (lambda b: quantized(b, one_by_each_rank), ["ATP208"]),
    "factor of all ranks": (lambda b: quantized(b, one_by_all_ranks), ["F", "ATP002", "ATP002"]),
    "factor of another group": (lambda b: quantized(b, one_by_ranks_of_another_group), ["ATP208", "ATP002", "ATP002"]),
    "factor of row number": (lambda b: quantized(b, one_by_row_number), ["ATP208"]),
    "last dimensions swapped": (last_dimensions_swapped, ["ATP211"]),
    "seen as fewer elements": (seen_as_fewer_elements, ["ATP104"]),
    "expanded to more dimensions": (expanded_to_more_dimensions, ["ATP102"]),
    "product and a row": (square_product_and((8,)), ["ATP110"]),
    "a row and a product": (square_product_and((8,), first=True), ["ATP110"]),
    "product and a row of its dimensions": (square_product_and((1, 8)), ["ATP110"]),
    "product divided by zero": (product_divided_by_zero, ["ATP105"]),
    "half product times float": (half_product_times_float, ["ATP105"]),
    "half product as the other half": (half_product_as_the_other_half, ["ATP105"]),
    "scales of rows, by rank": (with_scales_of_rows_by_rank, ["ATP306"]),
    "scale of rows without their dimension": (lambda b: quantized(b, of_rows_without_their_dimension), ["F"]),
    "factor of each part": (lambda b: quantized(b, one_by_parts), ["ATP208", "ATP002", "ATP002"]),
    "numbers of rows, by rank": (with_numbers_of_rows(of_rows_by_rank), ["F"]),
    "numbers of rows, in bf16": (with_numbers_of_rows(of_rows_in_bf16), ["F"]),
    "mantissas": (mantissas_quantized, ["ATP106"]),
    "scale that each rank changes": (quantized_by_what_each_rank_changes, ["ATP002", "ATP208"]),
    "quantized piece by piece": (quantized_piece_by_piece, ["ATP106"]),
    "half quantized": (half_quantized, ["ATP104"]),
    "quantized, then mutated": (quantized_then_mutated, ["F"]),
    "mutated, then quantized": (mutated_then_quantized, ["ATP204"]),
    "shard mutated while quantized": (shard_mutated_while_quantized, ["ATP204"]),
    "quantized rows and a view of them": (quantized_rows_and_a_view_of_them_saved, ["F"]),
    "zeros of two signs": (zeros_of_two_signs, ["F"]),
    "weight from quantized rows": (weight_from_quantized_rows, ["ATP203"]),
    "negated": (lambda b: computed(b, lambda b, x: b.call(aten.neg.default, x)), ["F"]),
    "times one number of each rank": (lambda b: computed(b, times_input(())), ["ATP208"]),
    "times a row of each rank": (lambda b: computed(b, times_input((6,))), ["ATP208"]),
    "times a column of each rank": (lambda b: computed(b, times_input((8, 1))), ["ATP208"]),
    "softmax over all ranks": (lambda b: computed(b, softmaxed), ["ATP117"]),
    "ranks along a reduced contraction": (gathered_last_and_reduced, ["ATP208"]),
    "ranks along a negated contraction": (gathered_last_and_negated, ["F"]),
    "finer split of moved blocks": (finer_split_of_moved_blocks, ["F"]),
    "finer pieces swapped": (finer_pieces_swapped, ["ATP101"]),
    "shard of a list, mutated": (shard_of_a_list_mutated, ["ATP204"]),
    "one shard twice in a list": (one_shard_twice_in_a_list, ["F", "F"]),
    "items of a list, one taken twice": (items_of_a_list_by(0, 0, 1), ["ATP113"]),
    "items of a list, counted from its end": (items_of_a_list_by(-2, -1), ["ATP113"]),
    "items of a list, joined": (items_of_a_list_joined, ["ATP104", "ATP104"]),
    "one product scattered twice": (one_product_scattered_twice, ["ATP202", "ATP202"]),
    "a product and its transpose in one list": (product_and_its_transpose_in_one_list, ["ATP202", "ATP202"]),
    "one sum twice in a list": (one_sum_all_reduced_twice, ["ATP202", "ATP202"]),
    "items that need each other": (items_that_need_each_other, ["F", "F"]),
    "weight mutated after it was expanded": (weight_mutated_after_it_was_expanded, ["F"]),
    "weight copied before it is mutated": (weight_copied_before_it_is_mutated, ["ATP115"]),
    "batch of weights that looks like one": (batch_of_weights_that_looks_like_one, ["ATP115"]),
    "weight transposed once in the batch": (weight_transposed_once_in_the_batch, ["F"]),
    "scatter feeds gather": (scatter_feeds_gather, ["F", "F"]),
    "gather feeds weight of gather": (gather_feeds_weight_of_gather, ["F", "F"]),
    "term added by addmm and again": (term_added_by_addmm_and_again, ["ATP111"]),
    "bias as long as there are rows": (bias_as_long_as_there_are_rows, ["F"]),
    "residual added by addmm": (residual_added_by_addmm, ["F"]),
    "operand added to its product": (operand_added_to_its_product(by_addmm=False), ["ATP202"]),
    "operand added to its product by addmm": (operand_added_to_its_product(by_addmm=True), ["ATP202"]),
    "gathered tensor added to its product": (gathered_added_to_its_product, ["F"]),
    "a term that is no matmul": (product_and(8, 8), ["F"]),
    "a term that is no matmul, first": (product_and(8, 8, order=lambda p, x: (x, p)), ["F"]),
    "a term in three dimensions": (product_and(2, 4, 8), ["F"]),
    "routed tokens of a batch": (routed_tokens_of_a_batch, ["F"]),
    "a term with strides": (term_with_strides, ["F", "F"]),
    "terms at every level": (terms_at_every_level(0.25), ["F"]),
    "terms at every level, negated": (terms_at_every_level(-1.0), ["F"]),
    "terms at every level, all multiplied": (terms_at_every_level(0.5, whole=16.0), ["F"]),
    "terms at every level, some multiplied": (terms_at_every_level(4.0), ["ATP105"]),
    "terms at every level of fp16": (terms_at_every_level(0.25, FP16), ["ATP105"]),
    "sum multiplied": (sum_multiplied(4.0, 2.0), ["F"]),
    "sum multiplied, and divided": (sum_multiplied(4.0, 0.5), ["ATP105"]),
    "sum divided, and multiplied": (sum_multiplied(0.5, -4.0), ["ATP105"]),
    "sum divided, and negated": (sum_multiplied(0.5, -1.0, 0.25, dtype=FP32), ["F"]),
    "sum of fp16 multiplied": (sum_multiplied(0.5, 0.25, dtype=FP16), ["F"]),
    "sum of fp16 multiplied, then converted": (sum_multiplied(0.5, dtype=FP16, wide=True), ["ATP105"]),
    "a term that was changed in place": (term_changed_in_place(before=True), ["F"]),
    "a term changed in place once it is added": (term_changed_in_place(before=False), ["ATP204"]),
    "a copy of a product that was changed": (copy_of_a_product_that_was_changed, ["F"]),
    "a reduced copy of what was changed": (reduced_copy_of_what_was_changed, ["ATP013", "ATP211"]),
    "columns added by addmm": (columns_added_by_addmm, ["F"]),
    "scales changed once gathered": (scales_changed_once_their_list_is_gathered(False), ["ATP007", "ATP013", "F"]),
    "numbers changed once gathered": (scales_changed_once_their_list_is_gathered(True), ["ATP007", "ATP013", "F"]),
    "a term computed of the product": (term_computed_of_the_product, ["ATP202"]),
    "a term that a gather is fused with": (term_gathered_with_its_product, ["F", "F"]),
    "products of two shapes": (products_of_two_shapes, ["F"]),
    "products of two kinds": (products_of_two_kinds, ["F"]),
    "short product of another kind by addmm": (product_of_another_kind_by_addmm(2, adds_the_other=False), ["ATP111"]),
    "short product added to another kind's": (product_of_another_kind_by_addmm(2, adds_the_other=True), ["ATP111"]),
    "long product of another kind by addmm": (product_of_another_kind_by_addmm(64, adds_the_other=False), ["F"]),
    "long product added to another kind's": (product_of_another_kind_by_addmm(64, adds_the_other=True), ["F"]),
    "transposed product added by addmm": (transposed_product_added_by_addmm, ["ATP111"]),
    "scaled addmm of a product": (scaled_addmm_of_a_product, ["ATP205"]),
    "products added by addmm": (products_added_by_addmm, ["F"]),
    "gathered rows added to": (gathered_rows_added_to, ["F"]),
    "gathered rows added to another gather's": (gathered_rows_added_to_another_gathers, ["F", "F"]),
    "gathered rows added to what they make": (gathered_rows_added_to_what_they_make, ["F", "F"]),
    "three gathers in a circle": (three_gathers_in_a_circle, ["F", "F", "F"]),
    "scaled by an outer product": (scaled_by((8, 1), (1, 16), outer=True), ["F"]),
    "scaled by an outer product, columns first": (scaled_by((1, 16), (8, 1), outer=True, first=True), ["F"]),
    "scaled by rows, then columns": (scaled_by((8, 1), (1, 16)), ["F"]),
    "scaled by rows": (scaled_by((8, 1)), ["F"]),
    "scaled by columns": (scaled_by((1, 16)), ["F"]),
    "scaled by two numbers": (scaled_by((1, 1), (1,)), ["F"]),
    "scaled by a number and columns": (scaled_by((1,), (1, 16)), ["F"]),
    "scaled by rows and a number": (scaled_by((8, 1), (1,)), ["F"]),
    "scaled by a matrix": (scaled_by((8, 16)), ["ATP105"]),
    "scaled by a matrix and rows": (scaled_by((8, 16), (8, 1), outer=True), ["ATP105"]),
    "scaled by a vector": (scaled_by((16,)), ["ATP105"]),
    "scaled by rows twice": (scaled_by((8, 1), (8, 1)), ["ATP105"]),
    "scaled by three": (scaled_by((8, 1), (1, 16), (1,)), ["ATP105"]),
    "scaled by columns twice": (scaled_by((1, 16), (1, 16)), ["ATP105"]),
    "own scale of A is 2": (scaled_with_two(2.0, 1.0), ["ATP105"]),
    "own scale of B is 2": (scaled_with_two(1.0, 2.0), ["ATP105"]),
    "own scales are 2": (scaled_with_own(lambda b: unit(b, 2.0)), ["ATP105"]),
    "own scales are an input": (scaled_with_own(lambda b: factor(b, ())), ["ATP105"]),
    "own scales changed in place": (scaled_with_own(unit_changed_in_place), ["ATP105"]),
    "own scales changed by their diagonal": (scaled_with_own(unit_changed_by_its_diagonal), ["ATP105"]),
    "bias scaled too": (scaled_bias_too, ["ATP105"]),
    "product kept": (scaled_and_kept(0), ["ATP202"]),
    "scaled product kept": (scaled_and_kept(1), ["ATP202"]),
    "rounded product kept": (scaled_and_kept(2), ["ATP202"]),
    "scaled in half precision": (scaled_in_half, ["ATP105"]),
    "rounded to fp8 before it is scaled": (rounded_to_fp8_before_it_is_scaled, ["ATP105"]),
    "scaled by a number of no dimension": (scaled_by_a_number_of_no_dimension, ["ATP105"]),
    "rounded between scales": (rounded_between_scales, ["ATP105"]),
    "squared": (squared, ["ATP105"]),
    "scale changed after the outer product": (scale_changed_after_the_outer_product, ["ATP204"]),
    "gathered, then scaled, then scattered": (gathered_then_scaled_then_scattered, ["F", "ATP402"]),
    "converted": (converted(BF16, FP32), ["F"]),
    "converted, fp16": (converted(FP16, FP32, reduced=True), ["F"]),
    "converted twice": (converted(BF16, BF16, FP32, FP32), ["F"]),
    "converted twice, all-reduced": (converted(BF16, BF16, FP32, FP32, reduced=True), ["F"]),
    "converted and back": (converted(BF16, FP32, BF16), ["ATP105"]),
    "converted, back and again": (converted(BF16, FP32, BF16, FP32, reduced=True), ["ATP105"]),
    "rounded, then converted": (converted(FP32, BF16, FP32), ["ATP105"]),
    "rounded to bf16": (converted(FP32, BF16, reduced=True), ["ATP105"]),
    "converted to fp64": (converted(BF16, torch.float64), ["ATP105"]),
    "converted to fp64 by way of fp32": (converted(BF16, FP32, torch.float64), ["ATP105"]),
    "fp32 converted to fp64": (converted(FP32, torch.float64), ["ATP105"]),
    "fp16 converted to bf16": (converted(FP16, BF16), ["ATP105"]),
    "bf16 converted to fp16, then to fp32": (converted(BF16, FP16, FP32), ["ATP105"]),
    "converted sum": (sum_of(wide(), wide(), wide()), ["F"]),
    "converted and added to fp32": (sum_of(wide(), lambda b: typed_product(b, FP32)), ["ATP111"]),
    "bf16 and fp16 converted and added": (sum_of(wide(BF16), wide(FP16)), ["ATP111"]),
    "converted and promoted": (sum_of(wide(), typed_product), ["ATP111"]),
    "converted and added to a residual": (sum_of(wide(), lambda b: b.placeholder((8, 8), FP32)), ["F"]),
    "seen as fp16, then converted": (seen_as(FP16), ["ATP105"]),
    "seen as integers and back, then converted": (seen_as(torch.int16, BF16), ["ATP211"]),
    "seen as integers and back, then converted, scattered": (seen_as(torch.int16, BF16, reduced=False), ["ATP211"]),
    "fp32 times two powers of two": (times_powers_of_two(2.0**20, -(2.0**10)), ["F"]),
    "fp32 times a large and a small power of two": (times_powers_of_two(2.0**31, -(2.0**-30)), ["F"]),
    "fp32 times large and small powers of two": (times_powers_of_two(2.0**31, -(2.0**-30), 2.0**20), ["ATP105"]),
    "fp32 times 2^-130": (times_powers_of_two(*[2.0**-26] * 5), ["ATP105"]),
    "fp16 times a power of two": (times_powers_of_two(2.0**-10, dtype=FP16), ["F"]),
    "fp32 times more than it has exponents for": (times_powers_of_two(*[2.0**31] * 5, *[2.0**-31] * 5), ["ATP105"]),
    "bf16 converted and halved": (converted_times(0.5, BF16), ["F"]),
    "fp16 converted and divided by 2^20": (converted_times(2.0**-20, FP16), ["F"]),
    "fp16 divided by 2^20 and converted": (times_powers_of_two(2.0**-20, dtype=FP16, wide=True), ["ATP105"]),
    "fp16 negated, then converted": (times_powers_of_two(-1.0, dtype=FP16, wide=True), ["F"]),
    "bf16 divided by 2^20 and converted": (times_powers_of_two(2.0**-20, dtype=BF16, wide=True), ["F"]),
    "fp16 converted and negated": (converted_times(-1.0, FP16), ["F"]),
    "bf16 converted and divided by 3": (converted_times(1 / 3, BF16), ["ATP105"]),
    "converted product kept": (converted_and_kept(0), ["ATP202"]),
    "product kept as converted": (converted_and_kept(1), ["ATP202"]),
    "converted fp8 product": (converted_scaled_product(1, before=True), ["F"]),
    "all-reduced": (lambda b: [all_reduced(b, product_of(b))], ["F"]),
    "all-reduced by max": (lambda b: [all_reduced(b, product_of(b), "max")], ["ATP201"]),
    "all-reduced terms in views of their own": (terms_in_views_of_their_own, ["ATP211"]),
    "all-reduced, then mutated": (all_reduced_then_mutated, ["F"]),
    "all-reduced transposed": (view_all_reduced(aten.t.default), ["ATP211"]),
    "all-reduced slice": (view_all_reduced(aten.slice.Tensor, 0, 0, 3), ["ATP103"]),
    "all-reduced rows twice": (view_all_reduced(aten.repeat.default, [2, 1]), ["ATP102"]),
    "all-reduced in place": (all_reduced_in_place, ["ATP204"]),
    "all-reduced in place, read early": (lambda b: all_reduced_in_place(b, early=True), ["ATP202"]),
    "all-reduced and scattered": (all_reduced_and_scattered, ["ATP202", "ATP202"]),
    "all-reduced twice": (all_reduced_twice, ["F", "F"]),
    "operand changed before the all-reduce": (operand_changed_before_the_all_reduce, ["ATP204"]),
    "gathered, then all-reduced": (gathered_then_all_reduced, ["F", "ATP402"]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_outcome_and_results(name: str) -> None:
    attack, expected = GRAPHS[name]
    builder = attacked(attack)
    rewritten, report = rewrite(builder.graph)
    assert outcomes(report) == expected
    results = [evaluate(graph, values(builder)) for graph in (builder.graph, rewritten)]
    assert differences(*results) == []


@pytest.mark.parametrize("attack", [sum_converted, converted_and_added_at_every_level, residual_and_converted])
def test_what_is_rounded_before_it_is_converted_is_not_rounded(attack: Attack) -> None:
    """A sum in bf16 that is converted then: the op adds what is converted, and comes closer to the exact sum."""
    builder = attacked(attack)
    rewritten, report = rewrite(builder.graph)
    assert outcomes(report) == ["F"]
    given = values(builder)
    before, after = (evaluate(graph, given) for graph in (builder.graph, rewritten))
    exact = evaluate(builder.graph, [[value.double() for value in own] for own in given])
    assert differences(before, after, tolerance=1e-2) == []
    for (theirs,), (ours,), (truth,) in zip(before, after, exact, strict=True):
        assert (ours - truth).norm() < (theirs - truth).norm()


def test_scales_behind_products_that_are_converted_then() -> None:
    """fp8 products that are scaled behind, rounded and converted: rounded once here, and twice in the program."""
    builder = attacked(converted_scaled_product(2))
    rewritten, report = rewrite(builder.graph)
    assert outcomes(report) == ["F"]
    results = [evaluate(graph, values(builder)) for graph in (builder.graph, rewritten)]
    assert differences(*results, tolerance=1e-2) == []


def test_what_is_added_to_its_own_product_is_gathered_once() -> None:
    rewritten, _ = rewrite(attacked(gathered_added_to_its_product).graph)
    assert not [node for node in rewritten.nodes if node.target is c10d.all_gather_into_tensor.default]


def test_higher_order_op_that_mutates_is_a_barrier() -> None:
    _, report = rewrite(attacked(kernel_that_mutates).graph)
    assert outcomes(report) == ["ATP204"]


@pytest.mark.parametrize("before", [True, False])
def test_what_process_groups_write_is_a_barrier(before: bool) -> None:
    """Their ops' schemas do not say so: a weight is broadcast between the gather and its product, or a scale before."""
    b = Builder(operator.itemgetter(0), 2)
    number, w = unit(b), b.placeholder((32, 16), FP8, strides=(1, 32))
    written = number if before else w
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = None if before else gathered(b, x)
    b.call_like(None, torch.ops.c10d.broadcast_.default, [written], GROUP, 0, 0)
    whole = whole or gathered(b, x)
    rows = b.call(torch.ops.prims.convert_element_type.default, b.call(aten.mul.Tensor, whole, number), FP8)
    b.graph.output((b.call(aten._scaled_mm.default, rows, w, *[factor(b, ())] * 2, None, None, torch.bfloat16),))
    _, report = rewrite(b.graph)
    assert sorted(outcomes(report)) == ["ATP006", "ATP208" if before else "ATP204"]


# --- random numbers: all draws take those of one stream, in order ---------------------------------------------
Draw = Callable[..., Node]


def drawn(b: Builder, *shape: int) -> Node:
    return b.call(aten.rand.default, list(shape), dtype=torch.float64)


def drawn_and_saved(b: Builder, *shape: int) -> Node:
    """As recomputation has it: beside the state of the generator before."""
    saving = torch.ops.higher_order.run_and_save_rng_state
    return b.items(b.call(saving, aten.rand.default, list(shape), dtype=torch.float64, device="cpu"))[1]


def drawn_in_a_region(b: Builder, *shape: int) -> Node:
    inner = Graph()
    inner.output((inner.call_function(aten.rand.default, (list(shape),), {"dtype": torch.float64}),))
    with b.mode:
        return in_region(b, inner, torch.empty(shape, dtype=torch.float64))


def drawn_like_the_gathered(b: Builder, draw: Draw) -> list[Node]:
    """The fused op returns the gathered tensor, behind what is drawn in between."""
    x, w = inputs(b, (4, 6), (6, 8))
    whole = gathered(b, x)
    first, second = b.call(aten.rand_like.default, whole), draw(b, 8)
    return [first, second, b.call(aten.mm.default, whole, w)]


def drawn_between_two_products(b: Builder, draw: Draw) -> list[Node]:
    """One op of both would need what is drawn after what it makes."""
    x, w = inputs(b, (4, 6), (6, 8))
    whole = gathered(b, x)
    product = b.call(aten.mm.default, whole, w)
    first, second = b.call(aten.rand_like.default, product), draw(b, 6, 8)
    return [first, product, b.call(aten.mm.default, whole, second)]


def drawn_behind_a_gather_that_can_wait(b: Builder, draw: Draw) -> list[Node]:
    """Beside a product that comes after another draw."""
    x, y, w, v = inputs(b, (8, 6), (4, 8), (6, 8), (8, 6))
    whole = gathered(b, y)
    first, second = b.call(aten.rand_like.default, b.call(aten.sin.default, whole)), draw(b, 8)
    fused = b.call(aten.mm.default, gathered(b, b.call(aten.mm.default, x, w)), v)
    return [first, second, fused, b.call(aten.mm.default, b.call(aten.t.default, x), whole)]


@pytest.mark.parametrize("draw", [drawn, drawn_and_saved, drawn_in_a_region])
@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (drawn_like_the_gathered, ["F"]),
        (drawn_between_two_products, ["ATP203"]),
        (drawn_behind_a_gather_that_can_wait, ["ATP109", "F"]),
    ],
)
def test_random_numbers_are_drawn_in_order(
    attack: Callable[[Builder, Draw], list[Node]], draw: Draw, expected: list[str]
) -> None:
    builder = attacked(lambda b: attack(b, draw))
    rewritten, report = rewrite(builder.graph)
    results = []
    for graph in (builder.graph, rewritten):
        torch.manual_seed(0)
        results.append(evaluate(graph, values(builder)))
    assert differences(*results) == []
    assert outcomes(report) == expected


# --- graphs without values -------------------------------------------------------------------------------------
def node_names(attack: Attack) -> list[str]:
    return [node.name for node in attacked(attack).graph.nodes if node.op != "output"]


def rowwise_with_views(b: Builder) -> list[Node]:
    (product,) = rowwise(b, [2, 0, 1, 3], [2, 0, 1, 3])
    return [product, scattered(b, product)]


@pytest.mark.parametrize(
    "attack",
    [
        rowwise_with_views,
        base_of_operand_mutated,
        scatter_feeds_gather,
        quantized_rows_and_a_view_of_them_saved,
        terms_in_views_of_their_own,
        bias_as_long_as_there_are_rows,
        residual_added_by_addmm,
        scaled_by((8, 1), (1, 16), outer=True),
    ],
)
def test_a_node_without_value_is_no_crash(attack: Attack) -> None:
    for name in node_names(attack):
        graph = attacked(attack).graph
        next(node for node in graph.nodes if node.name == name).meta.pop("val")
        rewritten, report = rewrite(graph)
        assert report.remarks
        rewritten.lint()


def test_real_tensors_and_mixed_fake_modes_are_refused() -> None:
    for every in (1, 2):
        graph, other = attacked(scatter_feeds_gather).graph, Builder(operator.itemgetter(0), 2).mode
        for index, node in enumerate(graph.nodes):
            value = node.meta.get("val")
            if value is not None and index % every == 0:
                real = torch.zeros(value.shape, dtype=value.dtype)
                node.meta["val"] = real if every == 1 else other.from_tensor(real)
        rewritten, report = rewrite(graph)
        assert outcomes(report) == ["ATP207", "ATP207"]
        assert str(rewritten) == str(graph)


def gathered_rows_and_scales(b: Builder) -> list[Node]:
    x, scales = b.placeholder((4, 32), FP8), b.placeholder((4, 1), torch.float32, "scale")
    w, one = b.placeholder((32, 16), FP8, strides=(1, 32)), b.placeholder((1, 16), torch.float32, "scale")
    rows = [gathered(b, each) for each in (x, scales)]
    return [b.call(aten._scaled_mm.default, rows[0], w, rows[1], one, None, None, torch.bfloat16)]


def quantized_by_the_largest_of_all_ranks(b: Builder) -> list[Node]:
    """The rows' scales are needed elsewhere too."""
    largest, (x,) = reduced_over(b, GROUP), inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    scale = of_rows(b, whole)
    return [scaled_product(b, divided(b, divided(b, whole, largest), scale), scale), b.call(aten.neg.default, scale)]


@pytest.mark.parametrize(
    "attack",
    [
        scatter_feeds_gather,
        residual_added_by_addmm,
        gathered_rows_and_scales,
        quantized_by_the_largest_of_all_ranks,
        quantized_rows_and_a_view_of_them_saved,
    ],
)
def test_a_value_of_another_fake_mode_is_no_crash(attack: Attack) -> None:
    for name in node_names(attack):
        graph, other = attacked(attack).graph, Builder(operator.itemgetter(0), 2).mode
        node = next(node for node in graph.nodes if node.name == name)
        value = node.meta["val"]
        node.meta["val"] = other.from_tensor(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype))
        rewritten, report = rewrite(graph)
        assert report.remarks
        rewritten.lint()


# --- symbolic sizes ------------------------------------------------------------------------------------------
def symbolic(b: Builder) -> tuple[Node, Any]:
    """A product of a gathered tensor with a symbolic number of rows, and the gathered tensor."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    assert b.shape_env is not None
    source = ConstantSource("rows")
    symbol = b.shape_env.create_symbol(4, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    rows = b.shape_env.create_symintnode(symbol, hint=4, source=source)
    x, w = b.placeholder((rows, 6), torch.float64), b.placeholder((6, 8), torch.float64)  # type: ignore[arg-type]
    full = gathered(b, x)
    return b.call(aten.mm.default, full, w), full


def test_sizes_of_the_gathered_tensor_do_not_keep_it_alive() -> None:
    for reader, arguments in ((aten.sym_size.int, [0]), (aten.sym_numel.default, []), (aten.sym_stride.int, [0])):

        def attack(b: Builder, reader: Any = reader, arguments: list[int] = arguments) -> list[Node]:
            product, full = symbolic(b)
            size = b.call(reader, full, *arguments)
            filled = b.graph.call_function(aten.full.default, (), {"size": [size], "fill_value": 1.0})
            filled.meta["val"] = None
            return [product, size, filled]

        builder = attacked(attack, ShapeEnv())
        assert builder.shape_env is not None
        guards = len(builder.shape_env.guards)
        rewritten, report = rewrite(builder.graph)
        assert outcomes(report) == ["F"]
        assert len(builder.shape_env.guards) == guards
        assert not rewritten.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)


def test_size_of_a_side_view_that_no_input_carries() -> None:
    def attack(b: Builder) -> list[Node]:
        product, full = symbolic(b)
        assert b.shape_env is not None
        unbacked = b.shape_env.create_unbacked_symint()
        piece = b.graph.call_function(aten.slice.Tensor, (full, 0, 0, 3))
        with b.mode:
            piece.meta["val"] = torch.empty(unbacked, 6, dtype=torch.float64)
        size = b.graph.call_function(aten.sym_size.int, (piece, 0))
        size.meta["val"] = unbacked
        return [product, size]

    graph = attacked(attack, ShapeEnv()).graph
    rewritten, report = rewrite(graph)
    assert outcomes(report) == ["ATP108"]
    assert str(rewritten) == str(graph)


def test_sizes_of_the_operands_rows_that_no_input_carries() -> None:
    """The shard's rows are `u0 * u1`, and the ranks come between the two."""

    def attack(b: Builder) -> list[Node]:
        assert b.shape_env is not None
        outer, inner = b.shape_env.create_unbacked_symint(), b.shape_env.create_unbacked_symint()
        x, w = b.placeholder((outer * inner, 6), torch.float64), b.placeholder((6, 8), torch.float64)
        pieces = b.call(aten.view.default, gathered(b, x), [b.world_size, outer, inner, 6])
        swapped = b.call(aten.permute.default, pieces, [1, 0, 2, 3])
        rows = b.call(aten.reshape.default, swapped, [outer * inner * b.world_size, 6])
        return [b.call(aten.mm.default, rows, w)]

    graph = attacked(attack, ShapeEnv()).graph
    rewritten, report = rewrite(graph)
    assert outcomes(report) == ["ATP108"]
    assert "no input carries the size" in report.remarks[0].message
    assert str(rewritten) == str(graph)


def test_rows_that_are_known_at_runtime_only_and_lie_in_another_order() -> None:
    """Whether such a tensor is contiguous depends on how many there are, which nobody may ask."""

    def attack(b: Builder) -> list[Node]:
        assert b.shape_env is not None
        rows = b.shape_env.create_unbacked_symint()
        product = b.call(aten.mm.default, b.placeholder((rows, 6), torch.float64), b.placeholder((6, 8), torch.float64))
        turned = b.call(aten.permute.default, b.call(aten.view.default, product, [rows, 4, 2]), [1, 0, 2])
        reduced = b.call(c10d.all_reduce.default, turned, "sum", GROUP)
        return [b.call(c10d.wait_tensor.default, reduced)]

    _, report = rewrite(attacked(attack, ShapeEnv()).graph)
    assert outcomes(report) == ["ATP211"], "its columns move among its rows"


# --- time ------------------------------------------------------------------------------------------------------
def test_large_graphs_take_time_in_proportion() -> None:
    """500 collectives in a graph of 20 thousand nodes: a search from each over all the graph would take minutes."""

    def attack(b: Builder) -> list[Node]:
        x, w = inputs(b, (4, 8), (8, 8))
        total = gathered(b, x)
        for _ in range(250):
            product = b.call(aten.mm.default, gathered(b, x), w)
            total = b.call(aten.add.Tensor, total, gathered(b, scattered(b, product)))
        for _ in range(18_000):
            total = b.call(aten.relu.default, total)
        return [total]

    graph = attacked(attack).graph
    start = time.perf_counter()
    run_pass(graph)
    assert time.perf_counter() - start < 20


# --- helpers -----------------------------------------------------------------------------------------------------
def attacked(attack: Attack, shape_env: ShapeEnv | None = None) -> Builder:
    """A finished graph."""
    builder = Builder(operator.itemgetter(0), 2, shape_env)
    builder.graph.output(tuple(attack(builder)))
    return builder


def rewrite(graph: Graph) -> tuple[Graph, Report]:
    """A rewritten copy, with the same names and fake values."""
    rewritten = copied(graph)
    return rewritten, run_pass(rewritten)


def values(builder: Builder) -> list[list[torch.Tensor]]:
    """Placeholder values for every rank, the same at every call."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(builder.world_size)]
    return [[value.make(generator) for value in builder.inputs] for generator in generators]
