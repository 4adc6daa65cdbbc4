"""Whether Triton's interpreter works here."""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import functools

import numpy
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _count_kernel(out_address: tl.tensor, count: tl.tensor) -> None:
    out = out_address.to(tl.pointer_type(tl.int64))
    for step in range(count):
        tl.atomic_add(out, tl.load(out) * 0 + step, sem="acq_rel", scope="sys")


@functools.cache
def interpreter_fault() -> str | None:
    """Why Triton's interpreter cannot run kernels here; None when it can.

    Triton 3.6's interpreter turns arrays into Python numbers in a way that NumPy 2.4 no longer allows.
    """
    out = torch.zeros((), dtype=torch.int64)
    try:
        _count_kernel[(1,)](out.data_ptr(), 4)
    except InterpreterError as error:
        versions = f"triton {triton.__version__} with NumPy {numpy.__version__}"
        return f"the interpreter of {versions} fails ({error}); install a newer triton, or numpy<2.4"
    return None if out.item() == 6 else f"the interpreter of triton {triton.__version__} counts to {out.item()}, not 6"
