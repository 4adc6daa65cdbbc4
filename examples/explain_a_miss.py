"""A chain that cannot be fused: read the reason and the remedy, mend the model, and see it fused.

The model is tensor parallel without sequence parallelism, so every rank needs the whole output and the matmul's result
is all-reduced. The report says so, and what to do: keep activations sharded over the sequence.
Run it with: python examples/explain_a_miss.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import asynctp_passes

RANKS = 4


def report_of(mesh: DeviceMesh, layout: Placement) -> asynctp_passes.Report:
    """Compile an MLP whose activations have `layout` at both ends, and return the report of its graph."""
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
    plan = {"0": ColwiseParallel(input_layouts=layout), "2": RowwiseParallel(output_layouts=layout)}
    compiled = torch.compile(parallelize_module(model, mesh, plan), backend="asynctp", options={"strict": "off"})
    positions = 64 // RANKS if layout == Shard(1) else 64
    with torch.no_grad():
        compiled(torch.randn(2, positions, 64))
    return asynctp_passes.reports()[-1]


def main() -> tuple[asynctp_passes.Report, asynctp_passes.Report]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))

    print("Tensor parallel, activations whole on every rank:\n")
    missed = report_of(mesh, Replicate())
    print(missed, end="\n\n")
    for remark in missed.missed:
        print(f"So {remark.collective} is {remark.outcome} for reason {remark.code} ({remark.name}).")
        print(f"What to do: {remark.hint}.\n")

    print("The same with activations sharded over the sequence, as the remedy says:\n")
    fused = report_of(mesh, Shard(1))
    print(fused)
    dist.destroy_process_group()
    return missed, fused


if __name__ == "__main__":
    main()
