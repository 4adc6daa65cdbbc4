"""Graphs that come unsorted from Inductor compile and train as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import unsorted_cases
from profiles import of_profile
from ranks import run_ranks

pytestmark = pytest.mark.ranks

#: each way to be unsorted, and one graph that comes sorted
CASES = of_profile(tuple(unsorted_cases.CASES), ("divided_dynamic", "multiplied", "masked", "wide", "dropped"))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, unsorted_cases.run_cases, CASES, timeout_s=500)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_eager(ranks: list[dict[str, dict[str, Any]]], case: str) -> None:
    for rank in ranks:
        wanted, found = rank[case]["eager"], rank[case]["compiled"]
        assert len(wanted) == len(found) == 6
        for one, other in zip(wanted, found, strict=True):
            if case == "dropped":
                assert one.shape == other.shape
                assert other.isfinite().all()
            else:
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_both_halves_are_fused(ranks: list[dict[str, dict[str, Any]]], case: str) -> None:
    for rank in ranks:
        assert rank[case]["reports"] == [("forward", 2, 0), ("backward", 2, 0)]


def test_they_do_come_unsorted(ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Else the tests above would show nothing."""
    if torch.__version__ < "2.13":
        pytest.skip("other versions of torch have other patterns")
    for case in CASES:
        unsorted = unsorted_cases.CASES[case][-1]
        assert (not all(ranks[0][case]["sorted"])) == unsorted, case
