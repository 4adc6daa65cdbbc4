"""Compiled programs whose gathers are made again in the backward: values, what the forward keeps, and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled_training import QUICK, STRICT, compiled, plain_layer, shard_of, start, train
from joint_graphs import tagged
from ranks import imagined_ranks, run_ranks
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import asynctp_passes
from asynctp_passes import AsyncTPPass, Config, RematerializePass, Report


# --- what becomes of it ----------------------------------------------------------------------------------------
@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is the first and the others do not exist."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with imagined_ranks(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        torch._dynamo.reset()


class Kept(CustomGraphPass):
    """A pass of the user's: counts the shapes of what the forward keeps for the backward."""

    def __init__(self) -> None:
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __call__(self, graph: fx.Graph) -> None:
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        if not any(name.startswith("tangents_") for name in names):
            (results,) = graph.output_node().args
            assert isinstance(results, list | tuple)
            self.shapes = Counter(tuple(node.meta["val"].shape) for node in results[1:] if isinstance(node, Node))

    def uuid(self) -> None:
        return None


GATHERED = Counter([(16, 32)])
"""Its transpose, as the weight's gradient takes it."""


def trained(mesh: DeviceMesh, program: Callable[..., Any] | None = None, **options: Any) -> tuple[Kept, list[Report]]:
    """Two linear layers, [2, 4, 16] on a rank and 32 hidden, compiled anew and trained for a step."""
    kept = Kept()
    start()
    layer, weights = plain_layer(mesh)

    def whole(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x * x, use_reentrant=False) if program is checkpoint else layer(x * x)
        return out

    options = {**STRICT, "post_grad_custom_pre_pass": kept, **options}
    train(compiled(whole, options=options), shard_of(mesh, 2, 4, 16), weights)
    return kept, list(asynctp_passes.reports())


def test_the_forward_keeps_the_shard(mesh: DeviceMesh) -> None:
    """The gathered tensor is not kept. The backward computes the shard from the input, which it needs anyway."""
    never, (_, backward) = trained(mesh, rematerialize="never")
    assert "made again" not in str(backward)
    always, (forward, backward) = trained(mesh, rematerialize="always")
    assert never.shapes - always.shapes == GATHERED
    assert always.shapes - never.shapes == Counter()
    assert (len(forward.fused), len(backward.fused)) == (2, 2)
    (again,) = backward.others
    assert (again.code, again.rematerialized_bytes) == ("ATP404", 2 * 16 * 16 * 4)
    assert not any(remark.rematerialized_bytes for remark in (*forward.remarks, *backward.fused))


def test_the_report_tells_of_it(mesh: DeviceMesh) -> None:
    _, (forward, backward) = trained(mesh, rematerialize="always")
    told = "1 gather of the forward is made again, so that nothing of what was gathered (2 KiB) is kept for"
    assert f"~ {told}" in " ".join(str(backward).split())
    assert "~" not in str(forward)
    assert told in " ".join(str(backward.others[0]).split())
    assert Report.from_json(backward.to_json()) == backward


@pytest.mark.parametrize("rematerialize", ["never", "always"])
def test_an_input_that_autograd_sees_changed(mesh: DeviceMesh, rematerialize: str) -> None:
    """Its new value comes out of the graph, and is copied behind it: what was gathered from the old one is kept."""
    layer, weights = plain_layer(mesh)

    def program(hidden: Tensor) -> Tensor:
        return hidden.add_(layer(hidden))

    options = {**STRICT, "rematerialize": rematerialize}
    start()
    x = shard_of(mesh, 2, 4, 16)
    train(lambda x: compiled(program, options=options)(x * 2), x, weights)
    _, backward = asynctp_passes.reports()
    assert not any(remark.rematerialized_bytes for remark in backward.remarks)


def overwritten(rank: int, world_size: int) -> list[bool]:
    """Gradients equal plain Inductor's where the input is written between forward and backward, as a receive does."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    layer, weights = plain_layer(mesh)

    def squared(x: Tensor) -> Tensor:
        out: Tensor = layer(x * x)
        return out

    right = []
    for program in (layer, squared):
        for write in (lambda x: x.data.fill_(3.0), lambda x: dist.broadcast(x.detach(), 0), lambda x: None):
            found = []
            for options in (None, {"rematerialize": "always"}):
                torch._dynamo.reset()
                backend, given = ("inductor", QUICK) if options is None else ("asynctp", {**STRICT, **options})
                x = shard_of(mesh, 2, 4, 16).detach()
                y = torch.compile(program, backend=backend, options=given)(x)
                write(x)
                y.square().sum().backward()
                found.append([weight.grad for weight in weights])
                for weight in weights:
                    weight.grad = None
            right.append(all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True)))
    return right


@pytest.mark.ranks
def test_an_input_that_is_written_before_the_backward() -> None:
    """It is the program's memory: what was gathered is kept, unless the backward needs the input anyway."""
    for right in run_ranks(2, overwritten, timeout_s=200):
        assert right == [True] * 6


def test_small_programs_stay_as_they_are(mesh: DeviceMesh) -> None:
    _, (_, backward) = trained(mesh)
    assert backward.others == ()


def test_with_activation_checkpointing_it_changes_nothing(mesh: DeviceMesh) -> None:
    runs = [trained(mesh, checkpoint, rematerialize=rematerialize) for rematerialize in ("never", "always")]
    (never, with_never), (always, with_always) = runs
    assert never.shapes == always.shapes
    assert [report.remarks for report in with_never] == [report.remarks for report in with_always]


def test_the_users_own_joint_pass_runs_too(mesh: DeviceMesh) -> None:
    seen = []

    class Own(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(tagged(graph))

        def uuid(self) -> None:
            return None

    _, (_, backward) = trained(mesh, rematerialize="always", joint_custom_post_pass=Own())
    assert seen == [[]], "it comes first"
    assert backward.others[0].rematerialized_bytes


def test_without_the_backend(mesh: DeviceMesh) -> None:
    """The passes by themselves, for compilers of one's own."""
    config = Config(rematerialize="always")
    patches = {"joint_custom_post_pass": RematerializePass(config), "post_grad_custom_post_pass": AsyncTPPass(config)}
    start()
    layer, weights = plain_layer(mesh)
    with torch._inductor.config.patch(patches):
        train(compiled(lambda x: layer(x * x), "inductor"), shard_of(mesh, 2, 4, 16), weights)
    forward, backward = asynctp_passes.reports()
    assert (len(forward.fused), len(backward.fused)) == (2, 2)
    assert backward.others[0].rematerialized_bytes
