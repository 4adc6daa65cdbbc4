"""Triton kernels of a program's own, and the graph that torch makes of a program that calls them. None of them runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


# --- kernels -----------------------------------------------------------------------------------------------------
@triton.jit
def rows_times_weight(
    a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`c = a @ b (+ bias)`, which walks K in order, as serving stacks make their linears batch-invariant."""
    m, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(
            a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0
        )
        b = tl.load(
            b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0
        )
        total = tl.dot(a, b, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = c_ptr + m[:, None] * stride_cm + n[None, :] * stride_cn
    tl.store(out, total.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def rows_times_weight_and_sums(a_ptr, b_ptr, c_ptr, sums_ptr, M, N, K, BLOCK: tl.constexpr):
    """`c = a @ b` of contiguous matrices, and the sum of each row of that."""
    m, n, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
    total = tl.dot(a, b)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))
    tl.store(sums_ptr + m, tl.sum(total, 1), mask=m < M)


@triton.jit
def matmul_and_activation(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """`c = a @ b` of contiguous matrices, and what a constant says of that."""
    m, n, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
    total = tl.dot(a, b)
    if ACTIVATION == "relu":
        total = tl.maximum(total, 0.0)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def added_to(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    """`c += a @ b` of contiguous matrices."""
    m, n, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
    out, inside = c_ptr + m[:, None] * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    tl.store(out, tl.load(out, mask=inside) + tl.dot(a, b), mask=inside)


@triton.jit
def doubled(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < count) * 2, mask=i < count)


@triton.jit
def gated(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """The left half of each row, times the right one."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    left, right = x_ptr + row * 2 * columns + i, x_ptr + row * 2 * columns + columns + i
    product = tl.load(left, mask=i < columns) * tl.load(right, mask=i < columns)
    tl.store(out_ptr + row * columns + i, product, mask=i < columns)


if not isinstance(rows_times_weight, JITFunction):
    pytest.skip("Triton interprets in this process, and torch traces Python code", allow_module_level=True)


# --- what calls them ---------------------------------------------------------------------------------------------
def launch(kernel: Any, a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None = None, **how: Any) -> None:
    (m, k), n = a.shape, b.shape[1]

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(m, meta["BLOCK"]), triton.cdiv(n, meta["BLOCK"])

    strides = (*a.stride(), *b.stride(), *c.stride())
    kernel[grid](a, b, c, bias, m, n, k, *strides, HAS_BIAS=bias is not None, **how)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, kernel: Any = None) -> Tensor:
    """`a @ b` by a kernel. What it is launched with makes torch tune it, so that it is not the kernel itself."""
    c = a.new_empty(a.shape[0], b.shape[1])
    launch(rows_times_weight if kernel is None else kernel, a, b, c, bias, BLOCK=16, num_warps=8, num_stages=3)
    return c


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A layer, as a serving stack calls its kernel for rows of any number of dimensions."""
    out = matmul(x.reshape(-1, x.shape[-1]), weight.t(), bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def twice(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    doubled[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


def twice_in_place(x: Tensor) -> Tensor:
    doubled[(triton.cdiv(x.numel(), 64),)](x, x, x.numel(), BLOCK=64)
    return x


def gate(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    gated[(x.shape[0],)](x, out, out.shape[1], BLOCK=64)
    return out


def matmul_and_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    c, sums = a.new_empty(a.shape[0], b.shape[1]), a.new_empty(a.shape[0])
    rows_times_weight_and_sums[(1,)](a, b, c, sums, a.shape[0], b.shape[1], a.shape[1], BLOCK=64)
    return c, sums


def add_matmul(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    added_to[(1,)](a, b, c, a.shape[0], b.shape[1], a.shape[1], BLOCK=64)
    return c


# --- their graphs ------------------------------------------------------------------------------------------------
class _Device:
    """A driver of a GPU that answers the questions of torch and Triton before they compile."""

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def traced_kernels() -> Iterator[None]:
    """Let torch trace Triton kernels without a GPU, and find out what each writes to."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Device())
    try:
        with mock.patch("torch.utils._triton.has_triton", return_value=True):
            yield
    finally:
        driver.set_active(before)


def graph_of(program: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> fx.GraphModule:
    """The one graph, without in-place ops, that Inductor gets of a program in inference."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    found: list[fx.GraphModule] = []

    def compiler(graph_module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        found.append(graph_module)
        values = [node.meta["val"] for node in graph_module.graph.output_node().args[0]]
        return lambda *args: [torch.empty([int(size) for size in value.shape], dtype=value.dtype) for value in values]

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, decompositions=select_decomp_table())
    torch._dynamo.reset()
    with traced_kernels(), torch.no_grad():
        torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    (graph_module,) = found
    return graph_module
