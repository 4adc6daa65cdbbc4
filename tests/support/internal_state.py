"""What asynctp has told of errors that nobody foresaw, for tests that fail then."""

from __future__ import annotations

import sys


def forget_internal_errors() -> set[str]:
    """The kinds of internal errors that this process has been told of since the last call; they are told anew."""
    internal = sys.modules.get("asynctp_passes.reporting.internal")
    told = set() if internal is None else set(internal._told)
    if internal is not None:
        internal._told.clear()
    return told
