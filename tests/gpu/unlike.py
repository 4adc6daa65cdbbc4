"""Like collectives, unlike uses: each rank does with a collective what it likes, and results are right.

    torchrun --nproc_per_node=2 tests/gpu/unlike.py [--kinds order,use,uneven,stress] [--calls 100000] [--sizes 300]
    ASYNCTP_TIMEOUT_S=2 torchrun --nproc_per_node=2 tests/gpu/unlike.py --faults

Ranks share a collective (`Shared`): its kind, its bytes and dtype. A `Use` is one rank's own, drawn by a random choice
that differs by rank: which implementation runs, whether the gathered A is returned, by how many columns or how deep it
multiplies, how it views rows, in which memory order its operands lie, whether it multiplies inside the op at all.

    use      every pair of implementations, for every kind of collective: eager twice, then in a CUDA graph
    order    programs of several collectives, some left in flight, completed and multiplied in each rank's own order
    uneven   a vocabulary of 50257 words over the ranks (8192 rows, width 1600), and random sizes that differ by rank
    stress   calls drawn at random; each rank draws its use, and whether it replays a graph or calls anew

Operands are small integers, so every result is exact and is compared bit for bit. `--faults`: calls that are unlike,
and ranks that do not come, eager and beside a replayed graph: each rank raises within the bound, results are NaN where
they are not right, and after a release calls work again. One JSON line in the end, from rank 0.

With TRITON_INTERPRET=1 and ASYNCTP_CPU_IMPLEMENTATION=interpreted it runs on CPUs, with small sizes and without graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from asynctp_kernels import PeerFailed, PeerTimeout, SymmetricMemoryError, cuda, release
from asynctp_kernels.cuda.runtime.memory import existing_memory
from launched import GRIDS, device, end, limit, show, start
from torch import Tensor

import asynctp_passes.ops.collectives  # noqa: F401  (registers the ops)
from asynctp_passes.ops.calls import signature

GPU = torch.cuda.is_available()
FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
KINDS = ("use", "order", "uneven", "stress")
#: by transport: what moves a collective's data; the last two multiply outside of the op
IMPLEMENTATIONS = {
    "push": ("fused", "decomposed", "whole", "bulk", "mover"),
    "direct": ("direct", "bulk", "mover"),
    "auto": ("chosen", "bulk", "mover"),
}
FORCED = {"push": "whole", "direct": "direct", "auto": None}
SHALLOW = 200  # bf16 has every integer up to 256: no sum of so many products of -1, 0 and 1 exceeds that
VOCABULARY, WIDTH, ROWS = (50257, 1600, 8192) if GPU else (103, 16, 24)
POISON_EVERY = 1000
UNIT = 64 if GPU else 8
#: a rank's own, or what a peer's comes to
FAILURES = (SymmetricMemoryError, PeerTimeout, PeerFailed)
#: times as many rows: of a large all-reduce over four GPUs two shots, and of a huge gather 32 MiB of each rank
LENGTHS = {"long": 2, "large": 64, "huge": 4096}


@dataclass(frozen=True)
class Shared:
    """What ranks share of a call.

    kind: "gather", "scatter" or "all_reduce". rows, cols: of a rank's shard or part. dtype: of what travels.
    numbers: so does one of float32 for each row. kept: all ranks keep what is gathered, so that pushes become pulls.
    transport: see `IMPLEMENTATIONS`.
    """

    kind: str
    rows: int
    cols: int
    dtype: torch.dtype = BF16
    numbers: bool = False
    reduce_op: str = "sum"
    transport: str = "push"
    kept: bool = False

    @property
    def name(self) -> str:
        parts = [self.kind, f"{self.rows}x{self.cols}", str(self.dtype)[6:], self.transport, self.reduce_op]
        return "-".join(parts + ["numbers"] * self.numbers + ["kept"] * self.kept)


@dataclass(frozen=True)
class Use:
    """What one rank does.

    sizes: the products' columns (gather), or the depths of those that are summed (reductions); 0 is allowed.
    blocks: outer blocks into which it sees its rows fall. halved: it sees rows half as long, and twice as many.
    along: numbers are only returned, and the products' scale is one number. added: so much of a sum is no product.
    """

    implementation: str
    sizes: tuple[int, ...]
    blocks: int = 1
    halved: bool = False
    full: bool = False
    k_major: bool = True
    turned: bool = False
    along: bool = False
    added: bool = False


@dataclass
class Call:
    """One prepared call: what it must give, how often it was made, and how often it gave something else.

    sent: all ranks' tensors, [world, *] each, if each makes the call that it prepared together with this one. expect:
    what comes of such tensors here.
    """

    name: str
    run: Callable[[], list[Tensor]]
    sent: list[Tensor]
    expect: Callable[[list[Tensor]], list[Tensor]]
    wrong: Tensor
    made: int = 0
    expected: list[Tensor] = field(default_factory=list)
    captured: list[list[Tensor]] = field(default_factory=list)
    graph: Any = None

    def __post_init__(self) -> None:
        self.expected = self.expect(self.sent)

    def compare(self, found: Sequence[Tensor], expected: Sequence[Tensor] | None = None) -> None:
        pairs = zip(found, self.expected if expected is None else expected, strict=True)
        same = [(x != y).any() if x.shape == y.shape else one() > 0 for x, y in pairs]
        self.wrong += torch.stack(same).any()
        self.made += 1


def one() -> Tensor:
    return torch.ones((), dtype=torch.int64, device=device())


def world() -> int:
    return dist.get_world_size()


def rank() -> int:
    return dist.get_rank()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def forced(name: str | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if name in (None, "chosen") else cuda.forced(name)


def integers(shape: Sequence[int], generator: random.Random, depth: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """-1, 0 and 1; so few of them that sums of `depth` products stay below 256. Each rank has its own."""
    seeded = torch.Generator(device()).manual_seed(generator.getrandbits(40))
    values = torch.randint(-1, 2, tuple(shape), device=device(), generator=seeded, dtype=torch.int8).to(BF16)
    if depth > SHALLOW:
        values *= torch.rand(tuple(shape), device=device(), generator=seeded) < SHALLOW / depth
    return values.to(dtype)


def of_all_ranks(tensor: Tensor) -> Tensor:
    """[world, *shape], by the backend's own collective."""
    raw = tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.contiguous()
    parts = [torch.empty_like(raw) for _ in range(world())]
    dist.all_gather(parts, raw)
    return torch.stack(parts).view(tensor.dtype)


def weight(k: int, n: int, own: random.Random, k_major: bool, dtype: torch.dtype = BF16) -> Tensor:
    values = integers((n, k), own, dtype=dtype)
    return values.t() if k_major else values.t().contiguous()


def turned(tensor: Tensor) -> Tensor:
    """The same values, its last two dimensions the other way round in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


# --- one rank's call --------------------------------------------------------------------------------------------
def prepare(shared: Shared, use: Use, own: random.Random, group: dist.ProcessGroup) -> Call:
    """A call on fresh data. Collective: ranks exchange what they send, to know what must come."""
    make = gather if shared.kind == "gather" else reduction
    return Call(f"{shared.name}: {use}", *make(shared, use, own, group), one() * 0)


#: how it is run, what all ranks send, and what must come of that
Prepared = tuple[Callable[[], list[Tensor]], list[Tensor], Callable[[list[Tensor]], list[Tensor]]]


def gather(shared: Shared, use: Use, own: random.Random, group: dist.ProcessGroup) -> Prepared:
    """all_gather(shard) @ b for every b, then the gathered A, then numbers that are only returned."""
    ops, name = torch.ops.asynctp, group.group_name
    rows, cols, blocks = shared.rows * (1 + use.halved), shared.cols // (1 + use.halved), use.blocks
    shard = integers((shared.rows, shared.cols), own, cols, shared.dtype)
    a = shard.view(blocks, rows // blocks, cols)
    a = turned(a) if use.turned else a
    bs = [weight(cols, n, own, use.k_major, shared.dtype) for n in use.sizes]
    scale, numbers, sent = torch.ones((), device=device()), None, [of_all_ranks(shard)]
    if shared.numbers:
        powers = 2.0 ** integers((shared.rows, 1), own).float()
        numbers = powers.view(blocks, -1, 1)
        sent.append(of_all_ranks(powers))

    def expect(come: list[Tensor]) -> list[Tensor]:
        """The products, and what else is returned, of all ranks' shards and numbers."""
        joined = come[0].view(world(), blocks, rows // blocks, cols).movedim(0, 1).reshape(blocks, -1, cols)
        whole, extra = joined.float(), list[Tensor]()
        by_rows = whole
        if shared.numbers:
            every = come[1].view(world(), blocks, -1, 1).movedim(0, 1).reshape(blocks, -1, 1)
            by_rows, extra = (whole, [every]) if use.along else (whole * every, [])
        outs = [(by_rows @ b.float()).to(BF16) for b in bs]
        return [*outs, *([whole] * use.full), *extra]

    def gathered() -> tuple[Tensor, Tensor | None]:
        """Outside of an op that multiplies."""
        if use.implementation == "bulk" and numbers is None:
            flying = ops.all_gather(shard, world(), name, all_keep=shared.kept)
            return torch.ops._c10d_functional.wait_tensor(flying), None
        found = cuda.Mover(group, shared.kept).gather(shard, numbers)
        assert found is not None
        return found

    def apart() -> list[Tensor]:
        with forced(FORCED[shared.transport]):
            found = [each for each in gathered() if each is not None]
        return expect(found)

    def fused() -> list[Tensor]:
        none = [None] * len(bs)
        with forced(use.implementation):
            scales = dict[str, Any]()
            if shared.numbers:
                b_scales = [scale if use.along else torch.ones(1, n, device=device()) for n in use.sizes]
                scales = {"a_scale": scale if use.along else numbers, "gather_a_scale": not use.along}
                scales |= {"b_scales": b_scales, "out_dtype": BF16, "use_fast_accum": True}
                scales |= {"along_shard": numbers} if use.along else {}
            outs = ops.all_gather_matmul(a, bs, none, 1, use.full, world(), name, all_keep=shared.kept, **scales)
        if use.full:
            outs[len(bs)] = outs[len(bs)].float()
        return outs

    return apart if use.implementation in ("bulk", "mover") else fused, sent, expect


def reduction(shared: Shared, use: Use, own: random.Random, group: dist.ProcessGroup) -> Prepared:
    """The ranks' sum of Σ a @ b (+ added): this rank's part, or all of it."""
    ops, name, everything = torch.ops.asynctp, group.group_name, shared.kind == "all_reduce"
    rows, cols, blocks = shared.rows * (1 + use.halved), shared.cols // (1 + use.halved), use.blocks
    lead = (world() * rows,) if everything else (blocks, world() * rows // blocks)
    depth = sum(use.sizes)
    a_parts = [integers((*lead, k), own, depth) for k in use.sizes]
    a_parts = [turned(a) if use.turned else a for a in a_parts]
    b_parts = [weight(k, cols, own, use.k_major) for k in use.sizes]
    added = integers((*lead, cols), own, dtype=shared.dtype) if use.added else None

    def by_rank(total: Tensor) -> Tensor:
        """Rows of a product in the order in which ranks get them."""
        if not everything:
            total = total.view(blocks, world(), rows // blocks, cols).movedim(1, 0)
        return total.reshape(world(), shared.rows, shared.cols).contiguous()

    terms = [a.float() @ b.float() for a, b in zip(a_parts, b_parts, strict=True)]
    total = sum(terms[1:], terms[0]) + (0 if added is None else added.float())
    sent = by_rank(total.to(shared.dtype))

    def expect(come: list[Tensor]) -> list[Tensor]:
        """The sum of what all ranks send."""
        summed = come[0].float().sum(0)
        summed = (summed / world() if shared.reduce_op == "avg" else summed).to(shared.dtype)
        return [summed.view(-1, cols) if everything else summed[rank()].reshape(blocks, rows // blocks, cols)]

    optional = {"sum_dtype": None if shared.dtype == BF16 else shared.dtype, "added": added}

    def apart() -> list[Tensor]:
        made = [(a.float() @ b.float()).to(shared.dtype) for a, b in zip(a_parts, b_parts, strict=True)]
        mine = by_rank(sum(made[1:], made[0]) + (0 if added is None else added))
        with forced(FORCED[shared.transport]):
            if everything:
                mine = mine.view(-1, cols)
                found = cuda.run_bulk_all_reduce(mine, shared.reduce_op, group, lambda: None)
                if found is None:
                    found = torch.ops._c10d_functional.wait_tensor(
                        torch.ops._c10d_functional.all_reduce(mine, shared.reduce_op, name)
                    )
                return [found]
            if use.implementation == "mover" and shared.transport != "auto":
                part = cuda.Mover(group).scatter(mine, shared.reduce_op)
                assert part is not None
            else:
                flying = ops.reduce_scatter(mine.view(-1, shared.cols), shared.reduce_op, world(), name)
                part = torch.ops._c10d_functional.wait_tensor(flying)
        return [part.view(blocks, rows // blocks, cols)]

    def fused() -> list[Tensor]:
        none = [None] * len(a_parts)
        with forced(use.implementation):
            if everything:
                return [ops.matmul_all_reduce(a_parts, b_parts, none, shared.reduce_op, name, **optional)]
            return [ops.matmul_reduce_scatter(a_parts, b_parts, none, shared.reduce_op, 1, world(), name, **optional)]

    return apart if use.implementation in ("bulk", "mover") else fused, [of_all_ranks(sent)], expect


# --- drawing ----------------------------------------------------------------------------------------------------
def draw(shared: Shared, own: random.Random, sizes: Sequence[int] | None = None) -> Use:
    """A use of this rank's own, without an implementation."""
    count = own.choice((1, 1, 2))  # few, since each number is another kernel to compile
    if sizes is None:
        sizes = [UNIT * own.choice((1, 2, 4)) for _ in range(count)]
    blocks = own.choice([1, 1, *(blocks for blocks in (2, 3, 5) if shared.rows % blocks == 0)])
    halved = not shared.numbers and shared.cols % 32 == 0 and own.random() < 0.3
    fp8 = shared.dtype == FP8
    return Use(
        "",
        tuple(sizes),
        blocks,
        halved,
        full=own.random() < 0.5,
        k_major=fp8 or own.random() < 0.5,
        turned=not fp8 and own.random() < 0.3,
        along=shared.numbers and own.random() < 0.5,
        added=shared.kind != "gather" and own.random() < 0.2,
    )


def able(shared: Shared, use: Use) -> list[str]:
    """The implementations that can run it on this rank."""
    names = IMPLEMENTATIONS[shared.transport]
    return [name for name in names if name in ("bulk", "mover", "chosen", "whole") or not refused(shared, use, name)]


def refused(shared: Shared, use: Use, name: str) -> bool:
    """Whether the implementation cannot run it; nothing is run."""
    rows, cols = shared.rows * (1 + use.halved), shared.cols // (1 + use.halved)

    def like(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device())

    def b(k: int, n: int) -> Tensor:
        dtype = shared.dtype if shared.kind == "gather" else BF16
        return like(n, k, dtype=dtype).t() if use.k_major else like(k, n, dtype=dtype)

    none, size = [None] * len(use.sizes), world()
    args: tuple[Any, ...]
    scaled = dict[str, Any]()
    if shared.kind == "gather":
        a, bs = like(use.blocks, rows // use.blocks, cols, dtype=shared.dtype), [b(cols, n) for n in use.sizes]
        a, op = (turned(a) if use.turned else a), "all_gather_matmul"
        args = (a, bs, none, 1, use.full)
        if shared.numbers:
            scale = like(dtype=FP32) if use.along else like(use.blocks, rows // use.blocks, 1, dtype=FP32)
            scales = [like(dtype=FP32) if use.along else like(1, n, dtype=FP32) for n in use.sizes]
            scaled = {"a_scale": scale, "b_scales": scales, "gather_a_scale": not use.along}
            scaled |= {"out_dtype": BF16, "use_fast_accum": True}
    else:
        lead = (size * rows,) if shared.kind == "all_reduce" else (use.blocks, size * rows // use.blocks)
        a_parts = [turned(like(*lead, k)) if use.turned else like(*lead, k) for k in use.sizes]
        args = (a_parts, [b(k, cols) for k in use.sizes], none, shared.reduce_op)
        op = "matmul_all_reduce"
        if shared.kind == "scatter":
            op, args = "matmul_reduce_scatter", (*args, 1)
    sum_dtype = shared.dtype if shared.kind != "gather" and shared.dtype != BF16 else None
    added = like(*lead, cols, dtype=shared.dtype) if use.added else None
    given = dict(zip(signature(op).names, args, strict=False)) | scaled | {"group_name": ""}
    if shared.kind != "all_reduce":
        given["group_size"] = size
    if shared.kind != "gather":
        given |= {"sum_dtype": sum_dtype, "added": added}
    call = signature(op).named(given)
    try:
        with cuda.forced(name):
            cuda.explain(call, size)
    except RuntimeError:
        return True
    return False


def drawn(shared: Shared, own: random.Random, wanted: str | None = None, sizes: Sequence[int] | None = None) -> Use:
    """A use with an implementation: the wanted one where it can run, or one that can."""
    for _ in range(20):
        use = draw(shared, own, sizes)
        found = able(shared, use)
        if wanted in found:
            return replace(use, implementation=wanted or "")
        if wanted is None:
            return replace(use, implementation=own.choice(found))
    return replace(use, implementation=own.choice(found))


# --- the kinds --------------------------------------------------------------------------------------------------
class Run:
    """What all kinds share: the group, two random choices, and all calls that were made."""

    def __init__(self, seed: int, only: str) -> None:
        self.group, self.only = dist.group.WORLD, only
        self.shared, self.own = random.Random(seed), random.Random(f"{seed} {rank()}")
        self.calls: list[Call] = []
        self.done = 0

    def shapes(self) -> list[Shared]:
        """Those whose name has the text that was asked for."""
        return [shared for shared in shapes() if self.only in shared.name]

    def prepare(self, shared: Shared, wanted: str | None = None, sizes: Sequence[int] | None = None) -> Call:
        call = prepare(shared, drawn(shared, self.own, wanted, sizes), self.own, self.group)
        self.calls.append(call)
        return call

    def eager(self, call: Call, expected: Sequence[Tensor] | None = None) -> None:
        call.compare(call.run(), expected)
        self.done += 1

    def capture(self, call: Call, times: int = 2) -> None:
        """A CUDA graph of several calls; what is captured is only enqueued at a replay."""
        if not GPU:
            return
        torch.cuda.synchronize()
        dist.barrier()
        call.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(call.graph):
            call.captured = [call.run() for _ in range(times)]

    def several(self, call: Call, expected: Sequence[Tensor] | None = None, times: int = 2) -> None:
        """As many calls as a graph of `capture` has: by that graph, if this rank likes."""
        if call.graph is not None and self.own.random() < 0.5:
            call.graph.replay()
            for found in call.captured:
                call.compare(found, expected)
            self.done += times
        else:
            for _ in range(times):
                self.eager(call, expected)

    def check(self, call: Call, graph: bool = True) -> None:
        """Eager calls, and a graph; ranks differ in which of them runs."""
        self.eager(call)
        self.eager(call)
        if graph:
            self.capture(call)
            self.several(call)
            self.several(call)
        synchronize()
        call.graph, call.captured = None, []


def shapes() -> list[Shared]:
    """What is moved in `use` and in `stress`."""
    sizes = ((512, 256), (1200, 512), (30, 72)) if GPU else ((24, 32), (6, 72))
    found = []
    for rows, cols in sizes:
        for transport in ("push", "direct", "auto"):
            found += [Shared("gather", rows, cols, transport=transport)]
            found += [Shared("scatter", rows, cols, transport=transport)]
        found += [Shared("gather", rows, cols, kept=True)]
        found += [Shared("scatter", rows, cols, dtype=FP32), Shared("scatter", rows, cols, reduce_op="avg")]
        found += [Shared("all_reduce", rows, cols, transport=transport) for transport in ("push", "direct", "auto")]
        found += [Shared("all_reduce", rows, cols, dtype=FP32, transport="direct")]
    rows = sizes[0][0]
    for transport in ("push", "direct", "auto"):
        found += [Shared("gather", rows, 256 if GPU else 32, FP8, numbers=True, transport=transport)]
    found += [Shared("gather", rows, 256 if GPU else 32, FP8, numbers=True, kept=True)]
    if world() & (world() - 1):  # an average that is not exact
        found = [shared for shared in found if shared.reduce_op != "avg"]
    if GPU and dist.get_backend() != "nccl":  # gloo's all-gather, with which an all-reduce ends, is in no graph
        found = [shared for shared in found if shared.kind != "all_reduce"]
    return found


def check_use(run: Run, sizes: int) -> None:
    """All pairs of implementations."""
    for shared in run.shapes():
        limit(240)
        for number, pair in enumerate(itertools.product(IMPLEMENTATIONS[shared.transport], repeat=2)):
            run.check(run.prepare(shared, pair[rank() % 2]), graph=number % 3 == 0)


def check_order(run: Run, sizes: int) -> None:
    """Programs, each of which is then captured, too."""
    shared_shapes = run.shapes()
    for _ in range(20 if GPU else 4):
        limit(120)
        shared = [run.shared.choice(shared_shapes) for _ in range(run.shared.choice((3, 6, 9)))]
        call = program(run, shared)
        run.check(call)


def program(run: Run, several: Sequence[Shared]) -> Call:
    """Collectives in the order that all ranks share; each rank completes those in flight when it likes."""
    parts: list[tuple[Call | None, Tensor | None]] = []
    expected: list[Tensor] = []
    own = run.own
    for shared in several:
        flies = shared.kind == "gather" and not shared.numbers and own.random() < 0.5
        if flies:
            shard = integers((shared.rows, shared.cols), own)
            everything = of_all_ranks(shard).view(-1, shared.cols)
            b = weight(shared.cols, UNIT, own, k_major=True)
            expected += [(everything.float() @ b.float()).to(BF16)]
            parts.append((None, torch.cat([shard, b.t()])))
        else:
            call = prepare(shared, drawn(shared, own), own, run.group)
            expected += call.expected
            parts.append((call, None))
    lateness = [own.randrange(3) for _ in several]
    group, waiting = run.group.group_name, torch.ops._c10d_functional.wait_tensor

    def run_all() -> list[Tensor]:
        flying: list[tuple[int, int, Tensor, Tensor]] = []
        found: list[list[Tensor]] = [[] for _ in several]

        def complete(now: int) -> None:
            for each in [each for each in flying if each[0] <= now]:
                flying.remove(each)
                _, number, result, b = each
                found[number] = [(waiting(result).float() @ b.float().t()).to(BF16)]

        for number, (shared, (call, both)) in enumerate(zip(several, parts, strict=True)):
            if call is not None:
                found[number] = call.run()
            elif both is not None:
                shard, b = both.split((shared.rows, UNIT))
                with forced(FORCED[shared.transport]):
                    result = torch.ops.asynctp.all_gather(shard, world(), group, all_keep=shared.kept)
                flying.append((number + lateness[number], number, result, b))
            complete(number)
        complete(1 << 30)
        return [tensor for tensors in found for tensor in tensors]

    call = Call(f"program of {len(several)}: {lateness}", run_all, [], lambda sent: expected, one() * 0)
    run.calls.append(call)
    return call


def check_uneven(run: Run, sizes: int) -> None:
    """A vocabulary, then random sizes, the last ranks' parts of which may be empty."""
    mine = part_of(VOCABULARY)
    for transport, names in IMPLEMENTATIONS.items():
        for name, other in itertools.product(names, repeat=2):
            limit(240)
            wanted = (name, other)[rank() % 2]
            for kind in ("gather", "scatter"):
                kept = kind == "gather" and names.index(name) % 2 == 1
                shared = Shared(kind, ROWS // world(), WIDTH, transport=transport, kept=kept)
                use = Use(wanted, (mine,), full=rank() == 0, k_major=True)
                found = able(shared, use)
                use = use if wanted in found else replace(use, implementation=found[0])
                call = prepare(shared, use, run.own, run.group)
                run.calls.append(call)
                run.check(call, graph=name == other)
                forget(call)
    for _ in range(sizes):
        limit(120)
        shared, own_sizes = random_sizes(run)
        run.check(run.prepare(shared, sizes=own_sizes), graph=run.shared.random() < 0.3)
        forget(run.calls[-1])


def forget(call: Call) -> None:
    """Let go of a call's tensors, but for what was counted."""
    call.run, call.sent, call.expect, call.expected = list, [], lambda sent: [], []


def part_of(total: int) -> int:
    """This rank's columns of so many, as `torch.chunk` has them: the last ranks may have fewer, or none."""
    each = -(-total // world())
    return max(min(each, total - rank() * each), 0)


def random_sizes(run: Run) -> tuple[Shared, list[int]]:
    """Rows and columns that ranks share, and those that are this rank's own."""
    most = 8 if GPU else 1
    rows, cols = run.shared.randrange(1, 128 * most), run.shared.randrange(1, 64 * most)
    if run.shared.random() < 0.7:
        rows, cols = -(-rows // 8) * 8, -(-cols // 8) * 8
    transport = run.shared.choice(list(IMPLEMENTATIONS))
    kind = run.shared.choice(("gather", "gather", "scatter", "scatter", "all_reduce"))
    if GPU and dist.get_backend() != "nccl" and kind == "all_reduce":
        kind = "scatter"
    total = run.shared.randrange(1, 400 * most)
    if run.shared.random() < 0.6:
        total = -(-total // 8) * 8
    kept = kind == "gather" and run.shared.random() < 0.3
    return Shared(kind, rows, cols, transport=transport, kept=kept), [part_of(total)]


def stress(run: Run, total: int) -> None:
    """`total` calls: ranks share which collective comes next, and differ in all else.

    Which of its uses each rank takes is drawn alike by all, so that each knows what the others send.
    """
    prepared: list[list[Call]] = []
    expected: dict[tuple[int, ...], list[Tensor]] = {}
    for shared in run.shapes():
        limit(240)
        calls = [run.prepare(shared) for _ in range(3)]
        for call in calls:
            run.eager(call)
        run.capture(calls[0])
        prepared.append(calls)
    limit(600)
    goal = run.done + total
    poisoned = run.done
    while run.done < goal:
        which = run.shared.randrange(len(prepared))
        picks = [run.shared.randrange(3) for _ in range(world())]
        calls = prepared[which]
        call, place = calls[picks[rank()]], (which, *picks)
        if place not in expected:
            several = range(len(call.sent))
            come = [torch.stack([calls[pick].sent[i][r] for r, pick in enumerate(picks)]) for i in several]
            expected[place] = call.expect(come)
        if GPU and run.own.random() < 0.05:
            torch.cuda._sleep(run.own.randrange(1, 400_000))
        run.several(call, expected[place])
        if run.done - poisoned >= POISON_EVERY:
            poisoned = run.done
            poison(run.group)
    synchronize()


def poison(group: dist.ProcessGroup) -> None:
    """Fill all communication memory with NaN, and give back what the allocator has to spare."""
    synchronize()
    dist.barrier()
    memory = existing_memory(group)
    for name, area in memory.areas.items() if memory else ():
        if "words" not in name:
            area.memory.fill_(0xFF)
    synchronize()
    if GPU:
        torch.cuda.empty_cache()
    dist.barrier()


# --- faults -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fault:
    """A call that all but the last rank make, and what that makes instead; "": nothing, it does not come."""

    call: str
    other: str = ""
    captured: bool = False
    grows: bool = False  # the call needs more memory than there is, which ranks make together

    @property
    def name(self) -> str:
        more = [", captured"] * self.captured + [", grows"] * self.grows
        return "".join([f"{self.call} / {self.other or 'absent'}", *more])


#: calls that a graph makes which does otherwise than its program, and one which does not
OF_ONE_SIZE = (
    *("gather fused", "gather direct", "gather whole", "gather bulk", "all keep: gather bulk"),
    *("scatter fused", "scatter direct", "scatter whole", "scatter bulk"),
    *("all_reduce decomposed", "all_reduce direct", "all_reduce whole", "maximum direct"),
)
FAULTS = [
    *(Fault(call) for call in ("gather fused", "gather kept", "gather direct", "scatter fused", "scatter direct")),
    *(Fault(call) for call in ("gather bulk", "scatter bulk", "gather whole")),
    *(Fault(f"all keep: gather {name}") for name in ("kept", "decomposed", "bulk")),
    *(Fault(call, captured=True) for call in ("gather decomposed", "scatter fused", "gather direct")),
    Fault("all keep: gather kept", captured=True),
    Fault("all keep: gather kept", "gather kept"),
    Fault("all keep: gather bulk", "gather direct"),
    Fault("scatter fused", "all keep: gather bulk", captured=True),
    Fault("gather fused", "long gather fused"),
    Fault("gather kept", "long gather bulk"),
    Fault("gather fused", "scatter fused"),
    Fault("gather fused", "gather direct"),
    Fault("gather direct", "long gather direct"),
    Fault("scatter direct", "gather fused"),
    Fault("scatter decomposed", "wide scatter bulk"),
    Fault("scatter bulk", "gather bulk"),
    Fault("gather whole", "scatter decomposed", captured=True),
    Fault("gather direct", "scatter direct", captured=True),
    Fault("scatter fused", "long gather kept", captured=True),
    Fault("all_reduce direct"),
    Fault("all_reduce fused"),
    Fault("all_reduce decomposed", captured=True),
    Fault("all_reduce whole"),
    Fault("all_reduce fused", "scatter fused"),
    Fault("all_reduce decomposed", "large all_reduce whole", captured=True),
    Fault("gather kept", "all_reduce fused"),
    Fault("large all_reduce direct"),
    Fault("large all_reduce direct", captured=True),
    Fault("all_reduce direct", "scatter direct"),
    Fault("gather direct", "all_reduce direct"),
    Fault("large all_reduce direct", "all_reduce direct", captured=True),
    Fault("large all_reduce direct", "gather fused"),
    Fault("huge gather fused", "gather fused", grows=True),
    Fault("maximum direct"),
    Fault("maximum direct", captured=True),
    Fault("maximum direct", "minimum direct"),
    Fault("maximum direct", "long maximum direct"),  # as of several that only one rank has made one
    Fault("maximum direct", "long maximum direct", captured=True),
    Fault("maximum direct", "gather direct"),
    Fault("gather fused", "maximum direct"),
    Fault("all_reduce direct", "maximum direct"),
    *(Fault(call, f"agreed {call}") for call in OF_ONE_SIZE),
    Fault("agreed gather direct", "otherwise agreed gather direct"),
    Fault("agreed scatter fused", "otherwise agreed scatter fused"),
    Fault("gather fused", "agreed gather fused", captured=True),
    Fault("gather direct", "agreed gather direct", captured=True),
]
ACCORDS = {"otherwise": 8, "agreed": (1 << 31) - 1}  # by a word in the name of a call


def made(what: str, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Make a call on known data: what it gives, and what it should."""
    ops, size, name = torch.ops.asynctp, world(), group.group_name
    accord = next((number for word, number in ACCORDS.items() if word in what), 0)
    (kind, implementation), kept = what.split()[-2:], "all keep" in what
    rows = UNIT * next((times for word, times in LENGTHS.items() if word in what), 1)
    b = torch.eye(UNIT, dtype=BF16, device=device())
    wait = torch.ops._c10d_functional.wait_tensor
    name_of = {"kept": "fused", "bulk": "whole"}.get(implementation, implementation)
    with forced(name_of):
        if kind == "gather":
            a = torch.full((rows, UNIT), rank() + 1.0, dtype=BF16, device=device())
            each = torch.arange(1.0, size + 1, device=device()).repeat_interleave(rows)[:, None]
            wanted = each.expand(-1, UNIT).to(BF16)
            if implementation == "bulk":
                return wait(ops.all_gather(a, size, name, all_keep=kept, accord=accord)), wanted
            outs = ops.all_gather_matmul(
                a, [b], [None], 0, implementation == "kept", size, name, all_keep=kept, accord=accord
            )
            return (torch.cat(outs), wanted.repeat(2, 1)) if implementation == "kept" else (outs[0], wanted)
        if kind == "all_reduce":
            whole = torch.full((rows * size, UNIT), rank() + 1.0, dtype=BF16, device=device())
            wanted = torch.full_like(whole, size * (size + 1) / 2)
            return ops.matmul_all_reduce([whole], [b], [None], "sum", name, accord=accord), wanted
        if kind in ("maximum", "minimum"):
            whole = torch.full((rows, UNIT), rank() + 1.0, dtype=BF16, device=device())
            wanted = torch.full_like(whole, size if kind == "maximum" else 1)
            return wait(ops.all_reduce(whole, kind[:3], name, accord=accord)), wanted
        dtype = FP32 if "wide" in what else BF16
        whole = torch.full((rows * size, UNIT), rank() + 1.0, dtype=BF16, device=device())
        wanted = torch.full((rows, UNIT), size * (size + 1) / 2, dtype=dtype, device=device())
        if implementation == "bulk":
            return wait(ops.reduce_scatter(whole.to(dtype), "sum", size, name, accord=accord)), wanted
        return ops.matmul_reduce_scatter(
            [whole], [b], [None], "sum", 0, size, name, sum_dtype=dtype if "wide" in what else None, accord=accord
        ), wanted


def judged(call: Callable[[], tuple[Tensor, Tensor]]) -> tuple[str, int, int]:
    """(what a call raised, how many elements are neither right nor NaN, how many are NaN)."""
    try:
        found, wanted = call()
        synchronize()
    except FAILURES as error:
        return f"{type(error).__name__}: {error}", 0, -1
    nan = found.isnan()
    return "", int(((found != wanted) & ~nan).sum()), int(nan.sum())


def said_by_next(what: str, group: dist.ProcessGroup, bound: float) -> str:
    """What the next call raises, once the failure is known."""
    until = time.monotonic() + bound
    while (memory := existing_memory(group)) is not None and memory.failure is None and time.monotonic() < until:
        time.sleep(0.05)
    try:
        made(what, group)
    except FAILURES as error:
        return str(error)
    return "nothing"


def check_fault(
    fault: Fault,
    bound: float,
    beside: Callable[[dist.ProcessGroup, int], contextlib.AbstractContextManager[None]] | None = None,
) -> dict[str, Any]:
    """beside: what goes on while so many ranks of a group are in the unlike call, or in that to which one is absent."""
    group = dist.new_group(list(range(world())))
    last = rank() == world() - 1
    before = [what for what in (fault.call, fault.other) if what and not (fault.grows and what == fault.call)]
    right = [judged(functools.partial(made, what, group)) for what in before]
    graph, captured = None, (torch.empty(0), torch.empty(0))
    if fault.captured and GPU:
        graph = torch.cuda.CUDAGraph()
        synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            captured = made(fault.call, group)
        graph.replay()
        right.append(judged(lambda: captured))
    synchronize()
    dist.barrier()
    begun = time.monotonic()
    said, wrong, nan = "", 0, 0
    if not last or fault.other:
        come = world() if fault.other else world() - 1
        with contextlib.nullcontext() if beside is None else beside(group, come):
            if graph is not None and not last:
                graph.replay()
                said, wrong, nan = judged(lambda: captured)
            else:
                said, wrong, nan = judged(functools.partial(made, fault.other if last else fault.call, group))
        again = said_by_next(fault.call, group, bound + 5)
        said = again if GPU else f"{said} {again}"
    seconds = time.monotonic() - begun
    synchronize()
    dist.barrier()
    release(group)
    dist.barrier()
    right.append(judged(functools.partial(made, fault.call, group)))
    well = right == [("", 0, 0)] * len(right) and wrong == 0
    if not last or fault.other:
        told = {"gather": "all_gather", "scatter": "reduce_scatter", "all_reduce": "all_reduce",
                "maximum": "all_reduce", "minimum": "all_reduce"}  # fmt: skip
        kinds = [told[what.split()[-2]] for what in (fault.call, fault.other) if what and not fault.grows]
        kinds += ["of accord", "deviate=False"] * ("agreed" in fault.other)
        named = "unlike calls have met" if fault.other and not fault.grows else "rank"  # or a bound that is as short
        named = named if fault.other else f"of rank {world() - 1}"
        more = 10 if fault.grows else 5  # the rank that waits for memory takes a peer's word only after a while
        well = well and nan != 0 and seconds < bound + more and all(text in said for text in (*kinds, named))
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, {"well": well, "said": said[:300], "seconds": round(seconds, 1), "wrong": wrong,
                                   "nan": nan, "right": right})  # fmt: skip
    return {"ok": all(each["well"] for each in found), "ranks": found}


def faults(only: str) -> dict[str, Any]:
    """Every fault; those that were not as they should be are told in full."""
    from asynctp_kernels.errors import timeout_s

    bad, slowest = dict[str, Any](), 0.0
    chosen = [fault for fault in FAULTS if only in fault.name and (GPU or not fault.captured)]
    for fault in chosen:
        limit(120)
        found = check_fault(fault, timeout_s())
        slowest = max(slowest, *(each["seconds"] for each in found["ranks"]))
        show({"fault": fault.name, "ok": found["ok"], "said": found["ranks"][0]["said"]})
        if not found["ok"]:
            bad[fault.name] = found["ranks"]
    return {"faults": len(chosen), "bad": bad, "slowest": slowest, "bound": timeout_s()}


# --- the program ------------------------------------------------------------------------------------------------
CHECKS: dict[str, Callable[[Run, int], None]] = {"use": check_use, "order": check_order, "uneven": check_uneven}


def run_kinds(options: argparse.Namespace) -> dict[str, Any]:
    run, line = Run(options.seed, options.only), dict[str, Any]()
    began = time.monotonic()
    for kind in options.kinds.split(","):
        if kind == "stress":
            stress(run, options.calls)
        else:
            CHECKS[kind](run, options.sizes)
        line[f"{kind} s"], began = round(time.monotonic() - began, 1), time.monotonic()
    synchronize()
    mine = {call.name: int(call.wrong) for call in run.calls if int(call.wrong)}
    ran: dict[str, int] = {}
    for call in run.calls:
        name = call.name.partition("implementation='")[2].partition("'")[0] or "program"
        ran[name] = ran.get(name, 0) + call.made
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, (run.done, mine, ran))
    memory = existing_memory(run.group)
    launched = 0 if memory is None else memory.launched
    for call in run.calls:
        call.graph, call.captured = None, []
    wrong = [dict(list(mine.items())[:20]) for _, mine, _ in found]
    return {"calls": [done for done, _, _ in found], "wrong": sum(len(each) for _, each, _ in found),
            "launched": launched, "ran": [ran for _, _, ran in found],
            **line, **({"wrong calls": wrong} if any(wrong) else {})}  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--calls", type=int, default=100_000 if GPU else 30)
    parser.add_argument("--sizes", type=int, default=300 if GPU else 10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="shapes, and faults, whose names contain this text")
    parser.add_argument("--faults", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.kinds.split(",")) - set(KINDS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    options = parsed()
    start(300)
    for module in GRIDS:
        vars(module)["grid"] = lambda wanted, most: most  # as many CTAs as there may be: fewer kernels to compile
    try:
        line = faults(options.only) if options.faults else run_kinds(options)
    except Exception:
        print(f"rank {rank()}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        raise
    show({"unlike": "faults" if options.faults else options.kinds, "ranks": world(), "seed": options.seed, **line})
    gc.collect()
    end()
    return int(bool(line.get("bad") or line.get("wrong")))


if __name__ == "__main__":
    sys.exit(main())
