"""A call made again on the same addresses is one graph launch: what it enqueues is recorded, once, in a CUDA graph.

A call of an op is a dozen or more driver calls, cuBLAS calls and kernel launches, which take the host 40 to 250 us; a
launch of a graph of them takes 4 to 15. Programs that repeat themselves, as a training step does, get the same
addresses from PyTorch's allocator again and again. So the addresses of calls are remembered. What is seen for the
second time is recorded, and from then on launched. The first call, a call on new addresses, and one inside a capture of
the program's enqueue as ever: the same work, in the same order, to the same bits.

Recordings are kept on the host. On the GPU each plan has one executable graph, which some 100 KB of its memory go
into, and which is brought up to date before each launch.

What makes a recording as sound as the call itself:

- *Addresses.* A plan makes all memory of a call but temporaries before it enqueues. The key of a recording is the plan
  and where all of that and the operands lie, with what the program has cuBLAS compute in; shapes, strides and dtypes
  are the plan's. A recording keeps no memory alive: it is launched only with tensors that are where it reads and
  writes, and its copies are told so (`driver.Graph`). Copies of many ranges, as of more than 4 blocks of rows, cannot
  be: calls with such are not recorded.
- *Temporaries*, which cuBLAS and conversions take on the way, and copies of operands that lie as no kernel reads them,
  come from a pool of this module's, which is never given back, as does cuBLAS's workspace for the recorder's stream;
  where the allocator cannot promise that, nothing is recorded, which the log says (`driver.unrecordable`). Calls that
  use them come one after the other on a device (`GroupMemory.turn`).
- *Order.* In a recording the copy stream and the reducer are branches of the graph, not those streams. Both wait for
  what the group has in flight on the streams (`GroupMemory.behind_flights`), by an event that each launch looks up
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from asynctp_kernels.compat import matmul_settings
from asynctp_kernels.cuda.runtime import driver as gpu
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.errors import SymmetricMemoryError

log = logging.getLogger(__name__)

VARIABLE = "ASYNCTP_RECORDED_CALLS"
MAX_RECORDED = 4096  # of a model of 100 layers, and some 20 KB each
MAX_READY = 512  # executable graphs of one group
#: for each recording that is kept: addresses of calls that are remembered, and calls that are turned away for want of
#: room until all are forgotten to make some
SEEN, TURNED_AWAY = 2, 10
Enqueue = Callable[[int], None]


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
        self._graphs: dict[tuple[Any, ...], gpu.Graph] = {}
        self._ready: dict[Any, gpu.Executable] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._refused: set[Any] = set()
        self._turned_away, self._told = 0, False

    def run(self, stream: int, key: tuple[Any, ...], cublas: bool, urgent: bool, enqueue: Enqueue) -> None:
        """Do what `enqueue(stream)` does, which is the same for calls of the same key.

        Args:
            stream: Where.
            key: The plan's number, then addresses.
            cublas: It calls that, which the program's settings change.
            urgent: The stream is one of high priority.
            enqueue: Called with that stream, or with another one to record.
        """
        if not self.most or key[0] in self._refused:
            enqueue(stream)
            return
        if cublas:
            key = (*key, matmul_settings())
        graph = self._graphs.get(key)
        ready = self._recorded(key, cublas, urgent, enqueue) if graph is None else self._shown(key[0], graph)
        if ready is None:
            enqueue(stream)
            return
        self.launched += 1
        ready.launch(stream)

    def _shown(self, plan: Any, graph: gpu.Graph) -> gpu.Executable | None:
        """The plan's executable, of this graph. None: enqueue."""
        ready = self._ready.pop(plan, None) or gpu.Executable()
        try:
            ready.show(graph)
        except SymmetricMemoryError as error:
            self._refuse(plan, error)
            return None
        if len(self._ready) >= MAX_READY:
            del self._ready[next(iter(self._ready))]
        self._ready[plan] = ready  # the last one is the last used
        return ready

    def _recorded(self, key: tuple[Any, ...], cublas: bool, urgent: bool, enqueue: Enqueue) -> gpu.Executable | None:
        """Record a call that comes again. None: enqueue."""
        if key not in self._seen:
            if len(self._seen) >= SEEN * self.most:
                self._seen.clear()
            self._seen.add(key)
            return None
        if (setting := gpu.unrecordable()) is not None:
            _say_unrecordable(setting)
            return None
        if not self._room():
            return None
        self.under_way = True
        try:
            graph = recorder(self.device).record(enqueue, cublas, urgent)
        except Exception as error:
            self._refuse(key[0], error)
            return None
        finally:
            self.under_way = False
        self._seen.discard(key)
        if not graph.known:
            self._refused.add(key[0])
            log.info("calls of one shape are made anew each time: a graph of them could not be brought up to date")
            return None
        self._graphs[key] = graph
        return self._shown(key[0], graph)

    def _room(self) -> bool:
        """Whether one more can be kept; who is turned away often enough gets room by all others' being forgotten."""
        if len(self._graphs) < self.most:
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
        self._graphs.clear()
        self._ready.clear()
        self._seen.clear()
        self._refused.clear()
        self._turned_away = 0

    def __len__(self) -> int:
        return len(self._graphs)


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
        self._pool = torch.cuda.MemPool()
        self._cublas = False

    def record(self, enqueue: Enqueue, cublas: bool, urgent: bool) -> gpu.Graph:
        """The graph of what `enqueue(stream)` enqueues on a stream of the recorder's, and on those that join it."""
        return self._thread.submit(self._record, [enqueue], cublas, urgent).result()

    def _record(self, only: list[Enqueue], cublas: bool, urgent: bool) -> gpu.Graph:
        """`only`: emptied here, so that nothing keeps the call's tensors longer."""
        enqueue = only.pop()
        try:
            return self._captured(enqueue, cublas, self._streams[urgent])
        except torch.OutOfMemoryError:  # the allocator does not give back what it keeps for want of memory in a pool
            torch.cuda.empty_cache()
            return self._captured(enqueue, cublas, self._streams[urgent])

    def _captured(self, enqueue: Enqueue, cublas: bool, stream: torch.cuda.Stream) -> gpu.Graph:
        with torch.inference_mode(), torch.cuda.use_mem_pool(self._pool), torch.cuda.stream(stream):
            if cublas and not self._cublas:
                self._make_handles(stream)
            return gpu.record(stream.cuda_stream, enqueue)

    def _make_handles(self, stream: torch.cuda.Stream) -> None:
        """cuBLAS's handles are of a thread, and cannot be made in a capture.

        Its workspace for a stream is made anew if the program has all cleared: in a capture then, from the same pool.
        """
        one = torch.zeros(16, 16, device=self.device, dtype=torch.bfloat16)
        torch.mm(one, one)
        stream.synchronize()
        self._cublas = True  # nothing that is urgent calls it


@functools.cache
def recorder(device: torch.device) -> Recorder:
    """The one of `device`."""
    return Recorder(device)
