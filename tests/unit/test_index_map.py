"""Index maps against index arrays: whatever views do to `torch.arange`, the map of the same views says.

The random tests check both directions: a map that is given is right, and one that is refused does not exist.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph
from torch.utils._sympy.functions import FloorDiv

from asynctp_passes import reasons
from asynctp_passes.ir.sizes import Size, SizeSource, canonical, express, product, quotient, same
from asynctp_passes.layout.index_map import Digit, IndexMap, concatenate
from asynctp_passes.layout.placement import (
    GatherPlacement,
    Rearrangement,
    ScatterPlacement,
    incomplete,
    locate_gather,
    locate_scatter,
)
from asynctp_passes.reasons import Reason, Refusal

S, T = sympy.symbols("s t", integer=True, positive=True)
RANKS = 2

quick = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
few = settings(quick, max_examples=100)


def iota(*shape: int) -> Tensor:
    """The numbers of a tensor's elements."""
    return torch.arange(math.prod(shape)).reshape(shape)


def elements(index_map: IndexMap, s: int = 0) -> Tensor:
    """The source elements that a map names, the symbol `s` replaced by a value."""

    def number(size: Size) -> int:
        return int(sympy.sympify(size).subs(S, s))

    out = torch.tensor(number(index_map.offset))
    for dim in index_map.dims:
        index = torch.tensor(0)
        for digit in dim:
            index = (index[..., None] + torch.arange(number(digit.size)) * number(digit.stride)).flatten()
        out = out[..., None] + index.flatten()
    return out


def some(result: IndexMap | Refusal) -> IndexMap:
    """The map, which must not be refused."""
    assert isinstance(result, IndexMap), result
    return result


def is_strided(x: Tensor) -> bool:
    """True when every dimension of an index array counts in digits of positive strides, whatever the others do."""
    origin = x[(0,) * x.dim()]
    axes = [x[tuple(slice(None) if i == axis else 0 for i in range(x.dim()))] - origin for axis in range(x.dim())]
    total = origin
    for axis in axes:
        total = total[..., None] + axis
    return torch.equal(total, x) and all(_counts(axis.tolist()) for axis in axes)


def _counts(values: Sequence[int]) -> bool:
    """True for 0, 1, 2, ... and for 0, 1, 4, 5, ...: runs of one step, which begin at numbers that count again."""
    if len(values) == 1:
        return values[0] == 0
    step = values[1] - values[0]
    run = next((i for i in range(1, len(values)) if values[i] - values[i - 1] != step), len(values))
    runs = [values[i : i + run] for i in range(0, len(values), run)]
    even = step > 0 and all(part == [part[0] + step * i for i in range(run)] for part in runs)
    return even and (run == len(values) or _counts(values[::run]))


# --- sizes -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (12, 4, 3),
        (12, 5, None),
        (0, 3, 0),
        (3, 0, None),
        (S, 0, None),
        (S, S, 1),
        (4 * S, 2, 2 * S),
        (4 * S, S, 4),
        (S, 2, None),
        (2, S, None),
        (S * T, T, S),
        (S, T, None),
        (6 * S + 4 * T, 2, 3 * S + 2 * T),
        (6 * S + 3, 2, None),
        (S * (S + 1), S + 1, S),
        (4 * S**2, 2 * S, 2 * S),
        (8, S - S + 4, 2),
    ],
)
def test_quotient(a: Size, b: Size, expected: Size | None) -> None:
    found = quotient(a, b)
    assert found == expected
    assert isinstance(found, int) == isinstance(expected, int)


def test_quotient_is_for_every_value_or_none() -> None:
    """s (s + 1) / 2 is an integer at every s, but not as a polynomial with integer coefficients: not proven."""
    assert quotient(S * (S + 1), 2) is None
    assert quotient(4 * sympy.floor(S / 2), 2) == 2 * sympy.floor(S / 2)


@given(st.integers(0, 60), st.integers(1, 12))
@quick
def test_quotient_of_integers(a: int, b: int) -> None:
    assert quotient(a, b) == (a // b if a % b == 0 else None)
    assert quotient(a * S, b * S) == quotient(a, b)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (4, 4, True),
        (4, 5, False),
        (2 * S, S + S, True),
        ((S + 1) ** 2, S**2 + 2 * S + 1, True),
        (S, T, False),
        (S, 1, False),
        (S - S, 0, True),
    ],
)
def test_same(a: Size, b: Size, expected: bool) -> None:
    assert same(a, b) is expected
    assert same(b, a) is expected


def test_product() -> None:
    assert product([]) == 1
    assert product([2, S, 3]) == 6 * S


# --- single views ------------------------------------------------------------------------------------------------
def test_identity() -> None:
    assert IndexMap.identity((3, 4)).dims == ((Digit(3, 4),), (Digit(4, 1),))
    assert torch.equal(elements(IndexMap.identity((2, 1, 3))), iota(2, 1, 3))
    assert IndexMap.identity((1, 1)).dims == ((), ())


def test_equal_rearrangements_have_equal_maps() -> None:
    """Split and cat, slice and cat, and reshape and permute of one tensor."""
    source = IndexMap.identity((6, 4))
    pieces = [some(source.narrow(0, 3 * rank, 3)) for rank in range(2)]
    permuted = some(some(source.reshape((2, 3, 4))).permute((1, 0, 2)).reshape((3, 8)))
    assert concatenate(pieces, 1) == permuted


def test_equal_maps_of_sizes_that_are_sums() -> None:
    """A product of sums is written in one way, by whichever views it came."""
    rows = sympy.expand(S * (T + 1))
    source = IndexMap.identity((rows, 4))
    apart = some(some(source.reshape((S, T + 1, 4))).permute((2, 0, 1)).reshape((4, rows)))
    assert apart == source.permute((1, 0))
    assert product([S, T + 1]) == rows


def test_reshape_of_what_does_not_divide() -> None:
    """Three rows of four, transposed, are no two halves."""
    transposed = IndexMap.identity((3, 4)).permute((1, 0))
    assert isinstance(transposed.reshape((4, 3)), IndexMap)
    assert refused(IndexMap.identity((4, 3)).permute((1, 0)).reshape((2, 6))) is reasons.VIEW_NOT_UNDERSTOOD


def test_reshape_to_another_number_of_elements() -> None:
    source = IndexMap.identity((3, 4))
    assert refused(source.reshape((3, 3))) is reasons.VIEW_NOT_UNDERSTOOD
    assert refused(source.reshape((3, 8))) is reasons.VIEW_NOT_UNDERSTOOD
    assert refused(source.reshape((3,))) is reasons.VIEW_NOT_UNDERSTOOD
    assert refused(IndexMap.identity((S, 4)).reshape((S,))) is reasons.SIZES_NOT_PROVEN


def test_narrow_across_a_seam() -> None:
    """Columns [1, 3) of rows that are pairs from two places are no one stride apart."""
    seam = some(IndexMap.identity((2, 3, 2)).permute((1, 0, 2)).reshape((3, 4)))
    assert refused(seam.narrow(1, 1, 2)) is reasons.PIECES_MISSING
    assert torch.equal(elements(some(seam.narrow(1, 2, 2))), iota(2, 3, 2).permute(1, 0, 2).reshape(3, 4)[:, 2:])


@pytest.mark.parametrize(
    ("start", "length", "step"),
    [
        (S, 1, 1),  # an index that is a symbol
        (1, S, 1),
        (0, 3, 2),  # every other one
        (1, 2, 1),  # across the middle of the last two digits, inside of one value of the first
    ],
)
def test_narrow_of_several_digits(start: Size, length: Size, step: int) -> None:
    """What is no one stride apart is refused."""
    source = some(IndexMap.identity((2, 2, 2, 3)).permute((2, 1, 0, 3)).reshape((8, 3)))
    assert len(source.dims[0]) == 3
    assert refused(source.narrow(0, start, length, step)) is reasons.PIECES_MISSING


def test_narrow_of_symbolic_digits() -> None:
    source = some(IndexMap.identity((S, 4)).permute((1, 0)).reshape((4 * S,)))
    assert refused(source.narrow(0, 1, 1)) is reasons.PIECES_MISSING


def test_narrow_of_one() -> None:
    source = IndexMap.identity((1, 4))
    assert refused(source.narrow(0, 0, 0)) is reasons.PIECES_MISSING
    assert source.narrow(0, 0, 1, 2) == source


@pytest.mark.parametrize(("start", "length", "step"), [(0, 6, 1), (2, 3, 1), (0, 3, 2), (1, 2, 3), (5, 1, 1)])
def test_narrow(start: int, length: int, step: int) -> None:
    piece = some(IndexMap.identity((6, 4)).narrow(0, start, length, step))
    assert torch.equal(elements(piece), iota(6, 4)[start::step][:length])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_resized(size: int) -> None:
    """Source elements of four bytes seen as elements of `size` bytes: at which byte each of them begins."""

    def seen(index_map: IndexMap, before: int, after: int) -> IndexMap:
        resized = index_map.resized(*(canonical(sympy.Rational(each, 4)) for each in (before, after)))
        assert resized is not None
        return resized

    def in_bytes(index_map: IndexMap) -> Tensor:
        dims = (tuple(Digit(digit.size, digit.stride * 4) for digit in dim) for dim in index_map.dims)
        return elements(IndexMap(tuple(dims), index_map.offset * 4))

    start = iota(4, 6 * 4).unflatten(1, (-1, size))[..., 0]
    whole = IndexMap.identity((4, 6))
    other = seen(whole, 4, size)
    assert torch.equal(in_bytes(other), start)
    assert seen(other, size, 4) == whole
    first, second = (some(other.narrow(0, row, 2)) for row in (0, 2))
    assert torch.equal(in_bytes(first), start[:2])
    joined = some(concatenate([first, second], 1))
    assert torch.equal(in_bytes(joined), torch.cat([start[:2], start[2:]], 1))
    assert seen(joined, size, 4) == some(concatenate([some(whole.narrow(0, row, 2)) for row in (0, 2)], 1))
    within = some(other.narrow(1, 1, 2))
    assert torch.equal(in_bytes(within), start[:, 1:3])


def test_resized_where_elements_are_apart() -> None:
    whole = IndexMap.identity((4, 6))
    assert whole.resized(1, 4) is None  # 6 is no multiple
    assert whole.permute((1, 0)).resized(1, 2) is None
    assert some(whole.narrow(1, 0, 3, 2)).resized(1, 3) is None
    assert some(whole.narrow(1, 0, 1)).resized(1, 2) is None
    assert IndexMap(()).resized(1, 2) is None
    assert whole.resized(sympy.Rational(2, 3), 1) is None


def test_insert_and_select() -> None:
    source = IndexMap.identity((3, 4))
    assert torch.equal(elements(source.insert(1)), iota(3, 1, 4))
    assert torch.equal(elements(some(source.select(1, 2))), iota(3, 4)[:, 2])
    mixed = some(IndexMap.identity((2, 3, 4)).permute((1, 0, 2)).reshape((6, 4)))
    assert refused(mixed.select(0, S)) is reasons.PIECES_MISSING


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ((1, 0), reasons.PIECES_REORDERED),
        ((0, 0), reasons.PIECES_REPEATED),
        ((0, 1, 3, 2), reasons.PIECES_REORDERED),
        ((0, 2, 1, 3), None),
        ((0, 1, 2, 2), reasons.PIECES_REPEATED),
        ((0, 2), None),
        ((3, 2, 1, 0), reasons.PIECES_REORDERED),
    ],
)
def test_cat_of_rows_in_some_order(order: Sequence[int], reason: Reason | None) -> None:
    """Rows 0, 2 and 0, 2, 1, 3 have maps of their own: that these are not the whole, in order, is seen at the end."""
    source = IndexMap.identity((4, 3))
    joined = concatenate([some(source.narrow(0, row, 1)) for row in order], 0)
    assert refused(joined) is reason
    if isinstance(joined, IndexMap):
        assert torch.equal(elements(joined), iota(4, 3)[list(order)])


def test_cat_of_uneven_pieces() -> None:
    source = IndexMap.identity((5, 3))
    pieces = [some(source.narrow(0, start, length)) for start, length in ((0, 2), (2, 1), (3, 2))]
    assert concatenate(pieces, 0) == source
    assert refused(concatenate(pieces[::-1], 0)) is reasons.PIECES_REORDERED
    assert refused(concatenate(pieces[1:] + pieces[:1], 0)) is reasons.PIECES_REORDERED


def test_cat_of_pieces_of_different_layout() -> None:
    source = IndexMap.identity((4, 4))
    assert refused(concatenate([source, source.permute((1, 0))], 0)) is reasons.VIEW_NOT_UNDERSTOOD


def test_cat_of_rows_that_count_and_end_early() -> None:
    """Rows 0, 3, 1, 4, 2 are not 0, 3, 1, 4, 2, 5."""
    source = IndexMap.identity((6, 3))
    rows = [some(source.narrow(0, row, 1)) for row in (0, 3, 1, 4, 2)]
    assert refused(concatenate(rows, 0)) is reasons.PIECES_REORDERED


def test_cat_of_rows_twice() -> None:
    """Rows 0, 1, 0, 1 are a digit of stride 0, which is none of a whole."""
    source = IndexMap.identity((2, 3))
    joined = some(concatenate([some(source.narrow(0, row, 1)) for row in (0, 1, 0, 1)], 0))
    assert torch.equal(elements(joined), iota(2, 3)[[0, 1, 0, 1]])
    assert incomplete(joined, 6) is not None
    assert isinstance(locate_gather(joined, 3, 2), Refusal)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(3, 2)], [(2, 1)]),  # 0, 2, 4 and then 6, 7: of another stride
        ([(2, 8), (2, 1)], [(3, 8), (2, 2)]),  # pairs that are closer than the others
        ([(2, 8), (2, 1)], [(3, 8)]),  # pairs, and then single ones
        ([(3, 8)], [(2, 8), (2, 1)]),
        ([(2, 16), (2, 8), (2, 1)], [(2, 2)]),
    ],
)
def test_cat_of_uneven_pieces_that_count_differently(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> None:
    """Each begins where the one before it ends, if that counted on in its first digit."""
    one, other = (IndexMap((tuple(Digit(*digit) for digit in digits),)) for digits in (first, second))
    (size, stride), (_, next_stride) = first[0], second[0]
    for end in {size * stride, size * next_stride, stride}:
        assert refused(concatenate([one, IndexMap(other.dims, end)], 0)) is reasons.PIECES_REORDERED


def refused(result: object) -> Reason | None:
    """Why, or None for a result."""
    return result.reason if isinstance(result, Refusal) else None


# --- chains of views -------------------------------------------------------------------------------------------
class Pair:
    """An index array and its map, which go through the same views; `refusal` ends the way."""

    def __init__(self, *shape: int) -> None:
        self.x = iota(*shape)
        self.map = IndexMap.identity(shape)
        self.refusal: Refusal | None = None

    def go(self, x: Tensor, result: IndexMap | Refusal) -> None:
        """Take a step, and compare."""
        self.x = x
        if isinstance(result, Refusal):
            self.refusal = result
            assert not is_strided(x), f"{result} but there is a map of {x.tolist()}"
        else:
            self.map = result
            assert torch.equal(elements(result), x)


def factorized(draw: Any, count: int) -> list[int]:
    """A shape of `count` elements."""
    shape = []
    while count > 1 and len(shape) < 4:
        size = draw(st.sampled_from([size for size in range(1, count + 1) if count % size == 0]))
        shape.append(size)
        count //= size
    return [*shape, count]


def step_reshape(pair: Pair, draw: Any) -> None:
    shape = factorized(draw, pair.x.numel())
    pair.go(pair.x.reshape(shape), pair.map.reshape(shape))


def step_permute(pair: Pair, draw: Any) -> None:
    order = draw(st.permutations(range(pair.x.dim())))
    pair.go(pair.x.permute(order), pair.map.permute(order))


def step_narrow(pair: Pair, draw: Any) -> None:
    axis = draw(st.integers(0, pair.x.dim() - 1))
    start = draw(st.integers(0, pair.x.shape[axis] - 1))
    length = draw(st.integers(1, pair.x.shape[axis] - start))
    pair.go(pair.x.narrow(axis, start, length), pair.map.narrow(axis, start, length))


def step_cat(pair: Pair, draw: Any) -> None:
    """Chunks of one dimension, joined along another; in order, or in any order, or with one missing."""
    source, dest = (draw(st.integers(0, pair.x.dim() - 1)) for _ in range(2))
    size = pair.x.shape[source]
    count = draw(st.sampled_from([count for count in (1, 2, 3, 4) if size % count == 0]))
    order = draw(st.one_of(st.just(range(count)), st.permutations(range(count))))
    length, chunks = size // count, pair.x.chunk(count, source)
    pieces = [pair.map.narrow(source, index * length, length) for index in order]
    missing = next((piece for piece in pieces if isinstance(piece, Refusal)), None)
    if missing is None:
        joined = concatenate([some(piece) for piece in pieces], dest)
        pair.go(torch.cat([chunks[index] for index in order], dest), joined)


def step_stack(pair: Pair, draw: Any) -> None:
    """Select every index of one dimension, and stack them as another."""
    source, dest = (draw(st.integers(0, pair.x.dim() - 1)) for _ in range(2))
    pieces = [some(pair.map.select(source, index)).insert(dest) for index in range(pair.x.shape[source])]
    pair.go(torch.stack(pair.x.unbind(source), dest), concatenate(pieces, dest))


STEPS = (step_reshape, step_reshape, step_permute, step_narrow, step_cat, step_stack)


@given(st.data())
@quick
def test_random_views(data: st.DataObject) -> None:
    pair = Pair(*data.draw(st.sampled_from([(4, 6), (2, 3, 4), (8, 3), (1, 4, 6), (2, 2, 2, 3)])))
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=5)):
        if pair.refusal is None:
            step(pair, data.draw)


# --- symbolic sizes ----------------------------------------------------------------------------------------------
def test_symbolic_views() -> None:
    """Split and cat along a dynamic sequence, for every length."""
    source = IndexMap.identity((2 * 3, S, 8))
    pieces = [some(source.narrow(0, 3 * rank, 3)) for rank in range(2)]
    rows = some(some(concatenate(pieces, 1)).reshape((6 * S, 8)))
    for s in (1, 2, 5):
        expected = torch.cat(iota(6, s, 8).chunk(2), 1).reshape(6 * s, 8)
        assert torch.equal(elements(rows, s=s), expected)


def test_symbolic_slices() -> None:
    source = IndexMap.identity((2 * S, 8))
    halves = [some(source.narrow(0, S * rank, S)) for rank in range(2)]
    assert concatenate(halves, 0) == source
    assert refused(concatenate(halves[::-1], 0)) is reasons.PIECES_REORDERED
    assert concatenate(halves, 1) == some(source.reshape((2, S, 8))).permute((1, 0, 2)).reshape((S, 16))


@given(st.data(), st.sampled_from([2, 3, 5]))
@few
def test_symbolic_maps_are_right_at_every_value(data: st.DataObject, s: int) -> None:
    """The same views of [4 s, 6] with a symbol and with a number."""
    x, index_map = iota(4 * s, 6), IndexMap.identity((4 * S, 6))
    regroup = data.draw(st.sampled_from([(4, S, 6), (S, 4, 6), (2, 2 * S, 6), (S, 2, 2, 6), (4 * S, 2, 3), (2, S, 12)]))
    shape = [int(sympy.sympify(size).subs(S, s)) for size in regroup]
    order = data.draw(st.permutations(range(len(shape))))
    x, index_map = x.reshape(shape).permute(order), some(index_map.reshape(regroup)).permute(order)
    assert torch.equal(elements(index_map, s=s), x)
    flat = index_map.reshape((24 * S,))
    assert isinstance(flat, IndexMap)
    assert torch.equal(elements(flat, s=s), x.flatten())


def test_unproven_sizes_are_refused() -> None:
    """s rows are two halves at some values only."""
    source = IndexMap.identity((S, 4))
    assert refused(source.reshape((2, 2 * S))) is None, "8 columns are two halves"
    assert refused(IndexMap.identity((S, 3)).reshape((2, sympy.floor(3 * S / 2)))) is reasons.SIZES_NOT_PROVEN
    assert refused(IndexMap.identity((S, T)).permute((1, 0)).reshape((S, T))) is reasons.SIZES_NOT_PROVEN


# --- where the rank is -------------------------------------------------------------------------------------------
def rearranged(x: Tensor, way: Rearrangement) -> Tensor:
    return x.reshape([int(size) for size in way.sizes]).permute(way.order)


def as_gathered(shards: Sequence[Tensor], place: GatherPlacement) -> Tensor:
    """The operand that a placement describes, from its docstring."""
    own = [rearranged(shard, place.shard) for shard in shards]
    if place.axis == "contraction":
        return torch.cat([shard.reshape(place.outer, place.width) for shard in own], dim=1)
    return torch.stack([shard.reshape(place.outer, place.inner, place.width) for shard in own], dim=1).flatten(0, 2)


def as_scattered(whole: Tensor, place: ScatterPlacement, rank: int) -> Tensor:
    """What a rank gets of a product, in its collective's own order, from the docstring of a placement."""
    if place.axis == "columns":
        own = whole.reshape(place.outer, RANKS, place.width)[:, rank]
    else:
        own = whole.reshape(place.outer, RANKS, place.inner, place.width)[:, rank]
    return rearranged(own, place.out).flatten()


SHARDS = [(4, 6), (2, 3, 4), (3, 4), (1, 4, 2), (2, 2, 6)]


def to_matrix(pair: Pair, draw: Any) -> None:
    """End as two dimensions."""
    if pair.refusal is None:
        rows = draw(st.sampled_from([size for size in range(1, pair.x.numel() + 1) if pair.x.numel() % size == 0]))
        pair.go(pair.x.reshape(rows, -1), pair.map.reshape((rows, pair.x.numel() // rows)))


@given(st.data())
@quick
def test_random_gathers(data: st.DataObject) -> None:
    """A placement rebuilds the operand from the shards; without one, not even the elements are all there in order."""
    shape = data.draw(st.sampled_from(SHARDS))
    pair, numel = Pair(RANKS * shape[0], *shape[1:]), math.prod(shape)
    shards = pair.x.chunk(RANKS)
    for step in data.draw(st.lists(st.sampled_from((step_reshape, step_permute, step_cat)), max_size=3)):
        if pair.refusal is None:
            step(pair, data.draw)
    to_matrix(pair, data.draw)
    if pair.refusal is not None:
        return
    place = locate_gather(pair.map, numel, RANKS)
    if isinstance(place, GatherPlacement):
        assert torch.equal(as_gathered(shards, place), pair.x)
    else:
        assert not ranks_are_blocks(pair.x // numel), f"{place}: {pair.x.tolist()}"


def ranks_are_blocks(rank_of: Tensor) -> bool:
    """True when the ranks of an operand's elements are blocks of rows, or leading blocks of columns, in rank order."""
    by_row = (rank_of == rank_of[:, :1]).all() and _counts_ranks(rank_of[:, 0])
    columns = rank_of[0]
    by_column = (rank_of == columns).all() and torch.equal(columns, columns.sort().values)
    return bool(by_row or (by_column and len(columns.unique()) == RANKS))


def _counts_ranks(rank_of: Tensor) -> bool:
    """True for 0 0 1 1 0 0 1 1: equal blocks, in rank order, repeated."""
    inner = next((length for length in range(1, len(rank_of)) if rank_of[length] != rank_of[0]), 0)
    if not inner or len(rank_of) % (RANKS * inner):
        return False
    return torch.equal(
        rank_of.reshape(-1, RANKS, inner),
        torch.arange(RANKS)[:, None].expand(1, RANKS, inner).expand(len(rank_of) // (RANKS * inner), -1, -1),
    )


@given(st.data())
@quick
def test_random_scatters(data: st.DataObject) -> None:
    """A placement says which elements of the product each rank gets."""
    rows, columns = data.draw(st.sampled_from([(4, 6), (8, 3), (12, 2), (2, 8), (6, 4)]))
    pair = Pair(rows, columns)
    for step in data.draw(st.lists(st.sampled_from((step_reshape, step_permute, step_cat)), max_size=4)):
        if pair.refusal is None:
            step(pair, data.draw)
    if pair.refusal is not None:
        return
    place = locate_scatter(pair.map, rows, columns, RANKS)
    if isinstance(place, ScatterPlacement):
        for rank, block in enumerate(pair.x.flatten().chunk(RANKS)):
            assert torch.equal(as_scattered(iota(rows, columns), place, rank), block)


# --- placements by hand ------------------------------------------------------------------------------------------
def test_locate_gather_of_a_middle_dimension() -> None:
    pieces = [some(IndexMap.identity((6, 4, 8)).narrow(0, 3 * rank, 3)) for rank in range(2)]
    place = locate_gather(some(some(concatenate(pieces, 1)).reshape((24, 8))), 3 * 4 * 8, 2)
    assert place == GatherPlacement("rows", 3, 4, 8, Rearrangement((3, 4, 8), (0, 1, 2), (1, 1, 1)))


def test_locate_gather_of_the_contraction() -> None:
    pieces = [some(IndexMap.identity((12, 4)).narrow(0, 6 * rank, 6)) for rank in range(2)]
    place = locate_gather(some(concatenate(pieces, 1)), 24, 2)
    assert place == GatherPlacement("contraction", 6, 1, 4, Rearrangement((6, 4), (0, 1), (1, 1)))


def test_locate_gather_of_a_dynamic_sequence() -> None:
    pieces = [some(IndexMap.identity((6, S, 8)).narrow(0, 3 * rank, 3)) for rank in range(2)]
    place = locate_gather(some(some(concatenate(pieces, 1)).reshape((6 * S, 8))), 24 * S, 2)
    assert isinstance(place, GatherPlacement)
    assert (place.axis, place.outer, place.inner, place.width) == ("rows", 3, S, 8)


GATHER_REFUSALS = [
    # a [4, 3] shard of two ranks, and what is wrong with each operand
    ("every other row", lambda whole: whole.narrow(0, 0, 4, 2), reasons.PIECES_MISSING),
    ("one rank only", lambda whole: whole.narrow(0, 4, 4), reasons.PIECES_MISSING),
    (
        "ranks after rows",
        lambda whole: some(whole.reshape((2, 4, 3))).permute((1, 2, 0)).reshape((4, 6)),
        reasons.NOT_ROWS_OR_CONTRACTION,
    ),
    (
        "nothing: the shard can be permuted",
        lambda whole: some(some(whole.reshape((4, 2, 3))).permute((1, 0, 2)).reshape((8, 3))),
        None,
    ),
]


@pytest.mark.parametrize(("what", "view", "reason"), GATHER_REFUSALS, ids=[row[0] for row in GATHER_REFUSALS])
def test_locate_gather_refuses(what: str, view: Any, reason: Reason | None) -> None:
    assert refused(locate_gather(some(view(IndexMap.identity((8, 3)))), 12, 2)) is reason


def test_locate_scatter_of_rows_and_columns() -> None:
    whole = IndexMap.identity((12, 6))
    rows = locate_scatter(whole, 12, 6, 2)
    assert rows == ScatterPlacement("rows", 1, 6, 6, Rearrangement((36,), (0,), (1,)))
    halves = [some(whole.narrow(1, 3 * rank, 3)) for rank in range(2)]
    columns = locate_scatter(some(concatenate(halves, 0)), 12, 6, 2)
    assert isinstance(columns, ScatterPlacement)
    assert (columns.axis, columns.outer, columns.inner, columns.width) == ("columns", 12, 1, 3)


def test_locate_scatter_refuses_ranks_inside_the_columns() -> None:
    whole = some(IndexMap.identity((4, 6)).reshape((4, 3, 2))).permute((2, 0, 1))
    assert refused(locate_scatter(whole, 4, 6, 2)) is reasons.NOT_ROWS_OR_CONTRACTION


def test_ranks_in_two_digits() -> None:
    """Of four ranks, the even ones before the odd ones: no digit counts them, though one has the step of a shard."""
    source = some(IndexMap.identity((8, 3)).reshape((2, 2, 2, 3)))
    shuffled = some(source.permute((1, 0, 2, 3)).reshape((8, 3)))
    assert refused(locate_gather(shuffled, 6, 4)) is reasons.PIECES_REORDERED
    assert refused(locate_scatter(shuffled, 8, 3, 4)) is reasons.NOT_ROWS_OR_CONTRACTION


def test_one_rank_has_no_digit() -> None:
    """Groups of one rank are left alone later, by their name."""
    whole = IndexMap.identity((4, 3))
    assert refused(locate_gather(whole, 12, 1)) is reasons.PIECES_REORDERED
    assert refused(locate_scatter(whole, 4, 3, 1)) is reasons.NOT_ROWS_OR_CONTRACTION


def test_locate_scatter_refuses_an_odd_number_of_elements() -> None:
    assert refused(locate_scatter(IndexMap.identity((3, 5)), 3, 5, 2)) is reasons.VIEW_NOT_UNDERSTOOD


def test_locate_scatter_of_a_dynamic_sequence() -> None:
    whole = some(IndexMap.identity((6 * S, 8)).reshape((3, 2 * S, 8)))
    halves = [some(whole.narrow(1, S * rank, S)) for rank in range(2)]
    place = locate_scatter(some(concatenate(halves, 0)), 6 * S, 8, 2)
    assert isinstance(place, ScatterPlacement)
    assert (place.axis, place.outer, place.inner, place.width) == ("rows", 3, S, 8)


# --- sizes as nodes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("s", [6, 7])
def test_a_size_that_only_a_floor_division_gives(s: int) -> None:
    """A rank's part of a dynamic sequence, as DTensor writes it: `(s + 1) // 2`."""
    source = SizeSource(S, Graph().placeholder("s"))
    plan = express(FloorDiv(S + 1, 2), [source])
    assert evaluated(plan, s) == (s + 1) // 2
    assert express(FloorDiv(T + 1, 2), [source]) is None


@pytest.mark.parametrize("s", [1, 7])
def test_a_size_that_is_a_power(s: int) -> None:
    """Batch and sequence are one symbol where they were equal when traced."""
    source = SizeSource(S, Graph().placeholder("s"))
    assert evaluated(express(S**2, [source]), s) == s**2
    assert evaluated(express(3 * S**2 + 2 * S + 1, [source]), s) == 3 * s**2 + 2 * s + 1
    assert express(S**2 * T, [source]) is None


def test_a_size_that_is_a_product_of_a_sum() -> None:
    graph = Graph()
    longer, other = SizeSource(S + 1, graph.placeholder("longer")), SizeSource(T, graph.placeholder("other"))
    assert express(S * T + T, [longer, other]) == ("mul", ("of", longer, None), ("of", other, None))
    assert express(S * T + S, [longer, other]) is None


def evaluated(plan: Any, s: int) -> int:
    if isinstance(plan, int):
        return plan
    kind, left, right = plan
    return s if kind == "of" else getattr(operator, kind)(evaluated(left, s), evaluated(right, s))
