"""asynctp: asynchronous tensor parallelism for torch.compile.

model = torch.compile(model, backend="asynctp")
...
print(asynctp_passes.reports()[-1])
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from asynctp_passes.config import Config, ConfigError, required

if TYPE_CHECKING:
    from asynctp_passes import ops
    from asynctp_passes.backend import (
        AsyncTPPass,
        RematerializePartitioner,
        RematerializePass,
        clear_reports,
        reports,
        require,
        summary,
    )
    from asynctp_passes.errors import AsyncTPError, DisagreementError, ExpectError, GroupError, StrictError
    from asynctp_passes.ir.registry import (
        CollectiveOp,
        MatmulOp,
        RegistryError,
        register_collective,
        register_local,
        register_matmul,
        register_rowwise,
        unregister,
    )
    from asynctp_passes.ops import reference
    from asynctp_passes.pipeline import run
    from asynctp_passes.process import disable, enable
    from asynctp_passes.reporting.picture import Summary
    from asynctp_passes.reporting.report import Bucketed, Note, Remark, Report

__version__ = "0.2.0"

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
    "Note",
    "RegistryError",
    "Remark",
    "RematerializePartitioner",
    "RematerializePass",
    "Report",
    "StrictError",
    "Summary",
    "clear_reports",
    "disable",
    "enable",
    "ops",
    "reference",
    "register_collective",
    "register_local",
    "register_matmul",
    "register_rowwise",
    "reports",
    "require",
    "run",
    "summary",
    "unregister",
]

_HOMES = {
    "backend": (
        "AsyncTPPass",
        "RematerializePartitioner",
        "RematerializePass",
        "clear_reports",
        "reports",
        "require",
        "summary",
    ),
    "ir.registry": (
        "CollectiveOp",
        "MatmulOp",
        "RegistryError",
        "register_collective",
        "register_local",
        "register_matmul",
        "register_rowwise",
        "unregister",
    ),
    "pipeline": ("run",),
    "process": ("disable", "enable"),
    "errors": ("AsyncTPError", "DisagreementError", "ExpectError", "GroupError", "StrictError"),
    "reporting.picture": ("Summary",),
    "reporting.report": ("Bucketed", "Note", "Remark", "Report"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
"""The modules of names that are imported once they are needed: most take torch, the backend its compiler too."""

_WITH_COMPILER = ("backend", "process")


def __getattr__(name: str) -> Any:
    """Import a name once it is needed."""
    if name in ("backend", "ops", "reference"):
        return importlib.import_module(f"asynctp_passes.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"asynctp_passes.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "backend"})


if asked := required():
    importlib.import_module("asynctp_passes.reporting.at_exit").require_at_exit(
        asked.get("fused", 0), asked.get("missed", 0)
    )
if sys.modules.get("torch") is not None:
    # the program may load an exported one, which calls torch.ops.asynctp, or look a name up in this module's __dict__
    for _name in ("ops", "reference", *_HOME):
        if _HOME.get(_name) not in _WITH_COMPILER:
            globals()[_name] = __getattr__(_name)
