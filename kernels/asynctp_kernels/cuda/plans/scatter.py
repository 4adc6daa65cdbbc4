"""Matmuls → reduce-scatter on GPUs: the implementations, one plan each.

    fused        one GEMM stores each rank's rows to local staging and counts finished tiles; the copy engine    push
                 pushes a chunk as soon as it is complete, other ranks' rows first; the reduction of the own
                 rows runs on a stream of its own, beside the end of the GEMM
    decomposed   cuBLAS, one product per range of a destination's rows; the copy engine pushes each after its    push
                 product
    direct       cuBLAS on the whole, then one kernel that pushes and reduces                                    direct
    sequential   cuBLAS on the whole, then NCCL                                                                  plain

The last column is the transport, which all ranks share (`wire`); the rest is each rank's own. But for NCCL the sum over
ranks is in fp32, in rank order, rounded once: the same bits in every run. The data on its way has the dtype of the
program's collective: that of the products, or `sum_dtype`, to which the program converts each product, once rounded,
before it adds them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from asynctp_kernels.compat import new_tensors, scatter_into
from asynctp_kernels.cuda.choose.tiles import Chunks, Tiles, WireChunks, cut, cut_own, in_blocks
from asynctp_kernels.cuda.choose.wire import DIRECT, PUSH, Wire
from asynctp_kernels.cuda.gemm.copy_kernels import push_reduce_kernel, reduce_kernel
from asynctp_kernels.cuda.gemm.gemm import MAX_OPERANDS, b_descriptor, operand_addresses, prepare_gemm, scale_mode
from asynctp_kernels.cuda.gemm.products import Recipe, Scaling, block_recipe, multiply, product, ranges
from asynctp_kernels.cuda.plans.gather import block_for
from asynctp_kernels.cuda.runtime.launch import (
    BESIDE_REGISTERS,
    BESIDE_WARPS,
    REGISTERS,
    Tma,
    align,
    aligned,
    aligned_columns,
    dense,
    describe,
    grid,
    outlines,
    prepare,
)
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import DIRECT_PROGRAMS, MAX_CHUNKS, MAX_OWN, GroupMemory
from asynctp_kernels.cuda.runtime.script import (
    DATA,
    Await,
    PushMoves,
    Record,
    Step,
    Wait,
    Write,
    parts_script,
    push_script,
)
from asynctp_kernels.cuda.runtime.stamps import StampTable, new_table
from asynctp_kernels.layout import ShardLayout, scatter_layout


class Times(NamedTuple):
    """What each product, what is added to them, and all of that is multiplied by."""

    products: tuple[float, ...]
    added: float
    whole: float


@dataclass(frozen=True)
class ScatterCall:
    """What decides a plan; the tensors stand for all tensors of their shapes, strides and dtypes.

    out_dtype: of the products. unscaled_op: the op's name, as it is without scales. sum_dtype: of the result, and of
    the sums that it comes from; None: the products'. added: a term of that dtype, and of the products' shape. factors:
    what each product is multiplied by, once it has that dtype, and maybe one more, for their sum; powers of two, or
    negatives of such. Empty: nothing is.
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

    @property
    def wire_dtype(self) -> torch.dtype:
        """Of the data on its way, and of the result."""
        return self.out_dtype if self.sum_dtype is None else self.sum_dtype

    @property
    def wire(self) -> Wire:
        """What all ranks share of it."""
        layout = self.layout
        kind = "all_reduce" if self.unscaled_op.endswith("all_reduce") else "reduce_scatter"
        size = layout.rows * layout.cols * self.wire_dtype.itemsize
        return Wire(kind, self.world, size, self.wire_dtype, self.reduce_op)

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
        """Of the product, over all ranks."""
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
    def is_empty(self) -> bool:
        """Nothing is multiplied."""
        return self.layout.rows == 0 or self.layout.cols == 0 or any(b.shape[0] == 0 for b in self.b_parts)

    @property
    def recipes(self) -> list[Recipe | None]:
        """Of which blocks the scales of each matmul are; empty where there are no scales."""
        scales = zip(self.b_parts, self.a_scales, self.b_scales, strict=True) if self.a_scales else ()
        return [block_recipe(self.rows, b, a_scale, b_scale) for b, a_scale, b_scale in scales]

    @property
    def times(self) -> Times:
        """What is multiplied, with as few passes over memory as give the program's numbers.

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
        """What one GEMM multiplies at its end, whose sum is that of all products; None where they need unlike numbers.

        Several are multiplied before they are added in the program, and may add up to what has no place in fp32.
        """
        count = len(self.a_parts)
        each, whole = set(self.factors[:count]) or {1.0}, self.factors[count:]
        first = each.pop()
        if each or (count > 1 and abs(first) != 1) or (whole and abs(first) != 1):
            return None
        return first * whole[0] if whole else first


#: As, Bs, A scales, B scales, biases and what is added, as `ScatterCall` has them
Operands = tuple[
    Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None], Tensor | None
]


class ScatterTensors(NamedTuple):
    """All memory of one call: the operands, then what it makes.

    staging: the sum of the products, as the implementation lays it out. out: the result. extras: products apart that
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
        """Of all."""
        a_parts, b_parts, a_scales, b_scales, biases, added, staging, out, extras = self
        tensors = (*a_parts, *b_parts, *a_scales, *b_scales, *biases, added, staging, out, *extras)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])


class ScatterPlan:
    """One call, prepared. `run` gives this rank's shard.

    uses_memory: calls take their turn in the group's memory. cublas: `enqueue` calls cuBLAS.
    staging_shape, extra_shape: of the sum of the products, and of one apart.
    stamps: of the GEMM's tiles, if they are asked for.
    """

    name: str
    uses_memory = True
    cublas = True
    stamps: StampTable | None = None
    staging_shape: tuple[int, ...]
    extra_shape: tuple[int, ...]

    def __init__(self, call: ScatterCall, memory: GroupMemory) -> None:
        self.memory, self.layout, self.outer = memory, call.layout, call.outer
        self.scaling, self.wire_dtype, self.out_dtype = call.scaling, call.wire_dtype, call.sum_dtype or call.out_dtype
        self.product_dtype, self.count = call.out_dtype, len(call.b_parts)
        self.factor = 1.0 / memory.world if call.reduce_op == "avg" else 1.0
        self.times = call.times
        self.row_bytes = self.layout.cols * call.wire_dtype.itemsize
        self.part_bytes = self.layout.rows * self.row_bytes
        self.device = call.a_parts[0].device
        self.device_index: int = self.device.index
        self.new_output = new_tensors(self.layout.shard_shape, self.out_dtype, self.device)
        self.number = memory.new_plan()

    @functools.cached_property
    def new_staging(self) -> Callable[[], Tensor]:
        return new_tensors(self.staging_shape, self.wire_dtype, self.device)

    @functools.cached_property
    def new_extra(self) -> Callable[[], Tensor]:
        return new_tensors(self.extra_shape, self.product_dtype, self.device)

    def is_apart(self, i: int) -> bool:
        """Product number `i` is not made where the sum is: all but the first, and that too if it is converted."""
        return i > 0 or self.product_dtype != self.wire_dtype

    def new_extras(self) -> list[Tensor]:
        """Where products are made that are apart, one after the other."""
        return [self.new_extra()] if self.is_apart(self.count - 1) else []

    def add_up(
        self,
        call: ScatterTensors,
        a_parts: Sequence[Tensor],
        a_scales: Sequence[Tensor],
        added: Tensor | None,
        place: Tensor,
    ) -> None:
        """The sum of the products of these rows, and of what is added to them, into `place`."""
        for i, a in enumerate(a_parts):
            out = call.extras[0] if self.is_apart(i) else place
            a_scale, b_scale = (a_scales[i], call.b_scales[i]) if a_scales else (None, None)
            # that is done as it is added, or converted, unless the program's product in float16 may become too large
            at_once = out is place or place.dtype == torch.float16
            now, then = (self.times.products[i], 1.0) if at_once else (1.0, self.times.products[i])
            product(a, call.b_parts[i], call.biases[i], a_scale, b_scale, self.scaling, out=out, factor=now)
            if i:
                place.add_(out, alpha=then)
            elif out is not place:
                multiply(place.copy_(out), then)
        if added is not None:
            place.add_(added, alpha=self.times.added)
        multiply(place, self.times.whole)

    def tensors(self, operands: Operands) -> ScatterTensors:
        """The operands as they come, and new memory for what a call makes."""
        return ScatterTensors(*operands, self.new_staging(), self.new_output(), self.new_extras())

    def with_kernel_layout(self, call: ScatterTensors) -> ScatterTensors:
        """The call with its operands as the implementation reads them: copies of those that lie otherwise."""
        if call.added is None:
            return call
        return call._replace(added=call.added.contiguous())  # so ranges of its rows are views

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        """Everything that a call does on the GPU, behind `stream` and with `stream` behind it."""
        raise NotImplementedError

    def run(
        self,
        a_parts: Sequence[Tensor],
        b_parts: Sequence[Tensor],
        a_scales: Sequence[Tensor],
        b_scales: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        added: Tensor | None = None,
    ) -> Tensor:
        call = self.tensors((a_parts, b_parts, a_scales, b_scales, biases, added))
        self.make(driver.current_stream(self.device_index), call)
        return call.out

    def make(self, stream: int, call: ScatterTensors) -> None:
        """Enqueue the call, in its turn, or launch a recording of it."""
        if self.stamps is not None:
            self.stamps.begin(stream, self.memory.last)

        def enqueue(at: int) -> None:
            self.enqueue(at, self.with_kernel_layout(call))

        self.memory.call(stream, self.number, call.addresses(), self.cublas, enqueue)


class PushedScatter(ScatterPlan):
    """The copies and the reduction of every implementation but the direct one.

    streams_wait: the reduction is launched after waits of its stream for all parts.
    """

    streams_wait = driver.IN_ORDER

    def __init__(
        self,
        call: ScatterCall,
        memory: GroupMemory,
        chunks: Chunks,
        own: Chunks,
        tiles_n: int,
        reduce_warps: int = BESIDE_WARPS,
    ) -> None:
        """chunks, own: how others' rows are cut, and the own ones. tiles_n: counted of each row tile, when finished."""
        super().__init__(call, memory)
        self.chunks, self.own, self.tiles_n = chunks, own, tiles_n
        rank, world, layout = memory.rank, memory.world, self.layout
        self.staging_shape = (world, layout.rows, layout.cols)  # by destination: what goes to one rank is contiguous
        inbox = memory.require("box", (world - 1) * self.part_bytes)
        self.inbox, self.counts = inbox.peers[rank], self.progress(rank, 0)
        self.wire_chunks = WireChunks(self.part_bytes)
        pieces = [(first * self.row_bytes, end * self.row_bytes) for first, end in chunks.rows]
        sizes = (inbox.peers, self.part_bytes, self.wire_chunks, pieces)
        moves = PushMoves(*sizes, DATA, self.part_bytes, memory.signature(call.wire, PUSH))
        self.play = memory.compiled(push_script(memory.channel, moves, self.ready))
        self.await_parts = memory.compiled(parts_script(memory.channel))
        self._compile_reduction(call, reduce_warps)

    def progress(self, dst: int, chunk: int) -> int:
        return self.memory.progress + (dst * MAX_OWN + chunk) * 4

    def ready(self, dst: int, chunk: int) -> list[Step]:
        """Steps before a piece for `dst` is sent: it is complete then."""
        raise NotImplementedError

    def _compile_reduction(self, call: ScatterCall, warps: int) -> None:
        memory, n = self.memory, self.layout.cols
        widest = max(self.wire_dtype.itemsize, self.out_dtype.itemsize)
        # As much for fewer warps, so that as many loads are on their way: docs/results/2026-11-25-h200x2/reduction.txt.
        # Of more ranks they are anyway, and registers would be spilled.
        block = 32 * (BESIDE_WARPS if memory.world <= 4 else warps) * (32 // widest)
        size = self.layout.rows * n
        programs = grid(-(-size // block), driver.processors(self.device_index))
        own_size, chunk_size = self.own.rows[0][1] * n, self.wire_chunks.chunk // self.wire_dtype.itemsize
        # elements that are read and written at once: two layouts would need shared memory, which the GEMM may have
        together = math.gcd(16 // widest, own_size if len(self.own) > 1 else 0)
        tiles, own_tiles = sum(self.own.row_tiles) * self.tiles_n, self.own.tiles * self.tiles_n
        sent, out = (call.a_parts[0].new_empty(size, dtype=dtype) for dtype in (self.wire_dtype, self.out_dtype))
        self.reduce_numbers = [size, own_size, chunk_size, tiles, own_tiles, self.factor, memory.rank]
        args = [sent, sent, out, *[memory.local] * 3, *self.reduce_numbers]
        constants = {
            "WORLD": memory.world,
            "MAX_CHUNKS": MAX_CHUNKS,
            "MAX_OWN": MAX_OWN,
            "ALIGN": together,
            "BLOCK": block,
            "PROGRAMS": programs,
        }
        self.reduce = prepare(reduce_kernel, programs, args, constants, warps, num_stages=1, maxnreg=BESIDE_REGISTERS)

    def push_and_reduce(self, side: int, staging: Tensor, out: Tensor, ready: int) -> None:
        """Enqueue all pushes on `side`, and the reduction, on a stream of its own, after the event `ready`."""
        memory = self.memory
        base = staging.data_ptr()
        self.play(side, (0, base, 0))
        driver.record_event(memory.end, side)
        driver.wait_event(memory.reducer, ready)
        memory.after_flights(memory.reducer)
        if self.streams_wait:
            self.await_parts(memory.reducer, ())
        self.reduce(
            memory.reducer,
            [
                base + memory.rank * self.part_bytes,
                self.inbox,
                out.data_ptr(),
                self.counts,
                memory.full.at(memory.rank),
                memory.scatter_done.data_ptr(),
                *self.reduce_numbers,
            ],
        )
        driver.record_event(memory.reduced, memory.reducer)

    def finish(self, stream: int) -> None:
        """Join both streams."""
        driver.wait_event(stream, self.memory.end)
        driver.wait_event(stream, self.memory.reduced)


class FusedScatter(PushedScatter):
    """One GEMM; a chunk is pushed when its tiles are counted.

    Of several products the sum is in fp32, each scaled before it is added, and rounded once.
    """

    name = "fused"
    cublas = False

    def __init__(self, call: ScatterCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        layout = call.layout
        rows = (call.outer, layout.inner, tiles.block_m)
        tiles_n = -(-layout.cols // tiles.block_n)
        chunks = cut(*rows, wanted_chunks)
        tiles = replace(tiles, group_m=min(tiles.group_m, chunks.tiles))
        own = cut_own(chunks, *rows, tiles.group_m)
        self.chunk_tiles = [count * tiles_n for count in chunks.row_tiles]
        beside = (REGISTERS - 32 * tiles.warps * tiles.registers) // (32 * BESIDE_REGISTERS)
        super().__init__(call, memory, chunks, own, tiles_n, min(beside, BESIDE_WARPS))
        self._compile(call, tiles, programs)

    def ready(self, dst: int, chunk: int) -> list[Step]:
        first = dst == (self.memory.rank + 1) % self.memory.world and chunk == 0
        running: list[Step] = [Record(self.memory.running)] if first else []
        word = self.progress(dst, chunk)
        return [Wait(word, self.chunk_tiles[chunk]), Write(word, 0), *running]

    def _compile(self, call: ScatterCall, tiles: Tiles, programs: int) -> None:
        memory, layout = self.memory, self.layout
        inner, n, world = layout.inner, layout.cols, memory.world
        depths = [b.shape[0] for b in call.b_parts]
        self.a_like = [
            describe(a, [self.outer * world, inner, k], [inner * k, k, 1], [1, tiles.block_m, tiles.block_k])
            for a, k in zip([aligned(a) for a in call.a_parts], depths, strict=True)
        ]
        self.b_like = [b_descriptor(aligned_columns(b), tiles) for b in call.b_parts]
        staging = self.new_staging()
        block = tiles.stored
        self.c_like = describe(staging, [world * self.outer, inner, n], [inner * n, n, 1], block)
        count, dummy = len(depths), memory.dummy
        self.padding = [None] * (MAX_OPERANDS - count)
        bias = call.biases[0]
        depths = depths + [0] * (MAX_OPERANDS - count)
        row_tiles = self.outer * -(-inner // tiles.block_m)
        tile_count = world * row_tiles * -(-n // tiles.block_n)
        programs = grid(tile_count, programs)
        self.stamps = new_table(call.op, memory, tile_count, first=1)
        done = memory.scatter_done if self.stamps is None else self.stamps.done
        chunk_tiles = (self.chunks.tiles, self.own.tiles)
        self.numbers = [self.outer, inner, *depths, n, 0, 0, 0, memory.rank, world, *chunk_tiles, 1]
        args = [
            *self.a_like, *self.padding, *self.b_like, *self.padding, self.c_like, None, None, None,
            *[dummy] * 8, *[dummy if bias is None else bias] * 4, memory.local, done, *self.numbers,
        ]  # fmt: skip
        modes = [scale_mode(scales[0] if scales else None) for scales in (call.a_scales, call.b_scales)]
        self.launch = prepare_gemm(
            args, programs, tiles, call.b_parts, bias, (modes[0], modes[1]), self.wire_dtype, gathers=False,
            stamps=self.stamps is not None, rounded=call.out_dtype, factor=call.gemm_factor or 1.0,
        )  # fmt: skip
        self.done = done.data_ptr()
        self.a_like, self.b_like = outlines(self.a_like), outlines(self.b_like)
        self.c_like = Tma(self.c_like, 0)
        self.unused = memory.local.data_ptr()

    def new_extras(self) -> list[Tensor]:
        return []

    def with_kernel_layout(self, call: ScatterTensors) -> ScatterTensors:
        a_parts, b_parts = [aligned(a) for a in call.a_parts], [aligned_columns(b) for b in call.b_parts]
        a_scales, b_scales, biases = dense(call.a_scales), dense(call.b_scales), dense(call.biases)
        return call._replace(a_parts=a_parts, b_parts=b_parts, a_scales=a_scales, b_scales=b_scales, biases=biases)

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        memory, unused, bias = self.memory, self.unused, call.biases[0]
        memory.fork(stream)
        self.launch(
            stream,
            [
                *[Tma(like, a.data_ptr()) for like, a in zip(self.a_like, call.a_parts, strict=True)],
                *self.padding,
                *[Tma(like, b.data_ptr()) for like, b in zip(self.b_like, call.b_parts, strict=True)],
                *self.padding,
                Tma(self.c_like, call.staging.data_ptr()),
                None,
                None,
                None,
                *operand_addresses(call.a_scales, unused),
                *operand_addresses(call.b_scales, unused),
                unused if bias is None else bias.data_ptr(),
                unused,
                unused,
                unused,
                memory.progress,
                self.done,
                *self.numbers,
            ],
        )
        self.push_and_reduce(memory.stream, call.staging, call.out, memory.running)
        self.finish(stream)


class DecomposedScatter(PushedScatter):
    """cuBLAS for each range of a destination's rows, own rows last. Only for a few: one in each outer block.

    The rows of block p and destination r are range number p * world + r of all.
    """

    name = "decomposed"

    def __init__(self, call: ScatterCall, memory: GroupMemory) -> None:
        blocks = in_blocks(call.outer, call.layout.inner)
        super().__init__(call, memory, blocks, blocks, tiles_n=0)
        self.extra_shape = (self.layout.inner, self.layout.cols)

    def ready(self, dst: int, chunk: int) -> list[Step]:
        return [Await(self.memory.event(dst, chunk))]

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        memory, world, outer = self.memory, self.memory.world, self.outer
        memory.fork(stream)
        count = outer * world
        operands = [ranges(a, count) for a in call.a_parts]
        places = call.staging.view(world, outer, self.layout.inner, self.layout.cols)
        scales = [ranges(scale, count) if scale.numel() != 1 else [scale] * count for scale in call.a_scales]
        added = [None] * count if call.added is None else ranges(call.added, count)
        for dst in ((memory.rank + step) % world for step in range(1, world + 1)):
            for block in range(outer):
                part = block * world + dst
                rows, factors = ([parts[part] for parts in of_ranges] for of_ranges in (operands, scales))
                self.add_up(call, rows, factors, added[part], places[dst, block])
                driver.record_event(memory.event(dst, block), stream)
        self.push_and_reduce(memory.stream, call.staging, call.out, memory.event(memory.rank, outer - 1))
        self.finish(stream)


class WholeScatter(ScatterPlan):
    """cuBLAS on the whole, then a reduce-scatter: nothing overlaps."""

    def __init__(self, call: ScatterCall, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        self.staging_shape = self.extra_shape = (call.rows, call.b_parts[0].shape[1])

    def move(self, stream: int, call: ScatterTensors) -> None:
        """Fill the result with this rank's part of the sum of all ranks' sums of products."""
        raise NotImplementedError

    def with_kernel_layout(self, call: ScatterTensors) -> ScatterTensors:
        return super().with_kernel_layout(call)._replace(a_parts=[a.reshape(-1, a.shape[-1]) for a in call.a_parts])

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        added = None if call.added is None else call.added.view(call.staging.shape)
        self.add_up(call, call.a_parts, call.a_scales, added, call.staging)
        self.move(stream, call)


class DirectScatter(WholeScatter):
    """One kernel that pushes and reduces."""

    name = "direct"

    def __init__(self, call: ScatterCall, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        layout = self.layout
        size = layout.rows * layout.cols
        part = align(self.part_bytes)
        area, words = memory.direct(part * memory.world)
        self.signature = signature = memory.signature(call.wire, DIRECT)
        block = block_for(size, 8192, DIRECT_PROGRAMS)
        programs = grid(-(-size // block), DIRECT_PROGRAMS)
        sent, out = (call.a_parts[0].new_empty(size, dtype=dtype) for dtype in (self.wire_dtype, self.out_dtype))
        args = [
            sent, out, size, layout.cols, layout.inner, area.table.data_ptr(), words.table.data_ptr(),
            area.size // 2, part, memory.epoch, memory.direct_done, memory.doing, memory.bound, memory.status,
            signature, signature, self.factor, memory.rank,
        ]  # fmt: skip
        constants = {
            "WORLD": memory.world,
            "CONTIGUOUS": layout.whole,
            "ALONG_LAST": layout.along_last,
            "MAX_PROGRAMS": DIRECT_PROGRAMS,
            "PROGRAMS": programs,
            "BLOCK": block,
        }
        self.launch = prepare(push_reduce_kernel, programs, args, constants, 8)
        self.tail = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in args[2:]]

    def move(self, stream: int, call: ScatterTensors) -> None:
        self.launch(stream, [call.staging.data_ptr(), call.out.data_ptr(), *self.tail])


class SequentialScatter(WholeScatter):
    """NCCL's reduce-scatter. Only for one outer block, where a rank's part is a range of rows."""

    name = "sequential"
    uses_memory = False

    def __init__(self, call: ScatterCall, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        self.reduce_op, self.wire_dtype = call.reduce_op, self.out_dtype  # NCCL adds in what it moves

    def make(self, stream: int, call: ScatterTensors) -> None:
        """Neither the group's memory nor its order of calls matters, and NCCL's calls are not recorded."""
        self.enqueue(stream, self.with_kernel_layout(call))

    def move(self, stream: int, call: ScatterTensors) -> None:
        scatter_into(call.out, call.staging, self.reduce_op, self.memory.group)
