"""Read collectives off a graph: each op's arguments by name, once, as a frozen value.

An op of another library is a collective if it is registered, or if its schema or its arguments have a process group.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.nodes import (
    arguments,
    called_name,
    called_op,
    carried,
    first_tensor,
    items_of,
    op_name,
    tensor_of,
)
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.registry import (
    CollectiveKind,
    CollectiveOp,
    collective_op,
    is_registered,
    kind_of_other,
    promise_of,
    surely_communicates,
)
from asynctp_passes.ir.sizes import Sizes, same_sizes
from asynctp_passes.torch_private import process_groups, symbolic_sizes

WAIT = "_c10d_functional.wait_tensor.default"
_OWN = ("_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.reduce_scatter_tensor.default")
_CHECKED = {
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional_autograd.reduce_scatter_tensor.default",
}
"""Reduce-scatters that raise on a rank, before it sends, unless the ranks divide the first size of its input."""


def is_only_awaited(collective: Collective) -> bool:
    """True for torch's own all-gather or reduce-scatter, whose result nothing looks at before it is waited for."""
    waits = collective.waits
    return op_name(collective.node) in _OWN and bool(waits) and all(user in waits for user in collective.node.users)


def read_collectives(graph: fx.Graph) -> list[Collective]:
    """Every collective of the graph, in order; those that cannot be read included (kind `"other"`)."""
    return [collective for node in graph.nodes for collective in _read_collective(node)]


def _read_collective(node: fx.Node) -> Sequence[Collective]:
    """The collectives of a node: none, one, or one for each of several tensors."""
    op = collective_op(op_name(node))
    members = [] if op is None else _members(node, op)
    read = [member for member in members if member is not None]
    if read and len(read) == len(members):
        return read
    return [Collective(node, "other", first_tensor(node))] if op is not None or _is_collective(node) else []


def _is_collective(node: fx.Node) -> bool:
    """True for another known collective, and for an op that takes a process group and is not known to be local."""
    name = called_name(node)
    if name.startswith("asynctp.") or called_op(node) is None or promise_of(name) is not None:
        return False
    if surely_communicates(name) or kind_of_other(name) != "other":
        return True
    groups = ("group", "group_name")  # torch's own schemas call a text so
    told = ((value, isinstance(value, str) and key in groups) for key, value in arguments(node).items())
    return any(is_group or process_groups.is_process_group(value) for value, is_group in told)


def _members(call: fx.Node, op: CollectiveOp) -> list[Collective | None]:
    """The collective of each tensor of a call; None where an argument is none that can be read."""
    values = arguments(call)
    tensors = values.get(op.input, next(iter(values.values())))
    if isinstance(tensors, fx.Node):
        return [_member(call, op, values, tensors)]
    items = items_of(call, range(len(tensors))) if isinstance(tensors, list | tuple) else None
    if items is None:
        return []
    return [_item(call, op, values, tensor, items.get(index)) for index, tensor in enumerate(tensors)]


def read_sizes(graph: fx.Graph, collectives: Sequence[Collective], erased: Container[fx.Node] = ()) -> Sizes:
    """The reader of a graph's sizes. It assumes that a size that is scattered is a multiple of the ranks.

    A run in which it is not ends with an error: of the collective, or of the op in its place, which checks the same.
    Three kinds of collectives prove nothing: those that may be `erased`, those of a list of tensors, which NCCL does
    not check, and registered ones, which may do anything with the rest.
    """
    checked = (one for one in collectives if op_name(one.node) in _CHECKED and one.node not in erased)
    inputs = ((tensor_of(one.input), one.group_size) for one in checked if one.group_size > 1)
    divided = [(value.shape[0], ranks) for value, ranks in inputs if value is not None and value.dim()]
    return Sizes(graph, (collective.group_size for collective in collectives), divided)


def left_items(call: fx.Node) -> dict[int, Collective]:
    """The tensors of a collective of several that are communicated, and that nothing takes, by their place in it."""
    read = enumerate(_read_collective(call))
    return {place: replace(one, kind=sent_kind(one)) for place, one in read if one.call is not None and one.is_unused}


def sent_kind(collective: Collective) -> CollectiveKind:
    """The kind of a collective, also of a list's tensor that nothing takes on this rank, and is read as `"other"`."""
    op = collective_op(op_name(collective.call)) if collective.call is not None else None
    return collective.kind if op is None else op.kind


def _item(call: fx.Node, op: CollectiveOp, values: dict[str, Any], tensor: Any, item: Any) -> Collective | None:
    """The collective of one tensor of several."""
    member = _member(item or call, op, values, tensor, call)
    return member if item is not None or member is None else replace(member, kind="other")


def _member(
    node: fx.Node, op: CollectiveOp, values: dict[str, Any], tensor: Any, call: fx.Node | None = None
) -> Collective | None:
    """One tensor's collective; None when an argument is none that can be read."""
    value, group = tensor_of(node), values[op.group]
    dim = values[op.dim] if isinstance(op.dim, str) else op.dim
    size = values[op.size] if isinstance(op.size, str) else op.size
    if not (isinstance(dim, int) and isinstance(size, int | None)) or unknown_group(call or node) is not None:
        return None
    if value is not None and not symbolic_sizes.is_contiguous(value) and op.kind != "all_reduce":
        return None
    if dim and (value is None or not -value.dim() <= dim < value.dim()):
        return None
    if not _keeps_promise(op, tensor_of(tensor), value):
        return None
    group = dict(op.groups).get(group, group) if isinstance(group, str) else group
    known = carried(group)
    return Collective(
        node=node,
        kind=op.kind,
        input=tensor,
        waits=tuple(_waits(node)),
        group=group,
        group_key=process_groups.group_name_of(known) or (f"%{group.name}" if isinstance(group, fx.Node) else ""),
        group_size=process_groups.size_of_group(known) if size is None else size,
        reduce_op=values.get(op.reduce_op, op.reduce_op),
        dim=dim % value.dim() if dim and value is not None else 0,
        call=call,
        mesh_dim=process_groups.mesh_dimension_of(known),
    )


def unknown_group(call: fx.Node) -> str | None:
    """The name that a registered collective gives its group by, if torch knows no group of that name here."""
    op = collective_op(op_name(call)) if is_registered(op_name(call)) else None
    group = None if op is None else arguments(call).get(op.group)
    if op is None or not isinstance(group, str):
        return None
    known = process_groups.names()
    return group if known and dict(op.groups).get(group, group) not in known else None


def _keeps_promise(op: CollectiveOp, before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    """False for a result of another dtype, and for an all-reduce's of another shape; lengths are looked at later."""
    if before is None or after is None:
        return True
    return before.dtype == after.dtype and (op.kind != "all_reduce" or same_sizes(before.shape, after.shape))


def waits_for_several(node: fx.Node) -> bool:
    """True for the wait for a list of tensors: from torch 2.15 on those of one collective are waited for together."""
    return op_name(node) == "_c10d_functional.wait_tensors.default"


def awaited_item(node: fx.Node) -> fx.Node | None:
    """The tensor that an item of several, which were waited for together, is; None for other nodes."""
    if op_name(node) != "getitem" or not waits_for_several(node.args[0]):  # type: ignore[arg-type]
        return None
    tensors, index = node.args[0].args[0], node.args[1]  # type: ignore[union-attr]
    item = tensors[index] if isinstance(tensors, list | tuple) and isinstance(index, int) else None
    return item if isinstance(item, fx.Node) else None


def _waits(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that are a collective's result, waited for."""
    for user in node.users:
        if op_name(user) == WAIT:
            yield user
        elif waits_for_several(user):
            yield from (item for item in user.users if awaited_item(item) is node)


def rank_of(collective: Collective) -> int | None:
    """This process's rank in a collective's group; None where there is no such group, or it is not in it."""
    return process_groups.rank_in_group(carried(collective.group))
