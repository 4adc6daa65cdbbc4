"""matmul → all-reduce → residual → RMSNorm in a CUDA graph: plain Inductor and asynctp, in turns.

torchrun --nproc_per_node=4 norm.py
"""

from __future__ import annotations

import os
import statistics

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

SHAPES = ((2048, 8192), (7168, 8192), (1024, 4096), (3584, 4096))  # K, N: projections and MLP of 70B and 8B, TP 4
ROWS = (1, 8, 16, 64)
WEIGHTS_BYTES = 200_000_000  # as many weights in turn as no cache holds
ROUNDS, REPLAYS = 9, 5


def segment(x: Tensor, w: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + funcol.all_reduce(x @ w, "sum", dist.group.WORLD)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return total, normed.to(total.dtype) * gain


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for k, n in SHAPES:
        for m in ROWS:
            torch.manual_seed(rank)
            bf16 = {"device": "cuda", "dtype": torch.bfloat16}
            x = torch.randn(m, k, **bf16) / k**0.5
            weights = [torch.randn(k, n, **bf16) for _ in range(max(1, WEIGHTS_BYTES // (k * n * 2)))]
            torch.manual_seed(99)
            residual, gain = torch.randn(m, n, **bf16), torch.randn(n, **bf16)
            graphs, results = {}, {}
            for backend in ("inductor", "asynctp"):
                torch._dynamo.reset()
                compiled = torch.compile(segment, backend=backend, dynamic=False)
                for w in weights[:3]:
                    compiled(x, w, residual, gain)
                torch.cuda.synchronize()
                dist.barrier()
                graphs[backend] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[backend]):
                    total = residual
                    for w in weights:
                        total, normed = compiled(x, w, total, gain)
                graphs[backend].replay()
                torch.cuda.synchronize()
                results[backend] = normed.float()
            times: dict[str, list[float]] = {backend: [] for backend in graphs}
            for number in range(ROUNDS):
                for backend in list(graphs)[:: 1 if number % 2 else -1]:
                    dist.barrier()
                    torch.cuda.synchronize()
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    for _ in range(REPLAYS):
                        graphs[backend].replay()
                    end.record()
                    torch.cuda.synchronize()
                    times[backend].append(begin.elapsed_time(end) * 1e3 / REPLAYS / len(weights))
            plain, ours = (statistics.median(times[backend]) for backend in ("inductor", "asynctp"))
            apart = (results["inductor"] - results["asynctp"]).abs().max().item()
            if rank == 0:
                told = f"inductor {plain:.1f} us, asynctp {ours:.1f} us, {plain / ours:.2f}x"
                print(f"{m}x{k}x{n}: {told}, largest difference {apart:.3f}", flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
