"""Plain functional collectives, in ordinary memory: the transport of the reference programs where no other is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ReduceOp

from asynctp_passes.ops.arguments import group_and_size, normalize_dim
from asynctp_passes.ops.recipes import FP8_DTYPES
from asynctp_passes.torch_private import process_groups

Mover = Any
"""`asynctp_kernels.cuda.Mover`: a group's collectives on a wire of its own, complete when they return.

They give None where it has none for a call. Of a call that is `invariant`, `multiply` makes the matmuls.
"""


def gathered_shape(shape: Sequence[int], dim: int, group_size: int) -> tuple[int, ...]:
    """A shard's shape, `group_size` times as long in `dim`."""
    dim = normalize_dim(dim, len(shape))
    return (*shape[:dim], shape[dim] * group_size, *shape[dim + 1 :])


def gather_with(
    shard: Tensor, row_numbers: Tensor | None, dim: int, group_size: int, group_name: Any, mover: Mover | None
) -> tuple[Tensor, Tensor | None]:
    """All ranks' shards, and numbers, joined along `dim`: by the mover, if there is one and it can."""
    dim = normalize_dim(dim, shard.ndim)
    found = None if mover is None else mover.gather(shard.contiguous(), row_numbers)
    if found is not None:
        pieces, of_numbers = found
        return _joined(pieces, dim), None if of_numbers is None else _joined(of_numbers, dim)
    whole = gather(shard, dim, group_size, group_name)
    return whole, None if row_numbers is None else gather(row_numbers, dim, group_size, group_name)


def _joined(pieces: Tensor, dim: int) -> Tensor:
    """[ranks, *shape] as the ranks' tensors one after the other along `dim`: contiguous."""
    ranks, *shape = pieces.shape
    return pieces.movedim(0, dim).reshape(gathered_shape(shape, dim, ranks)).contiguous()


def gather(shard: Tensor, dim: int, group_size: int, group_name: Any) -> Tensor:
    """All ranks' shards, joined along `dim` in rank order: contiguous, ordinary memory.

    fp8 travels as bytes (gloo has no fp8 type), which is exact: a gather only moves data.
    """
    fp8 = shard.dtype in FP8_DTYPES
    wire = (shard.view(torch.uint8) if fp8 else shard).contiguous()
    c10d = torch.ops._c10d_functional
    stacked = c10d.wait_tensor(c10d.all_gather_into_tensor(wire, group_size, process_groups.group_name_of(group_name)))
    full = _joined(stacked.view(group_size, *shard.shape), normalize_dim(dim, shard.ndim))
    return full.view(shard.dtype) if fp8 else full


def reduce_scatter(
    full: Tensor, reduce_op: str, dim: int, group_size: int, group_name: Any, mover: Mover | None = None
) -> Tensor:
    """This rank's block along `dim` of the ranks' sum or average: by the mover, if there is one and it can.

    gloo's average is spelled out as sum, then division, both rounded to the tensor's dtype (of integers, cut off).
    """
    dim = normalize_dim(dim, full.ndim)
    sizes = (*full.shape[:dim], group_size, full.shape[dim] // group_size, *full.shape[dim + 1 :])
    blocks = full.reshape(sizes).movedim(dim, 0).contiguous()
    part: Tensor | None = None if mover is None else mover.scatter(blocks, reduce_op)
    if part is not None:
        return part
    divide = reduce_op == "avg" and full.device.type == "cpu"
    c10d = torch.ops._c10d_functional
    op = "sum" if divide else reduce_op
    block = c10d.wait_tensor(
        c10d.reduce_scatter_tensor(blocks, op, group_size, process_groups.group_name_of(group_name))
    )
    shard: Tensor = block.view(blocks.shape[1:])
    return (shard / group_size).to(shard.dtype) if divide else shard


def all_reduce(
    partial: Tensor, reduce_op: str, group_name: Any, mover: Mover | None = None, *, in_place: bool = False
) -> Tensor:
    """The ranks' sum or average, on every rank; gloo's average, and a mover, as in `reduce_scatter`.

    in_place: `partial` is the caller's own and may become the result, which saves a copy. In a graph that is traced
    Inductor decides that.
    """
    found: Tensor | None = None if mover is None else mover.all_reduce(partial.contiguous(), reduce_op)
    if found is not None:
        return found
    divide = reduce_op == "avg" and partial.device.type == "cpu"
    if in_place and not torch.compiler.is_compiling():
        op = ReduceOp.AVG if reduce_op == "avg" and not divide else ReduceOp.SUM
        total = partial.contiguous()
        torch.distributed.all_reduce(total, op, group=process_groups.process_group(group_name))
    else:
        c10d, name = torch.ops._c10d_functional, "sum" if divide else reduce_op
        total = c10d.wait_tensor(c10d.all_reduce(partial, name, process_groups.group_name_of(group_name)))
    return total / group_and_size(group_name)[1] if divide else total
