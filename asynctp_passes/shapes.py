"""Where an index goes through views: strided index maps over a source tensor.

A tensor that is a rearrangement of a source tensor is described by an `IndexMap`: each of its dimensions is
a list of digits, each digit a (size, stride) pair, and the element at digit values i0, i1, ... is the
source's element number

    offset + i0 * stride0 + i1 * stride1 + ...

in row-major order. All views are small edits of that list:

    reshape   regroups the digits, splitting one where a new dimension ends inside it
    permute   reorders the dimensions
    slice     shortens a digit and moves the offset
    cat       of pieces whose offsets are o, o + d, o + 2d, ...: one new digit (number of pieces, d)

so `split` + `cat`, `slice` + `cat`, `chunk`, `select` + `stack` and plain `reshape` need no patterns: equal
rearrangements have equal maps. Pieces in another order have no common difference d, repeated ones have d = 0,
dropped ones leave the source uncovered. Sizes and strides are integers or sympy expressions over positive
integer symbols; every comparison is an algebraic identity, so nothing here guards or specializes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import sympy

from asynctp_passes import reasons
from asynctp_passes.reasons import Refusal

__all__ = [
    "Digit",
    "GatherPlacement",
    "IndexMap",
    "RankPlacement",
    "Rearrangement",
    "RowOrder",
    "ScatterPlacement",
    "Size",
    "arranged",
    "canonical",
    "concatenate",
    "divided",
    "incomplete",
    "locate_gather",
    "locate_ranks",
    "locate_scatter",
    "product",
    "quotient",
    "same",
    "scales_rows",
]

Size: TypeAlias = int | sympy.Expr


# --- sizes -------------------------------------------------------------------------------------------
def quotient(a: Size, b: Size) -> Size | None:
    """`a / b` when it is provably an integer, else None. Symbols stand for positive integers."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b != 0 and a % b == 0 else None
    return None if b == 0 else _ratio(a, b)


@functools.lru_cache(1 << 16)
def _ratio(a: Size, b: Size) -> Size | None:
    """`quotient` of sizes one of which is symbolic: slow, and asked for the same ones in every layer."""
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    if not _is_integer_polynomial(ratio):
        return None
    return int(ratio) if ratio.is_Integer else ratio


def divided(a: Size, b: Size) -> Size:
    """`a / b`, where it was proven to be an integer."""
    result = quotient(a, b)
    assert result is not None, f"{a} is a multiple of {b} by construction"
    return result


def _is_integer_polynomial(expr: sympy.Expr) -> bool:
    """True for sums of products of integers and integer atoms: no denominators left, integer at every point."""
    if expr.is_Integer:
        return True
    if expr.is_Add or expr.is_Mul:
        return all(_is_integer_polynomial(arg) for arg in expr.args)
    if expr.is_Pow:
        exponent = expr.exp
        return bool(exponent.is_Integer and exponent > 0 and _is_integer_polynomial(expr.base))
    return bool(expr.is_integer)


def same(a: Size, b: Size) -> bool:
    """True when `a == b` holds as an algebraic identity."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return canonical(result)


def canonical(size: Size) -> Size:
    """The one form of a size in which equal polynomials are equal values: an integer, or expanded."""
    if isinstance(size, int):
        return size
    expr = sympy.expand(size)
    return int(expr) if expr.is_Integer else expr


# --- index maps ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Digit:
    """One digit of a mixed-radix index: `size` values, each `stride` elements of the source further."""

    size: Size
    stride: Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", canonical(self.size))
        object.__setattr__(self, "stride", canonical(self.stride))


Dim = tuple[Digit, ...]


def _tidy(digits: Iterable[Digit]) -> Dim:
    """Drop digits of one value and merge neighbours that count on (the canonical form of a dimension)."""
    tidy: list[Digit] = []
    for digit in digits:
        if same(digit.size, 1):
            continue
        if tidy and same(tidy[-1].stride, digit.size * digit.stride):
            digit = Digit(tidy.pop().size * digit.size, digit.stride)
        tidy.append(digit)
    return tuple(tidy)


def _length(dim: Iterable[Digit]) -> Size:
    return product(digit.size for digit in dim)


@dataclass(frozen=True)
class IndexMap:
    """A rearrangement of a source tensor: dimensions as digits into the source, from `offset` on."""

    dims: tuple[Dim, ...]
    offset: Size = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", canonical(self.offset))

    @classmethod
    def identity(cls, shape: Sequence[Size]) -> IndexMap:
        """The source itself, row-major."""
        dims = []
        for axis, size in enumerate(shape):
            dims.append(_tidy([Digit(size, product(shape[axis + 1 :]))]))
        return cls(tuple(dims))

    @property
    def digits(self) -> Dim:
        """All digits in row-major order, as one dimension."""
        return _tidy(digit for dim in self.dims for digit in dim)

    def reshape(self, shape: Sequence[Size]) -> IndexMap | Refusal:
        """The same elements in the same order, with other dimensions."""
        queue = list(self.digits)
        dims = []
        for size in shape:
            dim = _take(queue, size)
            if dim is None:
                return _undivided(f"cannot regroup {_text(self.digits)} as {list(shape)}", self.digits, shape)
            dims.append(dim)
        if queue:
            return _undivided(f"sizes {list(shape)} do not account for {_text(queue)}", queue, shape)
        return IndexMap(tuple(dims), self.offset)

    def permute(self, order: Sequence[int]) -> IndexMap:
        """Dimensions reordered: new dimension i is old dimension `order[i]`."""
        return IndexMap(tuple(self.dims[axis] for axis in order), self.offset)

    def narrow(self, axis: int, start: Size, length: Size, step: int = 1) -> IndexMap | Refusal:
        """`length` indices of dimension `axis`, from `start` on, `step` apart."""
        dim = self.dims[axis]
        if same(length, _length(dim)):
            return self
        piece = _subrange(dim, start, length) if step == 1 else _every(dim, start, length, step)
        if piece is None:
            return Refusal(reasons.PIECES_MISSING, f"keeps [{start}, {start + length}) of {_text(dim)}")
        digits, moved = piece
        dims = (*self.dims[:axis], _tidy(digits), *self.dims[axis + 1 :])
        return IndexMap(dims, self.offset + moved)

    def select(self, axis: int, index: Size) -> IndexMap | Refusal:
        """One index of dimension `axis`, which goes away."""
        piece = self.narrow(axis, index, 1)
        if isinstance(piece, Refusal):
            return piece
        return IndexMap((*piece.dims[:axis], *piece.dims[axis + 1 :]), piece.offset)

    def insert(self, axis: int) -> IndexMap:
        """A new dimension of one index before dimension `axis`."""
        return IndexMap((*self.dims[:axis], (), *self.dims[axis:]), self.offset)


def _undivided(fact: str, digits: Iterable[Digit], sizes: Iterable[Size]) -> Refusal:
    """Digits do not split into these sizes: symbols may not, and of numbers no strides describe what the view makes."""
    numbers = all(isinstance(size, int) for size in (*(digit.size for digit in digits), *sizes))
    return Refusal(reasons.VIEW_NOT_UNDERSTOOD if numbers else reasons.SIZES_NOT_PROVEN, fact)


def _take(queue: list[Digit], size: Size) -> Dim | None:
    """Remove digits of `size` indices in all from the front of `queue`, splitting the last one if need be."""
    taken: list[Digit] = []
    while not same(size, 1):
        if not queue:
            return None
        digit = queue.pop(0)
        rest = quotient(size, digit.size)
        if rest is not None:
            taken.append(digit)
            size = rest
            continue
        inner = quotient(digit.size, size)
        if inner is None:
            return None
        taken.append(Digit(size, digit.stride * inner))
        queue.insert(0, Digit(inner, digit.stride))
        size = 1
    return _tidy(taken)


def _subrange(dim: Dim, start: Size, length: Size) -> tuple[list[Digit], Size] | None:
    """Digits and offset of the indices [start, start + length) of a dimension; None if they are not strided."""
    if not dim:
        return None
    inner = _length(dim[1:])
    count, skipped = quotient(length, inner), quotient(start, inner)
    if count is not None and skipped is not None:
        return [Digit(count, dim[0].stride), *dim[1:]], skipped * dim[0].stride
    # Inside one value of the first digit: the block number `first` of `inner` indices, then the rest within it.
    if not (isinstance(start, int) and isinstance(inner, int) and isinstance(length, int)):
        return None
    first, within = divmod(start, inner)
    if within + length > inner:
        return None
    rest = _subrange(dim[1:], within, length)
    return None if rest is None else (rest[0], first * dim[0].stride + rest[1])


def _every(dim: Dim, start: Size, length: Size, step: int) -> tuple[list[Digit], Size] | None:
    """Digits and offset of `length` indices `step` apart, for a dimension of one digit."""
    if len(dim) != 1:
        return None
    return [Digit(length, dim[0].stride * step)], start * dim[0].stride


def concatenate(pieces: Sequence[IndexMap], axis: int) -> IndexMap | Refusal:
    """Pieces of one source joined along `axis`, in the order given."""
    first = pieces[0]
    lengths = [[_length(dim) for dim in _others(piece, axis)] for piece in pieces]
    if any(not same(a, b) for other in lengths[1:] for a, b in zip(other, lengths[0], strict=False)):
        return Refusal(reasons.SIZES_NOT_PROVEN, f"joins pieces of {lengths} beside dimension {axis}")
    if any(_others(piece, axis) != _others(first, axis) for piece in pieces):
        return Refusal(reasons.VIEW_NOT_UNDERSTOOD, "the pieces of a concatenation are laid out differently")
    steps = [after.offset - before.offset for before, after in pairwise(pieces)]
    if any(same(step, 0) for step in steps):
        return Refusal(reasons.PIECES_REPEATED, "two neighbouring pieces of a concatenation are the same")
    if all(piece.dims[axis] == first.dims[axis] for piece in pieces):
        joined = _equal_pieces(first.dims[axis], [piece.offset for piece in pieces])
    else:
        joined = _adjacent_pieces([piece.dims[axis] for piece in pieces], steps)
    if joined is None:
        return Refusal(reasons.PIECES_REORDERED, f"pieces start at elements {[str(p.offset) for p in pieces]}")
    return IndexMap((*first.dims[:axis], _tidy(joined), *first.dims[axis + 1 :]), first.offset)


def _others(piece: IndexMap, axis: int) -> tuple[Dim, ...]:
    return (*piece.dims[:axis], *piece.dims[axis + 1 :])


def _equal_pieces(dim: Dim, offsets: Sequence[Size]) -> list[Digit] | None:
    """Pieces of one length: offsets that count (0, 1, 2 or 0, 1, 4, 5, ...) are new digits before those of a piece."""
    digits = list(dim)
    while len(offsets) > 1:
        steps = [after - before for before, after in pairwise(offsets)]
        run = next((i for i, step in enumerate(steps) if not same(step, steps[0])), len(steps)) + 1
        runs = [steps[i : i + run - 1] for i in range(0, len(offsets), run)]
        even = len(offsets) % run == 0 and all(same(step, steps[0]) for inside in runs for step in inside)
        if not even or sympy.sympify(steps[0]).could_extract_minus_sign():
            return None
        digits.insert(0, Digit(run, steps[0]))
        offsets = offsets[::run]
    return digits


def _adjacent_pieces(dims: Sequence[Dim], steps: Sequence[Size]) -> list[Digit] | None:
    """Pieces of several lengths: each must begin where the one before it ends, along the same digit."""
    inner = max((dim[1:] for dim in dims), key=len)
    stride = next(dim[0].stride for dim in dims if len(dim) == len(inner) + 1)
    counts = [_count(dim, inner, stride) for dim in dims]
    if any(count is None for count in counts):
        return None
    whole = [count for count in counts if count is not None]
    if any(not same(step, count * stride) for step, count in zip(steps, whole, strict=False)):
        return None
    return [Digit(sum(whole[1:], start=whole[0]), stride), *inner]


def _count(dim: Dim, inner: Dim, stride: Size) -> Size | None:
    """How many values of an outer digit of `stride` a dimension has, its inner digits being `inner`."""
    if dim == inner:
        return 1
    matches = dim[1:] == inner and same(dim[0].stride, stride)
    return dim[0].size if matches else None


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
    def as_sent(self) -> GatherPlacement:
        """The placement of the operand whose ranks' parts are the shards as they are: its rows may lie in other places.

        Its rows are [ranks, rows of a shard], or those of a shard along the contraction.
        """
        rows = self.row_order
        if self.shard.is_reshape or rows is None:
            return self
        whole, count, number = product(rows.sizes), len(rows.sizes), len(self.shard.sizes)
        lengths = (0, count, number - count) if self.axis == "rows" else (count, number - count)
        shard = Rearrangement(self.shard.sizes, tuple(range(number)), lengths)
        outer, inner = (1, whole) if self.axis == "rows" else (whole, 1)
        return GatherPlacement(self.axis, outer, inner, self.width, shard)


def scales_rows(scale: GatherPlacement, data: GatherPlacement, rows: int = 1, numbers: Size = 1) -> bool:
    """True for scales laid out over the rows as the data is, `numbers` of them for every `rows` rows."""
    sizes = ((scale.outer, data.outer), (scale.inner * rows, data.inner), (scale.width, numbers))
    return data.axis == scale.axis == "rows" and all(same(a, b) for a, b in sizes)


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

    Args:
        operand: Map of the operand into the source, which is [outer, ranks, block] row-major.
        block: Elements from one rank's block to the next one's; of a gathered tensor, those of a shard.
        ranks: Number of ranks.
        outer: How many such groups of blocks the source has; a gathered tensor has one.
    """
    found = _find_ranks(operand, block, ranks, outer)
    if isinstance(found, Refusal):
        return found
    (rows, columns), axis, place = found
    if axis == 0:
        before, after, columns = (_without(dim, block, ranks) for dim in (rows[:place], rows[place + 1 :], columns))
        shard = _rearrange(before, after, columns)
        return GatherPlacement("rows", _length(before), _length(after), _length(columns), shard)
    if place != 0:
        return Refusal(reasons.NOT_ROWS_OR_CONTRACTION, f"the rank is inside the contraction: {_text(columns)}")
    rows, columns = (_without(dim, block, ranks) for dim in (rows, columns[1:]))
    return GatherPlacement("contraction", _length(rows), 1, _length(columns), _rearrange(rows, columns))


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
    return RankPlacement(axis, _length(before), _length(after), _rearrange(*part))


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
    return Refusal(reasons.PIECES_REORDERED, f"no digit counts the {ranks} ranks in order: {_text(every)}")


def locate_scatter(operand: IndexMap, rows: Size, columns: Size, ranks: int) -> ScatterPlacement | Refusal:
    """Prove that a reduce-scatter's input is a complete arrangement of a product [rows, columns] by rank.

    Args:
        operand: Map of the collective's input into the product, row-major.
        rows: M of the product.
        columns: N of the product.
        ranks: Number of ranks: the input's leading `ranks` blocks are the ranks'.
    """
    queue = list(operand.digits)
    lead = _take(queue, ranks)
    if lead is None:
        return _undivided(f"cannot divide {_text(operand.digits)} by {ranks} ranks", operand.digits, [ranks])
    refusal = _not_once((*lead, *queue), operand.offset, rows * columns)
    if refusal is not None:
        return refusal
    if len(lead) != 1:
        return Refusal(reasons.NOT_ROWS_OR_CONTRACTION, f"the ranks' blocks are not equally spaced: {_text(lead)}")
    stride = lead[0].stride
    rest = tuple(queue)
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
    """How a tensor's elements, each of which a map takes once, are rearranged by it."""
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
        return Refusal(reason, f"the digits {_text([*left, *ordered])} do not count every element once")
    covered = _length(ordered)
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
    tidy = [_tidy(group) for group in groups]
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


def _text(digits: Iterable[Digit]) -> str:
    return "[" + ", ".join(f"{digit.size}:{digit.stride}" for digit in digits) + "]"
