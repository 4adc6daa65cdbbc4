"""Two ranks in one process, which vote one after the other: what each posts, the other reads in later graphs."""

from __future__ import annotations

import dataclasses
import time
from concurrent import futures
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from functions import named

from asynctp_passes import Config, DisagreementError, compat
from asynctp_passes.agreement import ledgers, polls
from asynctp_passes.agreement.ledgers import LOOKED_AT, Ledger
from asynctp_passes.agreement.polls import Poll
from asynctp_passes.agreement.vote import vote
from asynctp_passes.ir.records import Ballot

QUIET: dict[str, Any] = {"strict": "off", "log": False, "trace": False}
PATIENT_S = "120"
SUM = "sum: x"
WITH, WITHOUT = Ballot("g", "fk", (SUM,)), Ballot("g", "fk")
OTHER = Ballot("g", "fother")
"""Graphs with a deviation, with the same collectives and no deviation, and with other collectives."""


class Two:
    """Two ranks that compile functions, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ASYNCTP_AGREE_S", "0.5")
        store = dist.HashStore()
        self.ledgers = [Ledger(store, rank, (0, 1), "1") for rank in (0, 1)]

    def vote(
        self, rank: int, name: str, *ballots: Ballot, deviate: bool = True, **facts: Any
    ) -> dict[tuple[str, str], str | None]:
        with mock.patch.object(ledgers, "of_group", return_value=self.ledgers[rank]), named(name, **facts):
            return vote(ballots, Config(**QUIET, deviate=deviate))

    def post(self, rank: int, name: str, *ballots: Ballot, **facts: Any) -> None:
        """Post without waiting, as a rank that votes at the same time."""
        with mock.patch.object(ledgers, "of_group", return_value=self.ledgers[rank]), named(name, **facts):
            polls.post(ballots, Config(**QUIET))

    def lack(self, rank: int, name: str) -> None:
        """Post that a rank compiles the function anew, without the deviation."""
        self.post(rank, name, WITHOUT)
        text = polls.with_provenance(SUM, Config(**QUIET))
        Poll(self.ledgers[rank], "g", "asynctp/1/graph/fk", f"model.py:{name}:1", 0, text).say_lacked()

    def both_do(self, name: str) -> None:
        """Both ranks compile the function with the deviation."""
        self.post(1, name, WITH)
        assert self.vote(0, name, WITH) == {("g", SUM): None}
        ledger, (_, number) = self.ledgers[1], self.ledgers[1].last["asynctp/1/graph/fk"]
        assert number == 0
        text = polls.with_provenance(SUM, Config(**QUIET))
        ledger.done["graph/f", f"model.py:{name}:1"] = {("asynctp/1/graph/fk", text): True}
        ledger.sets["asynctp/1/graph/fk"] = {frozenset([text])}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Two:
    return Two(monkeypatch)


def test_silence_in_a_first_graph_means_no(two: Two) -> None:
    """A peer that comes late obeys."""
    assert "rank 1 compiled nothing like it" in str(two.vote(0, "two", WITH)["g", SUM])
    assert "rank 1 compiled nothing like it" in str(two.vote(1, "two", WITH)["g", SUM])


def test_a_silent_rank_may_run_another_function(two: Two) -> None:
    """With the same collectives: then this rank does what all have agreed on there, and a late peer has to."""
    two.both_do("one")
    assert two.vote(0, "two", WITH) == {("g", SUM): None}
    with pytest.raises(DisagreementError, match="others do it in this function"):
        two.vote(1, "two", WITHOUT)


def test_a_rank_without_it_in_another_function_needs_its_peers_there(two: Two) -> None:
    two.both_do("one")
    with pytest.raises(DisagreementError, match=r"rank 1 did not compile model.py:two:1, and may run another function"):
        two.vote(0, "two", WITHOUT)
    assert two.vote(1, "two", WITHOUT) == {}, "rank 0 is known to have compiled it"


def test_what_a_silent_rank_runs_has_to_be_sure(two: Two) -> None:
    """Some functions with these collectives have the sum, others do not."""
    two.both_do("one")
    two.ledgers[0].sets["asynctp/1/graph/fk"].add(frozenset())
    with pytest.raises(DisagreementError, match="rank 1 may run one with it, or one without it"):
        two.vote(0, "two", WITH)


def test_votes_are_of_one_graph(two: Two) -> None:
    """A rank that has it only when it compiles the function anew did not have it before."""
    two.post(1, "one", WITHOUT)
    two.post(1, "one", WITH)
    assert "rank 1 of the group's 2 does not" in str(two.vote(0, "one", WITH)["g", SUM])


def test_recompiles_of_one_rank_shift_nothing(two: Two) -> None:
    """It compiles the function anew by itself, and can do the same; then both compile it without."""
    two.both_do("one")
    assert two.vote(1, "one", WITH) == {("g", SUM): None}
    two.ledgers[1].lacked.clear()
    two.lack(1, "one")
    assert two.vote(0, "one", WITHOUT) == {}


@pytest.mark.parametrize("cached", [WITH, WITHOUT], ids=["with", "without"])
def test_a_rank_that_told_it_does_without_does_not_change_its_mind(two: Two, cached: Ballot) -> None:
    """Its graph from a cache was refused, and is compiled anew: the peers have heard of the one from the cache."""
    two.both_do("one")
    two.lack(1, "one")
    two.vote(0, "one", cached)
    two.ledgers[0].discount("asynctp/1/graph/fk")
    assert "the other ranks know that this one compiles" in str(two.vote(0, "one", WITH)["g", SUM])


def test_a_graph_that_one_rank_compiled_alone_has_no_number(two: Two) -> None:
    """The next one of that rank, which may not be able to do the same, is the one that the others wait for."""
    two.both_do("one")
    assert two.vote(1, "one", WITH) == {("g", SUM): None}
    two.post(0, "one", WITH)
    text = polls.with_provenance(SUM, Config(**QUIET))
    assert Poll(two.ledgers[0], "g", "asynctp/1/graph/fk", "model.py:one:1", 1, text).missing() == [1]
    two.post(1, "one", WITH)
    assert two.ledgers[1].others_came("asynctp/1/graph/fk")


@pytest.mark.parametrize(("most", "wanted"), [(None, [3, 200]), (1, [3]), (LOOKED_AT, [3, 200])])
def test_many_ranks_are_asked_at_once(two: Two, most: int | None, wanted: list[int]) -> None:
    """The store answers for all ranks of a block; one by one it is asked where one of them is missing."""
    ledger = two.ledgers[0]
    poll = Poll(ledger, "g", "asynctp/1/graph/fk", "model.py:one:1", 0, SUM)
    for rank in set(range(512)) - {3, 200}:
        ledger.store.set(f"{poll.place}/in/0/{rank}", "1")
    asked, check = list[int](), ledger.store.check
    store = mock.Mock(check=lambda keys: (asked.append(len(keys)), check(keys))[1])
    with mock.patch.object(ledger, "ranks", tuple(range(512))), mock.patch.object(ledger, "store", store):
        assert poll.missing(most) == wanted
    assert len(asked) <= 512 // LOOKED_AT + 2 * LOOKED_AT


def test_a_refused_graph_from_a_cache_is_counted_once(two: Two) -> None:
    """It is compiled later, its backward perhaps never: that of another function is no substitute."""
    two.post(1, "one", WITH)
    ledger, key = two.ledgers[1], "asynctp/1/graph/fk"
    ledger.discount(key)
    ledger.discount(key)
    for name in ("two", "one"):
        two.post(1, name, WITH)
        assert ledger.last[key] == (f"model.py:{name}:1", 0)
        assert ledger.store.add(f"{key}/model.py:{name}:1/shown/0", 0) == 1


def test_a_rank_that_was_late_is_waited_for_where_it_could_not_obey(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its silence would not refuse what all agreed on in another function."""
    monkeypatch.setattr(polls, "LATE_S", 0.0)
    two.both_do("one")
    two.ledgers[0].late.add(1)
    start = time.monotonic()
    assert two.vote(0, "two", WITH) == {("g", SUM): None}
    assert time.monotonic() - start >= 0.5


def test_a_function_that_is_compiled_anew_does_the_same(two: Two) -> None:
    """A peer that is silent runs the earlier graph."""
    two.both_do("one")
    assert two.vote(0, "one", WITH) == {("g", SUM): None}


@pytest.mark.parametrize("ballot", [WITHOUT, OTHER], ids=["without", "other collectives"])
def test_a_rank_that_departs_alone_raises(two: Two, ballot: Ballot) -> None:
    """Its peer may run the earlier graph; with other collectives, its graph was broken anew."""
    two.both_do("one")
    with pytest.raises(DisagreementError, match=r"model.py:one:1.*rank 1 did not compile it.*deviate=False"):
        two.vote(0, "one", ballot)


def test_the_rest_of_a_broken_function_departs_too(two: Two) -> None:
    """Where nothing is communicated before the break."""
    two.both_do("one")
    with pytest.raises(DisagreementError, match="rank 1 did not compile it"):
        two.vote(0, "torch_dynamo_resume_in_one_at_9", WITHOUT, resumes="model.py:one:1")


@pytest.mark.parametrize("ballot", [WITHOUT, OTHER], ids=["without", "other collectives"])
def test_ranks_that_depart_together_do_without_it(two: Two, ballot: Ballot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compile the function anew; one cannot do it, and the other hears of that."""
    two.both_do("one")
    monkeypatch.setenv("ASYNCTP_AGREE_S", PATIENT_S)
    asked = [dataclasses.replace(ballot, group="rank 0"), dataclasses.replace(WITH, group="rank 1")]
    known = dict(zip(("rank 0", "rank 1"), two.ledgers, strict=True))
    with mock.patch.object(ledgers, "of_group", known.get), named("one"), futures.ThreadPoolExecutor() as pool:
        without, done = pool.map(lambda one: vote([one], Config(**QUIET)), asked, timeout=60)
    assert without == {}
    assert "anew without it" in str(done["rank 1", SUM])


@pytest.mark.parametrize("waiting", [{0}, {1}, {0, 1}], ids=str)
def test_a_wait_in_another_group_delays_no_word(two: Two, waiting: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 lacks what both agreed on. Some ranks wait as long as they can for a silent one of another group."""
    two.both_do("one")
    monkeypatch.setenv("ASYNCTP_AGREE_S", "2")
    known, asked = {}, []
    for rank, mine in enumerate((WITHOUT, WITH)):
        known |= {f"rank {rank}": two.ledgers[rank], f"pair {rank}": Ledger(dist.HashStore(), 0, (0, 1), "1")}
        asked.append([Ballot(f"pair {rank}", "fp", ("sum: y",))] if rank in waiting else [])
        asked[rank].append(dataclasses.replace(mine, group=f"rank {rank}"))
    with mock.patch.object(ledgers, "of_group", known.get), named("one"), futures.ThreadPoolExecutor() as pool:
        without, done = pool.map(lambda ballots: vote(ballots, Config(**QUIET)), asked, timeout=60)
    assert ("pair 0", "sum: y") in without if 0 in waiting else without == {}
    assert "rank 0 compiled model.py:one:1 anew without it" in str(done["rank 1", SUM])


def test_a_peer_with_other_graphs_of_a_function_is_not_waited_for(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_AGREE_S", PATIENT_S)
    two.post(1, "one", OTHER, breaks=True)
    assert "rank 1 compiled model.py:one:1 with other collectives" in str(two.vote(0, "one", WITH)["g", SUM])
    two.post(1, "torch_dynamo_resume_in_two_at_9", WITHOUT, resumes="model.py:two:1")
    assert "rank 1 breaks its graph" in str(two.vote(0, "two", WITH)["g", SUM])


def test_the_group_with_the_least_patience_ends_a_wait(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may wait for this rank in a collective of it."""
    monkeypatch.setenv("ASYNCTP_AGREE_S", PATIENT_S)
    monkeypatch.setattr(compat, "group_timeout_s", lambda group: 2.0 if group == "short" else 1e9)
    short = Ledger(dist.HashStore(), 0, (0, 1), "1", "short")
    known = {"g": two.ledgers[0], "short": short}
    start = time.monotonic()
    with mock.patch.object(ledgers, "of_group", known.get), named("one"):
        votes = vote([Ballot("short", "fs"), WITH], Config(**QUIET))
    assert votes["g", SUM] is not None
    assert time.monotonic() - start < 10


def test_a_rank_that_refuses_all_lets_no_peer_wait(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer, which has other options, is told the option."""
    monkeypatch.setenv("ASYNCTP_AGREE_S", PATIENT_S)
    with mock.patch.object(ledgers, "of_group", return_value=two.ledgers[1]), named("one"):
        assert vote([WITH], Config(**QUIET, deviate=False)) == {("g", SUM): "Config(deviate=False)"}
    assert two.vote(0, "one", WITH) == {
        ("g", SUM): f"rank 1 of the group's 2 does not: {SUM}; rank 1 has Config(deviate=False)"
    }


def test_a_rank_that_refuses_all_later_on_lacks_what_all_agreed_on(two: Two) -> None:
    """Its peer may run the earlier graph. Once all have left it, the rank may compile what it likes."""
    two.both_do("one")
    with pytest.raises(DisagreementError, match="rank 1 did not compile it without that"):
        two.vote(0, "one", WITH, deviate=False)
    two.lack(1, "one")
    two.ledgers[0].lacked.clear()
    for _ in range(2):
        assert two.vote(0, "one", WITH, deviate=False) == {("g", SUM): "Config(deviate=False)"}
    assert "rank 0 compiled model.py:one:1 anew without it" in str(two.vote(1, "one", WITH)["g", SUM])


def test_a_rank_is_told_which_options_of_a_peer_differ(two: Two) -> None:
    with mock.patch.object(ledgers, "of_group", return_value=two.ledgers[1]), named("one"):
        polls.post([WITH], Config(**QUIET, bucket=False))
    assert str(two.vote(0, "one", WITH)["g", SUM]).endswith("with other versions or options: bucket=False")


def test_without_deviations_nobody_is_asked(two: Two) -> None:
    with mock.patch.object(ledgers, "of_group", return_value=two.ledgers[0]), named("one"):
        votes = vote([WITH], Config(**QUIET, deviate=False))
    assert votes == {("g", SUM): "Config(deviate=False)"}
    assert not two.ledgers[0].posted


def test_a_rank_that_lacks_it_twice_is_followed_once(two: Two) -> None:
    """The first time it was interrupted, say, or ended with an error, and nobody has followed it yet."""
    two.both_do("one")
    for _ in range(2):
        two.lack(0, "one")
    two.lack(1, "one")
    text = polls.with_provenance(SUM, Config(**QUIET))
    ours, theirs = (Poll(ledger, "g", "asynctp/1/graph/fk", "model.py:one:1", 0, text) for ledger in two.ledgers)
    assert ours.not_lacking() == theirs.not_lacking() == []
    two.lack(0, "one")
    assert ours.not_lacking() == [1], "this is of a later graph, which rank 1 has not compiled"


def test_a_rank_catches_up_with_what_others_lacked_before(two: Two) -> None:
    two.both_do("one")
    text = polls.with_provenance(SUM, Config(**QUIET))
    two.ledgers[0].lacked[Poll(two.ledgers[0], "g", "asynctp/1/graph/fk", "model.py:one:1", 0, text).place] = 4
    two.lack(0, "one")
    two.lack(1, "one")
    assert two.ledgers[0].lacked == two.ledgers[1].lacked
