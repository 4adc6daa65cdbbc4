"""Chains of a gather's matmuls, where row-wise computation between the two moves to before the gather. Pure.

    shard → all_gather → wait → {view, pointwise op, cast, amax of a row}* → matmul

The ops are repeated on the shard (`shard_region` proves that these are the same), and their results are gathered. The
fused op returns what others use of the gathered tensor. Small tensors are gathered on their own. For all else the
gather itself stays.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import tensor_of, value_of
from asynctp_passes.ir.operations import Matmul, nodes_of
from asynctp_passes.ir.sizes import same
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.placement import GatherPlacement
from asynctp_passes.layout.propagation import views_of
from asynctp_passes.matching.chains import CrossRankReduction, GatherChain, Hoist, Part, SideGather, Step
from asynctp_passes.matching.placed_matmuls import PlacedMatmul, roots_above
from asynctp_passes.matching.shard_region import ShardRegion, Users, is_small
from asynctp_passes.torch_private import symbolic_sizes, torch_ops


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
