"""Parts of random programs: views that move blocks, attacks on them, and matmuls. See `programs`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import serving_ops  # noqa: F401  (defines torch.ops.vllm_like)
import torch
import torch.fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

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


@dataclass(frozen=True)
class _Group:
    """The process group of a chain, as the graph names it."""

    name: str
    size: int


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


def _depths(blocks: tuple[int, int]) -> list[int]:
    """K of products with such scales. Those of 128x128 blocks of A are not padded here: torch wants only 512 so."""
    return [128, 256, 272, 512] if blocks[0] == 1 else [512]


def _mutate(b: Builder, x: Node, what: str) -> None:
    """Change a tensor in place, as a graph that is not functionalized may do; torch cannot write to an expanded one."""
    if 0 in x.meta["val"].stride():
        x = b.call(aten.clone.default, x)
    b.note(f"mutates the {what}", spoils=True)
    if b.chance(2):
        b.call(aten.add_.Tensor, x, 1.0)
    else:
        b.call(aten.copy_.default, x, b.placeholder(shape_of(x), dtype_of(x)))


def _relu(b: Builder, x: Node) -> Node:
    return b.call(aten.relu.default, x)


def _sum(b: Builder, x: Node) -> Node:
    return b.call(aten.sum.dim_IntList, x, [0])


_cast = torch.ops.prims.convert_element_type.default
