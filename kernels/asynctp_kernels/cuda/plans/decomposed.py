"""`decomposed`: cuBLAS for each range of a rank's rows, while copy engines move the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from asynctp_kernels.cuda.checks import (
    ANY,
    few_pieces,
    few_row_ranges,
    matmul_takes_gathered,
    matmul_takes_scattered,
    parts_in_cublas_blocks,
    range_in_cublas_blocks,
    rows_are_gathered,
    rows_are_scattered,
    rows_for_all,
    rows_of_a_contiguous,
)
from asynctp_kernels.cuda.choose import cost
from asynctp_kernels.cuda.choose.cost import Estimate
from asynctp_kernels.cuda.choose.implementation import Ahead, Check
from asynctp_kernels.cuda.choose.tiles import in_blocks
from asynctp_kernels.cuda.choose.wire import PULL, PUSH
from asynctp_kernels.cuda.facts import GatherFacts, Piece, ReduceFacts, part_rows
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.cublas import matmul, ranges
from asynctp_kernels.cuda.gemm.own_matmul import OwnMatmul, own_matmul
from asynctp_kernels.cuda.plans.gather import GatherPlan, GatherTensors
from asynctp_kernels.cuda.plans.gather_transports import GatherPull, GatherPush, GatherTransport, by_event
from asynctp_kernels.cuda.plans.scatter import PushedScatter, ScatterTensors
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, GroupMemory
from asynctp_kernels.cuda.runtime.script import Await, Step

#: Its gathers that return A stage first, and wait for the slowest rank where "fused" already multiplies its own rows.
#: A benchmark, whose ranks come together, does not show that. Where other groups' kernels run beside it, cuBLAS range
#: by range takes 2 to 54 % more time than "fused" in shares: `docs/results/2026-11-28-h200x4/beside.jsonl`
AHEAD = Ahead("fused", alone=0.01, beside=0.05)


class DecomposedGather(GatherPlan):
    """cuBLAS for each range of a source's rows, after its chunks. Only for a few: there is one in each outer block.

    pieces: Of each range, what Bs multiply of it; empty where every B takes all rows.
    """

    name = "decomposed"
    transports = (PUSH, PULL)
    refuses = (*ANY, rows_are_gathered, matmul_takes_gathered, few_row_ranges, few_pieces, range_in_cublas_blocks)
    estimate = cost.enqueued(cost.decomposed)
    ahead = AHEAD
    transport: GatherTransport

    def __init__(self, call: GatherFacts, memory: GroupMemory) -> None:
        if call.kept_by_all:
            chunks = in_blocks(call.outer, call.layout.inner)
            # a copy of the own rows by themselves would come before the last matmul, or take SMs from another
            self.transport = GatherPull(call, memory, chunks, by_event(memory), stage_first=True, stage_keeps=True)
        else:
            self.transport = GatherPush(call, memory, min(call.outer, MAX_CHUNKS))
        super().__init__(call, memory, gathers_all=call.kept_by_all)
        self.pieces = call.pieces
        self.reads_landed, self.waits_for_in_flight = self.transport.reads_landed, call.kept_by_all
        if call.invariant:
            self.kernel = self._kernel(call, call.layout.inner)

    def _kernel(self, call: GatherFacts, rows: int) -> OwnMatmul:
        """The kernel of all matmuls of a range of so many rows."""
        a, a_scale = call.a_shard.new_empty((rows, call.layout.cols)), call.a_scale
        if a_scale is not None and (self.scale_travels or a_scale.numel() > 1):
            a_scale = a_scale.new_empty((rows, 1))
        outs = [a.new_empty((rows, width), dtype=self.out_dtype) for width in self.widths]
        matrices = Matrices(a, call.bs, outs, a_scale, call.b_scales, call.biases)
        return own_matmul(matrices, fast=call.use_fast_accum)

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        """Range by range."""
        transport = self.transport
        transport.start(stream, call)
        world, rank = self.memory.world, self.memory.rank
        parts = transport.ranges(call.shard, transport.rows(call))
        scales: Sequence[Tensor | None]
        if call.a_scale is None or (call.a_scale.numel() == 1 and not self.scale_travels):
            scales = [call.a_scale] * len(parts)
        elif not self.scale_travels:
            scales = ranges(call.a_scale, len(parts))
        else:
            scales = transport.ranges(call.a_scale, transport.numbers_of(call))
        places = [] if self.pieces else [ranges(out, len(parts)) for out in call.outs]
        for source in (rank, *transport.sources):
            for block in range(self.outer):
                part = block * world + source
                if source != rank:
                    transport.await_range(stream, source, block)
                if self.pieces:
                    self._multiply_pieces(call, parts[part], self.pieces[part])
                else:
                    self.multiply(call, parts[part], scales[part], [place[part] for place in places])
        transport.finish(stream, call)

    def _multiply_pieces(self, call: GatherTensors, rows: Tensor, pieces: Sequence[Piece]) -> None:
        """Multiply what Bs take of a range of rows, each piece by its own B."""
        for b, first, end, out in pieces:
            place = call.outs[b][out : out + end - first]
            matmul(rows[first:end], call.bs[b], call.biases[b], None, None, self.scaling, out=place)


class DecomposedScatter(PushedScatter):
    """cuBLAS for each range of a destination's rows, own rows last. Only for a few: one in each outer block.

    The rows of block p and destination r are range number p * world + r of all.
    """

    name = "decomposed"
    transports = (PUSH, PULL)
    refuses: ClassVar[Sequence[Check]] = (
        *ANY, rows_are_scattered, matmul_takes_scattered, few_row_ranges, rows_of_a_contiguous, range_in_cublas_blocks,
    )  # fmt: skip
    estimate: ClassVar[Estimate | None] = cost.enqueued(cost.decomposed)
    ahead = AHEAD

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        blocks = in_blocks(call.outer, call.layout.inner)
        super().__init__(call, memory, blocks, blocks, tiles_n=0)
        self.extra_shape = (self.layout.inner, self.layout.cols)
        if call.invariant:
            self.kernels = self._kernels(call, {self.layout.inner})

    def ready(self, dst: int, chunk: int) -> list[Step]:
        return [Await(self.memory.event(dst, chunk))]

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        memory, world, outer = self.memory, self.memory.world, self.outer
        memory.fork(stream)
        count = outer * world
        operands = [ranges(a, count) for a in call.a_parts]
        places = call.staging.view(world, outer, self.layout.inner, self.layout.cols)
        scales = [ranges(scale, count) if scale.numel() != 1 else [scale] * count for scale in call.a_scales]
        added = [None] * count if call.added is None else ranges(call.added, count)
        for dst in ((memory.rank + step) % world for step in range(1, world + 1)):
            for block in range(outer):
                part = block * world + dst
                rows, factors = ([parts[part] for parts in of_ranges] for of_ranges in (operands, scales))
                matmuls = (rows, call.b_parts, call.biases, factors, call.b_scales, added[part])
                self.add_up(matmuls, places[dst, block], *call.extras)
                if self.real is not None:
                    self.pad(places[dst, block], self.real - dst * self.layout.inner)
                driver.record_event(memory.event(dst, block), stream)
        self.push_and_reduce(memory.stream, call.staging, call.out, memory.event(memory.rank, outer - 1))
        self.finish(stream)


class DecomposedAllReduce(DecomposedScatter):
    """cuBLAS for the rows of each rank's part, the own one last; sums are shared. Parts need not be whole rows."""

    refuses = (*ANY, rows_for_all, matmul_takes_scattered, rows_of_a_contiguous, parts_in_cublas_blocks)
    estimate = cost.enqueued(cost.then_shared(cost.decomposed))
    shares = in_place = True

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        one = in_blocks(1, 1)
        PushedScatter.__init__(self, call, memory, one, one, tiles_n=0, layout=call.parts)
        self.ranges = part_rows(call, memory.rank)
        self.extra_shape = (max(end - first for _, first, end in self.ranges), call.b_parts[0].shape[1])
        if call.invariant:
            self.kernels = self._kernels(call, {end - first for _, first, end in self.ranges} - {0})

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        memory = self.memory
        memory.fork(stream)
        for dst, first, end in self.ranges:
            if first < end:  # the only row of a part may be made with another one
                self._multiply(call, first, end)
            driver.record_event(memory.event(dst, 0), stream)
        self.push_and_reduce(memory.stream, call.staging, call.out, memory.event(memory.rank, 0))
        self.finish(stream)

    def _multiply(self, call: ScatterTensors, first: int, end: int) -> None:
        rows = slice(first, end)
        scales = [_of_rows(scale, call.staging.shape[0], first, end) for scale in call.a_scales]
        added = None if call.added is None else call.added[rows]
        matmuls = ([a[rows] for a in call.a_parts], call.b_parts, call.biases, scales, call.b_scales, added)
        self.add_up(matmuls, call.staging[rows], *[extra[: end - first] for extra in call.extras])


def _of_rows(scale: Tensor, count: int, first: int, end: int) -> Tensor:
    """The scales of rows [first, end) of `count`: one for all, one for each, or for each block of rows."""
    if scale.numel() == 1:
        return scale
    block = count // scale.shape[0]
    return scale[first // block : end // block]
