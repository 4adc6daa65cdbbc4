"""Imported once, before ranks are forked: they have what Inductor makes in a process's first compile (see `ranks`).

Python's collector leaves alone what is there by then; to look through it took an eighth of the time of compiles.
"""

from __future__ import annotations

import tempfile
from unittest import mock

import torch
import torch._dynamo
from garbage import collect_rarely
from interpreter import rewrite_kernels
from torch._dynamo.utils import counters


def _first_compile() -> None:
    """Patterns that Inductor looks for, and hashes of its sources and of Triton's: seconds. Nothing else is left."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
        options = {"fallback_by_default": True} if "fallback_by_default" in torch._inductor.list_options() else {}
        torch.compile(lambda x: (x @ x).sin(), options=options)(torch.ones(2, 2, requires_grad=True))
    torch._dynamo.reset()
    counters.clear()


_first_compile()
rewrite_kernels()
collect_rarely()
