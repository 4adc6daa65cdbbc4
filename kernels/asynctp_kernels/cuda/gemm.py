"""The persistent GEMM as both plans use it: what it takes, and one way to compile it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .gemm_kernels import gemm_kernel
from .launch import Launch, describe, prepare
from .memory import MAX_CHUNKS
from .tiles import Tiles

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MAX_OPERANDS = 4


def scale_mode(scale: Tensor | None) -> int:
    """0: none; 1: one element; 2: one per row or column."""
    return 0 if scale is None else 1 if scale.numel() == 1 else 2


def k_major(b: Tensor) -> bool:
    """Whether [K, N] `b` has its K elements side by side (a transposed weight), and not its N."""
    return b.stride(0) == 1 and (b.stride(1) != 1 or b.shape[0] > 1)


def b_descriptor(b: Tensor, tiles: Tiles) -> Any:
    """[K, N] `b` as TMA sees it: rows are what is contiguous."""
    k, n = b.shape
    if k_major(b):
        return describe(b, [n, k], [b.stride(1), 1], [tiles.block_n, tiles.block_k])
    return describe(b, [k, n], [b.stride(0), 1], [tiles.block_k, tiles.block_n])


def register_limit(tiles: Tiles) -> dict[str, int]:
    """Leave registers for a small kernel's CTA beside the GEMM's; 192 a thread cost no GEMM anything measurable."""
    return {"maxnreg": 192} if tiles.warps == 8 else {}


def prepare_gemm(
    args: Sequence[Any],
    programs: int,
    tiles: Tiles,
    bs: Sequence[Tensor],
    bias: Tensor | None,
    scale_modes: tuple[int, int],
    out_dtype: torch.dtype,
    gathers: bool,
    scale_travels: bool = False,
) -> Launch:
    """Compile `gemm_kernel` for one plan.

    Args:
        args: Example arguments.
        programs: Size of the grid.
        tiles: Block sizes.
        bs: All Bs (gather), or those of all pairs (scatter); of one memory order.
        bias: Of the first product; all have one, or none.
        scale_modes: Of A and of the Bs (`scale_mode`).
        out_dtype: Of the result.
        gathers, scale_travels: The gather's GEMM, whose A scale came with the data.
    """
    constants = {
        "GATHER": gathers,
        "COUNT": len(bs),
        "MAX_CHUNKS": MAX_CHUNKS,
        "B_K_MAJOR": k_major(bs[0]),
        "A_SCALE": scale_modes[0],
        "SCALE_TRAVELS": scale_travels,
        "B_SCALE": scale_modes[1],
        "BIAS": int(bias is not None),
        "OUT": TRITON_DTYPES[out_dtype],
        "IMPRECISE": tiles.imprecise,
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BK": tiles.block_k,
        "GROUP_M": tiles.group_m,
        "PROGRAMS": programs,
    }
    limit = register_limit(tiles)
    return prepare(gemm_kernel, programs, args, constants, tiles.warps, num_stages=tiles.stages, **limit)
