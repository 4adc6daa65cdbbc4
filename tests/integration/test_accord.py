"""Ranks whose programs differ: what changes what they send is done on all or on none, and the values are eager's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from functions import named
from graph_builder import GraphBuilder
from ranks import imagined_ranks, run_ranks
from torch import Tensor
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

import asynctp_passes
from asynctp_passes import Config, DisagreementError, Report, backend, ops, run
from asynctp_passes.config import ConfigError, agree_seconds
from asynctp_passes.ir.records import Answer, Question
from asynctp_passes.ranks import accord
from asynctp_passes.ranks.accord import WARN_S, ask
from asynctp_passes.torch_private import dynamo, inductor_compile, process_groups

QUIET: dict[str, Any] = {"strict": "off"}
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
PATIENT_S, SHORT_S = "120", "2"


def world_name() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


# --- the question: two ranks in one process, which share a store ------------------------------------------------
SUM = "sum: x"
WITH, WITHOUT = Question("g", "forward", "k", (SUM,)), Question("g", "forward", "k")


class Two:
    """Two ranks that ask about their graphs, also at the same time."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.groups = [mock.Mock(), mock.Mock()]
        self.threads = futures.ThreadPoolExecutor(2)
        self.boards: dict[int, accord._Board] = {}

    def ask(self, rank: int, *questions: Question, name: str = "layer", looked_at: Any = (), **options: Any) -> Any:
        """The answers to a rank's questions about a function's graph; the answer to one question."""
        asked, config = [dataclasses.replace(one) for one in questions], Config(**QUIET, **options)
        peers = process_groups.Peers(rank, (0, 1), self.store, self.groups[rank], "1")
        said = accord._said.setdefault(self.groups[rank], accord._Said())
        with _naming, named(name):
            self.boards |= {id(one): accord._Board(peers, said, one, config) for one in asked}
        found = ask(asked, config, looked_at)
        return found[0] if len(found) == 1 else found

    def both(self, *questions: Question, name: str = "layer") -> list[Answer]:
        """The answers to both ranks, which ask at the same time."""
        asked = [self.threads.submit(self.ask, rank, one, name=name) for rank, one in enumerate(questions)]
        return [one.result(60) for one in asked]


_naming = threading.Lock()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    made = Two()
    monkeypatch.setenv("ASYNCTP_AGREE_S", "0.5")
    monkeypatch.setattr(process_groups, "group_timeout_s", lambda group: 1800.0)
    monkeypatch.setattr(accord, "_board", lambda question, config: made.boards[id(question)])
    yield made
    made.threads.shutdown()


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 0.3


def test_all_ranks_do_what_all_of_them_ask_about(two: Two) -> None:
    first, second = two.both(WITH, WITH)
    assert first.agreed == second.agreed == {SUM}
    assert first.accord == second.accord > 0
    assert not first.refused


def test_a_graph_without_deviations_waits_for_nobody_and_has_no_accord(two: Two) -> None:
    with at_once():
        assert two.ask(0, WITHOUT) == Answer()


def test_silence_means_no_and_a_late_peer_obeys(two: Two) -> None:
    assert "rank 1 compiled nothing like it within 0.5" in two.ask(0, WITH).refused[SUM]
    with at_once():
        late = two.ask(1, WITH)
    assert "rank 1 compiled nothing like it" in late.refused[SUM]
    assert not late.accord


def test_a_rank_that_came_as_far_without_it_refuses_it_at_once(two: Two) -> None:
    two.ask(1, WITHOUT)
    with at_once():
        answer = two.ask(0, WITH)
    assert "rank 1 of the group's 2 does not: sum: x" in answer.refused[SUM]
    assert not answer.accord


def test_each_rank_has_its_own_part(two: Two) -> None:
    """The same text on all ranks; a graph of another rank's, as from a cache, is about another part."""
    own = Question("g", "forward", "k", ("own: x",))
    first, second = two.both(dataclasses.replace(own, rank=0), dataclasses.replace(own, rank=1))
    assert first.agreed == second.agreed == {"own: x"}
    assert first.accord == second.accord > 0
    other = two.ask(1, dataclasses.replace(own, rank=0))
    assert "the graph was compiled for rank 0 of the group" in other.refused["own: x"]
    assert not other.accord


def test_a_rank_with_other_collectives_is_named(two: Two) -> None:
    two.ask(1, Question("g", "forward", "other"))
    with at_once():
        answer = two.ask(0, WITH)
    assert "rank 1 of the group's 2 does not: sum: x; it compiled model.py:layer:1 with other collectives" in str(
        answer.refused
    )


def test_what_another_rank_does_instead_is_told(two: Two) -> None:
    two.ask(1, dataclasses.replace(WITH, deviations=("sum: y",)))
    assert "it does: sum: y" in two.ask(0, WITH).refused[SUM]


def test_a_rank_that_compiles_the_same_anew_alone_has_its_yes_at_once(two: Two) -> None:
    before, _ = two.both(WITH, WITH)
    for _ in range(3):
        with at_once():
            assert two.ask(0, WITH) == before


def test_a_rank_that_compiles_something_else_anew_alone_waits_and_does_without(two: Two) -> None:
    """It meets unlike calls then: its accord is not that of the others."""
    before, _ = two.both(WITH, WITH)
    after = two.ask(0, dataclasses.replace(WITH, deviations=("sum: y",)))
    assert "rank 1 compiled nothing like it" in str(after.refused)
    assert after.accord == 0 != before.accord


def test_lone_compiles_of_known_forms_shift_nothing(two: Two) -> None:
    """Rank 0 compiled the first form three times before both come to the second."""
    two.both(WITH, WITH)
    two.ask(0, WITH)
    two.ask(0, WITH)
    other = dataclasses.replace(WITH, deviations=("sum: y",))
    assert [answer.agreed for answer in two.both(other, other)] == [{"sum: y"}] * 2


def test_forms_of_one_function_have_accords_of_their_own(two: Two) -> None:
    """Each is agreed on. Whenever ranks run them unlike, they meet and raise."""
    other = dataclasses.replace(WITH, deviations=("sum: y",))
    assert len({answer.accord for one in (WITH, other) for answer in two.both(one, one)}) == 2


def test_functions_with_the_same_deviations_have_one_accord(two: Two) -> None:
    """They send the same, so that ranks may run them unlike."""
    accords = {answer.accord for name in ("one", "other") for answer in two.both(WITH, WITH, name=name)}
    assert len(accords) == 1


def test_the_text_of_an_accord_is_in_the_store(two: Two) -> None:
    answer, _ = two.both(WITH, WITH)
    assert two.store.get(f"asynctp/accords/{answer.accord}").decode() == "model.py:layer:1 (forward): sum: x"


def test_what_was_agreed_on_jointly_is_in_the_accords_of_both_halves(two: Two) -> None:
    saved = Question("g", "joint", "j", ("save: all_reduce 0",), done=True)
    refused = dataclasses.replace(saved, done=False)
    accords = {}
    for phase in ("forward", "backward"):
        for joint in ((), (saved,), (refused,)):
            accords[phase, joint] = two.ask(0, Question("g", phase, "k", joint=joint)).accord
    assert accords["forward", ()] == accords["backward", (refused,)] == 0
    assert len({accords["forward", (saved,)], accords["backward", (saved,)], 0}) == 3


def test_all_or_none_of_a_graphs_deviations_are_done(two: Two) -> None:
    many = dataclasses.replace(WITH, deviations=(SUM, "sum: y"))
    two.ask(1, WITH)
    answer = two.ask(0, many)
    assert not answer.agreed
    assert set(answer.refused) == {SUM, "sum: y"}


def test_a_gather_that_one_rank_alone_keeps_ends_no_deviation(two: Two) -> None:
    """Gathers that are kept are asked about one by one, in the same round, and are in no accord: the wire has them."""
    more = dataclasses.replace(WITH, keeps=("keep: all_gather 0", "keep: all_gather 1"))
    fewer = dataclasses.replace(WITH, keeps=("keep: all_gather 0",))
    first, second = two.both(more, fewer)
    assert first.agreed == second.agreed == {SUM, "keep: all_gather 0"}
    assert "keep: all_gather 1" in first.refused
    alone, _ = two.both(WITH, WITH)
    assert first.accord == second.accord == alone.accord
    assert more.with_answer(first) == dataclasses.replace(more, done=True, kept=fewer.keeps)


def test_groups_answer_apart(two: Two) -> None:
    """The other rank does without it in one of two groups."""
    both = [WITH, dataclasses.replace(WITH, group="h", communicates="h")]
    other = dataclasses.replace(both[1], deviations=())

    def two_groups(rank: int, *asked: Question) -> list[Answer]:
        return [two.ask(rank, one, name=one.group) for one in asked]

    later = two.threads.submit(two_groups, 1, WITH, other)
    first, second = two_groups(0, *both)
    later.result(60)
    assert first.agreed == {SUM}
    assert first.accord != second.accord == 0
    assert "rank 1 of the group's 2 does not" in second.refused[SUM]


def test_a_backward_from_the_cache_is_posted_first_and_only_looked_at(two: Two) -> None:
    """Where both ranks have forward and backward from the cache, each finds the other's when the forward is agreed."""
    backward = Question("g", "backward", "b", ("sum: z",))
    with at_once():
        _, looked = two.ask(0, WITHOUT, backward, looked_at=[backward])
    assert "not known yet" in looked.refused["sum: z"]
    _, answer = two.ask(1, WITHOUT, backward, looked_at=[backward])
    assert answer.agreed == {"sum: z"}


def test_what_is_only_looked_at_is_not_known_and_does_not_stand(two: Two) -> None:
    """Not even without the deviations: the others may come to a yes."""
    backward = Question("g", "backward", "b", ("sum: z",))
    _, looked = two.ask(0, WITHOUT, backward, looked_at=[backward])
    assert not looked.known
    assert two.ask(1, WITHOUT).known


@pytest.mark.parametrize("options", [{"deviate": False}, {"suppress_errors": True}])
def test_a_rank_that_may_not_deviate_refuses_all_and_says_so(two: Two, options: dict[str, Any]) -> None:
    """With suppress_errors its compile may fail after a yes, and what it then runs would meet what others agreed on."""
    config = {name: value for name, value in options.items() if name == "deviate"}
    with at_once(), mock.patch.object(torch._dynamo.config, "suppress_errors", "suppress_errors" in options):
        own = two.ask(1, WITH, **config)
    with at_once():
        told = two.ask(0, WITH).refused[SUM]
    name = "Config(deviate=False)" if config else "suppress_errors"
    assert name in own.refused[SUM]
    assert name in told.partition("on rank 1: ")[2]


def test_ranks_of_other_versions_or_options_do_not_do_the_same(two: Two) -> None:
    with mock.patch.object(accord, "sources_digest", return_value="older"):
        two.ask(1, WITH)
    told = two.ask(0, WITH).refused[SUM]
    assert "with other versions or options: asynctp older" in told


def test_a_rank_that_let_one_wait_pass_costs_little_then(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accord, "LATE_S", 0.0)
    two.ask(0, WITH)
    monkeypatch.setenv("ASYNCTP_AGREE_S", "60")
    with at_once():
        two.ask(0, dataclasses.replace(WITH, deviations=("sum: y",)))


def test_a_group_whose_life_is_not_known_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = process_groups.Peers(0, (0, 1), dist.HashStore(), mock.Mock(), life=None)
    monkeypatch.setattr(process_groups, "peers_of", lambda name: peers)
    (answer,) = ask([WITH], Config(**QUIET))
    assert "it does not say which of its groups this is" in answer.refused[SUM]
    assert peers.store.num_keys() == 0


def test_a_store_that_fails_refuses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    store = mock.Mock()
    store.set.side_effect = RuntimeError("connection closed")
    monkeypatch.setattr(
        process_groups, "peers_of", lambda name: process_groups.Peers(0, (0, 1), store, mock.Mock(), "1")
    )
    (answer,) = ask([WITH], Config(**QUIET))
    assert "connection closed" in answer.refused[SUM]


def test_a_store_that_fails_takes_back_no_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may count on it, and then send something else than this rank."""
    store = mock.Mock(wraps=dist.HashStore())
    store.check.side_effect = RuntimeError("connection closed")
    monkeypatch.setattr(process_groups, "group_timeout_s", lambda group: 1800.0)
    monkeypatch.setattr(
        process_groups, "peers_of", lambda name: process_groups.Peers(0, (0, 1), store, mock.Mock(), "1")
    )
    with pytest.raises(DisagreementError, match=r"connection closed.*Other ranks may count on this one to sum: x"):
        ask([WITH], Config(**QUIET))


def test_after_a_yes_a_rank_on_which_asynctp_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "peers_of", lambda name: mock.Mock())
    for answers in (None, [Answer(frozenset([SUM]))]):
        with pytest.raises(DisagreementError, match="all ranks have agreed to sum: x"):
            accord.refuse([WITH], answers)
    accord.refuse([WITH, WITHOUT], [Answer(refused={SUM: "no"}), Answer()])


def test_a_large_group_is_asked_by_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look asks a bounded number of ranks for their forms."""
    calls: list[int] = []
    for world in (2, 1000):
        store = mock.Mock()
        store.check.return_value, store.add.return_value = False, 1
        peers = process_groups.Peers(0, tuple(range(world)), store, mock.Mock(), "1")
        board = accord._Board(peers, accord._Said(), WITH, Config(**QUIET))
        assert board.is_open()
        calls.append(len(store.method_calls))
    assert calls[1] - calls[0] == accord.LOOKED_AT - 1


# --- graphs ----------------------------------------------------------------------------------------------------
def quantized(group: str, *, factor: float = 2.0, rows: int = 4, quantize: bool = True) -> Graph:
    """A gather, then (on a rank that quantizes) a scaled cast to fp8, and its matmul."""
    b = GraphBuilder(ranks=2, group=group)
    scale = b.all_reduce(b.call(aten.amax.default, b.input("z", [4, 32])), "max")
    whole = b.gather(b.input("x", [rows, 32]))
    if not quantize:
        return b.returns(b.mm(whole, b.input("w", [32, 16])), scale)
    scaled = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, whole, scale), factor)
    fp8 = b.call(torch.ops.prims.convert_element_type.default, scaled, torch.float8_e4m3fn)
    w = b.input("w", [32, 16], torch.float8_e4m3fn, column_major=True)
    return b.returns(b.scaled_mm(fp8, w, b.input("a_scale", []), b.input("b_scale", [])))


def plain(group: str) -> Graph:
    b = GraphBuilder(ranks=2, group=group)
    return b.returns(b.mm(b.gather(b.input("x", [4, 8])), b.input("w", [8, 12])))


def two_sums(group: str, *, look: bool = False, factor: float = 1.0) -> Graph:
    """The sum of two reduced products, of which a rank may look at the first one."""
    b = GraphBuilder(ranks=2, group=group)
    products = [b.mm(b.input(f"x{index}", [4, 8]), b.input(f"w{index}", [8, 6])) for index in range(2)]
    first, second = (b.all_reduce(one) for one in products)
    total = b.add(first if factor == 1 else b.call(aten.mul.Tensor, first, factor), second)
    return b.returns(total, *([b.relu(first)] if look else []))


def late(group: str, *, computes: bool) -> Graph:
    """A gather whose weight is reduced after it; a rank may compute something in between, which goes to the shard."""
    b = GraphBuilder(ranks=2, group=group)
    whole, weight = b.gather(b.input("x", [4, 8])), b.all_reduce(b.input("w", [8, 8]))
    return b.returns(b.mm(b.relu(whole) if computes else whole, weight))


def maxima(group: str) -> Graph:
    """Two small all-reduces, which can be one."""
    b = GraphBuilder(ranks=2, group=group)
    found = [b.call(aten.max.default, b.input(name, [4, 8])) for name in ("x", "w")]
    return b.returns(*(b.all_reduce(one, "max") for one in found))


# --- on ranks --------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Attempt:
    """What came of one call of the pass on one rank, and how long it took."""

    report: Report
    seconds: float
    said: list[str]

    @property
    def deviations(self) -> list[str]:
        """The deviations that are done."""
        return [text for one in self.report.questions if one.done for text in one.deviations]

    @property
    def notes(self) -> str:
        return "\n".join(map(str, self.report.notes))


def attempt(graph: Graph, **options: Any) -> Attempt:
    with heard() as said:
        start = time.monotonic()
        report = run(graph, Config(**{**QUIET, **options}))
        return Attempt(report, time.monotonic() - start, said)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings of the question."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asynctp_passes.ranks").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("asynctp_passes.ranks").removeHandler(handler)


def case_same(rank: int) -> list[Attempt]:
    return [attempt(quantized(world_name())), attempt(two_sums(world_name())), attempt(maxima(world_name()))]


def case_static_and_other_sizes(rank: int) -> list[Attempt]:
    return [attempt(quantized(world_name(), factor=3.0, rows=4 + rank))]


def case_other_number(rank: int) -> list[Attempt]:
    return [attempt(quantized(world_name(), factor=40.0 + rank))]


def case_one_quantizes(rank: int) -> list[Attempt]:
    return [attempt(quantized(world_name(), factor=6.0, quantize=rank == 0))]


def case_one_looks(rank: int) -> list[Attempt]:
    return [attempt(two_sums(world_name(), look=rank == 0, factor=0.5))]


def case_other_factor(rank: int) -> list[Attempt]:
    return [attempt(two_sums(world_name(), factor=0.25 * 0.5**rank))]


def case_other_options(rank: int) -> list[Attempt]:
    """The life of a group is that of its answers: what the default group refused does not bind another one."""
    group = dist.new_group(list(range(dist.get_world_size())))
    return [attempt(maxima(str(group.group_name)), skip="bucket" if rank else ())]


def case_late_alone(rank: int) -> list[Attempt]:
    """All gather late, and rank 0 also moves what it computes: without that it does not gather late either."""
    return [attempt(late(world_name(), computes=rank == 0))]


def case_other_gpus(rank: int) -> list[Attempt]:
    """Each rank names other GPUs that share memory with its own."""
    with on_gpus("", f"one of 2 GPUs that share memory ({rank})"):
        return [attempt(two_sums(world_name(), factor=0.125))]


def case_same_gpus(rank: int) -> list[Attempt]:
    """All ranks name the same GPUs."""
    with on_gpus("", "one of 2 GPUs that share memory (0)"):
        return [attempt(two_sums(world_name(), factor=0.03125))]


@contextlib.contextmanager
def on_gpus(reason: str, alike: str) -> Iterator[None]:
    """This rank uses a GPU, and knows so much of whether its calls will be compared."""
    used = mock.patch.object(torch.cuda, "is_initialized", return_value=True)
    with used, mock.patch.object(ops, "compares_calls", return_value=(reason, alike)):
        yield


def case_nothing_compares(rank: int) -> list[Attempt]:
    """Rank 0 has no triton."""
    with on_gpus("triton is missing" if rank == 0 else "", ""):
        return [attempt(two_sums(world_name(), factor=0.0625))]


def case_again_on_one_rank(rank: int) -> list[Attempt]:
    """What was accepted holds for a recompile, and waits for nobody."""
    count = 1 + 2 * (rank == 0)
    found: list[Attempt] = []
    for _ in range(count):
        with named("quantized"):
            found.append(attempt(quantized(world_name(), factor=7.0)))
    return found


def case_no_deviation(rank: int) -> list[Attempt]:
    """Only rank 0 compiles it."""
    return [attempt(plain(world_name()))] if rank == 0 else []


def case_other_graphs(rank: int) -> list[Attempt]:
    """Rank 1 compiles nothing like it: it costs the wait once, and the next ones little."""
    group = str(dist.new_group(list(range(dist.get_world_size()))).group_name)
    with mock.patch.dict(os.environ, ASYNCTP_AGREE_S=SHORT_S):
        if rank:
            return []
        return [attempt(quantized(group)), attempt(two_sums(group)), attempt(maxima(group))]


CASES: dict[str, Callable[[int], list[Attempt]]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}


def run_cases(rank: int, world_size: int) -> dict[str, list[Attempt]]:
    outcomes = {}
    with mock.patch.dict(os.environ, ASYNCTP_AGREE_S=PATIENT_S):
        for name, case in CASES.items():
            outcomes[name] = case(rank)
            dist.barrier()
    return outcomes


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, list[Attempt]]]:
    """What each of two or four ranks saw, by case."""
    return run_ranks(request.param, run_cases, timeout_s=300)


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["same", "static_and_other_sizes", "again_on_one_rank", "same_gpus"])
def test_what_all_ranks_do_is_done(ranks: list[dict[str, list[Attempt]]], case: str) -> None:
    for outcomes in ranks:
        for one in outcomes[case]:
            assert len(one.deviations) == 1
            assert one.report.notes == ()
            assert not one.said
            assert one.seconds < float(PATIENT_S) / 2
    assert len({tuple(map(tuple, (one.deviations for one in outcomes[case][:1]))) for outcomes in ranks}) == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "outcomes_of", "who"),
    [
        ("other_number", ["MISSED", "MISSED"], "hoist"),
        ("one_quantizes", ["MISSED", "FUSED"], "hoist"),
        ("one_looks", ["FUSED", "FUSED"], "sum"),
        ("other_factor", ["FUSED", "FUSED"], "sum"),
        ("other_options", ["SKIPPED", "SKIPPED"], "bucket"),
        ("other_gpus", ["FUSED", "FUSED"], "sum"),
        ("nothing_compares", ["FUSED", "FUSED"], "sum"),
    ],
)
def test_what_one_rank_does_not_do_is_done_on_none(
    ranks: list[dict[str, list[Attempt]]], case: str, outcomes_of: list[str], who: str
) -> None:
    refused = 0
    for rank, outcomes in enumerate(ranks):
        (one,) = outcomes[case]
        assert one.deviations == []
        assert one.seconds < float(PATIENT_S) / 2, "a rank that shows that it lacks it is not waited for"
        assert {remark.outcome for remark in one.report.remarks if remark.code != "ATP002"} <= {
            outcomes_of[min(rank, 1)]
        }
        refused += bool(one.report.notes)
        if one.report.notes:
            assert f"{who}: " in one.notes
            assert "rank" in one.notes
    assert refused, "whoever had it is told who does not"


@pytest.mark.ranks
def test_a_chain_deviates_in_all_or_in_nothing(ranks: list[dict[str, list[Attempt]]]) -> None:
    for outcomes in ranks:
        (one,) = outcomes["late_alone"]
        assert one.deviations == []
        assert [remark.code for remark in one.report.missed] == ["ATP212"]


@pytest.mark.ranks
def test_the_reason_names_rank_and_difference(ranks: list[dict[str, list[Attempt]]]) -> None:
    (one,) = ranks[0]["other_number"]
    (missed,) = one.report.missed
    assert (missed.code, missed.name) == ("ATP212", "RANKS_DIFFER")
    assert "hoist: all_gather 1 sends" in missed.message
    assert (40.0).hex() in missed.message
    assert any((40.0 + rank).hex() in missed.message for rank in (1, 2, 3)), "what another rank does instead"


@pytest.mark.ranks
def test_a_graph_without_deviations_waits_for_nobody(ranks: list[dict[str, list[Attempt]]]) -> None:
    (alone,) = ranks[0]["no_deviation"]
    assert alone.report.fused
    assert alone.seconds < float(PATIENT_S) / 4


@pytest.mark.ranks
def test_ranks_with_other_graphs_cost_one_wait_and_are_named(ranks: list[dict[str, list[Attempt]]]) -> None:
    first, *others = ranks[0]["other_graphs"]
    assert first.seconds >= float(SHORT_S)
    assert any("rank" in text and "ASYNCTP_AGREE_S" in text for text in first.said)
    assert [one.said for one in others] == [[], []], "once"
    assert all(one.deviations == [] and one.notes for one in (first, *others))


# --- compiled programs -----------------------------------------------------------------------------------------
Program = Callable[..., Any]


def gather(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD)


def reduced(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def relu_on_one(rank: int) -> Program:
    return lambda x, w: torch.relu(gather(x)) @ w if rank == 0 else gather(x) @ w


def own_factor_after_gather(rank: int) -> Program:
    return lambda x, w: (gather(x) * (rank + 2.0)) @ w


def rows_in_own_order(rank: int) -> Program:
    def program(x: Tensor, w: Tensor) -> Tensor:
        whole = gather(x)
        return (whole.view(-1, 2, 2, 8).transpose(1, 2).reshape(-1, 8) if rank else whole) @ w

    return program


def products_in_own_order(rank: int) -> Program:
    def program(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        product = product.view(2, 2, -1).transpose(0, 1).reshape(4, -1) if rank else product
        return reduced(product)

    return program


def own_factor_before_sum(rank: int) -> Program:
    return lambda x, w: reduced((x @ w) * 2.0**rank)


def one_logs_a_sum(rank: int) -> Program:
    def program(x: Tensor, w: Tensor) -> Any:
        first, second = reduced(x @ w), reduced((x + 1) @ w)
        return (first + second, first.amax()) if rank == 0 else (first + second, first.new_zeros(()))

    return program


def graph_break_on_one(rank: int) -> Program:
    def program(x: Tensor, w: Tensor) -> Tensor:
        first = reduced(x @ w) + reduced((x + 1) @ w)
        if rank == 0:
            torch._dynamo.graph_break()
        return first + gather(x)[:4] @ w

    return program


def only_one_multiplies(rank: int) -> Program:
    return lambda x, w: gather(x) @ w if rank == 0 else gather(x) * 1.0


PROGRAMS = (
    *(relu_on_one, own_factor_after_gather, rows_in_own_order, products_in_own_order, own_factor_before_sum),
    *(one_logs_a_sum, graph_break_on_one, only_one_multiplies),
)


def compare(rank: int, world_size: int, seconds: str) -> dict[str, str]:
    """What is wrong with each program when compiled; of rank 0 the first is compiled twice, for other sizes."""
    torch.manual_seed(0)
    w = torch.randn(8, 8)
    torch.manual_seed(1 + rank)
    x = torch.randn(4, 8)
    wrong: dict[str, str] = {}
    with mock.patch.dict(os.environ, ASYNCTP_AGREE_S=seconds), torch.no_grad():
        for make in PROGRAMS:
            program = make(rank)
            torch._dynamo.reset()
            compiled = torch.compile(program, backend="asynctp", options={**QUIET, "fallback_by_default": True})
            want, got = program(x, w), compiled(x, w)
            for expected, found in zip(flat(want), flat(got), strict=True):
                if not torch.allclose(expected, found, atol=1e-4):
                    wrong[make.__name__] = f"{(expected - found).abs().max()}"
            dist.barrier()
    return wrong


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_whose_programs_differ_get_eager_values(count: int) -> None:
    for wrong in run_ranks(count, compare, "3", timeout_s=400):
        assert wrong == {}


def cached(rank: int, world_size: int, folder: str) -> list[tuple[bool, bool, int]]:
    """Rank 0 finds in its cache what it summed up before, and rank 1 looks at a part of the sum now.

    In new processes, as far as the vote goes: with a group of its own for each round.
    """
    found = []
    x, w = torch.ones(4, 8) * (rank + 1), torch.eye(8)
    for again in (False, True):
        looks = again and rank == 1

        def program(x: Tensor, w: Tensor, looks: bool = looks) -> Any:
            first, second = reduced(x @ w), reduced((x + 1) @ w)
            return (first + second, first.amax()) if looks else (first + second,)

        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        place = f"{folder}/{rank}{looks}"
        with (
            mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=place, ASYNCTP_AGREE_S=SHORT_S if again else PATIENT_S),
            mock.patch.object(process_groups, "group_generation", return_value=f"round {again}"),
            mock.patch.object(accord, "_said", type(accord._said)()),
            mock.patch.object(backend, "_cached_in_vain", wraps=backend._cached_in_vain) as in_vain,
            torch.no_grad(),
        ):
            compiled = torch.compile(program, backend="asynctp", options={**QUIET, "fallback_by_default": True})
            got = compiled(x, w)[0]
        reports = asynctp_passes.reports()
        right = torch.allclose(got, program(x, w)[0])
        assert [report.from_cache for report in reports] == [False], "what does not run is not reported"
        found.append((right, in_vain.called, int(reports[-1].questions[0].done)))
        dist.barrier()
    return found


@pytest.mark.ranks
def test_a_graph_from_the_cache_that_ranks_do_not_share_is_compiled_again(tmp_path: Any) -> None:
    first, second = run_ranks(2, cached, str(tmp_path), timeout_s=300)
    assert first == [(True, False, 1), (True, True, 0)]
    assert second == [(True, False, 1), (True, False, 0)]


def half_cached(rank: int, world_size: int, folder: str) -> tuple[list[bool], bool, list[int]]:
    """Twice the same graph; the second time rank 0 has it in its cache, and rank 1 has lost that."""
    cached, accords, numbers = [], list[int](), accord.number_of
    x, w = torch.ones(4, 8) * (rank + 1), torch.eye(8)

    def program(x: Tensor, w: Tensor) -> Tensor:
        return reduced(x @ w) + reduced((x + 1) @ w)

    def number_of(*args: Any) -> int:
        accords.append(numbers(*args))
        return accords[-1]

    for again in (False, True):
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        place = f"{folder}/{rank}{again and rank == 1}"
        with (
            mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=place, ASYNCTP_AGREE_S=PATIENT_S),
            mock.patch.object(accord, "number_of", number_of),
            mock.patch.object(backend, "_cached_in_vain", wraps=backend._cached_in_vain) as in_vain,
            torch.no_grad(),
        ):
            torch.compile(program, backend="asynctp", options={**QUIET, "fallback_by_default": True})(x, w)
        cached.append(asynctp_passes.reports()[-1].from_cache)
    return cached, in_vain.called, accords


@pytest.mark.ranks
def test_a_rank_that_has_a_graph_in_its_cache_agrees_with_one_that_compiles_it(tmp_path: Any) -> None:
    first, second = run_ranks(2, half_cached, str(tmp_path), timeout_s=300)
    assert (first[:2], second[:2]) == (([False, True], False), ([False, False], False))
    assert len({*first[2], *second[2]}) == 1, "the accord is the same, so errors find what it is about"


# --- alone -----------------------------------------------------------------------------------------------------
def test_a_graph_that_does_not_stand_is_compiled_again() -> None:
    """Inductor tells the strides of an inference graph's results once, and asserts that none are told yet."""
    answers: list[bool] = []

    def stands(end: bool, again: bool) -> bool:
        answers.append(end)
        return len(answers) > 1

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return inductor_compile.compile_graph(graph, inputs, {}, stands, {})

    torch._dynamo.reset()
    with torch.no_grad():
        x = torch.rand(3, 2)
        assert torch.equal(torch.compile(lambda x: x.t() + 1, backend=backend)(x), x.t() + 1)
    assert answers == [False, False, True]


def test_without_process_groups_nothing_is_asked() -> None:
    assert not dist.is_initialized()
    assert attempt(quantized("tp")).deviations
    assert not attempt(quantized("tp"), deviate=False).deviations


@pytest.mark.parametrize("store", [FakeStore, dist.HashStore])
def test_groups_that_only_pretend_are_not_asked(store: type) -> None:
    with imagined_ranks(2, store()):
        done = attempt(quantized(world_name()))
    assert done.deviations
    assert done.seconds < WARN_S


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
def test_a_bad_wait_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ASYNCTP_AGREE_S"):
        Config.from_options(environ={"ASYNCTP_AGREE_S": text})
    assert agree_seconds({}) == 30


def test_a_long_way_is_told_by_a_hash() -> None:
    """Each step takes the one before twice: written out, it would be of 2 ** 40 steps."""
    found = []
    for last in (1.0, 2.0):
        b = GraphBuilder(ranks=2)
        scale = b.all_reduce(b.call(aten.amax.default, b.input("z", [4, 32])), "max")
        for _ in range(40):
            scale = b.add(scale, scale)
        scaled = b.call(aten.mul.Tensor, b.gather(b.input("x", [4, 32])), b.call(aten.mul.Tensor, scale, last))
        fp8 = b.call(torch.ops.prims.convert_element_type.default, scaled, torch.float8_e4m3fn)
        w = b.input("w", [32, 16], torch.float8_e4m3fn, column_major=True)
        found.append(attempt(b.returns(b.scaled_mm(fp8, w, b.input("a_scale", []), b.input("b_scale", [])))).deviations)
    assert found[0] != found[1]
    assert all(len(text) < 600 for texts in found for text in texts)


# --- the function that is compiled ---
def test_wrappers_of_dynamo_have_the_name_of_the_function_in_them() -> None:
    """Dynamo compiles partials and functions under `no_grad` in one function of its own."""
    found: list[dynamo.CompiledFunction | None] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found.append(dynamo.compiled_function())
        return graph.forward

    def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    partial = functools.partial(scaled, factor=2)
    for function in (partial, torch.no_grad()(partial), torch.nn.Sequential(torch.nn.ReLU())):
        torch.compile(function, backend=backend)(torch.ones(2))
    names = [one.name.rpartition(":")[0] for one in found if one is not None]
    assert names == [*["integration/test_accord.py:scaled"] * 2, "modules/container.py:forward"]
