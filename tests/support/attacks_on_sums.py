"""Attacks on sums: `addmm`, products that are converted before they are added, all-reduces. See `test_attacks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attack_parts import (
    BF16,
    FP8,
    FP16,
    FP32,
    FP64,
    GROUP,
    Attack,
    all_reduced,
    aten,
    c10d,
    factor,
    fp8_product,
    gathered,
    inputs,
    product_of,
    rounded,
    routed,
    scattered,
    times,
    unit,
)
from programs import Builder
from torch.fx import Node


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


SUMS: dict[str, tuple[Attack, list[str]]] = {
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
