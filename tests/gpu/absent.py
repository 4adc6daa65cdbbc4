"""A rank that does not come to a call: every kind of call must end, name it and refuse to go on. On real GPUs.

    ASYNCTP_TIMEOUT_S=2 torchrun --nproc_per_node=4 tests/gpu/absent.py

The last rank leaves one call of each kind out. The others' calls run out of time, their groups say which collective
waited for which rank, and after a release the same call is right again. Then it only meets the
others, as a rank without a graph does, who are in a call: all of them raise. One JSON line a case, from rank 0.
"""

from __future__ import annotations

import functools
import os
import sys
import time

import torch
import torch.distributed as dist
from asynctp_kernels import SymmetricMemoryError, cuda, release
from asynctp_kernels.cuda.runtime.memory import existing_memory
from launched import end, run_cases, start
from torch import Tensor

import asynctp_passes.ops.collectives  # noqa: F401  (registers the ops)

#: op and implementation, and the collective that is named; few rows are summed up in one shot over any number of ranks,
#: and all of them in two over four or more; gathers whose A all ranks return pull, others push
CASES = {
    ("all_gather_matmul", "fused"): "all_gather (524288 bytes a rank)",
    ("all_gather_matmul", "fused, A returned"): "all_gather (524288 bytes a rank, kept by every rank)",
    ("all_gather_matmul", "decomposed"): "all_gather (524288 bytes a rank)",
    ("all_gather_matmul", "decomposed, A returned"): "all_gather (524288 bytes a rank, kept by every rank)",
    ("all_gather_matmul", "whole"): "all_gather (524288 bytes a rank)",
    ("all_gather_matmul", "direct"): "all_gather (524288 bytes a rank)",
    ("matmul_reduce_scatter", "fused"): "reduce_scatter (524288 bytes a rank of bfloat16, sum)",
    ("matmul_reduce_scatter", "decomposed"): "reduce_scatter (524288 bytes a rank of bfloat16, sum)",
    ("matmul_reduce_scatter", "direct"): "reduce_scatter (524288 bytes a rank of bfloat16, sum)",
    ("matmul_all_reduce", "direct, few"): "all_reduce (4096 bytes a rank of bfloat16, sum)",
    ("matmul_all_reduce", "direct"): "all_reduce ({whole} bytes a rank of bfloat16, sum)",
    ("all_gather", "copy engine"): "all_gather (524288 bytes a rank, kept by every rank)",
    ("reduce_scatter", "copy engine"): "reduce_scatter (524288 bytes a rank of bfloat16, sum)",
}


def call(op: str, implementation: str, group: dist.ProcessGroup) -> bool:
    """Make the call on known data; whether its result is right."""
    ops, world, name = torch.ops.asynctp, group.size(), group.group_name
    wait = torch.ops._c10d_functional.wait_tensor
    rank = dist.get_rank()
    a = torch.full((512, 512), float(rank + 1), dtype=torch.bfloat16, device="cuda")
    whole = torch.full((512 * world, 512), float(rank + 1), dtype=torch.bfloat16, device="cuda")
    b = torch.eye(512, dtype=torch.bfloat16, device="cuda")
    total = world * (world + 1) / 2
    found: Tensor
    forced, _, returned = implementation.partition(", ")
    with cuda.forced(forced if forced != "copy engine" else "fused"):
        if op == "all_gather_matmul":
            found = ops.all_gather_matmul(a, [b], [None], 0, bool(returned), world, name)[0]
        elif op == "all_gather":
            found = wait(ops.all_gather(a, world, name))
        elif op == "matmul_reduce_scatter":
            found = ops.matmul_reduce_scatter([whole], [b], [None], "sum", 0, world, name)
        elif op == "matmul_all_reduce":
            found = ops.matmul_all_reduce([whole[: 4 if returned else None]], [b], [None], "sum", name)
        else:
            found = wait(ops.reduce_scatter(whole, "sum", world, name))
    wanted = torch.full_like(found, total)
    if op.startswith("all_gather"):
        wanted = torch.arange(1.0, world + 1, device="cuda").repeat_interleave(512)[:, None].expand(-1, 512)
    return torch.equal(found.float(), wanted.float())


def refused(op: str, implementation: str, group: dist.ProcessGroup) -> str:
    """What the next call says; waits until the failure is known."""
    for _ in range(100):
        time.sleep(0.1)
        if cuda.runtime.memory.existing_memory(group).failure is not None:  # type: ignore[union-attr]
            break
    try:
        call(op, implementation, group)
    except SymmetricMemoryError as error:
        return str(error)
    return "nothing"


def run(op: str, implementation: str, told: str, meets: bool = False) -> dict[str, object]:
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.barrier(group)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before = call(op, implementation, group)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.monotonic()
    said = ""
    if meets:
        memory = existing_memory(group)
        assert memory is not None
        memory.bound = int(1e11)  # no wait runs out before
        memory.plans.clear()  # they have the bound of before
        cuda.meet(group, torch.device("cuda", torch.cuda.current_device()), 6)
    if rank == last and meets:
        try:
            cuda.meet(group, torch.device("cuda", torch.cuda.current_device()), 7)
        except SymmetricMemoryError as error:
            said = str(error)
    if rank != last:
        call(op, implementation, group)
        torch.cuda.synchronize()
        said = refused(op, implementation, group)
    seconds = round(time.monotonic() - start, 1)
    dist.barrier()
    torch.cuda.synchronize()
    release(group)
    dist.barrier()
    after = call(op, implementation, group)
    torch.cuda.synchronize()
    bound = float(os.environ["ASYNCTP_TIMEOUT_S"])
    told = told.format(whole=group.size() * 524288)
    named = f"{told}: rank {rank} waited {bound:g} s for the same call of rank {last}."
    if meets:
        named = "of accord 7"
    good = before and after and ((rank == last and not meets) or (named in said and seconds < bound + 10))
    everywhere = torch.tensor(int(good), device="cuda")
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return {"ok": bool(everywhere.item()), "said": said, "seconds": seconds, "before": before, "after": after}


def main() -> int:
    start(300)
    cases = [(f"{op}/{name}", functools.partial(run, op, name, told)) for (op, name), told in CASES.items()]
    meeting = [(f"meets/{op}/{name}", functools.partial(run, op, name, "", meets=True)) for op, name in CASES]
    code = run_cases([*cases, *meeting], 300)
    end()
    return code


if __name__ == "__main__":
    sys.exit(main())
