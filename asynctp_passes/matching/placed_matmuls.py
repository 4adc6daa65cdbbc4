"""Matmuls whose left operand every rank can compute its part of: where the ranks are in it and in its scales. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.matmuls import contracts_rows, is_matmul, operands_that_are, read_term
from asynctp_passes.ir.nodes import op_name, value_of
from asynctp_passes.ir.operations import Matmul, ScalesOfA
from asynctp_passes.ir.scales import scales_mismatch
from asynctp_passes.ir.sizes import product, same, same_sizes
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import GatherPlacement
from asynctp_passes.matching.shard_region import ShardRegion
from asynctp_passes.reasons import Refusal


@dataclass(frozen=True)
class PlacedMatmul:
    """A matmul whose left operand, and perhaps its scales of rows or blocks, every rank has or can compute its part of.

    `scale` is None for scales that come from elsewhere: the same on all ranks, or gathered by another collective.
    """

    matmul: Matmul
    placement: GatherPlacement
    scale: GatherPlacement | None

    @property
    def ends(self) -> list[fx.Node]:
        """The operands from the region: the left one and, if it is computed there, its scale."""
        scaled = None if self.scale is None else self.matmul.scaled
        return [self.matmul.a] if scaled is None else [self.matmul.a, scaled.given_a_scale]


def placed_matmuls(region: ShardRegion) -> tuple[list[PlacedMatmul], dict[fx.Node, Refusal]]:
    """The matmuls whose left operand is a tensor of the region, and why others that take one are no such matmul."""
    found: list[PlacedMatmul] = []
    missed: dict[fx.Node, Refusal] = {}
    users = [user for root in region.roots.values() for user in root.propagation.all_users()]
    users += [user for operand in region.cuts for user in operand.users]
    for node in region.context.sorted(filter(is_matmul, users)):
        result = _placed_matmul(region, node)
        if isinstance(result, PlacedMatmul):
            found.append(result)
        else:
            missed[node] = result
    return found, missed


def _placed_matmul(region: ShardRegion, node: fx.Node) -> PlacedMatmul | Refusal:
    """A matmul of the region; of `c + a @ b` it is `a @ b`: `c` is added after the fused op, whatever it is."""
    roles = operands_that_are(node, region.home)
    if "left" not in roles:
        right = "right" in roles
        return Refusal(reasons.GATHER_IS_RIGHT_OPERAND if right else reasons.GATHERED_SCALE, node.name)
    matmul = read_term(node)
    if isinstance(matmul, Refusal):
        return matmul
    found = _by_parts(region, matmul)
    return Refusal(found.reason, f"{node.name}: {found.facts}") if isinstance(found, Refusal) else found


def _by_parts(region: ShardRegion, matmul: Matmul) -> PlacedMatmul | Refusal:
    """A matmul with the place of the ranks in its left operand and in the scale of that, if that is of the region."""
    a_scale = None if matmul.scaled is None else matmul.scaled.a_scale
    scale_is_gathered = a_scale in region.home and a_scale not in region.cut_steps
    quantized = matmul.scaled is not None or value_of(matmul.a).dtype == torch.int8
    if quantized and region.is_range(matmul.a):
        return Refusal(reasons.TAKEN_IN_PARTS, f"{region.cuts[matmul.a].steps[-1].name} takes rows of fp8 or int8")
    one_scale = a_scale is None or same(product(region.context.sizes.of(value_of(a_scale))), 1)
    if matmul.a in region.cuts and not one_scale:
        return Refusal(reasons.UNEVEN_SHARDS, f"{region.cuts[matmul.a].steps[0].name} cuts rows that have scales")
    for operand in matmul.operands:
        if not (scale_is_gathered and operand is a_scale) and region.needs_gather(operand):
            cause = region.cause(operand) if operand is a_scale else None
            return cause or Refusal(reasons.OPERAND_DEPENDS_ON_GATHER, operand.name)
        joins = operand is a_scale and operand in region.context.gather_of  # its gather may become part of this one
        if not (scale_is_gathered and operand is a_scale) and not joins and (late := region.late(operand)) is not None:
            return late
    view = region.rows_of(matmul.a)
    placement = view if isinstance(view, Refusal) else region.located(matmul.a, view)
    if isinstance(placement, Refusal):
        inside = placement.reason is reasons.NOT_ROWS_OR_CONTRACTION and contracts_rows(matmul.node)
        return Refusal(reasons.ROWS_CONTRACTED if inside else placement.reason, placement.facts)
    if region.is_range(matmul.a) and not placement.is_in_order:
        return Refusal(reasons.TAKEN_IN_PARTS, f"{region.cuts[matmul.a].steps[-1].name} takes rows in another order")
    numbers = (root for root in roots_above(region, [matmul.a]) if region.roots[root].numbers)
    if not quantized and (number := next(numbers, None)) is not None:  # it, or a tensor computed from such
        return Refusal(reasons.MAY_DIFFER_BY_RANK, f"{op_name(number)} {number.name} takes a number")
    if a_scale is None or matmul.scaled is None or not scale_is_gathered:
        return PlacedMatmul(matmul, placement, None)
    scale = placed_scales(region, a_scale, region.view(a_scale), matmul.scaled.of_a, placement)
    if isinstance(scale, Refusal):
        return scale
    return scales_mismatch(matmul, matmul.scaled) if scale is None else PlacedMatmul(matmul, placement, scale)


def placed_scales(
    region: ShardRegion, node: fx.Node, view: IndexMap, of_a: ScalesOfA, data: GatherPlacement
) -> GatherPlacement | Refusal | None:
    """Where the scales of A are, seen as `view` of a node's root; None if they are not laid out over rows as A is."""
    if len(view.dims) != 2:
        return None
    found = region.located(node, view.permute((1, 0)) if of_a.transposed else view)
    if isinstance(found, Refusal):
        return found
    sizes = (found.outer, found.inner * of_a.rows, found.width), (data.outer, data.inner, of_a.numbers)
    return found if data.axis == found.axis == "rows" and same_sizes(*sizes) else None


def roots_above(region: ShardRegion, ends: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The computed tensors that members are made of, each by its first twin, in graph order."""
    twins = (region.twin(end) for end in ends)
    above = reachable(twins, lambda root: map(region.twin, region.sources(root)))
    return region.context.sorted(above - {region.gather.node})
