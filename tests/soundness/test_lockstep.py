"""The lockstep evaluator is right: it agrees with real ranks, and with hand-computed collectives and fused ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import serving_ops
import torch
import torch.distributed as dist
from lockstep import differences, evaluate, op_name
from programs import Builder, Program, Wishes, seeded_program
from ranks import run_ranks
from torch import Tensor
from torch.utils._pytree import tree_map_only

SEEDS = range(120)
REAL_RANKS = 2
WISHES = Wishes(world_sizes=(REAL_RANKS,), dtypes=(torch.float32, torch.float64))

OF_SUMS = (
    "Tensor[]? a_scales=None, Tensor[]? b_scales=None, ScalarType? out_dtype=None, bool use_fast_accum=False, "
    "ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None, "
)
SIGNATURES = {
    "all_gather_matmul": "(Tensor a_shard, Tensor[] bs, Tensor?[] biases, int gather_dim, bool return_a_full, "
    "int group_size, Any group_name, Tensor? a_scale=None, Tensor[]? b_scales=None, bool gather_a_scale=False, "
    "ScalarType? out_dtype=None, bool use_fast_accum=False, Tensor? along_shard=None, bool? all_keep=None, "
    "SymInt[]? b_rows=None, int accord=0) -> Tensor[]",
    "matmul_reduce_scatter": "(Tensor[] a_parts, Tensor[] b_parts, Tensor?[] biases, str reduce_op, int scatter_dim, "
    f"int group_size, Any group_name, {OF_SUMS}SymInt? real_rows=None, int accord=0) -> Tensor",
    "matmul_all_reduce": "(Tensor[] a_parts, Tensor[] b_parts, Tensor?[] biases, str reduce_op, Any group_name, "
    f"{OF_SUMS}int accord=0) -> Tensor",
}


@pytest.mark.ranks
def test_agrees_with_real_ranks() -> None:
    """Every program that is defined on real ranks gives there what the evaluator says."""
    seeds = [seed for seed in SEEDS if _is_deterministic(seeded_program(seed, WISHES))]
    assert len(seeds) > len(SEEDS) // 2
    real = run_ranks(REAL_RANKS, run_programs, seeds)
    for index, seed in enumerate(seeds):
        program = seeded_program(seed, WISHES)
        lockstep = evaluate(program.graph, program.make_inputs(seed), program.groups)
        assert not differences(lockstep, [outs[index] for outs in real]), f"seed {seed}: {program}"


def run_programs(rank: int, world_size: int, seeds: list[int]) -> list[tuple[Tensor, ...]]:
    """Interpret the program of each seed on one real rank."""
    serving_ops.GROUPS["0"] = dist.group.WORLD
    results = []
    for seed in seeds:
        program = seeded_program(seed, WISHES)
        module = torch.fx.GraphModule(torch.nn.Module(), program.graph)
        results.append(_RealRank(module).run(*program.make_inputs(seed)[rank]))
    return results


class _RealRank(torch.fx.Interpreter):
    """Collectives get contiguous inputs: gloo on torch 2.11 takes no others."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target).startswith("_c10d_functional") and len(args) > 1:
            args = (tree_map_only(Tensor, Tensor.contiguous, args[0]), *args[1:])
        return super().call_function(target, args, kwargs)


def _is_deterministic(program: Program) -> bool:
    """Not so while a collective may still be reading or writing; nor is what gloo cannot do."""
    racy = any("mutates" in note or "unwaited" in note for note in program.notes)
    return not racy and not any(map(_is_wrong_on_gloo, program.graph.nodes))


def _is_wrong_on_gloo(node: torch.fx.Node) -> bool:
    """gloo knows no average, and moves the tensors of a list as if all had one dtype."""
    first = node.args[0] if node.args else None
    mixed = isinstance(first, list) and len({each.meta["val"].dtype for each in first}) > 1  # type: ignore[union-attr]
    return "avg" in node.args or (mixed and "coalesced" in str(node.target))


def test_averages() -> None:
    b = _builder()
    x = b.placeholder([4, 3], torch.float64)
    b.graph.output((b.call(torch.ops._c10d_functional.reduce_scatter_tensor.default, x, "avg", 2, "0"),))
    left, right = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    mean = (left + right) / 2
    assert not differences([(mean[:2],), (mean[2:],)], evaluate(b.graph, [[left], [right]]))


@pytest.mark.parametrize(("reduce_op", "expected"), [("sum", 9.0), ("avg", 4.5), ("max", 6.0), ("product", 18.0)])
def test_all_reduce(reduce_op: str, expected: float) -> None:
    b = _builder()
    x = b.placeholder([1], torch.float32)
    b.graph.output((b.call(torch.ops._c10d_functional.all_reduce.default, x, reduce_op, "0"),))
    outs = evaluate(b.graph, [[torch.tensor([3.0])], [torch.tensor([6.0])]])
    assert [out.item() for (out,) in outs] == [expected] * 2


def test_groups_are_apart() -> None:
    """On a 2 x 2 mesh, rows and columns gather different shards, in group order."""
    b = _builder()
    x = b.placeholder([1], torch.float32)
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    b.graph.output((b.call(gather, x, 2, "rows"), b.call(gather, x, 2, "columns")))
    groups = {"rows": [(0, 1), (2, 3)], "columns": [(0, 2), (1, 3)]}
    outs = evaluate(b.graph, [[torch.tensor([float(rank)])] for rank in range(4)], groups)
    assert [(rows.tolist(), columns.tolist()) for rows, columns in outs] == [
        ([0.0, 1.0], [0.0, 2.0]),
        ([0.0, 1.0], [1.0, 3.0]),
        ([2.0, 3.0], [0.0, 2.0]),
        ([2.0, 3.0], [1.0, 3.0]),
    ]


def test_wrong_group_size_is_refused() -> None:
    b = _builder()
    x = b.placeholder([1], torch.float32)
    b.graph.output((b.call(torch.ops._c10d_functional.all_gather_into_tensor.default, x, 4, "0"),))
    with pytest.raises(ValueError, match="4 ranks, the group has 2"):
        evaluate(b.graph, [[torch.zeros(1)]] * 2)


@pytest.mark.parametrize("rowwise", [False, True])
def test_scaled_mm_dequantizes(rowwise: bool) -> None:
    b = _builder()
    scale_shapes = ([5, 1], [1, 16]) if rowwise else ([], [])
    a = b.placeholder([5, 16], torch.float8_e4m3fn)
    weight = b.placeholder([16, 16], torch.float8_e4m3fn, strides=[1, 16])
    scales = [b.placeholder(shape, torch.float32, "scale") for shape in scale_shapes]
    b.graph.output((b.call(torch.ops.aten._scaled_mm.default, a, weight, *scales, None, None, torch.float32),))
    inputs = [value.make(torch.Generator().manual_seed(0)) for value in b.inputs]
    (out,) = evaluate(b.graph, [inputs])[0]
    expected = (inputs[0].double() * inputs[2]) @ (inputs[1].double() * inputs[3])
    assert not differences([[expected.float()]], [[out]])


# --- fused ops: each equals the collectives and matmuls that it stands for ---------------------------------


@pytest.fixture(scope="module", autouse=True)
def _fused_ops() -> Iterator[None]:
    """Define the fused ops' signatures where the package has not."""
    libraries = []
    for name, signature in SIGNATURES.items():
        if not hasattr(torch.ops.asynctp, name):
            libraries.append(torch.library.Library("asynctp", "FRAGMENT"))
            libraries[-1].define(name + signature)
    yield
    for library in libraries:
        library._destroy()


@pytest.mark.parametrize("gather_dim", [0, 1, 2])
def test_all_gather_matmul(gather_dim: int) -> None:
    shards = _random([2, 3, 4], 2)
    k = 8 if gather_dim == 2 else 4
    bs, biases = [_random([k, 5], 2), _random([k, 2], 2)], _random([2], 2)
    a_full = torch.cat(shards, gather_dim)
    expected = [(a_full @ bs[0][rank], a_full @ bs[1][rank] + biases[rank], a_full) for rank in range(2)]
    graph = _fused_graph("all_gather_matmul", 4, lambda a, b0, b1, bias: (a, [b0, b1], [None, bias], gather_dim, True))
    outs = evaluate(graph, [[shards[r], bs[0][r], bs[1][r], biases[r]] for r in range(2)])
    assert not differences(expected, [tuple(out) for out in outs])


@pytest.mark.parametrize("gather_scale", [False, True])
def test_all_gather_matmul_with_scales(gather_scale: bool) -> None:
    shards = [shard.to(torch.float8_e4m3fn) for shard in _random([2, 3, 16], 2)]
    bs = [b.to(torch.float8_e4m3fn) for b in _random([16, 16], 2)]
    a_scales = [scale.abs().float() for scale in _random([2, 3 if gather_scale else 6, 1], 2)]
    b_scales = [scale.abs().float() for scale in _random([1, 16], 2)]
    a_full = torch.cat([shard.double() for shard in shards], 1)
    full_scales = [torch.cat(a_scales, 1)] * 2 if gather_scale else a_scales
    expected = [[((a_full * full_scales[r]) @ (bs[r].double() * b_scales[r])).bfloat16()] for r in range(2)]
    graph = _fused_graph(
        "all_gather_matmul",
        4,
        lambda a, sa, b, sb: (
            *(a, [b], [None], 1, False),
            {"a_scale": sa, "b_scales": [sb], "gather_a_scale": gather_scale, "out_dtype": torch.bfloat16},
        ),
    )
    outs = evaluate(graph, [[shards[r], a_scales[r], bs[r], b_scales[r]] for r in range(2)])
    assert not differences(expected, [tuple(out) for out in outs])


@pytest.mark.parametrize("scatter_dim", [0, 1, 2])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_matmul_reduce_scatter(scatter_dim: int, reduce_op: str) -> None:
    a0, a1, b0, b1, bias = (
        _random([2, 4, 3], 2),
        _random([2, 4, 6], 2),
        _random([3, 2], 2),
        _random([6, 2], 2),
        _random([2], 2),
    )
    total = sum(a0[r] @ b0[r] + a1[r] @ b1[r] + bias[r] for r in range(2)) / (2 if reduce_op == "avg" else 1)
    expected = [(block.contiguous(),) for block in total.chunk(2, scatter_dim)]  # type: ignore[union-attr]
    graph = _fused_graph(
        "matmul_reduce_scatter",
        5,
        lambda a0, a1, b0, b1, bias: ([a0, a1], [b0, b1], [None, bias], reduce_op, scatter_dim),
    )
    outs = evaluate(graph, [[a0[r], a1[r], b0[r], b1[r], bias[r]] for r in range(2)])
    assert not differences(expected, [(out,) for out in outs])


def test_matmul_reduce_scatter_with_scales() -> None:
    a = [part.to(torch.float8_e4m3fn) for part in _random([4, 16], 2)]
    b = [part.to(torch.float8_e4m3fn) for part in _random([16, 16], 2)]
    sa, sb = ([scale.abs().float() for scale in _random(shape, 2)] for shape in ([4, 1], [1, 16]))
    total = sum((a[r].double() * sa[r]) @ (b[r].double() * sb[r]) for r in range(2))
    expected = [(block.bfloat16(),) for block in total.chunk(2, 0)]  # type: ignore[union-attr]
    graph = _fused_graph(
        "matmul_reduce_scatter",
        4,
        lambda a, b, sa, sb: (
            *([a], [b], [], "sum", 0),
            {"a_scales": [sa], "b_scales": [sb], "out_dtype": torch.bfloat16},
        ),
    )
    outs = evaluate(graph, [[a[r], b[r], sa[r], sb[r]] for r in range(2)])
    assert not differences(expected, [(out,) for out in outs])


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_matmul_all_reduce(reduce_op: str) -> None:
    a0, a1, b0, b1, bias = (_random(shape, 2) for shape in ([3, 5], [3, 6], [5, 2], [6, 2], [2]))
    total = sum(a0[r] @ b0[r] + a1[r] @ b1[r] + bias[r] for r in range(2)) / (2 if reduce_op == "avg" else 1)
    graph = _fused_graph(
        "matmul_all_reduce", 5, lambda a0, a1, b0, b1, bias: ([a0, a1], [b0, b1], [None, bias], reduce_op), ["0"]
    )
    outs = evaluate(graph, [[a0[r], a1[r], b0[r], b1[r], bias[r]] for r in range(2)])
    assert not differences([(total,)] * 2, [(out,) for out in outs])


def test_matmul_all_reduce_with_scales() -> None:
    a = [part.to(torch.float8_e4m3fn) for part in _random([3, 16], 2)]
    b = [part.to(torch.float8_e4m3fn) for part in _random([16, 16], 2)]
    sa, sb = ([scale.abs().float() for scale in _random(shape, 2)] for shape in ([3, 1], [1, 16]))
    total = sum((a[r].double() * sa[r]) @ (b[r].double() * sb[r]) for r in range(2))
    graph = _fused_graph(
        "matmul_all_reduce",
        4,
        lambda a, b, sa, sb: (
            *([a], [b], [None], "sum"),
            {"a_scales": [sa], "b_scales": [sb], "out_dtype": torch.bfloat16},
        ),
        ["0"],
    )
    outs = evaluate(graph, [[a[r], b[r], sa[r], sb[r]] for r in range(2)])
    assert not differences([(total.bfloat16(),)] * 2, [(out,) for out in outs])  # type: ignore[union-attr]


def test_differences_sees_values_and_layout() -> None:
    x = torch.randn(4, 3)
    assert differences([[x]], [[x + 1e-7]]) == []
    assert "differs by" in differences([[x]], [[x + 1e-2]])[0]
    assert "layout" in differences([[x]], [[x.t().contiguous().t()]])[0]
    assert "layout" in differences([[x]], [[x.double()]])[0]
    assert "0 outputs instead of 1" in differences([[x]], [[]])[0]
    assert differences([[x[:1]]], [[x[:1].as_strided((1, 3), (7, 1))]]) == []


def test_op_names() -> None:
    assert op_name(torch.ops.aten.mm.default) == "aten::mm"
    assert op_name(torch.ops.aten.mm) == "aten::mm"
    assert op_name(len) == "len"


def _builder() -> Builder:
    return Builder(lambda options: options[0], world_size=2)


def _random(shape: list[int], count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape) * 1000 + sum(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def _fused_graph(name: str, inputs: int, arguments: object, group: Sequence[Any] = (2, "0")) -> torch.fx.Graph:
    """A graph of one fused op on two ranks, which returns what the op returns.

    arguments: Of the graph's inputs those of the op, and maybe a dictionary of options. group: Its last ones.
    """
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"arg{index}") for index in range(inputs)]
    target = getattr(torch.ops.asynctp, name).default
    *given, last = arguments(*placeholders)  # type: ignore[operator]
    args, options = ((*given, *group), last) if isinstance(last, dict) else ((*given, last, *group), {})
    graph.output(graph.call_function(target, args, options))
    return graph
