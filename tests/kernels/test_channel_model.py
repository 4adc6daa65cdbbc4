"""Every interleaving of a small model of the copy engine's protocol of `asynctp_kernels.cuda`.

The model plays the scripts that `gather_script` and `push_script` build, and what `gather` and `scatter` put around
them: events, kernels, and the words that these wait for and clear. That the package asks the driver for the same, in
the same order, is tested (`asked_for`). A thread is a stream or one program of a kernel: a straight line of actions
that runs at any speed, but never starves. Every byte remembers the call and rank that made it. An access (copy, load,
store) takes two actions, a begin and an end, and another access may come in between; addresses are the same in all
calls, as when the allocator hands a freed block out again.

Findings:

    overwritten    a write begins where a read is under way, or a reader sees a later call
    torn           a read or a write begins where a write is under way
    stale          a reader sees an earlier call, or nothing
    misplaced      a reader sees its own call, but another rank or row
    set twice      a word is set that is set already
    left over      a word is still set when all calls are done
    stuck          some thread waits forever
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from asynctp_kernels.cuda.memory import MAX_CHUNKS, MAX_OWN, Words, existing_memory
from asynctp_kernels.cuda.script import (
    FULL,
    OWN,
    Await,
    Channel,
    Copy,
    GatherMoves,
    Place,
    Post,
    PushMoves,
    Record,
    Step,
    Wait,
    Write,
    chunk_script,
    gather_script,
    parts_script,
    push_script,
)
from asynctp_kernels.cuda.tiles import Chunks, cut, cut_own, in_blocks
from cuda_stubs import FP8, MAIN, Copied, Entry, Names
from stream_sessions import Op, Session, bulk, gather, perform, scatter
from streams import TILES, Shared, rank_of

ROWS = 2
START, RUNNING, END, REDUCED, FIRST_EVENT = range(5)  # event FIRST_EVENT + r: about rank r, see `of_block`
AREAS = ("full", "free", "arrivals", "progress", "begun", "staged", "landed")
EPOCHS = ("begun", "staged")  # words that only grow
_RANK, _AREA, _WORD = 10_000, 1_000, 4  # word addresses: of a rank, of an area within it, of a word within that

Tag = tuple[int, int, str, int]  # call, rank that made it, what, which byte of that
Bytes = tuple[tuple[int, Tag], ...]  # (address, tag)


@dataclass(frozen=True)
class Call:
    """One op. `chunks` is ignored but by the fused implementation, `scales` and what is kept by a scatter.

    keep_own: the gathered A is returned. keep_scales: so are the numbers, which then are no scales.
    A copy moves both chunks of what neither is the first nor the last peer's: there are such from 4 ranks on.
    way "bulk": no product, and the main stream waits for the result only after the next call.
    """

    op: str
    way: str = "fused"
    chunks: int = 1
    outer: int = 1
    scales: bool = False
    keep_own: bool = False
    keep_scales: bool = False

    @property
    def cut(self) -> Chunks:
        inner = ROWS // self.outer
        return cut(self.outer, inner, 1, self.chunks) if self.way == "fused" else in_blocks(self.outer, inner)

    @property
    def own_cut(self) -> Chunks:
        """Of a scatter's own rows."""
        return cut_own(self.cut, self.outer, ROWS // self.outer, 1, 1) if self.way == "fused" else self.cut

    @property
    def pushed(self) -> bool:
        """A gather that stages nothing."""
        return self.op == "gather" and self.way != "bulk" and not self.keep_own

    @property
    def stage_keeps(self) -> bool:
        """What stages the shard also puts it into the gathered A."""
        return self.way == "bulk" or (self.way == "decomposed" and self.keep_own and self.outer == 1)

    def __str__(self) -> str:
        extras = [name for name in ("scales", "keep_own", "keep_scales") if getattr(self, name)]
        return "-".join([self.op, self.way, str(self.chunks), *["outer"] * (self.outer > 1), *extras])


def of_block(rank: int, block: int) -> int:
    """The event about one range of a rank's rows."""
    return FIRST_EVENT + rank + block * 100


@dataclass(frozen=True)
class Touch:
    """An access by a kernel: what it must find, and what it stores."""

    reads: Bytes = ()
    writes: Bytes = ()


@dataclass(frozen=True)
class Count:
    """Add 1 to the word at `address`."""

    address: int


Program = tuple[Step | Touch | Count, ...]


@dataclass(frozen=True)
class Kernel:
    """Programs that run at the same time, then what the last of them does; then the stream goes on."""

    name: str
    programs: tuple[Program, ...]
    last: Program = ()


Item = tuple[str, Step | Touch | Kernel]  # what the host puts on which stream
Spoil = Callable[[int, list[Item]], list[Item]]  # rank, what it puts on its streams in one call


@dataclass(frozen=True)
class Case:
    """Calls that all ranks make in this order, and how a test breaks them.

    Attributes:
        programs: of each kernel.
        columns: bytes of a row, and column tiles of a scatter's GEMM.
        bounded: waits for other ranks may run out, and then set their word.
        absent: the ranks that do not come to the last call.
    """

    world: int
    calls: tuple[Call, ...]
    programs: int = 1
    columns: int = 1
    bounded: bool = False
    absent: tuple[int, ...] = ()
    spoil: Spoil = field(default=lambda rank, items: items)

    def __str__(self) -> str:
        return f"{self.world} ranks: {', '.join(map(str, self.calls))}; {self.programs} programs"


# --- what the host enqueues ------------------------------------------------------------------------------------
def area(address: int) -> str:
    """Which words `address` is one of."""
    return AREAS[address % _RANK // _AREA]


@dataclass(frozen=True)
class Rank:
    """One rank's calls, as `gather.py` and `scatter.py` put them on the streams."""

    case: Case
    rank: int

    @property
    def world(self) -> int:
        return self.case.world

    @property
    def width(self) -> int:
        return self.case.columns

    @property
    def part(self) -> int:
        """Bytes of a shard."""
        return ROWS * self.width

    def at(self, name: str, rank: int | None = None) -> int:
        """Address of a buffer. A gathered A and a staging never live at the same time: one `local` for both.

        Outbox and inbox are one too: `box`.
        """
        sizes = {"own": self.part, "own scale": 4 * ROWS, "out": self.part, "local": self.world * self.part}
        pushed = (self.world - 1) * (self.part + 4 * ROWS * any(call.scales for call in self.case.calls if call.pushed))
        sizes |= {"scales": self.world * 4 * ROWS, "box": max(self.part + 4 * ROWS, pushed)}
        if any(call.way == "bulk" for call in self.case.calls):  # two may be in flight, each with memory of its own
            bulk = {"own": self.part, "local": self.world * self.part, "out": self.part}
            sizes |= {f"{buffer} {turn}": size for turn in (0, 1) for buffer, size in bulk.items()}
        names = list(sizes)
        before = sum(sizes[other] for other in names[: names.index(name)])
        return (self.rank if rank is None else rank) * sum(sizes.values()) + before

    def of_call(self, number: int, buffer: str) -> int:
        """Address of a buffer that a bulk call has for itself."""
        bulk = self.case.calls[number].way == "bulk"
        return self.at(f"{buffer} {number % 2}" if bulk else buffer)

    @property
    def bases(self) -> tuple[int, ...]:
        return (0, *map(self.at, ("own", "local", "scales", "own scale")))

    def words(self, name: str) -> Words:
        return Words([rank * _RANK for rank in range(self.world)], AREAS.index(name) * _AREA)

    def arrival(self, source: int, chunk: int) -> int:
        return self.words("arrivals").at(self.rank, source * MAX_CHUNKS + chunk)

    def awaited(self, call: Call, source: int, chunk: int) -> int:
        """What the GEMM of a gather polls."""
        name = "landed" if call.pushed and not self.case.bounded else "arrivals"
        return self.words(name).at(self.rank, source * MAX_CHUNKS + chunk)

    def progress(self, dst: int, chunk: int) -> int:
        return self.words("progress").at(self.rank, dst * MAX_OWN + chunk)

    @property
    def cleared_chunks(self) -> range:
        """Chunks whose words a kernel clears: really `MAX_CHUNKS`, here those that some call uses."""
        return range(max(len(call.cut) for call in self.case.calls))

    @property
    def cleared_own(self) -> range:
        """Likewise, of the own rows."""
        return range(max(len(call.own_cut) for call in self.case.calls))

    def ring(self, first: int) -> list[int]:
        """All ranks, from own rank + `first` on."""
        return [(self.rank + step) % self.world for step in range(first, self.world + first)]

    def enqueue(self, number: int, call: Call) -> list[Item]:
        """Everything of one call, in the order in which the host does it."""
        if call.way == "bulk":
            items = self._bulk_gather(number, call) if call.op == "gather" else self._bulk_scatter(number, call)
        else:
            gather = self._gather_pushed if call.pushed else self._gather
            items = gather(number, call) if call.op == "gather" else self._scatter(number, call)
        landed = [number - 1] * (number > 0) + [number] * (number + 1 == len(self.case.calls))
        items += [item for other in landed if self.case.calls[other].way == "bulk" for item in self._land(other)]
        return self.case.spoil(self.rank, items)

    # --- in flight
    @property
    def flights(self) -> range:
        """The events of results in flight, in turn."""
        first = FIRST_EVENT + self.world
        return range(first, first + 2)

    def _bulk_gather(self, number: int, call: Call) -> list[Item]:
        script = gather_script(self.rank, self.world, self._gather_moves(call), lambda source, chunk: [])
        bases = (0, self.of_call(number, "own"), self.of_call(number, "local"), 0)
        return [
            ("main", Touch(writes=self._own(number, call))),
            ("main", Record(START)),
            ("copy", Await(START)),
            ("copy", self._stage(number, call)),
            *[("copy", _placed(step, bases)) for step in script],
            *self._flown(number),
        ]

    def _bulk_scatter(self, number: int, call: Call) -> list[Item]:
        channel, moves = self._channel(), self._scatter_moves(call)
        script = push_script(channel, moves, lambda dst, chunk: [], MAX_CHUNKS)
        bases = (0, 0, self.of_call(number, "local"), 0)
        parts = [self._staged(number, dst, range(self.part)) for dst in range(self.world)]
        return [
            ("main", Touch(writes=sum(parts, ()))),
            ("main", Record(START)),
            ("copy", Await(START)),
            ("copy", Record(RUNNING)),
            *[("copy", _placed(step, bases)) for step in script],
            ("copy", Record(END)),
            ("reduce", Await(RUNNING)),
            *[("reduce", Await(END))] * self.case.bounded,
            *[("reduce", step) for step in parts_script(channel, call.cut, MAX_CHUNKS)],
            ("reduce", self._reduction(number, call)),
            ("reduce", Record(REDUCED)),
            ("copy", Await(REDUCED)),
            *self._flown(number),
        ]

    def _flown(self, number: int) -> list[Item]:
        """The result is complete."""
        done = self.flights[number % 2]
        return [("copy", Record(done)), ("reduce", Await(done))]

    def _land(self, number: int) -> list[Item]:
        """The result of a bulk call is waited for, and read."""
        call, reads = self.case.calls[number], self._sum(number, range(self.part))
        if call.op == "gather":
            reads = sum((self._gathered(number, call, source) for source in range(self.world)), ())
        return [("main", Await(self.flights[number % 2])), ("main", Touch(reads=reads))]

    # --- gather
    def _gather(self, number: int, call: Call) -> list[Item]:
        script = gather_script(self.rank, self.world, self._gather_moves(call), self._arrived(call))
        consumer = self._gather_fused if call.way == "fused" else self._gather_decomposed
        result = Touch(reads=sum((self._gathered(number, call, source) for source in range(self.world)), ()))
        stage, first = self._stage(number, call), call.way == "decomposed"
        flying = first and number > 0 and self.case.calls[number - 1].way == "bulk"
        return [
            ("main", Touch(writes=self._own(number, call))),
            *[("main", Await(self.flights[(number - 1) % 2]))] * flying,
            *[("main", stage)] * first,
            ("main", Record(START)),
            ("copy", Await(START)),
            *[("copy", stage)] * (not first),
            *[("copy", step) for step in script],
            ("copy", Record(END)),
            *consumer(number, call),
            ("main", Await(END)),
            *[("main", result)] * call.keep_own,
        ]

    def _stage(self, number: int, call: Call) -> Kernel:
        """`stage_kernel`: each program copies its bytes of the shard (`stage_keeps`: twice), the first the scales."""
        epoch = sum(call.op == "gather" and not call.pushed for call in self.case.calls[: number + 1])
        begun, staged, peers = self.words("begun"), self.words("staged"), self.ring(1)[:-1]
        programs: list[Program] = []
        for program in range(self.case.programs):
            posts = [Write(begun.at(peer, self.rank), epoch) for peer in peers] if program == 0 else []
            waits = [Wait(begun.at(self.rank, peer), epoch, peer) for peer in peers]
            own = self._own(number, call)
            mine = (*own[: self.part][program :: self.case.programs], *(own[self.part :] if program == 0 else ()))
            places = [self.at("box")]
            places += [self.of_call(number, "local") + self.rank * self.part] * call.stage_keeps
            start = self.of_call(number, "own")
            copy = Touch(mine, tuple((place + address - start, tag) for place in places for address, tag in mine))
            programs.append((*posts, *waits, copy))
        posts = [Write(staged.at(peer, self.rank), epoch) for peer in peers]
        waits = [Wait(staged.at(self.rank, peer), epoch, peer) for peer in peers]
        return Kernel("stage", tuple(programs), (*posts, *waits))

    def _gather_moves(self, call: Call) -> GatherMoves:
        return GatherMoves(
            outboxes=[self.at("box", rank) for rank in range(self.world)],
            row_bytes=self.width,
            outer=call.outer,
            inner=ROWS // call.outer,
            scale_offset=self.part,
            scale_bytes=4 * (ROWS // call.outer) if call.scales else 0,
            chunks=call.cut,
            keep_own=call.keep_own and not call.stage_keeps,
            keep_own_scales=call.keep_scales,
        )

    def _arrived(self, call: Call) -> Callable[[int, int], Sequence[Step]]:
        if call.way == "fused":
            return lambda source, chunk: [Write(self.arrival(source, chunk), 1)]
        return lambda source, chunk: [Record(of_block(source, chunk))]

    def _own(self, number: int, call: Call, rows: Sequence[int] = range(ROWS)) -> Bytes:
        """Rows of the own shard and their scales."""
        start = self.of_call(number, "own")
        found = [(start + i, (number, self.rank, "a", i)) for row in rows for i in self._span(row, self.width)]
        scales = [(self.at("own scale") + i, (number, self.rank, "scale", i)) for row in rows for i in self._span(row)]
        return (*found, *(scales if call.scales else ()))

    def _gathered(self, number: int, call: Call, source: int, rows: Sequence[int] = range(ROWS)) -> Bytes:
        """Rows of `source`'s shard and their scales in the gathered A; own scales are in it if they are kept."""
        inner, found = ROWS // call.outer, []
        for row in rows:
            place = (row // inner * self.world + source) * inner + row % inner
            pairs = zip(self._span(place, self.width), self._span(row, self.width), strict=True)
            found += [(self.of_call(number, "local") + to, (number, source, "a", i)) for to, i in pairs]
            if call.scales and (source != self.rank or call.keep_scales):
                pairs = zip(self._span(place), self._span(row), strict=True)
                found += [(self.at("scales") + to, (number, source, "scale", i)) for to, i in pairs]
        return tuple(found)

    def _span(self, index: int, size: int = 4) -> range:
        return range(index * size, (index + 1) * size)

    def _gather_fused(self, number: int, call: Call) -> list[Item]:
        """`gemm_kernel`."""
        programs = [self._gather_program(number, call, program) for program in range(self.case.programs)]
        words = [self.awaited(call, source, chunk) for source in self.ring(1)[:-1] for chunk in self.cleared_chunks]
        return [("main", Kernel("gemm", tuple(programs), tuple(Write(word, 0) for word in words)))]

    def _gather_program(self, number: int, call: Call, program: int) -> Program:
        actions: list[Wait | Touch] = []
        known = None
        for tile in range(program, ROWS * self.world, self.case.programs):
            source, row = (self.rank + tile // ROWS) % self.world, tile % ROWS
            if source == self.rank:
                actions.append(Touch(self._own(number, call, [row])))
            else:
                word = self.awaited(call, source, row // call.cut.tiles)
                actions += [Wait(word)] * (word != known)
                known = word
                arrived = self._pushed if call.pushed else self._gathered
                actions.append(Touch(arrived(number, call, source, [row])))
        return tuple(actions)

    def _gather_decomposed(self, number: int, call: Call) -> list[Item]:
        """One product per range of a source's rows."""
        items: list[Item] = [("main", Touch(self._own(number, call)))]
        for source in self.ring(0)[1:]:
            for block, rows in enumerate(call.cut.rows):
                items.append(("main", Await(of_block(source, block))))
                items.append(("main", Touch(self._gathered(number, call, source, range(*rows)))))
        return items

    def _gather_pushed(self, number: int, call: Call) -> list[Item]:
        """Nothing is staged; products of the own shard and of what has come."""
        channel, moves, own = self._landing(), self._pushed_moves(call), self._own(number, call)
        script = push_script(channel, moves, lambda dst, chunk: [], MAX_CHUNKS)
        taken = self._taken(call) if call.way == "fused" and self.case.bounded else []
        consumer = self._gather_fused if call.way == "fused" else self._pushed_decomposed
        all_scales = self._all_scales(number)
        return [
            ("main", Touch(writes=own)),
            ("main", Record(START)),
            ("copy", Await(START)),
            *[("copy", step) for step in (*script, *taken)],
            ("copy", Record(END)),
            *consumer(number, call),
            *[("main", Touch(self._pushed_scales(number, call), all_scales))] * call.keep_scales,
            ("main", Await(END)),
            *[("main", Touch(all_scales))] * call.keep_scales,
        ]

    def _pushed_decomposed(self, number: int, call: Call) -> list[Item]:
        """One product per range again."""
        items: list[Item] = [("main", Touch(self._own(number, call)))]
        items += [("main", Await(END))] * self.case.bounded
        for source in self.ring(0)[1:]:
            for block, rows in enumerate(call.cut.rows):
                items += [("main", step) for step in chunk_script(self._landing(), source, block, MAX_CHUNKS)]
                items.append(("main", Touch(self._pushed(number, call, source, range(*rows)))))
        return items

    def _taken(self, call: Call) -> list[Step]:
        """The copy stream tells the GEMM what has come."""
        steps: list[Step] = []
        for source in self.ring(0)[1:]:
            for chunk in range(len(call.cut)):
                steps += chunk_script(self._landing(), source, chunk, MAX_CHUNKS)
                steps.append(Write(self.arrival(source, chunk), 1))
        return steps

    def _landing(self) -> Channel:
        return Channel(self.rank, self.world, self.words("landed").at, self.words("free").at)

    def _pushed_moves(self, call: Call) -> PushMoves:
        boxes, scales = [self.at("box", rank) for rank in range(self.world)], 4 * ROWS * call.scales
        return PushMoves(boxes, self.part, self.width, call.cut, OWN, 0, (self.world - 1) * self.part, scales)

    def _pushed(self, number: int, call: Call, source: int, rows: Sequence[int]) -> Bytes:
        """Rows of `source`'s shard and their scales in the own inbox."""
        start, scale = self._slots_of(source)
        found = [(start + i, (number, source, "a", i)) for row in rows for i in self._span(row, self.width)]
        scales = [(scale + i, (number, source, "scale", i)) for row in rows for i in self._span(row)]
        return (*found, *(scales if call.scales and not call.keep_scales else ()))

    def _slots_of(self, source: int) -> tuple[int, int]:
        """Where in the own inbox its rows are, and their scales."""
        slot, box = source - (source > self.rank), self.at("box")
        return box + slot * self.part, box + (self.world - 1) * self.part + slot * 4 * ROWS

    def _pushed_scales(self, number: int, call: Call) -> Bytes:
        """All ranks' scales, where they are before they are put together."""
        found: list[tuple[int, Tag]] = []
        for source in range(self.world):
            at = self.at("own scale") if source == self.rank else self._slots_of(source)[1]
            found += [(at + i, (number, source, "scale", i)) for i in range(4 * ROWS)]
        return tuple(found)

    def _all_scales(self, number: int) -> Bytes:
        """And behind that."""
        pairs = product(range(self.world), range(4 * ROWS))
        return tuple(
            (self.at("scales") + place, (number, source, "scale", i)) for place, (source, i) in enumerate(pairs)
        )

    # --- scatter
    def _scatter(self, number: int, call: Call) -> list[Item]:
        script = push_script(self._channel(), self._scatter_moves(call), self._ready(call), MAX_CHUNKS)
        producer = self._scatter_fused if call.way == "fused" else self._scatter_decomposed
        return [
            ("main", Record(START)),
            ("copy", Await(START)),
            *producer(number, call),
            *[("copy", step) for step in script],
            ("copy", Record(END)),
            ("reduce", Await(RUNNING if call.way == "fused" else of_block(self.rank, call.outer - 1))),
            *[("reduce", step) for step in self._parts(call)],
            ("reduce", self._reduction(number, call)),
            ("reduce", Record(REDUCED)),
            ("main", Await(END)),
            ("main", Await(REDUCED)),
            ("main", Touch(reads=self._sum(number, range(self.part)))),
        ]

    def _parts(self, call: Call) -> list[Step]:
        """Where waits are bounded, the stream waits before the reduction does, which knows no bound."""
        return [Await(END), *parts_script(self._channel(), call.cut, MAX_CHUNKS)] if self.case.bounded else []

    def _channel(self) -> Channel:
        return Channel(self.rank, self.world, self.words("full").at, self.words("free").at)

    def _scatter_moves(self, call: Call) -> PushMoves:
        boxes = [self.at("box", rank) for rank in range(self.world)]
        return PushMoves(boxes, self.part, self.width, call.cut, FULL, self.part)

    def _ready(self, call: Call) -> Callable[[int, int], Sequence[Step]]:
        if call.way == "decomposed":
            return lambda dst, chunk: [Await(of_block(dst, chunk))]
        tiles = [count * self.case.columns for count in call.cut.row_tiles]
        running = {(self.ring(1)[0], 0): [Record(RUNNING)]}

        def ready(dst: int, chunk: int) -> list[Step]:
            word = self.progress(dst, chunk)
            return [Wait(word, tiles[chunk]), Write(word, 0), *running.get((dst, chunk), [])]

        return ready

    def _staged(self, number: int, dst: int, offsets: Sequence[int]) -> Bytes:
        """Bytes of what goes to `dst`."""
        start = self.of_call(number, "local") + dst * self.part
        return tuple((start + i, (number, self.rank, "part", dst * self.part + i)) for i in offsets)

    def _received(self, number: int, source: int, offsets: Sequence[int]) -> Bytes:
        start = self.at("box") + (source - (source > self.rank)) * self.part
        return tuple((start + i, (number, source, "part", self.rank * self.part + i)) for i in offsets)

    def _sum(self, number: int, offsets: Sequence[int]) -> Bytes:
        return tuple((self.of_call(number, "out") + i, (number, self.rank, "sum", i)) for i in offsets)

    def _scatter_fused(self, number: int, call: Call) -> list[Item]:
        """`gemm_kernel`."""
        programs = [self._scatter_program(number, call, program) for program in range(self.case.programs)]
        return [("main", Kernel("gemm", tuple(programs)))]

    def _scatter_program(self, number: int, call: Call, program: int) -> Program:
        actions: list[Touch | Count] = []
        for tile in range(program, self.part * self.world, self.case.programs):
            dst = (self.rank + 1 + tile // self.part) % self.world
            column, row = divmod(tile % self.part, ROWS)
            actions.append(Touch(writes=self._staged(number, dst, [row * self.width + column])))
            chunks = call.own_cut if dst == self.rank else call.cut
            actions.append(Count(self.progress(dst, row // chunks.tiles)))
        return tuple(actions)

    def _scatter_decomposed(self, number: int, call: Call) -> list[Item]:
        """One product per range of a destination's rows."""
        items: list[Item] = []
        for dst in self.ring(1):
            for block, (first, end) in enumerate(call.cut.rows):
                offsets = range(first * self.width, end * self.width)
                items.append(("main", Touch(writes=self._staged(number, dst, offsets))))
                items.append(("main", Record(of_block(dst, block))))
        return items

    def _reduction(self, number: int, call: Call) -> Kernel:
        """`reduce_kernel`: each program takes its bytes of each chunk."""
        full, sources = self.words("full"), self.ring(1)[:-1]
        programs: list[Program] = []
        for program in range(self.case.programs):
            actions: list[Wait | Touch] = []
            here = None
            for chunk, (first, end) in enumerate(call.own_cut.rows):
                come = first // call.cut.rows[0][1]
                arrived = [full.at(self.rank, source * MAX_CHUNKS + come) for source in sorted(sources)]
                actions += [Wait(word) for word in arrived if come != here]
                here = come
                tiles = call.own_cut.row_tiles[chunk] * self.case.columns if call.way == "fused" else 0
                actions += [Wait(self.progress(self.rank, chunk), tiles)] * (call.way != "bulk")
                mine = range(first * self.width, end * self.width)[program :: self.case.programs]
                reads = sum((self._received(number, source, mine) for source in sources), ())
                actions.append(Touch((*self._staged(number, self.rank, mine), *reads), self._sum(number, mine)))
            programs.append(tuple(actions))
        words = [self.progress(self.rank, chunk) for chunk in self.cleared_own if call.way != "bulk"]
        words += [
            full.at(self.rank, source * MAX_CHUNKS + chunk) for source in sources for chunk in self.cleared_chunks
        ]
        return Kernel("reduction", tuple(programs), tuple(Write(word, 0) for word in words))


def _placed(step: Step, bases: Sequence[int]) -> Step:
    """A step with addresses instead of places behind `bases`."""
    if not isinstance(step, Copy):
        return step
    dst, src = (Place(0, bases[place.base] + place.offset) for place in (step.dst, step.src))
    return replace(step, dst=dst, src=src)


# --- the model -------------------------------------------------------------------------------------------------
State = tuple[tuple[int, ...], bytes, bytes]  # next action of each thread, words, tag number of each byte


@dataclass
class Action:
    """What a thread does next.

    Attributes:
        kind: "after" (thread, count): until that thread has done so many actions; "wait" (word, value); "bounded"
            (word, value), a wait that may run out, and then sets the word; "set" (word, value); "add" (word, 1);
            "begin" and "end" of an access; "done", the last of each thread.
        reads, writes: bits of the bytes and words that it looks at or changes; both ends of an access have all of them.
        source, target: indices of bytes.
        expected: what a reader must find. values: what a writer stores, None for a copy.
    """

    name: str
    kind: str
    number: int = 0
    value: int = 0
    reads: int = 0
    writes: int = 0
    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    expected: bytes = b""
    values: bytes | None = None

    def conflicts(self, other: Action) -> bool:
        """Whether the order of the two can matter."""
        if self.kind == other.kind == "add":
            return False
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


class Model:
    """All threads of all ranks, and how a state goes over into the next."""

    def __init__(self, case: Case) -> None:
        self.bounded = case.bounded
        self.threads: list[list[Action]] = []
        self.owners: list[str] = []
        self.tags: list[Tag] = [(-1, -1, "nothing", 0)]
        self._thread_numbers: dict[tuple[int, str], int] = {}
        self._tag_numbers: dict[Tag, int] = {}
        self._words: dict[int, int] = {}
        for rank in range(case.world):
            self._load(Rank(case, rank))
        size = Rank(case, case.world).at("own")
        self.start: State = ((0,) * len(self.threads), bytes(len(self._words)), bytes(size))
        for action in (action for thread in self.threads for action in thread):
            if action.kind in ("wait", "bounded", "set", "add"):
                bit = 1 << size + action.number
                action.reads, action.writes = (bit, 0) if action.kind == "wait" else (0, bit)
        for thread in self.threads:
            thread.append(Action("done", "done"))

    # --- from items to threads
    def _load(self, rank: Rank) -> None:
        records: dict[int, tuple[int, int]] = {}  # the last record of each event: the host binds waits to it
        for number, call in enumerate(rank.case.calls):
            last = number + 1 == len(rank.case.calls)
            for stream, item in () if last and rank.rank in rank.case.absent else rank.enqueue(number, call):
                thread = self._thread(rank.rank, stream)
                if isinstance(item, Record):
                    records[item.event] = thread, len(self.threads[thread])
                elif isinstance(item, Await):
                    self._after(thread, *records.get(item.event, (thread, 0)))
                elif isinstance(item, Kernel):
                    self._launch(rank, thread, item)
                else:
                    self._append(thread, item, rank.bases)

    def _thread(self, rank: int, name: str) -> int:
        found = self._thread_numbers.setdefault((rank, name), len(self.threads))
        if found == len(self.threads):
            self.threads.append([])
            self.owners.append(f"rank {rank} {name}")
        return found

    def _after(self, thread: int, other: int, count: int) -> None:
        self.threads[thread].append(Action(f"after {self.owners[other]}", "after", other, count))

    def _launch(self, rank: Rank, stream: int, kernel: Kernel) -> None:
        begin = len(self.threads[stream])
        counts: dict[int, int] = {}
        for index, program in enumerate((*kernel.programs, kernel.last)):
            last = index == len(kernel.programs)
            thread = self._thread(rank.rank, f"{kernel.name} {'last' if last else index}")
            for other, count in counts.items() if last else [(stream, begin)]:
                self._after(thread, other, count)
            for item in program:
                self._append(thread, item, rank.bases)
            counts[thread] = len(self.threads[thread])
        self._after(stream, *counts.popitem())

    def _append(self, thread: int, item: object, bases: Sequence[int]) -> None:
        actions = self.threads[thread]
        if isinstance(item, Wait):
            kind = "bounded" if self.bounded and item.peer is not None else "wait"
            actions.append(Action(f"wait {area(item.address)}", kind, self._word(item.address), item.value))
        elif isinstance(item, Write | Post):
            value = item.value if isinstance(item, Write) else 1
            actions.append(Action(f"{area(item.address)} = {value}", "set", self._word(item.address), value))
        elif isinstance(item, Count):
            actions.append(Action(f"{area(item.address)} + 1", "add", self._word(item.address), 1))
        elif isinstance(item, Copy):
            source = _bytes(item, item.src, item.src_pitch, bases)
            actions += _access("copy", source, _bytes(item, item.dst, item.dst_pitch, bases))
        elif isinstance(item, Touch) and (item.reads or item.writes):
            expected, values = self._numbers(item.reads), self._numbers(item.writes)
            actions += _access("access", _addresses(item.reads), _addresses(item.writes), expected, values)

    def _word(self, address: int) -> int:
        return self._words.setdefault(address, len(self._words))

    def _numbers(self, tagged: Bytes) -> bytes:
        return bytes(self._tag_number(tag) for _, tag in tagged)

    def _tag_number(self, tag: Tag) -> int:
        found = self._tag_numbers.setdefault(tag, len(self.tags))
        if found == len(self.tags):
            self.tags.append(tag)
        return found

    # --- from state to state
    def moves(self, state: State, reduced: bool) -> list[int]:
        """The threads to advance: all that can, or one that nobody can disturb.

        The reduction: if no action that the other threads can still do while this one waits conflicts with its next
        action, then that action commutes with all of them, and each order of events is equivalent (every action sees
        the same and does the same) to one in which it comes first. Threads are straight lines, so no action is put
        off forever. `_undisturbed` may think that others can do more than they can, never less.
        """
        pcs, words, _ = state
        able = [
            thread
            for thread, (actions, pc) in enumerate(zip(self.threads, pcs, strict=True))
            if _can(actions[pc], pcs, words)
        ]
        if reduced:
            for thread in able:
                if self._undisturbed(state, thread):
                    return [thread]
        return able

    def _undisturbed(self, state: State, thread: int) -> bool:
        """Whether nothing that others can do before `thread` goes on conflicts with its next action."""
        pcs, words, _ = state
        mine = self.threads[thread][pcs[thread]]
        if not mine.reads | mine.writes:
            return True
        reach, highest, moved = list(pcs), list(words), True
        while moved:
            moved = False
            for other, actions in enumerate(self.threads):
                while other != thread and _can(theirs := actions[reach[other]], reach, highest):
                    if mine.conflicts(theirs):
                        return False
                    if theirs.kind in ("set", "add"):
                        highest[theirs.number] += theirs.value
                    reach[other] += 1
                    moved = True
        return True

    def advance(self, state: State, thread: int) -> tuple[State, list[str]]:
        """The state after the next action of `thread`, and what is wrong with it. An error changes nothing else."""
        pcs, words, memory = state
        action = self.threads[thread][pcs[thread]]
        findings: list[str] = []
        if action.kind == "set":
            if action.value and words[action.number] >= action.value:
                findings.append("set twice")
            words = _with(words, action.number, action.value)
        elif action.kind == "bounded":
            words = _with(words, action.number, max(words[action.number], action.value))
        elif action.kind == "add":
            words = _with(words, action.number, words[action.number] + 1)
        elif action.kind == "begin":
            findings += self._clashes(action, pcs)
            found = bytes([memory[i] for i in action.source])
            if action.expected and found != action.expected:
                findings += map(self._judge, found, action.expected)
            changed = bytearray(memory)
            for i, value in zip(action.target, found if action.values is None else action.values, strict=True):
                changed[i] = value
            memory = bytes(changed)
        pcs = (*pcs[:thread], pcs[thread] + 1, *pcs[thread + 1 :])
        return (pcs, words, memory), [finding for finding in findings if finding]

    def _clashes(self, action: Action, pcs: tuple[int, ...]) -> Iterator[str]:
        """What is wrong with beginning `action` now, where other threads are in the middle of an access."""
        for actions, pc in zip(self.threads, pcs, strict=True):
            under_way = actions[pc]
            if under_way.kind == "end":
                if under_way.writes & (action.reads | action.writes):
                    yield "torn"
                if under_way.reads & action.writes:
                    yield "overwritten"

    def _judge(self, found: int, expected: int) -> str:
        """What is wrong with data of tag `found` where `expected` should be."""
        if found == expected:
            return ""
        calls = self.tags[found][0], self.tags[expected][0]
        return "misplaced" if calls[0] == calls[1] else "stale" if calls[0] < calls[1] else "overwritten"

    def ending(self, state: State) -> list[str]:
        """What is wrong with a state where nothing can go on."""
        pcs, words, _ = state
        if any(actions[pc].kind != "done" for pc, actions in zip(pcs, self.threads, strict=True)):
            return ["stuck"]
        left = [area(address) for address, word in zip(self._words, words, strict=True) if word]
        return ["left over"] if set(left) - set(EPOCHS) else []

    def describe(self, thread: int, state: State) -> str:
        return f"{self.owners[thread]}: {self.threads[thread][state[0][thread]].name}"


def _can(action: Action, pcs: Sequence[int], words: Sequence[int]) -> bool:
    """Whether a thread can take `action` next, with the threads at `pcs`."""
    kind = action.kind
    if kind == "after":
        return pcs[action.number] >= action.value
    if kind == "wait":
        return words[action.number] >= action.value
    return kind != "done"


def _bytes(copy: Copy, place: Place, pitch: int, bases: Sequence[int]) -> tuple[int, ...]:
    start = bases[place.base] + place.offset
    return tuple(start + row * pitch + i for row in range(copy.height) for i in range(copy.width))


def _addresses(tagged: Bytes) -> tuple[int, ...]:
    return tuple(address for address, _ in tagged)


def _access(
    name: str, source: tuple[int, ...], target: tuple[int, ...], expected: bytes = b"", values: bytes | None = None
) -> list[Action]:
    reads, writes = sum(1 << i for i in source), sum(1 << i for i in target)
    begin = Action(f"{name} begins", "begin", 0, 0, reads, writes, source, target, expected, values)
    return [begin, replace(begin, name=f"{name} ends", kind="end")]


def _with(values: bytes, index: int, value: int) -> bytes:
    return values[:index] + bytes((value,)) + values[index + 1 :]


@dataclass
class Search:
    """What a search saw: how many states, and for each kind of finding how it came about."""

    states: int
    findings: dict[str, list[str]]


def explore(case: Case, reduced: bool = True, all_kinds: bool = False) -> Search:
    """Visit all reachable states (or enough of them: see `Model.moves`), or until something is wrong.

    With `all_kinds` the search goes on behind a finding, as if nothing had happened.
    """
    model = Model(case)
    came_from: dict[State, tuple[State, int] | None] = {model.start: None}
    stack = [model.start]
    findings: dict[str, list[str]] = {}
    while stack and (all_kinds or not findings):
        state = stack.pop()
        threads = model.moves(state, reduced)
        for kind in () if threads else model.ending(state):
            findings.setdefault(kind, _history(model, came_from, state))
        for thread in threads:
            successor, kinds = model.advance(state, thread)
            for kind in kinds:
                if kind not in findings:
                    findings[kind] = [*_history(model, came_from, state), model.describe(thread, state)]
            if successor not in came_from:
                came_from[successor] = state, thread
                stack.append(successor)
    return Search(len(came_from), findings)


def _history(model: Model, came_from: dict[State, tuple[State, int] | None], state: State) -> list[str]:
    """The actions that led to `state`."""
    actions: list[str] = []
    while (step := came_from[state]) is not None:
        state, thread = step
        actions.append(model.describe(thread, state))
    return actions[::-1]


# --- it is what the package does ---------------------------------------------------------------------------------
KINDS = (
    Call("gather", keep_own=True),
    Call("gather", chunks=2),
    Call("gather", "decomposed", keep_own=True),
    Call("gather", "decomposed"),
    Call("scatter"),
    Call("scatter", chunks=2),
    Call("scatter", "decomposed"),
)
BULK = (Call("gather", "bulk"), Call("scatter", "bulk"))
FEW_ACTIONS = [call for call in KINDS if call != Call("scatter", chunks=2)]
OUTER = (
    Call("gather", chunks=2, keep_own=True),
    Call("gather", scales=True),
    Call("gather", chunks=2, outer=2, scales=True),
    Call("gather", scales=True, keep_scales=True),
    Call("gather", outer=2, scales=True, keep_own=True),
    Call("gather", chunks=2, outer=2, scales=True, keep_own=True, keep_scales=True),
    Call("gather", "decomposed", outer=2, scales=True, keep_own=True),
    Call("gather", "decomposed", outer=2, scales=True),
    Call("gather", "decomposed", scales=True, keep_scales=True),
    Call("scatter", chunks=2, outer=2),
    Call("scatter", "decomposed", outer=2),
)
EVENTS = ("start", "running", "end", "reduced")
KERNELS = {"stage": "stage_kernel", "gemm": "gemm_kernel", "reduction": "reduce_kernel"}


def op_of(call: Call, world: int) -> Op:
    """The same call of an op, with a tile of rows for each row here."""
    size, dim = ROWS * TILES.block_m, int(call.outer > 1)
    if call.way == "bulk":
        return bulk(call.op, later=1)
    if call.op == "scatter":
        return scatter(
            call.way,
            n=TILES.block_n,
            rows=(call.outer, world * size // call.outer) if dim else (world * size,),
            dim=dim,
        )
    scaled = {"dtype": FP8, "scales": "row"} if call.scales else {}
    numbers = {"travels": not call.keep_scales, "along": call.keep_scales} if call.scales else {}
    shard = (call.outer, size // call.outer) if dim else (size,)
    return gather(call.way, shard=shard, dim=dim, full=call.keep_own, **scaled, **numbers)


def asked_for(calls: Sequence[Call], rank: int, world: int) -> list[tuple[str, str]]:
    """What the package puts on which stream, but for the ends of calls: these order calls on several streams."""
    session = Session(world, tuple(op_of(call, world) for call in calls), rounds=1)
    with rank_of(rank, world, Shared(), calls[0].chunks) as here:
        perform(session, here)
        memory = existing_memory(here.groups[0])
        assert memory is not None
        names = Names(memory, {})
        streams = {MAIN: "main", memory.stream: "copy", memory.reducer: "reduce"}
        others = {memory.last, memory.flown}
        log = [entry for entry in here.log if getattr(entry, "event", None) not in others]
        return [(streams[entry.stream], _said(entry, names)) for entry in log]


def _said(entry: Entry, names: Names) -> str:
    return "copy" if isinstance(entry, Copied) else names.entry(entry)


def modelled(calls: Sequence[Call], rank: int, world: int) -> list[tuple[str, str]]:
    """The same of the model. What products and the program do to memory is not asked of the driver."""
    one = Rank(Case(world, tuple(calls)), rank)
    items = [item for number, call in enumerate(calls) for item in one.enqueue(number, call)]
    return [(stream, _said_here(item, one)) for stream, item in items if not isinstance(item, Touch)]


def _said_here(item: object, rank: Rank) -> str:
    if isinstance(item, Copy):
        return "copy"
    if isinstance(item, Kernel):
        return f"launch {KERNELS[item.name]}"
    if isinstance(item, Record | Await):
        return f"{type(item).__name__.lower()} {_event(item.event, rank)}"
    assert isinstance(item, Wait | Write | Post)
    word, index = area(item.address), item.address % _AREA // _WORD
    row, column = divmod(index, MAX_OWN if word == "progress" else MAX_CHUNKS)
    place = f"[{index}]" if word == "free" else f"[{row}, {column}]"
    of = f" of {item.address // _RANK} " if word in ("free", "full", "landed") else ""
    if isinstance(item, Wait):
        return f"wait {word}{of}{place} >= {item.value}"
    return f"write {word}{of}{place} = {item.value if isinstance(item, Write) else 1}"


def _event(event: int, rank: Rank) -> str:
    if event < FIRST_EVENT:
        return EVENTS[event]
    if event in rank.flights:
        return "flight"
    block, source = divmod(event - FIRST_EVENT, 100)
    return f"event[{source * MAX_CHUNKS + block}]"


@pytest.mark.parametrize("call", [*KINDS, *OUTER], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_model_asks_for_what_the_package_asks_for(call: Call, world: int) -> None:
    for rank in range(world):
        assert modelled([call], rank, world) == asked_for([call], rank, world)


@pytest.mark.parametrize("bulk_call", BULK, ids=str)
def test_so_it_does_beside_results_in_flight(bulk_call: Call) -> None:
    for other in (*BULK, *KINDS):
        for calls in ((bulk_call, replace(other, chunks=1)), (replace(other, chunks=1), bulk_call)):
            assert modelled(calls, 1, 3) == asked_for(calls, 1, 3)


# --- the protocol holds ----------------------------------------------------------------------------------------
PARTICULAR = (
    Case(2, (Call("gather", scales=True), Call("gather", chunks=2, scales=True)), programs=2),
    Case(2, (Call("gather", "decomposed", scales=True), Call("gather", chunks=2), Call("gather", scales=True))),
    Case(2, (Call("gather", outer=2), Call("gather", chunks=2, outer=2, scales=True, keep_own=True)), programs=2),
    Case(2, (Call("gather", chunks=2, outer=2), Call("scatter", chunks=2, outer=2)), programs=2, columns=2),
    Case(2, (Call("gather", "decomposed", outer=2, scales=True, keep_own=True), Call("gather")), programs=2),
    Case(2, (Call("scatter", "decomposed", outer=2), Call("scatter", chunks=2)), programs=2),
    Case(2, (Call("gather", "decomposed", scales=True, keep_scales=True),) * 2),
    Case(3, (Call("gather", "decomposed", scales=True), Call("gather", "decomposed", scales=True, keep_scales=True))),
    Case(3, (Call("gather", "decomposed", outer=2), Call("scatter", "decomposed", outer=2))),
    Case(4, (Call("scatter", "decomposed", outer=2), Call("gather", "decomposed", outer=2))),
    Case(2, (Call("scatter", chunks=2), Call("scatter"), Call("scatter", "decomposed")), programs=2, columns=2),
    Case(3, (Call("gather", outer=2, scales=True, keep_own=True), Call("scatter")), programs=4, columns=2),
    Case(2, (Call("gather", scales=True, keep_own=True, keep_scales=True), Call("gather", scales=True)), programs=2),
    Case(4, (Call("gather", chunks=2), Call("scatter", chunks=2), Call("gather", "decomposed")), programs=2),
    Case(4, (Call("scatter", "decomposed"), Call("scatter"), Call("gather", scales=True))),
)


@pytest.mark.parametrize("calls", list(product(FEW_ACTIONS, repeat=2)), ids=lambda calls: ", ".join(map(str, calls)))
def test_two_calls_in_every_interleaving(calls: tuple[Call, ...]) -> None:
    search = explore(Case(2, calls), reduced=False)
    assert not search.findings
    assert search.states > 500


@pytest.mark.parametrize(("world", "programs"), [(3, 1), (3, 4)])
@pytest.mark.parametrize("first", KINDS, ids=str)
def test_three_calls(first: Call, world: int, programs: int) -> None:
    for rest in product(KINDS, repeat=2):
        case = Case(world, (first, *rest), programs)
        assert not explore(case).findings, str(case)


@pytest.mark.parametrize("bulk", BULK, ids=str)
@pytest.mark.parametrize("other", FEW_ACTIONS, ids=str)
def test_a_call_beside_a_result_in_flight_in_every_interleaving(bulk: Call, other: Call) -> None:
    assert not explore(Case(2, (bulk, other)), reduced=False).findings
    assert not explore(Case(2, (other, bulk)), reduced=False).findings


@pytest.mark.parametrize(("world", "programs"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("first", BULK, ids=str)
def test_calls_beside_results_in_flight(first: Call, world: int, programs: int) -> None:
    for rest in [*product(BULK, repeat=2), *product(KINDS, BULK), *product(BULK, KINDS)]:
        case = Case(world, (first, *rest), programs)
        assert not explore(case).findings, str(case)


@pytest.mark.parametrize("case", PARTICULAR, ids=str)
def test_more_ranks_scales_and_columns(case: Case) -> None:
    assert not explore(case).findings


# --- bounded waits -----------------------------------------------------------------------------------------------
ALL_KINDS = (*KINDS, *BULK)
ABSENT = [(2, (1,)), (3, (2,)), (3, (0, 1))]


@pytest.mark.parametrize(("world", "absent"), ABSENT)
@pytest.mark.parametrize("call", ALL_KINDS, ids=str)
def test_a_call_without_some_ranks_ends_where_waits_are_bounded(
    call: Call, world: int, absent: tuple[int, ...]
) -> None:
    case = Case(world, (call,), bounded=True, absent=absent)
    assert "stuck" not in explore(case, all_kinds=True).findings
    assert "stuck" in explore(replace(case, bounded=False), all_kinds=True).findings


@pytest.mark.parametrize("call", ALL_KINDS, ids=str)
@pytest.mark.parametrize("before", [Call("gather"), Call("scatter"), BULK[1]], ids=str)
def test_so_does_a_later_call(before: Call, call: Call) -> None:
    assert "stuck" not in explore(Case(2, (before, call), bounded=True, absent=(1,)), all_kinds=True).findings


def unbounded(name: str) -> Spoil:
    """Waits for words of area `name` have no bound."""

    def without(item: object) -> object:
        return replace(item, peer=None) if isinstance(item, Wait) and area(item.address) == name else item

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        return [(stream, _each(item, without) if isinstance(item, Kernel) else without(item)) for stream, item in items]  # type: ignore[misc]

    return spoil


def _each(kernel: Kernel, change: Callable[[object], object]) -> Kernel:
    first, *rest = [tuple(map(change, program)) for program in (kernel.last, *kernel.programs)]
    return replace(kernel, programs=tuple(rest), last=first)  # type: ignore[arg-type]


def words_of_peers(call: Call) -> tuple[str, str]:
    """What a call waits for of other ranks."""
    if call.op == "scatter":
        return "free", "full"
    return ("free", "landed") if call.pushed else ("begun", "staged")


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call in ALL_KINDS for name in words_of_peers(call)],
    ids=str,
)
def test_no_bound_can_be_left_out(call: Call, name: str) -> None:
    case = Case(2, (call,), bounded=True, absent=(1,), spoil=unbounded(name))
    assert "stuck" in explore(case, all_kinds=True).findings


# --- and the search finds what each rule prevents ----------------------------------------------------------------
Which = Callable[[int, object], bool]  # of rank and item


def word(
    kind: type, name: str, value: int | None = None, number: int | None = None, source: int | None = None
) -> Which:
    """A step about a word of area `name`; `number` is the chunk, or the rank where there is one word per rank."""

    def which(rank: int, item: object) -> bool:
        if not isinstance(item, Wait | Write | Post) or not isinstance(item, kind) or area(item.address) != name:
            return False
        about = divmod(item.address % _AREA // _WORD, MAX_CHUNKS)
        asked = value in (None, getattr(item, "value", 1)), source in (None, about[0]), number in (None, about[1])
        return all(asked)

    return which


def event(kind: type, *numbers: int) -> Which:
    return lambda rank, item: isinstance(item, kind) and getattr(item, "event", -1) in numbers


def own_event(rank: int, item: object) -> bool:
    return event(Await, FIRST_EVENT + rank)(rank, item)


def is_a(kind: type) -> Which:
    return lambda rank, item: isinstance(item, kind)


def drop(which: Which) -> Spoil:
    """Without some items, and kernels without such actions."""

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        kept = [item for item in items if not which(rank, item[1])]
        return [(stream, _deafen(rank, item, which) if isinstance(item, Kernel) else item) for stream, item in kept]

    return spoil


def _deafen(rank: int, kernel: Kernel, which: Which) -> Kernel:
    first, *rest = [
        tuple(action for action in program if not which(rank, action)) for program in (kernel.last, *kernel.programs)
    ]
    return replace(kernel, programs=tuple(rest), last=first)


def hasten(which: Which, anchor: Which) -> Spoil:
    """Move items to in front of the last `anchor` before them."""

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        moved: list[Item] = []
        for item in items:
            places = [i for i, (stream, other) in enumerate(moved) if stream == item[0] and anchor(rank, other)]
            moved.insert(places[-1] if which(rank, item[1]) else len(moved), item)
        return moved

    return spoil


def postpone(which: Which) -> Spoil:
    """Move items to the end of what the copy stream does."""

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        rest = [item for item in items if not which(rank, item[1])]
        end = rest.index(("copy", Record(END)))
        return [*rest[:end], *(item for item in items if which(rank, item[1])), *rest[end:]]

    return spoil


def bind_early(which: Which) -> Spoil:
    """The host makes these waits for events before the records: they wait for what the call before recorded."""

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        early = [item for item in items if which(rank, item[1])]
        return [*early, *(item for item in items if not which(rank, item[1]))]

    return spoil


def await_one_by_one(rank: int, items: list[Item]) -> list[Item]:
    """A scatter pushes to each rank behind that one's FREE, not behind all ranks'."""
    waits, clears = ([item for item in items if word(kind, "free")(rank, item[1])] for kind in (Wait, Write))
    late, copies = list(zip(waits, clears, strict=True))[1:], 0
    spoilt: list[Item] = []
    for item in items:
        if any(item in pair for pair in late):
            continue
        if isinstance(item[1], Copy) and late:
            spoilt += late[copies - 1] if copies else ()
            copies += 1
        spoilt.append(item)
    return spoilt


def staged_too_early(rank: int, items: list[Item]) -> list[Item]:
    """The outbox is said to be full before it is."""

    def early(kernel: Kernel) -> Kernel:
        posts = tuple(action for action in kernel.last if isinstance(action, Write))
        rest = tuple(action for action in kernel.last if not isinstance(action, Write))
        return replace(kernel, programs=((*posts, *kernel.programs[0]), *kernel.programs[1:]), last=rest)

    return [(on, early(item) if isinstance(item, Kernel) and item.name == "stage" else item) for on, item in items]


def first_tile_is_enough(rank: int, items: list[Item]) -> list[Item]:
    """A push waits for one tile of its chunk."""
    waits = word(Wait, "progress")
    return [(on, Wait(item.address) if isinstance(item, Wait) and waits(rank, item) else item) for on, item in items]


def other_row(rank: int, items: list[Item]) -> list[Item]:
    """A pull takes the other of the two rows."""

    def pull(copy: Copy) -> Copy:
        return replace(copy, src=Place(copy.src.base, copy.src.offset ^ 1)) if copy.width == 1 else copy

    return [(stream, pull(item) if isinstance(item, Copy) else item) for stream, item in items]


PART_EVENTS = range(FIRST_EVENT, FIRST_EVENT + 2)
SECOND_RANGES = tuple(of_block(rank, 1) for rank in range(2))


def fault(name: str, kind: str, call: Call, spoil: Spoil, world: int = 2, calls: int = 2, columns: int = 1) -> object:
    """`kind` is among what the search must find when `spoil` breaks each of `calls` equal calls."""
    case = Case(world, (call,) * calls, columns=columns, spoil=spoil)
    return pytest.param(case, kind, id=f"{call.op}: {name}")


def gather_faults() -> Iterator[object]:
    one, two = Call("gather", keep_own=True), Call("gather", chunks=2, keep_own=True)
    decomposed = Call("gather", "decomposed", keep_own=True)
    copy, parts = is_a(Copy), PART_EVENTS
    yield fault("outbox filled at once", "overwritten", one, drop(word(Wait, "begun")))
    yield fault("begun not set", "stuck", one, drop(word(Write, "begun")))
    yield fault("pull at once", "stale", one, drop(word(Wait, "staged")))
    yield fault("pull at once, staged on main", "stale", decomposed, drop(word(Wait, "staged")))
    yield fault("staged set early", "torn", one, staged_too_early)
    yield fault("staged not set", "stuck", decomposed, drop(word(Write, "staged")))
    yield fault("arrival before the pull", "torn", one, hasten(word(Write, "arrivals", value=1), copy))
    yield fault("arrivals not cleared", "stale", one, drop(word(Write, "arrivals", value=0)))
    yield fault("GEMM without arrivals", "stale", one, drop(word(Wait, "arrivals")))
    yield fault("copies before the call", "stale", decomposed, drop(event(Await, START)))
    yield fault("staging before the call", "stale", one, drop(event(Await, START)), calls=1)
    yield fault("call ends before the copies", "overwritten", one, drop(event(Await, END)))
    yield fault("event before the pull", "torn", decomposed, hasten(event(Record, *parts), copy))
    yield fault("event of the call before", "stale", decomposed, bind_early(event(Await, *parts)))
    yield fault("second range not awaited", "stale", replace(decomposed, outer=2), drop(event(Await, *SECOND_RANGES)))
    yield fault("wrong row", "misplaced", two, other_row)


def push_faults(call: Call, full: str = "full") -> Iterator[object]:
    """Of the words, whoever pushes; `full` says that a chunk is there."""
    yield fault("push without FREE", "overwritten", call, drop(word(Wait, "free")))
    yield fault("FREE not cleared", "overwritten", call, drop(word(Write, "free")))
    yield fault("FREE cleared late", "stuck", call, postpone(word(Write, "free")))
    yield fault("FREE not set", "stuck", call, drop(word(Post, "free")))
    yield fault("FULL not awaited", "stale", call, drop(word(Wait, full)))
    yield fault("FULL not cleared", "stale", call, drop(word(Write, full)))
    yield fault("FULL set before the push", "torn", call, hasten(word(Post, full), is_a(Copy)))
    yield fault("push behind the call", "overwritten", call, drop(event(Await, END)))


def pushed_faults() -> Iterator[object]:
    second = word(Wait, "landed", number=1)
    for way in ("fused", "decomposed"):
        one = Call("gather", way)
        yield from push_faults(one, "landed")
        yield fault(f"pushed before the call, {way}", "stale", one, drop(event(Await, START)))
    yield fault("pushed, second range not awaited", "stale", replace(one, outer=2), drop(second))
    yield fault("pushed, second chunk not awaited", "stale", Call("gather", chunks=2), drop(second))


def scatter_faults() -> Iterator[object]:
    one, parts = Call("scatter", "decomposed"), PART_EVENTS
    yield from push_faults(one)
    yield fault("FREE set before the call", "overwritten", one, drop(event(Await, START)))
    yield fault("push without event", "stale", one, drop(event(Await, *parts)))
    yield fault("reduction without event", "torn", one, drop(own_event))
    yield fault("second range not awaited", "stale", replace(one, outer=2), drop(event(Await, *SECOND_RANGES)))


def wide_faults() -> Iterator[object]:
    """Those with too many interleavings for a search without the reduction."""
    after = Case(3, (Call("gather", keep_own=True), Call("scatter")), spoil=await_one_by_one)
    yield pytest.param(after, "overwritten", id="scatter: pushed into a box from which another rank still pulls")
    gather, scatter = Call("gather", "decomposed", keep_own=True), Call("scatter", "decomposed")
    fused, chunks = Call("scatter"), Call("scatter", chunks=2)
    yield fault("begun awaited of one peer", "overwritten", gather, drop(word(Wait, "begun", number=2)), world=3)
    yield fault("staged awaited of one peer", "stale", gather, drop(word(Wait, "staged", number=2)), world=3, calls=1)
    yield fault("FREE of one peer", "overwritten", scatter, drop(word(Wait, "free", number=2)), world=3)
    yield fault("FULL of one peer", "stale", scatter, drop(word(Wait, "full", source=2)), world=3, calls=1)
    yield fault("call ends before the reduction", "overwritten", scatter, drop(event(Await, REDUCED)))
    yield fault("event of the call before", "stale", scatter, bind_early(event(Await, *PART_EVENTS)))
    yield fault("FULL of a chunk not cleared", "stale", chunks, drop(word(Write, "full", number=1)))
    chunk_posts = word(Post, "full", number=1)
    yield fault("FULL set before the last push", "torn", chunks, hasten(chunk_posts, is_a(Copy)), calls=1)
    yield fault("progress not cleared", "left over", fused, drop(word(Write, "progress")))
    yield fault("push without progress", "torn", fused, drop(word(Wait, "progress")), calls=1)
    yield fault("push after one of two tiles", "torn", fused, first_tile_is_enough, calls=1, columns=2)


FLIGHTS = range(FIRST_EVENT + 2, FIRST_EVENT + 4)  # of two ranks


def bulk_faults() -> Iterator[object]:
    """Of results in flight. What is left out on the copy stream only matters to the call after."""
    gather, scatter = BULK
    staged_first = Call("gather", "decomposed", keep_own=True)
    cases = (
        ("read before it is there", "stale", (gather,), drop(event(Await, *FLIGHTS))),
        ("read before it is there", "stale", (scatter,), drop(event(Await, *FLIGHTS))),
        ("staged beside the pulls", "overwritten", (gather, staged_first), drop(event(Await, *FLIGHTS))),
        ("inbox free before the sum", "overwritten", (scatter, scatter), drop(event(Await, REDUCED))),
        ("sum at once", "stale", (scatter,), drop(word(Wait, "full"))),
        ("copies before the call", "stale", (gather,), drop(event(Await, START))),
    )
    for name, kind, calls, spoil in cases:
        yield pytest.param(Case(2, calls, spoil=spoil), kind, id=f"bulk {calls[0].op}: {name}")


FAULTS = [*bulk_faults(), *gather_faults(), *pushed_faults(), *scatter_faults()]


@pytest.mark.parametrize(("case", "kind"), [*FAULTS, *wide_faults()])
def test_search_finds_what_each_rule_prevents(case: Case, kind: str) -> None:
    assert kind in explore(case, all_kinds=True).findings


@pytest.mark.parametrize(("case", "kind"), FAULTS)
def test_reduction_loses_no_finding(case: Case, kind: str) -> None:
    full, reduced = explore(case, reduced=False, all_kinds=True), explore(case, all_kinds=True)
    assert full.findings.keys() == reduced.findings.keys()
    assert full.states > reduced.states


def test_finding_comes_with_its_interleaving() -> None:
    found = explore(Case(2, (Call("gather", keep_own=True),), spoil=drop(word(Write, "staged")))).findings
    assert found.keys() == {"stuck"}
    assert "rank 0 main: access begins" in found["stuck"]
