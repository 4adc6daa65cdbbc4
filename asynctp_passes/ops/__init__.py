"""The six fused ops, `torch.ops.asynctp.*`: schemas, fake and real implementations, gradients, and Python callers.

    a_shard → all_gather → mm, mm, …          asynctp::all_gather_matmul, all_gather_scaled_matmul
    mm + mm + … (+ x) → reduce_scatter        asynctp::matmul_reduce_scatter, scaled_matmul_reduce_scatter
    mm + mm + … (+ x) → all_reduce            asynctp::matmul_all_reduce, scaled_matmul_all_reduce

All are functional: they return fresh, contiguous, ordinary memory, never an alias of an input or of a
communication buffer. Importing this module registers them.

`all_keep` of the gathers tells that every rank of the group returns the gathered A in this call, so that it is pulled
to its place instead of pushed to an inbox first. It must be the same on all ranks; None stands for `return_a_full`.

Which implementation runs is chosen at run time and never silently: `explain` names it for a call. On CUDA it is the
fastest of `asynctp_kernels.cuda`, or the unfused program of `asynctp_passes.ops.reference`. On CPU
`ASYNCTP_CPU_IMPLEMENTATION` chooses between that program and the Triton kernels of `asynctp_kernels` under
TRITON_INTERPRET=1; a call that those do not support raises. The environment is read once, at the first call; `refresh`
reads it again.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asynctp_passes import compat
from asynctp_passes.compat import process_group
from asynctp_passes.config import cpu_implementation
from asynctp_passes.ops import reference
from asynctp_passes.ops.reference import GatherScales, ScatterScales, SumOptions, multiplied, split_factors

log = logging.getLogger(__name__)

__all__ = [
    "OPS",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "expected_implementation",
    "explain",
    "implementation",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "on_wire",
    "refresh",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]

OPS = {
    "all_gather_matmul": (
        "(Tensor a_shard, Tensor[] bs, Tensor?[] biases, int gather_dim, bool return_a_full, int group_size, "
        "Any group_name, bool? all_keep=None) -> Tensor[]"
    ),
    "all_gather_scaled_matmul": (
        "(Tensor a_shard, Tensor a_scale, Tensor[] bs, Tensor[] b_scales, Tensor?[] biases, int gather_dim, "
        "bool gather_a_scale, ScalarType out_dtype, bool use_fast_accum, bool return_a_full, int group_size, "
        "Any group_name, Tensor? along_shard=None, bool? all_keep=None) -> Tensor[]"
    ),
    "matmul_reduce_scatter": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor?[] biases, str reduce_op, int scatter_dim, int group_size, "
        "Any group_name, ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None) -> Tensor"
    ),
    "scaled_matmul_reduce_scatter": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor[] a_scales, Tensor[] b_scales, Tensor?[] biases, "
        "str reduce_op, int scatter_dim, ScalarType out_dtype, bool use_fast_accum, int group_size, "
        "Any group_name, ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None) -> Tensor"
    ),
    "matmul_all_reduce": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor?[] biases, str reduce_op, Any group_name, "
        "ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None) -> Tensor"
    ),
    "scaled_matmul_all_reduce": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor[] a_scales, Tensor[] b_scales, Tensor?[] biases, "
        "str reduce_op, ScalarType out_dtype, bool use_fast_accum, Any group_name, ScalarType? sum_dtype=None, "
        "Tensor? added=None, float[]? factors=None) -> Tensor"
    ),
}
OPTIONAL = ("sum_dtype", "added", "factors")
"""The last arguments of the ops that reduce."""


# --- which implementation runs -----------------------------------------------------------------------------
@functools.cache
def _cpu_implementation() -> str:
    return cpu_implementation()


def refresh() -> None:
    """Read `ASYNCTP_CPU_IMPLEMENTATION` again at the next call; for programs that change it while they run."""
    _cpu_implementation.cache_clear()


def implementation(device_type: str) -> str:
    """Name what the ops run on a kind of device.

    Args:
        device_type: `"cuda"` or `"cpu"`.

    Returns:
        On CPU `"sequential"` (plain collective and matmul: no overlap) or `"interpreted"` (Triton kernels, for tests).
        On CUDA `"chosen per call"`, or `"sequential"` without triton; `explain` names the one of a call.

    Raises:
        ValueError: The ops do not run on such devices.
    """
    if device_type == "cuda":
        return "sequential" if _cuda() is None else "chosen per call"
    if device_type == "cpu":
        return "interpreted" if _cpu_implementation() == "interpreted" else "sequential"
    raise ValueError(f"asynctp: device_type={device_type!r} is not valid; it must be 'cuda' or 'cpu'")


def on_wire(device_type: str) -> bool:
    """Whether a group's collectives are to go by asynctp's own transport, all of them, or may be torch's."""
    return device_type == "cuda" or (device_type == "cpu" and implementation("cpu") != "sequential")


def expected_implementation(op: str, arguments: Mapping[str, Any], world_size: int) -> str:
    """The implementation that `explain` names for a call, in a word or two.

    Args:
        op: The op's name.
        arguments: The call's arguments by name, without the group; of tensors, fake ones do.
        world_size: Ranks of the group; 0 if unknown.

    Returns:
        As `"fused (cost model)"`, or `"fused, then all-gather (cost model)"` of an all-reduce. What `implementation`
        says where there is no GPU, the ranks are not known, or one is forced that cannot run (the call will say so).
    """
    device = _device(next(iter(arguments.values()))).type
    cuda = _cuda() if device == "cuda" and torch.cuda.is_available() and world_size else None
    if cuda is None:
        return implementation(device)
    apart = ("group_size", "along_shard", "all_keep", *OPTIONAL)
    args = [value for name, value in arguments.items() if name not in apart]
    try:
        choice = cuda.explain(op, (*args, world_size, None), *map(arguments.get, OPTIONAL))
    except RuntimeError:
        return implementation(device)
    then = ", then all-gather" if op.endswith("all_reduce") and choice.implementation != "sequential" else ""
    return f"{choice.implementation}{then} ({choice.source})"


def _device(first: Tensor | Sequence[Tensor]) -> torch.device:
    """Where a call runs, by its first argument."""
    return first.device if isinstance(first, Tensor) else first[0].device


def explain(op: str, *args: Any) -> Any:
    """How a call would be run, and why: the same arguments as `torch.ops.asynctp.<op>`, nothing is run.

    Returns:
        On CUDA an `asynctp_kernels.cuda.Choice`: implementation, whether the cost model or a measurement chose it,
        the model's estimates in microseconds, and why each other implementation cannot run the call. On CPU, and
        where the overlapped ones are not available, the name.

    Raises:
        ValueError: There is no such op, it takes other arguments, or it was given no tensor.
    """
    if op not in OPS:
        raise ValueError(f"asynctp: op={op!r} is not valid; it must be one of {', '.join(OPS)}")
    names = [argument.name for argument in getattr(torch.ops.asynctp, op).default._schema.arguments]
    place = names.index("group_name")
    if not place < len(args) <= len(names):
        limit = f"at least the first {place + 1} of {', '.join(names)}"
        raise ValueError(f"asynctp {op}: number of arguments={len(args)} is not valid; there must be {limit}")
    device = reference.operands_of(op, args[0])[0].device.type
    cuda = _cuda() if device == "cuda" else None
    if cuda is None:
        return implementation(device)
    needed, group, optional = args[:place], args[place], dict(zip(names[place + 1 :], args[place + 1 :], strict=False))
    if op.endswith("all_reduce"):  # these are not told the size of their group
        needed = (*needed, reference.group_and_size(group)[1])
    return cuda.explain(op, (*needed, group), *map(optional.get, OPTIONAL))


@functools.cache
def _interpreted() -> Any:
    """The overlapped implementations on CPU tensors, in Triton's interpreter.

    Raises:
        RuntimeError: They cannot run here.
    """
    asked = "asynctp: ASYNCTP_CPU_IMPLEMENTATION=interpreted"
    try:
        signals = importlib.import_module("asynctp_kernels.signals")
        fault = importlib.import_module("asynctp_kernels.interpreter").interpreter_fault
        kernels = importlib.import_module("asynctp_kernels.cuda")
    except ImportError as error:
        raise RuntimeError(
            f"{asked} needs asynctp_kernels and triton; install triton, or set ASYNCTP_CPU_IMPLEMENTATION=reference"
        ) from error
    if not signals.IS_INTERPRETED:
        raise RuntimeError(f"{asked} needs TRITON_INTERPRET=1 in the environment before triton is imported")
    if fault() is not None:
        raise RuntimeError(f"{asked}: {fault()}")
    return kernels


@functools.cache
def _cuda() -> Any:
    """The overlapped implementations; None without triton, which is said once."""
    try:
        return importlib.import_module("asynctp_kernels.cuda")
    except ImportError as error:
        log.warning("asynctp: the ops run sequentially on CUDA, for want of triton (%s)", error)
        return None


def overlapped(tensor: Tensor) -> Any:
    """The overlapped implementations, where the ops run them on tensors like this; None: the unfused program."""
    if tensor.is_cuda:
        return _cuda()
    return _interpreted() if tensor.is_cpu and implementation("cpu") == "interpreted" else None


def _refuse_lost_gradients(biases: list[Tensor | None]) -> None:
    """torch.library takes a list with None in it for a constant, and would drop its tensors' gradients unsaid."""
    mixed = any(bias is None for bias in biases)
    if mixed and any(bias is not None and bias.requires_grad for bias in biases):
        raise NotImplementedError(
            "asynctp: biases with and without None in one call have no gradient (torch.library cannot pass such a "
            "list); give every product a bias (zeros change nothing), or add the biases to the results"
        )


def _mover(kernels: Any, group_name: Any, kept: bool = False) -> reference.Mover | None:
    """The group's own wire, for products that the kernels do not make; None without kernels: plain collectives.

    kept: every rank keeps what is gathered.
    """
    if kernels is None:
        return None
    mover: reference.Mover = kernels.Mover(process_group(group_name), kept)
    return mover


def _check_taking_part(
    check: Callable[[], None], shard: Tensor, numbers: Tensor | None, group_size: int, group_name: Any
) -> None:
    """Check a gather. A rank whose products cannot be made sends its shard all the same: its peers' calls are right."""
    try:
        check()
    except ValueError:
        if reference.group_and_size(group_name)[1] == group_size:
            for part in (shard, numbers):
                if part is not None:
                    reference.gather(part.reshape(1, -1), 0, group_size, group_name)
        raise


# --- real implementations ------------------------------------------------------------------------------------
def _real_all_gather_matmul(
    a_shard: Tensor,
    bs: list[Tensor],
    biases: list[Tensor | None],
    gather_dim: int,
    return_a_full: bool,
    group_size: int,
    group_name: Any,
    all_keep: bool | None = None,
) -> list[Tensor]:
    if torch.is_grad_enabled():
        _refuse_lost_gradients(biases)

    def check() -> None:
        reference.check_group("all_gather_matmul", group_size, group_name)
        reference.check_gather("all_gather_matmul", a_shard, bs, biases, gather_dim, group_size)

    kept = return_a_full if all_keep is None else all_keep
    if (cuda := overlapped(a_shard)) is not None:
        options = (
            gather_dim,
            False,
            a_shard.dtype,
            False,
            return_a_full,
            group_size,
            process_group(group_name),
            check,
        )
        found: list[Tensor] | None = cuda.run_gather(a_shard, None, bs, (), biases, *options, kept=kept)
        if found is not None:
            return found
    else:
        _check_taking_part(check, a_shard, None, group_size, group_name)
    return reference.unfused_all_gather_matmul(
        *(a_shard, bs, biases, gather_dim, return_a_full, group_size, group_name), mover=_mover(cuda, group_name, kept)
    )


def _real_all_gather_scaled_matmul(
    a_shard: Tensor,
    a_scale: Tensor,
    bs: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    gather_dim: int,
    gather_a_scale: bool,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    return_a_full: bool,
    group_size: int,
    group_name: Any,
    along_shard: Tensor | None = None,
    all_keep: bool | None = None,
) -> list[Tensor]:
    def check() -> None:
        op = "all_gather_scaled_matmul"
        reference.check_group(op, group_size, group_name)
        scales = GatherScales(a_scale, b_scales, gather_a_scale, out_dtype, along_shard)
        reference.check_gather(op, a_shard, bs, biases, gather_dim, group_size, scales)

    kept = return_a_full if all_keep is None else all_keep
    if (cuda := overlapped(a_shard)) is not None:
        choices = (gather_dim, gather_a_scale, out_dtype, use_fast_accum, return_a_full)
        found: list[Tensor] | None = cuda.run_gather(
            *(a_shard, a_scale, bs, b_scales, biases, *choices, group_size, process_group(group_name), check),
            along_shard,
            kept,
        )
        if found is not None:
            return found
    else:
        _check_taking_part(check, a_shard, a_scale if gather_a_scale else along_shard, group_size, group_name)
    operands = (a_shard, a_scale, bs, b_scales, biases, gather_dim, gather_a_scale)
    options = (out_dtype, use_fast_accum, return_a_full)
    return reference.unfused_all_gather_scaled_matmul(
        *operands, *options, group_size, group_name, along_shard, mover=_mover(cuda, group_name, kept)
    )


def _real_matmul_reduce_scatter(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    group_size: int,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    if torch.is_grad_enabled():
        _refuse_lost_gradients(biases)

    def check() -> None:
        op, where = "matmul_reduce_scatter", (reduce_op, scatter_dim, group_size)
        reference.check_group(op, group_size, group_name)
        optional = SumOptions(sum_dtype, added, factors)
        reference.check_scatter(op, a_parts, b_parts, biases, *where, optional=optional)

    cuda = overlapped(a_parts[0]) if a_parts else None
    if cuda is not None:
        options = (reduce_op, scatter_dim, a_parts[0].dtype, False, group_size, process_group(group_name), check)
        found: Tensor | None = cuda.run_scatter(a_parts, b_parts, (), (), biases, *options, sum_dtype, added, factors)
        if found is not None:
            return found
    else:
        check()
    return reference.unfused_matmul_reduce_scatter(
        *(a_parts, b_parts, biases, reduce_op, scatter_dim, group_size, group_name, sum_dtype, added, factors),
        mover=_mover(cuda, group_name),
    )


def _real_scaled_matmul_reduce_scatter(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    a_scales: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group_size: int,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    def check() -> None:
        op = "scaled_matmul_reduce_scatter"
        reference.check_group(op, group_size, group_name)
        where = (reduce_op, scatter_dim, group_size, ScatterScales(a_scales, b_scales, out_dtype))
        optional = SumOptions(sum_dtype, added, factors)
        reference.check_scatter(op, a_parts, b_parts, biases, *where, optional=optional)

    cuda = overlapped(a_parts[0]) if a_parts else None
    if cuda is not None:
        choices = (reduce_op, scatter_dim, out_dtype, use_fast_accum, group_size, process_group(group_name), check)
        operands = (a_parts, b_parts, a_scales, b_scales, biases)
        found: Tensor | None = cuda.run_scatter(*operands, *choices, sum_dtype, added, factors)
        if found is not None:
            return found
    else:
        check()
    parts = (a_parts, b_parts, a_scales, b_scales, biases, reduce_op, scatter_dim, out_dtype, use_fast_accum)
    where = (group_size, group_name, sum_dtype, added, factors)
    return reference.unfused_scaled_matmul_reduce_scatter(*parts, *where, mover=_mover(cuda, group_name))


def _real_matmul_all_reduce(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    if torch.is_grad_enabled():
        _refuse_lost_gradients(biases)

    def check() -> None:
        reference.group_and_size(group_name)
        parts = (a_parts, b_parts, biases)
        optional = SumOptions(sum_dtype, added, factors)
        reference.check_all_reduce("matmul_all_reduce", *parts, reduce_op, optional=optional)

    cuda = overlapped(a_parts[0]) if a_parts else None
    if cuda is not None:
        options = (reduce_op, a_parts[0].dtype, False, process_group(group_name), check, sum_dtype, added, factors)
        found: Tensor | None = cuda.run_all_reduce(a_parts, b_parts, (), (), biases, *options)
        if found is not None:
            return found
    else:
        check()
    parts = (a_parts, b_parts, biases, reduce_op, group_name, sum_dtype, added, factors)
    return reference.unfused_matmul_all_reduce(*parts, mover=_mover(cuda, group_name))


def _real_scaled_matmul_all_reduce(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    a_scales: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    def check() -> None:
        reference.group_and_size(group_name)
        op, scales = "scaled_matmul_all_reduce", ScatterScales(a_scales, b_scales, out_dtype)
        optional = SumOptions(sum_dtype, added, factors)
        reference.check_all_reduce(op, a_parts, b_parts, biases, reduce_op, scales, optional=optional)

    cuda = overlapped(a_parts[0]) if a_parts else None
    if cuda is not None:
        options = (reduce_op, out_dtype, use_fast_accum, process_group(group_name), check, sum_dtype, added, factors)
        found: Tensor | None = cuda.run_all_reduce(a_parts, b_parts, a_scales, b_scales, biases, *options)
        if found is not None:
            return found
    else:
        check()
    operands = (a_parts, b_parts, a_scales, b_scales, biases, reduce_op, out_dtype, use_fast_accum)
    where = (group_name, sum_dtype, added, factors)
    return reference.unfused_scaled_matmul_all_reduce(*operands, *where, mover=_mover(cuda, group_name))


# --- fake implementations: shapes from shapes, no group needed, no guards --------------------------------------
def _fake_gather(
    a_shard: Tensor, bs: list[Tensor], gather_dim: int, group_size: int, dtype: torch.dtype, return_a_full: bool
) -> list[Tensor]:
    full = reference.gathered_shape(a_shard.shape, gather_dim, group_size)
    outs = [a_shard.new_empty((*full[:-1], b.shape[1]), dtype=dtype) for b in bs]
    return [*outs, a_shard.new_empty(full)] if return_a_full else outs


def _fake_all_gather_matmul(
    a_shard: Tensor,
    bs: list[Tensor],
    biases: list[Tensor | None],
    gather_dim: int,
    return_a_full: bool,
    group_size: int,
    group_name: Any,
    all_keep: bool | None = None,
) -> list[Tensor]:
    if torch.is_grad_enabled():
        _refuse_lost_gradients(biases)
    reference.check_gather("all_gather_matmul", a_shard, bs, biases, gather_dim, group_size, sizes=False)
    return _fake_gather(a_shard, bs, gather_dim, group_size, a_shard.dtype, return_a_full)


def _fake_all_gather_scaled_matmul(
    a_shard: Tensor,
    a_scale: Tensor,
    bs: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    gather_dim: int,
    gather_a_scale: bool,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    return_a_full: bool,
    group_size: int,
    group_name: Any,
    along_shard: Tensor | None = None,
    all_keep: bool | None = None,
) -> list[Tensor]:
    scales = GatherScales(a_scale, b_scales, gather_a_scale, out_dtype, along_shard)
    op = "all_gather_scaled_matmul"
    reference.check_gather(op, a_shard, bs, biases, gather_dim, group_size, scales, sizes=False)
    outs = _fake_gather(a_shard, bs, gather_dim, group_size, out_dtype, return_a_full)
    if along_shard is None:
        return outs
    return [*outs, along_shard.new_empty(reference.gathered_shape(along_shard.shape, gather_dim, group_size))]


def _fake_scatter(
    a_parts: list[Tensor], b_parts: list[Tensor], scatter_dim: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    shape = [*a_parts[0].shape[:-1], b_parts[0].shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // group_size
    return a_parts[0].new_empty(shape, dtype=dtype)


def _fake_matmul_reduce_scatter(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    group_size: int,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    if torch.is_grad_enabled():
        _refuse_lost_gradients(biases)
    op, where = "matmul_reduce_scatter", (reduce_op, scatter_dim, group_size)
    optional = SumOptions(sum_dtype, added, factors)
    reference.check_scatter(op, a_parts, b_parts, biases, *where, optional=optional, sizes=False)
    return _fake_scatter(a_parts, b_parts, scatter_dim, group_size, sum_dtype or a_parts[0].dtype)


def _fake_scaled_matmul_reduce_scatter(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    a_scales: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group_size: int,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    op = "scaled_matmul_reduce_scatter"
    where = (reduce_op, scatter_dim, group_size, ScatterScales(a_scales, b_scales, out_dtype))
    optional = SumOptions(sum_dtype, added, factors)
    reference.check_scatter(op, a_parts, b_parts, biases, *where, optional=optional, sizes=False)
    return _fake_scatter(a_parts, b_parts, scatter_dim, group_size, sum_dtype or out_dtype)


def _fake_matmul_all_reduce(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    if torch.is_grad_enabled():
        _refuse_lost_gradients(biases)
    op, parts = "matmul_all_reduce", (a_parts, b_parts, biases)
    optional = SumOptions(sum_dtype, added, factors)
    reference.check_all_reduce(op, *parts, reduce_op, optional=optional, sizes=False)
    return a_parts[0].new_empty((*a_parts[0].shape[:-1], b_parts[0].shape[1]), dtype=sum_dtype)


def _fake_scaled_matmul_all_reduce(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    a_scales: list[Tensor],
    b_scales: list[Tensor],
    biases: list[Tensor | None],
    reduce_op: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: list[float] | None = None,
) -> Tensor:
    op = "scaled_matmul_all_reduce"
    scales = ScatterScales(a_scales, b_scales, out_dtype)
    parts = (a_parts, b_parts, biases)
    optional = SumOptions(sum_dtype, added, factors)
    reference.check_all_reduce(op, *parts, reduce_op, scales, optional=optional, sizes=False)
    return a_parts[0].new_empty((*a_parts[0].shape[:-1], b_parts[0].shape[1]), dtype=sum_dtype or out_dtype)


# --- gradients -------------------------------------------------------------------------------------------------
#   all_gather_matmul:      dA_shard = reduce_scatter(Σ dOut_i @ B_iᵀ [+ dA_full]),  dB_i = A_fullᵀ @ dOut_i
#   matmul_reduce_scatter:  dOut = all_gather(dOut_shard),  dA_i = dOut @ B_iᵀ,      dB_i = A_iᵀ @ dOut
# so that each of these two ops' input gradient is the other op.
#   matmul_all_reduce:      dOut = all_reduce(dOut),        dA_i = dOut @ B_iᵀ,      dB_i = A_iᵀ @ dOut
# What is added to products has the gradient dOut. With factors, a product has dOut times its own; where these are
# unlike, dOut is gathered first, and multiplied then.
# Where products were converted to a `sum_dtype`, dOut is converted back: before it is gathered, or once it is reduced.
# The loss is the sum of all ranks' losses. (Where every rank computes the same loss, their gradients add up.)
def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a_shard, bs, biases, ctx.gather_dim, ctx.return_a_full, ctx.group_size, ctx.group_name, ctx.all_keep = inputs
    _remember_biases(ctx, biases)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1] if ctx.return_a_full else a_shard, *bs)


def _backward_gather(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    a_saved, *bs = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    a_full_grad = grads[-1] if ctx.return_a_full else None
    out_grads = [None if grad is None else grad.contiguous() for grad in grads[: len(bs)]]
    a_full = a_saved
    if any(needs_b) and not ctx.return_a_full:
        a_full = reference.gather(a_saved, ctx.gather_dim, ctx.group_size, ctx.group_name)
    a_grad = _gather_input_grad(ctx, out_grads, bs, a_full_grad) if needs_a else None
    b_grads = [_weight_grad(a_full, grad) if need else None for grad, need in zip(out_grads, needs_b, strict=True)]
    others = 4 if ctx.all_keep is None else 5  # torch wants no gradient of an argument that has its default
    return a_grad, b_grads, _bias_grads(ctx, out_grads), *[None] * others


def _gather_input_grad(
    ctx: Any, out_grads: list[Tensor | None], bs: list[Tensor], a_full_grad: Tensor | None
) -> Tensor | None:
    where = (ctx.gather_dim, ctx.group_size, ctx.group_name)
    pairs = [(grad, b.t()) for grad, b in zip(out_grads, bs, strict=True) if grad is not None]
    a_grad: Tensor | None = None
    if pairs:
        parts = [list(part) for part in zip(*pairs, strict=True)]
        a_grad = torch.ops.asynctp.matmul_reduce_scatter(*parts, [None] * len(pairs), "sum", *where)
    if a_full_grad is None:
        return a_grad
    kept = reference.reduce_scatter(a_full_grad, "sum", *where)
    return kept if a_grad is None else a_grad + kept


def _setup_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a_parts, b_parts, biases, ctx.reduce_op, ctx.scatter_dim, ctx.group_size, ctx.group_name, *optional = inputs
    _remember_optional(ctx, len(a_parts), *optional)
    _remember_biases(ctx, biases)
    ctx.save_for_backward(*a_parts, *b_parts)


def _backward_scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    count = len(ctx.saved_tensors) // 2
    a_parts, b_parts = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
    needs_a, needs_b = ctx.needs_input_grad[:2]
    grad = multiplied(grad / ctx.group_size if ctx.reduce_op == "avg" else grad, ctx.factor).contiguous()
    where = (ctx.scatter_dim, ctx.group_size, ctx.group_name)
    if len(set(ctx.factors)) > 1:  # each product has a gradient of its own, which is a multiple of one
        whole = reference.gather(grad, *where)
        fulls = _grads_of_products(ctx, whole, a_parts[0].dtype)
        a_grads = [full @ b.t() if need else None for full, b, need in zip(fulls, b_parts, needs_a, strict=True)]
    else:
        shard = multiplied(grad, ctx.factors[0]).to(a_parts[0].dtype)
        a_grads, full = _grads_of_gathered(shard, b_parts, needs_a, where)
        fulls, whole = [full] * count, full
        if ctx.is_added and (grad.dtype != full.dtype or ctx.factors[0] != 1):
            whole = reference.gather(grad, *where)
    b_grads = [_weight_grad(a, full) if need else None for a, full, need in zip(a_parts, fulls, needs_b, strict=True)]
    return a_grads, b_grads, _bias_grads(ctx, fulls), None, None, None, None, *_optional_grads(ctx, whole)


def _grads_of_gathered(
    shard: Tensor, b_parts: Sequence[Tensor], needs_a: Sequence[bool], where: tuple[int, int, Any]
) -> tuple[list[Tensor | None], Tensor]:
    """The gradients of the As that need one, and the gathered gradient; `shard` is this rank's part of it."""
    dim, *group = where
    transposed = [b.t() for b, need in zip(b_parts, needs_a, strict=True) if need]
    if not transposed:
        return [None] * len(needs_a), reference.gather(shard, *where)
    none = [None] * len(transposed)
    *products, full = torch.ops.asynctp.all_gather_matmul(shard, transposed, none, dim, True, *group)
    remaining = iter(products)
    return [next(remaining) if need else None for need in needs_a], full


def _grads_of_products(ctx: Any, whole: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The gradient of each product; `whole` is the gradient of their sum."""
    return [multiplied(whole, factor).to(dtype) for factor in ctx.factors]


def _setup_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a_parts, b_parts, biases, ctx.reduce_op, ctx.group_name, *optional = inputs
    _remember_optional(ctx, len(a_parts), *optional)
    _remember_biases(ctx, biases)
    ctx.save_for_backward(*a_parts, *b_parts)


def _backward_all_reduce(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    count = len(ctx.saved_tensors) // 2
    a_parts, b_parts = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
    needs_a, needs_b = ctx.needs_input_grad[:2]
    whole = multiplied(reference.all_reduce(grad.contiguous(), ctx.reduce_op, ctx.group_name), ctx.factor)
    fulls = _grads_of_products(ctx, whole, a_parts[0].dtype)
    a_grads = [full @ b.t() if need else None for full, b, need in zip(fulls, b_parts, needs_a, strict=True)]
    b_grads = [_weight_grad(a, full) if need else None for a, full, need in zip(a_parts, fulls, needs_b, strict=True)]
    return a_grads, b_grads, _bias_grads(ctx, fulls), None, None, *_optional_grads(ctx, whole)


def _remember_optional(
    ctx: Any, count: int, sum_dtype: torch.dtype | None, added: Tensor | None, factors: list[float] | None
) -> None:
    """Keep the factors, and which optional arguments were given.

    Torch wants gradients for those up to the last that is not None.
    """
    ctx.factors, ctx.factor = split_factors(factors, count)
    ctx.is_added = added is not None
    given = [index for index, value in enumerate((sum_dtype, added, factors), 1) if value is not None]
    ctx.optional = max(given, default=0)


def _optional_grads(ctx: Any, whole: Tensor) -> list[Tensor | None]:
    """Gradients of the optional arguments; `whole` is that of the sum."""
    return [None, whole if ctx.is_added else None, None][: ctx.optional]


def _remember_biases(ctx: Any, biases: list[Tensor | None]) -> None:
    """Keep what the gradients of biases need: each one's number of dimensions, or None if there are no biases."""
    present = [bias for bias in biases if bias is not None]
    _refuse_lost_gradients(biases)
    ctx.bias_ndims = [bias.ndim for bias in present] if len(present) == len(biases) else None


def _bias_grads(ctx: Any, out_grads: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    if ctx.bias_ndims is None:
        return None
    sums = [None if grad is None else grad.flatten(0, -2).sum(0) for grad in out_grads]
    return [
        total.unsqueeze(0) if total is not None and ndim == 2 else total
        for total, ndim in zip(sums, ctx.bias_ndims, strict=True)
    ]


def _weight_grad(a_full: Tensor, out_grad: Tensor | None) -> Tensor | None:
    return None if out_grad is None else a_full.flatten(0, -2).t() @ out_grad.flatten(0, -2)


def _no_gradient(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "asynctp: the scaled (fp8) ops have no gradient, since quantization has none; call them inside an "
        "autograd.Function that quantizes, or use the bf16 ops"
    )


# --- registration ----------------------------------------------------------------------------------------------
_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Any]] = {
    "all_gather_matmul": (_real_all_gather_matmul, _fake_all_gather_matmul, _backward_gather, _setup_gather),
    "all_gather_scaled_matmul": (
        _real_all_gather_scaled_matmul,
        _fake_all_gather_scaled_matmul,
        _no_gradient,
        None,
    ),
    "matmul_reduce_scatter": (
        _real_matmul_reduce_scatter,
        _fake_matmul_reduce_scatter,
        _backward_scatter,
        _setup_scatter,
    ),
    "scaled_matmul_reduce_scatter": (
        _real_scaled_matmul_reduce_scatter,
        _fake_scaled_matmul_reduce_scatter,
        _no_gradient,
        None,
    ),
    "matmul_all_reduce": (_real_matmul_all_reduce, _fake_matmul_all_reduce, _backward_all_reduce, _setup_all_reduce),
    "scaled_matmul_all_reduce": (_real_scaled_matmul_all_reduce, _fake_scaled_matmul_all_reduce, _no_gradient, None),
}


def register(library: Any, name: str, real: Any, fake: Any, backward: Any, setup_context: Any = None) -> None:
    """Give an op of the namespace its kernels: `real` on CPU and CUDA, `fake`, and a gradient. Unused calls stay.

    `backward` and `setup_context` are those of `torch.library.register_autograd`, which is what all tensors but CUDA's
    go through. With CUDA's, `real` is called at once when there is nothing to differentiate: 20 us less a call.
    """
    for key in ("CPU", "CUDA"):
        library.impl(name, real, key)
    torch.library.register_fake(f"asynctp::{name}", fake, lib=library)
    torch.library.register_autograd(f"asynctp::{name}", backward, setup_context=setup_context, lib=library)
    op = getattr(torch.ops.asynctp, name).default
    compat.keep_unused(op)
    generic = compat.autograd_kernel(op, backward, setup_context)
    library.impl(name, short_cut(real, generic), "AutogradCUDA", with_keyset=True)


def short_cut(real: Callable[..., Any], generic: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel that calls `real` where `generic`, torch.library's, would do nothing but dispatch to it."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if compat.goes_to_backend(keyset) and not (torch.is_grad_enabled() and compat.any_requires_grad(*args)):
            return real(*args, **kwargs)
        return generic(keyset, *args, **kwargs)

    return kernel


def _register() -> Any:
    """Define the ops. They live as long as the returned library does."""
    library: Any = torch.library.Library("asynctp", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in OPS.items():
        library.define(name + schema, tags=(torch.Tag.needs_exact_strides,))
        register(library, name, *_IMPLEMENTATIONS[name])
    return library


_LIBRARY = _register()


# --- called by hand ----------------------------------------------------------------------------------------------
_callers = reference.Callers(torch.ops.asynctp, checks=False)
all_gather_matmul = _callers.all_gather_matmul
all_gather_scaled_matmul = _callers.all_gather_scaled_matmul
matmul_reduce_scatter = _callers.matmul_reduce_scatter
scaled_matmul_reduce_scatter = _callers.scaled_matmul_reduce_scatter
matmul_all_reduce = _callers.matmul_all_reduce
scaled_matmul_all_reduce = _callers.scaled_matmul_all_reduce
