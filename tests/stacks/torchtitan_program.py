"""torchtitan's trainer on CPU ranks: python torchtitan_program.py RESULTS.json ARGUMENTS OF TORCHTITAN ...

torchtitan runs on accelerators only. This gives it a CPU in their place, and computes FlexAttention by
`scaled_dot_product_attention`, since Inductor has no backward of it on a CPU. The rest is torchtitan's own.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
    attention_masks: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
    **rest: Any,
) -> Tensor:
    """Causal attention, in place of FlexAttention's, whose names torchtitan looks up."""
    q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


def main(out: Path) -> None:
    """Train as the command line says; write losses and the picture of what was compiled."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", Cpu()
    from torchtitan import train
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.common import attention

    attention._compiled_create_block_mask = attention.create_block_mask
    attention.FlexAttention.forward = attend
    losses: list[float] = []
    log = MetricsProcessor.log

    def keep(self: Any, step: int, global_avg_loss: float, *rest: Any, **others: Any) -> None:
        losses.append(global_avg_loss)
        log(self, step, global_avg_loss, *rest, **others)

    MetricsProcessor.log = keep
    with contextlib.suppress(SystemExit):
        train.main()
    import asynctp_passes

    found = asynctp_passes.summary()
    if torch.distributed.is_initialized() is False or int(torch.distributed.get_rank()) == 0:
        out.write_text(json.dumps({"losses": losses, "fused": found.fused, "missed": found.missed, "text": str(found)}))


if __name__ == "__main__":
    path = Path(sys.argv.pop(1))
    main(path)
