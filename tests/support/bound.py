"""Bound calls on one rank without a GPU: see `cuda_stubs` and `plan_runs`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from asynctp_kernels.cuda import bound_calls
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from cuda_stubs import Machine
from plan_runs import arguments_of


@contextlib.contextmanager
def named_group(here: Machine) -> Iterator[None]:
    """The group of a machine is that of its name; none is, once `here.group` is None."""

    def resolve(name: str) -> Any:
        if here.group is None or name != here.group.group_name:
            raise RuntimeError(f"Could not resolve the process group registered under the name {name}")
        return here.group

    with mock.patch.object(bound_calls, "group_resolver", return_value=resolve):
        yield


def bound(here: Machine, call: GatherFacts | ReduceFacts) -> bound_calls.BoundCall | None:
    """The call that its op has made before, bound."""
    return bound_calls.bind(arguments_of(call, here.group.group_name, call.world))


def operands(call: GatherFacts | ReduceFacts) -> tuple[Any, ...]:
    """The tensors that a bound call is given."""
    if isinstance(call, GatherFacts):
        return call.a_shard, call.bs, call.biases, call.a_scale, call.b_scales, call.along_shard
    return call.a_parts, call.b_parts, call.biases, call.a_scales, call.b_scales, call.added
