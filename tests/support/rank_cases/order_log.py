"""Rank 0 also logs a statistic of its own second product. All ranks have the same collectives in the same order."""

import torch
import torch.distributed as dist
from rank_harness import fused, run
from torch.distributed._functional_collectives import all_gather_tensor


def program(rank, ranks, compiled):
    def heads(x, y, w1, w2):
        a = all_gather_tensor(x, 0, dist.group.WORLD)
        b = all_gather_tensor(y, 0, dist.group.WORLD)
        p, q = a @ w1, b @ w2
        if rank == 0:
            return (q @ q.t()).trace(), p, q  # for the log
        return p, q

    w1, w2 = torch.randn(32, 64), torch.randn(32, 64)
    torch.manual_seed(1 + rank)
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    with torch.no_grad():
        return compiled(heads)(x, y, w1, w2)[-2:]


if __name__ == "__main__":
    run(program, judge=fused(2))
