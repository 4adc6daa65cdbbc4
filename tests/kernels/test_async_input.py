"""`async_input_matmul`: what it waits for, what it gives, what it refuses. Its kernel on a recorded driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import async_input_matmul
from asynctp_kernels.cuda.plans import async_input
from cuda_stubs import Launched, Machine, Waited, machine, tensor
from torch import Tensor


def expected(a: Tensor, bs: list[Tensor]) -> list[Tensor]:
    return [(a.float() @ b.float()).to(a.dtype) for b in bs]


# --- on CPU ------------------------------------------------------------------------------------------------------
def test_a_chunk_is_read_when_its_signal_has_come() -> None:
    """Another thread brings the rows, in the order from the pivot on; until then they are NaN."""
    a, signals = torch.full((48, 16), torch.nan), torch.zeros(4, dtype=torch.int32)
    arriving, bs = torch.randn(48, 16), [torch.randn(16, 8), torch.randn(16, 3)]

    def bring() -> None:
        for chunk in (2, 3, 0, 1):
            time.sleep(0.02)
            a[chunk * 12 : (chunk + 1) * 12] = arriving[chunk * 12 : (chunk + 1) * 12]
            signals[chunk] = 7

    thread = threading.Thread(target=bring)
    thread.start()
    outs = async_input_matmul(a, bs, signals, a_chunk_pivot=2, value=7)
    thread.join()
    for out, wanted in zip(outs, expected(arriving, bs), strict=True):
        torch.testing.assert_close(out, wanted)
    assert signals.tolist() == [7] * 4, "words are left as they are"


def test_chunks_come_in_order_from_the_pivot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(async_input, "_poll", lambda signals, chunk, value: asked.append(chunk))
    async_input_matmul(torch.ones(6, 2), [torch.ones(2, 2)], torch.zeros(3, dtype=torch.int32), a_chunk_pivot=1)
    assert asked == [1, 2, 0]


def test_a_signal_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "0.1")
    signals = torch.tensor([1, 0], dtype=torch.int32)
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for signal 1 to be 1; it is 0"):
        async_input_matmul(torch.ones(4, 2), [torch.ones(2, 2)], signals)


def test_given_outs_are_written() -> None:
    a, b, out = torch.randn(4, 8), torch.randn(8, 2), torch.empty(4, 2)
    (given,) = async_input_matmul(a, [b], torch.ones(2, dtype=torch.int32), outs=[out])
    assert given is out
    torch.testing.assert_close(out, a @ b)


def test_nothing_to_multiply() -> None:
    signals = torch.ones(2, dtype=torch.int32)
    for m, k, n in ((0, 4, 4), (4, 0, 4), (4, 4, 0)):
        (out,) = async_input_matmul(torch.ones(m, k), [torch.ones(k, n)], signals)
        assert torch.equal(out, torch.zeros(m, n) if k == 0 else torch.full((m, n), 4.0))


ONES = torch.ones(4, 8)
B = torch.ones(8, 2)
TWO = torch.ones(2, dtype=torch.int32)
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "a of three dims": ("a=", (ONES.view(1, 4, 8), [B], TWO), {}),
    "a transposed": ("a=", (ONES.t().contiguous().t(), [B], TWO), {}),
    "integers": ("a=", (ONES.int(), [B.int()], TWO), {}),
    "no b": ("bs=", (ONES, [], TWO), {}),
    "another k": (r"bs\[1\]=", (ONES, [B, torch.ones(7, 2)], TWO), {}),
    "another dtype": (r"bs\[0\]=", (ONES, [B.double()], TWO), {}),
    "long signals": ("a_chunk_signals=", (ONES, [B], TWO.long()), {}),
    "no signals": ("a_chunk_signals=", (ONES, [B], TWO[:0]), {}),
    "signals with gaps": ("a_chunk_signals=", (ONES, [B], torch.ones(4, dtype=torch.int32)[::2]), {}),
    "three chunks of four rows": ("a=", (ONES, [B], torch.ones(3, dtype=torch.int32)), {}),
    "pivot": ("a_chunk_pivot=2", (ONES, [B], TWO), {"a_chunk_pivot": 2}),
    "value": ("value=", (ONES, [B], TWO), {"value": 1 << 31}),
    "outs": ("outs=", (ONES, [B], TWO), {"outs": []}),
    "an out of another shape": (r"outs\[0\]=", (ONES, [B], TWO), {"outs": [torch.ones(4, 3)]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(name: str) -> None:
    said, args, options = REFUSED[name]
    with pytest.raises(ValueError, match=f"asynctp async_input_matmul: {said}"):
        async_input_matmul(*args, **options)


# --- on a GPU that is only recorded --------------------------------------------------------------------------------
@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(async_input, "polls", lambda device: False)
    monkeypatch.setattr(async_input, "_plans", {})
    with machine() as made:
        cuda_emulated.emulate(made)
        yield made


def weights(k: int, *ns: int) -> list[Tensor]:
    return [tensor(n, k).t() for n in ns]


@pytest.mark.parametrize(("m", "chunks"), [(1024, 4), (1024, 1), (390, 3), (8, 8)])
@pytest.mark.parametrize("ns", [(72,), (136, 72, 8, 264)], ids=str)
def test_one_kernel_for_all_chunks_and_bs(m: int, chunks: int, ns: tuple[int, ...], here: Machine) -> None:
    for pivot, value in ((0, 1), (chunks - 1, 5)):
        a, bs, signals = tensor(m, 64), weights(64, *ns), torch.full((chunks,), value, dtype=torch.int32)
        outs = async_input_matmul(a, bs, signals, a_chunk_pivot=pivot, value=value)
        for out, wanted in zip(outs, expected(a, bs), strict=True):
            assert torch.equal(out, wanted)
        arguments = here.launched("gemm_kernel").arguments
        assert (arguments["rank"], arguments["value"], arguments["words"]) == (pivot, value, signals.data_ptr())
        assert signals.tolist() == [value] * chunks
    assert len(here.prepared) == 1, "one kernel for all pivots and values"
    assert [type(entry) for entry in here.log] == [Launched, Launched]


def test_rows_with_room_between_them(here: Machine) -> None:
    """As a part of a wider buffer."""
    wide, bs = tensor(256, 128), weights(64, 72)
    (out,) = async_input_matmul(wide[:, 64:], bs, torch.ones(2, dtype=torch.int32))
    assert torch.equal(out, expected(wide[:, 64:], bs)[0])
    assert here.of(Launched)


@pytest.mark.parametrize("case", ["fp32", "odd rows", "a that is not aligned", "five bs"])
def test_what_the_kernel_cannot_take_comes_chunk_by_chunk(case: str, here: Machine) -> None:
    """The stream waits for each word, from the pivot on."""
    a, bs = tensor(8, 64), weights(64, 72)
    if case == "fp32":
        a, bs = a.float(), [b.float() for b in bs]
    elif case == "odd rows":
        a, bs = tensor(8, 7), weights(7, 9)
    elif case == "five bs":
        bs = bs * 5
    else:
        a = tensor(8 * 64 + 1)[1:].view(8, 64)
    signals = torch.ones(4, dtype=torch.int32)
    outs = async_input_matmul(a, bs, signals, a_chunk_pivot=3)
    for out, wanted in zip(outs, expected(a, bs), strict=True):
        assert torch.equal(out, wanted)
    assert [wait.address - signals.data_ptr() for wait in here.of(Waited)] == [12, 0, 4, 8]
    assert not here.of(Launched)
