"""Scales that are stored in compiled code: the same bits."""

from __future__ import annotations

import pytest
import torch
from scale_programs import quantize
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

from asynctp_passes.rewriting import store_scales
from asynctp_passes.rewriting.store_scales import scales_to_store, store


class Stores(CustomGraphPass):
    """Stores scales in the graph that Inductor compiles; `count` of them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: fx.Graph) -> None:
        nodes = scales_to_store(graph)
        self.count += len(nodes)
        store(graph, nodes)

    def uuid(self) -> None:
        return None


def test_compiled_values_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_scales, "LEAST_ELEMENTS", 0)
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        return quantize(x, 0)[0].to(torch.float32), quantize(x, 1)[0].to(torch.float32)

    expected = torch.compile(program)(x)
    torch._dynamo.reset()
    stores = Stores()
    compiled = torch.compile(program, options={"post_grad_custom_post_pass": stores})
    actual, (code,) = run_and_get_code(compiled, x)
    assert stores.count == 2
    assert code.count("empty_strided_cpu") >= 4, "both results, and both scales"
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
