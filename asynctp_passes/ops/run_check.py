"""Ranks on CPUs compare which graph they run: torch's own collectives do not compare calls.

    asynctp::run_check(Tensor beside, int accord, int count, Any group_name) -> Tensor

All ranks of a group do a graph's deviations, or none. Later they may run unlike graphs all the same. Over symmetric
memory unlike calls are found where they meet, by the accord in their signatures. Torch's own collectives would add up
or join what does not belong together, without a word. So on CPUs each compiled graph has this op before it communicates
in a group.

It costs nothing until the ranks of the group run a graph in which they deviate. From then on a rank counts the
collectives of the program that its graphs make. Before the nth it says with which accord, and waits for what the
others say of the nth. Ranks share the collectives, so it does not matter how a rank's graphs are cut. On GPUs the host
is ahead of the collectives, so that it could not tell.

Importing this module registers the op.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asynctp_passes.errors import DisagreementError
from asynctp_passes.ops.register import define
from asynctp_passes.torch_private import process_groups
from asynctp_passes.waiting import looks, ranks_named

log = logging.getLogger("asynctp_passes.ops")

WARN_S = 10.0
"""Seconds of waiting after which a warning says for whom."""

_PAUSES_S = 0.00005, 0.005
_REMEDY = (
    "Remedy: Config(deviate=False) on every rank lets them differ; or let all take the same branches "
    "(docs/how-to/ranks-that-differ.md)"
)

_lock = threading.Lock()  # ranks may be threads of one process


@dataclass
class _Runs:
    """This rank's runs in a group.

    Attributes:
        made: Collectives of the program that compiled graphs made.
        raised: How often a rank gave a place up: all of them raise, so that all have one number.
        why: The error of that rank, the last time.
    """

    made: int = 0
    raised: int = 0
    why: str = ""


_runs: weakref.WeakKeyDictionary[Any, _Runs] = weakref.WeakKeyDictionary()


def begin(group: Any) -> _Runs:
    """Compare runs of a process group from now on: its ranks run a graph in which they deviate."""
    with _lock:
        return _runs.setdefault(group, _Runs())


def has_begun(group: Any) -> bool:
    """Whether the ranks of a process group compare runs."""
    return group in _runs


def run_check(accord: int, count: int, group_name: str) -> None:
    """Compare, before a graph communicates in a group, what the ranks run there.

    Returns at once where there are no other ranks to ask, as with the fake backend.

    Args:
        accord: What all ranks have agreed on for this graph; 0 for nothing.
        count: How many collectives of the program this check is for.
        group_name: The process group.

    Raises:
        DisagreementError: Another rank runs a graph of another accord, and all ranks raise; a rank has not come within
            the timeout of the group; or its store failed. Nothing was sent, and the ranks may run alike graphs next.
    """
    peers = process_groups.peers_of(group_name)
    if peers is None or (not accord and peers.group not in _runs):
        return
    own = begin(peers.group)
    try:
        if peers.life is None:
            raise RuntimeError("it does not say which of its groups this is")
        _compare(peers, group_name, own, accord, count)
    except DisagreementError:
        raise
    except (RuntimeError, OSError) as error:
        raise DisagreementError(
            f"asynctp: the store of group {group_name!r} failed, where ranks compare what they run: "
            f"{' '.join(str(error).split())[:200]}. The process that serves the store may have ended, often that of "
            "rank 0 or torchrun's. This rank has sent nothing. Remedy: restart all ranks; Config(deviate=False) "
            "compares nothing"
        ) from error
    own.made += count


def _compare(peers: process_groups.Peers, name: str, own: _Runs, accord: int, count: int) -> None:
    """Wait until all ranks have said the same of this place.

    Raises:
        DisagreementError: One has said something else, or nothing.
    """
    _say(peers, own, count, accord)
    limit, left = process_groups.group_timeout_s(peers.group), [rank for rank in peers.ranks if rank != peers.rank]

    def warn() -> None:
        log.warning(
            "asynctp: waits up to %g s (the timeout of group %r) for %s to run %s. %s",
            *(limit, name, ranks_named(left), _told(peers, accord), _REMEDY),
        )

    for _ in looks(limit, warn, warn_after=WARN_S, pauses=_PAUSES_S):
        for rank in list(left):
            first, end, theirs, raised, why = _said_by(peers, rank)
            if raised > own.raised:
                raise _give_up(peers, own, why, f" (rank {peers.rank} raises since rank {rank} does)")
            if end <= own.made or raised < own.raised:
                continue
            if first <= own.made and theirs != accord:
                raise _give_up(
                    *(peers, own),
                    f"asynctp: ranks of group {name!r} run unlike graphs: rank {peers.rank} runs "
                    f"{_told(peers, accord)}, and rank {rank} runs {_told(peers, theirs)}. No rank has "
                    f"sent anything. {_REMEDY}",
                )
            left.remove(rank)  # one that is further on has compared this place
        if not left:
            return
    raise _give_up(
        *(peers, own),
        f"asynctp: {ranks_named(left)} of group {name!r} did not come, within its timeout of {limit:g} s, to "
        f"what rank {peers.rank} runs: {_told(peers, accord)}. A rank may run the program without a compile. "
        f"Rank {peers.rank} has sent nothing. {_REMEDY}",
    )


def _give_up(peers: process_groups.Peers, own: _Runs, why: str, since: str = "") -> DisagreementError:
    """The error of this rank, which waits at its place no more; the other ranks raise it too, once each."""
    own.raised, own.why = own.raised + 1, why
    _say(peers, own)
    return DisagreementError(why + since)


def _say(peers: process_groups.Peers, own: _Runs, count: int = 0, accord: int = 0) -> None:
    """Tell the others of the collectives that come next."""
    record = own.made, own.made + count, accord, own.raised, own.why
    peers.store.set(f"asynctp/{peers.life}/runs/{peers.rank}", json.dumps(record))


def _said_by(peers: process_groups.Peers, rank: int) -> tuple[int, int, int, int, str]:
    """The record of a rank, as `_say` writes it."""
    at = f"asynctp/{peers.life}/runs/{rank}"
    return tuple(json.loads(peers.store.get(at))) if peers.store.check([at]) else (0, 0, 0, 0, "")


def _told(peers: process_groups.Peers, accord: int) -> str:
    """The graphs of an accord, in words."""
    at = f"asynctp/accords/{accord}"
    if not accord:
        return "a graph in which nothing is changed of what the program sends"
    return str(peers.store.get(at).decode()) if peers.store.check([at]) else f"a graph of accord {accord}"


# --- registration -----------------------------------------------------------------------------------------------
def _real(beside: Tensor, accord: int, count: int, group_name: Any) -> Tensor:
    run_check(accord, count, process_groups.group_name_of(group_name))
    return _fake(beside, accord, count, group_name)


def _fake(beside: Tensor, accord: int, count: int, group_name: Any) -> Tensor:
    return beside.new_empty((1,), dtype=torch.uint8)


_SCHEMA = f"(Tensor beside, int accord, int count, {process_groups.schema_type()} group_name) -> Tensor"
_LIBRARY = define({"run_check": (_SCHEMA, _real, _fake)}, "asynctp: a check of what ranks run has no gradient")
