"""`cuda.runtime.watch`: what looks at a group's words tell of its ranks, and when a rank that has failed may go on."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels.cuda.choose.wire import DIRECT, PULL, PUSH, Wire
from asynctp_kernels.cuda.runtime import watch as watch_module
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.cuda.runtime.watch import (
    ENDS_S,
    HAS_ENDED,
    HAS_FAILED,
    IS_QUIET,
    STEP_S,
    TOLD_S,
    UNLIKE_S,
    Calls,
    Look,
    Watch,
)
from asynctp_kernels.errors import PeerTimeout, SymmetricMemoryError, UnlikeCalls
from asynctp_kernels.meeting import Process
from asynctp_kernels.signals import FAILED, UNLIKE
from cuda_stubs import machine

RANK, WORLD, BOUND_S = 1, 4, 600.0
PEERS = (0, 2, 3)
GATHER = Wire("all_gather", WORLD, 1 << 24)
SUM = Wire("reduce_scatter", WORLD, 1 << 24, torch.bfloat16, "sum")
SMALL = Wire("all_gather", WORLD, 1 << 10)
OTHER = Wire("all_gather", WORLD, 1 << 11)
NOBODY = dict.fromkeys(PEERS, 0)


@pytest.fixture
def memory() -> Iterator[GroupMemory]:
    with machine(RANK, WORLD, timeout_s=BOUND_S) as here:
        yield here.memory


def look(own: int = 0, peers: Any = 0, **given: Any) -> Look:
    """One look at a rank that waits in a call of signature `own`, pushed or pulled, for all of its peers.

    peers: what those have come to: one number, or that of each.
    """
    free = dict(zip(PEERS, peers, strict=True)) if isinstance(peers, tuple) else dict.fromkeys(PEERS, peers)
    return replace(Look(0, own, (0,), free, {}, NOBODY, [0, 0, 0]), **given)


def direct(own: int, ahead: dict[int, int], **given: Any) -> Look:
    """Of a rank in a direct call; `ahead`: what peers are in."""
    return look(doing=own, ahead=ahead, **given)


def judged(memory: GroupMemory, seen: Look, seconds: float, every: float = 0.25) -> Any:
    """What is found when words stay so for some seconds."""
    watch, found = Watch(memory), None
    for step in range(int(seconds / every) + 1):
        found = found or watch.judge(seen, step * every)
    return found


# --- ranks in step -----------------------------------------------------------------------------------------------
def test_nothing_is_found_of_ranks_that_do_nothing(memory: GroupMemory) -> None:
    assert judged(memory, look(), 10 * BOUND_S, every=10) is None


def test_nor_of_ranks_that_have_come_to_one_call(memory: GroupMemory) -> None:
    call, small = memory.signature(GATHER, PUSH), memory.signature(SMALL, DIRECT)
    assert judged(memory, look(call, call), 10 * BOUND_S, every=10) is None
    assert judged(memory, direct(small, dict.fromkeys(PEERS, small)), 10 * BOUND_S, every=10) is None


def test_a_direct_call_beside_one_in_flight_is_not_unlike(memory: GroupMemory) -> None:
    """Ranks wait in both for the last one, for longer than unlike calls take to be found."""
    flies, small = memory.signature(GATHER, PUSH), memory.signature(SMALL, DIRECT)
    seen = look(flies, (flies, flies, 0), doing=small, ahead={0: small, 2: small})
    assert judged(memory, seen, BOUND_S - 1) is None


def test_a_peer_that_is_ahead_for_a_moment_is_not_unlike(memory: GroupMemory) -> None:
    """It has ended the call that this rank still is in, and begun another one."""
    own, theirs = memory.signature(SMALL, DIRECT), memory.signature(GATHER, PUSH)
    assert judged(memory, direct(own, {0: memory.signature(OTHER, DIRECT)}), UNLIKE_S / 2) is None
    assert judged(memory, direct(own, {}, free={**NOBODY, 2: theirs}), UNLIKE_S / 2) is None


def test_nor_is_one_whose_words_are_apart_in_one_look_of_a_long_wait(memory: GroupMemory) -> None:
    """This rank waits in one call; words are read one after the other, and a peer may end its call in between."""
    own, other, watch = memory.signature(SMALL, DIRECT), memory.signature(OTHER, DIRECT), Watch(memory)
    waits, apart = direct(own, {}), direct(own, {0: other})
    for step in range(100):
        assert watch.judge(apart if step % 3 == 0 else waits, step * UNLIKE_S) is None


# --- unlike calls ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", [PUSH, PULL])
def test_unlike_calls_are_found_after_a_second(memory: GroupMemory, transport: str) -> None:
    own, theirs = memory.signature(GATHER, transport), memory.signature(SUM, PUSH)
    seen = look(own, (own, theirs, 0))
    assert judged(memory, seen, UNLIKE_S - 0.25) is None
    error = judged(memory, seen, UNLIKE_S)
    assert isinstance(error, UnlikeCalls)
    assert (error.rank, error.own, error.peer, error.theirs) == (RANK, GATHER.told, 2, SUM.told)


def test_a_peer_in_a_direct_call_is_unlike_too(memory: GroupMemory) -> None:
    own, theirs = memory.signature(GATHER, PUSH), memory.signature(SMALL, DIRECT)
    error = judged(memory, look(own, ahead={3: theirs}), UNLIKE_S)
    assert isinstance(error, UnlikeCalls)
    assert (error.own, error.peer, error.theirs) == (GATHER.told, 3, SMALL.told)


def test_so_is_a_peer_in_another_direct_call_or_in_none(memory: GroupMemory) -> None:
    own, other, pushed = (
        memory.signature(wire, way) for wire, way in ((SMALL, DIRECT), (OTHER, DIRECT), (GATHER, PUSH))
    )
    for seen, told in ((direct(own, {0: other}), OTHER), (direct(own, {}, free={**NOBODY, 0: pushed}), GATHER)):
        error = judged(memory, seen, UNLIKE_S)
        assert isinstance(error, UnlikeCalls)
        assert (error.own, error.peer, error.theirs) == (SMALL.told, 0, told.told)


def test_a_call_of_which_only_a_peer_has_a_plan_is_told_by_it(memory: GroupMemory) -> None:
    own, theirs = memory.signature(GATHER, PUSH), SUM.signature(PUSH)
    assert str(theirs) in judged(memory, look(own, (theirs, 0, 0)), UNLIKE_S).theirs
    Calls(memory.group).add(SUM, PUSH)  # the peer's, in the same store
    assert judged(memory, look(own, (theirs, 0, 0)), UNLIKE_S).theirs == SUM.told


def test_a_call_with_an_accord_is_told_with_its_function(memory: GroupMemory) -> None:
    agreed = replace(GATHER, accord=7)
    own, theirs = memory.signature(GATHER, PUSH), memory.signature(agreed, PUSH)
    error = judged(memory, look(own, (theirs, 0, 0)), UNLIKE_S)
    assert (error.own, error.theirs) == (GATHER.told, agreed.told), "nobody has told of the function"
    memory.calls._store.set("asynctp/accords/7", "train.py:12 layer (forward): one reduction for reductions 0 and 1.")
    error = judged(memory, look(own, (theirs, 0, 0)), UNLIKE_S)
    told = f"{agreed.told} of train.py:12 layer (forward): one reduction for reductions 0 and 1"
    assert (error.own, error.theirs) == (GATHER.told, told)
    assert judged(memory, look(theirs, (own, 0, 0)), UNLIKE_S).own == told
    assert judged(memory, look(theirs), BOUND_S, every=1).op == told, "of an absent rank too"


def test_the_remedy_names_the_option_where_ranks_may_run_unlike_forms_of_a_function(memory: GroupMemory) -> None:
    wires = [GATHER, replace(GATHER, accord=7), replace(GATHER, kept_by_all=True), SUM, replace(SUM, accord=8)]
    calls = [memory.signature(wire, PUSH) for wire in wires]
    for first, second, forms in ((0, 1, True), (1, 0, True), (0, 2, True), (3, 4, True), (1, 4, True), (0, 3, False)):
        said = str(judged(memory, look(calls[first], (calls[second], 0, 0)), UNLIKE_S))
        assert ("Config(deviate=False)" in said) == forms
        assert said.endswith("in the same order, of the same sizes and dtypes.")
    assert "deviate" not in str(judged(memory, look(calls[2], (5, 0, 0)), UNLIKE_S)), "nobody knows the other"
    error = judged(memory, look(calls[0], (calls[1], 0, 0)), UNLIKE_S)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_what_a_kernel_has_recorded_is_found_at_once(memory: GroupMemory) -> None:
    own, theirs = memory.signature(SMALL, DIRECT), memory.signature(OTHER, DIRECT)
    error = judged(memory, look(status=[FAILED, 2, theirs * UNLIKE + own]), 0)
    assert isinstance(error, UnlikeCalls)
    assert (error.own, error.peer, error.theirs) == (SMALL.told, 2, OTHER.told)
    error = judged(memory, look(status=[FAILED, 2, own]), 0)
    assert isinstance(error, PeerTimeout)
    assert (error.op, error.peer, error.seconds) == (SMALL.told, 2, BOUND_S)


def test_what_this_thread_has_recorded_is_no_error_of_its_own(memory: GroupMemory) -> None:
    assert judged(memory, look(status=[FAILED, -1, 0]), 10) is None


def test_a_peer_that_comes_to_a_call_while_this_rank_makes_memory_for_another_is_unlike(memory: GroupMemory) -> None:
    """All ranks make it together, and come then: some a little sooner."""
    theirs, small = memory.signature(replace(GATHER, accord=7), PUSH), memory.signature(SMALL, DIRECT)
    memory.growing = "a call that needs 64 bytes of box memory"
    for seen in (look(0, (0, 0, theirs)), look(ahead={3: theirs}), look(0, (0, 0, theirs), ahead={3: small})):
        assert judged(memory, seen, TOLD_S - 0.25) is None
        error = judged(memory, seen, TOLD_S)
        assert isinstance(error, UnlikeCalls)
        assert (error.own, error.peer, error.forms) == (memory.growing, 3, True)
        assert error.theirs == replace(GATHER, accord=7).told
    assert judged(memory, look(), 10 * TOLD_S) is None
    memory.growing = ""
    assert judged(memory, look(0, (0, 0, theirs)), 10 * TOLD_S) is None


# --- calls of several groups ---------------------------------------------------------------------------------------
PROCESSES = tuple(Process("boot", "space", 0, 100 + rank, "1") for rank in range(WORLD))


@pytest.fixture
def groups(memory: GroupMemory) -> tuple[GroupMemory, GroupMemory]:
    """This rank's memory of two groups of the same processes, which the second orders otherwise."""
    other = replace(memory, of_group=memory.group, rank=WORLD - 1 - RANK, processes=PROCESSES[::-1])
    memory.processes = PROCESSES
    return memory, other


def judged_beside(
    groups: tuple[GroupMemory, GroupMemory], seen: Look, beside: Look, seconds: float, every: float = 0.25
) -> Any:
    """What is found of the first group when the words of both stay so for some seconds."""
    (watch, other), found = map(Watch, groups), None
    for step in range(int(seconds / every) + 1):
        assert other.judge(beside, step * every) is None
        found = found or watch.judge(seen, step * every)
    return found


@pytest.mark.parametrize("transport", [PUSH, DIRECT])
def test_a_peer_that_waits_for_this_rank_in_another_group_is_found(
    groups: tuple[GroupMemory, GroupMemory], transport: str
) -> None:
    """Neither can come to the other's call: this rank's device makes one after the other, and so does the peer's."""
    own, theirs = groups[0].signature(GATHER, transport), groups[1].signature(replace(SUM, accord=7), PUSH)
    come = dict.fromkeys((0, 1, 3), 0)
    seen = look(own) if transport == PUSH else direct(own, {})
    beside = look(free={**come, 3: theirs}, told=come)
    assert judged_beside(groups, seen, beside, 2 * UNLIKE_S - 0.25) is None
    error = judged_beside(groups, seen, beside, 2 * UNLIKE_S)
    assert isinstance(error, UnlikeCalls)
    assert (error.rank, error.peer, error.forms) == (RANK, 0, True), "the first of one group is the last of the other"
    name = groups[0].group_name
    assert error.own == f"{GATHER.told} in group '{name}'"
    assert error.theirs == f"{replace(SUM, accord=7).told} in group '{name}'"


def test_one_that_has_come_to_this_call_is_in_none_of_another_group(groups: tuple[GroupMemory, GroupMemory]) -> None:
    """Nor is one that this rank has come to meet there, or that may run in a graph beside it."""
    own, theirs = groups[0].signature(GATHER, PUSH), groups[1].signature(SUM, PUSH)
    come = dict.fromkeys((0, 1, 3), 0)
    waits = look(free={**come, 3: theirs}, told=come)
    assert judged_beside(groups, look(own, (own, 0, 0)), waits, 5 * UNLIKE_S) is None
    assert judged_beside(groups, look(own), replace(waits, awaited=theirs), 5 * UNLIKE_S) is None
    assert judged_beside(groups, look(), waits, 5 * UNLIKE_S) is None
    watch, other = map(Watch, groups)
    assert other.judge(waits, 0) is None
    assert not any(watch.judge(look(own), 1 + step) for step in range(10)), "this rank may have been there since"
    groups[1].captured = True
    assert judged_beside(groups, look(own), waits, 5 * UNLIKE_S) is None


# --- the end of the process ----------------------------------------------------------------------------------------
def ends_after(memory: GroupMemory, seen: Look, over: bool, watch: Watch) -> float:
    """Seconds for which the end of the process waits, where the last look is this and eager calls are over, or not."""
    watch.latest = seen
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    with (
        mock.patch.object(watch_module, "_watches", [weakref.ref(watch)]),
        mock.patch.object(watch_module, "_threads", set()),
        mock.patch.object(watch_module, "_exiting", SimpleNamespace(set=lambda: None)),
        mock.patch.object(watch_module, "time", clock),
        mock.patch.object(memory, "is_in_a_call", return_value=not over),
    ):
        watch_module._end_watches()
    return sum(slept)


def test_the_end_of_the_process_waits_for_what_is_said_of_a_call_under_way(memory: GroupMemory) -> None:
    own, watch = memory.signature(GATHER, PUSH), Watch(memory)
    wanted = pytest.approx(UNLIKE_S + 2 * watch_module.LOOK_S, abs=2 * watch_module.ENDING_S)
    assert ends_after(memory, look(), True, watch) == 0
    assert ends_after(memory, look(), False, watch) == wanted
    assert ends_after(memory, look(own), True, watch) == wanted, "a graph's"
    memory.fail(RuntimeError("it is known"))
    assert ends_after(memory, look(own), False, watch) == 0


# --- absent ranks ------------------------------------------------------------------------------------------------
def test_an_absent_rank_is_found_after_the_groups_timeout(memory: GroupMemory) -> None:
    own = memory.signature(SUM, PUSH)
    seen = look(own, (own, 0, own))
    assert judged(memory, seen, BOUND_S - 1, every=1) is None
    error = judged(memory, seen, BOUND_S, every=1)
    assert isinstance(error, PeerTimeout)
    assert (error.op, error.rank, error.peer, error.seconds) == (SUM.told, RANK, 2, BOUND_S)


@pytest.mark.parametrize("changes", ["ended", "awaited", "doing"])
def test_a_straggler_whose_calls_end_now_and_then_is_not_absent(memory: GroupMemory, changes: str) -> None:
    """Each look finds this rank waiting, but not in one wait."""
    own, watch = memory.signature(GATHER, PUSH), Watch(memory)
    for step in range(100):
        values = {"ended": (step,), "awaited": own + step, "doing": step}
        seen = replace(look(own), **{changes: values[changes]})
        assert watch.judge(seen, step * (BOUND_S - 1)) is None
        assert watch.judge(seen, (step + 0.9) * (BOUND_S - 1)) is None
    assert isinstance(watch.judge(seen, 100 * BOUND_S), PeerTimeout)


def test_the_time_of_a_wait_begins_with_it(memory: GroupMemory) -> None:
    own, watch = memory.signature(GATHER, PUSH), Watch(memory)
    watch.judge(look(), 0)
    watch.judge(look(), 100 * BOUND_S)
    assert watch.judge(look(own), 100 * BOUND_S + 1) is None
    assert watch.judge(look(own), 101 * BOUND_S) is None
    assert isinstance(watch.judge(look(own), 101 * BOUND_S + 1), PeerTimeout)


# --- ranks that have failed --------------------------------------------------------------------------------------
def test_a_rank_whose_peers_process_is_over_fails_when_no_call_ends(memory: GroupMemory) -> None:
    """It may have come to the call before: then nothing else tells of it."""
    gone = look(gone=frozenset({2}))
    assert judged(memory, gone, TOLD_S - 0.25) is None
    assert str(judged(memory, gone, TOLD_S)) == "the process of rank 2 has ended: it does not say why"
    watch = Watch(memory)
    assert all(watch.judge(replace(gone, ended=(step,)), step) is None for step in range(100))


def test_a_peer_may_end_before_a_rank_that_makes_no_calls_any_more(memory: GroupMemory) -> None:
    """It saves a checkpoint, say."""
    assert judged(memory, look(gone=frozenset({2}), busy=False), 10 * TOLD_S) is None


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_whose_peer_has_failed_fails_when_no_call_ends(memory: GroupMemory, waits: bool) -> None:
    """Whatever it waits for: to come to a call, or for data that does not come any more."""
    own = memory.signature(GATHER, PUSH) if waits else 0
    memory.calls._store.set("asynctp/failed/2", "UnlikeCalls: what it has found")
    seen = look(own, own, told={**NOBODY, 2: 1})
    assert judged(memory, seen, TOLD_S - 0.25) is None
    error = judged(memory, seen, TOLD_S)
    assert isinstance(error, SymmetricMemoryError)
    assert "rank 2 has failed: UnlikeCalls: what it has found" in str(error)


def test_while_calls_end_it_does_not(memory: GroupMemory) -> None:
    watch = Watch(memory)
    for step in range(100):
        assert watch.judge(look(ended=(step,), told={**NOBODY, 2: 1}), step) is None


def test_a_rank_that_has_failed_ends_its_waits_for_data_when_all_have(memory: GroupMemory) -> None:
    watch, some = Watch(memory), look(told={0: HAS_ENDED, 2: 0, 3: HAS_FAILED})
    assert watch.step(some, 100.0) == HAS_FAILED
    assert watch.step(some, 100.0 + ENDS_S - 1) == HAS_FAILED
    assert watch.step(look(told={**some.told, 2: HAS_FAILED}), 100.0 + ENDS_S - 1) == HAS_ENDED
    assert watch.step(replace(some, gone=frozenset({2})), 100.0 + ENDS_S - 1) == HAS_ENDED


def test_and_those_for_ranks_when_all_have_ended_these_and_those_before_it_are_quiet(memory: GroupMemory) -> None:
    """Until then they may still send data of their own calls to this rank, which might take it for its own."""
    watch, ended = Watch(memory), dict.fromkeys(PEERS, HAS_ENDED)
    for told, step in (
        (ended, HAS_ENDED),
        ({**ended, 0: IS_QUIET, 3: HAS_FAILED}, HAS_ENDED),
        ({**ended, 0: IS_QUIET}, IS_QUIET),
        (dict.fromkeys(PEERS, IS_QUIET), IS_QUIET),
    ):
        assert watch.step(look(told=told), 100.0) == step
    assert watch.step(look(told=ended, gone=frozenset({0})), 100.0) == IS_QUIET


def test_or_when_one_does_not_say_so(memory: GroupMemory) -> None:
    """It may have ended."""
    watch = Watch(memory)
    assert watch.step(look(), 100.0) == HAS_FAILED
    assert watch.step(look(), 100.0 + ENDS_S) == IS_QUIET
    assert ENDS_S > TOLD_S + UNLIKE_S, "who has not failed has time to hear of it"


def test_a_step_is_done_when_no_wait_and_no_call_ends_any_more(memory: GroupMemory) -> None:
    watch, own = Watch(memory), memory.signature(GATHER, PUSH)
    assert watch.done(HAS_FAILED, look(), 0) == HAS_FAILED
    assert watch.done(HAS_ENDED, look(own), 10) == HAS_FAILED
    assert watch.done(HAS_ENDED, look(own), 10 + STEP_S) == HAS_ENDED, "others do not come, of course"
    assert watch.done(IS_QUIET, look(own), 20) == HAS_ENDED
    assert watch.done(IS_QUIET, look(ended=(1,)), 30) == HAS_FAILED
    assert watch.done(IS_QUIET, look(ended=(2,)), 40) == HAS_FAILED
    assert watch.done(IS_QUIET, direct(own, {}, ended=(2,)), 50) == HAS_FAILED
    assert watch.done(IS_QUIET, look(ended=(2,)), 60) == HAS_FAILED
    assert watch.done(IS_QUIET, look(ended=(2,)), 60 + STEP_S) == IS_QUIET


def test_a_watch_that_fails_goes_on_to_end_the_waits_of_its_rank(memory: GroupMemory) -> None:
    """Once: the second time it runs as ever."""
    runs: list[str] = []

    def look_once(reference: Any, made: Any) -> None:
        runs.append(memory.failure or "")
        if len(runs) == 1:
            raise RuntimeError("a driver call has failed")

    with mock.patch.object(watch_module, "_watch", look_once), mock.patch.object(watch_module, "LOOK_S", 0):
        watch_module._run(weakref.ref(memory), mock.Mock())
    assert runs == [
        "",
        "SymmetricMemoryError: the watch over the ranks has failed: RuntimeError: a driver call has failed",
    ]
