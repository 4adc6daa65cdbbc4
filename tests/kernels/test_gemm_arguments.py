"""The order of the GEMM's arguments is said once, and is that of both kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels.cuda.gemm import arguments, gemm_kernels
from asynctp_kernels.cuda.gemm.arguments import GemmArguments, names
from asynctp_kernels.signals import IS_INTERPRETED

POINTERS = [torch.zeros(4) for _ in range(4)]
UNUSED = torch.zeros(1)
#: values are named for their places
FULL = GemmArguments(
    a=["a0", "a1"], b=["b0"], c=["c0", "c1", "c2", "c3"], a_scale=(), b_scale=POINTERS[:1], bias=POINTERS[1:2],
    words=POINTERS[2], done_ptr=POINTERS[3], outer=1, inner=2, k=(3, 4), n=(5,), rank=6, world=7, chunk_size=8,
    own_tiles=9, value=10, real_rows=11,
)  # fmt: skip


def place(name: str) -> int:
    return names().index(name)


def parameters(kernel: object) -> list[str]:
    return [each.name for each in kernel.params if not each.is_constexpr]  # type: ignore[attr-defined]


def test_the_order_is_that_of_the_kernels() -> None:
    assert names() == parameters(gemm_kernels.gemm_kernel)
    if not IS_INTERPRETED:
        pingpong = pytest.importorskip("asynctp_kernels.cuda.gemm.pingpong_kernels")
        assert names() == parameters(pingpong.gemm_kernel)


def test_examples_are_listed_in_that_order() -> None:
    listed = FULL.listed(UNUSED)
    assert len(listed) == len(names()) == 42
    assert [listed[place(name)] for name in ("a0", "a1", "a2", "b0", "c3")] == ["a0", "a1", None, "b0", "c3"]
    assert listed[place("a_scale0")] is listed[place("bias1")] is UNUSED
    assert listed[place("bias0")] is POINTERS[1]
    assert listed[place("words") :] == [*POINTERS[2:], 1, 2, 3, 4, 0, 0, 5, 0, 0, 0, 6, 7, 8, 9, 10, 11]


def test_a_launch_holds_no_tensor() -> None:
    """Descriptors are left out, and pointers of operands: a call fills them in."""
    values = FULL.launched(unused=77)
    assert values[: place("a_scale0")] == [None] * 12
    assert values[place("a_scale0") : place("words")] == [77] * 12
    assert values[place("words") :][:3] == [POINTERS[2].data_ptr(), POINTERS[3].data_ptr(), 1]
    assert arguments.MAX_OPERANDS == 4


def test_a_call_fills_in_its_tensors_and_numbers() -> None:
    """In copies: the next call may have none of them."""
    made = arguments.CallArguments(dataclasses.replace(FULL, a=(), b=(), c=()), 77)
    values = made.of({"b_scale": POINTERS[:2], "bias": []}, {"words": 5, "value": 11})
    assert values[place("b_scale0") : place("words")] == [POINTERS[0].data_ptr(), POINTERS[1].data_ptr(), *[77] * 6]
    assert (values[place("words")], values[place("rank")], values[place("value")]) == (5, 6, 11)
    assert made.of({}, {}) == FULL.launched(77)
