"""The GPUs whose memory this process's GPU reaches, by names that mean the same in every process of the machine.

A process may see one GPU alone (`CUDA_VISIBLE_DEVICES`), and its peer another one. So the driver's library is asked
(NVML), which knows all GPUs of the machine. Two processes that name the same GPUs reach each other's memory, as each
names its own GPU too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch

_LIBRARY = "libnvidia-ml.so.1"
_READ, _WRITE = 0, 1  # nvmlGpuP2PCapsIndex_t
_UUID_BYTES = 96


@functools.cache
def reached(index: int) -> tuple[str, ...]:
    """UUIDs of the GPUs that GPU `index` reaches and that reach it, its own among them, sorted."""
    visible = {_uuid(each): each for each in range(torch.cuda.device_count())}
    own = _uuid(index)
    known = _known_to_nvml()
    found = {own} | {name for name, each in visible.items() if _access(index, each)}
    if own in known:  # else all that is known is what CUDA sees
        found = {name for name in known[own] if name in found or name not in visible} | {own}
    return tuple(sorted(found))


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _access(one: int, other: int) -> bool:
    return one == other or (
        torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)
    )


@functools.cache
def _known_to_nvml() -> Mapping[str, frozenset[str]]:
    """For each GPU of the machine those that it reaches and that reach it; empty where the library does not tell."""
    try:
        library: Any = ctypes.CDLL(_LIBRARY)
        if library.nvmlInit_v2():
            return {}
    except (OSError, AttributeError):
        return {}
    try:
        return _asked(library)
    except (OSError, AttributeError):
        return {}
    finally:
        with contextlib.suppress(AttributeError):
            library.nvmlShutdown()


def _asked(library: Any) -> dict[str, frozenset[str]]:
    """As `_known_to_nvml`, of an open library.

    Raises:
        OSError: It does not tell.
    """

    def must(status: int) -> None:
        if status:
            raise OSError(f"NVML answers {status}")

    count = ctypes.c_uint()
    must(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    handles = [ctypes.c_void_p() for _ in range(count.value)]
    names = []
    for number, handle in enumerate(handles):
        must(library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)))
        text = ctypes.create_string_buffer(_UUID_BYTES)
        must(library.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(_UUID_BYTES)))
        names.append(text.value.decode())

    def reaches(one: int, other: int) -> bool:
        status = ctypes.c_int(-1)
        return one != other and all(
            library.nvmlDeviceGetP2PStatus(handles[one], handles[other], way, ctypes.byref(status)) == 0
            and status.value == 0
            for way in (_READ, _WRITE)
        )

    every = range(count.value)
    return {
        names[one]: frozenset(names[other] for other in every if reaches(one, other) and reaches(other, one))
        for one in every
    }
