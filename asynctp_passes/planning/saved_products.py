"""Keep a sum for the backward where activation checkpointing keeps a product that is summed. Pure: `joint_pass` tags.

    tagged     product (save) ─▶ view* ─▶ all_reduce ─▶ wait             the forward returns the product: never fused
    instead    product ─▶ view* ─▶ all_reduce ─▶ wait (save)             the forward returns the sum

Policies that save matmuls know no collectives. The backward would take what is saved and reduce it again, as the
forward did: nothing else uses the product of a chain that can be fused. So it may as well keep the sum, which takes no
more bytes, and it communicates once less. The values are the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from asynctp_passes.ir.calls import Collective, nodes_of
from asynctp_passes.ir.memory import owners_of, program_memory
from asynctp_passes.ir.traversal import reachable, tangents_of
from asynctp_passes.matching.chains import Decision, ScatterChain
from asynctp_passes.torch_private import partitioner

__all__ = ["SavedProduct", "saved_products"]


@dataclass(frozen=True)
class SavedProduct:
    """A reduction in a joint graph's forward, of products that are tagged to be saved.

    Attributes:
        collective: The reduction.
        nodes: What is tagged, from the products to what is reduced.
    """

    collective: Collective
    nodes: tuple[fx.Node, ...]


def saved_products(graph: fx.Graph, decisions: Sequence[Decision]) -> list[SavedProduct]:
    """The reductions to save in place of their products, in order.

    Left alone are a reduction that is tagged to be saved, one that becomes part of a sum with others, and one whose sum
    is a result of the graph: the program can write to that before the backward.

    Args:
        graph: A joint graph, not yet partitioned.
        decisions: One for each of its collectives.
    """
    owners = owners_of(graph)
    program = program_memory(graph, owners)
    backward = reachable(tangents_of(graph), lambda node: node.users)
    found = []
    for one in decisions:
        chain, own = one.candidate.chain, one.candidate.collective
        if one.refusal is not None or not isinstance(chain, ScatterChain) or chain.joined or own.node in backward:
            continue
        unreduced = tuple(node for node in (*nodes_of(chain.matmuls), *chain.views) if partitioner.is_saved(node))
        saved = any(map(partitioner.is_saved, own.results)) or any(owners[node] in program for node in own.results)
        if unreduced and own.waits and not saved:
            found.append(SavedProduct(own, unreduced))
    return found
