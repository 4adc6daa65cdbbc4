"""Quantize to fp8 by rows or columns, as torchao does."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
cast = torch.ops.prims.convert_element_type.default  # what Inductor makes of x.to(dtype)


def scale_of(x: Tensor, dim: int) -> Tensor:
    """As torchao computes it, with scales that are powers of two."""
    amax = cast(x.abs().amax(dim, keepdim=True), torch.float64).clamp_min(1e-12)
    return torch.exp2(torch.floor(torch.log2(cast(448.0 / amax, torch.float32))))


def quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    scale = scale_of(x, dim)
    return cast((cast(x, torch.float32) * scale).clamp(-448.0, 448.0), FP8), scale.reciprocal()
