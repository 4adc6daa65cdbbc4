"""A decode loop of a small Llama, compiled: log-probabilities of prompts one by one and all at once, bit by bit.

    torchrun --nproc_per_node=4 tests/gpu/decode.py        (ranks may share GPUs)

All matmuls are in fused chains, under `invariant="batch"`. What is beside them is made row by row by eager ops, each of
one row at a time: norms, attention over a cache, and log-probabilities. So it has the same bits in any batch, whatever
torch does with many rows. "One by one" is a batch of as many rows as ranks, all of them the same prompt: a chain that
gathers and scatters rows has one on each rank at least.

A JSON line a batch: log-probabilities that were compared, and how many differ; `fused` and `missed` chains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from asynctp_kernels.signals import IS_INTERPRETED
from bits import raw
from launched import device, end, run_cases, start
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

import asynctp_passes

PROMPTS, STEPS, LAYERS, VOCABULARY, WIDTH, HIDDEN, HEADS, DEPTH = 64, 6, 2, 1024, 1024, 2816, 8, 128
if IS_INTERPRETED:
    PROMPTS, STEPS, LAYERS, VOCABULARY, WIDTH, HIDDEN, HEADS, DEPTH = 6, 2, 1, 64, 64, 96, 4, 16
DTYPE = torch.bfloat16


# --- row by row ------------------------------------------------------------------------------------------------------
@torch.library.custom_op("bits::norm", mutates_args=())
def norm(x: Tensor) -> Tensor:
    """Each row by itself."""
    rows = [row.float() * torch.rsqrt(row.float().square().mean(-1, keepdim=True) + 1e-6) for row in x.split(1)]
    return torch.cat(rows).to(x.dtype)


@norm.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("bits::attend", mutates_args=())
def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Of each row's own cache [rows, past, heads * DEPTH], to which its newest position comes."""
    outs = []
    for row, old_keys, old_values in zip(qkv, keys, values, strict=True):
        q, k, v = (each.view(-1, DEPTH) for each in row.chunk(3))
        past_k = torch.cat([old_keys.view(-1, *k.shape), k[None]]).float()
        past_v = torch.cat([old_values.view(-1, *v.shape), v[None]]).float()
        weights = ((past_k * q.float()).sum(-1) * DEPTH**-0.5).softmax(0)
        outs.append((weights[..., None] * past_v).sum(0).view(-1))
    return torch.stack(outs).to(qkv.dtype)


@attend.register_fake
def _(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)


for name in ("bits::norm", "bits::attend"):
    asynctp_passes.register_local(name)


# --- the model -------------------------------------------------------------------------------------------------------
@dataclass
class Model:
    """A rank's part: columns of weights that begin a chain, rows of those that end one."""

    layers: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(5)

        def weight(rows: int, columns: int, dim: int) -> Tensor:
            whole = torch.randn(columns, rows, device=device()) * rows**-0.5
            return whole.to(DTYPE).chunk(ranks, 1 - dim)[rank].contiguous().t()

        self.embedding = torch.randn(VOCABULARY, WIDTH, device=device()).to(DTYPE)
        sizes = ((WIDTH, 3 * HEADS * DEPTH, 1), (HEADS * DEPTH, WIDTH, 0), (WIDTH, HIDDEN, 1), (HIDDEN, WIDTH, 0))
        self.layers = [[weight(*each) for each in sizes] for _ in range(LAYERS)]
        self.head = weight(WIDTH, VOCABULARY, 1)

    def step(self, x: Tensor, caches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        """x: this rank's rows [rows / ranks, WIDTH] of the newest positions. Its columns of all logits, and all qkv."""
        group, made = dist.group.WORLD, []
        for (qkv_w, out_w, up, down), cache in zip(self.layers, caches, strict=True):
            qkv = all_gather_tensor(norm(x), 0, group) @ qkv_w
            made.append(qkv)
            x = x + reduce_scatter_tensor(attend(qkv, *cache) @ out_w, "sum", 0, group)
            hidden = torch.relu(all_gather_tensor(norm(x), 0, group) @ up)
            x = x + reduce_scatter_tensor(hidden @ down, "sum", 0, group)
        return all_gather_tensor(norm(x), 0, group) @ self.head, made


def decode(model: Model, step: Callable[..., Any], first: Tensor) -> Tensor:
    """Log-probabilities [STEPS, rows, VOCABULARY]; each byte that follows is the likeliest."""
    ranks, rank, tokens, found = dist.get_world_size(), dist.get_rank(), first, []
    width = HEADS * DEPTH // ranks
    caches: Any = [
        tuple(torch.empty(len(first), 0, width, dtype=DTYPE, device=device()) for _ in range(2)) for _ in range(LAYERS)
    ]
    for _ in range(STEPS):
        x = model.embedding[tokens].chunk(ranks)[rank].clone()
        part, made = step(x, caches)
        caches = [
            tuple(torch.cat([old, new[:, None]], 1) for old, new in zip(cache, qkv.chunk(3, 1)[1:], strict=True))
            for cache, qkv in zip(caches, made, strict=True)
        ]
        parts = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(parts, part.contiguous())
        rows = torch.cat(parts, 1).float().split(1)
        found.append(torch.cat([row.log_softmax(-1) for row in rows]))
        tokens = found[-1].argmax(-1)
    return torch.stack(found)


def compare() -> dict[str, Any]:
    """All prompts at once, and then each by itself."""
    ranks, model = dist.get_world_size(), Model()
    step = torch.compile(model.step, backend="asynctp", options={"invariant": "batch", "strict": "all"})
    prompts = torch.randint(VOCABULARY, (PROMPTS,), generator=torch.Generator().manual_seed(3)).to(device())
    with torch.no_grad():
        whole = decode(model, step, prompts)
        differ, compared = 0, 0
        for number, prompt in enumerate(prompts):
            alone = decode(model, step, prompt.repeat(ranks))
            for row in range(ranks):
                differ += int((raw(alone[:, row]) != raw(whole[:, number])).sum())
                compared += alone[:, row].numel()
    reports = asynctp_passes.reports()
    fused, missed = (sum(len(getattr(one, what)) for one in reports) for what in ("fused", "missed"))
    held = all(remark.invariant == "batch" for one in reports for remark in one.fused)
    ok = differ == 0 and missed == 0 and fused > 0 and held and bool(whole.isfinite().all())
    return {"prompts": PROMPTS, "compared": compared, "differ": differ, "fused": fused, "missed": missed, "ok": ok}


def main() -> int:
    start(240)
    failed = run_cases([("decode", compare)], 240)
    end()
    return failed


if __name__ == "__main__":
    sys.exit(main())
