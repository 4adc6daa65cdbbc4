"""Real implementations of the fused ops: the kernels where they can run a call, else the reference program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from asynctp_passes.ops import reference
from asynctp_passes.ops.autograd import refuse_lost_gradients
from asynctp_passes.ops.calls import OPS, SIGNATURES
from asynctp_passes.ops.checks import check_in_group
from asynctp_passes.ops.choice import kernels_for

__all__ = ["IMPLEMENTATIONS"]


def _implementation(op: str) -> Callable[..., Any]:
    """The function that torch calls for an op, with its arguments in the schema's order.

    Kernels are chosen as a value, or their stand-in. They run the call, or its reference program on their own wire.
    """
    make, scaled = SIGNATURES[op].call, "scaled" in op
    gathers = op.startswith("all_gather")

    def real(*arguments: Any) -> Any:
        call: Any = make(*arguments)
        if not scaled and torch.is_grad_enabled():
            refuse_lost_gradients(call.biases)
        kernels = kernels_for(call.a_shard if gathers else call.first)
        run = kernels.run_gather if gathers else kernels.run_reduce
        return run(call, partial(check_in_group, call), partial(reference.run, call))

    return real


IMPLEMENTATIONS = {op: _implementation(op) for op in OPS}
"""By the names of the ops."""
