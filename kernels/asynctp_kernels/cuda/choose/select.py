"""Which implementation runs a call: the fastest that can, by the cost model or by the measurements of `asynctp tune`.

The transport is settled before, by facts that all ranks share (`wire`): implementations of other transports cannot run.
Among the others the choice is this rank's own, a function of shapes, strides, dtypes, world size and GPU, never of
addresses.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asynctp_kernels.cuda.choose import tables
from asynctp_kernels.cuda.choose.cost import Problem as Problem
from asynctp_kernels.cuda.choose.cost import Rates as Rates
from asynctp_kernels.cuda.choose.cost import chunks_for, fused_tiles, whole
from asynctp_kernels.cuda.choose.implementation import Choice as Choice
from asynctp_kernels.cuda.choose.implementation import Implementation
from asynctp_kernels.cuda.choose.tiles import INTERPRETED_TILES, MAX_CHUNKS
from asynctp_kernels.cuda.choose.wire import TRANSPORTS
from asynctp_kernels.signals import IS_INTERPRETED

#: where no other can make a call's matmuls: the collective on the group's wire, PyTorch's matmuls
WHOLE = "whole"
#: of a call whose rows are to keep their bits
VARIANT_REMEDY = 'Leave its group out by Config(groups=...), or set invariant="off"'
VARIABLE = "ASYNCTP_CUDA_IMPLEMENTATION"
TABLE_VARIABLE = "ASYNCTP_TUNING_TABLE"
_SHIPPED = Path(__file__).with_name("measured.json")


def offered() -> tuple[str, ...]:
    """The names of the implementations that are measured, and that a table may have."""
    return tuple(name for name in TRANSPORTS if name != WHOLE)


# --- choosing --------------------------------------------------------------------------------------------------
asked: list[str] = []
"""The implementations that `forced` asks for, of which the last one counts."""


@contextlib.contextmanager
def forced(implementation: str) -> Iterator[None]:
    """Every call inside runs `implementation`, or raises if that cannot; for benchmarks and tests.

    Raises:
        ValueError: there is no such implementation.
    """
    asked.append(_checked(implementation, "forced"))
    try:
        yield
    finally:
        asked.pop()


def requested() -> str | None:
    """The implementation that `forced` or `ASYNCTP_CUDA_IMPLEMENTATION` asks for; None for the fastest."""
    return asked[-1] if asked else _from_environment()


@functools.cache
def _from_environment() -> str | None:
    name = os.environ.get(VARIABLE, "auto")
    return None if name == "auto" else _checked(name, VARIABLE)


def _checked(name: str, where: str) -> str:
    if name not in TRANSPORTS:
        raise ValueError(f"asynctp: {where}={name!r} is not valid; it must be one of {', '.join(TRANSPORTS)}")
    return name


def choose(
    problem: Problem,
    entries: Sequence[type[Implementation]],
    refused: dict[str, str],
    sms: int,
    device_name: str,
    table: tables.Table | None = None,
    beside: bool = False,
) -> Choice:
    """The implementation for `problem`, given why some of `entries` cannot run it.

    table: Measured choices, as a group has agreed on; this process's own when None. They are of ranks that have nothing
    else to do.
    beside: Kernels of other groups may run beside it.

    Raises:
        RuntimeError: the requested implementation cannot run it, or none can; the message says why.
    """
    rates = Rates()
    settings: dict[str, Any] = {"chunks": chunks_for(problem, rates), "tiles": fused_tiles(problem, sms, rates)}
    if IS_INTERPRETED:
        chunks = MAX_CHUNKS if problem.op == "gather" else MAX_CHUNKS // 2  # own rows are cut finer
        settings = {"chunks": chunks, "tiles": INTERPRETED_TILES}
    wanted = requested()
    if wanted is not None:
        if wanted in refused:
            raise RuntimeError(f"asynctp: implementation {wanted!r} was asked for and cannot run: {refused[wanted]}")
        return Choice(wanted, "forced", {}, refused, **settings)
    able = {
        each.name: each
        for each in entries
        if each.name not in refused and (each.estimate is not None or (problem.pieces and each.name == WHOLE))
    }
    if not able and (reason := refused.get(WHOLE)) is not None:
        raise RuntimeError(f"asynctp: nothing can run this call as a batch-invariant one: {reason}. {VARIANT_REMEDY}")
    if not able:
        return Choice(WHOLE, "only one that can", {}, refused, **settings)
    if IS_INTERPRETED:  # nothing is fast: what has most to show
        return Choice(next(iter(able)), "interpreted", {}, refused, **settings)
    models = {name: each.estimate or whole for name, each in able.items()}
    estimates = {name: round(estimate(problem, rates, sms), 1) for name, estimate in models.items()}
    measured = measured_choice(problem, device_name, table)
    if measured in able:
        ahead = able[measured].ahead
        if not beside or ahead is None or ahead.of not in able:
            return Choice(measured, "measured", estimates, refused, **settings)
        rivals = {name: estimates[name] for name in (measured, ahead.of)}
        return Choice(fastest(rivals, entries, beside), "cost model", estimates, refused, **settings)
    source = "cost model" if len(able) > 1 else "only one that can"
    return Choice(fastest(estimates, entries, beside), source, estimates, refused, **settings)


def fastest(times: Mapping[str, float], entries: Sequence[type[Implementation]], beside: bool = False) -> str:
    """The implementation with the least time; one that has to be ahead of another only where it is (`Ahead`)."""
    last: set[str] = set()
    for each in entries:
        if each.name in times and each.ahead is not None and each.ahead.of in times:
            part = each.ahead.beside if beside else each.ahead.alone
            last |= {each.name} if times[each.name] > times[each.ahead.of] * (1 - part) else set()
    return min((name for name in times if name not in last), key=lambda name: times[name])


# --- the measured table ------------------------------------------------------------------------------------------
def table_path() -> Path:
    """Where `asynctp tune` writes: `ASYNCTP_TUNING_TABLE`, or a file in the user's cache folder."""
    given = os.environ.get(TABLE_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "asynctp" / "tuning.json"


def read_tuned(path: Path) -> tables.Table:
    """The table that `asynctp tune` has written to `path`; empty where it has not.

    Raises:
        ValueError: The file is damaged, or cannot be read.
    """
    return tables.read(path, offered())


@functools.cache
def tuned() -> tables.Table:
    """The table of measurements made here, read once; {GPU name: {problem key: {rows: implementation}}}."""
    return read_tuned(table_path())


@functools.cache
def shipped() -> tables.Table:
    """The table that comes with the package, read once."""
    return read_tuned(_SHIPPED)


@functools.cache
def _table() -> tables.Table:
    """Both; measurements made here count before those that come with the package."""
    return tables.merged(shipped(), tuned())


def refresh() -> None:
    """Read the environment and the tuning table again at the next choice."""
    tuned.cache_clear()
    _table.cache_clear()
    _from_environment.cache_clear()


def measured_choice(problem: Problem, device_name: str, table: tables.Table | None = None) -> str | None:
    """The fastest for this shape at the nearest measured number of rows within a factor of 1.5; else None.

    None for matmuls of some rows each: how these lie is no part of the key.
    """
    if problem.pieces:
        return None
    by_rows = (_table() if table is None else table).get(device_name, {}).get(problem.key, {})
    if not by_rows:
        return None
    rows = max(problem.rows, 1)
    nearest = min(by_rows, key=lambda text: abs(int(text) / rows - 1) + abs(rows / int(text) - 1))
    ratio = int(nearest) / rows
    return by_rows[nearest] if 1 / 1.5 <= ratio <= 1.5 else None
