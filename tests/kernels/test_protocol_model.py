"""Every interleaving of a small model of the flag, epoch and slot protocol of the direct kernels of
`asynctp_kernels.cuda.copy_kernels`.

In call e each rank stores its part into slot e % slots of every peer, releases that peer's word (to e), then for
every peer waits for the word and reads the landed part in two steps. Stores sit in a per-rank buffer and reach
memory in any order, except that a release goes only after all stores before it. The search visits every
reachable state and reports the first that breaks one of three promises: nobody is stuck, a read sees exactly
its call's data, no store lands on data that its owner has not finished reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

Step = tuple[str, int, int]  # what, peer, epoch
State = tuple[tuple[int, ...], tuple[tuple[Step, ...], ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Protocol:
    """The protocol, and the ways in which a test may break it."""

    world: int
    calls: int
    slots: int = 2
    releases: bool = True  # a word goes to memory after the data stores before it
    accepts_later: bool = True  # a waiter takes any word >= its epoch, not only that epoch
    waits_for_all: bool = True  # a call waits for every peer, not only for the next rank
    rank_order: bool = False  # waits come in rank order (scatter), not next rank first (gather)

    def program(self, rank: int) -> list[Step]:
        ring = [(rank + i) % self.world for i in range(1, self.world)]
        awaited = sorted(ring) if self.rank_order else ring
        awaited = awaited if self.waits_for_all else ring[:1]
        steps: list[Step] = []
        for epoch in range(1, self.calls + 1):
            steps += [(what, peer, epoch) for peer in reversed(ring) for what in ("store", "post")]
            steps += [(what, peer, epoch) for peer in awaited for what in ("wait", "read", "read_last")]
        return steps


class Broken(Exception):
    """A promise does not hold in a reachable state."""


def explore(protocol: Protocol) -> int:
    """Visit all reachable states; their number. Raises `Broken` at the first bad one."""
    model = _Model(protocol)
    seen, queue = {model.start}, deque([model.start])
    while queue:
        state = queue.popleft()
        successors = list(model.successors(state))
        if not successors and not model.finished(state):
            raise Broken(f"stuck at {model.describe(state)}")
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                queue.append(successor)
    return len(seen)


class _Model:
    """State: next step per rank, buffered stores per rank, words [owner, src], data [owner, slot, src].

    Data is 2 * epoch when it landed and 2 * epoch + 1 when its owner has finished reading it.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.p, world = protocol, protocol.world
        self.programs = [protocol.program(rank) for rank in range(world)]
        self.start: State = ((0,) * world, ((),) * world, (0,) * world**2, (1,) * (world**2 * protocol.slots))

    def successors(self, state: State) -> Iterator[State]:
        for rank in range(self.p.world):
            yield from self._drains(state, rank)
            if state[0][rank] < len(self.programs[rank]):
                yield from self._advances(state, rank, *self.programs[rank][state[0][rank]])

    def finished(self, state: State) -> bool:
        return all(pc == len(program) for pc, program in zip(state[0], self.programs, strict=True))

    def describe(self, state: State) -> list[Step]:
        return [program[pc] for pc, program in zip(state[0], self.programs, strict=True) if pc < len(program)]

    def _advances(self, state: State, rank: int, what: str, peer: int, epoch: int) -> Iterator[State]:
        pcs, buffers, words, data = state
        pcs = _with(pcs, rank, pcs[rank] + 1)
        if what in ("store", "post"):
            yield pcs, _with(buffers, rank, (*buffers[rank], (what, peer, epoch))), words, data
            return
        if what == "wait":
            word = words[rank * self.p.world + peer]
            if word == epoch or (word > epoch and self.p.accepts_later):
                yield pcs, buffers, words, data
            return
        at = self._slot(rank, epoch, peer)
        if data[at] != 2 * epoch:
            raise Broken(f"rank {rank} reads data of call {data[at] // 2} of rank {peer} in call {epoch}")
        yield pcs, buffers, words, _with(data, at, 2 * epoch + 1) if what == "read_last" else data

    def _drains(self, state: State, rank: int) -> Iterator[State]:
        """One buffered store of `rank` reaches memory."""
        pcs, buffers, words, data = state
        for i, (what, peer, epoch) in enumerate(buffers[rank]):
            if i > 0 and what == "post" and self.p.releases:
                continue
            rest = _with(buffers, rank, buffers[rank][:i] + buffers[rank][i + 1 :])
            if what == "post":
                yield pcs, rest, _with(words, peer * self.p.world + rank, epoch), data
                continue
            at = self._slot(peer, epoch, rank)
            if data[at] % 2 == 0:
                raise Broken(
                    f"rank {rank} overwrites unread data of call {data[at] // 2} at rank {peer} in call {epoch}"
                )
            yield pcs, rest, words, _with(data, at, 2 * epoch)

    def _slot(self, owner: int, epoch: int, src: int) -> int:
        return (owner * self.p.slots + epoch % self.p.slots) * self.p.world + src


def _with(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


@pytest.mark.parametrize("rank_order", [False, True], ids=["gather", "scatter"])
@pytest.mark.parametrize(("world", "calls"), [(2, 3), (2, 5), (3, 3)])
def test_protocol_holds_in_every_interleaving(world: int, calls: int, rank_order: bool) -> None:
    assert explore(Protocol(world, calls, rank_order=rank_order)) > 100


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Protocol(2, 2, slots=1), "overwrites unread data of call 1"),
        (Protocol(2, 1, releases=False), "reads data of call 0"),
        (Protocol(2, 3, accepts_later=False), "stuck at"),
        (Protocol(3, 3, waits_for_all=False), "overwrites unread data"),
    ],
    ids=["one slot", "no release", "only the exact epoch", "not every peer awaited"],
)
def test_search_finds_what_each_rule_prevents(broken: Protocol, message: str) -> None:
    with pytest.raises(Broken, match=message):
        explore(broken)
