"""Attacks on products that are padded by zeros before a reduce-scatter. See `test_attacks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attack_parts import (
    FP8,
    FP64,
    Attack,
    all_reduced,
    aten,
    chunks,
    factor,
    inputs,
    scattered,
    scattered_by_columns,
)
from programs import Builder
from torch.fx import Node

Pad = Callable[[Builder, Node], Node]


def padded(*amounts: int, value: float = 0.0) -> Pad:
    return lambda b, x: b.call(aten.constant_pad_nd.default, x, list(amounts), value)


def zeros(b: Builder, *shape: int, value: float = 0, dtype: torch.dtype = FP64) -> Node:
    return b.call(aten.full.default, list(shape), value, dtype=dtype)


def joined_with(value: float = 0, front: bool = False) -> Pad:
    """A row of numbers behind the seven of the product, or in front of them."""

    def pad(b: Builder, x: Node) -> Node:
        row = zeros(b, 1, 8, value=value)
        return b.call(aten.cat.default, [row, x] if front else [x, row], 0)

    return pad


def joined_with_rows_of_each_rank(b: Builder, x: Node) -> Node:
    return b.call(aten.cat.default, [x, *inputs(b, (1, 8))], 0)


def joined_with_zeros_that_change(b: Builder, x: Node) -> Node:
    row = zeros(b, 1, 8)
    b.call(aten.add_.Tensor, row, 1.0)
    return b.call(aten.cat.default, [x, row], 0)


def written_into(value: float = 0, start: int = 0, step: int = 1, rows: int = 8) -> Pad:
    def pad(b: Builder, x: Node) -> Node:
        return b.call(aten.slice_scatter.default, zeros(b, rows, 8, value=value), x, 0, start, start + 7 * step, step)

    return pad


def copied_and_written(b: Builder, x: Node) -> Node:
    """As `z[:7] = x` is traced."""
    whole = zeros(b, 8, 8)
    part = b.call(aten.copy.default, b.call(aten.slice.Tensor, whole, 0, 0, 7), x)
    return b.call(aten.slice_scatter.default, whole, part, 0, 0, 7)


def one_row_for_all(b: Builder, x: Node) -> Node:
    """A row of the product, copied to all of them."""
    whole = zeros(b, 8, 8)
    part = b.call(aten.copy.default, whole, b.call(aten.slice.Tensor, x, 0, 0, 1))
    return b.call(aten.add.Tensor, part, whole)


def product(b: Builder, rows: int = 7, weight: Callable[[Builder, Node], Node] = lambda b, w: w) -> Node:
    x, w = inputs(b, (rows, 6), (6, 8))
    return b.call(aten.mm.default, x, weight(b, w))


def infinite(b: Builder, w: Node) -> Node:
    """A weight with -inf where it was negative, which makes NaN of a row of zeros."""
    return b.call(aten.log.default, b.call(aten.relu.default, w))


def scattered_with(pad: Pad, **how: Any) -> Attack:
    return lambda b: [scattered(b, pad(b, product(b, **how)))]


def with_a_bias_and_a_residual(b: Builder) -> list[Node]:
    bias, x, w, other = inputs(b, (8,), (7, 6), (6, 8), (7, 8))
    total = b.call(aten.add.Tensor, b.call(aten.addmm.default, bias, x, infinite(b, w)), other)
    return [scattered(b, padded(0, 0, 0, 1)(b, total))]


def cut_and_padded(b: Builder) -> list[Node]:
    """A product without its last row, which a row of zeros takes the place of."""
    cut = b.call(aten.slice.Tensor, product(b, rows=8), 0, 0, 7)
    return [scattered(b, padded(0, 0, 0, 1)(b, cut))]


def negated(b: Builder) -> list[Node]:
    """Zeros, and none that is negative."""
    return [b.call(aten.reciprocal.default, scattered(b, padded(0, 0, 0, 1)(b, b.call(aten.neg.default, product(b)))))]


def added_to_the_padding(b: Builder) -> list[Node]:
    """A residual of eight rows: what is in the last one is no padding."""
    total = b.call(aten.add.Tensor, padded(0, 0, 0, 1)(b, product(b)), *inputs(b, (8, 8)))
    return [scattered(b, total)]


def padding_returned(b: Builder) -> list[Node]:
    whole = padded(0, 0, 0, 1)(b, product(b))
    return [scattered(b, whole), whole]


def padded_twice(b: Builder) -> list[Node]:
    return [scattered(b, padded(0, 0, 0, 1)(b, padded(0, 0, 0, 2)(b, product(b, rows=5))))]


def sum_of_two(b: Builder) -> list[Node]:
    total = b.call(aten.add.Tensor, product(b, weight=infinite), product(b))
    return [scattered(b, padded(0, 0, 0, 1)(b, b.call(aten.mul.Tensor, total, 0.5)))]


def two_sums_of_padded(b: Builder) -> list[Node]:
    """Two reduce-scatters whose results are added; one is padded."""
    return [
        b.call(aten.add.Tensor, scattered(b, padded(0, 0, 0, 1)(b, product(b))), scattered(b, product(b, rows=8))),
    ]


def batch(dim: int, pad: Pad, into: Callable[[Builder, Node], Node]) -> Attack:
    """A batch [4, 7, 8] or [7, 4, 8] of products; what is padded goes through `into` to the collective."""

    def attack(b: Builder) -> list[Node]:
        shape = [4, 4]
        shape[dim] = 7
        whole = b.call(aten.reshape.default, product(b, rows=28, weight=infinite), [*shape, 8])
        return [scattered(b, into(b, pad(b, whole)))]

    return attack


def as_rows(b: Builder, x: Node) -> Node:
    return b.call(aten.reshape.default, x, [-1, 8])


def along_the_sequence(b: Builder, x: Node) -> Node:
    return chunks(b, x, 4, 1, 0)


def transposed(b: Builder, x: Node) -> Node:
    return b.call(aten.clone.default, b.call(aten.transpose.int, x, 0, 1))


def rearranged_before(b: Builder) -> list[Node]:
    """The product's transpose is padded."""
    whole = b.call(aten.t.default, product(b, rows=8))
    return [scattered(b, padded(0, 0, 0, 2)(b, whole))]


def regrouped_before(b: Builder) -> list[Node]:
    """Rows of half the product's width are padded: 14 of them to 16, and 13 are no rows of the product."""
    whole = b.call(aten.reshape.default, product(b), [14, 4])
    return [scattered(b, padded(0, 0, 0, 2)(b, whole))]


def by_columns(b: Builder) -> list[Node]:
    return [scattered_by_columns(b, padded(0, 0, 0, 1)(b, product(b)))]


def to_be_all_reduced(b: Builder) -> list[Node]:
    return [all_reduced(b, padded(0, 0, 0, 1)(b, product(b)))]


def scales_of_rows(b: Builder) -> list[Node]:
    x, w = b.placeholder((7, 32), FP8), b.placeholder((32, 16), FP8, strides=(1, 32))
    scales = factor(b, (7, 1)), factor(b, (1, 16))
    out = b.call(aten._scaled_mm.default, x, w, *scales, None, None, torch.bfloat16)
    return [scattered(b, padded(0, 0, 0, 1)(b, out))]


def scattered_as_its_negative_zeros(b: Builder) -> list[Node]:
    """Sums of -0.0 are -0.0, which divides otherwise."""
    whole = scattered(b, padded(0, 0, 0, 1, value=-0.0)(b, product(b)))
    return [b.call(aten.reciprocal.default, whole)]


def in_pieces(
    order: tuple[int, ...] = (0, 1),
    pads: tuple[int, ...] = (0, 1),
    front: int = 0,
    size: int = 4,
    rest: float | None = None,
    value: float = 0.0,
) -> Pad:
    """Pieces for the ranks, some padded, and joined, as DTensor has them; perhaps with four rows of numbers behind."""

    def pad(b: Builder, x: Node) -> Node:
        items = b.items(b.call(aten.split.Tensor, x, size, 0))
        taken = [items[index] for index in order]
        for place, count in enumerate(pads):
            if count:
                amounts = [0, 0, front, count - front]
                taken[place] = b.call(aten.constant_pad_nd.default, taken[place], amounts, value)
        numbers = [] if rest is None else [zeros(b, 4, 8, value=rest)]
        return b.call(aten.cat.default, [*taken, *numbers], 0)

    return pad


ROW = padded(0, 0, 0, 1)
PADDING: dict[str, tuple[Attack, list[str]]] = {
    "product padded by a row": (scattered_with(ROW), ["F"]),
    "product with an infinite weight, padded by a row": (scattered_with(ROW, weight=infinite), ["F"]),
    "product padded by a row of ones": (scattered_with(padded(0, 0, 0, 1, value=1.0)), ["ATP114"]),
    "product padded by negative zeros": (scattered_as_its_negative_zeros, ["ATP114"]),
    "product padded in front": (scattered_with(padded(0, 0, 1, 0)), ["ATP104"]),
    "product padded and cut in front": (scattered_with(padded(0, 0, -1, 2)), ["ATP104"]),
    "product padded in two dimensions": (scattered_with(padded(0, 1, 0, 1)), ["ATP114"]),
    "product padded by columns": (scattered_with(padded(0, 1), rows=8), ["ATP114"]),
    "product padded twice": (padded_twice, ["ATP114"]),
    "one row, padded to eight": (scattered_with(padded(0, 0, 0, 7), rows=1, weight=infinite), ["F"]),
    "product joined with zeros": (scattered_with(joined_with(), weight=infinite), ["F"]),
    "product joined with ones": (scattered_with(joined_with(1)), ["ATP104"]),
    "product joined with zeros in front": (scattered_with(joined_with(front=True)), ["ATP104"]),
    "product joined with a row of each rank": (scattered_with(joined_with_rows_of_each_rank), ["ATP104"]),
    "product joined with zeros that change": (scattered_with(joined_with_zeros_that_change), ["ATP104"]),
    "product written into zeros": (scattered_with(written_into(), weight=infinite), ["F"]),
    "product written into ones": (scattered_with(written_into(1)), ["ATP104"]),
    "product written behind a row of zeros": (scattered_with(written_into(start=1)), ["ATP104"]),
    "product written into every other row": (scattered_with(written_into(step=2, rows=14)), ["ATP104"]),
    "product copied into zeros": (scattered_with(copied_and_written, weight=infinite), ["F"]),
    "a row of the product for all": (scattered_with(one_row_for_all), ["ATP102"]),
    "cut and padded": (cut_and_padded, ["ATP104"]),
    "padded and negated": (negated, ["F"]),
    "padded with a bias and a residual": (with_a_bias_and_a_residual, ["F"]),
    "padded before a residual": (added_to_the_padding, ["ATP114"]),
    "padded, and returned": (padding_returned, ["ATP202"]),
    "padded sum of two products": (sum_of_two, ["F"]),
    "sum of two, of which one is padded": (two_sums_of_padded, ["F", "F"]),
    "sequences padded, and scattered": (batch(1, ROW, along_the_sequence), ["F"]),
    "sequences padded, and scattered by the batch": (batch(1, ROW, as_rows), ["ATP114"]),
    "batch padded": (batch(0, padded(0, 0, 0, 0, 0, 1), as_rows), ["F"]),
    "batch padded, and scattered as it is": (batch(0, padded(0, 0, 0, 0, 0, 1), lambda b, x: x), ["F"]),
    "batch padded, and transposed": (batch(0, padded(0, 0, 0, 0, 0, 1), transposed), ["ATP114"]),
    "transpose padded": (rearranged_before, ["ATP104"]),
    "halves of rows padded": (regrouped_before, ["ATP104"]),
    "padded, and scattered by columns": (by_columns, ["ATP114"]),
    "padded, and all-reduced": (to_be_all_reduced, ["ATP114"]),
    "pieces, the last one padded": (scattered_with(in_pieces(), weight=infinite), ["F"]),
    "pieces, the last one padded by ones": (scattered_with(in_pieces(value=1.0)), ["ATP114"]),
    "pieces, the last one padded in front": (scattered_with(in_pieces(front=1)), ["ATP104"]),
    "pieces, the first one last and padded": (scattered_with(in_pieces((1, 0), (1, 0))), ["ATP114"]),
    "pieces, one of them twice": (scattered_with(in_pieces((0, 0), (0, 0))), ["ATP102"]),
    "pieces, all padded": (scattered_with(in_pieces((0, 1), (1, 2))), ["ATP114"]),
    "pieces, one dropped": (scattered_with(in_pieces((0, 1), (0, 0), size=3)), ["ATP103"]),
    "pieces, and zeros": (scattered_with(in_pieces((0,), (0,), rest=0), rows=4, weight=infinite), ["F"]),
    "pieces, one padded, and zeros": (scattered_with(in_pieces((0,), (1,), rest=0), rows=3, weight=infinite), ["F"]),
    "pieces, and ones": (scattered_with(in_pieces((0,), (0,), rest=1), rows=4), ["ATP104"]),
    "padded, with scales of rows": (scales_of_rows, ["F"]),
}
