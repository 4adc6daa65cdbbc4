"""The programs that train and serve a Llama-style model, as a user runs them: two ranks on the CPU, and four."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from profiles import thorough
from scripts import run_forked_ranks

from asynctp_passes.tools.demo import recipe
from asynctp_passes.tools.demo.recipe import RecipeError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

#: Inductor calls aten's kernels instead of compiling C++, which takes most of the time; its graph passes are the same.
QUICK = ["--option", "fallback_by_default=True"] if "fallback_by_default" in torch._inductor.list_options() else []
STRICT = [*QUICK, "--option", "strict=all"]


def run_torchrun(name: str, *arguments: str, cwd: Path, ranks: int = 2, code: int = 0) -> str:
    """Output and errors of an example that torchrun started."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCTP_")}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode != 0) == (code != 0), f"{name} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind of a log; each line is an object."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(isinstance(line, dict) for line in lines)
    return [line for line in lines if line["event"] == kind]


def curve(path: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return {line["step"]: (line["loss"], line["gradient_norm"]) for line in events(path, "step")}


# --- training --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 12 steps, checkpoints of steps 6 and 12, and the log."""
    folder = tmp_path_factory.mktemp("trained")
    given = ["--steps", "12", "--checkpoint-dir", "saved", "--checkpoint-every", "6", "--loss-log", "log.jsonl"]
    out = run_forked_ranks(EXAMPLES / "train_llama.py", *STRICT, *given, cwd=folder)
    assert "8 collectives fused, 0 missed in 2 compiled graphs" in out
    return folder


@pytest.mark.ranks
def test_loss_goes_down_and_is_logged(trained: Path) -> None:
    found = curve(trained / "log.jsonl")
    assert list(found) == list(range(1, 13))
    assert found[1][0] == pytest.approx(5.55, abs=0.1)  # ln 256: a byte is as good as any other
    assert found[12][0] < 0.7 * found[1][0]
    for line in events(trained / "log.jsonl", "step"):
        assert line["tokens_per_s"] == pytest.approx(8 * 128 / line["seconds"])
        assert line["peak_memory_bytes"] > 1e8
    (start,) = events(trained / "log.jsonl", "start")
    assert (start["options"]["size"], start["options"]["precision"], start["resumed_at"]) == ("debug", "fp32", 0)
    assert [line["step"] for line in events(trained / "log.jsonl", "checkpoint")] == [6, 12]


@pytest.mark.ranks
def test_resume_goes_on_exactly(trained: Path, tmp_path: Path) -> None:
    """Weights, optimizer and data are those of the run that was not interrupted: the losses are equal in every bit."""
    shutil.copytree(trained / "saved" / "step-00000006", tmp_path / "saved" / "step-00000006")
    (tmp_path / "saved" / "step-00000009").mkdir()  # one that was not finished
    common = [*STRICT, "--checkpoint-dir", "saved", "--resume"]
    out = run_forked_ranks(
        EXAMPLES / "train_llama.py", *common, "--steps", "12", "--loss-log", "log.jsonl", cwd=tmp_path
    )
    assert "resumed saved/step-00000006 at step 6" in out
    whole, rest = curve(trained / "log.jsonl"), curve(tmp_path / "log.jsonl")
    assert rest == {step: whole[step] for step in range(7, 13)}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        thorough((2, [*QUICK, "--backend", "inductor", "--ac", "full"])),
        thorough((4, [*STRICT, "--dp", "2", "--tp", "2", "--batch", "4", "--ac", "selective"])),
    ],
    ids=["inductor", "FSDP2 x TP"],
)
def test_all_ways_give_equal_losses(ranks: int, arguments: list[str], trained: Path, tmp_path: Path) -> None:
    run_torchrun("train_llama.py", *arguments, "--steps", "4", "--loss-log", "log.jsonl", cwd=tmp_path, ranks=ranks)
    expected, found = curve(trained / "log.jsonl"), curve(tmp_path / "log.jsonl")
    assert list(found) == [1, 2, 3, 4]
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=2e-4)


def test_resume_of_another_run() -> None:
    train = example("train_llama.py")
    train.require_same({"size": "debug", "seed": 1}, {"size": "debug", "seed": 1}, Path("step-1"))
    with pytest.raises(RecipeError, match="--resume: seed is 1 and was 2 in step-1; give what the checkpoint has, or "):
        train.require_same({"size": "debug", "seed": 1}, {"size": "debug", "seed": 2}, Path("step-1"))


def test_resume_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--resume: no checkpoint in .*; leave --resume out, or give another"):
        example("train_llama.py").newest(tmp_path)


def test_a_checkpoint_that_was_written_over_in_part_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata of the earlier one would call it complete."""
    train = example("train_llama.py")
    for step in (1, 2):
        (tmp_path / f"step-{step:08}").mkdir()
        (tmp_path / f"step-{step:08}" / ".metadata").touch()
    trainer = mock.Mock(step=2)
    trainer.options.checkpoint_dir = tmp_path
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train, "get_state_dict", lambda *_: ({}, {}))
    monkeypatch.setattr(train.dcp, "save", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train.Trainer.save(trainer)
    assert train.newest(tmp_path).name == "step-00000001"


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    """What DCP raises is no Exception, and does not say what happened in its first line."""
    torch.distributed.checkpoint.save({"a": 1}, checkpoint_id=tmp_path, no_dist=True)
    for state, said in (({"b": None}, r"\(Missing key in checkpoint state_dict: b.\)"), ({"a": None}, r"\(.+\)")):
        with pytest.raises(RecipeError, match=rf"--resume: .* cannot be loaded {said}; do this"):
            recipe.load_checkpoint(state, tmp_path, "--resume", "do this")
        (tmp_path / ".metadata").write_bytes(b"")


# --- serving ---------------------------------------------------------------------------------------------------------
@pytest.mark.ranks
def test_serve(trained: Path, tmp_path: Path) -> None:
    """With trained weights: answers are plain Inductor's, nothing is compiled anew, percentiles are there.

    Of the two blocks that were trained the first serves alone: four graphs of the whole model are compiled.
    """
    shape = ["--batch", "4", "--batches", "3", "--decode", "4", "--min-prompt", "5", "--max-prompt", "24"]
    shape += ["--blocks", "1"]
    shape += ["--checkpoint", str(trained / "saved" / "step-00000012")]
    out = run_forked_ranks(
        EXAMPLES / "serve_prefill.py", *STRICT, *shape, "--check", "--json", "new/out.json", cwd=tmp_path
    )
    for step in ("warm up and compile, 3 of 3", "answer and time batches, 3 of 3", "check batches, 3 of 3", "done"):
        assert out.count(f"serve_prefill: {step} (the step before took ") == 1, "one rank says it"
    assert "from those of plain Inductor (limit 1e-04); 0 of 48 bytes do" in out
    found = json.loads((tmp_path / "new" / "out.json").read_text())
    assert 0 <= found["check"].pop("distance") < 1e-4
    assert found["check"] == {"against": "plain Inductor", "limit": 1e-4, "bytes": 48, "differ": 0}
    assert (found["fused"], found["missed"]) == (10, 0)
    assert [found[key]["count"] for key in ("prefill_ms", "decode_ms")] == [3, 9]
    for key in ("prefill_ms", "decode_ms"):
        assert 0 < found[key]["p50"] <= found[key]["p90"] <= found[key]["p99"]
    assert [len(answer) for answer in found["answers"]] == [4] * 4
    assert set("".join(found["answers"])) <= set(map(chr, range(32, 127))) | {"\n"}, "trained on text, it writes text"


@pytest.mark.parametrize(
    ("precision", "distance", "code"),
    [("fp32", 1e-5, 0), ("fp32", 2e-4, 1), ("bf16", 1e-2, 0), ("bf16", 3e-2, 1), ("bf16", float("nan"), 1),
     ("fp8-rowwise", 0.05, 0), ("fp8-rowwise", 0.2, 1)],
)  # fmt: skip
def test_serving_fails_when_logits_are_far_off(
    precision: str, distance: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every precision."""
    serve = example("serve_prefill.py")
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    latencies = serve.percentiles([1.0])

    def run(options: Any, sizes: Any, here: Any) -> dict[str, Any]:
        checked = {"against": "plain Inductor", "distance": distance, "limit": serve.LIMITS[options.precision],
                   "bytes": 48, "differ": 0}  # fmt: skip
        return {"options": vars(options), "ranks": 2, "device": "cpu", "prefill_ms": latencies, "decode_ms": latencies,
                "prefill_tokens_per_s": 1.0, "fused": 0, "missed": 0, "warm_up_seconds": 1.0, "cuda_graph_skips": None,
                "check": checked}  # fmt: skip

    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(serve, "joined", lambda here: contextlib.nullcontext())
    monkeypatch.setattr(serve, "require_precision", lambda precision: None)
    assert serve.main(["--check", "--precision", precision]) == code
    assert ("WRONG" in capsys.readouterr().out) == bool(code)


def test_the_farthest_step_counts() -> None:
    serve = example("serve_prefill.py")
    logits = torch.ones(2, 3, 4)
    other = logits.clone()
    assert serve.farthest(other, logits) == 0
    other[1, 2] *= 2
    assert serve.farthest(other, logits) == pytest.approx(0.5**0.5)
    other[0, 0, 0] = float("nan")
    assert str(serve.farthest(other, logits)) == "nan"
    assert max([1.0, float("nan"), 2.0], key=serve.worse) != 2.0


def test_padding_is_not_counted() -> None:
    serve = example("serve_prefill.py")
    prompts = serve.Prompts(torch.zeros(2, 7, dtype=torch.long), torch.tensor([3, 7]))

    def model(tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Logits of the byte that comes after as many."""
        return torch.nn.functional.one_hot(positions.gather(1, last[:, None])[:, 0] + 1, 256).float()

    times = serve.serve(model, model, [prompts, prompts], 3, torch.device("cpu"), keep=True)
    assert times.tokens == 20
    assert [len(each) for each in (times.prefill, times.decode)] == [2, 4]
    assert [answer.tolist() for answer in times.answers] == [[[3, 4, 5], [7, 8, 9]]] * 2
    assert torch.equal(times.logits[0].argmax(-1), times.answers[0])


def test_percentiles() -> None:
    serve = example("serve_prefill.py")
    assert serve.percentiles(list(range(101))) == {"p50": 50, "p90": 90, "p99": 99, "mean": 50, "count": 101}
    assert serve.percentiles([7.0]) == {"p50": 7, "p90": 7, "p99": 7, "mean": 7, "count": 1}


# --- bad input -------------------------------------------------------------------------------------------------------
def refused(name: str, arguments: list[str], world: int = 2, gpu: bool = False) -> str:
    """The message about options that are not valid."""
    module = example(name)
    with pytest.raises(RecipeError) as raised:
        module.settle(module.parse(arguments), world, gpu)
    return str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0 is not valid; it must be at least 1"),
        (["--log-every", "0"], "--log-every 0 is not valid; it must be at least 1"),
        (["--learning-rate", "-1"], "--learning-rate -1.0 is not valid; it must be greater than 0"),
        (["--dp", "3"], "--dp 3 is not valid; it must be a divisor of the 2 processes"),
        (["--tp", "4"], "--tp 4 is not valid; it must be 2 with --dp 1"),
        (["--sequence", "33"], "sequence=33 is not valid for 2 tensor-parallel ranks; it must be a multiple of 2"),
        (["--option", "strict"], "--option 'strict' is not valid; it must be NAME=VALUE"),
        (["--option", "strict=no"], "--option: asynctp: strict='no' is not valid; it must be one of ('off', 'zero', "),
        (["--option", "x={[]: 1}", "--steps", "0"], "--steps 0 is not valid"),
        (["--resume"], "--resume and --checkpoint-every need --checkpoint-dir FOLDER; add it"),
        (["--profile", "x", "--profile-step", "1"], "--profile-step 1 is not valid; it must be at least 2"),
        (["--profile", "x"], "--profile measures what GPUs do, and there are none here; leave it out"),
        (["--loss-log", "/dev/null/x.jsonl"], "--loss-log /dev/null/x.jsonl is not valid; it must be a file that can"),
        (["--checkpoint-dir", "/dev/null"], "--checkpoint-dir /dev/null is not valid; it must be a folder that can be"),
        (["--tensorboard", "/dev/null/x"], "--tensorboard /dev/null/x is not valid; it must be a folder that can be"),
    ],
)
def test_training_refuses(arguments: list[str], message: str) -> None:
    assert message in refused("train_llama.py", arguments)


def test_too_many_ranks_for_the_heads() -> None:
    message = refused("train_llama.py", ["--size", "70b"], world=16, gpu=True)
    assert message.startswith("kv_heads=8 is not valid for 16 tensor-parallel ranks; it must be a multiple of 16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "3"], "--batch 3 is not valid; it must be a multiple of the 2 ranks"),
        (["--max-prompt", "4"], "--max-prompt 4 is not valid; it must be at least --min-prompt 16"),
        (["--min-prompt", "1"], "--min-prompt 1 is not valid; it must be at least 2"),
        (["--decode", "0"], "--decode 0 is not valid; it must be at least 1"),
        (["--cuda-graphs", "decode"], "--cuda-graphs decode needs GPUs, and there are none here"),
        (["--json", "/dev/null/x/y.json"], "--json /dev/null/x/y.json is not valid; it must be a file that can be"),
    ],
)
def test_serving_refuses(arguments: list[str], message: str) -> None:
    assert message in refused("serve_prefill.py", arguments)


def test_float8_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    message = refused("train_llama.py", ["--precision", "fp8-rowwise"])
    assert "need torchao, which does not import" in message
    assert "pip install torchao" in message


def test_tensorboard_is_named_when_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RecipeError, match=r"--tensorboard needs the tensorboard package.*pip install tensorboard"):
        example("train_llama.py").tensorboard_writer(tmp_path)


@pytest.mark.parametrize(("backend", "shared"), [("inductor", 0), ("intree", 30), ("asynctp", 4)])
def test_peak_memory_counts_what_ranks_share(backend: str, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the benchmark and the training count it, on a GPU; since the last call."""
    group: Any = mock.Mock(group_name="tp")
    peaks = [100, 7]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.pop(0))
    monkeypatch.setattr(recipe.intree, "shared_bytes", {"tp": 30}.get)
    monkeypatch.setitem(sys.modules, "asynctp_kernels.cuda", mock.Mock(shared_bytes={group: 4}.get))
    gpu = torch.device("cuda", 0)
    assert [recipe.peak_memory(gpu, backend, group) for _ in range(2)] == [100 + shared, 7 + shared]
    assert recipe.peak_memory(torch.device("cpu"), backend, group) > 1e8


def test_what_ranks_share_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one group, by whichever backend."""
    from torch.distributed import _symmetric_memory

    group: Any = mock.Mock(group_name="tp")
    kernels = mock.Mock()
    workspaces = {"tp": torch.zeros(30, dtype=torch.uint8), "dp": torch.zeros(7, dtype=torch.uint8)}
    monkeypatch.setattr(_symmetric_memory, "_group_name_to_workspace_tensor", workspaces)
    monkeypatch.setitem(sys.modules, "asynctp_kernels.cuda", kernels)
    assert recipe.intree.shared_bytes("tp") == 30
    recipe.release_shared(group)
    assert [recipe.intree.shared_bytes(name) for name in ("tp", "dp")] == [0, 7]
    kernels.release.assert_called_once_with(group)
    monkeypatch.delitem(sys.modules, "asynctp_kernels.cuda")
    recipe.release_shared(group)  # nothing is shared, or imported


def test_tensorboard_gets_the_numbers_of_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train = example("train_llama.py")
    log = train.Log(train.parse(["--tensorboard", str(tmp_path / "board")]), first=True)
    log.write("start", options={})
    log.write("step", step=3, loss=2.5, seconds=0.25)
    log.write("checkpoint", step=3, path="x")
    log.write("profile", step=4, trace="y", span_ms=7)
    log.close()
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    found = {tag: [(each.step, each.value) for each in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert found == {"loss": [(3, 2.5)], "seconds": [(3, 0.25)], "span_ms": [(4, 7.0)]}


@pytest.mark.parametrize("name", ["train_llama.py", "serve_prefill.py"])
def test_start_without_torchrun(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert example(name).main([]) == 2
    assert f"torchrun --standalone --nproc-per-node 2 examples/{name}" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 2])
def test_more_ranks_than_gpus(rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank knows. The first says so; the others leave it time to, since torchrun stops all when one has ended."""
    for name, value in (("WORLD_SIZE", 3), ("LOCAL_WORLD_SIZE", 3), ("RANK", rank), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with mock.patch.object(recipe.time, "sleep") as slept:
        assert example("train_llama.py").main([]) == 2
    assert slept.called == (rank != 0)
    said = "train_llama: --nproc-per-node 3 is not valid; it must be at most the 2 GPUs here\n"
    assert capsys.readouterr().err == said


def test_large_sizes_need_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert example("train_llama.py").main(["--size", "70b"]) == 2
    assert "--size 70b needs GPUs, and there are none here; take --size debug" in capsys.readouterr().err


def test_weights_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    serve = example("serve_prefill.py")
    with pytest.raises(RecipeError, match=r"--checkpoint .* is not valid; it must be a folder step-N that train_llama"):
        serve.launch(serve.parse(["--checkpoint", str(tmp_path)]))


def test_text_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("later")
    (tmp_path / "a.py").write_text("first ")
    (tmp_path / "c.bin").write_bytes(b"\0")
    train = example("train_llama.py")
    assert bytes(train.read_text(tmp_path, 5).tolist()) == b"first later"
    with pytest.raises(RecipeError, match=r"has 11 bytes of text .* a sequence needs at least 129; give more text"):
        train.read_text(tmp_path, 129)


def test_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--data .*none is not there; give a text file or a folder"):
        example("train_llama.py").read_text(tmp_path / "none", 129)


def test_ranks_draw_parts_of_one_batch() -> None:
    """Two data-parallel ranks together get what one gets, and a state that was kept gives the same again."""
    train = example("train_llama.py")
    text, cpu = torch.arange(200, dtype=torch.uint8), torch.device("cpu")
    alone = train.Batches(text, 6, 4, 1, 0, seed=3)
    parts = [train.Batches(text, 6, 2, 2, rank, seed=3) for rank in range(2)]
    state = alone.generator.get_state()
    tokens, targets = alone.draw(cpu)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, torch.cat([each.draw(cpu)[0] for each in parts]))
    assert not torch.equal(tokens, alone.draw(cpu)[0])
    alone.generator.set_state(state)
    assert torch.equal(tokens, alone.draw(cpu)[0])
