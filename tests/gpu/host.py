"""What a call costs the host, by each implementation that records its calls, on ranks that may share GPUs.

    torchrun --nproc_per_node=4 tests/gpu/host.py

Microseconds of an eager call as a program makes it, with all that PyTorch does for an op: among others of its kind, and
the first one after a wait of the host for the GPU, when nothing of all that is in the caches of the CPU. One JSON line
a kind of call, from rank 0; first cuBLAS alone, and NCCL with it or alone.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from asynctp_kernels.cuda.runtime.memory import existing_memory
from launched import end, show, start
from torch import Tensor

import asynctp_passes.ops.collectives  # noqa: F401  (registers the ops)

ROUNDS, CALLS, FIRST = 8, 48, 8
M, K, N = 1024, 512, 512


def measure(function: Callable[[], Any]) -> dict[str, float]:
    """Host time of a call in microseconds: quantiles among others, and the median right after a wait."""
    among, first = list[float](), list[float]()
    for number in range(ROUNDS + 1):
        torch.cuda.synchronize()
        dist.barrier()
        times = list[float]()
        for _ in range(CALLS):
            begun = time.perf_counter()
            function()
            times.append((time.perf_counter() - begun) * 1e6)
        if number > 0:
            first.append(times[0])
            among += times[FIRST:]
    tenths = statistics.quantiles(among, n=10)
    found = {"median": tenths[4], "tenth": tenths[0], "ninth": tenths[8], "behind_a_wait": statistics.median(first)}
    return {name: round(value, 1) for name, value in found.items()}


def random(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda")


def scaled(elsewhere: bool) -> dict[str, Callable[[], Any]]:
    """Calls in rowwise fp8. elsewhere: the scales of each are where those of the last 15 were not."""
    ops, world, name = torch.ops.asynctp, dist.get_world_size(), dist.group.WORLD.group_name
    shard, whole, b = (each.to(torch.float8_e4m3fn) for each in (random(M // world, K), random(M, K), random(N, K)))
    of_shard, of_whole, of_b = (
        itertools.cycle([torch.rand(*shape, device="cuda") for _ in range(16 if elsewhere else 1)])
        for shape in ((M // world, 1), (M, 1), (1, N))
    )
    gather, scatter = [0, False, world, name], ["sum", 0, world, name]
    return {
        "rowwise gather": lambda: ops.all_gather_matmul(
            shard, [b.t()], [None], *gather, next(of_shard), [next(of_b)], True, torch.bfloat16, False
        ),
        "rowwise scatter": lambda: ops.matmul_reduce_scatter(
            [whole], [b.t()], [None], *scatter, [next(of_whole)], [next(of_b)], torch.bfloat16, False
        ),
    }


def main() -> None:
    start(120)
    ops, world, name = torch.ops.asynctp, dist.get_world_size(), dist.group.WORLD.group_name
    shard, whole, b = random(M // world, K), random(M, K), random(N, K).t()
    three = [random(N // 2, K).t() for _ in range(3)]
    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: ops.all_gather_matmul(shard, [b], [None], 0, False, world, name),
        "gather, three products, A returned": lambda: ops.all_gather_matmul(
            shard, three, [None] * 3, 0, True, world, name
        ),
        "scatter": lambda: ops.matmul_reduce_scatter([whole], [b], [None], "sum", 0, world, name),
    }
    few, one, plain = whole[:64], torch.randn(64, device="cuda"), torch.ops._c10d_functional
    reductions: dict[str, Callable[[], Any]] = {
        "all-reduce of 64 rows": lambda: ops.matmul_all_reduce([few], [b], [None], "sum", name),
        "maximum of 64 numbers": lambda: ops.all_reduce(one, "max", name),
    }
    by_nccl: dict[str, Callable[[], Any]] = {
        "all-reduce of 64 rows": lambda: plain.wait_tensor(plain.all_reduce_(torch.mm(few, b), "sum", name)),
        "maximum of 64 numbers": lambda: plain.wait_tensor(plain.all_reduce(one, "max", name)),
    }
    gc.disable()
    with torch.no_grad():
        show({"call": "cuBLAS", "ranks": world, "us": measure(lambda: torch.mm(whole, b))})
        for implementation in ("fused", "decomposed", "direct"):
            with cuda.forced(implementation):
                for call, function in calls.items():
                    show({"call": call, "implementation": implementation, "ranks": world, "us": measure(function)})
                for way in ("scales where they were", "scales elsewhere", "not recorded"):
                    memory = existing_memory(dist.group.WORLD)
                    assert memory is not None
                    most, memory.recordings.most = memory.recordings.most, 0 if way == "not recorded" else 4096
                    for call, function in scaled(way == "scales elsewhere").items():
                        facts = {"call": f"{call}, {way}", "implementation": implementation, "ranks": world}
                        show({**facts, "us": measure(function)})
                    memory.recordings.most = most
        for implementation, functions in (("NCCL", by_nccl), ("direct", reductions), ("NCCL", by_nccl)):
            for call, function in functions.items():
                show({"call": call, "implementation": implementation, "ranks": world, "us": measure(function)})
    end()


if __name__ == "__main__":
    main()
