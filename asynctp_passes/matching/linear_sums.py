"""Sums of reductions: what several collectives reduce, and only the sum of is used, is reduced once. Pure.

    mm → view* → all_reduce → wait → view* ┐                       mm → view* ┐
    mm → view* → all_reduce → wait → view* ┴ add → ...   becomes   mm → view* ┴ add → all_reduce → wait → view* → ...

A reduction is linear, and so is a reduce-scatter whose blocks lie alike. Members are chains that could each be fused
alone, and differ in their products only. Beside one of these, other reductions of the kind may be members. What they
reduce is added to the products, or its sum over a dimension if only that is used. What the sum adds in between, as a
residual, is added to the one result.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import fx

from asynctp_passes.ir.nodes import arguments, tensor_of, traits_of, value_of
from asynctp_passes.ir.op_traits import Reduction
from asynctp_passes.ir.operations import Collective, Matmul
from asynctp_passes.ir.sizes import product, same, same_strides
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.propagation import (
    adds,
    distributed,
    is_sum,
    is_view,
    propagate,
    scaling_of,
    sources_of,
    times,
    views_of,
)
from asynctp_passes.matching.chains import Candidate, EarlySum, ScatterChain, Term
from asynctp_passes.matching.match_context import MatchContext
from asynctp_passes.torch_private import symbolic_sizes


def summed(context: MatchContext, candidates: Mapping[fx.Node, Candidate]) -> dict[fx.Node, Candidate]:
    """Candidates of the reductions that are summed: the last chain of a sum becomes that of all, which others join.

    `candidates` has those of all gathers and reductions, by collective, in graph order.
    """
    fused = {node: one for node, one in candidates.items() if context.allowed(one)}
    chains = {node: one.chain for node, one in fused.items() if isinstance(one.chain, ScatterChain)}
    owner: dict[fx.Node, object] = {node: one.collective.node for one in fused.values() for node in one.nodes}
    others = {node: _early_sum(context, one.collective) for node, one in candidates.items() if node not in chains}
    early = {node: one for node, one in others.items() if one is not None}
    places = sorted(map(context.order.__getitem__, chains))
    found: dict[fx.Node, Candidate] = {}
    kinds: dict[object, list[fx.Node]] = {}
    for node, candidate in candidates.items():
        kinds.setdefault(_kind(context, candidate, early.get(node)), []).append(node)
    kinds.pop(None, None)  # those that are left alone
    for reductions in kinds.values():
        if len(reductions) == 1 or chains.keys().isdisjoint(reductions):
            continue
        entries = {early[node].total if node in early else node: node for node in reductions}
        for end, inside in _sums(context, [*entries]):
            entered = [entry for entry in entries if entry in inside]
            members = [entries[entry] for entry in entered]
            if not all(owner[node] in members for node in inside if node in owner):  # another chain has a part of it
                continue
            terms = _terms(context, end, inside, entered, entries)
            if terms is None or not _are_next(context, members, chains.keys(), places):
                continue
            reduced = [(candidates[node].collective, early.get(node)) for node in members]
            chain = _joined(context, reduced, chains, terms)
            if chain is None:
                continue
            last = chain.collective.node
            own = {node: fused[node].nodes if node in chains else candidates[node].collective.nodes for node in members}
            sum_candidate = _sum_candidate(context, chain, fused[last], own, inside)
            if context.allowed(sum_candidate):
                owner |= dict.fromkeys(sum_candidate.nodes, sum_candidate)
                for node in members:
                    one = replace(candidates[node], chain=None, nodes=own[node])
                    found[node] = replace(one, refusals=(), joins=sum_candidate)
                found[last] = sum_candidate
    return found


def _sum_candidate(
    context: MatchContext,
    chain: ScatterChain,
    last: Candidate,
    own: Mapping[fx.Node, tuple[fx.Node, ...]],
    inside: Set[fx.Node],
) -> Candidate:
    """The candidate of all members, in place of the last one's; `own` has the nodes of each, by its reduction."""
    early = {node for each in chain.early.values() for node in each.nodes}
    after = (inside | early) - own.keys()
    nodes = context.sorted([*(node for each in own.values() for node in each), *after])
    return replace(last, chain=replace(chain, after=context.sorted(after)), nodes=nodes)


def _kind(context: MatchContext, candidate: Candidate, early: EarlySum | None) -> object:
    """The properties that members of one sum share; None for a reduction that is left alone.

    That is a gather, one of several tensors of a collective, and what is reduced in float16: a rank's part of the sum
    may be too large for it where the sums over the ranks, and their sum, are not. Dimensions matter only where ranks
    get blocks of a later one than the first: else a collective sees its tensor's elements one after the other.
    """
    one, value = candidate.collective, tensor_of(candidate.collective.node if early is None else early.total)
    if one.kind == "all_gather" or one.call is not None or value is None or not symbolic_sizes.is_contiguous(value):
        return None
    if value.dtype == torch.float16:
        return None
    group, sizes = (one.group_key, one.group_size), context.sizes.of(value)
    shape = sizes if one.dim else (product(sizes),)
    return (one.kind, group, one.reduce_op, one.dim, value.dtype, shape, bool(candidate.weights))


# --- the sum --------------------------------------------------------------------------------------------------
def _sums(context: MatchContext, entries: Sequence[fx.Node]) -> list[tuple[fx.Node, set[fx.Node]]]:
    """The additions of two terms in each of which there is a reduction, the last one first, and what makes each.

    What something else uses too is a tensor as any other to the sums after it.
    """
    above: dict[fx.Node, set[fx.Node]] = {node: {node} for node in entries}
    ends = []
    for node in context.nodes:
        sources = [source for source in node.all_input_nodes if source in above and all(map(_is_step, source.users))]
        if sources:
            above[node] = {node}.union(*map(above.__getitem__, sources))
        if adds(node) and {arguments(node)["self"], arguments(node)["other"]} <= set(sources):
            ends.append(node)
    return [(end, above[end]) for end in reversed(ends)]


def _is_step(node: fx.Node) -> bool:
    """True for views and what sums up. Conversions round, or would not: they end a sum.

    So does a number above 1: what ranks send may overflow where their sum, which the program multiplies, does not. A
    smaller one makes what they send smaller, and loses no more than a sum does (`layout.propagation.distributed`).
    """
    sums = is_sum(node) and not traits_of(node).converts
    return _is_way(node) or (sums and abs(scaling_of(node) or 1.0) <= 1)


def _is_way(node: fx.Node) -> bool:
    return is_view(node) and not traits_of(node).converts


def _terms(
    context: MatchContext,
    end: fx.Node,
    inside: set[fx.Node],
    entered: Sequence[fx.Node],
    entries: Mapping[fx.Node, fx.Node],
) -> Mapping[fx.Node, float] | None:
    """The terms of `end`, an addition, and how often each counts: those that have `entered` it, by their reductions.

    None if something inside has a user outside, or does not rearrange all members alike. Or if an addition's result
    lies in memory otherwise than the first term that comes from a member, and is to stand for it.
    """
    if not all(inside.issuperset(node.users) for node in inside if node is not end):
        return None
    propagation = propagate(context.sorted(inside), sources_of(entered, context.sizes), context.sizes, sums=True)
    sums = {node: next(term for term in node.all_input_nodes if term in inside) for node in inside if adds(node)}
    in_place = all(same_strides(node, first) for node, first in sums.items())
    if not (inside <= propagation.maps.keys() and in_place):
        return None
    return {entries.get(node, node): count for node, count in propagation.terms[end].counts.items()}


# --- its members ----------------------------------------------------------------------------------------------
def _are_next(context: MatchContext, members: Sequence[fx.Node], chains: Set[fx.Node], places: Sequence[int]) -> bool:
    """True where no other chain's reduction stands between the members; `places` has where all chains' stand.

    All wait for the last one. Those of many layers, which read what one encoder made, would keep all their operands
    until then.
    """
    first, last = context.order[members[0]], context.order[members[-1]]
    return bisect_right(places, last) - bisect_left(places, first) == len(chains & set(members))


def _joined(
    context: MatchContext,
    members: Sequence[tuple[Collective, EarlySum | None]],
    chains: Mapping[fx.Node, ScatterChain],
    counts: Mapping[fx.Node, float],
) -> ScatterChain | None:
    """The one chain of all members, in place of the last that is a chain, whose products come first.

    None where products are not alike, are padded, go to the collectives in different ways, cannot be added to what else
    is reduced, or cannot take the factors of their sums.
    """
    known = [chains[member.node] for member, _ in members if member.node in chains]
    if not known or any(chain.padding for chain in known):
        return None
    *others, last = known
    for other in others:
        if _elements(other.way, other.collective) != _elements(last.way, last.collective):
            return None
        if not all(context.can_add(last.matmuls[0], matmul) for matmul in other.matmuls):
            return None
    own = [_counted(chain, counts[chain.collective.node]) for chain in (last, *others)]
    counted = [chain for chain in own if chain is not None]
    if len(counted) < len(own):
        return None
    added = [term for chain in counted for term in chain.added]
    for member, early in members:
        if member.node not in chains:
            source = _in_order_of_products(context, member, early, last)
            if source is None:
                return None
            added.append(Term(source, counts[member.node], early))
    results = {member.node for member, _ in members}
    return replace(
        counted[0],
        matmuls=tuple(one for chain in counted for one in chain.matmuls),
        views=context.sorted(node for chain in counted for node in chain.views),
        added=tuple(added),
        joined=tuple(member for member, _ in members if member is not last.collective),
        added_after=tuple(Term(node, count) for node, count in counts.items() if node not in results),
        crossing=tuple((member.node, counts[member.node]) for member, _ in members),
    )


def _counted(chain: ScatterChain, count: float) -> ScatterChain | None:
    """A chain whose terms have the factor of their sum, and of its result; None where they cannot."""
    dtype = value_of(chain.collective.source).dtype

    def factor_of(term: Matmul | Term) -> float | None:
        within = distributed(term.factor, chain.factor, dtype)
        return None if within is None else times(within, count)

    matmuls, added = [(one, factor_of(one)) for one in chain.matmuls], [(one, factor_of(one)) for one in chain.added]
    if any(factor is None for _, factor in (*matmuls, *added)):
        return None
    return replace(
        chain,
        matmuls=tuple(replace(one, factor=factor) for one, factor in matmuls if factor is not None),
        added=tuple(replace(one, factor=factor) for one, factor in added if factor is not None),
        factor=1.0,
    )


def _elements(way: IndexMap, collective: Collective) -> object:
    """The source's elements in the order in which a collective sees them (see `_kind`)."""
    return way if collective.dim else (way.digits, way.offset)


def _in_order_of_products(
    context: MatchContext, member: Collective, early: EarlySum | None, chain: ScatterChain
) -> fx.Node | None:
    """The tensor with the elements of a product, in their order, that goes to a collective in the products' way.

    Of an early sum it is the reduced tensor itself, if the products are reduced in their own order too.
    """
    if early is not None:
        own = IndexMap.identity(context.sizes.of(value_of(early.total)))
        return member.source if _elements(own, member) == _elements(chain.way, chain.collective) else None
    before = context.segments[member.node]  # of a copy made before a mutation the source may be another tensor by now
    above = reachable([member.source], where=lambda node: _is_way(node) and context.segments[node] == before)
    count = product(context.sizes.of(value_of(chain.matmuls[0].node)))
    around = {member.source, *above, *(source for node in above for source in node.all_input_nodes)}
    for source in reversed(context.sorted(around)):
        value = tensor_of(source)
        if value is None or not same(product(context.sizes.of(value)), count):
            continue
        propagation = propagate(context.sorted(above - {source}), sources_of([source], context.sizes), context.sizes)
        way = propagation.maps.get(member.source)
        if way is not None and _elements(way, member) == _elements(chain.way, chain.collective):
            return source
    return None


# --- sums before a reduction ------------------------------------------------------------------------------------
def _early_sum(context: MatchContext, collective: Collective) -> EarlySum | None:
    """The one sum that uses an all-reduced tensor, through views in the order of its elements; None if others do."""
    if collective.kind != "all_reduce" or collective.call is not None:
        return None
    views = views_of(collective.results)
    users = {user for node in views for user in node.users}.difference(views)
    total = users.pop() if len(users) == 1 else None
    if total is None or traits_of(total).reduces is not Reduction.SUM:
        return None
    if len({context.segments[node] for node in (*views, total)}) > 1:
        return None
    values = arguments(total)
    reduced, terms, result = (tensor_of(node) for node in (collective.node, values["self"], total))
    dims: list[int] = list(values.get("dim") or [])
    if reduced is None or terms is None or result is None or len(dims) != 1:
        return None
    if not reduced.dtype == terms.dtype == result.dtype:
        return None
    own, sizes = context.sizes.of(reduced), context.sizes.of(terms)
    seen = propagate(context.sorted(views), sources_of([collective.node], context.sizes), context.sizes)
    if seen.maps.get(values["self"]) != IndexMap.identity(own).reshape(sizes):
        return None
    dim = dims[0] % len(sizes)
    inside = context.sorted([*views, total])
    return EarlySum(collective, total, inside, product(sizes[:dim]), sizes[dim], product(sizes[dim + 1 :]))
