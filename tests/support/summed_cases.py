"""Train a block on ranks of test_linear_sums: each column-parallel layer all-reduces its input's gradient.

That is how transformers' tensor parallelism has it, without DTensor: local weights, and autograd functions around them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import assert_close, compiled, start, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import asynctp_passes
from asynctp_passes import Report

WIDTH, HEADS = 16, 4


def all_reduced(x: Tensor, group: dist.ProcessGroup, in_place: bool) -> Tensor:
    if in_place:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x
    return funcol.all_reduce(x, "sum", group)


class Before(torch.autograd.Function):
    """In front of a column-parallel layer: the input, whose gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, in_place: bool) -> Tensor:
        ctx.how = group, in_place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return all_reduced(gradient, *ctx.how), None, None


class Behind(torch.autograd.Function):
    """Behind a row-parallel layer: the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, in_place: bool) -> Tensor:
        return all_reduced(x, group, in_place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None, None


class Block(nn.Module):
    """Attention with fewer keys and values than queries, and a gated MLP: this rank's part of each layer."""

    def __init__(self, group: dist.ProcessGroup, in_place: bool) -> None:
        super().__init__()
        self.how, self.heads = (group, in_place), HEADS // group.size()
        self.of_head = WIDTH // HEADS
        queries, keys, hidden = WIDTH // group.size(), self.of_head, 2 * WIDTH // group.size()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(WIDTH, size, bias=False) for size in (queries, keys, keys))
        self.gate, self.up = (nn.Linear(WIDTH, hidden, bias=False) for _ in range(2))
        self.o, self.down = nn.Linear(queries, WIDTH, bias=False), nn.Linear(hidden, WIDTH, bias=False)

    def column(self, layer: nn.Linear, x: Tensor) -> Tensor:
        result: Tensor = layer(Before.apply(x, *self.how))
        return result

    def row(self, layer: nn.Linear, x: Tensor) -> Tensor:
        result: Tensor = Behind.apply(layer(x), *self.how)
        return result

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (self.column(one, y).unflatten(-1, (-1, self.of_head)) for one in (self.q, self.k, self.v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.row(self.o, attended.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        result: Tensor = x + self.row(
            self.down, nn.functional.silu(self.column(self.gate, y)) * self.column(self.up, y)
        )
        return result


def block(mesh: DeviceMesh, in_place: bool, dtype: torch.dtype) -> nn.Module:
    """Another part on each rank; norms are alike."""
    torch.manual_seed(1 + mesh.get_rank())
    return Block(mesh.get_group(), in_place).to(dtype)


def _step(mesh: DeviceMesh, in_place: bool, **kwargs: Any) -> tuple[Report, ...]:
    """Compiled and eager compute the same; five input gradients are two all-reduces, and the forward's two stay two."""
    start()
    module = block(mesh, in_place, torch.float32)
    torch.manual_seed(0)
    x = torch.randn(2, 8, WIDTH).requires_grad_()
    parameters = list(module.parameters())
    ours = train(compiled(module, **kwargs), x, parameters)
    forward, backward = asynctp_passes.reports()
    assert_close(ours, train(module, x, parameters))
    assert (len(forward.fused), len(backward.fused)) == (2, 5), f"{forward}\n{backward}"
    assert not [remark for report in (forward, backward) for remark in (*report.missed, *report.others)]
    products = [len(remark.call["a_parts"]) for report in (forward, backward) for remark in report.fused if remark.call]
    assert products == [1, 1, 2, 3], products
    modules = [[remark.module for remark in report.fused] for report in (forward, backward)]
    assert modules == [["o", "down"], ["up", "gate", "v", "k", "q"]], modules
    return forward, backward


def case_functional(mesh: DeviceMesh) -> tuple[Report, ...]:
    return _step(mesh, in_place=False)


def case_in_place(mesh: DeviceMesh) -> tuple[Report, ...]:
    return _step(mesh, in_place=True)


def case_in_bfloat16(mesh: DeviceMesh) -> tuple[Report, ...]:
    """As near to fp64 as with plain Inductor, to a tenth: most is rounded elsewhere."""
    start()
    module = block(mesh, False, torch.bfloat16)
    torch.manual_seed(0)
    x = torch.randn(8, 64, WIDTH).bfloat16().requires_grad_()
    ours = train(compiled(module), x, list(module.parameters()))
    theirs = train(compiled(module, "inductor"), x, list(module.parameters()))
    exact = train(module.double(), x.detach().double().requires_grad_(), list(module.parameters()))
    errors = [
        sum(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)) for found in (ours, theirs)
    ]
    assert 0 < errors[0] < 1.1 * errors[1] < 0.02 * len(exact), errors
    return asynctp_passes.reports()


def case_with_real_code(mesh: DeviceMesh) -> tuple[Report, ...]:
    return _step(mesh, in_place=False, options={"strict": "all"})
