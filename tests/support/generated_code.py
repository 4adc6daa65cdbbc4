"""Code that Inductor generates, as tests read it."""

from __future__ import annotations

import ast
import re
from typing import Any

_BOUND = re.compile(r"^(\w+) = asynctp_bind\(\d+, (.*)\)$", re.MULTILINE)


def as_ops(code: str) -> str:
    """The code with calls of the ops in place of what is bound to them: tensors first, then what is constant."""
    for name, text in _BOUND.findall(code):
        op, constants, *_ = ast.literal_eval(ast.literal_eval(text))
        told = ", ".join(f"{value!r}" for value in constants.values())
        code = re.sub(rf"\b{name}\((.*)\)", _call(op, told), code)
    return code


def _call(op: str, constants: str) -> Any:
    return lambda found: f"torch.ops.asynctp.{op}.default({found[1]}, {constants})"
