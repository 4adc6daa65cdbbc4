"""Make one all-reduce of several: asynctp's own, where the group's collectives are.

(x → all_reduce → wait)+                      becomes   x+ → cat → all_reduce → wait → split → clone+
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.calls import Collective
from asynctp_passes.ir.collectives import WAIT
from asynctp_passes.ir.nodes import op_name, value_of
from asynctp_passes.layout.propagation import views_of
from asynctp_passes.matching.chains import Bucket
from asynctp_passes.planning.legality import on_wire
from asynctp_passes.rewriting.builder import Builder, RewriteState
from asynctp_passes.rewriting.cleanup import erase_unused
from asynctp_passes.rewriting.emit_alone import IN_FLIGHT, options_of

__all__ = ["emit_bucket"]

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


def emit_bucket(state: RewriteState, bucket: Bucket, front: fx.Node) -> fx.Node:
    """Make one all-reduce of all members' elements; each member's result is memory of its own, as it was.

    Args:
        state: The graph.
        bucket: The all-reduces.
        front: It comes before this node, where no fused op stands there.

    Returns:
        What is reduced: the elements of all members.
    """
    anchor = state.starts[state.fused[bucket.place]] if bucket.place in state.fused else front
    build = Builder(state, bucket, anchor)
    values = [value_of(node) for node in bucket.inputs]
    lengths = [math.prod(value.shape) for value in values]
    flat = [build.reshape(build.now(node), (length,)) for node, length in zip(bucket.inputs, lengths, strict=True)]
    joined, first = build.call(_aten.cat.default, flat), bucket.collective
    ours = state.plan.is_own(first) and on_wire(first)
    op, options = (IN_FLIGHT["all_reduce"], options_of(state, first)) if ours else (_c10d.all_reduce.default, {})
    total = build.call(op, joined, first.reduce_op, first.group, computes=_like_first, **options)
    done = build.call(_c10d.wait_tensor.default, total, computes=_like_first)
    pieces = build.call(_aten.split_with_sizes.default, done, lengths)
    for index, (member, value) in enumerate(zip(bucket.members, values, strict=True)):
        piece = build.call(operator.getitem, pieces, index, like=member.node)
        result = build.call(_aten.clone.default, build.reshape(piece, tuple(value.shape)), like=member.node)
        for wait in _waits_again(member):
            build.replace(wait, wait.args[0])  # type: ignore[arg-type]  # a node
            build.graph.erase_node(wait)
        for wait in member.waits:
            build.replace(wait, result)
    erase_unused(state.graph, {node for member in bucket.members for node in member.results})
    return joined


def _waits_again(member: Collective) -> list[fx.Node]:
    """The waits for a result that has been waited for already, or for a view of it."""
    return [node for node in views_of(member.waits) if node not in member.waits and op_name(node) == WAIT]


def _like_first(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The fake result of a collective that keeps the shape: groups need not exist."""
    return torch.empty_like(tensor)
