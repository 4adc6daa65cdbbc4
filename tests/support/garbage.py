"""Python's collector of garbage, which else looks through all of torch again and again while tests compile."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Never look at what there is now, and seldom at what comes: of every compile that took an eighth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
