"""The host time of a call, by implementation, on ranks that may share GPUs.

    torchrun --nproc_per_node=4 tests/gpu/host.py

Microseconds of a call as a program makes it: among others of its kind, and the first one after a wait of the host for
the GPU, when nothing of all that is in the caches of the CPU. One JSON line a kind of call, from rank 0; first cuBLAS
alone, and NCCL's calls and waits in groups of one rank. An eager call is one of the op, with all that PyTorch does for
it; generated code (`asynctp_passes.ops.call_sites`) calls what is bound to the call's plan. Rows of both and of cuBLAS:

    known        all tensors where they were before
    all new      operands and results where no call had them
    one new      A alone is elsewhere
    cold         known, after 64 MiB of other memory were written: what a real program's caches have of a call
    first        the very first call, with all that is made once; one number. That of the op makes the plan
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from launched import end, show, start
from torch import Tensor

import asynctp_passes.ops.collectives  # noqa: F401  (registers the ops)
from asynctp_passes.ops.call_sites import CallSite, WaitSite
from asynctp_passes.ops.calls import COLLECTIVES

ROUNDS, CALLS, FIRST = 4, 48, 8
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


@dataclass
class Made:
    """A call: its op, the operands, and all else by name. Lists are given as such."""

    op: str
    a: Any
    bs: list[Tensor]
    constants: dict[str, Any]
    scales: tuple[Any, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        of_gather = ("a_shard", "bs", "biases", "a_scale", "b_scales")
        names = (
            of_gather if self.op == "all_gather_matmul" else ("a_parts", "b_parts", "biases", "a_scales", "b_scales")
        )
        return names[: 3 + len(self.scales)]

    def ways(self) -> dict[str, Callable[[Any, Any], Any]]:
        """As the op's call and as that of generated code, of A and the Bs."""
        op, biases, scales = getattr(torch.ops.asynctp, self.op).default, [None] * len(self.bs), self.scales
        constants = {**self.constants, "group_name": dist.group.WORLD.group_name}
        site, names = CallSite(self.op, constants, self.names), self.names
        return {
            "op": lambda a, bs: op(**dict(zip(names, (a, bs, biases, *scales), strict=True)), **constants),
            "generated code": lambda a, bs: site(a, bs, biases, *scales),
        }


def calls() -> dict[str, Made]:
    world = dist.get_world_size()
    shard, whole, b = random(M // world, K), random(M, K), random(N, K).t()
    gather = {"gather_dim": 0, "return_a_full": False, "group_size": world}
    scatter = {"reduce_op": "sum", "scatter_dim": 0, "group_size": world}
    fp8 = torch.float8_e4m3fn
    low, wide, of_b = shard.to(fp8), whole.to(fp8), b.t().to(fp8).t()
    of_shard, of_whole, of_columns = (torch.rand(*shape, device="cuda") for shape in ((M // world, 1), (M, 1), (1, N)))
    scaled = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    return {
        "gather": Made("all_gather_matmul", shard, [b], gather),
        "gather, three matmuls, A returned": Made(
            "all_gather_matmul", shard, [random(N // 2, K).t() for _ in range(3)], {**gather, "return_a_full": True}
        ),
        "scatter": Made("matmul_reduce_scatter", [whole], [b], scatter),
        "all-reduce of 64 rows": Made("matmul_all_reduce", [whole[:64].clone()], [b], {"reduce_op": "sum"}),
        "rowwise gather": Made(
            "all_gather_matmul", low, [of_b], {**gather, "gather_a_scale": True, **scaled}, (of_shard, [of_columns])
        ),
        "rowwise scatter": Made(
            "matmul_reduce_scatter", [wide], [of_b], {**scatter, **scaled}, ([of_whole], [of_columns])
        ),
    }


def collectives() -> Iterator[tuple[str, Tensor, dict[str, Callable[[Any, Any], Any]]]]:
    """Collectives without a matmul, and their waits: as `Made` has it. Of maxima a scale is made."""
    world, name, ops = dist.get_world_size(), dist.group.WORLD.group_name, torch.ops.asynctp
    wait = WaitSite(False)
    for call, given, op, constants in (
        ("all-gather alone", random(M // world, K), "all_gather", {"group_size": world, "copy": False}),
        (
            "reduce-scatter alone",
            random(M, K),
            "reduce_scatter",
            {"reduce_op": "sum", "group_size": world, "copy": False},
        ),
        ("all-reduce of 512 maxima", random(1, K), "all_reduce", {"reduce_op": "max"}),
    ):
        constants["group_name"] = name
        site, by_op = CallSite(op, constants, (COLLECTIVES[op].names[0],)), getattr(ops, op).default
        yield (
            call,
            given,
            {
                "op": lambda a, bs, by_op=by_op, more=constants: ops.wait.default(by_op(a, **more), a),
                "generated code": lambda a, bs, site=site: wait(site(a), a),
            },
        )


def random(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda")


def by_nccl() -> dict[str, Callable[[], Any]]:
    """NCCL's calls and their waits in groups of one rank, which a GPU that ranks share allows."""
    groups = [dist.new_group([rank], backend="nccl") for rank in range(dist.get_world_size())]
    name, plain, whole = groups[dist.get_rank()].group_name, torch.ops._c10d_functional, random(M, K)
    return {
        "all-gather": lambda: plain.wait_tensor(plain.all_gather_into_tensor(whole, 1, name)),
        "reduce-scatter": lambda: plain.wait_tensor(plain.reduce_scatter_tensor(whole, "sum", 1, name)),
        "all-reduce": lambda: plain.wait_tensor(plain.all_reduce(whole, "sum", name)),
    }


def main() -> None:
    start(300)
    world, whole, b = dist.get_world_size(), random(M, K), random(N, K).t()
    gc.disable()
    with torch.no_grad():
        for addresses, us in by_addresses(lambda a, bs: torch.mm(a[0], bs[0]), ([whole], [b])):
            show({"call": "cuBLAS", "addresses": addresses, "ranks": world, "us": us})
        for call, function in by_nccl().items():
            show({"call": f"{call} of one rank", "implementation": "NCCL", "ranks": world, "us": measure(function)})
        for implementation in ("direct", "fused"):
            with cuda.forced(implementation):
                for call, given, ways in collectives():
                    for way, make in ways.items():
                        for addresses, us in by_addresses(make, (given, [])):
                            facts = {"call": call, "implementation": implementation, "way": way}
                            show({**facts, "addresses": addresses, "ranks": world, "us": us})
        for implementation in ("fused", "direct", "decomposed"):
            with cuda.forced(implementation):
                for call, made in calls().items():
                    for way, make in made.ways().items():
                        for addresses, us in by_addresses(make, (made.a, made.bs)):
                            facts = {"call": call, "implementation": implementation, "way": way}
                            show({**facts, "addresses": addresses, "ranks": world, "us": us})
    end()


if __name__ == "__main__":
    main()
