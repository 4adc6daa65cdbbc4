"""`sequential`: NCCL's collective, and cuBLAS on the whole before or after it; nothing overlaps."""

from __future__ import annotations

from asynctp_kernels.cuda.checks import (
    matmul_takes_gathered,
    matmul_takes_scattered,
    program_may_multiply,
    sums_in_rank_order,
)
from asynctp_kernels.cuda.choose import cost
from asynctp_kernels.cuda.choose.implementation import Choice
from asynctp_kernels.cuda.choose.wire import PLAIN
from asynctp_kernels.cuda.facts import Facts, GatherFacts, ReduceFacts
from asynctp_kernels.cuda.gemm.own_matmul import OwnMatmul
from asynctp_kernels.cuda.plans.gather import WholeGather
from asynctp_kernels.cuda.plans.gather_tensors import GatherTensors
from asynctp_kernels.cuda.plans.own_program import SequentialProgram
from asynctp_kernels.cuda.plans.scatter import WholeScatter
from asynctp_kernels.cuda.plans.scatter_tensors import ScatterTensors
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.torch_private import gather_into, scatter_into


def _cublas_and_nccl(call: Facts) -> bool:
    """The call is one collective, and cuBLAS on rows as they lie; else its own program runs."""
    return call.layout.whole and not driver.IN_ORDER and not call.is_empty and not call.unknown


class SequentialGather(WholeGather):
    """NCCL's all-gather. Only for one outer block, where the ranks' shards are ranges of rows."""

    name = "sequential"
    transports = (PLAIN,)
    refuses = (program_may_multiply,)
    estimate = cost.sequential
    uses_memory = False

    @classmethod
    def plan(cls, call: GatherFacts, memory: GroupMemory, choice: Choice) -> SequentialGather | SequentialProgram:
        able = _cublas_and_nccl(call) and matmul_takes_gathered(call) is None
        return cls(call, memory) if able else SequentialProgram()

    def _kernel(self, call: GatherFacts) -> OwnMatmul | None:
        return super()._kernel(call) if call.invariant else None

    def make(self, stream: int, call: GatherTensors) -> None:
        """Neither the group's memory nor its order of calls matters, and NCCL's calls have no graph."""
        self.enqueue(stream, self.with_kernel_layout(call))

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        assert call.full is not None
        gather_into(call.full, call.shard, self.memory.group)
        if call.row_numbers is not None and call.all_row_numbers is not None:
            gather_into(call.all_row_numbers, call.row_numbers, self.memory.group)
        if self.kernel is not None:
            self.multiply_whole(stream, call, self.kernel)


class SequentialScatter(WholeScatter):
    """NCCL's reduce-scatter. Only for one outer block, where a rank's part is a range of rows."""

    name = "sequential"
    transports = (PLAIN,)
    refuses = (sums_in_rank_order,)
    estimate = cost.sequential
    uses_memory = False

    @classmethod
    def plan(cls, call: ReduceFacts, memory: GroupMemory, choice: Choice) -> SequentialScatter | SequentialProgram:
        able = _cublas_and_nccl(call) and matmul_takes_scattered(call) is None
        return cls(call, memory) if able else SequentialProgram()

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        self.reduce_op, self.wire_dtype = call.reduce_op, self.out_dtype  # NCCL adds in what it moves

    def make(self, stream: int, call: ScatterTensors) -> None:
        """Neither the group's memory nor its order of calls matters, and NCCL's calls have no graph."""
        self.enqueue(stream, self.with_kernel_layout(call))

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        scatter_into(call.out, call.staging, self.reduce_op, self.memory.group)
