"""`driver` for ranks that are processes of one host: plans, scripts and kernels as on GPUs, in Triton's interpreter.

Every call does its work before it returns: a copy is made, a word is written, a kernel is interpreted. That is one of
the orders in which a GPU may do it, since plans enqueue every producer before its consumer; what this host cannot do
yet when it is asked to is an error. Only the ranks run at the same time, through shared memory, and every wait for one
of them is bounded (`waits`). `tests/soundness/test_channel_model.py` explores the other orders.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from asynctp_kernels.cuda.runtime.driver import StreamWaitOver, Wait, Write
from asynctp_kernels.errors import timeout_s
from asynctp_kernels.host import rendezvous
from asynctp_kernels.signals import POLL_PAUSE_S

T = TypeVar("T")
IN_ORDER = True
NAME = "Triton's interpreter"
#: of the pretended GPU: few, so that each program of a persistent kernel has several tiles
PROCESSORS = 3


# --- copies, words, events ----------------------------------------------------------------------------------------
def copy(dst: int, src: int, size: int, stream: int) -> None:
    ctypes.memmove(dst, src, size)


def copy_rows(dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int) -> None:
    for row in range(height):
        ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)


class MemOps:
    """A fixed sequence of waits and writes."""

    def __init__(self, ops: Sequence[Wait | Write]) -> None:
        self._ops = tuple(ops)

    def enqueue(self, stream: int, bases: Sequence[int] = ()) -> None:
        """Do the sequence. bases: Not looked at; scripts give them to all that they enqueue.

        Raises:
            StreamWaitOver: A peer's word did not come in time, or has another value.
            RuntimeError: A word of this process is not there yet, and nothing else in it could still set it.
        """
        for op in self._ops:
            word = ctypes.c_int32.from_address(op.address)
            if isinstance(op, Write):
                word.value = op.value
            elif op.peer is not None:
                _wait_for_peer(word, op)
            elif word.value < op.value:
                raise RuntimeError(f"a stream waits for a word to be {op.value}, which is {word.value} for good")


def _wait_for_peer(word: ctypes.c_int32, wait: Wait) -> None:
    """Each look reads the word once, and after the clock: a peer may set it at any time, and this process may stop."""
    until = time.monotonic() + timeout_s()
    while True:
        over = time.monotonic() > until
        found = word.value
        if found == wait.value or (found > wait.value and not wait.exactly):
            return
        if over or (wait.exactly and found):
            raise StreamWaitOver(wait, found)
        time.sleep(POLL_PAUSE_S)


def new_event() -> int:
    """Events are of no use in one order."""
    return 0


def is_over(event: int) -> bool:
    """True: all work is done as it is enqueued."""
    return True


def record_event(event: int, stream: int) -> None:
    """Nothing: work before the event is done."""


def wait_event(stream: int, event: int) -> None:
    """Nothing: work before the event is done."""


# --- the device -----------------------------------------------------------------------------------------------------
def new_stream(device: torch.device) -> int:
    """All streams are this process."""
    return 0


def current_stream(index: int | None) -> int:
    return 0


def current_device() -> int | None:
    """Index of a CPU."""
    return None


def machine(index: int | None) -> tuple[tuple[int, int], int, str]:
    """(compute capability that the kernels are written for, SMs, name)."""
    return (9, 0), PROCESSORS, NAME


def capturing() -> bool:
    return False


def synchronize(device: torch.device) -> None:
    """Everything is done."""


def record_stream(tensor: torch.Tensor) -> None:
    """Nothing is under way that `tensor` must outlive."""


def outside_pools(device: torch.device, make: Callable[[], T], stop: Callable[[BaseException], None]) -> T:
    """CPU memory has no pools."""
    return make()


def driver_version() -> int:
    """There is no driver."""
    return 0


def peer_writes_supported() -> bool:
    return True


def reserve(device: torch.device, size: int) -> int:
    """The memory is made where it is shared; only its size is known before."""
    return size


def share(group: ProcessGroup, size: int) -> tuple[torch.Tensor, object, list[int]]:
    """Memory of `size` bytes, zeroed and shared: (own part, what keeps it, address of each rank's part)."""
    handle = rendezvous(group, size)
    return handle.get_buffer(group.rank(), [size], torch.uint8), handle, handle.buffer_ptrs


# --- kernels --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Memory:
    """A tensor as far as the interpreter asks. It copies tensors back after a launch; peers' memory must not be."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def prepare(kernel: Any, programs: int, examples: Sequence[Any]) -> Callable[..., None]:
    """`kernel` to be called with addresses where `examples` has tensors or descriptors, then its constants."""

    def value(example: Any, given: Any) -> Any:
        if isinstance(example, torch.Tensor):
            return interpreter._implicit_cvt(_Memory(given, example.dtype))
        if isinstance(example, TensorDescriptor):
            memory = _Memory(given.address, example.base.dtype)
            like = TensorDescriptor(memory, given.shape, given.strides, given.block_shape, given.padding)
            return interpreter._implicit_cvt(like)
        return given

    examples = [_outline(example) for example in examples]

    def run(*values: Any, stream: int) -> None:
        arguments = [value(example, given) for example, given in zip(examples, values, strict=False)]
        kernel[(programs,)](*arguments, *values[len(examples) :])

    return run


def _outline(example: Any) -> Any:
    """An example without its memory: a plan outlives the call that it was made for."""
    if isinstance(example, torch.Tensor):
        return example.new_empty(0)
    if isinstance(example, TensorDescriptor):
        empty = torch.empty(0, dtype=example.base.dtype)
        return TensorDescriptor(empty, example.shape, example.strides, example.block_shape, example.padding)
    return example
