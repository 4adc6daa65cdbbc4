"""Steps of the copy stream in one call, and waits of streams for pushed data, as data, in order.

Scripts are built without a GPU, by pure functions of ranks, sizes and addresses (`push_script`), so the same scripts
that a GPU plays are explored exhaustively by a test. `compile_script` turns one into driver calls:
neighbouring waits and writes become one batch.

Addresses that change from call to call are `Place`s relative to a base: number 0 is absolute, the others are filled in
when the script is played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .driver import Wait as Wait
from .driver import Write as Write
from .machine import driver
from .tiles import MAX_CHUNKS, WireChunks

ABSOLUTE, DATA, OWN_SCALE = range(3)


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
    """Copy `size` bytes."""

    dst: Place
    src: Place
    size: int


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
            calls.append(lambda stream, bases: ops.enqueue(stream))
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
    (to, to_offset), (source, offset) = (step.dst.base, step.dst.offset), (step.src.base, step.src.offset)
    size = step.size
    return lambda stream, bases: driver.copy(bases[to] + to_offset, bases[source] + offset, size, stream)


@dataclass(frozen=True)
class Channel:
    """Words of one direction, for rank `rank`: see `memory`. Functions of (rank that owns the word, index)."""

    rank: int
    world: int
    full: Callable[[int, int], int]
    free: Callable[[int, int], int]
    doing: int


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


def push_script(channel: Channel, moves: PushMoves, ready: Callable[[int, int], Sequence[Step]]) -> list[Step]:
    """Push each destination's data, piece by piece as it becomes ready, once all ranks take part.

    FREE says that a rank's inbox is free and that it has come to this call: it has the call's signature, and so meets
    no other call. So ranks push in step, and never two into the same inbox: that would halve each other's speed. DOING
    has the signature for so long, for who watches over the wait (`watch`).

    A scatter's destinations are rank+1, rank+2, …; a gather's rank-1, rank-2, …, so that each rank gets rank+1's shard
    first. Pieces of a gather are copied apart for the first destination, before the first of which nothing overlaps,
    and for the last, after the last of which nothing does; for others they are one copy, since about 5 us go by between
    two. `ready(dst, piece)` precedes each piece: the wait for the kernel or the stream that computes it. The words of
    chunks, FULL or LANDED, are cleared by their readers.
    """
    rank, world, wire = channel.rank, channel.world, moves.wire
    peers = [(rank + (-step if moves.gathers else step)) % world for step in range(1, world)]
    steps: list[Step] = [Write(channel.doing, moves.signature)]
    steps += [Post(channel.free(peer, rank), moves.signature) for peer in peers]
    steps += [Wait(channel.free(rank, peer), moves.signature, peer=peer, exactly=True) for peer in peers]
    steps += [Write(channel.free(rank, peer), 0) for peer in peers]
    steps.append(Write(channel.doing, 0))
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
            steps += [Post(channel.full(dst, rank * MAX_CHUNKS + chunk)) for chunk in wire.ended(first, end)]
    return steps


def arrived_script(channel: Channel, source: int, chunk: int) -> list[Step]:
    """Wait until a source's data is in the own inbox up to the end of a chunk; it comes in order."""
    return [Wait(channel.full(channel.rank, source * MAX_CHUNKS + chunk), peer=source, chunk=chunk)]


def parts_script(channel: Channel) -> list[Step]:
    """Wait until every peer's data is in the own inbox, whole."""
    peers = [(channel.rank + step) % channel.world for step in range(1, channel.world)]
    return [step for peer in peers for chunk in range(MAX_CHUNKS) for step in arrived_script(channel, peer, chunk)]


def clear_script(channel: Channel) -> list[Step]:
    """Clear all words of chunks, for the next call."""
    peers = [(channel.rank + step) % channel.world for step in range(1, channel.world)]
    return [Write(channel.full(channel.rank, peer * MAX_CHUNKS + c), 0) for peer in peers for c in range(MAX_CHUNKS)]
