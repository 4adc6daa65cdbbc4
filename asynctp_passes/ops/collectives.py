"""Collectives without a matmul, by the same means as those with one: they leave the GPU's SMs to compute.

    asynctp::all_gather, asynctp::reduce_scatter, asynctp::all_reduce, asynctp::wait

A group whose matmuls' collectives are fused has these for its others too: one rank may multiply what it gathers, and
another one may not. They have the contract of the functional collectives: along dim 0, and asynchronous, so that the
result must go through `_c10d_functional.wait_tensor` before it is read. An input that is read later is copied first,
since Inductor may write to it. Where no kernel moves the data (`cuda.plans.collectives`), they are the functional
collectives. `calls` says what their arguments are.

`asynctp::wait(result, source)` is how a rewritten graph waits. It reads the collective's input too, so that Inductor
leaves that alone for so long: no copy (`copy=False`). And it gives its result, as an alias, where `wait_tensor` is a
mutation to Inductor, which loses sight of how a mutated tensor is read when it chooses the tiles of what reads it
(`torch._inductor.tiling_utils.extract_normalized_read_writes`, 2.11 to 2.13: a transposing copy took five times as
long). AOTAutograd does not take ops that return an alias: this one is for graphs after it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.ops import plain_collectives as plain
from asynctp_passes.ops.arguments import check_group, group_and_size, require
from asynctp_passes.ops.calls import COLLECTIVES
from asynctp_passes.ops.checks import EXTREMES, REDUCE_OPS
from asynctp_passes.ops.choice import kernels_or_none
from asynctp_passes.ops.recipes import FP8_DTYPES
from asynctp_passes.ops.register import define
from asynctp_passes.torch_private import process_groups, torch_ops

ALL_REDUCE_OPS = (*REDUCE_OPS, *EXTREMES)


# --- real implementations ---------------------------------------------------------------------------------------
def _real_all_gather(
    shard: Tensor, group_size: int, group_name: Any, copy: bool = True, all_keep: bool = True, accord: int = 0
) -> Tensor:
    check = functools.partial(check_group, "all_gather", group_size, group_name)
    _check_dims("all_gather", shard)
    if (kernels := kernels_or_none(shard)) is not None:
        group = process_groups.process_group(group_name)
        found: Tensor | None = kernels.run_bulk_gather(shard, group_size, group, check, all_keep, copy, accord)
        if found is not None:
            return found
    check()
    shard = _unchanged(shard, copy)
    fp8 = shard.dtype in FP8_DTYPES  # gloo has no such type
    wire = shard.view(torch.uint8) if fp8 else shard
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    full: Tensor = gather(wire, group_size, process_groups.group_name_of(group_name))
    return full.view(shard.dtype) if fp8 else full


def _real_reduce_scatter(
    whole: Tensor, reduce_op: str, group_size: int, group_name: Any, copy: bool = True, accord: int = 0
) -> Tensor:
    def check() -> None:
        check_group("reduce_scatter", group_size, group_name)
        _check_scatter(whole, reduce_op, group_size)

    _check_dims("reduce_scatter", whole)
    if (cuda := kernels_or_none(whole)) is not None:
        group = process_groups.process_group(group_name)
        found: Tensor | None = cuda.run_bulk_scatter(whole, reduce_op, group_size, group, check, copy, accord)
        if found is not None:
            return found
    check()
    whole = _unchanged(whole, copy)
    if whole.device.type == "cpu" and reduce_op == "avg":  # gloo has no average: complete, then divided
        return plain.reduce_scatter(whole, reduce_op, 0, group_size, group_name)
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor
    shard: Tensor = scatter(whole, reduce_op, group_size, process_groups.group_name_of(group_name))
    return shard


def _real_all_reduce(tensor: Tensor, reduce_op: str, group_name: Any, accord: int = 0) -> Tensor:
    def check() -> None:
        group_and_size(group_name)
        require(reduce_op in ALL_REDUCE_OPS, "all_reduce", "reduce_op", reduce_op, f"one of {ALL_REDUCE_OPS}")

    if (cuda := kernels_or_none(tensor)) is not None:
        group = process_groups.process_group(group_name)
        found: Tensor | None = cuda.run_bulk_all_reduce(tensor, reduce_op, group, check, accord)
        if found is not None:
            return found
    check()
    if tensor.device.type == "cpu" and reduce_op == "avg":  # gloo has no average: complete, then divided
        return plain.all_reduce(tensor.contiguous(), reduce_op, group_name)
    total: Tensor = torch.ops._c10d_functional.all_reduce(
        tensor.contiguous(), reduce_op, process_groups.group_name_of(group_name)
    )
    return total


def _real_wait(result: Tensor, source: Tensor) -> Tensor:
    kernels = kernels_or_none(result)
    if kernels is not None and kernels.land(result):
        return result
    with torch_ops.below_autograd():
        done: Tensor = torch.ops._c10d_functional.wait_tensor.default(result)
    return done


def _unchanged(tensor: Tensor, copy: bool) -> Tensor:
    """A contiguous tensor that stays as it is: a copy, or the tensor itself, which the caller leaves alone."""
    return tensor.clone(memory_format=torch.contiguous_format) if copy else tensor.contiguous()


def _check_dims(op: str, tensor: Tensor) -> None:
    if tensor.ndim == 0:
        raise ValueError(f"asynctp {op}: a tensor without dimensions cannot be split over ranks; unsqueeze(0) it first")


def _check_scatter(whole: Tensor, reduce_op: str, group_size: int) -> None:
    require(reduce_op in REDUCE_OPS, "reduce_scatter", "reduce_op", reduce_op, f"one of {REDUCE_OPS}")
    limit = f"a multiple of the group's {group_size} ranks; pad dim 0"
    require(whole.shape[0] % group_size == 0, "reduce_scatter", "rows", whole.shape[0], limit)


# --- fake implementations ---------------------------------------------------------------------------------------
def _fake_all_gather(
    shard: Tensor, group_size: int, group_name: Any, copy: bool = True, all_keep: bool = True, accord: int = 0
) -> Tensor:
    return shard.new_empty((shard.shape[0] * group_size, *shard.shape[1:]))


def _fake_reduce_scatter(
    whole: Tensor, reduce_op: str, group_size: int, group_name: Any, copy: bool = True, accord: int = 0
) -> Tensor:
    return whole.new_empty((whole.shape[0] // group_size, *whole.shape[1:]))


def _fake_all_reduce(tensor: Tensor, reduce_op: str, group_name: Any, accord: int = 0) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _fake_wait(result: Tensor, source: Tensor) -> Tensor:
    return result.view_as(result)


# --- registration -----------------------------------------------------------------------------------------------
_LIBRARY = define(
    {
        "all_gather": (COLLECTIVES["all_gather"].schema, _real_all_gather, _fake_all_gather),
        "reduce_scatter": (COLLECTIVES["reduce_scatter"].schema, _real_reduce_scatter, _fake_reduce_scatter),
        "all_reduce": (COLLECTIVES["all_reduce"].schema, _real_all_reduce, _fake_all_reduce),
    },
    "asynctp: the collectives have no gradient, as the functional ones that they stand for; "
    "use torch.distributed.tensor, or torch.distributed._functional_collectives' autograd forms",
)
_LIBRARY.define("wait(Tensor(a) result, Tensor source) -> Tensor(a)")
for _key in ("CPU", "CUDA"):  # an alias of what has no gradient
    _LIBRARY.impl("wait", _real_wait, _key)
torch_ops.register_fake("wait", _fake_wait, _LIBRARY)
