"""All-gather → matmuls on GPUs: four implementations behind one plan.

    fused        copy engine pulls shards in the order rank+1, rank+2, …; one GEMM starts on the own rows and takes the
                 others' as their chunks arrive
    decomposed   the same copies; cuBLAS, one product per source, each behind that source's copy
    direct       one kernel pushes and collects all shards, then cuBLAS on the whole: the fastest when little moves
    unfused      NCCL, then cuBLAS on the whole

A plan is made once per (shapes, strides, dtypes, options) and group, and holds everything that does not change:
addresses of words, the copy stream's script, the compiled kernel. A call only fills in addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asynctp_kernels.compat import gather_into
from asynctp_kernels.layout import ShardLayout, gather_layout

from .copy_kernels import push_gather_kernel, stage_kernel
from .gemm import MAX_OPERANDS, b_descriptor, prepare_gemm, scale_mode
from .launch import Tma, align, aligned, aligned_columns, dense, describe, fit_together, grid, outlines, prepare
from .machine import driver
from .memory import DIRECT_PROGRAMS, MAX_CHUNKS, GroupMemory
from .products import Scaling, product
from .script import GatherMoves, Record, Step, Write, compile_script, gather_script
from .tiles import Chunks, Tiles, cut
from .waits import code

#: CTAs of the staging copy: enough for the memory, and few enough to find room beside anything
STAGE_PROGRAMS = 64
_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class GatherCall:
    """What decides a plan; the tensors stand for all tensors of their shapes, strides and dtypes."""

    a_shard: Tensor
    a_scale: Tensor | None
    bs: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    dim: int
    scale_travels: bool
    out_dtype: torch.dtype
    fast: bool
    return_a_full: bool
    world: int
    along: Tensor | None = None

    @property
    def travels(self) -> Tensor | None:
        """The numbers that are gathered with the shard: its scales by rows or by blocks, or what is only returned."""
        return self.a_scale if self.scale_travels else self.along

    @property
    def layout(self) -> ShardLayout:
        return gather_layout(self.a_shard.shape, self.dim % self.a_shard.ndim, self.world)

    @property
    def outer(self) -> int:
        return self.layout.rows // max(self.layout.inner, 1)

    @property
    def op(self) -> str:
        """Its name, for messages; what has no product is in flight."""
        if not self.bs:
            return "all_gather"
        return "all_gather_matmul" if self.a_scale is None else "all_gather_scaled_matmul"

    @property
    def scaling(self) -> Scaling | None:
        return None if self.a_scale is None else Scaling(self.out_dtype, self.fast)


class GatherPlan:
    """One call, prepared. `run` gives the products, then the gathered A if asked for, then the gathered `along`."""

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        self.memory, self.layout, self.outer = memory, call.layout, call.outer
        self.scaling, self.out_dtype = call.scaling, call.out_dtype
        self.return_a_full, self.scale_travels = call.return_a_full, call.scale_travels
        self.number_count = 0 if call.travels is None else call.travels.numel()
        self.row_bytes = self.layout.cols * call.a_shard.itemsize
        self.shard_bytes = self.layout.rows * self.row_bytes
        # where a shard lies in symmetric memory: as units, then its numbers if such travel
        self.unit_bytes = next(size for size in (4, 2, 1) if self.row_bytes % size == 0)
        self.units = self.shard_bytes // self.unit_bytes
        self.scale_offset = align(self.shard_bytes)
        self.staged_bytes = self.scale_offset + self.number_count * 4
        self.widths = [b.shape[1] for b in call.bs]
        self.device_index: int = call.a_shard.device.index
        self.generation = -1

    @property
    def stale(self) -> bool:
        """The group's symmetric memory has moved since."""
        return self.generation != self.memory.generation

    def as_units(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor as integers that copies move."""
        return tensor.view(-1).view(_UNITS[self.unit_bytes])

    def new_outputs(self, a_shard: Tensor) -> list[Tensor]:
        lead = self.layout.full_shape[:-1]
        return [a_shard.new_empty((*lead, width), dtype=self.out_dtype) for width in self.widths]

    def results(self, outs: list[Tensor], full: Tensor, numbers: Tensor | None) -> list[Tensor]:
        """What the call returns; `numbers` are those of all rows that travelled."""
        if self.return_a_full:
            outs.append(full)
        if numbers is not None and not self.scale_travels:
            outs.append(numbers.view(*self.layout.full_shape[:-1], 1))
        return outs

    def run(
        self,
        a_shard: Tensor,
        a_scale: Tensor | None,
        bs: Sequence[Tensor],
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        along: Tensor | None = None,
    ) -> list[Tensor]:
        raise NotImplementedError


class Pulled(GatherPlan):
    """The copies of every implementation but the direct one.

    stage_first: the shard is staged before the products start, because they would leave no room for that.
    stage_keeps: what stages the shard of a gather along dim 0 also writes it to the gathered A: one read and one launch
        less, but peers wait longer for the outbox.
    """

    stage_first = False
    stage_keeps = False

    def __init__(self, call: GatherCall, memory: GroupMemory, chunks: Chunks) -> None:
        super().__init__(call, memory)
        self.chunks = chunks
        rank, world = memory.rank, memory.world
        outbox = memory.require("outbox", self.staged_bytes)
        moves = GatherMoves(
            outboxes=outbox.peers,
            row_bytes=self.row_bytes,
            outer=self.outer,
            inner=self.layout.inner,
            scale_offset=self.scale_offset,
            scale_bytes=self.number_count // self.outer * 4,
            chunks=chunks,
            keep_own=self.return_a_full and not self.stage_keeps,
            keep_own_scales=call.along is not None,
        )
        steps = gather_script(rank, world, moves, self.arrived)
        self.play = compile_script(steps, memory.peer_writes, memory.one)
        self._compile_stage(call, outbox.memory)
        self.generation = memory.generation

    def _compile_stage(self, call: GatherCall, outbox: Tensor) -> None:
        memory = self.memory
        block = direct_block(self.units, 4096)
        programs = grid(-(-self.units // block), STAGE_PROGRAMS)
        shard = kept = self.as_units(aligned(call.a_shard))
        if self.stage_keeps:
            full = self.as_units(call.a_shard.new_empty(self.layout.full_shape))
            kept = full[memory.rank * self.units :][: self.units]
        box, scale_box = self.as_units(outbox), outbox[self.scale_offset :].view(torch.float32)
        numbers = call.a_scale if call.travels is None else call.travels
        scale = memory.dummy if numbers is None else aligned(numbers)
        tail = [self.units, self.number_count, memory.stage_pads.data_ptr(), memory.stage_epoch, memory.stage_done,
                memory.bound, memory.status, code(call.op, "call"), memory.rank]  # fmt: skip
        constants = {
            "WORLD": memory.world,
            "SCALE_TRAVELS": self.number_count > 0,
            "KEEPS": self.stage_keeps,
            "BLOCK": block,
            "PROGRAMS": programs,
        }
        examples = [shard, scale, kept, box, scale_box, *tail]
        self.stage = prepare(stage_kernel, programs, examples, constants, 8, maxnreg=56)
        self.stage_tail = [
            argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in [box, scale_box, *tail]
        ]

    def arrived(self, source: int, chunk: int) -> list[Step]:
        """What tells the consumer that a chunk is in place."""
        raise NotImplementedError

    def start(self, stream: int, a_shard: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Enqueue staging and copies; gives the gathered A and numbers, complete when everything has arrived.

        The own rows are only in what is returned: of A with `return_a_full`, of the numbers if they are no scale.
        """
        memory = self.memory
        full = a_shard.new_empty(self.layout.full_shape)
        scales, own_scale, all_scales = None, 0, 0
        if numbers is not None:
            scales = numbers.new_empty(memory.world * self.number_count)
            own_scale, all_scales = numbers.data_ptr(), scales.data_ptr()
        memory.begin_direct(stream)
        shard = a_shard.data_ptr()
        kept = full.data_ptr() + memory.rank * self.shard_bytes if self.stage_keeps else shard
        staging = [shard, own_scale, kept, *self.stage_tail]
        if self.stage_first:
            memory.land(stream)
            self.stage(stream, staging)
        memory.fork(stream)
        if not self.stage_first:
            self.stage(memory.stream, staging)
        self.play(memory.stream, (0, shard, full.data_ptr(), all_scales, own_scale))
        driver.record_event(memory.end, memory.stream)
        return full, scales

    def finish(self, stream: int) -> None:
        """Join the copy stream: what the allocator may reuse after this call is no longer read or written."""
        driver.wait_event(stream, self.memory.end)
        self.memory.ended(stream)


class FusedGather(Pulled):
    """One GEMM that consumes chunks as they arrive."""

    name = "fused"

    def __init__(self, call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        super().__init__(call, memory, cut(call.outer, call.layout.inner, tiles.block_m, wanted_chunks))
        self._compile(call, tiles, programs)

    def _flag(self, source: int, chunk: int) -> int:
        return self.memory.arrivals + (source * MAX_CHUNKS + chunk) * 4

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return [Write(self._flag(source, chunk), 1)]

    def _compile(self, call: GatherCall, tiles: Tiles, programs: int) -> None:
        memory, layout = self.memory, self.layout
        inner, k = layout.inner, layout.cols
        rows, blocks = [1, tiles.block_m, tiles.block_k], [1, tiles.block_m, tiles.block_n]
        full = call.a_shard.new_empty(layout.full_shape)
        a_strides = [inner * k, k, 1]
        self.a_own = describe(aligned(call.a_shard), [self.outer, inner, k], a_strides, rows)
        self.a_full = describe(full, [self.outer * memory.world, inner, k], a_strides, rows)
        self.bs = [b_descriptor(aligned_columns(b), tiles) for b in call.bs]
        outs = self.new_outputs(call.a_shard)
        self.cs = [
            describe(out, [self.outer * memory.world, inner, n], [inner * n, n, 1], blocks)
            for out, n in zip(outs, self.widths, strict=True)
        ]
        count, dummy = len(call.bs), memory.dummy
        bias = call.biases[0]
        a_mode = 2 if call.scale_travels else scale_mode(call.a_scale)
        b_mode = scale_mode(call.b_scales[0] if call.b_scales else None)
        padding = [None] * (MAX_OPERANDS - count)
        widths = self.widths + [0] * (MAX_OPERANDS - count)
        programs = grid(_tile_count(self.outer * memory.world, inner, self.widths, tiles), programs)
        numbers = [self.outer, inner, k, 0, 0, 0, *widths, memory.rank, memory.world, self.chunks.tiles, 1]
        self.numbers = numbers
        args = [
            self.a_own, self.a_full, None, None, *self.bs, *padding, *self.cs, *padding,
            *[dummy] * 6, *[dummy if bias is None else bias] * 4, memory.local, memory.gather_done, *numbers,
        ]  # fmt: skip
        self.launch = prepare_gemm(
            args, programs, tiles, call.bs, bias, (a_mode, b_mode), self.out_dtype, True, self.scale_travels
        )
        self.a_own, self.a_full = outlines((self.a_own, self.a_full))
        self.bs, self.cs = outlines(self.bs), outlines(self.cs)
        # A GEMM that holds every SM waits for what is staged: without room beside it, staging has to come first.
        self.stage_first = not fit_together(self.launch, self.stage)
        self.padding = padding
        self.unused = memory.local.data_ptr()

    def run(
        self,
        a_shard: Tensor,
        a_scale: Tensor | None,
        bs: Sequence[Tensor],
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        along: Tensor | None = None,
    ) -> list[Tensor]:
        stream = driver.current_stream(self.device_index)
        a_shard = aligned(a_shard)
        if a_scale is not None:
            a_scale = aligned(a_scale) if self.scale_travels else a_scale.contiguous()
        bs = [aligned_columns(b) for b in bs]
        b_scales, biases = dense(b_scales), dense(biases)
        numbers = a_scale if self.scale_travels else None if along is None else aligned(along)
        outs = self.new_outputs(a_shard)
        full, all_numbers = self.start(stream, a_shard, numbers)
        unused = self.unused
        scale0 = scale1 = unused
        if a_scale is not None:
            scale0 = scale1 = a_scale.data_ptr()
            if self.scale_travels and all_numbers is not None:
                scale1 = all_numbers.data_ptr()
        self.launch(
            stream,
            [
                Tma(self.a_own, a_shard.data_ptr()),
                Tma(self.a_full, full.data_ptr()),
                None,
                None,
                *[Tma(like, b.data_ptr()) for like, b in zip(self.bs, bs, strict=True)],
                *self.padding,
                *[Tma(like, out.data_ptr()) for like, out in zip(self.cs, outs, strict=True)],
                *self.padding,
                scale0,
                scale1,
                *_addresses(b_scales, unused),
                *_addresses(biases, unused),
                self.memory.arrivals,
                self.memory.gather_done.data_ptr(),
                *self.numbers,
            ],
        )
        self.finish(stream)
        return self.results(outs, full, all_numbers)


def _addresses(tensors: Sequence[Tensor | None], unused: int) -> list[int]:
    found = [unused if tensor is None else tensor.data_ptr() for tensor in tensors]
    return found + [unused] * (MAX_OPERANDS - len(found))


def _tile_count(blocks: int, inner: int, widths: Sequence[int], tiles: Tiles) -> int:
    return blocks * -(-inner // tiles.block_m) * sum(-(-n // tiles.block_n) for n in widths)


class DecomposedGather(Pulled):
    """cuBLAS per source, behind that source's copy. Only for one outer block: rows of a source are one range."""

    name = "decomposed"
    stage_first = True

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, cut(1, call.layout.inner, call.layout.inner, 1))

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return [Record(self.memory.events[source])]

    def run(
        self,
        a_shard: Tensor,
        a_scale: Tensor | None,
        bs: Sequence[Tensor],
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        along: Tensor | None = None,
    ) -> list[Tensor]:
        stream = driver.current_stream(self.device_index)
        a_shard = aligned(a_shard)
        if a_scale is not None:
            a_scale = aligned(a_scale) if self.scale_travels else a_scale.contiguous()
        numbers = a_scale if self.scale_travels else None if along is None else aligned(along)
        outs = self.new_outputs(a_shard)
        full, all_numbers = self.start(stream, a_shard, numbers)
        scales = all_numbers if self.scale_travels else None
        rank, world, rows, k = self.memory.rank, self.memory.world, self.layout.rows, self.layout.cols
        parts = full.view(world, rows, k).unbind()
        places = [out.view(world, rows, out.shape[-1]).unbind() for out in outs]
        row_scale = a_scale
        for step in range(world):
            source = (rank + step) % world
            a = a_shard.view(rows, k) if step == 0 else parts[source]
            if step:
                driver.wait_event(stream, self.memory.events[source])
            if a_scale is not None and (self.scale_travels or a_scale.numel() != 1):
                along_k = a_scale.shape[-1]
                row_scale = (
                    a_scale.reshape(-1, along_k)
                    if scales is not None and step == 0
                    else (a_scale if scales is None else scales).view(world, -1, along_k)[source]
                )
            for i, b in enumerate(bs):
                scale = b_scales[i] if b_scales else None
                product(a, b, biases[i], row_scale, scale, self.scaling, out=places[i][source])
        self.finish(stream)
        return self.results(outs, full, all_numbers)


def direct_block(size: int, largest: int) -> int:
    """Units that a program of a direct kernel moves at a time: many, to hide latency, but work for all programs."""
    block = largest
    while block > 512 and size < block * DIRECT_PROGRAMS:
        block //= 2
    return block


class WholeGather(GatherPlan):
    """An all-gather, then cuBLAS on the whole: nothing overlaps."""

    def move(self, shard: Tensor, full: Tensor, own_numbers: Tensor | None, all_numbers: Tensor | None) -> None:
        """Fill `full` from all ranks' contiguous shards, and `all_numbers` from the numbers of their rows."""
        raise NotImplementedError

    def run(
        self,
        a_shard: Tensor,
        a_scale: Tensor | None,
        bs: Sequence[Tensor],
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        along: Tensor | None = None,
    ) -> list[Tensor]:
        layout = self.layout
        a_shard = aligned(a_shard)
        full = a_shard.new_empty(layout.full_shape)
        numbers = a_scale if self.scale_travels else along
        all_numbers = None
        if numbers is not None:
            numbers = aligned(numbers)
            count, along_k = self.memory.world * self.number_count, numbers.shape[-1]
            all_numbers = numbers.new_empty((count // along_k, along_k))
        self.move(a_shard, full, numbers, all_numbers)
        row_scale = all_numbers if self.scale_travels else a_scale
        rows = full.view(layout.full_rows, layout.full_cols)
        lead = layout.full_shape[:-1]
        outs = [
            product(rows, b, biases[i], row_scale, b_scales[i] if b_scales else None, self.scaling).view(*lead, -1)
            for i, b in enumerate(bs)
        ]
        return self.results(outs, full, all_numbers)


class DirectGather(WholeGather):
    """One kernel for the all-gather."""

    name = "direct"

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        layout = self.layout
        part = align(self.staged_bytes)
        area, words = memory.direct(part * memory.world)
        slot = area.size // 2
        block = direct_block(self.units, 4096)
        programs = grid(-(-self.units // block), DIRECT_PROGRAMS)
        counts = (self.number_count, self.number_count // self.outer)
        numbers = [self.units, self.row_bytes // self.unit_bytes, layout.inner, *counts]
        memory_args = [
            area.table, words.table, slot, part, self.scale_offset, memory.epoch, memory.done, memory.bound,
            memory.status, code(call.op, "shard"), memory.rank,
        ]  # fmt: skip
        shard, full = aligned(call.a_shard), call.a_shard.new_empty(layout.full_shape)
        numbers_like = call.a_scale if call.travels is None else call.travels
        scale = memory.dummy if numbers_like is None else aligned(numbers_like)
        args = [self.as_units(shard), scale, self.as_units(full), memory.dummy, *numbers, *memory_args]
        args[9], args[10] = area.table.data_ptr(), words.table.data_ptr()
        constants = {
            "WORLD": memory.world,
            "SCALE_TRAVELS": self.number_count > 0,
            "CONTIGUOUS": self.outer == 1 and not layout.along_last,
            "ALONG_LAST": layout.along_last,
            "MAX_PROGRAMS": DIRECT_PROGRAMS,
            "PROGRAMS": programs,
            "BLOCK": block,
        }
        self.launch = prepare(push_gather_kernel, programs, args, constants, 8)
        self.tail = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in args[4:]]
        self.generation = memory.generation

    def move(self, shard: Tensor, full: Tensor, own_numbers: Tensor | None, all_numbers: Tensor | None) -> None:
        memory, stream = self.memory, driver.current_stream(self.device_index)
        own, all_of = (memory.dummy if tensor is None else tensor for tensor in (own_numbers, all_numbers))
        memory.begin_direct(stream)
        self.launch(stream, [shard.data_ptr(), own.data_ptr(), full.data_ptr(), all_of.data_ptr(), *self.tail])
        memory.ended(stream)


class UnfusedGather(WholeGather):
    """NCCL's all-gather. Only for one outer block, where the ranks' shards are ranges of rows."""

    name = "unfused"
    stale = False  # it holds no addresses

    def move(self, shard: Tensor, full: Tensor, own_numbers: Tensor | None, all_numbers: Tensor | None) -> None:
        gather_into(full, shard, self.memory.group)
        if own_numbers is not None and all_numbers is not None:
            gather_into(all_numbers, own_numbers, self.memory.group)
