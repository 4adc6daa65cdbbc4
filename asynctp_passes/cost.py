"""What a chain moves and computes, and a roofline of what overlapping can hide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from asynctp_passes.chain import GatherChain, Hoist, ScatterChain
from asynctp_passes.fxview import tensor_of
from asynctp_passes.read import read_matmul, read_term
from asynctp_passes.reasons import Refusal

__all__ = [
    "Cost",
    "Machine",
    "cost_of",
    "flops_of",
    "hides",
    "hoist_pays",
    "machine_for",
    "received_bytes",
]


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
    """Bytes a rank exchanges and floating-point operations it does; None where sizes are symbolic.

    `exposed_bytes` of them travel when the matmul is done: the second half of an all-reduce.
    """

    comm_bytes: int | None
    flops: int | None
    exposed_bytes: int = 0

    def estimate_us(self, machine: Machine | None) -> dict[str, float]:
        """Roofline times in microseconds; empty without a machine or without sizes."""
        if machine is None or self.comm_bytes is None or self.flops is None:
            return {}
        comm, matmul = self.comm_bytes / machine.link_bytes_per_us, self.flops / machine.flops_per_us
        exposed = self.exposed_bytes / machine.link_bytes_per_us
        overlapped = max(comm - exposed, matmul) + exposed
        return {"comm": comm, "matmul": matmul, "serial": comm + matmul, "overlapped": overlapped}


def machine_for(node: fx.Node) -> Machine | None:
    """The machine a node's tensor lives on, if its rates are known. Only bf16 and fp16 have measured rates."""
    value = tensor_of(node)
    if value is None or value.device.type != "cuda" or not torch.cuda.is_available():
        return None
    if value.dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name()
    return next((machine for machine in _MACHINES if machine.name in name), None)


def hides(comm_bytes: int, flops: int, node: fx.Node) -> bool:
    """True when matmuls of `flops` take as long as a collective of `comm_bytes` on the machine of `node`.

    Where that is not known, the first one listed stands in for it: what counts is the ratio of its rates.
    """
    machine = machine_for(node) or _MACHINES[0]
    return flops / machine.flops_per_us >= comm_bytes / machine.link_bytes_per_us


def covers(flops: Sequence[int | None], whole: fx.Node, ranks: int) -> bool:
    """True when matmuls take as long as the gather of `whole`; where sizes are symbolic, one matmul has to do."""
    known, size = [count for count in flops if count is not None], received_bytes(whole, ranks)
    if size is None or len(known) < len(flops):
        return bool(flops)
    return bool(flops) and hides(size, sum(known), whole)


def flops_of(matmul: fx.Node) -> int | None:
    """Floating-point operations of a matmul; None where sizes are symbolic, or what it computes is not known."""
    read = read_term(matmul)
    return None if isinstance(read, Refusal) else _flops(read.a, read.node)


def cost_of(chain: GatherChain | ScatterChain) -> Cost:
    """What one rank receives (gather), sends (scatter) or both (all-reduce) in the fused op; what its matmuls do."""
    ranks = chain.collective.group_size
    flops = _sum(_flops(matmul.a, matmul.node) for matmul in chain.matmuls)
    if isinstance(chain, GatherChain) and chain.hoist is not None:
        travels = chain.hoist.travels
        return Cost(_sum(received_bytes(node, ranks) for node in travels), flops)
    own = _bytes(chain.collective.input if isinstance(chain, GatherChain) else chain.collective.node)
    if own is None or not ranks:
        return Cost(None, flops)
    if chain.collective.kind == "all_reduce":
        half = own * (ranks - 1) // ranks
        return Cost(2 * half, flops, exposed_bytes=half)
    return Cost(own * (ranks - 1), flops)


def received_bytes(whole: fx.Node, ranks: int) -> int | None:
    """What a rank receives of a tensor of which it has its part; None where sizes are symbolic."""
    count = _bytes(whole)
    return None if count is None else count // ranks * (ranks - 1)


def hoist_pays(chain: GatherChain, hoist: Hoist) -> bool:
    """True when gathering what is computed on the shard is worth what it moves.

    It may not move more than the program's own gather. Where that gather stays, behind the fused op, it is one more: it
    has to move less, and, on a machine whose rates are known, it may not take longer than the matmuls that run before
    the other users of the gathered tensor.
    """
    moved, before = cost_of(chain).comm_bytes, received_bytes(chain.collective.node, chain.collective.group_size)
    if moved is None or before is None:
        moved, before = _itemsize(hoist.operand), _itemsize(chain.collective.node)
    if not hoist.kept or moved >= before:
        return moved < before or (moved == before and not hoist.kept)
    cost, machine = _until_first_use(chain, hoist), machine_for(chain.shard)
    estimate = cost.estimate_us(machine)
    return not estimate or estimate["comm"] <= estimate["matmul"]


def _until_first_use(chain: GatherChain, hoist: Hoist) -> Cost:
    """What the fused op moves, and all matmuls from its own on that can hide the gather beside it."""
    matmuls = [matmul for node in hoist.hidden_by if not isinstance(matmul := read_matmul(node), Refusal)]
    own = cost_of(chain)
    return Cost(own.comm_bytes, _sum([own.flops, *(_flops(matmul.a, matmul.node) for matmul in matmuls)]))


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def _itemsize(node: fx.Node) -> int:
    value = tensor_of(node)
    return 0 if value is None else value.dtype.itemsize


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
