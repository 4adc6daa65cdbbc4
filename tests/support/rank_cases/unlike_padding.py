"""Each rank pads its part of a sum by rows of zeros from another row on. They are the other ranks' rows as well."""

import torch
import torch.distributed as dist
from rank_harness import Compile, fused, run
from torch import Tensor
from torch.distributed._functional_collectives import reduce_scatter_tensor


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def padded(x: Tensor, w: Tensor) -> Tensor:
        product = torch.nn.functional.pad(x @ w, (0, 0, 0, 8 - x.shape[0]))
        return reduce_scatter_tensor(product, "sum", 0, dist.group.WORLD)

    function = compiled(padded, dynamic=False)
    found: list[Tensor] = []
    w = torch.randn(16, 12)
    torch.manual_seed(1 + rank)
    with torch.no_grad():
        for rows in ((3, 7), (7, 5), (6, 6)):
            found.append(function(torch.randn(rows[rank], 16), w))
    return found


if __name__ == "__main__":
    run(program, judge=fused(3))
