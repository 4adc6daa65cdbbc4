"""Matmuls of an A that is still arriving: the gather's GEMM for people who bring their own transfers.

    for chunk in pivot, pivot + 1, …:    wait(signal of chunk) → A[chunk] @ B, B, … → C, C, …

This is what PyTorch calls `torch.ops.symm_mem._async_input_mm` (pytorch/pytorch pull request 139227), which is private,
takes one B and runs on CUTLASS. Here it is one persistent GEMM for all Bs where that can run, and cuBLAS for each chunk
after a wait of the stream elsewhere.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.cublas import matmul
from asynctp_kernels.cuda.gemm.gemm import refused_gemm
from asynctp_kernels.cuda.gemm.own_matmul import WholeGemm
from asynctp_kernels.cuda.runtime.launch import aligned_columns
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.script import Wait
from asynctp_kernels.errors import timeout_s
from asynctp_kernels.signals import IS_INTERPRETED, POLL_PAUSE_S

_INT32 = range(-(1 << 31), 1 << 31)


def async_input_matmul(
    a: Tensor,
    bs: Sequence[Tensor],
    a_chunk_signals: Tensor,
    *,
    a_chunk_pivot: int = 0,
    value: int = 1,
    outs: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """`a @ b` for every b, each chunk of a's rows as soon as its signal says that it is there.

    Args:
        a: [M, K], bf16, fp16 or fp32, rows contiguous. Allocated; others may still be writing to it.
        bs: [K, N] each, of a's dtype.
        a_chunk_signals: int32 [chunks], contiguous, on a's device. Row chunk i, of M / chunks rows, is read once word i
            is at least `value`; whoever has written the chunk sets it, with a release of system scope (such as a stream
            memory operation, or a copy after that of the chunk). Words are not reset.
        a_chunk_pivot: The chunk that is computed first; then come the next ones, and after the last the first.
        value: What to wait for, in int32. A value that grows from call to call saves resetting words.
        outs: [M, N] each, contiguous, of a's dtype; made if not given.

    Returns:
        `outs`, in the order of the Bs. On CUDA enqueued on the current stream, as any matmul.

    On CUDA the transfers have to be enqueued before this, on another stream, and need no SM: the GEMM holds them while
    it waits, without a bound. With TMA's alignments (16 bytes of every row and address) on compute capability 9 it is
    one kernel; else the stream waits for each chunk in turn. In a CUDA graph `a_chunk_pivot` and `value` are constants.
    On CPU a word is waited for by polling it.

    Raises:
        ValueError: Shapes, dtypes, devices or strides that do not fit, a pivot that is no chunk, or no B.
        TimeoutError: On CPU, a word that did not come within `ASYNCTP_TIMEOUT_S` (60) seconds.

    Source: PyTorch's `_async_input_mm` for the names and the order of chunks.
    """
    _check(a, bs, a_chunk_signals, a_chunk_pivot, value)
    outs = [a.new_empty(a.shape[0], b.shape[1]) for b in bs] if outs is None else list(outs)
    _check_outs(a, bs, outs)
    run = _in_turn
    if a.numel() > 0 and all(out.numel() for out in outs) and _can_be_one_kernel(a) and _refused(a, bs, outs) is None:
        run = _one_kernel
    run(a, bs, a_chunk_signals, a_chunk_pivot, value, outs)
    return outs


def polls(device: torch.device) -> bool:
    """Words are polled by this process."""
    return device.type == "cpu"


def _can_be_one_kernel(a: Tensor) -> bool:
    return IS_INTERPRETED or not polls(a.device)


# --- arguments ---------------------------------------------------------------------------------------------------
def _check(a: Tensor, bs: Sequence[Tensor], signals: Tensor, pivot: int, value: int) -> None:
    _require(a.ndim == 2 and a.stride(1) == 1, "a", _said(a), "[M, K] with contiguous rows")
    allowed = (torch.bfloat16, torch.float16, torch.float32)
    _require(a.dtype in allowed, "a", _said(a), "bfloat16, float16 or float32")
    _require(len(bs) > 0, "bs", "[]", "at least one")
    for i, b in enumerate(bs):
        fits = b.ndim == 2 and b.shape[0] == a.shape[1] and (b.dtype, b.device) == (a.dtype, a.device)
        _require(fits, f"bs[{i}]", _said(b), f"[{a.shape[1]}, N], {a.dtype} on {a.device}")
    like = f"int32 [chunks], contiguous, on {a.device}"
    fits = signals.ndim == 1 and signals.dtype == torch.int32 and signals.is_contiguous() and signals.device == a.device
    _require(fits and signals.numel() > 0, "a_chunk_signals", _said(signals), like)
    chunks = signals.numel()
    _require(a.shape[0] % chunks == 0, "a", _said(a), f"a number of rows that {chunks} chunks divide")
    _require(0 <= pivot < chunks, "a_chunk_pivot", pivot, f"one of {chunks} chunks")
    _require(value in _INT32, "value", value, "an int32")


def _check_outs(a: Tensor, bs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    _require(len(outs) == len(bs), "outs", f"{len(outs)} tensors", f"one for each of {len(bs)} Bs")
    for i, (out, b) in enumerate(zip(outs, bs, strict=True)):
        shape = (a.shape[0], b.shape[1])
        fits = out.shape == shape and out.is_contiguous() and (out.dtype, out.device) == (a.dtype, a.device)
        _require(fits, f"outs[{i}]", _said(out), f"{list(shape)}, contiguous, {a.dtype} on {a.device}")


def _require(fits: bool, name: str, found: object, wanted: str) -> None:
    if not fits:
        raise ValueError(f"asynctp async_input_matmul: {name}={found} is not valid; it must be {wanted}")


def _said(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} of strides {tensor.stride()} on {tensor.device}"


# --- chunk by chunk ------------------------------------------------------------------------------------------------
def _in_turn(a: Tensor, bs: Sequence[Tensor], signals: Tensor, pivot: int, value: int, outs: Sequence[Tensor]) -> None:
    """A matmul for each chunk and B, after the chunk's word."""
    chunks = signals.numel()
    size = a.shape[0] // chunks
    for chunk in ((pivot + step) % chunks for step in range(chunks)):
        if polls(a.device):
            _poll(signals, chunk, value)
        else:
            wait = driver.MemOps([Wait(signals.data_ptr() + 4 * chunk, value)])
            wait.enqueue(driver.current_stream(a.device.index))
        rows = slice(chunk * size, (chunk + 1) * size)
        for b, out in zip(bs, outs, strict=True):
            matmul(a[rows], b, None, None, None, None, out=out[rows])


def _poll(signals: Tensor, chunk: int, value: int) -> None:
    word = ctypes.c_int32.from_address(signals.data_ptr() + 4 * chunk)
    deadline = time.monotonic() + timeout_s()
    while word.value < value:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"async_input_matmul: waited {timeout_s():g} s for signal {chunk} to be {value}; it is {word.value}"
            )
        time.sleep(POLL_PAUSE_S)


# --- one kernel ----------------------------------------------------------------------------------------------------
def _refused(a: Tensor, bs: Sequence[Tensor], outs: Sequence[Tensor]) -> str | None:
    """Why the persistent TMA GEMM cannot run this. Nothing of A can be copied to where it could: it is arriving."""
    if a.stride(0) < a.shape[1] or a.stride(0) * a.itemsize % 16:
        return "rows of A that are no multiple of 16 bytes apart"
    if any(tensor.data_ptr() % 16 for tensor in (a, *outs)):
        return "an address that is no multiple of 16"
    return refused_gemm(a, bs, (), [None] * len(bs), a.dtype, [a.shape[1]])


#: by what a kernel is made for
_plans: dict[tuple[Any, ...], WholeGemm] = {}
MAX_PLANS = 256


def _one_kernel(
    a: Tensor, bs: Sequence[Tensor], signals: Tensor, pivot: int, value: int, outs: Sequence[Tensor]
) -> None:
    call = Matrices(a, [aligned_columns(b) for b in bs], outs)
    shape = (a.device, a.shape, a.stride(0), a.dtype, signals.numel(), *((b.shape[1], b.stride()) for b in call.bs))
    plan = _plans.get(shape)
    if plan is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        plan = _plans[shape] = WholeGemm(call, chunks=signals.numel())
    if polls(a.device):  # the interpreter does one thing at a time
        for chunk in range(signals.numel()):
            _poll(signals, chunk, value)
    awaits = (signals.data_ptr(), pivot, value)
    plan(driver.current_stream(a.device.index), call, awaits)
