"""Every interleaving of a small model of the flag, epoch and slot protocol of the direct kernels of
`asynctp_kernels.cuda.gemm.copy_kernels`.

In call e each rank stores its part into slot e % slots of every peer, releases that peer's word (to e and its call's
signature), then for every peer waits for the word and reads the landed part in two steps. An all-reduce in two shots
does all that again with the sums, which have words and landings of their own. Stores sit in a per-rank
buffer and reach memory in any order, except that a release goes only after all stores before it. A rank that finds
another signature in its own epoch, or whose time is up, has failed: its further waits end at once, and give no data.

The search visits every reachable state and reports the first that breaks one of three promises: nobody is stuck, a read
sees exactly its call's data, of a like call, and no store lands on data that its owner has not finished reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

Step = tuple[str, int, int, int, int]  # what, peer, epoch, signature, shot
Data = tuple[int, int, bool]  # epoch, signature, whether its owner has finished reading it
Word = tuple[int, int]  # epoch, signature
State = tuple[
    tuple[int, ...], tuple[tuple[Step, ...], ...], tuple[Word, ...], tuple[Data, ...], tuple[bool, ...], tuple[int, ...]
]


AGREED = 100


@dataclass(frozen=True)
class Protocol:
    """The protocol, and the ways in which a test may break it.

    Attributes:
        calls: of all ranks: signatures, in order; where they are unlike, for each rank. From `AGREED` on they are those
            of graphs that do otherwise than their program, of the same sizes as those without that.
        late: a wait may run out.
    """

    world: int
    calls: tuple[int, ...] | tuple[tuple[int, ...], ...]
    slots: int = 2
    releases: bool = True  # a word goes to memory after the data stores before it
    accepts_later: bool = True  # a waiter takes any word >= its epoch, not only that epoch
    waits_for_all: bool = True  # a call waits for every peer, not only for the next rank
    rank_order: bool = False  # waits come in rank order (scatter), not next rank first (gather)
    signed: bool = True  # a reader looks at the signature
    accords: bool = True  # a signature tells the accord
    stops: bool = True  # who has failed pushes and posts nothing more
    late: bool = False
    two_shots: tuple[int, ...] = ()  # signatures of the calls that take two
    own_words: bool = True  # of the second shot
    sums_need_all: bool = True  # who has not all parts sends no sum

    def of(self, rank: int) -> tuple[int, ...]:
        """Its calls."""
        mine = self.calls[rank] if isinstance(self.calls[0], tuple) else self.calls
        return tuple(mine)  # type: ignore[arg-type]

    def program(self, rank: int) -> list[Step]:
        ring = [(rank + i) % self.world for i in range(1, self.world)]
        awaited = sorted(ring) if self.rank_order else ring
        awaited = awaited if self.waits_for_all else ring[:1]
        steps: list[Step] = []
        for epoch, call in enumerate(self.of(rank), 1):
            steps.append(("begin", rank, epoch, call, 0))
            for shot in range(1 + (call in self.two_shots)):
                steps += [(what, peer, epoch, call, shot) for peer in reversed(ring) for what in ("store", "post")]
                steps += [(what, peer, epoch, call, shot) for peer in awaited for what in ("wait", "read", "read_last")]
        return steps


class Broken(Exception):
    """A promise does not hold in a reachable state."""


@dataclass(frozen=True)
class Search:
    """What a search saw: how many states, and in how many of the last ones which ranks had failed."""

    states: int
    failed: frozenset[tuple[bool, ...]]


def explore(protocol: Protocol) -> Search:
    """Visit all reachable states. Raises `Broken` at the first bad one."""
    model = _Model(protocol)
    seen, queue, ends = {model.start}, [model.start], set[tuple[bool, ...]]()
    while queue:
        state = queue.pop()  # the last one: what is wrong is found sooner
        successors = list(model.successors(state))
        if not successors:
            ends.add(state[4])
            if not model.finished(state):
                raise Broken(f"stuck at {model.describe(state)}")
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                queue.append(successor)
    return Search(len(seen), frozenset(ends))


class _Model:
    """State: next step per rank, buffered stores per rank, words [shot, owner, src], data [shot, owner, slot, src], who
    has failed, and the peers (bits) of which each rank has no data in its call; bit `world`: it pushes nothing.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.p, world = protocol, protocol.world
        self.programs = [protocol.program(rank) for rank in range(world)]
        self.start: State = (
            (0,) * world,
            ((),) * world,
            ((0, 0),) * (2 * world**2),
            ((0, 0, True),) * (2 * world**2 * protocol.slots),
            (False,) * world,
            (0,) * world,
        )

    def successors(self, state: State) -> Iterator[State]:
        """All that come next; of a step that is its rank's alone, only that: nobody sees when it is taken."""
        for rank, (pc, program) in enumerate(zip(state[0], self.programs, strict=True)):
            if pc < len(program) and program[pc][0] in ("begin", "store", "post"):
                yield from self._advances(state, rank, *program[pc])
                return
        for rank in range(self.p.world):
            yield from self._drains(state, rank)
            if state[0][rank] < len(self.programs[rank]):
                yield from self._advances(state, rank, *self.programs[rank][state[0][rank]])

    def finished(self, state: State) -> bool:
        return all(pc == len(program) for pc, program in zip(state[0], self.programs, strict=True))

    def describe(self, state: State) -> list[Step]:
        return [program[pc] for pc, program in zip(state[0], self.programs, strict=True) if pc < len(program)]

    def _advances(
        self, state: State, rank: int, what: str, peer: int, epoch: int, call: int, shot: int
    ) -> Iterator[State]:
        pcs, buffers, words, data, failed, missing = state
        pcs = _with(pcs, rank, pcs[rank] + 1)
        if what == "begin":
            silent = (failed[rank] and self.p.stops) << self.p.world
            yield pcs, buffers, words, data, failed, _with(missing, rank, silent)
        elif what in ("store", "post"):
            if not missing[rank] >> (self.p.world if shot == 0 or not self.p.sums_need_all else 0):
                if shot and missing[rank]:
                    raise Broken(f"rank {rank} sends a sum without all parts in call {epoch}")
                buffers = _with(buffers, rank, (*buffers[rank], (what, peer, epoch, call, shot)))
            yield pcs, buffers, words, data, failed, missing
        elif what == "wait":
            yield from self._waits((pcs, buffers, words, data, failed, missing), rank, peer, epoch, call, shot)
        elif missing[rank] >> peer & 1 or (shot and missing[rank]):
            yield pcs, buffers, words, data, failed, missing
        else:
            at = self._slot(rank, epoch, peer, shot)
            if data[at] != (epoch, call, False):
                raise Broken(f"rank {rank} reads data of call {data[at]} of rank {peer} in call {epoch}, {call}")
            read = _with(data, at, (epoch, call, True)) if what == "read_last" else data
            yield pcs, buffers, words, read, failed, missing

    def _waits(self, state: State, rank: int, peer: int, epoch: int, call: int, shot: int) -> Iterator[State]:
        """A wait that is over."""
        *others, failed, missing = state
        found, signature = others[2][self._word(rank, peer, shot)]
        without = *others, _with(failed, rank, True), _with(missing, rank, missing[rank] | 1 << peer)
        alike = signature == call if self.p.accords else signature % AGREED == call % AGREED
        if found == epoch and not alike and self.p.signed:
            yield without  # type: ignore[misc]
        elif found == epoch or (found > epoch and self.p.accepts_later):
            yield state
        elif failed[rank] or self.p.late:
            yield without  # type: ignore[misc]

    def _drains(self, state: State, rank: int) -> Iterator[State]:
        """One buffered store of `rank` reaches memory."""
        pcs, buffers, words, data, failed, missing = state
        for i, (what, peer, epoch, call, shot) in enumerate(buffers[rank]):
            if i > 0 and what == "post" and self.p.releases:
                continue
            rest = _with(buffers, rank, buffers[rank][:i] + buffers[rank][i + 1 :])
            if what == "post":
                words_then = _with(words, self._word(peer, rank, shot), (epoch, call))
                yield pcs, rest, words_then, data, failed, missing
                continue
            at = self._slot(peer, epoch, rank, shot)
            if not data[at][2] and not self._given_up(state, peer, rank, data[at][0], shot):
                raise Broken(f"rank {rank} overwrites unread data of call {data[at][0]} at rank {peer} in call {epoch}")
            yield pcs, rest, words, _with(data, at, (epoch, call, False)), failed, missing

    def _given_up(self, state: State, owner: int, src: int, epoch: int, shot: int) -> bool:
        """Whether `owner` reads data of `src` no more: it has failed, and is past the wait for that, or has no part."""
        pc, program = state[0][owner], self.programs[owner]
        ahead = program[pc:]
        this = [step for step in ahead if (*step[1:3], step[4]) == (src, epoch, shot)]
        reads = [step for step in this if step[0].startswith("read")]
        waits = [step for step in this if step[0] == "wait"]
        without = state[5][owner] if shot else state[5][owner] >> src & 1
        return not reads or (state[4][owner] and not waits and bool(without))

    def _word(self, owner: int, src: int, shot: int) -> int:
        return (shot * self.p.own_words * self.p.world + owner) * self.p.world + src

    def _slot(self, owner: int, epoch: int, src: int, shot: int) -> int:
        return ((shot * self.p.world + owner) * self.p.slots + epoch % self.p.slots) * self.p.world + src


def _with(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


LIKE = [(2, (1, 1, 1)), (2, (1, 2, 1, 2, 2)), (3, (1, 2, 1))]


@pytest.mark.parametrize("rank_order", [False, True], ids=["gather", "scatter"])
@pytest.mark.parametrize(("world", "calls"), LIKE)
def test_protocol_holds_in_every_interleaving(world: int, calls: tuple[int, ...], rank_order: bool) -> None:
    search = explore(Protocol(world, calls, rank_order=rank_order))
    assert search.states > 100
    assert search.failed == {(False,) * world}


@pytest.mark.parametrize(
    ("world", "calls", "two_shots"),
    [(2, (1, 1, 1), (1,)), (2, (1, 2, 1, 2), (1,)), (2, (1, 2, 2, 1), (1, 2)), (3, (1, 1), (1,)), (3, (1, 2), (2,))],
)
def test_two_shots_hold_too(world: int, calls: tuple[int, ...], two_shots: tuple[int, ...]) -> None:
    """By themselves, and among calls of one."""
    search = explore(Protocol(world, calls, two_shots=two_shots))
    assert search.states > 100
    assert search.failed == {(False,) * world}


#: calls of each rank: others, in another order, one left out
UNLIKE = [
    ((1,), (2,)),
    ((1, 3, 3), (2, 3, 3)),
    ((3, 1, 3, 3), (3, 2, 3, 3)),
    ((1, 2, 3), (2, 1, 3)),
    ((1, 2, 3), (2, 3)),
    ((3, 1, 2), (3, 2)),
    ((1,), (1 + AGREED,)),  # equal, of unlike forms of a function
    ((1, 2), (1, 2 + AGREED)),
    ((1, 1 + AGREED, 3), (1, 1, 3)),
    ((1 + AGREED, 2), (1 + 2 * AGREED, 2)),
]


@pytest.mark.parametrize("rank_order", [False, True], ids=["gather", "scatter"])
@pytest.mark.parametrize("calls", UNLIKE, ids=str)
def test_unlike_calls_are_found_and_never_read(calls: tuple[tuple[int, ...], ...], rank_order: bool) -> None:
    """Both ranks have failed at the end, and nobody is stuck; if time may be up before, at least one has."""
    protocol = Protocol(2, calls, rank_order=rank_order)
    assert explore(protocol).failed == {(True, True)}
    assert all(any(failed) for failed in explore(replace(protocol, late=True)).failed)


@pytest.mark.parametrize("two_shots", [(1,), (2,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("calls", UNLIKE, ids=str)
def test_unlike_calls_of_two_shots_are_found(calls: tuple[tuple[int, ...], ...], two_shots: tuple[int, ...]) -> None:
    protocol = Protocol(2, calls, two_shots=two_shots)
    assert explore(protocol).failed == {(True, True)}
    assert all(any(failed) for failed in explore(replace(protocol, late=True)).failed)


@pytest.mark.parametrize("calls", [((1,), (1,), (2,)), ((1, 3), (2, 3), (1, 3)), ((1,), (1 + AGREED,), (1,))], ids=str)
def test_so_they_are_of_three_ranks(calls: tuple[tuple[int, ...], ...]) -> None:
    assert explore(Protocol(3, calls)).failed == {(True, True, True)}


@pytest.mark.parametrize("two_shots", [(), (1,)], ids=str)
@pytest.mark.parametrize("calls", [(1, 1, 1), (1, 2, 1)], ids=str)
def test_a_wait_that_runs_out_breaks_nothing_for_others(calls: tuple[int, ...], two_shots: tuple[int, ...]) -> None:
    """Ranks whose waits run out while another is only late."""
    assert explore(Protocol(2, calls, late=True, two_shots=two_shots)).states > 100


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Protocol(2, (1, 1), slots=1), "overwrites unread data of call"),
        (Protocol(2, (1,), releases=False), "reads data of call"),
        (Protocol(2, (1, 1, 1), accepts_later=False), "stuck at"),
        (Protocol(3, (1, 1, 1), waits_for_all=False), "overwrites unread data"),
        (Protocol(2, ((1,), (2,)), signed=False), "reads data of call"),
        (Protocol(2, ((1,), (1 + AGREED,)), accords=False), "reads data of call"),
        (Protocol(3, ((1, 3), (1, 3), (2, 3)), stops=False), "reads data of call"),
        (Protocol(3, (1, 1, 1), stops=False, late=True), "reads data|overwrites unread data"),
        (Protocol(2, (2, 1), slots=1, two_shots=(1,)), "overwrites unread data of call"),
        (Protocol(2, (1,), own_words=False, two_shots=(1,)), "reads data of call"),
        (Protocol(3, (1,), sums_need_all=False, late=True, two_shots=(1,)), "sends a sum without all parts"),
    ],
    ids=[
        "one slot",
        "no release",
        "only the exact epoch",
        "not every peer awaited",
        "no signature",
        "no accord in it",
        "posts after an unlike call",
        "posts after a wait that ran out",
        "one slot for two shots after one",
        "one word for two shots",
        "a sum without all parts",
    ],
)
def test_search_finds_what_each_rule_prevents(broken: Protocol, message: str) -> None:
    with pytest.raises(Broken, match=message):
        explore(broken)
