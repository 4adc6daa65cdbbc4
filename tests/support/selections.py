"""Problems, calls on meta tensors, and the implementations that are chosen for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.implementation import Implementation
from asynctp_kernels.cuda.choose.select import Choice, Problem, Rates
from asynctp_kernels.cuda.implementations import ENTRIES

from asynctp_passes.ops.calls import signature

SMS = 132
H200, UNKNOWN = "NVIDIA H200", "a GPU that nobody measured"
BF16, FP8, E5M2, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32


def problem(op: str, rows: int, depth: int, *widths: int, world: int = 4, dtype: str = "bfloat16") -> Problem:
    return Problem(op, world, rows, depth, widths, 1 if dtype.startswith("float8") else 2, 2, dtype)


def chosen(
    asked: Problem, refused: dict[str, str] | None = None, device: str = UNKNOWN, beside: bool = False
) -> Choice:
    return select.choose(asked, ENTRIES[asked.op], refused or {}, SMS, device, beside=beside)


def entry(op: str, name: str) -> Implementation[Any]:
    (found,) = (each for each in ENTRIES[op] if each.name == name)
    return found


def estimate(asked: Problem, name: str, rates: Rates, sms: int) -> float:
    """Of an implementation that has one."""
    model = entry(asked.op, name).estimate
    assert model is not None
    return model(asked, rates, sms)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(k: int, n: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """[K, N], with K side by side."""
    return empty(n, k, dtype=dtype).t()


def explain(
    op: str,
    *args: Any,
    device: str = UNKNOWN,
    capability: tuple[int, int] = (9, 0),
    world: int = 4,
    sum_dtype: torch.dtype | None = None,
    factors: Sequence[float] | None = None,
) -> Choice:
    with mock.patch.object(cuda.runtime.driver, "machine", return_value=(capability, SMS, device)):
        return cuda.explain(call_of(op, *args, world=world, sum_dtype=sum_dtype, factors=factors), world)


def call_of(op: str, *args: Any, world: int = 4, **optional: Any) -> Any:
    """A call of an op with its arguments up to the group and its size, and others by name, or as the last of `args`."""
    found, given = signature(op), list(args)
    if given and isinstance(given[-1], dict):
        optional |= given.pop()
    group = (world, "tp") if "group_size" in found.names else ("tp",)
    others = {name: value for name, value in optional.items() if value is not None}
    return found.named({**dict(zip(found.names, (*given, *group), strict=False)), **others})


def explain_gather(rows: int, k: int, *ns: int, world: int = 4, **others: Any) -> Choice:
    """bf16, dim 0; `rows` over all ranks."""
    a_shard, bs = empty(rows // world, k), [weight(k, n) for n in ns]
    return explain("all_gather_matmul", a_shard, bs, [None] * len(ns), 0, False, world=world, **others)


def explain_scatter(rows: int, k: int, n: int, world: int = 4, **others: Any) -> Choice:
    """bf16, dim 0."""
    options: Any = ([empty(rows, k)], [weight(k, n)], [None], "sum", 0)
    return explain("matmul_reduce_scatter", *options, world=world, **others)


def explain_all_reduce(rows: int, k: int, n: int, world: int = 4, **others: Any) -> Choice:
    """bf16."""
    return explain("matmul_all_reduce", [empty(rows, k)], [weight(k, n)], [None], "sum", world=world, **others)


OVERLAPPED = {"fused", "decomposed"}


GATHER, SCATTER, ALL_REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def own_reasons(choice: Choice) -> dict[str, str]:
    """Why implementations cannot make this rank's products, whatever the transport is."""
    return {name: reason for name, reason in choice.refused.items() if "by another transport" not in reason}
