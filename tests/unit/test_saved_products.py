"""Products that activation checkpointing saves before their sum over ranks: the sum is saved in their place."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from graph_builder import GraphBuilder, c10d
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from asynctp_passes import Config
from asynctp_passes.remat.joint import run_joint
from asynctp_passes.torch_private import partitioner, process_groups

SAVE = CheckpointPolicy.MUST_SAVE
AGAIN = CheckpointPolicy.PREFER_RECOMPUTE


def joint(build: Callable[[GraphBuilder, Node], Node], tags: dict[str, CheckpointPolicy]) -> dict[str, object]:
    """The tags of a joint graph after the pass, by node: `build` makes the forward of the product `mm`."""
    b = GraphBuilder(ranks=2)
    product = b.mm(b.input("primals_x", [8, 4], torch.bfloat16), b.input("primals_w", [4, 8], torch.bfloat16))
    result = build(b, product)
    gradient = b.mul(b.input("tangents_1", [8, 8], torch.bfloat16), b.input("primals_2", [8, 8], torch.bfloat16))
    graph: Graph = b.returns(result, b.all_reduce(gradient))
    for node in graph.nodes:
        if node.name in tags:
            node.meta["recompute"] = tags[node.name]
    run_joint(graph, Config())
    return {node.name: tag for node in graph.nodes if (tag := partitioner.recompute_tag(node)) is not None}


def all_reduced(b: GraphBuilder, product: Node) -> Node:
    return b.relu(b.all_reduce(product))


def scattered(b: GraphBuilder, product: Node) -> Node:
    return b.relu(b.scatter(b.reshape(product, [4, 16])))


def used_elsewhere(b: GraphBuilder, product: Node) -> Node:
    return b.add(b.all_reduce(product), b.relu(product))


def largest(b: GraphBuilder, product: Node) -> Node:
    return b.all_reduce(product, "max")


def returned(b: GraphBuilder, product: Node) -> Node:
    """The program may write to the sum before the backward."""
    return b.reshape(b.all_reduce(product), [64])


def awaited_by_the_program(b: GraphBuilder, product: Node) -> Node:
    """A wait gives the memory that it takes, though its schema does not say so."""
    return b.call(c10d.wait_tensor.default, b.all_reduce(product))


@pytest.mark.parametrize("build", [all_reduced, scattered])
def test_the_sum_is_saved_in_place_of_the_product(build: Callable[[GraphBuilder, Node], Node]) -> None:
    assert joint(build, {"mm": SAVE}) == {"mm": AGAIN, "wait_tensor": SAVE}


def own_rows(b: GraphBuilder, product: Node) -> Node:
    return b.relu(b.call(torch.ops.aten.slice.Tensor, b.all_reduce(product), 0, 4, 8))


def test_of_a_sum_of_which_the_rank_uses_its_own_part_alone_that_is_saved() -> None:
    """Else the whole had another user, and could not be reduce-scattered."""
    with (
        mock.patch.object(process_groups, "size_of_group", return_value=2),
        mock.patch.object(process_groups, "rank_in_group", return_value=1),
    ):
        assert joint(own_rows, {"mm": SAVE}) == {"mm": AGAIN, "slice_1": SAVE}


def test_a_tag_to_compute_the_sum_again_goes() -> None:
    tags = {"mm": SAVE, "all_reduce": AGAIN, "wait_tensor": AGAIN}
    assert joint(all_reduced, tags) == {"mm": AGAIN, "all_reduce": AGAIN, "wait_tensor": SAVE}


@pytest.mark.parametrize("place", ["all_reduce", "wait_tensor"])
def test_a_sum_that_is_saved_stays_so(place: str) -> None:
    tags = {"mm": SAVE, place: SAVE}
    assert joint(all_reduced, tags) == tags


@pytest.mark.parametrize("build", [used_elsewhere, largest, returned, awaited_by_the_program])
def test_other_products_stay_saved(build: Callable[[GraphBuilder, Node], Node]) -> None:
    assert joint(build, {"mm": SAVE}) == {"mm": SAVE}


@pytest.mark.parametrize("policy", [policy for policy in CheckpointPolicy if policy is not SAVE])
def test_other_tags_stay(policy: CheckpointPolicy) -> None:
    assert joint(all_reduced, {"mm": policy}) == {"mm": policy}


def test_a_sum_of_the_backward_stays() -> None:
    b = GraphBuilder(ranks=2)
    dy, w = b.input("tangents_1", [8, 4], torch.bfloat16), b.input("primals_w", [4, 8], torch.bfloat16)
    product = b.mm(dy, w)
    graph = b.returns(b.relu(w), b.all_reduce(product))
    product.meta["recompute"] = SAVE
    run_joint(graph, Config())
    assert [node.name for node in graph.nodes if partitioner.recompute_tag(node) is not None] == ["mm"]
    assert any(node.target is c10d.all_reduce.default for node in graph.nodes)
