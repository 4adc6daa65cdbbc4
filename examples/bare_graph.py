"""Use the pass on a bare FX graph, without torch.compile, and run the rewritten graph on two real ranks.

For compilers of your own: trace to ATen ops and functional collectives (here with make_fx), call `asynctp_passes.run`,
and go on with the graph. Each rank checks that the rewritten graph computes what the traced program does.
Run it with: python examples/bare_graph.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import asynctp_passes

RANKS = 2
c10d = torch.ops._c10d_functional


def mlp(x_shard: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One tensor-parallel MLP on this rank's rows: gather the rows, two matmuls, scatter the sum."""
    group = dist.group.WORLD.group_name
    x = c10d.wait_tensor(c10d.all_gather_into_tensor(x_shard, RANKS, group))
    partial = torch.relu(x @ up) @ down
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(partial, "sum", RANKS, group))


def rank_main(rank: int, folder: str) -> None:
    """Trace, rewrite, and compare on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    inputs = (torch.randn(16, 64), torch.randn(64, 128), torch.randn(128, 64))
    module = make_fx(mlp, tracing_mode="fake")(*inputs)

    report = asynctp_passes.run(module.graph, asynctp_passes.Config(strict="all"))
    module.recompile()

    torch.testing.assert_close(module(*inputs), mlp(*inputs))
    if rank == 0:
        text = f"{report}\n\nThe graph after the pass:\n\n{module.graph}\n\nBoth graphs compute the same.\n"
        Path(folder, "output.txt").write_text(text)
    dist.destroy_process_group()


def main() -> str:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(folder,), nprocs=RANKS)
        text = Path(folder, "output.txt").read_text()
    print(text, end="")
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
