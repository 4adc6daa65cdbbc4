"""The implementations of each kind of call, as tables that choosing, explaining and making plans read.

A new one is its row in `wire.TRANSPORTS`, its entry here, and its plan.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from asynctp_kernels.cuda.choose import cost
from asynctp_kernels.cuda.choose.implementation import Choice, Implementation
from asynctp_kernels.cuda.legality import (
    a_dtypes_alike,
    a_scales_alike,
    arguments_are_known,
    chunk_holds_row,
    cublas_takes_gathered,
    cublas_takes_scattered,
    few_row_ranges,
    gathered_scaled_at_end,
    gemm_takes_gathered,
    gemm_takes_scattered,
    group_has_kernels,
    one_factor,
    only_matmuls_are_summed,
    parts_in_cublas_blocks,
    range_in_cublas_blocks,
    rounded_once,
    rows_are_divisible,
    rows_are_gathered,
    rows_are_scattered,
    rows_for_all,
    rows_of_a_contiguous,
    scale_can_be_gathered,
    scattered_scaled_at_end,
    something_to_multiply,
    sum_without_bias,
    whole_in_cublas_blocks,
)
from asynctp_kernels.cuda.plans.decomposed import DecomposedAllReduce, DecomposedGather, DecomposedScatter
from asynctp_kernels.cuda.plans.direct import DirectAllReduce, DirectGather, DirectScatter
from asynctp_kernels.cuda.plans.fused import FusedAllReduce, FusedGather, FusedScatter
from asynctp_kernels.cuda.plans.gather import GatherPlan
from asynctp_kernels.cuda.plans.gather_call import GatherCall
from asynctp_kernels.cuda.plans.scatter import ScatterPlan
from asynctp_kernels.cuda.plans.scatter_call import ScatterCall
from asynctp_kernels.cuda.plans.sequential import SequentialGather, SequentialScatter
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnProgram:
    """In place of a plan: the call's own program makes the matmuls, by the implementation `name`."""

    name: str
    uses_memory: ClassVar[bool] = False


def _own_program(call: GatherCall | ScatterCall, memory: GroupMemory, choice: Choice) -> OwnProgram:
    return OwnProgram(choice.implementation)


def _cublas_and_nccl(call: GatherCall | ScatterCall) -> bool:
    """The call is one collective, and cuBLAS on rows as they lie."""
    return call.layout.whole and not driver.IN_ORDER and not call.is_empty and not call.unknown


_ANY = (group_has_kernels, arguments_are_known, something_to_multiply)


# --- gathers -------------------------------------------------------------------------------------------------------
def _fused_gather(call: GatherCall, memory: GroupMemory, choice: Choice) -> GatherPlan:
    assert choice.tiles is not None
    return FusedGather(call, memory, choice.tiles, choice.chunks, driver.machine(call.device_index)[1])


def _decomposed_gather(call: GatherCall, memory: GroupMemory, choice: Choice) -> GatherPlan:
    return DecomposedGather(call, memory)


def _direct_gather(call: GatherCall, memory: GroupMemory, choice: Choice) -> GatherPlan:
    return DirectGather(call, memory)


def _sequential_gather(call: GatherCall, memory: GroupMemory, choice: Choice) -> GatherPlan | OwnProgram:
    if _cublas_and_nccl(call) and cublas_takes_gathered(call) is None:
        return SequentialGather(call, memory)
    return OwnProgram(choice.implementation)


_FUSED_GATHER = (chunk_holds_row, rows_are_gathered, gathered_scaled_at_end, gemm_takes_gathered)
_DECOMPOSED_GATHER = (rows_are_gathered, cublas_takes_gathered, few_row_ranges, range_in_cublas_blocks)
_DIRECT_GATHER = (scale_can_be_gathered, cublas_takes_gathered, whole_in_cublas_blocks)

GATHERS: tuple[Implementation[GatherCall], ...] = (
    Implementation("fused", (*_ANY, *_FUSED_GATHER), cost.fused, _fused_gather),
    Implementation("decomposed", (*_ANY, *_DECOMPOSED_GATHER), cost.decomposed, _decomposed_gather),
    Implementation("direct", (*_ANY, *_DIRECT_GATHER), cost.direct, _direct_gather),
    Implementation("sequential", (), cost.sequential, _sequential_gather),
    Implementation("whole", (), None, _own_program),
)


# --- scatters ------------------------------------------------------------------------------------------------------
def _fused_scatter(call: ScatterCall, memory: GroupMemory, choice: Choice) -> ScatterPlan:
    assert choice.tiles is not None
    return FusedScatter(call, memory, choice.tiles, choice.chunks, driver.machine(call.device_index)[1])


def _decomposed_scatter(call: ScatterCall, memory: GroupMemory, choice: Choice) -> ScatterPlan:
    return DecomposedScatter(call, memory)


def _direct_scatter(call: ScatterCall, memory: GroupMemory, choice: Choice) -> ScatterPlan:
    return DirectScatter(call, memory)


def _sequential_scatter(call: ScatterCall, memory: GroupMemory, choice: Choice) -> ScatterPlan | OwnProgram:
    if _cublas_and_nccl(call) and cublas_takes_scattered(call) is None:
        return SequentialScatter(call, memory)
    return OwnProgram(choice.implementation)


_FUSED_SCATTER = (
    rows_are_scattered,
    rows_of_a_contiguous,
    scattered_scaled_at_end,
    only_matmuls_are_summed,
    one_factor,
    gemm_takes_scattered,
    rounded_once,
    sum_without_bias,
    a_scales_alike,
    a_dtypes_alike,
)
_DECOMPOSED_SCATTER = (
    rows_are_scattered,
    cublas_takes_scattered,
    few_row_ranges,
    rows_of_a_contiguous,
    range_in_cublas_blocks,
)
_DIRECT_SCATTER = (cublas_takes_scattered, whole_in_cublas_blocks)

SCATTERS: tuple[Implementation[ScatterCall], ...] = (
    Implementation("fused", (*_ANY, *_FUSED_SCATTER), cost.fused, _fused_scatter),
    Implementation("decomposed", (*_ANY, *_DECOMPOSED_SCATTER), cost.decomposed, _decomposed_scatter),
    Implementation("direct", (*_ANY, *_DIRECT_SCATTER), cost.direct, _direct_scatter),
    Implementation("sequential", (), cost.sequential, _sequential_scatter),
    Implementation("whole", (), None, _own_program),
)


# --- all-reduces: a scatter whose sums are shared; one kernel; or NCCL's own, which the caller calls ----------------
def _fused_all_reduce(call: ScatterCall, memory: GroupMemory, choice: Choice) -> ScatterPlan:
    assert choice.tiles is not None
    return FusedAllReduce(call, memory, choice.tiles, choice.chunks, driver.machine(call.device_index)[1])


def _decomposed_all_reduce(call: ScatterCall, memory: GroupMemory, choice: Choice) -> ScatterPlan:
    return DecomposedAllReduce(call, memory)


def _direct_all_reduce(call: ScatterCall, memory: GroupMemory, choice: Choice) -> ScatterPlan:
    return DirectAllReduce(call, memory)


_FUSED_ALL_REDUCE = (rows_are_divisible, *_FUSED_SCATTER)
_DECOMPOSED_ALL_REDUCE = (rows_for_all, cublas_takes_scattered, rows_of_a_contiguous, parts_in_cublas_blocks)

ALL_REDUCES: tuple[Implementation[ScatterCall], ...] = (
    Implementation("fused", (*_ANY, *_FUSED_ALL_REDUCE), cost.then_shared(cost.fused), _fused_all_reduce),
    Implementation(
        "decomposed",
        (*_ANY, *_DECOMPOSED_ALL_REDUCE),
        cost.then_shared(cost.decomposed),
        _decomposed_all_reduce,
    ),
    Implementation("direct", (*_ANY, *_DIRECT_SCATTER), cost.direct_all_reduce, _direct_all_reduce),
    Implementation("sequential", (), cost.as_one_all_reduce(cost.sequential), _own_program),
    Implementation("whole", (), None, _own_program),
)

#: by what `Problem.op` says
ENTRIES: dict[str, tuple[Implementation[Any], ...]] = {
    "gather": GATHERS,
    "scatter": SCATTERS,
    "all_reduce": ALL_REDUCES,
}


def make_plan(op: str, call: GatherCall | ScatterCall, memory: GroupMemory, choice: Choice) -> Any:
    """The plan of a call of a kind (`Problem.op`)."""
    log.debug("%s %s: %s", op, call.shape, choice)
    entry = next(each for each in ENTRIES[op] if each.name == choice.implementation)
    return entry.make(call, memory, choice)
