"""Run a Python script as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(path: Path, *arguments: str, cwd: Path) -> str:
    """Its standard output. No option of asynctp is set from outside; if it fails, so does the test, with its output."""
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if not key.startswith("ASYNCTP_")},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{path.name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout
