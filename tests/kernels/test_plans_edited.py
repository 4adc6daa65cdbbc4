"""Calls as launches of their plan's graph, without a GPU. See `cuda_stubs` and `cuda_emulated`.

Each call has new memory, and a launch does what it is told of that: an address that the graph keeps is a wrong result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels.cuda.choose.wire import INVARIANT
from asynctp_kernels.cuda.facts import ReduceFacts
from asynctp_kernels.cuda.plans import fused
from asynctp_kernels.cuda.plans.gather import GatherTensors
from asynctp_kernels.cuda.plans.scatter import ScatterTensors
from asynctp_kernels.cuda.runtime import edited
from asynctp_kernels.cuda.runtime.driver import CudaError
from asynctp_kernels.cuda.runtime.edited import Unedited
from cuda_stubs import (
    SMS,
    Copied,
    Graph,
    Launched,
    Machine,
    expected_products,
    gather_call,
    machine,
    scatter_call,
    tensor,
)
from expecttest import assert_expected_inline
from plan_runs import (
    AVERAGE,
    GATHERS,
    RANK,
    RETURNED,
    ROWWISE,
    SCATTERS,
    TENSORWISE,
    WORLD,
    bits,
    check_pushes,
    check_words,
    gather_plan,
    returned,
    run_gather,
    run_scatter,
    scatter_implementations,
    scatter_plan,
    tiles_of,
)
from torch import Tensor


@pytest.fixture
def here() -> Iterator[Machine]:
    with machine(RANK, WORLD) as made:
        cuda_emulated.emulate(made)
        made.edits = True
        yield made


def of_fused(cases: Iterator[Any]) -> list[Any]:
    return [case for case in cases if case.values[1] == "fused"]


@pytest.mark.parametrize(("case", "implementation", "kept"), of_fused(returned()))
def test_gather(case: str, implementation: str, kept: bool, here: Machine) -> None:
    """The second call is captured; it and later ones are launches: each on its own data and memory.

    Not so copies of many ranges, which no graph can be told other memory of, and where PyTorch joins numbers.
    """
    call = gather_call(**GATHERS[case], full=True, kept=kept)
    plan, memory = gather_plan(call, here, implementation), []
    many = kept and call.outer > 4
    for number in range(4):
        call = replace(call, bs=[again(b) for b in call.bs], b_scales=[again(each) for each in call.b_scales])
        (*outs, gathered), full, a_scale = run_gather(call, here, plan)
        memory.append((outs, gathered, call))  # so that the next one has other memory
        assert torch.equal(bits(gathered), bits(full))
        for out, wanted in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(wanted.shape), wanted)
        assert here.memory.launched == (0 if many or plan.graph is None else number)
    assert (plan.graph is None) == (not kept and "along" in GATHERS[case])
    assert all(copied.height == 1 for copied in here.of(Copied)) == (not many)


def again(tensor: Tensor) -> Tensor:
    """Other values elsewhere, which bf16 and fp8 have: twice as much."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_((tensor.float() * 2 if tensor.dtype == torch.float32 else tensor.float()).to(tensor.dtype))


def elsewhere(call: ReduceFacts) -> ReduceFacts:
    """The same call with Bs and scales at other addresses."""
    scales = {"a_scales": list(map(again, call.a_scales)), "b_scales": list(map(again, call.b_scales))}
    return replace(call, b_parts=list(map(again, call.b_parts)), **scales)


@pytest.mark.parametrize(("case", "implementation"), of_fused(scatter_implementations()))
def test_scatter(case: str, implementation: str, here: Machine) -> None:
    call = scatter_call(**SCATTERS[case])
    plan, memory = scatter_plan(call, here, implementation), []
    for number in range(4):
        here.log.clear()
        call = elsewhere(call)
        out, wanted, mine = run_scatter(call, here, plan)
        memory.append((out, mine, call))
        assert torch.equal(out, wanted)
        check_pushes(here, implementation, mine)
        check_words(here, implementation, call)
        assert here.memory.launched == number


@pytest.mark.parametrize(
    "options",
    [{"ns": (512, 136), "bias": True}, {**ROWWISE, "travels": True}, {**TENSORWISE, "along": True}, {"shard": (2, 4)}],
    ids=str,
)
def test_direct_gather_of_few_rows(options: dict[str, Any], here: Machine) -> None:
    """Two kernels of ours: what moves, and what multiplies."""
    call = gather_call(**{"shard": (8,), "k": 512, "ns": (512,), **options})
    plan, memory = gather_plan(call, here, "direct"), []
    for number in range(4):
        call = replace(call, bs=[again(b) for b in call.bs], b_scales=[again(each) for each in call.b_scales])
        outs, full, a_scale = run_gather(call, here, plan)
        memory.append((outs, call))
        for out, wanted in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(wanted.shape), wanted)
        assert here.memory.launched == number


@pytest.mark.parametrize(
    "options", [{"bias": True}, {**ROWWISE}, {"rows": (2, 16), "dim": 1}, {"factors": (0.5,)}, AVERAGE], ids=str
)
def test_direct_scatter_of_few_rows(options: dict[str, Any], here: Machine) -> None:
    call = scatter_call(**{"rows": (32,), "ks": (512,), "n": 512, **options})
    plan, memory = scatter_plan(call, here, "direct"), []
    for number in range(4):
        call = elsewhere(call)
        out, wanted, mine = run_scatter(call, here, plan)
        memory.append((out, mine, call))
        assert torch.equal(out, wanted)
        assert here.memory.launched == number


@pytest.mark.parametrize(
    "options", [{"bias": True, "ns": (512, 136)}, {**ROWWISE, "travels": True}, {"shard": (2, 70), "dim": 1}], ids=str
)
@pytest.mark.parametrize("implementation", ["direct", "decomposed", "sequential"])
def test_batch_invariant_gather(options: dict[str, Any], implementation: str, here: Machine) -> None:
    """Of many rows too, the matmul is a kernel of ours; those of `direct` are in its graph."""
    if implementation == "sequential" and "dim" in options:
        pytest.skip("one outer block only")
    call = replace(gather_call(**{"shard": (260,), "k": 512, "ns": (512,), **options}), accord=INVARIANT)
    plan, memory = gather_plan(call, here, implementation), []
    for number in range(3 if implementation == "direct" else 2):
        call = replace(call, bs=[again(b) for b in call.bs], b_scales=[again(each) for each in call.b_scales])
        here.log.clear()
        outs, full, a_scale = run_gather(call, here, plan)
        memory.append((outs, call))
        for out, wanted in zip(outs, expected_products(call, full, a_scale), strict=True):
            assert torch.equal(out.reshape(wanted.shape), wanted)
        assert here.memory.launched == (number if implementation == "direct" else 0)


@pytest.mark.parametrize(
    "options", [{"bias": True}, {**ROWWISE}, {"factors": (0.5,)}, {"ks": (512, 256)}, {"added": True}], ids=str
)
@pytest.mark.parametrize("implementation", ["direct", "decomposed"])
def test_batch_invariant_scatter(options: dict[str, Any], implementation: str, here: Machine) -> None:
    call = replace(scatter_call(**{"rows": (1040,), "ks": (512,), "n": 512, **options}), accord=INVARIANT)
    plan, memory = scatter_plan(call, here, implementation), []
    for number in range(2 if plan.graph is None else 3):
        call = elsewhere(call)
        out, wanted, mine = run_scatter(call, here, plan)
        memory.append((out, mine, call))
        assert torch.equal(out, wanted)
        assert here.memory.launched == (0 if plan.graph is None else number)
    assert (plan.graph is None) == (implementation == "decomposed" or not options.keys().isdisjoint({"ks", "added"}))


@pytest.mark.parametrize(
    "options", [{"ks": (512, 256)}, {"added": True}, {"sum_dtype": torch.float32}, {"factors": (1.0, 4.0)}], ids=str
)
def test_a_sum_with_a_part_of_pytorchs_has_no_graph(options: dict[str, Any], here: Machine) -> None:
    call = scatter_call(**{"rows": (32,), "ks": (512,), "n": 512, **options})
    plan = scatter_plan(call, here, "direct")
    assert plan.graph is None
    for _ in range(2):
        out, wanted, _ = run_scatter(call, here, plan)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("implementation", ["decomposed", "direct"])
def test_what_calls_pytorch_has_no_graph(implementation: str, here: Machine) -> None:
    assert gather_plan(gather_call((256,), 64, (72,)), here, implementation).graph is None
    assert scatter_plan(scatter_call((512,), (64,), 72), here, implementation).graph is None


def test_trace_of_the_graph_of_a_gather() -> None:
    """The copy stream is a branch of the graph, which comes behind what was left in flight on the stream itself."""
    with machine(rank=0, world=2) as here:
        here.edits = True
        call = gather_call((256,), 64, (72,), world=2, kept=True)
        plan = fused.FusedGather(call, here.memory, tiles_of(torch.bfloat16), 1, SMS)
        for _ in range(2):
            plan.run(call.a_shard, call.bs, call.biases, None, (), None)
        assert here.urgent == [False]
        (here.log,) = here.graphs
        gathered = here.launched("gemm_kernel").arguments["a1"].address
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


def test_trace_of_the_graph_of_a_scatter() -> None:
    """So is the reducer: the words of parts in flight and of its own are the same."""
    with machine(rank=0, world=2) as here:
        here.edits = True
        call = scatter_call((512,), (64,), 72, world=2)
        plan = fused.FusedScatter(call, here.memory, tiles_of(torch.bfloat16), 1, SMS)
        for _ in range(2):
            plan.run(call.a_parts, call.b_parts, call.biases, (), (), None)
        (here.log,) = here.graphs
        staging = here.launched("gemm_kernel").arguments["c0"].address
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
def test_what_a_gather_has_to_copy_first_is_copied_each_time(how: str, kept: bool, here: Machine) -> None:
    call, place = gather_call((256,), 64, (72,), full=True, kept=kept), otherwise(how, 256, 64)
    plan = gather_plan(replace(call, a_shard=place), here, "fused")
    make = plan.tensors
    plan.tensors = lambda operands: make((place.copy_(operands[0]), *operands[1:]))  # type: ignore[method-assign]
    for number in range(3):
        (out, gathered), full, _ = run_gather(call, here, plan)
        assert torch.equal(bits(gathered), bits(full))
        assert torch.equal(out, expected_products(call, full, None)[0])
        assert here.memory.launched == number


def test_what_a_scatter_has_to_copy_first_is_copied_each_time(here: Machine) -> None:
    call, place = scatter_call((512,), (64,), 72), otherwise("unaligned", 512, 64)
    plan = scatter_plan(replace(call, a_parts=[place]), here, "fused")
    make = plan.tensors
    plan.tensors = lambda operands: make(([place.copy_(operands[0][0])], *operands[1:]))  # type: ignore[method-assign]
    for number in range(3):
        out, wanted, _ = run_scatter(call, here, plan)
        assert torch.equal(out, wanted)
        assert here.memory.launched == number


def test_stand_ins_come_in_the_order_of_addresses() -> None:
    """Each in its own place, whichever others there are; what is one tensor in two places has a stand-in for each."""
    call = gather_call((256,), 64, (72, 136, 8), dtype=torch.float8_e4m3fn, scales="row", travels=True, bias=True)
    for missing in itertools.product((False, True), repeat=3):
        biases = [None if none else bias for bias, none in zip(call.biases, missing, strict=True)]
        outs, full = [tensor(4, n) for n in (72, 136, 8)], tensor(4, 4) if missing[0] else None
        for numbers in (None, call.a_scale, tensor(4, 1)):
            every = (call.a_shard, call.bs, biases, call.a_scale, call.b_scales, numbers, outs, full, numbers)
            check_stand_ins(GatherTensors(*every))
    scatter = scatter_call((768,), (64, 80), 72, dtype=torch.float8_e4m3fn, scales="row", bias=True)
    for added in (None, tensor(768, 72)):
        operands = (scatter.a_parts, scatter.b_parts, [None, tensor(72)], scatter.a_scales, scatter.b_scales, added)
        check_stand_ins(ScatterTensors(*operands, tensor(768, 72), tensor(192, 72), [tensor(8)]))


def check_stand_ins(made: GatherTensors | ScatterTensors) -> None:
    """Copies in the place of all tensors: the same values, and the addresses of the copies, in order."""
    by_address = {each.data_ptr(): each for each in flat(made)}
    copies = [by_address[address].clone() for address in made.addresses()]
    moved = edited.with_each(made, copies)
    assert moved.addresses() == tuple(copy.data_ptr() for copy in copies)
    for one, other in zip(flat(made), flat(moved), strict=True):
        assert one is not other
        assert torch.equal(one.float(), other.float())


def flat(made: GatherTensors | ScatterTensors) -> list[Tensor]:
    lists = [[each] if each is None or isinstance(each, Tensor) else each for each in made]
    return [each for many in lists for each in many if each is not None]


def test_a_call_in_a_capture_is_enqueued(here: Machine) -> None:
    """It belongs to the program's graph, whether the plan has one or not; and it is no reason to make one."""
    call = gather_call((256,), 64, (72,), kept=True)
    plan = gather_plan(call, here, "fused")
    for capturing, launched in ((7, 0), (7, 0), (0, 0), (0, 1), (7, 1)):
        here.capturing = capturing
        here.log.clear()
        plan.run(call.a_shard, call.bs, call.biases, None, (), None)
        assert here.memory.launched == launched
        assert [entry.prepared.name for entry in here.of(Launched)] == ["stage_kernel", "gemm_kernel"]


def test_what_cannot_be_captured_is_enqueued_and_it_is_said_once(
    here: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    call = gather_call((256,), 64, (72,), full=True, kept=True)
    plan = gather_plan(call, here, "fused")
    enqueue = plan.enqueue

    def enqueued(stream: int, made: GatherTensors) -> None:
        if here.dry:
            raise MemoryError("no room for a graph")
        enqueue(stream, made)

    plan.enqueue = enqueued  # type: ignore[method-assign]
    for _ in range(4):
        (out, gathered), full, _ = run_gather(call, here, plan)
        assert torch.equal(bits(gathered), bits(full))
        assert torch.equal(out, expected_products(call, full, None)[0])
    assert here.memory.launched == 0
    assert not here.memory.in_graph
    (said,) = caplog.messages
    assert said == "calls of one shape are enqueued each time, which takes the host longer: no room for a graph"


def test_a_capture_that_another_thread_breaks_is_made_again(here: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """As one that synchronizes the device does, by chance; nothing is said of it."""
    call, errors = gather_call((256,), 64, (72,), kept=True), [CudaError("cuStreamEndCapture: invalidated (901)")]
    plan = gather_plan(call, here, "fused")
    enqueue = plan.enqueue

    def enqueued(stream: int, made: GatherTensors) -> None:
        enqueue(stream, made)
        if here.dry and errors:
            raise errors.pop()

    plan.enqueue = enqueued  # type: ignore[method-assign]
    for launched in (0, 0, 1, 2):
        plan.run(call.a_shard, call.bs, call.biases, None, (), None)
        assert here.memory.launched == launched
    assert caplog.messages == []


def test_after_an_address_that_no_graph_takes_calls_are_enqueued(
    here: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of memory that the driver has made in another way: the call is right, and so are those after it."""
    call = gather_call((256,), 64, (72,), full=True, kept=True)
    plan = gather_plan(call, here, "fused")
    launch = Graph.launch

    def refuses(graph: Graph, stream: int, addresses: Sequence[int]) -> None:
        if here.memory.launched == 2:
            raise Unedited("cuGraphExecMemcpyNodeSetParams: invalid argument (1)")
        launch(graph, stream, addresses)

    monkeypatch.setattr(Graph, "launch", refuses)
    for launched in (0, 1, 2, 2, 2):
        (out, gathered), full, _ = run_gather(call, here, plan)
        assert torch.equal(bits(gathered), bits(full))
        assert torch.equal(out, expected_products(call, full, None)[0])
        assert here.memory.launched == launched
    (said,) = caplog.messages
    assert said.endswith("takes the host longer: cuGraphExecMemcpyNodeSetParams: invalid argument (1)")
