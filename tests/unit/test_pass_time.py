"""The passes take time in proportion to the graph: a model of many layers that is compiled whole is one graph."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import pytest
import torch
from graph_builder import GraphBuilder, aten
from passes import run_pass
from torch.fx import Graph

import asynctp_passes
from asynctp_passes import Config
from asynctp_passes.remat.joint import run_joint

PACKAGE = str(Path(asynctp_passes.__file__).parent)
FP8 = torch.float8_e4m3fn
WIDTH = 4096  # wide enough for one product to hide one gather


# --- programs ------------------------------------------------------------------------------------------------
def forward(layers: int) -> Graph:
    """gather → mm → mm → scatter, one layer behind the other."""
    b = GraphBuilder(ranks=2)
    x = b.input("primals_x", [4, WIDTH])
    for w in [b.input(f"primals_{layer}", [WIDTH, WIDTH]) for layer in range(layers)]:
        x = b.call(aten.add.Tensor, x, b.scatter(b.mm(b.relu(b.mm(b.gather(b.relu(x)), w)), w)))
    return b.returns(x)


def backward(layers: int) -> Graph:
    """The gradients of such layers; those of weights take what is gathered again."""
    b = GraphBuilder(ranks=2)
    saved = [(b.input(f"x{layer}", [4, WIDTH]), b.input(f"h{layer}", [8, WIDTH])) for layer in range(layers)]
    dy, w, gradients = b.input("tangents_1", [4, WIDTH]), b.input("primals_w", [WIDTH, WIDTH]), []
    for x, h in saved:
        whole = b.gather(dy)
        dh = b.mul(b.mm(whole, w), h)
        gradients += [b.mm(b.permute(h, [1, 0]), whole), b.mm(b.permute(dh, [1, 0]), b.gather(b.relu(x)))]
        dy = b.call(aten.add.Tensor, dy, b.scatter(b.mm(dh, w)))
    return b.returns(dy, *gradients)


def reduced(layers: int) -> Graph:
    """The gradients of layers that share an input, and reduce their own part of its gradient."""
    b = GraphBuilder(ranks=2)
    dy, w = b.input("tangents_1", [4, WIDTH]), b.input("primals_w", [WIDTH, WIDTH])
    for h in [b.input(f"h{layer}", [4, WIDTH]) for layer in range(layers)]:
        parts = [b.all_reduce(b.mm(b.mul(dy, h), w)) for _ in range(2)]
        dy = b.relu(b.add(*parts))
    return b.returns(dy)


def joint(layers: int) -> Graph:
    """A forward and its backward before they are parted."""
    b = GraphBuilder(ranks=2)
    x, dy = b.input("primals_x", [4, WIDTH]), b.input("tangents_1", [4, WIDTH])
    weights, saved, gradients = [b.input(f"primals_{layer}", [WIDTH, WIDTH]) for layer in range(layers)], [], []
    for w in weights:
        saved.append(b.gather(b.relu(x)))
        x = b.call(aten.add.Tensor, x, b.scatter(b.mm(b.relu(b.mm(saved[-1], w)), w)))
    for w, whole in zip(weights[::-1], saved[::-1], strict=True):
        full = b.gather(dy)
        gradients.append(b.mm(b.permute(whole, [1, 0]), full))
        dy = b.call(aten.add.Tensor, dy, b.scatter(b.mm(b.relu(b.mm(full, w)), w)))
    return b.returns(x, dy, *gradients)


def by_one_scale(layers: int) -> Graph:
    """Layers that quantize what they gather by its largest element; the largest of all so far is made too."""
    b = GraphBuilder(ranks=2)
    w, one, products = b.input("w", [WIDTH, WIDTH], FP8, column_major=True), b.input("b_scale", []), []
    of_all = one
    for whole in [b.gather(b.input(f"x{layer}", [4, WIDTH])) for layer in range(layers)]:
        largest = b.call(aten.max.default, whole)
        of_all = b.call(aten.maximum.default, of_all, largest)
        quantized = b.call(torch.ops.prims.convert_element_type.default, b.call(aten.div.Tensor, whole, largest), FP8)
        products.append(b.scaled_mm(quantized, w, largest, one))
    return b.returns(*products, of_all)


# --- how much is done ----------------------------------------------------------------------------------------
def fused(graph: Graph) -> None:
    run_pass(graph)


def marked(graph: Graph) -> None:
    run_joint(graph, Config(rematerialize="always"))


def calls_of(run: Callable[[Graph], None], graph: Graph) -> int:
    """Calls of the package's functions, each step of a generator included."""
    profile = cProfile.Profile()
    profile.runcall(run, graph)
    own = (one for one in profile.getstats() if isinstance(one.code, CodeType))
    return sum(one.callcount for one in own if one.code.co_filename.startswith(PACKAGE))


@pytest.mark.parametrize(
    ("build", "run"),
    [(forward, fused), (backward, fused), (reduced, fused), (joint, marked), (by_one_scale, fused)],
)
def test_twice_the_layers_take_about_twice_the_calls(
    build: Callable[[int], Graph], run: Callable[[Graph], None]
) -> None:
    run(build(2))  # what is found once and kept
    once, twice = (calls_of(run, build(layers)) for layers in (20, 40))
    assert twice < 2.02 * once
