"""Inductor's options: their names, types and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_origin

from asynctp_passes.config import Config
from asynctp_passes.torch_private import process_groups


def of_mode(mode: str | None) -> dict[str, Any]:
    """The Inductor options that a torch.compile mode stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode and mode != "default" else {}


def names() -> set[str]:
    """The names of all Inductor options."""
    from torch._inductor import config

    return set(config.get_config_copy())


def type_of(name: str) -> type | None:
    """The type that torch.compile asks a value of this Inductor option to have; None where it asks for none."""
    from torch._inductor import config

    wanted = config.get_type(name)  # type: ignore[attr-defined]
    return wanted if get_origin(wanted) is None and isinstance(wanted, type) else None


def is_on(name: str) -> bool:
    """True for a switch of Inductor's that is on; False for one that this torch does not have."""
    from torch._inductor import config

    return bool(getattr(config, name, False))


def obeyed(config: Config, patches: Mapping[str, Any] | None = None) -> Config:
    """The configuration, which is left to Inductor batch-invariant where that is to be, and else not.

    patches: Inductor options of the compile, which are not in force yet.
    """
    if config.invariant != "auto":
        return config
    invariant = (patches or {}).get("batch_invariant", is_on("batch_invariant"))
    return dataclasses.replace(config, invariant="batch" if invariant else "off")


def misreads_lists_of_one() -> bool:
    """Whether `cpp_wrapper` calls ops of asynctp's, and takes a list of one result for the result: the process crashes.

    It is so on torch 2.11. Later ones call no op that takes `Any`.
    """
    return is_on("cpp_wrapper") and process_groups.schema_type() == "str"


def current(name: str) -> Any:
    """The current value of an Inductor option."""
    from torch._inductor import config

    return getattr(config, name)
