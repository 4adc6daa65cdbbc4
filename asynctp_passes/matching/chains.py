"""The vocabulary of the pass: frozen values that travel from `find` to `plan` to `rewrite`.

Each is proven or chosen by one function, and becomes nodes by another:

    value            is proven or chosen by              becomes nodes by
    GatherChain      match_gather.match_gather           emit_gather.emit_gather
      its matmuls    gather_chains.placed_matmuls        emit_gather.emit_gather
      Hoist          gather_chains.chains_of             emit_gather.parts_on_shard
      SideGather     gather_chains.chains_of             emit_gather.start_side_gathers
      Cut            cut_rows.find_cuts                  emit_gather.emit_gather
    ScatterChain     match_reduction.match_reduction     emit_reduction.emit_reduction
      its matmuls    scaled_epilogue.read_scaled_result  emit_reduction.emit_reduction
      Padding        padding.find_padding                emit_reduction.emit_reduction
      several sums   linear_sums.summed                  emit_reduction.emit_reduction
      OwnPart        own_part.own_part                   emit_reduction.emit_reduction
    Bucket           bucketing.find_buckets              emit_alone.emit_bucket
    no chain         legality.can_be_alone               emit_alone.emit_alone
      OwnPart        own_part.own_part                   emit_alone.emit_own_parts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.collectives import waits_for_several
from asynctp_passes.ir.nodes import is_size, nodes_in, tensor_of
from asynctp_passes.ir.operations import Collective, Matmul, nodes_of
from asynctp_passes.ir.sizes import Size, Sizes
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import GatherPlacement, Rearrangement, ScatterPlacement, arranged
from asynctp_passes.layout.propagation import views_of
from asynctp_passes.matching.cut_rows import Cut
from asynctp_passes.matching.padding import Padding
from asynctp_passes.reasons import RESULT_DROPPED, Refusal


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor: its part of `root`, rearranged, with dimensions `shape`."""

    root: fx.Node
    way: Rearrangement
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Step:
    """An op that every rank applies to its parts of the operands in `parts`, and so gets its part of `node`.

    `filled` has the other operands with a value for each row, the same number in all, and the dimension of the rows.
    """

    node: fx.Node
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parts: tuple[tuple[fx.Node, Part], ...]
    filled: tuple[tuple[fx.Node, int], ...] = ()

    @property
    def others(self) -> tuple[fx.Node, ...]:
        """The operands that are the same on all ranks, and are taken whole."""
        found = dict.fromkeys(nodes_in((self.args, self.kwargs)))
        return tuple(node for node in found if node not in dict(self.parts))


@dataclass(frozen=True)
class CrossRankReduction:
    """A maximum (or minimum) over all ranks' rows: that of what the ranks find in their parts, by `step`, and gather.

    `nodes` has all nodes with that result; `needed` tells that the fused op waits for it.
    """

    step: Step
    nodes: tuple[fx.Node, ...]
    needed: bool


@dataclass(frozen=True)
class SideGather:
    """A small tensor, [outer, ranks, inner] row-major, that is gathered on its own for users besides the matmuls.

    `root` is the tensor of the same values whose part is computed.
    """

    node: fx.Node
    root: fx.Node
    outer: Size
    inner: Size


@dataclass(frozen=True)
class RowNumbers:
    """A gather of fp32 numbers, one per row of the data, that scale only the matmuls' results.

    They travel with the data, and the fused op returns them: `end` is the view of them that is used, laid out over the
    rows as `placement` says.
    """

    gather: Collective
    placement: GatherPlacement
    end: fx.Node


@dataclass(frozen=True)
class Hoist:
    """Computation on the shard in place of the gathered tensor (`shard_region` proves that it is the same).

    Attributes:
        steps: The ops, in graph order.
        cross_rank: The reductions over all ranks' rows, but for those that only others need while the gather stays.
        copies: Tensors that hold what the operand holds, for other users: copies of what the fused op returns.
        operand: The tensor whose part is gathered in place of the shard: the matmuls take views of it.
        scale: The tensor whose part travels as the rows' scales, if they too are computed from the gathered tensor.
        inside: All that is computed from the gathered tensor by such ops; without users, it goes.
        side_gathers: Small tensors that others use, each gathered on its own.
        row_numbers: The root of those that has one fp32 number per row, which travels with the operand instead.
        still_needed_by: Other users of what is computed from the gathered tensor; for them the original gather stays.
        overlapped_by: The matmuls after the fused op that run before the first of those users, beside that gather.
    """

    steps: tuple[Step, ...]
    operand: fx.Node
    scale: fx.Node | None
    inside: tuple[fx.Node, ...]
    cross_rank: tuple[CrossRankReduction, ...] = ()
    copies: tuple[fx.Node, ...] = ()
    side_gathers: tuple[SideGather, ...] = ()
    row_numbers: fx.Node | None = None
    still_needed_by: tuple[fx.Node, ...] = ()
    overlapped_by: tuple[fx.Node, ...] = ()

    @property
    def computed(self) -> tuple[Step, ...]:
        """All that a rank computes on its shard: the ops, then its parts of the reductions over all ranks' rows."""
        return (*self.steps, *(one.step for one in self.cross_rank))

    def sizes_written(self, sizes: Sizes) -> list[Size]:
        """The sizes that are written down to compute on the shard, and to gather small tensors on their own."""
        parts = [part for step in self.computed for _, part in step.parts]
        made = (*(one.node for one in self.side_gathers), *(one.step.node for one in self.cross_rank), *self.copies)
        return [
            *(size for part in parts for size in (*part.way.sizes, *part.shape)),
            *(size for one in self.side_gathers for size in (one.outer, one.inner)),
            *(size for shape in _known(made, sizes) for size in shape),
        ]

    @property
    def gathered(self) -> tuple[fx.Node, ...]:
        """The tensors whose parts the fused op gathers."""
        return tuple(node for node in (self.operand, self.scale, self.row_numbers) if node is not None)


class _Chain:
    """Questions that both kinds of chain answer for themselves. A reduction's chain has no `hoist`, nor `follows`."""

    collective: Collective
    matmuls: tuple[Matmul, ...]
    views: tuple[fx.Node, ...]
    hoist: Hoist | None = None
    follows: fx.Node | None = None

    @property
    def joined(self) -> tuple[Collective, ...]:
        """The collectives besides its own that the fused op stands for."""
        return ()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives that the fused op stands for."""
        return (self.collective, *self.joined)

    @property
    def members(self) -> list[fx.Node]:
        """The nodes that become one: the collectives, the views and the matmuls.

        Not a wait for several tensors, which other chains may need too: its items count as what they are. Nor the sum
        of results, which has terms besides that the fused op can do without.
        """
        results = [node for collective in self.collectives for node in collective.results]
        return [*results, *(node for node in self.views if not waits_for_several(node)), *nodes_of(self.matmuls)]

    @property
    def placed_by(self) -> tuple[Collective, ...]:
        """The collectives whose last one tells the place of the fused op, unless that follows something."""
        return (self.collective,)

    @property
    def anchor(self) -> fx.Node:
        """The node in whose place the fused op is put, where all ranks communicate."""
        return self.follows or max(one.start for one in self.placed_by)

    def _readers_of_sizes(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [user for node in nodes for user in node.users if is_size(user)]


@dataclass(frozen=True)
class GatherChain(_Chain):
    """`shard → all_gather → wait → view* → matmul+`: one gather and the matmuls that take it as their left operand.

    All matmuls share `placement`, and the options of a scaled matmul. `views` lie between the wait and the
    operands. `returned` is what other users than the matmuls get from the fused op: the matmuls' one operand, or the
    gathered tensor itself. `scale` is the gather that brings the shard's scales, of rows or blocks, when the program
    gathers them too, and `scale_placement` where it puts them. `row_numbers` is one of numbers that scale the matmuls'
    results instead. With a `hoist`, `views` holds the ops between too, and placements are those of its operand and
    scale. The fused op stands where the gather does, unless what it needs besides depends on a later communication:
    then it `follows` that, and ranks must agree on it, since the gather changes its place among the collectives. `cuts`
    has the operands that lack some of the gathered rows: the fused op takes all rows, and they are cut off its results.
    Or all operands are ranges: it takes of each its rows alone.
    """

    collective: Collective
    matmuls: tuple[Matmul, ...]
    placement: GatherPlacement
    views: tuple[fx.Node, ...]
    returned: fx.Node | None
    scale: Collective | None = None
    scale_placement: GatherPlacement | None = None
    row_numbers: RowNumbers | None = None
    hoist: Hoist | None = None
    follows: fx.Node | None = None
    cuts: tuple[Cut, ...] = ()

    @property
    def takes_ranges(self) -> bool:
        """True where each matmul takes a range of the gathered rows."""
        return any(cut.is_range for cut in self.cuts)

    @property
    def shard(self) -> fx.Node:
        """This rank's part of the gathered tensor."""
        return self.collective.source

    @property
    def gathered_scale(self) -> fx.Node | None:
        """The scales of which the fused op gathers the ranks' parts too: gathered ones, or computed from such data."""
        if self.scale is not None:
            return self.scale.node
        return None if self.hoist is None else self.hoist.scale

    @property
    def gathered_row_numbers(self) -> fx.Node | None:
        """The numbers of which it gathers the ranks' parts too, to return them."""
        if self.row_numbers is not None:
            return self.row_numbers.gather.node
        return None if self.hoist is None else self.hoist.row_numbers

    @property
    def joined(self) -> tuple[Collective, ...]:
        """The gathers besides that of the data that the fused op stands for."""
        row_numbers = None if self.row_numbers is None else self.row_numbers.gather
        return tuple(gather for gather in (self.scale, row_numbers) if gather is not None)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors whose sizes the fused op's shapes follow from."""
        return (self.shard,)

    @property
    def kind(self) -> str:
        """The name of the fused op."""
        return "all_gather_matmul"

    @property
    def sent(self) -> Rearrangement:
        """How the shard's elements are taken: the order on the way."""
        return self.placement.shard

    @property
    def replaceable(self) -> list[fx.Node]:
        """The collectives' results, what is computed from them, and every view of them, used or not."""
        results = [node for gather in self.collectives for node in gather.results]
        return views_of([*results, *(() if self.hoist is None else self.hoist.inside)])

    @property
    def size_readers(self) -> list[fx.Node]:
        """The nodes that read sizes of what the rewrite does away with; it reads them off the chain's inputs."""
        return self._readers_of_sizes(self.replaceable)

    @property
    def made_anew(self) -> list[fx.Node]:
        """The tensors besides inputs and operands from whose values those of new nodes are computed."""
        nodes = [joined.source for joined in self.joined]
        if self.hoist is not None:
            nodes += [node for step in self.hoist.computed for node in (step.node, *step.others, *dict(step.parts))]
            nodes += [one.node for one in self.hoist.side_gathers]
        return nodes

    def sizes_written(self, sizes: Sizes) -> list[Size]:
        """The sizes of the views around the fused op, and of what is computed on the shard or gathered on its own."""
        whole = (cut.whole for cut in self.cuts)
        nodes = (self.collective.node, *(matmul.node for matmul in self.matmuls), *whole, *self.inputs)
        beside = [self.scale_placement, None if self.row_numbers is None else self.row_numbers.placement]
        ways = [self.placement.shard, *(one.shard for one in beside if one is not None)]
        ends = [size for cut in self.cuts for size in (cut.first, cut.end)]
        found = [*_placed(self.placement, ways, _known(nodes, sizes)), *ends]
        return found if self.hoist is None else [*found, *self.hoist.sizes_written(sizes)]

    @property
    def needs(self) -> tuple[fx.Node, ...]:
        """The nodes that the fused op reads besides the shard, and the hoisted ops besides their parts."""
        scaled = [matmul.scaled for matmul in self.matmuls if matmul.scaled is not None and self.scale_placement]
        gathered = {one.a_scale for one in scaled}
        operands = [node for matmul in self.matmuls for node in matmul.operands if node not in gathered]
        others = [node for step in (self.hoist.computed if self.hoist else ()) for node in step.others]
        return (*operands, *others, *(gather.source for gather in self.joined))


@dataclass(frozen=True)
class EarlySum:
    """A sum over a dimension of what `collective` reduces, that is done before it instead of after it.

    What is reduced is seen as [outer, count, inner], and summed over `count`. `total` is the sum in the program, and
    `nodes` has the collective's results, the views of them, and that.
    """

    collective: Collective
    total: fx.Node
    nodes: tuple[fx.Node, ...]
    outer: Size
    count: Size
    inner: Size


@dataclass(frozen=True)
class Term:
    """A tensor that is added to products, element for element: `factor` times (as `Matmul.factor`).

    With an `early` sum it is that sum of it which is added.
    """

    node: fx.Node
    factor: float
    early: EarlySum | None = None


@dataclass(frozen=True)
class OwnPart:
    """This rank's part of an all-reduced tensor: all of it that the rank uses.

    Attributes:
        rank: This rank's number in the group, and that of the part.
        shape: Of the part; the ranks' parts are stacked in what is reduced.
        ends: Views that hold the part.
        views: The views of the whole that lead to these alone.
        by_place: Other nodes use the part by its place in the whole.
    """

    rank: int
    shape: tuple[Size, ...]
    ends: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    by_place: bool

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The views, and the ends."""
        return (*self.views, *self.ends)


@dataclass(frozen=True)
class ScatterChain(_Chain):
    """`(matmul → view* →) sum → view* → reduce_scatter → wait`: the matmuls whose sum is scattered.

    Or all-reduced: then `placement` is None, since every rank gets the whole sum. `way` is the map of what is reduced,
    from the products on. `sum_dtype` is what the products are converted to, without loss, before they travel; None
    where they stay what they are. `views` lie between the matmuls and the collective, sums among them. `added` has the
    other terms of the sum: what is computed before. The whole sum is taken `factor` times (as `Matmul.factor`).

    Where several collectives' results are summed (`summed`), the chain has the products of all, and stands for them:
    `collective` is the last that has products, `joined` has the others, and `after` the nodes that make the sum of
    their results. `crossing` has how many times each of these counts in the sum, which goes to the factors of the
    terms. What the sum adds besides, `added_after`, is added to the fused op's result. `early` has the sums over a
    dimension of what a member reduces, where that is what is summed with the others.

    With a `padding`, `way` and `placement` are those of the padded product. With an `own_part`, the
    program all-reduces the sum, and the fused op scatters it.
    """

    collective: Collective
    matmuls: tuple[Matmul, ...]
    way: IndexMap
    placement: ScatterPlacement | None
    views: tuple[fx.Node, ...]
    sum_dtype: torch.dtype | None = None
    added: tuple[Term, ...] = ()
    factor: float = 1.0
    joined: tuple[Collective, ...] = ()
    after: tuple[fx.Node, ...] = ()
    added_after: tuple[Term, ...] = ()
    crossing: tuple[tuple[fx.Node, float], ...] = ()
    padding: Padding | None = None
    own_part: OwnPart | None = None

    @property
    def sent(self) -> Rearrangement:
        """How the collective takes the elements of a product, or of a rank's block of it: the order on the way."""
        return arranged(self.way) if self.placement is None else self.placement.out

    @property
    def kind(self) -> str:
        """The name of the fused op."""
        return "matmul_all_reduce" if self.placement is None else "matmul_reduce_scatter"

    @property
    def placed_by(self) -> tuple[Collective, ...]:
        """The collectives whose last one tells the place of the fused op: those of all terms of a sum."""
        return self.collectives

    @property
    def replaceable(self) -> list[fx.Node]:
        """The views between the matmuls and the collective, the sum of several results, and the way to a part."""
        return [*self.views, *self.after, *(() if self.own_part is None else self.own_part.nodes)]

    @property
    def size_readers(self) -> list[fx.Node]:
        """The nodes that read sizes of what the rewrite does away with; it reads them off the chain's inputs."""
        whole = self.collective.results if self.own_part is not None and not self.own_part.by_place else ()
        return self._readers_of_sizes([*self.views, *nodes_of(self.matmuls), *whole])

    @property
    def made_anew(self) -> list[fx.Node]:
        """The tensors besides inputs and operands from whose values those of new nodes are computed."""
        return [term.node for term in (*self.added, *self.added_after)]

    def sizes_written(self, sizes: Sizes) -> list[Size]:
        """The sizes of the views around the fused op; an all-reduce of matrices has none but the program's own."""
        early = self.early.values()
        others = [*self.made_anew, *(one.node for one in self.joined), *(one.total for one in early)]
        nodes = (self.collective.node, *(matmul.node for matmul in self.matmuls), *others, *self.inputs)
        known = [*_known(nodes, sizes), *((one.outer, one.count, one.inner) for one in early)]
        if self.own_part is not None:
            known += [self.own_part.shape, *_known(self.own_part.ends, sizes)]
        if self.padding is not None:
            known += [self.padding.before, self.padding.after, (self.padding.more, self.padding.real_rows)]
        if self.placement is not None:
            return _placed(self.placement, [self.placement.out], known)
        rows = None if self.sent.is_reshape else self.sent.of_rows(known[1][-1])
        plain = rows is None and all(len(shape) == 2 for shape in known[1:])
        return [] if plain else [*(size for shape in known[1:] for size in shape), *(rows.sizes if rows else ())]

    @property
    def early(self) -> dict[fx.Node, EarlySum]:
        """The sums that are done before a member's reduction, by the member."""
        return {term.early.collective.node: term.early for term in self.added if term.early is not None}

    @property
    def factors(self) -> tuple[float, ...]:
        """The factor of each product, and one more for the sum if that has one; empty where all are 1."""
        found = (*(matmul.factor for matmul in self.matmuls), *([] if self.factor == 1 else [self.factor]))
        return () if set(found) == {1.0} else found

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors whose sizes the fused op's shapes follow from."""
        return tuple(matmul.a for matmul in self.matmuls)


Chain = GatherChain | ScatterChain


def _known(nodes: Iterable[fx.Node], sizes: Sizes) -> list[tuple[Size, ...]]:
    """The sizes of those nodes that are tensors."""
    return [sizes.of(tensor) for tensor in map(tensor_of, nodes) if tensor is not None]


def _placed(
    place: GatherPlacement | ScatterPlacement, ways: Sequence[Rearrangement], known: Sequence[Sequence[Size]]
) -> list[Size]:
    """The sizes of a placement, of the rearrangements of what travels, and of tensors."""
    moved = [size for way in ways for size in way.sizes]
    return [place.outer, place.inner, place.width, *moved, *(size for shape in known for size in shape)]


@dataclass(frozen=True)
class Bucket:
    """`(x → all_reduce → wait)+`: all-reduces, in graph order, that become one in front of the node `place`.

    `place` is a member's collective, or what communicates next. Where it is a fused chain, `chain`, it is the place of
    the fused op. Others of a graph may lie between the same two collectives of the program: `earlier` are those in
    front of this one.
    """

    members: tuple[Collective, ...]
    place: fx.Node
    chain: Chain | None = None
    earlier: tuple[Bucket, ...] = ()

    @property
    def collective(self) -> Collective:
        """The first member, which the others are like."""
        return self.members[0]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors that the members reduce."""
        return tuple(member.source for member in self.members)


@dataclass(frozen=True)
class Candidate:
    """A collective and what `find` could prove about it: a chain, or the refusals met on the way.

    `joins` is the candidate whose chain this collective is part of: a gather of scales that of their data's gather, a
    reduction that of the last one of a sum. `left_out` says what other matmuls the chain's gathered tensor goes to, and
    why they are not fused. `weights` is the evidence that the collective is one of parameters or of their gradients, as
    FSDP has them, and `may_be_weights` tells that it is if its group gathers some: see `find`. `own_part` is what a
    rank uses of an all-reduce, if that can be a reduce-scatter.
    """

    collective: Collective
    chain: Chain | None
    refusals: tuple[Refusal, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    joins: Candidate | None = None
    left_out: tuple[str, ...] = ()
    weights: str = ""
    may_be_weights: bool = False
    own_part: OwnPart | None = None

    @property
    def proven(self) -> Chain:
        """The chain of a candidate that is known to have one."""
        assert self.chain is not None
        return self.chain


@dataclass(frozen=True)
class Decision:
    """The outcome for one candidate: `refusal is None` means FUSED.

    `overlaps_with` has the matmuls that a collective, not fused, is to run beside: it starts before the first of them,
    and is waited for after the last.
    """

    candidate: Candidate
    refusal: Refusal | None
    overlaps_with: tuple[fx.Node, ...] = ()


def fused_chains(decisions: Iterable[Decision]) -> list[Chain]:
    """The chains that become one op each, in the order of their collectives."""
    chains = (decision.candidate.chain for decision in decisions if decision.refusal is None)
    return [chain for chain in chains if chain is not None]


def dropped_collectives(decisions: Iterable[Decision]) -> list[Collective]:
    """The collectives that are not made, since nothing uses them."""
    refused = ((one.candidate.collective, one.refusal) for one in decisions)
    return [collective for collective, refusal in refused if refusal and refusal.reason is RESULT_DROPPED]
