"""The checks a candidate must pass, as one table. Each is named for the good case and returns why it is not so."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from asynctp_passes import ops, reasons
from asynctp_passes.config import Config
from asynctp_passes.ir.nodes import describe, dtype_of, mutates, orders_streams, tensor_of, value_of
from asynctp_passes.ir.operations import Collective, Matmul, ScaledOptions, nodes_of
from asynctp_passes.ir.records import Answers
from asynctp_passes.ir.scales import scales_mismatch
from asynctp_passes.ir.sizes import Sizes, are_one, express, identical
from asynctp_passes.ir.traversal import draws
from asynctp_passes.matching.chains import Candidate, GatherChain
from asynctp_passes.matching.near_miss import to_register
from asynctp_passes.ops.checks import EXTREMES, PLAIN_DTYPES, REDUCE_OPS, SCALED_OUT_DTYPES
from asynctp_passes.ops.recipes import FP8_DTYPES
from asynctp_passes.planning.cost_model import bytes_of, cost_of, hoist_pays
from asynctp_passes.planning.deviations import LOCAL, Words
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import fx_graphs, symbolic_sizes

_DEVICES = {"cuda", "cpu"}
CONTRACTION_LIMIT = 64 << 20
"""Bytes over all ranks that kernels gather along the contraction or scatter by columns: their `DIRECT_LIMIT`."""
SMALL_BYTES = 256 << 10
"""Bytes up to which all-reduces of a maximum or minimum go by asynctp's transport: their `EXTREME_BYTES`.

One of more is left alone also when small ones become one: its time is bandwidth, and a copy would cost more.
"""
_SUMMED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EXTREME_DTYPES = (*PLAIN_DTYPES, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_INT32_LIMIT = (1 << 31) - (1 << 16)
"""Bytes from which torch has a call of a rank: what kernels count in."""


@dataclass(frozen=True)
class Context:
    """Facts for the checks besides the candidate.

    Attributes:
        segments: Number of in-place operations before each node.
        unused: Collectives whose result nothing uses, where they can go (`plan.unused_collectives`).
        tensor_parallel: Names of groups of tensor parallelism (`is_tensor_parallel`), as far as candidates have told;
            others move parameters and their gradients.
        with_weights: Names of groups that gather a parameter for certain: as a matmul's right operand.
        answers: What the ranks said to deviations, by group. Before they were asked a group is missing, and may do all.
        blind: The collectives by whose calls no unlike call of a peer would be found (`blind_calls`).
        opaque: The nodes of unregistered ops, which may communicate.
    """

    graph: fx.Graph
    sizes: Sizes
    config: Config
    segments: dict[fx.Node, int]
    unused: frozenset[fx.Node]
    tensor_parallel: frozenset[str] = frozenset()
    with_weights: frozenset[str] = frozenset()
    words: Words = field(default_factory=lambda: Words(()))
    answers: Answers = field(default_factory=dict)
    blind: Sequence[Collective] = ()
    opaque: Sequence[fx.Node] = ()

    def refused(self, group: str, text: str, *collectives: Collective, until: fx.Node | None = None) -> str | None:
        """Why a deviation may not be done; None for one that all ranks of the group do, or before they were asked.

        Where ranks run unlike graphs, their first calls that are compared have to meet. So what becomes another
        collective has none of the group's blind calls in its stretch: all graphs have as many before each stretch.
        `collectives` are those of the program that become others, and `until` a node behind which they come.
        """
        if LOCAL in text:
            return f"it has a size that only this rank knows: {text}"
        own = [one.start for one in collectives if one.group_key == group] + ([until] if until is not None else [])
        for one in self.blind:
            if one.group_key == group and own and min(own) <= one.start <= max(own):
                told = f"{one.kind}({one.reduce_op})" if one.reduce_op else one.kind
                return f"{text}: nothing compares ranks' calls of {told} of {describe(one.input)} on GPUs"
        answer = self.answers.get(group)
        return None if answer is None else answer.refuses(text)

    def compares_all(self, group: str) -> bool:
        """Whether an unlike call of a peer would be found at each collective of a group."""
        return all(one.group_key != group for one in self.blind)


Check = Callable[[Candidate, Context], Refusal | None]


def group_has_several_ranks(candidate: Candidate, context: Context) -> Refusal | None:
    collective = candidate.collective
    one = collective.kind != "other" and collective.group_size == 1
    return Refusal(reasons.SINGLE_RANK, collective.group_key) if one else None


def result_used(candidate: Candidate, context: Context) -> Refusal | None:
    node = candidate.collective.node
    return Refusal(reasons.RESULT_DROPPED, describe(node)) if node in context.unused else None


def collective_in_scope(candidate: Candidate, context: Context) -> Refusal | None:
    """Refusals that put a candidate out of scope come before the question of its group.

    Not so that of a bias or a scale, which may be a parameter.
    """
    refusal = _first(candidate)
    if refusal is None or refusal.reason.in_scope or refusal.reason is reasons.GATHERED_SCALE:
        return None
    return refusal


def group_enrolled(candidate: Candidate, context: Context) -> Refusal | None:
    groups, key = context.config.groups, candidate.collective.group_key
    if candidate.collective.kind == "other":
        return None
    if groups == "auto":
        weights = _weights_of(candidate, context.with_weights)
        if weights and key not in context.tensor_parallel:
            gather = candidate.collective.kind == "all_gather"
            reason = reasons.WEIGHT_GATHER if gather else reasons.WEIGHT_GRADIENT
            return Refusal(reason, f"{_shown(candidate, key)}: {weights}")
        return Refusal(reasons.DATA_PARALLEL_GROUP, _shown(candidate, key)) if is_named_for_data(candidate) else None
    return None if key in groups else Refusal(reasons.GROUP_NOT_ENROLLED, f"group {key} of {', '.join(groups)}")


def goes_by_wire(collective: Collective, config: Config) -> bool:
    """True for one of a group whose collectives are asynctp's."""
    return is_on_wire(collective.group_key, collective.mesh_dim, config)


def is_on_wire(group: str, mesh_dim: str, config: Config) -> bool:
    """True where the collectives of a group, of a mesh dimension of this name or none, are to be asynctp's.

    With `groups="auto"` these are all but those that are named for data parallelism. Ranks share both.
    """
    return group in config.groups if config.groups != "auto" else not _is_of_data(mesh_dim)


def can_be_alone(collective: Collective) -> bool:
    """True for a gather, a sum, or an all-reduce of a maximum, that asynctp's ops without a matmul stand for."""
    value = tensor_of(collective.node)
    reduces = collective.kind in ("reduce_scatter", "all_reduce")
    if value is None or collective.group_size == 1 or not (reduces or collective.kind == "all_gather"):
        return False
    if not collective.is_on_one_stream:  # a wait for what asynctp made on the op's own stream orders nothing
        return False
    if mutates(collective.node) or tensor_of(collective.input) is None or (value.dim() == 0 and not reduces):
        return False
    known = symbolic_sizes.is_contiguous(value) or symbolic_sizes.axes_by_stride(value) is not None
    extreme = collective.kind == "all_reduce" and collective.reduce_op in EXTREMES
    return known and (not reduces or collective.reduce_op in REDUCE_OPS or extreme)


def blind_calls(collectives: Iterable[Collective], config: Config) -> list[Collective]:
    """The collectives by whose calls no unlike call of a peer would be found. They are made as the program does.

    On CPUs a check comes before a graph's calls (`ops.run_check`). On GPUs a call's signature travels with it, by
    asynctp's transport. Torch's own collectives compare nothing, and have what kernels do not take
    (`asynctp_kernels.cuda.choose.wire`): other groups, dtypes and reductions, large maxima, and what does not fit.
    """
    return [one for one in collectives if not _is_compared(one, config)]


def _is_compared(collective: Collective, config: Config) -> bool:
    if not on_wire(collective) or collective.group_size == 1:
        return True
    if not (goes_by_wire(collective, config) and can_be_alone(collective)):
        return False
    kind, dtype, ranks = collective.kind, value_of(collective.source).dtype, collective.group_size or 1
    own = bytes_of(collective.input)
    if kind == "all_gather":
        return own is None or 0 < own < _INT32_LIMIT
    if collective.reduce_op in EXTREMES:
        return own is not None and 0 < own <= SMALL_BYTES and dtype in _EXTREME_DTYPES
    if dtype not in _SUMMED_DTYPES:
        return False
    limit = CONTRACTION_LIMIT // 2 if kind == "all_reduce" else CONTRACTION_LIMIT
    even = symbolic_sizes.statically_known_multiple(value_of(collective.input).numel(), 16 * ranks // dtype.itemsize)
    return even if own is None else 0 < own < _INT32_LIMIT * ranks and (even or own <= limit)


def on_wire(collective: Collective) -> bool:
    """True on devices where collectives can go by asynctp's own transport."""
    value = tensor_of(collective.input)
    return value is not None and ops.on_wire(value.device.type)


_DATA_PARALLEL = frozenset({"dp", "ddp", "fsdp", "hsdp", "data", "replicate"})


def is_named_for_data(candidate: Candidate) -> bool:
    """True when a word in the name of the group's mesh dimension (`dp_shard`) stands for data parallelism."""
    return _is_of_data(candidate.collective.mesh_dim)


def _is_of_data(mesh_dim: str) -> bool:
    return not _DATA_PARALLEL.isdisjoint(re.split(r"[^a-z]+", mesh_dim.lower()))


def is_tensor_parallel(candidate: Candidate, with_weights: Collection[str] = ()) -> bool:
    """True when the candidate tells that its group is one of tensor parallelism.

    It is a chain, proven or refused, that moves activations, over a group whose mesh dimension does not say otherwise.
    Groups `with_weights` gather a parameter for certain.
    """
    missed = any(one.reason.in_scope and one.reason is not reasons.NOT_ROWWISE for one in candidate.refusals)
    moves_activations = candidate.chain is not None or missed
    return moves_activations and not _weights_of(candidate, with_weights) and not is_named_for_data(candidate)


def _weights_of(candidate: Candidate, with_weights: Collection[str]) -> str:
    """The evidence that a collective is one of weights: one that may be is, if its group gathers some for certain."""
    if candidate.weights or not candidate.may_be_weights or candidate.collective.group_key not in with_weights:
        return candidate.weights
    return f"{candidate.nodes[-1].name} is of an input of the graph, and the group gathers parameters"


def _shown(candidate: Candidate, group: str) -> str:
    dim = candidate.collective.mesh_dim
    return f"group {group}" + (f', mesh dimension "{dim}"' if dim else "")


def chain_proven(candidate: Candidate, context: Context) -> Refusal | None:
    """Without a refusal there is a chain: the checks after this one take it as given."""
    return _first(candidate)


def reduce_op_supported(candidate: Candidate, context: Context) -> Refusal | None:
    collective = candidate.collective
    reduces = collective.kind in ("reduce_scatter", "all_reduce")
    wrong = reduces and collective.reduce_op not in ("sum", "avg")
    return Refusal(reasons.REDUCE_OP_UNSUPPORTED, f"{collective.reduce_op!r}") if wrong else None


def nothing_mutated_in_between(candidate: Candidate, context: Context) -> Refusal | None:
    first, last = (ends([context.segments[node] for node in candidate.nodes]) for ends in (min, max))
    if first == last:
        return None
    between = [node for node, number in context.segments.items() if first < number <= last]
    if changed := [node.name for node in between if mutates(node)]:
        return Refusal(reasons.MUTATED_IN_BETWEEN, ", ".join(changed))
    return Refusal(reasons.SEVERAL_STREAMS, ", ".join(node.name for node in between if orders_streams(node)))


def on_one_stream(candidate: Candidate, context: Context) -> Refusal | None:
    """A fused op runs on the stream of its collective. It orders nothing for others, as the collective's wait does."""
    nodes = [*(node for one in candidate.proven.collectives for node in one.nodes), *candidate.nodes]
    streams: dict[int | None, fx.Node] = {}
    for node in nodes:
        streams.setdefault(fx_graphs.stream_of(node), node)
    if len(streams) == 1:
        return None
    told = (f"{node.name} on {'the default' if number is None else number}" for number, node in streams.items())
    return Refusal(reasons.SEVERAL_STREAMS, ", ".join(told))


def passes_nothing_opaque(candidate: Candidate, context: Context) -> Refusal | None:
    """All that a fused op stands for lies on one side of each op that may communicate, as does its place."""
    chain = candidate.proven
    places = [one.start for one in chain.collectives] + ([] if chain.follows is None else [chain.follows])
    passed = [node for node in context.opaque if min(places) < node <= max(places)]
    return Refusal(reasons.OPAQUE_OP_BETWEEN, to_register(passed)) if passed else None


def kept_gather_can_move(candidate: Candidate, context: Context) -> Refusal | None:
    """A gather that stays beside a fused op comes after it, on all ranks: with the op it passes no random numbers."""
    chain = candidate.proven
    if chain.follows is None or chain.hoist is None or not chain.hoist.still_needed_by:
        return None
    first, last = chain.collective.node, max(nodes_of(chain.matmuls))
    drawn = [node.name for node in draws(context.graph) if first < node < last]
    return Refusal(reasons.RANDOM_BETWEEN, ", ".join(drawn)) if drawn else None


def values_known(candidate: Candidate, context: Context) -> Refusal | None:
    """The rewrite computes the values of new nodes from fake tensors of one mode."""
    chain = candidate.proven
    nodes = [node for matmul in chain.matmuls for node in (matmul.node, matmul.a, *matmul.operands)]
    nodes += [*chain.inputs, chain.collective.node]
    nodes += chain.made_anew
    mode = symbolic_sizes.fake_mode_of(tensor_of(nodes[0]))
    unknown = next((node for node in nodes if symbolic_sizes.fake_mode_of(tensor_of(node)) is not mode), None)
    if mode is not None and unknown is None:
        return None
    return Refusal(reasons.SHAPE_UNKNOWN, (unknown or nodes[0]).name)


def device_supported(candidate: Candidate, context: Context) -> Refusal | None:
    device = value_of(candidate.collective.node).device.type
    return None if device in _DEVICES else Refusal(reasons.DEVICE_UNSUPPORTED, device)


def contraction_or_columns_fit(candidate: Candidate, context: Context) -> Refusal | None:
    """On CUDA gathers along the contraction and scatters of columns have a limit: one implementation takes them."""
    place, collective = candidate.proven.placement, candidate.collective
    gathers = collective.kind == "all_gather"
    whole = collective.node if gathers else collective.source
    if place is None or place.axis == "rows" or value_of(whole).device.type != "cuda":
        return None
    size, reason = bytes_of(whole) or 0, reasons.CONTRACTION_TOO_LARGE if gathers else reasons.COLUMNS_TOO_LARGE
    return Refusal(reason, f"{size} bytes") if size > CONTRACTION_LIMIT else None


def dtype_supported(candidate: Candidate, context: Context) -> Refusal | None:
    for matmul in candidate.proven.matmuls:
        a, b, out = (value_of(node).dtype for node in (matmul.a, matmul.b, matmul.node))
        bias, gathers = dtype_of(matmul.bias), candidate.collective.kind == "all_gather"
        if not _fits(matmul, a, b, {out, bias or out}, gathers):
            product = f"{a} @ {b} -> {out}" + ("" if bias is None else f", bias {bias}")
            return Refusal(reasons.DTYPE_UNSUPPORTED, f"{matmul.node.name}: {product}")
    return None


def _fits(matmul: Matmul, a: torch.dtype, b: torch.dtype, results: set[torch.dtype], gathers: bool) -> bool:
    """True for operands and results of one dtype; and for int8 that is gathered, whose products are int32.

    With scales also for fp8 of either kind, for int8, and for products that are scaled after they are made.
    """
    if matmul.scaled is None:
        of_int8 = gathers and a == torch.int8 and results == {torch.int32}
        return a == b and (of_int8 or (a in PLAIN_DTYPES and results == {a}))
    after = a == b and (a == torch.int8 or (bool(matmul.epilogue) and a in SCALED_OUT_DTYPES))
    return results <= {*SCALED_OUT_DTYPES} and ({a, b} <= {*FP8_DTYPES} or after)


def scales_supported(candidate: Candidate, context: Context) -> Refusal | None:
    for matmul in candidate.proven.matmuls:
        if matmul.scaled is not None and not _scales_match(matmul, matmul.scaled):
            return scales_mismatch(matmul, matmul.scaled)
    return None


def blocks_of_rows_whole(candidate: Candidate, context: Context) -> Refusal | None:
    """Blocks of several rows of A may not have rows of two ranks."""
    place = candidate.proven.placement
    for matmul in candidate.proven.matmuls:
        together = 1 if matmul.scaled is None else matmul.scaled.of_a.rows
        rows = place.inner if place is not None and place.axis == "rows" else value_of(matmul.a).shape[0]
        if together > 1 and not (isinstance(rows, int) and rows % together == 0):
            facts = f"{matmul.node.name}: {rows} rows together, in blocks of {together}"
            return Refusal(reasons.SCALES_BLOCKWISE, facts)
    return None


def rows_keep_their_bits(candidate: Candidate, context: Context) -> Refusal | None:
    """Under `invariant` kernels make all matmuls of a chain on GPUs, and the sum over ranks is in rank order."""
    chain, collective = candidate.proven, candidate.collective
    if context.config.invariant != "batch" or not on_wire(collective):
        return None
    gathers = collective.kind == "all_gather"
    for together in [chain.matmuls] if gathers else [(matmul,) for matmul in chain.matmuls]:
        if (reason := _variant_reason(together, collective.group_size or 0)) is not None:
            return Refusal(reasons.NOT_BATCH_INVARIANT, f"{', '.join(one.node.name for one in together)}: {reason}")
    if gathers or _is_compared(collective, context.config):
        return None
    facts = f"asynctp's transport does not add up any number of rows of {describe(collective.input)}"
    return Refusal(reasons.NOT_BATCH_INVARIANT, facts)


def _variant_reason(matmuls: Sequence[Matmul], world: int) -> str | None:
    """Why no kernel promises the rows of matmuls with one left operand the same bits."""
    bs = []
    for matmul in matmuls:
        if matmul.scaled is not None and matmul.scaled.blocks is not None:
            return "scales of blocks"
        b = value_of(matmul.b)
        sizes, strides = (tuple(each[-2:]) for each in (b.shape, b.stride()))
        if not all(isinstance(size, int) for size in (*sizes, *strides)):
            return f"a right operand of symbolic sizes, {list(sizes)}"
        order = (1, 0) if matmul.b_transposed else (0, 1)
        layout = ([sizes[dim] for dim in order], [strides[dim] for dim in order])
        bs.append(torch.empty_strided(*layout, dtype=b.dtype, device="meta"))
    b_scales = [tensor_of(one.scaled.b_scale) for one in matmuls if one.scaled is not None]
    biases = [tensor_of(one.bias) for one in matmuls]
    out_dtype = value_of(matmuls[0].node).dtype
    return ops.variant_reason(value_of(matmuls[0].a), bs, b_scales, biases, out_dtype, world)


def sizes_expressible(candidate: Candidate, context: Context) -> Refusal | None:
    """Symbolic sizes that the rewrite must write down have to be carried by the chain's inputs or by placeholders."""
    chain = candidate.proven
    needed, readers = chain.sizes_written(context.sizes), chain.size_readers
    unknown = next((node for node in readers if "val" not in node.meta), None)
    if unknown is not None:
        return Refusal(reasons.SHAPE_UNKNOWN, unknown.name)
    needed += [context.sizes.read(node) for node in readers]
    sources = context.sizes.sources(chain.inputs)
    lost = next((size for size in needed if express(size, sources) is None), None)
    return None if lost is None else Refusal(reasons.SIZES_NOT_PROVEN, f"no input carries the size {lost}")


def sent_as_it_is(candidate: Candidate, context: Context) -> Refusal | None:
    """Ranks send what the collective sends, in its order: what a rank does around it is its own affair."""
    chain = candidate.proven
    if chain.hoist is not None:
        return None
    way, place, columns = chain.sent, chain.placement, context.sizes.of(value_of(chain.matmuls[0].node))[-1]
    tall = any(matmul.scaled is not None and matmul.scaled.of_a.rows > 1 for matmul in chain.matmuls)
    if way.is_reshape or (way.of_rows(columns if place is None else place.width) is not None and not tall):
        return None
    sizes = ", ".join(map(str, way.sizes))
    return Refusal(reasons.SENT_REARRANGED, f"[{sizes}] taken in the order {list(way.order)}")


def above_threshold(candidate: Candidate, context: Context) -> Refusal | None:
    config = context.config
    if not (config.min_bytes or config.min_flops):
        return None
    cost = cost_of(candidate.proven)
    if cost.comm_bytes is not None and cost.comm_bytes < config.min_bytes:
        return Refusal(reasons.BELOW_THRESHOLD, f"{cost.comm_bytes} bytes < min_bytes={config.min_bytes}")
    if cost.flops is not None and cost.flops < config.min_flops:
        return Refusal(reasons.BELOW_THRESHOLD, f"{cost.flops} operations < min_flops={config.min_flops}")
    return None


def step_wanted(candidate: Candidate, context: Context) -> Refusal | None:
    skipped = candidate.proven.hoist is not None and "hoist" in context.config.skip
    return Refusal(reasons.STEP_SKIPPED, "hoist") if skipped else None


def hoist_worthwhile(candidate: Candidate, context: Context) -> Refusal | None:
    chain = candidate.chain
    if not isinstance(chain, GatherChain) or chain.hoist is None or hoist_pays(chain, chain.hoist):
        return None
    facts = f"{describe(chain.hoist.operand)} instead of {describe(chain.collective.node)}"
    users = ", ".join(node.name for node in chain.hoist.still_needed_by)
    needed = ", ".join(one.step.node.name for one in chain.hoist.cross_rank if one.needed)
    facts += f", which {users} needs too" if users else ""
    return Refusal(reasons.MOVES_MORE, facts + (f", after a gather of each rank's {needed}" if needed else ""))


def ranks_alike(candidate: Candidate, context: Context) -> Refusal | None:
    """Deviations are done on all ranks of the group, or on none; none is done where nothing compares their calls."""
    chain = candidate.proven
    for text in context.words.of_chain(chain):
        facts = context.refused(candidate.collective.group_key, text, *chain.collectives, until=chain.follows)
        if facts is not None:
            return Refusal(reasons.RANKS_DIFFER, facts)
    return None


CHECKS: tuple[Check, ...] = (
    result_used,
    group_has_several_ranks,
    collective_in_scope,
    group_enrolled,
    reduce_op_supported,
    chain_proven,
    nothing_mutated_in_between,
    on_one_stream,
    passes_nothing_opaque,
    kept_gather_can_move,
    values_known,
    device_supported,
    contraction_or_columns_fit,
    dtype_supported,
    scales_supported,
    blocks_of_rows_whole,
    sent_as_it_is,
    sizes_expressible,
    rows_keep_their_bits,
    above_threshold,
    step_wanted,
    hoist_worthwhile,
    ranks_alike,
)


def _first(candidate: Candidate) -> Refusal | None:
    return candidate.refusals[0] if candidate.refusals else None


def _scales_match(matmul: Matmul, scaled: ScaledOptions) -> bool:
    """True for one number or a scale per row of A ([M, 1] or [M]), and one number or N in one line for B; or blocks."""
    if matmul.epilogue:  # they have been read as such
        return True
    a_scale, b_scale, out = tensor_of(scaled.a_scale), tensor_of(scaled.b_scale), tensor_of(matmul.node)
    if a_scale is None or b_scale is None or out is None:
        return False
    if a_scale.dtype != torch.float32 or b_scale.dtype != torch.float32:
        return False
    if scaled.blocks is not None:  # their shapes have been read already
        return out.dim() == 2
    rows = tuple(a_scale.shape[:1]) if out.dim() == 2 and a_scale.dim() <= 2 else ()
    a_fits = are_one(a_scale.shape) or (any(identical(m, out.shape[0]) for m in rows) and are_one(a_scale.shape[1:]))
    columns = [size for size in b_scale.shape if not identical(size, 1)]
    return a_fits and (not columns or (len(columns) == 1 and identical(columns[0], out.shape[-1])))
