"""Torch's own async TP, to which the tools compare asynctp."""

from __future__ import annotations

import warnings
from typing import Any


def register_ops() -> None:
    """Make `torch.ops.symm_mem` complete: torch's own fused ops are registered when this module is imported."""
    import torch.distributed._symmetric_memory  # noqa: F401


def options(group: str) -> dict[str, Any]:
    """The Inductor options that switch on torch's own async TP, with the group made ready for it."""
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and the pass still asks for it
        enable: Any = _symmetric_memory.enable_symm_mem_for_group
        enable(group)
    return {"_micro_pipeline_tp": True}


def shared_bytes(group: str) -> int:
    """Bytes of symmetric memory that torch's own async TP has made for the group."""
    from torch.distributed import _symmetric_memory

    workspace = _symmetric_memory._group_name_to_workspace_tensor.get(group)
    return 0 if workspace is None else workspace.numel() * workspace.element_size()


def forget_workspace(group: str) -> None:
    """Drop that memory, as torch itself does when a call needs more: the next call makes it anew (collective)."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory._group_name_to_workspace_tensor.pop(group, None)
