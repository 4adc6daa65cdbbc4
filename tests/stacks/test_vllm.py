"""vLLM's compiler with the settings of docs/how-to/vllm.md, on two CPU ranks: it fuses all chains, with equal results.

`vllm_program.py` says what of vLLM runs. The engine runs in `test_vllm_cpu.py`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from plugins import write_entry_point
from stack_runs import written_by_two_ranks

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm._C_stable_libtorch") is None:
    pytest.skip("vLLM's wheel for GPUs is not installed: .ci/stacks vllm", allow_module_level=True)
if shutil.which("cc") is None:
    pytest.skip("there is no C compiler, to make a driver library that does nothing", allow_module_level=True)

PROGRAM = Path(__file__).with_name("vllm_program.py")
FORMS = {
    "Layers": (4, ["matmul_all_reduce"]),  # two pieces, each compiled for small and for large batches
    "Sequence": (4, ["all_gather_matmul", "matmul_reduce_scatter"]),
    "Fp8": (2, ["matmul_all_reduce"]),
    "Second": (2, ["matmul_all_reduce"]),
}
Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in and a `libcuda.so.1`, without which vLLM's library of ops cannot be loaded."""
    folder = tmp_path_factory.mktemp("vllm")
    write_entry_point(folder / "plugin", "vllm.platform_plugins", "vllm_platform:cpu")
    functions = ("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
    (folder / "driver.c").write_text("\n".join(f"int {name}(void) {{ return 999; }}" for name in functions))
    build = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(build, cwd=folder, check=True)
    return folder


def results(folder: Path, **options: str) -> Found:
    """The results of both ranks; `options` are ASYNCTP_* variables."""
    environment = {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1"}
    environment |= {f"ASYNCTP_{name.upper()}": value for name, value in options.items()}
    paths = {"LD_LIBRARY_PATH": [folder], "PYTHONPATH": [folder / "plugin", PROGRAM.parent]}
    return written_by_two_ranks(PROGRAM, folder, environment=environment, paths=paths)


def caches(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache" / "torch_compile_cache").iterdir()}


@pytest.fixture(scope="module")
def cold(folder: Path) -> tuple[Found, set[str]]:
    """The results of a start without caches, and the caches that it left."""
    return results(folder, strict="all"), caches(folder)


@pytest.mark.parametrize("model", FORMS)
def test_all_chains_are_fused_and_results_are_equal(cold: tuple[Found, set[str]], model: str) -> None:
    fused, kinds = FORMS[model]
    for found in (rank[model] for rank in cold[0]):
        assert (found["fused"], found["missed"], found["cached"]) == (fused, 0, 0), found["text"]
        assert found["kinds"] == kinds
        assert found["distance"] < 1e-6


def test_vllm_cache_keeps_what_is_fused_and_its_report(cold: tuple[Found, set[str]], folder: Path) -> None:
    again = results(folder, strict="all")
    for before, after in zip(cold[0], again, strict=True):
        for model, (fused, _) in FORMS.items():
            assert after[model]["cached"] > 0, (model, after[model]["text"])
            assert (after[model]["fused"], after[model]["missed"]) == (fused, 0)
            assert after[model]["distance"] == before[model]["distance"]
    assert caches(folder) == cold[1]


def test_another_option_has_a_cache_of_its_own(cold: tuple[Found, set[str]], folder: Path) -> None:
    found = results(folder, groups="0")  # the group of all ranks, which no layer uses
    assert [(rank[model]["fused"], rank[model]["cached"]) for rank in found for model in FORMS] == [(0, 0)] * 8
    assert caches(folder) > cold[1]
