"""Configuration: one frozen, validated object, and the only place that reads the environment."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Strict = Literal["off", "zero", "all"]
Rematerialize = Literal["auto", "always", "never"]
Invariant = Literal["auto", "off", "batch"]
_LEVELS = {"strict": get_args(Strict), "rematerialize": get_args(Rematerialize), "invariant": get_args(Invariant)}
_NUMBERS = ("expect", "min_bytes", "min_flops")
_SWITCHES = ("deviate", "direct")
_SINKS = ("report_file", "graph_dir")
CPU_IMPLEMENTATIONS = ("reference", "interpreted")
_ENVIRONMENT_PREFIX = "ASYNCTP_"

STEPS = {
    "hoist": "ops between a gather and its matmul are computed of the shard, before the gather",
    "overlap": "collectives that no matmul can take in run beside matmuls",
    "bucket": "small all-reduces (max or min) that do not wait for one another become one",
    "store_scales": "Inductor stores fp8's scales, in graphs with fused chains, instead of computing them again for "
    "every element that they are multiplied with",
}
"""Steps that `Config.skip` can leave out, by name, with what each does; a graph is right without any of them."""

RUNTIME_VARIABLES = {
    "cpu_implementation": "implementation on CPU tensors: reference, plain collectives and matmuls (default), or "
    "interpreted, the Triton kernels under TRITON_INTERPRET=1: slow, for tests",
    "cuda_implementation": "implementation on CUDA tensors: auto, the fastest (default), fused, decomposed, direct, "
    "sequential or whole; one that cannot run a call raises",
    "agree_s": "seconds that a compile waits for the other ranks of a group to decide alike (default: 30)",
    "timeout_s": "seconds after which a wait for a peer gives up with an error (default: 60 on CPU, on CUDA the "
    "timeout of the process group)",
    "tuning_table": "the file that asynctp tune writes and the choice of an implementation reads (default: "
    "~/.cache/asynctp/tuning.json)",
    "require": "condition for an exit status of 0, as asynctp_passes.require takes it: fused=8, missed=0, or both with "
    "a comma between",
}
"""`ASYNCTP_*` variables that steer the ops at run time rather than a compile, with what they mean."""


class ConfigError(ValueError):
    """A configuration value is out of range; the message names the value, the limit and the remedy."""


@dataclass(frozen=True)
class Config:
    """Options: chains to fuse, how strict to be, and where reports go. Frozen, hashable and picklable.

    Attributes:
        groups: `"auto"` (every process group with an all-gather→matmul, matmul→reduce-scatter or
            matmul→all-reduce chain), or the enrolled groups: names, ProcessGroups or one-dimensional DeviceMeshes.
            They are kept as names, so a Config never holds a process group.
        strict: `"off"` never raises. `"zero"` (default) raises when a graph has chains in scope and not one
            was fused. `"all"` raises on any MISSED chain, and where torch fails to compile a function with tensors.
        expect: Minimum number of fused chains in each graph that has chains in scope; fewer raise. So does a function
            with tensors that torch fails to compile.
        min_bytes: Chains whose collective moves fewer bytes per rank are SKIPPED. Default 0: none.
        min_flops: Chains whose matmuls do fewer floating-point operations per rank are SKIPPED. Default 0.
        skip: Names of steps to leave out (`STEPS`), one or several, as to find which one a fault comes from.
        rematerialize: Whether the backward makes gathers of the forward again, so that less of what is gathered is
            kept. `"always"`: where that can be done. `"auto"`: where it is worth a call, and matmuls overlap it.
            `"never"`: nowhere.
        invariant: `"batch"`: on GPUs a row of a fused chain has the same bits however many rows there are, and wherever
            it is among them. A chain that cannot promise this is MISSED. `"off"`: the fastest kernel makes each
            matmul. `"auto"`: as Inductor's `batch_invariant` says, or vLLM's switch; the others win over both.
        deviate: Let ranks send something cheaper than the program's collectives do, where all of them can, as one sum
            in place of several. When compiling, ranks ask one another: what one does not do, none does. Without it,
            ranks may compile whatever they like, whenever they like.
        direct: Let the code that Inductor generates call the fused ops without torch's dispatcher, once it has called
            them: the host takes less time. Else, and where that cannot be (a note of the report says why), calls go by
            `torch.ops`.
        report_file: Append each report to this file as one line of JSON; None writes none.
        graph_dir: Write a page for every compiled graph into this folder, with the graph before and after, and
            `index.html`, which lists them; None writes none.

    Every field can also be set by an environment variable: `ASYNCTP_` and its name in capitals; an explicit
    argument of `Config.from_options` wins over the environment.

    Raises:
        ConfigError: A value has the wrong type or is out of range.
    """

    groups: Any = "auto"
    strict: Strict = "zero"
    expect: int = 0
    min_bytes: int = 0
    min_flops: int = 0
    skip: Any = ()
    rematerialize: Rematerialize = "auto"
    invariant: Invariant = "auto"
    deviate: bool = True
    direct: bool = True
    report_file: str | None = None
    graph_dir: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _group_names(self.groups))
        object.__setattr__(self, "skip", _step_names(self.skip))
        for name, levels in _LEVELS.items():
            _require(getattr(self, name) in levels, name, getattr(self, name), f"one of {levels}")
        for name in _NUMBERS:
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            _require(is_number, name, value, "an integer >= 0")
        for name in _SWITCHES:
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name in _SINKS:
            if (value := getattr(self, name)) is not None:
                _require(isinstance(value, str | os.PathLike) and bool(str(value)), name, value, "a path, or None")
                object.__setattr__(self, name, str(value))
                _require(can_be_written(str(value), folder=name == "graph_dir"), name, value, _WRITABLE[name])

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names of all fields, which are also the option names of the backend."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Config:
        """Build a Config from explicit options over `ASYNCTP_*` variables over the defaults.

        Args:
            options: Field values by name.
            environ: The environment to read; `os.environ` when None.

        Raises:
            ConfigError: An unknown option, an unknown `ASYNCTP_*` variable, or a bad value.
        """
        values = _from_environment(os.environ if environ is None else environ)
        for name, value in (options or {}).items():
            known = cls.field_names()
            _require(name in known, "option", name, f"one of {known}{did_you_mean(name, known)}")
            values[name] = value
        return cls(**values)

    @classmethod
    def given(cls, config: Config | None) -> Config:
        """`config` as it was given, or that of the environment and the defaults for None.

        Raises:
            ConfigError: It is something else, or the environment is bad.
        """
        hint = "a Config or None; Config.from_options makes one of a dictionary"
        _require(config is None or isinstance(config, cls), "config", config, hint)
        return cls.from_options() if config is None else config

    def enrolls(self, group: str) -> bool:
        """Whether a process group is one whose chains are to be fused; under `"auto"` every one may be."""
        return self.groups == "auto" or group in self.groups

    def decisive(self) -> dict[str, Any]:
        """The values that influence generated code, by field: all but the report sinks."""
        return {name: getattr(self, name) for name in self.field_names() if name not in _SINKS}

    def digest(self) -> str:
        """A hash of the values that influence generated code."""
        return hashlib.sha256(json.dumps(self.decisive(), sort_keys=True).encode()).hexdigest()[:16]


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    if not condition:
        raise ConfigError(f"asynctp: {name}={value!r} is not valid; it must be {limit}")


_WRITABLE = {
    "report_file": "a file that can be written, in a folder that is there or can be made",
    "graph_dir": "a folder that can be written, or that can be made",
}


def can_be_written(path: str, folder: bool) -> bool:
    """Whether there can be a file, or a folder, of this path: what is there of it already allows that."""
    if "\0" in path:
        return False
    place = Path(path).absolute()
    try:
        if not folder:
            if place.exists() and (place.is_dir() or not os.access(place, os.W_OK)):
                return False
            place = place.parent
        there = next(each for each in (place, *place.parents) if each.exists())
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError:  # a name that is too long, or a folder that may not be looked into
        return False


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read `ASYNCTP_<FIELD>` variables; unknown names are errors, so that a typo is not silently ignored."""
    values: dict[str, Any] = {}
    for key, text in environ.items():
        if not key.startswith(_ENVIRONMENT_PREFIX):
            continue
        name = key[len(_ENVIRONMENT_PREFIX) :].lower()
        if name in RUNTIME_VARIABLES:
            if name == "agree_s":
                agree_seconds(environ)
            continue
        known = (*Config.field_names(), *RUNTIME_VARIABLES)
        variables = [f"{_ENVIRONMENT_PREFIX}{one.upper()}" for one in known]
        limit = f"one of {', '.join(variables)}{did_you_mean(key, variables)}"
        _require(name in known, "environment variable", key, limit)
        values[name] = _parse(key, name, text)
        try:
            Config(**{name: values[name]})
        except ConfigError as error:
            raise ConfigError(f"{error} (set by {key}={text!r})") from None
    return values


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The `ASYNCTP_*` variables that are set."""
    return {key: text for key, text in environ.items() if key.startswith(_ENVIRONMENT_PREFIX)}


def cpu_implementation(environ: Mapping[str, str] | None = None) -> str:
    """The implementation of the fused ops for CPU tensors, from `ASYNCTP_CPU_IMPLEMENTATION`.

    Raises:
        ConfigError: The variable has another value than "reference" or "interpreted".
    """
    key = f"{_ENVIRONMENT_PREFIX}CPU_IMPLEMENTATION"
    value = (os.environ if environ is None else environ).get(key, "reference")
    _require(value in CPU_IMPLEMENTATIONS, key, value, f"one of {CPU_IMPLEMENTATIONS}")
    return value


def required(environ: Mapping[str, str] | None = None) -> dict[str, int]:
    """The numbers that `ASYNCTP_REQUIRE` asks for, by name (`"fused"`, `"missed"`); empty where it is not set.

    Raises:
        ConfigError: The variable is no list of these names with integers >= 0.
    """
    key = f"{_ENVIRONMENT_PREFIX}REQUIRE"
    text = (os.environ if environ is None else environ).get(key, "")
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        well = name in ("fused", "missed") and name not in found and number.isdecimal()
        _require(well, key, text, "fused=N, missed=N or both with a comma between, N an integer >= 0")
        found[name] = int(number)
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'strict'?"` for a name that is nearly one of those known; else empty."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def agree_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Seconds that a compile waits for other ranks, from `ASYNCTP_AGREE_S`.

    Raises:
        ConfigError: The variable is no finite number of seconds.
    """
    key = f"{_ENVIRONMENT_PREFIX}AGREE_S"
    text = (os.environ if environ is None else environ).get(key, "30")
    seconds = math.nan
    with contextlib.suppress(ValueError):
        seconds = float(text)
    _require(0 <= seconds < math.inf, key, text, "a number of seconds, 0 or more")
    return seconds


def _parse(key: str, name: str, text: str) -> Any:
    text = text.strip()
    if name in _NUMBERS:
        with contextlib.suppress(ValueError):
            return int(text)
    if name in _SWITCHES:
        words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
        _require(text.lower() in words, key, text, f"one of {tuple(words)}")
        return words[text.lower()]
    if name == "skip" or (name == "groups" and text != "auto"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name in _SINKS:
        return text or None
    return text


def _step_names(steps: Any) -> tuple[str, ...]:
    """Normalize `skip` to a sorted tuple of names of steps."""
    names = steps if isinstance(steps, tuple | list | set | frozenset) else (steps,)
    for name in names:
        near = did_you_mean(name, STEPS) if isinstance(name, str) else ""
        _require(isinstance(name, str) and name in STEPS, "skip", name, f"names of steps, of {tuple(STEPS)}{near}")
    return tuple(sorted(set(names)))


def _group_names(groups: Any) -> str | tuple[str, ...]:
    """Normalize `groups` to "auto" or a sorted tuple of group names."""
    if groups == "auto":
        return "auto"
    members = groups if isinstance(groups, tuple | list | set | frozenset) else (groups,)
    names = tuple(sorted({_group_name(member) for member in members}))
    _require(bool(names), "groups", groups, '"auto" or at least one group')
    return names


def _group_name(group: Any) -> str:
    if isinstance(group, str):
        _require(bool(group), "groups", group, "a non-empty group name")
        return group
    if hasattr(group, "group_name"):
        return str(group.group_name)
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        _require(group.ndim == 1, "groups", group, 'a mesh of one dimension (slice it first: mesh["tp"])')
        return str(group.get_group().group_name)
    raise ConfigError(f"asynctp: groups has {group!r}; it must hold group names, ProcessGroups or DeviceMeshes")
