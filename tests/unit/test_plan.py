"""Plans: which outcome each collective of a graph has."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from graph_builder import GraphBuilder, aten
from torch.fx import Node

from asynctp_passes import Config
from asynctp_passes.ir.order import REMATERIALIZED
from asynctp_passes.planning import plan
from asynctp_passes.planning.plan import planned, questions_of

Build = Callable[[GraphBuilder], tuple[Node, ...]]


def fused(b: GraphBuilder) -> tuple[Node, ...]:
    return (b.scatter(b.mm(b.input("dy", [8, 6]), b.input("w", [6, 8]))),)


def missed(b: GraphBuilder) -> tuple[Node, ...]:
    return (b.scatter(b.relu(b.mm(b.input("dy", [8, 6]), b.input("w", [6, 8])))),)


def returned(b: GraphBuilder) -> tuple[Node, ...]:
    return (b.gather(b.input("x", [4, 8])),)


def overlapped(b: GraphBuilder) -> tuple[Node, ...]:
    """A weight's gradient needs all of the gather; the reduce-scatter's matmul does not."""
    return b.mm(b.permute(b.input("dx", [8, 6]), [1, 0]), b.gather(b.input("x", [4, 8]))), *fused(b)


def bucketed(b: GraphBuilder) -> tuple[Node, ...]:
    return tuple(b.all_reduce(b.call(aten.amax.default, b.input(name, [4])), "max") for name in "xy")


def erased(b: GraphBuilder) -> tuple[Node, ...]:
    b.all_reduce(b.call(aten.amax.default, b.input("primals_1", [4])), "max")
    return (b.relu(b.input("tangents_1", [4])),)


def rematerialized(b: GraphBuilder) -> tuple[Node, ...]:
    gathered = b.gather(b.input("primals_1", [4, 8]))
    gathered.all_input_nodes[0].meta[REMATERIALIZED] = 0
    return gathered, b.relu(b.input("tangents_1", [4]))


def rematerialized_and_overlapped(b: GraphBuilder) -> tuple[Node, ...]:
    found = overlapped(b)
    found[0].all_input_nodes[1].all_input_nodes[0].meta[REMATERIALIZED] = 0
    return *found, b.relu(b.input("tangents_1", [4]))


def tagged_in_the_forward(b: GraphBuilder) -> tuple[Node, ...]:
    """The forward has the tag too, and keeps its gather."""
    gathered = b.gather(b.input("primals_1", [4, 8]))
    gathered.all_input_nodes[0].meta[REMATERIALIZED] = 0
    return (gathered,)


CASES: list[tuple[Build, list[str], list[str]]] = [
    # program, outcomes where collectives are torch's, and where they go by asynctp's transport
    (fused, ["FUSED"], ["FUSED"]),
    (missed, ["MISSED"], ["MISSED"]),
    (returned, ["SKIPPED"], ["ACCELERATED"]),
    (overlapped, ["OVERLAPPED", "FUSED"], ["OVERLAPPED", "FUSED"]),
    (bucketed, ["BUCKETED", "BUCKETED"], ["BUCKETED", "BUCKETED"]),
    (erased, ["ERASED"], ["ERASED"]),
    (rematerialized, ["REMATERIALIZED"], ["REMATERIALIZED"]),
    (rematerialized_and_overlapped, ["OVERLAPPED", "FUSED"], ["OVERLAPPED", "FUSED"]),
    (tagged_in_the_forward, ["SKIPPED"], ["ACCELERATED"]),
]


def outcomes(build: Build, *, on_wire: bool) -> tuple[list[str], set[Node]]:
    """The outcome of each collective of a program, and the ones that go by an op of asynctp's own."""
    b = GraphBuilder(ranks=2)
    graph = b.returns(*build(b))
    with mock.patch.object(plan, "on_wire", return_value=on_wire):
        found = planned(graph, Config(groups="tp"))
        return [found.outcome(one) for one in found.decisions], found.accelerated


@pytest.mark.parametrize(("build", "of_torch", "on_wire"), CASES, ids=[build.__name__ for build, *_ in CASES])
def test_outcomes(build: Build, of_torch: list[str], on_wire: list[str]) -> None:
    assert outcomes(build, on_wire=False)[0] == of_torch
    assert outcomes(build, on_wire=True)[0] == on_wire


def test_a_miss_stays_one_whatever_is_done() -> None:
    """Strict counts it, though its collective goes by asynctp's transport."""
    found, accelerated = outcomes(missed, on_wire=True)
    assert (found, len(accelerated)) == (["MISSED"], 1)


def test_a_gather_that_is_kept_is_a_question_of_its_own() -> None:
    """A rank that also uses the gathered tensor ends no deviation of the others."""
    b = GraphBuilder(ranks=2)
    graph = b.returns(*returned(b))
    with mock.patch.object(plan, "on_wire", return_value=True):
        found = planned(graph, Config(groups="tp"))
        assert [(one.deviations, one.keeps) for one in questions_of(found)] == [((), ("keep: all_gather 0",))]
