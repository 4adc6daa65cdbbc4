"""Steps of the copy stream in one call, and waits of streams for pushed data, as data, in order.

Scripts are built without a GPU, by pure functions of ranks, sizes and addresses (`push_script`, `pull_script`), so the
same scripts that a GPU plays are explored exhaustively by a test. `compile_script` turns one into driver calls:
neighbouring waits and writes become one batch.

Addresses that change from call to call are `Place`s relative to a base: number 0 is absolute, the others are filled in
when the script is played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from asynctp_kernels.cuda.choose.tiles import MAX_CHUNKS, Chunks, WireChunks
from asynctp_kernels.cuda.runtime.driver import Wait as Wait
from asynctp_kernels.cuda.runtime.driver import Write as Write
from asynctp_kernels.cuda.runtime.machine import driver

ABSOLUTE, DATA, OWN_SCALE, FULL, FULL_SCALE = range(5)
FEW_BLOCKS = 4  # of rows, that are copied one by one


@dataclass(frozen=True)
class Post:
    """Store `value` in another rank's int32 at `address`; otherwise as `Write`."""

    address: int
    value: int = 1


@dataclass(frozen=True)
class Place:
    """`offset` bytes from base number `base`."""

    base: int
    offset: int


@dataclass(frozen=True)
class Copy:
    """Copy `height` rows of `width` bytes; a pitch is the distance of two rows in bytes."""

    dst: Place
    src: Place
    width: int
    height: int = 1
    dst_pitch: int = 0
    src_pitch: int = 0


@dataclass(frozen=True)
class Record:
    """Record an event, for a stream that waits for what is before it in the script."""

    event: int


@dataclass(frozen=True)
class Await:
    """Wait for an event of another stream."""

    event: int


Step = Wait | Write | Post | Copy | Record | Await
Player = Callable[[int, Sequence[int]], None]


def compile_script(steps: Iterable[Step], peer_writes: bool, constant: Callable[[int], int]) -> Player:
    """The function `play(stream, bases)` that enqueues the script.

    Args:
        steps: The script.
        peer_writes: Whether a stream memory operation may write to another GPU; if not, a `Post` copies 4 bytes.
        constant: Address of an int32 that holds a value and does not change, the source of such copies.
    """
    calls: list[Player] = []
    batch: list[Wait | Write] = []

    def flush() -> None:
        if batch:
            ops = driver.MemOps(batch)
            calls.append(ops.enqueue)
            batch.clear()

    for step in steps:
        if isinstance(step, (Wait, Write)):
            batch.append(step)
        elif isinstance(step, Post) and peer_writes:
            batch.append(Write(step.address, step.value))
        else:
            flush()
            calls.append(_post(step, constant(step.value)) if isinstance(step, Post) else _call(step))
    flush()

    def play(stream: int, bases: Sequence[int]) -> None:
        for call in calls:
            call(stream, bases)

    return play


def _post(step: Post, source: int) -> Player:
    address = step.address
    return lambda stream, bases: driver.copy(address, source, 4, stream)


def _call(step: Record | Await | Copy) -> Player:
    if isinstance(step, Record):
        event = step.event
        return lambda stream, bases: driver.record_event(event, stream)
    if isinstance(step, Await):
        awaited = step.event
        return lambda stream, bases: driver.wait_event(stream, awaited)
    return _copy(step)


def _copy(step: Copy) -> Player:
    (to, to_offset), (source, offset) = (step.dst.base, step.dst.offset), (step.src.base, step.src.offset)
    if step.height == 1:
        width = step.width
        return lambda stream, bases: driver.copy(bases[to] + to_offset, bases[source] + offset, width, stream)
    shape = (step.width, step.height)
    return lambda stream, bases: driver.copy_rows(
        bases[to] + to_offset, step.dst_pitch, bases[source] + offset, step.src_pitch, *shape, stream
    )


@dataclass(frozen=True)
class Channel:
    """Words of one direction, for rank `rank`: see `memory`.

    `full`, `free` are functions of (rank that owns the word, other rank); `awaited` is an address of this rank's own.
    """

    rank: int
    world: int
    full: Callable[[int, int], int]
    free: Callable[[int, int], int]
    awaited: int


@dataclass(frozen=True)
class PushMoves:
    """Bytes and addresses of data that one rank pushes to all others.

    Attributes:
        inboxes: Address of each rank's inbox: [source but for that rank, `slot_bytes`].
        slot_bytes: Room for the data of one rank.
        wire: How the data for one rank is signalled.
        pieces: How it is copied: byte ranges, in order. This rank's own choice.
        base: Where the data is.
        apart: Bytes from one rank's data to the next one's; 0 where all get the same, as in a gather.
        scale_offset, scale_bytes: Where in the inbox all ranks' numbers are, and how many bytes those of one rank
            are; 0 where none travel.
        signature: Of the call, a positive int32 that unlike calls do not share.
    """

    inboxes: Sequence[int]
    slot_bytes: int
    wire: WireChunks
    pieces: Sequence[tuple[int, int]]
    base: int
    apart: int
    signature: int
    scale_offset: int = 0
    scale_bytes: int = 0

    @property
    def gathers(self) -> bool:
        return self.apart == 0


def meet_script(channel: Channel, signature: int) -> list[Step]:
    """Let all ranks come to a call, and to no other.

    FREE says that a rank is done with what was in its box, and that it has come to this call: it has the call's
    signature, and so meets no other call. So ranks copy in step, and never two from or into the same box: that would
    halve each other's speed. `watch` watches over the wait, and ends it if need be: `awaited` says for what.
    """
    rank, peers = channel.rank, _peers(channel)
    steps: list[Step] = [Post(channel.free(peer, rank), signature) for peer in peers]
    steps.append(Write(channel.awaited, signature))
    steps += [Wait(channel.free(rank, peer), signature, peer=peer, exactly=True) for peer in peers]
    return [*steps, *(Write(channel.free(rank, peer), 0) for peer in peers), Write(channel.awaited, 0)]


def push_script(channel: Channel, moves: PushMoves, ready: Callable[[int, int], Sequence[Step]]) -> list[Step]:
    """Push each destination's data, piece by piece as it becomes ready, once all ranks take part.

    A scatter's destinations are rank+1, rank+2, …; a gather's rank-1, rank-2, …, so that each rank gets rank+1's shard
    first. Pieces of a gather are copied apart for the first destination, before the first of which nothing overlaps,
    and for the last, after the last of which nothing does; for others they are one copy, since about 5 us go by between
    two. `ready(dst, piece)` precedes each piece: the wait for the kernel or the stream that computes it. After a piece
    the number of chunks that are complete is posted, FULL or LANDED; their reader clears it.
    """
    rank, world, wire = channel.rank, channel.world, moves.wire
    peers = [(rank + (-step if moves.gathers else step)) % world for step in range(1, world)]
    steps = meet_script(channel, moves.signature)
    for dst in peers:
        number = rank - (rank > dst)
        slot = moves.inboxes[dst] + number * moves.slot_bytes
        if moves.scale_bytes:
            scales = moves.inboxes[dst] + moves.scale_offset + number * moves.scale_bytes
            steps.append(Copy(Place(ABSOLUTE, scales), Place(OWN_SCALE, 0), moves.scale_bytes))
        apart = not moves.gathers or dst in (peers[0], peers[-1])
        for number, (first, end) in enumerate(moves.pieces if apart else [(0, wire.size)]):
            steps += ready(dst, number)
            source = Place(moves.base, dst * moves.apart + first)
            steps.append(Copy(Place(ABSOLUTE, slot + first), source, end - first))
            if complete := wire.complete(end):
                steps.append(Post(channel.full(dst, rank), complete))
    return steps


def arrived_script(channel: Channel, source: int, chunk: int) -> list[Step]:
    """Wait until a source's data is in the own inbox up to the end of a chunk; it comes in order."""
    return [Wait(channel.full(channel.rank, source), chunk + 1, peer=source, chunk=chunk)]


def parts_script(channel: Channel) -> list[Step]:
    """Wait until every peer's data is in the own inbox, whole."""
    return [step for peer in _peers(channel) for step in arrived_script(channel, peer, MAX_CHUNKS - 1)]


def clear_script(channel: Channel) -> list[Step]:
    """Clear all words of chunks, for the next call."""
    return [Write(channel.full(channel.rank, peer), 0) for peer in _peers(channel)]


def summed_script(channel: Channel) -> list[Step]:
    """Tell every peer that the own sum of an all-reduce is where it is pulled from."""
    return [Post(channel.full(peer, channel.rank), MAX_CHUNKS) for peer in _peers(channel)]


def share_script(channel: Channel, sums: Sequence[int], size: int) -> list[Step]:
    """Pull the others' sums of an all-reduce, once all are there, and clear the words of that.

    Ranks in step never pull from the same rank at the same time.

    Args:
        channel: Words of what is pulled.
        sums: Address of each rank's sum.
        size: Its bytes, which are one rank's part of the result.
    """
    copies = [Copy(Place(FULL, peer * size), Place(ABSOLUTE, sums[peer]), size) for peer in _peers(channel)]
    return [*parts_script(channel), *copies, *clear_script(channel)]


def _peers(channel: Channel) -> list[int]:
    return [(channel.rank + step) % channel.world for step in range(1, channel.world)]


# --- pulled --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PullMoves:
    """Bytes and addresses of a gather's copies from the others' outboxes.

    Attributes:
        outboxes: Address of each rank's outbox.
        row_bytes, outer, inner: A shard is [outer, inner] rows of `row_bytes`.
        scale_offset, scale_bytes: Where in the outbox the rows' scales are, and how many bytes of them belong to
            `inner` rows; 0 where none travel.
        chunks: How a shard is cut; the reader's own choice.
        keep_own: The own rows go into the gathered A too, which is then complete.
        keep_own_scales: The own rows' scales go there, too.
    """

    outboxes: Sequence[int]
    row_bytes: int
    outer: int
    inner: int
    scale_offset: int
    scale_bytes: int
    chunks: Chunks
    keep_own: bool
    keep_own_scales: bool = False


def pull_script(rank: int, world: int, moves: PullMoves, arrived: Callable[[int, int], Sequence[Step]]) -> list[Step]:
    """Pull the others' shards in the order rank+1, rank+2, …, once every outbox is full (`stage_kernel`).

    Ranks in step never pull from the same source at the same time; out
    of step they would halve each other's speed. Few copies, since about 5 us go by between two: chunks are copied apart
    of the first source, before the first of which nothing overlaps, and of the last, after the last of which nothing
    does. `arrived(source, chunk)` follows each: a word for a kernel, or an event for a stream.
    """
    sources = [(rank + step) % world for step in range(1, world)]
    steps: list[Step] = []
    scales = replace(moves, inner=1)  # all scales of a block are one row
    for source in sources:
        if moves.scale_bytes:
            address = moves.outboxes[source] + moves.scale_offset
            steps += _rows(scales, world, source, FULL_SCALE, address, moves.scale_bytes)
        for piece in moves.chunks.pieces(apart=source in (sources[0], sources[-1])):
            rows = moves.chunks.of(piece)
            steps += _rows(moves, world, source, FULL, moves.outboxes[source], moves.row_bytes, *rows)
            for chunk in piece:
                steps += arrived(source, chunk)
    if moves.keep_own:
        steps += _own_rows(moves, rank, world, FULL, DATA, moves.row_bytes)
    if moves.keep_own_scales:
        steps += _own_rows(scales, rank, world, FULL_SCALE, OWN_SCALE, moves.scale_bytes)
    return steps


def _own_rows(moves: PullMoves, rank: int, world: int, whole: int, own: int, row: int) -> list[Copy]:
    """The own rows of `row` bytes, from where the caller has them to their places in the gathered tensor."""
    copies = _rows(moves, world, rank, whole, 0, row)
    return [replace(copy, src=Place(own, copy.src.offset)) for copy in copies]


def _rows(
    moves: PullMoves, world: int, source: int, base: int, address: int, row: int, first: int = 0, end: int = -1
) -> list[Copy]:
    """Rows [first, end) of `source`'s shard (all by default) at `address`, to their places in the gathered tensor.

    They lie in blocks there: one copy for each of a few, since such calls can be recorded, and one for many together.
    """
    inner = moves.inner
    end = moves.outer * inner if end < 0 else end
    if moves.outer == 1:
        to, start = Place(base, (source * inner + first) * row), Place(ABSOLUTE, address + first * row)
        return [Copy(to, start, (end - first) * row)]
    blocks = range(first // inner, end // inner)  # chunks of several blocks end at block borders
    size = inner * row
    places = [Place(base, (block * world + source) * size) for block in blocks]
    sources = [Place(ABSOLUTE, address + block * size) for block in blocks]
    if len(blocks) <= FEW_BLOCKS:
        return [Copy(*pair, size) for pair in zip(places, sources, strict=True)]
    return [Copy(places[0], sources[0], size, len(blocks), world * size, size)]
