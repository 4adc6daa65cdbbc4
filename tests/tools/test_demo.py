"""The demo: its verdict, its failures, and one short run on real ranks."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import forking

from asynctp_passes.reporting.report import Remark, Report
from asynctp_passes.tools import demo
from asynctp_passes.tools.demo import launch
from asynctp_passes.tools.demo.launch import RankError, run_ranks
from asynctp_passes.tools.demo.model import ModelSizes
from asynctp_passes.tools.demo.show import chart, judge
from asynctp_passes.tools.demo.train import Settings

#: an option of newer torch
QUICK = {"fallback_by_default": True} if "fallback_by_default" in torch._inductor.list_options() else {}
README = Path(__file__).resolve().parents[2] / "README.md"
FUSED = Remark("FUSED", "all_gather_matmul", "gather")
MISSED = Remark("MISSED", "all_gather_matmul", "gather", code="ATP101", name="PIECES_REORDERED")
SKIPPED = Remark("SKIPPED", "all_reduce", "reduce", code="ATP002", name="NO_MATMUL")


def reports(forward: list[Remark], backward: list[Remark]) -> list[Report]:
    return [Report("model", "forward", tuple(forward)), Report("model", "backward", tuple(backward))]


def test_verdict_is_good_when_all_is_fused_and_losses_agree() -> None:
    curves = {"inductor": [3.0, 2.0, 1.0], "asynctp": [3.0, 2.0, 1.0005]}
    verdict = judge(curves, reports([FUSED, SKIPPED], [FUSED]), expected=1, tolerance=1e-3)
    assert verdict.good
    assert any("1 of 1 collectives" in line for line in verdict.lines)
    assert any("ATP002 NO_MATMUL" in line for line in verdict.lines)


@pytest.mark.parametrize(
    ("last", "forward", "backward"),
    [(1.1, [FUSED], [FUSED]), (1.0, [FUSED, MISSED], [FUSED]), (1.0, [FUSED], []), (float("nan"), [FUSED], [FUSED])],
    ids=["losses differ", "a miss", "not fused", "not a number"],
)
def test_verdict_is_bad(last: float, forward: list[Remark], backward: list[Remark]) -> None:
    curves = {"inductor": [3.0, 1.0], "asynctp": [3.0, last]}
    assert not judge(curves, reports(forward, backward), expected=1, tolerance=1e-3).good


def test_chart_shows_both_curves() -> None:
    same = chart({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0, 1.0]})
    other = chart({"a": [3.0, 3.0, 3.0], "b": [1.0, 1.0, 1.0]})
    assert "*" in same.splitlines()[0]
    assert "ooo" in other
    assert "xxx" in other


def kind(line: str) -> str:
    """A line without the numbers of its run."""
    return re.sub(r"\d[\d.e-]*", "0", " ".join(line.split()))


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(demo.DemoError, match=r"C\+\+ compiler.*no-such-compiler.*apt install g\+\+"):
        demo.run_demo(ranks=2)


@pytest.mark.parametrize("blocked", ["", "graphs", "reports.jsonl"])
def test_a_folder_that_cannot_be_written_is_named(blocked: str, tmp_path: Path) -> None:
    """Before training, and nothing is made."""
    out = tmp_path / "out"
    if blocked == "reports.jsonl":
        (out / blocked).mkdir(parents=True)
    elif blocked:
        out.mkdir()
        (out / blocked).touch()
    else:
        out.touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(demo.DemoError, match=r"--out .*out is not valid; it must be a folder that can be written"):
        demo.run_demo(ranks=2, out=out)
    assert sorted(tmp_path.rglob("*")) == before


def rank_that_fails(rank: int, world_size: int, how: str) -> None:
    """Rank 1 fails while rank 0 waits for it in a collective."""
    if rank == 1:
        if how == "raises":
            raise ValueError("the cause")
        os._exit(7)
    dist.barrier()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "rank 1 failed:(.|\n)*ValueError: the cause"), ("dies", "rank 1 died with exit code 7")],
)
def test_a_failing_rank_ends_all(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are forked here from a process that has torch, which takes seconds to import."""
    context = forking()
    monkeypatch.setattr(launch.mp, "get_context", lambda method: context)
    started = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(2, rank_that_fails, how, timeout_s=120)
    assert time.monotonic() - started < 100


def train_quickly(rank: int, world_size: int, errors: Path, *args: Any) -> Any:
    """`train_both`, with errors in a file. Inductor calls aten's kernels: to compile C++ takes most of the time."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    with torch._inductor.config.patch(QUICK):
        return demo.train_both(rank, world_size, *args)


@pytest.mark.ranks
def test_short_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With one block for two, on ranks that are forked from a process that has torch."""
    if torch.cuda.is_available():
        pytest.skip("the demo would take the GPUs")
    context, errors = forking(), tmp_path / "errors"
    monkeypatch.setattr(launch.mp, "get_context", lambda method: context)
    monkeypatch.setattr(demo, "run_ranks", lambda count, fn, *args: run_ranks(count, train_quickly, errors, *args))
    monkeypatch.setattr(demo, "Settings", partial(Settings, sizes=ModelSizes(layers=1)))
    mine = tmp_path / "graphs" / "mine.html"
    mine.parent.mkdir()
    mine.write_text("of another program")
    (tmp_path / "reports.jsonl").write_text("of an earlier run\n")
    assert demo.run_demo(steps=3, ranks=2, out=tmp_path)
    out, progress = capfd.readouterr()
    progress += errors.read_text()
    assert "demo: start 2 processes, and train in them" in progress
    assert "asynctp  compiling (inductor took " in progress
    assert "6/6" in progress.split("trained, the processes end")[0].splitlines()[-1]
    assert "demo: compare the losses, and write the reports (the step before took " in progress
    assert "forward   5 of 5 collectives next to a matmul are fused" in out
    assert "backward  5 of 5 collectives next to a matmul are fused" in out
    assert "agree" in out
    (shown,) = re.findall(r"^```text\n(  step .*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    printed = [kind(line) for line in out.splitlines()]
    assert [line for line in shown.splitlines() if kind(line) not in printed and line != "..."] == []
    assert mine.read_text() == "of another program"
    assert str(mine) not in out
    index, *pages = sorted(set(mine.parent.glob("*.html")) - {mine}, key=lambda page: (page.name != "index.html", page))
    assert [page.name for page in pages] == ["graph-0-0-backward.html", "graph-0-0-forward.html"]
    listed = index.read_text(encoding="utf-8")
    assert all(f'href="{page.name}"' in listed and str(page) in out for page in pages)
    assert str(index) in out
    assert mine.name not in listed
    first, *ours = (tmp_path / "reports.jsonl").read_text().splitlines()
    assert first == "of an earlier run"
    assert [Report.from_json(each).phase for each in ours] == ["forward", "backward"]
