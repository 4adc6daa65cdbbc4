"""The shares that a GEMM's tiles are dealt out in where other groups' kernels may run beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from asynctp_kernels.cuda.choose.tiles import shares_for
from asynctp_kernels.cuda.gemm import gemm
from asynctp_kernels.cuda.plans import fused
from asynctp_kernels.cuda.runtime.launch import BESIDE_REGISTERS, Launch
from asynctp_kernels.cuda.runtime.machine import others_beside
from cuda_stubs import Machine, gather_call, machine, scatter_call
from plan_runs import tiles_of

FEW, TILES = 2, tiles_of(torch.bfloat16)
WAVES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 3, 15: 3, 16: 4, 1000: 4}


@pytest.mark.parametrize(("waves", "shares"), WAVES.items())
def test_more_waves_have_more_shares(waves: int, shares: int) -> None:
    assert shares_for(waves) == shares
    assert shares <= max(waves, 1), "each share has a wave"


@pytest.mark.parametrize(("ranks", "beside"), [(None, False), (2, False), (4, True)])
def test_others_are_ranks_outside_of_the_group(
    ranks: int | None, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks is not None)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    assert others_beside(2) == beside


def grids(here: Machine) -> list[tuple[int, int]]:
    """Programs of a share and of all, of each GEMM that was prepared."""
    gemms = [each for each in here.prepared if "SLOTS" in each.constants]
    assert all(each.programs == each.constants["PROGRAMS"] for each in gemms)
    return [(each.constants["SLOTS"], each.programs) for each in gemms]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_a_gemm_is_dealt_out_in_shares_beside_others(op: str, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 tiles, in 16 waves."""
    monkeypatch.setattr(fused, "others_beside", lambda world: beside)
    with machine() as here:
        if op == "gather":
            fused.FusedGather(gather_call(), here.memory, TILES, 2, FEW)
        else:
            fused.FusedScatter(scatter_call(), here.memory, TILES, 2, FEW)
    assert grids(here) == [(FEW, FEW * (4 if beside else 1))]


def test_a_gemm_that_leaves_no_room_has_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that wait for it could take SMs between its shares, and the next share would wait for those."""
    monkeypatch.setattr(fused, "others_beside", lambda world: True)
    with machine() as here:
        prepare = gemm.prepare

        def without_room(*args: Any, **options: Any) -> Launch:
            return replace(prepare(*args, **options), threads=256, registers=256 - BESIDE_REGISTERS + 8)

        monkeypatch.setattr(gemm, "prepare", without_room)
        fused.FusedScatter(scatter_call(), here.memory, TILES, 2, FEW)
    assert grids(here) == [(FEW, FEW * 4), (FEW, FEW)], "the second is the one that runs"
