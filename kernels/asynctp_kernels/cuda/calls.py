"""The fused calls: matmuls with the collective before or after them.

Each has a wire, made of facts that all ranks share (`wire`), and an implementation, which is a rank's own (`select`): a
plan that is run here, or `OwnProgram`: the call's own program makes the matmuls, and has `moves.Mover` move data on the
same wire.

A call is an object with the arguments of its op as attributes (`asynctp_passes.ops.calls`). What decides its plan is
`facts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.explanation import choice_for
from asynctp_kernels.cuda.facts import as_rows, facts_of, flat, nonunit
from asynctp_kernels.cuda.groups import in_step, memory_for
from asynctp_kernels.cuda.implementations import make_plan
from asynctp_kernels.cuda.moves import Mover, check_or_skip, check_taking_part
from asynctp_kernels.cuda.plan_cache import MISSING, keep, keys_of
from asynctp_kernels.cuda.plans.own_program import OwnProgram
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.torch_private import group_resolver

CheckCall = Callable[[Any], None]
Program = Callable[[Any, Mover], Any]


made: Counter[tuple[str, str]] = Counter()
"""Calls that the host made, by op and implementation; launches of a CUDA graph of the program's are none."""


def run_gather(call: Any, check: CheckCall, program: Program) -> Any:
    """all_gather(a_shard, gather_dim) @ b for every b.

    Args:
        call: The op's arguments.
        check: Validates a call's arguments. It is called once per plan, not once per call, and always before `program`.
        program: Makes a call's results with a group's collectives, where no implementation here does.

    Returns:
        The op's results.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    group = call.group_name if not isinstance(call.group_name, str) else group_resolver()(call.group_name)
    a_shard, a_scale, bs, b_scales = call.a_shard, call.a_scale, call.bs, call.b_scales or ()
    biases, along = call.biases, call.along_shard
    memory = memory_for(group, a_shard.device)
    if memory is None:
        made[call.op, "sequential"] += 1
        check(call)
        return program(call, Mover(group, call.kept, call.accord))
    key = (
        call.values, memory.skipped, select.requested(),
        *keys_of(a_shard, a_scale, *bs, *b_scales, *biases, along),
    )  # fmt: skip
    plan: Any = memory.plans.get(key, MISSING)
    if plan is MISSING:
        check_taking_part(partial(check, call), Mover(group, call.kept, call.accord), a_shard, call.travels)
        plan = keep(memory, key, _plan(call, memory))
    memory.last_implementation = plan.name
    made[call.op, plan.name] += 1
    if plan.uses_memory:
        return in_step(memory, plan.run, a_shard, a_scale, bs, b_scales, biases, along)
    if isinstance(plan, OwnProgram):
        return program(call, Mover(group, call.kept, call.accord))
    return plan.run(a_shard, a_scale, bs, b_scales, biases, along)


def run_reduce(call: Any, check: CheckCall, program: Program) -> Any:
    """reduce_scatter(Σ a @ b + added, scatter_dim), or all_reduce of that sum; arguments as for `run_gather`.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    group = call.group_name if not isinstance(call.group_name, str) else group_resolver()(call.group_name)
    memory = memory_for(group, call.a_parts[0].device)
    if memory is None:
        made[call.op, "sequential"] += 1
        check(call)
        return program(call, Mover(group, accord=call.accord))
    a_parts, b_parts, a_scales, b_scales = call.a_parts, call.b_parts, call.a_scales or (), call.b_scales or ()
    added = call.added
    whole = call.scatter_dim is None
    if whole:
        a_parts, b_parts, a_scales = as_rows(a_parts, b_parts, a_scales)
        added = None if added is None else flat(added)
    operands = (a_parts, b_parts, a_scales, b_scales, call.biases, added)
    times = nonunit(call.factors) if call.factors else ()
    key = (
        call.values, times, memory.skipped, select.requested(),
        *keys_of(*a_parts, *b_parts, *a_scales, *b_scales, *call.biases, added),
    )  # fmt: skip
    plan: Any = memory.plans.get(key, MISSING)
    if plan is MISSING:
        check_or_skip(partial(check, call), memory)
        plan = keep(memory, key, _plan(call, memory))
    memory.last_implementation = plan.name
    made[call.op, plan.name] += 1
    if plan.uses_memory:
        sums = in_step(memory, plan.run, *operands)
    elif isinstance(plan, OwnProgram):
        return program(call, Mover(group, accord=call.accord))
    else:
        sums = plan.run(*operands)
    a = call.a_parts[0]
    return sums.view(*a.shape[:-1], sums.shape[-1]) if whole and a.ndim != 2 else sums


def _plan(call: Any, memory: GroupMemory) -> Any:
    """The plan of a call; it is chosen not within `in_step`, since a refused call has not begun.

    A rank that was asked for what it cannot run leaves the call out, and tells so by its next calls: peers may have
    made it.
    """
    facts = facts_of(call, memory.world)
    try:
        choice = choice_for(facts, memory.table)
    except RuntimeError:
        memory.skipped += 1
        raise
    return in_step(memory, make_plan, facts, memory, choice)
