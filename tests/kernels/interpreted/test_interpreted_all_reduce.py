"""Direct all-reduces on ranks of this host, interpreted: values, bits, and memory that nobody has written."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
from op_cases import BF16, FP16, FP32
from profiles import THOROUGH
from ranks import overwrite_memory, run_ranks

pytestmark = pytest.mark.ranks

#: rows, columns: of any size, with parts that no rank has, or that end within 16 bytes
SHAPES = ((1, 1), (1, 8), (3, 7), (5, 200), (16, 64), (2, 4100))


def _shots(rank: int, world: int, seed: int) -> list[str]:
    """Both ways, of all dtypes and shapes, back to back, with ranks that come late: what was wrong.

    On more than two ranks it is every other call: each shape, and each dtype with a sum and with an average.
    """
    import torch
    import torch.distributed as dist
    from asynctp_kernels import cuda
    from asynctp_kernels.cuda.choose import wire
    from asynctp_kernels.cuda.runtime.memory import existing_memory

    from asynctp_passes import ops

    group, wrong, late = dist.group.WORLD, [], random.Random(seed + rank)
    calls = list(itertools.product(SHAPES, (BF16, FP16, FP32), ("sum", "avg")))
    random.Random(seed).shuffle(calls)
    for number, ((rows, cols), dtype, how) in enumerate(calls[:: 1 if THOROUGH or world == 2 else 2]):
        drawn = [torch.Generator().manual_seed(1000 * seed + number * world + peer) for peer in range(world)]
        a, b = ([torch.randn(*size, generator=each).to(dtype) for each in drawn] for size in ((rows, 16), (16, cols)))
        total = torch.zeros(rows, cols)
        for left, right in zip(a, b, strict=True):
            total += (left.float() @ right.float()).to(dtype).float()
        wanted = (total * (1 / world if how == "avg" else 1)).to(dtype)
        product = (a[rank].float() @ b[rank].float()).to(dtype)
        for limit, moved in ((0, False), (1 << 30, False), (0, True)):
            wire.ONE_SHOT_BYTES = limit
            existing = existing_memory(group)
            if existing is not None:
                existing.plans.clear()
            if late.random() < 0.1:
                time.sleep(late.random() * 0.05)
            with cuda.forced("direct"):
                if moved:
                    found = cuda.run_bulk_all_reduce(product, how, group, lambda: None)
                else:
                    found = ops.matmul_all_reduce(a[rank], b[rank], group=group, reduce_op=how)
            if found is None or not torch.equal(found, wanted):
                wrong.append(f"{rows}x{cols} {dtype} {how}, one shot up to {limit}, moved: {moved}")
        if number % 5 == 0:  # nothing is read that a call did not write
            overwrite_memory(group)
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_one_shot_and_two_give_the_same_bits(world: int) -> None:
    """Those of a sum in rank order, rounded once, on every rank."""
    found: list[Any] = run_ranks(world, _shots, 3)
    assert found == [[]] * world


def _posted_after_its_data(rank: int, world: int) -> bool:
    """A rank is slow before it posts, and after; its sums come late then, and its parts."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels import cuda
    from asynctp_kernels.cuda.choose import wire
    from asynctp_kernels.cuda.gemm import copy_kernels

    real, good = copy_kernels.post_words, True

    def slowly(*args: Any) -> None:
        time.sleep(0.01)
        real(*args)
        time.sleep(0.01)

    for limit, slow in itertools.product((0, 1 << 30), range(world)):
        wire.ONE_SHOT_BYTES = limit
        copy_kernels.post_words = slowly if rank == slow else real
        with cuda.forced("direct"):
            for number in range(3):
                given = torch.full((33 + limit % 2, 8 + slow), float(rank + number), dtype=BF16)
                found = cuda.run_bulk_all_reduce(given, "sum", dist.group.WORLD, lambda: None)
                wanted = sum(peer + number for peer in range(world))
                good &= found is not None and bool((found == wanted).all())
        copy_kernels.post_words = real
        dist.barrier()
        cuda.release(dist.group.WORLD)
        dist.barrier()
    return good


def test_a_word_is_posted_only_after_its_parts_or_sums() -> None:
    assert run_ranks(3, _posted_after_its_data) == [True] * 3


#: (rows, columns): a rank's part is a multiple of 16 bytes. It has whole rows, or ends within one
PUSHED = ((1, 32), (32, 64), (64, 8), (48, 16), (24, 16), (20, 24), (9, 64), (5, 96), (7, 80))


def _pushed(rank: int, world: int, seed: int) -> list[str]:
    """Each rank multiplies as it likes, or not at all, back to back, and is late at times: what was wrong."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels import cuda
    from asynctp_kernels.cuda.runtime.memory import existing_memory

    from asynctp_passes import ops

    group, wrong, own, shared = dist.group.WORLD, list[str](), random.Random(seed + rank), random.Random(seed)
    ran = dict.fromkeys(("fused", "decomposed", "whole"), 0)
    for number in range(90 if THOROUGH else 50):
        (rows, cols), dtype = shared.choice(PUSHED), shared.choice((BF16, FP16, FP32))
        cols *= 1 if world == 2 else world
        how = shared.choice(("sum", "avg")) if world == 2 else "sum"
        draw = torch.Generator().manual_seed(1000 * seed + number)
        pairs = [
            [torch.randint(-2, 3, size, generator=draw).to(dtype) for size in ((rows, 16), (16, cols))]
            for _ in range(world)
        ]
        products = [a.float() @ b.float() for a, b in pairs]
        total = torch.stack(products).sum(0)
        wanted = (total / world if how == "avg" else total).to(dtype)
        if own.random() < 0.1:
            time.sleep(own.random() * 0.05)
        a, b = pairs[rank]
        way = own.choice([*ran, "moved"])
        if way == "fused" and (dtype == FP32 or rows % world):
            way = "decomposed"
        if way == "decomposed" and rows < world:
            way = "whole"
        with cuda.forced("fused" if way == "moved" else way):
            if way == "moved":
                given = products[rank].to(dtype)
                found = cuda.run_bulk_all_reduce(given, how, group, lambda: None)
                if not torch.equal(given, products[rank].to(dtype)):
                    wrong.append(f"{number}: its tensor is written")
            else:
                found = ops.matmul_all_reduce(a, b, group=group, reduce_op=how)
                ran[way] += 1
        if found is None or not torch.equal(found, wanted):
            wrong.append(f"{number}: {rows}x{cols} {dtype} {how} {way}")
        memory = existing_memory(group)
        if any(words.any() for words in memory.all_chunk_words) or memory.local[:128].any():
            wrong.append(f"{number}: words are left")
        if number % 5 == 0:  # nothing is read that a call did not write
            overwrite_memory(group)
    return wrong if all(ran.values()) else [*wrong, f"not all ran: {ran}"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pushed_all_reduces_are_right_whatever_ranks_multiply(world: int) -> None:
    found: list[Any] = run_ranks(world, _pushed, 5)
    assert found == [[]] * world


def _nothing_of_the_last(rank: int, world: int) -> bool:
    """The contraction is cut so that the last rank has nothing of it; its zeros are added to the others' products."""
    import torch
    import torch.distributed as dist

    from asynctp_passes import ops

    depth, right = 0 if rank == world - 1 else 16, True
    for shape in ((2, 6), (12,), (1, 3, 4)):
        a, b = torch.ones(*shape, depth, dtype=BF16), torch.ones(depth, 48, dtype=BF16)
        found = ops.matmul_all_reduce(a, b, group=dist.group.WORLD)
        right &= found.shape == (*shape, 48) and bool((found == 16 * (world - 1)).all())
    return right


def test_a_rank_without_a_part_of_the_contraction_takes_part() -> None:
    assert run_ranks(3, _nothing_of_the_last) == [True] * 3
