"""Attacks on tensors: memory, dtypes, views, sizes, lists and chains that meet. See `test_attacks`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from attack_parts import (
    FP8,
    GROUP,
    OTHER_FP8,
    Attack,
    aten,
    c10d,
    cast,
    chunks,
    factor,
    gathered,
    in_region,
    inputs,
    product_of,
    routed,
    scattered,
    unit,
)
from programs import Builder
from torch.fx import Graph, Node


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


def pieces_of_two_dtypes(b: Builder) -> list[Node]:
    """`cat` converts the numbers that the first shard's bits make to bfloat16."""
    x, w = inputs(b, (4, 6), (6, 8), dtype=torch.bfloat16)
    first, second = b.items(b.call(aten.split.Tensor, gathered(b, x), 4, 0))
    joined = b.call(aten.cat.default, [b.call(aten.view.dtype, first, torch.int16), second], 0)
    return [b.call(aten.mm.default, joined, w)]


def parts_of_a_product_of_two_dtypes(b: Builder) -> list[Node]:
    x, w = inputs(b, (8, 6), (6, 8), dtype=torch.bfloat16)
    first, second = b.items(b.call(aten.split.Tensor, b.call(aten.mm.default, x, w), 4, 0))
    return [scattered(b, b.call(aten.cat.default, [b.call(aten.view.dtype, first, torch.int16), second], 0))]


def pieces_joined_as(bits: torch.dtype, dtype: torch.dtype, dim: int) -> Attack:
    """The shards [2, 4, 6] are joined as elements of another size, and seen as what they were then."""

    def attack(b: Builder) -> list[Node]:
        (x,) = inputs(b, (2, 4, 6), dtype=dtype)
        pieces = b.items(b.call(aten.split.Tensor, gathered(b, x), 2, 0))
        joined = b.call(aten.cat.default, [b.call(aten.view.dtype, piece, bits) for piece in pieces], dim)
        rows = b.call(aten.reshape.default, b.call(aten.view.dtype, joined, dtype), [-1, 12 if dim == 2 else 6])
        return [b.call(aten.mm.default, rows, b.placeholder((rows.meta["val"].shape[1], 8), dtype))]

    return attack


def part_of_the_bytes(*steps: tuple[Any, ...]) -> Attack:
    """As many of the bytes of gathered int16 numbers as there are numbers."""

    def attack(b: Builder) -> list[Node]:
        (x,) = inputs(b, (4, 8), dtype=torch.int16)
        some = b.call(aten.view.dtype, gathered(b, x), torch.int8)
        for target, *arguments in steps:
            some = b.call(target, some, *arguments)
        return [b.call(aten._int_mm.default, some, b.placeholder((some.meta["val"].shape[1], 8), torch.int8))]

    return attack


def bytes_moved_between_elements(b: Builder) -> list[Node]:
    """The low bytes of a row, then the high ones, seen as numbers."""
    x, w = inputs(b, (4, 8), (8, 5), dtype=torch.float32)
    words = b.call(aten.view.dtype, gathered(b, x), torch.int16)
    halves = b.call(aten.permute.default, b.call(aten.reshape.default, words, [8, 8, 2]), [0, 2, 1])
    moved = b.call(aten.reshape.default, b.call(aten.clone.default, halves), [8, 16])
    return [b.call(aten.mm.default, b.call(aten.view.dtype, moved, torch.float32), w)]


# --- rows cut off after a gather, as the padding of uneven shards ------------------------------------------------
Multiply = Callable[[Builder, Node], list[Node]]


def times_weight(b: Builder, rows: Node) -> list[Node]:
    return [b.call(aten.mm.default, rows, b.placeholder((6, 5), torch.float64))]


def cut_off(b: Builder, whole: Node, dim: int = 0, start: int = 0, end: int = 7) -> Node:
    return b.call(aten.slice.Tensor, whole, dim, start, end)


def rows_cut_off(multiply: Multiply = times_weight, **which: int) -> Attack:
    """7 of the 8 rows of two ranks."""

    def attack(b: Builder) -> list[Node]:
        (x,) = inputs(b, (4, 6))
        return multiply(b, cut_off(b, gathered(b, x), **which))

    return attack


def rows_padded_by(*amounts: int, multiply: Multiply = times_weight) -> Attack:
    """Less than none, as the gradient of padding has it: 7 of the 8 rows of two ranks."""

    def attack(b: Builder) -> list[Node]:
        (x,) = inputs(b, (4, 6))
        return multiply(b, b.call(aten.constant_pad_nd.default, gathered(b, x), list(amounts)))

    return attack


def times_smaller_weight(b: Builder, rows: Node) -> list[Node]:
    return [b.call(aten.mm.default, rows, b.placeholder((5, 3), torch.float64))]


def batch_cut_off(*outputs: str, dim: int = 1) -> Attack:
    """A batch that is gathered along the sequence, and a step of that is cut off, or a sequence; what is returned."""

    def attack(b: Builder) -> list[Node]:
        (x,) = inputs(b, (4, 4, 6))
        whole = chunks(b, gathered(b, x), 4, 0, 1)
        some = cut_off(b, whole, dim, end=7 if dim else 3)
        rows = b.call(aten.reshape.default, b.call(aten.clone.default, some), [-1, 6])
        return [*times_weight(b, rows), *({"whole": whole, "some": some, "rows": rows}[name] for name in outputs)]

    return attack


def cut_and_whole(b: Builder) -> list[Node]:
    (x,) = inputs(b, (4, 6))
    whole = gathered(b, x)
    return [*times_weight(b, cut_off(b, whole)), *times_weight(b, whole), *times_weight(b, cut_off(b, whole))]


def both_with_an_addition(b: Builder, rows: Node) -> list[Node]:
    w, row, matrix = inputs(b, (6, 5), (5,), (7, 5))
    return [b.call(aten.addmm.default, bias, rows, w) for bias in (row, matrix)]


def its_own_gradient(b: Builder, rows: Node) -> list[Node]:
    """Multiplied by a weight, and transposed with the gradient of that weight."""
    (grad,) = inputs(b, (7, 3))
    return [*times_weight(b, rows), b.call(aten.mm.default, b.call(aten.t.default, rows), grad)]


def times_itself(b: Builder, rows: Node) -> list[Node]:
    return [b.call(aten.mm.default, rows, b.call(aten.t.default, rows))]


def as_a_right_operand(b: Builder, rows: Node) -> list[Node]:
    (left,) = inputs(b, (5, 7))
    return [b.call(aten.mm.default, left, rows)]


def negated_and_multiplied(b: Builder, rows: Node) -> list[Node]:
    return times_weight(b, b.call(aten.neg.default, rows))


def multiplied_and_changed(b: Builder, rows: Node) -> list[Node]:
    products = times_weight(b, rows)
    b.call(aten.add_.Tensor, rows, 1)
    return [*products, rows, *times_weight(b, rows)]


def multiplied_with_columns_as_rows(b: Builder, rows: Node) -> list[Node]:
    (w,) = inputs(b, (7, 5))
    return [b.call(aten.mm.default, b.call(aten.reshape.default, rows, [6, 7]), w)]


def scaled_by_one_number(b: Builder) -> list[Node]:
    x, w = b.placeholder((4, 32), FP8), b.placeholder((32, 16), FP8, strides=(1, 32))
    one = b.placeholder((), torch.float32, "scale")
    return [
        b.call(aten._scaled_mm.default, cut_off(b, gathered(b, x)), w, one, one, None, None, torch.bfloat16),
    ]


def scaled_by_gathered_rows(b: Builder) -> list[Node]:
    x, scale, w = b.placeholder((4, 32), FP8), factor(b, (4, 1)), b.placeholder((32, 16), FP8, strides=(1, 32))
    rows, scales = (cut_off(b, gathered(b, each)) for each in (x, scale))
    return [b.call(aten._scaled_mm.default, rows, w, scales, factor(b, (1, 16)), None, None, torch.bfloat16)]


def products_scaled_by_gathered_rows(b: Builder) -> list[Node]:
    """The numbers are cut like the data, and scale the product."""
    x, scale, w = b.placeholder((4, 32), FP8), factor(b, (4, 1)), b.placeholder((32, 16), FP8, strides=(1, 32))
    rows, scales = (cut_off(b, gathered(b, each)) for each in (x, scale))
    one = unit(b)
    product = b.call(aten._scaled_mm.default, rows, w, one, one, None, None, torch.bfloat16)
    return [b.call(aten.mul.Tensor, product, scales)]


def scaled_by_copies_of_which_one_is_written(view: bool) -> Attack:
    """Two copies of one number scale products of one gather; the first copy is tripled before."""

    def attack(b: Builder) -> list[Node]:
        x, scale = b.placeholder((4, 32), FP8), factor(b, (1,))
        copies = [b.call(aten.clone.default, scale) for _ in range(2)]
        b.call(aten.mul_.Tensor, copies[0], 3.0)
        if view:
            copies = [b.call(aten.reshape.default, each, [1, 1]) for each in copies]
        whole, one = gathered(b, x), unit(b)
        weights = [b.placeholder((32, 16), FP8, strides=(1, 32)) for _ in copies]
        return [
            b.call(aten._scaled_mm.default, whole, w, each, one, None, None, torch.bfloat16)
            for w, each in zip(weights, copies, strict=True)
        ]

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


def weight_mutated_after_it_was_aliased(b: Builder) -> list[Node]:
    """The batch is the same memory, and is multiplied as it is then."""
    x, w = inputs(b, (3, 4, 6), (6, 6))
    right = b.call(aten.alias.default, b.call(aten.expand.default, w, [6, 6, 6]))
    b.call(aten.add_.Tensor, w, 1)
    return [b.call(aten.bmm.default, gathered(b, x), right)]


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


# --- an all-to-all, and what looks like one -----------------------------------------------------------------------
def copied(b: Builder, x: Node) -> Node:
    return b.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def columns_of_all(b: Builder, cut: int = 3, dim: int = 1) -> tuple[Node, list[Node]]:
    """The gathered [8, 6], and its pieces of `cut` columns, or rows."""
    full = gathered(b, *inputs(b, (4, 6)))
    return full, b.items(b.call(aten.split.Tensor, full, cut, dim))


def times_new(b: Builder, x: Node) -> Node:
    return b.call(aten.mm.default, x, *inputs(b, (x.meta["val"].shape[-1], 8)))


def piece(index: int, cut: int = 3, dim: int = 1) -> Attack:
    """One piece of the columns (or rows) of all, copied, times a matrix."""
    return lambda b: [times_new(b, copied(b, columns_of_all(b, cut, dim)[1][index]))]


def own_piece_of_columns_gathered_by_columns(b: Builder) -> list[Node]:
    """Gathered along the columns, kept along the rows: the other way round."""
    joined = chunks(b, gathered(b, *inputs(b, (4, 6))), 4, 0, 1)
    rows = b.items(b.call(aten.split.Tensor, joined, 2, 0))
    return [times_new(b, rows[0])]


def own_piece_and_another(b: Builder) -> list[Node]:
    first, second = columns_of_all(b)[1]
    return [times_new(b, copied(b, first)), b.call(aten.neg.default, second)]


def own_piece_and_all(b: Builder) -> list[Node]:
    full, pieces = columns_of_all(b)
    return [times_new(b, copied(b, pieces[0])), b.call(aten.neg.default, full)]


def own_piece_that_is_not_copied(b: Builder) -> list[Node]:
    return [times_new(b, columns_of_all(b)[1][0])]


def half_of_the_columns(b: Builder) -> list[Node]:
    return [times_new(b, copied(b, b.call(aten.slice.Tensor, gathered(b, *inputs(b, (4, 6))), 1, 0, 3)))]


def own_piece_of_a_part(b: Builder) -> list[Node]:
    """The last rows of what is gathered are dropped before."""
    rows = b.call(aten.slice.Tensor, gathered(b, *inputs(b, (4, 6))), 0, 0, 6)
    return [times_new(b, copied(b, b.items(b.call(aten.split.Tensor, rows, 3, 1))[0]))]


ALL_TO_ALLS: dict[str, tuple[Attack, list[str]]] = {
    "own piece of columns": (piece(0), ["ATP015"]),
    "own piece of rows, gathered by columns": (own_piece_of_columns_gathered_by_columns, ["ATP015"]),
    "another rank's piece": (piece(1), ["ATP103"]),
    "own shard": (piece(0, 4, 0), ["ATP103"]),
    "one of three pieces": (piece(0, 2), ["ATP103"]),
    "one of two unequal pieces": (piece(0, 4), ["ATP103"]),
    "own piece and another": (own_piece_and_another, ["ATP406"]),
    "own piece and all": (own_piece_and_all, ["ATP103"]),
    "own piece that is not copied": (own_piece_that_is_not_copied, ["ATP103"]),
    "half of the columns": (half_of_the_columns, ["ATP103"]),
    "own piece of a part": (own_piece_of_a_part, ["ATP103"]),
}
"""What becomes of each on rank 0 of two, on CPU. Where the rank is not known, or on GPUs, ATP103 stands for ATP015."""


# --- all-reduces ------------------------------------------------------------------------------------------------
TENSORS: dict[str, tuple[Attack, list[str]]] = {
    "copy of gathered, mutated": (copy_of_gathered_then_mutated, ["F"]),
    "operand, mutated in a region": (operand_mutated_in_a_region, ["ATP204"]),
    "base of operand, mutated": (base_of_operand_mutated, ["F"]),
    "bytes as two fp8 types": (bytes_as_two_fp8_types, ["F"]),
    "words as two half types": (words_as_two_half_types, ["F"]),
    "pieces of two dtypes": (pieces_of_two_dtypes, ["ATP105"]),
    "parts of a product of two dtypes": (parts_of_a_product_of_two_dtypes, ["ATP105"]),
    "pieces joined as bytes": (pieces_joined_as(torch.uint8, torch.float32, 1), ["F"]),
    "pieces joined as bytes, along the contraction": (pieces_joined_as(torch.uint8, torch.bfloat16, 2), ["F"]),
    "pieces joined as larger elements": (pieces_joined_as(torch.int64, torch.float32, 1), ["F"]),
    "every other byte": (part_of_the_bytes((aten.slice.Tensor, 1, 0, 16, 2)), ["ATP104"]),
    "bytes of half of the rows": (part_of_the_bytes((aten.slice.Tensor, 0, 0, 4)), ["ATP104"]),
    "bytes moved between elements": (bytes_moved_between_elements, ["ATP104"]),
    "copies as scales, one written": (scaled_by_copies_of_which_one_is_written(False), ["F"]),
    "views of copies as scales, one written": (scaled_by_copies_of_which_one_is_written(True), ["F"]),
    "rows cut off": (rows_cut_off(), ["F"]),
    "rows cut off in front": (rows_cut_off(start=1, end=8), ["ATP103"]),
    "columns cut off": (
        rows_cut_off(lambda b, x: [b.call(aten.mm.default, x, b.placeholder((5, 3), torch.float64))], dim=1, end=5),
        ["ATP103"],
    ),
    "rows padded by none": (rows_padded_by(0, 0, 0, 0), ["F"]),
    "rows padded by less than none": (rows_padded_by(0, 0, 0, -1), ["F"]),
    "rows padded by less than none, and changed": (
        rows_padded_by(0, 0, 0, -1, multiply=multiplied_and_changed),
        ["ATP204"],
    ),
    "rows padded by less than none in front": (rows_padded_by(0, 0, -1, 0), ["ATP104"]),
    "rows padded by less than none, and more": (rows_padded_by(0, 0, -2, 1), ["ATP104"]),
    "columns padded by less than none": (rows_padded_by(0, -1, multiply=times_smaller_weight), ["ATP103"]),
    "rows and columns padded by less than none": (
        rows_padded_by(0, -1, 0, -1, multiply=times_smaller_weight),
        ["ATP103"],
    ),
    "rows padded by less than half": (rows_padded_by(0, 0, 0, -5, multiply=times_weight), ["ATP103"]),
    "rows cut off, some more": (rows_cut_off(lambda b, x: times_weight(b, cut_off(b, x, end=6))), ["ATP103"]),
    "rows cut off and added to": (rows_cut_off(both_with_an_addition), ["F"]),
    "rows cut off, and their gradient": (rows_cut_off(its_own_gradient), ["F"]),
    "rows cut off, times themselves": (rows_cut_off(times_itself), ["ATP203"]),
    "rows cut off, on the right": (rows_cut_off(as_a_right_operand), ["ATP003"]),
    "rows cut off and negated": (rows_cut_off(negated_and_multiplied), ["ATP105"]),
    "rows cut off and changed": (rows_cut_off(multiplied_and_changed), ["ATP204"]),
    "rows cut off, columns as rows": (rows_cut_off(multiplied_with_columns_as_rows), ["ATP114"]),
    "rows cut off beside all of them": (cut_and_whole, ["F"]),
    "steps cut off": (batch_cut_off(), ["F"]),
    "steps cut off, and the rows saved": (batch_cut_off("rows"), ["F"]),
    "steps cut off, and the sequences saved": (batch_cut_off("some", "rows"), ["F"]),
    "steps cut off, and all saved": (batch_cut_off("whole", "some"), ["F"]),
    "a sequence cut off": (batch_cut_off("rows", dim=0), ["F"]),
    "rows cut off, with one scale": (scaled_by_one_number, ["F"]),
    "rows cut off, with scales of rows": (scaled_by_gathered_rows, ["ATP114", "ATP007"]),
    "rows cut off, whose products are scaled": (products_scaled_by_gathered_rows, ["F", "ATP007"]),
    "product summed as integers": (product_summed_as_integers, ["ATP105"]),
    "terms added as integers": (terms_added_as_integers, ["ATP111"]),
    "bits negated as integers": (bits_negated(torch.int16, torch.bfloat16), ["ATP105"]),
    "bits of fp32 negated as integers": (bits_negated(torch.int32, torch.float32), ["ATP105"]),
    "bits times -1 as integers": (bits_negated(torch.int16, torch.bfloat16, times=True), ["ATP105"]),
    "batch": (batch_times(), ["F"]),
    "batch, transposed": (batch_times((aten.transpose.int, 1, 2)), ["F"]),
    "batch, transposed from the end": (batch_times((aten.transpose.int, -1, -2)), ["F"]),
    "batch, permuted": (batch_times((aten.permute.default, [0, 2, 1])), ["F"]),
    "batch, transposed twice": (batch_times((aten.transpose.int, 1, 2), (aten.permute.default, [0, 2, 1])), ["F"]),
    "batch, aliased": (batch_times((aten.alias.default,)), ["F"]),
    "batch, detached and transposed": (batch_times((aten.detach.default,), (aten.transpose.int, 1, 2)), ["F"]),
    "batch, copied": (batch_times((aten.clone.default,)), ["ATP115"]),
    "batch, negated": (batch_times((aten.neg.default,)), ["ATP115"]),
    "batch, permuted to what it was": (batch_times((aten.permute.default, [0, 1, 2])), ["ATP115"]),
    "batch, matrices and rows permuted": (batch_times((aten.permute.default, [1, 0, 2])), ["ATP115"]),
    "batch, matrices and rows transposed": (batch_times((aten.transpose.int, 0, 1)), ["ATP115"]),
    "batch, matrices and columns transposed": (batch_times((aten.transpose.int, 2, 0)), ["ATP115"]),
    "batch, of a row": (batch_times(weight=(6,)), ["ATP115"]),
    "batch, of one row": (batch_times(weight=(1, 6)), ["ATP115"]),
    "batch, of ones": (batch_times_ones, ["ATP115"]),
    "last dimensions swapped": (last_dimensions_swapped, ["ATP211"]),
    "seen as fewer elements": (seen_as_fewer_elements, ["ATP104"]),
    "expanded to more dimensions": (expanded_to_more_dimensions, ["ATP102"]),
    "product and a row": (square_product_and((8,)), ["ATP110"]),
    "a row and a product": (square_product_and((8,), first=True), ["ATP110"]),
    "product and a row of its dimensions": (square_product_and((1, 8)), ["ATP110"]),
    "product divided by zero": (product_divided_by_zero, ["ATP105"]),
    "half product times float": (half_product_times_float, ["ATP105"]),
    "half product as the other half": (half_product_as_the_other_half, ["ATP105"]),
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
    "weight mutated after it was aliased": (weight_mutated_after_it_was_aliased, ["F"]),
    "weight copied before it is mutated": (weight_copied_before_it_is_mutated, ["ATP115"]),
    "batch of weights that looks like one": (batch_of_weights_that_looks_like_one, ["ATP115"]),
    "weight transposed once in the batch": (weight_transposed_once_in_the_batch, ["F"]),
    "scatter feeds gather": (scatter_feeds_gather, ["F", "F"]),
    "gather feeds weight of gather": (gather_feeds_weight_of_gather, ["F", "F"]),
    "three gathers in a circle": (three_gathers_in_a_circle, ["F", "F", "F"]),
}
