"""The transport of a call: a choice of all ranks, from what they share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels.cuda.choose.select import WHOLE
from asynctp_kernels.cuda.choose.tiles import WireChunks
from asynctp_kernels.cuda.choose.wire import (
    ALL_REDUCE_BYTES,
    ALL_REDUCE_LIMIT,
    DIRECT,
    DIRECT_BYTES,
    DIRECT_LIMIT,
    DIRECT_SIGNATURES,
    EXTREME_BYTES,
    EXTREME_DTYPES,
    INT32_LIMIT,
    PLAIN,
    PULL,
    PUSH,
    TRANSPORTS,
    Wire,
)
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from asynctp_kernels.cuda.gemm.copy_kernels import SIGNATURES
from asynctp_kernels.cuda.implementations import IMPLEMENTATIONS
from asynctp_kernels.cuda.plans import collectives
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS
from hypothesis import given, settings
from hypothesis import strategies as st
from selections import BF16, FP8, FP32, empty, weight

# --- the transport: of what ranks share --------------------------------------------------------------------------
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def wire(kind: str, size: int, world: int = 4, dtype: torch.dtype = BF16, **others: Any) -> Wire:
    """Of so many bytes in all."""
    of_sum = (None, "") if kind == "all_gather" else (dtype, "sum")
    return Wire(kind, world, size if kind == "all_reduce" else size // world, *of_sum, **others)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_few_bytes_are_pushed_by_one_kernel_and_many_by_copy_engines(world: int) -> None:
    for size in (world * 16, 1 << 20, DIRECT_BYTES):
        assert wire("all_gather", size, world).transport() == DIRECT
        assert wire("reduce_scatter", size, world).transport() == DIRECT
    for size in (DIRECT_BYTES + world * 16, 1 << 26, 1 << 30):
        assert wire("all_gather", size, world).transport() == PUSH
        assert wire("all_gather", size, world, kept=True).transport() == PULL
        assert wire("reduce_scatter", size, world).transport() == PUSH


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_an_all_reduce_is_direct_until_it_is_long(world: int) -> None:
    for size in (2, 14, world * 16, 1 << 20, ALL_REDUCE_BYTES - 2):
        assert wire("all_reduce", size, world).transport() == DIRECT
    for size in (ALL_REDUCE_BYTES, 1 << 30):
        assert wire("all_reduce", size // (world * 16) * world * 16 + world * 16, world).transport() == PUSH
        assert wire("all_reduce", size // (world * 16) * world * 16 + world * 16 + 2, world).transport() == PLAIN


@pytest.mark.parametrize("forced", [None, *IMPLEMENTATIONS, WHOLE])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_maximum_is_direct_while_it_is_small(world: int, forced: str | None) -> None:
    """Any number of bytes will do, and any implementation that ranks ask for but NCCL."""
    expected = PLAIN if forced == "sequential" else DIRECT
    for dtype, how in itertools.product(EXTREME_DTYPES, ("max", "min")):
        for size in (1, 3, 16, 4096, EXTREME_BYTES):
            assert Wire("all_reduce", world, size, dtype, how).transport(forced) == expected
        for size in (0, EXTREME_BYTES + 1, 1 << 30):
            assert Wire("all_reduce", world, size, dtype, how).transport(forced) == PLAIN
    for dtype in (FP8, torch.float8_e5m2, torch.int16, torch.complex64):
        assert Wire("all_reduce", world, 64, dtype, "max").transport(forced) == PLAIN


def test_a_maximum_is_like_no_other_call() -> None:
    """Neither a gather nor a sum of as many bytes has its signature."""
    call = collectives.scatter_call(empty(1, 6, dtype=FP32), "max", 4, "all_reduce")
    assert call.wire == Wire("all_reduce", 4, 24, FP32, "max")
    assert call.wire.told == "all_reduce (24 bytes a rank of float32, max)"
    others = [
        collectives.gather_call(empty(1, 6, dtype=FP32), None, 4, False).wire,
        collectives.scatter_call(empty(1, 6, dtype=FP32), "sum", 4, "all_reduce").wire,
        *(replace(call.wire, **other) for other in ({"reduce_op": "min"}, {"bytes": 48}, {"dtype": torch.int32})),
    ]
    signatures = {each.signature(DIRECT) for each in (call.wire, *others)}
    assert len(signatures) == 6


def test_shots_of_an_all_reduce() -> None:
    """One, until it sends much more than two: of two ranks it never does, and adds up more."""
    last = {2: 8 << 20, 3: 9 << 17, 4: 1 << 19}
    for world, size in last.items():
        found = [wire("all_reduce", each, world).shots for each in (2, size // 2, size, size + 16, 2 * size)]
        assert found == [1, 1, 1, 2, 2], world
    assert wire("all_reduce", 1 << 17, 8).shots == 1
    assert wire("all_reduce", 1 << 18, 8).shots == 2


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
    limit = ALL_REDUCE_LIMIT if kind == "all_reduce" else DIRECT_LIMIT
    uneven = 4 * ((limit // 4) + 8)
    assert wire(kind, uneven).transport() == (PUSH if kind == "all_gather" else PLAIN)
    assert wire(kind, uneven).transport("direct") == PLAIN
    assert wire(kind, limit).transport("direct") == DIRECT


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


def local_uses() -> Iterator[tuple[str, GatherFacts | ReduceFacts]]:
    """(collective, a call): what ranks may make of one collective."""
    shards = {"rows": (empty(96, 64), 0), "blocks": (empty(3, 32, 64), 1), "longer rows": (empty(48, 128), 0),
              "columns": (empty(96, 64), 1), "transposed": (empty(64, 96).t(), 0)}  # fmt: skip
    for kept in (False, True):
        name = f"gather, {'kept' if kept else 'pushed'}"
        for (a, dim), ns, full in itertools.product(shards.values(), ((), (8,), (0,), (13, 72)), (False, True)):
            bs = [weight(a.shape[-1], n) for n in ns]
            biases = [empty(n) if n == 13 else None for n in ns]
            yield name, GatherFacts(a, bs, biases, dim, full, 4, all_keep=kept)
    numbers = empty(96, 1, dtype=FP32)
    for a_scale, travels, along in ((numbers, True, None), (empty(dtype=FP32), False, numbers)):
        a, b_scale = empty(96, 64, dtype=FP8), empty(1, 72, dtype=FP32)
        for full, out in itertools.product((False, True), (BF16, FP32)):
            bs = [weight(64, 72, FP8)]
            scaling = (a_scale, [b_scale], travels, out, False)
            yield "gather of fp8", GatherFacts(a, bs, [None], 0, full, 4, *scaling, along, False)
    a, row = empty(1, 96 * 64, dtype=FP8), empty(1, 96, dtype=FP32)
    yield "gather of fp8", collectives.gather_call(a, row, 4, False)
    products = {"rows": ((384,), 64, 0), "blocks": ((3, 128), 64, 1), "longer rows": ((192,), 128, 0),
                "columns": ((96,), 256, 1)}  # fmt: skip
    for (lead, n, dim), ks, added in itertools.product(products.values(), ((8,), (0,), (13, 72)), (False, True)):
        a_parts, b_parts = [empty(*lead, k) for k in ks], [weight(k, n) for k in ks]
        options = ([None] * len(ks), "sum", dim, 4)
        term = empty(*lead, n) if added else None
        yield "sum", ReduceFacts(a_parts, b_parts, *options, added=term)
        term = empty(*lead, n, dtype=FP32) if added else None
        yield "wide sum", ReduceFacts(a_parts, b_parts, *options, sum_dtype=FP32, added=term)
    for (lead, n, _), ks in itertools.product(list(products.values())[:-1], ((8,), (0,), (13, 72))):
        a_parts, b_parts = [empty(*lead, k) for k in ks], [weight(k, n) for k in ks]
        options = ([None] * len(ks), "sum", None, 4)
        yield "whole sum", ReduceFacts(a_parts, b_parts, *options)
    yield "whole sum", collectives.scatter_call(empty(1, 384 * 64), "sum", 4, "all_reduce")
    yield "sum", collectives.scatter_call(empty(384, 64), "sum", 4)
    yield "wide sum", collectives.scatter_call(empty(384, 64, dtype=FP32), "sum", 4)


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
    assert len(set(wires)) == len(wires) == 6
    signatures = {each.signature(transport) for each in wires for transport in (DIRECT, PUSH)}
    assert len(signatures) == 2 * len(wires)


ACCORDS = st.integers(0, (1 << 31) - 1)
SHARED = st.builds(
    lambda kind, world, size, dtype, op, numbers, kept, skipped, accord: (
        Wire(kind, world, size, number_bytes=numbers, kept=kept, skipped=skipped, accord=accord)
        if kind == "all_gather" else Wire(kind, world, size, dtype, op, skipped=skipped, accord=accord)
    ),
    st.sampled_from(KINDS), st.integers(2, 8), st.integers(0, 1 << 33),
    st.sampled_from([BF16, torch.float16, FP32, torch.float64]), st.sampled_from(["sum", "avg", "max", "min"]),
    st.integers(0, 1 << 20), st.booleans(), st.integers(0, 3), ACCORDS,
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SHARED, st.sampled_from([None, *IMPLEMENTATIONS, WHOLE]))
def test_every_call_has_a_transport_and_a_signature(shared: Wire, forced: str | None) -> None:
    transport = shared.transport(forced)
    assert transport == replace(shared).transport(forced)
    assert any(transport in needed for needed in TRANSPORTS.values())
    assert (transport == PULL) <= shared.kept
    assert replace(shared, number_bytes=0, skipped=0, accord=0).transport(forced) == transport
    assert 0 < shared.signature(DIRECT) < DIRECT_SIGNATURES <= shared.signature(PUSH) < 1 << 31, "never 0: no call"
    assert shared.signature(PUSH) != replace(shared, bytes=shared.bytes + 1).signature(PUSH)


def test_an_accord_is_told_and_in_the_signature() -> None:
    """0 is none: then nothing changes."""
    call = Wire("all_gather", 4, 1024, number_bytes=64, kept=True)
    assert replace(call, accord=0).told == "all_gather (1024 bytes a rank and 64 bytes of scales, kept by every rank)"
    assert replace(call, accord=7).told.endswith(", kept by every rank, of accord 7)")
    accords = [0, 1, 7, (1 << 31) - 1, *range(1000, 2000)]
    for transport in (DIRECT, PUSH, PULL):
        assert len({replace(call, accord=each).signature(transport) for each in accords}) == len(accords)
    assert DIRECT_SIGNATURES == SIGNATURES.value == 1 << 24, "the others of a direct call's 63 bits are its epoch's"


def test_the_wire_of_every_kind_of_call_has_its_accord() -> None:
    shard, sums = empty(8, 16), empty(8, 16, dtype=FP32)
    for call in (collectives.gather_call(shard, None, 4, False, 7), collectives.gather_call(shard, None, 4, True, 7),
                 *(collectives.scatter_call(sums, how, 4, kind, 7) for how, kind in
                   (("sum", "reduce_scatter"), ("sum", "all_reduce"), ("max", "all_reduce")))):  # fmt: skip
        assert call.wire.accord == 7
        assert replace(call, accord=0).wire == replace(call.wire, accord=0)


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
