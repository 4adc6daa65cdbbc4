"""What communicates keeps its order: in the code that Inductor makes, and in rewritten graphs.

Ranks share the order of their collectives, and nothing else. So programs with the same collectives must communicate in
the same order, whatever is computed beside them. In each program below every collective has a group of its own, so that
its place can be read off the code; `local` chooses what a rank computes beside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from ranks import imagined_ranks
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    reduce_scatter_tensor,
)

from asynctp_passes.ops import matmul_reduce_scatter

_CALL = re.compile(r"torch\.ops\.(?P<op>\w+\.\w+)\.default\((?P<arguments>.*)\)")
Groups = list[dist.ProcessGroup]
Program = Callable[[int, Groups], list[Tensor]]


@pytest.fixture(name="groups")
def five_groups() -> Iterator[Groups]:
    with imagined_ranks(2):
        yield [dist.new_group([0, 1]) for _ in range(5)]


@pytest.fixture(autouse=True)
def code_is_only_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing comes from a cache, and no C++ is compiled: what kernels would compute means nothing here."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *tensors: None)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def started(code: str, groups: Groups) -> list[int]:
    """The groups in which generated code communicates, as indices, in order."""
    index = {group.group_name: place for place, group in enumerate(groups)}
    found = []
    for call in _CALL.finditer(code):
        names = re.findall(r"'(\w+)'", call["arguments"])
        found += [index[name] for name in names if name in index]
    return found


def compiled_order(program: Program, local: int, groups: Groups) -> list[int]:
    torch._dynamo.reset()
    function = torch.compile(program, backend="asynctp", options={"strict": "off", "log": False})
    with torch.no_grad():
        _, codes = run_and_get_code(function, local, groups)
    return [place for code in codes for place in started(code, groups)]


def tensor(*shape: int) -> Tensor:
    return torch.zeros(shape)


# --- programs ------------------------------------------------------------------------------------------------
def statistic(local: int, groups: Groups) -> list[Tensor]:
    """The other rank logs a statistic of its second product."""
    a, b = (all_gather_tensor(tensor(64, 32), 0, group) for group in groups[:2])
    p, q = a @ tensor(32, 64), b @ tensor(32, 64)
    return [(q @ q.t()).trace(), p, q] if local else [p, q]


def heads_in_any_order(local: int, groups: Groups) -> list[Tensor]:
    """Heads are multiplied in the order of a set."""
    whole = [all_gather_tensor(tensor(16, 32), 0, group) for group in groups]
    order = [3, 0, 4, 2, 1] if local else [1, 4, 0, 3, 2]
    heads = {index: whole[index] @ tensor(32, 8) for index in order}
    return [heads[index] for index in range(5)]


def all_kinds(local: int, groups: Groups) -> list[Tensor]:
    """A gather and a sum with matmuls, and collectives without, whose results come into use early or late."""
    x, w = tensor(64, 32), tensor(32, 32)
    a = all_gather_tensor(x, 0, groups[0])
    total = all_reduce(x * 2, "sum", groups[1])
    scattered = reduce_scatter_tensor(tensor(64, 32) @ w, "sum", 0, groups[2])
    plain = all_gather_tensor(x + 1, 0, groups[3])
    largest = all_reduce(x.amax(), "max", groups[4])
    if local:
        return [largest + plain.sum(), scattered + 1, total @ w, a @ w, plain]
    return [a @ w, total @ w, scattered.relu(), plain, largest]


def by_hand(local: int, groups: Groups) -> list[Tensor]:
    """Ops that the program calls itself stand between collectives."""
    x, w = tensor(64, 32), tensor(32, 64)
    first = matmul_reduce_scatter([x @ w], [tensor(64, 16)], scatter_dim=0, group=groups[0])
    a = all_gather_tensor(tensor(32, 32), 0, groups[1])
    second = matmul_reduce_scatter([x @ w], [tensor(64, 16)], scatter_dim=0, group=groups[2])
    total = all_reduce(x, "sum", groups[3])
    if local:
        return [total + 1, second * 2, a @ w, first * 2]
    return [first * 2, a @ w, total.sum(), second + 1]


INFERENCE: list[Program] = [statistic, heads_in_any_order, all_kinds, by_hand]


@pytest.mark.parametrize("program", INFERENCE, ids=lambda program: program.__name__)
def test_generated_code_communicates_in_the_order_of_the_program(program: Program, groups: Groups) -> None:
    orders = [compiled_order(program, local, groups) for local in (0, 1)]
    assert orders[0] == sorted(set(orders[0]))
    assert orders[1] == orders[0]
    assert len(orders[0]) > 1
