"""Matmuls and the sum of them over ranks as what decides a plan, and the memory of one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asynctp_kernels.cuda.choose.wire import Wire
from asynctp_kernels.cuda.gemm.cublas import Recipe, Scaling, block_recipe
from asynctp_kernels.layout import ShardLayout, scatter_layout

#: optional arguments of the ops that kernels know: one that a plan does not take needs a check in `legality`
KNOWN = {"sum_dtype", "added", "factors", "accord"}


class ReduceArguments(Protocol):
    """A call of an op that reduces: its arguments by the names of its schema. Of one without scales, theirs are absent.

    scatter_dim: None of an all-reduce.
    """

    a_parts: Sequence[Tensor]
    b_parts: Sequence[Tensor]
    a_scales: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    reduce_op: str
    scatter_dim: int | None
    out_dtype: torch.dtype | None
    use_fast_accum: bool
    group_name: Any
    op: str
    sum_dtype: torch.dtype | None
    added: Tensor | None
    factors: Sequence[float] | None
    accord: int
    values: tuple[Any, ...]

    def given(self) -> set[str]: ...


class Times(NamedTuple):
    """Factors of each matmul, of what is added to them, and of the whole."""

    matmuls: tuple[float, ...]
    added: float
    whole: float


@dataclass(frozen=True)
class ScatterCall:
    """The arguments that decide a plan; the tensors stand for all tensors of their shapes, strides and dtypes.

    out_dtype: of the matmuls. unscaled_op: the op's name, as it is without scales. sum_dtype: of the result, and of
    the sums that it comes from; None: the matmuls'. added: a term of that dtype, and of the matmuls' shape. factors:
    what each matmul is multiplied by, once it has that dtype, and maybe one more, for their sum; powers of two, or
    negatives of such. Empty: nothing is. accord: see `Wire`. unknown: arguments that the call has, and that no
    kernel knows.
    """

    a_parts: Sequence[Tensor]
    b_parts: Sequence[Tensor]
    a_scales: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    reduce_op: str
    dim: int
    out_dtype: torch.dtype
    fast: bool
    world: int
    unscaled_op: str = "matmul_reduce_scatter"
    sum_dtype: torch.dtype | None = None
    added: Tensor | None = None
    factors: tuple[float, ...] = ()
    accord: int = 0
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: ReduceArguments, world: int) -> ScatterCall:
        """The facts of an op's call in a group of so many ranks; of an all-reduce, of the scatter of rows in it."""
        a_parts, b_parts, a_scales, added = call.a_parts, call.b_parts, call.a_scales, call.added
        dim, op = call.scatter_dim, "matmul_reduce_scatter"
        if dim is None:
            dim, op, added = 0, "matmul_all_reduce", None if added is None else flat(added)
            a_parts, b_parts, a_scales = as_rows(a_parts, b_parts, a_scales)
        return cls(
            *(a_parts, b_parts, a_scales, call.b_scales, call.biases, call.reduce_op, dim),
            *(call.out_dtype or a_parts[0].dtype, call.use_fast_accum, world, op, call.sum_dtype, added),
            factors=nonunit(call.factors),
            accord=call.accord,
            unknown=tuple(sorted(call.given() - KNOWN)),
        )

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the data on its way, and of the result."""
        return self.out_dtype if self.sum_dtype is None else self.sum_dtype

    @property
    def wire(self) -> Wire:
        """The facts of it that all ranks share."""
        if self.unscaled_op.endswith("all_reduce"):
            kind, size = "all_reduce", self.rows * self.b_parts[0].shape[1]
        else:
            kind, size = "reduce_scatter", self.layout.rows * self.layout.cols
        dtype, how = self.wire_dtype, self.reduce_op
        return Wire(kind, self.world, size * dtype.itemsize, dtype, how, accord=self.accord)

    @property
    def parts(self) -> ShardLayout:
        """The layout of a pushed all-reduce: an equal run of elements for each rank to add up."""
        elements = self.rows * self.b_parts[0].shape[1]
        return scatter_layout((self.world, elements // self.world), 0, self.world)

    @property
    def op(self) -> str:
        """Its name, for messages."""
        return ("scaled_" if self.a_scales else "") + self.unscaled_op

    @property
    def layout(self) -> ShardLayout:
        full = (*self.a_parts[0].shape[:-1], self.b_parts[0].shape[1])
        return scatter_layout(full, self.dim % len(full), self.world)

    @property
    def rows(self) -> int:
        """Rows of the matmuls, over all ranks."""
        return math.prod(self.a_parts[0].shape[:-1])

    @property
    def outer(self) -> int:
        return self.layout.outer

    @property
    def scaling(self) -> Scaling | None:
        return Scaling(self.out_dtype, self.fast) if self.a_scales else None

    @property
    def device_index(self) -> int:
        return self.a_parts[0].device.index

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the first A."""
        return tuple(self.a_parts[0].shape)

    @property
    def is_empty(self) -> bool:
        """Nothing is multiplied."""
        return self.rows == 0 or any(0 in b.shape for b in self.b_parts)

    @property
    def recipes(self) -> list[Recipe | None]:
        """Blocks that the scales of each matmul are of; empty where there are no scales."""
        scales = zip(self.b_parts, self.a_scales, self.b_scales, strict=True) if self.a_scales else ()
        return [block_recipe(self.rows, b, a_scale, b_scale) for b, a_scale, b_scale in scales]

    @property
    def times(self) -> Times:
        """Factors, with as few passes over memory as give the program's numbers.

        A number below 1 for the sum goes to its terms, which are smaller then than the program's. What that takes from
        subnormal ones is no more than the program's rounding does, but in float16, where these are not rare.
        """
        count = len(self.a_parts)
        each, rest = self.factors[:count] or (1.0,) * count, self.factors[count:]
        whole = rest[0] if rest else 1.0
        smaller = abs(whole) < 1 and all(abs(factor) <= 1 for factor in each) and self.wire_dtype != torch.float16
        if smaller or abs(whole) == 1:
            return Times(tuple(factor * whole for factor in each), whole, 1.0)
        return Times(each, 1.0, whole)

    @property
    def gemm_factor(self) -> float | None:
        """The factor of one GEMM's result, the sum of all matmuls; None where they need unlike numbers.

        Several are multiplied before they are added in the program, and may add up to what has no place in fp32.
        """
        count = len(self.a_parts)
        each, whole = set(self.factors[:count]) or {1.0}, self.factors[count:]
        first = each.pop()
        if each or (count > 1 and abs(first) != 1) or (whole and abs(first) != 1):
            return None
        return first * whole[0] if whole else first


def part_rows(call: ScatterCall, rank: int) -> list[tuple[int, int, int]]:
    """(rank, first row, end) of each rank's part of an all-reduce, in the order in which `rank` multiplies them.

    A row in which one part ends and the next begins is multiplied with the first of them. There are as many rows as
    ranks, or more, so none is of three parts.
    """
    world, columns, part = call.world, call.b_parts[0].shape[1], call.parts.cols
    order = [(rank + step) % world for step in range(1, world + 1)]
    begins = [dst * part // columns if dst == order[0] else -(-dst * part // columns) for dst in range(world)]
    ends = [*begins[1:], call.rows]
    return [(dst, begins[dst], ends[dst]) for dst in order]


def as_rows(
    a_parts: Sequence[Tensor], b_parts: Sequence[Tensor], a_scales: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """The operands with every A as [M, K], and its scale as one element or a matrix."""
    scales = [scale if scale.numel() == 1 else flat(scale) for scale in a_scales]
    return [flat(a) for a in a_parts], b_parts, scales


def flat(tensor: Tensor) -> Tensor:
    """[*, n] as [M, n]. A view takes most of a microsecond, also one that changes nothing."""
    return tensor if tensor.ndim == 2 else tensor.flatten(0, -2)  # also without columns


def nonunit(factors: Sequence[float] | None) -> tuple[float, ...]:
    """Factors as a call has them: none where all are 1."""
    return tuple(factors) if factors and any(factor != 1 for factor in factors) else ()


#: As, Bs, A scales, B scales, biases and what is added, as `ScatterCall` has them
Operands = tuple[
    Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None], Tensor | None
]


class ScatterTensors(NamedTuple):
    """All memory of one call: the operands, then what it makes.

    staging: the sum of the matmuls, as the implementation lays it out. out: the result. extras: matmuls apart that
    are not made in the place of that sum.
    """

    a_parts: Sequence[Tensor]
    b_parts: Sequence[Tensor]
    a_scales: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    added: Tensor | None
    staging: Tensor
    out: Tensor
    extras: list[Tensor]

    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors but the small operands."""
        tensors = (*self.a_parts, *self.b_parts, self.added, self.staging, self.out, *self.extras)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])

    def small(self) -> list[Tensor]:
        """Scales and biases."""
        tensors = (*self.a_scales, *self.b_scales, *self.biases)
        return [tensor for tensor in tensors if tensor is not None]

    def with_small(self, small: Sequence[Tensor]) -> ScatterTensors:
        """The same with other small operands."""
        rest = iter(small)
        a_scales, b_scales = ([next(rest) for _ in scales] for scales in (self.a_scales, self.b_scales))
        biases = [None if bias is None else next(rest) for bias in self.biases]
        return self._replace(a_scales=a_scales, b_scales=b_scales, biases=biases)
