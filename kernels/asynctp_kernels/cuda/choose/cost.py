"""The cost model: how long each implementation takes for a problem, in microseconds.

Each implementation's function below says its terms; `Rates` has the values that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from asynctp_kernels.cuda.choose.tiles import Tiles, tiles_for, waves


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
        chunk: microseconds that a copy beside matmuls takes besides its bytes; more than a copy engine needs.
        between: microseconds between two copies beside which nothing else runs.
        gap: the same, of a fused op's chunks, with their words; `docs/results/2026-11-25-h200x2/chunks.txt`.
        enqueue, enqueue_range: microseconds of host time of a call that is enqueued, and of each range of rows in it:
            `docs/results/2026-11-29-h200x1/host.jsonl`.
        fused_gather, fused_scatter, decomposed_gather, decomposed_scatter: microseconds of host time and latency beyond
            the terms of the model; `decomposed_gather` where the gathered A is returned, and the shard staged first.
        narrow: how fast the GEMM's 128 x 128 tiles are, as a fraction of cuBLAS.
        precise: the same in fp8 without fast accumulation.
        several: the same of several scaled matmuls, which may be fast; `docs/results/2026-11-23-h200x2/sums-fast.txt`.

    Source. `copy`, `between`, `local`, `beside`, `gap` and `narrow` were measured. `launch`, `direct_start`, `stage`,
    `chunk`, `fused_gather` and `fused_scatter` are chosen so that what the model picks is fastest, with little weight
    on how far off its times are. Data: `bench.json` in `docs/results/2026-11-28-h200x4-later`, `bench*.json` in
    `2026-11-25-h200x2` and `2026-11-25-h100x2`, `tuned.json` and `tuned-batch2.json` in `2026-11-22-h200x4`, by
    geometric means of graph and eager time. The others are of an earlier fit. Where an implementation can be chosen,
    the pick over four H200s is 1.0 % slower in the mean than the best of its transport, and 13 % at worst. In fp8,
    which was not fitted, it is 0.6 and 1.1 %, and 11 % at worst. Over two GPUs it is 1.1 %, and 16 to 18 %.
    """

    copy: float = 370e3
    direct: float = 307e3
    nccl: float = 303e3
    local: float = 3.2e6
    matmul: float = 759e6
    beside: float = 1.08
    launch: float = 8.0
    direct_start: float = 21.0
    nccl_start: float = 53.5
    stage: float = 17.0
    chunk: float = 15.0
    between: float = 4.0
    gap: float = 7.5
    enqueue: float = 60.0
    enqueue_range: float = 50.0
    fused_gather: float = 17.0
    fused_scatter: float = 21.5
    decomposed_gather: float = 9.8
    decomposed_scatter: float = 0.0
    narrow: float = 0.828
    precise: float = 0.68
    several: float = 0.65


@dataclass(frozen=True)
class Problem:
    """The facts that the cost of a call depends on.

    Attributes:
        op: "gather", "scatter" or "all_reduce".
        rows: of the whole 2-D A (gather) or matmul (scatter), over all ranks.
        depth: contraction length; of all pairs together.
        widths: columns of each matmul.
        itemsize: bytes of an element of A; out_itemsize: of the result, or of what is sent to be summed.
        precise: fp8 sums may not be fast.
        apart: of several scaled matmuls all contraction lengths but the greatest: cuBLAS makes each by itself.
        widened: how many times as many bytes an element of the sum has, which NCCL sends instead.
        blocks: into how many ranges a rank's rows fall: one for each index of the dims in front of the sharded one.
        returned: the gathered A is.
        pieces: how many matmuls ranges of rows come to, where each B takes some of the rows; 0: each takes all.
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
    pieces: int = 0

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

        depths: of each summed matmul; `fast`: fp8 sums may be; `sum_dtype`: of the result, if it is another.
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
        """Bytes that one rank receives; of an all-reduce, in each half."""
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
        kind += ":pieces" if self.pieces else ""
        return f"{self.op}:{self.world}:{self.dtype}:{sizes}{kind}" + (f":{self.blocks}x" if self.blocks > 1 else "")

    @property
    def sizes(self) -> tuple[str, str]:
        """Contraction lengths (of several scaled matmuls each) and columns, as `4096+512+512` and `8192`."""
        depths, widths = ("+".join(map(str, each)) for each in (self.depths, self.widths))
        return depths, widths


#: (problem, rates, SMs) → microseconds that the model expects, of graph and eager time together
Estimate = Callable[[Problem, Rates, int], float]


# --- the implementations -------------------------------------------------------------------------------------------
def sequential(problem: Problem, rates: Rates, sms: int) -> float:
    """cuBLAS on the whole and one collective of NCCL's."""
    matmul = _matmuls(problem, problem.rows, rates, sms)
    return matmul + rates.nccl_start + problem.wire_bytes * problem.widened / rates.nccl


def direct(problem: Problem, rates: Rates, sms: int) -> float:
    """cuBLAS on the whole and one kernel of ours that moves all data."""
    return _matmuls(problem, problem.rows, rates, sms) + rates.direct_start + problem.wire_bytes / rates.direct


def whole(problem: Problem, rates: Rates, sms: int) -> float:
    """Copies of all rows, then cuBLAS on the whole."""
    copies = rates.stage + problem.wire_bytes / rates.copy + (problem.world - 1) * rates.between
    return copies + _matmuls(problem, problem.rows, rates, sms)


def decomposed(problem: Problem, rates: Rates, sms: int) -> float:
    """cuBLAS for each range of a rank's rows, beside copies."""
    each = _matmuls(problem, problem.rows // problem.world // problem.blocks, rates, sms)
    more = max(problem.pieces / problem.world - problem.blocks, 0.0)
    share = problem.blocks * (each - rates.launch) + rates.launch * (1 + more)
    extra = rates.decomposed_scatter if problem.op == "scatter" else rates.decomposed_gather * problem.returned
    return _overlapped(problem, rates, share, extra, 1)


def enqueued(estimate: Estimate) -> Estimate:
    """The estimate of what is enqueued range by range: `estimate`, or the host's time if that is longer."""
    return lambda problem, rates, sms: max(estimate(problem, rates, sms), host_time(problem, rates))


def host_time(problem: Problem, rates: Rates) -> float:
    """How long the host takes to enqueue a matmul for each range of rows, and what is between them."""
    matmuls = problem.world * problem.blocks * max(len(problem.widths), len(problem.depths))
    return rates.enqueue + rates.enqueue_range * max(matmuls, problem.pieces)


def fused(problem: Problem, rates: Rates, sms: int) -> float:
    """One GEMM beside copies."""
    extra = rates.fused_gather if problem.op == "gather" else rates.fused_scatter
    share = _fused_matmul(problem, rates, sms) / problem.world
    return _overlapped(problem, rates, share, extra, chunks_for(problem, rates))


def then_shared(scatter: Estimate) -> Estimate:
    """The estimate of an all-reduce: `scatter`, and then the sums, which copy engines bring to all ranks."""

    def estimate(problem: Problem, rates: Rates, sms: int) -> float:
        shared = problem.wire_bytes / rates.copy + (problem.world - 1) * rates.between + rates.launch
        return scatter(replace(problem, op="scatter"), rates, sms) + shared

    return estimate


def as_one_all_reduce(scatter: Estimate) -> Estimate:
    """The estimate of an all-reduce that starts once: `scatter`, and as many bytes again."""

    def estimate(problem: Problem, rates: Rates, sms: int) -> float:
        second_half = problem.wire_bytes * problem.widened / rates.nccl
        return scatter(replace(problem, op="scatter"), rates, sms) + second_half

    return estimate


def direct_all_reduce(problem: Problem, rates: Rates, sms: int) -> float:
    """cuBLAS on the whole and one kernel, which moves what a scatter does, and as many bytes again."""
    return direct(replace(problem, op="scatter"), rates, sms) + problem.wire_bytes / rates.direct


# --- their terms ---------------------------------------------------------------------------------------------------
def _overlapped(problem: Problem, rates: Rates, share: float, extra: float, parts: int) -> float:
    """Copies beside matmuls.

    share: Time of the matmuls of one rank's rows. extra: What the implementation costs besides. parts: Into how many
    a scatter's share is cut, of which the first is made before its copies and the last is reduced after them.
    """
    peers = problem.world - 1
    copy = problem.wire_bytes / rates.copy / peers + rates.chunk
    extra += (rates.beside - 1) * min(problem.world * share, peers * copy)
    if problem.op == "gather":
        # the own share hides the first copy, each matmul the next copy
        end = max(share + peers * share, rates.stage + copy + peers * share, rates.stage + peers * copy + share)
        return end + extra
    # the first push waits for its matmul, the last one is hidden by the own share
    end = max((peers + 1) * share, share / parts + peers * copy)
    return end + _reduction(problem, rates) / parts + extra


def _reduction(problem: Problem, rates: Rates) -> float:
    received = problem.rows // problem.world * problem.widths[0] * problem.out_itemsize
    return received * (problem.world + 1) / rates.local + rates.launch


def _speed(problem: Problem, rates: Rates) -> float:
    return rates.matmul * (2.0 if problem.itemsize == 1 else 1.0) * (0.75 if problem.precise else 1.0)


def _matmuls(problem: Problem, rows: int, rates: Rates, sms: int) -> float:
    """The time that cuBLAS takes for all matmuls over `rows` rows, and that adding up their results takes."""
    matmuls = [replace(problem, depth=depth) for depth in problem.depths]
    made = sum(_matmul(matmul, rows, width, rates, sms) for matmul in matmuls for width in problem.widths)
    added = 3 * rows * sum(problem.widths) * problem.out_itemsize / rates.local  # two are read, one is written
    return made + len(problem.apart) * added


def _matmul(problem: Problem, rows: int, width: int, rates: Rates, sms: int) -> float:
    """The time that cuBLAS takes for one matmul: full waves of the best tile, at least reading the weight."""
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
    """The tiles of the fused GEMM for a call, over the rows of all ranks."""
    shard = problem.rows // problem.world
    dtype = torch.float8_e4m3fn if problem.itemsize == 1 else torch.bfloat16
    rows = problem.world * ceil(shard / 128) * 128
    columns, several = sum(problem.widths), bool(problem.apart)
    moving, multiplying = problem.wire_bytes / rates.copy, problem.flops / (_speed(problem, rates) * rates.narrow)
    late = problem.op == "gather" and moving > multiplying
    sizes = (rows, columns, problem.depth)
    return tiles_for(dtype, problem.precise, *sizes, sms, several, problem.out_itemsize, late)


def chunks_for(problem: Problem, rates: Rates) -> int:
    """Into how many chunks to cut one rank's rows: two, to start and to end sooner, where each still fills the tiles.

    Four over two ranks, where copies take 0.7 of the matmuls' time and more, and what two more of them cost is less
    than what they save: of what is multiplied before a scatter's first copy, and reduced or multiplied after the last,
    a quarter of a rank's share is left instead of half. Source: `docs/results/2026-11-25-h200x2/chunks.txt`. More ranks
    have more copies, and were not measured with four.

    Elsewhere more chunks are slower: a copy's words and waits take 7 us of a scatter's copies (trace of 4 x H200,
    2026-11-21), 5 of a gather's. Four with several in one copy were no faster where copies are the limit, and slower
    where matmuls are: a copy then waits for the last of them (2026-11-22).
    """
    gathers = problem.op == "gather"
    if ceil(problem.rows / problem.world / 128) < (16 if gathers else 8):
        return 1
    multiplying = problem.flops / _speed(problem, rates)
    if problem.world > 2 or problem.wire_bytes / rates.copy <= 0.7 * multiplying:
        return 2
    uncovered = multiplying / problem.world + (0 if gathers else _reduction(problem, rates))
    return 4 if uncovered / 4 > 2 * rates.gap else 2
