"""The accord of a graph in a group: all that communicates there by an op of asynctp's has it. One wire for a hoist."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dumps import dump_paths, load
from graph_builder import GraphBuilder, aten
from quantized_graphs import FP8, cast
from torch.fx import Graph, Node

from asynctp_passes import Config, ops
from asynctp_passes.ir.nodes import arguments, op_name
from asynctp_passes.ir.order import communications
from asynctp_passes.planning.plan import Plan, planned
from asynctp_passes.rewriting.rewrite import rewrite

ACCORD = (1 << 31) - 1


def made(graph: Graph, accord: int, groups: str = "auto", on_wire: bool = True) -> list[Node]:
    """What communicates in a graph once it is rewritten, as for GPUs, where all groups have an accord."""
    with mock.patch.object(ops, "on_wire", return_value=on_wire):
        plan = planned(graph, Config(groups=groups))
        with mock.patch.object(Plan, "accord", return_value=accord):
            rewrite(graph, plan)
    graph.lint()
    return communications(graph.nodes)


def said(nodes: list[Node], without: str = "") -> list[tuple[str, str, Mapping[str, str]]]:
    return [
        (op_name(node), str(node.args), {name: str(value) for name, value in node.kwargs.items() if name != without})
        for node in nodes
    ]


def accords(nodes: list[Node]) -> set[Any]:
    """Of asynctp's ops."""
    return {arguments(node)["accord"] for node in nodes if op_name(node).startswith("asynctp.")}


@pytest.mark.parametrize("path", [path for path in dump_paths() if "torch2.13" in str(path)][::4], ids=lambda p: p.stem)
def test_every_op_of_a_graph_has_its_accord_and_nothing_else_changes(path: Path) -> None:
    plain, agreed = (made(load(path).graph, accord) for accord in (0, ACCORD))
    assert said(plain) == said(agreed, without="accord")
    assert accords(plain) <= {0}
    assert accords(agreed) <= {ACCORD}
    assert not any("accord" in node.kwargs for node in plain)


def quantized_by_one_number(b: GraphBuilder) -> Graph:
    """A hoist with a maximum over the ranks."""
    w, w_scale = b.input("w", [32, 16], FP8, column_major=True), b.input("w_scale", [])
    whole = b.gather(b.input("x", [4, 32], torch.bfloat16))
    most = b.call(cast, b.call(aten.max.default, b.call(aten.abs.default, whole)), torch.float64)
    scale = b.call(cast, b.call(aten.reciprocal.default, most), torch.float32)
    rows = b.call(cast, b.call(aten.mul.Tensor, whole, scale), FP8)
    return b.returns(b.scaled_mm(rows, w, b.call(aten.reciprocal.default, scale), w_scale))


@pytest.mark.parametrize("accord", [0, ACCORD])
def test_a_maximum_over_ranks_goes_by_the_wire_of_its_gather(accord: int) -> None:
    b = GraphBuilder(ranks=2)
    nodes = made(quantized_by_one_number(b), accord)
    assert [op_name(node) for node in nodes] == [
        "asynctp.all_gather.default",
        "asynctp.all_gather_matmul.default",
    ]
    assert accords(nodes) == {accord}
    found = arguments(nodes[0])
    assert (found["copy"], found["all_keep"], found["group_size"]) == (False, True, 2)
    (wait,) = nodes[0].users
    assert op_name(wait) == "asynctp.wait.default"
    assert tuple(wait.meta["val"].shape) == (2,)


def test_by_torchs_collective_where_the_groups_are_torchs() -> None:
    b = GraphBuilder(ranks=2)
    nodes = made(quantized_by_one_number(b), ACCORD, on_wire=False)
    gather, op = nodes
    assert op_name(gather) == "_c10d_functional.all_gather_into_tensor.default"
    assert accords([op]) == {ACCORD}
