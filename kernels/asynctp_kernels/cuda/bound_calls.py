"""Calls whose plan is found once: for a place in a program that makes the same call again and again.

`run` and `run_bulk_*` look a call's plan up by all its arguments. A `Bound` one has the plan, and looks only at what
may have changed since: it runs the plan exactly as they would, or says that it cannot.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asynctp_kernels.cuda.calls import made, plan_of
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.implementation import SiteForm
from asynctp_kernels.cuda.facts import as_rows, flat
from asynctp_kernels.cuda.groups import fail_group_on_error
from asynctp_kernels.cuda.moves import flying, moved, wait_for
from asynctp_kernels.cuda.moves import plan_of as plan_of_collective
from asynctp_kernels.cuda.moves import rows_of as rows_of_shards
from asynctp_kernels.cuda.plans.collectives import BulkGather, BulkScatter
from asynctp_kernels.cuda.plans.sequential import ReferenceProgram
from asynctp_kernels.cuda.runtime import edited
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory, existing_memory
from asynctp_kernels.torch_private import group_resolver, new_tensors

__all__ = ["Bound", "BoundCall", "BoundCollective", "bind"]


def bind(call: Any) -> Any:
    """The call that its op has just made, bound; None where the reference program ran it, or nothing here did.

    Args:
        call: The op's arguments. Its group has a name: a bound call keeps no group.

    Returns:
        A `Bound` call, or where the plan's calls are launches of a graph, the same in C (`site.c`).
    """
    memory = existing_memory(group_resolver()(call.group_name))
    if memory is None:
        return None
    is_fused = hasattr(call, "bs") or hasattr(call, "b_parts")
    plan = plan_of(call, memory) if is_fused else plan_of_collective(call, memory)
    if plan is None or isinstance(plan, ReferenceProgram):
        return None
    if isinstance(plan, BulkGather | BulkScatter) and getattr(call, "copy", False):
        return None  # torch's `wait_tensor` completes it
    one = BoundCall(call, memory, plan) if is_fused else BoundCollective(call, memory, plan)
    bound = None
    if plan.graph is not None and not isinstance(edited.native(), str):
        bound = one.in_c(call, memory, plan)
    return one if bound is None else edited.native().Call(bound)


class Bound:
    """A plan for calls whose tensors have the shapes, strides and dtypes of those that it was bound with.

    It keeps neither the group nor its memory: code that makes calls may outlive both.

    Args:
        call, memory, plan: The call, the memory of its group, and the call's plan there.
        counts: Of the calls that are made, by op and implementation.
    """

    def __init__(self, call: Any, memory: GroupMemory, plan: Any, counts: Counter[tuple[str, str]]) -> None:
        self._group, self._memory, self._plan = map(weakref.ref, (memory.group, memory, plan))
        self._resolve, self._group_name = group_resolver(), call.group_name
        self._generation, self._skipped = memory.generation, memory.skipped
        self._requested = select.requested()
        self._index, self._counts, self._counted = memory.device.index, counts, (call.op, plan.name)

    def _found(self) -> tuple[GroupMemory | None, Any]:
        """The memory and the plan; (None, None) where such a call has this plan no more."""
        memory, plan = self._memory(), self._plan()
        if memory is None or plan is None:
            return None, None
        try:
            group = self._resolve(self._group_name)
        except (RuntimeError, ValueError):  # there is none any more
            return None, None
        is_as_bound = (
            group is self._group()
            and memory.generation == self._generation
            and memory.skipped == self._skipped
            and select.requested() == self._requested
        )
        return (memory, plan) if is_as_bound else (None, None)

    def failed(self, name: str, code: int) -> None:
        """Raise the error of a function of the driver, half way in a call: the ranks are out of step."""
        memory = self._memory()
        assert memory is not None
        fail_group_on_error(memory, edited.raise_failed, name, code, False)

    def fields(
        self,
        memory: GroupMemory,
        plan: Any,
        form: SiteForm,
        tensors: int,
        flight: tuple[int, ...] = (),
        flying: Any = None,
    ) -> tuple[Any, ...]:
        """The fields with which `site.c` makes the call. tensors: How many are given, in the form's order.

        flight: Of a call on the copy stream (`GroupMemory.flight`); flying: what keeps it until somebody waits for it.
        """
        operands, makers, results, land, land_gathers = form
        return (
            self, self.failed, self._memory, weakref.ref(plan.graph), self._group, self._resolve, self._group_name,
            select.asked, select.asked[-1] if select.asked else None, self._generation, self._skipped,
            driver.current_stream, self._index, operands, makers, results, tensors + len(makers),
            memory.turn.acquire, memory.turn.release, self._counts, self._counted, plan.name, edited.current_context(),
            memory.number, memory.last, int(land) or land_gathers * memory.gathers[False][0], flight, memory.flights,
            flying, edited.functions(), memory.orders[False],
        )  # fmt: skip

    def holds(self) -> bool:
        """Whether such a call has this plan still, in the group that now has the name; if not, it is bound anew."""
        return self._found()[0] is not None


class BoundCollective(Bound):
    """A collective without a matmul."""

    def __init__(self, call: Any, memory: GroupMemory, plan: Any) -> None:
        super().__init__(call, memory, plan, moved)
        self._gathers, self._whole = call.op == "all_gather", call.op == "all_reduce"
        shape = list(call[0].shape)
        if self._gathers:
            shape[0] *= memory.world
        elif not self._whole:
            shape[0] //= memory.world
        self._shape = tuple(shape)

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Make the call. Of a result in flight, `moves.land` lets the current stream wait for it.

        Returns:
            The op's result; None where nothing was done, as for a `BoundCall`.

        Raises:
            SymmetricMemoryError: The group's memory is out of step.
        """
        memory, plan = self._found()
        if memory is None or driver.capturing() or driver.current_device() != self._index:
            return None
        memory.last_implementation = plan.name
        self._counts[self._counted] += 1
        tensor = tensor.contiguous()
        rows = tensor.view(1, -1) if self._whole else rows_of_shards(tensor)
        if isinstance(plan, BulkGather | BulkScatter):
            bulk = fail_group_on_error(memory, plan.start_bulk, rows)
            result: Tensor = bulk.result.view(self._shape)
            if self._whole:
                wait_for(bulk)
            else:
                flying.add(bulk)
        elif self._gathers:
            result = fail_group_on_error(memory, plan.run, rows, (), (), None, (), None)[0].view(self._shape)
        else:
            result = fail_group_on_error(memory, plan.reduce, rows).view(self._shape)
        return result

    def in_c(self, call: Any, memory: GroupMemory, plan: Any) -> tuple[Any, ...] | None:
        """Give the fields with which `site.c` makes the call; None where its tensor is copied first."""
        if not call[0].is_contiguous():
            return None
        new = new_tensors(self._shape, call[0].dtype, memory.device)
        form = ((0,), (new,), -1, False, False)
        if not isinstance(plan, BulkGather | BulkScatter):
            return self.fields(memory, plan, form, 1)
        flight = memory.flight(gathers=self._gathers or self._whole)
        return self.fields(memory, plan, form, 1, flight, None if self._whole else flying)


class BoundCall(Bound):
    """Matmuls and the collective before or after them."""

    def __init__(self, call: Any, memory: GroupMemory, plan: Any) -> None:
        super().__init__(call, memory, plan, made)
        self._uses_memory = plan.uses_memory
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
        memory, plan = self._found()
        if memory is None or driver.capturing() or driver.current_device() != self._index:
            return None
        memory.last_implementation = plan.name
        self._counts[self._counted] += 1
        parts = a
        if not self._gathers:
            a_scale = a_scale or ()
        if self._whole:
            parts, a_scale = as_rows(a, a_scale)
            last = None if last is None else flat(last)
        operands = (parts, bs, biases, a_scale, b_scales or (), last)
        found = fail_group_on_error(memory, plan.run, *operands) if self._uses_memory else plan.run(*operands)
        return found.view(*a[0].shape[:-1], found.shape[-1]) if self._whole and a[0].ndim != 2 else found

    def in_c(self, call: Any, memory: GroupMemory, plan: Any) -> tuple[Any, ...] | None:
        """Give the fields with which `site.c` makes the call; None where operands are copied or results viewed."""
        if self._gathers:
            given = (call.a_shard, call.bs, call.biases, call.a_scale, call.b_scales, call.along_shard)
        else:
            given = (call.a_parts, call.b_parts, call.biases, call.a_scales, call.b_scales, call.added)
        tensors = [
            [each] if isinstance(each, Tensor) else [one for one in each or () if one is not None] for each in given
        ]
        form = plan.site_form(call.a_parts[0].shape[:-1] if self._whole else ())
        if form is None or not all(each.is_contiguous() for many in (tensors[0], *tensors[2:]) for each in many):
            return None
        return self.fields(memory, plan, form, sum(len(tensors[place]) for place in form[0]))
