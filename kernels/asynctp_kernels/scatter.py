"""Launchers of the scatter side: reduce_scatter(sum_i A_i @ B_i).

A_i, B_i ─matmul_scatter─▶ peers' landings ─▶ reduced with the own chunk in the same kernel ─▶ out_shard
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from .config import MAX_CHUNKS, interpreted_tiles
from .gather import scale_mode
from .layout import ShardLayout, row_slices, scatter_layout
from .scatter_kernel import matmul_scatter_kernel
from .support import Call, Operand, require_support
from .workspace import Workspace, acquire, align


def matmul_reduce_scatter(
    a_parts: list[torch.Tensor],
    b_parts: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    group: ProcessGroup,
) -> torch.Tensor:
    """reduce_scatter(sum_i (A_i @ B_i + bias_i), reduce_op, scatter_dim).

    A bias belongs to its rank's partial product, so it is reduced like the rest of it.

    Shapes:
        a_parts[i]: [..., K_i], equal leading dims; b_parts[i]: [K_i, N]; biases[i]: [N] or [1, N].
        Result: [..., N] in A's dtype with `scatter_dim` divided by the group's size.

    Raises:
        UnsupportedCall: the reason of `supports`.
        PeerTimeout: a peer's chunk did not land in time.
        SymmetricMemoryError: the memory could not be set up, or an earlier call on `group` failed.
    """
    call = _call("matmul_reduce_scatter", a_parts, b_parts, biases, reduce_op, scatter_dim, group, None)
    return _run(call, a_parts, b_parts, [None] * len(a_parts), [None] * len(b_parts), biases, group)


def scaled_matmul_reduce_scatter(
    a_parts: list[torch.Tensor],
    b_parts: list[torch.Tensor],
    a_scales: list[torch.Tensor],
    b_scales: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group: ProcessGroup,
) -> torch.Tensor:
    """reduce_scatter(sum_i ((A_i @ B_i) * a_scale_i * b_scale_i + bias_i)), in fp8 with fp32 scales.

    Shapes:
        As `matmul_reduce_scatter`; a_scales[i]: one element or [..., 1]; b_scales[i]: one element or [1, N].

    `use_fast_accum` permits less exact sums; the interpreted kernels always sum in fp32.

    Raises:
        As `matmul_reduce_scatter`.
    """
    call = _call("scaled_matmul_reduce_scatter", a_parts, b_parts, biases, reduce_op, scatter_dim, group,
                 out_dtype, a_scales, b_scales)  # fmt: skip
    return _run(call, a_parts, b_parts, a_scales, b_scales, biases, group)


def _call(
    op: str,
    a_parts: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    reduce_op: str,
    dim: int,
    group: ProcessGroup,
    out_dtype: torch.dtype | None,
    a_scales: Sequence[torch.Tensor] = (),
    b_scales: Sequence[torch.Tensor] = (),
) -> Call:
    return Call(
        op=op,
        a=Operand.all_of(a_parts),
        b=Operand.all_of(b_parts),
        biases=Operand.each_of(biases),
        dim=dim,
        world_size=group.size(),
        out_dtype=out_dtype,
        a_scales=Operand.all_of(a_scales),
        b_scales=Operand.all_of(b_scales),
        reduce_op=reduce_op,
    )


def _run(
    call: Call,
    a_parts: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    a_scales: Sequence[torch.Tensor | None],
    b_scales: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    group: ProcessGroup,
) -> torch.Tensor:
    """Check, then one launch that multiplies, sends and reduces."""
    require_support(call)
    full_shape = (*a_parts[0].shape[:-1], b_parts[0].shape[1])
    layout = scatter_layout(full_shape, call.dim % len(full_shape), call.world_size)
    out_shard = a_parts[0].new_empty(layout.shard_shape, dtype=call.out_dtype)
    if out_shard.numel() == 0:  # nothing moves, on any rank: not a call of the protocol
        return out_shard
    part_bytes = align(out_shard.numel() * out_shard.itemsize)
    workspace = acquire(group, "scatter", part_bytes * call.world_size)
    with workspace.call() as limit_ns:
        _launch(call, layout, workspace, limit_ns, part_bytes, a_parts, b_parts, a_scales, b_scales, biases, out_shard)
        workspace.check(call.op, limit_ns)
    return out_shard


def _flat(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if t is None else t.reshape(-1).contiguous() for t in tensors)


def _launch(
    call: Call,
    layout: ShardLayout,
    workspace: Workspace,
    limit_ns: int,
    part_bytes: int,
    a_parts: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    a_scales: Sequence[torch.Tensor | None],
    b_scales: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    out_shard: torch.Tensor,
) -> None:
    tiles, handle = interpreted_tiles(), workspace.handle
    chunk_rows, _ = row_slices(layout.rows, tiles.block_m, tiles.chunks)
    a2ds = tuple(a.reshape(layout.full_rows, a.shape[-1]) for a in a_parts)
    tile_count = math.ceil(layout.rows / tiles.block_m) * math.ceil(layout.cols / tiles.block_n)
    matmul_scatter_kernel[(layout.world * tile_count,)](
        a2ds,
        tuple(b_parts),
        _flat(biases),
        _flat(a_scales),
        _flat(b_scales),
        tuple(a.shape[1] for a in a2ds),
        tuple((*a.stride(), *b.stride()) for a, b in zip(a2ds, b_parts, strict=True)),
        out_shard,
        layout.rows,
        layout.cols,
        layout.inner,
        chunk_rows,
        handle.buffer_ptrs_dev,
        handle.signal_pad_ptrs_dev,
        workspace.flags_offset,
        workspace.slot_bytes,
        part_bytes,
        workspace.counters,
        workspace.epoch,
        limit_ns,
        workspace.status,
        handle.rank,
        layout.world,
        PARTS=len(a2ds),
        A_SCALES=tuple(scale_mode(s) for s in a_scales),
        B_SCALES=tuple(scale_mode(s) for s in b_scales),
        ALONG_N=layout.along_last,
        AVERAGE=call.reduce_op == "avg",
        MAX_CHUNKS=MAX_CHUNKS,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
    )
