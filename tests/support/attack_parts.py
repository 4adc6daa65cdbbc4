"""Parts of graphs that attack the pass. See `test_attacks`."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from passes import copied, run_pass
from programs import Builder
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from asynctp_passes import Report

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FP8, OTHER_FP8 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GROUP = "tp"
Attack = Callable[[Builder], list[Node]]


def gathered(b: Builder, shard: Node) -> Node:
    """All-gather and wait."""
    return b.call(c10d.wait_tensor.default, b.call(c10d.all_gather_into_tensor.default, shard, b.world_size, GROUP))


def scattered(b: Builder, full: Node) -> Node:
    """Reduce-scatter and wait."""
    result = b.call(c10d.reduce_scatter_tensor.default, full, "sum", b.world_size, GROUP)
    return b.call(c10d.wait_tensor.default, result)


def scattered_by_columns(b: Builder, full: Node) -> Node:
    return scattered(b, chunks(b, full, full.meta["val"].shape[1] // b.world_size, 1, 0))


def inputs(b: Builder, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Node]:
    return [b.placeholder(shape, dtype) for shape in shapes]


def chunks(b: Builder, x: Node, size: int, dim: int, into: int) -> Node:
    """`cat(x.split(size, dim), into)`."""
    return b.call(aten.cat.default, b.items(b.call(aten.split.Tensor, x, size, dim)), into)


def in_region(b: Builder, inner: Graph, result: torch.Tensor, *operands: Node) -> Node:
    """The result of a subgraph, as `torch.compiler.nested_compile_region` makes one."""
    holder = torch.nn.Module()
    holder.region = torch.fx.GraphModule({}, inner)
    b.graph.owning_module = holder  # type: ignore[assignment]
    call = b.graph.get_attr("region"), "region", *operands
    (node,) = b.items(b.call_like((result,), torch.ops.higher_order.invoke_subgraph, *call))
    return node


def cast(b: Builder, x: Node, dtype: torch.dtype) -> Node:
    return b.call(torch.ops.prims.convert_element_type.default, x, dtype)


def routed(b: Builder, shape: tuple[int, ...] = (8, 8), dtype: torch.dtype = torch.float64) -> Node:
    """What is computed of an input without a matmul, row by row."""
    return b.call(aten.relu.default, b.placeholder(shape, dtype))


def unit(b: Builder, value: float = 1.0) -> Node:
    return b.call(aten.full.default, [], value, dtype=torch.float32)


def fp8_product(b: Builder, scale: Node, bias: Node | None = None, rows: int = 8, b_scale: Node | None = None) -> Node:
    """`_scaled_mm` with one scale for both operands, or two, and slow accumulation: its argument is left out."""
    x, w = b.placeholder((rows, 32), FP8), b.placeholder((32, 16), FP8, strides=(1, 32))
    return b.call(aten._scaled_mm.default, x, w, scale, b_scale or scale, bias, None, torch.bfloat16)


def factor(b: Builder, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Node:
    return b.placeholder(shape, dtype, "scale")


def times(b: Builder, *nodes: Node) -> Node:
    """The product of all, from the left."""
    first, *others = nodes
    for other in others:
        first = b.call(aten.mul.Tensor, first, other)
    return first


def rounded(b: Builder, x: Node, dtype: torch.dtype = torch.bfloat16) -> Node:
    return b.call(torch.ops.prims.convert_element_type.default, x, dtype)


def all_reduced(b: Builder, full: Node, reduce_op: str = "sum", group: str = GROUP) -> Node:
    """All-reduce and wait."""
    return b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, full, reduce_op, group))


def product_of(b: Builder, rows: int = 6) -> Node:
    return b.call(aten.mm.default, *inputs(b, (rows, 6), (6, 8)))


def attacked(attack: Attack, shape_env: ShapeEnv | None = None) -> Builder:
    """A finished graph."""
    builder = Builder(operator.itemgetter(0), 2, shape_env)
    builder.graph.output(tuple(attack(builder)))
    return builder


def rewrite(graph: Graph) -> tuple[Graph, Report]:
    """A rewritten copy, with the same names and fake values."""
    rewritten = copied(graph)
    return rewritten, run_pass(rewritten)


def values(builder: Builder) -> list[list[torch.Tensor]]:
    """Placeholder values for every rank, the same at every call."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(builder.world_size)]
    return [[value.make(generator) for value in builder.inputs] for generator in generators]
