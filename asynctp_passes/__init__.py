"""asynctp: asynchronous tensor parallelism for torch.compile.

model = torch.compile(model, backend="asynctp")
...
print(asynctp_passes.reports()[-1])
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from asynctp_passes import ops
from asynctp_passes.config import Config, ConfigError, required
from asynctp_passes.ir.registry import (
    CollectiveOp,
    MatmulOp,
    RegistryError,
    register_collective,
    register_matmul,
    unregister,
)
from asynctp_passes.ops import reference
from asynctp_passes.pipeline import run
from asynctp_passes.reporting.errors import AsyncTPError, DisagreementError, ExpectError, GroupError, StrictError
from asynctp_passes.reporting.picture import Summary, require_at_exit
from asynctp_passes.reporting.report import Bucketed, Remark, Report

if TYPE_CHECKING:
    from asynctp_passes.backend import AsyncTPPass, RematerializePass, clear_reports, reports, require, summary

__version__ = "0.1.0"

__all__ = [
    "AsyncTPError",
    "AsyncTPPass",
    "Bucketed",
    "CollectiveOp",
    "Config",
    "ConfigError",
    "DisagreementError",
    "ExpectError",
    "GroupError",
    "MatmulOp",
    "RegistryError",
    "Remark",
    "RematerializePass",
    "Report",
    "StrictError",
    "Summary",
    "clear_reports",
    "ops",
    "reference",
    "register_collective",
    "register_matmul",
    "reports",
    "require",
    "run",
    "summary",
    "unregister",
]

sys.modules[f"{__name__}.reference"] = reference  # programs import it by this name

_OF_BACKEND = ("AsyncTPPass", "RematerializePass", "clear_reports", "reports", "require", "summary")


if asked := required():
    require_at_exit(asked.get("fused", 0), asked.get("missed", 0))

_RENAMED = {"RegatherPass": "RematerializePass", "Coalesced": "Bucketed"}
"""Names of earlier versions, which programs may still say."""


def __getattr__(name: str) -> Any:
    """Import the backend once it is needed: it takes torch._dynamo, torch._inductor and triton with it.

    An earlier name gives what has another one now, and warns.
    """
    if name in _RENAMED:
        now = _RENAMED[name]
        warnings.warn(f"asynctp_passes.{name} is now asynctp_passes.{now}", FutureWarning, stacklevel=2)
        return getattr(sys.modules[__name__], now)
    if name != "backend" and name not in _OF_BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend = importlib.import_module("asynctp_passes.backend")
    return backend if name == "backend" else getattr(backend, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_BACKEND, "backend"})
