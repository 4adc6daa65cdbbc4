"""Which implementation a call gets: refusals, the cost model, measured tables, what is forced; and how rows are cut."""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose import names, select
from asynctp_kernels.cuda.choose.implementation import Implementation
from asynctp_kernels.cuda.choose.select import IMPLEMENTATIONS, WHOLE, Choice, Problem, Rates
from asynctp_kernels.cuda.choose.tiles import WireChunks, cut, cut_own, tiles_for, waves
from asynctp_kernels.cuda.choose.wire import (
    ALL_REDUCE_BYTES,
    DIRECT,
    DIRECT_BYTES,
    DIRECT_LIMIT,
    DIRECT_SIGNATURES,
    INT32_LIMIT,
    PLAIN,
    PULL,
    PUSH,
    TRANSPORTS,
    Wire,
)
from asynctp_kernels.cuda.gemm.gemm import NOT_TUNED
from asynctp_kernels.cuda.implementations import ENTRIES
from asynctp_kernels.cuda.plans.gather import GatherCall
from asynctp_kernels.cuda.plans.scatter import ScatterCall
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, MAX_OWN
from graph_builder import GraphBuilder, aten
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import run_pass
from torch.fx import Graph

from asynctp_passes import compat

SMS = 132
H200, UNKNOWN = "NVIDIA H200", "a GPU that nobody measured"
BF16, FP8, E5M2, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32


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


def problem(op: str, rows: int, depth: int, *widths: int, world: int = 4, dtype: str = "bfloat16") -> Problem:
    return Problem(op, world, rows, depth, widths, 1 if dtype.startswith("float8") else 2, 2, dtype)


def chosen(asked: Problem, refused: dict[str, str] | None = None, device: str = UNKNOWN) -> Choice:
    return select.choose(asked, ENTRIES[asked.op], refused or {}, SMS, device)


def entry(op: str, name: str) -> Implementation[Any]:
    (found,) = (each for each in ENTRIES[op] if each.name == name)
    return found


def estimate(asked: Problem, name: str, rates: Rates, sms: int) -> float:
    """Of an implementation that has one."""
    model = entry(asked.op, name).estimate
    assert model is not None
    return model(asked, rates, sms)


# --- whole calls: meta tensors, since a choice looks at no memory --------------------------------------------------
def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(k: int, n: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """[K, N], with K side by side."""
    return empty(n, k, dtype=dtype).t()


def explain(
    op: str,
    *args: Any,
    device: str = UNKNOWN,
    capability: tuple[int, int] = (9, 0),
    world: int = 4,
    sum_dtype: torch.dtype | None = None,
    factors: Sequence[float] | None = None,
) -> Choice:
    with mock.patch.object(cuda.runtime.driver, "machine", return_value=(capability, SMS, device)):
        return cuda.explain(op, (*args, world, "tp"), sum_dtype, None, factors)


def explain_gather(rows: int, k: int, *ns: int, world: int = 4, **others: Any) -> Choice:
    """bf16, dim 0; `rows` over all ranks."""
    a_shard, bs = empty(rows // world, k), [weight(k, n) for n in ns]
    return explain("all_gather_matmul", a_shard, bs, [None] * len(ns), 0, False, world=world, **others)


def explain_scatter(rows: int, k: int, n: int, world: int = 4, **others: Any) -> Choice:
    """bf16, dim 0."""
    options: Any = ([empty(rows, k)], [weight(k, n)], [None], "sum", 0)
    return explain("matmul_reduce_scatter", *options, world=world, **others)


def explain_all_reduce(rows: int, k: int, n: int, world: int = 4, **others: Any) -> Choice:
    """bf16."""
    return explain("matmul_all_reduce", [empty(rows, k)], [weight(k, n)], [None], "sum", world=world, **others)


OVERLAPPED = {"fused", "decomposed"}


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
    """Few rows, as in decoding, get one collective instead of two."""
    for rows in (1, 8, 64, 128, 256):
        assert explain_all_reduce(rows, k, n, world=world, device=device).implementation == "sequential"
    for rows in (8192, 16384, 65536):
        assert explain_all_reduce(rows, k, n, world=world, device=device).implementation in OVERLAPPED


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    """Every implementation's estimate is the scatter's, and the same for the rest; NCCL's own has one latency less."""
    whole, part = (problem(op, 2048, 7168, 4096) for op in ("all_reduce", "scatter"))
    rest = {name: estimate(whole, name, Rates(), SMS) - estimate(part, name, Rates(), SMS) for name in IMPLEMENTATIONS}
    again = 2048 * 3 / 4 * 4096 * 2 / Rates().nccl
    assert rest == pytest.approx(
        {name: again + (0 if name == "sequential" else Rates().nccl_start) for name in IMPLEMENTATIONS}, abs=0.2
    )


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
    ("gather", 16384, 8192, 2560, "fused"),
    ("gather", 16384, 4096, 7168, "fused"),
    ("scatter", 64, 2048, 8192, "direct"),
    ("scatter", 512, 7168, 8192, "direct"),
    ("scatter", 2048, 7168, 8192, "decomposed"),
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
        return Wire("all_gather", ranks, size, kept="full" in flags)
    return Wire("reduce_scatter", ranks, shard * int(widths) * 2, BF16, "sum")


def test_measurements_on_the_other_side_of_what_ranks_share() -> None:
    """Some calls of about 8 MiB would be faster by another transport, which local sizes would have to say."""
    measured = [
        (wire_of(key, int(rows)), implementation)
        for problems in select._table().values()
        for key, by_rows in problems.items()
        for rows, implementation in by_rows.items()
    ]
    other = [wire for wire, implementation in measured if wire.transport() not in TRANSPORTS[implementation]]
    assert (len(measured), len(other)) == (612, 27), "wire.py says so"
    around = [wire.bytes * wire.world for wire in other]
    assert sum(DIRECT_BYTES / 4 <= size <= 2 * DIRECT_BYTES for size in around) >= 23


def test_a_measurement_on_the_other_side_does_not_decide() -> None:
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


# --- the transport: of what ranks share --------------------------------------------------------------------------
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def wire(kind: str, size: int, world: int = 4, dtype: torch.dtype = BF16, **others: Any) -> Wire:
    """Of so many bytes in all."""
    of_sum = (None, "") if kind == "all_gather" else (dtype, "sum")
    return Wire(kind, world, size // world, *of_sum, **others)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_few_bytes_are_pushed_by_one_kernel_and_many_by_copy_engines(world: int) -> None:
    for size in (world * 16, 1 << 20, DIRECT_BYTES):
        assert wire("all_gather", size, world).transport() == DIRECT
        assert wire("reduce_scatter", size, world).transport() == DIRECT
    for size in (DIRECT_BYTES + world * 16, 1 << 26, 1 << 30):
        assert wire("all_gather", size, world).transport() == PUSH
        assert wire("all_gather", size, world, kept=True).transport() == PULL
        assert wire("reduce_scatter", size, world).transport() == PUSH


@pytest.mark.parametrize("world", [2, 4, 8])
def test_an_all_reduce_is_nccls_until_it_is_long(world: int) -> None:
    for size in (world * 16, 1 << 20, ALL_REDUCE_BYTES - world * 16):
        assert wire("all_reduce", size, world).transport() == PLAIN
    for size in (ALL_REDUCE_BYTES, 1 << 30):
        assert wire("all_reduce", size, world).transport() == PUSH


@pytest.mark.parametrize("forced", [None, *IMPLEMENTATIONS, WHOLE])
@pytest.mark.parametrize("kind", KINDS)
def test_nccl_has_what_nothing_else_takes(kind: str, forced: str | None) -> None:
    assert wire(kind, 0).transport(forced) == PLAIN
    assert wire(kind, 4 * INT32_LIMIT).transport(forced) == PLAIN
    if kind != "all_gather":
        for dtype in (torch.float64, torch.int32, FP8):
            assert wire(kind, 1 << 26, dtype=dtype).transport(forced) == PLAIN


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_not_whole_loads_are_not_reduced_from_inboxes(kind: str) -> None:
    """A part of a sum lies at a multiple of its size in an inbox, which is read 16 bytes at a time."""
    for bytes_of_a_rank, forced in itertools.product((16 * 1000 + 2, 16 * 1000 + 8), ("fused", "decomposed", WHOLE)):
        assert wire(kind, 4 * bytes_of_a_rank).transport(forced) == (PUSH if kind == "all_gather" else DIRECT)
    uneven = 4 * ((DIRECT_LIMIT // 4) + 8)
    assert wire(kind, uneven).transport() == (PUSH if kind == "all_gather" else PLAIN)
    assert wire(kind, uneven).transport("direct") == PLAIN
    assert wire(kind, DIRECT_LIMIT).transport("direct") == DIRECT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("forced", "wanted"),
    [("fused", PUSH), ("decomposed", PUSH), (WHOLE, PUSH), ("direct", DIRECT), ("sequential", PLAIN)],
)
@pytest.mark.parametrize("size", [1024, 1 << 25])
def test_an_implementation_that_all_ask_for_brings_its_transport(
    size: int, forced: str, wanted: str, kind: str
) -> None:
    assert wire(kind, size).transport(forced) == wanted
    assert wanted in TRANSPORTS[forced]


def test_a_call_told_in_words() -> None:
    assert wire("all_gather", 4096).told == "all_gather (1024 bytes a rank)"
    assert wire("all_gather", 4096, number_bytes=64).told == "all_gather (1024 bytes a rank and 64 bytes of scales)"
    assert wire("all_gather", 4096, kept=True).told == "all_gather (1024 bytes a rank, kept by every rank)"
    assert wire("reduce_scatter", 4096).told == "reduce_scatter (1024 bytes a rank of bfloat16, sum)"
    after = "reduce_scatter (1024 bytes a rank of bfloat16, sum, after 2 calls that ended with an error there)"
    assert wire("reduce_scatter", 4096, skipped=2).told == after


def local_uses() -> Iterator[tuple[str, GatherCall | ScatterCall]]:
    """(collective, a call): what ranks may make of one collective."""
    shards = {"rows": (empty(96, 64), 0), "blocks": (empty(3, 32, 64), 1), "longer rows": (empty(48, 128), 0),
              "columns": (empty(96, 64), 1), "transposed": (empty(64, 96).t(), 0)}  # fmt: skip
    for kept in (False, True):
        name = f"gather, {'kept' if kept else 'pushed'}"
        for (a, dim), ns, full in itertools.product(shards.values(), ((), (8,), (0,), (13, 72)), (False, True)):
            bs = [weight(a.shape[-1], n) for n in ns]
            biases = [empty(n) if n == 13 else None for n in ns]
            yield name, GatherCall(a, None, bs, (), biases, dim, False, BF16, False, full, 4, None, kept)
    numbers = empty(96, 1, dtype=FP32)
    for a_scale, travels, along in ((numbers, True, None), (empty(dtype=FP32), False, numbers)):
        a, b_scale = empty(96, 64, dtype=FP8), empty(1, 72, dtype=FP32)
        for full, out in itertools.product((False, True), (BF16, FP32)):
            bs = [weight(64, 72, FP8)]
            yield "gather of fp8", GatherCall(a, a_scale, bs, [b_scale], [None], 0, travels, out, False, full, 4, along)
    a, row = empty(1, 96 * 64, dtype=FP8), empty(1, 96, dtype=FP32)
    yield "gather of fp8", cuda.gather_call(a, row, 4, False)
    products = {"rows": ((384,), 64, 0), "blocks": ((3, 128), 64, 1), "longer rows": ((192,), 128, 0),
                "columns": ((96,), 256, 1)}  # fmt: skip
    for (lead, n, dim), ks, added in itertools.product(products.values(), ((8,), (0,), (13, 72)), (False, True)):
        a_parts, b_parts = [empty(*lead, k) for k in ks], [weight(k, n) for k in ks]
        options = ((), (), [None] * len(ks), "sum", dim, BF16, False, 4)
        term = empty(*lead, n) if added else None
        yield "sum", ScatterCall(a_parts, b_parts, *options, added=term)
        term = empty(*lead, n, dtype=FP32) if added else None
        yield "wide sum", ScatterCall(a_parts, b_parts, *options, sum_dtype=FP32, added=term)
    yield "sum", cuda.scatter_call(empty(384, 64), "sum", 4)
    yield "wide sum", cuda.scatter_call(empty(384, 64, dtype=FP32), "sum", 4)


def test_the_wire_is_the_same_whatever_a_rank_makes_of_a_collective() -> None:
    """Widths, depths, views, strides, what is returned, added or only moved: nothing of that is on the wire."""
    found: dict[str, set[Wire]] = {}
    calls: dict[str, int] = {}
    for name, call in local_uses():
        found.setdefault(name, set()).add(call.wire)
        calls[name] = calls.get(name, 0) + 1
    assert {name: len(wires) for name, wires in found.items()} == dict.fromkeys(calls, 1)
    assert min(calls.values()) >= 5
    wires = [each for wires in found.values() for each in wires]
    assert len(set(wires)) == len(wires) == 5
    signatures = {each.signature(transport) for each in wires for transport in (DIRECT, PUSH)}
    assert len(signatures) == 2 * len(wires)


SHARED = st.builds(
    lambda kind, world, size, dtype, op, numbers, kept, skipped: (
        Wire(kind, world, size, number_bytes=numbers, kept=kept, skipped=skipped)
        if kind == "all_gather" else Wire(kind, world, size, dtype, op, skipped=skipped)
    ),
    st.sampled_from(KINDS), st.integers(2, 8), st.integers(0, 1 << 33),
    st.sampled_from([BF16, torch.float16, FP32, torch.float64]), st.sampled_from(["sum", "avg"]),
    st.integers(0, 1 << 20), st.booleans(), st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SHARED, st.sampled_from([None, *IMPLEMENTATIONS, WHOLE]))
def test_every_call_has_a_transport_and_a_signature(shared: Wire, forced: str | None) -> None:
    transport = shared.transport(forced)
    assert transport == replace(shared).transport(forced)
    assert any(transport in needed for needed in TRANSPORTS.values())
    assert (transport == PULL) <= shared.kept
    assert replace(shared, number_bytes=0, skipped=0).transport(forced) == transport
    assert 0 < shared.signature(DIRECT) < DIRECT_SIGNATURES <= shared.signature(PUSH) < 1 << 31, "never 0: no call"
    assert shared.signature(PUSH) != replace(shared, bytes=shared.bytes + 1).signature(PUSH)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(size=st.integers(1, 1 << 20), wanted=st.integers(1, 6), data=st.data())
def test_chunks_of_the_wire(size: int, wanted: int, data: Any) -> None:
    """All bytes once, in order, in whole chunks; a count of chunks says no more than has come, and all at the end."""
    chunks = WireChunks(size)
    assert chunks.chunk % 16 == 0
    pieces = chunks.pieces(wanted)
    assert [first for first, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == size
    assert len(pieces) <= min(wanted, MAX_CHUNKS)
    assert all(end % chunks.chunk == 0 for _, end in pieces[:-1])
    assert chunks.complete(size) == MAX_CHUNKS
    end = data.draw(st.integers(0, size))
    assert min(chunks.complete(end) * chunks.chunk, size) <= max(end, 0) or end == size
    needed = data.draw(st.integers(1, size))
    sent = data.draw(st.integers(0, size))
    if chunks.complete(sent) > chunks.covering(needed):
        assert sent >= needed, "who waits for that chunk has all that it reads"
    assert chunks.complete(size) > chunks.covering(needed)


# --- refusals ----------------------------------------------------------------------------------------------------
def gather_args(**changes: Any) -> tuple[Any, ...]:
    """Of all_gather_matmul, without the group."""
    given_ = {"a": empty(256, 512), "bs": [weight(512, 512)], "biases": None, "dim": 0, "full": False, **changes}
    biases = given_["biases"] or [None] * len(given_["bs"])
    return given_["a"], given_["bs"], biases, given_["dim"], given_["full"]


def scaled_gather_args(**changes: Any) -> tuple[Any, ...]:
    """Of all_gather_scaled_matmul, without the group."""
    defaults = {
        "a": empty(256, 512, dtype=FP8), "a_scale": empty(dtype=FP32), "bs": [weight(512, 512, FP8)],
        "b_scales": [empty(dtype=FP32)], "biases": [None], "dim": 0, "travels": False, "out_dtype": BF16,
        "fast": True, "full": False,
    }  # fmt: skip
    return tuple({**defaults, **changes}.values())


def scatter_args(**changes: Any) -> tuple[Any, ...]:
    """Of matmul_reduce_scatter, without the group."""
    given_ = {"a": [empty(1024, 512)], "bs": [weight(512, 512)], "biases": None, "op": "sum", "dim": 0, **changes}
    biases = given_["biases"] or [None] * len(given_["bs"])
    return given_["a"], given_["bs"], biases, given_["op"], given_["dim"]


def scaled_scatter_args(**changes: Any) -> tuple[Any, ...]:
    """Of scaled_matmul_reduce_scatter, without the group."""
    defaults = {
        "a": [empty(1024, 512, dtype=FP8)], "bs": [weight(512, 512, FP8)], "a_scales": [empty(dtype=FP32)],
        "b_scales": [empty(dtype=FP32)], "biases": [None], "op": "sum", "dim": 0, "out_dtype": BF16, "fast": True,
    }  # fmt: skip
    return tuple({**defaults, **changes}.values())


def scaled_sum_args(count: int = 2, **changes: Any) -> tuple[Any, ...]:
    """Of scaled_matmul_reduce_scatter with several products, without the group."""
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
    """Of scaled_matmul_all_reduce, without the group."""
    *operands, _, out_dtype, fast = scaled_scatter_args(**changes)
    return *operands, out_dtype, fast


GATHER, SCALED_GATHER, SCATTER, SCALED_SCATTER, ALL_REDUCE, SCALED_ALL_REDUCE = (
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "matmul_reduce_scatter",
    "scaled_matmul_reduce_scatter",
    "matmul_all_reduce",
    "scaled_matmul_all_reduce",
)
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
    "gather five": (GATHER, gather_args(bs=[weight(512, 512)] * 5), {"fused": "5 products, more than 4"}),
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
        {"fused": "for some products only"},
    ),
    "scaled gather": (SCALED_GATHER, scaled_gather_args(), {}),
    "scaled gather of rows": (SCALED_GATHER, scaled_gather_args(**ROW_SCALES), {}),
    "scaled gather of rows to fp16": (
        SCALED_GATHER,
        scaled_gather_args(**ROW_SCALES, out_dtype=torch.float16),
        {"decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS},
    ),
    "scaled gather n-major": (
        SCALED_GATHER,
        scaled_gather_args(bs=[empty(512, 512, dtype=FP8)]),
        {"decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS, "fused": "an fp8 B whose columns are contiguous"},
    ),
    "scaled gather to fp32": (SCALED_GATHER, scaled_gather_args(out_dtype=FP32), {}),
    "scaled gather of both scales": (
        SCALED_GATHER,
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
        SCALED_GATHER,
        scaled_gather_args(a=empty(256, 512, dtype=E5M2), bs=[weight(512, 512, E5M2)]),
        {"decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS},
    ),
    "scaled gather of e5m2 and e4m3": (SCALED_GATHER, scaled_gather_args(a=empty(256, 512, dtype=E5M2)), {}),
    "scaled gather of e5m2 rows": (
        SCALED_GATHER,
        scaled_gather_args(a=empty(256, 512, dtype=E5M2), **ROW_SCALES),
        {"decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS},
    ),
    "scaled gather of 1x128 and 128x128": (
        SCALED_GATHER,
        scaled_gather_args(**in_blocks((256, 4), (4, 4))),
        NOT_IN_GEMM,
    ),
    "scaled gather of 1x128 and 1x128": (
        SCALED_GATHER,
        scaled_gather_args(**in_blocks((256, 4), (4, 512))),
        NOT_IN_GEMM,
    ),
    "scaled gather of 128x128 and 1x128": (
        SCALED_GATHER,
        scaled_gather_args(**in_blocks((2, 4), (4, 512))),
        NOT_IN_GEMM,
    ),
    "scaled gather of blocks of one depth": (
        SCALED_GATHER,
        scaled_gather_args(
            a=empty(256, 128, dtype=FP8),
            bs=[weight(128, 512, FP8)],
            **in_blocks((256, 1), (1, 4)),
        ),
        NOT_IN_GEMM,
    ),
    "scaled gather of blocks to fp32": (
        SCALED_GATHER,
        scaled_gather_args(**in_blocks((256, 4), (4, 4)), out_dtype=FP32),
        NOT_IN_GEMM,
    ),
    "scaled gather of blocks, e5m2": (
        SCALED_GATHER,
        scaled_gather_args(a=empty(256, 512, dtype=torch.float8_e5m2), **in_blocks((256, 4), (4, 4))),
        {**NOT_IN_GEMM, "decomposed": NOT_CUBLAS, "direct": NOT_CUBLAS},
    ),
    "scaled gather of blocks, odd rows": (
        SCALED_GATHER,
        scaled_gather_args(a=empty(250, 512, dtype=FP8), **in_blocks((250, 4), (4, 4))),
        {**NOT_IN_GEMM, "decomposed": "250 rows with scales of 1x128 blocks: not a multiple of 4"},
    ),
    "scaled gather of one block a rank": (
        SCALED_GATHER,
        scaled_gather_args(a=empty(128, 128, dtype=FP8), bs=[weight(128, 512, FP8)], **in_blocks((1, 1), (1, 512))),
        NOT_IN_GEMM,
    ),
    "scaled gather of one row a rank": (
        SCALED_GATHER,
        scaled_gather_args(a=empty(1, 128, dtype=FP8), bs=[weight(128, 512, FP8)], **in_blocks((1, 1), (1, 512))),
        {"fused": "a row of A is longer than a chunk"},
    ),
    "scaled gather of blocks, outer": (
        SCALED_GATHER,
        scaled_gather_args(a=empty(2, 256, 512, dtype=FP8), **in_blocks((2, 256, 4), (4, 4)), dim=1),
        NOT_IN_GEMM,
    ),
    "scaled gather of blocks, outer of odd rows": (
        SCALED_GATHER,
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
    "scaled scatter": (SCALED_SCATTER, scaled_scatter_args(), {}),
    "scaled scatter of sums": (
        SCALED_SCATTER,
        scaled_sum_args(),
        {},
    ),
    "scaled scatter of sums with some biases": (
        SCALED_SCATTER,
        scaled_sum_args(biases=[None, empty(512)]),
        {"fused": "biases for some products only"},
    ),
    "scaled scatter of sums with biases": (
        SCALED_SCATTER,
        scaled_sum_args(biases=[empty(512)] * 2),
        {"fused": "a bias in a sum"},
    ),
    "scaled scatter of sums, one of e5m2": (
        SCALED_SCATTER,
        scaled_sum_args(a=[empty(1024, 512, dtype=FP8), empty(1024, 512, dtype=torch.float8_e5m2)]),
        {"fused": "As of several dtypes"},
    ),
    "scaled scatter of sums, one by rows": (
        SCALED_SCATTER,
        scaled_sum_args(a_scales=[empty(1024, 1, dtype=FP32), empty(dtype=FP32)]),
        {"fused": "tensorwise and rowwise A scales in one sum"},
    ),
    "scaled scatter of sums, outer": (
        SCALED_SCATTER,
        scaled_sum_args(a=[empty(5, 512, 512, dtype=FP8)] * 2, dim=1),
        {"decomposed": "5 separate row ranges"},
    ),
    "scaled scatter of sums in fp32": (SCALED_SCATTER, scaled_sum_args(out_dtype=FP32), {}),
    "scaled scatter of five": (SCALED_SCATTER, scaled_sum_args(5), {"fused": "5 products, more than 4"}),
    "scaled scatter of sums, one not for the GEMM": (
        SCALED_SCATTER,
        scaled_sum_args(
            a=[empty(1024, 512, dtype=FP8), empty(1024, 256, dtype=FP8)],
            bs=[weight(512, 508, FP8), weight(256, 508, FP8)],
        ),
        {**dict.fromkeys(("decomposed", "direct"), NOT_CUBLAS), "fused": "508 columns"},
    ),
    "scaled scatter of sums, one not for cuBLAS": (
        SCALED_SCATTER,
        scaled_sum_args(b_scales=[empty(1, 512, dtype=FP32), empty(dtype=FP32)], out_dtype=torch.float16),
        {**dict.fromkeys(("decomposed", "direct"), NOT_CUBLAS), "fused": "tensorwise and rowwise B scales in one call"},
    ),
    "scaled scatter of sums, one in blocks": (
        SCALED_SCATTER,
        scaled_sum_args(
            a_scales=[empty(1024, 4, dtype=FP32), empty(dtype=FP32)],
            b_scales=[empty(4, 4, dtype=FP32), empty(dtype=FP32)],
        ),
        NOT_IN_GEMM,
    ),
    "scaled scatter of rows and a number, slow": (
        SCALED_SCATTER,
        scaled_scatter_args(a_scales=[empty(1024, 1, dtype=FP32)], b_scales=[empty(1, dtype=FP32)], fast=False),
        {},
    ),
    "scaled scatter of 1x128 and 128x128": (
        SCALED_SCATTER,
        scaled_scatter_args(**scattered_in_blocks((1024, 4), (4, 4))),
        NOT_IN_GEMM,
    ),
    "scaled scatter of 128x128 and 1x128 of two ranks": (
        SCALED_SCATTER,
        scaled_scatter_args(a=[empty(256, 512, dtype=FP8)], **scattered_in_blocks((2, 4), (4, 512))),
        {**NOT_IN_GEMM, "decomposed": "64 rows with scales of 128x128 blocks: not a multiple of 128"},
    ),
    "scaled all-reduce of 1x128 and 128x128": (
        SCALED_ALL_REDUCE,
        scaled_all_reduce_args(a=[empty(2, 512, 512, dtype=FP8)], **scattered_in_blocks((2, 512, 4), (4, 4))),
        NOT_IN_GEMM,
    ),
    "all-reduce": (ALL_REDUCE, all_reduce_args(), {}),
    "all-reduce of any rows": (
        ALL_REDUCE,
        all_reduce_args(a=[empty(2, 511, 512)]),
        dict.fromkeys(("fused", "decomposed", "direct"), "1022 rows are not divisible by 4 ranks"),
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
        SCALED_ALL_REDUCE,
        scaled_all_reduce_args(
            a=[empty(2, 512, 512, dtype=FP8)],
            a_scales=[empty(2, 512, 1, dtype=FP32)],
            b_scales=[empty(1, 512, dtype=FP32)],
            fast=False,
        ),
        {},
    ),
}


def own_reasons(choice: Choice) -> dict[str, str]:
    """Why implementations cannot make this rank's products, whatever the transport is."""
    return {name: reason for name, reason in choice.refused.items() if "by another transport" not in reason}


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


def call_of(op: str, args: tuple[Any, ...]) -> GatherCall | ScatterCall:
    found = cuda._call_of(op, (*args, 4, None), None, None, None)
    return replace(found, unscaled_op="matmul_all_reduce") if op.endswith("all_reduce") else found  # type: ignore[call-arg]


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
        reason = "several products, each rounded to torch.bfloat16 before they are added in torch.float32"
        assert own_reasons(converted) == {"fused": reason}
        assert plain.estimates_us["decomposed"] < converted.estimates_us["decomposed"]


def test_the_gemm_converts_a_scaled_product() -> None:
    assert own_reasons(explain(SCALED_SCATTER, *scaled_scatter_args(), sum_dtype=FP32)) == {}
    refused = own_reasons(explain(SCALED_SCATTER, *scaled_sum_args(), sum_dtype=FP32))
    assert list(refused) == ["fused"]
    assert own_reasons(explain(SCALED_SCATTER, *scaled_sum_args(out_dtype=FP32), sum_dtype=FP32)) == {}


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
    assert refused == ({} if able else {"fused": "products that are multiplied by numbers before they are added"})


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_have_no_fused_gemm(capability: tuple[int, int]) -> None:
    choice = explain(GATHER, *gather_args(), capability=capability)
    assert own_reasons(choice) == {"fused": NOT_TUNED}


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_other_gpus_have_no_scales_of_blocks(capability: tuple[int, int]) -> None:
    """The program's own products then say so, as torch does."""
    for op, args in (
        (SCALED_GATHER, scaled_gather_args(**in_blocks((256, 4), (4, 4)))),
        (SCALED_SCATTER, scaled_scatter_args(**scattered_in_blocks((1024, 4), (4, 4)))),
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
                transport = call_of(op, args).wire.transport(implementation)
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


@pytest.fixture
def told_again() -> None:
    """As if no old name had been given yet."""
    names._warn.cache_clear()


@pytest.mark.usefixtures("told_again")
def test_an_old_name_is_another_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a program forces, and of the variable: each warns once."""
    with pytest.warns(FutureWarning, match="forced names 'unfused', which is now 'sequential'"), cuda.forced("unfused"):
        assert select.requested() == "sequential"
    monkeypatch.setenv(select.VARIABLE, "unfused")
    select.refresh()
    with pytest.warns(FutureWarning, match=rf"{select.VARIABLE} names 'unfused', which is now 'sequential'"):
        assert select.requested() == "sequential"
    select.refresh()
    with warnings.catch_warnings(), cuda.forced("unfused"):
        warnings.simplefilter("error")
        assert select.requested() == "sequential"


@pytest.mark.usefixtures("told_again")
def test_a_table_of_an_older_version_is_read(table: Path) -> None:
    write(table, {UNKNOWN: {KEY: {"1000": "unfused", "2000": "unfused"}}})
    with pytest.warns(FutureWarning, match="tuning.json names 'unfused', which is now 'sequential'") as told:
        assert select.tuned() == {UNKNOWN: {KEY: {"1000": "sequential", "2000": "sequential"}}}
    assert len(told) == 1
    assert chosen(ASKED).implementation == "sequential"


def test_environment_auto_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.VARIABLE, "auto")
    select.refresh()
    assert select.requested() is None
    monkeypatch.setenv(select.VARIABLE, "Fused")
    select.refresh()
    with pytest.raises(ValueError, match=rf"{select.VARIABLE}='Fused' is not valid"):
        select.requested()


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
    a, b = empty(1024, 512), weight(512, 128)
    asked = [cuda.problem_of("all_gather_matmul", (a, [b], [None], 0, full, 4, "0")) for full in (False, True)]
    assert [each.key for each in asked] == ["gather:4:bfloat16:512:128", "gather:4:bfloat16:512:128:full"]
    plain, returned = (chosen(each).estimates_us for each in asked)
    assert [name for name in plain if returned[name] > plain[name]] == ["decomposed"]
    assert [name for name in plain if returned[name] < plain[name]] == []


def test_what_was_measured_with_fast_sums_does_not_decide_for_precise_ones(table: Path) -> None:
    """The shipped table knows so many rows in fp8; torchao's backward has them with use_fast_accum=False."""
    sizes = ("gather", 2, 4096, [8192], [2560], FP8, BF16)
    fast, precise = Problem.of(*sizes, True), Problem.of(*sizes, False)
    assert (chosen(fast, device=H200).implementation, chosen(fast, device=H200).source) == ("fused", "measured")
    choice = chosen(precise, device=H200)
    assert (choice.implementation, choice.source) == (select.fastest(choice.estimates_us), "cost model")
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
    assert select.fastest({"fused": 100.0, "decomposed": decomposed, "sequential": 120.0}) == winner
    assert select.fastest({"decomposed": decomposed, "direct": 99.0}) == ("decomposed" if decomposed < 99 else "direct")


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
    choice = explain(remark.op.removeprefix("asynctp::"), *meta(remark.call), device=H200)
    assert reason in choice.refused[wrong]
    assert remark.implementation == f"{choice.implementation} ({choice.source})"
    assert wrong != choice.implementation


def meta(call: dict[str, Any]) -> list[Any]:
    """The arguments that a report tells, without the group."""

    def made(value: Any) -> Any:
        if isinstance(value, dict):
            dtype = getattr(torch, value["dtype"])
            return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta")
        if isinstance(value, list):
            return [made(item) for item in value]
        return getattr(torch, value) if value in ("bfloat16", "float16", "float32") else value

    apart = ("group_size", "along_shard", "all_keep", "sum_dtype")
    return [made(value) for name, value in call.items() if name not in apart]


def all_reduced(b: GraphBuilder, rows: int) -> Graph:
    x, w = b.input("x", [rows, 2048], BF16, device="cuda"), b.input("w", [2048, 8192], BF16, device="cuda")
    return b.returns(b.all_reduce(b.mm(x, w)))


def test_reports_expect_the_second_half_of_an_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    monkeypatch.setattr(compat, "size_of_group", lambda group: 4)
    remarks = [run_pass(all_reduced(GraphBuilder(), rows)).fused[0] for rows in (64, 8192)]
    assert [remark.implementation for remark in remarks] == [
        "sequential (only one that can)",
        "fused, then all-gather (cost model)",
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
        choice = cuda.explain(SCATTER, (*meta(remark.call), 4, "tp"), FP32)
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


# --- properties --------------------------------------------------------------------------------------------------
quick = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SIZES = st.integers(1, 20_000)
PROBLEMS = st.builds(
    lambda op, world, shard, depth, widths, itemsize, out_itemsize, precise: Problem(
        op, world, shard * world, depth, widths[: 1 if op == "scatter" else None], itemsize, out_itemsize,
        "float8_e4m3fn" if itemsize == 1 else "bfloat16", precise and itemsize == 1,
    ),
    st.sampled_from(["gather", "scatter"]), st.integers(2, 8), st.integers(0, 20_000), SIZES,
    st.lists(SIZES, min_size=1, max_size=5).map(tuple), st.sampled_from([1, 2, 4]), st.sampled_from([2, 4]),
    st.booleans(),
)  # fmt: skip


@quick
@given(PROBLEMS, st.sampled_from(IMPLEMENTATIONS), st.sampled_from([1, 78, 114, 132, 148]))
def test_estimates_are_times(asked: Problem, implementation: str, sms: int) -> None:
    found = estimate(asked, implementation, Rates(), sms)
    assert math.isfinite(found)
    assert found > 0


@quick
@given(PROBLEMS, st.sampled_from(["direct", "sequential"]))
def test_twice_the_products_take_longer(asked: Problem, implementation: str) -> None:
    more = replace(asked, rows=2 * asked.rows, depth=2 * asked.depth)
    assert estimate(more, implementation, Rates(), SMS) >= estimate(asked, implementation, Rates(), SMS)


@quick
@given(PROBLEMS, st.sets(st.sampled_from(IMPLEMENTATIONS[:3])), st.sampled_from([H200, UNKNOWN]))
def test_the_choice_is_a_function_of_the_problem(asked: Problem, refused: set[str], device: str) -> None:
    """And of why some cannot run it."""
    forwards = dict.fromkeys(sorted(refused), "no")
    backwards = dict.fromkeys(sorted(refused, reverse=True), "no")
    first = chosen(asked, forwards, device)
    select.refresh()
    assert first == chosen(replace(asked), backwards, device)
    assert first.implementation not in refused
    assert set(first.estimates_us) == set(IMPLEMENTATIONS) - refused
    assert 1 <= first.chunks <= MAX_CHUNKS
    assert first.tiles is not None


@pytest.mark.parametrize(
    ("asked", "chunks"),
    [
        # too few rows to fill the tiles of each
        (problem("scatter", 1024, 2048, 8192, world=2), 1),
        (problem("gather", 2048, 8192, 2560, world=2), 1),
        # products are the limit
        (problem("scatter", 2048, 2048, 8192, world=2), 2),
        (problem("scatter", 16384, 2048, 8192, world=2), 2),
        (problem("gather", 4096, 8192, 2560, world=2), 2),
        (problem("gather", 16384, 8192, 2560, world=2), 2),
        # copies are, for long
        (problem("scatter", 8192, 2048, 8192, world=2, dtype="float8_e4m3fn"), 4),
        (problem("scatter", 8192, 1024, 8192, world=2), 4),
        (problem("all_reduce", 8192, 1024, 8192, world=2), 4),
        (problem("gather", 8192, 8192, 1280, world=2), 4),
        # copies are, for a short time or over several ranks: what more of them cost is more than they save
        (problem("scatter", 2048, 2048, 8192, world=2, dtype="float8_e4m3fn"), 2),
        (problem("scatter", 4096, 1792, 4096, world=2, dtype="float8_e4m3fn"), 2),
        (problem("gather", 4096, 8192, 1280, world=2), 2),
        (problem("scatter", 65536, 2048, 8192, world=4, dtype="float8_e4m3fn"), 2),
        (problem("gather", 8192, 8192, 1280, world=8), 1),
    ],
)  # fmt: skip
def test_chunks_of_a_rank(asked: Problem, chunks: int) -> None:
    """Over two ranks as `docs/results/2026-11-25-h200x2/chunks.txt` has them, within 2 %."""
    assert chosen(asked).chunks == chunks


@quick
@given(
    outer=st.integers(1, 40), inner=st.integers(1, 5000), block_m=st.sampled_from([1, 3, 64, 128]),
    wanted=st.integers(-1, 9),
)  # fmt: skip
def test_cut(outer: int, inner: int, block_m: int, wanted: int) -> None:
    """All rows once and in order, at borders that the GEMM's tiles have, and the way that the kernel counts tiles."""
    chunks = cut(outer, inner, block_m, wanted)
    per_block = math.ceil(inner / block_m)
    assert 1 <= len(chunks) <= min(MAX_CHUNKS, max(wanted, 1))
    assert [first for first, _ in chunks.rows] == [0, *(end for _, end in chunks.rows[:-1])]
    assert chunks.rows[-1][1] == outer * inner
    assert all(first < end for first, end in chunks.rows)
    for border, _ in chunks.rows[1:]:
        assert border % (inner if outer > 1 else block_m) == 0
    assert sum(chunks.row_tiles) == outer * per_block
    assert all(count == chunks.tiles for count in chunks.row_tiles[:-1])
    assert chunks.row_tiles[-1] <= chunks.tiles
    for tile in {0, per_block - 1, outer * per_block // 2, outer * per_block - 1}:
        first, end = chunks.rows[tile // chunks.tiles]
        row = tile // per_block * inner + tile % per_block * block_m
        assert first <= row < end


@quick
@given(
    outer=st.integers(1, 6), inner=st.integers(1, 70_000), wanted=st.integers(1, 6), group=st.sampled_from([1, 2, 4, 8])
)
def test_cut_own(outer: int, inner: int, wanted: int, group: int) -> None:
    """Equal parts of each chunk, that a GEMM counts in `MAX_OWN` words; blocks stay whole."""
    chunks = cut(outer, inner, 128, wanted)
    own = cut_own(chunks, outer, inner, 128, min(group, chunks.tiles))
    assert own.rows[0][0] == 0
    assert own.rows[-1][1] == outer * inner
    assert all(before[1] == after[0] for before, after in itertools.pairwise(own.rows))
    assert sum(own.row_tiles) == sum(chunks.row_tiles)
    assert set(own.row_tiles[:-1]) <= {own.tiles}
    assert len(own) <= MAX_OWN
    assert chunks.tiles % own.tiles == 0
    if outer > 1:
        assert own == chunks


@pytest.mark.parametrize(
    ("tiles", "wanted", "parts"),
    [(1, 1, (1,)), (2, 1, (1, 1)), (7, 1, (7,)), (8, 2, (2,) * 4), (16, 2, (4,) * 4), (32, 2, (8,) * 4),
     (31, 2, (8, 8, 8, 7)), (64, 2, (8,) * 8), (22, 2, (11, 11)), (200, 2, (20,) * 10), (512, 2, (32,) * 16)],
)  # fmt: skip
def test_own_rows_are_cut_finer(tiles: int, wanted: int, parts: tuple[int, ...]) -> None:
    """Into what the GEMM takes together, or half a chunk: one is left to reduce at the end."""
    chunks = cut(1, tiles * 128, 128, wanted)
    assert cut_own(chunks, 1, tiles * 128, 128, min(8, chunks.tiles)).row_tiles == parts


@pytest.mark.parametrize(
    ("count", "apart", "expected"),
    [
        (1, True, [[0]]),
        (2, True, [[0], [1]]),
        (2, False, [[0, 1]]),
        (4, True, [[0], [1], [2], [3]]),
        (4, False, [[0, 1, 2, 3]]),
    ],
)
def test_pieces(count: int, apart: bool, expected: list[list[int]]) -> None:
    chunks = cut(1, 1024, 128, count)
    pieces = chunks.pieces(apart)
    assert [list(piece) for piece in pieces] == expected
    rows = [chunks.of(piece) for piece in pieces]
    assert (rows[0][0], rows[-1][1]) == (0, 1024)
    assert [end for _, end in rows[:-1]] == [start for start, _ in rows[1:]]


@quick
@given(rows=st.integers(0, 10**6), columns=SIZES, block=st.sampled_from([64, 128, 256]), sms=st.integers(1, 200))
def test_waves(rows: int, columns: int, block: int, sms: int) -> None:
    tiles = math.ceil(rows / 128) * math.ceil(columns / block)
    assert waves(rows, columns, 128, block, sms) * sms >= tiles
    assert (waves(rows, columns, 128, block, sms) - 1) * sms < max(tiles, 1)


@quick
@given(rows=st.integers(1, 10**5), columns=SIZES, fp8=st.booleans(), precise=st.booleans())
def test_tiles_fill_the_tensor_cores(rows: int, columns: int, fp8: bool, precise: bool) -> None:
    tiles = tiles_for(FP8 if fp8 else BF16, precise, rows, columns, SMS)
    assert tiles.block_m == 128
    assert tiles.block_k * (1 if fp8 else 2) == (256 if fp8 and precise else 128), (
        "lines that TMA swizzles, of 128 bytes"
    )
    assert (tiles.imprecise is not None) == (fp8 and precise)
    assert tiles.block_m * tiles.block_n // (32 * tiles.warps) <= 128, "fp32 sums of a thread"
