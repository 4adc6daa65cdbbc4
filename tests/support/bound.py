"""Bound calls on one rank without a GPU: see `cuda_stubs` and `plan_runs`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from asynctp_kernels import cuda
from asynctp_kernels.cuda import bound_calls
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from cuda_stubs import Machine, tensor
from plan_runs import arguments_of

from asynctp_passes.ops.calls import AllGatherCall, AllReduceCall, CollectiveCall, ReduceScatterCall


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


def collective(here: Machine, op: str, *shape: int, copy: bool = False) -> CollectiveCall:
    """The arguments of an op without a matmul."""
    name, given, world = here.group.group_name, tensor(*shape), here.group.size()
    if op == "all_gather":
        return AllGatherCall(given, world, name, copy=copy)
    return (
        AllReduceCall(given, "max", name) if op == "all_reduce" else ReduceScatterCall(given, "sum", world, name, copy)
    )


def moved_by_op(here: Machine, call: CollectiveCall) -> Any:
    """The call as its op makes it."""

    def check() -> None:
        pass

    if isinstance(call, AllGatherCall):
        return cuda.run_bulk_gather(call.shard, call.group_size, here.group, check, call.all_keep, call.copy)
    if isinstance(call, AllReduceCall):
        return cuda.run_bulk_all_reduce(call.input, call.reduce_op, here.group, check)
    return cuda.run_bulk_scatter(call.whole, call.reduce_op, call.group_size, here.group, check, call.copy)
