"""Ranks meet before a graph that sends otherwise than its program: torch's own collectives do not compare calls.

    asynctp::meet(Tensor beside, str key, str deviations, Any group_name) -> Tensor

Ranks do such a deviation all or none, by a vote when they compile. Afterwards a rank may still run another graph: one
of another Python value, or the program itself, without a compile. Over symmetric memory unlike calls are found where
they meet. Over torch's own collectives they would be added or joined without a word. So on CPUs, where there are no
others, a graph with deviations has this op before it communicates in their group. A rank waits in it until all ranks of
the group run a graph with the same ones; they may be graphs of several functions. It waits in the store of the group,
as long as a collective of the group would. On GPUs the host is ahead of the collectives, so that it could not tell.

Importing this module registers the op.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asynctp_passes import compat
from asynctp_passes.errors import DisagreementError
from asynctp_passes.ops.registration import register
from asynctp_passes.waiting import looks, ranks_named

__all__ = ["meet"]

log = logging.getLogger("asynctp_passes.ops")

WARN_S = 10.0
"""Seconds of waiting after which a warning says for whom."""

_PAUSES_S = 0.00005, 0.005

_MET = "met"

_lock = threading.Lock()  # ranks may be threads of one process


@dataclass
class _Meetings:
    """Numbers, by group and key: of the next meeting, and of the first whose post is still in the store."""

    number: int = 0
    posted: int = 0


_meetings: weakref.WeakKeyDictionary[Any, dict[str, _Meetings]] = weakref.WeakKeyDictionary()
"""By process group, and key."""


def meet(key: str, deviations: str, group_name: str) -> None:
    """Wait until all ranks of a group are about to run a graph with the same deviations.

    Returns at once where there are no other ranks to ask, as with the fake backend. All ranks of a meeting go on, or
    none: the first to know writes down that they met, or that it left. Where a rank has left, those that come later
    wait for it in the next meeting. A rank that is interrupted while it waits leaves, too. If the others have met
    already, its next call comes to that meeting.

    Args:
        key: A hash of what the group communicates in the graph, and of the deviations.
        deviations: The deviations, for people.
        group_name: The process group.

    Raises:
        DisagreementError: A rank has not come within the timeout of the group, or its store failed. Nothing was sent.
    """
    peers = compat.peers_of(group_name)
    if peers is None:
        return
    if peers.life is None:
        raise _no_store(group_name, deviations, "it does not say which of its groups this is")
    with _lock:
        own = _meetings.setdefault(peers.group, {}).setdefault(key, _Meetings())
    at = f"asynctp/{peers.life}/meet/{key}"
    start, met = time.monotonic(), False
    while not met:
        place = f"{at}/{own.number}"
        own.number += 1
        left = f"rank {peers.rank} left"
        try:
            peers.store.set(f"{place}/{peers.rank}", "")
            came = _wait(peers, place, start, deviations, group_name)
            outcome = peers.store.compare_set(f"{place}/outcome", "", _MET if came else left).decode()
        except BaseException as error:  # an interrupt, say: this rank sends nothing now
            with contextlib.suppress(Exception):  # the store may be gone
                if peers.store.compare_set(f"{place}/outcome", "", left).decode() == _MET:
                    own.number -= 1
            if isinstance(error, RuntimeError | OSError):
                raise _no_store(group_name, deviations, str(error)) from error
            raise
        met = outcome == _MET
        if not (came or met):
            raise DisagreementError(
                f"asynctp: {_missing(peers, place)} of group {group_name!r} did not come, within its timeout of "
                f"{compat.group_timeout_s(peers.group):g} s, to a graph for which all ranks have agreed to "
                f"{deviations}. A rank may run another graph of the function, or run it without a compile. This rank "
                "has sent nothing. Remedy: Config(deviate=False) lets ranks differ; or let all run the same graphs, "
                "with the same graph breaks"
            )
    with contextlib.suppress(RuntimeError, OSError):  # a store that is gone takes its keys along, and all have met
        for number in range(own.posted, own.number - 1):  # all have come to this meeting, so that all have left those
            peers.store.delete_key(f"{at}/{number}/{peers.rank}")
            if peers.rank == peers.ranks[0]:
                peers.store.delete_key(f"{at}/{number}/outcome")
    own.posted = own.number - 1


def _no_store(group_name: str, deviations: str, cause: str) -> DisagreementError:
    return DisagreementError(
        f"asynctp: the store of group {group_name!r} failed, where ranks meet before a graph for which all have agreed "
        f"to {deviations}: {' '.join(cause.split())[:200]}. The process that serves the store may have ended, often "
        "that of rank 0 or torchrun's. This rank has sent nothing. Remedy: restart all ranks; Config(deviate=False) "
        "meets nobody"
    )


def _wait(peers: compat.Peers, at: str, start: float, deviations: str, group_name: str) -> bool:
    """Whether all ranks came to a meeting, within the timeout of the group from `start` on."""
    limit = compat.group_timeout_s(peers.group)
    awaited = [f"{at}/{rank}" for rank in peers.ranks]

    def warn() -> None:
        log.warning(
            "asynctp: waits up to %g s (the timeout of group %r) for %s to run a graph for which all ranks have "
            "agreed to %s. A rank that runs another graph never comes; Config(deviate=False) lets ranks differ",
            *(limit, group_name, _missing(peers, at), deviations),
        )

    left = limit - (time.monotonic() - start)
    return any(peers.store.check(awaited) for _ in looks(left, warn, warn_after=WARN_S, pauses=_PAUSES_S))


def _missing(peers: compat.Peers, at: str) -> str:
    ranks = [rank for rank in peers.ranks if not peers.store.check([f"{at}/{rank}"])]
    return ranks_named(ranks) if ranks else "a rank that came just now"


# --- registration -----------------------------------------------------------------------------------------------
def _real_meet(beside: Tensor, key: str, deviations: str, group_name: Any) -> Tensor:
    meet(key, deviations, compat.group_name_of(group_name))
    return _fake_meet(beside, key, deviations, group_name)


def _fake_meet(beside: Tensor, key: str, deviations: str, group_name: Any) -> Tensor:
    return beside.new_empty((1,), dtype=torch.uint8)


def _no_gradient(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("asynctp: a meeting of ranks has no gradient")


def _register() -> Any:
    """Define the op. It lives as long as the returned library does."""
    library: Any = torch.library.Library("asynctp", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("meet(Tensor beside, str key, str deviations, Any group_name) -> Tensor")
    register(library, "meet", _real_meet, _fake_meet, _no_gradient)
    return library


_LIBRARY = _register()
