"""Matmuls that cuBLAS does not scale: made in their own dtype, and scaled after it; on CPU, which has such ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from asynctp_kernels.cuda.gemm import cublas
from asynctp_kernels.cuda.gemm.gemm import refused_gemm

from asynctp_passes.ops import reference

DTYPES = [torch.int8, torch.bfloat16, torch.float16, torch.float32]


def operand(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    values = torch.randint(-9, 9, (rows, columns))
    return values.to(dtype) if dtype == torch.int8 else (values / 8).to(dtype)


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shapes", [((), ()), ((6, 1), (1, 8)), ((6, 1), ()), ((1,), (1, 8))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_the_reference_program(
    dtype: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]], biased: bool, interpreted: bool
) -> None:
    """Into a place or not; the interpreter's do not round in between."""
    torch.manual_seed(0)  # some draws cancel, and then two roundings are further apart than one
    a, b, bias = operand(6, 16, dtype), operand(16, 8, dtype), torch.randn(8).bfloat16() if biased else None
    scales = [torch.rand(shape) + 0.5 for shape in shapes]
    want = reference.scaled_product(a, b, scales[0], scales[1], bias, torch.bfloat16, False)
    scaling = cublas.Scaling(torch.bfloat16, fast=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublas, "IS_INTERPRETED", interpreted)
        for out in (None, torch.empty(6, 8, dtype=torch.bfloat16)):
            found = cublas.matmul(a, b, bias, *scales, scaling, out)
            assert out is None or found is out
            torch.testing.assert_close(found, want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("interpreted", [False, True])
def test_int8_is_exact_beyond_what_fp32_holds(interpreted: bool) -> None:
    a, b = torch.full((4, 2048), 127, dtype=torch.int8), torch.full((2048, 8), 127, dtype=torch.int8)
    b[0, 0] = 126
    want = a.long() @ b.long()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublas, "IS_INTERPRETED", interpreted)
        for out in (None, torch.empty(4, 8, dtype=torch.int32)):
            found = cublas.matmul(a, b, None, None, None, None, out)
            assert found.dtype == torch.int32
            assert torch.equal(found.long(), want)


def test_int8_of_operands_that_overlap_themselves() -> None:
    """As expanded ones do, which torch's own matmul of int8 misreads on CPU."""
    row, column = operand(1, 16, torch.int8), operand(16, 1, torch.int8)
    a, b = row.expand(6, 16), column.expand(16, 8)
    for left, right in ((a, operand(16, 8, torch.int8)), (operand(6, 16, torch.int8), b), (a, b)):
        assert torch.equal(reference.product(left, right, None).long(), left.long() @ right.long())


def test_float16_that_is_infinite_before_it_is_scaled_stays_so() -> None:
    """As the program's is. The GEMM would scale first, and does not take it."""
    a, b = torch.full((4, 16), 200.0).half(), torch.full((16, 8), 200.0).half()
    scales = torch.full((4, 1), 2.0**-10), torch.ones(1, 8)
    found = cublas.matmul(a, b, None, *scales, cublas.Scaling(torch.float16, fast=False))
    assert bool(found.isinf().all())
    assert "may become infinite" in str(refused_gemm(a, [b], [scales[1]], [None], torch.float16, [16]))


def test_int8_is_not_made_by_the_gemm() -> None:
    a, b = operand(4, 16, torch.int8), operand(16, 8, torch.int8)
    assert "int32" in str(refused_gemm(a, [b], (), [None], torch.int32, [16]))
