"""Recipes end to end on real ranks: model families, fp8 with its norms, tensor parallelism beside other ways, and both.

As in test_backend, one set of processes runs all cases of a module.
"""

from __future__ import annotations

from pathlib import Path

import family_cases
import fp8_cases
import mesh_cases
import pytest
import sharded_fp8_cases
import torch
from compiled_training import Outcome, run_cases
from interpreter import interpreter_fault
from profiles import of_profile
from ranks import run_ranks

pytestmark = pytest.mark.ranks

#: each norm, recipe and kind of layer at least once
IN_FP8 = of_profile(fp8_cases.CASES, ("linear_RMSNorm_delayed", "mlp_RMSNorm_late", "attention_LayerNorm_current"))
#: model_programs has gated attention, and norms of heads
FAMILIES = of_profile(family_cases.CASES, set(family_cases.CASES) - {"gated_attention_with_norms_of_heads"})
MESHES = of_profile(mesh_cases.CASES, ("fully_sharded_blocks", "pipeline_stages"))


def outcomes(world_size: int, module: str, names: tuple[str, ...], folder: Path) -> list[dict[str, Outcome]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        return run_ranks(world_size, run_cases, names, module, timeout_s=600)


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """The fp8 cases on two ranks; the Triton kernels run, interpreted."""
    fault = interpreter_fault()
    if fault:
        pytest.skip(fault)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
        return outcomes(2, "fp8_cases", IN_FP8, tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="module")
def of_families(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    if torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 loses gradients through functions that write into what they return, in plain torch too")
    return outcomes(2, "family_cases", FAMILIES, tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="module")
def on_meshes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return outcomes(4, "mesh_cases", MESHES, tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="module")
def sharded_in_fp8(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return outcomes(4, "sharded_fp8_cases", tuple(sharded_fp8_cases.OWN), tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="module")
def sharded_by_torchao(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    pytest.importorskip("torchao.float8", reason="torchao is not installed: pip install torchao --no-deps")
    return outcomes(4, "sharded_fp8_cases", tuple(sharded_fp8_cases.BY_TORCHAO), tmp_path_factory.mktemp("inductor"))


@pytest.mark.parametrize("case", IN_FP8)
def test_fp8(in_fp8: list[dict[str, Outcome]], case: str) -> None:
    """Two layers, two microbatches in flight, landing memory poisoned: what is computed without overlap."""
    assert errors(in_fp8, case) == []


@pytest.mark.parametrize("case", FAMILIES)
def test_family(of_families: list[dict[str, Outcome]], case: str) -> None:
    """See the function `case_…` of family_cases."""
    assert_agreed(of_families, case)


@pytest.mark.parametrize("case", MESHES)
def test_mesh(on_meshes: list[dict[str, Outcome]], case: str) -> None:
    """See the function `case_…` of mesh_cases."""
    assert_agreed(on_meshes, case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", sharded_fp8_cases.OWN)
def test_sharded_fp8(sharded_in_fp8: list[dict[str, Outcome]], case: str) -> None:
    """Delayed scaling under FSDP2, and both scalings with weights gathered in the graph."""
    assert_agreed(sharded_in_fp8, case)


@pytest.mark.parametrize("case", sharded_fp8_cases.BY_TORCHAO)
def test_sharded_torchao(sharded_by_torchao: list[dict[str, Outcome]], case: str) -> None:
    """torchao's tensorwise recipe under FSDP2, and delayed scaling with torchao's gather of weights in fp8."""
    assert_agreed(sharded_by_torchao, case)


def assert_agreed(ranks: list[dict[str, Outcome]], case: str) -> None:
    """No rank fails, and the ranks of one tensor-parallel group decided alike."""
    assert errors(ranks, case) == []
    plans = [tuple(report.plan_digest for report in outcome[case].reports) for outcome in ranks]
    assert plans[::2] == plans[1::2], "ranks of one tensor-parallel group decided differently"


def errors(ranks: list[dict[str, Outcome]], case: str) -> list[str]:
    return [f"rank {rank}: {outcome[case].error}" for rank, outcome in enumerate(ranks) if outcome[case].error]
