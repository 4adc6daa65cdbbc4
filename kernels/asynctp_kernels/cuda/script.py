"""What the copy stream does in one call, and what streams await of what is pushed, as data: steps, in order.

Scripts are built without a GPU, by pure functions of ranks, sizes and addresses (`gather_script`, `push_script`), so
the same scripts that a GPU plays are explored exhaustively by a test. `compile_script` turns one into driver calls:
neighbouring waits and writes become one batch.

Addresses that change from call to call are `Place`s relative to a base: number 0 is absolute, the others are filled in
when the script is played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .driver import Wait as Wait
from .driver import Write as Write
from .machine import driver
from .tiles import Chunks

ABSOLUTE, OWN, FULL, FULL_SCALE, OWN_SCALE = range(5)
FEW_BLOCKS = 4  # of rows, that are copied one by one


@dataclass(frozen=True)
class Post:
    """Store 1 in another rank's int32 at `address`; otherwise as `Write`."""

    address: int


@dataclass(frozen=True)
class Place:
    """`offset` bytes behind base number `base`."""

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


def compile_script(
    steps: Iterable[Step], peer_writes: bool, one: int, wait_for_peer: Callable[[Wait], Player] | None = None
) -> Player:
    """The function `play(stream, bases)` that enqueues the script.

    Args:
        steps: The script.
        peer_writes: Whether a stream memory operation may write to another GPU; if not, a `Post` copies 4 bytes.
        one: Address of a constant int32 1, the source of such copies.
        wait_for_peer: How to enqueue a wait for another rank; None: by a stream memory operation, as all others.
    """
    calls: list[Player] = []
    batch: list[Wait | Write] = []

    def flush() -> None:
        if batch:
            ops = driver.MemOps(batch)
            calls.append(lambda stream, bases: ops.enqueue(stream))
            batch.clear()

    for step in steps:
        if isinstance(step, Wait) and step.peer is not None and wait_for_peer is not None:
            flush()
            calls.append(wait_for_peer(step))
        elif isinstance(step, (Wait, Write)):
            batch.append(step)
        elif isinstance(step, Post) and peer_writes:
            batch.append(Write(step.address, 1))
        else:
            flush()
            calls.append(_call(step, one))
    flush()

    def play(stream: int, bases: Sequence[int]) -> None:
        for call in calls:
            call(stream, bases)

    return play


def _call(step: Step, one: int) -> Player:
    if isinstance(step, Post):
        address = step.address
        return lambda stream, bases: driver.copy(address, one, 4, stream)
    if isinstance(step, Record):
        event = step.event
        return lambda stream, bases: driver.record_event(event, stream)
    if isinstance(step, Await):
        awaited = step.event
        return lambda stream, bases: driver.wait_event(stream, awaited)
    assert isinstance(step, Copy)
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
    """Words of one direction, for rank `rank`: see `memory`. Functions of (rank that owns the word, index)."""

    rank: int
    world: int
    full: Callable[[int, int], int]
    free: Callable[[int, int], int]


@dataclass(frozen=True)
class GatherMoves:
    """Bytes and addresses of a gather's copies.

    Attributes:
        outboxes: address of each rank's outbox.
        row_bytes, outer, inner: a shard is [outer, inner] rows of `row_bytes`.
        scale_offset, scale_bytes: where in the outbox the rows' scales are, and how many bytes of them belong to
            `inner` rows; 0 where none travel.
        chunks: how a shard is cut.
        keep_own: the own rows go into the gathered A too, which is then complete.
        keep_own_scales: likewise the own rows' scales.
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


def gather_script(
    rank: int, world: int, moves: GatherMoves, arrived: Callable[[int, int], Sequence[Step]]
) -> list[Step]:
    """Pull the others' shards in the order rank+1, rank+2, …, once every outbox is full (`stage_kernel`).

    Ranks in step never pull from the same source at the same time; out of step they would halve each other's speed.
    Few copies, since about 5 us go by between two: chunks are copied apart of the first source, before the first of
    which nothing is hidden, and of the last, behind the last of which nothing is. `arrived(source, chunk)` is what
    follows for each: a word for a kernel, or an event for a stream.
    """
    steps: list[Step] = []
    scales = replace(moves, inner=1)  # all scales of a block are one row
    for step in range(1, world):
        source = (rank + step) % world
        if moves.scale_bytes:
            address = moves.outboxes[source] + moves.scale_offset
            steps += _rows(scales, world, source, FULL_SCALE, address, moves.scale_bytes)
        for piece in moves.chunks.pieces(apart=step in (1, world - 1)):
            rows = moves.chunks.of(piece)
            steps += _rows(moves, world, source, FULL, moves.outboxes[source], moves.row_bytes, *rows)
            for chunk in piece:
                steps += arrived(source, chunk)
    if moves.keep_own:
        steps += _own_rows(moves, rank, world, FULL, OWN, moves.row_bytes)
    if moves.keep_own_scales:
        steps += _own_rows(scales, rank, world, FULL_SCALE, OWN_SCALE, moves.scale_bytes)
    return steps


def _own_rows(moves: GatherMoves, rank: int, world: int, whole: int, own: int, row: int) -> list[Copy]:
    """The own rows of `row` bytes, from where the caller has them to their places in the gathered tensor."""
    copies = _rows(moves, world, rank, whole, 0, row)
    return [replace(copy, src=Place(own, copy.src.offset)) for copy in copies]


def _rows(
    moves: GatherMoves, world: int, source: int, base: int, address: int, row: int, first: int = 0, end: int = -1
) -> list[Copy]:
    """Rows [first, end) of `source`'s shard (all by default) at `address`, to their places in the gathered tensor.

    They lie in blocks there: one copy for each of a few, since such calls can be recorded, and one for many together.
    """
    inner = moves.inner
    end = moves.outer * inner if end < 0 else end
    if moves.outer == 1:
        return [Copy(Place(base, (source * inner + first) * row), Place(ABSOLUTE, address + first * row),
                     (end - first) * row)]  # fmt: skip
    blocks = range(first // inner, end // inner)  # chunks of several blocks end at block borders
    size = inner * row
    places = [Place(base, (block * world + source) * size) for block in blocks]
    sources = [Place(ABSOLUTE, address + block * size) for block in blocks]
    if len(blocks) <= FEW_BLOCKS:
        return [Copy(*pair, size) for pair in zip(places, sources, strict=True)]
    return [Copy(places[0], sources[0], size, len(blocks), world * size, size)]


@dataclass(frozen=True)
class PushMoves:
    """Bytes and addresses of what one rank pushes to all others.

    Attributes:
        inboxes: address of each rank's inbox: [source but for that rank, `slot_bytes`].
        slot_bytes: room for what comes from one rank.
        row_bytes: of what is pushed.
        chunks: how the rows for one rank are cut.
        base: where they are.
        apart: bytes from one rank's rows to the next one's; 0 where all get the same, as in a gather.
        scale_offset, scale_bytes: where in the inbox the scales of all rows are, and how many bytes those of one rank
            are; 0 where none travel.
    """

    inboxes: Sequence[int]
    slot_bytes: int
    row_bytes: int
    chunks: Chunks
    base: int
    apart: int
    scale_offset: int = 0
    scale_bytes: int = 0

    @property
    def gathers(self) -> bool:
        return self.apart == 0


def push_script(
    channel: Channel, moves: PushMoves, ready: Callable[[int, int], Sequence[Step]], max_chunks: int
) -> list[Step]:
    """Push each destination's chunks as they become ready, once all ranks take part.

    FREE says that a rank's inbox is free and that it has come to this call; so ranks push in step, and never two into
    the same inbox (see `gather_script`). A scatter's destinations are rank+1, rank+2, …; a gather's rank-1, rank-2, …,
    so that each rank gets rank+1's shard first, and chunks are copied apart where `gather_script` does so.
    `ready(dst, chunk)` is what precedes each chunk: the wait for the kernel or the stream that computes it. The words
    of chunks, FULL or LANDED, are cleared by who waits for them.
    """
    rank, world = channel.rank, channel.world
    peers = [(rank + (-step if moves.gathers else step)) % world for step in range(1, world)]
    steps: list[Step] = [Post(channel.free(peer, rank)) for peer in peers]
    steps += [Wait(channel.free(rank, peer), peer=peer) for peer in peers]
    steps += [Write(channel.free(rank, peer), 0) for peer in peers]
    for dst in peers:
        number = rank - (rank > dst)
        slot = moves.inboxes[dst] + number * moves.slot_bytes
        if moves.scale_bytes:
            scales = moves.inboxes[dst] + moves.scale_offset + number * moves.scale_bytes
            steps.append(Copy(Place(ABSOLUTE, scales), Place(OWN_SCALE, 0), moves.scale_bytes))
        for piece in moves.chunks.pieces(apart=not moves.gathers or dst in (peers[0], peers[-1])):
            first, end = moves.chunks.of(piece)
            for chunk in piece:
                steps += ready(dst, chunk)
            at, size = first * moves.row_bytes, (end - first) * moves.row_bytes
            steps.append(Copy(Place(ABSOLUTE, slot + at), Place(moves.base, dst * moves.apart + at), size))
            steps += [Post(channel.full(dst, rank * max_chunks + chunk)) for chunk in piece]
    return steps


def chunk_script(channel: Channel, source: int, chunk: int, max_chunks: int) -> list[Step]:
    """Wait until a chunk is in the own inbox, and clear its word, which is set again only behind the next FREE."""
    word = channel.full(channel.rank, source * max_chunks + chunk)
    return [Wait(word, peer=source, chunk=chunk), Write(word, 0)]


def parts_script(channel: Channel, chunks: Chunks, max_chunks: int) -> list[Step]:
    """Wait until every peer's push is in the own inbox, whole."""
    rank, world = channel.rank, channel.world
    peers = [(rank + step) % world for step in range(1, world)]
    return [
        Wait(channel.full(rank, peer * max_chunks + chunk), peer=peer, chunk=chunk)
        for chunk in range(len(chunks))
        for peer in peers
    ]
