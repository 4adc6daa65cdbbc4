"""Device side of asynctp: matmuls fused with the all-gather before or the reduce-scatter after them.

    ops       gather, scatter (thin launchers)      gather_kernel, scatter_kernel (raw @triton.jit kernels)
    memory    host (symmetric memory of one host)   workspace (two-slot landings, epochs)   signals (words, waits)
    tables    support (`supports`: why not)         config (tile sizes)                     layout, numerics, errors

    cuda      the ops on NVIDIA GPUs: a persistent TMA GEMM, the copy engine, cuBLAS pipelines, a selector

What is listed before `cuda` runs in Triton's interpreter, on CPU tensors: set TRITON_INTERPRET=1 before triton is
imported. The semantics of every op are those of the unfused program.
"""

from __future__ import annotations

import sys

from torch.distributed import ProcessGroup

from . import workspace
from .errors import PeerTimeout, SymmetricMemoryError, UnsupportedCall
from .gather import all_gather_matmul, all_gather_scaled_matmul
from .host import HostSymmetricMemory, rendezvous
from .scatter import matmul_reduce_scatter, scaled_matmul_reduce_scatter
from .support import Call, Operand, supports

__all__ = [
    "Call",
    "HostSymmetricMemory",
    "Operand",
    "PeerTimeout",
    "SymmetricMemoryError",
    "UnsupportedCall",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "matmul_reduce_scatter",
    "release",
    "rendezvous",
    "scaled_matmul_reduce_scatter",
    "supports",
]


def release(group: ProcessGroup) -> None:
    """Free the memory of every op on `group`, on CPU and CUDA. Collective in effect: the next op makes it anew.

    Not needed before `destroy_process_group`: memory goes when the group does.
    """
    workspace.release(group)
    on_cuda = sys.modules.get("asynctp_kernels.cuda")
    if on_cuda is not None:
        on_cuda.release(group)
