"""The memory that one kind of op uses on one group: two slots of landing space, signal words, an epoch.

Invariant (two slots, no trailing barrier). Call number e of a group and kind lands in slot e % 2. A rank R
writes call e's data into peer P's slot e % 2 over the data of call e - 2. That is never too early:

    R starts call e only after its call e - 1 ended, which waited for the words of *every* peer, P's included;
    P released its word of call e - 1 only after P's call e - 2 had ended, so after P's last read of that slot.

So P's reads of e - 2 happen before P's release of e - 1, before R's acquire in e - 1, before R's stores of e.
It rests on three rules: each call waits for every peer (a call that moves nothing does not count as a call,
and all ranks agree on that, as they agree on shapes); one group's calls run in one order, on every rank the
same; a call's reads are over when it ends. With one slot, R could overwrite what P still reads: in call e - 1
P may be a whole call behind. `tests/kernels/test_protocol_model.py` explores this exhaustively.

Epochs only grow and words are never reset, so there is no memset per call. A larger need makes a new
rendezvous, which starts at epoch 0 with fresh zeroed words; all ranks grow in the same call, because the need
is a function of shapes on which they agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from .config import MAX_CHUNKS
from .errors import SymmetricMemoryError
from .host import WORD_BYTES, HostSymmetricMemory, channel_bytes, rendezvous
from .signals import new_status, raise_timeout, timeout_ns

SLOTS = 2
_ALIGNMENT = 256
_SMALLEST_SLOT = 4096

_workspaces: weakref.WeakKeyDictionary[ProcessGroup, dict[str, Workspace]] = weakref.WeakKeyDictionary()


@dataclass
class Workspace:
    """State between the calls of one kind ("gather" or "scatter") on one group.

    Attributes:
        handle: the symmetric memory.
        slot_bytes: size of each of the two slots; slot s starts at s * slot_bytes.
        epoch: number of the current call, kept in a tensor on the device: a captured graph replays the
            increment, where a kernel argument would be frozen. Shape: [1] int64.
        counters: arrivals per (destination, chunk), zero between calls. Shape: [world * MAX_CHUNKS] int64.
        status: first failure of a launch (`signals.raise_timeout`).
        failure: why this workspace must not be used again.
    """

    handle: HostSymmetricMemory
    slot_bytes: int
    epoch: torch.Tensor
    counters: torch.Tensor
    status: torch.Tensor
    failure: str | None = field(default=None)

    @property
    def flags_offset(self) -> int:
        """Bytes from a signal pad's start to its first word; word (src, chunk) is number src * MAX_CHUNKS + chunk."""
        return channel_bytes(self.handle.world_size)

    @property
    def own_flags(self) -> int:
        """Address of our own first word."""
        return self.handle.signal_pad_ptrs[self.handle.rank] + self.flags_offset

    @property
    def own_slots(self) -> int:
        """Address of our own landing slots."""
        return self.handle.buffer_ptrs[self.handle.rank]

    @contextmanager
    def call(self) -> Iterator[int]:
        """The next call, as a context; gives the bound of each of its waits in nanoseconds.

        Whatever is raised inside leaves the ranks at different epochs, so it ends the workspace's life.
        """
        limit_ns = timeout_ns()
        self.epoch += 1
        try:
            yield limit_ns
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def check(self, op: str, limit_ns: int) -> None:
        """Raise when a wait of the launch before ran out.

        Raises:
            PeerTimeout: names op, rank, peer, chunk and seconds.
        """
        raise_timeout(self.status, op, self.handle.rank, "chunk", limit_ns)


def align(size: int) -> int:
    """`size` in bytes rounded up, so that what follows it is aligned for every dtype."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def acquire(group: ProcessGroup, kind: str, slot_bytes: int) -> Workspace:
    """The workspace of `kind` on `group`, made or grown if need be (then it is collective).

    Raises:
        SymmetricMemoryError: an earlier call failed half way; `release` the group on every rank to go on.
        PeerTimeout: a rank did not come to the rendezvous.
    """
    kinds = _workspaces.setdefault(group, {})
    found = kinds.get(kind)
    if found is not None and found.failure is not None:
        raise SymmetricMemoryError(
            f"the {kind} workspace of group '{group.group_name}' is out of step since: {found.failure} "
            f"To go on, call asynctp_kernels.release(group) on every rank."
        )
    if found is None or found.slot_bytes < slot_bytes:
        kinds[kind] = _make(group, max(_SMALLEST_SLOT, 1 << (slot_bytes - 1).bit_length()))
    return kinds[kind]


def release(group: ProcessGroup) -> None:
    """Free the memory of every op on `group`. Collective in effect: the next op makes a new rendezvous.

    Not needed before `destroy_process_group`: memory goes when the group does.
    """
    _workspaces.pop(group, None)


def _make(group: ProcessGroup, slot_bytes: int) -> Workspace:
    words = group.size() * MAX_CHUNKS
    handle = rendezvous(group, SLOTS * slot_bytes, words * WORD_BYTES)
    counters = torch.zeros(words, dtype=torch.int64, device=handle.device)
    epoch = torch.zeros(1, dtype=torch.int64, device=handle.device)
    return Workspace(handle, slot_bytes, epoch, counters, new_status(handle.device))
