"""The changes that CONTRIBUTING has recipes for, each done from outside by what the recipe says, and nothing else."""

from __future__ import annotations

import pytest
import torch
from graph_builder import GraphBuilder
from lockstep import evaluate
from passes import run_pass

from asynctp_passes.ir import registry
from asynctp_passes.ir.op_traits import TRAITS, OpTraits, View
from asynctp_passes.ir.registry import MatmulOp

_ops = torch.library.Library("extending_test", "FRAGMENT")
_ops.define("merge_rows(Tensor x) -> Tensor")
_ops.define("linear(Tensor rows, Tensor matrix) -> Tensor")
_ops.impl("merge_rows", lambda x: x.reshape(-1, x.shape[-1]).clone(), "CompositeExplicitAutograd")
_ops.impl("linear", lambda rows, matrix: rows @ matrix, "CompositeExplicitAutograd")
ops = torch.ops.extending_test
RANKS = 4


def inputs(graph: torch.fx.Graph) -> list[list[torch.Tensor]]:
    """Small integers, other ones for each rank: sums of their products are exact."""
    shapes = [node.meta["val"].shape for node in graph.nodes if node.op == "placeholder"]
    made = torch.Generator().manual_seed(0)
    return [[torch.randint(-2, 3, shape, generator=made).float() for shape in shapes] for _ in range(RANKS)]


def fused_alike(graph: torch.fx.Graph) -> bool:
    """Whether the gather of a graph is fused, and all values are those of before."""
    values = inputs(graph)
    before = evaluate(graph, values)
    report = run_pass(graph)
    after = evaluate(graph, values)
    assert all(torch.equal(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))
    return len(report.fused) == 1


def with_a_view() -> torch.fx.Graph:
    b = GraphBuilder(ranks=RANKS)
    rows = b.call(ops.merge_rows.default, b.gather(b.input("x", [2, 4, 8])))
    return b.returns(b.mm(rows, b.input("w", [8, 16])))


def with_a_matmul() -> torch.fx.Graph:
    b = GraphBuilder(ranks=RANKS)
    return b.returns(b.call(ops.linear.default, b.gather(b.input("x", [4, 8])), b.input("w", [8, 16])))


def test_a_new_view_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused_alike(with_a_view())
    monkeypatch.setitem(TRAITS, "extending_test.merge_rows.default", OpTraits(View.RESHAPE, copies=True))
    assert fused_alike(with_a_view())


def test_a_new_matmul_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused_alike(with_a_matmul())
    monkeypatch.setitem(registry._MATMULS, "extending_test.linear.default", MatmulOp("rows", "matrix"))
    assert fused_alike(with_a_matmul())


def test_a_new_implementation_is_its_plan_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen where it is the cheapest, refused by its own checks, and its plan is made."""
    pytest.importorskip("triton")
    from asynctp_kernels.cuda import choices, implementations
    from asynctp_kernels.cuda.choose.implementation import Implementation
    from asynctp_kernels.cuda.choose.wire import DIRECT
    from asynctp_kernels.cuda.facts import GatherFacts

    def no_bias(call: GatherFacts) -> str | None:
        return "a bias, which it does not add" if any(bias is not None for bias in call.biases) else None

    class Mine(Implementation):
        name, transports, refuses = "mine", (DIRECT,), (no_bias,)

        def __init__(self, call: GatherFacts, memory: object) -> None:
            self.call = call

        @staticmethod
        def estimate(*facts: object) -> float:
            return 0.5

    monkeypatch.setitem(implementations.ENTRIES, "gather", (Mine, *implementations.ENTRIES["gather"]))
    monkeypatch.setattr(choices.driver, "machine", lambda device: ((9, 0), 132, "NVIDIA H100 80GB HBM3"))

    a, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 64), (64, 72)))
    bias = torch.empty(72, dtype=torch.bfloat16, device="meta")
    plain, added = (GatherFacts(a, [w], [one], 0, False, 2) for one in (None, bias))
    choice = choices.choice_for(plain)
    assert choice.implementation == "mine"
    plan = implementations.make_plan(plain, None, choice)  # type: ignore[arg-type]
    assert isinstance(plan, Mine)
    assert plan.call is plain
    refused = choices.choice_for(added)
    assert refused.refused["mine"] == "a bias, which it does not add"
    assert refused.implementation != "mine"
