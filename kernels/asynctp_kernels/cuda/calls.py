"""The fused calls: matmuls with the collective before or after them.

Each has a wire, made of facts that all ranks share (`wire`), and an implementation, which is a rank's own (`select`).
Where no implementation can make the matmuls of a call they return None; the caller then makes them itself, and has
`moves.Mover` move data on the same wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.explanation import explain_all_reduce, explain_gather, explain_scatter
from asynctp_kernels.cuda.groups import in_step, memory_for
from asynctp_kernels.cuda.implementations import make_plan
from asynctp_kernels.cuda.moves import Check, Mover, check_or_skip, check_taking_part
from asynctp_kernels.cuda.plan_cache import MISSING, keep, keys_of
from asynctp_kernels.cuda.plans.gather_call import GatherCall
from asynctp_kernels.cuda.plans.scatter_call import Operands, ScatterCall, as_rows, flat, nonunit
from asynctp_kernels.cuda.runtime import stamps
from asynctp_kernels.cuda.runtime.memory import GroupMemory


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
    memory = memory_for(group, a_shard.device)
    if memory is None:
        check()
        return None
    key = (
        "gather", memory.skipped, kept, group_size, dim, scale_travels, out_dtype, fast, return_a_full,
        select.requested(), stamps.requested(), *keys_of(a_shard, a_scale, *bs, *b_scales, *biases, along),
    )  # fmt: skip
    plan: Any = memory.plans.get(key, MISSING)
    if plan is MISSING:
        check_taking_part(check, Mover(group, kept), a_shard, a_scale if scale_travels else along)
        call = GatherCall(a_shard, a_scale, bs, b_scales, biases, dim, scale_travels, out_dtype, fast, return_a_full,
                          memory.world, along, kept)  # fmt: skip
        choice = explain_gather(call, memory.table)  # not within in_step: a refused call has not begun
        plan = keep(memory, key, in_step(memory, make_plan, "gather", call, memory, choice))
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
    """all_reduce(Σ a @ b + added); arguments as those of the ops. None: run the unfused program.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    shape = a_parts[0].shape
    rows = None if added is None else flat(added)
    operands = (*as_rows(a_parts, b_parts, a_scales), b_scales, biases, rows)
    key, options = ("matmul_all_reduce", reduce_op, out_dtype, fast), (reduce_op, 0, out_dtype, fast)
    whole = _run_scatter("all_reduce", key, operands, options, sum_dtype, factors, group, check)
    return whole if whole is None or len(shape) == 2 else whole.view(*shape[:-1], whole.shape[-1])


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
    memory = memory_for(group, a_parts[0].device)
    if memory is None:
        check()
        return None
    requested, times = (select.requested(), stamps.requested()), nonunit(factors)
    key = (
        *head,
        memory.skipped,
        sum_dtype,
        times,
        *requested,
        *keys_of(*a_parts, *b_parts, *a_scales, *b_scales, *biases, added),
    )
    plan: Any = memory.plans.get(key, MISSING)
    if plan is MISSING:
        check_or_skip(check, memory)
        call = ScatterCall(*operands[:5], *options, memory.world, head[0], sum_dtype, added, times)
        choice = (explain_scatter if op == "scatter" else explain_all_reduce)(call, memory.table)
        plan = keep(memory, key, in_step(memory, make_plan, op, call, memory, choice))
    out: Tensor | None = _run(memory, plan, *operands)
    return out


def _run(memory: GroupMemory, plan: Any, *operands: Any) -> Any:
    """The results of a plan; None where the caller makes the matmuls."""
    memory.last_implementation = plan.name
    return in_step(memory, plan.run, *operands) if plan.uses_memory else plan.run(*operands)
