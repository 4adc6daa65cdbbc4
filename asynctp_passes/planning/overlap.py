"""Overlap collectives that no fused op makes faster: each runs beside matmuls that do not need it. Pure.

    shard ─▶ all_gather ─────────────────────▶ wait ─▶ view* ─▶ mm      weight gradients, or no matmul next to it
    whole ─▶ reduce_scatter ─────────────────▶ wait ─▶ …                no matmul next to it, or one that is taken
                  product ─▶ … ─▶ product                              neither needs the other

A weight's gradient contracts over the gathered rows, so that its product cannot begin while shards arrive. A collective
that no matmul takes in is overlapped if it is more than latency and its group has a fused chain: FSDP's are best left
to bucketing. Beside a reduce-scatter matmuls must run which are not fused, and take as long as it does. Each decision
adds order constraints, which later ones and the bucketing keep. The start passes nothing that communicates, and the
wait takes nothing with it that does.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.collectives import is_only_awaited
from asynctp_passes.ir.matmuls import contracts_rows, is_matmul
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.order import communications
from asynctp_passes.ir.traversal import live, segments
from asynctp_passes.matching.chains import Decision, GatherChain, fused_chains
from asynctp_passes.planning import cost_model
from asynctp_passes.reasons import Reason, Refusal

LEAST_BYTES = cost_model.LATENCY_BYTES
"""A collective of fewer bytes that no matmul takes in stays: it costs the host more to start."""


def plan_overlap(graph: fx.Graph, decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions, in the same order: collectives that stay alone run beside products where there are any."""
    result = list(decisions)
    groups = {one.candidate.collective.group_key for one in decisions if one.refusal is None}
    found = [index for index, one in enumerate(decisions) if _is_alone(one, groups) or _needs_all(one)]
    if not found:
        return result
    facts = _Facts(graph)
    collapsed = _Collapsed(facts, _fused(result))
    for index in found:
        decision = result[index]
        own = decision.refusal is None
        around = _Collapsed(facts, [other for other in _fused(result) if other is not decision]) if own else collapsed
        gathers = decision.candidate.collective.kind == "all_gather"
        reason = reasons.BEHIND_PRODUCTS if gathers else reasons.SCATTER_BEHIND_PRODUCTS
        result[index] = _overlapped(around, decision, reason)
        facts.keep(result[index])
        if own and result[index].overlaps_with:
            collapsed = around
    return result


def order_beside(decision: Decision) -> list[tuple[fx.Node, fx.Node]]:
    """The order of nodes where a collective overlaps with matmuls: its start, the matmuls, and its waits."""
    collective = decision.candidate.collective
    starts = [(collective.node, product) for product in decision.overlaps_with]
    return starts + [(product, wait) for product in decision.overlaps_with for wait in collective.waits]


def _fused(decisions: Sequence[Decision]) -> list[Decision]:
    return [decision for decision in decisions if decision.refusal is None]


def _needs_all(decision: Decision) -> bool:
    """True for a gather all of whose products contract over its rows, or have it as their right operand."""
    chain, refusal = decision.candidate.chain, decision.refusal
    if refusal is not None and not refusal.reason.needs_whole_gather:
        return False
    if chain is None:
        return refusal is not None
    contracted = isinstance(chain, GatherChain) and chain.placement.axis == "contraction"
    return contracted and all(contracts_rows(matmul.node) for matmul in chain.matmuls)


def _is_alone(decision: Decision, groups: set[str]) -> bool:
    """True for a collective of one of these groups that no matmul takes in, and that takes more than latency."""
    collective, refusal = decision.candidate.collective, decision.refusal
    if refusal is None or decision.candidate.weights or collective.group_key not in groups:
        return False
    if collective.kind == "all_gather":
        whole = refusal.reason in (reasons.NO_MATMUL, reasons.NOT_ROWWISE)
        return whole and _is_large(collective.node, collective.group_size)
    sums = collective.kind == "reduce_scatter" and collective.reduce_op in ("sum", "avg")
    return sums and refusal.reason.no_matmul_takes_it and _is_large(collective.source, collective.group_size)


def _is_large(whole: fx.Node, ranks: int) -> bool:
    moved = cost_model.received_bytes(whole, ranks)
    return moved is None or moved >= LEAST_BYTES


def _overlapped(around: _Collapsed, decision: Decision, reason: Reason) -> Decision:
    products = around.products_beside(decision.candidate.collective)
    if not products:
        return decision
    first, last = products[0].node.name, products[-1].node.name
    way = f"from before {first} to after {last}" if first != last else f"beside {first}"
    facts = f"{way}: {len(products)} product{'s'[: len(products) > 1]}"
    return replace(decision, refusal=Refusal(reason, facts), overlaps_with=tuple(product.node for product in products))


@dataclass(frozen=True)
class _Product:
    """A matmul, or a `fused` op by one of its matmuls: where it stands, and between which mutations."""

    node: fx.Node
    place: int
    segment: int
    flops: int | None
    fused: bool


class _Facts:
    """Facts about a graph, whatever is fused: places of nodes, which of them are used, and the work of the matmuls.

    `after` has what a node is to come after besides its inputs, as a collective runs beside it, and `before` reversed;
    `orders` has the same as pairs, in the order in which they were decided.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.segments = segments(graph, between_draws=True)
        self.matmuls = {node for node in graph.nodes if is_matmul(node)}
        self.starts = communications(graph.nodes)
        self.used = live(graph)
        self.work = {node: cost_model.work_of(node) for node in self.matmuls & self.used}
        self.start_places = [self.place[node] for node in self.starts]
        self.after: dict[fx.Node, list[fx.Node]] = {}
        self.before: dict[fx.Node, list[fx.Node]] = {}
        self.orders: list[tuple[fx.Node, fx.Node]] = []

    def keep(self, decision: Decision) -> None:
        """Let later decisions keep this collective beside its matmuls."""
        for first, then in order_beside(decision):
            self.after.setdefault(then, []).append(first)
            self.before.setdefault(first, []).append(then)
            self.orders.append((first, then))


class _Collapsed:
    """A graph whose fused chains count as one node each. Its products are those that something is computed from."""

    def __init__(self, facts: _Facts, fused: Sequence[Decision]) -> None:
        self.facts = facts
        self.place, self.segments, self.matmuls = facts.place, facts.segments, facts.matmuls
        self.unit_of = {node: decision.candidate.nodes for decision in fused for node in decision.candidate.nodes}
        ops = fused_chains(fused)
        within = {node for chain in ops for node in nodes_of(chain.matmuls)}
        self.late = [(self.place[one.follows], one.collective.node) for one in ops if one.follows is not None]
        ops = [chain for chain in ops if any(matmul.node in facts.used for matmul in chain.matmuls)]
        found = [self._product(node, node, work, False) for node, work in facts.work.items() if node not in within]
        found += [
            self._product(chain.matmuls[0].node, chain.anchor, cost_model.cost_of(chain).work, True) for chain in ops
        ]
        self.products = sorted(found, key=lambda product: product.place)
        self._asked: set[fx.Node] = set()  # the communications so far, each with all of its fused chain
        self._needed: set[fx.Node] = set()  # all that they come after
        self._starts = self._orders = 0  # how many of `facts.starts` they are, and how many of `facts.orders` counted

    def _product(self, node: fx.Node, stands_at: fx.Node, flops: int | None, fused: bool) -> _Product:
        return _Product(node, self.place[stands_at], self.segments[stands_at], flops, fused)

    def products_beside(self, collective: Collective) -> list[_Product]:
        """The products to run beside a collective, in order: those in between already, the next, then the ones before.

        No more than it takes to cover its time. A reduce-scatter has none unless they cover it, nor a fused one.
        """
        if not is_only_awaited(collective):
            return []
        then, start = self.facts.before, self.place[collective.node]
        after = self._reach(collective.results, lambda node: (*node.users, *then.get(node, ())), set())
        before = self._needed_up_to(collective)
        segment = self.segments[collective.node]
        if any(self.segments[wait] != segment for wait in collective.waits):
            return []
        gathers = collective.kind == "all_gather"
        near = [one for one in self.products if one.segment == segment and (gathers or not one.fused)]
        reached = self._between_communications(collective, after)
        free = [one for one in near if one.node not in after and one.node not in before and one.place in reached]
        use = min((self.place[node] for node in after & self.matmuls), default=len(self.place))
        between = [one for one in free if start < one.place < use]
        others = [one for one in free if one.place > use] + [one for one in free[::-1] if one.place < start]
        whole, chosen = collective.node if gathers else collective.source, list(between)
        moved = cost_model.received_bytes(whole, collective.group_size)
        while others and not cost_model.covers([one.flops for one in chosen], moved, whole):
            chosen.append(others.pop(0))
        if not gathers and not cost_model.covers([one.flops for one in chosen], moved, whole):
            return []
        return sorted(chosen, key=lambda one: one.place)

    def _between_communications(self, collective: Collective, after: set[fx.Node]) -> range:
        """The places from the communication before a collective to the first one that needs it, both left out.

        A gather that comes late needs it after the node that it follows.
        """
        places, start = self.facts.start_places, self.place[collective.start]
        own = bisect.bisect_left(places, start)
        later = self.facts.starts[bisect.bisect_right(places, start) :]
        last = next((node for node in later if node in after and node is not collective.node), None)
        ends = [len(self.place) if last is None else self.place[last]]
        ends += [follows for follows, gather in self.late if follows >= start and gather in after]
        first = places[own - 1] if own else -1
        return range(first + 1, min(ends))

    def _needed_up_to(self, collective: Collective) -> set[fx.Node]:
        """All that a collective comes after, and the communications in front of it: one walk for all that are asked.

        Collectives are asked in the order of the graph. One that is asked late gets what a later one needs, too.
        """
        facts, orders = self.facts, self.facts.orders[self._orders :]
        until = bisect.bisect_right(facts.start_places, self.place[collective.start])
        new = [collective.node, *facts.starts[self._starts : until]]
        self._starts, self._orders = max(self._starts, until), len(facts.orders)
        units = [one for node in new for one in self.unit_of.get(node, (node,))]
        self._asked.update(units)
        late = [then for _, then in orders if then in self._asked or then in self._needed]

        def step(node: fx.Node) -> Iterable[fx.Node]:
            return (*node.all_input_nodes, *facts.after.get(node, ()))

        return self._reach([*units, *late], step, self._needed)

    def _reach(
        self, starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], seen: set[fx.Node]
    ) -> set[fx.Node]:
        """`seen` with all nodes that `step` leads to, and all of a fused chain if it leads to one of its nodes."""
        stack = list(starts)
        while stack:
            for then in step(stack.pop()):
                found = set(self.unit_of.get(then, (then,))) - seen
                seen |= found
                stack.extend(found)
        return seen
