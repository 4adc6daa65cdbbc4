"""The last rank draws random numbers between a gather and what its quantized weight waits for; all keep the gather."""

import torch
import torch.distributed as dist
from rank_harness import Compile, run
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    group, one = dist.group.WORLD, torch.ones(())

    def step(x: Tensor, y: Tensor, w: Tensor, z: Tensor) -> list[Tensor]:
        scale = all_reduce(z.abs().amax(), "max", group) / 448
        whole = all_gather_tensor(x, 0, group)
        kept = whole.cumsum(0)
        if rank == ranks - 1:
            for _ in range(2):
                y = y + 0 * torch.multinomial(y.sigmoid(), 1)
        total = all_reduce(y, "sum", group)
        rows = (whole / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        weight = (w * total.mean()).to(torch.float8_e4m3fn).t()
        return [kept, total, torch._scaled_mm(rows, weight, scale, one, out_dtype=torch.bfloat16)]

    torch.manual_seed(1 + rank)
    sizes = [(16, 16), (16 * ranks, 16), (16, 16), (16,)]
    return list(compiled(step)(*(torch.randn(size) for size in sizes)))


if __name__ == "__main__":
    run(program)
