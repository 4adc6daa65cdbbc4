"""Functions that dynamo is said to compile."""

from __future__ import annotations

from typing import Any
from unittest import mock

from asynctp_passes.torch_private import dynamo

__all__ = ["named"]


def named(name: str) -> Any:
    """A graph is of this function, as Dynamo would have it."""
    function = dynamo.CompiledFunction(f"model.py:{name}:1", f"model.py:{name}:1")
    return mock.patch.object(dynamo, "compiled_function", return_value=function)
