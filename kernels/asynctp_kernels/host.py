"""Symmetric memory of one host over POSIX shared memory, for CPU tensors.

`HostSymmetricMemory` is to processes what torch's `_SymmetricMemory` handle is to GPUs (torch has none for CPU): every
rank's buffer is mapped in every process.

Nothing leaks: the files under /dev/shm have no names, so that each lives exactly as long as its mappings, and a killed
process takes its own with it. Peers open them as files of this process (`/proc/<pid>/fd`). Where they cannot, as from a
container of its own, each file has a name from when all ranks are there until all have mapped it.
`multiprocessing.shared_memory` would hand named files to a resource tracker that warns at exit and unlinks them by
itself before Python 3.13 (python/cpython issue 82300).
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from .errors import SymmetricMemoryError
from .meeting import Meeting, boot_id, meet, pid_namespace

SHARED_FOLDER = Path("/dev/shm")
_PAGE = mmap.PAGESIZE

PREFIX = "asynctp_"
_MODE = 0o600  # the user's own


@dataclass(frozen=True)
class Segment:
    """Facts that a rank tells its peers about the memory that it shares."""

    host: str
    boot: str
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
        segment = Segment(host_name(), boot_id(), buffer_size)
        segments = [Segment(**json.loads(text)) for text in meeting.exchange("segment", json.dumps(asdict(segment)))]
        _check_agreement(rank, segments)
        return HostSymmetricMemory(rank, segment, _share(meeting, rank, _pages(buffer_size)))


def host_name() -> str:
    """The name that two processes share exactly when they run on one host."""
    return socket.gethostname()


def _pages(size: int) -> int:
    """`size` rounded up to whole pages, at least one."""
    return max(math.ceil(size / _PAGE), 1) * _PAGE


@dataclass(frozen=True)
class _Offer:
    """Where a rank's memory can be opened: as a file of its process, and, should that have to be, by a name.

    Attributes:
        namespace: in which `pid` is a process.
        device, inode: of the file, to know it by.
    """

    namespace: str
    pid: int
    fd: int
    device: int
    inode: int
    name: str

    @staticmethod
    def of(fd: int, name: str) -> _Offer:
        found = os.fstat(fd)
        return _Offer(pid_namespace(), os.getpid(), fd, found.st_dev, found.st_ino, name)


def _share(meeting: Meeting, rank: int, size: int) -> list[torch.Tensor]:
    """Memory of `size` bytes of every rank, mapped. No file of it has a name, unless it cannot be opened without."""
    with contextlib.ExitStack() as held:
        name = f"{PREFIX}{secrets.token_hex(12)}"
        fd = meeting.together("reserve", lambda: _reserve(size, name, held))
        own = _map(fd, size)
        offers = [
            _Offer(**json.loads(text)) for text in meeting.exchange("offer", json.dumps(asdict(_Offer.of(fd, name))))
        ]

        def mapped(opened: Callable[[_Offer], int]) -> list[torch.Tensor]:
            return [own if peer == rank else _mapped(opened(offer), size, held) for peer, offer in enumerate(offers)]

        found, fault = _tried(lambda: mapped(_of_process))
        if any(meeting.exchange("opened", fault)):
            meeting.together("name", lambda: _give_name(fd, name, held))
            found = meeting.together("mapped", lambda: mapped(_by_name))
        return found


def _reserve(size: int, name: str, held: contextlib.ExitStack) -> int:
    """A new file of `size` zeros under `SHARED_FOLDER`, with a name only if it must.

    Its pages are reserved: a full folder is an error here, not a SIGBUS later.
    """
    try:
        try:
            fd = os.open(SHARED_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE)
        except OSError:  # not every file system has files without a name
            fd = os.open(SHARED_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, _MODE)
            held.callback((SHARED_FOLDER / name).unlink, missing_ok=True)
        held.callback(os.close, fd)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise SymmetricMemoryError(
            f"cannot reserve {size} bytes under {SHARED_FOLDER}: {error}. Make room there: delete what other programs "
            f"have left, or mount it larger (docker run --shm-size)"
        ) from error
    return fd


def _give_name(fd: int, name: str, held: contextlib.ExitStack) -> None:
    """Let `name` stand for an open file until `held` ends."""
    path = SHARED_FOLDER / name
    if not path.exists():
        held.callback(path.unlink, missing_ok=True)
        os.link(
            f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True
        )  # without src_dir_fd it does not follow


def _of_process(offer: _Offer) -> int:
    """Open a peer's file as one of its process.

    Raises:
        OSError: This process may not, or the peer's is not seen from here.
    """
    if offer.namespace != pid_namespace():
        raise FileNotFoundError("other process ids")
    return _known(os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC), offer)


def _by_name(offer: _Offer) -> int:
    """Open a peer's file by its name."""
    try:
        return _known(os.open(SHARED_FOLDER / offer.name, os.O_RDWR | os.O_CLOEXEC), offer)
    except FileNotFoundError as error:
        raise SymmetricMemoryError(
            f"the segment '{offer.name}' of a peer is not under {SHARED_FOLDER} here: the ranks must share one "
            f"{SHARED_FOLDER} (one container, or a common IPC namespace)"
        ) from error


def _known(fd: int, offer: _Offer) -> int:
    """`fd`, if it is what was offered: ids of processes, and names, may be those of others."""
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (offer.device, offer.inode):
        os.close(fd)
        raise FileNotFoundError(f"no file {offer.inode} of device {offer.device}")
    return fd


def _mapped(fd: int, size: int, held: contextlib.ExitStack) -> torch.Tensor:
    held.callback(os.close, fd)
    return _map(fd, size)


def _tried(do: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], str]:
    """Give the result of `do()`, and why there is none."""
    try:
        return do(), ""
    except OSError as error:
        return [], str(error) or type(error).__name__


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
        if segment.boot != segments[rank].boot:
            raise SymmetricMemoryError(
                f"ranks {rank} and {peer} are on two machines that are both named '{segment.host}': symmetric memory "
                f"needs all ranks of a group on one host; name the machines apart"
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
