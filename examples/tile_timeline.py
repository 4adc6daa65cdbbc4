"""Draw when each tile of the fused GEMM ran, and what it waited for: a gather and a scatter on the GPUs of one host.

    torchrun --standalone --nproc-per-node 4 examples/tile_timeline.py
    torchrun --standalone --nproc-per-node 2 examples/tile_timeline.py --gather 4096x8192x4096 --out tiles

Of each, rank 0 writes a trace for https://ui.perfetto.dev with a track for each SM, and a picture of the same. It needs
GPUs of compute capability 9. docs/how-to/profile.md says how to do it for your own program.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import asynctp_passes.ops  # noqa: F401  (registers torch.ops.asynctp)
from asynctp_passes.tools.profile import Panel, add_tiles, read, timeline

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NEEDS = (
    "it runs on 2 to 8 GPUs of one host, started by 'torchrun --standalone --nproc-per-node GPUS "
    "examples/tile_timeline.py'; 'asynctp doctor' says what is missing"
)
CALLS = 10  # before the one that is drawn: until the GPUs are in step, and the host is ahead of them


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done, 2 it cannot run here, or was not started by torchrun."""
    parser = argparse.ArgumentParser(prog="tile_timeline", description="Draw the tiles of the fused GEMM.")
    parser.add_argument("--gather", default="8192x8192x2560", metavar="MxKxN", help="default: %(default)s")
    parser.add_argument("--scatter", default="8192x2048x8192", metavar="MxKxN", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("tiles"), metavar="FOLDER", help="default: %(default)s")
    options = parser.parse_args(arguments)
    sizes = {name: _sizes(parser, name, getattr(options, name)) for name in ("gather", "scatter")}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 2 <= int(os.environ.get("LOCAL_WORLD_SIZE", "0")) <= min(gpus, 8):
        print(f"tile_timeline: {NEEDS}", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, make in (("gather", gather), ("scatter", scatter)):
        draw(make(*sizes[name], DTYPES[options.dtype], device), options.out / name, f"{name} {getattr(options, name)}")
    dist.destroy_process_group()
    return 0


def _sizes(parser: argparse.ArgumentParser, name: str, text: str) -> tuple[int, int, int]:
    try:
        m, k, n = (int(part) for part in text.split("x"))
    except ValueError:
        parser.error(f"--{name} {text} is not valid; it must be MxKxN, as 8192x8192x2560")
    if min(m, k, n) < 1:
        parser.error(f"--{name} {text} is not valid; each size must be at least 1")
    if m % int(os.environ.get("WORLD_SIZE", "1")):
        parser.error(f"--{name} {text} is not valid; the {m} rows must be divisible by the number of ranks")
    return m, k, n


def gather(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """all_gather(A [M/W, K]) @ B [K, N]."""
    world, group = _group()
    a, b = _random(m // world, k, dtype, device), _random(n, k, dtype, device).t()
    return lambda: torch.ops.asynctp.all_gather_matmul(a, [b], [None], 0, False, world, group)


def scatter(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """reduce_scatter(A [M, K] @ B [K, N])."""
    world, group = _group()
    a, b = _random(m, k, dtype, device), _random(n, k, dtype, device).t()
    return lambda: torch.ops.asynctp.matmul_reduce_scatter([a], [b], [None], "sum", 0, world, group)


def _group() -> tuple[int, str]:
    """The number of ranks, and the name of the group of all."""
    assert dist.group.WORLD is not None
    return dist.get_world_size(), dist.group.WORLD.group_name


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)


def draw(call: Callable[[], object], path: Path, title: str) -> None:
    """Make the call on all ranks, and write `path`.json.gz and `path`.svg of one of many in a row on rank 0."""
    from asynctp_kernels import cuda

    def stamped() -> cuda.Stamps:
        with cuda.forced("fused"), cuda.stamped() as stamps:
            call()
        return stamps

    for _ in range(3):  # compiled, recorded, and launched as a recording
        stamped()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        dist.barrier()
        for _ in range(CALLS):
            stamped()
        with record_function(title):
            stamps = stamped()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        trace, picture = path.with_suffix(".json.gz"), path.with_suffix(".svg")
        profiler.export_chrome_trace(str(trace))
        add_tiles(trace, stamps.calls(), title)
        found = read(trace)
        ranges = [interval for name, _, interval in found.annotations if name == title]  # one for each stream
        window = min(start for start, _ in ranges), max(end for _, end in ranges)
        picture.write_text(timeline(Panel(found, window=window, title=title)), encoding="utf-8")
        print(f"wrote {trace} and {picture}")


if __name__ == "__main__":
    sys.exit(main())
