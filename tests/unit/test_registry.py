"""Registering custom collectives and matmuls: what is checked, and that cached graphs know of it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graph_builder import GraphBuilder, aten
from passes import outcomes, run_pass
from ranks import imagined_ranks
from serving_ops import registered
from torch.fx import Node

import asynctp_passes
from asynctp_passes import (
    AsyncTPPass,
    Config,
    RegistryError,
    register_collective,
    register_local,
    register_matmul,
    register_rowwise,
    run,
    unregister,
)
from asynctp_passes.ir.registry import digest, promise_of, surely_communicates

_ops = torch.library.Library("registry_test", "FRAGMENT")
_ops.define("all_gather(Tensor x, int dim, int ranks, str group) -> Tensor")
_ops.define("gather_(Tensor(a!) x, int dim, int ranks, str group) -> Tensor(a!)")
_ops.define("gather_by_group(Tensor x, str group) -> Tensor")
_ops.define("gather_two(Tensor x, int ranks, str group) -> (Tensor, Tensor)")
_ops.define("reduce(Tensor x, str group) -> Tensor")
_ops.define("two(Tensor a, Tensor b) -> Tensor")
_ops.define("two.other(Tensor a, Tensor b, int c) -> Tensor")
_ops.define("rms_norm(Tensor x) -> Tensor")
_ops.define("rows(Tensor x, Tensor other) -> Tensor")
_ops.define("matmul(Tensor a, Tensor b, Tensor? bias) -> Tensor")
_ops.define("matmul_out(Tensor! out, Tensor a, Tensor b) -> ()")
_ops.define("matmul_both(Tensor! out, Tensor! work, Tensor a, Tensor b) -> ()")

ops = torch.ops.registry_test
torch.library.register_fake("registry_test::rows", lambda x, other: x.new_empty(*x.shape[:-1], 6), lib=_ops)
GATHER: dict[str, Any] = {"kind": "all_gather", "input": "x", "dim": "dim", "size": "ranks", "group": "group"}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = digest()
    yield
    for op in (ops.all_gather, ops.gather_by_group, ops.reduce, ops.matmul, ops.matmul_out):
        try:
            unregister(op)
        except RegistryError:
            continue
    assert digest() == before


# --- what is checked ---------------------------------------------------------------------------------------------
BAD_COLLECTIVES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no op": (len, GATHER, "it is not an op; give an overload such as torch.ops.vllm.all_gather.default"),
    "several overloads": (
        ops.two,
        GATHER,
        "it has several overloads; give one of registry_test.two.default, registry_test.two.other",
    ),
    "kind": (
        ops.all_gather,
        {**GATHER, "kind": "broadcast"},
        "kind='broadcast' is not one of all_gather, reduce_scatter",
    ),
    "input": (ops.all_gather, {**GATHER, "input": "y"}, "input='y' is no argument; it has x, dim, ranks, group"),
    "type of input": (ops.all_gather, {**GATHER, "input": "dim"}, "input='dim' is of type int, and not Tensor"),
    "group": (ops.all_gather, {**GATHER, "group": "pg"}, "group='pg' is no argument"),
    "type of group": (ops.all_gather, {**GATHER, "group": "ranks"}, "group='ranks' is of type int, and not str or Any"),
    "no size": (ops.all_gather, {**GATHER, "size": None}, "size must name the argument that is the number of ranks"),
    "dim": (ops.all_gather, {**GATHER, "dim": "axis"}, "dim='axis' is no argument"),
    "dim that is none": (ops.all_gather, {**GATHER, "dim": None}, "dim=None is neither the name of an argument nor a"),
    "type of dim": (ops.all_gather, {**GATHER, "dim": "group"}, "dim='group' is of type str, and not int"),
    "reduction": (ops.all_gather, {**GATHER, "reduce_op": "max"}, "reduce_op='max' is no argument"),
    "in place": (ops.gather_, GATHER, "it writes to its arguments"),
    "in place, and else too": (ops.gather_, {**GATHER, "size": None}, "it writes to its arguments"),
    "number of ranks": (ops.all_gather, {**GATHER, "size": 0}, "size=0 is no number of ranks"),
    "two results": (ops.gather_two, {**GATHER, "dim": 0}, "it returns ['Tensor', 'Tensor'], and not one tensor"),
    "groups": (
        ops.all_gather,
        {**GATHER, "groups": {"tp:0": 7}},
        "groups has ['tp:0'], which are neither process groups",
    ),
    "size of an all-reduce": (
        ops.reduce,
        {"kind": "all_reduce", "input": "x", "group": "group", "size": "ranks"},
        "size has no meaning for an all-reduce",
    ),
    "torch's own": (
        torch.ops._c10d_functional.all_gather_into_tensor,
        {"kind": "all_gather", "input": "input", "size": "group_size", "group": "group_name"},
        "the pass knows this op already",
    ),
}
BAD_MATMULS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "operand": (ops.matmul, {"a": "x", "b": "b"}, "a='x' is no argument; it has a, b, bias"),
    "one scale": (ops.matmul, {"a": "a", "b": "b", "a_scale": "bias"}, "a_scale and b_scale must both be given"),
    "in place": (
        ops.matmul_out,
        {"a": "a", "b": "b"},
        "it writes to ['out']; name the argument of the result with out=",
    ),
    "out of another": (ops.matmul_out, {"a": "a", "b": "b", "out": "a"}, "it writes to ['out'], and not to 'a' alone"),
    "out of two": (ops.matmul_both, {"a": "a", "b": "b", "out": "out"}, "it writes to ['out', 'work']"),
    "out of none": (ops.matmul, {"a": "a", "b": "b", "out": "bias"}, "it writes to [], and not to 'bias' alone"),
    "torch's own": (aten.mm.default, {"a": "self", "b": "mat2"}, "the pass knows this op already"),
}


@pytest.mark.parametrize("name", BAD_COLLECTIVES)
def test_bad_collective(name: str) -> None:
    op, roles, message = BAD_COLLECTIVES[name]
    with pytest.raises(RegistryError, match="cannot be registered") as error:
        register_collective(op, **roles)
    assert message in str(error.value)


@pytest.mark.parametrize("name", BAD_MATMULS)
def test_bad_matmul(name: str) -> None:
    op, roles, message = BAD_MATMULS[name]
    with pytest.raises(RegistryError, match="cannot be registered") as error:
        register_matmul(op, **roles)
    assert message in str(error.value)


def test_unregister_what_is_not_registered() -> None:
    with pytest.raises(RegistryError, match="cannot be unregistered: it is not registered"):
        unregister(ops.all_gather)


def test_descriptors_are_frozen() -> None:
    descriptor = register_collective(ops.all_gather, **GATHER)
    with pytest.raises(dataclasses.FrozenInstanceError):
        descriptor.dim = 1  # type: ignore[misc]
    hash(descriptor)


# --- what caches know ---------------------------------------------------------------------------------------------
def test_the_key_of_cached_graphs_has_what_is_registered() -> None:
    keys = [AsyncTPPass(Config()).uuid()]
    register_collective(ops.all_gather, **GATHER)
    keys.append(AsyncTPPass(Config()).uuid())
    register_collective(ops.all_gather, **GATHER, groups={"tp:0": "7"})
    keys.append(AsyncTPPass(Config()).uuid())
    register_matmul(ops.matmul, a="a", b="b")
    keys.append(AsyncTPPass(Config()).uuid())
    assert len(set(keys)) == len(keys)
    unregister(ops.matmul)
    assert AsyncTPPass(Config()).uuid() == keys[2]
    unregister(ops.all_gather)
    assert AsyncTPPass(Config()).uuid() == keys[0]


def test_the_key_does_not_depend_on_the_order() -> None:
    keys = []
    for first, second in ((0, 1), (1, 0)):
        calls = [
            lambda: register_collective(ops.all_gather, **GATHER),
            lambda: register_matmul(ops.matmul, a="a", b="b", bias="bias"),
        ]
        calls[first]()
        calls[second]()
        keys.append(digest())
        unregister(ops.all_gather)
        unregister(ops.matmul)
    assert keys[0] == keys[1]


# --- what the pass makes of it ----------------------------------------------------------------------------------------
def becomes(b: GraphBuilder, out: Node) -> list[str]:
    return outcomes(run_pass(b.returns(out)))


def gather(b: GraphBuilder, x: Node, dim: int = 0, group: str = "tp:0", size: Any = None) -> Node:
    """The custom gather, with the value it should have."""
    shape = list(x.meta["val"].shape)
    shape[dim] *= b.ranks
    with b.mode:
        value = torch.empty(shape)
    return b.call_like(value, ops.all_gather.default, x, dim, b.ranks if size is None else size, group)


def test_an_op_that_is_not_registered_is_missed_and_then_fused() -> None:
    for expected in (["ATP113"], ["F"]):
        b = GraphBuilder()
        out = b.mm(gather(b, b.input("x", [4, 8])), b.input("w", [8, 16]))
        assert becomes(b, out) == expected
        register_collective(ops.all_gather, **GATHER)


def test_groups_are_translated() -> None:
    register_collective(ops.all_gather, **GATHER, groups={"tp:0": "7"})
    b = GraphBuilder()
    graph = b.returns(b.mm(gather(b, b.input("x", [4, 8])), b.input("w", [8, 16])))
    (remark,) = run(graph, Config(groups=("7",))).remarks
    assert (remark.outcome, remark.group) == ("FUSED", "7")
    (fused,) = (node for node in graph.nodes if str(node.target).startswith("asynctp."))
    assert fused.args[-1] == "7"


def test_an_op_without_a_dimension_argument() -> None:
    register_collective(ops.all_gather, kind="all_gather", input="x", dim=1, size="ranks", group="group")
    b = GraphBuilder()
    whole = gather(b, b.input("x", [3, 4, 8]), 1)
    assert becomes(b, b.mm(b.reshape(whole, [48, 8]), b.input("w", [8, 16]))) == ["F"]


@pytest.mark.parametrize(("size", "expected"), [(4, "F"), (3, "ATP108")])
def test_an_op_without_an_argument_for_the_number_of_ranks(size: int, expected: str) -> None:
    register_collective(ops.gather_by_group, kind="all_gather", input="x", size=size, group="group")
    b = GraphBuilder()
    with b.mode:
        value = torch.empty(16, 8)
    whole = b.call_like(value, ops.gather_by_group.default, b.input("x", [4, 8]), "tp")
    assert becomes(b, b.mm(whole, b.input("w", [8, 16]))) == [expected]


@pytest.mark.parametrize("groups", [None, {"tp:0": "0"}])
def test_a_group_that_torch_does_not_know_is_missed_and_named(groups: dict[str, str] | None) -> None:
    """Fused, the op would look for it when it runs, where nobody can tell it what is meant."""
    register_collective(ops.all_gather, **GATHER, groups=groups)
    with imagined_ranks(4):
        b = GraphBuilder()
        graph = b.returns(b.mm(gather(b, b.input("x", [4, 8])), b.input("w", [8, 16])))
        (remark,) = run(graph, Config(strict="off")).remarks
    if groups is None:
        assert remark.code == "ATP113"
        assert "'tp:0', which no process group here is called: register it with groups={'tp:0': ...}" in remark.message
    else:
        assert remark.outcome == "FUSED"


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_number_of_ranks_that_is_none_is_missed(ranks: int) -> None:
    """What the op is called with is what counts, not what would be right: the number of ranks of its group."""
    register_collective(ops.all_gather, **GATHER)
    with imagined_ranks(4):
        b = GraphBuilder()
        whole = gather(b, b.input("x", [4, 8]), group="0", size=ranks)
        graph = b.returns(b.mm(whole, b.input("w", [8, 16])))
        (remark,) = run(graph, Config(strict="off")).remarks
    assert remark.code == "ATP108"
    assert f"[16, 8] is not {ranks} shards of [4, 8]" in remark.message


def stacked(b: GraphBuilder, x: Node) -> torch.Tensor:
    """The value of a gather that stacks the ranks' tensors instead of joining them."""
    with b.mode:
        return torch.empty([b.ranks, *x.meta["val"].shape])


def test_gathers_that_are_not_what_they_promise_are_missed() -> None:
    """A wrong number of ranks, a wrong dimension, a dimension that is none, a result of another layout, or stacked."""
    register_collective(ops.all_gather, **GATHER)
    for build in (
        lambda b, x: gather(b, x, size=3),
        lambda b, x: b.call_like(gather(b, x, 1).meta["val"], ops.all_gather.default, x, 0, 4, "tp"),
        lambda b, x: b.call_like(gather(b, x, 0).meta["val"], ops.all_gather.default, x, 5, 4, "tp"),
        lambda b, x: b.call_like(gather(b, x, 1).meta["val"].transpose(0, 1), ops.all_gather.default, x, 1, 4, "tp"),
        lambda b, x: b.reshape(b.call_like(stacked(b, x), ops.all_gather.default, x, 1, 4, "tp"), [8, 32]),
    ):
        b = GraphBuilder()
        x = b.input("x", [8, 8])
        whole = build(b, x)
        for node in list(b.graph.nodes):
            if not node.users and node.op == "call_function" and node is not whole:
                b.graph.erase_node(node)
        width = whole.meta["val"].shape[1]
        assert becomes(b, b.mm(whole, b.input("w", [width, 16])))[0] in ("ATP108", "ATP113"), build


@pytest.mark.parametrize(
    ("shape", "dtype"), [([4, 12], None), ([12, 8], None), ([8, 12, 1], None), ([8, 12], torch.bfloat16)]
)
def test_an_all_reduce_that_is_none_is_missed(shape: list[int], dtype: torch.dtype | None) -> None:
    """Half of it, another layout, another dtype."""
    register_collective(ops.reduce, kind="all_reduce", input="x", group="group")
    b = GraphBuilder()
    whole = b.mm(b.input("x", [8, 16]), b.input("w", [16, 12]))
    with b.mode:
        value = torch.empty(shape, dtype=dtype)
    assert becomes(b, b.call_like(value, ops.reduce.default, whole, "tp")) == ["ATP113"]


def test_a_gather_that_converts_is_missed() -> None:
    register_collective(ops.all_gather, **GATHER)
    b = GraphBuilder()
    x = b.input("x", [4, 8])
    with b.mode:
        value = torch.empty(16, 8, dtype=torch.bfloat16)
    whole = b.call_like(value, ops.all_gather.default, x, 0, 4, "tp")
    assert becomes(b, b.mm(whole, b.input("w", [8, 12], torch.bfloat16))) == ["ATP113"]


@pytest.mark.parametrize(("dim", "shape"), [(2, [16, 8]), (-3, [16, 8]), (1, None)])
def test_a_gather_along_a_dimension_that_is_not_there_is_missed(dim: int, shape: list[int] | None) -> None:
    """Or of which it is not known."""
    register_collective(ops.all_gather, **GATHER)
    b = GraphBuilder()
    with b.mode:
        value, product = None if shape is None else torch.empty(shape), torch.empty(16, 12)
    whole = b.call_like(value, ops.all_gather.default, b.input("x", [4, 8]), dim, b.ranks, "tp:0")
    assert becomes(b, b.call_like(product, aten.mm.default, whole, b.input("w", [8, 12]))) == ["ATP113"]


@pytest.mark.parametrize("used", [(1,), (0, 1)])
def test_a_list_gathered_by_a_computed_number_of_ranks_is_missed(used: tuple[int, ...]) -> None:
    b = GraphBuilder()
    shards, size = [b.input(name, [4, 8]) for name in ("x", "y")], b.input("size", [])
    size.meta["val"] = 4
    assert gathered_as(b, shards, [[16, 8], [16, 8]], size, used) == ["ATP113"]


def test_a_list_one_of_whose_results_is_laid_out_otherwise_is_missed() -> None:
    b = GraphBuilder()
    shards = [b.input(name, [4, 8]) for name in ("x", "y")]
    assert gathered_as(b, shards, [[16, 8], [8, 16]], b.ranks, (0, 1)) == ["ATP113"]


def gathered_as(b: GraphBuilder, shards: list[Node], shapes: list[list[int]], size: Any, used: tuple[int, ...]) -> Any:
    """What becomes of a gathered list, with results of these shapes (`[8, 16]` is seen transposed)."""
    with b.mode:
        whole = [torch.empty(shape) if shape[0] == 16 else torch.empty(shape).t() for shape in shapes]
    op = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
    call, w = b.call_like(whole, op, shards, size, "tp"), b.input("w", [8, 12])
    items = [b.call_like(whole[index], operator.getitem, call, index) for index in used]
    fulls = [b.call(torch.ops._c10d_functional.wait_tensor.default, item) for item in items]
    return outcomes(run_pass(b.returns(*(b.mm(full, w) for full in fulls))))


@pytest.mark.parametrize(("b_transposed", "expected"), [(True, "F"), (False, "ATP115")])
def test_a_matmul_of_a_transposed_weight_is_described_so(b_transposed: bool, expected: str) -> None:
    register_matmul(ops.matmul, a="a", b="b", b_transposed=b_transposed)
    b = GraphBuilder()
    whole, w = b.gather(b.input("x", [4, 8])), b.input("w", [12, 8])
    with b.mode:
        value = torch.empty(16, 12)
    assert becomes(b, b.call_like(value, ops.matmul.default, whole, w, None)) == [expected]


@pytest.mark.parametrize(
    ("right", "expected"), [([8, 12], "F"), ([8, 10], "ATP115"), ([10, 12], "ATP115"), ([12], "ATP115")]
)
def test_a_matmul_of_a_weight_of_other_sizes_is_missed(right: list[int], expected: str) -> None:
    register_matmul(ops.matmul, a="a", b="b")
    b = GraphBuilder()
    whole, w = b.gather(b.input("x", [4, 8])), b.input("w", right)
    with b.mode:
        value = torch.empty(16, 12)
    assert becomes(b, b.call_like(value, ops.matmul.default, whole, w, None)) == [expected]


def test_blocks_of_a_registered_gather_out_of_order() -> None:
    register_collective(ops.all_gather, **GATHER)
    b = GraphBuilder()
    whole = gather(b, b.input("x", [3, 4, 8]), 1)
    pieces = b.chunks(whole, dim=1)
    swapped = b.cat([pieces[1], pieces[0], *pieces[2:]], dim=1)
    assert becomes(b, b.mm(b.reshape(swapped, [48, 8]), b.input("w", [8, 16]))) == ["ATP101"]


def functionalized(builder: GraphBuilder, op: Any, shape: list[int], **arguments: Any) -> Node:
    """A matmul that writes its result, as torch.compile leaves it by default; its result."""
    out = builder.input("out", shape)
    target = torch.ops.higher_order.auto_functionalized_v2
    call = builder.call_like((None, out.meta["val"]), target, op, **arguments, _all_bases=[out])
    return builder.call(operator.getitem, call, 1)


def test_a_matmul_into_a_whole_tensor_is_fused_and_into_a_part_is_not() -> None:
    register_matmul(ops.matmul_out, a="a", b="b", out="out")
    whole = {"_out_base_index": 0}
    part = {**whole, "_out_slice_dim": 0, "_out_slice_start": 0, "_out_slice_end": 16}
    for view, expected in ((whole, "F"), ({**whole, "_out_alias": True}, "F"), (part, "ATP115")):
        b = GraphBuilder()
        a, w = b.gather(b.input("x", [4, 8])), b.input("w", [8, 12])
        assert becomes(b, functionalized(b, ops.matmul_out.default, [16, 12], a=a, b=w, **view)) == [expected]


def test_a_matmul_into_a_tensor_that_nothing_reads_or_knows_is_missed() -> None:
    """Or whose rows are not one behind the other."""
    register_matmul(ops.matmul_out, a="a", b="b", out="out")
    for case in ("unread", "unknown", "transposed"):
        b = GraphBuilder()
        a, w = b.gather(b.input("x", [4, 8])), b.input("w", [8, 12])
        out = functionalized(b, ops.matmul_out.default, [16, 12], a=a, b=w, _out_base_index=0)
        out.meta.pop("val")
        if case == "unread":
            b.graph.erase_node(out)
        elif case == "transposed":
            with b.mode:
                out.meta["val"] = torch.empty(12, 16).t()
        assert becomes(b, a if case == "unread" else out) == ["ATP207" if case == "unknown" else "ATP115"]


def test_a_matmul_in_place_is_missed() -> None:
    """Without functionalization, who reads the tensor that is written to cannot be told."""
    register_matmul(ops.matmul_out, a="a", b="b", out="out")
    b = GraphBuilder()
    out = b.input("out", [16, 12])
    b.call_like(None, ops.matmul_out.default, out, b.gather(b.input("x", [4, 8])), b.input("w", [8, 12]))
    assert becomes(b, out) == ["ATP115"]


@pytest.mark.parametrize(
    ("a_scales", "b_scales", "expected"),
    [
        ([16, 1], [1], "F"),
        ([1], [16, 1], "F"),
        ([], [1, 16], "F"),
        ([16], [16], "F"),
        ([1, 16], [1], "ATP303"),
        ([16, 2], [1], "ATP303"),
        ([16, 1, 1], [1], "ATP303"),
        ([16, 1], [2, 16], "ATP303"),
        ([16, 1], [16, 2], "ATP303"),
        ([4, 1], [1], "ATP303"),
        ([16, 1], [32, 1], "ATP303"),
    ],
)
def test_scales_of_a_registered_matmul(a_scales: list[int], b_scales: list[int], expected: str) -> None:
    """One number, or one for each row and column, in any combination and in either line."""
    with registered("tp"):
        b = GraphBuilder()
        x, w = b.gather(b.input("x", [4, 32], torch.float8_e4m3fn)), b.input("w", [32, 16], torch.float8_e4m3fn)
        scales = {"a_scales": b.input("sa", a_scales), "b_scales": b.input("sb", b_scales)}
        arguments = {"a": x, "b": w, **scales, "bias": None}
        out = b.input("out", [16, 16], torch.bfloat16)
        op = torch.ops.vllm_like.cutlass_scaled_mm.default
        value = (None, out.meta["val"])
        call = b.call_like(value, torch.ops.higher_order.auto_functionalized, op, out=out, **arguments)
        assert becomes(b, b.call(operator.getitem, call, 1)) == [expected]


FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("a", "right", "bias", "expected"),
    [(BF16, BF16, BF16, "F"), (BF16, torch.int8, None, "ATP301"), (BF16, BF16, FP32, "ATP301")],
)
def test_dtypes_of_a_registered_matmul(a: Any, right: Any, bias: Any, expected: str) -> None:
    """Such as a quantized weight, or a bias of more bits than what it is added to."""
    register_matmul(ops.matmul, a="a", b="b", bias="bias")
    b = GraphBuilder()
    whole, w = b.gather(b.input("x", [4, 8], a)), b.input("w", [8, 12], right)
    added = None if bias is None else b.input("bias", [12], bias)
    with b.mode:
        value = torch.empty(16, 12, dtype=a)
    assert becomes(b, b.call_like(value, ops.matmul.default, whole, w, added)) == [expected]


@pytest.mark.parametrize(
    ("a", "right", "bias", "out", "expected"),
    [
        (FP8, FP8, BF16, BF16, "F"),
        (BF16, BF16, None, BF16, "ATP301"),
        (torch.int8, torch.int8, None, BF16, "F"),
        (torch.int8, FP8, None, BF16, "ATP301"),
        (FP8, BF16, None, BF16, "ATP301"),
        (BF16, FP8, None, BF16, "ATP301"),
        (FP8, FP8, BF16, FP8, "ATP301"),
        (FP8, FP8, torch.float64, BF16, "ATP301"),
    ],
)
def test_dtypes_of_a_registered_scaled_matmul(a: Any, right: Any, bias: Any, out: Any, expected: str) -> None:
    """Scales belong to fp8 or int8 operands, both of them, and what they make is wider."""
    with registered("tp"):
        b = GraphBuilder()
        arguments = {"a": b.gather(b.input("x", [4, 32], a)), "b": b.input("w", [32, 16], right)}
        arguments |= {"a_scales": b.input("sa", [1]), "b_scales": b.input("sb", [1])}
        added = None if bias is None else b.input("bias", [16], bias)
        result = b.input("out", [16, 16], out)
        op = torch.ops.vllm_like.cutlass_scaled_mm.default
        value = (None, result.meta["val"])
        target = torch.ops.higher_order.auto_functionalized
        call = b.call_like(value, target, op, out=result, **arguments, bias=added)
        assert becomes(b, b.call(operator.getitem, call, 1)) == [expected]


def test_scales_of_a_registered_matmul_are_none_of_blocks() -> None:
    """What has as many of them as torch's has for blocks may have others."""
    with registered("tp"):
        b = GraphBuilder()
        x, w = b.gather(b.input("x", [4, 256], FP8)), b.input("w", [256, 16], FP8)
        scales = b.input("sa", [16, 2]), b.input("sb", [2, 16])
        with b.mode:
            value = torch.empty(16, 16, dtype=BF16)
        op = torch.ops.vllm_like.bmm_fp8.default
        assert becomes(b, b.call_like(value, op, x, w, *scales, BF16, "cublas")) == ["ATP306"]


@pytest.mark.parametrize(("a_scales", "expected"), [([1, 1, 1], "F"), ([8, 1, 1], "ATP303"), ([8, 1], "ATP303")])
def test_scales_of_a_registered_matmul_of_batches(a_scales: list[int], expected: str) -> None:
    """One for each batch is not one for each row."""
    with registered("tp"):
        b = GraphBuilder()
        x, w = b.gather(b.input("x", [2, 4, 32], FP8)), b.input("w", [1, 32, 16], FP8)
        scales = b.input("sa", a_scales), b.input("sb", [1])
        call = b.call_like(None, torch.ops.vllm_like.bmm_fp8.default, x, w, *scales, BF16, "cublas")
        with b.mode:
            call.meta["val"] = torch.empty(8, 4, 16, dtype=BF16)
        assert becomes(b, call) == [expected]


@pytest.mark.parametrize(("a", "right"), [(BF16, FP32), (FP32, BF16)])
def test_scales_of_a_registered_matmul_are_float32(a: Any, right: Any) -> None:
    with registered("tp"):
        b = GraphBuilder()
        x, w = b.gather(b.input("x", [4, 32], FP8)), b.input("w", [32, 16], FP8)
        scales = b.input("sa", [1], a), b.input("sb", [1], right)
        op = torch.ops.vllm_like.bmm_fp8.default
        assert becomes(b, b.call(op, x, w, *scales, BF16, "cublas")) == ["ATP303"]


# --- promises ------------------------------------------------------------------------------------------------------
@pytest.fixture(name="promised")
def promises() -> Iterator[list[Any]]:
    """What is appended is unregistered in the end."""
    found: list[Any] = []
    yield found
    for one in found:
        unregister(one)


@pytest.mark.parametrize("register", [register_local, register_rowwise])
@pytest.mark.parametrize(
    ("op", "named"),
    [
        (ops.matmul.default, "registry_test::matmul.default"),
        (ops.two, "registry_test::two"),
        ("registry_test::*", "registry_test::*"),
        ("registry_test::ma*", "registry_test::ma*"),
        ("not_there_yet::norm", "not_there_yet::norm"),
    ],
)
def test_a_promise_is_of_an_op_a_packet_or_text(register: Any, op: Any, named: str) -> None:
    before = digest()
    register(op)
    assert digest() != before
    name = named.replace("::", ".").replace("*", "trix") + ("" if named.count(".") else ".default")
    assert promise_of(name) == register.__name__.removeprefix("register_")
    unregister(op)
    assert promise_of(name) is None
    assert digest() == before


def test_a_name_is_not_the_beginning_of_another(promised: list[Any]) -> None:
    register_local("registry_test::two")
    promised.append("registry_test::two")
    assert promise_of("registry_test.two.other") == "local"
    assert promise_of("registry_test.twofold.default") is None
    assert promise_of("registry_tester.two.default") is None


def test_of_two_promises_the_stronger_counts(promised: list[Any]) -> None:
    register_local("registry_test::*")
    register_rowwise(ops.two)
    promised += ["registry_test::*", ops.two]
    assert promise_of("registry_test.two.default") == "rowwise"
    assert promise_of("registry_test.matmul.default") == "local"


def test_a_collective_communicates_whatever_is_promised_of_its_namespace(promised: list[Any]) -> None:
    register_collective(ops.all_gather, **GATHER)
    register_local("registry_test::*")
    promised.append("registry_test::*")
    assert promise_of("registry_test.all_gather.default") is None
    assert surely_communicates("registry_test.all_gather.default")
    with pytest.raises(RegistryError, match="all_gather cannot be registered: it is registered as a collective"):
        register_local(ops.all_gather)


def test_a_matmul_that_is_described_is_local() -> None:
    register_matmul(ops.matmul, a="a", b="b", bias="bias")
    assert promise_of("registry_test.matmul.default") == "local"


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        ("norm", "'norm' cannot be registered: it is not a name; give namespace::name"),
        ("mylib.norm", "it is not a name"),
        ("*", "it is not a name"),
        ("my*::norm", "it is not a name"),
        ("aten::*", "aten::\\* cannot be registered: the pass knows the ops of this namespace already"),
        ("_c10d_functional::all_reduce", "the pass knows the ops of this namespace already"),
        ("asynctp::*", "the pass knows the ops of this namespace already"),
        (torch.ops.aten.mm.default, "the pass knows the ops of this namespace already"),
        (len, "it is not an op; give an overload such as torch.ops.mylib.norm.default, or its name"),
    ],
)
def test_bad_promises_are_refused(op: Any, problem: str) -> None:
    for register in (register_local, register_rowwise):
        with pytest.raises(RegistryError, match=problem):
            register(op)


def test_an_op_that_writes_is_not_rowwise() -> None:
    with pytest.raises(RegistryError, match="matmul_out cannot be registered: it writes to its arguments"):
        register_rowwise(ops.matmul_out)


@pytest.mark.parametrize("name", ["norm", "registry_test::nothing", "other::*"])
def test_what_is_not_promised_cannot_be_forgotten(name: str) -> None:
    with pytest.raises(RegistryError):
        unregister(name)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("aten.mm.default", True),
        ("_c10d_functional.wait_tensor.default", True),
        ("_c10d_functional.all_reduce.default", False),
        ("asynctp.wait.default", True),
        ("asynctp.all_gather.default", False),
        ("symm_mem.one_shot_all_reduce.default", False),
        ("_dtensor.shard_dim_alltoall.default", False),
        ("flash_attn._flash_attn_forward.default", True),
        ("_C.rms_norm.default", True),
        ("_C.minimax_allreduce_rms_qk.default", False),
        ("_C_custom_ar.all_reduce.default", False),
        ("vllm.unified_attention_with_output.default", False),
        ("fbgemm.quantize_fp8_per_row.default", True),
        ("fbgemm.nccl_allreduce.default", False),
        ("xformers_python.sequence_parallel_leading_matmul_fwd.default", False),
    ],
)
def test_known_ops(name: str, known: bool) -> None:
    assert (promise_of(name) == "local") == known


# --- row-wise ops --------------------------------------------------------------------------------------------------
def between(b: GraphBuilder, whole: Node, other: Node, op: Any = ops.rows, rows: int = 16) -> Node:
    """An op that is registered as row-wise, on a gathered tensor."""
    with b.mode:
        value = torch.empty(rows, 6)
    return b.call_like(value, op.default, whole, other)


def test_a_rowwise_op_is_done_on_the_shard(promised: list[Any]) -> None:
    def run_it() -> tuple[Any, list[int]]:
        b = GraphBuilder()
        found = between(b, b.gather(b.input("x", [4, 8])), b.input("weight", [8]))
        graph = b.returns(b.mm(found, b.input("w", [6, 12])))
        report = run_pass(graph)
        (call,) = (node for node in graph.nodes if node.target is ops.rows.default)
        return report, list(call.meta["val"].shape)

    register_rowwise(ops.rows)
    promised.append(ops.rows)
    report, shape = run_it()
    assert outcomes(report) == ["F"]
    assert shape == [4, 6], "a rank's rows"


ATTACKS: dict[str, Callable[[GraphBuilder], Node]] = {
    "ranks in the columns": lambda b: between(
        b, b.permute(b.gather(b.input("x", [4, 16])), [1, 0]), b.input("v", [16])
    ),
    "other rows": lambda b: between(b, b.gather(b.input("x", [4, 16])), b.input("v", [16]), rows=8),
    "a matrix beside": lambda b: between(b, b.gather(b.input("x", [4, 16])), b.input("v", [16, 16])),
    "an operand that needs the gather": lambda b: between(
        b, whole := b.gather(b.input("x", [4, 16])), b.call(aten.sum.dim_IntList, whole, [0])
    ),
    "no fake implementation": lambda b: between(b, b.gather(b.input("x", [4, 16])), b.input("v", [16]), ops.two),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_not_proven_of_a_rowwise_op_stays(attack: str, promised: list[Any]) -> None:
    for op in (ops.rows, ops.two):
        register_rowwise(op)
        promised.append(op)
    b = GraphBuilder()
    found = ATTACKS[attack](b)
    graph = b.returns(b.mm(found, b.input("w", [6, 12])))
    (code,) = outcomes(run_pass(graph))
    assert code in ("ATP105", "ATP117", "ATP203"), code


def test_an_op_between_names_its_remedy() -> None:
    b = GraphBuilder()
    whole = b.gather(b.input("x", [4, 8]))
    named = b.call_like(whole.meta["val"], ops.rms_norm.default, whole)
    (remark,) = run_pass(b.returns(b.mm(named, b.input("w", [8, 12])))).remarks
    assert 'register_rowwise("registry_test::rms_norm")' in remark.message


def test_public_names() -> None:
    registers = ("register_collective", "register_local", "register_matmul", "register_rowwise", "unregister")
    for name in ("CollectiveOp", "MatmulOp", "RegistryError", *registers):
        assert name in asynctp_passes.__all__


# --- frozen weights ----------------------------------------------------------------------------------------------
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL")
def test_a_frozen_linear_is_fused_by_the_weight_that_is_not_packed() -> None:
    """Inductor calls the op without naming its overload. The packed weight is left without users."""
    b = GraphBuilder(ranks=2)
    x, packed, w = b.input("x", [4, 8]), b.input("packed", [1459233, 1]), b.input("w", [12, 8])
    value = b.call(aten.new_empty.default, x, [8, 12]).meta["val"]
    graph = b.returns(b.call_like(value, torch.ops.mkl._mkl_linear, b.gather(x), packed, w, None, 8))
    assert outcomes(run_pass(graph)) == ["F"]
    assert not packed.users


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
def test_a_packed_weight_is_named() -> None:
    b = GraphBuilder(ranks=2)
    x = b.input("x", [4, 8])
    holder = torch.nn.Module()
    holder.frozen = torch.ones(12, 8).to_mkldnn()
    b.graph.owning_module = holder  # type: ignore[assignment]
    frozen = b.graph.get_attr("frozen")
    frozen.meta["val"] = b.call(aten.new_empty.default, x, [12, 8]).meta["val"]
    value = b.call(aten.new_empty.default, x, [8, 12]).meta["val"]
    op = torch.ops.mkldnn._linear_pointwise.default
    graph = b.returns(b.call_like(value, op, b.gather(x), frozen, None, "none", [], ""))
    (remark,) = run_pass(graph).remarks
    assert remark.code == "ATP115"
    assert "whose weight frozen is packed: freezing did that" in remark.message
    assert "weight_prepack" in remark.hint
