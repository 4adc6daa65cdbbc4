"""A table of small graphs, at least one for each reason, and what the pass says about each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add, floordiv, getitem
from typing import Any
from unittest import mock

import pytest
import serving_ops  # noqa: F401  (defines torch.ops.vllm_like)
import torch
import torch.distributed._symmetric_memory  # registers symm_mem.fused_*
from graph_builder import GraphBuilder, aten, c10d, snapshot
from lockstep import op_name
from passes import run_pass
from torch.fx import Graph, Node

from asynctp_passes import Remark, compat
from asynctp_passes.reasons import CATALOGUE

FP8 = torch.float8_e4m3fn

_WRITING_OPS = torch.library.Library("registry_like", "FRAGMENT")
_WRITING_OPS.define("all_gather_out(Tensor! out, Tensor x) -> ()")
_WRITING_OPS.define("dynamic_per_token_quant(Tensor! out, Tensor x, Tensor! scale) -> ()")

Build = Callable[[GraphBuilder], Any]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        build: Builds a graph on four ranks and returns what it returns.
        name: The expected reason, of the collective that comes last in the graph.
        fact: What the remark must mention.
        config: Fields of the configuration, where they are not the defaults.
        ranks: Number of ranks.
        fused: Number of chains of the graph that are fused all the same.
        mesh_dim: The mesh dimension that groups are of.
    """

    build: Build
    name: str
    fact: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 4
    fused: int = 0
    mesh_dim: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}-{self.build.__name__}"

    def graph(self) -> Graph:
        b = GraphBuilder(ranks=self.ranks)
        out = self.build(b)
        return b.returns(*(out if isinstance(out, tuple) else (out,)))


ROWS: list[Row] = []


def row(
    name: str, fact: str = "", *, ranks: int = 4, fused: int = 0, mesh_dim: str = "", **config: Any
) -> Callable[[Build], Build]:
    """Add the decorated builder to the table."""

    def add(build: Build) -> Build:
        ROWS.append(Row(build, name, fact, config, ranks, fused, mesh_dim))
        return build

    return add


# --- pieces of graphs ----------------------------------------------------------------------------------------
def gathered(b: GraphBuilder, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
    """A gathered shard; `[4, 8]`, so `[16, 8]` together, unless said otherwise."""
    return b.gather(b.input("x", shape or [4, 8], dtype))


def times(b: GraphBuilder, a: Node, columns: int = 12) -> Node:
    """`a @ w`."""
    value = a.meta["val"]
    return b.mm(a, b.input("w", [value.shape[-1], columns], value.dtype, device=value.device.type))


def product(b: GraphBuilder, name: str = "a", rows: int = 16) -> Node:
    """A product `[rows, 12]` to scatter."""
    return b.mm(b.input(name, [rows, 8]), b.input(f"{name}_w", [8, 12]))


def scaled(b: GraphBuilder, a_scale: list[int], b_scale: list[int], **kwargs: Any) -> Node:
    """A scaled product `[16, 12]` of a gathered operand `[16, 32]`."""
    w = b.input("w", [32, 16], FP8, column_major=True)
    scales = b.input("a_scale", a_scale), b.input("b_scale", b_scale)
    return b.scaled_mm(gathered(b, 4, 32, dtype=FP8), w, *scales, **kwargs)


def quantized(b: GraphBuilder, scale_of: Callable[[Node], Node]) -> Node:
    """A scaled product `[16, 16]` of a gathered tensor that is multiplied by a scale and cast to fp8."""
    whole = gathered(b, 4, 32)
    fp8 = b.call(torch.ops.prims.convert_element_type.default, b.call(aten.mul.Tensor, whole, scale_of(whole)), FP8)
    w = b.input("w", [32, 16], FP8, column_major=True)
    return b.scaled_mm(fp8, w, b.input("a_scale", []), b.input("b_scale", []))


def weight_gradient(b: GraphBuilder) -> Node:
    """`dYᵀ @ x`, `[16, 12]`."""
    return b.mm(b.permute(b.input("dy", [6, 16]), [1, 0]), b.input("saved", [6, 12]))


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


@row("PRODUCT_GATHERED", "mm -> all_gather_into_tensor")
def gather_of_logits(b: GraphBuilder) -> Node:
    """The head of a model that is sharded over the vocabulary."""
    return b.cat(b.chunks(b.gather(product(b))), dim=-1)


@row("GATHERED_SCALE", "_scaled_mm", fused=1)
def scale_gathered_over_another_group(b: GraphBuilder) -> Node:
    """The data is fused with its matmul; its scale comes over a group of its own, so it stays a gather."""
    a, w = gathered(b, 4, 32, dtype=FP8), b.input("w", [32, 16], FP8, column_major=True)
    scale = b.call(c10d.all_gather_into_tensor.default, b.input("a_scale", [4, 1]), 4, "other")
    return b.scaled_mm(a, w, scale, b.input("b_scale", [1, 16]))


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


@row("WEIGHT_GATHER", "group tp")
def gather_of_a_norm_weight(b: GraphBuilder) -> Node:
    """A vector, scaled by which the operand of a matmul is."""
    return times(b, b.call(aten.mul.Tensor, b.input("a", [6, 16]), gathered(b, 4)))


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


@row("PIECES_MISSING", "picks rows by number")
def rows_picked_by_an_input(b: GraphBuilder) -> Node:
    """The last token of each sequence, as serving does before the head."""
    return times(b, b.call(aten.index.Tensor, gathered(b), [b.input("last", [5], torch.int64)]))


@row("PIECES_REPEATED", "picks rows by number")
def rows_picked_for_several_experts(b: GraphBuilder) -> Node:
    return times(b, b.call(aten.index.Tensor, gathered(b), [b.input("routes", [32], torch.int64)]))


@row("VIEW_NOT_UNDERSTOOD", "pads by [0, 0, 1, -1]")
def rows_shifted_before_the_scatter(b: GraphBuilder) -> Node:
    """What a token shift is in backward: no padding to a multiple of the ranks."""
    return b.scatter(b.call(aten.constant_pad_nd.default, product(b), [0, 0, 1, -1]))


@row("VIEW_NOT_UNDERSTOOD", "joins pieces of different products: mm, mm_1")
def two_products_joined_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.cat([product(b), product(b, "c")]))


@row("VIEW_NOT_UNDERSTOOD", "written into a part of another")
def gathered_into_a_larger_buffer(b: GraphBuilder) -> Node:
    buffer = b.input("buffer", [20, 8])
    return times(b, b.call(aten.slice_scatter.default, buffer, gathered(b), 0, 2, 18))


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
    x = b.input("x", [6, 8], dynamic=0)
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


@row("VIEW_NOT_UNDERSTOOD", "joins pieces of different products: mm_1, mm")
def products_of_two_shapes_joined(b: GraphBuilder) -> Node:
    """As of experts that have different numbers of tokens."""
    other = b.mm(b.input("c", [4, 8]), b.input("v", [8, 12]))
    return b.call(c10d.all_reduce.default, b.cat([product(b), other], dim=0), "sum", "tp")


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
    call = b.call_like((None, buffer.meta["val"]), target, op, out=buffer, x=x)
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


@row("UNEVEN_SHARDS", "index_select")
def padding_removed_after_the_gather(b: GraphBuilder) -> Node:
    kept = b.input("kept", [15], torch.int64)
    return times(b, b.call(aten.index_select.default, gathered(b), 0, kept))


@row("UNEVEN_SHARDS", "slice")
def padding_sliced_off_after_the_gather(b: GraphBuilder) -> Node:
    """15 rows on four ranks: the last one's is padding."""
    return times(b, b.call(aten.slice.Tensor, gathered(b), 0, 0, 15))


@row("UNEVEN_SHARDS", "aten.slice.Tensor slice_1:")
def padding_of_several_dimensions_sliced_off_after_the_gather(b: GraphBuilder) -> Node:
    """The first one is named, whatever the addresses of nodes are."""
    whole = gathered(b, 2, 8, 8, 8, 8)
    for dim in range(5):
        whole = b.call(aten.slice.Tensor, whole, dim, 0, 7)
    return times(b, b.reshape(whole, [7**4, 7]))


@row("UNEVEN_SHARDS", "slice")
def padding_of_a_sequence_sliced_off_after_the_gather(b: GraphBuilder) -> Node:
    whole = b.cat(b.chunks(gathered(b, 2, 3, 8)), dim=1)
    return times(b, b.reshape(b.call(aten.slice.Tensor, whole, 1, 0, 10), [20, 8]))


@row("UNEVEN_SHARDS", "constant_pad_nd")
def padding_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(b.call(aten.constant_pad_nd.default, product(b, rows=15), [0, 0, 0, 1]))


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


@row("MUTATED_IN_BETWEEN", "copy_")
def mutation_between(b: GraphBuilder) -> Node:
    whole, w = gathered(b), b.input("w", [8, 12])
    b.call(aten.copy_.default, w, b.input("new", [8, 12]))
    return b.mm(whole, w)


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


# --- the tests -------------------------------------------------------------------------------------------------
def remarks_of(line: Row, graph: Graph) -> tuple[Remark, ...]:
    with mock.patch.object(compat, "mesh_dimension_of", return_value=line.mesh_dim):
        return run_pass(graph, **line.config).remarks


@pytest.mark.parametrize("line", ROWS, ids=[line.id for line in ROWS])
def test_reason(line: Row) -> None:
    graph = line.graph()
    before = snapshot(graph)
    remarks = remarks_of(line, graph)
    graph.lint()
    reason, remark = CATALOGUE[line.name], remarks[-1]
    assert (remark.name, remark.code) == (line.name, reason.code), remark
    assert remark.outcome == ("MISSED" if reason.in_scope else "SKIPPED")
    assert line.fact in remark.message
    assert remark.hint == reason.hint
    apart = line.name == "RESULT_UNUSED" and "coalesced" in remark.kind  # its tensors are communicated one by one
    erased = line.name == "RESULT_DROPPED" or apart
    assert (remark.collective in {node.name for node in graph.nodes}) != erased
    assert len([remark for remark in remarks if remark.outcome == "FUSED"]) == line.fused
    if not line.fused and not erased and not any(remark.op for remark in remarks):
        assert snapshot(graph) == before


def test_the_table_reaches_every_reason() -> None:
    elsewhere = {"INTERNAL_ERROR", "RANKS_DIFFER"}  # test_internal, test_agree
    assert {line.name for line in ROWS} | elsewhere == set(CATALOGUE)


def test_the_catalogue_is_well_formed() -> None:
    codes = [reason.code for reason in CATALOGUE.values()]
    assert len(set(codes)) == len(codes)
    for name, reason in CATALOGUE.items():
        assert name == reason.name
        assert reason.text
        assert reason.hint
        assert not reason.text.endswith(".")
        assert reason.in_scope == (reason.code[3] not in "04")


@pytest.mark.parametrize("line", ROWS, ids=[line.id for line in ROWS])
def test_remarks_name_the_place(line: Row) -> None:
    """The nodes of a remark are in the graph, its collective among them; and each collective has one."""
    graph = line.graph()
    names = {node.name for node in graph.nodes}
    expected = [node.name for call in graph.nodes if communicates(call) for node in results(call)]
    remarks = remarks_of(line, graph)
    for remark in remarks:
        assert remark.collective in remark.nodes
        assert set(remark.nodes) <= names
    assert [remark.collective for remark in remarks] == expected


def communicates(node: Node) -> bool:
    """True for what has the name of a collective, but is neither a wait nor ours."""
    name = op_name(node.args[0] if op_name(node.target).startswith("auto_functionalized") else node.target)
    words = ("gather", "reduce_scatter", "all_reduce", "allreduce", "all_to_all", "broadcast")
    return not name.startswith(("aten::", "asynctp::")) and any(word in name for word in words)


def results(call: Node) -> list[Node]:
    """The items of a list that a collective returns, or the call itself; that too for an item that nothing takes."""
    items = {user.args[1]: user for user in call.users if op_name(user.target) == "getitem"}
    is_list = op_name(call.target).endswith("_coalesced") and len(items) == len(call.users)
    return [items.get(index, call) for index in range(len(call.args[0]))] if is_list else [call]  # type: ignore[arg-type]
