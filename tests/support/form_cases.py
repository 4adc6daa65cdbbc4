"""Programs in the forms that people write, one for each spelling of a collective or matmul, and how ranks run them.

A program takes this rank's tensors; `group` is what it was made with. `CASES` says what becomes of its collectives.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lockstep
import serving_ops
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import QUICK
from lockstep import differences
from passes import outcomes, run_pass
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import asynctp_passes
from asynctp_passes import Report

c10d = torch.ops._c10d_functional
autograd = torch.ops._c10d_functional_autograd
vllm = torch.ops.vllm_like

RANKS = 2
FP8 = torch.float8_e4m3fn

Program = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A program, the shapes of its inputs on one rank, and the expected outcomes (`F`, or a code) in graph order.

    It is traced by `make_fx`, before the dispatcher decomposes it if `pre_dispatch`, or compiled with `options`.
    """

    program: Program
    shapes: tuple[tuple[int, ...], ...]
    outcomes: tuple[str, ...] = ("F",)
    pre_dispatch: bool = False
    options: dict[str, Any] | None = None


def inputs(case: Case, rank: int) -> list[Tensor]:
    """This rank's random inputs."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in case.shapes]


# --- collectives ------------------------------------------------------------------------------------------------
def gathered(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


def scattered(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD)


def raw_gather(op: Any, x: Any) -> Any:
    return op(x, RANKS, dist.group.WORLD.group_name)


def gather_of_two(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A list of tensors in one collective; both feed a matmul."""
    first, second = funcol.all_gather_into_tensor_coalesced([x, y], dist.group.WORLD)
    return first @ w, second @ w


def gather_of_two_for_one(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The other tensor of the list is gathered still."""
    first, second = funcol.all_gather_into_tensor_coalesced([y, x], dist.group.WORLD)
    return second @ w, torch.relu(first)


def scatter_of_two(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    return funcol.reduce_scatter_tensor_coalesced([x @ w, torch.relu(y @ w)], "sum", [0, 0], dist.group.WORLD)


def all_reduce_of_two(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    """Each on its own; what no matmul made is reduced still."""
    return funcol.all_reduce_coalesced([x @ w, torch.relu(y)], "sum", dist.group.WORLD)


def gather_that_has_a_gradient(x: Tensor, w: Tensor) -> Tensor:
    return funcol.wait_tensor(raw_gather(autograd.all_gather_into_tensor, x)) @ w


def scatter_that_has_a_gradient(x: Tensor, w: Tensor) -> Tensor:
    group = dist.group.WORLD.group_name
    return funcol.wait_tensor(autograd.reduce_scatter_tensor(x @ w, "sum", RANKS, group))


# --- matmuls ----------------------------------------------------------------------------------------------------
def einsum(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsk,kn->bsn", gathered(x, 1), w)


def einsum_of_heads(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsk,khd->bshd", gathered(x, 1), w)


def einsum_to_scatter(x: Tensor, w: Tensor) -> Tensor:
    return scattered(torch.einsum("bshd,hdk->bsk", x, w), 1)


def bmm_of_one_weight(x: Tensor, w: Tensor) -> Tensor:
    whole = gathered(x, 1)
    return torch.bmm(whole, w.expand(whole.shape[0], -1, -1))


def bmm_of_one_transposed_weight(x: Tensor, w: Tensor) -> Tensor:
    whole = gathered(x, 1)
    return torch.bmm(whole, w.expand(whole.shape[0], -1, -1).transpose(1, 2))


def bmm_of_two_weights(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(gathered(x, 1), w)


def baddbmm(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return scattered(torch.baddbmm(bias, x, w.expand(x.shape[0], -1, -1)), 1)


def linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(gathered(x, 1), w, bias)


def linear_to_scatter(x: Tensor, w: Tensor) -> Tensor:
    return scattered(torch.nn.functional.linear(x, w), 2)


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, 1) @ w


def matmul_to_scatter(x: Tensor, w: Tensor) -> Tensor:
    return scattered(x @ w, 1)


# --- sums -----------------------------------------------------------------------------------------------------
def adapter(x: Tensor, w: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """A row-parallel linear with a low-rank adapter, whose scaling is a power of two."""
    return scattered(x @ w + (x @ down) @ up * 2.0, 1)


def adapter_with_another_scaling(x: Tensor, w: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return scattered(x @ w + (x @ down) @ up * 0.3, 1)


def adapter_to_all_reduce(x: Tensor, w: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return funcol.all_reduce((x @ w + ((x @ down) @ up) / 4) * -0.5, "sum", dist.group.WORLD)


def adapter_of_the_gathered(x: Tensor, w: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """A column-parallel linear with a low-rank adapter, as Inductor sums them."""
    whole = gathered(x)
    return torch.addmm((whole @ down) @ up * 0.3, whole, w)


def complex_linear(re: Tensor, im: Tensor, w_re: Tensor, w_im: Tensor) -> tuple[Tensor, Tensor]:
    return scattered(re @ w_re - im @ w_im), scattered(re @ w_im + im @ w_re)


def converted_product(x: Tensor, w: Tensor) -> Tensor:
    """As autocast: operands of bf16, and what is added over the ranks in fp32."""
    return scattered((x.bfloat16() @ w.bfloat16()).float(), 1)


def converted_sum(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """The input gradient of two linear layers under autocast, averaged."""
    terms = [(a.bfloat16() @ b.bfloat16()).float() for a, b in ((x, w), (y, v))]
    return funcol.reduce_scatter_tensor(terms[0] + terms[1], "avg", 1, dist.group.WORLD)


def converted_sum_of_half_to_all_reduce(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    terms = [(a.half() @ b.half()).transpose(0, 1).to(torch.float32) for a, b in ((x, w), (y, v))]
    return funcol.all_reduce((terms[0] - terms[1]).contiguous(), "sum", dist.group.WORLD)


def transposed_product_to_all_reduce(x: Tensor, w: Tensor) -> Tensor:
    """It is not sent in the order of its rows."""
    return funcol.all_reduce((x @ w).transpose(1, 2).contiguous(), "sum", dist.group.WORLD)


def sharded_head(x: Tensor, w: Tensor, last: Tensor) -> Tensor:
    """Some rows of what is gathered go to a head that is sharded over the vocabulary, and the logits are gathered."""
    rows = gathered(x)[last.long() % x.shape[0]]
    return gathered(rows @ w, 1)


# --- views, as tracing without normalization leaves them ----------------------------------------------------------
def detached(x: Tensor, w: Tensor) -> Tensor:
    whole = gathered(x, 1).detach().clone()
    return whole.view(-1, whole.shape[-1]) @ w.t()


def transposed_twice(x: Tensor, w: Tensor) -> Tensor:
    whole = gathered(x).t().contiguous().t()
    return torch.ops.aten.alias.default(whole) @ w


def unsafe_views(x: Tensor, w: Tensor) -> Tensor:
    product = torch.ops.aten._unsafe_view.default(x, [-1, x.shape[-1]]) @ w
    return scattered(torch.ops.aten._unsafe_view.default(product, [x.shape[0], -1, w.shape[-1]]), 1)


# --- the custom ops of a serving framework ------------------------------------------------------------------------
def custom_gather(x: Tensor, w: Tensor) -> Tensor:
    return vllm.all_gather(x, 0, RANKS, "tp:0") @ w


def custom_gather_of_the_middle(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The gathered tensor is used elsewhere too."""
    whole = vllm.all_gather(x, 1, RANKS, "tp:0")
    return whole @ w, whole.sum(2)


def custom_gather_of_the_contraction(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    whole = vllm.all_gather(x, -1, RANKS, "tp:0")
    return whole @ w, torch.relu(whole)


def custom_scatter(x: Tensor, w: Tensor) -> Tensor:
    return vllm.reduce_scatter(x @ w, 0, RANKS, "tp:0")


def custom_scatter_of_the_middle(x: Tensor, w: Tensor) -> Tensor:
    return vllm.reduce_scatter(x @ w, -2, RANKS, "tp:0")


def custom_scatter_of_columns(x: Tensor, w: Tensor) -> Tensor:
    return vllm.reduce_scatter(x @ w, 2, RANKS, "tp:0")


def custom_all_reduce(x: Tensor, w: Tensor) -> Tensor:
    return vllm.all_reduce(x @ w, "tp:0")


def _quantized(x: Tensor) -> Tensor:
    return x.clamp(-400, 400).to(FP8)


def custom_scaled_matmul(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """fp8 rows are gathered, multiplied by an op that writes into an argument, and scattered again."""
    a, b = vllm.all_gather(_quantized(x), 0, RANKS, "tp:0"), _quantized(w).t()
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    a_scales = torch.ones(a.shape[0], 1, dtype=torch.float32)
    vllm.cutlass_scaled_mm(out, a, b, a_scales, scale.float().abs(), None)
    hidden = _quantized(torch.relu(out))
    back = torch.empty(a.shape[0], x.shape[1], dtype=torch.bfloat16)
    columns = torch.ones(x.shape[1], 1, dtype=torch.float32)
    vllm.cutlass_scaled_mm(back, hidden, _quantized(w), a_scales, columns, None)
    return vllm.reduce_scatter(back, 0, RANKS, "tp:0")


def custom_batched_matmul(x: Tensor, w: Tensor) -> Tensor:
    """`bmm_fp8` of a batch of one, as FlashInfer's is called."""
    one = torch.ones(1, dtype=torch.float32)
    product = vllm.bmm_fp8(_quantized(x).unsqueeze(0), _quantized(w).t().unsqueeze(0), one, one, torch.bfloat16, "auto")
    return vllm.reduce_scatter(product.view(x.shape[0], w.shape[0]), 0, RANKS, "tp:0")


def gathered_bytes(x: Tensor, dim: int) -> Tensor:
    """fp8 travels as bytes, which every backend knows; the pieces are joined as bytes too."""
    return gathered(_quantized(x).view(torch.uint8), dim).view(FP8)


def scaled_mm_of_gathered_bytes(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    """Rowwise: data and scales are gathered along a middle dimension, and scaled by recipe."""
    rows, row_scales = gathered_bytes(x, 1).reshape(-1, x.shape[2]), gathered(scale.float().abs(), 1).reshape(-1, 1)
    columns, kind = torch.ones(1, w.shape[0], dtype=torch.float32), torch.nn.functional.ScalingType.RowWise
    return torch.nn.functional.scaled_mm(rows, _quantized(w).t(), row_scales, kind, columns, kind)


def scaled_mm_to_scatter(x: Tensor, w: Tensor) -> Tensor:
    """Tensorwise, by recipe."""
    one, kind = torch.ones((), dtype=torch.float32), torch.nn.functional.ScalingType.TensorWise
    return scattered(torch.nn.functional.scaled_mm(_quantized(x), _quantized(w).t(), one, kind, one, kind))


# --- fp8 with a scale for each block of 128 of K ------------------------------------------------------------------
Scaled = tuple[Tensor, Tensor]


@contextlib.contextmanager
def blocks_on_cpu() -> Iterator[None]:
    """torch has no kernel on CPU for scales of blocks: until then, the definition is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it overrides the one for other scales
        library = torch.library.Library("aten", "IMPL")
        library.impl("_scaled_mm_v2", lockstep.scaled_mm_v2, "CPU")
        try:
            yield
        finally:
            library._destroy()


def by_blocks(x: Tensor) -> Scaled:
    """fp8, and the scale of each 1x128 block."""
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // 128, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(FP8).max
    return (blocks / scale).to(FP8).reshape(x.shape), scale.squeeze(-1)


def by_tall_blocks(w: Tensor) -> Scaled:
    """fp8, and the scale of each 128x128 block of a matrix."""
    blocks = w.float().reshape(w.shape[0] // 128, 128, w.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(FP8).max
    return (blocks / scale).to(FP8).reshape(w.shape), scale.reshape(blocks.shape[0], blocks.shape[2])


def product_of_blocks(rows: Tensor, scales: Tensor, weight: Scaled) -> Tensor:
    """`rows @ weight.T` of fp8 [m, k] and [n, k], with scales [m, k/128] and [n/128, k/128], in fp32."""
    quantized, scale = weight
    kind = torch.nn.functional.ScalingType
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).t()
    sides = (scales.t().contiguous().t(), kind.BlockWise1x128, padded, kind.BlockWise128x128)
    return torch.nn.functional.scaled_mm(rows, quantized.t(), *sides, output_dtype=torch.float32)


def gathered_by_blocks(x: Tensor) -> Scaled:
    """Rows of all ranks along dimension 1, quantized before the gather."""
    fp8, scales = by_blocks(x)
    rows = gathered(fp8.view(torch.uint8), 1).view(FP8).reshape(-1, x.shape[-1])
    return rows, gathered(scales, 1).reshape(-1, scales.shape[-1])


def scaled_mm_of_gathered_blocks(x: Tensor, w: Tensor) -> Tensor:
    return product_of_blocks(*gathered_by_blocks(x), by_tall_blocks(w))


def scaled_mm_of_blocks_quantized_late(x: Tensor, w: Tensor) -> Tensor:
    """Gathered in high precision: quantized on the shard by the pass."""
    rows = gathered(x, 1).reshape(-1, x.shape[-1])
    return product_of_blocks(*by_blocks(rows), by_tall_blocks(w))


def scaled_mm_of_blocks_to_scatter(x: Tensor, w: Tensor) -> Tensor:
    product = product_of_blocks(*by_blocks(x.reshape(-1, x.shape[-1])), by_tall_blocks(w))
    return scattered(product.reshape(*x.shape[:-1], -1), 1)


class _Column(torch.autograd.Function):
    """fp8 rows and scales of all ranks times this rank's columns of the weight; the weight's gradient is not fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        rows, scales = gathered_by_blocks(x)
        return product_of_blocks(rows, scales, by_tall_blocks(w)).reshape(x.shape[0], -1, w.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        dy = grad.reshape(-1, w.shape[0])
        fp8, scale = by_tall_blocks(w)
        dx = product_of_blocks(*by_blocks(dy), (fp8.t().contiguous(), scale.t()))
        rows = gathered(x, 1).reshape(-1, x.shape[-1])
        return scattered(dx.reshape(*grad.shape[:-1], -1), 1), dy.t() @ rows


class _Row(torch.autograd.Function):
    """fp8 rows of this rank's columns times its rows of the weight, scattered; the gradient is quantized late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return scaled_mm_of_blocks_to_scatter(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        dy, (fp8, scale) = gathered(grad, 1).reshape(-1, w.shape[0]), by_tall_blocks(w)
        dx = product_of_blocks(*by_blocks(dy), (fp8.t().contiguous(), scale.t()))
        return dx.reshape(x.shape), dy.t() @ x.reshape(-1, x.shape[-1])


def layer_of_blocks(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A column-parallel and a row-parallel layer."""
    return _Row.apply(torch.relu(_Column.apply(x.float(), up.float())), down.float())


_BATCH, _MATRIX = ((2, 4, 6), (6, 8)), ((4, 6), (6, 8))


# --- scales after the product --------------------------------------------------------------------------------------
def of_int8(x: Tensor) -> Tensor:
    return (x * 40).clamp(-127, 127).to(torch.int8)


def int8_weights(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Weight-only: converted to the activation's dtype, and scaled by columns after the product."""
    rows = gathered(x.bfloat16(), 0)
    up = torch.relu((rows @ of_int8(w).bfloat16().t()) * scale.bfloat16())
    return scattered((up @ of_int8(w).bfloat16()) * scale[0].bfloat16())


def int8_activations(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """W8A8: rows are quantized after the gather, and products in int32 scaled by rows and columns."""
    rows = gathered(x.float(), 0)
    hidden = _product_of_int8(rows, of_int8(w).t(), scale.float())
    return scattered(_product_of_int8(torch.relu(hidden), of_int8(w), scale.float()[0]))


def _product_of_int8(rows: Tensor, w: Tensor, columns: Tensor) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-5) / 127
    return torch._int_mm((rows / scale).round().to(torch.int8), w).float() * scale * columns


def gated_beside_routed(x: Tensor, w: Tensor, gate: Tensor) -> Tensor:
    x, w = x.float(), w.float()
    return scattered(torch.relu(x) @ torch.relu(w) + (x @ w) * torch.sigmoid(gate.float()))


def summed_experts(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    """As Llama 4 in transformers: experts' outputs are all-reduced one by one, and then summed."""
    routed = torch.bmm(x.expand(experts.shape[0], *x.shape), experts).reshape(-1, w.shape[1])
    shared, routed = (funcol.all_reduce(one, "sum", dist.group.WORLD) for one in (x @ w, routed))
    return shared + routed.view(experts.shape[0], *shared.shape).sum(0)


def padded_product(x: Tensor, w: Tensor) -> Tensor:
    """Seven tokens for two ranks."""
    return scattered(torch.nn.functional.pad(x @ w, (0, 0, 0, -x.shape[0] % RANKS)))


def product_joined_with_zeros(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    product = x @ w + other
    return scattered(torch.cat([product, product.new_zeros(-x.shape[0] % RANKS, w.shape[1])]))


def product_copied_into_zeros(x: Tensor, w: Tensor) -> Tensor:
    """A batch of sequences of seven tokens."""
    product = x @ w
    padded = product.new_zeros(x.shape[0], x.shape[1] + -x.shape[1] % RANKS, w.shape[1])
    padded[:, : x.shape[1]] = product
    return scattered(padded, 1)


def tokens_padded_and_cut(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A layer of sequence parallelism, of any number of tokens: each rank has its part, and the last one less."""
    tokens, more = x.shape[0], -x.shape[0] % RANKS
    parts = torch.nn.functional.pad(x, (0, 0, 0, more)).chunk(RANKS)
    hidden = torch.relu(gathered(parts[dist.get_rank()].clone())[:tokens] @ up)
    return scattered(torch.nn.functional.pad(hidden @ down, (0, 0, 0, more)))


CASES = {
    "padded product": Case(padded_product, ((7, 6), (6, 8))),
    "padded product, compiled": Case(padded_product, ((7, 6), (6, 8)), options=QUICK),
    "product joined with zeros": Case(product_joined_with_zeros, ((7, 6), (6, 8), (7, 8)), options=QUICK),
    "product copied into zeros": Case(product_copied_into_zeros, ((3, 7, 6), (6, 8)), options=QUICK),
    "tokens padded and cut": Case(tokens_padded_and_cut, ((7, 6), (6, 8), (8, 6)), ("F", "F"), options=QUICK),
    "int8 weights": Case(int8_weights, ((4, 64), (32, 64), (32,)), ("F", "F")),
    "int8 activations": Case(int8_activations, ((4, 64), (32, 64), (32,)), ("F", "F")),
    "gated beside routed": Case(gated_beside_routed, ((4, 6), (6, 8), (4, 1))),
    "summed experts": Case(summed_experts, ((4, 6), (6, 8), (3, 6, 8)), ("F", "F")),
    "gather of two": Case(gather_of_two, ((4, 6), (2, 6), (6, 8)), ("F", "F")),
    "gather of two for one": Case(gather_of_two_for_one, ((4, 6), (2, 3), (6, 8)), ("ATP002", "F")),
    "scatter of two": Case(scatter_of_two, ((4, 6), (2, 6), (6, 8)), ("F", "ATP105")),
    "all-reduce of two": Case(all_reduce_of_two, ((4, 6), (2, 3), (6, 8)), ("F", "ATP002")),
    "gather that has a gradient": Case(gather_that_has_a_gradient, _MATRIX),
    "scatter that has a gradient": Case(scatter_that_has_a_gradient, _MATRIX),
    "einsum": Case(einsum, _BATCH),
    "einsum of heads": Case(einsum_of_heads, ((2, 4, 6), (6, 2, 4))),
    "einsum to scatter": Case(einsum_to_scatter, ((2, 4, 2, 3), (2, 3, 6))),
    "bmm of one weight": Case(bmm_of_one_weight, _BATCH),
    "bmm of one transposed weight": Case(bmm_of_one_transposed_weight, ((2, 4, 6), (8, 6))),
    "bmm of two weights": Case(bmm_of_two_weights, ((2, 4, 6), (2, 6, 8)), ("ATP115",)),
    "baddbmm": Case(baddbmm, ((2, 4, 6), (6, 8), (8,))),
    "linear": Case(linear, ((2, 4, 6), (8, 6), (8,))),
    "linear before dispatch": Case(linear, ((2, 4, 6), (8, 6), (8,)), pre_dispatch=True),
    "linear to scatter before dispatch": Case(linear_to_scatter, ((2, 4, 6), (8, 6)), pre_dispatch=True),
    "matmul": Case(matmul, _BATCH),
    "matmul before dispatch": Case(matmul, _BATCH, pre_dispatch=True),
    "matmul to scatter before dispatch": Case(matmul_to_scatter, _BATCH, pre_dispatch=True),
    "adapter": Case(adapter, ((2, 4, 6), (6, 8), (6, 2), (2, 8))),
    "adapter with another scaling": Case(adapter_with_another_scaling, ((2, 4, 6), (6, 8), (6, 2), (2, 8))),
    "adapter of the gathered": Case(adapter_of_the_gathered, ((4, 6), (6, 8), (6, 2), (2, 8))),
    "adapter to all-reduce": Case(adapter_to_all_reduce, ((2, 4, 6), (6, 8), (6, 2), (2, 8))),
    "complex linear": Case(complex_linear, ((4, 6), (4, 6), (6, 8), (6, 8)), ("F", "F")),
    "converted product": Case(converted_product, _BATCH),
    "converted sum": Case(converted_sum, (*_BATCH, *_BATCH)),
    "converted sum of half to all-reduce": Case(converted_sum_of_half_to_all_reduce, (*_BATCH, *_BATCH)),
    "transposed product to all-reduce": Case(transposed_product_to_all_reduce, _BATCH, ("ATP211",)),
    "sharded head": Case(sharded_head, ((4, 6), (6, 8), (3,)), ("ATP103", "ATP012")),
    "detached": Case(detached, ((2, 4, 6), (8, 6))),
    "transposed twice": Case(transposed_twice, _MATRIX),
    "unsafe views": Case(unsafe_views, _BATCH),
    "custom gather": Case(custom_gather, _MATRIX),
    "custom gather of the middle": Case(custom_gather_of_the_middle, _BATCH),
    "custom gather of the contraction": Case(custom_gather_of_the_contraction, ((2, 4, 3), (6, 8))),
    "custom scatter": Case(custom_scatter, _MATRIX),
    "custom scatter of the middle": Case(custom_scatter_of_the_middle, _BATCH),
    "custom scatter of columns": Case(custom_scatter_of_columns, _BATCH),
    "custom all-reduce": Case(custom_all_reduce, _MATRIX),
    "custom scaled matmul": Case(custom_scaled_matmul, ((4, 16), (32, 16), (32,)), ("F", "F"), options=QUICK),
    "custom scaled matmul by auto_functionalized of old": Case(
        custom_scaled_matmul,
        ((4, 16), (32, 16), (32,)),
        ("F", "F"),
        options={"enable_auto_functionalized_v2": False, **QUICK},
    ),
    "custom scaled matmul, one number for the weight": Case(
        custom_scaled_matmul, ((4, 16), (32, 16), (1,)), ("F", "F"), options=QUICK
    ),
    "custom gather, compiled": Case(custom_gather_of_the_middle, _BATCH, options=QUICK),
    "custom batched matmul": Case(custom_batched_matmul, ((4, 16), (32, 16))),
    "linear, compiled": Case(linear, ((2, 4, 6), (8, 6), (8,)), options=QUICK),
    "einsum, compiled": Case(einsum, _BATCH, options=QUICK),
    "scaled_mm of gathered bytes": Case(scaled_mm_of_gathered_bytes, ((2, 4, 16), (2, 4, 1), (32, 16)), ("F", "F")),
    "scaled_mm to scatter": Case(scaled_mm_to_scatter, ((4, 16), (32, 16))),
    "scaled_mm of gathered blocks": Case(scaled_mm_of_gathered_blocks, ((2, 4, 256), (384, 256)), ("F", "F")),
    "scaled_mm of blocks, quantized late": Case(
        scaled_mm_of_blocks_quantized_late, ((2, 4, 256), (384, 256)), options=QUICK
    ),
    "scaled_mm of blocks to scatter": Case(scaled_mm_of_blocks_to_scatter, ((2, 4, 256), (384, 256))),
}


# --- tracing and running --------------------------------------------------------------------------------------
def traced(case: Case) -> GraphModule:
    """The graph of a program, with fake values."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in inputs(case, rank=0)]
    with mode:
        return make_fx(case.program, pre_dispatch=case.pre_dispatch)(*fakes)


def fuse(graph: Graph) -> Report:
    """Run the pass where the framework's ops are registered."""
    with serving_ops.registered(dist.group.WORLD):
        return run_pass(graph)


def run_cases(rank: int, world_size: int, names: Sequence[str]) -> dict[str, tuple[tuple[str, ...], list[str]]]:
    """On one rank: what became of each program's collectives, and how eager and the rewritten graph differ."""
    serving_ops.GROUPS["tp:0"] = dist.group.WORLD
    with blocks_on_cpu():
        return {name: _run_case(CASES[name], rank) for name in names}


def _run_case(case: Case, rank: int) -> tuple[tuple[str, ...], list[str]]:
    if case.options is not None and not traceable(case.program, inputs(case, rank)):
        return (NOT_TRACED,), []
    report, rewritten = by_tracing(case) if case.options is None else by_compiling(case, inputs(case, rank))
    expected, actual = case.program(*inputs(case, rank)), rewritten(*inputs(case, rank))
    return tuple(outcomes(report)), differences([_as_list(expected)], [_as_list(actual)])


def by_tracing(case: Case) -> tuple[Report, Program]:
    """Trace a program and rewrite its graph."""
    module = traced(case)
    report = fuse(module.graph)
    module.recompile()
    return report, module


#: The outcome of a program that this torch does not trace, without asynctp neither.
NOT_TRACED = "not traced"


def traceable(program: Program, example: list[Tensor]) -> bool:
    """False where dynamo has no graph of the whole: see the bugs of torch in docs/reference/tried.md."""
    torch._dynamo.reset()
    try:
        torch.compile(program, backend="eager", fullgraph=True)(*example)
    except torch._dynamo.exc.Unsupported:
        return False
    return True


def by_compiling(case: Case, example: list[Tensor]) -> tuple[Report, Program]:
    """Compile a program with the backend."""
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    compiled = torch.compile(case.program, backend="asynctp", options={"strict": "off", **(case.options or {})})
    with serving_ops.registered(dist.group.WORLD):
        compiled(*example)
    reports = asynctp_passes.reports()
    assert reports, f"{case.program.__name__} was compiled without a graph for the pass"
    return reports[-1], compiled


def _as_list(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [funcol.wait_tensor(item) for item in values]


# --- training without Inductor ----------------------------------------------------------------------------------
Trained = tuple[list[tuple[str, ...]], list[str]]


def train_by_aot(rank: int, world_size: int) -> Trained:
    """On one rank: outcomes of the forward and backward graphs of `aot_eager`'s kind, and how the gradients differ."""

    def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.relu(torch.einsum("bsk,kn->bsn", funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD), up))
        return funcol.reduce_scatter_tensor_autograd(hidden @ down.t(), "sum", 1, dist.group.WORLD)

    return _train_by_aot(Case(layer, ((2, 4, 6), (6, 8), (6, 8))), rank)


def train_blocks_by_aot(rank: int, world_size: int) -> Trained:
    """The same of a layer in fp8 with scales of blocks."""
    with blocks_on_cpu():
        case = Case(layer_of_blocks, ((2, 4, 256), (384, 256), (256, 384)))
        return _train_by_aot(case, rank, tolerance=1e-3)  # an element may be quantized to its neighbour


def _train_by_aot(case: Case, rank: int, tolerance: float | None = None) -> Trained:
    found: list[tuple[str, ...]] = []

    def fused(module: GraphModule, example: Sequence[Any]) -> Program:
        found.append(tuple(outcomes(fuse(module.graph))))
        module.recompile()
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=fused, bw_compiler=fused)
    if not traceable(case.program, inputs(case, rank)):
        return [(NOT_TRACED,)], []
    results = []
    for program in (case.program, torch.compile(case.program, backend=backend)):
        leaves = [leaf.requires_grad_() for leaf in inputs(case, rank)]
        out = program(*leaves)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return found, differences([results[0]], [results[1]], tolerance)
