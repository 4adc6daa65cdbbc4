"""Remedies of the reasons of what is SKIPPED, each followed on a row of the table."""

from __future__ import annotations

from operator import getitem

import reason_rows_of_limits as limits
import reason_rows_of_scope as scope
import torch
from graph_builder import GraphBuilder, aten
from reason_rows import FP8, gathered, mends, product, times
from torch.fx import Node

# --- Config(groups=...), and thresholds --------------------------------------------------------------------------
mends(scope.gather_of_another_group, config={"groups": ("dp", "ep", "tp")})(scope.gather_of_another_group)
mends(scope.gather_of_another_group, config={"groups": "auto"})(scope.gather_of_another_group)
for _before in (
    scope.scatter_of_a_weight_gradient,
    scope.scatter_of_a_scaled_weight_gradient,
    scope.all_reduce_of_a_weight_gradient,
    scope.gather_over_a_dimension_named_for_data,
):
    mends(_before, config={"groups": ("tp",)})(_before)
mends(limits.gather_that_would_be_hoisted, config={"skip": ()})(limits.gather_that_would_be_hoisted)
_before = limits.gather_that_would_run_beside_a_product
mends(_before, outcome="OVERLAPPED", config={"skip": ()})(_before)
mends(limits.small_gather, config={"min_bytes": 0})(limits.small_gather)
mends(limits.small_matmul, config={"min_flops": 0})(limits.small_matmul)


@mends(scope.gather_of_a_weight, outcome="OVERLAPPED", config={"groups": ("tp",)})
def gather_of_a_right_operand_beside_matmuls(b: GraphBuilder) -> tuple[Node, Node]:
    a, whole = b.input("a", [6, 16]), gathered(b)
    return b.mm(a, whole), product(b, "c", rows=2048)


# --- programs ----------------------------------------------------------------------------------------------------
@mends(scope.scatter_that_pytorch_fused, differs="nothing evaluates PyTorch's op here")
def scatter_that_pytorch_left_alone(b: GraphBuilder) -> Node:
    return b.scatter(b.mm(b.input("a", [16, 8]), b.input("w", [8, 12])))


@mends(scope.scale_gathered_over_another_group)
def scale_gathered_over_the_same_group(b: GraphBuilder) -> Node:
    a, w = gathered(b, 4, 32, dtype=FP8), b.input("w", [32, 16], FP8, column_major=True)
    return b.scaled_mm(a, w, b.gather(b.input("a_scale", [4, 1])), b.input("b_scale", [1, 16]))


@mends(scope.scales_gathered_and_even_ranks_put_first, differs="the scales are in the order of the rows")
def scales_gathered_in_the_order_of_the_rows(b: GraphBuilder) -> Node:
    return scope.scaled_by_gathered(b, [4, 1], lambda scale: scale)


@mends(scope.gather_of_a_list_of_which_one_is_used, outcome="SKIPPED")
def gather_of_a_list_of_what_is_used(b: GraphBuilder) -> Node:
    return b.gather_list(b.input("norm", [3]))[0]


@mends(scope.gather_that_is_returned, differs="it has the matmul")
def gather_that_is_multiplied(b: GraphBuilder) -> Node:
    return times(b, gathered(b))


@mends(scope.scatter_of_an_input, differs="it has the matmul")
def scatter_of_a_product(b: GraphBuilder) -> Node:
    return b.scatter(product(b))


@mends(limits.gathered_tensor_used_as_it_is_too, differs="both work with the operand")
def operand_gathered_for_both(b: GraphBuilder) -> tuple[Node, Node]:
    whole = b.gather(b.relu(b.input("x", [4, 8])))
    return times(b, whole), b.call(aten.sum.default, whole)


@mends(scope.head_in_chunks)
def head_whole(b: GraphBuilder) -> Node:
    pieces = b.call(aten.split.Tensor, times(b, gathered(b)), 2, 0)
    return b.cat([b.call(aten.amax.default, b.call(getitem, pieces, index), [1]) for index in range(8)])


@mends(scope.head_in_chunks, differs="each chunk has rows of every rank")
def head_in_chunks_of_gathered_pieces(b: GraphBuilder) -> Node:
    pieces, w = b.call(aten.split.Tensor, b.input("x", [4, 8]), 1, 0), b.input("w", [8, 12])
    chunks = [b.gather(b.call(getitem, pieces, index)) for index in range(4)]
    return b.cat([b.call(aten.amax.default, b.mm(chunk, w), [1]) for chunk in chunks])


@mends(scope.computed_rows_of_two_kinds)
def rows_of_two_kinds_computed_before_the_gather(b: GraphBuilder) -> Node:
    whole = b.gather(b.relu(b.input("x", [4, 8])))
    text, image = (b.call(aten.slice.Tensor, whole, 0, *ends) for ends in ((0, 7), (7, 2**63 - 1)))
    return b.cat([times(b, text), b.mm(image, b.input("v", [8, 12]))])


@mends(scope.columns_of_two_kinds)
def columns_gathered_by_themselves(b: GraphBuilder) -> Node:
    x = b.input("x", [4, 8])
    parts = (b.call(aten.slice.Tensor, x, 1, *ends) for ends in ((0, 5), (5, 2**63 - 1)))
    first, last = (b.call(aten.clone.default, part, memory_format=torch.contiguous_format) for part in parts)
    return b.cat([times(b, b.gather(first)), b.mm(b.gather(last), b.input("v", [3, 12]))])


@mends(scope.two_products_joined_before_the_scatter, differs="each rank has rows of both")
def two_products_scattered_by_themselves(b: GraphBuilder) -> tuple[Node, Node]:
    return b.scatter(product(b)), b.scatter(product(b, "c"))


@mends(scope.chunks_joined_before_the_scatter)
def product_of_joined_operands(b: GraphBuilder) -> Node:
    operands = b.cat([b.input("a", [16, 8]), b.input("c", [16, 8])])
    return b.scatter(b.mm(operands, b.input("a_w", [8, 12])))
