"""The memory of a process group, or why it has none, the plans there, and what becomes of it where a call fails."""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from asynctp_kernels.cuda.checks import group_refused
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.runtime import memory as memory_of
from asynctp_kernels.cuda.runtime.driver import CudaError, StreamWaitOver
from asynctp_kernels.cuda.runtime.enroll import rank_facts, reached
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory, existing_memory, group_memory
from asynctp_kernels.cuda.runtime.watch import error_of
from asynctp_kernels.errors import NotEnrolled, SymmetricMemoryError
from asynctp_kernels.torch_private import process_group

log = logging.getLogger(__name__)

_unavailable: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()
T = TypeVar("T")


def memory_for(group: ProcessGroup, device: torch.device) -> GroupMemory | None:
    """The group's memory; None where there can be none, which is said once, or raised if an implementation is forced.

    Raises:
        RuntimeError: one is forced that needs it, or `device` is not the current one.
    """
    _check_device(device)
    return existing_memory(group) or _new_memory(group, device)


def _new_memory(group: ProcessGroup, device: torch.device) -> GroupMemory | None:
    if group in _unavailable:
        _require_none_forced(_unavailable[group])
        return None
    reason = group_refused(group.size())
    if reason is None:
        try:
            return group_memory(group, device)
        except NotEnrolled as error:  # on every rank; all else is raised
            reason = str(error)
    _unavailable[group] = reason
    _require_none_forced(reason)
    log.warning("group %s runs the sequential program: %s", group.group_name, reason)
    return None


def memory_outlook(world: int, index: int) -> tuple[str, str]:
    """Whether a group of so many ranks will have memory, as far as this rank can tell alone, on GPU `index`.

    Returns:
        Why it will not, or "". And a text: where it is the same on all ranks of the group, nothing that they must
        share differs, and their GPUs reach each other.
    """
    try:
        reason = group_refused(world) or ("" if select.requested() != "sequential" else f"{select.VARIABLE}=sequential")
        facts = rank_facts(index, with_table=False)
    except ValueError as error:
        return str(error), ""
    gpus = reached(index)
    digest = hashlib.sha256(f"{json.dumps(facts)} {gpus}".encode()).hexdigest()[:16]
    return reason, f"{facts['gpu']}, one of {len(gpus)} that share memory ({digest})"


def _check_device(device: torch.device) -> None:
    """Events, streams and kernels belong to the current device: it must be the tensors'."""
    if driver.IN_ORDER and device.type != "cpu":
        raise RuntimeError(
            f"asynctp: Triton interprets (TRITON_INTERPRET=1), but the tensors are on {device}; unset it"
        )
    if device.index != (current := driver.current_device()):
        raise RuntimeError(
            f"asynctp: tensors on {device} while cuda:{current} is the current device; call "
            f"torch.cuda.set_device({device.index}) first"
        )


def _require_none_forced(reason: str) -> None:
    wanted = select.requested()
    if wanted not in (None, "sequential"):
        raise RuntimeError(f"asynctp: implementation {wanted!r} was asked for and cannot run: {reason}")


# --- plans: each is made once, for the shapes of a call, and run each time --------------------------------------------
MAX_PLANS = 1024  # of one group
#: what a look-up gives where there is no plan; None is one, of a call that is left to NCCL
MISSING = object()


def keys_of(*tensors: Tensor | None) -> list[tuple[Any, ...] | None]:
    """Each tensor's facts that a plan depends on, and that are checked once a plan."""
    return [
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
    ]


def store_plan(memory: GroupMemory, key: object, plan: Any) -> Any:
    """Remember a plan; with dynamic shapes there are many, so they are all forgotten now and then.

    Plans are kept with the group's memory, and go when it goes.
    """
    if len(memory.plans) >= MAX_PLANS and not driver.capturing():
        memory.forget_plans()
    memory.plans[key] = plan
    return plan


# --- calls that fail, and the end of a group's memory ----------------------------------------------------------------
def fail_group_on_error(memory: GroupMemory, do: Callable[..., T], *args: Any) -> T:
    """`do(*args)`, part of a call that uses the group's memory.

    Should that raise half way, the ranks are out of step: then the memory must not be used again. Not so a
    `SymmetricMemoryError`: that is raised by all ranks alike, before anything is enqueued.
    """
    try:
        return do(*args)
    except StreamWaitOver as over:
        error = error_of(memory, over)
        memory.fail(error)
        raise error from None
    except BaseException as error:
        harmless = isinstance(error, SymmetricMemoryError) and not isinstance(error, CudaError)
        if memory.failure is None and not harmless:
            memory.failure = f"{type(error).__name__}: {error}"
        raise


def release(group: ProcessGroup) -> None:
    """Free all memory of `group`, captured graphs' included. Collective in effect: the next call starts anew."""
    _unavailable.pop(group, None)
    memory_of.release(group)


def last_implementation(group: Any) -> str:
    """Name the implementation of the group's last call; `group` as for `asynctp_kernels.release`.

    Raises:
        ValueError: There is no such group.
    """
    group = process_group(group)
    if group in _unavailable or (memory := existing_memory(group)) is None:
        return "sequential"
    return memory.last_implementation


def shared_bytes(group: Any) -> int:
    """Bytes of this rank's memory that the group's ops share with the peers; no allocator of PyTorch counts them.

    `group` as for `asynctp_kernels.release`.

    Raises:
        ValueError: There is no such group.
    """
    memory = existing_memory(process_group(group))
    return 0 if memory is None else memory.shared_bytes
