"""A gather and its matmuls as what decides a plan, and the memory of one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asynctp_kernels.cuda.choose.wire import Wire
from asynctp_kernels.cuda.gemm.cublas import Recipe, Scaling, block_recipe
from asynctp_kernels.layout import ShardLayout, gather_layout

#: optional arguments of the ops that kernels know: one that a plan does not take needs a check in `legality`
KNOWN = {"along_shard", "all_keep", "accord"}
_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


class GatherArguments(Protocol):
    """A call of a gather op: its arguments by the names of its schema. Of the op without scales, theirs are absent."""

    a_shard: Tensor
    a_scale: Tensor | None
    bs: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    gather_dim: int
    gather_a_scale: bool
    matmul_dtype: torch.dtype
    use_fast_accum: bool
    return_a_full: bool
    group_name: Any
    op: str
    along_shard: Tensor | None
    kept: bool
    accord: int
    travels: Tensor | None
    values: tuple[Any, ...]

    def given(self) -> set[str]: ...


@dataclass(frozen=True)
class GatherCall:
    """The arguments that decide a plan; the tensors stand for all tensors of their shapes, strides and dtypes.

    kept: every rank keeps the gathered A, whether it returns it or not. accord: see `Wire`. unknown: arguments that the
    call has, and that no kernel knows.
    """

    a_shard: Tensor
    a_scale: Tensor | None
    bs: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    dim: int
    scale_travels: bool
    out_dtype: torch.dtype
    fast: bool
    return_a_full: bool
    world: int
    along: Tensor | None = None
    kept: bool = False
    accord: int = 0
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: GatherArguments, world: int) -> GatherCall:
        """The facts of an op's call in a group of so many ranks."""
        return cls(
            *(call.a_shard, call.a_scale, call.bs, call.b_scales, call.biases, call.gather_dim, call.gather_a_scale),
            *(call.matmul_dtype, call.use_fast_accum, call.return_a_full, world, call.along_shard),
            kept=call.kept,
            accord=call.accord,
            unknown=tuple(sorted(call.given() - KNOWN)),
        )

    @property
    def travels(self) -> Tensor | None:
        """The numbers that are gathered with the shard: its scales by rows or by blocks, or what is only returned."""
        return self.a_scale if self.scale_travels else self.along

    @property
    def layout(self) -> ShardLayout:
        return gather_layout(self.a_shard.shape, self.dim % self.a_shard.ndim, self.world)

    @property
    def outer(self) -> int:
        return self.layout.outer

    @property
    def rows(self) -> int:
        """Rows of the results, over all ranks."""
        return self.layout.full_rows

    @property
    def op(self) -> str:
        """Its name, for messages; a call without a matmul is in flight."""
        if not self.bs:
            return "all_gather"
        return "all_gather_matmul" if self.a_scale is None else "all_gather_scaled_matmul"

    @property
    def wire(self) -> Wire:
        """The facts of it that all ranks share."""
        own_bytes = self.a_shard.numel() * self.a_shard.itemsize
        numbers = 0 if self.travels is None else 4 * self.travels.numel()
        return Wire("all_gather", self.world, own_bytes, number_bytes=numbers, kept=self.kept, accord=self.accord)

    @property
    def scaling(self) -> Scaling | None:
        return None if self.a_scale is None else Scaling(self.out_dtype, self.fast)

    @property
    def device_index(self) -> int:
        return self.a_shard.device.index

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the shard of A."""
        return tuple(self.a_shard.shape)

    @property
    def is_empty(self) -> bool:
        """Nothing is multiplied."""
        layout = self.layout
        return layout.rows == 0 or layout.cols == 0 or not self.bs or any(b.shape[1] == 0 for b in self.bs)

    @property
    def recipes(self) -> list[Recipe | None]:
        """Blocks that the scales of each matmul are of; empty where there are no scales."""
        if self.a_scale is None:
            return []
        rows = self.layout.rows if self.scale_travels else self.layout.full_rows
        pairs = zip(self.bs, self.b_scales, strict=True)
        return [block_recipe(rows, b, self.a_scale, b_scale) for b, b_scale in pairs]


class ShardSizes:
    """How a rank's shard, and the numbers that go with it, lie in memory.

    Attributes:
        layout, outer: Of the call.
        row_bytes, shard_bytes: Of a row of the shard, and of all of it.
        number_count, number_bytes: Of the numbers that travel with it.
        unit_bytes, units: Copies by kernels move integers: of so many bytes, so many.
    """

    def __init__(self, call: GatherCall) -> None:
        self.layout, self.outer = call.layout, call.outer
        self.number_count = 0 if call.travels is None else call.travels.numel()
        self.number_bytes = self.number_count * 4
        self.row_bytes = self.layout.cols * call.a_shard.itemsize
        self.shard_bytes = self.layout.rows * self.row_bytes
        piece_bytes = self.shard_bytes if self.layout.whole else self.row_bytes
        self.unit_bytes = next(size for size in (4, 2, 1) if piece_bytes % size == 0)
        self.units = self.shard_bytes // self.unit_bytes

    def as_units(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor as integers that copies move."""
        return tensor.view(-1).view(_UNITS[self.unit_bytes])

    def together(self, run: int) -> int:
        """How many units a copy reads and writes at once, where runs of so many lie one after the other (0: any)."""
        return math.gcd(16 // self.unit_bytes, run)


def block_for(size: int, largest: int, programs: int) -> int:
    """Units of `size` that one of `programs` moves at a time: many, to hide latency, but work for all programs."""
    block = largest
    while block > 512 and size < block * programs:
        block //= 2
    return block


#: A shard, A scale, Bs, B scales, biases, and what travels along: as `GatherCall` has them
GatherOperands = tuple[
    Tensor, Tensor | None, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None], Tensor | None
]


class GatherTensors(NamedTuple):
    """All memory of one call.

    shard, a_scale, bs, b_scales, biases: the operands.
    numbers: what is gathered with the shard: `a_scale`, or what is only returned.
    outs: the matmuls. full: the gathered A, where it is returned or multiplied whole. all_numbers: the gathered
    numbers [*, K/128 or 1], where they are.
    """

    shard: Tensor
    a_scale: Tensor | None
    bs: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    numbers: Tensor | None
    outs: list[Tensor]
    full: Tensor | None
    all_numbers: Tensor | None

    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors but the small operands."""
        tensors = (self.shard, self.full, self.all_numbers, *self.bs, *self.outs)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])

    def small(self) -> list[Tensor]:
        """Scales, numbers that travel, biases."""
        numbers = None if self.numbers is self.a_scale else self.numbers
        tensors = (self.a_scale, numbers, *self.b_scales, *self.biases)
        return [tensor for tensor in tensors if tensor is not None]

    def with_small(self, small: Sequence[Tensor]) -> GatherTensors:
        """The same with other small operands."""
        rest = iter(small)
        a_scale = None if self.a_scale is None else next(rest)
        numbers = a_scale if self.numbers is self.a_scale else None if self.numbers is None else next(rest)
        b_scales = [next(rest) for _ in self.b_scales]
        biases = [None if bias is None else next(rest) for bias in self.biases]
        return self._replace(a_scale=a_scale, numbers=numbers, b_scales=b_scales, biases=biases)
