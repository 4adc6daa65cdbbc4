"""All-reduces: the plan of a scatter, and a gather, on one rank without a GPU. See `cuda_stubs` and `cuda_emulated`."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import SymmetricMemoryError, cuda
from asynctp_kernels.cuda import choices, groups, moves
from asynctp_kernels.cuda.choose.tiles import MAX_CHUNKS
from asynctp_kernels.cuda.choose.wire import PUSH, Wire
from asynctp_kernels.cuda.facts import ReduceFacts, part_rows
from asynctp_kernels.cuda.plans import decomposed
from cuda_stubs import (
    COPY,
    REDUCE,
    Copied,
    Launched,
    Machine,
    gather_call,
    machine,
    scatter_call,
    tensor,
    whole,
)
from plan_runs import (
    IMPLEMENTATIONS,
    RANK,
    ROWWISE,
    SMALL,
    WORLD,
    gather_plan,
    op,
    peers_come,
    run_gather,
    run_scatter,
    scatter_plan,
)
from torch import Tensor


@pytest.fixture
def here() -> Iterator[Machine]:
    with machine(RANK, WORLD) as made:
        cuda_emulated.emulate(made)
        yield made


# --- all-reduces: the plan of a scatter, and a gather --------------------------------------------------------------
def all_reduce(here: Machine, call: ReduceFacts, check: Callable[[], None] = lambda: None) -> Tensor | None:
    """The sum of a call's products as the op makes it."""
    return op(here, replace(call, scatter_dim=None), check)


@pytest.mark.parametrize("rows", [(2, 96, 2), (50,)], ids=["whole rows", "parts that end in a row"])
@pytest.mark.parametrize("implementation", ["fused", "decomposed", "whole"])
@pytest.mark.parametrize("options", [{}, {**ROWWISE, "fast": False}], ids=["bf16", "rows of scales, slow"])
def test_all_reduce(implementation: str, rows: tuple[int, ...], options: dict[str, Any], here: Machine) -> None:
    """A rank adds up a part of as many bytes as each other one, and gets the others' sums in the product's place."""
    if implementation == "fused" and rows == (50,):
        pytest.skip("its parts are whole rows")
    call, checked = scatter_call(rows, (64,), 80, **options), []
    flat = replace(call, a_parts=[call.a_parts[0].view(-1, 64)], scatter_dim=0)
    mine = whole(flat, "decomposed").bfloat16().view(WORLD, -1)
    signature = replace(flat, scatter_dim=None).wire.signature(PUSH)
    sums = torch.randn(mine.shape).bfloat16()
    with cuda.forced(implementation):
        for _ in range(2):
            here.memory.require("box", WORLD * mine[RANK].numel() * 2)
            peers_come(here, here.memory.full, [mine[RANK].contiguous()] * WORLD, signature)
            tell_sums(here, sums)
            if implementation == "whole":
                given = mine.clone()
                out = cuda.Mover(here.group).all_reduce(given.view(-1, 80), "sum")
                assert torch.equal(given, mine), "it stays as it is"
            else:
                out = all_reduce(here, call, lambda: checked.append(1))
            assert out is not None
            assert out.dtype == torch.bfloat16
            wanted = sums.clone()
            wanted[RANK] = (mine[RANK].float() * WORLD).bfloat16()
            assert torch.equal(out.view(WORLD, -1), wanted)
            box = here.parts("box")[RANK].view(torch.bfloat16)[(WORLD - 1) * mine[RANK].numel() :][: mine[RANK].numel()]
            assert torch.equal(box, wanted[RANK]), "the peers pull it from there"
            assert not any(words.any() for words in here.memory.all_chunk_words)
    if implementation != "whole":
        assert checked == [1], "once for each plan"
        assert here.memory.last_implementation == implementation


def tell_sums(here: Machine, sums: Tensor) -> None:
    """The peers' sums are in their boxes, and they have said so."""
    size = sums[0].numel()
    for peer in range(WORLD):
        if peer != RANK:
            here.parts("box")[peer].view(torch.bfloat16)[(WORLD - 1) * size :][:size].copy_(sums[peer])
            here.memory.all_chunk_words[1][peer] = MAX_CHUNKS


def test_scales_of_some_rows() -> None:
    """One for all rows, for each, or for each block of them."""
    each, blocks, one = torch.arange(512.0)[:, None], torch.arange(4.0)[:, None], torch.ones(1)
    assert torch.equal(decomposed._of_rows(each, 512, 128, 256), each[128:256])
    assert torch.equal(decomposed._of_rows(blocks, 512, 128, 384), blocks[1:3])
    assert decomposed._of_rows(one, 512, 128, 256) is one


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_rows_of_parts(world: int) -> None:
    """Each row is multiplied once, and before any part that it belongs to is pushed."""
    for rows, columns in ((world, 8), (world + 1, 24), (50, 8 * world), (97, 40)):
        call = replace(scatter_call((rows,), (8,), columns, world=world), scatter_dim=None)
        part = call.parts.cols
        for rank in range(world):
            made = set[int]()
            ranges = part_rows(call, rank)
            assert [dst for dst, *_ in ranges] == [(rank + step) % world for step in range(1, world + 1)]
            for dst, first, end in ranges:
                assert not made & set(range(first, end))
                made |= set(range(first, end))
                assert made >= set(range(dst * part // columns, -(-(dst + 1) * part // columns)))
            assert made >= set(range(rows))


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("rows", [(2, 96, 2), (7,), (1,)], ids=str)
@pytest.mark.parametrize("options", [{}, {**ROWWISE, "fast": False}, {"reduce_op": "avg"}], ids=["bf16", "fp8", "avg"])
def test_direct_all_reduce(options: dict[str, Any], rows: tuple[int, ...], shots: int, here: Machine) -> None:
    """One kernel, for any rows; its sum is in the place of the product."""
    call, checked = scatter_call(rows, (64,), 80, **options), []
    mine = whole(replace(call, a_parts=[call.a_parts[0].view(-1, 64)]), "direct").flatten()
    peers = [torch.randn(mine.numel()).bfloat16() for _ in range(WORLD)]
    peers[RANK] = mine.bfloat16()
    factor = 1 / WORLD if call.reduce_op == "avg" else 1.0
    total = (sum((each.float() for each in peers), torch.zeros(())) * factor).bfloat16()
    size = -(-total.numel() // (8 * WORLD)) * 8 if shots == 2 else total.numel()
    parts = list(total.split(size)) + [total[:0]] * WORLD if shots == 2 else []
    sent = [each[RANK * size :][:size] for each in peers] if shots == 2 else peers
    given = [*sent, *parts[:WORLD]]
    here.kernels["push_all_reduce_kernel"] = functools.partial(cuda_emulated.landed, parts=given)
    with mock.patch.object(Wire, "shots", shots):
        for _ in range(3):
            out = all_reduce(here, call, lambda: checked.append(1))
            assert out is not None
            assert (out.shape, out.dtype) == ((*rows, 80), torch.bfloat16)
            assert torch.equal(out.flatten(), total)
    assert (checked, here.memory.last_implementation) == ([1], "direct")
    launched = here.of(Launched)[-1]
    assert launched.arguments["own_ptr"] == launched.arguments["out_ptr"] == out.data_ptr()


def test_all_reduce_of_rows_that_cannot_be_divided(here: Machine) -> None:
    """They are direct, or NCCL's."""
    here.kernels.clear()
    for name, wanted in ((None, "direct"), ("direct", "direct"), ("sequential", "sequential")):
        checked: list[int] = []
        with contextlib.nullcontext() if name is None else cuda.forced(name):
            for _ in range(2):
                found = all_reduce(here, scatter_call((7,), (64,), 72), functools.partial(checked.append, 1))
                assert (found is None) == (wanted == "sequential")
        assert (checked, here.memory.last_implementation) == ([1], wanted)
    with cuda.forced("fused"), pytest.raises(RuntimeError, match="7 rows are not divisible by 4 ranks"):
        all_reduce(here, scatter_call((7,), (64,), 96))


@pytest.mark.parametrize("forced", [None, "fused"])
def test_an_all_reduce_without_a_product(forced: str | None, here: Machine) -> None:
    """Of a size that cannot be divided it is direct, whatever is asked for; its tensor stays as it is."""
    here.kernels["push_all_reduce_kernel"] = functools.partial(
        cuda_emulated.landed, parts=[torch.ones(35).bfloat16()] * WORLD
    )
    given = torch.full((7, 5), 2.0).bfloat16()
    with contextlib.nullcontext() if forced is None else cuda.forced(forced):
        total = cuda.run_bulk_all_reduce(given, "sum", here.group, lambda: None)
    assert total is not None
    assert torch.equal(total, torch.full((7, 5), 2.0 + WORLD - 1).bfloat16())
    assert bool((given == 2).all())


def test_all_reduce_and_scatter_of_one_shape_have_plans_apart(here: Machine) -> None:
    here.kernels.clear()
    call = scatter_call((64,), (64,), 72)
    for _ in range(2):
        whole_sum, part = all_reduce(here, call), op(here, call)
        assert whole_sum is not None
        assert part is not None
        assert (whole_sum.shape, part.shape) == ((64, 72), (16, 72))


LARGE: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather_call((4608,), 256, (8,), kept=True),
    "scatter": lambda: scatter_call((8192,), (8,), 264),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_growth_during_a_capture_is_refused(name: str, implementation: str) -> None:
    with machine(RANK, WORLD) as here, cuda.forced(implementation):
        small, large = SMALL[name](), LARGE[name]()
        assert op(here, small) is not None
        here.capturing = 1
        assert op(here, small) is not None
        for _ in range(2):
            with pytest.raises(SymmetricMemoryError, match=r"group 'tp' has \d+ bytes of \w+ memory .* Run .*once"):
                op(here, large)
        here.capturing = 0
        assert op(here, large) is not None
        here.capturing = 1
        assert op(here, large) is not None


def test_a_first_call_cannot_be_captured() -> None:
    with machine(RANK, WORLD) as here:
        here.capturing = 1
        for _ in range(2):
            with pytest.raises(SymmetricMemoryError, match=r"first call of a group cannot be captured: run .* once"):
                op(here, SMALL["gather"]())
        here.capturing = 0
        assert op(here, SMALL["gather"]()) is not None, "the refusal is not for good"


def test_an_interrupt_ends_what_makes_memory_too() -> None:
    """It is made on another thread, which would wait for its peers until its time is up."""
    stopped = threading.Event()
    told: list[BaseException] = []

    def stop(error: BaseException) -> None:
        told.append(error)
        stopped.set()

    interrupt = KeyboardInterrupt()
    with (
        machine(RANK, WORLD),
        mock.patch("concurrent.futures.Future.result", side_effect=interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        cuda.runtime.driver.outside_pools(torch.device("cpu"), lambda: stopped.wait(60), stop)
    assert told == [interrupt]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_memory_is_made_outside_the_pools_of_the_calling_thread(implementation: str) -> None:
    """`mode="reduce-overhead"` raises if a program's first run leaves anything in its graph's pool."""
    with machine(RANK, WORLD) as here, cuda.forced(implementation):
        op(here, LARGE["gather"]())
        op(here, LARGE["scatter"]())
        assert len(here.makers) >= 2, "the words, and the areas"
        assert threading.current_thread() not in here.makers


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_plans_are_kept_until_the_memory_grows(name: str, implementation: str) -> None:
    checked: list[str] = []
    with machine(RANK, WORLD) as here, cuda.forced(implementation):
        small, large = SMALL[name](), LARGE[name]()
        for _ in range(3):
            op(here, small, lambda: checked.append("small"))
        assert checked == ["small"]
        kernels = len(here.prepared)
        op(here, large, lambda: checked.append("large"))
        op(here, large, lambda: checked.append("large"))
        assert checked == ["small", "large"]
        for _ in range(2):
            op(here, small, lambda: checked.append("small"))
        assert checked == ["small", "large", "small"], "the plan of the small call held old addresses"
        assert len(here.prepared) == 3 * kernels


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_after_growth_only_new_memory_is_used(name: str, here: Machine) -> None:
    area = "box"
    with cuda.forced("fused"):
        small = SMALL[name]()
        here.memory.require(area, 1)
        old = here.parts(area)
        here.memory.require(area, 8 << 20)
        new = here.parts(area)
        here.log.clear()
        if name == "gather":
            (*_, gathered), full, _ = run_gather(small, here, gather_plan(small, here, "fused"))
            assert torch.equal(gathered, full)
        else:
            out, wanted, _ = run_scatter(small, here, scatter_plan(small, here, "fused"))
            assert torch.equal(out, wanted)
    ends = [end for copy in here.of(Copied) for end in (copy.src, copy.dst)]
    assert not [end for end in ends if within(end, old)]
    assert [end for end in ends if within(end, new)]


def within(address: int, parts: Sequence[Tensor]) -> bool:
    return any(part.data_ptr() <= address < part.data_ptr() + len(part) for part in parts)


def test_one_plan_for_each_list_of_factors(here: Machine) -> None:
    with cuda.forced("direct"):
        for factors in ((), (1.0,), (2.0,), (2.0,), (-2.0,)):
            op(here, scatter_call((64,), (64,), 72, factors=factors))
    assert len(here.memory.plans) == 3, "nothing, or all by 1, is one"


def test_one_plan_for_each_shape_and_no_more_than_some(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_PLANS", 3)
    with cuda.forced("direct"):
        for rows in range(1, 9):
            op(here, gather_call((rows,), 64, (72,)))
            assert 1 <= len(here.memory.plans) <= 3


def test_a_plan_holds_no_operand(here: Machine) -> None:
    """A plan outlives the call that it was made for."""
    here.kernels.clear()
    for name in ("gather", "scatter"):
        for implementation in IMPLEMENTATIONS:
            with cuda.forced(implementation):
                call = SMALL[name]()
                operands = [call.a_shard, *call.bs] if name == "gather" else [*call.a_parts, *call.b_parts]
                watched = [weakref.ref(operand) for operand in operands]
                op(here, call)
                here.prepared.clear()
                here.log.clear()
                del call, operands
                gc.collect()
                assert [reference() for reference in watched] == [None] * len(watched), (name, implementation)


def test_a_released_group_starts_anew(here: Machine) -> None:
    with cuda.forced("direct"):
        op(here, SMALL["gather"]())
        before = here.memory
        here._streams = iter([COPY, REDUCE])
        cuda.release(here.group)
        with pytest.raises(
            SymmetricMemoryError,
            match=r"group 'tp' is out of step since: it was released.* asynctp_kernels.release\(group\)",
        ):
            before.require("box", 1)
        op(here, SMALL["gather"]())
        assert here.memory is not before


def test_memory_goes_with_its_group(here: Machine) -> None:
    here.kernels.clear()
    with cuda.forced("fused"):
        op(here, SMALL["gather"]())
    watched = [weakref.ref(here.group), weakref.ref(here.memory.signals.memory), weakref.ref(here.parts("box")[0])]
    here.group = None
    here.log.clear()
    here.prepared.clear()
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3


def test_a_call_that_fails_half_way_closes_the_memory(here: Machine) -> None:
    """Its other ranks wait for what did not come: nothing may be added to that until all have given up."""

    def fail(launched: Launched) -> None:
        raise RuntimeError("no more launches")

    here.kernels.clear()
    with cuda.forced("fused"):
        op(here, SMALL["gather"]())
        here.kernels["gemm_kernel"] = fail
        with pytest.raises(RuntimeError, match="no more launches"):
            op(here, SMALL["gather"]())
        here.kernels.clear()
        here.log.clear()
        for name in ("gather", "scatter"):
            with pytest.raises(SymmetricMemoryError, match="out of step since: RuntimeError: no more launches"):
                op(here, SMALL[name]())
        assert here.log == []
        here._streams = iter([COPY, REDUCE])
        cuda.release(here.group)
        assert op(here, SMALL["gather"]()) is not None


def test_the_current_device_has_to_be_that_of_the_tensors(here: Machine) -> None:
    here.current_device = 1
    for name in ("gather", "scatter"):
        with pytest.raises(RuntimeError, match=r"tensors on cpu while cuda:1 is the current device; call torch\.cuda"):
            op(here, SMALL[name]())
    here.current_device = None
    assert op(here, SMALL["gather"]()) is not None


def test_a_group_chooses_by_the_table_that_it_agreed_on(here: Machine) -> None:
    here.kernels.clear()
    call = gather_call((4096,), 512, (72,))
    (*_, name), problem = cuda.runtime.driver.machine(0), choices.problem_for(call)
    for wanted in ("decomposed", "fused"):
        here.memory.plans.clear()
        here.memory.table = {name: {problem.key: {str(problem.rows): wanted}}}
        op(here, call)
        assert cuda.last_implementation(here.group) == wanted


def test_a_group_of_two_hosts_runs_sequentially(caplog: pytest.LogCaptureFixture) -> None:
    with machine(RANK, WORLD) as here:
        here.hosts = ["a", "a", "b", "b"]
        assert [op(here, SMALL["gather"]()) for _ in range(2)] == [None, None]
        assert cuda.last_implementation(here.group) == "sequential"
    assert [record.getMessage() for record in caplog.records] == [
        "group tp runs the sequential program: its ranks are on 2 hosts (a, b), not on one"
    ]


@pytest.mark.parametrize("world", [1, 9])
def test_a_group_of_a_size_without_kernels_runs_sequentially(world: int, caplog: pytest.LogCaptureFixture) -> None:
    with machine(0, world) as here:
        assert op(here, gather_call((8,), 64, (72,), world=world)) is None
        assert f"{world} ranks; the overlapped ops run on 2 to 8" in caplog.text
        with cuda.forced("sequential"):
            assert op(here, gather_call((8,), 64, (72,), world=world)) is None
        with cuda.forced("fused"), pytest.raises(RuntimeError, match=rf"'fused' was asked for and cannot run: {world}"):
            op(here, gather_call((8,), 64, (72,), world=world))


@pytest.mark.parametrize("world", [4, 9])
def test_arguments_are_checked_before_a_call_is_left_to_the_unfused_program(world: int) -> None:
    checked: list[bool] = []
    with machine(0, world) as here, cuda.forced("sequential"):
        for _ in range(2):
            assert op(here, gather_call((8, 2), 64, (72,), dim=1, world=world), lambda: checked.append(True)) is None
            assert op(here, scatter_call((2, 72), (64,), 72, dim=1, world=world), lambda: checked.append(True)) is None
    assert checked == [True] * (2 if world == 4 else 4), "once for each plan, or each call without any"


def refuse() -> None:
    raise ValueError("asynctp: no")


def moved(here: Machine) -> list[str]:
    """What was sent, and launched."""
    return [f"{entry.size} B" if isinstance(entry, Copied) else entry.prepared.name
            for entry in here.log if isinstance(entry, Copied | Launched)]  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "kept", "wanted"),
    [
        ("fused", False, ["24576 B"] * (WORLD - 1) + ["keep_kernel"] * WORLD),
        ("fused", True, ["stage_kernel"] + ["24576 B"] * (WORLD - 1)),
        ("direct", False, ["push_gather_kernel"]),
    ],
)
def test_a_rank_whose_gather_is_refused_sends_its_shard(
    implementation: str, kept: bool, wanted: list[str], here: Machine
) -> None:
    """The peers' calls are right, and those that follow are the same on all ranks."""
    here.kernels.clear()
    call = gather_call((192,), 64, (72,), kept=kept)
    with cuda.forced(implementation):
        for _ in range(2):
            here.log.clear()
            with pytest.raises(ValueError, match="asynctp: no"):
                op(here, call, refuse)
            assert moved(here) == wanted
        assert op(here, call) is not None
    assert list(here.memory.calls._told) == [call.wire.signature(call.wire.transport(implementation))]
    assert here.memory.failure is None
    assert here.memory.skipped == 0


def test_a_rank_whose_scatter_is_refused_tells_so_by_its_next_calls(here: Machine) -> None:
    """It has nothing to send: the peers must not take its next call for this one."""
    here.kernels.clear()
    scatter, gather = scatter_call((768,), (64,), 72), gather_call((192,), 64, (72,))
    with cuda.forced("fused"):
        assert op(here, scatter) is not None
        for made in range(1, 3):
            here.log.clear()
            with pytest.raises(ValueError, match="asynctp: no"):
                op(here, replace(scatter, scatter_dim=-2), refuse)
            assert here.log == []
            assert here.memory.skipped == made
        assert op(here, scatter) is not None
        assert op(here, gather) is not None
    told = [each.text for each in here.memory.calls._told.values()]
    assert told[0] == "reduce_scatter (27648 bytes a rank of bfloat16, sum)"
    after = ", after 2 calls that ended with an error there"
    assert told[1:] == [f"{told[0][:-1]}{after})", f"all_gather (24576 bytes a rank{after})"]
    assert here.memory.failure is None


def test_collectives_without_a_matmul_are_refused_in_the_same_way(here: Machine) -> None:
    here.kernels.clear()
    with cuda.forced("fused"), mock.patch.object(moves, "register_wait"):
        assert cuda.run_bulk_scatter(tensor(8, 8), "sum", WORLD, here.group, lambda: None) is not None
        for number, run in enumerate((
            lambda: cuda.run_bulk_scatter(tensor(8, 8), "max", WORLD, here.group, refuse),
            lambda: cuda.run_bulk_scatter(tensor(7, 8), "sum", WORLD, here.group, refuse),
            lambda: cuda.run_bulk_all_reduce(tensor(8, 8), "max", here.group, refuse),
        )):  # fmt: skip
            with pytest.raises(ValueError, match="asynctp: no"):
                run()
            assert here.memory.skipped == number + 1
        here.log.clear()
        with pytest.raises(ValueError, match="asynctp: no"):
            cuda.run_bulk_gather(tensor(8, 8), 3, here.group, refuse)
        assert here.of(Copied), "the shard is sent"
