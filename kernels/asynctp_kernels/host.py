"""Symmetric memory of one host over POSIX shared memory, for CPU tensors.

`HostSymmetricMemory` is to processes what torch's `_SymmetricMemory` handle is to GPUs (torch has none for CPU): every
rank's buffer is mapped in every process.

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

SHARED_FOLDER = Path("/dev/shm")
_PAGE = mmap.PAGESIZE

_generations: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Segment:
    """What a rank tells its peers about the memory that it shares."""

    host: str
    name: str
    buffer_size: int


class HostSymmetricMemory:
    """One buffer per rank, all of them mapped here.

    Made by `rendezvous`. The mappings live as long as this object or any tensor got from it.

    Attributes:
        rank, world_size: of the group.
        buffer_size: bytes per rank.
        buffer_ptrs: address of each rank's buffer in this process, in rank order.
    """

    def __init__(self, rank: int, segment: Segment, mappings: Sequence[torch.Tensor]) -> None:
        self.rank = rank
        self.world_size = len(mappings)
        self.buffer_size = segment.buffer_size
        self._buffers = [m[: self.buffer_size] for m in mappings]
        self.buffer_ptrs = [m.data_ptr() for m in mappings]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """A tensor over `rank`'s buffer; `storage_offset` counts elements.

        Raises:
            ValueError: the tensor would not fit.
        """
        return _view(self._buffers[rank], sizes, dtype, storage_offset, f"buffer of rank {rank}")


def rendezvous(group: ProcessGroup, buffer_size: int) -> HostSymmetricMemory:
    """Share memory among all ranks of `group`. Collective: every rank asks for the same size.

    Names travel through the group's store, whatever its backend, and every wait on it is bounded. All
    buffers are zero when this returns. A group may rendezvous any number of times.

    Args:
        buffer_size: bytes per rank.

    Raises:
        PeerTimeout: a rank did not take part in time.
        SymmetricMemoryError: the ranks are on several hosts, ask for different sizes, or do not share /dev/shm.
    """
    rank = group.rank()
    generation = _generations[group] = _generations.get(group, -1) + 1
    board = Board(group, f"asynctp/{generation}")
    segment = Segment(host_name(), f"asynctp_{secrets.token_hex(12)}", buffer_size)
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


def host_name() -> str:
    """What two processes share exactly when they run on one host."""
    return socket.gethostname()


def _pages(size: int) -> int:
    """`size` rounded up to whole pages, at least one."""
    return max(math.ceil(size / _PAGE), 1) * _PAGE


def _create(segment: Segment) -> torch.Tensor:
    """A new zeroed segment, mapped. Its pages are reserved: a full /dev/shm is an error here, not a SIGBUS later."""
    path = SHARED_FOLDER / segment.name
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, _pages(segment.buffer_size))
        return _map(fd, _pages(segment.buffer_size))
    except OSError as error:
        path.unlink()
        raise SymmetricMemoryError(
            f"cannot reserve {_pages(segment.buffer_size)} bytes under {SHARED_FOLDER}: {error}"
        ) from error
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
        return _map(fd, _pages(segment.buffer_size))
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
        if segment.buffer_size != segments[rank].buffer_size:
            raise SymmetricMemoryError(
                f"rank {rank} asks for {segments[rank].buffer_size} bytes, rank {peer} for {segment.buffer_size}: "
                f"the ranks make calls of different shapes"
            )


def _view(
    memory: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int, what: str
) -> torch.Tensor:
    start, count = storage_offset * dtype.itemsize, math.prod(sizes) * dtype.itemsize
    if start < 0 or start + count > memory.numel():
        raise ValueError(f"{list(sizes)} of {dtype} at {storage_offset} is outside the {what}, {memory.numel()} bytes")
    return memory[start : start + count].view(dtype).view(list(sizes))
