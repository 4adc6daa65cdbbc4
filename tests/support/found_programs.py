"""Small programs after public issues and model code, on real ranks: what becomes of each collective, and the values.

Each is run eager and compiled on two ranks. `FOUND` has what the report must say; `docs/reference/tried.md` has a row
for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from passes import outcomes
from profiles import of_profile
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
)

import asynctp_passes

__all__ = ["FOUND", "Found", "markdown", "run_found"]

RANKS = 2
BF16, INT8, INT64, BOOL = torch.bfloat16, torch.int8, torch.int64, torch.bool


@dataclass(frozen=True)
class Found:
    """A program of this rank's tensors.

    Attributes:
        call: The function, or what makes it if `makes`.
        expected: What becomes of each collective, in the order of the graphs: "F" for fused, or a code.
        after: Whose code or issue it was written after; "own" for a variant of ours.
        tensors: Sizes of each tensor; a dtype may come last, and a name is a dynamic size.
        rows: The values of dynamic sizes, one call each.
        says: What a warning or note mentions; "" if there is to be none.
        trains: Whether a backward is run.
        config: Options of the backend, Inductor's own too.
        makes: Whether `call` returns the function that is compiled.
        late: Whether asynctp is enabled after the first call of the compiled function.
    """

    call: Callable[..., Any]
    expected: list[str]
    after: str
    tensors: dict[str, list[Any]]
    rows: tuple[int, ...] = (12,)
    says: str = ""
    trains: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    makes: bool = False
    late: bool = False


FOUND: dict[str, Found] = {}


def found(
    expected: str,
    after: str,
    *,
    rows: tuple[int, ...] = (12,),
    says: str = "",
    trains: bool = False,
    config: dict[str, Any] | None = None,
    makes: bool = False,
    late: bool = False,
    **tensors: list[Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function in the table."""

    def enter(call: Callable[..., Any]) -> Callable[..., Any]:
        FOUND[call.__name__] = Found(
            call, expected.split(), after, tensors, rows, says, trains, config or {}, makes, late
        )
        return call

    return enter


#: Each takes long and is of a kind that another program shows: for the thorough profile.
OF_KINDS_SHOWN = {
    "foreach_residuals_after_two_sums": "foreach_activation_of_two_gathers",
    "three_streams_in_a_batch": "two_streams_that_meet_at_a_border_of_shards",
    "step_of_two_streams": "step_of_two_split_streams",
    "product_joined_with_zeros_for_all_lengths": "product_padded_for_all_lengths",
    "step_of_a_padded_product": "step_of_a_product_padded_by_what_is_left",
    "lookup_in_a_gathered_table": "head_of_selected_tokens",
    "head_of_the_last_token_of_each_sequence": "head_of_selected_tokens",
    "tokens_of_local_experts": "head_of_selected_tokens",
    "head_of_tokens_that_have_a_label": "tokens_that_a_router_takes",
    "product_put_back_in_order_before_the_scatter": "patches_put_in_the_order_of_windows",
    "features_added_to_tokens_of_an_image": "experts_of_a_capacity",
    "image_enlarged_before_its_projection": "mixed_by_a_fourier_transform",
    "tokens_mixed_with_those_before": "hidden_state_joined_with_the_next_embedding",
    "all_but_the_first_and_the_last_token": "head_of_all_but_the_last_token",
    "local_op_named_as_a_gather": "op_named_as_a_matmul",
    "op_that_finishes_a_linear_before_its_sum": "op_named_as_attention",
    "frozen_linears_in_bf16": "frozen_linears_with_bias",
    "mean_of_the_means_of_chunks": "head_and_loss_in_uneven_chunks",
    "chunked_losses_of_two_predictions": "head_and_loss_in_uneven_chunks",
    "step_of_a_padded_product_of_any_length": "step_of_a_product_padded_by_what_is_left",
    "step_of_a_batch_of_any_length": "step_of_a_block_padded_by_a_row_at_least",
}


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return all_gather_tensor(x, dim, dist.group.WORLD)


def scatter(x: Tensor, dim: int = 0) -> Tensor:
    return reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD)


def total(x: Tensor) -> Tensor:
    return all_reduce(x, "sum", dist.group.WORLD)


# --- frozen and packed weights ---------------------------------------------------------------------------------------
class Mlp(nn.Module):
    """A block whose weights are this rank's."""

    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias, dtype=dtype), nn.Linear(32, 16, bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return scatter(self.down(F.gelu(self.up(gather(x)))))


FROZEN = {"freezing": True}


@found("F F", "PyTorch", makes=True, config=FROZEN, x=[8, 16])
def frozen_linears_with_bias() -> nn.Module:
    return Mlp(bias=True).eval()


@found("F F", "PyTorch", makes=True, config=FROZEN, x=[8, 16, BF16])
def frozen_linears_in_bf16() -> nn.Module:
    return Mlp(dtype=BF16).eval()


class Projections(nn.Module):
    """Three linears of one gather, which freezing may join."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        whole = gather(x)
        return self.q(whole) + self.k(whole) * self.v(whole)


@found("F", "PyTorch", makes=True, config=FROZEN, x=[8, 16])
def frozen_projections_of_one_gather() -> nn.Module:
    return Projections().eval()


@found("ATP115", "gpt-fast", x=[8, 32, BF16], w=[16, 32, INT8], scales=[16, BF16])
def int8_weight_in_the_op_of_packed_weights(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return torch._weight_int8pack_mm(gather(x), w, scales)


# --- ops of several tensors ------------------------------------------------------------------------------------------
@found("F F", "own", x=[4, 16], y=[4, 16], v=[16, 8], w=[16, 8])
def foreach_activation_of_two_gathers(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    first, second = torch._foreach_sigmoid([gather(x), gather(y)])
    return [first @ v, second @ w]


@found("F F", "own", x=[8, 16], y=[8, 16], v=[16, 8], w=[16, 8], residual=[4, 8])
def foreach_residuals_after_two_sums(x: Tensor, y: Tensor, v: Tensor, w: Tensor, residual: Tensor) -> list[Tensor]:
    return list(torch._foreach_add([scatter(x @ v), scatter(y @ w)], [residual, residual * 2]))


@found("F F", "own", x=[8, 16], y=[8, 16], v=[16, 8], w=[16, 8])
def foreach_scaled_products_before_two_sums(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    return [total(one) for one in torch._foreach_mul([x @ v, y @ w], 0.5)]


@found("F F", "FSDP", x=[4, 16], y=[4, 16], w=[16, 8])
def foreach_copies_of_gathers_into_buffers(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    buffers = [x.new_empty(8, 16), x.new_empty(8, 16)]
    torch._foreach_copy_(buffers, [gather(x), gather(y)])
    return [one @ w for one in buffers]


@found("ATP002", "torchtitan", x=[8, 16], v=[16, 8], w=[16, 8])
def foreach_norms_of_gradients(x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    """Clipping by the norm of all ranks, beside a step's matmuls."""
    grads = [x.t() @ (x @ v), x.t() @ (x @ w)]
    norm = total(torch.stack(torch._foreach_norm(grads)).square().sum()).sqrt()
    return [one / norm.clamp_min(1) for one in grads]


# --- matmuls of different rows of one gather -------------------------------------------------------------------------
@found("F ATP408", "Flux", x=[8, 16], text=[16, 24], image=[16, 24], text_out=[8, 16], image_out=[8, 16])
def joint_attention_of_two_streams(
    x: Tensor, text: Tensor, image: Tensor, text_out: Tensor, image_out: Tensor
) -> Tensor:
    whole = gather(x)
    qkv = torch.cat([whole[:5] @ text, whole[5:] @ image])
    q, k, v = qkv.view(16, 3, 2, 4).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(16, 8)
    return scatter(torch.cat([out[:5] @ text_out, out[5:] @ image_out]))


@found("F", "own", x=[8, 16], text=[16, 8], image=[16, 8])
def two_streams_that_meet_at_a_border_of_shards(x: Tensor, text: Tensor, image: Tensor) -> list[Tensor]:
    whole = gather(x)
    return [whole[:8] @ text, whole[8:] @ image]


@found("F", "own", x=[2, 8, 16], text=[16, 8], image=[16, 8], sound=[16, 12])
def three_streams_in_a_batch(x: Tensor, text: Tensor, image: Tensor, sound: Tensor) -> list[Tensor]:
    whole = gather(x, 1)
    return [part @ w for part, w in zip(whole.split([3, 11, 2], 1), (text, image, sound), strict=True)]


@found("F ATP408", "own", trains=True, x=[8, 16], text=[24, 16], image=[24, 16], keys=[8, 16], bias=[24])
def step_of_two_streams(x: Tensor, text: Tensor, image: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """One of them has two weights, whose gradients autograd adds."""
    whole = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    q, k = F.linear(whole[:5], text, bias), F.linear(whole[5:], image, bias)
    return q.sin().sum() + k.square().mean() + F.linear(whole[:5], keys).cos().sum()


@found("F ATP408", "own", trains=True, x=[8, 16, BF16], text=[24, 16, BF16], image=[24, 16, BF16])
def step_of_two_split_streams(x: Tensor, text: Tensor, image: Tensor) -> Tensor:
    first, then = all_gather_tensor_autograd(x, 0, dist.group.WORLD).split([5, 11])
    return F.linear(first, text).float().sin().sum() + F.linear(then, image).float().square().mean()


@found("F F F F", "own", trains=True, x=[8, 16], text=[24, 16], image=[24, 16])
def step_of_two_streams_that_are_gathered_apart(x: Tensor, text: Tensor, image: Tensor) -> Tensor:
    """As the reason of the programs before says it."""
    first, then = (all_gather_tensor_autograd(part, 0, dist.group.WORLD) for part in x.split([3, 5]))
    return F.linear(first, text).sin().sum() + F.linear(then, image).square().mean()


@found("F", "own", rows=(7, 12, 13), x=["tokens", 16], text=[16, 8], image=[16, 12])
def streams_of_any_length(x: Tensor, text: Tensor, image: Tensor) -> list[Tensor]:
    """Padded to a multiple of the ranks."""
    tokens = x.shape[0]
    whole = gather(F.pad(x, (0, 0, 0, padding(x))).chunk(RANKS)[dist.get_rank()].contiguous())[:tokens]
    return [whole[:5] @ text, whole[5:] @ image]


@found("F", "own", x=[8, 16], w=[2, 16, 8])
def stacked_weights_of_streams_with_a_write_between(x: Tensor, w: Tensor) -> list[Tensor]:
    whole, w = gather(x), w.clone()
    first = whole[:5] @ w[0]
    w[1].add_(first.sum())
    return [first, whole[5:] @ w[1]]


@found("F F F F", "torchtitan", trains=True, x=[8, 16], head=[24, 16], words=[16, INT64])
def head_and_loss_in_gathered_chunks(x: Tensor, head: Tensor, words: Tensor) -> Tensor:
    """As the reason of the next program says it."""
    parts = zip(x.chunk(2), words.view(RANKS, 8).chunk(2, 1), strict=True)
    losses = [
        F.cross_entropy(all_gather_tensor_autograd(rows, 0, dist.group.WORLD) @ head.t(), word.flatten())
        for rows, word in parts
    ]
    return torch.stack(losses).mean()


@found("ATP406 ATP406", "torchtitan", trains=True, x=[8, 16], head=[24, 16], words=[16, INT64])
def head_and_loss_in_uneven_chunks(x: Tensor, head: Tensor, words: Tensor) -> Tensor:
    whole = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    parts = zip(whole.split(3), words.split(3), strict=True)
    return torch.stack([F.cross_entropy(rows @ head.t(), word, reduction="sum") for rows, word in parts]).sum() / 16


@found("ATP406 ATP406", "own", trains=True, x=[8, 16], head=[24, 16], words=[16, INT64])
def mean_of_the_means_of_chunks(x: Tensor, head: Tensor, words: Tensor) -> Tensor:
    whole = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    parts = zip(whole.chunk(4), words.chunk(4), strict=True)
    return torch.stack([F.cross_entropy(rows @ head.t(), word) for rows, word in parts]).mean()


@found("ATP406 ATP406 ATP406 ATP406", "torchtitan", trains=True, x=[8, 16], y=[8, 16], head=[24, 16], words=[16, INT64])
def chunked_losses_of_two_predictions(x: Tensor, y: Tensor, head: Tensor, words: Tensor) -> Tensor:
    """Multi-token prediction: chunks of two gathers in turn, by one head."""
    first, second = (all_gather_tensor_autograd(one, 0, dist.group.WORLD) for one in (x, y))
    loss = x.new_zeros(())
    for rows, later, word in zip(first.chunk(2), second.chunk(2), words.chunk(2), strict=True):
        loss = loss + F.cross_entropy(rows @ head.t(), word) + 0.3 * F.cross_entropy(later @ head.t(), word)
    return loss


@found("F F", "TRL", trains=True, x=[2, 8, 16], head=[24, 16], words=[32, INT64])
def head_of_all_but_the_last_token(x: Tensor, head: Tensor, words: Tensor) -> Tensor:
    whole = all_gather_tensor_autograd(x, 1, dist.group.WORLD)
    shifted = whole[:, :-1].reshape(-1, 16)
    return F.cross_entropy(shifted @ head.t(), words.view(2, 16)[:, 1:].reshape(-1))


@found("F", "own", x=[8, 16], v=[16, 8], w=[16, 8])
def one_matmul_of_a_part_and_one_of_all(x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    whole = gather(x)
    return [whole[:5] @ v, whole @ w]


@found("ATP103", "own", x=[8, 16], v=[16, 8], w=[16, 8])
def chunks_that_overlap(x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    whole = gather(x)
    return [whole[:9] @ v, whole[7:] @ w]


@found("ATP406", "own", x=[12, 16], w=[16, 8])
def products_of_uneven_chunks_joined_before_the_scatter(x: Tensor, w: Tensor) -> Tensor:
    return scatter(torch.cat([rows @ w for rows in x.split(5)]))


# --- any number of tokens --------------------------------------------------------------------------------------------
def padding(x: Tensor) -> int:
    return -x.shape[0] % RANKS


@found("F", "vllm-ascend", x=[7, 16], w=[16, 8])
def product_padded_where_sequence_parallel(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return scatter(F.pad(y, (0, 0, 0, padding(y))))


@found("F F", "vllm-ascend", rows=(7, 12, 13, 1), x=["tokens", 16], w=[16, 8])
def product_padded_for_all_lengths(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return scatter(F.pad(y, (0, 0, 0, -y.shape[0] % RANKS)))


@found("F F", "own", rows=(7, 12, 13), x=["tokens", 16], w=[16, 8])
def product_joined_with_zeros_for_all_lengths(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return scatter(torch.cat([y, y.new_zeros(-y.shape[0] % RANKS, 8)]))


@found("F", "vLLM", rows=(7, 12, 13), x=["tokens", 16], w=[16, 8])
def product_copied_into_zeros_for_all_lengths(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    whole = y.new_zeros(y.shape[0] + -y.shape[0] % RANKS, 8)
    whole[: y.shape[0]] = y
    return scatter(whole)


@found("ATP103", "vLLM", x=[4, 16], w=[16, 8])
def shard_copied_into_empty_rows_then_gathered(x: Tensor, w: Tensor) -> Tensor:
    whole = x.new_empty(5, 16)
    whole[:4] = x
    gathered = gather(whole)
    return torch.cat([gathered[:4], gathered[5:9]]) @ w


@found("F F", "torchtitan", rows=(7, 12, 13), x=["tokens", 16], up=[16, 8], down=[8, 16])
def block_of_any_length_cut_after_the_gather(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    tokens = x.shape[0]
    mine = F.pad(x, (0, 0, 0, -tokens % RANKS)).chunk(RANKS)[0]
    y = torch.relu(gather(mine)[:tokens] @ up) @ down
    return scatter(F.pad(y, (0, 0, 0, -tokens % RANKS)))


@found("F", "own", x=[1, 16], w=[16, 8])
def one_token_for_two_ranks(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return scatter(F.pad(y, (0, 0, 0, padding(y))))


@found("F F", "own", trains=True, x=[7, 16], w=[16, 8])
def step_of_a_padded_product(x: Tensor, w: Tensor) -> Tensor:
    y = F.pad(x @ w, (0, 0, 0, padding(x)))
    return reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD).square().sum()


@found("F F", "own", trains=True, rows=(7, 12, 13), x=["tokens", 16], w=[16, 8])
def step_of_a_padded_product_of_any_length(x: Tensor, w: Tensor) -> Tensor:
    y = F.pad(x @ w, (0, 0, 0, -x.shape[0] % RANKS))
    return reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD).square().sum()


@found("F F", "own", trains=True, rows=(7, 12, 13), x=["tokens", 16], w=[16, 8])
def step_of_a_product_padded_by_what_is_left(x: Tensor, w: Tensor) -> Tensor:
    """Of two ranks the remainder itself is what is missing."""
    y = F.pad(x @ w, (0, 0, 0, x.shape[0] % RANKS))
    return reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD).square().sum()


@found("F F F F", "own", trains=True, rows=(7, 12), x=["tokens", 16], up=[16, 8], down=[8, 16])
def step_of_a_block_padded_by_a_row_at_least(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    tokens = x.shape[0]
    more = 2 * RANKS - tokens % (2 * RANKS)
    mine = F.pad(x, (0, 0, 0, more)).chunk(RANKS)[0]
    whole = all_gather_tensor_autograd(mine, 0, dist.group.WORLD)[:tokens]
    y = F.pad(torch.relu(whole @ up) @ down, (0, 0, 0, more))
    return reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD).square().sum()


@found("F F F F F F F F", "own", trains=True, rows=(7, 12), x=[2, "tokens", 16], up=[16, 8], down=[8, 16])
def step_of_a_batch_of_any_length(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """torch compiles anew for a number of tokens that needs no padding, and pads by a symbol that is 0."""
    tokens = x.shape[1]
    more = -tokens % RANKS
    mine = F.pad(x, (0, 0, 0, more)).chunk(RANKS, 1)[0]
    whole = all_gather_tensor_autograd(mine, 1, dist.group.WORLD)[:, :tokens]
    y = F.pad(torch.relu(whole @ up) @ down, (0, 0, 0, more))
    return reduce_scatter_tensor_autograd(y, "sum", 1, dist.group.WORLD).square().sum()


@found("F", "own", x=[8, 16], w=[16, 8])
def padded_by_no_row(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return scatter(F.pad(y, (0, 0, 0, padding(y))))


@found("ATP114", "own", x=[7, 16], w=[16, 8])
def padded_with_ones(x: Tensor, w: Tensor) -> Tensor:
    return scatter(F.pad(x @ w, (0, 0, 0, 1), value=1.0))


@found("ATP104", "own", x=[7, 16], w=[16, 8])
def padded_in_front(x: Tensor, w: Tensor) -> Tensor:
    return scatter(F.pad(x @ w, (0, 0, 1, 0)))


@found("ATP114", "own", x=[7, 16], w=[16, 8], residual=[8, 8])
def padded_before_a_residual(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return scatter(F.pad(x @ w, (0, 0, 0, 1)) + residual)


@found("ATP201", "own", x=[7, 16], w=[16, 8])
def maximum_of_a_product_padded_with_the_least(x: Tensor, w: Tensor) -> Tensor:
    padded = F.pad(x @ w, (0, 0, 0, 1), value=float("-inf"))
    return reduce_scatter_tensor(padded, "max", 0, dist.group.WORLD)


@found("F", "own", x=[7, 16], w=[16, 8])
def mean_over_ranks_of_a_padded_product(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter_tensor(F.pad(x @ w, (0, 0, 0, 1)), "avg", 0, dist.group.WORLD)


@found("F", "own", x=[6, 16], w=[16, 8], bias=[8])
def operand_padded_before_the_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """The padding rows of the result have the bias."""
    return scatter(torch.addmm(bias, F.pad(x, (0, 0, 0, 2)), w))


@found("ATP101", "vLLM", x=[6, 1, 16], order=[12, INT64], w=[16, 8])
def patches_put_in_the_order_of_windows(x: Tensor, order: Tensor, w: Tensor) -> Tensor:
    return gather(x)[order] @ w


# --- lookups ---------------------------------------------------------------------------------------------------------
@found("ATP103", "vLLM", x=[8, 16], last=[3, INT64], head=[16, 24])
def head_of_selected_tokens(x: Tensor, last: Tensor, head: Tensor) -> Tensor:
    return gather(x).view(-1, 16).index_select(0, last) @ head


@found("ATP103", "Megatron", x=[8, 16], place=[12, INT64], w=[16, 8])
def tokens_of_local_experts(x: Tensor, place: Tensor, w: Tensor) -> Tensor:
    return torch.gather(gather(x), 0, place.view(-1, 1).expand(-1, 16)) @ w


@found("ATP103", "vLLM", x=[8, 16], ends=[4, INT64], head=[16, 24])
def head_of_the_last_token_of_each_sequence(x: Tensor, ends: Tensor, head: Tensor) -> Tensor:
    return gather(x)[ends.cumsum(0) % 16 - 1] @ head


@found("ATP103", "own", ids=[6, INT64], table=[8, 16], w=[16, 8])
def lookup_in_a_gathered_table(ids: Tensor, table: Tensor, w: Tensor) -> Tensor:
    return F.embedding(ids, gather(table)) @ w


@found("ATP101", "own", x=[16, 16], inverse=[16, INT64], w=[16, 8])
def product_put_back_in_order_before_the_scatter(x: Tensor, inverse: Tensor, w: Tensor) -> Tensor:
    return scatter((x @ w)[inverse])


@found("ATP002 ATP103", "own", x=[8, 16], scores=[8], w=[16, 8])
def tokens_that_a_router_takes(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
    """Mixture of depths."""
    chosen = gather(scores).topk(4).indices
    return gather(x).take_along_dim(chosen[:, None], 0) @ w


@found("ATP103", "TRL", x=[8, 16], labels=[16, INT64], head=[16, 24])
def head_of_tokens_that_have_a_label(x: Tensor, labels: Tensor, head: Tensor) -> Tensor:
    return (gather(x)[labels > 3] @ head).logsumexp(-1).sum()


# --- ops that mix rows, or return others -----------------------------------------------------------------------------
@found("ATP121", "vLLM", x=[8, 16], order=[16, INT64], w=[16, 8])
def columns_in_the_order_of_their_activation(x: Tensor, order: Tensor, w: Tensor) -> Tensor:
    """As GPTQ quantizes them."""
    return gather(x)[:, order] @ w


@found("F", "vLLM", x=[8, 16], order=[16, INT64], w=[16, 8])
def columns_ordered_before_the_gather(x: Tensor, order: Tensor, w: Tensor) -> Tensor:
    return gather(x[:, order]) @ w


@found("ATP121 ATP115", "Megatron", x=[8, 16], slots=[16, INT64], up=[4, 16, 8], down=[4, 8, 16])
def experts_of_a_capacity(x: Tensor, slots: Tensor, up: Tensor, down: Tensor) -> Tensor:
    whole, slots = gather(x), slots % 4 + 8 * (slots // 4)
    tokens = whole.new_zeros(32, 16).index_add(0, slots, whole)
    made = torch.bmm(torch.bmm(tokens.view(4, 8, 16), up).relu(), down)
    return scatter(made.view(32, 16)[slots])


@found("ATP121", "transformers", x=[8, 16], w=[16, 8])
def image_enlarged_before_its_projection(x: Tensor, w: Tensor) -> Tensor:
    image = gather(x).view(1, 4, 4, 16).permute(0, 3, 1, 2)
    larger = F.interpolate(image, scale_factor=2, mode="bilinear")
    return larger.permute(0, 2, 3, 1).reshape(-1, 16) @ w


@found("ATP121", "transformers", x=[8, 16], places=[3, INT64], features=[3, 16], w=[16, 8])
def features_added_to_tokens_of_an_image(x: Tensor, places: Tensor, features: Tensor, w: Tensor) -> Tensor:
    """As Qwen3-VL does."""
    return gather(x).index_add(0, places, features) @ w


@found("ATP121", "FNet", x=[8, 16], w=[16, 8])
def mixed_by_a_fourier_transform(x: Tensor, w: Tensor) -> Tensor:
    return torch.fft.fft(gather(x)).real @ w


@found("ATP104", "RWKV", x=[8, 16], w=[16, 8])
def tokens_mixed_with_those_before(x: Tensor, w: Tensor) -> Tensor:
    whole = gather(x)
    return (whole + F.pad(whole, (0, 0, 1, -1))) @ w


@found("ATP103", "own", x=[8, 16], w=[16, 8])
def all_but_the_first_and_the_last_token(x: Tensor, w: Tensor) -> Tensor:
    return gather(x)[1:-1] @ w


# --- layers of models ------------------------------------------------------------------------------------------------
@found("F", "transformers", x=[8, 16], w=[64, 8])
def patches_merged_by_four(x: Tensor, w: Tensor) -> Tensor:
    """As Qwen2-VL does."""
    return gather(x).view(-1, 64) @ w


@found("ATP104", "EAGLE", x=[8, 16], ids=[16, INT64], table=[8, 16], w=[32, 8])
def hidden_state_joined_with_the_next_embedding(x: Tensor, ids: Tensor, table: Tensor, w: Tensor) -> Tensor:
    return torch.cat([F.embedding(ids, table), gather(x)], -1) @ w


@found("F", "PEFT", x=[8, 16], w=[16, 8], down=[16, 4], up=[4, 8])
def adapter_beside_a_column_parallel_linear(x: Tensor, w: Tensor, down: Tensor, up: Tensor) -> Tensor:
    whole = gather(x)
    return whole @ w + whole @ down @ up * 0.3


@found("F F", "Mamba", x=[8, 16], up=[16, 8], kernel=[8, 1, 3], down=[8, 16])
def convolution_between_two_linears(x: Tensor, up: Tensor, kernel: Tensor, down: Tensor) -> Tensor:
    made = F.conv1d((gather(x) @ up).t()[None], kernel, groups=8, padding=1)
    return scatter(F.silu(made)[0].t() @ down)


class Positions(nn.Module):
    """Learned positions, sharded as FSDP does, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        positions = all_gather_tensor_autograd(self.table, 0, dist.group.WORLD)
        return self.linear(F.layer_norm(x + positions, [16])).square().sum()  # type: ignore[no-any-return]


@found("ATP003 ATP009", "FSDP", trains=True, makes=True, config={"strict": "zero"}, x=[16, 16])
def positions_gathered_alone() -> nn.Module:
    return Positions()


class HiddenStates(nn.Module):
    """Hidden states in a buffer, as for CUDA graphs: no parameter, though its address stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.randn(8, 16))

    def forward(self, w: Tensor) -> Tensor:
        return F.rms_norm(gather(self.hidden), [16]) @ w  # type: ignore[arg-type]


@found("ATP105", "vLLM", makes=True, w=[16, 8])
def hidden_states_in_a_buffer() -> nn.Module:
    return HiddenStates()


@found("ATP203", "Muon", config={"strict": "zero"}, x=[8, 16])
def step_of_newton_and_schulz(x: Tensor) -> Tensor:
    whole = gather(x)
    return 1.5 * whole - 0.5 * (whole @ whole.t()) @ whole


# --- ops of other libraries ------------------------------------------------------------------------------------------
_ops = torch.library.Library("found_like", "FRAGMENT")
ops = torch.ops.found_like


def _op(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    _ops.define(schema)
    _ops.impl(name, real, "CPU")
    torch.library.register_fake(f"found_like::{name}", fake, lib=_ops)


_op(
    "gather_logits(Tensor x, Tensor i) -> Tensor",
    lambda x, i: x[i].contiguous(),
    lambda x, i: x.new_empty(i.shape[0], x.shape[1]),
)
_op("per_token(Tensor x) -> Tensor", lambda x: x / x.abs().amax(-1, True), torch.empty_like)
_op("finish_linear(Tensor x, Tensor b) -> Tensor", lambda x, b: (x + b).tanh(), lambda x, b: torch.empty_like(x))
_op(
    "silu_and_mul(Tensor x) -> Tensor",
    lambda x: F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
    lambda x: x.new_empty(x.shape[0], x.shape[1] // 2),
)
_op("all_gather_ids(Tensor x) -> Tensor", lambda x: x.flip(0), torch.empty_like)
_op("matmul_free_mix(Tensor x, Tensor w) -> Tensor", lambda x, w: x * w.mean(0), lambda x, w: torch.empty_like(x))
_op("attention_free(Tensor x) -> Tensor", lambda x: x.cumsum(0), torch.empty_like)


def _linear_all_reduce(x: Tensor, w: Tensor) -> Tensor:
    out = F.linear(x, w)
    dist.all_reduce(out)
    return out


_op("linear_sum(Tensor x, Tensor w) -> Tensor", _linear_all_reduce, lambda x, w: x.new_empty(x.shape[0], w.shape[0]))


@found("ATP121", "TensorRT-LLM", says="nothing tells whether", x=[8, 16], i=[3, INT64], head=[16, 24])
def op_that_picks_tokens_before_the_head(x: Tensor, i: Tensor, head: Tensor) -> Tensor:
    return ops.gather_logits(gather(x), i) @ head


@found("F", "vLLM", x=[8, 16], w=[16, 8])
def registered_quantizer_of_rows(x: Tensor, w: Tensor) -> Tensor:
    return ops.per_token(gather(x)) @ w


@found("ATP105", "own", says="nothing tells whether", x=[8, 16], w=[16, 8], bias=[8])
def op_that_finishes_a_linear_before_its_sum(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return total(ops.finish_linear(x @ w, bias))


@found("F F", "vLLM", says="nothing tells whether", x=[8, 16], up=[16, 16], down=[8, 16])
def activation_of_a_library_between_two_linears(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return scatter(ops.silu_and_mul(gather(x) @ up) @ down)


@found("F", "dlinfer", says="nothing tells whether", x=[8, 16], w=[8, 16], v=[16, 8])
def linear_and_sum_in_one_op(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
    return [ops.linear_sum(x, w), gather(x) @ v]


@found("ATP002", "own", x=[8, 16], w=[16, 8])
def local_op_named_as_a_gather(x: Tensor, w: Tensor) -> Tensor:
    return ops.all_gather_ids(gather(x)) @ w


@found("ATP002", "own", says="nothing tells whether", x=[8, 16], w=[16, 16])
def op_named_as_a_matmul(x: Tensor, w: Tensor) -> Tensor:
    return ops.matmul_free_mix(gather(x), w)


@found("ATP105", "own", says="nothing tells whether", x=[8, 16], w=[16, 8])
def op_named_as_attention(x: Tensor, w: Tensor) -> Tensor:
    return ops.attention_free(gather(x)) @ w


# --- frames ----------------------------------------------------------------------------------------------------------
@torch.compiler.disable
def eager_gather(x: Tensor) -> Tensor:
    return gather(x)


@found("", "fairchem", says="torch.compiler.disable", config={"expect": 1}, x=[8, 16], w=[16, 8])
def gather_that_torch_must_not_compile(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(eager_gather(x * 2) @ w)


@torch.compiler.disable
def longest(x: Tensor) -> int:
    most = torch.tensor(x.shape[0])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


@found("F ATP013", "vllm-omni", x=[8, 16], w=[16, 8])
def lengths_exchanged_between_two_chains(x: Tensor, w: Tensor) -> Tensor:
    y = gather(x) @ w
    return scatter(y @ w.t() * longest(x))


@found("", "PyTorch", says="async_op", x=[8, 16], w=[16, 8])
def gather_that_is_waited_for_later(x: Tensor, w: Tensor) -> Tensor:
    whole = x.new_empty(16, 16)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    y = x @ w
    work.wait()
    return torch.cat([y, whole @ w])


@found("F", "own", x=[8, 16], w=[16, 8])
def number_read_between_gather_and_matmul(x: Tensor, w: Tensor) -> Tensor:
    whole = gather(x)
    return whole @ w * (2 if whole.sum().item() > 0 else 3)


@found("ATP013 ATP013", "own", says="fails to compile", x=[8, 16], w=[16, 16])
def printed_in_a_loop_over_layers(x: Tensor, w: Tensor) -> Tensor:
    for layer in range(2):
        x = torch.relu(scatter(gather(x) @ w))
        print(end="" * layer)
    return x


# --- settings --------------------------------------------------------------------------------------------------------
@found(
    "F F",
    "PyTorch",
    says="promise of the kernels for GPUs",
    config={"batch_invariant": True},
    x=[8, 16],
    up=[16, 8],
    down=[8, 16],
)
def batch_invariant_block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return scatter(torch.relu(gather(x) @ up) @ down)


@found("F F F F", "vLLM", makes=True, x=[8, 16])
def two_blocks_of_one_class() -> Callable[[Tensor], Tensor]:
    """A draft and a target, compiled apart."""
    draft, target = Mlp().eval(), Mlp(bias=True).eval()
    return lambda x: target(draft(x))


@found("", "own", says="torch.compiler.reset", late=True, x=[8, 16], w=[16, 8])
def enabled_after_the_first_call(x: Tensor, w: Tensor) -> Tensor:
    return gather(x) @ w


# --- how ranks run them ----------------------------------------------------------------------------------------------
class _Heard(logging.Handler):
    """The warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _tensor(sizes: list[Any], rows: int, trains: bool, rank: int, place: int) -> Tensor:
    """Random numbers of the rank; whole numbers are below 8, and the same on all ranks."""
    *sizes, dtype = sizes if sizes and isinstance(sizes[-1], torch.dtype) else (*sizes, torch.float32)
    shape = [rows if isinstance(size, str) else size for size in sizes]
    if dtype in (INT64, INT8):
        torch.manual_seed(place)
        return torch.randint(8, shape).to(dtype)
    torch.manual_seed(100 * rank + place)
    out = torch.randn(shape).to(dtype)
    for dim, size in enumerate(sizes):
        if isinstance(size, str):
            torch._dynamo.mark_dynamic(out, dim)
    return out.requires_grad_(trains)


def _results(program: Found, function: Callable[..., Any], rank: int) -> list[Tensor]:
    """What all calls return, and the gradients of each."""
    results: list[Tensor] = []
    for rows in program.rows:
        tensors = [
            _tensor(sizes, rows, program.trains, rank, place) for place, sizes in enumerate(program.tensors.values())
        ]
        with torch.set_grad_enabled(program.trains):
            out = function(*tensors)
        out = [out] if isinstance(out, Tensor) else list(out)
        if program.trains:
            out[0].backward()
            out += [one.grad for one in tensors if one.grad is not None]
        results += [one.detach().clone() for one in out]
    return results


def _run(program: Found, rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    function = program.call() if program.makes else program.call
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    asynctp_passes.clear_reports()
    eager = _results(program, function, rank)
    dist.barrier()
    heard = _Heard()
    logging.getLogger("asynctp_passes").addHandler(heard)
    options = {"strict": "off", "fallback_by_default": True, **program.config}
    if program.late:
        plain = torch.compile(function, options={"fallback_by_default": True})
        _results(program, plain, rank)
        with asynctp_passes.enable(asynctp_passes.Config(strict="off")):
            compiled = _results(program, plain, rank)
    else:
        compiled = _results(program, torch.compile(function, backend="asynctp", options=options), rank)
    reports = asynctp_passes.reports()
    logging.getLogger("asynctp_passes").removeHandler(heard)
    told = [f"{remark.code} {remark.message} {remark.hint}" for report in reports for remark in report.remarks]
    notes = [str(note) for report in reports for note in report.notes]
    remarks = {f"asynctp: {remark}" for report in reports for remark in report.remarks}
    said = [text for text in heard.said if text not in remarks] + notes
    became = [outcome for report in reports for outcome in outcomes(report)]
    return {"eager": eager, "compiled": compiled, "outcomes": became, "told": told, "said": said}


def run_found(rank: int, world_size: int, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """The results of each program, eager and compiled, the outcomes of its collectives, and what was said."""
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    asynctp_passes.register_rowwise(ops.per_token)
    asynctp_passes.register_local("found_like::all_gather_ids")
    out: dict[str, dict[str, Any]] = {}
    for name in names or of_profile(list(FOUND), FOUND.keys() - OF_KINDS_SHOWN.keys()):
        try:
            out[name] = _run(FOUND[name], rank)
        except Exception as error:  # the others are judged still
            out[name] = {"error": f"{type(error).__name__}: {error}"}
        dist.barrier()
    return out


def markdown() -> str:
    """The table of these programs, for the page."""
    lines = ["| Program | After | Collectives |", "|---|---|---|"]
    for name, program in FOUND.items():
        fused = program.expected.count("F")
        codes = dict.fromkeys(f"`{code}`" for code in program.expected if code != "F")
        became = ", ".join([*([str(fused)] if fused else []), *codes]) or "in no graph"
        told = " +" if program.says else ""
        lines.append(f"| `{name}` | {program.after if program.after != 'own' else ''} | {became}{told} |")
    return "\n".join(lines)
