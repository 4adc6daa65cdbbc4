"""The backward of one rank needs the gathered tensor, that of the other a sum of it, which its forward can keep."""

import torch
import torch.distributed as dist
from rank_harness import Compile, run
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def layer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        full = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        y = full @ w
        return y, y.sum() if rank == 0 else full.sum(1).exp().sum()

    torch.manual_seed(1 + rank)
    x = (torch.randn(8, 64) * 0.1).requires_grad_()
    w = torch.randn(64, 8, requires_grad=rank == 0)
    y, z = compiled(layer, options={"rematerialize": "always", "strict": "off"})(x, w)
    (y.square().sum() + z).backward()
    return [y, z, x.grad]


if __name__ == "__main__":
    run(program)
