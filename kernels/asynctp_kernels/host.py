"""Symmetric memory of one host over POSIX shared memory, for CPU tensors.

Every file under /dev/shm has a name only from when all ranks are there until all have mapped it, and then lives exactly
as long as its mappings: a killed process takes its own with it. Its name follows from the meeting, so whichever rank is
left removes the files of all. `multiprocessing.shared_memory` would hand them to a resource tracker that warns at exit
and unlinks them by itself before Python 3.13 (python/cpython issue 82300).
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from .errors import SymmetricMemoryError
from .meeting import Meeting, boot_id, meet

SHARED_FOLDER = Path("/dev/shm")
PREFIX = "asynctp_"
_MODE = 0o600  # the user's own


class HostSymmetricMemory:
    """One buffer per rank, all of them mapped here.

    Made by `rendezvous`. The mappings live as long as this object or any tensor got from it.

    Attributes:
        rank, world_size: of the group.
        buffer_size: bytes per rank.
        buffer_ptrs: address of each rank's buffer in this process, in rank order.
    """

    def __init__(self, rank: int, buffer_size: int, mappings: Sequence[torch.Tensor]) -> None:
        self.rank, self.world_size, self.buffer_size = rank, len(mappings), buffer_size
        self._buffers = [m[:buffer_size] for m in mappings]
        self.buffer_ptrs = [m.data_ptr() for m in mappings]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """A tensor over `rank`'s buffer; `storage_offset` counts elements.

        Raises:
            ValueError: the tensor would not fit.
        """
        start, size, room = storage_offset * dtype.itemsize, math.prod(sizes) * dtype.itemsize, self.buffer_size
        if start < 0 or start + size > room:
            where = f"at {storage_offset} is outside the buffer of rank {rank}, {room} bytes"
            raise ValueError(f"{list(sizes)} of {dtype} {where}")
        return self._buffers[rank][start : start + size].view(dtype).view(list(sizes))


def rendezvous(group: ProcessGroup, buffer_size: int) -> HostSymmetricMemory:
    """Share memory among all ranks of `group`. Collective: every rank asks for the same size.

    The ranks find each other through the group's store, whatever its backend, and every wait on it is bounded. All
    buffers are zero when this returns. A group may rendezvous any number of times, also after it has failed.

    Args:
        buffer_size: bytes per rank.

    Raises:
        PeerTimeout: a rank did not take part in time.
        PeerFailed: a rank failed, or is over.
        SymmetricMemoryError: the ranks are on several hosts, ask for different sizes, or do not share /dev/shm.
    """
    rank = group.rank()
    with meet(group, "rendezvous") as meeting:
        told = meeting.exchange("segment", json.dumps([host_name(), boot_id(), buffer_size]))
        _check_agreement(rank, [json.loads(text) for text in told])
        pages = max(math.ceil(buffer_size / mmap.PAGESIZE), 1)
        return HostSymmetricMemory(rank, buffer_size, _share(meeting, rank, group.size(), pages * mmap.PAGESIZE))


def host_name() -> str:
    """The name that two processes share exactly when they run on one host."""
    return socket.gethostname()


def _share(meeting: Meeting, rank: int, world: int, size: int) -> list[torch.Tensor]:
    """Memory of `size` bytes of every rank, mapped. None of its files has a name any more."""
    paths = [SHARED_FOLDER / f"{PREFIX}{meeting.path}_{peer}" for peer in range(world)]
    with contextlib.ExitStack() as held:
        for path in paths:
            held.callback(path.unlink, missing_ok=True)
        meeting.together("reserve", lambda: _reserve(paths[rank], size))
        return meeting.together("mapped", lambda: [_map(path, size) for path in paths])


def _reserve(path: Path, size: int) -> None:
    """Make a file of `size` zeros. Its pages are reserved: a full folder is an error here, not a SIGBUS later."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, _MODE)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise SymmetricMemoryError(
            f"cannot reserve {size} bytes under {SHARED_FOLDER}: {error}. Make room there: delete what other programs "
            f"have left, or mount it larger (docker run --shm-size)"
        ) from error


def _map(path: Path, size: int) -> torch.Tensor:
    """The file as bytes. The tensor's storage owns the mapping."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SymmetricMemoryError(
            f"the segment '{path.name}' of a peer is not under {SHARED_FOLDER} here: the ranks must share one "
            f"{SHARED_FOLDER} (one container, or a common IPC namespace)"
        ) from error
    try:
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    finally:
        os.close(fd)


def _check_agreement(rank: int, told: Sequence[tuple[str, str, int]]) -> None:
    """told: Of each rank its host, the run of that, and the bytes that it asks for."""
    own_host, own_boot, own_size = told[rank]
    for peer, (host, boot, size) in enumerate(told):
        if host != own_host:
            raise SymmetricMemoryError(
                f"rank {rank} is on host '{own_host}', rank {peer} on '{host}': "
                f"symmetric memory needs all ranks of a group on one host"
            )
        if boot != own_boot:
            raise SymmetricMemoryError(
                f"ranks {rank} and {peer} are on two machines that are both named '{host}': symmetric memory "
                f"needs all ranks of a group on one host; name the machines apart"
            )
        if size != own_size:
            raise SymmetricMemoryError(
                f"rank {rank} asks for {own_size} bytes, rank {peer} for {size}: "
                f"the ranks make calls of different shapes"
            )
