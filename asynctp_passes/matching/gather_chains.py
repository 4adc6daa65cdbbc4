"""Make the chains of a gather: the matmuls that a fused op takes in, and the ops that move before the gather. Pure.

    shard → all_gather → wait → {view, pointwise op, cast, amax of a row}* → matmul

The ops are repeated on the shard (`shard_region` proves that these are the same), and their results are gathered. The
fused op returns what others use of the gathered tensor. Small tensors are gathered on their own. For all else the
gather itself stays.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.matmuls import contracts_rows, is_matmul, operands_that_are, read_term
from asynctp_passes.ir.nodes import op_name, tensor_of, value_of
from asynctp_passes.ir.operations import Matmul, ScalesOfA, nodes_of
from asynctp_passes.ir.scales import scales_mismatch
from asynctp_passes.ir.sizes import product, same, same_sizes
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.placement import GatherPlacement
from asynctp_passes.layout.propagation import views_of
from asynctp_passes.matching.chains import CrossRankReduction, GatherChain, Hoist, Part, SideGather, Step
from asynctp_passes.matching.shard_region import ShardRegion, Users, is_small
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import symbolic_sizes, torch_ops


# --- matmuls whose left operand every rank can compute its part of: where the ranks are in it and in its scales ------
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


# --- their chains ---------------------------------------------------------------------------------------------------
def chains_of(region: ShardRegion, placed: Iterable[PlacedMatmul]) -> Iterator[GatherChain]:
    """Chains, each of the matmuls that one fused op can compute together. At most one of the chains is fused.

    Rows are preferred to the contraction, since chunks of rows finish early, then all rows to ranges of them, then the
    earlier matmul.
    """
    alike: dict[Any, list[PlacedMatmul]] = {}
    for one in sorted(placed, key=lambda one: (one.placement.axis != "rows", region.is_range(one.matmul.a))):
        alike.setdefault((*_key(region, one), region.is_range(one.matmul.a)), []).append(one)
    return (_chain(region, chosen) for chosen in alike.values())


def _chain(region: ShardRegion, placed: Sequence[PlacedMatmul]) -> GatherChain:
    lead, matmuls = placed[0], tuple(one.matmul for one in placed)
    used = region.used_elsewhere(set(nodes_of(matmuls)))
    returned, copies = _returned(region, used, matmuls)
    held = set() if returned is None else set(views_of([returned]))
    served = _served(region, copies, held)
    used = {node: users for node, users in used.items() if node not in held and region.home[node] not in served}
    hoist = _hoist(region, used, placed, copies, held) if region.members else None
    ends = [end for one in placed for end in one.ends] + [one.node for one in (hoist.side_gathers if hoist else ())]
    return GatherChain(
        collective=region.gather,
        matmuls=matmuls,
        placement=lead.placement,
        views=region.context.sorted(region.views_to(ends)),
        returned=returned,
        scale_placement=lead.scale,
        hoist=hoist,
        cuts=tuple(region.cuts[a] for a in dict.fromkeys(matmul.a for matmul in matmuls) if a in region.cuts),
    )


def _key(region: ShardRegion, one: PlacedMatmul) -> tuple[Any, ...]:
    """Equal for matmuls of the same left operand and scale of it, with the same options."""
    a, scaled = one.matmul.a, one.matmul.scaled
    operand = (region.twin(a), one.placement, value_of(a).dtype)
    if scaled is None:
        return operand
    own = region.known.get(scaled.given_a_scale) or region.context.alike(scaled.given_a_scale, one.matmul.node)
    scale = own if one.scale is None else (region.twin(scaled.given_a_scale), one.scale)
    return (*operand, scale, scaled.out_dtype, scaled.use_fast_accum, scaled.of_a)


def _returned(
    region: ShardRegion, used: Users, matmuls: Sequence[Matmul]
) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """The tensor that the fused op returns to other users: the matmuls' left operand, if these use only views of it.

    Two views of one tensor share memory, and an operand from the fused op would not. So where there are others, the
    gathered tensor itself is made of what the op returns; where ops are hoisted, its gather stays. Roots that hold what
    the operand holds, and that are used too, are copies of it.
    """
    operand, *others = {matmul.a for matmul in matmuls}
    taken = {node for node in used if region.home[node] is region.home[operand]}
    alone = not others and symbolic_sizes.is_contiguous(value_of(operand)) and operand not in region.gather.results
    if alone and taken <= set(views_of([operand])):
        roots = dict.fromkeys(region.home[node] for node in used if node not in taken)
        copies = tuple(root for root in roots if operand not in region.cuts and _is_copy(region, root, operand))
        return (operand if taken or copies else None), copies
    return (region.gather.node if taken and not region.members else None), ()


def _is_copy(region: ShardRegion, root: fx.Node, operand: fx.Node) -> bool:
    """True for a row-major root that holds the elements of an operand, in their order."""
    ours, value = region.view(operand), value_of(root)
    in_order = (ours.digits, ours.offset) == (region.view(root).digits, 0)
    as_it_is = symbolic_sizes.is_contiguous(value) and value.dtype == value_of(operand).dtype
    return region.twin(root) is region.twin(operand) and in_order and as_it_is


def _hoist(
    region: ShardRegion, used: Users, placed: Sequence[PlacedMatmul], copies: tuple[fx.Node, ...], held: set[fx.Node]
) -> Hoist:
    """The ops to repeat on the shard for an operand and perhaps its scale, and what becomes of what is `used` else.

    The fused op returns what is `held`, and `copies` are made of that.
    """
    lead, ends, side_gathers = placed[0], placed[0].ends, _side_gathers(region, used)
    alone = len(ends) == 1 and lead.matmul.scaled is not None
    row_numbers = _row_numbers(region, side_gathers, lead.placement) if alone else None
    served = _served(region, [*side_gathers, *copies], held)
    others = [user for node, users in used.items() if region.home[node] not in served for user in users]
    operands = [source for one in placed for source in (one.matmul.a, *one.matmul.operands)]
    needed = _needed(region, [*side_gathers, *operands])
    cross_rank = {one: equal for one, equal in region.cross_rank.items() if one in needed or not others}
    left = [node for one, equal in region.cross_rank.items() if one not in cross_rank for node in equal]
    still_needed_by = region.context.sorted([*others, *left])
    sources = [source for one in cross_rank for source in region.sources(one)]
    return Hoist(
        steps=tuple(_step(region, root) for root in roots_above(region, [*ends, *side_gathers, *sources])),
        operand=region.twin(ends[0]),
        scale=region.twin(ends[1]) if len(ends) > 1 else None,
        inside=region.context.sorted(region.home),
        cross_rank=tuple(
            CrossRankReduction(_step(region, one), tuple(equal), one in needed) for one, equal in cross_rank.items()
        ),
        copies=copies,
        side_gathers=tuple(
            SideGather(one, region.twin(one), region.roots[one].outer, region.roots[one].block) for one in side_gathers
        ),
        row_numbers=row_numbers,
        still_needed_by=still_needed_by,
        overlapped_by=_matmuls_between(region, lead.matmul.node, still_needed_by),
    )


def _needed(region: ShardRegion, ends: Iterable[fx.Node]) -> set[fx.Node]:
    """The reductions over all ranks' rows that `ends` are computed from; of equal ones, the first."""
    above = reachable(ends, where=lambda node: node in region.home or node in region.known)
    return {region.known[node] for node in above if node in region.known} & region.cross_rank.keys()


def _row_numbers(region: ShardRegion, side_gathers: Sequence[fx.Node], data: GatherPlacement) -> fx.Node | None:
    """The first root that is gathered on its own and has one fp32 number for each row of the data, in their order.

    It is named by its twin, the first root that holds the same. None where no root does.
    """
    for root in side_gathers if data.axis == "rows" else ():
        value, found = tensor_of(root), region.roots[root]
        in_order = same(found.outer, data.outer) and same(found.block, data.inner)
        if in_order and value is not None and value.dtype == torch.float32:
            return found.twin
    return None


def _step(region: ShardRegion, root: fx.Node) -> Step:
    parts = tuple((operand, _part(region, operand)) for operand in region.sources(root))
    assert torch_ops.is_op(root.target)
    step = Step(root, root.target, tuple(root.args), dict(root.kwargs), parts)
    return replace(step, filled=tuple(_filled(region, step)))


def _filled(region: ShardRegion, step: Step) -> Iterator[tuple[fx.Node, int]]:
    """The other operands with a value for each row, the same for all, and the dimension of the rows in them."""
    for operand in step.others:
        own, shape = region.members[step.parts[0][0]], region.context.sizes.of(value_of(operand))
        dim = own.dim - len(region.view(step.parts[0][0]).dims) + len(shape)
        if dim >= 0 and not same(shape[dim], 1):
            yield operand, dim


def _part(region: ShardRegion, node: fx.Node) -> Part:
    place, shape = region.members[node], list(region.context.sizes.of(value_of(node)))
    shape[place.dim] = place.outer * place.inner
    return Part(region.twin(node), place.part, tuple(shape))


def _side_gathers(region: ShardRegion, used: Users) -> list[fx.Node]:
    """The small roots to gather on their own: those used elsewhere, unless a gather that stays serves them in time."""
    order, small = region.context.order, {node for node in used if is_small(region, region.home[node])}
    limit = min((order[users[0]] for node, users in used.items() if node not in small), default=len(order))
    found: list[fx.Node] = []
    for node, users in used.items():
        root = region.home[node]
        if node in small and order[users[0]] < limit and root not in _served(region, found):
            found.append(root)
    return found


def _served(region: ShardRegion, side_gathers: Sequence[fx.Node], held: Container[fx.Node] = ()) -> set[fx.Node]:
    """The roots that are gathered on their own or copied, and those computed from such and what is `held` alone."""
    served = set(side_gathers)
    for root in region.roots:  # in graph order
        sources = region.sources(root)
        if sources and all(source in held or region.home[source] in served for source in sources):
            served.add(root)
    return served


def _matmuls_between(region: ShardRegion, first: fx.Node, still_needed_by: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The matmuls after `first` that run before the first user of the kept gather."""
    if not still_needed_by:
        return ()
    order = region.context.order
    return tuple(node for node in region.context.nodes[order[first] + 1 : order[still_needed_by[0]]] if is_matmul(node))
