"""Fake implementations of the fused ops: shapes from shapes. No group need exist, and no guard is added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asynctp_passes.ops import reference
from asynctp_passes.ops.autograd import refuse_lost_gradients
from asynctp_passes.ops.reference import GatherScales, ScatterScales, SumOptions


def _fake_gather(
    a_shard: Tensor, bs: list[Tensor], gather_dim: int, group_size: int, dtype: torch.dtype, return_a_full: bool
) -> list[Tensor]:
    full = reference.gathered_shape(a_shard.shape, gather_dim, group_size)
    outs = [a_shard.new_empty((*full[:-1], b.shape[1]), dtype=dtype) for b in bs]
    return [*outs, a_shard.new_empty(full)] if return_a_full else outs


def all_gather_matmul(
    a_shard: Tensor,
    bs: list[Tensor],
    biases: list[Tensor | None],
    gather_dim: int,
    return_a_full: bool,
    group_size: int,
    group_name: Any,
    all_keep: bool | None = None,
) -> list[Tensor]:
    if torch.is_grad_enabled():
        refuse_lost_gradients(biases)
    reference.check_gather("all_gather_matmul", a_shard, bs, biases, gather_dim, group_size, sizes=False)
    dtype = reference.product_dtype(a_shard.dtype)
    return _fake_gather(a_shard, bs, gather_dim, group_size, dtype, return_a_full)


def all_gather_scaled_matmul(
    a_shard: Tensor,
    a_scale: Tensor,
    bs: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    gather_dim: int,
    gather_a_scale: bool,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    return_a_full: bool,
    group_size: int,
    group_name: Any,
    along_shard: Tensor | None = None,
    all_keep: bool | None = None,
) -> list[Tensor]:
    scales = GatherScales(a_scale, b_scales, gather_a_scale, out_dtype, along_shard)
    op = "all_gather_scaled_matmul"
    reference.check_gather(op, a_shard, bs, biases, gather_dim, group_size, scales, sizes=False)
    outs = _fake_gather(a_shard, bs, gather_dim, group_size, out_dtype, return_a_full)
    if along_shard is None:
        return outs
    return [*outs, along_shard.new_empty(reference.gathered_shape(along_shard.shape, gather_dim, group_size))]


def _fake_scatter(
    a_parts: list[Tensor], b_parts: list[Tensor], scatter_dim: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    shape = [*a_parts[0].shape[:-1], b_parts[0].shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // group_size
    return a_parts[0].new_empty(shape, dtype=dtype)


def matmul_reduce_scatter(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    group_size: int,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    if torch.is_grad_enabled():
        refuse_lost_gradients(biases)
    op, where = "matmul_reduce_scatter", (reduce_op, scatter_dim, group_size)
    optional = SumOptions(sum_dtype, added, factors)
    reference.check_scatter(op, a_parts, b_parts, biases, *where, optional=optional, sizes=False)
    return _fake_scatter(a_parts, b_parts, scatter_dim, group_size, sum_dtype or a_parts[0].dtype)


def scaled_matmul_reduce_scatter(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    a_scales: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group_size: int,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    op = "scaled_matmul_reduce_scatter"
    where = (reduce_op, scatter_dim, group_size, ScatterScales(a_scales, b_scales, out_dtype))
    optional = SumOptions(sum_dtype, added, factors)
    reference.check_scatter(op, a_parts, b_parts, biases, *where, optional=optional, sizes=False)
    return _fake_scatter(a_parts, b_parts, scatter_dim, group_size, sum_dtype or out_dtype)


def matmul_all_reduce(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    if torch.is_grad_enabled():
        refuse_lost_gradients(biases)
    op, parts = "matmul_all_reduce", (a_parts, b_parts, biases)
    optional = SumOptions(sum_dtype, added, factors)
    reference.check_all_reduce(op, *parts, reduce_op, optional=optional, sizes=False)
    return a_parts[0].new_empty((*a_parts[0].shape[:-1], b_parts[0].shape[1]), dtype=sum_dtype)


def scaled_matmul_all_reduce(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    a_scales: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    op = "scaled_matmul_all_reduce"
    scales = ScatterScales(a_scales, b_scales, out_dtype)
    parts = (a_parts, b_parts, biases)
    optional = SumOptions(sum_dtype, added, factors)
    reference.check_all_reduce(op, *parts, reduce_op, scales, optional=optional, sizes=False)
    return a_parts[0].new_empty((*a_parts[0].shape[:-1], b_parts[0].shape[1]), dtype=sum_dtype or out_dtype)
