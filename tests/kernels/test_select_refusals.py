"""Refusals of implementations: every reason why a call cannot run by one of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels.cuda import choices
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.select import WHOLE
from asynctp_kernels.cuda.choose.wire import (
    DIRECT,
    PLAIN,
    PULL,
    PUSH,
    TRANSPORTS,
    Wire,
)
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from asynctp_kernels.cuda.gemm import cublas
from asynctp_kernels.cuda.gemm.gemm import NOT_TUNED
from asynctp_kernels.cuda.implementations import IMPLEMENTATIONS
from selections import (
    ALL_REDUCE,
    BF16,
    E5M2,
    FP8,
    FP32,
    GATHER,
    OVERLAPPED,
    SCATTER,
    call_of,
    chosen,
    empty,
    explain,
    explain_all_reduce,
    explain_gather,
    explain_scatter,
    own_reasons,
    problem,
    weight,
)

from asynctp_passes.ops import recipes


# --- refusals ----------------------------------------------------------------------------------------------------
def gather_args(**changes: Any) -> tuple[Any, ...]:
    """Of all_gather_matmul, without the group."""
    given_ = {"a": empty(256, 512), "bs": [weight(512, 512)], "biases": None, "dim": 0, "full": False, **changes}
    biases = given_["biases"] or [None] * len(given_["bs"])
    return given_["a"], given_["bs"], biases, given_["dim"], given_["full"]


def scaled_gather_args(**changes: Any) -> tuple[Any, ...]:
    """Of all_gather_matmul, without the group; scales are the last, by name."""
    defaults = {
        "a": empty(256, 512, dtype=FP8), "bs": [weight(512, 512, FP8)], "biases": [None], "dim": 0, "full": False,
        "a_scale": empty(dtype=FP32), "b_scales": [empty(dtype=FP32)], "travels": False, "out_dtype": BF16,
        "fast": True,
    }  # fmt: skip
    *given_, a_scale, b_scales, travels, out_dtype, fast = {**defaults, **changes}.values()
    scales = {"a_scale": a_scale, "b_scales": b_scales, "gather_a_scale": travels}
    return *given_, {**scales, "out_dtype": out_dtype, "use_fast_accum": fast}


def scatter_args(**changes: Any) -> tuple[Any, ...]:
    """Of matmul_reduce_scatter, without the group."""
    given_ = {"a": [empty(1024, 512)], "bs": [weight(512, 512)], "biases": None, "op": "sum", "dim": 0, **changes}
    biases = given_["biases"] or [None] * len(given_["bs"])
    return given_["a"], given_["bs"], biases, given_["op"], given_["dim"]


def scaled_scatter_args(**changes: Any) -> tuple[Any, ...]:
    """Of matmul_reduce_scatter, without the group; scales are the last, by name."""
    defaults = {
        "a": [empty(1024, 512, dtype=FP8)], "bs": [weight(512, 512, FP8)], "biases": [None], "op": "sum", "dim": 0,
        "a_scales": [empty(dtype=FP32)], "b_scales": [empty(dtype=FP32)], "out_dtype": BF16, "fast": True,
    }  # fmt: skip
    *given_, a_scales, b_scales, out_dtype, fast = {**defaults, **changes}.values()
    return *given_, {"a_scales": a_scales, "b_scales": b_scales, "out_dtype": out_dtype, "use_fast_accum": fast}


def scaled_sum_args(count: int = 2, **changes: Any) -> tuple[Any, ...]:
    """Of matmul_reduce_scatter with several products and scales, without the group."""
    defaults = {
        "a": [empty(1024, 512, dtype=FP8)] * count,
        "bs": [weight(512, 512, FP8)] * count,
        "a_scales": [empty(dtype=FP32)] * count,
        "b_scales": [empty(dtype=FP32)] * count,
        "biases": [None] * count,
    }
    return scaled_scatter_args(**{**defaults, **changes})


def all_reduce_args(**changes: Any) -> tuple[Any, ...]:
    """Of matmul_all_reduce, without the group."""
    a, bs, biases, reduce_op, _ = scatter_args(**changes)
    return a, bs, biases, reduce_op


def scaled_all_reduce_args(**changes: Any) -> tuple[Any, ...]:
    """Of matmul_all_reduce, without the group; scales are the last, by name."""
    *operands, _, scales = scaled_scatter_args(**changes)
    return *operands, scales


ROW_SCALES = {"a_scale": empty(256, 1, dtype=FP32), "b_scales": [empty(1, 512, dtype=FP32)], "travels": True}
NOT_CUBLAS = "cuBLAS does not take"
NOT_IN_GEMM = {"fused": "scales of blocks of the contraction: the GEMM scales a sum once"}


def in_blocks(a: tuple[int, ...], b: tuple[int, int]) -> dict[str, Any]:
    """Scales of blocks that travel, of these shapes."""
    return {"a_scale": empty(*a, dtype=FP32), "b_scales": [empty(*b, dtype=FP32)], "travels": True}


def scattered_in_blocks(a: tuple[int, ...], b: tuple[int, int]) -> dict[str, Any]:
    return {"a_scales": [empty(*a, dtype=FP32)], "b_scales": [empty(*b, dtype=FP32)]}


#: (op, arguments, {who refuses: a part of the reason})
REFUSALS: dict[str, tuple[str, tuple[Any, ...], dict[str, str]]] = {
    "gather": (GATHER, gather_args(), {}),
    "gather n-major": (GATHER, gather_args(bs=[empty(512, 512)]), {}),
    "gather outer": (GATHER, gather_args(a=empty(5, 256, 512), dim=1), {"decomposed": "5 separate row ranges"}),
    "gather outer of few": (GATHER, gather_args(a=empty(4, 256, 512), dim=1), {}),
    "gather outer of 1": (GATHER, gather_args(a=empty(1, 256, 512), dim=1), {}),
    "gather columns": (
        GATHER,
        gather_args(a=empty(256, 128), dim=-1),
        {"decomposed": "the gathered dim is the contraction dim", "fused": "the gathered dim is the contraction dim"},
    ),
    "gather nothing": (
        GATHER,
        gather_args(a=empty(0, 512)),
        dict.fromkeys(("fused", "decomposed", "direct"), "nothing"),
    ),
    "gather much": (GATHER, gather_args(a=empty(16640, 512)), {}),
    "gather few rows": (GATHER, gather_args(a=empty(2, 512)), {"fused": "a row of A is longer than a chunk"}),
    "gather five": (GATHER, gather_args(bs=[weight(512, 512)] * 5), {"fused": "5 matmuls, more than 4"}),
    "gather fp32": (
        GATHER,
        gather_args(a=empty(256, 512, dtype=FP32), bs=[weight(512, 512, FP32)]),
        {"fused": "fp32 operands"},
    ),
    "gather odd K": (
        GATHER,
        gather_args(a=empty(256, 508), bs=[empty(512, 512)[:, :508].t()]),
        {"fused": "an A whose rows"},
    ),
    "gather odd N": (GATHER, gather_args(bs=[weight(512, 508)]), {"fused": "508 columns: TMA needs"}),
    "gather wide B": (GATHER, gather_args(bs=[empty(512, 1024)[:, ::2]]), {"fused": r"strides (1024, 2)"}),
    "gather odd pitch": (GATHER, gather_args(bs=[empty(512, 516)[:, :512].t()]), {"fused": "strides (1, 516)"}),
    "gather both orders": (
        GATHER,
        gather_args(bs=[weight(512, 512), empty(512, 512)]),
        {"fused": "both memory orders"},
    ),
    "gather some biases": (
        GATHER,
        gather_args(bs=[weight(512, 512)] * 2, biases=[None, empty(512)]),
        {"fused": "for some matmuls only"},
    ),
    "scaled gather": (GATHER, scaled_gather_args(), {}),
    "scaled gather of rows": (GATHER, scaled_gather_args(**ROW_SCALES), {}),
    "scaled gather of rows to fp16": (
        GATHER,
        scaled_gather_args(**ROW_SCALES, out_dtype=torch.float16),
        {"decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS},
    ),
    "scaled gather n-major": (
        GATHER,
        scaled_gather_args(bs=[empty(512, 512, dtype=FP8)]),
        {"decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS, "fused": "an fp8 B whose columns are contiguous"},
    ),
    "scaled gather to fp32": (GATHER, scaled_gather_args(out_dtype=FP32), {}),
    "scaled gather of both scales": (
        GATHER,
        scaled_gather_args(
            bs=[weight(512, 512, FP8)] * 2, b_scales=[empty(dtype=FP32), empty(1, 512, dtype=FP32)], biases=[None] * 2
        ),
        {"fused": "tensorwise and rowwise B scales"},
    ),
    "gather B of one column": (
        GATHER,
        gather_args(bs=[empty(512, 1).expand(512, 512)]),
        {"fused": "strides (1, 0), which overlaps itself"},
    ),
    "gather 2 GiB of each rank": (
        GATHER,
        gather_args(a=empty(1 << 21, 512)),
        {},
    ),
    "scaled gather of e5m2": (
        GATHER,
        scaled_gather_args(a=empty(256, 512, dtype=E5M2), bs=[weight(512, 512, E5M2)]),
        {"decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS},
    ),
    "scaled gather of e5m2 and e4m3": (GATHER, scaled_gather_args(a=empty(256, 512, dtype=E5M2)), {}),
    "scaled gather of e5m2 rows": (
        GATHER,
        scaled_gather_args(a=empty(256, 512, dtype=E5M2), **ROW_SCALES),
        {"decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS},
    ),
    "scaled gather of 1x128 and 128x128": (
        GATHER,
        scaled_gather_args(**in_blocks((256, 4), (4, 4))),
        NOT_IN_GEMM,
    ),
    "scaled gather of 1x128 and 1x128": (
        GATHER,
        scaled_gather_args(**in_blocks((256, 4), (4, 512))),
        NOT_IN_GEMM,
    ),
    "scaled gather of 128x128 and 1x128": (
        GATHER,
        scaled_gather_args(**in_blocks((2, 4), (4, 512))),
        NOT_IN_GEMM,
    ),
    "scaled gather of blocks of one depth": (
        GATHER,
        scaled_gather_args(
            a=empty(256, 128, dtype=FP8),
            bs=[weight(128, 512, FP8)],
            **in_blocks((256, 1), (1, 4)),
        ),
        NOT_IN_GEMM,
    ),
    "scaled gather of blocks to fp32": (
        GATHER,
        scaled_gather_args(**in_blocks((256, 4), (4, 4)), out_dtype=FP32),
        NOT_IN_GEMM,
    ),
    "scaled gather of blocks, e5m2": (
        GATHER,
        scaled_gather_args(a=empty(256, 512, dtype=torch.float8_e5m2), **in_blocks((256, 4), (4, 4))),
        {**NOT_IN_GEMM, "decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS},
    ),
    "scaled gather of blocks, odd rows": (
        GATHER,
        scaled_gather_args(a=empty(250, 512, dtype=FP8), **in_blocks((250, 4), (4, 4))),
        {**NOT_IN_GEMM, "decomposed": "250 rows with scales of 1x128 blocks: not a multiple of 4"},
    ),
    "scaled gather of one block a rank": (
        GATHER,
        scaled_gather_args(a=empty(128, 128, dtype=FP8), bs=[weight(128, 512, FP8)], **in_blocks((1, 1), (1, 512))),
        NOT_IN_GEMM,
    ),
    "scaled gather of one row a rank": (
        GATHER,
        scaled_gather_args(a=empty(1, 128, dtype=FP8), bs=[weight(128, 512, FP8)], **in_blocks((1, 1), (1, 512))),
        {"fused": "a row of A is longer than a chunk"},
    ),
    "scaled gather of blocks, outer": (
        GATHER,
        scaled_gather_args(a=empty(2, 256, 512, dtype=FP8), **in_blocks((2, 256, 4), (4, 4)), dim=1),
        NOT_IN_GEMM,
    ),
    "scaled gather of blocks, outer of odd rows": (
        GATHER,
        scaled_gather_args(a=empty(2, 130, 512, dtype=FP8), **in_blocks((2, 130, 4), (4, 4)), dim=1),
        {**NOT_IN_GEMM, "decomposed": "130 rows with scales of 1x128 blocks: not a multiple of 4"},
    ),
    "scatter": (SCATTER, scatter_args(), {}),
    "scatter outer": (SCATTER, scatter_args(a=[empty(6, 512, 512)], dim=1), {"decomposed": "6 separate row ranges"}),
    "scatter outer of few": (SCATTER, scatter_args(a=[empty(4, 512, 512)], dim=1), {}),
    "scatter columns": (
        SCATTER,
        scatter_args(dim=-1),
        {"decomposed": "the scattered dim is the last", "fused": "the scattered dim is the last"},
    ),
    "scatter much": (SCATTER, scatter_args(a=[empty(66560, 512)]), {}),
    "scatter with gaps": (
        SCATTER,
        scatter_args(a=[empty(1024, 1024)[:, ::2]]),
        {"decomposed": "an A that is not contiguous", "fused": "an A that is not contiguous"},
    ),
    "scatter of sums with biases": (
        SCATTER,
        scatter_args(a=[empty(1024, 512)] * 2, bs=[weight(512, 512)] * 2, biases=[empty(512)] * 2),
        {"fused": "a bias in a sum"},
    ),
    "scatter fp64": (
        SCATTER,
        scatter_args(a=[empty(1024, 512, dtype=torch.float64)], bs=[weight(512, 512, torch.float64)]),
        {"fused": "a result of torch.float64"},
    ),
    "scaled scatter": (SCATTER, scaled_scatter_args(), {}),
    "scaled scatter of sums": (
        SCATTER,
        scaled_sum_args(),
        {},
    ),
    "scaled scatter of sums with some biases": (
        SCATTER,
        scaled_sum_args(biases=[None, empty(512)]),
        {"fused": "biases for some matmuls only"},
    ),
    "scaled scatter of sums with biases": (
        SCATTER,
        scaled_sum_args(biases=[empty(512)] * 2),
        {"fused": "a bias in a sum"},
    ),
    "scaled scatter of sums, one of e5m2": (
        SCATTER,
        scaled_sum_args(a=[empty(1024, 512, dtype=FP8), empty(1024, 512, dtype=torch.float8_e5m2)]),
        {"fused": "As of several dtypes"},
    ),
    "scaled scatter of sums, one by rows": (
        SCATTER,
        scaled_sum_args(a_scales=[empty(1024, 1, dtype=FP32), empty(dtype=FP32)]),
        {"fused": "tensorwise and rowwise A scales in one sum"},
    ),
    "scaled scatter of sums, outer": (
        SCATTER,
        scaled_sum_args(a=[empty(5, 512, 512, dtype=FP8)] * 2, dim=1),
        {"decomposed": "5 separate row ranges"},
    ),
    "scaled scatter of sums in fp32": (SCATTER, scaled_sum_args(out_dtype=FP32), {}),
    "scaled scatter of five": (SCATTER, scaled_sum_args(5), {"fused": "5 matmuls, more than 4"}),
    "scaled scatter of sums, one not for the GEMM": (
        SCATTER,
        scaled_sum_args(
            a=[empty(1024, 512, dtype=FP8), empty(1024, 256, dtype=FP8)],
            bs=[weight(512, 508, FP8), weight(256, 508, FP8)],
        ),
        {**dict.fromkeys(("decomposed", "direct"), NOT_CUBLAS), "fused": "508 columns"},
    ),
    "scaled scatter of sums, one not for cuBLAS": (
        SCATTER,
        scaled_sum_args(b_scales=[empty(1, 512, dtype=FP32), empty(dtype=FP32)], out_dtype=torch.float16),
        {**dict.fromkeys(("decomposed", "direct"), NOT_CUBLAS), "fused": "tensorwise and rowwise B scales in one call"},
    ),
    "scaled scatter of sums, one in blocks": (
        SCATTER,
        scaled_sum_args(
            a_scales=[empty(1024, 4, dtype=FP32), empty(dtype=FP32)],
            b_scales=[empty(4, 4, dtype=FP32), empty(dtype=FP32)],
        ),
        NOT_IN_GEMM,
    ),
    "scaled scatter of rows and a number, slow": (
        SCATTER,
        scaled_scatter_args(a_scales=[empty(1024, 1, dtype=FP32)], b_scales=[empty(1, dtype=FP32)], fast=False),
        {},
    ),
    "scaled scatter of 1x128 and 128x128": (
        SCATTER,
        scaled_scatter_args(**scattered_in_blocks((1024, 4), (4, 4))),
        NOT_IN_GEMM,
    ),
    "scaled scatter of 128x128 and 1x128 of two ranks": (
        SCATTER,
        scaled_scatter_args(a=[empty(256, 512, dtype=FP8)], **scattered_in_blocks((2, 4), (4, 512))),
        {**NOT_IN_GEMM, "decomposed": "64 rows with scales of 128x128 blocks: not a multiple of 128"},
    ),
    "scaled all-reduce of 1x128 and 128x128": (
        ALL_REDUCE,
        scaled_all_reduce_args(a=[empty(2, 512, 512, dtype=FP8)], **scattered_in_blocks((2, 512, 4), (4, 4))),
        NOT_IN_GEMM,
    ),
    "all-reduce": (ALL_REDUCE, all_reduce_args(), {}),
    "all-reduce of any rows": (
        ALL_REDUCE,
        all_reduce_args(a=[empty(2, 511, 512)]),
        {"fused": "1022 rows are not divisible by 4 ranks"},
    ),
    "all-reduce of fewer rows than ranks": (
        ALL_REDUCE,
        all_reduce_args(a=[empty(3, 512)]),
        {"fused": "3 rows are not divisible by 4 ranks", "decomposed": "3 rows, fewer than 4 ranks"},
    ),
    "all-reduce of rows in all": (ALL_REDUCE, all_reduce_args(a=[empty(2, 2, 129, 512)]), {}),
    "all-reduce fp32": (
        ALL_REDUCE,
        all_reduce_args(a=[empty(1024, 512, dtype=FP32)], bs=[weight(512, 512, FP32)]),
        {"fused": "fp32 operands"},
    ),
    "all-reduce of nothing": (
        ALL_REDUCE,
        all_reduce_args(a=[empty(0, 512)]),
        dict.fromkeys(("fused", "decomposed", "direct"), "nothing"),
    ),
    "scaled all-reduce of rows, slow": (
        ALL_REDUCE,
        scaled_all_reduce_args(
            a=[empty(2, 512, 512, dtype=FP8)],
            a_scales=[empty(2, 512, 1, dtype=FP32)],
            b_scales=[empty(1, 512, dtype=FP32)],
            fast=False,
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    op, args, expected = REFUSALS[name]
    choice = explain(op, *args)
    own = own_reasons(choice)
    assert set(own) == set(expected)
    for implementation, reason in expected.items():
        assert reason in own[implementation]
    assert choice.implementation not in choice.refused
    assert set(choice.estimates_us) == set(IMPLEMENTATIONS) - set(choice.refused)
    if not choice.estimates_us:
        assert (choice.implementation, choice.source) == (WHOLE, "only one that can")


@pytest.mark.parametrize("transport", [PUSH, PULL, DIRECT, PLAIN])
@pytest.mark.parametrize("name", REFUSALS)
def test_each_implementation_has_its_transports(name: str, transport: str) -> None:
    """Those of the transport can run, but for those that cannot make this rank's products, and no others."""
    op, args, expected = REFUSALS[name]
    able = {each for each, needed in TRANSPORTS.items() if transport in needed and each != WHOLE}
    with mock.patch.object(Wire, "transport", return_value=transport):
        choice = explain(op, *args)
    assert set(IMPLEMENTATIONS) - set(choice.refused) == able - set(expected)
    assert choice.implementation in (able - set(expected) or {WHOLE})


def facts_of(op: str, args: tuple[Any, ...]) -> GatherFacts | ReduceFacts:
    return choices.facts_of(call_of(op, *args), 4)


def test_the_kernels_know_all_recipes_of_blocks() -> None:
    """Scales that they do not know would be taken for those of rows."""
    assert {recipe.names for recipe in recipes.IN_BLOCKS} == set(cublas.IN_BLOCKS)


def test_a_converted_product_travels_in_the_dtype_of_the_collective() -> None:
    """It costs what it moves, for all; several that are converted before they are added are not for the GEMM."""
    one = scatter_args(a=[empty(8192, 4096)], bs=[weight(4096, 4096)])
    two = scatter_args(a=[empty(8192, 4096)] * 2, bs=[weight(4096, 4096)] * 2)
    for op, needed in ((SCATTER, 5), (ALL_REDUCE, 4)):
        plain, converted = (explain(op, *one[:needed], sum_dtype=dtype) for dtype in (None, FP32))
        assert set(plain.estimates_us) == set(converted.estimates_us) == OVERLAPPED
        assert all(plain.estimates_us[name] < converted.estimates_us[name] for name in OVERLAPPED)
        assert plain.tiles is not None
        assert converted.tiles is not None
        assert (plain.tiles.block_n, converted.tiles.block_n) == (256, 128), "wide tiles leave no room for 4 bytes"
        plain, converted = (explain(op, *two[:needed], sum_dtype=dtype) for dtype in (None, FP32))
        assert own_reasons(plain) == {}
        reason = "several matmuls, each rounded to torch.bfloat16 before they are added in torch.float32"
        assert own_reasons(converted) == {"fused": reason}
        assert plain.estimates_us["decomposed"] < converted.estimates_us["decomposed"]


def test_the_gemm_converts_a_scaled_product() -> None:
    assert own_reasons(explain(SCATTER, *scaled_scatter_args(), sum_dtype=FP32)) == {}
    refused = own_reasons(explain(SCATTER, *scaled_sum_args(), sum_dtype=FP32))
    assert list(refused) == ["fused"]
    assert own_reasons(explain(SCATTER, *scaled_sum_args(out_dtype=FP32), sum_dtype=FP32)) == {}


@pytest.mark.parametrize(
    ("count", "factors", "able"),
    [
        (1, (0.5,), True),
        (1, (-1.0,), True),
        (1, (1.0, 4.0), True),
        (1, (4.0, 0.5), False),
        (2, (1.0, 1.0, 0.25), True),
        (2, (-1.0, -1.0), True),
        (2, (1.0, 1.0), True),
        (2, (0.5, 0.5), False),
        (2, (1.0, -1.0), False),
    ],
)
@pytest.mark.parametrize("op", [SCATTER, ALL_REDUCE])
def test_the_gemm_multiplies_its_whole_sum(op: str, count: int, factors: tuple[float, ...], able: bool) -> None:
    args = scatter_args(a=[empty(4096, 4096)] * count, bs=[weight(4096, 2048)] * count)
    refused = own_reasons(explain(op, *args[: 5 if op == SCATTER else 4], factors=factors))
    assert refused == ({} if able else {"fused": "matmuls that are multiplied by numbers before they are added"})


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_have_no_fused_gemm(capability: tuple[int, int]) -> None:
    choice = explain(GATHER, *gather_args(), capability=capability)
    assert own_reasons(choice) == {"fused": NOT_TUNED}


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_other_gpus_have_no_scales_of_blocks(capability: tuple[int, int]) -> None:
    """The program's own products then say so, as torch does."""
    for op, args in (
        (GATHER, scaled_gather_args(**in_blocks((256, 4), (4, 4)))),
        (SCATTER, scaled_scatter_args(**scattered_in_blocks((1024, 4), (4, 4)))),
    ):
        choice = explain(op, *args, capability=capability)
        assert choice.implementation == WHOLE
        assert f"compute capability 9 only, not {capability[0]}" in choice.refused["direct"]


@pytest.mark.parametrize("world", [1, 16])
def test_groups_that_nothing_overlaps_in(world: int) -> None:
    for found in (explain_gather(4096, 512, 512, world=world), explain_scatter(4096, 512, 512, world=world),
                  explain_all_reduce(4096, 512, 512, world=world)):  # fmt: skip
        assert (found.implementation, found.source) == ("sequential", "only one that can")
        assert f"{world} ranks; the overlapped ops run on 2 to 8" in found.refused["direct"]


@pytest.mark.parametrize("name", [name for name, (_, _, expected) in REFUSALS.items() if expected])
def test_what_is_refused_and_forced_raises_with_the_reason(name: str) -> None:
    op, args, expected = REFUSALS[name]
    for implementation in (*IMPLEMENTATIONS, WHOLE):
        with select.forced(implementation):
            if implementation not in expected:
                transport = facts_of(op, args).wire.transport(implementation)
                if transport in TRANSPORTS[implementation]:
                    assert explain(op, *args).implementation == implementation
                continue
            with pytest.raises(RuntimeError) as caught:
                explain(op, *args)
        message = f"asynctp: implementation {implementation!r} was asked for and cannot run: "
        assert str(caught.value).startswith(message)
        assert expected[implementation] in str(caught.value)


def test_only_one_that_can() -> None:
    refused = dict.fromkeys(("fused", "decomposed", "direct"), "no")
    choice = chosen(problem("gather", 4096, 512, 512), refused)
    assert (choice.implementation, choice.source) == ("sequential", "only one that can")
