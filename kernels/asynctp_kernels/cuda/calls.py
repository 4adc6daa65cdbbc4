"""The fused calls: matmuls with the collective before or after them.

Each has a wire, made of facts that all ranks share (`wire`), and an implementation, which is a rank's own (`select`): a
plan, or `ReferenceProgram`, by which the op's reference program makes the matmuls, and `moves.Mover` moves the data.

    run ─▶ groups.memory_for ─▶ the plan, found by its key       ─▶ plan.run ─▶ GroupMemory.call ─▶ plan.enqueue
                                  or made: choices.choice_for,                                   or its graph
                                  implementations.make_plan

A call is an object with the arguments of its op as attributes (`asynctp_passes.ops.calls`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from asynctp_kernels.cuda.choices import choice_for
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.wire import INVARIANT
from asynctp_kernels.cuda.facts import as_rows, facts_of, flat, nonunit
from asynctp_kernels.cuda.groups import MISSING, fail_group_on_error, keys_of, memory_for, store_plan
from asynctp_kernels.cuda.implementations import make_plan
from asynctp_kernels.cuda.moves import Mover, check_or_skip, check_taking_part
from asynctp_kernels.cuda.plans.sequential import ReferenceProgram
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.torch_private import group_resolver

CheckCall = Callable[[Any], None]
Program = Callable[[Any, Mover], Any]
Operands = tuple[Any, ...]
Key = tuple[Any, ...]


made: Counter[tuple[str, str]] = Counter()
"""Calls that the host made, by op and implementation; launches of a CUDA graph of the program's are none."""


def run(call: Any, check: CheckCall, program: Program) -> Any:
    """A gather and a matmul with every B, or a sum of matmuls and its reduction.

    Args:
        call: The op's arguments.
        check: Validates a call's arguments. It is called once per plan, not once per call, and always before `program`.
        program: The op's reference program, for calls that no plan here runs. Its collectives are the `Mover`'s.

    Returns:
        The op's results.

    Raises:
        SymmetricMemoryError: memory would have to be made during a CUDA graph capture.
    """
    gathers = hasattr(call, "a_shard")
    first = call.a_shard if gathers else call.a_parts[0]
    group = call.group_name if not isinstance(call.group_name, str) else group_resolver()(call.group_name)
    memory, kept_by_all = memory_for(group, first.device), gathers and call.kept_by_all
    if memory is None:
        refuse_variant(call, group.size())
        made[call.op, "sequential"] += 1
        check(call)
        return program(call, Mover(group, kept_by_all, call.accord))
    operands, key = _of_gather(call, memory) if gathers else _of_reduction(call, memory)
    plan: Any = memory.plans.get(key, MISSING)
    if plan is MISSING:
        if gathers:
            check_taking_part(partial(check, call), Mover(group, kept_by_all, call.accord), first, call.row_numbers)
        else:
            check_or_skip(partial(check, call), memory)
        plan = store_plan(memory, key, _plan(call, memory))
    memory.last_implementation = plan.name
    made[call.op, plan.name] += 1
    if isinstance(plan, ReferenceProgram):
        return program(call, Mover(group, kept_by_all, call.accord))
    found = fail_group_on_error(memory, plan.run, *operands) if plan.uses_memory else plan.run(*operands)
    if gathers or call.scatter_dim is not None or first.ndim == 2:
        return found
    return found.view(*first.shape[:-1], found.shape[-1])


def refuse_variant(call: Any, world: int) -> None:
    """Refuse a batch-invariant call of a group that has no memory: the reference program would run.

    Raises:
        RuntimeError: It is one.
    """
    if call.accord & INVARIANT and not facts_of(call, world).is_empty:
        raise RuntimeError(
            f"asynctp: nothing can run this call as a batch-invariant one: its group of {world} ranks has no memory "
            f"that they share (a warning says why). {select.VARIANT_REMEDY}"
        )


# --- what a plan is found by, and run with ---------------------------------------------------------------------------
def plan_of(call: Any, memory: GroupMemory) -> Any:
    """The plan of a call that has been made; None where there is none, or none any more."""
    _, key = _of_gather(call, memory) if hasattr(call, "a_shard") else _of_reduction(call, memory)
    return memory.plans.get(key)


def _of_gather(call: Any, memory: GroupMemory) -> tuple[Operands, Key]:
    """The operands that the plan of a call is run with, and all that decides which plan that is."""
    a_shard, a_scale, bs, b_scales = call.a_shard, call.a_scale, call.bs, call.b_scales or ()
    biases, along_shard = call.biases, call.along_shard
    facts = keys_of(a_shard, a_scale, *bs, *b_scales, *biases, along_shard)
    rows = () if call.b_rows is None else tuple(call.b_rows)
    key = (call.values, rows, memory.skipped, select.requested(), *facts)
    return (a_shard, bs, biases, a_scale, b_scales, along_shard), key


def _of_reduction(call: Any, memory: GroupMemory) -> tuple[Operands, Key]:
    """The same of a reduction."""
    a_parts, b_parts, a_scales, b_scales = call.a_parts, call.b_parts, call.a_scales or (), call.b_scales or ()
    biases, added = call.biases, call.added
    if call.scatter_dim is None:
        a_parts, a_scales = as_rows(a_parts, a_scales)
        added = None if added is None else flat(added)
    times = nonunit(call.factors) if call.factors else ()
    facts = keys_of(*a_parts, *b_parts, *a_scales, *b_scales, *biases, added)
    key = (call.values, times, memory.skipped, select.requested(), *facts)
    return (a_parts, b_parts, biases, a_scales, b_scales, added), key


def _plan(call: Any, memory: GroupMemory) -> Any:
    """The plan of a call; it is chosen not within `fail_group_on_error`, since a refused call has not begun.

    A rank that was asked for what it cannot run leaves the call out, and tells so by its next calls: peers may have
    made it.
    """
    facts = facts_of(call, memory.world)
    try:
        choice = choice_for(facts, memory.table)
    except RuntimeError:
        memory.skipped += 1
        raise
    return fail_group_on_error(memory, make_plan, facts, memory, choice)
