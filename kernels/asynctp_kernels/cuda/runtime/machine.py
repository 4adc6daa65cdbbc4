"""The driver of this process: a GPU's (`driver`), or this host's where Triton interprets (`interpreted`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from asynctp_kernels.signals import IS_INTERPRETED

if TYPE_CHECKING or not IS_INTERPRETED:  # both modules have the same functions, as plans and the memory call them
    from asynctp_kernels.cuda.runtime import driver
else:
    from asynctp_kernels.cuda.runtime import interpreted as driver

__all__ = ["driver", "others_beside"]


def others_beside(world: int) -> bool:
    """Whether kernels of other groups may run beside those of a group of `world` ranks.

    Taken to be so where the program has more ranks: FSDP's gathers and a pipeline's receives hold SMs in the middle of
    a step. Other groups of the same ranks are not seen.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > world
