"""Which implementation a call gets: refusals, the cost model, measured tables, what is forced; and how rows are cut."""

from __future__ import annotations

import itertools
import json
import operator
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.cost import host_time
from asynctp_kernels.cuda.choose.select import WHOLE, Problem, Rates
from asynctp_kernels.cuda.choose.wire import (
    TRANSPORTS,
    Wire,
)
from asynctp_kernels.cuda.implementations import ENTRIES, IMPLEMENTATIONS
from graph_builder import GraphBuilder, aten
from passes import run_pass
from selections import (
    BF16,
    FP8,
    FP32,
    H200,
    OVERLAPPED,
    SCATTER,
    SMS,
    UNKNOWN,
    call_of,
    chosen,
    empty,
    estimate,
    explain,
    explain_all_reduce,
    explain_gather,
    explain_scatter,
    own_reasons,
    problem,
    weight,
)
from torch.fx import Graph

from asynctp_passes.ops.calls import INVARIANT, SIGNATURES
from asynctp_passes.torch_private import process_groups


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No table, nothing forced; gives where a table would be."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(select.TABLE_VARIABLE, str(path))
    monkeypatch.delenv(select.VARIABLE, raising=False)
    select.refresh()
    yield path
    monkeypatch.undo()
    select.refresh()


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
    select.refresh()


# --- whole calls: meta tensors, since a choice looks at no memory --------------------------------------------------
@pytest.mark.parametrize("op", ENTRIES)
def test_every_kind_of_call_has_an_entry_for_each_name(op: str) -> None:
    """In the order of preference, with the last one for what no other can run."""
    assert [each.name for each in ENTRIES[op]] == list(TRANSPORTS)
    assert [each.name for each in ENTRIES[op] if each.estimate is None] == [WHOLE]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("device", [H200, UNKNOWN])
@pytest.mark.parametrize(
    ("k", "n"), [(8192, 2560), (8192, 14336), (4096, 7168), (8192, 3584)], ids=lambda size: str(size)
)
def test_extremes_of_a_gather(k: int, n: int, device: str, world: int) -> None:
    """Few rows are about latency, many about hiding the copies."""
    for rows in (8, 64, 128, 256):
        assert explain_gather(rows, k, n, world=world, device=device).implementation == "direct"
    for rows in (8192, 16384, 65536):
        assert explain_gather(rows, k, n, world=world, device=device).implementation in OVERLAPPED


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("device", [H200, UNKNOWN])
@pytest.mark.parametrize(("k", "n"), [(2048, 8192), (7168, 8192), (3584, 4096)])
def test_extremes_of_a_scatter(k: int, n: int, device: str, world: int) -> None:
    for rows in (8, 64, 128, 256):
        assert explain_scatter(rows, k, n, world=world, device=device).implementation == "direct"
    for rows in (8192, 16384, 65536):
        assert explain_scatter(rows, k, n, world=world, device=device).implementation in OVERLAPPED


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("device", [H200, UNKNOWN])
@pytest.mark.parametrize(("k", "n"), [(2048, 8192), (7168, 8192), (3584, 4096)])
def test_extremes_of_an_all_reduce(k: int, n: int, device: str, world: int) -> None:
    """Few rows, as in decoding, get one kernel, however many they are."""
    for rows in (1, 7, 8, 64, 128, 256, 1000):
        assert explain_all_reduce(rows, k, n, world=world, device=device).implementation == "direct"
    for rows in (8192, 16384, 65536):
        assert explain_all_reduce(rows, k, n, world=world, device=device).implementation in OVERLAPPED


def test_an_all_reduce_is_a_scatter_and_what_follows() -> None:
    """Every implementation's estimate is the scatter's, and as many bytes again, by what moves them."""
    whole, part = (problem(op, 8192, 7168, 4096) for op in ("all_reduce", "scatter"))
    rest = {name: estimate(whole, name, Rates(), SMS) - estimate(part, name, Rates(), SMS) for name in IMPLEMENTATIONS}
    again = 8192 * 3 / 4 * 4096 * 2
    shared = again / Rates().copy + 3 * Rates().between + Rates().launch
    wanted = {"direct": again / Rates().direct, "sequential": again / Rates().nccl}
    assert rest == pytest.approx({**wanted, **dict.fromkeys(OVERLAPPED, shared)}, abs=0.2)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_what_is_enqueued_range_by_range_takes_the_host_so_long(world: int) -> None:
    """Where GPUs are done sooner, one kernel is chosen."""
    few, many = (problem("scatter", rows * world, 8192, 4096, world=world) for rows in (128, 8192))
    host = host_time(few, Rates())
    assert host_time(many, Rates()) == host == 60 + 50 * world
    assert estimate(few, "decomposed", Rates(), SMS) == host > estimate(few, "fused", Rates(), SMS)
    assert estimate(many, "decomposed", Rates(), SMS) > 2 * host


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("device", [H200, UNKNOWN])
def test_nothing_runs_sequentially_that_need_not(device: str, world: int) -> None:
    for rows in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        for k in (512, 1024, 2048, 4096, 8192):
            for n in (512, 1024, 2560, 4096, 7168, 14336):
                part = rows // world * world
                for choice in (
                    explain_gather(part, k, n, world=world, device=device),
                    explain_scatter(part, k, n, world=world, device=device),
                ):
                    assert choice.implementation not in ("sequential", WHOLE)


@pytest.mark.parametrize("rows", [8192, 16384, 32768])
def test_a_long_product_still_hides_its_copies(rows: int) -> None:
    """Gate and up of Llama-3 70B on 2 ranks: copies take a tenth of the time and can all be hidden."""
    assert explain_gather(rows, 8192, 28672, world=2).implementation in OVERLAPPED


SHIPPED = [
    ("gather", 64, 8192, 2560, "direct"),
    ("gather", 512, 4096, 7168, "direct"),
    ("gather", 8192, 8192, 2560, "fused"),
    ("gather", 16384, 4096, 7168, "decomposed"),
    ("scatter", 64, 2048, 8192, "direct"),
    ("scatter", 512, 7168, 8192, "direct"),
    ("scatter", 16384, 2048, 8192, "decomposed"),
    ("scatter", 8192, 2048, 8192, "fused"),
]


@pytest.mark.parametrize(("op", "rows", "k", "n", "implementation"), SHIPPED)
def test_shipped_table(op: str, rows: int, k: int, n: int, implementation: str) -> None:
    """What was measured on 4 H200, for calls of these sizes."""
    choice = {"gather": explain_gather, "scatter": explain_scatter}[op](rows, k, n, device=H200)
    assert (choice.implementation, choice.source) == (implementation, "measured")
    assert set(choice.estimates_us) == set(IMPLEMENTATIONS) - set(choice.refused)


def test_every_entry_of_the_shipped_table_is_chosen() -> None:
    entries = 0
    for device, problems in select._table().items():
        for key, by_rows in problems.items():
            op, world, dtype, depths, widths, *flags = key.split(":")
            precise, returned = "precise" in flags, "full" in flags
            blocks = next((int(flag[:-1]) for flag in flags if flag.endswith("x")), 1)
            sizes = [[int(size) for size in text.split("+")] for text in (depths, widths)]
            for rows, implementation in by_rows.items():
                dtypes = (getattr(torch, dtype), BF16)
                kind = {"blocks": blocks, "returned": returned}
                asked = Problem.of(op, int(world), int(rows), *sizes, *dtypes, not precise, **kind)  # type: ignore[arg-type]
                assert asked.key == key
                choice = chosen(asked, device=device)
                assert (choice.implementation, choice.source) == (implementation, "measured")
                entries += 1
    assert entries > 0


def wire_of(key: str, rows: int) -> Wire:
    """Of a problem that a table knows, as far as it decides about the transport."""
    op, world, dtype, depths, widths, *flags = key.split(":")
    ranks, shard = int(world), rows // int(world)
    if op == "gather":
        size = shard * int(depths) * getattr(torch, dtype).itemsize
        return Wire("all_gather", ranks, size, kept_by_all="full" in flags)
    return Wire("reduce_scatter", ranks, shard * int(widths) * 2, BF16, "sum")


def test_every_entry_of_the_shipped_table_can_run() -> None:
    """Ranks settle the transport by shared facts first; a winner that needs another one would never run."""
    measured = [
        (wire_of(key, int(rows)), implementation)
        for problems in select.shipped().values()
        for key, by_rows in problems.items()
        for rows, implementation in by_rows.items()
    ]
    assert [wire for wire, implementation in measured if wire.transport() not in TRANSPORTS[implementation]] == []
    assert len(measured) > 600


def test_a_measurement_on_the_other_side_does_not_decide(table: Path) -> None:
    """As of a table that an older version wrote."""
    table.write_text(json.dumps({H200: {"gather:4:bfloat16:8192:2560": {"1024": "direct"}}}))
    select.refresh()
    choice = explain_gather(1024, 8192, 2560, device=H200)
    assert select.measured_choice(problem("gather", 1024, 8192, 2560), H200) == "direct"
    assert choice.source == "cost model"
    assert choice.implementation in OVERLAPPED
    assert "by another transport, 'push'" in choice.refused["direct"]


def test_the_cost_model_decides_elsewhere() -> None:
    choice = explain_gather(4096, 8192, 2560, device=UNKNOWN)
    assert choice.source == "cost model"
    assert choice.implementation == min(choice.estimates_us, key=lambda name: choice.estimates_us[name])
    assert set(choice.estimates_us) == OVERLAPPED


# --- what is asked for -------------------------------------------------------------------------------------------
def test_forced() -> None:
    asked = problem("gather", 64, 8192, 2560)
    for implementation in IMPLEMENTATIONS:
        with select.forced(implementation):
            choice = chosen(asked, device=H200)
            assert (choice.implementation, choice.source, choice.estimates_us) == (implementation, "forced", {})
    assert chosen(asked, device=H200).source == "measured"


def test_forced_inside_forced_and_after_an_error() -> None:
    with select.forced("direct"):
        with select.forced("fused"):
            assert select.requested() == "fused"
        assert select.requested() == "direct"
        with pytest.raises(KeyError), select.forced("fused"):
            raise KeyError
        assert select.requested() == "direct"
    assert select.requested() is None


def test_forcing_what_is_not_there() -> None:
    with (
        pytest.raises(ValueError, match=r"forced='fast' is not valid; .* fused, decomposed, direct, sequential"),
        select.forced("fast"),
    ):
        pass
    assert select.requested() is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_environment(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert select.requested() is None
    monkeypatch.setenv(select.VARIABLE, implementation)
    assert select.requested() is None, "it is read once"
    select.refresh()
    assert select.requested() == implementation
    assert chosen(problem("scatter", 4096, 512, 512)).source == "forced"
    with select.forced("direct"):
        assert select.requested() == "direct", "the program has the last word"


def test_environment_auto_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.VARIABLE, "auto")
    select.refresh()
    assert select.requested() is None
    monkeypatch.setenv(select.VARIABLE, "Fused")
    select.refresh()
    with pytest.raises(ValueError, match=rf"{select.VARIABLE}='Fused' is not valid"):
        select.requested()


def ranges(*ends: int) -> list[int]:
    return [number for first, end in itertools.pairwise(ends) for number in (first, end, ends[-1])]


def explain_ranges(rows: int, k: int, ns: tuple[int, ...], world: int, **optional: Any) -> select.Choice:
    a_shard, bs = empty(rows // world, k), [weight(k, n) for n in ns]
    return explain("all_gather_matmul", a_shard, bs, [None] * len(ns), 0, False, optional, world=world)


@pytest.mark.parametrize(
    ("world", "ends", "k", "ns", "expected"),
    [
        (2, (0, 512, 4608), 3072, (4608, 4608), "decomposed"),
        (4, (0, 8192, 16384), 8192, (7168, 7168), "decomposed"),
        (8, (0, 8192, 16384), 8192, (3584, 3584), "decomposed"),
        (8, (0, 512, 4608), 3072, (1152, 1152), WHOLE),
        (4, (0, 512, 4608), 3072, (2304, 2304), WHOLE),
    ],
)
def test_ranges_of_rows_are_multiplied_as_they_come_where_that_is_faster(
    world: int, ends: tuple[int, ...], k: int, ns: tuple[int, ...], expected: str
) -> None:
    """Else all rows are gathered first, as the program does; text and image of a small model on many ranks are so."""
    choice = explain_ranges(ends[-1], k, ns, world, b_rows=ranges(*ends))
    assert (choice.implementation, choice.source) == (expected, "cost model")
    assert choice.estimates_us.keys() == {"decomposed", WHOLE}
    assert choice.refused["fused"] == "matmuls of different rows of A"
    assert min(choice.estimates_us, key=lambda name: choice.estimates_us[name]) == expected


def test_ranges_of_rows_that_nobody_multiplies_by_pieces() -> None:
    """Batch-invariant ones, and more of them than there are chunks."""
    halves, sizes = ranges(0, 8192, 16384), (16384, 8192, (7168, 7168), 4)
    invariant = explain_ranges(*sizes, b_rows=halves, accord=INVARIANT)
    many = explain_ranges(*sizes, b_rows=ranges(0, 8, 16))
    for choice in (invariant, many):
        assert (choice.implementation, choice.source) == (WHOLE, "only one that can")
    assert invariant.refused["decomposed"] == "matmuls of different rows of A"
    assert many.refused["decomposed"].startswith("512 matmuls for a range of rows, more than ")


def test_a_table_does_not_decide_for_ranges_of_rows(table: Path) -> None:
    """Where they lie is no part of its keys."""
    call = call_of("all_gather_matmul", empty(576, 3072), [weight(3072, 1152)] * 2, [None] * 2, 0, False, world=8)
    of_ranges = cuda.problem_of(call._replace(b_rows=ranges(0, 512, 4608)), 8)
    assert (of_ranges.key, of_ranges.pieces) == ("gather:8:bfloat16:3072:1152:pieces", 9)
    write(table, {H200: {of_ranges.key: {"4608": "decomposed"}}})
    assert select.measured_choice(of_ranges, H200) is None


# --- tables ------------------------------------------------------------------------------------------------------
ASKED = problem("gather", 1000, 512, 512, 128)
KEY = "gather:4:bfloat16:512:512+128"


def test_problem_key() -> None:
    assert ASKED.key == KEY
    assert replace(ASKED, op="scatter", world=8, dtype="float8_e4m3fn", widths=(8,)).key == (
        "scatter:8:float8_e4m3fn:512:8"
    )
    precise = replace(ASKED, dtype="float8_e4m3fn", precise=True)
    assert precise.key == "gather:4:float8_e4m3fn:512:512+128:precise"
    sizes = ("scatter", 4, 1024, [512], [128])
    assert Problem.of(*sizes, BF16, BF16, True).key == "scatter:4:bfloat16:512:128"
    assert Problem.of(*sizes, BF16, BF16, True, torch.float32).key == "scatter:4:bfloat16:512:128:wide"
    assert Problem.of(*sizes, BF16, torch.float32, True).key == "scatter:4:bfloat16:512:128:wide"
    assert Problem.of(*sizes, torch.float32, torch.float32, True).key == "scatter:4:float32:512:128"
    assert Problem.of(*sizes, BF16, BF16, True, blocks=2).key == "scatter:4:bfloat16:512:128:2x"
    assert replace(ASKED, returned=True, blocks=2).key == f"{KEY}:full:2x"


def test_a_gather_that_returns_a_is_another_problem() -> None:
    """It stages first, which only `decomposed` waits for."""
    a, b = empty(4096, 8192), weight(8192, 1024)
    asked = [cuda.problem_of(call_of("all_gather_matmul", a, [b], [None], 0, full), 4) for full in (False, True)]
    assert [each.key for each in asked] == ["gather:4:bfloat16:8192:1024", "gather:4:bfloat16:8192:1024:full"]
    plain, returned = (chosen(each).estimates_us for each in asked)
    assert [name for name in plain if returned[name] > plain[name]] == ["decomposed"]
    assert [name for name in plain if returned[name] < plain[name]] == []


def test_what_was_measured_with_fast_sums_does_not_decide_for_precise_ones(table: Path) -> None:
    """The shipped table knows so many rows in fp8; torchao's backward has them with use_fast_accum=False."""
    sizes = ("gather", 2, 4096, [8192], [2560], FP8, BF16)
    fast, precise = Problem.of(*sizes, True), Problem.of(*sizes, False)
    assert (chosen(fast, device=H200).implementation, chosen(fast, device=H200).source) == ("fused", "measured")
    choice = chosen(precise, device=H200)
    assert (choice.implementation, choice.source) == (
        select.fastest(choice.estimates_us, ENTRIES["gather"]),
        "cost model",
    )
    assert choice.implementation != "fused"
    write(table, {H200: {precise.key: {"4096": "direct"}}})
    assert (chosen(precise, device=H200).implementation, chosen(precise, device=H200).source) == ("direct", "measured")
    assert chosen(fast, device=H200).implementation == "fused"


def test_a_table_decides_for_its_gpu_and_problem(table: Path) -> None:
    write(table, {UNKNOWN: {KEY: {"1000": "sequential"}}})
    choice = chosen(ASKED)
    assert (choice.implementation, choice.source) == ("sequential", "measured")
    others = [replace(ASKED, op="scatter"), replace(ASKED, world=2), replace(ASKED, depth=520),
              replace(ASKED, widths=(640,)), replace(ASKED, dtype="float16")]  # fmt: skip
    assert [chosen(other).source for other in others] == ["cost model"] * len(others)
    assert chosen(ASKED, device="another GPU").source == "cost model"


def test_a_table_adds_to_the_shipped_one_and_overrides_it(table: Path) -> None:
    first, second = problem("gather", 64, 8192, 2560), problem("gather", 128, 8192, 2560)
    new = problem("gather", 100_000, 8192, 2560)
    assert [chosen(each, device=H200).implementation for each in (first, second)] == ["direct", "direct"]
    assert chosen(new, device=H200).source == "cost model"
    write(table, {H200: {first.key: {"64": "sequential", "100000": "direct"}}, UNKNOWN: {KEY: {"1000": "direct"}}})
    assert chosen(first, device=H200).implementation == "sequential"
    assert (chosen(second, device=H200).implementation, chosen(second, device=H200).source) == ("direct", "measured")
    assert chosen(new, device=H200).source == "measured"
    assert chosen(ASKED).source == "measured"
    table.unlink()
    assert chosen(first, device=H200).implementation == "sequential", "it is read once"
    select.refresh()
    assert chosen(first, device=H200).implementation == "direct", "the shipped table is as it was"


def test_a_damaged_table_is_named(table: Path) -> None:
    """All that may be damaged is in `test_tuning_tables`."""
    write(table, {UNKNOWN: {KEY: {"1000": "fusedd"}}})
    with pytest.raises(ValueError, match=f"{re.escape(str(table))} is no tuning table .*asynctp tune"):
        chosen(ASKED)


@pytest.mark.parametrize(("decomposed", "winner"), [(99.5, "fused"), (99.1, "fused"), (98.9, "decomposed")])
def test_decomposed_has_to_be_ahead_of_fused(decomposed: float, winner: str) -> None:
    entries = ENTRIES["gather"]
    assert select.fastest({"fused": 100.0, "decomposed": decomposed, "sequential": 120.0}, entries) == winner
    of_others = {"decomposed": decomposed, "direct": 99.0}
    assert select.fastest(of_others, entries) == ("decomposed" if decomposed < 99 else "direct")


@pytest.mark.parametrize("beside", [False, True])
def test_beside_other_groups_a_table_does_not_decide_for_decomposed(beside: bool, table: Path) -> None:
    """It was measured with nothing else to do; the model has both within 5 % of each other here."""
    for name in ("decomposed", "sequential"):
        write(table, {UNKNOWN: {ASKED.key: {str(ASKED.rows): name}}})
        select.refresh()
        choice = chosen(ASKED, beside=beside)
        assert choice.estimates_us["decomposed"] > 0.95 * choice.estimates_us["fused"]
        expected = ("fused", "cost model") if beside and name == "decomposed" else (name, "measured")
        assert (choice.implementation, choice.source) == expected


@pytest.mark.parametrize(("decomposed", "winner"), [(96.0, "fused"), (94.0, "decomposed")])
def test_beside_other_groups_decomposed_has_to_be_further_ahead(decomposed: float, winner: str) -> None:
    assert select.fastest({"fused": 100.0, "decomposed": decomposed}, ENTRIES["scatter"], beside=True) == winner


def test_a_table_does_not_make_run_what_cannot(table: Path) -> None:
    write(table, {UNKNOWN: {KEY: {"1000": "fused"}}})
    choice = chosen(ASKED, {"fused": "no"})
    assert choice.source == "cost model"
    assert choice.implementation != "fused"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (666, None), (667, "direct"), (1000, "direct"), (1300, "direct"), (1500, "sequential"), (2000, "sequential"),
        (2999, "sequential"), (3001, None), (0, None),
    ],
)  # fmt: skip
def test_the_nearest_number_of_rows_decides_within_a_factor(table: Path, rows: int, expected: str | None) -> None:
    write(table, {UNKNOWN: {KEY: {"1000": "direct", "2000": "sequential"}}})
    assert select.measured_choice(replace(ASKED, rows=rows), UNKNOWN) == expected


def test_where_the_table_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert select.table_path() == tmp_path / "tuning.json"
    monkeypatch.delenv(select.TABLE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert select.table_path() == tmp_path / "cache" / "asynctp" / "tuning.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert select.table_path() == Path.home() / ".cache" / "asynctp" / "tuning.json"


# --- several scaled products ------------------------------------------------------------------------------------
def sums(*depths: int, rows: int = 8192, world: int = 2, fast: bool = True) -> Problem:
    return Problem.of("scatter", world, rows, depths, [8192], FP8, BF16, fast)


def test_the_problem_of_several_scaled_products() -> None:
    """It is told from one product of their depths together, of which a table may know something."""
    asked = sums(512, 4096, 512)
    assert (asked.depth, asked.depths, asked.apart) == (5120, (4096, 512, 512), (512, 512))
    assert asked.key == "scatter:2:float8_e4m3fn:4096+512+512:8192"
    assert sums(5120).key == "scatter:2:float8_e4m3fn:5120:8192"
    assert sums(5120).depths == (5120,)
    unscaled = Problem.of("scatter", 2, 8192, (512, 4096), [8192], BF16, BF16, False)
    assert (unscaled.depth, unscaled.apart) == (4608, ())


@pytest.mark.parametrize("fast", [True, False])
def test_the_model_knows_that_one_gemm_makes_all_products(fast: bool) -> None:
    """Elsewhere each product and each sum is written and read."""
    one, several = sums(1536, fast=fast), sums(512, 512, 512, fast=fast)
    for name in ("decomposed", "sequential", "direct"):
        assert estimate(several, name, Rates(), SMS) > estimate(one, name, Rates(), SMS)
    assert chosen(several, {"direct": "no"}).implementation == "fused"


@pytest.mark.parametrize(("fast", "world"), [(True, 2), (True, 4), (True, 8), (False, 4), (False, 8)])
def test_queries_keys_and_values_of_70b_run_fused(fast: bool, world: int) -> None:
    """One of three products is much deeper than the others, and additions over memory are a fifth of the time."""
    asked = sums(1024 // world, 1024 // world, 8192 // world, world=world, fast=fast)
    choice = chosen(asked, {"direct": "no"})
    assert choice.implementation == "fused"
    assert choice.tiles is not None
    assert (choice.tiles.block_n, choice.tiles.warps) == (128, 8)


def test_the_model_knows_how_slow_precise_sums_are_in_our_gemm() -> None:
    """As measured (2 x H200, 2026-11-23, sums.json): cuBLAS is faster where each of its products is large."""
    for depths, width, expected in (
        ((14336, 14336), 8192, "decomposed"),
        ((256, 256, 2048), 8192, "fused"),
        ((7168, 7168), 4096, "decomposed"),
        ((256, 256, 1024), 4096, "fused"),
        ((512, 512, 2048), 4096, "fused"),
    ):
        asked = Problem.of("scatter", 2, 8192, depths, [width], FP8, BF16, False)
        assert chosen(asked, {"direct": "no"}).implementation == expected, asked.key
    for depth, width in ((8192, 14336), (8192, 4096), (4096, 7168), (4096, 2048)):
        asked = Problem.of("gather", 2, 8192, [depth], [width], FP8, BF16, False)
        assert chosen(asked).implementation == "decomposed", asked.key


# --- what reports expect -----------------------------------------------------------------------------------------
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and reports as on GPUs, which compiling for them does not need."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # fake tensors of torch 2.11 initialize a GPU that is said to be there
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None)
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=SMS, name=H200)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def gathered_along_1(b: GraphBuilder) -> Graph:
    """Eight sequences, gathered along their rows: no few ranges of rows a rank."""
    x, w = b.input("x", [8, 512, 8192], BF16, device="cuda"), b.input("w", [8192, 2560], BF16, device="cuda")
    pieces = b.call(aten.split.Tensor, b.gather(x), 8)
    full = b.cat([b.call(operator.getitem, pieces, rank) for rank in range(b.ranks)], 1)
    product = b.mm(b.reshape(full, [b.ranks * 4096, 8192]), w)
    return b.returns(product)


def scaled_with_rows_of_b(b: GraphBuilder) -> Graph:
    """fp8 whose B is not column-major, which neither the GEMM nor cuBLAS takes."""
    x, w = b.input("x", [4096, 512], FP8, device="cuda"), b.input("w", [512, 512], FP8, device="cuda")
    one = b.input("one", [], FP32, device="cuda")
    full = b.gather(x)
    product = b.call_like(full.meta["val"].new_empty((4 * 4096, 512), dtype=BF16), aten._scaled_mm.default,
                          full, w, one, one, None, None, BF16, False)  # fmt: skip
    return b.returns(product)


def two_products(b: GraphBuilder) -> Graph:
    """One B of each memory order, which the GEMM does not take."""
    x, w = b.input("x", [4096, 512], BF16, device="cuda"), b.input("w", [512, 512], BF16, device="cuda")
    v, full = b.permute(b.input("v", [512, 512], BF16, device="cuda"), [1, 0]), b.gather(x)
    return b.returns(b.mm(full, w), b.mm(full, v))


REFUSED_BY_MORE_THAN_SIZES = {
    gathered_along_1: ("decomposed", "8 separate row ranges per rank, more than 4"),
    scaled_with_rows_of_b: ("decomposed", "scales, bias, strides or result type that cuBLAS does not take"),
    two_products: ("fused", "Bs of both memory orders"),
}


@pytest.mark.parametrize("program", REFUSED_BY_MORE_THAN_SIZES)
def test_reports_expect_what_the_call_runs(
    program: Callable[[GraphBuilder], Graph], table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table and a cost model that know sizes only would have one that the call refuses."""
    on_gpu(monkeypatch)
    (remark,) = run_pass(program(GraphBuilder())).fused
    wrong, reason = REFUSED_BY_MORE_THAN_SIZES[program]
    op = remark.op.removeprefix("asynctp::")
    choice = explain(op, *meta(op, remark.call), device=H200)
    assert reason in choice.refused[wrong]
    assert remark.implementation == f"{choice.implementation} ({choice.source})"
    assert wrong != choice.implementation


def meta(op: str, call: dict[str, Any]) -> list[Any]:
    """The arguments that a report tells, without the group; optional ones are the last, by name."""

    def made(value: Any) -> Any:
        if isinstance(value, dict):
            dtype = getattr(torch, value["dtype"])
            return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta")
        if isinstance(value, list):
            return [made(item) for item in value]
        return getattr(torch, value) if value in ("bfloat16", "float16", "float32") else value

    found = {name: made(value) for name, value in call.items() if name != "group_size"}
    needed = [found.pop(name) for name in [*found] if name not in SIGNATURES[op].defaults]
    return [*needed, found]


def all_reduced(b: GraphBuilder, rows: int) -> Graph:
    x, w = b.input("x", [rows, 2048], BF16, device="cuda"), b.input("w", [2048, 8192], BF16, device="cuda")
    return b.returns(b.all_reduce(b.mm(x, w)))


def test_reports_expect_what_runs_of_an_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    monkeypatch.setattr(process_groups, "size_of_group", lambda group: 4)
    remarks = [run_pass(all_reduced(GraphBuilder(), rows)).fused[0] for rows in (64, 8192)]
    assert [remark.implementation for remark in remarks] == [
        "direct (only one that can)",
        "fused (cost model)",
    ]


def test_reports_expect_what_runs_of_products_that_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are rounded each before they are added, which the GEMM does not do."""
    on_gpu(monkeypatch)
    for count, refused in ((1, set()), (2, {"fused"})):
        b, cast = GraphBuilder(), torch.ops.prims.convert_element_type.default
        x, w = b.input("x", [8192, 2048], BF16, device="cuda"), b.input("w", [2048, 4096], BF16, device="cuda")
        products = [b.call(cast, b.mm(operand, w), FP32) for operand in (x, b.relu(x))[:count]]
        total = products[0] if count == 1 else b.add(*products)
        (remark,) = run_pass(b.returns(b.scatter(total))).fused
        assert remark.call["sum_dtype"] == "float32"
        choice = cuda.explain(call_of(SCATTER, *meta(SCATTER, remark.call)), 4)
        assert set(own_reasons(choice)) == refused
        assert remark.implementation == f"{choice.implementation} ({choice.source})"


def test_reports_expect_nothing_of_sizes_that_they_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    b = GraphBuilder()
    (remark,) = run_pass(b.returns(b.mm(b.gather(b.input("x", [6, 8], dynamic=0)), b.input("w", [8, 12])))).fused
    assert (remark.call, remark.implementation) == ({}, "sequential")


def test_reports_expect_nothing_that_is_forced_and_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    for name, expected in (("fused", "chosen per call"), ("direct", "direct (forced)")):
        with select.forced(name):
            (remark,) = run_pass(two_products(GraphBuilder())).fused
        assert remark.implementation == expected


def test_reports_expect_nothing_without_gpus() -> None:
    (remark,) = run_pass(two_products(GraphBuilder())).fused
    assert remark.implementation == "chosen per call"
    assert remark.call["bs"][1] == {"dtype": "bfloat16", "shape": [512, 512], "stride": [1, 512]}
