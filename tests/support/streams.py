"""Streams of all ranks, on which the package's own plans run in any order that a GPU may choose, without a GPU.

Each rank has a `cuda_stubs` machine, on which the package decides everything: plans, scripts, events, graphs. What
it asks of the driver goes to simulated streams (`Rank`), as a graph of nodes: a node starts when those before it in its
stream, and those behind the events that it waits for, are done. An event is what was last recorded of it when the host
waits for it. A CUDA graph, of one call or of the program's, is nodes made anew at each launch, between what the
launching stream has done and what it does next, and behind the last launch of the same executable.

Then all ranks' nodes run (`run`), one step of one thread at a time. Threads are streams, and programs of kernels
(`cuda_emulated.PROGRAMS`); whose turn it is, is drawn. For a stretch of steps, short or long, some threads come before
others, and whole streams and ranks with them, which so are far ahead or behind. Accesses take two steps: see `look` and
`put`. Each SM has room for one program of the GEMM and a small one, or for two small ones. Where kernels have many
registers, it has room for one program only. Memory is handed out by stream, as by PyTorch's allocator. Freed memory is
poisoned, and the next program that asks on that stream gets it, whoever may still read it elsewhere.

What is wrong is raised as `Found`: a wrong result, an access that meets another, a thread that waits for ever, words
that are left over, a stream that waits for an event of another graph, or a graph that is not joined.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import cuda_stubs
import numpy as np
import torch
from asynctp_kernels.cuda import moves
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.tiles import Tiles
from asynctp_kernels.cuda.plans import collectives, gather, gather_transports, scatter
from asynctp_kernels.cuda.runtime import edited, memory
from asynctp_kernels.cuda.runtime.launch import BESIDE_REGISTERS
from asynctp_kernels.cuda.runtime.memory import Area, GroupMemory
from cuda_emulated import POISON, PROGRAMS, Call, Question, Raced, Steps, at, int32, look, put, raw, reached
from cuda_stubs import (
    GRAPH,
    Awaited,
    Copied,
    Entry,
    Group,
    Launched,
    Machine,
    Recorded,
    Waited,
    Wrote,
    edited_entry,
    matmul,
    one_torch_thread,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

SMS = 4  # so that a program has several tiles
SMALL = 2  # programs that an SM has room for, if it has none of the GEMM; in fact there are four
TILES = Tiles(8, 16, 16, warps=8, stages=3, group_m=2)
PINGPONG = replace(TILES, warps=12, registers=128, split=2, pingpong=True)
ALIGNMENT = 512  # of memory
GRANULE = 8 << 10  # of symmetric memory: so that it grows
Program = Callable[[], Steps]


class Found(Exception):
    """Something is wrong."""


# --- what is enqueued --------------------------------------------------------------------------------------------
@dataclass(eq=False, repr=False)
class Node:
    """What a stream does in one piece.

    event: of a captured node, what each launch looks up anew. entry: what a captured node was asked for.
    """

    name: str
    rank: int
    stream: int
    after: list[Node]
    programs: Sequence[Program] = ()
    epoch: int = 0  # how often the rank has met all others on the host before
    event: int | None = None
    entry: Entry | None = None
    missing: int = 0  # nodes that are not done, of those that it comes after
    running: int = 0
    followers: list[Node] = field(default_factory=list)


class Work:
    """What is enqueued on some streams; `tails`: what the next node of each comes after."""

    def __init__(self, *streams: int) -> None:
        self.nodes: list[Node] = []
        self.tails: dict[int, list[Node]] = {stream: [] for stream in streams}

    def add(self, node: Node) -> None:
        node.after = self.tails.get(node.stream, [])
        self.tails[node.stream] = [node]
        self.nodes.append(node)

    def joined(self, stream: int) -> bool:
        """Whether `stream` has come behind all."""
        behind, rest = set(), list(self.tails[stream])
        while rest:
            if (node := rest.pop()) not in behind:
                behind.add(node)
                rest += node.after
        return behind >= set(self.nodes)


class Memory:
    """PyTorch's allocator: what is freed goes to the next that asks for as much on the same stream."""

    def __init__(self, size: int = 1 << 21) -> None:
        self._bytes = np.zeros(size + ALIGNMENT, np.uint8)
        self._top = -self._bytes.ctypes.data % ALIGNMENT
        self._free: dict[tuple[int, ...], list[int]] = {}
        self.kept: set[int] = set()  # what other streams use too
        self.addresses = range(self._bytes.ctypes.data, self._bytes.ctypes.data + len(self._bytes))

    def take(self, *pool: int, size: int) -> np.ndarray[Any, Any]:
        size = -(-size // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault((*pool, size), [])
        start = free.pop(0) if free else self._top
        self._top = max(self._top, start + size)
        assert self._top <= len(self._bytes)
        taken = self._bytes[start : start + size]
        weakref.finalize(taken, self._give_back, free, start)
        return taken

    def _give_back(self, free: list[int], start: int) -> None:
        if self._bytes.ctypes.data + start not in self.kept:
            bisect.insort(free, start)


class Shared:
    """What all ranks have together: symmetric memory, by group and number, and what NCCL moves, likewise."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int], list[Tensor]] = {}
        self.moved: dict[tuple[str, int], dict[int, Tensor]] = {}


@dataclass(frozen=True)
class Place:
    """A tensor's place, which does not keep the tensor."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Place:
        return Place(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.stride())

    def tensor(self) -> Tensor:
        return at(self.address, self.shape, self.dtype, self.strides)


class Enqueued(TorchDispatchMode):
    """Torch ops of the package on the machine's memory are enqueued, too."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        into = kwargs.get("out", args[0] if args else None)
        held = isinstance(into, Tensor) and into.data_ptr() in self.rank.arena.addresses
        if func.is_view or not held or func is torch.ops.aten.new_empty.default:
            return func(*args, **kwargs)
        aten = torch.ops.aten
        if func is aten._to_copy.default:
            made = self.rank.empty(into.shape, kwargs["dtype"])
            pair = Place.of(made), Place.of(into)

            def convert() -> Steps:
                found = yield from look(pair[1].tensor())
                yield from put(pair[0].tensor(), found.to(pair[0].dtype))

            self.rank.enqueue(self.rank.current_stream, "convert", convert)
            return made
        assert func in (aten.copy_.default, aten.add_.Tensor, aten.cat.out), func
        out_place, places = Place.of(into), tree_map_only(Tensor, Place.of, args)

        def steps() -> Steps:
            out, given = out_place.tensor(), tree_map_only(Place, Place.tensor, places)
            if func is aten.cat.out:
                found = []
                for each in given[0]:
                    found.append((yield from look(each)))
                yield from put(out, torch.cat(found, *given[1:]))
            else:
                own = yield from look(out)
                yield from put(out, func(own, *given[1:]))

        self.rank.enqueue(self.rank.current_stream, str(func), steps)
        return into


class Graph:
    """An executable graph: what replaces the driver's."""

    def __init__(self, rank: Rank, work: Work) -> None:
        self.rank, self.work, self.last = rank, work, list[Node]()
        self.told: dict[Sequence[int], None] = {}  # in order

    def launch(self, stream: int, addresses: Sequence[int] = ()) -> None:
        self.told[addresses] = None
        self.rank.launch(self, stream, addresses)


# --- one rank ----------------------------------------------------------------------------------------------------
class Rank(Machine):
    """One rank's GPU and driver, which only write down what is enqueued.

    Attributes:
        arena: its memory. work: what is enqueued. capture: what is being captured, if anything is.
        groups: that it is in. memories: of those that have made calls.
        problems: what the driver would refuse. waits: of results in flight.
        room: for how many programs more, of the GEMM (True) and of small kernels.
    """

    def __init__(self, rank: int, world: int, peer_writes: bool, shared: Shared) -> None:
        super().__init__(rank, world, peer_writes)
        self.shared, self.arena, self.work = shared, Memory(), Work()
        self.capture: Work | None = None
        self.groups: list[Any] = []
        self.memories: list[GroupMemory] = []
        self.problems: list[str] = []
        self.waits: list[Callable[[], None]] = []
        self.areas: list[Area] = []
        self.epoch, self.sms = 0, [Processor() for _ in range(SMS)]
        self._last_recorded: dict[int, tuple[Work, list[Node]]] = {}
        self._numbers, self._shares, self._moves = itertools.count(201), Counter[str](), Counter[str]()
        for number in range(2):  # two groups of all ranks, which stand the other way round in the second
            group: Any = Group(world - 1 - rank if number else rank, world)
            group.group_name = f"group {number}"
            self.groups.append(group)

    # --- streams
    def enqueue(self, stream: int, name: str, *programs: Program) -> None:
        """Append a node to a stream."""
        self._work_of(stream).add(Node(name, self.rank, stream, [], programs, self.epoch))

    def _work_of(self, stream: int) -> Work:
        return self.capture if self.capture is not None and stream in self.capture.tails else self.work

    def do(self, entry: Entry) -> None:
        self.log.append(entry)
        if isinstance(entry, Recorded):
            work = self._work_of(entry.stream)
            self._last_recorded[entry.event] = work, list(work.tails.get(entry.stream, []))
        elif isinstance(entry, Awaited):
            self._wait(entry)
        elif isinstance(entry, Launched):
            self._ask(entry, entry.prepared.name)
        elif isinstance(entry, Copied):
            self._ask(entry, "copy")
        elif isinstance(entry, Waited):
            self.enqueue(entry.stream, "wait", functools.partial(waited, entry))
        else:
            assert isinstance(entry, Wrote)
            self.enqueue(entry.stream, "write", functools.partial(wrote, entry))

    def _ask(self, entry: Launched | Copied, name: str) -> None:
        node = Node(name, self.rank, entry.stream, [], self._programs(entry), self.epoch, entry=entry)
        self._work_of(entry.stream).add(node)

    def _programs(self, entry: Any) -> Sequence[Program]:
        if isinstance(entry, Copied):
            return [functools.partial(copied, entry)]
        name, call = entry.prepared.name, Call(entry)
        programs = [functools.partial(PROGRAMS[name], call, number) for number in range(entry.prepared.programs)]
        if name.startswith("push_"):  # of a direct kernel there always is room for all
            return programs
        # what leaves nothing beside itself takes the place of a GEMM, whatever it is
        large = name == "gemm_kernel" or self.registers > BESIDE_REGISTERS
        return [functools.partial(on_an_sm, self.sms, large, each) for each in programs]

    def _wait(self, entry: Awaited) -> None:
        here = self._work_of(entry.stream)
        if entry.at_launch and here is self.capture:
            here.add(Node("event", self.rank, entry.stream, [], event=entry.event))
        elif entry.event in self._last_recorded:
            work, nodes = self._last_recorded[entry.event]
            if work is self.capture is not here:  # the stream takes part from now on
                work.tails[entry.stream] = list(nodes)
            elif work is here:
                here.tails.setdefault(entry.stream, [])
                here.tails[entry.stream] = [*here.tails[entry.stream], *nodes]
            else:
                self.problems.append("a stream waits for an event of another graph")

    # --- graphs
    def capture_plan(self, device: torch.device, urgent: bool, enqueue: Callable[[int], None]) -> Graph:
        """What replaces `edited.capture`."""
        with self.captured(GRAPH) as work:
            enqueue(GRAPH)
        self.graphs.append(Graph(self, work))  # type: ignore[arg-type]
        return self.graphs[-1]  # type: ignore[return-value]

    @contextlib.contextmanager
    def captured(self, stream: int) -> Iterator[Work]:
        """Capture what is enqueued on `stream`, and on those that join it."""
        self.capture = work = Work(stream)
        try:
            yield work
        finally:
            self.capture = None
        if not work.joined(stream):
            self.problems.append("a graph is not joined")

    def launch(self, graph: Graph, stream: int, addresses: Sequence[int]) -> None:
        """Enqueue all of a graph, made anew."""
        start = [*self.work.tails.get(stream, []), *graph.last]
        made: dict[Node, Node] = {}
        for node in graph.work.nodes:
            after = [made[other] for other in node.after] or start
            if node.event is not None:
                after = [*after, *self._last_recorded.get(node.event, (None, []))[1]]
            programs = node.programs
            if node.entry is not None:
                programs = self._programs(edited_entry(node.entry, addresses))
            made[node] = Node(f"{node.name} of a graph", self.rank, node.stream, after, programs, self.epoch)
        end = Node("end of a graph", self.rank, stream, [*made.values()] or start, epoch=self.epoch)
        self.work.nodes += [*made.values(), end]
        self.work.tails[stream] = graph.last = [end]

    # --- memory
    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """Memory for the current stream, poisoned."""
        strides = strides or torch.empty(shape, device="meta").stride()
        size = dtype.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
        taken = self.arena.take(self.current_stream, self.capturing, size=size)
        tensor = torch.from_numpy(taken)[:size]
        place = Place.of(tensor)

        def steps() -> Steps:
            place.tensor().fill_(POISON)
            yield None

        self.enqueue(self.current_stream, "poison", steps)
        return tensor.view(dtype).as_strided(shape, strides)

    def new_tensors(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
        return lambda: self.empty(shape, dtype)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.arena.kept.add(tensor.data_ptr())

    def share(self, group: Any, device: torch.device, size: int, seconds: float | None) -> Area:
        """Symmetric memory. The host waits for all streams, and for all ranks."""
        self.epoch += 1
        self._shares[group.group_name] += 1
        key = group.group_name, self._shares[group.group_name]
        parts = self.shared.parts.setdefault(key, [torch.zeros(size, dtype=torch.uint8) for _ in range(self.world)])
        peers = [part.data_ptr() for part in parts]
        area = Area(parts[group.rank()], parts, peers, torch.tensor(peers))
        self.areas.append(area)  # what is enqueued is done later here, also where memory grows
        return area

    def new_stream(self, device: torch.device) -> int:
        return next(self._numbers)

    # --- cuBLAS and NCCL
    def matmul(self, *operands: Any, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        a, b, *_, scaling = operands
        dtype = a.dtype if scaling is None else scaling.out_dtype
        out = self.empty((a.shape[0], b.shape[1]), dtype) if out is None else out
        places = tree_map_only(Tensor, Place.of, [out, *operands])

        def steps() -> Steps:
            into, a, *others = tree_map_only(Place, Place.tensor, places)
            rows = yield from look(a)
            yield from put(into, matmul(rows, *others, factor=factor).to(into.dtype))

        self.enqueue(self.current_stream, "matmul", steps)
        return out

    def gather_into(self, whole: Tensor, shard: Tensor, group: Any) -> None:
        self._move(whole, shard, group, lambda parts: torch.cat([raw(part) for part in parts]).view(whole.dtype))

    def scatter_into(self, part: Tensor, whole: Tensor, reduce_op: str, group: Any) -> None:
        def add(parts: Sequence[Tensor]) -> Tensor:
            total = sum((each.chunk(self.world)[group.rank()].float() for each in parts), torch.zeros(()))
            return (total * (1 / self.world if reduce_op == "avg" else 1)).to(part.dtype)

        self._move(part, whole, group, add)

    def _move(self, out: Tensor, given: Tensor, group: Any, make: Callable[[Sequence[Tensor]], Tensor]) -> None:
        """Put what `make` makes of all ranks' `given` into `out`, once all have come."""
        places, name, rank = (Place.of(given), Place.of(out)), group.group_name, group.rank()

        def steps() -> Steps:
            self._moves[name] += 1
            found = yield from look(places[0].tensor())
            parts = self.shared.moved.setdefault((name, self._moves[name]), {})
            parts[rank] = found
            yield lambda: len(parts) == self.world
            yield from put(places[1].tensor(), make([parts[peer] for peer in range(self.world)]).view(places[1].shape))

        self.enqueue(self.current_stream, "NCCL", steps)

    # --- what is left
    def left_over(self) -> bool:
        """A word is set, or a count is not over, of a group that has done all its calls."""
        for here in self.memories:
            local = here.local.clone()
            for counts in map(here.done, ("stage", "gather", "scatter", "direct")):
                local[counts.storage_offset() + 1] = 0  # calls that are over
            words = [local, here.signals.memory.view(torch.int32), here.status]
            if [each.count_nonzero().item() for each in words] != [1, 0, 0]:  # but for the constant 1
                return True
        return False


@dataclass
class Processor:
    """The programs on an SM: large ones, of the GEMM, and small ones."""

    large: int = 0
    small: int = 0

    def has_room(self, large: bool) -> bool:
        """Where a large one is, or is to be, there is room for one small one beside it."""
        return self.large == 0 and self.small <= 1 if large else self.small < (1 if self.large else SMALL)


def on_an_sm(sms: Sequence[Processor], large: bool, program: Program) -> Steps:
    """A program stays on an SM until it is done; small ones come together where they can, so that SMs have no room for
    a large one."""
    kind = "large" if large else "small"
    yield lambda: any(sm.has_room(large) for sm in sms)
    place = max((sm for sm in sms if sm.has_room(large)), key=lambda sm: (sm.large == 0, sm.small))
    setattr(place, kind, getattr(place, kind) + 1)
    yield from program()
    setattr(place, kind, getattr(place, kind) - 1)


def copied(entry: Copied) -> Steps:
    """By halves; a word at once."""
    if entry.size == 4:
        int32(entry.dst).value = int32(entry.src).value
        return
    half = -(-entry.width // 2)
    for row, first in itertools.product(range(entry.height), (0, half)):
        size = (min(half, entry.width - first),)
        found = yield from look(at(entry.src + row * entry.src_pitch + first, size, torch.uint8))
        yield from put(at(entry.dst + row * entry.dst_pitch + first, size, torch.uint8), found)


def waited(entry: Waited) -> Steps:
    word = int32(entry.address)
    yield (lambda: bool(word.value == entry.value)) if entry.exactly else reached(word, entry.value)


def wrote(entry: Wrote) -> Steps:
    int32(entry.address).value = entry.value
    yield None


@contextlib.contextmanager
def rank_of(
    number: int, world: int, shared: Shared, chunks: int, tiles: Tiles = TILES, **options: Any
) -> Iterator[Rank]:
    """The package as one rank sees it."""
    small = mock.patch.object(cuda_stubs, "SMS", SMS)
    made = functools.partial(Rank, shared=shared)
    with small, cuda_stubs.machine(number, world, made=made, **options) as here, contextlib.ExitStack() as stack:
        replaced: dict[Any, dict[str, Any]] = {
            edited: {"capture": here.capture_plan},
            gather: {"new_tensors": here.new_tensors},
            gather_transports: {"new_tensors": here.new_tensors},
            scatter: {"new_tensors": here.new_tensors},
            memory: {"_GRANULE": GRANULE},
            select: {"fused_tiles": lambda *_: tiles, "chunks_for": lambda *_: chunks},
            collectives: {"gather_into": here.gather_into},
            moves: {"register_wait": lambda result, wait: here.waits.append(wait)},
            Tensor: {"record_stream": lambda tensor, stream: here.record_stream(tensor, stream)},
        }
        for module, attributes in replaced.items():
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(Enqueued(here))
        yield here
        here.memories = list(memory._groups.values())


# --- running -----------------------------------------------------------------------------------------------------
class Thread:
    """What goes on by itself."""

    def __init__(self, node: Node, steps: Steps) -> None:
        self.node, self.steps = node, steps
        self.question: Question | None = None
        self.place = 0.0

    def __str__(self) -> str:
        return f"{self.node.name} on stream {self.node.stream} of rank {self.node.rank}"


class Scheduler:
    """Threads, and whose turn it is."""

    def __init__(self, nodes: Sequence[Node], draw: random.Random) -> None:
        self.draw, self.threads, self.left = draw, list[Thread](), len(nodes)
        self._stretch = 0
        self._draw_places()
        for node in nodes:
            others = [other for other in node.after if other.epoch == node.epoch]
            node.missing = len(others)
            for other in others:
                other.followers.append(node)
        for node in [node for node in nodes if not node.missing]:
            self._start(node)

    def _draw_places(self) -> None:
        """The next stretch of steps, and who comes first in it."""
        self._stretch = int(2 ** self.draw.uniform(0, 10))
        self._rank_weight, self._stream_weight = (self.draw.choice((0, 0, 2)) for _ in range(2))
        self._places: dict[tuple[int, ...], float] = {}
        for thread in self.threads:
            thread.place = self._place(thread.node)
        self.threads.sort(key=lambda thread: thread.place)

    def _place(self, node: Node) -> float:
        by_rank, by_stream = (
            self._places.setdefault(key, self.draw.random()) for key in ((node.rank,), (node.rank, node.stream))
        )
        return self._rank_weight * by_rank + self._stream_weight * by_stream + self.draw.random()

    def _start(self, node: Node) -> None:
        node.running = len(node.programs)
        for program in node.programs:
            thread = Thread(node, program())
            thread.place = self._place(node)
            bisect.insort(self.threads, thread, key=lambda thread: thread.place)
        if not node.programs:
            self._end(node)

    def _end(self, node: Node) -> None:
        self.left -= 1
        for follower in node.followers:
            follower.missing -= 1
            if not follower.missing:
                self._start(follower)

    def run(self) -> None:
        """Until all is done."""
        while self.threads:
            self._stretch -= 1
            if self._stretch < 0:
                self._draw_places()
            able = (thread for thread in self.threads if thread.question is None or thread.question())
            if (thread := next(able, None)) is None:
                raise Found(f"stuck: {'; '.join(map(str, self.threads))}")
            self._go_on(thread)
        assert not self.left

    def _go_on(self, thread: Thread) -> None:
        try:
            thread.question = next(thread.steps)
        except StopIteration:
            self.threads.remove(thread)
            thread.node.running -= 1
            if not thread.node.running:
                self._end(thread.node)
        except Raced as error:
            raise Found(f"{thread}: {error}") from error


def run(ranks: Sequence[Rank], seed: int) -> None:
    """Do what all ranks have enqueued, in an order that `seed` says.

    Raises:
        Found: Something is wrong.
    """
    draw = random.Random(seed)
    for rank in ranks:
        if rank.problems:
            raise Found(f"rank {rank.rank}: {rank.problems[0]}")
    nodes = [node for rank in ranks for node in rank.work.nodes]
    with one_torch_thread():
        for epoch in sorted({node.epoch for node in nodes}):
            Scheduler([node for node in nodes if node.epoch == epoch], draw).run()
    for rank in ranks:
        if rank.left_over():
            raise Found(f"rank {rank.rank}: a word is left over")
