"""Properties of choices and of the cost model, for drawn problems."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.select import Problem, Rates
from asynctp_kernels.cuda.choose.tiles import cut, cut_own, tiles_for, waves
from asynctp_kernels.cuda.implementations import IMPLEMENTATIONS
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, MAX_OWN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selections import BF16, FP8, H200, SMS, UNKNOWN, chosen, estimate, problem

# --- properties --------------------------------------------------------------------------------------------------
quick = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SIZES = st.integers(1, 20_000)
PROBLEMS = st.builds(
    lambda op, world, shard, depth, widths, itemsize, out_itemsize, precise: Problem(
        op, world, shard * world, depth, widths[: 1 if op == "scatter" else None], itemsize, out_itemsize,
        "float8_e4m3fn" if itemsize == 1 else "bfloat16", precise and itemsize == 1,
    ),
    st.sampled_from(["gather", "scatter"]), st.integers(2, 8), st.integers(0, 20_000), SIZES,
    st.lists(SIZES, min_size=1, max_size=5).map(tuple), st.sampled_from([1, 2, 4]), st.sampled_from([2, 4]),
    st.booleans(),
)  # fmt: skip


@quick
@given(PROBLEMS, st.sampled_from(IMPLEMENTATIONS), st.sampled_from([1, 78, 114, 132, 148]))
def test_estimates_are_times(asked: Problem, implementation: str, sms: int) -> None:
    found = estimate(asked, implementation, Rates(), sms)
    assert math.isfinite(found)
    assert found > 0


@quick
@given(PROBLEMS, st.sampled_from(["direct", "sequential"]))
def test_twice_the_products_take_longer(asked: Problem, implementation: str) -> None:
    more = replace(asked, rows=2 * asked.rows, depth=2 * asked.depth)
    assert estimate(more, implementation, Rates(), SMS) >= estimate(asked, implementation, Rates(), SMS)


@quick
@given(PROBLEMS, st.sets(st.sampled_from(IMPLEMENTATIONS[:3])), st.sampled_from([H200, UNKNOWN]))
def test_the_choice_is_a_function_of_the_problem(asked: Problem, refused: set[str], device: str) -> None:
    """And of why some cannot run it."""
    forwards = dict.fromkeys(sorted(refused), "no")
    backwards = dict.fromkeys(sorted(refused, reverse=True), "no")
    first = chosen(asked, forwards, device)
    select.refresh()
    assert first == chosen(replace(asked), backwards, device)
    assert first.implementation not in refused
    assert set(first.estimates_us) == set(IMPLEMENTATIONS) - refused
    assert 1 <= first.chunks <= MAX_CHUNKS
    assert first.tiles is not None


@pytest.mark.parametrize(
    ("asked", "chunks"),
    [
        # too few rows to fill the tiles of each
        (problem("scatter", 1024, 2048, 8192, world=2), 1),
        (problem("gather", 2048, 8192, 2560, world=2), 1),
        # products are the limit
        (problem("scatter", 2048, 2048, 8192, world=2), 2),
        (problem("scatter", 16384, 2048, 8192, world=2), 2),
        (problem("gather", 4096, 8192, 2560, world=2), 2),
        (problem("gather", 16384, 8192, 2560, world=2), 2),
        # copies are, for long
        (problem("scatter", 8192, 2048, 8192, world=2, dtype="float8_e4m3fn"), 4),
        (problem("scatter", 8192, 1024, 8192, world=2), 4),
        (problem("all_reduce", 8192, 1024, 8192, world=2), 4),
        (problem("gather", 8192, 8192, 1280, world=2), 4),
        # copies are, for a short time or over several ranks: what more of them cost is more than they save
        (problem("scatter", 2048, 2048, 8192, world=2, dtype="float8_e4m3fn"), 2),
        (problem("scatter", 4096, 1792, 4096, world=2, dtype="float8_e4m3fn"), 2),
        (problem("gather", 4096, 8192, 1280, world=2), 2),
        (problem("scatter", 65536, 2048, 8192, world=4, dtype="float8_e4m3fn"), 2),
        (problem("gather", 8192, 8192, 1280, world=8), 1),
    ],
)  # fmt: skip
def test_chunks_of_a_rank(asked: Problem, chunks: int) -> None:
    """Over two ranks as `docs/results/2026-11-25-h200x2/chunks.txt` has them, within 2 %."""
    assert chosen(asked).chunks == chunks


@quick
@given(
    outer=st.integers(1, 40), inner=st.integers(1, 5000), block_m=st.sampled_from([1, 3, 64, 128]),
    wanted=st.integers(-1, 9),
)  # fmt: skip
def test_cut(outer: int, inner: int, block_m: int, wanted: int) -> None:
    """All rows once and in order, at borders that the GEMM's tiles have, and the way that the kernel counts tiles."""
    chunks = cut(outer, inner, block_m, wanted)
    per_block = math.ceil(inner / block_m)
    assert 1 <= len(chunks) <= min(MAX_CHUNKS, max(wanted, 1))
    assert [first for first, _ in chunks.rows] == [0, *(end for _, end in chunks.rows[:-1])]
    assert chunks.rows[-1][1] == outer * inner
    assert all(first < end for first, end in chunks.rows)
    for border, _ in chunks.rows[1:]:
        assert border % (inner if outer > 1 else block_m) == 0
    assert sum(chunks.row_tiles) == outer * per_block
    assert all(count == chunks.tiles for count in chunks.row_tiles[:-1])
    assert chunks.row_tiles[-1] <= chunks.tiles
    for tile in {0, per_block - 1, outer * per_block // 2, outer * per_block - 1}:
        first, end = chunks.rows[tile // chunks.tiles]
        row = tile // per_block * inner + tile % per_block * block_m
        assert first <= row < end


@quick
@given(
    outer=st.integers(1, 6), inner=st.integers(1, 70_000), wanted=st.integers(1, 6), group=st.sampled_from([1, 2, 4, 8])
)
def test_cut_own(outer: int, inner: int, wanted: int, group: int) -> None:
    """Equal parts of each chunk, that a GEMM counts in `MAX_OWN` words; blocks stay whole."""
    chunks = cut(outer, inner, 128, wanted)
    own = cut_own(chunks, outer, inner, 128, min(group, chunks.tiles))
    assert own.rows[0][0] == 0
    assert own.rows[-1][1] == outer * inner
    assert all(before[1] == after[0] for before, after in itertools.pairwise(own.rows))
    assert sum(own.row_tiles) == sum(chunks.row_tiles)
    assert set(own.row_tiles[:-1]) <= {own.tiles}
    assert len(own) <= MAX_OWN
    assert chunks.tiles % own.tiles == 0
    if outer > 1:
        assert own == chunks


@pytest.mark.parametrize(
    ("tiles", "wanted", "parts"),
    [(1, 1, (1,)), (2, 1, (1, 1)), (7, 1, (7,)), (8, 2, (2,) * 4), (16, 2, (4,) * 4), (32, 2, (8,) * 4),
     (31, 2, (8, 8, 8, 7)), (64, 2, (8,) * 8), (22, 2, (11, 11)), (200, 2, (20,) * 10), (512, 2, (32,) * 16)],
)  # fmt: skip
def test_own_rows_are_cut_finer(tiles: int, wanted: int, parts: tuple[int, ...]) -> None:
    """Into what the GEMM takes together, or half a chunk: one is left to reduce at the end."""
    chunks = cut(1, tiles * 128, 128, wanted)
    assert cut_own(chunks, 1, tiles * 128, 128, min(8, chunks.tiles)).row_tiles == parts


@pytest.mark.parametrize(
    ("count", "apart", "expected"),
    [
        (1, True, [[0]]),
        (2, True, [[0], [1]]),
        (2, False, [[0, 1]]),
        (4, True, [[0], [1], [2], [3]]),
        (4, False, [[0, 1, 2, 3]]),
    ],
)
def test_pieces(count: int, apart: bool, expected: list[list[int]]) -> None:
    chunks = cut(1, 1024, 128, count)
    pieces = chunks.pieces(apart)
    assert [list(piece) for piece in pieces] == expected
    rows = [chunks.of(piece) for piece in pieces]
    assert (rows[0][0], rows[-1][1]) == (0, 1024)
    assert [end for _, end in rows[:-1]] == [start for start, _ in rows[1:]]


@quick
@given(rows=st.integers(0, 10**6), columns=SIZES, block=st.sampled_from([64, 128, 256]), sms=st.integers(1, 200))
def test_waves(rows: int, columns: int, block: int, sms: int) -> None:
    tiles = math.ceil(rows / 128) * math.ceil(columns / block)
    assert waves(rows, columns, 128, block, sms) * sms >= tiles
    assert (waves(rows, columns, 128, block, sms) - 1) * sms < max(tiles, 1)


@quick
@given(rows=st.integers(1, 10**5), columns=SIZES, fp8=st.booleans(), precise=st.booleans())
def test_tiles_fill_the_tensor_cores(rows: int, columns: int, fp8: bool, precise: bool) -> None:
    tiles = tiles_for(FP8 if fp8 else BF16, precise, rows, columns, 4096, SMS)
    assert tiles.block_m == 128
    assert tiles.block_k * (1 if fp8 else 2) == (256 if fp8 and precise else 128), (
        "lines that TMA swizzles, of 128 bytes"
    )
    assert (tiles.imprecise is not None) == (fp8 and precise)
    assert tiles.block_m * tiles.block_n // (32 * tiles.warps) <= 128, "fp32 sums of a thread"
