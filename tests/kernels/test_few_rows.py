"""The matmul of few rows: which calls get it, and that it compiles to what its docstring promises.

As in `test_compiled_kernels`, nothing runs: plans are made as `cuda_stubs` describes, and the PTX is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import thorough

pytest.importorskip("triton")

from asynctp_kernels.cuda.checks import refusals
from asynctp_kernels.cuda.choices import choice_for
from asynctp_kernels.cuda.choose.tiles import FewRowsTiles, few_rows_is_faster, few_rows_tiles
from asynctp_kernels.cuda.choose.wire import INVARIANT
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.few_rows import FewRows, takes
from asynctp_kernels.cuda.implementations import ENTRIES
from asynctp_kernels.cuda.plans import decomposed, direct, sequential
from compiled_kernels import MOST_SHARED, TMA_LOAD, TYPES, Compiled, _sm90, compiled, missing  # noqa: F401 - a fixture
from cuda_stubs import FP8, SMS, gather_call, machine, scatter_call

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

BF16 = torch.bfloat16
#: (rows, columns) whose tiles are each another one
EACH_TILE = ((16, 4096), (16, 14336), (32, 8192), (32, 14336), (64, 4096), (64, 8192), (64, 14336), (64, 20480))


def made(
    m: int,
    k: int,
    ns: Sequence[int],
    dtype: torch.dtype = BF16,
    out_dtype: torch.dtype = BF16,
    k_major: bool = True,
    rowwise: bool = False,
    bias: bool = False,
) -> Any:
    """The kernel that `FewRows` prepares."""
    a = torch.empty(m, k, dtype=dtype)
    bs = [torch.empty(n, k, dtype=dtype).t() if k_major else torch.empty(k, n, dtype=dtype) for n in ns]
    outs = [torch.empty(m, n, dtype=out_dtype) for n in ns]
    b_scales = [torch.empty(1, n) for n in ns] if rowwise else []
    biases = [torch.empty(n, dtype=BF16) if bias else None for n in ns]
    with machine() as here:
        FewRows(Matrices(a, bs, outs, torch.empty(m, 1) if rowwise else None, b_scales, biases))
        (prepared,) = here.prepared
    return prepared


def check(kernel: Compiled, tiles: FewRowsTiles, types: str, itemsize: int) -> None:
    """Tensor cores fed by TMA alone; one sum, over K in order; whole rows of stores; no register is spilled."""
    rows, columns = (tiles.block_n, tiles.block_m) if tiles.swapped else (tiles.block_m, tiles.block_n)
    products = kernel.ptx.find("wgmma.mma_async")
    assert {each.op for each in products} == {
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{32 // itemsize}.f32.{types}.{types}"
    }
    assert len(products) == rows // 16 // tiles.warps * tiles.block_k * itemsize // 32
    sums = {each.operands.split("}")[0] for each in products}
    assert len(sums) == rows // 16 // tiles.warps, "each adds to what the one before has made"
    assert not kernel.ptx.find("mma.")
    assert not kernel.ptx.find("cp.async.c")
    assert {each.op for each in kernel.ptx.find("st.global")} == {"st.global.v4.b32"}
    assert kernel.stack == 0
    assert kernel.registers * kernel.threads <= 65536
    assert kernel.shared + 1024 <= MOST_SHARED


@pytest.mark.parametrize("number", [0, 5, *map(thorough, (1, 2, 3, 4, 6, 7))])
@pytest.mark.parametrize("dtype", [BF16, thorough(FP8)], ids=str)
def test_each_tile(number: int, dtype: torch.dtype, tmp_path: Path) -> None:
    rows, columns = EACH_TILE[number]
    plain = compiled(made(rows, 4096, [columns], dtype, rowwise=dtype == FP8), tmp_path)
    check(plain, few_rows_tiles(dtype.itemsize, rows, columns, SMS), TYPES[dtype], dtype.itemsize)


@pytest.mark.parametrize(
    "options",
    [
        {"ns": (1024, 256, 256, 72), "bias": True},
        thorough({"ns": (4096,), "k_major": False}),
        thorough({"ns": (4096, 512), "dtype": torch.float16, "out_dtype": torch.float16}),
        thorough({"ns": (4096, 512), "dtype": FP8, "rowwise": True, "bias": True}),
    ],
    ids=str,
)
def test_other_forms(options: dict[str, Any], tmp_path: Path) -> None:
    """Several Bs, biases, a B whose columns are contiguous: the loop over K is the same."""
    dtype = options.get("dtype", BF16)
    tiles = few_rows_tiles(dtype.itemsize, 16, sum(options["ns"]), SMS)
    check(compiled(made(16, 4096, **options), tmp_path), tiles, TYPES[dtype], dtype.itemsize)


def test_these_are_all_tiles() -> None:
    every = {few_rows_tiles(2, m, n, SMS) for m in range(1, 257) for n in range(64, 20000, 64)}
    assert every == {few_rows_tiles(2, m, n, SMS) for m, n in EACH_TILE}
    assert len(every) == len(EACH_TILE)


@pytest.mark.parametrize("rows", [1, 16, 64, 200])
@pytest.mark.parametrize("columns", [64, 2560, 8192])
def test_tiles_of_bytes(rows: int, columns: int) -> None:
    """Elements of half the bytes have stages of as many bytes: twice the depth."""
    of_two, of_one = (few_rows_tiles(itemsize, rows, columns, SMS) for itemsize in (2, 1))
    assert of_one.block_k == 2 * of_two.block_k
    assert (of_one.block_m, of_one.block_n, of_one.stages) == (of_two.block_m, of_two.block_n, of_two.stages)


# --- which calls get it --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "itemsize", "by_rows", "wanted"),
    [
        (16, 8192, 2560, 2, False, True),
        (64, 7168, 8192, 2, False, True),
        (65, 7168, 8192, 2, False, False),  # cuBLAS has large tiles
        (16, 8192, 1280, 2, False, False),  # it cuts K
        (16, 8192, 1280, 1, False, True),  # half the bytes
        (4, 8192, 2560, 2, False, False),
        (128, 8192, 1280, 1, True, True),  # it does not, with such scales
        (129, 8192, 1280, 1, True, False),
    ],
)
def test_faster_than_cublas(rows: int, depth: int, columns: int, itemsize: int, by_rows: bool, wanted: bool) -> None:
    assert few_rows_is_faster(rows, depth, columns, itemsize, by_rows) == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, True),
        ({"dtype": FP8}, True),
        ({"dtype": FP8, "fast": False}, False),
        ({"dtype": torch.float32}, False),
        ({"columns": 515}, False),
        ({"depth": 1020}, False),
    ],
)
def test_takes(options: dict[str, Any], wanted: bool) -> None:
    given = {"dtype": BF16, "fast": True, "columns": 512, "depth": 1024, **options}
    a = torch.empty(16, given["depth"], dtype=given["dtype"])
    b = torch.empty(given["columns"], given["depth"], dtype=given["dtype"]).t()
    with machine():
        assert takes(Matrices(a, [b], [torch.empty(16, given["columns"], dtype=BF16)]), given["fast"]) == wanted


def test_no_cublas_in_a_batch_invariant_call() -> None:
    """One kernel for all Bs of a gather, and one for each matmul of a sum and each number of rows of its ranges."""
    invariant = {"accord": INVARIANT}
    with machine() as here:
        names = lambda: [each.name for each in here.prepared if each.name in ("few_rows_kernel", "gemm_kernel")]  # noqa: E731
        for rows in (8, 4096):
            gather = replace(gather_call((rows,), ns=(512, 128)), **invariant)
            several = replace(scatter_call((4 * rows,), ks=(512, 256)), **invariant)
            uneven = replace(scatter_call((4 * rows + 1,)), scatter_dim=None, **invariant)
            for plan, call, counts in (
                (direct.DirectGather, gather, (1,)),
                (decomposed.DecomposedGather, gather, (1,)),
                (sequential.SequentialGather, gather, (1,)),
                (direct.DirectScatter, several, (2,)),
                (decomposed.DecomposedScatter, several, (2,)),
                (direct.DirectAllReduce, uneven, (1,)),
                (decomposed.DecomposedAllReduce, uneven, (2, 3)),
            ):
                here.prepared.clear()
                made: Any = plan(call, here.memory)
                kernels = [made.kernel] if call is gather else [each for of in made.kernels for each in of.values()]
                assert len(names()) == len(kernels), plan
                assert len(kernels) in counts, plan


def test_what_a_batch_invariant_call_refuses() -> None:
    """NCCL's sums, and a sum of several matmuls that is rounded once; if no kernel multiplies, everything."""
    two, odd = scatter_call((4096,), ks=(512, 256)), scatter_call((4096,), n=515)
    with machine():
        refused = refusals(ENTRIES["scatter"], replace(two, accord=INVARIANT))
        assert "several matmuls, each rounded" in refused["fused"]
        assert "NCCL adds up" in refused["sequential"]
        assert "direct" not in refused
        with pytest.raises(RuntimeError, match=r"515 columns: .* set invariant=\"off\""):
            choice_for(replace(odd, accord=INVARIANT))
        choice_for(odd)


def test_plans_that_use_it() -> None:
    """One kernel for all Bs of a gather, and one for each matmul of a sum; cuBLAS for many rows."""
    with machine() as here:
        names = lambda: [each.name for each in here.prepared]  # noqa: E731
        gather = direct.DirectGather(gather_call((8,), ns=(512, 128)), here.memory)
        assert names() == ["few_rows_kernel", "push_gather_kernel"]
        assert here.prepared[0].constants["COUNT"] == 2
        two = direct.DirectScatter(scatter_call((32,), ks=(512, 256)), here.memory)
        assert names()[2:] == ["few_rows_kernel"] * 2 + ["push_reduce_kernel"]
        one = direct.DirectScatter(scatter_call((32,)), here.memory)
        assert names()[5:] == ["few_rows_kernel", "push_reduce_kernel"]
        many = direct.DirectScatter(scatter_call((1024,)), here.memory)
        assert names()[7:] == ["push_reduce_kernel"]
        assert [plan.graph is not None for plan in (gather, two, one, many)] == [True, False, True, False]
