"""Who finds that the ranks of a group do not make the same calls, and ends the waits that would have no end.

    FREE[p]   the call that peer p has come to; 0: to none
    awaited   the call to which this rank waits for all others to come; 0: none
    doing     this rank's direct call under way; 0: none

A thread of the host looks at these words some times a second, and at counts of the calls that are over, so nothing
costs a call anything. `docs/internals/protocol.md` has what it looks for ("The watch").

Once it has found such a call, the group's memory has failed: each further call on the host raises
`SymmetricMemoryError` from the error, and all peers are told. Enqueued calls cannot raise. Their tensors get bytes of
ones, which are NaN as floats: every rank's box is filled with them, and then every word is set for which a stream or a
kernel of this rank could wait, as long as the group lives, since a CUDA graph may be launched again. Copies do all
that: a kernel might find no room.

To end its waits, a failed rank writes to its peers' boxes. It does so only once every peer has failed, too, or has
ended, or does not look any more: no healthy rank reads those bytes. And a rank that no longer waits for others to come
pushes its data to them, who are in another call and must not take it for theirs. So ranks go step by step, and say to
all when they have done one:

    HAS_FAILED   calls raise
    HAS_ENDED    all have failed; waits for data are over, and nobody waits for any now
    IS_QUIET     all have ended those, and ranks before this one are quiet; waits for others to come are over, too

In Triton's interpreter waits raise themselves (`interpreted.StreamWaitOver`), and `error_of` says what that means. No
thread looks there.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import ProcessGroup

from asynctp_kernels.cuda.choose.tiles import MAX_CHUNKS
from asynctp_kernels.cuda.choose.wire import Wire
from asynctp_kernels.cuda.runtime import driver as gpu
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.errors import PeerTimeout, SymmetricMemoryError, UnlikeCalls
from asynctp_kernels.meeting import Process
from asynctp_kernels.signals import FAILED, UNLIKE
from asynctp_kernels.torch_private import group_store

log = logging.getLogger(__name__)

LOOK_S = 0.25
UNLIKE_S = 1.0  # what is under way may differ for a moment: one rank has ended a call, and another has not
ENDING_S = 0.02  # between two looks, once waits are to be ended
TOLD_S = 5.0  # without the end of a call, after which a rank takes a peer's word that it has failed
ENDS_S = 15.0  # after which a rank that has failed takes all steps, though a peer does not say anything
STEP_S = 0.25  # without the end of a wait or a call, after which a step is done
EXIT_S = 2.0  # for which the end of the process waits for a thread
HAS_FAILED, HAS_ENDED, IS_QUIET = 1, 2, 3
THE_CALL = "the same call"  # awaited of a rank that does not come to it


class Told(NamedTuple):
    """A call in the words that ranks tell each other; kept: None of one that is not known."""

    text: str
    kept_by_all: bool | None = None
    accord: int = 0


class Calls:
    """The calls that a rank has made plans for, by signature, told to the peers through the group's store.

    There the compiled function of an accord is told too, as `asynctp/accords/<accord>`, by who has made the graph.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._store, self._told = group_store(group), dict[int, Told]()

    def add(self, wire: Wire, transport: str) -> int:
        """The signature of a call."""
        number = wire.signature(transport)
        if number not in self._told:
            self._told[number] = told = Told(wire.told, wire.kept_by_all, wire.agreed)
            self._store.set(f"asynctp/calls/{number}", json.dumps(told))
        return number

    def told(self, number: int) -> Told:
        """A call of this rank's, or of a peer's, with the function of its accord."""
        found = self._told.get(number)
        try:
            if found is None:
                text = self._find(f"asynctp/calls/{number}")
                found = Told(f"an unknown call ({number})") if text is None else Told(*json.loads(text))
            function = self._find(f"asynctp/accords/{found.accord}") if found.accord else None
        except RuntimeError as error:  # the store may be gone, with the rank that has it
            return found or Told(f"an unknown call ({number}; {error})")
        return found if function is None else found._replace(text=f"{found.text} of {function.rstrip('.')}")

    def _find(self, key: str) -> str | None:
        return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def tell_failure(self, rank: int, why: str) -> None:
        """Write to the group's store why this rank has failed: its peers quote that in their errors."""
        with contextlib.suppress(RuntimeError):  # as below
            self._store.set(f"asynctp/failed/{rank}", why)

    def failure_of(self, peer: int) -> str:
        """Why a peer has failed."""
        try:
            return self._find(f"asynctp/failed/{peer}") or "it does not say why"
        except RuntimeError as error:
            return f"it cannot say why ({error})"


class Watched(Protocol):
    """The memory of a group, as far as it is watched over; `memory.GroupMemory` says what each of these is."""

    number: int
    group_name: str
    device: torch.device
    rank: int
    world: int
    bound: int
    processes: tuple[Process, ...]
    calls: Calls
    status: torch.Tensor
    made: int
    growing: str
    captured: bool
    released: bool
    failure: str | None
    error: Exception | None

    @property
    def watched(self) -> torch.Tensor: ...
    @property
    def free_words(self) -> torch.Tensor: ...
    @property
    def told_words(self) -> torch.Tensor: ...
    @property
    def all_chunk_words(self) -> list[torch.Tensor]: ...
    @property
    def boxes(self) -> list[tuple[int, int]]: ...

    def failed_at(self, peer: int) -> int: ...
    def peers_ahead(self) -> dict[int, int]: ...
    def is_in_a_call(self) -> bool: ...
    def may_be_in_a_call(self) -> bool: ...
    def has_ended(self, peer: int) -> bool: ...
    def fail(self, error: Exception) -> None: ...


def unlike(memory: Watched, peer: int, own: int, theirs: int, other: Watched | None = None) -> UnlikeCalls:
    """The error of two calls that have met.

    Args:
        memory: The group's.
        peer: The other rank.
        own: This rank's call; 0: one for which it is making memory.
        theirs: The peer's.
        other: The group of the peer's call, if that is another.
    """
    mine = memory.calls.told(own) if own else Told(memory.growing)
    found = (other or memory).calls.told(theirs)
    texts = [told.text for told in (mine, found)]
    forms = bool(mine.accord or found.accord) or (
        None not in (mine.kept_by_all, found.kept_by_all) and mine.kept_by_all != found.kept_by_all
    )
    forms = forms and "Remedy: " not in "".join(texts)  # which is that of a rank without a graph
    if other is not None:
        texts = [f"{text} in group '{each.group_name}'" for text, each in zip(texts, (memory, other), strict=True)]
    return UnlikeCalls(memory.rank, texts[0], peer, texts[1], forms)


def error_of(memory: Watched, found: Any) -> Exception:
    """The error of a stream's wait that ended without its word: an `interpreted.StreamWaitOver`."""
    wait = found.wait
    if not wait.exactly:
        return late(memory, wait.peer, 0, f"chunk {wait.chunk}")
    return _missing(memory, wait.peer, wait.value, found.found)


def late(memory: Watched, peer: int, doing: int, awaited: str) -> PeerTimeout:
    """The error of a rank that does not come."""
    call = memory.calls.told(doing).text if doing else "a call"
    return PeerTimeout(call, memory.rank, peer, awaited, memory.bound / 1e9)


def error_in(memory: Watched, status: list[int]) -> SymmetricMemoryError | PeerTimeout | None:
    """The error that a kernel's record tells of (`signals.record_timeout`, `signals.record_unlike`), if any."""
    state, peer, number = status
    if state != FAILED or peer < 0:
        return None
    theirs, own = divmod(number, UNLIKE)
    return _missing(memory, peer, own, theirs)


def _missing(memory: Watched, peer: int, own: int, theirs: int) -> UnlikeCalls | PeerTimeout:
    """The error of a call, of signature `own`, to which `peer` has not come: `theirs` is its own, if that was seen."""
    theirs = theirs or memory.peers_ahead().get(peer) or int(memory.free_words[peer])
    return late(memory, peer, own, THE_CALL) if theirs in (0, own) else unlike(memory, peer, own, theirs)


@dataclass(frozen=True)
class Look:
    """One look at a group's words.

    Attributes:
        doing, awaited: See the module.
        ended: Counts that change when a call is made, and when one ends.
        free: By peer; see the module.
        ahead: Of peers that have begun a direct call which this rank has not, its signature.
        told: By peer, the step that it has done, or 0.
        status: A kernel's record.
        gone: Peers whose process is over.
        busy: A call of this rank's may be under way.
    """

    doing: int
    awaited: int
    ended: tuple[int, ...]
    free: dict[int, int]
    ahead: dict[int, int]
    told: dict[int, int]
    status: list[int]
    gone: frozenset[int] = frozenset()
    busy: bool = True

    @property
    def state(self) -> tuple[object, ...]:
        """The words that change as calls begin, meet and end."""
        return self.doing, self.awaited, self.ended


class Watch:
    """The looks at one group, and what they tell. Of the host only: it is tested without a GPU.

    Attributes:
        latest: The last look; None before the first.
    """

    def __init__(self, memory: Watched) -> None:
        self._memory, self._since = weakref.ref(memory), time.monotonic()
        self._state: object = None
        self._apart: dict[int, tuple[int, int, float]] = {}  # by peer: both calls, and since when they are seen
        self._crossed: dict[tuple[int, int, int, int], float] = {}  # the same of calls of several groups
        self.latest: Look | None = None
        self._looked = self._since
        _watches.append(weakref.ref(self))
        self._failed: float | None = None
        self._ending: tuple[object, float] = (None, 0.0)  # what is seen while waits are ended, and since when

    def judge(self, look: Look, now: float) -> SymmetricMemoryError | PeerTimeout | None:
        """The error that a look tells of, if any."""
        memory = self._memory()
        assert memory is not None
        if (error := error_in(memory, look.status)) is not None:
            return error
        self.latest, self._looked = look, now
        if look.state != self._state:
            self._state, self._since, self._apart = look.state, now, {}
        for peer, own, theirs in self._differing(look, bool(memory.growing)):
            known = self._apart.get(peer)
            if known is None or known[:2] != (own, theirs):  # words that are read one after the other may be apart
                self._apart[peer] = (own, theirs, now)
            elif now - known[2] >= (UNLIKE_S if own else TOLD_S):  # who has made its memory may come a little sooner
                return unlike(memory, peer, own, theirs)
        if (error := self._across(memory, look, now)) is not None:
            return error
        if look.awaited and now - self._since >= memory.bound / 1e9:
            for peer, come in sorted(look.free.items()):
                if not come:
                    return late(memory, peer, look.awaited, THE_CALL)
        told = [peer for peer, has_failed in sorted(look.told.items()) if has_failed]
        if told and now - self._since >= TOLD_S:
            return SymmetricMemoryError(f"rank {told[0]} has failed: {memory.calls.failure_of(told[0])}")
        if look.gone and look.busy and now - self._since >= TOLD_S:
            gone = min(look.gone)
            return SymmetricMemoryError(f"the process of rank {gone} has ended: {memory.calls.failure_of(gone)}")
        return None

    def _differing(self, look: Look, growing: bool) -> list[tuple[int, int, int]]:
        """Peers that seem to be in another call than this rank, with both calls; forgets those that are not.

        growing: This rank is making memory for its call, which is told as 0.
        """
        found = []
        own = look.awaited or look.doing
        for peer, free in sorted(look.free.items()):
            theirs = free or look.ahead.get(peer, 0)
            if (own or growing) and theirs not in (0, own):
                found.append((peer, own, theirs))
            else:
                self._apart.pop(peer, None)
        return found

    def _across(self, memory: Watched, look: Look, now: float) -> UnlikeCalls | None:
        """The error of a peer that waits in a call of another group, while this rank waits for it in a call of this.

        Neither can go on, since a device makes one eager call after the other.
        """
        own, seen = look.awaited or look.doing, self._crossed
        self._crossed = {}
        if not own or memory.captured or not memory.processes or now - self._since < UNLIKE_S:
            return None
        for peer in (peer for peer, free in sorted(look.free.items()) if not free and peer not in look.ahead):
            for other in _living():
                found = None if other is self else other.waits_for_this_rank(memory.processes[peer], self._since)
                if found is not None:
                    place = (peer, own, found[0].number, found[1])
                    self._crossed[place] = seen.get(place, now)
                    if now - self._crossed[place] >= UNLIKE_S:
                        return unlike(memory, peer, own, found[1], found[0])
        return None

    def waits_for_this_rank(self, process: Process, since: float) -> tuple[Watched, int] | None:
        """The group's memory, and the call of it that a process has come to, where this rank is in none.

        since: When this rank came to where it is; a look from before that tells nothing.
        """
        memory, look = self._memory(), self.latest
        if memory is None or look is None or look.awaited or look.doing or memory.captured or memory.failure:
            return None
        if process not in memory.processes or self._looked <= since:
            return None
        peer = memory.processes.index(process)
        theirs = look.free.get(peer) or memory.peers_ahead().get(peer, 0)
        return (memory, theirs) if theirs else None

    def is_in_a_call(self) -> bool:
        """True while a call of this rank is under way, as far as is known, and nothing is wrong yet."""
        memory, look = self._memory(), self.latest
        if memory is None or memory.failure is not None:
            return False
        return memory.is_in_a_call() or (look is not None and bool(look.awaited or look.doing))

    def step(self, look: Look, now: float) -> int:
        """The step that this rank, which has failed, may take."""
        memory = self._memory()
        assert memory is not None
        self._failed = now if self._failed is None else self._failed
        told = {peer: step for peer, step in look.told.items() if peer not in look.gone}
        if now - self._failed >= ENDS_S:
            return IS_QUIET
        if all(step >= (IS_QUIET if peer < memory.rank else HAS_ENDED) for peer, step in told.items()):
            return IS_QUIET
        return HAS_ENDED if all(told.values()) else HAS_FAILED

    def done(self, step: int, look: Look, now: float) -> int:
        """The step that this rank has done, which takes `step`."""
        if step == HAS_FAILED:
            return HAS_FAILED
        if look.state != self._ending[0] or look.doing:
            self._ending = (look.state, now)
        if now - self._ending[1] < STEP_S:
            return HAS_FAILED
        return HAS_ENDED if look.awaited else step


_exiting = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_watches: list[weakref.ref[Watch]] = []  # only appended to, since threads read it


def _living() -> list[Watch]:
    return [watch for reference in list(_watches) if (watch := reference()) is not None]


def start_watch(memory: Watched) -> None:
    """Watch over a group until it goes, or the process ends, once all that was enqueued for it is done.

    The first look would read what lay in that memory before. In Triton's interpreter nobody watches.
    """
    if driver.IN_ORDER:
        return
    made = torch.cuda.current_stream(memory.device).record_event()
    thread = threading.Thread(target=_run, args=(weakref.ref(memory), made), name="asynctp-watch", daemon=True)
    _threads.add(thread)
    thread.start()


@atexit.register
def _end_watches() -> None:
    """A thread that comes out of a call of CUDA's when the interpreter is gone ends the process with an error.

    Where a call is under way, the watch first has the time to find that it is unlike its peers'.
    """
    end = time.monotonic() + UNLIKE_S + 2 * LOOK_S
    with contextlib.suppress(RuntimeError):  # of CUDA, where the program has ended with an error
        while time.monotonic() < end and any(watch.is_in_a_call() for watch in _living()):
            time.sleep(ENDING_S)
    _exiting.set()
    for thread in list(_threads):
        thread.join(EXIT_S)


def _run(reference: weakref.ref[Watched], made: torch.cuda.Event) -> None:
    while not _exiting.is_set():  # a rank that has failed still has to say so, and to end its waits
        try:
            _watch(reference, made)
            return
        except Exception as error:
            memory = reference()
            if memory is None or memory.released:
                return
            memory.fail(SymmetricMemoryError(f"the watch over the ranks has failed: {type(error).__name__}: {error}"))
            memory = None
            _exiting.wait(LOOK_S)


def _watch(reference: weakref.ref[Watched], made: torch.cuda.Event) -> None:
    memory = reference()
    if memory is None:
        return
    torch.cuda.set_device(memory.device)
    gpu.exchange_capture_mode(gpu.CAPTURE_RELAXED)  # calls of this thread break none
    stream = torch.cuda.ExternalStream(gpu.new_stream(memory.device), memory.device)  # type: ignore[no-untyped-call]
    stream.wait_event(made)
    with torch.cuda.stream(stream):
        watch, pages = Watch(memory), _Pages(memory)
    while memory is not None and not memory.released and not _exiting.is_set():
        with torch.cuda.stream(stream):
            look = pages.look(memory, stream)
            if memory.failure is None and (error := watch.judge(look, time.monotonic())) is not None:
                memory.fail(error)
            if memory.failure is not None:
                step = watch.step(look, time.monotonic())
                if step >= HAS_ENDED:
                    pages.end_waits(memory, look, meetings=step == IS_QUIET)
                pages.tell(memory, watch.done(step, look, time.monotonic()))
                stream.synchronize()
        pause = LOOK_S if memory.failure is None else ENDING_S
        memory = None
        _exiting.wait(pause)
        memory = reference()


class _Pages:
    """Pinned memory for what a look reads, and for what ends waits."""

    def __init__(self, memory: Watched) -> None:
        self.peers = [peer for peer in range(memory.world) if peer != memory.rank]
        self.words = torch.zeros_like(memory.watched, device="cpu").pin_memory()
        self.free = torch.zeros(memory.free_words.numel(), dtype=torch.int32).pin_memory()
        self.told = torch.zeros_like(self.free).pin_memory()
        self.steps = torch.arange(IS_QUIET + 1, dtype=torch.int32, device=memory.device)
        self.has_told = 0
        self.status = torch.zeros_like(memory.status, device="cpu").pin_memory()
        self.set = torch.full_like(self.free, MAX_CHUNKS).pin_memory()
        self.poison: torch.Tensor | None = None
        self.poisoned: object = None  # for which calls

    def look(self, memory: Watched, stream: torch.cuda.Stream) -> Look:
        pairs = [(self.words, memory.watched), (self.free, memory.free_words), (self.told, memory.told_words)]
        for page, words in [*pairs, (self.status, memory.status)]:
            page.copy_(words, non_blocking=True)
        stream.synchronize()
        doing, awaited, *ended = self.words.tolist()
        free, told = ({peer: page.tolist()[peer] for peer in self.peers} for page in (self.free, self.told))
        ahead = memory.peers_ahead() if awaited or memory.growing else {}
        gone = frozenset(peer for peer in self.peers if memory.has_ended(peer))
        busy = not gone or memory.may_be_in_a_call()
        return Look(doing, awaited, (memory.made, *ended), free, ahead, told, self.status.tolist(), gone, busy)

    def tell(self, memory: Watched, step: int) -> None:
        """Say to all peers which step this rank has done."""
        if self.has_told >= step:
            return
        memory.calls.tell_failure(memory.rank, str(memory.failure))
        stream = torch.cuda.current_stream().cuda_stream
        for peer in self.peers:
            driver.copy(memory.failed_at(peer), self.steps.data_ptr() + 4 * step, 4, stream)
        self.has_told = step

    def end_waits(self, memory: Watched, look: Look, meetings: bool) -> None:
        """Let everything that waits for data, or will, go on with NaN. meetings: also what waits for ranks to come."""
        if look.awaited or look.state != self.poisoned:  # ranks may have met, and data may not have come
            self._poison(memory)
            self.poisoned = look.state
        if meetings and look.awaited:
            self.free.fill_(look.awaited)
            memory.free_words.copy_(self.free, non_blocking=True)
        for words in memory.all_chunk_words:
            words.copy_(self.set, non_blocking=True)
        self.status.copy_(torch.tensor([FAILED, -1, 0]))
        memory.status.copy_(self.status, non_blocking=True)

    def _poison(self, memory: Watched) -> None:
        """Fill all ranks' boxes with NaN: this rank may read from any."""
        if self.poison is None:
            self.poison = torch.full((1 << 22,), 255, dtype=torch.uint8).pin_memory()
        stream = torch.cuda.current_stream().cuda_stream
        for address, whole in memory.boxes:
            for first in range(0, whole, self.poison.numel()):
                size = min(self.poison.numel(), whole - first)
                gpu.copy_from_host(address + first, self.poison.data_ptr(), size, stream)
