"""What a call costs the host, by each implementation, on ranks that may share GPUs.

    torchrun --nproc_per_node=4 tests/gpu/host.py

Microseconds of a call as a program makes it: among others of its kind, and the first one after a wait of the host for
the GPU, when nothing of all that is in the caches of the CPU. One JSON line a kind of call, from rank 0; first cuBLAS
alone, and NCCL with it or alone. An eager call is one of the op, with all that PyTorch does for it; generated code
(`asynctp_passes.ops.call_sites`) calls what is bound to the call's plan. Rows of both, and of cuBLAS in the same run:

    known        all tensors where they were before
    all new      operands and results where no call had them
    one new      A alone is elsewhere
    cold         known, after 64 MiB of other memory were written: what a real program's caches have of a call
    first        the very first call, with all that is made once; one number. That of the op makes the plan
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from launched import end, show, start
from torch import Tensor

import asynctp_passes.ops.collectives  # noqa: F401  (registers the ops)
from asynctp_passes.ops.call_sites import CallSite

ROUNDS, CALLS, FIRST = 8, 48, 8
NEW_ROUNDS, NEW_CALLS, COLD_CALLS = 4, 24, 24
M, K, N = 1024, 512, 512
Operands = tuple[Any, list[Tensor]]
"""A, or As, and Bs."""


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


def timed(make: Callable[[Any, Any], Any], operands: Operands) -> tuple[float, Any]:
    """Host time of one call in microseconds, and what it gives."""
    begun = time.perf_counter()
    result = make(*operands)
    return (time.perf_counter() - begun) * 1e6, result


def quantiles(times: Sequence[float]) -> dict[str, float]:
    tenths = statistics.quantiles(times, n=10)
    return {name: round(tenths[at], 1) for name, at in (("median", 4), ("tenth", 0), ("ninth", 8))}


def new(operands: Operands, only_a: bool) -> Operands:
    """The same operands in memory of their own: all, or A alone."""
    a, bs = operands
    return elsewhere(a), bs if only_a else [elsewhere(b) for b in bs]


def elsewhere(value: Any) -> Any:
    if isinstance(value, list):
        return [elsewhere(each) for each in value]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda").copy_(value)


def by_addresses(make: Callable[[Any, Any], Any], operands: Operands) -> Iterator[tuple[str, dict[str, float]]]:
    """Rows of a call, which is made of A and the Bs. The allocator has the memory that all of them take."""
    spare = [torch.empty(1 << size, dtype=torch.uint8, device="cuda") for size in (18, 20) for _ in range(1000)]
    spare += [torch.empty(1 << 30, dtype=torch.uint8, device="cuda")]
    del spare
    torch.cuda.synchronize()
    dist.barrier()
    yield "first", {"once": round(timed(make, operands)[0], 1)}
    for _ in range(FIRST):
        make(*operands)
    yield "known", measure(lambda: make(*operands))
    for name, only_a in (("all new", False), ("one new", True)):
        kept, times = list[Any](), list[float]()
        for _ in range(NEW_ROUNDS):
            every = [new(operands, only_a) for _ in range(NEW_CALLS)]
            torch.cuda.synchronize()
            dist.barrier()
            for each in every:
                us, result = timed(make, each)
                times.append(us)
                kept.append((each, result))
        yield name, quantiles(times)
    cold, junk = list[float](), np.ones(16 << 20, dtype=np.float32)
    for _ in range(FIRST):
        make(*operands)
    for _ in range(COLD_CALLS):
        torch.cuda.synchronize()
        dist.barrier()
        junk += 1
        cold.append(timed(make, operands)[0])
    yield "cold", quantiles(cold)


def generated(op: str, tensors: Sequence[str], **constants: Any) -> CallSite:
    """What the code that Inductor generates calls in place of the op."""
    return CallSite(op, {**constants, "group_name": dist.group.WORLD.group_name}, tuple(tensors))


def both_ways() -> dict[str, tuple[Operands, dict[str, Callable[[Any, Any], Any]]]]:
    """Calls with their operands, as the op's and as those of generated code."""
    ops, world, name = torch.ops.asynctp, dist.get_world_size(), dist.group.WORLD.group_name
    shard, whole, b = random(M // world, K), random(M, K), random(N, K).t()
    gather = generated(
        "all_gather_matmul", ("a_shard", "bs", "biases"), gather_dim=0, return_a_full=False, group_size=world
    )
    scatter = generated(
        "matmul_reduce_scatter", ("a_parts", "b_parts", "biases"), reduce_op="sum", scatter_dim=0, group_size=world
    )
    total = generated("matmul_all_reduce", ("a_parts", "b_parts", "biases"), reduce_op="sum")
    return {
        "gather": (
            (shard, [b]),
            {
                "op": lambda a, bs: ops.all_gather_matmul(a, bs, [None], 0, False, world, name),
                "generated code": lambda a, bs: gather(a, bs, [None]),
            },
        ),
        "scatter": (
            ([whole], [b]),
            {
                "op": lambda a, bs: ops.matmul_reduce_scatter(a, bs, [None], "sum", 0, world, name),
                "generated code": lambda a, bs: scatter(a, bs, [None]),
            },
        ),
        "all-reduce of 64 rows": (
            ([whole[:64].clone()], [b]),
            {
                "op": lambda a, bs: ops.matmul_all_reduce(a, bs, [None], "sum", name),
                "generated code": lambda a, bs: total(a, bs, [None]),
            },
        ),
    }


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
    start(300)
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
        for addresses, us in by_addresses(lambda a, bs: torch.mm(a[0], bs[0]), ([whole], [b])):
            show({"call": "cuBLAS", "addresses": addresses, "ranks": world, "us": us})
        for implementation in (None, "fused", "decomposed", "direct"):
            with cuda.forced(implementation) if implementation else contextlib.nullcontext():
                for call, (operands, ways) in both_ways().items():
                    for way, make in ways.items():
                        for addresses, us in by_addresses(make, operands):
                            facts = {"call": call, "implementation": implementation or "auto", "way": way}
                            show({**facts, "addresses": addresses, "ranks": world, "us": us})
        for implementation in ("fused", "decomposed", "direct"):
            with cuda.forced(implementation):
                for call, function in calls.items():
                    show({"call": call, "implementation": implementation, "ranks": world, "us": measure(function)})
                for way in ("scales where they were", "scales elsewhere"):
                    for call, function in scaled(way == "scales elsewhere").items():
                        facts = {"call": f"{call}, {way}", "implementation": implementation, "ranks": world}
                        show({**facts, "us": measure(function)})
        for implementation, functions in (("NCCL", by_nccl), ("direct", reductions), ("NCCL", by_nccl)):
            for call, function in functions.items():
                show({"call": call, "implementation": implementation, "ranks": world, "us": measure(function)})
    end()


if __name__ == "__main__":
    main()
