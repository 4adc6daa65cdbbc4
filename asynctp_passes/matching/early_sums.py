"""Sums over a dimension of what is all-reduced, where nothing else of it is used: they can be done before it. Pure.

    x → all_reduce → wait → view* → sum over a dimension → ...   is   x → view → sum → all_reduce → wait → ...

as experts' outputs are all-reduced each, and then added up. `linear_sums` does so where the sum is added to what
another all-reduce gives, so that one is left, of as many bytes less as there are experts.
"""

from __future__ import annotations

from asynctp_passes.ir.calls import Collective
from asynctp_passes.ir.nodes import arguments, tensor_of, traits_of
from asynctp_passes.ir.op_traits import Reduction
from asynctp_passes.ir.sizes import product
from asynctp_passes.layout.index_map import IndexMap
from asynctp_passes.layout.propagation import propagate, sources_of, views_of
from asynctp_passes.matching.chains import EarlySum
from asynctp_passes.matching.match_context import MatchContext

__all__ = ["early_sum"]


def early_sum(context: MatchContext, collective: Collective) -> EarlySum | None:
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
