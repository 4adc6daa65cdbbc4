"""Rewrite a graph as planned: makes and erases nodes. Everything was checked before; nothing here can refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.nodes import call_of, tensor_of, value_of
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.order import communicates, communications
from asynctp_passes.matching.chains import Chain, GatherChain
from asynctp_passes.planning import cost_model
from asynctp_passes.planning.plan import Plan
from asynctp_passes.rewriting.builder import Builder, RewriteState, erase_marks, mark_front, place_of
from asynctp_passes.rewriting.cleanup import erase_dropped, erase_unused, replaced_nodes, shared_by
from asynctp_passes.rewriting.emit_alone import (
    emit_alone,
    emit_bucket,
    emit_left_items,
    emit_own_parts,
    options_of,
)
from asynctp_passes.rewriting.emit_gather import emit_gather, nodes_after_kept_gather
from asynctp_passes.rewriting.emit_reduction import emit_reduction
from asynctp_passes.rewriting.ordering import Moves, keep_order, schedule
from asynctp_passes.rewriting.store_scales import scales_to_store, store
from asynctp_passes.torch_private import symbolic_sizes


def rewrite(graph: fx.Graph, plan: Plan) -> dict[str, dict[str, Any]]:
    """Do all that a graph's plan says, and lint it. A graph that does not communicate stays.

    `meta["asynctp_collective"]` of a fused op names the collective that it replaced. Returned is what each fused op is
    called with (`call_of`), by that name.
    """
    if not communications(graph.nodes):
        return {}
    state = RewriteState(graph, plan)
    moves = Moves()
    marked = _mark_run_checks(state)
    fronts = [mark_front(state, bucket.place) for bucket in plan.buckets]
    emit_left_items(state)
    places = [place_of(state, chain) for chain in plan.chains]
    for chain, place in zip(plan.chains, places, strict=True):
        _replace_chain(state, chain, place, moves)
    emit_alone(state)
    emit_own_parts(state)
    for bucket, front in zip(plan.buckets, fronts, strict=True):
        moves.early.append(emit_bucket(state, bucket, front))
    erase_dropped(graph, plan.dropped)
    checks = [(ones, _next_communication(mark)) for ones, mark in marked]
    erase_marks(graph)
    for decision in plan.overlapped:
        matmuls = [state.fused.get(node, node) for node in decision.overlaps_with]
        collective = decision.candidate.collective
        moves.beside.append((collective, matmuls, options_of(state, collective, collective.node in state.kept_by_all)))
    work = {state.fused[chain.collective.node]: cost_model.cost_of(chain).work for chain in plan.chains}
    ordered = schedule(graph, moves, work, state.segment)
    # an op that is kept in order is wrapped in another: what it is called with is read before
    calls = {chain.collective.node.name: call_of(state.fused[chain.collective.node]) for chain in plan.chains}
    _emit_run_checks(state, checks)
    keep_order(graph, ordered)
    graph.lint()
    if plan.chains and "store_scales" not in plan.context.config.skip:
        store(graph, scales_to_store(graph))
    return calls


def _replace_chain(state: RewriteState, chain: Chain, place: fx.Node, moves: Moves) -> None:
    """Make the fused op of a chain in front of `place`, erase what it replaces, and note what is to move for it."""
    collective = chain.collective
    build = Builder(state, collective, place, chain.inputs)
    shared = shared_by(chain.collectives)
    old = {*replaced_nodes(chain), *shared}
    op = emit_gather(build, chain) if isinstance(chain, GatherChain) else emit_reduction(build, chain)
    op.meta["asynctp_collective"] = collective.node.name
    state.fused |= dict.fromkeys([collective.node, *(matmul.node for matmul in chain.matmuls)], op)
    communicating = communications(build.made)
    state.starts[op] = communicating[0]
    if not isinstance(chain, GatherChain):
        old.update(node for node in build.made if node is not op)  # shapes of terms that went into a sum
    else:
        moves.early += communicating
        if chain.hoist is not None:
            moves.late |= nodes_after_kept_gather(build, chain)
            moves.staying.append((collective, op))
    erase_unused(state.graph, old, shared)


# --- checks: ranks on CPUs compare what they run, before a graph communicates in a group ----------------------------
Checks = list[tuple[list[Collective], fx.Node]]
"""By check: the collectives of a group, and the node before which its ranks compare what they run."""


def _mark_run_checks(state: RewriteState) -> Checks:
    """Mark where groups compare: before each collective, or of a graph with an accord before the first one.

    Not earlier: ranks of another group may have to go on first, so that those that are awaited come at all.
    """
    marked: Checks = []
    for group, made in state.plan.checked.items():
        together: dict[fx.Node, list[Collective]] = {}
        for one in made:
            together.setdefault(made[0].start if state.plan.accord(group) else one.start, []).append(one)
        marked += [(ones, mark_front(state, start)) for start, ones in together.items()]
    return marked


def _next_communication(mark: fx.Node) -> fx.Node:
    """The node after a mark that communicates, or the graph's output."""
    node = mark.next
    while node.op != "output" and not communicates(node):
        node = node.next
    return node


def _emit_run_checks(state: RewriteState, checks: Checks) -> None:
    """Insert each check in front of its node."""
    op = torch.ops.asynctp.run_check.default
    for ones, first in checks:
        beside, one = _beside(first), ones[0]
        told = (state.plan.accord(one.group_key), len(ones))
        with state.graph.inserting_before(first):
            node = state.graph.call_function(op, (beside, *told, one.group))
        with symbolic_sizes.without_guards(value_of(beside)):
            node.meta["val"] = op(value_of(beside), *told, one.group_key)


def _beside(first: fx.Node) -> fx.Node:
    """A tensor that is there before a node: it decides on which device ranks compare."""
    node = next((one for one in first.all_input_nodes if tensor_of(one) is not None), first)
    while tensor_of(node) is None:
        node = node.prev
    return node
