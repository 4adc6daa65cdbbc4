"""`fused`: one GEMM that starts on the own rows, or ends with them, while copy engines move the others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from asynctp_kernels.cuda.checks import (
    ANY,
    a_dtypes_alike,
    a_scales_alike,
    all_rows_by_each_b,
    chunk_holds_row,
    gathered_scaled_at_end,
    gemm_takes_gathered,
    gemm_takes_scattered,
    one_factor,
    only_matmuls_are_summed,
    rounded_once,
    rows_are_divisible,
    rows_are_gathered,
    rows_are_scattered,
    rows_of_a_contiguous,
    scattered_scaled_at_end,
    sum_without_bias,
)
from asynctp_kernels.cuda.choose import cost
from asynctp_kernels.cuda.choose.cost import Estimate
from asynctp_kernels.cuda.choose.implementation import Check, Choice
from asynctp_kernels.cuda.choose.tiles import Tiles, cut, cut_own, shares_for
from asynctp_kernels.cuda.choose.wire import PULL, PUSH
from asynctp_kernels.cuda.facts import Facts, GatherFacts, ReduceFacts
from asynctp_kernels.cuda.gemm.arguments import MAX_OPERANDS, CallArguments, GemmArguments
from asynctp_kernels.cuda.gemm.gemm import b_descriptor, b_scale_mode, prepare_gemm, scale_mode
from asynctp_kernels.cuda.plans.gather import GatherPlan, GatherTensors
from asynctp_kernels.cuda.plans.gather_transports import GatherPull, GatherPush, GatherTransport, by_word
from asynctp_kernels.cuda.plans.plan import Plan
from asynctp_kernels.cuda.plans.scatter import PushedScatter, ScatterTensors
from asynctp_kernels.cuda.runtime.edited import new_graph
from asynctp_kernels.cuda.runtime.launch import (
    BESIDE_REGISTERS,
    BESIDE_WARPS,
    REGISTERS,
    aligned,
    aligned_columns,
    describe,
    grid,
)
from asynctp_kernels.cuda.runtime.machine import driver, others_beside
from asynctp_kernels.cuda.runtime.memory import GroupMemory
from asynctp_kernels.cuda.runtime.script import Record, Step, Wait, Write


class _Fused(Plan):
    """A plan of one GEMM in tiles, and of copies in chunks."""

    name = "fused"
    transports = (PUSH, PULL)

    @classmethod
    def plan(cls, call: Facts, memory: GroupMemory, choice: Choice) -> _Fused:
        sms = driver.machine(call.device_index)[1]
        return cls(call, memory, choice.tiles, choice.chunks, sms)  # type: ignore[call-arg]


class FusedGather(_Fused, GatherPlan):
    """One GEMM that consumes chunks as they arrive: it polls words, of senders or of the own copy stream.

    Pushed chunks it reads in the inbox, pulled ones where the gathered A is returned.
    """

    refuses = (
        *ANY, all_rows_by_each_b, chunk_holds_row, rows_are_gathered, gathered_scaled_at_end, gemm_takes_gathered,
    )  # fmt: skip
    estimate = cost.fused
    transport: GatherTransport

    def __init__(self, call: GatherFacts, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        if call.kept_by_all:
            chunks = cut(call.outer, call.layout.inner, tiles.block_m, wanted_chunks)
            self.transport = GatherPull(call, memory, chunks, by_word(memory))
        else:
            self.transport = GatherPush(call, memory, wanted_chunks)
        super().__init__(call, memory, gathers_all=call.kept_by_all)
        self.reads_landed = self.transport.reads_landed
        self.graph = self.transport.new_graph()
        self._compile(call, tiles, programs)
        self.waits_for_in_flight = self.transport.make_room(self.launch)

    def _compile(self, call: GatherFacts, tiles: Tiles, programs: int) -> None:
        memory, layout, transport = self.memory, self.layout, self.transport
        inner, k = layout.inner, layout.cols
        rows, blocks = [1, tiles.block_m, tiles.block_k], tiles.stored
        a_strides = [inner * k, k, 1]
        a_own = describe(aligned(call.a_shard), [self.outer, inner, k], a_strides, rows)
        inbox = transport.received is not None
        example = self.new_full() if transport.received is None else transport.received
        a_come = describe(example, [self.outer * (memory.world - inbox), inner, k], a_strides, rows)
        b_like = [b_descriptor(aligned_columns(b), tiles) for b in call.bs]
        c_like = [
            describe(new(), [self.outer * memory.world, inner, n], [inner * n, n, 1], blocks)
            for new, n in zip(self.new_outs, self.widths, strict=True)
        ]
        bias = call.biases[0]
        a_mode = 2 if call.gather_a_scale else scale_mode(call.a_scale)
        b_mode = b_scale_mode(call.b_scales, call.bs)
        tile_count = _tile_count(self.outer * memory.world, inner, self.widths, tiles)
        programs = grid(tile_count, programs)
        shares = _shares(tile_count, programs, memory.world)
        args = GemmArguments(
            a=(a_own, a_come), b=b_like, c=c_like, a_scale=(), b_scale=(),
            bias=[] if bias is None else [bias] * MAX_OPERANDS, words=memory.local, done_ptr=memory.done("gather"),
            outer=self.outer, inner=inner, k=(k,), n=self.widths, rank=memory.rank, world=memory.world,
            chunk_size=transport.chunk_rows, own_tiles=1, value=1,
        )  # fmt: skip
        self.launch = prepare_gemm(
            args.listed(memory.dummy), programs, shares, tiles, call.bs, bias, (a_mode, b_mode), self.out_dtype,
            gathers=True, scale_travels=self.scale_travels, inbox=inbox, clears=transport.gemm_clears,
        )  # fmt: skip
        self.arguments = CallArguments(args, memory.local.data_ptr())

    def with_kernel_layout(self, call: GatherTensors) -> GatherTensors:
        return self.with_gemm_layout(call)

    def enqueue(self, stream: int, call: GatherTensors) -> None:
        transport, scale = self.transport, call.a_scale
        transport.start(stream, call)
        transport.await_all(stream)
        come = transport.numbers_of(call) if self.scale_travels else scale
        tensors = {
            "a": (call.shard, transport.rows(call)),
            "b": call.bs,
            "c": call.outs,
            "a_scale": [each for each in (scale, come) if each is not None],
            "b_scale": call.b_scales,
            "bias": [bias for bias in call.biases if bias is not None],
        }
        self.launch(stream, self.arguments.of(tensors, {"words": transport.words}))
        transport.finish(stream, call)


def _shares(tile_count: int, programs: int, world: int) -> int:
    return shares_for(-(-tile_count // programs)) if others_beside(world) else 1


def _tile_count(blocks: int, inner: int, widths: Sequence[int], tiles: Tiles) -> int:
    return blocks * -(-inner // tiles.block_m) * sum(-(-n // tiles.block_n) for n in widths)


class FusedScatter(_Fused, PushedScatter):
    """One GEMM; a chunk is pushed when its tiles are counted.

    Of several matmuls the sum is in fp32, each scaled before it is added, and rounded once.
    """

    refuses: ClassVar[Sequence[Check]] = (
        *ANY, rows_are_scattered, rows_of_a_contiguous, scattered_scaled_at_end, only_matmuls_are_summed, one_factor,
        gemm_takes_scattered, rounded_once, sum_without_bias, a_scales_alike, a_dtypes_alike,
    )  # fmt: skip
    estimate: ClassVar[Estimate | None] = cost.fused

    def __init__(self, call: ReduceFacts, memory: GroupMemory, tiles: Tiles, wanted_chunks: int, programs: int) -> None:
        layout = call.layout
        rows = (call.outer, layout.inner, tiles.block_m)
        tiles_n = -(-layout.cols // tiles.block_n)
        chunks = cut(*rows, wanted_chunks)
        tiles = replace(tiles, group_m=min(tiles.group_m, chunks.tiles))
        own = cut_own(chunks, *rows, tiles.group_m)
        self.chunk_tiles = [count * tiles_n for count in chunks.row_tiles]
        beside = (REGISTERS - 32 * tiles.warps * tiles.registers) // (32 * BESIDE_REGISTERS)
        super().__init__(call, memory, chunks, own, tiles_n, min(beside, BESIDE_WARPS))
        self.graph = new_graph()
        self._compile(call, tiles, programs)

    def ready(self, dst: int, chunk: int) -> list[Step]:
        first = dst == (self.memory.rank + 1) % self.memory.world and chunk == 0
        running: list[Step] = [Record(self.memory.running)] if first else []
        word = self.progress(dst, chunk)
        return [Wait(word, self.chunk_tiles[chunk]), Write(word, 0), *running]

    def _compile(self, call: ReduceFacts, tiles: Tiles, programs: int) -> None:
        memory, layout = self.memory, self.layout
        inner, n, world = layout.inner, layout.cols, memory.world
        depths = [b.shape[0] for b in call.b_parts]
        a_like = [
            describe(a, [self.outer * world, inner, k], [inner * k, k, 1], [1, tiles.block_m, tiles.block_k])
            for a, k in zip([aligned(a) for a in call.a_parts], depths, strict=True)
        ]
        b_like = [b_descriptor(aligned_columns(b), tiles) for b in call.b_parts]
        staging = self.new_staging()
        block = tiles.stored
        c_like = describe(staging, [world * self.outer, inner, n], [inner * n, n, 1], block)
        bias = call.biases[0]
        row_tiles = self.outer * -(-inner // tiles.block_m)
        tile_count = world * row_tiles * -(-n // tiles.block_n)
        programs = grid(tile_count, programs)
        shares = _shares(tile_count, programs, memory.world)
        args = GemmArguments(
            a=a_like, b=b_like, c=(c_like,), a_scale=(), b_scale=(),
            bias=[] if bias is None else [bias] * MAX_OPERANDS, words=memory.local, done_ptr=memory.done("scatter"),
            outer=self.outer, inner=inner, k=depths, n=(n,), rank=memory.rank, world=world,
            chunk_size=self.chunks.tiles, own_tiles=self.own.tiles, value=1, real_rows=self.real or 0,
        )  # fmt: skip
        modes = (scale_mode(call.a_scales[0] if call.a_scales else None), b_scale_mode(call.b_scales, call.b_parts))
        self.launch = prepare_gemm(
            args.listed(memory.dummy), programs, shares, tiles, call.b_parts, bias, modes,
            self.wire_dtype, gathers=False, rounded=call.matmul_dtype,
            factor=call.gemm_factor or 1.0, padded=self.real is not None,
        )  # fmt: skip
        self.arguments = CallArguments(args, memory.local.data_ptr())

    def new_extras(self) -> list[Tensor]:
        return []

    def with_kernel_layout(self, call: ScatterTensors) -> ScatterTensors:
        return self.with_gemm_layout(call)

    def enqueue(self, stream: int, call: ScatterTensors) -> None:
        memory, bias = self.memory, call.biases[0]
        memory.fork(stream)
        tensors = {
            "a": call.a_parts,
            "b": call.b_parts,
            "c": [call.staging],
            "a_scale": call.a_scales,
            "b_scale": call.b_scales,
            "bias": [] if bias is None else [bias],
        }
        self.launch(stream, self.arguments.of(tensors, {"words": memory.progress}))
        self.push_and_reduce(memory.stream, call.staging, call.out, memory.running)
        self.finish(stream)


class FusedAllReduce(FusedScatter):
    """The same of all rows, whose sums all ranks share; each rank's part is as many rows."""

    refuses = (*ANY, rows_are_divisible, *FusedScatter.refuses[len(ANY) :])
    estimate = cost.then_shared(cost.fused)
    shares = in_place = True
