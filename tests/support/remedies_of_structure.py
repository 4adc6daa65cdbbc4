"""Remedies of the reasons ATP0xx and ATP1xx, each followed on a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import getitem
from typing import Any

import reason_rows_of_own_ops as own_ops
import reason_rows_of_scope as scope
import reason_rows_of_structure as structure
import serving_ops
import torch
from graph_builder import GraphBuilder, aten, c10d
from reason_rows import FP8, gathered, mends, product, quantized, times
from reason_rows_of_own_ops import called, own
from torch.fx import Node

from asynctp_passes import register_collective, register_local, register_matmul, register_rowwise, unregister


def registering(register: Callable[..., Any], op: Any, **arguments: Any) -> Callable[[], AbstractContextManager[None]]:
    """Registers an op for a while."""

    @contextmanager
    def registered() -> Iterator[None]:
        register(op, **arguments)
        try:
            yield
        finally:
            unregister(op)

    return registered


# --- 101 to 103: pieces ------------------------------------------------------------------------------------------
@mends(structure.gathered_pieces_reversed, differs="a reordered gather is another tensor")
def gathered_pieces_in_rank_order(b: GraphBuilder) -> Node:
    return times(b, b.cat(b.chunks(gathered(b))))


@mends(structure.rows_and_columns_sliced_off_after_the_gather)
def columns_sliced_off_before_the_gather(b: GraphBuilder) -> Node:
    """Columns that no matmul takes are cut off before the gather."""
    columns = b.call(aten.slice.Tensor, b.input("x", [4, 8]), 1, 0, 6)
    rows = b.call(aten.slice.Tensor, b.gather(b.call(aten.clone.default, columns)), 0, 0, 15)
    return b.mm(rows, b.input("w", [6, 12]))


@mends(structure.gathered_pieces_reversed)
def pieces_of_the_result_reversed(b: GraphBuilder) -> Node:
    return b.cat(b.chunks(times(b, gathered(b)))[::-1])


@mends(structure.gathered_rows_flipped)
def result_flipped(b: GraphBuilder) -> Node:
    return b.call(aten.flip.default, times(b, gathered(b)), [0])


@mends(structure.scattered_pieces_reversed, differs="ranks get other pieces")
def scattered_pieces_in_rank_order(b: GraphBuilder) -> Node:
    return b.scatter(b.cat(b.chunks(product(b))))


@mends(structure.flipped_before_the_all_reduce)
def flipped_after_the_all_reduce(b: GraphBuilder) -> Node:
    return b.call(torch.ops.prims.rev.default, b.all_reduce(product(b)), [0])


@mends(structure.gathered_piece_twice)
def piece_of_the_result_twice(b: GraphBuilder) -> Node:
    first, second, third, _ = b.chunks(times(b, gathered(b)))
    return b.cat([first, second, third, third])


@mends(structure.gathered_rows_expanded)
def result_expanded(b: GraphBuilder) -> Node:
    return structure.twice(b, times(b, gathered(b)))


@mends(structure.rows_picked_for_several_experts)
def rows_of_the_result_picked_for_several_experts(b: GraphBuilder) -> Node:
    return b.call(aten.index.Tensor, times(b, structure.of_a_layer(b)), [b.input("routes", [32], torch.int64)])


@mends(structure.rows_twice_before_the_scatter)
def rows_twice_after_the_scatter(b: GraphBuilder) -> Node:
    return structure.twice(b, b.scatter(product(b)))


@mends(structure.gathered_piece_dropped)
def piece_of_the_result_dropped(b: GraphBuilder) -> Node:
    return b.cat(b.chunks(times(b, gathered(b)))[:3])


@mends(structure.pieces_joined_and_cut)
def steps_of_the_result_cut(b: GraphBuilder) -> Node:
    whole = b.cat(b.chunks(gathered(b, 2, 4, 8)), dim=1)
    out = b.reshape(times(b, b.reshape(whole, [32, 8])), [2, 16, 12])
    return b.reshape(b.call(aten.slice.Tensor, out, 1, 0, 5), [10, 12])


@mends(structure.rows_picked_by_an_input)
def rows_of_the_result_picked(b: GraphBuilder) -> Node:
    return b.call(aten.index.Tensor, times(b, structure.of_a_layer(b)), [b.input("last", [5], torch.int64)])


@mends(structure.rows_of_two_kinds_without_the_first_one)
def rows_of_two_kinds_trimmed_after_the_matmuls(b: GraphBuilder) -> Node:
    whole = gathered(b)
    text, image = times(b, whole), b.mm(whole, b.input("v", [8, 12]))
    return b.cat([b.call(aten.slice.Tensor, text, 0, 1, 8), b.call(aten.slice.Tensor, image, 0, 8, 16)])


@mends(structure.half_the_rows_of_what_is_computed, differs="ranks gather half of their rows each")
def only_what_is_used_is_gathered(b: GraphBuilder) -> Node:
    return times(b, b.relu(b.gather(b.call(aten.slice.Tensor, b.input("x", [4, 8]), 0, 0, 2))))


@mends(structure.scattered_rows_trimmed)
def only_rows_that_are_scattered_are_multiplied(b: GraphBuilder) -> Node:
    a = b.input("a", [20, 8])
    return b.scatter(b.mm(b.call(aten.slice.Tensor, a, 0, 0, 16), b.input("a_w", [8, 12])))


@mends(structure.rows_trimmed_before_the_all_reduce)
def rows_trimmed_after_the_all_reduce(b: GraphBuilder) -> Node:
    return b.call(aten.slice.Tensor, b.all_reduce(product(b)), 0, 0, 11)


# --- 104: views --------------------------------------------------------------------------------------------------
@mends(structure.padding_of_a_transposed_product)
def operand_padded_and_its_product_transposed_after_the_scatter(b: GraphBuilder) -> Node:
    w = b.call(aten.constant_pad_nd.default, b.input("a_w", [8, 12]), [0, 4])
    out = b.mm(b.input("a", [15, 8]), w)
    return b.permute(b.scatter(b.cat(b.chunks(out, dim=1))), [1, 0])


@mends(structure.gathered_as_strided)
def gathered_and_reshaped(b: GraphBuilder) -> Node:
    return times(b, b.reshape(gathered(b), [16, 8]))


@mends(structure.gathered_beside_another_tensor)
def results_beside_one_another(b: GraphBuilder) -> Node:
    whole, extra, w = gathered(b), b.input("extra", [4, 8]), b.input("w", [8, 12])
    return b.cat([b.mm(whole, w), b.mm(extra, w)])


@mends(structure.gathered_into_a_larger_buffer)
def result_put_into_a_larger_buffer(b: GraphBuilder) -> Node:
    buffer, whole, w = b.input("buffer", [20, 8]), gathered(b), b.input("w", [8, 12])
    return b.call(aten.slice_scatter.default, b.mm(buffer, w), b.mm(whole, w), 0, 2, 18)


@mends(structure.gather_that_is_padded_in_front)
def result_padded_in_front(b: GraphBuilder) -> Node:
    return b.call(aten.constant_pad_nd.default, times(b, gathered(b)), [0, 0, 1, 0])


@mends(structure.rows_shifted_before_the_scatter)
def operand_shifted(b: GraphBuilder) -> Node:
    a = b.call(aten.constant_pad_nd.default, b.input("a", [16, 8]), [0, 0, 1, -1])
    return b.scatter(b.mm(a, b.input("a_w", [8, 12])))


@mends(structure.columns_of_two_products_joined_before_the_scatter)
def columns_joined_after_the_scatters(b: GraphBuilder) -> Node:
    return b.cat([b.scatter(product(b)), b.scatter(product(b, "c"))], dim=1)


@mends(structure.product_written_into_zeros_before_the_scatter)
def shard_written_into_zeros(b: GraphBuilder) -> Node:
    zeros = b.call(aten.full.default, [4, 5, 12], 0.0)
    return b.call(aten.select_scatter.default, zeros, b.scatter(product(b)), 1, -1)


# --- 105, 106, 117: computed in between ----------------------------------------------------------------------------
@mends(structure.scaled_by_a_sum_of_each_row)
def shard_scaled_by_a_sum_of_each_row(b: GraphBuilder) -> Node:
    x = b.input("x", [4, 8])
    return times(b, b.gather(b.mul(x, b.call(aten.sum.dim_IntList, x, [-1], True))))


@mends(structure.norm_that_is_one_op_after_the_gather)
def norm_of_the_shard(b: GraphBuilder) -> Node:
    norm = b.call(aten.native_layer_norm.default, b.input("x", [4, 8]), [8], None, None, 1e-5)
    return times(b, b.gather(b.call(getitem, norm, 0)))


@mends(structure.combined_with_another_gathered_tensor)
def shards_combined(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.add(b.input("x", [4, 8]), b.input("scale", [4, 8]))))


@mends(structure.gated_after_the_gather)
def shard_gated(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.call(aten.glu.default, b.input("x", [4, 16]))))


_rowwise = registering(register_rowwise, "own_like::normalize")
mends(own_ops.own_op_with_a_fake_of_a_gathered_tensor, using=_rowwise)(own_ops.own_op_with_a_fake_of_a_gathered_tensor)


@mends(structure.product_scaled_before_the_all_reduce)
def sum_scaled(b: GraphBuilder) -> Node:
    return b.call(aten.mul.Tensor, b.all_reduce(product(b)), 0.3)


@mends(structure.relu_before_the_scatter, differs="it works on the sum")
def relu_of_the_sum(b: GraphBuilder) -> Node:
    return b.relu(b.scatter(product(b)))


@mends(own_ops.own_op_before_the_all_reduce, differs="it works on the sum")
def own_op_after_the_all_reduce(b: GraphBuilder) -> Node:
    return called(b, own.scale, b.all_reduce(product(b)))


@mends(own_ops.own_op_that_writes, differs="it works on the sum")
def own_op_that_writes_after_the_all_reduce(b: GraphBuilder) -> Node:
    x, out = b.all_reduce(product(b)), b.input("out", [16, 12])
    op = torch.ops.higher_order.auto_functionalized
    call = b.graph.call_function(op, (own.write_scaled.default,), {"out": out, "x": x})
    call.meta["val"] = (None, out.meta["val"])
    return b.call(getitem, call, 1)


@mends(structure.summed_along_each_row_after_the_gather)
def shard_summed_along_each_row(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.call(aten.cumsum.default, b.input("x", [4, 8]), 1)))


@mends(structure.summed_so_far_before_the_scatter)
def summed_so_far_after_the_scatter(b: GraphBuilder) -> Node:
    return b.call(aten.cumsum.default, b.scatter(product(b)), 1)


_local_embed = registering(register_local, "own_like::embed")
mends(own_ops.own_op_of_other_rows, outcome="SKIPPED", using=_local_embed)(own_ops.own_op_of_other_rows)

_local_scale = registering(register_local, "own_like::scale")  # "if it mixes rows", as the remark says
mends(own_ops.own_op_before_the_all_reduce, outcome="SKIPPED", using=_local_scale)(own_ops.own_op_before_the_all_reduce)


@mends(structure.quantized_by_the_mean_of_each_row, differs="it quantizes by another scale")
def quantized_by_the_amax_of_each_row(b: GraphBuilder) -> Node:
    return quantized(b, lambda x: b.call(aten.amax.default, b.call(aten.abs.default, x), [-1], True))


def quantized_shard(b: GraphBuilder, scale_of: Callable[[Node], Node]) -> Node:
    """As `quantized`, but the shard is."""
    x = b.input("x", [4, 32])
    fp8 = b.call(torch.ops.prims.convert_element_type.default, b.mul(x, scale_of(x)), FP8)
    w = b.input("w", [32, 16], FP8, column_major=True)
    return b.scaled_mm(b.gather(fp8), w, b.input("a_scale", []), b.input("b_scale", []))


@mends(structure.quantized_by_the_mean_of_each_row)
def shard_quantized_by_the_mean_of_each_row(b: GraphBuilder) -> Node:
    return quantized_shard(b, lambda x: b.call(aten.mean.dim, b.call(aten.abs.default, x), [-1], True))


@mends(structure.quantized_by_an_op_of_the_programs_own, differs="nothing evaluates the op here")
def shard_quantized_by_an_op_of_the_programs_own(b: GraphBuilder) -> Node:
    fp8, scale, x = b.input("fp8", [4, 32], FP8), b.input("scale", [4, 1]), b.input("x", [4, 32])
    w = b.input("w", [32, 16], FP8, column_major=True)
    target, op = torch.ops.higher_order.auto_functionalized, torch.ops.registry_like.dynamic_per_token_quant.default
    call = b.call_like((None, fp8.meta["val"], scale.meta["val"]), target, op, out=fp8, x=x, scale=scale)
    made = b.gather(b.call(getitem, call, 1)), w, b.gather(b.call(getitem, call, 2))
    return b.scaled_mm(*made, b.input("b_scale", [1, 16]))


@mends(structure.quantized_by_one_sum, differs="it quantizes by another scale")
def quantized_by_the_largest_element(b: GraphBuilder) -> Node:
    return quantized(b, lambda x: b.call(aten.amax.default, b.call(aten.abs.default, x)))


@mends(structure.quantized_by_one_sum)
def quantized_by_a_sum_that_is_reduced_before(b: GraphBuilder) -> Node:
    x = b.input("x", [4, 32])
    total = b.all_reduce(b.call(aten.sum.default, b.call(aten.abs.default, x)))
    fp8 = b.call(torch.ops.prims.convert_element_type.default, b.mul(b.gather(x), total), FP8)
    w = b.input("w", [32, 16], FP8, column_major=True)
    return b.scaled_mm(fp8, w, b.input("a_scale", []), b.input("b_scale", []))


@mends(structure.quantized_by_an_amax_of_few_rows_each, differs="it quantizes by another scale")
def quantized_by_the_amax_of_its_row(b: GraphBuilder) -> Node:
    return quantized_by_the_amax_of_each_row(b)


# --- 107 to 109, 118: where the ranks are ---------------------------------------------------------------------------
@mends(structure.rank_innermost_in_the_contraction, differs="columns are in another order")
def ranks_one_after_another_in_the_contraction(b: GraphBuilder) -> Node:
    return times(b, b.cat(b.chunks(gathered(b)), dim=1))


@mends(structure.rank_inside_the_columns, differs="ranks get other columns")
def ranks_one_after_another_in_the_columns(b: GraphBuilder) -> Node:
    return b.scatter(b.cat(b.chunks(product(b), dim=1)))


@mends(structure.symbolic_length_regrouped)
def static_length_regrouped(b: GraphBuilder) -> Node:
    return times(b, b.reshape(gathered(b, 12, 8), [4, 96]))


@mends(structure.symbolic_length_regrouped)
def local_length_that_is_dynamic(b: GraphBuilder) -> Node:
    x = b.reshape(b.input("x", [12, 8], dynamic=0), [-1, 96])
    return times(b, b.gather(x))


@mends(structure.gather_for_a_weight_gradient)
def gather_shared_with_a_left_operand(b: GraphBuilder) -> tuple[Node, Node]:
    whole = gathered(b)
    return b.mm(b.input("a", [6, 16]), whole), times(b, whole)


@mends(structure.gather_for_a_weight_gradient, outcome="OVERLAPPED")
def gather_for_a_weight_gradient_beside_matmuls(b: GraphBuilder) -> tuple[Node, ...]:
    whole, other = gathered(b), product(b, "c", rows=2048)
    return b.mm(b.input("a", [6, 16]), whole), other


@mends(structure.gather_for_the_gradient_of_a_batch)
def gather_shared_with_the_input_gradient(b: GraphBuilder) -> tuple[Node, Node]:
    rows = b.reshape(b.cat(b.chunks(gathered(b, 2, 4, 8)), dim=1), [32, 8])
    return b.mm(b.permute(rows, [1, 0]), b.input("saved", [32, 12])), times(b, rows)


@mends(structure.gather_for_the_gradient_of_a_batch, outcome="OVERLAPPED")
def gather_for_the_gradient_of_a_batch_beside_matmuls(b: GraphBuilder) -> tuple[Node, Node]:
    rows = b.reshape(b.cat(b.chunks(gathered(b, 2, 4, 8)), dim=1), [32, 8])
    return b.mm(b.permute(rows, [1, 0]), b.input("saved", [32, 12])), product(b, "c", rows=2048)


# --- 110, 111: sums -------------------------------------------------------------------------------------------------
@mends(structure.row_added_before_the_scatter, differs="the row is added once, not once for each rank")
def row_added_after_the_scatter(b: GraphBuilder) -> Node:
    return b.add(b.scatter(product(b)), b.input("row", [12]))


@mends(structure.column_added_before_the_all_reduce)
def column_expanded_before_the_all_reduce(b: GraphBuilder) -> Node:
    column = b.call(aten.expand.default, b.input("column", [16, 1]), [16, 12])
    return b.all_reduce(b.add(column, product(b)))


@mends(structure.number_added_before_the_scatter)
def number_expanded_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.add(product(b), b.call(aten.full.default, [16, 12], 1.0, dtype=torch.float32)))


@mends(structure.term_of_a_transposed_product)
def sum_transposed_after_the_scatter(b: GraphBuilder) -> Node:
    total = b.add(product(b), b.permute(b.input("routed", [12, 16]), [1, 0]))
    return b.permute(b.scatter(b.cat(b.chunks(total, dim=1))), [1, 0])


@mends(structure.sum_with_alpha)
def sum_of_a_scaled_operand(b: GraphBuilder) -> Node:
    other = b.mm(b.call(aten.mul.Tensor, b.input("c", [16, 8]), 2), b.input("c_w", [8, 12]))
    return b.scatter(b.add(product(b), other))


@mends(structure.term_added_twice)
def term_added_once(b: GraphBuilder) -> Node:
    return b.scatter(b.add(product(b), b.call(aten.mul.Tensor, b.input("residual", [16, 12]), 2)))


@mends(structure.product_added_to_itself)
def product_added_once(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.mul.Tensor, product(b), 2))


@mends(structure.sum_of_a_product_and_a_transpose)
def sum_of_products_in_one_layout(b: GraphBuilder) -> Node:
    square = b.mm(b.input("c", [12, 8]), b.input("v", [8, 12]))
    d, u = b.input("d", [12, 8]), b.input("u", [8, 12])
    return b.scatter(b.add(square, b.mm(b.permute(u, [1, 0]), b.permute(d, [1, 0]))))


# --- 113: collectives -----------------------------------------------------------------------------------------------
for _before in (
    structure.gather_into_a_buffer,
    structure.gather_in_place,
    structure.gather_of_a_list_in_place,
    structure.gathers_of_several_in_place,
    structure.gather_by_symmetric_memory,
    structure.gather_by_a_custom_op_that_writes,
):

    @mends(_before, differs="the row's op is not evaluated here")
    def functional_gather(b: GraphBuilder) -> Node:
        return times(b, gathered(b))


@mends(structure.gather_coalesced_and_kept_as_a_list)
def gathers_of_a_list_taken_one_by_one(b: GraphBuilder) -> Node:
    first, second = b.gather_list(b.input("x", [4, 8]), b.input("y", [4, 8]))
    w = b.input("w", [8, 12])
    return b.cat([b.mm(first, w), b.mm(second, w)])


@mends(structure.scatter_coalesced_and_kept_as_a_list, differs="the row returns no tensor")
def scatters_of_a_list_taken_one_by_one(b: GraphBuilder) -> tuple[Node, ...]:
    products = [product(b), product(b, "c")]
    several = b.call(c10d.reduce_scatter_tensor_coalesced.default, products, "sum", 4, "tp")
    return tuple(b.wait_list(several, 2))


for _before in (
    structure.scatter_in_place,
    structure.scatter_into_a_buffer,
    structure.scatter_of_a_list_in_place,
    structure.scatters_of_several_in_place,
):

    @mends(_before, differs="the row's op is not evaluated here")
    def functional_scatter(b: GraphBuilder) -> Node:
        return b.scatter(product(b))


@mends(structure.all_reduce_by_c10d, differs="the row's op is not evaluated here")
def functional_all_reduce(b: GraphBuilder) -> Node:
    return b.relu(b.all_reduce(product(b)))


@mends(structure.all_reduce_of_a_list_in_place, differs="the row's op is not evaluated here")
def functional_all_reduce_of_a_list(b: GraphBuilder) -> Node:
    both = b.call(c10d.all_reduce_coalesced.default, [product(b), product(b, "c")], "sum", "tp")
    return b.add(*b.wait_list(both, 2))


for _before in (structure.gather_by_a_custom_op, structure.scatter_by_a_custom_op):
    mends(_before, using=serving_ops.registered)(_before)

mends(
    own_ops.own_op_that_takes_a_group,
    using=registering(register_collective, own.custom_sum_of, kind="all_reduce", input="x", group="group_name"),
)(own_ops.own_op_that_takes_a_group)


# --- 114, 116: padding ----------------------------------------------------------------------------------------------
@mends(structure.padding_removed_after_the_gather)
def padding_of_the_result_removed(b: GraphBuilder) -> Node:
    kept = b.input("kept", [15], torch.int64)
    return b.call(aten.index_select.default, times(b, structure.of_a_layer(b)), 0, kept)


@mends(structure.padding_sliced_off_rows_with_scales, differs="the padding has scales, too")
def padding_sliced_off_the_scaled_result(b: GraphBuilder) -> Node:
    w, scales = (
        b.input("w", [32, 16], FP8, column_major=True),
        (b.input("a_scale", [16, 1]), b.input("b_scale", [1, 16])),
    )
    out = b.scaled_mm(gathered(b, 4, 32, dtype=FP8), w, *scales)
    return b.call(aten.slice.Tensor, out, 0, 0, 15)


@mends(structure.padding_sliced_off_the_contraction_after_the_gather, differs="the weight has one row more")
def contraction_that_the_ranks_divide(b: GraphBuilder) -> Node:
    return times(b, b.cat(b.chunks(gathered(b, 8, 4)), dim=1))


@mends(structure.padding_before_a_residual_and_the_scatter, differs="the residual has no row for the padding")
def padding_after_a_residual_and_before_the_scatter(b: GraphBuilder) -> Node:
    total = b.add(product(b, rows=15), b.input("residual", [15, 12]))
    return b.scatter(b.call(aten.constant_pad_nd.default, total, [0, 0, 0, 1]))


@mends(structure.padding_of_sequences_that_are_scattered_by_the_batch)
def padding_of_sequences_after_the_scatter(b: GraphBuilder) -> Node:
    shard = b.scatter(b.reshape(product(b, rows=28), [4, 7, 12]))
    return b.call(aten.constant_pad_nd.default, shard, [0, 0, 0, 1])


@mends(structure.gather_that_is_padded_for_the_matmul, differs="the rows of its result lie together")
def gather_that_is_not_padded(b: GraphBuilder) -> Node:
    return b.mm(gathered(b, 3, 6), b.input("w", [6, 10]))


@mends(structure.scatter_of_a_padded_matmul)
def scatter_of_a_matmul_that_is_not_padded(b: GraphBuilder) -> Node:
    return b.scatter(b.mm(b.input("a", [12, 6]), b.input("w", [6, 12])))


# --- 115: matmuls ---------------------------------------------------------------------------------------------------
@mends(structure.gather_for_a_batched_matmul, differs="it has one weight")
def gather_for_a_linear(b: GraphBuilder) -> Node:
    return b.call(aten.linear.default, gathered(b, 1, 4, 8), b.input("w", [12, 8]))


@mends(structure.scatter_of_a_batched_matmul, differs="it has one weight")
def scatter_of_a_linear(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.linear.default, b.input("a", [4, 4, 8]), b.input("w", [12, 8])))


@mends(own_ops.weights_in_int8)
def weights_in_int8_of_a_linear(b: GraphBuilder) -> Node:
    weight = b.call(torch.ops.prims.convert_element_type.default, b.input("w", [12, 8], torch.int8), torch.float32)
    scaled = b.mul(weight, b.reshape(b.input("s", [12]), [12, 1]))
    return b.scatter(b.call(aten.linear.default, b.input("x", [16, 8]), scaled))


mends(structure.gather_for_a_custom_matmul, using=serving_ops.registered)(structure.gather_for_a_custom_matmul)
mends(own_ops.own_op_of_the_shapes_of_a_matmul, using=registering(register_matmul, own.finish, a="w", b="x"))(
    own_ops.own_op_of_the_shapes_of_a_matmul
)


# --- 120: graphs ----------------------------------------------------------------------------------------------------
@mends(scope.gather_multiplied_in_a_region, differs="nothing evaluates a region here")
def gather_multiplied_beside_it(b: GraphBuilder) -> Node:
    return b.mm(gathered(b), b.input("w", [8, 8]))


@mends(scope.scatter_of_a_product_in_a_region, differs="nothing evaluates a region here")
def scatter_of_a_product_beside_it(b: GraphBuilder) -> Node:
    return b.scatter(b.mm(b.input("x", [16, 8]), b.input("w", [8, 8])))
