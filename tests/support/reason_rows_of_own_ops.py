"""Reductions of what an op of the program's own, or one of Inductor's, makes of a matmul, and look-alikes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import getitem
from types import SimpleNamespace
from typing import Any

import torch
from graph_builder import GraphBuilder, aten
from reason_rows import gathered, product, row, times
from torch.fx import Node

_OWN_OPS = torch.library.Library("own_like", "FRAGMENT")
_OWN_OPS.define("halves(Tensor x) -> (Tensor, Tensor)")
_OWN_OPS.define("write_scaled(Tensor! out, Tensor x) -> ()")
for _name in (
    "scale",
    "paged_attention",
    "fused_moe",
    "sum_experts",
    "row_numbers",
    "combine",
    "all_reduce_and_norm",
    "custom_sum",
    "normalize",
):
    _OWN_OPS.define(f"{_name}(Tensor x) -> Tensor")
_OWN_OPS.define("finish(Tensor x, Tensor w) -> Tensor")
_OWN_OPS.define("custom_sum_of(Tensor x, str group_name) -> Tensor")
_OWN_OPS.define("embed(Tensor ids, Tensor x) -> Tensor")
_OWN_OPS.define("int4mm_packed_weight_cpu(Tensor x, Tensor weight) -> Tensor")
_OWN_OPS.define("_linear_pointwise(Tensor x, Tensor weight) -> Tensor")

own = torch.ops.own_like
torch.library.register_fake("own_like::normalize", torch.empty_like, lib=_OWN_OPS)


def called(b: GraphBuilder, op: Any, *inputs: Node, shape: tuple[int, ...] = (16, 12), dtype: Any = None) -> Node:
    """A call of an op that returns a tensor of this shape."""
    with b.mode:
        value = inputs[-1].meta["val"].new_empty(shape, dtype=dtype)
    return b.call_like(value, op.default, *inputs)


# --- ops that may communicate ---------------------------------------------------------------------------------------
@row("OPAQUE_OP_BETWEEN", 'own_like.scale.default: register_local("own_like::scale")')
def weight_of_an_own_op_after_the_gather(b: GraphBuilder) -> Node:
    whole = gathered(b)
    return b.mm(whole, called(b, own.scale, b.input("w", [8, 12]), shape=(8, 12)))


@row("OPAQUE_OP_BETWEEN", 'own_like.combine.default: register_local("own_like::combine")')
def weight_in_time_but_for_an_own_op(b: GraphBuilder) -> tuple[Node, ...]:
    """The weight is reduced later, which the fused op could follow, but for an op before that."""
    whole, ours = gathered(b), torch.ops.asynctp
    other = called(b, own.combine, b.input("y", [4, 4]), shape=(4, 4))
    operands = [b.input("a", [8, 4])], [b.input("b", [4, 12])]
    weight = b.call(ours.matmul_all_reduce.default, *operands, [None], "sum", b.group)
    return b.mm(whole, weight), other


# --- between a matmul and its reduction ----------------------------------------------------------------------------
@row("COMPUTED_BETWEEN", "mm -> scale")
def own_op_before_the_all_reduce(b: GraphBuilder) -> Node:
    return b.all_reduce(called(b, own.scale, product(b)))


@row("COMPUTED_BETWEEN", "mm -> scale -> relu -> scale")
def own_ops_and_others_before_the_scatter(b: GraphBuilder) -> Node:
    return b.scatter(called(b, own.scale, b.relu(called(b, own.scale, product(b)))))


@row("COMPUTED_BETWEEN", "mm -> scale")
def own_op_that_returns_other_columns(b: GraphBuilder) -> Node:
    return b.scatter(called(b, own.scale, product(b), shape=(16, 6)))


@row("COMPUTED_BETWEEN", "mm -> reshape -> scale")
def own_op_of_a_batch(b: GraphBuilder) -> Node:
    batch = called(b, own.scale, b.reshape(product(b), [4, 4, 12]), shape=(4, 4, 12))
    return b.scatter(b.reshape(batch, [16, 12]))


@row("COMPUTED_BETWEEN", "mm -> halves")
def own_op_that_returns_two(b: GraphBuilder) -> Node:
    with b.mode:
        values = tuple(torch.empty(16, 6) for _ in range(2))
    return b.all_reduce(b.call(getitem, b.call_like(values, own.halves.default, product(b)), 1))


@row("COMPUTED_BETWEEN", "mm -> write_scaled")
def own_op_that_writes(b: GraphBuilder) -> Node:
    """Functionalized, as in a compiled graph."""
    x, out = product(b), b.input("out", [16, 12])
    arguments = {"out": out, "x": x}
    call = b.graph.call_function(torch.ops.higher_order.auto_functionalized, (own.write_scaled.default,), arguments)
    call.meta["val"] = (None, out.meta["val"])
    return b.all_reduce(b.call(getitem, call, 1))


@row("COMPUTED_BETWEEN", "mm -> write_scaled")
def own_op_that_writes_half_of_square_rows(b: GraphBuilder) -> Node:
    """[12, 12] and the [12, 6] that it writes to are no operands of a matmul."""
    x, out = b.mm(b.input("a", [12, 8]), b.input("b", [8, 12])), b.input("out", [12, 6])
    arguments = {"out": out, "x": x}
    call = b.graph.call_function(torch.ops.higher_order.auto_functionalized, (own.write_scaled.default,), arguments)
    call.meta["val"] = (None, out.meta["val"])
    return b.all_reduce(b.call(getitem, call, 1))


# --- look-alikes: the op is none that something was computed in between ---------------------------------------------
def of_own_op(name: str, shape: tuple[int, ...] = (16, 12), dtype: Any = None) -> Callable[[GraphBuilder], Node]:
    def build(b: GraphBuilder) -> Node:
        made = called(b, getattr(own, name), product(b), shape=shape, dtype=dtype)
        return b.all_reduce(made)

    build.__name__ = f"{name}_{len(shape)}_{shape[-1]}"
    return build


for _name in ("paged_attention", "fused_moe", "sum_experts", "all_reduce_and_norm"):  # a name tells nothing
    told = f'mm -> {_name}; nothing is known of own_like.{_name}.default: register_local("own_like::{_name}")'
    row("COMPUTED_BETWEEN", told)(of_own_op(_name))
row("NO_MATMUL", "made by own_like.scale")(of_own_op("scale", (16,)))  # statistics of the rows
row("NO_MATMUL", "made by own_like.scale")(of_own_op("scale", (16, 1)))
row("NO_MATMUL", "made by own_like.row_numbers")(of_own_op("row_numbers", dtype=torch.int64))
row("NOT_ROWWISE", "own_like.combine.default returns other rows")(of_own_op("combine", (12, 16)))


@row("NOT_ROWWISE", 'own_like.embed.default returns other rows than it takes: register_local("own_like::embed")')
def own_op_of_other_rows(b: GraphBuilder) -> Node:
    """A matmul's result is its table."""
    return b.all_reduce(called(b, own.embed, b.input("ids", [32], torch.int64), product(b), shape=(32, 12)))


@row("NO_MATMUL", "made by own_like.scale")
def own_op_of_no_product(b: GraphBuilder) -> Node:
    return b.all_reduce(called(b, own.scale, b.relu(b.input("x", [16, 12]))))


@row(
    "COMPUTED_BETWEEN",
    'known to be row-wise: if it is, register_rowwise("own_like::scale")',
)
def own_op_of_a_gathered_tensor(b: GraphBuilder) -> Node:
    return b.mm(called(b, own.scale, gathered(b)), b.input("w", [12, 6]))


@row("NOT_ROWWISE", "own_like.scale.default returns other rows than it takes")
def own_op_that_makes_a_vector_of_a_gathered_tensor(b: GraphBuilder) -> Node:
    vector = called(b, own.scale, gathered(b), shape=(8,))
    return b.mm(b.call(aten.unsqueeze.default, vector, 0), b.input("w", [8, 12]))


@row("QUANTIZED_AFTER_GATHER", "own_like.scale.default")
def own_op_that_quantizes_a_gathered_tensor(b: GraphBuilder) -> Node:
    codes = called(b, own.scale, gathered(b), shape=(16, 8), dtype=torch.int8)
    return b.mm(b.call(torch.ops.prims.convert_element_type.default, codes, torch.float32), b.input("w", [8, 12]))


@row("NO_MATMUL", "used by own_like.row_numbers")
def own_op_that_says_which_rows_another_tensor_gives(b: GraphBuilder) -> Node:
    numbers = called(b, own.row_numbers, gathered(b), shape=(16,), dtype=torch.int64)
    return b.mm(b.call(aten.index.Tensor, b.input("y", [16, 8]), [numbers]), b.input("w", [8, 12]))


@row("COMPUTED_BETWEEN", 'known to be row-wise: if it is, register_rowwise("own_like::normalize")')
def own_op_with_a_fake_of_a_gathered_tensor(b: GraphBuilder) -> Node:
    return b.mm(b.call(own.normalize.default, gathered(b)), b.input("w", [8, 12]))


@row("COMPUTED_BETWEEN", 'one tensor; nothing is known of own_like.halves.default: register_local("own_like::halves")')
def own_op_with_two_results_of_a_gathered_tensor(b: GraphBuilder) -> Node:
    with b.mode:
        value = torch.empty(16, 8)
    halves = b.call_like((value, value), own.halves.default, gathered(b))
    return times(b, b.call(getitem, halves, 0))


@row("MATMUL_NOT_UNDERSTOOD", "own_like.finish.default")
def own_op_of_the_shapes_of_a_matmul(b: GraphBuilder) -> Node:
    return called(b, own.finish, b.input("w", [8, 12]), gathered(b))


@row("COLLECTIVE_NOT_UNDERSTOOD", "own_like.custom_sum_of.default")
def own_op_that_takes_a_group(b: GraphBuilder) -> Node:
    """A sum over ranks, whatever it is called."""
    return b.call_like(product(b).meta["val"], own.custom_sum_of.default, product(b, "c"), "tp:0")


@row("NOT_ROWWISE", "[embed -> mm; own_like.embed.default returns other rows than it takes")
def own_op_of_gathered_keys(b: GraphBuilder) -> Node:
    """Attention, say, or a dispatch of tokens."""
    made = called(b, own.embed, b.input("ids", [6], torch.int64), gathered(b), shape=(6, 8))
    return times(b, made)


@row("NOT_ROWWISE", "[embed -> mm; own_like.embed.default returns other rows than it takes")
def own_op_of_other_rows_and_columns(b: GraphBuilder) -> Node:
    made = called(b, own.embed, b.input("ids", [6], torch.int64), gathered(b), shape=(6, 12))
    return times(b, made)


# --- matmuls by other names ----------------------------------------------------------------------------------------
def woq_int8(match: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for Inductor's lowering of a weight in int8."""


def hidden(b: GraphBuilder, target: Any = aten.mm.default) -> Node:
    """`mm` of a weight of int8, times a scale for each column: Inductor makes one node of them before a custom pass."""
    ops = (torch.ops.prims.convert_element_type.default, target, aten.mul.Tensor)
    match = SimpleNamespace(nodes=[b.graph.create_node("call_function", op, (), {}) for op in ops])
    for node in match.nodes:
        b.graph.erase_node(node)
    inputs = {"x": b.input("x", [16, 8]), "weight": b.input("w", [12, 8]), "scales": b.input("s", [12])}
    handler = functools.wraps(woq_int8)(functools.partial(woq_int8, match))
    call = b.graph.call_function(handler, (), inputs)
    with b.mode:
        call.meta["val"] = torch.empty(16, 12)
    return call


@row("MATMUL_NOT_UNDERSTOOD", "woq_int8 woq_int8, which Inductor put in the place of convert_element_type -> mm -> mul")
def weights_that_inductor_hides(b: GraphBuilder) -> Node:
    return b.all_reduce(hidden(b))


@row("COMPUTED_BETWEEN", "woq_int8 -> relu")
def weights_that_inductor_hides_and_more(b: GraphBuilder) -> Node:
    return b.scatter(b.relu(hidden(b)))


@row("NO_MATMUL", "made by woq_int8")
def pattern_of_inductor_without_a_matmul(b: GraphBuilder) -> Node:
    return b.all_reduce(hidden(b, aten.add.Tensor))


@row("MATMUL_NOT_UNDERSTOOD", "aten._weight_int8pack_mm.default")
def weights_in_int8(b: GraphBuilder) -> Node:
    weight, scales = b.input("w", [12, 8], torch.int8), b.input("s", [12])
    with b.mode:
        value = torch.empty(16, 12)
    return b.scatter(b.call_like(value, aten._weight_int8pack_mm.default, b.input("x", [16, 8]), weight, scales))


@row("MATMUL_NOT_UNDERSTOOD", "own_like.int4mm_packed_weight_cpu.default")
def weights_in_int4(b: GraphBuilder) -> Node:
    return b.all_reduce(called(b, own.int4mm_packed_weight_cpu, b.input("w", [8, 12]), b.input("x", [16, 8])))


@row("MATMUL_NOT_UNDERSTOOD", "own_like._linear_pointwise.default")
def weights_that_freezing_packed(b: GraphBuilder) -> Node:
    return b.all_reduce(called(b, own._linear_pointwise, b.input("w", [8, 12]), b.input("x", [16, 8])))
