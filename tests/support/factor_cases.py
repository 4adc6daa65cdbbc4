"""Reduced products that are multiplied by powers of two, in numbers or tensors, near the ends of their dtypes' ranges.

Each number in them is a power of two, or a largest one: so eager's results are the only right ones, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import QUICK
from passes import outcomes, run_pass
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import asynctp_passes
from asynctp_passes import Report

RANKS = 2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8 = torch.float8_e4m3fn
M, K, N = 4, 16, 32

Program = Callable[..., Any]
Inputs = Callable[[int], list[Tensor]]


class Case(NamedTuple):
    """A program, its inputs on a rank, and the outcomes of its collectives (`F`, or a code) in graph order."""

    program: Program
    inputs: Inputs
    outcomes: tuple[str, ...] = ("F",)


def scattered(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD))


def reduced(x: Tensor, how: str = "sum") -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, how, dist.group.WORLD))


def gathered(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(x, 0, dist.group.WORLD))


# --- numbers ---------------------------------------------------------------------------------------------------
def pairs(*numbers: float, dtype: torch.dtype = FP32, others: Sequence[float] = ()) -> Inputs:
    """Operands A, B, A, B, ... of which each product has one number only: that of A times that of B. Then others.

    These are of the product's shape, and of one number each.
    """

    def make(rank: int) -> list[Tensor]:
        operands = [torch.zeros(K, N) if i % 2 else torch.zeros(M, K) for i in range(len(numbers))]
        for i, (operand, number) in enumerate(zip(operands, numbers, strict=True)):
            operands[i] = operand.to(dtype)
            (operands[i][0] if i % 2 else operands[i][:, 0]).fill_(number)
        return [*operands, *(torch.full((M, N), number, dtype=dtype) for number in others)]

    return make


def opposite(*numbers: float) -> Inputs:
    """As `pairs`, where the first A of rank 1 is the negative of that of rank 0."""

    def make(rank: int) -> list[Tensor]:
        first, *rest = pairs(*numbers)(rank)
        return [-first if rank else first, *rest]

    return make


def filled(*numbers: float) -> Inputs:
    """Operands of one number each."""
    shapes = [(M, K), (K, N)] * (len(numbers) // 2)
    return lambda rank: [torch.full(shape, number) for shape, number in zip(shapes, numbers, strict=True)]


def masked(dtype: torch.dtype, largest: float = 0.25) -> Inputs:
    """A row of the smallest number; a column of B has one number that is not 0, `largest` or less."""

    def make(rank: int) -> list[Tensor]:
        x = torch.arange(M * K, dtype=FP64).reshape(M, K) - 8 * rank
        x[1] = torch.finfo(dtype).min
        columns = torch.arange(N)
        w = torch.zeros(K, N, dtype=FP64)
        w[columns % K, columns] = largest * 2.0 ** -(columns % 5).double()
        w[:, ::2] *= -1
        return [x.to(dtype), w.to(dtype)]

    return make


def fp8(number: float, a_scale: float, b_scale: float) -> Inputs:
    """An A and a B of fp8 whose product has one number, and their scales."""

    def make(rank: int) -> list[Tensor]:
        a, b = pairs(number, 1.0)(rank)
        return [a.to(FP8), b.t().contiguous().to(FP8).t(), torch.tensor(a_scale), torch.tensor(b_scale)]

    return make


def with_bias(a: float, b: float, bias: float) -> Inputs:
    return lambda rank: [*pairs(a, b)(rank), torch.full((N,), bias)]


MOST = torch.finfo(FP32).max


# --- programs --------------------------------------------------------------------------------------------------
def times(*numbers: float, reduce: Program = scattered) -> Program:
    """A product, times one number after the other."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        out = x @ w
        for number in numbers:
            out = out * number
        return reduce(out)

    return program


def converted(number: float, before: bool = False) -> Program:
    """A product in fp32, times a number, which it may be before."""
    if before:
        return lambda x, w: scattered(((x @ w) * number).float())
    return lambda x, w: scattered((x @ w).float() * number)


def scaled(number: float, dtype: torch.dtype, reduce: Program = scattered) -> Program:
    return lambda a, b, one, two: reduce(torch._scaled_mm(a, b, one, two, out_dtype=dtype) * number)


def of_sum(combine: Program, reduce: Program = scattered) -> Program:
    """What is made of products of pairs of operands, and of other tensors behind these."""

    def program(*tensors: Tensor) -> Tensor:
        operands = [tensor for tensor in tensors if tensor.shape != (M, N)]
        others = tensors[len(operands) :]
        products = [a @ b for a, b in zip(operands[::2], operands[1::2], strict=True)]
        return reduce(combine(*products, *others))

    return program


def in_three_dimensions(x: Tensor, w: Tensor) -> Tensor:
    out = (x.view(2, M // 2, K) @ w) * 2.0
    return scattered(out.permute(1, 0, 2).contiguous())


def of_results(combine: Program) -> Program:
    """What is made of the reduced products of pairs of operands."""
    return lambda x, w, y, v: combine(reduced(x @ w), reduced(y @ v))


AVERAGED: Program = lambda x: reduced(x, "avg")  # noqa: E731


def by_tensors(*factors: tuple[tuple[int, ...], float], dtype: torch.dtype = FP32, outer: bool = False) -> Program:
    """A product, converted, times tensors of one number each: one after the other, or by the product of these."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        tensors = [torch.full(shape, number, dtype=dtype) for shape, number in factors]
        out = (x @ w).to(dtype)
        if outer:
            return scattered(out * (tensors[0] * tensors[1]))
        for tensor in tensors:
            out = out * tensor
        return scattered(out)

    return program


def gated(x: Tensor, w: Tensor) -> Tensor:
    """Columns first, by int8's scales say; a gate of rows is no larger than 1."""
    return scattered((x @ w) * torch.full((N,), 8.0) * torch.sigmoid(torch.zeros(M, 1)))


ROWS, COLUMNS = (M, 1), (N,)
CASES: dict[str, Case] = {
    "small": Case(times(2.0**-32), filled(1e-37, 1e37)),
    "small, all-reduced": Case(times(2.0**-32, reduce=reduced), filled(1e-37, 1e37)),
    "large": Case(times(2.0**32), filled(1e37, 1e-37)),
    "masked": Case(times(2.0), masked(FP32)),
    "masked, all-reduced": Case(times(2.0, reduce=reduced), masked(FP32, 0.125)),
    "masked, averaged": Case(times(2.0, reduce=AVERAGED), masked(FP32, 0.125)),
    "masked bf16": Case(times(2.0), masked(BF16)),
    "masked fp16": Case(times(2.0), masked(FP16)),
    "masked fp64": Case(times(2.0), masked(FP64)),
    "masked, negated": Case(lambda x, w: scattered(-(x @ w)), masked(FP32)),
    "masked, divided by 1/2": Case(lambda x, w: scattered((x @ w) / 0.5), masked(BF16)),
    "masked, divided by -2": Case(lambda x, w: scattered((x @ w) / -2), masked(FP16, 1.0)),
    "masked, and too large in eager too": Case(times(8.0), masked(FP32)),
    "masked bf16, and too large in eager too": Case(times(8.0), masked(BF16, 0.5)),
    "masked fp16, and too large in eager too": Case(times(8.0), masked(FP16, 0.5)),
    "too large a product, divided then": Case(times(0.25), pairs(MOST, 2.0)),
    "too large a product of fp16, divided then": Case(times(0.25), pairs(300.0, 512.0, dtype=FP16)),
    "in three dimensions": Case(in_three_dimensions, masked(FP32)),
    "down to subnormal numbers": Case(times(2.0**-20), pairs(2.0**-62, 3 * 2.0**-62)),
    "down to subnormal numbers of bf16": Case(times(2.0**-12), pairs(2.0**-60, 3 * 2.0**-62, dtype=BF16)),
    "down to subnormal numbers of fp16": Case(times(2.0**-10), pairs(2.0**-7, 5 * 2.0**-9, dtype=FP16)),
    "down to nothing in fp16": Case(times(2.0**-12), pairs(2.0**-8, 2.0**-8, dtype=FP16)),
    "down, and up again": Case(times(2.0**-30, 2.0**20), pairs(2.0**-62, 3 * 2.0**-62)),
    "up, and down again": Case(times(4.0, 0.5), masked(FP32)),
    "up, and down again, too large": Case(times(16.0, 0.25), masked(FP32)),
    "up, down and up": Case(times(4.0, 0.5, 2.0), masked(FP32, 0.0625), ("ATP105",)),
    "by 2^-130": Case(times(*[2.0**-26] * 5), pairs(2.0**60, 2.0**60), ("ATP105",)),
    "bf16, converted, then small": Case(converted(2.0**-30), pairs(2.0**-55, 2.0**-57, dtype=BF16)),
    "fp16, converted, then small": Case(converted(2.0**-30), pairs(2.0**-8, 2.0**-8, dtype=FP16)),
    "fp16, converted, then large": Case(converted(2.0**30), masked(FP16)),
    "fp16, small, then converted": Case(converted(2.0**-12, True), pairs(2.0**-8, 2.0**-8, dtype=FP16), ("ATP105",)),
    "bf16, large, then converted": Case(converted(8.0, True), masked(BF16, 0.5)),
    "bias": Case(lambda x, w, b: scattered(torch.addmm(b, x, w) * 4.0), with_bias(MOST / 2, 1.0, -MOST / 2)),
    "fp8, a large scale": Case(scaled(4.0, BF16), fp8(2.0, 2.0**126, 2.0**-100)),
    "fp8, a small scale": Case(scaled(2.0**-32, FP32), fp8(2.0, 2.0**-120, 2.0**100)),
    "fp8 to fp16, all-reduced": Case(scaled(2.0**-10, FP16, reduced), fp8(2.0, 2.0**-10, 1.0)),
    "sum": Case(of_sum(lambda p, q, r: (p + q + r) * 8.0), pairs(MOST / 4, 1.0, MOST / 4, -1.0, 3.0, 2.0)),
    "sum, all-reduced": Case(of_sum(lambda p, q: (p + q) * 4.0, reduced), pairs(MOST / 2, 1.0, MOST / 2, -1.0)),
    "sum of fp16": Case(of_sum(lambda p, q: (p - q) * 2.0**-10), pairs(2.0, 1.0, 2.0, 0.875, dtype=FP16)),
    "sum, too large in eager too": Case(of_sum(lambda p, q: (p + q) * 0.25), pairs(MOST, 1.0, MOST, 1.0)),
    "difference": Case(of_sum(lambda p, q: p - q), pairs(MOST, 0.5, MOST, -0.25)),
    "sum of unlike terms": Case(of_sum(lambda p, q: p * 2.0 - q * 0.25), pairs(MOST, 0.25, 2.0**-60, 2.0**-60)),
    "sum of unlike terms of fp16": Case(
        of_sum(lambda p, q: p * 4.0 - q * 2.0), pairs(200.0, 128.0, 300.0, 100.0, dtype=FP16)
    ),
    "sum of a halved sum": Case(of_sum(lambda p, q, r: (p + q) * 0.5 + r), pairs(MOST, 0.5, MOST, 0.25, MOST, -0.25)),
    "sum of a sum of large terms that is doubled": Case(
        of_sum(lambda p, q, r: (p + q) * 4.0 + r), pairs(MOST, 0.5, MOST, -0.5, 3.0, 2.0), ("ATP105",)
    ),
    "another term": Case(of_sum(lambda p, t: p * 2.0 + t), pairs(MOST, 0.5, others=[-MOST])),
    "another term, multiplied": Case(of_sum(lambda p, t: t * 2.0**-32 - p), pairs(2.0**-70, 2.0**-70, others=[1e-30])),
    "a sum with another term": Case(of_sum(lambda p, t: (p + t) * 4.0), pairs(MOST, 0.5, others=[-MOST / 2])),
    "results, one doubled": Case(of_results(lambda a, b: a * 2.0 + b), opposite(MOST, 0.75, 3.0, 2.0), ("F", "F")),
    "results, one halved": Case(of_results(lambda a, b: a * 0.5 - b), opposite(5.0, 7.0, 3.0, 2.0), ("F", "F")),
    "results, all halved": Case(of_results(lambda a, b: (a + b) / 2), opposite(5.0, 7.0, 3.0, 2.0), ("F", "F")),
    "rows, then columns": Case(by_tensors((ROWS, 0.125), (COLUMNS, 8.0)), pairs(MOST, 0.5)),
    "rows, then columns, too large in eager too": Case(by_tensors((ROWS, 8.0), (COLUMNS, 0.125)), pairs(MOST, 0.5)),
    "columns, then rows": Case(by_tensors((COLUMNS, 0.125), (ROWS, 8.0)), pairs(MOST, 0.5), ("ATP105",)),
    "columns, then rows, of bf16": Case(
        by_tensors((COLUMNS, 0.125), (ROWS, 8.0), dtype=BF16),
        pairs(torch.finfo(BF16).max, 0.5, dtype=BF16),
        ("ATP105",),
    ),
    "columns, then a gate": Case(gated, pairs(MOST, 0.0625)),
    "rows times columns": Case(by_tensors((ROWS, 8.0), (COLUMNS, 0.125), outer=True), pairs(MOST, 0.5), ("ATP105",)),
    "a number, then rows": Case(by_tensors(((1,), 0.125), (ROWS, 8.0)), pairs(MOST, 0.5), ("ATP105",)),
    "columns, then a number": Case(by_tensors((COLUMNS, 0.125), ((1,), 8.0)), pairs(MOST, 0.5), ("ATP105",)),
    "rounded to infinity in bf16, then halved": Case(
        by_tensors((ROWS, 0.5), dtype=BF16), pairs(MOST, 1.0), ("ATP105",)
    ),
    "behind a gather": Case(lambda x, w: (gathered(x) @ w) * 2.0**-32, filled(1e-37, 1e37)),
    "behind a gather, masked": Case(lambda x, w: (gathered(x) @ w) * 2.0, masked(FP32)),
}
#: compiled by Inductor, too
COMPILED = ("small", "masked", "sum of unlike terms")


# --- on a rank -------------------------------------------------------------------------------------------------
def judge(rank: int, world_size: int) -> dict[str, tuple[tuple[str, ...], str]]:
    """Of each case, what became of its collectives, and what is wrong with its results."""
    found = {name: _judged(case, rank) for name, case in CASES.items()}
    return found | {f"{name}, compiled": _judged(CASES[name], rank, inductor=True) for name in COMPILED}


def _judged(case: Case, rank: int, inductor: bool = False) -> tuple[tuple[str, ...], str]:
    """Of a traced program, or one that Inductor compiles."""
    wanted = case.program(*case.inputs(rank))
    report, given = (_compiled if inductor else _traced)(case, rank)
    same = bool(((wanted == given) | (wanted.isnan() & given.isnan())).all()) and wanted.dtype == given.dtype
    return tuple(outcomes(report)), "" if same else f"{given} is not {wanted}"


def _traced(case: Case, rank: int) -> tuple[Report, Tensor]:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in case.inputs(rank)]
    with mode:
        module = make_fx(case.program)(*fakes)
    report = run_pass(module.graph)
    module.recompile()
    return report, module(*case.inputs(rank))


def _compiled(case: Case, rank: int) -> tuple[Report, Tensor]:
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    compiled = torch.compile(case.program, backend="asynctp", options={"strict": "off", **QUICK})
    result = compiled(*case.inputs(rank))
    return asynctp_passes.reports()[-1], result
