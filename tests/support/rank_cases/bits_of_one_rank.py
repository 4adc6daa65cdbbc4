"""One rank sees the bits of what it gathers as integers before it converts them: it sends something else."""

import torch
import torch.distributed as dist
from rank_harness import Compile, run
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor


def program(rank: int, ranks: int, compiled: Compile) -> Tensor:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        whole = all_gather_tensor(x, 0, dist.group.WORLD)
        return (whole.view(torch.int32) if rank == 0 else whole).to(torch.bfloat16) @ weight

    weight = torch.randn(16, 8).bfloat16()
    torch.manual_seed(1 + rank)
    x = torch.randn(4, 16)
    with torch.no_grad():
        return compiled(layer)(x, weight)


if __name__ == "__main__":
    run(program)
