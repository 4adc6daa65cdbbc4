"""Small programs of the kinds that models and their frameworks have, and what becomes of each one's collectives.

They are written for rank 0 of four, in plain tensors: a rank has its part of the weights, and tokens are sharded where
a block is sequence parallel. `tests/integration/test_model_programs.py` compiles each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
)

__all__ = ["OF_KINDS_SHOWN", "PROGRAMS", "RANKS", "ModelProgram"]

#: programs for the thorough profile only, and one that shows the same kind, here or in `found_programs`
OF_KINDS_SHOWN = {
    "latent_attention_that_splits_the_rotary_part": "latent_attention_that_gathers_low_ranks",
    "sequence_first": "einsum_per_head_of_a_batch",
    "interleaved_gate_and_up_with_limits": "fused_gate_and_up",
    "attention_and_mlp_in_parallel": "fused_qkv_with_grouped_queries",
    "norms_before_and_after_a_residual": "norm_between_a_scatter_and_a_gather",
    "residual_in_fp32": "sum_in_fp32_of_products_in_bf16",
    "dropout_of_shards": "norm_between_a_scatter_and_a_gather",
    "sum_of_a_scaled_product": "dropout_before_the_sum",
    "fp8_with_a_scale_for_each_token": "registered_quantizer_of_rows",
    "logits_of_targets_of_a_sharded_vocabulary": "cross_entropy_of_a_sharded_vocabulary",
    "head_of_the_last_tokens": "head_of_selected_tokens",
    "head_in_chunks": "head_and_loss_in_uneven_chunks",
    "hidden_and_embedded_tokens_side_by_side": "hidden_state_joined_with_the_next_embedding",
    "tower_of_patches_sharded_by_the_sequence": "fused_gate_and_up",
    "chunks_of_a_prefill": "attention_of_a_prefill",
    "parameters_gathered_over_another_dimension": "layer_whose_weights_are_gathered_in_between",
    "step_of_a_gated_mlp": "step_of_an_mlp_with_lora",
    "step_of_attention": "step_of_an_mlp_with_lora",
}

RANKS = 4
BF16, FP8, INT8, INT64 = torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64


@dataclass(frozen=True)
class ModelProgram:
    """A program of tensors and a group.

    Attributes:
        call: The function; its last argument is the group; one named `other` comes after that, if it takes one.
        expected: What becomes of each collective, in the order of the graph: "F" for fused, or a code.
        tensors: Sizes of each tensor; a dtype may come last, and a name is a dynamic size.
        fact: What the last remark that is no fused chain mentions.
        trains: Whether a backward is run.
    """

    call: Callable[..., Any]
    expected: list[str]
    tensors: dict[str, list[Any]]
    fact: str = ""
    trains: bool = False


PROGRAMS: list[ModelProgram] = []


def program(expected: str, fact: str = "", **tensors: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function in the table."""

    def enter(call: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(ModelProgram(call, expected.split(), tensors, fact))
        return call

    return enter


def gather(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    return all_gather_tensor(x, dim, group)


def scatter(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    return reduce_scatter_tensor(x, "sum", dim, group)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of `[tokens, heads, width]`; heads side by side."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[0], dtype=x.dtype)[:, None, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


def per_token_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float() / 448
    return (x / scale).clamp(-448, 448).to(FP8), scale


# --- attention -------------------------------------------------------------------------------------------------------
@program("F F", x=[4, 16], qkv=[16, 16], out=[16, 8])
def fused_qkv_with_grouped_queries(x: Tensor, qkv: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    q, k, v = F.linear(gather(x, group), qkv).split([8, 4, 4], dim=-1)
    k, v = (each.view(16, 1, 4).repeat_interleave(2, dim=1) for each in (k, v))
    return scatter(F.linear(attend(q.view(16, 2, 4), k, v), out), group)


@program("F F", x=[4, 16], q=[8, 16], k=[8, 16], v=[8, 16], out=[16, 8], norm=[4])
def three_projections_with_rotary_and_norms_of_heads(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, group: ProcessGroup
) -> Tensor:
    whole = gather(x, group)
    queries, keys, values = (F.linear(whole, each).view(16, 2, 4) for each in (q, k, v))
    queries, keys = (rotated(F.rms_norm(each, [4], norm)) for each in (queries, keys))
    return scatter(F.linear(attend(queries, keys, values), out), group)


@program("F F F", x=[4, 16], q_down=[6, 16], q_up=[8, 6], kv_down=[6, 16], kv_up=[16, 6], out=[16, 8])
def latent_attention_that_gathers_low_ranks(
    x: Tensor, q_down: Tensor, q_up: Tensor, kv_down: Tensor, kv_up: Tensor, out: Tensor, group: ProcessGroup
) -> Tensor:
    """MLA: every rank projects its tokens down, and its heads up from all tokens."""
    low = F.rms_norm(F.linear(x, q_down), [6])
    queries = F.linear(gather(low, group), q_up).view(16, 2, 4)
    keys, values = F.linear(gather(F.linear(x, kv_down), group), kv_up).view(16, 2, 8).chunk(2, dim=-1)
    return scatter(F.linear(attend(queries, keys, values), out), group)


@program("F F", x=[4, 16], down=[10, 16], up=[16, 6], q=[8, 16], out=[16, 8])
def latent_attention_that_splits_the_rotary_part(
    x: Tensor, down: Tensor, up: Tensor, q: Tensor, out: Tensor, group: ProcessGroup
) -> Tensor:
    whole = gather(x, group)
    low, common = F.linear(whole, down).split([6, 4], dim=-1)
    keys, values = F.linear(F.rms_norm(low, [6]), up).view(16, 2, 8).chunk(2, dim=-1)
    keys = keys + rotated(common[:, None]).expand(-1, 2, -1)
    return scatter(F.linear(attend(F.linear(whole, q).view(16, 2, 4), keys, values), out), group)


@program("F F F", text=[4, 16], image=[8, 12], q=[8, 16], kv=[16, 12], out=[16, 8])
def cross_attention_of_two_streams(
    text: Tensor, image: Tensor, q: Tensor, kv: Tensor, out: Tensor, group: ProcessGroup
) -> Tensor:
    queries = F.linear(gather(text, group), q).view(16, 2, 4)
    keys, values = F.linear(gather(image, group), kv).view(32, 2, 8).chunk(2, dim=-1)
    return scatter(F.linear(attend(queries, keys, values), out), group)


@program("F F", x=[2, 4, 16], w=[16, 2, 4], out=[2, 4, 16])
def einsum_per_head_of_a_batch(x: Tensor, w: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    heads = torch.einsum("bsd,dhk->bshk", gather(x, group, 1), w)
    return scatter(torch.einsum("bshk,hkd->bsd", heads.relu(), out), group, 1)


@program("F", heads=[2, 16, 4], out=[16, 8])
def heads_first_before_the_output_projection(heads: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    """As scaled_dot_product_attention returns them."""
    return scatter(F.linear(heads.transpose(0, 1).reshape(16, 8), out), group)


@program("F F", x=[4, 2, 16], up=[8, 16], down=[16, 8])
def sequence_first(x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    """Megatron's `[sequence, batch, width]`."""
    return scatter(F.linear(F.gelu(F.linear(gather(x, group), up)), down), group)


@program("F", x=[16, 8], out=[16, 8], bias=[16])
def bias_after_the_sum(x: Tensor, out: Tensor, bias: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce(F.linear(x, out), "sum", group) + bias


@program("F", x=[16, 8], out=[16, 8], bias=[16])
def bias_of_rank_0_in_the_linear(x: Tensor, out: Tensor, bias: Tensor, group: ProcessGroup) -> Tensor:
    """As vLLM adds it."""
    return all_reduce(F.linear(x, out, bias), "sum", group)


# --- MLPs ------------------------------------------------------------------------------------------------------------
@program("F F", x=[4, 16], up=[16, 16], down=[16, 8])
def fused_gate_and_up(x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    gate, up = F.linear(gather(x, group), up).chunk(2, dim=-1)
    return scatter(F.linear(F.silu(gate) * up, down), group)


@program("F F", x=[4, 16], up=[16, 16], down=[16, 8])
def interleaved_gate_and_up_with_limits(x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    """gpt-oss."""
    both = F.linear(gather(x, group), up)
    gate, up = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
    return scatter(F.linear((up + 1) * gate * torch.sigmoid(1.7 * gate), down), group)


@program("F F", x=[4, 16], qkv=[24, 16], out=[16, 8], up=[8, 16], down=[16, 8])
def attention_and_mlp_in_parallel(
    x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor, group: ProcessGroup
) -> Tensor:
    whole = gather(F.layer_norm(x, [16]), group)
    mixed = attend(*F.linear(whole, qkv).view(16, 3, 2, 4).unbind(1))
    return x + scatter(F.linear(mixed, out) + F.linear(F.gelu(F.linear(whole, up)), down), group)


@program("F", x=[16, 8], w=[16, 8], a=[3, 8], b=[16, 3])
def lora_beside_a_row_parallel_linear(x: Tensor, w: Tensor, a: Tensor, b: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce(F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0, "sum", group)


@program("F F", x=[16, 8], w=[16, 8], a=[3, 8], b=[16, 3])
def lora_whose_low_rank_is_reduced_on_its_own(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, group: ProcessGroup
) -> Tensor:
    low = all_reduce(F.linear(x, a), "sum", group)
    return all_reduce(F.linear(x, w), "sum", group) + F.linear(low, b)


@program("F", x=[4, 16], w=[8, 16], a=[3, 16], b=[8, 3])
def lora_beside_a_column_parallel_linear(x: Tensor, w: Tensor, a: Tensor, b: Tensor, group: ProcessGroup) -> Tensor:
    whole = gather(x, group)
    return F.linear(whole, w) + F.linear(F.linear(whole, a), b) * 1.5


# --- mixtures of experts ---------------------------------------------------------------------------------------------
@program("F F", x=[4, 16], up=[8, 16], down=[16, 8], shared_up=[8, 16], shared_down=[16, 8], gate=[1, 16])
def gated_shared_expert_in_one_sum(
    x: Tensor, up: Tensor, down: Tensor, shared_up: Tensor, shared_down: Tensor, gate: Tensor, group: ProcessGroup
) -> Tensor:
    whole = gather(x, group)
    shared = F.linear(F.silu(F.linear(whole, shared_up)) * F.linear(whole, gate).sigmoid(), shared_down)
    return scatter(F.linear(F.silu(F.linear(whole, up)), down) + shared, group)


@program("F", x=[4, 16], gate=[8, 16], bias=[8])
def router_with_a_bias_for_the_choice(x: Tensor, gate: Tensor, bias: Tensor, group: ProcessGroup) -> Tensor:
    """DeepSeek-V3's."""
    scores = F.linear(gather(x, group), gate).sigmoid()
    chosen = (scores + bias).topk(2, dim=-1).indices
    weights = scores.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True)


@program("F ATP121", "mm -> index_put", x=[4, 16], tokens=[8, INT64], up=[8, 16], down=[16, 8])
def experts_that_add_to_their_tokens(
    x: Tensor, tokens: Tensor, up: Tensor, down: Tensor, group: ProcessGroup
) -> Tensor:
    whole = gather(x, group)
    made = F.linear(F.silu(F.linear(whole, up))[tokens], down)
    return scatter(torch.zeros_like(whole).index_add(0, tokens, made), group)


# --- norms, residuals, dtypes ----------------------------------------------------------------------------------------
@program("F F", x=[16, 8], out=[16, 8], norm=[16], up=[8, 16])
def norm_between_a_scatter_and_a_gather(
    x: Tensor, out: Tensor, norm: Tensor, up: Tensor, group: ProcessGroup
) -> Tensor:
    return F.linear(gather(F.rms_norm(scatter(F.linear(x, out), group), [16], norm), group), up)


@program("F", x=[16, 8], out=[16, 8], norm=[16], after=[16], residual=[16, 16])
def norms_before_and_after_a_residual(
    x: Tensor, out: Tensor, norm: Tensor, after: Tensor, residual: Tensor, group: ProcessGroup
) -> Tensor:
    """Gemma's."""
    summed = F.rms_norm(all_reduce(F.linear(x, out), "sum", group), [16], norm)
    return F.rms_norm(residual + summed, [16], after)


@program("F", x=[16, 8, BF16], out=[16, 8, BF16], residual=[4, 16])
def residual_in_fp32(x: Tensor, out: Tensor, residual: Tensor, group: ProcessGroup) -> Tensor:
    return residual + scatter(F.linear(x, out), group).float()


@program("F", x=[16, 8, BF16], out=[16, 8, BF16])
def sum_in_fp32_of_products_in_bf16(x: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    return scatter(F.linear(x, out).float(), group).bfloat16()


@program("ATP105", "convert_element_type", x=[16, 8], out=[16, 8])
def sum_in_bf16_of_products_in_fp32(x: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce(F.linear(x, out).bfloat16(), "sum", group)


@program("F F", x=[4, 16], up=[8, 16], down=[16, 8])
def dropout_of_shards(x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    hidden = F.gelu(F.linear(gather(F.dropout(x, 0.1), group), up))
    return F.dropout(scatter(F.linear(F.dropout(hidden, 0.1), down), group), 0.1)


@program("ATP105", "mul", x=[16, 8], out=[16, 8])
def dropout_before_the_sum(x: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    return scatter(F.dropout(F.linear(x, out), 0.1), group)


@program("F", x=[16, 8], out=[16, 8], residual=[16, 16])
def share_of_the_residual_in_the_sum(x: Tensor, out: Tensor, residual: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce(F.linear(x, out) + residual / RANKS, "sum", group)


@program("F", x=[16, 8], out=[16, 8])
def mean_over_ranks(x: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce(F.linear(x, out), "avg", group)


# --- quantized -------------------------------------------------------------------------------------------------------
@program("F", x=[4, 32, BF16], w=[16, 32, FP8], w_scale=[1, 16])
def fp8_with_a_scale_for_each_token(x: Tensor, w: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    fp8, scale = per_token_fp8(gather(x, group))
    return torch._scaled_mm(fp8, w.t(), scale, w_scale, out_dtype=BF16)


@program("F F", x=[4, 32, BF16], w=[16, 32, FP8], w_scale=[1, 16])
def fp8_shards_and_their_scales_gathered(x: Tensor, w: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    fp8, scale = per_token_fp8(x)
    return torch._scaled_mm(gather(fp8, group), w.t(), gather(scale, group), w_scale, out_dtype=BF16)


@program("F", x=[16, 32, BF16], w=[16, 32, FP8], w_scale=[1, 16])
def fp8_before_the_sum(x: Tensor, w: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    fp8, scale = per_token_fp8(x)
    return all_reduce(torch._scaled_mm(fp8, w.t(), scale, w_scale, out_dtype=BF16), "sum", group)


@program("ATP002 F", x=[4, 32, BF16], w=[16, 32, FP8], w_scale=[])
def fp8_with_one_scale_of_all_ranks(x: Tensor, w: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    """torchao's tensorwise recipe."""
    scale = all_reduce(x.abs().amax(), "max", group).float() / 448
    fp8 = (x.float() / scale).clamp(-448, 448).to(FP8)
    return torch._scaled_mm(gather(fp8, group), w.t(), scale, w_scale, out_dtype=BF16)


@program("F", x=[8, 32, BF16], w=[16, 32, INT8], w_scale=[16])
def int8_of_weights_and_activations(x: Tensor, w: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    whole = gather(x, group)
    scale = whole.abs().amax(1, keepdim=True).float() / 127
    rounded = (whole.float() / scale).round().clamp(-127, 127).to(INT8)
    return (torch._int_mm(rounded, w.t()) * scale * w_scale).to(BF16)


@program("F", x=[16, 8, BF16], w=[16, 8, INT8], w_scale=[16, 1, BF16])
def int8_of_weights_alone(x: Tensor, w: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce(F.linear(x, w.to(BF16) * w_scale), "sum", group)


# --- embeddings and heads --------------------------------------------------------------------------------------------
@program("ATP002 F", tokens=[16, INT64], table=[32, 16])
def embeddings_tied_to_the_head(tokens: Tensor, table: Tensor, group: ProcessGroup) -> Tensor:
    mine = (tokens >= 0) & (tokens < 32)
    found = F.embedding(tokens.where(mine, 0), table) * mine[:, None]
    return F.linear(gather(scatter(found, group), group), table)


@program("F ATP012", x=[4, 16], head=[10, 16])
def soft_cap_of_gathered_logits(x: Tensor, head: Tensor, group: ProcessGroup) -> Tensor:
    logits = 30 * torch.tanh(F.linear(gather(x, group), head) / 30)
    return gather(logits, group, 1)


@program("F", x=[4, 16], head=[12, 16])
def head_of_a_padded_vocabulary(x: Tensor, head: Tensor, group: ProcessGroup) -> Tensor:
    return F.linear(gather(x, group), head)[:, :10].float().log_softmax(-1)


@program("F ATP002 ATP002 ATP002", x=[4, 16], head=[10, 16], targets=[16, INT64])
def cross_entropy_of_a_sharded_vocabulary(x: Tensor, head: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    logits = F.linear(gather(x, group), head)
    shifted = logits - all_reduce(logits.amax(1), "max", group)[:, None]
    total = all_reduce(shifted.exp().sum(1), "sum", group)
    mine = (targets >= 0) & (targets < 10)
    chosen = shifted.gather(1, targets.where(mine, 0)[:, None])[:, 0] * mine
    return (total.log() - all_reduce(chosen, "sum", group)).mean()


@program("F ATP002", x=[4, 16], head=[10, 16], targets=[16, INT64])
def logits_of_targets_of_a_sharded_vocabulary(x: Tensor, head: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    logits = F.linear(gather(x, group), head)
    return all_reduce(logits[torch.arange(16), targets], "sum", group)


@program("ATP103", "picks rows", x=[4, 16], last=[3, INT64], head=[10, 16])
def head_of_the_last_tokens(x: Tensor, last: Tensor, head: Tensor, group: ProcessGroup) -> Tensor:
    return F.linear(gather(x.relu(), group)[last], head)


@program("ATP406", x=[4, 16], head=[10, 16])
def head_in_chunks(x: Tensor, head: Tensor, group: ProcessGroup) -> Tensor:
    return torch.stack([F.linear(chunk, head).logsumexp(-1).sum() for chunk in gather(x.relu(), group).split(2)])


@program("ATP104 ATP104", "other tensors", hidden=[4, 16], embedded=[4, 16], project=[8, 32])
def hidden_and_embedded_tokens_side_by_side(
    hidden: Tensor, embedded: Tensor, project: Tensor, group: ProcessGroup
) -> Tensor:
    """Multi-token prediction."""
    both = torch.cat([gather(hidden, group), gather(embedded, group)], dim=-1)
    return F.linear(both, project)


@program("F", hidden=[4, 16], embedded=[4, 16], project=[8, 32])
def hidden_and_embedded_tokens_side_by_side_in_shards(
    hidden: Tensor, embedded: Tensor, project: Tensor, group: ProcessGroup
) -> Tensor:
    both = torch.cat([F.rms_norm(hidden, [16]), F.rms_norm(embedded, [16])], dim=-1)
    return F.linear(gather(both, group), project)


# --- stems, towers, states -------------------------------------------------------------------------------------------
@program("F", sound=[1, 4, 16], first=[16, 4, 3], w=[8, 16])
def convolution_before_a_gather(sound: Tensor, first: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    """Whisper's stem."""
    steps = F.gelu(F.conv1d(sound, first, padding=1)).permute(0, 2, 1)
    return F.linear(gather(steps, group, 1), w)


@program("F F", patches=[2, 4, 16], up=[8, 16], down=[16, 8])
def tower_of_patches_sharded_by_the_sequence(patches: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    whole = gather(patches, group, 1)
    return patches + scatter(F.linear(F.gelu(F.linear(whole, up)), down), group, 1)


@program("F", patches=[1, 2, 2, 16], w=[8, 16])
def grid_of_patches_gathered_by_rows(patches: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return F.linear(gather(patches, group, 1), w)


@program("F", patches=[2, 4, 16], w=[8, 64])
def patches_merged_two_by_two_in_shards(patches: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    merged = patches.view(1, 2, 2, 2, 16).permute(0, 2, 1, 3, 4).reshape(2, 64)
    return F.linear(gather(merged, group), w)


@program("ATP211", patches=[2, 4, 16], w=[8, 64])
def patches_merged_two_by_two(patches: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    """Qwen-VL's merger: four neighbours of a grid, two rows of which each rank has."""
    whole = gather(patches, group).view(4, 2, 2, 2, 16)
    return F.linear(whole.permute(0, 2, 1, 3, 4).reshape(8, 64), w)


@program("F F", x=[4, 16], inside=[24, 16], kernel=[8, 1, 3], out=[16, 8])
def state_space_with_a_convolution(
    x: Tensor, inside: Tensor, kernel: Tensor, out: Tensor, group: ProcessGroup
) -> Tensor:
    state, gate, step = F.linear(gather(x, group), inside).chunk(3, dim=-1)
    state = F.conv1d(state.t()[None], kernel, padding=2, groups=8)[0, :, :16].t()
    return scatter(F.linear((state * F.softplus(step)).cumsum(0) * F.silu(gate), out), group)


# --- tokens that the ranks do not divide, and dynamic ones -----------------------------------------------------------
@program("F F", x=[4, 16], up=[8, 16], down=[16, 8])
def odd_number_of_tokens(x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    hidden = F.relu(F.linear(gather(x, group)[:15], up))
    return scatter(F.pad(F.linear(hidden, down), (0, 0, 0, 1)), group)


@program("F F", x=["tokens", 16], up=[8, 16], down=[16, 8])
def chunks_of_a_prefill(x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    return scatter(F.linear(F.relu(F.linear(gather(x, group), up)), down), group)


@program("F F", x=["tokens", 16], qkv=[24, 16], out=[16, 8])
def attention_of_a_prefill(x: Tensor, qkv: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    heads = F.linear(gather(x, group), qkv).view(-1, 3, 2, 4)
    return scatter(F.linear(attend(*heads.unbind(1)), out), group)


@program("ATP208", "a number", x=[4, 16], w=[8, 16])
def embeddings_scaled_after_the_gather(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    """Gemma's factor, which may be another one on every rank as far as one graph shows."""
    return F.linear(gather(x.relu(), group) * 4.5, w)


@program("F F", x=[4, 16], up=[8, 16], down=[16, 8])
def weight_in_its_own_layout(x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    return scatter(torch.relu(torch.mm(gather(x, group), up.t())).matmul(down.t()), group)


@program("F ATP402", x=[4, 16], w=[8, 16])
def matmul_between_a_gather_and_a_sum(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    """2-D tensor parallelism."""
    return all_reduce(F.linear(gather(x, group), w), "sum", group)


@program("ATP012", x=[16, 16], w=[8, 16])
def column_parallel_that_gathers_its_output(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return gather(F.linear(x, w), group, 1)


@program("F ATP003 ATP003", x=[4, 16], shard=[2, 16], bias=[2])
def parameters_gathered_over_another_dimension(
    x: Tensor, shard: Tensor, bias: Tensor, group: ProcessGroup, other: ProcessGroup
) -> Tensor:
    """FSDP's gathers between those of tensor parallelism."""
    return F.linear(gather(x, group), gather(shard, other), gather(bias, other))


@program("F ATP003 ATP003 F", x=[4, 16], up_shard=[2, 16], down_shard=[4, 8])
def layer_whose_weights_are_gathered_in_between(
    x: Tensor, up_shard: Tensor, down_shard: Tensor, group: ProcessGroup, other: ProcessGroup
) -> Tensor:
    hidden = F.linear(gather(x, group), gather(up_shard, other))
    return scatter(F.linear(F.silu(hidden), gather(down_shard, other)), group)


@program("F F", x=[4, 16], up=[8, 16], down=[16, 8])
def gather_and_sum_over_two_dimensions_of_a_mesh(
    x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup, other: ProcessGroup
) -> Tensor:
    return all_reduce(F.linear(F.relu(F.linear(gather(x, group), up)), down), "sum", other)


@program("F F F F", x=[4, 16], y=[4, 16], up=[8, 16], down=[16, 8])
def two_microbatches(x: Tensor, y: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    first, second = (F.relu(F.linear(gather(each, group), up)) for each in (x, y))
    return scatter(F.linear(first, down), group), scatter(F.linear(second, down), group)


@program("F", x=[16, 8], out=[16, 8])
def sum_scattered_by_columns(x: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    return scatter(F.linear(x, out), group, 1)


@program("F", x=[16, 4], w=[8, 16])
def columns_gathered_before_a_linear(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return F.linear(gather(x, group, 1), w)


@program("ATP003 ATP003", x=[4, 16], qkv=[24, 16])
def keys_and_values_of_context_parallelism(x: Tensor, qkv: Tensor, group: ProcessGroup) -> Tensor:
    q, k, v = F.linear(x, qkv).view(4, 3, 2, 4).unbind(1)
    return attend(q, gather(k.contiguous(), group), gather(v.contiguous(), group))


@program("ATP105", x=[4, 16], norm=[16], w=[8, 16])
def norm_after_a_gather(x: Tensor, norm: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return F.linear(F.rms_norm(gather(x.relu(), group), [16], norm), w)


@program("ATP208", x=[4, 32, BF16], w=[16, 32, FP8], x_scale=[], w_scale=[])
def fp8_with_a_static_scale(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    fp8 = (gather(x.relu(), group).float() / x_scale).clamp(-448, 448).to(FP8)
    return torch._scaled_mm(fp8, w.t(), x_scale, w_scale, out_dtype=BF16)


@program("F", x=[4, 32, BF16], w=[16, 32, FP8], x_scale=[], w_scale=[])
def fp8_shards_with_a_static_scale(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, group: ProcessGroup
) -> Tensor:
    fp8 = (x.float() / x_scale).clamp(-448, 448).to(FP8)
    return torch._scaled_mm(gather(fp8, group), w.t(), x_scale, w_scale, out_dtype=BF16)


@program("ATP002 ATP002", x=[16, 16], head=[10, 16])
def best_tokens_of_each_shard(x: Tensor, head: Tensor, group: ProcessGroup) -> Tensor:
    """A sampler over a sharded vocabulary."""
    values, tokens = F.linear(x, head).topk(2)
    return gather(tokens, group, 1).gather(1, gather(values, group, 1).argmax(1, keepdim=True))


@program("F F", x=[4, 16], up=[8, 16], down=[16, 8], scale=[8])
def adapter_that_scales_the_hidden_layer(
    x: Tensor, up: Tensor, down: Tensor, scale: Tensor, group: ProcessGroup
) -> Tensor:
    return x + 0.1 * scatter(F.linear(F.relu(F.linear(gather(x, group), up)) * scale, down), group)


@program("ATP105", "mul", x=[16, 8], out=[16, 8])
def sum_of_a_scaled_product(x: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    """A multiplier of residuals, as Granite's, that comes before the sum."""
    return all_reduce(F.linear(x, out) * 0.22, "sum", group)


# --- training --------------------------------------------------------------------------------------------------------
def trained(expected: str, **tensors: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a training step: the collectives of its forward, then of its backward."""

    def enter(call: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(ModelProgram(call, expected.split(), tensors, trains=True))
        return call

    return enter


def gather_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor_autograd(x, 0, group)


def scatter_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_tensor_autograd(x, "sum", 0, group)


@trained("F F F F", x=[4, 16], up=[16, 16], down=[16, 8])
def step_of_a_gated_mlp(x: Tensor, up: Tensor, down: Tensor, group: ProcessGroup) -> Tensor:
    gate, up = F.linear(gather_grad(F.rms_norm(x, [16]), group), up).chunk(2, dim=-1)
    return x + scatter_grad(F.linear(F.silu(gate) * up, down), group)


@trained("F F F F", x=[4, 16], qkv=[24, 16], out=[16, 8])
def step_of_attention(x: Tensor, qkv: Tensor, out: Tensor, group: ProcessGroup) -> Tensor:
    q, k, v = F.linear(gather_grad(x, group), qkv).view(16, 3, 2, 4).unbind(1)
    return x + scatter_grad(F.linear(attend(rotated(q), rotated(k), v), out), group)


@trained("F F F F", x=[4, 16], up=[8, 16], down=[16, 8], a=[3, 16], b=[8, 3])
def step_of_an_mlp_with_lora(x: Tensor, up: Tensor, down: Tensor, a: Tensor, b: Tensor, group: ProcessGroup) -> Tensor:
    whole = gather_grad(x, group)
    hidden = F.gelu(F.linear(whole, up) + F.linear(F.linear(whole, a), b) * 2.0)
    return scatter_grad(F.linear(F.dropout(hidden, 0.1), down), group)
