"""All-reduces of a maximum or minimum on ranks of this host, interpreted: values, NaN, and what goes elsewhere."""

from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import pytest
from profiles import THOROUGH, thorough
from ranks import overwrite_memory, run_ranks

pytestmark = pytest.mark.ranks

#: elements: one, and numbers of bytes that are no multiple of 16
COUNTS = ((), (1,), (3,), (5, 7), (2, 4100))


def _values(rank: int, world: int, seed: int) -> list[str]:
    """All dtypes and shapes, one way or the other, back to back, with ranks that come late: what was wrong.

    On more than two ranks it is every other call: each dtype, and each shape with both.
    """
    import torch
    import torch.distributed as dist
    from asynctp_kernels import cuda
    from asynctp_kernels.cuda.choose.wire import EXTREME_DTYPES

    import asynctp_passes.ops.collectives  # noqa: F401

    group, wrong, late = dist.group.WORLD, list[str](), random.Random(seed + rank)
    op, wait = torch.ops.asynctp.all_reduce, torch.ops._c10d_functional.wait_tensor
    shared = random.Random(seed)
    calls = [(shape, dtype, shared.choice(("max", "min"))) for shape in COUNTS for dtype in EXTREME_DTYPES]
    shared.shuffle(calls)
    for number, (shape, dtype, how) in enumerate(calls[:: 1 if THOROUGH or world == 2 else 2]):
        drawn = [torch.Generator().manual_seed(1000 * seed + number * world + peer) for peer in range(world)]
        least = 0 if dtype in (torch.bool, torch.uint8) else -100
        parts = torch.stack([torch.randint(least, 100, shape, generator=each) for each in drawn]).to(dtype)
        if dtype.is_floating_point:  # on some ranks, and on all
            parts[torch.rand(parts.shape, generator=torch.Generator().manual_seed(number)) < 0.3] = torch.nan
            parts.view(world, -1)[:, 1::5] = torch.nan
            wide, edge = parts.double(), torch.inf if how == "min" else -torch.inf
            numbers = wide.nan_to_num(edge)
            wanted = numbers.amax(0) if how == "max" else numbers.amin(0)
            wanted[wide.isnan().all(0)] = torch.nan
        else:
            wanted = (parts.amax(0) if how == "max" else parts.amin(0)).double()
        if late.random() < 0.1:
            time.sleep(late.random() * 0.05)
        given = parts[rank].clone()
        with mock.patch.object(torch.ops._c10d_functional, "all_reduce", side_effect=AssertionError("gloo's")):
            found = wait(op(given, how, group.group_name))
        right = found.shape == given.shape and found.dtype == dtype and found.is_contiguous()
        if not (right and torch.equal(given.view(-1).view(torch.uint8), parts[rank].reshape(-1).view(torch.uint8))):
            wrong.append(f"{shape} {dtype} {how}: its form, or what it was given")
        if not torch.equal(found.double().nan_to_num(0.25), wanted.nan_to_num(0.25)):
            wrong.append(f"{shape} {dtype} {how}: {found} for {wanted}")
        if number % 7 == 0:  # nothing is read that a call did not write
            overwrite_memory(group)
    assert cuda.run_bulk_all_reduce(torch.zeros(3).to(torch.float8_e4m3fn), "max", group, lambda: None) is None
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4, thorough(8)])
def test_values(world: int) -> None:
    """A NaN gives way to a number, and is there where no rank has one."""
    found: list[Any] = run_ranks(world, _values, 3, timeout_s=240)
    assert found == [[]] * world


def _two_of_three(rank: int, world: int) -> list[bool]:
    """The last rank gathers as many bytes: whether each element is NaN on this one; the next call raises."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels import UnlikeCalls, cuda
    from asynctp_kernels.cuda.runtime.memory import GroupMemory

    import asynctp_passes.ops.collectives  # noqa: F401

    name, wait = dist.group.WORLD.group_name, torch.ops._c10d_functional.wait_tensor

    def call(last: bool) -> torch.Tensor:
        x = torch.full((3000,), rank + 1.0)
        ops = torch.ops.asynctp
        with cuda.forced("direct"):
            return wait(ops.all_gather(x, world, name) if last else ops.all_reduce(x, "max", name))

    assert bool((call(False) == world).all())
    with mock.patch.object(GroupMemory, "ended"):  # on CPUs a call waits for its end, and raises itself
        found = call(rank == world - 1)
    with pytest.raises(UnlikeCalls, match=r"(?s)(?=.*all_gather)(?=.*all_reduce)"):
        call(rank == world - 1)
    return found.isnan().tolist()


def test_no_element_is_the_maximum_of_some_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of two ranks are alike and come; without the third's they are no result."""
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "10")
    *reduced, gathered = run_ranks(3, _two_of_three)
    assert [all(nan) for nan in reduced] == [True, True]
    assert gathered == [True] * 6000 + [False] * 3000, "of a gather the own shard is right"
