"""Near misses: collectives that reach a matmul only through ops that change values.

Those are where a user loses time and does not learn of it, so they are reported as MISSED, with the way from one to the
other. Ops that a collective is still 'next to' a matmul through are views, pointwise ops, casts, reductions, and what
works row by row: norms, softmax, dropout, gates, quantization, be it by an op of the program's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from asynctp_passes.ir.nodes import is_pointwise, tensor_of, traits_of
from asynctp_passes.ir.order import communicates
from asynctp_passes.ir.read import called_name, is_matmul
from asynctp_passes.layout.propagation import is_view

__all__ = [
    "Ways",
    "names",
    "quantizes",
    "reduces",
    "transparent",
]

_WORDS = "norm|softmax|dropout|quant|quantize|silu|gelu|glu|geglu|swiglu"
_ROWWISE_WORDS = re.compile(rf"(?:^|_)(?:layer|rms)?({_WORDS})(?=_|$)")


def transparent(node: fx.Node) -> bool:
    """Ops through which a collective is still 'next to' a matmul: views, pointwise ops, casts, reductions, norms.

    Not one that communicates too, such as a norm of what it reduces over ranks.
    """
    named = bool(_rowwise_words(node)) and not communicates(node)
    return is_view(node) or is_pointwise(node) or reduces(node) or named


def _rowwise_words(node: fx.Node) -> list[str]:
    """The row-wise operations that an op's name tells of."""
    return _ROWWISE_WORDS.findall(called_name(node).partition(".")[2].partition(".")[0])


def reduces(node: fx.Node) -> bool:
    """True for sums, means, maxima and the like."""
    return traits_of(node).reduces is not None


class Ways:
    """The shortest ways through transparent ops to matmuls.

    Args:
        nodes: The nodes of a graph, each after all that `step` leads to from it.
        step: A node's users, or its inputs.
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
            if is_matmul(node) or not transparent(node):
                continue
            options = [(1, then) for then in step(node) if is_matmul(then) and arrives(then, node)]
            options += [(self._next[then][0] + 1, then) for then in step(node) if then in self._next]
            if options:
                self._next[node] = min(options, key=lambda option: option[0])

    def __contains__(self, node: fx.Node) -> bool:
        """True for a node from which transparent ops, its own included, lead to a matmul."""
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
    steps = [name.split(".")[1] if "." in name else name for name in map(called_name, nodes)]
    shown = steps if len(steps) <= 6 else [*steps[:3], "...", *steps[-2:]]
    return " -> ".join(shown)
