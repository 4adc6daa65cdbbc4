"""Calls from generated code give the op's bits: one JSON line for each op and implementation. Run by torchrun.

    torchrun --nproc_per_node=2 tests/gpu/call_sites.py [an op's name ...]

Each is called by the op, and then by its place in generated code (`asynctp_passes.ops.call_sites`), in turn, and so are
collectives without a matmul and their waits: on the same memory until a graph is launched, on other memory, at odd
addresses, on another stream, in a CUDA graph, in memory that PyTorch shares, and after the group's memory was released.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import asynctp_kernels
import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from asynctp_kernels.signals import IS_INTERPRETED
from asynctp_kernels.torch_private import symmetric_empty
from launched import device, end, show, start
from torch import Tensor

from asynctp_passes import ops
from asynctp_passes.ops.call_sites import CallSite, WaitSite
from asynctp_passes.ops.calls import COLLECTIVES

TIMES = 24
M, K, N = (64, 32, 16) if IS_INTERPRETED else (1024, 512, 256)
TENSORS = {"all_gather_matmul": ("a_shard", "bs", "biases"), "matmul_reduce_scatter": ("a_parts", "b_parts", "biases")}


def random(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, device=device()).to(torch.bfloat16)


def odd(tensor: Tensor) -> Tensor:
    """The same at an address that is not a multiple of 16 bytes."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def in_symmetric_memory(tensor: Tensor) -> Tensor:
    """The same where other GPUs can be let read it; the driver lets no graph copy from there that copied elsewhere."""
    place = symmetric_empty(tensor.numel() * tensor.itemsize, tensor.device)
    return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def constants(op: str) -> dict[str, Any]:
    size = {"group_size": dist.get_world_size()}
    own = {
        "all_gather": {**size, "copy": False},
        "reduce_scatter": {**size, "reduce_op": "sum", "copy": False},
        "all_reduce": {"reduce_op": "max"},
        "all_gather_matmul": {"gather_dim": 0, "return_a_full": True, "group_size": dist.get_world_size()},
        "matmul_reduce_scatter": {"reduce_op": "sum", "scatter_dim": 0, "group_size": dist.get_world_size()},
        "matmul_all_reduce": {"reduce_op": "sum"},
    }
    return {**own[op], "group_name": dist.group.WORLD.group_name}


class Pair:
    """A call by its op, and by its place in generated code.

    Attributes:
        equal: Whether all results had the same bits.
    """

    def __init__(self, op: str) -> None:
        alone = (COLLECTIVES[op].names[0],) if op in COLLECTIVES else TENSORS["matmul_reduce_scatter"]
        names = TENSORS.get(op, alone)
        self.op, self.given = getattr(torch.ops.asynctp, op).default, constants(op)
        self.site, self.names, self.equal = CallSite(op, self.given, names), names, True

    def by_op(self, *tensors: Any) -> list[Tensor]:
        found = several(self.op(**dict(zip(self.names, tensors, strict=True)), **self.given))
        return found if "matmul" in self.op.name() else [torch.ops.asynctp.wait.default(*found, *tensors)]

    def by_site(self, *tensors: Any) -> list[Tensor]:
        found = several(self.site(*tensors))
        return found if "matmul" in self.op.name() else [WaitSite(False)(*found, *tensors)]

    def both(self, *tensors: Any) -> None:
        """Compare one call of each."""
        wanted, found = self.by_op(*tensors), self.by_site(*tensors)
        self.equal &= all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def several(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def operands(op: str) -> tuple[Any, ...]:
    if op in COLLECTIVES:
        return (random(M if op == "reduce_scatter" else M // dist.get_world_size(), 8 if op == "all_reduce" else K),)
    a, b = random(M // dist.get_world_size() if "gather" in op else M, K), random(N, K).t()
    return (a, [b], [None]) if "gather" in op else ([a], [b], [None])


def variants(pair: Pair, op: str) -> Iterator[tuple[str, Callable[[], None]]]:
    given = operands(op)

    def again() -> None:
        for _ in range(TIMES):
            pair.both(*given)

    def elsewhere() -> None:
        kept = [operands(op) for _ in range(6)]
        for each in kept:
            pair.both(*each)

    def moved(move: Callable[[Tensor], Tensor]) -> None:
        a, *others = operands(op)
        for _ in range(3):
            pair.both(move(a) if isinstance(a, Tensor) else [move(each) for each in a], *others)

    def on_another_stream() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again()
        torch.cuda.current_stream().wait_stream(stream)

    def captured() -> None:
        graph = torch.cuda.CUDAGraph()
        direct = pair.site.direct
        with torch.cuda.graph(graph):
            found = pair.by_site(*given)
        assert pair.site.direct == direct, "a call in a capture is the op's"
        for _ in range(3):
            graph.replay()
        pair.equal &= all(torch.equal(*pairs) for pairs in zip(pair.by_op(*given), found, strict=True))

    def after_release() -> None:
        dist.barrier()
        asynctp_kernels.release(dist.group.WORLD)
        dist.barrier()
        again()

    yield from {"again": again, "elsewhere": elsewhere, "at odd addresses": lambda: moved(odd)}.items()
    if not IS_INTERPRETED:
        yield from {"on another stream": on_another_stream, "captured": captured}.items()
        yield "in symmetric memory", lambda: moved(in_symmetric_memory)
    yield "after release", after_release


def main() -> None:
    start(240)
    with torch.no_grad():
        for op in sys.argv[1:] or (*ops.OPS, *COLLECTIVES):
            for implementation in ("fused", "decomposed", "direct"):
                with cuda.forced(implementation):
                    pair = Pair(op)
                    for variant, run in variants(pair, op):
                        direct, pair.equal = pair.site.direct, True
                        run()
                        made = pair.site.direct - direct
                        assert made > 0 or variant == "captured", "no call went the direct way"
                        facts = {"op": op, "implementation": implementation, "variant": variant, "direct": made}
                        show({**facts, "ok": pair.equal})
                        assert pair.equal, facts
    end()


if __name__ == "__main__":
    main()
