"""The persistent GEMM as both plans use it: what it takes, and its two ways to be compiled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from asynctp_kernels.cuda.choose.tiles import FewRowsTiles, Tiles
from asynctp_kernels.cuda.gemm.arguments import MAX_OPERANDS
from asynctp_kernels.cuda.gemm.gemm_kernels import gemm_kernel
from asynctp_kernels.cuda.runtime.launch import Launch, NotCompiled, describe, leaves_room, prepare
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, MAX_OWN

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
log = logging.getLogger(__name__)
NOT_TUNED = "the GEMM is tuned for compute capability 9 (H100, H200) only"


def scale_mode(scale: Tensor | None) -> int:
    """0: none; 1: one element; 2: one per row or column."""
    return 0 if scale is None else 1 if scale.numel() == 1 else 2


def b_scale_mode(scales: Sequence[Tensor], bs: Sequence[Tensor]) -> int:
    """The same of Bs; 3: one element, which sums are multiplied by after A's, as products that are not fp8 need it.

    These may be near the ends of fp32's range, where the product of both scales may be infinite, or 0.
    """
    mode = scale_mode(scales[0] if scales else None)
    return 3 if mode == 1 and bs[0].itemsize > 1 else mode


def k_major(b: Tensor) -> bool:
    """Whether [K, N] `b` has its K elements side by side (a transposed weight), and not its N."""
    return b.stride(0) == 1 and (b.stride(1) != 1 or b.shape[0] > 1)


def b_descriptor(b: Tensor, tiles: Tiles | FewRowsTiles) -> Any:
    """[K, N] `b` as TMA sees it: rows are what is contiguous."""
    k, n = b.shape
    if k_major(b):
        return describe(b, [n, k], [b.stride(1), 1], [tiles.block_n, tiles.block_k])
    return describe(b, [k, n], [b.stride(0), 1], [tiles.block_k, tiles.block_n])


def prepare_gemm(
    args: Sequence[Any],
    programs: int,
    shares: int,
    tiles: Tiles,
    bs: Sequence[Tensor],
    bias: Tensor | None,
    scale_modes: tuple[int, int],
    out_dtype: torch.dtype,
    gathers: bool,
    scale_travels: bool = False,
    inbox: bool = False,
    clears: bool = True,
    async_input: bool = False,
    rounded: torch.dtype | None = None,
    factor: float = 1.0,
    padded: bool = False,
) -> Launch:
    """Compile `gemm_kernels.gemm_kernel`, or that of `pingpong_kernels`, for one plan.

    Args:
        args: Example arguments.
        programs: CTAs that run at once.
        shares: Into how many the tiles are dealt out, each to so many CTAs (`gemm_kernels.share_of`). Lowered to one
            where other kernels of ours find no room beside this one: they would take SMs between two shares, and wait
            for the second.
        tiles: Block sizes.
        bs: All Bs (gather), or those of all pairs (scatter); of one memory order.
        bias: Of the first matmul; all have one, or none.
        scale_modes: Of A and of the Bs (`scale_mode`, `b_scale_mode`).
        out_dtype: Of the result.
        gathers, scale_travels: The gather's GEMM, whose A scale came with the data.
        inbox: The gathered rows are the others' only.
        clears: The GEMM is the only reader of the words of chunks, and clears them.
        async_input: The gather's GEMM, with a word of the caller's for each chunk.
        rounded: The dtype that a matmul is rounded to before it is stored as `out_dtype`; None: that.
        factor: What every result is multiplied by, once rounded.
        padded: Zeros are stored after the `real_rows` of each outer block.
    """
    constants = {
        "GATHER": gathers,
        "OWN": gathers and not async_input,
        "INBOX": inbox,
        "CLEARS": gathers and not async_input and clears,
        "COUNT": len(bs),
        "CHUNKS": 1 if async_input else MAX_CHUNKS if gathers else MAX_OWN,
        "B_K_MAJOR": k_major(bs[0]),
        "A_SCALE": scale_modes[0],
        "SCALE_TRAVELS": scale_travels,
        "B_SCALE": scale_modes[1],
        "BIAS": int(bias is not None),
        "OUT": TRITON_DTYPES[out_dtype],
        "ROUNDED": TRITON_DTYPES[rounded or out_dtype],
        "IMPRECISE": tiles.imprecise,
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BK": tiles.block_k,
        "SPLIT": tiles.split,
        "GROUP_M": tiles.group_m,
        "SLOTS": programs,
        "PROGRAMS": programs * shares,
        "FACTOR": factor,
        "PADDED": padded,
    }
    rounds_once = rounded in (None, out_dtype)
    launch = _prepare(args, tiles, constants, rounds_once)
    if shares > 1 and not leaves_room(launch):
        launch = _prepare(args, tiles, {**constants, "PROGRAMS": programs}, rounds_once)
    return launch


def _prepare(args: Sequence[Any], tiles: Tiles, constants: dict[str, Any], rounds_once: bool) -> Launch:
    if tiles.pingpong:
        launch = _prepare_pingpong(args, tiles, constants) if rounds_once else None
        if launch is not None:
            return launch
        tiles = replace(tiles, pingpong=False, warps=4)
    limit = {"maxnreg": tiles.registers} if tiles.warps == 8 else {}
    programs = constants["PROGRAMS"]
    return prepare(gemm_kernel, programs, args, constants, tiles.warps, num_stages=tiles.stages, **limit)


def _prepare_pingpong(args: Sequence[Any], tiles: Tiles, constants: dict[str, Any]) -> Launch | None:
    """`pingpong_kernels.gemm_kernel`, which reads and writes the same blocks as `gemm_kernel` of such tiles.

    None where this Triton's Gluon, which is experimental, does not take it: a warning says so, once, and it is not
    tried again. Ranks need not agree on it.
    """
    if _gluon_faults:
        return None
    try:
        from asynctp_kernels.cuda.gemm import pingpong_kernels as pingpong

        args = [pingpong.with_layout(arg) if isinstance(arg, TensorDescriptor) else arg for arg in args]
    except Exception as error:  # whatever an API that has changed says
        _give_up(f"{type(error).__name__}: {error}")
        return None
    mine = {name: value for name, value in constants.items() if name not in ("OUT", "ROUNDED", "IMPRECISE")}
    mine["STAGES"] = tiles.stages
    warps = pingpong.MULTIPLIER.value
    try:
        return prepare(pingpong.gemm_kernel, mine["PROGRAMS"], args, mine, warps, maxnreg=tiles.registers)
    except NotCompiled as error:
        _give_up(str(error))
        return None


_gluon_faults: list[str] = []


def _give_up(fault: str) -> None:
    _gluon_faults.append(fault)
    log.warning(
        "some calls take longer than they could, and are as right: Triton %s has another Gluon: %s",
        triton.__version__,
        fault,
    )


def refused_dtypes(operands: torch.dtype, scaled: bool, result: torch.dtype) -> str | None:
    """Why the GEMM, which sums in fp32 and scales before it rounds, does not take operands of a dtype."""
    if operands == torch.int8:
        return "int8 operands: the GEMM sums in fp32, and not in int32"
    if operands == torch.float16 and scaled:
        return "float16 operands with scales: the program's matmul may become infinite before it is scaled"
    if operands == torch.float32:
        return "fp32 operands"
    return None if result in TRITON_DTYPES else f"a result of {result}"


def refused_gemm(
    a: Tensor,
    bs: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    depths: Sequence[int],
) -> str | None:
    """Why the persistent TMA GEMM cannot run this."""
    if (reason := refused_dtypes(a.dtype, bool(b_scales), out_dtype)) is not None:
        return reason
    return refused_gpu(a.device.index) or refused_layouts(a.itemsize, bs, b_scales, biases, out_dtype, depths)


def refused_gpu(index: int) -> str | None:
    """Why it cannot run on this GPU."""
    return None if driver.machine(index)[0][0] == 9 else NOT_TUNED


def refused_layouts(
    itemsize: int,
    bs: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    depths: Sequence[int],
) -> str | None:
    """Why it cannot run with right operands that lie so, for an A with elements of `itemsize` bytes."""
    if len(bs) > MAX_OPERANDS:
        return f"{len(bs)} matmuls, more than {MAX_OPERANDS}"
    if len({k_major(b) for b in bs}) != 1:
        return "Bs of both memory orders"
    if any(b.dtype != bs[0].dtype for b in bs):
        return "Bs of several dtypes"
    fp8 = itemsize == 1
    for b in bs:
        pitch = b.stride(1) if k_major(b) else b.stride(0)
        if (b.stride(0) != 1 and b.stride(1) != 1) or pitch * b.itemsize % 16:
            return f"a B of strides {tuple(b.stride())}: TMA needs one stride of 1 and the other a multiple of 16 bytes"
        if pitch < b.shape[0 if k_major(b) else 1]:
            return f"a B of strides {tuple(b.stride())}, which overlaps itself"
        if fp8 and not k_major(b):
            return "an fp8 B whose columns are contiguous: the tensor cores need K contiguous"
        if b.shape[1] * out_dtype.itemsize % 16:
            return f"{b.shape[1]} columns: TMA needs rows of a multiple of 16 bytes"
    if any(k * itemsize % 16 for k in depths):
        return "an A whose rows are not multiples of 16 bytes"
    if len({bias is None for bias in biases}) != 1 or len({bias.dtype for bias in biases if bias is not None}) > 1:
        return "biases for some matmuls only, or of several dtypes"
    if len({scale_mode(scale) for scale in b_scales}) > 1:
        return "tensorwise and rowwise B scales in one call"
    return None
