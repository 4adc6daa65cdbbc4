"""Matmuls of whole tensors, by what is fastest: of few rows `FewRows`, of more cuBLASLt, or the GEMM of `fused`.

All of these walk K with the same instructions, and round at the same places: a row has the same bits by each, in any
tile, and by `fused`. So batch-invariant calls make their matmuls so. cuBLAS by itself cuts K where there are few
rows, and adds the parts up; what it does here is compared first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asynctp_kernels.cuda.choose.tiles import INTERPRETED_TILES, Tiles, cublas_is_faster, few_rows_before, tiles_for
from asynctp_kernels.cuda.gemm.arguments import MAX_OPERANDS, CallArguments, GemmArguments, Matrices
from asynctp_kernels.cuda.gemm.cublaslt import Matmul, Matmuls, alike_matmuls, free_matmuls
from asynctp_kernels.cuda.gemm.few_rows import FewRows, takes
from asynctp_kernels.cuda.gemm.gemm import b_descriptor, b_scale_mode, prepare_gemm, scale_mode
from asynctp_kernels.cuda.runtime import driver as gpu
from asynctp_kernels.cuda.runtime.launch import aligned, aligned_columns, dense, describe, grid
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.signals import IS_INTERPRETED


class WholeGemm:
    """`a @ b` for each B, with scales, bias and a factor as `FewRows` has them, by the persistent GEMM.

    It awaits a word for each chunk of A's rows (`async_input`), or nothing: words of its own, which are always there.
    """

    def __init__(self, call: Matrices, factor: float = 1.0, fast: bool = True, chunks: int = 1) -> None:
        """Examples of a call's tensors, as of `FewRows`, but that rows of A may lie apart."""
        a, bs, outs, a_scale, b_scales, biases = call
        bs, biases = [aligned_columns(b) for b in bs], dense(biases)
        (m, k), widths, out_dtype = a.shape, [b.shape[1] for b in bs], outs[0].dtype
        sms, tiles = driver.machine(a.device.index)[1], gemm_tiles(call, fast)
        q, pitch = m // chunks, a.stride(0)
        row_tiles = -(-q // tiles.block_m)
        programs = grid(chunks * row_tiles * sum(-(-n // tiles.block_n) for n in widths), sms)
        a_like = describe(a, [chunks, q, k], [q * pitch, pitch, 1], [1, tiles.block_m, tiles.block_k])
        b_like = [b_descriptor(b, tiles) for b in bs]
        c_like = [
            describe(out, [chunks, q, n], [q * n, n, 1], tiles.stored) for out, n in zip(outs, widths, strict=True)
        ]
        self.unused = torch.zeros(4, dtype=torch.int32, device=a.device)
        bias = biases[0]
        args = GemmArguments(
            a=(a_like,), b=b_like, c=c_like, a_scale=(), b_scale=(), bias=[] if bias is None else [bias] * MAX_OPERANDS,
            words=self.unused, done_ptr=self.unused, outer=1, inner=q, k=(k,), n=widths, rank=0, world=chunks,
            chunk_size=row_tiles, own_tiles=row_tiles, value=0,
        )  # fmt: skip
        modes = (scale_mode(a_scale), b_scale_mode(b_scales, bs))
        self.launch = prepare_gemm(
            args.listed(self.unused.view(torch.float32)), programs, 1, tiles, bs, bias, modes, out_dtype,
            gathers=True, async_input=True, factor=factor,
        )  # fmt: skip
        self.arguments = CallArguments(args, self.unused.data_ptr())

    def __call__(self, stream: int, call: Matrices, awaits: tuple[int, int, int] | None = None) -> None:
        """Enqueue it, of operands that lie `as_read`, but that rows of A may lie apart.

        awaits: The address of a word for each chunk, the chunk that is the first, and what words have to be.
        """
        a, bs, outs, a_scale, b_scales, biases = call
        of_a, given = [] if a_scale is None else [a_scale], [bias for bias in biases if bias is not None]
        tensors = {"a": [a], "b": bs, "c": outs, "a_scale": of_a, "b_scale": b_scales, "bias": given}
        numbers = {} if awaits is None else dict(zip(("words", "rank", "value"), awaits, strict=True))
        self.launch(stream, self.arguments.of(tensors, numbers))


OwnMatmul = FewRows | WholeGemm | Matmuls
#: of random numbers that matmuls are compared with; scales s and t: of whole numbers a < 200, some a * (s * t) are
#: rounded otherwise than (a * s) * t, and than (a * t) * s, to bfloat16 and to float16
_SEED, _TELLING = 66, (1.0291106700897217, 1.146317481994629)


def gemm_tiles(call: Matrices, fast: bool) -> Tiles:
    """The tiles of `WholeGemm`."""
    if IS_INTERPRETED:
        return INTERPRETED_TILES
    a = call.a
    sizes = (a.shape[0], sum(b.shape[1] for b in call.bs), a.shape[1], driver.machine(a.device.index)[1])
    return tiles_for(a.dtype, a.itemsize == 1 and not fast, *sizes, out_itemsize=call.outs[0].itemsize)


def matmuls_for(call: Matrices, invariant: bool, factor: float = 1.0, fast: bool = True) -> OwnMatmul | None:
    """The way to make matmuls like these examples as fast as PyTorch does, or faster; None where it is left to do so.

    invariant: The call is batch-invariant: `own_matmul` makes it.
    """
    if invariant:
        return own_matmul(call, factor, fast)
    if takes(call, fast):
        return FewRows(call, factor, fast)
    return free_matmuls(call, fast) if factor == 1 else None


def own_matmul(call: Matrices, factor: float = 1.0, fast: bool = True) -> OwnMatmul:
    """The fastest with these bits, of examples of a call's tensors. fast: fp8 sums may be.

    cuBLAS multiplies by a factor before it rounds, and rounds between scales and a bias: these matmuls are ours.
    """
    call = call._replace(a=aligned(call.a))
    a, widths = call.a, [b.shape[1] for b in call.bs]
    rounds_alike = factor == 1 and not (call.b_scales and any(bias is not None for bias in call.biases))
    faster = not driver.IN_ORDER and cublas_is_faster(a.shape[0], widths, driver.machine(a.device.index)[1])
    if rounds_alike and faster:
        found = alike_matmuls(call, fast, lambda i, made: _is_alike(i, made, call, fast))
        if found is not None:
            return found
    return _kernel(call, factor, fast)


def _kernel(call: Matrices, factor: float, fast: bool) -> FewRows | WholeGemm:
    """The faster of our kernels."""
    tiles, columns, a = gemm_tiles(call, fast), sum(b.shape[1] for b in call.bs), call.a
    m, k = a.shape
    few = few_rows_before(tiles, a.itemsize, m, columns, k, driver.machine(a.device.index)[1])
    kind: type[FewRows] | type[WholeGemm] = FewRows if few else WholeGemm
    return kind(call, factor, fast)


def _is_alike(i: int, made: Matmul, call: Matrices, fast: bool) -> bool:
    """Whether a matmul of cuBLASLt has the bits of our kernel, of just these sizes.

    An algorithm that does not cut K has one order for all elements, which no number changes. Sums whose terms cancel
    are nothing but what was rounded on the way: another order gives most of them another value, however short they
    are. Random sums tell how a bias is added. Sums of small whole numbers are exact: with `_TELLING` scales they tell
    whether these are one factor, as they are in ours.
    """
    a, bs, outs, _, b_scales, biases = call
    half = a.shape[1] // 2
    random = torch.Generator(a.device).manual_seed(_SEED)

    def filled(sizes: Sequence[int], by: str) -> Tensor:
        numbers = torch.empty(tuple(sizes), dtype=torch.bfloat16, device=a.device)
        return numbers.random_(-2, 3, generator=random) if by == "whole" else numbers.normal_(generator=random)

    def cancelling(tensor: Tensor, dim: int) -> Tensor:
        """Numbers for A or B, whose K is `dim`: the products of one half of K are those of the other, negative in B."""
        sizes = [half if each == dim else size for each, size in enumerate(tensor.shape)]
        numbers = filled(sizes, "random").mul_(filled(sizes, "whole").mul_(3).exp2_())  # of many magnitudes
        made = torch.empty(tensor.shape, dtype=numbers.dtype, device=a.device)
        made.index_copy_(dim, order[:half], numbers)
        return made.index_copy_(dim, order[half:], numbers if dim else numbers.neg_())

    def like(tensor: Tensor, numbers: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=a.device).copy_(numbers)

    def agree(by: str) -> bool:
        ours, theirs = (torch.empty_like(outs[i]) for _ in range(2))
        cancels = by == "cancelling"  # beside a bias, such a sum is nothing
        of_both = ((a, 1), (bs[i], 0))
        numbers = [cancelling(*each) if cancels else filled(each[0].shape, by) for each in of_both]
        like_a, like_b = like(a, numbers[0]), [like(bs[i], numbers[1])]
        of_a, of_b = (torch.full((1,), scale, device=a.device) for scale in _TELLING)
        bias = [None if own is None else like(own, filled(own.shape, by) * (not cancels)) for own in biases[i : i + 1]]
        scales: tuple[Tensor | None, list[Tensor]] = (of_a, [of_b]) if b_scales else (None, [])
        stream = driver.current_stream(a.device.index)
        matrices = Matrices(like_a, like_b, [ours], *scales, bias)
        _kernel(matrices, 1.0, fast)(stream, matrices)
        Matmuls([made])(stream, matrices._replace(outs=[theirs]))
        return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))

    with gpu.relaxed_captures():
        order = torch.randperm(2 * half, generator=random, device=a.device)
        return all(agree(by) for by in ("cancelling", "random", "whole")[: 2 + bool(b_scales)])
