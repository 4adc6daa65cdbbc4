"""How long tests may take."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
"""Whether tests look for minutes each, where a change is tested in seconds else."""

_UNHURRIED: Any = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("quick", max_examples=80, derandomize=True, **_UNHURRIED)
settings.register_profile("thorough", max_examples=10_000, **_UNHURRIED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def of_profile(names: Sequence[str], always: Container[str]) -> tuple[str, ...]:
    """The names to run: those of `always`, and the others in the thorough profile."""
    return tuple(name for name in names if THOROUGH or name in always)


def thorough(case: Any) -> Any:
    """One of the values, or of the `pytest.param`s, of a parametrized test, for the thorough profile only."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.thorough])
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)
