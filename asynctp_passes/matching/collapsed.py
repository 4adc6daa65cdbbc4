"""A graph in which chains are one node each: what becomes of theirs, before any of it is done. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import fx

from asynctp_passes.ir.collectives import awaited_item
from asynctp_passes.ir.matmuls import added_matrix
from asynctp_passes.ir.order import communicates, in_turn
from asynctp_passes.ir.sizes import Sizes
from asynctp_passes.ir.traversal import draws, reachable
from asynctp_passes.matching.chains import Chain, GatherChain, Hoist, Step


def collapsed(
    graph: fx.Graph, sizes: Sizes, chains: Sequence[Chain], free: Container[fx.Node] = ()
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, Sequence[fx.Node]]]:
    """The arguments of `steps_of` for a graph whose chains are one step each, and whose communication is in order.

    What is `free` may change its place among what communicates. The first result has, for the nodes of a chain, its
    collective, which stands for it. The second has what nodes are computed from, where that is not `all_input_nodes`:
    sizes of what a chain does away with, from what the rewrite will read them off; items of several tensors, from their
    own tensor; what is reduced over all ranks' rows, from the shard; and draws and communication in their order.
    """
    owners: dict[fx.Node, fx.Node] = {}
    items = ((node, awaited_item(node)) for node in graph.nodes)
    inputs = draws(graph) | {node: [item] for node, item in items if item is not None}
    for chain in chains:
        own = chain.collective.node
        owners |= dict.fromkeys(chain.members, own)
        known = (node for node in chain.size_readers if "val" in node.meta)  # without it, chains are refused
        inputs |= {node: sizes.read_off(sizes.read(node), chain.inputs) for node in known}
        for collective in chain.collectives:
            if collective.call is not None:
                inputs[collective.node] = [collective.source]
        if chain.hoist is not None:
            for one in chain.hoist.cross_rank:
                sources = [*chain.inputs, *_others_above(chain.hoist, one.step)]
                inputs |= dict.fromkeys(one.nodes, sources)
        written = (matmul for matmul in chain.matmuls if matmul.call is not None)  # into a tensor, which is not read
        inputs |= {matmul.call: [matmul.a, *matmul.operands] for matmul in written}
        for matmul in chain.matmuls if isinstance(chain, GatherChain) else ():
            if added_matrix(matmul.node) is not None:  # `c` of `c + a @ b` is added after the fused op, where it was
                del owners[matmul.node]
                inputs[own] = [*inputs.get(own, own.all_input_nodes), *matmul.operands]
    return owners, in_turn([node for node in _starts(graph, chains) if node not in free], inputs)


def _starts(graph: fx.Graph, chains: Sequence[Chain]) -> list[fx.Node]:
    """The nodes that communicate, in order. Each chain does so once, in its place, by the node that stands for it.

    Of several tensors that are communicated together, those of chains come first.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    after: dict[fx.Node, list[fx.Node]] = {}
    for chain in chains:
        side = before if chain.follows is None else after
        side.setdefault(chain.anchor, []).append(chain.collective.node)
    alone = {one.node for chain in chains for one in chain.collectives if one.call is None}
    found: list[fx.Node] = []
    for node in graph.nodes:
        starts = communicates(node) and node not in alone
        found += [*before.get(node, ()), *([node] if starts else []), *after.get(node, ())]
    return found


def _others_above(hoist: Hoist, step: Step) -> list[fx.Node]:
    """The tensors besides its shard from which a rank computes its part of a step's result."""
    made_by = {one.node: one for one in (*hoist.steps, step)}
    above = reachable([step.node], lambda node: (part.root for _, part in made_by[node].parts), made_by.__contains__)
    return [other for node in above for other in made_by[node].others]
