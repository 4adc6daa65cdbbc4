"""Names of implementations that older versions had: variables, tables and programs may still say them."""

from __future__ import annotations

import functools
import warnings

RENAMED = {"unfused": "sequential"}


def current(name: str, where: str) -> str:
    """The name that stands for `name` now; an old one warns, once for each place.

    Args:
        name: As it is given, valid or not.
        where: What gives it, for the warning.
    """
    if name not in RENAMED:
        return name
    _warn(name, where)
    return RENAMED[name]


@functools.cache
def _warn(name: str, where: str) -> None:
    warnings.warn(f"asynctp: {where} names {name!r}, which is now {RENAMED[name]!r}", FutureWarning, stacklevel=4)
