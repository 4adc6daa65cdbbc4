"""A matmul as serving stacks put it in the place of `aten::mm` for batch-invariant results: Triton, over K in order."""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def kernel(a, b, c, m, n, k, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(k, BK)):
        depth = step * BK + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * am + depth[None, :] * ak, (rows < m)[:, None] & (depth < k)[None, :], 0.0)
        right = tl.load(b + depth[:, None] * bk + cols[None, :] * bn, (depth < k)[:, None] & (cols < n)[None, :], 0.0)
        acc = tl.dot(left, right, acc)
    where = c + rows[:, None] * n + cols[None, :]
    tl.store(where, acc.to(c.dtype.element_ty), (rows < m)[:, None] & (cols < n)[None, :])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in a's dtype."""
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n)
    grid = (triton.cdiv(m, 128), triton.cdiv(n, 128))
    kernel[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), BM=128, BN=128, BK=64, num_warps=8, num_stages=3)
    return out
