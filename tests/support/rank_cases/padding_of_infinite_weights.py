"""Rows of zeros after a product whose weight has an infinity and a NaN: they stay zeros, for any number of rows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_harness import Compile, fused, run
from torch import Tensor
from torch.distributed._functional_collectives import reduce_scatter_tensor

FP8 = torch.float8_e5m2  # it has infinities


def scattered(whole: Tensor) -> Tensor:
    return reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD)


def more(x: Tensor) -> int:
    return -x.shape[0] % dist.get_world_size()


def padded(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(F.pad(torch.addmm(bias, x, w), (0, 0, 0, more(x))))


def joined(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    product = -(x @ w)
    return scattered(torch.cat([product, product.new_zeros(more(x), w.shape[1])]))


def written(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    product = x @ w + bias
    whole = product.new_zeros(x.shape[0] + more(x), w.shape[1])
    whole[: x.shape[0]] = product
    return scattered(whole)


def scaled(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    one = torch.ones((), device=x.device)
    product = torch._scaled_mm(x.to(FP8), w.to(FP8).t().contiguous().t(), one, one, bias, out_dtype=torch.bfloat16)
    return scattered(F.pad(product, (0, 0, 0, more(x))))


def scaled_by_rows(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    rows, one = x.float().abs().amax(1, keepdim=True), torch.ones((), device=x.device)
    parts = (x / rows).to(FP8), w.to(torch.float8_e4m3fn).t().contiguous().t()
    product = torch._scaled_mm(*parts, one, one, out_dtype=torch.float32)
    product = (product * rows * w.float().abs().amax(0, keepdim=True)).to(torch.bfloat16)
    return scattered(F.pad(product, (0, 0, 0, more(x))))


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    w, bias = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16)
    w[3, 2], w[0, 5] = float("inf"), float("nan")
    torch.manual_seed(1 + rank)
    found: list[Tensor] = []
    with torch.no_grad():
        for each in (padded, joined, written, scaled, scaled_by_rows):
            function = compiled(each, dynamic=None if each is padded else True)
            for rows in (17, 24, 23, 19):  # one graph for all; of `padded` the first is static
                found.append(function(torch.randn(rows, 16, dtype=torch.bfloat16), w, bias))
                zeros = found[-1][max(rows - rank * found[-1].shape[0], 0) :]
                assert torch.equal(zeros.view(torch.int16), torch.zeros_like(zeros).view(torch.int16))
    return found


if __name__ == "__main__":
    run(program, judge=fused(6))
