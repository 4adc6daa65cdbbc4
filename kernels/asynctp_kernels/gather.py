"""Launchers of the gather side: all_gather(a_shard) @ B for any number of Bs.

a_shard ─publish─▶ landing of every peer ─gather_matmul (per B)─▶ outs
                                         └─collect──────────────▶ a_full (ordinary memory)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from .config import MAX_CHUNKS, Tiles, interpreted_tiles
from .gather_kernel import collect_kernel, gather_matmul_kernel, publish_kernel
from .layout import ShardLayout, gather_layout, row_slices
from .numerics import raw
from .signals import wait_all_kernel
from .support import Call, Operand, require_support
from .workspace import Workspace, acquire, align

_SCALE_BYTES = 4


@dataclass(frozen=True)
class GatherPlan:
    """What all launches of one call share.

    Attributes:
        op, rank: for messages and addressing.
        layout: of the shard in A.
        tiles, chunk_rows, chunks: how the work is cut.
        a2d: the shard as [rows, cols], any strides.
        a_scale: fp32 and flat, or None. One element, one per shard row (`scale_travels`), or one per row of A.
        scale_travels: the scale is pushed along with the shard.
        scales_offset, part_bytes: the landing of one source: data, then scales.
    """

    op: str
    rank: int
    layout: ShardLayout
    tiles: Tiles
    chunk_rows: int
    chunks: int
    a2d: torch.Tensor
    a_scale: torch.Tensor | None
    scale_travels: bool
    scales_offset: int
    part_bytes: int

    @property
    def a_scale_mode(self) -> int:
        return scale_mode(self.a_scale, self.scale_travels)


def scale_mode(scale: torch.Tensor | None, rowwise: bool = False) -> int:
    """0: no scale; 1: one element; 2: one per row or column (see `numerics.scale_and_bias`)."""
    if scale is None:
        return 0
    return 2 if rowwise or scale.numel() != 1 else 1


def all_gather_matmul(
    a_shard: torch.Tensor,
    bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    gather_dim: int,
    return_a_full: bool,
    group: ProcessGroup,
) -> list[torch.Tensor]:
    """all_gather(a_shard, gather_dim) @ b + bias, for every b.

    Shapes:
        a_shard: [..., K], any leading dims; bs[i]: [K of the gathered A, N_i]; biases[i]: [N_i] or [1, N_i].
        Result: one [leading dims of the gathered A, N_i] per b in A's dtype, then the gathered A if asked for.

    Raises:
        UnsupportedCall: the reason of `supports`.
        PeerTimeout: a peer's chunk did not land in time.
        SymmetricMemoryError: the memory could not be set up, or an earlier call on `group` failed.
    """
    return _run(_call("all_gather_matmul", a_shard, bs, biases, gather_dim, group, a_shard.dtype),
                a_shard, None, bs, [None] * len(bs), biases, return_a_full, group)  # fmt: skip


def all_gather_scaled_matmul(
    a_shard: torch.Tensor,
    a_scale: torch.Tensor,
    bs: list[torch.Tensor],
    b_scales: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    gather_dim: int,
    gather_a_scale: bool,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    return_a_full: bool,
    group: ProcessGroup,
) -> list[torch.Tensor]:
    """(all_gather(a_shard) @ b) * a_scale * b_scale + bias for every b, in fp8 with fp32 scales.

    Shapes:
        As `all_gather_matmul`; a_scale: one element, or one per row: [..., 1] with the leading dims of the
        shard if `gather_a_scale` (it is then gathered too), else of the gathered A. b_scales[i]: one element
        or [1, N_i].

    `use_fast_accum` permits less exact sums; the interpreted kernels always sum in fp32.

    Raises:
        As `all_gather_matmul`.
    """
    call = _call("all_gather_scaled_matmul", a_shard, bs, biases, gather_dim, group, out_dtype,
                 a_scale, b_scales, gather_a_scale)  # fmt: skip
    return _run(call, a_shard, a_scale, bs, b_scales, biases, return_a_full, group)


def _call(
    op: str,
    a_shard: torch.Tensor,
    bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    dim: int,
    group: ProcessGroup,
    out_dtype: torch.dtype,
    a_scale: torch.Tensor | None = None,
    b_scales: Sequence[torch.Tensor] = (),
    gather_a_scale: bool = False,
) -> Call:
    return Call(
        op=op,
        a=(Operand.of(a_shard),),
        b=Operand.all_of(bs),
        biases=Operand.each_of(biases),
        dim=dim,
        world_size=group.size(),
        out_dtype=out_dtype,
        a_scales=() if a_scale is None else (Operand.of(a_scale),),
        b_scales=Operand.all_of(b_scales),
        gather_a_scale=gather_a_scale,
    )


def _run(
    call: Call,
    a_shard: torch.Tensor,
    a_scale: torch.Tensor | None,
    bs: Sequence[torch.Tensor],
    b_scales: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    return_a_full: bool,
    group: ProcessGroup,
) -> list[torch.Tensor]:
    """Check, publish, multiply, collect."""
    require_support(call)
    plan = _plan(call, a_shard, a_scale, group.rank())
    lead = plan.layout.full_shape[:-1]
    outs = [a_shard.new_empty((*lead, b.shape[1]), dtype=call.out_dtype) for b in bs]
    a_full = a_shard.new_empty(plan.layout.full_shape)
    if a_shard.numel() == 0:  # nothing moves, on any rank: not a call of the protocol
        _multiply_nothing(outs, biases)
    else:
        workspace = acquire(group, "gather", align(plan.part_bytes * call.world_size))
        with workspace.call() as limit_ns:
            _publish(plan, workspace)
            for out, b, b_scale, bias in zip(outs, bs, b_scales, biases, strict=True):
                _multiply(plan, workspace, limit_ns, b, b_scale, bias, out)
            if return_a_full:
                _collect(plan, workspace, limit_ns, a_full)
            elif not any(out.numel() for out in outs):
                _wait_all(plan, workspace, limit_ns)
    return [*outs, a_full] if return_a_full else outs


def _plan(call: Call, a_shard: torch.Tensor, a_scale: torch.Tensor | None, rank: int) -> GatherPlan:
    layout = gather_layout(a_shard.shape, call.dim % a_shard.ndim, call.world_size)
    tiles = interpreted_tiles()
    chunk_rows, chunks = row_slices(layout.rows, tiles.block_m, tiles.chunks)
    scales_offset = align(a_shard.numel() * a_shard.itemsize)
    scale_bytes = align(layout.rows * _SCALE_BYTES) if call.gather_a_scale else 0
    return GatherPlan(
        op=call.op,
        rank=rank,
        layout=layout,
        tiles=tiles,
        chunk_rows=chunk_rows,
        chunks=chunks,
        a2d=a_shard.reshape(layout.rows, layout.cols),
        a_scale=None if a_scale is None else a_scale.reshape(-1),
        scale_travels=call.gather_a_scale,
        scales_offset=scales_offset,
        part_bytes=scales_offset + scale_bytes,
    )


def _multiply_nothing(outs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
    """The product over an empty contraction dim (or of no rows): the bias alone."""
    for out, bias in zip(outs, biases, strict=True):
        out.copy_(torch.zeros(()) if bias is None else bias.reshape(-1).expand(out.shape))


def _publish(plan: GatherPlan, workspace: Workspace) -> None:
    handle, a2d = workspace.handle, raw(plan.a2d)
    publish_kernel[(plan.layout.world - 1, plan.chunks)](
        a2d,
        plan.a_scale if plan.scale_travels else None,
        *a2d.stride(),
        plan.layout.rows,
        plan.layout.cols,
        plan.chunk_rows,
        handle.buffer_ptrs_dev,
        handle.signal_pad_ptrs_dev,
        workspace.flags_offset,
        workspace.slot_bytes,
        plan.part_bytes,
        plan.scales_offset,
        workspace.epoch,
        plan.rank,
        plan.layout.world,
        MAX_CHUNKS=MAX_CHUNKS,
        BLOCK_M=plan.tiles.block_m,
        BLOCK_K=plan.tiles.block_k,
    )


def _multiply(
    plan: GatherPlan,
    workspace: Workspace,
    limit_ns: int,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    layout, tiles = plan.layout, plan.tiles
    steps = 1 if layout.along_last else layout.world
    tiles_m, tiles_n = math.ceil(layout.rows / tiles.block_m), math.ceil(b.shape[1] / tiles.block_n)
    gather_matmul_kernel[(steps * tiles_m * tiles_n,)](
        plan.a2d,
        b,
        None if bias is None else bias.reshape(-1).contiguous(),
        plan.a_scale,
        None if b_scale is None else b_scale.reshape(-1).contiguous(),
        out,
        *plan.a2d.stride(),
        *b.stride(),
        layout.rows,
        b.shape[1],
        layout.cols,
        layout.inner,
        plan.chunk_rows,
        workspace.own_slots,
        workspace.own_flags,
        workspace.slot_bytes,
        plan.part_bytes,
        plan.scales_offset,
        workspace.epoch,
        limit_ns,
        workspace.status,
        plan.rank,
        layout.world,
        ALONG_K=layout.along_last,
        SCALE_TRAVELS=plan.scale_travels,
        A_SCALE=plan.a_scale_mode,
        B_SCALE=scale_mode(b_scale),
        MAX_CHUNKS=MAX_CHUNKS,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
    )
    workspace.check(plan.op, limit_ns)


def _collect(plan: GatherPlan, workspace: Workspace, limit_ns: int, a_full: torch.Tensor) -> None:
    layout, tiles, a2d = plan.layout, plan.tiles, raw(plan.a2d)
    collect_kernel[(layout.world, math.ceil(layout.rows / tiles.block_m))](
        a2d,
        raw(a_full),
        *a2d.stride(),
        layout.rows,
        layout.cols,
        layout.inner,
        plan.chunk_rows,
        workspace.own_slots,
        workspace.own_flags,
        workspace.slot_bytes,
        plan.part_bytes,
        workspace.epoch,
        limit_ns,
        workspace.status,
        plan.rank,
        layout.world,
        ALONG_K=layout.along_last,
        MAX_CHUNKS=MAX_CHUNKS,
        BLOCK_M=tiles.block_m,
        BLOCK_K=tiles.block_k,
    )
    workspace.check(plan.op, limit_ns)


def _wait_all(plan: GatherPlan, workspace: Workspace, limit_ns: int) -> None:
    """Nothing consumed this call, but the slot invariant needs every peer to have been waited for."""
    wait_all_kernel[(1,)](
        workspace.own_flags,
        workspace.epoch,
        limit_ns,
        workspace.status,
        plan.rank,
        plan.layout.world,
        plan.chunks,
        MAX_CHUNKS=MAX_CHUNKS,
    )
    workspace.check(plan.op, limit_ns)
