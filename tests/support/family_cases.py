"""What two ranks of test_recipes do: blocks of model families, tensor- and sequence-parallel, in plain tensors.

Collectives are those of torch.distributed that write into a buffer, called by autograd functions, as torchtitan calls
them: dynamo makes them functional. Every module has this rank's part of its weights, and works on `[tokens, width]`,
whose tokens are sharded between the modules.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import QUICK, assert_close, compiled, shard_of, start, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import asynctp_passes
from asynctp_passes import Report

TOKENS, WIDTH, HEADS, HEAD, HIDDEN, LOW_RANK, ROTATED, EXPERTS = 16, 16, 2, 8, 24, 6, 4, 2


class GatherTokens(torch.autograd.Function):
    """The tokens of all ranks; their gradients are summed over the ranks and sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class ScatterTokens(torch.autograd.Function):
    """The sum over the ranks, sharded over the tokens; its gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5)


class Parallel(nn.Module):
    """A module of one rank's weights, which differ from rank to rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()
        torch.manual_seed(mesh.get_rank())

    def gather(self, x: Tensor) -> Tensor:
        gathered: Tensor = GatherTokens.apply(x, self.group)
        return gathered

    def scatter(self, x: Tensor) -> Tensor:
        scattered: Tensor = ScatterTokens.apply(x, self.group)
        return scattered


# --- attention --------------------------------------------------------------------------------------------
def attend(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Causal attention of `[tokens, heads, width of a head]`, to a sink for each head too; heads side by side."""
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    if sinks is not None:
        out = out * torch.sigmoid(scores.logsumexp(-1).t() - sinks)[..., None]
    return out.flatten(1)


class GatedAttention(Parallel):
    """One projection for queries, keys and values, a norm of each head, and a gate; a norm behind it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.qkv, self.gate = weight(3 * HEADS * HEAD, WIDTH), weight(HEADS * HEAD, WIDTH)
        self.out = weight(WIDTH, HEADS * HEAD)
        self.head_norm, self.norm = weight(HEAD), weight(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.gather(x)
        heads = functional.linear(tokens, self.qkv).unflatten(1, (HEADS, 3, HEAD))
        queries, keys, values = heads.unbind(2)
        queries, keys = (functional.rms_norm(each, (HEAD,), self.head_norm) for each in (queries, keys))
        mixed = attend(queries, keys, values) * functional.linear(tokens, self.gate).sigmoid()
        return x + functional.rms_norm(self.scatter(functional.linear(mixed, self.out)), (WIDTH,), self.norm)


class LatentAttention(Parallel):
    """Queries, keys and values by way of low ranks, whose first halves every rank computes; keys have a common part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.query_down, self.query_up = weight(LOW_RANK, WIDTH), weight(HEADS * (HEAD + ROTATED), LOW_RANK)
        self.key_down, self.key_up = weight(LOW_RANK + ROTATED, WIDTH), weight(HEADS * 2 * HEAD, LOW_RANK)
        self.query_norm, self.key_norm, self.out = weight(LOW_RANK), weight(LOW_RANK), weight(WIDTH, HEADS * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.gather(x)
        low = functional.rms_norm(functional.linear(tokens, self.query_down), (LOW_RANK,), self.query_norm)
        queries = functional.linear(low, self.query_up).unflatten(1, (HEADS, HEAD + ROTATED))
        low, common = functional.linear(tokens, self.key_down).split([LOW_RANK, ROTATED], dim=-1)
        both = functional.linear(functional.rms_norm(low, (LOW_RANK,), self.key_norm), self.key_up)
        keys, values = both.unflatten(1, (HEADS, 2 * HEAD)).chunk(2, dim=-1)
        keys = torch.cat([keys, common.sin()[:, None].expand(-1, HEADS, -1)], dim=-1)
        return x + self.scatter(functional.linear(attend(queries, keys, values), self.out))


class AttentionWithSinks(Parallel):
    """Biases in every projection, of which each rank adds its share to the last one's sum."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.qkv, self.qkv_bias = weight(3 * HEADS * HEAD, WIDTH), weight(3 * HEADS * HEAD)
        self.out, self.out_bias, self.sinks = weight(WIDTH, HEADS * HEAD), weight(WIDTH), weight(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        heads = functional.linear(self.gather(x), self.qkv, self.qkv_bias).unflatten(1, (HEADS, 3, HEAD))
        mixed = attend(*heads.unbind(2), self.sinks)
        return x + self.scatter(functional.linear(mixed, self.out, self.out_bias / self.group.size()))


# --- mixtures of experts ----------------------------------------------------------------------------------
class Experts(Parallel):
    """A gate, experts for as many tokens each, and an expert that all tokens share."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.gate = weight(EXPERTS, WIDTH)
        self.up, self.down = weight(EXPERTS, HIDDEN, WIDTH), weight(EXPERTS, WIDTH, HIDDEN)
        self.shared_up, self.shared_gate = weight(HIDDEN, WIDTH), weight(HIDDEN, WIDTH)
        self.shared_down = weight(WIDTH, HIDDEN)

    def routed(self, tokens: Tensor) -> Tensor:
        """What the experts make of the tokens, in the tokens' order."""
        scores = functional.linear(tokens, self.gate).softmax(-1)
        order = scores[:, 0].argsort()
        parts = self.exchange(tokens[order]).chunk(EXPERTS)
        made = [
            functional.silu(part @ up.t()) @ down.t() for part, up, down in zip(parts, self.up, self.down, strict=True)
        ]
        weighted = self.exchange(torch.cat(made)) * scores.amax(-1)[order, None]
        return torch.zeros_like(tokens).index_add(0, order, weighted)

    def exchange(self, tokens: Tensor) -> Tensor:
        """Sorted tokens where their experts are, and back: here."""
        return tokens

    def shared(self, tokens: Tensor) -> Tensor:
        gate, up = functional.linear(tokens, self.shared_gate), functional.linear(tokens, self.shared_up)
        return functional.linear(functional.silu(gate) * up, self.shared_down)


class ExpertsReducedApart(Experts):
    """Each rank has a part of every expert; the sum of the routed tokens and of the shared expert's are two."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.gather(x)
        return x + self.scatter(self.routed(tokens)) + self.scatter(self.shared(tokens))


class ExpertsReducedTogether(Experts):
    """The same with one sum."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.gather(x)
        return x + self.scatter(self.routed(tokens) + self.shared(tokens))


class ExpertsOfRanks(Experts):
    """Each rank has whole experts, to which the others send tokens; the shared expert is tensor parallel."""

    def exchange(self, tokens: Tensor) -> Tensor:
        sent: Tensor = funcol.all_to_all_single_autograd(tokens, None, None, self.group)
        return sent

    def forward(self, x: Tensor) -> Tensor:
        return x + self.routed(x) + self.scatter(self.shared(self.gather(x)))


# --- cases ------------------------------------------------------------------------------------------------
Found = dict[str, tuple[int, list[str], list[str]]]


def _step(module: nn.Module, mesh: DeviceMesh) -> tuple[tuple[Report, ...], Found]:
    """Train compiled and eager: values agree. Of each phase, the number of fused chains, and codes of others."""
    start()
    x, parameters = shard_of(mesh, TOKENS // mesh.size(), WIDTH), list(module.parameters())
    actual = train(compiled(module, options=QUICK, fullgraph=True), x, parameters)
    reports = asynctp_passes.reports()
    assert_close(actual, train(module, x, parameters))
    found = {
        report.phase: (len(report.fused), [r.code for r in report.missed], [r.code for r in report.others])
        for report in reports
    }
    return reports, found


def case_gated_attention_with_norms_of_heads(mesh: DeviceMesh) -> tuple[Report, ...]:
    reports, found = _step(GatedAttention(mesh), mesh)
    assert found == {"forward": (2, [], []), "backward": (2, [], [])}, found
    return reports


def case_latent_attention(mesh: DeviceMesh) -> tuple[Report, ...]:
    reports, found = _step(LatentAttention(mesh), mesh)
    assert found == {"forward": (2, [], []), "backward": (2, [], [])}, found
    return reports


def case_attention_with_sinks_and_biases(mesh: DeviceMesh) -> tuple[Report, ...]:
    reports, found = _step(AttentionWithSinks(mesh), mesh)
    assert found == {"forward": (2, [], []), "backward": (2, [], [])}, found
    return reports


def case_experts_reduced_apart(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Routed tokens are added to the shared expert's and reduced with these; so are their rows of the gradient."""
    reports, found = _step(ExpertsReducedApart(mesh), mesh)
    assert found == {"forward": (3, [], []), "backward": (2, [], [])}, found
    assert any("one reduce_scatter of the sum" in remark.message for remark in reports[0].fused), reports[0]
    return reports


def case_experts_reduced_together(mesh: DeviceMesh) -> tuple[Report, ...]:
    """Each sum has the routed tokens besides products, which the remark names."""
    reports, found = _step(ExpertsReducedTogether(mesh), mesh)
    assert found == {"forward": (2, [], []), "backward": (2, [], [])}, found
    messages = [remark.message for report in reports for remark in report.fused if remark.kind.startswith("matmul")]
    assert all("added to the products" in message for message in messages), messages
    assert all("of aten.index_put.default" in message for message in messages), messages
    return reports


def case_experts_of_ranks(mesh: DeviceMesh) -> tuple[Report, ...]:
    reports, found = _step(ExpertsOfRanks(mesh), mesh)
    assert found == {"forward": (2, [], ["ATP006"] * 2), "backward": (2, [], ["ATP006"] * 2)}, found
    return reports


CASES = tuple(name.removeprefix("case_") for name in list(globals()) if name.startswith("case_"))
