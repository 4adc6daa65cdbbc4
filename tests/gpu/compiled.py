"""Compiled programs on real GPUs against the same programs without a compiler: one JSON line for each. Run by torchrun.

    torchrun --nproc_per_node=2 tests/gpu/compiled.py [part of a name ...]

A name is PROGRAM/MODE. Every program runs six times forward and backward on fresh data, so that mode reduce-overhead
warms up, captures and replays.

Ranks that share GPUs (`launched`) compare with the same program on the CPU, where gloo has all collectives: its
functional ones end in a segmentation fault on tensors of a GPU (torch 2.11 and 2.15). Programs that cannot do without
are left out then.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from launched import end, run_cases, start
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import asynctp_passes
from asynctp_passes.tools.demo.model import Block, ModelSizes, block_plan
from asynctp_passes.torch_private import inductor_compile, inductor_options

MODES = (None, "reduce-overhead")
STEPS = 6
TOLERANCE = 2e-2
IN_FLIGHT = ("ATP404", "ATP405")
WIDTH, HIDDEN, ROWS = 1024, 2816, 2048


class Functional(nn.Module):
    """Weights of one rank, and collectives by hand."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, HIDDEN // world) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(HIDDEN // world, WIDTH) * HIDDEN**-0.5)


class SequenceParallel(Functional):
    """`x[rows / world, width]`: gathered before the first product, scattered after the second."""

    def forward(self, x: Tensor) -> Tensor:
        full = all_gather_tensor(x, 0, dist.group.WORLD)
        return reduce_scatter_tensor(torch.relu(full @ self.up) @ self.down, "sum", 0, dist.group.WORLD)


class Replicated(Functional):
    """`x[rows / world, width]`, the same on all ranks: all-reduce after the second product."""

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(torch.relu(x @ self.up) @ self.down, "sum", dist.group.WORLD)


class TwoUses(SequenceParallel):
    """The gathered tensor is needed twice, and is returned too."""

    def forward(self, x: Tensor) -> Tensor:
        full = all_gather_tensor(x, 0, dist.group.WORLD)
        y = torch.relu(full @ self.up) @ self.down + full.float().square().mean(1, keepdim=True).to(full.dtype)
        return reduce_scatter_tensor(y @ torch.eye(WIDTH, device=y.device, dtype=y.dtype), "sum", 0, dist.group.WORLD)


class ScatterInFlight(SequenceParallel):
    """A reduce-scatter that no matmul made, which runs beside a product."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.wide = nn.Parameter(torch.randn(WIDTH, 16 * WIDTH) * WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.sin(x).repeat(dist.get_world_size(), 1)
        scattered = reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD)
        return (
            super().forward(x) + torch.relu(scattered) + (torch.cos(x) @ self.wide).view(x.shape[0], -1, WIDTH).mean(1)
        )


class SummedReductions(Functional):
    """A product, and what no matmul made, each reduced by itself, with a residual in between: one op adds both."""

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        other = all_reduce(torch.sin(x) * (1 + dist.get_rank()), "sum", group)
        return other + x + all_reduce(torch.relu(x @ self.up) @ self.down, "sum", group)


class OwnRows(Functional):
    """Sums of which each rank uses its own rows alone: of a product, and of what no matmul made."""

    def forward(self, x: Tensor) -> Tensor:
        group, rank, rows = dist.group.WORLD, dist.get_rank(), x.shape[0] // dist.get_world_size()
        product = all_reduce(torch.relu(x @ self.up) @ self.down, "sum", group)
        other = all_reduce(torch.sin(x) * (1 + rank), "sum", group)
        return torch.relu(product[rank * rows : (rank + 1) * rows]) + torch.cos(other.view(-1, rows, WIDTH)[rank])


class OfLargest(SequenceParallel):
    """Two largest elements over all ranks, which one all-reduce finds, scale what is gathered and what is scattered."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = (
            all_reduce(each.detach().abs().amax().float(), "max", dist.group.WORLD) for each in (x, self.up)
        )
        return super().forward((x / first).to(x.dtype)) * second.to(x.dtype)


# --- fp8 with a scale for each block, by DeepSeek's recipe ---------------------------------------------------------
FP8 = torch.float8_e4m3fn


def by_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 [m, k], and the scales [m, k/128] of its 1x128 blocks."""
    blocks = x.float().view(x.shape[0], -1, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(FP8).max
    return (blocks / scale).to(FP8).view(x.shape), scale.squeeze(-1)


def by_tall_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 [n, k], and the scales [n/128, k/128] of its 128x128 blocks."""
    blocks = w.float().view(w.shape[0] // 128, 128, -1, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / torch.finfo(FP8).max
    return (blocks / scale).to(FP8).view(w.shape), scale.view(blocks.shape[0], -1)


def product_of_blocks(rows: Tensor, scales: Tensor, w: Tensor, transposed: bool = False) -> Tensor:
    """`rows @ w.T`, or `rows @ w`, of fp8 `rows` [m, k] with scales [m, k/128]. k is a multiple of 512."""
    quantized, scale = by_tall_blocks(w)
    if transposed:
        quantized, scale = quantized.t().contiguous(), scale.t().contiguous()
    sides = (scales.t().contiguous().t(), scale.t())
    return torch._scaled_mm(rows, quantized.t(), *sides, out_dtype=torch.bfloat16)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """fp8 and scales are gathered."""
        ctx.save_for_backward(x, w)
        fp8, scales = by_blocks(x)
        rows = all_gather_tensor(fp8.view(torch.uint8), 0, dist.group.WORLD).view(FP8)
        return product_of_blocks(rows, all_gather_tensor(scales, 0, dist.group.WORLD), w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        dx = reduce_scatter_tensor(product_of_blocks(*by_blocks(dy), w, True), "sum", 0, dist.group.WORLD)
        return dx, dy.t() @ all_gather_tensor(x, 0, dist.group.WORLD)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return reduce_scatter_tensor(product_of_blocks(*by_blocks(x), w), "sum", 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """bf16 is gathered, and quantized after it."""
        x, w = ctx.saved_tensors
        dy = all_gather_tensor(grad, 0, dist.group.WORLD)
        return product_of_blocks(*by_blocks(dy), w, True), dy.t() @ x


class ScalesOfBlocks(nn.Module):
    """A column-parallel and a row-parallel product in fp8; the weights' gradients are in bf16.

    A rank's products are as large with many ranks as with two: they hide the gather that stays for a weight's gradient.
    """

    def __init__(self, world: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2048, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 2048) * (2048 * world) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Row.apply(torch.relu(_Column.apply(x, self.up)), self.down)
        return result


class Program(NamedTuple):
    """A module, the shape of its input on each rank, whether all ranks have the same input, and options."""

    module: nn.Module
    shape: tuple[int, ...]
    same: bool = False
    options: Mapping[str, Any] = MappingProxyType({})


def functional(cls: type[Functional | ScalesOfBlocks]) -> Callable[[DeviceMesh], Program]:
    """A program of functional collectives."""
    return lambda mesh: Program(
        cls(mesh.size()), (ROWS // mesh.size(), WIDTH), same=cls in (Replicated, SummedReductions)
    )


def block(mesh: DeviceMesh) -> Program:
    """A transformer block of DTensors, batch 2."""
    sizes = ModelSizes(width=WIDTH, hidden=HIDDEN, heads=8, sequence=ROWS)
    sharded = parallelize_module(Block(sizes), mesh, block_plan(), src_data_rank=None)
    return Program(sharded, (2, ROWS // mesh.size(), WIDTH))


def block_made_again(mesh: DeviceMesh) -> Program:
    """The same block; its gathers are made again in the backward, where the gradients of weights need them."""
    return block(mesh)._replace(options={"rematerialize": "always"})


def replicated_mlp(mesh: DeviceMesh) -> Program:
    """An MLP of DTensors without sequence parallelism."""
    mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate(), use_local_output=True)}
    return Program(parallelize_module(mlp, mesh, plan, src_data_rank=None), (2, ROWS, WIDTH), same=True)


class Found(NamedTuple):
    """What becomes of a program's collectives, in forward and backward together."""

    fused: int
    missed: int = 0
    in_flight: int = 0


PROGRAMS: dict[str, tuple[Callable[[DeviceMesh], Program], Found]] = {
    "sequence-parallel": (functional(SequenceParallel), Found(4)),
    "all-reduce": (functional(Replicated), Found(1)),
    "sum of all-reduces": (functional(SummedReductions), Found(2)),
    "own rows of all-reduces": (functional(OwnRows), Found(1)),
    "gather used twice": (functional(TwoUses), Found(4)),
    "scatter in flight": (functional(ScatterInFlight), Found(4, in_flight=1)),
    "largest elements": (functional(OfLargest), Found(4)),
    "scales of blocks": (functional(ScalesOfBlocks), Found(5)),
    "block": (block, Found(8)),
    "block, gathers made again": (block_made_again, Found(8, in_flight=2)),
    "MLP without sequence parallelism": (replicated_mlp, Found(2)),
}


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unable(name: str, mode: str | None) -> str | None:
    """Why a program cannot run where ranks share GPUs."""
    if name == "scales of blocks":
        return "the CPU, which computes what is expected, has no products with scales of blocks"
    reduces = any(part in name for part in ("all-reduce", "without sequence parallelism", "largest elements"))
    return "gloo's all-reduce cannot be captured" if mode is not None and reduces else None


def step(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> list[Tensor]:
    """The result and all gradients, copied: a replayed graph overwrites what it returned."""
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_(True)
    torch.compiler.cudagraph_mark_step_begin()
    y = run(x)
    y.backward(g)
    gradients = [x.grad, *(parameter.grad for parameter in module.parameters())]
    return [local(each).clone() for each in (y.detach(), *gradients) if each is not None]


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest relative difference over results, gradients and ranks; infinite for what is missing or not a number."""
    values = [float("inf")] * (len(found) != len(wanted))
    for a, b in zip(found, wanted, strict=False):
        a, b = a.float(), b.to(a.device).float()
        value = float((a - b).norm() / b.norm().clamp_min(1e-20))
        values.append(value if value == value and a.shape == b.shape else float("inf"))
    answer = torch.tensor(max(values), device="cuda", dtype=torch.float64)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return float(answer)


def made(name: str, device: str) -> Program:
    """A program on a kind of device, the same on all ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    program = PROGRAMS[name][0](mesh)
    program.module.to(device=device, dtype=torch.bfloat16)
    return program


def check(name: str, mode: str | None) -> dict[str, Any]:
    """Compile and compare; `ok` when every step was right, each collective became what it is to become, and nothing was
    left out of a graph."""
    wanted = PROGRAMS[name][1]
    shared = dist.get_backend() != "nccl"
    if shared and (reason := unable(name, mode)) is not None:
        return {"skipped": reason}
    torch.compiler.reset()
    asynctp_passes.clear_reports()
    module, shape, same, options = made(name, "cuda")
    skips = inductor_compile.cudagraph_skips()
    options = {**options, **inductor_options.of_mode(mode)}
    run = torch.compile(module, backend="asynctp", dynamic=False, fullgraph=True, options=options)
    device = "cpu" if shared else "cuda"
    plain = made(name, device).module
    differences = []
    for number in range(STEPS):
        torch.manual_seed(number * 8 + (0 if same else dist.get_rank()))
        x = torch.randn(shape, device="cuda").to(torch.bfloat16)
        with torch.no_grad():
            g = torch.randn_like(plain(x.to(device))).cuda()
        differences.append(worst(step(module, run, x, g), step(plain, plain, x.to(device), g.to(device))))
    found = counted(asynctp_passes.reports())
    result = {
        "difference": max(differences),
        "fused": found.fused,
        "missed": found.missed,
        "in flight": found.in_flight,
        "graph skips": inductor_compile.cudagraph_skips() - skips,
    }
    right = result["difference"] < TOLERANCE and found == wanted
    return {**result, "ok": right and (mode is None or result["graph skips"] == 0)}


def counted(reports: list[asynctp_passes.Report]) -> Found:
    """The outcomes of all graphs together."""
    return Found(
        sum(len(report.fused) for report in reports),
        sum(len(report.missed) for report in reports),
        sum(remark.code in IN_FLIGHT for report in reports for remark in report.remarks),
    )


def main() -> int:
    """Run every program whose name contains an argument."""
    start(120)
    pairs = itertools.product(PROGRAMS, MODES)
    cases = ((f"{name}/{mode or 'default'}", functools.partial(check, name, mode)) for name, mode in pairs)
    code = run_cases(cases, 120)
    torch.compiler.reset()  # NCCL does not end while there are CUDA graphs with its kernels
    gc.collect()
    end()
    return code


if __name__ == "__main__":
    sys.exit(main())
