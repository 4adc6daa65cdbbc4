"""Process groups: names, sizes, mesh dimensions, time limits, stores, and which of its name a group is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d


def process_group(group: Any) -> Any:
    """The ProcessGroup registered under a name; what is one already, as it is.

    Raises:
        RuntimeError: No group has this name (torch's own message).
    """
    return _group_resolver()(group) if isinstance(group, str) else group


@functools.cache
def _group_resolver() -> Callable[[str], Any]:
    """Looked up once: an import statement takes most of a microsecond, in every call of an op."""
    resolver: Callable[[str], Any] = _c10d()._resolve_process_group
    return resolver


def schema_type() -> str:
    """The type of a process group in the schemas of torch's functional collectives: `str` in 2.11, later `Any`.

    Inductor's `cpp_wrapper` calls no op that takes `Any`.
    """
    if not torch.distributed.is_available():
        return "str"
    arguments = torch.ops._c10d_functional.all_reduce.default._schema.arguments
    return next(str(one.type) for one in arguments if one.name == "group_name")


def process_group_size(group: Any) -> int:
    """Ranks in a group given by name or as ProcessGroup; torch.compile can trace this call."""
    size: int = _c10d()._get_group_size_by_name(group)
    return size


def group_name_of(value: Any) -> str:
    """The name of a process group given as a name, a ProcessGroup, or a fake script object around one."""
    if isinstance(value, str):
        return value
    real = getattr(value, "real_obj", value)
    try:
        return str(real.group_name)
    except (AttributeError, RuntimeError):
        return ""


def is_process_group(value: object) -> bool:
    """True for an argument that is a process group, or the name of one."""
    if isinstance(value, str):
        return value in names()
    return bool(group_name_of(value.meta.get("val") if isinstance(value, torch.fx.Node) else value))


def _told_by(value: Any, told: Callable[[Any], T], unknown: T) -> T:
    """A fact of a process group given as a name, a ProcessGroup, or a fake script object around one."""
    try:
        return told(process_group(getattr(value, "real_obj", value)))
    except (AttributeError, RuntimeError, ValueError):
        return unknown


def size_of_group(value: Any) -> int:
    """Ranks of a process group given as a name, a ProcessGroup, or a fake script object around one; 0 if unknown."""
    return _told_by(value, lambda group: int(group.size()), 0)


def rank_in_group(value: Any) -> int | None:
    """This process's rank in a process group (as for `size_of_group`); None where it is not in one."""
    rank = _told_by(value, lambda group: int(group.rank()), -1)
    return rank if rank >= 0 else None


_MESH = "mesh_"
"""How a DeviceMesh describes the group of a dimension, before that dimension's name."""


def mesh_dimension_of(value: Any) -> str:
    """The name of the DeviceMesh dimension that a process group (as for `size_of_group`) was made for; "" if unknown.

    The default group, which a mesh of one dimension takes as it is, has none.
    """
    described = _told_by(value, lambda group: str(group.group_desc), "")
    return described.removeprefix(_MESH) if described.startswith(_MESH) else ""


def mesh_dimensions() -> dict[str, str]:
    """This process's groups by name, each with its dimension of a DeviceMesh, as `mesh_dimension_of` tells it."""
    return {name: mesh_dimension_of(name) for name in sorted(names())}


def names() -> set[str]:
    """The names of this process's process groups; empty before the first is made."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    from torch.distributed.distributed_c10d import _world

    return {str(name) for name in _world.pg_names.values()}


def has_peers() -> bool:
    """Whether there is a process group of more than one rank."""
    return any(size_of_group(name) > 1 for name in names())


def nothing_to_wait_for() -> bool:
    """Tell whether no collective of `_c10d_functional` is under way in this process: `wait_tensor` would do nothing."""
    return not torch._C._distributed_c10d._get_work_registry_size()


def had_process_group() -> bool:
    """There is a process group, or was one, for which torch puts its own hook for uncaught exceptions in place."""
    return bool(names()) or sys.excepthook.__module__ == "torch.distributed.distributed_c10d"


def uses_gpus() -> bool:
    """True once this process has done something on a GPU; asking does nothing on one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def group_timeout_s(group: Any) -> float:
    """Seconds after which the collectives of a process group run out; endless for None, or where it does not say."""
    for device in ("cuda", "cpu") if group is not None else ():
        try:
            return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return math.inf


@dataclass(frozen=True)
class Peers:
    """The ranks of a process group, this one's among them (both in the default group's numbers), and their store.

    `group` is the group itself, and `life` tells groups apart that were made with the same store one after the other:
    torchrun keeps one store for all of them. It is None where the store has failed.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Any
    group: Any = None
    life: str | None = ""


def peers_of(name: str) -> Peers | None:
    """The peers in a process group, given by name.

    None if there is no such group here, if it has one rank, or if it only pretends to communicate (the fake backend).
    """
    if name not in names():
        return None
    group = process_group(name)
    rank, ranks = torch.distributed.get_rank(), tuple(torch.distributed.get_process_group_ranks(group))
    if len(ranks) == 1 or rank not in ranks or torch.distributed.get_backend(group) == "fake":
        return None
    try:
        life = group_generation(name)
    except (RuntimeError, OSError):  # the store is gone: whoever uses it next is told so
        life = None
    return Peers(rank, ranks, _c10d()._get_process_group_store(group), group, life)


# --- lives of process groups --------------------------------------------------------------------------
# A process group can be destroyed and made again, with the same name and the same store: torchrun keeps one store for
# all groups of a run, and for its restarts. Torch gives both groups the same prefix in it, and has no number that tells
# them apart (`_world.group_count` starts anew). So what a rank writes for its peers has to say of which group it is.


@dataclass
class _Life:
    """The number of a group among those of its name. end: What writes that it is over."""

    number: int = 0
    end: Any = None


_lives: weakref.WeakKeyDictionary[Any, _Life] = weakref.WeakKeyDictionary()
_newest: dict[str, weakref.ref[Any]] = {}


def group_generation(name: str) -> str:
    """Which one a process group is, of those of its name that are made with one store: a part of keys in that.

    The same on all ranks, also where some never asked about an earlier group. Nothing waits: who asked about a group
    writes into the store that it has ended, when it is destroyed, or when this is asked about the next one. A restart
    by torchrun, which may follow a crash, counts by itself. While all other ranks still hold their earlier group, as
    NCCL allows, a rank with a new one gets the number of the earlier one, and its own when it asks again.
    """
    group = process_group(name)
    store = _c10d()._get_process_group_store(group)
    former = _newest.get(name, lambda: None)()
    if former is not None and former is not group and former in _lives:
        _lives[former].end()
    _newest[name] = weakref.ref(group)
    life = _lives.setdefault(group, _Life())
    if life.end is None or store.check([_ended(life.number)]):
        life.number = next(number for number in itertools.count(life.number) if not store.check([_ended(number)]))
        if life.end is not None:
            life.end.detach()
        life.end = weakref.finalize(group, _end_life, store, life.number)
        life.end.atexit = False  # whoever serves the store may be gone by then
    return f"{_restarts()}.{life.number}"


def _end_life(store: Any, number: int) -> None:
    with contextlib.suppress(Exception):  # the store may have gone with the group
        store.set(_ended(number), "1")


def _ended(number: int) -> str:
    return f"asynctp/ended/{_restarts()}.{number}"


def _restarts() -> str:
    """How often torchrun has started this run's processes again; the same in all of them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
