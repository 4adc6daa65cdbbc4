"""Stand-ins for the custom ops of a serving framework: the schemas, names and conventions of vLLM's.

Collectives act along any dimension, need no wait, and are given the framework's own name of a group (`"tp:0"`), which
torch does not know. The quantized matmul writes its result into an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from asynctp_passes import register_collective, register_matmul, unregister

__all__ = ["GROUPS", "registered"]

#: The process group of each name of the framework's, on real ranks.
GROUPS: dict[str, dist.ProcessGroup] = {}

_ops = torch.library.Library("vllm_like", "FRAGMENT")
_ops.define("all_gather(Tensor x, int dim, int world_size, str group_name) -> Tensor")
_ops.define("reduce_scatter(Tensor x, int dim, int world_size, str group_name) -> Tensor")
_ops.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
_ops.define("all_reduce_count(Tensor x, str group_name) -> SymInt")
_ops.define("all_reduce_barrier(Tensor x, str group_name) -> ()")
torch.fx.node.has_side_effect(torch.ops.vllm_like.all_reduce_barrier.default)
_ops.define("cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()")
_ops.define("bmm_fp8(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, ScalarType dtype, str backend) -> Tensor")


# --- what they compute -----------------------------------------------------------------------------------------
def _all_gather(x: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    sent = x.contiguous().view(torch.uint8) if x.dtype.itemsize == 1 else x.contiguous()  # gloo knows no fp8
    pieces = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(pieces, sent, GROUPS[group_name])
    return torch.cat(pieces, dim).view(x.dtype)


def _reduce_scatter(x: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    total = _all_reduce(x, group_name)
    return total.chunk(world_size, dim)[dist.get_rank(GROUPS[group_name])].contiguous()


def _all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=GROUPS[group_name])
    return total


def _all_reduce_count(x: Tensor, group_name: str) -> int:
    return int(_all_reduce(x, group_name).count_nonzero())


def _all_reduce_barrier(x: Tensor, group_name: str) -> None:
    _all_reduce(x, group_name)


def _dequantized(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
    return (a.double() * a_scales.double()) @ (b.double() * b_scales.double())


def _cutlass_scaled_mm(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None
) -> None:
    columns = b_scales.reshape(1, -1) if b_scales.numel() > 1 else b_scales
    product = _dequantized(a, b, a_scales, columns)
    out.copy_(product if bias is None else product + bias.double())


def _bmm_fp8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    return _dequantized(a, b, a_scale, b_scale).to(dtype)


# --- what shapes they return -------------------------------------------------------------------------------------
def _scaled_shape(x: Tensor, dim: int, numerator: int, denominator: int = 1) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * numerator // denominator
    return x.new_empty(shape)


_CPU = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_reduce_count": _all_reduce_count,
    "all_reduce_barrier": _all_reduce_barrier,
    "cutlass_scaled_mm": _cutlass_scaled_mm,
    "bmm_fp8": _bmm_fp8,
}
_FAKE = {
    "all_gather": lambda x, dim, world_size, group_name: _scaled_shape(x, dim, world_size),
    "reduce_scatter": lambda x, dim, world_size, group_name: _scaled_shape(x, dim, 1, world_size),
    "all_reduce": lambda tensor, group_name: torch.empty_like(tensor),
    "all_reduce_count": lambda x, group_name: torch.library.get_ctx().new_dynamic_size(),
    "all_reduce_barrier": lambda x, group_name: None,
    "cutlass_scaled_mm": lambda out, a, b, a_scales, b_scales, bias: None,
    "bmm_fp8": lambda a, b, a_scale, b_scale, dtype, backend: a.new_empty(*a.shape[:-1], b.shape[-1], dtype=dtype),
}
for _name, _implementation in _CPU.items():
    _ops.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"vllm_like::{_name}", _FAKE[_name], lib=_ops)


# --- how asynctp learns of them ----------------------------------------------------------------------------------
@contextmanager
def registered(
    group: str | dist.ProcessGroup = "0", names: Mapping[str, dist.ProcessGroup] | None = None
) -> Iterator[None]:
    """Let the pass understand the ops; torch knows the framework's group `"tp:0"` as `group`, and others by `names`."""
    ops, groups = torch.ops.vllm_like, {"tp:0": group, **(names or {})}
    common = {"dim": "dim", "size": "world_size", "group": "group_name", "groups": groups}
    scales = {"a_scale": "a_scales", "b_scale": "b_scales"}
    register_collective(ops.all_gather, kind="all_gather", input="x", **common)
    register_collective(ops.reduce_scatter, kind="reduce_scatter", input="x", **common)
    register_collective(ops.all_reduce, kind="all_reduce", input="tensor", group="group_name", groups=groups)
    register_matmul(ops.cutlass_scaled_mm, a="a", b="b", bias="bias", out="out", **scales)
    register_matmul(ops.bmm_fp8, a="A", b="B", a_scale="A_scale", b_scale="B_scale")
    try:
        yield
    finally:
        for op in (ops.all_gather, ops.reduce_scatter, ops.all_reduce, ops.cutlass_scaled_mm, ops.bmm_fp8):
            unregister(op)
