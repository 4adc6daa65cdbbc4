"""Which rows of this rank's block come before a row of the whole: an op of its own, since a graph has no rank's number.

All ranks compile the same graph, and may take it from one cache. So the number of the rank is asked for when it runs.
The op communicates nothing: its namespace, `asynctp_local`, is not that of the ops that do. Importing this module
registers it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asynctp_passes import compat

__all__ = ["NAMESPACE"]

NAMESPACE = "asynctp_local"


def _rows_before(block: Tensor, end: int, group_name: Any) -> Tensor:
    """[m, 1] of bool for this rank's block [..., m, N]: True for row i if `rank * m + i < end`."""
    rank = compat.rank_in_group(group_name)
    if rank is None:
        raise ValueError(f"asynctp: this rank is not in the group {group_name!r}, whose blocks it is to cut")
    count = block.shape[-2]
    found = block.new_ones((count, 1), dtype=torch.bool)
    if (kept := max(0, min(end - rank * count, count))) < count:
        found[kept:] = False
    return found


def _fake_rows_before(block: Tensor, end: int, group_name: Any) -> Tensor:
    return block.new_empty((block.shape[-2], 1), dtype=torch.bool)


def _register() -> Any:
    """Define the op. It lives as long as the returned library does."""
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("rows_before(Tensor block, SymInt end, Any group_name) -> Tensor")
    library.impl("rows_before", _rows_before, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::rows_before", _fake_rows_before, lib=library)
    return library


_LIBRARY = _register()
