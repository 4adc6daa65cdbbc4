"""How a graph's addresses are edited, without a GPU: the driver's part is played here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import cublaslt_emulated
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.cublaslt import Matmul, kinds
from asynctp_kernels.cuda.runtime import driver, edited
from asynctp_kernels.cuda.runtime.driver import Address, CudaError
from asynctp_kernels.cuda.runtime.edited import Unedited
from asynctp_kernels.cuda.runtime.launch import Tma
from cublaslt_emulated import CublasLt
from driver_of_c import DriverOfC, need_c
from torch import Tensor

STREAM = 7
KERNEL, COPY, WORDS = 0, 1, 12
Parameter = int | Tma


def bytes_of(parameter: Parameter) -> bytes:
    """As a kernel gets it; a descriptor has its address in its first bytes here, and in none that we may know of."""
    if isinstance(parameter, Tma):
        return int(parameter.address).to_bytes(8, "little") + bytes(120)
    return int(parameter).to_bytes(4 if parameter < 1 << 31 else 8, "little")


class Library:
    """libcuda, as far as captures and graphs go.

    nodes: of the graph: a kernel's parameters, or a copy's words. set: what nodes of the executable graph were set to,
    in order, as (node, values). launched: the stream of each launch. codes: what functions give, if not 0.
    """

    def __init__(self, **codes: int) -> None:
        self.codes, self.nodes = codes, list[Any]()
        self.set: list[tuple[int, list[int]]] = []
        self.launched: list[int] = []
        self.destroyed: list[str] = []
        self.mode = 0
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        found = getattr(type(self), f"_{name.removeprefix('cu').removesuffix('_v2')}", None)

        def function(*args: Any) -> int:
            if name in self.codes:
                return self.codes[name]
            if found is not None:
                return found(self, *args) or 0
            self.destroyed += [name] if "Destroy" in name else []
            return 0

        return function

    # --- captures
    def _CtxGetCurrent(self, context: Any) -> None:
        context._obj.value = 99

    def _ThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        self.mode, mode._obj.value = mode._obj.value, self.mode

    def _StreamEndCapture(self, stream: Any, graph: Any) -> None:
        graph._obj.value = 50

    def _StreamGetCaptureInfo(self, stream: Any, status: Any, number: Any, graph: Any, nodes: Any, count: Any) -> None:
        status._obj.value = 1
        if number is not None:
            number._obj.value = 7
        if nodes is None:
            return
        last = (ctypes.c_void_p * 1)(len(self.nodes))
        self._kept.append(last)
        nodes._obj.contents = last[0] and ctypes.c_void_p.from_buffer(last)
        count._obj.value = 1

    def _MemcpyDtoDAsync(self, dst: int, src: int, size: int, stream: int) -> None:
        words = [0] * 25
        words[17], words[6], words[22], words[23], words[24] = int(dst), int(src), size, 1, 1
        self.nodes.append((COPY, words))

    def launch(self, stream: int, values: Sequence[Any]) -> None:
        """A kernel's, as Triton makes it."""
        self.nodes.append((KERNEL, [bytes_of(value) for value in values]))
        driver.note(stream, values)

    # --- graphs
    def _GraphNodeGetType(self, node: Any, kind: Any) -> None:
        kind._obj.value = self.nodes[node.value - 1][0]

    def _GraphKernelNodeGetParams(self, node: Any, params: Any) -> None:
        given = [ctypes.create_string_buffer(each, len(each)) for each in self.nodes[node.value - 1][1]]
        pointers = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        self._kept += [given, pointers]
        params._obj.func, params._obj.params = node.value, ctypes.addressof(pointers)

    def _FuncGetParamInfo(self, function: Any, number: Any, offset: Any, size: Any) -> int:
        parameters = self.nodes[function.value - 1][1]
        if number.value >= len(parameters):
            return 1
        size._obj.value = len(parameters[number.value])
        return 0

    def _GraphMemcpyNodeGetParams(self, node: Any, params: Any) -> None:
        for word, value in enumerate(self.nodes[node.value - 1][1]):
            params._obj[word] = value

    def _GraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> None:
        executable._obj.value = 60

    def _TensorMapReplaceAddress(self, place: int, address: int) -> None:
        assert place % 64 == 0
        ctypes.c_uint64.from_address(place).value = address

    def _GraphExecKernelNodeSetParams(self, executable: Any, node: int, params: int) -> None:
        assert getattr(executable, "value", executable) == 60
        of = edited._KernelParams.from_address(params)
        count = len(self.nodes[node - 1][1])
        places = (ctypes.c_void_p * count).from_address(of.params)
        sizes = [min(len(each), 8) for each in self.nodes[node - 1][1]]
        values = [int.from_bytes(ctypes.string_at(at, size), "little") for at, size in zip(places, sizes, strict=True)]
        self.set.append((node, values))

    def _GraphExecMemcpyNodeSetParams(self, executable: Any, node: int, params: int, context: int) -> None:
        assert context == 99
        words = (ctypes.c_uint64 * 25).from_address(params)
        self.set.append((node, [words[17], words[6]]))

    def _GraphLaunch(self, executable: Any, stream: int) -> None:
        self.launched.append(stream)


@pytest.fixture(params=["C", "Python"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()

    def function(name: str, *argtypes: Any) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if code := getattr(made, name)(*args):
                driver.check(name, code)

        return call

    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(driver, "error_text", "{}: {}".format)
    monkeypatch.setattr(driver, "_copy_1d", function("cuMemcpyDtoDAsync_v2"))
    for name in ("_set_kernel", "_set_copy", "_replace_address", "_launch"):
        of = {"_set_kernel": "cuGraphExecKernelNodeSetParams_v2", "_set_copy": "cuGraphExecMemcpyNodeSetParams"}
        rest = {"_replace_address": "cuTensorMapReplaceAddress", "_launch": "cuGraphLaunch"}
        monkeypatch.setattr(edited, name, function((of | rest)[name]))
    monkeypatch.setattr(edited, "_stream", lambda device, urgent: STREAM)
    pointers = DriverOfC(lambda name: getattr(made, name))
    monkeypatch.setattr(edited, "functions", lambda: pointers.table)
    if request.param == "Python":
        monkeypatch.setattr(edited, "native", lambda: "no compiler")
    else:
        need_c()
    yield made
    monkeypatch.undo()
    pointers.check()


BASE = 1 << 40
A, B, C = (Address(BASE + (number << 20), number) for number in range(3))
LIKE = SimpleNamespace(shape=[8], strides=[1], block_shape=[8], padding="zero")


def described(address: int) -> Tma:
    return Tma(LIKE, address)  # type: ignore[arg-type]


def at(*megabytes: int) -> tuple[int, ...]:
    return tuple(BASE + (each << 20) for each in megabytes)


def captured(library: Library, enqueue: Callable[[int], None]) -> edited.EditableGraph:
    return edited.capture(torch.device("cpu"), False, enqueue)


def test_a_capture_is_known_whatever_its_nodes_are(library: Library) -> None:
    """Nodes are not asked for: with programmatic edges that is an error. Nor is an error of the legacy stream one."""
    asked: list[tuple[Any, ...]] = []
    info = library._StreamGetCaptureInfo
    with mock.patch.object(Library, "_StreamGetCaptureInfo", lambda self, *args: (asked.append(args), info(*args))[1]):
        assert driver.capture_id(STREAM) == 7
    assert asked[0][3:] == (None, None, None)
    library.codes["cuStreamGetCaptureInfo_v2"] = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert driver.capture_id(STREAM) == 0


def test_an_address_knows_what_it_is_of() -> None:
    """As far as sums with bytes go; it is a number everywhere else."""
    for address in (A + 64, 64 + A, A + 32 + 32):
        assert (address, address.number, address.offset) == (BASE + 64, 0, 64)
    assert type(B - 1) is int
    assert ctypes.c_uint64(B).value == B


def test_only_what_has_changed_is_edited(library: Library) -> None:
    """A kernel if an address of its own has; a copy always, for other memory may be there."""

    def enqueue(stream: int) -> None:
        library.launch(stream, [A, 5, described(B), BASE + 77])
        library.launch(stream, [described(BASE + 99), 3, C + 16])
        driver.copy(BASE + 500, B + 32, 64, stream)
        driver.copy(BASE + 500, BASE + 600, 64, stream)  # of memory that stays

    graph = captured(library, enqueue)
    graph.launch(1, at(0, 1, 2))
    first = [(1, [*at(0), 5, *at(1), BASE + 77]), (2, [BASE + 99, 3, BASE + (2 << 20) + 16])]
    assert library.set == [*first, (3, [BASE + 500, BASE + (1 << 20) + 32])]
    library.set.clear()
    graph.launch(1, at(0, 1, 2))
    assert library.set == [(3, [BASE + 500, BASE + (1 << 20) + 32])]
    library.set.clear()
    graph.launch(2, at(0, 1, 9))
    assert library.set == [(2, [BASE + 99, 3, BASE + (9 << 20) + 16]), (3, [BASE + 500, BASE + (1 << 20) + 32])]
    library.set.clear()
    graph.launch(1, at(0, 4, 9))
    assert library.set == [(1, [*at(0), 5, *at(4), BASE + 77]), (3, [BASE + 500, BASE + (4 << 20) + 32])]
    assert library.launched == [1, 1, 2, 1]


def test_one_tensor_in_two_places_is_told_apart(library: Library) -> None:
    """Operands may be one tensor in the captured call, and two in the next one."""
    same = Address(int(A), 1)
    graph = captured(library, lambda stream: library.launch(stream, [A, same, described(A), described(same)]))
    graph.launch(1, at(3, 4))
    assert library.set == [(1, [*at(3), *at(4), *at(3), *at(4)])]


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        ([A, int(A)], [A, int(A)]),  # which of them?
        ([A, B], [A]),
        ([described(A)], [int(A)]),
    ],
    ids=["an address that is no tensor's", "a parameter that is not there", "a descriptor that is not there"],
)
def test_what_cannot_be_told_apart_is_refused(values: list[Any], parameters: list[Any], library: Library) -> None:
    def enqueue(stream: int) -> None:
        library.nodes.append((KERNEL, [bytes_of(each) for each in parameters]))
        driver.note(stream, values)

    with pytest.raises(Unedited, match="parameters of a kernel"):
        captured(library, enqueue)
    assert library.destroyed == ["cuGraphDestroy"]


def test_copies_of_many_ranges_are_refused(library: Library) -> None:
    def enqueue(stream: int) -> None:
        driver.copy(BASE + 500, A, 64, stream)
        library.nodes[-1][1][-2] = 4  # rows

    with pytest.raises(Unedited, match="a copy of many ranges"):
        captured(library, enqueue)


@pytest.mark.parametrize("name", ["cuGraphInstantiateWithFlags", "cuStreamEndCapture", "cuFuncGetParamInfo"])
def test_what_the_driver_refuses_is_an_error(name: str, library: Library) -> None:
    library.codes = {name: 2}
    with pytest.raises(CudaError):
        captured(library, lambda stream: library.launch(stream, [A]))
    assert library.mode == 0, "the mode of this thread's captures is as before"


def test_a_launch_that_fails_is_told_all_again(library: Library) -> None:
    graph = captured(library, lambda stream: library.launch(stream, [A]))
    graph.launch(1, at(0))
    library.codes = {"cuGraphLaunch": 719}
    with pytest.raises(CudaError, match="cuGraphLaunch: 719"):
        graph.launch(1, at(0))
    library.codes, library.set = {}, []
    graph.launch(1, at(0))
    assert library.set == [(1, [*at(0)])]


def test_an_address_that_the_driver_does_not_take_is_none_of_the_graph(library: Library) -> None:
    """Nothing is launched, so that the call may be enqueued."""
    graph = captured(library, lambda stream: driver.copy(BASE + 500, A, 64, stream))
    graph.launch(1, at(0))
    library.codes = {"cuGraphExecMemcpyNodeSetParams": 1}
    with pytest.raises(Unedited, match="cuGraphExecMemcpyNodeSetParams: 1"):
        graph.launch(1, at(1))
    assert library.launched == [1]


def test_an_interrupt_at_the_beginning_ends_the_capture(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stream is captured, nobody can synchronize the device."""
    call = driver.call

    def interrupted(name: str, *args: Any) -> None:
        call(name, *args)
        if name == "cuStreamBeginCapture_v2":
            raise KeyboardInterrupt

    monkeypatch.setattr(driver, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        captured(library, lambda stream: library.launch(stream, [A]))
    assert library.destroyed == ["cuGraphDestroy"]
    assert library.mode == 0
    driver.note(STREAM, [A])  # to nobody


def test_an_error_of_what_is_enqueued_ends_the_capture(library: Library) -> None:
    def enqueue(stream: int) -> None:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        captured(library, enqueue)
    assert library.destroyed == ["cuGraphDestroy"]
    assert library.mode == 0
    driver.note(STREAM, [A])  # to nobody


def test_a_graph_goes_with_its_plan(library: Library) -> None:
    graph = captured(library, lambda stream: library.launch(stream, [A]))
    assert library.destroyed == []
    del graph
    assert library.destroyed == ["cuGraphExecDestroy", "cuGraphDestroy"]


# --- matmuls of cuBLASLt ---------------------------------------------------------------------------------------------
class Multiplies:
    """A call that has a matmul of fp8, with scales and a bias: tensors in the order of their numbers."""

    def __init__(self) -> None:
        a, b = (torch.randint(-2, 3, (16, 32)).to(torch.float8_e4m3fn) for _ in range(2))
        scales = [torch.rand(4)[:1] for _ in range(2)]
        self.out = torch.empty(16, 16, dtype=torch.bfloat16)
        self.tensors = [b.t(), a, self.out, *scales, torch.randn(16).bfloat16()]
        self.example = Matrices(a, [b.t()], [self.out], scales[1], scales[:1], [self.tensors[-1]])

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.tensors)

    @property
    def wanted(self) -> Tensor:
        b, a, _, *scales, bias = self.tensors
        return (a.float() @ b.float() * (scales[0] * scales[1]) + bias.float()).bfloat16()


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> Iterator[CublasLt]:
    yield from cublaslt_emulated.emulate(monkeypatch)


def numbered(call: Multiplies) -> tuple[Address, ...]:
    return tuple(Address(at, number) for number, at in enumerate(call.addresses))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_matmul_of_cublas_is_beside_the_graph(when: str, multiplies: CublasLt, library: Library) -> None:
    """It is no node: each launch makes it, of the call's own tensors, before the graph's or after it."""
    first, second = Multiplies(), Multiplies()
    made = Matmul(kinds(first.example, True)[0])

    def enqueue(stream: int) -> None:
        values = numbered(first)
        if when == "before":
            made(stream, *values)
        library.launch(stream, [values[1], 5])
        if when == "after":
            made(stream, *values)

    graph = captured(library, enqueue)
    assert not multiplies.log
    for call in (first, second, second, first):
        counted = len(library.launched)
        graph.launch(1, call.addresses)
        assert multiplies.log[-1] == call.addresses
        assert torch.equal(call.out, call.wanted)
        assert len(library.launched) == counted + 1
        call.out.zero_()
    assert len(multiplies.log) == 4
    assert [values[0] for _, values in library.set] == [call.addresses[1] for call in (first, second, first)]


def test_a_matmul_between_two_nodes_is_refused(multiplies: CublasLt, library: Library) -> None:
    call = Multiplies()
    made = Matmul(kinds(call.example, True)[0])

    def enqueue(stream: int) -> None:
        values = numbered(call)
        library.launch(stream, [values[0]])
        made(stream, *values)
        library.launch(stream, [values[1]])

    with pytest.raises(Unedited, match="between two nodes"):
        captured(library, enqueue)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_matmul_that_fails_is_half_way(when: str, multiplies: CublasLt, library: Library) -> None:
    """Others have been told of the call, or soon are."""
    call = Multiplies()
    made = Matmul(kinds(call.example, True)[0])

    def enqueue(stream: int) -> None:
        values = numbered(call)
        for step in ("before", "launch", "after"):
            if step == "launch":
                library.launch(stream, [values[0]])
            elif step == when:
                made(stream, *values)

    graph = captured(library, enqueue)
    multiplies.codes["cublasLtMatmul"] = 15
    with pytest.raises(RuntimeError, match=r"cublasLtMatmul: .*15") as error:
        graph.launch(1, call.addresses)
    assert not isinstance(error.value, Unedited)
    assert len(library.launched) == (when == "after")
