"""Bucket small all-reduces: those of a graph that do not wait for one another become one. Pure.

    x → all_reduce → wait → ...                 x ┐                              ┌ → ...
    y → all_reduce → wait → ...     becomes     y ┴ cat → all_reduce → wait → split → ...

Only cheap work may change its place, and all else is *slow*: matmuls, other collectives, each fused chain as one step.
So a candidate has a window, from the last slow step that it depends on (`after`) to the first that depends on it
(`before`). Slow steps keep their order. Candidates go together when one point lies in all of their windows. One that
depends on another through cheap work alone counts as slow. So if set S comes before set T, then `before(S) <= after(T)
< before(T)`: no cycle.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.collectives import WAIT
from asynctp_passes.ir.nodes import is_random, is_size, mutates, op_name, tensor_of, traits_of, value_of
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.order import communicates, is_opaque
from asynctp_passes.ir.traversal import steps_of
from asynctp_passes.matching.chains import Bucket, Chain, Decision, dropped_collectives, fused_chains
from asynctp_passes.matching.find import collapsed
from asynctp_passes.matching.near_miss import transparent
from asynctp_passes.ops.checks import EXTREMES
from asynctp_passes.planning.cost_model import bytes_of
from asynctp_passes.planning.deviations import Words
from asynctp_passes.planning.legality import SMALL_BYTES, Context
from asynctp_passes.planning.overlap import order_beside
from asynctp_passes.torch_private import fx_graphs, symbolic_sizes

Key = tuple[object, ...]


@dataclass
class _Set:
    """Candidates that one point lies in the windows of."""

    after: float
    before: float
    members: list[Collective] = field(default_factory=list)
    bytes: int = 0


def find_buckets(decisions: Sequence[Decision], context: Context) -> list[Bucket]:
    """The sets of two or more small all-reduces that become one each, in the order of their windows.

    Members of a set have one group, reduction (max or min), dtype, device and stretch between in-place operations. All
    together have `SMALL_BYTES` at most. No bucket's place depends on what another group agrees on: where one deviates,
    the others have none. Those reductions give the same bits in any order of ranks. A sum's rounding depends on the
    backend's order, and that on where in the buffer an element lies.
    """
    candidates = {d.candidate.collective.node: d.candidate.collective for d in decisions if _eligible(d, context)}
    if "bucket" in context.config.skip or len(candidates) < 2:
        return []
    steps, inputs = _steps(context, decisions, candidates)
    windows = _windows(steps, candidates, inputs)
    place = {node: index for index, step in enumerate(steps) for node in step}
    sets: dict[Key, list[_Set]] = {}
    for node in sorted(windows, key=lambda node: (windows[node][1], place[node])):
        after, before = windows[node]
        ours = sets.setdefault(_key(candidates[node], context), [])
        size = bytes_of(candidates[node].input) or 0
        chosen = next((one for one in ours if after < one.before and one.bytes + size <= SMALL_BYTES), None)
        if chosen is None:
            chosen = _Set(after, before)
            ours.append(chosen)
        chosen.after = max(chosen.after, after)
        chosen.members.append(candidates[node])
        chosen.bytes += size
    found = sorted((one for ours in sets.values() for one in ours), key=lambda one: one.before)
    fused = {chain.collective.node: chain for chain in fused_chains(decisions)}
    deviating = {group for group, _ in deviations_of(decisions, context.words)}
    buckets = (_bucket(one, steps, place, fused) for one in found if len(one.members) > 1)
    alone = [one for one in buckets if deviating <= {one.collective.group_key}]
    return _told_apart(alone, context)


def deviations_of(decisions: Sequence[Decision], words: Words) -> Iterator[tuple[str, str]]:
    """The deviations that decide where what communicates stands, by group and text: of fused chains, and drops."""
    for chain in fused_chains(decisions):
        yield from ((chain.collective.group_key, text) for text in words.of_chain(chain))
    dropped: dict[str, list[Collective]] = {}
    for one in dropped_collectives(decisions):
        dropped.setdefault(one.group_key, []).append(one)
    yield from ((group, words.of_dropped(members)) for group, members in dropped.items())


def _bucket(
    chosen: _Set,
    steps: Sequence[Sequence[fx.Node]],
    place: Mapping[fx.Node, int],
    fused: Mapping[fx.Node, Chain],
) -> Bucket:
    """The members in order, and what communicates next: a member that lies in their window, or at its end or after.

    There is one: a member that depends on `after` comes after it. Other nodes may stand on another side of a late
    gather than their steps do.
    """
    members = tuple(sorted(chosen.members, key=lambda member: place[member.node]))
    inside = [place[member.node] for member in members if chosen.after < place[member.node] < chosen.before]
    at = next(step[0] for step in steps[int(min([*inside, chosen.before])) :] if communicates(step[0]))
    return Bucket(members, at, fused.get(at))


def _told_apart(buckets: Iterable[Bucket], context: Context) -> list[Bucket]:
    """The buckets of one group between the same two collectives of the program, each with those before it there.

    One that follows another group's there is left out.
    """
    found: list[Bucket] = []
    for bucket in buckets:
        gap, group = context.words.gap(bucket), bucket.collective.group_key
        earlier = tuple(one for one in found if context.words.gap(one) == gap)
        if all(one.collective.group_key == group for one in earlier):
            found.append(replace(bucket, earlier=earlier))
    return found


# --- which ------------------------------------------------------------------------------------------------
def _eligible(decision: Decision, context: Context) -> bool:
    """True for a small out-of-place all-reduce of an enrolled group whose result is waited for before it is used."""
    collective = decision.candidate.collective
    if op_name(collective.node) != "_c10d_functional.all_reduce.default" or decision.refusal is None:
        return False
    if decision.refusal.reason is reasons.RESULT_DROPPED or not collective.is_on_one_stream:
        return False
    if collective.reduce_op not in EXTREMES or not context.config.enrolls(collective.group_key):
        return False
    size, result = bytes_of(collective.input), tensor_of(collective.node)
    if size is None or result is None or not symbolic_sizes.is_contiguous(result):
        return False
    awaited = bool(collective.waits) and set(collective.node.users) == set(collective.waits)
    return 0 < size <= SMALL_BYTES and awaited


def _key(collective: Collective, context: Context) -> Key:
    """The properties that members of one bucket share."""
    value, segment = value_of(collective.input), context.segments[collective.node]
    stream = fx_graphs.stream_of(collective.node)
    return collective.group_key, collective.reduce_op, value.dtype, value.device, segment, stream


# --- when -------------------------------------------------------------------------------------------------
Inputs = Mapping[fx.Node, Sequence[fx.Node]]
"""What nodes are computed from, where that is not their `all_input_nodes`."""


def _steps(
    context: Context, decisions: Sequence[Decision], free: Container[fx.Node]
) -> tuple[list[list[fx.Node]], Inputs]:
    """The graph's nodes in an order in which each fused chain is one step, its collective first; and their inputs.

    A chain stands where `rewrite` puts its op. In-place operations stay where they are, and what communicates stays in
    order, but for what is `free`, which passes no opaque op. A collective that runs beside products comes before them,
    and its wait after.
    """
    chains = fused_chains(decisions)
    owners, inputs = collapsed(context.graph, context.sizes, chains, free)
    op_of = {node: chain.collective.node for chain in chains for node in nodes_of(chain.matmuls)}
    for pair in [*(pair for decision in decisions for pair in order_beside(decision)), *_fixed(context.graph, free)]:
        first, then = (op_of.get(node, node) for node in pair)
        inputs[then] = [*inputs.get(then, then.all_input_nodes), first]
    position = {node: float(index) for index, node in enumerate(context.graph.nodes)}
    for chain in chains:
        position[chain.collective.node] = position[chain.anchor] + 0.5 * (chain.follows is not None)
    for chain in chains:
        _move_sources(chain.collective.node, owners, inputs, position)
    steps = steps_of(context.graph, owners, inputs, lambda own: (context.segments[own], position[own]))
    assert sum(map(len, steps)) == len(position), "find drops chains that cannot each be one step"
    return steps, inputs


def _fixed(graph: fx.Graph, free: Container[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The order of what is `free` and the opaque ops before and after it."""
    last: fx.Node | None = None
    waiting: list[fx.Node] = []
    for node in graph.nodes:
        if node in free:
            waiting.append(node)
            if last is not None:
                yield last, node
        elif is_opaque(node):
            yield from ((one, node) for one in waiting)
            last, waiting = node, []


def _move_sources(
    own: fx.Node, owners: Mapping[fx.Node, fx.Node], inputs: Inputs, position: dict[fx.Node, float]
) -> None:
    """Let what a fused chain is computed from come no later than the chain, as `rewrite` has it."""
    stack = [own, *(node for node, owner in owners.items() if owner is own)]
    while stack:
        node = stack.pop()
        for source in inputs.get(node, node.all_input_nodes):
            if owners.get(source, source) is not own and position[source] > position[own]:
                position[source] = position[own]
                stack.append(source)


def _windows(
    steps: Sequence[Sequence[fx.Node]], candidates: Mapping[fx.Node, Collective], inputs: Inputs
) -> dict[fx.Node, tuple[float, float]]:
    """For each candidate the last slow step that it depends on, and the first that depends on it, as indices."""
    after: dict[fx.Node, float] = {}
    tied: dict[fx.Node, bool] = {}
    slow: set[fx.Node] = set()
    chosen: set[fx.Node] = set()
    for index, step in enumerate(steps):
        sources = _sources(step, inputs)
        bound = max((after[source] for source in sources), default=-1.0)
        is_tied = any(tied[source] for source in sources)
        if step[0] in candidates and not is_tied:
            chosen.add(step[0])
            is_tied = True
        elif not _cheap(step, chosen):
            slow.update(step)
            bound, is_tied = index, False
        after.update(dict.fromkeys(step, bound))
        tied.update(dict.fromkeys(step, is_tied))
    before: dict[fx.Node, float] = {}
    for index, step in reversed(list(enumerate(steps))):
        bound = index if step[0] in slow else min(before.get(node, math.inf) for node in step)
        for source in _sources(step, inputs):
            before[source] = min(bound, before.get(source, math.inf))
    return {node: (after[node], before.get(node, math.inf)) for node in chosen}


def _sources(step: Sequence[fx.Node], inputs: Inputs) -> list[fx.Node]:
    """The nodes that a step is computed from."""
    return [source for node in step for source in inputs.get(node, node.all_input_nodes) if source not in step]


def _cheap(step: Sequence[fx.Node], chosen: set[fx.Node]) -> bool:
    """True for work that may change its place: it costs about what reading its inputs costs, and changes nothing."""
    node = step[0]
    if len(step) > 1 or mutates(node) or is_opaque(node):
        return False
    if node.op != "call_function":
        return True
    if op_name(node) == WAIT:
        return node.args[0] in chosen
    if is_random(node):
        return False
    made_of_nothing = traits_of(node).constant is not None or op_name(node) == "_dtensor.mesh_get_process_group.default"
    return transparent(node) or is_size(node) or made_of_nothing
