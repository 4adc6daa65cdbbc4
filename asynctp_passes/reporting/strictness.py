"""Raise what `strict` and `expect` ask for, before a graph is edited."""

from __future__ import annotations

from asynctp_passes.config import Config
from asynctp_passes.errors import ExpectError, StrictError
from asynctp_passes.reasons import INTERNAL_ERROR
from asynctp_passes.reporting.report import Remark, Report

__all__ = ["raise_if_strict"]


def raise_if_strict(report: Report, config: Config, elsewhere: int = 0) -> None:
    """Raise what `config.strict` and `config.expect` ask for; called before the first edit of the graph.

    Args:
        report: The report.
        config: The configuration.
        elsewhere: Chains that are fused in graphs which the report's chains lie in, too.

    Raises:
        StrictError: `strict="all"` and a chain is MISSED, or there was an internal error; or `strict="zero"` and chains
            are in scope but none is FUSED.
        ExpectError: chains are in scope and fewer than `config.expect` are FUSED.
    """
    fused, missed = len(report.fused) + elsewhere, report.missed
    failed = missed or report.internal_errors
    if (failed and config.strict == "all") or (missed and config.strict == "zero" and not fused):
        raise StrictError(_strict_message(report, config, missed), report)
    if (fused or missed) and fused < config.expect:
        raise ExpectError(_expect_message(report, config, fused), report)


def _expect_message(report: Report, config: Config, fused: int) -> str:
    most = fused + len(report.missed)
    remedy = "mend what is missed"
    if most < config.expect:
        remedy = (
            f"expect={most} or less: no more chains of this graph are in scope, and expect counts in each graph that "
            "has any. asynctp_passes.require(fused=N) counts those of all graphs"
        )
    return (
        f"asynctp: expect={config.expect}, but {fused} of the {most} chains of {report.graph} ({report.phase}) are "
        f"fused. Remedy: {remedy}\n{report}"
    )


def _strict_message(report: Report, config: Config, missed: tuple[Remark, ...]) -> str:
    codes = ", ".join(sorted({remark.code for remark in missed})) or INTERNAL_ERROR.code
    chains = len(missed) + len(report.fused)
    return (
        f"{codes}: asynctp fused {len(report.fused)} of {chains} chains of {report.graph} ({report.phase}) "
        f'and strict="{config.strict}" does not allow that. Mend the chains below, or compile with '
        f'strict="off".\n{report}'
    )
