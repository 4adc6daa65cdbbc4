"""Compiled programs whose small all-reduces become one, on four real ranks."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from interpreter import interpreter_fault
from ranks import run_ranks
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import asynctp_passes
from asynctp_passes.planning.legality import SMALL_BYTES


# --- on ranks ----------------------------------------------------------------------------------------------
class Scaled(torch.autograd.Function):
    """x over its amax; in backward the gradient over its own: what a quantization does to both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x / funcol.all_reduce(x.abs().max().double(), "max", group).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad / funcol.all_reduce(grad.abs().max().double(), "max", ctx.group).float(), None


def layer(x: Tensor, w: Tensor, v: Tensor, group: str) -> Tensor:
    """The gradients of both products' operands are scaled too, so there are independent ones in backward."""
    a, b, c = (Scaled.apply(value, group) for value in (x, w, v))
    return torch.relu(a @ b) + torch.relu(a @ c)


def two_layers(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Two layers over different groups: forward, forward, backward, backward; with and without bucketing."""
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    rows, columns = (
        next(pairs[ranks].group_name for ranks in kind if rank in ranks)
        for kind in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    )
    outcomes = []
    for bucket in (True, False):
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        program = torch.compile(layer, backend="asynctp", fullgraph=True, options={"skip": () if bucket else "bucket"})
        torch.manual_seed(rank)
        tensors = [[torch.randn(8, 8, requires_grad=True) for _ in range(3)] for _ in range(2)]
        outs = [program(*values, group) for values, group in zip(tensors, (rows, columns), strict=True)]
        for out in outs:
            out.square().sum().backward()
        values = [*outs, *(tensor.grad for values in tensors for tensor in values)]
        outcomes.append({"values": [value.detach() for value in values], "reports": asynctp_passes.reports()})
    outcomes.append({"groups": (rows, columns)})
    return outcomes


def limited(rank: int, world_size: int) -> tuple[bool, list[int], list[str]]:
    """Two maxima fit into one all-reduce, and the third does not: results are eager's; bytes, and the ops that run."""
    torch._inductor.config.fallback_by_default = True  # minutes of the C++ compiler
    torch.manual_seed(rank)
    group, sizes = dist.group.WORLD, (3, SMALL_BYTES // 4 - 3, 2)

    def program(*values: Tensor) -> list[Tensor]:
        return [funcol.all_reduce(value.abs(), "max", group) for value in values]

    values = [torch.randn(size) for size in sizes]
    values[0][rank] = torch.nan  # gloo lets a NaN go or stay, by the order of ranks
    compiled = torch.compile(program, backend="asynctp", fullgraph=True)
    found, (code,) = run_and_get_code(compiled, *values)
    (report,) = asynctp_passes.reports()
    same = all(torch.equal(a, b) for a, b in zip(found[1:], program(*values)[1:], strict=True))
    ran = re.findall(r"= torch\.ops\.(\w+\.all_reduce)", code)
    same &= ran[0].startswith("_c10d") or not found[0].isnan().any().item()
    return same, [entry.bytes for entry in report.buckets], ran


@pytest.mark.ranks
@pytest.mark.parametrize("implementation", ["reference", "interpreted"])
def test_a_bucket_has_a_limit_and_goes_as_the_groups_collectives_do(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = implementation == "interpreted"
    if own:
        if fault := interpreter_fault():
            pytest.skip(fault)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", implementation)
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "90")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    op = "asynctp.all_reduce" if own else "_c10d_functional.all_reduce"
    assert run_ranks(2, limited) == [(True, [SMALL_BYTES], [op, op])] * 2


@pytest.mark.ranks
@pytest.mark.thorough
def test_two_groups_forward_forward_backward_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for buckets, plain, groups in run_ranks(4, two_layers, timeout_s=600):
        assert all(torch.equal(a, b) for a, b in zip(buckets["values"], plain["values"], strict=True))
        sets = [
            (report.phase, entry.group, len(entry.collectives))
            for report in buckets["reports"]
            for entry in report.buckets
        ]
        rows, columns = groups["groups"]
        assert sorted(sets) == sorted(
            [("forward", rows, 3), ("forward", columns, 3), ("backward", rows, 3), ("backward", columns, 3)]
        )
        assert not any(report.buckets for report in plain["reports"])


# --- ranks whose computation differs ------------------------------------------------------------------------
def _swapped(rank: int, group: Any, a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """Ranks need the first maximum and the first minimum in another order, by products of their own."""
    largest, least = (funcol.all_reduce(*each, group) for each in ((a[:4], "max"), (b[:4], "min")))
    product = x @ w
    total = funcol.all_reduce(product.sum(0), "sum", group)
    of_largest, of_least = (x * largest[0]) @ w, (x * least[0]) @ w
    both = of_least * of_largest if rank else of_largest * of_least
    both = funcol.all_reduce(both.sum(0), "sum", group)
    then = (funcol.all_reduce(*each, group) for each in ((product[0, :4], "max"), (product[0, 4:], "min")))
    return [largest, least, total, both, *then]


def _before_late(rank: int, group: Any, a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """A gather comes late; the last rank multiplies before it, where it gathered in the program."""
    largest, product = funcol.all_reduce(a, "max", group), x @ b.view(8, 32)
    total = funcol.all_reduce(product.sum(0), "sum", group)
    shard = x * largest[0]
    whole = funcol.all_gather_tensor(shard @ w if rank else shard, 0, group)
    weight = funcol.all_reduce(w * 2, "sum", group)
    out = whole @ weight
    last = funcol.all_reduce(out.sum(0), "sum", group)
    return [largest, total, out, last, funcol.all_reduce(product[0], "max", group)]


def _needed_by_late(rank: int, group: Any, a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """A gather comes late, and needs a maximum: on all ranks, which compute the same."""
    largest, product = funcol.all_reduce(a, "max", group), x @ b.view(8, 32)
    total = funcol.all_reduce(product.sum(0), "sum", group)
    whole = funcol.all_gather_tensor(x * largest[0], 0, group)
    out = whole @ funcol.all_reduce(w, "sum", group)
    return [largest, total, out, funcol.all_reduce(product[0], "max", group)]


def _found_with_late(rank: int, group: Any, a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """Only the first rank has a late gather, without which its two maxima have no place in common."""
    largest, whole = funcol.all_reduce(a[:8], "max", group), funcol.all_gather_tensor(x, 0, group)
    product = x @ w
    weight = funcol.all_reduce(product * 1.5 if rank else b.view(32, 8)[:8], "sum", group)
    total = funcol.all_reduce(((x * largest[0]) @ w).sum(0), "sum", group)
    out = torch.relu(whole) if rank else whole @ weight
    return [largest, weight, total, out, funcol.all_reduce(product[0] if rank else out[0], "max", group)]


def _two_groups(rank: int, group: Any, a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    """As the first, with maxima of two groups."""
    first, second = group
    one, other = funcol.all_reduce(a[:4], "max", first), funcol.all_reduce(b[:4], "max", second)
    product = x @ w
    total = funcol.all_reduce(product.sum(0), "sum", first)
    of_one, of_other = (x * one[0]) @ w, (x * other[0]) @ w
    both = funcol.all_reduce((of_other * of_one if rank else of_one * of_other).sum(0), "sum", first)
    last = funcol.all_reduce(product[0, :4], "max", first), funcol.all_reduce(product[0, 4:], "max", second)
    return [one, other, total, both, *last]


def unlike_ranks(rank: int, world_size: int) -> list[tuple[bool, int]]:
    """For each program whether results are eager's, and how many all-reduces became one."""
    torch._inductor.config.fallback_by_default = True  # minutes of the C++ compiler
    torch._inductor.config.reorder_for_peak_memory = False  # it moves collectives by what a rank computes (torch 2.13)
    groups = [dist.new_group(list(range(world_size)), timeout=timedelta(seconds=40)) for _ in range(2)]
    outcomes = []
    for program in (_swapped, _before_late, _needed_by_late, _found_with_late, _two_groups):
        asynctp_passes.clear_reports()
        torch.manual_seed(rank)
        values = [torch.randn(32), torch.randn(256), torch.randn(8, 8), torch.randn(8, 8)]
        group = tuple(groups) if program is _two_groups else groups[0]
        wanted = program(rank, group, *values)
        compiled = torch.compile(program, backend="asynctp", fullgraph=True, options={"strict": "off"})
        found = compiled(rank, group, *values)
        (report,) = asynctp_passes.reports()
        same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(found, wanted, strict=True))
        outcomes.append((same, sum(len(entry.collectives) for entry in report.buckets)))
    return outcomes


@pytest.mark.ranks
def test_ranks_make_buckets_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank makes one that a peer makes elsewhere among the collectives."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    assert run_ranks(2, unlike_ranks) == [[(True, 0), (True, 0), (True, 2), (True, 0), (True, 0)]] * 2
