"""The host time of a whole training step of two blocks of 8B, beside the same step with NCCL's calls.

    torchrun --nproc_per_node=4 tests/gpu/step.py [bf16 | rowwise ...]

Ranks may share GPUs. Milliseconds of the launching thread, from a step's first call until its backward has been
launched, while the GPU is not waited for. In the other step each collective is one of NCCL in a group of one rank, with
its wait, and it has the same matmuls and all else of Inductor. The two take turns in one process, in random order. One
JSON line a precision, from rank 0.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launched import end, limit, show, start
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

import asynctp_passes
from asynctp_passes.backend import asynctp
from asynctp_passes.tools.demo.model import PRESETS, Block, ModelSizes

BLOCKS, TOKENS, WARM_UP, ROUNDS = 2, 2048, 4, 12
COLLECTIVES = 8  # of a block: two gathers and two scatters, and those of its backward
FP8, LARGEST = torch.float8_e4m3fn, 448.0


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` in float8 with a scale a row."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.t()` of float8 with a scale for each row of both."""
    (a8, a_scale), (b8, b_scale) = quantized(a), quantized(b)
    return torch._scaled_mm(a8, b8.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16)


class Product(torch.autograd.Function):
    """A linear layer with all three matmuls in rowwise float8, as torchao's recipe has them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_mm(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = scaled_mm(gradient, weight.t().contiguous())
        return of_x, scaled_mm(gradient.t().contiguous(), x.t().contiguous())


class Linear(nn.Module):
    """A rank's part of a linear layer."""

    def __init__(self, columns: int, depth: int, rowwise: bool) -> None:
        super().__init__()
        self.weight, self.rowwise = nn.Parameter(torch.randn(columns, depth) * 0.02), rowwise

    def forward(self, x: Tensor) -> Tensor:
        if not self.rowwise:
            return nn.functional.linear(x, self.weight)
        return Product.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Sharded(nn.Module):
    """A block of `demo.model` with a rank's part of the weights, and its collectives by hand."""

    def __init__(self, sizes: ModelSizes, ranks: int, rowwise: bool) -> None:
        super().__init__()
        with torch.device("meta"):
            self.block = Block(sizes)
        attention, feed_forward = self.block.attention, self.block.feed_forward
        for module, names, cut in (
            (attention, ("wq", "wk", "wv"), 0),
            (attention, ("wo",), 1),
            (feed_forward, ("w1", "w3"), 0),
            (feed_forward, ("w2",), 1),
        ):
            for name in names:
                columns, depth = getattr(module, name).weight.shape
                whole = (columns // ranks, depth) if cut == 0 else (columns, depth // ranks)
                setattr(module, name, Linear(*whole, rowwise))
        self.block.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.block.ffn_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        angles = torch.rand(sizes.sequence, sizes.head_width // 2)
        attention.cosines, attention.sines = angles.cos(), angles.sin()

    def forward(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """`x[local tokens, width]` to the same shape."""
        block = self.block
        for norm, part in ((block.attention_norm, block.attention), (block.ffn_norm, block.feed_forward)):
            whole = all_gather_tensor_autograd(norm(x), 0, group)
            x = x + reduce_scatter_tensor_autograd(part(whole.unsqueeze(0)).squeeze(0), "sum", 0, group)
        return x


def compiled(
    blocks: list[Sharded], group: dist.ProcessGroup, backend: Any, options: dict[str, Any] | None = None
) -> list[Callable[[Tensor], Tensor]]:
    """The blocks as a backend compiles them, each by itself, with their collectives in a group."""

    def one(block: Sharded) -> Callable[[Tensor], Tensor]:
        run = functools.partial(block, group=group)
        return torch.compile(run, backend=backend, dynamic=False, fullgraph=True, options=options)

    return [one(block) for block in blocks]


def step(blocks: list[Callable[[Tensor], Tensor]], weights: list[Tensor], x: Tensor) -> float:
    """A forward and a backward; milliseconds until they have been launched."""
    for weight in weights:
        weight.grad = None
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    y = x.detach().requires_grad_(True)
    for block in blocks:
        y = block(y)
    y.float().square().mean().backward()
    launched = (time.perf_counter() - begun) * 1e3
    torch.cuda.synchronize()
    return launched


def collectives_of(run: Callable[[], Any]) -> int:
    """How many of torch's collectives a step calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    names = ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor")
    return sum(event.count for event in found.key_averages() if event.key in names)


def measure(kind: str, alone: dist.ProcessGroup) -> dict[str, Any]:
    """Figures of one precision; alone: NCCL's group of this rank."""
    world = dist.get_world_size()
    sizes = dataclasses.replace(PRESETS["8b"], sequence=TOKENS)
    torch.manual_seed(dist.get_rank())
    with torch.device("cuda"):
        blocks = [Sharded(sizes, world, kind == "rowwise").to(torch.bfloat16) for _ in range(BLOCKS)]
        x = torch.randn(TOKENS, sizes.width, dtype=torch.bfloat16)
    weights = [weight for block in blocks for weight in block.parameters()]
    ours, theirs = compiled(blocks, dist.group.WORLD, asynctp), compiled(blocks, alone, "inductor")
    shard = x.chunk(world)[dist.get_rank()].contiguous()
    ways = {"asynctp": lambda: step(ours, weights, shard), "NCCL, one rank": lambda: step(theirs, weights, x)}
    asynctp_passes.clear_reports()
    for run in ways.values():
        for _ in range(WARM_UP):
            run()
    summary = asynctp_passes.summary()
    calls = collectives_of(ways["NCCL, one rank"])
    if calls != BLOCKS * COLLECTIVES:
        raise RuntimeError(f"NCCL is called {calls} times a step; it must be {BLOCKS * COLLECTIVES}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        for name in order.sample(list(ways), len(ways)):
            times[name].append(ways[name]())
    gc.enable()
    medians = {name: statistics.median(found) for name, found in times.items()}
    chains = {"fused": summary.fused, "missed": summary.missed, "calls": asynctp_passes.summary().calls}
    shown = {name: round(value, 2) for name, value in medians.items()}
    least = {name: round(min(found), 2) for name, found in times.items()}
    ratio = round(medians["asynctp"] / medians["NCCL, one rank"], 2)
    return {"step": kind, "ranks": world, "ms": shown, "least": least, "ratio": ratio, **chains}


def main() -> None:
    start(100)
    groups = [dist.new_group([rank], backend="nccl") for rank in range(dist.get_world_size())]
    for kind in sys.argv[1:] or ("bf16", "rowwise"):
        limit(100)
        show(measure(kind, groups[dist.get_rank()]))
        torch.compiler.reset()
    end()


if __name__ == "__main__":
    main()
