"""How the ranks of a group find each other through its store, and tell of their faults.

    with meet(group, "rendezvous") as meeting:         every rank is in this attempt and in no other
        sizes = meeting.exchange("size", "64")         every rank's text, in rank order
        memory = meeting.together("memory", reserve)   `reserve()` on every rank, or one error on every rank

A store outlives groups, attempts and processes: what lies in it may be old. So each attempt draws a number, and a rank
keeps one record in the store, under its rank:

    number     drawn for the attempt that it is in, or was in last
    seen       the newest number that it has read of each rank
    process    of the rank, to tell whether it is still there

The ranks have met when all records have seen the same numbers. These are drawn anew, so every rank is in its newest
attempt, however often each has tried before. The messages of the meeting lie under a digest of the numbers, which no
other attempt has.

A record is *fresh* if it has seen a number that this rank has drawn for this group: it was written since. An attempt
that fails says why under its number, and ends those that have seen it (`PeerFailed`). After that ranks may meet again,
each in its next attempt: whoever calls has to see to it that these are the same call (`asynctp_kernels.release`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from .errors import SET_THE_BOUND, NotEnrolled, PeerFailed, PeerTimeout, SymmetricMemoryError, timeout_s
from .torch_private import group_store

T = TypeVar("T")
Numbers = tuple["str | None", ...]  # by rank
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1e-3, 0.05
LONGEST_TEXT = 2000  # characters of a fault that peers are told
_PREFIX = "asynctp/meeting"
_FIXED = "Ranks may not be further apart in time than that."


class _Stopped(RuntimeError):
    """A request of another thread that this meeting end."""


#: why a meeting ends before its time, which is no fault of what is done in it
FAULTS = (PeerTimeout, PeerFailed, _Stopped)


@dataclass(frozen=True)
class Process:
    """A process of a machine; `start` tells it from a later one of the same id."""

    boot: str
    namespace: str
    user: int
    pid: int
    start: str

    @staticmethod
    def own() -> Process:
        """This one."""
        pid = os.getpid()
        return Process(boot_id(), pid_namespace(), os.getuid(), pid, _start_of(pid) or "")

    def has_ended(self) -> bool:
        """It is known to be over; False where this process cannot tell, as on another machine."""
        here = (boot_id(), pid_namespace(), os.getuid())
        if not all(here[:2]) or here != (self.boot, self.namespace, self.user) or not self.start:
            return False
        return _start_of(self.pid) not in (self.start, "")


@dataclass(frozen=True)
class Record:
    """The record of a rank in the store."""

    number: str
    seen: Numbers
    process: Process

    def to_json(self) -> str:
        return json.dumps([self.number, self.seen, astuple(self.process)])

    @staticmethod
    def from_json(text: str) -> Record | None:
        """None of what is no record, or one of another version."""
        try:
            number, seen, identity = json.loads(text)
            return Record(number, tuple(seen), Process(*identity))
        except (TypeError, ValueError):
            return None


@dataclass
class _Member:
    """This rank in one group.

    Attributes:
        turn: held by the thread that is in a meeting of the group, which is `owner`.
        meeting: that one.
        numbers: drawn here.
        posted: this rank has a record in the store.
        stopped: why the attempt under way has to end.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    owner: int | None = None
    meeting: Meeting | None = None
    numbers: set[str] = field(default_factory=set)
    posted: bool = False
    stopped: str = ""


_members: weakref.WeakKeyDictionary[ProcessGroup, _Member] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_members.clear)  # a thread that is not there any more may hold a turn


class Meeting:
    """All ranks of a group, in one attempt of each. Made by `meet`.

    Attributes:
        op: named in errors.
        path: under which its messages lie; the same on all ranks, and of no other meeting.
        processes: of the ranks, in their order.
    """

    def __init__(
        self, member: _Member, group: ProcessGroup, op: str, seconds: float | None, remedy: str | None = None
    ) -> None:
        self.op, self.path = op, ""
        self._member, self._store = member, _store_of(group)
        self._name, self._rank, self._world = group.group_name, group.rank(), group.size()
        self._remedy = remedy or (SET_THE_BOUND if seconds is None else _FIXED)
        self._seconds = timeout_s() if seconds is None else seconds
        self._number = secrets.token_hex(12)
        self._seen: Numbers = ()
        self._inner = 0
        self._topics: list[str] = []
        self._process = Process.own()
        self.processes: tuple[Process, ...] = ()

    # --- meeting --------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Wait until all ranks have met.

        Raises:
            PeerTimeout: A rank did not come in time.
            PeerFailed: A rank failed.
        """
        self._member.numbers.add(self._number)
        self._saw([None] * self._world)
        deadline, pauses = time.monotonic() + self._seconds, _pauses()
        while not self._met(records := self._records()):
            if fault := self._fault(records):
                raise fault
            if time.monotonic() > deadline:
                raise self._timeout(self._missing(records), "an answer")
            time.sleep(next(pauses))
        self.processes = tuple(self._process if record is None else record.process for record in records)
        self.path = hashlib.sha256(",".join(map(str, self._seen)).encode()).hexdigest()[:24]
        self.exchange("met", "")  # until all ranks know, none may leave for its next attempt

    def _met(self, records: Sequence[Record | None]) -> bool:
        """Every rank has seen the same numbers. Tells the others what this rank has seen."""
        self._saw([None if record is None else record.number for record in records])
        others = (record for rank, record in enumerate(records) if rank != self._rank)
        return all(record is not None and record.seen == self._seen for record in others)

    def _missing(self, records: Sequence[Record | None]) -> int:
        """The first rank that has not answered, or that has not yet seen what this rank has."""
        others = [(rank, record) for rank, record in enumerate(records) if rank != self._rank]
        silent = [rank for rank, record in others if record is None or record.seen[self._rank] != self._number]
        return (silent or [rank for rank, record in others if record is None or record.seen != self._seen])[0]

    def _records(self) -> list[Record | None]:
        return [None if rank == self._rank else self._record(rank) for rank in range(self._world)]

    def _record(self, rank: int) -> Record | None:
        found = Record.from_json(self._get(_record_of(rank)) or "")
        return found if found is not None and len(found.seen) == self._world else None

    # --- faults ---------------------------------------------------------------------------------------------
    def _fault(self, records: Sequence[Record | None]) -> Exception | None:
        """Why this attempt cannot go on: it was stopped, or a rank that has seen it has failed or is over."""
        if self._member.stopped:
            return _Stopped(f"asynctp: {self.op} of group '{self._name}' was stopped: {self._member.stopped}")
        for rank, record in enumerate(records):
            if record is None or record.seen[self._rank] not in self._member.numbers:
                continue
            number = self._seen[rank] if self.path else record.number
            has_seen = bool(self.path) or record.seen[self._rank] == self._number
            if has_seen and (cause := self._get(f"{_PREFIX}/failed/{number}")) is not None:
                return PeerFailed(self.op, self._rank, *json.loads(cause))
            if record.process.has_ended():
                return PeerFailed(self.op, self._rank, rank, f"its process ({record.process.pid}) has ended")
        return None

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this attempt has failed here."""
        origin = (error.peer, error.cause) if isinstance(error, PeerFailed) else (self._rank, _said(error))
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            self._set(f"{_PREFIX}/failed/{self._number}", json.dumps(origin))

    def _timeout(self, peer: int, awaited: str) -> PeerTimeout:
        return PeerTimeout(self.op, self._rank, peer, awaited, self._seconds, self._remedy)

    # --- messages -------------------------------------------------------------------------------------------
    def exchange(self, topic: str, text: str) -> list[str]:
        """Every rank's `text`, in rank order. Every rank has a topic once in a meeting.

        Raises:
            PeerTimeout: A rank did not send it in time.
            PeerFailed: A rank failed in this meeting.
        """
        place = f"{_PREFIX}/{self.path}/{topic}"
        self._topics.append(place)
        self._set(f"{place}/{self._rank}", text)
        deadline = time.monotonic() + self._seconds
        return [text if rank == self._rank else self._message(place, rank, deadline) for rank in range(self._world)]

    def _message(self, place: str, rank: int, deadline: float) -> str:
        fault, pauses = None, _pauses()
        while (text := self._get(f"{place}/{rank}")) is None:
            if fault is not None:  # found before the last look: what was sent before a rank failed counts
                raise fault
            if time.monotonic() > deadline:
                raise self._timeout(rank, f"message '{place.rpartition('/')[2]}'")
            time.sleep(next(pauses))
            fault = self._fault(self._records())
        return text

    def together(self, what: str, do: Callable[[], T]) -> T:
        """The result of `do()`, once it has been done on every rank.

        Raises:
            SymmetricMemoryError: It raised on some rank; all ranks raise this.
            PeerTimeout: A rank did not end it in time.
            PeerFailed: A rank failed in this meeting.
        """
        cause: Exception | None = None
        result: list[T] = []
        try:
            result.append(do())
        except FAULTS:
            raise
        except Exception as error:
            cause = error
        told = self.exchange(what, "" if cause is None else _said(cause))
        if any(told):
            faults = (f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
            raise SymmetricMemoryError("; ".join(faults)) from cause
        return result[0]

    def inner(self, op: str) -> Meeting:
        """A meeting within this one, on every rank."""
        self._inner += 1
        found = copy.copy(self)
        found.op, found.path, found._inner = op, f"{self.path}.{self._inner}", 0
        return found

    def end(self) -> None:
        """Delete all messages; the last rank does it, when nobody reads them any more."""
        done = f"{_PREFIX}/{self.path}/done"
        with contextlib.suppress(RuntimeError):  # that is no reason to fail
            if self._store.add(done, 1) == self._world:
                for place in self._topics:
                    for rank in range(self._world):
                        self._store.delete_key(f"{place}/{rank}")
                self._store.delete_key(done)

    # --- the store ------------------------------------------------------------------------------------------
    def _saw(self, numbers: Sequence[str | None]) -> None:
        """Post what this rank has seen, where that is new. Where it has written before, its own must lie there.

        Raises:
            RuntimeError: Another process or group has written there since.
        """
        seen = tuple(self._number if rank == self._rank else number for rank, number in enumerate(numbers))
        if seen == self._seen:
            return
        self._seen, member, key = seen, self._member, _record_of(self._rank)
        text, before = Record(self._number, seen, self._process).to_json(), self._get(key) or ""
        record = Record.from_json(before)
        foreign = member.posted and (record is None or record.number not in member.numbers)
        if foreign or self._swap(key, before, text) != text:
            raise RuntimeError(
                f"asynctp: {self.op}: somebody else is rank {self._rank} of group '{self._name}' now; was the group "
                f"made again? Then use the new one; else start each rank once"
            )
        member.posted = True

    def _swap(self, key: str, before: str, after: str) -> str:
        """Write `after` where `before` lies; gives what lies there then."""
        return str(self._ask(lambda: self._store.compare_set(key, before, after)).decode())

    def _set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def _get(self, key: str) -> str | None:
        def get() -> str | None:
            return str(self._store.get(key).decode()) if self._store.check([key]) else None

        return self._ask(get)

    def _ask(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except RuntimeError as error:  # every store raises it, or a subclass of it
            raise RuntimeError(
                f"asynctp: {self.op}: the store of group '{self._name}' does not answer ({_said(error)}); did the rank "
                f"that keeps it end? Restart all ranks"
            ) from error


@contextlib.contextmanager
def meet(group: ProcessGroup, op: str, seconds: float | None = None, remedy: str | None = None) -> Iterator[Meeting]:
    """Meet all ranks of `group`. What is raised inside is told to the peers, which raise `PeerFailed`.

    Within a meeting of the same group and thread it is a part of that.

    Args:
        group: Collective: every rank meets, in one order with its other meetings of the group.
        op: Named in errors.
        seconds: The bound of each wait; `timeout_s` when None.
        remedy: How another bound is had; the variable, where `seconds` is None.

    Raises:
        NotEnrolled: torch.distributed does not know the group.
        PeerTimeout: A rank did not come in time.
        PeerFailed: A rank failed in this attempt.
        RuntimeError: The store does not answer, or another thread of this rank is still in a meeting of the group.
    """
    member = _members.setdefault(group, _Member())
    if member.owner == threading.get_ident() and member.meeting is not None:
        yield member.meeting.inner(op)
        return
    meeting = Meeting(member, group, op, seconds, remedy)
    if not member.turn.acquire(timeout=meeting._seconds):
        raise RuntimeError(
            f"asynctp: {op}: another thread of this rank has been in a meeting of group '{group.group_name}' for "
            f"{meeting._seconds:g} s; let one thread make the first calls of a group"
        )
    try:
        member.owner, member.meeting, member.stopped = threading.get_ident(), meeting, ""
        meeting.begin()
        yield meeting
    except BaseException as error:
        meeting.fail(error)
        raise
    else:
        meeting.end()
    finally:
        member.owner = member.meeting = None
        member.turn.release()


def stop(group: ProcessGroup, error: BaseException) -> None:
    """Let the meeting that another thread is in end with an error, and its peers be told of it."""
    member = _members.get(group)
    if member is not None:
        member.stopped = _said(error)


@functools.cache
def boot_id() -> str:
    """Tells one run of a machine from all others; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except OSError:
        return ""


@functools.cache
def pid_namespace() -> str:
    """Within what process ids mean the same."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When the process `pid` started; None if there is none that runs, empty where that cannot be read."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""
    return None if state in "ZXx" else fields[18]


def _record_of(rank: int) -> str:
    return f"{_PREFIX}/rank/{rank}"


def _store_of(group: ProcessGroup) -> Any:
    try:
        return group_store(group)
    except KeyError as error:
        raise NotEnrolled(
            f"torch.distributed has no store for group '{group.group_name}'; was it destroyed?"
        ) from error


def _said(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())[:LONGEST_TEXT]
    if isinstance(error, SymmetricMemoryError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _pauses() -> Iterator[float]:
    """How long to sleep between two looks at the store."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(pause * 1.5, LONGEST_PAUSE_S)
