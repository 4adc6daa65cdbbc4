"""What two ranks of test_recipes do in fp8: layers in plain torch ops and functional collectives, with their norms.

Sequence first, `[sequence, batch, width]`, as Megatron and Transformer Engine have it. Activations and gradients are
quantized by one scale before they are gathered, so that fp8 travels:

    x_shard ─▶ amax ─▶ all_reduce max ─▶ scale ─▶ fp8 ─▶ all_gather ─▶ _scaled_mm        current scaling
                    history ─▶ amax of the steps before ─▶ scale ─▶ fp8 ─▶ …             delayed scaling

or behind the gather, which the pass makes the same of:

    x_shard ─▶ all_gather ─▶ amax ─▶ scale ─▶ fp8 ─▶ _scaled_mm                          late

The Triton kernels run, interpreted, and their landing memory is NaN between the passes of two microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from compiled_training import QUICK, bytes_over_gloo, local, start
from ranks import overwrite_memory
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh

import asynctp_passes
from asynctp_passes import Report

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDTH, HIDDEN, HEADS, HISTORY = 16, 32, 2, 4
GATHER, SCATTER = "asynctp::all_gather_matmul", "asynctp::matmul_reduce_scatter"


# --- scaling ----------------------------------------------------------------------------------------------
class Current(nn.Module):
    """The scale of a tensor is that of its own largest element on any rank."""

    def __init__(self, dtype: torch.dtype, group: str) -> None:
        super().__init__()
        self.dtype, self.group, self.limit = dtype, group, torch.finfo(dtype).max

    def amax(self, x: Tensor) -> Tensor:
        return funcol.all_reduce(x.detach().abs().amax(), "max", self.group)

    def scale(self, x: Tensor) -> Tensor:
        """What to multiply `x` by, a number in fp32."""
        return self.limit / self.amax(x).clamp(min=1e-12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` in fp8, and what to multiply that by to have `x` again."""
        scale = self.scale(x)
        quantized = (x * scale).clamp(-self.limit, self.limit).to(self.dtype)
        return quantized, scale.reciprocal()

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' rows of a shard, likewise."""
        quantized, scale = self(x)
        return gathered(quantized, self.group), scale


class Late(Current):
    """Gathered in high precision: every rank sees all elements, and quantizes all rows."""

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = gathered(x, self.group)
        scale = self.limit / whole.detach().abs().amax().clamp(min=1e-12)
        return (whole * scale).clamp(-self.limit, self.limit).to(self.dtype), scale.reciprocal()


class Delayed(Current):
    """The scale comes from the largest elements of the steps before, of which a history is kept."""

    history: Tensor

    def __init__(self, dtype: torch.dtype, group: str) -> None:
        super().__init__(dtype, group)
        self.register_buffer("history", torch.full((HISTORY,), 40.0))

    def scale(self, x: Tensor) -> Tensor:
        scale = self.limit / self.history.amax()
        with torch.no_grad():
            self.history.copy_(torch.cat([self.amax(x)[None], self.history[:-1]]))
        return scale


# --- layers -----------------------------------------------------------------------------------------------
def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """`a[M, K] @ b[K, N]` in fp32: `a` made row-major and `b` column-major, if they are not."""
    b = b if b.stride(0) == 1 else b.t().contiguous().t()
    return torch._scaled_mm(a.contiguous(), b, a_scale, b_scale, out_dtype=torch.float32)


def gathered(x: Tensor, group: str) -> Tensor:
    """Rows of all ranks."""
    return funcol.all_gather_tensor(x, 0, group).reshape(-1, x.shape[-1])


class _Column(torch.autograd.Function):
    """fp8 shard, gathered, times the weights; the gathered fp8 rows are what is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        rows, x_scale = layer.of_input.rows(x)
        pairs = [layer.of_weight(weight) for weight in weights]
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(rows, x_scale, *(part for pair in pairs for part in pair))
        return tuple(
            product(rows, weight.t(), x_scale, scale).reshape(-1, x.shape[1], weight.shape[0])
            for weight, scale in pairs
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, x_scale, *pairs = ctx.saved_tensors
        total, weight_grads = None, []
        for grad, weight, w_scale in zip(grads, pairs[::2], pairs[1::2], strict=True):
            dy, dy_scale = ctx.layer.of_grad(grad.reshape(-1, grad.shape[-1]))
            dx = product(dy, weight, dy_scale, w_scale)
            total = dx if total is None else total + dx
            weight_grads.append(ctx.layer.of_weight_grad(product(dy.t(), rows, dy_scale, x_scale)))
        assert total is not None
        full = total.reshape(-1, *ctx.shape[1:])
        return funcol.reduce_scatter_tensor(full, "sum", 0, ctx.layer.group), None, *weight_grads


class _Row(torch.autograd.Function):
    """fp8 rows of this rank's columns, times the weight, reduced and scattered; the gradient is gathered in fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, weight: Tensor) -> Tensor:
        rows, x_scale = layer.of_input(x.reshape(-1, x.shape[-1]))
        quantized, w_scale = layer.of_weight(weight)
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(rows, x_scale, quantized, w_scale)
        full = product(rows, quantized.t(), x_scale, w_scale).reshape(*x.shape[:2], -1)
        return funcol.reduce_scatter_tensor(full, "sum", 0, layer.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, x_scale, weight, w_scale = ctx.saved_tensors
        dy, dy_scale = ctx.layer.of_grad.rows(grad)
        dx = product(dy, weight, dy_scale, w_scale).reshape(ctx.shape)
        return dx, None, ctx.layer.of_weight_grad(product(dy.t(), rows, dy_scale, x_scale))


class Linear(nn.Module):
    """Weights `[out, in]` that share an input, and how to quantize input, weights and gradients."""

    def __init__(self, function: Any, scaling: type[Current], group: str, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.function, self.group = function, group
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.2) for shape in shapes)
        self.of_input, self.of_grad = scaling(E4M3, group), scaling(E5M2, group)
        self.of_weight: nn.Module = Current(E4M3, group)
        self.of_weight_grad: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        """The products `[sequence, batch, out]`: whole sequences, or local ones behind a row-parallel layer."""
        weights = tuple(self.weights)  # dynamo of torch 2.11 and 2.12 unpacks no ParameterList
        return self.function.apply(x, self, *weights)


class NormLinear(nn.Module):
    """Norm in high precision, then a column-parallel layer."""

    def __init__(self, norm: type[nn.Module], scaling: type[Current], group: str, outs: int = 1) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.linear = Linear(_Column, scaling, group, *[(HIDDEN // 2, WIDTH)] * outs)

    def forward(self, x: Tensor) -> Any:
        outs = self.linear(self.norm(x))
        return outs if len(outs) > 1 else outs[0]


class NormMlp(nn.Module):
    """Norm, column-parallel layer, activation, row-parallel layer."""

    def __init__(self, norm: type[nn.Module], scaling: type[Current], group: str) -> None:
        super().__init__()
        self.up = NormLinear(norm, scaling, group)
        self.down = Linear(_Row, scaling, group, (WIDTH, HIDDEN // 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return result


class NormAttention(nn.Module):
    """Norm, queries, keys and values of this rank's heads, attention, and the row-parallel output layer."""

    def __init__(self, norm: type[nn.Module], scaling: type[Current], group: str) -> None:
        super().__init__()
        self.project = NormLinear(norm, scaling, group, outs=3)
        self.out = Linear(_Row, scaling, group, (WIDTH, HIDDEN // 2))

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for part in self.project(x)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        result: Tensor = self.out(mixed.permute(2, 0, 1, 3).flatten(2))
        return result


class NormBlock(nn.Module):
    """Attention and MLP, each with a residual."""

    def __init__(self, norm: type[nn.Module], scaling: type[Current], group: str) -> None:
        super().__init__()
        self.attention, self.mlp = NormAttention(norm, scaling, group), NormMlp(norm, scaling, group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.mlp(x)
        return result


# --- cases ------------------------------------------------------------------------------------------------
Make = Callable[[type[nn.Module], type[Current], str], nn.Module]
#: Layers, with the number of gathers and scatters in each pass.
LAYERS: dict[str, tuple[Make, dict[str, tuple[int, int]]]] = {
    "linear": (NormLinear, {"forward": (1, 0), "backward": (0, 1)}),
    "mlp": (NormMlp, {"forward": (1, 1), "backward": (1, 1)}),
    "attention": (NormAttention, {"forward": (1, 1), "backward": (1, 1)}),
    "block": (NormBlock, {"forward": (2, 2), "backward": (2, 2)}),
}
RECIPES = {"current": Current, "delayed": Delayed, "late": Late}


def _case(layer: str, norm: type[nn.Module], recipe: str) -> Callable[[DeviceMesh], tuple[Report, ...]]:
    """Two layers, two microbatches in flight: overlap against no overlap, and each rank against high precision."""

    def case(mesh: DeviceMesh) -> tuple[Report, ...]:
        make, counts = LAYERS[layer]
        group = mesh.get_group().group_name
        ours, plain = (_pair(make, norm, recipe, group) for _ in range(2))
        start()
        seen = FormsSeen()
        options = {"strict": "all", "post_grad_custom_post_pass": seen, **QUICK}
        for one in ours:
            one.compile(backend="asynctp", options=options, dynamic=False)
        actual = _interleaved(ours, mesh, lambda: overwrite_memory(mesh.get_group()))
        reports = asynctp_passes.reports()
        with bytes_over_gloo():
            expected = _interleaved(plain, mesh, lambda: None)
        _assert_near(actual, expected)
        for report in reports:
            ops = [remark.op for remark in report.fused]
            assert (ops.count(GATHER), ops.count(SCATTER)) == counts[report.phase], report
            skipped = {remark.kind for remark in report.others}
            assert skipped == {"all_reduce"}, report  # of the amax
        assert {report.phase for report in reports} == set(counts)
        assert seen.gathered_bytes, "no gather was seen"
        wanted = {4} if recipe == "late" else {1}
        assert set(seen.gathered_bytes) == wanted, "something was gathered before it was quantized, or behind"
        assert not any(remark.keeps_gather for report in reports for remark in report.fused), reports
        assert not seen.before, f"copied before the gather: {seen.before}"
        assert len(seen.after) <= len(seen.gathered_bytes), f"copied more than once: {seen.after}"
        return reports

    return case


def _pair(make: Make, norm: type[nn.Module], recipe: str, group: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make(norm, RECIPES[recipe], group) for _ in range(2)]


def _interleaved(layers: Sequence[nn.Module], mesh: DeviceMesh, between: Callable[[], None]) -> list[Tensor]:
    """Forward, forward, backward, backward of two microbatches through two layers: results and all gradients.

    The shards of rank 1 are thirty times larger: a scale of one rank alone would be far off on the other.
    """
    generator = torch.Generator().manual_seed(mesh.get_rank())
    factor = 1 + 29 * mesh.get_rank()
    xs = [torch.randn(4, 2, WIDTH, generator=generator) * factor for _ in range(2)]
    outs = []
    for x in xs:
        x.requires_grad_()
        out = x
        for layer in layers:
            out = layer(out)
            out = out if out.shape[0] == 4 else out[:4] + out[4:]  # of the whole sequence: into a shard again
            between()
        outs.append(out)
    for out in outs:
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        between()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    buffers = [buffer for layer in layers for buffer in layer.buffers()]
    grads = [leaf.grad for leaf in (*xs, *parameters)]
    assert all(grad is not None for grad in grads)
    return [local(value) for value in (*outs, *grads, *buffers) if value is not None]


def _assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Relative distance: a product that rounds differently may be quantized to the neighbouring fp8 number."""
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), index
        size = b.float().norm().item()
        assert size > 0, f"value {index} is all zeros and proves nothing"
        distance = (a.float() - b.float()).norm().item() / size
        assert distance <= 2e-3, f"value {index} of {len(actual)}: {distance:.3f} away"


class FormsSeen(CustomGraphPass):
    """Looks at graphs before our pass: bytes of each gathered element, and fp8 copies before and after gathers.

    A weight's gradient wants the gathered data transposed in memory: one copy, which autograd may have made early and
    saved in place of the data.
    """

    def __init__(self) -> None:
        self.gathered_bytes: list[int] = []
        self.before: list[str] = []
        self.after: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        gathers = [node for node in graph.nodes if "all_gather_into_tensor" in str(node.target)]
        self.gathered_bytes += [node.meta["val"].dtype.itemsize for node in gathers]
        self.before += [node.name for gather in gathers for node in _through_views(gather.args[0]) if _copies(node)]
        copies = [node for node in graph.nodes if _copies(node)]
        self.after += [node.name for node in copies if _through_views(node)[-1] in gathers]

    def uuid(self) -> None:
        return None


def _copies(node: fx.Node) -> bool:
    return str(node.target) == "aten.clone.default" and node.meta["val"].dtype in (E4M3, E5M2)


def _through_views(node: fx.Node) -> list[fx.Node]:
    """A node and what it is a view or a copy of, up to the first node that is neither."""
    way = [node]
    names = ("clone", "permute", "view", "reshape", "wait_tensor")
    while any(name in str(way[-1].target) for name in names) and way[-1].all_input_nodes:
        way.append(way[-1].all_input_nodes[0])
    return way


COMBINATIONS = [
    ("linear", nn.LayerNorm, "current"),
    ("linear", nn.RMSNorm, "delayed"),
    ("mlp", nn.RMSNorm, "current"),
    ("mlp", nn.LayerNorm, "delayed"),
    ("attention", nn.LayerNorm, "current"),
    ("attention", nn.RMSNorm, "delayed"),
    ("mlp", nn.RMSNorm, "late"),
    ("block", nn.RMSNorm, "current"),
    ("block", nn.LayerNorm, "delayed"),
]
CASES = tuple(f"{layer}_{norm.__name__}_{recipe}" for layer, norm, recipe in COMBINATIONS)
globals().update({f"case_{name}": _case(*combination) for name, combination in zip(CASES, COMBINATIONS, strict=True)})
