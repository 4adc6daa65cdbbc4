"""Around torch's partitioner: let the backward that it has made gather again what the forward need not keep."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import fx

from asynctp_passes import compat
from asynctp_passes.attempt import Attempt
from asynctp_passes.config import Config
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.order import communications
from asynctp_passes.ir.records import Ballot
from asynctp_passes.ir.traversal import tangents_of
from asynctp_passes.planning.deviations import communicated
from asynctp_passes.planning.made_again import Halves, MadeAgain, found_again
from asynctp_passes.reporting.report import Report
from asynctp_passes.rewriting.make_again import make_again

__all__ = ["run_partition"]

log = logging.getLogger(__name__)

_Divided = tuple[fx.GraphModule, fx.GraphModule]


def run_partition(
    gm: fx.GraphModule, divide: Callable[[], _Divided], results: int | None, config: Config
) -> tuple[fx.GraphModule, fx.GraphModule, Report | None]:
    """Divide a joint graph, and let the backward make gathers again in place of what the forward keeps of them.

    Args:
        gm: The joint graph, after `run_joint`.
        divide: Divides it.
        results: How many outputs of the forward are results of the program; None where that is not known.
        config: The configuration.

    Returns:
        The forward, the backward, and a report where asynctp itself failed, which left both as they were.

    Raises:
        DisagreementError: asynctp failed after all ranks had agreed on something; the graphs are untouched.
        StrictError: asynctp itself failed, and `config.strict` forbids it; the graphs are untouched.
    """
    before = Attempt(gm.graph, config, "joint", told="partition")
    keys, tagged, failed = dict[str, str](), set[str](), True
    with before:
        keys, tagged = _facts(gm.graph)
        failed = False
    forward, backward = divide()
    if failed:
        return forward, backward, before.fall_back()
    if not keys:
        return forward, backward, None
    attempt = Attempt(backward.graph, config, "joint", other=forward.graph, keys=keys)
    with attempt:
        _make_again(Halves(forward.graph, backward.graph, results, tagged), keys, attempt)
        forward.recompile()
        backward.recompile()
        return forward, backward, None
    return forward, backward, attempt.fall_back()


def _facts(graph: fx.Graph) -> tuple[dict[str, str], set[str]]:
    """By group, under which key it votes, none for a graph of no backward; and the names of nodes that are tagged."""
    if not (tangents_of(graph) and communications(graph.nodes)):
        return {}, set()
    tagged = {node.name for node in graph.nodes if compat.recompute_tag(node) is not None}
    return communicated(read_collectives(graph), "partition"), tagged


def _make_again(halves: Halves, keys: dict[str, str], attempt: Attempt) -> None:
    found, left = found_again(halves)
    for node, why in left.items():
        log.info("asynctp: %s: %s is not made again in the backward: %s", compat.compile_name(), node.name, why)
    texts: dict[str, list[str]] = {}
    for one in found:
        texts.setdefault(one.gather.group_key, []).append(one.text)
    ballots = {group: Ballot(group, key, tuple(texts.get(group, ())), joint=True) for group, key in keys.items()}
    votes = attempt.vote(list(ballots.values()))
    chosen: dict[MadeAgain, Ballot] = {}
    for one in found:
        group = one.gather.group_key
        if (refused := votes[group, one.text]) is None:
            chosen[one] = Ballot(group, keys[group], (one.text,), joint=True)
        else:
            log.warning("asynctp: %s is left out, since a rank does not do it: %s", one.text, refused)
    if chosen:
        make_again(halves, chosen)
