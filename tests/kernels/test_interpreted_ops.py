"""The four ops on real ranks, against fp64, and the protocol under stress."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from op_cases import BF16, CASES, E4M3, FP32, GatherCase, Inputs, ScatterCase, judge, make_inputs, run, scaled_copy
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def _check(case, rank, world, seed, group) -> str:
    """Run one case on fresh data: what is wrong, or nothing."""
    inputs = [make_inputs(case, r, world, seed) for r in range(world)]
    return judge(case, run(case, inputs[rank], group), inputs, rank)


MATRIX = [(2, i) for i in range(len(CASES))] + [(4, i) for i in range(0, len(CASES), 2)]


def _cases_of(rank: int, world: int, seed: int) -> dict[int, str]:
    import torch.distributed as dist

    return {i: _check(CASES[i], rank, world, seed + i, dist.group.WORLD) for size, i in MATRIX if size == world}


STRESS = [
    GatherCase("rows", (2, 9, 20), 1, (24, 8), a_full=True),
    ScatterCase("rows", (2, 9, 20), 1, (24, 8)),
    GatherCase("contraction", (9, 20), 1, (24,), FP32),
    GatherCase("scales", (9, 16), 0, (8,), E4M3, scale="shard"),
    ScatterCase("columns", (9, 20), 1, (12,), FP32, op="avg"),
    GatherCase("consumes nothing", (9, 16), 0, ()),
]


def _stress(rank: int, world: int, seed: int) -> list[str]:
    """Back-to-back calls of changing shapes, each rank late at random, two groups in turn."""
    import torch.distributed as dist

    groups = [dist.group.WORLD, dist.new_group()]
    shapes, delays = random.Random(seed), random.Random(seed + rank)
    wrong = []
    for call in range(30):
        case = scaled_copy(shapes.choice(STRESS), shapes.choice([1, 5, 17, 40, 70]))
        group = shapes.choice(groups)
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.05)
        wrong.append(_check(case, rank, world, seed + call, group))
    return [f"call {i}: {text}" for i, text in enumerate(wrong) if text]


def _poisoned(rank: int, world: int, seed: int) -> list[str]:
    """Between calls, all landing memory of both slots becomes NaN; results must not notice."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels import workspace

    wrong = []
    for call in range(12):
        wrong.append(_check(STRESS[call % 5], rank, world, seed + call, dist.group.WORLD))
        dist.barrier()
        for used in workspace._workspaces[dist.group.WORLD].values():
            used.handle.get_buffer(rank, [used.handle.buffer_size // 4], torch.float32).fill_(float("nan"))
        dist.barrier()
    return [text for text in wrong if text]


def _dawdling(rank: int, world: int, seed: int) -> list[str]:
    """One rank is slow at its tiles and after each word that it posts: a word posted early would be caught."""
    import torch.distributed as dist
    from asynctp_kernels import gather_kernel, scatter_kernel

    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def run_then_sleep(*args: Any) -> Any:
            result = function(*args)
            time.sleep(0.01)
            return result

        return run_then_sleep

    originals = gather_kernel.post_word, scatter_kernel.post_word, scatter_kernel.partial_tile
    wrong = []
    for call, case in enumerate([ScatterCase("tiles", (70, 40), 0), GatherCase("tiles", (70, 40), 0)] * 2):
        if rank == call // 2:
            gather_kernel.post_word, scatter_kernel.post_word, scatter_kernel.partial_tile = map(slowly, originals)
        wrong.append(_check(case, rank, world, seed + call, dist.group.WORLD))
        gather_kernel.post_word, scatter_kernel.post_word, scatter_kernel.partial_tile = originals
    return [text for text in wrong if text]


def _repeated(rank: int, world: int, seed: int) -> list[bool]:
    """Equal bits on reruns with other timing, and equal bits on all ranks where operands are equal."""
    import torch
    import torch.distributed as dist

    same = []
    for case in (*STRESS[:5], GatherCase("replicated", (18, 20), 1, (24,), BF16)):
        x = make_inputs(case, rank, world, seed)
        if case.name == "replicated":
            x = Inputs(x.a, make_inputs(case, 0, world, seed).b, x.biases, x.a_scales, x.b_scales)
        first = run(case, x, dist.group.WORLD)
        for turn in range(3):
            time.sleep(0.03 * ((rank + turn) % world))
            again = run(case, x, dist.group.WORLD)
            same.append(
                all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, again, strict=True))
            )
        if case.name == "replicated":
            gathered = [torch.empty_like(first[0]) for _ in range(world)]
            dist.all_gather(gathered, first[0])
            same.append(all(torch.equal(first[0], other) for other in gathered))
    return same


def _subgroups(rank: int, world: int, seed: int) -> list[str]:
    """Disjoint pairs at once, the whole group and lone ranks in between; ranks in a group are not global ranks."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([r]) for r in range(world)]
    pair = pairs[rank // 2]
    wrong = []
    for call, case in enumerate(STRESS[:4]):
        wrong.append(_check(case, pair.rank(), 2, seed + 10 * (rank // 2) + call, pair))
        wrong.append(_check(case, rank, world, seed + call, dist.group.WORLD))
        wrong.append(_check(case, 0, 1, seed + rank, alone[rank]))
    return [text for text in wrong if text]


MISSED_CALLS = [(0, "all_gather_matmul"), (1, "matmul_reduce_scatter"), (5, "all_gather_matmul")]


def _dead_peer(rank: int, world: int) -> list[tuple[str, str, list[str]]]:
    """Rank 1 leaves one call out. The other must say so, refuse to go on, and work again after a release."""
    import asynctp_kernels as ops
    import torch.distributed as dist

    group, outcomes = dist.group.WORLD, []
    for kind, _ in MISSED_CALLS:
        wrong = [_check(STRESS[kind], rank, world, 1, group)]
        said = _miss(STRESS[kind], group) if rank == 0 else ("", "")
        dist.barrier()
        ops.release(group)
        wrong.append(_check(STRESS[kind], rank, world, 3, group))
        outcomes.append((*said, wrong))
    return outcomes


def _miss(case, group) -> tuple[str, str]:
    """Call alone, twice: what the timeout says, and what the next call says."""
    import asynctp_kernels as ops

    x = make_inputs(case, 0, 2, 2)
    start = time.monotonic()
    with pytest.raises(ops.PeerTimeout) as caught:
        run(case, x, group)
    assert (caught.value.rank, caught.value.peer, caught.value.seconds) == (0, 1, 1.0)
    assert time.monotonic() - start < 10
    with pytest.raises(ops.SymmetricMemoryError) as again:
        run(case, x, group)
    return str(caught.value), str(again.value)


def test_a_peer_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "1")
    outcomes = run_ranks(2, _dead_peer)
    for (_, op), (timed_out, refused, wrong), (_, _, wrong_at_1) in zip(MISSED_CALLS, *outcomes, strict=True):
        assert timed_out.startswith(f"{op}: rank 0 waited 1 s for chunk 0 of rank 1.")
        assert "out of step since: PeerTimeout" in refused
        assert "asynctp_kernels.release(group)" in refused
        assert wrong == wrong_at_1 == ["", ""]


def _special_values(rank: int, world: int, seed: int) -> list[bool]:
    """Every fp8 code (NaN and infinity included) travels and multiplies as torch decodes it; bf16 ties go to even."""
    import asynctp_kernels as ops
    import torch
    import torch.distributed as dist

    group, one, good = dist.group.WORLD, torch.ones(()), []
    torch.manual_seed(seed)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).reshape(256, 1)
        out, full = ops.all_gather_scaled_matmul(
            codes, one, [torch.ones(1, 1).to(dtype)], [one], [None], 0, False, torch.float32, False, True, group
        )
        good.append(torch.equal(full.view(torch.uint8), codes.repeat(world, 1).view(torch.uint8)))
        good.append(torch.equal(out.nan_to_num(12345.0), codes.float().repeat(world, 1).nan_to_num(12345.0)))
    special = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("inf"), float("nan"), -0.0])
    values = torch.cat([torch.randn(2, 200), special.repeat(2, 1)], 1)
    zero = torch.zeros(1).to(torch.float8_e4m3fn)
    out = ops.scaled_matmul_reduce_scatter(
        [zero.expand(2, 1)], [zero.expand(1, 205)], [one], [one], [values[rank]], "avg", 0, torch.bfloat16, False, group
    )
    wire = values[1 - rank].bfloat16().float()  # the peer's part; ours is not rounded
    expected = ((values[rank] + wire) / 2).bfloat16()
    good.append(torch.equal(out[0].nan_to_num(9.0, 8.0), expected.nan_to_num(9.0, 8.0)))
    return good


SCENARIOS = {
    2: [_cases_of, _stress, _dawdling, _poisoned, _special_values],
    3: [_stress, _repeated],
    4: [_cases_of, _subgroups],
}


def _run_scenarios(rank: int, world: int, seed: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world, seed) for scenario in SCENARIOS[world]}


@cache
def _run_once(world: int) -> tuple[str, list[dict[str, Any]] | RuntimeError]:
    """All scenarios of one world size, one after the other in one set of processes; a crash is kept, not repeated."""
    seed = secrets.randbits(20)
    try:
        return f"seed {seed}", run_ranks(world, _run_scenarios, seed)
    except RuntimeError as error:
        return f"seed {seed}", error


def _outcomes(world: int) -> tuple[str, list[dict[str, Any]]]:
    """The seed, and what each scenario returned on each rank."""
    seed, outcomes = _run_once(world)
    if isinstance(outcomes, RuntimeError):
        raise RuntimeError(f"{seed}: {outcomes}") from outcomes
    return seed, outcomes


@pytest.mark.parametrize(
    ("world", "index"), MATRIX, ids=[f"{world}-{type(CASES[i]).__name__[:-4]} {CASES[i].name}" for world, i in MATRIX]
)
def test_matches_fp64(world: int, index: int) -> None:
    seed, outcomes = _outcomes(world)
    assert [outcome["_cases_of"][index] for outcome in outcomes] == [""] * world, seed


@pytest.mark.parametrize("world", [2, 3])
def test_back_to_back_calls_with_late_ranks_on_two_groups(world: int) -> None:
    seed, outcomes = _outcomes(world)
    assert [outcome["_stress"] for outcome in outcomes] == [[]] * world, seed


def test_nothing_is_read_that_this_call_did_not_write() -> None:
    seed, outcomes = _outcomes(2)
    assert [outcome["_poisoned"] for outcome in outcomes] == [[], []], seed


def test_a_word_is_posted_only_after_all_its_data() -> None:
    seed, outcomes = _outcomes(2)
    assert [outcome["_dawdling"] for outcome in outcomes] == [[], []], seed


def test_results_are_the_same_bits_every_time() -> None:
    seed, outcomes = _outcomes(3)
    assert all(all(outcome["_repeated"]) for outcome in outcomes), seed


def test_disjoint_subgroups_and_their_parent() -> None:
    seed, outcomes = _outcomes(4)
    assert [outcome["_subgroups"] for outcome in outcomes] == [[]] * 4, seed


def test_special_values_and_rounding() -> None:
    seed, outcomes = _outcomes(2)
    assert [outcome["_special_values"] for outcome in outcomes] == [[True] * 5] * 2, seed
