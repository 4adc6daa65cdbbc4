"""Matmuls of cuBLASLt, without a GPU: see `cublaslt_emulated`. On one, `tests/gpu/few_rows.py` has bits and times."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cublaslt_emulated
import cuda_emulated
from asynctp_kernels.cuda.choose.tiles import CUBLAS_FROM, cublas_is_faster
from asynctp_kernels.cuda.choose.wire import INVARIANT
from asynctp_kernels.cuda.gemm import cublaslt, own_matmul
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.cublaslt import Matmul, Matmuls, Refused, alike_matmuls, free_matmuls
from cublaslt_emulated import Algorithm, CublasLt
from cuda_stubs import FP8, Launched, Machine, Multiplied, expected_products, gather_call, machine, scatter_call
from plan_runs import RANK, ROWWISE, TENSORWISE, WORLD, gather_plan, run_gather, run_scatter, scatter_plan
from test_plans_edited import again, elsewhere
from torch import Tensor

BF16, STREAM = torch.bfloat16, 7
CUTS = Algorithm(1, parts=4, scheme=2)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[CublasLt]:
    yield from cublaslt_emulated.emulate(monkeypatch)


def operands(
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype = BF16,
    k_major: bool = True,
    bias: bool = False,
    out: torch.dtype = BF16,
    by_rows: bool = False,
) -> Matrices:
    """Examples of a call, of whole numbers: sums of them are exact."""
    a = torch.randint(-2, 3, (m, k)).to(dtype)
    b = torch.randint(-2, 3, (n, k)).to(dtype).t() if k_major else torch.randint(-2, 3, (k, n)).to(dtype)
    scales = [torch.tensor([scale]) for scale in own_matmul._TELLING] if dtype.itemsize == 1 else []
    if by_rows:
        scales = [torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5]
    biases = [torch.ones(n).to(out) if bias else None]
    return Matrices(a, [b], [torch.empty(m, n, dtype=out)], *(scales[:1] or [None]), scales[1:], biases)


def wanted(call: Matrices) -> Tensor:
    a, (b,), (out,), a_scale, b_scales, (bias,) = call
    made = (a.double() @ b.double()).float()
    if a_scale is not None:
        made = made * (a_scale * b_scales[0]) if a_scale.numel() == 1 else made * a_scale * b_scales[0]
    return (made if bias is None else made + bias.float()).to(out.dtype)


KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, columns of B side by side, bias": {"k_major": False, "bias": True},
    "fp16": {"dtype": torch.float16, "out": torch.float16},
    "fp8": {"dtype": FP8},
    "fp8 in float32": {"dtype": FP8, "out": torch.float32},
    "fp8, scales of rows": {"dtype": FP8, "by_rows": True},
    "fp8, scales of rows, bias": {"dtype": FP8, "by_rows": True, "bias": True},
    "one column": {"n": 1},
    "one of K": {"k": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_matmul_is_described_as_it_lies(kind: str, library: CublasLt) -> None:
    call = operands(**{"m": 24, "k": 32, "n": 16, **KINDS[kind]})
    made = free_matmuls(call, True) or alike_matmuls(call, True, lambda i, one: True)
    assert made is not None
    made(STREAM, call)
    assert torch.equal(call.outs[0], wanted(call))


def test_one_row_may_have_a_scale_without_dimensions(library: CublasLt) -> None:
    call = operands(1, 32, 16, FP8, by_rows=True)
    call = call._replace(a_scale=call.a_scale.reshape(()))  # type: ignore[union-attr]
    made = free_matmuls(call, True)
    assert made is not None
    made(STREAM, call)
    assert torch.equal(call.outs[0], wanted(call))


def test_nothing_that_cuts_k_or_needs_memory_is_taken(library: CublasLt) -> None:
    """cuBLASLt is asked for none such, and what it gives is looked at."""
    library.able = lambda workspace, schemes: [CUTS, Algorithm(2, workspace=4), Algorithm(3, scheme=1), Algorithm(4)]
    call = operands(256, 64, 32)
    (kind,) = cublaslt.kinds(call, True)
    made = Matmul(kind)
    assert [each[0] for each in made.algorithms] == [4]
    assert not made.is_free
    free, uncut = library.asked
    assert (free["attribute", 1], uncut["attribute", 1], uncut["attribute", 3]) == (32 << 20, 0, 0)
    assert [uncut["attribute", each] for each in (5, 6, 7, 8)] == [16] * 4
    library.able = lambda workspace, schemes: [CUTS]
    with pytest.raises(Refused, match="does not cut K"):
        Matmul(kind)


def test_what_was_made_is_destroyed(library: CublasLt) -> None:
    (kind,) = cublaslt.kinds(operands(256, 64, 32), True)
    cublaslt._handle(0)
    before = len(library.objects)
    made = Matmul(kind._replace(device=0))
    del made
    created = list(library.objects.values())[before:]
    assert len(created) == 6  # a description, three layouts and two preferences
    assert all("destroyed" in each for each in created)


@pytest.mark.parametrize("change", ["rows of one", "blocks", "float32", "scaled bf16", "no stride of 1"])
def test_what_it_does_not_take(change: str, library: CublasLt) -> None:
    of_fp8 = change in ("rows of one", "blocks")
    call = operands(*((2, 256, 16) if of_fp8 else (16, 32, 16)), FP8 if of_fp8 else BF16)
    if change == "rows of one":
        call = call._replace(a_scale=torch.ones(2, 1))
    elif change == "blocks":
        call = call._replace(a_scale=torch.ones(1, 2), b_scales=[torch.ones(1, 16)])
    elif change == "float32":
        call = call._replace(a=call.a.float(), bs=[b.float() for b in call.bs])
    elif change == "scaled bf16":
        call = call._replace(a_scale=torch.ones(1), b_scales=[torch.ones(1)])
    else:
        call = call._replace(bs=[torch.ones(32, 32, dtype=BF16)[:, ::2]])
    with pytest.raises(Refused):
        cublaslt.kinds(call, True)
    assert free_matmuls(call, True) is None


def test_a_free_matmul_is_one_that_cublas_makes_so(library: CublasLt) -> None:
    """Where it would cut K it has the time to gain: that is left to it. So is what may be summed in float16."""
    call = operands(256, 64, 32)
    assert isinstance(free_matmuls(call, True), Matmuls)
    library.able = lambda workspace, schemes: [CUTS] if workspace else [Algorithm(2)]
    assert free_matmuls(call, True) is None
    library.able = lambda workspace, schemes: [Algorithm(1)]
    assert free_matmuls(operands(256, 64, 32, torch.float16, out=torch.float16), True) is None
    library.codes["cublasLtMatmulDescCreate"] = 3
    assert free_matmuls(call, True) is None


def test_scales_of_rows_before_cublas_12_9_are_left_to_torch(
    library: CublasLt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cuBLASLt that does not know their mode refuses it."""
    call = operands(256, 64, 32, FP8, by_rows=True)
    assert free_matmuls(call, True) is not None
    assert alike_matmuls(call, True, lambda i, made: True) is None
    assert "may take longer: cuBLAS's bits are not compared where scales are of rows" in caplog.text
    known, unknown = library.cublasLtMatmulDescSetAttribute, cublaslt_emulated.MODES
    monkeypatch.setattr(
        library,
        "cublasLtMatmulDescSetAttribute",
        lambda made, which, *value: 7 if which in unknown else known(made, which, *value),
    )
    assert free_matmuls(call, True) is None


def test_one_launch_for_several_is_ours_where_that_saves_waves() -> None:
    for widths, faster in (((1536,), True), ((1024, 256, 256), False), ((3584, 3584), True), ((512, 136), False)):
        assert cublas_is_faster(2048, widths, 132) is faster
    assert not cublas_is_faster(CUBLAS_FROM, (1536,), 132)


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch for CPUs."""
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    cublaslt.library.cache_clear()
    assert free_matmuls(operands(256, 64, 32), True) is None


# --- the bits ------------------------------------------------------------------------------------------------------
class Ours:
    """A kernel that sums as `CublasLt` does."""

    def __init__(self, *call: Any) -> None:
        pass

    def __call__(self, stream: int, call: Matrices) -> None:
        call.outs[0].copy_(wanted(call))


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_matmul, "_kernel", Ours)


def compared(call: Matrices) -> Matmuls | None:
    return alike_matmuls(call, True, lambda i, made: own_matmul._is_alike(i, made, call, True))


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"dtype": FP8}], ids=str)
def test_the_first_algorithm_that_is_alike_is_taken(kind: dict[str, Any], library: CublasLt) -> None:
    library.able = lambda workspace, schemes: [Algorithm(1, error=2**-12), Algorithm(2), Algorithm(3)]
    call, state = operands(136, 64, 32, **kind), torch.get_rng_state()
    made = compared(call)
    assert made is not None
    assert [one.algorithm[0] for one in made.matmuls] == [2]
    count = len(library.log)
    assert compared(call) is not None
    assert len(library.log) == count, "once for each kind"
    assert torch.equal(torch.get_rng_state(), state), "the program's random numbers stay"


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"dtype": torch.float16, "out": torch.float16}], ids=str)
def test_a_short_sum_in_another_order_is_other_bits(options: dict[str, Any], library: CublasLt) -> None:
    """Random numbers do not tell: none of a thousand sums is rounded to another value."""
    library.able = lambda workspace, schemes: [Algorithm(1, rounds=True), Algorithm(2)]
    made = compared(operands(136, 32, 8, **options))
    assert made is not None
    assert [one.algorithm[0] for one in made.matmuls] == [2]


@pytest.mark.usefixtures("ours")
def test_other_bits_are_told_and_not_taken(library: CublasLt, caplog: pytest.LogCaptureFixture) -> None:
    library.able = lambda workspace, schemes: [Algorithm(1, error=2**-12)]
    counts = []
    for _ in range(2):
        assert compared(operands(136, 64, 32)) is None
        counts.append(len(library.log))
    assert counts[1] == counts[0] > 0
    assert "cuBLAS has other bits" in caplog.text


@pytest.mark.usefixtures("ours")
def test_a_program_of_any_number_of_rows_is_told_once(library: CublasLt, caplog: pytest.LogCaptureFixture) -> None:
    """Each number has a plan of its own. Another reason is told, too."""
    library.able = lambda workspace, schemes: [Algorithm(1, error=2**-12)]
    for rows in (136, 144, 152):
        assert compared(operands(rows, 64, 32)) is None
        assert alike_matmuls(operands(rows, 64, 32, FP8, by_rows=True), True, lambda i, made: True) is None
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2
    assert "cuBLAS has other bits" in told[0]
    assert "scales are of rows" in told[1]


@pytest.mark.parametrize("order", ["(a s) t", "(a t) s"])
def test_scales_that_are_two_factors_are_other_bits(
    order: str, library: CublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few numbers differ: in bfloat16 one of 65,000 or so."""

    class TwoFactors(Ours):
        def __call__(self, stream: int, call: Matrices) -> None:
            a, (b,), (out,), a_scale, (b_scale,), _ = call
            first, second = (a_scale, b_scale) if order == "(a s) t" else (b_scale, a_scale)
            out.copy_(((a.float() @ b.float()) * first * second).to(out.dtype))

    monkeypatch.setattr(own_matmul, "_kernel", TwoFactors)
    for dtype in (BF16, torch.float16, torch.float32):
        call = operands(136, 64, 32, FP8, out=dtype)
        (kind,) = cublaslt.kinds(call, True)
        assert not own_matmul._is_alike(0, Matmul(kind), call, True)


@pytest.mark.usefixtures("ours")
def test_nothing_is_compared_in_a_capture(
    library: CublasLt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host would wait; afterwards it is."""
    call = operands(136, 64, 32)
    with monkeypatch.context() as patch:
        patch.setattr(cublaslt.gpu, "capturing", lambda: True)
        assert compared(call) is None
        assert not library.log
    assert "in the capture of a CUDA graph" in caplog.text
    assert compared(call) is not None


# --- plans ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def here(library: CublasLt, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(own_matmul, "_is_alike", lambda *_: True)
    with machine(RANK, WORLD) as made:
        cuda_emulated.emulate(made)
        made.edits = True
        yield made


MANY = 4 * CUBLAS_FROM
GATHERS = (
    {"ns": (512, 136)}, {"bias": True}, {**TENSORWISE}, {"shard": (2, CUBLAS_FROM), "dim": 1},
    {"ns": (512, 144), **ROWWISE, "travels": True}, {"shard": (2, CUBLAS_FROM), "dim": 1, **ROWWISE},
)  # fmt: skip


@pytest.mark.parametrize("accord", [0, INVARIANT], ids=["free", "batch-invariant"])
@pytest.mark.parametrize("options", GATHERS, ids=str)
def test_direct_gather(options: dict[str, Any], accord: int, here: Machine, library: CublasLt) -> None:
    """One launch of a kernel that moves, and a matmul for each B after it: of new memory in each call."""
    call = replace(gather_call(**{"shard": (MANY // 4,), "k": 64, "ns": (512,), **options}), accord=accord)
    plan, memory = gather_plan(call, here, "direct"), []
    if accord and (len(call.bs) > 1 or options.get("scales") == "row"):  # in one wave, instead of two; not compared
        assert not isinstance(plan.kernel, Matmuls)
        return
    assert isinstance(plan.kernel, Matmuls)
    for number in range(4):
        call = replace(call, bs=[again(b) for b in call.bs], b_scales=[again(each) for each in call.b_scales])
        library.log.clear()
        outs, full, a_scale = run_gather(call, here, plan)
        memory.append((outs, call))
        for out, expected in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(expected.shape), expected)
        assert here.memory.launched == number
        assert len(library.log) == len(call.bs)
    assert [type(entry) for entry in here.graphs[0]] == [Launched, *[Multiplied] * len(call.bs)]


@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {**TENSORWISE}, {**ROWWISE, "bias": True}, {"reduce_op": "avg"}], ids=str
)
def test_direct_scatter(options: dict[str, Any], here: Machine) -> None:
    call = scatter_call(**{"rows": (MANY,), "ks": (64,), "n": 512, **options})
    plan, memory = scatter_plan(call, here, "direct"), []
    for number in range(4):
        call = elsewhere(call)
        out, expected, mine = run_scatter(call, here, plan)
        memory.append((out, mine, call))
        assert torch.equal(out, expected)
        assert here.memory.launched == number
    assert [type(entry) for entry in here.graphs[0]] == [Multiplied, Launched]


@pytest.mark.parametrize("implementation", ["decomposed", "sequential"])
def test_batch_invariant_gather(implementation: str, here: Machine, library: CublasLt) -> None:
    call = replace(gather_call((CUBLAS_FROM + 8,), 64, (512,)), accord=INVARIANT)
    plan = gather_plan(call, here, implementation)
    for _ in range(2):
        library.log.clear()
        (out,), full, a_scale = run_gather(call, here, plan)
        (expected,) = expected_products(call, full, a_scale)
        assert torch.equal(out, expected)
        assert len(library.log) == (4 if implementation == "decomposed" else 1)


@pytest.mark.parametrize("options", [{"ks": (64, 32)}, {"added": True}], ids=str)
def test_batch_invariant_sum(options: dict[str, Any], here: Machine, library: CublasLt) -> None:
    call = replace(scatter_call(**{"rows": (MANY,), "ks": (64,), "n": 512, **options}), accord=INVARIANT)
    out, expected, _ = run_scatter(call, here, scatter_plan(call, here, "direct"))
    assert torch.equal(out, expected)
    assert len(library.log) == len(call.b_parts)


@pytest.mark.parametrize(
    "options", [{"factors": (0.5,)}, {**TENSORWISE, "bias": True}, {"rows": (CUBLAS_FROM,)}], ids=str
)
def test_some_batch_invariant_matmuls_stay_ours(options: dict[str, Any], here: Machine, library: CublasLt) -> None:
    """cuBLAS multiplies by a factor before it rounds, and rounds between scales and bias."""
    call = replace(scatter_call(**{"rows": (MANY,), "ks": (64,), "n": 512, **options}), accord=INVARIANT)
    out, expected, _ = run_scatter(call, here, scatter_plan(call, here, "direct"))
    assert torch.equal(out, expected)
    assert not library.log
