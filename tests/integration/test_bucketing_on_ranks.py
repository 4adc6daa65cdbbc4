"""Compiled programs whose small all-reduces become one, on four real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import run_ranks
from torch import Tensor

import asynctp_passes


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
        program = torch.compile(layer, backend="asynctp", fullgraph=True, options={"bucket": bucket})
        torch.manual_seed(rank)
        tensors = [[torch.randn(8, 8, requires_grad=True) for _ in range(3)] for _ in range(2)]
        outs = [program(*values, group) for values, group in zip(tensors, (rows, columns), strict=True)]
        for out in outs:
            out.square().sum().backward()
        values = [*outs, *(tensor.grad for values in tensors for tensor in values)]
        outcomes.append({"values": [value.detach() for value in values], "reports": asynctp_passes.reports()})
    outcomes.append({"groups": (rows, columns)})
    return outcomes


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
