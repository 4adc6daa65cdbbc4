"""What four ranks of test_recipes do: tensor parallelism beside another way to be parallel, on a mesh of 2 x 2.

A case takes the mesh, with the dimensions "dp" (which stands for whatever the other way is) and "tp", compares training
compiled with eager training, and returns the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import SIZES, STRICT, assert_close, assert_fused, block, compiled, local, shard_of, start
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import asynctp_passes
from asynctp_passes import Report

BLOCKS = 2


def step(program: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Result and all gradients of one step, anew."""
    for leaf in (x, *parameters):
        leaf.grad = None
    out = program(x)
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    return [local(out), *(local(leaf.grad) for leaf in (x, *parameters) if leaf.grad is not None)]


# --- FSDP2 ------------------------------------------------------------------------------------------------
def case_fully_sharded_blocks(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Each block is compiled, then its parameters are sharded over "dp": one graph a block, without a break."""
    return _fully_sharded(mesh, hooks_inside=False)


def case_fully_sharded_blocks_with_their_hooks(mesh: DeviceMesh) -> tuple[Report, ...]:
    """The parameters are sharded first, so that FSDP's hooks belong to what is compiled."""
    return _fully_sharded(mesh, hooks_inside=True)


def _fully_sharded(mesh: DeviceMesh, *, hooks_inside: bool) -> tuple[Report, ...]:
    tp = mesh["tp"]  # one object: dynamo compiles a block anew for another one

    def model(compile_blocks: bool) -> nn.Module:
        blocks = [block(tp) for _ in range(BLOCKS)]
        for one in blocks:
            if compile_blocks and not hooks_inside:
                one.compile(backend="asynctp", options=STRICT, dynamic=False)
            fully_shard(one, mesh=mesh["dp"])
            if compile_blocks and hooks_inside:
                one.compile(backend="asynctp", options=STRICT, dynamic=False)
        return fully_shard(nn.Sequential(*blocks), mesh=mesh["dp"])

    start()
    x = shard_of(mesh, 2, 4, SIZES.width)
    ours, eager = model(True), model(False)
    actual = step(ours, x, list(ours.parameters()))
    reports, breaks = asynctp_passes.reports(), dict(counters["graph_break"])
    assert_close(actual, step(eager, x, list(eager.parameters())))
    assert_fused(reports, {"forward": 4, "backward": 4})  # both blocks run the same code
    assert not breaks, breaks
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    return reports


# --- context parallelism ----------------------------------------------------------------------------------
def case_context_parallel_attention(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Queries attend to keys and values of all "dp" ranks, which hold parts of the sequence; heads are over "tp"."""
    context, tensor = mesh["dp"].get_group(), mesh["tp"].get_group()
    torch.manual_seed(0)
    weights = [torch.randn(16, 8, requires_grad=True) for _ in range(3)] + [torch.randn(8, 16, requires_grad=True)]

    def attention(x: Tensor) -> Tensor:
        full = funcol.all_gather_tensor_autograd(x, 0, tensor)
        queries, keys, values = ((full @ weight).view(1, -1, 2, 4).transpose(1, 2) for weight in weights[:3])
        keys, values = (_over_context(part, context) for part in (keys, values))
        out = nn.functional.scaled_dot_product_attention(queries, keys, values)
        product = out.transpose(1, 2).reshape(-1, 8) @ weights[3]
        return funcol.reduce_scatter_tensor_autograd(product, "sum", 0, tensor).tanh()

    start()
    x = shard_of(mesh, 4, 16)
    actual = step(compiled(attention), x, weights)
    reports = asynctp_passes.reports()
    assert_close(actual, step(attention, x, weights))
    names = {mesh.get_group("tp").group_name: "tp", mesh.get_group("dp").group_name: "dp"}
    found = {(report.phase, remark.outcome, names[remark.group]) for report in reports for remark in report.remarks}
    assert found == {
        (phase, *kind) for phase in ("forward", "backward") for kind in (("FUSED", "tp"), ("SKIPPED", "dp"))
    }
    assert [len(report.fused) for report in reports] == [2, 2]
    return reports


def _over_context(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x[batch, heads, local sequence, width]` of all ranks, along the sequence."""
    first = x.permute(2, 0, 1, 3).contiguous()
    return funcol.all_gather_tensor_autograd(first, 0, group).permute(1, 2, 0, 3)


# --- pipeline parallelism ---------------------------------------------------------------------------------
class Stage(nn.Module):
    """One stage of a pipeline: two tensor-parallel layers."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in ((16, 32), (32, 16)))
        self.group = mesh.get_group().group_name

    def forward(self, x: Tensor) -> Tensor:
        """`x[batch, local sequence, 16]` to the same shape."""
        hidden = torch.relu(funcol.all_gather_tensor_autograd(x, 0, self.group) @ self.weights[0])
        return funcol.reduce_scatter_tensor_autograd(hidden @ self.weights[1], "sum", 0, self.group).tanh()


def case_pipeline_stages(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Two stages over "dp", one forward and one backward in turn, so that several microbatches are in flight."""
    start()
    number = mesh["dp"].get_local_rank()
    stage = Stage(mesh["tp"], seed=number)
    actual = _pipeline_step(mesh, compiled(stage))
    # torch 2.11 first calls a stage without gradients, to learn the shapes
    reports = tuple(report for report in asynctp_passes.reports() if report.phase != "inference")
    expected = _pipeline_step(mesh, Stage(mesh["tp"], seed=number))
    assert_close(actual, expected)
    assert_fused(reports, {"forward": 2, "backward": 2 if number else 1})  # the first stage's input has no gradient
    return reports


def _pipeline_step(mesh: DeviceMesh, module: nn.Module) -> list[Tensor]:
    """Gradients of a stage after a step of four microbatches."""
    number = mesh["dp"].get_local_rank()
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh["dp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: ((out - target) ** 2).sum())
    generator = torch.Generator().manual_seed(mesh["tp"].get_local_rank())
    x, target = (torch.randn(16, 16, generator=generator) for _ in range(2))
    if number == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
    return [local(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]


CASES = tuple(name.removeprefix("case_") for name in list(globals()) if name.startswith("case_"))
