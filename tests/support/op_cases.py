"""Cases of the ops: how to make every rank's inputs, run the op, and judge it against fp64.

All ranks' inputs come from one seed, so each rank knows them all and needs no communication for the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch.distributed import ProcessGroup

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class GatherCase:
    """`scale`: "" (unscaled), "one" (tensorwise), "shard" (rowwise, gathered) or "full" (rowwise, replicated).

    weight: Bs are [N, K] in memory, as a layer's; strided: all operands are transposed in memory. takes: of the
    gathered rows of each leading index, in parts of all, those that each B takes: (first, end).
    """

    name: str
    shard: tuple[int, ...]
    dim: int
    ns: tuple[int, ...] = (24,)
    dtype: torch.dtype = BF16
    biased: tuple[int, ...] = ()
    a_full: bool = False
    strided: bool = False
    weight: bool = False
    scale: str = ""
    b_dtype: torch.dtype | None = None
    out_dtype: torch.dtype = BF16
    along: bool = False
    takes: tuple[tuple[float, float], ...] = ()

    def b_rows(self, world: int) -> list[int] | None:
        """That argument of the op."""
        every = math.prod(self.shard[self.dim : -1]) * world
        ends = [[round(part * every) for part in parts] for parts in self.takes]
        return [number for first, end in ends for number in (first, end, every)] or None


@dataclass(frozen=True)
class ScatterCase:
    """`out` is the shape of one rank's result; `scale`: "", "one" (tensorwise) or "row" (rowwise).

    sum_dtype: of the result, to which the products are converted before they are added. added: so is another term.
    factors: what the products are multiplied by, and maybe their sum. padding: how many last rows of all are zeros.
    """

    name: str
    out: tuple[int, ...]
    dim: int
    ks: tuple[int, ...] = (24,)
    dtype: torch.dtype = BF16
    biased: tuple[int, ...] = ()
    op: str = "sum"
    strided: bool = False
    weight: bool = False
    scale: str = ""
    out_dtype: torch.dtype = BF16
    sum_dtype: torch.dtype | None = None
    added: bool = False
    factors: tuple[float, ...] = ()
    padding: int = 0

    @property
    def result_dtype(self) -> torch.dtype:
        return self.sum_dtype or (self.out_dtype if self.scale else self.dtype)


Case = GatherCase | ScatterCase

GATHER_CASES = [
    GatherCase("2d dim 0", (16, 32), 0, (32,)),
    GatherCase("2d dim 0 ragged, chunks, a_full", (70, 48), 0, (40,), a_full=True),
    GatherCase("2d dim 0, odd", (70, 45), 0, (37,), a_full=True),
    GatherCase("2d dim 1 (contraction)", (19, 33), 1, (20,), a_full=True),
    GatherCase("3d dim 0", (3, 7, 40), 0),
    GatherCase("3d dim 1, outer 3", (3, 7, 40), 1, a_full=True),
    GatherCase("3d dim 1, outer 2, several tiles each", (2, 35, 24), 1, (40,), a_full=True),
    GatherCase("3d dim -1", (2, 19, 9), -1, a_full=True),
    GatherCase("4d dim 2", (2, 3, 5, 16), 2, a_full=True),
    GatherCase("4d dim 1", (2, 3, 5, 16), 1, (24,), FP16, a_full=True),
    GatherCase("4d dim -4", (2, 3, 2, 16), -4),
    GatherCase("one row, one column", (1, 1), 0, (1,), FP32, a_full=True),
    GatherCase("one row, contraction", (1, 1), 1, (1,), FP32),
    GatherCase("outer 1", (1, 9, 16), 1, dtype=FP32),
    GatherCase("fp32", (18, 40), 0, (40,), FP32, a_full=True),
    GatherCase("fp16", (18, 40), 0, (40,), FP16),
    GatherCase("three Bs, two biases", (2, 9, 20), 1, (8, 33, 1), biased=(0, 2), a_full=True),
    GatherCase("four Bs, biases", (2, 19, 40), 1, (8, 40, 24, 16), biased=(0, 1, 2, 3), a_full=True),
    GatherCase("three Bs", (40, 72), 0, (8, 40, 72)),
    GatherCase("two Bs, contraction, biases", (9, 20), 1, (8, 12), FP32, biased=(0, 1)),
    GatherCase("strided A and Bs", (3, 8, 24), 1, (24, 16), strided=True, a_full=True),
    GatherCase("strided, contraction", (9, 20), 1, strided=True, a_full=True),
    GatherCase("no rows", (0, 16), 0, (8,), biased=(0,), a_full=True),
    GatherCase("no leading index", (0, 5, 16), 1, (8,), a_full=True),
    GatherCase("no contraction", (5, 0), 0, (8,), biased=(0,), a_full=True),
    GatherCase("no contraction, no bias", (5, 0), 1, (8,)),
    GatherCase("no columns", (20, 16), 0, (0,)),
    GatherCase("e4m3 tensorwise", (2, 9, 32), 1, (24,), E4M3, scale="one", a_full=True),
    GatherCase("e4m3 tensorwise, contraction, bias", (9, 16), 1, (24,), E4M3, (0,), scale="one", out_dtype=FP32),
    GatherCase("e4m3 rowwise, scale travels", (3, 23, 32), 1, (24, 8), E4M3, (1,), scale="shard", a_full=True),
    GatherCase("e4m3 rowwise, scale travels, one row", (1, 32), 0, (24,), E4M3, scale="shard"),
    GatherCase("e4m3 rowwise, scale replicated", (3, 7, 32), 1, (24,), E4M3, scale="full"),
    GatherCase("e4m3 rowwise, contraction, replicated", (9, 16), 1, (24,), E4M3, scale="full", out_dtype=FP16),
    GatherCase("e5m2 x e4m3 rowwise", (9, 32), 0, (24,), E5M2, scale="shard", b_dtype=E4M3),
    GatherCase("e4m3 strided B", (9, 32), 0, (24,), E4M3, scale="shard", strided=True, out_dtype=FP32),
    GatherCase("e4m3 weight to fp32", (19, 48), 0, (32, 16), E4M3, scale="shard", weight=True, out_dtype=FP32),
    GatherCase("e4m3 B as a weight", (19, 48), 0, (32, 16), E4M3, scale="shard", weight=True),
    GatherCase("e4m3 weight, outer 2, bias", (2, 19, 48), 1, (16,), E4M3, (0,), scale="shard", weight=True),
    GatherCase("3d dim 1, outer 3, from an inbox", (3, 19, 32), 1, (16, 24), biased=(0, 1)),
    GatherCase("e4m3 weight, outer 3, from an inbox", (3, 19, 48), 1, (16,), E4M3, scale="shard", weight=True),
    GatherCase("e4m3, numbers along", (2, 23, 32), 1, (24, 8), E4M3, scale="one", along=True),
    GatherCase("e4m3, numbers along, a_full, one row", (1, 32), 0, (24,), E4M3, a_full=True, scale="full", along=True),
    GatherCase("e4m3, numbers along, no columns", (9, 32), 0, (0,), E4M3, scale="one", along=True),
    GatherCase("two ranges", (35, 40), 0, (24, 8), biased=(0, 1), a_full=True, takes=((0, 0.3), (0.3, 1))),
    GatherCase("two ranges at a border of shards", (20, 32), 0, (24, 8), takes=((0, 0.5), (0.5, 1))),
    GatherCase(
        "ranges of some rows, one of none, outer 2",
        (2, 19, 24),
        1,
        (24, 8, 16),
        FP32,
        biased=(1,),
        a_full=True,
        takes=((0.1, 0.8), (0.6, 0.9), (1, 1)),
    ),
]

SCATTER_CASES = [
    ScatterCase("2d dim 0", (16, 32), 0),
    ScatterCase("2d dim 0 ragged, chunks", (70, 40), 0, (48,)),
    ScatterCase("2d dim 0 ragged, many own parts", (310, 24), 0, (16,)),
    ScatterCase("2d dim 0, odd", (70, 37), 0, (45,)),
    ScatterCase("2d dim 1 (columns)", (19, 11), 1),
    ScatterCase("3d dim 0", (3, 7, 40), 0),
    ScatterCase("3d dim 1, outer 3", (3, 7, 40), 1),
    ScatterCase("3d dim 1, outer 2, avg", (2, 35, 72), 1, op="avg"),
    ScatterCase("3d dim -1, avg", (2, 19, 9), -1, op="avg"),
    ScatterCase("4d dim 2", (2, 3, 5, 16), 2),
    ScatterCase("4d dim 1", (2, 3, 5, 16), 1, dtype=FP16),
    ScatterCase("one element", (1, 1), 0, (1,), FP32),
    ScatterCase("one column", (1, 1), 1, (1,), FP32),
    ScatterCase("fp32, avg", (18, 40), 0, (40,), FP32, op="avg"),
    ScatterCase("fp16", (18, 40), 0, (40,), FP16),
    ScatterCase("sum of three, biases", (2, 9, 20), 1, (8, 33, 1), biased=(0, 2)),
    ScatterCase("sum of four", (2, 19, 40), 1, (8, 40, 72, 16)),
    ScatterCase("bias", (40, 72), 0, (40,), biased=(0,)),
    ScatterCase("sum of two, columns, avg", (9, 20), 1, (8, 12), FP32, biased=(0,), op="avg"),
    ScatterCase("strided As and Bs", (3, 7, 24), 1, (24, 16), strided=True),
    ScatterCase("no rows", (0, 16), 0),
    ScatterCase("no columns", (5, 0), 0),
    ScatterCase("no contraction", (5, 8), 0, (0,)),
    ScatterCase("no contraction, bias", (5, 8), 0, (0, 3), biased=(0,)),
    ScatterCase("e4m3 tensorwise", (2, 9, 24), 1, (32,), E4M3, scale="one"),
    ScatterCase("e4m3 tensorwise, columns, avg", (9, 8), 1, (32,), E4M3, op="avg", scale="one", out_dtype=FP32),
    ScatterCase("e4m3 rowwise", (3, 23, 24), 1, (32,), E4M3, (0,), scale="row"),
    ScatterCase("e4m3 rowwise, columns, sum of two", (9, 8), 1, (32, 16), E4M3, scale="row", out_dtype=FP16),
    ScatterCase("e5m2 rowwise, dim 0", (9, 24), 0, (32,), E5M2, scale="row", strided=True),
    ScatterCase("e4m3 weight, rowwise, bias", (19, 48), 0, (32,), E4M3, (0,), scale="row", weight=True),
    ScatterCase("e4m3 weight, tensorwise, outer 2", (2, 19, 48), 1, (32,), E4M3, scale="one", weight=True),
    ScatterCase("e4m3 tensorwise, sum of two", (70, 40), 0, (32, 48), E4M3, scale="one", weight=True),
    ScatterCase("e4m3 rowwise, sum of four", (2, 19, 48), 1, (32, 80, 16, 144), E4M3, scale="row", weight=True),
    ScatterCase(
        "e4m3 rowwise, sum of three, outer 2", (2, 19, 72), 1, (48, 16, 32), E4M3, (1,), "avg", scale="row", weight=True
    ),
    ScatterCase(
        "e4m3 rowwise, sum of four, biases",
        (35, 136),
        0,
        (16, 48, 96, 96),
        E4M3,
        (0, 1, 2, 3),
        scale="row",
        weight=True,
        out_dtype=FP16,
    ),
    ScatterCase("converted", (70, 40), 0, (48,), biased=(0,), sum_dtype=FP32),
    ScatterCase("converted, odd, avg", (70, 37), 0, (45,), op="avg", sum_dtype=FP32),
    ScatterCase("converted sum of three, outer 2", (2, 19, 40), 1, (8, 40, 24), sum_dtype=FP32),
    ScatterCase("converted sum of two, fp16", (35, 72), 0, (8, 40), FP16, sum_dtype=FP32),
    ScatterCase("converted sum of two, columns", (9, 20), 1, (8, 12), biased=(1,), sum_dtype=FP32),
    ScatterCase("converted e4m3", (2, 23, 24), 1, (32,), E4M3, scale="row", weight=True, sum_dtype=FP32),
    ScatterCase("converted sum of two, e4m3", (19, 24), 0, (32, 16), E4M3, scale="one", weight=True, sum_dtype=FP32),
    ScatterCase("another term", (70, 40), 0, (48,), biased=(0,), added=True),
    ScatterCase("another term, outer 3, avg", (3, 7, 40), 1, (24, 8), FP16, op="avg", added=True),
    ScatterCase("another term, strided, columns", (9, 20), 1, (8,), strided=True, added=True),
    ScatterCase(
        "another term of e4m3, converted", (2, 23, 24), 1, (32,), E4M3, scale="row", sum_dtype=FP32, added=True
    ),
    ScatterCase("another term, no contraction", (5, 8), 0, (0,), added=True),
    ScatterCase("padded, bias", (70, 40), 0, (48,), biased=(0,), padding=75),
    ScatterCase("padded sum of two, added, outer 2", (2, 35, 24), 1, (72, 40), added=True, padding=3),
    ScatterCase("padded e4m3, multiplied", (23, 24), 0, (32,), E4M3, (0,), scale="row", factors=(-2.0,), padding=5),
    ScatterCase("multiplied", (70, 40), 0, (48,), factors=(-0.25,)),
    ScatterCase("multiplied, bias, fp16, avg", (18, 40), 0, (40,), FP16, (0,), "avg", factors=(4.0,)),
    ScatterCase("multiplied fp32, outer 2", (2, 35, 72), 1, (24,), FP32, factors=(2.0,)),
    ScatterCase("multiplied, converted", (70, 40), 0, (48,), sum_dtype=FP32, factors=(2.0**-20,)),
    ScatterCase("multiplied e4m3", (19, 24), 0, (32,), E4M3, scale="row", weight=True, factors=(-2.0,)),
    ScatterCase("multiplied sum of three", (2, 19, 40), 1, (8, 40, 24), factors=(1.0, 1.0, 1.0, 0.5)),
    ScatterCase(
        "multiplied sum of two, e4m3", (19, 24), 0, (32, 16), E4M3, scale="one", weight=True, factors=(-1, -1, 4.0)
    ),
    ScatterCase("sum of two, each multiplied", (2, 19, 40), 1, (8, 40), factors=(-1.0, 2.0)),
    ScatterCase(
        "sum of two, each multiplied, another term, columns",
        (9, 20),
        1,
        (8, 12),
        biased=(1,),
        added=True,
        factors=(0.5, -1.0, 0.25),
    ),
    ScatterCase(
        "sum of two of e4m3, each multiplied, converted",
        (19, 24),
        0,
        (32, 16),
        E4M3,
        scale="row",
        sum_dtype=FP32,
        factors=(4.0, -1.0, 2.0),
    ),
    ScatterCase("e4m3 to fp32, dim 0", (19, 24), 0, (32,), E4M3, scale="row", weight=True, out_dtype=FP32),
]

CASES: list[Case] = [*GATHER_CASES, *SCATTER_CASES]


@dataclass(frozen=True)
class Inputs:
    """One rank's arguments."""

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    a_scales: list[torch.Tensor]
    b_scales: list[torch.Tensor]
    along: torch.Tensor | None = None
    added: torch.Tensor | None = None


def make_inputs(case: Case, rank: int, world: int, seed: int) -> Inputs:
    """Fresh inputs of one rank; a replicated scale ("full") is the same on all of them."""
    rng = torch.Generator().manual_seed(seed * 1000 + rank)
    shared = torch.Generator().manual_seed(seed * 1000 + 999)
    a_shapes, b_shapes, full = _shapes(case, world)
    b_dtype = (case.b_dtype if isinstance(case, GatherCase) else None) or case.dtype
    bias_dtype = case.dtype if not case.scale else BF16
    return Inputs(
        a=[_random(shape, case.dtype, case.strided, rng) for shape in a_shapes],
        b=[_random(shape, b_dtype, case.strided or case.weight, rng) for shape in b_shapes],
        biases=[_random((s[1],), bias_dtype, False, rng) if i in case.biased else None for i, s in enumerate(b_shapes)],
        a_scales=[_a_scale(case.scale, shape, full, rng, shared) for shape in a_shapes] if case.scale else [],
        b_scales=[_scale((1, s[1]) if case.scale != "one" else (), rng) for s in b_shapes] if case.scale else [],
        along=_scale((*a_shapes[0][:-1], 1), rng) if isinstance(case, GatherCase) and case.along else None,
        added=_random(full, case.result_dtype, case.strided, rng)
        if isinstance(case, ScatterCase) and case.added
        else None,
    )


IMPLEMENTATIONS = ("fused", "decomposed", "direct", "whole")


def run_each(case: Case, x: Inputs, group: ProcessGroup) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(implementation, results of the op) for each that can run it; the sequential program only where none can.

    A gathered A that is returned is kept by all ranks, as far as they are told, and then is not.
    """
    from asynctp_kernels import cuda

    ran = False
    for implementation in (*IMPLEMENTATIONS, "sequential"):
        if (
            ran and implementation == "sequential"
        ):  # it sums over ranks as gloo does; `tests/integration/test_ops.py` judges it
            return
        with cuda.forced(implementation):
            try:
                outs = run(case, x, group)
            except RuntimeError as error:
                if "was asked for and cannot run" not in str(error):
                    raise
                continue
            ran = True
            yield implementation, outs
            if isinstance(case, GatherCase) and case.a_full:
                yield f"{implementation}, pushed", run(case, x, group, all_keep=False)


def run(case: Case, x: Inputs, group: ProcessGroup, all_keep: bool | None = None) -> list[torch.Tensor]:
    """The op under test. all_keep: that argument of a gather."""
    import asynctp_passes.ops  # noqa: F401

    ops = torch.ops.asynctp
    name = group.group_name
    if isinstance(case, ScatterCase):
        scales = (x.a_scales, x.b_scales, case.out_dtype, True) if case.scale else (None, None, None, False)
        options = (case.op, case.dim, group.size(), name, *scales, case.sum_dtype, x.added, list(case.factors) or None)
        options = (*options, case.out[case.dim] * group.size() - case.padding) if case.padding else options
        return [ops.matmul_reduce_scatter(x.a, x.b, x.biases, *options)]
    where = (case.dim, case.a_full, group.size(), name)
    if not case.scale:
        rows = case.b_rows(group.size())
        return ops.all_gather_matmul(x.a[0], x.b, x.biases, *where, all_keep=all_keep, b_rows=rows)
    scales = (x.a_scales[0], x.b_scales, case.scale == "shard", case.out_dtype, True)
    return ops.all_gather_matmul(x.a[0], x.b, x.biases, *where, *scales, x.along, all_keep)


def judge(case: Case, outs: list[torch.Tensor], inputs: list[Inputs], rank: int) -> str:
    """What is wrong with `outs`; empty when nothing is. Every rank's inputs are given."""
    if isinstance(case, GatherCase):
        return _judge_gather(case, outs, inputs, rank)
    return _judge_scatter(case, outs, inputs, rank)


def scaled_copy(case: Case, rows: int) -> Case:
    """The case with another number of rows in its gather or scatter dim, if that is not the last."""
    shape = case.shard if isinstance(case, GatherCase) else case.out
    if case.dim % len(shape) == len(shape) - 1:
        return case
    shape = (*shape[: case.dim], rows, *shape[case.dim + 1 :])
    return replace(case, shard=shape) if isinstance(case, GatherCase) else replace(case, out=shape)


def _shapes(case: Case, world: int) -> tuple[list[tuple[int, ...]], list[tuple[int, int]], tuple[int, ...]]:
    """Shapes of A operands, of B operands, and of the gathered A (or the unscattered result)."""
    shard = case.shard if isinstance(case, GatherCase) else case.out
    dim = case.dim % len(shard)
    full = (*shard[:dim], shard[dim] * world, *shard[dim + 1 :])
    if isinstance(case, GatherCase):
        return [shard], [(full[-1], n) for n in case.ns], full
    return [(*full[:-1], k) for k in case.ks], [(k, full[-1]) for k in case.ks], full


def _random(shape: tuple[int, ...], dtype: torch.dtype, strided: bool, rng: torch.Generator) -> torch.Tensor:
    if strided and len(shape) >= 2:
        return _random((*shape[:-2], shape[-1], shape[-2]), dtype, False, rng).transpose(-1, -2)
    return torch.randn(shape, generator=rng).to(dtype)


def _scale(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=rng) + 0.5


def _a_scale(
    scale: str, a: tuple[int, ...], full: tuple[int, ...], rng: torch.Generator, shared: torch.Generator
) -> torch.Tensor:
    if scale == "one":
        return _scale((), shared)
    return _scale((*full[:-1], 1), shared) if scale == "full" else _scale((*a[:-1], 1), rng)


def _product(a: torch.Tensor, x: Inputs, i: int, a_scale: torch.Tensor | None, absolute: bool) -> torch.Tensor:
    """a @ b_i with scales and bias in fp64; of absolute values, for the error bound."""
    magnitude = torch.abs if absolute else torch.clone
    out = magnitude(a.double()) @ magnitude(x.b[i].double())
    if a_scale is not None:
        out = out * a_scale.double() * x.b_scales[i].double()
    bias = x.biases[i]
    return out if bias is None else out + magnitude(bias.double())


def _judge_gather(case: GatherCase, outs: list[torch.Tensor], inputs: list[Inputs], rank: int) -> str:
    own = inputs[rank]
    a_full = torch.cat([x.a[0].double() for x in inputs], case.dim).to(case.dtype)
    a_scale = own.a_scales[0] if own.a_scales else None
    if case.scale == "shard":
        a_scale = torch.cat([x.a_scales[0] for x in inputs], case.dim)
    expected_count = len(case.ns) + case.a_full + case.along
    if len(outs) != expected_count:
        return f"{len(outs)} results, expected {expected_count}"
    full = outs[len(case.ns)] if case.a_full else a_full
    if not torch.equal(full.contiguous().view(torch.uint8), a_full.contiguous().view(torch.uint8)):
        return "a_full differs"
    along = [x.along for x in inputs if x.along is not None]
    if along and not torch.equal(outs[-1], torch.cat(along, case.dim)):
        return "the numbers that travelled along differ"
    rows = case.b_rows(len(inputs))
    for i in range(len(case.ns)):
        taken = a_full
        if rows is not None:
            first, end, every = rows[3 * i : 3 * i + 3]
            taken = a_full.flatten(0, -2).unflatten(0, (-1, every))[:, first:end].flatten(0, 1)
        reference, size = (_product(taken, own, i, a_scale, absolute) for absolute in (False, True))
        wrong = _compare(outs[i], reference, size, case.out_dtype if case.scale else case.dtype)
        if wrong:
            return f"out {i}: {wrong}"
    return ""


def _judge_scatter(case: ScatterCase, outs: list[torch.Tensor], inputs: list[Inputs], rank: int) -> str:
    world, dtype = len(inputs), case.out_dtype if case.scale else case.dtype
    products, sizes = ([_terms(case, x, absolute) for x in inputs] for absolute in (False, True))
    total, size = (reduce(add, [reduce(add, mine) for mine in each]) for each in (products, sizes))
    # each rank's sum is rounded; of several terms each may be, and each sum of some of them, if it is not converted
    count = len(case.ks) + case.added
    roundings = count if count > 1 and case.sum_dtype is None else 1
    rounded = _unit(dtype) * roundings * reduce(add, [product.abs() for mine in products for product in mine])
    divisor = world if case.op == "avg" else 1
    pick = [(each / divisor).chunk(world, case.dim)[rank] for each in (total, size, rounded)]
    return _compare(outs[0], pick[0], pick[1], case.sum_dtype or dtype, pick[2])


def _terms(case: ScatterCase, x: Inputs, absolute: bool) -> list[torch.Tensor]:
    """What a rank adds up, in fp64; of absolute values, for the error bound."""
    count, magnitude = len(case.ks), torch.abs if absolute else torch.clone
    factors = torch.tensor(case.factors or [1.0] * count, dtype=torch.float64)
    each, whole = magnitude(factors[:count]), magnitude(factors[count:].prod())
    scales = x.a_scales or [None] * count
    products = [_product(a, x, i, scales[i], absolute) * each[i] * whole for i, a in enumerate(x.a)]
    terms = [*products, *([] if x.added is None else [magnitude(x.added.double()) * whole])]
    if case.padding:
        for term in terms:
            term.narrow(case.dim, term.shape[case.dim] - case.padding, case.padding).zero_()
    return terms


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype != FP32 else 0.0


def _compare(
    out: torch.Tensor,
    reference: torch.Tensor,
    size: torch.Tensor,
    dtype: torch.dtype,
    extra: torch.Tensor | float = 0.0,
) -> str:
    """One rounding to `dtype`, `extra`, and the error of an fp32 sum: |out - reference| must stay within."""
    if out.dtype != dtype or out.shape != reference.shape:
        return f"{out.dtype} {tuple(out.shape)}, expected {dtype} {tuple(reference.shape)}"
    bound = _unit(dtype) * reference.abs() * 1.01 + extra * 1.01 + 2**-19 * size + torch.finfo(dtype).tiny
    excess = ((out.double() - reference).abs() / bound).nan_to_num(math.inf)
    if out.numel() and excess.max() > 1:
        return f"{(excess > 1).sum().item()} of {out.numel()} off, worst {excess.max().item():.3g} times the bound"
    return ""
