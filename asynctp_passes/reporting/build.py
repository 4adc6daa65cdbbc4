"""Build the report of a graph from its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes import ops
from asynctp_passes.config import Config
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.matmuls import is_matmul
from asynctp_passes.ir.nodes import (
    call_as_json,
    called_name,
    describe,
    module_of,
    source_of,
    value_of,
)
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.order import REMATERIALIZED
from asynctp_passes.ir.records import Answers, Question
from asynctp_passes.ir.traversal import phase_of
from asynctp_passes.matching.chains import Bucket, Candidate, Decision, GatherChain, Hoist, ScatterChain, Term
from asynctp_passes.ops.calls import INVARIANT
from asynctp_passes.planning import cost_model
from asynctp_passes.planning.legality import is_named_for_data, on_wire
from asynctp_passes.planning.plan import Plan, outcome_of, untouched
from asynctp_passes.reasons import BELOW_THRESHOLD, Outcome
from asynctp_passes.reporting import internal
from asynctp_passes.reporting.of_graph import plan_digest, report_of_graph
from asynctp_passes.reporting.report import Bucketed, Note, Remark, Report
from asynctp_passes.torch_private import dynamo, inductor_options

_LIKE_WEIGHTS = (
    "it looks like a weight's gradient, as FSDP reduces them, and is taken for tensor parallelism, since its group "
    "moves activations elsewhere in this graph or is named in Config(groups=...), where you can decide that"
)
_SCALES = "the scales travel with the data of"
_SUM = "only a sum is used, which is reduced once, by"
_INVARIANT = (
    "rows of the fused chains have the same bits however many rows there are. What sums over rows, such as a weight's "
    "gradient, depends on all of them, and other ops are the program's own"
)
_VARIANT = (
    'invariant="batch" is a promise of the kernels for GPUs. On this device, the bits of fused chains may depend on '
    "how many rows there are, as those of its matmuls do"
)
_SMALL = (
    "the program's own ops make these chains, since they are smaller than min_bytes or min_flops asks for. So their "
    "bits may depend on how many rows there are. Set min_bytes=0 and min_flops=0, and they are fused"
)
_ROWS_ALONE = (
    "Inductor's coordinate_descent_tuning makes a matmul of one row a sum of products, so a row alone has other bits "
    "than in a batch. Set torch._inductor.config.coordinate_descent_tuning = False, and leave out "
    'mode="max-autotune", which switches it on'
)
_UNSHARDED = (
    "at best the sum overlaps with the matmul, and sending it to all ranks does not; shard activations over the "
    "sequence (SequenceParallel, Shard(1) outputs) to overlap that too"
)

_OWN_PART = "a reduce-scatter in place of the all-reduce, since each rank uses its own part of the sum alone"
_LITTLE = "little overlaps, since the matmuls are small beside what is sent"
_CUT_FOR_DDP = (
    "set torch._dynamo.config.optimize_ddp = False, if the program has a matmul next to it. Torch cuts graphs of "
    "DistributedDataParallel into pieces, and may have cut between the two"
)


def report_of(graph: fx.Graph, plan: Plan, config: Config, questions: Sequence[Question], answers: Answers) -> Report:
    """The report of a plan that has not been done yet, with notes of what the ranks refused."""
    buckets, phase = tuple(_bucketed(bucket) for bucket in plan.buckets), phase_of(graph)
    remarks = tuple(
        _remark(one, phase, plan.outcome(one), plan.op_alone(one.candidate.collective)) for one in plan.decisions
    )
    rows_alone: list[Note] = []
    if config.invariant == "batch":
        kept = {one.collective.node.name for one in plan.candidates if on_wire(one.collective)}
        if kept and inductor_options.is_on("coordinate_descent_tuning"):
            rows_alone = [Note("torch", _ROWS_ALONE)]
        remarks = tuple(
            dataclasses.replace(one, invariant="batch") if one.outcome == "FUSED" and one.collective in kept else one
            for one in remarks
        )
    why = "since ranks differ" if config.deviate else "as the options ask"
    reasons = (reason for answer in answers.values() for reason in answer.refused.values())
    ranks_differ = [Note("ranks", f"not done, {why}: {reason}") for reason in dict.fromkeys(reasons)]
    names = ", ".join(one.collective.node.name for one in plan.own_parts)
    own_parts = [Note("own", f"{_OWN_PART}: {names}")] if names else []  # of all-reduces without a matmul
    report = report_of_graph(graph, config, remarks, buckets, _unfused(plan.decisions, config))
    return dataclasses.replace(
        report,
        questions=tuple(one.with_answer(answers[one.group]) for one in questions),
        notes=(*report.notes, *_bits(remarks, config), *rows_alone, *ranks_differ, *own_parts),
    )


def _bits(remarks: Sequence[Remark], config: Config) -> list[Note]:
    """The notes on what bits depend on where chains are to be batch-invariant: of fused ones, and of small ones."""
    fused = [one for one in remarks if one.outcome == "FUSED"]
    small = ", ".join(one.collective for one in remarks if one.code == BELOW_THRESHOLD.code)
    if config.invariant != "batch":
        return []
    texts = [_INVARIANT if all(one.invariant for one in fused) else _VARIANT] if fused else []
    return [Note("bits", text) for text in (*texts, *([f"{small}: {_SMALL}"] if small else []))]


def _unfused(decisions: Sequence[Decision], config: Config) -> list[Collective]:
    """The collectives that may have their matmul in another graph, of groups that are not left alone."""
    alone = [one.candidate for one in decisions if one.refusal is not None and one.refusal.reason.may_be_cut_off]
    return [one.collective for one in alone if config.groups != "auto" or not is_named_for_data(one)]


def _bucketed(bucket: Bucket) -> Bucketed:
    return Bucketed(
        collectives=tuple(member.node.name for member in bucket.members),
        group=bucket.collective.group_key,
        reduce_op=bucket.collective.reduce_op,
        dtype=str(value_of(bucket.inputs[0]).dtype).removeprefix("torch."),
        bytes=sum(cost_model.bytes_of(node) or 0 for node in bucket.inputs),
    )


def _remark(decision: Decision, phase: str, outcome: Outcome, op: str = "") -> Remark:
    candidate, refusal = decision.candidate, decision.refusal
    collective = candidate.collective
    kind = _kind(candidate)
    common = {
        "kind": kind,
        "collective": collective.node.name,
        "nodes": tuple(node.name for node in candidate.nodes),
        "source": _first(source_of, candidate),
        "module": _first(module_of, candidate),
        "group": collective.group_key,
        "group_size": collective.group_size,
        "shapes": _shapes(candidate),
        "rematerialized_bytes": collective.node.meta.get(REMATERIALIZED, 0) if phase == "backward" else 0,
    }
    if refusal is not None:
        reason = refusal.reason
        cut = reason.may_be_cut_off and dynamo.is_cut_for_ddp()
        return Remark(
            outcome=outcome,
            code=reason.code,
            name=reason.name,
            message=str(refusal),
            hint=_CUT_FOR_DDP if cut else reason.hint_for(collective.kind),
            op=op,
            **common,  # type: ignore[arg-type]
        )
    return Remark(outcome=outcome, **_fused_facts(candidate, kind), **common)  # type: ignore[arg-type]


def _kind(candidate: Candidate) -> str:
    chain, collective = candidate.chain, candidate.collective
    if candidate.joins is not None:
        return _kind(candidate.joins)
    if chain is None:
        return called_name(collective.node) if collective.kind == "other" else collective.kind
    return chain.kind


def _first(place_of: Callable[[fx.Node], str | None], candidate: Candidate) -> str | None:
    """A place of the first of the matmuls and the collective that has one."""
    own = [node for node in candidate.nodes if is_matmul(node)] if candidate.joins is not None else []
    matmuls = own if candidate.chain is None else [matmul.node for matmul in candidate.chain.matmuls]
    places = (place_of(node) for node in (*matmuls, candidate.collective.node))
    return next((place for place in places if place is not None), None)


def _shapes(candidate: Candidate) -> dict[str, str]:
    collective, chain = candidate.collective, candidate.chain
    part = chain.own_part if isinstance(chain, ScatterChain) else None
    output = collective.node if part is None or part.by_place else part.ends[0]
    shapes = {"input": describe(collective.input), "output": describe(output)}
    if chain is not None:
        products = [f"{describe(matmul.a)} @ {describe(matmul.b)}" for matmul in chain.matmuls]
        shapes["matmul"] = (", " if collective.kind == "all_gather" else " + ").join(products)
    return shapes


def _fused_facts(candidate: Candidate, kind: str) -> dict[str, object]:
    chain, device = candidate.chain, value_of(candidate.collective.node).device.type
    facts: dict[str, object] = {"op": f"asynctp::{kind}", "implementation": ops.implementation(device)}
    if chain is not None:
        notes = (
            _gather_notes(candidate, chain) if isinstance(chain, GatherChain) else _reduction_notes(candidate, chain)
        )
        costs = cost_model.cost_of(chain)
        if share := cost_model.overlaps_little(costs, chain.matmuls[0].a):
            notes.append(f"{_LITTLE}: by the cost model they take {share} of the time of what they overlap with")
        facts |= {
            "message": "; ".join(notes),
            "keeps_gather": chain.hoist is not None and bool(chain.hoist.still_needed_by),
            "comm_bytes": costs.comm_bytes,
            "flops": costs.flops,
            "estimate_us": costs.estimate_us(cost_model.machine_for(chain.matmuls[0].a)),
        }
    if candidate.joins is not None:
        lead = candidate.joins.collective
        facts["message"] = f"{_SCALES if lead.kind == 'all_gather' else _SUM} {lead.node.name}"
    return facts


def _gather_notes(candidate: Candidate, chain: GatherChain) -> list[str]:
    """Notes on a fused gather: that it changes its place, what is gathered for it, and who else uses it."""
    follows = chain.follows
    place = [] if follows is None else [f"it follows {follows.name}, which what its matmuls need depends on"]
    if chain.hoist is not None:
        return [*place, *_hoist_facts(chain, chain.hoist), *candidate.left_out]
    returned = [f"the gathered tensor is returned too: {'; '.join(candidate.left_out)}"]
    return [*place, *(returned if candidate.left_out else [])]


def _reduction_notes(candidate: Candidate, chain: ScatterChain) -> list[str]:
    """Notes on a fused reduction."""
    unsharded = [_UNSHARDED] if chain.placement is None else []
    weights = [_LIKE_WEIGHTS] if candidate.weights else unsharded
    own = [_OWN_PART] if chain.own_part is not None else []
    others = ", ".join(collective.node.name for collective in chain.joined)
    joined = [f"one {chain.collective.kind} of the sum, for {others} too"] if others else []
    return [*own, *joined, *_added(chain), *_multiplied(chain), *_converted(chain), *weights]


def _added(chain: ScatterChain) -> list[str]:
    """The terms of the sum that the fused op does not multiply."""
    notes = {"computed before, and added to the products": chain.added, "added to the result": chain.added_after}
    return [f"{note}: {', '.join(map(_named, terms))}" for note, terms in notes.items() if terms]


def _named(term: Term) -> str:
    count = "" if term.factor == 1 else f"{term.factor:g} times "
    count += "" if term.early is None else f"the sum over {term.early.count!s} of "
    return f"{count}{describe(term.node)} of {called_name(term.node) or term.node.name}"


def _multiplied(chain: ScatterChain) -> list[str]:
    """The factors by which the fused op multiplies its products and their sum."""
    products = [matmul.factor for matmul in chain.matmuls]
    numbers = ", ".join(f"{number:g}" for number in products)
    notes = [] if set(products) == {1.0} else [f"products multiplied by {numbers}"]
    return notes + ([] if chain.factor == 1 else [f"their sum multiplied by {chain.factor:g}"])


def _converted(chain: ScatterChain) -> list[str]:
    """The dtype that is sent where results of matmuls are converted before they are summed."""
    if chain.sum_dtype is None:
        return []
    product, whole = describe(chain.matmuls[0].node), describe(chain.collective.node)
    return [f"each {product} is converted before it is sent, for {whole}"]


def _hoist_facts(chain: GatherChain, hoist: Hoist) -> list[str]:
    """The tensors that are gathered in its place and with it, each with the bytes that a rank receives."""
    gather, ranks = chain.collective.node, chain.collective.group_size
    facts = [f"computed on the shard and gathered: {' and '.join(_amount(node, ranks) for node in hoist.gathered)}"]
    if hoist.cross_rank:
        found = ", ".join(f"{called_name(one.step.node)} {one.step.node.name}" for one in hoist.cross_rank)
        facts.append(f"over all ranks' rows, found by each rank in its own and gathered: {found}")
    side_gathers = [one.node for one in hoist.side_gathers if one.root is not hoist.row_numbers]
    if side_gathers:
        facts.append(f"gathered on their own: {', '.join(_amount(node, ranks) for node in side_gathers)}")
    if not hoist.still_needed_by:
        return [*facts, f"the gather of {_amount(gather, ranks)} is gone"]
    users = ", ".join(node.name for node in hoist.still_needed_by)
    return [*facts, f"the gather of {_amount(gather, ranks)} stays for {users}, and is waited for after the fused op"]


def _amount(whole: fx.Node, ranks: int) -> str:
    """A gathered tensor, with the bytes that a rank receives of it."""
    count = cost_model.received_bytes(whole, ranks)
    return describe(whole) + ("" if count is None else f" ({count} bytes)")


def with_calls(report: Report, calls: Mapping[str, Mapping[str, Any]], by_torch: str) -> Report:
    """The report with what the fused ops are called with, by the name of the collective that each replaced, and how.

    by_torch: Why the generated code calls them by `torch.ops`, as `call_sites.mark` has it.
    """
    remarks = tuple(_with_call(remark, calls.get(remark.collective, {})) for remark in report.remarks)
    told = f"fused ops are called by torch.ops ({by_torch}), which takes the host longer"
    how = [Note("calls", told)] if by_torch else []
    return dataclasses.replace(report, remarks=remarks, notes=(*report.notes, *how))


def _with_call(remark: Remark, call: Mapping[str, Any]) -> Remark:
    """The remark with what the fused op is called with, and what that makes it run here."""
    told = call_as_json(call)
    if not told:
        return remark
    accord = {"accord": INVARIANT} if remark.invariant else {}
    name = remark.op.removeprefix("asynctp::")
    runs = ops.expected_implementation(name, {**call, **accord}, remark.group_size)
    return dataclasses.replace(remark, call=told, implementation=runs)


def report_of_failure(graph: fx.Graph, config: Config, phase: str, summary: str) -> Report:
    """On a graph that stays as it is since asynctp failed: each collective that it may have fused is MISSED."""
    remarks: tuple[Remark, ...] = ()
    with internal.contained("list the collectives of the graph"):
        multiplies = any(map(is_matmul, graph.nodes))
        collectives = read_collectives(graph) if phase != "joint" else []
        decisions = (untouched(one, config, summary, multiplies) for one in collectives)
        remarks = tuple(_remark(decision, phase, outcome_of(decision)) for decision in decisions)
    return Report(
        graph=dynamo.compile_name(),
        phase=phase,
        remarks=remarks,
        torch_version=str(torch.__version__),
        config_digest=config.digest(),
        plan_digest=plan_digest(remarks, ()),
        internal_errors=(summary,),
    )
