"""All ranks sum two reductions in one. One rank's graph breaks in between: all raise. In other functions it may."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from rank_harness import Compile, all_raise, run
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def reduced(x: Tensor) -> Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)

    def summed(x: Tensor, w: Tensor, v: Tensor, breaks: bool) -> Tensor:
        first = reduced(x @ w)
        if breaks:
            torch._dynamo.graph_break()
        return first + reduced(x @ v)

    def one(x: Tensor, w: Tensor) -> Tensor:
        return reduced(x @ w)

    def broken_into_known_graphs(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        first = reduced(x @ w)
        if rank == 0:
            torch._dynamo.graph_break()
        return (first + reduced(x @ v)) * 2

    def four(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first, second = reduced(x @ w), reduced(x @ v)
        if rank == 1:
            torch._dynamo.graph_break()
        return first, second, reduced(x @ (w + 1)), reduced(x @ (v + 1))

    def looked_at(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first, second = reduced(x @ w), reduced(x @ v)
        return first, first + second

    def run_all(*programs: Callable[..., Tensor | tuple[Tensor, ...]]) -> list[Tensor]:
        found: list[Tensor] = []
        for function in programs:
            done = function(x, w, v)
            found += [done] if isinstance(done, Tensor) else done
        return found

    x, w, v = torch.randn(4, 16) + rank, torch.randn(16, 8), torch.randn(16, 8)
    static = compiled(summed, dynamic=False)
    free = compiled(summed, options={"deviate": False})
    with torch.no_grad():
        whole = [static(x, w, v, False), compiled(one)(x, w)]
        all_raise(lambda: static(x[:2], w, v, rank == 0), "graph_breaks_on_one_rank.py:summed:")
        later = run_all(*map(compiled, (broken_into_known_graphs, four, looked_at)))
        torch._dynamo.reset()
        anew_on_one = [free(x, w, v, False), free(x, w, v, rank == 0)]
        return [*whole, *later, *anew_on_one]


if __name__ == "__main__":
    run(program)
