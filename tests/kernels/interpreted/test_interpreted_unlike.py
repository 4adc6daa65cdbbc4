"""Ranks that share a collective and nothing else, in Triton's interpreter: values, and calls that are not alike.

The calls are those of `tests/gpu/unlike.py`, whose results are exact; here they are smaller.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from op_cases import E4M3, GatherCase, make_inputs, run
from profiles import THOROUGH, thorough
from ranks import PATIENCE, run_ranks

pytestmark = pytest.mark.ranks
SEED = 7


def unlike_program() -> Any:
    """`tests/gpu/unlike.py`, as a module."""
    folder = str(Path(__file__).parents[2] / "gpu")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import unlike

    return unlike


def shapes() -> list[Any]:
    """Collectives of few bytes, by each transport: of rows in several chunks and tiles, and of odd ones."""
    unlike = unlike_program()
    fp8 = {"dtype": E4M3, "numbers": True}
    return [
        unlike.Shared("gather", 24, 32),
        unlike.Shared("gather", 24, 32, kept=True),
        unlike.Shared("gather", 7, 40, transport="direct"),
        unlike.Shared("gather", 24, 32, transport="direct", **fp8),
        unlike.Shared("gather", 12, 32, **fp8),
        unlike.Shared("gather", 12, 32, kept=True, **fp8),
        unlike.Shared("scatter", 24, 32),
        unlike.Shared("scatter", 6, 72, transport="direct", reduce_op="avg"),
        unlike.Shared("scatter", 5, 24, dtype=unlike.FP32),
        unlike.Shared("all_reduce", 12, 16),
        unlike.Shared("all_reduce", 12, 16, transport="direct"),
        unlike.Shared("all_reduce", 3, 5, transport="direct"),
    ]


def _pairs(rank: int, world: int, seed: int) -> tuple[dict[str, int], list[str]]:
    """Pairs of implementations of one transport, on ranks in turn: how often each ran, and what was wrong.

    On two ranks that is every pair of each collective of bf16; of the others, and on four ranks, it is every third.
    """
    unlike = unlike_program()
    made = unlike.Run(seed, "")
    for shared in shapes():
        names = unlike.IMPLEMENTATIONS[shared.transport]
        for number, pair in enumerate(itertools.product(names, repeat=2)):
            if number % 3 == 0 or (world == 2 and (THOROUGH or shared.dtype is unlike.BF16)):
                made.eager(made.prepare(shared, pair[rank % 2]))
    return _found(made)


def _found(made: Any) -> tuple[dict[str, int], list[str]]:
    ran: dict[str, int] = {}
    for call in made.calls:
        name = call.name.partition("implementation='")[2].partition("'")[0]
        ran[name] = ran.get(name, 0) + call.made
    return ran, [call.name for call in made.calls if int(call.wrong)]


def _uneven(rank: int, world: int, seed: int) -> tuple[dict[str, int], list[str]]:
    """Widths, and depths of sums, that ranks do not share: the last may have fewer, or none."""
    unlike = unlike_program()
    made = unlike.Run(seed, "")
    sizes = [unlike.part_of(total) for total in (5 * world - 3, 8 * (world - 1), 1, 16 * world)]
    assert 0 in sizes or rank < world - 1
    for size, kind, transport in itertools.product(sizes, ("gather", "scatter"), unlike.IMPLEMENTATIONS):
        made.eager(made.prepare(unlike.Shared(kind, 10, 24, transport=transport), sizes=[size]))
    for _ in range(10):
        shared, own = unlike.random_sizes(made)
        made.eager(made.prepare(shared, sizes=own))
    return _found(made)


def _programs(rank: int, world: int, seed: int) -> tuple[dict[str, int], list[str]]:
    """Several collectives, some in flight, each rank completing and multiplying in an order of its own."""
    unlike = unlike_program()
    made = unlike.Run(seed, "")
    for _ in range(6):
        several = [made.shared.choice(shapes()) for _ in range(5)]
        made.eager(unlike.program(made, several))
    return _found(made)


def _bits(rank: int, world: int, seed: int) -> list[str]:
    """What a rank's peers make of a collective does not show in its own results: bit for bit, of any numbers."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels import cuda

    names, differ = ("fused", "decomposed", "whole"), []
    for case in (
        GatherCase("rows", (2, 9, 24), 1, (24, 8), a_full=True),
        GatherCase("scales", (9, 16), 0, (8,), E4M3, scale="shard", weight=True),
    ):
        x = make_inputs(case, rank, world, seed)
        for own in names:
            seen = None
            for theirs in names:
                for mine in range(world):  # in turn one rank runs `own`
                    with cuda.forced(own if rank == mine else theirs):
                        outs = run(case, x, dist.group.WORLD, all_keep=False)
                    if rank == mine:
                        raw = [out.contiguous().view(torch.uint8) for out in outs]
                        differ += [f"{case.name}: {own} beside {theirs}"] * (
                            seen is not None and not all(map(torch.equal, raw, seen))
                        )
                        seen = seen or raw
    return differ


# --- a rank that ends its call with an error --------------------------------------------------------------------
def _refused(rank: int, world: int, seed: int) -> list[str]:
    """The last rank's call is not valid there. Of a gather it sends its shard all the same; of a sum it has nothing."""
    import asynctp_kernels
    import torch
    import torch.distributed as dist
    from asynctp_kernels import UnlikeCalls, cuda

    import asynctp_passes.ops  # noqa: F401

    group, ops, last, wrong = dist.group.WORLD, torch.ops.asynctp, rank == world - 1, []

    def gather(bad: bool, kept: bool) -> torch.Tensor:
        a, b = torch.full((8, 16), rank + 1.0).bfloat16(), torch.eye(17 if bad else 16).bfloat16()
        return ops.all_gather_matmul(a, [b], [None], 0, False, world, group.group_name, all_keep=kept)[0]

    def scatter(bad: bool) -> torch.Tensor:
        a, b = torch.full((8 * world, 16), rank + 1.0).bfloat16(), torch.eye(17 if bad else 16).bfloat16()
        return ops.matmul_reduce_scatter([a], [b], [None], "sum", 0, world, group.group_name)

    rows = torch.arange(1.0, world + 1).repeat_interleave(8)[:, None].expand(-1, 16)
    total = torch.full((8, 16), world * (world + 1) / 2)
    for implementation, kept in (("fused", False), ("decomposed", True), ("whole", False), ("direct", False)):
        with cuda.forced(implementation):
            for bad in (False, True, False):
                if last and bad:
                    with pytest.raises(ValueError, match="all_gather_matmul"):
                        gather(bad, kept)
                else:
                    wrong += [f"gather {implementation}"] * (not torch.equal(gather(False, kept).float(), rows))
            wrong += [f"scatter {implementation}"] * (not torch.equal(scatter(False).float(), total))
            if last:
                with pytest.raises(ValueError, match="matmul_reduce_scatter"):
                    scatter(True)
            with pytest.raises(UnlikeCalls, match="after 1 calls that ended with an error there"):
                scatter(False)
            with pytest.raises(asynctp_kernels.SymmetricMemoryError, match=r"release\(group\)"):
                gather(False, kept)
            dist.barrier()
            asynctp_kernels.release(group)
            dist.barrier()
            wrong += [f"after a release, {implementation}"] * (not torch.equal(scatter(False).float(), total))
    return wrong


# --- calls that are not alike -------------------------------------------------------------------------------------
LOOKS = 100  # of a clock that waits alone take: what is there is seen by few


@contextlib.contextmanager
def in_vain(group: Any, come: int) -> Iterator[None]:
    """Once each of `come` ranks waits, so that nothing comes any more, the clocks that bound waits run fast.

    So they may have a bound that no load of the machine breaks. Meanwhile the words that `watch` reads tell of a call.
    """
    import torch.distributed as dist
    from asynctp_kernels import signals
    from asynctp_kernels.cuda.runtime import interpreted
    from asynctp_kernels.cuda.runtime.memory import existing_memory
    from asynctp_kernels.errors import timeout_s
    from asynctp_kernels.torch_private import group_store

    memory = existing_memory(group)
    assert memory is not None
    told: list[list[int]] = []  # doing, awaited
    store, looks, ahead_s = group_store(group), 0, 0.0
    waits = [f"waits/{rank}" for rank in range(come)]

    def now_s() -> float:
        nonlocal looks, ahead_s
        looks += 1
        if looks == LOOKS:
            store.set(waits[dist.get_rank(group)], "")
            told.append(memory.watched[:2].tolist())
        if looks % LOOKS == 0 and store.check(waits):
            ahead_s += timeout_s() / 10
        return time.monotonic() + ahead_s

    def clock_ns() -> int:
        time.sleep(signals.POLL_PAUSE_S)
        return int(now_s() * 1e9)

    clock = SimpleNamespace(monotonic=now_s, sleep=time.sleep)
    with mock.patch.object(signals, "clock_ns", clock_ns), mock.patch.object(interpreted, "time", clock):
        yield
    assert all(map(any, told)), told


def _unlike_calls(rank: int, world: int, seed: int) -> dict[str, Any]:
    """Those of `unlike.FAULTS` that are, and some ranks that do not come: what was not as it should be."""
    from asynctp_kernels.cuda.choose import wire
    from asynctp_kernels.errors import timeout_s

    wire.ONE_SHOT_BYTES = 1 << 12  # a large all-reduce takes two

    unlike = unlike_program()
    absent = ("gather kept", "gather direct", "scatter decomposed", "all keep: gather bulk", "all_reduce direct",
              "large all_reduce direct", "maximum direct")  # fmt: skip
    faults = [fault for fault in unlike.FAULTS if fault.other and not (fault.captured or fault.grows)]
    faults += [unlike.Fault(call) for call in absent]
    faults += [unlike.Fault("all_reduce fused", "scatter fused"), unlike.Fault("scatter bulk", "all_reduce fused")]
    found = {fault.name: unlike.check_fault(fault, timeout_s(), in_vain) for fault in faults}
    assert len(found) >= 20
    return {name: each for name, each in found.items() if not each["ok"]}


SCENARIOS = {
    2: [_pairs, _uneven, _programs, _bits, _refused, _unlike_calls],
    4: [_pairs, _uneven, _refused] if THOROUGH else [_refused],
}


def _run_scenarios(rank: int, world: int, seed: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world, seed) for scenario in SCENARIOS[world]}


@cache
def _run_once(world: int) -> list[dict[str, Any]] | RuntimeError:
    try:
        return run_ranks(world, _run_scenarios, SEED, timeout_s=900)
    except RuntimeError as error:
        return error


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits as long as this but ranks whose clocks run fast (`in_vain`)."""
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", str(90 * PATIENCE))


def outcomes(world: int, name: str) -> list[Any]:
    """What a scenario found on each rank."""
    found = _run_once(world)
    if isinstance(found, RuntimeError):
        raise RuntimeError(str(found)) from found
    return [outcome[name] for outcome in found]


@pytest.mark.parametrize("world", [2, thorough(4)])
def test_every_pair_of_implementations_of_one_transport(world: int) -> None:
    for ran, wrong in outcomes(world, "_pairs"):
        assert wrong == []
        assert ran.keys() == {"fused", "decomposed", "whole", "direct", "bulk", "mover"}
        assert min(ran.values()) >= 3


@pytest.mark.parametrize("world", [2, thorough(4)])
def test_uneven_widths_and_depths(world: int) -> None:
    for ran, wrong in outcomes(world, "_uneven"):
        assert wrong == []
        assert {"chosen", "direct", "bulk", "mover"} < ran.keys()


def test_programs_in_an_order_of_each_ranks_own() -> None:
    assert [wrong for _, wrong in outcomes(2, "_programs")] == [[], []]


def test_results_do_not_show_what_peers_do() -> None:
    assert outcomes(2, "_bits") == [[], []]


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_whose_call_is_refused(world: int) -> None:
    assert outcomes(world, "_refused") == [[]] * world


def test_unlike_calls_and_absent_ranks_are_told_by_every_rank() -> None:
    assert outcomes(2, "_unlike_calls") == [{}, {}]
