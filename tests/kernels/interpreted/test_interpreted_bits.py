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


def _extremes(rank: int, world: int) -> dict[str, set[float]]:
    """Half of a sum of two numbers, by each implementation: in fp32 they, or their sum, have no place in bfloat16."""
    import torch
    import torch.distributed as dist
    from asynctp_kernels import cuda

    import asynctp_passes.ops  # noqa: F401
    from asynctp_passes.ops.calls import INVARIANT

    a, found = torch.zeros(4, 16).bfloat16(), dict[str, set[float]]()
    a[:, 0] = 1.0 - rank
    for value in (2.0**127, 2.0**-133):
        b = torch.zeros(16, 32).bfloat16()
        b[0] = value
        terms = {"several": ([a, a], [b, b], [1.0, 1.0, 0.5], None), "added": ([a], [b], [1.0, 0.5], a[:, :1] * b[:1])}
        for name, (a_parts, b_parts, factors, added) in terms.items():
            told = found.setdefault(f"{name} {value}", set())
            for implementation, dim in (("direct", 0), ("decomposed", 0), ("whole", 0), ("direct", 1), ("whole", 1)):
                with cuda.forced(implementation):
                    out = torch.ops.asynctp.matmul_reduce_scatter(
                        a_parts, b_parts, [None] * len(a_parts), "sum", dim, world, dist.group.WORLD.group_name,
                        accord=INVARIANT, factors=factors, added=added,
                    )  # fmt: skip
                told |= set(out.float().flatten().tolist())
    return found


def test_a_factor_of_a_sum_stays_where_the_program_has_it() -> None:
    found = run_ranks(2, _extremes)
    assert found[0] == found[1]
    assert {name: told for name, told in found[0].items() if len(told) != 1} == {}
    assert found[0][f"several {2.0**127}"] == {float("inf")}
    assert found[0][f"several {2.0**-133}"] == {2.0**-133}


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
