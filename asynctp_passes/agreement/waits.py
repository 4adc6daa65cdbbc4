"""Wait for other ranks: look at the store until something is there, or a time is over, and warn of a long wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from asynctp_passes.agreement.ledgers import keyed
from asynctp_passes.ir.records import Ballot

__all__ = ["LONGEST_PAUSE_S", "WARN_S", "deadline", "looks", "ranks_named", "still"]

log = logging.getLogger(__name__)

WARN_S = 5.0
"""Seconds of waiting after which a warning says for whom."""

_FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05
_NAMED = 4


def deadline(ballots: Iterable[Ballot]) -> float:
    """The time when a vote ends: peers may wait for this rank in a collective of any group of the graph."""
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
    start, warned, pause = time.monotonic(), False, _FIRST_PAUSE_S
    while True:
        passed = time.monotonic() - start
        yield passed
        if passed >= limit:
            return
        if passed >= WARN_S and not warned:
            warned = True
            log.warning(
                "asynctp: waits up to %g s (ASYNCTP_AGREE_S, and a quarter of the group's timeout) for %s",
                limit,
                awaited(),
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks, for people: the first few."""
    names = [*map(str, ranks[:_NAMED]), *(["..."] if len(ranks) > _NAMED else [])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
