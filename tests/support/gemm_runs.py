"""What `gemm_kernel` as Triton has lowered it does, of calls of several sizes: what is multiplied, stored, awaited and
counted, and that nothing is too early. See `lowered`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any

from cuda_stubs import Prepared, is_descriptor
from lowered import COUNTED, Event, Place, Polynomial, Tensor, monomial, parse
from lowered import number as factor

Tile = tuple[int, int, int, int]  # rank, row tile of that rank's, number of the product, column
Part = tuple[Tile, int]  # of its columns


@dataclass(frozen=True)
class Run:
    """Sizes of a call.

    chunk_tiles: of a scatter; a gather's chunks are of rows, and end within tiles. columns: tiles of the first product,
    the last of which is narrower; steps: over K, of the first pair. The others have more: `MORE`.
    """

    rank: int
    world: int
    inner: int
    chunk_tiles: int
    own_tiles: int
    outer: int = 1
    columns: int = 2
    steps: int = 3


RUNS = (
    # several tiles of a chunk
    Run(rank=1, world=2, inner=15 * 128 + 8, chunk_tiles=4, own_tiles=2, columns=8, steps=2),
    Run(rank=1, world=3, inner=130, chunk_tiles=2, own_tiles=2, outer=3),
    Run(rank=0, world=3, inner=300, chunk_tiles=2, own_tiles=1, columns=1, steps=1),
    Run(rank=2, world=3, inner=3 * 128, chunk_tiles=3, own_tiles=1, columns=4, steps=5),
    Run(rank=0, world=2, inner=20, chunk_tiles=1, own_tiles=1, columns=1, steps=2),  # programs without a tile
)
#: more steps than a kernel whose warps have tasks of their own has stages, twice
LONG = Run(rank=1, world=2, inner=15 * 128 + 8, chunk_tiles=4, own_tiles=2, columns=4, steps=14)
MORE = (0, 2, 1, 4)  # tiles of columns, or steps, of each product or pair
VALUE = 3  # of a word that is awaited
WORDS = 8  # ranks that there are words for
DONE = -4  # where programs that are done are counted, and then calls


class Gemm:
    """One kernel and one run of it."""

    def __init__(self, prepared: Prepared, run: Run) -> None:
        self.prepared, self.run = prepared, run
        self.constants = prepared.constants
        self.tiles_q = ceil(run.inner / self["BM"])
        self.row_tiles = run.outer * self.tiles_q
        # of a gather's source, rounded down, so that the last chunk has the rest
        self.chunk_size = max(run.outer * run.inner // self["CHUNKS"], 1) if self["GATHER"] else run.chunk_tiles
        several, one = MORE[: self["COUNT"]], MORE[:1]
        # a gather has several products of one K, a scatter several pairs of one N
        self.columns = [run.columns + more for more in (several if self["GATHER"] else one)]
        self.steps = [run.steps + more for more in (one if self["GATHER"] else several)]
        unused = [0] * len(MORE)
        widths = [count * self["BN"] - 8 for count in self.columns] + unused
        depths = [count * self["BK"] - 16 for count in self.steps] + unused
        self.numbers = {
            **{f"k{i}": depths[i] for i in range(len(MORE))},
            **{f"n{i}": widths[i] for i in range(len(MORE))},
            "outer": run.outer,
            "inner": run.inner,
            "rank": run.rank,
            "world": run.world,
            "chunk_size": self.chunk_size,
            "own_tiles": run.own_tiles,
            "value": VALUE,
            "real_rows": run.world * run.inner - 37,
        }

    def __getitem__(self, name: str) -> Any:
        return self.constants[name]

    @property
    def prefetches(self) -> bool:
        """Scales of columns are prefetched."""
        return not self.specialized and not self["GATHER"] and (self["COUNT"] == 1 or self["A_SCALE"] == 0)

    @property
    def specialized(self) -> bool:
        """Of `pingpong_kernels`: warps have tasks of their own."""
        return "STAGES" in self.constants

    def arguments(self) -> list[Any]:
        """As `lowered.Kernel` takes them: `words` is at 0, so that words have their numbers."""
        found: list[Any] = []
        for name, argument in zip(self.prepared.names, self.prepared.args, strict=True):
            if argument is None:
                continue
            if is_descriptor(argument):
                found.append(name)
            elif isinstance(argument, int):
                found.append(self.numbers[name])
            else:
                found.append({"words": 0, "done_ptr": DONE}.get(name, Place(name)))
        return found

    def parts(self) -> Iterator[Part]:
        """All."""
        for number, count in enumerate(self.columns):
            columns = range(0, count * self["BN"], self["BN"])
            tiles = product(range(self.run.world), range(self.row_tiles), [number], columns)
            yield from product(tiles, range(self["SPLIT"]))

    def stored(self, event: Event) -> Part:
        """What is stored, where it belongs."""
        _, c, (block, row, col), _, half = event
        p, peer = divmod(block, self.run.world) if self["GATHER"] else divmod(block, self.run.outer)[::-1]
        part, within = divmod(col % self["BN"], self["BN"] // self["SPLIT"])
        assert (row % self["BM"], within) == (0, 0), "a tile is stored at another place"
        assert part == (half or 0), "a half is stored as the other"
        return (peer, p * self.tiles_q + row // self["BM"], int(c[1]), col - col % self["BN"]), part

    def wanted(self, tile: Tile, part: int) -> Polynomial:
        """What a tile has to be; numbers of columns are read for each part where warps have tasks of their own."""
        peer, row_tile, number, col = tile
        p, row = row_tile // self.tiles_q, row_tile % self.tiles_q * self["BM"]
        block = p * self.run.world + peer
        rows = (block * self.run.inner + row, self.run.inner - row)
        first = col + (part * self["BN"] // self["SPLIT"] if self.specialized else 0)
        cols = (first, self.numbers[f"n{number}"] - first)
        a_names, a_scales = [f"a{i}" for i in range(len(self.steps))], [f"a_scale{i}" for i in range(len(self.steps))]
        of_b = [number] if self["GATHER"] else range(self["COUNT"])
        if self["OWN"]:
            others = peer != self.run.rank
            slot = (peer - (peer > self.run.rank)) * self.run.outer + p
            block = (slot if self["INBOX"] else block) if others else p
            a_names = ["a1" if others else "a0"]
            if self["SCALE_TRAVELS"]:
                a_scales = ["a_scale1" if others else "a_scale0"]
                rows = (block * self.run.inner + row, self.run.inner - row)
        found: Polynomial = Counter()
        for a, a_scale, i, steps in zip(a_names, a_scales, of_b, self.steps, strict=True):
            scales = _scale(a_scale, self["A_SCALE"], rows) + _scale(f"b_scale{i}", self["B_SCALE"], cols)
            for at in range(0, steps * self["BK"], self["BK"]):
                b_place = (f"b{i}", (col, at) if self.constants.get("B_K_MAJOR", True) else (at, col))
                found[monomial(("product", (a, (block, row, at)), b_place), *scales)] += 1
        if self["BIAS"]:
            found[monomial((f"bias{number}", *cols))] += 1
        if self["PADDED"]:
            left = self.numbers["real_rows"] - peer * self.run.inner - row
            found = (Tensor(found) * Tensor(Counter([monomial(("real", left))]))).sum
        return found if self["FACTOR"] == 1 else (Tensor(found) * factor(self["FACTOR"])).sum

    def word(self, peer: int, row_tile: int) -> int:
        """The number of the word that counts a scatter's tile."""
        height = self.run.own_tiles if peer == self.run.rank else self.chunk_size
        return int(peer * self["CHUNKS"] + row_tile // height)

    def needed(self, peer: int, row_tile: int) -> tuple[int, int]:
        """The word of a gather's tile and what it is then: how many chunks of a source are there, up to its last row.

        A chunk of the caller's own (`async_input`) has a word of its own, and is what a rank is elsewhere.
        """
        if not self["OWN"]:
            return peer, VALUE
        p, q = divmod(row_tile, self.tiles_q)
        last = p * self.run.inner + min((q + 1) * self["BM"], self.run.inner) - 1
        return peer, min(int(last // self.chunk_size), self["CHUNKS"] - 1) + 1

    def awaited(self, event: Event) -> tuple[int, int] | None:
        """The word that a load, or read, of what was gathered comes after, if any, and its value."""
        if not self["GATHER"] or event[0] not in ("load", "read") or event[1][0] != "a":
            return None
        name = event[1]
        block, row = event[2][:2] if event[0] == "load" else divmod(event[2], self.run.inner)
        if event[0] == "read" and name != "a_scale1":
            return None
        if self["OWN"] and name == "a0":
            return None
        if self["INBOX"]:
            slot, p = divmod(block, self.run.outer)
            peer = slot + (slot >= self.run.rank)
        else:
            p, peer = divmod(block, self.run.world)
        return self.needed(peer, p * self.tiles_q + row // self["BM"])

    def check(self, program: int, events: list[Event]) -> Counter[Part]:
        """Of one program: each event comes behind what it needs. Gives what it has stored."""
        found, products = Counter[Part](), 0
        uncounted, awaited, last_awaited = Counter[int](), set[tuple[int, int]](), (-1, 0)
        prefetched, read = set[Any](), set[Any]()
        for event in events:
            if event[0] == "store":
                tile, part = self.stored(event)
                assert event[3] == self.wanted(tile, part), "a tile is something else"
                found[tile, part] += 1
                if part + 1 == self["SPLIT"]:
                    assert all(found[tile, each] for each in range(part)), "the last part comes before others"
                    products += sum(self.steps)
                    uncounted[0 if self["GATHER"] else self.word(*tile[:2])] += 1
            elif event[0] == "count":
                assert not self["GATHER"], "a gather counts"
                uncounted[event[1]] -= event[2]
                assert uncounted[event[1]] >= 0, "a tile is counted before it is stored, or as another's"
            elif event[0] == "wait":
                assert self["GATHER"], "a scatter waits"
                _, word, value, known = event
                assert value in range(1, self["CHUNKS"] + 1) if self["OWN"] else value == VALUE, "no such value is set"
                if not known:
                    assert (word, value) != last_awaited, "a chunk is awaited twice"
                    assert not self["OWN"] or word != self.run.rank, "own rows are awaited"
                    awaited.add((word, value))
                    last_awaited = (word, value)
            elif event[0] == "prefetch":
                prefetched.add(event[1:])
            elif event[0] == "read" and event[1] == "b_scale0" and event[3] is not None and self.prefetches:
                assert event[1:] in prefetched, "scales that are read are not prefetched"
                read.add(event[1:])
            elif (needed := self.awaited(event)) is not None:
                # numbers may be read by other warps than those that wait, which these must know of
                known = event[4] if event[0] == "read" and self.specialized else awaited
                assert needed in known, "rows are loaded before they are awaited"
        assert self["GATHER"] or not +uncounted, "a tile is never counted"
        assert events.count(("multiply",)) == products, "something is multiplied twice, or for nothing"
        assert prefetched == read, "what is not read is prefetched"
        self.check_cleared(program, events)
        return found

    def check_cleared(self, program: int, events: list[Event]) -> None:
        """Each program says that it is done behind all else. The last one leaves that count cleared, and the words that
        nobody else reads, and counts the call.

        The words of `async_input` are the caller's.
        """
        ends: list[Event] = [("barrier",), ("add", DONE, 1)] if self["OWN"] else []
        if self["OWN"] and program == self["PROGRAMS"] - 1:
            ends += [("set", DONE, 1, 0), ("get", DONE + 1), ("set", DONE + 1, 1, COUNTED + 1)]
            ends += [("set", 0, WORDS, 0)] if self["CLEARS"] else []
        said = [at for at, event in enumerate(events) if event[0] in ("barrier", "add", "set", "get")]
        assert [events[at] for at in said] == ends, "words are not cleared, or the caller's are"
        assert said == list(range(len(events) - len(ends), len(events))), "words are cleared before the last is awaited"


def _scale(name: str, mode: int, places: tuple[int, int]) -> list[Any]:
    """What is read of a scale: nothing, one number, or those of rows or columns."""
    if mode == 0:
        return []
    return [(name, *places) if mode == 2 else (name, 0, None)]


def check_runs(prepared: Prepared, ttgir: str) -> None:
    """Every run, by all programs."""
    kernel = parse(ttgir)
    for seed, run in enumerate([*RUNS, LONG] if kernel.specialized else RUNS):
        gemm = Gemm(prepared, run)
        assert kernel.specialized == gemm.specialized
        arguments = gemm.arguments()
        found = Counter[Part]()
        for program in range(gemm["PROGRAMS"]):
            found += gemm.check(program, kernel.run(program, arguments, seed))
        wanted = Counter(gemm.parts())
        assert found == wanted, f"missing: {wanted - found}, too many: {found - wanted}"
