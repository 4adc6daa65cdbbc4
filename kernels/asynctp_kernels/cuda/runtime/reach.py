"""The GPUs whose memory this process's GPU reaches, each with its number in this process.

Two processes with the same ones reach each other's memory, as each names its own GPU too. And they have different
numbers for different GPUs: torch's symmetric memory takes no group whose GPUs have one number, as where each process
sees one alone (`CUDA_VISIBLE_DEVICES`).
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def reached(index: int) -> tuple[str, ...]:
    """Number and UUID of each GPU that GPU `index` reaches and that reaches it, its own among them."""
    return tuple(
        f"{each}: {torch.cuda.get_device_properties(each).uuid}"
        for each in range(torch.cuda.device_count())
        if each == index or (_access(index, each) and _access(each, index))
    )


def _access(one: int, other: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(one, other))
