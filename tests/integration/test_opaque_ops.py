"""Ops of another library that may communicate inside, on real ranks: order and values are the program's."""

from __future__ import annotations

from typing import Any

import opaque_cases
import pytest
import torch
from ranks import run_ranks

pytestmark = pytest.mark.ranks

Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", name="ranks")
def two_ranks() -> Found:
    return run_ranks(2, opaque_cases.run_cases, timeout_s=300)


@pytest.mark.parametrize("case", opaque_cases.CASES)
def test_values_are_those_of_eager(ranks: Found, case: str) -> None:
    for rank in ranks:
        assert len(rank[case]["eager"]) == len(rank[case]["compiled"])
        torch.testing.assert_close(rank[case]["compiled"], rank[case]["eager"], rtol=1e-4, atol=1e-4)


def codes(ranks: Found, case: str, rank: int = 0) -> list[str]:
    return [code for code, _ in ranks[rank][case]["told"]]


def test_a_chain_that_an_opaque_op_takes_is_missed_by_its_name(ranks: Found) -> None:
    for case, rank in (("weight_of_the_op", 0), ("weight_of_the_op_on_one_rank", 0), ("trained_weight", 1)):
        text = next(text for code, text in ranks[rank][case]["told"] if code == "ATP213")
        assert 'register_local("opaque_like::custom_sum")' in text
    (text, _) = (text for _, text in ranks[0]["trained_weight"]["told"])
    assert "opaque_like::custom_sum" in text, "what is left out of a chain is named too"


def test_chains_beside_opaque_ops_are_fused(ranks: Found) -> None:
    """No other chain is lost: a fused op stands where its collective does."""
    for case in ("logged", "written", "several_results", "number", "in_a_branch", "training"):
        assert "F" in codes(ranks, case), case
    assert codes(ranks, "reductions") == ["F", "F"], "apart, and not as one sum"


def test_a_local_op_is_no_fixed_point_whatever_its_name(ranks: Found) -> None:
    for rank in (0, 1):
        assert codes(ranks, "local_op", rank) == ["F"]


def test_a_rowwise_op_is_done_on_the_shard(ranks: Found) -> None:
    for rank in (0, 1):
        assert codes(ranks, "rowwise_op", rank) == ["F"]
