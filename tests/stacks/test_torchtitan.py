"""torchtitan as users start it, on CPU ranks: with asynctp all chains are fused, and losses are plain Inductor's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stack_runs import output_of, run_stack

pytest.importorskip("torchtitan.trainer", reason="torchtitan is not installed: .ci/stacks torchtitan")

PROGRAM = Path(__file__).with_name("torchtitan_program.py")
COMMON = [
    "--validator.no-enable", "--debug.seed", "7", "--compile.enable",
    "--training.steps", "2", "--training.seq-len", "64", "--training.local-batch-size", "2",
    "--parallelism.tensor-parallel-degree", "2", "--parallelism.pipeline-parallel-schedule", "1F1B",
]  # fmt: skip
FLOAT32 = ["--training.mixed-precision-param", "float32"]
LLAMA = ["--module", "llama3", "--config", "llama3_debugmodel"]
DEEPSEEK = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel", *FLOAT32]

#: Ranks, arguments, and the chains of all graphs of two layers, forward and backward. Layers of one kind share a graph.
CASES: dict[str, tuple[int, list[str], int]] = {
    "llama3": (2, LLAMA, 4 + 5),
    "llama3_float32_no_checkpointing": (2, [*LLAMA, *FLOAT32, "activation-checkpoint:none"], 4 + 4),
    "llama3_full_checkpointing": (2, [*LLAMA, "activation-checkpoint:full"], 4 + 7),
    "llama3_full_dtensor": (2, [*LLAMA, "--parallelism.spmd-backend", "full_dtensor"], 4 + 5),
    "llama3_partial_dtensor": (2, [*LLAMA, "--parallelism.spmd-backend", "partial_dtensor"], 4 + 5),
    "llama3_no_sequence_parallel": (2, [*LLAMA, "--parallelism.no-enable-sequence-parallel"], 2 + 3),
    "llama3_fsdp": (4, LLAMA, 4 + 5),
    "llama3_float8_rowwise": (2, ["--module", "llama3", "--config", "llama3_debugmodel_float8"], 4 + 5),
    "qwen3": (2, ["--module", "qwen3", "--config", "qwen3_debugmodel"], 4 + 5),
    "qwen3_moe": (2, ["--module", "qwen3", "--config", "qwen3_moe_debug"], 3 + 4),
    "gpt_oss": (2, ["--module", "gpt_oss", "--config", "gpt_oss_debugmodel_flex"], 3 + 3 + 3 + 3),
    "muse_glimmer": (2, ["--module", "muse_glimmer", "--config", "muse_glimmer_debugmodel"], 4 + 6),
    "deepseek_v3": (2, DEEPSEEK, 4 + 6 + 5 + 6),
    "deepseek_v3_experts": (
        2,
        [*DEEPSEEK, "--parallelism.expert-parallel-degree", "2", "--training.disable-cuda-graphs"],
        4 + 6 + 4 + 6,
    ),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer and the text that torchtitan's debug configurations name; they are in no wheel."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    root = tmp_path_factory.mktemp("torchtitan")
    folder = root / "tests" / "assets"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "c4_test").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    lines = (json.dumps({"text": f"line {number}: a text to learn, again and again. " * 20}) for number in range(100))
    (folder / "c4_test" / "data.json").write_text("\n".join(lines))
    return root


def trained(folder: Path, cases: dict[str, tuple[int, list[str], int]], **options: str) -> dict[str, Any]:
    """Losses of two steps and what was fused, in each case: plain and with asynctp."""
    given = [
        [name, ranks, options, [*arguments[:4], *COMMON, *arguments[4:]]]
        for name, (ranks, arguments, _) in cases.items()
    ]
    (folder / "cases.json").write_text(json.dumps(given))
    output_of(run_stack(PROGRAM, folder / "cases.json", folder / "results.json", cwd=folder, timeout_s=3600))
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def results(assets: Path) -> dict[str, Any]:
    return trained(assets, CASES, strict="all")


@pytest.mark.parametrize("name", CASES)
def test_all_chains_are_fused_and_losses_are_the_same(results: dict[str, Any], name: str) -> None:
    if "float8" in name:
        pytest.importorskip("torchao", reason="torchao is not installed: .ci/stacks torchtitan")
    plain, found = results[name]["plain"], results[name]["ours"]
    assert (plain["error"], found["error"]) == ("", "")
    assert (plain["fused"], plain["missed"]) == (0, 0)
    assert (found["fused"], found["missed"]) == (CASES[name][2], 0), found["text"]
    assert len(found["losses"]) == 2
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert results[name]["distance"] < 1e-5, "of gradients"


def test_an_option_that_is_none(assets: Path) -> None:
    found = trained(assets, {"llama3": CASES["llama3"]}, strickt="all")["llama3"]["ours"]
    assert "option='strickt' is not valid" in found["error"]
    assert "did you mean 'strict'" in found["error"]
