"""All ranks agree on a sum. One rank compiles that function anew alone. Then all do, and it looks at a part."""

import time

import torch
import torch.distributed as dist
from rank_harness import Compile, run
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
        time.sleep(rank)  # the others vote first, and have counted one graph fewer
        return [*results, *function(x[:2], w, v, "abc", rank == 1)]


if __name__ == "__main__":
    run(program, 3)
