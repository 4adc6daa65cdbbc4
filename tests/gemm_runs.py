"""What `gemm_kernel` as Triton has lowered it does, of calls of several sizes: what is multiplied, stored, awaited and
counted, and that nothing is too early. See `lowered`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any

from asynctp_kernels.signals import IS_INTERPRETED
from cuda_stubs import Prepared
from lowered import Event, Products, parse

Tile = tuple[int, int, int, int]  # rank, row tile of that rank's, number of the product, column


@dataclass(frozen=True)
class Run:
    """Sizes of a call. columns: tiles of each product, the last of them narrower; steps: over K, of each pair."""

    rank: int
    world: int
    inner: int
    chunk_tiles: int
    own_tiles: int
    outer: int = 1
    columns: int = 2
    steps: int = 3


RUNS = (
    Run(rank=1, world=2, inner=15 * 128 + 8, chunk_tiles=4, own_tiles=2),
    Run(rank=0, world=3, inner=130, chunk_tiles=2, own_tiles=2, outer=3, columns=1, steps=1),
    Run(rank=2, world=3, inner=3 * 128, chunk_tiles=3, own_tiles=1, columns=4, steps=5),
    Run(rank=0, world=2, inner=20, chunk_tiles=1, own_tiles=1, columns=1, steps=2),  # programs without a tile
)
VALUE = 3  # of a word that is awaited


class Gemm:
    """One kernel and one run of it."""

    def __init__(self, prepared: Prepared, run: Run) -> None:
        assert not IS_INTERPRETED
        self.prepared, self.run = prepared, run
        self.constants = prepared.constants
        self.tiles_q = ceil(run.inner / self["BM"])
        self.row_tiles = run.outer * self.tiles_q
        # a chunk of the caller's own (`async_input`) is what a rank is elsewhere
        self.chunk_tiles = run.chunk_tiles if self["CHUNKS"] > 1 else self.row_tiles
        columns, depth = run.columns * self["BN"] - 8, run.steps * self["BK"] - 16
        count = self["COUNT"]
        self.numbers = {
            **{f"k{i}": depth if i < (1 if self["GATHER"] else count) else 0 for i in range(4)},
            **{f"n{i}": columns if i < (count if self["GATHER"] else 1) else 0 for i in range(4)},
            "outer": run.outer,
            "inner": run.inner,
            "rank": run.rank,
            "world": run.world,
            "chunk_tiles": self.chunk_tiles,
            "own_tiles": run.own_tiles,
            "value": VALUE,
        }

    def __getitem__(self, name: str) -> Any:
        return self.constants[name]

    def arguments(self) -> list[int | str]:
        """As `lowered.Kernel` takes them: `words` is at 0, so that words have their numbers."""
        found: list[int | str] = []
        for name, argument in zip(self.prepared.names, self.prepared.args, strict=True):
            if argument is None:
                continue
            if hasattr(argument, "block_shape"):
                found.append(name)
            elif isinstance(argument, int):
                found.append(self.numbers[name])
            else:
                found.append(0 if name == "words" else 1 << 20)
        return found

    def tiles(self) -> Iterator[Tile]:
        """All."""
        products = range(self["COUNT"] if self["GATHER"] else 1)
        columns = range(0, self.run.columns * self["BN"], self["BN"])
        yield from product(range(self.run.world), range(self.row_tiles), products, columns)

    def stored(self, event: Event) -> tuple[Tile, int]:
        """(tile, which part of its columns)."""
        _, c, (block, row, col), _ = event
        p, peer = divmod(block, self.run.world) if self["GATHER"] else divmod(block, self.run.outer)[::-1]
        width = self["BN"] // self["SPLIT"]
        col, part = col // self["BN"] * self["BN"], col % self["BN"] // width
        return (peer, p * self.tiles_q + row // self["BM"], int(c[1]), col), part

    def products(self, tile: Tile) -> Products:
        """What a tile is the sum of."""
        peer, row_tile, number, col = tile
        p, row = row_tile // self.tiles_q, row_tile % self.tiles_q * self["BM"]
        pairs = [("a0", p * self.run.world + peer, f"b{number}")]
        if not self["GATHER"]:
            pairs = [(f"a{i}", p * self.run.world + peer, f"b{i}") for i in range(self["COUNT"])]
        elif self["OWN"]:
            slot = (peer - (peer > self.run.rank)) * self.run.outer + p
            others = ("a1", slot if self["INBOX"] else p * self.run.world + peer, f"b{number}")
            pairs = [("a0", p, f"b{number}") if peer == self.run.rank else others]
        return frozenset(
            ((a, (block, row, at)), (b, (col, at) if self["B_K_MAJOR"] else (at, col)))
            for a, block, b in pairs
            for at in range(0, self.run.steps * self["BK"], self["BK"])
        )

    def word(self, peer: int, row_tile: int) -> int:
        """The number of the word of a tile's chunk."""
        own = peer == self.run.rank and not self["GATHER"]
        height = self.run.own_tiles if own else self.chunk_tiles
        return int(peer * self["CHUNKS"] + row_tile // height)

    def awaited(self, event: Event) -> int | None:
        """The word that a load of A comes behind, if any."""
        _, name, (block, row, _) = event
        if self["OWN"] and name == "a0":
            return None
        if self["INBOX"]:
            slot, p = divmod(block, self.run.outer)
            peer = slot + (slot >= self.run.rank)
        else:
            p, peer = divmod(block, self.run.world)
        return self.word(peer, p * self.tiles_q + row // self["BM"])

    def check(self, events: list[Event]) -> Counter[Tile]:
        """Of one program: each event comes behind what it needs. Gives the tiles that it has stored."""
        found, parts, made = Counter[Tile](), 0, 0
        uncounted, awaited = Counter[int](), set[int]()
        for event in events:
            if event[0] == "store":
                tile, part = self.stored(event)
                assert event[3] == self.products(tile), "a tile is the sum of other products"
                assert part == parts
                parts = (parts + 1) % self["SPLIT"]
                if parts == 0:
                    found[tile] += 1
                    made += len(event[3])
                    uncounted[self.word(*tile[:2])] += 1
            elif event[0] == "count":
                assert not self["GATHER"]
                uncounted[event[1]] -= event[2]
                assert uncounted[event[1]] >= 0, "a tile is counted before it is stored, or as another's"
            elif event[0] == "wait":
                assert self["GATHER"]
                assert event[2] == VALUE
                awaited |= set() if event[3] else {event[1]}
            elif event[0] == "load" and event[1].startswith("a") and self["GATHER"]:
                word = self.awaited(event)
                assert word is None or word in awaited, "rows are loaded before they are awaited"
        assert self["GATHER"] or not +uncounted, "a tile is never counted"
        assert events.count(("multiply",)) == made, "something is multiplied twice, or for nothing"
        return found


def check_runs(prepared: Prepared, ttgir: str) -> None:
    """Every run, by all programs."""
    kernel = parse(ttgir)
    for run in RUNS:
        gemm = Gemm(prepared, run)
        arguments = gemm.arguments()
        found = Counter[Tile]()
        for program in range(gemm["PROGRAMS"]):
            found += gemm.check(kernel.run(program, arguments))
        assert found == Counter(gemm.tiles())
