"""The fused ops on NVIDIA GPUs: `run_gather`, `run_scatter` and `run_all_reduce` run a call, `explain_*` say how.

Each call has a wire, made of facts that all ranks share (`wire`), and an implementation, which is a rank's own
(`select`). Where no implementation can make the products of a call they return None; the caller then makes them itself,
and has `Mover` move data on the same wire. Plans are kept per group, so they go when the group goes.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from asynctp_kernels.compat import gather_into, process_group, register_wait
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.select import Choice, Problem, choose, forced
from asynctp_kernels.cuda.choose.tables import Table
from asynctp_kernels.cuda.choose.wire import DIRECT, PLAIN, PUSH
from asynctp_kernels.cuda.implementations import ENTRIES
from asynctp_kernels.cuda.legality import group_refused, refusals
from asynctp_kernels.cuda.plans.collectives import (
    Bulk,
    BulkScatter,
    DirectSum,
    bulk_gather,
    gather_call,
    scatter_call,
    whole_gather,
)
from asynctp_kernels.cuda.plans.gather import DirectGather, GatherCall
from asynctp_kernels.cuda.plans.scatter import Operands, ScatterCall
from asynctp_kernels.cuda.runtime import interpreted, stamps
from asynctp_kernels.cuda.runtime import memory as memory_of
from asynctp_kernels.cuda.runtime.driver import CudaError, StreamWaitOver
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory, existing_memory, group_memory
from asynctp_kernels.cuda.runtime.stamps import Stamps, stamped
from asynctp_kernels.cuda.runtime.watch import error_of
from asynctp_kernels.errors import NotEnrolled, SymmetricMemoryError

__all__ = [
    "Choice",
    "Mover",
    "Stamps",
    "all_gather",
    "explain_all_reduce",
    "explain_gather",
    "explain_scatter",
    "forced",
    "last_implementation",
    "release",
    "run_all_reduce",
    "run_bulk_all_reduce",
    "run_bulk_gather",
    "run_bulk_scatter",
    "run_gather",
    "run_scatter",
    "shared_bytes",
    "stamped",
]

#: programs import them by these names
sys.modules.update({f"{__name__}.select": select, f"{__name__}.interpreted": interpreted})

log = logging.getLogger(__name__)

MAX_PLANS = 1024  # of one group
_unavailable: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()
Check = Callable[[], None]
T = TypeVar("T")


def run_gather(
    a_shard: Tensor,
    a_scale: Tensor | None,
    bs: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    scale_travels: bool,
    out_dtype: torch.dtype,
    fast: bool,
    return_a_full: bool,
    group_size: int,
    group: ProcessGroup,
    check: Check,
    along: Tensor | None = None,
    kept: bool = False,
) -> list[Tensor] | None:
    """all_gather(a_shard, dim) @ b for every b; arguments as those of the ops. None: run the unfused program.

    kept: every rank of the group keeps the gathered A. `check` validates the arguments; it is called
    once per plan, not once per call, and always before None is given.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    memory = _memory(group, a_shard.device)
    if memory is None:
        check()
        return None
    key = (
        "gather", memory.skipped, kept, group_size, dim, scale_travels, out_dtype, fast, return_a_full,
        select.requested(), stamps.requested(), *_keys(a_shard, a_scale, *bs, *b_scales, *biases, along),
    )  # fmt: skip
    plan: Any = memory.plans.get(key, _MISSING)
    if plan is _MISSING:
        _check_taking_part(check, Mover(group, kept), a_shard, a_scale if scale_travels else along)
        call = GatherCall(a_shard, a_scale, bs, b_scales, biases, dim, scale_travels, out_dtype, fast, return_a_full,
                          memory.world, along, kept)  # fmt: skip
        choice = explain_gather(call, memory.table)  # not within _in_step: a refused call has not begun
        plan = _keep(memory, key, _in_step(memory, _made, "gather", call, memory, choice))
    outs: list[Tensor] | None = _run(memory, plan, a_shard, a_scale, bs, b_scales, biases, along)
    return outs


def run_scatter(
    a_parts: Sequence[Tensor],
    b_parts: Sequence[Tensor],
    a_scales: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    reduce_op: str,
    dim: int,
    out_dtype: torch.dtype,
    fast: bool,
    group_size: int,
    group: ProcessGroup,
    check: Check,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: Sequence[float] | None = None,
) -> Tensor | None:
    """reduce_scatter(Σ a @ b + added, dim); arguments as those of the ops. None: run the unfused program.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    key = ("matmul_reduce_scatter", group_size, reduce_op, dim, out_dtype, fast)
    operands = (a_parts, b_parts, a_scales, b_scales, biases, added)
    options = (reduce_op, dim, out_dtype, fast)
    return _run_scatter("scatter", key, operands, options, sum_dtype, factors, group, check)


def run_all_reduce(
    a_parts: Sequence[Tensor],
    b_parts: Sequence[Tensor],
    a_scales: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    reduce_op: str,
    out_dtype: torch.dtype,
    fast: bool,
    group: ProcessGroup,
    check: Check,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: Sequence[float] | None = None,
) -> Tensor | None:
    """all_reduce(Σ a @ b + added): a scatter of the rows, then an all-gather of them. None: run the unfused program.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    shape = a_parts[0].shape
    rows = None if added is None else _flat(added)
    operands = (*_as_rows(a_parts, b_parts, a_scales), b_scales, biases, rows)
    key, options = ("matmul_all_reduce", reduce_op, out_dtype, fast), (reduce_op, 0, out_dtype, fast)
    part = _run_scatter("all_reduce", key, operands, options, sum_dtype, factors, group, check)
    if part is None:
        return None
    whole = all_gather(part, group)
    return whole if len(shape) == 2 else whole.view(*shape[:-1], part.shape[-1])


def all_gather(shard: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' shards, joined along dim 0 in rank order: contiguous. By NCCL, in order on the current stream."""
    whole = shard.new_empty((group.size() * shard.shape[0], *shard.shape[1:]))
    gather_into(whole, shard.contiguous(), group)
    return whole


def _as_rows(
    a_parts: Sequence[Tensor], b_parts: Sequence[Tensor], a_scales: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """The operands with every A as [M, K], and its scale as one element or a matrix."""
    scales = [scale if scale.numel() == 1 else _flat(scale) for scale in a_scales]
    return [_flat(a) for a in a_parts], b_parts, scales


def _flat(tensor: Tensor) -> Tensor:
    """[*, n] as [M, n]. A view takes most of a microsecond, also one that changes nothing."""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


def _run_scatter(
    op: str,
    head: tuple[Any, ...],
    operands: Operands,
    options: tuple[str, int, torch.dtype, bool],
    sum_dtype: torch.dtype | None,
    factors: Sequence[float] | None,
    group: ProcessGroup,
    check: Check,
) -> Tensor | None:
    """Run the plan of a scatter, made at the first call.

    op: As `Problem.op`. head: The op's name, and what tells a call from others like it.
    """
    a_parts, b_parts, a_scales, b_scales, biases, added = operands
    memory = _memory(group, a_parts[0].device)
    if memory is None:
        check()
        return None
    requested, times = (select.requested(), stamps.requested()), _times(factors)
    key = (
        *head,
        memory.skipped,
        sum_dtype,
        times,
        *requested,
        *_keys(*a_parts, *b_parts, *a_scales, *b_scales, *biases, added),
    )
    plan: Any = memory.plans.get(key, _MISSING)
    if plan is _MISSING:
        _check_or_skip(check, memory)
        call = ScatterCall(*operands[:5], *options, memory.world, head[0], sum_dtype, added, times)
        choice = (explain_scatter if op == "scatter" else explain_all_reduce)(call, memory.table)
        plan = _keep(memory, key, _in_step(memory, _made, op, call, memory, choice))
    out: Tensor | None = _run(memory, plan, *operands)
    return out


def _times(factors: Sequence[float] | None) -> tuple[float, ...]:
    """Factors as a call has them: none where all are 1."""
    return tuple(factors) if factors and any(factor != 1 for factor in factors) else ()


def _run(memory: GroupMemory, plan: Any, *operands: Any) -> Any:
    """The results of a plan; None where the caller makes the products."""
    memory.last_implementation = plan.name
    return _in_step(memory, plan.run, *operands) if plan.uses_memory else plan.run(*operands)


# --- without a product ------------------------------------------------------------------------------------------
class Mover:
    """A group's collectives on its wire, for products that are made elsewhere. All are complete on the current stream.

    Tensors are contiguous; each rank's part is a run of elements. None where the group has no wire of its own.

    Args:
        group: The group.
        kept: Every rank keeps what is gathered.
    """

    def __init__(self, group: ProcessGroup, kept: bool = False) -> None:
        self.group, self.world, self.kept = group, group.size(), kept

    def gather(self, shard: Tensor, numbers: Tensor | None = None) -> tuple[Tensor, Tensor | None] | None:
        """All ranks' shards, and float32 numbers, one after the other: [world, *shape] each."""
        memory = _memory(self.group, shard.device)
        if memory is None or shard.numel() == 0:
            return None
        flat, row = shard.view(1, -1), None if numbers is None else numbers.reshape(1, -1)
        call = gather_call(flat, row, self.world, self.kept)
        transport = call.wire.transport(select.requested())
        if transport == PLAIN:
            return self._plainly(shard, numbers)
        make: Any = DirectGather if transport == DIRECT else whole_gather
        plan = _planned(memory, ("gather", self.kept, *_keys(flat, row)), lambda: make(call, memory))
        whole, *all_numbers = _in_step(memory, plan.run, flat, None, (), (), (), row)
        joined = whole.view(self.world, *shard.shape)
        return joined, None if numbers is None else all_numbers[0].view(self.world, *numbers.shape)

    def _plainly(self, shard: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor | None]:
        def gathered(part: Tensor) -> Tensor:
            return all_gather(part.view(-1), self.group).view(self.world, *part.shape)

        return gathered(shard), None if numbers is None else gathered(numbers.contiguous())

    def scatter(self, blocks: Tensor, reduce_op: str) -> Tensor | None:
        """This rank's part of the sum of all ranks' `blocks` [world, *shape]: [*shape]."""
        part = self._part(blocks, reduce_op, "reduce_scatter")
        return None if part is None else part.view(blocks.shape[1:])

    def all_reduce(self, partial: Tensor, reduce_op: str) -> Tensor | None:
        """The sum of all ranks' tensors."""
        if partial.numel() % self.world or partial.numel() == 0:
            return None
        part = self._part(partial.view(self.world, -1), reduce_op, "all_reduce")
        return None if part is None else all_gather(part.view(-1), self.group).view(partial.shape)

    def _part(self, blocks: Tensor, reduce_op: str, kind: str) -> Tensor | None:
        memory = _memory(self.group, blocks.device)
        if memory is None or blocks.numel() == 0:
            return None
        rows = blocks.view(self.world, -1)
        call = scatter_call(rows, reduce_op, self.world, kind)
        transport = call.wire.transport(select.requested())
        if transport == PLAIN:
            return None
        key = (kind, reduce_op, *_keys(rows))
        if transport == DIRECT:
            return _in_step(memory, _planned(memory, key, lambda: DirectSum(call, memory)).reduce, rows)
        bulk = _in_step(memory, _planned(memory, key, lambda: BulkScatter(call, memory)).start_bulk, rows)
        _wait_for(bulk)
        return bulk.result


def _planned(memory: GroupMemory, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """The plan of a call without a product."""
    key = ("moved", memory.skipped, select.requested(), *key)
    plan: Any = memory.plans.get(key)
    if plan is None:
        plan = _keep(memory, key, _in_step(memory, make))
    return plan  # type: ignore[no-any-return]


def run_bulk_gather(
    shard: Tensor, group_size: int, group: ProcessGroup, check: Check, kept: bool = True
) -> Tensor | None:
    """all_gather(shard, dim 0), unwaited: `_c10d_functional.wait_tensor` completes it. None: use NCCL.

    kept: every rank of the group keeps what is gathered. `check` validates the arguments; it is
    called once per plan, not once per call, and not before None is given.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    memory = _memory(group, shard.device)
    if memory is None or shard.numel() == 0:
        return None
    rows = shard if shard.ndim > 1 else shard.unsqueeze(1)
    call = gather_call(rows, None, memory.world, kept)
    transport = call.wire.transport(select.requested())
    if transport == PLAIN:
        return None
    key = ("bulk gather", memory.skipped, kept, group_size, select.requested(), *_keys(rows))
    plan: Any = memory.plans.get(key)
    if plan is None:
        _check_taking_part(check, Mover(group, kept), shard, None)
        make: Any = DirectGather if transport == DIRECT else bulk_gather
        plan = _keep(memory, key, _in_step(memory, make, call, memory))
    memory.last_implementation = plan.name
    if transport == DIRECT:
        whole: Tensor = _in_step(memory, plan.run, rows, None, (), (), ())[0]
        return whole if shard.ndim > 1 else whole.view(-1)
    bulk: Bulk = _in_step(memory, plan.start_bulk, rows)
    return _waited(bulk, bulk.result if shard.ndim > 1 else bulk.result.view(-1))


def run_bulk_scatter(
    whole: Tensor, reduce_op: str, group_size: int, group: ProcessGroup, check: Check
) -> Tensor | None:
    """reduce_scatter(whole, dim 0), unwaited as above; "sum" or "avg", in fp32. None: use NCCL.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    memory = _memory(group, whole.device)
    if memory is None or whole.numel() == 0:
        return None
    rows = whole if whole.ndim > 1 else whole.unsqueeze(1)
    key = ("bulk scatter", memory.skipped, group_size, reduce_op, select.requested(), *_keys(rows))
    plan: Any = memory.plans.get(key, _MISSING)
    if plan is _MISSING:
        _check_or_skip(check, memory)
        call = scatter_call(rows, reduce_op, memory.world)
        transport = call.wire.transport(select.requested())
        makers: dict[str, Any] = {PUSH: BulkScatter, DIRECT: DirectSum}
        plan = None if transport == PLAIN else _in_step(memory, makers[transport], call, memory)
        plan = _keep(memory, key, plan)
    if plan is None:
        return None
    memory.last_implementation = plan.name
    if isinstance(plan, DirectSum):
        part: Tensor = _in_step(memory, plan.reduce, rows)
        return part if whole.ndim > 1 else part.view(-1)
    bulk: Bulk = _in_step(memory, plan.start_bulk, rows)
    return _waited(bulk, bulk.result if whole.ndim > 1 else bulk.result.view(-1))


def run_bulk_all_reduce(tensor: Tensor, reduce_op: str, group: ProcessGroup, check: Check) -> Tensor | None:
    """all_reduce(tensor), complete on the current stream; "sum" or "avg", in fp32. None: use NCCL.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    memory = _memory(group, tensor.device)
    if memory is None:
        check()
        return None
    _check_or_skip(check, memory)
    return Mover(group).all_reduce(tensor.contiguous(), reduce_op)


def _waited(bulk: Bulk, result: Tensor) -> Tensor:
    """`result`, which `wait_tensor` completes. Until then the tensors stay: so host time ahead costs no memory."""
    register_wait(result, lambda: _wait_for(bulk))
    return result


def _wait_for(bulk: Bulk) -> None:
    stream = driver.current_stream(bulk.source.device.index)
    driver.wait_event(stream, bulk.done)
    if stream != bulk.stream:  # the allocator would hand it out again on its own stream, which does not wait
        driver.keep(bulk.source)


def _check_device(device: torch.device) -> None:
    """Events, streams and kernels belong to the current device: it must be the tensors'."""
    if driver.IN_ORDER and device.type != "cpu":
        raise RuntimeError(
            f"asynctp: Triton interprets (TRITON_INTERPRET=1), but the tensors are on {device}; unset it"
        )
    if device.index != (current := driver.current_device()):
        raise RuntimeError(
            f"asynctp: tensors on {device} while cuda:{current} is the current device; call "
            f"torch.cuda.set_device({device.index}) first"
        )


def _check_taking_part(check: Check, mover: Mover, shard: Tensor, numbers: Tensor | None) -> None:
    """Check a gather. A rank whose products cannot be made sends its shard all the same: its peers' calls are right."""
    try:
        check()
    except ValueError:
        mover.gather(shard.contiguous(), numbers)
        raise


def _check_or_skip(check: Check, memory: GroupMemory) -> None:
    """Check a reduction. A rank that has nothing to send leaves the call out, and tells so by its next calls."""
    try:
        check()
    except ValueError:
        memory.skipped += 1
        raise


def _harmless(error: BaseException) -> bool:
    return isinstance(error, SymmetricMemoryError) and not isinstance(error, CudaError)


def _in_step(memory: GroupMemory, do: Callable[..., T], *args: Any) -> T:
    """`do(*args)`, part of a call that uses the group's memory.

    Should that raise half way, the ranks are out of step: then the memory must not be used again. Not so a
    `SymmetricMemoryError`: that is raised by all ranks alike, before anything is enqueued.
    """
    try:
        return do(*args)
    except StreamWaitOver as over:
        error = error_of(memory, over)
        memory.fail(error)
        raise error from None
    except BaseException as error:
        if memory.failure is None and not _harmless(error):
            memory.failure = f"{type(error).__name__}: {error}"
        raise


def _require_none_forced(reason: str) -> None:
    wanted = select.requested()
    if wanted not in (None, "sequential"):
        raise RuntimeError(f"asynctp: implementation {wanted!r} was asked for and cannot run: {reason}")


def release(group: ProcessGroup) -> None:
    """Free all memory of `group`, captured graphs' included. Collective in effect: the next call starts anew."""
    _unavailable.pop(group, None)
    memory_of.release(group)


def last_implementation(group: Any) -> str:
    """What the group's last call ran; `group` as for `asynctp_kernels.release`.

    Raises:
        ValueError: There is no such group.
    """
    group = process_group(group)
    if group in _unavailable or (memory := existing_memory(group)) is None:
        return "sequential"
    return memory.last_implementation


def shared_bytes(group: Any) -> int:
    """Bytes of this rank's memory that the group's ops share with the peers; no allocator of PyTorch counts them.

    `group` as for `asynctp_kernels.release`.

    Raises:
        ValueError: There is no such group.
    """
    memory = existing_memory(process_group(group))
    return 0 if memory is None else memory.shared_bytes


_MISSING = object()


def _keep(memory: GroupMemory, key: object, plan: Any) -> Any:
    """Remember a plan; with dynamic shapes there are many, so they are all forgotten now and then."""
    if len(memory.plans) >= MAX_PLANS and not driver.capturing():
        memory.plans.clear()
        memory.recordings.clear()
    memory.plans[key] = plan
    return plan


def _keys(*tensors: Tensor | None) -> list[tuple[Any, ...] | None]:
    """What a plan depends on of each tensor, and what is checked once a plan."""
    return [
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
    ]


def _memory(group: ProcessGroup, device: torch.device) -> GroupMemory | None:
    """The group's memory; None where there can be none, which is said once, or raised if an implementation is forced.

    Raises:
        RuntimeError: one is forced that needs it, or `device` is not the current one.
    """
    _check_device(device)
    return existing_memory(group) or _new_memory(group, device)


def _new_memory(group: ProcessGroup, device: torch.device) -> GroupMemory | None:
    if group in _unavailable:
        _require_none_forced(_unavailable[group])
        return None
    reason = group_refused(group.size())
    if reason is None:
        try:
            return group_memory(group, device)
        except NotEnrolled as error:  # on every rank; all else is raised
            reason = str(error)
    _unavailable[group] = reason
    _require_none_forced(reason)
    log.warning("group %s runs the unfused program: %s", group.group_name, reason)
    return None


# --- what can run -----------------------------------------------------------------------------------------------
def _made(op: str, call: GatherCall | ScatterCall, memory: GroupMemory, choice: Choice) -> Any:
    """The plan of a call of a kind (`Problem.op`)."""
    log.debug("%s %s: %s", op, tuple(_first(call).shape), choice)
    entry = next(each for each in ENTRIES[op] if each.name == choice.implementation)
    return entry.make(call, memory, choice)


def _first(call: GatherCall | ScatterCall) -> Tensor:
    return call.a_shard if isinstance(call, GatherCall) else call.a_parts[0]


def explain(
    op: str,
    args: Sequence[Any],
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: Sequence[float] | None = None,
) -> Choice:
    """How a call of `torch.ops.asynctp.<op>` would be run.

    Args:
        op: Its name.
        args: Its arguments up to the group; before that stands its size, for the ops that are not told it too.
        sum_dtype: That argument, of ops that have it.
        added, factors: Those arguments, of ops that have them.
    """
    call = _call_of(op, args, sum_dtype, added, factors)
    if isinstance(call, GatherCall):
        return explain_gather(call)
    return explain_all_reduce(call) if op.endswith("all_reduce") else explain_scatter(call)


def problem_of(
    op: str,
    args: Sequence[Any],
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: Sequence[float] | None = None,
) -> Problem:
    """What the cost of a call depends on, and how a tuning table names it; arguments as those of `explain`."""
    call = _call_of(op, args, sum_dtype, added, factors)
    if isinstance(call, GatherCall):
        return _gather_problem(call)
    return _scatter_problem("all_reduce" if op.endswith("all_reduce") else "scatter", call)


def _call_of(
    op: str,
    args: Sequence[Any],
    sum_dtype: torch.dtype | None,
    added: Tensor | None,
    factors: Sequence[float] | None,
) -> GatherCall | ScatterCall:
    """A call of an op; of an all-reduce, of the scatter of rows that is its first half."""
    if op == "all_gather_scaled_matmul":
        args = args[:12]  # what only travels along decides nothing
    *given, world, _ = args
    a_scales: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    if op == "all_gather_matmul":
        a, bs, biases, dim, full = given
        return GatherCall(a, None, bs, (), biases, dim, False, a.dtype, False, full, world)
    if op == "all_gather_scaled_matmul":
        a, a_scale, bs, b_scales, biases, dim, travels, dtype, fast, full = given
        return GatherCall(a, a_scale, bs, b_scales, biases, dim, travels, dtype, fast, full, world)
    if op.startswith("scaled_"):
        a_parts, b_parts, a_scales, b_scales, biases, reduce_op, *where, dtype, fast = given
    else:
        a_parts, b_parts, biases, reduce_op, *where = given
        a_scales, b_scales, dtype, fast = (), (), a_parts[0].dtype, False
    if not where:  # of an all-reduce
        where, (a_parts, b_parts, a_scales) = [0], _as_rows(a_parts, b_parts, a_scales)
    operands = (a_parts, b_parts, a_scales, b_scales, biases)
    optional = {"sum_dtype": sum_dtype, "added": added, "factors": _times(factors)}
    return ScatterCall(*operands, reduce_op, where[0], dtype, fast, world, **optional)  # type: ignore[arg-type]


def explain_gather(call: GatherCall, table: Table | None = None) -> Choice:
    """How `call` would be run, and why; `table` as for `select.choose`."""
    return _explained(_gather_problem(call), call, table)


def explain_scatter(call: ScatterCall, table: Table | None = None) -> Choice:
    """How `call` would be run, and why; `table` as for `select.choose`."""
    return _explained(_scatter_problem("scatter", call), call, table)


def explain_all_reduce(call: ScatterCall, table: Table | None = None) -> Choice:
    """How an all-reduce whose first half is `call`, a scatter of rows, would be run, and why."""
    call = replace(call, unscaled_op="matmul_all_reduce")
    return _explained(_scatter_problem("all_reduce", call), call, table)


def _explained(problem: Problem, call: GatherCall | ScatterCall, table: Table | None) -> Choice:
    _, sms, name = driver.machine(call.device_index)
    entries = ENTRIES[problem.op]
    return choose(problem, entries, refusals(entries, call), sms, name, table)


def _gather_problem(call: GatherCall) -> Problem:
    layout, widths = call.layout, [b.shape[1] for b in call.bs]
    sizes, dtypes = (layout.full_rows, [layout.full_cols], widths), (call.a_shard.dtype, call.out_dtype)
    kept = call.return_a_full or call.kept
    return Problem.of("gather", call.world, *sizes, *dtypes, call.fast, blocks=call.outer, returned=kept)


def _scatter_problem(op: str, call: ScatterCall) -> Problem:
    sizes = (call.rows, [b.shape[0] for b in call.b_parts], [call.b_parts[0].shape[1]])
    dtypes = (call.a_parts[0].dtype, call.wire_dtype)
    return Problem.of(op, call.world, *sizes, *dtypes, call.fast, call.sum_dtype, call.outer)
