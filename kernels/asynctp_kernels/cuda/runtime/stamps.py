"""When and where each tile of the fused GEMM ran, for pictures: `gemm_kernel` says it where `stamped` asks for it.

Plans that are made inside `stamped` are others than those outside, whose kernel knows nothing of stamps. A plan's
stamps lie in memory of its own, so that its calls can be recorded like any others; before its next call overwrites
them, they are copied for who may still read them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory

WORDS = 4  # int64 of a tile: reached, arrived, stored, SM


class StampTable:
    """The stamps of one plan's GEMM.

    Args:
        op: Its name.
        memory: Of its group.
        tiles: Of all ranks' rows.
        first: Whose rows come first: so many ranks on from this one.
    """

    def __init__(self, op: str, memory: GroupMemory, tiles: int, first: int) -> None:
        self.op, self.rank, self.world = op, memory.rank, memory.world
        self.first, self.per_rank = first, tiles // memory.world
        self.words = torch.zeros(1 + WORDS * tiles, dtype=torch.int64, device=memory.device)
        self._last: weakref.ref[StampedCall] | None = None

    @property
    def done(self) -> Tensor:
        """The kernel's argument: int32, the count of programs that are done; the stamps begin 8 bytes on."""
        return self.words.view(torch.int32)

    def begin(self, stream: int, end: int) -> None:
        """A call is about to be enqueued on `stream`, the current one; `end`: the event after the group's last one."""
        last = None if self._last is None else self._last()
        if last is not None:
            driver.wait_event(stream, end)
            last.words = self.words.clone()
        call = StampedCall(self, self.words)
        _open[-1].made.append(call)
        self._last = weakref.ref(call)


@dataclass(eq=False)
class StampedCall:
    """One call, and where its stamps are."""

    table: StampTable
    words: Tensor

    def read(self) -> dict[str, Any]:
        """As `Stamps.calls` says."""
        table, tiles = self.table, []
        for number, (reached, arrived, stored, sm) in enumerate(self.words[1:].view(-1, WORDS).tolist()):
            rank = (table.rank + table.first + number // table.per_rank) % table.world
            tiles.append([rank, sm, reached, arrived, stored])
        return {"op": table.op, "device": self.words.device.index, "rank": table.rank, "tiles": tiles}


class Stamps:
    """The stamps of all calls in a `stamped` block."""

    def __init__(self) -> None:
        self.made: list[StampedCall] = []

    def calls(self) -> list[dict[str, Any]]:
        """The calls of "fused" in the block, in their order, in plain values. Waits until the GPU has made them.

        op, device, rank: The op's name, the GPU's index and the rank.
        tiles: In the order in which they are dealt out: [rank whose rows it computes, SM, reached, arrived, stored] of
            each. The last three are nanoseconds of the GPU's clock: its SM has come to it; its rows of A are there (as
            those of a scatter always are); it has been handed to the TMA unit, which stores it.
        """
        for call in self.made:
            driver.synchronize(call.words.device)
        return [call.read() for call in self.made]


_open: list[Stamps] = []


@contextlib.contextmanager
def stamped() -> Iterator[Stamps]:
    """Every call inside that runs "fused" says when and where each of its tiles ran; for pictures.

    Not for a CUDA graph capture: calls in one raise a RuntimeError.
    """
    _open.append(Stamps())
    try:
        yield _open[-1]
    finally:
        _open.pop()


def requested() -> bool:
    """Whether a call is to be stamped.

    Raises:
        RuntimeError: It is captured; its replays would not be seen.
    """
    if not _open:
        return False
    if driver.capturing():
        raise RuntimeError("asynctp: stamped calls cannot be captured in a CUDA graph; capture outside of `stamped`")
    return True


def new_table(op: str, memory: GroupMemory, tiles: int, first: int) -> StampTable | None:
    """For the plan that is being made, if its calls are to be stamped."""
    return StampTable(op, memory, tiles, first) if _open else None
