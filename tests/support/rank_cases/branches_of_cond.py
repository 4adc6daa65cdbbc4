"""One graph with two branches: in one of them ranks send a single sum. Ranks that take unlike branches raise."""

import torch
import torch.distributed as dist
from rank_harness import Compile, all_raise, run
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def parts(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        return [all_reduce(x @ weight, "sum", dist.group.WORLD) for weight in (w, v)]

    def summed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        one, other = parts(x, w, v)
        return one + other

    def apart(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        one, other = parts(x, w, v)
        return one * 2 + other

    def branching(x: Tensor, w: Tensor, v: Tensor, at: Tensor) -> Tensor:
        result: Tensor = torch.cond(at.sum() > 0, summed, apart, (x, w, v))
        return result

    def right(x: Tensor, w: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return (summed if at.sum() > 0 else apart)(x, w, v)

    w, v = torch.randn(16, 8), torch.randn(16, 8)
    torch.manual_seed(1 + rank)
    x, one = torch.randn(4, 16), torch.ones(1)
    function = compiled(branching, dynamic=False)
    step = right if function is branching else function  # torch.cond would compile its branches by itself
    with torch.no_grad():
        results = [step(x, w, v, one), step(x, w, v, -one), step(x, w, v, one)]
        all_raise(lambda: step(x, w, v, one if rank else -one), "branching")
        return [*results, step(x, w, v, -one), step(x, w, v, one)]


if __name__ == "__main__":
    run(program)
