"""Walk through a graph: the nodes that lead to others, stretches between in-place operations, orders of steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from asynctp_passes.ir.nodes import is_random, mutates, orders_streams


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """The gradients that come in, told by the names that autograd's tracing gives to a graph's inputs."""
    return [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents_")]


def phase_of(graph: fx.Graph) -> str:
    """ "forward", "backward" or "inference", told by the names of a graph's inputs too."""
    if tangents_of(graph):
        return "backward"
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    return "forward" if any(name.startswith("primals_") for name in inputs) else "inference"


def live(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the graph's results, or its in-place operations, are computed from, and these."""
    return reachable(node for node in graph.nodes if node.op == "output" or mutates(node))


def reachable(
    starts: Iterable[fx.Node],
    step: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
    where: Callable[[fx.Node], bool] = lambda node: True,
) -> set[fx.Node]:
    """The nodes that `step` leads to, the starts included, by nodes for which `where` holds; by default all inputs."""
    found: set[fx.Node] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in found and where(node):
            found.add(node)
            stack.extend(step(node))
    return found


def segments(graph: fx.Graph, *, between_draws: bool = False) -> dict[fx.Node, int]:
    """Number the stretches of the graph between in-place operations; each such operation opens a new one.

    So does what orders streams. Inside one stretch the graph is pure, so its nodes may be reordered freely along their
    data dependencies, and in the order of `draws`. With `between_draws` these open new ones too.
    """
    numbers: dict[fx.Node, int] = {}
    barriers = draws(graph) if between_draws else {}
    current = 0
    for node in graph.nodes:
        barrier = mutates(node) or orders_streams(node) or node in barriers
        current += barrier
        numbers[node] = current
        current += barrier
    return numbers


def draws(graph: fx.Graph) -> dict[fx.Node, Sequence[fx.Node]]:
    """The ops that draw random numbers, if there are several, each with its inputs and the draw before it.

    They take the numbers of one stream, so that their order counts.
    """
    found = [node for node in graph.nodes if is_random(node)]
    ordered: dict[fx.Node, Sequence[fx.Node]] = {node: [*node.all_input_nodes, last] for last, node in pairwise(found)}
    return {found[0]: found[0].all_input_nodes, **ordered} if ordered else {}


def steps_of(
    graph: fx.Graph,
    owners: Mapping[fx.Node, fx.Node],
    inputs: Mapping[fx.Node, Sequence[fx.Node]],
    rank: Callable[[fx.Node], Any],
) -> list[list[fx.Node]]:
    """The graph's nodes in an order in which those of one owner are one step, the owner first.

    Nodes that are not among `owners` are steps of their own. `inputs` has what a node is computed from, where that is
    not `all_input_nodes`. `rank` orders steps, by owner, that do not wait for one another. Steps that lie on a cycle,
    or after one, are missing.
    """
    members: dict[fx.Node, list[fx.Node]] = {}
    waiting: dict[fx.Node, set[fx.Node]] = {}
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        own = owners.get(node, node)
        members.setdefault(own, [own]).extend([node] if node is not own else [])
        sources = {owners.get(source, source) for source in inputs.get(node, node.all_input_nodes)}
        waiting.setdefault(own, set()).update(sources - {own})
    for own, sources in waiting.items():
        for source in sources:
            users.setdefault(source, []).append(own)
    place = {own: index for index, own in enumerate(waiting)}
    ready = [(rank(own), place[own], own) for own, sources in waiting.items() if not sources]
    heapq.heapify(ready)
    steps = []
    while ready:
        own = heapq.heappop(ready)[-1]
        steps.append(members[own])
        for user in users.get(own, ()):
            waiting[user].discard(own)
            if not waiting[user]:
                heapq.heappush(ready, (rank(user), place[user], user))
    return steps
