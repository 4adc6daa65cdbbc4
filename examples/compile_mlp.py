"""Compile a tensor-parallel MLP with asynctp and print what was fused, forward and backward.

Runs on any laptop, without a launcher: a fake process group stands for four ranks (it sends nothing, so the numbers
that come out mean nothing, but the compiled graphs are the real ones). Run it with: python examples/compile_mlp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import asynctp_passes

RANKS = 4


class MLP(nn.Module):
    """Two linear layers; activations come in and go out sharded over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def main() -> tuple[asynctp_passes.Report, ...]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    model = parallelize_module(MLP(), mesh, plan)

    asynctp_passes.clear_reports()
    compiled = torch.compile(model, backend="asynctp", options={"strict": "all"})
    shard = torch.randn(2, 16, 64, requires_grad=True)  # batch 2, this rank's 16 of 64 positions, width 64
    compiled(shard).sum().backward()

    reports = asynctp_passes.reports()
    for report in reports:
        print(report, end="\n\n")
    dist.destroy_process_group()
    return reports


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
