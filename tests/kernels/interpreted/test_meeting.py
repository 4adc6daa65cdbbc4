"""How ranks find each other, however often each has tried; faults that are told, and stores that are old.

Ranks are threads here, and groups are only what a meeting asks of them; `test_lifecycles` has processes.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from asynctp_kernels import meeting
from asynctp_kernels.errors import NotEnrolled, PeerFailed, PeerTimeout, SymmetricMemoryError
from asynctp_kernels.meeting import Process, Record, meet

BOUND = 0.6  # seconds; a rank comes half of that before it, or after it


class Group:
    """A process group of a rank, as far as a meeting looks at it."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self.group_name, self.store = "tp", store
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    with mock.patch.object(meeting, "group_store", lambda group: group.store):
        yield


def groups(world: int, store: Any = None) -> list[Any]:
    store = store or dist.HashStore()
    return [Group(rank, world, store) for rank in range(world)]


def on_all(do: Callable[[Any], Any], ranks: list[Any]) -> list[Any]:
    """`do(group)` on all ranks at once: what each gave, or raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [_outcome(each) for each in [pool.submit(do, group) for group in ranks]]


def _outcome(future: Future[Any]) -> Any:
    return future.exception() or future.result()


def told(group: Any, text: str = "", seconds: float = BOUND) -> list[str]:
    with meet(group, "call", seconds) as here:
        return here.exchange("text", text or str(group.rank()))


# --- meeting -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2, 8])
def test_all_ranks_get_all_messages_in_rank_order(world: int) -> None:
    ranks = groups(world)
    for _ in range(3):
        assert on_all(lambda group: told(group, seconds=20), ranks) == [[str(rank) for rank in range(world)]] * world


def test_a_meeting_leaves_nothing_but_records() -> None:
    store = dist.HashStore()
    on_all(lambda group: told(group, seconds=20), groups(3, store))
    assert store.num_keys() == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    first, _, third = groups(3)
    start = time.monotonic()
    outcomes = on_all(told, [first, third])
    assert time.monotonic() - start < BOUND + 5
    kinds = {type(error) for error in outcomes}
    assert PeerTimeout in kinds
    assert kinds <= {PeerTimeout, PeerFailed}, "the first whose time runs out tells the other"
    (late, *_) = [error for error in outcomes if isinstance(error, PeerTimeout)]
    assert (late.peer, late.seconds) == (1, BOUND)
    assert f"waited {BOUND:g} s for an answer of rank 1" in str(late)


def test_the_bound_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "0.1")
    with pytest.raises(PeerTimeout, match="ASYNCTP_TIMEOUT_S sets the bound"), meet(groups(2)[0], "call"):
        pass
    with pytest.raises(PeerTimeout) as caught, meet(groups(2)[0], "call", 0.1):
        pass
    assert "ASYNCTP_TIMEOUT_S" not in str(caught.value), "it does not set that bound"


# --- attempts ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "delays",
    [(0.0, 0.9), (0.9, 0.0), (0.0, 0.3, 0.9), (0.0, 0.9, 0.9), (0.0, 1.5), (0.0, 0.0, 2.1)],
    ids=str,
)
def test_ranks_that_try_again_meet(delays: tuple[float, ...]) -> None:
    """Each rank tries until it has met the others, and then goes on: what has met once is the same from there on."""
    failures = []

    def program(group: Any) -> list[list[str]]:
        time.sleep(delays[group.rank()])
        while True:
            with contextlib.suppress(PeerTimeout, PeerFailed):
                met = [told(group, f"0 {group.rank()}")]
                break
            failures.append(group.rank())
        return met + [told(group, f"{call} {group.rank()}", 20) for call in range(1, 4)]

    ranks = range(len(delays))
    assert on_all(program, groups(len(delays))) == [[[f"{call} {rank}" for rank in ranks] for call in range(4)]] * len(
        delays
    )
    assert failures


@pytest.mark.parametrize("seed", range(6))
def test_ranks_meet_whatever_fails(seed: int) -> None:
    """Ranks begin at different times, and some of their attempts fail by themselves. None waits longer than that."""
    draw = random.Random(seed)
    world = draw.choice([2, 3, 4])
    delays = [draw.choice([0.0, 0.2, 0.5, 1.0]) * draw.random() for _ in range(world)]
    faults = {(rank, attempt) for rank in range(world) for attempt in range(6) if draw.random() < 0.1}

    def program(group: Any) -> int:
        time.sleep(delays[group.rank()])
        met = 0
        for attempt in range(14):
            begun = time.monotonic()
            with contextlib.suppress(PeerTimeout, PeerFailed, ZeroDivisionError), meet(group, "call", 0.3) as here:
                if (group.rank(), attempt) in faults:
                    raise ZeroDivisionError
                assert here.exchange("text", "x") == ["x"] * world
                met += 1
            assert time.monotonic() - begun < 5
        return met

    assert all(met > 0 for met in on_all(program, groups(world)))


def test_ranks_that_try_unequally_often_meet() -> None:
    first, second = groups(2)
    for _ in range(3):
        with pytest.raises(PeerTimeout):
            told(first, seconds=0.05)
    with pytest.raises(PeerTimeout):
        told(second, seconds=0.05)
    assert on_all(lambda group: told(group, seconds=20), [first, second]) == [["0", "1"]] * 2


def test_a_rank_that_never_tried_meets_the_others() -> None:
    first, second = groups(2)
    with pytest.raises(PeerTimeout):
        told(first, seconds=0.05)
    assert on_all(lambda group: told(group, seconds=20), [first, second]) == [["0", "1"]] * 2


# --- what is old in a store --------------------------------------------------------------------------------------
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_a_group_made_again_on_the_same_store_is_a_new_one(failed: bool, swapped: bool) -> None:
    store = dist.HashStore()
    for _ in range(3):
        ranks = groups(2, store)
        outcomes = on_all(lambda group: told(group, seconds=20), ranks[::-1] if swapped else ranks)
        assert [sorted(each) for each in outcomes] == [["0", "1"]] * 2
        if failed:
            with pytest.raises(PeerTimeout):
                told(ranks[0], seconds=0.05)
            with pytest.raises((PeerTimeout, PeerFailed)):
                told(ranks[1], seconds=0.05)


def test_old_records_are_waited_out() -> None:
    """What lies there of a rank of an earlier group is no answer."""
    store = dist.HashStore()
    on_all(lambda group: told(group, seconds=20), groups(2, store))
    with pytest.raises(PeerTimeout):
        told(groups(2, store)[0], seconds=0.2)


@pytest.mark.parametrize("text", ["", "{", "[]", '["a", ["b"], [], []]', "[1, 2, 3, 4]", "null"])
def test_what_is_no_record_is_waited_out(text: str) -> None:
    first, second = groups(2)
    second.store.set("asynctp/meeting/rank/1", text)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(told, first, "", 20)
        time.sleep(0.1)
        assert told(second, seconds=20) == ["0", "1"]
        assert outcome.result() == ["0", "1"]


def test_the_rank_of_an_older_group_that_still_waits_is_told() -> None:
    store = dist.HashStore()
    old, new = groups(2, store)[0], groups(2, store)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(told, old, "", 20)
        time.sleep(0.1)
        outcomes = on_all(lambda group: told(group, seconds=20), new)
        assert outcomes == [["0", "1"]] * 2
        with pytest.raises(RuntimeError, match="somebody else is rank 0 of group 'tp' now; was the group made again"):
            waiting.result()


# --- faults ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), RuntimeError("no more memory"), SystemExit(1)])
@pytest.mark.parametrize("late", [False, True])
def test_a_fault_of_one_rank_is_told_at_once(error: BaseException, late: bool) -> None:
    ranks, start = groups(3), time.monotonic()

    def program(group: Any) -> None:
        time.sleep(0.3 if late and group.rank() == 2 else 0)
        with meet(group, "first call", 20) as here:
            if group.rank() == 1:
                raise error
            here.exchange("text", "")

    outcomes = on_all(program, ranks)
    assert time.monotonic() - start < 10
    assert outcomes[1] is error
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerFailed)
        said = f"first call: rank 1 failed, so that rank {rank} cannot go on: {type(error).__name__}"
        assert str(outcomes[rank]).startswith(said)
        assert "asynctp_kernels.release(group) on every rank" in str(outcomes[rank])
    assert on_all(lambda group: told(group, seconds=20), ranks) == [["0", "1", "2"]] * 3, "they may try again"


def test_a_fault_after_a_message_does_not_take_it_back() -> None:
    """The message is looked for again once the sender is known to have failed."""
    first, second = groups(2)
    failed, looks = threading.Event(), []

    def program(group: Any) -> list[str]:
        with meet(group, "call", 20) as here:
            if group is first:  # its first look finds nothing, the next one, once the other has failed, does
                real = here._get

                def get(key: str) -> str | None:
                    if key.endswith("text/1"):
                        looks.append(key)
                        if len(looks) == 1:
                            failed.wait(10)
                            return None
                    return real(key)

                here._get = get  # type: ignore[method-assign]
            found = here.exchange("text", "x")
            if group is second:
                here.fail(KeyboardInterrupt())
                failed.set()
        return found

    assert on_all(program, [first, second])[0] == ["x", "x"]
    assert len(looks) == 2
    assert on_all(lambda group: told(group, seconds=20), [first, second]) == [["0", "1"]] * 2


@pytest.mark.parametrize("bad", [(1,), (0, 2), (0, 1, 2)])
def test_what_cannot_be_done_on_one_rank_is_an_error_on_all(bad: tuple[int, ...]) -> None:
    ranks = groups(3)

    def program(group: Any) -> str:
        def do() -> str:
            if group.rank() in bad:
                raise OSError("no room")
            return "done"

        with meet(group, "call", 20) as here:
            return here.together("reserve", do)

    said = "; ".join(f"rank {rank}: OSError: no room" for rank in bad)
    for outcome in on_all(program, ranks):
        assert isinstance(outcome, SymmetricMemoryError)
        assert str(outcome) == said
    bad = ()
    assert on_all(program, ranks) == ["done"] * 3


def test_a_meeting_within_a_meeting_is_a_part_of_it() -> None:
    def program(group: Any) -> list[list[str]]:
        with meet(group, "outer", 20) as outer:
            before = outer.exchange("text", f"a{group.rank()}")
            found = []
            for turn in range(2):
                with meet(group, "inner") as inner:
                    found.append(inner.exchange("text", f"{turn}{group.rank()}"))
            return [before, *found, outer.exchange("after", "z")]

    store = dist.HashStore()
    assert on_all(program, groups(2, store)) == [[["a0", "a1"], ["00", "01"], ["10", "11"], ["z", "z"]]] * 2
    assert store.num_keys() == 2


def test_a_fault_within_the_inner_meeting_is_told_to_a_peer_in_the_outer() -> None:
    def program(group: Any) -> None:
        with meet(group, "outer", 20) as outer:
            if group.rank() == 0:
                with meet(group, "inner"):
                    raise MemoryError
            outer.exchange("after", "")

    assert [type(outcome) for outcome in on_all(program, groups(2))] == [MemoryError, PeerFailed]


def test_a_process_that_ended_is_not_waited_for() -> None:
    first, second = groups(2)
    gone = Process(meeting.boot_id(), meeting.pid_namespace(), os.getuid(), os.getpid(), "1")

    def program(group: Any) -> None:
        with meet(group, "call", 20) as here:
            if group is first:
                here.exchange("text", "")
            else:  # it is killed here
                here._process = gone
                seen, here._seen = here._seen, ()
                here._saw(seen)

    outcomes = on_all(program, [first, second])
    assert isinstance(outcomes[0], PeerFailed)
    assert f"its process ({os.getpid()}) has ended" in str(outcomes[0])


def test_which_processes_have_ended() -> None:
    mine = Process.own()
    assert not mine.has_ended()
    assert Process(mine.boot, mine.namespace, mine.user, mine.pid, "1").has_ended(), "an id that is used again"
    assert Process(mine.boot, mine.namespace, mine.user, 2**22 + 1, mine.start).has_ended()
    for other in (
        Process("elsewhere", mine.namespace, mine.user, 2**22 + 1, "1"),
        Process(mine.boot, "pid:[1]", mine.user, 2**22 + 1, "1"),
        Process(mine.boot, mine.namespace, mine.user + 1, 2**22 + 1, "1"),
        Process(mine.boot, mine.namespace, mine.user, 2**22 + 1, ""),
    ):
        assert not other.has_ended(), "nobody here can tell"


# --- threads, stores ---------------------------------------------------------------------------------------------
def test_an_interrupt_of_the_thread_that_waits_for_a_meeting_ends_it() -> None:
    first, second = groups(2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(told, first, "", 20)
        time.sleep(0.1)
        peer = pool.submit(told, second, "", 20)
        meeting.stop(second, KeyboardInterrupt())
        waiting.exception()
        peer.exception()
    third, _ = groups(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(told, third, "", 20)
        time.sleep(0.1)
        start = time.monotonic()
        meeting.stop(third, KeyboardInterrupt())
        with pytest.raises(RuntimeError, match="call of group 'tp' was stopped: KeyboardInterrupt"):
            waiting.result()
        assert time.monotonic() - start < 5


def test_threads_of_one_rank_take_turns() -> None:
    first, second = groups(2)
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(told, group, "", 20) for group in (first, second, first, second)]
        assert [each.result() for each in results] == [["0", "1"]] * 4


def test_a_thread_whose_turn_does_not_come_is_told() -> None:
    first, _ = groups(2)
    said = r"another thread of this rank has been in a meeting of group 'tp' for 0\.2 s"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(told, first, "", 2)
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match=said):
            told(first, seconds=0.2)
        waiting.exception()


def test_groups_do_not_hear_each_other() -> None:
    stores = [dist.PrefixStore(name, dist.HashStore()) for name in "ab"]
    ranks = [group for store in stores for group in groups(2, store)]
    assert on_all(lambda group: told(group, seconds=20), ranks) == [["0", "1"]] * 4


class _DeadStore:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_does_not_answer_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"the store of group 'tp' does not answer \(.*Connection reset.*Restart"):
        told(Group(0, 2, _DeadStore()))


def test_a_group_that_torch_does_not_know_cannot_be_enrolled() -> None:
    unknown: dict[Any, Any] = {}
    with mock.patch.object(meeting, "group_store", unknown.__getitem__), pytest.raises(NotEnrolled, match="no store"):
        told(Group(0, 2, None))


@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_every_kind_of_store_will_do(kind: str, tmp_path: Any) -> None:
    def store_of(rank: int) -> Any:
        if kind == "file":
            return dist.PrefixStore("tp/", dist.FileStore(str(tmp_path / "store"), 2))
        return dist.PrefixStore("tp/", shared if kind == "hash" or rank == 0 else client())

    def client() -> Any:
        return dist.TCPStore("127.0.0.1", shared.port, is_master=False)

    shared: Any = dist.TCPStore("127.0.0.1", 0, is_master=True) if kind == "tcp" else dist.HashStore()
    ranks: list[Any] = [Group(rank, 2, store_of(rank)) for rank in range(2)]
    with pytest.raises(PeerTimeout):
        told(ranks[0], seconds=0.2)
    with pytest.raises(PeerTimeout):
        told(ranks[1], seconds=0.2)
    for _ in range(2):
        assert on_all(lambda group: told(group, seconds=20), ranks) == [["0", "1"]] * 2


def test_a_forked_child_has_attempts_of_its_own() -> None:
    """Its parent may be in a meeting, on a thread that the child does not have."""
    first, second = groups(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(told, first, "", 20)
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            os._exit(int(any(member.turn.locked() for member in meeting._members.values())))
        assert os.waitpid(child, 0)[1] == 0
        assert told(second, seconds=20) == waiting.result() == ["0", "1"]


def test_a_record_comes_back_as_it_was() -> None:
    record = Record("n", ("n", None), Process.own())
    assert Record.from_json(record.to_json()) == record


def test_an_interrupt_after_a_record_is_written_is_no_other_rank() -> None:
    first, second = groups(2)
    with pytest.raises(PeerTimeout):
        told(first, seconds=0.05)
    swap = meeting.Meeting._swap

    def interrupted(*given: Any) -> str:
        swap(*given)
        raise KeyboardInterrupt

    with mock.patch.object(meeting.Meeting, "_swap", interrupted), pytest.raises(KeyboardInterrupt):
        told(first, seconds=0.05)
    assert on_all(lambda group: told(group, seconds=20), [first, second]) == [["0", "1"]] * 2
