"""Raise what `strict` and `expect` ask for, before a graph is edited."""

from __future__ import annotations

import dataclasses
import logging
import weakref

from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.errors import ExpectError, StrictError
from asynctp_passes.reasons import CATALOGUE, INTERNAL_ERROR
from asynctp_passes.reporting.internal import contained
from asynctp_passes.reporting.picture import picture
from asynctp_passes.reporting.report import Report
from asynctp_passes.torch_private import dynamo, inductor_compile, process_groups
from asynctp_passes.torch_private.giving_up import GivenUp
from asynctp_passes.torch_private.uncompiled import Uncompiled

log = logging.getLogger(__name__)

_UNCERTAIN = {name for name, reason in CATALOGUE.items() if reason.uncertain}

_parts: weakref.WeakKeyDictionary[fx.GraphModule, dict[fx.Graph, Report]] = weakref.WeakKeyDictionary()
"""The reports of a graph's subgraphs and its own, by the graph that Inductor compiles."""


def raise_if_strict(graph: fx.Graph, report: Report, config: Config) -> None:
    """Raise what `config.strict` and `config.expect` ask for; called before the first edit of the graph.

    A graph is judged together with its subgraphs, as branches of `torch.cond`, which come before it. On a subgraph
    only `strict="all"` raises. Chains that the same compile has fused in earlier graphs count, too.

    Raises:
        StrictError: `strict="all"` and a chain is MISSED, or there was an internal error; or `strict="zero"` and chains
            are in scope for sure, can be mended, and none is FUSED.
        ExpectError: Chains are in scope and fewer than `config.expect` are FUSED.
    """
    module, last = inductor_compile.whole_graph() or (None, True)
    parts = {graph: report} if module is None else _parts.setdefault(module, {})
    parts[graph] = report
    if not last:
        if config.strict == "all" and (report.missed or report.internal_errors):
            raise StrictError(_strict_message(report, config), report)
        return
    if module is not None:
        del _parts[module]
    others = picture.earlier(report.phase)  # those of subgraphs, too
    inside = [part for part in parts.values() if part is not report and part.phase == report.phase]
    # of graphs that Dynamo does not compile, the picture knows no others
    elsewhere = max(0, sum(len(one.fused) for one in others) - sum(len(one.fused) for one in inside))
    with_parts = dataclasses.replace(
        report, remarks=tuple(remark for part in parts.values() for remark in part.remarks)
    )
    _raise_if(with_parts, report, config, elsewhere)


def raise_if_strict_across(report: Report, config: Config, elsewhere: int) -> None:
    """The same for a report of chains that lie in two graphs; elsewhere: chains that are fused in these graphs."""
    here = sum(len(one.fused) for one in picture.earlier(report.phase))
    _raise_if(report, report, config, max(here, elsewhere))


@contained("judge a function that torch fails to compile")
def judge_uncompiled(found: Uncompiled, config: Config) -> None:
    """Raise what `config.strict` and `config.expect` ask for where torch fails to compile a function; else warn once.

    Nothing is said in a process without peers.

    Raises:
        StrictError: `strict="all"`.
        ExpectError: `expect` is not 0.
    """
    if not process_groups.has_peers():
        return
    is_new = picture.note_uncompiled(found.name, found.reason)
    if not found.is_judged:
        raise_uncompiled(config, found)
    if is_new:
        log.warning("asynctp: %s. Remedy: %s", _not_compiled(found), found.remedy)


def raise_uncompiled(config: Config, found: Uncompiled | GivenUp) -> None:
    """Raise what `config.strict` and `config.expect` ask for where torch does not compile a function.

    Raises:
        StrictError: `strict="all"`.
        ExpectError: `expect` is not 0.
    """
    told = f"asynctp: {_not_compiled(found)}"
    if config.strict == "all":
        raise StrictError(f'{told}; strict="all" does not allow that. Remedy: {found.remedy}')
    if config.expect:
        raise ExpectError(f"{told}; expect={config.expect} asks for chains. Remedy: {found.remedy}")


def _not_compiled(found: Uncompiled | GivenUp) -> str:
    return f"torch fails to compile {found.name}, and what it multiplies or communicates is not fused ({found.reason})"


def _raise_if(judged: Report, own: Report, config: Config, elsewhere: int) -> None:
    """Judge a report; `own` goes with the error, and `elsewhere` counts chains that other graphs have fused."""
    fused = len(judged.fused) + elsewhere
    failed = judged.missed or judged.internal_errors
    certain = any(remark.name not in _UNCERTAIN for remark in judged.missed)
    none = certain and not fused and not dynamo.is_cut_for_ddp()  # later pieces may fuse some
    if (failed and config.strict == "all") or (none and config.strict == "zero"):
        raise StrictError(_strict_message(judged, config), own)
    if (fused or judged.missed) and fused < config.expect:
        raise ExpectError(_expect_message(judged, config, fused), own)


def _expect_message(report: Report, config: Config, fused: int) -> str:
    most = fused + len(report.missed)
    remedy = "mend what is missed"
    if most < config.expect:
        mended = f", or {most} once what is missed is mended" if report.missed else ""
        remedy = (
            f"expect={fused} or less{mended}: no more chains of this graph are in scope, and expect counts in each "
            "graph that has any. asynctp_passes.require(fused=N) counts those of all graphs"
        )
    return (
        f"asynctp: expect={config.expect}, but {fused} of the {most} chains of {report.graph} ({report.phase}) are "
        f"fused. Remedy: {remedy}\n{report}"
    )


def _strict_message(report: Report, config: Config) -> str:
    codes = ", ".join(sorted({remark.code for remark in report.missed})) or INTERNAL_ERROR.code
    chains = len(report.missed) + len(report.fused)
    return (
        f"{codes}: asynctp fused {len(report.fused)} of {chains} chains of {report.graph} ({report.phase}) "
        f'and strict="{config.strict}" does not allow that. Mend the chains below, or compile with '
        f'strict="off".\n{report}'
    )
