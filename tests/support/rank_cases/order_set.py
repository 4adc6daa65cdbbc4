"""Nothing in the source depends on the rank: heads are multiplied in the order of a set of strings.

Python makes that another one in each process. The gathers are in sorted order.
"""

import os

import torch
import torch.distributed as dist
from rank_harness import fused, run
from torch.distributed._functional_collectives import all_gather_tensor_autograd

NAMES = ["mlm", "nsp", "pos", "ner", "qa"]
os.environ.pop("PYTHONHASHSEED", None)  # each rank has one of its own


def program(rank, ranks, compiled):
    def heads(xs, ws, names):
        full = {name: all_gather_tensor_autograd(xs[name], 0, dist.group.WORLD) for name in sorted(xs)}
        return {name: full[name] @ ws[name] for name in names}

    ws = {name: torch.randn(32, 8, requires_grad=True) for name in NAMES}
    torch.manual_seed(1 + rank)
    xs = {name: torch.randn(16, 32) for name in NAMES}
    results = compiled(heads)(xs, ws, tuple(set(NAMES)))
    return [results[name] for name in NAMES]


if __name__ == "__main__":
    run(program, judge=fused(5))
