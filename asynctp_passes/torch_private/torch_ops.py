"""Ops of torch: what an op is, how ours are registered and dispatched, and the matmuls without a public name."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx


def register_fake(name: str, fake: Callable[..., Any], library: Any) -> None:
    """Give an op of asynctp's what it does with fake tensors.

    Torch looks up who calls this. By the file's name in Python's own table it does without the path of every module.
    """
    getattr(inspect, "modulesbyfile", {})[__file__] = __name__
    torch.library.register_fake(f"asynctp::{name}", fake, lib=library)


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """`torch._scaled_mm` of 2-D operands: `b` column-major, fast accumulation if `fast`."""
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of int8 in int32.

    CUDA's takes more than 16 rows, and sizes that are multiples of 8: operands of others are padded. The CPU's reads
    operands that overlap themselves, as expanded ones do, beyond their memory: they are copied.
    """
    if not a.is_cuda:
        return torch._int_mm(a.contiguous(), b.contiguous())
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[1]
    more = (max(17, rows) - rows, -depth % 8, -columns % 8)
    if any(more):
        a = torch.nn.functional.pad(a, (0, more[1], 0, more[0]))
        b = torch.nn.functional.pad(b.t(), (0, more[1], 0, more[2])).t()
    return torch._int_mm(a, b)[:rows, :columns].contiguous()


def scaled_mm_in_blocks(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    scaling_types: tuple[int, int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """`torch.nn.functional.scaled_mm` with scales of blocks of A and of B, as it wants them (`ScalingType`)."""
    of_a, of_b = scaling_types
    scales: tuple[Any, ...] = ([a_scale], [of_a], [], [b_scale], [of_b], [])
    result: Tensor = torch.ops.aten._scaled_mm_v2.default(a, b, *scales, bias, out_dtype, [], fast)
    return result


def is_op(target: object) -> TypeGuard[torch._ops.OpOverload]:
    """True for an overload of an op, such as `torch.ops.aten.mm.default`."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: object) -> bool:
    """True for an op that runs others, such as `torch.cond`."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def overload_of(target: object) -> torch._ops.OpOverload | None:
    """The overload that a target calls: an op without one named, as Inductor writes it, has one alone; or None."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    if isinstance(target, torch._ops.OpOverloadPacket) and target.overloads() == ["default"]:  # type: ignore[no-untyped-call]
        return target.default
    return None


def may_alias(node: fx.Node) -> bool:
    """True for an op whose result may lie in the memory of what it takes, by its schema."""
    return is_op(node.target) and any(one.alias_info is not None for one in node.target._schema.returns)


def keep_unused(op: torch._ops.OpOverload) -> None:
    """Have FX and Inductor keep calls of an op whose results nothing uses: other ranks wait for them."""
    from torch.fx.node import has_side_effect

    has_side_effect(op)


def autograd_kernel(op: torch._ops.OpOverload, backward: Callable[..., Any], setup_context: Any) -> Callable[..., Any]:
    """The kernel that `torch.library.register_autograd` registers: it takes the dispatch keys and the arguments."""
    from torch._library import autograd

    return autograd.make_autograd_impl(op, autograd.Info(backward, setup_context))


def goes_to_backend(keyset: Any) -> bool:
    """Whether an autograd kernel's dispatch keys hand its call on to an implementation on CPU or CUDA.

    Not so with tensors of a class that dispatches itself, or while something watches every op: fake tensors, tracing,
    functorch, and the like.
    """
    return _goes_to_backend(keyset.raw_repr())


@functools.cache
def _goes_to_backend(keys: int) -> bool:
    below = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_autograd_keyset
    return below.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def any_requires_grad(*args: Any) -> bool:
    """Whether torch.library's autograd kernel would record a call: some tensor, alone or in a list, requires grad."""
    return torch._C._any_requires_grad(*args)


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Ops called inside pass autograd's kernels by, as those do that an op's implementation calls."""
    guard: contextlib.AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard
