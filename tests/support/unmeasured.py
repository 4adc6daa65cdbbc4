"""Switches off what torch does beside each compile: it times guards, collects garbage and traces what it does.

It took a twentieth of all time.
"""

from __future__ import annotations

import logging

import torch._dynamo.guards


def leave_out_measurements() -> None:
    """Neither flush the processor's caches to time guards, nor look for garbage, after a compile of this process.

    Nor write down graphs for a trace: pytest adds handlers to all loggers that do not propagate, and torch's tracing
    takes any handler as a wish for a trace.
    """
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    if hasattr(torch._dynamo.config, "run_gc_after_compile"):
        torch._dynamo.config.run_gc_after_compile = False
