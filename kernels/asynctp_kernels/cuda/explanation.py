"""How a call would be run, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from asynctp_kernels.cuda.choose.select import Choice, Problem, choose
from asynctp_kernels.cuda.choose.tables import Table
from asynctp_kernels.cuda.implementations import ENTRIES
from asynctp_kernels.cuda.legality import refusals
from asynctp_kernels.cuda.plans.gather_call import GatherArguments, GatherCall
from asynctp_kernels.cuda.plans.scatter_call import ReduceArguments, ScatterCall
from asynctp_kernels.cuda.runtime.machine import driver, others_beside


def explain(call: GatherArguments | ReduceArguments, world: int) -> Choice:
    """How a call of an op would be run.

    Args:
        call: The op's arguments; of tensors, fake ones do.
        world: Ranks of the group.
    """
    facts = facts_of(call, world)
    if isinstance(facts, GatherCall):
        return explain_gather(facts)
    return explain_all_reduce(facts) if facts.op.endswith("all_reduce") else explain_scatter(facts)


def problem_of(call: GatherArguments | ReduceArguments, world: int) -> Problem:
    """The facts that the cost of a call depends on, and that name it in a tuning table; arguments as for `explain`."""
    facts = facts_of(call, world)
    if isinstance(facts, GatherCall):
        return gather_problem(facts)
    return scatter_problem("all_reduce" if facts.op.endswith("all_reduce") else "scatter", facts)


def facts_of(call: GatherArguments | ReduceArguments, world: int) -> GatherCall | ScatterCall:
    """The facts that decide how a call is run; for an all-reduce, those of the scatter of rows in its first half."""
    gathers = call.op.startswith("all_gather")
    return (
        GatherCall.of(cast(GatherArguments, call), world)
        if gathers
        else ScatterCall.of(cast(ReduceArguments, call), world)
    )


def explain_gather(call: GatherCall, table: Table | None = None) -> Choice:
    """How `call` would be run, and why; `table` as for `select.choose`."""
    return _explained(gather_problem(call), call, table)


def explain_scatter(call: ScatterCall, table: Table | None = None) -> Choice:
    """How `call` would be run, and why; `table` as for `select.choose`."""
    return _explained(scatter_problem("scatter", call), call, table)


def explain_all_reduce(call: ScatterCall, table: Table | None = None) -> Choice:
    """How an all-reduce whose first half is `call`, a scatter of rows, would be run, and why."""
    call = replace(call, unscaled_op="matmul_all_reduce")
    return _explained(scatter_problem("all_reduce", call), call, table)


def _explained(problem: Problem, call: GatherCall | ScatterCall, table: Table | None) -> Choice:
    _, sms, name = driver.machine(call.device_index)
    entries = ENTRIES[problem.op]
    return choose(problem, entries, refusals(entries, call), sms, name, table, others_beside(call.world))


def gather_problem(call: GatherCall) -> Problem:
    layout, widths = call.layout, [b.shape[1] for b in call.bs]
    sizes, dtypes = (layout.full_rows, [layout.full_cols], widths), (call.a_shard.dtype, call.out_dtype)
    kept = call.return_a_full or call.kept
    return Problem.of("gather", call.world, *sizes, *dtypes, call.fast, blocks=call.outer, returned=kept)


def scatter_problem(op: str, call: ScatterCall) -> Problem:
    sizes = (call.rows, [b.shape[0] for b in call.b_parts], [call.b_parts[0].shape[1]])
    dtypes = (call.a_parts[0].dtype, call.wire_dtype)
    return Problem.of(op, call.world, *sizes, *dtypes, call.fast, call.sum_dtype, call.outer)
