"""How a gather's rows come, beside what computes: pushed into inboxes, or pulled to where every rank keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asynctp_kernels.cuda.choose.tiles import Chunks, WireChunks
from asynctp_kernels.cuda.choose.wire import PULL, PUSH
from asynctp_kernels.cuda.facts import GatherFacts
from asynctp_kernels.cuda.gemm.copy_kernels import keep_kernel, stage_kernel
from asynctp_kernels.cuda.gemm.cublas import ranges
from asynctp_kernels.cuda.plans.gather import GatherTensors, ShardSizes, block_for
from asynctp_kernels.cuda.runtime.edited import PlanGraph, new_graph
from asynctp_kernels.cuda.runtime.launch import (
    BESIDE_REGISTERS,
    BESIDE_WARPS,
    Launch,
    align,
    aligned,
    fit_together,
    grid,
    leaves_room,
    prepare,
)
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, GroupMemory
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
from asynctp_kernels.torch_private import new_tensors

KEEPERS = 64  # CTAs that copy what came to its place, beside matmuls


class GatherTransport:
    """Copy engines bring the others' rows, and their numbers, to `rows` and `numbers_of` a call, while others compute.

    words: address of int32 [world]: how many chunks of each source are there.
    reads_landed: it reads words of chunks, which a gather in flight reads too. received: memory that others' rows alone
    come to; None where they come to the gathered A. gemm_clears: a GEMM is the only reader of the words that it polls.
    """

    reads_landed = False
    received: Tensor | None = None
    gemm_clears = True
    words: int

    def __init__(self, call: GatherFacts, memory: GroupMemory) -> None:
        self.memory, self.sizes, self.outer = memory, ShardSizes(call), call.outer
        self.new_full = new_tensors(call.layout.full_shape, call.a_shard.dtype, call.a_shard.device)

    @property
    def sources(self) -> list[int]:
        """The others in the order in which their rows come."""
        return [(self.memory.rank + step) % self.memory.world for step in range(1, self.memory.world)]

    @property
    def chunk_rows(self) -> int:
        """Rows of a source that a chunk has, rounded down."""
        raise NotImplementedError

    def new_graph(self) -> PlanGraph | None:
        """A graph for a plan whose other work has no part of PyTorch's."""
        return new_graph()

    def rows(self, call: GatherTensors) -> Tensor:
        """The memory that others' rows come to."""
        raise NotImplementedError

    def numbers_of(self, call: GatherTensors) -> Tensor:
        """The memory that others' numbers come to."""
        raise NotImplementedError

    def make_room(self, gemm: Launch) -> bool:
        """Let copies and a GEMM that waits for them not wait for each other; whether it leaves them no room."""
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
        """After all matmuls, join the copy stream: what the allocator may reuse is no longer read or written."""
        raise NotImplementedError

    def move(self, side: int, call: GatherTensors) -> None:
        """Enqueue all copies on `side`, for nobody who computes."""
        raise NotImplementedError


class GatherPush(GatherTransport):
    """Each rank pushes its shard, and its numbers, from where they are into the others' inboxes.

    `received` and `received_numbers` there are the others' only, by rank. The next call takes that place, so what is
    returned is copied from it (`keep`), on the reducer's stream; numbers that are only returned PyTorch joins
    (`joins_numbers`).

    Args:
        call, memory: As for `gather.GatherPlan`.
        copies: In how many copies the shard is sent to the first rank and to the last one.
    """

    reads_landed = True
    received: Tensor

    def __init__(self, call: GatherFacts, memory: GroupMemory, copies: int) -> None:
        super().__init__(call, memory)
        self.words = memory.landed.at(memory.rank)
        sizes, layout = self.sizes, call.layout
        others, row_numbers, number_bytes = memory.world - 1, call.row_numbers, sizes.number_bytes
        self.joins_numbers = row_numbers is not None and not call.gather_a_scale
        self.keeps = call.return_a_full
        self.wire_chunks = WireChunks(sizes.shard_bytes)
        self.slot_bytes = align(sizes.shard_bytes, 16)  # TMA's, where the GEMM reads: then it is the shard's own size
        self.scale_offset = align(others * self.slot_bytes)
        self.inbox = memory.require("box", self.scale_offset + others * number_bytes)
        self.received = self._received(call.a_shard.dtype, 0, self.slot_bytes, (layout.rows, layout.cols))
        if row_numbers is not None:
            shape = (sizes.number_count // row_numbers.shape[-1], row_numbers.shape[-1])
            self.received_numbers = self._received(row_numbers.dtype, self.scale_offset, number_bytes, shape)
        signature = memory.signature(call.wire, PUSH)
        pieces = self.wire_chunks.pieces(copies)
        channel, scales = memory.gather_channel, (self.scale_offset, number_bytes)
        moves = PushMoves(self.inbox.peers, self.slot_bytes, self.wire_chunks, pieces, DATA, 0, signature, *scales)
        self.play = memory.compiled(push_script(channel, moves, lambda dst, piece: []))
        self.clear = memory.compiled(clear_script(channel))
        self.all_came = {
            source: memory.compiled(arrived_script(channel, source, MAX_CHUNKS - 1)) for source in self.sources
        }
        self.came = {source: self._waits(source) for source in self.sources}
        self.gemm_clears = not self.keeps
        if self.keeps:
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
    def chunk_rows(self) -> int:
        return self.wire_chunks.chunk // self.sizes.row_bytes

    def new_graph(self) -> PlanGraph | None:
        return None if self.joins_numbers else new_graph()

    def rows(self, call: GatherTensors) -> Tensor:
        return self.received

    def make_room(self, gemm: Launch) -> bool:
        """Pushes, the others' too, come after what is in flight, whose kernels need room beside this GEMM."""
        return not leaves_room(gemm)

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
            self.keep(memory.reducer, call)
            driver.record_event(memory.reduced, memory.reducer)

    def push(self, side: int, call: GatherTensors) -> None:
        """Enqueue the pushes on `side`."""
        self.play(side, (0, call.shard.data_ptr(), 0 if call.row_numbers is None else call.row_numbers.data_ptr()))

    def await_all(self, stream: int) -> None:
        if driver.IN_ORDER:
            for wait in self.all_came.values():
                wait(stream, ())

    def _waits(self, source: int) -> list[Player | None]:
        """Waits for each block of a source's rows: none where an earlier one was for as much."""
        channel, players, known = self.memory.gather_channel, list[Player | None](), -1
        for block in range(self.outer):
            last = self.wire_chunks.covering((block + 1) * self.sizes.layout.inner * self.sizes.row_bytes)
            steps: list[Step] = arrived_script(channel, source, last)
            if block == self.outer - 1 and not self.keeps:  # nobody else reads the word
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
        if self.joins_numbers:
            assert call.row_numbers is not None
            assert call.all_row_numbers is not None
            torch.cat(self.ranges(call.row_numbers, self.received_numbers), out=call.all_row_numbers)
        driver.wait_event(stream, self.memory.end)
        if call.full is not None:
            driver.wait_event(stream, self.memory.reduced)
            self.clear(stream, ())

    def move(self, side: int, call: GatherTensors) -> None:
        self.push(side, call)
        self.keep(side, call)
        self.clear(side, ())

    # --- what is kept
    def _compile_keep(self, call: GatherFacts) -> None:
        memory, layout, sizes = self.memory, call.layout, self.sizes
        block = block_for(sizes.units, 4096, KEEPERS)
        programs = grid(-(-sizes.units // block), KEEPERS)
        own = sizes.as_units(aligned(call.a_shard))
        self.keep_sizes = [sizes.units, sizes.row_bytes // sizes.unit_bytes, layout.inner]
        examples = [
            own,
            sizes.as_units(self.new_full()),
            memory.done("gather"),
            *self.keep_sizes,
            memory.rank,
            memory.rank,
        ]
        constants = {
            "WORLD": memory.world,
            "CONTIGUOUS": layout.whole,
            "ALONG_LAST": layout.along_last,
            "ALIGN": sizes.together(sizes.units if layout.whole else self.keep_sizes[1]),
            "BLOCK": block,
            "PROGRAMS": programs,
        }
        options = {"num_stages": 1, "maxnreg": BESIDE_REGISTERS}
        self.keep_rows = prepare(keep_kernel, programs, examples, constants, BESIDE_WARPS, **options)
        self.counts = memory.done("gather").data_ptr()

    def keep(self, side: int, call: GatherTensors) -> None:
        """Enqueue on `side` the copies to the gathered A: of the own rows, and of each source's once they are there."""
        assert call.full is not None
        rank, whole = self.memory.rank, call.full.data_ptr()
        self.keep_rows(side, [call.shard.data_ptr(), whole, self.counts, *self.keep_sizes, rank, rank])
        for source in self.sources:
            self.all_came[source](side, ())
            self.keep_rows(side, [self.slot(source), whole, self.counts, *self.keep_sizes, source, rank])


#: (source, chunk) → steps of the copy stream once a chunk is in place
Arrived = Callable[[int, int], list[Step]]


def by_word(memory: GroupMemory) -> Arrived:
    """Chunks are told by a count for each source, which a GEMM polls."""
    return lambda source, chunk: [Write(memory.arrivals + source * 4, chunk + 1)]


def by_event(memory: GroupMemory) -> Arrived:
    """Chunks are told by an event each, which streams wait for."""
    return lambda source, chunk: [Record(memory.event(source, chunk))]


def untold(source: int, chunk: int) -> list[Step]:
    """Nobody asks before all copies are made."""
    return []


class GatherPull(GatherTransport):
    """A shard is staged in symmetric memory, and the others pull it to where the result is: all ranks keep that.

    Args:
        call, memory: As for `gather.GatherPlan`.
        chunks: Of a source's rows, for each of which there is a copy.
        arrived: Steps that tell the consumer that a chunk of a source is in place.
        stage_first: Before the matmuls start, because they would leave no room for that.
        stage_keeps: The kernel that stages the shard of a gather along dim 0 also writes it to the gathered A: one read
            and one launch less, but peers wait longer for the outbox.
        stage_programs: The most CTAs that stage; 0: as many as the GPU has room for.
    """

    def __init__(
        self,
        call: GatherFacts,
        memory: GroupMemory,
        chunks: Chunks,
        arrived: Arrived,
        *,
        stage_first: bool = False,
        stage_keeps: bool = False,
        stage_programs: int = 0,
    ) -> None:
        super().__init__(call, memory)
        self.words = memory.arrivals
        sizes = self.sizes
        self.chunks, self.stage_first, self.stage_keeps = chunks, stage_first, stage_keeps and self.outer == 1
        self.scale_offset = align(sizes.shard_bytes)
        self.outbox = memory.require("box", self.scale_offset + sizes.number_bytes)
        self._compile_stage(call, stage_programs)
        moves = PullMoves(
            outboxes=self.outbox.peers,
            row_bytes=sizes.row_bytes,
            outer=self.outer,
            inner=call.layout.inner,
            scale_offset=self.scale_offset,
            scale_bytes=sizes.number_bytes // self.outer,
            chunks=chunks,
            keep_own=not self.stage_keeps,
            keep_own_scales=call.along_shard is not None,
        )
        self.play = memory.compiled(pull_script(memory.rank, memory.world, moves, arrived))

    def _compile_stage(self, call: GatherFacts, stage_programs: int) -> None:
        memory, sizes = self.memory, self.sizes
        # 64 to 128 bytes a thread, which its registers hold. One CTA finds room beside a GEMM's on every SM.
        largest, ctas = (4096, 2) if self.stage_keeps else (8192, 1)
        most = stage_programs or ctas * driver.machine(call.device_index)[1]
        block = block_for(sizes.units, largest, most)
        programs = grid(-(-sizes.units // block), most)
        shard = kept = sizes.as_units(aligned(call.a_shard))
        if self.stage_keeps:
            full = sizes.as_units(self.new_full())
            kept = full[memory.rank * sizes.units :][: sizes.units]
        box, scale_box = sizes.as_units(self.outbox.memory), self.outbox.memory[self.scale_offset :].view(torch.float32)
        scale = memory.dummy if call.row_numbers is None else aligned(call.row_numbers)
        whole = sizes.units % sizes.together(0) == 0
        words = [memory.pads, memory.free.number, memory.landed.number, memory.kernel_bound, memory.status]
        tail: list[Any] = [
            box, scale_box, memory.done("stage"), memory.awaited, sizes.units, sizes.number_count, *words,
            memory.signature(call.wire, PULL), memory.rank,
        ]  # fmt: skip
        constants = {
            "WORLD": memory.world,
            "SCALE_TRAVELS": sizes.number_count > 0,
            "KEEPS": self.stage_keeps,
            "ALIGN": sizes.together(0) if whole or not self.stage_keeps else 1,  # one pointer may be aligned no further
            "BLOCK": block,
            "PROGRAMS": programs,
            "MAX_CHUNKS": MAX_CHUNKS,
        }
        examples, options = [shard, scale, kept, *tail], {"maxnreg": BESIDE_REGISTERS}
        self.stage = prepare(stage_kernel, programs, examples, constants, BESIDE_WARPS, **options)
        self.stage_tail = [each.data_ptr() if isinstance(each, Tensor) else each for each in tail]

    @property
    def chunk_rows(self) -> int:
        return self.chunks.rows[0][1]

    def rows(self, call: GatherTensors) -> Tensor:
        assert call.full is not None
        return call.full

    def numbers_of(self, call: GatherTensors) -> Tensor:
        assert call.all_row_numbers is not None
        return call.all_row_numbers

    def make_room(self, gemm: Launch) -> bool:
        """A GEMM that holds every SM waits for staged shards: without room beside it, staging has to come first."""
        self.stage_first = not fit_together(gemm, self.stage)
        return self.stage_first

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
        kept = call.full.data_ptr() + self.memory.rank * self.sizes.shard_bytes if self.stage_keeps else shard
        self.stage(
            stream, [shard, 0 if call.row_numbers is None else call.row_numbers.data_ptr(), kept, *self.stage_tail]
        )

    def pull(self, side: int, call: GatherTensors) -> None:
        """Enqueue the pulls on `side`, after the staging unless that has come first."""
        if not self.stage_first:
            self.stage_shard(side, call)
        assert call.full is not None
        own, whole = (0 if each is None else each.data_ptr() for each in (call.row_numbers, call.all_row_numbers))
        self.play(side, (0, call.shard.data_ptr(), own, call.full.data_ptr(), whole))

    def ranges(self, own: Tensor, come: Tensor) -> list[Tensor]:
        parts = list(ranges(come, self.outer * self.memory.world))
        parts[self.memory.rank :: self.memory.world] = ranges(own, self.outer)
        return parts

    def await_range(self, stream: int, source: int, block: int) -> None:
        """Where chunks are told by events (`by_event`)."""
        driver.wait_event(stream, self.memory.event(source, block))

    def finish(self, stream: int, call: GatherTensors) -> None:
        driver.wait_event(stream, self.memory.end)

    def move(self, side: int, call: GatherTensors) -> None:
        self.pull(side, call)
