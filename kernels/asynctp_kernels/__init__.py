"""Device side of asynctp: matmuls fused with the all-gather before or the reduce-scatter after them.

    cuda      the ops: a persistent TMA GEMM, the copy engine, cuBLAS pipelines, a selector
    signals   words between ranks, bounded waits        numerics   conversions inside kernels
    meeting   how ranks find each other, and are told of each other's faults
    host      memory that processes of one host share   interpreter, shard_layout, errors

Where Triton interprets (TRITON_INTERPRET=1 before it is imported), `cuda` runs on CPU tensors: the same plans, scripts
and kernels, with processes of one host for GPUs. What an op computes is said by `asynctp_passes.ops.reference`.
"""

from __future__ import annotations

import sys
from typing import Any

from .cuda.plans.async_input import async_input_matmul
from .errors import NotEnrolled, PeerFailed, PeerTimeout, SymmetricMemoryError, UnlikeCalls
from .host import HostSymmetricMemory, rendezvous
from .torch_private import process_group

__all__ = [
    "HostSymmetricMemory",
    "NotEnrolled",
    "PeerFailed",
    "PeerTimeout",
    "SymmetricMemoryError",
    "UnlikeCalls",
    "async_input_matmul",
    "release",
    "rendezvous",
]


def release(group: Any) -> None:
    """Free the memory of every op on `group`. Collective in effect: the next op makes it anew.

    It also mends a group after a call has failed: once every rank has raised, call it on every rank. Ranks need not
    have tried equally often. Not needed before `destroy_process_group`: memory goes when the group does.

    Args:
        group: ProcessGroup, the name of one, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.

    Raises:
        ValueError: It is none of these, or there is no such group.
    """
    found = process_group(group)
    used = sys.modules.get("asynctp_kernels.cuda")
    if used is not None:
        used.release(found)
