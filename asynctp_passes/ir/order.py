"""The order of communication: which nodes of a graph start to communicate, and that they keep their order. Pure.

Ranks share the order in which they call collectives, and nothing else. So each node that communicates stays after the
one before it; a wait is none. A fused op may come after a later collective if all ranks agree
(`GatherChain.follows`). An op of another library may communicate inside: unless it is known or registered to be local,
it is *opaque*, and no fused op passes it. Notes in nodes' `meta` tell which graphs are halves of one.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise

from torch import fx

from asynctp_passes.ir.local_ops import RUNNERS
from asynctp_passes.ir.nodes import arguments, called_op, carried, is_size, name_of, op_name, ops_run_by, subgraphs_of
from asynctp_passes.ir.records import Question
from asynctp_passes.ir.registry import collective_op, promise_of, surely_communicates
from asynctp_passes.torch_private import process_groups, torch_ops

_PLACE = "asynctp_place"
"""In a node's `meta`: its place in the order in which the program communicates."""

_WITH_WAITS = "_c10d_functional"
"""The namespaces of ops that Inductor does not move, since waits follow them, begin so."""


class _Talk(enum.IntEnum):
    """Whether something communicates with other ranks."""

    NEVER = 0
    MAY = 1
    SURELY = 2


def communicates(node: fx.Node) -> bool:
    """True for a node that starts to communicate with other ranks, or runs one that does; or may, as it is opaque."""
    return _talk_of(node) > _Talk.NEVER


def is_opaque(node: fx.Node) -> bool:
    """True for a node that may communicate: its op is not listed, nor registered as local."""
    return _talk_of(node) is _Talk.MAY


def surely_starts(node: fx.Node) -> bool:
    """True for a node that starts to communicate: a collective that is known or registered, or what runs one."""
    return _talk_of(node) is _Talk.SURELY


def _talk_of(node: fx.Node) -> _Talk:
    if node.op != "call_function":
        return _Talk.NEVER
    if torch_ops.is_op(node.target):
        return _talk_of_op(name_of(node.target))
    ops, graphs = ops_run_by(node), subgraphs_of(node)
    found = [_talk_of_op(name_of(op)) for op in ops]
    found += [_talk_of(step) for graph in graphs for step in graph.nodes]
    if not ops and not graphs and torch_ops.is_higher_order(node.target) and op_name(node) not in RUNNERS:
        found.append(_Talk.MAY)
    return max(found, default=_Talk.NEVER)


def _talk_of_op(name: str) -> _Talk:
    if promise_of(name) is not None:
        return _Talk.NEVER
    return _Talk.SURELY if surely_communicates(name) else _Talk.MAY


def opaque_ops(node: fx.Node) -> list[str]:
    """The names of the ops that make a node opaque, and those of other functions that nobody sees into."""
    inner = [name for graph in subgraphs_of(node) for step in graph.nodes for name in opaque_ops(step)]
    own = [name for op in ops_run_by(node) if _talk_of_op(name := name_of(op)) is _Talk.MAY]
    return list(dict.fromkeys([*own, *inner])) or ([op_name(node)] if is_opaque(node) else [])


def communications(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of some nodes that communicate, in the same order.

    Opaque ops count where something surely communicates with several ranks. Of all else nothing is to be kept in order.
    """
    talking = [(node, talk) for node in nodes if (talk := _talk_of(node))]
    sure = [node for node, talk in talking if talk is _Talk.SURELY]
    return [node for node, _ in talking] if any(map(_is_of_several, sure)) else sure


def _is_of_several(node: fx.Node) -> bool:
    """False for a collective of one rank."""
    if called_op(node) is None:
        return True
    values, op = arguments(node), collective_op(op_name(node))
    size = values.get(op.size) if op is not None and isinstance(op.size, str) else None
    if isinstance(size, int):
        return size != 1
    group = values.get(op.group if op is not None else "group_name", values.get("group"))
    return process_groups.size_of_group(carried(group)) != 1


def in_turn(starts: Sequence[fx.Node], inputs: Mapping[fx.Node, Sequence[fx.Node]]) -> dict[fx.Node, Sequence[fx.Node]]:
    """The inputs of nodes, where these are not `all_input_nodes`, and for each of `starts` also the one before it."""
    found = dict(inputs)
    for before, node in pairwise(starts):
        found[node] = [*found.get(node, node.all_input_nodes), before]
    return found


def record_order(graph: fx.Graph) -> None:
    """Note the order of what communicates in its nodes' `meta`, before Inductor moves nodes to where they are used."""
    for place, node in enumerate(communications(graph.nodes)):
        node.meta[_PLACE] = place


def program_order(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that communicate, in the order that was recorded; one without a record keeps its place."""
    found = communications(graph.nodes)
    recorded = iter(sorted(filter(_is_recorded, found), key=lambda node: node.meta[_PLACE]))
    return [next(recorded) if _is_recorded(node) else node for node in found]


def recorded_place(node: fx.Node) -> int:
    """The place of a node in the order that was recorded; 0 for one without a record."""
    return int(node.meta.get(_PLACE, 0))


def unrecorded(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that communicate without a wait of torch's and have no record: Inductor may have moved them.

    Empty where any node has a record: one without came into the graph later.
    """
    found = communications(graph.nodes)
    if any(map(_is_recorded, found)):
        return []
    return [node for node in found if not op_name(node).startswith(_WITH_WAITS)]


def _is_recorded(node: fx.Node) -> bool:
    return _PLACE in node.meta


def latest_communication(graph: fx.Graph, items: Container[fx.Node], *, surely: bool = False) -> dict[fx.Node, int]:
    """For each node the place in the graph of the last communication that its values depend on; -1 without any.

    Of several tensors that are communicated together each of the `items` counts as communicated where it stands. Opaque
    ops do not count with `surely`.
    """
    found: dict[fx.Node, int] = {}
    starts = surely_starts if surely else communicates
    for place, node in enumerate(graph.nodes):
        above = (found[source] for source in ([] if is_size(node) else node.all_input_nodes))
        found[node] = place if node in items or starts(node) else max(above, default=-1)
    return found


# --- notes by which the joint graph of a forward and its backward, and its halves, are one --------------------------
CANDIDATE = "asynctp_candidate"
"""On a gather of the forward that is worth being made again: its place among those of its group."""

REMATERIALIZED = "asynctp_rematerialized"
"""On a gather of a backward that was one of the forward: the bytes gathered, 0 where symbolic."""

_JOINT = "asynctp_joint"


def note_joint(graph: fx.Graph, asked: Mapping[str, Question]) -> None:
    """Note, in all that communicates in a graph, what the ranks of each group were asked about it, with the answers."""
    for node in communications(graph.nodes) if asked else ():
        before: Mapping[str, tuple[Question, ...]] = node.meta.get(_JOINT, {})
        node.meta[_JOINT] = {**before, **{group: (*before.get(group, ()), one) for group, one in asked.items()}}


def joint_questions(graph: fx.Graph) -> dict[str, tuple[Question, ...]]:
    """Read what was noted of a graph, by group."""
    found: dict[str, dict[Question, None]] = {}
    for node in communications(graph.nodes):
        for group, asked in node.meta.get(_JOINT, {}).items():
            found.setdefault(group, {}).update(dict.fromkeys(asked))
    return {group: tuple(sorted(asked, key=lambda one: one.phase)) for group, asked in found.items()}
