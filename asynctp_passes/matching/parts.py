"""A gathered tensor that is taken in parts, which together are all of it: find them, to say so. Pure.

    shard → all_gather → wait → view* → {slice, split}+ → ...

No fused op multiplies a part of what it gathers. One that multiplied all rows with the weight of each part would do the
work several times, and one for chunks of a weight would make the result of all chunks at once, which they are to save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from asynctp_passes.ir.nodes import arguments, is_size, op_name, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Size, Sizes, canonical, product, same
from asynctp_passes.layout.placement import incomplete
from asynctp_passes.layout.propagation import Propagation

__all__ = ["parts_of"]

_Part = tuple[fx.Node, int, Size, Size]
"""A node that takes a part of a tensor: the dimension, where the part begins, and where it ends."""


def parts_of(propagation: Propagation, sizes: Sizes) -> str:
    """The parts in which a followed tensor is taken, if they are all of it, for people; empty if they are not."""
    for whole, view in propagation.maps.items():
        value = tensor_of(whole)
        if value is None or incomplete(view, product(sizes.of(value))) is not None:
            continue
        taken = (part for user in whole.users if not is_size(user) for part in _parts(user, whole, sizes))
        parts = [part for part in taken if not all(map(is_size, part[0].users))]
        if any(traits_of(user).view in (View.CAT, View.STACK) for node, *_ in parts for user in node.users):
            continue  # a rearrangement
        dims = {dim for _, dim, _, _ in parts}
        if len(parts) > 1 and len(dims) == 1 and _are_all([part[2:] for part in parts], sizes.of(value)[dims.pop()]):
            shown = [f"{node.name} [{start}, {end})" for node, _, start, end in parts]
            return f"of {whole.name}: {', '.join(shown[:3])}" + (f" and {len(shown) - 3} more" if shown[3:] else "")
    return ""


def _parts(user: fx.Node, whole: fx.Node, sizes: Sizes) -> Iterator[_Part]:
    """The parts that a node takes of a tensor; none of one that takes it in another way."""
    view, before = traits_of(user).view, sizes.of(value_of(whole))
    if view in (View.SLICE, View.NARROW) and arguments(user).get("step", 1) == 1 and user.args[0] is whole:
        values = arguments(user)
        dim = values["dim"] % len(before)
        start = 0 if values["start"] is None else sizes.read(values["start"])
        if isinstance(start, int) and start < 0:
            start = before[dim] + start
        yield user, dim, start, start + sizes.of(value_of(user))[dim]
    elif view is View.SPLIT:
        dim, start = arguments(user)["dim"] % len(before), 0
        taken = {item.args[1]: item for item in user.users if op_name(item) == "getitem"}
        for index, piece in enumerate(user.meta["val"]):
            end = start + sizes.of(piece)[dim]
            if index in taken:
                yield taken[index], dim, start, end
            start = end


def _are_all(parts: Iterable[tuple[Size, Size]], size: Size) -> bool:
    """True for parts that cover 0 to a size, each beginning where another one ends."""
    left, end = list(parts), canonical(0)
    while (part := next((one for one in left if same(one[0], end)), None)) is not None:
        left.remove(part)
        end = part[1]
    return not left and same(end, size)
