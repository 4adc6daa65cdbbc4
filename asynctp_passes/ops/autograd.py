"""Gradients of the fused ops.

    all_gather_matmul:      dA_shard = reduce_scatter(Σ dOut_i @ B_iᵀ [+ dA_full]),  dB_i = A_fullᵀ @ dOut_i
    matmul_reduce_scatter:  dOut = all_gather(dOut_shard),  dA_i = dOut @ B_iᵀ,      dB_i = A_iᵀ @ dOut
    matmul_all_reduce:      dOut = all_reduce(dOut),        dA_i = dOut @ B_iᵀ,      dB_i = A_iᵀ @ dOut

So the input gradient of each of the first two ops is the other op. A tensor that is added to the matmuls has the
gradient dOut. With factors, a matmul has dOut times its own. Where factors differ, dOut is gathered first, and
multiplied then. Where matmuls were converted to a `sum_dtype`, dOut is converted back before it is gathered, or once it
is reduced. The loss is the sum of all ranks' losses. (Where every rank computes the same loss, their gradients add up.)
Calls with scales have no gradient, nor have those with `real_rows` or `b_rows`: the pass makes these after autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.ops.calls import SIGNATURES, Call, GatherCall, ReduceCall
from asynctp_passes.ops.plain_collectives import all_reduce, gather, reduce_scatter
from asynctp_passes.ops.reference import multiplied, split_factors

_NO_GRADIENT = {
    "out_dtype": "a call with scales (fp8) has no gradient, since quantization has none; make it inside an "
    "autograd.Function that quantizes, or call the op without scales",
    "real_rows": "a call with real_rows has no gradient; pad the rows of A by zeros instead",
    "b_rows": "a call with b_rows has no gradient; gather A, and multiply slices of it instead",
}
"""Why a call has none, by the arguments that it has then."""


def gradient_of(op: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The backward of an op, and what keeps what it needs, as `torch.library.register_autograd` has them."""
    signature, (backward, setup) = SIGNATURES[op], _GRADIENTS[op]

    def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call: Call = signature.call(*inputs)
        ctx.refused = next((why for name, why in _NO_GRADIENT.items() if getattr(call, name, None) is not None), "")
        if not ctx.refused:
            setup(ctx, call, output)

    def differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if ctx.refused:
            raise NotImplementedError(f"asynctp: {ctx.refused}")
        found: tuple[Any, ...] = backward(ctx, *grads)
        return found

    return differentiate, save_inputs


def refuse_lost_gradients(biases: Sequence[Tensor | None]) -> None:
    """torch.library takes a list with None in it for a constant, and would drop its tensors' gradients unsaid."""
    mixed = any(bias is None for bias in biases)
    if mixed and any(bias is not None and bias.requires_grad for bias in biases):
        raise NotImplementedError(
            "asynctp: biases with and without None in one call have no gradient (torch.library cannot pass such a "
            "list); give every product a bias (zeros change nothing), or add the biases to the results"
        )


def _setup_gather(ctx: Any, call: GatherCall, output: list[Tensor]) -> None:
    _remember(ctx, call)
    ctx.set_materialize_grads(False)
    ctx.return_a_full = call.return_a_full
    ctx.save_for_backward(output[-1] if call.return_a_full else call.a_shard, *call.bs)
    ctx.where = (call.gather_dim, call.group_size, call.group_name)


def _backward_gather(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    a_saved, *bs = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    a_full_grad = grads[-1] if ctx.return_a_full else None
    out_grads = [None if grad is None else grad.contiguous() for grad in grads[: len(bs)]]
    a_full = a_saved
    if any(needs_b) and not ctx.return_a_full:
        a_full = gather(a_saved, *ctx.where)
    a_grad = _gather_input_grad(ctx, out_grads, bs, a_full_grad) if needs_a else None
    b_grads = [_weight_grad(a_full, grad) if need else None for grad, need in zip(out_grads, needs_b, strict=True)]
    return _in_order(ctx, a_shard=a_grad, bs=b_grads, biases=_bias_grads(ctx, out_grads))


def _gather_input_grad(
    ctx: Any, out_grads: list[Tensor | None], bs: list[Tensor], a_full_grad: Tensor | None
) -> Tensor | None:
    pairs = [(grad, b.t()) for grad, b in zip(out_grads, bs, strict=True) if grad is not None]
    a_grad: Tensor | None = None
    if pairs:
        parts = [list(part) for part in zip(*pairs, strict=True)]
        a_grad = torch.ops.asynctp.matmul_reduce_scatter(*parts, [None] * len(pairs), "sum", *ctx.where)
    if a_full_grad is None:
        return a_grad
    kept = reduce_scatter(a_full_grad, "sum", *ctx.where)
    return kept if a_grad is None else a_grad + kept


def _setup_sum(ctx: Any, call: ReduceCall, output: Tensor) -> None:
    _remember(ctx, call)
    ctx.factors, ctx.factor = split_factors(call.factors, len(call.a_parts))
    ctx.reduce_op, ctx.is_added = call.reduce_op, call.added is not None
    ctx.save_for_backward(*call.a_parts, *call.b_parts)
    ctx.where = (call.scatter_dim, call.group_size, call.group_name)


def _backward_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradients of an op that reduces: `whole` is that of its sum, and `fulls` are those of its matmuls."""
    count = len(ctx.saved_tensors) // 2
    a_parts, b_parts = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
    (needs_a, needs_b), (dim, size, group) = ctx.needs_input_grad[:2], ctx.where
    a_grads: Sequence[Tensor | None] | None = None
    if dim is None:
        whole = multiplied(all_reduce(grad.contiguous(), ctx.reduce_op, group), ctx.factor)
    else:
        grad = multiplied(grad / size if ctx.reduce_op == "avg" else grad, ctx.factor).contiguous()
        if len(set(ctx.factors)) > 1:
            whole = gather(grad, *ctx.where)
        else:
            shard = multiplied(grad, ctx.factors[0]).to(a_parts[0].dtype)
            a_grads, whole = _grads_of_gathered(shard, b_parts, needs_a, ctx.where)
            fulls = [whole] * count
            if ctx.is_added and (grad.dtype != whole.dtype or ctx.factors[0] != 1):
                whole = gather(grad, *ctx.where)
    if a_grads is None:  # each product has a gradient of its own, which is a multiple of one
        fulls = [multiplied(whole, factor).to(a_parts[0].dtype) for factor in ctx.factors]
        a_grads = [full @ b.t() if need else None for full, b, need in zip(fulls, b_parts, needs_a, strict=True)]
    b_grads = [_weight_grad(a, full) if need else None for a, full, need in zip(a_parts, fulls, needs_b, strict=True)]
    biases, added = _bias_grads(ctx, fulls), whole if ctx.is_added else None
    return _in_order(ctx, a_parts=a_grads, b_parts=b_grads, biases=biases, added=added)


def _grads_of_gathered(
    shard: Tensor, b_parts: Sequence[Tensor], needs_a: Sequence[bool], where: tuple[int, int, Any]
) -> tuple[list[Tensor | None], Tensor]:
    """The gradients of the As that need one, and the gathered gradient; `shard` is this rank's part of it."""
    dim, *group = where
    transposed = [b.t() for b, need in zip(b_parts, needs_a, strict=True) if need]
    if not transposed:
        return [None] * len(needs_a), gather(shard, *where)
    none = [None] * len(transposed)
    *products, full = torch.ops.asynctp.all_gather_matmul(shard, transposed, none, dim, True, *group)
    remaining = iter(products)
    return [next(remaining) if need else None for need in needs_a], full


def _remember(ctx: Any, call: Call) -> None:
    """Keep which arguments were given, and what the gradients of biases need: each one's number of dimensions."""
    signature = SIGNATURES[call.op]
    # torch wants gradients for the arguments up to the last that has not its default
    given = [place for place, name in enumerate(signature.names, 1) if name in signature.given(call)]
    ctx.names = signature.names[: max(given, default=signature.needed)]
    present = [bias for bias in call.biases if bias is not None]
    refuse_lost_gradients(call.biases)
    ctx.bias_ndims = [bias.ndim for bias in present] if len(present) == len(call.biases) else None


def _in_order(ctx: Any, **grads: Any) -> tuple[Any, ...]:
    """Gradients by arguments' names as torch wants them: one for each argument that was given, None for the others."""
    return tuple(grads.get(name) for name in ctx.names)


def _bias_grads(ctx: Any, out_grads: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    if ctx.bias_ndims is None:
        return None
    sums = [None if grad is None else grad.flatten(0, -2).sum(0) for grad in out_grads]
    return [
        total.unsqueeze(0) if total is not None and ndim == 2 else total
        for total, ndim in zip(sums, ctx.bias_ndims, strict=True)
    ]


def _weight_grad(a_full: Tensor, out_grad: Tensor | None) -> Tensor | None:
    return None if out_grad is None else a_full.flatten(0, -2).t() @ out_grad.flatten(0, -2)


_GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_gather_matmul": (_backward_gather, _setup_gather),
    "matmul_reduce_scatter": (_backward_sum, _setup_sum),
    "matmul_all_reduce": (_backward_sum, _setup_sum),
}
"""The backward of each op without scales, and the function that keeps a call's inputs for it."""
