"""The memory of one group on one GPU: symmetric memory, signal words, a copy stream, events.

Areas of symmetric memory, each as large as the largest call so far. They are made and grown collectively, and never
during a CUDA graph capture:

    box       an inbox, of pushed data, by source, but for the own            [from rank 0 | from rank 1 | ...]
              or an outbox, the own shard, which peers pull                   [shard | its scales]
              or, in an all-reduce, an inbox and then the own sum, an outbox
    direct    the direct kernels: two slots of landings, epochs               see `copy_kernels`

A box is a bounded buffer of depth one, whose words (FREE, FULL, LANDED) order all accesses. Each word is cleared by its
reader, so nothing depends on how often, in which CUDA graph or in which order of shapes a call runs, as long as all
ranks make the same calls of a group in the same order. `docs/internals/protocol.md` has the words and a call's stages.

What the copy stream waits for are stream memory operations, which need no SM; of the kernel that waits (the reduction),
one CTA fits beside the GEMM's on every SM.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from asynctp_kernels.cuda.choose.tables import Table
from asynctp_kernels.cuda.choose.tiles import MAX_CHUNKS as MAX_CHUNKS
from asynctp_kernels.cuda.choose.tiles import MAX_OWN as MAX_OWN
from asynctp_kernels.cuda.choose.wire import DIRECT_SIGNATURES, Wire
from asynctp_kernels.cuda.runtime.enroll import enroll
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.script import Channel, Player, Step, compile_script
from asynctp_kernels.cuda.runtime.watch import Calls, error_in, start_watch
from asynctp_kernels.errors import SET_THE_BOUND, NotEnrolled, SymmetricMemoryError, given_timeout_s, timeout_s
from asynctp_kernels.meeting import FAULTS, Process, meet, stop
from asynctp_kernels.signals import new_status
from asynctp_kernels.torch_private import group_timeout_s

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WORLD = 8
DIRECT_PROGRAMS = 132
FLIGHTS = 64  # events of results in flight; one that is used again only makes its first user wait longer
NO_BOUND = (1 << 63) - 1
#: how far apart the ranks may come to a group's first call: some of them may still compile
FIRST_CALL_S = 1800.0
_WORD = 4
#: where this rank's own words begin: progress of tiles, idle ones, arrivals, a 1, `doing`, `awaited`, pairs of counts
_IDLE = MAX_WORLD * MAX_OWN
_ARRIVALS = _IDLE + MAX_OWN
_ONE = _ARRIVALS + MAX_WORLD
_DOING = _ONE + 4
_COUNTS = _DOING + 4
#: kernels whose programs and calls are counted; `stage` runs beside a gather's GEMM
_KINDS = ("gather", "scatter", "direct", "stage")
_GRANULE = 1 << 21


class Order(ctypes.Structure):
    """The order of the calls of a device, as `site.c` has it too.

    stream, capture, last: of the last call: its stream, the capture that it is part of or 0, the event of its end.
    group, flown_capture, flown: of the last result that was left in flight: the number of its group's memory, its
    capture, and its event. Events are 0 before there is one.
    """

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("stream", "capture", "last", "group", "flown_capture", "flown")
    )


#: per device, and whether a graph of the program's captures the calls
_orders: dict[tuple[torch.device, bool], Order] = {}
#: per device: see `GroupMemory.turn`
_turns: dict[torch.device, threading.Lock] = {}
_numbers = itertools.count()
#: held while the memory of a group is made
_makings: weakref.WeakKeyDictionary[ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
#: why a group's memory could not be made on this rank, until it is released
_failed: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[ProcessGroup, GroupMemory] = weakref.WeakKeyDictionary()


@dataclass
class Area:
    """One symmetric allocation. `peers[r]` is the address of rank r's part in this process."""

    memory: torch.Tensor
    handle: object
    peers: list[int]
    table: torch.Tensor

    @property
    def size(self) -> int:
        return self.memory.numel()


@dataclass
class Words:
    """int32 signal words of one direction, from word `number` on. Addresses of word `i` at rank `r`: `at(r, i)`."""

    peers: list[int]
    number: int

    def at(self, rank: int, index: int = 0) -> int:
        return self.peers[rank] + (self.number + index) * _WORD


@dataclass
class GroupMemory:
    """See the module. Everything here belongs to one process group and one device.

    Attributes:
        rank, world: of the group.
        stream, reducer: handles of the copy stream and the reducer's; of high priority, so that nothing is queued
            after other work.
        orders: of calls that are not captured, and of those that are.
        turn: held from `begin` to `ended`, so that calls of several threads come one after the other on a device.
        failure: why the memory must not be used again. error: the error that told so, if the watch found it.
        released: nobody may use it any more.
        generation: how often all plans were forgotten: those of before must not run any more.
        skipped: calls that this rank has left out, since they ended with an error. made: calls that it has made, of
            which so many were `launched` as a plan's graph.
        growing: the call, in words, for which this rank is making more memory; empty for none.
        calls: what ranks tell each other about their calls.
        bound: of a wait for a rank, in nanoseconds.
        captured: a call has been captured in a CUDA graph of the program's.
        retired: names and areas that grew after that; a graph still has their addresses, so they stay as long as the
            group.
        table: measured choices, the same on every rank.
        processes: of the ranks; none where they are not known.
        full, free, landed, failed: words of each direction. scatter_channel, gather_channel: those of pushed data.
        progress: address of int32 [world, MAX_OWN], local: finished tiles of chunk (destination, c) of a scatter.
        idle: of int32 [MAX_OWN] that nobody counts in, for a reduction of what no GEMM makes.
        arrivals: of int32 [world]: how many chunks of each source have been pulled. one: of a constant 1.
        doing, awaited: the signature of the direct call under way, and that of the call to which this rank waits for
            all others to come; 0 for none.
    """

    of_group: InitVar[ProcessGroup]
    device: torch.device
    rank: int
    world: int
    stream: int
    reducer: int
    signals: Area
    local: torch.Tensor
    peer_writes: bool
    areas: dict[str, Area] = field(default_factory=dict)
    plans: dict[object, object] = field(default_factory=dict)
    failure: str | None = None
    error: Exception | None = None
    released: bool = False
    generation: int = 0
    skipped: int = 0
    made: int = 0
    launched: int = 0
    growing: str = ""
    last_implementation: str = "sequential"
    captured: bool = False
    retired: list[tuple[str, Area]] = field(default_factory=list)
    table: Table = field(default_factory=dict)
    processes: tuple[Process, ...] = ()

    def __post_init__(self, of_group: ProcessGroup) -> None:
        # not the group itself: this is the value of a dictionary that drops its entry when the group goes
        self.group_name: str = of_group.group_name
        self._group = weakref.ref(of_group)
        self.start, self.running, self.end, self.reduced = (driver.new_event() for _ in range(4))
        self.last, self.last_captured = driver.new_event(), driver.new_event()  # ends of calls
        self.turn = _turns.setdefault(self.device, threading.Lock())
        self.orders = [_orders.setdefault((self.device, captured), Order()) for captured in (False, True)]
        self.flown = driver.new_event()  # of what was last left in flight
        self.in_graph = False  # what is enqueued now becomes the graph of a plan (`edited`)
        self.number = next(_numbers)
        # events of results in flight; what a capture has recorded, nothing outside of it can wait for
        self.flights, self.flights_captured = (
            itertools.cycle([driver.new_event() for _ in range(FLIGHTS)]) for _ in range(2)
        )
        # the end of the last gather that was left in flight, and in which capture: an event that no capture takes over
        self.gathers = {captured: (driver.new_event(), -1) for captured in (False, True)}
        self.capture = 0  # of the call under way; 0 for none
        self._events = [driver.new_event() for _ in range(self.world * MAX_CHUNKS)]
        self.epoch = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.status = new_status(self.device)
        self.bound = int(_bound_s(of_group) * 1e9)
        self.kernel_bound = self.bound if driver.IN_ORDER else NO_BOUND  # of waits that the host watches over
        self.pads = self.signals.table
        self.full, self.free, self.landed, self.failed = (Words(self.signals.peers, i * MAX_WORLD) for i in range(4))
        start, self.doing, self.awaited = self.local.data_ptr(), self.local[_DOING:], self.local[_DOING + 1 :]
        self.progress, self.idle = start, start + _IDLE * _WORD
        self.arrivals, self.one = start + _ARRIVALS * _WORD, start + _ONE * _WORD
        self.scatter_channel, self.gather_channel = (
            Channel(self.rank, self.world, words.at, self.free.at, self.awaited.data_ptr())
            for words in (self.full, self.landed)
        )
        self.calls = Calls(of_group)
        self._constants: dict[int, torch.Tensor] = {}
        start_watch(self)

    @property
    def group(self) -> ProcessGroup:
        """The group.

        Raises:
            SymmetricMemoryError: It is gone.
        """
        group = self._group()
        if group is None:
            raise SymmetricMemoryError(f"group '{self.group_name}' has been destroyed")
        return group

    # --- order of calls ----------------------------------------------------------------------------------
    def fork(self, stream: int) -> None:
        """Let the copy stream go on after what `stream` has done so far, and, in a graph, after what is in flight."""
        driver.record_event(self.start, stream)
        driver.wait_event(self.stream, self.start)
        if self.in_graph:  # else that is on the copy stream itself
            driver.wait_event_at_launch(self.stream, self.flown)

    def begin(self, stream: int) -> None:
        """This call starts after the device's last one, should that have run on another stream.

        Eager calls never overlap each other on a device, not even those of different groups: kernels of two calls that
        wait for other ranks could take each other's place on the SMs, in another order on every rank.
        """
        if self.failure is not None:
            self.check()
        self.made += 1
        capture = self.capture = driver.capture_id(stream) if driver.capturing() else 0
        self.captured |= capture != 0
        order = self.orders[self.capture != 0]
        if order.flown and order.group != self.number and order.flown_capture == capture:
            driver.wait_event(stream, order.flown)
        if order.last and order.stream != stream and order.capture == capture:
            driver.wait_event(stream, order.last)
        order.stream, order.capture, order.last = stream, capture, self.last_captured if capture else self.last

    def ended(self, stream: int) -> None:
        """Remember where this call ends, for `begin`.

        Raises:
            PeerTimeout: The call is over, not only enqueued, and a wait of it ran out.
        """
        driver.record_event(self.last_captured if self.capture else self.last, stream)
        if driver.IN_ORDER and (error := error_in(self, self.status.tolist())) is not None:
            self.fail(error)
            raise error

    def in_flight(self, stream: int, gathers: bool = False) -> int:
        """End a call that `stream` does not wait for; gives the event after which its result is complete.

        Calls of other groups begin after it (see `begin`), those of this group follow it on the copy stream.
        """
        event = next(self.flights_captured if self.capture else self.flights)
        driver.record_event(event, self.stream)
        if not self.capture:  # a graph of the program's is not launched while anything is in flight
            driver.record_event(self.flown, self.stream)
            driver.wait_event(self.reducer, event)
        order = self.orders[self.capture != 0]
        order.group, order.flown_capture, order.flown = self.number, self.capture, event
        if gathers:
            landed, _ = self.gathers[self.capture != 0]
            driver.record_event(landed, self.stream)
            self.gathers[self.capture != 0] = (landed, self.capture)
        self.ended(stream)
        return event

    def land(self, stream: int) -> None:
        """Let `stream` wait for what this group has in flight: for a call that does not begin on the copy stream."""
        order = self.orders[self.capture != 0]
        if order.flown and (order.group, order.flown_capture) == (self.number, self.capture):
            driver.wait_event(stream, order.flown)

    def land_gathers(self, stream: int) -> None:
        """Let `stream` wait for the last gather in flight: another gather's matmuls wait for the same words."""
        landed, capture = self.gathers[self.capture != 0]
        if capture == self.capture:
            driver.wait_event(stream, landed)

    def call(self, stream: int, plan: Any, call: Any, addresses: tuple[int, ...]) -> None:
        """Make a call that `stream` waits for.

        Args:
            stream: Where it is made.
            plan, call: What it does: `plan.enqueue(stream, call)`, or a launch of `plan.graph`.
            addresses: Of the call's tensors.
        """
        with self.turn:
            self.begin(stream)
            if plan.waits_for_in_flight:
                self.land(stream)
            elif plan.reads_landed:
                self.land_gathers(stream)
            self.run(stream, plan, call, addresses)
            self.ended(stream)

    def fly(self, stream: int, plan: Any, call: Any, gathers: bool = False) -> int:
        """Make a call on the copy stream that `stream` does not wait for; gives the event after which it is over."""
        with self.turn:
            self.begin(stream)
            self.fork(stream)
            self.run(self.stream, plan, call, call.addresses())
            return self.in_flight(stream, gathers)

    def flight(self, gathers: bool) -> tuple[int, ...]:
        """The numbers that `site.c` makes such calls with."""
        landed, _ = self.gathers[False]
        return self.stream, self.reducer, self.start, self.flown, landed * gathers

    def run(self, stream: int, plan: Any, call: Any, addresses: tuple[int, ...]) -> None:
        """Make a call, in its turn: in a capture of the program's, and where a plan has no graph, it is enqueued."""
        if self.capture or plan.graph is None:
            plan.enqueue(stream, call)
        else:
            plan.graph.run(stream, plan, call, addresses)

    def event(self, rank: int, chunk: int) -> int:
        """The event about a chunk of `rank`'s rows: it has been pulled, or is ready to be pushed."""
        return self._events[rank * MAX_CHUNKS + chunk]

    # --- words -------------------------------------------------------------------------------------------
    def done(self, kind: str) -> torch.Tensor:
        """Counts of a kernel's programs that are done, and of calls that are. kind: One of `_KINDS`."""
        first = _COUNTS + 4 * _KINDS.index(kind)
        return self.local[first : first + 2]

    @property
    def watched(self) -> torch.Tensor:
        """The words that `watch` reads: `doing`, `awaited`, then counts, of which those of calls grow."""
        return self.local[_DOING:]

    def _own(self, words: Words) -> torch.Tensor:
        return self.signals.memory.view(torch.int32)[words.number :][:MAX_WORLD]

    @property
    def free_words(self) -> torch.Tensor:
        """This rank's FREE words, by peer."""
        return self._own(self.free)

    def failed_at(self, peer: int) -> int:
        """Address of the word that this rank sets at a peer when it has failed (`watch`)."""
        return self.failed.at(peer, self.rank)

    @property
    def told_words(self) -> torch.Tensor:
        """Those that peers have set here."""
        return self._own(self.failed)

    @property
    def all_chunk_words(self) -> list[torch.Tensor]:
        """This rank's words of chunks."""
        return [self._own(words) for words in (self.full, self.landed)]

    def peers_ahead(self) -> dict[int, int]:
        """The peers that are in a direct call which this rank has not begun, with its signature."""
        words = self.areas.get("direct words")
        if words is None:
            return {}
        every = words.memory.view(torch.int64)[: self.world * DIRECT_PROGRAMS].cpu()  # a copy, which needs no SM
        found = every[::DIRECT_PROGRAMS].tolist()
        epoch = int(self.epoch.item())
        calls = {peer: divmod(word, DIRECT_SIGNATURES) for peer, word in enumerate(found) if peer != self.rank}
        return {peer: signature for peer, (at, signature) in calls.items() if at > epoch}

    @property
    def dummy(self) -> torch.Tensor:
        """A tensor for kernel arguments that are not used."""
        return self.local.view(torch.float32)

    @property
    def shared_bytes(self) -> int:
        """Size of all symmetric memory of this rank."""
        retired = [area for _, area in self.retired]
        return sum(area.size for area in (self.signals, *self.areas.values(), *retired))

    @property
    def boxes(self) -> list[tuple[int, int]]:
        """(address, bytes) of each box, the memory to which ranks write data: on every rank, in use or retired."""
        boxes = [area for name, area in (*self.retired, *tuple(self.areas.items())) if name == "box"]
        return [(address, box.size) for box in boxes for address in box.peers]

    def fail(self, error: Exception) -> None:
        """From now on calls raise: `error` has told that ranks are out of step."""
        if self.failure is None:
            self.failure, self.error = f"{type(error).__name__}: {error}", error
            log.error("group %s: %s", self.group_name, error)
            if (group := self._group()) is not None:
                stop(group, error)  # this rank may wait for the others to make memory

    def is_in_a_call(self) -> bool:
        """True while a call of this rank is under way that no graph has captured."""
        return not (driver.is_over(self.last) and driver.is_over(self.flown))

    def may_be_in_a_call(self) -> bool:
        """True while a call of this rank is under way, and once a graph was captured, whose calls are not known."""
        return self.captured or self.is_in_a_call()

    def has_ended(self, peer: int) -> bool:
        """A peer's process is known to be over."""
        return bool(self.processes) and self.processes[peer].has_ended()

    def check(self) -> None:
        """Raise if calls have failed.

        Raises:
            SymmetricMemoryError: They have.
        """
        if self.failure is not None:
            raise SymmetricMemoryError(_out_of_step(self.group_name, self.failure)) from self.error

    def compiled(self, steps: Sequence[Step]) -> Player:
        """A script, of stream memory operations where that is possible."""
        return compile_script(steps, self.peer_writes, self._constant)

    def _constant(self, value: int) -> int:
        """Address of an int32 that stays `value`."""
        if value == 1:
            return self.one
        if value not in self._constants:
            self._constants[value] = torch.full((1,), value, dtype=torch.int32, device=self.device)
        return self._constants[value].data_ptr()

    def signature(self, wire: Wire, transport: str) -> int:
        """The number of a call, by which ranks tell it from others."""
        return self.calls.add(replace(wire, skipped=self.skipped), transport)

    # --- areas --------------------------------------------------------------------------------------------
    def require(self, name: str, size: int) -> Area:
        """The area `name` with at least `size` bytes; grows it if need be, which is collective, and forgets all plans.

        Raises:
            SymmetricMemoryError: it would have to grow during a CUDA graph capture, or an earlier call failed.
        """
        self.check()
        found = self.areas.get(name)
        if found is not None and found.size >= size:
            return found
        if driver.capturing():
            raise SymmetricMemoryError(
                f"group '{self.group_name}' has {found.size if found else 0} bytes of {name} memory and this "
                f"call needs {size}; it cannot grow during a CUDA graph capture. Run it once before you capture it."
            )
        driver.synchronize(self.device)
        group = self.group
        whole = -(-size // _GRANULE) * _GRANULE
        seconds = None if driver.IN_ORDER else self.bound / 1e9
        self.growing = f"a call that needs {size} bytes of {name} memory"
        try:
            area = _outside_pools(group, self.device, lambda: _share(group, self.device, whole, seconds))
        except RuntimeError:
            self.check()  # this rank waits for the others
            raise
        finally:
            self.growing = ""
        if found is not None and self.captured:
            self.retired.append((name, found))
        self.areas[name] = area
        self.forget_plans()
        return area

    def forget_plans(self) -> None:
        """Drop all plans, and their graphs. Who keeps one looks at `generation` each time."""
        self.generation += 1
        self.plans.clear()

    def direct(self, slot_bytes: int) -> tuple[Area, Area]:
        """The landings of the direct kernels, two slots of at least `slot_bytes`, and their words, of two shots."""
        area = self.require("direct", 2 * slot_bytes)
        return area, self.require("direct words", 2 * self.world * DIRECT_PROGRAMS * 8)


def _bound_s(group: ProcessGroup) -> float:
    """Seconds that a wait for a rank may take: `ASYNCTP_TIMEOUT_S`, or the group's own timeout."""
    return timeout_s() if driver.IN_ORDER else given_timeout_s() or group_timeout_s(group)


def _out_of_step(group_name: str, failure: str | None) -> str:
    return (
        f"the memory of group '{group_name}' is out of step since: {str(failure).rstrip('.')}. "
        f"If every rank has raised, asynctp_kernels.release(group) on all of them mends it; else restart them."
    )


def group_memory(group: ProcessGroup, device: torch.device) -> GroupMemory:
    """The memory of `group`, made at the first call (collective).

    Raises:
        SymmetricMemoryError: the GPUs cannot share memory (torch's reason), or a capture is under way.
    """
    found = _groups.get(group)
    if found is None:
        if driver.capturing():
            raise SymmetricMemoryError("the first call of a group cannot be captured: run the program once before that")
        with _makings.setdefault(group, threading.Lock()):  # another thread may be making it
            found = _groups.get(group) or _first_memory(group, device)
    return found


def _first_memory(group: ProcessGroup, device: torch.device) -> GroupMemory:
    if group in _failed:
        raise SymmetricMemoryError(_out_of_step(group.group_name, _failed[group]))
    try:
        found = _outside_pools(group, device, lambda: _make(group, device))
    except SymmetricMemoryError:  # on every rank
        raise
    except BaseException as error:
        _failed[group] = f"{type(error).__name__}: {error}"
        raise
    _groups[group] = found
    return found


def _outside_pools(group: ProcessGroup, device: torch.device, make: Callable[[], T]) -> T:
    """`make()` on a thread that an interrupt of this one ends too (`driver.outside_pools`)."""
    return driver.outside_pools(device, make, lambda error: stop(group, error))


def existing_memory(group: ProcessGroup) -> GroupMemory | None:
    """The memory of `group`, if there has been a call."""
    return _groups.get(group)


def release(group: ProcessGroup) -> None:
    """Free all memory of `group`, captured graphs' included. Collective in effect: the next call starts anew.

    Its streams and events stay until the process ends.
    """
    found = _groups.pop(group, None)
    _failed.pop(group, None)
    if found is not None:
        with found.turn:  # another thread may be making a call, which is over before its memory goes
            driver.synchronize(found.device)
            found.failure, found.released = "it was released", True
        found.forget_plans()


def _make(group: ProcessGroup, device: torch.device) -> GroupMemory:
    with meet(group, "first call", _bound()) as meeting:
        table = enroll(meeting, group.group_name, device.index)
        try:
            signals = _share(group, device, _GRANULE, _bound())
            return meeting.together("memory", lambda: _new(group, device, signals, table, meeting.processes))
        except SymmetricMemoryError as error:  # on every rank
            raise error if driver.IN_ORDER else NotEnrolled(str(error)) from error


def _new(
    group: ProcessGroup, device: torch.device, signals: Area, table: Table, processes: tuple[Process, ...]
) -> GroupMemory:
    local = torch.zeros(_COUNTS + 4 * len(_KINDS), dtype=torch.int32, device=device)
    local[_ONE] = 1
    return GroupMemory(
        of_group=group,
        device=device,
        rank=group.rank(),
        world=group.size(),
        stream=driver.new_stream(device),
        reducer=driver.new_stream(device),
        signals=signals,
        local=local,
        peer_writes=driver.peer_writes_supported(),
        table=table,
        processes=processes,
    )


def _bound() -> float | None:
    """How long a rank waits for the others' first call: `ASYNCTP_TIMEOUT_S` says it on CPUs only."""
    return None if driver.IN_ORDER else FIRST_CALL_S


def _share(group: ProcessGroup, device: torch.device, size: int, seconds: float | None) -> Area:
    """Symmetric memory, zeroed on every rank before any rank gets it. Collective: all ranks get it, or none.

    A rank waits for the others for `seconds`; see `meet`.
    """

    def guarded(do: Callable[[], T]) -> T:
        try:
            return do()
        except FAULTS:
            raise
        except RuntimeError as error:
            raise _not_shared(group, size, error) from error

    with meet(group, "memory", seconds, SET_THE_BOUND) as meeting:
        part = meeting.together("reserve", lambda: guarded(lambda: driver.reserve(device, size)))
        memory, handle, peers = meeting.together("share", lambda: guarded(lambda: driver.share(group, part)))
        return Area(memory, handle, peers, torch.tensor(peers, dtype=torch.int64, device=device))


def _not_shared(group: ProcessGroup, size: int, error: RuntimeError) -> SymmetricMemoryError:
    hint = "All ranks must be on one host with peer access (NVLink); 'asynctp doctor' says what is missing."
    if "out of memory" in str(error):
        hint = "The GPU has no room for it: use less of it elsewhere, smaller calls, or more ranks."
    return SymmetricMemoryError(f"no symmetric memory of {size} bytes on group '{group.group_name}': {error}. {hint}")
