"""Memory and gradients of training steps with gathers kept for the backward, and made again: one JSON line for each.

    torchrun --nproc_per_node=4 tests/gpu/peaks.py [SIZE/KIND ...]      (all of 70B's and 8B's by default)

A step is that of `asynctp bench --e2e`: two blocks, one sequence of 8192 tokens. Ranks may share GPUs (`launched`). A
rank allocates as much then, but takes another time. Plain Inductor cannot run so, since gloo's functional collectives
end in a segmentation fault on tensors of a GPU (torch 2.11 and 2.15). So gradients are compared with those of the first
mode, in which no gather is made again. In fp8 they differ by as much as fp8 rounds: Inductor keeps in fp32 what is
quantized and not stored for the backward.
"""

from __future__ import annotations

import itertools
import sys

import torch
import torch.distributed as dist
from launched import device, end, limit, show, start
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from asynctp_passes.tools import e2e
from asynctp_passes.tools.demo.recipe import Place

MODES = ("never", "always")
SIZES, KINDS = ("70b", "8b"), ("bf16", "fp8", "fp8-rowwise")
BLOCKS, TOKENS = 2, 8192
SECONDS = 300


def main() -> int:
    """Run every problem that an argument names; all without arguments."""
    start(SECONDS)
    named = [f"{size}/{kind}" for size, kind in itertools.product(SIZES, KINDS)]
    unknown = [name for name in sys.argv[1:] if name not in named]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)} is not valid; it must be among {', '.join(named)}")
    here = Place(dist.get_rank(), dist.get_world_size(), device())
    mesh = init_device_mesh(here.device.type, (here.world,), mesh_dim_names=("tp",))
    fused = True
    for name in sys.argv[1:] or named:
        size, kind = name.split("/")
        expected: dict[str, Tensor] | None = None
        for mode in MODES:
            limit(SECONDS)
            e2e.start_anew(here, mesh)
            problem = e2e.Problem(size, kind, 1, TOKENS, BLOCKS)
            bench = e2e.Bench(problem, here, mesh, {"rematerialize": mode})
            ready, found = e2e.prepare(bench, "asynctp", expected)
            expected = found if expected is None else expected
            del found
            held = sum(each.numel() * each.element_size() for each in expected.values())
            peak = e2e.peak_bytes(bench, "asynctp", ready.program, held)
            assert peak is not None
            assert ready.fused is not None
            tensor, difference = max(ready.differences.items(), key=lambda item: item[1])
            fused = fused and ready.fused[1] == 0
            show(
                {
                    "case": f"{name}/{mode}", "ranks": here.world, "gpus": torch.cuda.device_count(),
                    "peak_GiB": round(peak / 2**30, 3), "loss": ready.loss, "differs": difference, "tensor": tensor,
                    "fused": f"{ready.fused[0]} of {sum(ready.fused)}",
                }
            )  # fmt: skip
            del ready, bench
    end()
    return int(not fused)


if __name__ == "__main__":
    sys.exit(main())
