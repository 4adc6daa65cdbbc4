"""The vocabulary of the pass: frozen values that travel from `find` to `decide` to `rewrite`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.calls import Collective, Matmul
from asynctp_passes.ir.sizes import Size
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import GatherPlacement, Rearrangement, ScatterPlacement, arranged
from asynctp_passes.reasons import Refusal

__all__ = [
    "Bucket",
    "Candidate",
    "CrossRankReduction",
    "Decision",
    "GatherChain",
    "Hoist",
    "Part",
    "Passenger",
    "ScatterChain",
    "SideGather",
    "Step",
    "Term",
    "anchor",
    "collectives_of",
    "fused_chains",
]


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor: its part of `root`, rearranged, with dimensions `shape`."""

    root: fx.Node
    way: Rearrangement
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Step:
    """An op that every rank applies to its parts of the operands in `parts`, and so gets its part of `node`."""

    node: fx.Node
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parts: tuple[tuple[fx.Node, Part], ...]

    @property
    def others(self) -> tuple[fx.Node, ...]:
        """The operands that are the same on all ranks, and are taken whole."""
        found: list[fx.Node] = []
        fx.map_arg((self.args, self.kwargs), found.append)
        return tuple(node for node in dict.fromkeys(found) if node not in dict(self.parts))


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
class Passenger:
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
        passenger: The root of those that has one fp32 number per row, which travels with the operand instead.
        kept: Other users of what is computed from the gathered tensor; for them the original gather stays.
        overlapped_by: The matmuls after the fused op that run before the first of those users, beside that gather.
    """

    steps: tuple[Step, ...]
    operand: fx.Node
    scale: fx.Node | None
    inside: tuple[fx.Node, ...]
    cross_rank: tuple[CrossRankReduction, ...] = ()
    copies: tuple[fx.Node, ...] = ()
    side_gathers: tuple[SideGather, ...] = ()
    passenger: fx.Node | None = None
    kept: tuple[fx.Node, ...] = ()
    overlapped_by: tuple[fx.Node, ...] = ()

    @property
    def computed(self) -> tuple[Step, ...]:
        """All that a rank computes on its shard: the ops, then its parts of the reductions over all ranks' rows."""
        return (*self.steps, *(one.step for one in self.cross_rank))

    @property
    def travels(self) -> tuple[fx.Node, ...]:
        """The tensors whose parts the fused op gathers."""
        return tuple(node for node in (self.operand, self.scale, self.passenger) if node is not None)


@dataclass(frozen=True)
class GatherChain:
    """`shard → all_gather → wait → view* → matmul+`: one gather and the matmuls that take it as their left operand.

    All matmuls share `placement`, and the options of a scaled matmul. `views` lie between the wait and the
    operands. `returned` is what other users than the matmuls get from the fused op: the matmuls' one operand, or the
    gathered tensor itself. `scale` is the gather that brings the shard's scales, of rows or blocks, when the program
    gathers them too, and `scale_placement` where it puts them. `passenger` is one of numbers that scale the matmuls'
    results instead. With a `hoist`, `views` holds the ops between too, and placements are those of its operand and
    scale. The fused op stands where the gather does, unless what it needs besides depends on a later communication:
    then it `follows` that, and ranks must agree on it, since the gather changes its place among the collectives.
    """

    collective: Collective
    matmuls: tuple[Matmul, ...]
    placement: GatherPlacement
    views: tuple[fx.Node, ...]
    returned: fx.Node | None
    scale: Collective | None = None
    scale_placement: GatherPlacement | None = None
    passenger: Passenger | None = None
    hoist: Hoist | None = None
    follows: fx.Node | None = None

    @property
    def shard(self) -> fx.Node:
        """This rank's part of the gathered tensor."""
        return self.collective.source

    @property
    def whole_scale(self) -> fx.Node | None:
        """The scales of which the fused op gathers the ranks' parts too: gathered ones, or computed from such data."""
        if self.scale is not None:
            return self.scale.node
        return None if self.hoist is None else self.hoist.scale

    @property
    def whole_passenger(self) -> fx.Node | None:
        """The numbers of which it gathers the ranks' parts too, to return them."""
        if self.passenger is not None:
            return self.passenger.gather.node
        return None if self.hoist is None else self.hoist.passenger

    @property
    def joined(self) -> tuple[Collective, ...]:
        """The gathers besides that of the data that the fused op stands for."""
        passenger = None if self.passenger is None else self.passenger.gather
        return tuple(gather for gather in (self.scale, passenger) if gather is not None)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors whose sizes the fused op's shapes follow from."""
        return (self.shard,)

    @property
    def needs(self) -> tuple[fx.Node, ...]:
        """The nodes that the fused op reads besides the shard, and the hoisted ops besides their parts."""
        gathered = {self.matmuls[0].scaled.a_scale} if self.scale_placement and self.matmuls[0].scaled else set()
        operands = [node for matmul in self.matmuls for node in matmul.operands if node not in gathered]
        others = [node for step in (self.hoist.computed if self.hoist else ()) for node in step.others]
        return (*operands, *others, *(gather.source for gather in self.joined))


@dataclass(frozen=True)
class Term:
    """A tensor that is added to products, element for element: `factor` times (as `Matmul.factor`)."""

    node: fx.Node
    factor: float


@dataclass(frozen=True)
class ScatterChain:
    """`(matmul → view* →) sum → view* → reduce_scatter → wait`: the matmuls whose sum is scattered.

    Or all-reduced: then `placement` is None, since every rank gets the whole sum. `way` is the map of what is reduced,
    from the products on. `sum_dtype` is what the products are converted to, without loss, before they travel; None
    where they stay what they are. `views` lie between the matmuls and the collective, sums among them. `added` has the
    other terms of the sum: what is computed before. The whole sum is taken `factor` times (as `Matmul.factor`).

    Where several collectives' results are summed (`summed`), the chain has the products of all, and stands for them:
    `collective` is the last that has products, `joined` has the others, and `after` the nodes that make the sum of
    their results. `crossing` has how many times each of these counts in the sum, which goes to the factors of the
    terms. What the sum adds besides, `added_after`, is added to the fused op's result.
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

    @property
    def sent(self) -> Rearrangement:
        """How the collective takes the elements of a product, or of a rank's block of it: the order on the way."""
        return arranged(self.way) if self.placement is None else self.placement.out

    @property
    def factors(self) -> tuple[float, ...]:
        """The factor of each product, and one more for the sum if that has one; empty where all are 1."""
        found = (*(matmul.factor for matmul in self.matmuls), *([] if self.factor == 1 else [self.factor]))
        return () if set(found) == {1.0} else found

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors whose sizes the fused op's shapes follow from."""
        return tuple(matmul.a for matmul in self.matmuls)


def anchor(chain: GatherChain | ScatterChain) -> fx.Node:
    """The node of a chain in whose place the fused op is put: where all ranks communicate.

    That is its collective, or what it follows. Of a sum of several it is the last one.
    """
    if isinstance(chain, GatherChain):
        return chain.follows or chain.collective.start
    return max(member.start for member in collectives_of(chain))


def collectives_of(chain: GatherChain | ScatterChain) -> tuple[Collective, ...]:
    """The collectives that a chain's fused op stands for."""
    return (chain.collective, *chain.joined)


@dataclass(frozen=True)
class Bucket:
    """`(x → all_reduce → wait)+`: all-reduces, in graph order, that become one in front of the node `place`.

    `place` is a member's collective, or the one of a chain that must not start before.
    """

    members: tuple[Collective, ...]
    place: fx.Node

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
    why they are not fused. `weights` tells that the collective looks like one of parameters or of their gradients, as
    FSDP has them: see `find`.
    """

    collective: Collective
    chain: GatherChain | ScatterChain | None
    refusals: tuple[Refusal, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    joins: Candidate | None = None
    left_out: tuple[str, ...] = ()
    weights: bool = False


@dataclass(frozen=True)
class Decision:
    """The outcome for one candidate: `refusal is None` means FUSED.

    `overlaps_with` has the matmuls that a collective, not fused, is to run beside: it starts before the first of them,
    and is waited for after the last.
    """

    candidate: Candidate
    refusal: Refusal | None
    overlaps_with: tuple[fx.Node, ...] = ()


def fused_chains(decisions: Iterable[Decision]) -> list[GatherChain | ScatterChain]:
    """The chains that become one op each, in the order of their collectives."""
    chains = (decision.candidate.chain for decision in decisions if decision.refusal is None)
    return [chain for chain in chains if chain is not None]
