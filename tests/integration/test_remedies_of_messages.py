"""Remedies that warnings, errors and notes name: each is followed word for word, and then it holds."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from compiled_training import QUICK, Mlp, start
from ranks import imagined_ranks
from scripts import run_forked
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import asynctp_passes
from asynctp_passes import (
    AsyncTPPass,
    Config,
    RegistryError,
    register_local,
    register_rowwise,
    unregister,
)
from asynctp_passes.config import ConfigError

X, W = torch.ones(4, 8), torch.ones(8, 8)


@pytest.fixture(autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group whose first rank this process is, and a cache of its own."""
    cache = str(tmp_path_factory.mktemp("cache"))
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache), imagined_ranks(2):
        start()
        yield
    torch._dynamo.reset()


def fused(program: Callable[..., Any], *tensors: Any, **options: Any) -> int:
    """How many chains of a program are fused."""
    start()
    torch.compile(program, backend="asynctp", options={"strict": "off", **QUICK, **options})(*tensors)
    return sum(len(report.fused) for report in asynctp_passes.reports())


# --- what dynamo does not trace ------------------------------------------------------------------------------------
def gathered_with_a_handle(x: Tensor, w: Tensor) -> Tensor:
    full = torch.empty(2 * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(full, x, async_op=True).wait()
    return full @ w


def gathered_without_a_handle(x: Tensor, w: Tensor) -> Tensor:
    full = torch.empty(2 * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(full, x)
    return full @ w


def gathered_by_nn_functional(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat(torch.distributed.nn.functional.all_gather(x)) @ w


def gathered_by_the_autograd_form(x: Tensor, w: Tensor) -> Tensor:
    return all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ w


class Gather(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return all_gather_tensor_autograd(x, 0, dist.group.WORLD)  # type: ignore[no-any-return]


BLOCK, HOOKED, UNHOOKED = Gather(), Gather(), Gather()
HOOKED.register_full_backward_hook(lambda module, grads_in, grads_out: None)


def checkpointed_in_sequence(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint_sequential([BLOCK], 1, x, use_reentrant=False) @ w  # type: ignore[no-any-return]


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(BLOCK, x, use_reentrant=False) @ w  # type: ignore[no-any-return]


def with_a_hook_of_the_module(x: Tensor, w: Tensor) -> Tensor:
    return HOOKED(x) @ w  # type: ignore[no-any-return]


def with_a_hook_of_the_output(x: Tensor, w: Tensor) -> Tensor:
    out = UNHOOKED(x)
    out.register_hook(lambda grad: None)
    return out @ w  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("hidden", "mended", "told"),
    [
        (gathered_with_a_handle, gathered_without_a_handle, "leave async_op out"),
        (gathered_by_nn_functional, gathered_by_the_autograd_form, "that end in _autograd"),
        (checkpointed_in_sequence, checkpointed, "call checkpoint for each part"),
        (with_a_hook_of_the_module, with_a_hook_of_the_output, "register the hook on a tensor"),
    ],
)
def test_a_call_that_hides_a_chain(
    hidden: Callable[..., Any], mended: Callable[..., Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = X.clone().requires_grad_()
    with caplog.at_level(logging.WARNING, "asynctp_passes"):
        assert fused(hidden, x, W) == 0
    assert told in caplog.text
    caplog.clear()
    torch._dynamo.utils.counters.clear()
    with caplog.at_level(logging.WARNING, "asynctp_passes"):
        assert fused(mended, x, W) > 0
    assert told not in caplog.text


# --- nothing to fuse -------------------------------------------------------------------------------------------------
def test_a_module_around_the_one_with_the_hooks(caplog: pytest.LogCaptureFixture) -> None:
    """The hooks of parallelize_module communicate, and those of the compiled module itself are outside."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    prepared = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    plan = {"": prepared, "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Replicate())}
    module = parallelize_module(Mlp(), mesh, plan)
    with caplog.at_level(logging.WARNING, "asynctp_passes"):
        around = nn.Sequential(module)
        found = fused(around, torch.ones(2, 16))
    assert found == 2
    assert "nothing to fuse" not in caplog.text


def column_alone(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def test_a_program_without_parallelism_is_parallelized(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asynctp_passes"):
        assert fused(nn.Sequential(Mlp()), torch.ones(2, 16), expect=1) == 0
    assert "no key of the plan matched a module" in caplog.text
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
    module = parallelize_module(nn.Sequential(Mlp()), mesh, plan)
    assert fused(module, torch.ones(2, 16), expect=1) == 1


# --- options ---------------------------------------------------------------------------------------------------------
def suggested(error: BaseException) -> str:
    found = re.search(r"did you mean '([^']*)'\?", str(error))
    assert found is not None, error
    return found[1]


def test_an_option_that_is_misspelt() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_options({"min_byte": 7})
    assert Config.from_options({suggested(caught.value): 7}).min_bytes == 7


def test_an_option_of_inductor_that_is_misspelt() -> None:
    def compiled(name: str) -> Any:
        return torch.compile(column_alone, backend="asynctp", options={name: True})

    with pytest.raises(Exception, match="did you mean") as caught:
        compiled("epilogue_fusio")(X, W)
    assert torch.equal(compiled(suggested(caught.value))(X, W), column_alone(X, W))


def test_a_variable_that_is_misspelt() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_options(environ={"ASYNCTP_STRIKT": "all"})
    assert Config.from_options(environ={suggested(caught.value): "all"}).strict == "all"


def test_options_in_a_dictionary() -> None:
    options = {"strict": "all"}
    with pytest.raises(ConfigError, match=re.escape("Config.from_options makes one of a dictionary")):
        AsyncTPPass(options)  # type: ignore[arg-type]
    assert AsyncTPPass(Config.from_options(options)).config.strict == "all"


def test_a_mesh_of_two_dimensions_is_sliced() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigError, match=re.escape('slice it first: mesh["tp"]')):
        Config(groups=mesh)
    assert Config(groups=mesh["tp"]).groups == (mesh["tp"].get_group().group_name,)


def gathered(x: Tensor, w: Tensor) -> Tensor:
    return all_gather_tensor(x, 0, dist.group.WORLD) @ w


def test_a_group_that_is_not_there() -> None:
    with pytest.raises(Exception, match="Pass the ProcessGroup or DeviceMesh itself, or its group_name"):
        fused(gathered, X, W, groups=("tp",))
    world = dist.group.WORLD
    assert world is not None
    for groups in (world, world.group_name, init_device_mesh("cpu", (2,))):
        assert fused(gathered, X, W, groups=groups) == 1


def maximum_and_sum(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(gathered(x, w).relu() @ w, "max", dist.group.WORLD)


def test_expect_asks_for_too_much() -> None:
    """One of two chains is missed."""
    with pytest.raises(Exception, match="Remedy") as caught:
        fused(maximum_and_sum, X, W, expect=3)
    found = re.search(r"Remedy: expect=(\d+) or less", str(caught.value))
    assert found is not None, caught.value
    assert fused(maximum_and_sum, X, W, expect=int(found[1])) == 1


# --- registration ----------------------------------------------------------------------------------------------------
_OPS = torch.library.Library("messages_like", "FRAGMENT")
_OPS.define("several.one(Tensor x) -> Tensor")
_OPS.define("several.two(Tensor x, int y) -> Tensor")
_OPS.define("write(Tensor! out, Tensor x) -> ()")
_OPS.define("gather(Tensor x, int size, str group_name) -> Tensor")
OPS = torch.ops.messages_like


def test_one_of_several_overloads_is_given() -> None:
    with pytest.raises(RegistryError, match="give one of") as caught:
        asynctp_passes.register_matmul(OPS.several, a="x", b="x")
    name = str(caught.value).rpartition("give one of ")[2].split(", ")[0].rpartition(".")[2]
    asynctp_passes.register_matmul(getattr(OPS.several, name), a="x", b="x")
    unregister(getattr(OPS.several, name))


def test_an_op_that_writes_is_registered_as_local() -> None:
    with pytest.raises(RegistryError, match="use register_local for it"):
        register_rowwise(OPS.write)
    register_local(OPS.write)
    unregister(OPS.write)


def test_the_size_of_a_collective_is_named() -> None:
    with pytest.raises(RegistryError, match="size must name the argument that is the number of ranks"):
        asynctp_passes.register_collective(OPS.gather, kind="all_gather", input="x", group="group_name")
    asynctp_passes.register_collective(OPS.gather, kind="all_gather", input="x", group="group_name", size="size")
    with pytest.raises(RegistryError, match="unregister it first"):
        register_local(OPS.gather)
    unregister(OPS.gather)
    register_local(OPS.gather)
    unregister(OPS.gather)


# --- graphs ----------------------------------------------------------------------------------------------------------
def multiplied_in_a_branch(x: Tensor, w: Tensor) -> Tensor:
    whole = all_gather_tensor(x, 0, dist.group.WORLD)
    return torch.cond(x.sum() > 0, lambda a, b: a @ b, lambda a, b: a @ b.t(), (whole, w))


def both_in_a_branch(x: Tensor, w: Tensor) -> Tensor:
    def times(a: Tensor, b: Tensor) -> Tensor:
        return all_gather_tensor(a, 0, dist.group.WORLD) @ b  # type: ignore[no-any-return]

    return torch.cond(x.sum() > 0, times, lambda a, b: times(a, b.t()), (x, w))


def test_a_branch_holds_the_collective_too() -> None:
    with torch.no_grad():
        assert fused(multiplied_in_a_branch, X, W) == 0
        (remark,) = (one for report in asynctp_passes.reports() for one in report.remarks)
        assert (remark.code, "must hold both or neither" in remark.hint) == ("ATP120", True)
        assert fused(both_in_a_branch, X, W) == 2


_OPS.define("mix(Tensor x) -> Tensor")
_OPS.impl("mix", torch.clone, "CPU")
torch.library.register_fake("messages_like::mix", torch.empty_like, lib=_OPS)


def test_an_op_that_a_note_names_is_registered() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return gathered(OPS.mix(x), w)

    def notes() -> str:
        return " ".join(note.text for report in asynctp_passes.reports() for note in report.notes)

    assert fused(program, X, W) == 1
    assert "messages_like.mix.default" in notes()
    assert "register_local" in notes()
    register_local(OPS.mix)
    try:
        assert fused(program, X, W) == 1
        assert "messages_like.mix.default" not in notes()
    finally:
        unregister(OPS.mix)


# --- frozen weights --------------------------------------------------------------------------------------------------
FREEZING = """
import torch, torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
import asynctp_passes

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x):
        return self.linear(all_gather_tensor(x, 0, dist.group.WORLD))

torch._inductor.config.freezing = True
torch._inductor.config.cpp.weight_prepack = {prepack}
options = {{"strict": "off", "fallback_by_default": True}}
with torch.no_grad():
    torch.compile(Layer().eval(), backend="asynctp", options=options)(torch.ones(16, 64, dtype=torch.bfloat16))
(report,) = asynctp_passes.reports()
print(len(report.fused), *(remark.hint for remark in report.missed))
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
def test_weights_are_frozen_without_packing(tmp_path: Path) -> None:
    """Inductor reads the option once in a process."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU does not multiply bfloat16")
    told = {}
    for prepack in (True, False):
        program = tmp_path / f"program_{prepack}.py"
        program.write_text(FREEZING.format(prepack=prepack), encoding="utf-8")
        done = run_forked(program)
        assert done.returncode == 0, done.stderr
        told[prepack] = done.stdout
    assert told[True].startswith("0 ")
    assert "set torch._inductor.config.cpp.weight_prepack = False before the first compile" in told[True]
    assert told[False].startswith("1")
