"""Progress of long work: a line on standard error for each step, when it begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


class Steps:
    """The steps of one piece of work.

        12 s  debug fp32 2x64: compile intree, 2 of 3 (the step before took 9 s)

    Args:
        work: The name of the work, which each line begins with.
        enabled: False on all ranks but the first.
    """

    def __init__(self, work: str, *, enabled: bool = True) -> None:
        self.work, self.enabled = work, enabled
        self.started = time.monotonic()
        self.latest: float | None = None

    def begin(self, step: str) -> None:
        """Say that a step begins, and how long the one before took."""
        now = time.monotonic()
        took = "" if self.latest is None else f" (the step before took {now - self.latest:.0f} s)"
        self.latest = now
        self._say(f"{step}{took}")

    def each(self, step: str, items: Collection[_Item]) -> Iterator[_Item]:
        """The items, one step each."""
        for number, item in enumerate(items, 1):
            self.begin(f"{step}, {number} of {len(items)}")
            yield item

    def end(self) -> None:
        """Say that all is done."""
        self.begin("done")

    def _say(self, text: str) -> None:
        if self.enabled:
            print(f"{time.monotonic() - self.started:5.0f} s  {self.work}: {text}", file=sys.stderr, flush=True)
