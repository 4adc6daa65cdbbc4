"""Calls whose plan is found once: for a place in a program that makes the same call again and again.

`run_gather` and `run_reduce` look a call's plan up by all its arguments. A `BoundCall` has the plan, and looks only at
what may have changed since: it runs the plan exactly as they would, or says that it cannot.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asynctp_kernels.cuda.calls import made, plan_of
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.facts import as_rows, flat
from asynctp_kernels.cuda.groups import fail_group_on_error
from asynctp_kernels.cuda.plans.own_program import OwnProgram
from asynctp_kernels.cuda.runtime import edited
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory, existing_memory
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

    def in_c(self, call: Any, memory: GroupMemory, plan: Any) -> tuple[Any, ...] | None:
        """Give the fields with which `site.c` makes the call; None where operands are copied or results viewed."""
        if self._gathers:
            given = (call.a_shard, call.bs, call.biases, call.a_scale, call.b_scales, call.along_shard)
        else:
            given = (call.a_parts, call.b_parts, call.biases, call.a_scales, call.b_scales, call.added)
        tensors = [
            [each] if isinstance(each, Tensor) else [one for one in each or () if one is not None] for each in given
        ]
        recipe = plan.recipe(call.a_parts[0].shape[:-1] if self._whole else ())
        if recipe is None or not all(each.is_contiguous() for many in (tensors[0], *tensors[2:]) for each in many):
            return None
        operands, makers, results, land, land_gathers = recipe
        return (
            self, self.failed, self._memory, weakref.ref(plan.graph), self._group, self._resolve, self._group_name,
            select.asked, select.asked[-1] if select.asked else None, self._generation, self._skipped,
            driver.current_stream, self._index, operands, makers, results,
            sum(len(tensors[place]) for place in operands) + len(makers), memory.turn.acquire, memory.turn.release,
            made, self._counted, plan.name, edited.current_context(), memory.number, memory.last,
            int(land) or land_gathers * memory.gathers[False][0], edited.functions(), memory.orders[False],
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
