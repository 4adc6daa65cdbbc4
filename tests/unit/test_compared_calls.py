"""On GPUs a rank deviates from the program only where an unlike call of a peer would be found."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from graph_builder import GraphBuilder, c10d, show
from lockstep import op_name
from passes import outcomes, run_pass
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from asynctp_passes import Config, Report, compat, joint_pass
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.planning import legality
from asynctp_passes.planning.legality import SMALL_BYTES, compares_calls
from asynctp_passes.planning.plan import ballots_of, planned

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
    return compares_calls(replace(collective, group_size=ranks), config or Config())


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
        assert compares_calls(collective, Config()) is wanted


@pytest.mark.parametrize("dtype", [FP32, FP64, torch.int64])
def test_other_reductions_are_compared_on_cpus_alone(dtype: torch.dtype) -> None:
    """There ranks meet before."""
    for kind, reduce_op in (("reduce_scatter", "max"), ("reduce_scatter", "product"), ("all_reduce", "product")):
        assert not compared(kind, reduce_op, dtype, 96, 2)
        assert compared(kind, reduce_op, dtype, 96, 2, "cpu")
    assert compared("all_reduce", "max", dtype, SMALL_BYTES * 2, 2, "cpu")


def test_groups_that_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compared("all_gather", "", BF16, 96, 2, config=Config(groups="other"))
    assert compared("all_gather", "", BF16, 96, 1, config=Config(groups="other")), "nobody is there to call another"
    monkeypatch.setattr(compat, "mesh_dimension_of", lambda group: "dp_shard")
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
    alone = run_pass(graph, bucket=False)
    assert all_reduces(graph) == ["asynctp::all_reduce"] * 2
    assert {(remark.outcome, remark.op) for remark in alone.remarks} == {("ACCELERATED", "asynctp::all_reduce")}
    on_cpu = run_pass(two_maxima("cpu"), bucket=False)
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
    monkeypatch.setattr(compat, "mesh_dimension_of", lambda group: "fsdp")
    graph = two_maxima("cuda")
    assert run_pass(graph).buckets == ()
    assert all_reduces(graph) == ["_c10d_functional::all_reduce"] * 2
    assert len(run_pass(two_maxima("cpu")).buckets) == 1


def sums(b: GraphBuilder, device: str, dtype: torch.dtype) -> tuple[Node, ...]:
    """Two sums that are only used added up."""
    made = []
    for name in "xy":
        x, w = b.input(name, [4, 6], dtype, device=device), b.input(f"{name}_w", [6, 8], dtype, device=device)
        made.append(b.all_reduce(b.mm(x, w)))
    return (b.add(*made),)


@pytest.mark.parametrize(
    ("device", "dtype", "joined"), [("cuda", BF16, True), ("cuda", FP64, False), ("cpu", FP64, True)]
)
def test_sums_become_one_where_calls_are_compared(device: str, dtype: torch.dtype, joined: bool) -> None:
    """Elsewhere each is fused by itself, as the program has it."""
    b = GraphBuilder(ranks=2)
    found = planned(b.returns(*sums(b, device, dtype)), Config())
    (ballot,) = ballots_of(found)
    assert bool(ballot.deviations) == joined
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
    assert [remark.outcome == "ERASED" for remark in report.remarks] == [gone, True, False]
    assert len(all_reduces(graph)) == (not gone)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_group_of_parameters_alone_is_left_to_torch_as_it_is(device: str) -> None:
    """On GPUs nothing compares its sums then, and so one that nothing uses stays. Maxima do not stay with them."""
    b = GraphBuilder(ranks=2)
    maxima = [b.all_reduce(b.input(f"tangents_{name}", [4], device=device), "max") for name in "12"]
    b.all_reduce(b.input("primals_1", [4], device=device))
    weight = b.gather(b.input("primals_2", [4, 8], device=device))
    x = b.input("primals_3", [4, 8], device=device)
    graph = b.returns(b.mm(x, weight), *maxima)
    found = planned(graph, Config())
    (ballot,) = ballots_of(found)
    deviations = {text.split(":")[0] for text in ballot.deviations}
    assert deviations == {"bucket", "plain" if device == "cuda" else "drop"}
    run_pass(graph)
    torchs, own = "_c10d_functional::all_reduce", "asynctp::all_reduce"
    assert sorted(all_reduces(graph)) == ([torchs, own] if device == "cuda" else [torchs])
    assert "asynctp::all_gather" not in show(graph)


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
    joint_pass.run_joint(graph, Config())
    saves = [node.name for node in graph.nodes if compat.recompute_tag(node) is CheckpointPolicy.MUST_SAVE]
    assert saves == [wanted]
