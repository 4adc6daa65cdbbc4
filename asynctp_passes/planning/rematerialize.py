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
from asynctp_passes.ir.records import Ballot
from asynctp_passes.ir.traversal import live, reachable, tangents_of
from asynctp_passes.layout.propagation import is_view, views_of
from asynctp_passes.matching.chains import Decision, fused_chains
from asynctp_passes.matching.near_miss import reduces, transparent
from asynctp_passes.planning import cost_model

__all__ = [
    "AGREED",
    "LEAST_BYTES",
    "REMATERIALIZED",
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
        bytes: Of the gathered tensor; None where its size is symbolic.
        chosen: It is made again.
    """

    gather: Collective
    nodes: tuple[fx.Node, ...]
    bytes: int | None
    chosen: bool


def rematerializations(graph: fx.Graph, decisions: Sequence[Decision], rematerialize: str) -> list[Rematerialization]:
    """The gathers of a joint graph that the backward needs too, in order, each with the choice.

    Args:
        graph: A joint graph, not yet partitioned.
        decisions: One for each of its collectives.
        rematerialize: As in `Config`.
    """
    computed = reachable(tangents_of(graph), lambda node: node.users)
    backward = {node for node in computed if node.op == "call_function"}
    programs = _of_the_program(graph, backward & live(graph))
    written = {source for node in graph.nodes if mutates(node) for source in node.all_input_nodes}
    unsure = reachable(written | compat.inputs_written_after(graph), lambda node: node.users)
    taken = (one for one in decisions if _is_taken_in(one, backward))
    ways = {one.candidate.collective: _ways(one, backward) for one in taken}
    groups = {one.candidate.collective.group_key for one in decisions if one.candidate.collective.node in backward}
    gathers = [
        gather
        for gather, nodes in ways.items()
        if nodes
        and gather.group_key in groups
        and _is_free(gather, nodes, unsure)
        and not any(programs.intersection(node.all_input_nodes) for node in _made_again(gather, nodes))
    ]
    chosen = (
        _overlapped(gathers, decisions, backward)
        if rematerialize == "auto"
        else gathers
        if rematerialize == "always"
        else []
    )
    return [
        Rematerialization(one, _made_again(one, ways[one]), cost_model.bytes_of(one.node), one in chosen)
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


def _of_the_program(graph: fx.Graph, needing: set[fx.Node]) -> set[fx.Node]:
    """Nodes that the backward may get only from an input or a result of the graph which it does not need without them.

    The program may write to such a tensor before the backward, as to a buffer in which it receives. All others it gets
    from what it needs anyway, or from what only the graph has: the result of an op that the partitioner never repeats.

    Args:
        graph: A joint graph.
        needing: The nodes of its backward.
    """
    found = set[fx.Node]()
    for node in graph.nodes:
        users = {user for one in _aliases(node) for user in one.users}
        if _is_number(node) or not users.isdisjoint(needing):
            continue
        known = node.op == "placeholder" or any(user.op == "output" for user in users)
        if known or (not found.isdisjoint(node.all_input_nodes) and compat.may_be_recomputed(node)):
            found.add(node)
    return found


def _aliases(node: fx.Node) -> list[fx.Node]:
    """The node and views of it that lie in the same memory, or may."""
    found = [node]
    for one in found:
        found += (user for user in one.users if is_view(user) and not traits_of(user).copies and user not in found)
    return found


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
