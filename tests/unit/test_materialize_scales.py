"""fp8's scales are stored where elements of a large tensor meet them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder
from passes import run_pass
from scale_programs import cast, quantize, scale_of
from torch import fx
from torch._inductor.inductor_prims import force_stride_order
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from asynctp_passes.rewriting import rewrite
from asynctp_passes.rewriting.store_scales import scales_to_store, store


def traced(program: Callable[..., object], *shapes: tuple[int, ...], symbolic: bool = False) -> fx.GraphModule:
    mode = "symbolic" if symbolic else "fake"
    with FakeTensorMode() if not symbolic else torch.no_grad():
        inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    return make_fx(program, tracing_mode=mode)(*inputs)


def stored(module: fx.GraphModule) -> list[str]:
    """What is stored, after checking that all readers read what is stored."""
    store(module.graph, scales_to_store(module.graph))
    module.graph.lint()
    found = []
    for node in module.graph.nodes:
        if node.target is force_stride_order:
            (source,) = node.all_input_nodes
            assert set(source.users) == {node}
            assert node.meta["val"] is source.meta["val"]
            found.append(source.name)
    return found


def test_a_scale_is_read_instead_of_computed_again() -> None:
    module = traced(lambda x: quantize(x, 1), (2048, 4096))
    store(module.graph, scales_to_store(module.graph))
    lines = [f"{node.name} = {node.target.__name__}({', '.join(map(str, node.all_input_nodes))})"
             for node in module.graph.nodes if node.op == "call_function"]  # fmt: skip
    assert_expected_inline(
        "\n".join(lines),
        """\
abs_1 = abs.default(x_1)
amax = amax.default(abs_1)
convert_element_type = convert_element_type.default(amax)
clamp_min = clamp_min.default(convert_element_type)
reciprocal = reciprocal.default(clamp_min)
mul = mul.Tensor(reciprocal)
convert_element_type_1 = convert_element_type.default(mul)
log2 = log2.default(convert_element_type_1)
floor = floor.default(log2)
exp2 = exp2.default(floor)
inductor_force_stride_order_default = inductor_force_stride_order.default(exp2)
convert_element_type_2 = convert_element_type.default(x_1)
mul_1 = mul.Tensor(convert_element_type_2, inductor_force_stride_order_default)
clamp = clamp.default(mul_1)
convert_element_type_3 = convert_element_type.default(clamp)
reciprocal_1 = reciprocal.default(inductor_force_stride_order_default)""",
    )


@pytest.mark.parametrize(
    ("program", "shapes", "expected"),
    [
        pytest.param(lambda x: quantize(x, 0), [(2048, 4096)], ["exp2"], id="columns"),
        pytest.param(lambda x: quantize(x.t(), 0), [(2048, 4096)], ["exp2"], id="through views"),
        pytest.param(lambda x: x * scale_of(x, 1).view(-1).unsqueeze(1), [(2048, 4096)], ["exp2"], id="viewed"),
        pytest.param(
            lambda x, y: x * (scale_of(y, 1).reciprocal() * 2), [(2048, 4096), (2048, 64)], ["mul_1"], id="last"
        ),
        pytest.param(
            lambda x, y: x * (scale_of(y, 1) * scale_of(y.t(), 1).t()), [(2048, 4096), (2048, 4096)],
            ["exp2", "exp2_1"], id="two that meet each other",
        ),
        pytest.param(lambda x: quantize(x, 1), [(64, 128)], [], id="too small"),
        pytest.param(lambda x: quantize(x, 1), [(1 << 16, 32)], [], id="for too few elements"),
        pytest.param(lambda x: x * torch.rsqrt(cast(x, torch.float32).amax(1, True)), [(2048, 4096)], [], id="no fp64"),
        pytest.param(
            lambda x: x * cast(scale_of(x, 1), torch.bfloat16), [(2048, 4096)], ["exp2"], id="bf16 in a kernel is fp32"
        ),
        pytest.param(lambda x: scale_of(x, 1), [(2048, 4096)], [], id="met by nothing"),
    ],
)  # fmt: skip
def test_what_is_stored(program: Callable[..., object], shapes: list[tuple[int, ...]], expected: list[str]) -> None:
    assert stored(traced(program, *shapes)) == expected


def test_unknown_sizes_are_left_alone() -> None:
    assert stored(traced(lambda x: quantize(x, 1), (2048, 4096), symbolic=True)) == []


def test_the_step_can_be_left_out() -> None:
    def asked(**options: Any) -> int:
        b = GraphBuilder()
        graph = b.returns(b.mm(b.gather(b.input("x", [4, 8])), b.input("w", [8, 12])))
        with mock.patch.object(rewrite, "scales_to_store", return_value=[]) as asked:
            assert len(run_pass(graph, **options).fused) == 1
        return asked.call_count

    assert (asked(), asked(skip="store_scales"), asked(skip=["hoist", "overlap", "bucket"])) == (1, 0, 1)
