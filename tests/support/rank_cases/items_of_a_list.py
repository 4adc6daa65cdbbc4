"""Two tensors of one size go in one call; each rank has a matmul next to another of them, or to none."""

import torch
import torch.distributed as dist
from rank_harness import Compile, run
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    group = dist.group.WORLD

    def gathered(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a, b = all_gather_into_tensor_coalesced([x, y], group)
        return (a @ w, b.sum(0)) if rank == 0 else (a.sum(0), b @ w)

    def multiplied_by_one(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a, b = all_gather_into_tensor_coalesced([x, y], group)
        return (a.sum(0), b @ w) if rank == 0 else (a.sum(0), b.sum(0))

    def scattered(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        p, q = (x @ w, y) if rank == 0 else (x, y @ w)
        a, b = reduce_scatter_tensor_coalesced([p, q], "sum", [0, 0], group)
        return a, b

    def reduced(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        p, q = (x, y @ w) if rank == 0 else (x, y)
        a, b = all_reduce_coalesced([p, q], "sum", group)
        return a, b

    w = torch.randn(8, 8)
    torch.manual_seed(1 + rank)
    found: list[Tensor] = []
    with torch.no_grad():
        for layer in (gathered, multiplied_by_one, scattered, reduced):
            found += compiled(layer)(torch.randn(4, 8), torch.randn(4, 8), w)
    return found


if __name__ == "__main__":
    run(program)
