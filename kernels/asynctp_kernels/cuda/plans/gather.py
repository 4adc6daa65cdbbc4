"""All-gather → matmuls on GPUs: what the plans of all implementations have in common.

A plan computes, beside a transport that brings the others' rows (`gather_transports`), or after one kernel or
collective. It is made once per (shapes, strides, dtypes, options) and group, and holds everything that does not change:
addresses of words, the copy stream's script, the compiled kernel. A call only fills in addresses: it makes memory for
its results, copies operands that do not lie as the kernels read them, and enqueues, or launches the plan's graph
(`edited`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asynctp_kernels.cuda.checks import gathered_scaled_at_end
from asynctp_kernels.cuda.choose.implementation import SiteForm
from asynctp_kernels.cuda.facts import GatherFacts
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.cublas import matmul
from asynctp_kernels.cuda.gemm.own_matmul import OwnMatmul, matmuls_for
from asynctp_kernels.cuda.plans.plan import Plan
from asynctp_kernels.cuda.runtime.launch import aligned, aligned_columns, dense
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.torch_private import new_tensors

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


#: A shard, Bs, biases, A scale, B scales, and what travels along: as `GatherFacts` has them
GatherOperands = tuple[
    Tensor, Sequence[Tensor], Sequence[Tensor | None], Tensor | None, Sequence[Tensor], Tensor | None
]


class GatherTensors(NamedTuple):
    """All memory of one call.

    shard, bs, biases, a_scale, b_scales: the operands.
    row_numbers: what is gathered with the shard: `a_scale`, or what is only returned.
    outs: the matmuls. full: the gathered A, where it is returned or multiplied whole. all_row_numbers: the gathered
    numbers [*, K/128 or 1], where they are.
    """

    shard: Tensor
    bs: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    a_scale: Tensor | None
    b_scales: Sequence[Tensor]
    row_numbers: Tensor | None
    outs: list[Tensor]
    full: Tensor | None
    all_row_numbers: Tensor | None

    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors, in the order of the fields."""
        shard, bs, biases, a_scale, b_scales, row_numbers, outs, full, all_row_numbers = self
        tensors = (shard, *bs, *biases, a_scale, *b_scales, row_numbers, *outs, full, all_row_numbers)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])


class GatherPlan(Plan):
    """One call, prepared. `run` gives the matmuls, then the gathered A if asked for, then the gathered `along_shard`.

    fills_outs, has_full, has_numbers: the call makes memory for its matmuls, the gathered A, and numbers.
    kernel: The one of all matmuls, where these are not cuBLAS's.
    """

    fills_outs = True
    kernel: OwnMatmul | None = None

    def __init__(self, call: GatherFacts, memory: GroupMemory, gathers_all: bool) -> None:
        """gathers_all: A call gathers all of A, and all numbers that travel, whether they are returned or not."""
        self.memory, self.layout, self.outer, self.is_dense = memory, call.layout, call.outer, call.is_dense
        self.scaling, self.out_dtype = call.scaling, call.matmul_dtype
        self.return_a_full, self.scale_travels = call.return_a_full, call.gather_a_scale
        self.has_full = self.return_a_full or gathers_all
        self.has_numbers = call.row_numbers is not None and (gathers_all or not call.gather_a_scale)
        self.number_count = 0 if call.row_numbers is None else call.row_numbers.numel()
        self.widths = [b.shape[1] for b in call.bs]
        self.device_index: int = call.device_index
        self._prepare_tensors(call)

    def _prepare_tensors(self, call: GatherFacts) -> None:
        """Functions that make a call's memory: A whole, the matmuls, and all ranks' numbers [*, K/128 or 1]."""
        full, device, row_numbers = self.layout.full_shape, call.a_shard.device, call.row_numbers
        self.new_full = new_tensors(full, call.a_shard.dtype, device)
        self.new_outs = [new_tensors(shape, self.out_dtype, device) for shape in call.out_shapes]
        if row_numbers is not None:
            count, along_k = self.memory.world * self.number_count, row_numbers.shape[-1]
            self.new_numbers = new_tensors((count // along_k, along_k), row_numbers.dtype, device)

    def tensors(self, operands: GatherOperands) -> GatherTensors:
        """The operands as they come, and new memory for what a call makes."""
        row_numbers = operands[3] if self.scale_travels else operands[5]
        all_row_numbers = self.new_numbers() if self.has_numbers else None
        outs = [new() for new in self.new_outs] if self.fills_outs else []
        full = self.new_full() if self.has_full else None
        every = (*operands[:5], row_numbers, outs, full, all_row_numbers)
        return tuple.__new__(GatherTensors, every)  # as C makes it

    def with_kernel_layout(self, call: GatherTensors) -> GatherTensors:
        if self.kernel is not None:
            return self.with_gemm_layout(call)
        return self._aligned(call)

    def _aligned(self, call: GatherTensors) -> GatherTensors:
        """The call with a shard, and numbers of its rows, at multiples of 16 bytes."""
        shard, row_numbers = aligned(call.shard), None if call.row_numbers is None else aligned(call.row_numbers)
        if shard is call.shard and row_numbers is call.row_numbers:
            return call
        return call._replace(
            shard=shard, a_scale=row_numbers if self.scale_travels else call.a_scale, row_numbers=row_numbers
        )

    def with_gemm_layout(self, call: GatherTensors) -> GatherTensors:
        """The same where a GEMM of ours reads all operands."""
        call, bs = self._aligned(call), [aligned_columns(b) for b in call.bs]
        (a_scale,) = dense([call.a_scale])
        return call._replace(a_scale=a_scale, bs=bs, b_scales=dense(call.b_scales), biases=dense(call.biases))

    def results(self, call: GatherTensors) -> list[Tensor]:
        """The tensors that the call returns."""
        results = list(call.outs)
        if self.return_a_full and call.full is not None:
            results.append(call.full)
        if call.all_row_numbers is not None and not self.scale_travels:
            results.append(call.all_row_numbers.view(*self.layout.full_shape[:-1], call.all_row_numbers.shape[-1]))
        return results

    def site_form(self, lead: Sequence[int]) -> SiteForm | None:
        """How calls are made whose operands lie as they are read; None if results are views. lead: Not looked at."""
        if self.has_numbers and not self.scale_travels:
            return None
        makers = [*self.new_outs, *[self.new_full] * self.has_full, *([self.new_numbers] if self.has_numbers else [])]
        operands, returned = (0, 1, 2, 3, 4, 3 if self.scale_travels else 5), len(self.widths) + self.return_a_full
        return operands, tuple(makers), returned, self.waits_for_in_flight, self.reads_landed

    def run(self, *operands: Any) -> list[Tensor]:
        """Make the call. operands: `GatherOperands`."""
        call = self.tensors(operands)
        self.make(driver.current_stream(self.device_index), call)
        return self.results(call)

    def multiply(
        self, call: GatherTensors, a: Tensor, a_scale: Tensor | None, places: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """`a` by every B, each into its place if it has one: on cuBLAS, or, if all have, by `kernel`."""
        if self.kernel is not None:
            stream, outs = driver.current_stream(self.device_index), [place for place in places if place is not None]
            self.kernel(stream, Matrices(a, call.bs, outs, a_scale, call.b_scales, call.biases))
            return outs
        b_scales: Sequence[Tensor | None] = call.b_scales or [None] * len(places)
        operands = zip(call.bs, call.biases, b_scales, places, strict=True)
        return [matmul(a, b, bias, a_scale, b_scale, self.scaling, out=place) for b, bias, b_scale, place in operands]


class WholeGather(GatherPlan):
    """An all-gather, which `enqueue` makes, then matmuls of the whole: nothing overlaps.

    PyTorch's matmuls are outside of the call's turn, as the program's own are. Those of `kernel` are one kernel, which
    `enqueue` launches too.
    """

    fills_outs = False

    def __init__(self, call: GatherFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory, gathers_all=True)
        self.no_places = [None] * len(self.widths)
        self.out_shapes = [(*self.layout.full_shape[:-1], width) for width in self.widths]
        self.is_flat = len(self.layout.full_shape) == 2
        self.kernel = self._kernel(call)
        self.fills_outs = self.kernel is not None

    def _kernel(self, call: GatherFacts) -> OwnMatmul | None:
        """The kernel of all matmuls, or cuBLASLt's call of each; None where these are left to PyTorch."""
        if call.is_empty or gathered_scaled_at_end(call) is not None:
            return None
        a, outs = self.new_full().view(call.rows, -1), [new().view(call.rows, -1) for new in self.new_outs]
        a_scale = self.new_numbers() if self.scale_travels else call.a_scale
        matrices = Matrices(a, call.bs, outs, a_scale, call.b_scales, call.biases)
        return matmuls_for(matrices, call.invariant, fast=call.use_fast_accum)

    def multiply_whole(self, stream: int, call: GatherTensors, kernel: OwnMatmul) -> None:
        """Enqueue all matmuls, once the whole is there."""
        assert call.full is not None
        row_scale = call.all_row_numbers if self.scale_travels else call.a_scale
        kernel(stream, Matrices(call.full, call.bs, call.outs, row_scale, call.b_scales, call.biases))

    def results(self, call: GatherTensors) -> list[Tensor]:
        if self.kernel is not None:
            return super().results(call)
        assert call.full is not None
        row_scale = call.all_row_numbers if self.scale_travels else call.a_scale
        rows = call.full if self.is_flat else call.full.view(self.layout.full_rows, self.layout.full_cols)
        outs = self.multiply(call, rows, row_scale, self.no_places)
        if not self.is_flat:
            outs = [out.view(shape) for out, shape in zip(outs, self.out_shapes, strict=True)]
        return super().results(call._replace(outs=outs))
