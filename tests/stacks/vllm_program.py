"""vLLM's compiler and pass manager on CPU ranks: torchrun ... vllm_program.py FOLDER

vLLM 0.33 has wheels for GPUs alone, and its engine wants one. This program has vLLM's own configuration,
`support_torch_compile`, `VllmBackend`, `PostGradPassManager`, groups and collectives, and the ops of its CUDA library.
In the place of a GPU are the platform of `vllm_platform.py` and a driver library that does nothing. The engine, its
models and its kernels do not run here.

Each rank writes FOLDER/RANK.json: by model, chains fused and missed, and the largest distance from the eager model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    get_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import set_forward_context

import asynctp_passes

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])

_kernels = torch.library.Library("_C", "IMPL")
_test = torch.library.Library("stacks", "DEF")
_test.define("attend(Tensor x) -> Tensor")
torch.library.register_fake("stacks::attend", torch.empty_like, lib=_test)
_test.impl("attend", torch.sin, "CPU")


def _scaled_mm(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
    product = (a.float() * a_scales) @ (b.float() * b_scales.reshape(1, -1))
    out.copy_(product if bias is None else product + bias)


_kernels.impl("cutlass_scaled_mm", _scaled_mm, "CPU")


# --- models ---------------------------------------------------------------------------------------------------------
def weight(*sizes: int) -> nn.Parameter:
    """A weight, of which each rank has another."""
    return nn.Parameter(torch.randn(sizes, generator=torch.Generator().manual_seed(RANK)) / sizes[-1] ** 0.5, False)


class Layers(nn.Module):
    """Attention's and an MLP's row-parallel layers; vLLM splits the graph at the op between."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.up, self.down = weight(32, 32), weight(64, 32), weight(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + tensor_model_parallel_all_reduce(nn.functional.linear(torch.tanh(x), self.o))
        x = torch.ops.stacks.attend(x)
        up = torch.relu(nn.functional.linear(x, self.up))
        return x + tensor_model_parallel_all_reduce(nn.functional.linear(up, self.down))


class Sequence(nn.Module):
    """An MLP between vLLM's all-gather and reduce-scatter of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weight(64, 32), weight(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        up = torch.relu(nn.functional.linear(tensor_model_parallel_all_gather(x, 0), self.up))
        return x + get_tp_group().reduce_scatter(nn.functional.linear(up, self.down), 0)


class Fp8(nn.Module):
    """A row-parallel layer in fp8, with scales of rows and columns, by vLLM's `cutlass_scaled_mm`."""

    def __init__(self) -> None:
        super().__init__()
        w = weight(32, 64)
        scale = w.abs().amax(1, keepdim=True) / 448
        self.register_buffer("scale", scale.t().contiguous())
        self.register_buffer("w", (w / scale).to(torch.float8_e4m3fn).t())

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([x, x.cos()], 1)
        scale = wide.abs().amax(1, keepdim=True) / 448
        narrow = (wide / scale).to(torch.float8_e4m3fn)
        out = _custom_ops.cutlass_scaled_mm(narrow, self.w, scale, self.scale, torch.bfloat16)
        return tensor_model_parallel_all_reduce(out).float()


class Second(nn.Module):
    """A layer over a group that vLLM makes after asynctp's first compile."""

    def __init__(self) -> None:
        super().__init__()
        self.o = weight(32, 32)
        self.group = parallel_state.init_model_parallel_group([[0, 1]], RANK, "gloo", group_name="second")

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(nn.functional.linear(x, self.o))


# --- vLLM -------------------------------------------------------------------------------------------------------------
def configuration() -> VllmConfig:
    """As `vllm serve` makes it of the settings in docs/how-to/vllm.md."""
    own = json.loads((Path(__file__).with_name("vllm_config.json")).read_text())
    config = VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            splitting_ops=["stacks::attend"],
            compile_ranges_endpoints=[8],
            compile_sizes=[],
            cudagraph_mode="NONE",
            inductor_passes=own["inductor_passes"],
            inductor_compile_config=own["inductor_compile_config"],
            pass_config={**own["pass_config"], "fuse_rope_kvcache_cat_mla": False},
        ),
    )
    config.parallel_config.rank = RANK
    return config


@contextmanager
def parallel(config: VllmConfig) -> Iterator[None]:
    """vLLM's groups of two ranks."""
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(2, RANK, "env://", RANK, "gloo")
        initialize_model_parallel(2)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def compiled(model: type[nn.Module], config: VllmConfig) -> nn.Module:
    """A model that vLLM compiles, for any number of rows."""

    def begin(self: Any, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model.__init__(self)

    made = type(model.__name__, (model,), {"__init__": begin, "forward": model.forward})
    return support_torch_compile(dynamic_arg_dims={"x": 0})(made)(vllm_config=config)


def tried(model: type[nn.Module], config: VllmConfig) -> dict[str, Any]:
    """Chains of a model, and how far it is from eager for a small and a large batch."""
    asynctp_passes.clear_reports()
    module = compiled(model, config)
    forward: Callable[[Tensor], Tensor] = module.forward
    distance = 0.0
    with set_forward_context(None, config):
        for rows in (6, 24):
            x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
            wanted = forward(x)
            distance = max(distance, float((module(x) - wanted).norm() / wanted.norm()))
    reports = asynctp_passes.reports()
    return {
        "fused": sum(len(report.fused) for report in reports),
        "missed": sum(len(report.missed) for report in reports),
        "kinds": sorted({remark.kind for report in reports for remark in report.fused}),
        "cached": sum(report.from_cache for report in reports),
        "distance": distance,
        "text": "\n".join(map(str, reports)),
    }


def main() -> None:
    config = configuration()
    with parallel(config):
        found = {model.__name__: tried(model, config) for model in (Layers, Sequence, Fp8, Second)}
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))


main()
