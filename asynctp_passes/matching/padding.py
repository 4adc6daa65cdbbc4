"""Find the zero rows that pad a product so that the ranks divide it before a reduce-scatter. Pure.

    matmul+ → view* → sum → {pad, cat with zeros, write into zeros} → view* → reduce_scatter
    matmul+ → view* → sum → split → pad of the last piece → cat → view* → reduce_scatter          (DTensor)

A rank sends its rows of zeros too, and what other ranks have there is theirs: they may pad fewer rows. So the fused op
is told how many rows are the product's (`real_rows`). It sends zeros after them, whatever the weight and the bias are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from asynctp_passes.ir.nodes import arguments, filling_of, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Size, canonical, product, quotient, same
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.index_map import IndexMap, concatenate
from asynctp_passes.layout.placement import ScatterPlacement
from asynctp_passes.layout.propagation import is_view, pads_at_end, propagate
from asynctp_passes.matching.match_context import MatchContext
from asynctp_passes.reasons import Refusal

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
    def real_rows(self) -> Size:
        """How many rows are not padding, of those of one index of the dimensions in front."""
        return product(self.before[self.dim : -1])

    def is_in_blocks(self, place: ScatterPlacement, ranks: int) -> bool:
        """True where the ranks' blocks, concatenated, give the padded dimension and those behind it."""
        rows = product(self.after[self.dim : -1])
        in_order = place.axis == "rows" and place.out.is_reshape
        return in_order and same(place.outer, product(self.after[: self.dim])) and same(place.inner * ranks, rows)


def find_padding(context: MatchContext, end: fx.Node) -> Padding | None:
    """The padding that `end` is a view of; None where it is padded in no such way."""
    found: dict[fx.Node, Padding | None] = {}

    def above(node: fx.Node) -> Sequence[fx.Node]:
        found[node] = _by_pieces(context, node) or _at_once(context, node)
        return node.all_input_nodes if found[node] is None else ()

    pad, *views = context.sorted(reachable([end], above, where=is_view)) or (end,)
    padding = found.get(pad)
    if padding is None or any(map(found.get, views)):
        return None
    way = propagate(views, {pad: padding.way}, context.sizes).maps.get(end)
    return None if way is None else replace(padding, nodes=(*padding.nodes, *views), way=way)


def _at_once(context: MatchContext, pad: fx.Node) -> Padding | None:
    """The padding that one op makes."""
    source = _padded(context, pad)
    before, after = tensor_of(source), tensor_of(pad)
    if source is None or before is None or after is None or before.dim() != after.dim() or before.dtype != after.dtype:
        return None
    own, whole = context.sizes.of(before), context.sizes.of(after)
    longer = [dim for dim, (old, new) in enumerate(zip(own, whole, strict=True)) if not same(old, new)]
    if len(longer) != 1 or longer[0] == len(own) - 1 or after.device != before.device:
        return None
    more = context.sizes.difference(after, before, longer[0])
    return Padding(source, longer[0], own, whole, more, (pad,), IndexMap.identity(whole))


def _by_pieces(context: MatchContext, cat: fx.Node) -> Padding | None:
    """The padding of pieces for the ranks, as DTensor has it: the last one is padded to the size of the others.

    Where there are fewer pieces than ranks, the rest is zeros.
    """
    if traits_of(cat).view is not View.CAT:
        return None
    values = arguments(cat)
    tensors: Sequence[fx.Node] = values["tensors"]
    pieces = [_uncopied(_padded(context, _uncopied(tensor)) or tensor) for tensor in tensors]
    split = pieces[0].args[0] if traits_of(pieces[0]).view is View.ITEM else None
    if not isinstance(split, fx.Node) or traits_of(split).view is not View.SPLIT or tensor_of(split.args[0]) is None:
        return None
    count, source = len(split.meta["val"]), arguments(split)["self"]
    items = [piece.args[:2] for piece in pieces[:count]]
    rest = [piece for piece in pieces[count:] if not _is_of_zeros(context, piece)]
    if rest or items != [(split, index) for index in range(count)]:
        return None
    if [_uncopied(tensor) for tensor in tensors[: count - 1]] != pieces[: count - 1]:
        return None
    own, one = context.sizes.of(value_of(source)), context.sizes.of(value_of(tensors[0]))
    dim, into = arguments(split)["dim"] % len(own), values["dim"] % len(own)
    alike = all(context.sizes.of(value_of(tensor)) == one for tensor in tensors)
    if not alike or dim == len(own) - 1 or one[:dim] + one[dim + 1 :] != own[:dim] + own[dim + 1 :]:
        return None
    whole = (*own[:dim], canonical(one[dim] * len(tensors)), *own[dim + 1 :])
    if same(whole[dim], own[dim]):
        return None
    parts = [IndexMap.identity(whole).narrow(dim, one[dim] * index, one[dim]) for index in range(len(tensors))]
    way = concatenate([part for part in parts if isinstance(part, IndexMap)], into)
    if not all(isinstance(part, IndexMap) for part in parts) or isinstance(way, Refusal):
        return None
    between = reachable(tensors[:count], where=lambda node: is_view(node) and node is not source)
    nodes = context.sorted([*between, cat])
    return Padding(source, dim, own, whole, canonical(whole[dim] - own[dim]), nodes, way)


def _uncopied(node: fx.Node) -> fx.Node:
    """The tensor that a node is a copy of."""
    while traits_of(node).view is View.SAME and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


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


def gathers_by_sum(context: MatchContext, node: fx.Node, ranks: int) -> bool:
    """True for putting a tensor among zeros that are as large as those of all other ranks: a sum is a gather then.

    Of an unknown number of ranks (0), any multiple will do.
    """
    view, values = traits_of(node).view, arguments(node) if traits_of(node).view in _PADDING else {}
    if view is View.CAT:
        parts = [one for one in values["tensors"] if not _is_of_zeros(context, one)]
    elif view is View.WRITE:
        parts = [values["src"]] if _is_of_zeros(context, values["self"]) else []
    else:
        parts = [values["self"]] if view is View.PAD and _is_zero(values["value"]) else []
    if len(parts) != 1 or tensor_of(parts[0]) is None or tensor_of(node) is None:
        return False
    part, whole = (product(context.sizes.of(value_of(one))) for one in (parts[0], node))
    return same(part * ranks, whole) if ranks else quotient(whole, part) not in (None, 1)


def _is_of_zeros(context: MatchContext, node: fx.Node) -> bool:
    """True for a tensor that is made of the number 0, and that nothing changes."""
    return traits_of(node).constant is not None and _is_zero(filling_of(node)) and node not in context.changed


def _is_zero(number: object) -> bool:
    """True for 0, and not for -0.0, which a sum of such would keep."""
    return isinstance(number, int | float) and number == 0 and math.copysign(1, number) > 0
