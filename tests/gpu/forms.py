"""Compiled programs of several forms that ranks run alike, then unlike: right values, or an error on every rank.

    torchrun --nproc_per_node=2 tests/gpu/forms.py [PROGRAMS [FIRST]]        (50, from 0 on, by default)

A program makes the same collectives in every form: sums of products, maxima, and gathers with a matmul behind. What a
form decides is what is done with the results: which of them are only added up, which are looked at, and whether a
gathered tensor is quantized. So asynctp sends one sum for several in one form, and not in another. All ranks compile
and run all forms alike. Then each draws its own form for each call. Values are those of the program on the CPU, or NaN
where an error follows: at the next call, on every rank, which names a compiled function. Rank 0 prints a JSON line for
each program, and the totals. Ranks may share GPUs (`launched`); with TRITON_INTERPRET=1 they are processes on CPUs.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from asynctp_kernels import SymmetricMemoryError, release
from asynctp_kernels.cuda.runtime.memory import existing_memory
from launched import device, end, limit, show, start
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

import asynctp_passes

SIZE = 64
UNLIKE_CALLS = 4
FP8 = torch.float8_e4m3fn
CLOSE = 0.05
OPTIONS = {"strict": "off", "fallback_by_default": not torch.cuda.is_available()}


@dataclass(frozen=True)
class Form:
    """What a form does with a program's results.

    Attributes:
        added: How many of the sums, from the first on, are used by their sum only.
        looks: It returns a number of the first maximum by itself.
        quantizes: The gathered tensor is quantized before its matmul.
        keeps: The gathered tensor is used by itself, too.
    """

    added: int
    looks: bool
    quantizes: bool
    keeps: bool


@dataclass(frozen=True)
class Program:
    """The collectives of a program, and its forms."""

    sums: int
    maxima: int
    gathers: int
    forms: tuple[Form, ...]


def drawn(seed: int) -> Program:
    """A program that a seed decides; the same on all ranks."""
    choose = random.Random(seed)
    sums, maxima, gathers = choose.randint(1, 4), choose.randint(0, 2), choose.randint(0, 2)
    forms = {
        Form(choose.randint(0, sums), *(choose.random() < 0.5 for _ in range(3))) for _ in range(choose.randint(2, 4))
    }
    return Program(sums, maxima, gathers, tuple(sorted(forms, key=repr)))


def run(program: Program, form: Form, x: Tensor, ws: Sequence[Tensor], reduced: Any, gathered: Any) -> list[Tensor]:
    """The program in one form, by these collectives."""
    out: list[Tensor] = []
    parts = [reduced(x @ ws[index], "sum") for index in range(program.sums)]
    if form.added > 1:
        total = parts[0]
        for part in parts[1 : form.added]:
            total = total + part
        parts = [total, *parts[form.added :]]
    out += parts
    largest = [reduced((x * (index + 1)).abs().amax(), "max") for index in range(program.maxima)]
    for index in range(program.gathers):
        whole = gathered(x + index)
        if form.quantizes:
            small = (whole * 0.5).clamp(-448, 448).to(FP8)
            out.append(multiplied(small, ws[index]))
        else:
            out.append(whole @ ws[index])
        if form.keeps:
            out.append(whole.sum(1))
    if form.looks:
        out += largest[:1]
    return [*out, *(one * 1.0 for one in largest)]


def multiplied(a: Tensor, w: Tensor) -> Tensor:
    """An fp8 matmul, on a CPU by its dequantized operands."""
    b = w.clamp(-448, 448).to(FP8)
    if not a.is_cuda:
        return a.to(w.dtype) @ b.to(w.dtype)
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t().contiguous().t(), one, one, out_dtype=torch.bfloat16)


def reference(program: Program, form: Form, x: Tensor, ws: Sequence[Tensor]) -> list[Tensor]:
    """The values on the CPU, in fp32, by gloo."""

    def reduced(value: Tensor, op: str) -> Tensor:
        done = value.clone()
        dist.all_reduce(done, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=CPU[0])
        return done

    def gathered(value: Tensor) -> Tensor:
        found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(found, value, group=CPU[0])
        return torch.cat(found).to(torch.bfloat16).float()

    return run(program, form, x.cpu().float(), [w.cpu().float() for w in ws], reduced, gathered)


CPU: list[Any] = []


def judged(program: Program, seed: int) -> Counter[str]:
    """Run a program's forms alike, then unlike; what came of it on this rank."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    own, common = random.Random(1000 * seed + rank), torch.Generator().manual_seed(seed)
    ws = [torch.randn(SIZE, SIZE, generator=common).bfloat16().to(device()) / 8 for _ in range(4)]

    def step(x: Tensor, form: int) -> list[Tensor]:
        return run(
            program,
            program.forms[form],
            x,
            ws,
            lambda value, op: all_reduce(value, op, group),
            lambda value: all_gather_tensor(value, 0, group),
        )

    torch._dynamo.reset()
    step.__code__ = step.__code__.replace(co_name=f"step_{seed}")
    compiled = torch.compile(step, backend="asynctp", dynamic=False, options=OPTIONS)
    found: Counter[str] = Counter()
    inputs = torch.Generator().manual_seed(7 * seed + rank)

    def call(form: int) -> str:
        """Whether a call is right, NaN where it is not, wrong, or raises."""
        x = torch.randn(SIZE, SIZE, generator=inputs).bfloat16().to(device())
        want = reference(program, program.forms[form], x, ws)  # of any form: the same collectives
        try:
            got = compiled(x, form)
            if x.is_cuda:
                torch.cuda.synchronize()
        except (SymmetricMemoryError, asynctp_passes.DisagreementError) as error:
            return str(error)
        return verdict(got, want)

    with torch.no_grad():
        for form in range(len(program.forms)):
            for _ in range(2):
                found["alike " + together(call(form))] += 1
        for _ in range(UNLIKE_CALLS):
            form = own.randrange(len(program.forms))
            forms = [0] * dist.get_world_size()
            dist.all_gather_object(forms, form, group=CPU[0])
            kind = "unlike" if len(set(forms)) > 1 else "alike"
            outcome = call(form)
            memory = existing_memory(group)
            until = time.monotonic() + 8
            while "nan" in outcome and memory is not None and memory.failure is None and time.monotonic() < until:
                time.sleep(0.1)
            outcomes = ["" for _ in forms]
            dist.all_gather_object(outcomes, outcome, group=CPU[0])
            if all(one == "right" for one in outcomes):
                found[f"{kind} right"] += 1
                continue
            found[f"{kind} {after(outcomes, lambda: call(0))}"] += 1
            dist.barrier(group=CPU[0])
            release(group)
            dist.barrier(group=CPU[0])
    return found


def verdict(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Whether values are right, or NaN wherever they are not, or wrong."""
    found = "right"
    for a, b in zip(got, want, strict=True):
        a, largest = a.cpu().float(), b.abs().max()
        wrong = (a - b).abs() > CLOSE * largest.clamp(min=1)
        if bool(wrong.any()) and not bool(a.isnan().any()):
            return f"WRONG by {float((a - b).abs().max()):.3g} of {float(largest):.3g}"
        if bool(wrong.any()) or bool(a.isnan().any()):
            found = "nan"
    return found


def together(outcome: str) -> str:
    """What all ranks found: the worst of it."""
    outcomes = [""] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=CPU[0])
    return next((one for one in outcomes if one != "right"), "right")


def after(outcomes: Sequence[str], again: Callable[[], str]) -> str:
    """The outcome of an unlike call, of which not all ranks are right: the next call must raise on every rank."""
    if wrong := [one for one in outcomes if one.startswith("WRONG")]:
        return wrong[0]
    errors = [""] * len(outcomes)
    dist.all_gather_object(errors, again(), group=CPU[0])
    if not all("step_" in one and "deviate=False" in one for one in errors):
        return f"SILENT {[one[:160] for one in errors]}"
    return "error on every rank"


def main() -> None:
    start(1700)
    CPU.append(dist.new_group(backend="gloo"))
    totals: Counter[str] = Counter()
    given = [int(one) for one in sys.argv[1:3]]
    count, first = [*given, *(50, 0)[len(given) :]]
    for seed in range(first, first + count):
        limit(240)
        found = judged(drawn(seed), seed)
        totals += found
        show({"program": seed, **found})
    show({"totals": dict(totals), "ranks": dist.get_world_size()})
    bad = [one for one in totals if not one.endswith(("right", "error on every rank"))]
    bad += [one for one in totals if one.startswith("alike error")]
    end()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
