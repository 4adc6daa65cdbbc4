"""The memory of one call of a gather, and how its shard lies in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asynctp_kernels.cuda.facts import GatherFacts

_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


class ShardSizes:
    """How a rank's shard, and the numbers that go with it, lie in memory.

    Attributes:
        layout, outer: Of the call.
        row_bytes, shard_bytes: Of a row of the shard, and of all of it.
        number_count, number_bytes: Of the numbers that travel with it.
        unit_bytes, units: Copies by kernels move integers: of so many bytes, so many.
    """

    def __init__(self, call: GatherFacts) -> None:
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


#: A shard, A scale, Bs, B scales, biases, and what travels along: as `GatherFacts` has them
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
