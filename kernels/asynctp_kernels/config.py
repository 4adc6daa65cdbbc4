"""Tile sizes. One table; `interpreted_tiles` is the only row so far."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CHUNKS = 4


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a kernel, and into how many signalled chunks a rank's rows are cut at most."""

    block_m: int
    block_n: int
    block_k: int
    chunks: int = MAX_CHUNKS


def interpreted_tiles() -> Tiles:
    """Small blocks: tests on tiny shapes still have several tiles and chunks, ragged ones included."""
    return Tiles(block_m=16, block_n=32, block_k=32)
