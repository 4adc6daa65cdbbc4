"""Graphs out of scope, one for each reason ATP0xx at least."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem

import torch
from graph_builder import GraphBuilder, aten, c10d
from reason_rows import FP8, gathered, product, row, times, weight_gradient
from torch.fx import Graph, Node


# --- 0xx scope -------------------------------------------------------------------------------------------------
@row("GROUP_NOT_ENROLLED", "group tp of dp, ep", groups=("dp", "ep"))
def gather_of_another_group(b: GraphBuilder) -> Node:
    return times(b, gathered(b))


@row("OUTSIDE_GRAPH", "used by what takes the graph's results")
def gather_that_is_returned(b: GraphBuilder) -> Node:
    return gathered(b)


def in_region(b: GraphBuilder, x: Node) -> Node:
    """What a subgraph makes of `x`, in the same shape: `torch.compiler.nested_compile_region`."""
    inner, holder = Graph(), torch.nn.Module()
    inner.output((inner.call_function(aten.neg.default, (inner.placeholder("x"),)),))
    holder.region = torch.fx.GraphModule({}, inner)
    b.graph.owning_module = holder  # type: ignore[assignment]
    results, target = (x.meta["val"],), torch.ops.higher_order.invoke_subgraph
    return b.call(getitem, b.call_like(results, target, b.graph.get_attr("region"), "region", x), 0)


@row("OUTSIDE_GRAPH", "used by invoke_subgraph")
def gather_for_a_region(b: GraphBuilder) -> Node:
    return in_region(b, gathered(b))


@row("OUTSIDE_GRAPH", "made by invoke_subgraph")
def scatter_of_a_region(b: GraphBuilder) -> Node:
    return b.scatter(in_region(b, b.input("x", [16, 8])))


def multiplied_in_region(b: GraphBuilder, x: Node, w: Node) -> Node:
    """The product that a subgraph makes of `x` and `w`, of the shape of `x`."""
    inner, holder = Graph(), torch.nn.Module()
    first, second = inner.placeholder("x"), inner.placeholder("w")
    inner.output((inner.call_function(aten.mm.default, (first, second)),))
    holder.region = torch.fx.GraphModule({}, inner)
    b.graph.owning_module = holder  # type: ignore[assignment]
    results, target = (x.meta["val"],), torch.ops.higher_order.invoke_subgraph
    return b.call(getitem, b.call_like(results, target, b.graph.get_attr("region"), "region", x, w), 0)


@row("MATMUL_IN_ANOTHER_GRAPH", "all_gather_into_tensor is multiplied in invoke_subgraph")
def gather_multiplied_in_a_region(b: GraphBuilder) -> Node:
    return multiplied_in_region(b, gathered(b), b.input("w", [8, 8]))


@row("OUTSIDE_GRAPH", "used by invoke_subgraph")
def gather_that_a_region_has_as_right_operand(b: GraphBuilder) -> Node:
    return multiplied_in_region(b, b.input("x", [16, 16]), gathered(b))


@row("MATMUL_IN_ANOTHER_GRAPH", "reduce_scatter_tensor is of a matmul in invoke_subgraph")
def scatter_of_a_product_in_a_region(b: GraphBuilder) -> Node:
    return b.scatter(multiplied_in_region(b, b.input("x", [16, 8]), b.input("w", [8, 8])))


@row("NO_MATMUL", "used by aten.convolution.default")
def gather_for_a_convolution(b: GraphBuilder) -> Node:
    images, weight = b.reshape(gathered(b), [2, 8, 8]), b.input("w", [4, 8, 1])
    return b.call(aten.convolution.default, images, weight, None, [1], [0], [1], False, [0], 1)


@row("RESULT_DROPPED", "f32[]")
def all_reduce_whose_users_are_gone(b: GraphBuilder) -> Node:
    """In the backward: its weight's scale was saved by the forward."""
    b.all_reduce(b.call(aten.amax.default, b.input("primals_1", [16, 8])), "max")
    return b.relu(b.input("tangents_1", [16]))


@row("OUTSIDE_GRAPH", "made by an input of the graph")
def scatter_of_an_input(b: GraphBuilder) -> Node:
    return b.scatter(b.input("x", [16, 8]))


@row("NO_MATMUL", "made by aten.relu.default")
def all_reduce_of_a_norm(b: GraphBuilder) -> Node:
    return b.call(c10d.all_reduce.default, b.relu(b.input("x", [16])), "sum", "tp")


@row("NO_MATMUL", "made by aten.amax.default")
def all_reduce_of_a_products_maximum(b: GraphBuilder) -> Node:
    return b.all_reduce(b.call(aten.amax.default, product(b), [-1]), "max")


@row("NO_MATMUL", "made by aten.mul.Tensor")
def all_reduce_of_the_logits_of_targets(b: GraphBuilder) -> Node:
    """As the cross-entropy of a vocabulary that is sharded has them: those of other ranks' targets are zeros."""
    logits = b.call(aten.sub.Tensor, product(b), b.input("largest", [16, 1]))
    picked = b.call(aten.gather.default, logits, 1, b.input("targets", [16, 1], torch.int64))
    return b.all_reduce(b.mul(b.reshape(picked, [16]), b.input("mine", [16])))


@row("NO_MATMUL", "made by aten.index.Tensor")
def all_reduce_of_picked_logits(b: GraphBuilder) -> Node:
    places = [b.input("rows", [16], torch.int64), b.input("targets", [16], torch.int64)]
    return b.all_reduce(b.call(aten.index.Tensor, product(b), places))


@row("PIECES_MISSING", "picks rows by number")
def all_reduce_of_picked_rows(b: GraphBuilder) -> Node:
    """A matrix of them is no statistic."""
    return b.all_reduce(b.call(aten.index.Tensor, product(b), [b.input("rows", [5], torch.int64)]))


@row("PRODUCT_GATHERED", "mm -> all_gather_into_tensor")
def gather_of_logits(b: GraphBuilder) -> Node:
    """The head of a model that is sharded over the vocabulary."""
    return b.cat(b.chunks(b.gather(product(b))), dim=-1)


@row("ALL_TO_ALL", "getitem is piece 2 of 4", rank=2)
def all_to_all_on_cpu(b: GraphBuilder) -> Node:
    """DTensor's, from rows to columns. Its clone is the contiguous piece that DTensor returns."""
    columns = b.call(aten.split.Tensor, gathered(b), 2, 1)
    return times(b, b.call(aten.clone.default, b.call(getitem, columns, 2), memory_format=torch.contiguous_format))


@row("GATHERED_SCALE", "_scaled_mm", fused=1)
def scale_gathered_over_another_group(b: GraphBuilder) -> Node:
    """The data is fused with its matmul; its scale comes over a group of its own, so it stays a gather."""
    a, w = gathered(b, 4, 32, dtype=FP8), b.input("w", [32, 16], FP8, column_major=True)
    scale = b.call(c10d.all_gather_into_tensor.default, b.input("a_scale", [4, 1]), 4, "other")
    return b.scaled_mm(a, w, scale, b.input("b_scale", [1, 16]))


@row("GATHERED_SCALE", "addmm", fused=1)
def bias_gathered_over_the_same_group(b: GraphBuilder) -> Node:
    whole, w = gathered(b), b.input("w", [8, 12])
    return b.call(aten.addmm.default, b.gather(b.input("bias", [3])), whole, w)


@row("WEIGHT_GATHER", "group other: a vector", fused=1)
def bias_gathered_over_another_group(b: GraphBuilder) -> Node:
    """FSDP's."""
    whole, w = gathered(b), b.input("w", [8, 12])
    bias = b.call(c10d.all_gather_into_tensor.default, b.input("bias", [3]), 4, "other")
    return b.call(aten.addmm.default, bias, whole, w)


def scaled_by_gathered(b: GraphBuilder, shape: list[int], view: Callable[[Node], Node]) -> Node:
    """A gathered operand [16, 32], and its scales of rows in a view of what is gathered."""
    rows, w = gathered(b, 4, 32, dtype=FP8), b.input("w", [32, 16], FP8, column_major=True)
    scale = view(b.gather(b.input("a_scale", shape)))
    return b.scaled_mm(rows, w, scale, b.input("b_scale", [1, 16]))


@row("GATHERED_SCALE", "_scaled_mm", fused=1)
def scales_gathered_in_a_line(b: GraphBuilder) -> Node:
    return scaled_by_gathered(b, [4], lambda scale: scale)


@row("GATHERED_SCALE", "_scaled_mm", fused=1)
def scales_gathered_and_even_ranks_put_first(b: GraphBuilder) -> Node:
    def even_first(scale: Node) -> Node:
        return b.reshape(b.permute(b.reshape(scale, [2, 2, 4]), [1, 0, 2]), [16, 1])

    return scaled_by_gathered(b, [4, 1], even_first)


@row("GATHERED_SCALE", "_scaled_mm_v2", fused=0)
def scale_gathered_for_a_recipe_that_is_not_fused(b: GraphBuilder) -> Node:
    """The scale's gather comes last: it is not to blame."""
    a, w = gathered(b, 4, 32, dtype=FP8), b.input("w", [32, 16], FP8, column_major=True)
    scale, one = b.gather(b.input("a_scale", [4, 1])), b.input("b_scale", [1, 1])
    with b.mode:
        value = torch.empty(16, 16, dtype=torch.bfloat16)
    return b.call_like(value, aten._scaled_mm_v2.default, a, w, [scale], [1], [], [one], [0], [], None, torch.bfloat16)


@row("WEIGHT_GATHER", "group tp")
def gather_of_weights_for_a_grouped_matmul(b: GraphBuilder) -> Node:
    """Experts' weights, of an op that is not fused whatever its operands."""
    with b.mode:
        value = torch.empty(6, 8)
    offsets = b.input("offsets", [4], torch.int32)
    return b.call_like(value, aten._grouped_mm.default, b.input("a", [6, 16]), gathered(b, 1, 16, 8), offsets)


@row("NO_ELEMENTS", "all_gather_into_tensor")
def gather_of_no_rows(b: GraphBuilder) -> Node:
    return times(b, gathered(b, 0, 8))


@row("NO_ELEMENTS", "reduce_scatter_tensor")
def scatter_of_no_rows(b: GraphBuilder) -> Node:
    return b.scatter(product(b, rows=0))


@row("WEIGHT_GATHER", "group tp")
def gather_of_a_weight(b: GraphBuilder) -> Node:
    return b.mm(b.input("a", [6, 16]), gathered(b))


@row("NO_MATMUL", "used by aten.mul.Tensor")
def gather_of_a_norm_weight(b: GraphBuilder) -> Node:
    """A vector, scaled by which the operand of a matmul is."""
    return times(b, b.call(aten.mul.Tensor, b.input("a", [6, 16]), gathered(b, 4)))


@row("WEIGHT_GATHER", "group tp: a vector")
def gather_of_a_flat_weight(b: GraphBuilder) -> Node:
    return b.mm(b.input("a", [6, 8]), b.reshape(gathered(b, 24), [8, 12]))


@row("WEIGHT_GATHER", "group tp")
def gather_of_a_batched_weight(b: GraphBuilder) -> Node:
    return b.call(aten.bmm.default, b.input("a", [16, 6, 8]), gathered(b, 4, 8, 12))


@row("WEIGHT_GRADIENT", "group tp")
def scatter_of_a_weight_gradient(b: GraphBuilder) -> Node:
    return b.scatter(weight_gradient(b))


@row("WEIGHT_GRADIENT", "group tp")
def scatter_of_a_scaled_weight_gradient(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.mul.Tensor, weight_gradient(b), 0.5), "avg")


@row("WEIGHT_GRADIENT", "group tp")
def scatter_of_a_norm_weight_gradient(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.sum.dim_IntList, product(b), [1]))


@row("WEIGHT_GRADIENT", "group tp")
def all_reduce_of_a_weight_gradient(b: GraphBuilder) -> Node:
    return b.call(c10d.all_reduce.default, weight_gradient(b), "avg", "tp")


@row("RESULT_UNUSED", "f32[4, 8] of _c10d_functional.all_gather_into_tensor_coalesced")
def gather_of_a_list_of_which_one_is_used(b: GraphBuilder) -> Node:
    shards = [b.input("norm", [3]), b.input("x", [4, 8])]
    both = b.call(c10d.all_gather_into_tensor_coalesced.default, shards, 4, "tp")
    return b.call(c10d.wait_tensor.default, b.call(getitem, both, 0))


@row("DATA_PARALLEL_GROUP", 'group tp, mesh dimension "fsdp"', mesh_dim="fsdp")
def gather_over_a_dimension_named_for_data(b: GraphBuilder) -> Node:
    return times(b, gathered(b))


@row("SINGLE_RANK", "tp", ranks=1)
def gather_over_one_rank(b: GraphBuilder) -> Node:
    return times(b, gathered(b))


@row("ALREADY_FUSED", "symm_mem.fused_matmul_reduce_scatter")
def scatter_that_pytorch_fused(b: GraphBuilder) -> Node:
    a, w = b.input("a", [16, 8]), b.input("w", [8, 12])
    with b.mode:
        value = torch.empty(4, 12)
    return b.call_like(value, torch.ops.symm_mem.fused_matmul_reduce_scatter.default, a, w, "sum", 0, "tp")


@row("OTHER_COLLECTIVE", "all_to_all_single")
def all_to_all(b: GraphBuilder) -> Node:
    x = b.input("x", [16, 8])
    return b.call_like(x.meta["val"], c10d.all_to_all_single.default, x, [4] * 4, [4] * 4, "tp")


# --- lookups ------------------------------------------------------------------------------------------------------
@row("WEIGHT_GATHER", "embedding picks rows of an input of the graph")
def embeddings_of_a_gathered_table(b: GraphBuilder) -> Node:
    """FSDP's; a norm comes before the matmul."""
    table = b.gather(b.call(torch.ops.prims.convert_element_type.default, b.input("table", [4, 8]), torch.bfloat16))
    rows = b.call(aten.embedding.default, table, b.input("tokens", [20], torch.int64))
    return b.mm(b.call(aten.mul.Tensor, rows, rows), b.input("w", [8, 12], torch.bfloat16))


@row("NO_MATMUL", "embedding")
def table_of_embeddings_by_gathered_tokens(b: GraphBuilder) -> Node:
    """The rows are those of a table on this rank."""
    tokens = b.gather(b.input("tokens", [4], torch.int64))
    return b.mm(b.call(aten.embedding.default, b.input("table", [32, 8]), tokens), b.input("w", [8, 12]))


@row("NO_MATMUL", "made by aten.embedding.default")
def all_reduce_of_embeddings(b: GraphBuilder) -> Node:
    """Of a table whose rows are shared by the ranks."""
    return b.all_reduce(b.call(aten.embedding.default, b.input("table", [32, 8]), b.input("tokens", [4], torch.int64)))


# --- parts -------------------------------------------------------------------------------------------------------
@row("TAKEN_IN_PARTS", "of wait_tensor: slice_1 [0, 7), slice_2 [7, 16)")
def rows_in_chunks(b: GraphBuilder) -> Node:
    """Two, by one weight."""
    whole, w = gathered(b), b.input("w", [8, 12])
    return b.cat([b.mm(b.call(aten.slice.Tensor, whole, 0, *ends), w) for ends in ((0, 7), (7, 2**63 - 1))])


@row("TAKEN_IN_PARTS", "of cat: slice_1 [0, 3), slice_2 [3, 8)")
def steps_in_chunks(b: GraphBuilder) -> Node:
    whole, w = b.cat(b.chunks(gathered(b, 3, 2, 8)), dim=1), b.input("w", [8, 12])
    first, last = (b.call(aten.slice.Tensor, whole, 1, *ends) for ends in ((0, 3), (3, 8)))
    return b.cat([b.mm(b.reshape(first, [9, 8]), w), b.mm(b.reshape(last, [15, 8]), w)])


@row("TAKEN_IN_PARTS", "of relu: slice_1 [0, 7), slice_2 [7, 16)")
def computed_rows_in_chunks(b: GraphBuilder) -> Node:
    whole, w = b.relu(gathered(b)), b.input("w", [8, 12])
    return b.cat([b.mm(b.call(aten.slice.Tensor, whole, 0, *ends), w) for ends in ((0, 7), (7, 2**63 - 1))])


@row("COMPUTED_BETWEEN", "of relu: slice_1 [0, 7), slice_2 [7, 16)")
def computed_rows_of_two_kinds(b: GraphBuilder) -> Node:
    """Text and image tokens, each with a weight of its own."""
    whole = b.relu(gathered(b))
    text, image = (b.call(aten.slice.Tensor, whole, 0, *ends) for ends in ((0, 7), (7, 2**63 - 1)))
    return b.cat([times(b, text), b.mm(image, b.input("v", [8, 12]))])


@row("TAKEN_IN_PARTS", "of wait_tensor: slice_1 [0, 5), slice_2 [5, 8)")
def columns_of_two_kinds(b: GraphBuilder) -> Node:
    whole = gathered(b)
    first, last = (b.call(aten.slice.Tensor, whole, 1, *ends) for ends in ((0, 5), (5, 2**63 - 1)))
    return b.cat([times(b, first), b.mm(last, b.input("v", [3, 12]))])


@row("TAKEN_IN_PARTS", "of wait_tensor: getitem [0, 2), getitem_1 [2, 4), getitem_2 [4, 6) and 5 more")
def head_in_chunks(b: GraphBuilder) -> Node:
    """The largest of each chunk's results is all that is kept."""
    pieces, w = b.call(aten.split.Tensor, gathered(b), 2, 0), b.input("w", [8, 12])
    chunks = [b.call(getitem, pieces, index) for index in range(8)]
    return b.cat([b.call(aten.amax.default, b.mm(chunk, w), [1]) for chunk in chunks])


@row("TAKEN_IN_PARTS", "joins pieces of different products: mm, mm_1")
def chunks_joined_before_the_scatter(b: GraphBuilder) -> Node:
    w = b.input("a_w", [8, 12])
    return b.scatter(b.cat([b.mm(b.input(name, [16, 8]), w) for name in ("a", "c")]))


@row("PRODUCTS_JOINED", "joins pieces of different products: mm, mm_1")
def two_products_joined_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.cat([product(b), product(b, "c")]))


@row("PRODUCTS_JOINED", "joins pieces of different products: mm, mm_1")
def products_of_two_streams_among_zeros(b: GraphBuilder) -> Node:
    """The gradient of slices: not a gather by a sum, though each is as large as a rank's part."""
    first, then = product(b), product(b, "c")
    parts = (
        b.call(aten.slice_scatter.default, b.call(aten.full.default, [64, 12], 0.0), part, 0, start, start + 16)
        for part, start in ((first, 0), (then, 16))
    )
    return b.all_reduce(b.call(aten.add.Tensor, *parts))


@row("PRODUCTS_JOINED", "joins pieces of different products: addmm, addmm_1")
def sums_of_two_streams_among_zeros(b: GraphBuilder) -> Node:
    """Each with a term of its own, which Inductor puts into its matmul."""
    parts = []
    for start, rows in ((0, 5), (5, 11)):
        sizes = {"added": [rows, 12], "a": [rows, 8], "w": [8, 12]}
        made = b.call(aten.addmm.default, *[b.input(f"{name}{start}", size) for name, size in sizes.items()])
        zeros = b.call(aten.full.default, [16, 12], 0.0)
        parts.append(b.call(aten.slice_scatter.default, zeros, made, 0, start, start + rows))
    return b.scatter(b.call(aten.add.Tensor, *parts))


@row("PRODUCTS_JOINED", "joins pieces of different products: mm_1, mm")
def products_of_two_shapes_joined(b: GraphBuilder) -> Node:
    """As of experts that have different numbers of tokens."""
    other = b.mm(b.input("c", [4, 8]), b.input("v", [8, 12]))
    return b.call(c10d.all_reduce.default, b.cat([product(b), other], dim=0), "sum", "tp")
