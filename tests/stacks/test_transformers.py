"""transformers with `tp_plan="auto"` on two CPU ranks: one line fuses every chain, and values are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: .ci/stacks transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed: .ci/stacks transformers")

PROGRAM = Path(__file__).with_name("transformers_program.py")


def results(folder: Path, how: str) -> dict[str, Any]:
    """What rank 0 of the program wrote."""
    out = folder / f"{how}.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCTP_")}
    done = subprocess.run(
        [*launch, str(PROGRAM), str(out), str(folder / "model"), how],
        cwd=folder,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_training_and_generation(tmp_path: Path) -> None:
    plain, found = results(tmp_path, "plain"), results(tmp_path, "asynctp")
    assert (plain["trained"]["graphs"], plain["served"]["graphs"]) == (0, 0)
    assert (found["trained"]["fused"], found["trained"]["missed"]) == (15, 0), found["trained"]["text"]
    assert (found["served"]["fused"], found["served"]["missed"]) == (4, 0), found["served"]["text"]
    assert found["tokens"] == plain["tokens"]
    for name in ("loss", "gradient"):
        assert found[name] == pytest.approx(plain[name], rel=1e-5)
