"""torchtitan as users start it, on two CPU ranks: with asynctp every chain is fused, and the losses are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stack_runs import TWO_RANKS, output_of, run_stack

pytest.importorskip("torchtitan.trainer", reason="torchtitan is not installed: .ci/stacks torchtitan")

PROGRAM = Path(__file__).with_name("torchtitan_program.py")
ARGUMENTS = [
    "--module", "llama3", "--config", "llama3_debugmodel", "--validator.no-enable", "--debug.seed", "7",
    "--training.steps", "2", "--training.seq-len", "64", "--training.local-batch-size", "2",
    "--parallelism.tensor-parallel-degree", "2", "--parallelism.pipeline-parallel-schedule", "1F1B",
    "--compile.enable",
]  # fmt: skip
DOOR = "asynctp_passes.torchtitan.asynctp"


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A folder with the tokenizer and the text that torchtitan's debug configurations name; they are in no wheel."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = tmp_path / "tests" / "assets"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "c4_test").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    lines = (json.dumps({"text": f"line {number}: a text to learn, again and again. " * 20}) for number in range(100))
    (folder / "c4_test" / "data.json").write_text("\n".join(lines))
    return tmp_path


def trained(folder: Path, *arguments: str) -> dict[str, Any]:
    """Losses of two steps, and the picture of rank 0."""
    out = folder / "out.json"
    output_of(run_stack(PROGRAM, out, *ARGUMENTS, *arguments, launcher=TWO_RANKS, cwd=folder))
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_all_chains_are_fused_and_losses_are_the_same(assets: Path) -> None:
    plain = trained(assets)
    found = trained(assets, "--override.imports", f'{DOOR}={{"strict": "all"}}')
    assert (plain["fused"], plain["missed"]) == (0, 0)
    assert (found["fused"], found["missed"]) == (9, 0), found["text"]
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert len(found["losses"]) == 2


def test_an_option_that_is_none(assets: Path) -> None:
    with pytest.raises(AssertionError, match=r"option='strickt' is not valid.*did you mean 'strict'"):
        trained(assets, "--override.imports", f'{DOOR}={{"strickt": "all"}}')
