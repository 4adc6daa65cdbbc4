"""Waits of a vote: until when they last, which ranks are left, and the warning of a long one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from asynctp_passes import waiting
from asynctp_passes.agreement.ledgers import keyed
from asynctp_passes.ir.records import Ballot
from asynctp_passes.waiting import ranks_named

__all__ = ["LONGEST_PAUSE_S", "WARN_S", "deadline", "looks", "still"]

log = logging.getLogger(__name__)

WARN_S = 5.0
"""Seconds of waiting after which a warning says for whom."""

_FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05


def deadline(ballots: Iterable[Ballot]) -> float:
    """The time when a wait of a vote ends: peers may wait for this rank in a collective of any group of the graph."""
    return time.monotonic() + min((ledger.patience for ledger, _ in keyed(ballots)), default=0.0)


def still(ranks: Callable[[], list[int]], until: float, awaited: str) -> list[int]:
    """The ranks that are left at the end of a wait for them; none where it ends early."""
    left: list[int] = []
    for _ in looks(until - time.monotonic(), lambda: f"{ranks_named(ranks())} {awaited}"):
        left = ranks()
        if not left:
            break
    return left


def looks(limit: float, awaited: Callable[[], str], longest: float = LONGEST_PAUSE_S) -> Iterator[float]:
    """The seconds that have passed at each look, until `limit`, with pauses in between that grow to `longest`.

    A warning tells for whom this rank waits, once that takes `WARN_S`.
    """

    def warn() -> None:
        log.warning(
            "asynctp: waits up to %g s (ASYNCTP_AGREE_S, and a quarter of the group's timeout) for %s",
            limit,
            awaited(),
        )

    return waiting.looks(limit, warn, warn_after=WARN_S, pauses=(_FIRST_PAUSE_S, longest))
