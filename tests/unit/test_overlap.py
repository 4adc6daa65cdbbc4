"""Gathers for weight gradients: beside which products they run, what is left alone, and whose gathers are FSDP's."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import serving_ops
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, c10d, show
from lockstep import differences, evaluate
from passes import copied, run_pass
from ranks import imagined_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import Graph, Node

import asynctp_passes
from asynctp_passes import Report
from asynctp_passes.ir.operations import Collective
from asynctp_passes.matching.chains import Candidate
from asynctp_passes.planning import overlap, plan
from asynctp_passes.planning.legality import is_named_for_data
from asynctp_passes.torch_private import inductor_order, process_groups

Build = Callable[[GraphBuilder], tuple[Node, ...]]


# --- pieces of graphs ----------------------------------------------------------------------------------------
def gradient(b: GraphBuilder, name: str = "x", width: int = 8) -> Node:
    """`dYᵀ @ all_gather(x)`: the weight's gradient of a layer that saved its shard."""
    full = b.gather(b.input(name, [4, width]))
    return b.mm(b.permute(b.input(f"d{name}", [8, 6]), [1, 0]), full)


def gradient_of_gathered(b: GraphBuilder) -> Node:
    """`all_gather(dY)ᵀ @ X`: nothing but the weight's gradient needs the gathered gradient."""
    full = b.gather(b.input("dy", [4, 6]))
    return b.mm(b.permute(full, [1, 0]), b.input("saved", [8, 10]))


def product(b: GraphBuilder, name: str = "a", rows: int = 8) -> Node:
    return b.mm(b.input(name, [rows, 6]), b.input(f"{name}_w", [6, 8]))


def built(build: Build) -> Graph:
    b = GraphBuilder(ranks=2)
    return b.returns(*build(b))


def codes(report: Report) -> list[str]:
    """A word for each collective, in graph order."""
    return [remark.code or remark.outcome for remark in report.remarks]


def becomes(build: Build) -> str:
    graph = built(build)
    run_pass(graph)
    return show(graph)


# --- where gathers and waits go ------------------------------------------------------------------------------
def test_the_wait_goes_behind_what_follows() -> None:
    """The gradient comes first in the graph: the gather starts where it did, and the fused op runs meanwhile."""
    assert_expected_inline(
        becomes(lambda b: (gradient(b), b.scatter(product(b)))),
        """\
x: f32[4, 8]
all_gather_into_tensor = asynctp::all_gather(shard=x, group_size=2, group_name='tp', copy=False)  # f32[8, 8]
dx: f32[8, 6]
permute = permute(dx, [1, 0])  # f32[6, 8]s[1, 6]
a: f32[8, 6]
a_w: f32[6, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[a_w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp')  # f32[4, 8]
wait_tensor = asynctp::wait(result=all_gather_into_tensor, source=x)  # f32[8, 8]
mm = mm(permute, wait_tensor)  # f32[6, 8]
return (mm, matmul_reduce_scatter_default)
""",
    )


def fused_then_gradient(b: GraphBuilder) -> tuple[Node, ...]:
    return b.scatter(product(b)), b.mm(b.input("dy", [6, 8]), b.gather(b.relu(b.input("x", [4, 8]))))


def fused_and_product_then_gradient(b: GraphBuilder) -> tuple[Node, ...]:
    x, dy = b.input("x", [4, 8]), b.input("dy", [6, 8])
    return b.scatter(product(b)), product(b, "c"), b.mm(dy, b.gather(b.relu(x)))


def test_the_gather_starts_before_the_product_that_precedes() -> None:
    """The gradient comes last: the gather, and what its shard is computed by, go before the product.

    They stay behind the fused op: what communicates keeps its order.
    """
    assert_expected_inline(
        becomes(fused_and_product_then_gradient),
        """\
x: f32[4, 8]
dy: f32[6, 8]
a: f32[8, 6]
a_w: f32[6, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[a_w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp')  # f32[4, 8]
c: f32[8, 6]
c_w: f32[6, 8]
relu = relu(x)  # f32[4, 8]
all_gather_into_tensor = asynctp::all_gather(shard=relu, group_size=2, group_name='tp', copy=False)  # f32[8, 8]
mm_1 = mm(c, c_w)  # f32[8, 8]
wait_tensor_1 = asynctp::wait(result=all_gather_into_tensor, source=relu)  # f32[8, 8]
mm_2 = mm(dy, wait_tensor_1)  # f32[6, 8]
return (matmul_reduce_scatter_default, mm_1, mm_2)
""",
    )


_ops = torch.library.Library("overlap_like", "FRAGMENT")
_ops.define("mix(Tensor x) -> Tensor")
torch.library.register_fake("overlap_like::mix", torch.empty_like, lib=_ops)


@pytest.mark.parametrize(
    ("op", "called"),
    [
        (torch.ops.overlap_like.mix.default, True),
        (aten._scaled_dot_product_flash_attention.default, True),
        (torch.ops.higher_order.flex_attention, True),
        (aten.relu.default, False),
        (aten.mm.default, False),
        (aten.view.default, False),
        (c10d.wait_tensor.default, False),
        (operator.getitem, False),
    ],
)
def test_what_inductor_calls_is_asked_of_it(op: Any, called: bool) -> None:
    assert inductor_order.is_called(op) is called


@pytest.mark.parametrize("called", [True, False])
def test_what_inductor_calls_waits_for_the_start_of_a_gather(called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name is; a kernel of Inductor's own is left to its scheduler."""
    told: dict[Node, list[Node]] = {}
    monkeypatch.setattr(inductor_order, "keep_order", lambda graph, after: told.update(after))
    b = GraphBuilder(ranks=2)
    first, x = b.scatter(product(b)), b.input("x", [4, 8])
    full = b.gather(b.relu(x))
    one = product(b, "c")
    between = b.call(torch.ops.overlap_like.mix.default, one) if called else b.relu(one)
    two = b.mm(between, b.input("e", [8, 8]))
    b.returns(first, two, b.mm(b.input("dy", [6, 8]), full))
    with serving_ops.registered():
        asynctp_passes.register_local("overlap_like::mix")
        run_pass(b.graph)
    assert (between in told) is called


def test_the_remark_names_the_products() -> None:
    report = run_pass(built(lambda b: (gradient(b), b.scatter(product(b)))))
    (remark,) = report.others
    assert (remark.code, remark.collective) == ("ATP404", "all_gather_into_tensor")
    assert "[beside mm_1: 1 product]" in remark.message


def test_a_group_of_data_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs beside products goes by asynctp's transport."""
    monkeypatch.setattr(process_groups, "mesh_dimension_of", lambda group: "fsdp")
    graph = built(lambda b: (gradient(b), product(b)))
    assert [remark.code for remark in run_pass(graph, groups="tp").others] == ["ATP404"]
    graph = built(lambda b: (gradient(b), product(b)))
    with mock.patch.object(plan, "on_wire", return_value=True):
        (remark,) = run_pass(graph, groups="auto").remarks
    assert (remark.code != "ATP404", remark.op) == (True, "")
    assert not [node for node in graph.nodes if "asynctp" in str(node.target)]


def test_no_more_products_than_it_takes() -> None:
    """A small gather is covered by one large product; the others stay where they are."""

    def build(b: GraphBuilder) -> tuple[Node, ...]:
        wide = b.input("wide", [4096, 4096])
        others = [b.mm(wide, b.input(f"w{index}", [4096, 4096])) for index in range(3)]
        return gradient(b), b.scatter(others[0]), *others[1:]

    (remark,) = run_pass(built(build)).others
    assert "1 product]" in remark.message

    def slow(b: GraphBuilder) -> tuple[Node, ...]:
        return gradient(b, width=1 << 16), *[b.scatter(product(b, name)) for name in ("p", "q", "r")]

    (remark,) = run_pass(built(slow)).others
    assert "[from before mm_1 to after mm_3: 3 products]" in remark.message


def test_one_gather_for_both_gradients() -> None:
    """Gathered once: fused with the input's gradient, and returned to the weight's, whichever operand it is there."""

    def shared(b: GraphBuilder) -> tuple[Node, ...]:
        full = b.gather(b.input("dy", [4, 6]))
        left = b.mm(b.permute(full, [1, 0]), b.input("saved", [8, 10]))
        right = b.mm(b.input("other", [10, 8]), full)
        of_another = b.mm(b.permute(b.input("dz", [8, 3]), [1, 0]), full)
        return b.mm(full, b.input("w", [6, 10])), left, right, of_another

    graph = built(shared)
    (remark,) = run_pass(graph).fused
    assert remark.message == (
        "the gathered tensor is returned too: the same gather serves the weight gradients mm, mm_2; "
        "GATHER_IS_RIGHT_OPERAND (mm_1)"
    )
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert [name for name in names if "gather" in name] == ["asynctp.all_gather_matmul.default"]
    assert same_results(shared)


def test_both_gradients_take_what_one_op_gathers() -> None:
    def shared(b: GraphBuilder) -> tuple[Node, ...]:
        full = b.gather(b.input("dy", [4, 6]))
        return b.mm(full, b.input("w", [6, 10])), b.mm(b.permute(full, [1, 0]), b.input("saved", [8, 10]))

    assert_expected_inline(
        becomes(shared),
        """\
dy: f32[4, 6]
w: f32[6, 10]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=dy, bs=[w], biases=[None], gather_dim=0,
    return_a_full=True, group_size=2, group_name='tp')  # (f32[8, 10], f32[8, 6])
getitem = getitem(all_gather_matmul_default, 0)  # f32[8, 10]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f32[8, 6]
reshape_default = reshape(getitem_1, [2, 4, 6])  # f32[2, 4, 6]
reshape_default_1 = reshape(reshape_default, [8, 6])  # f32[8, 6]
permute = permute(reshape_default_1, [1, 0])  # f32[6, 8]s[1, 6]
saved: f32[8, 10]
mm_1 = mm(permute, saved)  # f32[6, 10]
return (getitem, mm_1)
""",
    )


def test_alone_it_stays_as_it_is() -> None:
    """Without any other product there is nothing to run it beside, and a transposed shard is not what it sends."""
    graph = built(lambda b: (gradient_of_gathered(b),))
    before = [node.name for node in graph.nodes]
    assert codes(run_pass(graph)) == ["ATP211"]
    assert [node.name for node in graph.nodes] == before


# --- what computes the same ----------------------------------------------------------------------------------
def two_gradients_and_a_scatter(b: GraphBuilder) -> tuple[Node, ...]:
    return gradient(b), gradient(b, "y"), b.scatter(product(b)), gradient_of_gathered(b)


def gradient_between_two_layers(b: GraphBuilder) -> tuple[Node, ...]:
    scattered = b.scatter(product(b))
    weight = gradient(b)
    hidden = b.mm(b.gather(b.relu(scattered)), b.input("w", [8, 6]))
    return weight, b.scatter(b.mm(b.relu(hidden), b.input("v", [6, 4])))


def gradient_that_is_reduced_elsewhere(b: GraphBuilder) -> tuple[Node, ...]:
    """The gradient goes on to a reduction over other ranks, which comes before the fused op, and stays there."""
    reduced = b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, gradient(b), "sum", "dp"))
    return b.relu(reduced), b.scatter(product(b))


def gather_of_a_scattered_sum(b: GraphBuilder) -> tuple[Node, ...]:
    """The gather depends on one fused op and runs beside another."""
    scattered = b.scatter(b.add(product(b), product(b, "c")))
    return b.mm(b.input("dy", [6, 8]), b.gather(scattered)), b.scatter(product(b, "e"))


def gather_for_two_products(b: GraphBuilder) -> tuple[Node, ...]:
    full = b.gather(b.input("x", [4, 8]))
    products = [b.mm(b.permute(b.input(name, [8, 6]), [1, 0]), full) for name in ("dq", "dk")]
    return *products, b.scatter(product(b))


def gather_of_columns(b: GraphBuilder) -> tuple[Node, ...]:
    """An activation's: its product can begin with the columns that are there."""
    full = b.cat(b.chunks(b.gather(b.input("x", [4, 3]))), 1)
    return b.mm(full, b.input("w", [6, 5])), b.scatter(product(b))


# --- look-alikes: no product may be taken that cannot run meanwhile ------------------------------------------
def product_of_the_gradient(b: GraphBuilder) -> tuple[Node, ...]:
    return (b.scatter(b.mm(b.input("a", [8, 6]), gradient(b))),)


def gather_of_the_product(b: GraphBuilder) -> tuple[Node, ...]:
    scattered = b.scatter(product(b))
    return scattered, b.mm(b.input("dy", [6, 8]), b.gather(scattered))


def partner_depends_on_the_gradient(b: GraphBuilder) -> tuple[Node, ...]:
    """One term of the fused sum needs the gradient, so that the op does, though the other product does not."""
    weight = gradient(b)
    return (b.scatter(b.add(product(b), b.mm(b.input("a2", [8, 6]), weight))),)


def gather_depends_on_a_partner(b: GraphBuilder) -> tuple[Node, ...]:
    """The gather needs one of two fused products, so it has to wait for the op that makes both."""
    full = b.gather(b.input("s", [4, 6]))
    one, two = b.mm(full, b.input("w1", [6, 4])), b.mm(full, b.input("w2", [6, 8]))
    return two, b.mm(b.input("dy", [6, 16]), b.gather(b.relu(one)))


def product_behind_a_mutation(b: GraphBuilder) -> tuple[Node, ...]:
    weight = gradient(b)
    state = b.input("state", [8, 6])
    b.call(aten.add_.Tensor, state, 1.0)
    return weight, b.scatter(b.mm(state, b.input("w", [6, 8])))


def gather_waited_for_behind_a_mutation(b: GraphBuilder) -> tuple[Node, ...]:
    """The gather ends before its input is written to, so it runs beside no product in front of that."""
    x, fused = b.input("x", [4, 8]), b.scatter(product(b))
    started = b.call(c10d.all_gather_into_tensor.default, x, b.ranks, b.group)
    other = product(b, "c")
    b.call(aten.add_.Tensor, x, 1.0)
    return fused, other, b.mm(b.input("dy", [6, 8]), b.call(c10d.wait_tensor.default, started))


def gather_returned_before_the_wait(b: GraphBuilder) -> tuple[Node, ...]:
    started = b.call(c10d.all_gather_into_tensor.default, b.input("x", [4, 8]), b.ranks, b.group)
    weight = b.mm(b.input("dy", [6, 8]), b.call(c10d.wait_tensor.default, started))
    return weight, started, b.scatter(product(b))


def product_that_nothing_uses(b: GraphBuilder) -> tuple[Node, ...]:
    """Nor is anything computed from what is computed from it: it does not run, so it covers no time."""
    weight, chained = gradient(b), b.relu(product(b))
    b.scatter(product(b, "c"))
    b.relu(chained)
    return (weight,)


GRAPHS: dict[Build, list[str]] = {
    fused_then_gradient: ["FUSED", "ATP109"],
    fused_and_product_then_gradient: ["FUSED", "ATP404"],
    two_gradients_and_a_scatter: ["ATP404", "ATP404", "FUSED", "ATP211"],
    gradient_between_two_layers: ["FUSED", "ATP404", "FUSED", "FUSED"],
    gradient_that_is_reduced_elsewhere: ["ATP109", "ATP009", "FUSED"],
    gather_of_a_scattered_sum: ["FUSED", "ATP404", "FUSED"],
    gather_for_two_products: ["ATP404", "FUSED"],
    gather_of_columns: ["FUSED", "FUSED"],
    product_of_the_gradient: ["ATP109", "FUSED"],
    gather_of_the_product: ["FUSED", "ATP109"],
    partner_depends_on_the_gradient: ["ATP109", "FUSED"],
    gather_depends_on_a_partner: ["FUSED", "ATP109"],
    product_behind_a_mutation: ["ATP109", "FUSED"],
    gather_waited_for_behind_a_mutation: ["FUSED", "ATP109"],
    gather_returned_before_the_wait: ["ATP109", "FUSED"],
    product_that_nothing_uses: ["ATP109", "FUSED"],
}


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_outcome_and_results(build: Build) -> None:
    assert codes(run_pass(built(build))) == GRAPHS[build]
    assert same_results(build)


def same_results(build: Build) -> bool:
    """The graph computes on two ranks what it did before the pass."""
    graph = built(build)
    rewritten = copied(graph)
    run_pass(rewritten)
    outs = [evaluate(each, [values(each, rank) for rank in range(2)]) for each in (graph, rewritten)]
    return differences(*outs) == []


def values(graph: Graph, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return [torch.randn(*value.shape, generator=generator, dtype=value.dtype) for value in inputs]


# --- reduce-scatters that no matmul takes in -----------------------------------------------------------------
def chain(b: GraphBuilder) -> Node:
    """What makes the group one of tensor parallelism."""
    return b.scatter(product(b, "chain"))


def scattered_norms(b: GraphBuilder, group: str = "tp") -> Node:
    """A reduce-scatter of something that no matmul made: the backward of what follows a gather without a matmul."""
    started = b.call(c10d.reduce_scatter_tensor.default, b.relu(b.input("g", [8, 6])), "sum", b.ranks, group)
    return b.call(c10d.wait_tensor.default, started)


def large_product(b: GraphBuilder, name: str = "p") -> Node:
    return b.mm(b.input(name, [64, 64]), b.input(f"{name}_w", [64, 64]))


def scatter_then_products(b: GraphBuilder) -> tuple[Node, ...]:
    scattered = b.relu(scattered_norms(b))
    return chain(b), scattered, large_product(b)


def products_then_scatter(b: GraphBuilder) -> tuple[Node, ...]:
    whole, fused = b.input("g", [8, 6]), chain(b)
    return fused, large_product(b), b.scatter(b.relu(whole))


def products_then_communication_then_scatter(b: GraphBuilder) -> tuple[Node, ...]:
    """The scatter could only run beside the product if it passed the fused op."""
    whole, free = b.input("g", [8, 6]), large_product(b)
    return chain(b), free, b.scatter(b.relu(whole))


def scatter_of_a_taken_product(b: GraphBuilder) -> tuple[Node, ...]:
    """The gather's fused op has the only matmul, so its result is scattered beside another product."""
    full = b.mm(b.gather(b.input("x", [4, 6])), b.input("w", [6, 4]))
    return b.scatter(full), large_product(b)


def gather_and_scatter_beside_one_product(b: GraphBuilder) -> tuple[Node, ...]:
    return gradient(b), scattered_norms(b), chain(b), large_product(b)


def scatter_into_a_scatter(b: GraphBuilder) -> tuple[Node, ...]:
    """The second waits for the first: the product cannot run beside both."""
    second = b.scatter(b.relu(b.reshape(scattered_norms(b), [8, 3])))
    return chain(b), second, large_product(b)


def product_of_the_scattered(b: GraphBuilder) -> tuple[Node, ...]:
    return chain(b), b.mm(scattered_norms(b), b.input("v", [6, 6]))


def scatter_of_the_product(b: GraphBuilder) -> tuple[Node, ...]:
    """The product has another user, so the scatter is not fused with it; and it cannot run beside it."""
    free = large_product(b)
    return chain(b), b.scatter(b.call(aten.cumsum.default, free, 0))


def nothing_but_a_fused_op(b: GraphBuilder) -> tuple[Node, ...]:
    return b.scatter(large_product(b)), scattered_norms(b)


def product_behind_a_mutation_only(b: GraphBuilder) -> tuple[Node, ...]:
    scattered, fused, state = scattered_norms(b), chain(b), b.input("state", [64, 64])
    b.call(aten.add_.Tensor, state, 1.0)
    return scattered, fused, b.mm(state, b.input("v", [64, 64]))


def scatter_returned_before_the_wait(b: GraphBuilder) -> tuple[Node, ...]:
    started = b.call(c10d.reduce_scatter_tensor.default, b.input("g", [8, 6]), "sum", b.ranks, b.group)
    return started, b.call(c10d.wait_tensor.default, started), chain(b), large_product(b)


def scatter_of_a_group_without_chains(b: GraphBuilder) -> tuple[Node, ...]:
    return scattered_norms(b, "dp"), chain(b), large_product(b)


def scatter_of_maxima(b: GraphBuilder) -> tuple[Node, ...]:
    return b.scatter(b.input("g", [8, 6]), "max"), chain(b), large_product(b)


def scatter_of_means(b: GraphBuilder) -> tuple[Node, ...]:
    return b.scatter(b.input("g", [8, 6]), "avg"), chain(b), large_product(b)


def scatter_that_is_missed(b: GraphBuilder) -> tuple[Node, ...]:
    """What could be fused if it were written otherwise is told so."""
    return b.scatter(b.cat(b.chunks(product(b))[::-1])), chain(b), large_product(b)


def product_that_nothing_uses_beside_a_scatter(b: GraphBuilder) -> tuple[Node, ...]:
    b.relu(large_product(b))
    return chain(b), scattered_norms(b)


SCATTERS: dict[Build, list[str]] = {
    scatter_then_products: ["ATP405", "FUSED"],
    products_then_scatter: ["FUSED", "ATP405"],
    products_then_communication_then_scatter: ["FUSED", "ATP002"],
    scatter_of_a_taken_product: ["FUSED", "ATP405"],
    gather_and_scatter_beside_one_product: ["ATP404", "ATP405", "FUSED"],
    scatter_into_a_scatter: ["ATP002", "ATP405", "FUSED"],
    product_of_the_scattered: ["FUSED", "ATP002"],
    scatter_of_the_product: ["FUSED", "ATP121"],
    nothing_but_a_fused_op: ["FUSED", "ATP002"],
    product_behind_a_mutation_only: ["ATP002", "FUSED"],
    scatter_returned_before_the_wait: ["ATP013", "FUSED"],
    scatter_of_a_group_without_chains: ["ATP002", "FUSED"],
    scatter_of_maxima: ["ATP013", "FUSED"],
    scatter_of_means: ["ATP405", "FUSED"],
    scatter_that_is_missed: ["ATP101", "FUSED"],
    product_that_nothing_uses_beside_a_scatter: ["FUSED", "ATP002"],
}


@pytest.mark.parametrize("build", SCATTERS, ids=lambda build: build.__name__)
def test_scatters(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "LEAST_BYTES", 0)
    assert sorted(codes(run_pass(built(build)))) == sorted(SCATTERS[build])
    assert same_results(build)


def test_a_scatter_starts_before_the_products_and_is_waited_for_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "LEAST_BYTES", 0)
    assert_expected_inline(
        becomes(scatter_then_products),
        """\
g: f32[8, 6]
relu = relu(g)  # f32[8, 6]
reduce_scatter_tensor = asynctp::reduce_scatter(whole=relu, reduce_op='sum', group_size=2, group_name='tp',
    copy=False)  # f32[4, 6]
chain: f32[8, 6]
chain_w: f32[6, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[chain], b_parts=[chain_w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp')  # f32[4, 8]
p: f32[64, 64]
p_w: f32[64, 64]
mm_1 = mm(p, p_w)  # f32[64, 64]
wait_tensor = asynctp::wait(result=reduce_scatter_tensor, source=relu)  # f32[4, 6]
relu_1 = relu(wait_tensor)  # f32[4, 6]
return (matmul_reduce_scatter_default, relu_1, mm_1)
""",
    )


def test_a_scatter_is_hidden_if_that_pays() -> None:
    """Not where it is small, nor where the products end before it does."""

    def build(rows: int, width: int, product_rows: int) -> Build:
        def nodes(b: GraphBuilder) -> tuple[Node, ...]:
            scattered = b.scatter(b.relu(b.input("g", [rows, width])))
            return chain(b), scattered, b.mm(b.input("p", [product_rows, 4096]), b.input("p_w", [4096, 4096]))

        return nodes

    outcomes = {
        "pays": codes(run_pass(built(build(4096, 4096, 4096)))),
        "small": codes(run_pass(built(build(64, 4096, 4096)))),
        "not covered": codes(run_pass(built(build(4096, 4096, 8)))),
    }
    assert {name: "ATP405" in found for name, found in outcomes.items()} == {
        "pays": True,
        "small": False,
        "not covered": False,
    }


# --- gathers that no matmul takes in -------------------------------------------------------------------------
def gather_of_norms(b: GraphBuilder, group: str = "tp") -> Node:
    """A gather behind which no matmul is in sight: quantized, say, before a weight's gradient takes it."""
    started = b.call(c10d.all_gather_into_tensor.default, b.relu(b.input("s", [4, 8])), b.ranks, group)
    return b.call(aten.cumsum.default, b.call(c10d.wait_tensor.default, started), 0)


def gather_alone(b: GraphBuilder) -> tuple[Node, ...]:
    return chain(b), gather_of_norms(b), large_product(b)


def gather_beside_a_fused_op(b: GraphBuilder) -> tuple[Node, ...]:
    return gather_of_norms(b), chain(b)


def product_of_the_gathered(b: GraphBuilder) -> tuple[Node, ...]:
    return (b.scatter(b.mm(b.call(aten.cumsum.default, gather_of_norms(b), 1), b.input("v", [8, 6]))),)


def gather_of_a_group_without_chains(b: GraphBuilder) -> tuple[Node, ...]:
    return gather_of_norms(b, "dp"), chain(b), large_product(b)


def gather_of_a_vector(b: GraphBuilder) -> tuple[Node, ...]:
    """It looks like a parameter."""
    return b.call(aten.cumsum.default, b.gather(b.input("s", [4])), 0), chain(b), large_product(b)


def product_of_an_op_that_takes_the_gathered(b: GraphBuilder) -> tuple[Node, ...]:
    """One op makes both products, with nothing to run its gather beside: the first needs the second gather too."""
    left = b.permute(b.gather(b.input("dy", [4, 6])), [1, 0])
    first = b.mm(left, b.input("saved", [8, 10]))
    return b.mm(left, gather_of_norms(b)), b.mm(b.relu(first), b.input("w", [10, 4]))


def gather_that_a_late_one_waits_for(b: GraphBuilder) -> tuple[Node, ...]:
    """It runs beside no fused op after the late gather's, whose weight depends on it."""
    whole, norms = b.gather(b.input("x", [4, 8])), gather_of_norms(b)
    late = b.mm(whole, b.call(aten.mul.Tensor, b.input("w", [8, 6]), b.call(aten.mean.default, norms)))
    return late, chain(b), *maxima(b)


def maxima(b: GraphBuilder) -> tuple[Node, ...]:
    """Two small all-reduces: where they can be one, the order of all others has been looked at."""
    return tuple(b.all_reduce(b.call(aten.amax.default, b.input(name, [4])), "max") for name in ("first", "second"))


def gather_that_is_missed(b: GraphBuilder) -> tuple[Node, ...]:
    """What could be fused if it were written otherwise is told so."""
    pieces = b.chunks(b.gather(b.input("s", [4, 8])))
    return b.mm(b.cat(pieces[::-1]), b.input("w", [8, 6])), chain(b), large_product(b)


GATHERS: dict[Build, list[str]] = {
    gather_that_is_missed: ["ATP101", "FUSED"],
    gather_that_a_late_one_waits_for: ["FUSED", "ATP002", "FUSED", "ATP002", "ATP002"],
    gather_alone: ["FUSED", "ATP404"],
    gather_beside_a_fused_op: ["ATP404", "FUSED"],
    product_of_the_gathered: ["ATP121", "FUSED"],
    gather_of_a_group_without_chains: ["ATP002", "FUSED"],
    gather_of_a_vector: ["ATP002", "FUSED"],
    product_of_an_op_that_takes_the_gathered: ["ATP211", "ATP002"],
}


@pytest.mark.parametrize("build", GATHERS, ids=lambda build: build.__name__)
def test_gathers(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "LEAST_BYTES", 0)
    assert codes(run_pass(built(build))) == GATHERS[build]
    assert same_results(build)


@pytest.mark.parametrize(("rows", "outcome"), [(512, "ATP404"), (511, "ATP002")])
def test_a_gather_is_hidden_if_it_is_more_than_latency(rows: int, outcome: str) -> None:
    def build(b: GraphBuilder) -> tuple[Node, ...]:
        return b.call(aten.cumsum.default, b.gather(b.input("s", [rows, 512])), 0), chain(b), large_product(b)

    assert codes(run_pass(built(build))) == [outcome, "FUSED"]


# --- whose collectives they are ------------------------------------------------------------------------------
def fully_sharded_step(b: GraphBuilder) -> tuple[Node, ...]:
    """A backward graph over "tp" whose weights and their gradients are sharded over "dp"."""
    other = GraphBuilder(ranks=2, group="dp", graph=b.graph)
    other.mode = b.mode
    norm = other.gather(b.input("norm_shard", [3]))
    weight = other.gather(b.input("w_shard", [3, 8]))
    dy, saved = b.mul(b.input("dy", [8, 6]), norm), b.input("saved", [8, 8])
    dx = b.scatter(b.mm(dy, weight))
    in_float = b.call(aten._to_copy.default, b.mm(b.permute(dy, [1, 0]), saved), dtype=torch.float64)
    return dx, other.scatter(in_float, "avg"), other.scatter(b.call(aten.sum.dim_IntList, dy, [0]), "avg")


def test_parameters_and_their_gradients_are_left_alone() -> None:
    """Weights, norm weights, and gradients in the reduction's own dtype: none makes "dp" a tensor-parallel group."""
    report = run_pass(built(fully_sharded_step))
    assert {remark.group: remark.outcome for remark in report.remarks} == {"dp": "SKIPPED", "tp": "FUSED"}
    assert codes(report) == ["ATP002", "ATP003", "FUSED", "ATP009", "ATP002"]


def test_what_becomes_of_a_step_with_sharded_weights() -> None:
    """Only the tensor-parallel chain changes."""
    assert_expected_inline(
        becomes(fully_sharded_step),
        """\
norm_shard: f32[3]
all_gather_into_tensor = all_gather_into_tensor(norm_shard, 2, 'dp')  # f32[6]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[6]
w_shard: f32[3, 8]
all_gather_into_tensor_1 = all_gather_into_tensor(w_shard, 2, 'dp')  # f32[6, 8]
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)  # f32[6, 8]
dy: f32[8, 6]
mul = mul(dy, wait_tensor)  # f32[8, 6]
saved: f32[8, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[mul], b_parts=[wait_tensor_1], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp')  # f32[4, 8]
permute = permute(mul, [1, 0])  # f32[6, 8]s[1, 6]
mm_1 = mm(permute, saved)  # f32[6, 8]
_to_copy = _to_copy(mm_1, dtype=float64)  # float64[6, 8]
reduce_scatter_tensor_1 = reduce_scatter_tensor(_to_copy, 'avg', 2, 'dp')  # float64[3, 8]
wait_tensor_3 = wait_tensor(reduce_scatter_tensor_1)  # float64[3, 8]
sum_1 = sum(mul, [0])  # f32[6]
reduce_scatter_tensor_2 = reduce_scatter_tensor(sum_1, 'avg', 2, 'dp')  # f32[3]
wait_tensor_4 = wait_tensor(reduce_scatter_tensor_2)  # f32[3]
return (matmul_reduce_scatter_default, wait_tensor_3, wait_tensor_4)
""",
    )


def plain_gradient(b: GraphBuilder) -> tuple[Node, ...]:
    return (b.scatter(b.mm(b.permute(b.input("dy", [8, 6]), [1, 0]), b.input("saved", [8, 8]))),)


def test_a_weight_gradient_is_reduced_by_a_fused_op_on_request_only() -> None:
    assert codes(run_pass(built(plain_gradient))) == ["ATP009"]
    assert codes(run_pass(built(plain_gradient), groups=("tp",))) == ["FUSED"]


def test_a_group_with_a_chain_is_tensor_parallel_throughout() -> None:
    """The same reduction beside a chain that moves activations: its group is not one of FSDP."""
    report = run_pass(built(lambda b: (*plain_gradient(b), b.scatter(product(b)))))
    assert codes(report) == ["FUSED", "FUSED"]
    gradient_of_weight, activation = report.fused
    assert "taken for tensor parallelism" in gradient_of_weight.message
    assert activation.message == ""


def test_a_report_says_by_what_the_scope_was_decided() -> None:
    (gradient_of_weight,) = run_pass(built(plain_gradient)).others
    assert gradient_of_weight.message.endswith(
        "[group tp: by strides, the left operand of mm is transposed, and no matmul follows]"
    )
    assert "Config(groups=...)" in gradient_of_weight.hint
    messages = {remark.message.rpartition("[")[2] for remark in run_pass(built(fully_sharded_step)).others}
    assert "group dp: the right operand of mm]" in messages


@pytest.fixture
def grid() -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is the first and the others do not exist."""
    with imagined_ranks(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))


def step_with_the_weight_on_the_left(b: GraphBuilder) -> tuple[Node, ...]:
    """`Wᵀ @ xᵀ`, as an einsum may have it: by its products, the weight's group is one that gathers activations."""
    gathered = b.mm(b.gather(b.input("w_shard", [3, 8])), b.permute(b.input("x", [4, 8]), [1, 0]))
    return gathered, b.mm(b.input("y", [4, 6]), b.gather(b.input("v_shard", [3, 8]))), *plain_gradient(b)


def test_a_mesh_dimension_named_for_data_parallelism(grid: DeviceMesh) -> None:
    """Its group is none of tensor parallelism, whatever its products look like, unless it is enrolled."""

    def fused_over(dim: str, **config: object) -> Report:
        b = GraphBuilder(ranks=2, group=grid.get_group(dim).group_name)
        return run_pass(b.returns(*step_with_the_weight_on_the_left(b)), **config)

    report = fused_over("dp_shard")
    assert codes(report) == ["ATP011", "ATP003", "ATP009"]
    assert all('mesh dimension "dp_shard"' in remark.message for remark in report.remarks)
    assert codes(fused_over("tp")) == ["FUSED", "ATP404", "FUSED"]
    assert codes(fused_over("dp_shard", groups=grid["dp_shard"])) == ["FUSED", "ATP404", "FUSED"]


def test_the_cache_key_has_the_mesh_dimensions(grid: DeviceMesh) -> None:
    """Other programs give the same names to groups of other dimensions."""
    before = asynctp_passes.AsyncTPPass().uuid()
    assert sorted(process_groups.mesh_dimensions().values()) == ["", "dp_shard", "tp"]
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    assert asynctp_passes.AsyncTPPass().uuid() != before


@pytest.mark.parametrize(("name", "named"), [("dp", True), ("HSDP", True), ("dp_cp", True), ("tp", False), ("", False)])
def test_names_of_mesh_dimensions(name: str, named: bool) -> None:
    """`adp` is no word of data parallelism either."""
    of_mesh = Collective(Graph().placeholder("x"), "all_gather", None, mesh_dim=name)
    assert is_named_for_data(Candidate(of_mesh, None)) == named
    assert not is_named_for_data(Candidate(dataclasses.replace(of_mesh, mesh_dim=f"a{name}"), None))


def test_a_product_of_column_major_activations_is_no_weight_gradient() -> None:
    """It goes on to the next layer's matmul, so it is an activation, though its left operand is a transposed matrix."""

    def two_layers(b: GraphBuilder) -> tuple[Node, ...]:
        hidden = b.scatter(b.mm(b.permute(b.input("x", [6, 8]), [1, 0]), b.input("w", [6, 6])))
        return (b.mm(b.relu(hidden), b.input("v", [6, 4])),)

    assert codes(run_pass(built(two_layers))) == ["FUSED"]
    assert same_results(two_layers)


def test_the_limit_is_that_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from asynctp_kernels.cuda.choose import wire

    from asynctp_passes.planning.legality import CONTRACTION_LIMIT

    assert CONTRACTION_LIMIT == wire.DIRECT_LIMIT
