"""What four ranks of test_recipes do: fp8, tensor parallelism and weights sharded over "dp", on a mesh of 2 x 2.

Three things vary. What is compiled:

    blocks         each block, then FSDP2 shards it                             FSDP2's hooks are outside
    hooked blocks  FSDP2 shards each block, then it is compiled, with the hooks
    model          the whole model, of blocks that FSDP2 has sharded
    in graph       the whole model, whose layers gather their weights themselves (simple FSDP): a single graph

How scales come about: `dynamic` (torchao's tensorwise recipe; in the graph, the layers of fp8_cases) or `delayed`
(those layers, as torchao has none). And whether weights travel in high precision or in fp8: under FSDP2, as torchao's
tensor subclass of weights.

A rank's graphs are cached apart: torch finds a graph of DTensors of another tensor-parallel group, whose name is in it.

In every case each tensor-parallel collective next to a matmul is fused and none of the other group's is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import fp8_cases
import torch
import torch.distributed._functional_collectives as funcol
from compiled_training import NEWER_THAN_2_14, STRICT, NotRunnable, bytes_over_gloo, local, own_cache, shard_of, start
from fp8_cases import E4M3, Current, Delayed, NormBlock, gathered
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import asynctp_passes
from asynctp_passes import Report
from asynctp_passes.tools.demo.model import ModelSizes, Transformer, parallelize
from asynctp_passes.tools.demo.recipe import styles_of

BLOCKS = 2
SIZES = ModelSizes(vocabulary=32, width=32, hidden=64, heads=4, layers=BLOCKS, sequence=32)
COMPILED = ("blocks", "hooked_blocks", "model")
#: Relative distance of values and gradients from eager's: a product that rounds differently may be quantized to the
#: neighbouring fp8 number, and there are more of those the more layers follow.
NEAR = 1e-2


class Stack(nn.Module):
    """Blocks of fp8_cases, `x[local sequence, batch, width]` to the same shape.

    It loops as models do. `nn.Sequential` would not: its code belongs to torch, of which dynamo compiles only what it
    calls, so that the blocks would be compiled instead of the whole.
    """

    def __init__(self, scaling: type[Current], group: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(NormBlock(nn.RMSNorm, scaling, group) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# --- FSDP2 ------------------------------------------------------------------------------------------------
def sharded(model: nn.Module, mesh: DeviceMesh, compiled: str) -> nn.Module:
    """The model under FSDP2 over "dp", with `compiled` of it compiled; nothing when empty."""

    def compile_it(module: nn.Module) -> None:
        module.compile(backend="asynctp", options=STRICT, dynamic=False)

    for block in model.blocks:  # type: ignore[union-attr]
        if compiled == "blocks":
            compile_it(block)
        fully_shard(block, mesh=mesh["dp"])
        if compiled == "hooked_blocks":
            compile_it(block)
    fully_shard(model, mesh=mesh["dp"])
    if compiled == "model":
        compile_it(model)
    return model


def torchao_model(mesh: DeviceMesh, fp8_weights: bool) -> nn.Module:
    """The demo's model with torchao's tensorwise layers, tensor-parallel."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=fp8_weights)
    model = Transformer(SIZES)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "head" not in name)
    return parallelize(model, mesh["tp"], 1, styles_of("fp8"))


def _dynamic(compiled: str, fp8_weights: bool) -> Callable[[DeviceMesh], tuple[Report, ...]]:
    def case(mesh: DeviceMesh) -> tuple[Report, ...]:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        if compiled == "model" and NEWER_THAN_2_14:
            raise NotRunnable("dynamo breaks the graph: it does not trace _DTensor_compute_global_tensor_info")

        def train(compiled: str) -> list[Tensor]:
            model = sharded(torchao_model(mesh, fp8_weights), mesh, compiled)
            if fp8_weights:
                precompute_float8_dynamic_scale_for_fsdp(model)
            generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
            return _train(model, [torch.randint(0, 32, (2, SIZES.sequence), generator=generator) for _ in range(2)])

        return _compare(mesh, compiled, train)

    return case


@torch._dynamo.allow_in_graph
def parts_of(weight: Any) -> tuple[Tensor, Tensor]:
    """torchao's tensor in fp8 as it was gathered: its bytes, and what to multiply those by."""
    return weight._data, weight._scale.reciprocal()


class GatheredInFp8(nn.Module):
    """What a product takes of a weight that FSDP2 has gathered in fp8."""

    def forward(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return parts_of(weight)


def with_fp8_weights(stack: Stack) -> Stack:
    """The stack with weights that torchao quantizes for FSDP2's gather."""
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    for layer in [module for module in stack.modules() if isinstance(module, fp8_cases.Linear)]:
        wrapped = [WeightWithDynamicFloat8CastTensor(w.detach(), LinearMMConfig(), E4M3) for w in layer.weights]
        layer.weights = nn.ParameterList(map(nn.Parameter, wrapped))
        layer.of_weight = GatheredInFp8()
    return stack


def _delayed(compiled: str, fp8_weights: bool) -> Callable[[DeviceMesh], tuple[Report, ...]]:
    def case(mesh: DeviceMesh) -> tuple[Report, ...]:
        group = mesh.get_group("tp").group_name

        def train(compiled: str) -> list[Tensor]:
            stack = Stack(Delayed, group)
            model = sharded(with_fp8_weights(stack) if fp8_weights else stack, mesh, compiled)
            return _train(model, _shards(mesh))

        return _compare(mesh, compiled, train)

    return case


def _compare(mesh: DeviceMesh, compiled: str, train: Callable[[str], list[Tensor]]) -> tuple[Report, ...]:
    """Compiled against eager: values, and what was compiled."""
    with own_cache(mesh), bytes_over_gloo():
        start()
        actual = train(compiled)
        reports, graphs = asynctp_passes.reports(), counters["stats"]["unique_graphs"]
        breaks = dict(counters["graph_break"])
        assert_near(actual, train(""))
    assert groups_seen(reports, mesh) == {"tp"}, "FSDP2's gathers are in no graph"
    # one graph for all blocks, which has all tensor-parallel collectives next to matmuls
    blocks = [report for report in reports if report.fused]
    assert [(report.phase, len(report.fused)) for report in blocks] == [("forward", 4), ("backward", 4)], blocks
    if compiled != "model":
        assert (graphs, breaks, len(reports)) == (1, {}, 2), (graphs, breaks, reports)
    assert {remark.code for report in reports for remark in report.others} <= {"ATP002", "ATP013", "ATP014"}, reports
    return reports


# --- weights gathered in the graph ------------------------------------------------------------------------
class GatheredWeight(nn.Module):
    """A weight's shard to what a product takes: gathered over a group and quantized, or the other way round."""

    def __init__(self, data: str, tensor: str, fp8_weights: bool) -> None:
        super().__init__()
        self.data, self.fp8_weights = data, fp8_weights
        self.scaling = Current(E4M3, data if fp8_weights else tensor)

    def forward(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        if not self.fp8_weights:
            quantized, scale = self.scaling(gathered(shard, self.data))
            return quantized, scale
        quantized, scale = self.scaling(shard)
        return gathered(quantized, self.data), scale


class ReducedGradient(nn.Module):
    """A weight's gradient to the mean's shard of this rank."""

    def __init__(self, data: str) -> None:
        super().__init__()
        self.data = data

    def forward(self, grad: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(grad, "avg", 0, self.data)


def _in_graph(scaling: type[Current], fp8_weights: bool) -> Callable[[DeviceMesh], tuple[Report, ...]]:
    def case(mesh: DeviceMesh) -> tuple[Report, ...]:
        data, tensor = (mesh.get_group(dim).group_name for dim in ("dp", "tp"))

        def train(compiled: str) -> list[Tensor]:
            model = Stack(scaling, tensor)
            for layer in [module for module in model.modules() if isinstance(module, fp8_cases.Linear)]:
                shards = (weight.detach().chunk(2)[mesh["dp"].get_local_rank()].clone() for weight in layer.weights)
                layer.weights = nn.ParameterList(map(nn.Parameter, shards))
                layer.of_weight = GatheredWeight(data, tensor, fp8_weights)
                layer.of_weight_grad = ReducedGradient(data)
            if compiled:
                model.compile(backend="asynctp", options=STRICT, dynamic=False, fullgraph=True)
            return _train(model, _shards(mesh))

        with own_cache(mesh), bytes_over_gloo():
            start()
            actual = train("model")
            reports = asynctp_passes.reports()
            assert_near(actual, train(""))
        names = {mesh.get_group(dim).group_name: dim for dim in ("dp", "tp")}
        # a weight that is quantized behind its gather is no operand of a matmul
        codes = {"forward": "ATP003" if fp8_weights else "ATP002", "backward": "ATP009"}
        for report in reports:
            amaxes = [remark for remark in report.remarks if remark.kind == "all_reduce"]
            assert {remark.code for remark in amaxes} == {"ATP002"}, report
            others = [remark for remark in report.remarks if remark not in amaxes]
            seen = Counter(f"{remark.code or remark.outcome} {names[remark.group]}" for remark in others)
            assert seen == {"FUSED tp": 4 * BLOCKS, f"{codes[report.phase]} dp": 6 * BLOCKS}, report
        assert [report.phase for report in reports] == ["forward", "backward"]
        return reports

    return case


# --- tools ------------------------------------------------------------------------------------------------
def _shards(mesh: DeviceMesh) -> list[Tensor]:
    """Two microbatches of this rank's rows."""
    x = shard_of(mesh, 2, 4, 2, fp8_cases.WIDTH).detach()
    return [part.clone().requires_grad_() for part in x]


def _train(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results of all microbatches, gradients of the parameters and buffers behind them."""
    outs = []
    for x in inputs:
        out = model(x)
        out = out.to_local() if isinstance(out, DTensor) else out
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        outs.append(out)
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [local(value) for value in (*outs, *grads, *model.buffers()) if value is not None]


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """See `NEAR`; no value is all zeros."""
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), index
        distance = ((a.float() - b.float()).norm() / b.float().norm()).item()
        assert distance <= NEAR, f"value {index} of {len(actual)}: {distance:.4f} away"


def groups_seen(reports: Sequence[Report], mesh: DeviceMesh) -> set[str]:
    """The dimensions of the mesh whose collectives are in the graphs."""
    names = {mesh.get_group(dim).group_name: dim for dim in ("dp", "tp")}
    return {names[remark.group] for report in reports for remark in report.remarks}


WEIGHTS = {"": False, "_fp8_weights": True}
#: Those that need torchao.
BY_TORCHAO = {
    **{f"dynamic_{part}{word}": _dynamic(part, fp8) for part in COMPILED for word, fp8 in WEIGHTS.items()},
    **{f"delayed_{part}_fp8_weights": _delayed(part, True) for part in COMPILED},
}
OWN = {
    **{f"delayed_{part}": _delayed(part, False) for part in COMPILED},
    # weights are quantized alike by both scalings, which are of activations
    "dynamic_in_graph": _in_graph(Current, fp8_weights=False),
    "delayed_in_graph_fp8_weights": _in_graph(Delayed, fp8_weights=True),
}
globals().update({f"case_{name}": case for name, case in (BY_TORCHAO | OWN).items()})
