"""Whether ranks keep a gather is decided once: then one rank alone runs graphs that need it, or that need not."""

from unittest import mock

import torch
import torch.distributed as dist
from rank_harness import Compile, Complaint, run
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.distributed._functional_collectives import all_gather_tensor

import asynctp_passes


def gathered(x: Tensor) -> Tensor:
    return all_gather_tensor(x, 0, dist.group.WORLD)


def program(rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    def fills_the_cache(x: Tensor, w: Tensor) -> Tensor:
        return gathered(x) @ w

    def looks(x: Tensor, w: Tensor, look: bool) -> tuple[Tensor, ...] | Tensor:
        if look:
            whole = gathered(x)
            return whole @ w, whole.sum(0)
        return gathered(x) @ w

    def keeps(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        whole = gathered(x)
        return whole @ w, whole.sum(1)

    def need_not(x: Tensor, w: Tensor) -> Tensor:
        return gathered(x) @ w.sin()

    wide, w = torch.randn(16, 8), torch.randn(24, 8)
    torch.manual_seed(1 + rank)
    x, y = torch.randn(4, 16), torch.randn(4, 24).half()
    look, keep, less = compiled(looks), compiled(keeps), compiled(need_not)
    found: list[Tensor] = []
    cached = mock.patch.object(torch.compiler.config, "force_disable_caches", False)
    with torch.no_grad(), cached, fresh_cache():
        found += [compiled(fills_the_cache)(x, wide), *look(x, wide, True)]
        found.append(look(x, wide, False) if rank == 1 else look(x, wide, True)[0])
        found += keep(y, w.half())
        found.append(less(y, w.half()) if rank == 1 else keep(y, w.sin().half())[0])
    told = [(report.questions[0].kept if report.questions else ()) for report in asynctp_passes.reports()]
    if rank == 1 and told and told != [(), (), (), *[("keep: all_gather 0",)] * 2]:
        raise Complaint(f"REASON rank 1 keeps {told}")
    return found


if __name__ == "__main__":
    run(program, interpreted=True)
