"""Judge a process at its end: what the variable ASYNCTP_REQUIRE asks of its picture."""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import multiprocessing.util
import os
import sys

from asynctp_passes.errors import ExpectError
from asynctp_passes.reporting.picture import Picture, picture
from asynctp_passes.torch_private import process_groups


def require_at_exit(fused: int, missed: int) -> None:
    """Have the process end with exit status 1, and say why, where `Summary.require` raises at its end.

    An exception in a function that runs at exit would leave the status as it is. Processes that compile nothing and
    never had a process group are left alone where another process started them, or where they started others: helpers
    of a rank, and the launcher of ranks. A process that is forked from a rank is a helper, too.
    """
    atexit.register(_end, fused, missed)
    multiprocessing.util.register_after_fork(picture, functools.partial(_require_of_child, (fused, missed)))


def _require_of_child(required: tuple[int, int], inherited: Picture) -> None:
    """The same for a process of `multiprocessing`: functions for its exit do not run where it was forked."""
    inherited.begin_in_child()
    waive()
    if not process_groups.had_process_group():
        multiprocessing.util.Finalize(None, _end, args=required, exitpriority=0)


def waive() -> None:
    """Let the process end as it may: it is a tool of asynctp's own."""
    atexit.unregister(_end)


def _end(fused: int, missed: int) -> None:
    found, error = picture.summary(), sys.exc_info()[1]
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        return  # the process fails for a reason of its own
    if not found.graphs and not process_groups.had_process_group():
        if multiprocessing.parent_process() is not None:
            return
        if multiprocessing.Process().name != "Process-1":  # they are numbered
            told = "this process compiled nothing and has no process group; those that it started answer for themselves"
            print(f"ASYNCTP_REQUIRE: {told}", file=sys.stderr)
            return
    try:
        found.require(fused, missed)
    except ExpectError as error:
        print(f"ASYNCTP_REQUIRE: {error}", file=sys.stderr)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
