"""How a call is run, and why: `calls` makes its plan by that, and `explain` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from asynctp_kernels.cuda.checks import group_refused, refusals
from asynctp_kernels.cuda.choose.select import Choice, Problem, choose
from asynctp_kernels.cuda.choose.tables import Table
from asynctp_kernels.cuda.facts import Facts, GatherFacts, ReduceFacts, facts_of
from asynctp_kernels.cuda.gemm.gemm import refused_dtypes, refused_gpu, refused_layouts
from asynctp_kernels.cuda.implementations import ENTRIES
from asynctp_kernels.cuda.runtime.machine import driver, others_beside


def explain(call: Any, world: int) -> Choice:
    """How a call of an op would be run.

    Args:
        call: The op's arguments as attributes, by their names; of tensors, fake ones do.
        world: Ranks of the group.
    """
    return choice_for(facts_of(call, world))


def problem_of(call: Any, world: int) -> Problem:
    """The facts that the cost of a call depends on, and that name it in a tuning table; arguments as for `explain`."""
    return problem_for(facts_of(call, world))


def choice_for(call: Facts, table: Table | None = None) -> Choice:
    """How `call` would be run, and why; `table` as for `select.choose`."""
    _, sms, name = driver.machine(call.device_index)
    entries = ENTRIES[call.kind]
    return choose(problem_for(call), entries, refusals(entries, call), sms, name, table, others_beside(call.world))


def variant_reason(
    a: Tensor,
    bs: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    world: int,
) -> str | None:
    """Why no kernel gives a row of `a @ b`, for each B, the same bits however many rows there are; None where one does.

    Args:
        a: [*, K]; of it the device and the dtype count. No tensor needs memory.
        bs: [K, N] each.
        b_scales: One number for each B, or one for each column; none without scales.
        biases: For each B one, or None.
        out_dtype: Of the results.
        world: Ranks of the group; 0 where they are not known.
    """
    if (
        reason := (group_refused(world) if world else None) or refused_dtypes(a.dtype, bool(b_scales), out_dtype)
    ) is not None:
        return reason
    asks = driver.IN_ORDER or torch.cuda.is_available()  # else the program is compiled for another machine
    refused = refused_gpu(a.device.index) if asks else None
    return refused or refused_layouts(a.itemsize, bs, b_scales, biases, out_dtype, [bs[0].shape[0]])


def problem_for(call: Facts) -> Problem:
    """The facts of a call that its cost depends on."""
    return _gather_problem(call) if isinstance(call, GatherFacts) else _reduction_problem(call)


def _gather_problem(call: GatherFacts) -> Problem:
    layout, widths = call.layout, [b.shape[1] for b in call.bs]
    sizes, dtypes = (layout.full_rows, [layout.full_cols], widths), (call.a_shard.dtype, call.matmul_dtype)
    kept = call.return_a_full or call.kept_by_all
    problem = Problem.of(call.kind, call.world, *sizes, *dtypes, call.use_fast_accum, blocks=call.outer, returned=kept)
    if not call.b_rows:
        return problem
    made = sum(rows * width for rows, width in call.out_shapes)  # as if one B took all rows
    return replace(problem, widths=(ceil(made / max(call.rows, 1)),), pieces=sum(map(len, call.pieces)))


def _reduction_problem(call: ReduceFacts) -> Problem:
    sizes = (call.rows, [b.shape[0] for b in call.b_parts], [call.b_parts[0].shape[1]])
    dtypes = (call.a_parts[0].dtype, call.wire_dtype)
    return Problem.of(call.kind, call.world, *sizes, *dtypes, call.use_fast_accum, call.sum_dtype, call.outer)
