"""The matmul of few rows as plans use it: which one takes it, and how it is compiled and launched."""

from __future__ import annotations

from asynctp_kernels.cuda.choose.tiles import IMPRECISE, INTERPRETED_FEW_ROWS, few_rows_is_faster, few_rows_tiles
from asynctp_kernels.cuda.gemm.arguments import MAX_OPERANDS, Matrices
from asynctp_kernels.cuda.gemm.few_rows_kernels import few_rows_kernel
from asynctp_kernels.cuda.gemm.gemm import TRITON_DTYPES, b_descriptor, b_scale_mode, k_major, refused_gemm, scale_mode
from asynctp_kernels.cuda.runtime.launch import Tma, describe, outlines, prepare
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.signals import IS_INTERPRETED

#: where arguments of the kernel begin
_BS, _OUTS, _A_SCALE = 1, 1 + MAX_OPERANDS, 1 + 2 * MAX_OPERANDS
_B_SCALES, _BIASES = _A_SCALE + 1, _A_SCALE + 1 + MAX_OPERANDS


class FewRows:
    """`a @ b` for each B, with scales, bias and a factor as `cublas.matmul` has them, in one kernel."""

    def __init__(self, call: Matrices, factor: float = 1.0, fast: bool = True) -> None:
        """call: Examples of the tensors. fast: fp8 sums may be."""
        a, bs, outs, a_scale, b_scales, biases = call.as_read()
        (m, k), widths, out_dtype = a.shape, [b.shape[1] for b in bs], outs[0].dtype
        programs = driver.machine(a.device.index)[1]
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
            "B_SCALE": b_scale_mode(b_scales, bs),
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

    def __call__(self, stream: int, call: Matrices) -> None:
        """Enqueue it, of operands that lie `as_read`."""
        a, bs, outs, a_scale, b_scales, biases = call
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


def takes(call: Matrices, fast: bool) -> bool:
    """Whether `FewRows` makes these matmuls, and is as fast as cuBLAS. fast: fp8 sums may be. Scales are no blocks'."""
    a, bs, outs, _, b_scales, biases = call
    (rows, depth), columns = a.shape, sum(b.shape[1] for b in bs)
    by_rows = bool(b_scales) and scale_mode(b_scales[0]) == 2
    if not few_rows_is_faster(rows, depth, columns, a.itemsize, by_rows) or (a.itemsize == 1 and not fast):
        return False
    return refused_gemm(a, bs, b_scales, biases, outs[0].dtype, [depth]) is None
