"""Near misses: collectives that reach a matmul only through ops that change values.

Those are where a user loses time and does not learn of it, so they are reported as MISSED, with the way from one to the
other. Ops that a collective is still 'next to' a matmul through are views, pointwise ops, casts, reductions, and what
works row by row: norms, softmax, dropout, gates, quantization, be it by an op of the program's own.

A reduction is next to a matmul also through any other op of the program's own that returns as many rows as it takes,
unless its name tells that it mixes rows or multiplies by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.collectives import looks_collective
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import (
    called_name,
    called_op,
    first_tensor,
    is_pointwise,
    is_size,
    name_of,
    op_name,
    short_name,
    subgraphs_of,
    tensor_of,
    traits_of,
)
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.order import opaque_ops, surely_starts
from asynctp_passes.ir.registry import can_promise, promise_of, schema_name
from asynctp_passes.ir.sizes import identical
from asynctp_passes.layout.propagation import is_view
from asynctp_passes.torch_private import torch_ops

__all__ = [
    "Ways",
    "absent",
    "callers",
    "computed_from",
    "inputs_next_to",
    "is_registered_rowwise",
    "is_vector",
    "known_rowwise",
    "looks_up",
    "names",
    "only_scales",
    "quantizes",
    "reduces",
    "to_register",
    "transparent",
    "users_next_to",
]

_WORDS = "norm|softmax|dropout|quant|quantize|silu|gelu|glu|geglu|swiglu"
_ROWWISE_WORDS = re.compile(rf"(?:^|_)(?:layer|rms)?({_WORDS})(?=_|$)")
_MIXING_WORDS = re.compile(r"attn|attention|moe|expert|mamba|ssm|scan|conv")
_NOT_OF_PROGRAMS = {"aten", "prims", "asynctp", "symm_mem"}
_TRITON_KERNEL = "triton_kernel_wrapper_functional"


def transparent(node: fx.Node) -> bool:
    """Ops through which a collective is still 'next to' a matmul: views, pointwise ops, casts, reductions, norms.

    Not one that communicates too, such as a norm of what it reduces over ranks.
    """
    named = bool(_rowwise_words(node)) and not _acts_as_collective(node)
    return is_view(node) or is_pointwise(node) or reduces(node) or named


def looks_up(node: fx.Node, numbers: fx.Node) -> bool:
    """True for an op that picks rows of another tensor by these numbers."""
    return traits_of(node).view is View.PICK and first_tensor(node) is not numbers


def users_next_to(node: fx.Node) -> Iterable[fx.Node]:
    """The users through which a collective is still 'next to' a matmul."""
    return node.users if transparent(node) or is_registered_rowwise(node) else ()


def inputs_next_to(node: fx.Node) -> Iterable[fx.Node]:
    """The inputs through which a collective is still 'next to' a matmul."""
    return node.all_input_nodes if transparent(node) or is_registered_rowwise(node) else ()


def computed_from(node: fx.Node) -> Iterable[fx.Node]:
    """The inputs through which a reduction is still 'next to' a matmul."""
    return inputs_next_to(node) or _rows_of_own_op(node)


def _rows_of_own_op(node: fx.Node) -> list[fx.Node]:
    """The inputs of an op of the program's own that have as many rows as one of its results; none of other nodes."""
    op, name = called_op(node), called_name(node)
    own = op_name(node) == _TRITON_KERNEL if op is None else name_of(op).partition(".")[0] not in _NOT_OF_PROGRAMS
    if not own or _acts_as_collective(node) or _MIXING_WORDS.search(name):
        return []
    results = [shape for value in _values(node) if (shape := _rows(value)) is not None]
    sources = ((source, _rows(source.meta.get("val"))) for source in node.all_input_nodes)
    return [source for source, rows in sources if rows is not None and any(_same(rows, other) for other in results)]


def _acts_as_collective(node: fx.Node) -> bool:
    """True for what communicates, or is called so: the words only choose what is told of a miss."""
    return surely_starts(node) or looks_collective(called_name(node))


def _values(node: fx.Node) -> Iterable[Any]:
    value = node.meta.get("val")
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, tuple | list) else [value]


def _rows(value: Any) -> tuple[Any, ...] | None:
    """The sizes of a floating tensor's dimensions but the last; None for vectors and columns, which hold statistics."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    return None if identical(value.shape[-1], 1) else tuple(value.shape[:-1])


def _same(rows: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(rows) == len(other) and all(map(identical, rows, other))


def _rowwise_words(node: fx.Node) -> list[str]:
    """The row-wise operations that an op's name tells of."""
    return _ROWWISE_WORDS.findall(called_name(node).partition(".")[2].partition(".")[0])


def reduces(node: fx.Node) -> bool:
    """True for sums, means, maxima and the like."""
    return traits_of(node).reduces is not None


class Ways:
    """The shortest ways to matmuls.

    Args:
        nodes: The nodes of a graph, each after all that `step` leads to from it.
        step: The users or the inputs of a node that a way goes on to; none where it ends.
        arrives: Whether a way ends at a matmul, where it comes from a node next to that.
    """

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        step: Callable[[fx.Node], Iterable[fx.Node]],
        arrives: Callable[[fx.Node, fx.Node], bool] = lambda matmul, before: True,
    ) -> None:
        self._arrives = arrives
        self._next: dict[fx.Node, tuple[int, fx.Node]] = {}  # how many steps away a matmul is, and the first of them
        for node in nodes:
            if is_matmul(node):
                continue
            further = list(step(node))
            options = [(1, then) for then in further if is_matmul(then) and arrives(then, node)]
            options += [(self._next[then][0] + 1, then) for then in further if then in self._next]
            if options:
                self._next[node] = min(options, key=lambda option: option[0])

    def __contains__(self, node: fx.Node) -> bool:
        """True for a node from which steps lead to a matmul."""
        return node in self._next

    def path(self, start: fx.Node, before: fx.Node) -> list[fx.Node]:
        """A shortest path from `start`, reached from `before`, to a matmul; empty without one."""
        if is_matmul(start):
            return [start] if self._arrives(start, before) else []
        steps = [start]
        while steps[-1] in self:
            steps.append(self._next[steps[-1]][1])
        return steps if start in self else []


def quantizes(node: fx.Node) -> bool:
    """True for a cast to fp8 or int8, and for an op of the program's own that is called so."""
    value = tensor_of(node)
    if traits_of(node).casts:
        fp8 = value is not None and value.dtype.itemsize == 1 and value.dtype.is_floating_point
        return fp8 or (value is not None and value.dtype == torch.int8)
    return any(word.startswith("quant") for word in _rowwise_words(node))


def names(nodes: Sequence[fx.Node]) -> str:
    """The ops along a way, for people: `abs -> amax -> ... -> mm`."""
    steps = [short_name(node) for node in nodes]
    shown = steps if len(steps) <= 6 else [*steps[:3], "...", *steps[-2:]]
    return " -> ".join(shown)


def to_register(opaque: Iterable[fx.Node]) -> str:
    """Opaque ops, for people, with the line that registers each if it is local; at most three."""
    found = list(dict.fromkeys(name for node in opaque for name in opaque_ops(node)))
    told = [f'{name}: register_local("{schema_name(name)}")' if "." in name else name for name in found[:3]]
    return ", ".join([*told, *(["..."] if len(found) > 3 else [])])


def is_registered_rowwise(node: fx.Node) -> bool:
    """True for an op that is registered to work row by row."""
    return promise_of(op_name(node)) == "rowwise"


def known_rowwise(node: fx.Node) -> str:
    """The words for a row-wise operation that a node is not known to be, with the line that would register it."""
    name = op_name(node)
    if not torch_ops.is_op(node.target) or not can_promise(name):
        return "a row-wise operation"
    return f'known to be row-wise: if it is, register_rowwise("{schema_name(name)}")'


def is_vector(node: fx.Node | None) -> bool:
    """True for a tensor of one dimension, or of none."""
    value = tensor_of(node)
    return value is not None and value.dim() < 2


def only_scales(scalings: Container[fx.Node], node: fx.Node) -> bool:
    """True when a node is one of these multiplications, or only such take it, element by element."""
    stack = [node]
    while stack:
        step = stack.pop()
        if step in scalings:
            continue
        users = [user for user in step.users if not is_size(user)]
        if not users or len(step.all_input_nodes) != 1 or reduces(step) or not transparent(step):
            return False
        stack += users
    return True


def absent(nodes: Sequence[fx.Node], border: str) -> reasons.Reason:
    """Why no matmul is among these users or makers of a tensor: all are in other graphs, or they are other ops."""

    def is_outside(node: fx.Node) -> bool:
        ran = node.all_input_nodes if op_name(node) == "getitem" else [node]
        return node.op == border or any(map(subgraphs_of, ran))

    return reasons.OUTSIDE_GRAPH if nodes and all(map(is_outside, nodes)) else reasons.NO_MATMUL


def callers(nodes: Iterable[fx.Node]) -> str:
    """Ops, for people: at most three; where a graph begins and ends is said too."""
    ends = {"placeholder": "an input of the graph", "output": "what takes the graph's results"}
    found = dict.fromkeys(ends.get(node.op) or called_name(node) or node.name for node in nodes)
    names = list(found)[:3] + (["..."] if len(found) > 3 else [])
    return ", ".join(names) or "nothing"
