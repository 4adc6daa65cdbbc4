"""Tuning tables: the fastest implementations that `asynctp tune` measured, in a file that may be damaged.

    {"NVIDIA H200": {"gather:2:bfloat16:4096:2048": {"8192": "fused"}}}      {GPU: {problem: {rows: implementation}}}

All of a file is checked when it is read, so that nobody who looks something up there has to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ByRows = dict[str, str]
Problems = dict[str, ByRows]
Table = dict[str, Problems]

LARGEST_FILE = 16 << 20  # bytes; the shipped table has 70 KB
LONGEST_NAME = 256  # characters
MOST_ROWS = (1 << 31) - 1  # kernels count in 32 bits
_NUMBER = re.compile("[1-9][0-9]{0,9}")
_SIZES = "[0-9]{1,10}(?:[+][0-9]{1,10})*"
_KEY = re.compile(
    f"(?:gather|scatter|all_reduce):[1-9][0-9]{{0,4}}:(?P<dtype>[a-z0-9_]+):{_SIZES}:{_SIZES}"
    "(?::precise)?(?::wide)?(?::full)?(?::pieces)?(?::[1-9][0-9]{0,9}x)?"
)
KEY_FORM = "OP:RANKS:DTYPE:DEPTHS:WIDTHS, as gather:2:bfloat16:4096:2048+512, then :precise, :wide, :full, :pieces, :2x"


def read(path: Path, implementations: Sequence[str]) -> Table:
    """The table at `path`; empty where there is no such file.

    Args:
        path: Of a regular file of at most `LARGEST_FILE` bytes.
        implementations: Those that there are. Names of older versions are read as those of today, with a warning.

    Raises:
        ValueError: It is damaged, or cannot be read. The message names the file, the entry and what it may be.
    """
    try:
        text = _text(path)
        return {} if text is None else _checked(json.loads(text), implementations)
    except (OSError, ValueError, RecursionError) as error:
        fault = " ".join(str(error).split())[:600]
        raise ValueError(
            f"asynctp: {path} is no tuning table ({fault}); delete it, or name another in ASYNCTP_TUNING_TABLE: "
            f"'asynctp tune' writes it anew"
        ) from error


def merged(first: Table, second: Table) -> Table:
    """Both tables; where both have an entry, that of the second."""
    found = {gpu: {key: dict(by_rows) for key, by_rows in problems.items()} for gpu, problems in first.items()}
    for gpu, problems in second.items():
        for key, by_rows in problems.items():
            found.setdefault(gpu, {}).setdefault(key, {}).update(by_rows)
    return found


def digest(table: Table, gpu: str) -> str:
    """The same text for tables that say the same of a GPU; "none" if they say nothing."""
    problems = {key: by_rows for key, by_rows in table.get(gpu, {}).items() if by_rows}
    return hashlib.sha256(json.dumps(problems, sort_keys=True).encode()).hexdigest()[:16] if problems else "none"


def as_text(table: Table) -> str:
    """A table as a file has it."""
    return f"{json.dumps(table, indent=1, sort_keys=True)}\n"


def _text(path: Path) -> str | None:
    """The text of the file, or None without one. Opening a pipe does not wait for its writer."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"it has {max(status.st_size, len(data))} bytes, more than {LARGEST_FILE}")
    return data.decode("utf-8")


def _checked(loaded: Any, implementations: Sequence[str]) -> Table:
    """Check the names and numbers of all entries, and give what was loaded.

    Raises:
        ValueError: An entry is not valid. The message names it.
    """
    for gpu, problems in _entries(loaded, (), _is_name, f"the name of a GPU, of 1 to {LONGEST_NAME} characters"):
        for key, by_rows in _entries(problems, (gpu,), _is_key, KEY_FORM):
            limit = f"a number of rows, from 1 to {MOST_ROWS}"
            for rows, given in _entries(by_rows, (gpu, key), _is_count, limit):
                if given not in implementations:
                    known = f"one of {', '.join(implementations)}"
                    raise ValueError(f"{_place((gpu, key, rows))} is {_shown(given)}; it must be {known}")
    found: Table = loaded
    return found


def _entries(found: Any, place: Sequence[str], valid: Callable[[str], bool], limit: str) -> list[tuple[str, Any]]:
    """The entries of a JSON object, whose names are `valid`."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{_place(place)} is {_shown(found)}; it must be a JSON object")
    for name in found:
        if not valid(name):
            raise ValueError(f"{_place(place)} has an entry {_shown(name)}; it must be {limit}")
    return list(found.items())


def _is_name(text: str) -> bool:
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def _is_key(text: str) -> bool:
    found = _KEY.fullmatch(text) if len(text) <= LONGEST_NAME else None
    return found is not None and isinstance(getattr(torch, found["dtype"], None), torch.dtype)


def _is_count(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and int(text) <= MOST_ROWS


def _place(keys: Sequence[str]) -> str:
    return "".join(f"[{_shown(key)}]" for key in keys) or "the whole"


def _shown(value: Any) -> str:
    """A value in a message, cut to what can be read."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
