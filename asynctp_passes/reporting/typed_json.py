"""Read plain JSON into dataclasses: each value is of the type that its field has, or the error names its place."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import Any, Literal

_MOST_NESTED = 6
_LARGEST = 2**63


def read(hint: Any, value: Any, place: str) -> Any:
    """A value of a type that the fields above have, from plain JSON.

    Raises:
        ValueError: It is of another one; the message names the place.
    """
    if dataclasses.is_dataclass(hint):
        return _read_fields(hint, value, place)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(read(inner[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: read(inner[1], item, f"{place}[{key!r}]") for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else read(next(each for each in inner if each is not type(None)), value, place)
    if _fits(hint, value):
        return value
    wanted = f"one of {', '.join(map(repr, inner))}" if origin is Literal else _LIMITS.get(hint, f"of type {hint}")
    raise ValueError(f"{place} is {_shown(value)}; it must be {wanted}")


_LIMITS = {int: "an integer below 2**63", float: "a number below 2**63", Any: f"nested {_MOST_NESTED} times at most"}


def _read_fields(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {_shown(value)}; it must be an object")
    hints, fields = _hints(kind), {one.name: one for one in dataclasses.fields(kind)}
    needed = {name for name, one in fields.items() if one.default is one.default_factory is dataclasses.MISSING}
    if unknown := sorted(set(value) - set(fields)):
        raise ValueError(f"{place} has {unknown[0]!r}, which is none of {', '.join(fields)}")
    if missing := sorted(needed - set(value)):
        raise ValueError(f"{place} has no {missing[0]!r}")
    own = {name: item for name, item in value.items() if name in fields}
    return kind(**{name: read(hints[name], item, f"{place}'s {name}") for name, item in own.items()})


_hints = functools.cache(typing.get_type_hints)


def _fits(hint: Any, value: Any) -> bool:
    if hint is Any:
        return _is_plain(value, _MOST_NESTED)
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if hint in (int, float):
        number = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
        return number and abs(value) < _LARGEST
    return typing.get_origin(hint) is None and isinstance(value, hint)


def _is_plain(value: Any, depth: int) -> bool:
    """True for values that are nested a few times only: what walks through others would end in a RecursionError."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_plain(item, depth - 1) for item in items)


def _shown(value: Any) -> str:
    """A value in short, whatever it is."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:80] if not isinstance(value, int) or abs(value) < _LARGEST else "too large a number"
