"""What is recorded of a group's calls, and when, without a GPU: the driver's part is played here."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels.cuda.runtime import driver, recordings
from asynctp_kernels.cuda.runtime.driver import CudaError
from asynctp_kernels.cuda.runtime.recordings import Enqueue, Recordings, Work, on_places, rooms_for
from cuda_stubs import room_for
from torch import Tensor

MAIN = 0
KERNEL, COPY, SET, EVENT, WORDS = (0, 0), (1, 1), (2, 1), (6, 0), (12, 0)


class Recorder:
    """Its graphs are numbered; what happens is in `events`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fails, self.known = "", True

    def record(self, enqueue: Enqueue, cublas: bool, urgent: bool, small: Sequence[Tensor]) -> Any:
        self._event("record")
        copies = []
        graph = SimpleNamespace(number=self.events.count("record"), known=self.known, follows=bool(small))
        graph.follow = copies.extend
        made: Any = on_places(enqueue, small, [room_for(size) for size in rooms_for(small)], lambda made: graph)
        assert len(copies) == len(small)
        return made

    def ready(self) -> Any:
        def show(graph: Any, at: tuple[int, ...]) -> None:
            self._event(f"show {graph.number}" + (f" of {at[0]}" if graph.follows else ""))

        return SimpleNamespace(show=show, launch=lambda stream: self._event("launch"))

    def enqueue(self, stream: int, small: Sequence[Tensor] = ()) -> None:
        self._event("enqueue")

    def _event(self, event: str) -> None:
        if self.fails and event.startswith(self.fails):
            raise CudaError(f"{event}: no")
        self.events.append(event)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.delenv(recordings.VARIABLE, raising=False)
    monkeypatch.setattr(recordings, "recorder", lambda device: made)
    monkeypatch.setattr(driver, "unrecordable", lambda: None)
    monkeypatch.setattr(driver, "Executable", made.ready)
    return made


def calls(kept: Recordings, here: Recorder, *keys: tuple[Any, ...], cublas: bool = False) -> list[str]:
    """What calls of these keys do."""
    here.events.clear()
    for plan, *addresses in keys:
        kept.run(MAIN, Work(plan, tuple(addresses), here.enqueue, cublas), urgent=False)
    return here.events


def new(most: int = 0) -> Recordings:
    kept = Recordings(torch.device("cpu"))
    kept.most = most or kept.most
    kept.clear()
    return kept


def test_the_second_call_is_recorded_and_launched_from_then_on(here: Recorder) -> None:
    one, other = (0, 4096), (0, 8192)
    assert calls(new(), here, one, one, one, other, one) == [
        "enqueue", "record", "show 1", "launch", "show 1", "launch", "enqueue", "show 1", "launch",
    ]  # fmt: skip


def test_a_setting_of_the_program_that_cublas_reads_makes_another_call(
    here: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = new()
    assert calls(kept, here, (0, 1), (0, 1), cublas=True)[-1] == "launch"
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not before
        assert calls(kept, here, (0, 1), cublas=True) == ["enqueue"]
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
    assert calls(kept, here, (0, 1), cublas=True) == ["show 1", "launch"]
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
        assert calls(kept, here, (0, 1), cublas=True) == ["enqueue"]
    finally:
        torch.set_float32_matmul_precision(precision)


def test_no_more_are_kept_than_asked_for(here: Recorder) -> None:
    """Until so many calls have been turned away that others are worth more; then all make room."""
    kept = new(most=2)
    calls(kept, here, *[(0, address) for address in (1, 1, 2, 2)])
    turned_away = recordings.TURNED_AWAY * 2
    assert calls(kept, here, *[(0, 3)] * turned_away, (0, 1)) == [*["enqueue"] * turned_away, "show 1", "launch"]
    assert len(kept) == 2
    assert calls(kept, here, (0, 3), (0, 3)) == ["record", "show 1", "launch", "show 1", "launch"]
    assert len(kept) == 1
    assert calls(kept, here, (0, 1)) == ["enqueue"]


def test_what_cannot_be_recorded_in_the_room_that_was_made_is_enqueued(here: Recorder) -> None:
    kept = new(most=1)
    calls(kept, here, (0, 1), (0, 1))
    here.fails = "record"
    assert calls(kept, here, *[(0, 3)] * (recordings.TURNED_AWAY + 3)) == ["enqueue"] * (recordings.TURNED_AWAY + 3)
    assert (len(kept), kept._refused) == (0, {0})


def test_a_program_that_goes_on_to_other_addresses_is_recorded_again(here: Recorder) -> None:
    kept = new(most=8)
    calls(kept, here, *[(0, address) for address in range(8) for _ in range(2)])
    later = [(1, address) for _ in range(50) for address in range(4)]
    assert calls(kept, here, *later)[-7::2] == ["launch"] * 4
    assert len(kept) == 4


def test_addresses_that_never_come_again_are_forgotten(here: Recorder) -> None:
    kept = new(most=8)
    calls(kept, here, *[(0, address) for address in range(1000)])
    assert len(kept._seen) <= recordings.SEEN * 8
    assert len(kept) == 0


def test_a_gpu_has_only_some_executable_graphs(here: Recorder) -> None:
    """Those that were used last; the others are made anew of what is kept on the host."""
    kept, made = new(), []
    here.ready = lambda ready=here.ready: made.append(1) or ready()  # type: ignore[method-assign]
    with mock.patch.object(driver, "Executable", here.ready):
        plans = range(recordings.MAX_READY + 3)
        for plan in plans:
            calls(kept, here, (plan, 1), (plan, 1), (0, 1), (0, 1))
        assert len(kept._ready) == recordings.MAX_READY
        assert len(made) == len(plans)
        assert calls(kept, here, (0, 1), (plans[-1], 1))[1::2] == ["launch"] * 2
        assert len(made) == len(plans)
        assert calls(kept, here, (1, 1))[-1] == "launch"
        assert len(made) == len(plans) + 1


@pytest.mark.parametrize("fails", ["record", "show"])
def test_what_cannot_be_recorded_is_made_anew_and_it_is_said(
    fails: str, here: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for a plan; other plans, which may need less memory, are recorded."""
    kept, here.fails = new(), fails
    assert calls(kept, here, (0, 1), (0, 1))[-1] == "enqueue"
    assert f"are made anew each time, which takes the host longer: {fails}" in caplog.text
    caplog.clear()
    here.fails = ""
    assert calls(kept, here, (0, 1), (0, 1), (0, 2), (0, 2)) == ["enqueue"] * 4
    assert caplog.text == ""
    assert not kept.under_way
    assert calls(kept, here, (1, 1), (1, 1))[-1] == "launch"
    here.fails = fails
    calls(kept, here, (2, 1), (2, 1))
    assert not [entry for entry in caplog.records if entry.levelname == "WARNING"], "once is enough"


def test_what_the_call_itself_raises_is_its_own_error(here: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "record", lambda enqueue, cublas, urgent, small: enqueue(1))
    kept = new()
    calls(kept, here, (0, 1))
    here.fails = "enqueue"
    with pytest.raises(CudaError, match="enqueue: no"):
        kept.run(MAIN, Work(0, (1,), here.enqueue), urgent=False)


def test_what_cannot_be_brought_up_to_date_is_not_recorded(here: Recorder) -> None:
    """Of calls of that plan, whatever their addresses, until what was recorded is forgotten."""
    kept, here.known = new(), False
    assert calls(kept, here, *[(0, 1)] * 3, *[(0, 2)] * 3) == ["enqueue", "record", *["enqueue"] * 5]
    assert (len(kept), len(kept._seen)) == (0, 0)
    here.known = True
    assert calls(kept, here, (7, 1), (7, 1)) == ["enqueue", "record", "show 1", "launch"]


def test_none_are_kept_if_the_program_says_so(here: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recordings.VARIABLE, "0")
    assert calls(new(), here, (0, 1), (0, 1), (0, 1)) == ["enqueue"] * 3
    monkeypatch.setenv(recordings.VARIABLE, "-1")
    with pytest.raises(ValueError, match="ASYNCTP_RECORDED_CALLS='-1' is not valid; it must be an integer >= 0"):
        new()


def test_none_are_kept_where_freed_memory_is_not(here: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked each time: a program may turn the allocator's cache off."""
    kept = new()
    monkeypatch.setattr(driver, "unrecordable", lambda: "max_split_size_mb")
    assert calls(kept, here, (0, 1), (0, 1), (0, 1)) == ["enqueue"] * 3
    monkeypatch.setattr(driver, "unrecordable", lambda: None)
    assert calls(kept, here, (0, 1))[0] == "record"


def test_that_none_are_kept_is_said_once(
    here: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a process, whatever its groups; only when a call comes again, and not if the program wants none kept."""
    monkeypatch.setattr(driver, "unrecordable", lambda: "max_split_size_mb")
    recordings._say_unrecordable.cache_clear()
    calls(new(), here, (0, 1), (0, 2))
    assert caplog.text == ""
    for kept in (new(), new()):
        calls(kept, here, *[(0, 1)] * 3)
    assert [(entry.levelname, entry.getMessage()) for entry in caplog.records] == [
        (
            "WARNING",
            "no call is recorded, so that each takes the host several times as long as a launch of a recording: with "
            "max_split_size_mb, PyTorch's allocator does not keep freed memory. Run without that, or, if it is meant, "
            "with ASYNCTP_RECORDED_CALLS=0, which records none and says nothing",
        )
    ]
    caplog.clear()
    recordings._say_unrecordable.cache_clear()
    monkeypatch.setenv(recordings.VARIABLE, "0")
    calls(new(), here, *[(0, 1)] * 3)
    assert caplog.text == ""


def test_calls_that_do_their_work_at_once_are_not_recorded(here: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "IN_ORDER", True)
    assert calls(new(), here, (0, 1), (0, 1), (0, 1)) == ["enqueue"] * 3


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """PyTorch's own, with its cache and without settings."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    for each in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(each, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", None),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", "max_split_size_mb"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64", "max_split_size_mb"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
)
def test_variables_by_which_freed_memory_is_not_kept(
    name: str, value: str, setting: str | None, allocator: pytest.MonkeyPatch
) -> None:
    assert driver.unrecordable() is None
    allocator.setenv(name, value)
    assert driver.unrecordable() == setting


def test_calls_by_which_freed_memory_is_not_kept(allocator: pytest.MonkeyPatch) -> None:
    """Of the program. torch 2.11 tells of none."""
    allocator.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "max_split_size_mb:64")
    assert driver.unrecordable() == "max_split_size_mb"
    allocator.delattr(torch._C, "_accelerator_getAllocatorSettings")
    assert driver.unrecordable() is None
    allocator.setattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: False)
    assert driver.unrecordable() == "caching_allocator_enable(False)"
    allocator.delattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled")
    assert driver.unrecordable() is None
    allocator.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert driver.unrecordable() == "backend:cudaMallocAsync"


# --- the driver ----------------------------------------------------------------------------------------------------
class Library:
    """libcuda, as far as graphs go. `codes` are what functions give; 0 where nothing is said.

    nodes: numbers 1, 2, ... of every graph: kinds, and of copies and memory that is set how many rows they have; of
    copies then from where, to where, and words that are 1.
    """

    def __init__(self, nodes: Sequence[tuple[int, ...]] = (), **codes: int) -> None:
        self.codes, self.log, self.made, self.nodes = codes, [], 0, nodes
        self.set: list[tuple[int, list[int]]] = []
        self.args: dict[str, tuple[Any, ...]] = {}  # of the last call

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*args: Any) -> int:
            if name.startswith(("cuGraphGet", "cuGraphNode", "cuGraphMem")):
                return self.codes.get(name) or self._node(name, *args)
            self.log.append(name.removeprefix("cu").removesuffix("_v2"))
            if name in ("cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuStreamCreateWithPriority"):
                self.made += 1
                args[name == "cuStreamEndCapture"]._obj.value = 100 + self.made
            self.args[name] = args
            return self.codes.get(name, 0)

        function.__name__ = name
        return function

    def _node(self, name: str, node: Any, given: Any, count: Any = None) -> int:
        if name == "cuGraphGetNodes":
            for i in range(len(self.nodes)) if given else ():
                given[i] = i + 1
            count._obj.value = len(self.nodes)
            return 0
        kind, rows, *addresses = self.nodes[node.value - 1]
        if name == "cuGraphNodeGetType":
            given._obj.value = kind
        elif name == "cuGraphMemcpyNodeGetParams":
            given._obj[:] = [*range(22), 64, rows, 1]
            if addresses:
                given._obj[:15] = [0] * 15
                given._obj[driver._FROM], given._obj[driver._TO], *offsets = addresses
                for word in offsets:
                    given._obj[word] = 1
        elif name == "cuGraphMemsetNodeGetParams":
            given._obj[:] = [*range(4), rows]
        else:
            self.log.append(name.removeprefix("cuGraph").removesuffix("NodeSetParams"))
            self.set.append((node.value, list(given)))
        return 0


@pytest.fixture
def library() -> Iterator[Callable[..., Library]]:
    with mock.patch.object(driver, "_message", lambda code: f"code {code}"):
        patches = []

        def make(nodes: Sequence[tuple[int, ...]] = (), **codes: int) -> Library:
            made = Library(nodes, **codes)
            fresh = {
                "library": lambda: made,
                "_graph_launch": driver._function("cuGraphLaunch", ctypes.c_void_p, ctypes.c_void_p),
            }
            for name, value in fresh.items():
                patches.append(mock.patch.object(driver, name, value))
                patches[-1].start()
            return made

        yield make
        for patch in reversed(patches):
            patch.stop()


@pytest.mark.parametrize(("urgent", "priority"), [(True, -1), (False, 0)])
def test_streams_are_made_for_us_alone(urgent: bool, priority: int, library: Callable[..., Library]) -> None:
    """Each by the driver, on the GPU that is named, whatever context the thread had; the default stream goes beside."""
    made, device = library(), torch.device("cuda", 1)
    one, other = driver.new_stream(device, urgent), driver.new_stream(device, urgent)
    assert one != other
    assert made.log == ["DeviceGet", "DevicePrimaryCtxRetain", "CtxSetCurrent", "StreamCreateWithPriority"] * 2
    assert made.args["cuDeviceGet"][1] == 1
    non_blocking = 1
    assert made.args["cuStreamCreateWithPriority"][1:] == (non_blocking, priority)
    with mock.patch.object(torch.cuda, "ExternalStream", lambda handle, on: (handle, on)):
        assert driver.new_torch_stream(device, urgent) == (103, device)


def test_a_graph_lives_as_long_as_it_is_held(library: Callable[..., Library]) -> None:
    made = library()
    graph = driver.record(7, lambda stream: made.log.append(f"enqueue on {stream}"))
    assert made.log == ["StreamBeginCapture", "enqueue on 7", "StreamEndCapture"]
    del graph
    assert made.log[3:] == ["GraphDestroy"]


def test_a_capture_that_fails_is_ended(library: Callable[..., Library]) -> None:
    made = library()

    def fail(stream: int) -> None:
        raise ValueError("no product")

    with pytest.raises(ValueError, match="no product"):
        driver.record(7, fail)
    assert made.log == ["StreamBeginCapture", "StreamEndCapture", "GraphDestroy"]
    made = library(cuStreamEndCapture=901)
    with pytest.raises(CudaError, match="cuStreamEndCapture: code 901"):
        driver.record(7, lambda stream: None)


def test_graphs_of_one_plan_are_shown_in_turn_by_one_executable(library: Callable[..., Library]) -> None:
    made = library(nodes=(KERNEL, EVENT))
    one, other = driver.Graph(11), driver.Graph(12)
    ready = driver.Executable()
    for graph in (one, one, other):
        ready.show(graph)
        ready.launch(7)
    assert made.log == [
        "GraphInstantiateWithFlags", "GraphLaunch", "GraphExecUpdate", "GraphLaunch", "GraphExecUpdate", "GraphLaunch",
    ]  # fmt: skip
    del ready
    assert made.log[6:] == ["GraphExecDestroy"]


def test_kernels_alone_are_shown_once(library: Callable[..., Library]) -> None:
    """They know addresses, which stay: a launch of the graph that was shown last is no more than a launch."""
    made = library(nodes=(KERNEL, KERNEL))
    one, other = driver.Graph(11), driver.Graph(12)
    ready = driver.Executable()
    for graph in (one, one, one, other, one):
        ready.show(graph)
        ready.launch(7)
    assert made.log == [
        "GraphInstantiateWithFlags", "GraphLaunch", "GraphLaunch", "GraphLaunch",
        "GraphExecUpdate", "GraphLaunch", "GraphExecUpdate", "GraphLaunch",
    ]  # fmt: skip


def test_what_could_not_be_shown_is_shown_anew(library: Callable[..., Library]) -> None:
    """An update that fails leaves nothing that a later call could launch."""
    made = library(nodes=(KERNEL,), cuGraphExecUpdate_v2=1)
    one, other = driver.Graph(11), driver.Graph(12)
    ready = driver.Executable()
    ready.show(one)
    made.codes["cuGraphInstantiateWithFlags"] = 2
    with pytest.raises(CudaError):
        ready.show(other)
    made.codes.clear()
    made.log.clear()
    ready.show(one)
    assert made.log == ["GraphInstantiateWithFlags"]


def test_copies_are_set_anew_for_every_launch(library: Callable[..., Library]) -> None:
    """The driver keeps what memory was at their addresses, and uses that."""
    made = library(nodes=(KERNEL, COPY, EVENT, WORDS, SET, COPY))
    graph = driver.Graph(11)
    ready = driver.Executable()
    assert graph.known
    for _ in range(2):
        ready.show(graph)
        ready.launch(7)
    assert made.log == [
        "Memcpy", "Memset", "Memcpy", "GraphInstantiateWithFlags", "GraphLaunch",
        "Memcpy", "Memset", "Memcpy", "GraphExecUpdate", "GraphLaunch",
    ]  # fmt: skip
    copy, memory = [*range(22), 64, 1, 1], [*range(4), 1]
    assert made.set == [(2, copy), (5, memory), (6, copy)] * 2


@pytest.mark.parametrize(("node", "kind"), [(COPY, "Memcpy"), (SET, "Memset")])
def test_a_copy_that_cannot_be_set_is_an_error(
    node: tuple[int, int], kind: str, library: Callable[..., Library]
) -> None:
    library(nodes=(KERNEL, node), **{f"cuGraph{kind}NodeSetParams": 1})
    with pytest.raises(CudaError, match=f"cuGraph{kind}NodeSetParams: code 1"):
        driver.Executable().show(driver.Graph(11))


def test_copies_are_told_where_from(library: Callable[..., Library]) -> None:
    """Those that are followed; the others stay what they are."""
    made = library(nodes=(COPY, (1, 1, 300, 400), (1, 1, 500, 600)))
    graph, ready = driver.Graph(11), driver.Executable()
    assert not graph.follows
    graph.follow([(600, 500), (400, 300)])
    assert (graph.known, graph.follows) == (True, True)
    for sources in ((501, 301), (502, 302)):
        ready.show(graph, sources)
        froms = [(node, words[driver._FROM], words[driver._TO]) for node, words in made.set[-3:]]
        assert froms == [(1, 6, 17), (2, sources[1], 400), (3, sources[0], 600)]


@pytest.mark.parametrize(
    "copies", [[(400, 301)], [(401, 300)], [(400, 300), (400, 300)], [(402, 302)], [(403, 303)]],
    ids=["from elsewhere", "to elsewhere", "twice", "from an offset", "to an offset"],
)  # fmt: skip
def test_what_cannot_be_followed_is_not_known(copies: list[tuple[int, int]], library: Callable[..., Library]) -> None:
    library(nodes=(COPY, (1, 1, 300, 400), (1, 1, 302, 402, 0), (1, 1, 303, 403, 14), SET))
    graph = driver.Graph(11)
    assert graph.known
    graph.follow(copies)
    assert not graph.known
    assert not graph.follows


def test_a_graph_that_is_not_known_stays_so(library: Callable[..., Library]) -> None:
    library(nodes=((1, 1, 300, 400), (99, 0)))
    graph = driver.Graph(11)
    graph.follow([(400, 300)])
    assert not graph.known


@pytest.mark.parametrize("node", [(1, 2), (2, 2), (3, 0), (4, 0), (7, 0), (8, 0), (10, 0), (13, 0), (99, 0)])
def test_what_else_there_is_in_a_graph_is_not_known(node: tuple[int, int], library: Callable[..., Library]) -> None:
    """Several rows; calls of the host, graphs in graphs, records of events, semaphores, allocations, conditions."""
    library(nodes=(KERNEL, COPY, node))
    assert not driver.Graph(11).known


def test_what_cannot_be_brought_up_to_date_is_made_anew(library: Callable[..., Library]) -> None:
    made = library(cuGraphExecUpdate_v2=910)
    one, other = driver.Graph(11), driver.Graph(12)
    ready = driver.Executable()
    for graph in (one, other):
        ready.show(graph)
    assert made.log == [
        "GraphInstantiateWithFlags", "GraphExecUpdate", "GraphExecDestroy", "GraphInstantiateWithFlags",
    ]  # fmt: skip


def test_without_memory_for_an_executable_it_is_an_error_each_time(library: Callable[..., Library]) -> None:
    library(cuGraphInstantiateWithFlags=2)
    graph = driver.Graph(11)
    ready = driver.Executable()
    for _ in range(2):
        with pytest.raises(CudaError, match="cuGraphInstantiateWithFlags: code 2"):
            ready.show(graph)


# --- small operands -------------------------------------------------------------------------------------------------
def at(address: int, *sizes: int) -> Any:
    """Like a tensor of fp32 that lies there, of bytes that nobody looks at."""
    strides = [*itertools.accumulate([1, *sizes[:0:-1]], operator.mul)][::-1]
    return SimpleNamespace(
        data_ptr=lambda: address, shape=sizes, stride=lambda: tuple(strides), itemsize=4, dtype=torch.float32,
        numel=lambda: math.prod(sizes),
    )  # fmt: skip


def with_small(kept: Recordings, here: Recorder, *places: int, sizes: tuple[int, ...] = (8,)) -> list[str]:
    """The events of calls with a small operand at each of these addresses."""
    here.events.clear()
    for place in places:
        kept.run(MAIN, Work(0, (1,), here.enqueue, small=[at(place, *sizes)]), urgent=False)
    return here.events


def test_a_small_operand_that_stays_is_not_copied(here: Recorder) -> None:
    assert with_small(new(), here, 512, 512, 512) == ["enqueue", "record", *["show 1", "launch"] * 2]


def test_one_that_moves_is_copied_from_wherever_it_is(here: Recorder) -> None:
    """From the second call on, whatever its address; a call where nothing moved is another recording."""
    kept = new()
    assert with_small(kept, here, 512, 1024, 2048, 512) == [
        "enqueue", "record", "show 1 of 1024", "launch", "show 1 of 2048", "launch", "show 1 of 512", "launch",
    ]  # fmt: skip
    assert len(kept) == 1
    stays = new()
    assert with_small(stays, here, 512, 512)[-1] == "launch"
    assert with_small(stays, here, 1024, 1024, 512, 2048) == [
        "record", *["show 1 of 1024", "launch"] * 2, "show 1", "launch", "show 1 of 2048", "launch",
    ]  # fmt: skip
    assert len(stays._ready) == 2, "an executable graph is updated to one of the same nodes"


def test_its_place_is_aligned_as_it_is(here: Recorder) -> None:
    """cuBLAS may choose by that, and so round differently."""
    kept = new()
    with_small(kept, here, 512, 1024)
    assert with_small(kept, here, 1024 + 16, 2048 + 16)[:2] == ["enqueue", "record"]
    assert with_small(kept, here, 4096 + 16)[-1] == "launch"
    assert len(kept) == 2


def test_once_it_stays_it_is_not_copied_any_more(here: Recorder) -> None:
    """Every copy takes time on the GPU. One that goes to and fro is copied for ever."""
    kept, settled = new(), recordings.SETTLED
    assert with_small(kept, here, 512, 1024, *[2048] * settled)[-2:] == ["show 1 of 2048", "launch"]
    assert with_small(kept, here, 2048, 2048) == ["record", *["show 1", "launch"] * 2]
    assert with_small(kept, here, 4096) == ["show 1 of 4096", "launch"]
    assert "record" not in with_small(kept, here, *[512, 1024] * 20)
    full = new(most=1)
    with_small(full, here, 512, 1024)
    assert with_small(full, here, *[2048] * 3 * settled)[-2:] == ["show 1 of 2048", "launch"]
    assert full._turned_away == 0


def test_alignments_that_come_once_are_not_recorded(here: Recorder) -> None:
    """A slice of a packed tensor may begin anywhere."""
    kept = new()
    assert with_small(kept, here, *[4096 + 16 * n for n in range(16)]) == ["enqueue"] * 16
    assert with_small(kept, here, *[8192 + 16 * n for n in range(16)])[::3] == ["record"] * 16


def test_one_that_stays_for_some_calls_each_time_is_copied(here: Recorder) -> None:
    """As a weight's scale, which every step makes anew, for all of its batches."""
    kept = new()
    places = [512 * (1 + step) for step in range(20) for _ in range(2 * recordings.SETTLED)]
    assert with_small(kept, here, *places).count("record") == 3
    assert with_small(kept, here, *[512 * 99] * (recordings.SETTLED**2 + 2))[-2:] == ["show 1", "launch"]


@pytest.mark.parametrize("known", [True, False], ids=["it fails", "its graph is not known"])
def test_copies_go_on_where_it_cannot_be_recorded_without(known: bool, here: Recorder) -> None:
    """It is not tried again at once, and others of the plan are recorded."""
    kept, first = new(), ["enqueue", "record", "show 1 of 1024", "launch"]
    assert with_small(kept, here, 512, 1024) == first
    here.fails, here.known = "record" if known else "", known
    events = with_small(kept, here, *[2048] * 2 * recordings.SETTLED)
    assert events.count("record") == (not known)
    assert [event for event in events if event != "record"] == ["show 1 of 2048", "launch"] * 2 * recordings.SETTLED
    here.fails, here.known = "", True
    assert calls(kept, here, (0, 7), (0, 7)) == ["enqueue", "record", "show 1", "launch"]


def test_work_of_one_kernel_that_moves_is_recorded_late(here: Recorder) -> None:
    kept, late = new(), recordings.OF_ONE_KERNEL
    for n in range(late + 2):
        kept.run(MAIN, Work(0, (1,), here.enqueue, small=[at(512 * (n + 1), 8)], patience=late), urgent=False)
    first, second = (f"show 1 of {512 * (n + 1)}" for n in (late, late + 1))
    assert here.events == [*["enqueue"] * late, "record", first, "launch", second, "launch"]


@pytest.mark.parametrize("other", [(4,), (0,)], ids=["beside one that is near", "of nothing"])
def test_one_that_cannot_be_copied_is_enough(other: tuple[int, ...], here: Recorder) -> None:
    kept = new()
    for place in (512, 1024, 512, 1024):
        far = at(place, 4, 1)
        far.stride = lambda: (100, 1)
        small = [at(place, 8), at(place, *other) if other == (0,) else far]
        kept.run(MAIN, Work(0, (1,), here.enqueue, small=small), urgent=False)
    assert here.events == ["enqueue", "enqueue", "record", "show 1", "launch", "record", "show 2", "launch"]


def test_what_is_forgotten_begins_anew(here: Recorder) -> None:
    kept = new()
    with_small(kept, here, 512)
    kept.clear()
    assert with_small(kept, here, 512) == ["enqueue"]


def test_what_lies_far_apart_is_not_copied(here: Recorder) -> None:
    """A column of a large matrix: all that lies between would be."""
    kept = new()
    column = at(512, 4, 1)
    column.stride = lambda: (100, 1)
    moved = at(1024, 4, 1)
    moved.stride = column.stride
    here.events.clear()
    for operand in (column, moved, column, moved, moved):
        kept.run(MAIN, Work(0, (1,), here.enqueue, small=[operand]), urgent=False)
    first, second = (["record", f"show {number}", "launch"] for number in (1, 2))
    assert here.events == ["enqueue", "enqueue", *first, *second, "show 2", "launch"]


def test_places_hold_what_they_are_given() -> None:
    """For operands of any strides and alignment."""
    whole = torch.arange(1000.0)
    for small in (whole[3:17], whole[5:29].view(4, 6).t(), whole[7:8].expand(9, 1), whole[:0], whole[40:80:2]):
        (size,) = rooms_for([small])
        room = room_for(size)
        place = recordings.placed(small, room)
        assert (place.shape, place.stride(), place.dtype) == (small.shape, small.stride(), small.dtype)
        assert (place.data_ptr() - small.data_ptr()) % recordings.ALIGNMENT == 0 or not small.numel()
        ctypes.memmove(place.data_ptr(), small.data_ptr(), recordings._span(small))
        assert torch.equal(place, small)


def test_work_of_one_kernel_is_recorded_late(here: Recorder) -> None:
    kept, late = new(), recordings.OF_ONE_KERNEL
    for _ in range(late + 1):
        kept.run(MAIN, Work(0, (1,), here.enqueue, patience=late), urgent=False)
    assert here.events == [*["enqueue"] * late, "record", "show 1", "launch"]
