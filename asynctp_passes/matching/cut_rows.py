"""Rows that are cut off a gathered tensor before a matmul, as the padding of uneven shards: find them. Pure.

    shard → all_gather → wait → view* → {slice, pad by fewer than none} → {copy, reshape}* → matmul

Each row of a product comes from one row of the left operand. So the fused op multiplies all rows, and the same ones are
cut off its result. There are as few as paddings to a multiple of the ranks have (`_is_most`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from asynctp_passes.ir.nodes import arguments, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Size, Sizes, canonical, is_within, product, rounded_up, same
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.propagation import Propagation


@dataclass(frozen=True)
class Cut:
    """The first `length` indices of dimension `dim` of the tensor `whole`, as rows: all dimensions but the last.

    `steps` are the nodes that make them of that tensor, in order. `rows` is the map of the matrix of all rows.
    """

    whole: fx.Node
    dim: int
    length: Size
    steps: tuple[fx.Node, ...]
    rows: IndexMap

    @property
    def operand(self) -> fx.Node:
        """The last step, which a matmul takes."""
        return self.steps[-1]


def cut_dimension(node: fx.Node, ranks: int, sizes: Sizes) -> int | None:
    """The dimension whose last few indices a slice, or negative padding, cuts off; None if there is none."""
    traits, axis = traits_of(node), None
    before = tensor_of(node.args[0]) if traits.takes_range or traits.view is View.PAD else None
    if before is None:
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
            if axis is None or axis == value_of(whole).dim() - 1:
                continue
            *lines, width = sizes.of(value_of(whole))
            rows = view.reshape((product(lines), width))
            if isinstance(rows, IndexMap):
                cut = Cut(whole, axis, sizes.of(value_of(user))[axis], (user,), rows)
                yield from _views(cut, width, sizes)


def _views(cut: Cut, width: Size, sizes: Sizes) -> Iterator[Cut]:
    """A cut tensor, and those of its copies and reshapes that keep the columns."""
    stack = [cut]
    while stack:
        step = stack.pop()
        yield step
        for user in step.operand.users:
            own, before = (sizes.of(value_of(node)) for node in (user, step.operand)) if _keeps(user) else ((), ())
            repeats = traits_of(user).view is View.EXPAND and not same(product(own), product(before))
            if own and same(own[-1], width) and not repeats:
                stack.append(replace(step, steps=(*step.steps, user)))


def _keeps(node: fx.Node) -> bool:
    """True for a tensor of the same elements in the same order, unless it repeats them."""
    return traits_of(node).view in (View.SAME, View.RESHAPE, View.EXPAND) and tensor_of(node) is not None
