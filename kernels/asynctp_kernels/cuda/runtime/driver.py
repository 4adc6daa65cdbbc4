"""The few CUDA driver calls that an overlapped op needs, through ctypes: copies, stream memory operations, events, and
graphs of these and of kernels.

Addresses, streams and events are plain integers. Each call costs about a microsecond of host time, which is why these
are not torch calls: an op makes a dozen of them. A failed call raises `CudaError` with the driver's own message.

Source: CUDA Driver API, "Stream Memory Operations", "Memory Management", "Event Management", "Graph Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from asynctp_kernels import torch_private
from asynctp_kernels.errors import SymmetricMemoryError

T = TypeVar("T")
IN_ORDER = False  # what is enqueued is done later
PEER_WRITES_UNSUPPORTED_FROM = 13010  # CUDA 13.1: no stream memory operations on peer addresses (NCCL issue 2052)

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_GEQ, _WAIT_EQ = 0, 1
_EVENT_DISABLE_TIMING = 2
_EVENT_WAIT_EXTERNAL = 1
CAPTURE_RELAXED = 2
_STREAM_NON_BLOCKING = 1
_CARVEOUT, _ALL_SHARED = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent


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


_END: dict[str, Any] = {
    "x": ctypes.c_size_t, "y": ctypes.c_size_t, "type": ctypes.c_uint, "host": ctypes.c_void_p,
    "device": ctypes.c_uint64, "array": ctypes.c_void_p, "pitch": ctypes.c_size_t,
}  # fmt: skip


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"{end}_{name}", kind) for end in ("src", "dst") for name, kind in _END.items()),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


_MEMORY_TYPE_DEVICE = 2
_NOT_READY = 600


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


def function(name: str, *argtypes: Any) -> Callable[..., None]:
    """A driver function that raises on failure; looked up at its first call, so that importing needs no driver."""
    function: Any = None

    def call(*args: Any) -> None:
        nonlocal function
        if function is None:
            function = getattr(library(), name)
            function.argtypes, function.restype = argtypes, ctypes.c_int
        if code := function(*args):
            check(name, code)

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
        raise CudaError(error_text(name, code))


def error_text(name: str, code: int) -> str:
    """The driver's own message of a code that the function `name` gave; cuBLAS has numbers alone."""
    if name.startswith("cublas"):
        return f"{name}: status {code}"
    text = ctypes.c_char_p()
    library().cuGetErrorString(code, ctypes.byref(text))
    return f"{name}: {text.value.decode() if text.value else 'unknown error'} ({code})"


_u64, _size, _uint, _ref = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p

_copy_1d = function("cuMemcpyDtoDAsync_v2", _u64, _u64, _size, _ref)
#: copy_from_host(dst, src, bytes, stream): from pinned memory
copy_from_host: Callable[[int, int, int, int], None] = function("cuMemcpyHtoDAsync_v2", _u64, _ref, _size, _ref)
record_event: Callable[[int, int], None] = function("cuEventRecord", _ref, _ref)
wait_event_with_flags: Callable[[int, int, int], None] = function("cuStreamWaitEvent", _ref, _ref, _uint)
_copy_2d = function("cuMemcpy2DAsync_v2", _ref, _ref)
_batch = function("cuStreamBatchMemOp_v2", _ref, _uint, _ref, _uint)
_event_create = function("cuEventCreate", _ref, _uint)
_set_attribute = function("cuFuncSetAttribute", _ref, ctypes.c_int, ctypes.c_int)


def copy(dst: int, src: int, size: int, stream: int) -> None:
    """Copy `size` bytes of device memory, of this or another GPU."""
    _copy_1d(dst, src, size, stream)
    note(stream, (dst, src))


def wait_event(stream: int, event: int) -> None:
    """Work enqueued on `stream` from now on starts after `event`."""
    wait_event_with_flags(stream, event, 0)


def wait_event_at_launch(stream: int, event: int) -> None:
    """In a capture: what comes now on `stream` waits, at each launch, for what `event` then was last recorded of."""
    wait_event_with_flags(stream, event, _EVENT_WAIT_EXTERNAL)


def new_event() -> int:
    """An event without timing. It lives as long as the process's CUDA context."""
    event = ctypes.c_void_p()
    _event_create(ctypes.byref(event), _EVENT_DISABLE_TIMING)
    assert event.value is not None
    return event.value


def is_over(event: int) -> bool:
    """Whether all is done that was before the last record of an event; true of one that was never recorded."""
    with relaxed_captures():
        code = int(library().cuEventQuery(ctypes.c_void_p(event)))
    if code != _NOT_READY:
        check("cuEventQuery", code)
    return code != _NOT_READY


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
    note(stream, (dst, src))


@dataclass(frozen=True)
class Wait:
    """Hold the stream until the int32 at `address` is at least `value`, or `exactly` that.

    peer, chunk: the rank that sets the word, and which of its chunks it is about; None: this GPU sets it.
    """

    address: int
    value: int = 1
    peer: int | None = None
    chunk: int = 0
    exactly: bool = False


class StreamWaitOver(RuntimeError):
    """A stream's wait for a peer ended without the word, which holds `found`: only where the host itself waits."""

    def __init__(self, wait: Wait, found: int) -> None:
        super().__init__(wait, found)
        self.wait, self.found = wait, found


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

    def enqueue(self, stream: int, bases: Sequence[int] = ()) -> None:
        """Append the sequence to `stream`. bases: Not looked at; scripts give them to all that they enqueue."""
        if self._count:
            _batch(stream, self._count, self._address, 0)


def _memop(op: Wait | Write) -> _MemOp:
    if isinstance(op, Write):
        return _MemOp(operation=_WRITE_VALUE_32, address=op.address, value=op.value)
    flags = _WAIT_EQ if op.exactly else _WAIT_GEQ
    return _MemOp(operation=_WAIT_VALUE_32, address=op.address, value=op.value, flags=flags)


class Address(int):
    """An address in a call's memory: `offset` bytes from the beginning of tensor `number`. A sum with bytes is one."""

    number: int
    offset: int

    def __new__(cls, value: int, number: int, offset: int = 0) -> Address:
        """See the class."""
        made = super().__new__(cls, value)
        made.number, made.offset = number, offset
        return made

    def __add__(self, more: int) -> Address:
        return Address(int(self) + more, self.number, self.offset + more)

    __radd__ = __add__


#: of a thread that captures: what was launched and copied so far, as (node, values)
_captures = threading.local()


def note(stream: int, values: Sequence[Any]) -> None:
    """Note the values of the last node on `stream`, where this thread captures (`captured`)."""
    noted = getattr(_captures, "noted", None)
    if noted is not None:
        noted.append((_last_node(stream), values))


def note_beside(made: Any, values: Sequence[Any]) -> bool:
    """Note what is made before or after each launch, where this thread captures; else False."""
    noted = getattr(_captures, "noted", None)
    if noted is not None:
        noted.append((made, values))
    return noted is not None


Noted = tuple[Any, Sequence[Any]]


def _last_node(stream: int) -> ctypes.c_void_p:
    """The last node of a stream that is being captured."""
    nodes, count = ctypes.POINTER(_ref)(), _size()
    _capture_info(stream, nodes=nodes, count=count)
    if count.value != 1:
        raise CudaError(f"{count.value} nodes are the last ones of a stream")
    return _ref(nodes[0])


def _capture_info(stream: int, number: Any = None, nodes: Any = None, count: Any = None) -> bool:
    """Whether a stream is being captured: then what is given gets the capture's number, and its last nodes.

    Raises:
        CudaError: CUDA does not say. So it is of nodes with programmatic edges, if asked for `nodes`; and of the legacy
            stream beside a capture.
    """
    status = ctypes.c_int()
    of_capture, last, size = (None if each is None else ctypes.byref(each) for each in (number, nodes, count))
    if hasattr(library(), "cuStreamGetCaptureInfo_v2"):
        call("cuStreamGetCaptureInfo_v2", _ref(stream), ctypes.byref(status), of_capture, None, last, size)
    else:  # which gives data of edges, too
        call("cuStreamGetCaptureInfo_v3", _ref(stream), ctypes.byref(status), of_capture, None, last, None, size)
    return bool(status.value)


@contextlib.contextmanager
def captured(stream: int, enqueue: Callable[[int], None]) -> Iterator[tuple[ctypes.c_void_p, list[Noted]]]:
    """The graph (CUgraph) of what `enqueue(stream)` enqueues on a stream, and on those that it forks from there.

    Also gives what was noted of its launches and copies. Nothing of it runs. Inside, calls of this thread do not break
    captures of other threads. Whoever takes the graph destroys it.

    Raises:
        CudaError: Something of it cannot be captured.
    """
    graph, noted = ctypes.c_void_p(), list[Noted]()
    with relaxed_captures():
        try:
            _captures.noted = noted
            call("cuStreamBeginCapture_v2", _ref(stream), _uint(CAPTURE_RELAXED))
            enqueue(stream)
        except BaseException:  # an interrupt too: while a stream is captured, nobody can synchronize the device
            library().cuStreamEndCapture(_ref(stream), ctypes.byref(graph))  # it fails too, if the capture has
            if graph:
                call("cuGraphDestroy", graph)
            raise
        finally:
            _captures.noted = None
        call("cuStreamEndCapture", _ref(stream), ctypes.byref(graph))
        yield graph, noted


def driver_version() -> int:
    """The newest CUDA version that the driver knows, such as 13000 for 13.0."""
    version = ctypes.c_int()
    function("cuDriverGetVersion", _ref)(ctypes.byref(version))
    return version.value


def peer_writes_supported() -> bool:
    """Whether a stream memory operation may write to another GPU's memory."""
    return driver_version() < PEER_WRITES_UNSUPPORTED_FROM


def leave_shared_memory(function: int) -> None:
    """Let an SM that runs the kernel `function` have as much shared memory as it can, and as little L1.

    How an SM divides its memory changes only while nothing runs on it: by default a GEMM could not start beside a
    kernel without shared memory, however few registers that has.
    """
    _set_attribute(function, _CARVEOUT, _ALL_SHARED)


def device_attribute(index: int, number: int) -> int:
    """The CUdevice_attribute `number` of GPU `index`, which counts the GPUs that this process sees."""
    value = ctypes.c_int()
    function("cuInit", _uint)(0)
    function("cuDeviceGetAttribute", _ref, ctypes.c_int, ctypes.c_int)(ctypes.byref(value), number, _device(index))
    return value.value


def _device(index: int) -> ctypes.c_int:
    """The CUdevice of GPU `index`, of those that this process sees."""
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    return device


def capture_id(stream: int) -> int:
    """Which CUDA graph capture `stream` is part of; 0 for none, as for the legacy stream, which no capture has."""
    number = _u64()
    try:
        return number.value if _capture_info(stream, number) else 0
    except CudaError:
        return 0


def exchange_capture_mode(mode: int) -> int:
    """Have this thread's calls break captures of other threads, or not; gives what was before.

    Source: CUDA Driver API, `cuThreadExchangeStreamCaptureMode`.
    """
    given = ctypes.c_int(mode)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(given))
    return given.value


@contextlib.contextmanager
def relaxed_captures() -> Iterator[None]:
    """Calls of this thread do not break captures of other threads meanwhile."""
    before = exchange_capture_mode(CAPTURE_RELAXED)
    try:
        yield
    finally:
        exchange_capture_mode(before)


# --- the device -----------------------------------------------------------------------------------------------------
def new_stream(device: torch.device, urgent: bool = True) -> int:
    """A stream that nobody else gets. It lives as long as the process's CUDA context.

    PyTorch has 32 of each priority for all who ask, in turn: the program, its captures, FSDP, NCCL, checkpoints. On a
    stream of ours, work of theirs would wait for our peers, and a call of ours for what they wait for: for ever, if a
    receive that is posted early is answered after that call. And while a call is recorded, what another thread
    enqueues on a stream of the recording becomes a part of it, and is not done.

    urgent: Of high priority, so that a copy is queued after nothing.
    """
    stream, context = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(device.index))
    call("cuCtxSetCurrent", context)  # a new thread may have none yet, whatever device PyTorch has set there
    call("cuStreamCreateWithPriority", ctypes.byref(stream), _STREAM_NON_BLOCKING, -int(urgent))
    assert stream.value is not None
    return stream.value


#: the handle of the current stream of a GPU; the index of the current GPU; whether a CUDA graph is being captured
current_stream: Callable[[int], int] = torch_private.current_raw_stream
current_device: Callable[[], int | None] = torch_private.current_device
capturing: Callable[[], bool] = torch_private.is_capturing


@functools.cache
def machine(index: int) -> tuple[tuple[int, int], int, str]:
    """(compute capability, SMs, name) of GPU `index`."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count, properties.name


def synchronize(device: torch.device) -> None:
    """Wait until everything on `device` is done."""
    torch.cuda.synchronize(device)


def record_stream(tensor: torch.Tensor) -> None:
    """`tensor` is used on its GPU's current stream: its memory is not given to others before that is done."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))


def outside_pools(device: torch.device, make: Callable[[], T], stop: Callable[[BaseException], None]) -> T:
    """`make()` on a thread of its own, so that what stays allocated is in nobody's memory pool.

    `torch.compile(mode="reduce-overhead")` runs a program once before it captures it, allocating from the graph's pool,
    and raises if anything but results is left there. Such a pool is that of a thread, or of its current stream.

    stop: Called if this thread is interrupted while it waits; lets `make` end.
    """

    def run() -> T:
        torch.cuda.set_device(device)
        made = make()
        torch.cuda.synchronize(device)
        return made

    with ThreadPoolExecutor(1, "asynctp-memory") as thread:
        made = thread.submit(run)
        try:
            return made.result()
        except BaseException as error:
            if not made.done():
                stop(error)
            raise


def reserve(device: torch.device, size: int) -> torch.Tensor:
    """Memory of this rank of `size` bytes, zeroed, that can be shared.

    Raises:
        RuntimeError: The GPU has no room for it.
    """
    memory = torch_private.symmetric_empty(size, device)
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory


def share(group: ProcessGroup, memory: torch.Tensor) -> tuple[torch.Tensor, object, list[int]]:
    """Share what every rank has reserved: (own part, what keeps it, address of each rank's part).

    Raises:
        RuntimeError: The GPUs of `group` cannot share memory.
    """
    handle = torch_private.symmetric_rendezvous(memory, group)
    return memory, handle, [int(address) for address in handle.buffer_ptrs]
