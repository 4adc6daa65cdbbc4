"""What a chain moves and computes, and a roofline of what overlapping can hide."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from asynctp_passes.chain import GatherChain, ScatterChain
from asynctp_passes.fxview import tensor_of

__all__ = ["Cost", "Machine", "cost_of", "machine_for"]


@dataclass(frozen=True)
class Machine:
    """Rates of one kind of GPU.

    Attributes:
        name: Substring of the device's name.
        link_bytes_per_us: Bytes per microsecond that one GPU receives from all peers together.
        flops_per_us: Floating-point operations per microsecond of a large bf16 matmul.

    Source: copy-engine pull by all ranks at once and cuBLAS at 2k to 16k rows, 4 x H200 SXM (NVLink, one host),
    torch 2.11, 2026-11-20.
    """

    name: str
    link_bytes_per_us: float
    flops_per_us: float


_MACHINES = (Machine("H200", 370e3, 760e6), Machine("H100", 370e3, 760e6))


@dataclass(frozen=True)
class Cost:
    """Bytes a rank exchanges and floating-point operations it does; None where sizes are symbolic."""

    comm_bytes: int | None
    flops: int | None

    def estimate_us(self, machine: Machine | None) -> dict[str, float]:
        """Roofline times in microseconds; empty without a machine or without sizes."""
        if machine is None or self.comm_bytes is None or self.flops is None:
            return {}
        comm, matmul = self.comm_bytes / machine.link_bytes_per_us, self.flops / machine.flops_per_us
        return {"comm": comm, "matmul": matmul, "serial": comm + matmul, "overlapped": max(comm, matmul)}


def machine_for(node: fx.Node) -> Machine | None:
    """The machine a node's tensor lives on, if its rates are known. Only bf16 and fp16 have measured rates."""
    value = tensor_of(node)
    if value is None or value.device.type != "cuda" or not torch.cuda.is_available():
        return None
    if value.dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name()
    return next((machine for machine in _MACHINES if machine.name in name), None)


def cost_of(chain: GatherChain | ScatterChain) -> Cost:
    """What one rank receives (gather) or sends (scatter), and what its matmuls do."""
    ranks = chain.collective.group_size
    own = chain.collective.input if isinstance(chain, GatherChain) else chain.collective.node
    shard = _bytes(own)
    flops = [_flops(matmul.a, matmul.node) for matmul in chain.matmuls]
    total = None if any(count is None for count in flops) else sum(count for count in flops if count is not None)
    return Cost(None if shard is None else shard * (ranks - 1), total)


def _bytes(node: fx.Node | None) -> int | None:
    value = tensor_of(node)
    if value is None or not all(isinstance(size, int) for size in value.shape):
        return None
    return value.numel() * value.dtype.itemsize


def _flops(a: fx.Node, out: fx.Node) -> int | None:
    left, result = tensor_of(a), tensor_of(out)
    if left is None or result is None:
        return None
    sizes = (*result.shape, left.shape[-1])
    if not all(isinstance(size, int) for size in sizes):
        return None
    return 2 * math.prod(int(size) for size in sizes)
