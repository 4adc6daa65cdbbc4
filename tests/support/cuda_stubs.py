"""`asynctp_kernels.cuda` without a GPU: one rank, the memory of all ranks on CPU, and a recorder for the driver.

What the driver is asked for is written down; copies are also made and words set, so that a test can look at the bytes.
Kernels are prepared and launched in name only: a test may say what one does (`Machine.kernels`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from asynctp_kernels.cuda.gemm import few_rows, gemm
from asynctp_kernels.cuda.plans import async_input, collectives, direct, gather, gather_transports, scatter, sequential
from asynctp_kernels.cuda.runtime import driver, edited, memory, watch
from asynctp_kernels.cuda.runtime.driver import Address
from asynctp_kernels.cuda.runtime.launch import Launch, Tma
from asynctp_kernels.cuda.runtime.memory import MAX_OWN, MAX_WORLD, Area, GroupMemory
from asynctp_kernels.errors import TIMEOUT_VARIABLE
from asynctp_kernels.meeting import Process
from driver_of_c import DriverOfC
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SMS = 132
STREAMS = {0: "main", 101: "copy", 102: "reduce", 109: "graph"}
MAIN, COPY, REDUCE, GRAPH = STREAMS
EVENTS = ("start", "running", "end", "reduced", "last", "last_captured", "flown")
DIRECTIONS = ("full", "free", "landed", "failed")  # of words
FP8 = torch.float8_e4m3fn
#: Compiled as aligned, but not always: harmless as `test_compiled_kernels` shows, since masks forbid wide loads then.
UNALIGNED = {"reduce_kernel: own_ptr"}


class Store:
    """A group's store, on this host."""

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.found[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.found[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.found for key in keys)


class Group:
    """A process group, as far as the memory of a group looks at it."""

    group_name = "tp"

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world

    def get_group(self) -> Group:
        """As a mesh of this group has it."""
        return self


# --- what is recorded --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Copied:
    """`height` rows of `width` bytes."""

    stream: int
    dst: int
    src: int
    width: int
    height: int = 1
    dst_pitch: int = 0
    src_pitch: int = 0

    @property
    def size(self) -> int:
        return self.width * self.height


@dataclass(frozen=True)
class Waited:
    """`found`: what the word was when the wait was enqueued; on a GPU it may come later."""

    stream: int
    address: int
    value: int
    found: int
    exactly: bool = False


@dataclass(frozen=True)
class Wrote:
    stream: int
    address: int
    value: int


@dataclass(frozen=True)
class Recorded:
    stream: int
    event: int


@dataclass(frozen=True)
class Awaited:
    stream: int
    event: int
    at_launch: bool = False


@dataclass(frozen=True)
class Launched:
    stream: int
    prepared: Prepared
    values: tuple[Any, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(zip(self.prepared.names, self.values, strict=True))


@dataclass(frozen=True)
class Multiplied:
    """A matmul of cuBLASLt. values: The addresses of its tensors."""

    stream: int
    made: Any
    values: tuple[int, ...]


Entry = Copied | Waited | Wrote | Recorded | Awaited | Launched | Multiplied


@dataclass(frozen=True)
class Prepared:
    """What `launch.prepare` was asked for."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def names(self) -> list[str]:
        """Of the run-time arguments."""
        return [param.name for param in self.kernel.params if not param.is_constexpr]

    @property
    def constant_names(self) -> list[str]:
        return [param.name for param in self.kernel.params if param.is_constexpr]


class NoTorch(TorchDispatchMode):
    """A graph has nothing of PyTorch's: nobody could edit that. Views put nothing there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.is_view, f"{func} in a graph"
        return func(*args, **(kwargs or {}))


class Graph:
    """What replaces the driver's: what was asked for; addresses of a call's memory are those of each launch."""

    def __init__(self, machine: Machine, entries: Sequence[Entry]) -> None:
        if any(entry.height > 1 for entry in entries if isinstance(entry, Copied)):
            raise edited.Unedited("a copy of many ranges")
        self.machine, self.entries = machine, entries
        number, numbers = len(machine.graphs), [address.number for entry in entries for address in addresses_of(entry)]
        machine.executables[number] = self
        self.native: Any = None
        if not isinstance(edited.native(), str):
            tensors = max(numbers, default=-1) + 1
            self.shown = (ctypes.c_uint64 * tensors)()  # the addresses that the graph has
            at = ctypes.addressof(self.shown)
            edits = b"".join(struct.pack("4Q", at + 8 * each, 0, each, 0) for each in range(tensors))
            nodes = struct.pack("4Q", 0, 0, 0, tensors)
            self.native = edited.native().Graph(machine.of_c.table, number, nodes, edits, tensors)

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        for entry in self.entries:
            at = stream if entry.stream == GRAPH else entry.stream
            self.machine.do(replace(edited_entry(entry, addresses), stream=at))


def addresses_of(value: Any) -> Iterator[Address]:
    """All that a value has of a call's memory."""
    if isinstance(value, Address):
        yield value
    elif isinstance(value, Tma):
        yield from addresses_of(value.address)
    elif isinstance(value, tuple) or type(value) in (Copied, Launched, Multiplied):
        for each in value if isinstance(value, tuple) else vars(value).values():
            yield from addresses_of(each)


def edited_entry(entry: Entry, addresses: Sequence[int]) -> Entry:
    """What is asked for, for a call whose tensors are at these addresses."""
    return replace(entry, **{name: moved(value, addresses) for name, value in vars(entry).items()})


def moved(value: Any, addresses: Sequence[int]) -> Any:
    """A value that a launch is told, for a call whose tensors are at these addresses."""
    if isinstance(value, tuple):
        return tuple(moved(each, addresses) for each in value)
    if isinstance(value, Tma):
        return Tma(value, moved(value.address, addresses))
    return addresses[value.number] + value.offset if isinstance(value, Address) else value


# --- the machine -------------------------------------------------------------------------------------------------
class Machine:
    """One rank's GPU and driver.

    Attributes:
        log: what the driver was asked for, in order.
        prepared: the kernels of all plans, in order; what is removed here cannot be launched any more.
        capturing: the number of the capture that the current stream is part of; 0 for none.
        current_stream, current_device: those that a call is made on.
        registers: that the compiler would give every kernel.
        kernels: what the kernel of a name does to memory, given the launch.
        kept: (address, stream) of tensors whose memory must not be reused before that stream has come so far.
        hosts: on which each rank says that it is.
        makers: the threads on which symmetric memory was made.
        store: of the group: what ranks tell each other.
        gathered: what NCCL gathers: for each such tensor, that of each rank.
        scattered: what NCCL reduces: for this rank, the part of each rank.
        edits: plans have graphs. graphs: what was captured, each as its log. urgent: on which priority.
        dry: what is asked for is written down only.
    """

    def __init__(self, rank: int, world: int, peer_writes: bool = True) -> None:
        self.rank, self.world, self.peer_writes = rank, world, peer_writes
        self.group: Any = Group(rank, world)
        self.log: list[Entry] = []
        self.prepared: list[Prepared] = []
        self.capturing = 0
        self.current_stream = MAIN
        self.current_device: int | None = None  # the index of the CPU
        self.registers = 40
        self.kernels: dict[str, Callable[[Launched], None]] = {}
        self.kept: list[tuple[int, int]] = []
        self.hosts = ["here"] * world
        self.makers: list[threading.Thread] = []
        self.store = Store()
        self.gathered: list[Sequence[Tensor]] = []
        self.scattered: Sequence[Tensor] = ()
        self.edits, self.dry = False, False
        self.graphs: list[list[Entry]] = []
        self.urgent: list[bool] = []
        #: graphs by what the driver calls them, and the driver as C code has it
        self.executables: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()
        self.functions: dict[str, Callable[..., Any]] = {
            "cuGraphLaunch": self.launch,
            "cuEventRecord": self.record_event,
            "cuStreamWaitEvent": self.wait_event,
            "cuStreamIsCapturing": self.is_capturing,
            "cuCtxGetCurrent": self.get_context,
        }
        self.of_c = DriverOfC(self.functions.__getitem__)
        self._events = 0
        self._recorded: dict[int, int] = {}  # events, and the capture that they were recorded in; -1: of a plan's graph
        self._streams = iter([COPY, REDUCE])

    # what replaces the driver
    def copy(self, dst: int, src: int, size: int, stream: int) -> None:
        self.do(Copied(stream, dst, src, size))

    def copy_2d(self, request: Any, stream: int) -> None:
        at = request._obj
        assert (at.src_type, at.dst_type) == (driver._MEMORY_TYPE_DEVICE,) * 2
        assert at.width <= min(at.src_pitch, at.dst_pitch)
        self.do(Copied(stream, at.dst_device, at.src_device, at.width, at.height, at.dst_pitch, at.src_pitch))

    def batch(self, stream: int, count: int, address: int, flags: int) -> None:
        assert flags == 0
        for op in (driver._MemOp * count).from_address(address):
            if op.operation == driver._WRITE_VALUE_32:
                self.do(Wrote(stream, op.address, op.value))
            else:
                assert op.operation == driver._WAIT_VALUE_32
                assert op.flags in (driver._WAIT_GEQ, driver._WAIT_EQ)
                self.do(Waited(stream, op.address, op.value, 0, op.flags == driver._WAIT_EQ))

    def record_event(self, event: int, stream: int) -> None:
        self.do(Recorded(stream, event))

    def wait_event(self, stream: int, event: int, flags: int) -> None:
        self.do(Awaited(stream, event, flags == driver._EVENT_WAIT_EXTERNAL))

    def is_capturing(self, stream: int, status: int) -> None:
        ctypes.c_int.from_address(status).value = self.capturing != 0

    def context(self) -> int:
        return 1 if self.current_device is None else 2 + self.current_device

    def get_context(self, place: int) -> None:
        ctypes.c_void_p.from_address(place).value = self.context()

    def launch(self, executable: int, stream: int) -> None:
        graph = self.executables[executable]
        graph.launch(stream, list(graph.shown))

    def new_event(self) -> int:
        self._events += 1
        return 1000 + self._events

    def capture(self, device: torch.device, urgent: bool, enqueue: Callable[[int], None]) -> Graph:
        """What replaces `edited.capture`."""
        self.urgent.append(urgent)
        log, self.log, self.dry = self.log, [], True
        try:
            with NoTorch():
                enqueue(GRAPH)
            self.graphs.append(self.log)
        finally:
            self.log, self.dry = log, False
        return Graph(self, self.graphs[-1])

    def do(self, entry: Entry) -> None:
        """Write down what is asked for, and do it, unless it is being captured."""
        if isinstance(entry, Waited):
            entry = replace(entry, found=ctypes.c_int32.from_address(entry.address).value)
        self.log.append(entry)
        self._check_captures(entry)
        if self.dry:
            return
        if isinstance(entry, Copied):
            for row in range(entry.height):
                ctypes.memmove(entry.dst + row * entry.dst_pitch, entry.src + row * entry.src_pitch, entry.width)
        elif isinstance(entry, Wrote):
            ctypes.c_int32.from_address(entry.address).value = entry.value
        elif isinstance(entry, Launched):
            self.kernels.get(entry.prepared.name, lambda _: None)(entry)
        elif isinstance(entry, Multiplied):
            entry.made(entry.stream, *entry.values)

    def _check_captures(self, entry: Entry) -> None:
        """An event that a capture has recorded stands for nothing outside of it, nor one from outside in a capture."""
        capture = -1 if self.dry else self.capturing
        if isinstance(entry, Recorded):
            self._recorded[entry.event] = capture
        elif isinstance(entry, Awaited) and not entry.at_launch:
            assert self._recorded.get(entry.event, capture) == capture, f"an event of another capture: {entry}"

    def note_beside(self, made: Any, values: tuple[int, ...]) -> bool:
        """Stand in for `driver.note_beside`."""
        if self.dry:
            self.do(Multiplied(GRAPH, made, values))
        return self.dry

    # what replaces streams, symmetric memory, and the compiler
    def new_stream(self, device: torch.device) -> int:
        return next(self._streams)

    def share(self, group: Any, device: torch.device, size: int, seconds: float | None) -> Area:
        """Symmetric memory: the same size on every rank. The handle is all ranks' memory.

        Pages that nobody touches cost nothing: most tests use little of it.
        """
        self.makers.append(threading.current_thread())
        parts = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(self.world)]
        peers = [part.data_ptr() for part in parts]
        return Area(parts[self.rank], parts, peers, torch.tensor(peers))

    def prepare(
        self,
        kernel: Any,
        programs: int,
        args: Sequence[Any],
        constants: dict[str, Any],
        num_warps: int,
        **options: Any,
    ) -> Launch:
        prepared = Prepared(kernel, programs, tuple(args), dict(constants), num_warps, options)
        assert len(args) == len(prepared.names)
        assert list(constants) == prepared.constant_names
        assert [param.name for param in kernel.params] == prepared.names + prepared.constant_names
        number = len(self.prepared)
        self.prepared.append(prepared)
        del prepared  # a plan must not hold it, through `run`

        def run(stream: int, values: Sequence[Any]) -> None:
            prepared = self.prepared[number]
            launched = Launched(stream, prepared, tuple(values))
            check_promises(launched)
            check_fixed(launched)
            self.do(launched)

        return Launch(run, 32 * num_warps, self.registers, 0)

    # what replaces cuBLAS and NCCL
    def matmul(self, *operands: Any, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        return matmul(*operands, out=out, factor=factor)

    def gather_into(self, whole: Tensor, shard: Tensor, group: Any) -> None:
        assert group is self.group
        raw = [[part.reshape(-1).view(torch.uint8) for part in parts] for parts in self.gathered]
        mine = shard.reshape(-1).view(torch.uint8)
        (found,) = [parts for parts in raw if torch.equal(parts[self.rank], mine)]
        whole.view(-1).view(torch.uint8).copy_(torch.cat(found))

    def scatter_into(self, part: Tensor, whole: Tensor, reduce_op: str, group: Any) -> None:
        assert group is self.group
        mine = self.scattered[self.rank]
        assert torch.equal(whole.view(self.world, -1)[self.rank], mine.reshape(-1))
        total = sum((one.float() for one in self.scattered), torch.zeros(()))
        part.copy_((total * (1 / self.world if reduce_op == "avg" else 1)).to(part.dtype))

    @contextlib.contextmanager
    def meet(self, *_: Any, **__: Any) -> Iterator[SimpleNamespace]:
        """A meeting of all ranks, which have the facts of this one but for their hosts."""

        def exchange(topic: str, text: str) -> list[str]:
            return [json.dumps({**json.loads(text), "host": host}) for host in self.hosts]

        processes = (Process.own(),) * self.world  # all ranks are this one
        yield SimpleNamespace(exchange=exchange, together=lambda what, do: do(), processes=processes)

    # what a test asks
    @property
    def memory(self) -> GroupMemory:
        """The memory of the group, made at the first call by the package's own code."""
        return memory.group_memory(self.group, torch.device("cpu"))

    def of(self, kind: type) -> list[Any]:
        """The log's entries of one kind."""
        return [entry for entry in self.log if isinstance(entry, kind)]

    def launched(self, name: str) -> Launched:
        """The last launch of a kernel."""
        return [entry for entry in self.of(Launched) if entry.prepared.name == name][-1]

    def parts(self, name: str) -> list[Tensor]:
        """All ranks' memory of an area."""
        handle: Any = self.memory.areas[name].handle
        return list(handle)

    def trace(self, **places: int) -> str:
        """The log in words. `places` are addresses of memory by name, as "gathered"."""
        names = Names(self.memory, places)
        return "\n".join(f"{STREAMS[entry.stream]:6} {names.entry(entry)}" for entry in self.log)


def is_descriptor(value: object) -> bool:
    """Triton's or Gluon's."""
    return hasattr(value, "block_shape")


def check_fixed(launched: Launched) -> None:
    """A launch of a plan's differs from the example in addresses only."""
    constants = launched.prepared.constants
    if constants.get("GATHER") and not constants["OWN"]:
        return  # `async_input_matmul` has no plan
    for name, example, value in zip(launched.prepared.names, launched.prepared.args, launched.values, strict=True):
        varies = isinstance(example, Tensor) or is_descriptor(example)
        if not varies and (launched.prepared.name, name) != (
            "keep_kernel",
            "source",
        ):  # which is another in each launch
            assert value == example, f"{launched.prepared.name}: {name} changes"


def check_promises(launched: Launched) -> None:
    """What the kernel was compiled for holds of a launch: kinds, and what Triton makes constants or alignments of."""
    params = [param for param in launched.prepared.kernel.params if not param.is_constexpr]
    assert len(launched.values) == len(params)
    for param, example, value in zip(params, launched.prepared.args, launched.values, strict=True):
        said = f"{launched.prepared.name}: {param.name}"
        if isinstance(example, Tensor):
            assert isinstance(value, int), said
            fixed = param.do_not_specialize or param.do_not_specialize_on_alignment
            promised = not fixed and example.data_ptr() % 16 == 0 and said not in UNALIGNED
            assert not promised or value % 16 == 0, f"{said} is compiled for aligned memory"
        elif is_descriptor(example):
            assert isinstance(value, Tma), said
            layout = (example.shape, example.strides, example.block_shape)
            assert (value.shape, value.strides, value.block_shape) == layout, said
            assert value.address % 16 == 0, said
        elif param.do_not_specialize and isinstance(example, int):
            assert isinstance(value, int), said
            assert -(2**31) <= min(value, example) <= max(value, example) < 2**31, said
        else:
            assert value == example, f"{said} is compiled in"


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    scaling: Any,
    out: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """`cublas.matmul` without cuBLAS."""
    found = a.float() @ b.float()
    if a_scale is not None and b_scale is not None:
        found = found * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
    found = found if bias is None else found + bias.float()
    found = found.to(a.dtype if scaling is None else scaling.out_dtype) * factor
    return found if out is None else out.copy_(found)


@contextlib.contextmanager
def machine(
    rank: int = 1,
    world: int = 4,
    peer_writes: bool = True,
    timeout_s: float = 0,
    made: Callable[[int, int, bool], Any] = Machine,
) -> Iterator[Any]:
    """`asynctp_kernels.cuda` as rank `rank` of `world` sees it, on a machine of its own. timeout_s: 0 for no bound."""
    here, make = made(rank, world, peer_writes), edited.PlanGraph._make
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=SMS, name="NVIDIA H200")
    replaced: dict[Any, dict[str, Any]] = {
        driver: {
            "capture_id": lambda stream: int(here.capturing),
            "copy": here.copy,
            "note_beside": here.note_beside,
            "_copy_2d": here.copy_2d,
            "_batch": here.batch,
            "record_event": here.record_event,
            "wait_event_with_flags": here.wait_event,
            "new_event": here.new_event,
            "new_stream": here.new_stream,
            "peer_writes_supported": lambda: here.peer_writes,
            "current_stream": lambda index: here.current_stream,
            "current_device": lambda: here.current_device,
            "capturing": lambda: here.capturing != 0,
            "machine": lambda index: ((9, 0), SMS, properties.name),
        },
        edited: {
            "capture": here.capture,
            "current_context": here.context,
            "functions": lambda: here.of_c.table,
        },
        edited.PlanGraph: {"_make": lambda *given: here.edits and make(*given)},
        memory: {
            "_share": here.share,
            "_orders": {},
            "_turns": {},
            "_groups": weakref.WeakKeyDictionary(),  # a machine's memory refers to its group, and would stay
            "start_watch": lambda found: None,
            "meet": here.meet,
        },
        Tensor: {"record_stream": lambda tensor, stream: here.kept.append((tensor.data_ptr(), stream.cuda_stream))},
        few_rows: {"prepare": here.prepare},
        gemm: {"prepare": here.prepare},
        watch: {"group_store": lambda group: here.store},
        collectives: {"gather_into": here.gather_into},
        async_input: {"matmul": matmul},
        gather: {"matmul": here.matmul},
        scatter: {"prepare": here.prepare, "matmul": here.matmul},
        gather_transports: {"prepare": here.prepare},
        direct: {"prepare": here.prepare},
        sequential: {"gather_into": here.gather_into, "scatter_into": here.scatter_into},
        torch.cuda: {
            "current_stream": lambda device: SimpleNamespace(cuda_stream=here.current_stream),  # never any device's
            "set_device": lambda device: None,
            "get_device_properties": lambda index: properties,
            "synchronize": lambda *_: None,
        },
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_torch_thread())
        stack.enter_context(mock.patch.dict(os.environ))
        for name in [name for name in os.environ if name.startswith("ASYNCTP_")]:
            del os.environ[name]
        if timeout_s:
            os.environ[TIMEOUT_VARIABLE] = str(timeout_s)
        for module, attributes in replaced.items():
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(module, name, value, create=module is Tensor))
        yield here
        here.of_c.check()


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute in one thread: the work is small, and several threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- names for addresses -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Names:
    """Says what an address is: a word, an area of some rank, or one of `places`, the nearest below."""

    memory: GroupMemory
    places: dict[str, int]

    def entry(self, entry: Entry) -> str:
        if isinstance(entry, Copied):
            shape = f"{entry.width} B" if entry.height == 1 else f"{entry.height} x {entry.width} B"
            pitches = "" if entry.height == 1 else f", pitches {entry.dst_pitch} and {entry.src_pitch}"
            return f"copy {shape} to {self.place(entry.dst)} from {self.place(entry.src)}{pitches}"
        if isinstance(entry, Waited):
            return f"wait {self.place(entry.address)} {'==' if entry.exactly else '>='} {self.value(entry.value)}"
        if isinstance(entry, Wrote):
            return f"write {self.place(entry.address)} = {self.value(entry.value)}"
        if isinstance(entry, Recorded):
            return f"record {self.event(entry.event)}"
        if isinstance(entry, Awaited):
            return f"await {self.event(entry.event)}" + (" at launch" if entry.at_launch else "")
        return f"launch {entry.prepared.name}"

    def value(self, value: int) -> str:
        """Of a word: a signature is "call"."""
        return "call" if value in self.memory.calls._told else str(value)

    def event(self, event: int) -> str:
        named = {getattr(self.memory, name): name for name in EVENTS}
        if event in named or event not in self.memory._events:
            return named.get(event, "flight")
        return f"event[{self.memory._events.index(event)}]"

    def place(self, address: int) -> str:
        return self._word(address) or self._area(address) or self._near(address)

    def _word(self, address: int) -> str:
        """A word of rank r as "full of 2 [1]": at rank 2, about rank 1; of our own memory without "of"."""
        mine = self.memory
        local = (address - mine.local.data_ptr()) // 4
        if 0 <= local < MAX_WORLD * MAX_OWN:
            return f"progress[{local // MAX_OWN}, {local % MAX_OWN}]"
        if 0 <= (source := (address - mine.arrivals) // 4) < MAX_WORLD:
            return f"arrivals[{source}]"
        if address == mine.awaited.data_ptr():
            return "awaited"
        constants = {word.data_ptr(): value for value, word in mine._constants.items()} | {mine.one: 1}
        if address in constants:
            return f"the constant {self.value(constants[address])}"
        for rank, start in enumerate(mine.signals.peers):
            word = (address - start) // 4
            if 0 <= word < len(DIRECTIONS) * MAX_WORLD:
                return f"{DIRECTIONS[word // MAX_WORLD]} of {rank} [{word % MAX_WORLD}]"
        return ""

    def _area(self, address: int) -> str:
        for name, area in self.memory.areas.items():
            for rank, start in enumerate(area.peers):
                if start <= address < start + area.size:
                    return f"{name} of {rank} + {address - start}"
        return ""

    def _near(self, address: int) -> str:
        below = {name: start for name, start in self.places.items() if start <= address}
        name = max(below, key=lambda name: below[name])
        return f"{name} + {address - below[name]}"


# --- calls -------------------------------------------------------------------------------------------------------
def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small random values, exact in every dtype."""
    return torch.randint(-4, 5, shape).to(dtype)


def gather_call(
    shard: Sequence[int] = (256,),
    k: int = 512,
    ns: Sequence[int] = (512,),
    *,
    dim: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    b_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    scales: str = "",
    travels: bool = False,
    fast: bool = True,
    bias: bool = False,
    k_major: bool = True,
    full: bool = False,
    along: bool = False,
    kept: bool = False,
    rows: Sequence[int] = (),
    world: int = 4,
) -> GatherFacts:
    """A gather of `shard` (without K) along `dim`. scales: "", "tensor", "row", or "row-one": one for each row of
    A, and one number for B. `travels`: A's are gathered too.

    `along`: numbers travel that are only returned. `kept`: every rank returns the gathered A. `rows`: as `b_rows`.
    """
    out_dtype = out_dtype or (dtype if dtype.itemsize == 2 else torch.bfloat16)
    lead, depth = list(shard), k
    if dim in (-1, len(shard)):
        depth *= world
    elif not travels:
        lead[dim] *= world
    a_scale = {"": None, "tensor": torch.ones(())}.get(scales, torch.rand(*lead, 1) + 0.5)
    b_scales = [torch.rand(1, n) + 0.5 if scales == "row" else torch.ones(()) for n in ns] if scales else []
    bs = [_weight(depth, n, b_dtype or dtype, k_major) for n in ns]
    biases = [tensor(n, dtype=out_dtype) if bias else None for n in ns]
    a_shard = tensor(*shard, k, dtype=dtype)
    numbers = torch.rand(*shard, 1) + 0.5 if along else None
    full |= kept
    scaling = (a_scale, b_scales, travels, out_dtype, fast)
    return GatherFacts(a_shard, bs, biases, dim, full, world, *scaling, numbers, kept, b_rows=tuple(rows))


def scatter_call(
    rows: Sequence[int] = (1024,),
    ks: Sequence[int] = (512,),
    n: int = 512,
    *,
    dim: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    b_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    scales: str = "",
    fast: bool = True,
    bias: bool = False,
    k_major: bool = True,
    reduce_op: str = "sum",
    world: int = 4,
    sum_dtype: torch.dtype | None = None,
    added: bool = False,
    factors: tuple[float, ...] = (),
    real_rows: int | None = None,
) -> ReduceFacts:
    """A scatter along `dim` of the sum of products [rows, k] @ [k, n]; the options are those of `gather_call`.

    `added`: the sum has another term.
    """
    out_dtype = out_dtype or (dtype if dtype.itemsize == 2 else torch.bfloat16)
    a_scales = [torch.ones(()) if scales == "tensor" else torch.rand(*rows, 1) + 0.5 for _ in ks] if scales else []
    b_scales = [torch.rand(1, n) + 0.5 if scales == "row" else torch.ones(()) for _ in ks] if scales else []
    return ReduceFacts(
        [tensor(*rows, k, dtype=dtype) for k in ks],
        [_weight(k, n, b_dtype or dtype, k_major) for k in ks],
        [tensor(n, dtype=out_dtype) if bias else None for _ in ks],
        reduce_op,
        dim,
        world,
        a_scales,
        b_scales,
        out_dtype,
        fast,
        sum_dtype=sum_dtype,
        added=tensor(*rows, n, dtype=sum_dtype or out_dtype) if added else None,
        factors=factors,
        real_rows=real_rows,
    )


def _weight(k: int, n: int, dtype: torch.dtype, k_major: bool) -> Tensor:
    return tensor(n, k, dtype=dtype).t() if k_major else tensor(k, n, dtype=dtype)


# --- what they must give -----------------------------------------------------------------------------------------
def expected_products(call: GatherFacts, full: Tensor, a_scale: Tensor | None) -> list[Tensor]:
    """The products of the gathered A; `a_scale` is that of all its rows."""
    flat = full.reshape(-1, full.shape[-1])
    row_scale = a_scale if a_scale is None or a_scale.numel() == 1 else a_scale.reshape(-1, 1)
    taken = [flat] * len(call.bs)
    if call.b_rows:
        numbers = [call.b_rows[at : at + 3] for at in range(0, len(call.b_rows), 3)]
        taken = [flat.unflatten(0, (-1, every))[:, first:end].flatten(0, 1) for first, end, every in numbers]
    return [
        matmul(taken[i], b, bias, row_scale, call.b_scales[i] if call.b_scales else None, call.scaling)
        for i, (b, bias) in enumerate(zip(call.bs, call.biases, strict=True))
    ]


def whole(call: ReduceFacts, implementation: str) -> Tensor:
    """What this rank sends: the sum of its products, rounded as the implementation does: once, or after each product.

    A product that travels in another dtype is rounded to its own first, by all of them.
    """
    exact = implementation == "fused" and call.wire_dtype == call.matmul_dtype
    total: Tensor | None = None
    count = len(call.a_parts)
    factors, rest = call.factors[:count] or (1.0,) * count, call.factors[count:]
    for i, (a, b) in enumerate(zip(call.a_parts, call.b_parts, strict=True)):
        scales = (call.a_scales[i], call.b_scales[i]) if call.a_scales else (None, None)
        flat = a.reshape(-1, a.shape[-1])
        flat, b = (flat.float(), b.float()) if exact else (flat, b)
        scaling = (replace(call, out_dtype=torch.float32) if exact else call).scaling
        one = matmul(flat, b, call.biases[i], *scales, scaling).to(torch.float32 if exact else call.wire_dtype)
        total = one * factors[i] if total is None else total + one * factors[i]
    assert total is not None
    total = (total if call.added is None else total + call.added.reshape(total.shape)) * (rest[0] if rest else 1)
    total = total.to(call.wire_dtype).view(*call.a_parts[0].shape[:-1], -1)
    if call.real_rows is not None:
        total.narrow(call.dim, call.real_rows, total.shape[call.dim] - call.real_rows).zero_()
    return total


def result_dtype(call: ReduceFacts) -> torch.dtype:
    """Of the sum over ranks."""
    return call.wire_dtype
