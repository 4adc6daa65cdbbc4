"""torchao's recipes, two CPU ranks: what is fused and what is missed, as docs/how-to/stacks.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stack_runs import written_by_two_ranks

pytest.importorskip("torchao.float8", reason="torchao is not installed: .ci/stacks torchao")

PROGRAM = Path(__file__).with_name("torchao_program.py")
SUPPORT = Path(__file__).parents[1] / "support"
#: Fused chains, and the missed ones by kind and code.
EXPECTED: dict[str, tuple[int, dict[str, int]]] = {
    "train tensorwise": (4, {}),
    "train tensorwise, torchao's styles": (4, {}),
    "train rowwise": (4, {}),
    "train rowwise_with_gw_hp": (4, {}),
    "train tensorwise, emulated": (0, {"all_gather ATP208": 2, "reduce_scatter ATP105": 2}),
    "Float8DynamicActivationFloat8WeightConfig by tensors": (2, {}),
    "Float8DynamicActivationFloat8WeightConfig by rows": (2, {}),
    "Float8WeightOnlyConfig": (2, {}),
    "Int8DynamicActivationInt8WeightConfig": (2, {}),
    "Int8WeightOnlyConfig": (0, {"all_gather ATP115": 1, "reduce_scatter ATP115": 1}),
    "Int8WeightOnlyConfig, float32": (2, {}),
    "IntxWeightOnlyConfig of int4": (2, {}),
    "Int8DynamicActivationIntxWeightConfig of int4": (1, {"all_gather ATP208": 1}),
    "NVFP4WeightOnlyConfig": (2, {}),
    "MXDynamicActivationMXWeightConfig of fp8, emulated": (1, {"all_gather ATP208": 1}),
    "MXDynamicActivationMXWeightConfig of fp4, emulated": (1, {"all_gather ATP105": 1}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both ranks, by recipe."""
    return written_by_two_ranks(PROGRAM, tmp_path_factory.mktemp("torchao"), paths={"PYTHONPATH": [SUPPORT]})


@pytest.mark.parametrize("recipe", EXPECTED)
def test_what_is_fused_and_missed(results: list[dict[str, Any]], recipe: str) -> None:
    for found in (rank[recipe] for rank in results):
        assert "error" not in found, found["error"]
        assert (found["fused"], found["missed"]) == EXPECTED[recipe], found["text"]
        assert found["distance"] < 0.01


def test_every_recipe_that_ran_is_expected(results: list[dict[str, Any]]) -> None:
    assert results[0].keys() == EXPECTED.keys()
