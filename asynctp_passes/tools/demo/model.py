"""A Llama-style transformer over bytes, from laptop size to Llama's widths, and its tensor- and sequence-parallel plan.

    tokens → embedding → [ norm → attention → + → norm → feed-forward → + ] × layers → norm → head → logits

Activations between the blocks are sharded over the sequence, so each block has four collectives (a gather in front of
the attention and of the feed-forward, a reduce-scatter behind each) and the head one gather; in the backward a gather
becomes a reduce-scatter and the other way round. The embedding table is replicated and looks up the local tokens
only. So every tensor-parallel collective stands next to a matmul.

To train, tokens are `[batch, sequence]` and activations `[batch, sequence, width]`, sharded over dimension 1. To serve
(`positions` is given), activations are `[tokens, width]`, sharded over dimension 0, and keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model.

    `heads`, `kv_heads` (None: as many as heads), `hidden` and `vocabulary` must be multiples of the number of ranks.
    """

    vocabulary: int = 256
    width: int = 128
    hidden: int = 384
    heads: int = 8
    layers: int = 2
    sequence: int = 128
    kv_heads: int | None = None

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of all keys, and of all values: less than `width` under grouped queries."""
        return self.head_width * (self.kv_heads or self.heads)

    def require_divisible(self, ranks: int) -> None:
        """Check that tensor parallelism over `ranks` splits the model evenly.

        Raises:
            ValueError: It does not; the message names the size, the limit and the remedy.
        """
        for name in ("heads", "kv_heads", "hidden", "vocabulary", "sequence"):
            value = getattr(self, name)
            if value is not None and value % ranks:
                raise ValueError(
                    f"{name}={value} is not valid for {ranks} tensor-parallel ranks; it must be a multiple of {ranks}. "
                    "Take fewer ranks, or another size"
                )


#: `8b` and `70b` have the widths of Llama 3 and as many blocks as are asked for.
PRESETS = {
    "debug": ModelSizes(kv_heads=4),
    "small": ModelSizes(width=1024, hidden=2816, heads=16, kv_heads=8, layers=4, sequence=512),
    "8b": ModelSizes(width=4096, hidden=14336, heads=32, kv_heads=8, sequence=8192),
    "70b": ModelSizes(width=8192, hidden=28672, heads=64, kv_heads=8, sequence=8192),
}


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


class KeyValueCache(nn.Module):
    """Keys and values of the tokens so far, each `[batch, length, local heads, head_width]`, written in place."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: int, length: int, heads: int, head_width: int, like: Tensor) -> None:
        super().__init__()
        for name in ("keys", "values"):
            memory = torch.zeros(batch, length, heads, head_width, dtype=like.dtype, device=like.device)
            self.register_buffer(name, memory, persistent=False)

    def store(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write `[batch, sequence, local heads, head_width]` to `positions[batch, sequence]`."""
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self.keys[rows, positions] = keys
        self.values[rows, positions] = values

    def attend(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Attention of one query a sequence, `[batch, local query heads, 1, head_width]`, at `positions[batch, 1]`."""
        keys, values = self.keys.transpose(1, 2), self.values.transpose(1, 2)
        visible = torch.arange(keys.shape[2], device=positions.device) <= positions[:, :, None, None]
        grouped = queries.reshape(keys.shape[0], keys.shape[1], -1, keys.shape[3])  # the queries of one key head
        out = nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible)
        return out.reshape(queries.shape)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; under tensor parallelism each rank has some of the heads."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.head_width = sizes.head_width
        self.grouped = sizes.kv_width != sizes.width
        self.wq = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wk = nn.Linear(sizes.width, sizes.kv_width, bias=False)
        self.wv = nn.Linear(sizes.width, sizes.kv_width, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)
        self.cache: KeyValueCache | None = None
        cosines, sines = rotation_table(sizes)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """`x[batch, sequence, width]`, or `x[tokens, width]` with `positions[batch, sequence]`, to the same shape."""
        lead = x.shape[:-1] if positions is None else positions.shape
        queries, keys, values = (
            projection(x).view(*lead, -1, self.head_width) for projection in (self.wq, self.wk, self.wv)
        )
        if positions is None:
            cosines, sines = self.cosines, self.sines
        else:
            cosines, sines = self.cosines[positions][:, None], self.sines[positions][:, None]
        queries = rotate(queries.transpose(1, 2), cosines, sines)
        keys = rotate(keys.transpose(1, 2), cosines, sines)
        if positions is not None and self.cache is not None:
            self.cache.store(positions, keys.transpose(1, 2), values)
        if positions is not None and self.cache is not None and positions.shape[1] == 1:
            out = self.cache.attend(queries, positions)
        else:
            out = nn.functional.scaled_dot_product_attention(
                queries, keys, values.transpose(1, 2), is_causal=True, enable_gqa=self.grouped
            )
        result: Tensor = self.wo(out.transpose(1, 2).reshape(*x.shape[:-1], -1))
        return result


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1(x)) * w3(x))`."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.w3 = nn.Linear(sizes.width, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x[…, width]` to the same shape."""
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

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """`x[batch, local sequence, width]`, or `x[local tokens, width]` with `positions`, to the same shape."""
        x = x + self.attention(self.attention_norm(x), positions=positions)
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

    def serve(self, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Logits of the next byte of each sequence, `[batch, vocabulary]`; keys and values are kept.

        Args:
            tokens: `[batch, sequence]`: prompts, which begin at position 0, or with `sequence` 1 one byte more of each.
                `batch` times `sequence` must be a multiple of the ranks.
            positions: `[batch, sequence]`, the tokens' places.
            last: `[batch]`, the index in `tokens` of each sequence's last byte; what follows it is padding.
        """
        x = self.embedding(tokens.flatten())
        for block in self.blocks:
            x = block(x, positions)
        logits = self.head(self.norm(x))
        local = logits.to_local() if isinstance(logits, DTensor) else logits
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        picked = local.view(*tokens.shape, -1)[rows, last]
        if isinstance(logits, DTensor):
            split = DTensor.from_local(picked, logits.device_mesh, [Shard(1)])
            picked = split.redistribute(placements=[Replicate()]).to_local()
        return picked

    def allocate(self, batch: int, length: int, ranks: int = 1) -> None:
        """Make room for the keys and values of `batch` sequences of `length` tokens, on each of the ranks."""
        for block in self.blocks:
            assert isinstance(block, Block)
            attention = block.attention
            heads = attention.wk.weight.shape[0] // attention.head_width // ranks
            like = attention.wk.weight
            attention.cache = KeyValueCache(batch, length, heads, attention.head_width, like)


@dataclass(frozen=True)
class Styles:
    """How linear layers are split; float8 brings styles of its own, which send float8."""

    column: Callable[..., ParallelStyle] = ColwiseParallel
    row: Callable[..., ParallelStyle] = RowwiseParallel
    gathered: Callable[..., ParallelStyle] = PrepareModuleInput


def block_plan(dim: int | None = 1, styles: Styles | None = None) -> dict[str, ParallelStyle]:
    """torchtitan's plan for one block: activations sharded over dimension `dim` between the linear layers.

    With None they are replicated, without sequence parallelism: two all-reduces in the forward, and two in the
    backward.
    """
    styles = styles or Styles()
    between = Replicate() if dim is None else Shard(dim)

    def gathered() -> ParallelStyle:
        return styles.gathered(input_layouts=(between,), desired_input_layouts=(Replicate(),))

    plan: dict[str, ParallelStyle] = {
        "attention": gathered(),
        "attention.wq": styles.column(),
        "attention.wk": styles.column(),
        "attention.wv": styles.column(),
        "attention.wo": styles.row(output_layouts=between),
        "feed_forward": gathered(),
        "feed_forward.w1": styles.column(),
        "feed_forward.w2": styles.row(output_layouts=between),
        "feed_forward.w3": styles.column(),
    }
    if dim is not None:
        plan |= {name: SequenceParallel(sequence_dim=dim) for name in ("attention_norm", "ffn_norm")}
    return plan


def parallelize(model: Transformer, mesh: DeviceMesh, dim: int = 1, styles: Styles | None = None) -> Transformer:
    """Make every parameter a DTensor on `mesh` (one dimension), and shard activations.

    Args:
        model: The model; changed in place.
        mesh: The tensor-parallel ranks.
        dim: What activations are sharded over: 1, the sequence, to train; 0, the tokens, to serve.
        styles: How the blocks' linear layers are split.
    """
    tokens = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(dim),), use_local_output=False
    )
    parallelize_module(model, mesh, {"embedding": tokens})
    plan: dict[str, ParallelStyle] = {
        "embedding": SequenceParallel(sequence_dim=dim, use_local_output=True),
        "norm": SequenceParallel(sequence_dim=dim),
        "head": ColwiseParallel(input_layouts=Shard(dim), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan(dim, styles))
    return model


def collectives_per_direction(sizes: ModelSizes) -> int:
    """How many tensor-parallel collectives stand next to a matmul, in the forward and again in the backward."""
    return 4 * sizes.layers + 1
