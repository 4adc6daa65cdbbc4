"""Symmetric memory of one host over POSIX shared memory, for CPU tensors.

`HostSymmetricMemory` has the interface of torch's `_SymmetricMemory` handle (torch has none for CPU), so a
launcher does not care which one it is given. Every rank's buffer and signal pad are mapped in every process:

    segment of one rank:  [ buffer, buffer_size bytes, zeros | signal pad, signal_pad_size bytes, zeros ]

Nothing leaks: a segment's name is unlinked as soon as all ranks have mapped it (or the rendezvous failed), so
from then on it lives exactly as long as the mappings, and a crashed process takes its own with it. The files
are opened directly under /dev/shm: `multiprocessing.shared_memory` would hand them to a resource tracker that
warns at exit and unlinks behind our back before Python 3.13 (python/cpython issue 82300).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from .errors import PeerTimeout, SymmetricMemoryError, timeout_s
from .signals import new_status, raise_timeout, require_interpreter, swap_word_kernel

SHARED_FOLDER = Path("/dev/shm")
WORD_BYTES = 8
CHANNELS = 16
_PAGE = mmap.PAGESIZE

_generations: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Segment:
    """What a rank tells its peers about the memory that it shares."""

    host: str
    name: str
    buffer_size: int
    signal_pad_size: int


def channel_bytes(world_size: int) -> int:
    """Bytes at the start of a signal pad that belong to `barrier`, `put_signal` and `wait_signal`."""
    return CHANNELS * world_size * WORD_BYTES


class HostSymmetricMemory:
    """One buffer and one signal pad per rank, all of them mapped here.

    Made by `rendezvous`. The mappings live as long as this object or any tensor got from it.

    Attributes:
        rank, world_size: of the group.
        buffer_size, signal_pad_size: bytes per rank.
        buffer_ptrs, signal_pad_ptrs: address of each rank's part in this process, in rank order.
        buffer_ptrs_dev, signal_pad_ptrs_dev: address of an int64 table with the same addresses, for kernels.
    """

    def __init__(self, rank: int, segment: Segment, mappings: Sequence[torch.Tensor]) -> None:
        self.rank = rank
        self.world_size = len(mappings)
        self.buffer_size = segment.buffer_size
        self.signal_pad_size = segment.signal_pad_size
        self.device = torch.device("cpu")
        self._buffers = [m[: self.buffer_size] for m in mappings]
        start = _pages(self.buffer_size)
        self._pads = [m[start : start + self.signal_pad_size] for m in mappings]
        self.buffer_ptrs = [m.data_ptr() for m in mappings]
        self.signal_pad_ptrs = [m.data_ptr() + start for m in mappings]
        self._tables = torch.tensor([self.buffer_ptrs, self.signal_pad_ptrs], dtype=torch.int64)

    @property
    def buffer_ptrs_dev(self) -> int:
        return self._tables[0].data_ptr()

    @property
    def signal_pad_ptrs_dev(self) -> int:
        return self._tables[1].data_ptr()

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """A tensor over `rank`'s buffer; `storage_offset` counts elements.

        Raises:
            ValueError: the tensor would not fit.
        """
        return _view(self._buffers[rank], sizes, dtype, storage_offset, f"buffer of rank {rank}")

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] | None = None,
        dtype: torch.dtype = torch.int64,
        storage_offset: int = 0,
    ) -> torch.Tensor:
        """A tensor over `rank`'s signal pad, all of it when `sizes` is None.

        Raises:
            ValueError: the tensor would not fit.
        """
        if sizes is None:
            sizes = [self.signal_pad_size // dtype.itemsize - storage_offset]
        return _view(self._pads[rank], sizes, dtype, storage_offset, f"signal pad of rank {rank}")

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Set our word at `dst_rank`, once it has consumed the signal before; a release.

        Raises:
            PeerTimeout: `dst_rank` did not consume that signal in time (`timeout_ms`, or the default when 0).
        """
        self._swap("put_signal", self.signal_pad_ptrs[dst_rank], self.rank, dst_rank, channel, 0, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a signal of `src_rank` and consume it; an acquire.

        Raises:
            PeerTimeout: no signal came in time (`timeout_ms`, or the default when 0).
        """
        self._swap("wait_signal", self.signal_pad_ptrs[self.rank], src_rank, src_rank, channel, 1, timeout_ms)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait until every rank is here; what each wrote before is visible to all after.

        Raises:
            PeerTimeout: a rank did not come in time (`timeout_ms`, or the default when 0).
        """
        _check_channel(channel)
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        for peer in peers:
            self._swap("barrier", self.signal_pad_ptrs[peer], self.rank, peer, channel, 0, timeout_ms)
        for peer in peers:
            self._swap("barrier", self.signal_pad_ptrs[self.rank], peer, peer, channel, 1, timeout_ms)

    def _swap(self, op: str, pad: int, src: int, peer: int, channel: int, expected: int, timeout_ms: int) -> None:
        """Flip the word that rank `src` owns in `pad` from `expected` to the other of 0 and 1."""
        require_interpreter()
        _check_channel(channel)
        limit_ns = int((timeout_ms / 1e3 if timeout_ms else timeout_s()) * 1e9)
        status = new_status(self.device)
        address = pad + (channel * self.world_size + src) * WORD_BYTES
        swap_word_kernel[(1,)](address, expected, 1 - expected, limit_ns, status, peer, channel)
        raise_timeout(status, op, self.rank, "channel", limit_ns)


def rendezvous(group: ProcessGroup, buffer_size: int, signal_pad_size: int) -> HostSymmetricMemory:
    """Share memory among all ranks of `group`. Collective: every rank asks for the same sizes.

    Addresses travel through the group's store, whatever its backend, and every wait on it is bounded. All
    buffers and pads are zero when this returns. A group may rendezvous any number of times.

    Args:
        buffer_size: bytes per rank.
        signal_pad_size: bytes per rank on top of the `channel_bytes` that the handle keeps for itself.

    Raises:
        PeerTimeout: a rank did not take part in time.
        SymmetricMemoryError: the ranks are on several hosts, ask for different sizes, or do not share /dev/shm.
    """
    rank, world_size = group.rank(), group.size()
    generation = _generations[group] = _generations.get(group, -1) + 1
    board = Board(group, f"asynctp/{generation}")
    pad_size = channel_bytes(world_size) + signal_pad_size
    segment = Segment(host_name(), f"asynctp_{secrets.token_hex(12)}", buffer_size, pad_size)
    own = _create(segment)
    try:
        board.post("segment", json.dumps(asdict(segment)))
        segments = [Segment(**json.loads(text)) for text in board.read_all("segment")]
        _check_agreement(rank, segments)
        mappings = [own if r == rank else _open(r, s) for r, s in enumerate(segments)]
        board.post("mapped", "")
        board.read_all("mapped")
    finally:
        (SHARED_FOLDER / segment.name).unlink()
    board.clear()
    return HostSymmetricMemory(rank, segment, mappings)


class Board:
    """Small messages among the ranks of a group through its store, under one prefix, every wait bounded.

    Args:
        group, prefix: Every rank's are the same, and a prefix is used once.
        seconds: The bound of `read_all`; `timeout_s` when None.
    """

    def __init__(self, group: ProcessGroup, prefix: str, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._store: Any = distributed_c10d._get_process_group_store(group)
        self._rank, self._world_size, self._prefix = group.rank(), group.size(), prefix
        self._topics: list[str] = []

    def post(self, topic: str, text: str) -> None:
        self._topics.append(topic)
        self._store.set(f"{self._prefix}/{topic}/{self._rank}", text)

    def read_all(self, topic: str) -> list[str]:
        """Every rank's message on `topic`, in rank order."""
        deadline = time.monotonic() + (self._seconds or timeout_s())
        return [self._read(topic, peer, deadline) for peer in range(self._world_size)]

    def _read(self, topic: str, peer: int, deadline: float) -> str:
        key = f"{self._prefix}/{topic}/{peer}"
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:  # stores raise it, or a subclass of it, when the time is up
            seconds = self._seconds or timeout_s()
            raise PeerTimeout("rendezvous", self._rank, peer, f"message '{topic}'", seconds) from error
        return str(self._store.get(key).decode())

    def clear(self) -> None:
        """Delete all keys; the last rank to come does it, when nobody reads them any more."""
        if self._store.add(f"{self._prefix}/done", 1) < self._world_size:
            return
        for topic in self._topics:
            for peer in range(self._world_size):
                self._store.delete_key(f"{self._prefix}/{topic}/{peer}")
        self._store.delete_key(f"{self._prefix}/done")


def _check_channel(channel: int) -> None:
    if not 0 <= channel < CHANNELS:
        raise ValueError(f"channel {channel} is not in 0..{CHANNELS - 1}")


def host_name() -> str:
    """What two processes share exactly when they run on one host."""
    return socket.gethostname()


def _pages(size: int) -> int:
    """`size` rounded up to whole pages, at least one."""
    return max(math.ceil(size / _PAGE), 1) * _PAGE


def _total(segment: Segment) -> int:
    return _pages(segment.buffer_size) + _pages(segment.signal_pad_size)


def _create(segment: Segment) -> torch.Tensor:
    """A new zeroed segment, mapped. Its pages are reserved: a full /dev/shm is an error here, not a SIGBUS later."""
    path = SHARED_FOLDER / segment.name
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, _total(segment))
        return _map(fd, _total(segment))
    except OSError as error:
        path.unlink()
        raise SymmetricMemoryError(f"cannot reserve {_total(segment)} bytes under {SHARED_FOLDER}: {error}") from error
    finally:
        os.close(fd)


def _open(peer: int, segment: Segment) -> torch.Tensor:
    try:
        fd = os.open(SHARED_FOLDER / segment.name, os.O_RDWR)
    except FileNotFoundError as error:
        raise SymmetricMemoryError(
            f"the segment of rank {peer} is not under {SHARED_FOLDER} here: the ranks must share one "
            f"{SHARED_FOLDER} (one container, or a common IPC namespace)"
        ) from error
    try:
        return _map(fd, _total(segment))
    finally:
        os.close(fd)


def _map(fd: int, size: int) -> torch.Tensor:
    """The file as bytes. The tensor's storage owns the mapping."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


def _check_agreement(rank: int, segments: Sequence[Segment]) -> None:
    for peer, segment in enumerate(segments):
        if segment.host != segments[rank].host:
            raise SymmetricMemoryError(
                f"rank {rank} is on host '{segments[rank].host}', rank {peer} on '{segment.host}': "
                f"symmetric memory needs all ranks of a group on one host"
            )
        sizes, own = (segment.buffer_size, segment.signal_pad_size), segments[rank]
        if sizes != (own.buffer_size, own.signal_pad_size):
            raise SymmetricMemoryError(
                f"rank {rank} asks for {own.buffer_size}+{own.signal_pad_size} bytes, rank {peer} for "
                f"{sizes[0]}+{sizes[1]}: the ranks make calls of different shapes"
            )


def _view(
    memory: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int, what: str
) -> torch.Tensor:
    start, count = storage_offset * dtype.itemsize, math.prod(sizes) * dtype.itemsize
    if start < 0 or start + count > memory.numel():
        raise ValueError(f"{list(sizes)} of {dtype} at {storage_offset} is outside the {what}, {memory.numel()} bytes")
    return memory[start : start + count].view(dtype).view(list(sizes))
