"""Recording a call leaves alone what launches under way read: one process, one GPU.

    python tests/gpu/recorder.py

A launch has copied its small operand, and waits on the GPU before it reads the copy. Meanwhile another call is
recorded: the first one that calls cuBLAS, or one that takes the same memory. In deterministic mode PyTorch fills what
it makes. Prints one JSON line a case; ends with 1 if anything is wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch
from asynctp_kernels.cuda.runtime.recordings import Recordings, Work
from torch import Tensor

HELD = 2_000_000_000  # cycles, 1 s: whatever the recording writes, it writes before


class Calls:
    """Calls of two plans: each adds its small operand to nothing. One waits before that, one may call cuBLAS."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.kept = Recordings(self.device)
        self.outs = [torch.zeros(64, device=self.device) for _ in range(2)]
        self.one = torch.ones(64, 64, device=self.device, dtype=torch.bfloat16)
        self.product = torch.empty_like(self.one)
        self.small: list[Tensor] = []  # all of them, so that each is elsewhere

    def make(self, plan: int, value: float, cublas: bool = False) -> None:
        own = torch.full((64,), value, device=self.device)
        self.small.append(own)

        def enqueue(stream: int, small: Sequence[Tensor] | None = None) -> None:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, self.device)):
                if plan == 0:
                    torch.cuda._sleep(HELD)
                if cublas:
                    torch.mm(self.one, self.one, out=self.product)
                torch.add(own if small is None else small[0], 0, out=self.outs[plan])

        stream = torch.cuda.current_stream().cuda_stream
        self.kept.run(stream, Work(plan, (0,), enqueue, cublas, [own]), urgent=False)


def run(cublas: bool) -> dict[str, object]:
    """The first plan's recording is launched and waits; meanwhile the second one's is made."""
    calls = Calls()
    for value in (1.0, 2.0):
        calls.make(0, value)
    calls.make(1, 3.0, cublas)
    torch.cuda.synchronize()
    calls.make(0, 4.0)
    time.sleep(0.02)
    waits = not torch.cuda.current_stream().query()  # to make cuBLAS's handles may end that: the GPU is waited for
    calls.make(1, 5.0, cublas)
    torch.cuda.synchronize()
    found = [[out.min().item(), out.max().item()] for out in calls.outs]
    ok = waits and len(calls.kept) == 2 and found == [[4.0, 4.0], [5.0, 5.0]]
    return {"waits": waits, "recorded": len(calls.kept), "found": found, "ok": ok}


def main() -> int:
    wrong = 0
    for cublas in (True, False):  # cuBLAS's handles are made once in a process
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            result = run(cublas)
            wrong += not result["ok"]
            print(json.dumps({"cublas": cublas, "deterministic": deterministic, **result}), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
