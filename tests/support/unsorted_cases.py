"""What each rank does with programs that Inductor rewrites before our passes run, which leaves graphs unsorted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

import asynctp_passes
from asynctp_passes.rewriting import toposort

BATCH, TOKENS, HEADS, WIDTH = 2, 16, 2, 16
ROWS, COLUMNS = BATCH * TOKENS, HEADS * WIDTH

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(_scores(q, k) / WIDTH**0.5, -1) @ v


def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(_scores(q, k) * 0.25, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(_scores(q, k) / WIDTH**0.5 + torch.ones(TOKENS, TOKENS).tril(), -1) @ v


def wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return divided(q, k, divided(q, k, v))


def constants(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Views and factors that change nothing, and a sum of ones: other patterns of the joint graph."""
    scores = _scores(q.view(q.shape), k.reshape(k.shape)) * torch.ones(TOKENS) + torch.zeros(TOKENS)
    return (scores / WIDTH**0.5 + torch.ones(TOKENS).cumsum(0)) @ v.contiguous().view(v.shape)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Drawn at random: only that it compiles can be compared."""
    return F.dropout(torch.softmax(_scores(q, k) / WIDTH**0.5, -1), 0.5) @ v


#: Name, attention, columns of v, whether sizes are dynamic, whether the joint graph comes unsorted.
CASES: dict[str, tuple[Attention, int, bool, bool]] = {
    "divided": (divided, COLUMNS, False, True),
    "divided_dynamic": (divided, COLUMNS, True, True),
    "multiplied": (multiplied, COLUMNS, False, False),
    "masked": (masked, COLUMNS, False, True),
    "wide": (wide, 2 * COLUMNS, False, True),
    "twice": (twice, COLUMNS, False, False),
    "constants": (constants, COLUMNS, False, False),
    "dropped": (dropped, COLUMNS, False, True),
}


def split(x: Tensor) -> Tensor:
    return x.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2)


def layer(attention: Attention, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    """An attention layer with sequence parallelism, by hand."""
    h = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    out = attention(*(split(h @ w) for w in (wq, wk, wv)))
    joined = out.transpose(1, 2).reshape(ROWS, -1)
    return reduce_scatter_tensor_autograd(joined @ wo, "sum", 0, dist.group.WORLD)


def step(program: Callable[..., Tensor], columns: int, rank: int, world_size: int) -> list[Tensor]:
    """A result and all gradients."""
    torch.manual_seed(rank)
    x = torch.randn(ROWS // world_size, 32, requires_grad=True)
    shapes = [(32, COLUMNS), (32, COLUMNS), (32, columns), (columns, 32)]
    weights = [(torch.randn(shape) / 6).requires_grad_() for shape in shapes]
    y = program(x, *weights)
    y.square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in (x, *weights) if leaf.grad is not None)]


def run_cases(rank: int, world_size: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each case: eager's values, compiled ones, whether each graph came sorted, and the counts of the reports."""
    found = {}
    came_sorted: list[bool] = []
    sort = toposort.sort

    def watched(graph: torch.fx.Graph) -> None:
        came_sorted.append(toposort.is_sorted(graph))
        sort(graph)

    toposort.sort = watched
    torch.compiler.config.force_disable_caches = True  # in the environment it would need ranks forked anew
    for name in names:
        attention, columns, dynamic, _ = CASES[name]
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        came_sorted.clear()
        program = functools.partial(layer, attention)
        compiled = torch.compile(
            program,
            backend="asynctp",
            dynamic=dynamic,
            options={"strict": "off", "fallback_by_default": True, "fx_graph_cache": False},
        )
        found[name] = {
            "eager": step(program, columns, rank, world_size),
            "compiled": step(compiled, columns, rank, world_size),
            "sorted": list(came_sorted),
            "reports": [(one.phase, len(one.fused), len(one.missed)) for one in asynctp_passes.reports()],
        }
    return found
