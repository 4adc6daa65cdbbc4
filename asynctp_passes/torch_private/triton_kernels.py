"""Triton kernels that a program calls itself: torch's higher-order op of such a call, and the kernel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import fx

NAMESPACE = "triton"
"""The namespace of kernels, as if they were ops."""

_WRAPPERS = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")


def called_by(node: fx.Node) -> Any:
    """The kernel that a node calls, as Triton compiles it; None for other nodes."""
    if getattr(node.target, "__name__", None) not in _WRAPPERS:
        return None
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return compiled(kernel_side_table.id_to_kernel.get(node.kwargs.get("kernel_idx")))  # type: ignore[arg-type]


def tensors_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a kernel that are in the graph, by their names: tensors, and sizes that are symbols."""
    values: Any = node.kwargs["kwargs"]
    return dict(values)


def values_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call, by their names: those in the graph, and the numbers and flags that are constants."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    constants = kernel_side_table.constant_args.get(node.kwargs["constant_args_idx"], {})  # type: ignore[arg-type]
    return {**constants, **tensors_of(node)}


def constants_of(node: fx.Node) -> dict[str, list[Any]]:
    """The constants that a kernel is compiled with, by their names: what a call passes, and what its tuning tries."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.id_to_kernel.get(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    given = values_of(node)
    found = {name: [given[name]] for name in constants_named_by(compiled(kernel)) if name in given}
    while kernel is not compiled(kernel):
        for config in getattr(kernel, "configs", ()):
            for name, value in config.kwargs.items():
                found.setdefault(name, []).append(value)
        kernel = kernel.fn
    return found


def described_by_sizes(node: fx.Node) -> list[str]:
    """The tensors that a call passes by a TMA descriptor with sizes of its own, not by one of the tensor's sizes."""
    given: Any = node.kwargs.get("tma_descriptor_metadata") or {}
    return [name for name, (kind, _) in given.items() if kind != "stable"]


def compiled(kernel: Any) -> Any:
    """The function that Triton compiles of a kernel, without tuning and heuristics around it; None for what is none."""
    jit = sys.modules.get("triton.runtime.jit")
    while jit is not None and isinstance(kernel, jit.KernelInterface) and not isinstance(kernel, jit.JITFunction):
        kernel = getattr(kernel, "fn", None)
    return kernel if jit is not None and isinstance(kernel, jit.JITFunction) else None


def name_of(kernel: Any) -> str:
    """The name of a kernel: `"triton.rows_times_weight"`."""
    return f"{NAMESPACE}.{kernel.__name__}"


def key_of(kernel: Any) -> str:
    """The name of a kernel with a hash of all that it is compiled of: another one of its name has another key."""
    return f"{name_of(kernel)}.{kernel.cache_key}"


def constants_named_by(kernel: Any) -> Sequence[str]:
    """The names of a kernel's constants."""
    return [one.name for one in kernel.params if one.is_constexpr]


def arguments_of(kernel: Any, constants: bool = False) -> Sequence[str]:
    """The names of a kernel's arguments, without its constants unless these are asked for."""
    return [one.name for one in kernel.params if constants or not one.is_constexpr]
