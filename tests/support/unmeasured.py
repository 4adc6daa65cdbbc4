"""Switches off what Dynamo does after each compile: it times guards and collects garbage, a twentieth of all time."""

from __future__ import annotations

import torch._dynamo.guards


def leave_out_measurements() -> None:
    """Neither flush the processor's caches to time guards, nor look for garbage, after a compile of this process."""
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    if hasattr(torch._dynamo.config, "run_gc_after_compile"):
        torch._dynamo.config.run_gc_after_compile = False
