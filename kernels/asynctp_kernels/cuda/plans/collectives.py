"""The group's collectives without a matmul, on the same wire as those with one.

A rank that multiplies what is gathered, and one that does not, make one call: both push, and each does with what comes
what it likes. Of few bytes both run the direct kernels (`DirectGather`, `DirectSum`, `DirectTotal`).

Pushed ones return at once, with a result that is complete after an event: `_c10d_functional.wait_tensor` makes the
current stream wait for that, as for any functional collective. They leave the SMs to others, but for copies by few CTAs
and one short kernel that adds. Calls of one group follow each other on its copy stream, whether somebody has waited for
the earlier ones or not. A CUDA graph is replayed only when nothing is in flight, as for any collective that a graph and
an eager program share.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from asynctp_kernels.cuda.choose.select import WHOLE
from asynctp_kernels.cuda.choose.tiles import in_blocks
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from asynctp_kernels.cuda.plans.direct import DirectAllReduce, DirectScatter
from asynctp_kernels.cuda.plans.gather import GatherPlan, GatherTensors
from asynctp_kernels.cuda.plans.gather_transports import GatherPull, GatherPush, GatherTransport, untold
from asynctp_kernels.cuda.plans.scatter import PushedScatter, ScatterTensors, WholeScatter
from asynctp_kernels.cuda.runtime.edited import new_graph
from asynctp_kernels.cuda.runtime.launch import aligned
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.cuda.runtime.script import Step
from asynctp_kernels.torch_private import gather_into

COPY_ENGINE = "copy engine"


class Bulk(NamedTuple):
    """A result under way.

    Attributes:
        result: The tensor that is complete after `done`.
        source: The tensor that is read until then. All belong to `stream`, on which the call was made.
        done: An event.
    """

    result: Tensor
    source: Tensor
    stream: int
    done: int


class BulkGather(GatherPlan):
    """all_gather(shard, dim 0) by copy engine, in flight: shards are pushed and kept from the inbox, or pulled."""

    name = COPY_ENGINE
    transport: GatherTransport

    def __init__(self, call: GatherFacts, memory: GroupMemory) -> None:
        if call.kept_by_all:
            # a copy within a GPU is a kernel that takes all SMs, also by the copy engine's name: others are to compute
            self.transport = GatherPull(
                call, memory, in_blocks(1, call.layout.inner), untold, stage_keeps=True, stage_programs=64
            )
        else:
            self.transport = GatherPush(call, memory, 1)
        super().__init__(call, memory, gathers_all=call.kept_by_all)
        self.graph = new_graph()

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        """All copies, for nobody who computes; no numbers travel."""
        self.transport.move(stream, call)

    def start_bulk(self, shard: Tensor) -> Bulk:
        """Enqueue everything; `shard` [m, *, n] gives [world * m, *, n]."""
        memory, stream = self.memory, driver.current_stream(self.device_index)
        call = self.with_kernel_layout(self.tensors((shard, (), (), None, (), None)))
        done = memory.fly(stream, self, call, gathers=True)
        (result,) = self.results(call)
        return Bulk(result, call.shard, stream, done)


class CopiedGather(GatherPlan):
    """all_gather(shard, dim 0), of numbers too, by copy engine; the stream waits for it."""

    name = WHOLE
    transport: GatherTransport

    def __init__(self, call: GatherFacts, memory: GroupMemory) -> None:
        if call.kept_by_all:
            chunks = in_blocks(1, call.layout.inner)
            self.transport = GatherPull(call, memory, chunks, untold, stage_keeps=True)
        else:
            self.transport = GatherPush(call, memory, 1)
        super().__init__(call, memory, gathers_all=call.kept_by_all)
        self.reads_landed = self.transport.reads_landed
        self.graph = self.transport.new_graph()

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        transport = self.transport
        transport.start(stream, call)
        if transport.reads_landed:
            driver.wait_event(stream, self.memory.reduced)  # then numbers are put together on this stream
        transport.finish(stream, call)


class BulkScatter(PushedScatter):
    """reduce_scatter(whole, dim 0) by copy engine, and a kernel that adds once everything has come."""

    name = COPY_ENGINE
    streams_wait = True

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        whole = in_blocks(1, call.layout.inner)
        super().__init__(call, memory, whole, whole, tiles_n=0)
        self.counts = memory.idle  # the GEMM of a later call may already count while this one's sum clears
        self.graph = new_graph()

    def ready(self, dst: int, piece: int) -> list[Step]:
        return []

    def start_bulk(self, whole: Tensor) -> Bulk:
        """Enqueue everything; `whole` [world * m, *, n] gives [m, *, n]."""
        memory, stream = self.memory, driver.current_stream(self.device_index)
        whole = aligned(whole)
        out = self.new_output()
        call = ScatterTensors((), (), (), (), (), None, whole, out, [])
        done = memory.fly(stream, self, call, self.shares)
        return Bulk(out, whole, stream, done)

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        memory = self.memory
        driver.record_event(memory.running, stream)
        self.push_and_reduce(stream, call.staging, call.out, memory.running)
        driver.wait_event(stream, memory.reduced)


class PushedTotal(BulkScatter):
    """all_reduce(whole) by copy engine: a scatter whose sums are shared."""

    shares = True

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        one = in_blocks(1, 1)
        PushedScatter.__init__(self, call, memory, one, one, tiles_n=0, layout=call.parts)
        self.new_output = self.new_staging
        self.counts = memory.idle
        self.graph = new_graph()


class _WithoutMatmul(WholeScatter):
    """A plan of one kernel, for a tensor that is there instead of a matmul's result."""

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        self.graph = new_graph()

    def reduce(self, whole: Tensor) -> Tensor:
        """Enqueue everything, and let the stream wait for it; `whole` stays as it is."""
        call = ScatterTensors((), (), (), (), (), None, aligned(whole), self.new_output(), [])
        self.make(driver.current_stream(self.device_index), call)
        return call.out


class DirectSum(_WithoutMatmul, DirectScatter):
    """reduce_scatter(whole, dim 0) by one kernel."""


class DirectTotal(_WithoutMatmul, DirectAllReduce):
    """A plan of an all-reduce without a matmul: one kernel pushes, and adds or takes the extreme."""


def all_gather(shard: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' shards, joined along dim 0 in rank order: contiguous. By NCCL, in order on the current stream."""
    whole = shard.new_empty((group.size() * shard.shape[0], *shard.shape[1:]))
    gather_into(whole, shard.contiguous(), group)
    return whole


def gather_facts(
    shard: Tensor, row_numbers: Tensor | None, world: int, kept_by_all: bool, accord: int = 0
) -> GatherFacts:
    """A gather of shards like `shard` [m, *, n], and of numbers [1, count], with no matmul."""
    return GatherFacts(shard, (), (), 0, True, world, along_shard=row_numbers, all_keep=kept_by_all, accord=accord)


def scatter_facts(
    whole: Tensor, reduce_op: str, world: int, kind: str = "reduce_scatter", accord: int = 0
) -> ReduceFacts:
    """A scatter of tensors like `whole` [world * m, *, n]: of a matmul whose B only says its width."""
    b = whole.new_empty(0, whole.shape[-1])
    scatter_dim = None if kind == "all_reduce" else 0
    return ReduceFacts((whole,), (b,), (None,), reduce_op, scatter_dim, world, accord=accord)
