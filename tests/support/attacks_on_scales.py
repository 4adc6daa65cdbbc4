"""Attacks on scales: gathered, computed between the gather and the matmul, or behind it. See `test_attacks`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from attack_parts import (
    FP8,
    GROUP,
    Attack,
    all_reduced,
    aten,
    c10d,
    cast,
    chunks,
    factor,
    fp8_product,
    gathered,
    inputs,
    rounded,
    scattered,
    scattered_by_columns,
    times,
    unit,
)
from programs import Builder
from torch.fx import Node


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


def halves_as_scales(b: Builder) -> list[Node]:
    """Pairs of fp32 numbers travel as one number; the first of each pair scales a row."""
    x, scale = b.placeholder((4, 32), FP8), b.placeholder((4, 2), torch.float32, "scale")
    pairs = b.call(aten.view.dtype, gathered(b, b.call(aten.view.dtype, scale, torch.int64)), torch.float32)
    firsts = b.call(aten.clone.default, b.call(aten.slice.Tensor, pairs, 1, 0, 1))
    return [scaled_product(b, gathered(b, x), firsts)]


def scaled_bias(b: Builder, shape: tuple[int, ...], dtype: torch.dtype) -> list[Node]:
    x, w = b.placeholder((16, 32), FP8), b.placeholder((32, 16), FP8, strides=(1, 32))
    one, bias = b.placeholder((), torch.float32, "scale"), b.placeholder(shape, dtype)
    return [b.call(aten._scaled_mm.default, gathered(b, x), w, one, one, bias, None, torch.bfloat16)]


# --- quantized between the gather and the matmul ----------------------------------------------------------------
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


# --- scales behind the product --------------------------------------------------------------------------------
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


# --- all-reduces ------------------------------------------------------------------------------------------------
SCALES: dict[str, tuple[Attack, list[str]]] = {
    "scales as they come": (lambda b: rowwise(b, None, None), ["F", "F"]),
    "scales and data transposed": (lambda b: rowwise(b, [0, 2, 1, 3], [0, 2, 1, 3]), ["F", "F"]),
    "scales transposed": (lambda b: rowwise(b, None, [0, 2, 1, 3]), ["F", "F"]),
    "data transposed": (lambda b: rowwise(b, [0, 2, 1, 3], None), ["F", "F"]),
    "rank in the middle": (lambda b: rowwise(b, [2, 0, 1, 3], [2, 0, 1, 3]), ["F", "F"]),
    "halves of what travels as scales": (halves_as_scales, ["ATP007", "F"]),
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
}
