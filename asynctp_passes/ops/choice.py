"""Which implementation runs a call: asked at run time, and named for a call before it runs."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.config import cpu_implementation
from asynctp_passes.ops import reference
from asynctp_passes.ops.schemas import OPS, OPTIONAL

__all__ = ["expected_implementation", "explain", "implementation", "on_wire", "overlapped", "refresh"]

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
    halves = op.endswith("all_reduce") and choice.implementation in ("fused", "decomposed")
    then = ", then all-gather" if halves else ""
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
