"""Row-wise computation that moves to the shard gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dumps import CORPUS, example_inputs, load
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten
from lockstep import differences, evaluate
from passes import before_and_after, run_pass
from quantized_graphs import FP8, _values, cast, fuse, quantize, rewritten, weight
from serving_ops import registered
from torch.fx import Graph, Node

from asynctp_passes.ir.nodes import arguments


# --- the same bits --------------------------------------------------------------------------------------------------
def quantized_operands(graph: Graph) -> list[Node]:
    """The left operands and row scales of scaled matmuls on gathered rows, before or after the pass."""
    fused = [node for node in graph.nodes if node.target is torch.ops.asynctp.all_gather_matmul.default]
    return [operand for node in fused for operand in (arguments(node)["a_shard"], arguments(node)["a_scale"])]


@pytest.mark.parametrize(
    "name", ["fp8_bf16_gather_then_quant_rowwise__0", "torchao_rowwise_swiglu__0", "torchao_rowwise_swiglu_B1__0"]
)
def test_operands_are_the_same_bit_by_bit(name: str) -> None:
    """The ranks' parts, computed on their shards, are the blocks of what every rank computed before."""
    original, graph = (load(CORPUS / "torch2.13" / f"{name}.txt").graph for _ in range(2))
    first = next(node for node in original.nodes if node.target is aten._scaled_mm.default)
    inputs = [example_inputs(load(CORPUS / "torch2.13" / f"{name}.txt"), seed=rank) for rank in range(4)]
    whole = _returning(original, [first.args[0], first.args[2]], inputs)
    run_pass(graph)
    parts = _returning(graph, quantized_operands(graph)[:2], inputs)
    for index in range(2):
        shape = parts[0][index].shape
        blocks = torch.stack([part[index].view(torch.uint8) for part in parts], dim=1)
        rows = blocks.reshape(-1, blocks.shape[-1])
        assert len(shape) == 3
        assert all(torch.equal(rows, out[index].view(torch.uint8)) for out in whole)


def _returning(graph: Graph, nodes: list[Node], inputs: list[list[object]]) -> list[tuple[torch.Tensor, ...]]:
    """What nodes of a graph hold, on every rank."""
    graph.output_node().args = (tuple(nodes),)
    graph.eliminate_dead_code()
    return evaluate(graph, inputs)


Views = Callable[[GraphBuilder, Node, int], Node]
VIEWS: dict[str, Views] = {
    "middle dimension": lambda b, x, width: b.reshape(b.cat(b.chunks(x), dim=1), [-1, width]),
    "innermost rows": lambda b, x, width: b.reshape(
        b.permute(b.reshape(x, [4, 3, 4, width]), [2, 1, 0, 3]), [-1, width]
    ),
    "transposed parts": lambda b, x, width: b.reshape(
        b.permute(b.reshape(x, [4, 3, 4, width]), [0, 2, 1, 3]), [-1, width]
    ),
}


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("first", ["views", "quantization"])
def test_wherever_the_ranks_are(views: str, first: str) -> None:
    """Views before the quantization, or between it and the matmul, on data and scales alike."""
    b = GraphBuilder()
    x, (w, w_scale) = b.input("x", [3, 4, 32], torch.bfloat16), weight(b)
    whole = b.gather(x)
    if first == "views":
        rows, scale = quantize(b, VIEWS[views](b, whole, 32))
    else:
        rows, scale = (VIEWS[views](b, part, width) for part, width in zip(quantize(b, whole), (32, 1), strict=True))
    graph = b.returns(b.scaled_mm(rows, w, scale, w_scale), rows, scale)
    inputs = [_values(graph, rank) for rank in range(4)]
    before = evaluate(graph, inputs)
    assert fuse(graph).op == "asynctp::all_gather_matmul"
    for (out, *operands), (new_out, *new_operands) in zip(before, evaluate(graph, inputs), strict=True):
        pairs = zip((out, *operands), (new_out, *new_operands), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def gathered_along_a_dimension(b: GraphBuilder, shard: Node, dim: int) -> Node:
    """By an op of a serving framework, which needs no wait."""
    return b.call(torch.ops.vllm_like.all_gather.default, shard, dim, b.ranks, "tp:0")


def gathered_in_a_list(b: GraphBuilder, shard: Node, dim: int) -> Node:
    """Beside a tensor that is not multiplied at all."""
    first, second = b.gather_list(b.input("other", [2, 5]), shard)
    b.relu(first)
    return second if dim == 0 else b.cat(b.chunks(second), dim=dim)


@pytest.mark.parametrize("gather", [gathered_along_a_dimension, gathered_in_a_list])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kept", [False, True])
def test_whatever_gathers(gather: Callable[[GraphBuilder, Node, int], Node], dim: int, kept: bool) -> None:
    """A collective along another dimension, or one of several tensors: its part is quantized, then gathered."""
    b = GraphBuilder()
    x, (w, w_scale) = b.input("x", [3, 4, 32], torch.bfloat16), weight(b)
    whole = gather(b, x, dim)
    rows, scale = quantize(b, whole)
    out = b.scaled_mm(b.reshape(rows, [48, 32]), w, b.reshape(scale, [48, 1]), w_scale)
    graph = b.returns(out, *([rows, scale, b.relu(whole)] if kept else []))
    inputs = [_values(graph, rank) for rank in range(4)]
    before = evaluate(graph, inputs)
    with registered("tp"):
        fused = run_pass(graph, strict="all", expect=1).fused
    assert [(remark.op, remark.keeps_gather) for remark in fused] == [("asynctp::all_gather_matmul", kept)]
    assert differences(before, evaluate(graph, inputs)) == []


def test_a_matmul_of_what_two_gathers_make_is_fused_with_one_of_them() -> None:
    """Each operand of the addition has the ranks where the other one has one element: either could be hoisted."""
    b = GraphBuilder(ranks=2)
    x, y, (w, _) = b.input("x", [1, 32]), b.input("y", [1, 32]), weight(b)
    total = b.add(b.reshape(b.gather(x), [2, 1, 32]), b.reshape(b.gather(y), [1, 2, 32]))
    rows = b.reshape(b.call(cast, total, FP8), [4, 32])
    graph = b.returns(b.scaled_mm(rows, w, b.one(), b.one()))
    inputs = [_values(graph, rank) for rank in range(2)]
    before = evaluate(graph, inputs)
    remarks = run_pass(graph, strict="all", expect=1).remarks
    assert [remark.name or remark.outcome for remark in remarks] == ["FUSED", "MATMUL_TAKEN"]
    assert differences(before, evaluate(graph, inputs)) == []


def test_a_gather_along_the_sequence() -> None:
    """[batch, sequence, hidden], gathered along the sequence by one op."""
    b = GraphBuilder(ranks=2)
    x, (w, w_scale) = b.input("x", [3, 4, 32], torch.bfloat16), weight(b)
    rows, scale = quantize(b, gathered_along_a_dimension(b, x, 1))
    graph = b.returns(b.scaled_mm(b.reshape(rows, [24, 32]), w, b.reshape(scale, [24, 1]), w_scale))
    with registered("tp"):
        assert_expected_inline(
            rewritten(graph),
            """\
x: bf16[3, 4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
all_gather = all_gather(x, 1, 2, 'tp:0')  # bf16[3, 8, 32]
abs_1 = abs(all_gather)  # bf16[3, 8, 32]
amax = amax(abs_1, [-1], True)  # bf16[3, 8, 1]
div = div(amax, 448.0)  # bf16[3, 8, 1]
convert_element_type = convert_element_type(div, f32)  # f32[3, 8, 1]
convert_element_type_1 = convert_element_type(all_gather, f32)  # f32[3, 8, 32]
div_1 = div(convert_element_type_1, convert_element_type)  # f32[3, 8, 32]
convert_element_type_2 = convert_element_type(div_1, f8)  # f8[3, 8, 32]
reshape = reshape(convert_element_type_2, [24, 32])  # f8[24, 32]
reshape_1 = reshape(convert_element_type, [24, 1])  # f32[24, 1]
_scaled_mm = _scaled_mm(reshape, w, reshape_1, w_scale, out_dtype=bf16)  # bf16[24, 16]
return (_scaled_mm)

=== becomes ===

x: bf16[3, 4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
abs_default = abs(x)  # bf16[3, 4, 32]
amax_default = amax(abs_default, [-1], True)  # bf16[3, 4, 1]
div_tensor = div(amax_default, 448.0)  # bf16[3, 4, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[3, 4, 1]
convert_element_type_default_1 = convert_element_type(x, f32)  # f32[3, 4, 32]
div_tensor_1 = div(convert_element_type_default_1, convert_element_type_default)  # f32[3, 4, 32]
convert_element_type_default_2 = convert_element_type(div_tensor_1, f8)  # f8[3, 4, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default_2, bs=[w], biases=[None],
    gather_dim=1, return_a_full=False, group_size=2, group_name='tp', a_scale=convert_element_type_default,
    b_scales=[w_scale], gather_a_scale=True, out_dtype=bf16, use_fast_accum=False)  # (bf16[3, 8, 16])
getitem = getitem(all_gather_matmul_default, 0)  # bf16[3, 8, 16]
reshape_default = reshape(getitem, [24, 16])  # bf16[24, 16]
return (reshape_default)

computed on the shard and gathered: f8e4m3[3, 8, 32] (384 bytes) and f32[3, 8, 1] (48 bytes); the gather of
bf16[3, 8, 32] (768 bytes) is gone
""",
        )


def test_an_item_of_a_list() -> None:
    """The other item's collective stays, without the tensor that the fused op gathers."""
    b = GraphBuilder(ranks=2)
    x, (w, w_scale) = b.input("x", [4, 32], torch.bfloat16), weight(b)
    y, whole = b.gather_list(b.input("y", [2, 5]), x)
    rows, scale = quantize(b, whole)
    graph = b.returns(b.scaled_mm(rows, w, scale, w_scale), b.relu(y))
    text, _ = before_and_after(graph, strict="all", expect=1)
    assert_expected_inline(
        text,
        """\
x: bf16[4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
y: f32[2, 5]
all_gather_into_tensor_coalesced = all_gather_into_tensor_coalesced([y, x], 2, 'tp')  # (f32[4, 5], bf16[8, 32])
getitem = getitem(all_gather_into_tensor_coalesced, 0)  # f32[4, 5]
wait_tensor = wait_tensor(getitem)  # f32[4, 5]
getitem_1 = getitem(all_gather_into_tensor_coalesced, 1)  # bf16[8, 32]
wait_tensor_1 = wait_tensor(getitem_1)  # bf16[8, 32]
abs_1 = abs(wait_tensor_1)  # bf16[8, 32]
amax = amax(abs_1, [-1], True)  # bf16[8, 1]
div = div(amax, 448.0)  # bf16[8, 1]
convert_element_type = convert_element_type(div, f32)  # f32[8, 1]
convert_element_type_1 = convert_element_type(wait_tensor_1, f32)  # f32[8, 32]
div_1 = div(convert_element_type_1, convert_element_type)  # f32[8, 32]
convert_element_type_2 = convert_element_type(div_1, f8)  # f8[8, 32]
_scaled_mm = _scaled_mm(convert_element_type_2, w, convert_element_type, w_scale, out_dtype=bf16)  # bf16[8, 16]
relu = relu(wait_tensor)  # f32[4, 5]
return (_scaled_mm, relu)

=== becomes ===

x: bf16[4, 32]
w_scale: f32[1, 16]
w: f8[32, 16]s[1, 32]
y: f32[2, 5]
all_gather_into_tensor_default = all_gather_into_tensor(y, 2, 'tp')  # f32[4, 5]
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)  # f32[4, 5]
abs_default = abs(x)  # bf16[4, 32]
amax_default = amax(abs_default, [-1], True)  # bf16[4, 1]
div_tensor = div(amax_default, 448.0)  # bf16[4, 1]
convert_element_type_default = convert_element_type(div_tensor, f32)  # f32[4, 1]
convert_element_type_default_1 = convert_element_type(x, f32)  # f32[4, 32]
div_tensor_1 = div(convert_element_type_default_1, convert_element_type_default)  # f32[4, 32]
convert_element_type_default_2 = convert_element_type(div_tensor_1, f8)  # f8[4, 32]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=convert_element_type_default_2, bs=[w], biases=[None],
    gather_dim=0, return_a_full=False, group_size=2, group_name='tp', a_scale=convert_element_type_default,
    b_scales=[w_scale], gather_a_scale=True, out_dtype=bf16, use_fast_accum=False)  # (bf16[8, 16])
getitem_2 = getitem(all_gather_matmul_default, 0)  # bf16[8, 16]
relu = relu(wait_tensor_default)  # f32[4, 5]
return (getitem_2, relu)
""",
    )
