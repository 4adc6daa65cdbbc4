"""Real programs in every spelling of a collective or matmul: traced, rewritten, and run on real ranks against eager."""

from __future__ import annotations

import form_cases
import pytest
from form_cases import CASES, RANKS
from ranks import run_ranks

Results = list[dict[str, tuple[tuple[str, ...], list[str]]]]


@pytest.fixture(scope="module")
def on_ranks() -> Results:
    """What each rank says of all cases."""
    return run_ranks(RANKS, form_cases.run_cases, list(CASES))


@pytest.mark.ranks
@pytest.mark.xdist_group("forms")
@pytest.mark.parametrize("name", CASES)
def test_on_ranks(on_ranks: Results, name: str) -> None:
    for results in on_ranks:
        assert results[name] == (CASES[name].outcomes, [])
