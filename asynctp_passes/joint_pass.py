"""The pass over a graph of a forward and its backward, before torch divides it.

It marks what may be made again, tags what to keep, and notes the order of communication.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import fx

from asynctp_passes import compat
from asynctp_passes.attempt import Attempt
from asynctp_passes.config import Config
from asynctp_passes.ir.order import communications, record_order
from asynctp_passes.ir.records import Ballot
from asynctp_passes.ir.traversal import tangents_of
from asynctp_passes.planning.decide import decide_graph
from asynctp_passes.planning.deviations import communicated
from asynctp_passes.planning.made_again import CANDIDATE
from asynctp_passes.planning.rematerialize import AGREED, rematerializations
from asynctp_passes.planning.saved_products import SavedProduct, saved_products
from asynctp_passes.reporting.report import Report
from asynctp_passes.rewriting import toposort

__all__ = ["run_joint"]

log = logging.getLogger(__name__)


def run_joint(graph: fx.Graph, config: Config) -> Report | None:
    """Mark, in a graph of a forward and its backward, the gathers that are worth being made again in the backward.

    What becomes of them `partition_pass` decides, once the graph is divided. Sums are tagged to be saved in place of
    products that checkpointing saves. Tags change nothing that is computed: the partitioner, which comes next, follows
    them. In any graph the order of communication is noted, for `run` to restore.

    Args:
        graph: A joint graph, as Inductor hands it to a joint pass.
        config: The configuration.

    Returns:
        A report where asynctp itself failed, which left the graph as it was; else None: both graphs get reports.

    Raises:
        DisagreementError: asynctp failed on the graph after all ranks had agreed on something; the graph is untouched.
        StrictError: asynctp itself failed, and `config.strict` forbids it; the graph is untouched.
    """
    attempt = Attempt(graph, config, "joint")
    with attempt:
        if communications(graph.nodes):  # any other graph is left to Inductor, which sorts it after this pass
            toposort.sort(graph)
            record_order(graph)
            if tangents_of(graph):
                _tag(graph, config, attempt)
        return None
    return attempt.fall_back()


def _tag(graph: fx.Graph, config: Config, attempt: Attempt) -> None:
    decisions, context = decide_graph(graph, config)
    words = context.words
    for gather in rematerializations(graph, decisions, config.rematerialize):
        if context.compares(gather):
            gather.node.meta[CANDIDATE] = words.place_of(gather)
    tags: dict[tuple[str, str], Callable[[Ballot], None]] = {}  # by group and text, which names places in the group
    for saved in saved_products(graph, decisions):
        if context.compares(saved.collective):
            tags[saved.collective.group_key, words.of_saved(saved.collective)] = partial(_save, saved)
    texts: dict[str, list[str]] = {}
    for group, text in tags:
        texts.setdefault(group, []).append(text)
    keys = communicated((one.candidate.collective for one in decisions), "joint")
    ballots = {group: Ballot(group, key, tuple(texts.get(group, ())), joint=True) for group, key in keys.items()}
    votes = attempt.vote(list(ballots.values()))
    for (group, text), tag in tags.items():
        if (refused := votes[group, text]) is None:
            tag(Ballot(group, ballots[group].key, (text,), joint=True))
        else:
            log.warning("asynctp: %s is left out, since a rank does not do it: %s", text, refused)


def _save(chosen: SavedProduct, agreed: Ballot) -> None:
    compat.save_instead(chosen.collective.waits, chosen.nodes)
    chosen.collective.node.meta[AGREED] = agreed
