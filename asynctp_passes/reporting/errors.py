"""Errors that a user can meet, each with the report that explains it."""

from __future__ import annotations

from asynctp_passes.config import Config, ConfigError
from asynctp_passes.reasons import INTERNAL_ERROR
from asynctp_passes.reporting.report import Remark, Report

__all__ = [
    "AsyncTPError",
    "ConfigError",
    "DisagreementError",
    "ExpectError",
    "GroupError",
    "StrictError",
    "raise_if_strict",
]


class AsyncTPError(RuntimeError):
    """Base class. `report` is the report of the graph at hand (None when there is none)."""

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[AsyncTPError], tuple[str, Report | None]]:
        return type(self), (str(self), self.report)


class StrictError(AsyncTPError):
    """A chain was missed under `strict`. The graph is untouched."""


class ExpectError(AsyncTPError):
    """Fewer chains were fused than `Config.expect` asks for. The graph is untouched."""


class DisagreementError(AsyncTPError):
    """The ranks of a group decided differently about one program. The graph is untouched."""


class GroupError(AsyncTPError):
    """A process group named in `Config.groups` does not exist, or cannot be used."""


def raise_if_strict(report: Report, config: Config) -> None:
    """Raise what `config.strict` and `config.expect` ask for; called before the first edit of the graph.

    Raises:
        StrictError: `strict="all"` and a chain is MISSED, or there was an internal error; or `strict="zero"` and chains
            are in scope but none is FUSED.
        ExpectError: chains are in scope and fewer than `config.expect` are FUSED.
    """
    fused, missed = report.fused, report.missed
    failed = missed or report.internal_errors
    if (failed and config.strict == "all") or (missed and config.strict == "zero" and not fused):
        raise StrictError(_strict_message(report, config, missed), report)
    if (fused or missed) and len(fused) < config.expect:
        raise ExpectError(
            f"asynctp: expect={config.expect}, but {len(fused)} chains of {report.graph} ({report.phase}) were fused. "
            f"Lower expect, or mend what is missed:\n{report}",
            report,
        )


def _strict_message(report: Report, config: Config, missed: tuple[Remark, ...]) -> str:
    codes = ", ".join(sorted({remark.code for remark in missed})) or INTERNAL_ERROR.code
    chains = len(missed) + len(report.fused)
    return (
        f"{codes}: asynctp fused {len(report.fused)} of {chains} chains of {report.graph} ({report.phase}) "
        f'and strict="{config.strict}" does not allow that. Mend the chains below, or compile with '
        f'strict="off".\n{report}'
    )
