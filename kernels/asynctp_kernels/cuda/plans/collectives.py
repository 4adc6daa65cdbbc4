"""The group's collectives without a product, on the same wire as those with one.

    gather     copy stream:  push the shard → keep the own rows → for each source: wait for it, keep it      → done
               or, where every rank keeps it: stage the shard and keep it, pull the others' shards           → done
    scatter    copy stream:  push each rank's part into its inbox → wait for reduced                         → done
               reducer:      wait for all parts (stream memory operations), add → reduced

A rank that multiplies what is gathered, and one that does not, make one call: both push, and each does with what comes
what it likes. Of few bytes both run the direct kernels (`DirectGather`, `DirectSum`).

Pushed ones return at once, with a result that is complete after `done`: `_c10d_functional.wait_tensor` makes the
current stream wait for that, as for any functional collective. They leave the SMs to others, but for copies by few CTAs
and one short kernel that adds. Calls of one group follow each other on its copy stream, whether somebody has waited for
the earlier ones or not. A CUDA graph is replayed only when nothing is in flight, as for any collective that a graph and
an eager program share.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from asynctp_kernels.cuda.choose.tiles import in_blocks
from asynctp_kernels.cuda.plans.gather import GatherCall, GatherTensors, MovedGather, PulledGather, PushedGather
from asynctp_kernels.cuda.plans.scatter import DirectScatter, PushedScatter, ScatterCall, ScatterTensors
from asynctp_kernels.cuda.runtime.launch import aligned
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.cuda.runtime.script import Step

NAME = "copy engine"
WHOLE = "whole"


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


class BulkGather(MovedGather):
    """all_gather(shard, dim 0) by copy engine."""

    name = NAME

    def start_bulk(self, shard: Tensor) -> Bulk:
        """Enqueue everything; `shard` [m, *, n] gives [world * m, *, n]."""
        memory, stream = self.memory, driver.current_stream(self.device_index)
        call = self.with_kernel_layout(self.tensors((shard, None, (), (), (), None)))
        done = memory.fly(stream, self.number, call.addresses(), lambda side: self.move(side, call), gathers=True)
        (result,) = self.results(call)
        return Bulk(result, call.shard, stream, done)

    def move(self, side: int, call: GatherTensors) -> None:
        """Enqueue everything on `side`."""
        raise NotImplementedError


class BulkPush(BulkGather, PushedGather):
    """The shards are pushed, and kept from the inbox."""

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, 1)

    def move(self, side: int, call: GatherTensors) -> None:
        self.push(side, call)
        self.keep(side, call)
        self.clear(side, ())


class BulkPull(BulkGather, PulledGather):
    """The shards are pulled to where every rank keeps them."""

    stage_keeps = True  # a copy within a GPU is a kernel that takes all SMs, also by the copy engine's name
    stage_programs = 64  # others are to compute meanwhile

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, in_blocks(1, call.layout.inner))

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return []

    def move(self, side: int, call: GatherTensors) -> None:
        self.pull(side, call)


def bulk_gather(call: GatherCall, memory: GroupMemory) -> BulkGather:
    """The plan of a gather in flight."""
    return (BulkPull if call.kept else BulkPush)(call, memory)


class WholePush(PushedGather):
    """all_gather(shard, dim 0), of numbers too, by copy engine; the stream waits for it."""

    name = WHOLE
    cublas = False

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, 1)

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        self.start(stream, call)
        driver.wait_event(stream, self.memory.reduced)  # then numbers are put together on this stream
        self.finish(stream, call)


class WholePull(PulledGather):
    """The same, pulled to where every rank keeps it."""

    name = WHOLE
    cublas = False
    stage_keeps = True

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, in_blocks(1, call.layout.inner))

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return []

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        self.start(stream, call)
        self.finish(stream, call)


def whole_gather(call: GatherCall, memory: GroupMemory) -> WholePush | WholePull:
    """The plan of a gather whose products are made elsewhere."""
    return (WholePull if call.kept else WholePush)(call, memory)


class BulkScatter(PushedScatter):
    """reduce_scatter(whole, dim 0) by copy engine, and a kernel that adds once everything has come."""

    name = NAME
    streams_wait = True

    def __init__(self, call: ScatterCall, memory: GroupMemory) -> None:
        whole = in_blocks(1, call.layout.inner)
        super().__init__(call, memory, whole, whole, tiles_n=0)
        self.counts = memory.idle  # the GEMM of a later call may already count while this one's sum clears

    def ready(self, dst: int, piece: int) -> list[Step]:
        return []

    def start_bulk(self, whole: Tensor) -> Bulk:
        """Enqueue everything; `whole` [world * m, *, n] gives [m, *, n]."""
        memory, stream = self.memory, driver.current_stream(self.device_index)
        whole = aligned(whole)
        out = self.new_output()
        addresses = (whole.data_ptr(), out.data_ptr())
        done = memory.fly(stream, self.number, addresses, lambda side: self._move(side, whole, out))
        return Bulk(out, whole, stream, done)

    def _move(self, side: int, whole: Tensor, out: Tensor) -> None:
        memory = self.memory
        driver.record_event(memory.running, side)
        self.push_and_reduce(side, whole, out, memory.running)
        driver.wait_event(side, memory.reduced)


class DirectSum(DirectScatter):
    """reduce_scatter(whole, dim 0) by one kernel."""

    cublas = False

    def reduce(self, whole: Tensor) -> Tensor:
        """Enqueue everything, and let the stream wait for it."""
        whole, out = aligned(whole), self.new_output()
        self.make(driver.current_stream(self.device_index), ScatterTensors((), (), (), (), (), None, whole, out, []))
        return out

    def with_kernel_layout(self, call: ScatterTensors) -> ScatterTensors:
        return call

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        self.move(stream, call)


def gather_call(shard: Tensor, numbers: Tensor | None, world: int, kept: bool) -> GatherCall:
    """A gather of shards like `shard` [m, *, n], and of numbers [1, count], with no product."""
    return GatherCall(shard, None, (), (), (), 0, False, shard.dtype, False, True, world, numbers, kept)


def scatter_call(whole: Tensor, reduce_op: str, world: int, kind: str = "reduce_scatter") -> ScatterCall:
    """A scatter of tensors like `whole` [world * m, *, n]: of a product whose B only says its width."""
    b = whole.new_empty(0, whole.shape[-1])
    return ScatterCall((whole,), (b,), (), (), (None,), reduce_op, 0, whole.dtype, False, world, kind)
