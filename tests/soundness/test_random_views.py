"""Random views in every position of newer forms: around factors, what is quantized, and results that are summed.

Most graphs look like a chain and are none. Whatever the pass fuses has to compute the same on all ranks.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable

import pytest
import torch
from attack_parts import FP32, FP64, all_reduced, aten, cast, gathered, rewrite, scattered, values
from lockstep import differences, evaluate
from passes import outcomes
from programs import Builder
from torch.fx import Node

SEEDS = 60
Shape = list[int]


def shape_of(x: Node) -> Shape:
    return [int(size) for size in x.meta["val"].shape]


def sizes(r: random.Random, count: int) -> Shape:
    """Sizes of as many elements."""
    found = []
    for _ in range(r.randint(0, 2)):
        found.append(r.choice([size for size in range(1, count + 1) if count % size == 0]))
        count //= found[-1]
    return [*found, count]


# --- views -----------------------------------------------------------------------------------------------------
def _reshaped(b: Builder, r: random.Random, x: Node) -> Node:
    return b.call(aten.reshape.default, x, sizes(r, math.prod(shape_of(x))))


def _permuted(b: Builder, r: random.Random, x: Node) -> Node:
    rank = len(shape_of(x))
    return b.call(aten.permute.default, x, [axis - r.choice([0, rank]) for axis in r.sample(range(rank), rank)])


def _rows_moved(b: Builder, r: random.Random, x: Node) -> Node:
    """Every other one first, if there are several."""
    first, *others = shape_of(x)
    if first % 2 or first == 2:
        return x
    halves = b.call(aten.reshape.default, x, [first // 2, 2, *others])
    order = [1, 0, *range(2, 2 + len(others))]
    return b.call(aten.reshape.default, b.call(aten.permute.default, halves, order), [first, *others])


def _joined_again(b: Builder, r: random.Random, x: Node) -> Node:
    """Its pieces, in their order mostly, along their own dimension or another one of a size that fits."""
    shape = shape_of(x)
    dim = r.randrange(len(shape))
    pieces = b.items(b.call(aten.split.Tensor, x, r.choice([-(-shape[dim] // 2), -(-shape[dim] // 4)]), dim))
    pieces = r.choice([pieces, pieces, pieces[::-1], [*pieces, pieces[0]], pieces[:-1] or pieces])
    even = all(shape_of(piece) == shape_of(pieces[0]) for piece in pieces)
    return b.call(aten.cat.default, pieces, r.randrange(len(shape)) if even else dim)


def _stacked_again(b: Builder, r: random.Random, x: Node) -> Node:
    rank = len(shape_of(x))
    return b.call(aten.stack.default, b.items(b.call(aten.unbind.int, x, r.randrange(-rank, rank))), r.randrange(rank))


def _cut(b: Builder, r: random.Random, x: Node) -> Node:
    shape = shape_of(x)
    dim = r.randrange(-len(shape), len(shape))
    start, step = r.choice([0, 0, -shape[dim] - 3, -1]), r.choice([1, 1, 2])
    return b.call(aten.slice.Tensor, x, dim, start, 2**63 - 1, step)


def _with_one_more(b: Builder, r: random.Random, x: Node) -> Node:
    return b.call(aten.unsqueeze.default, x, r.randrange(-len(shape_of(x)) - 1, len(shape_of(x)) + 1))


def _copied(b: Builder, r: random.Random, x: Node) -> Node:
    return b.call(r.choice([aten.clone.default, aten.alias.default, aten._to_copy.default]), x)


VIEWS = [
    _reshaped,
    _reshaped,
    _permuted,
    _permuted,
    _rows_moved,
    _rows_moved,
    _joined_again,
    _stacked_again,
    _cut,
    _with_one_more,
    _copied,
]


def seen(b: Builder, r: random.Random, x: Node, most: int = 2) -> Node:
    """A tensor after some views."""
    for _ in range(r.randint(0, most)):
        x = r.choice(VIEWS)(b, r, x)
    return x


# --- graphs ----------------------------------------------------------------------------------------------------
def product(b: Builder, rows: int, columns: int, dtype: torch.dtype = FP64) -> Node:
    return b.call(aten.mm.default, b.placeholder((rows, 4), dtype), b.placeholder((4, columns), dtype))


def scaled(b: Builder, r: random.Random) -> list[Node]:
    """A product by one or two factors, each of a size of its own for any of the dimensions, and 1 for the others."""
    x = product(b, 4, 4, FP32)
    x = (
        b.call(aten.reshape.default, x, r.choice([[2, 2, 4], [1, 4, 4], [4, 1, 4]]))
        if r.random() < 0.5
        else seen(b, r, x)
    )
    for _ in range(r.randint(1, 2)):
        shape = shape_of(x)
        axis = r.choice([0, -1, -2, None]) if len(shape) > 1 else None
        lines = shape[:-1] if r.random() < 0.5 else [1] * (len(shape) - 1)
        factor = [*lines, 1] if axis is None else [1] * len(shape)
        if axis is not None:
            factor[axis] = shape[axis]
        scale = b.placeholder(tuple(factor), FP32, "scale")
        again = seen(b, r, scale)
        scale = (
            b.call(aten.reshape.default, again, factor) if shape_of(again) != factor and alike(again, scale) else scale
        )
        x = seen(b, r, b.call(aten.mul.Tensor, *r.choice([(x, scale), (scale, x)])), 1)
    return [reduced(b, r, x)]


def alike(x: Node, y: Node) -> bool:
    return math.prod(shape_of(x)) == math.prod(shape_of(y))


def reduced(b: Builder, r: random.Random, x: Node) -> Node:
    return all_reduced(b, x) if r.random() < 0.5 or shape_of(x)[0] % b.world_size else scattered(b, x)


def summed_before(b: Builder, r: random.Random) -> list[Node]:
    """A product, and what is summed over a dimension, both all-reduced and added."""
    one = seen(b, r, all_reduced(b, product(b, 4, 4)), 1)
    shape, count = shape_of(one), r.choice([1, 4, 4])
    place = r.randint(0, len(shape))
    experts = b.placeholder((*shape[:place], count, *shape[place:]), FP64)
    total = r.choice([seen, _permuted])(b, r, all_reduced(b, experts))
    dim = r.choice([place, place, r.randrange(len(shape_of(total)))]) % len(shape_of(total))
    total = b.call(aten.sum.dim_IntList, total, [dim - r.choice([0, len(shape_of(total))])], r.random() < 0.2)
    return added(b, r, one, total)


def added(b: Builder, r: random.Random, one: Node, other: Node) -> list[Node]:
    if shape_of(one) != shape_of(other):
        if not alike(one, other):
            return [one, other]
        other = b.call(aten.reshape.default, other, shape_of(one))
    pair = r.choice([(one, other), (other, one)])
    return [b.call(r.choice([aten.add.Tensor, aten.sub.Tensor]), *pair)]


def summed(b: Builder, r: random.Random) -> list[Node]:
    """Two reduced products, in views that are the same mostly, and added."""
    before, after, terms = r.choice([seen, _rows_moved]), r.getrandbits(32), []
    for same_way in (True, r.random() < 0.5):
        x = before(b, random.Random(after), product(b, 8, 8)) if same_way else product(b, 8, 8)
        terms.append(seen(b, random.Random(after), reduced(b, random.Random(after), x)))
    return added(b, r, *terms)


def quantized(b: Builder, r: random.Random) -> list[Node]:
    """A gathered tensor over the maxima of a dimension, as int8, times int8; and perhaps the maxima, too."""
    whole = seen(b, r, gathered(b, b.placeholder((r.choice([1, 2, 4]), 2, 32), FP32)), 1)
    dim = r.choice([-1, -1, r.randrange(len(shape_of(whole)))])
    most = b.call(aten.amax.default, b.call(aten.abs.default, whole), [dim], True)
    scale = b.call(aten.clamp_min.default, most, 1.0)
    rows = b.call(aten.mul.Tensor, b.call(aten.div.Tensor, whole, scale), 127.0)
    rows = seen(b, r, cast(b, seen(b, r, b.call(aten.round.default, rows), 1), torch.int8), 1)
    count = math.prod(shape_of(rows))
    rows = b.call(aten.reshape.default, rows, [-1, 32 if count % 32 == 0 else count])
    int32 = b.call(aten._int_mm.default, rows, b.placeholder((shape_of(rows)[1], 16), torch.int8))
    return [int32, *([seen(b, r, scale, 1)] if r.random() < 0.5 else [])]


GRAPHS: dict[Callable[[Builder, random.Random], list[Node]], int] = {
    scaled: 20,
    summed_before: 50,
    summed: 40,
    quantized: 40,
}
"""How many of `SEEDS` graphs have a chain that is fused, at least."""


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_what_is_fused_computes_the_same(build: Callable[[Builder, random.Random], list[Node]]) -> None:
    fused = 0
    for seed in range(SEEDS):
        r = random.Random(seed)
        b = Builder(operator.itemgetter(0), r.choice([2, 4]))
        b.graph.output(tuple(build(b, r)))
        rewritten, report = rewrite(b.graph)
        fused += "F" in outcomes(report)
        results = [evaluate(graph, values(b)) for graph in (b.graph, rewritten)]
        assert differences(*results) == [], f"seed {seed}\n{b.graph}\n{rewritten}"
    assert fused >= GRAPHS[build]
