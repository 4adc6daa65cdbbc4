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
ARRIVALS, COUNTS = 4, 16  # words of one rank
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

    chunk_tiles, own_tiles: row tiles of a chunk. ks: of each pair of a scatter; of a gather, one. value: awaited.
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
    scaled: bool = False
    own: bool = True
    inbox: bool = False
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
        if self.gathers:
            return peer * ARRIVALS + row_tile // self.chunk_tiles
        return peer * COUNTS + row_tile // (self.own_tiles if peer == self.rank else self.chunk_tiles)


def _gemm(call: Gemm) -> dict[int, list[Event]]:
    """What each program does. Tiles are (rank, row tile of that rank's, column)."""
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
    ones, done = torch.ones(p * w * q + n), torch.zeros(1, dtype=torch.int32)
    diary = Diary(words.data_ptr())
    nothing, mode = [None] * 4, int(call.scaled)
    ks = [*call.ks, 0, 0, 0][:4]
    numbers = [p, q, *ks, n, 0, 0, 0, call.rank, w, call.chunk_tiles, call.own_tiles, call.value]
    args = [*(a + nothing)[:4], *(b + nothing)[:4], c, None, None, None, *[ones] * 12, words, done, *numbers]
    constants = {
        "GATHER": call.gathers, "OWN": own_only, "INBOX": call.inbox, "COUNT": len(call.ks),
        "CHUNKS": ARRIVALS if call.gathers else COUNTS, "B_K_MAJOR": True, "A_SCALE": mode, "SCALE_TRAVELS": False,
        "B_SCALE": mode, "BIAS": 0, "OUT": tl.bfloat16, "IMPRECISE": None, "BM": BM, "BN": BN, "BK": BK, "SPLIT": 2,
        "GROUP_M": min(8, call.chunk_tiles), "PROGRAMS": call.programs, "STAMPS": False, "FACTOR": 1.0,
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
    return diary.programs


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
GATHERS = [Gemm(True, inbox=inbox, **shape) for shape in SHAPES for inbox in (False, True)] + [
    Gemm(True, own=False, value=7),
    Gemm(True, own=False, value=7, programs=1, outer=1, inner=64, chunk_tiles=2),
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
    """Of one program: before each tile it asks for that tile's chunk, which it awaits if it has not before."""
    awaited: set[int] = set()
    asked: list[int] = []
    for event in events:
        if event[0] == "wait":
            _, word, value, known = event
            asked.append(word)
            if not known:
                assert value == call.value
                assert word not in awaited
                assert not call.own or word // ARRIVALS != call.rank
                awaited.add(word)
        elif event[0] == "store":
            peer, row, _ = event[1]
            assert asked == [call.word(peer, row)]
            assert set(asked) <= awaited or (call.own and peer == call.rank)
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
    for call, programs in ran(_gemm, calls):
        assert stored(programs) == tiles(call)
        for events in programs.values():
            check(call, events)


# --- the reduction --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reduction:
    """Of `size` elements, in parts of `part` and chunks of `chunk`; tiles: of a part, and of all."""

    size: int
    part: int
    chunk: int
    tiles: tuple[int, int]
    rank: int = 1
    world: int = 3
    programs: int = 2


def _reduction(call: Reduction) -> tuple[dict[int, list[Event]], int]:
    """What each program does, and how many words are left set."""
    import torch
    from asynctp_kernels.cuda import copy_kernels as kernels

    words = torch.full((COUNTS + 8 * ARRIVALS,), 9, dtype=torch.int32)
    diary = Diary(words.data_ptr())
    own, out = torch.ones(call.size), torch.empty(call.size)
    received, done = torch.ones((call.world - 1) * call.size), torch.zeros(1, dtype=torch.int32)
    numbers = [call.size, call.part, call.chunk, call.tiles[1], call.tiles[0], 1.0, call.rank]
    args = [own, received, out, words[:COUNTS], words[COUNTS:], done, *numbers]
    constants = {
        "WORLD": call.world, "MAX_CHUNKS": ARRIVALS, "MAX_OWN": COUNTS, "ALIGN": 1, "BLOCK": 8,
        "PROGRAMS": call.programs,
    }  # fmt: skip
    with mock.patch.object(kernels, "await_word", diary.await_word):
        kernels.reduce_kernel[(call.programs,)](*args, **constants)
    assert bool((out == call.world).all())
    return diary.programs, int(words.count_nonzero())


REDUCTIONS = [
    Reduction(64, 16, 32, (6, 24)),
    Reduction(60, 16, 32, (6, 21)),
    Reduction(30, 30, 30, (4, 4), programs=5),
    Reduction(160, 10, 80, (2, 32), rank=0, world=2),
    Reduction(90, 30, 30, (0, 0), rank=2),
]


def test_a_reduction_awaits_its_tiles_and_all_that_comes() -> None:
    """In every program, before it reads a part: the tiles of that, and the chunk of every other rank that it is in."""
    for call, (programs, left) in ran(_reduction, REDUCTIONS):
        assert left == 0, "it leaves all words cleared"
        assert sorted(programs) == list(range(call.programs))
        for events in programs.values():
            check_reduction(call, events)


def check_reduction(call: Reduction, events: list[Event]) -> None:
    """Of one program; the count of a part is what it waits for last."""
    awaited: set[int] = set()
    part = 0
    for _, word, value, known in events:
        if word >= COUNTS:
            assert value == 1
            awaited |= set() if known else {word}
            continue
        first = part * call.part
        assert (word, known) == (part, False)
        assert value == min(call.tiles[0], call.tiles[1] - part * call.tiles[0])
        others = [source for source in range(call.world) if source != call.rank]
        assert {COUNTS + source * ARRIVALS + first // call.chunk for source in others} <= awaited
        part += 1
    assert part == ceil(call.size / call.part)
    assert not {word for word in awaited if (word - COUNTS) // ARRIVALS == call.rank}, "its own rows do not come"
