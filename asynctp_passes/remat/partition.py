"""Around torch's partitioner: let the backward that it has made gather again what the forward need not keep."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.marks import note_joint
from asynctp_passes.ir.order import communications
from asynctp_passes.ir.traversal import tangents_of
from asynctp_passes.planning.deviations import communicated
from asynctp_passes.ranks.undo import UndoOnError
from asynctp_passes.remat.edit import rematerialize
from asynctp_passes.remat.expressible import Halves, find_rematerializations
from asynctp_passes.reporting.report import Report
from asynctp_passes.torch_private import dynamo, partitioner

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
    before = UndoOnError(gm.graph, config, "partition")
    keys: dict[str, str] | None = None
    with before:
        keys, tagged = _facts(gm.graph)
    forward, backward = divide()
    if keys is None:
        return forward, backward, before.fall_back()
    if not keys:
        return forward, backward, None
    attempt = UndoOnError(backward.graph, config, "partition", other=forward.graph, keys=keys)
    with attempt:
        _rematerialize(Halves(forward.graph, backward.graph, results, tagged), keys, attempt)
        forward.recompile()
        backward.recompile()
        return forward, backward, None
    return forward, backward, attempt.fall_back()


def _facts(graph: fx.Graph) -> tuple[dict[str, str], set[str]]:
    """The hash of each group's collectives (empty without a backward), and the nodes that checkpointing has tagged."""
    if not (tangents_of(graph) and communications(graph.nodes)):
        return {}, set()
    tagged = {node.name for node in graph.nodes if partitioner.recompute_tag(node) is not None}
    return communicated(read_collectives(graph)), tagged


def _rematerialize(halves: Halves, keys: dict[str, str], attempt: UndoOnError) -> None:
    found, left = find_rematerializations(halves)
    for node, why in left.items():
        log.info("asynctp: %s: %s is not made again in the backward: %s", dynamo.compile_name(), node.name, why)
    chosen, told = attempt.agree(keys, {(one.gather.group_key, one.text): one for one in found})
    if chosen:
        rematerialize(halves, chosen)
    for half in (halves.forward, halves.backward):
        note_joint(half, told)
