"""What the programs of this folder share: torchrun starts one process a GPU, and rank 0 prints a JSON line a case.

With more processes than GPUs the ranks of `cases`, `stress` and `compiled` share them, in turns of milliseconds:
protocols and kernels of 4 and 8 ranks run on 1 or 2 GPUs, slowly. NCCL refuses that, so that gloo makes what is
compared with. It cannot be captured: what needs it in a CUDA graph, `sequential` and all-reduces, is left out.

With TRITON_INTERPRET=1 they are processes on CPUs, and kernels are interpreted: that is enough for `unlike`, `bits` and
`decode`.

With TILES=shares in the environment every GEMM runs on `PROGRAMS` CTAs at a time, so that each has several tiles, which
are dealt out in shares as beside other groups' kernels. With TILES=pingpong, moreover, every GEMM that can run
`pingpong_kernels` does, whatever its size; where it cannot be compiled, the program ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from asynctp_kernels.cuda.choose import tiles
from asynctp_kernels.cuda.gemm import gemm, own_matmul
from asynctp_kernels.cuda.plans import direct, fused, gather_transports, scatter
from asynctp_kernels.cuda.runtime import launch
from asynctp_kernels.signals import IS_INTERPRETED

PROGRAMS = 8
#: modules that say how many programs a kernel has
GRIDS = (direct, fused, gather_transports, own_matmul, scatter)


def start(seconds: int) -> None:
    """Join the group of all GPUs; the process ends with its stacks printed if `seconds` pass without a new `limit`."""
    faulthandler.enable()
    limit(seconds)
    if (wanted := os.environ.get("TILES")) is not None:
        in_shares()
        if wanted == "pingpong":
            pingpong_everywhere()
        elif wanted != "shares":
            raise SystemExit(f"TILES={wanted} is not valid; it must be shares or pingpong")
    if IS_INTERPRETED:
        os.environ.setdefault("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")  # by default CPUs run no kernels
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return
    rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if not gpus:
        raise SystemExit("there is no GPU here; with TRITON_INTERPRET=1 kernels are interpreted on CPUs")
    here = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(here)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=here)


def device() -> torch.device:
    """Of this process."""
    return torch.device("cpu") if IS_INTERPRETED else torch.device("cuda", torch.cuda.current_device())


def in_shares() -> None:
    def few(wanted: int, most: int) -> int:
        return launch.grid(wanted, min(most, PROGRAMS))

    for module in GRIDS:
        vars(module)["grid"] = few
    fused.others_beside = lambda world: True


def pingpong_everywhere() -> None:
    def give_up(fault: str) -> None:
        raise SystemExit(fault)

    tiles.pingpong_is_faster = lambda small, large, depth, fp8: True
    gemm._give_up = give_up


def limit(seconds: int) -> None:
    """Let what comes now take that long, or as long as `CASE_TIMEOUT` says."""
    faulthandler.dump_traceback_later(int(os.environ.get("CASE_TIMEOUT", seconds)), exit=True)


def show(line: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def run_cases(cases: Iterable[tuple[str, Callable[[], dict[str, Any]]]], seconds: int) -> int:
    """Run the cases, each within `seconds`, whose name contains an argument of the program; all without arguments.

    A case gives what is shown of it. It failed when its `ok` is false, or when it raised.

    Returns:
        The program's exit code: 1 also if an argument is in no name.
    """
    failed, unmatched = 0, set(sys.argv[1:])
    for name, case in cases:
        if len(sys.argv) > 1 and not any(text in name for text in sys.argv[1:]):
            continue
        unmatched -= {text for text in unmatched if text in name}
        limit(seconds)
        try:
            result = case()
        except Exception as error:  # reported as the case's result
            result = {"ok": False, "exception": f"{type(error).__name__}: {error}"[:900]}
            if dist.get_rank() == 0:
                traceback.print_exc()
        failed += not result.get("ok", True)
        show({"case": name, **result})
    show({"failed": failed, **({"in no case's name": sorted(unmatched)} if unmatched else {})})
    return int(failed > 0 or bool(unmatched))


def end() -> None:
    """Leave the group, when all ranks do."""
    faulthandler.cancel_dump_traceback_later()
    if not IS_INTERPRETED:
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
