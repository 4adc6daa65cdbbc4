"""The command: what it prints, and its exit codes."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import asynctp_passes
from asynctp_passes.reasons import CATALOGUE
from asynctp_passes.reporting.report import Remark, Report
from asynctp_passes.tools import cli
from asynctp_passes.tools.cli import main

REMARK = Remark("FUSED", "all_gather_matmul", "gather", nodes=("gather", "mm"), op="asynctp::all_gather_matmul")
REPORT = Report("model", "forward", (REMARK,))


def test_reasons_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons"]) == 0
    out = capsys.readouterr().out
    assert all(f"{reason.code} {reason.name}" in out for reason in CATALOGUE.values())


@pytest.mark.parametrize("spelling", ["ATP105", "atp105", "COMPUTED_BETWEEN"])
def test_reasons_explains_one(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", spelling]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ATP105 COMPUTED_BETWEEN (MISSED)\n")
    assert "remedy for a gather: apply row-wise operations to the shard" in out
    assert "def atp105_missed(" in out
    assert "def atp105_mended(" in out
    assert "@takes" not in out


def test_reasons_explains_one_that_no_program_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", "ATP302"]) == 0
    assert "# No program gives it on a CPU: it needs a device" in capsys.readouterr().out


def test_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", "ATP999"]) == 2
    assert "'ATP999' is no code" in capsys.readouterr().err


def test_report_prints_and_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "reports.jsonl"
    path.write_text(f"{REPORT.to_json()}\n\n{REPORT.to_json()}\n")
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == f"{REPORT}\n\n{REPORT}\n"
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [json.loads(REPORT.to_json())] * 2


@pytest.mark.parametrize("text", ["{", "[]", '{"graph": 1}', "null", "[" * 100_000], ids=lambda text: text[:5])
def test_report_of_a_bad_file(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text + "\n")
    assert main(["report", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}:1 is not a report (" in said
    assert "the file must be one written by report_file" in said


def test_report_of_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_version_and_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as version:
        main(["--version"])
    assert version.value.code == 0
    assert capsys.readouterr().out.startswith("asynctp-passes ")
    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2


@pytest.mark.parametrize(
    ("line", "usage", "message"),
    [
        ("demo --foo", "asynctp demo", "unrecognized arguments: --foo"),
        ("doctor --jsn", "asynctp doctor", "unrecognized arguments: --jsn; did you mean --json?"),
        ("tune --round=3 --sizes 8b", "asynctp tune", "unrecognized arguments: --sizes 8b"),
        ("--versoin", "asynctp", "unrecognized arguments: --versoin; did you mean --version?"),
        ("--versoin doctor", "asynctp", "unrecognized arguments: --versoin; did you mean --version?"),
        ("demmo", "asynctp", "did you mean demo?"),
        ("", "asynctp", "the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_is_named_by_the_command_that_was_meant(
    line: str, usage: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage} [-h]")
    assert message in said


def test_a_mistake_in_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", "COMPUTED_BEFORE"]) == 2
    assert "did you mean COMPUTED_BETWEEN?" in capsys.readouterr().err


def test_the_doctor_says_which_version_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    version = asynctp_passes.__version__
    assert re.search(rf"asynctp +{re.escape(version)}", capsys.readouterr().out)
    main(["doctor", "--json"])
    first, second, *_ = json.loads(capsys.readouterr().out)
    assert (first["name"], first["status"]) == ("asynctp", "ok")
    assert (second["name"], second["text"]) == ("torch", torch.__version__)
    assert version in first["text"]
    assert "kernels in " in first["text"]


def test_it_runs_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "asynctp_passes", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("asynctp-passes ")


@pytest.mark.parametrize(("option", "value"), [("--steps", "1"), ("--ranks", "3"), ("--ranks", "0")])
def test_demo_refuses_bad_settings(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", option, value]) == 2
    assert f"demo: {option} {value} is not valid" in capsys.readouterr().err


LAUNCHER = """#!/bin/sh
trap 'echo ended >> {log}; exit 1' TERM
trap '' INT  # of the terminal, which gives a launcher of its own to end its ranks
echo started >> {log}
while :; do sleep 0.1; done
"""


def test_an_interrupt_while_the_ranks_are_started_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Interrupted:
        def __init__(self, *_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

        def terminate(self) -> None:
            ended.append("terminated")

        def wait(self) -> int:
            ended.append("awaited")
            return 0

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background may be deaf to it
    try:
        with pytest.raises(KeyboardInterrupt):
            cli._start_ranks("asynctp_passes.tools.bench", 2, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["terminated", "awaited"]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_that_is_ended_ends_its_ranks(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    """It asks the launcher to, and waits for it: killed, torchrun would leave its ranks behind."""
    log, launcher = tmp_path / "log", tmp_path / "launcher"
    launcher.write_text(LAUNCHER.format(log=log))
    launcher.chmod(0o700)
    program = (
        f"import sys; from asynctp_passes.tools import cli; sys.executable = {str(launcher)!r}; "
        "sys.exit(cli.main(['bench', '--e2e', '--cpu']))"
    )
    # a test run in the background may be deaf to interrupts, which its children would be too
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = subprocess.Popen([sys.executable, "-c", program], preexec_fn=heard)
    try:
        while not log.exists():
            assert command.poll() is None
            time.sleep(0.1)
        command.send_signal(sent)
        assert command.wait(timeout=60) == code
    finally:
        command.kill()
    assert log.read_text().split() == ["started", "ended"]
