"""Random small tensor-parallel programs, as FX graphs of functional collectives, views and matmuls.

A program is *honest* when every one of its chains gathers or scatters along one dimension in rank order, however it is
spelled, so that a pass should fuse all of them. It is *adversarial* when something is off: pieces reordered, repeated,
dropped or trimmed, a wrong dimension, a value changed or a tensor mutated on the way, a result that is also used
elsewhere. A pass may leave an adversarial program alone; it must not change what it computes.

    gather side     shard → all_gather → wait → view* → rows → {matmul (→ × numbers gathered apart), other users}
    quantized       shard → all_gather → wait → view* → {abs → amax → ... → scale; / → clamp → fp8} → rows → _scaled_mm
    scatter side    matmul (→ scales) → view* (→ fp32) → sum → view* → {reduce_scatter, all_reduce} → wait

`programs()` is the hypothesis strategy and `seeded_program(seed, ...)` the same generator on a plain random source, for
tests that must build one program in several processes.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import serving_ops  # noqa: F401  (defines torch.ops.vllm_like)
import torch
import torch.fx
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["Builder", "Input", "Program", "Wishes", "gather_views", "programs", "scatter_views", "seeded_program"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
autograd = torch.ops._c10d_functional_autograd
custom = torch.ops.vllm_like

#: Picks one of several options. Hypothesis draws, or a seeded random source chooses.
Choose = Callable[[Sequence[Any]], Any]
_Item = TypeVar("_Item")

OPEN_END = 9223372036854775807
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SAME_SIZE_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Input:
    """What a placeholder holds. `kind` is "data" (normal values) or "scale" (positive values)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "data"

    def make(self, generator: torch.Generator) -> Tensor:
        """A fresh tensor of random values with this layout."""
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "scale":
            values = values.abs() + 0.5
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        return tensor.copy_(values.to(self.dtype))


@dataclass(frozen=True)
class Program:
    """One graph that every rank runs.

    Attributes:
        graph: The graph; every node has a fake tensor in `meta["val"]`.
        inputs: What its placeholders hold.
        world_size: Number of ranks.
        groups: Tuples of ranks by group name.
        honest: Every chain should be fused.
        gathers: Number of all-gather → matmul chains, when honest.
        scatters: Number of matmul → reduce-scatter or all-reduce chains, when honest.
        beside: How many collectives there may be beside the fused ops, when honest, for other users of their operands.
        apart: Number of all-gathers for weight gradients alone, which are not fused.
        notes: What was chosen, in order; for the reader of a failure.
    """

    graph: torch.fx.Graph
    inputs: tuple[Input, ...]
    world_size: int
    groups: dict[str, tuple[tuple[int, ...], ...]]
    honest: bool
    gathers: int
    scatters: int
    beside: int
    apart: int
    notes: tuple[str, ...]

    def make_inputs(self, seed: int) -> list[list[Tensor]]:
        """Random placeholder values for every rank; no two ranks hold the same."""
        generators = [torch.Generator().manual_seed(seed * 64 + rank) for rank in range(self.world_size)]
        return [[value.make(generator) for value in self.inputs] for generator in generators]

    def __repr__(self) -> str:
        kind = "honest" if self.honest else "adversarial"
        return f"<{kind} program on {self.world_size} ranks: {'; '.join(self.notes)}\n{self.graph}>"


@dataclass(frozen=True)
class Wishes:
    """What kinds of program to generate; the defaults allow everything.

    Attributes:
        honest: Only honest programs (True), only others (False), or both (None).
        world_sizes: Numbers of ranks to choose from.
        dtypes: Operand dtypes to choose from; repeat one to make it likelier.
    """

    honest: bool | None = None
    world_sizes: tuple[int, ...] = (2, 4)
    dtypes: tuple[torch.dtype, ...] = (
        *(torch.float32,) * 4,
        *(torch.float64,) * 4,
        *(torch.bfloat16,) * 2,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )


@dataclass
class Builder:
    """Appends nodes to a graph and keeps their fake values. Sizes may be symbolic when `shape_env` is given.

    `adversarial` allows what no pass needs to follow, and `honest` becomes False once something of the kind was done.
    `neighbours` are results of what else was in a chain's list of tensors; nothing uses `unused` more of these.
    """

    choose: Choose
    world_size: int
    shape_env: ShapeEnv | None = None
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    inputs: list[Input] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    honest: bool = True
    adversarial: bool = False
    neighbours: list[Node] = field(default_factory=list)
    unused: int = 0

    def __post_init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        self._last_placeholder: Node | None = None

    def chance(self, one_in: int) -> bool:
        """True once in about `one_in` times."""
        return bool(self.choose([False] * (one_in - 1) + [True]))

    def note(self, text: str, *, spoils: bool = False) -> None:
        """Remember a choice, and whether it makes the program adversarial."""
        self.notes.append(text)
        self.honest = self.honest and not spoils

    def placeholder(
        self, shape: Sequence[int], dtype: torch.dtype, kind: str = "data", strides: Sequence[int] | None = None
    ) -> Node:
        """Add an input, after the other placeholders."""
        with self.mode:
            value = torch.empty(tuple(shape), dtype=dtype)
            if strides is not None:
                value = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
        first = next(iter(self.graph.nodes), None)
        place = self._last_placeholder or first
        name = f"arg{len(self.inputs)}"
        if place is None:
            node = self.graph.placeholder(name)
        elif self._last_placeholder is None:
            with self.graph.inserting_before(place):
                node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(place):
                node = self.graph.placeholder(name)
        self._last_placeholder = node
        node.meta["val"] = value
        self.inputs.append(Input(tuple(value.shape), tuple(value.stride()), dtype, kind))
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call, evaluated on fake tensors."""
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def call_like(self, value: Any, target: Any, *args: Any) -> Node:
        """Add a call that returns a value like `value`, for ops that fake tensors of some torch cannot run."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        return node

    def items(self, node: Node) -> list[Node]:
        """One getitem node for each tensor of a tuple-valued node."""
        return [self.call(operator.getitem, node, index) for index in range(len(node.meta["val"]))]

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """Reshape, in one of the spellings that are legal here."""
        options = [aten.reshape.default]
        if node.meta["val"].is_contiguous():
            options += [aten.view.default, aten._unsafe_view.default]
        return self.call(self.choose(options), node, list(shape))


def shape_of(node: Node) -> list[int]:
    """The shape of a node's value."""
    return list(node.meta["val"].shape)


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of a node's value."""
    return node.meta["val"].dtype  # type: ignore[no-any-return]


# --- views that move the ranks' blocks -----------------------------------------------------------------


def gather_views(b: Builder, gathered: Node, dim: int, count: int, attack: bool) -> Node:
    """From blocks along dimension 0 to blocks along `dim`: what `all_gather_tensor(shard, dim)` returns."""
    return _move_blocks(b, gathered, 0, dim, count, attack)


def scatter_views(b: Builder, full: Node, dim: int, count: int, attack: bool) -> Node:
    """From blocks along `dim` to blocks along dimension 0: what a reduce-scatter along `dim` starts from."""
    return _move_blocks(b, full, dim, 0, count, attack)


def _move_blocks(b: Builder, x: Node, source: int, dest: int, count: int, attack: bool) -> Node:
    """`cat(x.chunk(count, source), dest)` in some spelling; with an attack, something that looks alike."""
    kind = b.choose(_attacks(x, source, dest, count)) if attack else "none"
    if attack:
        b.note(f"attack {kind}", spoils=True)
    x = _harmless_views(b, x)
    if kind == "lossy":
        return _LOSSY[b.choose(_lossy_names(x))](b, _move_blocks(b, x, source, dest, count, attack=False))
    if kind == "not_moved":
        return b.reshape(x, _target_shape(x, source, dest, count))
    style = "permute" if kind == "permute" else "pieces" if attack else b.choose(_styles(x, source, dest, count))
    b.note(f"blocks {source} to {dest} of {shape_of(x)} by {style}")
    if style == "direct":
        moved = b.reshape(x, _target_shape(x, source, dest, count)) if source != dest else x
    elif style == "permute":
        moved = _move_by_permute(b, x, source, dest, count, wrong=kind == "permute")
    else:
        moved = _move_by_pieces(b, x, source, dest, count, kind)
    return _harmless_views(b, moved)


def _target_shape(x: Node, source: int, dest: int, count: int) -> list[int]:
    shape = shape_of(x)
    shape[source] //= count
    shape[dest] *= count
    return shape


def _styles(x: Node, source: int, dest: int, count: int) -> list[str]:
    passed = _target_shape(x, source, dest, count)[: max(source, dest)] if source == 0 else shape_of(x)[:source]
    direct = source == dest or math.prod(passed) == 1
    return ["pieces", "pieces", "permute", *(["direct"] * 2 if direct else [])]


def _attacks(x: Node, source: int, dest: int, count: int) -> list[str]:
    shape = shape_of(x)
    kinds = ["lossy", "reorder", "reverse", "repeat", "drop", "trim", "wrong_dim", "permute", "finer"]
    if "direct" not in _styles(x, source, dest, count):
        kinds.append("not_moved")
    return kinds if len(shape) > 1 else ["lossy", "reorder", "reverse", "repeat", "drop"]


def _move_by_permute(b: Builder, x: Node, source: int, dest: int, count: int, wrong: bool) -> Node:
    """View the blocks as a dimension of their own, move it, and merge it."""
    shape = shape_of(x)
    split = [*shape[:source], count, shape[source] // count, *shape[source + 1 :]]
    order = [axis for axis in range(len(split)) if axis != source]
    order.insert(dest, source)
    if wrong:
        order = _reorder(b, order)
    target = _target_shape(x, source, dest, count)
    return b.reshape(b.call(aten.permute.default, b.reshape(x, split), order), target)


def _move_by_pieces(b: Builder, x: Node, source: int, dest: int, count: int, attack: str) -> Node:
    """Take the blocks apart and join them along another dimension."""
    if attack == "finer" and shape_of(x)[source] % (2 * count) == 0:
        fine = _pieces(b, x, source, 2 * count)
        return _join(b, fine[::2] + fine[1::2], dest)
    pieces = _pieces(b, x, source, count)
    if attack in _PIECE_ATTACKS:
        pieces = _PIECE_ATTACKS[attack](b, pieces)
    if attack == "wrong_dim":
        dest = b.choose([dim for dim in range(len(shape_of(x))) if dim != dest])
    return _join(b, pieces, dest)


def _pieces(b: Builder, x: Node, dim: int, count: int) -> list[Node]:
    """The blocks of `x` along a dimension, in order, in one of the usual spellings."""
    shape = shape_of(x)
    size = shape[dim] // count
    style = b.choose(["split", "split_sizes", "chunk", "slice", "slice_open", "narrow", "select", "unbind"])
    b.note(f"pieces by {style}")
    dim_args = [] if dim == 0 and b.chance(2) else [dim - len(shape) if b.chance(4) else dim]
    if style == "split":
        return b.items(b.call(aten.split.Tensor, x, size, *dim_args))
    if style == "split_sizes":
        return b.items(b.call(aten.split_with_sizes.default, x, [size] * count, *dim_args))
    if style == "chunk":
        return b.items(b.call(aten.chunk.default, x, count, *dim_args))
    if style == "narrow":
        return [b.call(aten.narrow.default, x, dim, index * size, size) for index in range(count)]
    if style in ("slice", "slice_open"):
        return [_slice(b, x, dim, index, size, count, style == "slice_open") for index in range(count)]
    blocks = b.reshape(x, [*shape[:dim], count, size, *shape[dim + 1 :]])
    if style == "select":
        return [b.call(aten.select.int, blocks, dim, index) for index in range(count)]
    return b.items(b.call(aten.unbind.int, blocks, dim))


def _slice(b: Builder, x: Node, dim: int, index: int, size: int, count: int, use_open_ends: bool) -> Node:
    """One block as a slice; the first without a start and the last without an end, if so wished."""
    end = OPEN_END if use_open_ends and index == count - 1 else (index + 1) * size
    return b.call(aten.slice.Tensor, x, dim, index * size, end)


def _join(b: Builder, pieces: list[Node], dim: int) -> Node:
    """Join pieces along a dimension: `cat`, or `stack` and a reshape when they are of one shape."""
    pieces = [_harmless_view(b, piece) if b.chance(8) else piece for piece in pieces]
    shapes = [shape_of(piece) for piece in pieces]
    rank = len(shapes[0])
    if rank > 3 and 1 in shapes[0]:  # cat may follow its stride (channels last), which fake tensors do not know
        pieces = [b.call(aten.contiguous.default, piece) for piece in pieces]
    if all(shape == shapes[0] for shape in shapes) and b.chance(4):
        joined = [size * len(pieces) if axis == dim else size for axis, size in enumerate(shapes[0])]
        return b.reshape(b.call(aten.stack.default, pieces, dim), joined)
    fits = all(_fits(shape, shapes[0], dim) for shape in shapes)
    dim = dim if fits else next(axis for axis in range(rank) if all(_fits(shape, shapes[0], axis) for shape in shapes))
    dim_args = [] if dim == 0 and b.chance(2) else [dim - rank if b.chance(4) else dim]
    return b.call(aten.cat.default, pieces, *dim_args)


def _fits(shape: Sequence[int], other: Sequence[int], dim: int) -> bool:
    """Whether tensors of these shapes can be concatenated along `dim`."""
    return all(a == b for axis, (a, b) in enumerate(zip(shape, other, strict=True)) if axis != dim)


# --- attacks on the pieces -----------------------------------------------------------------------------


def _reorder(b: Builder, items: list[_Item]) -> list[_Item]:
    """Swap two."""
    first = b.choose(range(len(items)))
    second = b.choose([index for index in range(len(items)) if index != first])
    swapped = list(items)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return swapped


def _reverse(b: Builder, pieces: list[Node]) -> list[Node]:
    return pieces[::-1]


def _repeat(b: Builder, pieces: list[Node]) -> list[Node]:
    """One piece twice: instead of another one, or in addition."""
    index = b.choose(range(len(pieces)))
    if b.chance(2):
        return [*pieces, pieces[index]]
    return [pieces[index] if other == (index + 1) % len(pieces) else p for other, p in enumerate(pieces)]


def _drop(b: Builder, pieces: list[Node]) -> list[Node]:
    index = b.choose(range(len(pieces)))
    return pieces[:index] + pieces[index + 1 :]


def _trim(b: Builder, pieces: list[Node]) -> list[Node]:
    """Cut one element off one piece, or off all of them, along some dimension that has several."""
    dims = [dim for dim, size in enumerate(shape_of(pieces[0])) if size > 1]
    if not dims:
        return _drop(b, pieces)
    dim = b.choose(dims)
    start = b.choose([0, 1])
    end = OPEN_END if start else shape_of(pieces[0])[dim] - 1
    trimmed = [b.call(aten.slice.Tensor, piece, dim, start, end) for piece in pieces]
    return [*pieces[:-1], trimmed[-1]] if b.chance(2) else trimmed


_PIECE_ATTACKS: dict[str, Callable[[Builder, list[Node]], list[Node]]] = {
    "reorder": _reorder,
    "reverse": _reverse,
    "finer": _reverse,  # when the blocks are too small to be cut finer
    "repeat": _repeat,
    "drop": _drop,
    "trim": _trim,
}


# --- views that change nothing -------------------------------------------------------------------------


def _harmless_views(b: Builder, x: Node) -> Node:
    for _ in range(b.choose([0, 0, 0, 1, 2])):
        x = _harmless_view(b, x)
    return x


def _harmless_view(b: Builder, x: Node) -> Node:
    name = b.choose(list(_HARMLESS))
    b.note(name)
    return _HARMLESS[name](b, x)


def _clone(b: Builder, x: Node) -> Node:
    kwargs = {"memory_format": torch.contiguous_format} if b.chance(2) else {}
    return b.call(aten.clone.default, x, **kwargs)


def _contiguous(b: Builder, x: Node) -> Node:
    return b.call(aten.contiguous.default, x)


def _unsqueeze_squeeze(b: Builder, x: Node) -> Node:
    dim = b.choose(range(len(shape_of(x)) + 1))
    return b.call(aten.squeeze.dim, b.call(aten.unsqueeze.default, x, dim), dim)


def _permute_twice(b: Builder, x: Node) -> Node:
    order = _reorder(b, list(range(len(shape_of(x))))) if len(shape_of(x)) > 1 else [0]
    there = b.call(aten.permute.default, x, order)
    middle = _clone(b, there) if b.chance(2) else there
    return b.call(aten.permute.default, middle, [order.index(axis) for axis in range(len(order))])


def _flatten_and_back(b: Builder, x: Node) -> Node:
    shape = shape_of(x)
    flat = b.choose([[-1], [math.prod(shape)], [1, -1], [*shape, 1]])
    return b.reshape(b.reshape(x, flat), shape)


def _bits_and_back(b: Builder, x: Node) -> Node:
    dtype = dtype_of(x)
    bits = b.call(aten.view.dtype, x, _SAME_SIZE_INT[dtype.itemsize])
    return b.call(aten.view.dtype, _clone(b, bits) if b.chance(2) else bits, dtype)


def _split_and_cat(b: Builder, x: Node) -> Node:
    """Cut into ranks' blocks or not at all, or, in adversarial programs, anywhere; and join again."""
    dim = b.choose(range(len(shape_of(x))))
    whole = shape_of(x)[dim]
    blocks = whole // b.world_size if whole % b.world_size == 0 else whole
    size = b.choose(range(1, whole + 1) if b.adversarial else [whole, blocks])
    parts = b.items(b.call(aten.split.Tensor, x, size, dim))
    return b.call(aten.cat.default, parts, dim)


def _whole_slice(b: Builder, x: Node) -> Node:
    dim = b.choose(range(len(shape_of(x))))
    return b.call(aten.slice.Tensor, x, dim, 0, b.choose([OPEN_END, shape_of(x)[dim]]))


_HARMLESS: dict[str, Callable[[Builder, Node], Node]] = {
    "clone": _clone,
    "contiguous": _contiguous,
    "unsqueeze and squeeze": _unsqueeze_squeeze,
    "permute twice": _permute_twice,
    "flatten and back": _flatten_and_back,
    "bits and back": _bits_and_back,
    "split and cat": _split_and_cat,
    "whole slice": _whole_slice,
}


# --- views and ops that change something ---------------------------------------------------------------


def _lossy_names(x: Node) -> list[str]:
    """The attacks that a dtype allows."""
    return [name for name in _LOSSY if dtype_of(x) not in FP8 or name not in ("negate", "add one")]


def _flip(b: Builder, x: Node) -> Node:
    """The CPU flips no fp8, but the bytes of it."""
    dtype, axis = dtype_of(x), _wide_dim(b, x)
    if dtype not in FP8:
        return b.call(aten.flip.default, x, [axis])
    flipped = b.call(aten.flip.default, b.call(aten.view.dtype, x, torch.uint8), [axis])
    return b.call(aten.view.dtype, flipped, dtype)


def _roll(b: Builder, x: Node) -> Node:
    dim = _wide_dim(b, x)
    return b.call(aten.roll.default, x, [b.choose(range(1, max(2, shape_of(x)[dim])))], [dim])


def _stride(b: Builder, x: Node) -> Node:
    return b.call(aten.slice.Tensor, x, _wide_dim(b, x), 0, OPEN_END, 2)


def _cut(b: Builder, x: Node) -> Node:
    dim = _wide_dim(b, x)
    start = b.choose([0, 1]) if shape_of(x)[dim] > 1 else 0
    return b.call(aten.slice.Tensor, x, dim, start, OPEN_END if start else max(1, shape_of(x)[dim] - 1))


def _swap_halves(b: Builder, x: Node) -> Node:
    dim = _wide_dim(b, x)
    parts = b.items(b.call(aten.split.Tensor, x, max(1, shape_of(x)[dim] // 2), dim))
    return b.call(aten.cat.default, parts[::-1], dim)


def _double(b: Builder, x: Node) -> Node:
    return b.call(aten.cat.default, [x, x], b.choose(range(len(shape_of(x)))))


def _transpose_in_place_of(b: Builder, x: Node) -> Node:
    """Swap two dimensions, and call the result by the old shape."""
    shape = shape_of(x)
    order = _reorder(b, list(range(len(shape)))) if len(shape) > 1 else [0]
    return b.reshape(b.call(aten.permute.default, x, order), shape)


def _expand_one(b: Builder, x: Node) -> Node:
    """The first row, as often as there are rows."""
    first = b.call(aten.slice.Tensor, x, 0, 0, 1)
    return b.call(aten.expand.default, first, shape_of(x))


def _negate(b: Builder, x: Node) -> Node:
    return b.call(aten.neg.default, x)


def _add_one(b: Builder, x: Node) -> Node:
    return b.call(aten.add.Tensor, x, 1.0)


def _wide_dim(b: Builder, x: Node) -> int:
    """A dimension of more than one element, if there is any."""
    dims = [dim for dim, size in enumerate(shape_of(x)) if size > 1]
    return int(b.choose(dims or [0]))


_LOSSY: dict[str, Callable[[Builder, Node], Node]] = {
    "flip": _flip,
    "roll": _roll,
    "stride": _stride,
    "cut": _cut,
    "swap halves": _swap_halves,
    "double": _double,
    "transpose": _transpose_in_place_of,
    "expand": _expand_one,
    "negate": _negate,
    "add one": _add_one,
}


# --- matmuls -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recipe:
    """How the matmuls of one chain compute."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    rowwise: bool = False
    fast_accum: bool = False
    scaled_after: bool = False
    blocks: tuple[int, int] | None = None
    named: bool = False

    def scales(self, shape: Sequence[int]) -> list[int]:
        """The shape of the scales, one for each row or block, of a left operand of this one."""
        if self.blocks is None:
            return [*shape[:-1], 1]
        return [*shape[:-2], -(-shape[-2] // self.blocks[0]), -(-shape[-1] // 128)]


_BLOCKS = ((1, 128), (1, 1), (128, 1))
"""Scales of blocks, 128 of K deep: of how many rows of A, and columns of B."""


def _recipe(b: Builder, dtype: torch.dtype) -> _Recipe:
    if dtype not in FP8:
        return _Recipe(dtype, dtype)
    if b.chance(4):
        blocks = b.choose(_BLOCKS)
        b.note(f"scales of {blocks[0]}x128 and {blocks[1]}x128")
        named = b.chance(2)
        return _Recipe(dtype, b.choose([torch.bfloat16, torch.float32]), blocks=blocks, named=named)
    return _Recipe(dtype, b.choose([torch.bfloat16, torch.float32]), b.chance(2), b.chance(2))


def _right_operand(b: Builder, recipe: _Recipe, k: int, n: int) -> Node:
    """A [k, n] operand: column-major for scaled matmuls, else a plain one or a transposed weight."""
    dtype = torch.float8_e4m3fn if recipe.dtype in FP8 else recipe.dtype
    if recipe.dtype in FP8 and b.chance(2):
        return b.placeholder([k, n], dtype, strides=[1, k])
    if recipe.dtype in FP8 or b.chance(2):
        return b.call(aten.permute.default, b.placeholder([n, k], dtype), [1, 0])
    return b.placeholder([k, n], dtype)


def _matmul(b: Builder, recipe: _Recipe, rows: Node, right: Node, row_scale: Node | None) -> Node:
    """A matmul in some spelling; `[M, N]`."""
    n = shape_of(right)[1]
    if recipe.blocks is not None:
        assert row_scale is not None
        return _matmul_in_blocks(b, recipe, recipe.blocks, rows, right, row_scale)
    if recipe.dtype in FP8:
        assert row_scale is not None
        column_scale = b.placeholder([1, n] if recipe.rowwise else [], torch.float32, "scale")
        if b.chance(4):
            kind = [int(recipe.rowwise)]  # the values of torch.nn.functional.ScalingType
            sides = [[row_scale], kind, [], [column_scale], kind, []]
            options = [None, recipe.out_dtype, [], recipe.fast_accum]
            with b.mode:  # the fake op wants a stride of 1 from scales' dimension of one element, which means nothing
                value = torch.empty(shape_of(rows)[0], n, dtype=recipe.out_dtype)
            return b.call_like(value, aten._scaled_mm_v2.default, rows, right, *sides, *options)
        args = [None, None, recipe.out_dtype, *([True] if recipe.fast_accum else [])]
        return b.call(aten._scaled_mm.default, rows, right, row_scale, column_scale, *args)
    if b.chance(3):
        return b.call(aten.addmm.default, b.placeholder([n], recipe.dtype), rows, right)
    if b.chance(3):
        return _BATCHED[b.choose(list(_BATCHED))](b, rows, right)
    return b.call(aten.mm.default, rows, right)


def _matmul_in_blocks(
    b: Builder, recipe: _Recipe, blocks: tuple[int, int], rows: Node, right: Node, row_scale: Node
) -> Node:
    """A scaled matmul with scales of blocks, [M or M/128, K/128] for A, in one of torch's two spellings."""
    k, n = shape_of(right)
    depth, width = -(-k // 128), -(-n // blocks[1])
    padded = -(-depth // 4) * 4
    if blocks[1] == 1:
        column_scale = b.placeholder([n, depth], torch.float32, "scale", strides=[1, n])
        column_scale = column_scale if recipe.named else b.call(aten.permute.default, column_scale, [1, 0])
    else:
        column_scale = b.placeholder([padded, width], torch.float32, "scale", strides=[1, padded])
        if not recipe.named and padded != depth:
            column_scale = b.call(aten.slice.Tensor, column_scale, 0, 0, depth)
    if blocks[0] == 128 and recipe.named:  # one node for all products, as CSE leaves it
        turned = (user for user in row_scale.users if user.target is aten.permute.default)
        row_scale = next(turned, None) or b.call(aten.permute.default, row_scale, [1, 0])
    with b.mode:
        value = torch.empty(shape_of(rows)[0], n, dtype=recipe.out_dtype)
    if not recipe.named:
        args = (rows, right, row_scale, column_scale, None, None, recipe.out_dtype)
        return b.call_like(value, aten._scaled_mm.default, *args)
    kinds = [4 if size == 1 else 5 for size in blocks]  # the values of torch.nn.functional.ScalingType
    sides = [[row_scale], kinds[:1], [], [column_scale], kinds[1:], []]
    return b.call_like(value, aten._scaled_mm_v2.default, rows, right, *sides, None, recipe.out_dtype, [], False)


def _batch_of_one(b: Builder, rows: Node, right: Node) -> Node:
    pair = [b.call(aten.unsqueeze.default, matrix, 0) for matrix in (rows, right)]
    return b.call(aten.squeeze.dim, b.call(aten.bmm.default, *pair), 0)


def _batch_of_rows(b: Builder, rows: Node, right: Node) -> Node:
    """A matrix for each row, and one right operand for all."""
    (m, k), n = shape_of(rows), shape_of(right)[1]
    same = b.call(aten.expand.default, right, [m, k, n])
    return b.reshape(b.call(aten.bmm.default, b.reshape(rows, [m, 1, k]), same), [m, n])


def _batch_with_bias(b: Builder, rows: Node, right: Node) -> Node:
    bias = b.placeholder([1, shape_of(right)[1]], dtype_of(rows))
    pair = [b.call(aten.unsqueeze.default, matrix, 0) for matrix in (rows, right)]
    return b.call(aten.squeeze.dim, b.call(aten.baddbmm.default, bias, *pair), 0)


def _linear(b: Builder, rows: Node, right: Node) -> Node:
    m, k = shape_of(rows)
    bias = [b.placeholder([shape_of(right)[1]], dtype_of(rows))] if b.chance(2) else []
    product = b.call(aten.linear.default, b.reshape(rows, [1, m, k]), b.call(aten.t.default, right), *bias)
    return b.reshape(product, [m, shape_of(right)[1]])


def _matmul_of_any_rank(b: Builder, rows: Node, right: Node) -> Node:
    m, k = shape_of(rows)
    return b.reshape(b.call(aten.matmul.default, b.reshape(rows, [m, 1, k]), right), [m, shape_of(right)[1]])


_BATCHED: dict[str, Callable[[Builder, Node, Node], Node]] = {
    "a batch of one": _batch_of_one,
    "a batch of rows": _batch_of_rows,
    "a batch with a bias": _batch_with_bias,
    "linear": _linear,
    "matmul": _matmul_of_any_rank,
}


def _scaled_after(b: Builder, recipe: _Recipe, rows: Node, right: Node, attack: bool) -> Node:
    """A scaled matmul of scale 1 whose scales come behind it, in fp32, then rounding: rowwise training in torchao."""
    m, n = shape_of(rows)[0], shape_of(right)[1]
    spoiled = b.choose(_SCALE_ATTACKS) if attack and b.chance(2) else ""
    one = b.call(aten.full.default, [], 2.0 if spoiled == "own scale" else 1.0, dtype=torch.float32)
    dtype = b.choose([torch.float32, recipe.out_dtype])  # not rounded more than at the end
    fast = [True] if recipe.fast_accum else []
    out = b.call(aten._scaled_mm.default, rows, right, one, one, None, None, dtype, *fast)
    shapes = b.choose([[[m, 1], [1, n]], [[1, n], [m, 1]], [[m, 1]], [[1, n]], [[1], [1, n]], [[1, 1], [1]]])
    shapes = {"matrix": [[m, n]], "twice": [[m, 1], [m, 1]]}.get(spoiled, shapes)
    factors = [b.placeholder(shape, torch.float32, "scale") for shape in shapes]
    if len(factors) == 2 and b.chance(2):
        factors = [b.call(aten.mul.Tensor, *factors)]
    if spoiled:
        b.note(f"scale attack {spoiled}", spoils=True)
    for factor in factors:
        pair = (factor, out) if b.chance(3) else (out, factor)
        out = b.call(aten.mul.Tensor, *pair)
        if spoiled == "rounded":
            out = b.call(torch.ops.prims.convert_element_type.default, out, recipe.out_dtype)
    b.note("scales behind the product")
    if dtype_of(out) == recipe.out_dtype:
        return out
    return b.call(torch.ops.prims.convert_element_type.default, out, recipe.out_dtype)


_SCALE_ATTACKS = ["own scale", "matrix", "twice", "rounded"]


def _row_scale(b: Builder, recipe: _Recipe, left: Sequence[int]) -> Node | None:
    """A scale that every rank has of its own, for all rows of a left operand; None when the recipe has no scales."""
    if recipe.dtype not in FP8:
        return None
    by_rows = recipe.rowwise or recipe.blocks is not None
    return b.placeholder(recipe.scales(left) if by_rows else b.choose([[], [1]]), torch.float32, "scale")


# --- gather side ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """The process group of a chain, as the graph names it."""

    name: str
    size: int


def _all_gather(b: Builder, shard: Node, group: _Group) -> Node:
    if b.chance(4):
        return _in_a_list(b, c10d.all_gather_into_tensor_coalesced.default, shard, group, group.size, group.name)[1]
    namespace = autograd if dtype_of(shard) not in FP8 and b.chance(6) else c10d
    gathered = b.call(namespace.all_gather_into_tensor.default, shard, group.size, group.name)
    return b.call(c10d.wait_tensor.default, gathered)


def _in_a_list(b: Builder, op: Any, tensor: Node, group: _Group, *args: Any) -> tuple[Node, Node]:
    """A tensor's result of a collective of several, before and after the wait: for each item, or for all at once.

    There may be a neighbour in the list, used or not; what is waited for at once is waited for though it is not used.
    """
    tensors, place, together = [tensor], 0, b.chance(2)
    if b.chance(2):
        place = b.choose([0, 1])
        tensors.insert(1 - place, b.placeholder([group.size, 3], torch.float32))
    used = [index for index in range(len(tensors)) if index == place or b.chance(2)]
    b.note(f"item {place} of a list of {len(tensors)}, used {used}, waited for {'at once' if together else 'each'}")
    call = b.call(op, tensors, *args)
    taken = range(len(tensors)) if together else used
    items = {index: b.call(operator.getitem, call, index) for index in taken}
    if together:
        waited = b.call(c10d.wait_tensors.default, list(items.values()))
        done = {index: b.call(operator.getitem, waited, index) for index in used}
    else:
        done = {index: b.call(c10d.wait_tensor.default, items[index]) for index in used}
    b.neighbours += [done[index] for index in used if index != place]
    b.unused += len(tensors) - len(used)
    return items[place], done[place]


def _shard_shape(b: Builder, dtype: torch.dtype, blocks: tuple[int, int] | None = None) -> list[int]:
    rank = b.choose([2, 2, 3, 3, 3, 4])
    lead = [b.choose([1, 2, 3]) for _ in range(rank - 2)]
    if blocks is not None:
        return [*lead, b.choose([1, 2, 3]) if blocks[0] == 1 else 128, b.choose(_depths(blocks))]
    return [*lead, b.choose([1, 2, 3, 4]), b.choose([16] if dtype in FP8 else [2, 4, 8])]


def _depths(blocks: tuple[int, int]) -> list[int]:
    """K of products with such scales. Those of 128x128 blocks of A are not padded here: torch wants only 512 so."""
    return [128, 256, 272, 512] if blocks[0] == 1 else [512]


def _flatten_rows(b: Builder, x: Node) -> Node:
    """All dimensions but the last become rows."""
    shape = shape_of(x)
    if len(shape) == 2 and not b.chance(3):
        return x
    return b.reshape(x, [b.choose([-1, math.prod(shape[:-1])]), shape[-1]])


def _row_major(b: Builder, rows: Node) -> Node:
    """Rows that are contiguous, and no copy of others: the pass takes transposed ones for those of a weight's gradient.

    A copy of transposed rows counts as such.
    """
    return b.reshape(b.reshape(rows, [-1]), shape_of(rows))


def _gather_chain(b: Builder, dtype: torch.dtype, group: _Group, attack: bool) -> list[Node]:
    """shard → all_gather → wait → view* → rows → consumers; returns all results that live on."""
    recipe = _recipe(b, dtype)
    shape = _shard_shape(b, dtype, recipe.blocks)
    dim = b.choose([*range(len(shape) - 1)] * 3 + [len(shape) - 1])
    shard = _harmless_views(b, b.placeholder(shape, dtype))
    if not attack and b.chance(6):
        b.note("custom gather")
        full = b.call(custom.all_gather.default, shard, b.choose([dim, dim - len(shape)]), group.size, group.name)
        rows = _flatten_rows(b, full)
        return _consumers(b, recipe, rows, full, _row_scale(b, recipe, shape_of(rows)), attack=False)
    wait = _all_gather(b, shard, group)
    mutation = b.choose(["shard", "gathered", "none", "none", "none", "none", "none", "none"]) if attack else "none"
    if mutation == "shard" and dtype not in FP8:
        _mutate(b, shard, "shard")
    views_attack = attack and mutation == "none" and not b.chance(3)
    full = gather_views(b, wait, dim, group.size, views_attack)
    rows = _flatten_rows(b, full)
    if not attack and dim == len(shape) - 1:
        rows = _row_major(b, rows)
    row_scale = _row_scale(b, recipe, shape_of(rows))
    by_rows = recipe.rowwise or recipe.blocks is not None
    spoiled = attack and recipe.blocks is not None and not b.chance(3)
    if by_rows and (spoiled or not attack) and dim != len(shape) - 1 and b.chance(2):
        gathered = _gathered_scale(b, recipe.scales(shape), dim, group, attack=spoiled)
        row_scale = gathered if shape_of(gathered) == recipe.scales(shape_of(rows)) else row_scale
    if mutation == "gathered" and dtype not in FP8:
        _mutate(b, b.choose([wait, full, rows]), "gathered tensor")
    attack = attack and not views_attack
    if dtype in FP8 and dim != len(shape) - 1 and not by_rows and b.chance(2):
        numbers = _gathered_numbers(b, shape, dim, group, attack)
        outs = _consumers(b, recipe, rows, full, row_scale, attack)
        scaled = [out if out in (rows, full) else _times(b, out, numbers) for out in outs]
        return [*scaled, numbers] if attack and b.chance(3) else scaled
    return _consumers(b, recipe, rows, full, row_scale, attack)


def _gathered_scale(b: Builder, shape: list[int], dim: int, group: _Group, attack: bool) -> Node:
    """Scales of this shape, gathered like the rows; with an attack, in another way and perhaps not all of them."""
    b.note("scale gathered too")
    scale = b.placeholder(shape, torch.float32, "scale")
    full = gather_views(b, _all_gather(b, scale, group), dim, group.size, attack)
    scales = b.reshape(full, [-1, shape_of(full)[-1]])
    if attack and b.chance(2):
        b.note("blocks of K in another order")
        scales = b.call(aten.flip.default, scales, [1])
    return scales


def _gathered_numbers(b: Builder, shape: list[int], dim: int, group: _Group, attack: bool) -> Node:
    """One number per row, gathered like the rows (not so in an attack), to scale products with."""
    spoiled = b.choose(["views", "shape", "bf16", "sum", "mutated", "none"]) if attack else ""
    b.note(f"numbers gathered apart; attack {spoiled}", spoils=bool(spoiled))
    dtype = torch.bfloat16 if spoiled == "bf16" else torch.float32
    numbers = b.placeholder([*shape[:-1], 2 if spoiled == "shape" else 1], dtype, "scale")
    wait = _all_gather(b, numbers, group)
    full = gather_views(b, wait, dim, group.size, attack=spoiled == "views")
    if spoiled == "mutated":
        _mutate(b, wait, "gathered numbers")
    if spoiled == "sum":
        full = b.call(aten.sum.dim_IntList, full, [0], True)
    rows = b.reshape(full, [-1, shape_of(full)[-1]])
    return b.call(aten.reciprocal.default, rows) if b.chance(3) else rows


def _times(b: Builder, product: Node, numbers: Node) -> Node:
    """A product with its rows, and perhaps its columns, scaled in some association; and perhaps rounded."""
    if shape_of(numbers) != [shape_of(product)[0], 1]:  # what an attack has left
        numbers = b.call(aten.amax.default, numbers, [0, 1], True)
    factors = [numbers]
    if b.chance(2):
        factors.insert(b.choose([0, 1]), b.placeholder([1, shape_of(product)[1]], torch.float32, "scale"))
    if len(factors) == 2 and b.chance(2):
        factors = [b.call(aten.mul.Tensor, *factors)]
    for factor in factors:
        product = b.call(aten.mul.Tensor, *((factor, product) if b.chance(3) else (product, factor)))
    return b.call(_cast, product, torch.bfloat16) if b.chance(2) else product


def _mutate(b: Builder, x: Node, what: str) -> None:
    """Change a tensor in place, as a graph that is not functionalized may do; torch cannot write to an expanded one."""
    if 0 in x.meta["val"].stride():
        x = b.call(aten.clone.default, x)
    b.note(f"mutates the {what}", spoils=True)
    if b.chance(2):
        b.call(aten.add_.Tensor, x, 1.0)
    else:
        b.call(aten.copy_.default, x, b.placeholder(shape_of(x), dtype_of(x)))


def _consumers(b: Builder, recipe: _Recipe, rows: Node, full: Node, row_scale: Node | None, attack: bool) -> list[Node]:
    """One to three matmuls on the rows, and perhaps other users of them."""
    outs = [_consumer(b, recipe, rows, row_scale) for _ in range(b.choose([1, 1, 1, 2, 2, 3]))]
    if attack and recipe.dtype not in FP8:
        outs = [_ATTACKING_CONSUMERS[b.choose(list(_ATTACKING_CONSUMERS))](b, recipe, rows, outs)]
        b.note("attacking consumer", spoils=True)
    if recipe.dtype not in FP8 and b.chance(4):
        b.note("weight-gradient consumer")
        left = b.call(aten.permute.default, rows, [1, 0])
        outs.append(b.call(aten.mm.default, left, b.placeholder([shape_of(rows)[0], 3], recipe.dtype)))
    for user in (full, rows):
        if b.chance(5):
            b.note("gathered tensor used elsewhere")
            outs.append(user if recipe.dtype in FP8 else b.choose([_identity, _relu, _sum])(b, user))
    return outs


def _consumer(b: Builder, recipe: _Recipe, rows: Node, row_scale: Node | None) -> Node:
    k = shape_of(rows)[1]
    columns = [2, 3, 4, 8] if recipe.blocks is None else [2, 130]
    right = _right_operand(b, recipe, k, b.choose(columns))
    if recipe.dtype not in FP8 and b.chance(6):
        return _added_to_a_matrix(b, recipe, rows, right)
    return _matmul(b, recipe, rows, right, row_scale)


def _added_to_a_matrix(b: Builder, recipe: _Recipe, rows: Node, right: Node) -> Node:
    """`c + rows @ right` as one addmm, where `c` is an input, or a product of low rank of the same rows (LoRA)."""
    (m, k), n = shape_of(rows), shape_of(right)[1]
    if b.chance(2):
        return b.call(aten.addmm.default, b.placeholder([m, n], recipe.dtype), rows, right)
    low = b.call(aten.mm.default, rows, b.placeholder([k, 2], recipe.dtype))
    return b.call(aten.addmm.default, b.call(aten.mm.default, low, b.placeholder([2, n], recipe.dtype)), rows, right)


def _identity(b: Builder, x: Node) -> Node:
    return x


def _relu(b: Builder, x: Node) -> Node:
    return b.call(aten.relu.default, x)


def _sum(b: Builder, x: Node) -> Node:
    return b.call(aten.sum.dim_IntList, x, [0])


def _right_operand_from_gather(b: Builder, recipe: _Recipe, rows: Node, outs: list[Node]) -> Node:
    """rows @ (rowsᵀ @ y): the right operand needs the whole gather."""
    m = shape_of(rows)[0]
    right = b.call(aten.mm.default, b.call(aten.permute.default, rows, [1, 0]), b.placeholder([m, 2], recipe.dtype))
    return b.call(aten.mm.default, rows, right)


def _right_operand_from_other(b: Builder, recipe: _Recipe, rows: Node, outs: list[Node]) -> Node:
    """rows @ (z @ outs[0]): one fused matmul's right operand is another's result."""
    z = b.placeholder([shape_of(rows)[1], shape_of(outs[0])[0]], recipe.dtype)
    return b.call(aten.mm.default, rows, b.call(aten.mm.default, z, outs[0]))


def _gather_on_the_right(b: Builder, recipe: _Recipe, rows: Node, outs: list[Node]) -> Node:
    """x @ rows: the gathered tensor is the right operand."""
    return b.call(aten.mm.default, b.placeholder([2, shape_of(rows)[0]], recipe.dtype), rows)


def _scaled_bias(b: Builder, recipe: _Recipe, rows: Node, outs: list[Node]) -> Node:
    """addmm with alpha and beta, or with a bias for each row."""
    k = shape_of(rows)[1]
    right = b.placeholder([k, 2], recipe.dtype)
    if b.chance(2):
        return b.call(aten.addmm.default, b.placeholder([shape_of(rows)[0], 1], recipe.dtype), rows, right)
    return b.call(aten.addmm.default, b.placeholder([2], recipe.dtype), rows, right, beta=0.5, alpha=2)


def _mutated_right_operand(b: Builder, recipe: _Recipe, rows: Node, outs: list[Node]) -> Node:
    """Two matmuls on one right operand, which changes between them."""
    right = b.placeholder([shape_of(rows)[1], 2], recipe.dtype)
    first = b.call(aten.mm.default, rows, right)
    _mutate(b, right, "right operand")
    return b.call(aten.add.Tensor, first, b.call(aten.mm.default, rows, right))


_ATTACKING_CONSUMERS: dict[str, Callable[[Builder, _Recipe, Node, list[Node]], Node]] = {
    "right operand from gather": _right_operand_from_gather,
    "right operand from other": _right_operand_from_other,
    "gather on the right": _gather_on_the_right,
    "scaled bias": _scaled_bias,
    "mutated right operand": _mutated_right_operand,
}


# --- gather side, quantized by rows --------------------------------------------------------------------


@dataclass(frozen=True)
class _Quantizer:
    """How rows are quantized, whole or in blocks of 128, or all by one scale: every use of it appends the same ops."""

    dtype: torch.dtype
    flatten_first: bool
    power_of_two: bool
    relu: bool
    attack: str = ""
    in_blocks: bool = False
    columns_first: bool = False
    by_one: bool = False

    def __call__(self, b: Builder, x: Node) -> tuple[Node, Node]:
        """The rows [m, k] of `x` in fp8, and their scales [m, 1], or [m, k/128] if in blocks."""
        width = shape_of(x)[-1]
        x = b.call(aten.relu.default, x) if self.relu else x
        x = b.call(aten.reshape.default, x, [-1, width]) if self.flatten_first else x
        x = b.reshape(x, [*shape_of(x)[:-1], width // 128, 128]) if self.in_blocks else x
        scale = self._scale(b, x)
        limit = torch.finfo(self.dtype).max
        quotient = b.call(aten.div.Tensor, b.call(_cast, x, torch.float32), scale)
        clamped = b.call(aten.clamp_max.default, b.call(aten.clamp_min.default, quotient, -limit), limit)
        quantized = b.call(_cast, clamped, self.dtype)
        rows = b.call(aten.reshape.default, quantized, [-1, width])
        if self.attack == "scales flipped":
            scale = b.call(aten.flip.default, scale, [0])
        numbers = width // 128 if self.in_blocks else 1
        each = numbers if math.prod(shape_of(scale)) > 1 else 1
        scale = b.call(aten.reshape.default, scale, [-1, each])
        scale = b.call(aten.expand.default, scale, [shape_of(rows)[0], numbers])
        if self.in_blocks and self.columns_first:
            columns = b.call(aten.clone.default, b.call(aten.t.default, scale), memory_format=torch.contiguous_format)
            scale = b.call(aten.t.default, columns)
        if self.attack or self.by_one:
            scale = b.call(aten.clone.default, scale, memory_format=torch.contiguous_format)
        return rows, scale

    def _scale(self, b: Builder, x: Node) -> Node:
        """The largest element of each row over the largest fp8 number; with an attack, of something else."""
        positive, every = b.call(aten.abs.default, x), list(range(len(shape_of(x))))
        if self.attack == "sum of each row":
            found = b.call(aten.sum.dim_IntList, positive, [-1], True)
        else:
            dims = every if self.by_one else every[:-1] if self.attack == "amax of columns" else [-1]
            found = b.call(aten.amax.default, positive, dims, True)
        scale = b.call(_cast, b.call(aten.clamp_min.default, found, 1e-6), torch.float32)
        scale = b.call(aten.div.Tensor, scale, torch.finfo(self.dtype).max)
        if self.power_of_two:
            scale = b.call(aten.exp2.default, b.call(aten.ceil.default, b.call(aten.log2.default, scale)))
        if (
            self.attack == "amax of columns"
        ):  # one number for each column scales them; the matmul takes that of the first
            scale = b.call(aten.slice.Tensor, scale, -1, 0, 1)
        return scale


_cast = torch.ops.prims.convert_element_type.default
_QUANTIZER_ATTACKS = ["amax of columns", "sum of each row", "scales flipped"]


def _quantized_chain(b: Builder, dtype: torch.dtype, group: _Group, attack: bool) -> tuple[list[Node], int]:
    """shard → all_gather → wait → view* → quantized by rows → _scaled_mm; and how many collectives may stay beside."""
    in_blocks = b.chance(3)
    shape = _shard_shape(b, FP8[0])
    shape[-1] = b.choose([128, 256]) if in_blocks else shape[-1]
    dim = b.choose(range(len(shape) - 1))
    kind = b.choose(["views", "quantizer", "quantizer", "factor", "factor", "mutation"]) if attack else "none"
    shard = _harmless_views(b, b.placeholder(shape, dtype))
    if b.chance(6) and kind != "views":
        b.note("custom gather")
        wait = full = b.call(custom.all_gather.default, shard, dim, group.size, group.name)
    else:
        wait = _all_gather(b, shard, group)
        full = gather_views(b, wait, dim, group.size, kind == "views")
    if kind == "factor":
        full = _FACTORS[b.choose(list(_FACTORS))](b, full)
    quantizer_attack = b.choose(_QUANTIZER_ATTACKS) if kind == "quantizer" else ""
    in_blocks = in_blocks and shape_of(full)[-1] % 128 == 0  # an attack may have cut columns off
    choices = (b.choose(FP8), b.chance(2), b.chance(2), b.chance(3))
    by_one = b.chance(3)
    quantize = _Quantizer(*choices, quantizer_attack, in_blocks, in_blocks and b.chance(2), by_one)
    form = f"{'blocks' if in_blocks else 'rows'}{', by one scale' if by_one else ''}"
    b.note(f"quantized by {form}; attack {kind} {quantizer_attack}", spoils=attack)
    rows, scale = quantize(b, full)
    if kind == "mutation":
        _mutate(b, b.choose([wait, full]), "gathered tensor")
    return _quantized_consumers(b, quantize, full, rows, scale)


def _quantized_consumers(
    b: Builder, quantize: _Quantizer, full: Node, rows: Node, scale: Node
) -> tuple[list[Node], int]:
    """Matmuls on the rows, on rows quantized once more in the same way, or scaled after the matmul; and other users."""
    style = b.choose(["scaled", "scaled", "scaled afterwards"]) if not quantize.in_blocks else "scaled"
    one = b.placeholder([], torch.float32, "scale") if style == "scaled afterwards" else None
    outs = []
    for index in range(b.choose([1, 1, 2, 3])):
        if index and b.chance(2):
            rows, scale = quantize(b, full)
        outs.append(_quantized_product(b, quantize, rows, scale, one))
    users = b.choose(["none", "none", "gathered", "rows", "scale"])
    b.note(f"{style}, users {users}")
    if users == "gathered":
        outs.append(_sum(b, full))
    if users in ("rows", "scale"):
        outs.append(rows if users == "rows" else scale)
    used = len(outs) if users != "none" or style == "scaled afterwards" else 0
    return outs, used + quantize.by_one


def _quantized_product(b: Builder, quantize: _Quantizer, rows: Node, scale: Node, one: Node | None) -> Node:
    """A product of quantized rows, scaled by the matmul, or with `one` there and by the rows' scales afterwards."""
    recipe = _Recipe(quantize.dtype, torch.bfloat16, rowwise=True)
    if quantize.in_blocks:
        named = b.chance(2)
        recipe = _Recipe(quantize.dtype, torch.bfloat16, blocks=b.choose(_BLOCKS[:2]), named=named)
    k, n = shape_of(rows)[1], b.choose([2, 4, 8] if not quantize.in_blocks else [4, 130])
    right = _right_operand(b, recipe, k, n)
    if one is None:
        return _matmul(b, recipe, rows, right, scale)
    product = b.call(aten._scaled_mm.default, rows, right, one, one, None, None, torch.bfloat16)
    return b.call(aten.mul.Tensor, product, scale)


def _factor_of_rank(b: Builder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, x, b.placeholder(b.choose([[], [1], [shape_of(x)[-1]]]), dtype_of(x)))


def _factor_of_rows(b: Builder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, x, b.placeholder([*shape_of(x)[:-1], 1], dtype_of(x)))


def _factor_of_itself(b: Builder, x: Node) -> Node:
    """Multiplied by itself with its rows in another order."""
    return b.call(aten.mul.Tensor, x, b.choose([_flip, _roll, _transpose_in_place_of])(b, x))


def _factor_of_all_ranks(b: Builder, x: Node) -> Node:
    """Multiplied by the largest of all its elements."""
    return b.call(aten.mul.Tensor, x, b.call(aten.amax.default, x, list(range(len(shape_of(x)))), True))


_FACTORS: dict[str, Callable[[Builder, Node], Node]] = {
    "of the rank": _factor_of_rank,
    "of the rows": _factor_of_rows,
    "of itself": _factor_of_itself,
    "of all ranks": _factor_of_all_ranks,
}


def _gather_for_a_gradient(b: Builder, group: _Group) -> Node:
    """Rows gathered for a weight's gradient alone: `rowsᵀ @ y`, or `yᵀ @ rows`."""
    shape = [b.choose([1, 2]), b.choose([2, 3]), b.choose([2, 4])]
    gathered = b.call(c10d.all_gather_into_tensor.default, b.placeholder(shape, torch.float32), group.size, group.name)
    wait = b.call(c10d.wait_tensor.default, gathered)
    rows = b.reshape(gather_views(b, wait, b.choose([0, 1]), group.size, attack=False), [-1, shape[-1]])
    rows = _row_major(b, rows)
    other = b.placeholder([shape_of(rows)[0], 3], torch.float32)
    left, right = (rows, other) if b.chance(2) else (other, rows)
    return b.call(aten.mm.default, b.call(aten.permute.default, left, [1, 0]), right)


# --- scatter side --------------------------------------------------------------------------------------


def _scatter_chain(b: Builder, dtype: torch.dtype, group: _Group, attack: bool, source: Node | None) -> list[Node]:
    """matmuls → view* → sum → view* → collective → wait; `source` is the first left operand, if given."""
    recipe = _recipe(b, dtype_of(source) if source else dtype)
    if recipe.dtype in FP8 and recipe.blocks is None and b.chance(2):
        recipe = replace(recipe, scaled_after=True)
    whole = b.chance(4)
    shape, dim = _full_shape(b, group, source)
    if recipe.blocks is not None:
        shape[-2] *= recipe.blocks[0]
        shape[-1] *= b.choose([1, 34])
    total, product = _summed_products(b, recipe, shape, source, attack)
    views_attack = attack and b.honest and not b.chance(4)
    if not attack and b.chance(6):
        b.note("custom scatter")
        if whole:
            return [b.call(custom.all_reduce.default, total, group.name)]
        return [b.call(custom.reduce_scatter.default, total, dim, group.size, group.name)]
    # an all-reduce of a product whose columns moved is not fused, as it is not sent in the order of the product's rows
    moves = not whole or views_attack or dim < len(shape) - 1
    blocks = scatter_views(b, total, dim, group.size, views_attack) if moves else total
    blocks = blocks if whole else _divisible(b, blocks, group.size)
    if len(shape_of(blocks)) > 2 and b.chance(4):
        blocks = b.reshape(blocks, [-1, shape_of(blocks)[-1]])
    if attack and b.chance(8) and dtype_of(blocks) not in FP8:
        _mutate(b, b.choose([blocks, product]), "product")
    return _reduce(b, blocks, product, group, attack, whole)


def _full_shape(b: Builder, group: _Group, source: Node | None) -> tuple[list[int], int]:
    """The shape that is scattered, and along which dimension."""
    if source is not None:
        rows = shape_of(source)[0]
        if rows % group.size == 0 and b.chance(2):
            return [rows, b.choose([2, 4])], 0
        return [1, rows, b.choose([1, 2]) * group.size], 1 if rows % group.size == 0 else 2
    rank = b.choose([2, 2, 3, 3, 4])
    dim = b.choose([*range(rank - 1)] * 3 + [rank - 1])
    shape = [b.choose([1, 2, 3]) for _ in range(rank - 1)] + [b.choose([2, 4])]
    shape[dim] = group.size * b.choose([1, 2, 3])
    return shape, dim


def _summed_products(
    b: Builder, recipe: _Recipe, shape: list[int], source: Node | None, attack: bool
) -> tuple[Node, Node]:
    """The sum of one to three products in the given shape, and one of the products."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    count = b.choose([1, 1, 2, 3])
    products = []
    # of what is not rounded elsewhere too: fp32 results would show which of two neighbours that came to
    converts = recipe.out_dtype is torch.bfloat16 and not recipe.scaled_after and source is None and b.chance(2)
    for index in range(count):
        depths = [16] if recipe.dtype in FP8 else [2, 4, 8]
        depths = depths if recipe.blocks is None else _depths(recipe.blocks)
        k = shape_of(source)[1] if source and index == 0 else b.choose(depths)
        left = source if source and index == 0 else b.placeholder([rows, k], recipe.dtype)
        right = _right_operand(b, recipe, k, columns)
        if recipe.scaled_after:
            products.append(_scaled_after(b, recipe, left, right, attack))
        elif (
            converts and recipe.dtype not in FP8
        ):  # others may round to another neighbour, which fp32 results would show
            products.append(b.call(aten.mm.default, left, right))
        else:
            products.append(_matmul(b, recipe, left, right, _row_scale(b, recipe, [rows, k])))
    early = b.chance(2)
    terms = [_shaped(b, product, shape) for product in products] if early else list(products)
    terms = _converted(b, terms, attack) if converts else terms
    if b.chance(4) and not recipe.scaled_after:
        terms[-1] = _times_a_power_of_two(b, terms[-1])
    if attack and b.chance(3):
        terms.append(_OTHER_TERMS[b.choose(list(_OTHER_TERMS))](b, terms[0]))
        b.note("other term in the sum", spoils=True)
    if b.chance(4):
        b.note("term that is no product")
        other = b.call(aten.relu.default, b.placeholder(shape_of(terms[0]), dtype_of(terms[0])))
        terms.insert(b.choose(range(len(terms) + 1)), other)
    total = terms[0]
    for term in terms[1:]:
        total = _add(b, total, term, attack)
    if len(terms) > 1 and b.chance(5):
        total = _times_a_power_of_two(b, total)
    return (total if early else _shaped(b, total, shape)), products[0]


def _converted(b: Builder, terms: list[Node], attack: bool) -> list[Node]:
    """Terms in fp32, as autocast leaves them behind products of bf16; in attacks, one is rounded again, or none."""
    b.note("terms converted to fp32")
    found = [_harmless_views(b, b.call(_cast, term, torch.float32)) for term in terms]
    spoiled = b.choose(["rounded", "left", "integers"]) if attack and b.chance(2) else ""
    if spoiled:
        b.note(f"conversion attack {spoiled}", spoils=True)
    if spoiled == "left":
        found[-1] = terms[-1]
    if spoiled == "rounded":
        found[-1] = b.call(_cast, b.call(_cast, found[-1], torch.bfloat16), torch.float32)
    if spoiled == "integers":
        found[-1] = b.call(_cast, b.call(aten.view.dtype, terms[-1], torch.float16), torch.float32)
    return found


def _times_a_power_of_two(b: Builder, x: Node) -> Node:
    """As an adapter's scaling."""
    b.note("times a power of two")
    target, *numbers = b.choose(
        [(aten.mul.Tensor, 0.25), (aten.mul.Tensor, 2), (aten.div.Tensor, -8), (aten.neg.default,)]
    )
    return b.call(target, x, *numbers)


def _shaped(b: Builder, x: Node, shape: list[int]) -> Node:
    return _harmless_views(b, b.reshape(x, shape) if shape_of(x) != shape else x)


def _add(b: Builder, left: Node, right: Node, attack: bool) -> Node:
    if attack and b.chance(4):
        b.note("scaled sum", spoils=True)
        return b.call(aten.add.Tensor, left, right, alpha=2)
    alike = len(shape_of(left)) == 2 and dtype_of(left) is dtype_of(right)
    if right.target is aten.mm.default and alike and b.chance(2):
        b.note("sum by addmm")
        return b.call(aten.addmm.default, left, *right.args)
    pair = (right, left) if b.chance(3) else (left, right)
    return b.call(aten.sub.Tensor if b.chance(6) else aten.add.Tensor, *pair)


def _term_of_data(b: Builder, like: Node) -> Node:
    return b.placeholder(shape_of(like), dtype_of(like))


def _term_of_one_row(b: Builder, like: Node) -> Node:
    return b.placeholder([*[1] * (len(shape_of(like)) - 1), shape_of(like)[-1]], dtype_of(like))


def _term_of_relu(b: Builder, like: Node) -> Node:
    return b.call(aten.relu.default, like)


def _term_flipped(b: Builder, like: Node) -> Node:
    return b.call(aten.flip.default, like, [0])


_OTHER_TERMS: dict[str, Callable[[Builder, Node], Node]] = {
    "data": _term_of_data,
    "one row": _term_of_one_row,
    "relu": _term_of_relu,
    "flipped": _term_flipped,
}


def _divisible(b: Builder, x: Node, count: int) -> Node:
    """Attacks may leave a first dimension that cannot be scattered: repeat it until it can."""
    if shape_of(x)[0] % count == 0:
        return x
    return b.call(aten.cat.default, [x] * count)


def _reduce(b: Builder, blocks: Node, product: Node, group: _Group, attack: bool, whole: bool) -> list[Node]:
    """Reduce-scatter, or all-reduce if the `whole` sum is wanted on every rank."""
    reduce_op: str = b.choose(["sum", "sum", "avg"])
    if attack and b.chance(8):
        reduce_op = "max"
        b.note("reduces by max", spoils=True)
    one, several, size = c10d.reduce_scatter_tensor, c10d.reduce_scatter_tensor_coalesced, (group.size,)
    if whole:
        one, several, size = c10d.all_reduce, c10d.all_reduce_coalesced, ()
    if b.chance(4):
        scattered, wait = _in_a_list(b, several.default, blocks, group, reduce_op, *size, group.name)
    else:
        scattered = b.call(one.default, blocks, reduce_op, *size, group.name)
        wait = b.call(c10d.wait_tensor.default, scattered)
    outs = [b.reshape(wait, [-1, shape_of(wait)[-1]]) if b.chance(4) else wait]
    if b.chance(4):
        outs.append(b.call(aten.mul.Tensor, wait, 2.0))
    if attack and b.chance(3):
        name = b.choose(list(_LEAKS))
        b.note(f"leaks {name}", spoils=True)
        outs.append(_LEAKS[name](b, blocks, product, scattered))
    return outs


_LEAKS: dict[str, Callable[[Builder, Node, Node, Node], Node]] = {
    "the product": lambda b, blocks, product, scattered: product,
    "the blocks": lambda b, blocks, product, scattered: blocks,
    "the sum of the product": lambda b, blocks, product, scattered: _sum(b, product),
    "the unwaited result": lambda b, blocks, product, scattered: scattered,
    "a second wait": lambda b, blocks, product, scattered: b.call(c10d.wait_tensor.default, scattered),
}


# --- whole programs ------------------------------------------------------------------------------------


def _build(choose: Choose, wishes: Wishes) -> Program:
    """Choose and build one program."""
    b = Builder(choose, choose(list(wishes.world_sizes)))
    honest = choose([True, False, False]) if wishes.honest is None else wishes.honest
    b.adversarial = not honest
    dtype = choose(list(wishes.dtypes))
    gather_group, scatter_group, groups = _groups(b)
    quantized = ["quantized"] if dtype not in FP8 and not set(FP8).isdisjoint(wishes.dtypes) else []
    form = choose(["gather", "scatter", "both", "both apart", *quantized])
    attack_gather = not honest and form != "scatter" and (form == "gather" or b.chance(2))
    attack_scatter = not honest and not attack_gather
    b.note(f"{form} in {dtype}")
    outs: list[Node] = []
    place = b.choose(["none", "none", "before", "after"])
    gradient = [_gather_for_a_gradient(b, b.choose([gather_group, scatter_group]))] if place == "before" else []
    beside = 0
    if form == "quantized":
        outs, beside = _quantized_chain(b, dtype, gather_group, attack_gather or not honest)
    elif form != "scatter":
        outs += _gather_chain(b, dtype, gather_group, attack_gather)
    if form not in ("gather", "quantized"):
        source = _relu(b, outs[0]) if form == "both" else None
        outs += _scatter_chain(b, dtype, scatter_group, attack_scatter, source)
    if place == "after":
        gradient = [_gather_for_a_gradient(b, b.choose([gather_group, scatter_group]))]
    if not honest:
        b.note("asked to be adversarial", spoils=True)
    b.graph.output((*outs, *gradient, *b.neighbours))
    beside += len(b.neighbours) + b.unused  # other ranks may use them
    counts = (int(form != "scatter"), int(form not in ("gather", "quantized")), beside, len(gradient))
    return Program(b.graph, tuple(b.inputs), b.world_size, groups, b.honest, *counts, tuple(b.notes))


def _groups(b: Builder) -> tuple[_Group, _Group, dict[str, tuple[tuple[int, ...], ...]]]:
    """One group of everyone, or, on four ranks, sometimes the rows and columns of a 2 x 2 mesh."""
    world = tuple(range(b.world_size))
    if b.world_size == 4 and b.chance(4):
        b.note("2 x 2 mesh")
        return _Group("rows", 2), _Group("columns", 2), {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3))}
    everyone = _Group("0", b.world_size)
    return everyone, everyone, {"0": (world,)}


@st.composite
def programs(draw: st.DrawFn, wishes: Wishes | None = None) -> Program:
    """Hypothesis strategy of programs."""
    return _build(lambda options: draw(st.sampled_from(list(options))), wishes or Wishes())


def seeded_program(seed: int, wishes: Wishes | None = None) -> Program:
    """The program of a seed; the same in every process."""
    return _build(random.Random(seed).choice, wishes or Wishes())
