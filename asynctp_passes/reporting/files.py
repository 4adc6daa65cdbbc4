"""Write for a user who may name any file: no pipe, device or full disk holds the program up, or ends it."""

from __future__ import annotations

import errno
import os
import secrets
import select
import stat
import time
from pathlib import Path

WAIT_S = 2.0
"""Seconds that a pipe may take to be read from before a text for it is given up."""

_REMEDIES = {
    errno.ENXIO: "let something read the pipe or socket before, or name a regular file",
    errno.EAGAIN: "read the pipe faster, or name a regular file",
    errno.ETIMEDOUT: "read the pipe faster, or name a regular file",
    errno.EPIPE: "keep the reader of the pipe running, or name a regular file",
    errno.ENOSPC: "make room there, or name another place",
    errno.EDQUOT: "make room there, or name another place",
    errno.EACCES: "get the permission to write there, or name another place",
    errno.EPERM: "get the permission to write there, or name another place",
    errno.EROFS: "name a place that is not read-only",
}


def write(path: str | Path, text: str, *, append: bool = False) -> None:
    """Write a file, with its folder made where it is not there; permissions are those of the user's umask.

    Nothing waits without end: a pipe without a reader is an error, and so is one that is not read from for `WAIT_S`.

    Raises:
        OSError: It cannot be written.
    """
    place = Path(path).absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    mode = os.O_APPEND if append else os.O_TRUNC
    file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | mode, 0o666)
    try:
        data, until = memoryview(text.encode("utf-8", errors="replace")), time.monotonic() + WAIT_S
        while data:  # all at once where the system does: lines of several processes do not mix
            try:
                data = data[os.write(file, data) :]
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0 or not select.select([], [file], [], left)[1]:
                    raise TimeoutError(errno.ETIMEDOUT, f"nothing was read from it for {WAIT_S:g} s") from None
    finally:
        os.close(file)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, in whose place there is what was there before until all of it is on the disk.

    Its folder is made if need be. A link stays one, and a file keeps its permissions; a new one gets those of the
    user's umask.

    Raises:
        OSError: It cannot be written; then the old file is as it was.
    """
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    written = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    try:
        with written.open("xb") as file:
            if place.exists():
                written.chmod(stat.S_IMODE(place.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.replace(place)
    finally:
        written.unlink(missing_ok=True)


def remedy(error: OSError, folder: bool) -> str:
    """The remedy for a file or folder that cannot be written."""
    wanted = "a folder that can be written, or made" if folder else "a file that can be written"
    return _REMEDIES.get(error.errno or 0, f"name {wanted}")
