"""The driver's functions as `site.c` gets them, made of Python's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from asynctp_kernels.cuda.runtime import edited


def need_c() -> None:
    """Skip a test of C code where there is no compiler."""
    if isinstance(edited.native(), str):
        pytest.skip(f"site.c cannot be built: {edited.native()}")


_ARGUMENTS = {
    "cuGraphExecKernelNodeSetParams_v2": 3,
    "cuGraphExecMemcpyNodeSetParams": 4,
    "cuTensorMapReplaceAddress": 2,
    "cuGraphLaunch": 2,
    "cuCtxGetCurrent": 1,
}


class DriverOfC:
    """A table of pointers to functions.

    Args:
        find: Gives the function of a name, which gives a code; None stands for 0.
    """

    def __init__(self, find: Callable[[str], Callable[..., Any]]) -> None:
        self._errors = list[BaseException]()
        self._made = [self._function(name, find) for name in edited._FUNCTIONS]
        self.table = (ctypes.c_void_p * len(self._made))(
            *(ctypes.cast(function, ctypes.c_void_p) for function in self._made)
        )

    def _function(self, name: str, find: Callable[[str], Callable[..., Any]]) -> Any:
        types = [ctypes.c_void_p] * _ARGUMENTS.get(name, 2) + [ctypes.c_uint] * (name == "cuStreamWaitEvent")

        def call(*args: Any) -> int:
            try:
                return find(name)(*(argument or 0 for argument in args)) or 0
            except BaseException as error:  # ctypes would print it, and go on
                self._errors.append(error)
                return 999

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)

    def check(self) -> None:
        """Raise what a function has raised."""
        for error in self._errors:
            raise error
