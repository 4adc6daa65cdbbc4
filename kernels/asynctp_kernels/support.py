"""One predicate: can this implementation run this call, and if not, why not?"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from .errors import UnsupportedCall
from .signals import IS_INTERPRETED

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GATHER_OPS = ("all_gather_matmul", "all_gather_scaled_matmul")
SCATTER_OPS = ("matmul_reduce_scatter", "scaled_matmul_reduce_scatter")
REDUCE_OPS = ("sum", "avg")


@dataclass(frozen=True)
class Operand:
    """What `supports` needs to know of a tensor. Meta and fake tensors do as well as real ones."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(tensor: torch.Tensor) -> Operand:
        return Operand(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    @staticmethod
    def all_of(tensors: Sequence[torch.Tensor]) -> tuple[Operand, ...]:
        return tuple(Operand.of(t) for t in tensors)

    @staticmethod
    def each_of(tensors: Sequence[torch.Tensor | None]) -> tuple[Operand | None, ...]:
        return tuple(None if t is None else Operand.of(t) for t in tensors)


@dataclass(frozen=True)
class Call:
    """One call of one op: operands, and what else decides whether it can run.

    Attributes:
        op: the entry point's name.
        a: the A operands. A gather has one: the shard.
        b, biases: in the order of the arguments; `biases` is as long as `b`.
        dim: gather or scatter dim; negative counts from the end.
        world_size: of the group.
        out_dtype: of the result; None means A's.
        a_scales, b_scales: of a scaled op, one per `a` and one per `b`.
        gather_a_scale: the A scale is that of the shard and travels with it.
        reduce_op: of a scatter.
    """

    op: str
    a: tuple[Operand, ...]
    b: tuple[Operand, ...]
    biases: tuple[Operand | None, ...]
    dim: int
    world_size: int
    out_dtype: torch.dtype | None = None
    a_scales: tuple[Operand, ...] = ()
    b_scales: tuple[Operand, ...] = ()
    gather_a_scale: bool = False
    reduce_op: str = "sum"

    @property
    def scaled(self) -> bool:
        return "scaled" in self.op

    @property
    def gathers(self) -> bool:
        return self.op in GATHER_OPS

    def along_last(self) -> bool:
        return self.dim % len(self.a[0].shape) == len(self.a[0].shape) - 1


def supports(call: Call) -> str | None:
    """Why this implementation cannot run `call`; None when it can."""
    return next((reason for check in _CHECKS if (reason := check(call)) is not None), None)


def require_support(call: Call) -> None:
    """Raise the reason of `supports`.

    Raises:
        UnsupportedCall: there is one.
    """
    reason = supports(call)
    if reason is not None:
        raise UnsupportedCall(f"{call.op}: {reason}")


def op_known(call: Call) -> str | None:
    return None if call.op in GATHER_OPS + SCATTER_OPS else f"no op has this name; there are {GATHER_OPS + SCATTER_OPS}"


def counts_match(call: Call) -> str | None:
    if len(call.a) != (1 if call.gathers else len(call.b)):
        return f"{len(call.a)} A operands for {len(call.b)} B operands"
    if not call.gathers and not call.b:
        return "there is nothing to multiply"
    if len(call.biases) != len(call.b):
        return f"{len(call.biases)} biases for {len(call.b)} B operands (pass None where there is none)"
    expected = (len(call.a), len(call.b)) if call.scaled else (0, 0)
    found = (len(call.a_scales), len(call.b_scales))
    return None if found == expected else f"{found} A and B scales, expected {expected}"


def device_supported(call: Call) -> str | None:
    given = (*call.a, *call.b, *call.biases, *call.a_scales, *call.b_scales)
    devices = sorted({operand.device for operand in given if operand is not None})
    if devices != ["cpu"]:
        return f"tensors on {', '.join(devices)}: the interpreted kernels take CPU tensors only"
    if not IS_INTERPRETED:
        return "CPU tensors need TRITON_INTERPRET=1 in the environment before triton is imported"
    return interpreter_fault()


@triton.jit
def _count_kernel(out_address: tl.tensor, count: tl.tensor) -> None:
    out = out_address.to(tl.pointer_type(tl.int64))
    for step in range(count):
        tl.atomic_add(out, tl.load(out) * 0 + step, sem="acq_rel", scope="sys")


@functools.cache
def interpreter_fault() -> str | None:
    """Why Triton's interpreter cannot run kernels here; None when it can.

    Triton 3.6's interpreter turns arrays into Python numbers in a way that NumPy 2.4 no longer allows.
    """
    out = torch.zeros((), dtype=torch.int64)
    try:
        _count_kernel[(1,)](out.data_ptr(), 4)
    except InterpreterError as error:
        versions = f"triton {triton.__version__} with NumPy {numpy.__version__}"
        return f"the interpreter of {versions} fails ({error}); install a newer triton, or numpy<2.4"
    return None if out.item() == 6 else f"the interpreter of triton {triton.__version__} counts to {out.item()}, not 6"


def dtype_supported(call: Call) -> str | None:
    allowed = FP8 if call.scaled else HIGH_PRECISION
    for operand in (*call.a, *call.b):
        if operand.dtype not in allowed:
            return f"operand of {operand.dtype}, not one of {', '.join(map(str, allowed))}"
        if not call.scaled and operand.dtype != call.a[0].dtype:
            return f"operands of {call.a[0].dtype} and {operand.dtype}: convert one"
    if any(operand.dtype != call.a[0].dtype for operand in call.a):
        return "A operands of several dtypes"
    if call.scaled and call.out_dtype not in HIGH_PRECISION:
        return f"out_dtype {call.out_dtype}, not one of {', '.join(map(str, HIGH_PRECISION))}"
    if any(scale.dtype != torch.float32 for scale in (*call.a_scales, *call.b_scales)):
        return "scales must be float32"
    if any(bias is not None and bias.dtype not in HIGH_PRECISION for bias in call.biases):
        return f"biases must be one of {', '.join(map(str, HIGH_PRECISION))}"
    return None


def shapes_match(call: Call) -> str | None:
    lead = call.a[0].shape[:-1]
    if not lead:
        return "A must have at least two dims"
    for i, b in enumerate(call.b):
        a = call.a[0 if call.gathers else i].shape
        k = a[-1] * (call.world_size if call.gathers and call.along_last() else 1) if a else 0
        if a[:-1] != lead:
            return f"A operands with leading dims {lead} and {a[:-1]}"
        if len(b.shape) != 2 or b.shape[0] != k:
            return f"B operand {i} is {b.shape}, expected ({k}, N)"
        bias = call.biases[i]
        if bias is not None and bias.shape not in ((b.shape[1],), (1, b.shape[1])):
            return f"bias {i} is {bias.shape}, expected ({b.shape[1]},)"
    return None


def dim_valid(call: Call) -> str | None:
    ndim = len(call.a[0].shape)
    return None if -ndim <= call.dim < ndim else f"dim {call.dim} of a tensor with {ndim} dims"


def scatter_divides(call: Call) -> str | None:
    if call.gathers:
        return None
    if call.reduce_op not in REDUCE_OPS:
        return f"reduce op '{call.reduce_op}', not one of {REDUCE_OPS}"
    if len({b.shape[1] for b in call.b}) != 1:
        return "B operands with different numbers of columns cannot be summed"
    size = (*call.a[0].shape[:-1], call.b[0].shape[1])[call.dim]
    return f"{size} is not divisible by {call.world_size} ranks" if size % call.world_size else None


def scales_match(call: Call) -> str | None:
    for i, scale in enumerate(call.a_scales):
        rowwise = (*_scaled_lead(call, call.a[i]), 1)
        if scale.shape != rowwise and (call.gather_a_scale or _numel(scale) != 1):
            return f"A scale {i} is {scale.shape}, expected {rowwise} (or, if it is not gathered, one element)"
    for i, scale in enumerate(call.b_scales):
        n = call.b[i].shape[1]
        if scale.shape != (1, n) and _numel(scale) != 1:
            return f"B scale {i} is {scale.shape}, expected (1, {n}) or one element"
    if call.gather_a_scale and call.along_last():
        return "a rowwise A scale cannot be gathered along the contraction dim: no single scale per row would be left"
    return None


def _scaled_lead(call: Call, a: Operand) -> tuple[int, ...]:
    """Leading dims of a rowwise scale of `a`: of the gathered A where the scale itself is not gathered."""
    lead = a.shape[:-1]
    if not call.gathers or call.gather_a_scale or call.along_last():
        return lead
    dim = call.dim % len(a.shape)
    return (*lead[:dim], lead[dim] * call.world_size, *lead[dim + 1 :])


def _numel(operand: Operand) -> int:
    total = 1
    for size in operand.shape:
        total *= size
    return total


_CHECKS: tuple[Callable[[Call], str | None], ...] = (
    op_known,
    counts_match,
    device_supported,
    dtype_supported,
    dim_valid,
    shapes_match,
    scatter_divides,
    scales_match,
)
