"""Real implementations of the fused ops: the kernels where they can run a call, else the reference program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asynctp_passes.ops import reference
from asynctp_passes.ops.autograd import refuse_lost_gradients
from asynctp_passes.ops.calls import OPS, SIGNATURES
from asynctp_passes.ops.checks import check_in_group
from asynctp_passes.ops.choice import kernels_for

__all__ = ["IMPLEMENTATIONS"]


def _gather(op: str) -> Callable[..., Any]:
    """The function that torch calls for an op that gathers, with its arguments in the schema's order.

    Kernels are chosen as a value, or their stand-in. They run the call, or its reference program on their own wire.
    """
    make, program, differentiable = SIGNATURES[op].call, reference.run, "scaled" not in op

    def real(*arguments: Any) -> Any:
        call = make(*arguments)
        if differentiable and torch.is_grad_enabled():
            refuse_lost_gradients(call.biases)
        return kernels_for(call.a_shard).run_gather(call, check_in_group, program)

    return real


def _reduce(op: str) -> Callable[..., Any]:
    """The function that torch calls for an op that reduces, as that of a gather."""
    make, program, differentiable = SIGNATURES[op].call, reference.run, "scaled" not in op

    def real(*arguments: Any) -> Any:
        call = make(*arguments)
        if differentiable and torch.is_grad_enabled():
            refuse_lost_gradients(call.biases)
        kernels = kernels_for(call.a_parts[0] if call.a_parts else None)
        return kernels.run_reduce(call, check_in_group, program)

    return real


IMPLEMENTATIONS = {op: _gather(op) if op.startswith("all_gather") else _reduce(op) for op in OPS}
"""By the names of the ops."""
