"""The pass over a graph of a forward and its backward, before torch divides it: mark gathers, save sums, note order.

    tagged     product (save) ─▶ view* ─▶ all_reduce ─▶ wait             the forward returns the product: never fused
    instead    product ─▶ view* ─▶ all_reduce ─▶ wait (save)             the forward returns the sum

Policies of activation checkpointing that save matmuls know no collectives. The backward would reduce the product again.
The sum has the same values, takes no more bytes, and saves a call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.config import Config
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import mutates
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.order import CANDIDATE, communications, note_joint, record_order
from asynctp_passes.ir.traversal import reachable, tangents_of
from asynctp_passes.matching.chains import Decision, ScatterChain, fused_chains
from asynctp_passes.planning import cost_model
from asynctp_passes.planning.deviations import communicated
from asynctp_passes.planning.plan import decide_graph
from asynctp_passes.ranks.undo import UndoOnError
from asynctp_passes.remat.expressible import owners_of, program_memory, repeatable_uses
from asynctp_passes.reporting.report import Report
from asynctp_passes.rewriting import toposort
from asynctp_passes.torch_private import partitioner

log = logging.getLogger(__name__)


def run_joint(graph: fx.Graph, config: Config) -> Report | None:
    """Mark, in a graph of a forward and its backward, the gathers that are worth being made again in the backward.

    What becomes of them `partition` decides, once the graph is divided. Sums are tagged to be saved in place of
    products that checkpointing saves. Tags change nothing that is computed: the partitioner, which comes next, follows
    them. In any graph the order of communication is noted, for `run` to restore.

    Args:
        graph: A joint graph, as Inductor hands it to a joint pass.
        config: The configuration.

    Returns:
        A report where asynctp itself failed, which left the graph as it was; else None: both graphs get reports.

    Raises:
        DisagreementError: asynctp failed on the graph after all ranks had agreed on something; the graph is untouched.
        StrictError: asynctp itself failed, and `config.strict` forbids it; the graph is untouched.
    """
    attempt = UndoOnError(graph, config, "joint")
    with attempt:
        if communications(graph.nodes):  # any other graph is left to Inductor, which sorts it after this pass
            toposort.sort(graph)
            record_order(graph)
            if tangents_of(graph):
                _tag(graph, config, attempt)
        return None
    return attempt.fall_back()


def _tag(graph: fx.Graph, config: Config, attempt: UndoOnError) -> None:
    decisions, context = decide_graph(graph, config)
    words = context.words
    for gather in rematerialization_candidates(graph, decisions, config.rematerialize):
        if context.compares_all(gather.group_key):
            gather.node.meta[CANDIDATE] = words.place_of(gather)
    wanted = {
        (one.collective.group_key, words.of_saved(one.collective)): one
        for one in _sums_to_save(graph, decisions)
        if context.compares_all(one.collective.group_key)
    }
    done, told = attempt.agree(communicated(one.candidate.collective for one in decisions), wanted)
    for one in done:
        partitioner.save_instead(one.results, one.tagged)
    note_joint(graph, told)


class _Sum(NamedTuple):
    """A reduction of a forward, of products that are tagged to be saved; `tagged`: from these to what is reduced.

    `results` are what the rank uses of it: all of it, or its own part.
    """

    collective: Collective
    tagged: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def _sums_to_save(graph: fx.Graph, decisions: Sequence[Decision]) -> list[_Sum]:
    """The sums to save in place of their products, in order.

    Left alone are a sum that is tagged to be saved, one that becomes part of a sum with others, and one that is a
    result of the graph: the program can write to that before the backward.
    """
    owners = owners_of(graph)
    program = program_memory(graph, owners)
    backward = reachable(tangents_of(graph), lambda node: node.users)
    found = []
    for one in decisions:
        chain, own = one.candidate.chain, one.candidate.collective
        if one.refusal is not None or not isinstance(chain, ScatterChain) or chain.joined or own.node in backward:
            continue
        tagged = tuple(node for node in (*nodes_of(chain.matmuls), *chain.views) if partitioner.is_saved(node))
        part = chain.own_part
        results = own.waits if part is None or part.by_place else part.ends
        ends = (*own.results, *results)
        saved = any(map(partitioner.is_saved, ends)) or any(owners[node] in program for node in ends)
        if tagged and own.waits and not saved:
            found.append(_Sum(own, tagged, results))
    return found


# --- gathers that are worth being made again ------------------------------------------------------------------------
LEAST_BYTES = 32 << 20
"""`"auto"` leaves a gather by which a rank receives fewer: the host takes as long to start it (0.1 ms), and a program
that moves so little waits for the host. Source: `docs/results/2026-11-22-h200x2/regather.txt`.
"""


def rematerialization_candidates(
    graph: fx.Graph, decisions: Sequence[Decision], rematerialize: str
) -> list[Collective]:
    """The gathers of a joint graph that are worth being made again in the backward, in order.

    A gathered tensor is most of what a layer with sequence parallelism keeps for its backward. A gather is worth it if
    a fused op of the forward takes it in, and the backward needs more of it than what products made. Activation
    checkpointing must not have tagged it. Its group has to communicate in the backward anyway: another rank may run no
    backward in which it need not communicate. `"auto"` also asks that it is known to be worth a call, and that matmuls
    of the backward in no fused op, beside which the link is free, take as long as all such gathers.
    """
    if rematerialize == "never":
        return []
    backward = {node for node in reachable(tangents_of(graph), lambda node: node.users) if node.op == "call_function"}
    groups = {one.candidate.collective.group_key for one in decisions if one.candidate.collective.node in backward}
    gathers = [
        one.candidate.collective
        for one in decisions
        if _is_taken_in(one, backward)
        and one.candidate.collective.group_key in groups
        and _is_needed(one.candidate.collective, backward)
    ]
    return gathers if rematerialize == "always" else _overlapped(gathers, decisions, backward)


def _is_taken_in(decision: Decision, backward: set[fx.Node]) -> bool:
    """True for a gather that a fused op of the forward takes in, or would, but for what else needs it."""
    chain, own = decision.candidate.chain, decision.candidate.collective
    fused = decision.refusal is None or decision.refusal.reason is reasons.MOVES_MORE
    if chain is None or chain.collective.kind != "all_gather" or own.call is not None or mutates(own.node):
        return False
    return fused and any(one.node not in backward for one in chain.matmuls)


def _is_needed(gather: Collective, backward: set[fx.Node]) -> bool:
    """True where the backward needs a gather of the forward, or what is computed of it, and nobody has tagged that."""
    nodes = repeatable_uses(gather)
    tagged = any(partitioner.recompute_tag(node) is not None for node in (*gather.nodes, *nodes))
    return not tagged and any(user in backward for node in nodes for user in node.users)


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
