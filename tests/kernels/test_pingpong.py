"""The GEMM of `pingpong_kernels`: it compiles to what its docstring promises, and its warps meet as they should.

It has no interpreter. What Gluon makes of it is run on symbols instead, with its warps in drawn orders (`lowered`), on
the calls of `gemm_runs`; what that takes as given, the text of waits and counts, is looked at in the PTX.
"""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from profiles import thorough

pytest.importorskip("triton")

from asynctp_kernels.cuda.choose.tiles import pingpong, tiles_for
from asynctp_kernels.cuda.gemm import gemm
from asynctp_kernels.cuda.plans import fused
from asynctp_kernels.signals import IS_INTERPRETED
from compiled_kernels import (
    FP8_WIDE,
    MANY,
    MOST_SHARED,
    ROWWISE,
    TENSORWISE,
    TMA_LOAD,
    TMA_STORE,
    TYPES,
    Compiled,
    Ptx,
    _sm90,  # noqa: F401 - a fixture
    async_input_gemm,
    compiled,
    in_order,
    loaded,
    missing,
    small_and_gemm,
    without_lines,
)
from compiled_kernels import check_room as check_room_for
from cuda_stubs import FP8, SMS, Machine, Prepared, gather_call, is_descriptor, machine, scatter_call
from gemm_runs import check_runs

if not IS_INTERPRETED:
    from asynctp_kernels.cuda.gemm import pingpong_kernels

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

TRAVELS = {**ROWWISE, "travels": True}
#: the options of a call, and the bytes that a thread may spill, at most, with any Triton from 3.6 to 3.9
BOTH: dict[str, tuple[dict[str, Any], int]] = {
    "tensorwise": (TENSORWISE, 0),
    "rowwise": (ROWWISE, 40),
    "rows and one": ({**ROWWISE, "scales": "row-one"}, 40),
    "bias": ({**ROWWISE, "bias": True}, 104),
    "fp16": ({**TENSORWISE, "out_dtype": torch.float16}, 0),
    "e5m2-e4m3": ({**TENSORWISE, "dtype": FP8_WIDE, "b_dtype": FP8}, 0),
    "bf16": ({}, 0),
    "bf16-n-major": ({"k_major": False}, 0),
    "fp16-bias": ({"dtype": torch.float16, "bias": True}, 0),
}
GATHERS = BOTH | {
    "travels": (TRAVELS, 40),
    "2-bias": ({**TRAVELS, "ns": (264, 128), "bias": True}, 104),
    "3": ({**TRAVELS, "ns": MANY[:3]}, 40),
    "4-bias": ({**TRAVELS, "ns": MANY, "bias": True}, 40),
    "outer": ({**TENSORWISE, "shard": (2, 256), "dim": 1}, 0),
    "bf16-3": ({"ns": MANY[:3], "k_major": False}, 0),
    "bf16-4-bias": ({"ns": MANY, "bias": True}, 0),
}
SCATTERS = BOTH | {
    "multiplied": ({"factors": (-0.5,)}, 0),
    "multiplied rowwise": ({**ROWWISE, "factors": (4.0,)}, 40),
    "outer": ({**ROWWISE, "rows": (2, 512), "dim": 1}, 40),
    "padded": ({**ROWWISE, "bias": True, "real_rows": 1000}, 104),
    "sum of 2": ({"ks": (512, 256)}, 0),
    "sum of 3": ({"ks": (512, 256, 264), "k_major": False}, 0),
    "sum of 4": ({"ks": (512, 256, 256, 64), "dtype": torch.float16}, 0),
}


#: gathers without the thorough profile
FEW = {
    *itertools.product(("gather",), ("tensorwise", "4-bias", "outer")),
    *itertools.product(("pushed",), ("rowwise", "bf16-4-bias")),
    *itertools.product(("kept",), ("travels",)),
    *itertools.product(
        ("scatter",), ("rows and one", "rowwise", "fp16-bias", "padded", "multiplied rowwise", "sum of 4")
    ),
}


def plan(op: str, options: dict[str, Any], here: Machine, programs: int = SMS) -> Prepared:
    """The GEMM of a plan, not compiled. A gather is pulled, or pushed and returned to nobody, or pushed and kept."""
    tiles = pingpong(options.get("dtype", torch.bfloat16).itemsize)
    if op == "scatter":
        fused.FusedScatter(scatter_call(**options), here.memory, tiles, 2, programs)
    else:
        how: dict[str, Any] = {"gather": {"kept": True}, "pushed": {}, "kept": {"full": True}}[op]
        fused.FusedGather(gather_call(**options, **how), here.memory, tiles, 2, programs)
    return here.prepared[-1]


def planned(op: str, options: dict[str, Any], folder: Path) -> tuple[Prepared, Compiled]:
    """The GEMM of a plan, compiled, which leaves room for the small kernel of the plan."""
    with machine() as here:
        prepared = plan(op, options, here)
        if op != "pushed":
            small, found = small_and_gemm(here, folder)
            check_room_for(found, small)
            return prepared, found
    return prepared, compiled(prepared, folder)


def check(prepared: Prepared, found: Compiled, options: dict[str, Any], stack: int) -> None:
    """Tensor cores fed by TMA alone, 12 warps with 128 registers at the launch, and every run of `gemm_runs`."""
    ptx, dtype = found.ptx, options.get("dtype", torch.bfloat16)
    tiles, types = pingpong(dtype.itemsize), f"{TYPES[dtype]}.{TYPES[options.get('b_dtype', dtype)]}"
    wanted = f"wgmma.mma_async.sync.aligned.m64n128k{32 // dtype.itemsize}.f32.{types}"
    assert {each.op for each in ptx.find("wgmma.mma_async")} == {wanted}
    of_b = 1 if options.get("k_major", True) else 2  # rows of 128 columns are 256 bytes, of which TMA brings 128
    assert [len(ptx.find(TMA_LOAD % dimensions)) for dimensions in (3, 2)] == [1, of_b], "the loader's"
    assert len(ptx.find(TMA_STORE)) == tiles.split, "the storer's"
    assert (found.threads, found.registers) == (32 * tiles.warps, tiles.registers)
    assert found.shared + 1024 <= MOST_SHARED
    check_runs(prepared, found.ttgir)
    assert found.stack <= stack, f"{found.stack} bytes spilled"


#: all of `await_by_warp`: each lane acquires, then they join, then each orders TMA behind that
AWAITED = re.compile(
    r"setp\.ne\.s32 q, %r\d+, 0;\s*@q bra\.uni KNOWN;\s*POLL:\s*ld\.acquire\.sys\.global\.s32 v, \[%rd\d+\];\s*"
    r"setp\.lt\.s32 p, v, (%r\d+|\d+);\s*@p bra POLL;\s*bar\.warp\.sync 0xffffffff;\s*fence\.proxy\.async;\s*KNOWN:"
)
#: all of `publish_by_warp`
PUBLISHED = re.compile(
    r"cp\.async\.bulk\.wait_group 0;\s*bar\.warp\.sync 0xffffffff;\s*mov\.u32 t, %laneid; setp\.eq\.u32 p, t, 0;\s*"
    r"@p red\.release\.gpu\.global\.add\.u32 \[%rd\d+\], 1;"
)


def texts(ptx: Ptx) -> tuple[int, int]:
    """How many waits and counts there are, each of which is all that it has to be."""
    text = without_lines(ptx)
    waits, counts = len(AWAITED.findall(text)), len(PUBLISHED.findall(text))
    assert waits == len(ptx.find("ld.acquire"))
    assert counts == len(ptx.find("red."))
    return waits, counts


@pytest.mark.parametrize(
    ("op", "name"),
    [
        case if case in FEW else thorough(case)
        for case in (
            *itertools.product(("gather", "pushed"), GATHERS),
            *itertools.product(("kept",), ("travels", "outer", "bf16")),
        )
    ],
)
def test_gather(op: str, name: str, tmp_path: Path) -> None:
    options, stack = GATHERS[name]
    prepared, found = planned(op, options, tmp_path)
    check(prepared, found, options, stack)
    assert texts(found.ptx) == (1, 0)
    constants = prepared.constants
    assert (constants["INBOX"], constants["CLEARS"]) == (op != "gather", op != "kept")


@pytest.mark.parametrize(("ns", "k_major"), [((512,), True), (MANY, False), thorough((MANY, True))], ids=str)
def test_async_input(ns: tuple[int, ...], k_major: bool, tmp_path: Path) -> None:
    """Words are the caller's, and are only read."""
    prepared = async_input_gemm(8192, ns, k_major)
    found = compiled(prepared, tmp_path)
    check(prepared, found, {"k_major": k_major}, 0)
    assert texts(found.ptx) == (1, 0)
    assert not found.ptx.find("atom")
    assert not found.ptx.find("st.global")


@pytest.mark.parametrize("name", [name if ("scatter", name) in FEW else thorough(name) for name in SCATTERS])
def test_scatter(name: str, tmp_path: Path) -> None:
    options, stack = SCATTERS[name]
    prepared, found = planned("scatter", options, tmp_path)
    check(prepared, found, options, stack)
    assert texts(found.ptx) == (0, 1)


@pytest.mark.parametrize("op", ["pushed", "scatter"])
def test_tiles_in_shares(op: str, tmp_path: Path) -> None:
    """As beside other groups' kernels: three tasks of a CTA have the same tiles, an odd number of them or none."""
    with mock.patch.object(fused, "others_beside", return_value=True), machine() as here:
        prepared = plan(op, BOTH["tensorwise"][0], here, programs=3)
    assert prepared.programs == prepared.constants["PROGRAMS"] > prepared.constants["SLOTS"] == 3
    check_runs(prepared, compiled(prepared, tmp_path).ttgir)


def test_the_storer_waits_for_its_stores_before_it_counts(tmp_path: Path) -> None:
    _, found = planned("scatter", TENSORWISE, tmp_path)
    names = [each.op for each in found.ptx.instructions]
    first = names.index(next(name for name in names if name.startswith(TMA_STORE)))
    stored = [TMA_STORE, "cp.async.bulk.commit_group", "cp.async.bulk.wait_group.read", "mbarrier.arrive"]
    assert in_order(names[first:], *stored, *stored, "cp.async.bulk.wait_group", "bar.warp.sync", "red.release.gpu")


# --- that the check of its warps sees something --------------------------------------------------------------------
def mutated(before: str, after: str) -> str:
    """The kernels' source with one thing changed."""
    source = Path(pingpong_kernels.__file__).read_text(encoding="utf-8")
    assert source.count(before) == 1, before
    return source.replace(before, after)


LAST = "        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))\n"
LEAVE = "        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1)\n"
#: what mutants are of: the op, and the options of the call. pushed: the only reader of its words is the GEMM
MUTATED: dict[str, tuple[str, dict[str, Any]]] = {
    "scatter": ("scatter", ROWWISE),
    "sum": ("scatter", SCATTERS["sum of 3"][0]),
    "gather": ("gather", {**TRAVELS, "ns": MANY[:2]}),
    "three": ("gather", {**TRAVELS, "ns": MANY[:3]}),
    "pushed": ("pushed", TRAVELS),
    "kept": ("kept", TRAVELS),
}
AWAIT_OWN = "await_by_warp(words + peer, chunk - peer * CHUNKS + 1, known)"
MUTANTS = {
    "the last stage is left too early": ("scatter", LAST + LEAVE, LEAVE + LAST),
    "the sum is used too early": ("scatter", LAST, LAST.replace("acc = ", "")),
    "the last one of three": ("three", "n3, BN, COUNT)", "n3, BN, COUNT - 1)"),
    "no turn is awaited": ("scatter", "mbarrier.wait(turns.index(WHICH), (made & 1) ^ (1 - WHICH))", "pass"),
    "no turn is given": ("scatter", "mbarrier.arrive(turns.index(1 - WHICH), count=1)", "pass"),
    "stages are not awaited": ("scatter", "mbarrier.wait(full.index(stage), at // STAGES & 1)", "pass"),
    "stages are refilled at once": ("scatter", "mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)", "pass"),
    "a stage is left too early": (
        "scatter",
        "mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1, pred=step_k > 0)",
        "mbarrier.arrive(empty.index(at % STAGES), count=1, pred=step_k < steps_k - 1)",
    ),
    "the last products are not awaited": ("scatter", "num_outstanding=0", "num_outstanding=1"),
    "the other's steps are not counted": ("scatter", "at += steps_k  # the other multiplier's", "pass"),
    "too few bytes": ("scatter", "as_[0].block_type.nbytes + bs[0].block_type.nbytes", "as_[0].block_type.nbytes"),
    "the buffer is not awaited": ("scatter", "mbarrier.wait(c_empty.index(WHICH), (made * PARTS + i & 1) ^ 1)", "pass"),
    "the part is not awaited": ("scatter", "mbarrier.wait(c_full.index(which), made // 2 * PARTS + i & 1)", "pass"),
    "the buffer is free too early": ("scatter", "tma.store_wait(0)  # until it was read", "pass"),
    "no fence": ("scatter", "            fence_async_shared()\n", ""),
    "parts are exchanged": ("scatter", "parts[i]", "parts[1 - i]"),
    "a tile is not counted": ("scatter", "publish_by_warp(words + chunk)", "pass"),
    "another chunk is counted": ("scatter", "publish_by_warp(words + chunk)", "publish_by_warp(words)"),
    "chunks are not awaited": ("gather", AWAIT_OWN, "pass"),
    "one chunk less is awaited": ("gather", AWAIT_OWN, AWAIT_OWN.replace(" + 1", "")),
    "the word of a chunk is awaited": ("gather", AWAIT_OWN, AWAIT_OWN.replace("words + peer", "words + chunk")),
    "chunks of the caller's are not awaited": ("async", "await_by_warp(words + chunk, value, known)", "pass"),
    "another's chunks are awaited": ("gather", AWAIT_OWN, AWAIT_OWN.replace("words + peer", "words + rank")),
    "the inbox has a place for the own": (
        "pushed",
        "(peer - (peer > rank).to(gl.int32)) * outer + p",
        "peer * outer + p",
    ),
    "own rows of others": ("gather", "                if step > 0:\n                    a = as_[1]\n", ""),
    "own scales of others": ("gather", "                if step > 0:\n                    a_scale = a_scales[1]\n", ""),
    "rows behind the end": ("gather", "mask=in_block < inner, other=0.0)[:, None]", "mask=in_block < n)[:, None]"),
    "the first B's scales": ("gather", "gl.load(pick(number, b_scales, COUNT) + cols", "gl.load(b_scales[0] + cols"),
    "the first B's columns": ("gather", "n = pick(number, columns, COUNT)", "n = columns[0]"),
    "the first B": ("gather", "b = pick(number, bs, OUTS)", "b = bs[0]"),
    "the first A of a sum": ("sum", "a = pick(number, as_, COUNT)", "a = as_[0]"),
    "the first B of a sum": ("sum", "as_, COUNT)\n                b = pick(number, bs, COUNT)", "as_, COUNT)"),
    "a sum's steps go on": ("sum", "at_k = (step_k - first) * BK", "pass"),
    "the last of a sum": ("sum", "k3, BK, COUNT)", "k3, BK, COUNT - 1)"),
    "columns first": ("sum", "load_block(b, [at_k, col], full", "load_block(b, [col, at_k], full"),
    "words are not cleared": ("pushed", "gl.store(words + gl.arange(0, 8,", "gl.store(words + gl.arange(0, 4,"),
    "words are cleared that others read": ("kept", "            if CLEARS:\n", "            if OWN:\n"),
    "programs are not counted together": ("gather", "        barrier()\n", ""),
}


#: every third; those that are alike stand next to each other
@pytest.mark.parametrize("name", [thorough(name) if i % 3 else name for i, name in enumerate(MUTANTS)])
def test_a_mutant_is_found(name: str, tmp_path: Path) -> None:
    of, before, after = MUTANTS[name]
    with machine() as here:
        prepared = async_input_gemm(8192, (512,), True) if of == "async" else plan(*MUTATED[of], here)
    kernel = loaded(mutated(before, after), tmp_path).gemm_kernel
    found = compiled(replace(prepared, kernel=kernel), tmp_path)
    with pytest.raises(AssertionError):
        check_runs(prepared, found.ttgir)


# --- which calls get it --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "columns", "short", "wanted", "bf16"),
    [
        (8192, 8192, True, True, False),  # 32 waves of small tiles
        (128 * SMS, 60 * 128, True, True, False),
        (128 * SMS, 61 * 128, True, False, False),  # slower by up to 15 %, as more of them, but with short sums
        (128 * SMS, 14 * 128, True, True, False),
        (128 * SMS, 13 * 128, True, True, True),  # where wide tiles take the time of 14
        (128 * SMS, 12 * 128, True, False, False),  # where wide tiles take that of 12
        (4096, 2560, True, True, True),  # 5, where wide tiles take that of 6
        (1024, 2560, True, True, True),  # 2, where wide tiles take that of 2, but only half of the SMs
        (512, 512, False, False, False),  # one
    ],
)
def test_calls_that_get_it(rows: int, columns: int, short: bool, wanted: bool, bf16: bool) -> None:
    assert (tiles_for(FP8, False, rows, columns, 4096, SMS) == pingpong(1)) == short
    assert (tiles_for(FP8, False, rows, columns, 7168, SMS) == pingpong(1)) == wanted
    for depth in (4096, 7168):
        assert (tiles_for(torch.bfloat16, False, rows, columns, depth, SMS) == pingpong(2)) == bf16
    for others in (
        {"precise_sums": True},
        {"several": True},
        {"out_itemsize": 4},
        {"dtype": torch.bfloat16, "out_itemsize": 4},
    ):
        call: dict[str, Any] = {"dtype": FP8, "precise_sums": False, **others}
        assert not tiles_for(rows=rows, columns=columns, depth=4096, programs=SMS, **call).pingpong


def test_another_gluon_is_said_and_lived_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The GEMM of Triton itself runs the same plan, block for block."""
    wanted, _ = planned("scatter", ROWWISE, tmp_path)

    def gone(descriptor: Any) -> Any:
        raise KeyError("no TensorDescriptor here")

    monkeypatch.setattr(gemm, "_gluon_faults", [])
    monkeypatch.setattr(pingpong_kernels, "with_layout", gone)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            prepared, found = planned("scatter", ROWWISE, tmp_path)
    (said,) = [record.message for record in caplog.records if "Gluon" in record.message]
    assert said.endswith("has another Gluon: KeyError: 'no TensorDescriptor here'")
    assert (prepared.num_warps, prepared.programs) == (4, wanted.programs)
    blocks = [[arg.block_shape for arg in each.args if is_descriptor(arg)] for each in (prepared, wanted)]
    assert blocks[0] == blocks[1]
    check_runs(prepared, found.ttgir)
