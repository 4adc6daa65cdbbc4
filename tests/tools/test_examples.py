"""Every example runs as a user would run it, and shows what it says it shows."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: str, cwd: Path, anew: bool = False) -> str:
    """Standard output of an example."""
    return run_script(EXAMPLES / name, *arguments, cwd=cwd, anew=anew)


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What an example says when it ends with an error. It runs in this process: another one would only import more."""

    def run_it(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run_it


def test_every_example_has_a_test() -> None:
    texts = "".join((Path(__file__).with_name(name)).read_text() for name in ("test_examples.py", "test_llama.py"))
    tested = set(re.findall(r'run_(?:example|torchrun|forked_ranks)\((?:\s*EXAMPLES / )?"(\w+\.py)"', texts))
    assert tested == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_unknown_option_is_refused(name: str, refusal: Callable[..., str]) -> None:
    assert "usage: " in refusal(name, "--no-such-option")


def test_compile_mlp(tmp_path: Path) -> None:
    out = run_example("compile_mlp.py", cwd=tmp_path, anew=True)
    assert "(forward" in out
    assert "(backward" in out
    assert out.count("2 of 2 chains fused, 0 missed") == 2
    assert out.count("    runs sequential") == 4


def test_explain_a_miss(tmp_path: Path) -> None:
    out = run_example("explain_a_miss.py", cwd=tmp_path)
    before, after = out.split("The same with the norm on the shard")
    assert "1 of 2 chains fused, 1 missed" in before
    (shown,) = re.findall(r"^```text\n(! MISSED .*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown in before
    assert "ATP105 COMPUTED_BETWEEN" in before
    assert "-> mm; aten.mean.dim mean: rounds in an order that may depend on the number of rows]" in " ".join(
        before.split()
    )
    assert "What to do: apply row-wise operations to the shard" in before
    assert "2 of 2 chains fused, 0 missed" in after


def test_strict_in_ci(tmp_path: Path) -> None:
    out = run_example("strict_in_ci.py", cwd=tmp_path)
    assert out.count("passed: test_") == 3
    assert "ATP105: asynctp fused 1 of 2 chains" in out


@pytest.mark.ranks
def test_bare_graph(tmp_path: Path) -> None:
    out = run_example("bare_graph.py", cwd=tmp_path)
    assert "2 of 2 chains fused, 0 missed" in out
    graph = out.split("The graph after the pass:")[1]
    assert "asynctp.all_gather_matmul" in graph
    assert "asynctp.matmul_reduce_scatter" in graph
    assert "wait_tensor" not in graph
    assert "Both graphs compute the same." in out


def test_visualize(tmp_path: Path) -> None:
    out = run_example("visualize.py", "pages", cwd=tmp_path)
    index, *others = sorted((tmp_path / "pages").glob("*.html"), key=lambda page: page.name != "index.html")
    pages = [page for page in others if page.name in out]
    assert len(pages) == len(others) == 1
    assert f'href="{pages[0].name}"' in index.read_text(encoding="utf-8")
    text = pages[0].read_text(encoding="utf-8")
    assert "FUSED" in text
    assert "ATP105 COMPUTED_BETWEEN" in text


def test_plot_losses(tmp_path: Path) -> None:
    """A log of two parts, the second resumed, is one curve."""
    write_logs(tmp_path)
    logs = ("plain.jsonl", "other.jsonl", "--smooth", "1")
    out = run_example("plot_losses.py", *logs, "--out", "new/losses.svg", cwd=tmp_path)
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["plain", "3", "4.0000", "2.0000", "0.0000"],
        ["other", "3", "4.0000", "2.5000", "0.5000"],
    ]
    assert out.endswith("wrote new/losses.svg\n")
    picture = (tmp_path / "new" / "losses.svg").read_text()
    title = "Llama 3 by train_llama.py, size small, torch 2.11.0, NVIDIA H200, 2026-11-21, 2026-11-22"
    assert f"<!-- {title} -->" in picture


def test_logs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_logs(tmp_path / folder)
    out = run_example("plot_losses.py", "a/plain.jsonl", "b/plain.jsonl", "b/other.jsonl", cwd=tmp_path)
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["a/plain.jsonl", "b/plain.jsonl", "other"]


def test_a_line_that_is_no_log_is_named(refusal: Callable[..., str], tmp_path: Path) -> None:
    write_logs(tmp_path)
    with (tmp_path / "plain.jsonl").open("a") as file:
        file.write('{"event": "st')
    said = refusal("plot_losses.py", "plain.jsonl")
    assert re.search(r"plot_losses: plain.jsonl:4 is no log \(.*; give a file that train_llama", said)


def test_visualize_help(tmp_path: Path) -> None:
    assert "[folder]" in run_example("visualize.py", "--help", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["page.html", "page.html/new"])
def test_visualize_into_a_folder_that_cannot_be_written(
    folder: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "page.html").touch()
    said = refusal("visualize.py", folder)
    assert f"visualize: error: asynctp: graph_dir='{folder}' is not valid; it must" in said


@pytest.mark.parametrize("path", ["plain.jsonl/losses.svg", "losses.unknown"])
def test_a_picture_that_cannot_be_written(path: str, refusal: Callable[..., str], tmp_path: Path) -> None:
    write_logs(tmp_path)
    said = refusal("plot_losses.py", "plain.jsonl", "--out", path)
    assert re.search(f"plot_losses: --out {path} cannot be written .*; give a file as losses", said)


def write_logs(folder: Path) -> None:
    steps = [{"event": "step", "step": step, "loss": 5.0 - step} for step in (1, 2, 3)]
    about = {"event": "start", "options": {"size": "small"}, "device": "NVIDIA H200", "torch": "2.11.0"}
    first, second = ({**about, "date": f"2026-11-{day}"} for day in (21, 22))
    lines = [first, *steps, second, {"event": "step", "step": 3, "loss": 2.5}]
    (folder / "plain.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps))
    (folder / "other.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
