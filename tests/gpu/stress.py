"""Back-to-back calls of every implementation, mixed: shapes, groups, streams, eager and graph replay, ranks delayed.

    torchrun --nproc_per_node=4 tests/gpu/stress.py [CALLS]        (100000 by default)

The calls are `stressed`: bf16, and fp8 with scales that travel, of rows and of blocks, along the first dimension and
another, one B and several, gathers, scatters and all-reduces, alone and beside a collective that copy engines have in
flight. Operands are small integers and scales powers of two, so every result is exact and each is compared bit for bit,
on the GPU, with what it must be; what is gathered or multiplied is written just before its call, over zeros. Half of
the calls have copies of their scales, which lie elsewhere. Every thousand calls all communication memory is filled with
NaN while nothing is in flight, and what the allocator has to spare is given back, so that other memory comes to lie
where earlier calls had theirs. Prints one JSON line: `prepared` counts the different calls, and `least` says how
often the rarest was made. `launched` calls were launches of their plan's graph, `bound` ones came from call sites.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import cases
import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from asynctp_kernels.cuda.runtime.memory import existing_memory
from cases import FP8, Case, Data, draw, expected
from launched import end, limit, show, start
from torch import Tensor

from asynctp_passes.ops.call_sites import CallSite, WaitSite
from asynctp_passes.ops.calls import COLLECTIVES

ALL = ("fused", "decomposed", "direct", "whole")
NOT_DECOMPOSED = ("fused", "direct", "whole")  # rows of a rank in more than 4 ranges
NOT_FUSED = ("decomposed", "direct", "whole")  # scales of blocks
SHAPES = ((64, 64, 64), (512, 128, 256), (1024, 64, 512), (256, 256, 128), (2048, 128, 256), (520, 64, 72))
POISON_EVERY = 1000
SITES = list[CallSite]()
SHALLOW = 288  # the depth up to which A has as few zeros as it comes with


def stressed(world: int) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Every call, and the implementations that run it.

    No sum of a rank's products exceeds 256, up to which bf16 has every integer.
    """
    for m, k, n in SHAPES:
        yield Case("gather", (m // world,), k, (n,)), ALL
        yield Case("scatter", (m,), k, (n,)), ALL
    for m, k in ((512, 128), (2048, 64)):
        gather, scatter = Case("gather", (m // world,), k, (256,)), Case("scatter", (m,), k, (256,))
        yield replace(gather, ns=(256, 64, 128), full=True), ALL
        yield replace(gather, ns=(256, 64, 128), full=True, alone=True), ALL
        yield replace(gather, ns=(256, 64, 128)), ALL
        yield replace(gather, shard=(3, m // world), dim=1, ns=(256, 64)), ALL
        yield replace(gather, shard=(3, m // world), dim=1, full=True), ALL
        yield replace(gather, shard=(3, m // world), dim=1, full=True, alone=True), ALL
        yield replace(gather, shard=(5, m // world), dim=1, ns=(256, 64)), NOT_DECOMPOSED
        yield replace(scatter, ns=(256, 256)), ALL
        yield replace(scatter, real=m - 75), ALL
        yield replace(scatter, shard=(3, m), dim=1, ns=(256, 256)), ALL
        yield replace(scatter, shard=(3, m), dim=1, ns=(256, 256), real=m // 3), ALL
        yield replace(scatter, shard=(5, m), dim=1, ns=(256, 256)), NOT_DECOMPOSED
        by_row = {"dtype": FP8, "scales": "row"}
        yield replace(gather, **by_row, travels=True), ALL
        yield replace(gather, **by_row, travels=True, ns=(256, 64, 128), full=True), ALL
        yield replace(gather, **by_row, travels=True, ns=(256, 64, 128), full=True, alone=True), ALL
        yield replace(gather, **by_row, travels=True, shard=(3, 50), dim=1, fast=False), ALL
        yield replace(gather, dtype=FP8, scales="tensor", along=True, ns=(256, 64)), ALL
        yield replace(scatter, **by_row), ALL
        yield replace(scatter, **by_row, real=m - 75), ALL
        deep = {"k": 14 * 128, **by_row}  # more steps over K than stages of a GEMM, twice
        yield replace(gather, **deep, travels=True), ALL
        yield replace(scatter, **deep), ALL
        yield replace(scatter, **by_row, shard=(3, 50 * world), dim=1), ALL
        sums = replace(scatter, dtype=FP8, scales="tensor", ns=(256, 256))
        yield sums, ALL
        yield replace(sums, ks=(k, k // 2, k // 4), ns=(256, 256, 256), fast=False), ALL
        yield replace(sums, shard=(3, 50 * world), dim=1), ALL
        reduced = replace(scatter, op="all_reduce")
        yield reduced, ALL
        yield replace(reduced, ns=(256, 256)), ALL
        yield replace(reduced, **by_row), ALL
    for scales in ("1x128+128x128", "128x128+1x128", "1x128+1x128"):
        by_block = {"dtype": FP8, "scales": scales, "fast": False}
        gather = Case("gather", (2048 // world,), 160, (256,), **by_block)
        yield gather, NOT_FUSED
        yield replace(gather, travels=True), NOT_FUSED
        yield replace(gather, travels=True, k=288, ns=(256, 208), full=True), NOT_FUSED
        yield replace(gather, travels=True, shard=(2, 256), dim=1), NOT_FUSED
        scatter = Case("scatter", (2048,), 160, (256,), **by_block)
        yield scatter, NOT_FUSED
        yield replace(scatter, ns=(208, 208), ks=(160, 144), out_dtype=torch.float32), NOT_FUSED
        yield replace(scatter, shard=(2, 256 * world), dim=1), NOT_FUSED
        yield replace(scatter, op="all_reduce"), NOT_FUSED


@dataclass
class Call:
    """One prepared call, what it must give, how often it was made, and how often it gave something else."""

    name: str
    run: Callable[[], Tensor]
    expected: Tensor
    wrong: Tensor
    made: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    captured: Tensor | None = None

    def compare(self, found: Tensor) -> None:
        """Count `found`, one result or a stack of them."""
        results = found.view(-1, *self.expected.shape)
        self.wrong += (results != self.expected).any(1).sum()
        self.made += len(results)


def flat(tensors: list[Tensor]) -> Tensor:
    """All of them in one row of bf16, which has every number here."""
    return torch.cat([tensor.to(torch.bfloat16).flatten() for tensor in tensors])


def exact(data: Data, case: Case) -> Data:
    """The same tensors with -1, 0 and 1 for numbers, and ½, 1 and 2 for scales; without ½ for those within a sum.

    Of a deep product most numbers of A are 0, so that its sums are not larger for that.
    """

    def integers(tensor: Tensor, share: float = 1.0) -> Tensor:
        values = torch.randint(-1, 2, tensor.shape, device=tensor.device).to(torch.bfloat16)
        values *= torch.rand(tensor.shape, device=tensor.device) < share
        return torch.empty_like(tensor).copy_(values.to(tensor.dtype))

    def powers(scale: Tensor) -> Tensor:
        if scale.numel() == 1:  # the same on all ranks
            return torch.full_like(scale, 0.5)
        least = 0 if "x" in case.scales else -1
        return 2.0 ** torch.randint(least, 2, scale.shape, device=scale.device).to(scale.dtype)

    assert not case.bias
    shares = [min(1.0, SHALLOW / a.shape[-1]) for a in data.a]
    return Data(
        list(map(integers, data.a, shares)), list(map(integers, data.b)), list(map(powers, data.a_scales)),
        list(map(powers, data.b_scales)), data.biases, list(map(powers, data.along)),
    )  # fmt: skip


def prepare(case: Case, implementations: tuple[str, ...], group: dist.ProcessGroup) -> Iterator[Call]:
    """One call of `case` by each implementation; one that cannot run it raises when it is called."""
    torch.manual_seed(zlib.crc32(case.name.encode()) * 8 + dist.get_rank())
    data = exact(draw(case), case)
    wanted = flat(expected(case, data))
    kept, draws = [a.clone() for a in data.a], random.Random(dist.get_rank())

    def by(implementation: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            for a, real in zip(data.a, kept, strict=True):
                a.zero_()
                a.copy_(real)
            used = cases.elsewhere(data) if draws.random() < 0.5 else data
            with cuda.forced(implementation):
                return flat(cases.call(case, used, group))

        return run

    for name in implementations:
        yield Call(f"{case.name}/{name}", by(name), wanted, torch.zeros((), dtype=torch.int64, device=wanted.device))


def prepare_bulk(op: str, inner: Call, group: dist.ProcessGroup, copy: bool) -> Call:
    """A collective without a product, left in flight while `inner` runs: of a copy, by its op.

    Of its input itself it is called as from generated code, and so is its wait.
    """
    world, group_name = group.size(), group.group_name
    torch.manual_seed(dist.get_rank())
    x = torch.randint(-8, 9, (128 * world, 64), device=inner.expected.device).to(torch.bfloat16)
    whole = cases.gathered(x.unsqueeze(0), 0)
    mine = whole.float().sum(0).chunk(world)[dist.get_rank()].to(x.dtype)
    wanted = flat([whole if op == "gather" else mine, inner.expected])

    name, own = ("all_gather", {}) if op == "gather" else ("reduce_scatter", {"reduce_op": "sum"})
    given = {**own, "group_size": world, "group_name": group_name, "copy": copy}
    if op == "gather":
        given["all_keep"] = len(inner.name) % 2 == 0
    site, wait, start = (
        CallSite(name, given, (COLLECTIVES[name].names[0],)),
        WaitSite(False),
        getattr(torch.ops.asynctp, name),
    )
    SITES.append(site)

    def run() -> Tensor:
        with cuda.forced("fused"):  # by copy engine, few bytes though they are
            flying = start(x, **given) if copy else site(x)
        beside = inner.run()
        done = torch.ops._c10d_functional.wait_tensor(flying) if copy else wait(flying, x)
        return flat([done, beside])

    return Call(
        f"bulk {op}{' of a copy' if copy else ''} beside {inner.name}", run, wanted, torch.zeros_like(inner.wrong)
    )


def prepare_all(group: dist.ProcessGroup, reduces: bool) -> list[Call]:
    """All calls of a group, run once; of each case one implementation is captured too, and some calls in flight.

    reduces: all-reduces are among them.
    """
    calls, captured = [], []
    for index, (case, implementations) in enumerate(stressed(group.size())):
        if reduces or case.op != "all_reduce":
            made = list(prepare(case, implementations, group))
            captured.append(made[index % len(made)])
            calls += made
    in_flight = [
        prepare_bulk(op, inner, group, copy=index % 2 == 0)
        for op in ("gather", "scatter")
        for index, inner in enumerate(calls[::2])
    ]
    for call in calls + in_flight:
        limit(300)
        call.run()
    for call in captured + in_flight[::5]:
        capture(call)
    return calls + in_flight


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
    torch.cuda.empty_cache()
    dist.barrier()


def mix(calls: list[list[Call]], groups: list[dist.ProcessGroup], total: int) -> tuple[int, int]:
    """Make `total` calls in an order that is random and the same on all ranks; how many, and how many in graphs."""
    streams = [torch.cuda.Stream() for _ in groups]
    shared, own = random.Random(7), random.Random(dist.get_rank())
    replays, done = 0, 0
    torch.cuda.synchronize()
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
                call.compare(call.captured)
                for stream in streams:
                    stream.wait_stream(streams[which])
                done, replays = done + 2, replays + 2
            else:
                call.compare(call.run())
                done += 1
        if done % POISON_EVERY < 2:
            poison(groups)
    torch.cuda.synchronize()
    return done, replays


def main() -> int:
    start(300)
    torch.set_grad_enabled(False)
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    groups = [dist.group.WORLD, dist.new_group(list(range(dist.get_world_size())))]
    for group in groups:
        dist.barrier(group)
    # NCCL, which an all-reduce ends with, does not order the kernels of two groups on two streams: one has them. Gloo's
    # collectives cannot be captured: none has.
    reducing = groups[0] if dist.get_backend() == "nccl" else None
    calls = [prepare_all(group, reduces=group is reducing) for group in groups]
    limit(600)
    began = time.time()
    done, replays = mix(calls, groups, total)
    seconds = round(time.time() - began, 1)
    every = [call for of_group in calls for call in of_group]
    launched = sum(memory.launched for group in groups if (memory := existing_memory(group)) is not None)
    counts = torch.stack([call.wrong for call in every])
    dist.all_reduce(counts)
    wrong = {call.name: count for call, count in zip(every, counts.tolist(), strict=True) if count}
    least = min(call.made for call in every)
    bound = sum(site.direct for site in SITES)
    show({"calls": done, "replayed": replays, "launched": launched,
          "bound": bound, "wrong": sum(wrong.values()), "prepared": len(every), "least": least,
          "seconds": seconds, **({"wrong calls": wrong} if wrong else {})})  # fmt: skip
    del every, calls  # NCCL does not end while there are CUDA graphs with its kernels
    gc.collect()
    end()
    return int(bool(wrong) or not launched or not bound)


if __name__ == "__main__":
    sys.exit(main())
