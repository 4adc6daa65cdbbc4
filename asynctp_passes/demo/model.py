"""A small Llama-style transformer over bytes, and its tensor- and sequence-parallel plan.

    tokens → embedding → [ norm → attention → + → norm → feed-forward → + ] × layers → norm → head → logits

Activations between the blocks are sharded over the sequence, so each block has four collectives (a gather in front of
the attention and of the feed-forward, a reduce-scatter behind each) and the head one gather; in the backward a gather
becomes a reduce-scatter and the other way round. The embedding table is replicated and looks up the local tokens
only. So every tensor-parallel collective stands next to a matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["ModelSizes", "Transformer", "collectives_per_direction", "parallelize"]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model; `heads`, `hidden` and `vocabulary` must be multiples of the number of ranks."""

    vocabulary: int = 256
    width: int = 128
    hidden: int = 384
    heads: int = 8
    layers: int = 2
    sequence: int = 128

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


def rotation_table(sizes: ModelSizes) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding, each `[sequence, head_width / 2]`."""
    pairs = torch.arange(0, sizes.head_width, 2).float()
    frequencies = 10000.0 ** (-pairs / sizes.head_width)
    angles = torch.outer(torch.arange(sizes.sequence).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the two halves of each head of `x[batch, heads, sequence, head_width]` by the position's angles."""
    first, second = x.chunk(2, dim=-1)
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; under tensor parallelism each rank has some of the heads."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.head_width = sizes.head_width
        self.wq = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wk = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wv = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)
        cosines, sines = rotation_table(sizes)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x[batch, sequence, width]` to the same shape."""
        batch, sequence, _ = x.shape
        queries, keys, values = (
            projection(x).view(batch, sequence, -1, self.head_width).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        queries, keys = rotate(queries, self.cosines, self.sines), rotate(keys, self.cosines, self.sines)
        out = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: Tensor = self.wo(out.transpose(1, 2).reshape(batch, sequence, -1))
        return result


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1(x)) * w3(x))`."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.w3 = nn.Linear(sizes.width, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x[batch, sequence, width]` to the same shape."""
        result: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    """One transformer block with RMS norms before attention and feed-forward."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """`x[batch, local sequence, width]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class Transformer(nn.Module):
    """Bytes in, a score for each possible next byte out."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens[batch, sequence]` to logits `[batch, sequence, vocabulary]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _gathered() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def _block_plan() -> dict[str, ParallelStyle]:
    """torchtitan's plan for one block: activations sharded over the sequence between the linear layers."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": _gathered(),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": _gathered(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Make every parameter a DTensor on `mesh` (one dimension), and shard activations over the sequence."""
    tokens = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False)
    parallelize_module(model, mesh, {"embedding": tokens})
    plan: dict[str, ParallelStyle] = {
        "embedding": SequenceParallel(use_local_output=True),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_module(block, mesh, _block_plan())
    return model


def collectives_per_direction(sizes: ModelSizes) -> int:
    """How many tensor-parallel collectives stand next to a matmul, in the forward and again in the backward."""
    return 4 * sizes.layers + 1
