"""Fake tensors and symbolic sizes: sympy expressions, guards that exist, and computing without new ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import sympy
import torch


def expression(size: torch.SymInt) -> sympy.Expr:
    """The sympy expression of a SymInt, with what its shape environment has replaced since."""
    node = size.node
    shape_env = getattr(node, "shape_env", None)
    return node.expr if shape_env is None else shape_env.replace(node.expr)


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor is row-major; False where only some values of an unbacked size make it so."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        return tensor.is_contiguous()
    except GuardOnDataDependentSymNode:
        return False


def axes_by_stride(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions of a fake tensor from the largest stride to the smallest; None where that is not known yet."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    strides = tensor.stride()

    def known(first: int, second: int) -> bool:
        return bool(statically_known_true(strides[first] >= strides[second]))

    def compared(first: int, second: int) -> int:
        return known(second, first) - known(first, second)

    axes = range(tensor.dim())
    if not all(known(first, second) or known(second, first) for first, second in itertools.combinations(axes, 2)):
        return None
    return sorted(axes, key=functools.cmp_to_key(compared))


def statically_known_multiple(size: int | torch.SymInt, count: int) -> bool:
    """True when guards that exist already establish `size % count == 0`; adds none."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size % count == 0))


def guards_of(size: torch.SymInt) -> list[sympy.Basic]:
    """The conditions that existing guards state, of all sizes of this one's graph; adds none."""
    shape_env = getattr(size.node, "shape_env", None)
    return [] if shape_env is None else [shape_env.replace(guard.expr) for guard in shape_env.guards]


def is_floor_division(expr: sympy.Expr) -> bool:
    """True for torch's own `a // b` in sympy."""
    return type(expr).__name__ in ("FloorDiv", "CleanDiv")


def floor_division(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """Torch's own `a // b` in sympy; it may come out simpler."""
    from torch.utils._sympy.functions import FloorDiv

    division: sympy.Expr = FloorDiv(base, divisor)
    return division


def is_remainder(expr: sympy.Expr) -> bool:
    """True for torch's own `a % b` in sympy."""
    return type(expr).__name__ in ("Mod", "PythonMod")


def expected_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a fake tensor, where a size is symbolic those of the values that it was traced with; 0 unknown."""
    sizes: list[Any] = list(tensor.shape)
    known = [size if isinstance(size, int) else size.node.hint if size.node.has_hint() else 0 for size in sizes]
    return math.prod(map(int, known)) * tensor.dtype.itemsize


def free_symbols(tensor: object) -> set[Any]:
    """The symbols in the sizes, strides and offset of a fake tensor, or in a symbolic number."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return set(free_symbols(tensor))


def fake_mode_of(tensor: object) -> Any:
    """The fake mode that a tensor belongs to; None for other tensors."""
    return getattr(tensor, "fake_mode", None)


@contextlib.contextmanager
def without_guards(fake: torch.Tensor) -> Iterator[None]:
    """Compute with fake tensors of the mode `fake` belongs to, recording no guard.

    Ops that are decomposed take symbolic sizes only by their decompositions in Python.
    """
    from torch._dispatch.python import enable_python_dispatcher

    mode = fake_mode_of(fake)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(enable_python_dispatcher())
        yield
