"""Reading FX graphs: arguments by schema name, sizes as algebra, users, ancestors, mutations."""

from __future__ import annotations

import functools
import heapq
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from asynctp_passes import compat
from asynctp_passes.ir.op_traits import OpTraits, traits_named
from asynctp_passes.ir.sizes import Size, canonical, quotient, same

__all__ = [
    "SizeSource",
    "Sizes",
    "arguments",
    "call_of",
    "called_op",
    "describe",
    "describe_tensor",
    "draws",
    "express",
    "has_side_effect",
    "is_known_collective",
    "is_pointwise",
    "is_random",
    "is_size",
    "live",
    "module_of",
    "mutates",
    "name_of",
    "op_name",
    "path_of",
    "phase_of",
    "plain",
    "reachable",
    "segments",
    "source_of",
    "steps_of",
    "subgraphs_of",
    "tangents_of",
    "tensor_of",
    "traits_of",
    "value_of",
    "written_by",
]

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
#: What dynamo's paths to modules have besides names: the root, functions that close over a module, a dict.
_DETOURS = re.compile(
    r"^[LG]\['\w+'\]|(\.forward)?(\.__closure__\[\d+\]|\.cell_contents|\.__self__)+"
    r"|(?<=\.)_(modules|parameters|buffers)(?=\[)|\.__dict__\['_(modules|parameters|buffers)'\]"
)
_ITEM = re.compile(r"\.?\['([^']+)'\]")
_TORCH = str(Path(torch.__file__).parent)
_FUNCTIONALIZED = {"auto_functionalized", "auto_functionalized_v2"}
_IN_PLACE_FUNCTIONS = {"iadd", "iand", "imatmul", "imul", "ior", "ipow", "isub", "itruediv", "ixor", "setitem"}
_PROCESS_GROUPS = "c10d."  # what `torch.distributed` calls: such ops write, and their schemas do not say so
_SHORT_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}


def op_name(node: fx.Node) -> str:
    """`"aten.mm.default"` for a call of that overload, `"getitem"` for the builtin; empty for other nodes."""
    if node.op != "call_function":
        return ""
    if compat.is_op(node.target):
        return name_of(node.target)
    return str(getattr(node.target, "__name__", node.target))


@functools.cache
def name_of(op: Any) -> str:
    """The name of an overload, kept: it puts that together whenever it is asked, and passes ask many times a node."""
    return str(op)


def traits_of(node: fx.Node) -> OpTraits:
    """The facts about the op that a node calls (`op_traits`)."""
    return traits_named(op_name(node))


def called_op(node: fx.Node) -> Any:
    """The op that a node calls, also inside of `auto_functionalized`, which stands for an op that writes; or None."""
    target = node.args[0] if op_name(node) in _FUNCTIONALIZED and node.args else node.target
    return target if compat.is_op(target) else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op call by their schema names, defaults included."""
    if op_name(node) in _FUNCTIONALIZED:
        return dict(node.kwargs)
    assert compat.is_op(node.target)
    values: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args) and not argument.kwarg_only:
            values[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        else:
            values[argument.name] = argument.default_value
    return values


def is_size(node: fx.Node) -> bool:
    """True for reading a size of a tensor, which is no use of its values."""
    return traits_of(node).size


def tensor_of(node: object) -> torch.Tensor | None:
    """The fake tensor a node stands for, or None when it carries none."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def value_of(node: object) -> torch.Tensor:
    """The fake tensor of a node that is known to carry one."""
    value = tensor_of(node)
    assert value is not None, f"{node} is known to carry a tensor"
    return value


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """The gradients that come in, told by the names that autograd's tracing gives to a graph's inputs."""
    return [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents_")]


def phase_of(graph: fx.Graph) -> str:
    """ "forward", "backward" or "inference", told by the names of a graph's inputs too."""
    if tangents_of(graph):
        return "backward"
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    return "forward" if any(name.startswith("primals_") for name in inputs) else "inference"


def segments(graph: fx.Graph, *, between_draws: bool = False) -> dict[fx.Node, int]:
    """Number the stretches of the graph between in-place operations; each such operation opens a new one.

    Inside one stretch the graph is pure, so its nodes may be reordered freely along their data dependencies, and in the
    order of `draws`. With `between_draws` these open new ones too.
    """
    numbers: dict[fx.Node, int] = {}
    barriers = draws(graph) if between_draws else {}
    current = 0
    for node in graph.nodes:
        barrier = mutates(node) or node in barriers
        current += barrier
        numbers[node] = current
        current += barrier
    return numbers


def draws(graph: fx.Graph) -> dict[fx.Node, Sequence[fx.Node]]:
    """The ops that draw random numbers, if there are several, each with its inputs and the draw before it.

    They take the numbers of one stream, so that their order counts.
    """
    found = [node for node in graph.nodes if is_random(node)]
    ordered: dict[fx.Node, Sequence[fx.Node]] = {node: [*node.all_input_nodes, last] for last, node in pairwise(found)}
    return {found[0]: found[0].all_input_nodes, **ordered} if ordered else {}


def steps_of(
    graph: fx.Graph,
    owners: Mapping[fx.Node, fx.Node],
    inputs: Mapping[fx.Node, Sequence[fx.Node]],
    rank: Callable[[fx.Node], Any],
) -> list[list[fx.Node]]:
    """The graph's nodes in an order in which those of one owner are one step, the owner first.

    Args:
        graph: The graph.
        owners: The node that stands for a node's step; nodes that are not listed are steps of their own.
        inputs: What a node is computed from, where that is not `all_input_nodes`.
        rank: Orders steps, by owner, that do not wait for one another.

    Returns:
        The steps; without those that lie on a cycle, or after one, when each owner's nodes are one step.
    """
    members: dict[fx.Node, list[fx.Node]] = {}
    waiting: dict[fx.Node, set[fx.Node]] = {}
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        own = owners.get(node, node)
        members.setdefault(own, [own]).extend([node] if node is not own else [])
        sources = {owners.get(source, source) for source in inputs.get(node, node.all_input_nodes)}
        waiting.setdefault(own, set()).update(sources - {own})
    for own, sources in waiting.items():
        for source in sources:
            users.setdefault(source, []).append(own)
    place = {own: index for index, own in enumerate(waiting)}
    ready = [(rank(own), place[own], own) for own, sources in waiting.items() if not sources]
    heapq.heapify(ready)
    steps = []
    while ready:
        own = heapq.heappop(ready)[-1]
        steps.append(members[own])
        for user in users.get(own, ()):
            waiting[user].discard(own)
            if not waiting[user]:
                heapq.heappush(ready, (rank(user), place[user], user))
    return steps


def is_pointwise(node: fx.Node) -> bool:
    """True for an op that makes each element of its result from the elements at that place."""
    return compat.is_op(node.target) and torch.Tag.pointwise in node.target.tags


def subgraphs_of(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a higher-order op runs: of a region that is compiled once, of branches, of a loop's body."""
    if node.op != "call_function" or compat.is_op(node.target):
        return []
    names = (source.target for source in node.all_input_nodes if source.op == "get_attr")
    modules = (getattr(node.graph.owning_module, str(name), None) for name in names)
    return [module.graph for module in modules if isinstance(module, fx.GraphModule)]


def _does_inside(node: fx.Node, does: Callable[[fx.Node], bool]) -> bool:
    """True for a higher-order op that runs a node for which `does` holds."""
    inner = (step for graph in subgraphs_of(node) for step in graph.nodes)
    return any(does(step) for step in inner if step.op not in ("placeholder", "output"))


def is_random(node: fx.Node) -> bool:
    """True for an op that draws random numbers, or runs one that does: its place among such ops counts."""
    ops = (node.target,) if compat.is_op(node.target) else node.args  # run_and_save_rng_state takes the op that it runs
    drawn = any(compat.is_op(op) and torch.Tag.nondeterministic_seeded in op.tags for op in ops)
    return drawn or _does_inside(node, is_random)


def mutates(node: fx.Node) -> bool:
    """True for an in-place operation, for an op that runs one, and for a call that could be one."""
    if node.op in ("call_module", "call_method"):
        return True
    target = node.target
    if compat.is_op(target):
        return bool(target._schema.is_mutable) or name_of(target).startswith(_PROCESS_GROUPS)
    in_place = op_name(node).endswith("_mutation") or op_name(node) in _IN_PLACE_FUNCTIONS
    return in_place or _does_inside(node, mutates)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that an in-place operation changes; all that it takes, where its schema does not say."""
    if not compat.is_op(node.target) or not node.target._schema.is_mutable:
        return node.all_input_nodes if mutates(node) else []
    values = arguments(node)
    written = [
        one.name for one in node.target._schema.arguments if one.alias_info is not None and one.alias_info.is_write
    ]
    return nodes_in([values[name] for name in written])


def nodes_in(values: Any) -> list[fx.Node]:
    """The nodes among arguments, in lists and dictionaries too, in order; one as often as it is there."""
    found: list[fx.Node] = []
    fx.map_arg(values, found.append)
    return found


def filling_of(node: fx.Node) -> Any:
    """The argument or number that fills a tensor of one number everywhere, by its op; None for any other tensor."""
    constant = traits_of(node).constant
    return arguments(node)[constant] if isinstance(constant, str) else constant


def is_known_collective(node: fx.Node) -> bool:
    """True for ops of torch's functional collectives, their waits included, and for asynctp's."""
    return op_name(node).startswith(("_c10d_functional.", "asynctp."))


def has_side_effect(node: fx.Node) -> bool:
    """True for what does something besides computing its result: in place, with other ranks, by chance, or at all."""
    return (
        is_known_collective(node)
        or node.is_impure()
        or mutates(node)
        or is_random(node)
        or _does_inside(node, has_side_effect)
    )


def live(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the graph's results, or its in-place operations, are computed from, and these."""
    return reachable(node for node in graph.nodes if node.op == "output" or mutates(node))


def reachable(
    starts: Iterable[fx.Node],
    step: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
    where: Callable[[fx.Node], bool] = lambda node: True,
) -> set[fx.Node]:
    """The nodes that `step` leads to, the starts included, by nodes for which `where` holds; by default all inputs."""
    found: set[fx.Node] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in found and where(node):
            found.add(node)
            stack.extend(step(node))
    return found


def source_of(node: fx.Node) -> str | None:
    """`file:line` of the innermost frame of the user's that made the node, when tracing recorded it.

    Frames inside torch (DTensor's hooks, `nn.Linear`) are passed over.
    """
    trace = node.meta.get("stack_trace")
    frames = _FRAME.findall(trace) if isinstance(trace, str) else []
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return f"{own[-1][0]}:{own[-1][1]}" if own else None


def module_of(node: fx.Node) -> str | None:
    """Path, in what was compiled, of the innermost module that made the node, or whose backward it is of, if known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, dict) or not stack:
        return None
    *_, (path, *_) = stack.values()
    return path_of(path) or None


def path_of(source: str) -> str:
    """Dynamo's expression for a module, or for a tensor that one holds, as a path: `up.weight`; empty for the root."""
    return _ITEM.sub(r".\1", _DETOURS.sub("", source)).lstrip(".")


def describe(node: object) -> str:
    """A tensor's dtype and shape in short: `bf16[2, 4*s0, 64]`."""
    value = tensor_of(node)
    return "?" if value is None else describe_tensor(value)


def describe_tensor(value: torch.Tensor) -> str:
    """The same of a tensor itself."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{_SHORT_DTYPES.get(dtype, dtype)}[{', '.join(str(size) for size in value.shape)}]"


def call_of(node: fx.Node) -> dict[str, Any]:
    """An op's arguments by their schema names, fake tensors for nodes; without its group."""
    found = {name: value for name, value in arguments(node).items() if name != "group_name"}
    return {name: fx.map_arg(value, lambda source: source.meta["val"]) for name, value in found.items()}


def plain(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in plain values: of a tensor its dtype, shape and strides. Empty where one of these is symbolic.

    `{"a_shard": {"dtype": "bfloat16", "shape": [4, 8], "stride": [8, 1]}, "gather_dim": 0, ...}`
    """
    values = {name: _plain(value) for name, value in call.items()}
    return {} if _holds_symbols(list(values.values())) else values


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return {"dtype": _plain(value.dtype), "shape": list(value.shape), "stride": list(value.stride())}
    return value


def _holds_symbols(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, torch.SymInt) or any(map(_holds_symbols, items))


class Sizes:
    """Sizes of a graph's tensors as integers and sympy expressions in one canonical form.

    A symbol `s` that the shape environment knows to be a multiple of the number of ranks is written as
    `ranks * s'`, so that `(s + ranks - 1) // ranks`, the local size of a sharded dimension, becomes `s'`. This
    uses what guards have established already and adds none.

    Args:
        graph: The graph.
        ranks: Numbers of ranks of its groups.
        divided: Sizes, each with a number that divides it wherever the graph runs to its end: a collective raises
            otherwise (`read.read_sizes`).
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
            expr = compat.expression(value).subs(self._multiples)
            return canonical(expr.replace(compat.is_floor_division, _floor))
        return int(value)

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


def _floor(division: sympy.Expr) -> sympy.Expr:
    """`base // divisor` with the part of `base` that the divisor divides taken out."""
    base, divisor = division.args
    if (exact := quotient(base, divisor)) is not None:
        return sympy.sympify(exact)
    if not divisor.is_Integer or divisor <= 0:
        return division
    whole, rest = _divided_terms(base, divisor)
    if rest.is_Integer:
        return whole + int(rest) // int(divisor)
    return whole + division.func(rest, divisor)


def _remainder(modulo: sympy.Expr) -> sympy.Expr:
    """`base % divisor` as a number, where the divisor divides all of `base` but a number."""
    base, divisor = modulo.args
    if not divisor.is_Integer or divisor <= 0:
        return modulo
    _, rest = _divided_terms(base, divisor)
    return rest % divisor if rest.is_Integer else modulo


def _divided_terms(base: sympy.Expr, divisor: sympy.Integer) -> tuple[sympy.Expr, sympy.Expr]:
    """The terms of a sum that a number divides, divided by it, and the other ones."""
    whole, rest = sympy.Integer(0), sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(base)):
        coefficient = term.as_coeff_Mul()[0]
        if coefficient.is_Integer and coefficient % divisor == 0:
            whole += term / divisor
        else:
            rest += term
    return whole, rest


def as_size(size: int | torch.SymInt) -> Size:
    """A dimension of a tensor as an integer, or as the expression that it is."""
    return compat.expression(size) if isinstance(size, torch.SymInt) else size


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
    for guard in compat.guards_of(next(iter(symbols.values()))) if symbols else ():
        if isinstance(guard, sympy.Rel) and len(guard.free_symbols) == 1:
            (symbol,) = guard.free_symbols
            found.setdefault(symbol, []).append(guard)
    return found


def _is_multiple(size: torch.SymInt, symbol: sympy.Symbol, count: int, guards: Sequence[sympy.Rel]) -> bool:
    """True when guards that exist already establish `size % count == 0`; adds none. `guards`: of the symbol alone.

    They do so too by leaving no other remainder: that the pieces of a split are equal, say.
    """
    if compat.statically_known_multiple(size, count):
        return True
    times = sympy.Symbol("times", integer=True, nonnegative=True)
    others = ({symbol: count * times + rest} for rest in range(1, count))
    return all(any(_never_holds(guard, other) for guard in guards) for other in others)


def _never_holds(guard: sympy.Rel, values: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """True when a comparison is false for these values, whatever their symbols are."""
    left, right = (
        side.subs(values).replace(compat.is_floor_division, _floor).replace(compat.is_remainder, _remainder)
        for side in guard.args
    )
    difference = sympy.expand(left - right)
    return bool(difference.is_Integer and guard.func(difference, 0) == sympy.false)


def _symbols(graph: fx.Graph) -> dict[sympy.Symbol, torch.SymInt]:
    """The size symbols of a graph, each with a SymInt that is that symbol alone."""
    found: dict[sympy.Symbol, torch.SymInt] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                expr = compat.expression(size)
                if expr.is_Symbol:
                    found.setdefault(expr, size)
    return found


# --- sizes as nodes ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class SizeSource:
    """A place where the graph carries a symbolic size: a node that is that integer, or an axis of a tensor node."""

    size: Size
    node: fx.Node
    axis: int | None = None


SizeExpression = int | tuple[str, Any, Any]
"""How to compute a size: an integer, `("of", SizeSource, None)`, or `("mul" | "add" | "floordiv", a, b)`."""


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
    if compat.is_floor_division(size):
        base, divisor = (express(int(arg) if arg.is_Integer else arg, sources) for arg in size.args)
        return None if base is None or divisor is None else ("floordiv", base, divisor)
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
