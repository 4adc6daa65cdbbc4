"""Write a page with a graph before and after the pass, its chains coloured by outcome.

The page is one HTML file that needs no network, and `index.html` beside it lists all pages of the folder. A click on a
chain fits it into the picture. Run it with: python examples/visualize.py [FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import asynctp_passes

RANKS = 4


class TwoLayers(nn.Module):
    """An MLP, and one whose input is gathered before a norm, so that the page shows fused and missed chains."""

    def __init__(self) -> None:
        super().__init__()
        self.up1, self.down1 = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        self.norm = nn.RMSNorm(64)
        self.up2, self.down2 = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down1(torch.relu(self.up1(x)))
        return self.down2(torch.relu(self.up2(self.norm(x))))


def main(folder: str | Path) -> list[Path]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plan = {
        "up1": ColwiseParallel(input_layouts=Shard(1)),
        "down1": RowwiseParallel(output_layouts=Shard(1)),
        "norm": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
        "up2": ColwiseParallel(),
        "down2": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = parallelize_module(TwoLayers(), mesh, plan)
    before = set(Path(folder).glob("*.html"))
    options = {"graph_dir": str(folder), "fx_graph_cache": False}
    with torch.no_grad():
        torch.compile(model, backend="asynctp", options=options)(torch.randn(2, 16, 64))
    index = Path(folder) / "index.html"
    pages = sorted(set(Path(folder).glob("*.html")) - before - {index})
    for page in pages:
        print(f"open {page} in a browser; {index} lists all pages")
    dist.destroy_process_group()
    return pages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="visualize", description="Draw a graph before and after the pass.")
    parser.add_argument("folder", nargs="?", default="asynctp-out/example", help="for the page (default: %(default)s)")
    folder = parser.parse_args().folder
    try:
        asynctp_passes.Config(graph_dir=folder)
    except asynctp_passes.ConfigError as error:
        parser.error(str(error))
    main(folder)
