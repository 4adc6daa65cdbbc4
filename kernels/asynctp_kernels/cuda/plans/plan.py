"""A call that is prepared: what plans of gathers and of reductions have in common."""

from __future__ import annotations

from typing import Any

from asynctp_kernels.cuda.choose.implementation import Implementation
from asynctp_kernels.cuda.runtime.edited import PlanGraph
from asynctp_kernels.cuda.runtime.launch import misaligned
from asynctp_kernels.cuda.runtime.memory import GroupMemory


class Plan(Implementation):
    """One call, prepared, for calls with all kinds of tensors that have the same shapes, strides and dtypes.

    uses_memory: calls take their turn in the group's memory. graph: of a plan whose calls PyTorch has no part in.
    is_dense: all operands but Bs are contiguous.
    waits_for_in_flight: it has to come after what is in flight, because its matmuls wait for kernels that then would
    find no room beside them. reads_landed: it reads words of chunks, which a gather in flight reads too, so it has to
    come after that.
    """

    uses_memory = True
    graph: PlanGraph | None = None
    waits_for_in_flight = False
    reads_landed = False
    memory: GroupMemory
    is_dense: bool

    def with_kernel_layout(self, call: Any) -> Any:
        """The call with its operands as the implementation reads them: copies of those that lie otherwise."""
        raise NotImplementedError

    def enqueue(self, stream: int, call: Any) -> None:
        """Everything that a call does on the GPU, after `stream` and with `stream` after it."""
        raise NotImplementedError

    def make(self, stream: int, call: Any) -> None:
        """Make the call, in its turn."""
        addresses = call.addresses()
        if not self.is_dense or misaligned(addresses):
            call = self.with_kernel_layout(call)
            addresses = call.addresses()
        self.memory.call(stream, self, call, addresses)
