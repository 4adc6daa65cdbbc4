"""A plan's calls are launches of one graph, whose addresses each call edits.

A call is a dozen or more driver calls and kernel launches; a launch of a graph of them takes the host a fraction of
that. What calls of one plan do differs in addresses only. So a plan's first call is enqueued, its second one captured
(nothing of that runs), and from then on each call writes its own addresses into the parameters of the graph's kernels
and copies, and launches it. Nothing is kept of the addresses of earlier calls but what the graph shows now, so new
memory costs what known memory does, but for the edits.

What makes that as sound as to enqueue:

- *Which parameter is which tensor's address* is known, not guessed. The capture is made with stand-ins for the call's
  tensors. Their addresses (`Address`) have the tensor's number and the offset in it. A launch or copy notes the values
  of its node (`driver.note`). A parameter that is not found there, or twice, refuses the graph.
- *Copies* are edited in every call: a copy in a graph is of the memory that was at its addresses when they were last
  set, which need not be what is there now. PyTorch's allocator may have given it back meanwhile, and got other memory
  at the same place. (Launched then, a copy from another GPU was an "unspecified launch failure" on 2 x H200, CUDA 13.0,
  2026-11-22.) Kernels know addresses only. Where the driver refuses an edit, the plan enqueues from then on: it did so
  with a shard in PyTorch's symmetric memory, after others (H200, torch 2.11, 2026-11-29).
- *Order.* The copy stream and the reducer are branches of the graph, not those streams. The copy stream's waits for
  what the group has in flight (`GroupMemory.fork`), by an event that each launch looks up anew. The reducer's comes
  after that, or after gathers in flight (`land_gathers`). All else that orders calls is outside of the graph. An edit
  counts for later launches only, and launches of one graph follow each other.
- *Memory* is the program's: a call makes its results, and copies of operands that lie as no kernel reads them, before
  its launch. The graph has none, and keeps none alive.

Nobody documents the parameters of cuBLAS's kernels. A matmul of `cublaslt` is no node, but a call before each launch,
or after it. Plans with other matmuls of cuBLAS have no graph: they enqueue. So does a call inside a capture of the
program's. Each graph takes some 100 KB of the GPU's memory.

Source: CUDA Driver API, "Graph Management" (a launch is ordered after earlier launches of the same graph; an edit
affects later launches only; what is destroyed in flight is freed when it is done), "Stream Management"
(cuStreamWaitEvent, CU_EVENT_WAIT_EXTERNAL).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.runtime import build

from asynctp_kernels.cuda.runtime import driver as gpu
from asynctp_kernels.cuda.runtime.driver import Address, CudaError
from asynctp_kernels.cuda.runtime.machine import driver

log = logging.getLogger(__name__)


class Unedited(CudaError):
    """A graph whose addresses cannot all be edited."""


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


#: bytes of an address, of a descriptor, and what the address of a descriptor is a multiple of
_WORD, _MAP, _UNIT = 8, 128, 64
#: words of CUDA_MEMCPY3D: how many, both addresses, offsets (x, y, z, level of detail); the last are rows and slices
_COPY_WORDS, _FROM, _TO, _OFFSETS = 25, 6, 17, (0, 1, 2, 3, 11, 12, 13, 14)
_KERNEL, _COPY = 0, 1
_BEFORE, _AFTER = 1, 2  # a matmul of cuBLASLt is made before the graph, or after it
TRIES = 3  # of a capture: a thread that synchronizes the device meanwhile breaks it
_USE_NODE_PRIORITY = 8
_set_kernel = gpu.function("cuGraphExecKernelNodeSetParams_v2", *[ctypes.c_void_p] * 3)
_set_copy = gpu.function("cuGraphExecMemcpyNodeSetParams", *[ctypes.c_void_p] * 4)
_replace_address = gpu.function("cuTensorMapReplaceAddress", *[ctypes.c_void_p] * 2)
_launch = gpu.function("cuGraphLaunch", *[ctypes.c_void_p] * 2)
#: as `site.c` has them
_FUNCTIONS = (
    "cuGraphExecKernelNodeSetParams_v2", "cuGraphExecMemcpyNodeSetParams", "cuTensorMapReplaceAddress", "cuGraphLaunch",
    "cuEventRecord", "cuStreamWaitEvent", "cuStreamIsCapturing", "cuCtxGetCurrent",
)  # fmt: skip


@functools.cache
def native() -> Any:
    """The module of `site.c`, which Triton's helper builds once and keeps in its cache; or why there is none."""
    try:
        source = Path(__file__).with_name("site.c").read_text()
        return build.compile_module_from_src(source, "asynctp_site")
    except Exception as error:  # no compiler, or no headers of Python
        return f"{type(error).__name__}: {error}"


@functools.cache
def functions() -> Any:
    """The addresses of the driver's functions."""
    found = [ctypes.cast(getattr(gpu.library(), name), ctypes.c_void_p) for name in _FUNCTIONS]
    return (ctypes.c_void_p * len(found))(*found)


class Edit(NamedTuple):
    """`place` gets the address of tensor `number` plus `offset`; `described`: as the address of a descriptor."""

    place: ctypes.c_uint64
    number: int
    offset: int
    described: bool = False


class Node(NamedTuple):
    """A kernel or a copy, which has a context, of an executable graph; or, with a node of 0, a matmul of cuBLASLt.

    params: An address. kept: What has that. context: Of a matmul, when it is made.
    """

    node: int
    params: int
    context: int | None
    edits: Sequence[Edit]
    kept: Any


def _kernel(node: ctypes.c_void_p, values: Sequence[Any]) -> Node:
    """A kernel. values: What it was launched with: addresses, descriptors of memory at addresses, and other values.

    Raises:
        Unedited: It is not plain which parameter is which of them.
    """
    params = _KernelParams()
    gpu.call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
    sizes = _sizes(params)
    steps = [-(-size // _UNIT) * _UNIT for size in sizes]
    room = ctypes.create_string_buffer(_UNIT + sum(steps))
    place, places = ctypes.addressof(room), list[int]()
    place += -place % _UNIT
    given = (ctypes.c_void_p * len(sizes)).from_address(params.params)
    for size, step, source in zip(sizes, steps, given, strict=True):
        ctypes.memmove(place, source, size)
        places.append(place)
        place += step
    pointers = (ctypes.c_void_p * len(places))(*places)
    params.params = ctypes.addressof(pointers)
    words, maps = ([at for at, size in zip(places, sizes, strict=True) if size == of] for of in (_WORD, _MAP))
    edits = [*_found(words, values), *_described(maps, values)]
    return Node(node.value or 0, ctypes.addressof(params), None, edits, (params, room, pointers))


def _sizes(params: _KernelParams) -> list[int]:
    """Bytes of each parameter."""
    of, name = params.func, "cuFuncGetParamInfo"
    if not of:
        of, name = params.kernel, "cuKernelGetParamInfo"
    info = getattr(gpu.library(), name, None)
    if info is None:
        raise Unedited(f"this driver has no {name}; CUDA 12.4 has")
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), list[int]()
    arguments = (ctypes.byref(offset), ctypes.byref(size))
    while info(ctypes.c_void_p(of), ctypes.c_size_t(len(sizes)), *arguments) == 0:
        sizes.append(size.value)
    return sizes


def _found(places: Sequence[int], values: Sequence[Any]) -> list[Edit]:
    """The parameters that are addresses, which are in the order of the values."""
    addresses = [value for value in values if isinstance(value, Address)]
    known = set(map(int, addresses))
    words = [word for word in map(ctypes.c_uint64.from_address, places) if word.value in known]
    if [word.value for word in words] != addresses:
        raise Unedited(f"{len(addresses)} addresses are {len(words)} parameters of a kernel")
    return [Edit(word, at.number, at.offset) for word, at in zip(words, addresses, strict=True)]


def _described(places: Sequence[int], values: Sequence[Any]) -> list[Edit]:
    """The same of descriptors."""
    described = [value.address for value in values if hasattr(value, "block_shape")]
    if len(described) != len(places):
        raise Unedited(f"{len(described)} descriptors are {len(places)} parameters of a kernel")
    pairs = zip(map(ctypes.c_uint64.from_address, places), described, strict=True)
    return [Edit(place, at.number, at.offset, True) for place, at in pairs if isinstance(at, Address)]


def _copy(node: ctypes.c_void_p, values: Sequence[Any]) -> Node:
    """A copy, from or to an address of a call's memory.

    Raises:
        Unedited: It is not of one range of bytes.
    """
    params = (ctypes.c_uint64 * _COPY_WORDS)()
    gpu.call("cuGraphMemcpyNodeGetParams", node, ctypes.byref(params))
    if params[-2:] != [1, 1] or any(params[word] for word in _OFFSETS):
        raise Unedited("a copy of many ranges")
    ends = [(word, at) for word, at in zip((_TO, _FROM), values, strict=True) if isinstance(at, Address)]
    places = [ctypes.c_uint64.from_buffer(params, word * _WORD) for word, _ in ends]
    edits = [Edit(place, at.number, at.offset) for place, (_, at) in zip(places, ends, strict=True)]
    return Node(node.value or 0, ctypes.addressof(params), current_context(), edits, params)


def _matmul(made: Any, values: Sequence[Any], when: int) -> Node:
    """A matmul of cuBLASLt (`cublaslt.Matmul`). values: The addresses of its tensors, or 0."""
    call, size = made.call(), _WORD * len(values)
    words = (ctypes.c_uint64 * len(values)).from_buffer(call, ctypes.sizeof(call) - size)
    places = [ctypes.c_uint64.from_buffer(words, _WORD * place) for place in range(len(values))]
    pairs = zip(places, values, strict=True)
    edits = [Edit(place, at.number, at.offset) for place, at in pairs if isinstance(at, Address)]
    return Node(0, ctypes.addressof(call), when, edits, (made, call, words))


class EditableGraph:
    """An executable graph; each launch gives the addresses of its call's tensors.

    Args:
        graph: CUgraph; destroyed with this.
        noted: Its launches and copies, and matmuls before and after these. Other nodes have nothing that changes.

    Attributes:
        native: The same in C; None where nothing is compiled. It knows which addresses the graph shows.

    Raises:
        CudaError: There is no memory for it, or not all addresses can be edited.
    """

    def __init__(self, graph: ctypes.c_void_p, noted: Sequence[gpu.Noted]) -> None:
        self._graph, self._executable, self._shown = graph, ctypes.c_void_p(), tuple[int, ...]()
        kinds = {_KERNEL: _kernel, _COPY: _copy}
        self._nodes, in_graph = list[Node](), [isinstance(made, ctypes.c_void_p) for made, _ in noted]
        for at, (made, values) in enumerate(noted):
            if not in_graph[at]:
                if any(in_graph[:at]) and any(in_graph[at:]):
                    raise Unedited("a matmul of cuBLASLt is between two nodes")
                self._nodes.append(_matmul(made, values, _AFTER if any(in_graph[:at]) else _BEFORE))
            elif any(map(_changes, values)):
                self._nodes.append(kinds[_told("cuGraphNodeGetType", made)](made, values))
        flags = ctypes.c_ulonglong(_USE_NODE_PRIORITY)
        gpu.call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, flags)
        self.native = native_graph(self._executable.value, self._nodes)

    def launch(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Enqueue it on `stream`, after earlier launches, for tensors at these addresses.

        Raises:
            Unedited: The driver does not take one of these addresses; nothing is enqueued.
        """
        if self.native is not None:
            if (failed := self.native.launch(stream, addresses)) is not None:
                raise_failed(*failed)
            return
        shown, self._shown = self._shown, ()
        try:
            for node in self._nodes:
                self._show(node, addresses, shown)
        except CudaError as error:
            raise Unedited(str(error)) from error
        self._multiply(stream, _BEFORE)
        _launch(self._executable, stream)
        self._multiply(stream, _AFTER)
        self._shown = addresses

    def _multiply(self, stream: int, when: int) -> None:
        for node in self._nodes:
            if not node.node and node.context == when:
                made, _, words = node.kept
                made(stream, *words)

    def _show(self, node: Node, addresses: Sequence[int], shown: Sequence[int]) -> None:
        """Let later launches be of tensors at these addresses. shown: those of now; empty if unknown.

        Copies are set whatever was shown: there may be other memory now.
        """
        changed = not shown or node.context is not None
        for place, number, offset, described in node.edits:
            if not shown or node.context is not None or addresses[number] != shown[number]:
                changed = True
                if described:
                    _replace_address(ctypes.addressof(place), addresses[number] + offset)
                else:
                    place.value = addresses[number] + offset
        if changed and node.context is None:
            _set_kernel(self._executable, node.node, node.params)
        elif changed and node.node:
            _set_copy(self._executable, node.node, node.params, node.context)

    def __del__(self) -> None:
        library = gpu.library()
        if self._executable:
            library.cuGraphExecDestroy(self._executable)
        library.cuGraphDestroy(self._graph)


def native_graph(executable: int | None, nodes: Sequence[Node]) -> Any:
    """A graph as `site.c` has it; None where that is not compiled."""
    if isinstance(native(), str):
        return None
    edits = [edit for node in nodes for edit in node.edits]
    rows = [(ctypes.addressof(place), offset, number, described) for place, number, offset, described in edits]
    listed = [(node.node, node.params, node.context or 0, len(node.edits)) for node in nodes]
    packed = [b"".join(struct.pack("4Q", *row) for row in table) for table in (listed, rows)]
    return native().Graph(functions(), executable, *packed, max((edit.number + 1 for edit in edits), default=0))


def raise_failed(name: str, code: int, unedited: bool) -> None:
    """Raise the error of a driver's function in a launch; unedited: nothing was enqueued."""
    raise (Unedited if unedited else CudaError)(gpu.error_text(name, code))


def _changes(value: Any) -> bool:
    return isinstance(getattr(value, "address", value), Address)


def current_context() -> int:
    """This thread's CUcontext, or 0."""
    return _told("cuCtxGetCurrent")


def _told(name: str, *args: Any) -> int:
    """The number that a function of the driver writes where its last argument points to."""
    number = ctypes.c_uint64()
    gpu.call(name, *args, ctypes.byref(number))
    return number.value


def capture(device: torch.device, urgent: bool, enqueue: Callable[[int], None]) -> EditableGraph:
    """The graph of what `enqueue(stream)` enqueues. urgent: The stream is of high priority.

    Raises:
        CudaError: Something of it cannot be captured, or not be edited.
    """
    with gpu.captured(_stream(device, urgent), enqueue) as (graph, noted):
        return EditableGraph(graph, noted)


@functools.cache
def _stream(device: torch.device, urgent: bool) -> int:
    return gpu.new_stream(device, urgent)


class StandIn:
    """Stand-in of a capture for tensor `number` of a call, which is at `address`."""

    def __init__(self, number: int, address: int) -> None:
        self._address = Address(address, number)

    def data_ptr(self) -> Address:
        return self._address


def with_each(call: Any, stand_ins: Iterable[Any]) -> Any:
    """A call's memory, a named tuple of tensors, lists of such, and None, with others in the place of all tensors."""
    rest = iter(stand_ins)

    def other(one: Any) -> Any:
        if isinstance(one, list | tuple):
            return [other(each) for each in one]
        return None if one is None else next(rest)

    return type(call)(*map(other, call))


def new_graph() -> PlanGraph | None:
    """A graph for a plan; None where calls do their work at once."""
    return None if driver.IN_ORDER else PlanGraph()


class PlanGraph:
    """The graph of one plan, `graph`, once it is made."""

    def __init__(self) -> None:
        self._calls, self._refused = 0, False
        self.graph: EditableGraph | None = None

    def run(self, stream: int, plan: Any, call: Any, addresses: tuple[int, ...]) -> None:
        """Make a call on a stream, in its turn: launch the graph, or have the plan enqueue. addresses: The call's."""
        if self.graph is None:
            self._calls += 1
            if self._calls == 1 or self._refused or not self._make(stream, plan, call, addresses):
                plan.enqueue(stream, call)
                return
        assert self.graph is not None
        try:
            self.graph.launch(stream, addresses)
        except Unedited as error:
            self._refuse(error)
            plan.enqueue(stream, call)
        else:
            plan.memory.launched += 1

    def _make(self, stream: int, plan: Any, call: Any, addresses: Sequence[int]) -> bool:
        """Capture what the plan enqueues; False if it cannot be launched so: nothing of the call has run then."""
        memory = plan.memory
        like = with_each(call, (StandIn(number, address) for number, address in enumerate(addresses)))
        memory.in_graph = True
        try:
            self.graph = capture(memory.device, stream == memory.stream, lambda at: plan.enqueue(at, like))
        except Exception as error:
            if type(error) is not CudaError or self._calls > TRIES:
                self._refuse(error)
        finally:
            memory.in_graph = False
        return self.graph is not None

    def _refuse(self, error: Exception) -> None:
        """Have all calls enqueued from now on."""
        self.graph, self._refused = None, True
        log.warning("calls of one shape are enqueued each time, which takes the host longer: %s", error)
