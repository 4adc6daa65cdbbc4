"""Two groups have the same collectives, so that keys in their stores are the same. Ranks agree on a sum in each.

One rank compiles alone, all compile anew, and one looks at a part of the sum of one group: all raise there.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from rank_harness import PATIENCE, Compile, all_raise, run
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    timeout = timedelta(seconds=16 * PATIENCE)
    groups = [dist.new_group(list(range(ranks)), timeout=timeout) for _ in range(2)]

    def summed(x: Tensor, w: Tensor, factor: str, look: int | None) -> tuple[Tensor, Tensor]:
        seen = x
        for at, group in enumerate(groups):
            parts = [all_reduce(one @ w, "sum", group) for one in (x, x + 1)]
            seen = parts[1] if at == look else seen
            x = parts[0] + parts[1]
        return x * len(factor), seen.norm()

    results: list[Tensor] = []
    with torch.no_grad():
        for look in (0, 1):
            function = compiled(summed, dynamic=False)
            x, w = torch.randn(6, 16) + rank, torch.randn(16, 16) / 16
            results += function(x, w, "abc", None)
            results += function(x, w, "abcd" if rank == 0 else "abc", None)
            results += function(x[:4], w, "abc", None)
            seen = look if rank == 0 else None
            all_raise(lambda: function(x[:2], w, "abc", seen), "two_groups_with_alike_sums.py:summed:")  # noqa: B023
            torch._dynamo.reset()
    return results


if __name__ == "__main__":
    run(program)
