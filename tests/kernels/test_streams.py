"""Calls of all ranks, by the package's own plans, on streams that run in any order: see `streams`.

That they are right shows little by itself. So everything that orders streams is left out once, each line of the package
by itself, and other rules are broken: each must be found.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import cuda
from asynctp_kernels.cuda import moves
from asynctp_kernels.cuda.choose import wire
from asynctp_kernels.cuda.gemm import gemm
from asynctp_kernels.cuda.plans import decomposed
from asynctp_kernels.cuda.plans import gather_transports as gathers
from asynctp_kernels.cuda.plans import scatter as scatters
from asynctp_kernels.cuda.plans.collectives import Bulk
from asynctp_kernels.cuda.runtime import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.cuda.runtime.script import Await, Copy, Post, Record, Step, Wait, Write
from cuda_emulated import PROGRAMS, Call, Steps
from cuda_stubs import FP8
from profiles import THOROUGH
from stream_sessions import Session, Spoil, bulk, gather, move, play, scatter
from streams import PINGPONG, Found, Graph

OTHER = 42  # another stream of the program's
SEEDS_OF_FAULTS = range(20)


# --- they are right ----------------------------------------------------------------------------------------------
ROWWISE: dict[str, Any] = {"dtype": FP8, "scales": "row"}
OUTER: dict[str, Any] = {"shard": (2, 16), "dim": 1}
SEVERAL: dict[str, Any] = {"ns": (32, 16), "bias": True}
BY_COPIES = (("peer_writes", False),)
KEPT: dict[str, Any] = {"kept": True}  # by every rank: pulled
FLOAT = torch.float32
ROWS: dict[str, Any] = {"dtype": FP8, "scales": "row", "travels": True}
FEW: dict[str, Any] = {"rows": (7,), "n": 5}  # of an all-reduce: in one shot (`shots`), and no multiple of anything
SESSIONS: dict[str, Session] = {
    "fused gather": Session(3, (gather(), gather(**ROWWISE, travels=True))),
    "fused gather of 4": Session(4, (gather(**SEVERAL), scatter(), gather("decomposed")), chunks=3),
    "fused gather of numbers": Session(3, (gather(**ROWWISE, along=True), gather(**OUTER, **ROWWISE, along=True))),
    "fused gather, no room": Session(3, (bulk("gather", 1), gather(), bulk("scatter", 1), gather()), registers=255),
    "fused gather, outer": Session(3, (gather(**OUTER, **ROWWISE, travels=True), gather(**OUTER))),
    "fused gather of few rows": Session(2, (gather(shard=(5,), k=16), gather(shard=(3,), k=16)), chunks=4),
    "fused gather and A": Session(3, (gather(full=True), gather(**OUTER, full=True)), chunks=4),
    "fused gather and A, of 4": Session(4, (gather(**SEVERAL, full=True),), chunks=3),
    "fused gather and A, with scales": Session(
        2, (gather(**ROWWISE, travels=True, full=True), gather(**ROWWISE, along=True, full=True))
    ),
    "pulled fused gather": Session(3, (gather(**KEPT),)),
    "pulled fused gather of 4": Session(4, (gather(**SEVERAL, **KEPT),), chunks=3),
    "pulled fused gather with scales": Session(
        2, (gather(**ROWWISE, travels=True, **KEPT), gather(**ROWWISE, along=True, **KEPT))
    ),
    "pulled fused gather, outer": Session(
        3, (gather(**OUTER, **ROWWISE, travels=True, **KEPT), gather(**OUTER, **KEPT)), chunks=1
    ),
    "pulled fused gather, staged first": Session(
        3, (gather(**KEPT), gather(**ROWWISE, along=True, **KEPT)), registers=255
    ),
    "decomposed gather": Session(3, (gather("decomposed"), gather("decomposed", **SEVERAL))),
    "decomposed gather of numbers": Session(
        3, (gather("decomposed", along=True, **ROWWISE), gather("decomposed", along=True, **OUTER, **ROWWISE))
    ),
    "decomposed gather of 4": Session(
        4, (gather("decomposed", **ROWWISE, travels=True), scatter(), gather("decomposed"))
    ),
    "decomposed gather, outer": Session(
        2, (gather("decomposed", **OUTER, **ROWWISE, travels=True), gather("decomposed", **OUTER, full=True))
    ),
    "decomposed gather and A": Session(3, (gather("decomposed", full=True), gather("decomposed", **OUTER, full=True))),
    "pulled decomposed gather": Session(
        3, (gather("decomposed", **KEPT), gather("decomposed", **KEPT, along=True, **ROWWISE))
    ),
    "pulled decomposed gather, outer": Session(
        2, (gather("decomposed", **OUTER, **ROWWISE, travels=True, **KEPT), gather("decomposed", **OUTER, **KEPT))
    ),
    "direct gather": Session(2, (gather("direct"), gather("direct", **OUTER)), 4),
    "direct gather with scales": Session(3, (gather("direct", **ROWWISE, travels=True),)),
    "whole gather": Session(3, (move("gather"), move("gather", kept=True), move("gather", "direct"))),
    "whole gather of numbers": Session(3, (move("gather", numbers=40), move("gather", numbers=40, kept=True))),
    "fused scatter": Session(3, (scatter(),)),
    "fused scatter, no room": Session(2, (scatter(rows=(32,), n=1024),), 1, registers=255),
    "fused scatter of 4": Session(4, (scatter(ks=(32, 16), bias=False),), chunks=1),
    "fused scatter, apart": Session(2, (scatter(ks=(32, 16), **ROWWISE), scatter(reduce_op="avg")), chunks=4),
    "fused scatter, wide": Session(2, (scatter(n=160), scatter(sum_dtype=FLOAT)), chunks=2),
    "fused scatter of few rows": Session(2, (scatter(rows=(10,), n=16), scatter(rows=(6,), n=16)), chunks=4),
    "pingpong": Session(3, (gather(), scatter(), gather(**ROWWISE, travels=True), scatter(**ROWWISE)), tiles=PINGPONG),
    "pingpong, several": Session(
        2, (gather(**SEVERAL, full=True), scatter(ks=(32, 16), bias=False, k_major=False)), chunks=3, tiles=PINGPONG
    ),
    "fused scatter, outer": Session(3, (scatter(rows=(2, 48), dim=1),)),
    "decomposed scatter": Session(3, (scatter("decomposed", ks=(32, 16)), scatter("decomposed"))),
    "decomposed scatter, outer": Session(2, (scatter("decomposed", rows=(2, 48), dim=1),)),
    "decomposed scatter and a term": Session(
        3, (scatter("decomposed", added=True), scatter("direct", added=True, rows=(2, 48), dim=1))
    ),
    "direct scatter": Session(2, (scatter("direct"), scatter("direct", rows=(2, 48), dim=1)), 4),
    "direct scatter of columns": Session(3, (scatter("direct", n=48, dim=1),)),
    "whole scatter": Session(3, (move("scatter"), move("scatter", "direct"))),
    "direct all reduce": Session(
        2, tuple(scatter("direct", kind="all reduce", **options) for options in (FEW, {}, {"reduce_op": "avg"})), 4
    ),
    "direct all reduce of 3": Session(
        3, (scatter("direct", kind="all reduce", **FEW), scatter("direct", kind="all reduce", sum_dtype=FLOAT))
    ),
    "direct all reduce of 4": Session(4, (scatter("direct", kind="all reduce", rows=(96,), n=56), scatter("direct"))),
    "whole all reduce": Session(3, (move("all reduce"), move("all reduce", "direct", shape=(7, 5)))),
    "maxima": Session(
        3,
        (move("all reduce", "direct", shape=(7, 5), reduce_op="max"), move("all reduce", "direct", reduce_op="min")),
        3,
    ),
    "maxima of 4, captured": Session(
        4, (move("all reduce", "direct", shape=(3,), reduce_op="max"), gather("direct")), captured=True
    ),
    "unlike all reduces": Session(
        3,
        (
            (scatter("direct", kind="all reduce"), move("all reduce", "direct")),
            (move("all reduce", "direct"), scatter("direct", kind="all reduce", ks=(16, 16))),
        ),
        3,
    ),
    "all reduce": Session(3, (scatter(kind="all reduce"), scatter("decomposed", kind="all reduce"))),
    "all reduce of 4": Session(4, (scatter(kind="all reduce", ks=(32, 16), bias=False), gather(full=True)), chunks=3),
    "decomposed all reduce": Session(
        3,
        (
            scatter("decomposed", kind="all reduce", rows=(50,), n=48),
            scatter("decomposed", kind="all reduce", rows=(7,), n=48, added=True, sum_dtype=FLOAT),
        ),
        3,
    ),
    "unlike uses of all reduces": Session(
        3,
        (
            (scatter(kind="all reduce"), move("all reduce"), scatter("decomposed", kind="all reduce")),
            gather(full=True),
            (
                move("all reduce"),
                scatter("decomposed", kind="all reduce"),
                scatter(kind="all reduce", ks=(16, 16), bias=False),
            ),
        ),
    ),
    "all reduces beside flights": Session(
        3,
        (
            bulk("gather", 1),
            scatter(kind="all reduce"),
            bulk("scatter", 2),
            bulk("gather", 2),
            move("all reduce"),
            gather(),
        ),
    ),
    "all kinds": Session(
        3,
        (
            gather(),
            scatter(),
            gather("decomposed"),
            gather(**KEPT),
            scatter("decomposed"),
            gather("decomposed", full=True),
            gather("direct"),
            scatter("direct", kind="all reduce"),
            scatter("direct"),
        ),
    ),
    "beside NCCL": Session(3, (gather("sequential"), scatter(), scatter("sequential", reduce_op="avg"), gather())),
    # what one rank does with a gather, or sums up, another does otherwise
    "unlike uses of gathers": Session(
        3, ((gather(), gather("decomposed", full=True), move("gather")), (bulk("gather"), gather(full=True), gather()))
    ),
    "unlike uses of gathers, outer": Session(
        3, ((gather(), gather(**OUTER), gather("decomposed", **OUTER, full=True)),), chunks=4
    ),
    "unlike uses of pulled gathers": Session(
        3,
        (
            (gather(**KEPT), gather("decomposed", **KEPT), move("gather", kept=True)),
            (bulk("gather", 1, kept=True), gather(**OUTER, **KEPT), gather("decomposed", **KEPT)),
        ),
    ),
    "unlike uses of direct gathers": Session(
        2, ((gather("direct"), bulk("gather", way="direct")), (move("gather", "direct"), gather("direct", **OUTER))), 3
    ),
    "unlike sums": Session(
        3,
        ((scatter(), scatter("decomposed"), move("scatter")), (bulk("scatter", 1), scatter(ks=(16, 16)), scatter())),
        chunks=4,
    ),
    "unlike sums of direct calls": Session(2, ((scatter("direct"), bulk("scatter", way="direct")),), 3),
    "bulk": Session(3, (bulk("gather"), bulk("scatter"), bulk("gather", kept=True))),
    "in flight": Session(
        3, (bulk("gather", 2), bulk("scatter", 1), gather("decomposed", full=True), scatter("decomposed"))
    ),
    "in flight beside pulled": Session(
        3, (bulk("gather", 2, kept=True), bulk("scatter", 1), gather("decomposed", **KEPT), scatter("decomposed"))
    ),
    "in flight beside decomposed": Session(
        3, (bulk("scatter", 1), gather("decomposed"), bulk("gather", 1), gather("decomposed"))
    ),
    "in flight beside fused": Session(3, (bulk("scatter", 1), gather(), bulk("gather", 1), gather(), scatter())),
    "pulled in flight beside fused": Session(
        3, (bulk("scatter", 1), gather(**KEPT), bulk("gather", 1, kept=True), gather(), scatter())
    ),
    "gather and sum in flight beside fused": Session(3, (bulk("gather", 2), bulk("scatter", 1), gather(), scatter())),
    "in flight, waited for elsewhere": Session(
        2, (bulk("gather", 1, OTHER), bulk("scatter", 1, OTHER), gather(full=True)), 3
    ),
    "two streams": Session(3, (gather(), scatter(stream=OTHER), gather("direct"), scatter("direct", stream=OTHER))),
    "two streams, pulled": Session(3, (gather(**KEPT), gather(**KEPT, stream=OTHER))),
    "two streams, decomposed": Session(2, (gather("decomposed"), scatter("decomposed", stream=OTHER))),
    "two groups": Session(3, (gather(), scatter(group=1), bulk("gather", 1), gather("decomposed", group=1))),
    # kernels that wait for other ranks fill all SMs
    "two groups in flight, pulled": Session(
        3, tuple(bulk("gather", 1, group=group, shape=(128, 64), kept=True) for group in range(2))
    ),
    "two groups in flight": Session(3, (bulk("gather", 1), bulk("gather", 1, group=1), bulk("scatter", 1))),
    "posts by copies": Session(
        3, (scatter(), gather(), gather(**KEPT), scatter("decomposed"), gather("decomposed")), options=BY_COPIES
    ),
    "graphs of gathers": Session(
        2,
        (gather(full=True), gather("decomposed", **KEPT), gather(), gather("decomposed"), gather(**KEPT)),
        4,
        edits=True,
    ),
    "graphs elsewhere": Session(2, (gather(), gather(later=1)), 4, edits=True),
    "graphs of scatters": Session(2, (scatter(), scatter("decomposed"), scatter("direct")), 4, edits=True),
    "graphs of all reduces, pushed": Session(
        2,
        (bulk("gather", 1), scatter(kind="all reduce"), scatter("decomposed", kind="all reduce"), move("all reduce")),
        5,
        edits=True,
    ),
    "graphs beside flights": Session(
        2, (bulk("gather", 1), gather(full=True), bulk("scatter", 1), scatter()), 5, edits=True
    ),
    "graphs beside pulled flights": Session(
        2, (bulk("gather", 1, kept=True), gather(**KEPT), bulk("scatter", 1), gather(**KEPT)), 5, edits=True
    ),
    "graphs beside flights, pushed": Session(
        2, (bulk("gather", 1), gather(), bulk("scatter", 1), gather()), 5, edits=True
    ),
    "graphs of flights": Session(2, (bulk("scatter", 1), scatter(), bulk("gather", 1), gather()), 5, edits=True),
    "beside a flight of a graph": Session(
        3,
        tuple(op for n in (16, 48, 80) for op in (bulk("scatter", 1), scatter("decomposed", ks=(16,), n=n))),
        1,
        edits=True,
    ),
    "graphs, biases elsewhere": Session(
        2,
        tuple(make(way, bias=True) for way in ("fused", "decomposed", "direct") for make in (gather, scatter)),
        4,
        edits=True,
        wanders=True,
    ),
    "graphs, scales elsewhere": Session(
        2,
        tuple(gather(way, **ROWS, **options) for way in ("fused", "decomposed") for options in ({}, KEPT)),
        4,
        edits=True,
        wanders=True,
    ),
    "graphs on two streams, biases elsewhere": Session(
        2,
        (gather(bias=True), scatter(stream=OTHER, bias=True), gather("decomposed", bias=True)),
        4,
        edits=True,
        wanders=True,
    ),
    "graphs on two streams": Session(2, (gather(), scatter(stream=OTHER)), 4, edits=True),
    "captured gathers": Session(
        2,
        (
            gather(),
            gather("decomposed"),
            bulk("gather"),
            gather(full=True),
            gather("decomposed", **KEPT),
            bulk("gather", kept=True),
            gather("direct"),
        ),
        captured=True,
    ),
    "captured in flight": Session(
        2, (bulk("gather", 1), gather(), bulk("gather", 1), gather(full=True)), captured=True
    ),
    "captured all reduces": Session(
        3,
        (scatter("direct", kind="all reduce"), gather("direct"), scatter("direct", kind="all reduce", **FEW)),
        captured=True,
    ),
    "captured all reduces, pushed": Session(
        3,
        (scatter(kind="all reduce"), gather(full=True), scatter("decomposed", kind="all reduce"), bulk("gather")),
        captured=True,
    ),
    "captured scatters": Session(
        3, (scatter(), scatter("decomposed"), bulk("scatter"), scatter("direct")), captured=True
    ),
}


@pytest.fixture(autouse=True)
def shots(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-reduces of more than 1 KiB take two."""
    monkeypatch.setattr(wire, "ONE_SHOT_BYTES", 1 << 10)


@pytest.mark.parametrize(("place", "name"), enumerate(SESSIONS), ids=SESSIONS)
def test_in_any_order(place: int, name: str) -> None:
    """Every second session beside other groups."""
    for seed in range(6) if THOROUGH else [place % 2]:
        play(SESSIONS[name], seed)


# --- and what is missing is found --------------------------------------------------------------------------------
ORDERING = ("wait_event", "wait_event_at_launch", "record_event", "record_stream")


@dataclass(frozen=True)
class Site:
    """A line of the package that orders streams, or keeps memory from other streams: a call of the driver's `name`."""

    path: str
    line: int
    name: str
    text: str


def sites() -> Iterator[Site]:
    """All of them."""
    for path in sorted(Path(cuda.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in [f"driver.{name}" for name in ORDERING]:
                around = [each for each in scopes if each.lineno <= call.lineno <= (each.end_lineno or 0)]
                names = [each.name for each in sorted(around, key=lambda each: each.lineno)]
                text = ast.unparse(call).removeprefix("driver.")
                where = ".".join([path.stem, *names])
                yield Site(str(path), call.lineno, text.partition("(")[0], f"{where}: {text}")


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
    for seed in SEEDS_OF_FAULTS:
        try:
            play(SESSIONS[session], seed, spoil)
        except Found as error:
            return str(error)
    return ""


#: for every line a session that goes wrong without it
NEEDED = {
    "moves.wait_for: wait_event(stream, done)": "bulk",
    "moves.wait_for: record_stream(source)": "in flight, waited for elsewhere",
    "collectives.CopiedGather.enqueue: wait_event(stream, self.memory.reduced)": "whole gather of numbers",
    "collectives.BulkScatter.enqueue: record_event(memory.running, stream)": "graphs beside flights",
    "collectives.BulkScatter.enqueue: wait_event(stream, memory.reduced)": "bulk",
    "gather_transports.GatherPush.finish: wait_event(stream, self.memory.end)": "unlike uses of gathers",
    "gather_transports.GatherPull.finish: wait_event(stream, self.memory.end)": "pulled fused gather",
    "gather_transports.GatherPush.start: record_event(memory.end, memory.stream)": "unlike uses of gathers",
    "gather_transports.GatherPush.start: wait_event(memory.reducer, memory.start)": "fused gather and A",
    "gather_transports.GatherPush.start: record_event(memory.reduced, memory.reducer)": "fused gather and A",
    "gather_transports.GatherPush.finish: wait_event(stream, self.memory.reduced)": "fused gather and A",
    "gather_transports.GatherPull.start: record_event(memory.end, memory.stream)": "pulled fused gather",
    "gather_transports.GatherPull.await_range: wait_event(stream, self.memory.event(source, block))": (
        "pulled decomposed gather"
    ),
    "memory.GroupMemory.fork: record_event(self.start, stream)": "fused gather",
    "memory.GroupMemory.fork: wait_event(self.stream, self.start)": "fused gather",
    "memory.GroupMemory.fork: wait_event_at_launch(self.stream, self.flown)": "graphs beside flights",
    "memory.GroupMemory.begin: wait_event(stream, order.flown)": "two groups in flight, pulled",
    "memory.GroupMemory.begin: wait_event(stream, order.last)": "two streams",
    "memory.GroupMemory.ended: record_event(self.last_captured if self.capture else self.last, stream)": "two streams",
    "memory.GroupMemory.in_flight: record_event(event, self.stream)": "bulk",
    "memory.GroupMemory.in_flight: record_event(self.flown, self.stream)": "graphs beside flights",
    "memory.GroupMemory.in_flight: wait_event(self.reducer, event)": "beside a flight of a graph",
    "memory.GroupMemory.in_flight: record_event(landed, self.stream)": "in flight beside fused",
    "memory.GroupMemory.land: wait_event(stream, order.flown)": "fused gather, no room",
    "memory.GroupMemory.land_gathers: wait_event(stream, landed)": "in flight beside fused",
    "scatter.PushedScatter.push_and_reduce: record_event(memory.end, side)": "fused scatter",
    "scatter.PushedScatter.push_and_reduce: wait_event(memory.reducer, ready)": "decomposed scatter",
    "scatter.PushedScatter.push_and_reduce: record_event(memory.reduced, memory.reducer)": "fused scatter",
    "scatter.PushedScatter.finish: wait_event(stream, self.memory.end)": "fused scatter",
    "scatter.PushedScatter.finish: wait_event(stream, self.memory.reduced)": "fused scatter",
    "decomposed.DecomposedScatter.enqueue: record_event(memory.event(dst, block), stream)": "decomposed scatter",
    "decomposed.DecomposedAllReduce.enqueue: record_event(memory.event(dst, 0), stream)": "decomposed all reduce",
    "script._call: record_event(event, stream)": "pulled decomposed gather",
    "script._call: wait_event(stream, awaited)": "decomposed scatter",
}


def test_it_is_known_what_every_line_is_for() -> None:
    assert sorted(site.text for site in sites()) == sorted(NEEDED)


@pytest.mark.parametrize("site", list(sites()), ids=lambda site: site.text)
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


def one_word_more(steps: list[Step]) -> list[Step]:
    """What is awaited by nobody is set too."""
    last = next(step for step in reversed(steps) if isinstance(step, Post))
    return [*steps, Post(last.address + 4)]


def drop_first(steps: list[Step], kind: type) -> list[Step]:
    """Without the first of these."""
    first = next(i for i, step in enumerate(steps) if isinstance(step, kind))
    return steps[:first] + steps[first + 1 :]


def heedless(name: str, first: int = 0, end: int = 1000) -> Spoil:
    """Programs of a kernel do not wait for the words that come first, or later."""
    real = PROGRAMS[name]

    def program(call: Call, number: int) -> Steps:
        questions = itertools.count()
        for question in real(call, number):
            asked = question is not None and next(questions)
            yield None if question is not None and first <= asked < end else question

    return lambda: mock.patch.dict(PROGRAMS, {name: program})


def source_given_back(real: Any) -> Any:
    """What is read in flight is not kept."""

    def waited(given: Bulk, result: torch.Tensor) -> Any:
        return real(given._replace(source=torch.empty(0, device=given.source.device)), result)

    return waited


def landed_kept(real: Any) -> Any:
    """Nobody but the GEMM clears words of chunks that a gather has pushed."""

    def compiled(self: GroupMemory, steps: list[Step]) -> Any:
        words = [self.landed.at(self.rank, peer) for peer in range(self.world)]
        return real(self, [step for step in steps if not (isinstance(step, Write) and step.address in words)])

    return compiled


def gemm_clears(real: Any) -> Any:
    """The GEMM clears words that a copy waits for too."""

    def init(self: gathers.GatherPush, *args: Any) -> None:
        real(self, *args)
        self.gemm_clears = True

    return init


def told_once(real: Any) -> Any:
    """A graph is not told where other calls have their memory."""

    def launch(self: Graph, stream: int, addresses: Sequence[int]) -> None:
        self.told[addresses] = None
        first = next(iter(self.told))
        real(self, stream, first)

    return launch


def made_late(real: Any) -> Any:
    """The first row of the part that is pushed first, with the own part."""

    def rows(call: Any, rank: int) -> list[tuple[int, int, int]]:
        (dst, begin, end), *rest, (own, first, last) = real(call, rank)
        return [(dst, begin + 1, end), *rest, (own, first, last + 1)]

    return rows


def landed_is_full() -> Any:
    """A gather's words of chunks are a scatter's."""
    real = GroupMemory.__post_init__

    def init(memory: GroupMemory, of_group: Any) -> None:
        real(memory, of_group)
        memory.landed, memory.gather_channel = memory.full, memory.scatter_channel

    return mock.patch.object(GroupMemory, "__post_init__", init)


FAULTS: dict[str, tuple[str, Spoil]] = {
    "arrival set before the pull": ("pulled fused gather", scripted(gathers, "pull_script", early(Write))),
    "event before the pull": ("pulled decomposed gather", scripted(gathers, "pull_script", early(Record))),
    "own rows not kept": ("pulled fused gather, outer", scripted(gathers, "pull_script", lambda steps: steps[:-1])),
    "outbox filled at once": ("pulled fused gather", heedless("stage_kernel", 0, 2)),
    "pulled at once": ("pulled fused gather", heedless("stage_kernel", 2)),
    "GEMM without arrivals": ("pulled fused gather", heedless("gemm_kernel")),
    "pushed without FREE": ("decomposed gather", scripted(gathers, "push_script", no(Wait, peer=True))),
    "product before the push": ("decomposed gather", scripted(gathers, "arrived_script", no(Wait))),
    "LANDED kept by the product": ("decomposed gather", replaced(GroupMemory, "compiled", landed_kept)),
    "LANDED kept by the stream": ("fused gather and A", scripted(gathers, "clear_script", no(Write))),
    "LANDED cleared by the GEMM too": ("fused gather and A", replaced(gathers.GatherPush, "__init__", gemm_clears)),
    "pushed without the scales": (
        "decomposed gather of 4",
        scripted(gathers, "push_script", lambda steps: drop_first(steps, Copy)),
    ),
    "fused, pushed without FREE": ("fused gather", scripted(gathers, "push_script", no(Wait, peer=True))),
    "fused, pushed after the word": ("fused gather", scripted(gathers, "push_script", early(Post))),
    "GEMM before the push": ("fused gather", heedless("gemm_kernel")),
    "kept before the push": ("fused gather and A", scripted(gathers, "arrived_script", no(Wait))),
    "LANDED is FULL": ("in flight beside decomposed", landed_is_full),
    "LANDED is FULL, fused": ("in flight beside fused", landed_is_full),
    "pushed beside flights that find no room": (
        "fused gather, no room",
        replaced(gathers, "leaves_room", lambda real: lambda gemm: True),
    ),
    "sums between the shares of a GEMM": (
        "fused scatter, no room",
        replaced(gemm, "leaves_room", lambda real: lambda gemm: True),
    ),
    "LANDED set once more": ("fused gather", scripted(gathers, "push_script", one_word_more)),
    "push without the tiles": ("fused scatter", scripted(scatters, "push_script", no(Wait, peer=False))),
    "push without the product": ("decomposed scatter", scripted(scatters, "push_script", no(Await))),
    "push without FREE": ("fused scatter", scripted(scatters, "push_script", no(Wait, peer=True))),
    "FREE not cleared": ("decomposed scatter", scripted(scatters, "push_script", no(Write))),
    "FREE not set": ("fused scatter", scripted(scatters, "push_script", lambda steps: steps[1:])),
    "FULL before the push": ("fused scatter", scripted(scatters, "push_script", early(Post))),
    "sum at once": ("fused scatter", heedless("reduce_kernel")),
    "sums pulled at once": ("all reduce", scripted(scatters, "share_script", no(Wait))),
    "LANDED kept by the sums": ("all reduce", scripted(scatters, "share_script", no(Write))),
    "sums that are not told": ("all reduce", scripted(scatters, "summed_script", lambda steps: [])),
    "a row of two parts made with the second": ("decomposed all reduce", replaced(decomposed, "part_rows", made_late)),
    "direct gather at once": ("direct gather", heedless("push_gather_kernel")),
    "maximum at once": ("maxima", heedless("push_all_reduce_kernel")),
    "direct scatter at once": ("direct scatter", heedless("push_reduce_kernel")),
    "direct all-reduce at once": ("direct all reduce", heedless("push_all_reduce_kernel", 0, 1)),
    "sums of a direct all-reduce at once": ("direct all reduce of 3", heedless("push_all_reduce_kernel", 2)),
    "one slot of all-reduces": (
        "direct all reduce",
        replaced(cuda_emulated, "_landings", lambda real: lambda call, epoch: real(call, 0)),
    ),
    "one slot": ("direct gather", replaced(cuda_emulated, "_landings", lambda real: lambda call, epoch: real(call, 0))),
    "source given back in flight": ("in flight", replaced(moves, "_waited", source_given_back)),
    "biases stay elsewhere": ("graphs, biases elsewhere", replaced(Graph, "launch", told_once)),
    "a graph of other memory": ("graphs elsewhere", replaced(Graph, "launch", told_once)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    assert found(*FAULTS[fault])
