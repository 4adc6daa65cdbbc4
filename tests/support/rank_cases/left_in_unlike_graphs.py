"""All ranks agree on a sum. Rank 0 alone breaks its graph then: all raise. And then all break alike."""

import torch
from rank_harness import Compile, all_raise, run
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def summed(x: Tensor, w: Tensor, breaks: bool) -> Tensor:
        total = all_reduce(x @ w, "sum", "0") + all_reduce((x + 1) @ w, "sum", "0")
        if breaks:
            torch._dynamo.graph_break()
        return total + all_gather_tensor(x, 0, "0").sum()

    function = compiled(summed, dynamic=False)
    x, w = torch.randn(8, 16) + rank, torch.randn(16, 16) / 16
    with torch.no_grad():
        whole = function(x, w, False)
        all_raise(lambda: function(x[:6], w, rank == 0), "left_in_unlike_graphs.py:summed:")
        return [whole, function(x[:4], w, True), function(x[:2], w, True)]


if __name__ == "__main__":
    run(program)
