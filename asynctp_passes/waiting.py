"""Wait for other ranks: look again and again, until something is there or a time is over, and warn of a long wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

_NAMED = 4


def looks(limit: float, warn: Callable[[], None], *, warn_after: float, pauses: tuple[float, float]) -> Iterator[float]:
    """The seconds that have passed at each look, until a limit.

    Args:
        limit: Seconds after which the last look comes.
        warn: Called once, to say for whom this rank waits.
        warn_after: Seconds until it is.
        pauses: Seconds of the first pause between two looks, which then double, and of the longest.
    """
    start, warned, (pause, longest) = time.monotonic(), False, pauses
    while True:
        passed = time.monotonic() - start
        yield passed
        if passed >= limit:
            return
        if passed >= warn_after and not warned:
            warned = True
            warn()
        time.sleep(pause)
        pause = min(2 * pause, longest)


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks, for people: the first few."""
    names = [*map(str, ranks[:_NAMED]), *(["..."] if len(ranks) > _NAMED else [])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
