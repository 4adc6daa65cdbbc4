"""Calls that come again: what is recorded of a plan, without a GPU. See `cuda_stubs` and `cuda_emulated`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import cuda
from asynctp_kernels.cuda.plans import fused
from asynctp_kernels.cuda.plans.gather_tensors import GatherTensors
from asynctp_kernels.cuda.plans.scatter_tensors import ScatterTensors
from cuda_stubs import (
    SMS,
    Copied,
    Launched,
    Machine,
    expected_products,
    gather_call,
    machine,
    room_for,
    scatter_call,
    tensor,
)
from expecttest import assert_expected_inline
from plan_runs import (
    GATHERS,
    RANK,
    RETURNED,
    ROWWISE,
    SCATTERS,
    WORLD,
    at_the_same_place,
    bits,
    check_pushes,
    check_words,
    gather_plan,
    returned,
    run_gather,
    run_scatter,
    scatter_implementations,
    scatter_plan,
    several,
    tiles_of,
)
from torch import Tensor


@pytest.fixture
def here() -> Iterator[Machine]:
    with machine(RANK, WORLD) as made:
        cuda_emulated.emulate(made)
        yield made


# --- calls that come again -----------------------------------------------------------------------------------------
@pytest.fixture
def recording(here: Machine) -> Machine:
    here.records = True
    return here


def recorded_cases(cases: Iterator[Any]) -> list[Any]:
    return [case for case in cases if case.values[1] != "sequential"]


@pytest.mark.parametrize(("case", "implementation", "kept"), recorded_cases(returned()))
def test_recorded_gather(case: str, implementation: str, kept: bool, recording: Machine) -> None:
    """The second call on the same memory is recorded, the later ones only launch that: each on its own data.

    Not so copies of many ranges, which a graph that is launched cannot be told other memory of.
    """
    call = gather_call(**GATHERS[case], full=True, kept=kept)
    plan = gather_plan(call, recording, implementation)
    at_the_same_place(plan, ("shard", "a_scale", "numbers"))
    for number in range(4):
        (*outs, gathered), full, a_scale = run_gather(call, recording, plan)
        assert torch.equal(bits(gathered), bits(full))
        for out, wanted in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(wanted.shape), wanted)
        flat = all(copied.height == 1 for copied in recording.of(Copied))
        assert len(recording.recordings) == (number > 0)
        assert len(recording.memory.recordings) == (number > 0 and flat)
        assert flat == (implementation == "direct" or case != "outer, several" or not kept)


@pytest.mark.parametrize(("case", "implementation"), recorded_cases(scatter_implementations()))
def test_recorded_scatter(case: str, implementation: str, recording: Machine) -> None:
    call = scatter_call(**SCATTERS[case])
    plan = scatter_plan(call, recording, implementation)
    at_the_same_place(plan, ("a_parts", "added"))
    for number in range(4):
        recording.log.clear()
        out, wanted, mine = run_scatter(call, recording, plan)
        assert torch.equal(out, wanted)
        check_pushes(recording, implementation, mine)
        check_words(recording, implementation, call)
        assert len(recording.memory.recordings) == len(recording.recordings) == (number > 0)


def test_trace_of_a_recorded_gather() -> None:
    """The copy stream is a branch of the graph, which comes behind what was left in flight on the stream itself."""
    with machine(rank=0, world=2) as here:
        here.records = True
        call = gather_call((256,), 64, (72,), world=2, kept=True)
        plan = fused.FusedGather(call, here.memory, tiles_of(torch.bfloat16), 1, SMS)
        at_the_same_place(plan, ())
        for _ in range(2):
            plan.run(call.a_shard, None, call.bs, (), call.biases)
        gathered = here.launched("gemm_kernel").arguments["a1"].address
        assert here.urgent == [False]
        (here.log,) = here.recordings
        assert_expected_inline(
            here.trace(own=call.a_shard.data_ptr(), gathered=gathered),
            """\
graph  record start
copy   await start
copy   await flown at launch
copy   launch stage_kernel
copy   copy 32768 B to gathered + 32768 from box of 1 + 0
copy   write arrivals[1] = 1
copy   copy 32768 B to gathered + 0 from own + 0
copy   record end
graph  launch gemm_kernel
graph  await end""",
        )


def test_trace_of_a_recorded_scatter() -> None:
    """So is the reducer: the words of parts in flight and of its own are the same."""
    with machine(rank=0, world=2) as here:
        here.records = True
        call = scatter_call((512,), (64,), 72, world=2)
        plan = fused.FusedScatter(call, here.memory, tiles_of(torch.bfloat16), 1, SMS)
        at_the_same_place(plan, ())
        for _ in range(2):
            plan.run(call.a_parts, call.b_parts, (), (), call.biases)
        staging = here.launched("gemm_kernel").arguments["c0"].address
        (here.log,) = here.recordings
        assert_expected_inline(
            here.trace(staging=staging),
            """\
graph  record start
copy   await start
copy   await flown at launch
graph  launch gemm_kernel
copy   write free of 1 [0] = call
copy   write awaited = call
copy   wait free of 0 [1] == call
copy   write free of 0 [1] = 0
copy   write awaited = 0
copy   wait progress[1, 0] >= 2
copy   write progress[1, 0] = 0
copy   record running
copy   copy 36864 B to box of 1 + 0 from staging + 36864
copy   write full of 1 [0] = 4
reduce await running
reduce await flown at launch
reduce launch reduce_kernel
reduce record reduced
copy   record end
graph  await end
graph  await reduced""",
        )


def otherwise(how: str, rows: int, cols: int) -> Tensor:
    """A matrix that no kernel takes as it lies."""
    return tensor(cols, rows).t() if how == "transposed" else tensor(rows * cols + 1)[1:].view(rows, cols)


@RETURNED
@pytest.mark.parametrize("how", ["transposed", "unaligned"])
@pytest.mark.parametrize("implementation", ["fused", "decomposed", "direct"])
def test_what_a_gather_has_to_copy_first_is_recorded(
    implementation: str, how: str, kept: bool, recording: Machine
) -> None:
    """Its copy is made in the recording, of what is there at each launch."""
    call, place = gather_call((256,), 64, (72,), full=True, kept=kept), otherwise(how, 256, 64)
    plan = gather_plan(replace(call, a_shard=place), recording, implementation)
    make = plan.tensors
    plan.tensors = lambda operands: make((place.copy_(operands[0]), *operands[1:]))  # type: ignore[method-assign]
    at_the_same_place(plan, ())
    for number in range(3):
        (out, gathered), full, _ = run_gather(call, recording, plan)
        assert torch.equal(bits(gathered), bits(full))
        assert torch.equal(out, expected_products(call, full, None)[0])
        assert len(recording.recordings) == (number > 0)


@pytest.mark.parametrize(
    ("implementation", "how"), [("fused", "unaligned"), ("direct", "unaligned"), ("direct", "transposed")]
)
def test_what_a_scatter_has_to_copy_first_is_recorded(implementation: str, how: str, recording: Machine) -> None:
    call, place = scatter_call((512,), (64,), 72), otherwise(how, 512, 64)
    plan = scatter_plan(replace(call, a_parts=[place]), recording, implementation)
    make = plan.tensors
    plan.tensors = lambda operands: make(([place.copy_(operands[0][0])], *operands[1:]))  # type: ignore[method-assign]
    at_the_same_place(plan, ())
    for number in range(3):
        out, wanted, _ = run_scatter(call, recording, plan)
        assert torch.equal(out, wanted)
        assert len(recording.recordings) == (number > 0)


@RETURNED
@pytest.mark.parametrize("implementation", ["fused", "decomposed", "direct"])
def test_other_memory_is_enqueued_anew(implementation: str, kept: bool, recording: Machine) -> None:
    """Whichever tensor of a call lies elsewhere, it is another call, but for scales, biases and numbers."""
    call = gather_call((256,), 64, (72, 136), **ROWWISE, travels=True, bias=True, full=True, kept=kept)
    plan = gather_plan(call, recording, implementation)
    recording.kernels.clear()
    first = plan.tensors((call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases, None))
    calls = [first, first]
    for name in ("shard", "bs", "outs", "full", "all_numbers"):
        tensors = getattr(first, name)
        for i, one in enumerate(several(tensors)):
            moved = one.clone(memory_format=torch.preserve_format)
            lists = isinstance(tensors, Sequence) and not isinstance(tensors, Tensor)
            calls.append(first._replace(**{name: [*tensors[:i], moved, *tensors[i + 1 :]] if lists else moved}))
    whole = kept or implementation == "direct"
    assert len(calls) == 2 + 6 + whole, "the gathered scales are not returned: only where they are needed, they are"
    for number, made in enumerate(calls):
        plan.tensors = lambda *args, made=made: made  # type: ignore[method-assign]
        plan.run(call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases)
        assert len(recording.recordings) == (number > 0)
    assert len({made.addresses() for made in calls}) == len(calls) - 1


def new_place(small: Tensor) -> Tensor:
    """The same, where PyTorch's allocator might put it."""
    room = room_for(small.untyped_storage().nbytes()).view(small.dtype)
    return room.as_strided(small.shape, small.stride()).copy_(small)


@pytest.mark.parametrize("implementation", ["decomposed", "direct"])
def test_other_memory_of_a_scatter_is_enqueued_anew(implementation: str, recording: Machine) -> None:
    call = scatter_call((768,), (64, 72), 136, **ROWWISE, bias=True, added=True)
    plan = scatter_plan(call, recording, implementation)
    recording.kernels.clear()
    first = plan.tensors((call.a_parts, call.b_parts, call.a_scales, call.b_scales, call.biases, call.added))
    calls = [first, first]
    for name in ("a_parts", "b_parts", "added", "staging", "out", "extras"):
        tensors = getattr(first, name)
        for i, one in enumerate(several(tensors)):
            moved = one.clone(memory_format=torch.preserve_format)
            lists = isinstance(tensors, Sequence) and not isinstance(tensors, Tensor)
            calls.append(first._replace(**{name: [*tensors[:i], moved, *tensors[i + 1 :]] if lists else moved}))
    assert len(calls) == 2 + 8
    for number, made in enumerate(calls):
        plan.tensors = lambda *args, made=made: made  # type: ignore[method-assign]
        plan.run(call.a_parts, call.b_parts, call.a_scales, call.b_scales, call.biases, call.added)
        assert len(recording.recordings) == (number > 0)
    assert len({made.addresses() for made in calls}) == len(calls) - 1


def test_small_operands_are_put_in_their_places() -> None:
    """Each in its own, whichever others there are; a scale that travels is one tensor."""
    call = gather_call((256,), 64, (72, 136, 8), **ROWWISE, travels=True, bias=True)
    for missing in itertools.product((False, True), repeat=3):
        biases = [None if none else bias for bias, none in zip(call.biases, missing, strict=True)]
        for numbers in (None, call.a_scale, tensor(4, 1)):
            made = GatherTensors(call.a_shard, call.a_scale, call.bs, call.b_scales, biases, numbers, [], None, None)
            again = made.with_small([small.clone() for small in made.small()])
            assert len(made.small()) == 4 + missing.count(False) + (numbers is not None and numbers is not call.a_scale)
            old = [made.a_scale, *made.b_scales, *biases, numbers]
            assert_moved(old, [again.a_scale, *again.b_scales, *again.biases, again.numbers])
            assert (again.numbers is again.a_scale) == (numbers is call.a_scale)
    scatter = scatter_call((768,), (64, 80), 72, **ROWWISE, bias=True)
    for missing in itertools.product((False, True), repeat=2):
        biases = [None if none else tensor(72) for none in missing]
        operands = (scatter.a_parts, scatter.b_parts, scatter.a_scales, scatter.b_scales, biases, None)
        made_scatter = ScatterTensors(*operands, tensor(768, 72), tensor(768, 72), [])
        moved = made_scatter.with_small([small.clone() for small in made_scatter.small()])
        assert_moved([*scatter.a_scales, *scatter.b_scales, *biases], [*moved.a_scales, *moved.b_scales, *moved.biases])


def assert_moved(old: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> None:
    """The same values elsewhere, and None where there was none."""
    for one, other in zip(old, new, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and other is not one and torch.equal(one, other))


def elsewhere(plan: Any) -> None:
    """Each call's small operands are where none was before; all else is where the first call had it."""
    make, calls = plan.tensors, []

    def tensors(*args: Any) -> Any:
        call = make(*args)
        calls.append(call.with_small([new_place(small) for small in call.small()]))
        for name in ("shard", "a_parts", "added"):
            first, now = (several(getattr(made, name, None)) for made in (calls[0], call))
            for old, new in zip(first, now, strict=True):
                bits(old).copy_(bits(new))
        return calls[0].with_small(calls[-1].small())

    plan.tensors = tensors


def other_values(tensors: Sequence[Any]) -> list[Any]:
    """Powers of two, each the same on all ranks: a call's scales and biases are its own."""
    return [each if each is None else (each.float() * 2).to(each.dtype) for each in tensors]


def of_small(cases: dict[str, dict[str, Any]], implementations: Iterator[Any]) -> list[Any]:
    """Those that have any, by an implementation that records."""
    return [
        param for param in recorded_cases(implementations)
        if {"bias", "scales", "along"} & set(cases[param.values[0]]) and "outer, several" not in param.values[0]
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "implementation", "kept"), of_small(GATHERS, returned()))
def test_scales_and_biases_elsewhere_are_no_other_gather(
    case: str, implementation: str, kept: bool, recording: Machine
) -> None:
    """Its second call is recorded, with copies of these; then each launch reads them where they are."""
    call = gather_call(**GATHERS[case], full=True, kept=kept)
    plan = gather_plan(call, recording, implementation)
    elsewhere(plan)
    for number in range(4):
        call = replace(call, b_scales=other_values(call.b_scales), biases=other_values(call.biases))
        if call.a_scale is not None and not call.gather_a_scale:
            call = replace(call, a_scale=other_values([call.a_scale])[0])
        (*outs, gathered), full, a_scale = run_gather(call, recording, plan)
        assert torch.equal(bits(gathered), bits(full))
        for out, wanted in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(wanted.shape), wanted)
        assert len(recording.recordings) == len(recording.memory.recordings) == (number > 0)
    assert recording.memory.recordings.launched == 3


@pytest.mark.parametrize(("case", "implementation"), of_small(SCATTERS, scatter_implementations()))
def test_scales_and_biases_elsewhere_are_no_other_scatter(case: str, implementation: str, recording: Machine) -> None:
    call = scatter_call(**SCATTERS[case])
    plan = scatter_plan(call, recording, implementation)
    elsewhere(plan)
    for number in range(4):
        scales = {"a_scales": other_values(call.a_scales), "b_scales": other_values(call.b_scales)}
        call = replace(call, **scales, biases=other_values(call.biases))
        out, wanted, _ = run_scatter(call, recording, plan)
        assert torch.equal(out, wanted)
        assert len(recording.recordings) == len(recording.memory.recordings) == (number > 0)
    assert recording.memory.recordings.launched == 3


def test_a_call_in_a_capture_is_enqueued(recording: Machine) -> None:
    """It belongs to the program's graph, whatever has been recorded; and it is no reason to record."""
    call = gather_call((256,), 64, (72,), kept=True)
    plan = gather_plan(call, recording, "fused")
    at_the_same_place(plan, ())
    for capturing, recorded in ((7, 0), (7, 0), (0, 0), (0, 1), (7, 1)):
        recording.capturing = capturing
        recording.log.clear()
        plan.run(call.a_shard, None, call.bs, (), call.biases)
        assert len(recording.recordings) == recorded
        assert [entry.prepared.name for entry in recording.of(Launched)] == ["stage_kernel", "gemm_kernel"]


def test_growth_and_release_forget_what_was_recorded(recording: Machine) -> None:
    call = gather_call((256,), 64, (72,), kept=True)
    plan = gather_plan(call, recording, "fused")
    at_the_same_place(plan, ())
    for _ in range(2):
        plan.run(call.a_shard, None, call.bs, (), call.biases)
    memory = recording.memory
    assert len(memory.recordings) == 1
    memory.require("box", memory.areas["box"].size + 1)
    assert len(memory.recordings) == 0
    fresh = gather_plan(call, recording, "fused")
    at_the_same_place(fresh, ())
    for _ in range(2):
        fresh.run(call.a_shard, None, call.bs, (), call.biases)
    assert len(memory.recordings) == 1
    cuda.release(recording.group)
    assert len(memory.recordings) == 0
