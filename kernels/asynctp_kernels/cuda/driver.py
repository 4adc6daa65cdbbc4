"""The few CUDA driver calls that an overlapped op needs, through ctypes: copies, stream memory operations, events.

Addresses, streams and events are plain integers. Each call costs about a microsecond of host time, which is why these
are not torch calls: an op makes a dozen of them. A failed call raises `CudaError` with the driver's own message.

Source: CUDA Driver API, "Stream Memory Operations", "Memory Management", "Event Management".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from asynctp_kernels.compat import current_raw_stream, symmetric_empty, symmetric_rendezvous
from asynctp_kernels.errors import SymmetricMemoryError

T = TypeVar("T")
IN_ORDER = False  # what is enqueued is done later
PEER_WRITES_UNSUPPORTED_FROM = 13010  # CUDA 13.1: no stream memory operations on peer addresses (NCCL issue 2052)

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_GEQ = 0
_EVENT_DISABLE_TIMING = 2


class CudaError(SymmetricMemoryError):
    """A CUDA driver call failed."""


class _MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams: the members of waitValue and writeValue, which have one layout, in a 48-byte union."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


_MEMORY_TYPE_DEVICE = 2


@functools.cache
def library() -> Any:
    """libcuda.

    Raises:
        CudaError: there is no NVIDIA driver here.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no NVIDIA driver: {error}") from error


def _function(name: str, *argtypes: Any) -> Callable[..., None]:
    """A driver function that raises on failure; looked up at its first call, so that importing needs no driver."""
    found: list[Any] = []

    def call(*args: Any) -> None:
        if not found:
            function = getattr(library(), name)
            function.argtypes, function.restype = argtypes, ctypes.c_int
            found.append(function)
        check(name, found[0](*args))

    return call


def call(name: str, *args: Any) -> None:
    """Call a driver function once, with arguments that ctypes knows how to pass.

    Raises:
        CudaError: It failed, or this driver does not have it.
    """
    function = getattr(library(), name, None)
    if function is None:
        raise CudaError(f"this driver has no {name}")
    check(name, function(*args))


def check(name: str, code: int) -> None:
    """Raise a `CudaError` with the driver's own message if the function `name` gave another code than 0."""
    if code:
        raise CudaError(f"{name}: {_message(code)}")


def _message(code: int) -> str:
    text = ctypes.c_char_p()
    library().cuGetErrorString(code, ctypes.byref(text))
    return f"{text.value.decode() if text.value else 'unknown error'} ({code})"


_u64, _size, _uint, _ref = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p

#: copy(dst, src, bytes, stream): device memory of this or another GPU
copy: Callable[[int, int, int, int], None] = _function("cuMemcpyDtoDAsync_v2", _u64, _u64, _size, _ref)
record_event: Callable[[int, int], None] = _function("cuEventRecord", _ref, _ref)
wait_event_with_flags: Callable[[int, int, int], None] = _function("cuStreamWaitEvent", _ref, _ref, _uint)
_copy_2d = _function("cuMemcpy2DAsync_v2", _ref, _ref)
_batch = _function("cuStreamBatchMemOp_v2", _ref, _uint, _ref, _uint)
_event_create = _function("cuEventCreate", _ref, _uint)


def wait_event(stream: int, event: int) -> None:
    """Work enqueued on `stream` from now on starts after `event`."""
    wait_event_with_flags(stream, event, 0)


def new_event() -> int:
    """An event without timing. It lives as long as the process's CUDA context."""
    event = ctypes.c_void_p()
    _event_create(ctypes.byref(event), _EVENT_DISABLE_TIMING)
    assert event.value is not None
    return event.value


def copy_rows(dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: int) -> None:
    """Copy `height` rows of `width` bytes; pitches are the bytes from one row to the next."""
    if height == 1 or (dst_pitch == width and src_pitch == width):
        copy(dst, src, width * height, stream)
        return
    request = _Copy2D(
        src_type=_MEMORY_TYPE_DEVICE,
        src_device=src,
        src_pitch=src_pitch,
        dst_type=_MEMORY_TYPE_DEVICE,
        dst_device=dst,
        dst_pitch=dst_pitch,
        width=width,
        height=height,
    )
    _copy_2d(ctypes.byref(request), stream)


@dataclass(frozen=True)
class Wait:
    """Hold the stream until the int32 at `address` is at least `value`.

    peer, chunk: the rank that sets the word, and which of its chunks it is about; None: this GPU sets it.
    """

    address: int
    value: int = 1
    peer: int | None = None
    chunk: int = 0


@dataclass(frozen=True)
class Write:
    """Store `value` in the int32 at `address`, after everything before it in the stream is visible."""

    address: int
    value: int


class MemOps:
    """A fixed sequence of waits and writes, enqueued with one driver call."""

    def __init__(self, ops: Sequence[Wait | Write]) -> None:
        self._count = len(ops)
        self._params = (_MemOp * max(self._count, 1))(*map(_memop, ops))
        self._address = ctypes.addressof(self._params)

    def enqueue(self, stream: int) -> None:
        """Append the sequence to `stream`."""
        if self._count:
            _batch(stream, self._count, self._address, 0)


def _memop(op: Wait | Write) -> _MemOp:
    kind = _WAIT_VALUE_32 if isinstance(op, Wait) else _WRITE_VALUE_32
    return _MemOp(operation=kind, address=op.address, value=op.value, flags=_WAIT_GEQ)


def driver_version() -> int:
    """The newest CUDA version that the driver knows, such as 13000 for 13.0."""
    version = ctypes.c_int()
    _function("cuDriverGetVersion", _ref)(ctypes.byref(version))
    return version.value


def peer_writes_supported() -> bool:
    """Whether a stream memory operation may write to another GPU's memory."""
    return driver_version() < PEER_WRITES_UNSUPPORTED_FROM


def device_attribute(index: int, number: int) -> int:
    """The CUdevice_attribute `number` of GPU `index`, which counts the GPUs that this process sees."""
    device, value = ctypes.c_int(), ctypes.c_int()
    _function("cuInit", _uint)(0)
    _function("cuDeviceGet", _ref, ctypes.c_int)(ctypes.byref(device), index)
    _function("cuDeviceGetAttribute", _ref, ctypes.c_int, ctypes.c_int)(ctypes.byref(value), number, device)
    return value.value


def capture_id(stream: int) -> int:
    """Which CUDA graph capture `stream` is part of; 0 for none. 1 for any, where the driver does not say."""
    for name, unused in (("cuStreamGetCaptureInfo_v2", 3), ("cuStreamGetCaptureInfo_v3", 4)):
        if hasattr(library(), name):
            status, number = ctypes.c_int(), ctypes.c_uint64()
            query = _function(name, *[_ref] * (3 + unused))
            query(stream, ctypes.byref(status), ctypes.byref(number), *[None] * unused)
            return number.value if status.value else 0
    return 1


def relax_captures() -> None:
    """Calls of this thread do not break captures of other threads (`cuThreadExchangeStreamCaptureMode`)."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    _function("cuThreadExchangeStreamCaptureMode", _ref)(ctypes.byref(mode))


# --- the device -----------------------------------------------------------------------------------------------------
def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority, so that a copy is not queued behind anything."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def current_stream(index: int) -> int:
    """The handle of the current stream of GPU `index`."""
    return current_raw_stream(index)


def current_device() -> int | None:
    """Index of the current GPU."""
    return torch.cuda.current_device()


def processors(index: int) -> int:
    """SMs of GPU `index`."""
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


@functools.cache
def machine(index: int) -> tuple[tuple[int, int], int, str]:
    """(compute capability, SMs, name) of GPU `index`."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count, properties.name


def capturing() -> bool:
    """A CUDA graph is being captured."""
    return torch.cuda.is_current_stream_capturing()


def synchronize(device: torch.device) -> None:
    """Wait until everything on `device` is done."""
    torch.cuda.synchronize(device)


def keep(tensor: torch.Tensor) -> None:
    """`tensor` is used on the current stream: its memory is not given to others before that is done."""
    tensor.record_stream(torch.cuda.current_stream())


def outside_pools(device: torch.device, make: Callable[[], T]) -> T:
    """`make()` on a thread of its own, so that what stays allocated is in nobody's memory pool.

    `torch.compile(mode="reduce-overhead")` runs a program once before it captures it, allocating from the graph's pool,
    and raises if anything but results is left there. Such a pool is that of a thread, or of its current stream.
    """

    def run() -> T:
        torch.cuda.set_device(device)
        made = make()
        torch.cuda.synchronize(device)
        return made

    with ThreadPoolExecutor(1, "asynctp-memory") as thread:
        return thread.submit(run).result()


def share(group: ProcessGroup, device: torch.device, size: int) -> tuple[torch.Tensor, object, list[int]]:
    """Memory of `size` bytes, zeroed and shared: (own part, what keeps it, address of each rank's part).

    Raises:
        RuntimeError: The GPUs of `group` cannot share memory.
    """
    memory = symmetric_empty(size, device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric_rendezvous(memory, group)
    return memory, handle, [int(address) for address in handle.buffer_ptrs]
