"""Sizes of tensors: integers, or sympy expressions over positive integers. Comparisons are algebraic identities.

`Sizes` reads them off a graph, and `express` tells how to compute one from what the graph carries.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from asynctp_passes.ir.nodes import tensor_of, value_of
from asynctp_passes.torch_private import symbolic_sizes

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


def rounded_up(size: Size, count: int) -> Size:
    """The least multiple of a number that is no less than a size."""
    if isinstance(size, int):
        return -(-size // count) * count
    above = size + count - 1
    return canonical(count * _quotient(above, above, sympy.Integer(count)))


def is_within(size: Size, least: int, most: int) -> bool:
    """True for a number from `least` to `most`, also one that is computed from what divisions of a symbol leave."""
    values = _values(size)
    return values is not None and least <= min(values) and max(values) <= most


def _values(size: Size) -> set[int] | None:
    """The values of a size, where what divisions of one symbol leave decides on them: `s - 4 * (s // 4)` is 0 to 3."""
    if isinstance(size, int):
        return {size}
    divisors = [floor.args[1] for floor in size.find(symbolic_sizes.is_floor_division)]
    if len(size.free_symbols) != 1 or not divisors or not all(one.is_Integer and one > 0 for one in divisors):
        return None
    (symbol,), period = size.free_symbols, math.lcm(*map(int, divisors))
    times = sympy.Symbol("times", integer=True, nonnegative=True)
    rests = range(period) if period <= _LONGEST_PERIOD else ()
    found = {
        canonical(size.subs(symbol, period * times + rest).replace(symbolic_sizes.is_floor_division, _floor))
        for rest in rests
    }
    return {int(one) for one in found} if found and all(isinstance(one, int) for one in found) else None


_LONGEST_PERIOD = 256


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


# --- sizes of tensors -----------------------------------------------------------------------------------------
def as_size(size: int | torch.SymInt) -> Size:
    """A dimension of a tensor as an integer, or as the expression that it is."""
    return symbolic_sizes.expression(size) if isinstance(size, torch.SymInt) else size


def identical(a: Any, b: Any) -> bool:
    """True for two sizes, integers or symbolic, that are provably equal."""
    if not (isinstance(a, int | torch.SymInt) and isinstance(b, int | torch.SymInt)):
        return False
    return same(as_size(a), as_size(b))


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """True for as many sizes of either, integers, symbolic ones or expressions, that are provably the same."""
    return len(a) == len(b) and all(same(as_size(one), as_size(other)) for one, other in zip(a, b, strict=True))


def are_one(sizes: Iterable[Any]) -> bool:
    """True for sizes that are provably 1."""
    return all(identical(size, 1) for size in sizes)


def differ(a: Any, b: Any) -> bool:
    """True for two sizes that are known and not the same."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def same_strides(a: fx.Node, b: fx.Node) -> bool:
    """True for tensors of one shape that provably have the same strides."""
    return all(map(identical, value_of(a).stride(), value_of(b).stride()))


# --- sizes of a graph -----------------------------------------------------------------------------------------
class Sizes:
    """Sizes of a graph's tensors as integers and sympy expressions in one canonical form.

    A symbol `s` may be known to be a multiple of the number of ranks of one of the graph's groups. Then it is written
    as `ranks * s'`. So `(s + ranks - 1) // ranks`, the local size of a sharded dimension, becomes `s'`.
    This uses what guards have established already and adds none. `divided` has sizes, each with a number that divides
    it wherever the graph runs to its end: a collective raises otherwise (`collectives.read_sizes`).
    """

    def __init__(self, graph: fx.Graph, ranks: Iterable[int] = (), divided: Iterable[tuple[Any, int]] = ()) -> None:
        counts = {count for count in ranks if count > 1}
        self._multiples: dict[sympy.Symbol, sympy.Expr] = {}
        symbols = _symbols(graph)
        guards = _comparisons(symbols)
        factors = _factors(divided)
        for symbol, size in symbols.items():
            known = (count for count in counts if _is_multiple(size, symbol, count, guards[symbol]))
            factor = math.lcm(factors.get(symbol, 1), *known)
            if factor > 1:
                self._multiples[symbol] = factor * sympy.Symbol(f"{symbol}/{factor}", integer=True, positive=True)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        numbers = [(self.read(node), node) for node in placeholders if isinstance(node.meta.get("val"), torch.SymInt)]
        self._numbers = [SizeSource(size, node) for size, node in numbers if not isinstance(size, int)]
        self._axes: dict[Size, SizeSource] = {}  # the first that carries a size: a later one would not be asked
        for source in self._carried(placeholders):
            self._axes.setdefault(source.size, source)

    def of(self, tensor: torch.Tensor) -> tuple[Size, ...]:
        """The sizes of a tensor."""
        return tuple(self.read(size) for size in tensor.shape)

    def read(self, value: Any) -> Size:
        """An integer, a SymInt, or a node that carries one."""
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        if isinstance(value, torch.SymInt):
            expr = symbolic_sizes.expression(value).subs(self._multiples)
            expr = expr.replace(symbolic_sizes.is_remainder, _remainder_by_floor)
            return canonical(expr.replace(symbolic_sizes.is_floor_division, _floor))
        return int(value)

    def difference(self, a: torch.Tensor, b: torch.Tensor, dim: int) -> Size:
        """How much longer `a` is than `b`, as the graph writes it: what is computed so has the graph's own sizes."""
        sizes = (sympy.sympify(as_size(tensor.shape[dim])).subs(self._multiples) for tensor in (a, b))
        difference = operator.sub(*sizes)
        return int(difference) if difference.is_Integer else difference

    def sources(self, inputs: Iterable[fx.Node]) -> list[SizeSource]:
        """The symbolic sizes that placeholders and `inputs` carry, those first that need nothing computed."""
        return [*self._numbers, *self._axes.values(), *self._carried(inputs)]

    def read_off(self, size: Size, inputs: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes among `sources(inputs)` that a size is computed from; it can be (`express`)."""
        return _nodes_in(express(size, self.sources(inputs)))

    def _carried(self, nodes: Iterable[fx.Node]) -> Iterator[SizeSource]:
        for node in nodes:
            value = tensor_of(node)
            for axis, size in enumerate(() if value is None else self.of(value)):
                if not isinstance(size, int):
                    yield SizeSource(size, node, axis)


def _symbols(graph: fx.Graph) -> dict[sympy.Symbol, torch.SymInt]:
    """The size symbols of a graph, each with a SymInt that is that symbol alone."""
    found: dict[sympy.Symbol, torch.SymInt] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                expr = symbolic_sizes.expression(size)
                if expr.is_Symbol:
                    found.setdefault(expr, size)
    return found


def _factors(divided: Iterable[tuple[Any, int]]) -> dict[sympy.Symbol, int]:
    """The numbers that divide symbols, where they divide these sizes: a symbol, or a number of times a symbol."""
    found: dict[sympy.Symbol, int] = {}
    for size, count in divided:
        times, symbol = sympy.sympify(as_size(size)).as_coeff_Mul()
        if symbol.is_Symbol and times.is_Integer and times > 0:
            found[symbol] = math.lcm(found.get(symbol, 1), count // math.gcd(count, int(times)))
    return found


def _comparisons(symbols: Mapping[sympy.Symbol, torch.SymInt]) -> dict[sympy.Symbol, list[sympy.Rel]]:
    """For each symbol, the comparisons of it alone that guards have made."""
    found: dict[sympy.Symbol, list[sympy.Rel]] = {symbol: [] for symbol in symbols}
    for guard in symbolic_sizes.guards_of(next(iter(symbols.values()))) if symbols else ():
        if isinstance(guard, sympy.Rel) and len(guard.free_symbols) == 1:
            (symbol,) = guard.free_symbols
            found.setdefault(symbol, []).append(guard)
    return found


def _is_multiple(size: torch.SymInt, symbol: sympy.Symbol, count: int, guards: Sequence[sympy.Rel]) -> bool:
    """True when guards that exist already establish `size % count == 0`; adds none. `guards`: of the symbol alone.

    They do so too by leaving no other remainder: that the pieces of a split are equal, say.
    """
    if symbolic_sizes.statically_known_multiple(size, count):
        return True
    times = sympy.Symbol("times", integer=True, nonnegative=True)
    others = ({symbol: count * times + rest} for rest in range(1, count))
    return all(any(_never_holds(guard, other) for guard in guards) for other in others)


def _never_holds(guard: sympy.Rel, values: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """True when a comparison is false for these values, whatever their symbols are."""
    left, right = (
        side.subs(values)
        .replace(symbolic_sizes.is_floor_division, _floor)
        .replace(symbolic_sizes.is_remainder, _remainder_by_floor)
        for side in guard.args
    )
    difference = sympy.expand(left - right)
    return bool(difference.is_Integer and guard.func(difference, 0) == sympy.false)


def _floor(division: sympy.Expr) -> sympy.Expr:
    """`base // divisor` with the part of `base` that the divisor divides taken out."""
    return _quotient(division, *division.args)


def _remainder_by_floor(modulo: sympy.Expr) -> sympy.Expr:
    """`base % divisor` as `base - base // divisor * divisor`, so that `n + -n % ranks` is a multiple of the ranks."""
    base, divisor = modulo.args
    if not divisor.is_Integer or divisor <= 0:
        return modulo
    return base - divisor * _quotient(modulo, base, divisor)


def _quotient(whole: sympy.Expr, base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """`base // divisor` in one form, whether it is rounded down or up; `whole` where the divisor is no number."""
    if (exact := quotient(base, divisor)) is not None:
        return sympy.sympify(exact)
    if not divisor.is_Integer or divisor <= 0:
        return whole
    times, rest = _divided_terms(base, divisor)
    if rest.is_Integer:
        return times
    if rest.could_extract_minus_sign():
        return times - _quotient(whole, divisor - 1 - rest, divisor)
    return times + symbolic_sizes.floor_division(rest, divisor)


def _divided_terms(base: sympy.Expr, divisor: sympy.Integer) -> tuple[sympy.Expr, sympy.Expr]:
    """The terms of a sum that a number divides, divided by it, and the other ones: of a number, what it leaves."""
    whole, rest = sympy.Integer(0), sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(base)):
        coefficient = term.as_coeff_Mul()[0]
        if term.is_Integer:
            whole += term // divisor
            rest += term % divisor
        elif coefficient.is_Integer and coefficient % divisor == 0:
            whole += term / divisor
        else:
            rest += term
    return whole, rest


# --- sizes as nodes -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SizeSource:
    """A place where the graph carries a symbolic size: a node that is that integer, or an axis of a tensor node."""

    size: Size
    node: fx.Node
    axis: int | None = None


SizeExpression = int | tuple[str, Any, Any]
"""How to compute a size: an integer, `("of", SizeSource, None)`, or `("mul" | "add" | "floordiv" | "mod", a, b)`."""


def _nodes_in(plan: SizeExpression | None) -> list[fx.Node]:
    if not isinstance(plan, tuple):
        return []
    kind, left, right = plan
    return [left.node] if kind == "of" else [*_nodes_in(left), *_nodes_in(right)]


def express(size: Size, sources: Sequence[SizeSource]) -> SizeExpression | None:
    """How to compute `size` from `sources`; None when they do not carry it."""
    if isinstance(size, int):
        return size
    for source in sources:
        own: SizeExpression = ("of", source, None)
        if same(source.size, size):
            return own
        if isinstance(times := quotient(size, source.size), int):
            return ("mul", own, times)
        if isinstance(part := quotient(source.size, size), int):
            return ("floordiv", own, part)
    if symbolic_sizes.is_floor_division(size) or symbolic_sizes.is_remainder(size):
        base, divisor = (express(int(arg) if arg.is_Integer else arg, sources) for arg in size.args)
        name = "floordiv" if symbolic_sizes.is_floor_division(size) else "mod"
        return None if base is None or divisor is None else (name, base, divisor)
    if isinstance(size, sympy.Mul | sympy.Add):
        parts = [express(int(arg) if arg.is_Integer else arg, sources) for arg in size.args]
        if all(part is not None for part in parts):
            name = "mul" if isinstance(size, sympy.Mul) else "add"
            return functools.reduce(lambda left, right: (name, left, right), parts)
    for source in sources:
        times = quotient(size, source.size)
        if times is not None and (rest := express(times, sources)) is not None:
            return ("mul", ("of", source, None), rest)
    return None
