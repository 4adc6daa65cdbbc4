"""Find chains: every collective of a graph, with a proven chain around it or the reasons why there is none. Pure.

    gather    shard → all_gather → wait → view* → {mm, addmm, _scaled_mm}+
    gather    shard → all_gather → wait → {view, row-wise op}* → {mm, addmm, _scaled_mm}+     (`shard_region`)
    scatter   {mm, addmm, _scaled_mm (× scales)}+ → view* → (add → view*)* → {reduce_scatter, all_reduce} → wait
              where products of 16 bits may be converted to float32 on the way, and other tensors may be added
    summed    (mm → view* → {reduce_scatter, all_reduce} → wait → view*)+ → add*                      (`linear_sums`)
    own part  (mm+ → view*) → all_reduce → wait → view* → the rank's own part alone                      (`own_part`)

`match_gather` and `match_reduction` prove chains of one collective. `find` takes those that do not want the same matmul
and leave no cycle; `collapsed` is the graph in which each chain is one node.

Collectives that look like FSDP's are marked (`Candidate.weights`), for groups that have nothing else in the graph.
Parameters are gathered: right operands, or vectors. Gradients are reduced: vectors, or products that contract over
rows, and that no matmul goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.collectives import awaited_item, unknown_group
from asynctp_passes.ir.matmuls import added_matrix
from asynctp_passes.ir.nodes import called_name, describe, mutates, op_name, tensor_of
from asynctp_passes.ir.operations import Collective, nodes_of
from asynctp_passes.ir.order import communicates, in_turn
from asynctp_passes.ir.registry import can_promise, collective_op, kind_of_other
from asynctp_passes.ir.sizes import Sizes
from asynctp_passes.ir.traversal import draws, reachable, steps_of
from asynctp_passes.matching.chains import Candidate, Chain, GatherChain, Hoist, Step
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
    others, sort = [one for one in collectives if one.node not in found], context.sorted
    why = {one.node: Candidate(one, None, (_other_refusal(context, one),), sort(one.results)) for one in others}
    return [found.get(one.node) or why[one.node] for one in collectives]


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

    A matmul of what is computed from two gathers is fused with the first that may be. Where chains are on a cycle, as
    each becomes one node, those that follow something go back to their place. Others lose row numbers that are only
    returned, and then the last one is left alone. A scatter's op is on none: its result depends on all that goes into
    it before the fusion too.
    """
    while True:
        found = _searched(context, wanted)
        chains = _gather_chains(found)
        stuck = _on_cycles(context, chains)
        late = {node for node in stuck if chains[node].follows is not None}
        if not late:
            break
        context.fixed |= late
    for node in stuck:
        found[node] = _without_row_numbers(context, found[node])
    while stuck := _on_cycles(context, _gather_chains(found)):
        last = max(stuck, key=context.order.__getitem__)
        refusal = Refusal(reasons.OPERAND_DEPENDS_ON_GATHER, "through the matmul of another chain")
        found[last] = replace(found[last], chain=None, refusals=(refusal,))
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


# --- the graph in which chains are one node each -----------------------------------------------------------------
def collapsed(
    graph: fx.Graph, sizes: Sizes, chains: Sequence[Chain], free: Container[fx.Node] = ()
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, Sequence[fx.Node]]]:
    """The arguments of `steps_of` for a graph whose chains are one step each, and whose communication is in order.

    What is `free` may change its place among what communicates. The first result has, for the nodes of a chain, its
    collective, which stands for it. The second has what nodes are computed from, where that is not `all_input_nodes`:

    - sizes of what a chain does away with, from what the rewrite will read them off;
    - items of several tensors, from their own tensor;
    - what is reduced over all ranks' rows, from the shard;
    - draws and communication, in their order.
    """
    owners: dict[fx.Node, fx.Node] = {}
    items = ((node, awaited_item(node)) for node in graph.nodes)
    inputs = draws(graph) | {node: [item] for node, item in items if item is not None}
    for chain in chains:
        own = chain.collective.node
        owners |= dict.fromkeys(chain.members, own)
        known = (node for node in chain.size_readers if "val" in node.meta)  # without it, chains are refused
        inputs |= {node: sizes.read_off(sizes.read(node), chain.inputs) for node in known}
        for collective in chain.collectives:
            if collective.call is not None:
                inputs[collective.node] = [collective.source]
        if chain.hoist is not None:
            for one in chain.hoist.cross_rank:
                sources = [*chain.inputs, *_others_above(chain.hoist, one.step)]
                inputs |= dict.fromkeys(one.nodes, sources)
        written = (matmul for matmul in chain.matmuls if matmul.call is not None)  # into a tensor, which is not read
        inputs |= {matmul.call: [matmul.a, *matmul.operands] for matmul in written}
        for matmul in chain.matmuls if isinstance(chain, GatherChain) else ():
            if added_matrix(matmul.node) is not None:  # `c` of `c + a @ b` is added after the fused op, where it was
                del owners[matmul.node]
                inputs[own] = [*inputs.get(own, own.all_input_nodes), *matmul.operands]
    return owners, in_turn([node for node in _starts(graph, chains) if node not in free], inputs)


def _starts(graph: fx.Graph, chains: Sequence[Chain]) -> list[fx.Node]:
    """The nodes that communicate, in order. Each chain does so once, in its place, by the node that stands for it.

    Of several tensors that are communicated together, those of chains come first.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    after: dict[fx.Node, list[fx.Node]] = {}
    for chain in chains:
        side = before if chain.follows is None else after
        side.setdefault(chain.anchor, []).append(chain.collective.node)
    alone = {one.node for chain in chains for one in chain.collectives if one.call is None}
    found: list[fx.Node] = []
    for node in graph.nodes:
        starts = communicates(node) and node not in alone
        found += [*before.get(node, ()), *([node] if starts else []), *after.get(node, ())]
    return found


def _others_above(hoist: Hoist, step: Step) -> list[fx.Node]:
    """The tensors besides its shard from which a rank computes its part of a step's result."""
    made_by = {one.node: one for one in (*hoist.steps, step)}
    above = reachable([step.node], lambda node: (part.root for _, part in made_by[node].parts), made_by.__contains__)
    return [other for node in above for other in made_by[node].others]


# --- other collectives -----------------------------------------------------------------------------------------
def _other_refusal(context: MatchContext, collective: Collective) -> Refusal:
    """Why a collective of another kind, or one that cannot be read, has no chain."""
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
