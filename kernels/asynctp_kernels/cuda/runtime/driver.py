"""The few CUDA driver calls that an overlapped op needs, through ctypes: copies, stream memory operations, events, and
graphs of these and of kernels.

Addresses, streams and events are plain integers. Each call costs about a microsecond of host time, which is why these
are not torch calls: an op makes a dozen of them. A failed call raises `CudaError` with the driver's own message.

Source: CUDA Driver API, "Stream Memory Operations", "Memory Management", "Event Management", "Graph Management".
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

from asynctp_kernels import torch_private
from asynctp_kernels.errors import SymmetricMemoryError

T = TypeVar("T")
IN_ORDER = False  # what is enqueued is done later
PEER_WRITES_UNSUPPORTED_FROM = 13010  # CUDA 13.1: no stream memory operations on peer addresses (NCCL issue 2052)

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_GEQ, _WAIT_EQ = 0, 1
_EVENT_DISABLE_TIMING = 2
_EVENT_WAIT_EXTERNAL = 1
_CAPTURE_RELAXED = 2
_USE_NODE_PRIORITY = 8
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


def _function(name: str, *argtypes: Any) -> Callable[..., None]:
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
        raise CudaError(f"{name}: {_message(code)}")


def _message(code: int) -> str:
    text = ctypes.c_char_p()
    library().cuGetErrorString(code, ctypes.byref(text))
    return f"{text.value.decode() if text.value else 'unknown error'} ({code})"


_u64, _size, _uint, _ref = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p

#: copy(dst, src, bytes, stream): device memory of this or another GPU
copy: Callable[[int, int, int, int], None] = _function("cuMemcpyDtoDAsync_v2", _u64, _u64, _size, _ref)
#: copy_from_host(dst, src, bytes, stream): from pinned memory
copy_from_host: Callable[[int, int, int, int], None] = _function("cuMemcpyHtoDAsync_v2", _u64, _ref, _size, _ref)
record_event: Callable[[int, int], None] = _function("cuEventRecord", _ref, _ref)
wait_event_with_flags: Callable[[int, int, int], None] = _function("cuStreamWaitEvent", _ref, _ref, _uint)
_copy_2d = _function("cuMemcpy2DAsync_v2", _ref, _ref)
_batch = _function("cuStreamBatchMemOp_v2", _ref, _uint, _ref, _uint)
_event_create = _function("cuEventCreate", _ref, _uint)
_set_attribute = _function("cuFuncSetAttribute", _ref, ctypes.c_int, ctypes.c_int)


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

    def enqueue(self, stream: int) -> None:
        """Append the sequence to `stream`."""
        if self._count:
            _batch(stream, self._count, self._address, 0)


def _memop(op: Wait | Write) -> _MemOp:
    if isinstance(op, Write):
        return _MemOp(operation=_WRITE_VALUE_32, address=op.address, value=op.value)
    flags = _WAIT_EQ if op.exactly else _WAIT_GEQ
    return _MemOp(operation=_WAIT_VALUE_32, address=op.address, value=op.value, flags=flags)


class Graph:
    """A recording, on the host.

    A copy in a graph is of the memory that was at its addresses when they were last set, which need not be the memory
    that is there now: PyTorch's allocator may have given it back meanwhile, and got other memory at the same place.
    (Launched then, a copy from another GPU was an "unspecified launch failure" on 2 x H200, CUDA 13.0, 2026-11-22.) So
    copies, and memory that is set, are set anew before every launch. Kernels know addresses only.

    Args:
        handle: CUgraph; destroyed with this.

    Attributes:
        known: Nothing is in it but kernels, waits, words, and copies of one range of bytes: others cannot be brought
            up to date in an executable graph.
    """

    __slots__ = ("_followed", "_moves", "handle", "known")

    def __init__(self, handle: int) -> None:
        self.handle, self.known = _ref(handle), True
        self._moves: list[tuple[Callable[..., int], ctypes.c_void_p, Any]] = []  # what each refresh calls, all prepared
        self._followed: list[Any] = []  # parameters of copies that come from elsewhere each time
        for node in _nodes(self.handle):
            kind = _node_kind(node)
            if kind in _MOVING:
                name, words, one_range = _MOVING[kind]
                params = (_u64 * words)()
                call(f"{name}GetParams", node, ctypes.byref(params))
                self._moves.append((getattr(library(), f"{name}SetParams"), node, params))
                self.known &= params[-len(one_range) :] == one_range
            else:
                self.known &= kind in _FIXED

    @property
    def follows(self) -> bool:
        """Each launch sets the source addresses of some copies."""
        return bool(self._followed)

    def follow(self, copies: Sequence[tuple[int, int]]) -> None:
        """Let `refresh` say where these come from: (to, from) of each. Not `known` if one is not found exactly once."""
        found = {
            (params[_TO], params[_FROM]): params
            for _, _, params in self._moves
            if len(params) == _COPY_WORDS and not any(params[word] for word in _OFFSETS)
        }
        self.known &= len(dict(copies)) == len(copies) and all(copy in found for copy in copies)
        self._followed = [found[copy] for copy in copies] if self.known else []

    def refresh(self, sources: Sequence[int] = ()) -> None:
        """Let copies be of what is at their addresses now; those that are followed, from these."""
        for params, source in zip(self._followed, sources, strict=False):
            params[_FROM] = source
        for write, node, params in self._moves:
            if code := write(node, params):
                check(write.__name__, code)

    def __del__(self) -> None:
        library().cuGraphDestroy(self.handle)  # at the end of a program there may be nothing left to destroy


#: words of CUDA_MEMCPY3D: addresses, and offsets (x, y, z, level of detail) of both
_FROM, _TO = 6, 17
_OFFSETS = (0, 1, 2, 3, 11, 12, 13, 14)
#: kinds of nodes that hold memory: whose parameters, how many words these have, and what the last ones are for one
#: range of bytes (CUDA_MEMCPY3D: rows, slices; CUDA_MEMSET_NODE_PARAMS: rows)
_COPY_WORDS = 25
_MOVING: dict[int, tuple[str, int, list[int]]] = {
    1: ("cuGraphMemcpyNode", _COPY_WORDS, [1, 1]),
    2: ("cuGraphMemsetNode", 5, [1]),
}
#: kernels, nothing, waits for events, batches of stream memory operations
_FIXED = {0, 5, 6, 12}


def _nodes(graph: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    return [_ref(node) for node in nodes]


def _node_kind(node: ctypes.c_void_p) -> int:
    kind = ctypes.c_int()
    call("cuGraphNodeGetType", node, ctypes.byref(kind))
    return kind.value


class Executable:
    """A GPU's copy of graphs that differ in parameters only, of one at a time. Kernels keep their priorities."""

    __slots__ = ("_handle", "_problem")

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        self._problem = ctypes.create_string_buffer(24)  # CUgraphExecUpdateResultInfo

    def show(self, graph: Graph, sources: Sequence[int] = ()) -> None:
        """Later launches are of `graph`; earlier ones stay what they are, under way or not. sources: see `refresh`.

        Raises:
            CudaError: There is no memory for it, or nothing like it can be launched.
        """
        graph.refresh(sources)
        if not self._handle or library().cuGraphExecUpdate_v2(self._handle, graph.handle, self._problem):
            self._destroy()
            made, flags = ctypes.c_void_p(), ctypes.c_ulonglong(_USE_NODE_PRIORITY)
            call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph.handle, flags)
            self._handle = made

    def launch(self, stream: int) -> None:
        """Enqueue the graph on `stream`, after earlier launches."""
        _graph_launch(self._handle, stream)

    def _destroy(self) -> None:
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            library().cuGraphExecDestroy(handle)

    __del__ = _destroy


_graph_launch = _function("cuGraphLaunch", _ref, _ref)


def record(stream: int, enqueue: Callable[[int], None]) -> Graph:
    """The graph of what `enqueue(stream)` enqueues there, and on streams that it forks from there and joins again.

    Raises:
        CudaError: Something of it cannot be captured.
    """
    graph = ctypes.c_void_p()
    call("cuStreamBeginCapture_v2", _ref(stream), _uint(_CAPTURE_RELAXED))
    try:
        enqueue(stream)
    except BaseException:
        library().cuStreamEndCapture(_ref(stream), ctypes.byref(graph))  # it fails too, if the capture has
        if graph:
            call("cuGraphDestroy", graph)
        raise
    call("cuStreamEndCapture", _ref(stream), ctypes.byref(graph))
    assert graph.value is not None
    return Graph(graph.value)


def unrecordable() -> str | None:
    """The program's setting by which temporaries of a recording would not stay its own; None where they do."""
    return torch_private.forgetful_allocator()


def driver_version() -> int:
    """The newest CUDA version that the driver knows, such as 13000 for 13.0."""
    version = ctypes.c_int()
    _function("cuDriverGetVersion", _ref)(ctypes.byref(version))
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
    _function("cuInit", _uint)(0)
    _function("cuDeviceGetAttribute", _ref, ctypes.c_int, ctypes.c_int)(ctypes.byref(value), number, _device(index))
    return value.value


def _device(index: int) -> ctypes.c_int:
    """The CUdevice of GPU `index`, of those that this process sees."""
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    return device


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


def new_torch_stream(device: torch.device, urgent: bool = True) -> torch.cuda.ExternalStream:
    """Such a stream, for PyTorch's calls."""
    return torch.cuda.ExternalStream(new_stream(device, urgent), device)  # type: ignore[no-untyped-call]


def current_stream(index: int) -> int:
    """The handle of the current stream of GPU `index`."""
    return torch_private.current_raw_stream(index)


def current_device() -> int | None:
    """Index of the current GPU."""
    return torch_private.current_device()


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
