"""Rows of zeros behind a product, which make the ranks divide what a reduce-scatter takes: find them. Pure.

    matmul+ → view* → sum → {pad, cat with zeros, write into zeros} → view* → reduce_scatter

Ranks send the rows of zeros too. A padded operand is no padded product: a row of zeros times a weight that has an
infinity or a NaN is NaN, and a bias is added to it. So the fused op multiplies rows of any values, and then each rank
sets to zero those rows of its block that are padding. They are zero in the program: there every rank sends zeros, whose
sum and average is zero. Where the padded dimension, with those before it as one, is the ranks' blocks one after the
other, the rows of a block count on, and its padding is what begins with a number of rows: `rows_before` compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from asynctp_passes.ir.nodes import arguments, filling_of, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Size, product, same
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import ScatterPlacement
from asynctp_passes.layout.propagation import is_view, pads_at_end, propagate
from asynctp_passes.matching.match_context import MatchContext

__all__ = ["Padding", "find_padding"]


_PADDING = (View.PAD, View.CAT, View.WRITE)


@dataclass(frozen=True)
class Padding:
    """Indices of zeros at the end of one dimension of a product, other than the last one.

    Attributes:
        source: What is padded.
        dim: The dimension.
        before: The sizes of what is padded.
        after: Those of the padded tensor.
        more: How many indices are padding.
        nodes: The op that pads, and the views after it, in order.
        way: The map of what is scattered into the padded tensor.
    """

    source: fx.Node
    dim: int
    before: tuple[Size, ...]
    after: tuple[Size, ...]
    more: Size
    nodes: tuple[fx.Node, ...]
    way: IndexMap

    @property
    def rows(self) -> Size:
        """The rows of the padded tensor: all dimensions but the last."""
        return product(self.after[:-1])

    @property
    def kept(self) -> Size:
        """How many rows of those of one index of the dimensions in front are no padding."""
        return product(self.before[self.dim : -1])

    def is_in_blocks(self, place: ScatterPlacement, ranks: int) -> bool:
        """True where the ranks' blocks, one after the other, are the padded dimension and those behind it."""
        rows = product(self.after[self.dim : -1])
        in_order = place.axis == "rows" and place.out.is_reshape
        return in_order and same(place.outer, product(self.after[: self.dim])) and same(place.inner * ranks, rows)


def find_padding(context: MatchContext, end: fx.Node) -> Padding | None:
    """The padding that `end` is a view of; None where it is padded in no such way."""

    def above(node: fx.Node) -> Sequence[fx.Node]:
        return node.all_input_nodes if _padded(context, node) is None else ()

    pad, *views = context.sorted(reachable([end], above, where=is_view)) or (end,)
    if above(pad) or not all(map(above, views)):
        return None
    source = _padded(context, pad)
    before, after = tensor_of(source), tensor_of(pad)
    if source is None or before is None or after is None or before.dim() != after.dim() or before.dtype != after.dtype:
        return None
    own, whole = context.sizes.of(before), context.sizes.of(after)
    longer = [dim for dim, (old, new) in enumerate(zip(own, whole, strict=True)) if not same(old, new)]
    if len(longer) != 1 or longer[0] == len(own) - 1 or value_of(pad).device != before.device:
        return None
    way = propagate(views, {pad: IndexMap.identity(whole)}, context.sizes).maps.get(end)
    more = context.sizes.difference(after, before, longer[0])
    return None if way is None else Padding(source, longer[0], own, whole, more, (pad, *views), way)


def _padded(context: MatchContext, node: fx.Node) -> fx.Node | None:
    """The tensor that a node pads at the end by zeros; None for a node that does something else."""
    view, values = traits_of(node).view, arguments(node) if traits_of(node).view in _PADDING else {}
    if view is View.PAD:
        in_place = pads_at_end(values["pad"]) and all(size == 0 for size in values["pad"][::2])
        return values["self"] if in_place and _is_zero(values["value"]) else None
    if view is View.CAT:
        tensors: Sequence[fx.Node] = values["tensors"]
        return tensors[0] if len(tensors) == 2 and _is_of_zeros(context, tensors[1]) else None
    in_front = values.get("start", -1) in (None, 0) and values.get("step") == 1
    return values["src"] if in_front and _is_of_zeros(context, values["self"]) else None


def _is_of_zeros(context: MatchContext, node: fx.Node) -> bool:
    """True for a tensor that is made of the number 0, and that nothing changes."""
    return traits_of(node).constant is not None and _is_zero(filling_of(node)) and node not in context.changed


def _is_zero(number: object) -> bool:
    """True for 0, and not for -0.0, which a sum of such would keep."""
    return isinstance(number, int | float) and number == 0 and math.copysign(1, number) > 0
