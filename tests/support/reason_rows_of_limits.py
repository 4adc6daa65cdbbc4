"""Graphs that legality, limits of kernels, or costs refuse, one for each reason ATP2xx to ATP4xx at least."""

from __future__ import annotations

from operator import getitem

import torch
from graph_builder import GraphBuilder, aten, c10d
from reason_rows import FP8, gathered, product, quantized, row, scaled, times
from torch.fx import Node


# --- 2xx legality ----------------------------------------------------------------------------------------------
@row("REDUCE_OP_UNSUPPORTED", "'max'")
def scatter_of_a_maximum(b: GraphBuilder) -> Node:
    return b.scatter(product(b), "max")


@row("PRODUCT_HAS_OTHER_USERS", "mm is used by relu")
def product_used_elsewhere(b: GraphBuilder) -> tuple[Node, Node]:
    out = product(b)
    return b.relu(out), b.scatter(out)


@row("MAY_DIFFER_BY_RANK", "v")
def combined_with_an_input(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.mul.Tensor, gathered(b), b.input("v", [8])))


@row("MAY_DIFFER_BY_RANK", "a value for each row")
def combined_with_values_of_its_rows(b: GraphBuilder) -> Node:
    return times(b, b.add(gathered(b), b.input("positions", [16, 8])))


@row("MAY_DIFFER_BY_RANK", "mul takes a number")
def combined_with_a_number(b: GraphBuilder) -> Node:
    """It may be the rank's own."""
    return times(b, b.call(aten.mul.Tensor, gathered(b), 3.0))


@row("MAY_DIFFER_BY_RANK", "v")
def quantized_by_a_scale_from_outside(b: GraphBuilder) -> Node:
    scale = b.input("v", [])
    return quantized(b, lambda x: scale)


def largest(b: GraphBuilder) -> Node:
    """A number that is the same on all ranks."""
    return b.all_reduce(b.call(aten.amax.default, b.input("z", [4, 32])), "max")


@row("MAY_DIFFER_BY_RANK", "wait_tensor")
def quantized_by_a_scale_that_changes_in_place(b: GraphBuilder) -> Node:
    """On each rank by a number of its own."""
    scale = largest(b)
    b.call(aten.add_.Tensor, scale, b.input("v", []))
    return quantized(b, lambda x: scale)


@row("MAY_DIFFER_BY_RANK", "reshape")
def quantized_by_a_scale_a_view_of_which_changes_in_place(b: GraphBuilder) -> Node:
    scale = largest(b)
    b.call(aten.add_.Tensor, b.reshape(scale, [1]), b.input("v", [1]))
    return quantized(b, lambda x: b.reshape(scale, [1, 1]))


@row("MAY_DIFFER_BY_RANK", "reshape")
def quantized_by_a_scale_whose_diagonal_changes_in_place(b: GraphBuilder) -> Node:
    """No view that is followed, but the same memory."""
    scale = b.reshape(largest(b), [1, 1])
    b.call(aten.add_.Tensor, b.call(aten.diagonal.default, scale), b.input("v", [1]))
    return quantized(b, lambda x: scale)


@row("MAY_DIFFER_BY_RANK", "full")
def quantized_by_a_constant_that_changes_in_place(b: GraphBuilder) -> Node:
    scale = b.one()
    b.call(aten.copy_.default, scale, b.input("v", []))
    return quantized(b, lambda x: scale)


@row("MAY_DIFFER_BY_RANK", "rand_like")
def quantized_by_a_random_scale(b: GraphBuilder) -> Node:
    """Each rank draws its own, whatever it is made like."""
    scale = largest(b)
    return quantized(b, lambda x: b.call(aten.rand_like.default, scale))


@row("MAY_DIFFER_BY_RANK", "rrelu")
def quantized_by_a_scale_with_random_slopes(b: GraphBuilder) -> Node:
    """Pointwise, and drawn by each rank."""
    scale = largest(b)
    return quantized(b, lambda x: b.call(aten.rrelu.default, scale, 0.1, 0.3, True))


def of_every_rank(b: GraphBuilder) -> Node:
    """A number of each rank, gathered: [4]."""
    return b.gather(b.input("z", [1]))


@row("MAY_DIFFER_BY_RANK", "select")
def quantized_by_one_of_the_ranks_scales(b: GraphBuilder) -> Node:
    """The graph of each rank may take its own."""
    scales = of_every_rank(b)
    return quantized(b, lambda x: b.call(aten.select.int, scales, 0, 1))


@row("MAY_DIFFER_BY_RANK", "reshape")
def quantized_by_a_piece_of_the_ranks_scales(b: GraphBuilder) -> Node:
    """As a DTensor's redistribution from replicated to sharded has it."""
    scales = of_every_rank(b)
    pieces = b.call(aten.split.Tensor, scales, 1)
    return quantized(b, lambda x: b.reshape(b.call(getitem, pieces, 1), []))


@row("MAY_DIFFER_BY_RANK", "roll")
def quantized_by_scales_in_an_order_of_ones_own(b: GraphBuilder) -> Node:
    rolled = b.call(aten.roll.default, b.gather(b.input("z", [8])), [8])
    return quantized(b, lambda x: rolled)


@row("RANDOM_BETWEEN", "native_dropout")
def dropout_that_is_one_op_after_the_gather(b: GraphBuilder) -> Node:
    return times(b, b.call(getitem, b.call(aten.native_dropout.default, gathered(b), 0.5, True), 0))


@row("RANDOM_BETWEEN", "rand_like")
def combined_with_random_numbers(b: GraphBuilder) -> Node:
    whole = gathered(b)
    return times(b, b.call(aten.mul.Tensor, whole, b.call(aten.rand_like.default, whole)))


@row("OPERAND_DEPENDS_ON_GATHER", "mm: permute")
def gather_times_itself(b: GraphBuilder) -> Node:
    whole = gathered(b)
    return b.mm(whole, b.permute(b.relu(whole), [1, 0]))


@row("OPERAND_COMMUNICATED_LATER", "matmul_all_reduce")
def weight_reduced_after_what_needs_the_gather(b: GraphBuilder) -> tuple[Node, ...]:
    """The fused op may not follow the reduction of the weight: an op before that communicates what is gathered."""
    ours, whole = torch.ops.asynctp, gathered(b)
    again = b.call(ours.all_gather.default, b.relu(whole), b.ranks, b.group)
    operands = [b.input("a", [8, 4])], [b.input("b", [4, 12])]
    weight = b.call(ours.matmul_all_reduce.default, *operands, [None], "sum", b.group)
    return b.mm(whole, weight), b.call(c10d.wait_tensor.default, again)


@row("SENT_REARRANGED", "[16, 8] taken in the order [1, 0]")
def product_transposed_before_it_is_reduced(b: GraphBuilder) -> Node:
    product = b.permute(b.mm(b.input("x", [16, 4]), b.input("w", [4, 8])), [1, 0])
    return b.all_reduce(b.call(torch.ops.aten.clone.default, product, memory_format=torch.contiguous_format))


@row("SENT_REARRANGED", "taken in the order")
def gathered_and_transposed(b: GraphBuilder) -> Node:
    return times(b, b.permute(gathered(b), [1, 0]))


@row("RANKS_DIFFER", "deviate=False", deviate=False)
def relu_after_the_gather_without_deviations(b: GraphBuilder) -> Node:
    return times(b, b.relu(gathered(b)))


def on_stream(node: Node, number: int) -> Node:
    """The node, as torch notes that the program runs it on one of its streams."""
    node.meta["custom"] = {"stream": number}
    return node


@row("SEVERAL_STREAMS", "all_gather_into_tensor on 1, wait_tensor on the default")
def gather_started_on_another_stream(b: GraphBuilder) -> Node:
    whole = gathered(b)
    on_stream(whole.args[0], 1)
    return times(b, whole)


@row("SEVERAL_STREAMS", "reduce_scatter_tensor on 2")
def product_scattered_on_another_stream(b: GraphBuilder) -> Node:
    scattered = b.scatter(product(b))
    on_stream(scattered.args[0], 2)
    return on_stream(scattered, 2)


@row("MUTATED_IN_BETWEEN", "copy_")
def mutation_between(b: GraphBuilder) -> Node:
    whole, w = gathered(b), b.input("w", [8, 12])
    b.call(aten.copy_.default, w, b.input("new", [8, 12]))
    return b.mm(whole, w)


@row("MUTATED_IN_BETWEEN", "all_reduce_")
def all_reduce_in_place(b: GraphBuilder) -> Node:
    return b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce_.default, product(b), "sum", b.group))


@row("ADDMM_SCALED", "alpha=2")
def addmm_with_alpha(b: GraphBuilder) -> Node:
    return b.call(aten.addmm.default, b.input("bias", [12]), gathered(b), b.input("w", [8, 12]), alpha=2)


@row("ADDMM_SCALED", "beta=2")
def addmm_with_beta(b: GraphBuilder) -> Node:
    x, w, bias = gathered(b), b.input("w", [8, 12]), b.input("bias", [12])
    return b.call(aten.addmm.default, bias, x, w, beta=2)


@row("ADDMM_SCALED", "bias has shape [16, 1]")
def gather_for_an_addmm_with_a_column(b: GraphBuilder) -> Node:
    return b.call(aten.addmm.default, b.input("column", [16, 1]), gathered(b, 4, 8), b.input("w", [8, 12]))


@row("RESULT_SCALED", "_scaled_mm")
def scaled_matmul_with_a_result_scale(b: GraphBuilder) -> Node:
    return scaled(b, [], [], scale_result=b.input("result_scale", []))


@row("RESULT_SCALED", "_scaled_mm")
def scaled_matmul_with_a_folded_output_scale(b: GraphBuilder) -> Node:
    """Torch 2.15 folds a multiplication of the output into the matmul, and says so only in the node's metadata."""
    out = scaled(b, [], [])
    out.meta["inductor_folded_scaled_mm_output_scale"] = True
    return out


@row("RESULT_SCALED", "_scaled_mm")
def scatter_of_a_product_with_a_result_scale(b: GraphBuilder) -> Node:
    a, w = b.input("a", [16, 32], FP8), b.input("w", [32, 16], FP8, column_major=True)
    one = b.input("one", [])
    return b.scatter(b.scaled_mm(a, w, one, one, scale_result=b.input("result_scale", [])))


@row("SHAPE_UNKNOWN", "all_gather_into_tensor")
def gather_without_a_fake_tensor(b: GraphBuilder) -> Node:
    whole = gathered(b)
    out = times(b, whole)
    del whole.all_input_nodes[0].meta["val"]
    return out


@row("SHAPE_UNKNOWN", "reshape")
def view_without_a_fake_tensor(b: GraphBuilder) -> Node:
    view = b.reshape(gathered(b, 1, 4, 8), [16, 8])
    out = times(b, view)
    del view.meta["val"]
    return out


@row("MATMUL_TAKEN", "mm", fused=1)
def matmul_between_gather_and_scatter(b: GraphBuilder) -> Node:
    return b.scatter(times(b, gathered(b)))


# --- 3xx kernel limits, 4xx cost -------------------------------------------------------------------------------
@row("DTYPE_UNSUPPORTED", "torch.int32 @ torch.int32")
def gather_of_integers(b: GraphBuilder) -> Node:
    return times(b, gathered(b, dtype=torch.int32))


@row("DTYPE_UNSUPPORTED", "_int_mm: torch.int8 @ torch.int8 -> torch.int32")
def scatter_of_an_int32_result(b: GraphBuilder) -> Node:
    operands = b.input("x", [16, 32], torch.int8), b.input("w", [32, 16], torch.int8)
    return b.scatter(b.call(aten._int_mm.default, *operands))


@row("DEVICE_UNSUPPORTED", "xpu")
def gather_on_another_device(b: GraphBuilder) -> Node:
    return times(b, b.gather(b.input("x", [4, 8], device="xpu")))


@row("CONTRACTION_TOO_LARGE", "134217728 bytes")
def large_contraction_on_a_gpu(b: GraphBuilder) -> Node:
    rows = b.gather(b.input("x", [8192, 1024], device="cuda"))
    return times(b, b.cat(b.chunks(rows), dim=1))


@row("COLUMNS_TOO_LARGE", "134217728 bytes")
def large_scatter_of_columns_on_a_gpu(b: GraphBuilder) -> Node:
    out = b.mm(b.input("a", [4096, 64], device="cuda"), b.input("w", [64, 8192], device="cuda"))
    return b.scatter(b.cat(b.chunks(out, dim=1), dim=0))


@row("SCALES_UNSUPPORTED", "scales [16, 2] and [2, 16]")
def scales_of_half_a_block(b: GraphBuilder) -> Node:
    return scaled(b, [16, 2], [2, 16])


def in_blocks(b: GraphBuilder, a_scale: list[int], b_scale: list[int], depth: int = 256) -> Node:
    """A product `[16, 256]` of a gathered operand `[16, depth]`, as torch takes scales of blocks: by their shapes."""
    w = b.input("w", [depth, 256], FP8, column_major=True)
    scales = b.input("a_scale", a_scale), b.input("b_scale", b_scale)
    return b.scaled_mm(gathered(b, 4, depth, dtype=FP8), w, *scales)


@row("SCALES_BLOCKWISE", "scales [16, 2] and [2, 2]")
def scales_of_1x128_and_128x128_that_are_not_padded(b: GraphBuilder) -> Node:
    """cuBLAS takes the two columns as 4 numbers apart, whatever their strides."""
    return in_blocks(b, [16, 2], [2, 2])


@row("SCALES_BLOCKWISE", "scales [16, 2] and [4, 2]")
def scales_of_128x128_padded_to_four_blocks(b: GraphBuilder) -> Node:
    """As `scaled_mm` takes them, and not `_scaled_mm`."""
    return in_blocks(b, [16, 2], [4, 2])


@row("SCALES_BLOCKWISE", "4 rows together, in blocks of 128")
def scales_of_128x128_blocks_of_rows_of_several_ranks(b: GraphBuilder) -> Node:
    return in_blocks(b, [1, 2], [2, 256])


@row("SCALES_BLOCKWISE", "scales [16, 2] and [2, 2]")
def scatter_of_a_product_with_scales_of_blocks_that_are_not_padded(b: GraphBuilder) -> Node:
    a, w = b.input("a", [16, 256], FP8), b.input("w", [256, 256], FP8, column_major=True)
    return b.scatter(b.scaled_mm(a, w, b.input("a_scale", [16, 2]), b.input("b_scale", [2, 2])))


@row("SCALES_BLOCKWISE", "64 rows together, in blocks of 128")
def scatter_of_blocks_of_rows_of_several_ranks(b: GraphBuilder) -> Node:
    a, w = b.input("a", [256, 512], FP8), b.input("w", [512, 16], FP8, column_major=True)
    return b.scatter(b.scaled_mm(a, w, b.input("a_scale", [2, 4]), b.input("b_scale", [4, 16])))


@row("SCALES_BLOCKWISE", "constant_pad_nd pads what has scales of 128 rows")
def scatter_of_a_padded_product_with_blocks_of_rows(b: GraphBuilder) -> Node:
    a, w = b.input("a", [256, 512], FP8), b.input("w", [512, 16], FP8, column_major=True)
    out = b.scaled_mm(a, w, b.input("a_scale", [2, 4]), b.input("b_scale", [4, 16]))
    return b.scatter(b.call(aten.constant_pad_nd.default, out, [0, 0, 0, 256]))


def scaled_v2(b: GraphBuilder, recipes: tuple[list[int], list[int]], swizzle: list[int]) -> Node:
    """`scaled_mm` with the recipes of `torch.nn.functional.ScalingType`, of a gathered operand `[16, 32]`."""
    a, w = gathered(b, 4, 32, dtype=FP8), b.input("w", [32, 16], FP8, column_major=True)
    scales = [[b.input(f"scale{side}{level}", [16, 1]) for level in range(len(recipes[side]))] for side in (0, 1)]
    with b.mode:
        value = torch.empty(16, 16, dtype=torch.bfloat16)
    sides = [scales[0], recipes[0], swizzle, scales[1], recipes[1], swizzle]
    return b.call_like(value, aten._scaled_mm_v2.default, a, w, *sides, None, torch.bfloat16)


@row("SCALES_BLOCKWISE", "BlockWise1x128 x BlockWise128x128, [16, 32] @ [32, 16] with scales [16, 1] and [16, 1]")
def recipe_of_1x128_and_128x128(b: GraphBuilder) -> Node:
    return scaled_v2(b, ([4], [5]), [])


@row("SCALES_BLOCKWISE", "BlockWise128x128 x BlockWise1x128")
def recipe_of_128x128_and_1x128(b: GraphBuilder) -> Node:
    return scaled_v2(b, ([5], [4]), [])


def on_gpu(b: GraphBuilder, columns: int, dtype: torch.dtype = torch.bfloat16) -> Node:
    """`a @ w`, `[16, columns]`, of a gathered operand."""
    x, w = b.input("x", [4, 64], dtype, device="cuda"), b.input("w", [64, columns], dtype, device="cuda")
    return b.mm(b.gather(x), w)


@row("NOT_BATCH_INVARIANT", "mm: fp32 operands", invariant="batch")
def rows_in_fp32_that_keep_their_bits(b: GraphBuilder) -> Node:
    return on_gpu(b, 64, torch.float32)


@row("NOT_BATCH_INVARIANT", "a B of strides (60, 1)", invariant="batch")
def rows_of_120_bytes_that_keep_their_bits(b: GraphBuilder) -> Node:
    return on_gpu(b, 60)


@row("NOT_BATCH_INVARIANT", "12 ranks", ranks=12, invariant="batch")
def rows_of_many_ranks_that_keep_their_bits(b: GraphBuilder) -> Node:
    return on_gpu(b, 64)


@row("NOT_BATCH_INVARIANT", "int8 operands", invariant="batch")
def rows_in_int8_that_keep_their_bits(b: GraphBuilder) -> Node:
    x, w = b.input("x", [4, 64], torch.int8, device="cuda"), b.input("w", [64, 64], torch.int8, device="cuda")
    return b.call(aten._int_mm.default, b.gather(x), w)


@row("NOT_BATCH_INVARIANT", "scales of blocks", invariant="batch")
def rows_with_scales_of_blocks_that_keep_their_bits(b: GraphBuilder) -> Node:
    x = b.gather(b.input("x", [4, 256], FP8, device="cuda"))
    w = b.input("w", [256, 256], FP8, column_major=True, device="cuda")
    return b.scaled_mm(x, w, b.input("a_scale", [16, 2], device="cuda"), b.input("b_scale", [2, 256], device="cuda"))


@row("NOT_BATCH_INVARIANT", "does not add up any number of rows of bf16[140000000, 8]", invariant="batch")
def huge_sum_that_keeps_its_bits(b: GraphBuilder) -> Node:
    a, w = (
        b.input(name, sizes, torch.bfloat16, device="cuda") for name, sizes in (("a", [140000000, 8]), ("w", [8, 8]))
    )
    return b.all_reduce(b.mm(a, w))


@row("SCALES_UNSUPPORTED", "BlockWise128x128 x BlockWise128x128")
def recipe_that_torch_has_not(b: GraphBuilder) -> Node:
    return scaled_v2(b, ([5], [5]), [])


@row("SCALES_UNSUPPORTED", "BlockWise1x32 x BlockWise1x32, swizzled")
def scales_of_mxfp8(b: GraphBuilder) -> Node:
    return scaled_v2(b, ([3], [3]), [1])


@row("SCALES_UNSUPPORTED", "BlockWise1x16 and TensorWise x BlockWise1x16 and TensorWise, swizzled")
def scales_of_nvfp4(b: GraphBuilder) -> Node:
    return scaled_v2(b, ([2, 0], [2, 0]), [1, 0])


@row("SCALES_UNSUPPORTED", "RowWise x RowWise, swizzled")
def scales_swizzled(b: GraphBuilder) -> Node:
    return scaled_v2(b, ([1], [1]), [1])


@row("SCALES_UNSUPPORTED", "RowWise x TensorWise")
def scales_of_two_kinds(b: GraphBuilder) -> Node:
    return scaled_v2(b, ([1], [0]), [])


@row("BELOW_THRESHOLD", "384 bytes < min_bytes=1000", min_bytes=1000)
def small_gather(b: GraphBuilder) -> Node:
    return times(b, gathered(b))


@row("BELOW_THRESHOLD", "operations < min_flops=10000", min_flops=10_000)
def small_matmul(b: GraphBuilder) -> Node:
    return b.scatter(product(b))


@row("MOVES_MORE", "which sum_1 needs too")
def gathered_tensor_used_as_it_is_too(b: GraphBuilder) -> tuple[Node, Node]:
    whole = gathered(b)
    return times(b, b.relu(whole)), b.call(aten.sum.default, whole)


@row("MOVES_MORE", "bf16[16, 8]")
def cast_up_after_the_gather(b: GraphBuilder) -> Node:
    whole = gathered(b, dtype=torch.bfloat16)
    return times(b, b.call(torch.ops.prims.convert_element_type.default, whole, torch.float32))


@row("BEHIND_PRODUCTS", "beside mm_1: 1 product", fused=1)
def gather_for_a_weight_gradient_beside_a_product(b: GraphBuilder) -> tuple[Node, Node]:
    scattered, other = b.scatter(product(b)), product(b, "c")
    return scattered, other, b.mm(b.permute(b.input("dy", [16, 6]), [1, 0]), gathered(b))


@row("SCATTER_BEHIND_PRODUCTS", "beside mm_1: 1 product", fused=1)
def scatter_of_no_product_beside_one(b: GraphBuilder) -> tuple[Node, Node, Node]:
    fused, wide = b.scatter(product(b)), b.input("wide", [2048, 2048])
    return fused, b.mm(wide, wide), b.scatter(b.relu(b.input("g", [1024, 1024])))


@row("SCATTER_BEHIND_PRODUCTS", "beside mm_1: 1 product", fused=1)
def scatter_of_two_streams_beside_a_product(b: GraphBuilder) -> tuple[Node, Node, Node]:
    fused, wide = b.scatter(product(b)), b.input("wide", [2048, 2048])
    other = b.mm(wide, wide)
    parts = [b.mm(b.input(f"g_{name}", [512, 8]), b.input(f"{name}_w", [8, 1024])) for name in ("text", "image")]
    return fused, other, b.scatter(b.cat(parts))


@row("STEP_SKIPPED", "hoist", skip="hoist")
def gather_that_would_be_hoisted(b: GraphBuilder) -> Node:
    return times(b, b.relu(gathered(b)))


@row("STEP_SKIPPED", "overlap", fused=1, skip="overlap")
def gather_that_would_run_beside_a_product(b: GraphBuilder) -> tuple[Node, Node]:
    return gather_for_a_weight_gradient_beside_a_product(b)
