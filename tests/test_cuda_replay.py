"""Launches that are made again with other addresses, without a GPU: the driver's part is played here."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels.cuda import driver, launch, replay
from asynctp_kernels.cuda.driver import CudaError
from asynctp_kernels.cuda.launch import Tma
from triton.tools.tensor_descriptor import TensorDescriptor

STREAM, FUNCTION = 5, 77


class Driver:
    """Keeps what is launched. A kernel's parameters are the bytes that `params(values)` makes of its arguments."""

    def __init__(self, params: Callable[[tuple[Any, ...]], list[bytes]]) -> None:
        self.params = params
        self.sizes: list[int] = []
        self.launched: list[tuple[tuple[Any, ...], list[bytes]]] = []

    @contextlib.contextmanager
    def recorded(self, start: Callable[[int], None]) -> Iterator[Any]:
        self.given: list[bytes] = []
        start(1)
        buffers = [ctypes.create_string_buffer(param, len(param)) for param in self.given]
        pointers = (ctypes.c_void_p * len(buffers))(*[ctypes.addressof(buffer) for buffer in buffers])
        node = replay._Node(function=FUNCTION, grid=(4, 1, 1), block=(128, 1, 1), shared=9)
        node.params = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        self.sizes = [len(param) for param in self.given]
        yield node
        for buffer in buffers:  # the driver's copy is gone with the graph
            ctypes.memset(buffer, 0xFF, len(buffer))

    def run(self, *values: Any, stream: int) -> None:
        self.given = self.params(values)

    def launch(self, function: int, *rest: Any) -> None:
        *shape, table, extra = rest
        assert extra is None
        found = [ctypes.string_at(table[i], size) for i, size in enumerate(self.sizes)]
        self.launched.append(((function, *shape), found))

    def replace_address(self, place: int, address: int) -> None:
        assert place % 64 == 0
        ctypes.memmove(place, word(address), 8)


def word(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def as_triton_does(values: tuple[Any, ...]) -> list[bytes]:
    """Addresses, maps with their sizes behind them, numbers; nothing for None; scratch at the end."""
    found: list[bytes] = []
    for value in values[:-1]:  # the last one is a constant
        if isinstance(value, TensorDescriptor):
            found += [word(value.base.data_ptr()) + b"map" + bytes(117), *[word(size, 4) for size in value.shape]]
        elif value is not None:
            found.append(word(value, 4 if value < 1 << 31 else 8))
    return [*found, word(0), word(0)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return use(Driver(as_triton_does), monkeypatch)


def use(here: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(replay, "_recorded", here.recorded)
    monkeypatch.setattr(replay, "_sizes", lambda function: here.sizes)
    monkeypatch.setattr(replay, "_launch", here.launch)
    monkeypatch.setattr(replay, "_replace_address", here.replace_address)
    return here


def descriptor() -> TensorDescriptor:
    return TensorDescriptor(torch.zeros(8, 16), [8, 16], [16, 1], [4, 16])


def test_addresses_are_put_where_they_were(made: Driver) -> None:
    first, second, whole = torch.zeros(4), torch.zeros(4), descriptor()
    again = replay.Replay(made.run, [first, None, whole, 7, second], (3,))
    for place in (1 << 40, 1 << 41):
        again(STREAM, [place, None, Tma(whole, place + 64), 7, place + 128])
    shape = (FUNCTION, 4, 1, 1, 128, 1, 1, 9, STREAM)
    assert made.launched == [
        (shape, as_triton_does((place, None, moved(whole, place + 64), 7, place + 128, 3)))
        for place in (1 << 40, 1 << 41)
    ]


def moved(like: TensorDescriptor, address: int) -> TensorDescriptor:
    """A descriptor of memory that is not there."""
    base: Any = SimpleNamespace(data_ptr=lambda: address)
    found = descriptor()
    found.base = base
    return found


def test_a_map_is_written_only_for_another_address(made: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(replay, "_replace_address", lambda place, address: written.append(address))
    whole = descriptor()
    again = replay.Replay(made.run, [whole], (3,))
    for address in (whole.base.data_ptr(), 64, 64, 128, 64):
        again(STREAM, [Tma(whole, address)])
    assert written == [64, 128, 64]


def test_what_is_not_found_again_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes the sum of its addresses, or its map in two pieces."""
    here = use(Driver(lambda values: [word(values[0] + values[1])]), monkeypatch)
    with pytest.raises(CudaError, match="2 of a kernel's addresses"):
        replay.Replay(here.run, [torch.zeros(4), torch.zeros(4)], (3,))
    here = use(Driver(lambda values: [bytes(64), bytes(64)]), monkeypatch)
    with pytest.raises(CudaError, match="or its descriptors, were not found again"):
        replay.Replay(here.run, [descriptor()], (3,))


class Kernel:
    """As far as `launch.prepare` looks at one."""

    __name__ = "kernel"

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run
        self.n_regs, self.metadata = 40, SimpleNamespace(shared=9)

    def warmup(self, *args: Any, **options: Any) -> Kernel:
        return self

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return self.run


@pytest.mark.parametrize("fixed", [True, False])
def test_numbers_that_change_are_left_to_triton(made: Driver, fixed: bool) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*values: Any, stream: int) -> None:
        calls.append((*values, stream))
        made.run(*values, stream=stream)

    prepared = launch.prepare(Kernel(run), 4, [torch.zeros(4), 7], {"SIZE": 3}, 4, fixed=fixed)
    calls.clear()
    prepared(STREAM, [4096, 7])
    assert calls == ([] if fixed else [(4096, 7, 3, STREAM)])
    assert len(made.launched) == fixed


def test_an_old_driver_leaves_launches_to_triton(
    made: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(replay, "_recorded", made.recorded)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace())
    calls: list[tuple[Any, ...]] = []

    def run(*values: Any, stream: int) -> None:
        calls.append((*values, stream))
        made.run(*values, stream=stream)

    with caplog.at_level("INFO"):
        prepared = launch.prepare(Kernel(run), 4, [torch.zeros(4), 7], {"SIZE": 3}, 4)
    assert "launches of kernel take Triton's host time: cuFuncGetParamInfo is of CUDA 12.4 and later" in caplog.text
    calls.clear()
    prepared(STREAM, [4096, 7])
    assert calls == [(4096, 7, 3, STREAM)]


def test_a_kernel_with_memory_for_each_launch_is_left_to_triton(made: Driver, caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel(made.run)
    kernel.metadata.profile_scratch_size = 64
    with caplog.at_level("INFO"):
        launch.prepare(kernel, 4, [torch.zeros(4), 7], {"SIZE": 3}, 4)(STREAM, [4096, 7])
    assert "launches of kernel take Triton's host time: a recording has no profile_scratch_size" in caplog.text
    assert made.launched == []


OPENED = ("cuThreadExchangeStreamCaptureMode", "cuStreamCreate", "cuStreamBeginCapture_v2", "cuStreamEndCapture")
CLOSED = ("cuGraphDestroy", "cuStreamDestroy_v2", "cuThreadExchangeStreamCaptureMode")


@pytest.mark.parametrize("fails", ["cuStreamCreate", "cuStreamBeginCapture_v2", "launch", "cuGraphGetNodes", ""])
def test_a_recording_leaves_nothing_behind(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails: graph and stream are destroyed as far as there are any, and the thread's mode is as it was."""
    calls: list[str] = []

    def call(name: str, *args: object) -> None:
        calls.append(name)
        if name == fails:
            raise CudaError(f"{name}: no")

    def start(stream: int) -> None:
        if fails == "launch":
            raise ValueError("launch: no")

    monkeypatch.setattr(driver, "call", call)
    with pytest.raises((CudaError, ValueError), match=f"{fails}: no" if fails else "a kernel's parameters"):  # noqa: SIM117
        with replay._recorded(start):
            pytest.fail("a driver that does nothing gives no parameters")
    expected = {
        "cuStreamCreate": (*OPENED[:2], CLOSED[-1]),
        "cuStreamBeginCapture_v2": (*OPENED[:3], *CLOSED[1:]),
        "launch": (*OPENED, *CLOSED),
        "cuGraphGetNodes": (*OPENED, "cuGraphGetNodes", *CLOSED),
        "": (*OPENED, "cuGraphGetNodes", "cuGraphKernelNodeGetParams_v2", *CLOSED),
    }
    assert tuple(calls) == expected[fails]
