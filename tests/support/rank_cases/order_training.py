"""Training: rank 0 multiplies the first gathered tensor first, other ranks the second. Gathers are in one order."""

import torch
import torch.distributed as dist
from rank_harness import fused, run
from torch.distributed._functional_collectives import all_gather_tensor_autograd


def program(rank, ranks, compiled):
    def heads(x, y, w1, w2):
        a = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        b = all_gather_tensor_autograd(y, 0, dist.group.WORLD)
        if rank == 0:
            p, q = a @ w1, b @ w2
        else:
            q = b @ w2
            p = a @ w1
        return p, q

    w1, w2 = torch.randn(16, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    torch.manual_seed(1 + rank)
    x, y = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    p, q = compiled(heads)(x, y, w1, w2)
    (p.square().sum() + q.square().sum() / 2).backward()
    return [p, q, x.grad, y.grad, w1.grad, w2.grad]


if __name__ == "__main__":
    run(program, judge=fused(4))
