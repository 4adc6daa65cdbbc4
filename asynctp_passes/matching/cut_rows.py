"""Rows that are cut off a gathered tensor before a matmul, as the padding of uneven shards: find them. Pure.

    shard → all_gather → wait → view* → slice → {copy, reshape}* → matmul

Each row of a product comes from one row of the left operand. So the fused op multiplies all rows, and the same ones are
cut off its result. There are fewer of them than ranks; where sizes are numbers, than rows that stay, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from asynctp_passes.ir.nodes import arguments, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Size, Sizes, product, rounded_up, same
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.propagation import Propagation

__all__ = ["Cut", "find_cuts", "unpads"]


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


def unpads(node: fx.Node, ranks: int, sizes: Sizes) -> bool:
    """True for picking as many rows as there were before they were padded to a multiple of the ranks."""
    picks = traits_of(node).drops_rows
    before, after = tensor_of(node.args[0]) if picks else None, tensor_of(node)
    if before is None or after is None or before.dim() != after.dim():
        return False
    pairs = zip(sizes.of(before), sizes.of(after), strict=True)
    return any(not same(kept, whole) and same(rounded_up(kept, ranks), whole) for whole, kept in pairs)


def find_cuts(propagation: Propagation, ranks: int, sizes: Sizes) -> Iterator[Cut]:
    """Views of a followed tensor without the last indices of one of its dimensions."""
    for whole, view in propagation.maps.items():
        for user in whole.users:
            value = tensor_of(whole) if unpads(user, ranks, sizes) else None
            axis = None if value is None else _cut_dimension(user, whole, sizes)
            if value is None or axis is None:
                continue
            *lines, width = sizes.of(value)
            rows = view.reshape((product(lines), width))
            if isinstance(rows, IndexMap):
                cut = Cut(whole, axis, sizes.of(value_of(user))[axis], (user,), rows)
                yield from _views(cut, width, sizes)


def _cut_dimension(node: fx.Node, whole: fx.Node, sizes: Sizes) -> int | None:
    """The dimension that a slice cuts: it keeps the first indices, half of them or more. None for the last one."""
    if not traits_of(node).takes_range or node.args[0] is not whole:
        return None
    values = arguments(node)
    if values["start"] not in (0, None) or values.get("step", 1) != 1:
        return None
    before, after = sizes.of(value_of(whole)), sizes.of(value_of(node))
    axis: int = values["dim"] % len(before)
    kept, size = after[axis], before[axis]
    few = isinstance(kept, int) and isinstance(size, int) and 2 * kept < size
    return axis if axis < len(before) - 1 and not few else None


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
