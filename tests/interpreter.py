"""Whether Triton's interpreter works with the NumPy that is installed."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

KERNELS = str(Path(__file__).parents[1] / "kernels")


@functools.cache
def interpreter_fault() -> str:
    """Why the interpreter does not work here, asked of a fresh process; empty when it does."""
    question = "from asynctp_kernels.interpreter import interpreter_fault; print(interpreter_fault() or '')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": KERNELS}
    answer = subprocess.run(
        [sys.executable, "-c", question], env=environment, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()
