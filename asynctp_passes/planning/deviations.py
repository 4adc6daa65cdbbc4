"""Deviations: what a plan sends otherwise than the program's collectives do, in words that ranks can compare. Pure.

    hoist     gather 0 of bf16 sends convert_element_type(clamp(mul(own part, 2.0)), float8_e4m3fn) instead
    join      the scales of gather 1 travel with the data of gather 0
    late      gather 0 comes after reduction 1, which a fused matmul of it depends on
    sum       one reduction for reductions 0, 1 and 2, where only their sum is used; or a sum over a dimension of one
    own       reduction 0, an all-reduce, is a reduce-scatter, where each rank uses its own part alone
    bucket    one all-reduce for all-reduces 3, 4 and 5
    drop      reduction 6 is not made, since nothing uses it
    again     gather 0 is made again in the backward, after its first collective
    save      reduction 2 is made in the forward, and saved for the backward in place of its products
    keep      gather 0 is kept, so that it may be pulled to its place: where it goes by asynctp's own transport

All other rewrites leave what a rank sends as it is, whatever the other ranks do. These do not, so that all ranks of a
group have to do them, or none (`ranks.accord`). A text names collectives by their place among those of their group. It
has all that decides the values: operations, constants, dtypes, and the sizes along which something is rearranged or
reduced. It has no names and no other sizes, since one rank may compile for static sizes and another for dynamic ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from asynctp_passes.ir.collectives import sent_kind
from asynctp_passes.ir.nodes import arguments, called_name, filling_of, tensor_of, traits_of, value_of
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.sizes import Size, same
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.placement import GatherPlacement, Rearrangement
from asynctp_passes.matching.chains import Bucket, Chain, EarlySum, GatherChain, Hoist, Part, ScatterChain, Step
from asynctp_passes.matching.near_miss import reduces

LOCAL = "?"
"""A text with this in it has a size that only this rank knows, and is comparable to no other rank's."""

_LONGEST = 240


def communicated(collectives: Iterable[Collective]) -> dict[str, str]:
    """For each group a hash of what it communicates in a graph: kinds, reductions and dtypes, in their order."""
    told: dict[str, list[str]] = {}
    for one in collectives:
        sent = sent_kind(one)
        kind = called_name(one.node) if sent == "other" else f"{sent}({one.reduce_op})"
        value = tensor_of(one.input)
        told.setdefault(one.group_key, []).append(f"{kind} {'' if value is None else value.dtype}")
    return {group: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for group, lines in told.items()}


def of_rematerialized(place: int, before: Sequence[tuple[str, bool]]) -> str:
    """The text of a gather that is made again in the backward, at a place there that all ranks have to share.

    `place` is that among the group's collectives in the graph of forward and backward. `before` has what communicates
    in the backward before it, in order: the name of the op, and whether it is of the gather's group.
    """
    told = hashlib.sha256(repr(list(before)).encode()).hexdigest()[:8] if before else ""
    own = sum(is_own for _, is_own in before)
    count = f"{len(before)} collective{'s' if len(before) > 1 else ''}"
    after = f"after {count} ({own} of the group, {told})" if before else "before all collectives"
    return f"again: all_gather {place} {after} of the backward"


class Words:
    """The texts of the deviations of a graph with these collectives."""

    def __init__(self, collectives: Sequence[Collective]) -> None:
        count: dict[str, int] = {}
        self._place: dict[fx.Node, int] = {}
        for one in collectives:
            place = count.setdefault(one.group_key, 0)
            self._place.update(dict.fromkeys(one.nodes, place))
            count[one.group_key] = place + 1
        self._collectives = collectives

    def of_chain(self, chain: Chain) -> list[str]:
        """The deviation that fusing a chain makes of its collectives; mostly none.

        All that a chain deviates in is one text: where a part of it is refused, the chain is, and the rest with it.
        """
        if isinstance(chain, GatherChain):
            late = [] if chain.follows is None else [self._late(chain, chain.follows)]
            parts = [*late, *([self._hoist(chain, chain.hoist)] if chain.hoist is not None else self._joined(chain))]
            return [" and ".join(parts)] if parts else []
        return [self._sum(chain)] if chain.joined else [self.of_own_part(chain.collective)] if chain.own_part else []

    def of_own_part(self, reduction: Collective) -> str:
        """The all-reduce that becomes a reduce-scatter. Which part is this rank's stands in `Question.rank`."""
        return f"own: reduce_scatter({reduction.reduce_op}) in place of all_reduce {self._place[reduction.node]}"

    def of_bucket(self, bucket: Bucket) -> str:
        """The all-reduces that become one, and between which collectives of the program that is.

        Buckets between the same two come in an order that one rank's computation decides: it is told, too.
        """
        before, is_late = self.gap(bucket)
        late = f", before all_gather {self._place[bucket.place]} that comes late" if is_late else ""
        earlier = "".join(f", {self._bucketed(one)}" for one in bucket.earlier)
        return _short(f"bucket: {self._bucketed(bucket)}, after the first {before}{late}{earlier}")

    def gap(self, bucket: Bucket) -> tuple[int, bool]:
        """How many collectives of the program come before a bucket, and whether a late gather follows it at once."""
        if bucket.chain is None:
            return sum(one.start < bucket.place for one in self._collectives), False
        follows, anchor = bucket.chain.follows, bucket.chain.anchor
        before = sum(one.start < anchor or one.start is follows for one in self._collectives)
        return before, follows is not None

    def _bucketed(self, bucket: Bucket) -> str:
        places = [self._place[member.node] for member in bucket.members]
        return f"all_reduce({bucket.collective.reduce_op}) of {value_of(bucket.inputs[0]).dtype} for {places}"

    def of_dropped(self, dropped: Iterable[Collective]) -> str:
        """The collectives of one group that are not made."""
        return f"drop: {sorted(self._place[one.node] for one in dropped)}"

    def place_of(self, collective: Collective) -> int:
        """The place of a collective among those of its group."""
        return self._place[collective.node]

    def of_saved(self, reduction: Collective) -> str:
        """The text of a reduction whose result is saved for the backward, in place of the matmuls it sums."""
        return f"save: {reduction.kind} {self._place[reduction.node]}"

    def of_kept(self, gather: Collective) -> str:
        """The gather whose result this rank keeps, whatever it multiplies."""
        return f"keep: all_gather {self._place[gather.node]}"

    # --- reductions ---
    def _sum(self, chain: ScatterChain) -> str:
        members = sorted((self._place[node], times, _early(chain.early.get(node))) for node, times in chain.crossing)
        terms = " + ".join(f"{times:g} * {early}{place}" for place, times, early in members)
        return f"sum: {chain.collective.kind}({chain.collective.reduce_op}) in place of {terms}"

    # --- gathers ---
    def _late(self, chain: GatherChain, follows: fx.Node) -> str:
        own = chain.collective
        passed = [one for one in self._collectives if own.start < one.start <= follows]
        told = [f"{one.kind} {self._place[one.node]}" if one.group_key == own.group_key else one.kind for one in passed]
        known = any(one.start is follows for one in passed)
        return f"late: all_gather {self._place[own.node]} after {', '.join(told)}{'' if known else LOCAL}"

    def _joined(self, chain: GatherChain) -> list[str]:
        data = f"{self._place[chain.collective.node]}{_way(chain.placement.shard)}"
        texts = []
        if chain.scale is not None and chain.scale_placement is not None:
            way = _way(chain.scale_placement.shard)
            texts.append(f"join: scales of all_gather {self._place[chain.scale.node]}{way} with all_gather {data}")
        if chain.row_numbers is not None:
            place, way = self._place[chain.row_numbers.gather.node], _way(chain.row_numbers.placement.shard)
            texts.append(f"join: numbers of all_gather {place}{way} with all_gather {data}")
        return texts

    def _hoist(self, chain: GatherChain, hoist: Hoist) -> str:
        own = self._place[chain.collective.node]
        told = {chain.collective.node: "own"}  # how a rank computes its part of each tensor, from its own shard on
        for step in hoist.computed:
            parts = {one: told[part.root] + _part(step, one, part) + _bits(part, one) for one, part in step.parts}
            filled = dict(step.filled)
            others = {one: _filled(one) if one in filled else self._elsewhere(one) for one in step.others}
            told[step.node] = _short(f"{called_name(step.node)}({', '.join(_arguments(step.node, parts | others))})")
        sent = [told[hoist.operand] + _laid_out(chain.placement)]
        if hoist.scale is not None and chain.scale_placement is not None:
            sent.append(f"scales {told[hoist.scale]}{_laid_out(chain.scale_placement)}")
        if hoist.row_numbers is not None:
            sent.append(f"along {told[hoist.row_numbers]}")
        extra = [f"over all ranks {told[one.step.node]}" for one in hoist.cross_rank]
        roots = dict.fromkeys(one.root for one in hoist.side_gathers if one.root is not hoist.row_numbers)
        extra += [f"apart {told[root]}" for root in roots]
        extra += ["and itself"] if hoist.still_needed_by else []
        return f"hoist: all_gather {own} sends {', '.join([*sent, *extra])}"

    def _elsewhere(self, node: fx.Node) -> str:
        """A tensor that is the same on all ranks: how it is made, as far as a collective."""
        texts: dict[fx.Node, str] = {}
        for one in sorted(reachable([node], self._made_of)):
            leaf = f"result {self._place[one]}" if one in self._place else "" if one.op == "call_function" else "input"
            texts[one] = leaf or _short(f"{called_name(one)}({', '.join(_arguments(one, texts))})")
        return texts[node]

    def _made_of(self, node: fx.Node) -> list[fx.Node]:
        """The tensors, and the lists of pieces of one, that a node is made of; none for a collective's result."""
        sources = [] if node in self._place else node.all_input_nodes
        return [one for one in sources if tensor_of(one) is not None or isinstance(one.meta.get("val"), list | tuple)]


def _early(early: EarlySum | None) -> str:
    """The sum that is done before a reduction: over how many, and how far apart they lie, unless they are parts."""
    if early is None:
        return ""
    apart = "" if same(early.outer, 1) else f" that are {_size(early.inner)} apart"
    return f"sum over {_size(early.count)}{apart} of "


def _filled(node: fx.Node) -> str:
    """A tensor of one number everywhere: how that is made, whatever the sizes are."""
    traits, sources = traits_of(node), [one for one in node.all_input_nodes if tensor_of(one) is not None]
    if traits.constant is not None:
        return f"{_argument(filling_of(node), {})} of {value_of(node).dtype}"
    if traits.view is not None and not traits.converts:
        return _filled(sources[0])
    return _short(f"{called_name(node)}({', '.join(_arguments(node, {one: _filled(one) for one in sources}))})")


def _arguments(node: fx.Node, texts: Mapping[fx.Node, str]) -> Iterator[str]:
    """All arguments of an op, tensors as they are told; a size that is not a number is known to this rank only."""
    yield from (_argument(value, texts) for value in (*node.args, *node.kwargs.values()))


def _argument(value: object, texts: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return texts.get(value, LOCAL)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_argument(item, texts) for item in value)}]"
    if isinstance(value, float):
        return value.hex()
    return LOCAL if isinstance(value, torch.SymInt | torch.SymFloat) else str(value)


def _part(step: Step, operand: fx.Node, part: Part) -> str:
    """The shape in which a step takes a part: as much of it as decides which elements meet.

    Sizes in front, the ranks' own among them, are left out where nothing depends on them: rows may be of any number.
    """
    if not part.way.is_reshape:
        return _way(part.way) + _sizes(part.shape)
    shape = list(part.shape)
    if reduces(step.node):
        rank, dims = len(shape), arguments(step.node).get("dim")
        first = min((dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))), default=0)
        return f"[*, {', '.join(map(_size, shape[first:]))}]" if first else _sizes(shape)
    last = shape[_alike(step, operand) :]
    return f"[*, {', '.join(map(_size, last))}]" if last else ""


def _bits(part: Part, operand: fx.Node) -> str:
    """The dtype in which the bits of a part are taken, where that is another one than they were computed in."""
    own, seen = value_of(part.root).dtype, value_of(operand).dtype
    return "" if own == seen else f" bits as {seen}"


def _alike(step: Step, operand: fx.Node) -> int:
    """How many dimensions from the first one on are rows to a pointwise op: no operand is repeated along them."""
    shapes, own = [part.shape for _, part in step.parts], dict(step.parts)[operand].shape
    if any(len(shape) != len(own) for shape in shapes):
        return 0
    alike = [all(same(shape[axis], own[axis]) for shape in shapes) for axis in range(len(own))]
    others = (value_of(other) for other in step.others if other not in dict(step.filled))
    wide = max((value.dim() for value in others if value.numel() != 1), default=0)
    return min(alike.index(False) if False in alike else len(own), max(len(own) - wide, 0))


def _laid_out(place: GatherPlacement) -> str:
    """How the operand takes the rows of a part, where that is rearranged; and that it is along the contraction."""
    return ("" if place.axis == "rows" else " along the contraction") + _way(place.shard)


def _way(way: Rearrangement) -> str:
    return "" if way.is_reshape else f" as {_sizes(way.sizes)} in the order {list(way.order)}"


def _sizes(sizes: Sequence[Size]) -> str:
    return f"[{', '.join(map(_size, sizes))}]"


def _size(size: Size) -> str:
    return str(size) if isinstance(size, int) else LOCAL


def _short(text: str) -> str:
    """A text, or of a long one its beginning and a hash."""
    if len(text) <= _LONGEST:
        return text
    mark = LOCAL if LOCAL in text else ""
    return f"{text[:60]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}{mark}"
