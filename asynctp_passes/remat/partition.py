"""Around torch's partitioner: let the backward that it has made gather again what the forward need not keep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.nodes import has_side_effect, is_number, tensor_of
from asynctp_passes.ir.order import CANDIDATE, REMATERIALIZED, communications, note_joint, recorded_place
from asynctp_passes.ir.traversal import tangents_of
from asynctp_passes.planning import cost_model
from asynctp_passes.planning.deviations import communicated
from asynctp_passes.ranks.undo import UndoOnError
from asynctp_passes.remat.expressible import Halves, Rematerialization, find_rematerializations
from asynctp_passes.reporting.report import Report
from asynctp_passes.torch_private import dynamo, partitioner

log = logging.getLogger(__name__)

_Divided = tuple[fx.GraphModule, fx.GraphModule]


def run_partition(
    gm: fx.GraphModule, divide: Callable[[], _Divided], results: int | None, config: Config
) -> tuple[fx.GraphModule, fx.GraphModule, Report | None]:
    """Divide a joint graph, and let the backward make gathers again in place of what the forward keeps of them.

    Args:
        gm: The joint graph, after `run_joint`.
        divide: Divides it.
        results: How many outputs of the forward are results of the program; None where that is not known.
        config: The configuration.

    Returns:
        The forward, the backward, and a report where asynctp itself failed, which left both as they were.

    Raises:
        DisagreementError: asynctp failed after all ranks had agreed on something; the graphs are untouched.
        StrictError: asynctp itself failed, and `config.strict` forbids it; the graphs are untouched.
    """
    before = UndoOnError(gm.graph, config, "partition")
    keys: dict[str, str] | None = None
    with before:
        keys, tagged = _facts(gm.graph)
    forward, backward = divide()
    if keys is None:
        return forward, backward, before.fall_back()
    if not keys:
        return forward, backward, None
    attempt = UndoOnError(backward.graph, config, "partition", other=forward.graph, keys=keys)
    with attempt:
        _rematerialize(Halves(forward.graph, backward.graph, results, tagged), keys, attempt)
        forward.recompile()
        backward.recompile()
        return forward, backward, None
    return forward, backward, attempt.fall_back()


def _facts(graph: fx.Graph) -> tuple[dict[str, str], set[str]]:
    """The hash of each group's collectives (empty without a backward), and the nodes that checkpointing has tagged."""
    if not (tangents_of(graph) and communications(graph.nodes)):
        return {}, set()
    tagged = {node.name for node in graph.nodes if partitioner.recompute_tag(node) is not None}
    return communicated(read_collectives(graph)), tagged


def _rematerialize(halves: Halves, keys: dict[str, str], attempt: UndoOnError) -> None:
    found, left = find_rematerializations(halves)
    for node, why in left.items():
        log.info("asynctp: %s: %s is not made again in the backward: %s", dynamo.compile_name(), node.name, why)
    chosen, told = attempt.agree(keys, {(one.gather.group_key, one.text): one for one in found})
    if chosen:
        rematerialize(halves, chosen)
    for half in (halves.forward, halves.backward):
        note_joint(half, told)


# --- the edit ----------------------------------------------------------------------------------------------------
def rematerialize(halves: Halves, chosen: Sequence[Rematerialization]) -> None:
    """Let the backward make gathers of the forward again, in place of what the forward keeps.

    A gather is put in front of what needs it first, or of what needs a gather that comes after it: so they keep the
    program's order.
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
