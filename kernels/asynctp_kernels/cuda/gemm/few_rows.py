"""The matmul of few rows as plans use it: which one takes it, and how it is compiled and launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asynctp_kernels.cuda.choose.tiles import IMPRECISE, INTERPRETED_FEW_ROWS, few_rows_is_faster, few_rows_tiles
from asynctp_kernels.cuda.gemm.arguments import MAX_OPERANDS
from asynctp_kernels.cuda.gemm.few_rows_kernels import few_rows_kernel
from asynctp_kernels.cuda.gemm.gemm import TRITON_DTYPES, b_descriptor, k_major, refused_gemm, scale_mode
from asynctp_kernels.cuda.runtime.launch import Tma, aligned, aligned_columns, dense, describe, outlines, prepare
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.signals import IS_INTERPRETED

#: where arguments of the kernel begin
_BS, _OUTS, _A_SCALE = 1, 1 + MAX_OPERANDS, 1 + 2 * MAX_OPERANDS
_B_SCALES, _BIASES = _A_SCALE + 1, _A_SCALE + 1 + MAX_OPERANDS


class FewRows:
    """`a @ b` for each B, with scales, bias and a factor as `cublas.matmul` has them, in one kernel."""

    def __init__(
        self,
        a: Tensor,
        bs: Sequence[Tensor],
        outs: Sequence[Tensor],
        a_scale: Tensor | None,
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        factor: float = 1.0,
        fast: bool = True,
    ) -> None:
        """Examples of the tensors of a call: a [M, K], bs [K, N], outs [M, N] contiguous at multiples of 16 bytes.

        fast: fp8 sums may be.
        """
        a, bs, b_scales, biases = aligned(a), [aligned_columns(b) for b in bs], dense(b_scales), dense(biases)
        (m, k), widths, out_dtype = a.shape, [b.shape[1] for b in bs], outs[0].dtype
        programs = driver.processors(a.device.index)
        tiles = INTERPRETED_FEW_ROWS if IS_INTERPRETED else few_rows_tiles(a.itemsize, m, sum(widths), programs)
        absent = MAX_OPERANDS - len(bs)
        self.a_like = describe(a, [m, k], [k, 1], [tiles.block_m, tiles.block_k])
        self.bs_like = [b_descriptor(b, tiles) for b in bs]
        unused = outs[0]
        self.has_bias = biases[0] is not None
        args = [
            self.a_like, *self.bs_like, *[None] * absent, *outs, *[unused] * absent,
            unused if a_scale is None else a_scale, *(b_scales or [unused] * len(bs)), *[unused] * absent,
            *[unused if bias is None else bias for bias in biases], *[unused] * absent,
            m, k, *widths, *[0] * absent,
        ]  # fmt: skip
        constants = {
            "COUNT": len(bs),
            "B_K_MAJOR": k_major(bs[0]),
            "A_SCALE": scale_mode(a_scale),
            "B_SCALE": scale_mode(b_scales[0] if b_scales else None),
            "BIAS": self.has_bias,
            "OUT": TRITON_DTYPES[out_dtype],
            "FACTOR": factor,
            "IMPRECISE": None if fast or a.itemsize > 1 else IMPRECISE,
            "TOGETHER": 16 // out_dtype.itemsize,
            "SWAP": tiles.swapped,
            "BM": tiles.block_m,
            "BN": tiles.block_n,
            "BK": tiles.block_k,
        }
        count = -(-m // tiles.block_m) * sum(-(-n // tiles.block_n) for n in widths)
        self.launch = prepare(few_rows_kernel, count, args, constants, tiles.warps, num_stages=tiles.stages)
        (self.a_like,), self.bs_like = outlines([self.a_like]), outlines(self.bs_like)
        self.values = [None] * (1 + MAX_OPERANDS) + [0] * (1 + 3 * MAX_OPERANDS) + args[-2 - MAX_OPERANDS :]

    def __call__(
        self,
        stream: int,
        a: Tensor,
        bs: Sequence[Tensor],
        outs: Sequence[Tensor],
        a_scale: Tensor | None,
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> None:
        """Enqueue it, of operands that lie as the kernel reads them: dense, but for Bs, at multiples of 16 bytes."""
        values, count = self.values.copy(), len(bs)
        values[0] = Tma(self.a_like, a.data_ptr())
        values[_BS : _BS + count] = [Tma(like, b.data_ptr()) for like, b in zip(self.bs_like, bs, strict=True)]
        values[_OUTS : _OUTS + count] = [out.data_ptr() for out in outs]
        if a_scale is not None:
            values[_A_SCALE] = a_scale.data_ptr()
            values[_B_SCALES : _B_SCALES + count] = [scale.data_ptr() for scale in b_scales]
        if self.has_bias:
            values[_BIASES : _BIASES + count] = [bias.data_ptr() for bias in biases if bias is not None]
        self.launch(stream, values)


def takes(
    a: Tensor,
    rows: int,
    bs: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    fast: bool,
) -> bool:
    """Whether `FewRows` makes the matmuls of `rows` rows like those of `a` [*, K], and is as fast as cuBLAS.

    fast: fp8 sums may be. Scales are no blocks'.
    """
    depth, columns = a.shape[-1], sum(b.shape[1] for b in bs)
    by_rows = bool(b_scales) and scale_mode(b_scales[0]) == 2
    if not few_rows_is_faster(rows, depth, columns, a.itemsize, by_rows) or (a.itemsize == 1 and not fast):
        return False
    return refused_gemm(a, bs, b_scales, biases, out_dtype, [depth]) is None
