"""Long work says on standard error which step it does."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from asynctp_passes.tools import progress
from asynctp_passes.tools.progress import Steps

SETUP = Path(__file__).resolve().parents[2] / ".ci" / "setup"


def test_a_step_says_how_long_the_one_before_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([100.0, 100.0, 100.0, 112.0, 112.0, 115.0, 115.0, 175.0, 175.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    steps = Steps("work")
    steps.begin("warm up")
    assert list(steps.each("measure", ["a", "b"])) == ["a", "b"]
    steps.end()
    assert capsys.readouterr() == (
        "",
        "    0 s  work: warm up\n"
        "   12 s  work: measure, 1 of 2 (the step before took 12 s)\n"
        "   15 s  work: measure, 2 of 2 (the step before took 3 s)\n"
        "   75 s  work: done (the step before took 60 s)\n",
    )


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps("work", enabled=False)
    assert list(steps.each("measure", range(3))) == [0, 1, 2]
    steps.end()
    assert capsys.readouterr() == ("", "")


def test_setup_shows_the_download(tmp_path: Path) -> None:
    """Of a Python whose pip only says what it would do; on standard error, and once."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/usr/bin/env bash
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") echo "Downloading ${{@: -1}} (900 MB)" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    # a compiler and headers are there, as far as the script can see: nothing is installed
    program = SETUP.read_text().replace('missing="$(missing_packages)"', 'missing=""')
    (tmp_path / "repository" / ".ci").mkdir(parents=True)
    (tmp_path / "repository" / "pyproject.toml").touch()
    script = tmp_path / "repository" / ".ci" / "setup"
    script.write_text(program)
    environment = {**os.environ, "PYTHON": str(python), "VENV": str(tmp_path / "venv"), "TORCH": "torch==1"}
    runs = [
        subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True) for _ in range(2)
    ]
    assert [run.stdout for run in runs] == ["", ""]
    first, second, third, fourth, fifth, last = runs[0].stderr.splitlines()
    assert first == f"setup: 1 of 3: make {tmp_path / 'venv'}"
    assert second.startswith("setup: 2 of 3 (after ")
    assert second.endswith(" s): install torch==1, a large download that may take minutes")
    assert third == "Downloading torch==1 (900 MB)"
    assert fourth.startswith("setup: 3 of 3 (after ")
    assert fifth == "Downloading .[dev] (900 MB)"
    assert last.startswith("setup: done in ")
    assert runs[1].stderr == "", "all is there"
