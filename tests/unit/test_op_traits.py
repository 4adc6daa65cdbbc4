"""Every row of `op_traits` means the same in every stage, and no other module knows an op of aten by its name."""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graph_builder import GraphBuilder, aten
from lockstep import evaluate
from passes import outcomes, run_pass
from profiles import thorough
from torch.fx import Graph, Node

import asynctp_passes
from asynctp_passes import Config
from asynctp_passes.ir.op_traits import TRAITS, View
from asynctp_passes.layout.propagation import RULES

PASSES = Path(asynctp_passes.__file__).parent
prims = torch.ops.prims

NAMERS = {"ir/op_traits", "ir/registry"}
"""Modules that list ops by name."""
_REWRITING = ("builder", "emit_alone", "emit_gather", "emit_reduction")
WRITERS = {
    "torch_private/inductor_order",
    "torch_private/torch_ops",
    "ops/reference",
    "ops/__init__",
    "ops/collectives",
    *(f"rewriting/{name}" for name in _REWRITING),
}
"""Modules that write calls of ops, be it into a graph."""
_OP = re.compile(r"(aten|prims)\.\w+(\.\w+)?")


def test_no_other_module_names_an_op() -> None:
    """Neither as a string, nor as `torch.ops.aten.mm`. Tools are programs of their own."""
    for path in sorted(PASSES.rglob("*.py")):
        module = path.relative_to(PASSES).with_suffix("").as_posix()
        if module.startswith("tools/") or module in NAMERS:
            continue
        tree = ast.parse(path.read_text("utf-8"))
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        named = [text for text in strings if isinstance(text, str) and _OP.fullmatch(text)]
        assert not named, f"{module} names {named}: ask op_traits"
        attributes = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        called = [text for text in attributes if re.match(r"(torch\.ops\.|_)?(aten|prims)\.", text)]
        assert module in WRITERS or not called, f"{module} names {called}: ask op_traits"


def test_every_view_has_a_rule() -> None:
    assert RULES.keys() == set(View)
    assert {row.view for row in TRAITS.values()} >= set(View)


@pytest.mark.parametrize("name", [name for name in TRAITS if "." in name])
def test_rows_are_of_ops(name: str) -> None:
    namespace, op, overload = name.split(".")
    if name == "_c10d_functional.wait_tensors.default" and not hasattr(torch.ops._c10d_functional, op):
        pytest.skip("torch has no wait for lists before 2.15")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    row, schema = TRAITS[name], found._schema
    assert not schema.is_mutable
    if isinstance(row.constant, str):
        assert row.constant in {argument.name for argument in schema.arguments}
    if row.multiplies or row.sign:
        assert {"self", "other"} <= {argument.name for argument in schema.arguments}
    if row.copies and not row.casts:
        views = [result for result in schema.returns if result.alias_info is not None]
        assert not views or name == "aten.contiguous.default", "its result may lie in its argument's memory"


# --- each row in each form ---------------------------------------------------------------------------------------
def shape(x: Node) -> tuple[int, int]:
    rows, columns = x.meta["val"].shape
    return rows, columns


def halves(b: GraphBuilder, x: Node, op: Callable[..., object], *args: object, take: int = 2) -> list[Node]:
    pieces = b.call(op, x, *args)
    return [b.call(operator.getitem, pieces, index) for index in range(take)]


Sample = Callable[[GraphBuilder, Node], Node]


def from_halves(op: Callable[..., object], by: Callable[[int], object]) -> Sample:
    """Cut into two by `op`, and join the two."""
    return lambda b, x: b.cat(halves(b, x, op, by(shape(x)[0] // 2)))


def there_and_back(there: Callable[[GraphBuilder, Node], Node]) -> Sample:
    return lambda b, x: b.call(aten.view.default, there(b, x), list(shape(x)))


def cut(b: GraphBuilder, x: Node) -> Node:
    rows, columns = shape(x)
    return b.call(aten.view.default, x, [2, rows // 2, columns])


def twice(op: Callable[..., object], *args: object) -> Sample:
    return lambda b, x: b.call(op, b.call(op, x, *args), *args)


def plainly(op: Callable[..., object], *args: object) -> Sample:
    return lambda b, x: b.call(op, x, *args)


def same_sizes(op: Callable[..., object]) -> Sample:
    return lambda b, x: b.call(op, x, list(shape(x)))


def reshaped(op: Callable[..., object]) -> Sample:
    return lambda b, x: b.call(op, cut(b, x), list(shape(x)))


def to_own_dtype(op: Callable[..., object]) -> Sample:
    return lambda b, x: b.call(op, x, x.meta["val"].dtype)


def bits_and_back(b: GraphBuilder, x: Node) -> Node:
    dtype = x.meta["val"].dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return b.call(aten.view.dtype, b.call(aten.view.dtype, x, bits), dtype)


def picked(op: Callable[..., object]) -> Sample:
    def sample(b: GraphBuilder, x: Node) -> Node:
        rows = b.call(aten.arange.default, shape(x)[0])
        return b.call(op, x, [rows]) if op in (aten.index.Tensor, aten._unsafe_index.Tensor) else b.call(op, x, 0, rows)

    return sample


def numbers_of_rows(b: GraphBuilder, x: Node) -> Node:
    rows, columns = shape(x)
    return b.call(aten.expand.default, b.reshape(b.call(aten.arange.default, rows), [rows, 1]), [rows, columns])


def alias(b: GraphBuilder, x: Node) -> Node:
    rows, columns = shape(x)
    return b.call(aten._reshape_alias.default, cut(b, x), [rows, columns], [columns, 1])


def strided(b: GraphBuilder, x: Node) -> Node:
    rows, columns = shape(x)
    return b.call(aten.as_strided.default, x, [rows, columns], [columns, 1])


def complex_pairs(b: GraphBuilder, x: Node) -> Node:
    rows, columns = shape(x)
    pairs = b.call(aten.view_as_complex.default, b.call(aten.view.default, x, [rows, columns // 2, 2]))
    return b.call(aten.view.default, b.call(aten.view_as_real.default, pairs), [rows, columns])


SAMPLES: dict[str, Sample] = {
    "aten.alias.default": plainly(aten.alias.default),
    "aten.detach.default": plainly(aten.detach.default),
    "aten.clone.default": plainly(aten.clone.default),
    "aten.contiguous.default": plainly(aten.contiguous.default),
    "aten.lift_fresh_copy.default": plainly(aten.lift_fresh_copy.default),
    "aten.view.default": reshaped(aten.view.default),
    "aten._unsafe_view.default": reshaped(aten._unsafe_view.default),
    "aten._reshape_alias.default": alias,
    "aten.view_copy.default": reshaped(aten.view_copy.default),
    "aten.reshape.default": reshaped(aten.reshape.default),
    "aten.flatten.using_ints": lambda b, x: b.call(aten.flatten.using_ints, cut(b, x), 0, 1),
    "aten.unflatten.int": there_and_back(lambda b, x: b.call(aten.unflatten.int, x, 0, [2, shape(x)[0] // 2])),
    "aten.unsqueeze.default": there_and_back(lambda b, x: b.call(aten.unsqueeze.default, x, 0)),
    "aten.squeeze.default": lambda b, x: b.call(aten.squeeze.default, b.call(aten.view.default, x, [1, *shape(x)])),
    "aten.squeeze.dim": lambda b, x: b.call(aten.squeeze.dim, b.call(aten.view.default, x, [1, *shape(x)]), 0),
    "aten.squeeze.dims": lambda b, x: b.call(aten.squeeze.dims, b.call(aten.view.default, x, [1, *shape(x)]), [0]),
    "aten.permute.default": twice(aten.permute.default, [1, 0]),
    "aten.transpose.int": twice(aten.transpose.int, 0, 1),
    "aten.t.default": twice(aten.t.default),
    "aten.expand.default": same_sizes(aten.expand.default),
    "aten.slice.Tensor": lambda b, x: b.call(aten.slice.Tensor, x, 0, 0, shape(x)[0]),
    "aten.narrow.default": lambda b, x: b.call(aten.narrow.default, x, 0, 0, shape(x)[0]),
    "aten.select.int": lambda b, x: b.call(aten.select.int, b.call(aten.view.default, x, [1, *shape(x)]), 0, 0),
    "aten.split.Tensor": from_halves(aten.split.Tensor, lambda rows: rows),
    "aten.split_with_sizes.default": from_halves(aten.split_with_sizes.default, lambda rows: [rows, rows]),
    "aten.chunk.default": from_halves(aten.chunk.default, lambda rows: 2),
    "aten.unbind.int": lambda b, x: b.cat(halves(b, cut(b, x), aten.unbind.int)),
    "getitem": from_halves(aten.split.Tensor, lambda rows: rows),
    "aten.cat.default": lambda b, x: b.cat([x]),
    "aten.stack.default": there_and_back(lambda b, x: b.call(aten.stack.default, [x])),
    "aten.view.dtype": bits_and_back,
    "prims.convert_element_type.default": to_own_dtype(prims.convert_element_type.default),
    "aten._to_copy.default": lambda b, x: b.call(aten._to_copy.default, x, dtype=x.meta["val"].dtype),
    "aten.to.dtype": to_own_dtype(aten.to.dtype),
    "aten.flip.default": twice(aten.flip.default, [0]),
    "prims.rev.default": twice(prims.rev.default, [0]),
    "aten.roll.default": plainly(aten.roll.default, [0], [0]),
    "aten.repeat.default": plainly(aten.repeat.default, [1, 1]),
    "aten.index_select.default": picked(aten.index_select.default),
    "aten.index.Tensor": picked(aten.index.Tensor),
    "aten.constant_pad_nd.default": plainly(aten.constant_pad_nd.default, [0, 0]),
    "aten._unsafe_index.Tensor": picked(aten._unsafe_index.Tensor),
    "aten.embedding.default": lambda b, x: b.call(aten.embedding.default, x, b.call(aten.arange.default, shape(x)[0])),
    "aten.gather.default": lambda b, x: b.call(aten.gather.default, x, 0, numbers_of_rows(b, x)),
    "aten.take_along_dim.default": lambda b, x: b.call(aten.take_along_dim.default, x, numbers_of_rows(b, x), 0),
    "aten.copy.default": lambda b, x: b.call(aten.copy.default, b.mul(x, x), x),
    "aten.slice_scatter.default": lambda b, x: b.call(aten.slice_scatter.default, x, x, 0, 0, shape(x)[0]),
    "aten.select_scatter.default": lambda b, x: b.call(
        aten.select_scatter.default, x, b.call(aten.select.int, x, 0, 0), 0, 0
    ),
    "aten.split_with_sizes_copy.default": from_halves(aten.split_with_sizes_copy.default, lambda rows: [rows, rows]),
    "aten.as_strided.default": strided,
    "aten.view_as_complex.default": complex_pairs,
    "aten.view_as_real.default": complex_pairs,
}
"""For each view, a use of it that leaves a matrix as it was, in values and sizes."""

AWAITED = {"_c10d_functional.wait_tensor.default", "_c10d_functional.wait_tensors.default"}
"""Waits are in each graph anyway."""
OF_16_BITS = {"aten.view.dtype": torch.bfloat16}
OF_FP32 = {"aten.view_as_complex.default": torch.float32, "aten.view_as_real.default": torch.float32}


def gathered(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """Between an all-gather and its matmul."""
    return b.returns(b.mm(sample(b, b.gather(x)), w))


def hoisted(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """Of a tensor that is computed from the gathered one."""
    return b.returns(b.mm(sample(b, b.relu(b.gather(x))), w))


def uniform(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """Of the scales of a quantization, which are the same on all ranks since they were reduced over them."""
    scales = sample(b, b.all_reduce(b.input("amax", [8, 4], x.meta["val"].dtype), "max"))
    groups = b.mul(b.call(aten.view.default, b.gather(x), [32, 8, 4]), scales)
    quantized = b.call(aten.view.default, b.call(aten._to_copy.default, groups, dtype=torch.float8_e4m3fn), [32, 32])
    return b.returns(b.scaled_mm(quantized, b.input("w8", [32, 16], torch.float8_e4m3fn), b.one(), b.one()))


def scattered(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """Between a matmul and its reduce-scatter."""
    return b.returns(b.scatter(sample(b, b.mm(x, w))))


def reduced(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """Between a matmul and its all-reduce."""
    return b.returns(b.all_reduce(sample(b, b.mm(x, w))))


def summed(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """Between one of two all-reduces and the sum of both."""
    first, second = (b.all_reduce(b.mm(x, w)) for _ in range(2))
    return b.returns(b.add(sample(b, first), second))


# --- on other tensors of a chain --------------------------------------------------------------------------------
FP8 = torch.float8_e4m3fn


def before_gather(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On the shard."""
    return b.returns(b.mm(b.gather(sample(b, x)), w))


def right_of_gather(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On the right operand of a gather's matmul."""
    return b.returns(b.mm(b.gather(x), sample(b, w)))


def kept(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On the gathered tensor, for another user than the matmul."""
    whole = b.gather(x)
    return b.returns(b.mm(whole, w), b.relu(sample(b, whole)))


def product_of_gather(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On a gather's matmul."""
    return b.returns(sample(b, b.mm(b.gather(x), w)))


def weight_gradient(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On the gathered tensor, before another product contracts its rows."""
    whole, dy = b.gather(x), b.input("dy", [32, 16], x.meta["val"].dtype)
    return b.returns(b.mm(whole, w), b.mm(b.permute(sample(b, whole), [1, 0]), dy))


def one_for_all(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On one weight, before it is expanded for a batch."""
    batch = b.call(aten.view.default, b.gather(x), [4, 8, 32])
    weights = b.call(aten.expand.default, sample(b, w), [4, 32, 16])
    return b.returns(b.call(aten.bmm.default, batch, weights))


def left_of_scatter(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    return b.returns(b.scatter(b.mm(sample(b, x), w)))


def right_of_scatter(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    return b.returns(b.scatter(b.mm(x, sample(b, w))))


def of_bias(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On a bias, seen as a matrix, before a reduce-scatter and after a gather."""
    halves = b.input("bias", [2, 8], x.meta["val"].dtype)
    row = b.call(aten.view.default, sample(b, halves), [16])
    scattered = b.scatter(b.call(aten.addmm.default, row, x, w))
    return b.returns(scattered, b.call(aten.addmm.default, row, b.gather(x), w))


def residual(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On what is added to a matmul that is scattered then, or all-reduced, by a node of its own or by `addmm`."""
    first, second, third = (sample(b, b.input(name, [8, 16], x.meta["val"].dtype)) for name in "rst")
    scattered = b.scatter(b.add(b.mm(x, w), first))
    reduced = b.all_reduce(b.add(second, b.mm(x, w)))
    return b.returns(scattered, reduced, b.scatter(b.call(aten.addmm.default, third, x, w)))


def sum_of_products(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On one of two products that are added, and then on their sum."""
    total = b.add(sample(b, b.mm(x, w)), sample(b, b.mm(b.relu(x), w)))
    return b.returns(b.scatter(sample(b, total)))


def after_scatter(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    return b.returns(sample(b, b.scatter(b.mm(b.cat([x, x]), w))))


def crossing(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """Between two reduce-scatters and the sum of both, on each."""
    first, second = (b.scatter(b.mm(b.cat([x, x]), w)) for _ in range(2))
    return b.returns(b.add(sample(b, first), sample(b, second)))


def operands(b: GraphBuilder, rows: int = 8) -> tuple[Node, Node]:
    return b.input("a8", [rows, 32], FP8), b.input("w8", [32, 16], FP8)


def scales(b: GraphBuilder, name: str, sample: Sample, *shape: int) -> Node:
    """Scales, a matrix while the sample is applied."""
    count = shape[0] * shape[1]
    return b.call(aten.view.default, sample(b, b.input(name, [2, count // 2])), list(shape))


def scales_of_scatter(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On the scales of rows and of columns of a scaled matmul."""
    row, column = scales(b, "row", sample, 8, 1), scales(b, "column", sample, 1, 16)
    return b.returns(b.scatter(b.scaled_mm(*operands(b), row, column)))


def scales_of_gather(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On the scales of columns, and of all rows."""
    a8, w8 = operands(b)
    row, column = scales(b, "row", sample, 32, 1), scales(b, "column", sample, 1, 16)
    return b.returns(b.scaled_mm(b.gather(a8), w8, row, column))


def gathered_scales(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On scales that are gathered beside the data."""
    (a8, w8), column = operands(b), b.input("column", [1, 16])
    whole = b.gather(b.input("row", [8, 1]))
    rows = b.call(aten.view.default, sample(b, b.call(aten.view.default, whole, [4, 8])), [32, 1])
    return b.returns(b.scaled_mm(b.gather(a8), w8, rows, column))


def factors_after(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On the factors of rows and columns of a product, and on that."""
    row, column = scales(b, "row", sample, 8, 1), scales(b, "column", sample, 1, 16)
    product = b.scaled_mm(*operands(b), b.one(), b.one())
    scaled = b.mul(b.mul(prims_cast(b, product, torch.float32), row), column)
    return b.returns(b.scatter(prims_cast(b, scaled, torch.bfloat16)))


def passengers(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On gathered numbers of rows that scale the product of what is gathered too."""
    a8, w8 = operands(b)
    whole = b.gather(b.input("row", [8, 1]))
    rows = b.call(aten.view.default, sample(b, b.call(aten.view.default, whole, [4, 8])), [32, 1])
    product = b.scaled_mm(b.gather(a8), w8, b.one(), b.one())
    return b.returns(b.mul(prims_cast(b, product, torch.float32), rows))


def quantized_rows(b: GraphBuilder, x: Node, w: Node, sample: Sample) -> Graph:
    """On what is quantized, on its quotient and on its scales, after the gather."""
    whole = sample(b, b.gather(x))
    largest = b.call(aten.amax.default, b.call(aten.abs.default, whole), [-1], True)
    scale = prims_cast(b, largest, torch.float32)
    square = b.call(aten.view.default, sample(b, b.call(aten.view.default, scale, [4, 8])), [32, 1])
    quotient = b.call(aten.div.Tensor, prims_cast(b, whole, torch.float32), square)
    fp8 = b.call(aten._to_copy.default, sample(b, quotient), dtype=FP8)
    return b.returns(b.scaled_mm(fp8, b.input("w8", [32, 16], FP8), square, b.input("column", [1, 16])))


def prims_cast(b: GraphBuilder, x: Node, dtype: torch.dtype) -> Node:
    return b.call(prims.convert_element_type.default, x, dtype)


ON_THE_WAY = (gathered, hoisted, uniform, scattered, reduced, summed)
ON_OTHERS = (
    before_gather,
    right_of_gather,
    kept,
    weight_gradient,
    product_of_gather,
    one_for_all,
    left_of_scatter,
    right_of_scatter,
    of_bias,
    residual,
    sum_of_products,
    after_scatter,
    crossing,
    scales_of_scatter,
    scales_of_gather,
    gathered_scales,
    factors_after,
    passengers,
    quantized_rows,
)
FORMS = ON_THE_WAY + ON_OTHERS
PAIRS = list(itertools.product(SAMPLES, FORMS))
FIRST_OF_KIND = {TRAITS[name].view: name for name in reversed([name for name in SAMPLES if name in TRAITS])}


def _is_shown(name: str, form: Callable[..., Graph]) -> bool:
    """After a gather, before a scatter and before a sum every row is tried; elsewhere the first of each kind."""
    return form in (gathered, scattered, reduced) or name in FIRST_OF_KIND.values()


STAY = (passengers,)
"""Forms in which a view that moves elements stays a node of its own: samples of several nodes may be decided unlike."""


def graph_of(form: Callable[..., Graph], sample: Sample, dtype: torch.dtype) -> Graph:
    b = GraphBuilder()
    return form(b, b.input("x", [8, 32], dtype), b.input("w", [32, 16], dtype), sample)


@functools.cache
def decided_without(form: Callable[..., Graph], dtype: torch.dtype) -> list[str]:
    return decided(graph_of(form, lambda b, x: x, dtype))


@functools.cache
def decided_with(name: str, form: Callable[..., Graph], dtype: torch.dtype) -> list[str]:
    return decided(graph_of(form, SAMPLES[name], dtype))


def decided(graph: Graph) -> list[str]:
    report = asynctp_passes.run(graph, Config(strict="off"))
    return [f"{remark.kind} {remark.outcome} {remark.code}" for remark in report.remarks]


def test_every_view_has_a_sample() -> None:
    assert SAMPLES.keys() | AWAITED == {name for name, row in TRAITS.items() if row.view is not None}


@pytest.mark.parametrize(("name", "form"), [pair if _is_shown(*pair) else thorough(pair) for pair in PAIRS])
def test_views_mean_the_same_in_each_form(name: str, form: Callable[..., Graph]) -> None:
    """Whole views change nothing. Others of one kind are decided alike, whatever that is. Values stay, bit by bit."""
    dtype = OF_16_BITS.get(name, OF_FP32.get(name, torch.float32))
    graph = graph_of(form, SAMPLES[name], dtype)
    inputs = [values(graph, rank) for rank in range(4)]
    before = evaluate(graph, inputs)
    found = decided(graph)
    row = TRAITS[name]
    if not row.takes_part:
        assert found == decided_without(form, dtype)
        assert any("FUSED" in one for one in found)
    like = [other for other in SAMPLES if TRAITS[other].view is row.view]
    assert (row.takes_part and form in STAY) or found == decided_with(like[0], form, OF_FP32.get(like[0], dtype))
    for old, new in zip(before, evaluate(graph, inputs), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize(("op", "outcome"), [("alias", "F"), ("detach", "F"), ("clone", "ATP115")])
def test_a_view_of_one_weight_for_all_matrices(op: str, outcome: str) -> None:
    """In the same memory it is still one weight; a copy has one for each matrix."""
    b = GraphBuilder()
    batch = b.call(aten.view.default, b.gather(b.input("x", [8, 32])), [4, 8, 32])
    weights = b.call(aten.expand.default, b.input("w", [32, 16]), [4, 32, 16])
    graph = b.returns(b.call(aten.bmm.default, batch, b.call(getattr(aten, op).default, weights)))
    assert outcomes(run_pass(graph)) == [outcome]


def values(graph: Graph, rank: int) -> list[torch.Tensor]:
    """Small integers: sums of their products are exact in any order."""
    made = torch.Generator().manual_seed(rank)
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return [torch.randint(-2, 3, one.shape, generator=made).to(one.dtype) for one in inputs]


@pytest.mark.parametrize(
    ("trait", "has", "lacks"),
    [
        ("rearranges", "aten.t.default", "aten.expand.default"),
        ("keeps_values", "prims.convert_element_type.default", "aten.view.dtype"),
        ("is_whole_or_piece", "aten.split.Tensor", "aten.slice.Tensor"),
        ("takes_part", "aten.slice.Tensor", "aten.view.dtype"),
    ],
)
def test_traits_of_kinds_of_views(trait: str, has: str, lacks: str) -> None:
    assert (getattr(TRAITS[has], trait), getattr(TRAITS[lacks], trait)) == (True, False)
