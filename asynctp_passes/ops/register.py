"""The fused ops as torch has them: what runs a call, what it gives on fake tensors, and how ops are registered.

A real call goes to the kernels where these can run it, else to the reference program. A fake one gives shapes from
shapes: no group need exist, and no guard is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.ops import reference
from asynctp_passes.ops.autograd import gradient_of, refuse_lost_gradients
from asynctp_passes.ops.calls import OPS, SIGNATURES, Call, GatherCall, ReduceCall, first_of
from asynctp_passes.ops.checks import check, check_in_group
from asynctp_passes.ops.choice import kernels_for
from asynctp_passes.ops.plain_collectives import gathered_shape
from asynctp_passes.torch_private import torch_ops


# --- real ----------------------------------------------------------------------------------------------------------
def _real(op: str) -> Callable[..., Any]:
    """The function that torch calls for an op, with its arguments in the schema's order.

    Kernels are chosen as a value, or their stand-in. They run the call, or its reference program on their own wire.
    """
    make, program = SIGNATURES[op].call, reference.run

    def real(*arguments: Any) -> Any:
        call = make(*arguments)
        if torch.is_grad_enabled():
            refuse_lost_gradients(call.biases)
        return kernels_for(first_of(call)).run(call, check_in_group, program)

    return real


# --- fake ----------------------------------------------------------------------------------------------------------
def results(call: Call) -> Any:
    """New tensors like the results of a call."""
    return _gathered(call) if isinstance(call, GatherCall) else _reduced(call)


def _gathered(call: GatherCall) -> list[Tensor]:
    shard, along = call.a_shard, call.along_shard
    full = gathered_shape(shard.shape, call.gather_dim, call.group_size)
    shapes = [(*_lines(call, i, full), b.shape[1]) for i, b in enumerate(call.bs)]
    outs = [shard.new_empty(shape, dtype=call.matmul_dtype) for shape in shapes]
    outs += [shard.new_empty(full)] if call.return_a_full else []
    if along is None:
        return outs
    return [*outs, along.new_empty(gathered_shape(along.shape, call.gather_dim, call.group_size))]


def _lines(call: GatherCall, i: int, full: Sequence[int]) -> Sequence[int]:
    """The shape of the result of operand `i`, but for its last dimension."""
    rows = call.rows_of(i)
    if rows is None:
        return full[:-1]
    first, end, every = rows
    return ((end - first) * (math.prod(full[:-1]) // every),)


def _reduced(call: ReduceCall) -> Tensor:
    first = call.a_parts[0]
    shape = [*first.shape[:-1], call.b_parts[0].shape[1]]
    if call.scatter_dim is not None and call.group_size is not None:
        shape[call.scatter_dim] = shape[call.scatter_dim] // call.group_size
    return first.new_empty(shape, dtype=call.sum_dtype or call.out_dtype)


def _fake(op: str) -> Callable[..., Any]:
    signature = SIGNATURES[op]

    def fake(*arguments: Any) -> Any:
        call: Call = signature.call(*arguments)
        if torch.is_grad_enabled():
            refuse_lost_gradients(call.biases)
        check(call, sizes=False)
        return results(call)

    return fake


# --- registration --------------------------------------------------------------------------------------------------
def register_fused() -> Any:
    """Define the fused ops. They live as long as the returned library does."""
    library: Any = torch.library.Library("asynctp", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in OPS.items():
        library.define(name + schema, tags=(torch.Tag.needs_exact_strides,))
        register(library, name, _real(name), _fake(name), *gradient_of(name))
    return library


def define(ops: Mapping[str, tuple[str, Any, Any]], no_gradient: str) -> Any:
    """Define ops by their schemas, real and fake implementations, whose gradient raises. They live as the library does.

    no_gradient: What that error says.
    """

    def backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(no_gradient)

    library: Any = torch.library.Library("asynctp", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, (schema, real, fake) in ops.items():
        library.define(name + schema)
        register(library, name, real, fake, backward)
    return library


def register(library: Any, name: str, real: Any, fake: Any, backward: Any, setup_context: Any = None) -> None:
    """Give an op of the namespace its kernels: `real` on CPU and CUDA, `fake`, and a gradient. Unused calls stay.

    `backward` and `setup_context` are those of `torch.library.register_autograd`, which is what all tensors but CUDA's
    go through. With CUDA's, `real` is called at once when there is nothing to differentiate: 20 us less a call.
    """
    for key in ("CPU", "CUDA"):
        library.impl(name, real, key)
    torch_ops.register_fake(name, fake, library)
    torch.library.register_autograd(f"asynctp::{name}", backward, setup_context=setup_context, lib=library)
    op = getattr(torch.ops.asynctp, name).default
    torch_ops.keep_unused(op)
    generic = torch_ops.autograd_kernel(op, backward, setup_context)
    library.impl(name, short_cut(real, generic), "AutogradCUDA", with_keyset=True)


def short_cut(real: Callable[..., Any], generic: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel that calls `real` where `generic`, torch.library's, would do nothing but dispatch to it."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch_ops.goes_to_backend(keyset) and not (torch.is_grad_enabled() and torch_ops.any_requires_grad(*args)):
            return real(*args, **kwargs)
        return generic(keyset, *args, **kwargs)

    return kernel
