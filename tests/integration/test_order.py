"""What communicates keeps its order: in the code that Inductor makes, and in rewritten graphs.

Ranks share the order of their collectives, and nothing else. So programs with the same collectives must communicate in
the same order, whatever is computed beside them. In each program below every collective has a group of its own, so that
its place can be read off the code; `local` chooses what a rank computes beside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from generated_code import as_ops
from graph_builder import GraphBuilder, aten, c10d
from lockstep import differences, evaluate
from passes import outcomes, run_pass
from profiles import thorough
from ranks import imagined_ranks
from serving_ops import GROUPS, registered
from torch import Tensor
from torch._inductor import ir, lowering
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor,
)
from torch.fx import Graph, Node

from asynctp_passes import AsyncTPPass, Config, RematerializePass, register_local, unregister
from asynctp_passes.ir.order import communicates, communications, is_opaque
from asynctp_passes.ops import matmul_reduce_scatter
from asynctp_passes.torch_private import inductor_order, torch_ops

_CALL = re.compile(r"torch\.ops\.(?P<op>\w+\.\w+)\.default\((?P<arguments>.*)\)")
Groups = list[dist.ProcessGroup]
Program = Callable[[int, Groups], list[Tensor]]


@pytest.fixture(name="groups")
def five_groups() -> Iterator[Groups]:
    with imagined_ranks(2):
        yield [dist.new_group([0, 1]) for _ in range(5)]


@pytest.fixture(autouse=True)
def code_is_only_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing comes from a cache, and no C++ is compiled: what kernels would compute means nothing here."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *tensors: None)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def started(code: str, groups: Groups) -> list[int]:
    """The groups in which generated code communicates, as indices, in order. A group's check comes before its calls."""
    index = {group.group_name: place for place, group in enumerate(groups)}
    found, checked = list[int](), set[int]()
    for call in _CALL.finditer(as_ops(code)):
        names = re.findall(r"'(\w+)'", call["arguments"])
        places = [index[name] for name in names if name in index]
        if call["op"] != "asynctp.run_check":
            found += places
            continue
        assert checked.isdisjoint(places), "a group's ranks compare once a graph"
        assert not set(found).intersection(places), "ranks compare before they send anything"
        checked.update(places)
    return found


def compiled_order(program: Program, local: int, groups: Groups, **options: bool) -> list[int]:
    torch._dynamo.reset()
    function = torch.compile(program, backend="asynctp", options={"strict": "off", **options})
    names = {group.group_name: group for group in groups}
    GROUPS.update(names)
    numbers = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with torch.no_grad(), registered(names=names), numbers:
        _, codes = run_and_get_code(function, local, groups)
    return [place for code in codes for place in started(code, groups)]


def tensor(*shape: int) -> Tensor:
    return torch.zeros(shape)


# --- programs ------------------------------------------------------------------------------------------------
def statistic(local: int, groups: Groups) -> list[Tensor]:
    """The other rank logs a statistic of its second product."""
    a, b = (all_gather_tensor(tensor(64, 32), 0, group) for group in groups[:2])
    p, q = a @ tensor(32, 64), b @ tensor(32, 64)
    return [(q @ q.t()).trace(), p, q] if local else [p, q]


def heads_in_any_order(local: int, groups: Groups) -> list[Tensor]:
    """Heads are multiplied in the order of a set."""
    whole = [all_gather_tensor(tensor(16, 32), 0, group) for group in groups]
    order = [3, 0, 4, 2, 1] if local else [1, 4, 0, 3, 2]
    heads = {index: whole[index] @ tensor(32, 8) for index in order}
    return [heads[index] for index in range(5)]


def all_kinds(local: int, groups: Groups) -> list[Tensor]:
    """A gather and a sum with matmuls, and collectives without, whose results come into use early or late."""
    x, w = tensor(64, 32), tensor(32, 32)
    a = all_gather_tensor(x, 0, groups[0])
    total = all_reduce(x * 2, "sum", groups[1])
    scattered = reduce_scatter_tensor(tensor(64, 32) @ w, "sum", 0, groups[2])
    plain = all_gather_tensor(x + 1, 0, groups[3])
    largest = all_reduce(x.amax(), "max", groups[4])
    if local:
        return [largest + plain.sum(), scattered + 1, total @ w, a @ w, plain]
    return [a @ w, total @ w, scattered.relu(), plain, largest]


def by_hand(local: int, groups: Groups) -> list[Tensor]:
    """Ops that the program calls itself stand between collectives."""
    x, w = tensor(64, 32), tensor(32, 64)
    first = matmul_reduce_scatter([x @ w], [tensor(64, 16)], scatter_dim=0, group=groups[0])
    a = all_gather_tensor(tensor(32, 32), 0, groups[1])
    second = matmul_reduce_scatter([x @ w], [tensor(64, 16)], scatter_dim=0, group=groups[2])
    total = all_reduce(x, "sum", groups[3])
    if local:
        return [total + 1, second * 2, a @ w, first * 2]
    return [first * 2, a @ w, total.sum(), second + 1]


def by_hand_alone(local: int, groups: Groups) -> list[Tensor]:
    """Nothing but ops that the program calls itself."""
    x, w = tensor(64, 32), tensor(32, 32)
    p, q, r = (matmul_reduce_scatter([x], [w], scatter_dim=0, group=group) for group in groups[:3])
    return [r * 2, q * 2, p * 2] if local else [p * 2, q * 2, r * 2]


def memory(local: int, groups: Groups) -> list[Tensor]:
    """What is computed beside is large in other places on each rank, so that memory asks for other orders."""
    x, w = tensor(64, 32), tensor(32, 32)
    sizes = (2048, 8) if local else (8, 2048)
    first = all_gather_tensor(x, 0, groups[0]) @ tensor(32, sizes[0])
    total = all_reduce(x.sin(), "sum", groups[1])
    second = all_gather_tensor(x + 1, 0, groups[2]) @ tensor(32, sizes[1])
    scattered = reduce_scatter_tensor(tensor(64, 32) @ w, "sum", 0, groups[3])
    return [first.sum(0), total.cos(), second.sum(0), scattered]


def registered_ops(local: int, groups: Groups) -> list[Tensor]:
    """Collectives of a framework's own, which Inductor moves to where they are used, and which need no wait."""
    x, w = tensor(64, 32), tensor(32, 32)
    first = torch.ops.vllm_like.all_reduce(x.sin(), groups[0].group_name)
    a = all_gather_tensor(x, 0, groups[1])
    whole = torch.ops.vllm_like.all_gather(x.cos(), 0, 2, groups[2].group_name)
    total = torch.ops.vllm_like.all_reduce(x @ w, groups[3].group_name)
    if local:
        return [total + 1, whole @ w, a @ w, first * 2]
    return [first * 2, a @ w, total.sum(), whole.cos()]


def reordered(local: int, groups: Groups) -> list[Tensor]:
    """Nothing but local work differs, and of that nothing but the order."""
    x, w = tensor(64, 32), tensor(32, 32)
    a, b = (all_gather_tensor(x, 0, group) for group in groups[:2])
    one, two = (x @ w, w @ w) if local else (w @ w, x @ w)
    return [a @ w, b @ w, one, two]


def unused(local: int, groups: Groups) -> list[Tensor]:
    """Results of one rank come to nothing; its peers wait for the calls."""
    x, w = tensor(64, 32), tensor(32, 32)
    first = matmul_reduce_scatter([x], [w], scatter_dim=0, group=groups[0])
    a = all_gather_tensor(x, 0, groups[1]) @ w
    scattered = reduce_scatter_tensor(x @ w, "sum", 0, groups[2])
    total = all_reduce(x @ w, "sum", groups[3])
    other = all_reduce(x.sin(), "sum", groups[4])
    return [x.cos()] if local else [first, a, scattered, total, other]


def number(local: int, groups: Groups) -> list[Tensor]:
    """One call's result is a number, which nothing of the other calls depends on."""
    x, w = tensor(64, 32), tensor(32, 32)
    total = all_reduce(x.sin(), "sum", groups[0])
    count = torch.ops.vllm_like.all_reduce_count(x, groups[1].group_name)
    a = all_gather_tensor(x, 0, groups[2]) @ w
    scattered = reduce_scatter_tensor(x @ w, "sum", 0, groups[3])
    return [a.sum() + count, scattered, total] if local else [scattered * 2, a, total, x * count]


# --- programs with ops of which nothing is known -----------------------------------------------------------------
_own = torch.library.Library("unheard_of", "FRAGMENT")
_own.define("mix(Tensor x, str group) -> Tensor")
_own.define("mix_(Tensor(a!) x, str group) -> ()")
_own.define("mix_two(Tensor x, str group) -> (Tensor, Tensor)")
_own.define("mix_list(Tensor x, str group) -> Tensor[]")
_FAKES: dict[str, Callable[[Tensor, str], Any]] = {
    "mix": lambda x, group: torch.empty_like(x),
    "mix_": lambda x, group: None,
    "mix_two": lambda x, group: (torch.empty_like(x), torch.empty_like(x)),
    "mix_list": lambda x, group: [torch.empty_like(x), torch.empty_like(x)],
}
for _name, _fake in _FAKES.items():
    _own.impl(_name, _fake, "CPU")
    torch.library.register_fake(f"unheard_of::{_name}", _fake, lib=_own)
unheard_of = torch.ops.unheard_of


def opaque(local: int, groups: Groups) -> list[Tensor]:
    """Results come into use in another order on each rank, and one is large."""
    x, w = tensor(64, 32), tensor(32, 2048 if local else 8)
    first = unheard_of.mix(x.sin(), groups[0].group_name)
    a = all_gather_tensor(x, 0, groups[1])
    second = unheard_of.mix(x.cos(), groups[2].group_name)
    total = all_reduce(x + 1, "sum", groups[3])
    if local:
        return [total + 1, second @ w, (a @ w).norm(), first * 2]
    return [first * 2, a + 1, total.sum(), second.cos()]


def opaque_of_several_results(local: int, groups: Groups) -> list[Tensor]:
    x, w = tensor(64, 32), tensor(32, 32)
    first, second = unheard_of.mix_two(x.sin(), groups[0].group_name)
    a = all_gather_tensor(x, 0, groups[1])
    total = all_reduce(x + 1, "sum", groups[2])
    third, _ = unheard_of.mix_list(x.tan(), groups[3].group_name)
    if local:
        return [third + 1, total * 2, a @ w, second * 2]
    return [first * 2, a @ w, total.sum(), third.cos()]


def opaque_that_writes(local: int, groups: Groups) -> list[Tensor]:
    x, w = tensor(64, 32), tensor(32, 32)
    written, other = x.sin(), x.cos()
    unheard_of.mix_(written, groups[0].group_name)
    a = all_gather_tensor(x, 0, groups[1])
    unheard_of.mix_(other, groups[2].group_name)
    total = all_reduce(x + 1, "sum", groups[3])
    if local:
        return [total + 1, other @ w, a @ w, written * 2]
    return [written * 2, a + 1, total.sum(), other.cos()]


INFERENCE: list[Program] = [
    opaque,
    opaque_of_several_results,
    opaque_that_writes,
    statistic,
    number,
    heads_in_any_order,
    all_kinds,
    by_hand,
    by_hand_alone,
    memory,
    registered_ops,
    reordered,
    unused,
]


FALLBACKS: dict[str, bool] = {"fallback_by_default": True}
#: with kernels every program, without them one for each kind of op that the graph has to tie
KINDS_TO_TIE = (opaque, opaque_that_writes, statistic, heads_in_any_order, all_kinds, registered_ops)


@pytest.mark.parametrize(
    ("program", "options"),
    [
        *(pytest.param(program, {}, id=f"kernels-{program.__name__}") for program in INFERENCE),
        *(
            case if program in KINDS_TO_TIE else thorough(case)
            for program in INFERENCE
            for case in [pytest.param(program, FALLBACKS, id=f"fallbacks-{program.__name__}")]
        ),
    ],
)
def test_generated_code_communicates_in_the_order_of_the_program(
    program: Program, options: dict[str, bool], groups: Groups
) -> None:
    """Also where Inductor makes no kernels of its own, and so has none for collectives: there the graph ties them."""
    orders = [compiled_order(program, local, groups, **options) for local in (0, 1)]
    assert orders[0] == sorted(set(orders[0]))
    assert orders[1] == orders[0]
    assert len(orders[0]) > 1


def test_a_subgraph_keeps_its_place_among_collectives(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no kernel that Inductor could be told about: the graph ties it to those before and after it."""
    kept: list[dict[str, set[str]]] = []
    keep_order = inductor_order.keep_order

    def keep(graph: Graph, after: dict[Node, list[Node]]) -> list[Node]:
        kept.append({node.name: {each.name for each in earlier} for node, earlier in after.items()})
        return keep_order(graph, after)

    def program(x: Tensor, groups: Groups) -> list[Tensor]:
        total = all_reduce(x.sin(), "sum", groups[0])
        one, two = (lambda x, factor=factor: all_reduce(x * factor, "sum", groups[1]) for factor in (2, 3))
        either = torch.cond(x.sum() > 0, one, two, (x,))
        return [all_gather_tensor(x, 0, groups[2]), either, total]

    monkeypatch.setattr(inductor_order, "keep_order", keep)
    with torch.no_grad():
        torch.compile(program, backend="asynctp", options={"strict": "off"})(tensor(8, 8), groups)
    (after,) = (each for each in kept if "cond" in each)
    assert after["cond"] == {"all_reduce"}
    assert "cond" in after["all_gather_into_tensor"]


def test_an_op_without_a_result_cannot_be_waited_for(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, and what comes before it keeps its order with what comes after it."""

    def program(local: int, groups: Groups) -> list[Tensor]:
        x, w = tensor(64, 32), tensor(32, 32)
        total = all_reduce(x.sin(), "sum", groups[0])
        torch.ops.vllm_like.all_reduce_barrier(x, groups[1].group_name)
        a = all_gather_tensor(x, 0, groups[2]) @ w
        return [a, total] if local else [total + 1, a * 2]

    orders = [compiled_order(program, local, groups, fallback_by_default=True) for local in (0, 1)]
    assert [[place for place in order if place != 1] for order in orders] == [[0, 2], [0, 2]]
    assert "before vllm_like.all_reduce_barrier" in caplog.text


def test_ranks_compare_before_each_collective_of_the_program(groups: Groups) -> None:
    """In the order of the program: no group waits for another."""

    def program(groups: Groups) -> list[Tensor]:
        x, w = tensor(64, 32), tensor(32, 32)
        a = all_gather_tensor(x, 0, groups[0])
        total = all_reduce(x @ w, "sum", groups[1])
        return [a @ w, total, all_reduce(x.sin(), "max", groups[0])]

    with torch.no_grad():
        function = torch.compile(program, backend="asynctp", options={"strict": "off"})
        _, (code,) = run_and_get_code(function, groups)
    first, second = (f"'{group.group_name}'" for group in groups[:2])
    told = [(call["op"], call["arguments"].split(", ")) for call in _CALL.finditer(as_ops(code))]
    assert [(op, arguments[-1]) for op, arguments in told if first in arguments or second in arguments] == [
        ("asynctp.run_check", first),
        ("asynctp.all_gather_matmul", first),
        ("asynctp.run_check", second),
        ("asynctp.matmul_all_reduce", second),
        ("asynctp.run_check", first),
        ("_c10d_functional.all_reduce_", first),
    ]
    assert [arguments[1:] for op, arguments in told if "check" in op] == [
        ["0", "1", first],
        ["0", "1", second],
        ["0", "1", first],
    ]


def training(local: int, groups: Groups, x: Tensor, w: Tensor) -> list[Tensor]:
    """Ranks multiply in different orders, and one uses a gathered tensor beside."""
    a, b = (all_gather_tensor_autograd(x * number, 0, group) for number, group in enumerate(groups[:2]))
    if local:
        q = b @ w
        return [a @ w, q, a.square()]
    p = a @ w
    return [p, b @ w, p.sum()]


def test_training_communicates_in_one_order(groups: Groups) -> None:
    """Forward and backward; a backward's order is that in which autograd goes through the forward's, backwards."""
    orders = []
    for local in (0, 1):
        torch._dynamo.reset()
        function = torch.compile(training, backend="asynctp", options={"strict": "off"})
        x, w = (torch.zeros(8, 8, requires_grad=True) for _ in range(2))
        run = partial(function, local, groups, x, w)
        _, codes = run_fw_bw_and_get_code(lambda run=run: sum(run()[:2]))  # type: ignore[misc]
        orders.append([started(code, groups) for code in codes])
    assert orders[0] == orders[1]
    assert orders[0][0] == [0, 1]


# --- graphs --------------------------------------------------------------------------------------------------
def places_of(graph: Graph, inputs: str) -> str:
    """The inputs, each named by a letter, that are communicated, in order: of an op the first that it reads."""
    letters = {node: node.name for node in graph.nodes if node.op == "placeholder" and node.name in inputs}
    found = []
    for node in communications(graph.nodes):
        source = node.all_input_nodes[0]
        while source not in letters:
            source = source.all_input_nodes[0]
        found.append(letters[source])
    return "".join(found)


def graph_of(build: Callable[[GraphBuilder], tuple[Node, ...]]) -> Graph:
    b = GraphBuilder(ranks=2)
    return b.returns(*build(b))


def run_and_check(build: Callable[[GraphBuilder], tuple[Node, ...]]) -> tuple[list[str], Graph]:
    """The outcomes, and the graph, which computes what it did."""
    graph, original = graph_of(build), graph_of(build)
    found = outcomes(run_pass(graph))
    values = [[torch.rand(node.meta["val"].shape) for node in original.nodes if node.op == "placeholder"] for _ in "01"]
    assert differences(evaluate(original, values), evaluate(graph, values)) == []
    return found, graph


def two_gathers(b: GraphBuilder) -> tuple[Node, ...]:
    """The second gather is multiplied first."""
    x, y, w, v = (b.input(name, [4, 4]) for name in "xywv")
    a, c = b.gather(x), b.gather(y)
    second = b.mm(c, v)
    return second, b.mm(a, w)


def operand_computed_late(b: GraphBuilder) -> tuple[Node, ...]:
    """The weight is computed after another collective, and needs none: it moves to the front."""
    x, y, w = (b.input(name, [4, 4]) for name in "xyw")
    a = b.gather(x)
    total = b.all_reduce(y)
    return b.mm(a, b.relu(b.mm(w, w))), total


def operand_communicated_later(b: GraphBuilder) -> tuple[Node, ...]:
    """The weight is gathered after the activation, as FSDP does: the op follows that, if all ranks agree."""
    x, y, w = b.input("x", [4, 4]), b.input("y", [4, 4]), b.input("w", [2, 6])
    a = b.gather(x)
    weight = b.gather(w)
    return b.mm(a, weight), b.all_reduce(y)


def operand_of_what_needs_the_gather(b: GraphBuilder) -> tuple[Node, ...]:
    """The second weight needs a collective that cannot come first: its matmul stays, and takes what is gathered."""
    x, y, w = b.input("x", [4, 4]), b.input("y", [4, 4]), b.input("w", [4, 4])
    a = b.gather(x)
    total = b.all_reduce(b.call(aten.amax.default, a), "max")
    scaled = b.all_reduce(y)
    return b.mm(a, w), b.mm(a, scaled), total


def all_operands_need_the_gather(b: GraphBuilder) -> tuple[Node, ...]:
    x, y, w = b.input("x", [4, 4]), b.input("y", [4, 4]), b.input("w", [4, 4])
    a = b.gather(x)
    total = b.all_reduce(b.call(aten.amax.default, a), "max")
    scaled = b.all_reduce(y)
    return b.mm(a, scaled), b.relu(w), total


def sum_of_two(b: GraphBuilder) -> tuple[Node, ...]:
    """A sum of two reductions stands where the second does, a gather between them before it."""
    x, y, z, w = (b.input(name, [4, 4]) for name in "xyzw")
    one = b.all_reduce(b.mm(x, w))
    between = b.gather(z)
    return b.add(b.all_reduce(b.mm(y, w)), one), between


def buckets(b: GraphBuilder) -> tuple[Node, ...]:
    """One of two tensors that are gathered together is multiplied; the next collective keeps its place."""
    x, y, z, w = (b.input(name, [4, 4]) for name in "xyzw")
    one, two = b.gather_list(x, y)
    return b.gather(z), b.mm(one, w), two


def gathers_that_need_each_other(b: GraphBuilder) -> tuple[Node, ...]:
    """Each gather has a matmul whose weight comes from a matmul of the other: the first leaves that to itself."""
    x, y, w, v = (b.input(name, [4, 8] if name in "xy" else [8, 8]) for name in "xywv")
    a, c = b.gather(x), b.gather(y)
    first, second = b.mm(a, w), b.mm(c, v)
    return b.mm(a, second), b.mm(c, first)


GRAPHS: dict[Callable[[GraphBuilder], tuple[Node, ...]], tuple[list[str], str]] = {
    two_gathers: (["F", "F"], "xy"),
    gathers_that_need_each_other: (["F", "F"], "xy"),
    operand_computed_late: (["F", "ATP013"], "xy"),
    operand_communicated_later: (["F", "ATP109", "ATP013"], "wxy"),
    operand_of_what_needs_the_gather: (["F", "ATP002", "ATP013"], "xxy"),
    all_operands_need_the_gather: (["ATP210", "ATP002", "ATP013"], "xxy"),
    sum_of_two: (["F", "ATP013", "F"], "zy"),
    buckets: (["F", "ATP013", "ATP013"], "xyz"),
}


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_rewritten_graphs_communicate_in_order(build: Callable[[GraphBuilder], tuple[Node, ...]]) -> None:
    """Each letter is an input that is communicated, in order: of a fused op what it reads first."""
    found, graph = run_and_check(build)
    assert (found, places_of(graph, "xyzw")) == GRAPHS[build]


# --- what communicates ---------------------------------------------------------------------------------------
def test_what_communicates() -> None:
    """Starts do, and any op of which nothing is known; waits do not, nor does what only computes."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [4, 4]), b.input("w", [4, 4])
    whole = b.call(c10d.all_gather_into_tensor.default, x, 2, "tp")
    ours = b.call(torch.ops.asynctp.all_gather.default, x, 2, "tp")
    fused = b.call(torch.ops.asynctp.matmul_all_reduce.default, [x], [w], [None], "sum", "tp")
    unknown = b.call_like(x.meta["val"], torch.ops.vllm_like.all_reduce.default, x, "tp:0")
    waits = [b.call(c10d.wait_tensor.default, whole), b.call(torch.ops.asynctp.wait.default, ours, x)]
    computed = [b.mm(x, w), b.relu(x)]
    assert all(map(communicates, [whole, ours, fused, unknown]))
    assert not any(map(communicates, [x, *waits, *computed]))


def test_names_decide_nothing() -> None:
    """An op of which nothing is known may communicate, whatever it is called, until it is registered as local."""
    b = GraphBuilder(ranks=2)
    x = b.input("x", [4, 4])
    ops = [torch.ops.unheard_of.mix, torch.ops.vllm_like.all_reduce]
    nodes = [b.call_like(x.meta["val"], op.default, x, "tp") for op in ops]
    assert all(map(is_opaque, nodes))
    for op in ops:
        register_local(op)
    assert not any(map(communicates, nodes))
    for op in ops:
        unregister(op)
    with registered():
        assert [is_opaque(node) for node in nodes] == [True, False]
        assert communicates(nodes[1])


def test_opaque_ops_count_only_beside_a_collective_of_several_ranks() -> None:
    for ranks, whole in ((2, True), (1, False)):
        b = GraphBuilder(ranks=ranks)
        x = b.input("x", [4, 4])
        own = b.call_like(x.meta["val"], torch.ops.unheard_of.mix.default, x, "tp")
        assert communications(b.graph.nodes) == []
        start = b.gather(x).args[0]
        assert communications(b.graph.nodes) == ([own, start] if whole else [start])


@pytest.mark.parametrize("name", ["call_torchbind", "inductor_compiled_code", "invoke_leaf_function"])
def test_a_higher_order_op_that_nobody_sees_into_is_opaque(name: str) -> None:
    op = getattr(torch.ops.higher_order, name, None)
    if not torch_ops.is_higher_order(op):
        pytest.skip(f"this torch has no {name}")
    b = GraphBuilder(ranks=2)
    assert is_opaque(b.graph.call_function(op, (b.input("x", [4, 4]),)))


def test_a_triton_kernel_of_the_program_is_local() -> None:
    b = GraphBuilder(ranks=2)
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional as op

    assert not communicates(b.graph.call_function(op, (), {"kwargs": {"x": b.input("x", [4, 4])}}))


def test_a_graph_of_opaque_ops_alone_is_left_to_inductor(groups: Groups) -> None:
    """Its code is that of plain Inductor, also after graphs in which such ops kept their order."""

    def program(local: int, groups: Groups) -> list[Tensor]:
        x = tensor(64, 32)
        return [unheard_of.mix(x.sin(), groups[0].group_name), unheard_of.mix(x, groups[1].group_name) + 1]

    def code(backend: str) -> str:
        torch._dynamo.reset()
        with torch.no_grad():
            _, (text,) = run_and_get_code(torch.compile(program, backend=backend), 0, groups)
        return str(text)

    compiled_order(opaque, 0, groups)
    assert started(code("asynctp"), groups) == started(code("inductor"), groups)


def test_what_communicates_runs_on_the_kernel_of_a_collective() -> None:
    """All that the ops of a graph are lowered to, unless Inductor is told to make no kernels."""
    ops = {torch.ops.asynctp.all_gather.default, torch.ops.vllm_like.all_gather.default}
    assert inductor_order.lower_in_order(ops)
    with torch._inductor.config.patch(fallback_by_default=True):
        assert not inductor_order.lower_in_order(ops)
        assert not inductor_order.lower_in_order([]), (
            "torch's collectives are plain calls then, which nothing keeps in order"
        )
    assert inductor_order.lower_in_order([])
    assert not inductor_order.lower_in_order({*ops, torch.ops.aten.add.Tensor})


def test_an_op_that_torch_lowers_in_its_own_way_keeps_its_place(groups: Groups) -> None:
    """The graph ties it to what communicates before and after it."""
    op = torch.ops.vllm_like.all_reduce.default
    present, known = lowering.lowerings.get(op), set(inductor_order._lowered)
    inductor_order._lowered.discard(op)

    def own(x: ir.TensorBox, group: str) -> Any:
        return ir.TensorBox.create(ir.FallbackKernel.create(op, x, group))

    lowering.lowerings[op] = own
    try:
        orders = [compiled_order(registered_ops, local, groups) for local in (0, 1)]
        assert orders == [[0, 1, 2, 3]] * 2
    finally:
        lowering.lowerings.pop(op)
        if present is not None:
            lowering.lowerings[op] = present
        inductor_order._lowered.clear()
        inductor_order._lowered.update(known)


def test_a_pass_alone_warns_of_ops_that_may_have_moved(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    """Without the joint pass nobody knows the order of the program. With it there is nothing to warn of."""
    options: dict[str, Any] = {"post_grad_custom_post_pass": AsyncTPPass(Config(strict="off"))}

    def warnings() -> list[str]:
        torch._dynamo.reset()
        caplog.clear()
        with torch.no_grad(), registered(names={group.group_name: group for group in groups}):
            torch.compile(registered_ops, options=options)(0, groups)
        return [text for text in caplog.messages if "RematerializePass" in text]

    GROUPS.update({group.group_name: group for group in groups})
    (warning,) = warnings()
    assert "vllm_like.all_reduce" in warning
    options["joint_custom_post_pass"] = RematerializePass(Config(strict="off"))
    assert warnings() == []


class WaitsForSines(CustomGraphPass):
    """A pass of somebody else's, which waits for what no call gave."""

    def __call__(self, graph: Graph) -> None:
        def not_waits(user: Node) -> bool:
            return user.target is not torch.ops.asynctp.wait.default

        for node in graph.find_nodes(op="call_function", target=aten.sin.default):
            with graph.inserting_after(node):
                wait = graph.call_function(torch.ops.asynctp.wait.default, (node, node.args[0]))
            wait.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(wait, delete_user_cb=not_waits)

    def uuid(self) -> None:
        return None


def test_a_wait_for_what_no_call_gave_is_harmless() -> None:
    inductor_order.lower_wait(torch.ops.asynctp.wait.default)
    x = torch.randn(4, 4)
    with torch._inductor.config.patch(post_grad_custom_post_pass=WaitsForSines(), fallback_by_default=True):
        found = torch.compile(lambda x: (x + 1).sin().t() @ x)(x)
    torch.testing.assert_close(found, (x + 1).sin().t() @ x)
