"""A chain that cannot be fused: read the reason and the remedy, mend the model, and see it fused.

The activations are sharded over the sequence, and gathered before the norm instead of before the matmul behind it. The
report says so, and what to do: a norm works row by row, so it gives the same on the shard, before the gather.
Run it with: python examples/explain_a_miss.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import asynctp_passes

RANKS = 4


def report_of(mesh: DeviceMesh, norm: ParallelStyle, up: ParallelStyle) -> asynctp_passes.Report:
    """Compile a norm and an MLP on activations that are sharded over the sequence; return the report of the graph."""
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
    plan = {"0": norm, "1": up, "3": RowwiseParallel(output_layouts=Shard(1))}
    compiled = torch.compile(parallelize_module(model, mesh, plan), backend="asynctp")
    with torch.no_grad():
        compiled(torch.randn(2, 64 // RANKS, 64))
    return asynctp_passes.reports()[-1]


def main() -> tuple[asynctp_passes.Report, asynctp_passes.Report]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))

    print("Activations are gathered before the norm:\n")
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    missed = report_of(mesh, gather, ColwiseParallel())
    print(missed, end="\n\n")
    for remark in missed.missed:
        print(f"So {remark.collective} is {remark.outcome} for reason {remark.code} ({remark.name}).")
        print(f"What to do: {remark.hint}.\n")

    print("The same with the norm on the shard, as the remedy says:\n")
    fused = report_of(mesh, SequenceParallel(), ColwiseParallel(input_layouts=Shard(1)))
    print(fused)
    dist.destroy_process_group()
    return missed, fused


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
