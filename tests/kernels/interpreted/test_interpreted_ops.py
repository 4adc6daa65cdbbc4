"""The ops on ranks of this host, against fp64: kernels, plans and scripts of `asynctp_kernels.cuda`, interpreted."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from op_cases import (
    BF16,
    CASES,
    E4M3,
    FP16,
    FP32,
    IMPLEMENTATIONS,
    GatherCase,
    Inputs,
    ScatterCase,
    judge,
    make_inputs,
    run,
    run_each,
    scaled_copy,
)
from profiles import THOROUGH
from ranks import overwrite_memory, run_ranks

pytestmark = pytest.mark.ranks


def _check(case, rank, world, seed, group) -> str:
    """Run one case on fresh data: what is wrong, or nothing."""
    inputs = [make_inputs(case, r, world, seed) for r in range(world)]
    return judge(case, run(case, inputs[rank], group), inputs, rank)


def _check_each(case, rank, world, seed, group) -> tuple[set[str], str]:
    """Run one case by each implementation that can: which, and what is wrong."""
    inputs = [make_inputs(case, r, world, seed) for r in range(world)]
    found = {name: judge(case, outs, inputs, rank) for name, outs in run_each(case, inputs[rank], group)}
    return set(found), "; ".join(f"{name}: {wrong}" for name, wrong in found.items() if wrong)


#: of two ranks an inbox has one source only, whatever the order of blocks
MATRIX = [(2, i) for i in range(len(CASES))] + [
    (4, i) for i, case in enumerate(CASES) if (i % 3 == 0 and (THOROUGH or i % 4 == 0)) or "from an inbox" in case.name
]


def _cases_of(rank: int, world: int, seed: int) -> dict[int, tuple[set[str], str]]:
    import torch.distributed as dist

    return {i: _check_each(CASES[i], rank, world, seed + i, dist.group.WORLD) for size, i in MATRIX if size == world}


STRESS = [
    GatherCase("rows", (2, 9, 24), 1, (24, 8), a_full=True),
    ScatterCase("rows", (2, 9, 24), 1, (24, 8)),
    GatherCase("contraction", (9, 20), 1, (24,), FP32),
    GatherCase("scales", (9, 16), 0, (8,), E4M3, scale="shard"),
    ScatterCase("columns", (9, 20), 1, (12,), FP32, op="avg"),
    ScatterCase("chunks", (20, 24), 0, (24,)),
    GatherCase("rows from an inbox", (2, 9, 24), 1, (24, 8)),
]


def _stress(rank: int, world: int, seed: int) -> list[str]:
    """Back-to-back calls of changing shapes, each rank late at random, two groups in turn."""
    import torch.distributed as dist

    groups = [dist.group.WORLD, dist.new_group()]
    shapes, delays = random.Random(seed), random.Random(seed + rank)
    wrong = []
    for call in range(30 if THOROUGH else 15):
        case = scaled_copy(shapes.choice(STRESS), shapes.choice([1, 5, 17, 40, 70]))
        group = shapes.choice(groups)
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.05)
        wrong.append(_check(case, rank, world, seed + call, group))
    return [f"call {i}: {text}" for i, text in enumerate(wrong) if text]


def _poisoned(rank: int, world: int, seed: int) -> list[str]:
    """Between calls, all communication memory becomes NaN; results must not notice."""
    import torch.distributed as dist

    wrong = []
    for call in range(2 * len(STRESS)):
        wrong.append(_check_each(STRESS[call % len(STRESS)], rank, world, seed + call, dist.group.WORLD)[1])
        overwrite_memory(dist.group.WORLD)
    return [text for text in wrong if text]


def _dawdling(rank: int, world: int, seed: int) -> list[str]:
    """One rank is slow at its copies and before and after each word that it posts: a word posted early is caught."""
    import torch.distributed as dist
    from asynctp_kernels.cuda.gemm import copy_kernels
    from asynctp_kernels.cuda.runtime import interpreted

    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def run_then_sleep(*args: Any) -> Any:
            time.sleep(0.005)
            result = function(*args)
            time.sleep(0.005)
            return result

        return run_then_sleep

    originals = copy_kernels.post_words, interpreted.copy, interpreted.MemOps.enqueue
    wrong = []
    for call, case in enumerate([ScatterCase("tiles", (70, 40), 0), GatherCase("tiles", (70, 40), 0)] * 2):
        if rank == call // 2:
            copy_kernels.post_words, interpreted.copy, interpreted.MemOps.enqueue = map(slowly, originals)
        wrong.append(_check_each(case, rank, world, seed + call, dist.group.WORLD)[1])
        copy_kernels.post_words, interpreted.copy, interpreted.MemOps.enqueue = originals
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
        for turn in range(3 if THOROUGH else 2):
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


#: how much faster clocks run for a rank that waits in vain
HURRY = 60
#: (implementation, number of the case, the call in words)
MISSED_CALLS = [
    ("fused", 0, "all_gather (864 bytes a rank, kept by every rank)"),
    ("fused", 6, "all_gather (864 bytes a rank)"),
    ("whole", 6, "all_gather (864 bytes a rank)"),
    ("direct", 6, "all_gather (864 bytes a rank)"),
    ("decomposed", 1, "reduce_scatter (864 bytes a rank of bfloat16, sum)"),
    ("direct", 1, "reduce_scatter (864 bytes a rank of bfloat16, sum)"),
]


def _dead_peer(rank: int, world: int) -> list[tuple[str, str, list[str]]]:
    """Rank 1 leaves one call out. The other must say so, refuse to go on, and work again after a release."""
    import asynctp_kernels
    import torch.distributed as dist
    from asynctp_kernels import cuda

    group, outcomes = dist.group.WORLD, []
    for implementation, kind, _ in MISSED_CALLS:
        with cuda.forced(implementation):
            wrong = [_check(STRESS[kind], rank, world, 1, group)]
            said = _miss(STRESS[kind], group) if rank == 0 else ("", "")
            dist.barrier()
            asynctp_kernels.release(group)
            wrong.append(_check(STRESS[kind], rank, world, 3, group))
        outcomes.append((*said, wrong))
    return outcomes


def _miss(case, group) -> tuple[str, str]:
    """Call alone, twice: what the timeout says, and what the next call says. The clocks that bound waits run fast."""
    from asynctp_kernels import PeerTimeout, SymmetricMemoryError, signals
    from asynctp_kernels.cuda.runtime import interpreted

    def clock_ns() -> int:
        time.sleep(signals.POLL_PAUSE_S)
        return HURRY * time.monotonic_ns()

    clock = SimpleNamespace(monotonic=lambda: HURRY * time.monotonic(), sleep=time.sleep)
    x = make_inputs(case, 0, 2, 2)
    start = time.monotonic()
    with (
        mock.patch.object(signals, "clock_ns", clock_ns),
        mock.patch.object(interpreted, "time", clock),
        pytest.raises(PeerTimeout) as caught,
    ):
        run(case, x, group)
    assert (caught.value.rank, caught.value.peer, caught.value.seconds) == (0, 1, 30.0)
    assert time.monotonic() - start < 20
    with pytest.raises(SymmetricMemoryError) as again:
        run(case, x, group)
    return str(caught.value), str(again.value)


class _Coming:
    """A word that its peer sets as soon as it has been read once."""

    def __init__(self, value: int) -> None:
        self._next = value
        self._now = 0
        self.looks = 0

    @property
    def value(self) -> int:
        self.looks += 1
        found, self._now = self._now, self._next
        return found


def _meet_late(rank: int, world: int) -> None:
    from asynctp_kernels.cuda.runtime import interpreted
    from asynctp_kernels.cuda.runtime.driver import Wait

    for exactly in (True, False):
        interpreted._wait_for_peer(_Coming(7), Wait(0, 7, peer=1, exactly=exactly))


def test_a_peer_that_comes_between_two_looks_is_no_unlike_call() -> None:
    run_ranks(1, _meet_late)


def _stand_still(rank: int, world: int) -> None:
    """After the first look others run until the bound is over; the word is there by then, or is not."""
    from asynctp_kernels.cuda.runtime import interpreted
    from asynctp_kernels.cuda.runtime.driver import StreamWaitOver, Wait
    from asynctp_kernels.errors import timeout_s

    def wait_for(word: Any) -> None:
        clock = SimpleNamespace(monotonic=lambda: 2 * timeout_s() * bool(word.looks), sleep=lambda pause: None)
        with mock.patch.object(interpreted, "time", clock):
            interpreted._wait_for_peer(word, Wait(0, 7, peer=1))

    wait_for(_Coming(7))
    with pytest.raises(StreamWaitOver):
        wait_for(_Coming(0))


def test_a_peer_that_came_while_a_rank_stood_still_is_not_late() -> None:
    run_ranks(1, _stand_still)


def test_a_peer_that_never_comes_is_named() -> None:
    outcomes = run_ranks(2, _dead_peer)
    for (_, _, call), (timed_out, refused, wrong), (_, _, wrong_at_1) in zip(MISSED_CALLS, *outcomes, strict=True):
        assert timed_out.startswith(f"{call}: rank 0 waited 30 s for the same call of rank 1.")
        assert "out of step since: PeerTimeout" in refused
        assert "asynctp_kernels.release(group)" in refused
        assert wrong == wrong_at_1 == ["", ""]


def _special_values(rank: int, world: int, seed: int) -> list[bool]:
    """Every fp8 code (NaN and infinity included) travels and multiplies as torch decodes it; bf16 ties go to even."""
    import torch
    import torch.distributed as dist

    import asynctp_passes.ops  # noqa: F401

    ops, group, one, good = torch.ops.asynctp, dist.group.WORLD.group_name, torch.ones(()), []
    torch.manual_seed(seed)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).reshape(256, 1)
        out, full = ops.all_gather_matmul(
            codes, [torch.ones(1, 1).to(dtype)], [None], 0, True, world, group, one, [one], False, torch.float32
        )
        good.append(torch.equal(full.view(torch.uint8), codes.repeat(world, 1).view(torch.uint8)))
        good.append(torch.equal(out.nan_to_num(12345.0), codes.float().repeat(world, 1).nan_to_num(12345.0)))
    # the same through the GEMM: 16 codes a row, of which one is picked for each column
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).reshape(16, 16)
        codes = torch.where(codes.float().isfinite(), codes.float(), torch.ones(())).to(dtype)
        out = ops.all_gather_matmul(
            codes, [torch.eye(16).to(torch.float8_e4m3fn).t()], [None], 0, False, world, group, one, [one], False,
            torch.bfloat16, True,
        )[0]  # fmt: skip
        good.append(torch.equal(out.float(), codes.float().bfloat16().float().repeat(world, 1)))
    special = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("inf"), float("nan"), -0.0])
    values = torch.cat([torch.randn(2, 200), special.repeat(2, 1)], 1)
    zero = torch.zeros(1).to(torch.float8_e4m3fn)
    out = ops.matmul_reduce_scatter(
        [zero.expand(2, 1)], [zero.expand(1, 205)], [values[rank]], "avg", 0, world, group, [one], [one], torch.bfloat16
    )
    parts = values.bfloat16().float()  # each rank's part is rounded
    expected = ((parts[0] + parts[1]) / 2).bfloat16()
    good.append(torch.equal(out[0].nan_to_num(9.0, 8.0), expected.nan_to_num(9.0, 8.0)))
    return good


def _factors(rank: int, world: int, seed: int) -> dict[str, tuple[set[str], list[str]]]:
    """Products near the ends of dtypes' ranges, times powers of two: which implementations ran, and which differ."""
    import torch
    from asynctp_kernels import cuda

    from asynctp_passes import ops
    from asynctp_passes.ops import reference

    found: dict[str, tuple[set[str], list[str]]] = {}
    for name, case in EXTREMES.items():
        op, operands, given = _extreme_call(*case)
        wanted = getattr(reference, op)(*operands, **given)
        ran, wrong = set(), []
        for implementation in IMPLEMENTATIONS:
            try:
                with cuda.forced(implementation):
                    out = getattr(ops, op)(*operands, **given)
            except RuntimeError as error:
                if "was asked for and cannot run" not in str(error):
                    raise
                continue
            ran.add(implementation)
            if not torch.equal(out.nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0)):
                wrong.append(f"{implementation}: {out[0, 0]} is not {wanted[0, 0]}")
        found[name] = ran, wrong
    return found


def _extreme_call(
    dtype: Any, numbers: tuple[float, ...], options: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """An op, its operands and its other arguments. Products have one number each, which no order of sums can change."""
    import torch
    import torch.distributed as dist

    a = [torch.zeros(40, 16).to(dtype) for _ in numbers[::2]]
    b = [torch.zeros(24, 16).to(dtype).t() for _ in numbers[1::2]]
    for left, right, one, other in zip(a, b, numbers[::2], numbers[1::2], strict=True):
        left[:, 0], right[0] = one, other
    given = {"scatter_dim": 0, "group": dist.group.WORLD, **options}
    scales = [[torch.tensor(scale)] * len(a) for scale in given.pop("scales", ())]
    given |= dict(zip(("a_scales", "b_scales"), scales, strict=False))
    if "bias" in given:
        given["biases"] = torch.full((24,), given.pop("bias"), dtype=dtype)
    if "added" in given:
        given["added"] = torch.full((40, 24), given["added"], dtype=dtype)
    return "matmul_reduce_scatter", (a, b), given


#: dtype, the one number of A and of B for each product, and what else a call has
EXTREMES: dict[str, tuple[Any, tuple[float, ...], dict[str, Any]]] = {
    "bf16, large": (BF16, (2.0**127, 0.125), {"factors": [2.0]}),
    "bf16, too large": (BF16, (2.0**127, 0.5), {"factors": [-8.0]}),
    "bf16, subnormal": (BF16, (2.0**-60, 3 * 2.0**-62), {"factors": [2.0**-12]}),
    "bf16, bias": (BF16, (2.0**127, 0.5), {"factors": [0.5], "bias": -(2.0**126)}),
    "fp16, large": (FP16, (256.0, 32.0), {"factors": [2.0]}),
    "fp16, too large a product": (FP16, (300.0, 512.0), {"factors": [0.25]}),
    "fp16, too small": (FP16, (2.0**-7, 5 * 2.0**-9), {"factors": [2.0**-10]}),
    "fp32, small": (FP32, (1e-37, 2.0**120), {"factors": [2.0**-32]}),
    "fp32, large": (FP32, (-3e38, 0.125), {"factors": [2.0]}),
    "converted, small": (BF16, (2.0**-55, 2.0**-57), {"factors": [2.0**-30], "sum_dtype": FP32}),
    "fp16 converted, large": (FP16, (-6e4, 1.0), {"factors": [2.0**30], "sum_dtype": FP32}),
    "sum": (BF16, (2.0**127, 0.5, 2.0**127, -0.25), {"factors": [1.0, 1.0, 0.5]}),
    "sum, cancelling": (BF16, (2.0**127, 0.5, 2.0**127, -0.5), {"factors": [1.0, 1.0, 8.0]}),
    "sum, cancelling, another term": (FP16, (256.0, 128.0), {"factors": [1.0, 8.0], "added": -32768.0}),
    "unlike terms": (BF16, (2.0**127, 0.25, 2.0**-60, 2.0**-60), {"factors": [-1.0, 0.25]}),
    "unlike terms, too large for one": (FP16, (256.0, 128.0, 256.0, 200.0), {"factors": [1.0, -2.0]}),
    "unlike terms, converted": (FP16, (256.0, 128.0, 256.0, 200.0), {"factors": [1.0, -4.0], "sum_dtype": FP32}),
    "up and down": (BF16, (2.0**127, 0.5), {"factors": [4.0, 0.25]}),
    "fp8, a large scale": (E4M3, (2.0, 1.0), {"factors": [4.0], "scales": (2.0**126, 2.0**-100)}),
    "fp8, a small scale": (E4M3, (2.0, 3.0), {"factors": [2.0**-12], "scales": (2.0**-120, 1.0)}),
    "fp8, sum": (
        E4M3, (2.0, 1.0, 4.0, 1.0), {"factors": [-1.0, -1.0, 0.5], "scales": (2.0**126, 0.25), "sum_dtype": FP32},
    ),
}  # fmt: skip


def _async_input(rank: int, world: int, seed: int) -> list[bool]:
    """The GEMM by itself, on rows that have come: several Bs, any pivot, ragged chunks, words that stay."""
    import torch
    from asynctp_kernels import async_input_matmul
    from asynctp_kernels.cuda.plans import async_input

    rng, good = torch.Generator().manual_seed(seed), []
    for m, chunks, ns in ((40, 1, (24,)), (70, 2, (8, 40)), (120, 3, (40, 8, 72, 16))):
        a = torch.randn(m, 48, generator=rng).bfloat16()
        bs = [torch.randn(n, 48, generator=rng).bfloat16().t() for n in ns]
        for pivot in range(chunks):
            words = torch.full((8,), 3, dtype=torch.int32)
            outs = async_input_matmul(a, bs, words[:chunks], a_chunk_pivot=pivot, value=3)
            good.append(bool((words == 3).all()))
            wanted = [(a.float() @ b.float()).bfloat16() for b in bs]
            good += [
                torch.allclose(out.float(), want.float(), 1e-2, 1e-2) for out, want in zip(outs, wanted, strict=True)
            ]
    return [*good, len(async_input._plans) == 3]


def _in_flight(rank: int, world: int, seed: int) -> list[bool]:
    """Collectives without a product, with a fused call between their start and their end."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels import cuda

    import asynctp_passes.ops.collectives  # noqa: F401

    ops, wait, name = torch.ops.asynctp, torch.ops._c10d_functional.wait_tensor, dist.group.WORLD.group_name
    good = []
    for dtype in (torch.bfloat16, torch.float32):
        wholes = [torch.randn(world * 9, 8, generator=torch.Generator().manual_seed(seed + r)) for r in range(world)]
        wholes = [whole.to(dtype) for whole in wholes]
        full = ops.all_gather(wholes[rank], world, name, all_keep=dtype == torch.float32)
        good.append(cuda.last_implementation(dist.group.WORLD) == "copy engine")
        part = ops.reduce_scatter(wholes[rank], "avg", world, name)
        good.append(cuda.last_implementation(dist.group.WORLD) == "copy engine")
        good.append(_check(STRESS[0], rank, world, seed, dist.group.WORLD) == "")
        total = sum(whole.float() for whole in wholes) / world
        good.append(torch.equal(wait(full), torch.cat(wholes)))
        good.append(torch.allclose(wait(part).float(), total.chunk(world)[rank], 1e-2, 1e-2))
    return good


def _bytes_gathered(rank: int, world: int, seed: int) -> list[bool]:
    """A gather without a matmul moves numbers of any dtype as they are: few of them, as beside a hoist."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels import cuda

    import asynctp_passes.ops.collectives  # noqa: F401

    ops, wait, name = torch.ops.asynctp, torch.ops._c10d_functional.wait_tensor, dist.group.WORLD.group_name
    dtypes = (torch.bool, torch.int8, torch.int16, torch.int64, torch.float64, torch.float8_e4m3fn, torch.bfloat16)
    good = []
    for dtype, shape, kept in itertools.product(dtypes, ((1,), (3,), (1, 4, 1), (5, 3)), (True, False)):
        rng, most = torch.Generator().manual_seed(seed), 2 if dtype == torch.bool else 256
        raw = torch.randint(most, (world, *shape, dtype.itemsize), generator=rng, dtype=torch.uint8)
        parts = raw.view(dtype).squeeze(-1)
        for implementation in ("direct", "fused"):
            with cuda.forced(implementation):
                full = wait(ops.all_gather(parts[rank], world, name, all_keep=kept, accord=7))
            good.append(
                full.dtype == dtype and torch.equal(full.view(torch.uint8), parts.flatten(0, 1).view(torch.uint8))
            )
    return good


SCENARIOS = {
    2: [_cases_of, _stress, _dawdling, _poisoned, _special_values, _factors, _async_input],
    3: [_stress, _repeated, _in_flight, _bytes_gathered],
    4: [_cases_of, _subgroups],
}


def _run_scenarios(rank: int, world: int, seed: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world, seed) for scenario in SCENARIOS[world]}


@cache
def _run_once(world: int) -> tuple[str, list[dict[str, Any]] | RuntimeError]:
    """All scenarios of one world size, one after the other in one set of processes; a crash is kept, not repeated."""
    seed = secrets.randbits(20)
    try:
        return f"seed {seed}", run_ranks(world, _run_scenarios, seed, timeout_s=900)
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
    ran, wrong = zip(*(outcome["_cases_of"][index] for outcome in outcomes), strict=True)
    assert wrong == ("",) * world, seed
    assert ran == (ran[0],) * world
    assert ran[0]


@pytest.mark.parametrize("world", [2, 4])
def test_every_implementation_runs_many_cases(world: int) -> None:
    _, outcomes = _outcomes(world)
    cases = outcomes[0]["_cases_of"].values()
    ran = Counter(name for names, _ in cases for name in names)
    assert all(ran[name] * 5 >= len(cases) for name in IMPLEMENTATIONS), ran


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
    assert [outcome["_special_values"] for outcome in outcomes] == [[True] * 7] * 2, seed


@pytest.mark.parametrize("name", EXTREMES)
def test_factors_at_the_ends_of_ranges(name: str) -> None:
    _, outcomes = _outcomes(2)
    (ran, wrong), other = (outcome["_factors"][name] for outcome in outcomes)
    assert wrong == other[1] == []
    assert {"decomposed", "direct"} <= ran == other[0]


def test_the_gemm_multiplies_all_but_unlike_terms() -> None:
    _, outcomes = _outcomes(2)
    apart = {name for name, (ran, _) in outcomes[0]["_factors"].items() if "fused" not in ran}
    unlike = {name for name in EXTREMES if name.startswith(("unlike", "up and down", "fp32")) or "another" in name}
    converted = {"fp8, sum"}  # each product is rounded before it is added in fp32
    assert apart == unlike | converted


def test_a_gather_moves_numbers_of_any_dtype_as_they_are() -> None:
    seed, outcomes = _outcomes(3)
    assert all(all(outcome["_bytes_gathered"]) for outcome in outcomes), seed


def test_collectives_in_flight() -> None:
    seed, outcomes = _outcomes(3)
    assert all(all(outcome["_in_flight"]) for outcome in outcomes), seed


def test_async_input() -> None:
    seed, outcomes = _outcomes(2)
    assert all(all(outcome["_async_input"]) for outcome in outcomes), seed
