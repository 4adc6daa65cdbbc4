"""The programs of `tests/gpu`, as far as it goes without a GPU: what they call can run, what they expect is right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from profiles import thorough
from ranks import imagined_ranks
from torch import Tensor

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import cases
import compiled
import launched
import step
import stress
from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose import tiles
from asynctp_kernels.cuda.choose.tiles import pingpong, tiles_for
from asynctp_kernels.cuda.gemm import gemm
from asynctp_kernels.cuda.gemm.cublas import IN_BLOCKS
from asynctp_kernels.cuda.plans import fused

import asynctp_passes
from asynctp_passes.backend import asynctp
from asynctp_passes.ops.calls import signature
from asynctp_passes.tools.demo.model import ModelSizes
from asynctp_passes.torch_private import torch_ops

WORLDS = (2, 4, 8)
#: Inductor calls aten's kernels instead of compiling C++: its graph passes are the same.
QUICK = {"fallback_by_default": True} if "fallback_by_default" in torch._inductor.list_options() else {}


class Explained:
    """Stands for `torch.ops.asynctp`: remembers how each call would be run, instead of running it."""

    def __init__(self, world: int) -> None:
        self.world = world

    def __getattr__(self, op: str) -> Any:
        def explain(*args: Any, **options: Any) -> list[torch.Tensor]:
            self.choice = cuda.explain(signature(op).call(*args)._replace(**options), self.world)
            return []

        return explain


@pytest.mark.parametrize("world", WORLDS)
def test_stressed_calls_can_run(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the implementations that are named for it, on an H200, and by no other that overlaps."""
    monkeypatch.setattr(cases, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: None)
    monkeypatch.setattr(cuda.runtime.driver, "machine", lambda index: ((9, 0), 132, "NVIDIA H200"))
    ops = Explained(world)
    group: Any = mock.Mock(group_name="0")
    for case, implementations in stress.stressed(world):
        refused = {}
        for name in stress.ALL:  # forced, as there: a small call goes by another transport else
            try:
                with mock.patch.object(torch.ops, "asynctp", ops), cuda.forced(name):
                    cases.call(case, cases.draw(case), group)
            except RuntimeError as error:
                if f"{name!r} was asked for and cannot run" not in str(error):
                    raise
                refused[name] = str(error)
        assert tuple(name for name in stress.ALL if name not in refused) == implementations, f"{case.name}: {refused}"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    monkeypatch.setattr(cases, "device", lambda: torch.device("cpu"))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def large_products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes a minute for an fp8 product on CPU. In fp32 these integers are exact, too, and come in a moment."""
    in_fp8 = torch_ops.scaled_mm

    def product(
        a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
    ) -> Tensor:
        if a.shape[0] * a.shape[1] * b.shape[1] <= 160 * 128 * 256:
            return in_fp8(a, b, a_scale, b_scale, bias, dtype, fast)
        assert bias is None
        return ((a.float() * a_scale) @ (b.float() * b_scale)).to(dtype)

    monkeypatch.setattr(torch_ops, "scaled_mm", product)


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_timed_step_has_its_chains(rowwise: bool) -> None:
    """All collectives of a block are fused, in its forward and its backward."""
    sizes = ModelSizes(width=64, hidden=64, heads=8, kv_heads=4, sequence=64)
    asynctp_passes.clear_reports()
    with imagined_ranks(4):
        block = step.Sharded(sizes, 4, rowwise).to(torch.bfloat16)
        (function,) = step.compiled([block], dist.group.WORLD, asynctp, QUICK)
        function(torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)).float().sum().backward()
    summary = asynctp_passes.summary()
    assert (summary.fused, summary.missed, summary.skipped, summary.others) == (step.COLLECTIVES, 0, 0, 0)


@pytest.mark.usefixtures("large_products_in_fp32")
def test_stressed_calls_are_exact(alone: dist.ProcessGroup) -> None:
    """The plain program gives every bit that is expected, a wrong bit is counted, and all kinds of calls are there."""
    found = list(stress.stressed(1))
    assert {case.op for case, _ in found} == {"gather", "scatter", "all_reduce"}
    assert {case.scales for case, _ in found} > {f"{of_a}+{of_b}" for of_a, of_b in IN_BLOCKS}
    for case, implementations in found:
        call = next(stress.prepare(case, implementations, alone))
        assert call.expected.abs().max() <= 256, "what bf16 has every integer up to"
        result = call.run()
        call.compare(result)
        assert (call.made, int(call.wrong)) == (1, 0), case.name
        result[-1] += 1
        call.compare(torch.stack((result, call.expected)))
        assert (call.made, int(call.wrong)) == (3, 1), case.name


def test_pingpong_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of any size get those tiles, on few CTAs, where they can; and nothing else runs unseen."""
    others = [
        (dtype, precise, 64, 64, 64, 132, several, out_itemsize)
        for dtype, precise, several, out_itemsize in (
            (cases.FP8, True, False, 2), (cases.FP8, False, True, 2), (cases.FP8, False, False, 4),
            (torch.bfloat16, False, False, 4),
        )
    ]  # fmt: skip
    before = [tiles_for(*call) for call in others]
    grids = launched.GRIDS
    for module, name in ((tiles, "pingpong_is_faster"), (gemm, "_give_up"), *((module, "grid") for module in grids)):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(fused, "others_beside", fused.others_beside)
    launched.in_shares()
    launched.pingpong_everywhere()
    assert fused.others_beside(launched.PROGRAMS), "tiles are dealt out in shares, though the group is all ranks"
    assert [tiles_for(dtype, False, 64, 64, 64, 132) for dtype in (cases.FP8, torch.bfloat16)] == [
        pingpong(1),
        pingpong(2),
    ]
    assert [tiles_for(*call) for call in others] == before
    for module in grids:
        assert [module.grid(wanted, 132) for wanted in (1, 9, 1000)] == [1, 8, 8]
    with pytest.raises(SystemExit, match="no Gluon"):
        gemm._give_up("no Gluon")


@pytest.mark.parametrize("op", ["gather", "scatter"])
@pytest.mark.parametrize("copy", [True, False])
def test_collectives_in_flight_are_exact(op: str, copy: bool, alone: dist.ProcessGroup) -> None:
    inner = next(stress.prepare(*next(stress.stressed(1)), alone))
    call = stress.prepare_bulk(op, inner, alone, copy)
    call.compare(call.run())
    assert (call.made, int(call.wrong)) == (1, 0)
    assert call.expected.numel() == 128 * 64 + inner.expected.numel()


@pytest.fixture
def instant_products() -> Iterator[None]:
    """Products of CPU tensors are zeros: those of bf16 take minutes on one thread."""
    of_aten = torch.library.Library("aten", "IMPL")
    of_aten.impl("mm", lambda a, b: a.new_zeros(a.shape[0], b.shape[1]), "CPU")
    of_aten.impl("mm.out", lambda a, b, out: out.zero_(), "CPU")
    yield
    of_aten._destroy()


@pytest.mark.parametrize("name", [thorough(name) if "block" in name else name for name in compiled.PROGRAMS])
@pytest.mark.usefixtures("instant_products")
def test_compiled_programs_become_what_they_say(name: str) -> None:
    """On two ranks, one of which is this process, and whose collectives do nothing."""
    torch.compiler.reset()
    asynctp_passes.clear_reports()
    options = {} if name == "gather used twice" else QUICK  # an op of its backward has no kernel in aten
    with imagined_ranks(2):
        module, shape, *_ = compiled.made(name, "cpu")
        x = torch.randn(shape).bfloat16().requires_grad_()
        torch.compile(module, backend="asynctp", dynamic=False, fullgraph=True, options=options)(x).sum().backward()
    assert compiled.counted(asynctp_passes.reports()) == compiled.PROGRAMS[name][1]
