"""Which implementation runs a call: the fastest that can, by a cost model or by the measurements of `asynctp tune`.

The transport is settled before, by facts that all ranks share (`wire`): implementations of other transports cannot run.
Among the others the choice is this rank's own, a function of shapes, strides, dtypes, world size and GPU, never of
addresses. `Choice` says which was chosen, why, and how much time the others would have taken; `ops.explain` and the
report show it.

The model, in microseconds (the terms are named below; their values were measured, see `RATES`):

    unfused      matmul + collective                                     NCCL and cuBLAS, nothing overlaps
    direct       matmul + one-kernel collective                          nothing overlaps, but little latency
    decomposed   max(copies, matmul in parts) + ends                     cuBLAS per range of a rank's rows
    fused        max(copies, our matmul) + ends                          one GEMM
    whole        where no other can: the collective, then PyTorch's products

An all-reduce is a scatter by one of these and then NCCL's all-gather; unfused, it is one collective of NCCL's.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

import torch

from asynctp_kernels.cuda.choose import tables
from asynctp_kernels.cuda.choose.tiles import MAX_CHUNKS, Tiles, tiles_for, waves
from asynctp_kernels.signals import IS_INTERPRETED

IMPLEMENTATIONS = ("fused", "decomposed", "direct", "unfused")
WHOLE = "whole"  # where none of these can make the products: the collective on the group's wire, PyTorch's products
VARIABLE = "ASYNCTP_CUDA_IMPLEMENTATION"
DECOMPOSED_AHEAD = 0.01  # see `fastest`
TABLE_VARIABLE = "ASYNCTP_TUNING_TABLE"
_SHIPPED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Rates:
    """Rates and latencies of one kind of machine.

    Attributes:
        copy: bytes per microsecond that a copy engine moves between GPUs while all ranks do.
        direct: the same for the kernels that push with all SMs.
        nccl: the same for NCCL.
        local: bytes per microsecond of device memory, read or written.
        matmul: floating-point operations per microsecond of cuBLAS in bf16 (fp8: twice as many).
        beside: how much slower a matmul is while copies run.
        launch: microseconds between two kernels.
        direct_start, nccl_start: microseconds of latency of these collectives.
        stage: microseconds until the first copy of a gather starts, staged or, since then, pushed.
        chunk: microseconds between two copies.
        gap: the same, of a fused op's chunks, with their words; `docs/results/2026-11-25-h200x2/chunks.txt`.
        fused_gather, fused_scatter, decomposed_gather, decomposed_scatter: microseconds of host time and latency beyond
            the terms of the model; `decomposed_gather` where the gathered A is returned, and the shard staged first.
        narrow: how fast the GEMM's 128 x 128 tiles are, as a fraction of cuBLAS.
        precise: the same in fp8 without fast accumulation.
        several: the same of several scaled products, which may be fast; `docs/results/2026-11-23-h200x2/sums-fast.txt`.

    Source of the values: `docs/results/2026-11-22-h200x4` (`bench.json`, `tuned.json`) and `-h200x2` (`tuned.json`),
    159 calls; all but `copy`, `local`, `beside`, `gap` and `narrow` are fitted to the geometric means of graph and
    eager time of all implementations there, which they miss by 14 % (root of the mean square). What they pick is 1.0 %
    slower than the best; of 189 calls that they were not fitted to 1.3 % (`2026-11-22-h200x2/bench.json`). Pushes start
    sooner, in `fused` and in `decomposed`: terms of their own, fitted to 108 gathers of 2 x H100, pick no better there
    (1.4 % instead of 1.5, `2026-11-24-h100x2/gathers.json`), and worse from what was measured over four ranks.
    """

    copy: float = 370e3
    direct: float = 307e3
    nccl: float = 303e3
    local: float = 3.2e6
    matmul: float = 759e6
    beside: float = 1.08
    launch: float = 10.0
    direct_start: float = 20.0
    nccl_start: float = 53.5
    stage: float = 35.0
    chunk: float = 4.0
    gap: float = 7.5
    fused_gather: float = 53.0
    fused_scatter: float = 35.5
    decomposed_gather: float = 9.8
    decomposed_scatter: float = 0.0
    narrow: float = 0.828
    precise: float = 0.68
    several: float = 0.65


@dataclass(frozen=True)
class Problem:
    """What the cost of a call depends on.

    Attributes:
        op: "gather", "scatter" or "all_reduce".
        rows: of the whole 2-D A (gather) or product (scatter), over all ranks.
        depth: contraction length; of all pairs together.
        widths: columns of each product.
        itemsize: bytes of an element of A; out_itemsize: of the result, or of what is sent to be summed.
        precise: fp8 sums may not be fast.
        apart: of several scaled products all contraction lengths but the greatest: cuBLAS makes each by itself.
        widened: how many times as many bytes an element of the sum has, which NCCL sends instead.
        blocks: into how many ranges a rank's rows fall: one for each index of the dims in front of the sharded one.
        returned: the gathered A is.
    """

    op: str
    world: int
    rows: int
    depth: int
    widths: tuple[int, ...]
    itemsize: int
    out_itemsize: int
    dtype: str
    precise: bool = False
    apart: tuple[int, ...] = ()
    widened: int = 1
    blocks: int = 1
    returned: bool = False

    @staticmethod
    def of(
        op: str,
        world: int,
        rows: int,
        depths: Sequence[int],
        widths: Sequence[int],
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        fast: bool,
        sum_dtype: torch.dtype | None = None,
        blocks: int = 1,
        returned: bool = False,
    ) -> Problem:
        """The problem of operands of `dtype`.

        depths: of each summed product; `fast`: fp8 sums may be; `sum_dtype`: of the result, if it is another.
        """
        name, fp8 = str(dtype).removeprefix("torch."), dtype.itemsize == 1
        apart = tuple(sorted(depths)[:-1]) if fp8 else ()
        widened = 1 if sum_dtype is None else sum_dtype.itemsize // out_dtype.itemsize
        sizes = (dtype.itemsize, out_dtype.itemsize)
        precise = fp8 and not fast
        return Problem(
            op, world, rows, sum(depths), tuple(widths), *sizes, name, precise, apart, widened, blocks, returned
        )  # fmt: skip

    @property
    def depths(self) -> tuple[int, ...]:
        """The contraction lengths of what cuBLAS makes one by one, the greatest first."""
        return (self.depth - sum(self.apart), *self.apart)

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.depth * sum(self.widths)

    @property
    def wire_bytes(self) -> float:
        """What one rank receives; of an all-reduce, in each half."""
        shard = self.rows // self.world
        if self.op == "gather":
            return float(shard * (self.world - 1) * self.depth * self.itemsize)
        return float(shard * (self.world - 1) * self.widths[0] * self.out_itemsize)

    @property
    def key(self) -> str:
        """How a tuning table names the problem; rows come below it."""
        sizes = ":".join(self.sizes)
        wide = self.itemsize <= 2 < self.out_itemsize * self.widened  # results of 16 bits are what is measured
        kind = (":precise" if self.precise else "") + (":wide" if wide else "") + (":full" if self.returned else "")
        return f"{self.op}:{self.world}:{self.dtype}:{sizes}{kind}" + (f":{self.blocks}x" if self.blocks > 1 else "")

    @property
    def sizes(self) -> tuple[str, str]:
        """Contraction lengths (of several scaled products each) and columns, as `4096+512+512` and `8192`."""
        depths, widths = ("+".join(map(str, each)) for each in (self.depths, self.widths))
        return depths, widths


@dataclass(frozen=True)
class Choice:
    """What runs, and why.

    Attributes:
        implementation: one of `IMPLEMENTATIONS`.
        source: "cost model", "measured" (a tuning table), "forced", "only one that can", or "interpreted" (the first
            that can run).
        estimates_us: of the cost model, per implementation that can run; empty when nothing was compared.
        refused: why each other implementation cannot run this call.
        chunks: into how many a rank's rows are cut, where that applies.
        tiles: of the GEMM, for "fused".
    """

    implementation: str
    source: str
    estimates_us: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    chunks: int = 1
    tiles: Tiles | None = None


def estimate(problem: Problem, implementation: str, rates: Rates, sms: int) -> float:
    """Microseconds that the model expects, of graph and eager time together."""
    if problem.op == "all_reduce":
        start = 0 if implementation == "unfused" else rates.nccl_start
        second_half = problem.wire_bytes * problem.widened / rates.nccl + start
        return estimate(replace(problem, op="scatter"), implementation, rates, sms) + second_half
    if implementation in ("unfused", "direct"):
        matmul = _products(problem, problem.rows, rates, sms)
        if implementation == "unfused":
            return matmul + rates.nccl_start + problem.wire_bytes * problem.widened / rates.nccl
        return matmul + rates.direct_start + problem.wire_bytes / rates.direct
    share, extra = _share(problem, implementation, rates, sms)
    peers = problem.world - 1
    copy = problem.wire_bytes / rates.copy / peers + rates.chunk
    extra += (rates.beside - 1) * min(problem.world * share, peers * copy)
    if problem.op == "gather":
        # the own share hides the first copy, each product the next copy
        end = max(share + peers * share, rates.stage + copy + peers * share, rates.stage + peers * copy + share)
        return end + extra
    # the first push waits for its product, the last one is hidden by the own share
    parts = chunks_for(problem, rates) if implementation == "fused" else 1
    end = max((peers + 1) * share, share / parts + peers * copy)
    return end + _reduction(problem, rates) / parts + extra


def _share(problem: Problem, implementation: str, rates: Rates, sms: int) -> tuple[float, float]:
    """(time of one rank's share of the products, what the implementation costs besides)."""
    if implementation == "fused":
        extra = rates.fused_gather if problem.op == "gather" else rates.fused_scatter
        return _fused_matmul(problem, rates, sms) / problem.world, extra
    each = _products(problem, problem.rows // problem.world // problem.blocks, rates, sms)
    share = problem.blocks * (each - rates.launch) + rates.launch
    extra = rates.decomposed_scatter if problem.op == "scatter" else rates.decomposed_gather * problem.returned
    return share, extra


def _reduction(problem: Problem, rates: Rates) -> float:
    received = problem.rows // problem.world * problem.widths[0] * problem.out_itemsize
    return received * (problem.world + 1) / rates.local + rates.launch


def _speed(problem: Problem, rates: Rates) -> float:
    return rates.matmul * (2.0 if problem.itemsize == 1 else 1.0) * (0.75 if problem.precise else 1.0)


def _products(problem: Problem, rows: int, rates: Rates, sms: int) -> float:
    """cuBLAS: all products of so many rows, and their sum."""
    products = [replace(problem, depth=depth) for depth in problem.depths]
    made = sum(_matmul(product, rows, width, rates, sms) for product in products for width in problem.widths)
    added = 3 * rows * sum(problem.widths) * problem.out_itemsize / rates.local  # two are read, one is written
    return made + len(problem.apart) * added


def _matmul(problem: Problem, rows: int, width: int, rates: Rates, sms: int) -> float:
    """cuBLAS: whole waves of whatever tile is best, and a floor for reading the weight."""
    shapes = ((128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.6))
    per_sm = _speed(problem, rates) / sms
    best = min(
        waves(rows, width, m, n, sms) * 2.0 * m * n * problem.depth / (per_sm * efficiency)
        for m, n, efficiency in shapes
    )
    splits = 2.0 * rows * width * problem.depth / (_speed(problem, rates) * 0.62)  # split-K fills the SMs otherwise
    weight = width * problem.depth * problem.itemsize / rates.local
    return max(min(best, splits), weight) + rates.launch


def _fused_matmul(problem: Problem, rates: Rates, sms: int) -> float:
    tiles = fused_tiles(problem, sms, rates)
    ranges = problem.world * problem.blocks
    count = ranges * ceil(problem.rows / ranges / tiles.block_m) * sum(ceil(n / tiles.block_n) for n in problem.widths)
    small = rates.precise if problem.precise else rates.several if problem.apart else rates.narrow
    efficiency = 0.97 if tiles.block_n == 256 or tiles.pingpong else small
    size = tiles.block_m * tiles.block_n
    per_tile = 2.0 * size * problem.depth / (_speed(problem, rates) / sms * efficiency)
    return ceil(count / sms) * per_tile


def fused_tiles(problem: Problem, sms: int, rates: Rates) -> Tiles:
    """Tiles for the whole call."""
    shard = problem.rows // problem.world
    dtype = torch.float8_e4m3fn if problem.itemsize == 1 else torch.bfloat16
    rows = problem.world * ceil(shard / 128) * 128
    columns, several = sum(problem.widths), bool(problem.apart)
    moving, multiplying = problem.wire_bytes / rates.copy, problem.flops / (_speed(problem, rates) * rates.narrow)
    late = problem.op == "gather" and moving > multiplying
    return tiles_for(dtype, problem.precise, rows, columns, sms, several, problem.out_itemsize, late)


def chunks_for(problem: Problem, rates: Rates) -> int:
    """Into how many chunks to cut one rank's rows: two, to start and to end sooner, where each still fills the tiles.

    Four over two ranks, where copies take 0.7 of the products' time and more, and what two more of them cost is less
    than what they save: of what is multiplied before a scatter's first copy, and reduced or multiplied behind the last,
    a quarter of a rank's share is left instead of half. Source: `docs/results/2026-11-25-h200x2/chunks.txt`. More ranks
    have more copies, and were not measured with four.

    Elsewhere more chunks are slower: a copy's words and waits take 7 us of a scatter's copies (trace of 4 x H200,
    2026-11-21), 5 of a gather's. Four with several in one copy were no faster where copies are the limit, and slower
    where products are: a copy then waits for the last of them (2026-11-22).
    """
    gathers = problem.op == "gather"
    if ceil(problem.rows / problem.world / 128) < (16 if gathers else 8):
        return 1
    multiplying = problem.flops / _speed(problem, rates)
    if problem.world > 2 or problem.wire_bytes / rates.copy <= 0.7 * multiplying:
        return 2
    uncovered = multiplying / problem.world + (0 if gathers else _reduction(problem, rates))
    return 4 if uncovered / 4 > 2 * rates.gap else 2


#: in the interpreter: small, so that tiny calls have several tiles and chunks, ragged ones included
INTERPRETED_TILES = Tiles(16, 64, 64, warps=1, stages=1, group_m=2, split=2)


# --- choosing --------------------------------------------------------------------------------------------------
_forced: list[str] = []


@contextlib.contextmanager
def forced(implementation: str) -> Iterator[None]:
    """Every call inside runs `implementation`, or raises if that cannot; for benchmarks and tests.

    Raises:
        ValueError: there is no such implementation.
    """
    _check_name(implementation, "forced")
    _forced.append(implementation)
    try:
        yield
    finally:
        _forced.pop()


def requested() -> str | None:
    """The implementation that `forced` or `ASYNCTP_CUDA_IMPLEMENTATION` asks for; None for the fastest."""
    return _forced[-1] if _forced else _from_environment()


@functools.cache
def _from_environment() -> str | None:
    name = os.environ.get(VARIABLE, "auto")
    if name == "auto":
        return None
    _check_name(name, VARIABLE)
    return name


def _check_name(name: str, where: str) -> None:
    names = (*IMPLEMENTATIONS, WHOLE)
    if name not in names:
        raise ValueError(f"asynctp: {where}={name!r} is not valid; it must be one of {', '.join(names)}")


def choose(
    problem: Problem, refused: dict[str, str], sms: int, device_name: str, table: tables.Table | None = None
) -> Choice:
    """The implementation for `problem`, given why some cannot run it.

    table: Measured choices, as a group has agreed on; this process's own when None.

    Raises:
        RuntimeError: the requested implementation cannot run it; the message says why.
    """
    rates = Rates()
    settings = {"chunks": chunks_for(problem, rates), "tiles": fused_tiles(problem, sms, rates)}
    if IS_INTERPRETED:
        chunks = MAX_CHUNKS if problem.op == "gather" else MAX_CHUNKS // 2  # own rows are cut finer
        settings = {"chunks": chunks, "tiles": INTERPRETED_TILES}
    wanted = requested()
    if wanted is not None:
        if wanted in refused:
            raise RuntimeError(f"asynctp: implementation {wanted!r} was asked for and cannot run: {refused[wanted]}")
        return Choice(wanted, "forced", {}, refused, **settings)  # type: ignore[arg-type]
    able = [name for name in IMPLEMENTATIONS if name not in refused]
    if not able:
        return Choice(WHOLE, "only one that can", {}, refused, **settings)  # type: ignore[arg-type]
    if IS_INTERPRETED:  # nothing is fast: what has most to show
        return Choice(able[0], "interpreted", {}, refused, **settings)  # type: ignore[arg-type]
    estimates = {name: round(estimate(problem, name, rates, sms), 1) for name in able}
    measured = measured_choice(problem, device_name, table)
    if measured in able:
        return Choice(measured, "measured", estimates, refused, **settings)  # type: ignore[arg-type]
    best = fastest(estimates)
    source = "cost model" if len(able) > 1 else "only one that can"
    return Choice(best, source, estimates, refused, **settings)  # type: ignore[arg-type]


def fastest(times: dict[str, float]) -> str:
    """The implementation with the least time; "decomposed" only if it is ahead of "fused", not equal to it.

    Its gathers that return A stage first, and wait for the slowest rank where "fused" already multiplies its own rows;
    and a call on new addresses takes it half as much host time again. A benchmark, whose ranks come together and whose
    calls come again, shows neither.
    """
    close = "fused" in times and times.get("decomposed", 0.0) > times["fused"] * (1 - DECOMPOSED_AHEAD)
    return min((name for name in times if not (close and name == "decomposed")), key=lambda name: times[name])


# --- the measured table ------------------------------------------------------------------------------------------
def table_path() -> Path:
    """Where `asynctp tune` writes: `ASYNCTP_TUNING_TABLE`, or a file in the user's cache folder."""
    given = os.environ.get(TABLE_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "asynctp" / "tuning.json"


def read_tuned(path: Path) -> tables.Table:
    """What `asynctp tune` has written to `path`; empty where it has not.

    Raises:
        ValueError: The file is damaged, or cannot be read.
    """
    return tables.read(path, IMPLEMENTATIONS)


@functools.cache
def tuned() -> tables.Table:
    """The table of measurements made here, read once; {GPU name: {problem key: {rows: implementation}}}."""
    return read_tuned(table_path())


@functools.cache
def shipped() -> tables.Table:
    """The table that comes with the package, read once."""
    return read_tuned(_SHIPPED)


@functools.cache
def _table() -> tables.Table:
    """Both; measurements made here count before those that come with the package."""
    return tables.merged(shipped(), tuned())


def refresh() -> None:
    """Read the environment and the tuning table again at the next choice."""
    tuned.cache_clear()
    _table.cache_clear()
    _from_environment.cache_clear()


def measured_choice(problem: Problem, device_name: str, table: tables.Table | None = None) -> str | None:
    """What was fastest for this shape at the nearest measured number of rows within a factor of 1.5; else None."""
    by_rows = (_table() if table is None else table).get(device_name, {}).get(problem.key, {})
    if not by_rows:
        return None
    rows = max(problem.rows, 1)
    nearest = min(by_rows, key=lambda text: abs(int(text) / rows - 1) + abs(rows / int(text) - 1))
    ratio = int(nearest) / rows
    return by_rows[nearest] if 1 / 1.5 <= ratio <= 1.5 else None
