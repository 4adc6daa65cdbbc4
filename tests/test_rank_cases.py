"""Programs whose ranks differ in what they compute beside their collectives: each case of `rank_cases` is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import PATIENCE

HERE = Path(__file__).parent
CASES = sorted((HERE / "rank_cases").glob("*.py"))


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_case(case: Path) -> None:
    paths = [str(HERE), str(HERE.parent), str(HERE.parent / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run(
        [sys.executable, str(case)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240 * PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": right") >= 2, run.stdout
