"""A call made again on the same addresses is one graph launch: what it enqueues is recorded, once, in a CUDA graph.

A call of an op is a dozen or more driver calls, cuBLAS calls and kernel launches, which take the host 40 to 250 us; a
launch of a graph of them takes 4 to 20. Programs that repeat themselves, as a training step does, get the same
addresses from PyTorch's allocator again and again. So the addresses of calls are remembered. What is seen for the
second time is recorded, and from then on launched. The first call, a call on new addresses, and one inside a capture of
the program's enqueue as ever: the same work, in the same order, to the same bits.

Small tensors get new addresses for dozens of steps longer than large ones: they share a few segments of memory with all
that a program keeps for another step, be it a loss (docs/internals/measurements.md). So where a call comes again whose
*small operands*, scales and biases, are elsewhere, it is recorded with places of its own for them. It begins with
copies to there, and each launch is told from where. They take the GPU some time, so once small operands stay, the call
is recorded without.

Recordings are kept on the host. On the GPU each plan has one executable graph, or one for either kind. Some 100 KB of
its memory go into each, and it is brought up to date before each launch.

What makes a recording as sound as the call itself:

- *Addresses.* A plan makes all memory of a call but temporaries before it enqueues. The key of a recording is the plan
  and where all of that and the operands lie, with what the program has cuBLAS compute in; shapes, strides and dtypes
  are the plan's. A recording keeps no memory alive: it is launched only with tensors that are where it reads and
  writes, and its copies are told so (`driver.Graph`). Copies of many ranges, as of more than 4 blocks of rows, cannot
  be: calls with such are not recorded.
- *Temporaries*, which cuBLAS and conversions take on the way, places of small operands, and copies of operands that lie
  as no kernel reads them, come from a pool of this module's, which is never given back, as does cuBLAS's workspace for
  the recorder's stream; where the allocator cannot promise that, nothing is recorded, which the log says
  (`driver.unrecordable`). Calls that use them come one after the other on a device (`GroupMemory.turn`). Only recorded
  calls write to this pool. The recorder's stream is not ordered after them, so it must not write: it makes memory
  uninitialised, and makes cuBLAS's first workspace elsewhere.
- *Order.* In a recording the copy stream and the reducer are branches of the graph, not those streams. Both wait for
  what the group has in flight on the streams (`GroupMemory.after_flights`), by an event that each launch looks up
  anew. All else that orders calls is outside of a recording.
- *The program's own captures and memory pools* see nothing of it: a recorder has a thread and streams of its own, none
  of PyTorch's (`driver.new_stream`).

Source: CUDA Driver API, "Graph Management" (a launch is ordered after earlier launches of the same graph; an update
affects later launches only; what is destroyed in flight is freed when it is done), "Stream Management"
(cuStreamWaitEvent, CU_EVENT_WAIT_EXTERNAL).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from asynctp_kernels.cuda.runtime import driver as gpu
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.errors import SymmetricMemoryError
from asynctp_kernels.torch_private import matmul_settings, new_tensors

log = logging.getLogger(__name__)

VARIABLE = "ASYNCTP_RECORDED_CALLS"
MAX_RECORDED = 4096  # of a model of 100 layers, and some 20 KB each
MAX_READY = 512  # executable graphs of one group
#: for each recording that is kept: addresses of calls that are remembered, and calls that are turned away for want of
#: room until all are forgotten to make some
SEEN, TURNED_AWAY = 2, 10
#: the patience with work that is one kernel: a launch of a recording of it saves 5 to 27 us, and to record it takes 360
#: to 400. Source: docs/results/2026-11-28-h200x2/calls-16-rowwise-base.jsonl
OF_ONE_KERNEL = 16
#: after so many calls in a row whose small operands stay, a call that copies them is recorded without copies; then the
#: number grows by this factor
SETTLED = 4
#: A place of a small operand is aligned as that is, modulo this: cuBLAS chooses by it. Strides are the same, too.
ALIGNMENT = 256
T = TypeVar("T", bound=gpu.Graph)
Enqueue = Callable[..., None]
"""Enqueues a call's work. Arguments: the stream, and copies of its small operands if it has to read these instead."""


class Work(NamedTuple):
    """The work of a call.

    Attributes:
        plan: Its number.
        addresses: Of all its memory but the small operands.
        enqueue: Does it. Calls of the same plan, addresses and small operands do the same.
        cublas: It calls that, which the program's settings change.
        small: Operands that may be anywhere, of the same shapes and strides in each call of the plan.
        patience: How often it is enqueued before it is recorded.
    """

    plan: int
    addresses: tuple[int, ...]
    enqueue: Enqueue
    cublas: bool = False
    small: Sequence[Tensor] = ()
    patience: int = 1


@dataclass(slots=True)
class Seen:
    """A call that came.

    Attributes:
        at: Where its small operands were last.
        stayed: How many calls in a row they have been there again. times: How many calls there were.
        settled: How many they have to stay, until it is recorded without copies.
    """

    at: tuple[int, ...]
    stayed: int = -1
    times: int = 0
    settled: int = SETTLED

    def comes(self, at: tuple[int, ...]) -> bool:
        """Count a call; whether its small operands have moved."""
        moved = self.at != at
        self.stayed = 0 if moved else self.stayed + 1
        self.at, self.times = at, self.times + 1
        return moved


class Recordings:
    """Those of one group's calls.

    Attributes:
        most: How many are kept; the program may say (`ASYNCTP_RECORDED_CALLS`). 0 where calls do their work at once.
        under_way: A call is being recorded.
        launched: How many calls were launches of a recording.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.most, self.under_way = device, 0 if driver.IN_ORDER else _most(), False
        self.launched = 0
        #: keys: the call, and addresses of its small operands; or their alignments, if the recording copies them
        self._kept: dict[tuple[tuple[Any, ...], tuple[int, ...]], gpu.Graph] = {}
        self._ready: dict[Any, gpu.Executable] = {}
        self._seen: dict[tuple[tuple[Any, ...], tuple[int, ...]], Seen] = {}  # keys as in `_kept`
        self._refused: set[Any] = set()
        self._turned_away, self._told = 0, False

    def run(self, stream: int, work: Work, urgent: bool) -> None:
        """Do the work on a stream. urgent: it is one of high priority."""
        if not self.most or work.plan in self._refused:
            work.enqueue(stream)
            return
        key = (work.plan, *work.addresses, *(matmul_settings() if work.cublas else ()))
        at = tuple([operand.data_ptr() for operand in work.small])
        found = self._kept.get((key, at)) or self._copying_or_new(key, at, work, urgent)
        ready = None if found is None else self._shown(work.plan, found, at)
        if ready is None:
            work.enqueue(stream)
            return
        self.launched += 1
        ready.launch(stream)

    def _shown(self, plan: int, graph: gpu.Graph, at: tuple[int, ...]) -> gpu.Executable | None:
        """An executable of this graph, for small operands that are there. None: enqueue."""
        which = (plan, graph.follows)
        ready = self._ready.pop(which, None) or gpu.Executable()
        try:
            ready.show(graph, at)
        except SymmetricMemoryError as error:
            self._refuse(plan, error)
            return None
        if len(self._ready) >= MAX_READY:
            del self._ready[next(iter(self._ready))]
        self._ready[which] = ready  # the last one is the last used
        return ready

    def _copying_or_new(self, key: tuple[Any, ...], at: tuple[int, ...], work: Work, urgent: bool) -> gpu.Graph | None:
        """The recording that copies small operands, or a new one of either kind if it is time. None: enqueue."""
        which = (key, _alignments(at))
        copying = self._kept.get(which)
        if copying is None and not all(map(_in_one_piece, work.small)):
            which = (key, at)  # they are never copied
        if (seen := self._seen.get(which)) is None:
            if len(self._seen) >= SEEN * self.most:
                self._seen.clear()
            seen = self._seen[which] = Seen(at)
        moved = seen.comes(at)
        settled = seen.stayed >= seen.settled and len(self._kept) < self.most
        if seen.times <= work.patience or (copying is not None and not settled):
            return copying
        made = self._recorded(work, urgent, work.small if moved else (), refuses=copying is None)
        if made is not None:
            self._kept[which if moved else (key, at)] = made
        elif work.plan in self._refused:
            self._seen.pop(which, None)  # or it is gone already: all were forgotten, to make room
        if copying is not None:
            seen.settled *= SETTLED  # where they stay for some calls only, copies cost less than recordings
        return made or copying

    def _recorded(self, work: Work, urgent: bool, moved: Sequence[Tensor], refuses: bool) -> gpu.Graph | None:
        """Record it, with copies of what has moved. None: it cannot be; if it `refuses`, nor can others of its plan."""
        if (setting := gpu.unrecordable()) is not None:
            _say_unrecordable(setting)
            return None
        if not self._room():
            return None
        self.under_way = True
        try:
            graph = recorder(self.device).record(work.enqueue, work.cublas, urgent, moved)
        except Exception as error:
            if refuses:
                self._refuse(work.plan, error)
            else:
                log.info("small operands are still copied in calls of one shape: %s", error)
            return None
        finally:
            self.under_way = False
        if graph.known:
            return graph
        if refuses:
            self._refused.add(work.plan)
            log.info("calls of one shape are made anew each time: a graph of them could not be brought up to date")
        return None

    def _room(self) -> bool:
        """Whether one more can be kept; who is turned away often enough gets room by all others' being forgotten."""
        if len(self._kept) < self.most:
            return True
        self._turned_away += 1
        if self._turned_away < TURNED_AWAY * self.most:
            return False
        self.clear()
        return True

    def _refuse(self, plan: Any, error: Exception) -> None:
        """Nothing of the call has run: it, and others of its plan, can still be made as they always could."""
        self._refused.add(plan)
        level, self._told = (logging.INFO if self._told else logging.WARNING), True
        log.log(level, "calls of one shape are made anew each time, which takes the host longer: %s", error)

    def clear(self) -> None:
        """Forget all, since what they refer to has gone, or to make room."""
        self._kept.clear()
        self._ready.clear()
        self._seen.clear()
        self._refused.clear()
        self._turned_away = 0

    def __len__(self) -> int:
        return len(self._kept)


def _alignments(addresses: Sequence[int]) -> tuple[int, ...]:
    """Addresses modulo `ALIGNMENT`. No address is as small, so a key with these is none with addresses."""
    return tuple([address % ALIGNMENT for address in addresses])


def _span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.itemsize * (1 + sum(steps)) if tensor.numel() else 0


def _in_one_piece(tensor: Tensor) -> bool:
    """It has elements, and there is not much else between them."""
    return 0 < _span(tensor) <= 2 * tensor.numel() * tensor.itemsize


def rooms_for(small: Sequence[Tensor]) -> list[int]:
    """Bytes of memory, at a multiple of `ALIGNMENT`, that have room for a place of each."""
    return [operand.data_ptr() % ALIGNMENT + _span(operand) for operand in small]


def placed(operand: Tensor, room: Tensor) -> Tensor:
    """Like `operand`, in a room for it, uint8; nothing is copied."""
    first = operand.data_ptr() % ALIGNMENT
    elements = room[first : first + _span(operand)].view(operand.dtype)
    return elements.as_strided(operand.shape, operand.stride())


@functools.cache
def _say_unrecordable(setting: str) -> None:
    """Once in a process, and not before a call has come again: a program that never repeats itself loses nothing."""
    log.warning(
        "no call is recorded, so that each takes the host several times as long as a launch of a recording: with %s, "
        "PyTorch's allocator does not keep freed memory. Run without that, or, if it is meant, with %s=0, which "
        "records none and says nothing",
        setting,
        VARIABLE,
    )


def _most() -> int:
    text = os.environ.get(VARIABLE, str(MAX_RECORDED))
    if not text.isdecimal():
        raise ValueError(f"asynctp: {VARIABLE}={text!r} is not valid; it must be an integer >= 0, where 0 records none")
    return int(text)


class Recorder:
    """Records graphs for one device, on a thread of its own: pools and captures of the program's are of its threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, "asynctp-recorder")
        self._thread.submit(self._start).result()

    def _start(self) -> None:
        torch.cuda.set_device(self.device)
        gpu.relax_captures()
        self._streams = [gpu.new_torch_stream(self.device, urgent) for urgent in (False, True)]
        self._pool, self._cublas_pool = torch.cuda.MemPool(), torch.cuda.MemPool()
        self._cublas = False

    def record(self, enqueue: Enqueue, cublas: bool, urgent: bool, small: Sequence[Tensor]) -> gpu.Graph:
        """Record what `enqueue` enqueues on a stream of the recorder's, and on those that join it.

        small: operands that the recording copies to rooms in this recorder's pool, and reads there.
        """
        return self._thread.submit(self._record, [(enqueue, small)], cublas, urgent).result()

    def _record(self, only: list[tuple[Enqueue, Sequence[Tensor]]], cublas: bool, urgent: bool) -> gpu.Graph:
        """`only`: emptied here, so that nothing keeps the call's tensors longer."""
        enqueue, small = only.pop()
        try:
            return self._captured(enqueue, cublas, self._streams[urgent], small)
        except torch.OutOfMemoryError:  # the allocator does not give back what it keeps for want of memory in a pool
            torch.cuda.empty_cache()
            return self._captured(enqueue, cublas, self._streams[urgent], small)

    def _captured(
        self, enqueue: Enqueue, cublas: bool, stream: torch.cuda.Stream, small: Sequence[Tensor]
    ) -> gpu.Graph:
        with torch.inference_mode(), torch.cuda.stream(stream):
            if cublas and not self._cublas:
                self._make_handles(stream)
            with torch.cuda.use_mem_pool(self._pool):
                rooms = [new_tensors([size], torch.uint8, self.device)() for size in rooms_for(small)]
                return on_places(enqueue, small, rooms, lambda made: gpu.record(stream.cuda_stream, made))

    def _make_handles(self, stream: torch.cuda.Stream) -> None:
        """cuBLAS's handles are of a thread, and cannot be made in a capture.

        Its workspace for a stream is made anew if the program has all cleared: in a capture then, from the pool of
        temporaries.
        """
        with torch.cuda.use_mem_pool(self._cublas_pool):
            one = torch.zeros(16, 16, device=self.device, dtype=torch.bfloat16)
            torch.mm(one, one)
        stream.synchronize()
        self._cublas = True  # nothing that is urgent calls it


def on_places(
    enqueue: Enqueue, small: Sequence[Tensor], rooms: Sequence[Tensor], record: Callable[[Callable[[int], None]], T]
) -> T:
    """The graph that `record` makes of `enqueue`; of small operands, it copies each to a place in its room, first."""
    if not small:
        return record(enqueue)
    places = [placed(operand, room) for operand, room in zip(small, rooms, strict=True)]
    copies = [(place.data_ptr(), operand.data_ptr()) for place, operand in zip(places, small, strict=True)]

    def enqueued(stream: int) -> None:
        for (place, source), operand in zip(copies, small, strict=True):
            gpu.copy(place, source, _span(operand), stream)
        enqueue(stream, places)

    graph = record(enqueued)
    graph.follow(copies)
    return graph


@functools.cache
def recorder(device: torch.device) -> Recorder:
    """The one of `device`."""
    return Recorder(device)
