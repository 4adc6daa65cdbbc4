"""Ranks that decide differently are told so, with both plans; no other situation raises, or waits for anybody."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graph_builder import GraphBuilder
from ranks import imagined_ranks, run_ranks
from torch import Tensor
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

import asynctp_passes
from asynctp_passes import AsyncTPPass, Config, Report, agree, pipeline, run
from asynctp_passes.agree import plan_of
from asynctp_passes.compat import Peers
from asynctp_passes.errors import AsyncTPError

QUIET: dict[str, Any] = {"strict": "off", "log": False, "trace": False}


def program(group: str, rows: int = 4) -> Graph:
    """A gather and a matmul, and two small all-reduces."""
    b = GraphBuilder(ranks=2, group=group)
    c10d = torch.ops._c10d_functional
    x, w = b.input("x", [rows, 8]), b.input("w", [8, 12])
    maxima = [b.call(torch.ops.aten.max.default, value) for value in (x, w)]
    reduced = [b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, one, "max", group)) for one in maxima]
    return b.returns(b.mm(b.gather(x), w), *reduced)


def other_program(group: str) -> Graph:
    b = GraphBuilder(ranks=2, group=group)
    return b.returns(b.mm(b.relu(b.gather(b.input("x", [4, 8]))), b.input("w", [8, 12])))


def missed_program(group: str) -> Graph:
    """Its pieces are joined in another order, so it is not fused."""
    b = GraphBuilder(ranks=2, group=group)
    full = b.cat(b.chunks(b.gather(b.input("x", [4, 8])))[::-1])
    return b.returns(b.mm(full, b.input("w", [8, 12])))


def world_name() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


@dataclasses.dataclass
class Attempt:
    """What came of one call of the pass on one rank, and how long it took."""

    error: str = ""
    report: Report | None = None
    seconds: float = 0.0


def attempt(graph: Graph, **options: Any) -> Attempt:
    start = time.monotonic()
    try:
        report = run(graph, Config(**{**QUIET, **options}))
    except AsyncTPError as error:
        return Attempt(f"{type(error).__name__}: {error}", error.report, time.monotonic() - start)
    return Attempt("", report, time.monotonic() - start)


def attempt_in_step(graph: Graph, **options: Any) -> Attempt:
    """As in a compile, which compares at its end with plans that came meanwhile."""
    done = attempt(graph, **options)
    dist.barrier()
    try:
        agree.agree_again()
    except AsyncTPError as error:
        done = Attempt(f"{type(error).__name__}: {error}", error.report)
    dist.barrier()
    return done


# --- on ranks --------------------------------------------------------------------------------------------------
def case_same(rank: int) -> list[Attempt]:
    return [attempt_in_step(program(world_name())) for _ in range(2)]


def case_static_and_dynamic_sizes(rank: int) -> list[Attempt]:
    return [attempt_in_step(program(world_name(), rows=4 + rank))]


def case_other_options_on_one_rank(rank: int) -> list[Attempt]:
    with mock.patch.object(agree, "GRACE_S", 0.2):
        first = attempt_in_step(program(world_name()), coalesce=rank == 0)
    return [first, attempt_in_step(program(world_name()))]  # mended


def case_other_decisions_on_one_rank(rank: int) -> list[Attempt]:
    with mock.patch.object(agree, "GRACE_S", 0.2):
        return [attempt_in_step(program(world_name()), min_bytes=rank * 10**9)]


def case_strict_on_one_rank(rank: int) -> list[Attempt]:
    """Rank 1 comes first and raises a StrictError; rank 0 learns that it would wait for it."""
    with mock.patch.object(agree, "GRACE_S", 0.2):
        if rank == 0:
            dist.barrier()
        done = attempt(missed_program(world_name()), strict="all" if rank else "off")
        if rank == 1:
            dist.barrier()
        return [done]


def case_two_configurations_one_after_the_other(rank: int) -> list[Attempt]:
    """Rank 1 compiles each of them again, as after a recompile of its own."""
    attempts = []
    for coalesce in (True, False):
        attempts += [attempt(program(world_name()), coalesce=coalesce) for _ in range(1 + rank)]
    return [attempts[0], attempts[-1]]


def case_two_configurations_on_one_rank_before_the_other_comes(rank: int) -> list[Attempt]:
    if rank == 1:
        dist.barrier()
        return [attempt(program(world_name()))]
    done = [attempt(program(world_name()), coalesce=coalesce) for coalesce in (False, True)]
    dist.barrier()
    return done[1:]


def case_two_configurations_on_one_rank_while_the_other_has_one(rank: int) -> list[Attempt]:
    """Rank 1 meets rank 0 between its two: the one that both have is still to come, and comes."""
    if rank == 1:
        dist.barrier()
        return [attempt(program(world_name()))]
    first = attempt(program(world_name()), coalesce=False)
    dist.barrier()
    time.sleep(0.2)
    return [Attempt(first.error + attempt(program(world_name())).error)]


def case_one_rank_later(rank: int) -> list[Attempt]:
    """Rank 1 sees the difference when it comes, and rank 0 at its next compile."""
    with mock.patch.object(agree, "GRACE_S", 0.2):
        if rank == 1:
            dist.barrier()
        early = attempt(program(world_name()), coalesce=rank == 0)
        if rank == 0:
            dist.barrier()
        dist.barrier()
        return [early, attempt(other_program(world_name()))]


def two_sums(look: str) -> Graph:
    """The sum of two reduced products, of which a rank may look at the first one, or at what is not reduced yet."""
    b = GraphBuilder(ranks=2, group=world_name())
    products = [b.mm(b.input(f"x{index}", [4, 8]), b.input(f"w{index}", [8, 6])) for index in range(2)]
    reduced = [b.all_reduce(one) for one in products]
    total = b.add(*reduced)
    looked_at = {"sum": total, "result": reduced[0], "product": products[0]}
    return b.returns(total, *([b.relu(looked_at[look])] if look else []))


def case_one_rank_looks_at_the_sum(rank: int) -> list[Attempt]:
    return [attempt_in_step(two_sums("" if rank else "sum"))]


def case_one_rank_looks_at_a_summed_result(rank: int) -> list[Attempt]:
    """It reduces twice what the other one reduces once."""
    with mock.patch.object(agree, "GRACE_S", 0.2):
        return [attempt_in_step(two_sums("" if rank else "result"))]


def case_one_rank_looks_at_a_product(rank: int) -> list[Attempt]:
    with mock.patch.object(agree, "GRACE_S", 0.2):
        return [attempt_in_step(two_sums("" if rank else "product"))]


def with_factor(group: str, factor: float) -> Graph:
    """The sum of two reduced products, the first one times a factor, which goes before the reduction."""
    b, c10d = GraphBuilder(ranks=2, group=group), torch.ops._c10d_functional
    products = [b.mm(b.input(f"x{index}", [4, 8]), b.input(f"w{index}", [8, 6])) for index in range(2)]
    first, second = (
        b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, product, "sum", group)) for product in products
    )
    return b.returns(b.add(b.call(torch.ops.aten.mul.Tensor, first, factor), second))


def with_relu(group: str, on: bool) -> Graph:
    """What is computed between a gather and its matmul goes before the gather."""
    b = GraphBuilder(ranks=2, group=group)
    whole = b.gather(b.input("x", [4, 8]))
    return b.returns(b.mm(b.relu(whole) if on else whole, b.input("w", [8, 12])))


def case_other_factors_on_one_rank(rank: int) -> list[Attempt]:
    with mock.patch.object(agree, "GRACE_S", 0.2):
        return [attempt_in_step(with_factor(world_name(), 0.5**rank))]


def case_other_work_before_the_matmul_on_one_rank(rank: int) -> list[Attempt]:
    with mock.patch.object(agree, "GRACE_S", 0.2):
        return [attempt_in_step(with_relu(world_name(), rank == 0))]


def case_made_again_on_one_rank(rank: int) -> list[Attempt]:
    """In the joint graph: the forwards that come of it differ, and are not compared."""
    b = GraphBuilder(ranks=2, group=world_name())
    x, w, dy = b.input("primals_1", [4, 8]), b.input("primals_2", [8, 6]), b.input("tangents_1", [8, 6])
    full = b.gather(x)
    graph = b.returns(b.mm(full, w), b.mm(b.permute(full, [1, 0]), dy))
    config, done = Config(regather="always" if rank else "never"), Attempt()
    with mock.patch.object(agree, "GRACE_S", 0.2):
        for ask in (lambda: pipeline.run_joint(graph, config), agree.agree_again):
            try:
                ask()
            except AsyncTPError as error:
                done = Attempt(f"{type(error).__name__}: {error}", error.report)
            dist.barrier()
    return [done]


def case_one_rank_never(rank: int) -> list[Attempt]:
    return [attempt(program(world_name())) if rank == 0 else Attempt()]


def case_turned_off(rank: int) -> list[Attempt]:
    return [attempt_in_step(program(world_name()), agree=False, coalesce=rank == 0)]


def case_two_groups_of_one_rank(rank: int) -> list[Attempt]:
    """Groups of one rank have no one to ask, and options name other groups on other ranks."""
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank].group_name
    groups = (alone, world_name())
    return [attempt_in_step(program(alone)), attempt_in_step(program(world_name()), groups=groups)]


def case_backend(rank: int) -> list[Attempt]:
    """Through torch.compile: the same options, and others on rank 1. None runs before all have published."""
    publish = agree._publish

    def in_step(*args: Any) -> None:
        publish(*args)
        dist.barrier()

    with mock.patch.object(agree, "_publish", in_step), mock.patch.object(agree, "GRACE_S", 0.2):
        return [compiled_attempt(1), compiled_attempt(2, min_flops=rank)]


def compiled_attempt(matmuls: int, **options: Any) -> Attempt:
    """One program, compiled and run once. It has no pointwise operation, which Inductor would compile in C++."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        x = funcol.all_gather_tensor(x, 0, group)
        for _ in range(matmuls):
            x = x @ w
        return x

    group = dist.group.WORLD
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    try:
        torch.compile(model, backend="asynctp", options=options)(torch.ones(4, 8), torch.ones(8, 8))
    except Exception as error:
        return Attempt(str(error))
    return Attempt("", asynctp_passes.reports()[-1])


def case_cache_hit_on_one_rank(rank: int) -> list[Attempt]:
    """The second time rank 0 finds the graph in its cache, where the pass does not run, and rank 1 compiles it."""
    attempts = []
    for again in (False, True):
        folder = f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}/{rank}{again and rank == 1}"
        with (
            mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
            mock.patch.object(agree, "_ledgers", weakref.WeakKeyDictionary()),  # as in new processes
        ):
            attempts.append(compiled_attempt(3))
        dist.barrier()
    return attempts


CASES: dict[str, Callable[[int], list[Attempt]]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}


def run_case(rank: int, world_size: int) -> dict[str, list[Attempt]]:
    """Every case, with programs that are those of no other case."""
    outcomes = {}
    digests = {name: getattr(pipeline, name) for name in ("_program_digest", "_collectives_digest")}
    for name, case in CASES.items():
        own = {at: lambda *args, of=of, name=name: f"{name}-{of(*args)}" for at, of in digests.items()}
        with (
            mock.patch.multiple(pipeline, **own),
            mock.patch.object(agree, "GRACE_S", 300.0),  # as machines that run tests can be slow
        ):
            outcomes[name] = case(rank)
        dist.barrier()
    return outcomes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Attempt]]]:
    """What each of two ranks saw, by case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        return run_ranks(2, run_case, timeout_s=600)


FINE = {
    "same": 2,
    "static_and_dynamic_sizes": 1,
    "two_configurations_one_after_the_other": 2,
    "two_configurations_on_one_rank_before_the_other_comes": 1,
    "two_configurations_on_one_rank_while_the_other_has_one": 1,
    "one_rank_never": 1,
    "one_rank_looks_at_the_sum": 1,
    "turned_off": 1,
    "two_groups_of_one_rank": 2,
    "cache_hit_on_one_rank": 2,
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", FINE)
def test_no_error_without_a_cause(ranks: list[dict[str, list[Attempt]]], case: str) -> None:
    for outcomes in ranks:
        assert [one.error for one in outcomes[case]] == [""] * FINE[case]


@pytest.mark.ranks
def test_a_rank_that_compiles_alone_waits_for_no_one(ranks: list[dict[str, list[Attempt]]]) -> None:
    (alone,), _ = (outcomes["one_rank_never"] for outcomes in ranks)
    assert alone.seconds < agree.GRACE_S
    assert alone.report is not None
    assert alone.report.fused


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "index", "shown"),
    [
        ("other_options_on_one_rank", 0, "coalesce=True"),
        (
            "other_decisions_on_one_rank",
            0,
            "collective 2: asynctp::all_gather_matmul, products: 1",
        ),
        ("backend", 1, "min_flops=0"),
        ("one_rank_looks_at_a_summed_result", 0, "collective 1: asynctp::matmul_all_reduce, products: 2"),
        ("one_rank_looks_at_a_product", 0, "collective 1: asynctp::matmul_all_reduce, products: 1"),
        ("other_factors_on_one_rank", 0, "asynctp::matmul_all_reduce, products: 2, factors: 1, 0.5"),
        (
            "other_work_before_the_matmul_on_one_rank",
            0,
            "collective 0: asynctp::all_gather_matmul, products: 1, aten.relu.default(collective 0)",
        ),
        ("made_again_on_one_rank", 0, "collective 0: all_gather, KEPT"),
    ],
)
def test_a_difference_is_an_error_on_every_rank(
    ranks: list[dict[str, list[Attempt]]], case: str, index: int, shown: str
) -> None:
    for outcomes in ranks:
        error = outcomes[case][index].error
        assert "the ranks of a group decided differently" in error
        assert "Plan of rank 0:" in error
        assert "Plan of rank 1:" in error
        own, _, theirs = error.partition("Difference:")[2].partition("Plan of rank 1:")
        assert shown in own + theirs


@pytest.mark.ranks
def test_a_rank_that_would_wait_for_one_that_raised_learns_of_it(ranks: list[dict[str, list[Attempt]]]) -> None:
    (lenient,), (strict,) = (outcomes["strict_on_one_rank"] for outcomes in ranks)
    assert strict.error.startswith("StrictError")
    assert lenient.error.startswith("DisagreementError")
    assert "+strict='all'" in lenient.error


@pytest.mark.ranks
def test_what_is_mended_compiles(ranks: list[dict[str, list[Attempt]]]) -> None:
    assert [outcomes["other_options_on_one_rank"][1].error for outcomes in ranks] == ["", ""]


@pytest.mark.ranks
def test_a_rank_that_comes_later_sees_the_difference_and_the_other_at_its_next_compile(
    ranks: list[dict[str, list[Attempt]]],
) -> None:
    early, late = (outcomes["one_rank_later"] for outcomes in ranks)
    assert [bool(one.error) for one in early] == [False, True]
    assert [bool(one.error) for one in late] == [True, False]
    assert early[1].report is not None
    assert early[1].report.fused, "the error is about the program that differs, and not the one being compiled"


@pytest.mark.ranks
def test_cached_and_compiled_agree(ranks: list[dict[str, list[Attempt]]]) -> None:
    for rank, outcomes in enumerate(ranks):
        reports = [one.report for one in outcomes["cache_hit_on_one_rank"]]
        assert [report is not None and report.from_cache for report in reports] == [False, rank == 0]


# --- alone -----------------------------------------------------------------------------------------------------
def test_without_process_groups_nothing_is_asked() -> None:
    assert not dist.is_initialized()
    assert attempt(program("tp")).error == ""


@pytest.mark.parametrize("store", [FakeStore, dist.HashStore])
def test_groups_that_only_pretend_are_not_asked(store: type) -> None:
    with imagined_ranks(2, store()):
        done = attempt(program(world_name()))
    assert done.error == ""
    assert done.report is not None
    assert done.report.fused


def test_a_long_way_is_told_by_a_hash() -> None:
    """Each step takes the one before twice: written out, it would be of 2 ** 40 steps."""
    graphs = []
    for last in (1.0, 2.0):
        b = GraphBuilder(ranks=2)
        scale = b.all_reduce(b.call(torch.ops.aten.amax.default, b.input("z", [4, 32])), "max")
        for _ in range(40):
            scale = b.add(scale, scale)
        scale = b.call(torch.ops.aten.mul.Tensor, scale, last)
        scaled = b.call(torch.ops.aten.mul.Tensor, b.gather(b.input("x", [4, 32])), scale)
        fp8 = b.call(torch.ops.prims.convert_element_type.default, scaled, torch.float8_e4m3fn)
        w = b.input("w", [32, 16], torch.float8_e4m3fn, column_major=True)
        graphs.append(b.returns(b.scaled_mm(fp8, w, b.input("a_scale", []), b.input("b_scale", []))))
    one, other = (run(graph, Config(**QUIET)).fused[0].moved for graph in graphs)
    assert one != other
    assert all(len(text) < 300 for text in (*one, *other))


def test_what_was_published_goes_with_the_store() -> None:
    """Nothing keeps a process group, or its store, alive."""
    store = dist.HashStore()
    agree._ledgers[store] = {}
    held = weakref.ref(store)
    del store
    gc.collect()
    assert held() is None


# --- plans -----------------------------------------------------------------------------------------------------
def test_a_plan() -> None:
    report = run(program("tp"), Config(**QUIET))
    text = plan_of(report, Config(**QUIET), "tp")
    assert text.splitlines()[3:] == [
        "strict='off'",
        "expect=0",
        "min_bytes=0",
        "min_flops=0",
        "coalesce=True",
        "store_scales=True",
        "regather='auto'",
        "group enrolled: True",
        "collective 0: all_reduce, as it is",
        "collective 1: all_reduce, as it is",
        "collective 2: asynctp::all_gather_matmul, products: 1",
        "coalesced max float32: 0 1",
    ]
    assert plan_of(report, Config(**QUIET), "dp").splitlines()[10:] == ["group enrolled: True"], "it has nothing else"


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"strict": "all"}, True),
        ({"coalesce": False}, True),
        ({"groups": ("dp", "tp")}, False),
        ({"groups": "dp"}, True),
        ({"report_file": "rank1.jsonl", "log": True}, False),
    ],
)
def test_what_a_plan_depends_on(changes: dict[str, Any], differs: bool) -> None:
    plans = []
    for options in ({}, changes):
        config = Config(**{**QUIET, "strict": "zero", **options})
        plans.append(plan_of(run(program("tp"), config), config, "tp"))
    assert (plans[0] != plans[1]) is differs


def test_the_program_digest() -> None:
    """The same for other sizes and other names of groups, another one for other ops."""
    digests = [run(graph, Config(**QUIET)).program_digest for graph in (program("tp"), program("1"), program("tp", 8))]
    assert len(set(digests)) == 1
    assert run(other_program("tp"), Config(**QUIET)).program_digest not in digests


def test_the_digest_of_collectives() -> None:
    """The same for other ops, another one for other collectives."""
    graphs = (other_program("tp"), missed_program("1"), program("tp"))
    one, other, more = (run(graph, Config(**QUIET)).collectives_digest for graph in graphs)
    assert one == other != more


def test_large_groups_compare_neighbours() -> None:
    """Among the neighbours of all ranks every difference shows: they are a ring."""
    ranks = tuple(range(0, 2 * agree.LARGE_GROUP + 2, 2))
    asked = {rank: agree._compared_with(Peers(rank, ranks, None)) for rank in ranks}
    assert asked[0] == {2, ranks[-1]}
    assert all(rank in asked[other] for rank in ranks for other in asked[rank])
    assert agree._compared_with(Peers(2, ranks[:3], None)) == {0, 4}


def test_groups_that_nothing_is_decided_about_are_not_asked() -> None:
    b = GraphBuilder(ranks=2, group="dp")
    report = run(b.returns(b.mm(b.input("x", [4, 4]), b.gather(b.input("w", [2, 8])))), Config(**QUIET))
    assert [remark.name for remark in report.remarks] == ["WEIGHT_GATHER"]
    assert not agree._at_stake(report, "dp")
    assert agree._at_stake(run(program("tp"), Config(**QUIET)), "tp")


def test_groups_that_something_is_decided_about_are_asked() -> None:
    """Be it a matmul's collective, or all-reduces that become one with no matmul in sight."""
    b = GraphBuilder(ranks=2)
    maxima = [b.all_reduce(b.call(torch.ops.aten.max.default, b.input(name, [4, 8])), "max") for name in ("x", "y")]
    small = run(b.returns(*maxima), Config(**QUIET))
    assert [entry.collectives for entry in small.coalesced] == [("all_reduce", "all_reduce_1")]
    for report in (run(other_program("tp"), Config(**QUIET)), run(missed_program("tp"), Config(**QUIET)), small):
        assert agree._at_stake(report, "tp")
        assert not agree._at_stake(report, "dp")


# --- nothing holds a process group -----------------------------------------------------------------------------
@pytest.fixture
def world() -> Iterator[None]:
    with imagined_ranks(2):
        yield


@pytest.mark.usefixtures("world")
def test_the_pass_its_configuration_and_reports_hold_no_process_group() -> None:
    """After a run too they pickle, copy and hash, and what comes back is equal."""
    graph_pass = AsyncTPPass(Config(groups=dist.group.WORLD, **QUIET))
    asynctp_passes.clear_reports()
    graph_pass(program(world_name()))
    (report,) = asynctp_passes.reports()
    twins = [pickle.loads(pickle.dumps(graph_pass)), copy.deepcopy(graph_pass)]
    assert {twin.uuid() for twin in twins} == {graph_pass.uuid()}
    assert {twin.config for twin in twins} == {graph_pass.config}
    for value in (graph_pass.config, report):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    reached = reachable([graph_pass, report, *twins])
    assert not [value for value in reached if isinstance(value, dist.ProcessGroup | dist.Store | torch.fx.Node)]


def reachable(values: list[Any]) -> list[Any]:
    """All that objects hold, through attributes and containers, but for classes, functions and modules."""
    found: dict[int, Any] = {}
    stack = list(values)
    while stack:
        value = stack.pop()
        if id(value) not in found and not isinstance(value, type | types.FunctionType | types.ModuleType):
            found[id(value)] = value
            stack.extend(gc.get_referents(value))
    return list(found.values())
