"""Sizes of tensors: integers, or sympy expressions over positive integers. Comparisons are algebraic identities."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TypeAlias

import sympy

__all__ = ["Size", "canonical", "divided", "product", "quotient", "same"]

Size: TypeAlias = int | sympy.Expr


# --- sizes -------------------------------------------------------------------------------------------
def quotient(a: Size, b: Size) -> Size | None:
    """`a / b` when it is provably an integer, else None. Symbols stand for positive integers."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b != 0 and a % b == 0 else None
    return None if b == 0 else _ratio(a, b)


@functools.lru_cache(1 << 16)
def _ratio(a: Size, b: Size) -> Size | None:
    """The quotient where a size is symbolic. It is slow, and cached, since each layer asks for the same ones."""
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    if not _is_integer_polynomial(ratio):
        return None
    return int(ratio) if ratio.is_Integer else ratio


def divided(a: Size, b: Size) -> Size:
    """`a / b`, where it was proven to be an integer."""
    result = quotient(a, b)
    assert result is not None, f"{a} is a multiple of {b} by construction"
    return result


def _is_integer_polynomial(expr: sympy.Expr) -> bool:
    """True for sums of products of integers and integer atoms: no denominators left, integer at every point."""
    if expr.is_Integer:
        return True
    if expr.is_Add or expr.is_Mul:
        return all(_is_integer_polynomial(arg) for arg in expr.args)
    if expr.is_Pow:
        exponent = expr.exp
        return bool(exponent.is_Integer and exponent > 0 and _is_integer_polynomial(expr.base))
    return bool(expr.is_integer)


def same(a: Size, b: Size) -> bool:
    """True when `a == b` holds as an algebraic identity."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return canonical(result)


def canonical(size: Size) -> Size:
    """The one form of a size in which equal polynomials are equal values: an integer, or expanded."""
    if isinstance(size, int):
        return size
    expr = sympy.expand(size)
    return int(expr) if expr.is_Integer else expr
