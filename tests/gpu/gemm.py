"""The GEMM of `fused` by itself on one GPU, beside cuBLAS: nothing moves, and nothing is waited for.

    python tests/gpu/gemm.py [RANKS]        (4 by default)

As a rank among RANKS runs it, with the rows of all of them, on the benchmark's shapes where the grid is two waves of
tiles or more. A gather's awaits a word a rank, which is set, as `async_input_matmul`'s; a scatter's counts its tiles.
Each is checked first, by the norm of what differs from cuBLAS; then CUDA graphs of calls, in turns, medians. One JSON
line a shape: microseconds, and `ratio`, cuBLAS' time / the GEMM's; last the least ratio and the geometric mean of each
kind.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from asynctp_kernels.cuda.choose.select import Problem, Rates, chunks_for
from asynctp_kernels.cuda.choose.tiles import cut, cut_own, tiles_for, waves
from asynctp_kernels.cuda.gemm.arguments import MAX_OPERANDS, GemmArguments
from asynctp_kernels.cuda.gemm.cublas import Scaling, matmul
from asynctp_kernels.cuda.gemm.gemm import b_descriptor, prepare_gemm, scale_mode
from asynctp_kernels.cuda.runtime.launch import Tma, describe, grid
from asynctp_kernels.cuda.runtime.memory import MAX_OWN
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from asynctp_passes.tools.bench import GATHER_SHAPES, SCATTER_SHAPES, orders

ROWS = (2048, 4096, 8192, 16384)
CALLS, ROUNDS = 10, 15
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    op: str
    kind: str
    m: int
    k: int
    n: int


@dataclass
class Made:
    """run: the GEMM, into `out`. words: what it counts in; tiles: how many it has."""

    run: Callable[[], None]
    out: Tensor
    words: Tensor
    tiles: int


def waves_of(case: Case, programs: int) -> int:
    tiles = tiles_for(torch.bfloat16 if case.kind == "bf16" else FP8, False, case.m, case.n, case.k, programs)
    return waves(case.m, case.n, tiles.block_m, tiles.block_n, programs)


def make(case: Case, world: int, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor] | None) -> Made:
    """As the plans of gathers and scatters do."""
    inner, programs = case.m // world, torch.cuda.get_device_properties(0).multi_processor_count
    tiles = tiles_for(a.dtype, False, case.m, case.n, case.k, programs)
    problem = Problem.of(case.op, world, case.m, [case.k], [case.n], a.dtype, torch.bfloat16, fast=True)
    chunks = cut(1, inner, tiles.block_m, chunks_for(problem, Rates()))
    gathers = case.op == "gather"
    if not gathers:
        tiles = replace(tiles, group_m=min(tiles.group_m, chunks.tiles))
    own = cut_own(chunks, 1, inner, tiles.block_m, tiles.group_m)
    row_tiles = -(-inner // tiles.block_m)
    count = world * row_tiles * -(-case.n // tiles.block_n)
    out = torch.empty(world, inner, case.n, dtype=torch.bfloat16, device="cuda")
    words = torch.full((world * MAX_OWN,), int(gathers), dtype=torch.int32, device="cuda")
    unused = torch.zeros(4, dtype=torch.int32, device="cuda")
    a_like = describe(a, [world, inner, case.k], [inner * case.k, case.k, 1], [1, tiles.block_m, tiles.block_k])
    c_like = describe(out, [world, inner, case.n], [inner * case.n, case.n, 1], tiles.stored)
    a_scale, b_scale = scales or (unused, unused)
    args = GemmArguments(
        a=(a_like,), b=(b_descriptor(b, tiles),), c=(c_like,), a_scale=[a_scale] * MAX_OPERANDS,
        b_scale=[b_scale] * MAX_OPERANDS, bias=(), words=words, done_ptr=unused, outer=1, inner=inner, k=(case.k,),
        n=(case.n,), rank=0, world=world, chunk_size=row_tiles if gathers else chunks.tiles, own_tiles=own.tiles,
        value=1,
    ).listed(unused)  # fmt: skip
    modes = (scale_mode(scales and a_scale), scale_mode(scales and b_scale))
    launch = prepare_gemm(
        args, grid(count, programs), 1, tiles, [b], None, modes, torch.bfloat16, gathers, async_input=gathers
    )
    given = [given_at_launch(argument) for argument in args]
    return Made(lambda: launch(torch.cuda.current_stream().cuda_stream, given), out.view(case.m, case.n), words, count)


def given_at_launch(argument: Any) -> Any:
    """What a `Launch` takes for an example argument: addresses of tensors."""
    if isinstance(argument, TensorDescriptor):
        return Tma(argument, argument.base.data_ptr())
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def measure(calls: dict[str, Callable[[int], Any]], count: int, rounds: int) -> dict[str, float]:
    """Microseconds of a call, of `count` in a CUDA graph, each told its number; in turns, the median of the rounds."""
    graphs = {}
    for name, call in calls.items():
        call(0)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for i in range(count):
                call(i)
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for order in orders(list(calls), rounds):
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / count)
    return {name: statistics.median(found) for name, found in times.items()}


def run(case: Case, world: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if case.kind == "bf16" else FP8
    a = (torch.randn(case.m, case.k, device="cuda") / 4).to(dtype)
    b = (torch.randn(case.n, case.k, device="cuda") / 4).to(dtype).t()
    rows, cols = ((case.m, 1), (1, case.n)) if case.kind == "fp8-rowwise" else ((), ())
    scales = None if case.kind == "bf16" else (torch.rand(rows, device="cuda") + 0.5, torch.rand(cols, device="cuda"))
    made = make(case, world, a, b, scales)
    wanted = torch.empty_like(made.out)

    def cublas() -> None:
        if scales is None:
            matmul(a, b, None, None, None, None, out=wanted)
        else:
            matmul(a, b, None, *scales, Scaling(torch.bfloat16, fast=True), out=wanted)

    made.run()
    cublas()
    torch.cuda.synchronize()
    error = ((made.out.float() - wanted.float()).norm() / wanted.float().norm()).item()
    right = error < 0.01 and (case.op == "gather" or int(made.words.sum()) == made.tiles)
    if not right:
        raise SystemExit(f"{case} is wrong: error {error:g}, {int(made.words.sum())} of {made.tiles} tiles counted")
    measured = measure({"gemm": lambda _: made.run(), "cublas": lambda _: cublas()}, CALLS, ROUNDS)
    found = {name: round(us, 1) for name, us in measured.items()}
    return {**found, "ratio": round(found["cublas"] / found["gemm"], 3), "error": round(error, 5)}


def main() -> None:
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    properties = torch.cuda.get_device_properties(0)
    print(json.dumps({"gpu": properties.name, "ranks": world, "torch": torch.__version__}), flush=True)
    shapes = [("gather", *shape) for shape in GATHER_SHAPES] + [("scatter", *shape) for shape in SCATTER_SHAPES]
    ratios: dict[str, list[float]] = {}
    for kind in ("bf16", "fp8", "fp8-rowwise"):
        for op, k, n in shapes:
            for m in ROWS:
                case = Case(op, kind, m, k, n)
                if waves_of(case, properties.multi_processor_count) < 2:
                    continue
                found = run(case, world)
                print(json.dumps({"case": f"{op} {kind} {m} x {k} x {n}", **found}), flush=True)
                ratios.setdefault(f"{op} {kind}", []).append(found["ratio"])
    print(json.dumps({name: [min(of), round(statistics.geometric_mean(of), 3)] for name, of in ratios.items()}))


if __name__ == "__main__":
    main()
