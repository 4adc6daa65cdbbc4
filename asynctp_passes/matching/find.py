"""Find chains: every collective of a graph, with a proven chain around it or the reasons why there is none. Pure.

    gather    shard → all_gather → wait → view* → {mm, addmm, _scaled_mm}+
    gather    shard → all_gather → wait → {view, row-wise op}* → {mm, addmm, _scaled_mm}+     (`shard_region`)
    scatter   {mm, addmm, _scaled_mm (× scales)}+ → view* → (add → view*)* → {reduce_scatter, all_reduce} → wait
              where products of 16 bits may be converted to float32 on the way, and other tensors may be added
    summed    (mm → view* → {reduce_scatter, all_reduce} → wait → view*)+ → add*                      (`linear_sums`)
    own part  (mm+ → view*) → all_reduce → wait → view* → the rank's own part alone                      (`own_part`)

Collectives that look like FSDP's are marked (`Candidate.weights`), for groups that have nothing else in the graph.
Parameters are gathered: right operands, or vectors. Gradients are reduced: vectors, or products that contract over
rows, and that no matmul goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.collectives import unknown_group
from asynctp_passes.ir.nodes import called_name, describe, mutates, op_name, tensor_of
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.registry import can_promise, collective_op, kind_of_other
from asynctp_passes.ir.sizes import Sizes
from asynctp_passes.ir.traversal import steps_of
from asynctp_passes.matching.chains import Candidate, GatherChain
from asynctp_passes.matching.collapsed import collapsed
from asynctp_passes.matching.linear_sums import summed
from asynctp_passes.matching.match_context import MatchContext
from asynctp_passes.matching.match_gather import candidate_of, following, match_gather
from asynctp_passes.matching.match_reduction import match_reduction
from asynctp_passes.matching.own_part import own_part, scattered
from asynctp_passes.reasons import Refusal


def find(
    graph: fx.Graph, collectives: Sequence[Collective], sizes: Sizes, allowed: Callable[[Candidate], bool]
) -> list[Candidate]:
    """One candidate per collective, in the same order. Does not change the graph.

    A matmul between a gather and a scatter can be fused with one of them: with the scatter when the gather has other
    matmuls to overlap with, else with the gather. Only a chain that is `allowed` to be fused has a claim to it.
    Scatters whose results are only used in a sum become one. An all-reduce becomes a reduce-scatter where the rank uses
    its own part only.
    """
    context = MatchContext(graph, collectives, sizes, allowed)
    scatters = {c.node: match_reduction(context, c) for c in collectives if c.kind in ("reduce_scatter", "all_reduce")}
    gathers = _gathers(context, _fused_matmuls(filter(allowed, scatters.values())))
    taken = _fused_matmuls(filter(allowed, gathers.values()))
    found = {**gathers, **{node: _unless_taken(candidate, taken) for node, candidate in scatters.items()}}
    found |= summed(context, found)
    found |= _own_parts(context, found)
    return [found.get(collective.node) or _match_other(context, collective) for collective in collectives]


def _fused_matmuls(candidates: Iterable[Candidate]) -> set[fx.Node]:
    chains = [candidate.chain for candidate in candidates if candidate.chain is not None]
    return {node for chain in chains for node in nodes_of(chain.matmuls)}


def _unless_taken(candidate: Candidate, taken: set[fx.Node]) -> Candidate:
    names = sorted(node.name for node in _fused_matmuls([candidate]) & taken)
    if not names:
        return candidate
    return replace(candidate, chain=None, refusals=(Refusal(reasons.MATMUL_TAKEN, ", ".join(names)),))


def _gathers(context: MatchContext, wanted: set[fx.Node]) -> dict[fx.Node, Candidate]:
    """Candidates of all gathers; a gather of scales joins the chain whose data it scales.

    A matmul of what is computed from two gathers is fused with the first that may be.
    """
    found = _searched(context, wanted)
    while stuck := _following_on_cycles(context, found):
        context.fixed |= stuck
        found = _searched(context, wanted)
    for node in _on_cycles(context, _gather_chains(found)):
        found[node] = _without_row_numbers(context, found[node])
    for node, refusal in _cycles(context, found).items():
        found[node] = replace(found[node], chain=None, refusals=(refusal,))
    for candidate in list(found.values()):
        chain = candidate.chain
        for joined in chain.joined if chain is not None else ():
            other = found[joined.node]
            found[joined.node] = replace(other, joins=candidate, nodes=candidate.nodes, refusals=())
    return found


def _searched(context: MatchContext, wanted: set[fx.Node]) -> dict[fx.Node, Candidate]:
    """The candidates of all gathers, each alone; of those that would take the same matmul, the first may."""
    found = {c.node: match_gather(context, c, wanted) for c in context.collectives if c.kind == "all_gather"}
    taken: set[fx.Node] = set()
    for node, candidate in found.items():
        found[node] = candidate = _unless_taken(candidate, taken)
        if candidate.chain is not None and candidate.chain.hoist is not None and context.allowed(candidate):
            taken |= _fused_matmuls([candidate])
    return found


def _following_on_cycles(context: MatchContext, found: Mapping[fx.Node, Candidate]) -> set[fx.Node]:
    """Gathers that lie on a cycle where each chain becomes one node, and have chains that follow something."""
    chains = _gather_chains(found)
    if not any(chain.follows for chain in chains.values()):
        return set()
    return {node for node in _on_cycles(context, chains) if chains[node].follows is not None}


def _without_row_numbers(context: MatchContext, candidate: Candidate) -> Candidate:
    """A candidate whose chain has no row numbers that are only returned."""
    chain = candidate.chain
    if not isinstance(chain, GatherChain) or chain.row_numbers is None:
        return candidate
    propagation = context.propagation_of(chain.row_numbers.gather)
    views = tuple(node for node in chain.views if not propagation.has(node))
    alone = replace(chain, row_numbers=None, views=views, follows=None)
    return candidate_of(context, following(context, alone), candidate.left_out)


def _own_parts(context: MatchContext, found: Mapping[fx.Node, Candidate]) -> dict[fx.Node, Candidate]:
    """New candidates for all-reduces: the rank uses only its own part of the result.

    An all-reduce that can be fused stays as it is where its matmuls could not scatter the sum.
    """
    own: dict[fx.Node, Candidate] = {}
    for node, candidate in found.items():
        part = None if candidate.joins is not None else own_part(context, candidate.collective)
        if part is None:
            continue
        if not context.allowed(candidate):
            own[node] = replace(candidate, own_part=part)
        elif (chain := scattered(context, candidate, part)) is not None and context.allowed(chain):
            own[node] = chain
    return own


def _gather_chains(found: Mapping[fx.Node, Candidate]) -> dict[fx.Node, GatherChain]:
    """The chains of gathers, by gather."""
    return {node: candidate.chain for node, candidate in found.items() if isinstance(candidate.chain, GatherChain)}


def _on_cycles(context: MatchContext, chains: Mapping[fx.Node, GatherChain]) -> set[fx.Node]:
    """The chains, by gather, that lie on a cycle (or after one) when each becomes one node."""
    owners, inputs = collapsed(context.graph, context.sizes, [*chains.values()])
    steps = steps_of(context.graph, owners, inputs, context.order.__getitem__)
    return chains.keys() - {step[0] for step in steps}


def _cycles(context: MatchContext, found: dict[fx.Node, Candidate]) -> dict[fx.Node, Refusal]:
    """Gathers to leave alone because fusing them beside the others would make the graph cyclic.

    A scatter's op cannot: its result depends on all that goes into it before the fusion too.
    """
    chains = _gather_chains(found)
    dropped: dict[fx.Node, Refusal] = {}
    while True:
        stuck = _on_cycles(context, chains)
        if not stuck:
            return dropped
        last = max(stuck, key=context.order.__getitem__)
        dropped[last] = Refusal(reasons.OPERAND_DEPENDS_ON_GATHER, "through the matmul of another chain")
        del chains[last]


# --- other collectives -----------------------------------------------------------------------------------------
def _match_other(context: MatchContext, collective: Collective) -> Candidate:
    """Collectives of other kinds, and those that cannot be read."""
    nodes = context.sorted([collective.node, *collective.waits])
    return Candidate(collective, None, (_other_refusal(context, collective),), nodes)


def _other_refusal(context: MatchContext, collective: Collective) -> Refusal:
    name = called_name(collective.node)
    if collective.is_unused:
        return Refusal(reasons.RESULT_UNUSED, f"{describe(collective.input)} of {name}")
    if name.startswith("symm_mem.fused"):
        return Refusal(reasons.ALREADY_FUSED, name)
    op = collective_op(op_name(collective.node))
    kind = kind_of_other(name) if op is None else op.kind
    if kind == "other" and not can_promise(name):
        return Refusal(reasons.OTHER_COLLECTIVE, name)
    node = collective.node
    reached = kind in ("all_gather", "other") and _results_reach_matmul(context, node)
    if kind != "all_gather":
        reached = reached or any(context.ways_up.path(source, node) for source in node.all_input_nodes)
    known = op is not None and tensor_of(node) is not None
    facts = f"{name} makes {describe(node)} of {describe(collective.input)}" if known else name
    if (group := unknown_group(collective.start)) is not None:
        told = f"register it with groups={{{group!r}: ...}}"
        facts = f"{name} over {group!r}, which no process group here is called: {told}"
    return Refusal(reasons.COLLECTIVE_NOT_UNDERSTOOD if reached else reasons.NO_MATMUL, facts)


def _results_reach_matmul(context: MatchContext, own: fx.Node) -> bool:
    """True when what an op returns, or what it writes to, leads to a matmul's left operand."""
    results = [own, *(user for user in own.users if op_name(user) == "getitem")]
    written = own.all_input_nodes if mutates(own) else []
    later = [(source, user) for source in written for user in source.users if context.order[user] > context.order[own]]
    uses = [(result, user) for result in results for user in result.users] + later
    return any(context.ways_down.path(user, source) for source, user in uses)
