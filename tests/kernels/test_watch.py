"""`cuda.runtime.watch`: what looks at a group's words tell of its ranks, and when a rank that has failed may go on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
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
    Look,
    Watch,
)
from asynctp_kernels.errors import PeerTimeout, SymmetricMemoryError, UnlikeCalls
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
    memory.calls._store.set(f"asynctp/calls/{theirs}", SUM.told)
    assert judged(memory, look(own, (theirs, 0, 0)), UNLIKE_S).theirs == SUM.told


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

    def look_once(reference: Any) -> None:
        runs.append(memory.failure or "")
        if len(runs) == 1:
            raise RuntimeError("a driver call has failed")

    with mock.patch.object(watch_module, "_watch", look_once), mock.patch.object(watch_module, "LOOK_S", 0):
        watch_module._run(weakref.ref(memory))
    assert runs == [
        "",
        "SymmetricMemoryError: the watch over the ranks has failed: RuntimeError: a driver call has failed",
    ]
