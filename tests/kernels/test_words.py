"""When kernels wait, and for what, and when they count: their own code, interpreted, with each of these written down.

Results say little of that here. The interpreter runs one kernel after the other, so that nobody sees a word too early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from math import ceil
from typing import Any
from unittest import mock

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.ranks

BM, BN, BK = 16, 32, 32
CHUNKS, COUNTS = 4, 16  # of what one rank sends, each in a count; words of one rank's tiles
#: what a program does, in order: ("wait", word, value, known), ("multiply",), ("store", tile), ("count", word, number)
Event = tuple[Any, ...]


def number(value: Any) -> int:
    """A scalar of the interpreter's."""
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


class Diary:
    """What each program of a kernel does, of what this file asks about. Words are named by how far behind `first`."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.programs: dict[int, list[Event]] = {}

    def note(self, *event: Any) -> None:
        from triton.runtime.interpreter import interpreter_builder

        self.programs.setdefault(int(interpreter_builder.grid_idx[0]), []).append(event)

    def word(self, address: Any) -> int:
        return (number(address) - self.first) // 4

    def await_word(self, word: Any, value: Any, known: Any) -> int:
        self.note("wait", self.word(word), number(value), bool(number(known)))
        return 0

    def publish(self, counter: Any, many: Any) -> None:
        self.note("count", self.word(counter), number(many))


def _each(rank: int, world: int, run: Callable[[Any], Any], calls: list[Any]) -> list[Any]:
    return [run(call) for call in calls]


def ran(run: Callable[[Any], Any], calls: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Each call, and what `run` gives of it, in a process whose kernels are interpreted."""
    (found,) = run_ranks(1, _each, run, calls, timeout_s=300)
    return zip(calls, found, strict=True)


# --- the GEMM -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gemm:
    """A GEMM of `world` ranks' rows, `inner` in each of `outer` blocks, as rank `rank` runs it.

    chunk_tiles, own_tiles: row tiles of a scatter's chunk. chunk_rows: rows of a gather's. ks: of each pair of a
    scatter; of a gather, one. own: the own rows are apart. inbox: what has come has no place for them. value: awaited,
    where every rank's rows have words.
    """

    gathers: bool
    rank: int = 1
    world: int = 3
    programs: int = 3
    outer: int = 1
    inner: int = 80
    n: int = 64
    ks: tuple[int, ...] = (64,)
    chunk_tiles: int = 4
    own_tiles: int = 2
    chunk_rows: int = 20
    scaled: bool = False
    own: bool = True
    inbox: bool = False
    clears: bool = True
    value: int = 1

    @property
    def row_tiles(self) -> int:
        """Of one rank."""
        return self.outer * ceil(self.inner / BM)

    @property
    def steps(self) -> int:
        """Over K, of one tile."""
        return sum(ceil(k / BK) for k in self.ks)

    def word(self, peer: int, row_tile: int) -> int:
        """That of the tile's chunk."""
        if self.gathers and self.own:
            return peer
        if self.gathers:
            return peer * CHUNKS + self.chunk(row_tile)
        return peer * COUNTS + row_tile // (self.own_tiles if peer == self.rank else self.chunk_tiles)

    def chunk(self, row_tile: int) -> int:
        """Of a gather, the one that the tile's last row is in."""
        block, tile = divmod(row_tile, ceil(self.inner / BM))
        last = block * self.inner + min((tile + 1) * BM, self.inner) - 1
        return min(last // self.chunk_rows, CHUNKS - 1)


def _gemm(call: Gemm) -> tuple[dict[int, list[Event]], list[int], int]:
    """What each program does, which words are left set, and how many calls are counted.

    Tiles are (rank, row tile of that rank's, column).
    """
    import torch
    import triton.language as tl
    from asynctp_kernels.cuda import gemm_kernels as kernels
    from triton.tools.tensor_descriptor import TensorDescriptor

    p, w, q, n = call.outer, call.world, call.inner, call.n

    def described(shape: list[int], block: list[int]) -> Any:
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        return TensorDescriptor(tensor, shape, list(tensor.stride()), block)

    own_only = call.gathers and call.own
    a = [described([p if own_only else p * w, q, k], [1, BM, BK]) for k in call.ks]
    if own_only:
        a.append(described([p * (w - call.inbox), q, call.ks[0]], [1, BM, BK]))
    b = [described([n, k], [BN, BK]) for k in call.ks]
    c = described([p * w, q, n], [1, BM, BN // 2])
    words = torch.full((w * COUNTS,), call.value, dtype=torch.int32)
    ones, done = torch.ones(p * w * q + n), torch.zeros(2, dtype=torch.int32)
    diary = Diary(words.data_ptr())
    nothing, mode = [None] * 4, int(call.scaled)
    ks = [*call.ks, 0, 0, 0][:4]
    chunk_size = call.chunk_rows if call.gathers else call.chunk_tiles
    numbers = [p, q, *ks, n, 0, 0, 0, call.rank, w, chunk_size, call.own_tiles, call.value]
    args = [*(a + nothing)[:4], *(b + nothing)[:4], c, None, None, None, *[ones] * 12, words, done, *numbers]
    constants = {
        "GATHER": call.gathers, "OWN": own_only, "INBOX": call.inbox, "CLEARS": call.clears, "COUNT": len(call.ks),
        "CHUNKS": CHUNKS if call.gathers else COUNTS, "B_K_MAJOR": True, "A_SCALE": mode, "SCALE_TRAVELS": False,
        "B_SCALE": mode, "BIAS": 0, "OUT": tl.bfloat16, "ROUNDED": tl.bfloat16, "IMPRECISE": None, "BM": BM, "BN": BN,
        "BK": BK, "SPLIT": 2, "GROUP_M": min(8, call.chunk_tiles), "PROGRAMS": call.programs, "STAMPS": False,
    }  # fmt: skip
    multiply, store_tile = kernels.multiply, kernels.store_tile

    def multiplied(*args: Any) -> Any:
        diary.note("multiply")
        return multiply(*args)

    def stored(c: Any, block: Any, row: Any, col: Any, *rest: Any) -> None:
        outer, peer = divmod(number(block), w) if call.gathers else divmod(number(block), p)[::-1]
        diary.note("store", (peer, outer * ceil(q / BM) + number(row) // BM, number(col)))
        store_tile(c, block, row, col, *rest)

    replaced = {
        "await_word": diary.await_word, "publish": diary.publish, "multiply": multiplied, "store_tile": stored,
    }  # fmt: skip
    with mock.patch.multiple(kernels, **replaced):
        kernels.gemm_kernel[(call.programs,)](*args, **constants)
    return diary.programs, words.nonzero().flatten().tolist(), int(done[1])


SHAPES: list[dict[str, Any]] = [
    {},
    {"programs": 1},
    {"programs": 40, "n": 32},  # more than there are tiles
    {"outer": 2, "inner": 40, "chunk_tiles": 3, "own_tiles": 3},
    {"rank": 0, "world": 2, "inner": 100, "n": 96, "own_tiles": 4},
    {"rank": 2, "inner": 15, "chunk_tiles": 1, "own_tiles": 1, "programs": 2},
    *({"ks": (BK * steps,)} for steps in (1, 3, 4, 6)),
]
SCATTERS = [Gemm(False, **shape) for shape in SHAPES] + [
    Gemm(False, ks=(32, 64)),
    Gemm(False, ks=(32, 64), scaled=True),
    Gemm(False, ks=(32, 64), scaled=True, rank=0, world=2, inner=64, programs=16),  # as many as there are tiles
    Gemm(False, ks=(64,), scaled=True, programs=5),
]
CUTS: list[dict[str, Any]] = [
    *({"chunk_rows": rows} for rows in (1, 15, 16, 17, 32, 79, 80, 200)),
    {"outer": 3, "inner": 20, "chunk_rows": 15},
    {"outer": 2, "inner": 40, "chunk_rows": 17, "clears": False},
]
GATHERS = [
    *(Gemm(True, inbox=inbox, **shape) for shape in SHAPES for inbox in (False, True)),
    *(Gemm(True, inbox=number % 2 == 0, **cut) for number, cut in enumerate(CUTS)),
    Gemm(True, own=False, value=7),
    Gemm(True, own=False, value=7, programs=1, outer=1, inner=64, chunk_rows=33),
]


def tiles(call: Gemm) -> Counter[tuple[int, int, int]]:
    """All that a call has."""
    return Counter(product(range(call.world), range(call.row_tiles), range(0, call.n, BN)))


def stored(programs: dict[int, list[Event]]) -> Counter[Any]:
    return Counter(event[1] for events in programs.values() for event in events if event[0] == "store")


def check_counts(call: Gemm, events: list[Event]) -> None:
    """Of one program: its tiles of a chunk together, behind all of them, among the next products where it can be."""
    assert not [event for event in events if event[0] == "wait"], "the GEMM of a scatter waits for nothing"
    words = [call.word(*event[1][:2]) for event in events if event[0] == "store"]
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    at_once = call.scaled and len(call.ks) > 1
    uncounted = products = 0  # tiles, and products since the last one was stored
    for event in events:
        if event[0] == "multiply":
            products += 1
        elif event[0] == "store":
            uncounted, products = uncounted + 1, 0
        elif event[2]:
            assert (event[1], event[2]) == runs.pop(0)
            assert event[2] == uncounted
            assert products == (0 if at_once or not runs else min(3, call.steps))
            uncounted = 0
    assert runs == []


def check_waits(call: Gemm, events: list[Event]) -> None:
    """Of one program: before each tile it asks for that tile's chunk, and awaits it unless it just has."""
    awaited: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    asked: list[tuple[int, int]] = []
    for event in events:
        if event[0] == "wait":
            _, word, value, known = event
            asked.append((word, value))
            own = call.own and word == call.rank
            assert known == (own or (word, value) == before)
            before = word, value
            awaited |= set() if known else {(word, value)}
        elif event[0] == "store":
            peer, row, _ = event[1]
            assert asked == [(call.word(peer, row), call.chunk(row) + 1 if call.own else call.value)]
            assert set(asked) <= awaited or own
            asked = []
        else:
            assert event[0] == "multiply"


@pytest.mark.parametrize(
    ("calls", "check"),
    [
        pytest.param(SCATTERS, check_counts, id="a scatter counts its tiles of a chunk behind their stores"),
        pytest.param(GATHERS, check_waits, id="a gather awaits the chunk of each tile"),
    ],
)
def test_words_of_a_gemm(calls: list[Gemm], check: Callable[[Gemm, list[Event]], None]) -> None:
    for call, (programs, left, counted) in ran(_gemm, calls):
        assert stored(programs) == tiles(call)
        consumed = set(range(8)) if call.gathers and call.own and call.clears else set()
        assert set(left) == set(range(call.world * COUNTS)) - consumed, "words of all ranks are cleared, and no others"
        assert counted == (call.gathers and call.own)
        for events in programs.values():
            check(call, events)


# --- the reduction --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reduction:
    """Of `size` elements, in parts of `part`, and chunks of `chunk` that need not fit; tiles: of a part, and of all."""

    size: int
    part: int
    chunk: int
    tiles: tuple[int, int]
    rank: int = 1
    world: int = 3
    programs: int = 2


def _reduction(call: Reduction) -> tuple[dict[int, list[Event]], int, int]:
    """What each program does, how many words are left set, and how many calls are counted."""
    import torch
    from asynctp_kernels.cuda import copy_kernels as kernels

    words = torch.full((COUNTS + 8,), 9, dtype=torch.int32)
    diary = Diary(words.data_ptr())
    own, out = torch.ones(call.size), torch.empty(call.size)
    received, done = torch.ones((call.world - 1) * call.size), torch.zeros(2, dtype=torch.int32)
    numbers = [call.size, call.part, call.chunk, call.tiles[1], call.tiles[0], 1.0, call.rank]
    args = [own, received, out, words[:COUNTS], words[COUNTS:], done, *numbers]
    constants = {
        "WORLD": call.world, "MAX_CHUNKS": CHUNKS, "MAX_OWN": COUNTS, "ALIGN": 1, "BLOCK": 8,
        "PROGRAMS": call.programs,
    }  # fmt: skip
    with mock.patch.object(kernels, "await_word", diary.await_word):
        kernels.reduce_kernel[(call.programs,)](*args, **constants)
    assert bool((out == call.world).all())
    return diary.programs, int(words.count_nonzero()), int(done[1])


REDUCTIONS = [
    Reduction(64, 16, 32, (6, 24)),
    Reduction(60, 16, 32, (6, 21)),
    Reduction(30, 30, 30, (4, 4), programs=5),
    Reduction(160, 10, 80, (2, 32), rank=0, world=2),
    Reduction(90, 30, 30, (0, 0), rank=2),
    Reduction(60, 20, 15, (2, 6)),
    Reduction(60, 16, 25, (6, 21)),
    Reduction(60, 60, 15, (4, 4), rank=0),
    Reduction(7, 7, 2, (1, 1)),  # the last chunk is the fourth of five
]


def test_a_reduction_awaits_its_tiles_and_all_that_comes() -> None:
    """In every program, before it reads a part: the tiles of that, and the chunk of every other rank that it is in."""
    for call, (programs, left, counted) in ran(_reduction, REDUCTIONS):
        assert (left, counted) == (0, 1), "it leaves all words cleared, and counts the call"
        assert sorted(programs) == list(range(call.programs))
        for events in programs.values():
            check_reduction(call, events)


def check_reduction(call: Reduction, events: list[Event]) -> None:
    """Of one program; the count of a part is what it waits for last."""
    awaited: set[tuple[int, int]] = set()
    part = 0
    for _, word, value, known in events:
        if word >= COUNTS:
            awaited |= set() if known else {(word - COUNTS, value)}
            continue
        end = min((part + 1) * call.part, call.size)
        assert (word, known) == (part, False)
        assert value == min(call.tiles[0], call.tiles[1] - part * call.tiles[0])
        chunks = min(ceil(end / call.chunk), CHUNKS)
        assert {(source, chunks) for source in range(call.world) if source != call.rank} <= awaited
        part += 1
    assert part == ceil(call.size / call.part)
    assert call.rank not in {source for source, _ in awaited}, "its own rows do not come"


# --- what the host and the kernels cut alike ----------------------------------------------------------------------
def test_a_tile_waits_for_enough() -> None:
    """However a sender cuts its pieces, what they say is there when a tile's word is."""
    from asynctp_kernels.cuda.tiles import MAX_CHUNKS, WireChunks

    for rows, row_bytes in product((1, 2, 3, 5, 7, 64, 96, 100), (16, 48, 128)):
        wire = WireChunks(rows * row_bytes)
        chunk_rows = max(wire.chunk // row_bytes, 1)
        for wanted, last in product((1, 2, 3, 4), range(rows)):
            pieces = wire.pieces(wanted)
            assert [first for first, _ in pieces] == [0, *(end for _, end in pieces)][:-1]
            assert pieces[-1][1] == wire.size
            said = [(end, wire.complete(end)) for _, end in pieces]
            assert said[-1] == (wire.size, MAX_CHUNKS)
            if wire.chunk < row_bytes:
                continue  # `fused` refuses such rows
            for awaited in (min(last // chunk_rows, MAX_CHUNKS - 1) + 1, wire.covering((last + 1) * row_bytes) + 1):
                come = min(end for end, complete in said if complete >= awaited)
                assert come >= (last + 1) * row_bytes, "its last row has come"
