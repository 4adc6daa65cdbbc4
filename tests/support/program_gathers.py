"""The gather side of random programs, plain and quantized. See `programs`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import serving_ops  # noqa: F401  (defines torch.ops.vllm_like)
import torch
import torch.fx
from program_parts import (
    _BLOCKS,
    FP8,
    Builder,
    _cast,
    _depths,
    _flip,
    _Group,
    _harmless_views,
    _in_a_list,
    _matmul,
    _mutate,
    _Recipe,
    _recipe,
    _relu,
    _right_operand,
    _roll,
    _row_scale,
    _sum,
    _transpose_in_place_of,
    aten,
    autograd,
    c10d,
    custom,
    dtype_of,
    gather_views,
    shape_of,
)
from torch.fx import Node


# --- gather side ---------------------------------------------------------------------------------------
def _all_gather(b: Builder, shard: Node, group: _Group) -> Node:
    if b.chance(4):
        return _in_a_list(b, c10d.all_gather_into_tensor_coalesced.default, shard, group, group.size, group.name)[1]
    namespace = autograd if dtype_of(shard) not in FP8 and b.chance(6) else c10d
    gathered = b.call(namespace.all_gather_into_tensor.default, shard, group.size, group.name)
    return b.call(c10d.wait_tensor.default, gathered)


def _shard_shape(b: Builder, dtype: torch.dtype, blocks: tuple[int, int] | None = None) -> list[int]:
    rank = b.choose([2, 2, 3, 3, 3, 4])
    lead = [b.choose([1, 2, 3]) for _ in range(rank - 2)]
    if blocks is not None:
        return [*lead, b.choose([1, 2, 3]) if blocks[0] == 1 else 128, b.choose(_depths(blocks))]
    return [*lead, b.choose([1, 2, 3, 4]), b.choose([16] if dtype in FP8 else [2, 4, 8])]


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
