"""Graphs whose structure is refused, one for each reason ATP1xx at least."""

from __future__ import annotations

from operator import add, floordiv, getitem, mod, neg

import torch
from graph_builder import GraphBuilder, aten, c10d
from reason_rows import FP8, gathered, product, quantized, row, times
from torch.fx import Node


def of_a_layer(b: GraphBuilder) -> Node:
    """What is computed on a rank, gathered: no input of the graph."""
    return b.gather(b.relu(b.input("x", [4, 8])))


# --- 1xx structure ---------------------------------------------------------------------------------------------
@row("PIECES_REORDERED", "cat: pieces start at elements")
def gathered_pieces_reversed(b: GraphBuilder) -> Node:
    return times(b, b.cat(b.chunks(gathered(b))[::-1]))


@row("PIECES_REORDERED", "cat")
def scattered_pieces_reversed(b: GraphBuilder) -> Node:
    return b.scatter(b.cat(b.chunks(product(b))[::-1]))


@row("PIECES_REORDERED", "flip")
def gathered_rows_flipped(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.flip.default, gathered(b), [0]))


@row("PIECES_REPEATED", "cat")
def gathered_piece_twice(b: GraphBuilder) -> Node:
    first, second, third, _ = b.chunks(gathered(b))
    return times(b, b.cat([first, second, third, third]))


@row("PIECES_REPEATED", "expand")
def gathered_rows_expanded(b: GraphBuilder) -> Node:
    wide = b.call(aten.expand.default, b.reshape(gathered(b), [16, 1, 8]), [16, 2, 8])
    return times(b, b.reshape(wide, [32, 8]))


def twice(b: GraphBuilder, x: Node) -> Node:
    """Each row twice."""
    rows, columns = x.meta["val"].shape
    return b.reshape(
        b.call(aten.expand.default, b.reshape(x, [rows, 1, columns]), [rows, 2, columns]), [2 * rows, columns]
    )


@row("PIECES_REPEATED", "expand")
def rows_twice_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(twice(b, product(b)))


@row("PIECES_MISSING", "covers 96 elements")
def gathered_piece_dropped(b: GraphBuilder) -> Node:
    return times(b, b.cat(b.chunks(gathered(b))[:3]))


@row("PIECES_MISSING", "mm")
def gathered_rows_trimmed(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.slice.Tensor, gathered(b), 0, 0, 11))


@row("PIECES_MISSING", "relu -> slice -> mm; mm: ")
def half_the_rows_of_what_is_computed(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.slice.Tensor, b.relu(gathered(b)), 0, 0, 8))


@row("PIECES_MISSING", "slice")
def scattered_rows_trimmed(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.slice.Tensor, product(b, rows=20), 0, 0, 16))


@row("PIECES_MISSING", "slice")
def rows_trimmed_before_the_all_reduce(b: GraphBuilder) -> Node:
    return b.all_reduce(b.call(aten.slice.Tensor, product(b), 0, 0, 11))


@row("PIECES_MISSING", "picks rows by number")
def rows_picked_by_an_input(b: GraphBuilder) -> Node:
    """The last token of each sequence, as serving does before the head."""
    return times(b, b.call(aten.index.Tensor, of_a_layer(b), [b.input("last", [5], torch.int64)]))


@row("PIECES_MISSING", "embedding -> mm; aten.embedding.default embedding: picks rows by number")
def rows_looked_up_as_embeddings(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.embedding.default, of_a_layer(b), b.input("last", [5], torch.int64)))


@row("PIECES_MISSING", "picks rows by number")
def elements_picked_by_an_input(b: GraphBuilder) -> Node:
    """What `take_along_dim` is."""
    last = b.call(aten.expand.default, b.input("last", [5, 1], torch.int64), [5, 8])
    return times(b, b.call(aten.gather.default, of_a_layer(b), 0, last))


@row("PIECES_MISSING", "picks rows by number")
def rows_picked_of_a_dynamic_number(b: GraphBuilder) -> Node:
    """As in the static case: what is said does not depend on which sizes are symbols."""
    rows = b.gather(b.input("x", [4, 8], dynamic=0))
    return times(b, b.call(aten.index.Tensor, rows, [b.input("last", [5], torch.int64)]))


@row("PIECES_REPEATED", "picks rows by number")
def rows_picked_for_several_experts(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.index.Tensor, of_a_layer(b), [b.input("routes", [32], torch.int64)]))


@row("VIEW_NOT_UNDERSTOOD", "pads by [0, 0, 1, -1]")
def rows_shifted_before_the_scatter(b: GraphBuilder) -> Node:
    """What a token shift is in backward: no padding to a multiple of the ranks."""
    return b.scatter(b.call(aten.constant_pad_nd.default, product(b), [0, 0, 1, -1]))


@row("VIEW_NOT_UNDERSTOOD", "joins pieces of different products: mm, mm_1")
def columns_of_two_products_joined_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.cat([product(b), product(b, "c")], dim=1))


@row("COMPUTED_BETWEEN", "joins pieces of one product, with factors or terms of their own: mul, slice_2")
def one_product_whose_halves_are_scaled_apart(b: GraphBuilder) -> Node:
    whole = product(b)
    first, second = (b.call(aten.slice.Tensor, whole, 0, *ends) for ends in ((0, 8), (8, 16)))
    return b.scatter(b.cat([b.mul(first, 2.0), second]))


@row("PIECES_MISSING", "takes [3, 8] of [16, 8]")
def gathered_rows_cut_by_a_padding(b: GraphBuilder) -> Node:
    """More than half: it is as a slice, and nothing that Inductor did."""
    return times(b, b.call(aten.constant_pad_nd.default, gathered(b), [0, 0, 0, -13]))


@row("PIECES_MISSING", "covers 56 elements from 8 of 128")
def rows_of_two_kinds_without_the_first_one(b: GraphBuilder) -> Node:
    """Two weights for two kinds of tokens, and a row that nothing takes."""
    whole = gathered(b)
    text, image = (b.call(aten.slice.Tensor, whole, 0, *ends) for ends in ((1, 8), (8, 16)))
    return b.cat([times(b, text), b.mm(image, b.input("v", [8, 12]))])


@row("PIECES_MISSING", "slice")
def pieces_joined_and_cut(b: GraphBuilder) -> Node:
    """All pieces are taken, and then steps are dropped of the sequences that they make."""
    whole = b.cat(b.chunks(gathered(b, 2, 4, 8)), dim=1)
    return times(b, b.reshape(b.call(aten.slice.Tensor, whole, 1, 0, 5), [10, 8]))


@row("VIEW_NOT_UNDERSTOOD", "written into a part of another")
def gathered_into_a_larger_buffer(b: GraphBuilder) -> Node:
    buffer = b.input("buffer", [20, 8])
    return times(b, b.call(aten.slice_scatter.default, buffer, gathered(b), 0, 2, 18))


@row("VIEW_NOT_UNDERSTOOD", "where the program takes a slice, gather that by itself")
def gradient_of_a_slice_before_the_scatter(b: GraphBuilder) -> Node:
    made, zeros = b.mm(b.input("tangents_1", [12, 8]), b.input("w", [8, 12])), b.call(aten.full.default, [16, 12], 0.0)
    return b.scatter(b.call(aten.slice_scatter.default, zeros, made, 0, 4, 16))


@row("VIEW_NOT_UNDERSTOOD", "written into a part of another")
def product_written_into_zeros_before_the_scatter(b: GraphBuilder) -> Node:
    """The backward of picking one row."""
    zeros = b.call(aten.full.default, [16, 5, 12], 0.0)
    return b.scatter(b.call(aten.select_scatter.default, zeros, product(b), 1, -1))


@row("PIECES_REORDERED", "prims.rev.default")
def gathered_and_flipped(b: GraphBuilder) -> Node:
    """As Inductor writes it."""
    return times(b, b.call(torch.ops.prims.rev.default, gathered(b), [0]))


@row("PIECES_REORDERED", "prims.rev.default")
def flipped_before_the_all_reduce(b: GraphBuilder) -> Node:
    return b.all_reduce(b.call(torch.ops.prims.rev.default, product(b), [0]))


@row("VIEW_NOT_UNDERSTOOD", "view_as_complex")
def gathered_as_complex_numbers(b: GraphBuilder) -> Node:
    whole = b.call(aten.view_as_complex.default, gathered(b, 4, 8, 2))
    return times(b, whole)


@row("VIEW_NOT_UNDERSTOOD", "as_strided")
def gathered_as_strided(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.as_strided.default, gathered(b), [16, 8], [8, 1]))


@row("VIEW_NOT_UNDERSTOOD", "other tensors: extra")
def gathered_beside_another_tensor(b: GraphBuilder) -> Node:
    return times(b, b.cat([gathered(b), b.input("extra", [4, 8])]))


@row("COMPUTED_BETWEEN", "number of rows")
def scaled_by_a_sum_of_each_row(b: GraphBuilder) -> Node:
    """The order in which a sum rounds may depend on how many rows there are."""
    whole = gathered(b)
    return times(b, b.call(aten.mul.Tensor, whole, b.call(aten.sum.dim_IntList, whole, [-1], True)))


@row("COMPUTED_BETWEEN", "mm -> mul")
def product_scaled_before_the_all_reduce(b: GraphBuilder) -> Node:
    return b.all_reduce(b.call(aten.mul.Tensor, product(b), 0.3))


@row("COMPUTED_BETWEEN", "native_layer_norm -> getitem -> mm")
def norm_that_is_one_op_after_the_gather(b: GraphBuilder) -> Node:
    """Graphs that Inductor has not decomposed have such."""
    norm = b.call(aten.native_layer_norm.default, gathered(b), [8], None, None, 1e-5)
    return times(b, b.call(getitem, norm, 0))


@row("COMPUTED_BETWEEN", "wait_tensor has a value for each row")
def combined_with_another_gathered_tensor(b: GraphBuilder) -> Node:
    """It is the same on all ranks, and not one value for all rows."""
    other = b.gather(b.input("scale", [4, 8]))
    return times(b, b.add(gathered(b), other))


@row("COMPUTED_BETWEEN", "mm -> relu")
def relu_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.relu(product(b)))


@row("COMPUTED_BETWEEN", "mm -> glu")
def gated_before_the_scatter(b: GraphBuilder) -> Node:
    """Inductor decomposes the other activations, not this one."""
    return b.scatter(b.call(aten.glu.default, product(b)))


@row("COMPUTED_BETWEEN", "glu -> mm")
def gated_after_the_gather(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.glu.default, gathered(b, 4, 16)))


# --- ops that may make a row of several ---------------------------------------------------------------------------
@row("NOT_ROWWISE", "[cumsum -> mm; aten.cumsum.default may make a row of several]")
def summed_so_far_after_the_gather(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.cumsum.default, gathered(b), 0))


@row("NOT_ROWWISE", "aten.cumsum.default may")
def summed_along_each_row_after_the_gather(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.cumsum.default, gathered(b), 1))


@row("NOT_ROWWISE", "sort -> getitem -> mm")
def sorted_after_the_gather(b: GraphBuilder) -> Node:
    return times(b, b.call(getitem, b.call(aten.sort.default, gathered(b), 0), 0))


@row("NOT_ROWWISE", "mm -> cumsum")
def summed_so_far_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.cumsum.default, product(b), 1))


@row("COMPUTED_BETWEEN", "add -> add -> mm")
def computed_or_sorted_before_the_matmul(b: GraphBuilder) -> Node:
    """The way without an op of rows is told, though it is longer."""
    whole = gathered(b)
    by_rows = b.add(b.call(aten.sum.dim_IntList, whole, [-1], True), whole)
    return times(b, b.add(by_rows, b.call(getitem, b.call(aten.sort.default, whole, 0), 0)))


def _stored(b: GraphBuilder, rows: Node) -> Node:
    zeros, places = b.call(aten.full.default, [32, 8], 0.0), b.input("places", [16], torch.int64)
    return b.call(aten.index_put.default, zeros, [places], rows, True)


@row("NOT_ROWWISE", "mm -> index_put; aten.index_put.default may make a row of several")
def stored_by_index_before_the_all_reduce(b: GraphBuilder) -> Node:
    """As experts add to their tokens."""
    return b.all_reduce(_stored(b, times(b, b.input("a", [16, 8]), 8)))


@row("NOT_ROWWISE", "[index_put -> mm; aten.index_put.default may make a row of several]")
def stored_by_index_after_the_gather(b: GraphBuilder) -> Node:
    """A buffer of the experts' tokens, of more rows than there are tokens."""
    return times(b, _stored(b, gathered(b)))


@row("NOT_ROWWISE", "topk -> getitem -> mm")
def largest_of_each_column_after_the_gather(b: GraphBuilder) -> Node:
    return times(b, b.call(getitem, b.call(aten.topk.default, gathered(b), 4, 0), 0))


@row("NOT_ROWWISE", "_fft_c2c -> view_as_real -> select -> mm")
def transformed_after_the_gather(b: GraphBuilder) -> Node:
    made = b.call(aten._fft_c2c.default, b.call(aten.to.dtype, gathered(b), torch.complex64), [0], 0, True)
    return times(b, b.call(aten.select.int, b.call(aten.view_as_real.default, made), -1, 0))


@row("NOT_ROWWISE", "aten.avg_pool2d.default may make a row of several")
def pooled_after_the_gather(b: GraphBuilder) -> Node:
    """An image of tokens, made smaller: no size stays as it was."""
    image = b.reshape(b.permute(gathered(b), [1, 0]), [1, 8, 4, 4])
    pooled = b.call(aten.avg_pool2d.default, image, [2, 2], [2, 2])
    return times(b, b.permute(b.reshape(pooled, [8, 4]), [1, 0]))


@row("NO_MATMUL", "used by aten.histc.default")
def counted_after_the_gather(b: GraphBuilder) -> Node:
    """A statistic is no rows."""
    return b.mm(b.reshape(b.call(aten.histc.default, gathered(b), 8), [1, 8]), b.input("v", [8, 12]))


@row("NOT_ROWWISE", "[index -> mm; aten.index.Tensor index: picks elements of rows by number]")
def columns_taken_in_another_order_after_the_gather(b: GraphBuilder) -> Node:
    """As quantized weights want them that are sorted by activation."""
    return times(b, b.call(aten.index.Tensor, gathered(b), [None, b.input("order", [8], torch.int64)]))


@row("NOT_ROWWISE", "aten.index_select.default index_select: picks elements of rows by number")
def columns_taken_in_another_order_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.index_select.default, product(b), 1, b.input("order", [12], torch.int64)))


@row("NOT_ROWWISE", "[flip -> mm; aten.flip.default flip: reorders elements of rows]")
def columns_flipped_after_the_gather(b: GraphBuilder) -> Node:
    """The rows stay where they are."""
    return times(b, b.call(aten.flip.default, gathered(b), [1]))


@row("NOT_ROWWISE", "aten.flip.default flip: reorders elements of rows")
def columns_flipped_before_the_all_reduce(b: GraphBuilder) -> Node:
    return b.all_reduce(b.call(aten.flip.default, product(b), [-1]))


@row("NOT_ROWWISE", "picks elements of rows by number")
def pixels_of_a_gathered_image(b: GraphBuilder) -> Node:
    """No table of embeddings: as grid_sample and interpolate look pixels up."""
    image = b.call(aten.permute.default, b.reshape(b.gather(b.input("image", [4, 8])), [1, 4, 4, 8]), [0, 3, 1, 2])
    y, x = (b.input(name, [6, 6], torch.int64) for name in ("y", "x"))
    found = b.relu(b.call(aten.index.Tensor, image, [None, None, y, x]))
    return b.mm(b.reshape(b.call(aten.permute.default, found, [0, 2, 3, 1]), [36, 8]), b.input("w", [8, 12]))


@row("PIECES_MISSING", "covers 120 elements from 8 of 128")
def first_row_cut_off(b: GraphBuilder) -> Node:
    """Shards are even, and no padding is in front of them."""
    return times(b, b.call(aten.slice.Tensor, gathered(b), 0, 1, 16))


@row("PIECES_MISSING", "do not count every element once")
def last_column_cut_off(b: GraphBuilder) -> Node:
    return b.mm(b.call(aten.slice.Tensor, gathered(b), 1, 0, 7), b.input("w", [7, 12]))


@row("NO_MATMUL", "made by aten.cumsum.default")
def gradient_of_what_was_summed_so_far(b: GraphBuilder) -> Node:
    """A backward, by the name of its input: no matmul goes on with a parameter's gradient."""
    return b.all_reduce(b.call(aten.cumsum.default, times(b, b.input("tangents_1", [16, 8]), 8), 0))


@row("NO_MATMUL", "used by aten.convolution.default")
def convolved_after_the_gather(b: GraphBuilder) -> Node:
    return _convolved(b, gathered(b), b.input("kernel", [8, 8, 3]))


@row("NO_MATMUL", "used by aten.convolution.default")
def convolved_by_a_gathered_kernel(b: GraphBuilder) -> Node:
    """As FSDP gathers it."""
    return _convolved(b, b.input("images", [16, 8]), b.gather(b.input("kernel", [2, 8, 3])))


def _convolved(b: GraphBuilder, x: Node, kernel: Node) -> Node:
    images = b.call(aten.permute.default, b.reshape(x, [2, 8, 8]), [0, 2, 1])
    made = b.call(aten.convolution.default, images, kernel, None, [1], [1], [1], False, [0], 1)
    return b.mm(b.reshape(b.call(aten.permute.default, made, [0, 2, 1]), [16, 8]), b.input("v", [8, 12]))


@row("NO_MATMUL", "used by aten._scaled_dot_product_flash_attention_for_cpu.default")
def keys_attended_after_the_gather(b: GraphBuilder) -> Node:
    """As context parallelism gathers them."""
    return times(b, _attended(b, gathered(b)))


def _attended(b: GraphBuilder, keys: Node) -> Node:
    heads = b.reshape(keys, [1, 2, 8, 8])
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    return b.reshape(b.call(getitem, b.call(op, heads, heads, heads), 0), [16, 8])


@row("NO_MATMUL", "made by aten._scaled_dot_product_flash_attention_for_cpu.default")
def product_attended_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(_attended(b, times(b, b.input("a", [16, 8]), 8)))


@row("NO_MATMUL", "used by aten.zeros_like.default")
def zeros_of_the_gathered_sizes(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.zeros_like.default, gathered(b)))


# --- what is put to other rows ------------------------------------------------------------------------------------
@row("NO_MATMUL", "used by aten.mean.dim")
def statistics_of_all_ranks(b: GraphBuilder) -> Node:
    """As a batch norm gathers them."""
    x, mean = b.input("rows", [6, 8]), b.call(aten.mean.dim, gathered(b, 1, 8), [0])
    return times(b, b.call(aten.sub.Tensor, x, mean))


@row("NO_MATMUL", "used by aten.gt.Scalar")
def mask_as_large_as_the_rows(b: GraphBuilder) -> Node:
    mask = b.call(aten.gt.Scalar, gathered(b), 0)
    return times(b, b.call(aten.where.self, mask, b.input("rows", [16, 8]), b.input("fill", [])))


@row("NO_MATMUL", "used by aten.mul.Tensor")
def gate_of_each_row(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.mul.Tensor, b.input("rows", [16, 8]), gathered(b, 4, 1)))


@row("NO_MATMUL", "used by aten.add.Tensor")
def positions_of_a_batch(b: GraphBuilder) -> Node:
    rows = b.call(aten.add.Tensor, b.input("rows", [2, 16, 8]), gathered(b))
    return times(b, b.reshape(rows, [32, 8]))


@row("WEIGHT_GATHER", "mm is of an input of the graph, and the group gathers parameters")
def positions_beside_a_weight(b: GraphBuilder) -> tuple[Node, ...]:
    weight = b.gather(b.input("weight", [2, 12]))
    rows = b.add(b.input("rows", [16, 8]), b.gather(b.input("positions", [4, 8])))
    return (b.mm(rows, weight),)


@row("WEIGHT_GATHER", "and the group gathers parameters")
def prefix_beside_a_weight(b: GraphBuilder) -> tuple[Node, ...]:
    weight = b.gather(b.input("weight", [2, 12]))
    return (b.mm(b.cat([b.gather(b.input("prefix", [1, 8])), b.input("rows", [16, 8])]), weight),)


@row("VIEW_NOT_UNDERSTOOD", "slice_scatter puts a part among zeros, so that the sum gathers the parts of all ranks")
def part_written_into_zeros_before_the_all_reduce(b: GraphBuilder) -> tuple[Node, ...]:
    """As the backward of a slice has it."""
    zeros = b.call(aten.full.default, [64, 12], 0.0)
    return (b.all_reduce(b.call(aten.slice_scatter.default, zeros, product(b), 0, 16, 32)),)


@row("VIEW_NOT_UNDERSTOOD", "constant_pad_nd puts a part among zeros")
def part_padded_before_the_all_reduce(b: GraphBuilder) -> Node:
    return b.all_reduce(b.call(aten.constant_pad_nd.default, product(b), [0, 0, 16, 32]))


@row("QUANTIZED_AFTER_GATHER", "number of rows")
def quantized_by_the_mean_of_each_row(b: GraphBuilder) -> Node:
    return quantized(b, lambda x: b.call(aten.mean.dim, b.call(aten.abs.default, x), [-1], True))


@row("QUANTIZED_AFTER_GATHER", "dynamic_per_token_quant -> getitem -> _scaled_mm")
def quantized_by_an_op_of_the_programs_own(b: GraphBuilder) -> Node:
    """Functionalized, as in a compiled graph of a serving framework."""
    fp8, scale = b.input("fp8", [16, 32], FP8), b.input("scale", [16, 1])
    w = b.input("w", [32, 16], FP8, column_major=True)
    target, op = torch.ops.higher_order.auto_functionalized, torch.ops.registry_like.dynamic_per_token_quant.default
    values = (None, fp8.meta["val"], scale.meta["val"])
    call = b.call_like(values, target, op, out=fp8, x=gathered(b, 4, 32), scale=scale)
    return b.scaled_mm(b.call(getitem, call, 1), w, b.call(getitem, call, 2), b.input("b_scale", [1, 16]))


@row("MIXES_RANKS", "sum")
def quantized_by_one_sum(b: GraphBuilder) -> Node:
    return quantized(b, lambda x: b.call(aten.sum.default, b.call(aten.abs.default, x)))


@row("MIXES_RANKS", "[max -> getitem -> mm; aten.max.dim max_1: reduces over the ranks' rows]")
def largest_of_all_rows_with_their_places(b: GraphBuilder) -> Node:
    return times(b, b.call(getitem, b.call(aten.max.dim, gathered(b), 0, True), 0))


@row("MIXES_RANKS", "reduces over the ranks' rows")
def normalized_by_columns_of_all_rows(b: GraphBuilder) -> Node:
    """As a batch norm does."""
    whole = gathered(b)
    mean = b.call(getitem, b.call(aten.var_mean.correction, whole, [0], correction=0, keepdim=True), 1)
    return times(b, b.call(aten.sub.Tensor, whole, mean))


@row("MIXES_RANKS", "amax")
def quantized_by_an_amax_of_few_rows_each(b: GraphBuilder) -> Node:
    """Of one row of every rank, which is no few numbers: as many as a fourth of the rows have."""
    whole = gathered(b, 4, 32)
    shared = b.call(aten.amax.default, b.reshape(b.call(aten.abs.default, whole), [4, 4, 32]), [0], True)
    scaled = b.reshape(b.call(aten.mul.Tensor, b.reshape(whole, [4, 4, 32]), shared), [16, 32])
    fp8 = b.call(torch.ops.prims.convert_element_type.default, scaled, FP8)
    return b.scaled_mm(fp8, b.input("w", [32, 16], FP8, column_major=True), b.input("a", []), b.input("b", []))


@row("MIXES_RANKS", "ranks in different places")
def combined_with_its_own_transpose(b: GraphBuilder) -> Node:
    whole = gathered(b, 2, 8)
    return times(b, b.add(whole, b.permute(whole, [1, 0])))


@row("NOT_ROWS_OR_CONTRACTION", "inside the contraction")
def rank_innermost_in_the_contraction(b: GraphBuilder) -> Node:
    blocks = b.reshape(gathered(b), [4, 4, 8])
    return times(b, b.reshape(b.permute(blocks, [1, 2, 0]), [4, 32]))


@row("NOT_ROWS_OR_CONTRACTION", "inside the output columns")
def rank_inside_the_columns(b: GraphBuilder) -> Node:
    columns = b.reshape(product(b), [16, 3, 4])
    return b.scatter(b.reshape(b.permute(columns, [2, 0, 1]), [64, 3]))


@row("SIZES_NOT_PROVEN", "cannot regroup")
def symbolic_length_regrouped(b: GraphBuilder) -> Node:
    x = b.input("x", [12, 8], dynamic=0)
    third = b.call(floordiv, b.call(aten.sym_size.int, x, 0), 3)
    with b.mode:
        value = torch.empty(third.meta["val"], 96)
    return times(b, b.call_like(value, aten.reshape.default, b.gather(x), [third, 96]))


@row("VIEW_NOT_UNDERSTOOD", "cannot regroup")
def transposed_and_regrouped(b: GraphBuilder) -> Node:
    """Numbers, none of which is symbolic: six columns of eight are no four of twelve."""
    return times(b, b.reshape(b.permute(b.gather(b.input("x", [2, 6])), [1, 0]), [4, 12]))


@row("SIZES_NOT_PROVEN", "joins pieces of")
def symbolic_columns_that_may_not_divide(b: GraphBuilder) -> Node:
    """What `chunk` makes of a number of columns that no guard says to be even; the last piece may be shorter."""
    out = b.mm(b.input("a", [16, 8]), b.input("w", [8, 12], dynamic=1))
    columns = out.meta["val"].shape[1]
    half = b.call(floordiv, b.call_like(columns + 1, add, b.call(aten.sym_size.int, out, 1), 1), 2)
    sizes = [half.meta["val"], columns - half.meta["val"]]
    with b.mode:
        values = tuple(out.meta["val"].new_empty(16, size) for size in sizes)
        joined = out.meta["val"].new_empty(32, sizes[0])
    pieces = b.call_like(values, aten.split.Tensor, out, half, 1)
    whole = b.call_like(joined, aten.cat.default, [b.call(getitem, pieces, index) for index in (0, 1)])
    return b.scatter(whole)


@row("GATHER_IS_RIGHT_OPERAND", "mm", groups=("tp",))
def gather_for_a_weight_gradient(b: GraphBuilder) -> Node:
    return b.mm(b.input("a", [6, 16]), gathered(b))


@row("ROWS_CONTRACTED", "mm")
def gather_for_the_gradient_of_a_batch(b: GraphBuilder) -> Node:
    """The ranks are inside the contraction, behind the batch."""
    rows = b.reshape(b.cat(b.chunks(gathered(b, 2, 4, 8)), dim=1), [32, 8])
    return b.mm(b.permute(rows, [1, 0]), b.input("saved", [32, 12]))


@row("SUM_HAS_OTHER_TERM", "row has another shape or order than the product; no matmul: an input of the graph")
def row_added_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.add(product(b), b.input("row", [12])))


@row("SUM_HAS_OTHER_TERM", "column has another shape or order than the product; no matmul: an input of the graph")
def column_added_before_the_all_reduce(b: GraphBuilder) -> Node:
    total = b.add(b.input("column", [16, 1]), product(b))
    return b.call(c10d.all_reduce.default, total, "sum", "tp")


@row("SUM_HAS_OTHER_TERM", "routed has another shape or order than the product")
def term_of_a_transposed_product(b: GraphBuilder) -> Node:
    return b.scatter(b.add(b.permute(product(b), [1, 0]), b.input("routed", [12, 16])))


@row("SUM_HAS_OTHER_TERM", "add")
def number_added_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.add.Tensor, product(b), 1.0))


@row("PIECES_REORDERED", "flip")
def flipped_product_added_by_addmm(b: GraphBuilder) -> Node:
    """What comes from a product in a way that is not followed is no term of its own: the reason would be lost."""
    flipped = b.call(aten.flip.default, product(b), [0])
    return b.scatter(b.call(aten.addmm.default, flipped, b.input("c", [16, 8]), b.input("v", [8, 12])))


@row("SUM_TERMS_DISAGREE", "added twice")
def term_added_twice(b: GraphBuilder) -> Node:
    residual = b.input("residual", [16, 12])
    return b.scatter(b.add(residual, b.add(product(b), residual)))


@row("SUM_HAS_OTHER_TERM", "add")
def sum_with_alpha(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.add.Tensor, product(b), product(b, "c"), alpha=2))


@row("SUM_TERMS_DISAGREE", "laid out differently")
def sum_of_a_product_and_a_transpose(b: GraphBuilder) -> Node:
    square = b.mm(b.input("c", [12, 8]), b.input("v", [8, 12]))
    return b.scatter(b.add(square, b.permute(b.mm(b.input("d", [12, 8]), b.input("u", [8, 12])), [1, 0])))


@row("SUM_TERMS_DISAGREE", "added twice")
def product_added_to_itself(b: GraphBuilder) -> Node:
    out = product(b)
    return b.scatter(b.add(out, out))


@row("COLLECTIVE_NOT_UNDERSTOOD", "vllm_like.all_gather")
def gather_by_a_custom_op(b: GraphBuilder) -> Node:
    return times(b, b.call(torch.ops.vllm_like.all_gather.default, b.input("x", [4, 8]), 0, 4, "tp:0"))


@row("COLLECTIVE_NOT_UNDERSTOOD", "vllm_like.reduce_scatter")
def scatter_by_a_custom_op(b: GraphBuilder) -> Node:
    return b.call(torch.ops.vllm_like.reduce_scatter.default, product(b), 0, 4, "tp:0")


@row("COLLECTIVE_NOT_UNDERSTOOD", "reduce_scatter_tensor_coalesced")
def scatter_coalesced_and_kept_as_a_list(b: GraphBuilder) -> Node:
    return b.call(c10d.reduce_scatter_tensor_coalesced.default, [product(b), product(b, "c")], "sum", 4, "tp")


@row("COLLECTIVE_NOT_UNDERSTOOD", "all_gather_into_tensor_out")
def gather_into_a_buffer(b: GraphBuilder) -> Node:
    """The buffer is read, not the op's result."""
    x, buffer = b.input("x", [4, 8]), b.input("buffer", [16, 8])
    b.call_like(buffer.meta["val"], c10d.all_gather_into_tensor_out.default, x, 4, "tp", out=buffer)
    return times(b, buffer)


@row("COLLECTIVE_NOT_UNDERSTOOD", "c10d._allgather_base_")
def gather_in_place(b: GraphBuilder) -> Node:
    x, buffer, group = b.input("x", [4, 8]), b.input("buffer", [16, 8]), b.graph.placeholder("group")
    b.call_like((buffer.meta["val"], None), torch.ops.c10d._allgather_base_.default, buffer, x, group)
    return times(b, buffer)


@row("COLLECTIVE_NOT_UNDERSTOOD", "registry_like.all_gather_out")
def gather_by_a_custom_op_that_writes(b: GraphBuilder) -> Node:
    """Functionalized, as in a compiled graph."""
    x, buffer = b.input("x", [4, 8]), b.input("buffer", [16, 8])
    target, op = torch.ops.higher_order.auto_functionalized, torch.ops.registry_like.all_gather_out.default
    call = b.call_like((None, buffer.meta["val"]), target, op, out=buffer, x=x, group_name="tp:0")
    return times(b, b.call(getitem, call, 1))


@row("COLLECTIVE_NOT_UNDERSTOOD", "c10d.allgather_")
def gather_of_a_list_in_place(b: GraphBuilder) -> Node:
    x, group = b.input("x", [4, 8]), b.graph.placeholder("group")
    pieces = [b.input(f"piece{rank}", [4, 8]) for rank in range(4)]
    values = [piece.meta["val"] for piece in pieces]
    b.call_like(([values], None), torch.ops.c10d.allgather_.default, [pieces], [x], group)
    return times(b, b.cat(pieces))


@row("COLLECTIVE_NOT_UNDERSTOOD", "c10d._reduce_scatter_base_")
def scatter_in_place(b: GraphBuilder) -> Node:
    out, group, op = b.input("out", [4, 12]), b.graph.placeholder("group"), b.graph.placeholder("op")
    value = (out.meta["val"], None)
    return b.call_like(value, torch.ops.c10d._reduce_scatter_base_.default, out, product(b), group, op)


@row("COLLECTIVE_NOT_UNDERSTOOD", "all_gather_into_tensor_coalesced")
def gather_coalesced_and_kept_as_a_list(b: GraphBuilder) -> Node:
    """A matmul takes the list joined, which no item is taken of."""
    shards = [b.input("x", [4, 8]), b.input("y", [4, 8])]
    items = b.call(c10d.all_gather_into_tensor_coalesced.default, shards, 4, "tp")
    return times(b, b.call(aten.cat.default, items))


@row("COLLECTIVE_NOT_UNDERSTOOD", "all_reduce_coalesced_")
def all_reduce_of_a_list_in_place(b: GraphBuilder) -> Node:
    products = [product(b), product(b, "c")]
    values = [out.meta["val"] for out in products]
    b.call_like(values, c10d.all_reduce_coalesced_.default, products, "sum", "tp")
    return b.add(*products)


@row("COLLECTIVE_NOT_UNDERSTOOD", "reduce_scatter_tensor_out")
def scatter_into_a_buffer(b: GraphBuilder) -> Node:
    buffer = b.input("buffer", [4, 12])
    return b.call_like(
        buffer.meta["val"], c10d.reduce_scatter_tensor_out.default, product(b), "sum", 4, "tp", out=buffer
    )


@row("COLLECTIVE_NOT_UNDERSTOOD", "c10d.allreduce_")
def all_reduce_by_c10d(b: GraphBuilder) -> Node:
    out, group, op = product(b), b.graph.placeholder("group"), b.graph.placeholder("op")
    b.call_like(([out.meta["val"]], None), torch.ops.c10d.allreduce_.default, [out], group, op, None)
    return b.relu(out)


@row("COLLECTIVE_NOT_UNDERSTOOD", "c10d.reduce_scatter_")
def scatter_of_a_list_in_place(b: GraphBuilder) -> Node:
    out, group, op = b.input("out", [4, 12]), b.graph.placeholder("group"), b.graph.placeholder("op")
    value = ([out.meta["val"]], None)
    b.call_like(value, torch.ops.c10d.reduce_scatter_.default, [out], [b.chunks(product(b))], group, op)
    return b.relu(out)


@row("COLLECTIVE_NOT_UNDERSTOOD", "c10d.allgather_into_tensor_coalesced_")
def gathers_of_several_in_place(b: GraphBuilder) -> Node:
    x, buffer, group = b.input("x", [4, 8]), b.input("buffer", [16, 8]), b.graph.placeholder("group")
    b.call_like(None, torch.ops.c10d.allgather_into_tensor_coalesced_.default, [buffer], [x], group)
    return times(b, buffer)


@row("COLLECTIVE_NOT_UNDERSTOOD", "c10d.reduce_scatter_tensor_coalesced_")
def scatters_of_several_in_place(b: GraphBuilder) -> Node:
    out, group, op = b.input("out", [4, 12]), b.graph.placeholder("group"), b.graph.placeholder("op")
    b.call_like(None, torch.ops.c10d.reduce_scatter_tensor_coalesced_.default, [out], [product(b)], group, op)
    return b.relu(out)


@row("COLLECTIVE_NOT_UNDERSTOOD", "symm_mem._low_contention_all_gather")
def gather_by_symmetric_memory(b: GraphBuilder) -> Node:
    x = b.input("x", [4, 8])
    with b.mode:
        value = torch.empty(16, 8)
    return times(b, b.call_like(value, torch.ops.symm_mem._low_contention_all_gather.default, x, "tp"))


@row("PIECES_MISSING", "index_select: picks rows by number")
def padding_removed_after_the_gather(b: GraphBuilder) -> Node:
    kept = b.input("kept", [15], torch.int64)
    return times(b, b.call(aten.index_select.default, of_a_layer(b), 0, kept))


@row("UNEVEN_SHARDS", "slice")
def padding_sliced_off_the_contraction_after_the_gather(b: GraphBuilder) -> Node:
    """15 columns on four ranks: the last one's is padding, and so is its row of the weight."""
    whole = b.cat(b.chunks(gathered(b, 8, 4)), dim=1)
    return times(b, b.call(aten.slice.Tensor, whole, 1, 0, 15))


@row("UNEVEN_SHARDS", "slice_1 cuts rows that have scales")
def padding_sliced_off_rows_with_scales(b: GraphBuilder) -> Node:
    rows = b.call(aten.slice.Tensor, gathered(b, 4, 32, dtype=FP8), 0, 0, 15)
    w = b.input("w", [32, 16], FP8, column_major=True)
    return b.scaled_mm(rows, w, b.input("a_scale", [15, 1]), b.input("b_scale", [1, 16]))


@row("PIECES_MISSING", "slice")
def rows_and_columns_sliced_off_after_the_gather(b: GraphBuilder) -> Node:
    """The rows are padding, and the columns are not."""
    rows = b.call(aten.slice.Tensor, gathered(b), 0, 0, 15)
    return b.mm(b.call(aten.slice.Tensor, rows, 1, 0, 6), b.input("w", [6, 12]))


@row("PIECES_MISSING", "slice")
def several_dimensions_sliced_off_after_the_gather(b: GraphBuilder) -> Node:
    whole = gathered(b, 2, 8, 8, 8, 8)
    for dim in range(5):
        whole = b.call(aten.slice.Tensor, whole, dim, 0, 7)
    return times(b, b.reshape(whole, [7**4, 7]))


@row("UNEVEN_SHARDS", "constant_pad_nd")
def padding_before_a_residual_and_the_scatter(b: GraphBuilder) -> Node:
    padded = b.call(aten.constant_pad_nd.default, product(b, rows=15), [0, 0, 0, 1])
    return b.scatter(b.add(padded, b.input("residual", [16, 12])))


@row("UNEVEN_SHARDS", "constant_pad_nd")
def padding_of_any_number_of_rows_before_a_factor_and_the_scatter(b: GraphBuilder) -> Node:
    """No row is dropped, though it is not known how many are added."""
    out = b.mm(b.input("a", [15, 8], dynamic=0), b.input("w", [8, 12]))
    more = b.call(mod, b.call(neg, b.call(aten.sym_size.int, out, 0)), 4)
    padded = b.call(aten.constant_pad_nd.default, out, [0, 0, 0, more])
    return b.scatter(b.call(aten.mul.Tensor, padded, 2.0))


@row("UNEVEN_SHARDS", "constant_pad_nd pads another dimension than ranks divide")
def padding_of_sequences_that_are_scattered_by_the_batch(b: GraphBuilder) -> Node:
    padded = b.call(aten.constant_pad_nd.default, b.reshape(product(b, rows=28), [4, 7, 12]), [0, 0, 0, 1])
    return b.scatter(padded)


@row("VIEW_NOT_UNDERSTOOD", "constant_pad_nd pads a rearranged or cut product")
def padding_of_a_transposed_product(b: GraphBuilder) -> Node:
    padded = b.call(aten.constant_pad_nd.default, b.permute(product(b, rows=15), [1, 0]), [0, 0, 0, 4])
    return b.scatter(padded)


@row("MATMUL_NOT_UNDERSTOOD", "[4, 4, 8] @ [4, 8, 12]")
def gather_for_a_batched_matmul(b: GraphBuilder) -> Node:
    return b.call(aten.bmm.default, gathered(b, 1, 4, 8), b.input("w", [4, 8, 12]))


@row("MATMUL_NOT_UNDERSTOOD", "[1, 16, 8] @ [3, 8, 12]")
def gather_for_a_matmul_that_repeats_it(b: GraphBuilder) -> Node:
    """One matrix for each batch of the result, but the gathered tensor is repeated for them."""
    w = b.call(aten.expand.default, b.input("w", [8, 12]), [3, 8, 12])
    return b.call(aten.matmul.default, b.reshape(gathered(b), [1, 16, 8]), w)


@row("MATMUL_NOT_UNDERSTOOD", "[2, 8, 8] @ [2, 8, 6]")
def gather_for_a_weight_regrouped_by_a_view(b: GraphBuilder) -> Node:
    """The weight is expanded, but the view mixes columns of one matrix with rows of the next."""
    w = b.call(aten.expand.default, b.input("w", [1, 8, 3]), [4, 8, 3])
    return b.call(aten.bmm.default, b.reshape(gathered(b), [2, 8, 8]), b.reshape(w, [2, 8, 6]))


@row("MATMUL_NOT_UNDERSTOOD", "vllm_like.cutlass_scaled_mm")
def gather_for_a_custom_matmul(b: GraphBuilder) -> Node:
    """Not registered; functionalized, as in a compiled graph."""
    x, w = gathered(b, 4, 32, dtype=FP8), b.input("w", [32, 16], FP8, column_major=True)
    out, one = b.input("out", [16, 16], torch.bfloat16), b.input("one", [])
    arguments = {"out": out, "a": x, "b": w, "a_scales": one, "b_scales": one, "bias": None}
    target = torch.ops.higher_order.auto_functionalized
    call = b.graph.call_function(target, (torch.ops.vllm_like.cutlass_scaled_mm.default,), arguments)
    call.meta["val"] = (None, out.meta["val"])
    return b.call(getitem, call, 1)


@row("DTYPE_UNSUPPORTED", "torch.bfloat16 -> torch.float32")
def gather_for_a_matmul_that_widens(b: GraphBuilder) -> Node:
    w = b.input("w", [8, 12], torch.bfloat16)
    return b.call(aten.mm.dtype, gathered(b, dtype=torch.bfloat16), w, torch.float32)


@row("MATMUL_PADDED", "constant_pad_nd -> mm")
def gather_that_is_padded_for_the_matmul(b: GraphBuilder) -> Node:
    """What Inductor's `pad_mm` makes of odd sizes."""
    pad = aten.constant_pad_nd.default
    rows = b.call(pad, gathered(b, 3, 6), [0, 2, 0, 4])
    out = b.mm(rows, b.call(pad, b.input("w", [6, 10]), [0, 6, 0, 2]))
    return b.call(aten.slice.Tensor, b.call(aten.slice.Tensor, out, 0, 0, -4), 1, 0, -6)


@row("VIEW_NOT_UNDERSTOOD", "pads by [0, 0, 1, 0]")
def gather_that_is_padded_in_front(b: GraphBuilder) -> Node:
    """By the program: Inductor pads behind what there is."""
    return times(b, b.call(aten.constant_pad_nd.default, gathered(b), [0, 0, 1, 0]))


@row("MATMUL_PADDED", "constant_pad_nd")
def scatter_of_a_padded_matmul(b: GraphBuilder) -> Node:
    pad = aten.constant_pad_nd.default
    out = b.mm(b.call(pad, b.input("a", [12, 6]), [0, 2, 0, 4]), b.call(pad, b.input("w", [6, 12]), [0, 0, 0, 2]))
    return b.scatter(b.call(aten.slice.Tensor, out, 0, 0, -4))


@row("MATMUL_NOT_UNDERSTOOD", "bmm")
def scatter_of_a_batched_matmul(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.bmm.default, b.input("a", [4, 4, 8]), b.input("w", [4, 8, 12])))
