"""Errors that a user can meet. Some carry the report that explains them."""

from __future__ import annotations

from typing import Any


class AsyncTPError(RuntimeError):
    """Base class. `report` is the `Report` of the graph at hand (None when there is none)."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class StrictError(AsyncTPError):
    """A chain was missed under `strict`. The graph is untouched."""


class ExpectError(AsyncTPError):
    """Fewer chains were fused than `Config.expect` asks for. The graph is untouched."""


class DisagreementError(AsyncTPError):
    """The ranks of a group decided differently about one program. The graph is untouched, or has sent nothing yet."""


class GroupError(AsyncTPError):
    """A process group named in `Config.groups` does not exist, or cannot be used."""
