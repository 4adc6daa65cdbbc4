"""Where the ranks' blocks lie in a rearranged tensor: along rows, columns or the contraction of a matmul."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from asynctp_passes import reasons
from asynctp_passes.ir.sizes import Size, canonical, divided, product, quotient, same
from asynctp_passes.layout.index_map import (
    Digit,
    Dim,
    IndexMap,
    digits_text,
    length_of,
    take_digits,
    tidy_dim,
    undivided,
)
from asynctp_passes.reasons import Refusal


# --- where the rank is -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rearrangement:
    """A reshape to `sizes` and a permutation by `order`, undone by the inverse permutation.

    The permuted dimensions fall into groups of `lengths` dimensions (for a gather: outer, inner, width).
    """

    sizes: tuple[Size, ...]
    order: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_reshape(self) -> bool:
        """True when nothing moves: the permutation is the identity."""
        return self.order == tuple(range(len(self.order)))

    def of_rows(self, width: Size) -> RowOrder | None:
        """The order in which whole rows of `width` elements are taken; None where more moves than whole rows."""
        sizes, order, taken = list(self.sizes), list(self.order), canonical(1)
        while not same(taken, width):
            if not order or order[-1] != len(sizes) - 1:
                return None
            last = sizes[-1]
            rows, missing = quotient(taken * last, width), quotient(width, taken)
            if rows is None or same(rows, 1):
                taken = taken * last
                sizes.pop()
                order.pop()
            elif missing is not None:  # rows and columns that count on are one dimension
                sizes[-1], taken = divided(last, missing), width
            else:
                return None
        return RowOrder(tuple(sizes), tuple(order))


@dataclass(frozen=True)
class RowOrder:
    """Rows as a reshape to `sizes`, taken in another order: a permutation of these dimensions by `order`."""

    sizes: tuple[Size, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class RankPlacement:
    """Where the ranks are in a tensor: dimension `dim` is [outer, ranks, inner] flattened.

    A rank's part of the tensor has all its dimensions, with `dim` as [outer, inner] flattened. `part` brings the part
    of the tensor that this one is a view of into that form, one group of dimensions for each dimension.
    """

    dim: int
    outer: Size
    inner: Size
    part: Rearrangement


@dataclass(frozen=True)
class GatherPlacement:
    """How a matmul operand [M, K] is made of the ranks' shards.

    `axis == "rows"`: the operand is [outer, ranks, inner, width] flattened to two dimensions, M = outer * ranks * inner
    and K = width; the shard, rearranged, is [outer, inner, width]. `axis == "contraction"`: the operand is
    [outer, ranks, width] flattened, M = outer and K = ranks * width, inner = 1; the shard is [outer, width].
    """

    axis: Literal["rows", "contraction"]
    outer: Size
    inner: Size
    width: Size
    shard: Rearrangement

    @property
    def row_order(self) -> RowOrder | None:
        """The order in which the operand takes the rows of a shard; None where it takes no whole rows of it."""
        return self.shard.of_rows(self.width)

    @property
    def is_in_order(self) -> bool:
        """True where the operand takes rows in the order in which the ranks send them."""
        return self.axis == "rows" and (self.shard.is_reshape or self.row_order is None)

    @property
    def as_sent(self) -> GatherPlacement:
        """The placement of an operand that takes each shard's rows in the shard's own order, so that nothing moves.

        Its rows are [ranks, rows of a shard]; along the contraction, the rows of a shard.
        """
        rows = self.row_order
        if self.shard.is_reshape or rows is None:
            return self
        whole, count, number = product(rows.sizes), len(rows.sizes), len(self.shard.sizes)
        lengths = (0, count, number - count) if self.axis == "rows" else (count, number - count)
        shard = Rearrangement(self.shard.sizes, tuple(range(number)), lengths)
        outer, inner = (1, whole) if self.axis == "rows" else (whole, 1)
        return GatherPlacement(self.axis, outer, inner, self.width, shard)


@dataclass(frozen=True)
class ScatterPlacement:
    """How a reduce-scatter's input is made of a matmul result [M, N].

    `axis == "rows"`: rows are [outer, ranks, inner], M = outer * ranks * inner, N = width. `axis == "columns"`:
    N = ranks * width, M = outer, inner = 1. The scattered result [outer, inner, width] is brought into the
    collective's own output order by `out`.
    """

    axis: Literal["rows", "columns"]
    outer: Size
    inner: Size
    width: Size
    out: Rearrangement

    @property
    def row_order(self) -> RowOrder | None:
        """The order in which the collective takes the rows of a rank's block of the product; None if no whole rows."""
        return self.out.of_rows(self.width)


def locate_gather(operand: IndexMap, block: Size, ranks: int, outer: Size = 1) -> GatherPlacement | Refusal:
    """Prove that a 2-D operand is a complete, rank-ordered arrangement of the ranks' parts of a source tensor.

    The operand's map is into the source, which is [outer, ranks, block] row-major. Of a gathered tensor, `block` has
    the elements of a shard, and `outer` is 1.
    """
    found = _find_ranks(operand, block, ranks, outer)
    if isinstance(found, Refusal):
        return found
    (rows, columns), axis, place = found
    if axis == 0:
        before, after, columns = (_without(dim, block, ranks) for dim in (rows[:place], rows[place + 1 :], columns))
        shard = _rearrange(before, after, columns)
        return GatherPlacement("rows", length_of(before), length_of(after), length_of(columns), shard)
    if place != 0:
        return Refusal(reasons.NOT_ROWS_OR_CONTRACTION, f"the rank is inside the contraction: {digits_text(columns)}")
    rows, columns = (_without(dim, block, ranks) for dim in (rows, columns[1:]))
    return GatherPlacement("contraction", length_of(rows), 1, length_of(columns), _rearrange(rows, columns))


def locate_ranks(view: IndexMap, block: Size, ranks: int, outer: Size = 1) -> RankPlacement | Refusal:
    """Prove that a view of any number of dimensions is a complete arrangement of the ranks' parts of a source tensor.

    Takes what `locate_gather` takes.
    """
    found = _find_ranks(view, block, ranks, outer)
    if isinstance(found, Refusal):
        return found
    dims, axis, place = found
    before, after = dims[axis][:place], dims[axis][place + 1 :]
    part = [_without((*before, *after) if index == axis else dim, block, ranks) for index, dim in enumerate(dims)]
    return RankPlacement(axis, length_of(before), length_of(after), _rearrange(*part))


def _find_ranks(view: IndexMap, block: Size, ranks: int, outer: Size) -> tuple[list[Dim], int, int] | Refusal:
    """The dimensions of a complete view, with the digit that counts the ranks as `dims[axis][place]`."""
    dims = [_split_at(_split_at(dim, block), block * ranks) for dim in view.dims]
    every = tuple(digit for dim in dims for digit in dim)
    refusal = _not_once(every, view.offset, outer * ranks * block)
    if refusal is not None:
        return refusal
    for axis, dim in enumerate(dims):
        for place, digit in enumerate(dim):
            if same(digit.size, ranks) and same(digit.stride, block):
                return dims, axis, place
    return Refusal(reasons.PIECES_REORDERED, f"no digit counts the {ranks} ranks in order: {digits_text(every)}")


def locate_scatter(operand: IndexMap, rows: Size, columns: Size, ranks: int) -> ScatterPlacement | Refusal:
    """Prove that a reduce-scatter's input is a complete arrangement of a product [rows, columns] by rank.

    `operand` maps the input into the product, row-major. Its leading `ranks` blocks are the ranks'.
    """
    queue = list(operand.digits)
    lead = take_digits(queue, ranks)
    if lead is None:
        return undivided(f"cannot divide {digits_text(operand.digits)} by {ranks} ranks", operand.digits, [ranks])
    refusal = _not_once((*lead, *queue), operand.offset, rows * columns)
    if refusal is not None:
        return refusal
    if len(lead) != 1:
        facts = f"the ranks' blocks are not equally spaced: {digits_text(lead)}"
        return Refusal(reasons.NOT_ROWS_OR_CONTRACTION, facts)
    stride, rest = lead[0].stride, tuple(queue)
    inner = quotient(stride, columns)
    if inner is not None:
        outer = divided(rows, inner * ranks)
        return ScatterPlacement("rows", outer, inner, columns, _rearrange(_without(rest, stride, ranks)))
    if same(stride * ranks, columns):
        return ScatterPlacement("columns", rows, 1, stride, _rearrange(_without(rest, stride, ranks)))
    return Refusal(reasons.NOT_ROWS_OR_CONTRACTION, f"the rank is inside the output columns (stride {stride})")


def incomplete(operand: IndexMap, total: Size) -> Refusal | None:
    """Why a map does not take every one of `total` source elements exactly once; None when it does."""
    return _not_once(operand.digits, operand.offset, total)


def arranged(operand: IndexMap) -> Rearrangement:
    """The order in which a map takes the elements of a tensor, each of them once."""
    return _rearrange(operand.digits)


def _split_at(dim: Dim, boundary: Size) -> Dim:
    """Split the digit of `dim` that straddles `boundary`, so that each counts below or above it."""
    digits: list[Digit] = []
    for digit in dim:
        below = quotient(boundary, digit.stride)
        above = None if below is None else quotient(digit.size, below)
        if below is None or above is None or same(below, 1) or same(above, 1):
            digits.append(digit)
        else:
            digits += [Digit(above, boundary), Digit(below, digit.stride)]
    return tuple(digits)


def _not_once(digits: Dim, offset: Size, total: Size) -> Refusal | None:
    """Why digits do not together count each of `total` elements of the source exactly once."""
    ordered, left = _innermost_first(digits)
    if left:
        strides = [digit.stride for digit in [*left, *ordered]]
        repeated = any(same(a, b) for i, a in enumerate(strides) for b in strides[i + 1 :])
        reason = reasons.PIECES_REPEATED if repeated else reasons.PIECES_MISSING
        return Refusal(reason, f"the digits {digits_text([*left, *ordered])} do not count every element once")
    covered = length_of(ordered)
    if same(offset, 0) and same(covered, total):
        return None
    return Refusal(reasons.PIECES_MISSING, f"covers {covered} elements from {offset} of {total}")


def _innermost_first(digits: Iterable[Digit]) -> tuple[list[Digit], list[Digit]]:
    """Digits by rising stride, as far as each counts on from those before it, without comparing symbols; the rest."""
    left = list(digits)
    ordered: list[Digit] = []
    expected: Size = 1
    while (digit := next((one for one in left if same(one.stride, expected)), None)) is not None:
        left.remove(digit)
        ordered.append(digit)
        expected = expected * digit.size
    return ordered, left


def _rearrange(*groups: Dim) -> Rearrangement:
    """The rearrangement that brings row-major digits into the order of `groups`, merging digits only inside a group."""
    tidy = [tidy_dim(group) for group in groups]
    wanted = [digit for group in tidy for digit in group]
    ordered = _innermost_first(wanted)[0][::-1]
    sizes = tuple(digit.size for digit in ordered)
    return Rearrangement(sizes, tuple(ordered.index(digit) for digit in wanted), tuple(len(group) for group in tidy))


def _without(digits: Dim, stride: Size, ranks: int) -> Dim:
    """Digits of the source when the rank's digit (ranks, stride) is taken out of it."""
    block = stride * ranks
    return tuple(
        digit if quotient(digit.stride, block) is None else Digit(digit.size, divided(digit.stride, ranks))
        for digit in digits
    )
