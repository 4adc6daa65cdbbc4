"""Bounded waits for other ranks: what is awaited, as a number that a kernel can record, and how a stream waits.

A stream memory operation waits for ever. Where `ASYNCTP_TIMEOUT_S` bounds waits, a stream waits for another rank's word
by a kernel of one warp instead (`copy_kernels.await_kernel`); without a bound nothing differs from a program that knows
none. Words that this GPU writes itself are awaited as ever: what writes them ends once every wait for a peer does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .copy_kernels import await_kernel
from .launch import prepare
from .script import Player, Wait
from .tiles import MAX_CHUNKS

OPS = (
    "all_gather_matmul", "all_gather_scaled_matmul", "matmul_reduce_scatter", "scaled_matmul_reduce_scatter",
    "matmul_all_reduce", "scaled_matmul_all_reduce", "all_gather", "reduce_scatter",
)  # fmt: skip
#: `copy_kernels.stage_kernel` counts on the order of the first two
THINGS = ("call", "staged shard", "shard", "part", "free inbox", "chunk")


def code(op: str, thing: str, chunk: int = 0) -> int:
    """What a call of `op` waits for, as the number that `describe` reads. `chunk` matters to a "chunk" only."""
    return (OPS.index(op) * MAX_CHUNKS + chunk) * len(THINGS) + THINGS.index(thing)


def describe(number: int) -> tuple[str, str]:
    """(op, what it waited for) of a `code`, such as ("matmul_reduce_scatter", "chunk 1")."""
    rest, thing = divmod(number, len(THINGS))
    op, chunk = divmod(rest, MAX_CHUNKS)
    return OPS[op], f"chunk {chunk}" if THINGS[thing] == "chunk" else THINGS[thing]


class StreamWaits:
    """Bounded waits of streams, of one group.

    Args:
        bound: Nanoseconds that one may take.
        status: Where the first that runs out is recorded (`signals.record_timeout`).
        word: Any int32 tensor on the device.
    """

    def __init__(self, bound: int, status: torch.Tensor, word: torch.Tensor) -> None:
        self._launch = prepare(await_kernel, 1, [word, 1, bound, status, 1, 1], {}, 1)
        self._bound, self._status = bound, status.data_ptr()

    def of(self, op: str, thing: str) -> Callable[[Wait], Player]:
        """How a script that waits for `thing` in `op` enqueues its waits for peers."""

        def compiled(wait: Wait) -> Player:
            number = code(op, thing, wait.chunk)
            values = [wait.address, wait.value, self._bound, self._status, wait.peer, number]
            return lambda stream, bases: self._launch(stream, values)

        return compiled
