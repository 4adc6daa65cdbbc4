"""Compute fp8's scales once: Inductor computes what is small again for every element that it is multiplied with.

    amax [rows, 1] ─▶ fp64 ─▶ clamp ─▶ 448 / … ─▶ fp32 ─▶ log2 ─▶ floor ─▶ exp2  =  scale [rows, 1]
    x [rows, K] ─▶ * scale ─▶ clamp ─▶ fp8

Inductor makes all this one kernel, which divides in fp64 for every element of x: up to five times memory's time. Only
tensors are stored that are fp32 or fp64 in the program too, so that the bits are the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from functools import partial

import torch
from torch import fx

from asynctp_passes.ir.nodes import dtype_of, is_pointwise, tensor_of, value_of
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.propagation import is_view
from asynctp_passes.rewriting.builder import INHERITED
from asynctp_passes.torch_private import inductor_order

LEAST_ELEMENTS = 1 << 20
"""Elements of what is multiplied, below which a kernel more costs as much as it saves."""
LEAST_SPREAD = 64
"""How many elements each stored one is for, at least."""


def scales_to_store(graph: fx.Graph) -> list[fx.Node]:
    """The small tensors that are computed in fp64, where many more elements meet them.

    These have the same bits in memory as in a kernel. Others are left to Inductor, and those of unknown sizes.
    """
    exact = [node for node in graph.nodes if _is_pointwise(node) and dtype_of(node) in (torch.float32, torch.float64)]
    return [node for node in exact if _meets_many(node) and _in_fp64(node)]


def _is_pointwise(node: fx.Node) -> bool:
    return is_pointwise(node) and tensor_of(node) is not None


def _count(node: fx.Node) -> int:
    """Elements; 0 when that is not known."""
    value = tensor_of(node)
    sizes = () if value is None else value.shape
    return math.prod(sizes) if value is not None and all(isinstance(size, int) for size in sizes) else 0


def _meets_many(node: fx.Node) -> bool:
    """True when a pointwise op with many more elements reads it, through any views."""
    count = _count(node)
    least = max(LEAST_ELEMENTS, LEAST_SPREAD * count)
    seen_as = reachable([node], lambda one: one.users, lambda one: one is node or is_view(one))
    readers = {user for one in seen_as for user in one.users}
    return count > 0 and any(_is_pointwise(user) and _count(user) >= least for user in readers)


def _in_fp64(node: fx.Node) -> bool:
    """True when pointwise ops of as few elements compute it with fp64."""
    count = _count(node)

    def inlined(one: fx.Node) -> bool:
        return (_is_pointwise(one) or is_view(one)) and 0 < _count(one) <= count

    values = [tensor_of(one) for one in reachable([node], where=inlined)]
    return any(value is not None and value.dtype == torch.float64 for value in values)


def store(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Let Inductor store these tensors and read them from memory, instead of computing them in each kernel again."""
    for node in nodes:
        with graph.inserting_after(node):
            stored = graph.call_function(inductor_order.stored_op(), (node, value_of(node).stride()))
        stored.meta = {name: node.meta[name] for name in ("val", *INHERITED) if name in node.meta}
        node.replace_all_uses_with(stored, delete_user_cb=partial(operator.is_not, stored))
