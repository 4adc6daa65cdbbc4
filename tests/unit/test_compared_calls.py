"""On GPUs a rank deviates from the program only where an unlike call of a peer would be found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from graph_builder import GraphBuilder, c10d, show
from lockstep import op_name
from passes import outcomes, run_pass
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from asynctp_passes import Config, Report
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.order import CANDIDATE
from asynctp_passes.planning import legality
from asynctp_passes.planning.legality import SMALL_BYTES, blind_calls
from asynctp_passes.planning.plan import planned, questions_of
from asynctp_passes.remat.joint import run_joint
from asynctp_passes.torch_private import partitioner, process_groups

BF16, FP16, FP32, FP64, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn
DTYPES = (BF16, FP16, FP32, FP64, FP8, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
LIMIT = (1 << 31) - (1 << 16)
BYTES = (0, 96, 104, 4096, SMALL_BYTES, SMALL_BYTES + 8, 32 << 20, (32 << 20) + 24, (64 << 20) + 24, (96 << 20) + 24,
         LIMIT - 8, LIMIT, 3 * LIMIT, 9 * LIMIT)  # fmt: skip


def compared(
    kind: str,
    reduce_op: str,
    dtype: torch.dtype,
    size: int,
    ranks: int,
    device: str = "cuda",
    config: Config | None = None,
) -> bool:
    """Whether calls of a collective are compared, given its bytes on each rank."""
    b = GraphBuilder(ranks=ranks)
    x = b.input("x", [size // dtype.itemsize], dtype, device=device)
    if kind == "all_gather":
        made = b.call_like(x.meta["val"], c10d.all_gather_into_tensor.default, x, ranks, "tp")
    elif kind == "reduce_scatter":
        made = b.call_like(x.meta["val"], c10d.reduce_scatter_tensor.default, x, reduce_op, ranks, "tp")
    else:
        made = b.call_like(x.meta["val"], c10d.all_reduce.default, x, reduce_op, "tp")
    (collective,) = read_collectives(b.returns(made))
    return not blind_calls([replace(collective, group_size=ranks)], config or Config())


# --- the predicate -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_calls_are_compared_that_go_by_asynctps_transport(ranks: int) -> None:
    pytest.importorskip("triton")
    from asynctp_kernels.cuda.choose import wire

    assert wire.EXTREME_BYTES == SMALL_BYTES
    outcome = set[tuple[str, bool]]()
    ways = [("all_gather", ""), *itertools.product(("reduce_scatter", "all_reduce"), ("sum", "avg"))]
    ways += [("all_reduce", "max"), ("all_reduce", "min")]
    for (kind, reduce_op), dtype, size in itertools.product(ways, DTYPES, BYTES):
        size -= size % (dtype.itemsize * (ranks if kind == "reduce_scatter" else 1))
        own = size // ranks if kind == "reduce_scatter" else size
        reduced = (dtype, reduce_op) if reduce_op else (None, "")
        plain = wire.Wire(kind, ranks, own, *reduced).transport() == wire.PLAIN
        found = compared(kind, reduce_op, dtype, size, ranks)
        assert found != plain, (kind, reduce_op, dtype, size)
        outcome.add((kind, found))
    assert len(outcome) == 6


@pytest.mark.parametrize(
    ("kind", "columns", "wanted"),
    [
        ("all_reduce", 8192, True),
        ("all_reduce", 4097, False),
        ("reduce_scatter", 4097, False),
        ("all_gather", 4097, True),
    ],
)
def test_sums_of_any_rows_are_compared_if_their_bytes_divide(kind: str, columns: int, wanted: bool) -> None:
    """A large sum that does not divide by 16 bytes a rank is NCCL's, which compares nothing."""
    b = GraphBuilder(ranks=2)
    x = b.input("x", [8, columns], BF16, dynamic=0)
    if kind == "all_gather":
        made = b.call(c10d.all_gather_into_tensor.default, x, 2, "tp")
    elif kind == "reduce_scatter":
        made = b.call(c10d.reduce_scatter_tensor.default, x, "sum", 2, "tp")
    else:
        made = b.call(c10d.all_reduce.default, x, "sum", "tp")
    (collective,) = read_collectives(b.returns(made))
    with mock.patch.object(legality, "on_wire", return_value=True):
        assert blind_calls([collective], Config()) == ([] if wanted else [collective])


@pytest.mark.parametrize("dtype", [FP32, FP64, torch.int64])
def test_other_reductions_are_compared_on_cpus_alone(dtype: torch.dtype) -> None:
    """There a check comes before."""
    for kind, reduce_op in (("reduce_scatter", "max"), ("reduce_scatter", "product"), ("all_reduce", "product")):
        assert not compared(kind, reduce_op, dtype, 96, 2)
        assert compared(kind, reduce_op, dtype, 96, 2, "cpu")
    assert compared("all_reduce", "max", dtype, SMALL_BYTES * 2, 2, "cpu")


def test_groups_that_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compared("all_gather", "", BF16, 96, 2, config=Config(groups="other"))
    assert compared("all_gather", "", BF16, 96, 1, config=Config(groups="other")), "nobody is there to call another"
    monkeypatch.setattr(process_groups, "mesh_dimension_of", lambda group: "dp_shard")
    assert not compared("all_gather", "", BF16, 96, 2)
    assert compared("all_gather", "", BF16, 96, 2, config=Config(groups="tp"))
    assert compared("all_gather", "", BF16, 96, 2, "cpu")


# --- what is planned ---------------------------------------------------------------------------------------------
def two_maxima(device: str, dtype: torch.dtype = BF16, reduce_op: str = "max") -> Graph:
    b = GraphBuilder(ranks=2)
    return b.returns(*(b.all_reduce(b.input(name, [6], dtype, device=device), reduce_op) for name in "xy"))


def all_reduces(graph: Graph) -> list[str]:
    return [op_name(node.target) for node in graph.nodes if "all_reduce" in op_name(node.target)]


def test_maxima_go_by_asynctps_transport() -> None:
    """One of several, each by itself, and each tensor of a list: nothing else changes of what is said of them."""
    graph = two_maxima("cuda")
    report = run_pass(graph)
    assert [len(bucket.collectives) for bucket in report.buckets] == [2]
    assert all_reduces(graph) == ["asynctp::all_reduce"]
    graph = two_maxima("cuda")
    alone = run_pass(graph, skip="bucket")
    assert all_reduces(graph) == ["asynctp::all_reduce"] * 2
    assert {(remark.outcome, remark.op) for remark in alone.remarks} == {("ACCELERATED", "asynctp::all_reduce")}
    on_cpu = run_pass(two_maxima("cpu"), skip="bucket")
    assert [(one.code, one.message) for one in alone.remarks] == [(one.code, one.message) for one in on_cpu.remarks]
    assert {remark.outcome for remark in on_cpu.remarks} == {"SKIPPED"}
    for device, wanted in (("cuda", ["asynctp::all_reduce"] * 2), ("cpu", ["_c10d_functional::all_reduce_coalesced"])):
        b = GraphBuilder(ranks=2)
        inputs = [b.input(name, [6], device=device) for name in "xy"]
        listed = b.call(c10d.all_reduce_coalesced.default, inputs, "max", "tp")
        graph = b.returns(*b.wait_list(listed, 2))
        run_pass(graph)
        assert all_reduces(graph) == wanted


@pytest.mark.parametrize("reduce_op", ["max", "sum", "product"])
def test_a_maximum_that_follows_a_matmul_is_missed_as_before(reduce_op: str) -> None:
    reports: dict[str, Report] = {}
    for device in ("cuda", "cpu"):
        b = GraphBuilder(ranks=2)
        x, w = b.input("x", [4, 8], BF16, device=device), b.input("w", [8, 6], BF16, device=device)
        reports[device] = run_pass(b.returns(b.all_reduce(b.mm(x, w), reduce_op)))
    assert outcomes(reports["cuda"]) == outcomes(reports["cpu"]) == ["F" if reduce_op == "sum" else "ATP201"]


def test_no_bucket_of_what_torch_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_pass(two_maxima("cuda", FP8)).buckets == ()
    assert len(run_pass(two_maxima("cpu", FP8)).buckets) == 1
    monkeypatch.setattr(process_groups, "mesh_dimension_of", lambda group: "fsdp")
    graph = two_maxima("cuda")
    assert run_pass(graph).buckets == ()
    assert all_reduces(graph) == ["_c10d_functional::all_reduce"] * 2
    assert len(run_pass(two_maxima("cpu")).buckets) == 1


def product_of(b: GraphBuilder, name: str, device: str, dtype: torch.dtype = BF16) -> Node:
    x, w = b.input(name, [4, 6], dtype, device=device), b.input(f"{name}_w", [6, 8], dtype, device=device)
    return b.mm(x, w)


def sums(b: GraphBuilder, device: str, dtype: torch.dtype) -> tuple[Node, ...]:
    """Two sums that are only used added up."""
    return (b.add(*(b.all_reduce(product_of(b, name, device, dtype)) for name in "xy")),)


@pytest.mark.parametrize(
    ("device", "dtype", "joined"), [("cuda", BF16, True), ("cuda", FP64, False), ("cpu", FP64, True)]
)
def test_sums_become_one_where_calls_are_compared(device: str, dtype: torch.dtype, joined: bool) -> None:
    """Elsewhere each is fused by itself, as the program has it."""
    b = GraphBuilder(ranks=2)
    found = planned(b.returns(*sums(b, device, dtype)), Config())
    (question,) = questions_of(found)
    assert bool(question.deviations) == joined
    assert (len(found.chains), len(found.decisions)) == (1 if joined else 2, 2)
    assert all(decision.refusal is None for decision in found.decisions)


@pytest.mark.parametrize(
    ("device", "dtype", "reduce_op", "gone"),
    [
        ("cuda", BF16, "sum", True),
        ("cuda", BF16, "max", True),
        ("cuda", torch.int64, "max", True),
        ("cuda", torch.int64, "sum", False),
        ("cuda", FP64, "sum", False),
        ("cuda", BF16, "product", False),
        ("cpu", BF16, "product", True),
        ("cpu", FP64, "sum", True),
    ],
)
def test_what_nothing_uses_goes_where_calls_are_compared(
    device: str, dtype: torch.dtype, reduce_op: str, gone: bool
) -> None:
    b = GraphBuilder(ranks=2)
    b.all_reduce(b.input("primals_1", [4], dtype, device=device), reduce_op)
    b.all_reduce(b.input("primals_2", [4], BF16, device=device))
    dy, w = b.input("tangents_1", [8, 6], BF16, device=device), b.input("primals_3", [6, 8], BF16, device=device)
    graph = b.returns(b.scatter(b.mm(dy, w)))
    report = run_pass(graph)
    assert [remark.outcome == "ERASED" for remark in report.remarks] == [gone, gone, False]
    assert len(all_reduces(graph)) == (0 if gone else 2)


@pytest.mark.parametrize(
    ("device", "dimension", "deviations", "wanted"),
    [
        ("cpu", "", {"bucket", "drop"}, ["_c10d_functional::all_reduce"]),
        ("cuda", "", {"bucket", "drop"}, ["asynctp::all_reduce"]),
        ("cuda", "fsdp", set(), ["_c10d_functional::all_reduce"] * 3),
    ],
)
def test_a_group_of_parameters_alone_goes_by_its_name(
    device: str, dimension: str, deviations: set[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph does not decide whose its collectives are: another rank may multiply what this one does not."""
    monkeypatch.setattr(process_groups, "mesh_dimension_of", lambda group: dimension)
    b = GraphBuilder(ranks=2)
    maxima = [b.all_reduce(b.input(f"tangents_{name}", [4], device=device), "max") for name in "12"]
    b.all_reduce(b.input("primals_1", [4], device=device))
    weight = b.gather(b.input("primals_2", [4, 8], device=device))
    x = b.input("primals_3", [4, 8], device=device)
    graph = b.returns(b.mm(x, weight), *maxima)
    found = planned(graph, Config())
    (question,) = questions_of(found)
    assert {text.split(":")[0] for text in question.deviations} == deviations
    is_own = device == "cuda" and not dimension
    assert question.keeps == (("keep: all_gather 3",) if is_own else ())
    run_pass(graph)
    assert all_reduces(graph) == wanted
    assert ("asynctp::all_gather" in show(graph)) == is_own
    assert ("copy=False" in show(graph)) == is_own, "its wait reads what is gathered"
    assert ("asynctp::wait" in show(graph)) == is_own


# --- stretches ---------------------------------------------------------------------------------------------------
def joined(b: GraphBuilder, device: str, between: Callable[[], Node]) -> tuple[Node, ...]:
    """Two sums that are only used added up, with something between them."""
    first = b.all_reduce(product_of(b, "x", device))
    middle = between()
    return middle, b.add(first, b.all_reduce(product_of(b, "y", device)))


def bucketed(b: GraphBuilder, device: str, between: Callable[[], Node]) -> tuple[Node, ...]:
    """Two maxima, with something between them."""
    first = b.all_reduce(b.input("x", [6], device=device), "max")
    middle = between()
    return first, middle, b.all_reduce(b.input("y", [6], device=device), "max")


def late(b: GraphBuilder, device: str, between: Callable[[], Node]) -> tuple[Node, ...]:
    """A gather whose matmul needs a reduction that comes later."""
    whole = b.gather(b.input("x", [4, 8], BF16, device=device))
    middle = between()
    weight = b.mul(b.input("w", [8, 8], BF16, device=device), b.all_reduce(b.input("y", [8, 8], BF16, device=device)))
    return middle, b.mm(whole, weight)


@pytest.mark.parametrize(
    ("device", "dtype", "kept_apart"), [("cuda", FP64, True), ("cuda", BF16, False), ("cpu", FP64, False)]
)
@pytest.mark.parametrize("build", [joined, bucketed, late])
def test_no_stretch_of_a_deviation_has_a_blind_call(
    build: Callable[..., tuple[Node, ...]], device: str, dtype: torch.dtype, kept_apart: bool
) -> None:
    """All graphs have as many blind calls before each stretch, so that ranks' first unlike calls meet."""
    found = dict[str, bool]()
    for where in ("before", "between", "after", "of another group"):
        b = GraphBuilder(ranks=2)

        def blind(b: GraphBuilder = b, where: str = where) -> Node:
            group = "other" if where == "of another group" else "tp"
            x = b.input("blind", [4, 8], dtype, device=device)
            return b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, x, "sum", group))

        first = [blind()] if where == "before" else []
        made = build(b, device, blind if where in ("between", "of another group") else lambda b=b: b.input("z", [4]))
        graph = b.returns(*first, *made, *([blind()] if where == "after" else []))
        found[where] = any(one.deviations for one in questions_of(planned(graph, Config())))
    assert found == {"before": True, "between": not kept_apart, "after": True, "of another group": True}


@pytest.mark.parametrize(("dtype", "wanted"), [(BF16, [0]), (FP64, [])])
def test_no_gather_is_made_again_in_a_group_with_a_blind_call(dtype: torch.dtype, wanted: list[int]) -> None:
    """Its place in the backward is not known yet."""
    b = GraphBuilder(ranks=2)
    whole = b.gather(b.relu(b.input("primals_x", [4, 8], BF16, device="cuda")))
    out = b.mm(whole, b.input("primals_w", [8, 6], BF16, device="cuda"))
    dy = b.input("tangents_1", [8, 6], BF16, device="cuda")
    blind = b.all_reduce(b.input("tangents_2", [4, 8], dtype, device="cuda"))
    graph = b.returns(out, blind, b.mm(b.permute(whole, [1, 0]), dy))
    run_joint(graph, Config(rematerialize="always"))
    assert [node.meta[CANDIDATE] for node in graph.nodes if CANDIDATE in node.meta] == wanted


@pytest.mark.parametrize(
    ("device", "dtype", "wanted"),
    [("cuda", BF16, "wait_tensor"), ("cuda", FP64, "mm"), ("cpu", FP64, "wait_tensor")],
)
def test_a_sum_is_saved_where_calls_are_compared(device: str, dtype: torch.dtype, wanted: str) -> None:
    b = GraphBuilder(ranks=2)
    product = b.mm(*(b.input(f"primals_{name}", [8, 8], dtype, device=device) for name in "xw"))
    product.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    result = b.relu(b.all_reduce(product))
    gradient = b.mul(*(b.input(f"{name}_1", [8, 8], dtype, device=device) for name in ("tangents", "primals")))
    graph = b.returns(result, b.all_reduce(gradient))
    run_joint(graph, Config())
    saves = [node.name for node in graph.nodes if partitioner.recompute_tag(node) is CheckpointPolicy.MUST_SAVE]
    assert saves == [wanted]
