"""All-reduces of which ranks use their own parts alone, on real ranks: values and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from profiles import thorough
from ranks import run_ranks
from torch import Tensor

import asynctp_passes

ROWS, WIDTH = 12, 16
Use = Callable[[Tensor, int, int], Tensor]


def own_rows(y: Tensor, rank: int, ranks: int) -> Tensor:
    count = ROWS // ranks
    return y[rank * count : (rank + 1) * count]


def own_chunk(y: Tensor, rank: int, ranks: int) -> Tensor:
    return y.view(2, ROWS // 2, WIDTH).flatten(0, 1).chunk(ranks)[rank]


def rows_of_the_next(y: Tensor, rank: int, ranks: int) -> Tensor:
    return own_rows(y, (rank + 1) % ranks, ranks)


def own_columns(y: Tensor, rank: int, ranks: int) -> Tensor:
    return y.chunk(ranks, 1)[rank].contiguous().view(-1, WIDTH)


def own_rows_on_the_first_rank(y: Tensor, rank: int, ranks: int) -> Tensor:
    return y if rank else own_rows(y, rank, ranks)


SCATTERED, KEPT = [own_rows, own_chunk], [rows_of_the_next, own_columns, own_rows_on_the_first_rank]


def trained(use: Use, rank: int, ranks: int, backend: str | None) -> tuple[list[Tensor], list[Any]]:
    """Results and gradients of a sum of matmuls and of a sum without one, and the reports."""

    def multiplied(a: Tensor, w: Tensor, bias: Tensor, v: Tensor) -> Tensor:
        return torch.relu(use(funcol.all_reduce(a @ w + bias, "sum", dist.group.WORLD), rank, ranks)) @ v

    def alone(x: Tensor) -> Tensor:
        return torch.sin(use(funcol.all_reduce(torch.relu(x), "sum", dist.group.WORLD), rank, ranks))

    def computed(a: Tensor, w: Tensor, x: Tensor) -> Tensor:
        """A residual and an activation come before the part is taken."""
        sum_ = funcol.all_reduce(a @ w, "sum", dist.group.WORLD)
        return torch.relu(use(torch.nn.functional.silu(sum_ + x), rank, ranks))

    torch.manual_seed(rank)
    shapes = ((ROWS, 8), (8, WIDTH), (WIDTH,), (WIDTH, 4), (ROWS, WIDTH))
    a, w, bias, v, x = leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    functions = (multiplied, alone, computed)
    for function in functions:  # a function of its own to ranks, which ask one another about it
        function.__code__ = function.__code__.replace(co_name=f"{function.__name__}_{use.__name__}")
    if backend is not None:
        options = {"strict": "off"}
        functions = tuple(torch.compile(one, backend=backend, options=options) for one in functions)
    results = [functions[0](a, w, bias, v), functions[1](x)]
    sum(one.square().sum() for one in results).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        results.append(functions[2](a, w, x))
    return [*results, *(leaf.grad for leaf in leaves if leaf.grad is not None)], list(asynctp_passes.reports())


def judged(rank: int, ranks: int, uses: list[Use]) -> list[tuple[bool, list[str], list[str]]]:
    """By use: whether all is eager's, what fused the sums of matmuls, and what is done without one."""
    torch._inductor.config.fallback_by_default = True  # minutes of the C++ compiler
    found = []
    for use in uses:
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        wanted, _ = trained(use, rank, ranks, None)
        got, reports = trained(use, rank, ranks, "asynctp")
        same = len(got) == len(wanted) and all(map(torch.allclose, got, wanted))
        forward = [one for one in reports if one.phase != "backward"]
        kinds = [remark.kind for report in forward for remark in report.fused]
        notes = [note.kind for report in forward for note in report.notes if note.kind == "own"]
        found.append((same, kinds, notes))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, thorough(4)])
def test_values_and_gradients(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    wanted = {use: (True, ["matmul_reduce_scatter"] * 2, ["own"]) for use in SCATTERED}
    wanted |= {use: (True, ["matmul_all_reduce"] * 2, []) for use in KEPT}
    uses = [*wanted] if ranks == 2 else [own_rows, own_rows_on_the_first_rank]
    for found in run_ranks(ranks, judged, uses, timeout_s=400):
        assert dict(zip(uses, found, strict=True)) == {use: wanted[use] for use in uses}
