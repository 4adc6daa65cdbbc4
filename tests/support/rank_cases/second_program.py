"""Two programs make the same collectives. All ranks agree on two sums in the first; in the second no sum suits all."""

import torch
import torch.distributed as dist
from rank_harness import Compile, run
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def layer(x: Tensor, weights: list[Tensor], look: bool) -> tuple[Tensor, ...]:
        parts = [all_reduce(x @ weight, "sum", dist.group.WORLD) for weight in weights]
        one, other = parts[0] + parts[1], parts[2] + parts[3]
        return one, other, (parts[2 - 2 * rank] if look else x).norm()  # of its own then: no sum may take it in

    weights = list(torch.randn(4, 16, 8))
    torch.manual_seed(1 + rank)
    x = torch.randn(4, 16)
    function = compiled(layer)
    with torch.no_grad():
        return [*function(x, weights, False), *function(x, weights, True)]


if __name__ == "__main__":
    run(program)
