"""All ranks agree on a sum. One rank compiles that function anew by itself; in later ones no sum suits all ranks."""

import torch
import torch.distributed as dist
from rank_harness import Compile, run
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def parts(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        return [all_reduce(x @ weight, "sum", dist.group.WORLD) for weight in weights]

    def summed(x: Tensor, weights: list[Tensor], factor: int) -> Tensor:
        return sum(parts(x, weights)) * factor

    def both(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        return parts(x, weights)

    def looked_at(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        one, other = parts(x, weights)
        return [one + other, one.norm() if rank == 1 else x.norm()]

    weights = list(torch.randn(2, 16, 8))
    torch.manual_seed(1 + rank)
    x = torch.randn(4, 16)
    first, second, third = compiled(summed, dynamic=False), compiled(both), compiled(looked_at)
    with torch.no_grad():
        results = [first(x, weights, 3), *second(x, weights), first(x, weights, 5 if rank == 1 else 3)]
        return [*results, *third(x, weights)]


if __name__ == "__main__":
    run(program)
