"""`direct`: one kernel that moves all data, before or after the matmuls of the whole; nothing overlaps.

These are cuBLAS's, or one kernel of ours: of few rows, and of batch-invariant calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asynctp_kernels.cuda.checks import (
    ANY,
    matmul_takes_scattered,
    matmul_takes_whole,
    scale_can_be_gathered,
    whole_in_cublas_blocks,
)
from asynctp_kernels.cuda.choose import cost
from asynctp_kernels.cuda.choose.wire import DIRECT, EXTREMES
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.copy_kernels import push_all_reduce_kernel, push_gather_kernel, push_reduce_kernel
from asynctp_kernels.cuda.plans.gather import GatherTensors, ShardSizes, WholeGather
from asynctp_kernels.cuda.plans.scatter import ScatterTensors, WholeScatter
from asynctp_kernels.cuda.runtime.edited import new_graph
from asynctp_kernels.cuda.runtime.launch import Launch, align, aligned, grid, prepare
from asynctp_kernels.cuda.runtime.memory import DIRECT_PROGRAMS, GroupMemory

#: bytes that a program moves at a time to or from a rank, and to or from all; its warps
LARGEST_RUN, LEAST_RUN, LARGEST_MOVE = 1 << 14, 1 << 12, 1 << 16
WARPS, WARPS_OF_ONE_SHOT = 16, 8


def _cut(part_bytes: int, world: int) -> tuple[int, int, int]:
    """How all ranks cut the bytes that go to one of them: lanes, bytes of a run, and programs.

    Lanes are the ranks, and as many more as make a power of two. A run is moved at a time, to all of them.
    """
    lanes = 1 << (world - 1).bit_length()
    run = min(LARGEST_RUN, LARGEST_MOVE // lanes)
    while run > LEAST_RUN and part_bytes < run * DIRECT_PROGRAMS:
        run //= 2
    return lanes, run, grid(-(-part_bytes // run), DIRECT_PROGRAMS)


class DirectGather(WholeGather):
    """One kernel for the all-gather."""

    name = "direct"
    transports = (DIRECT,)
    refuses = (*ANY, scale_can_be_gathered, matmul_takes_whole, whole_in_cublas_blocks)
    estimate = cost.direct

    def __init__(self, call: GatherFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        layout, sizes = self.layout, ShardSizes(call)
        scale_offset = align(sizes.shard_bytes)
        part = align(scale_offset + sizes.number_bytes)
        area, words = memory.direct(part * memory.world)
        slot = area.size // 2
        lanes, run_bytes, programs = _cut(sizes.shard_bytes, memory.world)
        counts = (sizes.number_count, sizes.number_count // self.outer)
        numbers = [sizes.units, sizes.row_bytes // sizes.unit_bytes, layout.inner, *counts]
        self.signature = signature = memory.signature(call.wire, DIRECT)
        memory_args = [
            area.table, words.table, slot, part, scale_offset, memory.epoch, memory.done("direct"), memory.doing,
            memory.bound, memory.status, signature, signature, memory.rank,
        ]  # fmt: skip
        shard, full = aligned(call.a_shard), self.new_full()
        numbers_like = call.a_scale if call.row_numbers is None else call.row_numbers
        scale = memory.dummy if numbers_like is None else aligned(numbers_like)
        args = [sizes.as_units(shard), scale, sizes.as_units(full), memory.dummy, *numbers, *memory_args]
        args[9], args[10] = area.table.data_ptr(), words.table.data_ptr()
        constants = {
            "WORLD": memory.world,
            "LANES": lanes,
            "SCALE_TRAVELS": sizes.number_count > 0,
            "CONTIGUOUS": layout.whole,
            "ALONG_LAST": layout.along_last,
            "MAX_PROGRAMS": DIRECT_PROGRAMS,
            "PROGRAMS": programs,
            "BLOCK": run_bytes // sizes.unit_bytes,
            "NUMBERS": 512,
        }
        self.launch = prepare(push_gather_kernel, programs, args, constants, WARPS)
        self.tail = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in args[4:]]
        if self.kernel is not None or not call.bs:
            self.graph = new_graph()

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        dummy = self.memory.dummy
        own, whole = (dummy if tensor is None else tensor for tensor in (call.row_numbers, call.all_row_numbers))
        assert call.full is not None
        pointers = [tensor.data_ptr() for tensor in (call.shard, own, call.full, whole)]
        self.launch(stream, [*pointers, *self.tail])
        if self.kernel is not None:
            self.multiply_whole(stream, call, self.kernel)


class _Direct(WholeScatter):
    """Matmuls before one kernel of the whole."""

    launch: Launch
    tail: list[Any]

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        self.kernels = self._kernels(call, {call.rows})
        one = self.count == 1 and bool(self.kernels[0]) and not self.is_apart(0)
        self.is_ours = one and call.added is None and self.times.whole == 1 and self.real is None
        self.graph = new_graph() if self.is_ours else None

    def with_kernel_layout(self, call: ScatterTensors) -> ScatterTensors:
        return self.with_gemm_layout(call) if self.is_ours else call

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        if call.b_parts and self.is_ours:
            a_scale = call.a_scales[0] if call.a_scales else None
            (kernel,) = self.kernels[0].values()
            matrices = Matrices(call.a_parts[0], call.b_parts, [call.staging], a_scale, call.b_scales, call.biases)
            kernel(stream, matrices)
        self.launch(stream, [call.staging.data_ptr(), call.out.data_ptr(), *self.tail])


class DirectScatter(_Direct):
    """One kernel that pushes and reduces."""

    name = "direct"
    transports = (DIRECT,)
    refuses = (*ANY, matmul_takes_scattered, whole_in_cublas_blocks)
    estimate = cost.direct

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        layout = self.layout
        size = layout.rows * layout.cols
        part = align(self.part_bytes)
        area, words = memory.direct(part * memory.world)
        self.signature = signature = memory.signature(call.wire, DIRECT)
        lanes, run_bytes, programs = _cut(self.part_bytes, memory.world)
        sent, out = (call.a_parts[0].new_empty(size, dtype=dtype) for dtype in (self.wire_dtype, self.out_dtype))
        args = [
            sent, out, size, layout.cols, layout.inner, area.table.data_ptr(), words.table.data_ptr(),
            area.size // 2, part, memory.epoch, memory.done("direct"), memory.doing, memory.bound, memory.status,
            signature, signature, self.factor, memory.rank,
        ]  # fmt: skip
        constants = {
            "WORLD": memory.world,
            "LANES": lanes,
            "CONTIGUOUS": layout.whole,
            "ALONG_LAST": layout.along_last,
            "MAX_PROGRAMS": DIRECT_PROGRAMS,
            "PROGRAMS": programs,
            "BLOCK": run_bytes // self.wire_dtype.itemsize,
        }
        self.launch = prepare(push_reduce_kernel, programs, args, constants, WARPS)
        self.tail = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in args[2:]]


class DirectAllReduce(_Direct):
    """One kernel that pushes and adds, in one shot or two: the whole sum, or extreme, in the place of the matmuls."""

    name = "direct"
    transports = (DIRECT,)
    refuses = DirectScatter.refuses
    estimate = cost.direct_all_reduce
    in_place = True

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        wire, world, itemsize = call.wire, memory.world, call.wire_dtype.itemsize
        size, shots = wire.bytes // itemsize, wire.shots
        # parts of whole loads, cut by the number of bytes alone
        part = size if shots == 1 else -(-wire.bytes // (16 * world)) * 16 // itemsize
        part_bytes = align(part * itemsize)
        area, words = memory.direct(part_bytes * world * shots)
        self.signature = signature = memory.signature(wire, DIRECT)
        lanes, run_bytes, programs = _cut(part * itemsize, world)
        dtype = torch.uint8 if self.wire_dtype == torch.bool else self.wire_dtype  # Triton has no maximum of bool
        like = call.a_parts[0].new_empty(self.staging_shape, dtype=dtype)
        args = [
            like, like, size, part, area.table.data_ptr(), words.table.data_ptr(), area.size // 2, part_bytes,
            memory.epoch, memory.done("direct"), memory.doing, memory.bound, memory.status, signature, signature,
            self.factor, memory.rank,
        ]  # fmt: skip
        constants = {
            "WORLD": world,
            "REDUCE": wire.reduce_op if wire.reduce_op in EXTREMES else "sum",
            "SHOTS": shots,
            "LANES": lanes,
            "MAX_PROGRAMS": DIRECT_PROGRAMS,
            "PROGRAMS": programs,
            "BLOCK": run_bytes // itemsize,
        }
        warps = WARPS if shots == 2 else WARPS_OF_ONE_SHOT
        self.launch = prepare(push_all_reduce_kernel, programs, args, constants, warps)
        self.tail = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in args[2:]]
        self.new_output = self.new_staging
