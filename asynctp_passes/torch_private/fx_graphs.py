"""FX graphs: a record to put one back, the call that a function of nodes makes, and what Inductor notes in nodes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from asynctp_passes.torch_private import symbolic_sizes


class Call(NamedTuple):
    """A call of an op, with nodes for tensors."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_made_by(function: Callable[..., Any], args: Any, kwargs: Any, like: Tensor) -> Call | None:
    """The one op that a function of nodes calls, if its result is like a tensor; None for several or another result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[tuple[Any, Any, Any]] = []
    nodes: dict[int, fx.Node] = {}

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    def value_of(node: fx.Node) -> Any:
        nodes[id(node.meta["val"])] = node
        return node.meta["val"]

    values, named = fx.map_arg((args, kwargs), value_of)
    try:
        with symbolic_sizes.without_guards(like), Recorder():  # type: ignore[no-untyped-call]
            found = function(*values, **named)
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    if len(calls) != 1 or not isinstance(found, Tensor) or _layout_of(found) != _layout_of(like):
        return None
    op, values, named = torch.utils._pytree.tree_map(lambda value: nodes.get(id(value), value), calls[0])
    return Call(op, tuple(values), named)


def _layout_of(tensor: Tensor) -> tuple[str, ...]:
    return str(tensor.dtype), str(tensor.device), str(list(tensor.shape)), str(list(tensor.stride()))


def stream_of(node: fx.Node) -> int | None:
    """The stream on which the program runs a node, as torch numbers them; None: the one of the whole graph."""
    number: int | None = node.meta.get("custom", {}).get("stream")
    return number


class GraphRecord:
    """All of a graph that passes edit, recorded so that it can be put back: the same nodes, with the same values.

    Public functions make new nodes in place of erased ones. Inductor and others that hold the old ones would not know
    them, so erased nodes are taken into the graph again.

    Args:
        graph: The graph. Its nodes' values themselves are not copied.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes = [_NodeRecord(node) for node in graph.nodes]
        self._submodules = set(_submodules(graph))

    def restore(self) -> None:
        """Make the graph what it was: its nodes and their order, arguments, users, names and metadata."""
        recorded = {one.node for one in self._nodes}
        added = [node for node in self._graph.nodes if node not in recorded]
        for one in self._nodes:
            _revive(one.node)
        for before, after in itertools.pairwise(self._nodes):
            before.node.append(after.node)
        for one in self._nodes:
            one.restore()
        for node in added:
            node.args, node.kwargs = (), {}
        for node in added:
            self._graph.erase_node(node)
        for one in self._nodes:
            one.restore_users()
        for name in set(_submodules(self._graph)) - self._submodules:
            delattr(self._graph.owning_module, name)


class _NodeRecord:
    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.target, self.args, self.kwargs = node.target, node.args, node.kwargs
        self.name, self.meta, self.users = node.name, dict(node.meta), dict(node.users)

    def restore(self) -> None:
        node = self.node
        for name in ("target", "args", "kwargs", "name"):
            if getattr(node, name) is not getattr(self, name):
                setattr(node, name, getattr(self, name))
        node.meta.clear()
        node.meta.update(self.meta)

    def restore_users(self) -> None:
        self.node.users.clear()
        self.node.users.update(self.users)


def _revive(node: fx.Node) -> None:
    """Take a node that was erased into its graph again, at any place."""
    if node._erased:
        node._erased = False
        node._prev = node._next = node  # it still points to its former neighbours
        node.graph._find_nodes_lookup_table.insert(node)
        node.graph._len += 1


def _submodules(graph: fx.Graph) -> list[str]:
    module = graph.owning_module
    return [] if module is None else [name for name, _ in module.named_children()]


def nodes_hidden_by(node: fx.Node) -> Sequence[fx.Node]:
    """The nodes in whose place Inductor put a function that lowers them all (`woq_int8`); erased, they know their ops.

    None for a node that calls an op, or another function.
    """
    match = node.target.args[0] if isinstance(node.target, functools.partial) and node.target.args else None
    nodes: Sequence[fx.Node] = getattr(match, "nodes", ())
    return nodes


def packed_constants(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that are constants in mkldnn's own layout: weights that Inductor froze and packed."""
    module = node.graph.owning_module
    constants = (one for one in node.all_input_nodes if one.op == "get_attr" and module is not None)
    return [one for one in constants if getattr(getattr(module, str(one.target), None), "is_mkldnn", False)]


def has_folded_output_scale(node: fx.Node) -> bool:
    """True for a scaled matmul into which torch 2.15 has folded a multiplication of its output."""
    return bool(node.meta.get("inductor_folded_scaled_mm_output_scale"))
