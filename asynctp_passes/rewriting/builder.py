"""Make the nodes of a rewrite, each with a fake tensor, an origin and its place between in-place operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.nodes import value_of
from asynctp_passes.ir.operations import Collective, Matmul, ScaledOptions
from asynctp_passes.ir.sizes import Size, SizeExpression, divided, express, product, same, same_sizes
from asynctp_passes.ir.traversal import segments
from asynctp_passes.layout.placement import Rearrangement
from asynctp_passes.matching.chains import Chain
from asynctp_passes.planning.plan import Plan
from asynctp_passes.torch_private import symbolic_sizes

_aten = torch.ops.aten
INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "from_node", "seq_nr", "custom")
"""Entries of `meta` that a new node takes from the node that it stands for."""


class RewriteState:
    """A graph while it is rewritten.

    Attributes:
        segment: Between which in-place operations each node belongs, new ones too.
        kept_by_all: The gathers that every rank keeps.
        moved: The node that stands for one that was replaced: the result of one chain is often the input of the next.
        items: For the tensors of collectives of several, the marks of their places.
        fused: The fused op of each collective and matmul that became part of one.
        starts: For each fused op, the first node of its chain that communicates.
    """

    def __init__(self, graph: fx.Graph, plan: Plan) -> None:
        self.graph, self.plan, self.sizes, self.segment = graph, plan, plan.context.sizes, segments(graph)
        self.kept_by_all = {gather.node for gather in plan.kept_by_all}
        self.moved: dict[fx.Node, fx.Node] = {}
        self.items: dict[fx.Node, fx.Node] = {}
        self.fused: dict[fx.Node, fx.Node] = {}
        self.starts: dict[fx.Node, fx.Node] = {}


class Builder:
    """Makes nodes for one chain in front of `anchor`, each with a fake tensor and the origin of its collective.

    Symbolic sizes are computed from those of `inputs`, or else of what the collective communicates.

    Attributes:
        made: The nodes, in the order in which they were made.
        late: Those of them that may come late.
    """

    def __init__(
        self, state: RewriteState, collective: Collective, anchor: fx.Node, inputs: Sequence[fx.Node] = ()
    ) -> None:
        inputs = inputs or (collective.source,)
        self.state = state
        self.graph = state.graph
        self.sizes = state.sizes
        self.collective = collective
        self.made: list[fx.Node] = []
        self.late: list[fx.Node] = []
        self._anchor = anchor
        self._sources = state.sizes.sources([self.now(node) for node in inputs])
        self._fake = value_of(inputs[0])

    def now(self, node: fx.Node) -> fx.Node:
        """The node that stands for a node of the original graph now."""
        while node in self.state.moved:
            node = self.state.moved[node]
        return node

    def replace(self, old: fx.Node, new: fx.Node, *, unless: Container[fx.Node] = ()) -> None:
        """Give `new` to the users of `old`, but for those in `unless`, which are about to go."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in unless)
        self.state.moved[old] = new

    def call(
        self,
        target: Callable[..., Any],
        *args: Any,
        like: fx.Node | None = None,
        before: fx.Node | None = None,
        computes: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """A call of `target`; its value is computed on fake tensors, by `computes` where `target` cannot."""
        with self.graph.inserting_before(before or self._anchor):
            node = self.graph.call_function(target, args, kwargs)
        origin = like or self.collective.node
        node.meta.update({key: origin.meta[key] for key in INHERITED if key in origin.meta})
        self.evaluate(node, computes)
        self.state.segment[node] = self.state.segment[self._anchor]
        self.made.append(node)
        return node

    def evaluate(self, node: fx.Node, computes: Callable[..., Any] | None = None) -> None:
        """Compute the value of a call on fake tensors, by `computes` where its target cannot."""
        assert callable(node.target)
        with symbolic_sizes.without_guards(self._fake):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
            node.meta["val"] = (computes or node.target)(*args, **kwargs)

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        """The sizes of a node's tensor."""
        return self.sizes.of(value_of(node))

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """`node` with another shape; the node itself when it has that shape."""
        old = self.shape(node)
        if same_sizes(old, shape):
            return node
        symbolic = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
        lengths = [-1 if axis in symbolic[:1] else self.size(size) for axis, size in enumerate(shape)]
        return self.call(_aten.reshape.default, node, lengths)

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """`node` with dimensions reordered; the node itself when the order is the identity."""
        return node if list(order) == list(range(len(order))) else self.call(_aten.permute.default, node, list(order))

    def rearranged(self, node: fx.Node, way: Rearrangement) -> fx.Node:
        """Reshape and permute, unless nothing moves."""
        return node if way.is_reshape else self.permute(self.reshape(node, way.sizes), way.order)

    def first_rows(self, node: fx.Node, count: int) -> fx.Node:
        """The first rows of a matrix; the node itself when it has no more."""
        if same(self.shape(node)[0], count):
            return node
        return self.call(_aten.slice.Tensor, node, 0, 0, count)

    def bitcast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`node` seen as another dtype of the same size; the node itself when it has that dtype."""
        return node if value_of(node).dtype == dtype else self.call(_aten.view.dtype, node, dtype)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """`node` in row-major memory; the node itself when it is."""
        if symbolic_sizes.is_contiguous(value_of(node)):
            return node
        return self.call(_aten.clone.default, node, memory_format=torch.contiguous_format)

    def one(self) -> fx.Node:
        """The fp32 number 1, on the device of the chain."""
        return self.call(_aten.full.default, [], 1.0, dtype=torch.float32, device=self._fake.device)

    def size(self, size: Size) -> int | fx.Node:
        """An integer, or a node that computes a symbolic size from the sizes of the chain's inputs."""
        plan = express(size, self._sources)
        assert plan is not None, f"checked before: an input of {self.collective.node.name} carries the size {size}"
        return self._compute(plan)

    def _compute(self, plan: SizeExpression) -> int | fx.Node:
        if isinstance(plan, int):
            return plan
        kind, left, right = plan
        if kind == "of":
            return left.node if left.axis is None else self.call(_aten.sym_size.int, left.node, left.axis)
        return self.call(getattr(operator, kind), self._compute(left), self._compute(right))


# --- places: marks that stay while the nodes there are erased -------------------------------------------------------
def mark_front(state: RewriteState, place: fx.Node) -> fx.Node:
    """A new mark in front of a node. It stays where that is erased."""
    with state.graph.inserting_before(place):
        mark = state.graph.call_function(_asynctp_mark, ("front",))
    state.segment[mark] = state.segment[place]
    return mark


def mark_items(state: RewriteState, call: fx.Node) -> list[fx.Node]:
    """A mark for each tensor of a collective of several, in their order, whichever of them this rank takes in."""
    inputs = call.args[0]
    assert isinstance(inputs, list | tuple)
    marks = [mark_front(state, call) for _ in inputs]
    state.items |= {user: marks[int(user.args[1])] for user in call.users}  # type: ignore[arg-type]
    return marks


def place_of(state: RewriteState, chain: Chain) -> fx.Node:
    """The node that a chain's fused op comes before: a mark, where it follows another node, or is an item."""
    if chain.follows is None:
        return max(state.items.get(one.node, one.start) for one in chain.placed_by)
    last = chain.follows
    while last.next.target is _asynctp_mark and last.next.args == ("after",):
        last = last.next
    with state.graph.inserting_after(last):
        mark = state.graph.call_function(_asynctp_mark, ("after",))
    state.segment[mark] = state.segment[chain.follows]
    return mark


def erase_marks(graph: fx.Graph) -> None:
    """Erase all marks."""
    for mark in graph.find_nodes(op="call_function", target=_asynctp_mark):
        graph.erase_node(mark)


def _asynctp_mark(side: str) -> None:
    """Marks a place in a graph: at the `front` of a node, or `after` one."""


# --- a matmul's other operands, in the form that the fused ops take -------------------------------------------------
def right_operand(build: Builder, matmul: Matmul) -> fx.Node:
    """The right operand as [K, N]."""
    b = build.now(matmul.b)
    b = build.reshape(b, build.shape(b)[-2:])
    return build.permute(b, [1, 0]) if matmul.b_transposed else b


def row_bias(build: Builder, matmul: Matmul) -> fx.Node | None:
    """The bias as a vector [N]."""
    if matmul.bias is None:
        return None
    bias = build.now(matmul.bias)
    return build.reshape(bias, build.shape(bias)[-1:])


def row_scale(build: Builder, scaled: ScaledOptions, a: Sequence[Size]) -> fx.Node:
    """The scales of an A of these sizes: one number as it is; per row or block, in its dimensions."""
    scale, blocks = _fp32_scale(build, scaled.a_scale), scaled.blocks
    if blocks is None and same(product(build.shape(scale)), 1):
        return scale
    if blocks is not None and blocks.a_transposed:
        scale = build.permute(build.first_rows(scale, blocks.depth), (1, 0))
    return build.reshape(scale, shape_of_scales(a, scaled))


def column_scale(build: Builder, scaled: ScaledOptions) -> fx.Node:
    """The scale of the right operand: one number as it is, [1, N], or of blocks [K/128, N or N/128]."""
    scale, blocks = _fp32_scale(build, scaled.b_scale), scaled.blocks
    if blocks is not None:
        return build.first_rows(build.permute(scale, (1, 0)) if blocks.b_transposed else scale, blocks.depth)
    count = product(build.shape(scale))
    return scale if same(count, 1) else build.reshape(scale, (1, count))


def shape_of_scales(rows: Sequence[Size], scaled: ScaledOptions) -> list[Size]:
    """The shape of A's scales, by the sizes `rows` of A: one number a row, or those of its blocks."""
    return [*rows[:-2], divided(rows[-2], scaled.of_a.rows), scaled.of_a.numbers]


def _fp32_scale(build: Builder, scale: fx.Node | None) -> fx.Node:
    """A scale in fp32, which holds all that a scale of 16 bits does; None stands for 1."""
    if scale is None:
        return build.one()
    node = build.now(scale)
    if value_of(node).dtype == torch.float32:
        return node
    return build.call(torch.ops.prims.convert_element_type.default, node, torch.float32, like=scale)
