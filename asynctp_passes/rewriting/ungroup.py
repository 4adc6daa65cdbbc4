"""Spell out what hides chains: ops of several tensors between communication and matmuls, and waits for too much.

    _foreach_abs([a, b]) → getitem, getitem     becomes     abs(a), abs(b)

By its contract such an op does to each tensor what the single one does. An optimizer's stay: Inductor makes one kernel
of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import (
    arguments,
    hands_on_in_order,
    is_pointwise,
    items_of,
    name_of,
    op_name,
    short_name,
    tensor_of,
    value_of,
)
from asynctp_passes.ir.op_traits import View, traits_named
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.propagation import is_view
from asynctp_passes.rewriting.builder import INHERITED
from asynctp_passes.torch_private import fx_graphs, torch_ops


def ungroup(graph: fx.Graph) -> None:
    """Replace ops of several tensors between collectives and matmuls by single ones, in place."""
    for node in filter(_single_op, _between(graph)):
        count = len(node.meta["val"]) if isinstance(node.meta.get("val"), list | tuple) else 0
        items = items_of(node, range(count))
        if items and all(tensor_of(item) is not None for item in items.values()):
            _ungroup(graph, node, items)


def _single_op(node: fx.Node) -> Any:
    """The op of one tensor, in all its overloads, that an op of aten does to each of several; None for others."""
    namespace, _, rest = op_name(node).partition(".")
    name = rest.partition(".")[0]
    if namespace != "aten" or not name.startswith(_PREFIX) or node.target._schema.is_mutable:  # type: ignore[union-attr]
        return None
    return getattr(torch.ops.aten, name.removeprefix(_PREFIX), None)


_PREFIX = "_foreach_"
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""The single ops that take a number, where those of the same name take tensors only."""


def _between(graph: fx.Graph) -> list[fx.Node]:
    """The nodes on ways from gathers to matmuls, and from matmuls to reductions, in graph order."""
    if not any(map(_single_op, graph.nodes)):
        return []
    collectives = read_collectives(graph)
    gathers = [node for one in collectives if one.kind == "all_gather" for node in one.results]
    reduced = [one.input for one in collectives if one.kind in ("reduce_scatter", "all_reduce") and one.input]
    matmuls = list(filter(is_matmul, graph.nodes))
    before = [source for node in matmuls for source in node.all_input_nodes]
    after = [user for node in matmuls for user in node.users]
    down = [user for node in gathers for user in node.users]
    found = (_above(before) & _below(down)) | (_above(reduced) & _below(after))
    return [node for node in graph.nodes if node in found]


def _above(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return reachable(nodes, where=_goes_on)


def _below(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return reachable(nodes, lambda node: node.users, where=_goes_on)


def _goes_on(node: fx.Node) -> bool:
    return is_view(node) or is_pointwise(node) or _single_op(node) is not None


def _ungroup(graph: fx.Graph, node: fx.Node, items: dict[int, fx.Node]) -> None:
    """Replace the items of a call, where each is what a pointwise op, or a copy, of one tensor makes."""
    singles = {index: _single_call(node, index, item) for index, item in items.items()}
    if any(call is None for call in singles.values()):
        return
    for index, item in items.items():
        with graph.inserting_before(node):  # named for the program's op
            single = graph.create_node("call_function", *singles[index], name=f"{node.name}_{index}")  # type: ignore[misc]
        single.meta = {name: item.meta[name] for name in item.meta if name in ("val", *INHERITED)}
        item.replace_all_uses_with(single)
        graph.erase_node(item)
    graph.erase_node(node)


def _single_call(node: fx.Node, index: int, item: fx.Node) -> fx_graphs.Call | None:
    """The call that makes one item; None where neither a pointwise op nor a copy makes such a tensor."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip(schema, arguments(node).values(), strict=True))
    each = {one: value[index] if isinstance(value, list | tuple) else value for one, value in given.items()}
    args = tuple(value for one, value in each.items() if not one.kwarg_only)
    kwargs = {one.name: value for one, value in each.items() if one.kwarg_only}
    op = _single_op(node)
    forms = [(op, args, kwargs), (op, args[:-1], {**kwargs, "value": args[-1]})]
    if (of_numbers := _OF_NUMBERS.get(short_name(node).removeprefix(_PREFIX))) is not None:
        forms.append((getattr(torch.ops.aten, of_numbers), args, kwargs))
    calls = (fx_graphs.call_made_by(*form, value_of(item)) for form in forms)
    for call in calls:
        copies = call is not None and traits_named(name_of(call.target)).view is View.OVERWRITE  # which has no tag
        if call is not None and (copies or torch.Tag.pointwise in call.target.tags):
            return call
    return None


def name_last_only(graph: fx.Graph) -> None:
    """Let what orders streams wait for no more than it has to: torch's `control_deps` names all nodes before it.

    In `control_deps((mm, reduce_scatter, wait), ...)` it waits for `mm` by `wait` anyway. Without that use `mm` has no
    other user than the collective, and may become a part of a fused op.
    """
    for node in graph.nodes:
        if not hands_on_in_order(node):
            continue
        before: tuple[fx.Node, ...] = node.args[0]
        computed = {one for one in before if torch_ops.is_op(one.target)}  # no record of an event, which makes nothing
        last = tuple(one for one in before if one not in computed or computed.isdisjoint(one.users))
        node.args = (last, *node.args[1:])
