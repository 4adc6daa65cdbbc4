"""The driver of this process: a GPU's (`driver`), or this host's where Triton interprets (`interpreted`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from asynctp_kernels.cuda.runtime import driver as gpu
from asynctp_kernels.cuda.runtime import interpreted
from asynctp_kernels.cuda.runtime.driver import Wait, Write
from asynctp_kernels.signals import IS_INTERPRETED

T = TypeVar("T")

__all__ = ["Driver", "driver", "others_beside"]


class Enqueued(Protocol):
    """A fixed sequence of waits and writes of words."""

    def enqueue(self, stream: int, bases: Sequence[int] = (), /) -> None:
        """Put it on `stream`. bases: Not looked at; scripts give them to all that they enqueue."""


class Driver(Protocol):
    """The functions that plans and the memory of groups call on the machine that they run on. Two modules have them.

    Streams and events are numbers, addresses are numbers of bytes. Recordings and the watch's copies, which only a GPU
    has, call the module `driver` itself.

    Attributes:
        IN_ORDER: Everything is done as it is enqueued.
    """

    IN_ORDER: bool

    # --- copies, words, events
    def copy(self, dst: int, src: int, size: int, stream: int, /) -> None:
        """Copy `size` bytes."""

    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy `height` rows of `width` bytes; pitches are the bytes from one row to the next."""

    def MemOps(self, ops: Sequence[Wait | Write]) -> Enqueued:
        """A sequence of waits and writes, to be enqueued many times."""

    def new_event(self) -> int:
        """An event without timing."""

    def is_over(self, event: int) -> bool:
        """All work before `event` is done."""

    def record_event(self, event: int, stream: int, /) -> None:
        """Let `event` stand for all that `stream` has been given so far."""

    def wait_event(self, stream: int, event: int) -> None:
        """Work enqueued on `stream` from now on starts after `event`."""

    def wait_event_at_launch(self, stream: int, event: int) -> None:
        """The same in a capture, at each launch, for what `event` then was last recorded of."""

    # --- the device
    def new_stream(self, device: torch.device) -> int:
        """A stream that nobody else gets."""

    def current_stream(self, index: int) -> int:
        """The current stream of the device of this index."""

    def current_device(self) -> int | None:
        """Index of the current device."""

    def processors(self, index: int) -> int:
        """SMs of a device."""

    def machine(self, index: int | None) -> tuple[tuple[int, int], int, str]:
        """(compute capability, SMs, name) of a device; None is the CPU."""

    def capturing(self) -> bool:
        """A CUDA graph is being captured."""

    def capture_id(self, stream: int) -> int:
        """Which capture `stream` is part of; 0 for none."""

    def synchronize(self, device: torch.device) -> None:
        """Wait until everything on `device` is done."""

    def record_stream(self, tensor: torch.Tensor) -> None:
        """`tensor` is used on its GPU's current stream: its memory is not given to others before that is done."""

    def outside_pools(self, device: torch.device, make: Callable[[], T], stop: Callable[[BaseException], None]) -> T:
        """`make()`, in no memory pool of the program. stop: lets it end, should this thread be interrupted."""

    def driver_version(self) -> int:
        """The newest CUDA version that the driver knows, or 0."""

    def peer_writes_supported(self) -> bool:
        """Whether a stream may write words of another rank's memory."""

    def reserve(self, device: torch.device, size: int) -> Any:
        """Memory of this rank of `size` bytes that can be shared."""

    def share(self, group: ProcessGroup, memory: Any) -> tuple[torch.Tensor, object, list[int]]:
        """Share what every rank has reserved: (own part, what keeps it, address of each rank's part)."""


def _picked() -> Driver:
    return interpreted if IS_INTERPRETED else gpu


driver: Driver = _picked()


def others_beside(world: int) -> bool:
    """Whether kernels of other groups may run beside those of a group of `world` ranks.

    Taken to be so where the program has more ranks: FSDP's gathers and a pipeline's receives hold SMs in the middle of
    a step. Other groups of the same ranks are not seen.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > world
