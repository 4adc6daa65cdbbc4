"""Gather again in the backward what the forward need not keep for it. Pure: `joint_pass` sets the tags.

    forward    shard ─▶ all_gather ─▶ wait ─▶ view* ─▶ product
    backward   shard ─▶ all_gather ─▶ wait ─▶ view* ─▶ weight's gradient     instead of keeping what was gathered

The gathered tensor has a shard's bytes for every rank, and is most of what a layer with sequence parallelism keeps for
its backward. Torch's partitioner keeps it, since it moves no collective on its own; where the gather and its views are
tagged as activation checkpointing tags what it computes again, it looks for the fewest bytes to keep before them: the
shard, or what the shard is cheaply computed from.

The joint graph of forward and backward is the only one in which that can be decided. A gather is made again if a fused
op of the forward takes it in, the backward needs more of it than what products made, and nobody has tagged it. Nothing
that the program can write to before the backward may be kept for it, as an input of the graph. Its group has to
communicate in the backward anyway: another rank may run no backward in which it need not communicate. `"auto"` also
asks that it is known to be worth a call, and to be overlapped: that matmuls of the backward which are in no fused op,
beside which the link is free, take as long as all such gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from asynctp_passes import compat, reasons
from asynctp_passes.ir.calls import Collective, nodes_of
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import mutates, traits_of
from asynctp_passes.ir.op_traits import WHOLE
from asynctp_passes.ir.records import Ballot
from asynctp_passes.ir.traversal import live, reachable, tangents_of
from asynctp_passes.layout.propagation import views_of
from asynctp_passes.matching.chains import Decision, fused_chains
from asynctp_passes.matching.near_miss import reduces, transparent
from asynctp_passes.planning import cost_model

__all__ = [
    "AGREED",
    "LEAST_BYTES",
    "REMATERIALIZED",
    "ProgramMemory",
    "Rematerialization",
    "agreed_jointly",
    "rematerializations",
]

REMATERIALIZED = "asynctp_rematerialized"
"""Key in the `meta` of a gather that the backward makes again: the bytes gathered, 0 where that is symbolic."""

AGREED = "asynctp_agreed"
"""Key in the `meta` of a collective of a joint graph: the ballot on which the ranks agreed to make such a gather again,
or to save the result of a reduction."""

LEAST_BYTES = 32 << 20
"""`"auto"` leaves a gather by which a rank receives fewer: the host takes as long to start it (0.1 ms), and a program
that moves so little waits for the host. Source: `docs/results/2026-11-22-h200x2/regather.txt`.
"""


def agreed_jointly(node: fx.Node, *, in_backward: bool) -> Ballot | None:
    """The ballot on the joint graph that decides on a collective of this half of it.

    A gather is made again in the backward. A sum is saved by the forward.
    """
    return node.meta.get(AGREED) if in_backward == (REMATERIALIZED in node.meta) else None


@dataclass(frozen=True)
class Rematerialization:
    """A gather that may be made again in the backward.

    Attributes:
        gather: The collective.
        nodes: Itself, its views, and what the backward needs of it: all that is computed again.
        saved: What these are computed from, as the shard, if it must be saved: computed again it would be read from
            memory of the program's.
        bytes: Of the gathered tensor; None where its size is symbolic.
        chosen: It is made again.
    """

    gather: Collective
    nodes: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]
    bytes: int | None
    chosen: bool


def rematerializations(
    graph: fx.Graph, decisions: Sequence[Decision], memory: ProgramMemory, rematerialize: str
) -> list[Rematerialization]:
    """The gathers of a joint graph that the backward needs too, in order, each with the choice.

    Args:
        graph: A joint graph, not yet partitioned.
        decisions: One for each of its collectives.
        memory: The memory that the program may write to before the backward.
        rematerialize: As in `Config`.
    """
    computed = reachable(tangents_of(graph), lambda node: node.users)
    backward = {node for node in computed if node.op == "call_function"}
    written = {source for node in graph.nodes if mutates(node) for source in node.all_input_nodes}
    unsure = reachable(written | compat.inputs_written_after(graph), lambda node: node.users)
    taken = (one for one in decisions if _is_taken_in(one, backward))
    ways = {one.candidate.collective: _ways(one, backward) for one in taken}
    groups = {one.candidate.collective.group_key for one in decisions if one.candidate.collective.node in backward}
    saved = {gather: memory.read_for(_made_again(gather, nodes)) for gather, nodes in ways.items() if nodes}
    gathers = [
        gather
        for gather, sources in saved.items()
        if gather.group_key in groups
        and _is_free(gather, ways[gather], unsure)
        and not any(memory.has(one) or compat.recompute_tag(one) is not None for one in sources)
    ]
    chosen = (
        _overlapped(gathers, decisions, backward)
        if rematerialize == "auto"
        else gathers
        if rematerialize == "always"
        else []
    )
    return [
        Rematerialization(
            one,
            _made_again(one, ways[one]),
            tuple(sorted(saved[one])),
            cost_model.bytes_of(one.node),
            one in chosen,
        )
        for one in gathers
    ]


def _gathered(gather: Collective) -> tuple[fx.Node, ...]:
    """The collective and what is laid out from it alone."""
    views, alone = views_of(gather.nodes), set(gather.nodes)
    for node in views:
        if all(source in alone or _is_number(source) for source in node.all_input_nodes):
            alone.add(node)
    return tuple(node for node in views if node in alone)


def _made_again(gather: Collective, way: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """All that is computed again: the gather, what is laid out from it alone, and the way to the backward."""
    return tuple(dict.fromkeys((*_gathered(gather), *way)))


def _is_number(node: fx.Node) -> bool:
    """True for a size, or what is computed from sizes."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _is_taken_in(decision: Decision, backward: set[fx.Node]) -> bool:
    """True for a gather that a fused op of the forward takes in, or would, but for what else needs it."""
    chain = decision.candidate.chain
    fused = decision.refusal is None or decision.refusal.reason is reasons.MOVES_MORE
    if chain is None or chain.collective.kind != "all_gather":
        return False
    return fused and any(one.node not in backward for one in chain.matmuls)


def _ways(decision: Decision, backward: set[fx.Node]) -> list[fx.Node]:
    """The nodes from a gather of the forward to those of the backward that need it, without a matmul in between.

    All of them have to be computed again. Else the partitioner may keep one, and leave the gather out on a rank that
    needs no more. A sum of the gathered tensor is small, and is kept: the backward does not need the gather for it.
    """
    results = decision.candidate.collective.results

    def leads_on(node: fx.Node) -> bool:
        return node in results or (transparent(node) and not reduces(node))

    steps = reachable(results, lambda node: node.users, leads_on)
    ends = [node for node in steps if any(user in backward for user in node.users)]
    way = reachable(ends, where=lambda node: node in steps and node not in backward)
    return sorted(way)


def _is_free(gather: Collective, way: Sequence[fx.Node], unsure: set[fx.Node]) -> bool:
    """True where it may be computed again: not tagged, nor returned, nor of what is written to."""
    nodes = {*views_of(gather.nodes), *way}
    returned = any(user.op == "output" for node in nodes for user in node.users)
    tagged = any(compat.recompute_tag(node) is not None for node in nodes)
    return not (returned or tagged) and unsure.isdisjoint(nodes)


class ProgramMemory:
    """Memory of a joint graph that the program may write to between forward and backward: of inputs and of results.

    Plain Inductor reads there in the backward only what the backward needs. A buffer in which the program receives may
    have other data by then.

    Args:
        graph: A joint graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._bases: dict[fx.Node, fx.Node] = {}
        wholes: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            source = next((one for one in node.all_input_nodes if not _is_number(one)), None)
            alias = source is not None and compat.may_alias(node)
            whole = alias and traits_of(node).view in WHOLE
            self._bases[node] = self._bases[source] if alias and source is not None else node
            wholes[node] = wholes[source] if whole and source is not None else node
        returned = {self._bases[node] for node in graph.output_node().all_input_nodes}
        inputs = {node for node in graph.nodes if node.op == "placeholder"}
        self._written = inputs | returned
        backward = reachable(tangents_of(graph), lambda node: node.users) & live(graph)
        needed = {wholes[source] for node in backward for source in node.all_input_nodes if node.op == "call_function"}
        self._read = set[fx.Node]()
        for node in graph.nodes:
            if _is_number(node) or wholes[node] in needed:
                continue
            again = not self._read.isdisjoint(node.all_input_nodes) and compat.may_be_recomputed(node)
            if again or self.has(node):
                self._read.add(node)

    def has(self, node: fx.Node) -> bool:
        """The node's values lie in such memory."""
        return self._bases[node] in self._written

    def read_for(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Inputs of nodes for which the backward may read such memory, although it needs none of that without them.

        It need not for those that do not lie there, if they are saved.
        """
        sources = {source for node in nodes for source in node.all_input_nodes} - set(nodes)
        return sources & self._read


def _overlapped(
    gathers: Sequence[Collective], decisions: Sequence[Decision], backward: set[fx.Node]
) -> list[Collective]:
    """Those of the gathers that are worth a call, if products in no fused op take as long as all of them."""
    received = ((gather, cost_model.received_bytes(gather.node, gather.group_size)) for gather in gathers)
    large = [(gather, size) for gather, size in received if size is not None and size >= LEAST_BYTES]
    fused = {node for chain in fused_chains(decisions) for node in nodes_of(chain.matmuls)}
    work = [cost_model.work_of(node) for node in backward if is_matmul(node) and node not in fused]
    overlap = large and cost_model.covers(work, sum(size for _, size in large), gathers[0].node)
    return [gather for gather, _ in large] if overlap else []
