"""The memory of one call of a gather, and how its shard lies in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
        self.number_count = 0 if call.row_numbers is None else call.row_numbers.numel()
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
    row_numbers: what is gathered with the shard: `a_scale`, or what is only returned.
    outs: the matmuls. full: the gathered A, where it is returned or multiplied whole. all_row_numbers: the gathered
    numbers [*, K/128 or 1], where they are.
    """

    shard: Tensor
    a_scale: Tensor | None
    bs: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    row_numbers: Tensor | None
    outs: list[Tensor]
    full: Tensor | None
    all_row_numbers: Tensor | None

    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors: those that are given, then those that are made."""
        shard, a_scale, bs, b_scales, biases, row_numbers, outs, full, all_row_numbers = self
        tensors = (shard, a_scale, row_numbers, *bs, *b_scales, *biases, *outs, full, all_row_numbers)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])

    def with_each(self, stand_ins: Sequence[Any]) -> GatherTensors:
        """The same with others in the place of the tensors, in the order of `addresses`."""
        rest = iter(stand_ins)
        shard, a_scale, row_numbers = (None if one is None else next(rest) for one in (self[0], self[1], self[5]))
        lists = [[None if one is None else next(rest) for one in many] for many in (*self[2:5], self.outs)]
        full, all_row_numbers = (None if one is None else next(rest) for one in self[7:])
        every: Any = (shard, a_scale, *lists[:3], row_numbers, lists[3], full, all_row_numbers)
        return GatherTensors(*every)
