"""The fused ops and the reference: against fp64 truth on real ranks, and as citizens of torch.library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from interpreter import interpreter_fault
from profiles import THOROUGH
from ranks import run_ranks
from reference_cases import (
    ALL_REDUCES,
    BF16,
    E4M3,
    FP16,
    FP32,
    FP64,
    GATHERS,
    ONE_OF_EACH,
    REDUCTIONS,
    SCATTERS,
    SUMMED_IN_FP32,
    WITH_OPTIONS,
    Gather,
    Scatter,
    _all_problems,
    _call,
    _exact,
    _flat_tensors,
    _gather_call,
    _gather_inputs,
    _problems,
    _random,
    _relative_error,
    _scatter_call,
    _scatter_inputs,
    _true_sum,
    _truth,
)
from torch import Tensor

from asynctp_passes import ops
from asynctp_passes.ops import plain_collectives, reference


# --- one program per world size, judged case by case --------------------------------------------------------------
def of_ranks(world_size: int) -> list[Gather | Scatter]:
    """The cases: all on two ranks, and every third on four; each form and option on both."""
    cases = [*GATHERS, *REDUCTIONS]
    some = [*ONE_OF_EACH, *WITH_OPTIONS, *cases[::3]]
    return cases if THOROUGH or world_size == 2 else [case for case in cases if case in some]


def _reference_ranks(rank: int, world_size: int) -> dict[str, Any]:
    world = dist.group.WORLD
    results: dict[str, Any] = _all_problems(rank, world_size, of_ranks(world_size), world.group_name)
    results["hand"] = _hand_problems(rank, world_size)
    results["alone"] = _alone_problems(rank, world_size)
    results["gradients"] = _gradient_problems(rank, world_size)
    results["summed in fp32"] = _summed_problems(rank, world_size)
    return results


def _summed_problems(rank: int, world_size: int) -> list[str]:
    """With a `sum_dtype`, bit for bit what a program does that converts each product: round, convert, add, reduce."""
    found = []
    for case in (case for case in SUMMED_IN_FP32 if not case.scale):
        x = _scatter_inputs(case, rank)
        biases = [torch.zeros(case.n) if bias is None else bias for bias in x["biases"]]
        terms = zip(x["a_parts"], x["b_parts"], biases, strict=True)
        products = [torch.addmm(bias.to(a.dtype), a.flatten(0, -2), b) for a, b, bias in terms]
        each, rest = case.factors[: len(products)] or [1.0] * len(products), case.factors[len(products) :]
        terms = [product.float() * factor for product, factor in zip(products, each, strict=True)]
        total = sum(terms[1:], terms[0]).view(*case.lead, case.n)
        total = (total + x["term"] if case.added else total) * (rest[0] if rest else 1)
        dist.all_reduce(total)
        total = total / world_size if case.reduce_op == "avg" else total
        wanted = total if case.dim is None else total.chunk(world_size, case.dim)[rank]
        op, args = _call(case, rank, world_size, dist.group.WORLD.group_name)
        error = _relative_error(op(*args), wanted)
        if error > 2**-22:  # of fp32 sums in another order, and far less than a product's rounding
            found.append(f"{case}: relative error {error:.2g}")
    return found


def _hand_problems(rank: int, world_size: int) -> list[str]:
    """The Python functions of `ops` and `reference`, under every spelling of a group, equal the ops bit for bit."""
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    world = dist.group.WORLD
    found = []
    for spelling in (world.group_name, world, mesh, mesh["tp"], (mesh, 0), (mesh, "tp")):
        for module in (ops, reference):
            for case in (*ONE_OF_EACH, *WITH_OPTIONS):
                op, args = _call(case, rank, world_size, world.group_name)
                expected, actual = (
                    _flat_tensors(op(*args)),
                    _flat_tensors(_by_hand(module, case, rank, world_size, spelling)),
                )
                if not all(torch.equal(x, y) for x, y in zip(expected, actual, strict=True)):
                    found.append(f"{module.__name__} with group {spelling}: {case} differs")
    return found


def _by_hand(module: Any, case: Gather | Scatter, rank: int, size: int, group: Any) -> Any:
    inputs = _gather_inputs(case, rank, size) if isinstance(case, Gather) else _scatter_inputs(case, rank)
    return _by_hand_with(module, case, inputs, group)


def _by_hand_with(module: Any, case: Gather | Scatter, x: dict[str, Any], group: Any) -> Any:
    names = ("a_scale" if isinstance(case, Gather) else "a_scales", "b_scales")
    scaled = {"out_dtype": case.out_dtype, **{name: x[name] for name in names}} if case.scale else {}
    if isinstance(case, Gather):
        options = {"gather_dim": case.dim, "group": group, "biases": x["biases"], "return_a_full": case.full, **scaled}
        if case.scale:
            options["gather_a_scale"] = case.scale == "sharded"
        return module.all_gather_matmul(x["a_shard"], x["bs"], **options)
    options = {
        "group": group,
        "biases": x["biases"],
        "reduce_op": case.reduce_op,
        "sum_dtype": case.sum_dtype,
        "added": x.get("term"),
        "factors": case.factors or None,
        **scaled,
    }
    if case.dim is None:
        return module.matmul_all_reduce(x["a_parts"], x["b_parts"], **options)
    return module.matmul_reduce_scatter(x["a_parts"], x["b_parts"], scatter_dim=case.dim, **options)


def _alone_problems(rank: int, world_size: int) -> list[str]:
    """A group of one rank: nothing to communicate, and still fresh memory."""
    groups = [dist.new_group([other]) for other in range(world_size)]
    cases = [GATHERS[2], GATHERS[6], GATHERS[12], SCATTERS[3], SCATTERS[5], ALL_REDUCES[2]]
    found: list[str] = []
    for case in cases:
        op, args = _call(case, 0, 1, groups[rank])  # the object: what compile_on_one_rank passes
        found += _problems(case, op, args, _truth(case, 0, 1))
    single, matrix = torch.randn(4, 8), torch.randn(8, 6)
    out = ops.matmul_reduce_scatter(single, matrix, scatter_dim=0, group=groups[rank], biases=matrix[0, :6])
    return found if torch.allclose(out, single @ matrix + matrix[0, :6], atol=1e-5) else [*found, "single tensors"]


# --- gradients -----------------------------------------------------------------------------------------------------
GRADIENT_GATHERS = [
    Gather((4,), 8, (6,), 0, FP64),
    Gather((4,), 8, (6, 10, 4), 0, FP64, "vrv", full=True),
    Gather((2, 4), 8, (6, 10), 1, FP64, full=True),
    Gather((2, 4), 8, (6, 10), 2, FP64, "rr"),
]
GRADIENT_SCATTERS = [
    Scatter((8,), (4,), 12, 0, FP64),
    Scatter((8,), (4, 6), 12, 1, FP64, "vr"),
    Scatter((2, 8), (4, 6), 12, 1, FP64, "vv", "avg"),
    Scatter((2, 8), (4,), 12, 2, FP64, reduce_op="avg"),
    Scatter((3,), (4,), 12, None, FP64),
    Scatter((2, 3), (4, 6), 12, None, FP64, "vr", "avg"),
    Scatter((2, 8), (4, 6), 12, 1, BF16, "vv", "avg", sum_dtype=FP32),
    Scatter((2, 3), (4,), 12, None, FP16, sum_dtype=FP32),
    Scatter((2, 8), (4, 6), 12, 1, FP64, "vv", "avg", added=True),
    Scatter((8,), (4,), 12, 0, BF16, sum_dtype=FP32, added=True),
    Scatter((2, 3), (4,), 12, None, FP64, added=True),
    Scatter((2, 3), (4,), 12, None, BF16, reduce_op="avg", sum_dtype=FP32, added=True),
    Scatter((2, 8), (4,), 12, 1, FP64, "v", factors=(-0.5,)),
    Scatter((2, 8), (4, 6), 12, 1, FP64, "vv", "avg", factors=(2.0, -1.0)),
    Scatter((8,), (4, 6), 12, 0, BF16, sum_dtype=FP32, added=True, factors=(0.5, 0.5, -2.0)),
    Scatter((8,), (4,), 12, 0, FP64, added=True, factors=(-2.0,)),
    Scatter((2, 3), (4, 6), 12, None, FP64, added=True, factors=(1.0, 0.5, 2.0)),
]


def _leaves(inputs: dict[str, Any], kinds: str = "abt") -> list[Tensor]:
    """Make the inputs whose names begin with these letters require gradients ("b": weights, biases; "t": the term)."""
    return [leaf.requires_grad_() for name in inputs if name[0] in kinds for leaf in _flat_tensors(inputs[name])]


def _loss(outs: list[Tensor], rank: int) -> Tensor:
    """A different weight for every element, on every rank; of many results only every second has a gradient."""
    used = outs[::2] if len(outs) > 2 else outs
    return torch.stack(
        [(out * _random((rank, 9, i), tuple(out.shape), FP64)).sum() for i, out in enumerate(used)]
    ).sum()


def _true_gradients(case: Gather | Scatter, rank: int, world_size: int) -> list[Tensor]:
    """Differentiate the whole program of all ranks in one process."""
    gathers = isinstance(case, Gather)
    everyone = [_gather_inputs(case, r, world_size) if gathers else _scatter_inputs(case, r) for r in range(world_size)]
    leaves = [_leaves(inputs) for inputs in everyone]
    if gathers:
        a_full = torch.cat([inputs["a_shard"] for inputs in everyone], case.dim)
        results = [[_exact(a_full, b, bias) for b, bias in zip(x["bs"], x["biases"], strict=True)] for x in everyone]
        results = [[*outs, a_full] if case.full else outs for outs in results]
    else:
        parts = [zip(x["a_parts"], x["b_parts"], x["biases"], strict=True) for x in everyone]
        products = [[_exact(*part) for part in rank_parts] for rank_parts in parts]
        sums = [_true_sum(case, mine, x.get("term")) for mine, x in zip(products, everyone, strict=True)]
        total = sum(sums, torch.zeros((), dtype=FP64))
        total = total / world_size if case.reduce_op == "avg" else total
        shards = [total] * world_size if case.dim is None else total.chunk(world_size, case.dim)
        results = [[shard] for shard in shards]
    torch.stack([_loss(outs, r) for r, outs in enumerate(results)]).sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves[rank]]


def _gradients(case: Gather | Scatter, rank: int, world_size: int, kinds: str) -> list[Tensor]:
    group = dist.group.WORLD.group_name
    inputs = _gather_inputs(case, rank, world_size) if isinstance(case, Gather) else _scatter_inputs(case, rank)
    leaves = _leaves(inputs, kinds)
    make_call: Any = _gather_call if isinstance(case, Gather) else _scatter_call
    op, args = make_call(case, inputs, world_size, group)
    outs = op(*args)
    _loss(outs if isinstance(outs, list) else [outs], rank).backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def _gradient_problems(rank: int, world_size: int) -> list[str]:
    found = []
    for case in (*GRADIENT_GATHERS, *GRADIENT_SCATTERS):
        truth = _true_gradients(case, rank, world_size)
        count_a = 1 if isinstance(case, Gather) else len(case.ks)
        end = len(truth) - (isinstance(case, Scatter) and case.added)
        of_kinds = {"abt": truth, "a": truth[:count_a], "b": truth[count_a:end], "t": truth[end:]}
        for kinds, expected in of_kinds.items():
            if not expected:
                continue
            actual = _gradients(case, rank, world_size, kinds)
            errors = [(x - y).abs().max().item() for x, y in zip(actual, expected, strict=True)]
            largest = max(gradient.abs().max().item() for gradient in truth)
            if max(errors) > (1e-10 if case.dtype is FP64 else 2e-2 * largest):
                found.append(f"{case}: gradients of {kinds} are off by {errors}")
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["2ranks", "4ranks"])
def reference_results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, _reference_ranks)


@pytest.mark.ranks
def test_ops_equal_fp64_truth_and_their_fakes(reference_results: list[dict[str, Any]]) -> None:
    for result in reference_results:
        wrong = {str(case): result[str(case)] for case in of_ranks(len(reference_results)) if result[str(case)]}
        assert not wrong


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["hand", "alone", "gradients", "summed in fp32"])
def test_programs_of_all_ranks(reference_results: list[dict[str, Any]], what: str) -> None:
    assert [result[what] for result in reference_results] == [[]] * len(reference_results)


# --- torch.library ------------------------------------------------------------------------------------------------
# torch's schema test compares inputs with allclose, which has no fp8; `_problems` finds changed inputs instead.
FP8_TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


#: In the default profile: each form, each option, and each option of each form beside another one.
OF_LIBRARY = range(6, len(GRADIENT_SCATTERS)) if THOROUGH else (6, 8, 11, 13, 15)


def _library_ranks(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.group.WORLD.group_name
    results = {}
    for case in (*ONE_OF_EACH, *WITH_OPTIONS):
        op, args = _call(case, rank, world_size, group)
        tests: dict[str, Any] = {"test_utils": FP8_TESTS} if case.scale else {}
        results[str(case)] = torch.library.opcheck(op.default, args, **tests)
    for case in (GRADIENT_GATHERS[1], *(GRADIENT_SCATTERS[number] for number in (2, 5, *OF_LIBRARY))):
        inputs = _gather_inputs(case, rank, world_size) if isinstance(case, Gather) else _scatter_inputs(case, rank)
        _leaves(inputs)
        make_call: Any = _gather_call if isinstance(case, Gather) else _scatter_call
        op, args = make_call(case, inputs, world_size, group)
        results[f"gradient of {case}"] = torch.library.opcheck(op.default, args)
        results[f"compiled {case}"] = {"gradients": _compiled_gradients(case, rank, world_size)}
    return results


def _compiled_gradients(case: Gather | Scatter, rank: int, world_size: int) -> str:
    """Forward and backward through torch.compile equal eager."""
    inputs = _gather_inputs(case, rank, world_size) if isinstance(case, Gather) else _scatter_inputs(case, rank)
    leaves = _leaves(inputs)
    torch._dynamo.reset()
    compiled = torch.compile(_by_hand_with, backend="aot_eager", fullgraph=True)
    outs = _flat_tensors(compiled(ops, case, inputs, dist.group.WORLD.group_name))
    _loss(outs, rank).backward()
    eager = _gradients(case, rank, world_size, "abt")
    same = [torch.allclose(leaf.grad, grad) for leaf, grad in zip(leaves, eager, strict=True) if leaf.grad is not None]
    return "SUCCESS" if all(same) and len(same) >= len(leaves) - 2 else f"differ: {same}"


@pytest.mark.ranks
def test_opcheck_and_compiled_gradients() -> None:
    for result in run_ranks(2, _library_ranks):
        assert {(name, test): "SUCCESS" for name, tests in result.items() for test in tests} == {
            (name, test): outcome for name, tests in result.items() for test, outcome in tests.items()
        }


def test_tags_keep_strides() -> None:
    for name in ops.OPS:
        assert torch.Tag.needs_exact_strides in getattr(torch.ops.asynctp, name).default.tags


# --- one process, a fake group of four ranks ------------------------------------------------------------------------
X, W, V, FULL = torch.zeros(3, 8, 16), torch.zeros(16, 12), torch.zeros(12), torch.zeros(3, 8, 12)


# --- which implementation runs --------------------------------------------------------------------------------------
@pytest.fixture
def fresh_config() -> Iterator[None]:
    ops.refresh()
    yield
    ops.refresh()


def test_implementation_is_named(fresh_config: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCTP_CPU_IMPLEMENTATION", raising=False)
    assert (ops.implementation("cpu"), ops.implementation("cuda")) == ("sequential", "chosen per call")
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
    assert ops.implementation("cpu") == "sequential", "the environment is read once"
    ops.refresh()
    assert (ops.implementation("cpu"), ops.implementation("cuda")) == ("interpreted", "chosen per call")
    with pytest.raises(ValueError, match="device_type='xpu'"):
        ops.implementation("xpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "number of arguments=0 is not valid; there must be at least the first 7 of a_parts, b_parts, biases"),
        ([X, W], "number of arguments=2 is not valid"),
        ([[], [], [], "sum", 0, 4, "tp"], "number of operands=0 is not valid; it must be at least 1"),
    ],
)
def test_a_call_that_cannot_be_explained(arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.explain("matmul_reduce_scatter", *arguments)


def _interpreted_ranks(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {"implementation": ops.implementation("cpu")}
    return results | _all_problems(rank, world_size, [*GATHERS, *REDUCTIONS], dist.group.WORLD.group_name)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are spawned now run the Triton kernels in the interpreter."""
    pytest.importorskip("asynctp_kernels", reason="asynctp_kernels is not importable (is triton installed?)")
    if fault := interpreter_fault():
        pytest.skip(fault)
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.ranks
def test_interpreted_kernels_equal_fp64_truth(interpreted: None) -> None:
    for result in run_ranks(2, _interpreted_ranks):
        assert result.pop("implementation") == "interpreted"
        assert {case: found for case, found in result.items() if found} == {}


def _in_place(rank: int, world_size: int) -> dict[str, bool]:
    group = dist.group.WORLD.group_name
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
        out = torch.ops.asynctp.matmul_all_reduce([x], [w], [None], "sum", group)
    given = summed.call_args.args[0]
    kept = torch.ones(4, 6)
    total = plain_collectives.all_reduce(kept, "sum", group)
    return {
        "the matmul's own memory is summed up": given.data_ptr() == out.data_ptr(),
        "once": summed.call_count == 1,
        "right": bool((out == 8 * world_size).all()),
        "a tensor of the caller's stays": bool((kept == 1).all() and (total == world_size).all()),
    }


@pytest.mark.ranks
def test_an_all_reduce_without_overlap_copies_no_matmul() -> None:
    for found in run_ranks(2, _in_place):
        assert all(found.values()), found


# --- CUDA: the sequential program over NCCL ---------------------------------------------------------------------------
# torch._scaled_mm wants multiples of 16.
CUDA_SCALED: list[Gather | Scatter] = [
    Gather((16,), 32, (16,), 0, E4M3, "v", scale="tensorwise"),
    Gather((3, 16), 32, (16, 48), 1, E4M3, "rv", True, "sharded"),
    Gather((3, 16), 32, (16,), 1, E4M3, "v", scale="replicated", out_dtype=FP32),
    Gather((3, 16), 32, (16,), 2, E4M3, scale="tensorwise", out_dtype=FP16),
    Gather((16,), 32, (16, 32), 0, E4M3, scale="mixed"),
    Scatter((16,), (32,), 16, 0, E4M3, "r", scale="tensorwise", out_dtype=FP16),
    Scatter((3, 16), (32, 64), 32, 1, E4M3, "v-", "avg", "rowwise"),
    Scatter((4, 16), (32, 64), 32, 1, E4M3, scale="mixed", out_dtype=FP32),
    Scatter((3, 16), (32,), 32, 2, E4M3, "v", "sum", "rowwise", FP32),
    Scatter((3, 16), (32, 64), 32, None, E4M3, "v-", "avg", "rowwise"),
    Scatter((7,), (32,), 16, None, E4M3, scale="tensorwise"),
    Gather((16,), 640, (16, 144), 0, E4M3, "v-", True, "sharded", blocks="1x128 x 128x128"),
    Gather((2, 128), 256, (16,), 1, E4M3, "v", scale="replicated", out_dtype=FP32, blocks="128x128 x 1x128"),
    Scatter((3, 16), (256, 640), 144, 1, E4M3, "v-", "avg", "rowwise", blocks="1x128 x 128x128"),
    Scatter((3, 16), (256,), 32, None, E4M3, scale="rowwise", blocks="1x128 x 1x128"),
]


def _cuda_ranks(rank: int, world_size: int) -> dict[str, list[str]]:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl").group_name
    results = {}
    for case in [case for case in (*GATHERS, *REDUCTIONS) if not case.scale] + CUDA_SCALED:
        op, args = _call(case, rank, world_size, group)
        args = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.cuda(), args)
        results[str(case)] = _problems(case, op, args, _truth(case, rank, world_size))
    return results


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_fp64_truth() -> None:
    for result in run_ranks(min(torch.cuda.device_count(), 4), _cuda_ranks):
        assert {case: found for case, found in result.items() if found} == {}
