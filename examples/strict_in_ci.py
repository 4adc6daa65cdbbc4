"""A check for your CI: the compile fails as soon as a chain of the model is no longer fused.

`strict="all"` raises on any missed chain, `expect=N` when fewer than N chains of a graph are fused. The error carries
the report, and a graph that is refused stays as it was. The checks are plain functions named `test_*`, as pytest wants
them; `main` runs them. Run it with: python examples/strict_in_ci.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.exc import InductorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import asynctp_passes

RANKS = 4


def compile_model(*, norm_on_shards: bool, **options: Any) -> None:
    """The steps of your test with your model: parallelize it, compile it strictly, run it once."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    plan = {
        "0": SequenceParallel() if norm_on_shards else gather,
        "1": ColwiseParallel(input_layouts=Shard(1) if norm_on_shards else Replicate()),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    compiled = torch.compile(parallelize_module(model, mesh, plan), backend="asynctp", options=options)
    with torch.no_grad():
        compiled(torch.randn(2, 64 // RANKS, 64))


def test_every_chain_is_fused() -> None:
    compile_model(norm_on_shards=True, strict="all", expect=2)
    assert len(asynctp_passes.reports()[-1].fused) == 2


def test_a_miss_fails() -> None:
    """The norm changes values between the gather and the matmul."""
    error = error_of(norm_on_shards=False, strict="all")
    assert isinstance(error, asynctp_passes.StrictError)
    assert [remark.code for remark in error.report.missed] == ["ATP105"]
    print(error)


def test_fewer_than_expected_fails() -> None:
    error = error_of(norm_on_shards=True, expect=3)
    assert isinstance(error, asynctp_passes.ExpectError)


def error_of(*, norm_on_shards: bool, **options: Any) -> BaseException:
    """The error of a compile that must fail. Inductor wraps what a pass raises; the original is inside."""
    try:
        compile_model(norm_on_shards=norm_on_shards, **options)
    except InductorError as error:
        return error.inner_exception
    except asynctp_passes.AsyncTPError as error:
        return error
    raise AssertionError("the compile was expected to fail")


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for check in (test_every_chain_is_fused, test_a_miss_fails, test_fewer_than_expected_fails):
        torch._dynamo.reset()
        check()
        print(f"passed: {check.__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
