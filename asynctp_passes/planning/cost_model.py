"""The bytes and operations of a chain, and a roofline of the time that overlap can save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from asynctp_passes.ir.matmuls import read_matmul, read_term
from asynctp_passes.ir.nodes import dtype_of, tensor_of
from asynctp_passes.ir.operations import Matmul
from asynctp_passes.matching.chains import Chain, GatherChain, Hoist, ScatterChain
from asynctp_passes.reasons import Refusal


@dataclass(frozen=True)
class Machine:
    """Rates of one kind of GPU.

    Attributes:
        name: Substring of the device's name.
        link_bytes_per_us: Bytes per microsecond that one GPU receives from all peers together.
        flops_per_us: Floating-point operations per microsecond of a large bf16 matmul.
    """

    name: str
    link_bytes_per_us: float
    flops_per_us: float


#: Source: 2 and 4 x H200 SXM (NVLink, one host), torch 2.11, 2026-11-21. Link: copy engines, all GPUs pulling at once,
#: by the times of 8 and 32 MiB in `docs/results/2026-11-21-h200x4/driver-calls.txt`. Matmuls: geometric means of cuBLAS
#: with 2048 to 16384 rows in `bench.json` there and in `2026-11-21-h200x2`; the selector has one of its own, fitted
#: together with its model of waves. Tests hold these figures to the files.
_H200 = Machine("H200", 370e3, 710e6)
#: The H100 was not measured: it has the same SMs and links, and the H200's figures stand in for its own.
_MACHINES = (_H200, replace(_H200, name="H100"))
#: A collective is mostly latency if a rank receives fewer bytes than that. Source: NCCL after cuBLAS less cuBLAS alone,
#: 64 to 512 rows, in `docs/results/2026-11-23-h200x2/bench.json`.
LATENCY_BYTES = 1 << 20
#: A chain overlaps little if its matmuls take less than this part of the time of its communication.
LITTLE = 0.25
#: how many times as many operations matmuls do in fp8 as in bf16 (the same runs, 2 GPUs)
FP8_SPEED = 1.96


@dataclass(frozen=True)
class Cost:
    """Bytes a rank exchanges and floating-point operations it does; None where sizes are symbolic.

    `exposed_bytes` of them travel when the matmul is done: the second half of an all-reduce. `fp8_flops` of the
    operations are in fp8.
    """

    comm_bytes: int | None
    flops: int | None
    exposed_bytes: int = 0
    fp8_flops: int = 0

    @property
    def work(self) -> int | None:
        """Operations in bf16 that take as long."""
        return None if self.flops is None else self.flops - self.fp8_flops + round(self.fp8_flops / FP8_SPEED)

    def estimate_us(self, machine: Machine | None) -> dict[str, float]:
        """Roofline times in microseconds; empty without a machine or without sizes."""
        if machine is None or self.comm_bytes is None or self.work is None:
            return {}
        comm, matmul = self.comm_bytes / machine.link_bytes_per_us, self.work / machine.flops_per_us
        exposed = self.exposed_bytes / machine.link_bytes_per_us
        overlapped = max(comm - exposed, matmul) + exposed
        return {"comm": comm, "matmul": matmul, "serial": comm + matmul, "overlapped": overlapped}


def machine_for(node: fx.Node) -> Machine | None:
    """The machine that a node's tensor lives on; None where its rates are not known, or not for this dtype."""
    value = tensor_of(node)
    if value is None or value.device.type != "cuda" or not torch.cuda.is_available():
        return None
    if value.dtype not in (torch.bfloat16, torch.float16) and not _is_fp8(value.dtype):
        return None
    name = torch.cuda.get_device_name()
    return next((machine for machine in _MACHINES if machine.name in name), None)


def overlaps(comm_bytes: int, work: int, node: fx.Node) -> bool:
    """True when matmuls of `work` take as long as a collective of `comm_bytes` on the machine of `node`.

    Where that is not known, the H200's figures stand in for it: what counts is the ratio of its rates.
    """
    machine = machine_for(node) or _H200
    return work / machine.flops_per_us >= comm_bytes / machine.link_bytes_per_us


def overlaps_little(cost: Cost, node: fx.Node) -> str:
    """How long a chain's matmuls take beside what overlaps with them, where that is little; empty otherwise.

    What takes mostly latency overlaps with nothing anyway. Machines whose rates are not known count as in `overlaps`;
    dtypes whose rates are not known, of more than 16 bits, do not count.
    """
    if cost.comm_bytes is None or cost.work is None or cost.comm_bytes < LATENCY_BYTES or _itemsize(node) > 2:
        return ""
    machine = machine_for(node) or _H200
    share = cost.work / machine.flops_per_us / ((cost.comm_bytes - cost.exposed_bytes) / machine.link_bytes_per_us)
    return f"{share:.0%}" if share < LITTLE else ""


def covers(work: Sequence[int | None], received: int | None, node: fx.Node) -> bool:
    """True when matmuls take as long as a collective. Where sizes are symbolic, one matmul has to do.

    `work` has that of each matmul (`work_of`), `received` the bytes that a rank receives; `node` is a tensor on the
    machine.
    """
    known = [count for count in work if count is not None]
    if received is None or len(known) < len(work):
        return bool(work)
    return bool(work) and overlaps(received, sum(known), node)


def work_of(matmul: fx.Node) -> int | None:
    """`Cost.work` of a matmul; None where sizes are symbolic, or what it computes is not known."""
    read = read_term(matmul)
    return None if isinstance(read, Refusal) else _computed([read]).work


def _computed(matmuls: Sequence[Matmul]) -> Cost:
    """The cost of matmuls; they exchange nothing."""
    flops = [_flops(matmul.a, matmul.node) for matmul in matmuls]
    fp8 = [count or 0 for count, matmul in zip(flops, matmuls, strict=True) if _is_fp8(dtype_of(matmul.a))]
    return Cost(0, _sum(flops), fp8_flops=sum(fp8))


def cost_of(chain: Chain) -> Cost:
    """Bytes that a rank receives (gather), sends (scatter) or both (all-reduce) in the fused op, and its operations."""
    ranks, computed = chain.collective.group_size, _computed(chain.matmuls)
    if chain.hoist is not None:
        gathered = chain.hoist.gathered
        return replace(computed, comm_bytes=_sum(received_bytes(node, ranks) for node in gathered))
    own = bytes_of(chain.shard if isinstance(chain, GatherChain) else chain.collective.node)
    if own is not None and ranks and isinstance(chain, ScatterChain) and chain.own_part is not None:
        own //= ranks
    if own is None or not ranks:
        return replace(computed, comm_bytes=None)
    if chain.kind == "matmul_all_reduce":
        half = own * (ranks - 1) // ranks
        return replace(computed, comm_bytes=2 * half, exposed_bytes=half)
    return replace(computed, comm_bytes=own * (ranks - 1))


def received_bytes(whole: fx.Node, ranks: int) -> int | None:
    """The bytes that a rank receives when a tensor is gathered; None where sizes are symbolic or unknown."""
    count = bytes_of(whole)
    return None if count is None or not ranks else count // ranks * (ranks - 1)


def hoist_pays(chain: GatherChain, hoist: Hoist) -> bool:
    """True when gathering what is computed on the shard is worth what it moves.

    It may not move more than the program's own gather. Where that gather stays, after the fused op, it is one more: it
    has to move less, and, on a machine whose rates are known, it may not take longer than the matmuls that run before
    the other users of the gathered tensor. Where a gather of what is found over all ranks' rows comes first, the
    program's own has to be more than latency on such a machine.
    """
    moved, before = cost_of(chain).comm_bytes, received_bytes(chain.collective.node, chain.collective.group_size)
    machine = machine_for(chain.shard)
    waits = any(one.needed for one in hoist.cross_rank)
    if waits and machine is not None and before is not None and before < LATENCY_BYTES:
        return False
    if moved is None or before is None:
        moved, before = _itemsize(hoist.operand), _itemsize(chain.collective.node)
    if not hoist.still_needed_by or moved >= before:
        return moved < before or (moved == before and not hoist.still_needed_by)
    matmuls = [read for node in hoist.overlapped_by if not isinstance(read := read_matmul(node), Refusal)]
    until_first_use = replace(_computed([*chain.matmuls, *matmuls]), comm_bytes=cost_of(chain).comm_bytes)
    estimate = until_first_use.estimate_us(machine)
    return not estimate or estimate["comm"] <= estimate["matmul"]


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def _is_fp8(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize == 1


def _itemsize(node: fx.Node) -> int:
    dtype = dtype_of(node)
    return 0 if dtype is None else dtype.itemsize


def bytes_of(node: fx.Node | None) -> int | None:
    """The bytes of a tensor; None where its size is symbolic or unknown."""
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
