"""All-gather → matmuls on GPUs: four implementations behind one plan.

    fused        copy engines bring shards in the order rank+1, rank+2, …; one GEMM starts on the own rows and takes the
                 others' as their chunks arrive
    decomposed   cuBLAS, one product per range of a source's rows, each behind its copy
    direct       one kernel pushes and collects all shards, then cuBLAS on the whole: the fastest when little moves
    unfused      NCCL, then cuBLAS on the whole

Where copy engines bring shards and the gathered A is returned, each rank stages its shard, and the others pull it to
where the result is (`PulledGather`). Else nothing is staged: each pushes its shard to where the others' products read
it (`PushedGather`).

A plan is made once per (shapes, strides, dtypes, options) and group, and holds everything that does not change:
addresses of words, the copy stream's script, the compiled kernel. A call only fills in addresses: it makes memory for
its results, then mends its operands and enqueues, which a call on the same addresses need not do again (`recordings`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asynctp_kernels.compat import gather_into, new_tensors
from asynctp_kernels.layout import ShardLayout, gather_layout

from .copy_kernels import push_gather_kernel, stage_kernel
from .gemm import MAX_OPERANDS, b_descriptor, operand_addresses, prepare_gemm, scale_mode
from .launch import (
    BESIDE_REGISTERS,
    BESIDE_WARPS,
    Tma,
    align,
    aligned,
    aligned_columns,
    dense,
    describe,
    fit_together,
    grid,
    leaves_room,
    outlines,
    prepare,
)
from .machine import driver
from .memory import DIRECT_PROGRAMS, MAX_CHUNKS, GroupMemory
from .products import Scaling, product, ranges
from .script import (
    OWN,
    GatherMoves,
    PushMoves,
    Record,
    Step,
    Write,
    chunk_script,
    compile_script,
    gather_script,
    push_script,
)
from .stamps import StampTable, new_table
from .tiles import Chunks, Tiles, cut, in_blocks
from .waits import code

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
        return self.layout.outer

    @property
    def op(self) -> str:
        """Its name, for messages; what has no product is in flight."""
        if not self.bs:
            return "all_gather"
        return "all_gather_matmul" if self.a_scale is None else "all_gather_scaled_matmul"

    @property
    def scaling(self) -> Scaling | None:
        return None if self.a_scale is None else Scaling(self.out_dtype, self.fast)


#: A shard, A scale, Bs, B scales, biases, and what travels along: as `GatherCall` has them
GatherOperands = tuple[
    Tensor, Tensor | None, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None], Tensor | None
]


class GatherTensors(NamedTuple):
    """All memory of one call.

    shard, a_scale, bs, b_scales, biases: the operands.
    numbers: what is gathered with the shard: `a_scale`, or what is only returned.
    outs, full, all_numbers: the products, the gathered A and the gathered numbers [*, K/128 or 1]. (What is pushed is
    not gathered: see `PushedGather`.)
    """

    shard: Tensor
    a_scale: Tensor | None
    bs: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    numbers: Tensor | None
    outs: list[Tensor]
    full: Tensor
    all_numbers: Tensor | None

    def addresses(self) -> tuple[int, ...]:
        """Of all."""
        shard, a_scale, bs, b_scales, biases, numbers, outs, full, all_numbers = self
        tensors = (shard, a_scale, numbers, full, all_numbers, *bs, *b_scales, *biases, *outs)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])


class GatherPlan:
    """One call, prepared. `run` gives the products, then the gathered A if asked for, then the gathered `along`.

    cublas: `enqueue` calls cuBLAS. lands: it has to come behind what is in flight, because its products wait for what
    then would find no room beside them. stamps: of the GEMM's tiles, if they are asked for.
    """

    cublas = True
    lands = False
    stamps: StampTable | None = None

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        self.number = memory.new_plan()
        self.memory, self.layout, self.outer = memory, call.layout, call.outer
        self.scaling, self.out_dtype = call.scaling, call.out_dtype
        self.return_a_full, self.scale_travels = call.return_a_full, call.scale_travels
        self.number_count = 0 if call.travels is None else call.travels.numel()
        self.number_bytes = self.number_count * 4
        self.row_bytes = self.layout.cols * call.a_shard.itemsize
        self.shard_bytes = self.layout.rows * self.row_bytes
        # what copies by kernels move
        piece_bytes = self.shard_bytes if self.layout.whole else self.row_bytes
        self.unit_bytes = next(size for size in (4, 2, 1) if piece_bytes % size == 0)
        self.units = self.shard_bytes // self.unit_bytes
        self.widths = [b.shape[1] for b in call.bs]
        self.device_index: int = call.a_shard.device.index
        self._prepare_tensors(call)

    def _prepare_tensors(self, call: GatherCall) -> None:
        """Functions that make a call's memory: A whole, the products, and all ranks' numbers [*, K/128 or 1]."""
        full, device, travels = self.layout.full_shape, call.a_shard.device, call.travels
        self.new_full = new_tensors(full, call.a_shard.dtype, device)
        self.new_outs = [new_tensors((*full[:-1], width), self.out_dtype, device) for width in self.widths]
        if travels is not None:
            count, along_k = self.memory.world * self.number_count, travels.shape[-1]
            self.new_numbers = new_tensors((count // along_k, along_k), travels.dtype, device)

    def as_units(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor as integers that copies move."""
        return tensor.view(-1).view(_UNITS[self.unit_bytes])

    def tensors(self, operands: GatherOperands) -> GatherTensors:
        """The operands as they come, and new memory for what a call makes."""
        a_shard, a_scale, bs, b_scales, biases, along = operands
        numbers = a_scale if self.scale_travels else along
        all_numbers = None if numbers is None else self.new_numbers()
        outs = [new() for new in self.new_outs]
        return GatherTensors(a_shard, a_scale, bs, b_scales, biases, numbers, outs, self.new_full(), all_numbers)

    def mended(self, call: GatherTensors) -> GatherTensors:
        """The call with its operands as the implementation reads them: copies of those that lie otherwise."""
        numbers = None if call.numbers is None else aligned(call.numbers)
        scale = numbers if self.scale_travels else call.a_scale
        return call._replace(shard=aligned(call.shard), a_scale=scale, numbers=numbers)

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        """Everything that a mended call does on the GPU, behind `stream` and with `stream` behind it."""
        raise NotImplementedError

    def results(self, call: GatherTensors) -> list[Tensor]:
        """What the call returns."""
        results = list(call.outs)
        if self.return_a_full:
            results.append(call.full)
        if call.all_numbers is not None and not self.scale_travels:
            results.append(call.all_numbers.view(*self.layout.full_shape[:-1], 1))
        return results

    def run(
        self,
        a_shard: Tensor,
        a_scale: Tensor | None,
        bs: Sequence[Tensor],
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        along: Tensor | None = None,
    ) -> list[Tensor]:
        call = self.tensors((a_shard, a_scale, bs, b_scales, biases, along))
        self.make(driver.current_stream(self.device_index), call)
        return self.results(call)

    def make(self, stream: int, call: GatherTensors) -> None:
        """Enqueue the call, in its turn, or launch a recording of it."""
        if self.stamps is not None:
            self.stamps.begin(stream, self.memory.last)

        def enqueue(at: int) -> None:
            self.enqueue(at, self.mended(call))

        self.memory.call(stream, self.number, call.addresses(), self.cublas, enqueue, self.lands)

    def multiply(self, call: GatherTensors, a: Tensor, a_scale: Tensor | None, places: Sequence[Tensor]) -> None:
        """`a` by every B, each into its place, on cuBLAS."""
        for i, (b, place) in enumerate(zip(call.bs, places, strict=True)):
            b_scale = call.b_scales[i] if call.b_scales else None
            product(a, b, call.biases[i], a_scale, b_scale, self.scaling, out=place)


class MovedGather(GatherPlan):
    """Copy engines bring the others' shards, in `chunks`, to `call.full` and their numbers to `call.all_numbers`."""

    def __init__(self, call: GatherCall, memory: GroupMemory, chunks: Chunks) -> None:
        super().__init__(call, memory)
        self.chunks = chunks

    @property
    def sources(self) -> list[int]:
        """Ranks in the order in which their rows come, the own ones first."""
        return [(self.memory.rank + step) % self.memory.world for step in range(self.memory.world)]

    def start(self, stream: int, call: GatherTensors) -> None:
        """Enqueue the copies, behind what `stream` has done so far."""
        self.memory.fork(stream)
        self.copy(self.memory.stream, call)
        driver.record_event(self.memory.end, self.memory.stream)

    def copy(self, side: int, call: GatherTensors) -> None:
        """Enqueue them on `side`."""
        raise NotImplementedError

    def ranges(self, own: Tensor, gathered: Tensor) -> list[Tensor]:
        """All ranges, by block and then by rank, of the own rows, or numbers of them, and of what has come.

        The rows of block p and source r are range number p * world + r.
        """
        raise NotImplementedError

    def finish(self, stream: int, call: GatherTensors) -> None:
        """Behind all products, join the copy stream: what the allocator may reuse is no longer read or written."""
        driver.wait_event(stream, self.memory.end)


class PulledGather(MovedGather):
    """A shard is staged in symmetric memory, and the others pull it.

    stage_first: before the products start, because they would leave no room for that.
    stage_keeps: what stages the shard of a gather along dim 0 also writes it to the gathered A, which is returned: one
        read and one launch less, but peers wait longer for the outbox.
    stage_programs: the most CTAs that stage; 0: as many as the GPU has room for.
    """

    stage_first = False
    stage_keeps = False
    stage_programs = 0

    def __init__(self, call: GatherCall, memory: GroupMemory, chunks: Chunks) -> None:
        super().__init__(call, memory, chunks)
        self.scale_offset = align(self.shard_bytes)
        self.stage_keeps = self.stage_keeps and self.outer == 1
        rank, world = memory.rank, memory.world
        outbox = memory.require("box", self.scale_offset + self.number_bytes)
        moves = GatherMoves(
            outboxes=outbox.peers,
            row_bytes=self.row_bytes,
            outer=self.outer,
            inner=self.layout.inner,
            scale_offset=self.scale_offset,
            scale_bytes=self.number_bytes // self.outer,
            chunks=chunks,
            keep_own=not self.stage_keeps,
            keep_own_scales=call.along is not None,
        )
        steps = gather_script(rank, world, moves, self.arrived)
        self.play = compile_script(steps, memory.peer_writes, memory.one)
        self._compile_stage(call, outbox.memory)

    def _compile_stage(self, call: GatherCall, outbox: Tensor) -> None:
        memory = self.memory
        # 64 to 128 bytes a thread: what its registers hold. One CTA finds room beside a GEMM's on every SM.
        largest, ctas = (4096, 2) if self.stage_keeps else (8192, 1)
        most = self.stage_programs or ctas * driver.processors(self.device_index)
        block = block_for(self.units, largest, most)
        programs = grid(-(-self.units // block), most)
        shard = kept = self.as_units(aligned(call.a_shard))
        if self.stage_keeps:
            full = self.as_units(self.new_full())
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
        self.stage = prepare(stage_kernel, programs, examples, constants, BESIDE_WARPS, maxnreg=BESIDE_REGISTERS)
        self.stage_tail = [
            argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in [box, scale_box, *tail]
        ]

    def arrived(self, source: int, chunk: int) -> list[Step]:
        """What tells the consumer that a chunk is in place."""
        raise NotImplementedError

    def start(self, stream: int, call: GatherTensors) -> None:
        """Enqueue staging and copies; of gathered numbers the own ones are only there if they are no scale."""
        if self.stage_first:
            self._stage(stream, call)
        super().start(stream, call)

    def copy(self, side: int, call: GatherTensors) -> None:
        """Enqueue the copies on `side`, behind the staging unless that has come first."""
        if not self.stage_first:
            self._stage(side, call)
        own, whole = (0 if each is None else each.data_ptr() for each in (call.numbers, call.all_numbers))
        self.play(side, (0, call.shard.data_ptr(), call.full.data_ptr(), whole, own))

    def _stage(self, stream: int, call: GatherTensors) -> None:
        shard = call.shard.data_ptr()
        kept = call.full.data_ptr() + self.memory.rank * self.shard_bytes if self.stage_keeps else shard
        self.stage(stream, [shard, 0 if call.numbers is None else call.numbers.data_ptr(), kept, *self.stage_tail])

    def ranges(self, own: Tensor, gathered: Tensor) -> list[Tensor]:
        parts = list(ranges(gathered, self.outer * self.memory.world))
        parts[self.memory.rank :: self.memory.world] = ranges(own, self.outer)
        return parts


class PushedGather(MovedGather):
    """Each rank pushes its shard from where it is into the others' symmetric memory, where their products read it.

    So `full` is the others' rows only, by rank and without gaps, and so is `all_numbers` where these are scales. For
    what is returned that is no place: the next call takes it. Numbers that are returned are put together at the end.
    """

    def __init__(self, call: GatherCall, memory: GroupMemory, chunks: Chunks) -> None:
        super().__init__(call, memory, chunks)
        others, travels, number_bytes = memory.world - 1, call.travels, self.number_bytes
        self.slot_bytes = align(self.shard_bytes, 16)  # TMA's, where the GEMM reads: then it is the shard's own size
        self.scale_offset = align(others * self.slot_bytes)
        self.inbox = memory.require("box", self.scale_offset + others * number_bytes)
        full = self._received(call.a_shard.dtype, 0, self.slot_bytes, (self.layout.rows, self.layout.cols))
        self.new_full = lambda: full
        if travels is not None:
            shape = (self.number_count // travels.shape[-1], travels.shape[-1])
            numbers = self._received(travels.dtype, self.scale_offset, number_bytes, shape)
            self.numbers = numbers
            if self.scale_travels:
                self.new_numbers = lambda: numbers  # not the plan's: a cycle would keep the box after it has grown
        scales = (self.scale_offset, number_bytes)
        moves = PushMoves(self.inbox.peers, self.slot_bytes, self.row_bytes, chunks, OWN, 0, *scales)
        steps = push_script(memory.landing, moves, lambda dst, chunk: [], MAX_CHUNKS)
        self.play = memory.compiled(steps, call.op, "free inbox")

    def _received(self, dtype: torch.dtype, offset: int, slot_bytes: int, shape: tuple[int, int]) -> Tensor:
        """[source but for the own, *shape] in slots of the inbox, from `offset` bytes on."""
        stride = (slot_bytes // dtype.itemsize, shape[1], 1)
        size = (self.memory.world - 1, *shape)
        return self.inbox.memory.view(dtype).as_strided(size, stride, offset // dtype.itemsize)

    def landed(self, source: int, chunk: int) -> list[Step]:
        """Wait until a chunk is there."""
        return chunk_script(self.memory.landing, source, chunk, MAX_CHUNKS)

    def copy(self, side: int, call: GatherTensors) -> None:
        self.play(side, (0, call.shard.data_ptr(), 0, 0, 0 if call.numbers is None else call.numbers.data_ptr()))

    def ranges(self, own: Tensor, gathered: Tensor) -> list[Tensor]:
        rank, slots = self.memory.rank, list(gathered.unbind())
        by_source = [ranges(each, self.outer) for each in (*slots[:rank], own, *slots[rank:])]
        return [parts[block] for block in range(self.outer) for parts in by_source]

    def finish(self, stream: int, call: GatherTensors) -> None:
        if call.numbers is not None and call.all_numbers is not None and not self.scale_travels:
            torch.cat(self.ranges(call.numbers, self.numbers), out=call.all_numbers)
        super().finish(stream, call)


class FusedGather(MovedGather):
    """One GEMM that consumes chunks as they arrive. reads_inbox: the gathered rows are the others' only."""

    name = "fused"
    cublas = False
    reads_inbox: bool

    @property
    def words(self) -> int:
        """Address of int32 [world, MAX_CHUNKS], which say what has come."""
        return self.memory.arrivals

    def __init__(self, call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        super().__init__(call, memory, cut(call.outer, call.layout.inner, tiles.block_m, wanted_chunks))
        self._compile(call, tiles, programs)

    def arrival(self, source: int, chunk: int) -> Step:
        """Say that a chunk is there, by a word of this GPU's."""
        return Write(self.memory.arrivals + (source * MAX_CHUNKS + chunk) * 4, 1)

    def _compile(self, call: GatherCall, tiles: Tiles, programs: int) -> None:
        memory, layout = self.memory, self.layout
        inner, k = layout.inner, layout.cols
        rows, blocks = [1, tiles.block_m, tiles.block_k], tiles.stored
        full, sources = self.new_full(), memory.world - self.reads_inbox
        a_strides = [inner * k, k, 1]
        self.a_own = describe(aligned(call.a_shard), [self.outer, inner, k], a_strides, rows)
        self.a_full = describe(full, [self.outer * sources, inner, k], a_strides, rows)
        self.bs = [b_descriptor(aligned_columns(b), tiles) for b in call.bs]
        self.cs = [
            describe(new(), [self.outer * memory.world, inner, n], [inner * n, n, 1], blocks)
            for new, n in zip(self.new_outs, self.widths, strict=True)
        ]
        count, dummy = len(call.bs), memory.dummy
        bias = call.biases[0]
        a_mode = 2 if call.scale_travels else scale_mode(call.a_scale)
        b_mode = scale_mode(call.b_scales[0] if call.b_scales else None)
        padding = [None] * (MAX_OPERANDS - count)
        widths = self.widths + [0] * (MAX_OPERANDS - count)
        tile_count = _tile_count(self.outer * memory.world, inner, self.widths, tiles)
        programs = grid(tile_count, programs)
        self.stamps = new_table(call.op, memory, tile_count, first=0)
        done = memory.gather_done if self.stamps is None else self.stamps.done
        chunk_tiles = self.chunks.tiles
        self.sizes = [self.outer, inner, k, 0, 0, 0, *widths, memory.rank, memory.world, chunk_tiles, chunk_tiles, 1]
        args = [
            self.a_own, self.a_full, None, None, *self.bs, *padding, *self.cs, *padding,
            *[dummy] * 8, *[dummy if bias is None else bias] * 4, memory.local, done, *self.sizes,
        ]  # fmt: skip
        self.launch = prepare_gemm(
            args, programs, tiles, call.bs, bias, (a_mode, b_mode), self.out_dtype, True, self.scale_travels,
            inbox=self.reads_inbox, stamps=self.stamps is not None,
        )  # fmt: skip
        self.done = done.data_ptr()
        self.a_own, self.a_full = outlines((self.a_own, self.a_full))
        self.bs, self.cs = outlines(self.bs), outlines(self.cs)
        self.padding = padding
        self.unused = memory.local.data_ptr()

    def mended(self, call: GatherTensors) -> GatherTensors:
        call, bs = super().mended(call), [aligned_columns(b) for b in call.bs]
        (a_scale,) = dense([call.a_scale])
        return call._replace(a_scale=a_scale, bs=bs, b_scales=dense(call.b_scales), biases=dense(call.biases))

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        self.start(stream, call)
        unused = self.unused
        scale0 = scale1 = unused
        if call.a_scale is not None:
            scale0 = scale1 = call.a_scale.data_ptr()
            if self.scale_travels and call.all_numbers is not None:
                scale1 = call.all_numbers.data_ptr()
        self.launch(
            stream,
            [
                Tma(self.a_own, call.shard.data_ptr()),
                Tma(self.a_full, call.full.data_ptr()),
                None,
                None,
                *[Tma(like, b.data_ptr()) for like, b in zip(self.bs, call.bs, strict=True)],
                *self.padding,
                *[Tma(like, out.data_ptr()) for like, out in zip(self.cs, call.outs, strict=True)],
                *self.padding,
                scale0,
                scale1,
                unused,
                unused,
                *operand_addresses(call.b_scales, unused),
                *operand_addresses(call.biases, unused),
                self.words,
                self.done,
                *self.sizes,
            ],
        )
        self.finish(stream, call)


class FusedPull(FusedGather, PulledGather):
    """Chunks are pulled, to where the gathered A is returned."""

    reads_inbox = False

    def __init__(self, call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        super().__init__(call, memory, tiles, wanted_chunks, programs)
        # A GEMM that holds every SM waits for what is staged: without room beside it, staging has to come first.
        self.stage_first = self.lands = not fit_together(self.launch, self.stage)

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return [self.arrival(source, chunk)]


class FusedPush(FusedGather, PushedGather):
    """Chunks are pushed, and the GEMM polls the words that their senders set.

    Where waits are bounded the copy stream waits for these, and tells the GEMM, which knows no bound.
    """

    reads_inbox = True

    def __init__(self, call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        super().__init__(call, memory, tiles, wanted_chunks, programs)
        # Pushes, the others' too, come behind what is in flight, whose kernels need room beside this GEMM.
        self.lands = not leaves_room(self.launch)
        chunks = itertools.product(self.sources[1:], range(len(self.chunks)))
        steps = [step for which in chunks for step in (*self.landed(*which), self.arrival(*which))]
        self.take = memory.compiled(steps, call.op, "chunk")

    @property
    def words(self) -> int:
        return self.memory.arrivals if self.memory.bounded else self.memory.landed.at(self.memory.rank)

    def copy(self, side: int, call: GatherTensors) -> None:
        super().copy(side, call)
        if self.memory.bounded:
            self.take(side, ())


def fused_gather(call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> FusedGather:
    """The plan of the fused implementation."""
    return (FusedPull if call.return_a_full else FusedPush)(call, memory, tiles, wanted_chunks, programs)


def _tile_count(blocks: int, inner: int, widths: Sequence[int], tiles: Tiles) -> int:
    return blocks * -(-inner // tiles.block_m) * sum(-(-n // tiles.block_n) for n in widths)


class DecomposedGather(MovedGather):
    """cuBLAS for each range of a source's rows, behind its copy. Only for a few: there is one in each outer block."""

    name = "decomposed"

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, in_blocks(call.outer, call.layout.inner))

    def behind(self, stream: int, source: int, block: int) -> None:
        """Let `stream` go on once a range is there."""
        raise NotImplementedError

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        """Range by range."""
        self.start(stream, call)
        world = self.memory.world
        parts = self.ranges(call.shard, call.full)
        scales: Sequence[Tensor | None]
        if call.a_scale is None or (call.a_scale.numel() == 1 and not self.scale_travels):
            scales = [call.a_scale] * len(parts)
        elif call.all_numbers is None or not self.scale_travels:
            scales = ranges(call.a_scale, len(parts))
        else:
            scales = self.ranges(call.a_scale, call.all_numbers)
        places = [ranges(out, len(parts)) for out in call.outs]
        for source in self.sources:
            for block in range(self.outer):
                part = block * world + source
                if source != self.memory.rank:
                    self.behind(stream, source, block)
                self.multiply(call, parts[part], scales[part], [place[part] for place in places])
        self.finish(stream, call)


class DecomposedPull(DecomposedGather, PulledGather):
    """Ranges are pulled, to where the gathered A is returned."""

    stage_first = lands = True
    stage_keeps = True  # a copy of its own would come before the last product, or take SMs from another

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return [Record(self.memory.event(source, chunk))]

    def behind(self, stream: int, source: int, block: int) -> None:
        driver.wait_event(stream, self.memory.event(source, block))


class DecomposedPush(DecomposedGather, PushedGather):
    """Ranges are pushed, and the own product starts at once."""

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        self.await_range = {
            (source, chunk): memory.compiled(self.landed(source, chunk), call.op, "chunk")
            for source in self.sources[1:]
            for chunk in range(len(self.chunks))
        }

    def behind(self, stream: int, source: int, block: int) -> None:
        if self.memory.bounded and (source, block) == (self.sources[1], 0):
            # behind the pushes, so that who is named is who did not come, not who waits for that rank
            driver.wait_event(stream, self.memory.end)
        self.await_range[source, block](stream, ())


def decomposed_gather(call: GatherCall, memory: GroupMemory) -> DecomposedGather:
    """The plan of the decomposed implementation."""
    return (DecomposedPull if call.return_a_full else DecomposedPush)(call, memory)


def block_for(size: int, largest: int, programs: int) -> int:
    """Units of `size` that one of `programs` moves at a time: many, to hide latency, but work for all programs."""
    block = largest
    while block > 512 and size < block * programs:
        block //= 2
    return block


class WholeGather(GatherPlan):
    """An all-gather, then cuBLAS on the whole: nothing overlaps."""

    def move(self, stream: int, call: GatherTensors) -> None:
        """Gather the shards, and the numbers if any travel."""
        raise NotImplementedError

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        self.move(stream, call)
        row_scale = call.all_numbers if self.scale_travels else call.a_scale
        rows = call.full.view(self.layout.full_rows, self.layout.full_cols)
        self.multiply(call, rows, row_scale, [out.view(-1, out.shape[-1]) for out in call.outs])


class DirectGather(WholeGather):
    """One kernel for the all-gather."""

    name = "direct"

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        layout = self.layout
        scale_offset = align(self.shard_bytes)
        part = align(scale_offset + self.number_bytes)
        area, words = memory.direct(part * memory.world)
        slot = area.size // 2
        block = block_for(self.units, 4096, DIRECT_PROGRAMS)
        programs = grid(-(-self.units // block), DIRECT_PROGRAMS)
        counts = (self.number_count, self.number_count // self.outer)
        numbers = [self.units, self.row_bytes // self.unit_bytes, layout.inner, *counts]
        memory_args = [
            area.table, words.table, slot, part, scale_offset, memory.epoch, memory.done, memory.bound,
            memory.status, code(call.op, "shard"), memory.rank,
        ]  # fmt: skip
        shard, full = aligned(call.a_shard), self.new_full()
        numbers_like = call.a_scale if call.travels is None else call.travels
        scale = memory.dummy if numbers_like is None else aligned(numbers_like)
        args = [self.as_units(shard), scale, self.as_units(full), memory.dummy, *numbers, *memory_args]
        args[9], args[10] = area.table.data_ptr(), words.table.data_ptr()
        constants = {
            "WORLD": memory.world,
            "SCALE_TRAVELS": self.number_count > 0,
            "CONTIGUOUS": layout.whole,
            "ALONG_LAST": layout.along_last,
            "MAX_PROGRAMS": DIRECT_PROGRAMS,
            "PROGRAMS": programs,
            "BLOCK": block,
        }
        self.launch = prepare(push_gather_kernel, programs, args, constants, 8)
        self.tail = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in args[4:]]

    def move(self, stream: int, call: GatherTensors) -> None:
        dummy = self.memory.dummy
        own, whole = (dummy if tensor is None else tensor for tensor in (call.numbers, call.all_numbers))
        pointers = [tensor.data_ptr() for tensor in (call.shard, own, call.full, whole)]
        self.launch(stream, [*pointers, *self.tail])


class UnfusedGather(WholeGather):
    """NCCL's all-gather. Only for one outer block, where the ranks' shards are ranges of rows."""

    name = "unfused"

    def make(self, stream: int, call: GatherTensors) -> None:
        """Neither the group's memory nor its order of calls matters, and NCCL's calls are not recorded."""
        self.enqueue(stream, self.mended(call))

    def move(self, stream: int, call: GatherTensors) -> None:
        gather_into(call.full, call.shard, self.memory.group)
        if call.numbers is not None and call.all_numbers is not None:
            gather_into(call.all_numbers, call.numbers, self.memory.group)
