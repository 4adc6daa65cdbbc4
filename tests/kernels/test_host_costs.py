"""A bar for what a call costs the host: how many Python functions it enters, and how often it calls the driver.

Microseconds are for GPUs (`tests/gpu/host.py`). These numbers are the same everywhere, so a call that becomes dearer
is seen here. A call is made as generated code makes it (`asynctp_passes.ops.call_sites`), or by its op, here from where
torch's dispatcher has called it: at the addresses of the call before, or at addresses that it never had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels import cuda
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from asynctp_kernels.cuda.runtime import edited
from bound import bound, collective, moved_by_op, named_group, operands
from cuda_stubs import Machine, gather_call, machine, scatter_call
from host_costs import Cost, Counted, counted
from plan_runs import IMPLEMENTATIONS, OPS, RANK, ROWWISE, WORLD, arguments_of, at_the_same_place, op
from torch import Tensor

from asynctp_passes.ops import call_sites
from asynctp_passes.ops.call_sites import CallSite, WaitSite
from asynctp_passes.ops.calls import SIGNATURES

CALLS: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather_call((192,), 64, (72,)),
    "gather, three matmuls, A returned": lambda: gather_call((192,), 64, (72, 72, 72), kept=True),
    "gather, scales of rows": lambda: gather_call((192,), 64, (80,), **ROWWISE, travels=True),
    "scatter": lambda: scatter_call((768,), (64,), 72),
    "scatter, scales of rows": lambda: scatter_call((768,), (64,), 80, **ROWWISE),
    "all-reduce": lambda: replace(scatter_call((64,), (64,), 72), scatter_dim=None),
    "gather of few rows": lambda: gather_call((8,), 512, (512,)),
    "all-reduce of few rows": lambda: replace(scatter_call((32,), (512,), 512), scatter_dim=None),
}
LIMITS = {
    names: Cost(*cost)
    for names, cost in {
        ("gather", "fused"): (18, 6),
        ("gather", "decomposed"): (53, 23),
        ("gather", "direct"): (27, 7),
        ("gather, three matmuls, A returned", "fused"): (17, 6),
        ("gather, three matmuls, A returned", "decomposed"): (58, 31),
        ("gather, three matmuls, A returned", "direct"): (27, 9),
        ("gather, scales of rows", "fused"): (18, 6),
        ("gather, scales of rows", "decomposed"): (62, 26),
        ("gather, scales of rows", "direct"): (27, 7),
        ("scatter", "fused"): (17, 6),
        ("scatter", "decomposed"): (81, 31),
        ("scatter", "direct"): (22, 7),
        ("scatter, scales of rows", "fused"): (17, 6),
        ("scatter, scales of rows", "decomposed"): (82, 31),
        ("scatter, scales of rows", "direct"): (22, 7),
        ("all-reduce", "fused"): (19, 6),
        ("all-reduce", "decomposed"): (77, 37),
        ("all-reduce", "direct"): (21, 6),
        ("gather of few rows", "fused"): (18, 6),
        ("gather of few rows", "decomposed"): (53, 23),
        ("gather of few rows", "direct"): (18, 6),
        ("all-reduce of few rows", "fused"): (19, 6),
        ("all-reduce of few rows", "decomposed"): (77, 37),
        ("all-reduce of few rows", "direct"): (21, 6),
    }.items()
}
"""Limits of a call from generated code, at any addresses. Raise one only with a reason; lower it when you can.

A launch of a graph counts as one call of the driver here; each address that is not where it was is one more.
"""
BY_THE_OP = 5
"""So many functions more a call of the op may enter, below torch's dispatcher."""
IN_C = Cost(2, 5)
"""The limit of a call that C code makes: all that are launches of a graph."""


Call = GatherFacts | ReduceFacts


def site_of(here: Machine, call: Call) -> CallSite:
    """The place in generated code that makes the call, which it has made before."""
    op = OPS[call.kind]
    names = SIGNATURES[op].names
    tensors = ("a_shard", "bs", "biases", "a_scale", "b_scales", "along_shard")
    if isinstance(call, ReduceFacts):
        tensors = ("a_parts", "b_parts", "biases", "a_scales", "b_scales", "added")
    site = CallSite(op, dict.fromkeys(set(names) - set(tensors)), tensors)
    site._bound[()] = bound(here, call)
    assert site._bound[()] is not None
    return site


def elsewhere(value: Any) -> Any:
    """Tensors like these, in memory of their own."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return [elsewhere(each) for each in value] if isinstance(value, list | tuple) else value


def at_known_addresses(here: Machine, call: Call, make: Callable[[Call], Any]) -> Counted:
    """What a call costs whose memory is where it was."""
    (plan,) = here.memory.plans.values()
    at_the_same_place(plan, ())
    for _ in range(3):
        make(call)
    return counted(lambda: make(call))


def at_new_addresses(here: Machine, call: Call, make: Callable[[Call], Any]) -> Counted:
    """What a call costs on memory that it never had."""
    fields = ("a_shard", "bs", "b_scales", "a_parts", "b_parts", "a_scales", "a_scale")
    kept = [make(call)]
    for _ in range(3):
        other = replace(call, **{name: elsewhere(getattr(call, name)) for name in fields if hasattr(call, name)})
        found = counted(lambda other=other: kept.append((other, make(other))))
    return found


def cost(case: str, implementation: str, at: Callable[..., Counted], by_op: bool = False) -> Counted:
    """What a call costs from generated code, or by its op."""
    with machine(RANK, WORLD) as here, named_group(here), cuda.forced(implementation):
        here.kernels, here.edits = {}, True  # nothing is computed
        call = CALLS[case]()
        op(here, call)
        site = site_of(here, call)
        arguments = arguments_of(call, here.group, call.world)

        def make(call: Call) -> Any:
            return cuda.run(arguments, nothing, nothing) if by_op else site(*operands(call))

        with torch.no_grad():
            found = at(here, call, make)
        assert (site.direct > 0) == (not by_op)
        return found


def nothing(*args: Any) -> None:
    """In place of checks, and of the op's own program."""


@pytest.mark.parametrize(("case", "implementation"), LIMITS)
def test_a_call_from_generated_code_costs_no_more_than(
    case: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C where that is built, and else in Python."""
    for limit in (in_c(case, implementation), LIMITS[case, implementation]):
        for at in (at_known_addresses, at_new_addresses):
            found = cost(case, implementation, at)
            assert found.cost.functions <= limit.functions, found.functions
            assert found.cost.driver <= limit.driver, found.driver
        monkeypatch.setattr(edited, "native", lambda: "no compiler")


def in_c(case: str, implementation: str) -> Cost:
    """The limit where there is a compiler: cuBLAS's calls are PyTorch's, and are not made in C."""
    few = case in ("gather of few rows", "all-reduce of few rows", "all-reduce")
    if isinstance(edited.native(), str):
        return LIMITS[case, implementation]
    return IN_C if implementation == "fused" or (implementation == "direct" and few) else LIMITS[case, implementation]


@pytest.mark.parametrize(("case", "implementation"), LIMITS)
def test_a_call_of_the_op_costs_little_more(case: str, implementation: str) -> None:
    found = cost(case, implementation, at_known_addresses, by_op=True)
    assert found.cost.functions <= LIMITS[case, implementation].functions + BY_THE_OP, found.functions
    assert found.cost.driver <= LIMITS[case, implementation].driver, found.driver


def test_every_call_and_implementation_has_a_limit() -> None:
    assert set(LIMITS) == set(itertools.product(CALLS, IMPLEMENTATIONS))


def test_what_is_dearer_is_seen() -> None:
    """One function more, or one call of the driver."""
    with machine(RANK, WORLD) as here:

        def dearer() -> None:
            here.memory.fork(0)

        found = counted(dearer)
    assert found.cost.functions >= 2
    assert found.driver["Machine.record_event"] == found.driver["Machine.wait_event"] == 1


ALONE = {
    ("all_gather", "direct"): Cost(26, 6), ("all_gather", "fused"): Cost(28, 14),
    ("reduce_scatter", "direct"): Cost(20, 6), ("reduce_scatter", "fused"): Cost(25, 13),
    ("all_reduce", "direct"): Cost(19, 6),
}  # fmt: skip
"""The same limits of a collective that a bound call makes, and of its wait from generated code.

It is complete on the stream, or in flight.
"""
ALONE_IN_C = {"direct": Cost(3, 5), "fused": Cost(2, 13)}


@pytest.mark.parametrize(("kind", "implementation"), ALONE)
def test_a_collective_from_generated_code_costs_no_more_than(
    kind: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C where that is built, and else in Python."""
    if not isinstance(edited.native(), str):
        found, limit = collective_cost(kind, implementation), ALONE_IN_C[implementation]
        assert found.functions <= limit.functions
        assert found.driver <= limit.driver
    monkeypatch.setattr(edited, "native", lambda: "no compiler")
    found = collective_cost(kind, implementation)
    limit = ALONE[kind, implementation]
    assert found.functions <= limit.functions
    assert found.driver <= limit.driver


def collective_cost(kind: str, implementation: str) -> Cost:
    with machine(RANK, WORLD) as here, named_group(here), cuda.forced(implementation):
        here.kernels, here.edits = {}, True
        call = collective(here, kind, 8, 3, 8)
        given = call[0]
        for _ in range(2):
            moved_by_op(here, call)
        one, wait = cuda.bind(call), WaitSite(False)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch._C._distributed_c10d, "_get_work_registry_size", lambda: 0)
            patched.setattr(call_sites, "kernels_or_none", lambda _: cuda)
            wait(one(given), given)
            return counted(lambda: wait(one(given), given)).cost
