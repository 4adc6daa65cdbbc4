"""Read how a matmul is scaled: by one number, by rows, or in blocks, told by the scales' shapes or by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.nodes import called_name, tensor_of
from asynctp_passes.ir.operations import Blocks, Matmul, ScaledOptions
from asynctp_passes.ir.registry import SCALED_MM, MatmulOp
from asynctp_passes.ir.sizes import are_one, identical, same_sizes
from asynctp_passes.ops.recipes import BLOCK, IN_BLOCKS, Cover, Recipe, blocks_in, padded
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import fx_graphs

_SCALINGS = ("TensorWise", "RowWise", "BlockWise1x16", "BlockWise1x32", "BlockWise1x128", "BlockWise128x128")
"""`torch.nn.functional.ScalingType`, by its values."""


def read_scales(
    node: fx.Node, op: MatmulOp, values: dict[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> ScaledOptions | Refusal | None:
    """The options of a matmul's scales, or why they are not fused; None for a matmul that takes none."""
    if op.a_scale is None or op.b_scale is None:
        return None
    if values.get("scale_result") is not None or fx_graphs.has_folded_output_scale(node):
        return Refusal(reasons.RESULT_SCALED, node.name)
    a_scale: Any = values.get(op.a_scale)
    b_scale: Any = values.get(op.b_scale)
    recipes = IN_BLOCKS if called_name(node) == SCALED_MM else ()
    told = _told(values) if isinstance(a_scale, list | tuple) else ""
    if told:
        recipes = tuple(each for each in IN_BLOCKS if told == "BlockWise{} x BlockWise{}".format(*each.names))
        if not recipes and told not in ("TensorWise x TensorWise", "RowWise x RowWise"):
            return Refusal(reasons.SCALES_UNSUPPORTED, f"{node.name}: {told}")
        a_scale, b_scale = a_scale[0], b_scale[0]
    of_a, of_b = tensor_of(a_scale), tensor_of(b_scale)
    if of_a is None or of_b is None:
        return Refusal(reasons.SHAPE_UNKNOWN, node.name)
    blocks = _blocks(recipes, (a, b, of_a, of_b), by_name=bool(told))
    if told and recipes and blocks is None:
        shapes = [list(value.shape) for value in (a, b, of_a, of_b)]
        facts = f"{told}, {shapes[0]} @ {shapes[1]} with scales {shapes[2]} and {shapes[3]}"
        return Refusal(reasons.SCALES_BLOCKWISE, f"{node.name}: {facts}")
    return ScaledOptions(a_scale, b_scale, out.dtype, bool(values.get("use_fast_accum")), blocks)


def scales_mismatch(matmul: Matmul, scaled: ScaledOptions) -> Refusal:
    """Why scales are not fused: told by their shapes, as torch's kernels do."""
    values = [tensor_of(node) for node in (matmul.a, matmul.b, scaled.a_scale, scaled.b_scale)]
    shapes = [[] if value is None else list(value.shape) for value in values]
    facts = f"{matmul.node.name}: scales {shapes[2]} and {shapes[3]}"
    like = not matmul.b_transposed and all(len(shape) == 2 for shape in shapes) and _are_blocks(*shapes)
    in_blocks = like or scaled.blocks is not None
    return Refusal(reasons.SCALES_BLOCKWISE if in_blocks else reasons.SCALES_UNSUPPORTED, facts)


def _are_blocks(a: list[Any], b: list[Any], a_scale: list[Any], b_scale: list[Any]) -> bool:
    """True for scales of 1x128 or 128x128 blocks of `a[M, K]` and `b[K, N]`; those of `b` may be padded along K."""
    (rows, depth), columns = a, b[1]
    if not isinstance(depth, int) or not isinstance(columns, int):
        return False
    blocks = blocks_in(depth)

    def one_of(size: Any, *sizes: Any) -> bool:
        return any(identical(size, other) for other in sizes)

    a_fits = identical(a_scale[1], blocks) and one_of(a_scale[0], rows, _in_blocks(rows))
    return a_fits and one_of(b_scale[0], blocks, padded(blocks)) and one_of(b_scale[1], columns, _in_blocks(columns))


def _blocks(recipes: Iterable[Recipe], operands: tuple[torch.Tensor, ...], *, by_name: bool) -> Blocks | None:
    """The blocks of scales, of one of these recipes; None where scales are one number, by rows, or others.

    `scaled_mm` is told by name, and has the scales of `b[K, N]` as of its transpose, those of 128x128 blocks transposed
    and padded. `_scaled_mm` tells by shapes.
    """
    a, b, a_scale, b_scale = operands
    rows, depth, columns = a.shape[0], a.shape[-1], b.shape[-1]
    if not isinstance(depth, int) or a.dim() != 2 or b.dim() != 2 or a_scale.dim() != 2 or b_scale.dim() != 2:
        return None
    along = blocks_in(depth)
    rowwise = ((a_scale, (rows, 1)), (b_scale, (1, columns)))
    if not by_name and all(are_one(scale.shape) or same_sizes(scale.shape, shape) for scale, shape in rowwise):
        return None
    for recipe in recipes:
        if by_name:
            a_fits = _named_fit(a_scale, recipe.a, rows, along)
            b_fits = _named_fit(b_scale, recipe.b, columns, along)
        else:
            a_fits = _shaped_fit(a_scale, recipe.a, rows, along)
            b_fits = _shaped_fit(b_scale.t(), recipe.b, columns, along)
        if a_fits and b_fits:
            lines = recipe.a.lines, recipe.b.lines
            return Blocks(*lines, along, by_name and lines[0] > 1, by_name and lines[1] == 1)
    return None


def _shaped_fit(scale: torch.Tensor, cover: Cover, outer: Any, along: int) -> bool:
    """True for the scales of a matrix `[outer, K]` as `_scaled_mm` has them: `[outer, along]`, or in blocks of 128.

    Of those torch passes on the address, and cuBLAS takes them as padded.
    """
    if not identical(scale.shape[1], along):
        return False
    if cover.lines == 1:
        return identical(scale.shape[0], outer)
    fits = along == padded(along) or identical(scale.shape[0], 1) or identical(scale.stride(0), padded(along))
    return fits and identical(scale.shape[0], _in_blocks(outer, cover.lines))


def _named_fit(scale: torch.Tensor, cover: Cover, outer: Any, along: int) -> bool:
    """True for the scales of a matrix `[outer, K]` as `scaled_mm` has them: so too, or padded and transposed."""
    if cover.lines == 1:
        return identical(scale.shape[0], outer) and identical(scale.shape[1], along)
    return identical(scale.shape[0], padded(along)) and identical(scale.shape[1], _in_blocks(outer, cover.lines))


def _in_blocks(size: Any, lines: int = BLOCK) -> int | None:
    """Blocks of so many lines in a size; None for a symbolic one."""
    return blocks_in(size, lines) if isinstance(size, int) else None


def _told(values: dict[str, Any]) -> str:
    """How `_scaled_mm_v2` is told to scale, for people: `RowWise x RowWise`."""
    names = dict(enumerate(_SCALINGS))
    sides = (" and ".join(names.get(one, f"ScalingType({one})") for one in values[f"recipe_{side}"]) for side in "ab")
    swizzled = any((*values["swizzle_a"], *values["swizzle_b"]))
    contracted = tuple(axis % 2 for axis in values["contraction_dim"])
    odd = "" if contracted in ((), (1, 0)) else f", contracted over {values['contraction_dim']}"
    return " x ".join(sides) + (", swizzled" if swizzled else "") + odd
