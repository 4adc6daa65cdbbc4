"""Batch-invariant calls in Triton's interpreter: rows have the same bits, whatever is beside them and whatever runs.

The cases are those of `tests/gpu/bits.py`, which are smaller where kernels are interpreted.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from profiles import thorough
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def bits_program() -> Any:
    """`tests/gpu/bits.py`, as a module."""
    folder = str(Path(__file__).parents[2] / "gpu")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import bits

    return bits


def _rows(rank: int, world: int, recipe: str, calls: int) -> dict[str, Any]:
    """Of each op and implementation what was compared, and what of it was refused."""
    bits = bits_program()
    bits.POOL, bits.CALLS, totals = 50, calls, Counter[str]()
    (one,) = (each for each in bits.RECIPES if each.name == recipe)
    found = {name: case() for name, case in bits.cases(totals) if name.split()[0] == one.name}
    return {"refused": {name for name, told in found.items() if "refused" in told}, **totals}


@pytest.mark.parametrize(
    ("world", "recipe"),
    [
        (2, "bf16"),
        (2, "fp8-row-bias"),
        (2, "fp8-row-one"),
        (2, "bf16-row-one"),
        (2, "bf16-several"),
        *(
            thorough((3, each))
            for each in ("bf16", "bf16-bias", "fp16", "fp8-tensor", "fp8-row", "fp8-row-bias", "fp8-row-several")
        ),
    ],
)
def test_rows_keep_their_bits(world: int, recipe: str) -> None:
    found = run_ranks(world, _rows, recipe, 2)
    assert found == found[:1] * world
    told = found[0]
    assert told["unlike"] == 0
    assert told["elements"] > 5_000
    sums_by_nccl = {f"{recipe} {op} sequential" for op in ("scatter", "all-reduce")}
    assert sums_by_nccl <= told["refused"]
    assert f"{recipe} scatter decomposed" not in told["refused"]


def _unlike(rank: int, world: int) -> str:
    """A rank whose call is batch-invariant, and one whose call is not: what each is told."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels.errors import UnlikeCalls

    import asynctp_passes.ops  # noqa: F401
    from asynctp_passes.ops.calls import INVARIANT

    a, b, group = torch.randn(8, 16).bfloat16(), torch.randn(16, 16).bfloat16(), dist.group.WORLD.group_name
    try:
        torch.ops.asynctp.matmul_all_reduce([a], [b], [None], "sum", group, accord=INVARIANT if rank else 0)
    except UnlikeCalls as error:
        return str(error)
    return ""


def test_ranks_must_have_it_alike() -> None:
    for message in run_ranks(2, _unlike):
        assert message.count("batch-invariant") == 1


def test_both_packages_mean_the_same_by_an_accord() -> None:
    from asynctp_kernels.cuda.choose import wire

    from asynctp_passes.ops import calls

    assert wire.INVARIANT == calls.INVARIANT
