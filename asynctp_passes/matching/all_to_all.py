"""An all-to-all that is written as an all-gather: each rank keeps its own piece of every shard.

    shard → all_gather → wait → view* → split into one piece a rank → this rank's piece

DTensor moves a sharding to another dimension so on CPU, where gloo has no all-to-all; on GPUs it calls one collective.
A program may also take a piece that is the same on all ranks, and drop the rest. One rank's graph shows the difference
only by the number of the piece, so that a chain counts as an all-to-all on CPU alone, where nothing overlaps.
"""

from __future__ import annotations

from torch import fx

from asynctp_passes import compat
from asynctp_passes.ir.calls import Collective
from asynctp_passes.ir.nodes import is_size, op_name, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Sizes, product, same
from asynctp_passes.layout.placement import RankPlacement, locate_ranks
from asynctp_passes.layout.propagation import Propagation, views_of

__all__ = ["own_piece"]


def own_piece(gather: Collective, propagation: Propagation, sizes: Sizes) -> fx.Node | None:
    """The piece that is all of a gathered tensor that this rank uses, where the gather stands for an all-to-all."""
    group = gather.group.meta.get("val") if isinstance(gather.group, fx.Node) else gather.group
    rank = compat.rank_in_group(group)
    if rank is None or value_of(gather.node).device.type != "cpu":
        return None
    splits = (node for node in propagation.pieces if traits_of(node).view is View.SPLIT)
    pieces = (_only_piece(node) for node in splits if _cuts_every_shard(node, gather, propagation, sizes))
    own = next((piece for piece in pieces if piece is not None and piece.args[1] == rank), None)
    if own is None or not _is_copied(own):
        return None
    kept = {own, *views_of([own])}
    return own if all(source in kept for source, _ in propagation.uses()) else None


def _cuts_every_shard(split: fx.Node, gather: Collective, propagation: Propagation, sizes: Sizes) -> bool:
    """True for a split of all that is gathered, across the shards, into one equal piece for each rank."""
    whole, pieces = split.args[0], split.meta["val"]
    block = product(sizes.of(value_of(gather.input)))
    found = locate_ranks(propagation.maps[whole], block, gather.group_size)  # type: ignore[index]
    if not isinstance(found, RankPlacement) or len(pieces) != gather.group_size:
        return False
    before, after = sizes.of(value_of(whole)), [sizes.of(piece) for piece in pieces]
    cut = [axis for axis, size in enumerate(before) if not same(size, after[0][axis])]
    equal = all(same(a, b) for other in after[1:] for a, b in zip(after[0], other, strict=True))
    return equal and len(cut) == 1 and cut[0] != found.dim


def _only_piece(split: fx.Node) -> fx.Node | None:
    """The one piece of a split that is taken."""
    items = [user for user in split.users if op_name(user) == "getitem"]
    taken = [item for item in items if item.users]
    return taken[0] if len(taken) == 1 and len(items) == len(split.users) else None


def _is_copied(piece: fx.Node) -> bool:
    """True for a piece that is contiguous, or only used as a contiguous copy: that is how DTensor returns it."""
    value = tensor_of(piece)
    copies = (traits_of(user).view is View.SAME and traits_of(user).copies for user in piece.users if not is_size(user))
    return value is not None and (compat.is_contiguous(value) or all(copies))
