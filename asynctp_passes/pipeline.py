"""The order of the steps: find, decide, report, agree, raise if strict, and only then rewrite."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes import compat, cost, ops, torch_bugs
from asynctp_passes.agree import agree, withdraw
from asynctp_passes.chain import (
    Bundle,
    Candidate,
    Collective,
    Decision,
    GatherChain,
    Hoist,
    ScatterChain,
    Step,
    Term,
    fused_chains,
)
from asynctp_passes.coalesce import coalesce
from asynctp_passes.config import Config
from asynctp_passes.decide import decide_graph
from asynctp_passes.errors import AsyncTPError, raise_if_strict
from asynctp_passes.fxview import (
    describe,
    module_of,
    op_name,
    phase_of,
    plain,
    source_of,
    tangents_of,
    tensor_of,
    value_of,
)
from asynctp_passes.hide import hide
from asynctp_passes.read import called_name, is_matmul
from asynctp_passes.reasons import RESULT_DROPPED
from asynctp_passes.regather import Again, again
from asynctp_passes.report import Coalesced, Remark, Report
from asynctp_passes.rewrite import rewrite, store
from asynctp_passes.scales import scales_to_store
from asynctp_passes.views import is_conversion, is_view

__all__ = ["REGATHERED", "run", "run_joint"]

REGATHERED = "asynctp_regathered"
"""Of a gather that the backward makes again, in its `meta`: the bytes that were gathered, 0 where that is symbolic."""

_LIKE_WEIGHTS = (
    "it looks like a weight's gradient, as FSDP reduces them, and is taken for tensor parallelism, since its group "
    "moves activations elsewhere in this graph or is named in Config(groups=...), where you can decide that"
)
_SCALES = "the scales travel with the data of"
_SUM = "only a sum is used, which is reduced once, by"
_UNSHARDED = (
    "at best the sum hides behind the matmul, and sending it to all ranks does not; shard activations over the "
    "sequence (SequenceParallel, Shard(1) outputs) to hide that too"
)


def run(graph: fx.Graph, config: Config | None = None) -> Report:
    """Fuse every chain of a graph that can be proven, in place, and report on every collective.

    Args:
        graph: A functional graph of aten and `_c10d_functional` ops, with fake tensors in `meta["val"]`: what
            Inductor hands to a post-grad pass, or `make_fx` under fake tensors gives.
        config: The configuration; the environment's and the defaults when None.

    Returns:
        The report. No process group need exist: sizes of groups are read from the graph.

    Raises:
        DisagreementError: Another rank decided differently about this program; the graph is untouched.
        StrictError: Chains were missed and `config.strict` forbids it; the graph is untouched.
        ExpectError: Fewer chains can be fused than `config.expect`; the graph is untouched.
        TypeError: `graph` is no graph, but a GraphModule, say.
    """
    _require_graph(graph)
    config = Config.given(config)
    found, context = decide_graph(graph, config)
    decisions = hide(graph, found)
    bundles = coalesce(decisions, context)
    report = _report(graph, decisions, bundles, config)
    agree(report, config)
    try:
        raise_if_strict(report, config)
    except AsyncTPError:
        withdraw(report)
        raise
    chains = fused_chains(decisions)
    hidden = [decision for decision in decisions if decision.behind]
    dropped = [one.candidate.collective for one in decisions if one.refusal and one.refusal.reason is RESULT_DROPPED]
    calls = rewrite(graph, chains, context.sizes, hidden, bundles, dropped)
    if chains and config.store_scales:
        store(graph, scales_to_store(graph))
    remarks = tuple(_with_call(remark, calls.get(remark.collective, {})) for remark in report.remarks)
    return dataclasses.replace(report, remarks=remarks)


def _require_graph(graph: object) -> None:
    if not isinstance(graph, fx.Graph):
        remedy = "of a GraphModule pass its `graph`, and call its `recompile()` afterwards"
        raise TypeError(f"asynctp: graph={type(graph).__name__} is not valid; it must be an fx.Graph: {remedy}")


def run_joint(graph: fx.Graph, config: Config) -> None:
    """Tag, in a graph of a forward and its backward, the gathers that are made again in the backward (`regather`).

    Other graphs stay as they are, and so does what is computed: the partitioner, which comes next, follows the tags.

    Args:
        graph: A joint graph, as Inductor hands it to a joint pass.
        config: The configuration.

    Raises:
        DisagreementError: Another rank decided differently about this program; the graph is untouched.
    """
    if not tangents_of(graph):
        return
    decisions, _ = decide_graph(graph, config)
    found = again(graph, decisions, config.regather)
    agree(_joint_report(graph, found, [one.candidate.collective for one in decisions], config), config)
    for one in found:
        if one.chosen:
            compat.recompute_in_backward(one.nodes)
            one.gather.node.meta[REGATHERED] = one.bytes or 0


def _joint_report(graph: fx.Graph, found: Sequence[Again], collectives: Sequence[Collective], config: Config) -> Report:
    """What the ranks compare: which gathers are made again. It is published nowhere: both graphs get reports."""
    names = {True: "REGATHERED", False: "KEPT"}
    remarks = [
        Remark("SKIPPED", "all_gather", one.gather.node.name, name=names[one.chosen], group=one.gather.group_key)
        for one in found
    ]
    return Report(
        graph=compat.compile_name(),
        phase="joint",
        remarks=tuple(remarks),
        torch_version=str(torch.__version__),
        config_digest=config.digest(),
        program_digest=_program_digest(graph, collectives),
        collectives_digest=_collectives_digest(collectives),
    )


# --- the report -------------------------------------------------------------------------------------------
def _report(graph: fx.Graph, decisions: Sequence[Decision], bundles: Sequence[Bundle], config: Config) -> Report:
    coalesced, phase = tuple(_coalesced(bundle) for bundle in bundles), phase_of(graph)
    collectives = [decision.candidate.collective for decision in decisions]
    place = {node: index for index, one in enumerate(collectives) for node in one.results}
    remarks = tuple(_remark(decision, phase, place) for decision in decisions)
    return Report(
        graph=compat.compile_name(),
        phase=phase,
        remarks=remarks,
        torch_version=str(torch.__version__),
        config_digest=config.digest(),
        plan_digest=_plan_digest(remarks, coalesced),
        coalesced=coalesced,
        program_digest=_program_digest(graph, collectives),
        collectives_digest=_collectives_digest(collectives),
        notes=torch_bugs.notes(graph, phase),
    )


def _plan_digest(remarks: Sequence[Remark], coalesced: Sequence[Coalesced]) -> str:
    """A hash of what was decided, which ranks that traced the same program share."""
    plan = [(remark.outcome, remark.kind, remark.code, remark.nodes, remark.shapes) for remark in remarks]
    return hashlib.sha256(repr((plan, [entry.collectives for entry in coalesced])).encode()).hexdigest()[:16]


def _program_digest(graph: fx.Graph, collectives: Sequence[Collective]) -> str:
    """A hash of the ops on tensors and how they are connected, and of the collectives' groups by first appearance."""
    details = dict(zip((one.node for one in collectives), map(str, _told(collectives)), strict=True))
    place: dict[fx.Node, int] = {}
    digest = hashlib.sha256()
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            place[node] = len(place)
            inputs = [place[source] for source in node.all_input_nodes if source in place]
            digest.update(f"{node.op} {op_name(node)} {inputs} {details.get(node, '')}\n".encode())
    return digest.hexdigest()[:16]


def _collectives_digest(collectives: Sequence[Collective]) -> str:
    """A hash of what is communicated, in order: the ops, the reductions, and the groups by first appearance."""
    return hashlib.sha256(repr(_told(collectives)).encode()).hexdigest()[:16]


def _told(collectives: Sequence[Collective]) -> list[tuple[int, str, str]]:
    """What there is to say about each collective on all ranks: groups have other names there."""
    groups = {key: index for index, key in enumerate(dict.fromkeys(one.group_key for one in collectives))}
    return [(groups[one.group_key], called_name(one.node), one.reduce_op) for one in collectives]


def _coalesced(bundle: Bundle) -> Coalesced:
    return Coalesced(
        collectives=tuple(member.node.name for member in bundle.members),
        group=bundle.collective.group_key,
        reduce_op=bundle.collective.reduce_op,
        dtype=str(value_of(bundle.inputs[0]).dtype).removeprefix("torch."),
        bytes=sum(cost.bytes_of(node) or 0 for node in bundle.inputs),
    )


def _remark(decision: Decision, phase: str, place: Mapping[fx.Node, int]) -> Remark:
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
        "regathered_bytes": collective.node.meta.get(REGATHERED, 0) if phase == "backward" else 0,
    }
    if refusal is not None:
        reason = refusal.reason
        outcome = "MISSED" if reason.in_scope else "SKIPPED"
        return Remark(
            outcome=outcome,  # type: ignore[arg-type]
            code=reason.code,
            name=reason.name,
            message=str(refusal),
            hint=reason.hint,
            **common,  # type: ignore[arg-type]
        )
    moved = _moved(candidate.chain, place)
    return Remark(outcome="FUSED", moved=moved, **_fused_facts(candidate, kind), **common)  # type: ignore[arg-type]


def _moved(chain: GatherChain | ScatterChain | None, place: Mapping[fx.Node, int]) -> tuple[str, ...]:
    """See `Remark.moved`; without sizes, as one rank may compile for static and another for dynamic ones."""
    if isinstance(chain, ScatterChain):
        return (f"factors: {_numbers(chain.counts)}",) if set(chain.counts) - {1.0} else ()
    if chain is None or chain.hoist is None:
        return ()
    steps = {step.node: step for step in chain.hoist.computed}
    needed: dict[fx.Node, Step] = {}
    stack = list(chain.hoist.travels)
    while stack:
        step = steps.get(stack.pop())
        if step is not None and step.node not in needed:
            needed[step.node] = step
            stack += [part.root for _, part in step.parts]
    texts: dict[fx.Node, str] = {}
    return tuple(sorted(_text(node, place, texts) for node in needed))


def _text(node: fx.Node, place: Mapping[fx.Node, int], texts: dict[fx.Node, str]) -> str:
    """An op with its numbers, and in place of its tensors how they are made, as far as a collective or an input."""
    stack = [node]
    while stack:
        one = stack[-1]
        leaf = f"collective {place[one]}" if one in place else "" if one.op == "call_function" else "input"
        behind = [] if leaf else [source for source in one.all_input_nodes if tensor_of(source) is not None]
        if missing := [source for source in behind if source not in texts]:
            stack += missing
            continue
        texts[one] = leaf or _short(f"{called_name(one)}({', '.join(_arguments(one, texts))})")
        stack.pop()
    return texts[node]


def _arguments(node: fx.Node, texts: Mapping[fx.Node, str]) -> Iterator[str]:
    sizes = is_view(node) and not is_conversion(node)
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, fx.Node) and value in texts:
            yield texts[value]
        elif isinstance(value, int | float | torch.dtype) and not sizes:
            yield str(value)


def _short(text: str) -> str:
    """A text, or of a long one its beginning and a hash."""
    return text if len(text) <= 200 else f"{text[:40]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _kind(candidate: Candidate) -> str:
    chain, collective = candidate.chain, candidate.collective
    if candidate.joins is not None:
        return _kind(candidate.joins)
    if chain is None:
        return called_name(collective.node) if collective.kind == "other" else collective.kind
    scaled = "scaled_" if chain.matmuls[0].scaled is not None else ""
    if isinstance(chain, GatherChain):
        return f"all_gather_{scaled}matmul"
    return f"{scaled}matmul_{collective.kind}"


def _first(place_of: Callable[[fx.Node], str | None], candidate: Candidate) -> str | None:
    """A place of the first of the matmuls and the collective that has one."""
    own = [node for node in candidate.nodes if is_matmul(node)] if candidate.joins is not None else []
    matmuls = own if candidate.chain is None else [matmul.node for matmul in candidate.chain.matmuls]
    places = (place_of(node) for node in (*matmuls, candidate.collective.node))
    return next((place for place in places if place is not None), None)


def _shapes(candidate: Candidate) -> dict[str, str]:
    collective, chain = candidate.collective, candidate.chain
    shapes = {"input": describe(collective.input), "output": describe(collective.node)}
    if chain is not None:
        products = [f"{describe(matmul.a)} @ {describe(matmul.b)}" for matmul in chain.matmuls]
        shapes["matmul"] = (", " if isinstance(chain, GatherChain) else " + ").join(products)
    return shapes


def _fused_facts(candidate: Candidate, kind: str) -> dict[str, object]:
    chain, device = candidate.chain, value_of(candidate.collective.node).device.type
    facts: dict[str, object] = {"op": f"asynctp::{kind}", "implementation": ops.implementation(device)}
    if candidate.joins is not None:
        lead = candidate.joins.collective
        facts["message"] = f"{_SCALES if lead.kind == 'all_gather' else _SUM} {lead.node.name}"
    elif isinstance(chain, GatherChain) and chain.hoist is not None:
        facts["message"] = "; ".join([*_hoist_facts(chain, chain.hoist), *candidate.left_out])
        facts["keeps_gather"] = bool(chain.hoist.kept)
    elif candidate.left_out:
        facts["message"] = f"the gathered tensor is returned too: {'; '.join(candidate.left_out)}"
    elif isinstance(chain, ScatterChain):
        unsharded = [_UNSHARDED] if candidate.collective.kind == "all_reduce" else []
        weights = [_LIKE_WEIGHTS] if candidate.weights else unsharded
        notes = [*_summed(chain), *_added(chain), *_multiplied(chain), *_converted(chain), *weights]
        facts |= {"message": "; ".join(notes)} if notes else {}
    if chain is not None:
        costs = cost.cost_of(chain)
        facts |= {
            "comm_bytes": costs.comm_bytes,
            "flops": costs.flops,
            "estimate_us": costs.estimate_us(cost.machine_for(chain.matmuls[0].a)),
        }
    return facts


def _summed(chain: ScatterChain) -> list[str]:
    """The collectives besides its own that the op stands for, since only the sum of all is used."""
    others = ", ".join(collective.node.name for collective in chain.joined)
    return [f"one {chain.collective.kind} of the sum, for {others} too"] if others else []


def _added(chain: ScatterChain) -> list[str]:
    """What is no product of the fused op's."""
    notes = {"computed before, and added to the products": chain.added, "added to the result": chain.added_behind}
    return [f"{note}: {', '.join(map(_named, terms))}" for note, terms in notes.items() if terms]


def _named(term: Term) -> str:
    count = "" if term.factor == 1 else f"{term.factor:g} times "
    return f"{count}{describe(term.node)} of {called_name(term.node) or term.node.name}"


def _multiplied(chain: ScatterChain) -> list[str]:
    """By what the fused op multiplies, as the program does, behind the products."""
    products = [matmul.factor for matmul in chain.matmuls]
    notes = [] if set(products) == {1.0} else [f"products multiplied by {_numbers(products)}"]
    return notes + ([] if chain.factor == 1 else [f"their sum multiplied by {chain.factor:g}"])


def _numbers(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _converted(chain: ScatterChain) -> list[str]:
    """What is sent where products are converted before they are summed."""
    if chain.sum_dtype is None:
        return []
    product, whole = describe(chain.matmuls[0].node), describe(chain.collective.node)
    if chain.sends_products:
        return [f"{product} is sent as it is, and converted where the ranks' parts are added, to {whole}"]
    return [f"each {product} is converted before it is added, and the sum is sent like that, for {whole}"]


def _hoist_facts(chain: GatherChain, hoist: Hoist) -> list[str]:
    """What is gathered in place of the gathered tensor and beside it, with the bytes that a rank receives."""
    gather, ranks = chain.collective.node, chain.collective.group_size
    facts = [f"computed on the shard and gathered: {' and '.join(_amount(node, ranks) for node in hoist.travels)}"]
    if hoist.overall:
        found = ", ".join(f"{called_name(one.step.node)} {one.step.node.name}" for one in hoist.overall)
        facts.append(f"over all ranks' rows, found by each rank in its own and gathered: {found}")
    apart = [one.node for one in hoist.apart if one.root is not hoist.along]
    if apart:
        facts.append(f"gathered on their own: {', '.join(_amount(node, ranks) for node in apart)}")
    if not hoist.kept:
        return [*facts, f"the gather of {_amount(gather, ranks)} is gone"]
    users = ", ".join(node.name for node in hoist.kept)
    return [*facts, f"the gather of {_amount(gather, ranks)} stays for {users}, and is waited for after the fused op"]


def _amount(whole: fx.Node, ranks: int) -> str:
    """A gathered tensor, with the bytes that a rank receives of it."""
    count = cost.received_bytes(whole, ranks)
    return describe(whole) + ("" if count is None else f" ({count} bytes)")


def _with_call(remark: Remark, call: Mapping[str, Any]) -> Remark:
    """The remark with what the fused op is called with, and what that makes it run here."""
    told = plain(call)
    if not told:
        return remark
    name = remark.op.removeprefix("asynctp::")
    runs = ops.expected_implementation(name, call, remark.group_size)
    return dataclasses.replace(remark, call=told, implementation=runs)
