"""Read the tags of a joint graph."""

from __future__ import annotations

from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from asynctp_passes import compat


def tagged(graph: Graph) -> list[str]:
    """The nodes that the partitioner is told to compute again."""
    return [node.name for node in graph.nodes if compat.recompute_tag(node) is CheckpointPolicy.MUST_RECOMPUTE]
