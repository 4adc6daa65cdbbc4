"""How the ranks of a group find each other through its store, however often each has tried, and tell of their faults.

    with meet(group, "rendezvous") as meeting:         every rank is in this attempt and in no other
        sizes = meeting.exchange("size", "64")         every rank's text, in rank order
        memory = meeting.together("memory", reserve)   `reserve()` on every rank, or one error on every rank

A store outlives groups, attempts and processes: what lies in it may be old. So each attempt draws a number, and a rank
keeps one record in the store, under its rank:

    number     drawn for the attempt that it is in, or was in last
    seen       the newest number that it has read of each rank
    failures   the attempts that have failed, each with the number of every rank that was seen in it
    process    of the rank, to tell whether it is still there

A record is *fresh* if it has seen a number that this rank has drawn for this group: it was written since. The ranks
have met when all records have seen the same numbers. The messages of the meeting lie under a digest of these, which no
other attempt has.

An attempt that fails counts once on every rank, so that later attempts of the ranks still belong together: whoever
learns of a failure in a fresh record, and has not failed with it, fails too (`PeerFailed`). So it does not matter how
often a rank has tried, nor which rank's time ran out first.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from .compat import group_store
from .errors import SET_THE_BOUND, NotEnrolled, PeerFailed, PeerTimeout, SymmetricMemoryError, timeout_s

T = TypeVar("T")
Numbers = tuple["str | None", ...]  # by rank
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1e-3, 0.05
LONGEST_TEXT = 2000  # characters of a fault that peers are told
POSTED_FAILURES = 32
_PREFIX = "asynctp/meeting"
_FIXED = "Ranks may not be further apart in time than that."
_MALFORMED = (AttributeError, TypeError, ValueError)


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
class Failure:
    """A call that failed: one attempt of every rank, each of which fails by itself or is told.

    Attributes:
        ids: numbers of the attempts that have failed by themselves.
        numbers: of the attempts, by rank; None of a rank that was not seen.
        rank, cause: where it began, and what that rank said.
        session: of the meeting that was under way; empty while the ranks had not met.
    """

    ids: frozenset[str]
    numbers: Numbers
    rank: int
    cause: str
    session: str = ""

    def same(self, rank: int, other: Failure) -> bool:
        """Whether one of `rank` is the failure that another rank tells of."""
        if not self.ids.isdisjoint(other.ids):
            return True
        pairs = [(a, b) for a, b in zip(self.numbers, other.numbers, strict=True) if a is not None and b is not None]
        seen = other.numbers[rank] in (None, self.numbers[rank])
        return seen and bool(pairs) and all(a == b for a, b in pairs)

    def joined(self, other: Failure) -> Failure:
        """This failure, with what another rank knows of it."""
        numbers = tuple(b if a is None else a for a, b in zip(self.numbers, other.numbers, strict=True))
        return replace(self, ids=self.ids | other.ids, numbers=numbers)


@dataclass(frozen=True)
class Record:
    """The record of a rank in the store."""

    number: str
    seen: Numbers
    failures: tuple[Failure, ...]
    process: Process

    def to_json(self) -> str:
        failures = [[sorted(f.ids), list(f.numbers), f.rank, f.cause, f.session] for f in self.failures]
        process = self.process
        identity = [process.boot, process.namespace, process.user, process.pid, process.start]
        return json.dumps([self.number, list(self.seen), failures, identity])

    @staticmethod
    def from_json(text: str) -> Record:
        number, seen, failures, identity = json.loads(text)
        past = (Failure(frozenset(ids), tuple(numbers), *rest) for ids, numbers, *rest in failures)
        return Record(number, tuple(seen), tuple(past), Process(*identity))


@dataclass
class _Ledger:
    """The past attempts of this rank in one group.

    Attributes:
        turn: held by the thread that is in a meeting of the group, which is `owner`.
        numbers: drawn here.
        failures: of this rank, the oldest first.
        forgotten: ids of those of others that are no concern of this rank's.
        told: the failure of another rank that ends the attempt under way.
        posted: this rank's record in the store, as text.
        stopped: why the attempt under way has to end.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    owner: int | None = None
    meeting: Meeting | None = None
    numbers: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)
    told: Failure | None = None
    posted: str = ""
    stopped: str = ""

    def news(self, rank: int, record: Record) -> list[Failure]:
        """The failures of a record that `rank`, this one, has not failed with, the oldest first."""
        return [failure for failure in record.failures if not self._knows(rank, failure)]

    def _knows(self, rank: int, told: Failure) -> bool:
        """It is a failure of this rank too, of which the other may know more."""
        for index, own in enumerate(self.failures):
            if own.same(rank, told):
                self.failures[index] = own.joined(told)
                return True
        return not self.forgotten.isdisjoint(told.ids)

    def has_failed(self, number: str | None) -> bool:
        """An attempt of any rank is part of a failure of this rank."""
        return any(number in failure.numbers for failure in self.failures)

    def wrote(self, text: str) -> bool:
        """A record in the store is one of this rank's."""
        with contextlib.suppress(*_MALFORMED):
            return Record.from_json(text).number in self.numbers
        return False


_ledgers: weakref.WeakKeyDictionary[ProcessGroup, _Ledger] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_ledgers.clear)  # a thread that is not there any more may hold a turn


class Meeting:
    """All ranks of a group, in one attempt of each. Made by `meet`."""

    def __init__(
        self, ledger: _Ledger, group: ProcessGroup, op: str, seconds: float | None, remedy: str | None = None
    ) -> None:
        self.op = op
        self._ledger, self._store = ledger, _store_of(group)
        self._name, self._rank, self._world = group.group_name, group.rank(), group.size()
        self._remedy = remedy or (SET_THE_BOUND if seconds is None else _FIXED)
        self._seconds = timeout_s() if seconds is None else seconds
        self._number = secrets.token_hex(12)
        self._seen: Numbers = ()
        self._session, self._path, self._inner = "", "", 0
        self._topics: list[str] = []
        self._process = Process.own()

    # --- meeting --------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Wait until all ranks have met.

        Raises:
            PeerTimeout: A rank did not come in time.
            PeerFailed: A rank failed, now or in an attempt that this rank was not in.
        """
        self._ledger.numbers.add(self._number)
        self._seen = self._with_own([None] * self._world)
        self._post_record()
        deadline, pauses = time.monotonic() + self._seconds, _pauses()
        while not self._met(records := self._records()):
            if time.monotonic() > deadline:
                raise self._timeout(self._missing(records), "an answer")
            time.sleep(next(pauses))
        text = ",".join(str(number) for number in self._seen)
        self._session = self._path = hashlib.sha256(text.encode()).hexdigest()[:24]
        self.exchange("met", "")  # until all ranks know, none may leave for its next attempt

    def _met(self, records: Sequence[Record | None]) -> bool:
        """Every rank has seen the same numbers. Tells the others what this rank has seen."""
        self._look_for_faults(records)
        seen = self._with_own([None if record is None else record.number for record in records])
        if seen != self._seen:
            self._seen = seen
            self._post_record()
        others = (record for rank, record in enumerate(records) if rank != self._rank)
        return all(record is not None and record.seen == seen for record in others)

    def _missing(self, records: Sequence[Record | None]) -> int:
        """The first rank that has not answered, or that has not yet seen what this rank has."""
        others = [rank for rank in range(self._world) if rank != self._rank]
        for rank in others:
            record = records[rank]
            if record is None or record.seen[self._rank] != self._number:
                return rank
        return next(rank for rank in others if (record := records[rank]) is None or record.seen != self._seen)

    def _records(self) -> list[Record | None]:
        return [None if rank == self._rank else self._record(rank) for rank in range(self._world)]

    def _record(self, rank: int) -> Record | None:
        text = self._get(_key(rank))
        try:
            found = None if text is None else Record.from_json(text)
        except _MALFORMED:  # of another version
            return None
        sizes = () if found is None else (found.seen, *(failure.numbers for failure in found.failures))
        return found if all(len(numbers) == self._world for numbers in sizes) else None

    def _fresh(self, record: Record) -> bool:
        return record.seen[self._rank] in self._ledger.numbers

    # --- faults ---------------------------------------------------------------------------------------------
    def _look_for_faults(self, records: Sequence[Record | None]) -> None:
        if self._ledger.stopped:
            raise _Stopped(f"asynctp: {self.op} of group '{self._name}' was stopped: {self._ledger.stopped}")
        for rank, record in enumerate(records):
            if record is not None and self._fresh(record):
                self._look_at(rank, record)

    def _look_at(self, rank: int, record: Record) -> None:
        """Raise for what a fresh record tells of: within a meeting, for a failure of that only."""
        for failure in self._ledger.news(self._rank, record):
            if not self._session or failure.session == self._session:
                self._ledger.told = failure
                raise PeerFailed(self.op, self._rank, failure.rank, failure.cause)
        if record.process.has_ended():
            raise PeerFailed(self.op, self._rank, rank, f"its process ({record.process.pid}) has ended")

    def _with_own(self, numbers: Sequence[str | None]) -> Numbers:
        """The numbers of the other ranks, and that of this attempt."""
        return tuple(self._number if rank == self._rank else number for rank, number in enumerate(numbers))

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this attempt has failed here."""
        failure = self._ledger.told or self._own_failure(error)
        numbers = self._with_own(failure.numbers)
        self._ledger.failures.append(replace(failure, numbers=numbers, session=self._session))
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            self._post_record()

    def _own_failure(self, error: BaseException) -> Failure:
        past = self._ledger.has_failed  # a peer's last attempt may be part of an earlier failure
        seen = tuple(None if past(number) else number for number in self._seen)
        rank = error.peer if isinstance(error, PeerFailed) else self._rank
        cause = error.cause if isinstance(error, PeerFailed) else _said(error)
        return Failure(frozenset({self._number}), seen, rank, cause)

    def _timeout(self, peer: int, awaited: str) -> PeerTimeout:
        return PeerTimeout(self.op, self._rank, peer, awaited, self._seconds, self._remedy)

    # --- messages -------------------------------------------------------------------------------------------
    def exchange(self, topic: str, text: str) -> list[str]:
        """Every rank's `text`, in rank order. Every rank has a topic once in a meeting.

        Raises:
            PeerTimeout: A rank did not send it in time.
            PeerFailed: A rank failed in this meeting.
        """
        self._topics.append(f"{self._path}/{topic}")
        self._set(f"{_PREFIX}/{self._path}/{topic}/{self._rank}", text)
        deadline = time.monotonic() + self._seconds
        return [text if rank == self._rank else self._message(topic, rank, deadline) for rank in range(self._world)]

    def _message(self, topic: str, rank: int, deadline: float) -> str:
        key, pauses = f"{_PREFIX}/{self._path}/{topic}/{rank}", _pauses()
        while (text := self._get(key)) is None:
            try:
                self._look_for_faults(self._records())
            except PeerFailed:
                if (text := self._get(key)) is None:
                    raise
                self._ledger.told = None  # sent before the rank failed: that is of what comes later
                return text
            if time.monotonic() > deadline:
                raise self._timeout(rank, f"message '{topic}'")
            time.sleep(next(pauses))
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
        found.op, found._path, found._inner = op, f"{self._path}.{self._inner}", 0
        return found

    def end(self) -> None:
        """Delete all messages; the last rank does it, when nobody reads them any more."""
        done = f"{_PREFIX}/{self._session}/done"
        with contextlib.suppress(RuntimeError):  # that is no reason to fail
            if self._store.add(done, 1) == self._world:
                for topic in self._topics:
                    for rank in range(self._world):
                        self._store.delete_key(f"{_PREFIX}/{topic}/{rank}")
                self._store.delete_key(done)

    # --- the store ------------------------------------------------------------------------------------------
    def _post_record(self) -> None:
        """Write this rank's record, in whose place there must be what it has written before.

        Raises:
            RuntimeError: Another process or group has written it since.
        """
        ledger = self._ledger
        record = Record(self._number, self._seen, tuple(ledger.failures[-POSTED_FAILURES:]), self._process)
        text, key = record.to_json(), _key(self._rank)
        if not ledger.posted:
            self._set(key, text)
        elif (found := self._swap(key, ledger.posted, text)) != text and ledger.wrote(found):  # an interrupt came then
            found = self._swap(key, found, text)
        if ledger.posted and found != text:
            raise RuntimeError(
                f"asynctp: {self.op}: somebody else is rank {self._rank} of group '{self._name}' now; was the group "
                f"made again? Then use the new one; else start each rank once"
            )
        ledger.posted = text

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
        PeerFailed: A rank failed, in this attempt or in one that this rank was not in.
        RuntimeError: The store does not answer, or another thread of this rank is still in a meeting of the group.
    """
    ledger = _ledgers.setdefault(group, _Ledger())
    if ledger.owner == threading.get_ident() and ledger.meeting is not None:
        yield ledger.meeting.inner(op)
        return
    meeting = Meeting(ledger, group, op, seconds, remedy)
    with _turn(ledger, group, meeting):
        try:
            meeting.begin()
            yield meeting
        except BaseException as error:
            meeting.fail(error)
            raise
        meeting.end()


@contextlib.contextmanager
def _turn(ledger: _Ledger, group: ProcessGroup, meeting: Meeting) -> Iterator[None]:
    if not ledger.turn.acquire(timeout=meeting._seconds):
        raise RuntimeError(
            f"asynctp: {meeting.op}: another thread of this rank has been in a meeting of group '{group.group_name}' "
            f"for {meeting._seconds:g} s; let one thread make the first calls of a group"
        )
    try:
        ledger.owner, ledger.meeting, ledger.told, ledger.stopped = threading.get_ident(), meeting, None, ""
        yield
    finally:
        ledger.owner = ledger.meeting = None
        ledger.turn.release()


def stop(group: ProcessGroup, error: BaseException) -> None:
    """Let the meeting that another thread is in end with an error, and its peers be told of it."""
    ledger = _ledgers.get(group)
    if ledger is not None:
        ledger.stopped = _said(error)


def forget_failures(group: ProcessGroup) -> None:
    """Let the failures of the peers until now be no concern of this rank's next meeting.

    Those of an older group in the store do no harm: nobody will speak of them again.
    """
    ledger = _ledgers.setdefault(group, _Ledger())
    with contextlib.suppress(RuntimeError, ValueError):  # no such group, no store, a bad bound
        meeting = Meeting(ledger, group, "release", None)
        for record in meeting._records():
            for failure in () if record is None else record.failures:
                ledger.forgotten |= failure.ids


@functools.cache
def boot_id() -> str:
    """Tells one run of a machine from all others; empty where the system does not say."""
    return _text_of(Path("/proc/sys/kernel/random/boot_id"))


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


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""


def _key(rank: int) -> str:
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
