"""cuBLAS products as the pipelines need them: into a given place, with scales and bias.

A plain product is a public torch op; a scaled one has no public equivalent with an output argument (`compat`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asynctp_kernels.compat import scaled_mm
from asynctp_kernels.signals import IS_INTERPRETED


@dataclass(frozen=True)
class Scaling:
    """How an fp8 product is scaled: what does not change from call to call."""

    out_dtype: torch.dtype
    fast: bool


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    scaling: Scaling | None,
    out: Tensor | None = None,
) -> Tensor:
    """`a @ b (+ bias)`, or the same scaled. a: [M, K], b: [K, N], out: [M, N] contiguous (made when None).

    a_scale: one element, or [M, 1]; b_scale: one element, or [1, N]; bias: [N] or [1, N].
    """
    if IS_INTERPRETED:
        return _in_fp32(a, b, bias, a_scale, b_scale, a.dtype if scaling is None else scaling.out_dtype, out)
    if scaling is None:
        if bias is None:
            return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
        return torch.addmm(bias, a, b) if out is None else torch.addmm(bias, a, b, out=out)
    assert a_scale is not None
    assert b_scale is not None
    rows, columns = _matching(a_scale, b_scale, a.shape[0], b.shape[1])
    row = None if bias is None else bias.reshape(-1)
    return scaled_mm(a, b, rows, columns, row, scaling.out_dtype, scaling.fast, out)


def _in_fp32(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """`product` on CPU tensors: summed, scaled and biased in fp32 (or wider operands' own dtype), rounded once."""
    wide = torch.float32 if a.is_floating_point() and a.itemsize < 4 else a.dtype
    found = a.to(wide) @ b.to(wide)
    if a_scale is not None and b_scale is not None:
        found = found * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
    found = (found if bias is None else found + bias.reshape(1, -1).to(wide)).to(out_dtype)
    return found if out is None else out.copy_(found)


def _matching(a_scale: Tensor, b_scale: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Both scales tensorwise or both rowwise: cuBLAS takes no mixture, so a single one is repeated."""
    if a_scale.numel() == 1 and b_scale.numel() == 1:
        return a_scale.reshape(()), b_scale.reshape(())
    rows = (
        a_scale.reshape(1, 1).expand(m, 1).contiguous() if a_scale.numel() == 1 else a_scale.reshape(m, 1).contiguous()
    )
    columns = (
        b_scale.reshape(1, 1).expand(1, n).contiguous() if b_scale.numel() == 1 else b_scale.reshape(1, n).contiguous()
    )
    return rows, columns


def scaled_product_supported(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    travels: bool,
) -> bool:
    """Whether `product` can run this scaled product on cuBLAS. `travels`: the A scale is one per row, however many."""
    if IS_INTERPRETED:
        return True
    tensorwise = a_scale.numel() == 1 and b_scale.numel() == 1 and not travels
    aligned = a.shape[-1] % 16 == 0 and b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0
    column_major = b.stride(0) == 1 and b.stride(1) % 16 == 0 and b.stride(1) >= b.shape[0]
    bias_fits = bias is None or (bias.dtype == out_dtype and out_dtype != torch.float32)
    wide = (a.dtype, b.dtype).count(torch.float8_e5m2)
    types_fit = wide < 2 if tensorwise else wide == 0 and out_dtype == torch.bfloat16
    return aligned and column_major and bias_fits and types_fit
