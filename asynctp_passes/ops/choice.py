"""Which implementation runs a call: asked at run time, and named for a call before it runs."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.config import cpu_implementation
from asynctp_passes.ops.arguments import group_and_size, operands_of
from asynctp_passes.ops.calls import Call, GatherCall, first_of, signature
from asynctp_passes.ops.plain_collectives import gather
from asynctp_passes.torch_private import process_groups

log = logging.getLogger("asynctp_passes.ops")


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


@functools.cache
def finds_kernels() -> bool:
    """Whether the kernels and triton can be found. Nothing is imported: most programs that ask have no chain."""
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "asynctp_kernels"))


def on_wire(device_type: str) -> bool:
    """Whether a group's collectives are to go by asynctp's own transport, all of them, or may be torch's."""
    return device_type == "cuda" or (device_type == "cpu" and implementation("cpu") != "sequential")


def compares_calls(world_size: int) -> tuple[str, str]:
    """Whether calls of a group on GPUs will be compared, as far as this rank can tell before the group's first call.

    asynctp's own transport compares calls, torch's collectives do not.

    Returns:
        Why they will not be, or "". And a text about this rank's GPU and versions, which must be the same on all ranks.
    """
    cuda = _cuda()
    if cuda is None:
        return "triton is missing", ""
    reason, alike = cuda.memory_outlook(world_size, torch.cuda.current_device())
    return reason, alike


def meet(group_name: str, device: torch.device, accord: int) -> None:
    """Wait until all ranks of a group have come to a call of this accord, which moves nothing that is needed.

    Returns at once where no call of the group goes by asynctp's transport, and during a CUDA graph capture.

    Raises:
        SymmetricMemoryError: A rank makes another call; or calls of the group raise anyway.
        PeerTimeout: A rank does not come.
    """
    kernels = _cuda() if device.type == "cuda" else _interpreted()
    if kernels is not None:
        kernels.meet(process_groups.process_group(group_name), device, accord)


def expected_implementation(op: str, arguments: Mapping[str, Any], world_size: int) -> str:
    """The implementation that `explain` names for a call, in a word or two.

    Args:
        op: The op's name.
        arguments: The call's arguments by name, without the group; of tensors, fake ones do.
        world_size: Ranks of the group; 0 if unknown.

    Returns:
        As `"fused (cost model)"`. What `implementation` says where there is no GPU, the ranks are not known, or one is
        forced that cannot run (the call will say so).
    """
    call = signature(op).named({"group_name": None, **arguments})
    first = first_of(call)
    assert first is not None, "the pass makes no call without operands"
    device = first.device.type
    cuda = _cuda() if device == "cuda" and torch.cuda.is_available() and world_size else None
    if cuda is None:
        return implementation(device)
    try:
        choice = cuda.explain(call, world_size)
    except RuntimeError:
        return implementation(device)
    return f"{choice.implementation} ({choice.source})"


def variant_reason(
    a: Tensor,
    bs: Sequence[Tensor],
    b_scales: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    world_size: int,
) -> str | None:
    """Why nothing promises that a row of these matmuls has the same bits however many rows there are; None: it does.

    Arguments are as of `asynctp_kernels.cuda.variant_reason`, with None for a scale of 1. Where there is no GPU to ask,
    it is taken for one that the kernels are written for.
    """
    kernels = kernels_or_none(a)
    if kernels is None:
        return "triton is missing"
    scales = [a.new_empty((1,)) if scale is None else scale for scale in b_scales]
    reason: str | None = kernels.variant_reason(a, bs, scales, biases, out_dtype, world_size)
    return reason


def explain(op: str, *args: Any) -> Any:
    """How a call would be run, and why: the same arguments as `torch.ops.asynctp.<op>`, nothing is run.

    Returns:
        On CUDA an `asynctp_kernels.cuda.Choice`: implementation, whether the cost model or a measurement chose it,
        the model's estimates in microseconds, and why each other implementation cannot run the call. On CPU, and
        where there are no kernels, the name.

    Raises:
        ValueError: There is no such op, it takes other arguments, or it was given no tensor.
    """
    names, needed = signature(op).names, signature(op).needed
    if not needed <= len(args) <= len(names):
        limit = f"at least the first {needed} of {', '.join(names)}"
        raise ValueError(f"asynctp {op}: number of arguments={len(args)} is not valid; there must be {limit}")
    device = operands_of(op, args[0])[0].device.type
    cuda = _cuda() if device == "cuda" else None
    if cuda is None:
        return implementation(device)
    call = signature(op).call(*args)
    return cuda.explain(call, group_and_size(call.group_name)[1] if call.group_size is None else call.group_size)


@functools.cache
def _interpreted() -> Any:
    """The kernels on CPU tensors, in Triton's interpreter.

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
    """The kernels; None without triton, which is said once."""
    try:
        return importlib.import_module("asynctp_kernels.cuda")
    except ImportError as error:
        log.warning("asynctp: the ops run sequentially on CUDA, for want of triton (%s)", error)
        return None


_made: Counter[tuple[str, str]] = Counter()


def calls_made() -> dict[tuple[str, str], int]:
    """How often the host has called the fused ops, by op and the implementation that ran.

    A CUDA graph that holds calls is one launch, whatever is in it: its replays are not counted.
    """
    kernels = sys.modules.get("asynctp_kernels.cuda.calls")
    return dict(sorted((_made if kernels is None else _made + kernels.made).items()))


class NoKernels:
    """Stands in for the kernels where there are none: every call runs its program, in plain collectives."""

    def run(self, call: Call, check: Callable[[Call], None], program: Callable[[Call], Any]) -> Any:
        """Check and run. A rank whose gather is refused sends its shard all the same: its peers' calls are right."""
        _made[call.op, "sequential"] += 1
        try:
            check(call)
        except ValueError:
            if isinstance(call, GatherCall) and group_and_size(call.group_name)[1] == call.group_size:
                for part in (call.a_shard, call.row_numbers):
                    if part is not None:
                        gather(part.reshape(1, -1), 0, call.group_size, call.group_name)
            raise
        return program(call)


NO_KERNELS = NoKernels()


def kernels_for(tensor: Tensor | None) -> Any:
    """The kernels, where they run calls on tensors like this, or their stand-in; None: there is no tensor."""
    if tensor is not None and tensor.is_cuda:  # first: every eager call asks
        return _cuda() or NO_KERNELS
    return NO_KERNELS if tensor is None else kernels_or_none(tensor) or NO_KERNELS


def kernels_or_none(tensor: Tensor) -> Any:
    """The kernels, where the ops run them on tensors like this; None where they do not."""
    if tensor.is_cuda:
        return _cuda()
    return _interpreted() if tensor.is_cpu and implementation("cpu") == "interpreted" else None
