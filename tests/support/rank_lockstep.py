"""Judge programs that differ by rank in one process: rewrite each rank's graph, then run all graphs in lockstep.

    rank 0's graph ─▶ run ─▶ evaluate … all_gather_matmul ┐
                                                          ├─ the same on the wire? ─▶ go on with what was sent
    rank 1's graph ─▶ run ─▶ evaluate … all_gather        ┘

Each rank runs its graph as far as its next communicating op, and says what it would send. Ranks of a group whose calls
meet must agree on the wire: kind, number of elements, dtype and reduction. Results are made of what was sent, in wire
order, so that rows which are sent in another order arrive in that order. Inductor's scheduling is not seen here, nor
how kernels move the data: an op's wire is that of the collective in its definition.

`OWN_TRANSPORT`: graphs are rewritten as for GPUs, where collectives go by asynctp's own transport, and calls that meet
must agree on that too.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import lockstep
import torch
from passes import copied, run_pass
from rank_programs import Program
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from asynctp_passes import Report, attempt, ops, pipeline
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.planning import overlap
from asynctp_passes.planning.deviations import Words

__all__ = [
    "OWN_TRANSPORT",
    "RIGHT",
    "Setting",
    "Verdict",
    "check",
    "difference",
    "run_in_lockstep",
    "trace",
]

Groups = Mapping[str, Sequence[tuple[int, ...]]]
Rewrite = Callable[[int, fx.Graph], Report]


@dataclass(frozen=True)
class Verdict:
    """What a check has found.

    Attributes:
        fault: `"crash"`, `"unlike calls"`, `"no peer"`, `"order"`, `"values"`; empty when right.
        text: What exactly.
    """

    fault: str = ""
    text: str = ""

    def __bool__(self) -> bool:
        """Whether there is a fault."""
        return bool(self.fault)


RIGHT = Verdict()


class Unmatched(Exception):
    """Calls of ranks that do not fit together: a fault, and what exactly."""

    def __init__(self, fault: str, text: str) -> None:
        super().__init__(text)
        self.verdict = Verdict(fault, text)


@dataclass(frozen=True)
class Setting:
    """How graphs are rewritten.

    Attributes:
        own_transport: Collectives go by asynctp's, as on GPUs; else by torch's.
        past: A seed for deviations that all ranks of a group agreed on in earlier graphs, and for such that they refuse
            now. None: there are none.
    """

    own_transport: bool = False
    past: int | None = None

    def agreed(self, rank: int, graph: fx.Graph, groups: Groups) -> frozenset[tuple[str, str]]:
        """By group and text, what was agreed on before: of what any graph can do nothing, some, or all."""
        if self.past is None:
            return frozenset()
        collectives = read_collectives(graph)
        words = Words(collectives)
        texts = {(one.group_key, words.of_plain()) for one in collectives}
        texts |= {(one.group_key, words.of_kept(one)) for one in collectives if one.kind == "all_gather"}
        share = random.Random(f"{self.past}").choice([0.0, 0.5, 1.0])
        return frozenset(at for at in texts if self._drawn("agreed", rank, groups, *at) < share)

    def refuses(self, rank: int, groups: Groups, group: str, text: str) -> bool:
        """Whether the ranks refuse a deviation that all of them have."""
        return self.past is not None and self._drawn("refused", rank, groups, group, text) < 0.4

    def _drawn(self, what: str, rank: int, groups: Groups, group: str, text: str) -> float:
        peers = next(ranks for ranks in groups[group] if rank in ranks)
        return random.Random(f"{what}/{self.past}/{group}/{peers}/{text}").random()


OWN_TRANSPORT = Setting(own_transport=True)


# --- the check ------------------------------------------------------------------------------------------------
def check(program: Program, rewrite: Rewrite | None = None, setting: Setting = Setting()) -> Verdict:
    """Rewrite the graphs of all ranks, and compare what they compute together with the program.

    Args:
        program: The program.
        rewrite: Rewrites a rank's graph; by default the pass does, with the ranks' votes.
        setting: For what it is rewritten.

    Returns:
        The first fault, or `RIGHT`.

    Raises:
        AssertionError: The program itself cannot be run: the generator is wrong.
    """
    groups = program.outline.groups()
    ranks = range(program.world)
    graphs = [trace(program, rank) for rank in ranks]
    inputs = [program.make_inputs(rank) for rank in ranks]
    try:
        expected = run_in_lockstep(graphs, inputs, groups)
    except Unmatched as error:
        raise AssertionError(f"not a program: {error}\n{program}") from error
    try:
        rewritten, reports = rewrite_all(graphs, groups, rewrite, setting)
        actual = run_in_lockstep(rewritten, inputs, groups, setting.own_transport)
    except Unmatched as error:
        return error.verdict
    except Exception:
        return Verdict("crash", traceback.format_exc(limit=-3))
    if text := _moved_across(graphs, rewritten, [_deviates(report) for report in reports]):
        return Verdict("order", text)
    found = [
        f"rank {rank}, result {index}: {text}"
        for rank in ranks
        for index, pair in enumerate(zip(expected[rank], actual[rank], strict=True))
        if (text := difference(*pair, program.tolerance()))
    ]
    return Verdict("values", "; ".join(found)) if found else RIGHT


def trace(program: Program, rank: int) -> fx.Graph:
    """A rank's program as the graph that Inductor hands to a pass, with symbolic sizes where it is dynamic."""
    groups = {name: (name, len(ranks[0])) for name, ranks in program.outline.groups().items()}
    mode = "symbolic" if program.dynamic[rank] else "fake"
    function = make_fx(program.function(rank, groups), decomposition_table=_decompositions(), tracing_mode=mode)
    graph: fx.Graph = function(*program.make_inputs(rank)).graph
    for node in reversed(graph.nodes):  # what decompositions leave behind
        if node.op == "call_function" and not node.users and "c10d" not in lockstep.op_name(node.target):
            graph.erase_node(node)
    return graph


@cache
def _decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def rewrite_all(
    graphs: Sequence[fx.Graph],
    groups: Groups,
    rewrite: Rewrite | None = None,
    setting: Setting = Setting(),
) -> tuple[list[fx.Graph], list[Report]]:
    """Rewrite copies of all ranks' graphs; what changes what ranks send is done if every rank of the group has it."""
    if rewrite is not None:
        return _rewritten(graphs, rewrite)
    posted: dict[int, list[Any]] = {}

    def run(rank: int, graph: fx.Graph, vote: Any) -> Report:
        agreed = setting.agreed(rank, graph, groups)
        with (
            mock.patch.object(attempt, "vote", vote),
            mock.patch.object(pipeline, "agreed_before", return_value=agreed),
            mock.patch.object(ops, "on_wire", return_value=setting.own_transport),
        ):
            return run_pass(graph)

    def post(rank: int, graph: fx.Graph) -> Report:
        def all_accepted(ballots: Iterable[Any], config: Any) -> Any:
            posted[rank] = list(ballots)
            return {(one.group, text): None for one in posted[rank] for text in one.deviations}

        return run(rank, graph, all_accepted)

    def obey(rank: int, graph: fx.Graph) -> Report:
        votes = {
            at: "refused" if why is None and setting.refuses(rank, groups, *at) else why
            for at, why in votes_of(rank, posted, groups).items()
        }
        return run(rank, graph, lambda ballots, config: votes)

    _rewritten(graphs, post)
    return _rewritten(graphs, obey)


def votes_of(rank: int, posted: Mapping[int, Sequence[Any]], groups: Groups) -> dict[tuple[str, str], str | None]:
    """What the ballot comes to on a rank: for each of its deviations None, or why it is refused."""
    found: dict[tuple[str, str], str | None] = {}
    for own in posted[rank]:
        peers = next(ranks for ranks in groups[own.group] if rank in ranks)
        for text in own.deviations:
            without = [
                peer
                for peer in peers
                if not any(
                    (one.group, one.key) == (own.group, own.key) and text in one.deviations for one in posted[peer]
                )
            ]
            found[own.group, text] = f"ranks {without} do not do it" if without else None
    return found


def _rewritten(graphs: Sequence[fx.Graph], rewrite: Rewrite) -> tuple[list[fx.Graph], list[Report]]:
    copies = [copied(graph) for graph in graphs]
    with mock.patch.object(overlap, "LEAST_BYTES", 0):
        return copies, [rewrite(rank, graph) for rank, graph in enumerate(copies)]


def difference(expected: Any, actual: Any, tolerance: float) -> str:
    """What distinguishes two results, or nothing; errors count relative to the largest element."""
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
    left, right = expected.double(), actual.double()
    finite = left.isfinite() & right.isfinite()
    if not bool(((left == right) | (left.isnan() & right.isnan()))[~finite].all()):
        return "inf or NaN at other places"
    if not bool(finite.any()):
        return ""
    error, largest = float((left - right)[finite].abs().max()), float(left[finite].abs().max())
    return "" if error <= tolerance * largest else f"error {error:.3g} of {largest:.3g}"


def _moved_across(before: Sequence[fx.Graph], after: Sequence[fx.Graph], deviates: Sequence[bool]) -> str:
    """Ranks that use the groups in another order than their program, though they have agreed on nothing."""
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        was, now = ([_group_of(node) for node in graph.nodes if _communicates(node)] for graph in (old, new))
        if not deviates[rank] and was != now:
            return f"rank {rank} communicates in the groups {now} instead of {was}"
    return ""


def _deviates(report: Report) -> bool:
    """Whether a rank does what its peers have to do too."""
    return any(one.deviations for one in report.ballots)


# --- lockstep ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sent:
    """What a rank sends in one call.

    Attributes:
        kind: `"gather"`, `"scatter"` or `"reduce"`.
        group: Name of the group.
        reduce_op: The reduction; empty for gathers.
        wire: The elements in wire order.
        node: Which node of the rank's graph.
        transport: Whose the call is, and how; empty where that does not matter.
    """

    kind: str
    group: str
    reduce_op: str
    wire: Tensor
    node: str
    transport: str = ""

    def signature(self) -> tuple[str, str, int, torch.dtype, str]:
        """What has to be the same on all ranks."""
        return self.kind, self.reduce_op, self.wire.numel(), self.wire.dtype, self.transport

    def __str__(self) -> str:
        """One line."""
        what = " ".join(filter(None, (self.transport, self.kind, self.reduce_op)))
        return f"{self.node}: {what} of {self.wire.numel()} {self.wire.dtype}"


Steps = Generator[Sent, Tensor, Any]


def run_in_lockstep(
    graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Tensor]], groups: Groups, own_transport: bool = False
) -> list[Any]:
    """Run a graph for each rank, all at once.

    Args:
        graphs, inputs: Of each rank.
        groups: Its ranks by the name of a group.
        own_transport: Calls of asynctp's ops and of torch's do not meet.

    Returns:
        What each graph returns.

    Raises:
        Unmatched: Calls that meet are unlike, or a rank waits for peers that do not come.
    """

    def place(rank: int, group: str) -> int:
        return next(ranks.index(rank) for ranks in groups[group] if rank in ranks)

    running = {
        rank: _steps(graph, inputs[rank], own_transport, partial(place, rank)) for rank, graph in enumerate(graphs)
    }
    results: dict[int, Any] = {}
    calls: dict[int, Sent] = {}

    def go_on(rank: int, received: Tensor | None) -> None:
        try:
            calls[rank] = running[rank].send(received)  # type: ignore[arg-type]
        except StopIteration as end:
            results[rank] = end.value

    for rank in running:
        go_on(rank, None)
    while calls:
        ranks = _meeting(calls, groups)
        met = [calls.pop(rank) for rank in ranks]
        for rank, received in zip(ranks, _exchanged(ranks, met), strict=True):
            go_on(rank, received)
    return [results[rank] for rank in running]


def _meeting(calls: Mapping[int, Sent], groups: Groups) -> tuple[int, ...]:
    """The ranks of a group that are all at a call of it."""
    for call in calls.values():
        for ranks in groups[call.group]:
            if all(rank in calls and calls[rank].group == call.group for rank in ranks):
                return ranks
    waits = "; ".join(f"rank {rank} in {call.group!r} at {call}" for rank, call in sorted(calls.items()))
    raise Unmatched("no peer", f"ranks wait for others that do not come: {waits}")


def _exchanged(ranks: Sequence[int], calls: Sequence[Sent]) -> list[Tensor]:
    """What each rank receives, in wire order."""
    first = calls[0]
    if len({call.signature() for call in calls}) > 1:
        raise Unmatched(
            "unlike calls", "; ".join(f"rank {rank}: {one}" for rank, one in zip(ranks, calls, strict=True))
        )
    wires = [call.wire for call in calls]
    if first.kind == "gather":
        return [torch.cat(wires)] * len(calls)
    wide = torch.stack([wire.double() for wire in wires])
    total = (wide.amax(0) if first.reduce_op == "max" else wide.sum(0)).to(first.wire.dtype)
    if first.reduce_op not in ("sum", "max"):
        raise NotImplementedError(first.reduce_op)
    return list(total.chunk(len(calls))) if first.kind == "scatter" else [total] * len(calls)


def _steps(graph: fx.Graph, inputs: Iterable[Tensor], own_transport: bool, place: Callable[[str], int]) -> Steps:
    """Run one rank's graph: yields what it sends, and is given what it receives. `place` is the rank's in a group."""
    values: dict[fx.Node, Any] = {}
    given = iter([each.clone() for each in inputs])
    for node in graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], values.__getitem__)
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(graph.owning_module, str(node.target))
        elif _communicates(node):
            arguments = lockstep.bind(node.target, args, kwargs)
            call = _call(node, arguments)
            values[node] = yield from (_by(_transport(node, arguments), call) if own_transport else call)
        elif (placed := lockstep.PLACED_OPS.get(lockstep.op_name(node.target))) is not None:
            values[node] = placed(place(args[-1]), *args)
        else:
            values[node] = lockstep.local_op(node.target)(*args, **kwargs)
    raise ValueError("the graph has no output")


def _communicates(node: fx.Node) -> bool:
    return node.op == "call_function" and lockstep.op_name(node.target) in lockstep.GROUP_OPS


def _group_of(node: fx.Node) -> str:
    return str(lockstep.bind(node.target, node.args, node.kwargs)["group_name"])


# --- what ops send ------------------------------------------------------------------------------------------------
Arguments = dict[str, Any]


def _call(node: fx.Node, arguments: Arguments) -> Generator[Sent, Tensor, Any]:
    """A communicating op: what it sends, and its result made of what it receives."""
    name = lockstep.op_name(node.target)
    if "all_gather" in name:
        return (yield from (_fused_gather if "matmul" in name else _plain_gather)(node, arguments))
    if "coalesced" in name:
        raise NotImplementedError(name)
    kind, part = "reduce" if "all_reduce" in name else "scatter", _own_part(node, arguments)
    dim, ranks = arguments.get("scatter_dim", 0), arguments.get("group_size", 1)
    blocks = part.chunk(ranks, dim) if kind == "scatter" else [part]
    wire = torch.cat([block.flatten() for block in blocks])
    received = yield Sent(kind, arguments["group_name"], arguments["reduce_op"], wire, node.name)
    return received.view(blocks[0].shape).clone()


def _transport(node: fx.Node, arguments: Arguments) -> str:
    """Whose a call is. A gather that all ranks keep is pulled, and any other pushed."""
    if not lockstep.op_name(node.target).startswith("asynctp"):
        return "torch's"
    kept = arguments.get("all_keep")
    kept = arguments.get("return_a_full") if kept is None else kept
    return "asynctp's kept" if kept else "asynctp's"


def _by(transport: str, call: Generator[Sent, Tensor, Any]) -> Generator[Sent, Tensor, Any]:
    """The same call, by a transport."""
    received: Any = None
    while True:
        try:
            sent = call.send(received)
        except StopIteration as end:
            return end.value
        received = yield replace(sent, transport=transport)


def _own_part(node: fx.Node, arguments: Arguments) -> Tensor:
    """What a reducing op sums over the ranks, of this one: what it gives in a group of one rank."""
    part: Tensor = lockstep.alone(node.target, {**arguments, "group_size": 1})
    return part


def _plain_gather(node: fx.Node, arguments: Arguments) -> Generator[Sent, Tensor, Any]:
    shard = next(iter(arguments.values()))
    received = yield _gathering(node, arguments, shard)
    return received.view(-1, *shard.shape[1:]).clone()


def _fused_gather(node: fx.Node, arguments: Arguments) -> Generator[Sent, Tensor, Any]:
    """Gathers the shard, and whatever travels with it, then computes as in a group of one rank that has all."""
    dim = arguments["gather_dim"] % arguments["a_shard"].dim()
    travels = ["a_shard", *(["a_scale"] if arguments.get("gather_a_scale") else [])]
    travels += ["along_shard"] if arguments.get("along_shard") is not None else []
    whole = {}
    for each in travels:
        shard = arguments[each]
        received = yield _gathering(node, arguments, shard)
        pieces = received.view(arguments["group_size"], *shard.shape)
        whole[each] = lockstep.concatenated(list(pieces), dim)
    return lockstep.alone(node.target, {**arguments, **whole, "group_size": 1})


def _gathering(node: fx.Node, arguments: Arguments, shard: Tensor) -> Sent:
    return Sent("gather", arguments["group_name"], "", shard.contiguous().flatten(), node.name)
