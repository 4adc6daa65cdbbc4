"""Powers of two that products are multiplied by, at the ends of dtypes' ranges: eager's numbers, or not fused."""

from __future__ import annotations

from typing import Any

import factor_cases
import pytest
from factor_cases import CASES, COMPILED
from ranks import run_ranks


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_ranks(factor_cases.RANKS, factor_cases.judge, timeout_s=300)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*CASES, *(f"{name}, compiled" for name in COMPILED)])
def test_the_values_of_eager(on_ranks: list[dict[str, Any]], name: str) -> None:
    case = CASES[name.removesuffix(", compiled")]
    assert [results[name] for results in on_ranks] == [(case.outcomes, "")] * factor_cases.RANKS
