"""asynctp in every compile of a process, for programs that let nobody choose a backend.

asynctp_passes.enable(Config(strict="all"))      all that Inductor compiles from now on
with asynctp_passes.enable(): ...                in this block
asynctp_passes.disable()                         not any more

The program's `torch.compile` keeps its backend, `"inductor"` by name or by default. A backend that is not Inductor is
left alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from asynctp_passes.backend import AsyncTPPass, compile_graph, own_passes, runs_passes, with_passes
from asynctp_passes.config import Config, ConfigError
from asynctp_passes.reporting.strictness import judge_uncompiled
from asynctp_passes.torch_private import dynamo, inductor_compile, uncompiled

log = logging.getLogger(__name__)

_NAMED = 4
"""How many functions a warning names."""

_lock = threading.Lock()
_current: Config | None = None
_ends = contextlib.ExitStack()


def enable(config: Config | None = None) -> contextlib.ExitStack:
    """Have asynctp work on all that Inductor compiles in this process from now on, in any thread.

    Functions that are compiled already stay as they are, and a warning names them. A second call with the same
    configuration changes nothing. A backend that imported `compile_fx` before is reached too, but each of its graphs by
    itself: chains that lie in two are not seen.

    Args:
        config: The configuration; the environment's and the defaults when None.

    Returns:
        A context manager, which ends it; it may be ignored.

    Raises:
        ConfigError: The environment has a bad value; it is enabled with another configuration; or Inductor's options
            have a pass of asynctp's already.
    """
    global _current
    config = Config.given(config)
    with _lock:
        if _current is not None:
            if _current == config:
                return contextlib.ExitStack()
            raise ConfigError(
                f"asynctp: enable() is not valid with {config}: the process has {_current}; call "
                "asynctp_passes.disable() before"
            )
        if present := own_passes():
            raise ConfigError(
                f"asynctp: enable() is not valid where torch._inductor.config has {type(present[0]).__name__} already; "
                "take that out, or leave enable() out"
            )
        end = inductor_compile.route_inductor(
            lambda gm, inputs, patches, further: compile_graph(gm, inputs, config, patches, further),
            lambda patches: with_passes(patches, AsyncTPPass(config)),
            _leave_alone,
            lambda: bool(own_passes()),
        )
        judge = uncompiled.listen(lambda found: judge_uncompiled(found, config) if found.is_inductor else None)
        for ending in (end, judge):
            _ends.callback(ending)
        _current = config
    log.info("asynctp: enabled in all that Inductor compiles in this process")
    if compiled := dynamo.functions_with_graphs():
        more = f" and {len(compiled) - _NAMED} more" if len(compiled) > _NAMED else ""
        log.warning(
            "asynctp: enable() comes too late for what is compiled already, which stays as it is: %s%s. Remedy: call "
            "enable() before the first call of a compiled function, or torch.compiler.reset() after it",
            *(", ".join(compiled[:_NAMED]), more),
        )
    ended = contextlib.ExitStack()
    ended.callback(disable)
    return ended


def disable() -> None:
    """Leave alone what is compiled from now on; without `enable` before, do nothing."""
    global _current
    with _lock:
        _ends.close()
        _current = None


def _leave_alone(patches: dict[str, object]) -> bool:
    """Warn of a compile in which Inductor runs no passes."""
    if runs_passes(patches):
        return False
    log.warning(
        "asynctp: %s is left alone: mode='lite', or use_post_grad_passes=False, has Inductor run no passes",
        dynamo.compile_name(),
    )
    return True
