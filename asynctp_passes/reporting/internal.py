"""Errors of asynctp that nobody foresaw: they are logged once a kind, with all that a report needs, and end nothing.

An error that a user can mend is foreseen, and has a class and a message of its own (`FORESEEN`). All others are bugs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import platform
import threading
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch

from asynctp_passes.config import ConfigError
from asynctp_passes.errors import AsyncTPError
from asynctp_passes.ir.registry import RegistryError
from asynctp_passes.reasons import INTERNAL_ERROR
from asynctp_passes.torch_private import dynamo

log = logging.getLogger(__name__)

FORESEEN = (AsyncTPError, ConfigError, RegistryError, MemoryError, torch.OutOfMemoryError)
"""Errors that say what the user can do, and memory that is full; they are raised as they are."""

_OWN = Path(__file__).parent.parent
_lock = threading.Lock()
_told: set[str] = set()


def summary_of(error: BaseException) -> str:
    """The error, and where in asynctp it came up: `KeyError: clone_4 (match_context.py:117 in _gathers_above)`."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    return f"{text[:300]} ({_place(error)})"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_OWN)] or frames
    if not own:
        return "nowhere"
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"


@functools.cache
def versions() -> str:
    """The facts about this installation that a bug report needs."""
    found = {"asynctp": f"{_version('asynctp-passes')} (sources {sources_digest()})", "torch": str(torch.__version__)}
    found |= {"triton": _version("triton"), "python": platform.python_version(), "on": platform.platform()}
    return ", ".join(f"{name} {version}" for name, version in found.items())


@functools.cache
def sources_digest() -> str:
    """A hash of this package's sources and of the kernels', which decide what code a graph becomes."""
    digest = hashlib.sha256()
    beside = _OWN.parent
    folders = [_OWN, beside / "kernels" / "asynctp_kernels", beside / "asynctp_kernels"]
    sources = {f"{one.name}/{path.relative_to(one).as_posix()}": path for one in folders for path in one.rglob("*.py")}
    for name, path in sorted(sources.items()):  # the same in a checkout and in an installed package
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def tell(error: Exception, doing: str, outcome: str, graph: Callable[[], str] | None = None) -> str:
    """Log an internal error, once a kind, and give its summary.

    A kind is the class of the error and the place where it came up.

    Args:
        doing: What asynctp was about to do: `"fuse graph 0/0 (forward)"`.
        outcome: What becomes of the program.
        graph: Writes the graph down, for the trace that `TORCH_TRACE` asks for.
    """
    summary, kind = summary_of(error), f"{type(error).__name__} {_place(error)}"
    with _lock:
        known = kind in _told
        _told.add(kind)
    if known:
        log.info("asynctp: %s again, to %s: %s", INTERNAL_ERROR.code, doing, summary)
    else:
        log.error(
            "asynctp: internal error %s, failed to %s: %s. %s. Remedy: %s. Versions: %s\n%s",
            *(INTERNAL_ERROR.code, doing, summary, outcome, INTERNAL_ERROR.hint, versions()),
            "".join(traceback.format_exception(error)).rstrip(),
        )
    if graph is not None:
        with contextlib.suppress(Exception):
            details = "".join(traceback.format_exception(error))
            dynamo.trace("asynctp_internal_error", lambda: f"{versions()}\n\n{details}\n{graph()}", "string")
    return summary


@contextlib.contextmanager
def contained(doing: str) -> Iterator[None]:
    """Tell of an error in the body that nobody foresaw, and go on after it."""
    try:
        yield
    except FORESEEN:
        raise
    except Exception as error:
        tell(error, doing, "The program goes on")
