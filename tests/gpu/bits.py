"""Batch-invariant calls: each row, bit by bit, against the same row of one reference, whatever is beside it.

    torchrun --nproc_per_node=4 tests/gpu/bits.py [SUBSTRING ...]

Ranks may share GPUs (`launched`); SEED in the environment draws other rows. Of each recipe there is a pool of rows, and
its reference: one matmul of the whole pool by the GEMM of ours alone; of a sum over ranks, all ranks' results added in
fp32, in rank order, and rounded once. A call has any number of drawn rows of the pool, on any rank, by each
implementation, eager and in a CUDA graph.

One JSON line a case, from rank 0: calls, rows and elements that were compared, over all ranks, and `unlike`, how many
elements differ. `same` lines compare the reference with other matmuls. Last the totals as a table.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose.wire import INVARIANT
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.own_matmul import WholeGemm
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.signals import IS_INTERPRETED
from launched import device, end, limit, run_cases, show, start
from torch import Tensor

import asynctp_passes.ops

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
IMPLEMENTATIONS = ("fused", "decomposed", "direct", "whole", "sequential")
SEED = int(os.environ.get("SEED", "0"))
#: rows of the pool, and numbers of rows: borders of tiles, and primes; calls of each case
POOL, ROWS, CALLS = 8192, (
    1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 48, 61, 64, 65, 97, 127, 128, 129, 193, 251, 256, 257, 384, 509, 512, 513,
    769, 1021, 1024, 1025, 2039, 2048, 3001, 4093, 4096, 5003, 8191, 8192,
), int(os.environ.get("CALLS", "14"))  # fmt: skip
if IS_INTERPRETED:
    POOL, ROWS, CALLS = 100, (1, 2, 5, 15, 16, 17, 33, 47, 64, 65, 97, 100), int(os.environ.get("CALLS", "4"))


@dataclass(frozen=True)
class Recipe:
    """Matmuls. k, ns: sizes; a sum takes the first N. scales: "", "tensor", "row", or "row-one": one for each row of
    A, and one number for B. travels: A's scales are gathered too.

    several: matmuls of a sum. k_major: K is contiguous in B. added: another term. factors, sum_dtype: as of the ops.
    """

    name: str
    dtype: torch.dtype = BF16
    k: int = 96 if IS_INTERPRETED else 4096
    ns: tuple[int, ...] = (72, 16) if IS_INTERPRETED else (1536, 512)
    out_dtype: torch.dtype = BF16
    scales: str = ""
    travels: bool = False
    fast: bool = True
    bias: bool = False
    k_major: bool = True
    several: int = 1
    added: bool = False
    factors: tuple[float, ...] = ()
    sum_dtype: torch.dtype | None = None
    reduce_op: str = "sum"


RECIPES = (
    Recipe("bf16"),
    Recipe("bf16-bias", bias=True, k_major=False, sum_dtype=FP32),
    Recipe("fp16", FP16, out_dtype=FP16, bias=True, reduce_op="avg"),
    Recipe("fp8-tensor", FP8, scales="tensor", bias=True),
    Recipe("fp8-tensor-precise", FP8, scales="tensor", fast=False),
    Recipe("fp8-row", FP8, scales="row", travels=True, reduce_op="avg"),
    Recipe("fp8-row-bias", FP8, scales="row", bias=True, factors=(0.25,)),
    Recipe("fp8-row-one", FP8, scales="row-one", travels=True, out_dtype=FP32),
    Recipe("bf16-row-one", scales="row-one", out_dtype=FP32),
    Recipe("fp8-row-precise", FP8, scales="row", fast=False, travels=True),
    Recipe("bf16-several", several=2, added=True, factors=(1.0, -0.5, 2.0), ns=(72,) if IS_INTERPRETED else (2560,)),
    Recipe("fp8-row-several", FP8, scales="row", several=2),
)


@dataclass
class Pool:
    """Rows and what they are multiplied by: As [POOL, K], their scales, Bs, and of a sum what is added to it."""

    a: list[Tensor]
    a_scales: list[Tensor]
    bs: list[Tensor]
    b_scales: list[Tensor]
    biases: list[Tensor | None]
    added: Tensor | None


def random_of(dtype: torch.dtype, *sizes: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(sizes, device=device()) * scale).to(dtype)


def draw(recipe: Recipe, gathers: bool) -> Pool:
    """A gather's rows and their scales are the same on all ranks, since each rank may have each row."""
    seed = SEED * 1000 + zlib.crc32(recipe.name.encode()) % 1000
    alike = seed if gathers else seed + 7 * dist.get_rank()
    count, ns = (1, recipe.ns) if gathers else (recipe.several, recipe.ns[:1] * recipe.several)
    torch.manual_seed(alike)
    a = [random_of(recipe.dtype, POOL, recipe.k) for _ in range(count)]
    rows = {"row": (POOL, 1), "row-one": (POOL, 1), "tensor": ()}.get(recipe.scales)
    a_scales = [] if rows is None else [torch.rand(rows, device=device()) + 0.5 for _ in range(count)]
    torch.manual_seed(seed + 31 * (1 + dist.get_rank()))
    bs = [random_of(recipe.dtype, n, recipe.k, scale=recipe.k**-0.5).t() for n in ns]
    bs = bs if recipe.k_major else [b.contiguous() for b in bs]
    columns = recipe.scales == "row"
    b_scales = [torch.rand((1, n) if columns else (), device=device()) + 0.5 for n in ns] if recipe.scales else []
    biases = [random_of(recipe.out_dtype, n) if recipe.bias else None for n in ns]
    added = random_of(recipe.sum_dtype or recipe.out_dtype, POOL, ns[0]) if recipe.added and not gathers else None
    return Pool(a, a_scales, bs, b_scales, biases, added)


# --- the reference ---------------------------------------------------------------------------------------------------
def multiplied(recipe: Recipe, pool: Pool, i: int, a: Tensor, a_scale: Tensor | None) -> Tensor:
    """The whole pool by the B number `i`: one launch of our GEMM."""
    out = torch.empty(POOL, pool.bs[i].shape[1], dtype=recipe.out_dtype, device=device())
    call = Matrices(a, [pool.bs[i]], [out], a_scale, pool.b_scales[i : i + 1], pool.biases[i : i + 1])
    WholeGemm(call, fast=recipe.fast)(driver.current_stream(device().index), call)
    return out


def references(recipe: Recipe, pool: Pool, gathers: bool) -> list[Tensor]:
    """The results of each row of the pool: of a gather one for each B, or the sum over ranks."""
    scales: Sequence[Tensor | None] = pool.a_scales or [None] * len(pool.a)
    if gathers:
        return [multiplied(recipe, pool, i, pool.a[0], scales[0]) for i in range(len(pool.bs))]
    made = [multiplied(recipe, pool, i, a, scale) for i, (a, scale) in enumerate(zip(pool.a, scales, strict=True))]
    terms = [each.to(recipe.sum_dtype or each.dtype) for each in made]
    factors = recipe.factors or (1.0,) * len(terms)
    total = terms[0] * factors[0]
    for term, factor in zip(terms[1:], factors[1:], strict=False):
        total = total + term * factor
    total = total if pool.added is None else total + pool.added
    total = total * factors[-1] if len(factors) > len(terms) else total
    parts = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, total)
    whole = torch.zeros_like(total, dtype=FP32)
    for part in parts:
        whole += part.float()
    return [(whole * (1 / len(parts) if recipe.reduce_op == "avg" else 1)).to(total.dtype)]


# --- calls -----------------------------------------------------------------------------------------------------------
Call = Callable[[Recipe, Pool, Tensor], tuple[Sequence[Tensor], Any]]


def options_of(recipe: Recipe, pool: Pool) -> dict[str, Any]:
    found: dict[str, Any] = {"accord": INVARIANT}
    if recipe.scales:
        found |= {"b_scales": pool.b_scales, "out_dtype": recipe.out_dtype, "use_fast_accum": recipe.fast}
    return found


def gather(recipe: Recipe, pool: Pool, picked: Tensor, outer: int = 1, full: bool = False) -> Any:
    """`picked` [ranks, rows of each]: rank r has those of row r, in `outer` blocks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    blocks = picked.view(ranks, outer, -1)
    a, order, dim = pool.a[0][blocks[rank]], blocks.transpose(0, 1).reshape(-1), 1
    options = options_of(recipe, pool)
    if pool.a_scales:
        scale = pool.a_scales[0]
        if scale.ndim:
            lead = blocks[rank] if recipe.travels else blocks.transpose(0, 1).reshape(outer, -1)
            scale = scale[lead] if outer > 1 else scale[lead][0]
        options |= {"a_scale": scale, "gather_a_scale": recipe.travels and scale.ndim > 0}
    if outer == 1:  # gloo gathers along the first dimension
        a, dim = a[0], 0
    group = dist.group.WORLD.group_name
    outs = torch.ops.asynctp.all_gather_matmul(a, pool.bs, pool.biases, dim, full, ranks, group, **options)
    return [out.flatten(0, -2) for out in outs[: len(pool.bs)]], order


def gather_kept(recipe: Recipe, pool: Pool, picked: Tensor) -> Any:
    return gather(recipe, pool, picked, full=True)


def gather_outer(recipe: Recipe, pool: Pool, picked: Tensor) -> Any:
    return gather(recipe, pool, picked, outer=2 if picked.shape[1] % 2 == 0 else 1)


def gather_columns(recipe: Recipe, pool: Pool, picked: Tensor) -> Any:
    """All ranks have a part of each row."""
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    order = picked.reshape(-1)
    a = pool.a[0][order].chunk(ranks, 1)[dist.get_rank()].contiguous()
    options = options_of(recipe, pool)
    if pool.a_scales:
        options |= {"a_scale": pool.a_scales[0][order] if pool.a_scales[0].ndim else pool.a_scales[0]}
    outs = torch.ops.asynctp.all_gather_matmul(a, pool.bs, pool.biases, 1, False, ranks, group, **options)
    return outs, order


def reduction(recipe: Recipe, pool: Pool, order: Tensor) -> tuple[list[Any], dict[str, Any]]:
    options = options_of(recipe, pool)
    if pool.a_scales:
        options |= {"a_scales": [scale[order] if scale.ndim else scale for scale in pool.a_scales]}
    options |= {"sum_dtype": recipe.sum_dtype, "factors": list(recipe.factors) or None}
    options |= {"added": None if pool.added is None else pool.added[order]}
    return [[a[order] for a in pool.a], pool.bs, pool.biases, recipe.reduce_op], options


def scatter(recipe: Recipe, pool: Pool, picked: Tensor) -> Any:
    """All ranks have all rows."""
    given, options = reduction(recipe, pool, picked.reshape(-1))
    where = (0, dist.get_world_size(), dist.group.WORLD.group_name)
    return [torch.ops.asynctp.matmul_reduce_scatter(*given, *where, **options)], picked[dist.get_rank()]


def scatter_columns(recipe: Recipe, pool: Pool, picked: Tensor) -> Any:
    given, options = reduction(recipe, pool, picked.reshape(-1))
    where = (1, dist.get_world_size(), dist.group.WORLD.group_name)
    return [torch.ops.asynctp.matmul_reduce_scatter(*given, *where, **options)], picked.reshape(-1)


def all_reduce(recipe: Recipe, pool: Pool, picked: Tensor) -> Any:
    """Any number of rows: not only as many as ranks divide."""
    order = picked.reshape(-1)
    order = order[: len(order) - int(order[0]) % picked.shape[0]]
    given, options = reduction(recipe, pool, order)
    return [torch.ops.asynctp.matmul_all_reduce(*given, dist.group.WORLD.group_name, **options)], order


OPS: dict[str, Call] = {
    "gather": gather, "gather-kept": gather_kept, "gather-outer": gather_outer, "gather-columns": gather_columns,
    "scatter": scatter, "scatter-columns": scatter_columns, "all-reduce": all_reduce,
}  # fmt: skip
#: of which one implementation has most to show
ONLY = {"gather-kept": ("fused", "decomposed"), "gather-outer": ("fused", "decomposed"), "gather-columns": ("direct",),
        "scatter-columns": ("direct",)}  # fmt: skip


def raw(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


@functools.lru_cache(1)
def drawn(recipe: Recipe, gathers: bool) -> tuple[Pool, list[Tensor]]:
    pool = draw(recipe, gathers)
    return pool, references(recipe, pool, gathers)


def unlike(outs: Sequence[Tensor], order: Tensor, wanted: Sequence[Tensor]) -> Tensor:
    count = torch.zeros((), dtype=torch.int64, device=device())
    for out, whole in zip(outs, wanted, strict=True):
        like = whole[order]
        if out.shape[1] != like.shape[1]:
            like = like.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        count += (raw(out) != raw(like)).sum()
    return count


def in_graph(op: Call, recipe: Recipe, pool: Pool, picked: Tensor, wanted: Sequence[Tensor]) -> Tensor:
    """The same captured; replayed for other rows of the pool."""
    torch.cuda.synchronize()
    dist.barrier()
    graph, rows = torch.cuda.CUDAGraph(), picked.clone()
    with torch.cuda.graph(graph):
        outs, order = op(recipe, pool, rows)
    rows.copy_(picked.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    return unlike(outs, order, wanted)


def run(recipe: Recipe, op: str, implementation: str, totals: Counter[str]) -> dict[str, Any]:
    """Calls of drawn numbers of rows; the numbers are the same on all ranks."""
    gathers, ranks = op.startswith("gather"), dist.get_world_size()
    pool, wanted = drawn(recipe, gathers)
    choose = random.Random(f"{SEED} {recipe.name} {op} {implementation}")
    most = POOL // ranks
    each = [rows for rows in ROWS if rows <= most]
    numbers = [1, most, *choose.choices(each, k=CALLS - 2)]
    drawing = torch.Generator().manual_seed(choose.randrange(1 << 30))
    differ, rows, elements, graphs, made, refused = torch.zeros((), dtype=torch.int64, device=device()), 0, 0, 0, 0, ""
    with cuda.forced(implementation):
        for number, count in enumerate(numbers):
            picked = torch.randint(POOL, (ranks, count), generator=drawing).to(device())
            try:
                outs, order = OPS[op](recipe, pool, picked)
            except RuntimeError as error:
                if "was asked for and cannot run" not in str(error):
                    raise
                refused = str(error).split("cannot run: ")[1]
                continue
            made += 1
            differ += unlike(outs, order, wanted)
            rows, elements = rows + len(order), elements + sum(out.numel() for out in outs)
            # gloo, which makes what is in no memory of asynctp's, cannot be captured; neither can numbers of the CPU
            if not IS_INTERPRETED and number % 2 and implementation != "sequential" and op != "all-reduce":
                differ += in_graph(OPS[op], recipe, pool, picked, wanted)
                rows, elements, graphs = rows + len(order), elements + sum(out.numel() for out in outs), graphs + 1
    if not made:
        return {"refused": refused}
    found = torch.stack([differ, *(torch.tensor(n, device=device()) for n in (rows, elements))]).cpu()
    dist.all_reduce(found)
    differ_in_all, *sizes = found.tolist()
    totals.update({"cases": 1, "calls": made + graphs, "rows": sizes[0], "elements": sizes[1]})
    totals["unlike"] += differ_in_all
    told = {"calls": made, "graphs": graphs, "rows": sizes[0], "elements": sizes[1], "unlike": differ_in_all}
    return {**told, "ok": differ_in_all == 0}


# --- other matmuls ---------------------------------------------------------------------------------------------------
def same(recipe: Recipe) -> dict[str, Any]:
    """How many elements of other matmuls differ from the reference, by what makes them and the number of rows.

    It fails where another matmul that walks K in order has other bits.
    """
    pool, (wanted, *_) = drawn(recipe, True)
    a, b = pool.a[0], pool.bs[0]
    found = {}
    for rows in (16, 128, 1024, POOL):
        others: dict[str, Callable[[Tensor], Tensor]] = {"cublas": lambda a: torch.mm(a, b)}
        if not IS_INTERPRETED:
            from in_order import matmul

            others["triton in order"] = lambda a: matmul(a, b)
        for name, other in others.items():
            out = other(a[:rows])
            found[f"{name}, {rows} rows"] = int((raw(out) != raw(wanted[:rows])).sum())
    return {**found, "ok": not any(count for name, count in found.items() if name.startswith("triton"))}


def cases(totals: Counter[str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for recipe in RECIPES:
        if recipe.name == "bf16" and not IS_INTERPRETED:
            yield f"same as {recipe.name}", lambda recipe=recipe: same(recipe)
        for op, implementation in itertools.product(OPS, IMPLEMENTATIONS):
            if implementation in ONLY.get(op, IMPLEMENTATIONS) and not (recipe.several > 1 and op.startswith("gather")):
                name = f"{recipe.name} {op} {implementation}"
                yield name, lambda case=(recipe, op, implementation): run(*case, totals)


def main() -> int:
    start(300)
    totals = Counter[str]()
    failed = run_cases(cases(totals), 300)
    limit(60)
    show({"ranks": dist.get_world_size(), "seed": SEED, "tiles": os.environ.get("TILES", ""), **totals})
    end()
    return failed


if __name__ == "__main__":
    asynctp_passes.ops.refresh()
    sys.exit(main())
