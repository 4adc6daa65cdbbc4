"""Tensors that cross a graph's border: gathered or multiplied before it ends, or multiplied or reduced after it begins.

    all_gather -> views -> result of the graph          input of the graph -> views -> left operand of a matmul
    matmul     -> views -> result of the graph          input of the graph -> views -> reduce_scatter, all_reduce

A matmul that looks like a weight's gradient is left out: what reduces it in another graph is data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from asynctp_passes.ir.matmuls import contracts_rows, feeds_left_operand, is_matmul
from asynctp_passes.ir.nodes import describe, module_of, nodes_in, source_of, subgraphs_of, tensor_of, traits_of
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.records import Crossing
from asynctp_passes.ir.sizes import as_size, product, same
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.torch_private import partitioner


def crossings_of(graph: fx.Graph, unfused: Iterable[Collective]) -> tuple[Crossing, ...]:
    """The crossings of a graph before it is rewritten; `unfused` has its collectives that are in scope and stay."""
    found, collectives = list[Crossing](), list(unfused)
    matmuls = [node for node in graph.nodes if is_matmul(node)]
    makers = [node for node in matmuls if not contracts_rows(node)]
    for index, node in partitioner.program_outputs(graph).items():
        made_of = _from(node)
        for gather in (one for one in collectives if one.kind == "all_gather"):
            if made_of.intersection(gather.results) and _as_large(node, gather.node):
                found.append(_of_collective(True, index, gather, gather.node))
        if maker := next((one for one in makers if one in made_of and _as_large(node, one)), None):
            found.append(_of_matmul(True, index, maker, maker))
    for node, index in partitioner.program_inputs(graph).items():
        becomes = _into(node)
        if taker := next((one for one in matmuls if _multiplies(one, becomes)), None):
            found.append(_of_matmul(False, index, taker, node))
        for one in collectives:
            if one.kind in ("reduce_scatter", "all_reduce") and one.input in becomes and _as_large(node, one.source):
                found.append(_of_collective(False, index, one, one.source))
    return tuple(found)


def multiplied_by(region: fx.Node, tensor: fx.Node) -> bool:
    """True where a graph that a higher-order op runs has a tensor for the left operand of a matmul."""
    given = [one for one in nodes_in(region.args) if one.op != "get_attr"]
    for graph in subgraphs_of(region):
        inputs = graph.find_nodes(op="placeholder")
        matmuls = [node for node in graph.nodes if is_matmul(node)]
        taken = zip(given[-len(inputs) :], inputs, strict=False)  # before them may be the predicate of torch.cond
        if any(_multiplies(one, _into(inner)) for outer, inner in taken if outer is tensor for one in matmuls):
            return True
    return False


def product_of(region: fx.Node, item: int) -> bool:
    """True where a result of a higher-order op, by its number, is that of a matmul in a graph that it runs."""
    for graph in subgraphs_of(region):
        results = graph.output_node().args[0]
        one = results[item] if isinstance(results, list | tuple) and item < len(results) else results
        if isinstance(one, fx.Node) and any(map(is_matmul, _from(one))):
            return True
    return False


def _from(node: fx.Node) -> set[fx.Node]:
    """The nodes that a tensor is a view of, itself included."""
    return reachable([node], lambda one: one.all_input_nodes if _is_view(one) else ())


def _into(node: fx.Node) -> set[fx.Node]:
    """The nodes that are views of a tensor, itself included."""
    return reachable([node], lambda one: [user for user in one.users if _is_view(user)])


def _is_view(node: fx.Node) -> bool:
    """True for a view that a whole tensor may go through: where all of its pieces arrive, it is whole again."""
    return traits_of(node).is_whole_or_piece


def _multiplies(matmul: fx.Node, operands: set[fx.Node]) -> bool:
    return any(feeds_left_operand(matmul, one) for one in matmul.all_input_nodes if one in operands)


def _as_large(node: fx.Node, other: fx.Node) -> bool:
    """True where two tensors have as many elements."""
    first, second = tensor_of(node), tensor_of(other)
    if first is None or second is None:
        return False
    return same(*(product(map(as_size, one.shape)) for one in (first, second)))


def _of_collective(leaves: bool, index: int, one: Collective, tensor: fx.Node) -> Crossing:
    place = (source_of(one.node), module_of(one.node))
    return Crossing(leaves, index, one.kind, one.node.name, describe(tensor), *place, one.group_key, one.group_size)


def _of_matmul(leaves: bool, index: int, matmul: fx.Node, tensor: fx.Node) -> Crossing:
    return Crossing(leaves, index, "matmul", matmul.name, describe(tensor), source_of(matmul), module_of(matmul))
