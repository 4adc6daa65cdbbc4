"""Whose tiles are stamped, and who reads that, without a GPU: `cuda_stubs` plays the driver, this file the kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose.wire import PUSH
from asynctp_kernels.cuda.facts import ReduceFacts
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS
from asynctp_kernels.cuda.runtime.stamps import WORDS
from cuda_stubs import COPY, Awaited, Computed, Entry, Launched, Machine, Tape, gather_call, machine, scatter_call
from plan_runs import op

RANK, WORLD = 1, 4
TILES = 2 * WORLD  # of 128 rows, of a rank's 192


@pytest.fixture
def here() -> Iterator[Machine]:
    """A machine whose GEMM stamps tile i of its n-th launch: 1000 n + 10 i, and the next two, on SM i."""
    launches = 0

    def gemm(launched: Launched) -> None:
        nonlocal launches
        launches += 1
        cuda_emulated.in_order(launched)
        if launched.prepared.constants["STAMPS"]:
            reached = 1000 * launches + 10 * torch.arange(TILES)
            stamps = torch.stack([reached, reached + 1, reached + 2, torch.arange(TILES)], dim=1)
            cuda_emulated.at(launched.arguments["done_ptr"] + 8, (TILES, WORDS), torch.int64).copy_(stamps)

    with machine(RANK, WORLD) as made, cuda.forced("fused"):
        cuda_emulated.emulate(made)
        made.kernels["gemm_kernel"] = gemm
        yield made


GATHER = gather_call((192,), 64, (72,), kept=True)


def gather(here: Machine) -> torch.Tensor:
    """One call; gives the rows of its product that come from this rank."""
    outs = op(here, GATHER)
    assert outs is not None
    return outs[0].view(WORLD, 192, 72)[RANK]


def first_stamps(stamps: cuda.Stamps) -> list[int]:
    """When each call's first tile was reached."""
    return [call["tiles"][0][2] for call in stamps.calls()]


def kernels(here: Machine) -> list[bool]:
    """Of each plan's GEMM whether it stamps."""
    return [each.constants["STAMPS"] for each in here.prepared if each.name == "gemm_kernel"]


def done(here: Machine) -> int:
    """What the last GEMM counts its programs in."""
    address: int = here.launched("gemm_kernel").arguments["done_ptr"]
    return address


def test_calls_inside_are_stamped_and_those_outside_are_not(here: Machine) -> None:
    """Each way has a plan of its own; what has been stamped stays what it was."""
    expected = gather(here)
    assert done(here) == here.memory.gather_done.data_ptr()
    with cuda.stamped() as one:
        assert torch.equal(gather(here), expected)
        assert done(here) != here.memory.gather_done.data_ptr()
        gather(here)
    gather(here)
    assert done(here) == here.memory.gather_done.data_ptr()
    with cuda.stamped() as other:
        gather(here)
    assert kernels(here) == [False, True]
    assert (first_stamps(one), first_stamps(other)) == ([2000, 3000], [5000])


def test_whose_rows_a_tile_has(here: Machine) -> None:
    """Own rows are first in a gather, and last in a scatter."""
    call: ReduceFacts = scatter_call((768,), (64,), 72)
    with cuda.stamped() as stamps:
        gather(here)
        peers_come(here, call)
        assert op(here, call) is not None
    found = stamps.calls()
    assert [(each["op"], each["rank"]) for each in found] == [("all_gather_matmul", 1), ("matmul_reduce_scatter", 1)]
    assert [[tile[0] for tile in each["tiles"]] for each in found] == [
        [1, 1, 2, 2, 3, 3, 0, 0],
        [2, 2, 3, 3, 0, 0, 1, 1],
    ]
    assert found[1]["tiles"][3] == [3, 3, 2030, 2031, 2032]


def peers_come(here: Machine, call: ReduceFacts) -> None:
    """What the other ranks' words say in a scatter."""
    for words, value in ((here.memory.free, call.wire.signature(PUSH)), (here.memory.full, MAX_CHUNKS)):
        cuda_emulated.at(words.at(RANK, 0), (WORLD,), torch.int32).fill_(value)


def test_a_recorded_call_stamps_too(here: Machine) -> None:
    """In the same memory each time: that it was copied for the call before is no part of a recording."""
    here.records = True
    with cuda.stamped() as stamps:
        gather(here)
        (plan,) = here.memory.plans.values()
        kept = plan.tensors((GATHER.a_shard, None, GATHER.bs, (), GATHER.biases, None))
        plan.tensors = lambda operands: kept
        for _ in range(3):
            gather(here)
    (recorded,) = here.recordings
    assert here.memory.recordings.launched >= 2
    assert not [entry for entry in recorded if isinstance(entry, Computed)]
    assert first_stamps(stamps) == [1000, 2000, 3000, 4000]


def copies(here: Machine) -> int:
    """How often a call copies stamps: int64, as nothing else is that is copied."""
    log: list[Entry] = []
    with Tape(log):
        gather(here)
    clones = [entry for entry in log if isinstance(entry, Computed) and entry.op is torch.ops.aten.clone.default]
    return sum(entry.result.dtype == torch.int64 for entry in clones)


def test_stamps_are_copied_for_readers_only(here: Machine) -> None:
    """And behind the call that made them, should this one be on another stream."""
    with cuda.stamped():
        gather(here)
        assert copies(here) == 1
    with cuda.stamped():
        assert copies(here) == 0
    with cuda.stamped() as stamps:
        gather(here)
        here.log.clear()
        here.current_stream = COPY
        gather(here)
        assert here.log[0] == Awaited(COPY, here.memory.last)
    assert first_stamps(stamps) == [4000, 5000]


def test_what_has_no_tiles_is_not_seen(here: Machine) -> None:
    with cuda.forced("decomposed"), cuda.stamped() as stamps:
        gather(here)
    assert stamps.calls() == []


def test_captured_calls_are_refused(here: Machine) -> None:
    """Nothing of them has begun: later ones are right."""
    with cuda.stamped():
        gather(here)
        here.capturing = 1
        with pytest.raises(RuntimeError, match=r"stamped calls cannot be captured in a CUDA graph; capture outside"):
            gather(here)
        here.capturing = 0
        gather(here)
