"""Triton's interpreter: whether it works with the NumPy that is installed, and launches that cost less."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def interpret_quickly() -> None:
    """Let launches of this process look only once for what the interpreter replaces in Triton's modules.

    It looks through all members of these modules at each launch, and at each call of a function in a kernel: a fifth of
    the time that kernels take. Does nothing where kernels are not interpreted.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime import interpreter

        interpreter.inspect = _Inspect()  # type: ignore[attr-defined]


class _Inspect:
    """The module `inspect`, which remembers which members of an object are builtins of Triton."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, of: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(of, name)) for name in _builtins(of)]


@functools.cache
def _builtins(of: Any) -> list[str]:
    from triton.language import core

    return [name for name, member in inspect.getmembers(of) if core.is_builtin(member)]
