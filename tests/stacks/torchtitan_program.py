"""torchtitan's trainer on CPU ranks, with asynctp and without: python torchtitan_program.py CASES.json RESULTS.json

A case is `[name, ranks, options of asynctp, arguments of torchtitan]`. torchtitan runs on accelerators only. This gives
it a CPU in their place, computes FlexAttention by products that Inductor can compile there, and has FSDP sum gradients
by what gloo knows. Models are cut to two layers. The rest is torchtitan's own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS = 2
TIMEOUT_S = 300
OVERRIDE = "asynctp_passes.torchtitan.asynctp"


class Cpu:
    """The functions that torchtitan calls of the module of a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    get_device_name = staticmethod(lambda device=None: "cpu")
    current_device = staticmethod(lambda: 0)
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=1 << 34, name="cpu"))
    reset_peak_memory_stats = staticmethod(lambda: None)
    empty_cache = staticmethod(lambda: None)
    memory_stats = staticmethod(lambda device=None: {})
    set_device = staticmethod(lambda device: None)


def attend(
    self: Any,
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    *,
    attention_masks: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
    **rest: Any,
) -> Tensor:
    """Causal attention, in place of FlexAttention's, whose names torchtitan looks up."""
    q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    if out_transform is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    later = torch.full((q.shape[2], q.shape[2]), float("-inf")).triu(1)
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[3] ** -0.5 if scale is None else scale) + later
    logs = scores.logsumexp(3)
    out = (scores - logs[..., None]).exp().to(v.dtype) @ v
    return out_transform(out.transpose(1, 2), logs.transpose(1, 2))


def on_cpus() -> None:
    """Give torchtitan the parts that a CPU has."""
    import torch._inductor.config
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", Cpu()
    utils.has_cuda_capability = lambda major, minor: (major, minor) <= (8, 9)  # float8, which CPUs compute too
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.common import attention
    from torchtitan.trainer import Trainer

    attention._compiled_create_block_mask = attention.create_block_mask
    attention.FlexAttention.forward = attend
    torch._inductor.config.fallback_by_default = True  # no C++ is compiled
    make = Trainer.__init__

    def made(self: Any, config: Any) -> None:
        del config.model_spec.model.layers[LAYERS:]
        make(self, config)
        for part in self.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)

    Trainer.__init__ = made


def record(found: dict[str, Any], gradients: list[Tensor]) -> None:
    """Have torchtitan's parts put the losses of all steps, and this rank's gradients of the first, there."""
    import torchtitan.distributed.utils
    from torchtitan.components.metrics import MetricsProcessor

    log, clip = MetricsProcessor.log, torchtitan.distributed.utils.clip_grad_norm_

    def logged(self: Any, step: int, global_avg_loss: float, *rest: Any, **others: Any) -> None:
        found["losses"].append(global_avg_loss)
        log(self, step, global_avg_loss, *rest, **others)

    def clipped(parameters: Any, *rest: Any, **others: Any) -> Any:
        parameters = list(parameters)
        if not gradients:
            each = (parameter.grad for parameter in parameters if parameter.grad is not None)
            gradients.extend(getattr(one, "_local_tensor", one).detach().double() for one in each)
        return clip(parameters, *rest, **others)

    MetricsProcessor.log, torchtitan.distributed.utils.clip_grad_norm_ = logged, clipped


def train(arguments: list[str], out: Path) -> None:
    """One rank of one run, in a process of its own."""
    from torchtitan import train

    import asynctp_passes

    found: dict[str, Any] = {"losses": [], "error": ""}
    gradients: list[Tensor] = []
    record(found, gradients)
    sys.argv[1:] = arguments
    try:
        train.main()
    except BaseException:
        found["error"] = traceback.format_exc()
    reports = asynctp_passes.reports()
    found["fused"] = sum(len(report.fused) for report in reports)
    found["missed"] = sum(len(report.missed) for report in reports)
    found["text"] = "\n".join(map(str, reports))
    torch.save((found, gradients), out)


def run(ranks: int, arguments: list[str], folder: Path) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """All ranks of one run: what they found, and their gradients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children, outs = set(), [folder / f"{rank}.pt" for rank in range(ranks)]
    for rank, out in enumerate(outs):
        out.unlink(missing_ok=True)
        if pid := os.fork():
            children.add(pid)
            continue
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            train(arguments, out)
        finally:
            sys.stdout.flush()
            os._exit(0)
    end = time.monotonic() + TIMEOUT_S
    while children and time.monotonic() < end:
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.05)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lost = {"losses": [], "error": f"no result in {TIMEOUT_S} s", "fused": 0, "missed": 0, "text": ""}
    return [torch.load(out) if out.exists() else (lost, []) for out in outs]


def distance(ours: list[Tensor], plain: list[Tensor]) -> float:
    """The largest difference of a gradient, relative to its largest element; infinite where one is missing."""
    if len(ours) != len(plain) or not plain:
        return float("inf")
    pairs = [(one, other) for one, other in zip(ours, plain, strict=True) if one.numel()]
    return max(float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)) for one, other in pairs)


def main(cases: Path, results: Path) -> None:
    """Run all cases; write what rank 0 found, and the distance between all ranks' gradients."""
    on_cpus()
    import torchtitan.train  # noqa: F401  once, for all

    found = {}
    for name, ranks, options, arguments in json.loads(cases.read_text()):
        override = ["--override.imports", f"{OVERRIDE}={json.dumps(options)}"]
        plain = run(ranks, arguments, results.parent)
        ours = run(ranks, [*arguments[:4], *override, *arguments[4:]], results.parent)
        found[name] = {
            "plain": plain[0][0],
            "ours": ours[0][0],
            "distance": max(distance(one[1], other[1]) for one, other in zip(ours, plain, strict=True)),
        }
        results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
