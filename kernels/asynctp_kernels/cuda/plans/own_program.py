"""In place of a plan: the call's own program makes the matmuls, and `moves.Mover` moves data where it has a wire."""

from __future__ import annotations

from typing import Any, ClassVar

from asynctp_kernels.cuda.choose import cost
from asynctp_kernels.cuda.choose.cost import Estimate
from asynctp_kernels.cuda.choose.implementation import Implementation
from asynctp_kernels.cuda.choose.wire import DIRECT, PLAIN, PULL, PUSH


class OwnProgram(Implementation):
    """Nothing is prepared."""

    uses_memory: ClassVar[bool] = False

    def __init__(self, call: Any = None, memory: Any = None) -> None:
        pass


class WholeProgram(OwnProgram):
    """The collective on the group's wire, where no other can make a call's matmuls."""

    name = "whole"
    transports = (PUSH, PULL, DIRECT)


class SequentialProgram(OwnProgram):
    """NCCL's collective."""

    name = "sequential"
    transports = (PLAIN,)
    estimate: ClassVar[Estimate | None] = cost.sequential


class SequentialAllReduce(SequentialProgram):
    """NCCL's all-reduce, which starts once."""

    estimate = cost.as_one_all_reduce(cost.sequential)
