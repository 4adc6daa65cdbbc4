"""Real implementations of the fused ops: the overlapped ones where they can run a call, else the plain program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.compat import process_group
from asynctp_passes.ops import reference
from asynctp_passes.ops.autograd import refuse_lost_gradients
from asynctp_passes.ops.choice import overlapped
from asynctp_passes.ops.reference import GatherScales, ScatterScales, SumOptions


def _mover(kernels: Any, group_name: Any, kept: bool = False) -> reference.Mover | None:
    """The group's own wire, for products that the kernels do not make; None without kernels: plain collectives.

    kept: every rank keeps what is gathered.
    """
    if kernels is None:
        return None
    mover: reference.Mover = kernels.Mover(process_group(group_name), kept)
    return mover


def _check_taking_part(
    check: Callable[[], None], shard: Tensor, numbers: Tensor | None, group_size: int, group_name: Any
) -> None:
    """Check a gather. A rank whose products cannot be made sends its shard all the same: its peers' calls are right."""
    try:
        check()
    except ValueError:
        if reference.group_and_size(group_name)[1] == group_size:
            for part in (shard, numbers):
                if part is not None:
                    reference.gather(part.reshape(1, -1), 0, group_size, group_name)
        raise


# --- one function an op -----------------------------------------------------------------------------------------
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

    def check() -> None:
        reference.check_group("all_gather_matmul", group_size, group_name)
        reference.check_gather("all_gather_matmul", a_shard, bs, biases, gather_dim, group_size)

    kept = return_a_full if all_keep is None else all_keep
    if (cuda := overlapped(a_shard)) is not None:
        options = (
            gather_dim,
            False,
            reference.product_dtype(a_shard.dtype),
            False,
            return_a_full,
            group_size,
            process_group(group_name),
            check,
        )
        found: list[Tensor] | None = cuda.run_gather(a_shard, None, bs, (), biases, *options, kept=kept)
        if found is not None:
            return found
    else:
        _check_taking_part(check, a_shard, None, group_size, group_name)
    return reference.unfused_all_gather_matmul(
        *(a_shard, bs, biases, gather_dim, return_a_full, group_size, group_name), mover=_mover(cuda, group_name, kept)
    )


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
    def check() -> None:
        op = "all_gather_scaled_matmul"
        reference.check_group(op, group_size, group_name)
        scales = GatherScales(a_scale, b_scales, gather_a_scale, out_dtype, along_shard)
        reference.check_gather(op, a_shard, bs, biases, gather_dim, group_size, scales)

    kept = return_a_full if all_keep is None else all_keep
    if (cuda := overlapped(a_shard)) is not None:
        choices = (gather_dim, gather_a_scale, out_dtype, use_fast_accum, return_a_full)
        found: list[Tensor] | None = cuda.run_gather(
            *(a_shard, a_scale, bs, b_scales, biases, *choices, group_size, process_group(group_name), check),
            along_shard,
            kept,
        )
        if found is not None:
            return found
    else:
        _check_taking_part(check, a_shard, a_scale if gather_a_scale else along_shard, group_size, group_name)
    operands = (a_shard, a_scale, bs, b_scales, biases, gather_dim, gather_a_scale)
    options = (out_dtype, use_fast_accum, return_a_full)
    return reference.unfused_all_gather_scaled_matmul(
        *operands, *options, group_size, group_name, along_shard, mover=_mover(cuda, group_name, kept)
    )


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

    def check() -> None:
        op, where = "matmul_reduce_scatter", (reduce_op, scatter_dim, group_size)
        reference.check_group(op, group_size, group_name)
        optional = SumOptions(sum_dtype, added, factors)
        reference.check_scatter(op, a_parts, b_parts, biases, *where, optional=optional)

    cuda = overlapped(a_parts[0]) if a_parts else None
    if cuda is not None:
        options = (reduce_op, scatter_dim, a_parts[0].dtype, False, group_size, process_group(group_name), check)
        found: Tensor | None = cuda.run_scatter(a_parts, b_parts, (), (), biases, *options, sum_dtype, added, factors)
        if found is not None:
            return found
    else:
        check()
    return reference.unfused_matmul_reduce_scatter(
        *(a_parts, b_parts, biases, reduce_op, scatter_dim, group_size, group_name, sum_dtype, added, factors),
        mover=_mover(cuda, group_name),
    )


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
    def check() -> None:
        op = "scaled_matmul_reduce_scatter"
        reference.check_group(op, group_size, group_name)
        where = (reduce_op, scatter_dim, group_size, ScatterScales(a_scales, b_scales, out_dtype))
        optional = SumOptions(sum_dtype, added, factors)
        reference.check_scatter(op, a_parts, b_parts, biases, *where, optional=optional)

    cuda = overlapped(a_parts[0]) if a_parts else None
    if cuda is not None:
        choices = (reduce_op, scatter_dim, out_dtype, use_fast_accum, group_size, process_group(group_name), check)
        operands = (a_parts, b_parts, a_scales, b_scales, biases)
        found: Tensor | None = cuda.run_scatter(*operands, *choices, sum_dtype, added, factors)
        if found is not None:
            return found
    else:
        check()
    parts = (a_parts, b_parts, a_scales, b_scales, biases, reduce_op, scatter_dim, out_dtype, use_fast_accum)
    where = (group_size, group_name, sum_dtype, added, factors)
    return reference.unfused_scaled_matmul_reduce_scatter(*parts, *where, mover=_mover(cuda, group_name))


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

    def check() -> None:
        reference.group_and_size(group_name)
        parts = (a_parts, b_parts, biases)
        optional = SumOptions(sum_dtype, added, factors)
        reference.check_all_reduce("matmul_all_reduce", *parts, reduce_op, optional=optional)

    cuda = overlapped(a_parts[0]) if a_parts else None
    if cuda is not None:
        options = (reduce_op, a_parts[0].dtype, False, process_group(group_name), check, sum_dtype, added, factors)
        found: Tensor | None = cuda.run_all_reduce(a_parts, b_parts, (), (), biases, *options)
        if found is not None:
            return found
    else:
        check()
    parts = (a_parts, b_parts, biases, reduce_op, group_name, sum_dtype, added, factors)
    return reference.unfused_matmul_all_reduce(*parts, mover=_mover(cuda, group_name))


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
    def check() -> None:
        reference.group_and_size(group_name)
        op, scales = "scaled_matmul_all_reduce", ScatterScales(a_scales, b_scales, out_dtype)
        optional = SumOptions(sum_dtype, added, factors)
        reference.check_all_reduce(op, a_parts, b_parts, biases, reduce_op, scales, optional=optional)

    cuda = overlapped(a_parts[0]) if a_parts else None
    if cuda is not None:
        options = (reduce_op, out_dtype, use_fast_accum, process_group(group_name), check, sum_dtype, added, factors)
        found: Tensor | None = cuda.run_all_reduce(a_parts, b_parts, a_scales, b_scales, biases, *options)
        if found is not None:
            return found
    else:
        check()
    operands = (a_parts, b_parts, a_scales, b_scales, biases, reduce_op, out_dtype, use_fast_accum)
    where = (group_name, sum_dtype, added, factors)
    return reference.unfused_scaled_matmul_all_reduce(*operands, *where, mover=_mover(cuda, group_name))
