"""Follow views in an FX graph: which nodes rearrange a source tensor, and by which index maps.

A new view is a row of `op_traits`. A new way of rearranging is a member of `View`, and its rule an entry of `RULES`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.matmuls import added_matrix
from asynctp_passes.ir.nodes import arguments, is_size, op_name, order_of, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.sizes import Size, Sizes, canonical, is_within, product, same_sizes
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.index_map import IndexMap, concatenate
from asynctp_passes.ops.checks import WIDENED
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import torch_ops

Pieces = tuple[IndexMap | None, ...]
Result = IndexMap | Pieces | Refusal | None


@dataclass(frozen=True)
class Terms:
    """The sum that a followed node is: each term as often as it `counts`, and then the sum times `factor`.

    All numbers are powers of two, or negatives of such (`scaling_of`); a factor that is a sign goes to the counts.
    """

    counts: Mapping[fx.Node, float]
    factor: float = 1.0


@dataclass
class Propagation:
    """The result of `propagate`.

    Attributes:
        maps: Index maps of the nodes that rearrange the source (or one of several like sources).
        pieces: Maps of the elements of nodes that return several tensors (split, chunk, unbind); None for elements that
            are no rearrangement of the source (other tensors that are waited for together).
        refused: Nodes that take a followed tensor, and whose op has no index map.
        terms: For a followed node, the sources whose sum it rearranges, and how often each counts. It is one source,
            unless sums are followed. A sum may have other terms too, laid out as the sources.
        lost: Other nodes that are computed from a source, and are not followed.
    """

    maps: dict[fx.Node, IndexMap] = field(default_factory=dict)
    pieces: dict[fx.Node, Pieces] = field(default_factory=dict)
    refused: dict[fx.Node, Refusal] = field(default_factory=dict)
    terms: dict[fx.Node, Terms] = field(default_factory=dict)
    lost: set[fx.Node] = field(default_factory=set)

    def is_unrelated(self, node: object) -> bool:
        """True for a node that comes from no source by the nodes that were visited."""
        known = (self.maps, self.pieces, self.refused, self.lost)
        return isinstance(node, fx.Node) and not any(node in found for found in known)

    def has(self, node: object) -> bool:
        """True when the node is followed."""
        return isinstance(node, fx.Node) and (node in self.maps or node in self.pieces)

    def users(self, node: fx.Node) -> list[fx.Node]:
        """The users of a followed node; of one that returns several tensors, those of followed elements."""
        pieces = self.pieces.get(node)
        if pieces is None:
            return list(node.users)
        return [user for user in node.users if op_name(user) != "getitem" or pieces[_index_of(user)] is not None]

    def all_users(self) -> list[fx.Node]:
        """The users of all followed nodes."""
        return [user for node in (*self.maps, *self.pieces) for user in self.users(node)]

    def uses(self) -> list[tuple[fx.Node, fx.Node]]:
        """The followed nodes that others use, not for their sizes alone, each with such a user."""
        pairs = ((node, user) for node in (*self.maps, *self.pieces) for user in self.users(node))
        return [(node, user) for node, user in pairs if not self.has(user) and not is_size(user)]


@dataclass(frozen=True)
class _Call:
    """One view op call being followed: its arguments by name, and the propagation so far."""

    node: fx.Node
    values: Mapping[str, Any]
    propagation: Propagation
    sizes: Sizes
    sums: bool

    @property
    def first(self) -> Any:
        """The op's first argument: of a view, the tensor that is viewed."""
        return next(iter(self.values.values()))

    @property
    def source(self) -> IndexMap:
        """The map of the tensor that is viewed."""
        return self.propagation.maps[self.first]

    def shape(self) -> tuple[Size, ...]:
        """The sizes of the op's result."""
        return self.sizes.of(value_of(self.node))

    def axis(self) -> int:
        """The dimension argument, counted from the front."""
        axis: int = self.values["dim"]
        return axis % len(self.source.dims)


def propagate(
    nodes: Iterable[fx.Node], sources: Mapping[fx.Node, IndexMap], sizes: Sizes, *, sums: bool = False
) -> Propagation:
    """Carry index maps from `sources` through every view among `nodes` (in graph order).

    With `sums` also through sums: of two tensors that have the same map, or of one in the sources' own order and any
    other of its shape. And through multiplications by powers of two and conversions to float32 that keep all values. A
    source that is `c + a @ b` has the terms of `c` too, or `c` itself.
    """
    propagation = Propagation(maps=dict(sources), terms={source: _once(source) for source in sources})
    for node in nodes:
        if node in sources:
            if sums and (added := added_matrix(node)) is not None:
                _join_added(propagation, node, added)
            continue
        handler = _handler(node, sums) if any(map(propagation.has, node.all_input_nodes)) else None
        if handler is not None:
            _record(propagation, node, _apply(handler, node, propagation, sizes, sums))
        elif not all(map(propagation.is_unrelated, node.all_input_nodes)):
            propagation.lost.add(node)
    return propagation


def _handler(node: fx.Node, sums: bool) -> Callable[[_Call], Result] | None:
    """The rule that carries maps through an op; None where following ends."""
    if sums and is_sum(node):
        return _widen if widens(node) else _scale if scaling_of(node) is not None else _add
    view = traits_of(node).view
    return None if view is None else RULES[view]


def sources_of(nodes: Iterable[fx.Node], sizes: Sizes) -> dict[fx.Node, IndexMap]:
    """Sources as they are, to be followed; not those whose value is unknown."""
    values = {node: tensor_of(node) for node in nodes}
    return {node: IndexMap.identity(sizes.of(value)) for node, value in values.items() if value is not None}


def _apply(
    handler: Callable[[_Call], Result], node: fx.Node, propagation: Propagation, sizes: Sizes, sums: bool
) -> Result:
    values = arguments(node) if torch_ops.is_op(node.target) else {"self": node.args[0], "index": node.args[1]}
    first = next(iter(values.values()))
    unknown = next((one for one in (*node.all_input_nodes, node) if "val" not in one.meta), None)
    if unknown is not None:
        return Refusal(reasons.SHAPE_UNKNOWN, unknown.name)
    of_others = handler in (_add, _written, _overwritten, _picked)
    if isinstance(first, fx.Node) and not propagation.has(first) and not of_others:
        return Refusal(reasons.VIEW_NOT_UNDERSTOOD, f"{node.name} rearranges another tensor")
    return handler(_Call(node, values, propagation, sizes, sums))


def _record(propagation: Propagation, node: fx.Node, result: Result) -> None:
    if result is None:
        return
    if not isinstance(result, Refusal):
        terms = _terms(propagation, node)
        if isinstance(terms, Refusal):
            result = terms
        else:
            propagation.terms[node] = terms
    if isinstance(result, Refusal):
        facts = f"{op_name(node)} {node.name}" + (f": {result.facts}" if result.facts else "")
        propagation.refused[node] = Refusal(result.reason, facts)
    elif isinstance(result, IndexMap):
        propagation.maps[node] = result
    else:
        propagation.pieces[node] = result


def _terms(propagation: Propagation, node: fx.Node) -> Terms | Refusal:
    """The terms of a followed node: views keep their inputs' one set of terms, an addition joins two disjoint ones."""
    sources = [arguments(node)["src"]] if traits_of(node).view is View.OVERWRITE else node.all_input_nodes
    sets = [propagation.terms[source] for source in sources if source in propagation.terms]
    sign = traits_of(node).sign
    if not sign:
        if any(terms != sets[0] for terms in sets):
            return Refusal(reasons.SUM_TERMS_DISAGREE, "pieces sum different terms")
        number = scaling_of(node)
        return sets[0] if number is None else _multiplied(sets[0], number)
    values = arguments(node)
    left, right = (propagation.terms.get(values[name], _once(values[name])) for name in ("self", "other"))
    return _sum_of(left, _with_sign(right, sign), value_of(node).dtype)


def _once(node: fx.Node) -> Terms:
    return Terms({node: 1.0})


def times(first: float, then: float) -> float | None:
    """The one number that does what multiplying by two powers of two does; None where there is none.

    Of 2 and 1/2 the first may go beyond what the dtype has, and the second not come back: both have to go one way. One
    of them may be a sign. Numbers far smaller than any dtype's range stay normal ones in float32.
    """
    both = first * then
    apart = min(abs(first), abs(then)) < 1 < max(abs(first), abs(then))
    return None if apart or not _is_power_of_two(both) else both


def _multiplied(terms: Terms, number: float) -> Terms | Refusal:
    """A sum, times a number: of one term, that counts so often more; of several, it is a factor of all."""
    if abs(number) == 1:
        return _with_sign(terms, number)
    if len(terms.counts) == 1 and terms.factor == 1:
        ((term, count),) = terms.counts.items()
        if (both := times(count, number)) is not None:
            return Terms({term: both})
    factor = times(terms.factor, number)
    if factor is None:
        return Refusal(reasons.COMPUTED_BETWEEN, f"multiplies by {number:g} what is multiplied by {terms.factor:g}")
    return Terms(terms.counts, factor)


def _with_sign(terms: Terms, sign: float) -> Terms:
    return Terms({term: count * sign for term, count in terms.counts.items()}, terms.factor)


def _sum_of(left: Terms, right: Terms, dtype: torch.dtype) -> Terms | Refusal:
    """The sum of two, of this dtype: a factor of either goes to its terms."""
    if left.counts.keys() & right.counts.keys():
        return Refusal(reasons.SUM_TERMS_DISAGREE, "a term is added twice")
    counts: dict[fx.Node, float] = {}
    for terms in (left, right):
        for term, count in terms.counts.items():
            if (each := distributed(count, terms.factor, dtype)) is None:
                return Refusal(reasons.COMPUTED_BETWEEN, f"multiplies a sum by {terms.factor:g}, and then adds to it")
            counts[term] = each
    return Terms(counts)


def distributed(count: float, factor: float, dtype: torch.dtype) -> float | None:
    """How often a term counts, in place of a factor of the whole sum; None where the sum would not be the same.

    A factor below 1 makes terms smaller than the program's: none of them overflows, nor does their sum, unless the
    program's does. Where they come to subnormal numbers each is off by half of the least one at most, as the program's
    result is; but of float16 these are numbers of every day. A factor above 1 may make of two terms infinities.
    """
    if factor == 1:
        return count
    return None if abs(factor) > 1 or dtype == torch.float16 else times(count, factor)


def _join_added(propagation: Propagation, source: fx.Node, added: fx.Node) -> None:
    """Sum the source `added + a @ b`, if `added` has its map or comes from no source; else it is not followed."""
    if propagation.is_unrelated(added) or propagation.maps.get(added) == propagation.maps[source]:
        terms = propagation.terms.get(added, _once(added))
        joined = _sum_of(propagation.terms[source], terms, value_of(source).dtype)
    else:
        reason = reasons.SUM_TERMS_DISAGREE if propagation.has(added) else reasons.SUM_HAS_OTHER_TERM
        joined = Refusal(reason, f"{op_name(source)} {source.name}")
    if isinstance(joined, Terms):
        propagation.terms[source] = joined
    else:
        propagation.refused[source] = joined
        del propagation.maps[source]


def is_view(node: fx.Node) -> bool:
    """True for ops that `propagate` knows how to follow (or to refuse by name)."""
    return traits_of(node).view is not None


def adds(node: fx.Node) -> bool:
    """True for an addition or a subtraction."""
    return traits_of(node).sign != 0


def is_sum(node: fx.Node) -> bool:
    """True for ops that `propagate` follows only in sums: additions, subtractions, and exact ops (see `propagate`)."""
    return adds(node) or scaling_of(node) is not None or widens(node)


def widens(node: fx.Node) -> bool:
    """True for a conversion to float32 that changes no value, as autocast has after the products of a backward."""
    before, after = tensor_of(node.args[0]) if traits_of(node).casts and node.args else None, tensor_of(node)
    if before is None or after is None or before.device != after.device:
        return False
    return before.dtype in WIDENED and after.dtype == torch.float32


def scaling_of(node: fx.Node) -> float | None:
    """The number that a node multiplies a tensor by, if it is a power of two, or the negative of one; else None.

    Such a multiplication is exact but at the ends of the dtype's range. So the fused op does it where the program does:
    after the product, not to an operand.
    """
    traits = traits_of(node)
    if not (traits.multiplies or traits.negates):
        return None
    values, out = arguments(node), tensor_of(node)
    before, other = tensor_of(values["self"]), values.get("other", -1)
    if before is None or out is None or before.dtype != out.dtype or not isinstance(other, int | float) or not other:
        return None
    number = 1 / other if traits.multiplies < 0 else float(other)
    fits = out.dtype.is_floating_point or abs(number) == 1
    return number if fits and _is_power_of_two(number) else None


def _is_power_of_two(number: float) -> bool:
    """True for one from 2^-32 to 2^32, and for the negative of one."""
    fraction, exponent = math.frexp(abs(number))
    return fraction == 0.5 and abs(exponent - 1) <= 32


def shares_memory(node: fx.Node) -> bool:
    """True for an op whose result may lie in the memory of what it takes: a view, listed here or by its schema."""
    return torch_ops.may_alias(node) or is_view(node)


def views_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes and every view of them, used or not, in graph order."""
    return sorted(reachable(nodes, lambda node: filter(is_view, node.users)))


# --- one function per kind of view -----------------------------------------------------------------------
def _slice(call: _Call) -> Result:
    axis, step = call.axis(), call.values.get("step", 1)  # a narrow has none
    if not isinstance(step, int):
        return Refusal(reasons.SIZES_NOT_PROVEN, "the step is symbolic")
    return call.source.narrow(axis, _from_front(call, call.values["start"]), call.shape()[axis], step)


def _from_front(call: _Call, start: Any) -> Size:
    """An index, or the first one of a slice, counted from the front and clamped as Python does."""
    axis = call.axis()
    whole = call.sizes.of(call.node.all_input_nodes[0].meta["val"])[axis]
    first = 0 if start is None else call.sizes.read(start)
    if isinstance(first, int) and first < 0:
        first = max(whole + first, 0) if isinstance(whole, int) else whole + first
    if isinstance(first, int) and isinstance(whole, int):
        first = min(first, whole)
    return first


def _split(call: _Call) -> Result:
    axis, pieces, start = call.axis(), list[IndexMap](), canonical(0)
    for value in call.node.meta["val"]:
        length = call.sizes.of(value)[axis]
        piece = call.source.narrow(axis, start, length)
        if isinstance(piece, Refusal):
            return piece
        pieces.append(piece)
        start = start + length
    return tuple(pieces)


def _unbind(call: _Call) -> Result:
    pieces = [call.source.select(call.axis(), index) for index in range(len(call.node.meta["val"]))]
    refused = next((piece for piece in pieces if isinstance(piece, Refusal)), None)
    return refused or tuple(piece for piece in pieces if isinstance(piece, IndexMap))


def _getitem(call: _Call) -> Result:
    pieces = call.propagation.pieces.get(call.values["self"])
    if pieces is None:
        return Refusal(reasons.VIEW_NOT_UNDERSTOOD, "indexing a tensor as a sequence")
    return pieces[_index_of(call.node)]


def _index_of(item: fx.Node) -> int:
    index = item.args[1]
    assert isinstance(index, int)
    return index


def _cat(call: _Call) -> Result:
    tensors: Sequence[Any] = call.first
    maps = [call.propagation.maps.get(tensor) for tensor in tensors]
    if any(piece is None for piece in maps):
        names = [tensor.name for tensor, piece in zip(tensors, maps, strict=True) if piece is None]
        return Refusal(reasons.VIEW_NOT_UNDERSTOOD, f"joins pieces with other tensors: {', '.join(names)}")
    terms = [call.propagation.terms[tensor] for tensor in tensors]
    if any(one != terms[0] for one in terms):
        names = [tensor.name for tensor in tensors]
        shared = set.intersection(*(set(one.counts) for one in terms))
        if any(source in call.propagation.maps for source in shared):
            facts = f"joins pieces of one product, with factors or terms of their own: {', '.join(names)}"
            return Refusal(reasons.COMPUTED_BETWEEN, facts)
        rows = call.values["dim"] % len(maps[0].dims) < len(maps[0].dims) - 1  # type: ignore[union-attr]
        return _joined(reasons.TAKEN_IN_PARTS if rows else reasons.VIEW_NOT_UNDERSTOOD, tensors)
    dtypes = {value_of(tensor).dtype for tensor in tensors}
    if len(dtypes) > 1:
        return Refusal(reasons.COMPUTED_BETWEEN, f"joins pieces of {', '.join(sorted(map(str, dtypes)))}")
    pieces = [piece for piece in maps if piece is not None]
    stacks = traits_of(call.node).view is View.STACK
    axis: int = call.values["dim"]
    axis %= len(pieces[0].dims) + stacks
    if stacks:
        pieces = [piece.insert(axis) for piece in pieces]
    return concatenate(pieces, axis)


def _bitcast(call: _Call) -> Result:
    before, after = value_of(call.first), value_of(call.node)
    if before.dtype.itemsize == after.dtype.itemsize:
        return call.source
    (source, *others), resized = call.propagation.terms[call.first].counts, None
    if not others and not call.sums:  # in sums an element may be converted to a wider one
        widths = (sympy.Rational(one.dtype.itemsize, value_of(source).dtype.itemsize) for one in (before, after))
        resized = call.source.resized(*map(canonical, widths))
    return resized or changes_elements(before.dtype, after.dtype)


def changes_elements(before: torch.dtype, after: torch.dtype) -> Refusal:
    """A refusal of elements that are seen as ones of another size, and not as what they were again."""
    return Refusal(reasons.VIEW_NOT_UNDERSTOOD, f"{before} seen as {after} changes the number of elements")


def _repeated(call: _Call, source: fx.Node) -> Result:
    """The map of a followed tensor, unless the result has its elements more than once."""
    before, after = call.sizes.of(value_of(source)), call.shape()
    if same_sizes(before, after):
        return call.propagation.maps[source]
    return Refusal(reasons.PIECES_REPEATED, f"{list(before)} to {list(after)}")


def _cast(call: _Call) -> Result:
    """A conversion to the dtype a tensor already has changes nothing; any other one changes values."""
    before, after = value_of(call.first), value_of(call.node)
    if (before.dtype, before.device) == (after.dtype, after.device):
        return call.source
    return Refusal(reasons.COMPUTED_BETWEEN, "converts to another dtype")


def _add(call: _Call) -> Result:
    """The map of a sum: that of its followed terms, which has to be the same for both."""
    left, right = call.values["self"], call.values["other"]
    followed = [node for node in (left, right) if call.propagation.has(node)]
    others = [node for node in (left, right) if not call.propagation.has(node)]
    a, b, out = tensor_of(left), tensor_of(right), value_of(call.node)
    unrelated = all(map(call.propagation.is_unrelated, others))
    if call.values["alpha"] != 1 or a is None or b is None or not unrelated:
        return Refusal(reasons.SUM_HAS_OTHER_TERM, "")
    terms = set[torch.dtype]().union(*(_dtypes(call, node) for node in followed))
    if not a.dtype == b.dtype == out.dtype or not _are_in(terms, out.dtype):
        return Refusal(reasons.SUM_TERMS_DISAGREE, "the terms have different dtypes")
    where, sizes = call.propagation.maps[followed[0]], [call.sizes.of(value) for value in (a, b)]
    if others and not (same_sizes(*sizes) and a.device == b.device and where == IndexMap.identity(sizes[0])):
        return Refusal(reasons.SUM_HAS_OTHER_TERM, f"{others[0].name} has another shape or order than the product")
    if any(call.propagation.maps[node] != where for node in followed):
        return Refusal(reasons.SUM_TERMS_DISAGREE, "the terms are laid out differently")
    return where


def _dtypes(call: _Call, node: fx.Node) -> set[torch.dtype]:
    """The dtypes of the sources that a node sums up."""
    return {value_of(term).dtype for term in call.propagation.terms[node].counts if call.propagation.has(term)}


def _are_in(terms: set[torch.dtype], dtype: torch.dtype) -> bool:
    """True when terms of one dtype are seen as that one, or were converted: nothing else makes float32 of them."""
    return len(terms) == 1 and (terms == {dtype} or (dtype == torch.float32 and terms <= set(WIDENED)))


def _widen(call: _Call) -> Result:
    """A conversion that keeps all values, of the products themselves: not of their bits seen as another dtype."""
    before = value_of(call.first)
    if _dtypes(call, call.first) != {before.dtype}:
        return Refusal(reasons.COMPUTED_BETWEEN, "converts products that are seen as another dtype")
    terms = call.propagation.terms[call.first]
    if before.dtype == torch.float16 and {abs(number) for number in (*terms.counts.values(), terms.factor)} != {1.0}:
        return Refusal(reasons.COMPUTED_BETWEEN, "multiplies products in float16, which the sum in float32 would not")
    return call.source


def _scale(call: _Call) -> Result:
    """A power of two is a factor of the terms, or of their sum (`Terms`)."""
    if not _are_in(_dtypes(call, call.first), value_of(call.first).dtype):
        return Refusal(reasons.COMPUTED_BETWEEN, "multiplies products that are seen as another dtype")
    return call.source


def _written(call: _Call) -> Result:
    """Rows of one product among others' rows, as in the sum that is the gradient of slices, are what `cat` joins."""
    rank, written = value_of(call.node).dim(), call.propagation.terms.get(call.values["src"])
    of_rows = call.values["dim"] % rank < rank - 1
    sources = [node for node in call.propagation.maps if node in call.propagation.terms[node].counts]
    if of_rows and written is not None and not all(node in written.counts for node in sources):
        return _joined(reasons.TAKEN_IN_PARTS, sources)
    return Refusal(reasons.VIEW_NOT_UNDERSTOOD, "one tensor is written into a part of another")


def _joined(reason: reasons.Reason, products: Iterable[fx.Node]) -> Refusal:
    return Refusal(reason, f"joins pieces of different products: {', '.join(node.name for node in products)}")


def _overwritten(call: _Call) -> Result:
    """The tensor that is written, where it is as large and of the same dtype; nothing is left of the other one."""
    source = call.values["src"]
    if not call.propagation.has(source):
        return None
    before, after = value_of(source), value_of(call.node)
    if (before.dtype, before.device) != (after.dtype, after.device):
        return Refusal(reasons.COMPUTED_BETWEEN, "converts what is written to another dtype")
    return _repeated(call, source)


def _picked(call: _Call) -> Result:
    """Picking rows by number: of fewer rows, by constants, it is how torch undoes the padding of uneven shards.

    Of so many rows as only a run shows, some are taken not to be picked.

    What is picked by a followed tensor's numbers is another one's.
    """
    if not call.propagation.has(call.first):
        return None
    before = value_of(call.first)
    if _is_picked(call.values, before.dim() - 1):
        return Refusal(reasons.NOT_ROWWISE, "picks elements of rows by number")
    ratio = _ratio(product(call.shape()), product(call.sizes.of(before)))
    if ratio == 1:
        return Refusal(reasons.PIECES_REORDERED, "picks rows by number")
    if ratio is not None and ratio > 1:
        return Refusal(reasons.PIECES_REPEATED, "picks rows by number")
    constant = all(_is_constant(node) for node in call.node.all_input_nodes if not call.propagation.has(node))
    return Refusal(reasons.UNEVEN_SHARDS if constant else reasons.PIECES_MISSING, "picks rows by number")


def _is_picked(values: Mapping[str, Any], axis: int) -> bool:
    """True for a lookup along this dimension of a tensor."""
    if "indices" in values and isinstance(values["indices"], list | tuple):
        return len(values["indices"]) > axis and values["indices"][axis] is not None
    return "dim" in values and values["dim"] is not None and values["dim"] % (axis + 1) == axis


def _ratio(a: Size, b: Size) -> float | None:
    """`a / b`; None when it is symbolic."""
    ratio = sympy.sympify(a) / sympy.sympify(b)
    return float(ratio) if ratio.is_number else None


def _is_constant(node: fx.Node) -> bool:
    """True for what is computed from no input of the graph."""
    made_of = reachable([node], lambda step: () if is_size(step) else step.all_input_nodes)
    return all(step.op != "placeholder" for step in made_of)


def _padded(call: _Call) -> Result:
    """Padding at the end is how torch evens out shards, by no row too; other padding shifts or widens the tensor."""
    pad, own, after = call.values["pad"], call.sizes.of(value_of(call.first)), call.shape()
    if not any(pad[::2]):
        if same_sizes(own, after):  # a number of rows that a guard says to be even
            return call.source
        if not all(is_within(canonical(size - kept), 0, sys.maxsize) for kept, size in zip(own, after, strict=True)):
            # the gradient of padding
            return Refusal(reasons.PIECES_MISSING, f"takes {list(after)} of {list(own)}")
    reason = reasons.UNEVEN_SHARDS if pads_at_end(pad) else reasons.VIEW_NOT_UNDERSTOOD
    return Refusal(reason, f"pads by {list(pad)}" + (f", with {value}" if (value := call.values["value"]) else ""))


def pads_at_end(pad: Sequence[object]) -> bool:
    """True for padding that leaves all that there is in its place: none in front, and none that cuts."""
    return all(not (isinstance(size, int) and (size < 0 or (size > 0 and i % 2 == 0))) for i, size in enumerate(pad))


def _reordered(call: _Call) -> Result:
    """Flips and rolls. Those of a row's elements leave the rows where they are."""
    rank = value_of(call.first).dim()
    if rank - 1 in {dim % rank for dim in call.values["dims"]}:
        return Refusal(reasons.NOT_ROWWISE, "reorders elements of rows")
    return Refusal(reasons.PIECES_REORDERED, "")


RULES: dict[View, Callable[[_Call], Result]] = {
    View.SAME: lambda call: call.source,
    View.RESHAPE: lambda call: call.source.reshape(call.shape()),
    View.PERMUTE: lambda call: call.source.permute(order_of(call.node, len(call.source.dims))),
    View.EXPAND: lambda call: _repeated(call, call.first),
    View.SLICE: _slice,
    View.SELECT: lambda call: call.source.select(call.axis(), _from_front(call, call.values["index"])),
    View.SPLIT: _split,
    View.UNBIND: _unbind,
    View.ITEM: _getitem,
    View.AWAIT_LIST: lambda call: tuple(call.propagation.maps.get(tensor) for tensor in call.values["tensors"]),
    View.CAT: _cat,
    View.STACK: _cat,
    View.CAST: _cast,
    View.BITCAST: _bitcast,
    View.PICK: _picked,
    View.PAD: _padded,
    View.WRITE: _written,
    View.OVERWRITE: _overwritten,
    View.REORDER: _reordered,
    View.REPEAT: lambda call: Refusal(reasons.PIECES_REPEATED, ""),
    View.OPAQUE: lambda call: Refusal(reasons.VIEW_NOT_UNDERSTOOD, ""),
}
"""How an index map goes through each way of rearranging a tensor."""
