"""One rank votes on its deviations, another one deviates without a vote: the rank that compiles later raises."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks

from asynctp_passes import Config, DisagreementError
from asynctp_passes.agreement.ledgers import Ledger
from asynctp_passes.agreement.vote import vote
from asynctp_passes.ir.records import Ballot


def said(key: str, *deviations: str, agree: bool, deviate: bool = True) -> str:
    ballot = Ballot(dist.group.WORLD.group_name, key, deviations)
    try:
        vote([ballot], Config(agree=agree, deviate=deviate, strict="off", log=False, trace=False))
    except DisagreementError as error:
        return str(error)
    return ""


def in_either_order(rank: int, world_size: int, mine: tuple[str, ...], deviate: bool) -> list[str]:
    """Rank 0 asks nobody. It compiles one graph before rank 1 does, and another one after it."""
    found = []
    for first in range(2):
        if rank != first:
            dist.barrier()
        told = mine if rank == 0 else ("deviation",)
        found.append(said(f"f{first}", *told, agree=rank == 1, deviate=deviate or rank == 1))
        if rank == first:
            dist.barrier()
    return found


@pytest.mark.ranks
def test_a_rank_that_deviates_unasked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_AGREE_S", "0.5")
    (early, late), (later, earlier) = run_ranks(2, in_either_order, ("deviation",), True, timeout_s=100)
    assert early == earlier == "", "nobody has told otherwise yet"
    assert late.startswith("asynctp: agree=False on this rank, and agree=True on rank 1 of group")
    assert later.startswith("asynctp: agree=True on this rank, and agree=False on rank 0 of group")
    assert all("Set agree, or ASYNCTP_AGREE, to the same value on all ranks" in error for error in (late, later))


@pytest.mark.ranks
@pytest.mark.parametrize(("mine", "deviate"), [((), True), (("deviation",), False)])
def test_a_rank_that_asks_nobody_and_does_not_deviate_is_right(
    mine: tuple[str, ...], deviate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCTP_AGREE_S", "0.5")
    assert run_ranks(2, in_either_order, mine, deviate, timeout_s=100) == [["", ""], ["", ""]]


def often(rank: int, world_size: int) -> list[str]:
    """All ranks change their mind, and one of them is always ahead."""
    return [said("f", agree=agree) for agree in (True, False, True, True)]


def without_a_store(rank: int, world_size: int) -> list[str]:
    heard: list[str] = []
    with (
        mock.patch.object(Ledger, "_write", side_effect=RuntimeError("the store is gone")),
        mock.patch.object(
            logging.getLogger("asynctp_passes.agreement.vote"), "warning", lambda *of: heard.append(of[0] % of[1:])
        ),
    ):
        assert said("f", "deviation", agree=False) == ""
    return heard


@pytest.mark.ranks
def test_a_store_that_fails_is_told() -> None:
    told = "asynctp: with agree=False this rank could not see whether others ask: the store is gone"
    assert run_ranks(2, without_a_store, timeout_s=100) == [[told]] * 2


@pytest.mark.ranks
def test_ranks_may_change_their_mind_together() -> None:
    assert run_ranks(2, often, timeout_s=100) == [[""] * 4] * 2
