"""The memory of a tensor, and of the local one in a DTensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """True for a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The one tensor in a tensor subclass, a DTensor's local one; else the tensor itself."""
    flatten: Callable[[], tuple[list[str], Any]] | None = getattr(tensor, "__tensor_flatten__", None)
    names = [] if flatten is None else flatten()[0]
    return _local(getattr(tensor, names[0])) if len(names) == 1 else tensor


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None in inference mode, where nobody counts that."""
    local = _local(tensor)
    return None if local.is_inference() else local._version
