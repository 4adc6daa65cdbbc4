"""Programs whose ranks differ in what they compute beside their collectives: each case of `rank_cases` is right."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from interpreter import interpreter_fault
from scripts import run_forked

INTERPRETED = {"TRITON_INTERPRET": "1", "ASYNCTP_CPU_IMPLEMENTATION": "interpreted"}
CASES = sorted((Path(__file__).parents[1] / "support" / "rank_cases").glob("*.py"))


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_case(case: Path) -> None:
    interpreted = "interpreted=True" in case.read_text()
    if interpreted and (fault := interpreter_fault()):
        pytest.skip(fault)
    with mock.patch.dict(os.environ, INTERPRETED if interpreted else {}):  # as `rank_harness` does, before triton
        run = run_forked(case, paths=True, timeout_s=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": right") >= 2, run.stdout
