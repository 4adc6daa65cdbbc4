"""Compiled programs of two ranks that make the same collectives and use them in unlike ways, run by the CUDA path.

Each program runs eager first: that is right. The kernels are interpreted, and both ranks run all programs in a row, so
that what one leaves behind meets the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from internal_state import forget_internal_errors
from ranks import run_ranks
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    all_reduce_coalesced,
    reduce_scatter_tensor,
)

RANKS = 2
Layer = Callable[..., Any]


def gathered(x: Tensor) -> Tensor:
    return all_gather_tensor(x, 0, dist.group.WORLD)


def scattered(x: Tensor) -> Tensor:
    return reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


def metric_of_the_gathered(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = gathered(x)
        y = whole @ w
        return (y, whole.float().square().mean()) if rank == 0 else (y, y.sum())

    return layer, [torch.randn(16, 32).bfloat16(), torch.randn(32, 32).bfloat16()]


def residual_in_fp32(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        product = (x @ w).float()
        return scattered(product + residual if rank == 0 else product)

    return layer, [torch.randn(16, 32).bfloat16(), torch.randn(32, 32).bfloat16(), torch.randn(16, 32)]


def head_on_one_rank(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return gathered(x) @ w if rank == 0 else gathered(x) * 1.0

    return layer, [torch.randn(4, 16), torch.randn(16, 32)]


def product_reduced_on_one_rank(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(x @ w if rank == 0 else x[:, :8] * 2, "sum", dist.group.WORLD)

    return layer, [torch.randn(4, 16), torch.randn(16, 8)]


def own_shard_first(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        pieces = gathered(x).chunk(RANKS)
        return torch.cat([pieces[(rank + step) % RANKS] for step in range(RANKS)]) @ w

    return layer, [torch.randn(4, 16), torch.randn(16, 32)]


def rows_rearranged_on_one_rank(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        whole = gathered(x)
        return (whole.view(RANKS, 2, 3, 16).transpose(1, 2).reshape(-1, 16) if rank == 1 else whole) @ w

    return layer, [torch.randn(6, 16), torch.randn(16, 32)]


def other_factors(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return scattered((x @ w) * (2.0 if rank == 0 else 0.5))

    return layer, [torch.randn(4, 16), torch.randn(16, 16)]


def dynamic_on_one_rank(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return gathered(x) @ w, gathered(y).cumsum(0)

    tensors = [torch.randn(16, 32), torch.randn(16, 32), torch.randn(32, 64)]
    if rank == 1:
        for each in tensors[:2]:
            torch._dynamo.mark_dynamic(each, 0)
    return layer, tensors


def other_columns(rank: int) -> tuple[Layer, list[Tensor]]:
    """A vocabulary that the ranks do not divide: each has a share of its own, and chooses for that."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return gathered(x) @ w

    return layer, [torch.randn(12, 32).bfloat16(), torch.randn(32, 17 - rank).bfloat16()]


def statistic_of_the_second_product(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        a, b = gathered(x), gathered(y)
        p, q = a @ w, b @ v
        return ((q @ q.t()).trace(), p, q) if rank == 0 else (p, q)

    return layer, [torch.randn(8, 32), torch.randn(8, 32), torch.randn(32, 64), torch.randn(32, 64)]


def parameter_on_one_rank(rank: int) -> tuple[Layer, list[Tensor]]:
    """Where the gathered tensor is a weight, it seems to be one of data parallelism."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return x @ gathered(w) if rank == 0 else gathered(w) * 2

    return layer, [torch.randn(4, 16), torch.randn(8, 16)]


def parameter_on_all_ranks(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return x @ gathered(w)

    return layer, [torch.randn(4 + rank, 16), torch.randn(8, 16)]


def transposed_and_dynamic_on_one_rank(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor) -> Tensor:
        return all_reduce(x.t(), "sum", dist.group.WORLD) * 2

    x = torch.randn(6, 16)
    if rank == 1:
        torch._dynamo.mark_dynamic(x, 0)
    return layer, [x]


def scaled_by_maxima(rank: int) -> tuple[Layer, list[Tensor]]:
    """They become one all-reduce on both ranks, after a list of them that becomes two."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        listed = all_reduce_coalesced([x.abs(), w.abs()], "max", dist.group.WORLD)
        largest, least = (all_reduce(value.abs().max(), "max", dist.group.WORLD) for value in (x, w))
        product = (x / largest) @ (w / least)
        return product + listed[0].sum() + (listed[1].sum() if rank == 0 else 1.0)

    return layer, [torch.randn(4, 16), torch.randn(16, 8)]


def asynctp_fails_on_one_rank(rank: int) -> tuple[Layer, list[Tensor]]:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return gathered(x) @ w

    return layer, [torch.randn(4, 16), torch.randn(16, 32)]


PROGRAMS: dict[Callable[[int], tuple[Layer, list[Tensor]]], int] = {
    metric_of_the_gathered: 2,
    residual_in_fp32: 2,
    head_on_one_rank: 1,
    product_reduced_on_one_rank: 1,
    own_shard_first: 1,
    rows_rearranged_on_one_rank: 2,
    other_factors: 2,
    dynamic_on_one_rank: 2,
    other_columns: 2,
    statistic_of_the_second_product: 2,
    parameter_on_one_rank: 0,
    parameter_on_all_ranks: 0,
    transposed_and_dynamic_on_one_rank: 0,
    scaled_by_maxima: 0,
    asynctp_fails_on_one_rank: 1,
}
"""How many ranks fuse a chain."""


def _differences(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    """By program: the largest error of a result, as a part of the largest value, and how many chains were fused."""
    import asynctp_passes
    from asynctp_passes.planning import plan

    torch._inductor.config.fallback_by_default = True  # minutes of the C++ compiler
    found: dict[str, tuple[float, int]] = {}
    for number, program in enumerate(PROGRAMS):
        torch._dynamo.reset()
        torch.manual_seed(10 * number)
        _, shared = program(rank)
        torch.manual_seed(10 * number + 1 + rank)
        layer, own = program(rank)
        tensors = [own[0], *shared[1:]] if program is not other_columns else own
        asynctp_passes.clear_reports()
        fails = program is asynctp_fails_on_one_rank and rank == 0
        fault = mock.patch.object(plan, "decide_graph", side_effect=ValueError) if fails else nullcontext()
        with torch.no_grad(), fault:
            want = layer(*tensors)
            compiled = torch.compile(layer, backend="asynctp", options={"strict": "off"})
            got = [compiled(*tensors) for _ in range(2)][-1]
        pairs = zip(*((each,) if isinstance(each, Tensor) else each for each in (want, got)), strict=True)
        errors = [float((a.double() - b.double()).abs().max() / a.double().abs().max()) for a, b in pairs]
        fused = sum(len(report.fused) for report in asynctp_passes.reports())
        found[program.__name__] = (max(errors), fused)
        assert len(forget_internal_errors()) == fails
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[float, int]]]:
    settings = {"TRITON_INTERPRET": "1", "ASYNCTP_CPU_IMPLEMENTATION": "interpreted", "ASYNCTP_TIMEOUT_S": "90"}
    with mock.patch.dict(os.environ, {**settings, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}):
        return run_ranks(RANKS, _differences, timeout_s=300)


@pytest.mark.ranks
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_results_are_eagers(
    outcomes: list[dict[str, tuple[float, int]]], program: Callable[[int], tuple[Layer, list[Tensor]]]
) -> None:
    errors, fused = zip(*(outcome[program.__name__] for outcome in outcomes), strict=True)
    assert max(errors) < 2e-2
    assert sum(count > 0 for count in fused) == PROGRAMS[program]
