"""All ranks agree on a sum. Then one rank runs another function, compiles alone, or breaks a graph of another class."""

import functools

import torch
import torch.distributed as dist
from rank_harness import Compile, run
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce


def reduced(x: Tensor) -> Tensor:
    return all_reduce(x, "sum", dist.group.WORLD)


class Broken(torch.nn.Module):
    """Has a `forward` in the same file as `Summed`, and no sum."""

    def forward(self, x: Tensor, w: Tensor, breaks: bool) -> tuple[Tensor, Tensor]:
        first = reduced(x @ w)
        if breaks:
            torch._dynamo.graph_break()
        return first, reduced(first.sin() @ w.t())


class Summed(torch.nn.Module):
    def forward(self, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return reduced(x @ w) + reduced(x @ v)


def broken(x: Tensor, w: Tensor, breaks: bool) -> tuple[Tensor, Tensor]:
    first = reduced(x @ w)
    if breaks:
        torch._dynamo.graph_break()
    return first, reduced(first.cos() @ w.t())


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def logged(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        total = reduced(x @ w) + reduced(x @ v)
        return total, total.norm()

    def recompiled(x: Tensor, w: Tensor, v: Tensor, factor: str, look: bool) -> tuple[Tensor, Tensor]:
        first, second = reduced(x @ w), reduced(x @ v)
        return (first + second) * len(factor), (first if look else x).norm()

    summed, log = compiled(Summed()), compiled(logged)
    alone = compiled(recompiled, dynamic=False)
    x, w, v = torch.randn(4, 16) + rank, torch.randn(16, 8), torch.randn(16, 8)
    with torch.no_grad():
        return [
            summed(x, w, v),
            log(x, w, v)[0] if rank == 0 else summed(x, w, v),
            *compiled(Broken())(x, w, rank == 0),
            compiled(functools.partial(Summed(), v=v))(x, w),
            *compiled(functools.partial(broken, w=w))(x, breaks=rank == 0),
            *alone(x, w, v, "abc", False),
            *alone(x, w, v, "abcd" if rank else "abc", False),
            *alone(x, w, v, "abc", True),
        ]


if __name__ == "__main__":
    run(program)
