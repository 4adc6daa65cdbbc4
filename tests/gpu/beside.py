"""Calls beside NCCL kernels of another group, as under FSDP, and without: a GEMM in one share and in several.

    torchrun --nproc_per_node=2 tests/gpu/beside.py [M] [part of a shape's name ...]        (8192 rows by default)

Blocks of Llama 3 8B and 70B over two ranks, bf16. One JSON line for each shape and way to run it, from rank 0, all ways
in turns: microseconds of a call without anything beside it, and while all-gathers of 109 MiB a rank follow each other
on another stream; and of such an all-gather, in the mean of all, also of those after the last call. "shares N": `fused`
in at most N shares, though the group is the whole program.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from asynctp_kernels.cuda.plans import fused
from asynctp_kernels.cuda.runtime.memory import existing_memory
from launched import end, limit, show, start
from torch import Tensor

import asynctp_passes.ops.collectives  # noqa: F401  (registers the ops)

#: of each shape: kind, K, N of each matmul
SHAPES = {
    "8b qkv": ("gather", 4096, (2048, 512, 512)),
    "8b gate, up": ("gather", 4096, (7168, 7168)),
    "8b attention's output": ("scatter", 2048, (4096,)),
    "8b down": ("scatter", 7168, (4096,)),
    "70b gate, up": ("gather", 8192, (14336, 14336)),
    "70b down": ("scatter", 14336, (8192,)),
}
WAYS = ("plain", "shares 1", "shares 2", "shares 3", "shares 4", "decomposed", "cuBLAS alone")
ROUNDS, CALLS = 5, 12
SHARD = 109 << 20  # bytes of an all-gather: a block's weights of 8B over two TP ranks and two FSDP ranks
AHEAD = 600_000  # cycles for which the GPU waits, so that the host is ahead
_plans: dict[str, dict[object, object]] = {}


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """Calls inside run this way; it has its own plans."""
    if name in ("plain", "cuBLAS alone"):
        yield
        return
    memory = existing_memory(dist.group.WORLD)
    if memory is not None:
        memory.plans = _plans.setdefault(name, {})
    most = int(name.split()[-1]) if name.startswith("shares") else 1
    with (
        cuda.forced("decomposed" if name == "decomposed" else "fused"),
        mock.patch.object(fused, "others_beside", return_value=True),
        mock.patch.object(fused, "shares_for", lambda waves: min(most, max(waves, 1))),
    ):
        yield


def calls(kind: str, a: Tensor, whole: Tensor, bs: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """The function of each way."""
    ops, plain = torch.ops.asynctp, torch.ops._c10d_functional
    ranks, name = dist.get_world_size(), dist.group.WORLD.group_name

    def by_nccl() -> Any:
        if kind == "gather":
            gathered = plain.wait_tensor(plain.all_gather_into_tensor(a, ranks, name))
            return [gathered @ b for b in bs]
        return [plain.wait_tensor(plain.reduce_scatter_tensor(a @ bs[0], "sum", ranks, name))]

    def ours() -> Any:
        if kind == "gather":
            return ops.all_gather_matmul(a, bs, [None] * len(bs), 0, False, ranks, name)[: len(bs)]
        return [ops.matmul_reduce_scatter([a], bs, [None], "sum", 0, ranks, name)]

    return {**dict.fromkeys(WAYS, ours), "plain": by_nccl, "cuBLAS alone": lambda: [whole @ b for b in bs]}


class Neighbour:
    """All-gathers of another group of the same ranks, on a stream of their own."""

    def __init__(self) -> None:
        self.group = dist.new_group(list(range(dist.get_world_size())))
        self.shard = torch.zeros(SHARD // 2, dtype=torch.bfloat16, device="cuda")
        self.whole = torch.empty(dist.get_world_size() * SHARD // 2, dtype=torch.bfloat16, device="cuda")
        self.stream = torch.cuda.Stream()
        dist.all_gather_into_tensor(self.whole, self.shard, group=self.group)

    def begin(self, count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueue so many. Events before and after them."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            before.record()
            for _ in range(count):
                work = dist.all_gather_into_tensor(self.whole, self.shard, group=self.group, async_op=True)
            work.wait()
            after.record()
        return before, after


def timed(function: Callable[[], Any], neighbour: Neighbour | None, gathers: int) -> tuple[float, float]:
    """Microseconds of a call, and of an all-gather beside it.

    Raises:
        RuntimeError: The all-gathers ended before the calls.
    """
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    around = None if neighbour is None else neighbour.begin(gathers)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    first.record()
    for _ in range(CALLS):
        function()
    last.record()
    last.synchronize()
    if around is not None and around[1].query():
        raise RuntimeError(f"{gathers} all-gathers ended before {CALLS} calls")
    torch.cuda.synchronize()
    call = first.elapsed_time(last) * 1e3 / CALLS
    return call, 0.0 if around is None else around[0].elapsed_time(around[1]) * 1e3 / gathers


def measure(m: int, kind: str, k: int, ns: tuple[int, ...], neighbour: Neighbour) -> dict[str, dict[str, float]]:
    """Medians of every way."""
    ranks = dist.get_world_size()
    a = torch.randn(m // ranks if kind == "gather" else m, k, dtype=torch.bfloat16, device="cuda")
    bs = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda").t() for n in ns]
    whole = torch.empty(m, k, dtype=torch.bfloat16, device="cuda")
    if kind == "gather":
        dist.all_gather_into_tensor(whole, a)
    functions = calls(kind, a, whole, bs)
    wanted = functions["plain"]()
    found = {name: {"alone": list[float](), "beside": list[float](), "all-gather": list[float]()} for name in WAYS}
    for _ in range(ROUNDS):
        for name in WAYS:
            with way(name):
                for _ in range(3):
                    results = functions[name]()
                if name != "cuBLAS alone":
                    for result, expected in zip(results, wanted, strict=True):
                        error = (result.float() - expected.float()).norm() / expected.float().norm()
                        assert error < 0.01, f"{name}: {error}"
                alone, _ = timed(functions[name], None, 0)
                enough = torch.tensor([int(alone * CALLS * 3 / 500) + 6], device="cuda")
                dist.broadcast(enough, 0)
                beside, gather = timed(functions[name], neighbour, int(enough))
            for what, value in (("alone", alone), ("beside", beside), ("all-gather", gather)):
                found[name][what].append(value)
    return {name: {what: round(statistics.median(each), 1) for what, each in of.items()} for name, of in found.items()}


def main() -> None:
    start(120)
    given = sys.argv[1:]
    m = int(given.pop(0)) if given and given[0].isdecimal() else 8192
    neighbour = Neighbour()
    with torch.no_grad():
        for shape, (kind, k, ns) in SHAPES.items():
            if given and not any(text in shape for text in given):
                continue
            limit(120)
            for name, times in measure(m, kind, k, ns, neighbour).items():
                show({"shape": shape, "op": kind, "m": m, "k": k, "n": ns, "way": name, **times})
    end()


if __name__ == "__main__":
    main()
