"""Kernel tests run in Triton's interpreter, in spawned ranks that inherit this environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_KERNELS = str(Path(__file__).parents[2] / "kernels")
if _KERNELS not in sys.path:  # a source root: spawned ranks get this process's sys.path
    sys.path.insert(0, _KERNELS)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "30")
