"""Parts that the programs share which train, serve and measure a model of `demo.model`.

How the model is made: precision, recomputation and compiler, each chosen by a word, in torchtitan's order (float8
layers, tensor parallelism, compilation of each block, and by the caller FSDP2); and how a program starts with torchrun.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from asynctp_passes.backend import asynctp, split_options
from asynctp_passes.config import Config, ConfigError, can_be_written
from asynctp_passes.tools import profile
from asynctp_passes.tools.demo.model import Styles, Transformer, parallelize
from asynctp_passes.torch_private import intree, partitioner

BACKENDS = ("inductor", "intree", "asynctp")
PRECISIONS = ("fp32", "bf16", "fp8", "fp8-rowwise")
RECOMPUTE = ("none", "selective", "full")
_FIRST_SPEAKS_S = 10.0
T = TypeVar("T")


class RecipeError(ValueError):
    """A choice cannot be had here; the message names it, the limit and the remedy."""


def require(condition: bool, name: str, value: object, limit: str) -> None:
    """Check a command-line option.

    Raises:
        RecipeError: `condition` is false.
    """
    if not condition:
        raise RecipeError(f"--{name} {value} is not valid; it must be {limit}")


def require_output(name: str, path: Path | None, folder: bool = False) -> None:
    """Check that an option names a file, or a folder, that can be written; its folder need not be there yet.

    Raises:
        RecipeError: It cannot.
    """
    what = "a folder that can be written, or made" if folder else "a file that can be written, in a folder that can be"
    require(path is None or can_be_written(str(path), folder), name, path, what)


def compile_options(texts: Sequence[str]) -> dict[str, Any]:
    """`strict=all` and `triton.cudagraphs=True` as options of `torch.compile`, with Python values.

    Raises:
        RecipeError: One has no `=`, is unknown to us and to Inductor, or is ours and has a bad value.
    """
    options = dict(map(_parse_option, texts))
    try:
        split_options(options)
    except ConfigError as error:
        raise RecipeError(f"--option: {error}") from error
    return options


def _parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    require(bool(equals and name), "option", repr(text), "NAME=VALUE, as strict=all")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):
        return name, value


# --- processes -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Which process of torchrun's this is, of how many, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def gpu(self) -> bool:
        """True with GPUs, which talk by NCCL; on the CPU processes talk by gloo."""
        return self.device.type == "cuda"


def place(program: str, size: str = "debug") -> Place:
    """This process' place; one GPU each where there are GPUs.

    Args:
        program: The command without torchrun, for the message.
        size: The model's size: only `debug` is for the CPU.

    Raises:
        RecipeError: torchrun did not start it, there are too few GPUs, or the size needs GPUs.
    """
    if "WORLD_SIZE" not in os.environ:
        raise RecipeError(
            "start it with torchrun, one process a GPU, or 2 on a laptop: "
            f"torchrun --standalone --nproc-per-node 2 {program}"
        )
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    if gpus and ranks > gpus:
        raise RecipeError(f"--nproc-per-node {ranks} is not valid; it must be at most the {gpus} GPUs here")
    if not gpus and size != "debug":
        raise RecipeError(f"--size {size} needs GPUs, and there are none here; take --size debug")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)


def refuse(program: str, error: RecipeError) -> int:
    """Say why the program cannot run; the exit code.

    The first process of a host says it. torchrun stops all others when one has ended, so those give it time to; what
    only they know, they say then.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_SPEAKS_S)
    print(f"{program}: {error}", file=sys.stderr, flush=True)
    return 2


@contextlib.contextmanager
def joined(here: Place) -> Iterator[None]:
    """The default process group while it lasts. When an error leaves it, peers are not waited for."""
    if here.gpu:
        torch.cuda.set_device(here.device)
    dist.init_process_group("nccl" if here.gpu else "gloo", device_id=here.device if here.gpu else None)
    yield
    if here.gpu:  # NCCL does not end while there are CUDA graphs with its kernels
        torch.compiler.reset()
        gc.collect()
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def load_checkpoint(state: dict[str, Any], folder: Path, option: str, remedy: str) -> None:
    """Fill `state` with what a checkpoint has of the same names.

    Raises:
        RecipeError: It cannot be read, or lacks something; the message begins with `option` and ends with `remedy`.
    """
    try:
        load(state, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:  # which is a BaseException, with those of the ranks
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        said = str(cause).split("\n")[0][:200] or repr(cause)
        raise RecipeError(f"{option}: {folder} cannot be loaded ({said}); {remedy}") from error


# --- measuring -----------------------------------------------------------------------------------------------------
def peak_memory(device: torch.device, backend: str, group: ProcessGroup) -> int:
    """Bytes: the most that was allocated on the GPU since the last call, or of the process on the CPU.

    What the ranks of `group` share is counted too, which PyTorch's allocator does not know of.
    """
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak + _shared_bytes(backend, group)


def _shared_bytes(backend: str, group: ProcessGroup) -> int:
    if backend == "intree":
        return intree.shared_bytes(group.group_name)
    kernels = sys.modules.get("asynctp_kernels.cuda")  # not imported: nothing is shared
    return kernels.shared_bytes(group) if backend == "asynctp" and kernels is not None else 0


def release_shared(group: ProcessGroup) -> None:
    """Free what the ranks of `group` share, whichever backend made it; the next call that needs any makes it anew.

    Every rank calls it, when no GPU has work left that uses it, and no captured graph will. The last references may be
    in cycles: the memory is gone after a garbage collection.
    """
    intree.forget_workspace(group.group_name)
    kernels = sys.modules.get("asynctp_kernels.cuda")
    if kernels is not None:
        kernels.release(group)


def traced(step: Callable[[], T], path: Path, device: torch.device) -> tuple[T, profile.Summary]:
    """Run a step under the profiler: its result, and what this GPU did, of the trace that is written to `path`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        result = step()
        torch.cuda.synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return result, next(each for each in profile.summarize(profile.read(path)) if each.device == device.index)


# --- precision -----------------------------------------------------------------------------------------------------
def require_precision(precision: str) -> None:
    """Check that float8 can be had where it is asked for.

    Raises:
        RecipeError: torchao is missing or does not import.
    """
    if precision.startswith("fp8"):
        _torchao()


def _torchao() -> Any:
    try:
        import torchao.float8
        import torchao.float8.float8_tensor_parallel
    except ImportError as error:
        raise RecipeError(
            f"precision fp8 and fp8-rowwise need torchao, which does not import ({error}); "
            "pip install torchao (its version must suit your torch), or take bf16"
        ) from error
    return torchao.float8


def float8_layers(module: nn.Module, precision: str) -> None:
    """Make the linear layers of the blocks torchao's Float8Linear, in place; nothing at other precisions."""
    if not precision.startswith("fp8"):
        return
    float8 = _torchao()
    name = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}[precision]
    float8.convert_to_float8_training(
        module,
        config=float8.Float8LinearConfig.from_recipe_name(name),
        module_filter_fn=lambda _, name: name.split(".")[-1] != "head",
    )


def styles_of(precision: str) -> Styles:
    """torchao's own styles gather float8 for one scale a tensor; with one a row it wants the plain ones."""
    if precision != "fp8":
        return Styles()
    parallel = _torchao().float8_tensor_parallel
    return Styles(parallel.Float8ColwiseParallel, parallel.Float8RowwiseParallel, parallel.PrepareFloat8ModuleInput)


def parallelize_with(model: Transformer, mesh: DeviceMesh, precision: str, dim: int = 1) -> Transformer:
    """`demo.model.parallelize`, after float8 layers where `precision` asks for them."""
    float8_layers(model, precision)
    return parallelize(model, mesh, dim, styles_of(precision))


# --- compiler and recomputation --------------------------------------------------------------------------------------
def compiler(
    backend: str, group: str, device: torch.device, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Callable[[Any], Any]:
    """`torch.compile` with one of `BACKENDS`, as a function of what to compile.

    Args:
        backend: plain Inductor, Inductor with PyTorch's own async TP (on GPUs: on the CPU it is plain Inductor), or
            asynctp.
        group: The tensor-parallel group's name.
        device: Where the model is.
        options: Inductor's, and those of `Config`, which only asynctp is given.
        kwargs: Other arguments of `torch.compile`.
    """
    ours = () if backend == "asynctp" else Config.field_names()
    chosen = {name: value for name, value in (options or {}).items() if name not in ours}
    if backend == "intree" and device.type == "cuda":
        chosen = {**intree.options(group), **chosen}
    # not by name: torch knows that only of what is installed
    chosen_backend: Any = asynctp if backend == "asynctp" else "inductor"

    def compile_one(module: Any) -> Any:
        return torch.compile(module, backend=chosen_backend, options=chosen or None, **kwargs)

    return compile_one


def compile_blocks(model: Transformer, compile_one: Callable[[Any], Any], recompute: str) -> None:
    """Replace each block by its compiled form; in the backward, recompute it as `recompute` says.

    `full` keeps a block's input only. `selective` keeps what is dear to compute: attention, reduce-scatters and every
    second matmul.
    """
    for index, block in enumerate(model.blocks):
        if recompute == "selective":
            block = partitioner.recomputed(block, _selective_contexts)
        block = compile_one(block)
        model.blocks[index] = partitioner.recomputed(block) if recompute == "full" else block


def _selective_contexts() -> Any:
    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    keep = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        c10d.reduce_scatter_tensor.default,
    }
    matmuls = {aten.mm.default, aten._scaled_mm.default}
    count = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in matmuls:
            phase = "recompute" if context.is_recompute else "forward"
            count[phase] += 1
            return CheckpointPolicy.MUST_SAVE if count[phase] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
