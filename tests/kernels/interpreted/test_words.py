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
from torch import Tensor

pytestmark = pytest.mark.ranks

BM, BN, BK = 16, 32, 32
CHUNKS, COUNTS = 4, 16  # what a gather's source is cut into, and words of each rank of a scatter
RANKS = 8  # that there are words for
WORD = 9  # what words hold, and what lies after them
CALLS = 5  # counted before this one
#: what a program does, in order: ("wait", word, value, known), ("multiply",), ("store", tile), ("count", word, number),
#: ("read", rank, first element, last one)
Event = tuple[Any, ...]


def number(value: Any) -> int:
    """A scalar of the interpreter's."""
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


class Diary:
    """What each program of a kernel does, of what this file asks about. A word's name is its place in `words`."""

    def __init__(self, words: Tensor) -> None:
        self.words, self.before = words, words.clone()
        self.programs: dict[int, list[Event]] = {}

    def note(self, *event: Any) -> None:
        from triton.runtime.interpreter import interpreter_builder

        self.programs.setdefault(int(interpreter_builder.grid_idx[0]), []).append(event)

    def word(self, address: Any) -> int:
        return (number(address) - self.words.data_ptr()) // 4

    def await_word(self, word: Any, value: Any, known: Any) -> int:
        place = self.word(word)
        assert self.words[place] == self.before[place], "a word is cleared before all programs have read it"
        self.note("wait", place, number(value), bool(number(known)))
        return 0

    def publish(self, counter: Any, many: Any) -> None:
        self.note("count", self.word(counter), number(many))


@dataclass(frozen=True)
class Found:
    """What each program did, and what is left: words, and the counts of programs that are done and of calls."""

    programs: dict[int, list[Event]]
    words: list[int]
    done: list[int]


def _each(rank: int, world: int, run: Callable[[Any], Any], calls: list[Any]) -> list[Any]:
    return [run(call) for call in calls]


def ran(run: Callable[[Any], Found], calls: list[Any]) -> Iterator[tuple[Any, Found]]:
    """Each call, and what `run` gives of it, in a process whose kernels are interpreted."""
    (found,) = run_ranks(1, _each, run, calls, timeout_s=300)
    return zip(calls, found, strict=True)


# --- the GEMM -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gemm:
    """A GEMM of `world` ranks' rows, `inner` in each of `outer` blocks, as rank `rank` runs it.

    chunk: rows of a gather's, row tiles of a scatter's, where own rows have parts of `own_tiles`. ks: of each pair of a
    scatter; of a gather, one. own: rows of this rank need not be awaited; else each of `world` chunks of rows has a
    word, and is there once that is `value`, as in `async_input`. programs: of a share.
    """

    gathers: bool
    rank: int = 1
    world: int = 3
    programs: int = 3
    shares: int = 1
    outer: int = 1
    inner: int = 80
    n: int = 64
    ks: tuple[int, ...] = (64,)
    chunk: int = 4
    own_tiles: int = 2
    group: int = 8
    scaled: bool = False
    own: bool = True
    inbox: bool = False
    clears: bool = False
    value: int = WORD

    @property
    def row_tiles(self) -> int:
        """Of one rank."""
        return self.outer * ceil(self.inner / BM)

    @property
    def steps(self) -> int:
        """Over K, of one tile."""
        return sum(ceil(k / BK) for k in self.ks)

    def word(self, peer: int, row_tile: int) -> int:
        """The word that counts a scatter's tile."""
        return peer * COUNTS + row_tile // (self.own_tiles if peer == self.rank else self.chunk)

    def needed(self, peer: int, row_tile: int) -> tuple[int, int]:
        """The word of a gather's tile, and what it is once all rows of the tile are there: chunks come in order."""
        if not self.own:
            return peer, self.value
        p, q = divmod(row_tile, ceil(self.inner / BM))
        rows = [p * self.inner + row for row in range(q * BM, min((q + 1) * BM, self.inner))]
        return peer, max(min(row // self.chunk, CHUNKS - 1) + 1 for row in rows)


def _gemm(call: Gemm) -> Found:
    """Tiles are (rank, row tile of that rank's, column)."""
    import torch
    import triton.language as tl
    from asynctp_kernels.cuda.gemm import gemm_kernels as kernels
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
    chunks = COUNTS if not call.gathers else CHUNKS if call.own else 1
    words = torch.full((max(w * chunks, RANKS) + RANKS,), WORD, dtype=torch.int32)
    ones, done = torch.ones(p * w * q + n), torch.tensor([0, CALLS, WORD], dtype=torch.int32)
    diary = Diary(words)
    nothing, mode = [None] * 4, int(call.scaled)
    ks = [*call.ks, 0, 0, 0][:4]
    numbers = [p, q, *ks, n, 0, 0, 0, call.rank, w, call.chunk, call.own_tiles, call.value, 0]
    args = [*(a + nothing)[:4], *(b + nothing)[:4], c, None, None, None, *[ones] * 12, words, done, *numbers]
    constants = {
        "GATHER": call.gathers, "OWN": own_only, "INBOX": call.inbox, "CLEARS": call.clears, "COUNT": len(call.ks),
        "CHUNKS": chunks, "B_K_MAJOR": True, "A_SCALE": mode, "SCALE_TRAVELS": False, "B_SCALE": mode, "BIAS": 0,
        "OUT": tl.bfloat16, "ROUNDED": tl.bfloat16, "IMPRECISE": None, "BM": BM, "BN": BN, "BK": BK, "SPLIT": 2,
        "GROUP_M": call.group if call.gathers else min(call.group, call.chunk), "SLOTS": call.programs,
        "PROGRAMS": call.programs * call.shares, "FACTOR": 1.0, "PADDED": False,
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
        kernels.gemm_kernel[(call.programs * call.shares,)](*args, **constants)
    return Found(diary.programs, words.tolist(), done.tolist())


SHAPES: list[dict[str, Any]] = [
    {},
    {"programs": 1},
    {"programs": 40, "n": 32},  # more than there are tiles
    {"outer": 2, "inner": 40, "chunk": 3, "own_tiles": 3},
    {"rank": 0, "world": 2, "inner": 100, "n": 96, "own_tiles": 4},
    {"rank": 2, "inner": 15, "chunk": 1, "own_tiles": 1, "programs": 2},
    *({"programs": programs, "shares": shares} for programs, shares in ((1, 4), (2, 3), (5, 2), (40, 3))),
    *({"ks": (BK * steps,)} for steps in (1, 3, 4, 6)),
]
SCATTERS = [Gemm(False, **shape) for shape in SHAPES] + [
    Gemm(False, ks=(32, 64)),
    Gemm(False, ks=(32, 64), scaled=True),
    Gemm(False, ks=(32, 64), scaled=True, rank=0, world=2, inner=64, programs=16),  # as many as there are tiles
    Gemm(False, ks=(64,), scaled=True, programs=5),
]
#: a gather's chunks: of whole tiles, or not; rounded down, so that the last one has more; of blocks; fewer than four
ROWS: list[dict[str, Any]] = [
    {"chunk": 20},
    {"chunk": 20, "group": 1, "programs": 1},
    {"chunk": 16, "inner": 64, "n": 96, "programs": 2},
    {"chunk": 19, "programs": 40, "n": 32},  # more than there are tiles
    {"chunk": 20, "outer": 2, "inner": 40, "group": 2},
    {"chunk": 30, "outer": 3, "inner": 40, "programs": 5},
    {"chunk": 40, "rank": 0, "world": 2, "inner": 100, "n": 96},
    {"chunk": 3, "rank": 2, "inner": 15, "programs": 2},
    {"chunk": 80},
]
GATHERS = [Gemm(True, **rows, inbox=inbox, clears=inbox) for rows in ROWS for inbox in (False, True)] + [
    Gemm(True, chunk=20, inbox=True),
    Gemm(True, own=False, inner=40, value=7),
    Gemm(True, own=False, inner=16, value=7, programs=1, world=5),
    Gemm(True, own=False, inner=24, value=7, programs=4, world=10, rank=6, group=1),  # more than there are ranks
]


def tiles(call: Gemm) -> Counter[tuple[int, int, int]]:
    """All that a call has."""
    return Counter(product(range(call.world), range(call.row_tiles), range(0, call.n, BN)))


def stored(programs: dict[int, list[Event]]) -> Counter[Any]:
    return Counter(event[1] for events in programs.values() for event in events if event[0] == "store")


def check_counts(call: Gemm, events: list[Event]) -> None:
    """Of one program: its tiles of a chunk together, after all of them, among the next products where it can be."""
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
    """Of one program: each tile, before its first product, asks once for what covers its rows.

    It awaits that unless it was the last that was awaited, or the rows are this rank's own.
    """
    asked: tuple[int, int] | None = None  # of the tile under way
    here: tuple[int, int] | None = None  # of the tile before
    awaited: set[tuple[int, int]] = set()
    for event in events:
        if event[0] == "wait":
            _, word, value, known = event
            assert asked is None, "a tile asks twice"
            asked = word, value
            own = call.own and word == call.rank
            assert known == (own or asked == here), "a chunk is awaited twice, or never"
            awaited |= set() if known else {asked}
            here = asked
        elif event[0] == "multiply":
            assert asked is not None, "rows are read before they are awaited"
            assert asked in awaited or (call.own and asked[0] == call.rank)
        elif event[0] == "store":
            assert asked == call.needed(*event[1][:2])
            asked = None
        else:
            assert event[0] == "count"
            assert event[2] == 0, "the GEMM of a gather counts nothing"


def check_left(call: Gemm, found: Found) -> None:
    """Words that nobody else reads are cleared at the end, and a gather of ranks' rows counts the call."""
    counts = call.gathers and call.own
    cleared = RANKS if call.clears else 0
    assert found.words == [0] * cleared + [WORD] * (len(found.words) - cleared)
    assert found.done == [0, CALLS + counts, WORD]


@pytest.mark.parametrize(
    ("calls", "check"),
    [
        pytest.param(SCATTERS, check_counts, id="a scatter counts its tiles of a chunk after their stores"),
        pytest.param(GATHERS, check_waits, id="a gather awaits what covers the rows of each tile"),
    ],
)
def test_words_of_a_gemm(calls: list[Gemm], check: Callable[[Gemm, list[Event]], None]) -> None:
    for call, found in ran(_gemm, calls):
        assert stored(found.programs) == tiles(call)
        for events in found.programs.values():
            check(call, events)
        check_left(call, found)


# --- the reduction --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reduction:
    """Of `size` elements, in parts of `part` and, of other ranks, chunks of `chunk`.

    tiles: of a part, and of all.
    """

    size: int
    part: int
    chunk: int
    tiles: tuple[int, int]
    rank: int = 1
    world: int = 3
    programs: int = 2
    shares: bool = False

    @property
    def parts(self) -> list[tuple[int, int]]:
        """First element of each, and the end."""
        return [(first, min(first + self.part, self.size)) for first in range(0, self.size, self.part)]

    def needed(self, source: int, first: int, last: int) -> tuple[int, int]:
        """The word of some elements of a rank's, and what it is once they are there: chunks come in order."""
        if source == self.rank:
            part = last // self.part
            assert part == first // self.part
            return part, min(self.tiles[0], self.tiles[1] - part * self.tiles[0])
        return COUNTS + source, min(last // self.chunk, CHUNKS - 1) + 1


def _reduction(call: Reduction) -> Found:
    """Each element tells whose it is, and which."""
    import torch
    from asynctp_kernels.cuda.gemm import copy_kernels as kernels

    words = torch.full((COUNTS + 2 * RANKS,), WORD, dtype=torch.int32)
    diary = Diary(words)
    of_ranks = 1.0 + torch.arange(call.world * call.size, dtype=torch.float32).view(call.world, call.size)
    received = torch.cat([of_ranks[: call.rank], of_ranks[call.rank + 1 :]])
    out, done = torch.empty(call.size), torch.tensor([0, CALLS, WORD], dtype=torch.int32)
    numbers = [call.size, call.part, call.chunk, call.tiles[1], call.tiles[0], 2.0, call.rank]
    own, sums = of_ranks[call.rank].clone(), torch.zeros(call.size)
    out = own if call.shares else out  # an all-reduce is in the place of the product
    args = [own, received, out, sums, words[:COUNTS], words[COUNTS:], done, *numbers]
    constants = {
        "WORLD": call.world, "MAX_CHUNKS": CHUNKS, "MAX_OWN": COUNTS, "SHARES": call.shares, "ALIGN": 1, "BLOCK": 8,
        "PROGRAMS": call.programs,
    }  # fmt: skip
    exact_f32 = kernels.exact_f32

    def read(values: Any) -> Any:
        places = [int(value) - 1 for value in values.handle.data.ravel() if value]  # others are masked
        for source, several in groupby(places, lambda place: place // call.size):
            elements = [place % call.size for place in several]
            diary.note("read", source, min(elements), max(elements))
        return exact_f32(values)

    with mock.patch.multiple(kernels, await_word=diary.await_word, exact_f32=read):
        kernels.reduce_kernel[(call.programs,)](*args, **constants)
    assert torch.equal(out, 2 * of_ranks.sum(0))
    assert torch.equal(sums, out if call.shares else torch.zeros(call.size))
    return Found(diary.programs, words.tolist(), done.tolist())


REDUCTIONS = [
    Reduction(64, 16, 16, (6, 24)),
    Reduction(60, 16, 16, (6, 21)),
    Reduction(60, 24, 20, (6, 15)),  # parts end within chunks
    Reduction(70, 8, 20, (2, 18), world=4, rank=3),
    Reduction(30, 30, 8, (4, 4), programs=5),
    Reduction(160, 10, 40, (2, 32), rank=0, world=2),
    Reduction(90, 30, 19, (3, 9), rank=2),  # the last chunk has more
    Reduction(90, 30, 24, (0, 0), rank=2),
    Reduction(40, 40, 160, (1, 1), rank=0),  # all are in the first chunk
    Reduction(70, 8, 20, (2, 18), world=4, rank=3, shares=True),
    Reduction(90, 30, 19, (3, 9), rank=2, shares=True),
]


def test_a_reduction_awaits_its_tiles_and_all_that_comes() -> None:
    """In every program, before it reads a part: the tiles of that, and what every other rank sends for it."""
    for call, found in ran(_reduction, REDUCTIONS):
        cleared = COUNTS + RANKS
        assert found.words == [0] * cleared + [WORD] * (len(found.words) - cleared), "it leaves all its words cleared"
        assert found.done == [0, CALLS + 1, WORD]
        assert sorted(found.programs) == list(range(call.programs))
        for events in found.programs.values():
            check_reduction(call, events)
        check_read(call, found.programs)


def check_reduction(call: Reduction, events: list[Event]) -> None:
    """Of one program: all that it reads was awaited, each of that once; and it awaits every part, in order."""
    awaited: set[tuple[int, int]] = set()
    for kind, *event in events:
        if kind == "wait":
            word, value, known = event
            if not known:
                assert (word, value) not in awaited, "something is awaited twice"
                awaited.add((word, value))
        else:
            assert kind == "read"
            word, value = call.needed(*event)
            assert any(each[0] == word and each[1] >= value for each in awaited), "it is read before it is awaited"
    wanted = [
        call.needed(source, first, end - 1)
        for first, end in call.parts
        for source in [*(source for source in range(call.world) if source != call.rank), call.rank]
    ]
    unknown = [(word, value) for kind, word, value, *known in events if kind == "wait" and known == [False]]
    assert unknown == list(dict.fromkeys(wanted)), "it awaits something else, or in another order"


def check_read(call: Reduction, programs: dict[int, list[Event]]) -> None:
    """Each rank's elements are read once, by all programs together."""
    read = Counter[tuple[int, int]]()
    for events in programs.values():
        for kind, *event in events:
            if kind == "read":
                source, first, last = event
                read.update(product([source], range(first, last + 1)))
    assert read == Counter(product(range(call.world), range(call.size)))
