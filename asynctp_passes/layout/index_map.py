"""Where an index goes through views: strided index maps over a source tensor.

Each dimension of an `IndexMap` is a list of digits, pairs of a size and a stride. In row-major order the element at
digit values i0, i1, ... is the source's element number `offset + i0 * stride0 + i1 * stride1 + ...`. Views edit that
list (`docs/explanation/how-a-chain-is-proven.md`), so that equal rearrangements have equal maps, however they are
spelled. Every comparison of sizes is an algebraic identity: nothing here guards or specializes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import sympy

from asynctp_passes import reasons
from asynctp_passes.ir.sizes import Size, canonical, product, quotient, same
from asynctp_passes.reasons import Refusal


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


def tidy_dim(digits: Iterable[Digit]) -> Dim:
    """Drop digits of one value and merge neighbours that count on (the canonical form of a dimension)."""
    tidy: list[Digit] = []
    for digit in digits:
        if same(digit.size, 1):
            continue
        if tidy and same(tidy[-1].stride, digit.size * digit.stride):
            digit = Digit(tidy.pop().size * digit.size, digit.stride)
        tidy.append(digit)
    return tuple(tidy)


def length_of(dim: Iterable[Digit]) -> Size:
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
            dims.append(tidy_dim([Digit(size, product(shape[axis + 1 :]))]))
        return cls(tuple(dims))

    @property
    def digits(self) -> Dim:
        """All digits in row-major order, as one dimension."""
        return tidy_dim(digit for dim in self.dims for digit in dim)

    def reshape(self, shape: Sequence[Size]) -> IndexMap | Refusal:
        """The same elements in the same order, with other dimensions."""
        queue = list(self.digits)
        dims = []
        for size in shape:
            dim = take_digits(queue, size)
            if dim is None:
                return undivided(f"cannot regroup {digits_text(self.digits)} as {list(shape)}", self.digits, shape)
            dims.append(dim)
        if queue:
            return undivided(f"sizes {list(shape)} do not account for {digits_text(queue)}", queue, shape)
        return IndexMap(tuple(dims), self.offset)

    def permute(self, order: Sequence[int]) -> IndexMap:
        """Dimensions reordered: new dimension i is old dimension `order[i]`."""
        return IndexMap(tuple(self.dims[axis] for axis in order), self.offset)

    def narrow(self, axis: int, start: Size, length: Size, step: int = 1) -> IndexMap | Refusal:
        """`length` indices of dimension `axis`, from `start` on, `step` apart."""
        dim = self.dims[axis]
        if same(length, length_of(dim)):
            return self
        piece = _subrange(dim, start, length) if step == 1 else None
        if step != 1 and len(dim) == 1:
            piece = [Digit(length, dim[0].stride * step)], start * dim[0].stride
        if piece is None:
            return Refusal(reasons.PIECES_MISSING, f"keeps [{start}, {start + length}) of {digits_text(dim)}")
        digits, moved = piece
        dims = (*self.dims[:axis], tidy_dim(digits), *self.dims[axis + 1 :])
        return IndexMap(dims, self.offset + moved)

    def select(self, axis: int, index: Size) -> IndexMap | Refusal:
        """The map of one index of dimension `axis`, without that dimension."""
        piece = self.narrow(axis, index, 1)
        if isinstance(piece, Refusal):
            return piece
        return IndexMap((*piece.dims[:axis], *piece.dims[axis + 1 :]), piece.offset)

    def insert(self, axis: int) -> IndexMap:
        """A new dimension of one index before dimension `axis`."""
        return IndexMap((*self.dims[:axis], (), *self.dims[axis:]), self.offset)

    def resized(self, before: Size, after: Size) -> IndexMap | None:
        """The same memory as elements of another size, in the last dimension; None where that is no strided view.

        Sizes of an element are told as parts of one of the source: 1, 1/4 or 2, say.
        """
        if not self.dims:
            return None
        *dims, last = self.dims
        finer = quotient(before, after)
        if finer is not None:
            return replace(self, dims=(*dims, tidy_dim([*last, Digit(finer, after)])))
        coarser = quotient(after, before)
        count = quotient(last[-1].size, coarser) if last and coarser is not None else None
        if count is None or not same(last[-1].stride, before):
            return None
        return replace(self, dims=(*dims, tidy_dim([*last[:-1], Digit(count, after)])))


def undivided(fact: str, digits: Iterable[Digit], sizes: Iterable[Size]) -> Refusal:
    """Digits do not split into these sizes: symbols may not, and of numbers no strides describe what the view makes."""
    numbers = all(isinstance(size, int) for size in (*(digit.size for digit in digits), *sizes))
    return Refusal(reasons.VIEW_NOT_UNDERSTOOD if numbers else reasons.SIZES_NOT_PROVEN, fact)


def take_digits(queue: list[Digit], size: Size) -> Dim | None:
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
    return tidy_dim(taken)


def _subrange(dim: Dim, start: Size, length: Size) -> tuple[list[Digit], Size] | None:
    """Digits and offset of the indices [start, start + length) of a dimension; None if they are not strided."""
    if not dim:
        return None
    inner = length_of(dim[1:])
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


def concatenate(pieces: Sequence[IndexMap], axis: int) -> IndexMap | Refusal:
    """The map of pieces of one source that are joined along `axis`, in the order given."""
    first = pieces[0]
    lengths = [[length_of(dim) for dim in _others(piece, axis)] for piece in pieces]
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
    return IndexMap((*first.dims[:axis], tidy_dim(joined), *first.dims[axis + 1 :]), first.offset)


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
    whole = [count for dim in dims if (count := _count(dim, inner, stride)) is not None]
    if len(whole) < len(dims) or any(not same(step, count * stride) for step, count in zip(steps, whole, strict=False)):
        return None
    return [Digit(sum(whole[1:], start=whole[0]), stride), *inner]


def _count(dim: Dim, inner: Dim, stride: Size) -> Size | None:
    """How many values of an outer digit of `stride` a dimension has, its inner digits being `inner`."""
    if dim == inner:
        return 1
    matches = dim[1:] == inner and same(dim[0].stride, stride)
    return dim[0].size if matches else None


def digits_text(digits: Iterable[Digit]) -> str:
    return "[" + ", ".join(f"{digit.size}:{digit.stride}" for digit in digits) + "]"
