"""Megatron-Core's layers on CPU ranks: torchrun ... megatron_program.py FOLDER [traced]

Megatron-Core runs on GPUs. This gives it a CPU where it asks for the current device, and norms of its own, since those
of Megatron-Core that need no other package refuse sequence parallelism. The rest is Megatron-Core's own.

With `traced`, its linears are those of `trace_linears`. Each rank writes FOLDER/RANK.json: by program, chains fused and
missed, breaks of graphs, and the largest distance from eager mode, over results and gradients.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # before dynamo looks it up

import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch._dynamo.utils import counters

import asynctp_passes
from asynctp_passes import megatron

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
Programs = Iterator[tuple[str, nn.Module, Tensor]]


class Norm(nn.Module):
    """An RMS norm with the arguments that Megatron-Core gives its norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Layers(nn.Module):
    """Two of Megatron-Core's transformer layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        block = TransformerBlockSubmodules(layer_specs=[layer, layer], layer_norm=Norm)
        self.layers = TransformerBlock(config, block).layers
        self.mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x, attention_mask=self.mask)
        return x


class Mlp(nn.Module):
    """Megatron-Core's two linears around an activation."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        common = {"config": config, "init_method": config.init_method, "bias": True, "skip_bias_add": False}
        self.up = ColumnParallelLinear(32, 64, gather_output=False, **common)
        self.down = RowParallelLinear(64, 32, input_is_parallel=True, **common)

    def forward(self, x: Tensor) -> Tensor:
        wide, _ = self.up(x)
        out, _ = self.down(F.silu(wide))
        assert isinstance(out, Tensor)
        return out


def configuration(**options: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        tensor_model_parallel_size=2, use_cpu_initialization=True, gated_linear_unit=True, activation_func=F.silu,
        normalization="RMSNorm", add_bias_linear=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, **options,
    )  # fmt: skip


def programs() -> Programs:
    """Names, modules and inputs [sequence, batch, hidden]: this rank's part of the sequence, or all of it."""
    sequence = configuration(sequence_parallel=True)
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    part = x.chunk(2)[RANK]
    yield "layers", Layers(sequence), part
    yield "mlp", Mlp(sequence), part
    yield "frozen", Mlp(sequence).requires_grad_(False), part
    yield "replicated", Mlp(configuration(sequence_parallel=False)), x


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and of the weights."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return [out.detach(), *(one.grad.clone() for one in (x, *module.parameters()) if one.grad is not None)]


def tried(module: nn.Module, x: Tensor, strict: str) -> dict[str, Any]:
    """Compile a program, as docs/how-to/stacks.md does it, and compare."""
    torch._dynamo.reset()
    counters.clear()
    asynctp_passes.clear_reports()
    wanted = step(module, x)
    for part in getattr(module, "layers", [module]):
        part.compile(backend="asynctp", options={"strict": strict})
    found = step(module, x)
    reports = asynctp_passes.reports()
    pairs = zip(found, wanted, strict=True)
    return {
        "fused": [sum(len(one.fused) for one in reports if one.phase == phase) for phase in ("forward", "backward")],
        "missed": sum(len(report.missed) for report in reports),
        "kinds": sorted({remark.kind for report in reports for remark in report.fused}),
        "breaks": len(counters["graph_break"]),
        "distance": max(float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs),
        "text": "\n".join(map(str, reports)),
    }


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    strict = "off"
    if sys.argv[2:] == ["traced"]:
        megatron.trace_linears()
        megatron.trace_linears()
        strict = "all"
    found = {name: tried(module, x, strict) for name, module, x in programs()}
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
