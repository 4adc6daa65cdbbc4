"""Calls whose plan is found once: for a place in a program that makes the same call again and again.

`run_gather` and `run_reduce` look a call's plan up by all its arguments. A `BoundCall` has the plan, and looks only at
what may have changed since: it runs the plan exactly as they would, or says that it cannot.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from asynctp_kernels.cuda.calls import made, plan_of
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.facts import as_rows, flat
from asynctp_kernels.cuda.groups import fail_group_on_error
from asynctp_kernels.cuda.plans.own_program import OwnProgram
from asynctp_kernels.cuda.runtime import edited
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory, Order, existing_memory
from asynctp_kernels.torch_private import group_resolver

__all__ = ["BoundCall", "bind"]


def bind(call: Any) -> Any:
    """The call that its op has just made, bound; None where its own program ran it, or nothing here did.

    Args:
        call: The op's arguments. Its group has a name: a bound call keeps no group.

    Returns:
        A `BoundCall`, or where the plan's calls are launches of a graph, the same in C (`site.c`).
    """
    memory = existing_memory(group_resolver()(call.group_name))
    plan = None if memory is None else plan_of(call, memory)
    if memory is None or plan is None or isinstance(plan, OwnProgram):
        return None
    one = BoundCall(call, memory, plan)
    bound = None if plan.graph is None or isinstance(edited.native(), str) else one.in_c(call, memory, plan)
    return one if bound is None else edited.native().Call(bound)


class Bound(NamedTuple):
    """What `site.c` looks at in each call, and makes the call with; the fields are in the order of those there.

    otherwise, failed: The call in Python, and what raises the error of a driver's function.
    memory, graph, group: Weak references to these. resolve, name: What gives the group, of this name.
    requests, asked: `select.asked`, and the last one there, or None, when this was bound.
    generation, skipped: Of the memory. stream, gpu: What gives the current stream of the device of this index.
    operands: The operands in the order of a call's addresses. makers: What makes the memory behind these, each once
    more for None. results: So many of that are returned, or one alone, -1 for the first. tensors: All of these.
    try_turn, release: Of the turn. counts, counted: Where calls are counted. implementation: The plan's name.
    context: The device's. number, last: Of the memory, and the event of its last call's end. landed: The event of the gathers in flight, if
    calls come after them; 1, if after all that is in flight; or 0. driver, order: Its functions; of the device.
    """

    otherwise: Callable[..., Any]
    failed: Callable[[str, int], None]
    memory: Callable[[], Any]
    graph: Callable[[], Any]
    group: Callable[[], Any]
    resolve: Callable[[str], Any]
    name: str
    requests: list[str]
    asked: str | None
    generation: int
    skipped: int
    stream: Callable[[int], int]
    gpu: int | None
    operands: tuple[int, ...]
    makers: tuple[Callable[[], Tensor] | None, ...]
    results: int
    tensors: int
    try_turn: Callable[[bool], bool]
    release: Callable[[], None]
    counts: dict[tuple[str, str], int]
    counted: tuple[str, str]
    implementation: str
    context: int
    number: int
    last: int
    landed: int
    driver: Any
    order: Order


class BoundCall:
    """A plan for calls whose tensors have the shapes, strides and dtypes of those that it was bound with.

    It keeps neither the group nor its memory: code that makes calls may outlive both.

    Args:
        call, memory, plan: The call, the memory of its group, and the call's plan there.
    """

    def __init__(self, call: Any, memory: GroupMemory, plan: Any) -> None:
        self._group, self._memory, self._plan = map(weakref.ref, (memory.group, memory, plan))
        self._uses_memory = plan.uses_memory
        self._resolve, self._group_name = group_resolver(), call.group_name
        self._generation, self._skipped = memory.generation, memory.skipped
        self._requested = select.requested()
        self._index, self._counted = memory.device.index, (call.op, plan.name)
        self._gathers, self._whole = hasattr(call, "a_shard"), getattr(call, "scatter_dim", 0) is None

    def __call__(
        self,
        a: Any,
        bs: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        a_scale: Any = None,
        b_scales: Sequence[Tensor] | None = None,
        last: Tensor | None = None,
    ) -> Any:
        """Make the call with the op's tensors, in its schema's order.

        a, a_scale: Of a reduction a sequence each. last: Numbers along the shard, or what is added.

        Returns:
            The op's results; None where nothing was done: the call `holds` no more, a capture is under way, or another
            device is the current one.

        Raises:
            SymmetricMemoryError: The group's memory is out of step.
        """
        memory, plan = self._memory(), self._plan()
        if memory is None or plan is None or not self._is_as_bound(memory):
            return None
        if driver.capturing() or driver.current_device() != self._index:
            return None
        scales = b_scales or ()
        if self._gathers:
            operands = (a, a_scale, bs, scales, biases, last)
        elif self._whole:
            a_parts, bs, a_scales = as_rows(a, bs, a_scale or ())
            operands = (a_parts, bs, a_scales, scales, biases, None if last is None else flat(last))
        else:
            operands = (a, bs, a_scale or (), scales, biases, last)
        memory.last_implementation = plan.name
        made[self._counted] += 1
        found = fail_group_on_error(memory, plan.run, *operands) if self._uses_memory else plan.run(*operands)
        return found.view(*a[0].shape[:-1], found.shape[-1]) if self._whole and a[0].ndim != 2 else found

    def failed(self, name: str, code: int) -> None:
        """Raise the error of a function of the driver, half way in a call: the ranks are out of step."""
        memory = self._memory()
        assert memory is not None
        fail_group_on_error(memory, edited.raise_failed, name, code, False)

    def in_c(self, call: Any, memory: GroupMemory, plan: Any) -> Bound | None:
        """What `site.c` makes the call with; None where operands are copied or results viewed."""
        if self._gathers:
            given = (call.a_shard, call.bs, call.biases, call.a_scale, call.b_scales, call.along_shard)
        else:
            given = (call.a_parts, call.b_parts, call.biases, call.a_scales, call.b_scales, call.added)
        tensors = [[each] if isinstance(each, Tensor) else each or () for each in given]
        recipe = plan.recipe(call.a_parts[0].shape[:-1] if self._whole else ())
        others = [each for number, many in enumerate(tensors) if number != 1 for each in many if each is not None]
        if recipe is None or not all(each.is_contiguous() for each in others):
            return None
        operands, makers, results, land, land_gathers = recipe
        counts = [sum(each is not None for each in tensors[place]) for place in operands]
        landed = int(land) or (memory.gathers[False][0] if land_gathers else 0)
        return Bound(
            self, self.failed, self._memory, weakref.ref(plan.graph), self._group, self._resolve, self._group_name,
            select.asked, select.asked[-1] if select.asked else None, self._generation, self._skipped,
            driver.current_stream, self._index, operands, makers, results, sum(counts) + len(makers),
            memory.turn.acquire, memory.turn.release, made, self._counted, plan.name, edited.current_context(),
            memory.number, memory.last, landed, edited.functions(), memory.orders[False],
        )  # fmt: skip

    def holds(self) -> bool:
        """Whether such a call has this plan still, in the group that now has the name; if not, it is bound anew."""
        memory = self._memory()
        return memory is not None and self._plan() is not None and self._is_as_bound(memory)

    def _is_as_bound(self, memory: GroupMemory) -> bool:
        try:
            group = self._resolve(self._group_name)
        except (RuntimeError, ValueError):  # there is none any more
            return False
        return (
            group is self._group()
            and memory.generation == self._generation
            and memory.skipped == self._skipped
            and select.requested() == self._requested
        )
