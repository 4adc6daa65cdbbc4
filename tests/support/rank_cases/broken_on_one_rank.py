"""All ranks gather bf16 instead of fp32. In the next program one rank breaks the graph after that gather."""

import os

import torch
import torch.distributed as dist
from rank_harness import Compile, run
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

os.environ["ASYNCTP_AGREE_S"] = "8"


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    group = dist.group.WORLD

    def first(x: Tensor, w: Tensor) -> Tensor:
        return all_gather_tensor(x, 0, group).bfloat16() @ w

    def second(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = all_gather_tensor(x, 0, group).bfloat16() @ w
        if rank:
            torch._dynamo.graph_break()
        return product, reduce_scatter_tensor(product.sin(), "sum", 0, group)

    w = torch.randn(8, 8).bfloat16()
    torch.manual_seed(1 + rank)
    x = torch.randn(4, 8)
    with torch.no_grad():
        return [compiled(first)(x, w), *compiled(second)(x, w)]


if __name__ == "__main__":
    run(program)
