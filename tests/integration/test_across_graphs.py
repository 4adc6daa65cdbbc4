"""Chains that lie in two graphs are missed, and said; what only leaves a graph, or is no chain, is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled_training import GATHERS_ALONG_ANY, pair_in_one_process
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import asynctp_passes
from asynctp_passes import ExpectError, Remark, StrictError, backend
from asynctp_passes.torch_private import dynamo

Program = Callable[..., Any]
OFF = {"strict": "off"}
X, W, V = torch.ones(4, 16), torch.ones(16, 8), torch.ones(8, 16)


@pytest.fixture(autouse=True)
def two_ranks(tmp_path: Path) -> Iterator[None]:
    """A group of two, and this process is its first rank."""
    with pair_in_one_process(tmp_path):
        yield


def compiled(program: Any, **options: Any) -> Any:
    return torch.compile(program, backend="asynctp", options={**OFF, **options})


def gathered(x: Tensor) -> Tensor:
    return all_gather_tensor(x, 0, dist.group.WORLD)


def scattered(x: Tensor) -> Tensor:
    return reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


def missed() -> list[Remark]:
    return [remark for report in asynctp_passes.reports() for remark in report.missed]


# --- chains in two graphs -----------------------------------------------------------------------------------------
def gather_break_matmul(x: Tensor) -> Tensor:
    h = gathered(x)
    torch._dynamo.graph_break()
    return h @ W


def gather_break_view_matmul(x: Tensor) -> Tensor:
    h = gathered(x).view(2, 4, 16)
    torch._dynamo.graph_break()
    return h.flatten(0, 1).to(torch.float64).float() @ W


def gather_of_columns_break_matmul(x: Tensor) -> Tensor:
    h = all_gather_tensor(x, 1, dist.group.WORLD)
    torch._dynamo.graph_break()
    return h @ torch.ones(32, 8)


def gather_break_linear(x: Tensor) -> Tensor:
    h = gathered(x)
    print(end="")
    return nn.functional.linear(h, V, torch.ones(8))


def matmul_break_scatter(x: Tensor) -> Tensor:
    y = x @ W
    torch._dynamo.graph_break()
    return scattered(y)


def matmul_break_all_reduce(x: Tensor) -> Tensor:
    y = (x @ W).view(2, 2, 8)
    torch._dynamo.graph_break()
    return all_reduce(y.view(4, 8), "sum", dist.group.WORLD) * 2


BROKEN = {
    gather_break_matmul: ("all_gather", "Call to `torch._dynamo.graph_break()`"),
    gather_break_view_matmul: ("all_gather", "Call to `torch._dynamo.graph_break()`"),
    gather_of_columns_break_matmul: ("all_gather", "Call to `torch._dynamo.graph_break()`"),
    gather_break_linear: ("all_gather", "Failed to trace builtin operator"),
    matmul_break_scatter: ("reduce_scatter", "Call to `torch._dynamo.graph_break()`"),
    matmul_break_all_reduce: ("all_reduce", "Call to `torch._dynamo.graph_break()`"),
}


@pytest.mark.parametrize("program", BROKEN, ids=lambda program: program.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_a_graph_break_in_a_chain(program: Program, training: bool) -> None:
    kind, why = BROKEN[program]
    if program is gather_of_columns_break_matmul and not GATHERS_ALONG_ANY:
        pytest.skip("torch does not trace all_gather_tensor of another dimension than the first (pytorch issue 179722)")
    compiled(program)(X.clone().requires_grad_(training))
    (remark,) = missed()
    assert (remark.kind, remark.name) == (kind, "MATMUL_IN_ANOTHER_GRAPH")
    assert f"{__file__}:" in remark.message
    assert why in remark.message
    assert remark.source is not None
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        compiled(program, strict="all")(X)
    assert isinstance(error.value.inner_exception, StrictError)


def test_a_graph_from_the_cache_tells_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(gather_break_matmul)(X)
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    compiled(gather_break_matmul)(X)
    assert [report.from_cache for report in asynctp_passes.reports()] == [True, True]
    assert [remark.name for remark in missed()] == ["MATMUL_IN_ANOTHER_GRAPH"]


def test_a_function_with_branches_of_its_own() -> None:
    """The graphs of a `torch.cond` are compiled before the one around them, whose border it is."""

    def program(flag: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return gathered(x), torch.cond(flag, lambda x: x.sin(), lambda x: x.cos(), (x,))

    for _ in range(2):  # then from the cache
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        with torch.no_grad():
            h, _ = compiled(program)(torch.tensor(True), X)
            compiled(lambda h: h @ W)(h)
        assert [remark.name for remark in missed()] == ["MATMUL_IN_ANOTHER_GRAPH"]


def test_modules_that_are_compiled_one_by_one() -> None:
    up, down = compiled(nn.Linear(16, 8)), compiled(scattered)
    for _ in range(3):
        down(up(X.requires_grad_()))
    (remark,) = missed()
    assert (remark.kind, remark.name) == ("reduce_scatter", "MATMUL_IN_ANOTHER_GRAPH")
    assert "the function of the first one returns between" in remark.message


def test_expect_counts_both_graphs() -> None:
    """One chain is fused in each graph, and one lies in both."""

    def program(x: Tensor) -> Tensor:
        y = gathered(x) @ W
        h = gathered(scattered(y @ V))
        torch._dynamo.graph_break()
        return gathered(scattered(h @ W))

    compiled(program, strict="zero", expect=1)(X)
    assert len(missed()) == 1
    assert asynctp_passes.summary().fused == 3
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        compiled(gather_break_matmul, expect=1)(X)
    assert isinstance(error.value.inner_exception, ExpectError)
    assert "expect=1" in str(error.value.inner_exception)


# --- look-alikes --------------------------------------------------------------------------------------------------
def logits(x: Tensor) -> Tensor:
    y = gathered(gathered(x) @ W)
    torch._dynamo.graph_break()
    return y.softmax(-1)


def a_part_is_multiplied(x: Tensor) -> Tensor:
    h = gathered(x)
    torch._dynamo.graph_break()
    return h[:4] @ W


def a_function_of_it_is_multiplied(x: Tensor) -> Tensor:
    h = gathered(x)
    torch._dynamo.graph_break()
    return h.softmax(0) @ W


def a_right_operand(x: Tensor) -> Tensor:
    w = gathered(x)
    torch._dynamo.graph_break()
    return torch.ones(3, 8) @ w


def another_tensor_is_multiplied(x: Tensor) -> Tensor:
    h, other = gathered(x), x * 2
    torch._dynamo.graph_break()
    return h.sum() + other @ W


def a_matmul_goes_on(x: Tensor) -> Tensor:
    y = x @ W
    torch._dynamo.graph_break()
    return scattered(y.relu()) + (y @ V).sum()


@pytest.mark.parametrize(
    "program",
    [logits, a_part_is_multiplied, a_function_of_it_is_multiplied, a_right_operand, another_tensor_is_multiplied,
     a_matmul_goes_on],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_no_chain_in_two_graphs(program: Program) -> None:
    compiled(program)(X)
    assert len(asynctp_passes.reports()) >= 1
    assert missed() == []


def test_memory_that_is_used_again_is_another_tensor() -> None:
    """The gathered tensor is gone when the next function is compiled, though its memory may be there."""
    first, second = compiled(lambda x: gathered(x)), compiled(lambda h: h @ W)
    first(X)
    second(torch.ones(8, 16))
    assert missed() == []


def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    return x.t() @ gradient


def test_a_weights_gradient_that_another_graph_reduces() -> None:
    """In one graph it is left alone, too (ATP009)."""
    gradient = compiled(weight_gradient, strict="zero")(X, torch.ones(4, 8))
    compiled(lambda g: all_reduce(g, "sum", dist.group.WORLD) / 2, strict="zero")(gradient)
    assert missed() == []
    torch._dynamo.reset()
    activation = compiled(lambda x: x @ W)(X)
    compiled(lambda y: all_reduce(y, "sum", dist.group.WORLD) / 2)(activation)
    assert [remark.name for remark in missed()] == ["MATMUL_IN_ANOTHER_GRAPH"]


def test_a_group_that_is_named_for_data_parallelism() -> None:
    group = dist.new_group([0, 1], group_desc="mesh_dp")
    product = compiled(lambda x: x @ W)
    reduced = compiled(lambda y: all_reduce(y, "avg", group), strict="zero")
    with torch.no_grad():
        reduced(product(X))
    assert missed() == []
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="ATP120"):
        compiled(lambda y: all_reduce(y, "sum", group), strict="zero", groups=[group])(product(X))


@pytest.mark.parametrize("change", [Tensor.relu_, lambda h: h.copy_(torch.ones(8, 16)), lambda h: h[1:].zero_()])
def test_a_tensor_that_is_changed_between_two_graphs(change: Callable[[Tensor], Tensor]) -> None:
    h = compiled(gathered)(X)
    change(h)
    compiled(lambda h: h @ W, strict="zero")(h)
    assert missed() == []


@pytest.mark.parametrize("change", [lambda h: h.copy_(torch.ones(8, 16)), lambda h: None])
def test_a_tensor_whose_changes_nobody_counts(change: Callable[[Tensor], object]) -> None:
    """Tensors of inference mode have no version; what lies between two functions may have changed them."""
    with torch.inference_mode():
        h = compiled(gathered)(X)
        change(h)
        compiled(lambda h: h @ W, strict="zero")(h)
    assert missed() == []


def test_a_graph_break_in_inference_mode() -> None:
    with torch.inference_mode():
        compiled(gather_break_matmul)(X)
    assert [remark.name for remark in missed()] == ["MATMUL_IN_ANOTHER_GRAPH"]


class GatherBeforeLinear(nn.Module):
    """A gather whose matmul's weight is in the next bucket of DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(16)), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(functional.all_gather_tensor_autograd(x * self.scale, 0, dist.group.WORLD)).relu()


@pytest.mark.parametrize("cut", [True, False])
def test_a_chain_that_is_cut_for_ddp_has_a_remedy(cut: bool) -> None:
    """Its pieces are compiled before the first call, so that nobody sees which tensor the second one takes."""

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return backend.asynctp(gm, inputs, options=OFF)

    optimizer = DDPOptimizer(bucket_bytes_cap=10, backend_compile_fn=compiler, first_bucket_cap=10)
    model = torch.compile(GatherBeforeLinear(), backend=optimizer.compile_fn if cut else compiler)
    model(X).sum().backward()
    remarks = {report.phase: report.remarks for report in asynctp_passes.reports() if report.remarks}
    assert list(remarks) == ["forward", "backward"]
    for found in remarks.values():
        assert [one.outcome for one in found] == ["SKIPPED" if cut else "FUSED"]
        assert ["set torch._dynamo.config.optimize_ddp = False" in one.hint for one in found] == [cut]


# --- bookkeeping ends no program ----------------------------------------------------------------------------------
@pytest.mark.usefixtures("internal_errors")
@pytest.mark.parametrize(
    ("module", "failing"),
    [
        (dynamo, "given_tensors"),
        (dynamo, "graph_break_of"),
        (dynamo, "version_of"),
        (dynamo, "is_precompiled"),
    ],
)
def test_an_error_of_the_bookkeeping_ends_nothing(
    module: Any, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While a function is compiled, and while it runs."""

    def fails(*_: Any) -> Any:
        raise NotImplementedError("nobody foresaw this")

    h = compiled(gathered)(X)
    monkeypatch.setattr(module, failing, fails)
    torch._dynamo.reset()
    with caplog.at_level(logging.ERROR, "asynctp_passes"):
        assert torch.equal(compiled(gathered)(X), h)
        assert torch.equal(compiled(lambda h: h @ W)(h), h @ W)
    assert "internal error ATP901" in caplog.text
    assert "NotImplementedError: nobody foresaw this" in caplog.text


def test_dtensors_that_leave_one_graph_for_another() -> None:
    """A DTensor's local tensor is the half of the chain."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = distribute_tensor(torch.ones(8, 16), mesh, [Shard(0)]), distribute_tensor(W, mesh, [Shard(1)])

    def program(x: Tensor, w: Tensor) -> Tensor:
        h = x.redistribute(placements=[torch.distributed.tensor.Replicate()])
        torch._dynamo.graph_break()
        return h @ w

    compiled(program)(x, w)
    assert [remark.name for remark in missed()] == ["MATMUL_IN_ANOTHER_GRAPH"]
    assert backend.summary().missed == 1


def test_the_summary_shows_what_is_missed_and_where_graphs_break() -> None:
    compiled(gather_break_matmul)(X)
    found = asynctp_passes.summary()
    assert (found.fused, found.missed, found.skipped, found.graphs) == (0, 1, 1, 2)
    text = str(found)
    assert "ATP120 MATMUL_IN_ANOTHER_GRAPH" in text
    assert "graph break: " in text
    with pytest.raises(ExpectError, match="ATP120"):
        asynctp_passes.require()
    asynctp_passes.require(missed=1)
