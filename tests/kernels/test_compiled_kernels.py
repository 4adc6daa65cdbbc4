"""Every kernel of `asynctp_kernels.cuda` compiles for compute capability 9, and to what its docstring promises.

No GPU is needed: plans are made as `cuda_stubs` describes, and the kernels that they prepare are compiled by Triton's
own `warmup` for a device that is only named. What is looked at is the PTX, and what ptxas says of registers and stack.

This file is not in `tests/kernels/interpreted`, where Triton interprets.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from profiles import thorough

pytest.importorskip("triton")

from asynctp_kernels.cuda.choose.tiles import Tiles, pingpong, tiles_for
from asynctp_kernels.cuda.choose.wire import EXTREME_DTYPES, Wire
from asynctp_kernels.cuda.gemm import arguments, gemm_kernels
from asynctp_kernels.cuda.plans import collectives, decomposed, direct, fused, gather_transports
from asynctp_kernels.cuda.runtime import driver
from asynctp_kernels.cuda.runtime.launch import (
    BESIDE_REGISTERS,
    BESIDE_SHARED,
    BESIDE_WARPS,
    leaves_room,
    prepare,
)
from compiled_kernels import (
    FP8_WIDE,
    MANY,
    MOST_SHARED,
    PUBLISH,
    ROWWISE,
    TENSORWISE,
    TMA_LOAD,
    WAIT,
    Compiled,
    Instruction,
    Ptx,
    Variant,
    _sm90,  # noqa: F401 - a fixture
    async_input_gemm,
    block_coordinate,
    check_publishing,
    check_room,
    compiled,
    epilogues,
    in_order,
    late_loads,
    loaded,
    missing,
    small_and_gemm,
    waits,
)
from cuda_stubs import FP8, SMS, Machine, Prepared, gather_call, machine, scatter_call, tensor
from gemm_runs import check_runs

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


WIDE, NARROW = Tiles(128, 256, 64, warps=8, stages=4, split=2), Tiles(128, 128, 64, warps=4, stages=6, split=2)
WIDE8, NARROW8 = replace(WIDE, block_k=128), replace(NARROW, block_k=128)
NARROW_TO_FP32, NARROW8_TO_FP32 = replace(NARROW, stages=5), replace(NARROW8, stages=5)
PRECISE8 = Tiles(128, 128, 256, warps=8, stages=3, imprecise=128)
PRECISE_SUM8 = replace(PRECISE8, registers=224)
SUM8 = replace(PRECISE_SUM8, imprecise=None)
PRECISE8_TO_FP32, SUM8_TO_FP32, PRECISE_SUM8_TO_FP32 = (
    replace(tiles, block_k=128, stages=4) for tiles in (PRECISE8, SUM8, PRECISE_SUM8)
)


# --- the GEMM ----------------------------------------------------------------------------------------------------
CONVERTED, TO_FP32 = {"sum_dtype": torch.float32}, {"out_dtype": torch.float32}


#: What is spilled belongs to the epilogue: bias, row and column scales are spread over the tile's layout there. Or it
#: belongs to the second accumulator, which is wanted only where a product ends.
BOTH = {
    "plain": Variant({}, WIDE),
    "narrow": Variant({}, NARROW),
    "n-major": Variant({"k_major": False}, WIDE),
    "bias": Variant({"bias": True}, WIDE, 64),
    "fp16": Variant({"dtype": torch.float16}, WIDE),
    "fp8": Variant(TENSORWISE, WIDE8),
    "fp8-narrow": Variant(TENSORWISE, NARROW8),
    "fp8-precise": Variant({**TENSORWISE, "fast": False}, PRECISE8),
    "fp8-to-fp16": Variant({**TENSORWISE, "out_dtype": torch.float16}, WIDE8),
    "e5m2-e4m3": Variant({**TENSORWISE, "dtype": FP8_WIDE, "b_dtype": FP8}, WIDE8),
    "rows": Variant(ROWWISE, WIDE8, 16),
    "rows-narrow": Variant(ROWWISE, NARROW8),
    "rows-precise": Variant({**ROWWISE, "fast": False}, PRECISE8),
    "rows-bias": Variant({**ROWWISE, "bias": True}, WIDE8, 128),
    "fp8-to-fp32": Variant({**TENSORWISE, **TO_FP32}, NARROW8_TO_FP32),
    "rows-precise-to-fp32-bias": Variant({**ROWWISE, "fast": False, **TO_FP32, "bias": True}, PRECISE8_TO_FP32, 64),
}
GATHERS = (
    BOTH
    | {
        "bias": replace(BOTH["bias"], stack=72),  # Triton 3.8, where A is returned
        "outer": Variant({"shard": (2, 256), "dim": 1}, WIDE),
        "2": Variant({"ns": MANY[:2]}, WIDE),
        "3": Variant({"ns": MANY[:3]}, WIDE),
        "4": Variant({"ns": MANY}, WIDE),
        "4-bias": Variant({"ns": MANY, "bias": True}, WIDE, 256),
        "rows-travel": Variant({**ROWWISE, "travels": True}, WIDE8, 32),
        "rows-travel-4-bias": Variant({**ROWWISE, "travels": True, "ns": MANY, "bias": True}, WIDE8, 320),
    }
)
SCATTERS = BOTH | {
    "rows-bias": Variant({**ROWWISE, "bias": True}, WIDE8, 168),
    "rows-one": Variant({**ROWWISE, "scales": "row-one"}, WIDE8, 32),
    "outer": Variant({"rows": (2, 512), "dim": 1}, WIDE),
    "2": Variant({"ks": (512, 256)}, WIDE),
    "3": Variant({"ks": (512, 256, 256)}, WIDE),
    "4": Variant({"ks": (512, 256, 256, 128)}, WIDE),
    "fp8-2": Variant({**TENSORWISE, "ks": (512, 256)}, SUM8),
    "fp8-4": Variant({**TENSORWISE, "ks": (512, 256, 256, 512)}, SUM8),
    "fp8-2-precise": Variant({**TENSORWISE, "ks": (512, 256), "fast": False}, PRECISE_SUM8, 8),
    "rows-2": Variant({**ROWWISE, "ks": (512, 256)}, SUM8),
    "fp8-3-precise": Variant(
        {**TENSORWISE, "ks": (256, 256, 512), "fast": False, "dtype": FP8_WIDE, "b_dtype": FP8}, PRECISE_SUM8, 8
    ),
    "fp8-4-precise": Variant({**TENSORWISE, "ks": (512, 256, 256, 512), "fast": False}, PRECISE_SUM8, 64),
    "fp8-2-precise-to-fp32": Variant(
        {**TENSORWISE, "ks": (512, 256), "fast": False, **TO_FP32}, PRECISE_SUM8_TO_FP32, 8
    ),
    "rows-2-to-fp32": Variant({**ROWWISE, "ks": (512, 256), **TO_FP32}, SUM8_TO_FP32),
    "rows-2-precise": Variant({**ROWWISE, "ks": (512, 256), "fast": False}, PRECISE_SUM8, 48),
    "rows-3-precise": Variant({**ROWWISE, "ks": (256, 256, 512), "fast": False}, PRECISE_SUM8, 48),
    "rows-4-precise": Variant({**ROWWISE, "ks": (512, 256, 256, 512), "fast": False}, PRECISE_SUM8, 144),
    "rows-4-outer": Variant(
        {**ROWWISE, "ks": (512, 256, 256, 512), "rows": (2, 512), "dim": 1, "out_dtype": torch.float16}, SUM8, 96
    ),
    "padded": Variant({"real_rows": 1000}, WIDE),
    "padded-rows-2": Variant({**ROWWISE, "ks": (512, 256), "real_rows": 1000}, SUM8, 64),
    "multiplied": Variant({"factors": (-0.25,)}, WIDE),
    "multiplied-bias": Variant({"factors": (2.0,), "bias": True}, WIDE, 64),
    "multiplied-rows": Variant({**ROWWISE, "factors": (2.0**-32,)}, WIDE8, 16),
    "multiplied-converted": Variant({"factors": (0.5,), **CONVERTED}, NARROW_TO_FP32),
    "multiplied-2": Variant({"ks": (512, 256), "factors": (1.0, 1.0, 0.5)}, WIDE),
    "multiplied-rows-2": Variant({**ROWWISE, "ks": (512, 256), "factors": (-1.0, -1.0)}, SUM8),
    "converted": Variant(CONVERTED, NARROW_TO_FP32),
    "converted-bias-fp16": Variant({**CONVERTED, "bias": True, "dtype": torch.float16}, NARROW_TO_FP32),
    "converted-fp8": Variant({**TENSORWISE, **CONVERTED}, NARROW8_TO_FP32),
    "converted-precise": Variant({**TENSORWISE, **CONVERTED, "fast": False}, PRECISE8_TO_FP32),
    "converted-sum-to-fp32": Variant(
        {**TENSORWISE, "ks": (512, 256), **TO_FP32, **CONVERTED, "fast": False}, PRECISE_SUM8_TO_FP32, 8
    ),
}


#: each property of a variant in at least one of them; the thorough profile compiles all
FEW_GATHERS = {"plain", "fp8-precise", "rows-bias", "outer", "4-bias", "rows-travel"}
FEW_PUSHED = {"plain", "fp8-precise", "rows-travel-4-bias"}
FEW_KEPT = {"outer", "rows-travel-4-bias"}
FEW_SCATTERS = {"plain", "padded", "fp8-precise", "rows-bias", "outer", "fp8-4", "fp8-2-precise-to-fp32",
                "multiplied-converted", "converted-bias-fp16", "converted-sum-to-fp32"}  # fmt: skip


def names(variants: Iterable[str], few: set[str]) -> list[Any]:
    """Parameters of a test: all variants, but few without the thorough profile."""
    assert few <= set(variants)
    return [name if name in few else pytest.param(name, marks=pytest.mark.thorough) for name in variants]


def check_products(gemm: Compiled, variant: Variant) -> None:
    """Tensor cores, fed by TMA alone."""
    ptx, tiles = gemm.ptx, variant.tiles
    products = {instruction.op for instruction in ptx.find("wgmma.mma_async")}
    k = 32 if tiles.block_k >= 128 else 16
    assert products == {f"wgmma.mma_async.sync.aligned.m64n{tiles.block_n}k{k}.f32.{variant.types}"}
    assert len(ptx.find("wgmma.mma_async")) == tiles.block_m // 16 // tiles.warps * tiles.block_k // k
    assert not ptx.find("mma.")
    assert not ptx.find("ldmatrix")
    assert not ptx.find("cp.async.ca")
    assert not ptx.find("cp.async.cg")
    loads = [len(ptx.find(TMA_LOAD % dimensions)) for dimensions in (3, 2)]
    assert loads[0] == loads[1] >= 2, "one load of A for each of B, in the prologue and in the loop"
    precise = [add for add in ptx.find("add") if re.match(r"add(\.rn)?\.f32", add.op)]
    assert bool(precise) >= bool(tiles.imprecise), "partial sums of precise fp8 are added outside the tensor cores"


def check_plain(gemm: Compiled, done_counters: int) -> None:
    """Operands are read through TMA only: the rest is counts, of finished programs (handed from thread to thread) and
    of calls."""
    assert len(gemm.ptx.find("ld.shared")) == done_counters
    assert len(gemm.ptx.find("ld.global")) == done_counters


def check_resources(gemm: Compiled, variant: Variant) -> None:
    limit = variant.tiles.registers if variant.tiles.warps == 8 else 255
    assert gemm.registers <= limit
    assert gemm.stack <= variant.stack, f"{gemm.stack} bytes spilled"
    assert gemm.shared + 1024 <= MOST_SHARED


@pytest.mark.parametrize(("shared", "left"), [(8, [7]), (213_000, [])])
def test_what_runs_beside_a_gemm_leaves_it_the_shared_memory(
    shared: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An SM divides its memory anew only when nothing runs on it: a kernel that needs none asks for the GEMM's way."""
    asked: list[int] = []
    monkeypatch.setattr(driver, "leave_shared_memory", asked.append)
    ran: list[Any] = []
    found = mock.MagicMock(function=7, n_regs=56, spec=["function", "n_regs", "metadata", "__getitem__"])
    found.metadata.shared, found.metadata.num_warps = shared, 8
    found.__getitem__.return_value = lambda *args, stream: ran.append((args, stream))
    kernel = mock.Mock()
    kernel.warmup.return_value = found
    launched = prepare(kernel, 64, [1, 2], {"BLOCK": 3}, 8)
    launched(5, [10, 20])
    assert asked == left
    assert (launched.threads, launched.registers, launched.shared) == (256, 56, shared)
    assert ran == [((10, 20, 3), 5)]


@pytest.mark.parametrize("name", names(GATHERS, FEW_GATHERS))
def test_gather_gemm(name: str, tmp_path: Path) -> None:
    """Of what is pulled, beside the kernel that stages for it."""
    variant = GATHERS[name]
    with machine() as here:
        fused.FusedGather(gather_call(**variant.options, full=True, kept=True), here.memory, variant.tiles, 2, SMS)
        small, gemm = small_and_gemm(here, tmp_path)
    assert small.threads == 32 * BESIDE_WARPS
    check_room(gemm, small)
    check_gather_gemm(gemm, variant)
    check_runs(here.prepared[-1], gemm.ttgir)


@pytest.mark.parametrize(
    "name",
    names(["plain", "narrow", "fp8-precise", "outer", "4-bias", "rows-travel", "rows-travel-4-bias"], FEW_PUSHED),
)
def test_gather_gemm_of_what_is_pushed(name: str, tmp_path: Path) -> None:
    variant = GATHERS[name]
    with machine() as here:
        fused.FusedGather(gather_call(**variant.options), here.memory, variant.tiles, 2, SMS)
        (prepared,) = here.prepared
    gemm = compiled(prepared, tmp_path)
    check_gather_gemm(gemm, variant)
    check_runs(prepared, gemm.ttgir)
    assert leaves_room(gemm.launch), "for what is in flight"


@pytest.mark.parametrize(
    "name", names(["plain", "narrow", "fp8-precise", "outer", "bias", "rows-travel-4-bias"], FEW_KEPT)
)
def test_gather_gemm_of_what_is_pushed_and_kept(name: str, tmp_path: Path) -> None:
    """The words have another reader, too: the GEMM leaves them. What keeps runs beside it."""
    variant = GATHERS[name]
    with machine() as here:
        fused.FusedGather(gather_call(**variant.options, full=True), here.memory, variant.tiles, 2, SMS)
        small, gemm = small_and_gemm(here, tmp_path)
    check_room(gemm, small)
    assert small.registers <= BESIDE_REGISTERS
    assert small.stack == 0
    check_gather_gemm(gemm, variant, clears=False)
    check_runs(here.prepared[-1], gemm.ttgir)


def check_gather_gemm(gemm: Compiled, variant: Variant, clears: bool = True) -> None:
    check_products(gemm, variant)
    check_resources(gemm, variant)
    if variant.plain:
        check_plain(gemm, 1)
    loads = gemm.ptx.find(TMA_LOAD % 3)
    assert late_loads(gemm.ptx, loads, block_coordinate) == [], "A may be loaded before it has arrived"
    assert not gemm.ptx.find("red.")
    # only when all programs are done with the words are they cleared; before that the count, and the calls'
    stores = ["st.global"] * (3 if clears else 2)
    assert in_order((instruction.op for instruction in gemm.ptx.instructions), *WAIT, "wgmma", "bar.sync",
                    "atom.global.gpu.acq_rel.add", "bar.sync", *stores, "ret")  # fmt: skip
    assert len(gemm.ptx.find("st.global")) == len(stores)


@pytest.mark.parametrize(
    ("ns", "k_major"), [((512,), True), ((512, 128, 128, 264), False), thorough(((512, 128, 128, 264), True))], ids=str
)
def test_async_input_gemm(ns: tuple[int, ...], k_major: bool, tmp_path: Path) -> None:
    """Every load of A waits, the first chunk's too; words are the caller's, and are only read."""
    prepared = async_input_gemm(24576, ns, k_major)
    gemm = compiled(prepared, tmp_path)
    tiles = tiles_for(torch.bfloat16, False, 24576, sum(ns), prepared.args[arguments._PLACES["k0"]], SMS)
    check_products(gemm, Variant({}, tiles))
    check_resources(gemm, Variant({}, tiles))
    check_plain(gemm, 0)
    check_runs(prepared, gemm.ttgir)
    assert late_loads(gemm.ptx, gemm.ptx.find(TMA_LOAD % 3), block_coordinate) == []
    assert not gemm.ptx.find("red.")
    assert not gemm.ptx.find("atom")
    assert not gemm.ptx.find("st.global")


@pytest.mark.parametrize("name", names(SCATTERS, FEW_SCATTERS))
def test_scatter_gemm(name: str, tmp_path: Path) -> None:
    variant = SCATTERS[name]
    with machine() as here:
        fused.FusedScatter(scatter_call(**variant.options), here.memory, variant.tiles, 2, SMS)
        small, gemm = small_and_gemm(here, tmp_path)
    check_products(gemm, variant)
    check_resources(gemm, variant)
    check_room(gemm, small)
    if variant.plain:
        check_plain(gemm, 0)
    assert waits(gemm.ptx) == set(), "the GEMM of a scatter waits for nothing"
    published = gemm.ptx.assemblies("red.release")
    assert all(in_order(gemm.ptx.inside(asm), *PUBLISH) for asm in published)
    check_publishing(gemm.ptx, variant)
    check_runs(here.prepared[-1], gemm.ttgir)
    for epilogue in epilogues(gemm.ptx):
        assert in_order(epilogue, "fence", "join", "store"), (
            "threads' writes to shared memory come before TMA reads them"
        )


def test_scatter_gemm_in_groups(tmp_path: Path) -> None:
    """Of so many rows that several row tiles come one after the other; those of the variants above have one a rank."""
    with machine() as here:
        fused.FusedScatter(scatter_call((16384,)), here.memory, WIDE, 2, SMS)
        _, gemm = small_and_gemm(here, tmp_path)
    assert here.prepared[-1].constants["GROUP_M"] == 8
    check_runs(here.prepared[-1], gemm.ttgir)


# --- shares ------------------------------------------------------------------------------------------------------
FEW = 2  # programs at a time, so that the runs have several waves


def in_shares(op: str, variant: Variant) -> Prepared:
    """The GEMM of a plan of a group that is not all ranks."""
    with mock.patch.object(fused, "others_beside", return_value=True), machine() as here:
        if op == "scatter":
            fused.FusedScatter(scatter_call(**variant.options), here.memory, variant.tiles, 2, FEW)
        else:
            fused.FusedGather(gather_call(**variant.options), here.memory, variant.tiles, 2, FEW)
        return here.prepared[-1]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("gather", "narrow"),
        ("scatter", "narrow"),
        thorough(("gather", "rows-travel-4-bias")),
        thorough(("scatter", "outer")),
    ],
    ids=str,
)
def test_tiles_in_shares(op: str, name: str, tmp_path: Path) -> None:
    """Every tile is made once, awaited and counted, whichever program has it; all programs are counted as done."""
    prepared = in_shares(op, (GATHERS if op == "gather" else SCATTERS)[name])
    constants = prepared.constants
    assert (constants["SLOTS"], constants["PROGRAMS"]) == (FEW, prepared.programs)
    assert prepared.programs // FEW in (3, 4)
    gemm = compiled(prepared, tmp_path)
    check_runs(prepared, gemm.ttgir)
    assert leaves_room(gemm.launch)


# --- factors and tiles ---------------------------------------------------------------------------------------------
def plan_gemm(op: str, name: str) -> Prepared:
    """The GEMM of a plan."""
    with machine() as here:
        if op != "scatter":
            pulled = op == "gather"
            call = gather_call(**GATHERS[name].options, full=pulled, kept=pulled)
            fused.FusedGather(call, here.memory, GATHERS[name].tiles, 2, SMS)
        else:
            whole, tiles = scatter_call(**SCATTERS[name].options), SCATTERS[name].tiles
            fused.FusedScatter(whole, here.memory, tiles, 2, SMS)
        return here.prepared[-1]


OF_BOTH = pytest.mark.parametrize(
    ("op", "name"), [("gather", "plain"), ("gather", "rows-travel"), ("pushed", "plain"), ("scatter", "2")]
)


@OF_BOTH
def test_without_a_factor_the_kernel_is_one_that_knows_none(op: str, name: str, tmp_path: Path) -> None:
    """Instruction for instruction, register for register."""
    prepared = plan_gemm(op, name)
    source, count = re.subn(r"\n( +)if FACTOR != 1.0:(\n\1 +.*)+", "", Path(gemm_kernels.__file__).read_text("utf-8"))
    assert count == 1
    without = compiled(replace(prepared, kernel=loaded(source, tmp_path).gemm_kernel), tmp_path)
    assert prepared.constants["FACTOR"] == 1
    assert compiled(prepared, tmp_path).ptx.instructions == without.ptx.instructions


#: (dtype, precise sums, several scaled products)
TILED = [
    (torch.bfloat16, False, False),
    (torch.float16, False, False),
    *itertools.product([FP8], [False, True], [False, True]),
]


def test_no_other_tiles_are_used() -> None:
    """What is compiled above are all the tiles that a plan can ask for."""
    asked = {
        tiles_for(dtype, precise, rows, columns, depth, SMS, several)
        for dtype, precise, several in TILED
        for rows in (*range(8, 1024, 8), *range(1024, 20000, 128))
        for columns in (8, 64, 264, 512, 2560, 4096, 8192, 14336)
        for depth in (512, 8192)
    }
    here = {WIDE, NARROW, WIDE8, NARROW8, PRECISE8, SUM8, PRECISE_SUM8}
    assert asked == here | {pingpong(1), pingpong(2)}, "those two are compiled in `test_pingpong`"
    wide = {tiles_for(*kind[:2], 8192, 8192, 512, SMS, kind[2], out_itemsize=4) for kind in TILED}
    assert wide == {NARROW_TO_FP32, NARROW8_TO_FP32, PRECISE8_TO_FP32, SUM8_TO_FP32, PRECISE_SUM8_TO_FP32}
    assert {variant.tiles for variant in SCATTERS.values()} == here | wide


# --- that the checks above see something ---------------------------------------------------------------------------
def test_a_load_that_does_not_wait_is_found(tmp_path: Path) -> None:
    text = compiled(plan_gemm("pushed", "plain"), tmp_path).ptx.text
    deaf, count = re.subn(r"mov\.u32 %r\d+, 0; }", "}", text)  # the wait's result, which A's coordinate is added to
    assert count >= 2
    ptx = Ptx(deaf)
    assert len(late_loads(ptx, ptx.find(TMA_LOAD % 3), block_coordinate)) == len(ptx.find(TMA_LOAD % 3))


def test_a_wrong_order_of_publishing_is_found(tmp_path: Path) -> None:
    text = compiled(plan_gemm("scatter", "plain"), tmp_path).ptx.text
    early = re.sub(r"cp\.async\.bulk\.wait_group 0;(.*?)(@p red\.release[^;]*;)", r"\2\1", text, flags=re.DOTALL)
    ptx = Ptx(early)
    published = ptx.assemblies("red.release")
    assert published
    assert not any(in_order(ptx.inside(asm), *PUBLISH) for asm in published)


@pytest.mark.parametrize(
    ("op", "name", "pattern", "mutated", "said"),
    [
        ("pushed", "plain", r"(ld\.acquire.*\} %\S+, %\S+,) %\S+ :", r"\1 %c1_i32 :", "before they are awaited"),
        ("scatter", "plain", r"(red\.release.*\} %\S+,) %\S+ :", r"\1 %c1_i32 :", "before it is stored"),
        ("scatter", "plain", r"(?s)(.*red\.release.*?\} %\S+,) %\S+ :", r"\1 %c0_i32 :", "never counted"),
        ("scatter", "plain", r"%(\S*LHS\S*), %(\S+) = tt.split", r"%\2, %\1 = tt.split", "as the other"),
        ("scatter", "plain", r"(warp_group_dot %\S+, %\S+,) %\S+ \{", r"\1 %cst {", "something else"),
        ("pushed", "plain", r"arith\.remsi", "arith.divsi", "something else"),
        ("scatter", "rows-bias", r"tt\.splat %b_scale0 ", "tt.splat %a_scale0 ", "something else"),
        ("scatter", "rows-bias", r"tt\.splat %inner ", "tt.splat %n0 ", "something else"),
        ("scatter", "rows-bias", r"(%\S+) = arith\.addf", r"\1 = arith.mulf", "something else"),
        ("gather", "rows-travel", r"tt\.store %\d+.*", "tt.return", "not cleared"),
        ("gather", "rows-travel", r"tt\.store %done_ptr.*", "tt.return", "not cleared"),
    ],
    ids=["wait", "count", "last count", "halves", "sum", "place", "scale", "mask", "bias", "words", "done"],
)
def test_a_mutant_is_found(op: str, name: str, pattern: str, mutated: str, said: str, tmp_path: Path) -> None:
    prepared = plan_gemm(op, name)
    text, count = re.subn(pattern, mutated, compiled(prepared, tmp_path).ttgir)
    assert count >= 1
    with pytest.raises(AssertionError, match=said):
        check_runs(prepared, text)


# --- the other kernels -------------------------------------------------------------------------------------------
#: Of a kernel of 8 warps beside a GEMM of as many, which has 200.
REGISTERS_BESIDE = (65536 - 200 * 256) // 256
#: Bytes that a kernel of WORLD copies of its loop may spill: a few addresses.
SMALL_STACK = 16


def check_small(kernel: Compiled, registers: int = 255) -> None:
    assert kernel.registers <= registers
    assert kernel.stack <= SMALL_STACK
    assert kernel.shared <= 4096


def check_posts(ptx: Ptx, count: int) -> None:
    """So many words are posted with release, each behind a barrier that joins the threads' stores."""
    joined, posts = False, 0
    for instruction in ptx.instructions:
        if instruction.op.startswith("bar.sync"):
            joined = True
        elif instruction.op.startswith("st.global"):
            joined = False
        elif instruction.op.startswith("atom.global.sys.release.exch"):
            assert joined
            posts += 1
    assert posts == count


def acquires(ptx: Ptx) -> list[Instruction]:
    """Polls of another rank's word; Triton makes a plain load of an addition of 0, which keeps its order."""
    return [each for each in ptx.instructions if ".sys." in each.op and "acquire" in each.op]


def votes(ptx: Ptx) -> bool:
    """Whether threads agree before they go on waiting: clocks and the status may differ by thread, barriers may not."""
    looks = [each for each in ptx.instructions if "globaltimer" in each.operands]
    return len(ptx.find("bar.red.and.pred")) >= max(2, len(looks) // 2)


@pytest.mark.parametrize(("world", "scales"), [(2, False), (4, False), (4, True), (8, True)])
def test_stage_kernel(world: int, scales: bool, tmp_path: Path) -> None:
    """A barrier, the copy, a barrier; few registers, since it runs beside the GEMM."""
    options: dict[str, Any] = {**ROWWISE, "travels": True} if scales else {}
    with machine(world=world) as here:
        call = gather_call((4096,), world=world, **options, full=True, kept=True)
        fused.FusedGather(call, here.memory, NARROW8 if scales else NARROW, 1, 132)
        kernel = compiled(here.prepared[0], tmp_path)
    check_small(kernel, registers=REGISTERS_BESIDE)
    check_posts(kernel.ptx, 2 * (world - 1))
    assert len(acquires(kernel.ptx)) >= 2 * (world - 1)
    copies = [load for load in kernel.ptx.find("ld.global.v") if load.predicate]
    assert {load.op for load in copies} == {"ld.global.v4.b32"}, "16 bytes a thread at a time"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("shape", "width"),
    [((130, 4096), "v4.b32"), ((4096, 64, 1), "v4.b32"), ((64, 516), None), ((65, 516), "b32"), ((127, 514), "b32"),
     ((131, 7), "b16")],
)  # fmt: skip
def test_stage_kernel_that_keeps_the_shard(
    shape: tuple[int, ...], width: str | None, rank: int, tmp_path: Path
) -> None:
    """What is read once goes to two places, wherever those are; still small enough for room beside the GEMM."""
    with machine(rank=rank, world=2) as here:
        collectives.BulkGather(collectives.gather_facts(tensor(*shape), None, 2, kept_by_all=True), here.memory)
        kernel = compiled(here.prepared[-1], tmp_path)
    check_small(kernel, registers=REGISTERS_BESIDE)
    assert kernel.shared <= BESIDE_SHARED
    check_posts(kernel.ptx, 2)
    check_copies(kernel.ptx, width)


def check_copies(ptx: Ptx, width: str | None) -> None:
    """Data is written as many bytes at a time as it is read; words and counts are of 4 bytes."""
    read, written = ({each.op.removeprefix(f"{way}.global.") for each in ptx.find(f"{way}.global") if each.predicate}
                     for way in ("ld", "st"))  # fmt: skip
    assert read - {"b32", "sys.acquire.b32"} == written - {"b32", "b64"}
    assert width is None or width in read & written


#: (shard, K, dim, bytes read and written at a time): of rows in one piece, in blocks, and of columns
KEPT = [
    ((4096,), 4096, 0, "v4.b32"),
    ((3, 512), 4096, 1, "v4.b32"),
    ((64,), 4096, -1, "v4.b32"),
    ((131,), 4096, 0, "v4.b32"),
    ((3, 33), 516, 1, None),
    ((64,), 516, -1, "v2.b32"),
    ((33,), 514, 0, "b32"),
    ((33,), 7, 0, "b16"),
    ((3, 33), 7, 1, "b16"),
]


@pytest.mark.parametrize(("shape", "k", "dim", "width"), KEPT)
@pytest.mark.parametrize("world", [2, 8])
def test_keep_kernel(world: int, shape: tuple[int, ...], k: int, dim: int, width: str | None, tmp_path: Path) -> None:
    """It waits for nothing, spills nothing, and needs none of the GEMM's shared memory, wherever rows lie."""
    with machine(world=world) as here:
        gather_transports.GatherPush(gather_call(shape, k, dim=dim, world=world, full=True), here.memory, 1)
        (prepared,) = here.prepared
        kernel = compiled(prepared, tmp_path)
    assert prepared.name == "keep_kernel"
    check_small(kernel, registers=BESIDE_REGISTERS)
    assert kernel.stack == 0
    assert kernel.threads == 32 * BESIDE_WARPS
    assert kernel.shared <= BESIDE_SHARED, kernel.shared
    assert acquires(kernel.ptx) == []
    assert kernel.ptx.find("atom") == []
    check_copies(kernel.ptx, width)


@pytest.mark.parametrize("tiles", [WIDE, PRECISE_SUM8], ids=["8 warps", "4 warps"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_reduce_kernel(world: int, tiles: Tiles, tmp_path: Path) -> None:
    """Every own chunk is read behind the waits for its tiles and for all ranks' copies of what it is a part of."""
    sums = {"ks": (512, 256), **TENSORWISE, "fast": False} if tiles is PRECISE_SUM8 else {}
    with machine(world=world) as here:
        call = scatter_call((512 * world,), world=world, **sums)
        fused.FusedScatter(call, here.memory, tiles, 2, SMS)
        kernel = compiled(here.prepared[0], tmp_path)
    check_small(kernel, registers=REGISTERS_BESIDE)
    assert kernel.threads == (128 if sums else 256), "what the GEMM leaves"
    found = waits(kernel.ptx)
    assert len(found) == 1 + world
    loads = kernel.ptx.find("ld.global.v4.b32")
    elements = 2048 if sums and world == 8 else 4096
    assert len(loads) * kernel.threads * 8 == world * elements, "elements of 2 bytes, 16 bytes at a time"
    assert len(kernel.ptx.find("ld.global")) == len(loads) + 1, "and the count of calls"
    for load in loads:
        assert len(kernel.ptx.origins(load.reads) & found) == 1 + world


@pytest.mark.parametrize("world", [2, 4, 8])
def test_reduce_kernel_of_converted_products(world: int, tmp_path: Path) -> None:
    """What travels is read as the result is written, 16 bytes at a time, which takes no memory that the GEMM needs."""
    with machine(world=world) as here:
        call = scatter_call((512 * world,), world=world, **CONVERTED)
        fused.FusedScatter(call, here.memory, NARROW_TO_FP32, 4, SMS)
        kernel = compiled(here.prepared[0], tmp_path)
    check_small(kernel, registers=REGISTERS_BESIDE)
    assert kernel.shared <= 16
    found = waits(kernel.ptx)
    loads, stores = kernel.ptx.find("ld.global.v4.b32"), kernel.ptx.find("st.global.v4.b32")
    assert len(loads) == world * 2, "2048 elements by 256 threads"
    assert len(stores) == 2
    for load in loads:
        assert len(kernel.ptx.origins(load.reads) & found) == 1 + world


@pytest.mark.parametrize(
    ("rows", "n"), [((4,), 100), ((12,), 8), ((4,), 1000), ((20,), 24), ((4, 4), 12), ((4, 4), 8), ((2, 4), 20)]
)
def test_parts_that_are_not_aligned_are_not_read_as_if_they_were(rows: tuple[int, ...], n: int, tmp_path: Path) -> None:
    """A rank's part begins at a multiple of its size, and a chunk of it too: so wide loads may be, and no wider."""
    with machine() as here:
        decomposed.DecomposedScatter(scatter_call(rows, n=n, dim=len(rows) - 1), here.memory)
        kernel = compiled(here.prepared[0], tmp_path)
    begins = [rows[-1] // 4 * n * 2 * chunk for chunk in range(1, 1 + math.prod(rows[:-1]))]
    widths = {access_bytes(each.op) for start in ("ld.global", "st.global") for each in kernel.ptx.find(start)}
    assert all(begin % width == 0 for begin in begins for width in widths - {4}), (begins, widths)  # 4: the words


def access_bytes(op: str) -> int:
    """Of one load or store: 16 for ld.global.v4.b32."""
    found = re.search(r"(?:\.v(\d))?\.[a-z](\d+)$", op)
    assert found is not None, op
    return int(found[1] or 1) * int(found[2]) // 8


def check_direct(ptx: Ptx, shots: int) -> None:
    """For each peer one thread posts this rank's word, after a barrier, and one thread polls the peer's."""
    check_posts(ptx, shots)
    assert len(ptx.find("ld.acquire.sys.global.s64")) == len(ptx.find("barrier.red.and.pred")) == shots
    assert votes(ptx)


@pytest.mark.parametrize(("world", "outer"), [(2, False), (4, False), (4, True), (8, True)])
def test_push_gather_kernel(world: int, outer: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shard": (2, 256), "dim": 1, **ROWWISE, "travels": True} if outer else {}
    with machine(world=world) as here:
        direct.DirectGather(gather_call(world=world, **options), here.memory)
        kernel = compiled(here.prepared[-1], tmp_path)
    check_small(kernel)
    check_direct(kernel.ptx, 1)


@pytest.mark.parametrize(("world", "where"), [(2, "rows"), (4, "outer"), (4, "columns"), (8, "rows"), (4, "converted")])
def test_push_reduce_kernel(world: int, where: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "rows": {"rows": (64 * world,)},
        "outer": {"rows": (2, 64 * world), "dim": 1},
        "columns": {"rows": (64,), "dim": -1},
        "converted": {"rows": (64 * world,), **CONVERTED},
    }[where]
    with machine(world=world) as here:
        direct.DirectScatter(scatter_call(world=world, **options), here.memory)
        kernel = compiled(here.prepared[-1], tmp_path)
    check_small(kernel)
    check_direct(kernel.ptx, 1)


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_push_all_reduce_kernel(world: int, shots: int, tmp_path: Path) -> None:
    with machine(world=world) as here, mock.patch.object(Wire, "shots", shots):
        call = replace(scatter_call((1024,), (64,), 8192, world=world), scatter_dim=None)
        direct.DirectAllReduce(call, here.memory)
        kernel = compiled(here.prepared[-1], tmp_path)
    check_small(kernel)
    check_direct(kernel.ptx, shots)
    assert {access_bytes(each.op) for each in kernel.ptx.find("st.global.v")} == {16}, "wide runs"


#: what the PTX instruction of a maximum compares: bytes as 16 bits, and 16-bit floats maybe two at once
COMPARED = {
    torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64", torch.int64: "s64",
    torch.int32: "s32", torch.int8: "s16", torch.uint8: "u16", torch.bool: "u16",
}  # fmt: skip


@pytest.mark.parametrize("dtype", EXTREME_DTYPES)
@pytest.mark.parametrize(("world", "extreme"), [(2, "max"), (4, "min"), (8, "max")])
def test_push_all_reduce_kernel_of_a_maximum(dtype: torch.dtype, world: int, extreme: str, tmp_path: Path) -> None:
    """The instruction prefers a number to NaN. One that prefers NaN has NaN in its name."""
    with machine(world=world) as here:
        call = collectives.scatter_facts(tensor(1, 4096).to(dtype), extreme, world, "all_reduce")
        collectives.DirectTotal(call, here.memory)
        kernel = compiled(here.prepared[-1], tmp_path)
    check_small(kernel)
    check_posts(kernel.ptx, call.wire.shots)
    assert votes(kernel.ptx)
    found = {instruction.op for instruction in kernel.ptx.find(f"{extreme}.")}
    assert {f"{extreme}.{COMPARED[dtype]}", f"{extreme}.{COMPARED[dtype]}x2"} & found
    assert not any("NaN" in op for op in found)


SMALLEST: dict[str, Callable[[Machine], Any]] = {
    "gather-direct": lambda here: direct.DirectGather(gather_call((1,), 1, (1,)), here.memory),
    "gather-direct-rows": lambda here: direct.DirectGather(
        gather_call((1,), 1, (1,), **ROWWISE, travels=True), here.memory
    ),
    "gather-decomposed": lambda here: decomposed.DecomposedGather(
        gather_call((1,), 1, (1,), full=True, kept=True), here.memory
    ),
    "gather-decomposed-rows": lambda here: decomposed.DecomposedGather(
        gather_call((1,), 1, (1,), **ROWWISE, travels=True, full=True, kept=True), here.memory
    ),
    "gather-kept": lambda here: decomposed.DecomposedGather(gather_call((1,), 1, (1,), full=True), here.memory),
    "gather-kept-rows": lambda here: decomposed.DecomposedGather(
        gather_call((1,), 1, (1,), **ROWWISE, travels=True, full=True), here.memory
    ),
    "scatter-direct": lambda here: direct.DirectScatter(scatter_call((4,), (1,), 1), here.memory),
    "scatter-direct-columns": lambda here: direct.DirectScatter(scatter_call((1,), (1,), 4, dim=-1), here.memory),
    "all-reduce-direct": lambda here: collectives.DirectTotal(
        collectives.scatter_facts(tensor(1, 1), "sum", 4, "all_reduce"), here.memory
    ),
    "scatter-decomposed": lambda here: decomposed.DecomposedScatter(scatter_call((4,), (1,), 1), here.memory),
}


@pytest.mark.parametrize("name", list(SMALLEST))
def test_the_smallest_calls_compile(name: str, tmp_path: Path) -> None:
    """An argument of 1 becomes a constant for Triton, which is no tensor any more."""
    with machine() as here:
        SMALLEST[name](here)
        assert all(compiled(prepared, tmp_path).registers for prepared in here.prepared)
