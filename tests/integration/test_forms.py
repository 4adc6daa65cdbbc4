"""Real programs in every spelling of a collective or matmul: traced, rewritten, and run on real ranks against eager."""

from __future__ import annotations

import form_cases
import pytest
import torch
from form_cases import CASES, RANKS
from graph_builder import GraphBuilder, aten
from passes import run_pass
from ranks import run_ranks
from serving_ops import registered
from torch.fx import Graph

Results = list[dict[str, tuple[tuple[str, ...], list[str]]]]


@pytest.fixture(scope="module")
def on_ranks() -> Results:
    """What each rank says of all cases."""
    return run_ranks(RANKS, form_cases.run_cases, list(CASES))


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_on_ranks(on_ranks: Results, name: str) -> None:
    if all(results[name] == ((form_cases.NOT_TRACED,), []) for results in on_ranks):
        pytest.skip("this torch does not trace the program, without asynctp neither")
    for results in on_ranks:
        assert results[name] == (CASES[name].outcomes, [])


# --- forms that only a graph by hand has on this machine --------------------------------------------------------------
def fused_count(graph: Graph) -> int:
    """Fused chains; the rewritten graph is checked for lint, and for guards that were added."""
    report = run_pass(graph)
    graph.lint()
    return len(report.fused)


@pytest.mark.parametrize("op", ["mm", "bmm", "addmm", "baddbmm"])
def test_an_out_dtype_that_changes_nothing(op: str) -> None:
    """The overloads with `out_dtype`, which run on GPUs only, asked for the operands' own."""
    b = GraphBuilder()
    x, w = b.input("x", [4, 8], torch.bfloat16), b.input("w", [8, 12], torch.bfloat16)
    operands = [b.gather(x), w]
    if op in ("bmm", "baddbmm"):
        operands = [b.call(aten.unsqueeze.default, operand, 0) for operand in operands]
    if op in ("addmm", "baddbmm"):
        operands.insert(0, b.input("bias", [12], torch.bfloat16))
    with b.mode:
        value = torch.empty([1, 16, 12] if "bmm" in op else [16, 12], dtype=torch.bfloat16)
    product = b.call_like(value, getattr(aten, op).dtype, *operands, torch.bfloat16)
    assert fused_count(b.returns(product)) == 1


def test_a_wider_out_dtype_leaves_the_others_fused() -> None:
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 8], torch.bfloat16))
    w = b.input("w", [8, 12], torch.bfloat16)
    with b.mode:
        value = torch.empty(16, 12)
    wide = b.call_like(value, aten.mm.dtype, whole, w, torch.float32)
    graph = b.returns(wide, b.mm(whole, w))
    (remark,) = run_pass(graph).remarks
    assert remark.outcome == "FUSED"
    assert "DTYPE_UNSUPPORTED (mm: torch.bfloat16 -> torch.float32)" in remark.message


@pytest.mark.parametrize("reduced", [False, True])
def test_a_product_that_is_wide_itself_is_none_that_is_converted(reduced: bool) -> None:
    """`mm` of bf16 with fp32 as `out_dtype` is not rounded to bf16, which could travel."""
    b = GraphBuilder()
    x, w = b.input("x", [16, 8], torch.bfloat16), b.input("w", [8, 12], torch.bfloat16)
    with b.mode:
        value = torch.empty(16, 12)
    wide = b.call_like(value, aten.mm.dtype, x, w, torch.float32)
    graph = b.returns(b.all_reduce(wide) if reduced else b.scatter(wide))
    (remark,) = run_pass(graph).remarks
    assert (remark.outcome, remark.name) == ("MISSED", "DTYPE_UNSUPPORTED")


@pytest.mark.parametrize("dynamic", [0, 1])
def test_one_weight_for_a_batch_of_symbolic_sizes(dynamic: int) -> None:
    """A batch or a sequence of unknown length, gathered along the sequence and scattered along it again."""
    b = GraphBuilder(ranks=2)
    x, w, v = b.input("x", [3, 24, 8], dynamic=dynamic), b.input("w", [8, 16]), b.input("v", [8, 16])
    with registered("tp"):
        whole = b.call(torch.ops.vllm_like.all_gather.default, x, 1, 2, "tp:0")
        batch = b.call(aten.sym_size.int, x, 0)
        weights = [b.call(aten.expand.default, matrix, [batch, 8, 16]) for matrix in (w, v)]
        back = b.permute(weights[1], [0, 2, 1])
        hidden = b.relu(b.call(aten.bmm.default, whole, weights[0]))
        out = b.call(torch.ops.vllm_like.reduce_scatter.default, b.call(aten.bmm.default, hidden, back), 1, 2, "tp:0")
        shape_env = b.mode.shape_env
        guards = list(shape_env.guards)
        assert fused_count(b.returns(out, b.relu(whole))) == 2
    assert shape_env.guards == guards


@pytest.mark.ranks
def test_training_without_inductor() -> None:
    """Graphs of AOTAutograd, whose views are not normalized: two chains forward, and two backward."""
    for graphs, problems in run_ranks(RANKS, form_cases.train_by_aot):
        if graphs == [(form_cases.NOT_TRACED,)]:
            pytest.skip("this torch does not trace the program, without asynctp neither")
        assert graphs == [("F", "F"), ("F", "F")]
        assert problems == []


@pytest.mark.ranks
def test_training_with_scales_of_blocks() -> None:
    """fp8 is gathered with the scales of its blocks; backward, the gradient is quantized behind its gather."""
    for graphs, problems in run_ranks(RANKS, form_cases.train_blocks_by_aot):
        if graphs == [(form_cases.NOT_TRACED,)]:
            pytest.skip("this torch does not trace the program, without asynctp neither")
        assert graphs == [("F", "F", "F"), ("F", "ATP404", "F")]  # the weight gradient's gather
        assert problems == []
