"""Graphs that once were rewritten wrongly, crashed the pass, or were refused without need.

One function a graph: it builds the graph and returns its outputs. Tables say what becomes of each collective, in graph
order (`F` is FUSED, else the code), and every graph must compute the same before and after.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attack_parts import (
    FP8,
    GROUP,
    Attack,
    aten,
    attacked,
    c10d,
    factor,
    gathered,
    in_region,
    inputs,
    rewrite,
    scattered,
    unit,
    values,
)
from attacks_on_factors import FACTORS
from attacks_on_padding import PADDING
from attacks_on_scales import (
    SCALES,
    divided,
    of_rows,
    quantized_rows_and_a_view_of_them_saved,
    reduced_over,
    rowwise,
    scaled_by,
    scaled_product,
)
from attacks_on_sums import (
    SUMS,
    bias_as_long_as_there_are_rows,
    converted_and_added_at_every_level,
    converted_scaled_product,
    gathered_added_to_its_product,
    residual_added_by_addmm,
    residual_and_converted,
    sum_converted,
    terms_in_views_of_their_own,
)
from attacks_on_tensors import (
    ALL_TO_ALLS,
    TENSORS,
    base_of_operand_mutated,
    kernel_that_mutates,
    scatter_feeds_gather,
)
from lockstep import differences, evaluate
from passes import outcomes, run_pass
from programs import Builder
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from asynctp_passes.torch_private import process_groups

# --- all tables -------------------------------------------------------------------------------------------------
GRAPHS = TENSORS | SCALES | SUMS | FACTORS | PADDING


@pytest.mark.parametrize("name", GRAPHS)
def test_outcome_and_results(name: str) -> None:
    attack, expected = GRAPHS[name]
    builder = attacked(attack)
    rewritten, report = rewrite(builder.graph)
    assert outcomes(report) == expected
    results = [evaluate(graph, values(builder)) for graph in (builder.graph, rewritten)]
    assert differences(*results) == []


@pytest.mark.parametrize("rank", [0, None])
@pytest.mark.parametrize("name", ALL_TO_ALLS)
def test_what_looks_like_an_all_to_all(name: str, rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is fused. A rank that does not know its number cannot tell its own piece."""
    monkeypatch.setattr(process_groups, "rank_in_group", lambda group: rank)
    attack, expected = ALL_TO_ALLS[name]
    builder = attacked(attack)
    rewritten, report = rewrite(builder.graph)
    assert outcomes(report) == (expected if rank == 0 or expected != ["ATP015"] else ["ATP103"])
    assert str(rewritten) == str(builder.graph)


@pytest.mark.parametrize("attack", [sum_converted, converted_and_added_at_every_level, residual_and_converted])
def test_what_is_rounded_before_it_is_converted_is_not_rounded(attack: Attack) -> None:
    """A sum in bf16 that is converted then: the op adds what is converted, and comes closer to the exact sum."""
    builder = attacked(attack)
    rewritten, report = rewrite(builder.graph)
    assert outcomes(report) == ["F"]
    given = values(builder)
    before, after = (evaluate(graph, given) for graph in (builder.graph, rewritten))
    exact = evaluate(builder.graph, [[value.double() for value in own] for own in given])
    assert differences(before, after, tolerance=1e-2) == []
    for (theirs,), (ours,), (truth,) in zip(before, after, exact, strict=True):
        assert (ours - truth).norm() < (theirs - truth).norm()


def test_scales_behind_products_that_are_converted_then() -> None:
    """fp8 products that are scaled behind, rounded and converted: rounded once here, and twice in the program."""
    builder = attacked(converted_scaled_product(2))
    rewritten, report = rewrite(builder.graph)
    assert outcomes(report) == ["F"]
    results = [evaluate(graph, values(builder)) for graph in (builder.graph, rewritten)]
    assert differences(*results, tolerance=1e-2) == []


def test_what_is_added_to_its_own_product_is_gathered_once() -> None:
    rewritten, _ = rewrite(attacked(gathered_added_to_its_product).graph)
    assert not [node for node in rewritten.nodes if node.target is c10d.all_gather_into_tensor.default]


def test_higher_order_op_that_mutates_is_a_barrier() -> None:
    _, report = rewrite(attacked(kernel_that_mutates).graph)
    assert outcomes(report) == ["ATP204"]


@pytest.mark.parametrize("before", [True, False])
def test_what_process_groups_write_is_a_barrier(before: bool) -> None:
    """Their ops' schemas do not say so: a weight is broadcast between the gather and its product, or a scale before."""
    b = Builder(operator.itemgetter(0), 2)
    number, w = unit(b), b.placeholder((32, 16), FP8, strides=(1, 32))
    written = number if before else w
    (x,) = inputs(b, (4, 32), dtype=torch.float32)
    whole = None if before else gathered(b, x)
    b.call_like(None, torch.ops.c10d.broadcast_.default, [written], GROUP, 0, 0)
    whole = whole or gathered(b, x)
    rows = b.call(torch.ops.prims.convert_element_type.default, b.call(aten.mul.Tensor, whole, number), FP8)
    b.graph.output((b.call(aten._scaled_mm.default, rows, w, *[factor(b, ())] * 2, None, None, torch.bfloat16),))
    _, report = rewrite(b.graph)
    assert sorted(outcomes(report)) == ["ATP006", "ATP208" if before else "ATP204"]


# --- random numbers: all draws take those of one stream, in order ---------------------------------------------
Draw = Callable[..., Node]


def drawn(b: Builder, *shape: int) -> Node:
    return b.call(aten.rand.default, list(shape), dtype=torch.float64)


def drawn_and_saved(b: Builder, *shape: int) -> Node:
    """As recomputation has it: beside the state of the generator before."""
    saving = torch.ops.higher_order.run_and_save_rng_state
    return b.items(b.call(saving, aten.rand.default, list(shape), dtype=torch.float64, device="cpu"))[1]


def drawn_in_a_region(b: Builder, *shape: int) -> Node:
    inner = Graph()
    inner.output((inner.call_function(aten.rand.default, (list(shape),), {"dtype": torch.float64}),))
    with b.mode:
        return in_region(b, inner, torch.empty(shape, dtype=torch.float64))


def drawn_like_the_gathered(b: Builder, draw: Draw) -> list[Node]:
    """The fused op returns the gathered tensor, behind what is drawn in between."""
    x, w = inputs(b, (4, 6), (6, 8))
    whole = gathered(b, x)
    first, second = b.call(aten.rand_like.default, whole), draw(b, 8)
    return [first, second, b.call(aten.mm.default, whole, w)]


def drawn_between_two_products(b: Builder, draw: Draw) -> list[Node]:
    """One op of both would need what is drawn after what it makes."""
    x, w = inputs(b, (4, 6), (6, 8))
    whole = gathered(b, x)
    product = b.call(aten.mm.default, whole, w)
    first, second = b.call(aten.rand_like.default, product), draw(b, 6, 8)
    return [first, product, b.call(aten.mm.default, whole, second)]


def drawn_behind_a_gather_that_can_wait(b: Builder, draw: Draw) -> list[Node]:
    """Beside a product that comes after another draw."""
    x, y, w, v = inputs(b, (8, 6), (4, 8), (6, 8), (8, 6))
    whole = gathered(b, y)
    first, second = b.call(aten.rand_like.default, b.call(aten.sin.default, whole)), draw(b, 8)
    fused = b.call(aten.mm.default, gathered(b, b.call(aten.mm.default, x, w)), v)
    return [first, second, fused, b.call(aten.mm.default, b.call(aten.t.default, x), whole)]


@pytest.mark.parametrize("draw", [drawn, drawn_and_saved, drawn_in_a_region])
@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (drawn_like_the_gathered, ["F"]),
        (drawn_between_two_products, ["ATP203"]),
        (drawn_behind_a_gather_that_can_wait, ["ATP109", "F"]),
    ],
)
def test_random_numbers_are_drawn_in_order(
    attack: Callable[[Builder, Draw], list[Node]], draw: Draw, expected: list[str]
) -> None:
    builder = attacked(lambda b: attack(b, draw))
    rewritten, report = rewrite(builder.graph)
    results = []
    for graph in (builder.graph, rewritten):
        torch.manual_seed(0)
        results.append(evaluate(graph, values(builder)))
    assert differences(*results) == []
    assert outcomes(report) == expected


# --- graphs without values -------------------------------------------------------------------------------------
def node_names(attack: Attack) -> list[str]:
    return [node.name for node in attacked(attack).graph.nodes if node.op != "output"]


def rowwise_with_views(b: Builder) -> list[Node]:
    (product,) = rowwise(b, [2, 0, 1, 3], [2, 0, 1, 3])
    return [product, scattered(b, product)]


@pytest.mark.parametrize(
    "attack",
    [
        rowwise_with_views,
        base_of_operand_mutated,
        scatter_feeds_gather,
        quantized_rows_and_a_view_of_them_saved,
        terms_in_views_of_their_own,
        bias_as_long_as_there_are_rows,
        residual_added_by_addmm,
        scaled_by((8, 1), (1, 16), outer=True),
    ],
)
def test_a_node_without_value_is_no_crash(attack: Attack) -> None:
    for name in node_names(attack):
        graph = attacked(attack).graph
        next(node for node in graph.nodes if node.name == name).meta.pop("val")
        rewritten, report = rewrite(graph)
        assert report.remarks
        rewritten.lint()


def test_real_tensors_and_mixed_fake_modes_are_refused() -> None:
    for every in (1, 2):
        graph, other = attacked(scatter_feeds_gather).graph, Builder(operator.itemgetter(0), 2).mode
        for index, node in enumerate(graph.nodes):
            value = node.meta.get("val")
            if value is not None and index % every == 0:
                real = torch.zeros(value.shape, dtype=value.dtype)
                node.meta["val"] = real if every == 1 else other.from_tensor(real)
        rewritten, report = rewrite(graph)
        assert outcomes(report) == ["ATP207", "ATP207"]
        assert str(rewritten) == str(graph)


def gathered_rows_and_scales(b: Builder) -> list[Node]:
    x, scales = b.placeholder((4, 32), FP8), b.placeholder((4, 1), torch.float32, "scale")
    w, one = b.placeholder((32, 16), FP8, strides=(1, 32)), b.placeholder((1, 16), torch.float32, "scale")
    rows = [gathered(b, each) for each in (x, scales)]
    return [b.call(aten._scaled_mm.default, rows[0], w, rows[1], one, None, None, torch.bfloat16)]


def quantized_by_the_largest_of_all_ranks(b: Builder) -> list[Node]:
    """The rows' scales are needed elsewhere too."""
    largest, (x,) = reduced_over(b, GROUP), inputs(b, (4, 32), dtype=torch.float32)
    whole = gathered(b, x)
    scale = of_rows(b, whole)
    return [scaled_product(b, divided(b, divided(b, whole, largest), scale), scale), b.call(aten.neg.default, scale)]


@pytest.mark.parametrize(
    "attack",
    [
        scatter_feeds_gather,
        residual_added_by_addmm,
        gathered_rows_and_scales,
        quantized_by_the_largest_of_all_ranks,
        quantized_rows_and_a_view_of_them_saved,
    ],
)
def test_a_value_of_another_fake_mode_is_no_crash(attack: Attack) -> None:
    for name in node_names(attack):
        graph, other = attacked(attack).graph, Builder(operator.itemgetter(0), 2).mode
        node = next(node for node in graph.nodes if node.name == name)
        value = node.meta["val"]
        node.meta["val"] = other.from_tensor(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype))
        rewritten, report = rewrite(graph)
        assert report.remarks
        rewritten.lint()


# --- symbolic sizes ------------------------------------------------------------------------------------------
def symbolic(b: Builder) -> tuple[Node, Any]:
    """A product of a gathered tensor with a symbolic number of rows, and the gathered tensor."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    assert b.shape_env is not None
    source = ConstantSource("rows")
    symbol = b.shape_env.create_symbol(4, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    rows = b.shape_env.create_symintnode(symbol, hint=4, source=source)
    x, w = b.placeholder((rows, 6), torch.float64), b.placeholder((6, 8), torch.float64)  # type: ignore[arg-type]
    full = gathered(b, x)
    return b.call(aten.mm.default, full, w), full


def test_sizes_of_the_gathered_tensor_do_not_keep_it_alive() -> None:
    for reader, arguments in ((aten.sym_size.int, [0]), (aten.sym_numel.default, []), (aten.sym_stride.int, [0])):

        def attack(b: Builder, reader: Any = reader, arguments: list[int] = arguments) -> list[Node]:
            product, full = symbolic(b)
            size = b.call(reader, full, *arguments)
            filled = b.graph.call_function(aten.full.default, (), {"size": [size], "fill_value": 1.0})
            filled.meta["val"] = None
            return [product, size, filled]

        builder = attacked(attack, ShapeEnv())
        assert builder.shape_env is not None
        guards = len(builder.shape_env.guards)
        rewritten, report = rewrite(builder.graph)
        assert outcomes(report) == ["F"]
        assert len(builder.shape_env.guards) == guards
        assert not rewritten.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)


def test_size_of_a_side_view_that_no_input_carries() -> None:
    def attack(b: Builder) -> list[Node]:
        product, full = symbolic(b)
        assert b.shape_env is not None
        unbacked = b.shape_env.create_unbacked_symint()
        piece = b.graph.call_function(aten.slice.Tensor, (full, 0, 0, 3))
        with b.mode:
            piece.meta["val"] = torch.empty(unbacked, 6, dtype=torch.float64)
        size = b.graph.call_function(aten.sym_size.int, (piece, 0))
        size.meta["val"] = unbacked
        return [product, size]

    graph = attacked(attack, ShapeEnv()).graph
    rewritten, report = rewrite(graph)
    assert outcomes(report) == ["ATP108"]
    assert str(rewritten) == str(graph)


def test_sizes_of_the_operands_rows_that_no_input_carries() -> None:
    """The shard's rows are `u0 * u1`, and the ranks come between the two."""

    def attack(b: Builder) -> list[Node]:
        assert b.shape_env is not None
        outer, inner = b.shape_env.create_unbacked_symint(), b.shape_env.create_unbacked_symint()
        x, w = b.placeholder((outer * inner, 6), torch.float64), b.placeholder((6, 8), torch.float64)
        pieces = b.call(aten.view.default, gathered(b, x), [b.world_size, outer, inner, 6])
        swapped = b.call(aten.permute.default, pieces, [1, 0, 2, 3])
        rows = b.call(aten.reshape.default, swapped, [outer * inner * b.world_size, 6])
        return [b.call(aten.mm.default, rows, w)]

    graph = attacked(attack, ShapeEnv()).graph
    rewritten, report = rewrite(graph)
    assert outcomes(report) == ["ATP108"]
    assert "no input carries the size" in report.remarks[0].message
    assert str(rewritten) == str(graph)


def test_rows_that_are_known_at_runtime_only_and_lie_in_another_order() -> None:
    """Whether such a tensor is contiguous depends on how many there are, which nobody may ask."""

    def attack(b: Builder) -> list[Node]:
        assert b.shape_env is not None
        rows = b.shape_env.create_unbacked_symint()
        product = b.call(aten.mm.default, b.placeholder((rows, 6), torch.float64), b.placeholder((6, 8), torch.float64))
        turned = b.call(aten.permute.default, b.call(aten.view.default, product, [rows, 4, 2]), [1, 0, 2])
        reduced = b.call(c10d.all_reduce.default, turned, "sum", GROUP)
        return [b.call(c10d.wait_tensor.default, reduced)]

    _, report = rewrite(attacked(attack, ShapeEnv()).graph)
    assert outcomes(report) == ["ATP211"], "its columns move among its rows"


# --- time ------------------------------------------------------------------------------------------------------
def test_large_graphs_take_time_in_proportion() -> None:
    """250 collectives in a graph of ten thousand nodes: a search from each over all the graph would take minutes."""

    def attack(b: Builder) -> list[Node]:
        x, w = inputs(b, (4, 8), (8, 8))
        total = gathered(b, x)
        for _ in range(125):
            product = b.call(aten.mm.default, gathered(b, x), w)
            total = b.call(aten.add.Tensor, total, gathered(b, scattered(b, product)))
        for _ in range(9_000):
            total = b.call(aten.relu.default, total)
        return [total]

    graph = attacked(attack).graph
    start = time.perf_counter()
    run_pass(graph)
    assert time.perf_counter() - start < 10
