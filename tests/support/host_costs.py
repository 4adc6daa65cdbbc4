"""What one call costs the host, without a GPU: Python functions that it enters, and calls of the driver.

The driver, cuBLAS, NCCL and CUDA's part of torch are those of `cuda_stubs`: a call of one of its functions from the
product stands for one of theirs. Functions of C are not counted, nor comprehensions, which newer Pythons inline.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_PRODUCT = (str(ROOT / "asynctp_passes"), str(ROOT / "kernels" / "asynctp_kernels"))
_STUBS = str(Path(__file__).with_name("cuda_stubs.py"))
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Cost(NamedTuple):
    """functions: of Python, of any package. driver: calls of the driver, and of what enqueues by it."""

    functions: int
    driver: int


class Counted:
    """The functions that are entered, by where they are, from this package and torch; those of stubs apart."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.driver: Counter[str] = Counter()
        self._depth = 0  # inside a stub, whose own functions cost nothing on a GPU

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename == _STUBS:
            self._depth += {"call": 1, "return": -1}.get(event, 0)
            if event == "call" and self._depth == 1:
                self.driver[code.co_qualname] += 1
        elif event == "call" and self._depth == 0 and code.co_name not in _INLINED and self._is_ours(code.co_filename):
            self.functions[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

    @staticmethod
    def _is_ours(file: str) -> bool:
        return not file.startswith(str(ROOT)) or file.startswith(_PRODUCT)

    @property
    def cost(self) -> Cost:
        return Cost(self.functions.total(), self.driver.total())


def counted(do: Callable[[], Any]) -> Counted:
    """What `do()` enters."""
    counts, before = Counted(), sys.getprofile()
    sys.setprofile(counts)
    try:
        do()
    finally:
        sys.setprofile(before)
    return counts
