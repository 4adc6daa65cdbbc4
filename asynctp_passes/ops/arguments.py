"""Spellings of arguments: a group by its name, itself or a mesh, one tensor or a list; and how one is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed
from torch import Tensor

from asynctp_passes.torch_private import process_groups

_PROCESS_GROUP: Any = getattr(torch.distributed, "ProcessGroup", ())  # () where torch is built without distributed


def group_and_size(group: Any) -> tuple[Any, int]:
    """The group's name and its number of ranks, from a name, ProcessGroup, 1-D DeviceMesh or `(DeviceMesh, dim)`.

    Raises:
        ValueError: The group does not exist, or is none of these.
    """
    name = _group_name(group)
    try:
        return name, process_groups.process_group_size(name)
    except (RuntimeError, ValueError) as error:
        limit = (
            "the name of an existing process group; create it first, or pass the ProcessGroup itself. If a compiled "
            "graph names it, torch found another rank's graph in its cache (torch 2.13.0): give each rank a "
            "TORCHINDUCTOR_CACHE_DIR of its own"
        )
        raise _invalid("group", "group", name, limit) from error


def _group_name(group: Any) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, _PROCESS_GROUP):  # asked first: torch.compile cannot trace hasattr on a ProcessGroup
        return str(group.group_name)
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        try:
            return str(group[0].get_group(group[1]).group_name)
        except (IndexError, KeyError, RuntimeError) as error:
            raise _invalid("group", "group", group, "a mesh with the name or the number of one of its dims") from error
    limit = "a group name, a ProcessGroup, a DeviceMesh or (DeviceMesh, dim)"
    require(hasattr(group, "get_group"), "group", "group", group, limit)
    require(group.ndim == 1, "group", "group", group, 'a mesh of one dimension; slice it first (mesh["tp"])')
    return str(group.get_group().group_name)


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A list of the tensors, or of the one tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def operands_of(op: str, a: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The left-hand operands of a call: without one there would be no tensor that an op could be found by.

    Raises:
        ValueError: There are none.
    """
    parts = as_list(a)
    check_lengths(op, len(parts), {})
    return parts


def optional_list(biases: Tensor | Sequence[Tensor | None] | None, count: int) -> list[Tensor | None]:
    """A list of the biases, or of the one bias; `count` times None if there are none."""
    if biases is None:
        return [None] * count
    return [biases] if isinstance(biases, Tensor) else list(biases)


# --- refusals ------------------------------------------------------------------------------------------------------
def check_group(op: str, group_size: int, group: Any) -> None:
    """Check that a group exists and has the size that the op was told.

    Raises:
        ValueError: It does not exist, or has another size.
    """
    _, actual = group_and_size(group)
    limit = f"the size of group {group!r}, which has {actual} ranks; compile again after changing groups"
    require(group_size == actual, op, "group_size", group_size, limit)


def _invalid(op: str, name: str, value: object, limit: str) -> ValueError:
    return ValueError(f"asynctp {op}: {name}={value!r} is not valid; it must be {limit}")


def require(condition: bool, op: str, name: str, value: object, limit: str) -> None:
    """Refuse an argument of an op that is not as its limit says.

    Raises:
        ValueError: Names the op, the argument, its value and the limit.
    """
    if not condition:
        raise _invalid(op, name, value, limit)


def check_lengths(op: str, count: int, lists: dict[str, Sequence[Any]]) -> None:
    """Check that there is an operand, and that each list has one item for each."""
    require(count > 0, op, "number of operands", count, "at least 1")
    for name, items in lists.items():
        none = " (None for no bias)" if name == "biases" else ""
        require(len(items) == count, op, f"len({name})", len(items), f"{count}: one for each product{none}")


def normalize_dim(dim: int, ndim: int) -> int:
    """The dimension counted from the front."""
    return dim + ndim if dim < 0 else dim
