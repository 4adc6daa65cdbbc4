"""Ranks find unlike things in Inductor's caches, which environment variables force on: they outrank what is set."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

import asynctp_passes


def layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    gathered = all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ w
    return reduce_scatter_tensor_autograd(gathered.relu() @ v, "sum", 0, dist.group.WORLD)


def step(rank: int, _: int, folder: str) -> tuple[bool, list[bool]]:
    """Whether a step has eager's values, and which of its graphs came from this rank's own cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    torch.manual_seed(rank)
    tensors = [torch.randn(size, requires_grad=True) for size in ((16, 32), (32, 32), (32, 32))]
    options: dict[str, Any] = {"strict": "off", "fallback_by_default": True}
    values = []
    for function in (layer, torch.compile(layer, backend="asynctp", options=options)):
        result = function(*tensors)
        values.append([result, *torch.autograd.grad(result.square().sum(), tensors)])
    right = all(torch.allclose(got, want, atol=1e-3) for want, got in zip(*values, strict=True))
    return right, [report.from_cache for report in asynctp_passes.reports()]


@pytest.mark.ranks
def test_a_rank_whose_cache_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's graphs come from its cache, are refused, and are compiled without one, as the variables do not allow."""
    for name, value in {"TRITON_INTERPRET": "1", "ASYNCTP_CPU_IMPLEMENTATION": "interpreted"}.items():
        monkeypatch.setenv(name, value)  # what GPUs run: there asynctp deviates
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0")
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    for right, _ in run_ranks(2, step, str(tmp_path)):
        assert right
    shutil.rmtree(tmp_path / "1")
    for right, from_cache in run_ranks(2, step, str(tmp_path)):
        assert right
        assert from_cache
