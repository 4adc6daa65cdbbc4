"""What plans run on: GPUs and their driver, or this host where Triton interprets. One of them in a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynctp_kernels.signals import IS_INTERPRETED

if TYPE_CHECKING or not IS_INTERPRETED:
    from asynctp_kernels.cuda.runtime import driver
else:
    from asynctp_kernels.cuda.runtime import interpreted as driver

__all__ = ["driver"]
