"""Calls of the ops, as all ranks of a program make them on `streams`, and what they must give."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch
from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose.tiles import Tiles
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from asynctp_kernels.cuda.gemm import gemm
from asynctp_kernels.cuda.plans import fused
from asynctp_kernels.cuda.runtime import driver
from asynctp_kernels.cuda.runtime.memory import existing_memory
from cuda_emulated import Steps, look, raw
from cuda_stubs import MAIN, expected_products, gather_call, result_dtype, scatter_call, tensor, whole
from plan_runs import arguments_of
from streams import TILES, Found, Graph, Place, Rank, Shared, rank_of, run
from torch import Tensor

SEEDED = torch.default_generator  # `torch.manual_seed` notes the whole stack for GPUs that are not there


# --- calls -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Op:
    """One call of all ranks.

    Attributes:
        kind: "gather", "scatter", "all reduce", "bulk gather", "bulk scatter", or "move" and one of the first.
        way: the implementation; of bulk calls and of moves, one of the same transport.
        options: of `gather_call` or `scatter_call`.
        stream, group: on which, in which.
        waited: how many calls later the result is read, and on which stream; that of a bulk call is waited for first.
    """

    kind: str
    way: str = "fused"
    options: tuple[tuple[str, Any], ...] = ()
    stream: int = MAIN
    group: int = 0
    waited: tuple[int, int] = (0, MAIN)


def gather(way: str = "fused", stream: int = MAIN, group: int = 0, later: int = 0, **options: Any) -> Op:
    given = {"shard": (32,), "k": 64, "ns": (32,)} | options
    return Op("gather", way, tuple(given.items()), stream, group, (later, stream))


def scatter(
    way: str = "fused", stream: int = MAIN, group: int = 0, later: int = 0, kind: str = "scatter", **options: Any
) -> Op:
    """Of as many rows as 2 to 4 ranks divide."""
    given = {"rows": (96,), "ks": (32,), "n": 32} | options
    return Op(kind, way, tuple(given.items()), stream, group, (later, stream))


def bulk(
    kind: str, later: int = 0, on: int = MAIN, stream: int = MAIN, group: int = 0, way: str = "fused", **options: Any
) -> Op:
    """Like the calls above, but without a product. shape: of the shard, or of the whole. kept: by every rank."""
    given = {"shape": (32, 64) if kind == "gather" else (96, 32), "kept": False} | options
    return Op(f"bulk {kind}", way, tuple(given.items()), stream, group, (later, on))


def move(kind: str, way: str = "whole", stream: int = MAIN, group: int = 0, **options: Any) -> Op:
    """The same of a product that is made elsewhere (`cuda.Mover`).

    numbers: how many travel with a shard. reduce_op: of an all-reduce.
    """
    return replace(bulk(kind, 0, stream, stream, group, way, **options), kind=f"move {kind}")


#: one call, as each rank of its group makes it: of one wire, but each with a use of its own
Each = Op | tuple[Op, ...]


def of_rank(each: Each, rank: int) -> Op:
    return each[rank % len(each)] if isinstance(each, tuple) else each


@functools.cache
def data(op: Op, number: int, rank: int, world: int) -> Any:
    """The operands of one rank in call `number`. A shard depends on these only, and not on what is done with it."""
    SEEDED.manual_seed(zlib.crc32(repr((op, number, rank)).encode()))
    if op.kind in ("gather", "scatter", "all reduce"):
        call = (gather_call if op.kind == "gather" else scatter_call)(**dict(op.options), world=world)
        return call if op.kind != "gather" else replace(call, a_shard=_shard(call.a_shard, number, rank))
    options = dict(op.options)
    numbers = [torch.randn(count) for count in [options.get("numbers", 0)] if count]
    return (_shard(tensor(*options["shape"]), number, rank), *numbers)


def _shard(like: Tensor, number: int, rank: int) -> Tensor:
    SEEDED.manual_seed(1000 * number + rank)
    return tensor(like.numel()).to(like.dtype).view(like.shape)


@functools.cache
def expected(each: Each, number: int, rank: int, world: int) -> list[Tensor]:
    """What the call gives on one rank."""
    op = of_rank(each, rank)
    calls = [data(of_rank(each, peer), number, peer, world) for peer in range(world)]
    if not op.kind.endswith("gather"):
        return _scattered(each, calls, rank)
    shards = [call[0] if isinstance(call, tuple) else call.a_shard for call in calls]
    if op.kind == "gather":
        return _gathered(calls, [shard.view(calls[rank].a_shard.shape) for shard in shards], rank)
    joined = torch.cat([shard.view(calls[rank][0].shape) for shard in shards])
    if op.kind == "bulk gather":
        return [joined]
    numbers = [torch.stack([call[1] for call in calls])] if "numbers" in dict(op.options) else []
    return [joined.view(world, *calls[rank][0].shape), *numbers]


def _gathered(calls: Sequence[GatherFacts], shards: Sequence[Tensor], rank: int) -> list[Tensor]:
    call = calls[rank]
    full = _joined(shards, call.gather_dim)
    scale = _joined([each.a_scale for each in calls], call.gather_dim) if call.gather_a_scale else call.a_scale
    outs = [out.view(*full.shape[:-1], -1) for out in expected_products(call, full, scale)]
    numbers = [] if call.along_shard is None else [_joined([each.along_shard for each in calls], call.gather_dim)]
    return [*outs, *[full] * call.return_a_full, *numbers]


def _joined(parts: Sequence[Any], dim: int) -> Tensor:
    return torch.cat([part.float() for part in parts], dim).to(parts[0].dtype)


def _scattered(each: Each, calls: Sequence[Any], rank: int) -> list[Tensor]:
    """A call without a product adds, as do all that are beside one."""
    call = calls[rank]
    parts = [
        found[0] if isinstance(found, tuple) else whole(found, of_rank(each, peer).way)
        for peer, found in enumerate(calls)
    ]
    if isinstance(call, tuple) and of_rank(each, rank).kind == "move all reduce":
        parts = [part.view(call[0].shape) for part in parts]
        if (fold := {"max": torch.amax, "min": torch.amin}.get(_reduce_op(of_rank(each, rank)))) is not None:
            return [fold(torch.stack(parts), 0)]
        return [torch.cat([_sum(parts, peer) for peer in range(len(parts))]).to(call[0].dtype)]
    if isinstance(call, tuple):
        return [_sum([part.view(call[0].shape) for part in parts], rank).to(call[0].dtype)]
    parts = [part.view(parts[rank].shape) for part in parts]
    of_ranks = range(call.world) if of_rank(each, rank).kind == "all reduce" else [rank]
    factor = 1 / call.world if call.reduce_op == "avg" else 1.0
    return [torch.cat([_sum(parts, peer, call.dim) * factor for peer in of_ranks]).to(result_dtype(call))]


def _reduce_op(op: Op) -> str:
    """The reduction of an op without a matmul."""
    return str(dict(op.options).get("reduce_op", "sum"))


def _sum(parts: Sequence[Tensor], rank: int, dim: int = 0) -> Tensor:
    """Of what is for one rank, in fp32."""
    return sum((part.chunk(len(parts), dim)[rank].float() for part in parts), torch.zeros(()))


def placed(rank: Rank, operands: Any) -> Any:
    """The same operands in memory of the machine's."""

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            return rank.empty(value.shape, value.dtype, value.stride())
        return [place(each) for each in value] if isinstance(value, (list, tuple)) else value

    if isinstance(operands, tuple):
        return tuple(map(place, operands))
    return replace(operands, **{each.name: place(getattr(operands, each.name)) for each in fields(operands)})


def tensors(operands: Any) -> list[Tensor]:
    """All of them."""
    if not isinstance(operands, (list, tuple)):
        operands = [getattr(operands, each.name) for each in fields(operands)]
    flat = [each for value in operands for each in (value if isinstance(value, (list, tuple)) else [value])]
    return [each for each in flat if isinstance(each, Tensor)]


def small_operands(call: GatherFacts | ReduceFacts) -> list[Tensor]:
    """Scales and biases."""
    scales = [*call.b_scales, *([call.a_scale] if isinstance(call, GatherFacts) else call.a_scales)]
    return [each for each in (*scales, *call.biases) if each is not None]


# --- one rank ----------------------------------------------------------------------------------------------------
class Player:
    """One rank that makes calls."""

    def __init__(self, rank: Rank, wanders: bool = False) -> None:
        """wanders: Scales and biases stay until the same call is made again, which has its own elsewhere."""
        self.rank, self.world, self.wanders = rank, rank.world, wanders
        self.stay: dict[Op, list[Tensor]] = {}
        self.flying: list[tuple[int, Callable[[], None]]] = []

    def mine(self, each: Each) -> Op:
        """This rank's part of a call. All parts are of one group."""
        group = (each[0] if isinstance(each, tuple) else each).group
        return of_rank(each, self.rank.groups[group].rank())

    def fill(self, op: Op, operands: Any, number: int) -> None:
        """Let the operands be those of call `number`."""
        mine = data(op, number, self.rank.groups[op.group].rank(), self.world)
        pairs = [(Place.of(to), given) for to, given in zip(tensors(operands), tensors(mine), strict=True)]

        def steps() -> Steps:
            for to, given in pairs:
                to.tensor().copy_(given)
            yield None

        self.rank.enqueue(self.rank.current_stream, "fill", steps)

    def check(self, each: Each, results: Sequence[Tensor], number: int) -> None:
        """The current stream reads the results of call `number`."""
        op = self.mine(each)
        wanted = expected(each, number, self.rank.groups[op.group].rank(), self.world)
        places = [Place.of(result) for result in results]

        def steps() -> Steps:
            for place, each in zip(places, wanted, strict=True):
                found = yield from look(place.tensor())
                if not torch.equal(raw(found), raw(each)):
                    raise Found(f"rank {self.rank.rank}: call {number}, {op.kind} {op.way}, is wrong")

        self.rank.enqueue(self.rank.current_stream, "check", steps)

    def start(self, op: Op, operands: Any) -> tuple[list[Tensor], Callable[[], None]]:
        """Make a call; gives its results, and what waits for them."""
        group = self.rank.groups[op.group]
        with cuda.forced(op.way):
            if op.kind.startswith("bulk"):
                return self._start_bulk(op, *operands, group)
            if op.kind.startswith("move"):
                return self._move(op, operands, group), lambda: None
            return self._run(op, operands, group), lambda: None

    def _start_bulk(self, op: Op, given: Tensor, group: Any) -> tuple[list[Tensor], Callable[[], None]]:
        if op.kind == "bulk gather":
            result = cuda.run_bulk_gather(given, self.world, group, lambda: None, dict(op.options)["kept"])
        else:
            result = cuda.run_bulk_scatter(given, "sum", self.world, group, lambda: None)
        assert result is not None
        return [result], self.rank.waits.pop() if self.rank.waits else lambda: None

    def _move(self, op: Op, operands: Sequence[Tensor], group: Any) -> list[Tensor]:
        if op.kind == "move gather":
            moved = cuda.Mover(group, dict(op.options)["kept"]).gather(*operands)
            assert moved is not None
            return [each for each in moved if each is not None]
        (given,) = operands
        if op.kind == "move all reduce":
            total = cuda.Mover(group).all_reduce(given, _reduce_op(op))
            assert total is not None
            return [total]
        part = cuda.Mover(group).scatter(given.view(self.world, -1, given.shape[-1]), "sum")
        assert part is not None
        return [part]

    def _run(self, op: Op, call: Any, group: Any) -> list[Tensor]:
        if op.kind == "all reduce":
            call = replace(call, scatter_dim=None)
        found = cuda.run(arguments_of(call, group, self.world), lambda call: None, lambda call, mover: None)
        assert found is not None
        return found if op.kind == "gather" else [found]

    def call(self, each: Each, number: int) -> None:
        """A call on new memory, of which nothing stays but what is in flight."""
        op = self.mine(each)
        self.rank.current_stream = op.stream
        operands = placed(self.rank, data(op, number, self.rank.groups[op.group].rank(), self.world))
        self.fill(op, operands, number)
        results, wait = self.start(op, operands)
        self.flying.append((number + op.waited[0], functools.partial(self._land, each, number, results, wait)))
        if self.wanders:
            self.stay[op] = small_operands(operands)
        del operands, results, wait
        self.land(number)

    def _land(self, each: Each, number: int, results: Sequence[Tensor], wait: Callable[[], None]) -> None:
        op = self.mine(each)
        self.rank.current_stream = op.waited[1]
        wait()
        self.check(each, results, number)
        for result in results if op.waited[1] != op.stream else ():
            driver.record_stream(result)  # as a program must

    def land(self, number: int) -> None:
        """Wait for the results that are due."""
        due = [land for at, land in self.flying if at <= number]
        self.flying = [(at, land) for at, land in self.flying if at > number]
        for land in due:
            land()


@dataclass(frozen=True)
class Session:
    """What all ranks do.

    Attributes:
        ops: one after the other, `rounds` times.
        captured: then they are captured, and the graph is launched as often again.
        edits: plans have graphs. wanders: see `Player`.
        chunks, tiles, registers, options: of the GEMM, of the GEMM, of every kernel, of `machine`.
    """

    world: int
    ops: tuple[Each, ...]
    rounds: int = 2
    captured: bool = False
    edits: bool = False
    wanders: bool = False
    chunks: int = 2
    tiles: Tiles = TILES
    registers: int = 40
    options: tuple[tuple[str, Any], ...] = ()


def perform(session: Session, rank: Rank) -> None:
    """All of a session that one rank enqueues."""
    player, ops = Player(rank, session.wanders), session.ops
    rank.edits, rank.registers = session.edits, session.registers
    count = session.rounds * len(ops)
    for number in range(count):
        player.call(ops[number % len(ops)], number)
    player.land(count + len(ops))
    if session.captured:
        replay(session, player, count)
    found = [memory for group in rank.groups if (memory := existing_memory(group)) is not None]
    assert session.edits == any(memory.launched for memory in found)
    assert not session.wanders or any(len(graph.told) > 1 for graph in rank.graphs)  # type: ignore[attr-defined]


def replay(session: Session, player: Player, number: int) -> None:
    """Capture the calls, and launch the graph on other data each time."""
    rank, ops = player.rank, [player.mine(each) for each in session.ops]
    rank.current_stream = MAIN
    operands = [placed(rank, data(op, 0, rank.groups[op.group].rank(), rank.world)) for op in ops]
    results = []
    rank.capturing = 7
    with rank.captured(MAIN) as work:
        for op, given in zip(ops, operands, strict=True):
            made, wait = player.start(op, given)
            results.append(made)
            wait()
    rank.capturing, graph = 0, Graph(rank, work)
    for _ in range(session.rounds):
        for op, given in zip(ops, operands, strict=True):
            player.fill(op, given, number)
        graph.launch(MAIN)
        for each, made in zip(session.ops, results, strict=True):
            player.check(each, made, number)
        number += 1
    player.call(session.ops[0], number)


Spoil = Callable[[], contextlib.AbstractContextManager[Any]]  # changes the package or its kernels


def play(session: Session, seed: int, spoil: Spoil = contextlib.nullcontext) -> None:
    """All ranks' session, in an order that `seed` says, of odd seeds beside other groups.

    Raises:
        Found: Something is wrong.
    """
    shared, ranks = Shared(), []
    beside = mock.patch.object(fused, "others_beside", return_value=bool(seed % 2))
    for number in range(session.world):
        options = {"tiles": session.tiles, **dict(session.options)}
        with rank_of(number, session.world, shared, session.chunks, **options) as rank, beside, spoil():
            perform(session, rank)
            assert not (session.tiles.pingpong and gemm._gluon_faults), "another GEMM was played"
            ranks.append(rank)
    for rank in ranks:
        rank.current_stream = MAIN
    with spoil():
        run(ranks, seed)
