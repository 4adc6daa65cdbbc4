"""Checks of calls: why an implementation cannot run one, whatever the wire is.

A check is named for the good case; it gives the reason of the bad one, or None. A plan's class has those of its
implementation (`Implementation.refuses`), and `refusals` goes through a table of implementations.
"""

from __future__ import annotations

from collections.abc import Sequence

from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.implementation import Implementation
from asynctp_kernels.cuda.choose.tiles import WireChunks
from asynctp_kernels.cuda.facts import Facts, GatherFacts, ReduceFacts, part_rows
from asynctp_kernels.cuda.gemm.cublas import refused_blocks, scaled_matmul_supported
from asynctp_kernels.cuda.gemm.gemm import refused_gemm, scale_mode
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS

WORLD_SIZES = range(2, 9)
NOT_IN_BLOCKS = "scales of blocks of the contraction: the GEMM scales a sum once, at its end"
NCCL_ORDER = "a batch-invariant call: NCCL adds up in an order that depends on sizes"
NOT_IN_CUBLAS = "scales, bias, strides or result type that cuBLAS does not take in one scaled matmul"


def refusals(entries: Sequence[type[Implementation]], call: Facts) -> dict[str, str]:
    """Why each of `entries` that cannot run `call` cannot.

    All ranks take the same wire, whatever they compute: implementations of other transports are refused too. A group
    of a size without kernels has no wire of its own.
    """
    found = {each.name: reason for each in entries if (reason := each.refusal(call)) is not None}
    if call.world not in WORLD_SIZES:
        return found
    wire = call.wire
    transport = wire.transport(select.requested())
    reason = f"the group moves {wire.told} by another transport, {transport!r}"
    return {**{each.name: reason for each in entries if transport not in each.transports}, **found}


# --- of any call ---------------------------------------------------------------------------------------------------
def group_has_kernels(call: Facts) -> str | None:
    """The kernels are written for groups of this size."""
    return group_refused(call.world)


def group_refused(world: int) -> str | None:
    """Why nothing overlaps in groups of this many ranks."""
    if world in WORLD_SIZES:
        return None
    return f"{world} ranks; the overlapped ops run on {WORLD_SIZES.start} to {WORLD_SIZES.stop - 1}"


def something_to_multiply(call: Facts) -> str | None:
    return "nothing to multiply" if call.is_empty else None


def all_rows_by_each_b(call: GatherFacts) -> str | None:
    return "matmuls of different rows of A" if call.b_rows else None


def few_pieces(call: GatherFacts) -> str | None:
    """cuBLAS makes a matmul for each run of rows that a B takes; a batch-invariant call is one kernel."""
    if call.invariant and call.b_rows:
        return all_rows_by_each_b(call)
    most = max(map(len, call.pieces), default=0)
    limit = MAX_CHUNKS * len(call.bs)
    return f"{most} matmuls for a range of rows, more than {limit}" if most > limit else None


def few_row_ranges(call: Facts) -> str | None:
    """There may be one matmul for each range of a rank's rows, of which there is one in every outer block."""
    if call.outer <= MAX_CHUNKS:
        return None
    return f"{call.outer} separate row ranges per rank, more than {MAX_CHUNKS}: one matmul each is too many"


def range_in_cublas_blocks(call: Facts) -> str | None:
    """cuBLAS takes scales of blocks of one range of a rank's rows."""
    return _refused_by_cublas_blocks(call, call.layout.inner)


def whole_in_cublas_blocks(call: Facts) -> str | None:
    """cuBLAS takes scales of blocks of all rows."""
    return _refused_by_cublas_blocks(call, call.rows)


def _refused_by_cublas_blocks(call: Facts, rows: int) -> str | None:
    recipes = [recipe for recipe in call.recipes if recipe is not None]
    if not recipes:
        return None
    capability = driver.machine(call.device_index)[0][0]
    reasons = (refused_blocks(recipe, rows, capability) for recipe in recipes)
    return next((reason for reason in reasons if reason is not None), None)


ANY = (group_has_kernels, something_to_multiply)
"""What every kernel needs."""


# --- of gathers ----------------------------------------------------------------------------------------------------
def rows_are_gathered(call: GatherFacts) -> str | None:
    if not call.layout.along_last:
        return None
    return "the gathered dim is the contraction dim: every matmul needs all of it"


def scale_can_be_gathered(call: GatherFacts) -> str | None:
    """A scale that travels is one of gathered rows."""
    if call.layout.along_last and call.gather_a_scale:
        return "a rowwise scale cannot be gathered along the contraction dim"
    return None


def matmul_takes_gathered(call: GatherFacts) -> str | None:
    """cuBLAS makes each result in one call; of a batch-invariant call, kernels of ours make all results."""
    if call.invariant:
        lists = (call.bs, call.b_scales, call.biases)
        return gathered_scaled_at_end(call) or refused_gemm(
            call.a_shard, *lists, call.matmul_dtype, [call.layout.full_cols]
        )
    if call.a_scale is None:
        return None
    for b, b_scale, bias, recipe in zip(call.bs, call.b_scales, call.biases, call.recipes, strict=True):
        operands = (call.a_shard, b, call.a_scale, b_scale, bias)
        if not scaled_matmul_supported(*operands, call.matmul_dtype, call.gather_a_scale, recipe is not None):
            return NOT_IN_CUBLAS
    return None


def matmul_takes_whole(call: GatherFacts) -> str | None:
    """The same, of all rows of A."""
    return all_rows_by_each_b(call) or matmul_takes_gathered(call)


def chunk_holds_row(call: GatherFacts) -> str | None:
    row = call.layout.cols * call.a_shard.itemsize
    return "a row of A is longer than a chunk" if row > WireChunks(call.layout.rows * row).chunk else None


def gathered_scaled_at_end(call: GatherFacts) -> str | None:
    """A sum over K is scaled once, at its end."""
    one_block = call.gather_a_scale and call.a_scale is not None and call.a_scale.numel() != call.layout.rows
    return NOT_IN_BLOCKS if any(call.recipes) or one_block else None  # one: K and a rank's rows are at most 128


def gemm_takes_gathered(call: GatherFacts) -> str | None:
    return refused_gemm(call.a_shard, call.bs, call.b_scales, call.biases, call.matmul_dtype, [call.layout.cols])


# --- of scatters ---------------------------------------------------------------------------------------------------
def rows_are_scattered(call: ReduceFacts) -> str | None:
    return "the scattered dim is the last: a rank's part is not a range of rows" if call.layout.along_last else None


def rows_are_divisible(call: ReduceFacts) -> str | None:
    """An all-reduce of these rows can be a scatter and a gather."""
    if call.rows % call.world == 0:
        return None
    return f"{call.rows} rows are not divisible by {call.world} ranks"


def rows_for_all(call: ReduceFacts) -> str | None:
    return None if call.rows >= call.world else f"{call.rows} rows, fewer than {call.world} ranks"


def parts_in_cublas_blocks(call: ReduceFacts) -> str | None:
    """cuBLAS takes scales of blocks of the rows of each rank's part of an all-reduce."""
    if not any(call.recipes):
        return None
    parts = [part for rank in range(call.world) for part in part_rows(call, rank)]
    reasons = (_refused_by_cublas_blocks(call, rows) for rows in {end - first for _, first, end in parts})
    return next((reason for reason in reasons if reason is not None), None)


def matmul_takes_scattered(call: ReduceFacts) -> str | None:
    """cuBLAS makes each summand in one call; of a batch-invariant call, kernels of ours make each."""
    if call.invariant:
        reasons = (_refused_summand(call, i) for i in range(len(call.b_parts)))
        return scattered_scaled_at_end(call) or next((reason for reason in reasons if reason is not None), None)
    if not call.a_scales:
        return None
    parts = (call.a_parts, call.b_parts, call.a_scales, call.b_scales, call.biases, call.recipes)
    for a, b, a_scale, b_scale, bias, recipe in zip(*parts, strict=True):
        if not scaled_matmul_supported(a, b, a_scale, b_scale, bias, call.matmul_dtype, False, recipe is not None):
            return NOT_IN_CUBLAS
    return None


def _refused_summand(call: ReduceFacts, i: int) -> str | None:
    one = slice(i, i + 1)
    lists = (call.b_parts[one], call.b_scales[one], call.biases[one])
    return refused_gemm(call.a_parts[i], *lists, call.matmul_dtype, [call.b_parts[i].shape[0]])


def sums_in_rank_order(call: Facts) -> str | None:
    """The order in which ranks' parts are added up is of no matter, as that of NCCL is."""
    return NCCL_ORDER if call.invariant and not call.is_empty else None


def program_may_multiply(call: Facts) -> str | None:
    """PyTorch may make the matmuls, which cuts K by the number of rows; or kernels of ours can (`Mover.multiply`)."""
    if not call.invariant or call.is_empty:
        return None
    return matmul_takes_gathered(call) if isinstance(call, GatherFacts) else matmul_takes_scattered(call)


def rows_of_a_contiguous(call: ReduceFacts) -> str | None:
    """Ranges of an A's rows are views."""
    return "an A that is not contiguous" if any(not a.is_contiguous() for a in call.a_parts) else None


def scattered_scaled_at_end(call: ReduceFacts) -> str | None:
    """A sum over K is scaled once, at its end."""
    return NOT_IN_BLOCKS if any(call.recipes) else None


def only_matmuls_are_summed(call: ReduceFacts) -> str | None:
    return None if call.added is None else "a term that is no matmul"


def one_factor(call: ReduceFacts) -> str | None:
    if call.gemm_factor is not None:
        return None
    return "matmuls that are multiplied by numbers before they are added"


def gemm_takes_scattered(call: ReduceFacts) -> str | None:
    depths = [b.shape[0] for b in call.b_parts]
    return refused_gemm(call.a_parts[0], call.b_parts, call.b_scales, call.biases, call.wire_dtype, depths)


def rounded_once(call: ReduceFacts) -> str | None:
    """Matmuls of a sum are not rounded before they are added: in another dtype, or as all implementations do."""
    if len(call.b_parts) == 1:
        return None
    if call.invariant:
        return f"several matmuls, each rounded to {call.matmul_dtype} before they are added in a batch-invariant call"
    if call.wire_dtype == call.matmul_dtype:
        return None
    return f"several matmuls, each rounded to {call.matmul_dtype} before they are added in {call.wire_dtype}"


def sum_without_bias(call: ReduceFacts) -> str | None:
    if len(call.b_parts) > 1 and any(bias is not None for bias in call.biases):
        return "a bias in a sum of several matmuls"
    return None


def a_scales_alike(call: ReduceFacts) -> str | None:
    modes = {scale_mode(scale) for scale in call.a_scales}
    return "tensorwise and rowwise A scales in one sum" if len(modes) > 1 else None


def a_dtypes_alike(call: ReduceFacts) -> str | None:
    return "As of several dtypes" if len({a.dtype for a in call.a_parts}) > 1 else None
