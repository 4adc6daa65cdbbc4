"""All-gather → matmuls on GPUs: the implementations, one plan each.

    fused        one GEMM starts on the own rows and takes the others' as their chunks arrive       push, pull
    decomposed   cuBLAS, one product per range of a source's rows, after its chunks                 push, pull
    direct       one kernel pushes and collects all shards, then cuBLAS on the whole                direct
    sequential   NCCL, then cuBLAS on the whole                                                     plain

The last column is the transport, which all ranks share (`wire`); the rest is each rank's own. By `push` each rank's
copy engine pushes its shard to where the others' products read it, and nothing is staged; a rank that returns the
gathered A too has it copied from there. By `pull`, where all ranks return it, each stages its shard, and the others
pull it to where the result is.

A plan is made once per (shapes, strides, dtypes, options) and group, and holds everything that does not change:
addresses of words, the copy stream's script, the compiled kernel. A call only fills in addresses: it makes memory for
its results, then mends its operands and enqueues, which a call on the same addresses need not do again (`recordings`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asynctp_kernels.compat import gather_into, new_tensors
from asynctp_kernels.cuda.choose.tiles import Chunks, Tiles, WireChunks, cut, in_blocks
from asynctp_kernels.cuda.choose.wire import DIRECT, PULL, PUSH, Wire
from asynctp_kernels.cuda.gemm.copy_kernels import keep_kernel, push_gather_kernel, stage_kernel
from asynctp_kernels.cuda.gemm.gemm import MAX_OPERANDS, b_descriptor, operand_addresses, prepare_gemm, scale_mode
from asynctp_kernels.cuda.gemm.products import Recipe, Scaling, block_recipe, product, ranges
from asynctp_kernels.cuda.runtime.launch import (
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
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import DIRECT_PROGRAMS, MAX_CHUNKS, GroupMemory
from asynctp_kernels.cuda.runtime.script import (
    DATA,
    Player,
    PullMoves,
    PushMoves,
    Record,
    Step,
    Write,
    arrived_script,
    clear_script,
    pull_script,
    push_script,
)
from asynctp_kernels.cuda.runtime.stamps import StampTable, new_table
from asynctp_kernels.layout import ShardLayout, gather_layout

_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
KEEPERS = 64  # CTAs that copy what came to its place, beside products


@dataclass(frozen=True)
class GatherCall:
    """The arguments that decide a plan; the tensors stand for all tensors of their shapes, strides and dtypes.

    kept: every rank keeps the gathered A, whether it returns it or not.
    """

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
    kept: bool = False

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
    def rows(self) -> int:
        """Of the results, over all ranks."""
        return self.layout.full_rows

    @property
    def op(self) -> str:
        """Its name, for messages; a call without a product is in flight."""
        if not self.bs:
            return "all_gather"
        return "all_gather_matmul" if self.a_scale is None else "all_gather_scaled_matmul"

    @property
    def wire(self) -> Wire:
        """What all ranks share of it."""
        numbers = 0 if self.travels is None else 4 * self.travels.numel()
        return Wire(
            "all_gather", self.world, self.a_shard.numel() * self.a_shard.itemsize, number_bytes=numbers, kept=self.kept
        )

    @property
    def scaling(self) -> Scaling | None:
        return None if self.a_scale is None else Scaling(self.out_dtype, self.fast)

    @property
    def device_index(self) -> int:
        return self.a_shard.device.index

    @property
    def is_empty(self) -> bool:
        """Nothing is multiplied."""
        layout = self.layout
        return layout.rows == 0 or layout.cols == 0 or not self.bs or any(b.shape[1] == 0 for b in self.bs)

    @property
    def recipes(self) -> list[Recipe | None]:
        """Of which blocks the scales of each matmul are; empty where there are no scales."""
        if self.a_scale is None:
            return []
        rows = self.layout.rows if self.scale_travels else self.layout.full_rows
        pairs = zip(self.bs, self.b_scales, strict=True)
        return [block_recipe(rows, b, self.a_scale, b_scale) for b, b_scale in pairs]


#: A shard, A scale, Bs, B scales, biases, and what travels along: as `GatherCall` has them
GatherOperands = tuple[
    Tensor, Tensor | None, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None], Tensor | None
]


class GatherTensors(NamedTuple):
    """All memory of one call.

    shard, a_scale, bs, b_scales, biases: the operands.
    numbers: what is gathered with the shard: `a_scale`, or what is only returned.
    outs: the products. full: the gathered A, where it is returned or multiplied whole. all_numbers: the gathered
    numbers [*, K/128 or 1], where they are.
    """

    shard: Tensor
    a_scale: Tensor | None
    bs: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    numbers: Tensor | None
    outs: list[Tensor]
    full: Tensor | None
    all_numbers: Tensor | None

    def addresses(self) -> tuple[int, ...]:
        """Of all."""
        shard, a_scale, bs, b_scales, biases, numbers, outs, full, all_numbers = self
        tensors = (shard, a_scale, numbers, full, all_numbers, *bs, *b_scales, *biases, *outs)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])


class GatherPlan:
    """One call, prepared. `run` gives the products, then the gathered A if asked for, then the gathered `along`.

    uses_memory: calls take their turn in the group's memory. cublas: `enqueue` calls cuBLAS.
    has_full, has_numbers: the call makes memory for the gathered A, and numbers.
    waits_for_in_flight: it has to come after what is in flight, because its products wait for kernels that then would
    find no room beside them. reads_landed: it reads words of chunks, which a gather in flight reads too, so it has to
    come after that. stamps: of the GEMM's tiles, if they are asked for.
    """

    name: str
    uses_memory = True
    cublas = True
    waits_for_in_flight = False
    reads_landed = False
    stamps: StampTable | None = None

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        self.number = memory.new_plan()
        self.memory, self.layout, self.outer = memory, call.layout, call.outer
        self.scaling, self.out_dtype = call.scaling, call.out_dtype
        self.return_a_full, self.scale_travels = call.return_a_full, call.scale_travels
        self.has_full = self.return_a_full or self.multiplies_whole
        self.has_numbers = call.travels is not None and (self.multiplies_whole or not call.scale_travels)
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

    @property
    def multiplies_whole(self) -> bool:
        """Products are of the gathered A as a whole."""
        return False

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

    def together(self, run: int) -> int:
        """How many units a copy reads and writes at once, where runs of so many lie one after the other (0: any)."""
        return math.gcd(16 // self.unit_bytes, run)

    def tensors(self, operands: GatherOperands) -> GatherTensors:
        """The operands as they come, and new memory for what a call makes."""
        a_shard, a_scale, bs, b_scales, biases, along = operands
        numbers = a_scale if self.scale_travels else along
        all_numbers = self.new_numbers() if self.has_numbers else None
        outs = [new() for new in self.new_outs]
        full = self.new_full() if self.has_full else None
        return GatherTensors(a_shard, a_scale, bs, b_scales, biases, numbers, outs, full, all_numbers)

    def with_kernel_layout(self, call: GatherTensors) -> GatherTensors:
        """The call with its operands as the implementation reads them: copies of those that lie otherwise."""
        numbers = None if call.numbers is None else aligned(call.numbers)
        scale = numbers if self.scale_travels else call.a_scale
        return call._replace(shard=aligned(call.shard), a_scale=scale, numbers=numbers)

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        """Everything that a call does on the GPU, after `stream` and with `stream` after it."""
        raise NotImplementedError

    def results(self, call: GatherTensors) -> list[Tensor]:
        """What the call returns."""
        results = list(call.outs)
        if self.return_a_full and call.full is not None:
            results.append(call.full)
        if call.all_numbers is not None and not self.scale_travels:
            results.append(call.all_numbers.view(*self.layout.full_shape[:-1], call.all_numbers.shape[-1]))
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
            self.enqueue(at, self.with_kernel_layout(call))

        waits = (self.waits_for_in_flight, self.reads_landed)
        self.memory.call(stream, self.number, call.addresses(), self.cublas, enqueue, *waits)

    def multiply(self, call: GatherTensors, a: Tensor, a_scale: Tensor | None, places: Sequence[Tensor]) -> None:
        """`a` by every B, each into its place, on cuBLAS."""
        for i, (b, place) in enumerate(zip(call.bs, places, strict=True)):
            b_scale = call.b_scales[i] if call.b_scales else None
            product(a, b, call.biases[i], a_scale, b_scale, self.scaling, out=place)


class MovedGather(GatherPlan):
    """Copy engines bring the others' rows, and their numbers, to `rows` and `numbers_of` a call, while products run.

    gemm_clears: the GEMM is the only reader of the words that it polls.
    """

    gemm_clears = True

    @property
    def sources(self) -> list[int]:
        """The others in the order in which their rows come."""
        return [(self.memory.rank + step) % self.memory.world for step in range(1, self.memory.world)]

    @property
    def words(self) -> int:
        """Address of int32 [world]: how many chunks of each source are there."""
        raise NotImplementedError

    @property
    def chunk_rows(self) -> int:
        """Rows of a source that a chunk has, rounded down."""
        raise NotImplementedError

    def rows(self, call: GatherTensors) -> Tensor:
        """The memory that others' rows come to."""
        raise NotImplementedError

    def numbers_of(self, call: GatherTensors) -> Tensor:
        """The memory that others' numbers come to."""
        raise NotImplementedError

    def start(self, stream: int, call: GatherTensors) -> None:
        """Enqueue the copies, after what `stream` has done so far."""
        raise NotImplementedError

    def await_all(self, stream: int) -> None:
        """Let `stream` wait until everything has come, where what it waits for is not done later."""

    def await_range(self, stream: int, source: int, block: int) -> None:
        """Let `stream` go on once a range is there."""
        raise NotImplementedError

    def ranges(self, own: Tensor, come: Tensor) -> list[Tensor]:
        """All ranges, by block and then by rank, of the own rows, or numbers of them, and of what has come.

        The rows of block p and source r are range number p * world + r.
        """
        raise NotImplementedError

    def finish(self, stream: int, call: GatherTensors) -> None:
        """After all products, join the copy stream: what the allocator may reuse is no longer read or written."""
        driver.wait_event(stream, self.memory.end)


class PushedGather(MovedGather):
    """Each rank pushes its shard, and its numbers, from where they are into the others' inboxes.

    `received` and `received_numbers` there are the others' only, by rank. The next call takes that place, so what is
    returned is copied from it (`keep`), on the reducer's stream.

    Args:
        call, memory: As for `GatherPlan`.
        copies: In how many copies the shard is sent to the first rank and to the last one.
    """

    reads_landed = True

    def __init__(self, call: GatherCall, memory: GroupMemory, copies: int) -> None:
        super().__init__(call, memory)
        others, travels, number_bytes = memory.world - 1, call.travels, self.number_bytes
        self.wire_chunks = WireChunks(self.shard_bytes)
        self.slot_bytes = align(self.shard_bytes, 16)  # TMA's, where the GEMM reads: then it is the shard's own size
        self.scale_offset = align(others * self.slot_bytes)
        self.inbox = memory.require("box", self.scale_offset + others * number_bytes)
        self.received = self._received(call.a_shard.dtype, 0, self.slot_bytes, (self.layout.rows, self.layout.cols))
        if travels is not None:
            shape = (self.number_count // travels.shape[-1], travels.shape[-1])
            self.received_numbers = self._received(travels.dtype, self.scale_offset, number_bytes, shape)
        signature = memory.signature(call.wire, PUSH)
        pieces = self.wire_chunks.pieces(copies)
        scales = (self.scale_offset, number_bytes)
        moves = PushMoves(self.inbox.peers, self.slot_bytes, self.wire_chunks, pieces, DATA, 0, signature, *scales)
        self.play = memory.compiled(push_script(memory.landing, moves, lambda dst, piece: []))
        self.clear = memory.compiled(clear_script(memory.landing))
        self.all_came = {
            source: memory.compiled(arrived_script(memory.landing, source, MAX_CHUNKS - 1)) for source in self.sources
        }
        self.came = {source: self._waits(source) for source in self.sources}
        self.gemm_clears = not self.has_full
        if self.has_full:
            self._compile_keep(call)

    def _received(self, dtype: torch.dtype, offset: int, slot_bytes: int, shape: tuple[int, int]) -> Tensor:
        """[source but for the own, *shape] in slots of the inbox, from `offset` bytes on."""
        stride = (slot_bytes // dtype.itemsize, shape[1], 1)
        size = (self.memory.world - 1, *shape)
        return self.inbox.memory.view(dtype).as_strided(size, stride, offset // dtype.itemsize)

    def slot(self, source: int) -> int:
        """Address of a source's rows in the own inbox."""
        number = source - (source > self.memory.rank)
        return self.inbox.peers[self.memory.rank] + number * self.slot_bytes

    @property
    def words(self) -> int:
        return self.memory.landed.at(self.memory.rank)

    @property
    def chunk_rows(self) -> int:
        return self.wire_chunks.chunk // self.row_bytes

    def rows(self, call: GatherTensors) -> Tensor:
        return self.received

    def numbers_of(self, call: GatherTensors) -> Tensor:
        return self.received_numbers

    # --- the call
    def start(self, stream: int, call: GatherTensors) -> None:
        memory = self.memory
        memory.fork(stream)
        self.push(memory.stream, call)
        driver.record_event(memory.end, memory.stream)
        if call.full is not None:
            driver.wait_event(memory.reducer, memory.start)
            memory.after_flights(memory.reducer)
            self.keep(memory.reducer, call)
            driver.record_event(memory.reduced, memory.reducer)

    def push(self, side: int, call: GatherTensors) -> None:
        """Enqueue the pushes on `side`."""
        self.play(side, (0, call.shard.data_ptr(), 0 if call.numbers is None else call.numbers.data_ptr()))

    def await_all(self, stream: int) -> None:
        if driver.IN_ORDER:
            for wait in self.all_came.values():
                wait(stream, ())

    def _waits(self, source: int) -> list[Player | None]:
        """Waits for each block of a source's rows: none where an earlier one was for as much."""
        channel, players, known = self.memory.landing, list[Player | None](), -1
        for block in range(self.outer):
            last = self.wire_chunks.covering((block + 1) * self.layout.inner * self.row_bytes)
            steps: list[Step] = arrived_script(channel, source, last)
            if block == self.outer - 1 and not self.has_full:  # nobody else reads the word
                steps.append(Write(channel.full(channel.rank, source), 0))
            players.append(self.memory.compiled(steps) if last > known else None)
            known = last
        return players

    def await_range(self, stream: int, source: int, block: int) -> None:
        if (wait := self.came[source][block]) is not None:
            wait(stream, ())

    def ranges(self, own: Tensor, come: Tensor) -> list[Tensor]:
        rank, slots = self.memory.rank, list(come.unbind())
        by_source = [ranges(each, self.outer) for each in (*slots[:rank], own, *slots[rank:])]
        return [parts[block] for block in range(self.outer) for parts in by_source]

    def finish(self, stream: int, call: GatherTensors) -> None:
        """Put returned numbers together, join what is under way, and clear words that several have read."""
        if call.numbers is not None and call.all_numbers is not None:
            torch.cat(self.ranges(call.numbers, self.received_numbers), out=call.all_numbers)
        super().finish(stream, call)
        if call.full is not None:
            driver.wait_event(stream, self.memory.reduced)
            self.clear(stream, ())

    # --- what is kept
    def _compile_keep(self, call: GatherCall) -> None:
        memory, layout = self.memory, self.layout
        block = block_for(self.units, 4096, KEEPERS)
        programs = grid(-(-self.units // block), KEEPERS)
        own = self.as_units(aligned(call.a_shard))
        self.keep_sizes = [self.units, self.row_bytes // self.unit_bytes, layout.inner]
        examples = [own, self.as_units(self.new_full()), memory.gather_done, *self.keep_sizes, memory.rank, memory.rank]
        constants = {
            "WORLD": memory.world,
            "CONTIGUOUS": layout.whole,
            "ALONG_LAST": layout.along_last,
            "ALIGN": self.together(self.units if layout.whole else self.keep_sizes[1]),
            "BLOCK": block,
            "PROGRAMS": programs,
        }
        options = {"num_stages": 1, "maxnreg": BESIDE_REGISTERS}
        self.keep_rows = prepare(keep_kernel, programs, examples, constants, BESIDE_WARPS, **options)
        self.counts = memory.gather_done.data_ptr()

    def keep(self, side: int, call: GatherTensors) -> None:
        """Enqueue on `side` the copies to the gathered A: of the own rows, and of each source's once they are there."""
        assert call.full is not None
        rank, whole = self.memory.rank, call.full.data_ptr()
        self.keep_rows(side, [call.shard.data_ptr(), whole, self.counts, *self.keep_sizes, rank, rank])
        for source in self.sources:
            self.all_came[source](side, ())
            self.keep_rows(side, [self.slot(source), whole, self.counts, *self.keep_sizes, source, rank])


class PulledGather(MovedGather):
    """A shard is staged in symmetric memory, and the others pull it to where the result is: all ranks keep that.

    stage_first: before the products start, because they would leave no room for that.
    stage_keeps: the kernel that stages the shard of a gather along dim 0 also writes it to the gathered A: one read and
        one launch less, but peers wait longer for the outbox.
    stage_programs: the most CTAs that stage; 0: as many as the GPU has room for.
    """

    stage_first = False
    stage_keeps = False
    stage_programs = 0

    def __init__(self, call: GatherCall, memory: GroupMemory, chunks: Chunks) -> None:
        super().__init__(call, memory)
        self.chunks = chunks
        self.has_full, self.has_numbers = True, call.travels is not None
        self.scale_offset = align(self.shard_bytes)
        self.stage_keeps = self.stage_keeps and self.outer == 1
        self.outbox = memory.require("box", self.scale_offset + self.number_bytes)
        self._compile_stage(call)
        moves = PullMoves(
            outboxes=self.outbox.peers,
            row_bytes=self.row_bytes,
            outer=self.outer,
            inner=self.layout.inner,
            scale_offset=self.scale_offset,
            scale_bytes=self.number_bytes // self.outer,
            chunks=chunks,
            keep_own=not self.stage_keeps,
            keep_own_scales=call.along is not None,
        )
        self.play = memory.compiled(pull_script(memory.rank, memory.world, moves, self.arrived))

    def _compile_stage(self, call: GatherCall) -> None:
        memory = self.memory
        # 64 to 128 bytes a thread, which its registers hold. One CTA finds room beside a GEMM's on every SM.
        largest, ctas = (4096, 2) if self.stage_keeps else (8192, 1)
        most = self.stage_programs or ctas * driver.processors(self.device_index)
        block = block_for(self.units, largest, most)
        programs = grid(-(-self.units // block), most)
        shard = kept = self.as_units(aligned(call.a_shard))
        if self.stage_keeps:
            full = self.as_units(self.new_full())
            kept = full[memory.rank * self.units :][: self.units]
        box, scale_box = self.as_units(self.outbox.memory), self.outbox.memory[self.scale_offset :].view(torch.float32)
        scale = memory.dummy if call.travels is None else aligned(call.travels)
        whole = self.units % self.together(0) == 0
        words = [memory.pads, memory.free.number, memory.landed.number, memory.kernel_bound, memory.status]
        tail: list[Any] = [
            box, scale_box, memory.stage_done, memory.awaited, self.units, self.number_count, *words,
            memory.signature(call.wire, PULL), memory.rank,
        ]  # fmt: skip
        constants = {
            "WORLD": memory.world,
            "SCALE_TRAVELS": self.number_count > 0,
            "KEEPS": self.stage_keeps,
            "ALIGN": self.together(0) if whole or not self.stage_keeps else 1,  # one pointer may be aligned no further
            "BLOCK": block,
            "PROGRAMS": programs,
            "MAX_CHUNKS": MAX_CHUNKS,
        }
        examples, options = [shard, scale, kept, *tail], {"maxnreg": BESIDE_REGISTERS}
        self.stage = prepare(stage_kernel, programs, examples, constants, BESIDE_WARPS, **options)
        self.stage_tail = [each.data_ptr() if isinstance(each, Tensor) else each for each in tail]

    @property
    def words(self) -> int:
        return self.memory.arrivals

    @property
    def chunk_rows(self) -> int:
        return self.chunks.rows[0][1]

    def rows(self, call: GatherTensors) -> Tensor:
        assert call.full is not None
        return call.full

    def numbers_of(self, call: GatherTensors) -> Tensor:
        assert call.all_numbers is not None
        return call.all_numbers

    def arrived(self, source: int, chunk: int) -> list[Step]:
        """Steps that tell the consumer that a chunk is in place."""
        raise NotImplementedError

    def start(self, stream: int, call: GatherTensors) -> None:
        """Enqueue staging and copies; of gathered numbers the own ones are only there if they are no scale."""
        memory = self.memory
        if self.stage_first:
            self.stage_shard(stream, call)
        memory.fork(stream)
        self.pull(memory.stream, call)
        driver.record_event(memory.end, memory.stream)

    def stage_shard(self, stream: int, call: GatherTensors) -> None:
        """Enqueue staging on `stream`."""
        assert call.full is not None
        shard = call.shard.data_ptr()
        kept = call.full.data_ptr() + self.memory.rank * self.shard_bytes if self.stage_keeps else shard
        self.stage(stream, [shard, 0 if call.numbers is None else call.numbers.data_ptr(), kept, *self.stage_tail])

    def pull(self, side: int, call: GatherTensors) -> None:
        """Enqueue the pulls on `side`, after the staging unless that has come first."""
        if not self.stage_first:
            self.stage_shard(side, call)
        assert call.full is not None
        own, whole = (0 if each is None else each.data_ptr() for each in (call.numbers, call.all_numbers))
        self.play(side, (0, call.shard.data_ptr(), own, call.full.data_ptr(), whole))

    def ranges(self, own: Tensor, come: Tensor) -> list[Tensor]:
        parts = list(ranges(come, self.outer * self.memory.world))
        parts[self.memory.rank :: self.memory.world] = ranges(own, self.outer)
        return parts


class FusedGather(MovedGather):
    """One GEMM that consumes chunks as they arrive: it polls words."""

    name = "fused"
    cublas = False
    reads_inbox: bool

    def _compile(self, call: GatherCall, tiles: Tiles, programs: int) -> None:
        memory, layout = self.memory, self.layout
        inner, k = layout.inner, layout.cols
        rows, blocks = [1, tiles.block_m, tiles.block_k], tiles.stored
        a_strides = [inner * k, k, 1]
        self.a_own = describe(aligned(call.a_shard), [self.outer, inner, k], a_strides, rows)
        example = self.received if isinstance(self, PushedGather) else self.new_full()
        self.a_come = describe(example, [self.outer * (memory.world - self.reads_inbox), inner, k], a_strides, rows)
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
        self.sizes = [self.outer, inner, k, 0, 0, 0, *widths, memory.rank, memory.world, self.chunk_rows, 1, 1]
        args = [
            self.a_own, self.a_come, None, None, *self.bs, *padding, *self.cs, *padding,
            *[dummy] * 8, *[dummy if bias is None else bias] * 4, memory.local, done, *self.sizes,
        ]  # fmt: skip
        self.launch = prepare_gemm(
            args, programs, tiles, call.bs, bias, (a_mode, b_mode), self.out_dtype, True, self.scale_travels,
            inbox=self.reads_inbox, clears=self.gemm_clears, stamps=self.stamps is not None,
        )  # fmt: skip
        self.done = done.data_ptr()
        self.a_own, self.a_come = outlines((self.a_own, self.a_come))
        self.bs, self.cs = outlines(self.bs), outlines(self.cs)
        self.padding = padding
        self.unused = memory.local.data_ptr()

    def with_kernel_layout(self, call: GatherTensors) -> GatherTensors:
        call, bs = super().with_kernel_layout(call), [aligned_columns(b) for b in call.bs]
        (a_scale,) = dense([call.a_scale])
        return call._replace(a_scale=a_scale, bs=bs, b_scales=dense(call.b_scales), biases=dense(call.biases))

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        self.start(stream, call)
        self.await_all(stream)
        unused = self.unused
        scale0 = scale1 = unused
        if call.a_scale is not None:
            scale0 = scale1 = call.a_scale.data_ptr()
            if self.scale_travels:
                scale1 = self.numbers_of(call).data_ptr()
        self.launch(
            stream,
            [
                Tma(self.a_own, call.shard.data_ptr()),
                Tma(self.a_come, self.rows(call).data_ptr()),
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


class FusedPush(FusedGather, PushedGather):
    """Chunks are pushed: the GEMM reads the inbox, and polls the words that their senders set."""

    reads_inbox = True

    def __init__(self, call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        super().__init__(call, memory, wanted_chunks)
        self._compile(call, tiles, programs)
        # Pushes, the others' too, come after what is in flight, whose kernels need room beside this GEMM.
        self.waits_for_in_flight = not leaves_room(self.launch)


class FusedPull(FusedGather, PulledGather):
    """Chunks are pulled, to where the gathered A is returned."""

    reads_inbox = False

    def __init__(self, call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        super().__init__(call, memory, cut(call.outer, call.layout.inner, tiles.block_m, wanted_chunks))
        self._compile(call, tiles, programs)
        # A GEMM that holds every SM waits for the staged shards: without room beside it, staging has to come first.
        self.stage_first = self.waits_for_in_flight = not fit_together(self.launch, self.stage)

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return [Write(self.memory.arrivals + source * 4, chunk + 1)]


def fused_gather(call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> FusedGather:
    """The plan of the fused implementation."""
    return (FusedPull if call.kept else FusedPush)(call, memory, tiles, wanted_chunks, programs)


def _tile_count(blocks: int, inner: int, widths: Sequence[int], tiles: Tiles) -> int:
    return blocks * -(-inner // tiles.block_m) * sum(-(-n // tiles.block_n) for n in widths)


class DecomposedGather(MovedGather):
    """cuBLAS for each range of a source's rows, after its chunks. Only for a few: there is one in each outer block."""

    name = "decomposed"

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        """Range by range."""
        self.start(stream, call)
        world, rank = self.memory.world, self.memory.rank
        parts = self.ranges(call.shard, self.rows(call))
        scales: Sequence[Tensor | None]
        if call.a_scale is None or (call.a_scale.numel() == 1 and not self.scale_travels):
            scales = [call.a_scale] * len(parts)
        elif not self.scale_travels:
            scales = ranges(call.a_scale, len(parts))
        else:
            scales = self.ranges(call.a_scale, self.numbers_of(call))
        places = [ranges(out, len(parts)) for out in call.outs]
        for source in (rank, *self.sources):
            for block in range(self.outer):
                part = block * world + source
                if source != rank:
                    self.await_range(stream, source, block)
                self.multiply(call, parts[part], scales[part], [place[part] for place in places])
        self.finish(stream, call)


class DecomposedPush(DecomposedGather, PushedGather):
    """Ranges are pushed, and the own product starts at once."""

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, min(call.outer, MAX_CHUNKS))


class DecomposedPull(DecomposedGather, PulledGather):
    """Ranges are pulled, to where the gathered A is returned."""

    stage_first = waits_for_in_flight = True
    stage_keeps = True  # a copy of its own would come before the last product, or take SMs from another

    def __init__(self, call: GatherCall, memory: GroupMemory) -> None:
        super().__init__(call, memory, in_blocks(call.outer, call.layout.inner))

    def arrived(self, source: int, chunk: int) -> list[Step]:
        return [Record(self.memory.event(source, chunk))]

    def await_range(self, stream: int, source: int, block: int) -> None:
        driver.wait_event(stream, self.memory.event(source, block))


def decomposed_gather(call: GatherCall, memory: GroupMemory) -> DecomposedGather:
    """The plan of the decomposed implementation."""
    return (DecomposedPull if call.kept else DecomposedPush)(call, memory)


def block_for(size: int, largest: int, programs: int) -> int:
    """Units of `size` that one of `programs` moves at a time: many, to hide latency, but work for all programs."""
    block = largest
    while block > 512 and size < block * programs:
        block //= 2
    return block


class WholeGather(GatherPlan):
    """An all-gather, then cuBLAS on the whole: nothing overlaps."""

    @property
    def multiplies_whole(self) -> bool:
        return True

    def move(self, stream: int, call: GatherTensors) -> None:
        """Gather the shards, and the numbers if any travel."""
        raise NotImplementedError

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        self.move(stream, call)
        assert call.full is not None
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
        # runs of bytes, which all ranks cut alike, whatever their units are
        run_bytes = block_for(self.shard_bytes, 1 << 14, DIRECT_PROGRAMS)
        programs = grid(-(-self.shard_bytes // run_bytes), DIRECT_PROGRAMS)
        counts = (self.number_count, self.number_count // self.outer)
        numbers = [self.units, self.row_bytes // self.unit_bytes, layout.inner, *counts]
        self.signature = signature = memory.signature(call.wire, DIRECT)
        memory_args = [
            area.table, words.table, slot, part, scale_offset, memory.epoch, memory.direct_done, memory.doing,
            memory.bound, memory.status, signature, signature, memory.rank,
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
            "BLOCK": run_bytes // self.unit_bytes,
            "NUMBERS": 512,
        }
        self.launch = prepare(push_gather_kernel, programs, args, constants, 8)
        self.tail = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in args[4:]]

    def move(self, stream: int, call: GatherTensors) -> None:
        dummy = self.memory.dummy
        own, whole = (dummy if tensor is None else tensor for tensor in (call.numbers, call.all_numbers))
        assert call.full is not None
        pointers = [tensor.data_ptr() for tensor in (call.shard, own, call.full, whole)]
        self.launch(stream, [*pointers, *self.tail])


class SequentialGather(WholeGather):
    """NCCL's all-gather. Only for one outer block, where the ranks' shards are ranges of rows."""

    name = "sequential"
    uses_memory = False

    def make(self, stream: int, call: GatherTensors) -> None:
        """Neither the group's memory nor its order of calls matters, and NCCL's calls are not recorded."""
        self.enqueue(stream, self.with_kernel_layout(call))

    def move(self, stream: int, call: GatherTensors) -> None:
        assert call.full is not None
        gather_into(call.full, call.shard, self.memory.group)
        if call.numbers is not None and call.all_numbers is not None:
            gather_into(call.all_numbers, call.numbers, self.memory.group)
