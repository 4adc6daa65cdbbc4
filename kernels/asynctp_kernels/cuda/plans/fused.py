"""`fused`: one GEMM that starts on the own rows, or ends with them, while copy engines move the others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from asynctp_kernels.cuda.choose.tiles import Tiles, cut, cut_own
from asynctp_kernels.cuda.gemm.gemm import MAX_OPERANDS, b_descriptor, operand_addresses, prepare_gemm, scale_mode
from asynctp_kernels.cuda.plans.gather import GatherPlan
from asynctp_kernels.cuda.plans.gather_call import GatherCall, GatherTensors
from asynctp_kernels.cuda.plans.gather_transports import GatherPull, GatherPush, GatherTransport, by_word
from asynctp_kernels.cuda.plans.scatter import PushedScatter
from asynctp_kernels.cuda.plans.scatter_call import ScatterCall, ScatterTensors
from asynctp_kernels.cuda.runtime.launch import (
    BESIDE_REGISTERS,
    BESIDE_WARPS,
    REGISTERS,
    Tma,
    aligned,
    aligned_columns,
    dense,
    describe,
    grid,
    outlines,
)
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.cuda.runtime.script import Record, Step, Wait, Write
from asynctp_kernels.cuda.runtime.stamps import new_table


class FusedGather(GatherPlan):
    """One GEMM that consumes chunks as they arrive: it polls words, of senders or of the own copy stream.

    Pushed chunks it reads in the inbox, pulled ones where the gathered A is returned.
    """

    name = "fused"
    cublas = False
    transport: GatherTransport

    def __init__(self, call: GatherCall, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        if call.kept:
            chunks = cut(call.outer, call.layout.inner, tiles.block_m, wanted_chunks)
            self.transport = GatherPull(call, memory, chunks, by_word(memory))
        else:
            self.transport = GatherPush(call, memory, wanted_chunks)
        super().__init__(call, memory, whole=call.kept)
        self.reads_landed = self.transport.reads_landed
        self._compile(call, tiles, programs)
        self.waits_for_in_flight = self.transport.make_room(self.launch)

    def _compile(self, call: GatherCall, tiles: Tiles, programs: int) -> None:
        memory, layout, transport = self.memory, self.layout, self.transport
        inner, k = layout.inner, layout.cols
        rows, blocks = [1, tiles.block_m, tiles.block_k], tiles.stored
        a_strides = [inner * k, k, 1]
        self.a_own = describe(aligned(call.a_shard), [self.outer, inner, k], a_strides, rows)
        inbox = transport.received is not None
        example = self.new_full() if transport.received is None else transport.received
        self.a_come = describe(example, [self.outer * (memory.world - inbox), inner, k], a_strides, rows)
        self.bs = [b_descriptor(aligned_columns(b), tiles) for b in call.bs]
        self.cs = [
            describe(new(), [self.outer * memory.world, inner, n], [inner * n, n, 1], blocks)
            for new, n in zip(self.new_outs, self.widths, strict=True)
        ]
        count, dummy = len(call.bs), memory.dummy
        bias = call.biases[0]
        a_mode = 2 if call.scale_travels else scale_mode(call.a_scale)
        b_mode = scale_mode(call.b_scales[0] if call.b_scales else None)
        padding = [None] * (MAX_OPERANDS - count)
        widths = self.widths + [0] * (MAX_OPERANDS - count)
        tile_count = _tile_count(self.outer * memory.world, inner, self.widths, tiles)
        programs = grid(tile_count, programs)
        self.stamps = new_table(call.op, memory, tile_count, first=0)
        done = memory.gather_done if self.stamps is None else self.stamps.done
        self.sizes = [self.outer, inner, k, 0, 0, 0, *widths, memory.rank, memory.world, transport.chunk_rows, 1, 1]
        args = [
            self.a_own, self.a_come, None, None, *self.bs, *padding, *self.cs, *padding,
            *[dummy] * 8, *[dummy if bias is None else bias] * 4, memory.local, done, *self.sizes,
        ]  # fmt: skip
        self.launch = prepare_gemm(
            args, programs, tiles, call.bs, bias, (a_mode, b_mode), self.out_dtype, True, self.scale_travels,
            inbox=inbox, clears=transport.gemm_clears, stamps=self.stamps is not None,
        )  # fmt: skip
        self.done = done.data_ptr()
        self.a_own, self.a_come = outlines((self.a_own, self.a_come))
        self.bs, self.cs = outlines(self.bs), outlines(self.cs)
        self.padding = padding
        self.unused = memory.local.data_ptr()

    def with_kernel_layout(self, call: GatherTensors) -> GatherTensors:
        call, bs = super().with_kernel_layout(call), [aligned_columns(b) for b in call.bs]
        (a_scale,) = dense([call.a_scale])
        return call._replace(a_scale=a_scale, bs=bs, b_scales=dense(call.b_scales), biases=dense(call.biases))

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        transport, unused = self.transport, self.unused
        transport.start(stream, call)
        transport.await_all(stream)
        scale0 = scale1 = unused
        if call.a_scale is not None:
            scale0 = scale1 = call.a_scale.data_ptr()
            if self.scale_travels:
                scale1 = transport.numbers_of(call).data_ptr()
        self.launch(
            stream,
            [
                Tma(self.a_own, call.shard.data_ptr()),
                Tma(self.a_come, transport.rows(call).data_ptr()),
                None,
                None,
                *[Tma(like, b.data_ptr()) for like, b in zip(self.bs, call.bs, strict=True)],
                *self.padding,
                *[Tma(like, out.data_ptr()) for like, out in zip(self.cs, call.outs, strict=True)],
                *self.padding,
                scale0,
                scale1,
                unused,
                unused,
                *operand_addresses(call.b_scales, unused),
                *operand_addresses(call.biases, unused),
                transport.words,
                self.done,
                *self.sizes,
            ],
        )
        transport.finish(stream, call)


def _tile_count(blocks: int, inner: int, widths: Sequence[int], tiles: Tiles) -> int:
    return blocks * -(-inner // tiles.block_m) * sum(-(-n // tiles.block_n) for n in widths)


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
