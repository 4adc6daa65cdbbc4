"""The matmul of few rows, interpreted, against fp64: each order of its operands, and edges of all sizes."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.ranks

#: (rows, K, columns of each B, dtype, whether K is contiguous in B, scales, bias, factor)
CASES = (
    (5, 96, (72,), "bfloat16", True, "", False, 1.0),
    (20, 96, (72, 8, 64), "bfloat16", True, "", True, 1.0),
    (20, 96, (72, 128), "bfloat16", False, "", False, -0.5),
    (33, 96, (72, 16, 16, 80), "float8_e4m3fn", True, "row", True, 1.0),
    (1, 64, (72,), "float8_e4m3fn", True, "tensor", False, 2.0),
    (17, 200, (136, 8), "float16", True, "", True, 0.25),
)


def _errors(rank: int, group: Any, swapped: bool) -> list[float]:
    """The relative error of each case."""
    from dataclasses import replace
    from unittest import mock

    import torch
    from asynctp_kernels.cuda.choose.tiles import INTERPRETED_FEW_ROWS
    from asynctp_kernels.cuda.gemm import few_rows
    from asynctp_kernels.cuda.gemm.arguments import Matrices

    torch.manual_seed(swapped)
    found = []
    for m, k, ns, name, k_major, scales, bias, factor in CASES:
        dtype = getattr(torch, name)
        out = torch.float16 if dtype == torch.float16 else torch.bfloat16
        a = torch.randn(m, k).to(dtype)
        whole = [torch.randn((n, k) if k_major else (k, n)).to(dtype) for n in ns]
        bs = [b.t() if k_major else b for b in whole]
        outs = [torch.full((m, n), torch.nan, dtype=out) for n in ns]
        rows, columns = {"row": (m, 1), "tensor": (1, 1)}.get(scales, (0, 0)), scales == "row"
        a_scale = torch.rand(rows) + 0.5 if scales else None
        b_scales = [torch.rand((1, n if columns else 1)) + 0.5 for n in ns] if scales else []
        biases = [torch.randn(n).to(out) if bias else None for n in ns]
        operands = Matrices(a, bs, outs, a_scale, b_scales, biases)
        with mock.patch.object(few_rows, "INTERPRETED_FEW_ROWS", replace(INTERPRETED_FEW_ROWS, swapped=swapped)):
            few_rows.FewRows(operands, factor)(0, operands)
        for i, (b, made) in enumerate(zip(bs, outs, strict=True)):
            wanted = a.double() @ b.double()
            if a_scale is not None:
                wanted = wanted * a_scale.double() * b_scales[i].double()
            if (row := biases[i]) is not None:
                wanted = wanted + row.double()
            wanted = wanted.to(out).double() * factor
            found.append(((made.double() - wanted).norm() / wanted.norm()).item())
    return found


@pytest.mark.parametrize("swapped", [True, False])
def test_equal_to_rounding(swapped: bool) -> None:
    (errors,) = run_ranks(1, _errors, swapped)
    assert len(errors) == sum(len(case[2]) for case in CASES)
    assert max(errors) < 4e-3
