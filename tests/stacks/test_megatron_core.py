"""Megatron-Core's layers with the steps of docs/how-to/stacks.md, on two CPU ranks: all chains are fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stack_runs import written_by_two_ranks

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed: .ci/stacks megatron_core")

PROGRAM = Path(__file__).with_name("megatron_program.py")
SEQUENCE = ["all_gather_matmul", "matmul_reduce_scatter"]
PROGRAMS = {  # chains fused in the forward and in the backward; two layers have one code
    "layers": ([4, 4], SEQUENCE),
    "mlp": ([2, 2], SEQUENCE),
    "frozen": ([2, 2], SEQUENCE),
    "replicated": ([1, 1], ["matmul_all_reduce"]),
}

Found = list[dict[str, Any]]


def results(folder: Path, *arguments: str) -> Found:
    """The results of both ranks, compiled anew."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    return written_by_two_ranks(PROGRAM, folder, *arguments, environment=environment)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return results(tmp_path_factory.mktemp("traced"), "traced")


@pytest.fixture(scope="module")
def as_it_is(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return results(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_chains_are_fused_and_gradients_are_equal(traced: Found, program: str) -> None:
    fused, kinds = PROGRAMS[program]
    for found in (rank[program] for rank in traced):
        assert (found["fused"], found["missed"], found["breaks"]) == (fused, 0, 0), found["text"]
        assert found["kinds"] == kinds
        assert found["distance"] < 1e-6


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_it_rank_0_breaks_graphs(as_it_is: Found, program: str) -> None:
    found = as_it_is[0][program]
    assert found["breaks"] > 0
    assert sum(found["fused"]) < sum(PROGRAMS[program][0])
    assert found["distance"] < 1e-6
