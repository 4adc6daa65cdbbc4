"""`sequential`: NCCL's collective, and cuBLAS on the whole before or after it; nothing overlaps.

Calls that cuBLAS does not make run the op's reference program, on the group's wire or on NCCL.
"""

from __future__ import annotations

from typing import Any, ClassVar

from asynctp_kernels.cuda.checks import (
    matmul_takes_scattered,
    matmul_takes_whole,
    program_may_multiply,
    sums_in_rank_order,
)
from asynctp_kernels.cuda.choose import cost
from asynctp_kernels.cuda.choose.cost import Estimate
from asynctp_kernels.cuda.choose.implementation import Check, Choice, Implementation
from asynctp_kernels.cuda.choose.select import WHOLE
from asynctp_kernels.cuda.choose.wire import DIRECT, PLAIN, PULL, PUSH
from asynctp_kernels.cuda.facts import Facts, GatherFacts, ReduceFacts
from asynctp_kernels.cuda.gemm.own_matmul import OwnMatmul
from asynctp_kernels.cuda.plans.gather import GatherTensors, WholeGather
from asynctp_kernels.cuda.plans.plan import Plan
from asynctp_kernels.cuda.plans.scatter import ScatterTensors, WholeScatter
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.torch_private import gather_into, scatter_into


class ReferenceProgram(Implementation):
    """A plan that prepares nothing: the op's reference program runs."""

    uses_memory: ClassVar[bool] = False

    def __init__(self, call: Any = None, memory: Any = None) -> None:
        pass


class WholeProgram(ReferenceProgram):
    """A plan for calls whose matmuls no kernel supports: asynctp moves the data, PyTorch multiplies."""

    name = WHOLE
    transports = (PUSH, PULL, DIRECT)
    refuses = (program_may_multiply,)


class SequentialProgram(ReferenceProgram):
    """A plan without asynctp's wire: NCCL moves the data, PyTorch multiplies."""

    name = "sequential"
    transports = (PLAIN,)
    estimate: ClassVar[Estimate | None] = cost.sequential


class SequentialAllReduce(SequentialProgram):
    """The same for an all-reduce, which NCCL starts once."""

    refuses = (sums_in_rank_order,)
    estimate = cost.as_one_all_reduce(cost.sequential)


class _Sequential(Plan):
    """A plan of one collective of NCCL's, and cuBLAS on rows as they lie; other calls run the reference program.

    takes: Why cuBLAS does not make a call's matmuls.
    """

    name = "sequential"
    transports = (PLAIN,)
    estimate = cost.sequential
    uses_memory = False
    takes: ClassVar[Check]

    @classmethod
    def plan(cls, call: Facts, memory: GroupMemory, choice: Choice) -> _Sequential | SequentialProgram:
        able = call.layout.whole and not driver.IN_ORDER and not call.is_empty
        return cls(call, memory) if able and cls.takes(call) is None else SequentialProgram()  # type: ignore[call-arg]

    def make(self, stream: int, call: Any) -> None:
        """Neither the group's memory nor its order of calls matters, and NCCL's calls have no graph."""
        self.enqueue(stream, self.with_kernel_layout(call))


class SequentialGather(_Sequential, WholeGather):
    """NCCL's all-gather. Only for one outer block, where the ranks' shards are ranges of rows."""

    refuses = (program_may_multiply,)
    takes = matmul_takes_whole

    def _kernel(self, call: GatherFacts) -> OwnMatmul | None:
        return super()._kernel(call) if call.invariant else None

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        assert call.full is not None
        gather_into(call.full, call.shard, self.memory.group)
        if call.row_numbers is not None and call.all_row_numbers is not None:
            gather_into(call.all_row_numbers, call.row_numbers, self.memory.group)
        if self.kernel is not None:
            self.multiply_whole(stream, call, self.kernel)


class SequentialScatter(_Sequential, WholeScatter):
    """NCCL's reduce-scatter. Only for one outer block, where a rank's part is a range of rows."""

    refuses = (sums_in_rank_order,)
    takes = matmul_takes_scattered

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        self.reduce_op, self.wire_dtype = call.reduce_op, self.out_dtype  # NCCL adds in what it moves

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        scatter_into(call.out, call.staging, self.reduce_op, self.memory.group)
