"""Attacks on factors after products that are not fp8: int8 weights, W8A8, gates of rows. See `test_attacks`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attack_parts import (
    BF16,
    FP16,
    FP32,
    FP64,
    Attack,
    all_reduced,
    aten,
    cast,
    factor,
    gathered,
    inputs,
    routed,
    scattered,
    times,
)
from programs import Builder
from torch.fx import Node

INT8 = torch.int8
Steps = Callable[[Builder, Node], Node]


def product_of(b: Builder, dtype: torch.dtype, columns: int = 16) -> Node:
    """A product [8, columns] in this dtype; in int32 of int8."""
    a, w = inputs(b, (8, 16), (16, columns), dtype=INT8 if dtype == torch.int32 else dtype)
    return b.call(aten._int_mm.default if dtype == torch.int32 else aten.mm.default, a, w)


def after(dtype: torch.dtype, steps: Steps, columns: int = 16) -> Attack:
    """A product, then these steps, then a reduce-scatter."""
    return lambda b: [scattered(b, steps(b, product_of(b, dtype, columns)))]


def by(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> Steps:
    """Times tensors of these shapes, one after the other."""
    return lambda b, product: times(b, product, *(factor(b, shape, dtype) for shape in shapes))


def by_outer(b: Builder, product: Node) -> Node:
    """Times the product of factors of rows and of columns."""
    return times(b, product, times(b, factor(b, (8, 1)), factor(b, (1, 16))))


def then(*dtypes_and_shapes: torch.dtype | tuple[int, ...]) -> Steps:
    """Converted to each dtype, and times a tensor in fp32 of each shape."""

    def steps(b: Builder, product: Node) -> Node:
        for each in dtypes_and_shapes:
            product = times(b, product, factor(b, each)) if isinstance(each, tuple) else cast(b, product, each)
        return product

    return steps


def of_int8_weights(reduce: Callable[[Builder, Node], Node]) -> Attack:
    """torchao's weight-only linear: converted to bf16, and a scale for each column after the product."""

    def attack(b: Builder) -> list[Node]:
        x, w, scale = b.placeholder((8, 16), BF16), b.placeholder((12, 16), INT8), factor(b, (12, 1))
        product = b.call(aten.mm.default, x, cast(b, b.call(aten.permute.default, w, [1, 0]), BF16))
        column = b.call(aten.view.default, cast(b, scale, BF16), [12])
        return [reduce(b, b.call(aten.view.default, times(b, product, column), [2, 4, 12]))]

    return attack


def gated_beside_routed(b: Builder) -> list[Node]:
    """A shared expert with a gate of rows, and routed tokens, reduced as one sum."""
    gate = b.call(aten.sigmoid.default, b.placeholder((8, 1), FP32))
    gated = times(b, product_of(b, FP32), gate)
    return [scattered(b, b.call(aten.add.Tensor, routed(b, (8, 16), FP32), gated))]


def plain_and_gated(b: Builder) -> list[Node]:
    """Products of two kinds: one is added to the other as a tensor."""
    both = product_of(b, FP32), times(b, product_of(b, FP32), factor(b, (8, 1)))
    return [all_reduced(b, b.call(aten.add.Tensor, *both))]


def two_gated(b: Builder) -> list[Node]:
    both = (times(b, product_of(b, BF16), factor(b, (8, 1), BF16)) for _ in range(2))
    return [scattered(b, b.call(aten.add.Tensor, *both))]


def gated_in_views(shape: tuple[int, ...]) -> Attack:
    """A product [8, 16] seen as [2, 4, 16], times a tensor of this shape."""

    def attack(b: Builder) -> list[Node]:
        seen = b.call(aten.view.default, product_of(b, BF16), [2, 4, 16])
        scaled = times(b, seen, factor(b, shape, BF16))
        return [scattered(b, b.call(aten.view.default, scaled, [8, 16]))]

    return attack


def rows_of_another_width(b: Builder) -> list[Node]:
    """Seen as [16, 8], where the factors are of half rows and of columns of both halves."""
    seen = b.call(aten.view.default, product_of(b, FP32), [16, 8])
    return [scattered(b, times(b, seen, factor(b, (16, 1))))]


def transposed_in_between(b: Builder) -> list[Node]:
    turned = b.call(aten.permute.default, product_of(b, FP32, 8), [1, 0])
    return [scattered(b, times(b, b.call(aten.clone.default, turned), factor(b, (8, 1))))]


def divided(b: Builder, product: Node) -> Node:
    return b.call(aten.div.Tensor, product, factor(b, (8, 1)))


def squared(b: Builder, product: Node) -> Node:
    return times(b, product, product)


def biased_then_scaled(b: Builder) -> list[Node]:
    bias, a, w = inputs(b, (16,), (8, 16), (16, 16), dtype=FP32)
    return [scattered(b, times(b, b.call(aten.addmm.default, bias, a, w), factor(b, (1, 16))))]


def residual_then_scaled(b: Builder) -> list[Node]:
    residual, a, w = inputs(b, (8, 16), (8, 16), (16, 16), dtype=FP32)
    return [scattered(b, times(b, b.call(aten.addmm.default, residual, a, w), factor(b, (8, 1))))]


def columns_then(gate: Steps) -> Attack:
    """int8 weights' scales in bf16, then a gate of rows."""
    steps: Steps = lambda b, x: times(b, times(b, x, factor(b, (16,), BF16)), gate(b, b.placeholder((8, 1), BF16)))  # noqa: E731
    return after(BF16, steps)


def sigmoid(b: Builder, logits: Node) -> Node:
    return cast(b, b.call(aten.sigmoid.default, cast(b, logits, FP32)), BF16)


def bits_of_a_sigmoid(b: Builder, logits: Node) -> Node:
    """Seen as another dtype, they are other numbers."""
    return b.call(aten.view.dtype, b.call(aten.sigmoid.default, cast(b, logits, FP16)), BF16)


def product_kept(which: int) -> Attack:
    """The product, or the gated one, is returned too: as a gradient of the gate needs it."""

    def attack(b: Builder) -> list[Node]:
        product = product_of(b, FP32)
        gated = times(b, product, factor(b, (8, 1)))
        return [scattered(b, gated), (product, gated)[which]]

    return attack


def gate_changed_in_place(b: Builder) -> list[Node]:
    gate = factor(b, (8, 1))
    gated = times(b, product_of(b, FP32), gate)
    b.call(aten.add_.Tensor, gate, 1)
    return [scattered(b, gated), gate]


def gate_of_the_reduced(b: Builder) -> list[Node]:
    """The gate comes from another collective, which the fused op follows."""
    gate = all_reduced(b, factor(b, (8, 1)))
    return [scattered(b, times(b, product_of(b, FP32), gate))]


def integers_reduced(b: Builder) -> list[Node]:
    return [all_reduced(b, product_of(b, torch.int32))]


def integers_scaled_by_integers(b: Builder) -> list[Node]:
    return [scattered(b, cast(b, times(b, product_of(b, torch.int32), b.placeholder((1, 16), torch.int32)), FP32))]


# --- int8 of what is gathered ----------------------------------------------------------------------------------
def quantized(zero: Callable[[Builder], Node] | None = None) -> Attack:
    """A gathered tensor [8, 64] over its rows' maxima, plus zero points of rows, as int8, times int8."""

    def attack(b: Builder) -> list[Node]:
        whole = gathered(b, b.placeholder((4, 64), FP32))
        most = b.call(aten.amax.default, b.call(aten.abs.default, whole), [1], True)
        scale = b.call(aten.div.Tensor, b.call(aten.clamp_min.default, most, 1e-5), 127.0)
        rows = b.call(aten.round.default, b.call(aten.div.Tensor, whole, scale))
        rows = rows if zero is None else b.call(aten.add.Tensor, rows, zero(b))
        int8 = cast(b, b.call(aten.clamp.default, rows, -128, 127), INT8)
        product = b.call(aten._int_mm.default, int8, b.placeholder((64, 16), INT8))
        return [times(b, cast(b, product, FP32), scale)]

    return attack


def full(b: Builder, rows: int = 8, number: float = 0.0) -> Node:
    return b.call(aten.full.default, [rows, 1], number, dtype=FP32)


def full_of_integers(b: Builder) -> Node:
    return b.call(aten.view.default, cast(b, b.call(aten.neg.default, full(b, number=1.0)), INT8), [8, 1])


def two_numbers(b: Builder) -> Node:
    """One for the rows of each rank."""
    return b.call(aten.cat.default, [full(b, 4, 0.0), full(b, 4, 3.0)])


def stacked_numbers(b: Builder) -> Node:
    stacked = b.call(aten.stack.default, [full(b, 4, 0.0), full(b, 4, 3.0)])
    return b.call(aten.view.default, stacked, [8, 1])


def changed_in_place(b: Builder) -> Node:
    zeros = full(b)
    first = b.call(aten.slice.Tensor, zeros, 0, 0, 4)
    b.call(aten.add_.Tensor, first, 3.0)
    return zeros


def written_in_part(b: Builder) -> Node:
    return b.call(aten.slice_scatter.default, full(b), full(b, 4, 3.0), 0, 0, 4)


def padded(b: Builder) -> Node:
    return b.call(aten.constant_pad_nd.default, full(b, 4, 3.0), [0, 0, 0, 4], 0.0)


def counted(b: Builder) -> Node:
    return b.call(aten.view.default, cast(b, b.call(aten.arange.default, 8), FP32), [8, 1])


def drawn(b: Builder) -> Node:
    return b.call(aten.bernoulli.p, full(b), 0.0)


FACTORS: dict[str, tuple[Attack, list[str]]] = {
    "int8 weights, scattered": (
        of_int8_weights(lambda b, x: scattered(b, b.call(aten.view.default, x, [8, 12]))),
        ["F"],
    ),
    "int8 weights, all-reduced": (of_int8_weights(all_reduced), ["F"]),
    "W8A8": (after(torch.int32, then(FP32, (8, 1), BF16, (16,), BF16)), ["F"]),
    "W8A8 in fp32": (after(torch.int32, by((8, 1), (16,))), ["F"]),
    "W8A8, columns first": (after(torch.int32, then(FP32, (1, 16), (8, 1), FP16)), ["F"]),
    "W8A8, rows times columns": (after(torch.int32, by_outer), ["F"]),
    "W8A8 by a number": (after(torch.int32, by((1, 1))), ["F"]),
    "W8A8 rounded to float16 in between": (after(torch.int32, then(FP32, (8, 1), FP16, (16,), FP16)), ["ATP105"]),
    "W8A8 as float16": (after(torch.int32, then(FP16, (8, 1), FP16)), ["ATP105"]),
    "W8A8 times float16": (after(torch.int32, by((8, 1), dtype=FP16)), ["ATP105"]),
    "W8A8 in fp64": (after(torch.int32, by((8, 1), dtype=FP64)), ["ATP105"]),
    "integers reduced": (integers_reduced, ["ATP301"]),
    "integers times integers": (integers_scaled_by_integers, ["ATP105"]),
    "gated in bf16": (after(BF16, by((8, 1), dtype=BF16)), ["F"]),
    "gated in float16": (after(FP16, by((8, 1), dtype=FP16)), ["F"]),
    "gated in float16 twice": (after(FP16, by((8, 1), (16,), dtype=FP16)), ["ATP105"]),
    "gated in float16 by fp32": (after(FP16, then((8, 1), FP16)), ["F"]),
    "gated in float16 by a number of no dimension": (after(FP16, by(())), ["ATP105"]),
    "gated in bf16 by a number of no dimension": (after(BF16, by(())), ["F"]),
    "gated in fp64": (after(FP64, by((8, 1), dtype=FP64)), ["ATP105"]),
    "rows and columns": (after(FP32, by((8, 1), (1, 16))), ["F"]),
    "columns, then rows": (after(FP32, by((16,), (8, 1))), ["ATP105"]),
    "rows times columns": (after(FP32, by_outer), ["ATP105"]),
    "columns, then a gate": (columns_then(sigmoid), ["F"]),
    "columns, then bits of a gate": (columns_then(bits_of_a_sigmoid), ["ATP105"]),
    "columns, then an exponential": (columns_then(lambda b, x: b.call(aten.exp.default, x)), ["ATP105"]),
    "columns of a square": (after(FP32, by((8,)), 8), ["F"]),
    "rows twice, not fp8": (after(FP32, by((8, 1), (8, 1))), ["ATP105"]),
    "columns twice, not fp8": (after(FP32, by((16,), (1, 16))), ["ATP105"]),
    "a matrix, not fp8": (after(FP32, by((8, 16))), ["ATP105"]),
    "divided": (after(FP32, divided), ["ATP105"]),
    "squared, not fp8": (after(FP32, squared), ["ATP105"]),
    "gated beside routed": (gated_beside_routed, ["F"]),
    "plain and gated": (plain_and_gated, ["F"]),
    "two gated": (two_gated, ["F"]),
    "a gate of rows in a view": (gated_in_views((2, 4, 1)), ["F"]),
    "columns in a view": (gated_in_views((16,)), ["F"]),
    "a gate of each position": (gated_in_views((4, 1)), ["ATP105"]),
    "a gate of each sequence": (gated_in_views((2, 1, 1)), ["ATP105"]),
    "columns of each sequence": (gated_in_views((2, 1, 16)), ["ATP105"]),
    "rows of another width": (rows_of_another_width, ["ATP105"]),
    "transposed in between": (transposed_in_between, ["ATP105"]),
    "biased, then scaled": (biased_then_scaled, ["ATP105"]),
    "residual, then scaled": (residual_then_scaled, ["ATP105"]),
    "ungated product kept": (product_kept(0), ["ATP105"]),
    "gated product kept": (product_kept(1), ["ATP202"]),
    "gate changed in place": (gate_changed_in_place, ["ATP204"]),
    "gate of the reduced": (gate_of_the_reduced, ["ATP013", "F"]),
    "int8 of rows": (quantized(), ["F"]),
    "int8 of rows plus a constant": (quantized(full), ["F"]),
    "int8 of rows plus a constant of integers": (quantized(full_of_integers), ["F"]),
    "int8 of rows plus a constant for each rank": (quantized(two_numbers), ["ATP106"]),
    "int8 of rows plus stacked constants": (quantized(stacked_numbers), ["ATP106"]),
    "int8 of rows plus a constant changed in place": (quantized(changed_in_place), ["ATP208"]),
    "int8 of rows plus a constant written in part": (quantized(written_in_part), ["ATP208"]),
    "int8 of rows plus a padded constant": (quantized(padded), ["ATP208"]),
    "int8 of rows plus their numbers": (quantized(counted), ["ATP208"]),
    "int8 of rows plus random numbers": (quantized(drawn), ["ATP208"]),
}
