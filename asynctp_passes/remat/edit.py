"""Let a backward make gathers of its forward again, in place of what the forward keeps.

All ranks of a group have agreed on the gathers, and on how much communicates in the backward before each. A gather is
put in front of what needs it first, or of what needs a gather that comes after it: so they keep the program's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from asynctp_passes.ir.marks import CANDIDATE, REMATERIALIZED
from asynctp_passes.ir.nodes import has_side_effect, is_number, tensor_of
from asynctp_passes.ir.order import recorded_place
from asynctp_passes.planning import cost_model
from asynctp_passes.remat.expressible import Halves, Rematerialization
from asynctp_passes.torch_private import partitioner


def rematerialize(halves: Halves, chosen: Sequence[Rematerialization]) -> None:
    """Edit both graphs.

    Args:
        halves: The graphs.
        chosen: The gathers.
    """
    order = sorted(chosen, key=lambda one: (one.after, recorded_place(one.gather.node), one.gather.node))
    values = sorted(
        ((halves.first_user([value]), value, one) for one in order for value in one.values), key=lambda found: found[0]
    )
    env = dict(halves.given)
    for shard in dict.fromkeys(one.shard for one in order if one.shard is not None):
        env[shard] = _save(halves, shard)
    for _, value, _ in values:
        del env[value]
    spots: list[fx.Node] = []
    for one in reversed(order):  # none comes before one that the program makes before it
        spots.append(min([one.first, *spots[-1:]]))
    for one, spot in zip(order, reversed(spots), strict=True):
        _copy(_needed(one.gather.node, one.copies), spot, env)
        gather = env[one.gather.node]
        gather.meta[REMATERIALIZED] = cost_model.bytes_of(one.gather.node) or 0
    for spot, value, one in values:
        _copy(_needed(value, one.copies), spot, env)
        halves.given[value].replace_all_uses_with(env[value])
        halves.backward.erase_node(halves.given[value])
    replaced = {value for _, value, _ in values}
    saved = [node for node in halves.saved if node not in replaced]
    partitioner.replace_outputs(halves.forward, [*halves.outputs[: halves.results], *saved], halves.results)
    _erase_unused(replaced)


def _needed(end: fx.Node, copies: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of the nodes to copy that a node needs, itself included, in order."""
    among, needed = set(copies), {end}
    for node in reversed(copies):
        if node in needed:
            needed.update(source for source in node.all_input_nodes if source in among)
    return [node for node in copies if node in needed]


def _copy(nodes: Iterable[fx.Node], spot: fx.Node, env: dict[fx.Node, fx.Node]) -> None:
    """Copy nodes of the forward into the backward, in front of a node there, but for those that are there already."""
    with spot.graph.inserting_before(spot):
        for node in nodes:
            if node not in env or not env[node] < spot:
                copy = env[node] = spot.graph.node_copy(node, env.__getitem__)
                copy.meta = dict(node.meta)
                copy.meta.pop(CANDIDATE, None)
                partitioner.mark_of_backward(copy)


def _save(halves: Halves, shard: fx.Node) -> fx.Node:
    """Make a tensor of the forward an input of the backward, after those with the same check of its version."""
    saved, unchecked = halves.saved, partitioner.is_saved_unchecked(shard)
    index = sum(
        tensor_of(node) is not None and (unchecked or not partitioner.is_saved_unchecked(node)) for node in saved
    )
    inputs = [node for node in halves.backward.nodes if node.op == "placeholder"]
    others = (node for node in halves.backward.nodes if node.op != "placeholder")
    spot = next(iter(inputs[sum(map(is_number, saved)) + index :]), None) or next(others)
    names = {node.name: node for node in halves.backward.nodes}
    with halves.backward.inserting_before(spot):
        given = halves.backward.create_node("placeholder", shard.name)
    if (other := names.get(shard.name)) is not None:  # the backward computes it anyway
        given.name, other.name = other.name, given.name
    given.meta = dict(shard.meta)
    halves.outputs.insert(halves.results + index, shard)
    halves.given[shard] = given
    return given


def _erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erase these nodes and their sources where nothing uses them any more, and where they only compute a result."""
    stack, erased = list(nodes), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in erased and not node.users and not has_side_effect(node):
            stack += node.all_input_nodes
            erased.add(node)
            node.graph.erase_node(node)
