"""Back-to-back calls of every implementation, mixed: shapes, groups, streams, eager and graph replay, ranks delayed.

    torchrun --nproc_per_node=4 tests/gpu/stress.py [CALLS]        (100000 by default)

Operands are small integers, so every result is exact and each is compared bit for bit, on the GPU, with what it must
be. Every thousand calls all communication memory is filled with NaN while nothing is in flight. Prints one JSON line.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from asynctp_kernels.cuda.memory import existing_memory
from launched import end, show, start
from torch import Tensor

import asynctp_passes.collectives
import asynctp_passes.ops  # noqa: F401

IMPLEMENTATIONS = ("fused", "decomposed", "direct")
SHAPES = ((64, 64, 64), (512, 128, 256), (1024, 64, 512), (256, 256, 128), (2048, 128, 256), (520, 64, 72))
POISON_EVERY = 1000


@dataclass
class Call:
    """One prepared call, and what it must give."""

    run: Callable[[], Tensor]
    expected: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    captured: Tensor | None = None


def integers(shape: tuple[int, ...], low: int, high: int) -> Tensor:
    return torch.randint(low, high + 1, shape, device="cuda").to(torch.bfloat16)


def prepare(op: str, shape: tuple[int, int, int], group: dist.ProcessGroup, implementation: str) -> Call:
    m, k, n = shape
    world, name = group.size(), group.group_name
    torch.manual_seed(m + k + n)
    b = integers((n, k), -1, 1).t()
    torch.manual_seed(m + k + n + 1 + dist.get_rank())
    if op == "gather":
        a = integers((m // world, k), -1, 1)
        full = torch.empty(m, k, dtype=a.dtype, device="cuda")
        dist.all_gather_into_tensor(full, a)
        expected = full @ b
        function = lambda: torch.ops.asynctp.all_gather_matmul(a, [b], [None], 0, False, world, name)[0]  # noqa: E731
    else:
        a = integers((m, k), 0, 1)
        product = (a @ b).float()
        out = torch.empty(m // world, n, device="cuda")
        dist.reduce_scatter_tensor(out, product)
        expected = out.to(torch.bfloat16)
        function = lambda: torch.ops.asynctp.matmul_reduce_scatter([a], [b], [None], "sum", 0, world, name)  # noqa: E731

    def run() -> Tensor:
        with cuda.forced(implementation):
            return function()

    return Call(run, expected)


def prepare_bulk(op: str, inner: Call, group: dist.ProcessGroup) -> Call:
    """A collective without a product, left in flight while `inner` runs."""
    world, name = group.size(), group.group_name
    torch.manual_seed(dist.get_rank())
    x = integers((128 * world, 64), -8, 8)
    whole = torch.empty(world, *x.shape, dtype=x.dtype, device="cuda")
    dist.all_gather_into_tensor(whole, x)
    mine = whole.float().sum(0).chunk(world)[dist.get_rank()].to(x.dtype)
    expected = whole if op == "gather" else mine

    def run() -> Tensor:
        ops = torch.ops.asynctp
        flying = ops.all_gather(x, world, name) if op == "gather" else ops.reduce_scatter(x, "sum", world, name)
        beside = inner.run()
        return torch.cat((torch.ops._c10d_functional.wait_tensor(flying).flatten(), beside.flatten()))

    return Call(run, torch.cat((expected.flatten(), inner.expected.flatten())))


def capture(call: Call) -> None:
    call.run()
    torch.cuda.synchronize()
    dist.barrier()
    call.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(call.graph):
        first, second = call.run(), call.run()
        call.captured = torch.stack((first, second))


def poison(groups: list[dist.ProcessGroup]) -> None:
    torch.cuda.synchronize()
    dist.barrier()
    for group in groups:
        memory = existing_memory(group)
        for name, area in memory.areas.items() if memory else ():
            if "words" not in name:
                area.memory.fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()


def main() -> int:
    start(300)
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    groups = [dist.group.WORLD, dist.new_group(list(range(dist.get_world_size())))]
    for group in groups:
        dist.barrier(group)
    calls = [
        [
            prepare(op, shape, group, name)
            for op in ("gather", "scatter")
            for shape in SHAPES
            for name in IMPLEMENTATIONS
        ]
        for group in groups
    ]
    for group, of_group in zip(groups, calls, strict=True):
        of_group += [prepare_bulk(op, inner, group) for op in ("gather", "scatter") for inner in of_group[::2]]
    for of_group in calls:
        for call in of_group:
            call.run()
        for call in of_group[::5]:
            capture(call)
    streams = [torch.cuda.Stream() for _ in groups]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    shared, own = random.Random(7), random.Random(dist.get_rank())
    torch.cuda.synchronize()
    began, replays, done = time.time(), 0, 0
    while done < total:
        which = shared.randrange(len(groups))
        call = shared.choice(calls[which])
        replay = call.graph is not None and shared.random() < 0.5
        with torch.cuda.stream(streams[which]):
            if own.random() < 0.05:
                torch.cuda._sleep(own.randrange(1, 400_000))
            if replay:
                # a graph and an eager call of different streams are ordered by the program, as for any collective
                for stream in streams:
                    streams[which].wait_stream(stream)
                call.graph.replay()
                wrong += (call.captured != call.expected).any()
                for stream in streams:
                    stream.wait_stream(streams[which])
                done, replays = done + 2, replays + 2
            else:
                wrong += (call.run() != call.expected).any()
                done += 1
        if done % POISON_EVERY < 2:
            poison(groups)
    torch.cuda.synchronize()
    dist.all_reduce(wrong)
    count = int(wrong.item())
    show({"calls": done, "replayed": replays, "wrong": count, "seconds": round(time.time() - began, 1)})
    end()
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
