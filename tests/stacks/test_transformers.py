"""transformers with `tp_plan="auto"` on two CPU ranks: one line fuses every chain, and values are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stack_runs import TWO_RANKS, output_of, run_stack

pytest.importorskip("transformers", reason="transformers is not installed: .ci/stacks transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed: .ci/stacks transformers")

PROGRAM = Path(__file__).with_name("transformers_program.py")


def results(folder: Path, how: str) -> dict[str, Any]:
    """What rank 0 of the program wrote."""
    out = folder / f"{how}.json"
    output_of(run_stack(PROGRAM, out, folder / "model", how, launcher=TWO_RANKS, cwd=folder))
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
