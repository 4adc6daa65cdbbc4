"""The fused ops, the collectives beside them, and the reference programs, which define what each op must compute.

`torch.ops.asynctp.*` are three fused ops, with fake and real implementations, gradients and Python callers:

    a_shard → all_gather → mm, mm, …          asynctp::all_gather_matmul
    mm + mm + … (+ x) → reduce_scatter        asynctp::matmul_reduce_scatter
    mm + mm + … (+ x) → all_reduce            asynctp::matmul_all_reduce

All are functional: they return fresh, contiguous, ordinary memory, never an alias of an input or of a
communication buffer. Importing this module registers them.

Which implementation runs is chosen at run time and never silently: `explain` names it for a call. The environment is
read once, at the first call; `refresh` reads it again.
"""

from __future__ import annotations

import torch

from asynctp_passes.ops import collectives, reference, run_check  # noqa: F401  (two of them register ops)
from asynctp_passes.ops.callers import Callers
from asynctp_passes.ops.calls import OPS
from asynctp_passes.ops.choice import (
    compares_calls,
    expected_implementation,
    explain,
    finds_kernels,
    implementation,
    meet,
    on_wire,
    refresh,
    variant_reason,
)
from asynctp_passes.ops.register import register_fused

__all__ = [
    "OPS",
    "all_gather_matmul",
    "compares_calls",
    "expected_implementation",
    "explain",
    "finds_kernels",
    "implementation",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "meet",
    "on_wire",
    "refresh",
    "variant_reason",
]

_LIBRARY = register_fused()


# --- called by hand ----------------------------------------------------------------------------------------------
_callers = Callers(torch.ops.asynctp, checks=False)
all_gather_matmul = _callers.all_gather_matmul
matmul_reduce_scatter = _callers.matmul_reduce_scatter
matmul_all_reduce = _callers.matmul_all_reduce
