"""What the ranks of test_backend do: each case compiles a program with the backend and compares it with eager.

A case takes the mesh of all ranks and returns the reports of its compiles; it fails by an assertion. `CASES` has those
of two ranks in one dimension, `GRID_CASES` those of four ranks in two. All ranks run all cases, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from compiled_training import (
    _TOLERANCE,
    GATHERS_ALONG_ANY,
    NEWER_THAN_2_11,
    PLAIN_HITS,
    QUICK,
    STRICT,
    Mlp,
    NotRunnable,
    assert_close,
    assert_fused,
    block,
    bytes_over_gloo,
    compare,
    compiled,
    local,
    mlp,
    own_cache,
    plain_layer,
    shard_of,
    start,
    train,
)
from generated_code import as_ops
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import asynctp_passes
from asynctp_passes import Report
from asynctp_passes.tools.demo import recipe


# --- cases of two ranks -----------------------------------------------------------------------------------
def case_mlp_with_real_code(mesh: DeviceMesh) -> tuple[Report, ...]:
    return compare(mlp(mesh), shard_of(mesh, 1, 4, 16), 2, options={"strict": "all"})


def case_mlp_like_plain_inductor(mesh: DeviceMesh) -> tuple[Report, ...]:
    module, x = mlp(mesh), shard_of(mesh, 2, 4, 16)
    parameters = list(module.parameters())
    start()
    actual = train(compiled(module), x, parameters)
    reports = asynctp_passes.reports()
    assert_fused(reports, {"forward": 2, "backward": 2})
    torch._dynamo.reset()
    assert_close(actual, train(compiled(module, "inductor"), x, parameters))
    return reports


def case_block_float32_batch_1(mesh: DeviceMesh) -> tuple[Report, ...]:
    return compare(block(mesh), shard_of(mesh, 1, 4, 16), 4)


def case_block_bfloat16_batch_2(mesh: DeviceMesh) -> tuple[Report, ...]:
    return compare(block(mesh, torch.bfloat16), shard_of(mesh, 2, 4, 16, dtype=torch.bfloat16), 4)


def case_ways_to_compile(mesh: DeviceMesh) -> tuple[Report, ...]:
    """However it is said, it is the same compile: values and gradients are eager's, and all chains are fused."""
    layer, weights = plain_layer(mesh)
    x = shard_of(mesh, 2, 4, 16)
    expected = train(layer, x, weights)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layer(x)

    module = Module()
    module.compile(backend="asynctp", dynamic=False)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "decorator": torch.compile(backend="asynctp", fullgraph=True, dynamic=False)(layer),
        "method": module,
        "autotuned": torch.compile(layer, backend="asynctp", mode="max-autotune", dynamic=False),
    }
    for name, way in ways.items():
        start()
        with torch._inductor.config.patch(QUICK):
            assert_close(train(way, x, weights), expected)
        found = {report.phase: len(report.fused) for report in asynctp_passes.reports()}
        assert found == {"forward": 2, "backward": 2}, name
    return asynctp_passes.reports()


def case_hooks_of_the_compiled_module(mesh: DeviceMesh) -> tuple[Report, ...]:
    """The plan prepares the input of the compiled module itself: torch has its hooks in the graph if told to.

    Else the gather is in a graph of its own, and the chain that lies in two graphs is missed.
    """
    torch.manual_seed(0)
    prepared = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {"": prepared, "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
    module, x = parallelize_module(Mlp(), mesh, plan), shard_of(mesh, 2, 4, 16)
    start()
    train(compiled(module, options={**STRICT, "strict": "off"}), x)
    apart = asynctp_passes.reports()
    across = [report for report in apart if report.missed]
    assert [len(report.fused) for report in apart if report not in across] == [0, 1, 1], apart
    assert [remark.code for remark in apart[0].others] == ["ATP013"], apart[0]
    assert [[remark.code for remark in report.missed] for report in across] == [["ATP120"]], across
    with torch._dynamo.config.patch(wrap_top_frame=True):
        reports = compare(module, x, 2)
    # Inductor's cache may have the graph of another program, where the layers lie in a module
    layers = [[str(remark.module).rpartition(".")[2] for remark in report.fused] for report in reports]
    assert layers == [["up", "down"], ["down", "up"]], layers
    return reports


def case_block_gathered_again(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Every gather of the forward is made again in the backward, and every value is the same to the last bit."""
    module, x = block(mesh), shard_of(mesh, 2, 4, 16)
    parameters, found = list(module.parameters()), {}
    for rematerialize in ("never", "always"):
        start()
        found[rematerialize] = train(
            compiled(module, options={**STRICT, "rematerialize": rematerialize}), x, parameters
        )
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
    assert_close(found["always"], train(module, x, parameters))
    forward, backward = asynctp_passes.reports()
    assert (len(forward.fused), forward.others, len(backward.fused)) == (4, (), 4)
    assert [remark.rematerialized_bytes for remark in backward.others] == [2 * 8 * 16 * 4] * 2
    return forward, backward


def under_autocast(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """fp32 parameters and activations between layers; products of bf16, and so their gradients are converted."""

    def program(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result: Tensor = module(x)
        return result

    return program


def case_autocast(mesh: DeviceMesh) -> tuple[Report, ...]:
    """The input gradients of QKV, gate and up are summed, and reduced, in fp32: bit for bit what eager does."""
    torch.manual_seed(3)
    whole = torch.randn(2, 4, 16, requires_grad=True)
    programs = ((block(mesh), shard_of(mesh, 1, 4, 16), 4), (mlp(mesh, sequence_parallel=False), whole, 1))
    found: list[Report] = []
    for module, x, fused in programs:
        start()
        program, parameters = under_autocast(module), list(module.parameters())
        actual = train(compiled(program), x, parameters)
        reports = asynctp_passes.reports()
        assert_close(actual, train(program, x, parameters), tolerance=0)
        assert_fused(reports, {"forward": fused, "backward": fused})
        found += reports
    notes = [remark.message for report in found if report.phase == "backward" for remark in report.fused]
    assert sum("is converted before it is sent" in note for note in notes) == 3, notes
    return tuple(found)


def case_functional_collectives(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Gather and scatter along each dimension, as one graph; the contraction dimension is gathered in the last."""
    group = mesh.get_group()

    def program(x: Tensor, up: Tensor, down: Tensor, wide: Tensor) -> list[Tensor]:
        outs = []
        for dim in (0, 1) if GATHERS_ALONG_ANY else (0,):
            hidden = funcol.all_gather_tensor(x, dim, group) @ up
            outs.append(funcol.reduce_scatter_tensor(torch.relu(hidden) @ down, "sum", dim, group))
        if GATHERS_ALONG_ANY:
            outs.append(funcol.all_gather_tensor(x, 2, group) @ wide)
        outs.append(funcol.reduce_scatter_tensor(torch.relu(x) @ up, "avg", 2, group))
        return outs

    start()
    x = shard_of(mesh, 2, 4, 16).detach()
    torch.manual_seed(0)
    weights = torch.randn(16, 32), torch.randn(32, 16), torch.randn(32, 8)
    actual = compiled(program, fullgraph=True)(x, *weights)
    reports = asynctp_passes.reports()
    assert_close(actual, [local(out) for out in program(x, *weights)])
    assert_fused(reports, {"inference": 6 if GATHERS_ALONG_ANY else 3})
    return reports


def case_region_compiled_once(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Two calls of a layer run one subgraph, with fused ops in it; what is gathered outside of one is missed."""
    if not NEWER_THAN_2_11:
        raise NotRunnable("AOTAutograd does not trace what dynamo made of an autograd function in a region: fwd_body_1")
    layer, weights = plain_layer(mesh)
    region = torch.compiler.nested_compile_region(layer)
    halves = torch.compiler.nested_compile_region(lambda x, up, down: torch.relu(x @ up) @ down)
    start()
    x = shard_of(mesh, 2, 4, 16)
    # with dynamic sizes a region gives its caller numbers besides tensors
    actual = train(compiled(lambda x: region(region(x)), fullgraph=True, dynamic=True), x, weights)
    assert_close(actual, train(lambda x: layer(layer(x)), x, weights))
    reports = asynctp_passes.reports()
    assert_fused(reports, {"forward": 2, "backward": 2})
    start()  # without them; and None where an input needs no gradient
    data = x.detach()
    actual = train(compiled(lambda x: x * region(data) * region(data + 1), fullgraph=True), x, weights)
    assert_close(actual, train(lambda x: x * layer(data) * layer(data + 1), x, weights))
    start()

    def outside(x: Tensor, *weights: Tensor) -> Tensor:
        return halves(halves(funcol.all_gather_tensor(x, 0, mesh.get_group()), *weights), *weights)

    with torch.no_grad():
        compiled(outside, fullgraph=True, options={**STRICT, "strict": "off"})(x, *weights)
    (remark,) = (remark for report in asynctp_passes.reports() for remark in report.remarks)
    assert (remark.outcome, remark.code) == ("MISSED", "ATP120"), remark
    return reports


def case_subgraphs_after_a_collective(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Each call of a subgraph has to come after another collective: of a region, also with any sizes, of a branch."""
    group = mesh.get_group()
    region = torch.compiler.nested_compile_region(lambda x, w: funcol.all_reduce(x @ w, "sum", group))

    def regions(x: Tensor, w: Tensor) -> Tensor:
        x = funcol.all_reduce(x, "avg", group)
        return region(region(x, w), w)

    def branches(x: Tensor, w: Tensor) -> Tensor:
        total = funcol.all_reduce(x.sum(), "sum", group)
        one, two = (lambda x, k=k: funcol.all_reduce(x * k, "sum", group) for k in (1, 2))
        return torch.cond(total > 0, one, two, (x,)) @ w

    torch.manual_seed(0)
    x, w = torch.randn(4, 16) + mesh.get_rank(), torch.randn(16, 16) / 16
    for program, dynamic in ((regions, False), (regions, True), (branches, False)):
        start()
        with torch.no_grad():
            actual = compiled(program, fullgraph=True, dynamic=dynamic, options={**STRICT, "strict": "off"})(x, w)
            assert_close([actual], [program(x, w)])
    return asynctp_passes.reports()


def case_without_sequence_parallelism(mesh: DeviceMesh) -> tuple[Report, ...]:
    """The products are all-reduced, forward and backward; 3 rows cannot be divided among the ranks."""
    torch.manual_seed(2)
    reports = compare(mlp(mesh, sequence_parallel=False), torch.randn(2, 4, 16, requires_grad=True), 1)
    odd = compare(mlp(mesh, sequence_parallel=False), torch.randn(1, 3, 16, requires_grad=True), 1)
    assert {remark.op for report in (*reports, *odd) for remark in report.fused} == {"asynctp::matmul_all_reduce"}
    assert {remark.group_size for report in reports for remark in report.fused} == {mesh.size()}
    return reports


def case_dynamic_rows_all_reduced(mesh: DeviceMesh) -> tuple[Report, ...]:
    """A sum of two products with any number of rows, in another layout."""
    group = mesh.get_group()

    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        total = torch.relu(x) @ w + x.flatten(0, 1).sigmoid().matmul(v).view(*x.shape[:2], 8)
        return funcol.all_reduce(total.transpose(0, 1), "avg", group) * 2

    start()
    torch.manual_seed(0)
    weights = torch.randn(16, 8), torch.randn(16, 8)
    function = compiled(program, fullgraph=True, dynamic=True)
    for rows in (4, 5, 7):
        x = shard_of(mesh, 2, rows, 16).detach()
        assert_close([function(x, *weights)], [program(x, *weights)])
    assert_fused(asynctp_passes.reports(), {"inference": 1})
    return asynctp_passes.reports()


def case_all_to_all(mesh: DeviceMesh) -> tuple[Report, ...]:
    """A sharding moves from columns to rows, and back in the backward: no miss, as on GPUs."""
    module = nn.Sequential(nn.Linear(16, 8 * mesh.size(), bias=False))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))}
    parallelize_module(module, mesh, plan)
    start()
    x, weights = shard_of(mesh, 4, 16), list(module.parameters())
    actual = train(compiled(module), x, weights)
    reports = asynctp_passes.reports()
    assert_close(actual, train(module, x, weights))
    assert {report.phase: len(report.fused) for report in reports} == {"forward": 1, "backward": 1}
    assert [remark.name for report in reports for remark in report.others] == ["ALL_TO_ALL", "ALL_TO_ALL"]
    return reports


def case_dynamic_rows_scattered(mesh: DeviceMesh) -> tuple[Report, ...]:
    """A collective without a guard: rows that the ranks do not divide raise on every rank, as eager, and no rank waits.

    A rank that has other rows than its peers is not tried: there eager's peers wait.
    """
    scatter, group = torch.ops._c10d_functional.reduce_scatter_tensor, mesh.get_group().group_name

    def program(x: Tensor, w: Tensor) -> Tensor:
        result: Tensor = torch.ops._c10d_functional.wait_tensor(scatter(x @ w, "sum", mesh.size(), group))
        return result

    start()
    torch.manual_seed(0)
    w, function = torch.randn(16, 8), compiled(program, fullgraph=True)
    for rows in (16, 15, 24, 7, 8):
        x = shard_of(mesh, rows, 16).detach()
        torch._dynamo.mark_dynamic(x, 0)
        if rows % mesh.size() == 0:
            assert_close([function(x, w)], [program(x, w)])
            continue
        for run in (program, function):
            with pytest.raises((RuntimeError, ValueError), match=f"{rows}"):
                run(x, w)
    assert_fused(asynctp_passes.reports(), {"inference": 1})
    return asynctp_passes.reports()


def case_scales_behind_the_product(mesh: DeviceMesh) -> tuple[Report, ...]:
    """A rowwise scaled product in torchao's backward form: at least as near to fp64 as the program itself."""
    group = mesh.get_group()

    def program(a: Tensor, w: Tensor, row: Tensor, column: Tensor) -> Tensor:
        one = torch.ones((), dtype=torch.float32)
        product = torch._scaled_mm(a, w.t(), one, one, out_dtype=torch.bfloat16)
        scaled = (product * (row * column)).to(torch.bfloat16)
        return funcol.reduce_scatter_tensor(scaled, "sum", 0, group)

    a, w = (shard_of(mesh, 64, 64).detach().to(torch.float8_e4m3fn) for _ in range(2))
    row, column = (shard_of(mesh, *shape).detach().abs() + 0.5 for shape in ((64, 1), (1, 64)))
    try:
        eager = program(a, w, row, column)
    except (RuntimeError, NotImplementedError) as error:
        raise NotRunnable(str(error)) from None
    start()
    ours = compiled(program, fullgraph=True)(a, w, row, column)
    total = a.double() @ w.double().t() * row.double() * column.double()
    torch.distributed.all_reduce(total)
    exact = total.chunk(mesh.size())[mesh.get_rank()]
    errors = [((out.double() - exact).norm() / exact.norm()).item() for out in (ours, eager + 0)]
    assert 0 < errors[0] <= errors[1] < 1e-2, errors
    assert_fused(asynctp_passes.reports(), {"inference": 1})
    return asynctp_passes.reports()


def case_dynamic_sequence(mesh: DeviceMesh) -> tuple[Report, ...]:
    """One compile serves three sequence lengths."""
    start()
    module = mlp(mesh)
    parameters = list(module.parameters())
    program = compiled(module, dynamic=True, fullgraph=True)
    for sequence in (4, 6, 10):
        x = shard_of(mesh, 2, sequence, 16)
        with torch.compiler.set_stance("default" if sequence == 4 else "fail_on_recompile"):
            actual = train(program, x, parameters)
        assert_close(actual, train(module, x, parameters))
    assert_fused(asynctp_passes.reports(), {"forward": 2, "backward": 2})
    return asynctp_passes.reports()


def case_result_used_on_one_rank(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Only the first rank looks at what all of them reduce; all take part in it."""
    layer, weights = plain_layer(mesh)
    group, first = mesh.get_group(), mesh.get_rank() == 0
    seen: list[Tensor] = []

    def program(x: Tensor) -> tuple[Tensor, Tensor | None]:
        largest = funcol.all_reduce(x.detach().abs().amax(), "max", group)
        return layer(x), largest if first else None

    def looked_at(function: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            out, largest = function(x)
            seen.extend([] if largest is None else [local(largest)])
            return out  # type: ignore[no-any-return]

        return run

    start()
    x = shard_of(mesh, 2, 4, 16)
    actual = train(looked_at(compiled(program)), x, weights)
    reports = asynctp_passes.reports()
    assert_close(actual, train(looked_at(program), x, weights))
    assert len({value.item() for value in seen}) == int(first)
    return reports


class ScaledGradient(torch.autograd.Function):
    """The identity. All ranks reduce the sum of the gradient's squares, and the first alone scales by it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, first: bool) -> Tensor:
        ctx.group, ctx.first = group, first
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        total = funcol.all_reduce(grad.square().sum(), "sum", ctx.group)
        return grad * total.rsqrt() if ctx.first else grad.clone(), None, None


def case_gradient_used_on_one_rank(mesh: DeviceMesh) -> tuple[Report, ...]:
    """The same in a backward of the program's own."""
    layer, weights = plain_layer(mesh)
    group, first = mesh.get_group().group_name, mesh.get_rank() == 0

    def program(x: Tensor) -> Tensor:
        return layer(ScaledGradient.apply(x, group, first))

    start()
    x = shard_of(mesh, 2, 4, 16)
    actual = train(compiled(program), x, weights)
    reports = asynctp_passes.reports()
    assert_close(actual, train(program, x, weights))
    assert [remark.code for remark in reports[1].others] == ["ATP002"], reports[1]
    return reports


def case_no_grad(mesh: DeviceMesh) -> tuple[Report, ...]:
    return _inference(mesh, torch.no_grad())


def case_inference_mode(mesh: DeviceMesh) -> tuple[Report, ...]:
    return _inference(mesh, torch.inference_mode())


def _inference(mesh: DeviceMesh, mode: AbstractContextManager[None]) -> tuple[Report, ...]:
    start()
    module = mlp(mesh)
    with mode:
        x = shard_of(mesh, 2, 4, 16).detach()
        assert_close([compiled(module, fullgraph=True)(x)], [module(x)])
    assert_fused(asynctp_passes.reports(), {"inference": 2})
    return asynctp_passes.reports()


def case_checkpoint_of_plain_tensors(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Full activation checkpointing: the backward graph has the forward's collectives again."""
    layer, weights = plain_layer(mesh)

    def program(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=False)
        return out.tanh()

    start()
    x = shard_of(mesh, 2, 4, 16)
    actual = train(compiled(program), x, weights)
    reports = asynctp_passes.reports()
    assert_close(actual, train(program, x, weights))
    assert_fused(reports, {"forward": 2, "backward": 3 if NEWER_THAN_2_11 else 2})  # 2.11 recomputes less
    return reports


def case_checkpoint_of_dtensors(mesh: DeviceMesh) -> tuple[Report, ...]:
    return _checkpoint(mlp(mesh), shard_of(mesh, 2, 4, 16))


def case_checkpoint_of_dtensor_attention(mesh: DeviceMesh) -> tuple[Report, ...]:
    """torch 2.12 and 2.13 cannot compile this: they take a mesh among what the forward saves for a tensor."""
    return _checkpoint(block(mesh).attention, shard_of(mesh, 2, 4, 16))


def case_checkpoint_of_dtensor_block(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Attention and feed-forward, with their norms and residuals."""
    return _checkpoint(block(mesh), shard_of(mesh, 2, 4, 16), fused=4)


def case_selective_checkpoint_of_dtensor_block(mesh: DeviceMesh) -> tuple[Report, ...]:
    """torchtitan's policy by op: attention, reduce-scatters and every second matmul are saved."""
    return _checkpoint(block(mesh), shard_of(mesh, 2, 4, 16), fused=4, context_fn=recipe._selective_contexts)


def _checkpoint(module: Any, x: Tensor, fused: int = 2, **kwargs: Any) -> tuple[Report, ...]:
    """Train with activation checkpointing: compiled with our backend and eager; where it fails, with Inductor alone.

    Every collective is fused, but recomputed gathers that only a weight's gradient wants: those run beside products.
    """
    parameters = list(module.parameters())

    def program(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(module, x, use_reentrant=False, **kwargs)
        return out

    def attempt(backend: str) -> list[Tensor] | str:
        start()
        try:
            return train(compiled(program, backend), x, parameters)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    ours, reports = attempt("asynctp"), asynctp_passes.reports()
    if isinstance(ours, str):
        plain = attempt("inductor")
        assert plain == ours, f"ours fails in another way: {plain} | {ours}"
        raise NotRunnable(ours)
    assert_close(ours, train(module, x, parameters))
    forward, backward = reports
    assert not (*forward.notes, *backward.notes)
    assert (len(forward.fused), forward.missed, forward.others) == (fused, (), ()), forward
    assert len(backward.fused) >= fused, backward
    assert {remark.code for remark in (*backward.missed, *backward.others)} <= {"ATP404"}, backward
    return forward, backward


def case_selective_checkpoint_of_plain_tensors(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Matmuls and reduce-scatters are saved, the latter before their wait; gathers are redone.

    The recomputed gather of the input then feeds a weight's gradient only: it starts where the program starts it, and
    is waited for after the products that follow, in the code that Inductor makes too.
    """
    layer, weights = plain_layer(mesh)
    spy = SavedScatters()

    def inner(x: Tensor) -> Tensor:
        return layer(x.sin()).sin()

    def program(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(inner, x, use_reentrant=False, context_fn=_saving_matmuls_and_scatters)
        return out.tanh()

    def attempt() -> list[Tensor]:
        return train(compiled(program, options={**STRICT, "post_grad_custom_post_pass": spy}), x, weights)

    start()
    x = shard_of(mesh, 2, 4, 16)
    actual, codes = run_and_get_code(attempt)
    forward, backward = asynctp_passes.reports()
    assert_close(actual, train(program, x, weights))
    assert [len(report.fused) for report in (forward, backward)] == [2, 2]
    if NEWER_THAN_2_11:  # 2.11 saves and recomputes other tensors
        assert spy.returned_before_the_wait, "no un-waited scatter was saved"
        assert spy.waited_for_only, "no saved scatter was waited for"
        assert [remark.code for remark in backward.others] == ["ATP404"], backward
        calls = [line for line in as_ops(codes[-1]).splitlines() if "= torch.ops." in line]
        ops = ("all_gather_matmul.", "asynctp.all_gather.", "matmul_reduce_scatter.", "asynctp.wait.")
        places = [max(index for index, call in enumerate(calls) if op in call) for op in ops]
        assert places == sorted(places), calls
    return forward, backward


def case_scatter_beside_a_product(mesh: DeviceMesh) -> tuple[Report, ...]:
    """No matmul makes what is scattered. In the code that Inductor makes, a product runs before it is waited for."""
    group = mesh.get_group()

    def program(x: Tensor, w: Tensor, gate: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        shard = funcol.reduce_scatter_tensor(gate.sin(), "sum", 0, group).cos()
        return shard, funcol.reduce_scatter_tensor(x @ w, "sum", 0, group), wide @ wide

    start()
    inputs = [shard_of(mesh, *shape).detach() for shape in ((4, 8), (8, 4), (1024, 1024), (1600, 1600))]
    actual, codes = run_and_get_code(compiled(program), *inputs)
    assert_close(list(actual), list(program(*inputs)))
    (report,) = asynctp_passes.reports()
    assert [remark.code for remark in report.others] == ["ATP405"], report
    calls = [
        line.strip()
        for line in codes[-1].splitlines()
        if re.search(r"buf\d+ = (torch\.ops|asynctp_)|extern_kernels", line)
    ]
    ops = ("asynctp_reduce_scatter_", "mm", "asynctp_wait_")
    places = [next(index for index, call in enumerate(calls) if op in call) for op in ops]
    assert places == sorted(places), calls
    started, _, waited = (calls[place] for place in places)
    source = re.search(r"reduce_scatter_\w+\((\w+)\)", started)
    assert source is not None, started
    assert waited.endswith(f", {source[1]})"), f"its memory is free before: {started}; {waited}"
    return (report,)


def _saving_matmuls_and_scatters() -> Any:
    return _saving({torch.ops.aten.mm.default, torch.ops._c10d_functional.reduce_scatter_tensor.default})


def _saving_matmuls() -> Any:
    return _saving({torch.ops.aten.mm.default})


def _saving(saved: set[Any]) -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class SavedScatters(CustomGraphPass):
    """Sees whether a scatter is returned before its wait, and whether a graph waits for one of its inputs."""

    def __init__(self) -> None:
        self.returned_before_the_wait = self.waited_for_only = False

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            returned = any(user.op == "output" for user in node.users)
            self.returned_before_the_wait |= returned and "reduce_scatter_tensor" in str(node.target)
            self.waited_for_only |= "wait_tensor" in str(node.target) and node.args[0].op == "placeholder"

    def uuid(self) -> None:
        return None


def case_selective_checkpoint_of_dtensors(mesh: DeviceMesh) -> tuple[Report, ...]:
    return _checkpoint(mlp(mesh), shard_of(mesh, 2, 4, 16), context_fn=_saving_matmuls_and_scatters)


class SumOfRanks(torch.autograd.Function):
    """The all-reduce after a row-sharded layer: gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def case_saved_matmuls_before_an_all_reduce(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Matmuls alone are saved, and the backward needs none of the last one: the sum is kept in its place, and fused."""
    group = mesh.get_group()
    torch.manual_seed(0)
    up, down = torch.randn(16, 32, requires_grad=True), torch.randn(32, 16, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return x + SumOfRanks.apply(torch.relu(x.sin() @ up) @ down, group)

    def program(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(inner, x, use_reentrant=False, context_fn=_saving_matmuls)
        return out

    start()
    x = shard_of(mesh, 8, 16)
    actual = train(compiled(program), x, (up, down))
    reports = asynctp_passes.reports()
    assert_close(actual, train(program, x, (up, down)))
    assert_fused(reports, {"forward": 1})  # the backward has no collective left
    return reports


def case_compile_on_one_rank(mesh: DeviceMesh) -> tuple[Report, ...]:
    """The graph names its groups by objects, which are the same on all ranks, instead of by name."""
    return _on_one_rank(mesh, mlp, 2)


def case_block_compiled_on_one_rank(mesh: DeviceMesh) -> tuple[Report, ...]:
    """With attention."""
    return _on_one_rank(mesh, block, 4)


def _on_one_rank(mesh: DeviceMesh, made: Callable[[DeviceMesh], nn.Module], fused: int) -> tuple[Report, ...]:
    from torch.distributed import config as distributed_config

    if not NEWER_THAN_2_11:
        raise NotRunnable("torch 2.11 names groups by strings under compile_on_one_rank too")
    arguments: list[Any] = []
    with distributed_config.patch(compile_on_one_rank=True):
        one_rank_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        spy = {"post_grad_custom_post_pass": GroupSpy(arguments)}
        reports = compare(made(one_rank_mesh), shard_of(mesh, 2, 4, 16), fused, options={**STRICT, **spy})
    assert arguments, "no collective was seen"
    assert not any(isinstance(argument, str) for argument in arguments), arguments
    return reports


class GroupSpy(CustomGraphPass):
    """Keeps the group argument of every all-gather and reduce-scatter."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __call__(self, graph: fx.Graph) -> None:
        kept = ("all_gather_into_tensor", "reduce_scatter_tensor")
        self.seen += [node.args[-1] for node in graph.nodes if any(name in str(node.target) for name in kept)]

    def uuid(self) -> None:
        return None


def case_torchao_tensorwise(mesh: DeviceMesh) -> tuple[Report, ...]:
    """fp8 training, compiled, against the same program in plain Inductor."""
    module = _float8_mlp(mesh)
    x = shard_of(mesh, 2, 16, 32, dtype=torch.bfloat16)
    parameters = list(module.parameters())
    with bytes_over_gloo():
        start()
        actual = train(compiled(module), x, parameters)
        reports = asynctp_passes.reports()
        start()
        assert_close(actual, train(compiled(module, "inductor"), x, parameters))
    fused = {report.phase: [remark.op for remark in report.fused] for report in reports}
    gather, scatter = "asynctp::all_gather_matmul", "asynctp::matmul_reduce_scatter"
    assert fused == {"forward": [gather, scatter], "backward": [gather, scatter]}, fused
    skipped = {remark.kind for report in reports for remark in report.others}
    assert skipped == {"all_reduce"}, skipped  # of the amax
    return reports


def _float8_mlp(mesh: DeviceMesh) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    module = convert_to_float8_training(nn.Sequential(inner).bfloat16(), config=Float8LinearConfig(emulate=False))
    plan = {
        "0": PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), fwd_config_submodule_fqn="0"
        ),
        "0.0": Float8ColwiseParallel(),
        "0.2": Float8RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(module, mesh, plan)


def case_quantized_by_rows(mesh: DeviceMesh) -> tuple[Report, ...]:
    """A bf16 gather that is quantized by rows: fp8 is gathered instead, and it is the same fp8, bit by bit."""
    group = mesh.get_group()
    torch.manual_seed(0)
    weight, one = torch.randn(16, 32).to(torch.float8_e4m3fn).t(), torch.ones(())

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = funcol.all_gather_tensor(x, 0, group).reshape(-1, 32)
        scale = torch.exp2(torch.floor(torch.log2(448 / rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12))))
        quantized = (rows.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        product = torch._scaled_mm(quantized, weight, one, one, out_dtype=torch.bfloat16)
        return product * scale.reciprocal(), quantized

    with bytes_over_gloo(), torch.no_grad():
        start()
        layer = compiled(program, dynamic=True, fullgraph=True)
        for rows in (3, 4, 6):
            x = shard_of(mesh, 2, rows, 32, dtype=torch.bfloat16)
            with torch.compiler.set_stance("default" if rows == 3 else "fail_on_recompile"):
                product, quantized = layer(x)
            expected, expected_quantized = program(x)
            assert_close([product], [expected], _TOLERANCE[torch.bfloat16])
            assert torch.equal(quantized.view(torch.uint8), expected_quantized.view(torch.uint8))
    reports = asynctp_passes.reports()
    assert_fused(reports, {"inference": 1})
    assert not any(remark.keeps_gather for report in reports for remark in report.fused)
    return reports


# --- the cache --------------------------------------------------------------------------------------------
def case_cache_of_dtensors(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Compile twice: the second time both graphs come from the cache, with their reports, and compute the same.

    Across processes torch 2.13 never finds a graph of DTensors again, with plain Inductor neither: the mesh is an input
    of the graph, and its `hash()`, which differs from process to process, is part of the key.
    """
    module, x = mlp(mesh), shard_of(mesh, 2, 4, 16)
    parameters = list(module.parameters())
    with own_cache(mesh):
        first, compiled_reports = _train_and_count(module, x, parameters, hits=0)
        second, cached_reports = _train_and_count(module, x, parameters, hits=2, programs=int(NEWER_THAN_2_11))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [report.from_cache for report in cached_reports] == [True, True]
    assert [report.remarks for report in cached_reports] == [report.remarks for report in compiled_reports]
    return compiled_reports


def case_cache_filled(mesh: DeviceMesh) -> tuple[Report, ...]:
    """What `case_cache_of_other_process` finds."""
    program, weights = plain_layer(mesh)
    with own_cache(mesh):
        return _train_and_count(program, shard_of(mesh, 2, 4, 16), weights, hits=0)[1]


def case_cache_of_other_process(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Nothing is compiled, the reports are there, and the values are right."""
    program, weights = plain_layer(mesh)
    x = shard_of(mesh, 2, 4, 16)
    with own_cache(mesh):
        actual, reports = _train_and_count(program, x, weights, hits=2, programs=PLAIN_HITS)
    assert_close(actual, train(program, x, weights))
    return reports


def _train_and_count(
    program: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor], hits: int, programs: int = 0
) -> tuple[list[Tensor], tuple[Report, ...]]:
    """One step, compiled anew, with so many graphs of two from Inductor's cache, and programs from AOTAutograd's."""
    start()
    values = train(compiled(program), x, parameters)
    fx_graphs, aot = counters["inductor"], counters["aot_autograd"]
    found = (fx_graphs["fxgraph_cache_hit"], fx_graphs["fxgraph_cache_miss"], aot["autograd_cache_hit"])
    assert found == (hits, 2 - hits, programs), counters
    return values, asynctp_passes.reports()


# --- cases of four ranks ----------------------------------------------------------------------------------
def case_weights_gathered_over_data_parallel_ranks(grid: DeviceMesh) -> tuple[Report, ...]:
    return _grid_step(grid, {"groups": grid["tp"]})


def case_weights_gathered_and_groups_auto(grid: DeviceMesh) -> tuple[Report, ...]:
    return _grid_step(grid, {})


def _grid_step(grid: DeviceMesh, options: dict[str, Any]) -> tuple[Report, ...]:
    """Sequence-parallel layers over "tp" whose weights are sharded over "dp", as FSDP does."""
    tp, dp = grid["tp"].get_group(), grid["dp"].get_group()

    def program(x: Tensor) -> Tensor:
        up = funcol.all_gather_tensor_autograd(up_shard, 0, dp)
        down = funcol.all_gather_tensor_autograd(down_shard, 0, dp)
        hidden = torch.relu(funcol.all_gather_tensor_autograd(x, 0, tp) @ up)
        return funcol.reduce_scatter_tensor_autograd(hidden @ down, "sum", 0, tp).tanh()

    start()
    up_shard, down_shard = shard_of(grid, 8, 32), shard_of(grid, 16, 16)
    x = shard_of(grid, 4, 16)
    actual = train(compiled(program, options={**STRICT, "strict": "off", **options}), x, (up_shard, down_shard))
    reports = asynctp_passes.reports()
    assert_close(actual, train(program, x, (up_shard, down_shard)))
    return reports


# --- running them -----------------------------------------------------------------------------------------
GRID_CASES = ("weights_gathered_over_data_parallel_ranks", "weights_gathered_and_groups_auto")
LATER_CASES = ("cache_of_other_process",)
#: Each takes long and is of a kind that another case shows: for the thorough profile.
OF_KINDS_SHOWN = (
    "mlp_like_plain_inductor",  # the others compare with eager, which plain Inductor's values are near
    "mlp_with_real_code",  # the demo's short run compiles C++ of more kernels, for a forward and a backward
    "block_float32_batch_1",  # autocast
    "block_gathered_again",  # gradients of test_rematerialized_programs
    "block_bfloat16_batch_2",  # autocast
    "no_grad",  # inference_mode, quantized_by_rows
    "checkpoint_of_dtensor_block",  # checkpoint_of_dtensors
    "checkpoint_of_dtensor_attention",  # checkpoint_of_dtensors, and torch 2.12 and 2.13 cannot compile it
    "selective_checkpoint_of_dtensor_block",  # selective_checkpoint_of_dtensors
    "block_compiled_on_one_rank",  # compile_on_one_rank
)
CASES = tuple(
    name.removeprefix("case_")
    for name in list(globals())
    if name.startswith("case_") and name.removeprefix("case_") not in (*GRID_CASES, *LATER_CASES)
)
