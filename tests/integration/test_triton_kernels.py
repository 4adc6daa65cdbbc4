"""Triton kernels that a program calls itself, between a collective and a matmul, or in the place of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from passes import outcomes, run_pass
from ranks import imagined_ranks
from torch import Tensor, fx
from torch._higher_order_ops import triton_kernel_wrap
from triton_programs import (
    add_matmul,
    added_to,
    doubled,
    gate,
    graph_of,
    launch,
    linear,
    matmul,
    matmul_and_activation,
    matmul_and_sums,
    rows_times_weight,
    rows_times_weight_and_sums,
    traced_kernels,
    triton,
    twice,
    twice_in_place,
)

from asynctp_passes import Remark, StrictError, register_local, register_matmul, register_rowwise, unregister
from asynctp_passes.ir.registry import RegistryError, digest
from asynctp_passes.torch_private import triton_kernels

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with imagined_ranks(2):
        yield


@pytest.fixture(name="registered")
def registrations() -> Iterator[list[Any]]:
    """A list of kernels. The test adds to it, and they are unregistered afterwards."""
    found: list[Any] = []
    yield found
    for one in found:
        unregister(one)


def gathered(x: Tensor) -> Tensor:
    return collectives.all_gather_tensor(x, 0, dist.group.WORLD)


def scattered(x: Tensor) -> Tensor:
    return collectives.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


def summed(x: Tensor) -> Tensor:
    return collectives.all_reduce(x, "sum", dist.group.WORLD)


CHAINS: dict[str, Callable[..., Tensor]] = {
    "gather": lambda x, w, bias: linear(gathered(x), w),
    "scatter": lambda x, w, bias: scattered(linear(x, w)),
    "all-reduce": lambda x, w, bias: summed(linear(x, w)),
    "all-reduce of a sum with a bias": lambda x, w, bias: summed(linear(x, w) + bias.expand(2, 8, 48)),
    "gather, bias in the kernel": lambda x, w, bias: linear(gathered(x), w, bias),
    "all-reduce, bias in the kernel": lambda x, w, bias: summed(linear(x, w, bias)),
}


def operands() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 8, 32, dtype=BF16), torch.randn(48, 32, dtype=BF16), torch.randn(48, dtype=BF16)


def kernels_in(graph: fx.Graph) -> int:
    return sum("triton" in str(node.target) for node in graph.nodes)


def reported(program: Callable[..., Any], *inputs: Tensor, dynamic: bool = False, **options: Any) -> tuple[Remark, ...]:
    return run_pass(graph_of(program, *inputs, dynamic=dynamic).graph, **options).remarks


SIZES = ("M", "N", "K")
STRIDES = {"a": ("stride_am", "stride_ak"), "b": ("stride_bk", "stride_bn"), "out": ("stride_cm", "stride_cn")}


CONSTANTS = {"BLOCK": ..., "HAS_BIAS": ...}
TILE = {"BLOCK": 64}


def register(registered: list[Any], kernel: Any = rows_times_weight) -> None:
    numbers: dict[str, Any] = {"sizes": SIZES, "strides": STRIDES, "constants": CONSTANTS}
    register_matmul(kernel, a="a_ptr", b="b_ptr", bias="bias_ptr", out="c_ptr", **numbers)
    registered.append(rows_times_weight)


# --- in the place of a matmul --------------------------------------------------------------------------------------
NUMBERS = ', sizes=("M", "N", "K"), strides=' + f"{STRIDES}".replace("'", '"')
LINE = f'register_matmul(rows_times_weight, a="a_ptr", b="b_ptr", out="c_ptr"{NUMBERS}, constants=%s)'
LINE_OF = {has_bias: LINE % f'{{"BLOCK": 16, "HAS_BIAS": {has_bias}}}' for has_bias in (False, True)}
OF_BIAS = ", and what of a bias and scales bias_ptr is"


@pytest.mark.parametrize("chain", CHAINS)
def test_a_kernel_with_the_shapes_of_a_matmul_is_missed_and_the_line_printed_fuses_it(
    chain: str, registered: list[Any]
) -> None:
    inputs = operands()
    graph_module = graph_of(CHAINS[chain], *inputs)
    (remark,) = run_pass(graph_module.graph).remarks
    assert (remark.outcome, remark.name) == ("MISSED", "MATMUL_NOT_UNDERSTOOD")
    assert "triton.rows_times_weight" in remark.message
    has_bias = "kernel" in chain
    assert (
        f"if it computes a @ b, and nothing else, {LINE_OF[has_bias]}{OF_BIAS if has_bias else ''}]"
        in f"{remark.message}]"
    )
    assert "a Triton kernel, with asynctp_passes.register_matmul" in remark.hint
    with pytest.raises(StrictError, match="ATP115"):
        run_pass(graph_module.graph, strict="zero")
    exec(LINE_OF[has_bias], {"register_matmul": register_matmul, "rows_times_weight": rows_times_weight})
    registered.append(rows_times_weight)
    if has_bias:  # nothing is lost where the line is taken for all of it
        (remark,) = run_pass(graph_module.graph).remarks
        assert "takes bias_ptr too, which register_matmul was told nothing about" in remark.message
        register([])
    assert outcomes(run_pass(graph_module.graph)) == ["F"]
    assert kernels_in(graph_module.graph) == 0
    x, w, bias = inputs
    graph_module.recompile()
    (found,) = graph_module(x, w, *([bias] if "bias" in chain else []))
    if "all-reduce" in chain:  # imagined ranks send nothing, so that this one's part is the sum
        expected = torch.nn.functional.linear(x, w, bias if "bias" in chain else None)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_registered_kernel_of_any_number_of_rows_is_fused(chain: str, registered: list[Any]) -> None:
    register(registered)
    expanded = "sum" in chain and "with a bias" in chain
    graph = graph_of(CHAINS[chain], *operands(), dynamic=not expanded).graph
    assert outcomes(run_pass(graph)) == ["F"]
    assert kernels_in(graph) == 0


def test_a_registered_kernel_in_code_that_inductor_makes(registered: list[Any]) -> None:
    """On CPUs, where no kernel of Triton's could be compiled; the second time from its cache."""
    register(registered)
    x, w, bias = (tensor.float() for tensor in operands())
    compiled = torch.compile(CHAINS["all-reduce, bias in the kernel"], backend="asynctp", options={"strict": "all"})
    for _ in range(2):
        torch._dynamo.reset()
        with traced_kernels(), torch.no_grad():
            found = compiled(x, w, bias)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, w, bias))


def test_a_kernel_between_a_gather_and_a_scatter_is_fused_once(registered: list[Any]) -> None:
    register(registered)
    program = lambda x, w: scattered(matmul(gathered(x), w))  # noqa: E731
    assert outcomes(run_pass(graph_of(program, torch.randn(16, 32), torch.randn(32, 48)).graph)) == ["F", "ATP402"]


def test_a_tuned_kernel_is_the_kernel_itself(registered: list[Any]) -> None:
    tuned = triton.autotune([triton.Config({}, num_warps=4), triton.Config({}, num_warps=8)], key=["M"])
    kernel = tuned(rows_times_weight)

    def program(x: Tensor, w: Tensor) -> Tensor:
        c = x.new_empty(x.shape[0], w.shape[1])
        launch(kernel, x, w, c, BLOCK=16)
        return summed(c)

    register(registered, kernel)
    assert outcomes(run_pass(graph_of(program, torch.randn(16, 32), torch.randn(32, 48)).graph)) == ["F"]


def test_another_kernel_of_the_name_is_not_the_registered_one(registered: list[Any]) -> None:
    import triton_programs_of_one_name as other

    register(registered)
    assert other.rows_times_weight.__name__ == rows_times_weight.__name__
    program = lambda x, w: summed(matmul(x, w, kernel=other.rows_times_weight))  # noqa: E731
    assert outcomes(run_pass(graph_of(program, torch.randn(16, 32), torch.randn(32, 48)).graph)) == ["ATP115"]


def test_what_a_registered_kernel_writes_besides_keeps_it(registered: list[Any]) -> None:
    register_matmul(rows_times_weight_and_sums, a="a_ptr", b="b_ptr", out="c_ptr", sizes=SIZES, constants=TILE)
    registered.append(rows_times_weight_and_sums)
    inputs = torch.randn(16, 32), torch.randn(32, 48)

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product, sums = matmul_and_sums(x, w)
        return summed(product), sums

    (remark,) = reported(both, *inputs)
    assert remark.name == "MATMUL_NOT_UNDERSTOOD"
    assert "writes in place, or into more or less than one tensor" in remark.message
    (remark,) = reported(lambda x, w: summed(matmul_and_sums(x, w)[0]), *inputs)
    assert "takes sums_ptr too, which register_matmul was told nothing about" in remark.message


def test_where_torch_does_not_find_out_what_a_kernel_writes(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor counts as written to. What is used of them tells; inputs are all returned as changed."""
    monkeypatch.setattr(
        triton_kernel_wrap,
        "get_mutated_tensors",
        lambda kernel, constants, kwargs, descriptors: [key for key, one in kwargs.items() if torch.is_tensor(one)],
    )
    inputs = torch.randn(16, 32), torch.randn(32, 48)
    (remark,) = reported(lambda x, w: summed(matmul(x, w)), *inputs)
    assert "with the shapes of one, which may write to a_ptr, b_ptr, c_ptr" in remark.message
    (remark,) = reported(lambda x, w: summed(matmul(x + 1, w + 1)), *inputs)
    assert LINE_OF[False] in remark.message
    register(registered)
    (remark,) = reported(lambda x, w: summed(matmul(x, w)), *inputs)
    assert "writes in place, or into more or less than one tensor" in remark.message
    (remark,) = reported(lambda x, w: summed(matmul(x + 1, w + 1)), *inputs)
    assert remark.outcome == "FUSED"


ADDED_TO: dict[str, tuple[Callable[..., Tensor], str]] = {
    "zeros": (lambda x, w, y: summed(add_matmul(x.new_zeros(16, 48), x, w)), "F"),
    "a copy": (lambda x, w, y: summed(add_matmul(y.clone(), x, w)), "ATP115"),
    "another matmul": (lambda x, w, y: summed(add_matmul(x @ w, x, w)), "ATP115"),
    "an input": (lambda x, w, y: summed(add_matmul(y, x, w)), "ATP115"),
    "ones": (lambda x, w, y: summed(add_matmul(x.new_ones(16, 48), x, w)), "ATP115"),
}


@pytest.mark.parametrize("case", ADDED_TO)
def test_a_kernel_that_may_add_to_something_is_no_matmul(case: str, registered: list[Any]) -> None:
    register_matmul(added_to, a="a_ptr", b="b_ptr", out="c_ptr", sizes=SIZES, constants=TILE)
    registered.append(added_to)
    program, code = ADDED_TO[case]
    report = run_pass(graph_of(program, torch.randn(16, 32), torch.randn(32, 48), torch.randn(16, 48)).graph)
    assert outcomes(report) == [code]
    told = "let it write into a tensor of torch.empty or torch.zeros" in report.remarks[0].message
    assert told == (code != "F")


def test_a_result_in_a_part_of_a_tensor_is_not_the_tensor(registered: list[Any]) -> None:
    register(registered)

    def columns(x: Tensor, w: Tensor) -> Tensor:
        whole = x.new_zeros(16, 96)
        launch(rows_times_weight, x, w, whole[:, :48], BLOCK=16)
        return summed(whole)

    def rows(x: Tensor, w: Tensor) -> Tensor:
        whole = x.new_zeros(32, 48)
        launch(rows_times_weight, x, w, whole[:16], BLOCK=16)
        return summed(whole)

    for program in (columns, rows):
        (remark,) = reported(program, torch.randn(16, 32), torch.randn(32, 48))
        assert remark.outcome == "MISSED"


def test_a_result_that_is_used_elsewhere_stays(registered: list[Any]) -> None:
    register(registered)

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = matmul(x, w)
        return summed(product), product

    (remark,) = reported(program, torch.randn(16, 32), torch.randn(32, 48))
    assert remark.name == "PRODUCT_HAS_OTHER_USERS"


TENSORS = {"a": "a_ptr", "b": "b_ptr", "out": "c_ptr"}


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ({"a": "a_ptr", "b": "b_ptr"}, "a Triton kernel returns nothing; name the argument of the result with out="),
        ({"a": "x", "b": "b_ptr", "out": "c_ptr"}, "a='x' is no argument; it has a_ptr, b_ptr, c_ptr, bias_ptr, M"),
        ({"a": "BLOCK", "b": "b_ptr", "out": "c_ptr"}, "a='BLOCK' is no argument"),
        ({"a": "a_ptr", "b": "b_ptr", "out": "c_ptr", "a_scale": "M"}, "a_scale and b_scale must both be given"),
        ({**TENSORS, "sizes": ("M", "N")}, "sizes=('M', 'N') are not the names of M, N and K"),
        ({**TENSORS, "sizes": ("M", "N", "L")}, "['L'] are none of its arguments: a_ptr, b_ptr, c_ptr, bias_ptr, M, N"),
        ({**TENSORS, "strides": {"a": ("row", 1)}}, "['row'] are none of its arguments"),
        ({**TENSORS, "constants": {"TILE": ...}}, "['TILE'] are none of its arguments"),
        ({**TENSORS, "strides": {"bias": (1,)}}, "strides has ['bias'], which are not among its tensors: a, b, out"),
    ],
)
def test_a_bad_description_of_a_kernel_is_refused(roles: dict[str, Any], problem: str) -> None:
    with pytest.raises(RegistryError, match=re.escape(f"triton::rows_times_weight cannot be registered: {problem}")):
        register_matmul(rows_times_weight, **roles)


def test_a_registered_kernel_is_in_the_key_of_graphs(registered: list[Any]) -> None:
    before = digest()
    register(registered)
    assert digest() != before
    unregister(registered.pop())
    assert digest() == before
    with pytest.raises(RegistryError, match="it is not registered"):
        unregister(rows_times_weight)


# --- what its calls pass -------------------------------------------------------------------------------------------
def launched(a: Tensor, b: Tensor, **other: Any) -> Tensor:
    """`matmul`, but for some numbers of the call, or another view of `a`."""
    c = a.new_empty(a.shape[0], b.shape[1])
    numbers = dict(zip(SIZES, (a.shape[0], b.shape[1], a.shape[1]), strict=True))
    for names, tensor in zip(STRIDES.values(), (a, b, c), strict=True):
        numbers |= dict(zip(names, tensor.stride(), strict=True))
    seen = other.pop("a", a)
    rows_times_weight[(1, 2)](seen, b, c, None, **{**numbers, **other}, BLOCK=16, HAS_BIAS=False)
    return c


CALLS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "as they are": (lambda x, w: summed(launched(x, w)), ""),
    "of a transposed weight": (lambda x, w: summed(launched(x, w.t())), ""),
    "of one row": (lambda x, w: summed(launched(x[:1], w)), ""),
    "swapped": (
        lambda x, w: summed(launched(x, w, stride_bk=1, stride_bn=32)),
        "passes 1 for stride_bk, and stride 0 of b is 32: pass sizes and strides as they are",
    ),
    "gathered, and swapped": (
        lambda x, w: launched(gathered(x), w, stride_bk=1, stride_bn=32),
        "passes 1 for stride_bk, and stride 0 of b is 32",
    ),
    "every other row": (lambda x, w: summed(launched(x, w, stride_am=0)), "passes 0 for stride_am, and stride 0 of a"),
    "of three dimensions": (
        lambda x, w: summed(launched(x, w, a=x.view(2, 8, 32))),
        "takes a with 3 dimensions, and strides= has 2: reshape it before",
    ),
    "half of it": (lambda x, w: summed(launched(x, w, K=16)), "passes 16 for K, and K is 32"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CALLS)
def test_a_call_passes_sizes_and_strides_as_they_are(case: str, dynamic: bool, registered: list[Any]) -> None:
    """The weight is square, so that its shape does not show swapped strides."""
    register(registered)
    program, says = CALLS[case]
    (remark,) = reported(program, torch.randn(16, 32), torch.randn(32, 32), dynamic=dynamic)
    assert (remark.outcome, says in remark.message) == ("MISSED" if says else "FUSED", True)


@pytest.mark.parametrize(("kind", "outcome"), [("experimental", "MISSED"), ("stable", "FUSED")])
def test_a_descriptor_has_the_sizes_of_its_tensor(kind: str, outcome: str, registered: list[Any]) -> None:
    register(registered)
    graph = graph_of(lambda x, w: summed(matmul(x, w)), torch.randn(16, 32), torch.randn(32, 48)).graph
    (call,) = (node for node in graph.nodes if "triton" in str(node.target))
    descriptor = ([16, 16], [16, 16], 4) if kind == "experimental" else ([16, 16],)
    call.kwargs = {**call.kwargs, "tma_descriptor_metadata": {"a_ptr": (kind, descriptor)}}
    (remark,) = run_pass(graph).remarks
    assert (remark.outcome, "takes a_ptr by descriptors" in remark.message) == (outcome, outcome == "MISSED")


def test_numbers_of_which_nothing_is_told(registered: list[Any]) -> None:
    inputs = torch.randn(16, 32), torch.randn(32, 48)
    register_matmul(rows_times_weight, a="a_ptr", b="b_ptr", out="c_ptr", sizes=SIZES)
    registered.append(rows_times_weight)
    (remark,) = reported(lambda x, w: summed(matmul(x, w)), *inputs)
    assert remark.name == "MATMUL_NOT_UNDERSTOOD"
    assert "takes stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn too: tell" in remark.message
    register(registered)
    assert reported(lambda x, w: summed(matmul(x, w)), *inputs)[0].outcome == "FUSED"
    registered.pop()


def test_a_kernel_that_takes_no_strides_has_contiguous_operands(registered: list[Any]) -> None:
    register_matmul(added_to, a="a_ptr", b="b_ptr", out="c_ptr", sizes=SIZES, constants=TILE)
    registered.append(added_to)
    into = lambda x, w: summed(add_matmul(x.new_zeros(16, 32), x, w))  # noqa: E731
    inputs = torch.randn(16, 32), torch.randn(32, 32)
    assert reported(into, *inputs)[0].outcome == "FUSED"
    (remark,) = reported(lambda x, w: into(x, w.t()), *inputs)
    assert "takes b, which is not contiguous: tell register_matmul by strides=" in remark.message
    strides = {"b": (1, 32)}
    register_matmul(added_to, a="a_ptr", b="b_ptr", out="c_ptr", sizes=SIZES, strides=strides, constants=TILE)
    assert reported(lambda x, w: into(x, w.t()), *inputs)[0].outcome == "FUSED"
    assert reported(into, *inputs)[0].outcome == "MISSED"


def activated(a: Tensor, b: Tensor, kernel: Any = matmul_and_activation, **constants: Any) -> Tensor:
    c = a.new_empty(a.shape[0], b.shape[1])
    kernel[(1,)](a, b, c, a.shape[0], b.shape[1], a.shape[1], **constants)
    return c


def tuned(*configs: dict[str, Any]) -> Any:
    return triton.autotune([triton.Config(config) for config in configs], key=["M"])(matmul_and_activation)


RELUS, TILES = tuned({"BLOCK": 64, "ACTIVATION": "relu"}), tuned({"BLOCK": 64}, {"BLOCK": 128})
BY_HEURISTIC = triton.heuristics({"ACTIVATION": lambda arguments: "relu"})(matmul_and_activation)
COMPILED_FOR: dict[str, tuple[Callable[..., Tensor], str]] = {
    "what was told": (lambda x, w: activated(x, w, BLOCK=64, ACTIVATION=""), ""),
    "another tile": (
        lambda x, w: activated(x, w, BLOCK=128, ACTIVATION=""),
        "has 128 for BLOCK, and constants= has 64",
    ),
    "an activation": (lambda x, w: activated(x, w, BLOCK=64, ACTIVATION="relu"), "has 'relu' for ACTIVATION"),
    "tuned tiles": (lambda x, w: activated(x, w, TILES, ACTIVATION=""), "has 128 for BLOCK, and constants= has 64"),
    "a tuned activation": (lambda x, w: activated(x, w, RELUS), "has 'relu' for ACTIVATION"),
    "an activation by a heuristic": (
        lambda x, w: activated(x, w, BY_HEURISTIC, BLOCK=64, ACTIVATION=""),
        "has 'relu' for ACTIVATION",
    ),
}


@pytest.mark.parametrize("case", COMPILED_FOR)
def test_a_kernel_that_its_constants_make_another_is_not_the_registered_one(case: str, registered: list[Any]) -> None:
    """The line that is printed for a call is of that call; three dots let any tile be."""
    program, says = COMPILED_FOR[case]
    inputs = torch.randn(16, 32), torch.randn(32, 48)
    numbers: dict[str, Any] = {"a": "a_ptr", "b": "b_ptr", "out": "c_ptr", "sizes": SIZES}
    register_matmul(matmul_and_activation, **numbers)
    registered.append(matmul_and_activation)
    (remark,) = reported(lambda x, w: summed(program(x, w)), *inputs)
    assert "too: tell register_matmul by constants={" in remark.message
    register_matmul(matmul_and_activation, **numbers, constants={"BLOCK": 64, "ACTIVATION": ""})
    (remark,) = reported(lambda x, w: summed(program(x, w)), *inputs)
    assert (remark.outcome, says in remark.message) == ("MISSED" if says else "FUSED", True)
    register_matmul(matmul_and_activation, **numbers, constants={"BLOCK": ..., "ACTIVATION": ""})
    (remark,) = reported(lambda x, w: summed(program(x, w)), *inputs)
    assert remark.outcome == ("MISSED" if "activation" in case else "FUSED")


# --- between a collective and a matmul -----------------------------------------------------------------------------
BETWEEN: dict[str, tuple[Callable[..., Any], str, str]] = {
    "after the gather": (lambda x, w: twice(gathered(x)) @ w, "COMPUTED_BETWEEN", "doubled -> getitem -> mm"),
    "in place": (lambda x, w: twice_in_place(gathered(x)) @ w, "COMPUTED_BETWEEN", "doubled -> getitem -> mm"),
    "before the sum": (lambda x, w: summed(twice(x @ w)), "COMPUTED_BETWEEN", "mm -> doubled"),
    "in place before the sum": (lambda x, w: summed(twice_in_place(x @ w)), "COMPUTED_BETWEEN", "mm -> doubled"),
    "gated": (lambda x, w: summed(gate(x @ w)), "COMPUTED_BETWEEN", "mm -> gated"),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_a_kernel_in_between_is_named_and_the_line_printed_ends_it(case: str, registered: list[Any]) -> None:
    program, name, fact = BETWEEN[case]
    graph = graph_of(program, torch.randn(16, 32), torch.randn(32, 48)).graph
    (remark,) = run_pass(graph).remarks
    assert (remark.outcome, remark.name) == ("MISSED", name)
    assert fact in remark.message
    (line,) = re.findall(r'register_local\("triton::\w+"\)', remark.message)
    exec(line, {"register_local": register_local})
    registered.append(re.findall(r"triton::\w+", line)[0])
    (remark,) = run_pass(graph).remarks
    assert (remark.outcome, remark.name) == ("SKIPPED", "NO_MATMUL")


def test_a_rowwise_kernel_is_done_on_the_shard_as_an_op(registered: list[Any]) -> None:
    """The remedy that the remark names."""
    (remark,) = reported(BETWEEN["after the gather"][0], torch.randn(16, 32), torch.randn(32, 48))
    assert "put its call into an op (torch.library.custom_op), and register_rowwise that" in remark.message
    library = torch.library.Library("triton_kernels_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    torch.library.register_fake("triton_kernels_test::twice", torch.empty_like, lib=library)
    op = torch.ops.triton_kernels_test.twice
    register_rowwise(op)
    registered.append(op)
    (remark,) = reported(lambda x, w: op(gathered(x)) @ w, torch.randn(16, 32), torch.randn(32, 48))
    assert remark.outcome == "FUSED"


@pytest.mark.parametrize("name", [doubled, "triton::doubled", "triton::*"])
def test_a_kernel_is_not_rowwise_by_itself(name: Any) -> None:
    with pytest.raises(RegistryError, match=r"put its call into an op \(torch.library.custom_op\), and register that"):
        register_rowwise(name)


# --- beside collectives, and nothing more -----------------------------------------------------------------------------
UNRELATED: dict[str, Callable[..., Any]] = {
    "of what is summed": lambda x, w: summed(twice(x)),
    "of what is gathered": lambda x, w: twice(gathered(x)),
    "its rows are as many as its columns": lambda x, w: gate(gathered(x)),  # [32, 32] and an [32, 16] to write to
    "its rows are as many as its columns, summed": lambda x, w: summed(gate(torch.cat([x, x]))),
    "a matmul that nothing sends": lambda x, w: (matmul(x, w), summed(x)),
}


@pytest.mark.parametrize("case", UNRELATED)
def test_a_kernel_without_a_matmul_is_no_miss(case: str) -> None:
    remarks = reported(UNRELATED[case], torch.randn(16, 32), torch.randn(32, 48), strict="all")
    assert {remark.outcome for remark in remarks} == {"SKIPPED"}


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: (summed(x @ w), twice(x)),
        lambda x, w: (summed(x @ w), twice_in_place(x)),
        lambda x, w: twice(summed(x @ w)),
        lambda x, w: twice_in_place(summed(x @ w)),
        lambda x, w: gathered(twice(x)) @ w,
    ],
)
def test_a_kernel_beside_a_chain_leaves_it_alone(program: Callable[..., Any]) -> None:
    graph = graph_of(program, torch.randn(16, 32), torch.randn(32, 48)).graph
    assert outcomes(run_pass(graph, strict="all")) == ["F"]
    assert kernels_in(graph) == 1


def test_weights_that_a_kernel_changes_in_between_are_read_in_order() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = gathered(x) @ w
        twice_in_place(w)
        return first, gathered(x) @ w

    graph = graph_of(program, torch.randn(16, 32), torch.randn(32, 48)).graph
    assert outcomes(run_pass(graph)) == ["F", "F"]
    (kernel,) = (node for node in graph.nodes if "triton" in str(node.target))
    first, second = (node for node in graph.nodes if "all_gather_matmul" in str(node.target))
    assert first.args[1] == [kernel.kwargs["kwargs"]["x_ptr"]]
    assert second.args[1] != first.args[1]


def test_the_kernels_of_these_programs_are_kernels() -> None:
    """Else nothing here means anything: torch would trace their Python code."""
    graph = graph_of(UNRELATED["of what is summed"], torch.randn(16, 32), torch.randn(32, 48)).graph
    (call,) = (node for node in graph.nodes if triton_kernels.called_by(node) is not None)
    assert triton_kernels.called_by(call) is doubled
    assert call.kwargs["tensors_to_clone"] == ["out_ptr"]
