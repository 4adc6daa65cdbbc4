"""Tile sizes of the persistent GEMM: one table, and how a rank's rows are cut into chunks."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch

MAX_CHUNKS = 4  # of what one rank sends to another
MAX_OWN = 16  # of a scatter's own rows
IMPRECISE = 128  # terms that fp8's precise sums leave to the tensor core's own, in every tile


@dataclass(frozen=True)
class Tiles:
    """Block sizes, and how the compiler pipelines them.

    Source: `docs/results/2026-11-21-h200x4/gemm.txt`: 128 x 256 is `gemm_kernels`' best tile from two waves on.
    `docs/results/2026-11-25-h100x1`: stored in two halves, tiles leave room for one stage or two more, which makes
    128 x 256 up to 5 % faster (`gemm.txt`) and 128 x 128 up to 10 % (`publish.txt`). For precise sums
    `docs/results/2026-11-23-h200x2/precise.txt`: two steps of 128 between two barriers are a quarter to a third faster
    than one.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    #: into how many runs of columns a tile is cut to be stored: 1 or 2
    split: int = 1
    #: bound on fp8's running sums in the tensor core; None where there are none or where they may be fast
    imprecise: int | None = None
    #: that a thread may have, where there are 8 warps or more: 56 are left for a thread of 8 other warps
    registers: int = 200
    #: each warp has one thing to do (`pingpong_kernels`), instead of all warps everything (`gemm_kernels`)
    pingpong: bool = False

    @property
    def stored(self) -> list[int]:
        """The block that is stored at once, as a descriptor of [blocks, rows, columns] has it."""
        return [1, self.block_m, self.block_n // self.split]


def pingpong(itemsize: int) -> Tiles:
    """Tiles of `pingpong_kernels`, for operands of so many bytes an element.

    6 stages of 32 KB and half a tile for each multiplier are what shared memory has room for. 128 registers at the
    launch, of 12 warps, leave 64 for each thread of 8 other warps.
    """
    return Tiles(128, 128, 128 // itemsize, warps=12, stages=6, group_m=4, split=2, registers=128, pingpong=True)


def pingpong_is_faster(small: int, large: int, depth: int, fp8: bool) -> bool:
    """For so many waves of 128 x 128, and of 128 x 256, where it can run: few that large tiles fill worse, or two
    instead of one, which leaves SMs without a tile if not all are.

    Of fp8 from three on, if sums are not long: it overlaps the ends of tiles, which have a large part in such. With
    long ones many as well, but not more than 60, which take up to 15 % more time on an H100.

    Source: `docs/results/2026-11-29-h200x1/tiles.jsonl`; `docs/results/2026-11-25-h100x1/pingpong.jsonl`;
    `docs/results/2026-11-25-h100x2`: `pingpong.txt`, `pingpong-few.txt`, and `pingpong-bf16.txt`: many waves of 16 bits
    take 6 % less or 9 % more, from run to run.
    """
    few = 3 <= small < min(14, 2 * large) or (small, large) == (2, 1)
    return few or (fp8 and (14 <= small <= 60 or (small >= 3 and depth < 7168)))


def tiles_for(
    dtype: torch.dtype,
    precise_sums: bool,
    rows: int,
    columns: int,
    depth: int,
    programs: int,
    several: bool = False,
    out_itemsize: int = 2,
    late: bool = False,
) -> Tiles:
    """The tiles for operands of `dtype`, sums of `depth` and an output of `rows` x `columns` on `programs` SMs.

    several: matmuls are scaled, and then added: to a second accumulator, which leaves no registers for 256 columns,
    and 56 for each of 4 other warps. Nor do precise sums leave any for 256 columns. Tiles so small have twice the
    depth, unless elements of 4 bytes (`out_itemsize`) need its shared memory on their way out; and those of 256 columns
    have no room for such elements at all.

    late: rows come more slowly than small tiles multiply them, so that a tile's time goes by after the last ones.
    """
    fp8 = dtype.itemsize == 1
    block_k = 128 if fp8 else 64
    if fp8 and (precise_sums or several):
        block_k, stages = (256, 3) if out_itemsize == 2 else (128, 4)
        bound, registers = IMPRECISE if precise_sums else None, 224 if several else 200
        return Tiles(128, 128, block_k, warps=8, stages=stages, imprecise=bound, registers=registers)
    large = waves(rows, columns, 128, 256, programs)
    small = waves(rows, columns, 128, 128, programs)
    if out_itemsize == 2 and pingpong_is_faster(small, large, depth, fp8):
        return pingpong(dtype.itemsize)
    # a small tile takes little more than half the time of a large one
    if out_itemsize > 2 or late or small * 1.08 < large * 2:
        return Tiles(128, 128, block_k, warps=4, stages=6 if out_itemsize == 2 else 5, split=2)
    return Tiles(128, 256, block_k, warps=8, stages=4, split=2)


def waves(rows: int, columns: int, block_m: int, block_n: int, programs: int) -> int:
    """How many tiles the busiest SM computes."""
    return ceil(ceil(rows / block_m) * ceil(columns / block_n) / programs)


#: waves from which on a GEMM beside other kernels has one more share (`shares_for`)
_SHARES_FROM = (2, 4, 16)


def shares_for(count: int) -> int:
    """Into how many shares a GEMM of `count` waves is dealt out where other groups' kernels may run beside it.

    A CTA that finds its SM taken by such a kernel starts when others end their share. With one share that is the end of
    the GEMM, which may take up to twice the time so. Each share costs the time that an SM takes to start. Source:
    `docs/results/2026-11-28-h200x4/beside.jsonl`: 0 to 2 % more time, and beside NCCL 10 to 28 % less. Only 6 waves and
    more were measured.
    """
    return 1 + bisect.bisect_right(_SHARES_FROM, count)


#: in the interpreter: small, so that tiny calls have several tiles and chunks, ragged ones included
INTERPRETED_TILES = Tiles(16, 64, 64, warps=1, stages=1, group_m=2, split=2)


@dataclass(frozen=True)
class FewRowsTiles:
    """Block sizes of `few_rows_kernels`, and how many stages its loads are ahead. swapped: as `SWAP` there."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int = 4
    swapped: bool = False


#: bytes of K that a stage has
_DEEP, _MIDDLE, _SHALLOW = 512, 256, 128


class _High(NamedTuple):
    """Tiles of 64 rows, and what a wave of them takes: for each 1000 of K, and besides; and what a call takes besides.

    In microseconds, of 16 bits. Source: `docs/results/2026-11-29-h200x1/invariant-tiles.jsonl`.
    """

    columns: int
    depth: int
    stages: int
    long: float
    wave: float
    call: float

    def time(self, rows: int, columns: int, k: float, programs: int) -> float:
        return waves(rows, columns, 64, self.columns, programs) * (self.long * k / 1000 + self.wave) + self.call

    def of(self, itemsize: int) -> FewRowsTiles:
        return FewRowsTiles(64, self.columns, self.depth // itemsize, stages=self.stages)


_MEAN = 4000  # a K, to choose one of them by
_HIGH = (
    _High(64, _MIDDLE, 6, 2.4, 1.4, 1.0), _High(128, _SHALLOW, 8, 3.1, 1.9, 1.4), _High(256, _SHALLOW, 5, 5.1, 2.4, 1.3)
)  # fmt: skip
#: the same of the GEMM of `fused`, a wave's of tiles of 128 x 128
_GEMM_LONG, _GEMM_WAVE, _GEMM_CALL = 5.1, 1.6, 2.7


def few_rows_tiles(itemsize: int, rows: int, columns: int, programs: int) -> FewRowsTiles:
    """The tiles of a matmul of few rows. columns: Of all Bs. programs: SMs.

    As small as leaves one tile for each SM: an SM reads no faster than 64 bytes a cycle, and a tile reads its rows of A
    too. What a stage reads is counted in bytes: deep stages have less to wait for. Where there are more tiles than SMs,
    two of few rows share one. Source: `docs/results/2026-11-29-h200x1/few-rows-tiles.jsonl`.
    """
    narrow = -(-columns // 64)
    if -(-rows // 16) * narrow <= programs:
        return FewRowsTiles(16, 64, _DEEP // itemsize, stages=5, swapped=True)
    if rows <= 16:
        return FewRowsTiles(16, 64, _MIDDLE // itemsize, stages=5, swapped=True)
    if rows <= 32:
        depth = _DEEP if narrow <= programs else _MIDDLE
        return FewRowsTiles(32, 64, depth // itemsize, stages=4, swapped=True)
    if -(-rows // 32) * narrow <= programs:
        return FewRowsTiles(32, 64, _MIDDLE // itemsize, stages=8, swapped=True)
    if rows <= 64 and -(-columns // 256) > programs:
        return _HIGH[1].of(itemsize)
    return min(_HIGH, key=lambda each: each.time(rows, columns, _MEAN, programs)).of(itemsize)


def few_rows_is_faster(rows: int, depth: int, columns: int, itemsize: int, by_rows: bool) -> bool:
    """Whether such tiles are as fast as cuBLAS, for `depth` elements of `itemsize` bytes.

    It has large tiles for more rows, and cuts a K that is long for few columns. With scales of rows and columns
    (`by_rows`) it does neither well. Source: `docs/results/2026-11-29-h200x1/few-rows.jsonl`.
    """
    if by_rows:
        return rows <= 128
    return rows <= 64 and depth * itemsize <= (5 if rows <= 8 else 8) * columns


def few_rows_before(gemm: Tiles, itemsize: int, rows: int, columns: int, k: int, programs: int) -> bool:
    """Whether such tiles are faster than those of the GEMM of `fused`, where cuBLAS is not to make a matmul."""
    count, long = waves(rows, columns, gemm.block_m, gemm.block_n, programs), k * itemsize / 2
    of_gemm = count * (gemm.block_n / 128 * _GEMM_LONG * long / 1000 + _GEMM_WAVE) + _GEMM_CALL
    return rows <= 64 or min(each.time(rows, columns, long, programs) for each in _HIGH) < of_gemm


#: rows above which cuBLAS is faster than our kernels, also where it may not cut K. Source:
#: `docs/results/2026-11-29-h200x1/invariant-cublaslt.jsonl`
CUBLAS_FROM = 128


def cublas_is_faster(rows: int, widths: Sequence[int], programs: int) -> bool:
    """Whether cuBLAS is faster than our kernels, by a matmul for each B; ours is one for all, which may save waves."""
    apart = sum(waves(rows, width, 128, 128, programs) for width in widths)
    return rows > CUBLAS_FROM and apart <= 1.15 * waves(rows, sum(widths), 128, 128, programs)


#: in the interpreter: small, as `INTERPRETED_TILES`
INTERPRETED_FEW_ROWS = FewRowsTiles(16, 64, 64, stages=1, warps=1, swapped=True)


@dataclass(frozen=True)
class WireChunks:
    """How the data that one rank sends to another is signalled: a word counts its complete chunks, in order.

    A function of the number of bytes alone, which all ranks share. How the sender copies, and how the reader computes,
    is their own: a reader that needs the first `n` bytes waits for chunk `covering(n)`.

    Attributes:
        size: Bytes in all.
        chunk: Bytes of a chunk: a multiple of 16, so of whole elements. The last chunks have fewer, or none.
    """

    size: int

    @property
    def chunk(self) -> int:
        return max(-(-self.size // (MAX_CHUNKS * 16)) * 16, 16)

    def covering(self, end: int) -> int:
        """The chunk with which the first `end` bytes are there."""
        return min(max(-(-end // self.chunk) - 1, 0), MAX_CHUNKS - 1)

    def complete(self, end: int) -> int:
        """How many chunks are complete with the first `end` bytes: all of them with the last byte."""
        return MAX_CHUNKS if end >= self.size else min(end // self.chunk, MAX_CHUNKS)

    def pieces(self, wanted: int) -> list[tuple[int, int]]:
        """The bytes cut into about `wanted` runs of whole chunks."""
        step = -(-MAX_CHUNKS // max(wanted, 1)) * self.chunk
        return [(first, min(first + step, self.size)) for first in range(0, self.size, step)]


@dataclass(frozen=True)
class Chunks:
    """The row tiles of one rank, cut into runs that are signalled one by one.

    Attributes:
        tiles: row tiles per chunk; the last may have fewer.
        rows: (first row, end row) of each chunk, in the rank's [P * Q] rows.
        row_tiles: row tiles of each chunk.
    """

    tiles: int
    rows: tuple[tuple[int, int], ...]
    row_tiles: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def pieces(self, apart: bool) -> list[range]:
        """The chunks that one copy moves: each is copied `apart`, or all are together."""
        count = len(self)
        return [range(chunk, chunk + 1) for chunk in range(count)] if apart else [range(count)]

    def of(self, piece: range) -> tuple[int, int]:
        """(first row, end row) of a run of chunks."""
        return self.rows[piece[0]][0], self.rows[piece[-1]][1]


def cut(outer: int, inner: int, block_m: int, wanted: int) -> Chunks:
    """Cut `outer` blocks of `inner` rows into about `wanted` chunks, `MAX_CHUNKS` at most.

    With several blocks, at their borders only.
    """
    per_block = ceil(inner / block_m)
    total = outer * per_block
    wanted = max(1, min(wanted, MAX_CHUNKS, outer if outer > 1 else total))
    unit = per_block if outer > 1 else 1
    return _cut_every(ceil(total // unit / wanted) * unit, outer, inner, block_m)


def cut_own(chunks: Chunks, outer: int, inner: int, block_m: int, group: int) -> Chunks:
    """Cut a scatter's own rows: `chunks` again in equal parts, the last of which is left to reduce at the end.

    A part is about the `group` of row tiles that the GEMM takes together, or half a chunk; more where chunks do not
    divide so. With several blocks it is a chunk.
    """
    if outer > 1:
        return chunks
    least = ceil(sum(chunks.row_tiles) / MAX_OWN)
    wanted = max(min(group, chunks.tiles // 2), least)
    sizes = [tiles for tiles in range(max(least, ceil(wanted / 2)), chunks.tiles + 1) if chunks.tiles % tiles == 0]
    return _cut_every(max((tiles for tiles in sizes if tiles <= wanted), default=sizes[0]), outer, inner, block_m)


def _cut_every(tiles: int, outer: int, inner: int, block_m: int) -> Chunks:
    per_block = ceil(inner / block_m)
    total = outer * per_block
    bounds = [(start, min(start + tiles, total)) for start in range(0, total, tiles)]
    rows = tuple((_row(a, per_block, inner, block_m), _row(b, per_block, inner, block_m)) for a, b in bounds)
    return Chunks(tiles, rows, tuple(b - a for a, b in bounds))


def in_blocks(outer: int, inner: int) -> Chunks:
    """Each of at most `MAX_CHUNKS` blocks of `inner` rows is a chunk, for what has no tiles."""
    return cut(outer, inner, inner, outer)


def _row(tile: int, per_block: int, inner: int, block_m: int) -> int:
    return tile // per_block * inner + min(tile % per_block * block_m, inner)
