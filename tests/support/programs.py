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
import random
from collections.abc import Callable
from dataclasses import replace

import serving_ops  # noqa: F401  (defines torch.ops.vllm_like)
import torch
import torch.fx
from hypothesis import strategies as st
from program_gathers import _gather_chain, _gather_for_a_gradient, _quantized_chain
from program_parts import (
    FP8,
    Builder,
    Choose,
    Input,
    Program,
    Wishes,
    _cast,
    _depths,
    _Group,
    _harmless_views,
    _in_a_list,
    _matmul,
    _mutate,
    _Recipe,
    _recipe,
    _relu,
    _right_operand,
    _row_scale,
    _scaled_after,
    _sum,
    aten,
    c10d,
    custom,
    dtype_of,
    gather_views,
    scatter_views,
    shape_of,
)
from torch.fx import Node

__all__ = ["Builder", "Input", "Program", "Wishes", "gather_views", "programs", "scatter_views", "seeded_program"]


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
