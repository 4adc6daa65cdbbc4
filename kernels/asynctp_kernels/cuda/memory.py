"""What one group keeps on one GPU: symmetric memory, signal words, a copy stream, events.

Three areas of symmetric memory, each as large as the largest call so far, made and grown collectively and never during
a CUDA graph capture:

    outbox    gather: the own shard, which peers pull                            [shard | its row scales]
    inbox     scatter: what peers pushed, by source                              [from rank 0 | from rank 1 | ...]
    direct    both direct kernels: two slots of landings, epochs                 see `copy_kernels`

Outbox and inbox are bounded buffers of depth one, with a pair of int32 words per peer:

    FULL   set by the writer's side when data is there; cleared by the reader before it takes it
    FREE   set by the reader when it has taken it; cleared by the writer before it writes again; 1 at the start

    gather    own: wait FREE(every peer), fill the outbox, set FULL at every peer.
              peer: wait FULL(source), pull, set FREE at the source.
    scatter   own: wait FREE(dst), push into dst's inbox, set FULL at dst.
              peer: wait FULL(source, chunk), reduce, set FREE at the source.

Words are binary and are cleared by their only waiter, so nothing depends on how often, in which CUDA graph or in which
order of shapes a call runs, as long as all ranks make the same calls of a group in the same order; that is the rule for
every collective. A word is never written twice without being cleared in between, because each write needs the other
word first. `tests/kernels/test_channel_model.py` explores this exhaustively.

Waits and writes are stream memory operations: they need no SM, so a waiting op never starves the GEMM it waits for.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from asynctp_kernels import compat
from asynctp_kernels.errors import TIMEOUT_VARIABLE, SymmetricMemoryError
from asynctp_kernels.signals import new_status, timeout_ns
from . import driver

MAX_CHUNKS = 4
DIRECT_PROGRAMS = 132
NO_BOUND = (1 << 63) - 1
_WORD = 4
_GRANULE = 1 << 21

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
    """int32 signal words of one direction. Addresses of word `i` at rank `r`: `at(r, i)`."""

    peers: list[int]
    offset: int

    def at(self, rank: int, index: int = 0) -> int:
        return self.peers[rank] + self.offset + index * _WORD


@dataclass
class GroupMemory:
    """See the module. Everything here belongs to one process group and one device.

    Attributes:
        rank, world: of the group.
        stream: the copy stream's handle; high priority, so that a copy is not queued behind anything.
        generation: counts growth: a plan that holds addresses is stale when this differs.
        failure: why the memory must not be used again.
    """

    group: ProcessGroup
    device: torch.device
    rank: int
    world: int
    torch_stream: torch.cuda.Stream
    signals: Area
    local: torch.Tensor
    peer_writes: bool
    areas: dict[str, Area] = field(default_factory=dict)
    plans: dict[object, object] = field(default_factory=dict)
    generation: int = 0
    failure: str | None = None

    def __post_init__(self) -> None:
        self.stream: int = self.torch_stream.cuda_stream
        self.start, self.end, self.last = driver.new_event(), driver.new_event(), driver.new_event()
        self.events = [driver.new_event() for _ in range(self.world * MAX_CHUNKS)]
        self.epoch = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.done = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.status = new_status(self.device)
        self.bound = timeout_ns() if TIMEOUT_VARIABLE in os.environ else NO_BOUND
        self._last_stream: tuple[int, bool] | None = None

    # --- order of calls ----------------------------------------------------------------------------------
    def begin(self, stream: int) -> None:
        """The copy stream starts behind `stream`, and this call behind the group's last one."""
        self.begin_direct(stream)
        driver.record_event(self.start, stream)
        driver.wait_event(self.stream, self.start)

    def begin_direct(self, stream: int) -> None:
        """This call starts behind the group's last one, should that have run on another stream."""
        here = (stream, torch.cuda.is_current_stream_capturing())
        if here != self._last_stream:
            if self._last_stream is not None and self._last_stream[1] == here[1]:
                driver.wait_event(stream, self.last)
            self._last_stream = here

    def ended(self, stream: int) -> None:
        """Remember where this call ends, for `begin`."""
        driver.record_event(self.last, stream)

    # --- words -------------------------------------------------------------------------------------------
    def _words(self, number: int) -> Words:
        return Words(self.signals.peers, number * self.world * MAX_CHUNKS * _WORD)

    @property
    def gather_full(self) -> Words:
        return self._words(0)

    @property
    def gather_free(self) -> Words:
        return self._words(1)

    @property
    def scatter_full(self) -> Words:
        return self._words(2)

    @property
    def scatter_free(self) -> Words:
        return self._words(3)

    @property
    def arrivals(self) -> int:
        """Address of int32 [world, MAX_CHUNKS], local: chunk (source, c) of a gather is in place."""
        return self.local.data_ptr()

    @property
    def progress(self) -> int:
        """Address of int32 [world, MAX_CHUNKS], local: finished tiles of chunk (destination, c) of a scatter."""
        return self.local.data_ptr() + self.world * MAX_CHUNKS * _WORD

    @property
    def one(self) -> int:
        """Address of a constant 1."""
        return self.local.data_ptr() + 2 * self.world * MAX_CHUNKS * _WORD

    @property
    def dummy(self) -> torch.Tensor:
        """A tensor for kernel arguments that are not used."""
        return self.local.view(torch.float32)

    # --- areas --------------------------------------------------------------------------------------------
    def require(self, name: str, size: int) -> Area:
        """The area `name` with at least `size` bytes; grows it if need be, which is collective.

        Raises:
            SymmetricMemoryError: it would have to grow during a CUDA graph capture, or an earlier call failed.
        """
        if self.failure is not None:
            raise SymmetricMemoryError(
                f"the memory of group '{self.group.group_name}' is out of step since: {self.failure}. "
                f"To go on, call asynctp_kernels.release(group) on every rank."
            )
        found = self.areas.get(name)
        if found is not None and found.size >= size:
            return found
        if torch.cuda.is_current_stream_capturing():
            raise SymmetricMemoryError(
                f"group '{self.group.group_name}' has {found.size if found else 0} bytes of {name} memory and this call "
                f"needs {size}; it cannot grow during a CUDA graph capture. Run the program once before you capture it."
            )
        torch.cuda.synchronize(self.device)
        area = _share(self.group, self.device, -(-size // _GRANULE) * _GRANULE)
        self.areas[name] = area
        self.generation += 1
        return area

    def direct(self, slot_bytes: int) -> tuple[Area, Area]:
        """The landings of the direct kernels, two slots of at least `slot_bytes`, and their words."""
        area = self.require("direct", 2 * slot_bytes)
        return area, self.require("direct words", self.world * DIRECT_PROGRAMS * 8)


def group_memory(group: ProcessGroup, device: torch.device) -> GroupMemory:
    """The memory of `group`, made at the first call (collective).

    Raises:
        SymmetricMemoryError: the GPUs cannot share memory (torch's reason), or a capture is under way.
    """
    found = _groups.get(group)
    if found is None:
        found = _make(group, device)
        _groups[group] = found
    return found


def release(group: ProcessGroup) -> None:
    """Free everything of `group`. Collective in effect: the next call makes it anew."""
    found = _groups.pop(group, None)
    if found is not None:
        torch.cuda.synchronize(found.device)
        found.failure = "it was released"


def _make(group: ProcessGroup, device: torch.device) -> GroupMemory:
    if torch.cuda.is_current_stream_capturing():
        raise SymmetricMemoryError("the first call of a group cannot be captured: run the program once before that")
    rank, world = group.rank(), group.size()
    words = world * MAX_CHUNKS
    initial = torch.zeros(4 * words, dtype=torch.int32, device=device)
    initial[words : 2 * words] = 1
    initial[3 * words :] = 1
    signals = _share(group, device, _GRANULE, initial)
    local = torch.zeros(2 * words + 16, dtype=torch.int32, device=device)
    local[2 * words] = 1
    torch.cuda.synchronize(device)
    return GroupMemory(
        group=group,
        device=device,
        rank=rank,
        world=world,
        torch_stream=torch.cuda.Stream(device, priority=-1),
        signals=signals,
        local=local,
        peer_writes=driver.peer_writes_supported(),
    )


def _share(group: ProcessGroup, device: torch.device, size: int, initial: torch.Tensor | None = None) -> Area:
    """Symmetric memory, zeroed (or starting with `initial`) on every rank before any rank gets it."""
    try:
        memory = compat.symmetric_empty(size, device)
        memory.zero_()
        if initial is not None:
            start = initial.view(torch.uint8).reshape(-1)
            memory[: start.numel()].copy_(start)
        torch.cuda.synchronize(device)
        handle = compat.symmetric_rendezvous(memory, group)
    except RuntimeError as error:
        raise SymmetricMemoryError(
            f"no symmetric memory of {size} bytes on group '{group.group_name}': {error}. "
            f"All ranks must be on one host with peer access (NVLink); 'asynctp doctor' says what is missing."
        ) from error
    peers = [int(address) for address in handle.buffer_ptrs]
    return Area(memory, handle, peers, torch.tensor(peers, dtype=torch.int64, device=device))
