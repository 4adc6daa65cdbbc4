"""torchao's recipes in a tensor-parallel MLP on CPU ranks, with asynctp and without: python torchao_program.py FOLDER

Each rank writes `RANK.json` there: by recipe, what was fused and missed, and how far results are from plain Inductor's.
torchao's checks for GPUs are passed over where a CPU computes the same.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
import torchao.kernel.intmm
import torchao.quantization as quantization
import torchao.quantization.quant_api as api
from compiled_training import bytes_over_gloo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig
from torchao.quantization.quantize_.common import KernelPreference

import asynctp_passes

WIDTH, HIDDEN, ROWS = 256, 512, 128  # of all ranks


class Mlp(nn.Module):
    """Three linear layers in bf16, `x[rows, width]` to the same shape."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        like = {"bias": False, "dtype": torch.bfloat16}
        self.up, self.gate = nn.Linear(WIDTH, hidden, **like), nn.Linear(WIDTH, hidden, **like)
        self.down = nn.Linear(hidden, WIDTH, **like)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Sharded(nn.Module):
    """A rank's part of the MLP between a gather and a reduce-scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(HIDDEN // 2)

    def forward(self, x: Tensor) -> Tensor:
        whole = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        return funcol.reduce_scatter_tensor(self.mlp(whole), "sum", 0, dist.group.WORLD)


Step = Callable[[Callable[[Tensor], Tensor]], list[Tensor]]


def inference(config: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Step]:
    """The sharded MLP, whose weights differ by rank, quantized; and a call of it."""
    torch.manual_seed(dist.get_rank())
    model, x = Sharded().to(dtype), torch.randn(ROWS // 2, WIDTH, dtype=dtype)
    quantization.quantize_(model, config)

    def step(program: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [program(x)]

    return model, step


def training(convert: Callable[[nn.Module], Any], own_styles: bool = False) -> tuple[nn.Module, Step]:
    """The MLP by DTensor after a norm, converted first; and its gradients. `own_styles`: gathers are torchao's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(WIDTH, dtype=torch.bfloat16), Mlp(HIDDEN))
    convert(model)
    columns, rows = (Float8ColwiseParallel, Float8RowwiseParallel) if own_styles else (ColwiseParallel, RowwiseParallel)
    gather = (PrepareFloat8ModuleInput if own_styles else PrepareModuleInput)(
        input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)
    )
    plan = {
        "0": SequenceParallel(sequence_dim=0, use_local_output=True),
        "1": gather,
        "1.up": columns(),
        "1.gate": columns(),
        "1.down": rows(output_layouts=Shard(0)),
    }
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(ROWS // 2, WIDTH, dtype=torch.bfloat16, requires_grad=True)

    def local(x: Tensor) -> Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    def step(program: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = local(program(x))
        return [y, *map(local, torch.autograd.grad(y.float().square().sum(), (x, *model.parameters())))]

    return model, step


def float8(recipe: str, **changes: Any) -> Callable[[nn.Module], Any]:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **changes)
    return lambda model: convert_to_float8_training(model, config=config)


EMULATED = KernelPreference.EMULATED
BY_ROWS, BY_TENSOR = quantization.PerRow(), quantization.PerTensor()
RECIPES: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "train tensorwise": lambda: training(float8("tensorwise")),
    "train tensorwise, torchao's styles": lambda: training(float8("tensorwise"), own_styles=True),
    "train rowwise": lambda: training(float8("rowwise")),
    "train rowwise_with_gw_hp": lambda: training(float8("rowwise_with_gw_hp")),
    "train tensorwise, emulated": lambda: training(float8("tensorwise", emulate=True)),
    "Float8DynamicActivationFloat8WeightConfig by tensors": lambda: inference(
        quantization.Float8DynamicActivationFloat8WeightConfig(granularity=BY_TENSOR)
    ),
    "Float8DynamicActivationFloat8WeightConfig by rows": lambda: inference(
        quantization.Float8DynamicActivationFloat8WeightConfig(granularity=BY_ROWS)
    ),
    "Float8WeightOnlyConfig": lambda: inference(quantization.Float8WeightOnlyConfig()),
    "Int8DynamicActivationInt8WeightConfig": lambda: inference(quantization.Int8DynamicActivationInt8WeightConfig()),
    "Int8WeightOnlyConfig": lambda: inference(quantization.Int8WeightOnlyConfig()),
    "Int8WeightOnlyConfig, float32": lambda: inference(quantization.Int8WeightOnlyConfig(), torch.float32),
    "IntxWeightOnlyConfig of int4": lambda: inference(
        quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(64))
    ),
    "Int8DynamicActivationIntxWeightConfig of int4": lambda: inference(
        quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(64)
        )
    ),
    "NVFP4WeightOnlyConfig": lambda: inference(NVFP4WeightOnlyConfig()),
    "MXDynamicActivationMXWeightConfig of fp8, emulated": lambda: inference(
        MXDynamicActivationMXWeightConfig(kernel_preference=EMULATED)
    ),
    "MXDynamicActivationMXWeightConfig of fp4, emulated": lambda: inference(
        MXDynamicActivationMXWeightConfig(
            activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2, kernel_preference=EMULATED
        )
    ),
}


def tried(make: Callable[[], tuple[nn.Module, Step]]) -> dict[str, Any]:
    """The outcome of a recipe: counts, codes by collective, and distances relative to the largest element."""

    def ran(backend: str, **options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        model, step = make()
        return step(torch.compile(model, backend=backend, dynamic=False, **options))

    plain = ran("inductor")
    ours = ran("asynctp", options={"strict": "off"})
    reports = asynctp_passes.reports()
    missed = Counter(f"{remark.kind} {remark.code}" for report in reports for remark in report.missed)
    pairs = [(one.double(), other.double()) for one, other in zip(ours, plain, strict=True)]
    return {
        "fused": sum(len(report.fused) for report in reports),
        "missed": dict(sorted(missed.items())),
        "distance": max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs),
        "text": "\n".join(map(str, reports)),
    }


def main(folder: Path) -> None:
    """Try all recipes."""
    warnings.simplefilter("ignore")
    torch._inductor.config.fallback_by_default = True  # no C++ is compiled, and each op rounds as in eager mode
    api._check_hardware_support = lambda granularities: None
    torchao.kernel.intmm._cpu_is_vnni_supported = lambda: False  # int8 in int8, as on GPUs and on CPUs with AMX
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    with bytes_over_gloo():
        for name, make in RECIPES.items():
            try:
                found[name] = tried(make)
            except Exception:
                found[name] = {"error": traceback.format_exc()}
            (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
