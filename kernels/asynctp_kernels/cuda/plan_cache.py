"""The plans of a group's calls: each is made once, for the shapes of a call, and run each time.

Plans are kept with the group's memory, so they go when the group goes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory

MAX_PLANS = 1024  # of one group
#: what a look-up gives where there is no plan; None is one, of a call that is left to NCCL
MISSING = object()


def keys_of(*tensors: Tensor | None) -> list[tuple[Any, ...] | None]:
    """Each tensor's facts that a plan depends on, and that are checked once a plan."""
    return [
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
    ]


def store_plan(memory: GroupMemory, key: object, plan: Any) -> Any:
    """Remember a plan; with dynamic shapes there are many, so they are all forgotten now and then."""
    if len(memory.plans) >= MAX_PLANS and not driver.capturing():
        memory.plans.clear()
        memory.recordings.clear()
    memory.plans[key] = plan
    return plan
