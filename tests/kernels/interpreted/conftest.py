"""These tests run kernels in Triton's interpreter, in spawned ranks that inherit this environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from interpreter import interpreter_fault

_KERNELS = str(Path(__file__).parents[3] / "kernels")
if _KERNELS not in sys.path:  # a source root: spawned ranks get this process's sys.path
    sys.path.insert(0, _KERNELS)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "30")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, the tests of this folder where the interpreter does not work."""
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    fault = interpreter_fault() if mine else ""
    for item in mine if fault else ():
        item.add_marker(pytest.mark.skip(reason=fault))
