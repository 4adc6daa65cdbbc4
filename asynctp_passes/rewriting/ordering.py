"""Where the nodes of a rewritten graph stand: collectives run beside products. Moves nodes, and makes none.

Inductor runs nodes in graph order, but for what it is free to put off. So what is to run beside a collective comes
between its start and its wait, and is bound to stay there (`inductor_order.keep_order`). No move crosses an in-place
operation, and no move carries what communicates past anything else that does.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import called_name, called_op, name_of
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.order import (
    communicates,
    communications,
    in_turn,
    is_opaque,
    opaque_ops,
    program_order,
    unrecorded,
)
from asynctp_passes.ir.traversal import draws, live, phase_of, reachable, segments, steps_of
from asynctp_passes.matching.near_miss import to_register
from asynctp_passes.planning import cost_model
from asynctp_passes.rewriting import toposort
from asynctp_passes.rewriting.emit_alone import OWN_OPS, use_own_op
from asynctp_passes.torch_private import dynamo, inductor_options, inductor_order

log = logging.getLogger(__name__)

_TORCHS = ("_c10d_functional", "c10d.", "_dtensor.")
"""Namespaces of collectives that Inductor knows, or that no graph of its own has."""


Alone = tuple[Collective, fx.Node | None]
"""A collective that no op takes in, and the fused op that it follows if it stays for other users beside that."""


@dataclass
class Moves:
    """The nodes that are to move.

    Attributes:
        early: What these are computed from comes in front of them.
        late: Nodes that come just before their first users.
        staying: Gathers that stay for other users, each with its fused op.
        beside: Collectives that no op takes in, each with the matmuls that it is to run beside, and its `options_of`.
    """

    early: list[fx.Node] = field(default_factory=list)
    late: set[fx.Node] = field(default_factory=set)
    staying: list[Alone] = field(default_factory=list)
    beside: list[tuple[Collective, list[fx.Node], dict[str, Any]]] = field(default_factory=list)


def schedule(
    graph: fx.Graph, moves: Moves, work: Mapping[fx.Node, int | None], segment: Mapping[fx.Node, int]
) -> dict[fx.Node, list[fx.Node]]:
    """Restore the order where an operand of a later matmul moved, and move collectives beside their matmuls.

    `work` has the operations of each fused op, and `segment` each node's stretch between in-place operations. Returned
    are for some nodes the nodes that must run before them, besides their inputs.

    Raises:
        RuntimeError: The order of communication is not the plan's, which ranks share. An error of this package.
    """
    planned = _planned_order(communications(graph.nodes), moves.staying)
    _restore_order(graph, segment, moves.early)
    _delay(graph, moves.late, segment)
    for collective, products, options in moves.beside:
        use_own_op(collective, options)
        _overlap(collective, products)
    used = live(graph)
    flops = {node: cost_model.work_of(node) for node in used if is_matmul(node)}
    flops |= {op: count for op, count in work.items() if op in used}
    segment = segments(graph, between_draws=True)
    for gather, op in moves.staying:  # on all ranks: a gather may have come late with its op
        if op is not None and gather.node in segment and segment[gather.node] == segment[op]:
            _move_after([gather.node], op)
    flying = _in_flight([*moves.staying, *((collective, None) for collective, *_ in moves.beside)], segment)
    _run_beside(flying, flops, segment)
    wait_with_sources(segment)
    ordered = _order_in_flight(graph, flying, flops)
    if communications(graph.nodes) != planned:
        raise RuntimeError(f"the order of communication is not as planned: {', '.join(node.name for node in planned)}")
    return ordered


def _planned_order(starts: Sequence[fx.Node], staying: Iterable[Alone]) -> list[fx.Node]:
    """All that communicates in the order of the graph, but that a gather that stays comes right after its op."""
    planned = list(starts)
    for gather, op in staying:
        if op is not None and gather.node in planned:
            planned.remove(gather.node)
            planned.insert(planned.index(op) + 1, gather.node)
    return planned


def put_in_program_order(graph: fx.Graph) -> None:
    """Sort a graph that communicates, and bring what communicates to the order of the program.

    Any other graph is left to Inductor, which sorts it after its passes.
    """
    if communications(graph.nodes):
        toposort.sort(graph)
        if phase_of(graph) == "inference":  # the partitioner, who copies and leaves out, orders the others
            _warn_of_moves(graph)
            _restore_program_order(graph)


def _warn_of_moves(graph: fx.Graph) -> None:
    """Say that ranks may communicate in unlike orders: this pass alone does not see the order of the program."""
    moves = inductor_order.is_compiled(graph) and inductor_options.current("reorder_for_locality")
    if moves and (moved := unrecorded(graph)):
        log.warning(
            "asynctp: %s: Inductor may have moved %s to where the results are used, and so differently on ranks that "
            "compute different things. Remedy: give it RematerializePass() as joint_custom_post_pass too, which notes "
            "the order of the program",
            *(dynamo.compile_name(), ", ".join(dict.fromkeys(map(called_name, moved)))),
        )


def _restore_program_order(graph: fx.Graph) -> None:
    """Bring what communicates back to the order of the program, where Inductor has moved it to where it is used.

    It does so in graphs for inference, with ops that it does not know as collectives.
    """
    wanted = program_order(graph)
    if wanted != communications(graph.nodes):
        position = {node: index for index, node in enumerate(graph.nodes)}
        segment = segments(graph)
        inputs = in_turn(wanted, in_turn([node for node in position if node.op == "placeholder"], draws(graph)))
        steps = steps_of(graph, {}, inputs, lambda node: (segment[node], position[node]))
        if len(steps) != len(position):
            raise RuntimeError(f"the program's order of {', '.join(node.name for node in wanted)} cannot be restored")
        _arrange([node for (node,) in steps])


def keep_order(graph: fx.Graph, ordered: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Have Inductor keep the order of what communicates, and run each node after those that `ordered` lists for it."""
    after = {node: list(earlier) for node, earlier in ordered.items()}
    starts = communications(graph.nodes) if inductor_order.is_compiled(graph) else []
    ops = list(map(called_op, starts))
    called = {op for op in ops if op is not None and not name_of(op).startswith(_TORCHS)}
    if opaque := dict.fromkeys(name for node in starts for name in opaque_ops(node)):
        log.info(
            "asynctp: %s: %s may communicate: asynctp does not know them, and keeps their places among collectives. "
            "Remedy for what communicates with no other rank: %s",
            *(dynamo.compile_name(), ", ".join(opaque), to_register(filter(is_opaque, starts))),
        )
    if starts:
        inductor_order.mark_in_order(graph)
    lowered = inductor_order.lower_in_order(called)
    if None in ops or not lowered:  # a higher-order op has no kernel of its own
        for place, node in enumerate(starts[1:], 1):
            after.setdefault(node, []).extend(_as_far_as_used(starts[:place]))
    if unordered := inductor_order.keep_order(graph, after):
        log.warning(
            "asynctp: %s: Inductor may run others before %s, as it may without asynctp. It cannot be told to wait for "
            "an op without a result. Remedy: let the op return a tensor, or do without fallback_by_default",
            *(dynamo.compile_name(), ", ".join(dict.fromkeys(map(called_name, unordered)))),
        )


def _as_far_as_used(earlier: Sequence[fx.Node]) -> list[fx.Node]:
    """The last of some nodes, and those before as far as one whose result is used: Inductor forgets unused ones."""
    found: list[fx.Node] = []
    for node in reversed(earlier):
        found.append(node)
        if node.users:
            break
    return found


# --- order ---------------------------------------------------------------------------------------------------
def _restore_order(graph: fx.Graph, segment: Mapping[fx.Node, int], early: Sequence[fx.Node] = ()) -> None:
    """Move nodes after their inputs, keeping the order else, and never across an in-place operation.

    Draws keep their order always, and so does what communicates, and the graph's inputs. What the nodes `early` are
    computed from moves in front of them; else they would move after it.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    if all(position[source] < position[node] for node in position for source in node.all_input_nodes):
        return
    inputs = in_turn([node for node in position if node.op == "placeholder"], draws(graph))
    wanted = _wanted_places(position, inputs, early)
    inputs = in_turn(communications(position), inputs)
    steps = steps_of(graph, {}, inputs, lambda node: (segment[node], wanted[node]))
    assert len(steps) == len(position), "find drops chains that need what is communicated later"
    _arrange([node for (node,) in steps])


def _wanted_places(
    position: dict[fx.Node, int], inputs: Mapping[fx.Node, Sequence[fx.Node]], early: Sequence[fx.Node]
) -> dict[fx.Node, int]:
    """The positions of all nodes; of what an early node is computed from, that node's where it is smaller."""
    wanted = dict(position)
    for target in early:
        direct = target.all_input_nodes
        stack = [*direct, *(source for node in direct for source in node.all_input_nodes)]
        while stack:
            node = stack.pop()
            if wanted[node] > position[target]:
                wanted[node] = position[target]
                stack.extend(inputs.get(node, node.all_input_nodes))
    return wanted


def _delay(graph: fx.Graph, late: set[fx.Node], segment: Mapping[fx.Node, int]) -> None:
    """Move nodes to just before their first users, or the next in-place operation.

    Inductor runs nodes in graph order, so that what comes before a wait runs beside the collective.
    """
    placed: dict[fx.Node, None] = {}  # from the last node of the graph to the first
    held: dict[int, list[fx.Node]] = {}
    for last in reversed(graph.nodes) if late else ():
        stack = [*([] if last in placed else [last]), *held.pop(segment[last], [])]
        while stack:
            node = stack.pop()
            placed[node] = None
            for source in node.all_input_nodes:
                if source in late and all(user in placed for user in source.users):
                    (stack if segment[source] == segment[node] else held.setdefault(segment[source], [])).append(source)
    _arrange(list(reversed(placed)))


def _arrange(order: Sequence[fx.Node]) -> None:
    """Bring all nodes of a graph into another order."""
    for before, node in pairwise(order):
        before.append(node)


def _move_after(starts: Iterable[fx.Node], last: fx.Node) -> None:
    """Move nodes, with all that is computed from them, after a node that does not need them."""
    for node in sorted(reachable(starts, lambda node: node.users, lambda node: node < last), reverse=True):
        last.append(node)


# --- collectives in flight ------------------------------------------------------------------------------------
_MOST_BESIDE = 4
_WAIT, _OWN_WAIT = torch.ops._c10d_functional.wait_tensor.default, torch.ops.asynctp.wait.default


def _in_flight(alone: Iterable[Alone], nodes: Container[fx.Node]) -> list[Alone]:
    """The collectives that leave the SMs to what runs beside them, with those of their waits that there still are."""
    living = ((replace(one, waits=tuple(wait for wait in one.waits if wait in nodes)), op) for one, op in alone)
    return [(one, op) for one, op in living if one.waits and one.node.target in OWN_OPS.values()]


def _run_beside(flying: Iterable[Alone], flops: Mapping[fx.Node, int | None], segment: Mapping[fx.Node, int]) -> None:
    """Move what waits for gathers that stay after as many matmuls as overlap them."""
    for gather, op in flying:
        if op is not None and segment[gather.node] == segment[op]:
            products = _matmuls_that_overlap(gather, flops, segment)
            if products:
                _move_after(gather.waits, products[-1])


def _order_in_flight(
    graph: fx.Graph, flying: Sequence[Alone], products: Mapping[fx.Node, object]
) -> dict[fx.Node, list[fx.Node]]:
    """The order in flight: a gather after its fused op, overlapping nodes after its start, waits after matmuls.

    Left to itself Inductor puts off the start, which needs memory, until something needs the result.
    """
    if not flying:
        return {}
    waits = {wait for gather, _ in flying for wait in gather.waits}
    others = (node for node in graph.nodes if node not in waits and node not in products)
    starts = {node for node in others if communicates(node) or inductor_order.is_called(node.target)}
    calls = [node for node in graph.nodes if node in products or node in starts]  # no kernel that Inductor could fuse
    ordered: dict[fx.Node, list[fx.Node]] = {}
    for gather, op in flying:
        start, end = gather.node, min(gather.waits)
        if op is not None and op < start:
            ordered.setdefault(start, []).append(op)
        between = calls[bisect(calls, start) : bisect(calls, end)]
        beside = [call for call in between if call in products]
        for call in between if beside else ():
            ordered.setdefault(call, []).append(start)
        for wait in gather.waits if beside else ():
            ordered.setdefault(wait, []).extend(beside)
    return ordered


def wait_with_sources(segment: Mapping[fx.Node, int]) -> None:
    """Let each wait read what its collective reads: Inductor leaves that alone for so long, and no copy is needed.

    Not where something is mutated in between: it could be that.
    """
    for start in [node for node in segment if node.target in (OWN_OPS["all_gather"], OWN_OPS["reduce_scatter"])]:
        waits = [user for user in start.users if user in segment]
        if waits and all(wait.target is _WAIT and segment[wait] == segment[start] for wait in waits):
            start.kwargs = {**start.kwargs, "copy": False}
            inductor_order.lower_wait(_OWN_WAIT)
            for wait in waits:
                wait.target, wait.args, wait.kwargs = _OWN_WAIT, (start, start.args[0]), {}
                wait.meta.pop("eager_input_vals", None)


def _overlap(collective: Collective, products: Sequence[fx.Node]) -> None:
    """Start a collective before the first of some products, and wait for it after the last.

    `plan_overlap` has seen to it that neither the products nor what they are fused with depend on it, or it on them,
    and that no communication lies between. Where operands have brought a product to the other side of one, it is passed
    over.
    """
    earlier = [node for node in products if node < collective.node and not _passes(node, collective.node)]
    if earlier:
        first = min(earlier)
        for node in sorted(reachable([collective.node], where=lambda node: node > first)):
            first.prepend(node)
    later = [node for node in products if node > collective.node and not _carries(collective.waits, node)]
    if later:
        _move_after(collective.waits, max(later))


def _passes(first: fx.Node, start: fx.Node) -> bool:
    """True when a start that moves in front of an earlier node passes communication, or takes it along."""
    node = first
    while node is not start:
        if communicates(node):
            return True
        node = node.next
    return False


def _carries(waits: Iterable[fx.Node], last: fx.Node) -> bool:
    """True when waits, moved after the node `last`, would move ops that communicate as well."""
    moved = reachable(waits, lambda node: node.users, lambda node: node < last)
    return any(map(communicates, moved))


def _matmuls_that_overlap(
    gather: Collective, flops: Mapping[fx.Node, int | None], segment: Mapping[fx.Node, int]
) -> list[fx.Node]:
    """The next products that do not need a gather, until they take as long as it does; a few at most.

    What waits for the gather moves after them, and keeps its memory for so long. They come before the first
    communication that needs the gather, which keeps its place.
    """
    received = cost_model.received_bytes(gather.node, gather.group_size)
    after, node = {gather.node}, gather.node.next
    chosen: list[fx.Node] = []
    while segment.get(node) == segment[gather.node] and len(chosen) < _MOST_BESIDE:
        if any(source in after for source in node.all_input_nodes):
            if communicates(node):
                break
            after.add(node)
        elif node in flops:
            chosen.append(node)
            if cost_model.covers([flops[one] for one in chosen], received, gather.node):
                break
        node = node.next
    return chosen
