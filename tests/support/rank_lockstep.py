"""Judge programs that differ by rank in one process: rewrite each rank's graph, then run all graphs in lockstep.

    rank 0's graph ─▶ run ─▶ evaluate … all_gather_matmul ┐
                                                          ├─ the same on the wire? ─▶ go on with what was sent
    rank 1's graph ─▶ run ─▶ evaluate … all_gather        ┘

Each rank runs its graph as far as its next communicating op, and says what it would send. Ranks of a group whose calls
meet must agree on the wire: kind, number of elements, dtype and reduction. Results are made of what was sent, in wire
order, so that rows which are sent in another order arrive in that order. Inductor's scheduling is not seen here, nor
how kernels move the data: an op's wire is that of the collective in its definition.

`OWN_TRANSPORT`: graphs are rewritten as for GPUs, where collectives go by asynctp's own transport, and calls that meet
must agree on that too, and on their graphs' accords. Over torch's, ranks compare these before they send anything.
"""

from __future__ import annotations

import hashlib
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

from asynctp_passes import Report, ops
from asynctp_passes.ir.records import Answer, Question
from asynctp_passes.planning import overlap
from asynctp_passes.ranks import undo
from asynctp_passes.torch_private import process_groups

__all__ = [
    "OWN_TRANSPORT",
    "RIGHT",
    "Setting",
    "Verdict",
    "accord_of",
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
        fault: `"crash"`, `"unlike calls"`, `"unlike forms"`, `"no peer"`, `"order"`, `"values"`; empty when right.
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
        apart: Each rank has a form of the program that all ranks have compiled and agreed on; others may run another.
            Then an error is right where ranks that meet have unlike accords, or keep unlike gathers: at the call, or
            when the timeout of the group is over. Nothing else that is wrong is.
        refusing: A seed for questions whose answer is no, though all ranks ask alike. None: there are none.
    """

    own_transport: bool = False
    apart: bool = False
    refusing: int | None = None

    def answer(self, rank: int, own: Question, posted: Mapping[int, Sequence[Question]], groups: Groups) -> Answer:
        """The answer to a rank's question. All of its deviations are done or none; gathers are kept one by one."""
        peers = next(ranks for ranks in groups[own.group] if rank in ranks)
        found = [[one for one in posted[peer] if _place(one) == _place(own)] for peer in peers]
        agreed, refused = set[str](), dict[str, str]()
        for texts in filter(None, [own.deviations, *((text,) for text in own.keeps)]):
            has_it = [any(texts == one.deviations or texts[0] in one.keeps for one in asked) for asked in found]
            if (self.apart or all(has_it)) and not self._refuses(peers, own, texts):
                agreed.update(texts)
            else:
                refused |= dict.fromkeys(texts, "rank does not" if not all(has_it) else "refused")
        done = bool(own.deviations) and agreed.issuperset(own.deviations)
        return Answer(frozenset(agreed), refused, accord_of(own) if done else 0)

    def _refuses(self, peers: tuple[int, ...], own: Question, texts: Sequence[str]) -> bool:
        drawn = random.Random(f"{self.refusing}/{own.group}/{peers}/{texts}").random()
        return self.refusing is not None and drawn < 0.4


def _place(question: Question) -> tuple[str, str, str]:
    return question.group, question.phase, question.communicates


def accord_of(question: Question) -> int:
    """The number that calls carry where the question's deviations are done."""
    told = repr((question.phase, question.communicates, question.deviations))
    return 1 + int(hashlib.sha256(told.encode()).hexdigest(), 16) % (1 << 31)


OWN_TRANSPORT = Setting(own_transport=True)


# --- the check ------------------------------------------------------------------------------------------------
def check(program: Program, rewrite: Rewrite | None = None, setting: Setting = Setting()) -> Verdict:
    """Rewrite the graphs of all ranks, and compare what they compute together with the program.

    Args:
        program: The program.
        rewrite: Rewrites a rank's graph; by default the pass does, with the ranks' answers.
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
    unlike = ""
    try:
        rewritten, reports, accords = rewrite_all(graphs, groups, rewrite, setting)
        unlike = _unlike_forms(accords, groups)
        if unlike and not setting.own_transport:  # `ops.run_check` says so before anything is sent
            raise Unmatched("unlike forms", unlike)
        actual = run_in_lockstep(rewritten, inputs, groups, setting.own_transport)
    except Unmatched as error:
        is_named = error.verdict.fault == "unlike forms" or (unlike and error.verdict.fault == "no peer")
        return RIGHT if setting.apart and is_named else error.verdict
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


Accords = Sequence[Mapping[str, int]]
"""By rank, and by group."""


def rewrite_all(
    graphs: Sequence[fx.Graph],
    groups: Groups,
    rewrite: Rewrite | None = None,
    setting: Setting = Setting(),
) -> tuple[list[fx.Graph], list[Report], Accords]:
    """Rewrite copies of all ranks' graphs; what changes what ranks send is done if every rank of the group has it."""
    if rewrite is not None:
        return *_rewritten(graphs, rewrite), [{} for _ in graphs]
    posted: dict[int, Sequence[Question]] = {}
    accords: dict[int, dict[str, int]] = {}

    def run(rank: int, graph: fx.Graph, answer: Callable[[Question], Answer]) -> Report:
        def ask(questions: Sequence[Question], config: Any) -> list[Answer]:
            posted.setdefault(rank, questions)
            answers = [answer(one) for one in questions]
            accords[rank] = {one.group: said.accord for one, said in zip(questions, answers, strict=True)}
            return answers

        def peers(group: str) -> tuple[int, ...]:
            return next(ranks for ranks in groups[group] if rank in ranks)

        with (
            mock.patch.object(process_groups, "size_of_group", lambda group: len(peers(group))),
            mock.patch.object(process_groups, "rank_in_group", lambda group: peers(group).index(rank)),
            mock.patch.object(undo, "ask", ask),
            mock.patch.object(ops, "on_wire", return_value=setting.own_transport),
        ):
            return run_pass(graph)

    def post(rank: int, graph: fx.Graph) -> Report:
        return run(rank, graph, lambda own: Answer(frozenset((*own.deviations, *own.keeps))))

    def obey(rank: int, graph: fx.Graph) -> Report:
        return run(rank, graph, lambda own: setting.answer(rank, own, posted, groups))

    _rewritten(graphs, post)
    return *_rewritten(graphs, obey), [accords[rank] for rank in range(len(graphs))]


def _unlike_forms(accords: Accords, groups: Groups) -> str:
    """The groups whose ranks run graphs of unlike accords, with these."""
    told = []
    for group, all_peers in groups.items():
        for ranks in all_peers:
            found = {rank: accords[rank].get(group, 0) for rank in ranks}
            told += [f"{group!r}: {found}"] if len(set(found.values())) > 1 else []
    return ", ".join(told)


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
    return any(one.done for one in report.questions)


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
        own = [call.transport for call in calls]
        fault = "unlike forms" if "torch's" not in own and len(set(own)) > 1 else "unlike calls"
        raise Unmatched(fault, "; ".join(f"rank {rank}: {one}" for rank, one in zip(ranks, calls, strict=True)))
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
    """Whose a call is, and of which accord. A gather that all ranks keep is pulled, and any other pushed."""
    if not lockstep.op_name(node.target).startswith("asynctp"):
        return "torch's"
    kept = arguments.get("all_keep")
    kept = arguments.get("return_a_full") if kept is None else kept
    return ("asynctp's kept" if kept else "asynctp's") + f" {arguments.get('accord', 0)}"


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
