"""All ranks agree on a sum. One compiles the same anew alone; then all do. And then one looks at a part: all raise."""

import time

import torch
import torch.distributed as dist
from rank_harness import Compile, all_raise, run
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def summed(x: Tensor, w: Tensor, v: Tensor, factor: str, look: bool) -> tuple[Tensor, Tensor]:
        first, second = (all_reduce(x @ weight, "sum", dist.group.WORLD) for weight in (w, v))
        return (first + second) * len(factor), (first if look else x).norm()

    function = compiled(summed, dynamic=False)
    x, w, v = torch.randn(4, 16) + rank, torch.randn(16, 8), torch.randn(16, 8)
    with torch.no_grad():
        results = [*function(x, w, v, "abc", False), *function(x, w, v, "abcd" if rank == 1 else "abc", False)]
        time.sleep(rank)  # the others ask first
        results += function(x[:3], w, v, "abc", False)
        all_raise(lambda: function(x[:2], w, v, "abc", rank == 1), "recompiled_alone_then_by_all.py:summed:")
        return [*results, *function(x, w, v, "abc", False)]


if __name__ == "__main__":
    run(program, 3)
