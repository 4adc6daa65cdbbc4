"""Compiled programs whose gathers are made again in the backward: values, what the forward keeps, and reports."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import QUICK, STRICT, compiled, plain_layer, shard_of, start, train
from joint_graphs import marked
from ranks import imagined_ranks, run_ranks
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import asynctp_passes
from asynctp_passes import AsyncTPPass, Config, RematerializePartitioner, RematerializePass, Report
from asynctp_passes.torch_private import partitioner


# --- what becomes of it ----------------------------------------------------------------------------------------
@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is the first and the others do not exist."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with imagined_ranks(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        torch._dynamo.reset()


class Kept(CustomGraphPass):
    """A pass of the user's: counts the shapes that the forward keeps for the backward, and names inputs among these."""

    def __init__(self) -> None:
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.inputs: set[str] = set()

    def __call__(self, graph: fx.Graph) -> None:
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        if not any(name.startswith("tangents_") for name in names):
            (results,) = graph.output_node().args
            assert isinstance(results, list | tuple)
            self.inputs = {node.name for node in results if isinstance(node, Node) and node.op == "placeholder"}
            self.shapes = Counter(tuple(node.meta["val"].shape) for node in results[1:] if isinstance(node, Node))

    def uuid(self) -> None:
        return None


GATHERED = Counter([(16, 32)])
"""Its transpose, as the weight's gradient takes it."""

SHARD = (2, 4, 16)


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
    """The gathered tensor is not kept, but the shard is: of the input the program may write to, it reads no more."""
    never, (_, backward) = trained(mesh, rematerialize="never")
    assert "made again" not in str(backward)
    always, (forward, backward) = trained(mesh, rematerialize="always")
    assert never.shapes - always.shapes == GATHERED
    assert always.shapes - never.shapes == Counter([SHARD])
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


def test_an_input_that_autograd_sees_changed(mesh: DeviceMesh) -> None:
    """The graph returns the new value, and the input gets it afterwards. So the backward does not read the input.

    What was gathered is kept, or the graph's own copy of the input, where it has one.
    """
    layer, weights = plain_layer(mesh)
    kept = Kept()

    def program(hidden: Tensor) -> Tensor:
        return hidden.add_(layer(hidden))

    options = {**STRICT, "rematerialize": "always", "post_grad_custom_pre_pass": kept}
    start()
    x = shard_of(mesh, 2, 4, 16)
    train(lambda x: compiled(program, options=options)(x * 2), x, weights)
    assert len(asynctp_passes.reports()) == 2
    assert "primals_1" not in kept.inputs


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


# --- programs that went wrong when the partitioner was told what to compute again -----------------------------
def gathered(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def summed(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD)


def mlp_of(shard: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return summed(torch.sin(gathered(shard) @ w1) @ w2)


def shard_is_a_view(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """The shard is a view of a tensor that is computed from a buffer, and the program overwrites the buffer."""
    return [mlp_of((b * 0.5).sin().view(2, -1, 16).view(-1, 16), w1, w2)]


def twins(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """The same is computed twice: the partitioner makes one of both, and takes what is noted of the first."""
    largest = (b.float() * 0.1).amax()
    return [mlp_of(b.float() * 0.1, w1, w2) * largest]


def awaited(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """The result of a wait lies in the memory of what it waits for: an input, or a result."""
    h = funcol.all_reduce(b @ w0, "sum", dist.group.WORLD)
    return [h.detach(), mlp_of(funcol.wait_tensor(h), w1, w2) + mlp_of(funcol.wait_tensor(b), w1, w2)]


def changed_in_place(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """The input gets another value when the forward is done."""
    y = mlp_of(b, w1, w2)
    z = mlp_of(b.sin(), w1, w2)
    b.add_(y.detach())
    return [y * z]


def product_is_gathered(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    return [mlp_of(b @ w0.detach() + 1, w1, w2)]


class _Scaled(torch.autograd.Function):
    """The forward saves what only the backward needs: the gathered tensor, times a product of the buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, w0: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        ctx.save_for_backward(full * torch.cat([b @ w0, b.cumsum(0)]), w)
        return full @ w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        full, w = ctx.saved_tensors
        return funcol.reduce_scatter_tensor(dy @ w.t(), "sum", 0, dist.group.WORLD), full.t() @ dy, None, None


def only_the_backward_needs_it(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    return [summed(torch.sin(_Scaled.apply((w0[:4] * 2).sin(), w1, b, w0.detach())) @ w2)]


_calls: list[int] = []


def _noisy(x: Tensor) -> Tensor:
    _calls.append(1)
    return x * len(_calls)


_rms_norm: Any = torch.library.custom_op(
    "asynctp_remat_test::rms_norm", _noisy, mutates_args=(), schema="(Tensor x) -> Tensor"
)
_rms_norm.register_fake(torch.empty_like)
_rms_norm.register_autograd(lambda ctx, gradient: gradient)


def named_like_a_norm(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """An op of the program's own, which gives something else each time, whatever its name is."""
    full = gathered(b.sin())
    normed = _rms_norm(full)
    return [summed((full @ w1).sin() @ w2 + (normed @ w1).cos() @ w2) + (w0 * 0).sum()]


def part_of_a_larger_one(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """The shard is a third of a product: kept, it would keep all of that."""
    long = torch.cat([b] * 3) @ w0.detach()
    return [mlp_of(long[:4], w1, w2)]


class _Delayed(torch.autograd.Function):
    """The backward reads the buffer as it is then: of the input's gradient only, not of the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(x * b, 0, dist.group.WORLD)
        ctx.scale = b
        ctx.save_for_backward(full, w)
        return full @ w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        full, w = ctx.saved_tensors
        return funcol.reduce_scatter_tensor(dy @ w.t(), "sum", 0, dist.group.WORLD) * ctx.scale, full.t() @ dy, None


def scale_is_read_anyway(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    return [summed(torch.sin(_Delayed.apply((w0[:4] * 2).sin(), w1, b)) @ w2)]


def needed_at_another_place(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """Rank 0 needs it before the backward communicates, and rank 1 after that."""
    full = gathered((b + w0[:4]).sin())
    y = summed((full @ w1).cos() @ w2)
    return [torch.softmax(full, -1).square().sum(), y] if rank == 0 else [y]


def two_at_other_places(rank: int, b: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    """Two layers gather tensors of one size, and rank 0 needs the second elsewhere. A group does all or none."""
    y = summed(torch.relu(gathered((b + w0[:4]).sin()) @ w1) @ w2)
    full = gathered(y.sin())
    z = summed(torch.relu(full @ (w1 * 2)) @ w2)
    return [z, full.square().mean() if rank == 0 else z.sum() * 0]


FAULTS: dict[Callable[..., list[Tensor]], int] = {
    shard_is_a_view: 1,
    twins: 1,
    awaited: 0,
    changed_in_place: 1,
    product_is_gathered: 1,
    only_the_backward_needs_it: 0,
    named_like_a_norm: 1,
    part_of_a_larger_one: 0,
    scale_is_read_anyway: 1,
    needed_at_another_place: 0,
    two_at_other_places: 0,
}
"""Each program, and how many gathers are made again on rank 0."""


def gradients(rank: int, program: Callable[..., list[Tensor]], backend: str) -> tuple[list[Tensor], int]:
    """The results and gradients of a program that writes to its buffer and its results, and the bytes that it keeps."""
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    torch.manual_seed(1)
    weights = [torch.randn(16, size, requires_grad=True) for size in (16, 32)]
    weights.append(torch.randn(32, 16, requires_grad=True))
    b = torch.randn(4, 16, generator=torch.Generator().manual_seed(5 + rank))
    options = QUICK if backend == "inductor" else {**QUICK, "strict": "off", "rematerialize": "always"}
    _calls.clear()
    outs = torch.compile(lambda *args: program(rank, *args), backend=backend, options=options)(b, *weights)
    results = [out.detach().clone() for out in outs]
    node = next(out.grad_fn for out in outs if out.requires_grad)
    inputs = {one.untyped_storage().data_ptr() for one in (b, *weights, *outs)}
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in node.saved_tensors}  # type: ignore[union-attr]
    loss = sum((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outs if out.requires_grad)
    for written in (b, *(out for out in outs if not out.requires_grad)):
        written.data.fill_(3)
    loss.backward()  # type: ignore[union-attr]
    found = [weight.grad for weight in weights if weight.grad is not None]
    return [*results, *found], sum(size for place, size in kept.items() if place not in inputs)


def as_plain(rank: int, world_size: int) -> list[tuple[str, bool, int, int]]:
    """By program: whether values are those of plain Inductor, the gathers made again, and bytes that are kept less."""
    found = []
    for program in FAULTS:
        (plain, more), (values, less) = (gradients(rank, program, backend) for backend in ("inductor", "asynctp"))
        right = all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(plain, values, strict=True))
        reports = asynctp_passes.reports()
        again = sum(bool(one.rematerialized_bytes) for report in reports for one in report.remarks)
        found.append((program.__name__, right, again, more - less))
    return found


@pytest.mark.ranks
def test_gradients_are_those_of_plain() -> None:
    """Whatever the partitioner does with views, twins, waits, budgets or names, and whatever ranks do differently."""
    for found in run_ranks(2, as_plain, timeout_s=300):
        assert [(name, right) for name, right, _, _ in found] == [(program.__name__, True) for program in FAULTS]
        assert [(name, again) for name, _, again, _ in found] == [
            (one.__name__, count) for one, count in FAULTS.items()
        ]
        for name, _, again, less in found:
            assert (less > 0) == (again > 0), (name, less)


def within_a_budget(rank: int, world_size: int) -> list[bool]:
    """As plain, where torch recomputes more: `activation_memory_budget`."""
    right = []
    for budget in (0.0, 0.3):
        with torch._functorch.config.patch(activation_memory_budget=budget):
            (plain, _), (values, _) = (
                gradients(rank, product_is_gathered, backend) for backend in ("inductor", "asynctp")
            )
        right.append(all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(plain, values, strict=True)))
    return right


@pytest.mark.ranks
def test_a_budget_of_memory() -> None:
    for right in run_ranks(2, within_a_budget, timeout_s=200):
        assert right == [True, True]


# --- what else is compiled --------------------------------------------------------------------------------------
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
            seen.append(marked(graph))

        def uuid(self) -> None:
            return None

    _, (_, backward) = trained(mesh, rematerialize="always", joint_custom_post_pass=Own())
    assert seen == [[]], "it comes first"
    assert backward.others[0].rematerialized_bytes


class OwnPartitioner(CustomPartitionerFn):
    """A partitioner of the user's."""

    def __init__(self, identifier: bytes | None = b"own") -> None:
        self.calls, self.identifier = 0, identifier

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        self.calls += 1
        return partitioner.default_partition(gm, joint_inputs, **options)

    def uuid(self) -> bytes | None:
        return self.identifier


def test_the_users_own_partitioner_divides_the_graph(mesh: DeviceMesh) -> None:
    own = OwnPartitioner()
    _, (_, backward) = trained(mesh, rematerialize="always", custom_partitioner_fn=own)
    assert own.calls == 1
    assert backward.others[0].rematerialized_bytes


def test_one_of_the_process_is_called_too(mesh: DeviceMesh) -> None:
    own = OwnPartitioner()
    with torch._inductor.config.patch(custom_partitioner_fn=own):
        _, (_, backward) = trained(mesh, rematerialize="always")
    assert own.calls == 1
    assert backward.others[0].rematerialized_bytes


def test_its_key_is_a_part_of_the_caches() -> None:
    config = Config(rematerialize="always")
    keys = [RematerializePartitioner(config, OwnPartitioner(name)).uuid() for name in (b"one", b"two", None)]
    assert keys[0] != keys[1]
    assert keys[2] is None
    assert RematerializePartitioner(config).uuid() == RematerializePass(config).uuid()
    quiet = RematerializePartitioner(Config(rematerialize="always", report_file="reports"))
    assert pickle.dumps(quiet) == pickle.dumps(RematerializePartitioner(config)), "a part of the key, too"
    assert copy.deepcopy(quiet).config == quiet.config


def test_without_the_backend(mesh: DeviceMesh) -> None:
    """The passes by themselves, for compilers of one's own."""
    config = Config(rematerialize="always")
    patches = {
        "joint_custom_post_pass": RematerializePass(config),
        "custom_partitioner_fn": RematerializePartitioner(config),
        "post_grad_custom_post_pass": AsyncTPPass(config),
    }
    start()
    layer, weights = plain_layer(mesh)
    with torch._inductor.config.patch(patches):
        train(compiled(lambda x: layer(x * x), "inductor"), shard_of(mesh, 2, 4, 16), weights)
    forward, backward = asynctp_passes.reports()
    assert (len(forward.fused), len(backward.fused)) == (2, 2)
    assert backward.others[0].rematerialized_bytes
