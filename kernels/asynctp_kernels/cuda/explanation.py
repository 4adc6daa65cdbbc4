"""How a call would be run, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asynctp_kernels.cuda.choose.select import Choice, Problem, choose
from asynctp_kernels.cuda.choose.tables import Table
from asynctp_kernels.cuda.implementations import ENTRIES
from asynctp_kernels.cuda.legality import refusals
from asynctp_kernels.cuda.plans.gather_call import GatherCall
from asynctp_kernels.cuda.plans.scatter_call import ScatterCall, as_rows, nonunit
from asynctp_kernels.cuda.runtime.machine import driver


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
    call = call_of(op, args, sum_dtype, added, factors)
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
    """The facts that the cost of a call depends on, and that name it in a tuning table; arguments as for `explain`."""
    call = call_of(op, args, sum_dtype, added, factors)
    if isinstance(call, GatherCall):
        return gather_problem(call)
    return scatter_problem("all_reduce" if op.endswith("all_reduce") else "scatter", call)


def call_of(
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
        own = torch.int32 if a.dtype == torch.int8 else a.dtype
        return GatherCall(a, None, bs, (), biases, dim, False, own, False, full, world)
    if op == "all_gather_scaled_matmul":
        a, a_scale, bs, b_scales, biases, dim, travels, dtype, fast, full = given
        return GatherCall(a, a_scale, bs, b_scales, biases, dim, travels, dtype, fast, full, world)
    if op.startswith("scaled_"):
        a_parts, b_parts, a_scales, b_scales, biases, reduce_op, *where, dtype, fast = given
    else:
        a_parts, b_parts, biases, reduce_op, *where = given
        a_scales, b_scales, dtype, fast = (), (), a_parts[0].dtype, False
    if not where:  # of an all-reduce
        where, (a_parts, b_parts, a_scales) = [0], as_rows(a_parts, b_parts, a_scales)
    operands = (a_parts, b_parts, a_scales, b_scales, biases)
    optional = {"sum_dtype": sum_dtype, "added": added, "factors": nonunit(factors)}
    return ScatterCall(*operands, reduce_op, where[0], dtype, fast, world, **optional)  # type: ignore[arg-type]


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
    return choose(problem, entries, refusals(entries, call), sms, name, table)


def gather_problem(call: GatherCall) -> Problem:
    layout, widths = call.layout, [b.shape[1] for b in call.bs]
    sizes, dtypes = (layout.full_rows, [layout.full_cols], widths), (call.a_shard.dtype, call.out_dtype)
    kept = call.return_a_full or call.kept
    return Problem.of("gather", call.world, *sizes, *dtypes, call.fast, blocks=call.outer, returned=kept)


def scatter_problem(op: str, call: ScatterCall) -> Problem:
    sizes = (call.rows, [b.shape[0] for b in call.b_parts], [call.b_parts[0].shape[1]])
    dtypes = (call.a_parts[0].dtype, call.wire_dtype)
    return Problem.of(op, call.world, *sizes, *dtypes, call.fast, call.sum_dtype, call.outer)
