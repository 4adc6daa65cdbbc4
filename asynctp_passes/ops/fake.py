"""Fake implementations of the fused ops: shapes from shapes. No group need exist, and no guard is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.ops.autograd import refuse_lost_gradients
from asynctp_passes.ops.calls import OPS, SIGNATURES, Call, GatherCall, ReduceCall
from asynctp_passes.ops.checks import check
from asynctp_passes.ops.plain_collectives import gathered_shape

__all__ = ["IMPLEMENTATIONS", "results"]


def results(call: Call) -> Any:
    """New tensors like the results of a call."""
    return _gathered(call) if isinstance(call, GatherCall) else _reduced(call)


def _gathered(call: GatherCall) -> list[Tensor]:
    shard, along = call.a_shard, call.along_shard
    full = gathered_shape(shard.shape, call.gather_dim, call.group_size)
    outs = [shard.new_empty((*full[:-1], b.shape[1]), dtype=call.matmul_dtype) for b in call.bs]
    outs += [shard.new_empty(full)] if call.return_a_full else []
    if along is None:
        return outs
    return [*outs, along.new_empty(gathered_shape(along.shape, call.gather_dim, call.group_size))]


def _reduced(call: ReduceCall) -> Tensor:
    first = call.a_parts[0]
    shape = [*first.shape[:-1], call.b_parts[0].shape[1]]
    if call.scatter_dim is not None and call.group_size is not None:
        shape[call.scatter_dim] = shape[call.scatter_dim] // call.group_size
    return first.new_empty(shape, dtype=call.sum_dtype or call.out_dtype)


def _implementation(op: str) -> Callable[..., Any]:
    signature = SIGNATURES[op]

    def fake(*arguments: Any) -> Any:
        call: Call = signature.call(*arguments)
        if call.out_dtype is None and torch.is_grad_enabled():
            refuse_lost_gradients(call.biases)
        check(call, sizes=False)
        return results(call)

    return fake


IMPLEMENTATIONS = {op: _implementation(op) for op in OPS}
"""By the names of the ops."""
