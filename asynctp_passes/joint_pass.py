"""The pass over a graph of a forward and its backward, before torch divides it.

It marks what may be made again, tags what to keep, and notes the order of communication.
"""

from __future__ import annotations

import logging

from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.ir.marks import note_joint
from asynctp_passes.ir.order import communications, record_order
from asynctp_passes.ir.traversal import tangents_of
from asynctp_passes.planning.decide import decide_graph
from asynctp_passes.planning.deviations import communicated
from asynctp_passes.planning.rematerializable import CANDIDATE
from asynctp_passes.planning.rematerialize import rematerialization_candidates
from asynctp_passes.planning.saved_products import saved_products
from asynctp_passes.ranks.undo import UndoOnError
from asynctp_passes.reporting.report import Report
from asynctp_passes.rewriting import toposort
from asynctp_passes.torch_private import partitioner

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
    attempt = UndoOnError(graph, config, "joint")
    with attempt:
        if communications(graph.nodes):  # any other graph is left to Inductor, which sorts it after this pass
            toposort.sort(graph)
            record_order(graph)
            if tangents_of(graph):
                _tag(graph, config, attempt)
        return None
    return attempt.fall_back()


def _tag(graph: fx.Graph, config: Config, attempt: UndoOnError) -> None:
    decisions, context = decide_graph(graph, config)
    words = context.words
    for gather in rematerialization_candidates(graph, decisions, config.rematerialize):
        if context.compares_all(gather.group_key):
            gather.node.meta[CANDIDATE] = words.place_of(gather)
    wanted = {
        (one.collective.group_key, words.of_saved(one.collective)): one
        for one in saved_products(graph, decisions)
        if context.compares_all(one.collective.group_key)
    }
    done, told = attempt.agree(communicated(one.candidate.collective for one in decisions), wanted)
    for saved in done:
        partitioner.save_instead(saved.collective.waits, saved.nodes)
    note_joint(graph, told)
