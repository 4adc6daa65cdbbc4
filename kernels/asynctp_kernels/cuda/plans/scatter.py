"""Matmuls → reduce-scatter or all-reduce on GPUs: what the plans of all implementations have in common.

An all-reduce that is pushed is a scatter of equal runs of bytes, whose sums all ranks share. Each rank adds up its part
in symmetric memory, too, from where the copy engines of the others pull it to where the result is. That is the place of
the matmuls: where another rank's sum comes, its part was, and had been sent to it. All ranks pull at the same time, and
in step. Shared slice by slice, while others still push, parts and sums get in each other's way on the links:
`docs/internals/measurements.md`.

But for NCCL the sum over ranks is in fp32, in rank order, rounded once: the same bits in every run. The data on its way
has the dtype of the program's collective: that of the matmuls, or `sum_dtype`, to which the program converts each
matmul, once rounded, before it adds them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asynctp_kernels.cuda.checks import scattered_scaled_at_end
from asynctp_kernels.cuda.choose.implementation import SiteForm
from asynctp_kernels.cuda.choose.tiles import Chunks, WireChunks
from asynctp_kernels.cuda.choose.wire import PUSH
from asynctp_kernels.cuda.facts import ReduceFacts
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.copy_kernels import reduce_kernel
from asynctp_kernels.cuda.gemm.cublas import matmul, multiply
from asynctp_kernels.cuda.gemm.own_matmul import OwnMatmul, matmuls_for
from asynctp_kernels.cuda.plans.plan import Plan
from asynctp_kernels.cuda.runtime.launch import (
    BESIDE_REGISTERS,
    BESIDE_WARPS,
    aligned,
    aligned_columns,
    dense,
    grid,
    prepare,
)
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, MAX_OWN, GroupMemory
from asynctp_kernels.cuda.runtime.script import (
    DATA,
    PushMoves,
    Step,
    parts_script,
    push_script,
    share_script,
    summed_script,
)
from asynctp_kernels.shard_layout import ShardLayout
from asynctp_kernels.torch_private import new_tensors

#: As, Bs, biases, A scales, B scales and what is added, as `ReduceFacts` has them
Operands = tuple[
    Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor], Tensor | None
]


class ScatterTensors(NamedTuple):
    """All memory of one call: the operands, then what it makes.

    staging: the sum of the matmuls, as the implementation lays it out. out: the result. extras: matmuls apart that
    are not made in the place of that sum.
    """

    a_parts: Sequence[Tensor]
    b_parts: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    a_scales: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    added: Tensor | None
    staging: Tensor
    out: Tensor
    extras: list[Tensor]

    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors, in the order of the fields."""
        a_parts, b_parts, biases, a_scales, b_scales, added, staging, out, extras = self
        tensors = (*a_parts, *b_parts, *biases, *a_scales, *b_scales, added, staging, out, *extras)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])


class ScatterPlan(Plan):
    """One call, prepared. `run` gives this rank's shard.

    in_place: the result takes the place of the sum of the matmuls.
    staging_shape, extra_shape: of the sum of the matmuls, and of one apart.
    kernels: for each matmul those, by the number of rows, if it is not cuBLAS that makes it.
    """

    in_place = False
    staging_shape: tuple[int, ...]
    extra_shape: tuple[int, ...]

    def __init__(self, call: ReduceFacts, memory: GroupMemory, layout: ShardLayout | None = None) -> None:
        """layout: Of what is sent, if it is not the call's."""
        self.memory, self.layout = memory, call.layout if layout is None else layout
        self.is_dense = call.is_dense
        self.outer = self.layout.outer
        self.scaling, self.wire_dtype, self.out_dtype = call.scaling, call.wire_dtype, call.wire_dtype
        self.matmul_dtype, self.count = call.matmul_dtype, len(call.b_parts)
        self.factor = 1.0 / memory.world if call.reduce_op == "avg" else 1.0
        self.times, self.real = call.times, call.real_in_block
        self.kernels: Sequence[dict[int, OwnMatmul]] = [{}] * self.count
        self.row_bytes = self.layout.cols * call.wire_dtype.itemsize
        self.part_bytes = self.layout.rows * self.row_bytes
        self.device = call.a_parts[0].device
        self.device_index: int = self.device.index
        self.new_output = new_tensors(self.layout.shard_shape, self.out_dtype, self.device)

    @functools.cached_property
    def new_staging(self) -> Callable[[], Tensor]:
        return new_tensors(self.staging_shape, self.wire_dtype, self.device)

    @functools.cached_property
    def new_extra(self) -> Callable[[], Tensor]:
        return new_tensors(self.extra_shape, self.matmul_dtype, self.device)

    def is_apart(self, i: int) -> bool:
        """Matmul number `i` is not made where the sum is: all but the first, and that too if it is converted."""
        return i > 0 or self.matmul_dtype != self.wire_dtype

    def new_extras(self) -> list[Tensor]:
        """Where matmuls are made that are apart, one after the other."""
        return [self.new_extra()] if self.is_apart(self.count - 1) else []

    @functools.cached_property
    def factors(self) -> list[tuple[float, float]]:
        """Factors of each matmul: one as it is made, and one as it is added or converted.

        The second one, if it is not made where the sum is, unless the program's matmul in float16 may become too large.
        """
        at_once = [not self.is_apart(i) or self.wire_dtype == torch.float16 for i in range(self.count)]
        pairs = zip(at_once, self.times.matmuls, strict=True)
        return [(factor, 1.0) if now else (1.0, factor) for now, factor in pairs]

    def add_up(self, operands: Operands, place: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        """The sum of matmuls, and of what is added to them; As are matrices.

        place, extra: for the sum, and for a matmul apart; made if not given.
        """
        a_parts, b_parts, biases, a_scales, b_scales, added = operands
        total = place
        for i, a in enumerate(a_parts):
            apart = self.is_apart(i)
            out = extra if apart else place
            a_scale, b_scale = (a_scales[i], b_scales[i]) if a_scales else (None, None)
            now, then = self.factors[i]
            if (kernel := self.kernels[i].get(a.shape[0])) is None:
                made = matmul(a, b_parts[i], biases[i], a_scale, b_scale, self.scaling, out=out, factor=now)
            else:
                made = a.new_empty((a.shape[0], b_parts[i].shape[1]), dtype=self.matmul_dtype) if out is None else out
                matrices = Matrices(a, [b_parts[i]], [made], a_scale, b_scales[i : i + 1], [biases[i]])
                kernel(driver.current_stream(self.device_index), matrices.as_read())
            if i and total is not None:
                total.add_(made, alpha=then)
            elif apart:
                total = made.to(self.wire_dtype) if total is None else total.copy_(made)
                multiply(total, then)
            else:
                total = made
        assert total is not None
        if added is not None:
            total.add_(added, alpha=self.times.added)
        multiply(total, self.times.whole)
        return total

    @staticmethod
    def pad(rows: Tensor, real: int) -> None:
        """Zero the padding of [..., rows, N]: all rows but the first `real`. A number below 0 keeps none."""
        rows[..., max(real, 0) :, :].zero_()

    def _kernels(self, call: ReduceFacts, rows: Iterable[int]) -> list[dict[int, OwnMatmul]]:
        """The kernels of each matmul, by numbers of rows; none where a matmul is left to PyTorch."""
        if call.is_empty or scattered_scaled_at_end(call) is not None:
            return [{}] * self.count
        return [
            {count: kernel for count in rows if (kernel := self._kernel(call, i, count))} for i in range(self.count)
        ]

    def _kernel(self, call: ReduceFacts, i: int, rows: int) -> OwnMatmul | None:
        one = slice(i, i + 1)
        bs, b_scales, biases = call.b_parts[one], call.b_scales[one], call.biases[one]
        a, fast, factor = call.a_parts[i], call.use_fast_accum, self.factors[i][0]
        out = a.new_empty((rows, bs[0].shape[1]), dtype=self.matmul_dtype)
        a, a_scale = a.reshape(-1, a.shape[-1])[:rows], call.a_scales[i] if call.a_scales else None
        return matmuls_for(Matrices(a, bs, [out], a_scale, b_scales, biases), call.invariant, factor, fast)

    def tensors(self, operands: Operands) -> ScatterTensors:
        """The operands as they come, and new memory for what a call makes."""
        staging = self.new_staging()
        out = staging if self.in_place else self.new_output()
        every = (*operands, staging, out, self.new_extras())
        return tuple.__new__(ScatterTensors, every)  # as C makes it

    def with_kernel_layout(self, call: ScatterTensors) -> ScatterTensors:
        if call.added is None:
            return call
        return call._replace(added=call.added.contiguous())  # so ranges of its rows are views

    def with_gemm_layout(self, call: ScatterTensors) -> ScatterTensors:
        """The same where a GEMM of ours reads all operands."""
        a_parts, b_parts = [aligned(a) for a in call.a_parts], [aligned_columns(b) for b in call.b_parts]
        a_scales, b_scales, biases = dense(call.a_scales), dense(call.b_scales), dense(call.biases)
        return call._replace(a_parts=a_parts, b_parts=b_parts, a_scales=a_scales, b_scales=b_scales, biases=biases)

    def site_form(self, lead: Sequence[int]) -> SiteForm:
        """How calls are made whose operands lie as they are read. lead: Sizes of rows of an all-reduce; else empty."""
        shape = (*lead, self.staging_shape[-1])
        new_out = new_tensors(shape, self.wire_dtype, self.device) if lead else self.new_output
        makers = (new_out, None) if self.in_place else (self.new_staging, new_out)
        return (0, 1, 2, 3, 4, 5), makers, -2, False, False

    def run(self, *operands: Any) -> Tensor:
        """Make the call. operands: `Operands`."""
        call = self.tensors(operands)
        self.make(driver.current_stream(self.device_index), call)
        return call.out


class PushedScatter(ScatterPlan):
    """The copies and the reduction of every implementation but the direct one.

    streams_wait: the reduction is launched after waits of its stream for all parts.
    shares: it is an all-reduce, whose sums all ranks get.
    """

    streams_wait = driver.IN_ORDER
    shares = False

    def __init__(
        self,
        call: ReduceFacts,
        memory: GroupMemory,
        chunks: Chunks,
        own: Chunks,
        tiles_n: int,
        reduce_warps: int = BESIDE_WARPS,
        layout: ShardLayout | None = None,
    ) -> None:
        """chunks, own: how others' rows are cut, and the own ones. tiles_n: counted of each row tile, when finished."""
        super().__init__(call, memory, layout)
        self.chunks, self.own, self.tiles_n = chunks, own, tiles_n
        rank, world, layout = memory.rank, memory.world, self.layout
        self.staging_shape = (world, layout.rows, layout.cols)  # by destination: what goes to one rank is contiguous
        if self.shares:  # parts may end within a row, or a tensor be of one row
            self.staging_shape = (call.rows, call.b_parts[0].shape[1])
        inbox = memory.require("box", (world - 1 + self.shares) * self.part_bytes)
        self.inbox, self.counts = inbox.peers[rank], self.progress(rank, 0)
        self.sums = self.inbox  # not used
        if self.shares:
            sums = [box + (world - 1) * self.part_bytes for box in inbox.peers]
            self.sums, self.tell = sums[rank], memory.compiled(summed_script(memory.gather_channel))
            self.pull = memory.compiled(share_script(memory.gather_channel, sums, self.part_bytes))
        self.wire_chunks = WireChunks(self.part_bytes)
        pieces = [(first * self.row_bytes, end * self.row_bytes) for first, end in chunks.rows]
        sizes = (inbox.peers, self.part_bytes, self.wire_chunks, pieces)
        moves = PushMoves(*sizes, DATA, self.part_bytes, memory.signature(call.wire, PUSH))
        self.play = memory.compiled(push_script(memory.scatter_channel, moves, self.ready))
        self.await_parts = memory.compiled(parts_script(memory.scatter_channel))
        self._compile_reduction(call, reduce_warps)

    def progress(self, dst: int, chunk: int) -> int:
        return self.memory.progress + (dst * MAX_OWN + chunk) * 4

    def ready(self, dst: int, chunk: int) -> list[Step]:
        """Steps before a piece for `dst` is sent: it is complete then."""
        raise NotImplementedError

    def _compile_reduction(self, call: ReduceFacts, warps: int) -> None:
        memory, n = self.memory, self.layout.cols
        widest = max(self.wire_dtype.itemsize, self.out_dtype.itemsize)
        # As much for fewer warps, so that as many loads are on their way: docs/results/2026-11-25-h200x2/reduction.txt.
        # Of more ranks they are anyway, and registers would be spilled.
        block = 32 * (BESIDE_WARPS if memory.world <= 4 else warps) * (32 // widest)
        size = self.layout.rows * n
        programs = grid(-(-size // block), driver.machine(self.device_index)[1])
        own_size, chunk_size = self.own.rows[0][1] * n, self.wire_chunks.chunk // self.wire_dtype.itemsize
        # elements that are read and written at once: two layouts would need shared memory, which the GEMM may have
        together = math.gcd(16 // widest, own_size if len(self.own) > 1 else 0)
        tiles, own_tiles = sum(self.own.row_tiles) * self.tiles_n, self.own.tiles * self.tiles_n
        sent, out = (call.a_parts[0].new_empty(size, dtype=dtype) for dtype in (self.wire_dtype, self.out_dtype))
        self.done = memory.done("scatter").data_ptr()
        self.reduce_numbers = [size, own_size, chunk_size, tiles, own_tiles, self.factor, memory.rank]
        args = [sent, sent, out, out, *[memory.local] * 3, *self.reduce_numbers]
        constants = {
            "WORLD": memory.world,
            "MAX_CHUNKS": MAX_CHUNKS,
            "MAX_OWN": MAX_OWN,
            "SHARES": self.shares,
            "ALIGN": together,
            "BLOCK": block,
            "PROGRAMS": programs,
        }
        self.reduce = prepare(reduce_kernel, programs, args, constants, warps, num_stages=1, maxnreg=BESIDE_REGISTERS)

    def push_and_reduce(self, side: int, staging: Tensor, out: Tensor, ready: int) -> None:
        """Enqueue all pushes on `side`, and the reduction, on a stream of its own, after the event `ready`.

        In a graph `ready` is one of `side`, which comes behind what is in flight.
        """
        memory = self.memory
        base, own = staging.data_ptr(), memory.rank * self.part_bytes
        self.play(side, (0, base, 0))
        driver.wait_event(memory.reducer, ready)
        if self.streams_wait:
            self.await_parts(memory.reducer, ())
        self.reduce(
            memory.reducer,
            [
                base + own,
                self.inbox,
                out.data_ptr() + own * self.shares,
                self.sums,
                self.counts,
                memory.full.at(memory.rank),
                self.done,
                *self.reduce_numbers,
            ],
        )
        if self.shares:
            self.tell(memory.reducer, ())
        driver.record_event(memory.reduced, memory.reducer)
        if self.shares:
            self.pull(side, (0, 0, 0, out.data_ptr()))
        driver.record_event(memory.end, side)

    def finish(self, stream: int) -> None:
        """Join both streams."""
        driver.wait_event(stream, self.memory.end)
        driver.wait_event(stream, self.memory.reduced)


class WholeScatter(ScatterPlan):
    """cuBLAS on the whole, then a reduce-scatter, which `enqueue` makes: nothing overlaps.

    The matmuls are outside of the call's turn: they are PyTorch's, as the program's own.

    is_ours: There is one, a kernel that `enqueue` launches too.
    """

    is_ours = False

    def __init__(self, call: ReduceFacts, memory: GroupMemory) -> None:
        super().__init__(call, memory)
        self.staging_shape = (call.rows, call.b_parts[0].shape[1])

    def tensors(self, operands: Operands) -> ScatterTensors:
        """The memory of the reduction, whose operand is the sum of the matmuls; or of all, if the matmul is ours."""
        if self.is_ours:
            return super().tensors(operands)
        a_parts, b_parts, biases, a_scales, b_scales, added = operands
        rows = [a if a.ndim == 2 else a.reshape(-1, a.shape[-1]) for a in a_parts]
        added = None if added is None else added.reshape(self.staging_shape)
        staging = self.add_up((rows, b_parts, biases, a_scales, b_scales, added))
        if self.real is not None:
            self.pad(staging.view(self.outer, -1, staging.shape[-1]), self.real)
        out = staging if self.in_place else self.new_output()
        return ScatterTensors((), (), (), (), (), None, staging, out, [])
