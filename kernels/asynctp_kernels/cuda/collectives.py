"""All-gather and reduce-scatter that leave the SMs to others: copy engines move, streams wait, one short kernel adds.

    gather     copy stream:  stage the shard and keep it (a kernel of few CTAs), pull the others' shards → done
    scatter    copy stream:  push each rank's part into its inbox → wait for reduced → done
               reducer:      wait for all parts (stream memory operations), add → reduced

Both return at once, with a result that is complete after `done`: `_c10d_functional.wait_tensor` makes the current
stream wait for that, as for any functional collective. Calls of one group follow each other on its copy stream,
whether somebody has waited for the earlier ones or not. A CUDA graph is replayed only when nothing is in flight, as
for any collective that a graph and an eager program share.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .gather import GatherCall, PulledGather
from .launch import aligned
from .machine import driver
from .memory import GroupMemory
from .scatter import PushedScatter, ScatterCall
from .script import Step
from .tiles import in_blocks

NAME = "copy engine"


class Bulk(NamedTuple):
    """A result under way.

    Attributes:
        result: What is complete after `done`.
        source: What is read until then. Both belong to `stream`, on which the call was made.
        done: An event.
    """

    result: Tensor
    source: Tensor
    stream: int
    done: int


class BulkGather(PulledGather):
    """all_gather(shard, dim 0) by copy engine."""

    name = NAME
    stage_keeps = True  # a copy within a GPU is a kernel that takes all SMs, also by the copy engine's name
    stage_programs = 64  # they hold their SMs until all ranks have come, and others are to compute meanwhile

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, in_blocks(1, call.layout.inner))

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return []

    def start_bulk(self, shard: Tensor) -> Bulk:
        """Enqueue everything; `shard` [m, *, n] gives [world * m, *, n]."""
        memory, stream = self.memory, driver.current_stream(self.device_index)
        call = self.tensors((aligned(shard), None, (), (), (), None))
        done = memory.fly(stream, self.number, call.addresses(), lambda side: self.copy(side, call))
        return Bulk(call.full, call.shard, stream, done)


class BulkScatter(PushedScatter):
    """reduce_scatter(whole, dim 0) by copy engine, and a kernel that adds once everything has come."""

    name = NAME
    streams_wait = True

    def __init__(self, call: ScatterCall, memory: GroupMemory) -> None:
        whole = in_blocks(1, call.layout.inner)
        super().__init__(call, memory, whole, whole, tiles_n=0)
        self.counts = memory.idle  # the GEMM of a later call may already count while this one's sum clears

    def ready(self, dst: int, chunk: int) -> list[Step]:
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


def bulk_gather(shard: Tensor, memory: GroupMemory) -> BulkGather:
    """The plan for shards like `shard` [m, *, n]: the gather of a product with no B."""
    call = GatherCall(shard, None, (), (), (), 0, False, shard.dtype, False, True, memory.world)
    return BulkGather(call, memory)


def bulk_scatter(whole: Tensor, reduce_op: str, memory: GroupMemory) -> BulkScatter:
    """The plan for tensors like `whole` [world * m, *, n]: the scatter of a product whose B only says its width."""
    b = whole.new_empty(0, whole.shape[-1])
    options = (reduce_op, 0, whole.dtype, False, memory.world, "reduce_scatter")
    call = ScatterCall((whole,), (b,), (), (), (None,), *options)
    return BulkScatter(call, memory)
