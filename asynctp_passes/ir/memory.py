"""In whose memory the values of a graph's nodes lie. Pure."""

from __future__ import annotations

from torch import fx

from asynctp_passes.ir.collectives import awaited_item
from asynctp_passes.ir.nodes import is_number, mutates, op_name, traits_of, written_by
from asynctp_passes.torch_private import torch_ops


def owners_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node, the one that made the memory in which its values lie: itself, unless it is a view of another.

    A node that may be a view, or a copy, counts as a view.
    """
    owners: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _viewed(node)
        owners[node] = node if source is None else owners[source]
    return owners


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node in whose memory a node's values may lie; None for memory of its own."""
    source = next((one for one in node.all_input_nodes if not is_number(one)), None)
    if source is None or node.op != "call_function":
        return None
    if op_name(node) == "getitem":
        if (awaited := awaited_item(node)) is not None:
            return awaited
        is_alias = traits_of(source).view is not None or torch_ops.may_alias(source)
        return source if is_alias or not torch_ops.is_op(source.target) else None
    traits = traits_of(node)
    same = traits.view is not None and not traits.copies  # as a wait, whose schema does not say so
    return source if same or torch_ops.may_alias(node) else None


def program_memory(graph: fx.Graph, owners: dict[fx.Node, fx.Node], results: int | None = None) -> set[fx.Node]:
    """The owners whose memory the program has: inputs of a graph, and what its results lie in. It can write there.

    The first `results` of its outputs are results; all if None.
    """
    outputs = graph.output_node().args[0]
    taken = list(outputs)[:results] if isinstance(outputs, list | tuple) else [outputs]
    inputs = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    return inputs | {owners[node] for node in taken if isinstance(node, fx.Node)}


def written_memory(graph: fx.Graph, owners: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The owners whose memory in-place operations of the graph change, or may change."""
    writers = [node for node in graph.nodes if mutates(node)]
    return {owners[one] for node in writers for one in (node, *written_by(node))}
