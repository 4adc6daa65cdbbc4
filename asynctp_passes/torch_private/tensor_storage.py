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


def has_storage(tensor: torch.Tensor) -> bool:
    """False for a tensor without memory that can be known again, as a sparse one, or one in oneDNN's layout."""
    return torch._C._has_storage(_local(tensor))


class Storage:
    """The memory of a tensor, known again as long as it lives; holds none of it."""

    __slots__ = ("_reference", "number")

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._reference: Any = StorageWeakRef(_local(tensor).untyped_storage())  # type: ignore[no-untyped-call]
        self.number: int = self._reference.cdata

    @property
    def lives(self) -> bool:
        """Some tensor has it."""
        return not self._reference.expired()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The one tensor in a tensor subclass, a DTensor's local one; else the tensor itself."""
    flatten: Callable[[], tuple[list[str], Any]] | None = getattr(tensor, "__tensor_flatten__", None)
    names = [] if flatten is None else flatten()[0]
    return _local(getattr(tensor, names[0])) if len(names) == 1 else tensor


def size_of(tensor: torch.Tensor) -> int:
    """The number of elements of a tensor, of a DTensor those of its local one."""
    return _local(tensor).numel()


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None in inference mode, where nobody counts that."""
    local = _local(tensor)
    return None if local.is_inference() else local._version
