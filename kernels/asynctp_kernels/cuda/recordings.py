"""A call made again on the same addresses is one graph launch: what it enqueues is recorded, once, in a CUDA graph.

A call of an op is a dozen or more driver calls, cuBLAS calls and kernel launches, which take the host 40 to 250 us; a
launch of a graph of them takes 4 to 15. Programs that repeat themselves, as a training step does, get the same
addresses from PyTorch's allocator again and again. So the addresses of calls are remembered. What is seen for the
second time is recorded, and from then on launched. The first call, a call on new addresses, and one inside a capture of
the program's enqueue as ever: the same work, in the same order, to the same bits.

Recordings are kept on the host. On the GPU each plan has one executable graph, which a MB or so of its memory goes
into, and which is brought up to date before each launch.

What makes a recording as sound as the call itself:

- *Addresses.* A plan makes all memory of a call before it enqueues. The key of a recording is the plan and where all of
  that lies, with what the program has cuBLAS compute in; shapes, strides and dtypes are the plan's. A recording keeps
  no memory alive: it is launched only with tensors that are where it reads and writes, and its copies are told so
  (`driver.Graph`). Copies of several ranges, as of gathers along dim 1, cannot be: calls with such are not recorded.
- *Temporaries* that cuBLAS and conversions take on the way come from a pool of this module's, which is never given
  back, as does cuBLAS's workspace for the recorder's stream. Calls that use them do not overlap on a device (`memory`).
- *Order.* In a recording the copy stream and the reducer are branches of the graph, not those streams. Both wait for
  what the group has in flight on the streams (`GroupMemory.behind_flights`), by an event that each launch looks up
  anew. All else that orders calls is outside of a recording.
- *The program's own captures and memory pools* see nothing of it: a recorder has a thread and a stream of its own.

Source: CUDA Driver API, "Graph Management" (a launch is ordered behind earlier launches of the same graph; an update
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
from asynctp_kernels.errors import SymmetricMemoryError

from .machine import driver

log = logging.getLogger(__name__)

VARIABLE = "ASYNCTP_RECORDED_CALLS"
MAX_RECORDED = 4096  # of a model of 100 layers, and some 20 KB each
#: addresses of calls that are remembered, and launches until recordings are worth making anew, for each recording
SEEN, LAUNCHES = 2, 10
MAX_READY = 128  # executable graphs of one group
Enqueue = Callable[[int], None]


class Recordings:
    """Those of one group's calls.

    Attributes:
        most: How many are kept; the program may say (`ASYNCTP_RECORDED_CALLS`).
        under_way: A call is being recorded.
        launched: How many calls were launches of a recording.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.most, self.under_way = device, _most() if driver.can_record() else 0, False
        self._graphs: dict[tuple[Any, ...], driver.Graph] = {}
        self._ready: dict[Any, driver.Executable] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._refused: set[Any] = set()
        self.launched, self._due = 0, LAUNCHES * self.most

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

    def _shown(self, plan: Any, graph: driver.Graph) -> driver.Executable | None:
        if (ready := self._ready.get(plan)) is None:
            if len(self._ready) >= MAX_READY:
                del self._ready[next(iter(self._ready))]
            ready = self._ready[plan] = driver.Executable()
        try:
            ready.show(graph)
        except SymmetricMemoryError as error:
            self._give_up(error)
            return None
        return ready

    def _recorded(self, key: tuple[Any, ...], cublas: bool, urgent: bool, enqueue: Enqueue) -> driver.Executable | None:
        """Record a call that comes again. None: enqueue it."""
        if key not in self._seen:
            if len(self._seen) >= SEEN * self.most:
                self._seen.clear()
            self._seen.add(key)
            return None
        if len(self._graphs) >= self.most:
            if self.launched < self._due:
                return None
            self.clear()
        self.under_way = True
        try:
            graph = recorder(self.device).record(enqueue, cublas, urgent)
        except Exception as error:
            self._give_up(error)
            return None
        finally:
            self.under_way = False
        self._seen.discard(key)
        if not graph.flat:
            self._refused.add(key[0])
            return None
        self._graphs[key] = graph
        return self._shown(key[0], graph)

    def _give_up(self, error: Exception) -> None:
        """Nothing of the call has run: it can still be made as it always could."""
        self.most = 0
        self.clear()
        log.warning("asynctp makes every call anew, which takes more host time: it cannot record them (%s)", error)

    def clear(self) -> None:
        """Forget all, since what they refer to has gone, or to make room."""
        self._graphs.clear()
        self._ready.clear()
        self._seen.clear()
        self._refused.clear()
        self._due = self.launched + LAUNCHES * self.most

    def __len__(self) -> int:
        return len(self._graphs)


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
        driver.relax_captures()
        self._streams = [torch.cuda.Stream(self.device, priority=-level) for level in (0, 1)]  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.MemPool()
        self._cublas = False

    def record(self, enqueue: Enqueue, cublas: bool, urgent: bool) -> driver.Graph:
        """The graph of what `enqueue(stream)` enqueues on a stream of the recorder's, and on those that join it."""
        return self._thread.submit(self._record, enqueue, cublas, urgent).result()

    def _record(self, enqueue: Enqueue, cublas: bool, urgent: bool) -> driver.Graph:
        stream = self._streams[urgent]
        with torch.inference_mode(), torch.cuda.use_mem_pool(self._pool), torch.cuda.stream(stream):
            if cublas and not self._cublas:
                self._make_handles(stream)
            return driver.record(stream.cuda_stream, enqueue)

    def _make_handles(self, stream: torch.cuda.Stream) -> None:
        """cuBLAS's handles are of a thread, their workspace of a stream; neither can be made in a capture."""
        one = torch.zeros(16, 16, device=self.device, dtype=torch.bfloat16)
        torch.mm(one, one)
        stream.synchronize()
        self._cublas = True  # nothing that is urgent calls it


@functools.cache
def recorder(device: torch.device) -> Recorder:
    """The one of `device`."""
    return Recorder(device)
