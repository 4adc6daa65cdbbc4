"""Bound calls do what the op does, and stop where anything has changed that the op would look at."""

from __future__ import annotations

import functools
import gc
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import cublaslt_emulated
from asynctp_kernels import cuda
from asynctp_kernels.cuda import calls, moves
from asynctp_kernels.cuda.runtime import driver, edited
from asynctp_kernels.cuda.runtime.driver import CudaError
from asynctp_kernels.errors import SymmetricMemoryError
from bound import bound, collective, moved_by_op, named_group, operands
from cuda_stubs import Awaited, Copied, Group, Launched, Machine, gather_call, machine, scatter_call
from driver_of_c import need_c
from host_costs import counted
from plan_runs import IMPLEMENTATIONS, OPS, RANK, ROWWISE, TENSORWISE, WORLD
from plan_runs import op as by_op
from torch import Tensor

from asynctp_passes.ops.calls import AllReduceCall

CALLS: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather_call((192,), 64, (72,)),
    "gather, A returned": lambda: gather_call((192,), 64, (72, 8), full=True, bias=True),
    "gather, scales": lambda: gather_call((192,), 64, (80,), **ROWWISE, travels=True),
    "gather, numbers along": lambda: gather_call((192,), 64, (80,), **TENSORWISE, along=True),
    "scatter": lambda: scatter_call((768,), (64,), 72),
    "scatter of a sum": lambda: scatter_call((2, 400), (64, 8), 72, dim=1, added=True),
    "scatter, scales": lambda: scatter_call((768,), (64,), 80, **ROWWISE, bias=True),
    "all-reduce": lambda: replace(scatter_call((64,), (64,), 72), scatter_dim=None),
    "all-reduce of rows of rows": lambda: replace(scatter_call((2, 32), (64,), 72, added=True), scatter_dim=None),
}


@pytest.fixture(params=["enqueued", "launched by Python", "launched by C"])
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if request.param == "launched by C":
        need_c()
    else:
        monkeypatch.setattr(edited, "native", lambda: "no compiler")
    with machine(RANK, WORLD) as made, named_group(made):
        made.kernels, made.edits = {}, request.param != "enqueued"  # nothing is computed
        yield made


def op(here: Machine, call: Any) -> Any:
    """The call by its op; before that another one, whose successor is captured."""
    by_op(here, call)
    return by_op(here, call)


def made_by(here: Machine, do: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """What a call gives, and what it asks the driver for."""
    here.log.clear()
    return do(), list(here.log)


def kinds(log: list[Any]) -> list[Any]:
    """What was asked for, and on which stream; tensors of a call are elsewhere each time."""
    return [(type(entry), entry.stream, getattr(getattr(entry, "prepared", None), "name", "")) for entry in log]


def able() -> Iterator[tuple[str, str]]:
    """(case, implementation) for all that can run it: no GEMM adds a term that is none of its matmuls."""
    for case in CALLS:
        for implementation in IMPLEMENTATIONS:
            if implementation != "fused" or CALLS[case]().kind == "gather" or CALLS[case]().added is None:
                yield case, implementation


@pytest.mark.parametrize(("case", "implementation"), able())
def test_a_bound_call_enqueues_what_the_op_does(case: str, implementation: str, here: Machine) -> None:
    call = CALLS[case]()
    with cuda.forced(implementation):
        op(here, call)
        expected, asked = made_by(here, lambda: by_op(here, call))
        one = bound(here, call)
        assert one is not None
        count = calls.made[OPS[call.kind], implementation]
        found, directly = made_by(here, lambda: one(*operands(call)))
    assert kinds(directly) == kinds(asked) != []
    assert calls.made[OPS[call.kind], implementation] == count + 1
    several = [expected, found] if isinstance(expected, Tensor) else zip(expected, found, strict=True)
    for wanted, given in [several] if isinstance(expected, Tensor) else several:
        assert (wanted.shape, wanted.stride(), wanted.dtype) == (given.shape, given.stride(), given.dtype)
        assert wanted.data_ptr() != given.data_ptr() or not wanted.numel()


@pytest.fixture
def gather(here: Machine) -> Any:
    """A call that its op has made."""
    call = CALLS["gather"]()
    op(here, call)
    return call


def test_a_call_that_no_plan_makes_is_not_bound(here: Machine) -> None:
    """Before its op has made it, and where the op's own program does."""
    call = CALLS["gather"]()
    assert bound(here, call) is None
    here.memory  # noqa: B018  (made now)
    assert bound(here, call) is None
    with cuda.forced("whole"):
        op(here, call)
        assert bound(here, call) is None


def changes(here: Machine) -> dict[str, Callable[[], Any]]:
    memory = here.memory
    name, area = next(iter(memory.areas.items()))
    return {
        "released": lambda: cuda.release(here.group),
        "grown": lambda: memory.require(name, area.size + 1),
        "forgotten": memory.forget_plans,
        "a call was left out": lambda: setattr(memory, "skipped", memory.skipped + 1),
        "the group is another one of its name": lambda: setattr(here, "group", Group(RANK, WORLD)),
        "there is no such group": lambda: setattr(here, "group", None),
    }


@pytest.mark.parametrize(
    "change",
    [
        "released", "grown", "forgotten", "a call was left out", "the group is another one of its name",
        "there is no such group",
    ],
)  # fmt: skip
def test_a_call_holds_no_more_after(change: str, here: Machine, gather: Any) -> None:
    one = bound(here, gather)
    assert one is not None
    kept = here.group  # as a program may keep a group that it has destroyed
    assert one(*operands(gather)) is not None
    assert one.holds()
    changes(here)[change]()
    found, log = made_by(here, lambda: one(*operands(gather)))
    assert (found, log, one.holds()) == (None, [], False)
    assert kept is not None


def test_a_call_waits_for_another_implementation_to_be_asked_for_no_more(here: Machine, gather: Any) -> None:
    one = bound(here, gather)
    assert one is not None
    with cuda.forced("direct"):
        assert one(*operands(gather)) is None
        assert not one.holds()
    assert one(*operands(gather)) is not None


def test_a_capture_and_another_device_are_the_ops(here: Machine, gather: Any) -> None:
    """The call is bound still: afterwards it is made."""
    one = bound(here, gather)
    assert one is not None
    here.capturing = 7
    assert made_by(here, lambda: one(*operands(gather))) == (None, [])
    here.capturing = 0
    here.current_device = 3
    assert made_by(here, lambda: one(*operands(gather))) == (None, [])
    here.current_device = None
    assert one.holds()
    assert one(*operands(gather)) is not None


def test_a_group_that_has_failed_raises_its_error(here: Machine, gather: Any) -> None:
    one = bound(here, gather)
    assert one is not None
    here.memory.fail(RuntimeError("rank 2 did not come"))
    with pytest.raises(SymmetricMemoryError, match="out of step since: RuntimeError: rank 2 did not come") as told:
        by_op(here, gather)
    with pytest.raises(SymmetricMemoryError) as directly:
        one(*operands(gather))
    assert str(directly.value) == str(told.value)


def test_a_call_that_raises_half_way_is_the_groups_failure(here: Machine, gather: Any) -> None:
    one = bound(here, gather)
    assert one is not None
    here.prepared.clear()  # so that no kernel can be launched
    with pytest.raises(IndexError):
        one(*operands(gather))
    assert here.memory.failure is not None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_operands_at_odd_addresses_are_copied_first(implementation: str, here: Machine) -> None:
    """As the op does it: kernels take no address that is not a multiple of 16 bytes (`check_promises`)."""
    call = CALLS["gather"]()
    with cuda.forced(implementation):
        op(here, call)
        one = bound(here, call)
        assert one is not None
        odd = torch.zeros(call.a_shard.numel() + 1, dtype=call.a_shard.dtype)[1:].view(call.a_shard.shape)
        assert odd.data_ptr() % 16
        assert one(odd, call.bs, call.biases) is not None
        _, log = made_by(here, lambda: one(odd, call.bs, call.biases))
        assert odd.data_ptr() not in {entry.src for entry in log if isinstance(entry, Copied)}


def test_it_keeps_neither_group_nor_memory(here: Machine, gather: Any) -> None:
    one = bound(here, gather)
    assert one is not None
    memory, group = weakref.ref(here.memory), weakref.ref(here.group)
    here.log.clear()
    here.group = None
    gc.collect()
    assert (memory(), group()) == (None, None)
    assert one(*operands(gather)) is None
    assert not one.holds()


def test_two_places_with_one_plan_take_turns(here: Machine, gather: Any) -> None:
    """Each sends its own shard: a plan has none."""
    with cuda.forced("fused"):
        take_turns(here, gather)


def take_turns(here: Machine, gather: Any) -> None:
    op(here, gather)
    first, second = bound(here, gather), bound(here, gather)
    assert first is not None
    assert second is not None
    other = replace(gather, a_shard=gather.a_shard.clone())
    shards = []
    for one, call in ((first, gather), (second, other), (first, gather), (second, other)):
        _, log = made_by(here, lambda one=one, call=call: one(*operands(call)))
        shards.append({entry.src for entry in log if isinstance(entry, Copied)})
    assert shards[0] == shards[2] == {gather.a_shard.data_ptr()}
    assert shards[1] == shards[3] == {other.a_shard.data_ptr()}


# --- what C code leaves to Python, or raises ------------------------------------------------------------------------
@pytest.fixture
def in_c() -> Iterator[Machine]:
    need_c()
    with machine(RANK, WORLD) as made, named_group(made):
        made.kernels, made.edits = {}, True
        yield made


def of_c(here: Machine, call: Any) -> Any:
    """The call, bound, whose graph is made."""
    op(here, call)
    one = bound(here, call)
    assert type(one).__name__ == "Call"
    return one


@pytest.mark.parametrize(
    ("case", "implementation", "directly"),
    [
        ("gather", "fused", True),
        ("gather, A returned", "fused", True),
        ("gather, scales", "fused", True),
        ("scatter", "fused", True),
        ("scatter, scales", "fused", True),
        ("all-reduce", "fused", True),
        ("all-reduce", "direct", True),
        ("gather, numbers along", "fused", False),  # a view of what is made is returned
        ("scatter", "direct", False),  # its matmul is cuBLAS's
        ("scatter", "decomposed", False),
    ],
)
def test_calls_whose_plans_have_graphs_are_made_in_c(
    case: str, implementation: str, directly: bool, in_c: Machine
) -> None:
    call = CALLS[case]()
    with cuda.forced(implementation):
        op(in_c, call)
        one = bound(in_c, call)
        found = counted(lambda: one(*operands(call)))
    assert (found.cost.functions == 0) == directly, found.functions


@pytest.mark.parametrize("case", ["gather", "gather, scales", "scatter", "scatter, scales"])
def test_matmuls_of_cublaslt_are_made_in_c(case: str, in_c: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `direct`, with scales of rows too."""
    call = CALLS[case]()
    for library in cublaslt_emulated.emulate(monkeypatch):
        with cuda.forced("direct"):
            one = of_c(in_c, call)
            library.log.clear()
            assert counted(functools.partial(one, *operands(call))).cost.functions == 0
        assert len(library.log) == 1


def test_rows_of_rows_of_an_all_reduce_come_back_as_such(in_c: Machine) -> None:
    call = replace(scatter_call((2, 32), (64,), 72), scatter_dim=None)
    with cuda.forced("fused"):
        one = of_c(in_c, call)
        assert counted(lambda: one(*operands(call))).cost.functions == 0
        assert one(*operands(call)).shape == (2, 32, 72)


def test_a_launch_that_the_driver_refuses_is_the_groups_failure(in_c: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS["gather"]()
    with cuda.forced("fused"):
        one = of_c(in_c, call)
        monkeypatch.setattr(driver, "error_text", "{}: {}".format)
        monkeypatch.setitem(in_c.functions, "cuGraphLaunch", lambda *_: 719)
        with pytest.raises(CudaError, match="cuGraphLaunch: 719"):
            one(*operands(call))
        assert in_c.memory.failure == "CudaError: cuGraphLaunch: 719"
        assert not in_c.memory.turn.locked()
        with pytest.raises(SymmetricMemoryError, match="out of step since: CudaError: cuGraphLaunch: 719"):
            one(*operands(call))


def test_an_address_that_the_driver_does_not_take_is_pythons(in_c: Machine) -> None:
    """Nothing was enqueued in C; in Python the call is made."""
    call = CALLS["gather"]()
    with cuda.forced("fused"):
        one = of_c(in_c, call)
        (plan,) = in_c.memory.plans.values()
        asked = list[str]()
        in_c.functions["cuGraphExecMemcpyNodeSetParams"] = lambda *_: asked.append("copy") or 1
        graph = plan.graph.graph  # type: ignore[attr-defined]
        copy = struct.pack("4Q", 1, 2, 3, 0)
        graph.native = edited.native().Graph(in_c.of_c.table, 0, copy, b"", 1)
        found, log = made_by(in_c, lambda: one(*operands(call)))
    assert (len(found), asked) == (1, ["copy"])
    assert [kind for kind, _, name in kinds(log) if name == "gemm_kernel"] == [Launched]
    assert not in_c.memory.turn.locked()


def test_a_call_whose_turn_another_thread_has_waits_for_it(in_c: Machine) -> None:
    call = CALLS["gather"]()
    with cuda.forced("fused"):
        one, held, result = of_c(in_c, call), threading.Event(), list[Any]()
        turn = in_c.memory.turn
        turn.acquire()
        thread = threading.Thread(target=lambda: (held.set(), result.append(one(*operands(call)))))
        thread.start()
        held.wait()
        thread.join(0.2)
        assert thread.is_alive()
        turn.release()
        thread.join()
    assert len(result[0]) == 1


def test_memory_is_released_once_a_call_of_another_thread_is_enqueued(
    in_c: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is over then, too: the GPU is waited for after it. No call begins in between."""
    call = CALLS["gather"]()
    with cuda.forced("fused"):
        one, launches, launched, did = of_c(in_c, call), threading.Event(), threading.Event(), list[str]()
        launch = in_c.functions["cuGraphLaunch"]

        def slow(*given: Any) -> None:
            launches.set()
            launched.wait(10)
            launch(*given)
            did.append("launched")

        in_c.functions["cuGraphLaunch"] = slow
        monkeypatch.setattr(driver, "synchronize", lambda device: did.append("waited"))
        made = threading.Thread(target=lambda: one(*operands(call)))
        released = threading.Thread(target=cuda.release, args=[in_c.group])
        made.start()
        assert launches.wait(10)
        released.start()
        released.join(0.2)
        launched.set()
        made.join()
        released.join()
        assert did == ["launched", "waited"]
        assert one(*operands(call)) is None


@pytest.mark.parametrize("kind", ["gather", "left in flight", "waited for at once"])
@pytest.mark.parametrize("stream", ["the same", "another"])
@pytest.mark.parametrize("flying", ["nothing", "own", "another group's"])
def test_its_order_is_that_of_python(kind: str, stream: str, flying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the device's last call, and after what is in flight."""
    need_c()
    logs = []
    for with_c in (True, False):
        if not with_c:
            monkeypatch.setattr(edited, "native", lambda: "no compiler")
        with machine(RANK, WORLD) as here, named_group(here), cuda.forced("fused"):
            here.kernels, here.edits = {}, True
            one, given = made_twice(here, kind)
            order = here.memory.orders[False]
            if flying != "nothing":
                here.memory.gathers[False] = (here.memory.gathers[False][0], 0)
                order.flown, order.group = 555, here.memory.number + (flying != "own")
            if stream == "another":
                here.current_stream = 0 if here.current_stream else 77
            _, log = made_by(here, lambda one=one, given=given: one(*given))
            enqueued = [entry for entry in log if not getattr(entry, "at_launch", False)]
            events = [(type(entry), entry.event, entry.stream) for entry in enqueued if hasattr(entry, "event")]
            order.group = order.group == here.memory.number
            fields = [getattr(order, name) for name, _ in order._fields_]
            logs.append((events, [type(entry) for entry in log], fields, len(moves.flying)))
            moves.flying.clear()
    assert logs[0] == logs[1]


def made_twice(here: Machine, kind: str) -> tuple[Any, tuple[Any, ...]]:
    """A bound call and its tensors, after its op has made it twice."""
    if kind == "gather":
        call = CALLS["gather"]()
        op(here, call)
        return bound(here, call), operands(call)
    large = collective(here, "reduce_scatter", 8, 8)
    if kind == "waited for at once":
        large = AllReduceCall(large[0], "sum", here.group.group_name)
    with mock.patch.object(moves, "register_wait"):
        for _ in range(2):
            moved_by_op(here, large)
    return cuda.bind(large), (large[0],)


@pytest.mark.thorough
def test_the_c_code_keeps_to_its_memory(tmp_path: Path) -> None:
    """These tests and those of graphs pass with C code that AddressSanitizer watches."""
    need_c()
    library = subprocess.check_output(["gcc", "-print-file-name=libasan.so"], text=True).strip()
    if not Path(library).is_absolute():
        pytest.skip("gcc has no AddressSanitizer here")
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec gcc -fsanitize=address,undefined -g "$@"\n')
    compiler.chmod(0o755)
    own = {"CC": str(compiler), "TRITON_CACHE_DIR": str(tmp_path), "LD_PRELOAD": library}
    tests = [str(Path(__file__)), str(Path(__file__).with_name("test_edited.py"))]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-k",
        "C or in_c",
        *tests,
    ]
    environment = {**os.environ, **own, "ASAN_OPTIONS": "detect_leaks=0", "HYPOTHESIS_PROFILE": "default"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- collectives without a matmul -----------------------------------------------------------------------------------
WAYS = [
    (op, way) for op in ("all_gather", "reduce_scatter", "all_reduce") for way in ("direct", "fused")
    if (op, way) != ("all_reduce", "fused")  # of few bytes: it is direct
]  # fmt: skip


@pytest.mark.parametrize("shape", [(64,), (8, 3, 8)])
@pytest.mark.parametrize(("op", "way"), WAYS)
def test_a_bound_collective_enqueues_what_its_op_does(op: str, way: str, shape: tuple[int, ...], here: Machine) -> None:
    call = collective(here, op, *shape)
    with cuda.forced(way), mock.patch.object(moves, "register_wait"):
        for _ in range(2):
            moved_by_op(here, call)
        wanted, asked = made_by(here, lambda: moved_by_op(here, call))
        one = cuda.bind(call)
        counted_as = (op, {"direct": "direct", "fused": "copy engine"}[way])
        count = moves.moved[counted_as]
        found, directly = made_by(here, lambda: one(call[0]))
    assert kinds(directly) == kinds(asked) != []
    assert moves.moved[counted_as] == count + 1
    assert (wanted.shape, wanted.stride(), wanted.dtype) == (found.shape, found.stride(), found.dtype)
    assert wanted.data_ptr() != found.data_ptr()
    assert cuda.land(found) == (way == "fused"), "in flight until then"
    assert not cuda.land(found)
    assert not moves.flying


def in_flight(here: Machine) -> tuple[Any, Tensor]:
    """A gather that is bound, whose result is left in flight, and its shard."""
    call = collective(here, "all_gather", 8, 8)
    with mock.patch.object(moves, "register_wait"):
        for _ in range(2):
            moved_by_op(here, call)
    return cuda.bind(call), call[0]


def test_the_stream_of_a_wait_comes_after_what_is_in_flight(here: Machine) -> None:
    """On another stream the allocator is told of the shard, which is free once nobody waits any more."""
    with cuda.forced("fused"):
        one, shard = in_flight(here)
        land, results = cuda.bound_land(), [one(shard), one(shard)]
    assert len(moves.flying) == 2
    events = [done for *_, done in moves.flying.values()]
    stream = here.current_stream
    here.kept.clear()
    for found, event, on in zip(reversed(results), reversed(events), (42, stream), strict=True):
        here.current_stream = on
        landed, log = made_by(here, lambda found=found: land(found))
        assert (landed, land(found)) == (True, False)
        assert [(entry.stream, entry.event) for entry in log if isinstance(entry, Awaited)] == [(on, event)]
    assert here.kept == [(shard.data_ptr(), 42)]
    assert not moves.flying


def test_a_result_that_nobody_waits_for_is_kept_until_it_is_complete(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = set[int]()
    monkeypatch.setattr(driver, "is_over", over.__contains__)
    with cuda.forced("fused"):
        one, shard = in_flight(here)
        for _ in range(moves.MOST_FLYING + 3):
            one(shard)
        assert len(moves.flying) == moves.MOST_FLYING + 3
        over |= {done for *_, done in moves.flying.values()}
        first, latest = next(iter(moves.flying)), one(shard)
        assert len(moves.flying) == moves.MOST_FLYING + 3
        assert first not in moves.flying or first == latest.data_ptr()
        assert cuda.bound_land()(latest)
        moves.flying.clear()


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_what_torchs_wait_completes_is_the_ops(op: str, here: Machine) -> None:
    """It reads a copy, in flight; of few bytes nothing is to be completed."""
    call = collective(here, op, 8, 8, copy=True)
    for way, is_bound in (("fused", False), ("direct", True)):
        with cuda.forced(way), mock.patch.object(moves, "register_wait"):
            moved_by_op(here, call)
            assert (cuda.bind(call) is not None) == is_bound


def test_a_collective_of_nccls_is_not_bound(here: Machine) -> None:
    with cuda.forced("sequential"):
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            call = collective(here, op, 8, 8)
            assert moved_by_op(here, call) is None
            assert cuda.bind(call) is None


@pytest.mark.parametrize(("op", "way"), WAYS)
def test_collectives_are_made_in_c(op: str, way: str, in_c: Machine) -> None:
    call = collective(in_c, op, 8, 8)
    with cuda.forced(way), mock.patch.object(moves, "register_wait"):
        for _ in range(2):
            moved_by_op(in_c, call)
        one = cuda.bind(call)
        given = call[0]
        found = counted(lambda: one(given))
        assert (type(one).__name__, found.cost.functions) == ("Call", 0), found.functions
        moves.flying.clear()
        cuda.release(in_c.group)
        assert one(call[0]) is None
        assert not one.holds()
