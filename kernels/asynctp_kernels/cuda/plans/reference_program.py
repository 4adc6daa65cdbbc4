"""In place of a plan: the op's reference program makes the matmuls, and `moves.Mover` moves data on a wire, if any."""

from __future__ import annotations

from typing import Any, ClassVar

from asynctp_kernels.cuda.checks import program_may_multiply, sums_in_rank_order
from asynctp_kernels.cuda.choose import cost
from asynctp_kernels.cuda.choose.cost import Estimate
from asynctp_kernels.cuda.choose.implementation import Implementation
from asynctp_kernels.cuda.choose.select import WHOLE
from asynctp_kernels.cuda.choose.wire import DIRECT, PLAIN, PULL, PUSH


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
