"""Calls of the copy engine's protocol, and the items that each host enqueues for them. See `test_channel_model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from asynctp_kernels.cuda.choose.tiles import Chunks, WireChunks, cut, cut_own, in_blocks
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, MAX_OWN, Words
from asynctp_kernels.cuda.runtime.script import (
    DATA,
    FULL,
    Await,
    Channel,
    Copy,
    Place,
    Post,
    PullMoves,
    PushMoves,
    Record,
    Step,
    Wait,
    Write,
    arrived_script,
    clear_script,
    parts_script,
    pull_script,
    push_script,
    share_script,
    summed_script,
)

ROWS = 4  # of a shard: each is a chunk, and two are a tile
TILE = 2
START, RUNNING, END, REDUCED, FIRST_EVENT = range(5)  # event FIRST_EVENT + r: about rank r, see `of_block`
AREAS = ("full", "free", "landed", "progress", "arrivals", "awaited")
_RANK, _AREA, _WORD = 10_000, 1_000, 4  # word addresses: of a rank, of an area within it, of a word within that


Tag = tuple[int, int, str, int]  # call, rank that made it, what, which byte of that
Bytes = tuple[tuple[int, Tag], ...]  # (address, tag)


class Quarters(WireChunks):
    """Chunks of any number of bytes."""

    @property
    def chunk(self) -> int:
        return -(-self.size // MAX_CHUNKS)


@dataclass(frozen=True)
class Call:
    """One op, as one rank makes it: "gather", "scatter" or "all_reduce", a scatter whose sums are shared.

    Ranks share `op`, `kept` (of a gather that every rank keeps, which is pulled), `scales`, which a scatter ignores,
    and `size`, that tells calls apart whose data is of other sizes. The rest is a rank's own:

    way: "fused", "decomposed", "whole" (no product, but the main stream waits) or "bulk": no product, and the main
        stream waits for the result only after the next call.
    chunks: in how many pieces a shard is sent to the first and the last peer, or pulled from there; or the parts of a
        scatter are made.
    outer: blocks of rows, between those of other ranks'.
    keeps: the gathered A is returned. keep_scales: so are the numbers, which then are no scales.
    accord: what all ranks agreed that the call's graph does otherwise than its program; 0: nothing.
    """

    op: str
    way: str = "fused"
    chunks: int = 1
    outer: int = 1
    scales: bool = False
    kept: bool = False
    keeps: bool = False
    keep_scales: bool = False
    size: int = 0
    accord: int = 0

    @property
    def signature(self) -> int:
        """What is on the wire of it."""
        kinds = {"gather": 0, "scatter": 4, "all_reduce": 64}
        facts = self.size * 8 + kinds[self.op] + self.kept * 2 + (self.scales or self.keep_scales)
        return 8 + facts + self.accord * 128

    @property
    def cut(self) -> Chunks:
        """Row tiles, as a fused scatter makes them and a pull takes them; or blocks."""
        inner = ROWS // self.outer
        return cut(self.outer, inner, TILE, self.chunks) if self.way == "fused" else in_blocks(self.outer, inner)

    @property
    def own_cut(self) -> Chunks:
        """Of a scatter's own rows."""
        return cut_own(self.cut, self.outer, ROWS // self.outer, TILE, 1) if self.way == "fused" else self.cut

    @property
    def copies(self) -> int:
        """Wanted of a push of a gather."""
        return {"fused": self.chunks, "decomposed": self.outer}.get(self.way, 1)

    @property
    def flies(self) -> bool:
        return self.way == "bulk"

    @property
    def whole(self) -> bool:
        """There is no product."""
        return self.way in ("whole", "bulk")

    @property
    def has_full(self) -> bool:
        """The gathered A is put together."""
        return self.keeps or self.kept or self.whole

    @property
    def stage_keeps(self) -> bool:
        """The kernel that stages the shard also puts it into the gathered A."""
        return self.whole or (self.way == "decomposed" and self.outer == 1)

    def __str__(self) -> str:
        extras = [name for name in ("scales", "kept", "keeps", "keep_scales") if getattr(self, name)]
        sizes = [
            *[f"of {self.chunks}"] * (self.chunks > 1),
            *["outer"] * (self.outer > 1),
            *["+"] * self.size,
            *["agreed"] * self.accord,
        ]
        return "-".join([self.op, self.way, *sizes, *extras])


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
Each = Call | tuple[Call, ...]  # one call of all ranks, or of each rank


@dataclass(frozen=True)
class Watching:
    """A rank's watch: it finds that the rank waits for others in vain, says so to them, and lets it go on.

    From when it has failed, a rank raises, so that what it still computes is nobody's result.

    Attributes:
        told: it goes on only when all others have said so, too.
        impatient: it also fails while another rank has not come, which it may do later.
    """

    told: bool = True
    impatient: bool = False


@dataclass(frozen=True)
class Case:
    """Calls that ranks make, and how a test breaks them.

    Attributes:
        calls: of all ranks, in this order; each as all make it, or as each rank does.
        alone: of each rank, what it makes after that.
        programs: of each kernel.
        columns: bytes of a row, and column tiles of a scatter's GEMM.
        watch: how a rank that is stuck ends its waits (`Watching`).
    """

    world: int
    calls: tuple[Each, ...]
    programs: int = 1
    columns: int = 1
    alone: tuple[tuple[Call, ...], ...] = ()
    spoil: Spoil = field(default=lambda rank, items: items)
    watch: Watching | None = None

    def of(self, rank: int) -> tuple[Call, ...]:
        """The calls of one rank."""
        shared = [each[rank % len(each)] if isinstance(each, tuple) else each for each in self.calls]
        return (*shared, *(self.alone[rank] if self.alone else ()))

    @property
    def all(self) -> list[Call]:
        """Of all ranks."""
        return [call for rank in range(self.world) for call in self.of(rank)]

    def __str__(self) -> str:
        def said(each: Sequence[Each]) -> str:
            return ", ".join(str(call) if isinstance(call, Call) else f"({said(call)})" for call in each)

        alone = [f"then {' or '.join(said(calls) or 'nothing' for calls in self.alone)}"] if self.alone else []
        return "; ".join([f"{self.world} ranks: {said(self.calls)}", *alone, f"{self.programs} programs"])


# --- what the host enqueues ------------------------------------------------------------------------------------
def area(address: int) -> str:
    """Which words `address` is one of."""
    return AREAS[address % _RANK // _AREA]


@dataclass(frozen=True)
class Rank:
    """One rank's calls, as the plans of gathers, scatters and collectives put them on the streams."""

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

    @property
    def wire(self) -> WireChunks:
        return Quarters(self.part)

    @cached_property
    def starts(self) -> tuple[dict[str, int], int]:
        """Where each buffer of a rank begins in its memory, and how much that is.

        A gathered A and a staging never live at the same time: one `local` for both. Outbox and inbox are `box`, too.
        """
        calls = self.case.all
        scales = 4 * ROWS * any(call.scales or call.keep_scales for call in calls)
        sizes = {"own": self.part, "own scale": scales, "out": self.part, "local": self.world * self.part}
        shares = any(call.op == "all_reduce" for call in calls)
        sizes |= {"scales": self.world * scales, "box": (self.world - 1) * (self.part + scales) + shares * self.part}
        sizes |= {"total": self.world * self.part * any(call.op == "all_reduce" and call.whole for call in calls)}
        if any(call.flies for call in calls):  # two may be in flight, each with memory of its own
            flying = {"own": self.part, "local": self.world * self.part, "out": self.part}
            sizes |= {f"{buffer} {turn}": size for turn in (0, 1) for buffer, size in flying.items()}
        ends = list(accumulate(sizes.values(), initial=0))
        return dict(zip(sizes, ends, strict=False)), ends[-1]

    def at(self, name: str, rank: int | None = None) -> int:
        """Address of a buffer, of this rank or another."""
        starts, size = self.starts
        return (self.rank if rank is None else rank) * size + starts[name]

    def of_call(self, number: int, buffer: str) -> int:
        """Address of a buffer that a bulk call has for itself."""
        flies = self.case.of(self.rank)[number].flies
        return self.at(f"{buffer} {number % 2}" if flies else buffer)

    @property
    def bases(self) -> tuple[int, ...]:
        return self.bases_of(-1)

    def bases_of(self, number: int) -> tuple[int, ...]:
        """Of `script`'s places: absolute, the shard, its scales, the gathered A, its scales."""
        shard, whole = (self.of_call(number, name) for name in ("own", "local")) if number >= 0 else (0, 0)
        return (0, shard, self.at("own scale"), whole, self.at("scales"))

    def words(self, name: str) -> Words:
        return Words([rank * _RANK for rank in range(self.world)], AREAS.index(name) * _AREA // _WORD)

    def channel(self, full: str) -> Channel:
        return Channel(self.rank, self.world, self.words(full).at, self.words("free").at, self.mine("awaited", 0))

    def mine(self, name: str, source: int) -> int:
        """This rank's own word about a source."""
        return self.words(name).at(self.rank, source)

    def progress(self, dst: int, chunk: int) -> int:
        return self.words("progress").at(self.rank, dst * MAX_OWN + chunk)

    @property
    def cleared_own(self) -> range:
        """Chunks of own rows whose words a kernel clears: really `MAX_OWN`, here those that some call uses."""
        return range(max(len(call.own_cut) for call in self.case.of(self.rank)))

    def ring(self, first: int) -> list[int]:
        """All ranks, from own rank + `first` on."""
        return [(self.rank + step) % self.world for step in range(first, self.world + first)]

    @property
    def sources(self) -> list[int]:
        """The others, in the order in which their rows come."""
        return self.ring(1)[:-1]

    def enqueue(self, number: int, call: Call) -> list[Item]:
        """Everything of one call, in the order in which the host does it."""
        calls = self.case.of(self.rank)
        made = self._scatter if call.op != "gather" else self._pulled if call.kept else self._pushed
        items = [*self._behind(number, call), *made(number, call)]
        landed = [number - 1] * (number > 0) + [number] * (number + 1 == len(calls))
        items += [item for other in landed if calls[other].flies for item in self._land(other)]
        return self.case.spoil(self.rank, [(on, _placed(item, self.bases_of(number))) for on, item in items])

    def _behind(self, number: int, call: Call) -> list[Item]:
        """What the main stream waits for before a call: pushed rows are told by words that a gather in flight uses."""
        calls = self.case.of(self.rank)
        gathers = [other for other in range(number) if calls[other].flies and calls[other].op == "gather"]
        gathers += [other for other in range(number) if calls[other].op == "all_reduce" and calls[other].whole]
        flights = [other for other in range(number - 1, number) if other >= 0 and calls[other].flies]
        if call.op == "gather" and not call.flies and not call.kept:
            return [("main", Await(self.flights[-1]))] if gathers else []
        if call.op == "gather" and call.kept and call.way == "decomposed":
            return [("main", Await(self.flights[flights[-1] % 2]))] if flights else []
        return []

    # --- in flight
    @property
    def flights(self) -> range:
        """The events of results in flight, in turn; the last one is of the last gather."""
        first = FIRST_EVENT + self.world
        return range(first, first + 3)

    def _flown(self, number: int) -> list[Item]:
        """The result is complete."""
        done, gathers = self.flights[number % 2], self.case.of(self.rank)[number].op != "scatter"
        landed: list[Item] = [("copy", Record(self.flights[-1]))]
        return [("copy", Record(done)), ("reduce", Await(done)), *(landed if gathers else [])]

    def _land(self, number: int) -> list[Item]:
        """The result of a bulk call is waited for, and read."""
        call = self.case.of(self.rank)[number]
        reads = self._sum(number, range(self.part)) if call.op == "scatter" else self._whole(number, call)
        return [("main", Await(self.flights[number % 2])), ("main", Touch(reads=reads))]

    # --- what a gather moves
    def _tag(self, number: int, rank: int, what: str, index: int) -> Tag:
        """Of data that a rank makes in a call; `what` has this rank's signature."""
        return (number, rank, f"{what} of {self.case.of(self.rank)[number].signature}", index)

    def _own(self, number: int, call: Call, rows: Sequence[int] = range(ROWS)) -> Bytes:
        """Rows of the own shard and their scales."""
        start = self.of_call(number, "own")
        found = [(start + i, self._tag(number, self.rank, "a", i)) for row in rows for i in self._span(row, self.width)]
        return (*found, *self._scales(number, call, self.rank, self.at("own scale"), rows))

    def _scales(self, number: int, call: Call, source: int, start: int, rows: Sequence[int]) -> Bytes:
        """Scales of a source's rows, that begin at `start`."""
        if not (call.scales or call.keep_scales):
            return ()
        return tuple((start + i, self._tag(number, source, "scale", i)) for row in rows for i in self._span(row))

    def _received(self, number: int, call: Call, source: int, rows: Sequence[int], scales: bool) -> Bytes:
        """Rows of `source`'s shard, and their scales if these are used there, in the own inbox."""
        start, scale = self._slots_of(source)
        found = [(start + i, self._tag(number, source, "a", i)) for row in rows for i in self._span(row, self.width)]
        return (*found, *(self._scales(number, call, source, scale, rows) if scales else ()))

    def _slots_of(self, source: int) -> tuple[int, int]:
        """Where in the own inbox its rows are, and their scales."""
        slot, box = source - (source > self.rank), self.at("box")
        return box + slot * self.part, box + (self.world - 1) * self.part + slot * 4 * ROWS

    def _gathered(self, number: int, call: Call, source: int, rows: Sequence[int] = range(ROWS)) -> Bytes:
        """Rows of `source`'s shard in the gathered A."""
        inner, found = ROWS // call.outer, []
        for row in rows:
            place = (row // inner * self.world + source) * inner + row % inner
            pairs = zip(self._span(place, self.width), self._span(row, self.width), strict=True)
            found += [(self.of_call(number, "local") + to, self._tag(number, source, "a", i)) for to, i in pairs]
        return tuple(found)

    def _gathered_scales(self, number: int, call: Call, source: int, rows: Sequence[int]) -> Bytes:
        inner, found = ROWS // call.outer, []
        for row in rows if call.scales or call.keep_scales else ():
            place = (row // inner * self.world + source) * inner + row % inner
            pairs = zip(self._span(place), self._span(row), strict=True)
            found += [(self.at("scales") + to, self._tag(number, source, "scale", i)) for to, i in pairs]
        return tuple(found)

    def _whole(self, number: int, call: Call) -> Bytes:
        return sum((self._gathered(number, call, source) for source in range(self.world)), ())

    def _span(self, index: int, size: int = 4) -> range:
        return range(index * size, (index + 1) * size)

    def _results(self, number: int, call: Call) -> list[Item]:
        """The program reads what is returned of a gather that the main stream has waited for."""
        reads = self._whole(number, call) if call.has_full else ()
        if call.keep_scales:
            reads += sum((self._gathered_scales(number, call, r, range(ROWS)) for r in range(self.world)), ())
        return [("main", Touch(reads=reads))] if reads else []

    # --- a gather that is pushed
    def _pushed(self, number: int, call: Call) -> list[Item]:
        channel = self.channel("landed")
        boxes = [self.at("box", rank) for rank in range(self.world)]
        scales = 4 * ROWS * (call.scales or call.keep_scales)
        sizes = ((self.world - 1) * self.part, scales)
        pieces = self.wire.pieces(call.copies)
        moves = PushMoves(boxes, self.part, self.wire, pieces, DATA, 0, call.signature, *sizes)
        script: list[Item] = [("copy", step) for step in push_script(channel, moves, lambda dst, piece: [])]
        begin: list[Item] = [
            ("main", Touch(writes=self._own(number, call))),
            ("main", Record(START)),
            ("copy", Await(START)),
        ]
        if call.flies:
            clears: list[Item] = [("copy", step) for step in clear_script(channel)]
            return [*begin, *script, *self._keep(number, call, "copy"), *clears, *self._flown(number)]
        keep = [("reduce", Await(START)), *self._keep(number, call, "reduce"), ("reduce", Record(REDUCED))]
        items = [*begin, *script, ("copy", Record(END)), *(keep if call.has_full else [])]
        if call.way == "whole":
            items.append(("main", Await(REDUCED)))
        else:
            items += self._gemm(number, call) if call.way == "fused" else self._products(number, call)
        if call.keep_scales:
            items.append(("main", self._put_together(number, call)))
        items.append(("main", Await(END)))
        if call.has_full:
            items += [("main", Await(REDUCED)), *[("main", step) for step in clear_script(channel)]]
        return [*items, *self._results(number, call)]

    def _keep(self, number: int, call: Call, on: str) -> list[Item]:
        """`keep_kernel`, for each source once it is there."""
        items: list[Item] = [(on, self._kept(self._own_rows(number), self._gathered(number, call, self.rank)))]
        for source in self.sources:
            items += [(on, step) for step in arrived_script(self.channel("landed"), source, MAX_CHUNKS - 1)]
            reads = self._received(number, call, source, range(ROWS), False)
            items.append((on, self._kept(reads, self._gathered(number, call, source))))
        return items

    def _own_rows(self, number: int) -> Bytes:
        return self._own(number, replace(self.case.of(self.rank)[number], scales=False, keep_scales=False))

    def _kept(self, reads: Bytes, writes: Bytes) -> Kernel:
        programs = range(self.case.programs)
        return Kernel("keep", tuple((Touch(reads[i :: len(programs)], writes[i :: len(programs)]),) for i in programs))

    def _put_together(self, number: int, call: Call) -> Touch:
        """All ranks' scales, where they have come to, and behind that."""
        reads = self._scales(number, call, self.rank, self.at("own scale"), range(ROWS))
        for source in self.sources:
            reads += self._scales(number, call, source, self._slots_of(source)[1], range(ROWS))
        writes = sum((self._gathered_scales(number, call, r, range(ROWS)) for r in range(self.world)), ())
        return Touch(reads, writes)

    def _gemm(self, number: int, call: Call) -> list[Item]:
        """`gemm_kernel`."""
        word = "arrivals" if call.kept else "landed"
        programs = [self._gemm_program(number, call, program, word) for program in range(self.case.programs)]
        clears = tuple(Write(self.mine(word, source), 0) for source in self.sources)
        return [("main", Kernel("gemm", tuple(programs), clears if call.kept or not call.has_full else ()))]

    def _gemm_program(self, number: int, call: Call, program: int, word: str) -> Program:
        """A tile needs the chunk that its last row is in; rows of a pull's chunk are that of the first one."""
        actions: list[Wait | Touch] = []
        inner, known = ROWS // call.outer, None
        tiles = [(block, row) for block in range(call.outer) for row in range(0, inner, TILE)]
        chunk_rows = call.cut.rows[0][1] if call.kept else self.wire.chunk // self.width
        for index in range(program, len(tiles) * self.world, self.case.programs):
            source = self.ring(0)[index // len(tiles)]
            block, row = tiles[index % len(tiles)]
            rows = range(block * inner + row, block * inner + min(row + TILE, inner))
            if source == self.rank:
                actions.append(Touch(self._own(number, replace(call, keep_scales=False), rows)))
                continue
            wait = Wait(self.mine(word, source), min(rows[-1] // chunk_rows, MAX_CHUNKS - 1) + 1)
            actions += [wait] * (wait != known)
            known = wait
            actions.append(Touch(self._come(number, call, source, rows)))
        return tuple(actions)

    def _come(self, number: int, call: Call, source: int, rows: Sequence[int]) -> Bytes:
        """Rows that products read, and scales if they are scales."""
        if not call.kept:
            return self._received(number, call, source, rows, call.scales)
        scales = self._gathered_scales(number, call, source, rows) if call.scales else ()
        return (*self._gathered(number, call, source, rows), *scales)

    def _products(self, number: int, call: Call) -> list[Item]:
        """One product per range of a source's rows."""
        items: list[Item] = [("main", Touch(self._own(number, replace(call, keep_scales=False))))]
        inner = ROWS // call.outer
        for source in self.sources:
            known = -1
            for block in range(call.outer):
                items += [("main", step) for step in self._wait_for(call, source, block, known)]
                known = self.wire.covering((block + 1) * inner * self.width)
                rows = range(block * inner, (block + 1) * inner)
                items.append(("main", Touch(self._come(number, call, source, rows))))
        return items

    def _wait_for(self, call: Call, source: int, block: int, known: int) -> list[Step]:
        """Before a range."""
        if call.kept:
            return [Await(of_block(source, block))]
        last = self.wire.covering((block + 1) * (ROWS // call.outer) * self.width)
        steps = arrived_script(self.channel("landed"), source, last)
        if block == call.outer - 1 and not call.has_full:
            steps.append(Write(self.mine("landed", source), 0))
        return steps if last > known else []

    # --- a gather that is pulled
    def _pulled(self, number: int, call: Call) -> list[Item]:
        moves = PullMoves(
            outboxes=[self.at("box", rank) for rank in range(self.world)],
            row_bytes=self.width,
            outer=call.outer,
            inner=ROWS // call.outer,
            scale_offset=self.part,
            scale_bytes=4 * (ROWS // call.outer) if call.scales or call.keep_scales else 0,
            chunks=call.cut,
            keep_own=not call.stage_keeps,
            keep_own_scales=call.keep_scales,
        )
        stage, first = self._stage(number, call), call.way == "decomposed"
        script = pull_script(self.rank, self.world, moves, self._arrived(call))
        items: list[Item] = [
            ("main", Touch(writes=self._own(number, call))),
            *[("main", stage)] * (first and not call.flies),
            ("main", Record(START)),
            ("copy", Await(START)),
            *[("copy", stage)] * (not first),
            *[("copy", step) for step in script],
        ]
        if call.flies:
            return [*items, *self._flown(number)]
        items.append(("copy", Record(END)))
        if not call.whole:
            items += self._gemm(number, call) if call.way == "fused" else self._products(number, call)
        return [*items, ("main", Await(END)), *self._results(number, call)]

    def _arrived(self, call: Call) -> Callable[[int, int], Sequence[Step]]:
        if call.way == "fused":
            return lambda source, chunk: [Write(self.mine("arrivals", source), chunk + 1)]
        if call.way == "decomposed":
            return lambda source, chunk: [Record(of_block(source, chunk))]
        return lambda source, chunk: []

    def _stage(self, number: int, call: Call) -> Kernel:
        """`stage_kernel`: all meet; each program copies its bytes, the first the scales too; all meet again."""
        free, landed, peers = self.words("free"), self.words("landed"), self.sources
        programs: list[Program] = []
        for program in range(self.case.programs):
            posts = [Post(free.at(peer, self.rank), call.signature) for peer in peers] if program == 0 else []
            waits = [Wait(free.at(self.rank, peer), call.signature, peer=peer, exactly=True) for peer in peers]
            own = self._own(number, call)
            mine = (*own[: self.part][program :: self.case.programs], *(own[self.part :] if program == 0 else ()))
            places = [(self.at("box"), mine)]
            if call.stage_keeps:
                whole = self.of_call(number, "local") + self.rank * self.part
                places.append((whole, tuple(each for each in mine if each in own[: self.part])))
            start = self.of_call(number, "own")
            writes = tuple(
                (
                    place + (address - start if tag[2].startswith("a") else self.part + address - self.at("own scale")),
                    tag,
                )
                for place, bytes_there in places
                for address, tag in bytes_there
            )
            programs.append((*posts, *waits, Touch(mine, writes)))
        last: list[Step] = [Write(free.at(self.rank, peer), 0) for peer in peers]
        last += [Post(landed.at(peer, self.rank), MAX_CHUNKS) for peer in peers]
        for peer in peers:
            word = landed.at(self.rank, peer)
            last += [Wait(word, MAX_CHUNKS, peer=peer, exactly=True), Write(word, 0)]
        return Kernel("stage", tuple(programs), tuple(last))

    # --- scatter
    def _scatter(self, number: int, call: Call) -> list[Item]:
        channel, boxes = self.channel("full"), [self.at("box", rank) for rank in range(self.world)]
        pieces = [(first * self.width, end * self.width) for first, end in call.cut.rows]
        moves = PushMoves(boxes, self.part, self.wire, pieces, DATA, self.part, call.signature)
        steps = [replace_base(step) for step in push_script(channel, moves, self._ready(call))]
        script: list[Item] = [("copy", step) for step in steps]
        fork: list[Item] = [("main", Record(START)), ("copy", Await(START))]
        if call.whole:
            parts = sum((self._staged(number, dst, range(self.part)) for dst in range(self.world)), ())
            begin = [("main", Touch(writes=parts)), *fork, ("copy", Record(RUNNING))]
            ready = RUNNING
        else:
            made = self._scatter_gemm(number, call) if call.way == "fused" else self._scatter_products(number, call)
            begin = [*fork, *made]
            ready = RUNNING if call.way == "fused" else of_block(self.rank, call.outer - 1)
        waits: list[Item] = [("reduce", step) for step in parts_script(channel)] if call.whole else []
        told, pulled = self._shared(number, call) if call.op == "all_reduce" else ([], [])
        items = [
            *begin,
            *script,
            ("reduce", Await(ready)),
            *waits,
            ("reduce", self._reduction(number, call)),
            *told,
            ("reduce", Record(REDUCED)),
            *pulled,
            ("copy", Record(END)),
        ]
        if call.whole:
            items += [("copy", Await(REDUCED)), *self._flown(number)]
            done: list[Item] = [("main", Await(self.flights[number % 2]))] if call.way == "whole" else []
        else:
            done = [("main", Await(END)), ("main", Await(REDUCED))]
        reads = self._sum(number, range(self.part))
        if call.op == "all_reduce":
            reads = sum((self._total(number, rank, range(self.part)) for rank in range(self.world)), ())
        result = [("main", Touch(reads=reads))] if not call.flies else []
        return [*items, *done, *result]

    # --- an all-reduce: the sums are shared
    def _shared(self, number: int, call: Call) -> tuple[list[Item], list[Item]]:
        """The steps after the reduction: those of its stream, then those of the copy stream."""
        channel = self.channel("landed")
        boxes = [self.at("box", rank) + (self.world - 1) * self.part for rank in range(self.world)]
        steps = share_script(channel, boxes, self.part)
        if call.whole:  # the result has a place of its own
            away = self.at("total") - self.of_call(number, "local")
            steps = [_moved(step, away) if isinstance(step, Copy) else step for step in steps]
        return [("reduce", step) for step in summed_script(channel)], [("copy", step) for step in steps]

    def _total(self, number: int, rank: int, offsets: Sequence[int]) -> Bytes:
        """Bytes of a rank's part of the result."""
        call = self.case.of(self.rank)[number]
        start = (self.at("total") if call.whole else self.of_call(number, "local")) + rank * self.part
        return tuple((start + i, self._tag(number, rank, "sum", i)) for i in offsets)

    def _ready(self, call: Call) -> Callable[[int, int], Sequence[Step]]:
        if call.whole:
            return lambda dst, chunk: []
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
        return tuple((start + i, self._tag(number, self.rank, "part", dst * self.part + i)) for i in offsets)

    def _sent(self, number: int, source: int, offsets: Sequence[int]) -> Bytes:
        """What has come of a source."""
        start = self._slots_of(source)[0]
        return tuple((start + i, self._tag(number, source, "part", self.rank * self.part + i)) for i in offsets)

    def _sum(self, number: int, offsets: Sequence[int]) -> Bytes:
        return tuple((self.of_call(number, "out") + i, self._tag(number, self.rank, "sum", i)) for i in offsets)

    def _scatter_gemm(self, number: int, call: Call) -> list[Item]:
        """`gemm_kernel`."""
        programs = [self._scatter_program(number, call, program) for program in range(self.case.programs)]
        return [("main", Kernel("gemm", tuple(programs)))]

    def _scatter_program(self, number: int, call: Call, program: int) -> Program:
        actions: list[Touch | Count] = []
        inner = ROWS // call.outer
        rows = [
            range(block * inner + row, block * inner + min(row + TILE, inner))
            for block in range(call.outer)
            for row in range(0, inner, TILE)
        ]
        tiles = [(tile, column) for column in range(self.width) for tile in range(len(rows))]
        for index in range(program, len(tiles) * self.world, self.case.programs):
            dst = self.ring(1)[index // len(tiles)]
            tile, column = tiles[index % len(tiles)]
            offsets = [row * self.width + column for row in rows[tile]]
            actions.append(Touch(writes=self._staged(number, dst, offsets)))
            chunks = call.own_cut if dst == self.rank else call.cut
            actions.append(Count(self.progress(dst, tile // chunks.tiles)))
        return tuple(actions)

    def _scatter_products(self, number: int, call: Call) -> list[Item]:
        """One product per range of a destination's rows."""
        items: list[Item] = []
        for dst in self.ring(1):
            for block, (first, end) in enumerate(call.cut.rows):
                offsets = range(first * self.width, end * self.width)
                items.append(("main", Touch(writes=self._staged(number, dst, offsets))))
                items.append(("main", Record(of_block(dst, block))))
        return items

    def _reduction(self, number: int, call: Call) -> Kernel:
        """`reduce_kernel`: each program takes its bytes of each part of the own rows."""
        programs: list[Program] = []
        for program in range(self.case.programs):
            actions: list[Wait | Touch] = []
            here = None
            for part, (first, end) in enumerate(call.own_cut.rows):
                come = min((end * self.width - 1) // self.wire.chunk, MAX_CHUNKS - 1)
                actions += [
                    Wait(self.mine("full", source), come + 1) for source in sorted(self.sources) if come != here
                ]
                here = come
                tiles = call.own_cut.row_tiles[part] * self.case.columns if call.way == "fused" else 0
                actions += [Wait(self.progress(self.rank, part), tiles)] * (not call.whole)
                mine = range(first * self.width, end * self.width)[program :: self.case.programs]
                reads = (
                    *self._staged(number, self.rank, mine),
                    *sum((self._sent(number, source, mine) for source in self.sources), ()),
                )
                if call.op == "scatter":
                    actions.append(Touch(reads, self._sum(number, mine)))
                    continue
                box = self.at("box") + (self.world - 1) * self.part
                sums = tuple((box + i, self._tag(number, self.rank, "sum", i)) for i in mine)
                actions += [Touch(reads), Touch(writes=(*self._total(number, self.rank, mine), *sums))]
            programs.append(tuple(actions))
        words = [self.progress(self.rank, chunk) for chunk in self.cleared_own if not call.whole]
        words += [self.mine("full", source) for source in self.sources]
        return Kernel("reduction", tuple(programs), tuple(Write(word, 0) for word in words))


def _moved(copy: Copy, offset: int) -> Copy:
    """To another place."""
    return replace(copy, dst=replace(copy.dst, offset=copy.dst.offset + offset))


def replace_base(step: Step) -> Step:
    """A scatter's data is its staging."""
    return replace(step, src=replace(step.src, base=FULL)) if isinstance(step, Copy) else step


def _placed(step: Step, bases: Sequence[int]) -> Step:
    """A step with addresses instead of places behind `bases`."""
    if not isinstance(step, Copy):
        return step
    dst, src = (Place(0, bases[place.base] + place.offset) for place in (step.dst, step.src))
    return replace(step, dst=dst, src=src)
