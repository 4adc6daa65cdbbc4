"""The fused ops on real GPUs against fp64: run by `test_gpu_ops.py` with torchrun, one process a GPU.

    torchrun --nproc_per_node=4 tests/gpu/cases.py [SUBSTRING ...]

Those with scales of blocks of 128 alone: `x128+`.

Every case draws fresh random data, runs each implementation that can run it, compares with the fp64 product of what all
ranks hold, runs again (bit-identical, as a graph from the second time on), and replays it in a CUDA graph on new data.
Collectives without a product (`Bulk`) are left in flight beside a fused call of each implementation, and `AsyncInput`
is the GEMM by itself. One JSON line a case, from rank 0; `launched` counts launches of plans' graphs so far.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from asynctp_kernels import async_input_matmul, cuda
from asynctp_kernels.cuda.plans import async_input
from asynctp_kernels.cuda.runtime.memory import existing_memory
from launched import end, run_cases, start
from torch import Tensor

import asynctp_passes.ops.collectives  # noqa: F401  (registers the ops)

FP8, FP8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
FP8_TOLERANCE = 1e-3  # tensor cores add fp8 products with fewer bits than fp32 has


@dataclass(frozen=True)
class Case:
    """One call. `shard` is A's shape on one rank (gather) or the whole A (scatter, all_reduce), without K.

    k: of all products; ks: of each summed one, if they differ. ns: columns, of summed products the same for each.
    scales: "", "tensor" or "row", of A and of B, or of each: "row+tensor", "1x128+128x128" (blocks); travels: the A
    scale is gathered too; along: so are numbers, one per row, that are only returned. full: the gathered A is
    returned; alone: not by all ranks, as far as they are told, so that it is pushed. sum_dtype: of the result, to which
    products are converted before they are added. added: another term of the sum, transposed in memory. factors: what
    products are multiplied by, and maybe their sum. real: rows of the scattered dimension that are real; A is NaN after
    them, and the sum is zeros. takes: of the gathered rows of each leading index those that each B takes, in parts of
    all: (first, end).
    """

    op: str
    shard: tuple[int, ...]
    k: int
    ns: tuple[int, ...]
    dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    b_dtype: torch.dtype | None = None
    out_dtype: torch.dtype = torch.bfloat16
    scales: str = ""
    travels: bool = False
    fast: bool = True
    bias: bool = False
    k_major: bool = True
    full: bool = False
    alone: bool = False
    along: bool = False
    reduce_op: str = "sum"
    ks: tuple[int, ...] = ()
    sum_dtype: torch.dtype | None = None
    added: bool = False
    factors: tuple[float, ...] = ()
    real: int | None = None
    takes: tuple[tuple[float, float], ...] = ()

    @property
    def b_rows(self) -> list[int]:
        """That argument of a gather."""
        every = math.prod(self.shard[self.dim :]) * dist.get_world_size()
        return [number for first, end in self.takes for number in (round(first * every), round(end * every), every)]

    @property
    def result_dtype(self) -> torch.dtype:
        return self.sum_dtype or self.out_dtype

    @property
    def name(self) -> str:
        depths = "+".join(map(str, self.ks or (self.k,)))
        parts = [self.op, "x".join(map(str, self.shard)), f"k{depths}", "n" + "+".join(map(str, self.ns)),
                 f"dim{self.dim}", str(self.dtype)[6:], str(self.out_dtype)[6:]]  # fmt: skip
        flags = {
            self.scales: bool(self.scales), "travels": self.travels, "slow": not self.fast, "bias": self.bias,
            "n-major": not self.k_major, "full": self.full, "alone": self.alone, "along": self.along,
            self.reduce_op: self.reduce_op != "sum", f"b-{str(self.b_dtype)[6:]}": self.b_dtype is not None,
            f"sum-{str(self.sum_dtype)[6:]}": self.sum_dtype is not None, "added": self.added,
            "x" + "_".join(f"{factor:g}" for factor in self.factors): bool(self.factors),
            f"real{self.real}": self.real is not None,
            "takes" + "_".join(f"{first:g}-{end:g}" for first, end in self.takes): bool(self.takes),
        }  # fmt: skip
        return "-".join(parts + [flag for flag, on in flags.items() if on])


def cases() -> Iterator[Case]:
    for op, rows in (("gather", (256,)), ("scatter", (1024,))):
        base = Case(op, rows, 512, (512,))
        yield base
        yield replace(base, shard=(rows[0] * 4,), k=1024, ns=(1536,))
        yield replace(base, k_major=False)
        yield replace(base, bias=True)
        yield replace(base, dtype=torch.float16, out_dtype=torch.float16)
        yield replace(base, shard=(3, rows[0]), dim=1)
        yield replace(base, shard=(2, rows[0], 3), dim=1)
        yield replace(base, shard=(rows[0] - 8 * dist.get_world_size(),), k=520, ns=(264,))
        yield replace(base, shard=(dist.get_world_size(),), k=64, ns=(64,))
        yield replace(base, dim=-1)
        yield replace(base, k=8, ns=(8,))
        for scales, out in (("tensor", torch.bfloat16), ("row", torch.bfloat16), ("tensor", torch.float16)):
            yield replace(base, dtype=FP8, out_dtype=out, scales=scales, travels=scales == "row" and op == "gather")
        yield replace(base, dtype=FP8, scales="tensor", fast=False)
        yield replace(base, dtype=FP8, scales="row", fast=False, travels=op == "gather")
        yield replace(base, dtype=FP8_WIDE, b_dtype=FP8, scales="tensor")
        yield replace(base, dtype=FP8, scales="row", shard=(2, rows[0]), dim=1, travels=op == "gather")
        odd = 50 * (dist.get_world_size() if op == "scatter" else 1)  # a rank's scales at no multiple of 16 bytes
        yield replace(base, dtype=FP8, scales="row", shard=(odd,), travels=op == "gather")
        yield replace(base, dtype=FP8, scales="row", shard=(3, odd), dim=1, travels=op == "gather")
        # so many tiles that warps have tasks of their own
        large = 4096 // (dist.get_world_size() if op == "gather" else 1)
        yield replace(base, dtype=FP8, scales="row", shard=(large,), ns=(8192,), travels=op == "gather")
        yield replace(base, dtype=FP8, scales="tensor", shard=(2, large), dim=1, ns=(4096,), bias=True)
    base = Case("gather", (256,), 512, (512,))
    yield replace(base, ns=(512, 128, 128))
    yield replace(base, ns=(512, 128, 128, 264), bias=True)
    yield replace(base, ns=(256, 256, 256, 256, 256))
    for alone in (False, True):
        full = {"full": True, "alone": alone}
        yield replace(base, **full)
        yield replace(base, shard=(2, 256), dim=1, ns=(256, 512), **full)
        yield replace(base, dtype=FP8, scales="row", travels=True, ns=(256, 512), **full)
        yield replace(base, dtype=FP8, scales="row", travels=True, shard=(3, 50), dim=1, **full)
        half = {"dtype": torch.float16, "out_dtype": torch.float16}
        yield replace(base, shard=(240,), k=520, ns=(264,), bias=True, **half, **full)
        yield replace(base, shard=(4096,), k=1024, **full)  # in chunks
        yield replace(base, shard=(127,), k=516, ns=(264,), **full)  # rows that are no multiple of 16 bytes
    for takes in ((0, 0.3), (0.3, 1)), ((0, 0.5), (0.5, 1)), ((0.1, 0.9), (0.8, 1)):
        ranges = replace(base, ns=(512, 264), bias=True, takes=takes)
        yield from (ranges, replace(ranges, full=True), replace(ranges, shard=(2, 131), dim=1, k=520))
        yield replace(ranges, shard=(2048,), k=4096, ns=(2048, 2048))
    yield replace(base, dtype=FP8, scales="row", travels=False)
    base = replace(base, dtype=FP8, scales="tensor", along=True)
    yield base
    yield replace(base, full=True, ns=(256, 512), fast=False)
    yield replace(base, shard=(2, 256), dim=1, ns=(256, 512))
    yield replace(base, shard=(3, 100), dim=1, full=True)
    yield replace(base, scales="row", fast=False)
    yield replace(base, shard=(1,), k=64, ns=(64,))
    base = Case("scatter", (1024,), 512, (512,))
    yield replace(base, ns=(512, 512, 512))
    yield replace(base, ns=(512, 512), k_major=False, shard=(2, 512), dim=1)
    yield replace(base, ks=(520, 264), ns=(512, 512))
    yield replace(base, ks=(520, 264), ns=(512, 512), k_major=False)
    yield replace(base, ns=(512, 512), dtype=FP8, scales="tensor")
    yield replace(base, reduce_op="avg")
    yield replace(base, ns=(512, 512), dtype=FP8, scales="row", fast=False)
    for fast, scales in itertools.product((True, False), ("tensor", "row")):
        sums = replace(base, ns=(512, 512), dtype=FP8, scales=scales, fast=fast)
        yield replace(sums, shard=(4096,), ks=(2048, 1024, 512), ns=(2048, 2048, 2048))
        for bias in (False, True):
            yield replace(sums, shard=(8 * 131 * dist.get_world_size(),), k=528, ns=(272, 272, 272), bias=bias)
        yield replace(sums, shard=(2, 1024), dim=1, ns=(512, 512, 512), reduce_op="avg")
    yield replace(base, ns=(512, 512, 512, 512), dtype=FP8, scales="tensor", fast=False)
    yield replace(base, ns=(512, 512), dtype=FP8_WIDE, b_dtype=FP8, scales="tensor", fast=False)
    yield replace(base, ns=(512, 512, 512, 512, 512), dtype=FP8, scales="tensor")
    yield replace(base, shard=(4096,), k=2048, ns=(2048,), dtype=FP8, scales="row", fast=False)
    yield replace(base, dtype=FP8, scales="row+tensor", fast=False)
    base = Case("all_reduce", (1024,), 512, (512,))
    yield base
    yield replace(base, shard=(4096,), k=1024, ns=(4096,))
    yield replace(base, shard=(3, 8 * dist.get_world_size(), 5), bias=True)
    yield replace(base, ns=(512, 512, 512), reduce_op="avg")
    yield replace(base, dtype=torch.float16, out_dtype=torch.float16, k_major=False)
    yield replace(base, dtype=torch.float32, out_dtype=torch.float32)
    yield replace(base, shard=(1,))
    yield replace(base, shard=(dist.get_world_size() + 1,), reduce_op="avg")
    yield replace(base, dtype=FP8, scales="tensor")
    yield replace(base, dtype=FP8, scales="row", fast=False, shard=(2, 512))
    yield replace(base, ns=(512, 512), dtype=FP8, scales="row", fast=False)


def converted_cases() -> Iterator[Case]:
    """Products of 16 bits that are converted to fp32 before they are added; and products of fp8 that are fp32."""
    for op in ("scatter", "all_reduce"):
        base = Case(op, (1024,), 512, (512,), sum_dtype=torch.float32)
        yield base
        yield replace(base, shard=(4096,), k=1024, ns=(4096,))
        yield replace(base, ns=(512, 512, 512))
        yield replace(base, shard=(4096,), k=1024, ns=(2048, 2048))
        yield replace(base, dtype=torch.float16, out_dtype=torch.float16, reduce_op="avg", bias=True)
        yield replace(base, ns=(264, 264), k=520, shard=(1024 - 8 * dist.get_world_size(),), reduce_op="avg")
        yield replace(base, dtype=FP8, scales="row", fast=False)
        for fast, scales in itertools.product((True, False), ("tensor", "row")):
            yield replace(base, ns=(512, 512), dtype=FP8, scales=scales, fast=fast)
    base = Case("scatter", (1024,), 512, (512,), sum_dtype=torch.float32)
    yield replace(base, shard=(2, 512), dim=1)
    yield replace(base, shard=(2, 2048), k=1024, ns=(1536, 1536, 1536), dim=1)
    yield replace(base, ns=(512, 512), k_major=False)
    yield replace(base, ns=(512, 512, 512, 512), shard=(dist.get_world_size(),), k=64)
    yield replace(base, dim=-1)
    yield replace(base, dim=-1, ns=(512, 512))
    yield replace(base, k=8, ns=(8, 8))
    for op, rows in (("gather", 256), ("scatter", 1024)):
        base = Case(op, (rows,), 512, (512,), dtype=FP8, out_dtype=torch.float32, scales="tensor")
        yield base
        yield replace(base, shard=(rows * 4,), k=1024, ns=(1536,), fast=False)
        yield replace(base, scales="row", travels=op == "gather", bias=True)


def added_cases() -> Iterator[Case]:
    """Sums of products and of a tensor that is none."""
    for op in ("scatter", "all_reduce"):
        base = Case(op, (1024,), 512, (512,), added=True)
        yield base
        yield replace(base, shard=(4096,), k=1024, ns=(4096,))
        yield replace(base, ns=(512, 512), bias=True, reduce_op="avg")
        yield replace(base, sum_dtype=torch.float32)
        yield replace(base, dtype=FP8, scales="row", fast=False)
        yield replace(base, dtype=FP8, scales="tensor", ns=(512, 512), sum_dtype=torch.float32)
    base = Case("scatter", (2, 512), 512, (512,), dim=1, added=True)
    yield base
    yield replace(base, k=520, ns=(264, 264))
    yield replace(base, dtype=torch.float16, out_dtype=torch.float16, dim=-1)


def multiplied_cases() -> Iterator[Case]:
    """Products, or their sum, times powers of two."""
    for op in ("scatter", "all_reduce"):
        base = Case(op, (1024,), 512, (512,), factors=(-0.5,))
        yield base
        yield replace(base, shard=(4096,), k=1024, ns=(4096,), factors=(4.0,))
        yield replace(base, bias=True, reduce_op="avg")
        yield replace(base, dtype=torch.float16, out_dtype=torch.float16)
        yield replace(base, sum_dtype=torch.float32, factors=(2.0**-20,))
        yield replace(base, dtype=FP8, scales="row", fast=False)
        yield replace(base, dtype=FP8, scales="tensor", shard=(4096,), k=1024, ns=(4096,))
        yield replace(base, ns=(512, 512), factors=(1.0, 1.0, 0.5))
        yield replace(base, ns=(512, 512), dtype=FP8, scales="row", factors=(1.0, 1.0, 8.0))
        yield replace(base, ns=(512, 512, 512), factors=(1.0, -1.0, 0.5))
        yield replace(base, ns=(512, 512), dtype=FP8, scales="tensor", factors=(2.0, 0.5, 4.0), added=True)
        yield replace(base, ns=(512, 512), sum_dtype=torch.float32, factors=(2.0, -1.0), added=True)
    base = Case("scatter", (2, 512), 512, (512,), dim=1, factors=(0.25,))
    yield base
    yield replace(base, dim=-1)
    yield replace(base, dtype=torch.float32, out_dtype=torch.float32)


def padded_cases() -> Iterator[Case]:
    """Products whose last rows are zeros: a few, those of whole ranks, all; within tiles and at their borders."""
    base = Case("scatter", (1024,), 512, (512,))
    for real in (1023, 1000, 897, 896, 200, 1, 0):
        yield replace(base, real=real, bias=True)
    yield replace(base, real=1000, reduce_op="avg", factors=(-0.5,))
    yield replace(base, real=1000, sum_dtype=torch.float32)
    yield replace(base, real=1000, ns=(512, 512), ks=(520, 264))
    yield replace(base, shard=(2, 512), dim=1, real=501)
    yield replace(base, shard=(2, 512, 3), dim=1, real=333, bias=True)
    yield replace(base, shard=(world(),), k=64, ns=(64,), real=world() - 1)
    yield replace(base, shard=(4096,), k=1024, ns=(1536,), real=4001)
    for fast, scales in itertools.product((True, False), ("tensor", "row")):
        scaled = replace(base, dtype=FP8, scales=scales, fast=fast)
        yield replace(scaled, real=1000, bias=True)
        yield replace(scaled, shard=(2, 4096), dim=1, k=1024, ns=(4096,), real=4000)
        yield replace(scaled, shard=(4096,), ns=(8192,), real=3900)
        yield replace(scaled, ns=(512, 512), real=700)
    yield replace(base, dtype=FP8, scales="1x128+128x128", fast=False, real=1000)


def block_cases() -> Iterator[Case]:
    """fp8 with a scale for each block, 128 deep, of 1 or 128 rows of A and columns of B."""
    recipes = ("1x128+128x128", "128x128+1x128", "1x128+1x128")
    for recipe in recipes:
        for op, rows in (("gather", 256), ("scatter", 1024), ("all_reduce", 1024)):
            base = Case(op, (rows,), 512, (512,), dtype=FP8, scales=recipe, fast=False, travels=op == "gather")
            yield base
            yield replace(base, k=640, ns=(720,))  # 5 blocks, of which cuBLAS wants 8; columns of part of a block
            yield replace(base, shard=(2, rows), dim=1, ns=(512, 512), out_dtype=torch.float32)
    for op, rows in (("gather", 256), ("scatter", 1024)):
        base = Case(op, (rows,), 512, (512,), dtype=FP8, scales=recipes[0], fast=False, travels=op == "gather")
        yield replace(base, shard=(rows * 4,), k=2048, ns=(1536,))
        yield replace(base, bias=True)
        yield replace(base, k=128, ns=(256,))
        yield replace(base, out_dtype=torch.float16)
        yield replace(base, dim=-1, travels=False)
        yield replace(base, shard=(2 * (dist.get_world_size() if op == "scatter" else 1),))  # 2 rows: not 4
        yield replace(base, k_major=False)
    base = Case("gather", (256,), 512, (512,), dtype=FP8, scales=recipes[0], fast=False, travels=True)
    yield replace(base, travels=False)
    yield replace(base, travels=False, scales=recipes[1])
    yield replace(base, ns=(512, 128, 128), full=True)
    yield replace(base, travels=False, along=True)
    base = Case("scatter", (1024,), 512, (512, 512), dtype=FP8, scales=recipes[0], fast=False)
    yield replace(base, reduce_op="avg", shard=(2, 512), dim=1)
    yield replace(base, ns=(512, 512, 512))


@dataclass(frozen=True)
class Bulk:
    """A collective without a product, left in flight beside a fused call of the same group."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    reduce_op: str = "sum"
    kept: bool = True

    @property
    def name(self) -> str:
        how = self.reduce_op if self.kept else "pushed"
        return f"bulk-{self.op}-{'x'.join(map(str, self.shape))}-{str(self.dtype)[6:]}-{how}"


def bulk_cases() -> Iterator[Bulk]:
    for shape in ((1024, 512), (1 << 22,), (3, 5, 7), (1, 8)):
        for dtype in (torch.bfloat16, torch.float32, FP8, torch.int64):
            yield Bulk("gather", shape, dtype)
            yield Bulk("gather", shape, dtype, kept=False)
    for shape in ((4096, 512), (1 << 22,), (8, 5, 7)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield Bulk("scatter", shape, dtype)
    yield Bulk("scatter", (4096, 512), reduce_op="avg")
    for shape in ((256, 256), (3, 5, 7), (1,)):
        for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64):
            yield Bulk("all_reduce", shape, dtype, "max")
    yield Bulk("all_reduce", (256, 1024), reduce_op="min")  # NCCL's


@dataclass(frozen=True)
class AsyncInput:
    """`async_input_matmul` of a [m, k] that arrives from the host. "fused": its kernel, "sequential": by chunks."""

    m: int
    k: int
    ns: tuple[int, ...]
    chunks: int
    dtype: torch.dtype = torch.bfloat16
    k_major: bool = True

    @property
    def name(self) -> str:
        order = "" if self.k_major else "-n-major"
        return f"async-{self.m}x{self.k}-n{'+'.join(map(str, self.ns))}-{self.chunks}-{str(self.dtype)[6:]}{order}"


def async_cases() -> Iterator[AsyncInput]:
    base = AsyncInput(8192, 4096, (4096,), 4)
    yield base
    yield replace(base, ns=(2048, 512, 512), chunks=8)
    yield replace(base, m=1000, k=520, ns=(264,), chunks=5)
    yield replace(base, k_major=False, dtype=torch.float16, chunks=1)
    yield replace(base, m=64, k=256, ns=(64, 64, 64, 64), chunks=2)


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def quantized(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype)


def random_operand(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device()).to(dtype)


def scale_of(kind: str, shape: tuple[int, ...], rows: int, depth: int) -> Tensor:
    """Of a matrix whose dimensions number `rows` and `depth` are K and the other: one number, by rows, or by blocks."""
    sizes = list(shape)
    if kind == "tensor":
        sizes = []
    else:
        sizes[depth] = 1 if kind == "row" else blocks(shape[depth])
        sizes[rows] = blocks(shape[rows]) if kind == "128x128" else shape[rows]
    return torch.rand(sizes, device=device()) + 0.5


def blocks(size: int) -> int:
    return -(-size // 128)


def each(scale: Tensor, shape: torch.Size) -> Tensor:
    """fp64 scales, one for each element of a tensor."""
    scale = scale.double()
    for dim in (-2, -1) if scale.ndim else ():
        if scale.shape[dim] not in (1, shape[dim]):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, shape[dim])
    return scale.expand(shape)


@dataclass
class Data:
    a: list[Tensor]
    b: list[Tensor]
    a_scales: list[Tensor]
    b_scales: list[Tensor]
    biases: list[Tensor | None]
    along: list[Tensor]
    added: Tensor | None = None


def draw(case: Case) -> Data:
    count = len(case.ns)
    b_dtype = case.b_dtype or case.dtype
    times = world() if case.op == "gather" and case.dim in (-1, len(case.shard)) else 1
    depths = [k * times for k in case.ks or [case.k] * count]
    a = [random_operand((*case.shard, k // times), case.dtype) for k in depths[: 1 if case.op == "gather" else count]]
    if case.real is not None:
        for one in a:
            one.narrow(case.dim, case.real, case.shard[case.dim] - case.real).copy_(torch.tensor(torch.nan))
    bs = []
    for n, depth in zip(case.ns, depths, strict=True):
        weight = torch.randn(n, depth, device=device()) * depth**-0.5
        b = weight.to(b_dtype)
        bs.append(b.t() if case.k_major else b.t().contiguous())
    biases = [random_operand((n,), case.out_dtype) if case.bias else None for n in case.ns]
    a_scales, b_scales = [], []
    if case.scales:
        lead = case.shard
        if case.op == "gather" and not case.travels:
            dim = case.dim % (len(lead) + 1)
            lead = lead if dim == len(lead) else (*lead[:dim], lead[dim] * world(), *lead[dim + 1 :])
        of_a, _, of_b = case.scales.partition("+")
        a_scales = [scale_of(of_a, (*lead, depth), -2, -1) for _, depth in zip(a, depths, strict=False)]
        b_scales = [scale_of(of_b or of_a, (depth, n), -1, -2) for n, depth in zip(case.ns, depths, strict=True)]
        if case.op == "gather" and not case.travels:
            dist.broadcast(a_scales[0], 0)
    along = [torch.rand((*case.shard, 1), device=device())] if case.along else []
    turned = (case.ns[0], *case.shard)
    added = random_operand(turned, case.result_dtype).movedim(0, -1) if case.added else None
    return Data(a, bs, a_scales, b_scales, biases, along, added)


def call(case: Case, data: Data, of: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The op, over the group `of` all ranks (by default, the default group)."""
    group, size = (of or dist.group.WORLD).group_name, world()
    ops, optional = torch.ops.asynctp, dict[str, Any]()
    if case.scales:
        optional = {"b_scales": data.b_scales, "out_dtype": case.out_dtype, "use_fast_accum": case.fast}
    if case.op == "gather":
        if case.scales:
            optional |= {"a_scale": data.a_scales[0], "gather_a_scale": case.travels}
        optional |= {"along_shard": data.along[0]} if data.along else {}
        optional |= {"all_keep": False} if case.alone else {}
        optional |= {"b_rows": case.b_rows} if case.takes else {}
        return ops.all_gather_matmul(data.a[0], data.b, data.biases, case.dim, case.full, size, group, **optional)
    optional |= {"a_scales": data.a_scales} if case.scales else {}
    optional |= {"sum_dtype": case.sum_dtype, "added": data.added, "factors": list(case.factors) or None}
    if case.op == "all_reduce":
        return [ops.matmul_all_reduce(data.a, data.b, data.biases, case.reduce_op, group, **optional)]
    optional |= {} if case.real is None else {"real_rows": case.real}
    return [ops.matmul_reduce_scatter(data.a, data.b, data.biases, case.reduce_op, case.dim, size, group, **optional)]


def gathered(tensor: Tensor, dim: int) -> Tensor:
    """All ranks' tensors, joined along `dim`, by the simplest collective there is."""
    raw = tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.contiguous()
    parts = [torch.empty_like(raw) for _ in range(world())]
    dist.all_gather(parts, raw)
    return torch.cat([part.view(tensor.dtype) for part in parts], dim)


def expected(case: Case, data: Data) -> list[Tensor]:
    """fp64."""
    if case.op == "gather":
        full = gathered(data.a[0], case.dim)
        a = full.double()
        if case.scales:
            a = a * each(gathered(data.a_scales[0], case.dim) if case.travels else data.a_scales[0], a.shape)
        outs = []
        for i, b in enumerate(data.b):
            rows = a
            if case.takes:
                first, end, every = case.b_rows[3 * i : 3 * i + 3]
                rows = a.flatten(0, -2).unflatten(0, (-1, every))[:, first:end].flatten(0, 1)
            out = rows @ (b.double() * each(data.b_scales[i], b.shape) if case.scales else b.double())
            bias = data.biases[i]
            outs.append(out if bias is None else out + bias.double())
        outs += [full.double()] if case.full else []
        return [*outs, *(gathered(numbers, case.dim).double() for numbers in data.along)]
    total = torch.zeros((), device=device(), dtype=torch.float64)
    for i, (a, b) in enumerate(zip(data.a, data.b, strict=True)):
        scales = (each(data.a_scales[i], a.shape), each(data.b_scales[i], b.shape)) if case.scales else (1, 1)
        out = (a.double() * scales[0]) @ (b.double() * scales[1])
        bias = data.biases[i]
        total = total + (out if bias is None else out + bias.double()) * (case.factors[i] if case.factors else 1.0)
    total = total if data.added is None else total + data.added.double()
    total = total * case.factors[-1] if len(case.factors) > len(data.a) else total
    if case.real is not None:
        total.narrow(case.dim, case.real, case.shard[case.dim] - case.real).zero_()
    dist.all_reduce(total)
    total = total / world() if case.reduce_op == "avg" else total
    return [total if case.op == "all_reduce" else total.chunk(world(), case.dim)[rank()]]


def worst(case: Case, outs: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative error over outputs and ranks; infinite for a wrong shape, dtype or NaN."""
    errors = []
    for i, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        exact = i >= len(case.ns)  # the gathered A, and numbers that travelled along
        dtype = torch.float32 if case.along and i == len(outs) - 1 else case.dtype if exact else case.result_dtype
        if out.shape != want.shape or out.dtype != dtype:
            errors.append(float("inf"))
            continue
        error = ((out.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
        errors.append(float("inf") if error != error or (exact and error) else error)
    value = torch.tensor(max(errors), device=device(), dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def agree(flag: bool) -> bool:
    value = torch.tensor(int(flag), device=device())
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return bool(value.item())


def run(case: Case, implementation: str) -> dict[str, object]:
    data = draw(case)
    with cuda.forced(implementation):
        try:
            outs = call(case, data)
        except RuntimeError as error:
            refused = f"asynctp: implementation {implementation!r} was asked for and cannot run: "
            if str(error).startswith(refused):
                return {"skipped": str(error).removeprefix(refused)}
            raise
        torch.cuda.synchronize()
        result: dict[str, object] = {"error": worst(case, outs, expected(case, data))}
        same = True
        for _ in range(3):  # its memory is given back each time: the second is captured, the third launched
            again = call(case, data)
            same &= all(torch.equal(_raw(x), _raw(y)) for x, y in zip(outs, again, strict=True))
            del again
        same &= same_elsewhere(case, data, outs)
        result["same bits"] = agree(same)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            captured = call(case, data)
        fresh = draw(case)
        for old, new in zip(_tensors(data), _tensors(fresh), strict=True):
            old.copy_(new)
        for _ in range(3):
            graph.replay()
        late = call(case, data)
        graph.replay()
        torch.cuda.synchronize()
        wanted = expected(case, data)
        result["graph error"] = worst(case, captured, wanted)
        result["late error"] = worst(case, late, wanted)
        memory = existing_memory(dist.group.WORLD)
        result["launched"] = 0 if memory is None else memory.launched
    if case.sum_dtype is not None:  # the ranks' sum of products of 16 bits has more of them
        narrow = torch.equal(outs[0], outs[0].to(case.out_dtype).to(case.sum_dtype))
        result["same bits"] = agree(bool(result["same bits"]) and not narrow)
    fp8 = FP8_TOLERANCE if case.dtype.itemsize == 1 else 0.0
    tolerance = max(TOLERANCE[case.out_dtype], fp8) * (1 if case.op == "gather" else 2)
    errors = (result["error"], result["graph error"], result["late error"])
    result["ok"] = all(error < tolerance for error in errors) and result["same bits"]  # type: ignore[operator]
    return result


def run_bulk(case: Bulk, beside: str) -> dict[str, object]:
    """Start the collective, run a fused call, complete the collective; again, and in a CUDA graph on new data."""
    group, size = dist.group.WORLD.group_name, world()
    other = Case("gather", (256,), 512, (512,)) if case.op == "scatter" else Case("scatter", (1024,), 512, (512,))
    data, x = draw(other), random_operand(case.shape, torch.float32).mul(8).to(case.dtype)

    def call_both() -> list[Tensor]:
        ops = torch.ops.asynctp
        with cuda.forced("direct" if beside == "direct" else "fused"):
            if case.op == "gather":
                flying = ops.all_gather(x, size, group, all_keep=case.kept)
            elif case.op == "scatter":
                flying = ops.reduce_scatter(x, case.reduce_op, size, group)
            else:
                flying = ops.all_reduce(x, case.reduce_op, group)
        with cuda.forced(beside):
            outs = call(other, data)
        return [torch.ops._c10d_functional.wait_tensor(flying), *outs]

    def wrong(outs: list[Tensor]) -> float:
        wanted = gathered(x, 0).double()
        if case.op == "scatter":
            total = torch.zeros_like(x, dtype=torch.float64)
            for one in gathered(x.unsqueeze(0), 0):
                total += one.double()
            wanted = total.chunk(size)[rank()] / (size if case.reduce_op == "avg" else 1)
        elif case.op == "all_reduce":
            every = gathered(x.unsqueeze(0), 0).double()
            wanted = every.amax(0) if case.reduce_op == "max" else every.amin(0)
        if outs[0].shape != wanted.shape or outs[0].dtype != case.dtype:
            return float("inf")
        error = ((outs[0].double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()
        mine = float("inf") if case.op != "scatter" and error else error / TOLERANCE.get(case.dtype, 1.0)
        value = torch.tensor(mine, device=device(), dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return max(value.item(), worst(other, outs[1:], expected(other, data)) / TOLERANCE[other.out_dtype] / 2)

    outs = call_both()
    ran = cuda.last_implementation(dist.group.WORLD)
    result: dict[str, object] = {"error": wrong(outs), "ran": ran}
    again = call_both()
    result["same bits"] = agree(all(torch.equal(_raw(x), _raw(y)) for x, y in zip(outs, again, strict=True)))
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call_both()
    x.copy_(random_operand(case.shape, torch.float32).mul(8).to(case.dtype))
    for _ in range(3):
        graph.replay()
    call_both()
    graph.replay()
    torch.cuda.synchronize()
    result["graph error"] = wrong(captured)
    result["ok"] = result["error"] < 1 and result["graph error"] < 1 and result["same bits"]  # type: ignore[operator]
    return result


def run_async(case: AsyncInput, implementation: str) -> dict[str, object]:
    """Rows come by copy engine, each chunk behind the one before; A is NaN until then. Eager, and in a CUDA graph."""
    if implementation not in ("fused", "sequential"):
        return {"skipped": "async_input_matmul is one kernel, or one product a chunk"}
    a = torch.full((case.m, case.k), torch.nan, dtype=case.dtype, device=device())
    weights = [torch.randn(n, case.k, device=device()).mul(case.k**-0.5).to(case.dtype).t() for n in case.ns]
    bs = weights if case.k_major else [weight.contiguous() for weight in weights]
    signals, side = torch.zeros(case.chunks, dtype=torch.int32, device=device()), torch.cuda.Stream()
    arriving, one = (
        torch.randn(case.m, case.k).to(case.dtype).pin_memory(),
        torch.ones(1, dtype=torch.int32).pin_memory(),
    )
    pivot = rank() % case.chunks

    def call_once() -> list[Tensor]:
        a.fill_(torch.nan)
        signals.zero_()
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for step in range(case.chunks):
                chunk = (pivot + step) % case.chunks
                a.chunk(case.chunks)[chunk].copy_(arriving.chunk(case.chunks)[chunk], non_blocking=True)
                signals[chunk : chunk + 1].copy_(one, non_blocking=True)
        outs = async_input_matmul(a, bs, signals, a_chunk_pivot=pivot)
        main.wait_stream(side)
        return outs

    def wrong(outs: list[Tensor]) -> float:
        wanted = [arriving.to(device()).double() @ b.double() for b in bs]
        errors = [((out.double() - want).norm() / want.norm()).item() for out, want in zip(outs, wanted, strict=True)]
        value = torch.tensor([float("inf") if error != error else error for error in errors], device=device()).max()
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value.item())

    by_chunk = mock.patch.object(async_input, "_refused", return_value="asked for")
    with by_chunk if implementation == "sequential" else contextlib.nullcontext():
        outs = call_once()
        result: dict[str, object] = {"error": wrong(outs)}
        again = call_once()
        result["same bits"] = agree(all(torch.equal(x, y) for x, y in zip(outs, again, strict=True)))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call_once()
        arriving.copy_(torch.randn(case.m, case.k))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        result["graph error"] = wrong(captured)
    limit = TOLERANCE[case.dtype]
    result["ok"] = result["error"] < limit and result["graph error"] < limit and result["same bits"]  # type: ignore[operator]
    return result


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same_elsewhere(case: Case, data: Data, outs: list[Tensor]) -> bool:
    """The same bits with scales, biases and numbers elsewhere; of other scales, so many times the results.

    Times a power of two nothing is rounded otherwise, but for subnormal numbers, which float16 has many of.
    """
    exact = bool(case.scales) and data.added is None and torch.float16 not in (case.out_dtype, case.sum_dtype)
    matmuls = len(case.ns) if case.op == "gather" else 1  # not what is only gathered
    same = True
    for times in (1, 2, 0.5, 1) if exact else (1, 1, 1, 1):
        moved = elsewhere(data)
        for of_b in (*moved.b_scales, *(each for each in moved.biases if each is not None)):
            of_b.mul_(times)
        again = call(case, moved)
        wanted = [out * times if i < matmuls else out for i, out in enumerate(outs)]
        same &= all(torch.equal(_raw(x), _raw(y)) for x, y in zip(wanted, again, strict=True))
        del again
    return same


def elsewhere(data: Data) -> Data:
    """The same, whose scales, biases and numbers lie where none of it did."""

    def again(tensors: Sequence[Tensor | None]) -> list[Any]:
        return [None if each is None else torch.empty_like(each).copy_(each) for each in tensors]

    a_scales, b_scales, along = again(data.a_scales), again(data.b_scales), again(data.along)
    return replace(data, a_scales=a_scales, b_scales=b_scales, biases=again(data.biases), along=along)


def _tensors(data: Data) -> list[Tensor]:
    biases = [bias for bias in data.biases if bias is not None]
    added = [] if data.added is None else [data.added]
    return [*data.a, *data.b, *data.a_scales, *data.b_scales, *biases, *data.along, *added]


def main() -> int:
    start(60)
    implementations = os.environ.get("IMPLS", "fused,decomposed,direct,whole,sequential").split(",")
    every = [
        *cases(),
        *converted_cases(),
        *added_cases(),
        *multiplied_cases(),
        *padded_cases(),
        *block_cases(),
        *bulk_cases(),
        *async_cases(),
    ]
    pairs = itertools.product(every, implementations)
    code = run_cases(((f"{case.name}/{name}", functools.partial(run_fresh, case, name)) for case, name in pairs), 60)
    end()
    return code


def run_fresh(case: Any, implementation: str) -> dict[str, Any]:
    """Run a case of any kind on data of its own."""
    if dist.get_backend() != "nccl" and (implementation == "sequential" or "all_reduce" in case.name):
        return {"skipped": "a collective of the group's backend, of which only NCCL's can be captured"}
    torch.manual_seed(int(time.time()) * 8 + rank())
    how: Any = {Case: run, Bulk: run_bulk, AsyncInput: run_async}[type(case)]
    found: dict[str, Any] = how(case, implementation)
    return found


if __name__ == "__main__":
    sys.exit(main())
