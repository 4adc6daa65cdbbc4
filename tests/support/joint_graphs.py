"""Joint graphs of forward and backward: marked, and divided as Inductor divides them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from asynctp_passes import Config
from asynctp_passes.ir.order import CANDIDATE, REMATERIALIZED
from asynctp_passes.ir.traversal import reachable, tangents_of
from asynctp_passes.remat.joint import run_joint
from asynctp_passes.remat.partition import run_partition
from asynctp_passes.torch_private import partitioner, symbolic_sizes


def marked(graph: Graph) -> list[str]:
    """The gathers that are worth being made again."""
    return [node.name for node in graph.nodes if CANDIDATE in node.meta]


@dataclass
class Divided:
    """The two graphs that a joint one became.

    Attributes:
        forward: The forward.
        backward: The backward.
        results: How many results the program has.
    """

    forward: Graph
    backward: Graph
    results: int

    @property
    def kept(self) -> list[str]:
        """The tensors that the forward keeps."""
        return [node.name for node in outputs_of(self.forward)[self.results :]]

    @property
    def kept_bytes(self) -> int:
        """The bytes of these, but of the program's inputs."""
        saved = (node for node in outputs_of(self.forward)[self.results :] if node.op != "placeholder")
        values = [node.meta["val"] for node in saved]
        return sum(symbolic_sizes.expected_bytes(value) for value in values if isinstance(value, torch.Tensor))

    @property
    def given(self) -> list[str]:
        """The inputs of the backward, without the gradients that come in."""
        names = [node.name for node in self.backward.nodes if node.op == "placeholder"]
        return [name for name in names if not name.startswith("tangents_")]

    @property
    def again(self) -> list[str]:
        """The gathers that the backward makes again."""
        return [node.name for node in self.backward.nodes if REMATERIALIZED in node.meta]

    @property
    def communications(self) -> list[str]:
        """The ops of the backward that communicate, in order."""
        return [node.name for node in self.backward.nodes if "_c10d" in str(node.target) and "wait" not in node.name]


def outputs_of(graph: Graph) -> list[Node]:
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, list | tuple)
    return list(outputs)  # type: ignore[arg-type]


def divided(graph: Graph, config: Config, partition: Any = partitioner.default_partition) -> Divided:
    """Run the joint pass on a graph, and then the partitioner with the pass around it.

    The results of the forward come first among those of the graph.
    """
    run_joint(graph, config)
    backward = reachable(tangents_of(graph), lambda node: node.users)
    results = sum(node not in backward for node in outputs_of(graph))
    gm = GraphModule(torch.nn.Module(), graph)
    gm.graph.owning_module = gm
    halves = run_partition(gm, lambda: partition(gm, [], compiler="inductor", num_fwd_outputs=results), results, config)
    assert halves[2] is None
    for half in halves[:2]:
        half.graph.lint()
    return Divided(halves[0].graph, halves[1].graph, results)
