"""Bring a matmul's other operands into the form that the fused ops take: right operands, biases, scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from asynctp_passes.ir.nodes import value_of
from asynctp_passes.ir.operations import Matmul, ScaledOptions
from asynctp_passes.ir.sizes import Size, divided, product, same
from asynctp_passes.rewriting.builder import Builder


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
