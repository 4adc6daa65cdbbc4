"""Calls of all ranks, by the package's own plans, on streams that run in any order: see `streams`."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import cuda
from asynctp_kernels.cuda import driver
from asynctp_kernels.cuda import gather as gather_module
from asynctp_kernels.cuda import scatter as scatter_module
from asynctp_kernels.cuda.gather import GatherCall
from asynctp_kernels.cuda.memory import GroupMemory, existing_memory
from asynctp_kernels.cuda.recordings import Recordings
from asynctp_kernels.cuda.scatter import ScatterCall
from asynctp_kernels.cuda.script import Await, Copy, Post, Record, Step, Wait, Write
from cuda_emulated import PROGRAMS, Call, Steps, look, raw
from cuda_stubs import FP8, MAIN, expected_products, gather_call, result_dtype, scatter_call, tensor, whole
from streams import Executable, Found, Place, Rank, Shared, rank_of, run
from torch import Tensor

OTHER = 42  # another stream of the program's
SEEDS = range(3)
MANY_SEEDS = range(10)


# --- calls -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Op:
    """One call of all ranks.

    Attributes:
        kind: "gather", "scatter", "all reduce", "bulk gather" or "bulk scatter". way: the implementation.
        options: of `gather_call` or `scatter_call`.
        stream, group: on which, in which.
        waited: how many calls later the result is read, and on which stream; that of a bulk call is waited for first.
    """

    kind: str
    way: str = "fused"
    options: tuple[tuple[str, Any], ...] = ()
    stream: int = MAIN
    group: int = 0
    waited: tuple[int, int] = (0, MAIN)


def gather(way: str = "fused", stream: int = MAIN, group: int = 0, later: int = 0, **options: Any) -> Op:
    given = {"shard": (32,), "k": 64, "ns": (32,)} | options
    return Op("gather", way, tuple(given.items()), stream, group, (later, stream))


def scatter(
    way: str = "fused", stream: int = MAIN, group: int = 0, later: int = 0, kind: str = "scatter", **options: Any
) -> Op:
    """Of as many rows as 2 to 4 ranks divide."""
    given = {"rows": (96,), "ks": (32,), "n": 32} | options
    return Op(kind, way, tuple(given.items()), stream, group, (later, stream))


def bulk(kind: str, later: int = 0, on: int = MAIN, stream: int = MAIN, group: int = 0) -> Op:
    return Op(f"bulk {kind}", stream=stream, group=group, waited=(later, on))


@functools.cache
def data(op: Op, number: int, rank: int, world: int) -> Any:
    """The operands of one rank in call `number`."""
    torch.manual_seed(zlib.crc32(repr((op, number, rank)).encode()))
    if op.kind == "bulk gather":
        return (tensor(32, 128),)
    if op.kind == "bulk scatter":
        return (tensor(96, 32),)
    return (gather_call if op.kind == "gather" else scatter_call)(**dict(op.options), world=world)


@functools.cache
def expected(op: Op, number: int, rank: int, world: int) -> list[Tensor]:
    """What the call gives on one rank."""
    calls = [data(op, number, peer, world) for peer in range(world)]
    if op.kind == "bulk gather":
        return [torch.cat([shard for (shard,) in calls])]
    if op.kind == "bulk scatter":
        return [_sum([part for (part,) in calls], rank).to(calls[rank][0].dtype)]
    return _gathered(calls, rank) if op.kind == "gather" else _scattered(op, calls, rank)


def _gathered(calls: Sequence[GatherCall], rank: int) -> list[Tensor]:
    call = calls[rank]
    full = _joined([each.a_shard for each in calls], call.dim)
    scale = _joined([each.a_scale for each in calls], call.dim) if call.scale_travels else call.a_scale
    outs = [out.view(*full.shape[:-1], -1) for out in expected_products(call, full, scale)]
    numbers = [] if call.along is None else [_joined([each.along for each in calls], 0)]
    return [*outs, *[full] * call.return_a_full, *numbers]


def _joined(parts: Sequence[Any], dim: int) -> Tensor:
    return torch.cat([part.float() for part in parts], dim).to(parts[0].dtype)


def _scattered(op: Op, calls: Sequence[ScatterCall], rank: int) -> list[Tensor]:
    call, parts = calls[rank], [whole(each, op.way) for each in calls]
    of_ranks = range(call.world) if op.kind == "all reduce" else [rank]
    factor = 1 / call.world if call.reduce_op == "avg" else 1.0
    return [torch.cat([_sum(parts, each, call.dim) * factor for each in of_ranks]).to(result_dtype(call))]


def _sum(parts: Sequence[Tensor], rank: int, dim: int = 0) -> Tensor:
    """Of what is for one rank, in fp32."""
    return sum((part.chunk(len(parts), dim)[rank].float() for part in parts), torch.zeros(()))


def placed(rank: Rank, operands: Any) -> Any:
    """The same operands in memory of the machine's."""

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            return rank.empty(value.shape, value.dtype, value.stride())
        return [place(each) for each in value] if isinstance(value, (list, tuple)) else value

    if isinstance(operands, tuple):
        return tuple(map(place, operands))
    return replace(operands, **{each.name: place(getattr(operands, each.name)) for each in fields(operands)})


def tensors(operands: Any) -> list[Tensor]:
    """All of them."""
    if not isinstance(operands, (list, tuple)):
        operands = [getattr(operands, each.name) for each in fields(operands)]
    flat = [each for value in operands for each in (value if isinstance(value, (list, tuple)) else [value])]
    return [each for each in flat if isinstance(each, Tensor)]


# --- one rank ----------------------------------------------------------------------------------------------------
class Player:
    """One rank that makes calls."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.world = rank, rank.world
        self.flying: list[tuple[int, Callable[[], None]]] = []

    def fill(self, op: Op, operands: Any, number: int) -> None:
        """Let the operands be those of call `number`."""
        mine = data(op, number, self.rank.groups[op.group].rank(), self.world)
        pairs = [(Place.of(to), given) for to, given in zip(tensors(operands), tensors(mine), strict=True)]

        def steps() -> Steps:
            for to, given in pairs:
                to.tensor().copy_(given)
            yield None

        self.rank.enqueue(self.rank.current_stream, "fill", steps)

    def check(self, op: Op, results: Sequence[Tensor], number: int) -> None:
        """The current stream reads the results of call `number`."""
        wanted = expected(op, number, self.rank.groups[op.group].rank(), self.world)
        places = [Place.of(result) for result in results]

        def steps() -> Steps:
            for place, each in zip(places, wanted, strict=True):
                found = yield from look(place.tensor())
                if not torch.equal(raw(found), raw(each)):
                    raise Found(f"rank {self.rank.rank}: call {number}, {op.kind} {op.way}, is wrong")

        self.rank.enqueue(self.rank.current_stream, "check", steps)

    def start(self, op: Op, operands: Any) -> tuple[list[Tensor], Callable[[], None]]:
        """Make a call; gives its results, and what waits for them."""
        group = self.rank.groups[op.group]
        if op.kind.startswith("bulk"):
            (given,) = operands
            if op.kind == "bulk gather":
                result = cuda.run_bulk_gather(given, self.world, group, lambda: None)
            else:
                result = cuda.run_bulk_scatter(given, "sum", self.world, group, lambda: None)
            assert result is not None
            return [result], self.rank.waits.pop()
        with cuda.forced(op.way):
            return self._run(op, operands, group), lambda: None

    def _run(self, op: Op, call: Any, group: Any) -> list[Tensor]:
        if op.kind == "gather":
            results = cuda.run_gather(
                call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases, call.dim, call.scale_travels,
                call.out_dtype, call.fast, call.return_a_full, self.world, group, lambda: None, call.along)  # fmt: skip
            assert results is not None
            return results
        parts = (call.a_parts, call.b_parts, call.a_scales, call.b_scales, call.biases, call.reduce_op)
        if op.kind == "all reduce":
            out = cuda.run_all_reduce(*parts, call.out_dtype, call.fast, group, lambda: None, call.sum_dtype)
        else:
            rest = (call.dim, call.out_dtype, call.fast, self.world, group, lambda: None, call.sum_dtype)
            out = cuda.run_scatter(*parts, *rest)
        assert out is not None
        return [out]

    def call(self, op: Op, number: int) -> None:
        """A call on new memory, of which nothing stays but what is in flight."""
        self.rank.current_stream = op.stream
        operands = placed(self.rank, data(op, number, self.rank.groups[op.group].rank(), self.world))
        self.fill(op, operands, number)
        results, wait = self.start(op, operands)
        self.flying.append((number + op.waited[0], functools.partial(self._land, op, number, results, wait)))
        del operands, results, wait
        self.land(number)

    def _land(self, op: Op, number: int, results: Sequence[Tensor], wait: Callable[[], None]) -> None:
        self.rank.current_stream = op.waited[1]
        wait()
        self.check(op, results, number)
        for result in results if op.waited[1] != op.stream else ():
            driver.keep(result)  # as a program must

    def land(self, number: int) -> None:
        """Wait for the results that are due."""
        due = [land for at, land in self.flying if at <= number]
        self.flying = [(at, land) for at, land in self.flying if at > number]
        for land in due:
            land()


@dataclass(frozen=True)
class Session:
    """What all ranks do.

    Attributes:
        ops: one after the other, `rounds` times.
        captured: then they are captured, and the graph is launched as often again.
        records: the package may record calls.
        chunks, registers, options: of the GEMM, of every kernel, of `machine`.
    """

    world: int
    ops: tuple[Op, ...]
    rounds: int = 2
    captured: bool = False
    records: bool = False
    chunks: int = 2
    registers: int = 40
    options: tuple[tuple[str, Any], ...] = ()


def perform(session: Session, rank: Rank) -> None:
    """All of a session that one rank enqueues."""
    player, ops = Player(rank), session.ops
    rank.records, rank.registers = session.records, session.registers
    count = session.rounds * len(ops)
    for number in range(count):
        player.call(ops[number % len(ops)], number)
    player.land(count + len(ops))
    if session.captured:
        replay(session, player, count)
    found = [memory for group in rank.groups if (memory := existing_memory(group)) is not None]
    assert session.records == any(memory.recordings.launched for memory in found)


def replay(session: Session, player: Player, number: int) -> None:
    """Capture the calls, and launch the graph on other data each time."""
    rank, ops = player.rank, session.ops
    rank.current_stream = MAIN
    operands = [placed(rank, data(op, 0, rank.groups[op.group].rank(), rank.world)) for op in ops]
    results, executable = [], Executable()
    rank.capturing = 7
    with rank.captured(MAIN) as graph:
        for op, given in zip(ops, operands, strict=True):
            made, wait = player.start(op, given)
            results.append(made)
            wait()
    rank.capturing = 0
    for _ in range(session.rounds):
        for op, given in zip(ops, operands, strict=True):
            player.fill(op, given, number)
        rank.launch(graph, MAIN, executable)
        for op, made in zip(ops, results, strict=True):
            player.check(op, made, number)
        number += 1
    player.call(ops[0], number)


Spoil = Callable[[], contextlib.AbstractContextManager[Any]]  # changes the package or its kernels


def play(session: Session, seed: int, spoil: Spoil = contextlib.nullcontext) -> None:
    """All ranks' session, in an order that `seed` says.

    Raises:
        Found: Something is wrong.
    """
    shared, ranks = Shared(), []
    for number in range(session.world):
        with rank_of(number, session.world, shared, session.chunks, **dict(session.options)) as rank, spoil():
            perform(session, rank)
            ranks.append(rank)
    for rank in ranks:
        rank.current_stream = MAIN
    with spoil():
        run(ranks, seed)


# --- they are right ----------------------------------------------------------------------------------------------
ROWWISE: dict[str, Any] = {"dtype": FP8, "scales": "row"}
OUTER: dict[str, Any] = {"shard": (2, 16), "dim": 1}
SEVERAL: dict[str, Any] = {"ns": (32, 16), "bias": True}
BOUNDED, BY_COPIES = (("timeout_s", 5.0),), (("peer_writes", False),)
SESSIONS: dict[str, Session] = {
    "fused gather": Session(3, (gather(full=True),)),
    "fused gather of 4": Session(4, (gather(**SEVERAL),), chunks=3),
    "fused gather with scales": Session(2, (gather(**ROWWISE, travels=True), gather(**ROWWISE, along=True))),
    "fused gather, outer": Session(3, (gather(**OUTER, **ROWWISE, travels=True, full=True), gather(**OUTER)), chunks=1),
    "fused gather, staged first": Session(3, (gather(full=True), gather()), registers=255),
    "decomposed gather": Session(3, (gather("decomposed", full=True), gather("decomposed"))),
    "decomposed gather, outer": Session(
        2, (gather("decomposed", **OUTER, **ROWWISE, travels=True), gather("decomposed", **OUTER, full=True))
    ),
    "direct gather": Session(2, (gather("direct"), gather("direct", **OUTER)), 4),
    "direct gather with scales": Session(3, (gather("direct", **ROWWISE, travels=True),)),
    "fused scatter": Session(3, (scatter(),)),
    "fused scatter of 4": Session(4, (scatter(ks=(32, 16), bias=False),), chunks=1),
    "fused scatter, apart": Session(2, (scatter(ks=(32, 16), **ROWWISE), scatter(reduce_op="avg")), chunks=4),
    "fused scatter, wide": Session(2, (scatter(n=160), scatter(sum_dtype=torch.float32)), chunks=2),
    "fused scatter, outer": Session(3, (scatter(rows=(2, 48), dim=1),)),
    "decomposed scatter": Session(3, (scatter("decomposed", ks=(32, 16)), scatter("decomposed"))),
    "decomposed scatter, outer": Session(2, (scatter("decomposed", rows=(2, 48), dim=1),)),
    "direct scatter": Session(2, (scatter("direct"), scatter("direct", rows=(2, 48), dim=1)), 4),
    "direct scatter of columns": Session(3, (scatter("direct", n=48, dim=1),)),
    "all reduce": Session(3, (scatter(kind="all reduce"), scatter("decomposed", kind="all reduce"))),
    "all kinds": Session(
        3, (gather(), scatter(), gather("decomposed"), scatter("decomposed"), gather("direct"), scatter("direct"))
    ),
    "bulk": Session(3, (bulk("gather"), bulk("scatter"), bulk("gather"))),
    "in flight": Session(3, (bulk("gather", 2), bulk("scatter", 1), gather("decomposed"), scatter("decomposed"))),
    "in flight beside fused": Session(3, (bulk("scatter", 1), gather(), bulk("gather", 1), scatter())),
    "in flight, waited for elsewhere": Session(2, (bulk("gather", 1, OTHER), bulk("scatter", 1, OTHER), gather()), 3),
    "two streams": Session(3, (gather(), scatter(stream=OTHER), gather("direct"), scatter("direct", stream=OTHER))),
    "two streams, decomposed": Session(2, (gather("decomposed"), scatter("decomposed", stream=OTHER))),
    "two groups": Session(3, (gather(), scatter(group=1), bulk("gather", 1), gather("decomposed", group=1))),
    "two groups in flight": Session(3, (bulk("gather", 1), bulk("gather", 1, group=1), bulk("scatter", 1))),
    "bounded": Session(2, (gather(), scatter(), bulk("scatter", 1), scatter("decomposed")), options=BOUNDED),
    "posts by copies": Session(3, (scatter(), gather(), scatter("decomposed")), options=BY_COPIES),
    "recorded gathers": Session(2, (gather(full=True), gather("decomposed", full=True)), 4, records=True),
    "recorded elsewhere": Session(2, (gather("direct"), gather("direct", later=1)), 4, records=True),
    "recorded scatters": Session(2, (scatter(), scatter("decomposed"), scatter("direct")), 4, records=True),
    "recorded beside flights": Session(
        2, (bulk("gather", 1), gather(), bulk("scatter", 1), scatter("decomposed")), 5, records=True
    ),
    "recorded flights": Session(
        2, (bulk("scatter", 1), scatter("decomposed"), bulk("gather", 1), gather("decomposed")), 5, records=True
    ),
    "beside a recorded flight": Session(
        3,
        tuple(op for n in (16, 48, 80) for op in (bulk("scatter", 1), scatter("decomposed", ks=(16,), n=n))),
        1,
        records=True,
    ),
    "recorded on two streams": Session(2, (gather(), scatter(stream=OTHER)), 4, records=True),
    "captured gathers": Session(2, (gather(), gather("decomposed"), bulk("gather"), gather("direct")), captured=True),
    "captured scatters": Session(
        3, (scatter(), scatter("decomposed"), bulk("scatter"), scatter("direct")), captured=True
    ),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_in_any_order(name: str) -> None:
    for seed in SEEDS:
        play(SESSIONS[name], seed)


# --- and what is missing is found --------------------------------------------------------------------------------
ORDERING = ("wait_event", "wait_event_at_launch", "record_event", "keep")


@dataclass(frozen=True)
class Site:
    """A line of the package that orders streams, or keeps memory from other streams: a call of the driver's `name`."""

    path: str
    line: int
    name: str
    text: str


def sites() -> Iterator[Site]:
    """All of them."""
    for path in sorted(Path(cuda.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in [f"driver.{name}" for name in ORDERING]:
                around = [each for each in functions if each.lineno <= call.lineno <= (each.end_lineno or 0)]
                function = max(around, key=lambda each: each.lineno).name
                text = ast.unparse(call).removeprefix("driver.")
                yield Site(str(path), call.lineno, text.partition("(")[0], f"{path.stem}.{function}: {text}")


@contextlib.contextmanager
def without(site: Site) -> Iterator[None]:
    """The package without this line."""
    real = getattr(driver, site.name)

    def ordered(*args: Any) -> None:
        caller = sys._getframe(1)
        if (caller.f_code.co_filename, caller.f_lineno) != (site.path, site.line):
            real(*args)

    with mock.patch.object(driver, site.name, ordered):
        yield


def found(session: str, spoil: Spoil) -> str:
    """What is wrong in one of some orders, or nothing."""
    for seed in MANY_SEEDS:
        try:
            play(SESSIONS[session], seed, spoil)
        except Found as error:
            return str(error)
    return ""


#: for every line a session that goes wrong without it
NEEDED = {
    "__init__.wait: wait_event(stream, bulk.done)": "bulk",
    "__init__.wait: keep(bulk.source)": "in flight, waited for elsewhere",
    "collectives._move: record_event(memory.running, side)": "recorded beside flights",
    "collectives._move: wait_event(side, memory.reduced)": "bulk",
    "gather.start: record_event(memory.end, memory.stream)": "fused gather",
    "gather.finish: wait_event(stream, self.memory.end)": "fused gather",
    "gather.enqueue: wait_event(stream, self.memory.event(source, block))": "decomposed gather",
    "memory.fork: record_event(self.start, stream)": "fused gather",
    "memory.fork: wait_event(self.stream, self.start)": "fused gather",
    "memory.behind_flights: wait_event_at_launch(side, self.flown)": "recorded beside flights",
    "memory.begin: wait_event(stream, flying[2])": "two groups in flight",
    "memory.begin: wait_event(stream, last[1])": "two streams",
    "memory.ended: record_event(self.last_captured if self.capture else self.last, stream)": "two streams",
    "memory.in_flight: record_event(event, self.stream)": "bulk",
    "memory.in_flight: record_event(self.flown, self.stream)": "recorded beside flights",
    "memory.in_flight: wait_event(self.reducer, event)": "beside a recorded flight",
    "memory.land: wait_event(stream, flying[2])": "in flight",
    "scatter.push_and_reduce: record_event(memory.end, side)": "fused scatter",
    "scatter.push_and_reduce: wait_event(memory.reducer, ready)": "decomposed scatter",
    "scatter.push_and_reduce: record_event(memory.reduced, memory.reducer)": "fused scatter",
    "scatter.finish: wait_event(stream, self.memory.end)": "fused scatter",
    "scatter.finish: wait_event(stream, self.memory.reduced)": "fused scatter",
    "scatter.enqueue: record_event(memory.event(dst, block), stream)": "decomposed scatter",
    "script._call: record_event(event, stream)": "decomposed gather",
    "script._call: wait_event(stream, awaited)": "decomposed scatter",
}
#: results are right without these, see `test_cuda_stamps` and `test_trace_of_a_scatter_with_bounded_waits`
FOR_OTHERS = {
    "stamps.begin: wait_event(stream, end)",
    "scatter.push_and_reduce: wait_event(memory.reducer, memory.end)",
}


def test_it_is_known_what_every_line_is_for() -> None:
    assert {site.text for site in sites()} == {*NEEDED, *FOR_OTHERS}


@pytest.mark.parametrize("site", [site for site in sites() if site.text in NEEDED], ids=lambda site: site.text)
def test_no_order_of_streams_can_be_left_out(site: Site) -> None:
    assert found(NEEDED[site.text], functools.partial(without, site))


def replaced(target: Any, name: str, make: Callable[[Any], Any]) -> Spoil:
    """With what `make` makes of an attribute."""
    return lambda: mock.patch.object(target, name, make(getattr(target, name)))


def scripted(module: Any, name: str, change: Callable[[list[Step]], list[Step]]) -> Spoil:
    """With other scripts of the copy stream."""
    return replaced(module, name, lambda real: lambda *args: change(real(*args)))


def no(kind: type, peer: bool | None = None) -> Callable[[list[Step]], list[Step]]:
    """Without these steps; `peer`: waits for other ranks, or others."""

    def drop(step: Step) -> bool:
        return isinstance(step, kind) and peer in (None, getattr(step, "peer", None) is not None)

    return lambda steps: [step for step in steps if not drop(step)]


def early(kind: type) -> Callable[[list[Step]], list[Step]]:
    """What says that a copy is done comes in front of it."""

    def swap(steps: list[Step]) -> list[Step]:
        for i, (first, second) in enumerate(itertools.pairwise(steps)):
            if isinstance(first, Copy) and isinstance(second, kind):
                steps[i : i + 2] = second, first
        return steps

    return swap


def heedless(name: str, first: int = 0, end: int = 1000) -> Spoil:
    """Programs of a kernel do not wait for the words that come first, or later."""
    real = PROGRAMS[name]

    def program(call: Call, number: int) -> Steps:
        questions = itertools.count()
        for question in real(call, number):
            asked = question is not None and next(questions)
            yield None if question is not None and first <= asked < end else question

    return lambda: mock.patch.dict(PROGRAMS, {name: program})


def behind_flights(left_out: str) -> Spoil:
    """One of the two streams does not wait, in a recording, for what is in flight."""

    def make(real: Any) -> Any:
        return lambda self, side: None if side == getattr(self, left_out) else real(self, side)

    return replaced(GroupMemory, "behind_flights", make)


def one_recording(real: Any) -> Any:
    """Of all calls of a plan, wherever their memory is."""
    return lambda self, stream, key, *rest: real(self, stream, key[:1], *rest)


FAULTS: dict[str, tuple[str, Spoil]] = {
    "arrival set before the pull": ("fused gather", scripted(gather_module, "gather_script", early(Write))),
    "event before the pull": ("decomposed gather", scripted(gather_module, "gather_script", early(Record))),
    "own rows not kept": ("fused gather, outer", scripted(gather_module, "gather_script", lambda steps: steps[:-1])),
    "outbox filled at once": ("fused gather", heedless("stage_kernel", 0, 2)),
    "pulled at once": ("fused gather", heedless("stage_kernel", 2)),
    "GEMM without arrivals": ("fused gather", heedless("gemm_kernel")),
    "push without the tiles": ("fused scatter", scripted(scatter_module, "scatter_script", no(Wait, peer=False))),
    "push without the product": ("decomposed scatter", scripted(scatter_module, "scatter_script", no(Await))),
    "push without FREE": ("fused scatter", scripted(scatter_module, "scatter_script", no(Wait, peer=True))),
    "FREE not cleared": ("decomposed scatter", scripted(scatter_module, "scatter_script", no(Write))),
    "FREE not set": ("fused scatter", scripted(scatter_module, "scatter_script", lambda steps: steps[1:])),
    "FULL before the push": ("fused scatter", scripted(scatter_module, "scatter_script", early(Post))),
    "sum at once": ("fused scatter", heedless("reduce_kernel")),
    "direct gather at once": ("direct gather", heedless("push_gather_kernel")),
    "direct scatter at once": ("direct scatter", heedless("push_reduce_kernel")),
    "one slot": ("direct gather", replaced(cuda_emulated, "_landings", lambda real: lambda call, epoch: real(call, 0))),
    "copies beside flights": ("recorded beside flights", behind_flights("stream")),
    "sums beside flights": ("recorded flights", behind_flights("reducer")),
    "a recording of other memory": ("recorded elsewhere", replaced(Recordings, "run", one_recording)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    assert found(*FAULTS[fault])
