"""What each rank does with programs that call ops of another library, which may communicate inside, or do not.

Ranks have the same communication, and compute other things beside. Each program is run eager, then compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd, all_reduce

import asynctp_passes

__all__ = ["CASES", "run_cases"]

_ops = torch.library.Library("opaque_like", "FRAGMENT")
_ops.define("custom_sum(Tensor x) -> Tensor")
_ops.define("exchange_(Tensor(a!) x) -> ()")
_ops.define("pair(Tensor x, float factor) -> (Tensor, Tensor)")
_ops.define("count(Tensor x) -> SymInt")
_ops.define("all_reduce_stats(Tensor x) -> Tensor")
_ops.define("norm(Tensor x, Tensor weight, float eps) -> Tensor")
ops = torch.ops.opaque_like


def _sum(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def _write(x: Tensor) -> None:
    dist.all_reduce(x)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "custom_sum": (_sum, torch.empty_like),
    "exchange_": (_write, lambda x: None),
    "pair": (lambda x, factor: (_sum(x) * factor, x + 1), lambda x, factor: (torch.empty_like(x), torch.empty_like(x))),
    "count": (lambda x: int(_sum(x).abs().sum()) % 7, lambda x: torch.library.get_ctx().new_dynamic_size()),
    "all_reduce_stats": (lambda x: x * x.mean(), torch.empty_like),
    "norm": (lambda x, weight, eps: x / (x.square().mean(-1, True) + eps).sqrt() * weight,
             lambda x, weight, eps: torch.empty_like(x)),
}  # fmt: skip
for _name, (_real, _fake) in _IMPLEMENTATIONS.items():
    _ops.impl(_name, _real, "CPU")
    torch.library.register_fake(f"opaque_like::{_name}", _fake, lib=_ops)
torch.library.register_autograd(
    "opaque_like::custom_sum", lambda ctx, gradient: ops.custom_sum(gradient), setup_context=None, lib=_ops
)

Program = Callable[[int, Tensor, Tensor, Tensor], list[Tensor]]


def gather(x: Tensor) -> Tensor:
    return all_gather_tensor(x, 0, dist.group.WORLD)


def log(rank: int, product: Callable[[], Tensor]) -> list[Tensor]:
    """What the first rank computes beside."""
    return [product().norm()] if rank == 0 else []


def logged(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    a = gather(x)
    b = ops.custom_sum(y)
    return [(a + 1) * b.mean(), b, *log(rank, lambda: a @ w)]


def weight_of_the_op(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    """asynctp's own fused op would come after the op that the weight needs."""
    a = gather(x)
    b = ops.custom_sum(y)
    return [a @ b, *log(rank, lambda: b @ w)]


def weight_of_the_op_on_one_rank(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    a = gather(x)
    b = ops.custom_sum(y)
    return [a @ b if rank == 0 else (a + 1) * b.sum(), b]


def written(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    """An op without a result, which writes to its argument."""
    a = gather(x)
    z = y * 2
    ops.exchange_(z)
    total = all_reduce(z.sin(), "sum", dist.group.WORLD)
    return [(a + 1) * z.mean(), total, *log(rank, lambda: a @ w)]


def several_results(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    a = gather(x)
    first, second = ops.pair(y, 0.5)
    b = gather(x * 2)
    return [a + first.mean(), b, *log(rank, lambda: a @ w @ second)]


def number(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    a = gather(x)
    count = ops.count(y)
    b = gather(x * 2)
    return [a * count, b + 1, *log(rank, lambda: b @ w)]


def in_a_branch(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    a = gather(x)
    b = torch.cond(w.shape[0] + w[0, 0] * 0 > 0, lambda y: ops.custom_sum(y), lambda y: y + 1, (y,))
    c = gather(x * 2)
    return [(a + 1) * b.mean(), c, *log(rank, lambda: a @ w)]


def reductions(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    """A sum of two reductions would be one, which stands on the other side of the op for one of them."""
    first = all_reduce(x @ w, "sum", dist.group.WORLD)
    b = ops.custom_sum(y)
    second = all_reduce((x + 1) @ w, "sum", dist.group.WORLD)
    return [first + second if rank == 0 else first - second.relu(), b]


def small_maxima(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    """Small all-reduces would become one, and only on one rank."""
    first = all_reduce(x.amax(), "max", dist.group.WORLD)
    b = ops.custom_sum(y)
    second = all_reduce((x + b.mean()).amax() if rank else y.amax(), "max", dist.group.WORLD)
    return [first, second, b, gather(x) @ w]


def local_op(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    """An op that is called as a collective is, registered as local: on one rank only, and no fixed point."""
    a = gather(x)
    weight = ops.all_reduce_stats(w) if rank == 0 else w * w.mean()
    return [a @ weight]


def rowwise_op(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    return [ops.norm(gather(x[:7]), w[0], 1e-6) @ w]  # as many numbers as rows could be one a row


def training(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    a = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    b = ops.custom_sum(y)
    c = all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD)
    return [a @ w, (b * 2).sin(), c * b.mean(), *log(rank, lambda: c @ w)]


def trained_weight(rank: int, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    a = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    b = ops.custom_sum(y)
    return [a @ b, *log(rank, lambda: a @ w)]


CASES: dict[str, Program] = {
    case.__name__: case
    for case in (
        logged,
        weight_of_the_op,
        weight_of_the_op_on_one_rank,
        written,
        several_results,
        number,
        in_a_branch,
        reductions,
        small_maxima,
        local_op,
        rowwise_op,
        training,
        trained_weight,
    )
}
TRAINED = ("training", "trained_weight")


def _results(program: Callable[..., list[Tensor]], case: str, rank: int) -> list[Tensor]:
    """The results, and the gradients of a program that is trained."""
    torch.manual_seed(1)
    shared = torch.randn(16, 16)
    torch.manual_seed(2 + rank)
    trained = case in TRAINED
    x, y = (torch.randn(rows, 16, requires_grad=trained) for rows in (8, 16))
    w = shared.clone().requires_grad_(trained)
    with torch.set_grad_enabled(trained):
        found = program(x, y, w)
    if not trained:
        return found
    sum(one.sum() for one in found[: len(found) - (rank == 0)]).backward()  # type: ignore[union-attr]
    return [*(one.detach() for one in found), *(torch.zeros(()) if one.grad is None else one.grad for one in (x, y))]


def run_cases(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """The results of each case, eager and compiled, and the outcomes and messages of its collectives."""
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    asynctp_passes.register_local("opaque_like::all_reduce_stats")
    asynctp_passes.register_rowwise(ops.norm)
    options = {"strict": "off", "fallback_by_default": True}
    found: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        program = functools.partial(case, rank)
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        eager = _results(program, name, rank)
        dist.barrier()
        compiled = _results(torch.compile(program, backend="asynctp", options=options), name, rank)
        remarks = [remark for report in asynctp_passes.reports() for remark in report.remarks]
        told = [(remark.code or "F", remark.message) for remark in remarks]
        found[name] = {"eager": eager, "compiled": compiled, "told": told}
        dist.barrier()
    return found
