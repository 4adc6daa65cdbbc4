"""Erase the nodes that a rewrite leaves without users, and read the sizes of those that go off other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from asynctp_passes.ir.collectives import waits_for_several
from asynctp_passes.ir.nodes import has_side_effect, is_known_collective, is_size, op_name, traits_of
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.propagation import is_view
from asynctp_passes.matching.chains import Chain
from asynctp_passes.rewriting.builder import Builder


def read_sizes_elsewhere(build: Builder, chain: Chain) -> None:
    """Read sizes of vanishing tensors off the chain's inputs instead, so that nothing keeps them alive."""
    for node in chain.size_readers:
        size = build.size(build.sizes.read(node))
        for reader in list(node.users):
            reader.args = _with(reader.args, node, size)
            reader.kwargs = _with(reader.kwargs, node, size)


def _with(args: Any, old: fx.Node, new: int | fx.Node) -> Any:
    """Arguments with a node exchanged, for an integer too."""
    return fx.map_arg(args, lambda node: new if node is old else node)


def shared_by(own: Sequence[Collective]) -> list[fx.Node]:
    """The waits for results of collectives together with other tensors, then the collectives of these."""
    waits = [wait for collective in own for wait in collective.waits]
    joint = dict.fromkeys(node for wait in waits for node in wait.all_input_nodes if waits_for_several(node))
    calls = dict.fromkeys(one.call for one in own if one.call is not None)
    return [*(node for node in joint if all(op_name(user) == "getitem" for user in node.users)), *calls]


def replaced_nodes(chain: Chain) -> set[fx.Node]:
    """The nodes that a fused op may leave without users: its chain's collectives, views, matmuls, and their sizes.

    Also the views that only lead from a tensor to a matmul, or to a collective that joins the chain's. Of a collective
    of several tensors, other items too: of one that nothing uses nothing is left.
    """
    takers = [*nodes_of(chain.matmuls), *(joined.call or joined.node for joined in chain.joined)]
    taken = [source for node in takers for source in node.all_input_nodes]  # as they are now: some were replaced
    nodes = {*chain.replaceable, *nodes_of(chain.matmuls), *reachable(taken, where=is_view)}
    nodes.update(node for one in (chain.hoist.cross_rank if chain.hoist else ()) for node in one.nodes)
    for collective in chain.collectives:
        nodes.update(collective.nodes, () if collective.call is None else collective.call.users)
    beside = (source for node in chain.views for source in node.all_input_nodes if source not in chain.views)
    nodes |= reachable(beside, where=_is_of_numbers)
    inside = [node for matmul in chain.matmuls for node in matmul.epilogue]
    nodes |= {node for step in inside for node in step.all_input_nodes if op_name(node) and not node.all_input_nodes}
    return nodes | {user for node in nodes for user in node.users if is_size(user)}


def _is_of_numbers(node: fx.Node) -> bool:
    """True for a tensor that is made of a number, as the zeros that rows are written into are, and for a view."""
    return traits_of(node).constant is not None or (is_view(node) and not is_known_collective(node))


def erase_unused(graph: fx.Graph, candidates: set[fx.Node], shared: Iterable[fx.Node] = ()) -> None:
    """Erase those of some nodes that have no users, or no others than such, then what only `shared` ones keep alive.

    Those that are erased leave the set. `shared` are collectives of several tensors, and waits for them (`shared_by`).
    """
    _erase(graph, candidates)
    for node in shared:
        if node in candidates:
            _shrink(node)
            _erase(graph, candidates)


def _erase(graph: fx.Graph, candidates: set[fx.Node]) -> None:
    """Erase those of some nodes that have no users, or no others than such."""
    stack = list(candidates)
    while stack:
        node = stack.pop()
        if node in candidates and not node.users:
            candidates.discard(node)
            stack += node.all_input_nodes
            graph.erase_node(node)


def _shrink(call: fx.Node) -> None:
    """Leave in a collective of several tensors, or a wait for them, only those whose results are used."""
    inputs, *rest = call.args
    assert isinstance(inputs, list | tuple)
    users = sorted(call.users, key=lambda user: int(user.args[1]))  # type: ignore[arg-type]
    kept = [int(user.args[1]) for user in users]  # type: ignore[arg-type]
    call.args = ([inputs[index] for index in kept], *rest)
    call.meta["val"] = [call.meta["val"][index] for index in kept]
    for place, user in enumerate(users):
        user.args = (call, place)


def erase_dropped(graph: fx.Graph, unused: Sequence[Collective]) -> None:
    """Erase collectives that no result of the graph needs, with what is computed from them, and for them alone."""
    gone = {node for collective in unused for node in collective.results}
    around = reachable(gone) | reachable(gone, lambda node: node.users)
    for node in reversed(graph.nodes):
        if node in around and not node.users and (node in gone or not has_side_effect(node)):
            graph.erase_node(node)
    nodes = set(graph.nodes)
    left = [collective.node.name for collective in unused if collective.node in nodes]
    assert not left, f"{left} are used after all"
