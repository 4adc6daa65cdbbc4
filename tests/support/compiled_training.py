"""Programs that are compiled and trained on ranks, and compared with eager: models, tools, and how ranks run cases."""

from __future__ import annotations

import copy
import importlib
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed._functional_collectives as funcol
from ranks import imagined_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import asynctp_passes
from asynctp_passes import AsyncTPPass, Config, Report
from asynctp_passes.tools.demo.model import Block, ModelSizes, block_plan
from asynctp_passes.torch_private import process_groups

SIZES = ModelSizes(vocabulary=32, width=16, hidden=32, heads=4, layers=1, sequence=8)


#: Inductor calls aten's kernels instead of compiling C++, which takes most of the time; its graph passes are the same.
QUICK = {"fallback_by_default": True}
STRICT = {"strict": "all", **QUICK}


_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


#: torch 2.11 traces, recomputes and caches some programs in other ways.
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
NEWER_THAN_2_11 = _VERSION > (2, 11)
NEWER_THAN_2_14 = _VERSION > (2, 14)
#: torch 2.11 and 2.12 break the graph at `all_gather_tensor` along another dimension than the first.
GATHERS_ALONG_ANY = _VERSION > (2, 12)
#: The dimension that `plain_layer` gathers and scatters along: torch 2.12 breaks the graph with autograd, too.
PLAIN_DIM = 0 if _VERSION == (2, 12) else 1
#: Programs that a training step of `plain_layer`, compiled twice, gets from AOTAutograd's cache: torch 2.11 and 2.12
#: keep none there, with plain Inductor neither.
PLAIN_HITS = int(_VERSION > (2, 12))


class NotRunnable(Exception):
    """This torch cannot run the program, with plain Inductor neither; the message says what it says."""


@dataclass
class Outcome:
    """What one case came to on one rank."""

    reports: tuple[Report, ...] = ()
    error: str = ""
    not_runnable: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Mlp(nn.Module):
    """Two linear layers with biases, `x[batch, sequence, 16]` to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(nn.functional.silu(self.up(x)))
        return result


def mlp(mesh: DeviceMesh, *, sequence_parallel: bool = True) -> nn.Module:
    """The MLP with tensor parallelism; its activations are sharded over the sequence, or replicated."""
    torch.manual_seed(0)
    outside = Shard(1) if sequence_parallel else Replicate()
    module = nn.Sequential(Mlp())
    plan = {
        "0": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),)),
        "0.up": ColwiseParallel(),
        "0.down": RowwiseParallel(output_layouts=outside),
    }
    return parallelize_module(module, mesh, plan)


def block(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The demo's transformer block with tensor and sequence parallelism."""
    torch.manual_seed(0)
    return parallelize_module(Block(SIZES).to(dtype), mesh, block_plan())


def plain_layer(mesh: DeviceMesh) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """Two linear layers in functional collectives, without DTensor, and their weights."""
    group = mesh.get_group()
    torch.manual_seed(0)
    up, down = torch.randn(16, 32, requires_grad=True), torch.randn(32, 16, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        hidden = torch.relu(funcol.all_gather_tensor_autograd(x, PLAIN_DIM, group) @ up)
        return funcol.reduce_scatter_tensor_autograd(hidden @ down, "sum", PLAIN_DIM, group)

    return layer, [up, down]


def shard_of(mesh: DeviceMesh, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's random input, another one on each rank."""
    generator = torch.Generator().manual_seed(1 + mesh.get_rank())
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def start() -> None:
    """Forget what was compiled, counted and reported before."""
    torch._dynamo.reset()
    counters.clear()
    asynctp_passes.clear_reports()


def local(value: Tensor) -> Tensor:
    """A copy of a tensor's value, whole if it is a DTensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def train(program: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor] = ()) -> list[Tensor]:
    """Result, gradient of the input and of each parameter, after one forward and backward."""
    leaves = [x, *parameters]
    for leaf in leaves:
        leaf.grad = None
    out = program(x)
    (out.float() * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    missing = [index for index, leaf in enumerate(leaves) if leaf.grad is None]
    assert not missing, f"no gradient for leaves {missing}"
    return [local(out), *(local(leaf.grad) for leaf in leaves if leaf.grad is not None)]


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float | None = None) -> None:
    """Largest difference within a tolerance of the largest value, for each pair; layouts and dtypes equal."""
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), index
        limit = _TOLERANCE[b.dtype] if tolerance is None else tolerance
        worst, scale = (a.float() - b.float()).abs().max().item(), b.float().abs().max().item()
        assert scale > 0, f"value {index} is all zeros and proves nothing"
        assert worst <= limit * scale, f"value {index}: differs by {worst}, largest value {scale}"


def assert_fused(reports: Sequence[Report], expected: dict[str, int]) -> None:
    """So many fused collectives in each phase, and nothing else."""
    found = {report.phase: len(report.fused) for report in reports}
    others = [remark for report in reports for remark in (*report.missed, *report.others)]
    assert (found, others) == (expected, []), "\n".join(map(str, reports))
    assert len(reports) == len(expected), "a phase was compiled twice"


def compiled(program: Callable[..., Any], backend: str = "asynctp", **kwargs: Any) -> Callable[..., Any]:
    """`torch.compile`, strict for our backend, static unless told otherwise."""
    options = kwargs.pop("options", STRICT if backend == "asynctp" else QUICK)
    result: Callable[..., Any] = torch.compile(
        program, **{"dynamic": False, **kwargs}, backend=backend, options=options
    )
    return result


def compare(module: nn.Module, x: Tensor, fused: int, **kwargs: Any) -> tuple[Report, ...]:
    """Train compiled and eager: values agree, all collectives are fused forward and backward."""
    start()
    parameters = list(module.parameters())
    actual = train(compiled(module, **kwargs), x, parameters)
    reports = asynctp_passes.reports()
    assert_close(actual, train(module, x, parameters))
    assert_fused(reports, {"forward": fused, "backward": fused})
    return reports


class bytes_over_gloo:
    """gloo cannot move fp8 numbers. While this is open, all-gathers on CPU move bytes."""

    def __enter__(self) -> None:
        def gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
            out = x.new_empty((x.shape[0] * group_size, *x.shape[1:]))
            group = process_groups.process_group(group_name)
            whole, piece = out.view(torch.uint8), x.contiguous().view(torch.uint8)
            torch.distributed.all_gather_into_tensor(whole, piece, group)
            return out

        self.library = torch.library.Library("_c10d_functional", "IMPL")
        self.library.impl("all_gather_into_tensor", gather, "CPU")

    def __exit__(self, *_: object) -> None:
        self.library._destroy()


def own_cache(mesh: DeviceMesh) -> AbstractContextManager[Any]:
    """Caches of this rank alone: ranks that share a folder find each other's graphs, whichever is first."""
    folder = f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}/rank{mesh.get_rank()}"
    return mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder)


Case = Callable[[DeviceMesh], tuple[Report, ...]]


@contextmanager
def pair_in_one_process(folder: Path) -> Iterator[None]:
    """A group of two, and this process is its first rank: no reports, no compiled code, no C++, caches in `folder`."""
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder)}):
        start()
        with imagined_ranks(2), torch._inductor.config.patch(fallback_by_default=True):
            yield
        torch._dynamo.reset()


def run_cases(rank: int, world_size: int, names: Sequence[str], module: str = "backend_cases") -> dict[str, Outcome]:
    """Run cases of a module on this rank, one after the other; a case that fails does not stop the others."""
    warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for the functional collectives
    shape, dims = ((2, 2), ("dp", "tp")) if world_size == 4 else ((world_size,), ("tp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    cases = vars(importlib.import_module(module))
    return {name: _outcome(cases[f"case_{name}"], mesh) for name in names}


def _outcome(case: Case, mesh: DeviceMesh) -> Outcome:
    outcome = Outcome(facts={"uuid": AsyncTPPass(Config()).uuid(), "pid": os.getpid()})
    outcome.facts["dims"] = {mesh.get_group(dim).group_name: dim for dim in mesh.mesh_dim_names or ()}
    started = time.monotonic()
    try:
        outcome.reports = copy.deepcopy(case(mesh))
    except (NotRunnable, ModuleNotFoundError) as error:
        outcome.not_runnable = str(error)
    except Exception:
        outcome.error = traceback.format_exc()
    outcome.facts["seconds"] = time.monotonic() - started
    return outcome
