"""Inductor's own passes over collectives, on and off beside asynctp: values, and chains that stay fused."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import asynctp_passes

IN_GRAPHS = "aten_distributed_optimizations"
SETTINGS: dict[str, dict[str, Any]] = {
    "as torch has them": {},
    "no simple overlap": {f"{IN_GRAPHS}.enable_simple_overlap": False},
    "overlap scheduling": {f"{IN_GRAPHS}.enable_overlap_scheduling": True},
    "low contention": {
        f"{IN_GRAPHS}.enable_overlap_scheduling": True,
        f"{IN_GRAPHS}.enable_low_contention_collectives": True,
    },
    "buckets": {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"},
    "compute and communication reordered": {"reorder_for_compute_comm_overlap": True},
}


def has(name: str) -> bool:
    """Whether this torch has an option of Inductor's."""
    found: Any = torch._inductor.config
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A step beside a statistic of all ranks: the result, and all gradients."""
    x = x.clone().requires_grad_()
    largest = all_reduce(x.detach().amax(), "max", dist.group.WORLD)
    out = model(x)
    (out * out).sum().backward()
    gradients = [one.grad for one in model.parameters()]
    assert x.grad is not None
    return [largest, out.detach(), x.grad, *(one.to_local() for one in gradients if isinstance(one, DTensor))]


def make(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False)]
    layers += [nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False)]
    first, last = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
    return parallelize_module(nn.Sequential(*layers), mesh, {"0": first, "2": last, "3": first, "5": last})


def under_settings(rank: int, world_size: int) -> dict[str, tuple[bool, list[tuple[int, int]]]]:
    """For each setting that this torch has: whether values are eager's, and chains fused and missed, by graph."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    wanted, found = trained(make(mesh), x), {}
    for name, settings in SETTINGS.items():
        if not all(map(has, settings)):
            continue
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        with ExitStack() as stack:
            stack.enter_context(torch._inductor.config.patch(settings))
            stack.enter_context(mock.patch.dict("os.environ", ASYNCTP_AGREE_S="120"))
            options = {"strict": "off"}
            got = trained(torch.compile(make(mesh), backend="asynctp", options=options), x)
        right = all(torch.allclose(*pair, atol=1e-4) for pair in zip(got, wanted, strict=True))
        found[name] = right, [(len(one.fused), len(one.missed)) for one in asynctp_passes.reports()]
    return found


@pytest.mark.ranks
def test_chains_are_fused_and_right_under_each_setting() -> None:
    for found in run_ranks(2, under_settings, timeout_s=300):
        assert "as torch has them" in found
        assert found == dict.fromkeys(found, (True, [(4, 0), (4, 0)]))
