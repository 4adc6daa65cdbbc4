"""Rows that are cut off a gathered tensor before a matmul, as padding is, and ranges that are all its rows. Pure.

    shard → all_gather → wait → view* → {slice, pad by fewer than none} → {copy, reshape}* → matmul
    shard → all_gather → wait → view* → slice? → {slice, split, select}+ → {copy, reshape}* → matmul, by other weights

Each row of a product comes from one row of the left operand. So the fused op multiplies all rows, and the same few
(`_is_most`) are cut off its result. Or it multiplies each range by its own weight. Ranges that one weight multiplies
are chunks, which save the memory of the whole result. They stay, and so do more than `MOST_RANGES`, as of experts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from asynctp_passes.ir.matmuls import is_matmul, read_term
from asynctp_passes.ir.nodes import (
    arguments,
    dtype_of,
    first_tensor,
    is_number,
    is_size,
    op_name,
    tensor_of,
    traits_of,
    value_of,
)
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Size, Sizes, canonical, is_within, product, rounded_up, same
from asynctp_passes.layout.index_map import IndexMap, tidy_dim
from asynctp_passes.layout.placement import incomplete
from asynctp_passes.layout.propagation import Propagation, propagate, sources_of
from asynctp_passes.reasons import Refusal

MOST_RANGES = 4
"""So many ranges of rows are multiplied at once, which takes the memory of all results at a time."""


@dataclass(frozen=True)
class Part:
    """Indices `start` to `end` of dimension `dim` of a tensor; `steps` are the nodes that take them, in order."""

    steps: tuple[fx.Node, ...]
    dim: int
    start: Size
    end: Size


@dataclass(frozen=True)
class Cut:
    """Indices `first` to `end` of dimension `dim` of the tensor `whole`, as rows: all dimensions but the last.

    `steps` are the nodes that make them of that tensor, in order. `rows` is the map of the matrix of all rows. The
    fused op multiplies all rows, or where it `is_range`, these alone.
    """

    whole: fx.Node
    dim: int
    first: Size
    end: Size
    steps: tuple[fx.Node, ...]
    rows: IndexMap
    is_range: bool = False

    @property
    def operand(self) -> fx.Node:
        """The last step, which a matmul takes."""
        return self.steps[-1]


def cut_dimension(node: fx.Node, ranks: int, sizes: Sizes) -> int | None:
    """The dimension whose last few indices a slice, or negative padding, cuts off; None if there is none."""
    traits, axis = traits_of(node), None
    before = tensor_of(node.args[0]) if traits.view in (View.SLICE, View.PAD) else None
    if before is None or tensor_of(node) is None:
        return None
    values, dims = arguments(node), before.dim()
    if traits.view is View.PAD:
        changed = [index for index, size in enumerate(values["pad"]) if size != 0]  # 0 for the last dimension's front
        axis = dims - 1 - changed[0] // 2 if len(changed) == 1 and changed[0] % 2 else None
    elif values["start"] in (0, None) and values.get("step", 1) == 1:
        axis = values["dim"] % dims
    if axis is None:
        return None
    kept, whole = sizes.of(value_of(node))[axis], sizes.of(before)[axis]
    return axis if not same(kept, whole) and _is_most(kept, whole, ranks) else None


def _is_most(kept: Size, whole: Size, ranks: int) -> bool:
    """True where few rows are cut off, since the fused op multiplies all: of symbols, at most two for each rank.

    Of numbers, fewer than there are ranks, and no more than stay; or a sixteenth of these, and no more than of symbols.
    """
    cut = canonical(whole - kept)
    if isinstance(kept, int) and isinstance(cut, int):
        return 0 < cut <= max(min(ranks - 1, kept), min(2 * ranks, kept // 16))
    return same(rounded_up(kept, ranks), whole) or is_within(cut, 0, 2 * ranks)


def find_cuts(propagation: Propagation, ranks: int, sizes: Sizes) -> Iterator[Cut]:
    """Views of a followed tensor without the last indices of one of its dimensions."""
    for whole, view in propagation.maps.items():
        for user in whole.users:
            axis = cut_dimension(user, ranks, sizes) if user.args[:1] == (whole,) else None
            if axis is not None:
                part = Part((user,), axis, canonical(0), sizes.of(value_of(user))[axis])
                yield from _cuts(whole, view, part, sizes)


def find_ranges(propagation: Propagation, ranks: int, sizes: Sizes) -> Iterator[Cut]:
    """Ranges of rows that are all of a followed tensor, but for its padding, where each has weights of its own."""
    for whole, parts in all_parts(propagation, ranks, sizes):
        found = [[*_cuts(whole, propagation.maps[whole], part, sizes)] for part in parts]
        weights = [{weight for cut in cuts for weight in _weights(cut.operand, sizes)} for cuts in found]
        apart = sum(map(len, weights)) == len(set().union(*weights))
        if apart and len(_apart(parts)) <= MOST_RANGES:
            yield from (replace(cut, is_range=True) for cuts in found for cut in cuts)


def _weights(operand: fx.Node, sizes: Sizes) -> Iterator[object]:
    """The values that the right operands of an operand's matmuls hold."""
    for user in filter(is_matmul, operand.users):
        matmul = read_term(user)
        if not isinstance(matmul, Refusal):
            yield held(matmul.b, sizes)


def _cuts(whole: fx.Node, view: IndexMap, part: Part, sizes: Sizes) -> Iterator[Cut]:
    """A part of a tensor's rows, and its copies and reshapes; none of a part of its columns."""
    *lines, width = sizes.of(value_of(whole))
    rows = view.reshape((product(lines), width))
    if part.dim < len(lines) and isinstance(rows, IndexMap):
        yield from _views(Cut(whole, part.dim, part.start, part.end, part.steps, rows), width, sizes)


def _views(cut: Cut, width: Size, sizes: Sizes) -> Iterator[Cut]:
    """A cut tensor, and those of its copies and reshapes that keep the columns."""
    stack = [cut]
    while stack:
        step = stack.pop()
        yield step
        for user in step.operand.users:
            if traits_of(user).view not in (View.SAME, View.RESHAPE, View.EXPAND) or tensor_of(user) is None:
                continue
            own, before = (sizes.of(value_of(node)) for node in (user, step.operand))
            repeats = traits_of(user).view is View.EXPAND and not same(product(own), product(before))
            if own and same(own[-1], width) and not repeats:
                stack.append(replace(step, steps=(*step.steps, user)))


# --- parts that are all of a tensor --------------------------------------------------------------------------------
def all_parts(propagation: Propagation, ranks: int, sizes: Sizes) -> Iterator[tuple[fx.Node, list[Part]]]:
    """Followed tensors that hold all that is gathered, and are taken in parts which are all of them, but for padding.

    Of a tensor without its padding they may be parts, too.
    """
    source = next(iter(propagation.maps), None)
    for whole, view in propagation.maps.items():
        value = tensor_of(whole)
        both = [] if value is None else [value, value_of(source)]
        counts = [product(sizes.of(one)) * one.dtype.itemsize for one in both]
        if value is None or not same(*counts) or incomplete(view, product(sizes.of(value))) is not None:
            continue
        for taken in (whole, *(user for user in whole.users if cut_dimension(user, ranks, sizes) is not None)):
            before = () if taken is whole else (taken,)
            users = (user for user in taken.users if not is_size(user))
            found = (leaf for user in users for part in _parts(user, taken, sizes) for leaf in _leaves(part, sizes))
            used = (part for part in found if not all(map(is_size, part.steps[-1].users)))
            parts = [replace(part, steps=(*before, *part.steps)) for part in used]
            if any(traits_of(user).view in (View.CAT, View.STACK) for part in parts for user in part.steps[-1].users):
                continue  # a rearrangement
            dims = {part.dim for part in parts}
            if len(_apart(parts)) < 2 or len(dims) > 1:
                continue
            if _are_all(_apart(parts), sizes.of(value)[dims.pop()], ranks):
                yield whole, parts


def _parts(user: fx.Node, whole: fx.Node, sizes: Sizes) -> Iterator[Part]:
    """The parts that a node takes of a tensor; none of one that takes it in another way."""
    traits, before = traits_of(user), sizes.of(value_of(whole))
    if "val" not in user.meta:
        return
    if traits.view is View.SLICE and arguments(user).get("step", 1) == 1 and user.args[:1] == (whole,):
        values = arguments(user)
        dim, size = values["dim"] % len(before), sizes.of(value_of(user))[values["dim"]]
        start = canonical(0) if values["start"] is None else sizes.read(values["start"])
        if values.get("end", start) in (None, sys.maxsize):  # a symbol that it begins at may be negative
            start = canonical(before[dim] - size)
        elif isinstance(start, int) and start < 0:
            start = canonical(before[dim] + start)
        yield Part((user,), dim, start, canonical(start + size))
    elif traits.view is View.SELECT and isinstance(index := arguments(user)["index"], int):
        dim = arguments(user)["dim"] % len(before)
        start = canonical(index if index >= 0 else before[dim] + index)
        yield Part((user,), dim, start, canonical(start + 1))
    elif traits.view in (View.SPLIT, View.UNBIND):
        dim, start = arguments(user)["dim"] % len(before), canonical(0)
        taken = {item.args[1]: item for item in user.users if op_name(item) == "getitem"}
        for index, piece in enumerate(user.meta["val"]):
            end = canonical(start + (1 if traits.view is View.UNBIND else sizes.of(piece)[dim]))
            if index in taken:
                yield Part((user, taken[index]), dim, start, end)
            start = end


def _leaves(part: Part, sizes: Sizes) -> Iterator[Part]:
    """A part; or those that it is taken in alone, as slices of a slice."""
    node, value, whole = part.steps[-1], tensor_of(part.steps[-1]), tensor_of(part.steps[0].args[0])
    keeps = value is not None and whole is not None and value.dim() == whole.dim()
    users = [user for user in node.users if not is_size(user)]
    inner = [one for user in users for one in _parts(user, node, sizes)] if keeps else []
    if not inner or {one.steps[0] for one in inner} != {*users} or any(one.dim != part.dim for one in inner):
        yield part
        return
    for one in inner:
        ends = (canonical(part.start + place) for place in (one.start, one.end))
        yield from _leaves(Part((*part.steps, *one.steps), part.dim, *ends), sizes)


def _apart(parts: Sequence[Part]) -> list[Part]:
    """The parts, each once: a program may take one twice."""
    return [*{(canonical(part.start), part.end): part for part in parts}.values()]


def _are_all(parts: Sequence[Part], size: Size, ranks: int) -> bool:
    """True for parts that cover 0 to a size, or but for a few at its end, each beginning where another one ends."""
    left, end = list(parts), canonical(0)
    while (part := next((one for one in left if same(one.start, end)), None)) is not None:
        left.remove(part)
        end = part.end
    return not left and (same(end, size) or _is_most(end, size, ranks))


# --- the values of weights ------------------------------------------------------------------------------------------
def held(node: fx.Node, sizes: Sizes) -> object:
    """The values that a tensor holds, in any order: equal for views of the same elements of one tensor, and for casts.

    A tensor that is changed between two views counts as one all the same.
    """
    way = [node]
    while (source := _rearranged(way[-1])) is not None:
        way.append(source)
    *views, base = way
    made: object = base
    if traits_of(base).view is View.CAST and (source := first_tensor(base)) is not None:
        made = (dtype_of(base), held(source, sizes))
    view = propagate(views[::-1], sources_of([base], sizes), sizes).maps.get(node)
    if view is None:
        return node
    digits = sorted(view.digits, key=lambda digit: -digit.stride if isinstance(digit.stride, int) else 0)
    return made, view.offset, tidy_dim(digits)


def _rearranged(node: fx.Node) -> fx.Node | None:
    """The one tensor that a view, or a piece of a split, is of."""
    sources = [one for one in node.all_input_nodes if not is_number(one)]
    is_view = traits_of(node).view not in (None, View.CAST)
    return sources[0] if is_view and len(sources) == 1 else None
