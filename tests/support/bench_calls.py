"""What ranks of test_bench do: every variant of a call that runs without GPUs, and ones that are wrong, are judged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from asynctp_kernels.cuda.choose import select
from torch import Tensor

from asynctp_passes.tools import bench, cli

WORLD = 2


def spec(*shape: int, dtype: str = "bfloat16", column_major: bool = False, stride: list[int] | None = None) -> Any:
    """A tensor as `Remark.call` describes it."""
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return {"dtype": dtype, "shape": list(shape), "stride": stride or ([1, shape[0]] if column_major else rows)}


def gather(a: Any, *bs: Any, biases: Any = None, dim: int = 0, full: bool = False) -> tuple[str, dict[str, Any]]:
    given = {"a_shard": a, "bs": list(bs), "biases": biases or [None] * len(bs), "gather_dim": dim}
    return "all_gather_matmul", {**given, "return_a_full": full, "group_size": WORLD}


def scaled_gather(a: Any, scale: Any, b: Any, b_scale: Any, travels: bool, **others: Any) -> tuple[str, dict[str, Any]]:
    given = {"a_shard": a, "a_scale": scale, "bs": [b], "b_scales": [b_scale], "biases": [None], "gather_dim": 0}
    given |= {"gather_a_scale": travels, "out_dtype": "bfloat16", "use_fast_accum": False, "return_a_full": False}
    return "all_gather_matmul", {**given, "group_size": WORLD, **others}


def reduction(op: str, a: Any, *bs: Any, reduce_op: str = "sum", **others: Any) -> tuple[str, dict[str, Any]]:
    given = {"a_parts": [a] * len(bs), "b_parts": list(bs)}
    biases = {"biases": [None] * len(bs), "reduce_op": reduce_op}
    return op, {**given, **others.pop("scales", {}), **biases, **others}


FP8 = "float8_e4m3fn"
NUMBER, ROWS, COLUMNS = spec(dtype="float32"), spec(32, 1, dtype="float32"), spec(1, 48, dtype="float32")
X8, W8 = spec(32, 64, dtype=FP8), spec(64, 48, dtype=FP8, column_major=True)
SCALES = {"a_scales": [ROWS, NUMBER], "b_scales": [COLUMNS, NUMBER]}
SCATTERED = {"scatter_dim": 0, "group_size": WORLD}

CALLS = {
    "gather of several products, a bias and A itself": gather(
        spec(32, 64), spec(64, 48, column_major=True), spec(64, 16), biases=[spec(48), None], full=True
    ),
    "gather of ranges": (
        "all_gather_matmul",
        {**gather(spec(32, 64), spec(64, 48), spec(64, 16))[1], "b_rows": [0, 24, 64, 24, 64, 64]},
    ),
    "gather along dimension 1": gather(spec(3, 32, 64), spec(64, 48), dim=1),
    "gather along the contraction": gather(spec(32, 64), spec(128, 48), dim=1),
    "gather of rows with gaps": gather(spec(32, 64, stride=[80, 1]), spec(64, 48), biases=[spec(48, stride=[0])]),
    "fp8 gather by rows": scaled_gather(X8, ROWS, W8, COLUMNS, True),
    "fp8 gather of what travels along": scaled_gather(X8, NUMBER, W8, NUMBER, False, along_shard=ROWS),
    "fp8 gather by blocks": scaled_gather(
        spec(32, 256, dtype=FP8), spec(32, 2, dtype="float32"), spec(256, 48, dtype=FP8, column_major=True),
        spec(2, 1, dtype="float32"), True,
    ),
    "scatter of a sum": reduction("matmul_reduce_scatter", spec(32, 64), spec(64, 48), spec(64, 48), **SCATTERED),
    "scatter along dimension 1, averaged": reduction(
        "matmul_reduce_scatter", spec(3, 32, 64), spec(64, 48), reduce_op="avg", scatter_dim=1, group_size=WORLD
    ),
    "fp8 scatter of a sum": reduction(
        "matmul_reduce_scatter", X8, W8, W8, scales=SCALES, scatter_dim=0, out_dtype="bfloat16",
        use_fast_accum=False, group_size=WORLD,
    ),
    "scatter of a product that is converted": reduction(
        "matmul_reduce_scatter", spec(32, 64), spec(64, 48), **SCATTERED, sum_dtype="float32"
    ),
    "scatter of a product and another term": reduction(
        "matmul_reduce_scatter", spec(32, 64), spec(64, 48), **SCATTERED, added=spec(32, 48)
    ),
    "fp8 all-reduce of a converted product and another term": reduction(
        "matmul_all_reduce", X8, W8, scales={"a_scales": [NUMBER], "b_scales": [NUMBER]},
        out_dtype="bfloat16", use_fast_accum=False, sum_dtype="float32", added=spec(32, 48, dtype="float32"),
    ),
    "all-reduce of a sum that is converted": reduction(
        "matmul_all_reduce", spec(32, 64), spec(64, 48), spec(64, 48), sum_dtype="float32"
    ),
    "scatter of a multiplied sum": reduction(
        "matmul_reduce_scatter", spec(32, 64), spec(64, 48), spec(64, 48), **SCATTERED, factors=[2.0, -1.0, 0.5]
    ),
    "all-reduce": reduction("matmul_all_reduce", spec(32, 64), spec(64, 48)),
    **{f"{op} {kind}": bench.built_in(op, kind, 32, 64, 48, WORLD) for op in cli.OPS for kind in cli.KINDS},
}  # fmt: skip


def judge(rank: int, world: int) -> dict[str, dict[str, float]]:
    """The errors of each call's variants, the limit, and those of results that are wrong in one way each."""
    torch.manual_seed(rank)
    return {name: errors_of(*asked, rank) for name, asked in CALLS.items()}


def errors_of(op: str, arguments: dict[str, Any], rank: int) -> dict[str, float]:
    call = bench.Call(op, arguments, torch.device("cpu"))
    right = call.variant("asynctp")
    before = right()

    def stale() -> list[Tensor]:
        return before

    def broken(value: float) -> list[Tensor]:
        results = right()
        if rank == 1:
            results[0].view(-1)[5] = value
        return results

    found = {name: call.error(call.variant(name)) for name in ("nccl", "asynctp")}
    wrong = {"stale": stale, "one element": lambda: broken(1e3), "not a number": lambda: broken(math.nan)}
    found |= {name: call.error(function) for name, function in wrong.items()}
    return {**found, "limit": bench.limit(found, call.out_dtype)}


# --- the whole benchmark, on the CPU -----------------------------------------------------------------------------
class Replayed:
    """A CUDA graph that is none: a replay calls the function again, and puts the results where they were."""

    def __init__(self, function: Callable[[], list[Tensor]], captured: list[Tensor]) -> None:
        self.function, self.captured = function, captured

    def replay(self) -> None:
        for old, new in zip(self.captured, self.function(), strict=True):
            old.copy_(new)


def measure(rank: int, world: int, arguments: list[str]) -> list[bench.Row]:
    """The rows. "direct" raises, and "fused" is wrong, but only in graphs, which give what they gave before."""
    torch.manual_seed(rank)
    asked: list[str | None] = [None]

    def ours(call: bench.Call) -> list[Tensor]:
        asked.append(select.requested())
        if asked[-1] == "direct":
            raise RuntimeError("direct is out of order\nand more")
        return call.variant("nccl")()

    def capture(function: Callable[[], list[Tensor]]) -> tuple[Any, list[Tensor]]:
        captured = function()
        stale = asked[-1] == "fused"
        return Replayed(function, [result.clone() for result in captured] if stale else captured), captured

    def events(function: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            function()
        return (time.perf_counter() - start) * 1e6 / count

    with (
        mock.patch.multiple(bench, _capture=capture, _events=events, _meet=dist.barrier),
        mock.patch.object(bench.Call, "_ours", ours),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        return list(bench.rows(bench.parse(arguments), torch.device("cpu")))
