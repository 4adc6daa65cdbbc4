"""asynctp: asynchronous tensor parallelism for torch.compile.

model = torch.compile(model, backend="asynctp")
...
print(asynctp_passes.reports()[-1])
"""

from asynctp_passes import ops
from asynctp_passes.backend import AsyncTPPass, RegatherPass, clear_reports, reports
from asynctp_passes.config import Config, ConfigError
from asynctp_passes.errors import AsyncTPError, DisagreementError, ExpectError, GroupError, StrictError
from asynctp_passes.pipeline import run
from asynctp_passes.registry import (
    CollectiveOp,
    MatmulOp,
    RegistryError,
    register_collective,
    register_matmul,
    unregister,
)
from asynctp_passes.report import Coalesced, Remark, Report

__version__ = "0.1.0"

__all__ = [
    "AsyncTPError",
    "AsyncTPPass",
    "Coalesced",
    "CollectiveOp",
    "Config",
    "ConfigError",
    "DisagreementError",
    "ExpectError",
    "GroupError",
    "MatmulOp",
    "RegatherPass",
    "RegistryError",
    "Remark",
    "Report",
    "StrictError",
    "clear_reports",
    "ops",
    "register_collective",
    "register_matmul",
    "reports",
    "run",
    "unregister",
]
