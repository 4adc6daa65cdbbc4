"""Remedies of the reasons ATP2xx to ATP4xx, each followed on a row of the table; and those of what is out of scope."""

from __future__ import annotations

from operator import getitem

import reason_rows_of_limits as limits
import reason_rows_of_own_ops as own_ops
import reason_rows_of_structure as structure
import torch
from graph_builder import GraphBuilder, aten, c10d
from reason_rows import FP8, gathered, mends, product, times
from reason_rows_of_own_ops import called, own
from remedies_of_structure import quantized_shard, registering
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import Module

from asynctp_passes import register_local


# --- 2xx legality ----------------------------------------------------------------------------------------------
@mends(limits.scatter_of_a_maximum, differs="it is a sum")
def scatter_of_a_sum(b: GraphBuilder) -> Node:
    return b.scatter(product(b), "sum")


@mends(limits.scatter_of_a_maximum, differs="it is a mean")
def scatter_of_a_mean(b: GraphBuilder) -> Node:
    return b.scatter(product(b), "avg")


@mends(limits.product_used_elsewhere, differs="the other use has the sum")
def sum_used_elsewhere(b: GraphBuilder) -> tuple[Node, Node]:
    out = b.scatter(product(b))
    return b.relu(out), out


@mends(limits.gather_started_on_another_stream)
def gather_and_matmul_on_no_stream(b: GraphBuilder) -> Node:
    return times(b, gathered(b))


@mends(limits.product_scattered_on_another_stream)
def matmul_and_scatter_on_one_stream(b: GraphBuilder) -> Node:
    matmul = limits.on_stream(product(b), 2)
    scattered = limits.on_stream(b.scatter(matmul), 2)
    limits.on_stream(scattered.args[0], 2)
    return scattered


@mends(limits.mutation_between)
def mutation_made_functional(b: GraphBuilder) -> Node:
    whole, w = gathered(b), b.input("w", [8, 12])
    return b.mm(whole, b.call(aten.copy.default, w, b.input("new", [8, 12])))


@mends(limits.mutation_between)
def mutation_before_the_gather(b: GraphBuilder) -> Node:
    x, w = b.input("x", [4, 8]), b.input("w", [8, 12])
    b.call(aten.copy_.default, w, b.input("new", [8, 12]))
    return b.mm(b.gather(x), w)


@mends(limits.addmm_with_alpha)
def addmm_of_a_scaled_weight(b: GraphBuilder) -> Node:
    w = b.call(aten.mul.Tensor, b.input("w", [8, 12]), 2)
    return b.call(aten.addmm.default, b.input("bias", [12]), gathered(b), w)


@mends(limits.addmm_with_beta)
def addmm_of_a_scaled_bias(b: GraphBuilder) -> Node:
    bias = b.call(aten.mul.Tensor, b.input("bias", [12]), 2)
    return b.call(aten.addmm.default, bias, gathered(b), b.input("w", [8, 12]))


@mends(limits.gather_for_an_addmm_with_a_column)
def column_added_to_the_result(b: GraphBuilder) -> Node:
    return b.add(b.input("column", [16, 1]), b.mm(gathered(b), b.input("w", [8, 12])))


@mends(limits.scaled_matmul_with_a_result_scale, differs="the result is rounded twice")
def result_of_a_scaled_matmul_scaled(b: GraphBuilder) -> Node:
    return b.mul(limits.scaled(b, [], []), b.input("result_scale", []))


@mends(limits.scatter_of_a_product_with_a_result_scale, differs="the result is rounded twice")
def sum_of_scaled_products_scaled(b: GraphBuilder) -> Node:
    a, w = b.input("a", [16, 32], FP8), b.input("w", [32, 16], FP8, column_major=True)
    one = b.input("one", [])
    return b.mul(b.scatter(b.scaled_mm(a, w, one, one)), b.input("result_scale", []))


@mends(limits.view_without_a_fake_tensor)
def view_with_a_propagated_fake_tensor(b: GraphBuilder) -> Node:
    out = limits.view_without_a_fake_tensor(b)
    inputs = [node.meta["val"] for node in b.graph.nodes if node.op == "placeholder"]
    end = b.graph.output(out)
    FakeTensorProp(GraphModule(Module(), b.graph), b.mode).propagate_dont_convert_inputs(*inputs)
    b.graph.erase_node(end)
    return out


@mends(limits.combined_with_an_input, equal=("v",))
def shard_combined_with_an_input(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.mul(b.input("x", [4, 8]), b.input("v", [8]))))


@mends(limits.combined_with_a_number)
def result_combined_with_a_number(b: GraphBuilder) -> Node:
    return b.call(aten.mul.Tensor, times(b, gathered(b)), 3.0)


@mends(limits.combined_with_values_of_its_rows, differs="each rank adds to its own rows")
def shard_combined_with_values_of_its_rows(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.add(b.input("x", [4, 8]), b.input("positions", [4, 8]))))


@mends(limits.quantized_by_a_scale_from_outside, equal=("v",))
def shard_quantized_by_a_scale_from_outside(b: GraphBuilder) -> Node:
    scale = b.input("v", [])
    return quantized_shard(b, lambda x: scale)


@mends(limits.dropout_that_is_one_op_after_the_gather, differs="it draws other numbers")
def dropout_of_the_shard(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.call(getitem, b.call(aten.native_dropout.default, b.input("x", [4, 8]), 0.5, True), 0)))


@mends(limits.combined_with_random_numbers, differs="it draws other numbers")
def shard_combined_with_random_numbers(b: GraphBuilder) -> Node:
    x = b.input("x", [4, 8])
    return times(b, b.gather(b.mul(x, b.call(aten.rand_like.default, x))))


@mends(limits.weight_reduced_after_what_needs_the_gather)
def weight_reduced_before_the_gather(b: GraphBuilder) -> tuple[Node, ...]:
    ours = torch.ops.asynctp
    x, operands = b.input("x", [4, 8]), ([b.input("a", [8, 4])], [b.input("b", [4, 12])])
    weight, whole = b.call(ours.matmul_all_reduce.default, *operands, [None], "sum", b.group), b.gather(x)
    again = b.call(ours.all_gather.default, b.relu(whole), b.ranks, b.group)
    return b.mm(whole, weight), b.call(c10d.wait_tensor.default, again)


@mends(limits.gathered_and_transposed)
def transposed_and_gathered(b: GraphBuilder) -> Node:
    shards = b.gather(b.permute(b.input("x", [4, 8]), [1, 0]))
    return times(b, b.cat(b.chunks(shards), dim=1))


@mends(limits.product_transposed_before_it_is_reduced)
def sum_transposed(b: GraphBuilder) -> Node:
    total = b.permute(b.all_reduce(b.mm(b.input("x", [16, 4]), b.input("w", [4, 8]))), [1, 0])
    return b.call(aten.clone.default, total, memory_format=torch.contiguous_format)


@mends(limits.relu_after_the_gather_without_deviations)
def relu_before_the_gather_without_deviations(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.relu(b.input("x", [4, 8]))))


mends(limits.relu_after_the_gather_without_deviations, config={"deviate": True})(
    limits.relu_after_the_gather_without_deviations
)


_before = own_ops.weight_of_an_own_op_after_the_gather
mends(_before, using=registering(register_local, "own_like::scale"))(_before)


@mends(own_ops.weight_of_an_own_op_after_the_gather, differs="nothing evaluates the op here")
def weight_of_an_own_op_before_the_gather(b: GraphBuilder) -> Node:
    x, weight = b.input("x", [4, 8]), called(b, own.scale, b.input("w", [8, 12]), shape=(8, 12))
    return b.mm(b.gather(x), weight)


# --- 3xx limits ------------------------------------------------------------------------------------------------
def of_dtype(dtype: torch.dtype) -> None:
    """A gather of operands in each dtype that the hint names."""

    def build(b: GraphBuilder) -> Node:
        if dtype.itemsize > 1:
            return times(b, gathered(b, dtype=dtype))
        w = b.input("w", [32, 16], FP8, column_major=True)
        return b.scaled_mm(gathered(b, 4, 32, dtype=dtype), w, b.input("a_scale", []), b.input("b_scale", []))

    build.__name__ = f"gather_of_{str(dtype).removeprefix('torch.')}"
    mends(limits.gather_of_integers, differs="it is of another dtype")(build)


for _name in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"):
    of_dtype(getattr(torch, _name))


@mends(structure.gather_for_a_matmul_that_widens, differs="it rounds")
def gather_for_a_matmul_that_does_not_widen(b: GraphBuilder) -> Node:
    return times(b, gathered(b, dtype=torch.bfloat16))


@mends(limits.gather_on_another_device)
def gather_on_a_cpu(b: GraphBuilder) -> Node:
    return times(b, gathered(b))


@mends(limits.gather_on_another_device, differs="it is on a GPU")
def gather_on_a_gpu(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.input("x", [4, 8], device="cuda")))


@mends(limits.scales_of_half_a_block, differs="it has other scales")
def scales_of_rows(b: GraphBuilder) -> Node:
    return limits.scaled(b, [16, 1], [1, 16])


@mends(limits.scales_of_half_a_block, differs="it has other scales")
def scales_of_tensors(b: GraphBuilder) -> Node:
    return limits.scaled(b, [], [])


@mends(limits.scales_of_1x128_and_128x128_that_are_not_padded, differs="it has its scales as torch takes them")
def scales_of_1x128_and_128x128_as_scaled_mm_takes_them(b: GraphBuilder) -> Node:
    w, b_scale = b.input("w", [256, 256], FP8, column_major=True), b.input("b_scale", [4, 2], column_major=True)
    a_scale = b.input("a_scale", [16, 2], column_major=True)
    return blockwise(b, gathered(b, 4, 256, dtype=FP8), w, a_scale, b_scale, (4, 5))


@mends(limits.scatter_of_a_product_with_scales_of_blocks_that_are_not_padded, differs="it has its scales as torch does")
def scatter_of_a_product_with_scales_of_blocks_as_scaled_mm_takes_them(b: GraphBuilder) -> Node:
    a, w = b.input("a", [16, 256], FP8), b.input("w", [256, 256], FP8, column_major=True)
    a_scale, b_scale = b.input("a_scale", [16, 2], column_major=True), b.input("b_scale", [4, 2], column_major=True)
    return b.scatter(blockwise(b, a, w, a_scale, b_scale, (4, 5)))


@mends(limits.scales_of_128x128_blocks_of_rows_of_several_ranks, differs="a rank has more rows")
def scales_of_128x128_blocks_of_rows_of_one_rank(b: GraphBuilder) -> Node:
    w = b.input("w", [256, 256], FP8, column_major=True)
    a_scale, b_scale = b.input("a_scale", [4, 4], column_major=True), b.input("b_scale", [256, 2], column_major=True)
    return blockwise(b, gathered(b, 128, 256, dtype=FP8), w, a_scale, b_scale, (5, 4))


def blockwise(b: GraphBuilder, a: Node, w: Node, a_scale: Node, b_scale: Node, recipe: tuple[int, int]) -> Node:
    """`torch.nn.functional.scaled_mm` with blocks of 1x128 (4) or 128x128 (5)."""
    with b.mode:
        value = torch.empty(a.meta["val"].shape[0], w.meta["val"].shape[1], dtype=torch.bfloat16)
    sides = ([a_scale], [recipe[0]], [], [b_scale], [recipe[1]], [])
    return b.call_like(value, aten._scaled_mm_v2.default, a, w, *sides, None, torch.bfloat16)


@mends(limits.large_contraction_on_a_gpu, differs="it is too large")
def large_gather_of_rows_on_a_gpu(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.input("x", [8192, 1024], device="cuda")))


@mends(limits.large_scatter_of_columns_on_a_gpu, differs="it is too large")
def large_scatter_of_rows_on_a_gpu(b: GraphBuilder) -> Node:
    return b.scatter(b.mm(b.input("a", [4096, 64], device="cuda"), b.input("w", [64, 8192], device="cuda")))


# --- bits ------------------------------------------------------------------------------------------------------
@mends(limits.rows_in_fp32_that_keep_their_bits, differs="it is bfloat16")
def rows_in_16_bits_that_keep_their_bits(b: GraphBuilder) -> Node:
    return limits.on_gpu(b, 64)


@mends(limits.rows_of_120_bytes_that_keep_their_bits, differs="it has other columns")
def rows_of_128_bytes_that_keep_their_bits(b: GraphBuilder) -> Node:
    return limits.on_gpu(b, 64)


mends(limits.rows_in_int8_that_keep_their_bits, config={"invariant": "off"})(limits.rows_in_int8_that_keep_their_bits)
mends(limits.huge_sum_that_keeps_its_bits, config={"invariant": "off"})(limits.huge_sum_that_keeps_its_bits)
