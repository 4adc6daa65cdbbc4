"""Collectives of a group on its wire, without a matmul: complete on the current stream (`Mover`), or in flight."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.wire import DIRECT, INVARIANT, PLAIN
from asynctp_kernels.cuda.facts import ReduceFacts
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.own_matmul import own_matmul
from asynctp_kernels.cuda.groups import MISSING, fail_group_on_error, keys_of, memory_for, store_plan
from asynctp_kernels.cuda.plans.collectives import (
    Bulk,
    BulkGather,
    BulkScatter,
    CopiedGather,
    DirectSum,
    DirectTotal,
    PushedTotal,
    all_gather,
    gather_facts,
    scatter_facts,
)
from asynctp_kernels.cuda.plans.direct import DirectGather
from asynctp_kernels.cuda.runtime import edited
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.cuda.runtime.watch import LOOK_S
from asynctp_kernels.torch_private import register_wait

Check = Callable[[], None]


class Mover:
    """A group's collectives on its wire, for matmuls that are made elsewhere. All are complete on the current stream.

    Tensors are contiguous; each rank's part is a run of elements. None where the group has no wire of its own.

    Args:
        group: The group.
        kept_by_all: Every rank keeps what is gathered.
        accord: See `Wire`.
    """

    def __init__(self, group: ProcessGroup, kept_by_all: bool = False, accord: int = 0) -> None:
        self.group, self.world, self.kept_by_all, self.accord = group, group.size(), kept_by_all, accord

    @property
    def invariant(self) -> bool:
        """The matmuls are to be made by `multiply`."""
        return bool(self.accord & INVARIANT)

    def multiply(
        self, a: Tensor, b: Tensor, bias: Tensor | None, scales: Sequence[Tensor], out_dtype: torch.dtype, fast: bool
    ) -> Tensor:
        """`a @ b` of matrices, as every implementation makes it for a batch-invariant call.

        scales: Of A and of B; none without. fast: fp8 sums may be.
        """
        memory, index = memory_for(self.group, a.device), a.device.index
        assert memory is not None, "`refuse_variant` lets no other through"
        of_a, of_b = (scales[0], scales[1:]) if scales else (None, ())
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
        call = Matrices(a, [b], [out], of_a, of_b, [bias]).as_read()
        key = ("multiplied", out_dtype, fast, *keys_of(a, b, bias, *scales))
        kernel: Any = memory.plans.get(key)
        if kernel is None:
            kernel = store_plan(memory, key, own_matmul(call, fast=fast))
        kernel(driver.current_stream(index), call)
        return out

    def gather(self, shard: Tensor, row_numbers: Tensor | None = None) -> tuple[Tensor, Tensor | None] | None:
        """All ranks' shards, and float32 numbers, one after the other: [world, *shape] each."""
        memory = memory_for(self.group, shard.device)
        if memory is None or shard.numel() == 0:
            return None
        flat, row = shard.view(1, -1), None if row_numbers is None else row_numbers.reshape(1, -1)
        call = gather_facts(flat, row, self.world, self.kept_by_all, self.accord)
        transport = call.wire.transport(select.requested())
        if transport == PLAIN:
            return self._plainly(shard, row_numbers)
        make: Any = DirectGather if transport == DIRECT else CopiedGather
        key = _key(memory, "gather", flat, self.kept_by_all, self.accord, *keys_of(row))
        plan: Any = memory.plans.get(key) or store_plan(memory, key, fail_group_on_error(memory, make, call, memory))
        whole, *all_row_numbers = fail_group_on_error(memory, plan.run, flat, (), (), None, (), row)
        joined = whole.view(self.world, *shard.shape)
        return joined, None if row_numbers is None else all_row_numbers[0].view(self.world, *row_numbers.shape)

    def _plainly(self, shard: Tensor, row_numbers: Tensor | None) -> tuple[Tensor, Tensor | None]:
        def gathered(part: Tensor) -> Tensor:
            return all_gather(part.view(-1), self.group).view(self.world, *part.shape)

        return gathered(shard), None if row_numbers is None else gathered(row_numbers.contiguous())

    def scatter(self, blocks: Tensor, reduce_op: str) -> Tensor | None:
        """This rank's part of the sum of all ranks' `blocks` [world, *shape]: [*shape]."""
        part = self._reduced("reduce_scatter", blocks, self.world, reduce_op)
        return None if part is None else part.view(blocks.shape[1:])

    def all_reduce(self, partial: Tensor, reduce_op: str, check: Check | None = None) -> Tensor | None:
        """The sum of all ranks' tensors, their average, or each element's maximum or minimum.

        check: Validates the call, once a plan.
        """
        total = self._reduced("all_reduce", partial, 1, reduce_op, check)
        return None if total is None else total.view(partial.shape)

    def _reduced(
        self, kind: str, given: Tensor, rows: int, reduce_op: str, check: Check | None = None
    ) -> Tensor | None:
        """This rank's result of the reduction of all ranks' tensors, which are seen as so many rows."""
        memory = memory_for(self.group, given.device)
        if memory is None or given.numel() == 0:
            return None
        seen = given.view(rows, -1)
        plan = _reduction(memory, kind, seen, reduce_op, self.accord, check)
        if plan is None or not isinstance(plan, BulkScatter):
            return None if plan is None else fail_group_on_error(memory, plan.reduce, seen)
        bulk = fail_group_on_error(memory, plan.start_bulk, seen)
        wait_for(bulk)
        return bulk.result


def _reduction(
    memory: GroupMemory, kind: str, seen: Tensor, reduce_op: str, accord: int, check: Check | None, *more: Any
) -> DirectSum | DirectTotal | BulkScatter | None:
    """The plan of a reduction of tensors that are `seen` as rows; None of one that is left to NCCL.

    more: What is checked once a plan, besides.
    """
    key = _key(memory, kind, seen, reduce_op, accord, *more)
    plan: Any = memory.plans.get(key, MISSING)
    if plan is MISSING:
        if check is not None:
            check_or_skip(check, memory)
        call = scatter_facts(seen, reduce_op, memory.world, kind, accord)
        plan = store_plan(memory, key, fail_group_on_error(memory, _new_reduction, call, memory))
    return plan  # type: ignore[no-any-return]


def _new_reduction(call: ReduceFacts, memory: GroupMemory) -> DirectSum | DirectTotal | BulkScatter | None:
    transport, scatters = call.wire.transport(select.requested()), call.scatter_dim is not None
    if transport == PLAIN:
        return None
    if transport == DIRECT:
        return (DirectSum if scatters else DirectTotal)(call, memory)
    return (BulkScatter if scatters else PushedTotal)(call, memory)


def _key(memory: GroupMemory, kind: str, rows: Tensor, *facts: Any) -> tuple[Any, ...]:
    """Give the key of the plan of a call without a matmul."""
    return ("moved", kind, memory.skipped, select.requested(), *facts, *keys_of(rows))


def plan_of(call: Any, memory: GroupMemory) -> Any:
    """The plan of a collective that its op has made: with the op's arguments. None where NCCL made it, or nobody."""
    tensor = call[0].contiguous()
    if call.op == "all_reduce":
        return memory.plans.get(_key(memory, call.op, tensor.view(1, -1), call.reduce_op, call.accord))
    how = call.all_keep if call.op == "all_gather" else call.reduce_op
    return memory.plans.get(_key(memory, call.op, rows_of(tensor), how, call.accord, call.group_size))


def rows_of(tensor: Tensor) -> Tensor:
    """A tensor whose first dimension is cut, of two or more dimensions."""
    return tensor if tensor.ndim > 1 else tensor.unsqueeze(1)


def meet(group: ProcessGroup, device: torch.device, accord: int) -> None:
    """Wait, on the host, until all ranks have come to a call of this accord, which adds up nothing but zeros.

    Returns at once where NCCL makes the group's calls, and during a CUDA graph capture.

    Raises:
        SymmetricMemoryError: A rank makes another call, or none within the group's timeout.
    """
    memory = None if driver.capturing() else memory_for(group, device)
    if memory is None:
        return
    zeros = torch.zeros(4 * memory.world, device=device)  # of which each rank has 16 bytes, as all transports take
    total = Mover(group, accord=accord).all_reduce(zeros, "sum")
    while total is not None and total.isnan().any():  # the watch knows why, soon
        memory.check()
        time.sleep(LOOK_S)


# --- in flight ------------------------------------------------------------------------------------------------------
def run_bulk_gather(
    shard: Tensor,
    group_size: int,
    group: ProcessGroup,
    check: Check,
    kept_by_all: bool = True,
    copy: bool = False,
    accord: int = 0,
) -> Tensor | None:
    """all_gather(shard, dim 0), unwaited: `_c10d_functional.wait_tensor` completes it. None: use NCCL.

    kept_by_all: every rank of the group keeps what is gathered. copy: the shard may be written to once this has
    returned, as ordered on the current stream. accord: see `Wire`. `check` validates the arguments; it is called once
    per plan, not once per call, and not before None is given.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    memory = memory_for(group, shard.device)
    if memory is None or shard.numel() == 0:
        return None
    shard = shard.contiguous()
    rows = rows_of(shard)
    call = gather_facts(rows, None, memory.world, kept_by_all, accord)
    transport = call.wire.transport(select.requested())
    if transport == PLAIN:
        return None
    if copy and transport != DIRECT:  # that one is complete on the current stream
        rows = rows.clone()
    key = _key(memory, "all_gather", rows, kept_by_all, accord, group_size)
    plan: Any = memory.plans.get(key)
    if plan is None:
        check_taking_part(check, Mover(group, kept_by_all, accord), shard, None)
        make: Any = DirectGather if transport == DIRECT else BulkGather
        plan = store_plan(memory, key, fail_group_on_error(memory, make, call, memory))
    memory.last_implementation = plan.name
    if transport == DIRECT:
        whole: Tensor = fail_group_on_error(memory, plan.run, rows, (), (), None, (), None)[0]
        return whole if shard.ndim > 1 else whole.view(-1)
    bulk: Bulk = fail_group_on_error(memory, plan.start_bulk, rows)
    return _waited(bulk, bulk.result if shard.ndim > 1 else bulk.result.view(-1))


def run_bulk_scatter(
    whole: Tensor,
    reduce_op: str,
    group_size: int,
    group: ProcessGroup,
    check: Check,
    copy: bool = False,
    accord: int = 0,
) -> Tensor | None:
    """reduce_scatter(whole, dim 0), unwaited as above; "sum" or "avg", in fp32. None: use NCCL.

    copy, accord: as above.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    memory = memory_for(group, whole.device)
    if memory is None or whole.numel() == 0:
        return None
    whole = whole.contiguous()
    rows = rows_of(whole)
    plan = _reduction(memory, "reduce_scatter", rows, reduce_op, accord, check, group_size)
    if plan is None:
        return None
    memory.last_implementation = plan.name
    if not isinstance(plan, BulkScatter):
        part: Tensor = fail_group_on_error(memory, plan.reduce, rows)
        return part if whole.ndim > 1 else part.view(-1)
    bulk: Bulk = fail_group_on_error(memory, plan.start_bulk, rows.clone() if copy else rows)
    return _waited(bulk, bulk.result if whole.ndim > 1 else bulk.result.view(-1))


def run_bulk_all_reduce(
    tensor: Tensor, reduce_op: str, group: ProcessGroup, check: Check, accord: int = 0
) -> Tensor | None:
    """all_reduce(tensor), complete on the current stream; "sum" or "avg", in fp32, "max" or "min". None: use NCCL.

    accord: as above.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    memory = memory_for(group, tensor.device)
    if memory is None:
        check()
        return None
    return Mover(group, accord=accord).all_reduce(tensor.contiguous(), reduce_op, check)


def _waited(bulk: Bulk, result: Tensor) -> Tensor:
    """`result`, which `wait_tensor` completes. Until then the tensors stay: so host time ahead costs no memory."""
    register_wait(result, lambda: wait_for(bulk))
    return result


moved: Counter[tuple[str, str]] = Counter()
"""Collectives without a matmul that bound calls have made, by op and implementation."""
MOST_FLYING = 8
"""So many results stay in `flying` before old ones are looked at; as `site.c` has it."""


class Flying(dict[int, Bulk]):
    """Results that bound calls have left in flight, by their addresses, until `land`. From C they are plain tuples.

    A program may never wait for one. Nothing is to be done for it once it is complete, so it need not be kept then.
    """

    def add(self, bulk: Bulk) -> None:
        """Keep a result."""
        self[bulk.result.data_ptr()] = bulk
        if len(self) > MOST_FLYING:
            self.forget()

    def forget(self) -> None:
        """Keep the oldest result no more, if it is complete."""
        for address, bulk in tuple(self.items())[:1]:  # held here, so nothing else can be at its address
            if driver.is_over(bulk[-1]):
                self.pop(address, None)


flying = Flying()


def land(result: Tensor) -> bool:
    """Let the current stream wait for a result, where a bound call has left it in flight."""
    bulk = flying.pop(result.data_ptr(), None)
    if bulk is not None:
        wait_for(bulk)
    return bulk is not None


def bound_land() -> Callable[[Tensor], bool]:
    """`land` for a place in a program that waits again and again: in C where that is compiled."""
    if driver.IN_ORDER or isinstance(edited.native(), str):
        return land
    with_what = flying, edited.functions(), driver.current_stream, driver.record_stream, edited.raise_failed
    found: Callable[[Tensor], bool] = edited.native().bound_land(with_what)
    return found


def wait_for(bulk: Bulk) -> None:
    """Let the current stream wait for a result in flight."""
    _, source, its_stream, done = bulk
    stream = driver.current_stream(source.device.index)
    driver.wait_event(stream, done)
    if stream != its_stream:  # the allocator would hand it out again on its own stream, which does not wait
        driver.record_stream(source)


# --- a call whose arguments are not valid ---------------------------------------------------------------------------
def check_taking_part(check: Check, mover: Mover, shard: Tensor, row_numbers: Tensor | None) -> None:
    """Check a gather. A rank whose matmuls cannot be made sends its shard all the same: its peers' calls are right."""
    try:
        check()
    except ValueError:
        mover.gather(shard.contiguous(), row_numbers)
        raise


def check_or_skip(check: Check, memory: GroupMemory) -> None:
    """Check a reduction. A rank that has nothing to send leaves the call out, and tells so by its next calls."""
    try:
        check()
    except ValueError:
        memory.skipped += 1
        raise
