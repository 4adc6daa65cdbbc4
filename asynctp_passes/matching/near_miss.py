"""Near misses: collectives that reach a matmul only through ops that change values.

They are reported as MISSED, with the way from one to the other. Ops that a collective is still 'next to' a matmul
through are views, pointwise ops, casts, reductions, norms and the like, and ops that are registered to be row-wise. An
unknown op of another library counts as well, if it returns as many rows as it takes. So that nothing is silent, a way
goes on through torch's other ops of as many rows, and unknown ones of as many columns. An op that is registered as
local, and not as row-wise, ends it, and so does one that multiplies by itself, as attention.

Rows flow on, not what is put to them: a mask, a factor or a bias that is smaller than the rows it meets.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import dropwhile
from typing import Any

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import (
    called_name,
    calls_op,
    first_tensor,
    handed_on_by,
    is_pointwise,
    is_random,
    is_size,
    op_name,
    short_name,
    subgraphs_of,
    tensor_of,
    traits_of,
    users_past,
    values_of,
)
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.order import opaque_ops, surely_starts
from asynctp_passes.ir.registry import can_promise, contracts, normalizes, promise_of, schema_name
from asynctp_passes.ir.sizes import identical, same_sizes
from asynctp_passes.layout.propagation import is_view
from asynctp_passes.torch_private import torch_ops, triton_kernels


def transparent(node: fx.Node) -> bool:
    """Known ops through which a collective is 'next to' a matmul: views, pointwise ops, casts, reductions, norms.

    So is what hands a tensor on once streams are ordered.
    """
    known = is_view(node) or is_pointwise(node) or reduces(node) or normalizes(called_name(node))
    return known or handed_on_by(node) is not None


def users_next_to(node: fx.Node) -> Iterable[fx.Node]:
    """The users through which a collective is still 'next to' a matmul."""
    return [user for user in _users(node) if _follows_rows(user, node)] if _passes(node) else ()


def inputs_next_to(node: fx.Node) -> Iterable[fx.Node]:
    """The inputs through which a collective is still 'next to' a matmul."""
    if not _passes(node):
        return ()
    return _sources_of_rows(node) if _is_unknown(node) else _inputs_of(node)


def _follows_rows(user: fx.Node, source: fx.Node) -> bool:
    """False for an unknown op that returns other rows than the tensor `source` has."""
    return not _is_unknown(user) or source in _sources_of_rows(user)


def takers_of(node: fx.Node) -> Iterable[fx.Node]:
    """The users that make rows of a node's rows, by ops of any kind."""
    return [user for user in _users(node) if carries(user, node)] if _passes(node) or is_other(node) else ()


def sources_of(node: fx.Node) -> Iterable[fx.Node]:
    """The inputs of whose rows a node's are made, by ops of any kind."""
    if is_other(node):
        return [one for one in _sources_of_rows(node, kept=False) if carries(node, one)]
    return [one for one in _inputs_of(node) if carries(node, one)] if _passes(node) else ()


def _users(node: fx.Node) -> list[fx.Node]:
    return [past for user in node.users for past in users_past(user, node)]


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node; of what an op that orders streams hands on, that tensor."""
    source = handed_on_by(node)
    return node.all_input_nodes if source is None else [source]


def carries(user: fx.Node, source: fx.Node) -> bool:
    """True where an op makes rows of the rows of a tensor, which is not only put to those of another one."""
    values, looks_up = values_of(source), traits_of(user).view is View.PICK and first_tensor(user) is not source
    if looks_up or (values and all(value.dtype == torch.bool for value in values)):
        return False
    if is_other(user):
        return source in _sources_of_rows(user, kept=False, used_later=True)
    return _follows_rows(user, source) and not _is_beside(user, source)


def is_other(node: fx.Node) -> bool:
    """True for an op of torch's, or an unknown one, that nothing makes row-wise: no collective, and nothing local.

    Attention, convolutions and recurrent layers are none: they multiply by themselves.
    """
    if node.op != "call_function" or _passes(node) or is_matmul(node) or is_size(node) or is_random(node):
        return False
    name = called_name(node)
    ends = contracts(name) or surely_starts(node) or subgraphs_of(node) or traits_of(node).constant is not None
    return not ends and (_is_unknown(node) or not can_promise(name))


def _is_beside(node: fx.Node, operand: fx.Node) -> bool:
    """True for an operand of a pointwise op that is smaller than another one, or has a number for each of its rows."""
    own, whole = tensor_of(operand), tensor_of(node)
    if own is None or whole is None or not is_pointwise(node) or same_sizes(_sizes(own), _sizes(whole)):
        return False
    narrow = not _sizes(own) or (identical(own.shape[-1], 1) and not identical(whole.shape[-1], 1))
    others = (tensor_of(other) for other in node.all_input_nodes if other is not operand)
    return narrow or any(same_sizes(_sizes(other), _sizes(whole)) for other in others if other is not None)


def _sizes(value: torch.Tensor) -> tuple[Any, ...]:
    """The sizes of a tensor without ones in front."""
    return tuple(dropwhile(lambda size: identical(size, 1), value.shape))


def _passes(node: fx.Node) -> bool:
    return transparent(node) or is_registered_rowwise(node) or bool(_is_unknown(node) and _sources_of_rows(node))


def _is_unknown(node: fx.Node) -> bool:
    """True for an op of another library that is in no table and not registered, and for a user's Triton kernel."""
    name = called_name(node)
    return calls_op(node) and can_promise(name) and promise_of(name) is None and not normalizes(name)


def _sources_of_rows(node: fx.Node, kept: bool = True, used_later: bool = False) -> list[fx.Node]:
    """The inputs of an op that have as many rows as one of its results.

    Where these need not be `kept`, as many columns or elements do; and if no input has these, all count. Of an unknown
    op a vector and whole numbers count, too, where results are `used_later`: how they are used decides.
    """
    any_counts = used_later and _is_unknown(node)
    results = [value for value in values_of(node) if _rows(value) is not None or (any_counts and value.dim() > 0)]
    sources = [(one, value) for one in node.all_input_nodes for value in values_of(one) if _rows(value) is not None]

    def fits(value: torch.Tensor, other: torch.Tensor) -> bool:
        others = not kept and (identical(value.shape[-1], other.shape[-1]) or identical(value.numel(), other.numel()))
        rows, other_rows = _rows(value), _rows(other)
        return others or (rows is not None and other_rows is not None and same_sizes(rows, other_rows))

    found = [source for source, value in sources if any(fits(value, other) for other in results)]
    return found or [source for source, _ in sources if results and not kept]


def _rows(value: Any) -> tuple[Any, ...] | None:
    """The sizes of a tensor of numbers but the last; None for vectors and columns, which hold statistics.

    Whole numbers of a byte are quantized ones.
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    if not (value.is_floating_point() or value.is_complex() or value.dtype in (torch.int8, torch.uint8)):
        return None
    return None if identical(value.shape[-1], 1) else tuple(value.shape[:-1])


def reduces(node: fx.Node) -> bool:
    """True for sums, means, maxima and the like."""
    return traits_of(node).reduces is not None


def picks_one_a_row(node: fx.Node) -> bool:
    """True for an op that picks one number of each row, as a loss picks the logit of each row's target."""
    return traits_of(node).view is View.PICK and _is_one_a_row(node) and not _is_one_a_row(first_tensor(node))


def _is_one_a_row(node: fx.Node | None) -> bool:
    value = tensor_of(node)
    return is_vector(node) or (value is not None and identical(value.shape[-1], 1))


class Ways:
    """The shortest ways to matmuls, of those with the fewest ops that nothing makes row-wise.

    `nodes` has each node after all that `step` leads to from it: users or inputs, none where a way ends. `arrives`
    tells whether a way ends at a matmul, where it comes from a node next to that.
    """

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        step: Callable[[fx.Node], Iterable[fx.Node]],
        arrives: Callable[[fx.Node, fx.Node], bool] = lambda matmul, before: True,
    ) -> None:
        self._arrives = arrives
        self._next: dict[fx.Node, tuple[int, int, fx.Node]] = {}  # how many such ops and steps, and the first step
        for node in nodes:
            if is_matmul(node):
                continue
            further = list(step(node))
            own = int(is_other(node))
            options = [(own, 1, then) for then in further if is_matmul(then) and arrives(then, node)]
            left = ((self._next[then], then) for then in further if then in self._next)
            options += [(own + others, steps + 1, then) for (others, steps, _), then in left]
            if options:
                self._next[node] = min(options, key=lambda option: option[:2])

    def __contains__(self, node: fx.Node) -> bool:
        """True for a node from which steps lead to a matmul."""
        return node in self._next

    def path(self, start: fx.Node, before: fx.Node) -> list[fx.Node]:
        """A shortest path from `start`, reached from `before`, to a matmul; empty without one."""
        if is_matmul(start):
            return [start] if self._arrives(start, before) else []
        steps = [start]
        while steps[-1] in self:
            steps.append(self._next[steps[-1]][-1])
        return steps if start in self else []


def quantizes(node: fx.Node) -> bool:
    """True for an op that makes fp8 or int8 of wider numbers."""
    narrow = [value for value in values_of(node) if value.dtype.itemsize == 1 and value.dtype != torch.bool]
    made = any(value.dtype.is_floating_point or value.dtype == torch.int8 for value in narrow)
    sources = (tensor_of(source) for source in node.all_input_nodes)
    wide = any(value.is_floating_point() and value.dtype.itemsize > 1 for value in sources if value is not None)
    return made and wide and traits_of(node).view not in (View.BITCAST, View.ITEM)


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
    name = called_name(node)
    if triton_kernels.called_by(node) is not None:
        op = "put its call into an op (torch.library.custom_op), and register_rowwise that"
        return f'known to be row-wise: if it is, {op}; else register_local("{schema_name(name)}")'
    if not torch_ops.is_op(node.target) or not can_promise(name):
        return "a row-wise operation"
    own = schema_name(name)
    return f'known to be row-wise: if it is, register_rowwise("{own}"); else register_local("{own}"), if it is local'


def unknown(nodes: Sequence[fx.Node]) -> str:
    """The unknown ops along a way, with the line that registers each as local; empty without any."""
    ops = dict.fromkeys(called_name(node) for node in nodes if _is_unknown(node) and not is_matmul(node))
    told = (f'nothing is known of {name}: register_local("{schema_name(name)}"), if it mixes rows' for name in ops)
    return "".join(f"; {one}" for one in told)


def by_others(way: Iterable[fx.Node]) -> str:
    """The ops along a way that nothing makes row-wise, for people; empty without any."""
    told = dict[str, None]()
    for node in filter(is_other, way):
        name = called_name(node)
        known = f"{name} may make a row of several"
        other = f'{name} returns other rows than it takes: register_local("{schema_name(name)}"), if it mixes rows'
        told[other if _is_unknown(node) else known] = None
    return "; ".join(told)


def ordered_on(way: Iterable[fx.Node]) -> str:
    """The calls that order streams along a way, for people; empty without any."""
    calls = (node.all_input_nodes[0].name for node in way if handed_on_by(node) is not None)
    return ", ".join(dict.fromkeys(calls))


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
