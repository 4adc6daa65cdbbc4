"""Explore every interleaving of the items that all ranks enqueue. See `test_channel_model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import or_

from asynctp_kernels.cuda.runtime.script import (
    Await,
    Copy,
    Place,
    Post,
    Record,
    Wait,
    Write,
)
from channel_program import _RANK, Bytes, Case, Count, Kernel, Rank, Tag, Touch, Watching, area

# --- the model -------------------------------------------------------------------------------------------------
State = tuple[tuple[int, ...], bytes, bytes]  # next action of each thread, words, tag number of each byte


@dataclass
class Action:
    """What a thread does next.

    Attributes:
        kind: "after" (thread, count): until that thread has done so many actions; "wait" (word, value), until it is as
            much, or "exactly"; "set" (word, value); "add" (word, 1); "begin" and "end" of an access; "done", the last
            of each thread.
        reads, writes: bits of the bytes and words that it looks at or changes; both ends of an access have all of them.
        source, target: indices of bytes.
        expected: what a reader must find. values: what a writer stores, None for a copy.
        let_go: the word that lets go of a wait; or with which the action is `skipped`.
    """

    name: str
    kind: str
    number: int = 0
    value: int = 0
    reads: int = 0
    writes: int = 0
    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    expected: bytes = b""
    values: bytes | None = None
    let_go: int = -1
    skipped: bool = False

    def conflicts(self, other: Action) -> bool:
        """Whether the order of the two can matter."""
        if self.kind == other.kind == "add":
            return False
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


class Model:
    """All threads of all ranks, and how a state goes over into the next."""

    def __init__(self, case: Case) -> None:
        self.threads: list[list[Action]] = []
        self.owners: list[str] = []
        self.ranks: list[int] = []
        self.tags: list[Tag] = [(-1, -1, "nothing", 0)]
        self._thread_numbers: dict[tuple[int, str], int] = {}
        self._tag_numbers: dict[Tag, int] = {}
        self._words: dict[int, int] = {}
        self.failed = [self._word(-1 - rank) for rank in range(case.world)] if case.watch else []
        self.let_go = [self._word(-101 - rank) for rank in range(case.world)] if case.watch else []
        self.watch = case.watch
        if case.watch is not None:
            for rank, peer in product(range(case.world), repeat=2):
                self._word(-1001 - rank * case.world - peer)
        for rank in range(case.world):
            self._load(Rank(case, rank))
        size = Rank(case, case.world).at("own")
        self.start: State = ((0,) * len(self.threads), bytes(len(self._words)), bytes(size))
        for action in (action for thread in self.threads for action in thread):
            if action.kind in ("wait", "exactly", "set", "add"):
                bit = 1 << size + action.number
                action.reads, action.writes = (0, bit) if action.kind in ("set", "add") else (bit, 0)
            if action.let_go >= 0:
                action.reads |= 1 << size + action.let_go
        self.streams = len(self.threads)  # and their kernels
        for thread in self.threads:
            thread.append(Action("done", "done"))
        if case.watch is not None:
            self._add_watches(case.watch, case.world, size)
        # of each thread: the bits that its actions from one on look at, and change
        self.to_come = [
            tuple(
                list(accumulate((getattr(action, bits) for action in reversed(actions)), or_))[::-1]
                for bits in ("reads", "writes")
            )
            for actions in self.threads
        ]

    def _add_watches(self, watch: Watching, world: int, size: int) -> None:
        """The thread of each rank's watch: it fails, tells all others, waits for them, lets go."""
        free = dict.fromkeys(range(world), 0)
        for address, number in self._words.items():
            if address >= 0 and area(address) == "free":
                free[address // _RANK] |= 1 << size + number
        for rank in range(world):
            peers = [peer for peer in range(world) if peer != rank]
            told = {peer: self._word(-1001 - rank * world - peer) for peer in peers}
            telling = [self._word(-1001 - peer * world - rank) for peer in peers]
            sees = free[rank] | sum(1 << size + number for number in told.values())
            failed, let_go = self.failed[rank], self.let_go[rank]
            actions = [Action("fails", "fail", failed, 1, sees, free[rank] | 1 << size + failed)]
            actions += [Action("tells", "set", number, 1, 0, 1 << size + number) for number in telling]
            if watch.told:
                waits = told.values()
                actions += [Action("is told", "wait", number, 1, 1 << size + number) for number in waits]
            # whatever waits for a peer can go on then: those waits read this word
            actions += [Action("lets go", "set", let_go, 1, 0, 1 << size + let_go), Action("done", "done")]
            thread = self._thread(rank, "watch")
            self.threads[thread] = actions
        self.start = ((0,) * len(self.threads), self.start[1], self.start[2])

    def _may(
        self, action: Action, pcs: Sequence[int], reach: Sequence[int], words: Sequence[int], seen: Sequence[set[int]]
    ) -> bool:
        """As `_can`, where threads have come from `pcs` to `reach` in some order."""
        if action.kind != "fail":
            return _can(action, reach, words, seen)
        assert self.watch is not None
        rank = self.failed.index(action.number)
        told = any(words[number] for number in self._told(rank))
        for thread in range(self.streams):
            for mine in self.threads[thread][pcs[thread] : reach[thread] + 1] if self.ranks[thread] == rank else ():
                meets = mine.name == "wait free" and (self.watch.impatient or seen[mine.number] - {0, mine.value})
                if meets or (told and mine.let_go >= 0):
                    return True
        return False

    def _told(self, rank: int) -> list[int]:
        """The words by which others say to a rank that they have failed."""
        world = len(self.failed)
        return [self._words[-1001 - rank * world - peer] for peer in range(world) if peer != rank]

    def fails(self, rank: int, pcs: Sequence[int], words: Sequence[int]) -> bool:
        """Whether the watch of a rank sees that it waits in vain: for a peer to come to a call, or that has failed."""
        assert self.watch is not None
        told = any(words[number] for number in self._told(rank))
        for thread in range(self.streams):
            action = self.threads[thread][pcs[thread]]
            if self.ranks[thread] != rank or action.let_go < 0 or action.skipped or _can(action, pcs, words):
                continue
            if told or (action.name == "wait free" and (words[action.number] or self.watch.impatient)):
                return True
        return False

    # --- from items to threads
    def _load(self, rank: Rank) -> None:
        records: dict[int, tuple[int, int]] = {}  # the last record of each event: the host binds waits to it
        for number, call in enumerate(rank.case.of(rank.rank)):
            for stream, item in rank.enqueue(number, call):
                thread = self._thread(rank.rank, stream)
                if isinstance(item, Record):
                    records[item.event] = thread, len(self.threads[thread])
                elif isinstance(item, Await):
                    self._after(thread, *records.get(item.event, (thread, 0)))
                elif isinstance(item, Kernel):
                    self._launch(rank, thread, item)
                else:
                    self._append(thread, item, rank.bases)

    def _thread(self, rank: int, name: str) -> int:
        found = self._thread_numbers.setdefault((rank, name), len(self.threads))
        if found == len(self.threads):
            self.threads.append([])
            self.owners.append(f"rank {rank} {name}")
            self.ranks.append(rank)
        return found

    def _after(self, thread: int, other: int, count: int) -> None:
        self.threads[thread].append(Action(f"after {self.owners[other]}", "after", other, count))

    def _launch(self, rank: Rank, stream: int, kernel: Kernel) -> None:
        begin = len(self.threads[stream])
        counts: dict[int, int] = {}
        for index, program in enumerate((*kernel.programs, kernel.last)):
            last = index == len(kernel.programs)
            thread = self._thread(rank.rank, f"{kernel.name} {'last' if last else index}")
            for other, count in counts.items() if last else [(stream, begin)]:
                self._after(thread, other, count)
            for item in program:
                before = len(self.threads[thread])
                self._append(thread, item, rank.bases)
                meets = kernel.name == "stage" and isinstance(item, Touch | Post)
                if meets and self.watch is not None and not (isinstance(item, Post) and area(item.address) == "free"):
                    for action in self.threads[thread][before:]:  # a rank that has not met all stages nothing
                        action.let_go, action.skipped = self.let_go[rank.rank], True
            counts[thread] = len(self.threads[thread])
        self._after(stream, *counts.popitem())

    def _append(self, thread: int, item: object, bases: Sequence[int]) -> None:
        actions = self.threads[thread]
        if isinstance(item, Wait):
            kind = "exactly" if item.exactly else "wait"
            action = Action(f"wait {area(item.address)}", kind, self._word(item.address), item.value)
            if self.watch is not None and area(item.address) in ("free", "full", "landed"):
                action.let_go = self.let_go[self.ranks[thread]]
            actions.append(action)
        elif isinstance(item, Write | Post):
            actions.append(Action(f"{area(item.address)} = {item.value}", "set", self._word(item.address), item.value))
        elif isinstance(item, Count):
            actions.append(Action(f"{area(item.address)} + 1", "add", self._word(item.address), 1))
        elif isinstance(item, Copy):
            source = _bytes(item, item.src, item.src_pitch, bases)
            actions += _access("copy", source, _bytes(item, item.dst, item.dst_pitch, bases))
        elif isinstance(item, Touch) and (item.reads or item.writes):
            expected, values = self._numbers(item.reads), self._numbers(item.writes)
            actions += _access("access", _addresses(item.reads), _addresses(item.writes), expected, values)

    def _word(self, address: int) -> int:
        return self._words.setdefault(address, len(self._words))

    def _numbers(self, tagged: Bytes) -> bytes:
        return bytes(self._tag_number(tag) for _, tag in tagged)

    def _tag_number(self, tag: Tag) -> int:
        found = self._tag_numbers.setdefault(tag, len(self.tags))
        if found == len(self.tags):
            self.tags.append(tag)
        return found

    # --- from state to state
    def moves(self, state: State, reduced: bool) -> list[int]:
        """The threads to advance: all that can, or one that nobody can disturb.

        The reduction: if no action that the other threads can still do while this one waits conflicts with its next
        action, then that action commutes with all of them, and each order of events is equivalent (every action sees
        the same and does the same) to one in which it comes first. Threads are straight lines, so no action is put
        off forever. `_undisturbed` may think that others can do more than they can, never less.
        """
        pcs, words, _ = state
        may, able = _can if self.watch is None else self._able, list[int]()
        for thread, (actions, pc) in enumerate(zip(self.threads, pcs, strict=True)):
            if may(actions[pc], pcs, words):
                if reduced and self._undisturbed(state, thread):
                    return [thread]
                able.append(thread)
        return able

    def _able(self, action: Action, pcs: Sequence[int], words: Sequence[int]) -> bool:
        if action.kind == "fail":
            return self.fails(self.failed.index(action.number), pcs, words)
        return _can(action, pcs, words)

    def _undisturbed(self, state: State, thread: int) -> bool:
        """Whether nothing that others can do before `thread` goes on conflicts with its next action."""
        pcs, words, _ = state
        mine = self.threads[thread][pcs[thread]]
        if not any(
            mine.writes & (reads[pc] | writes[pc]) or mine.reads & writes[pc]
            for other, ((reads, writes), pc) in enumerate(zip(self.to_come, pcs, strict=True))
            if other != thread
        ):
            return True
        reach, highest, moved = list(pcs), list(words), True
        seen = [{word} for word in words]
        while moved:
            moved = False
            for other, actions in enumerate(self.threads):
                while other != thread and self._may(theirs := actions[reach[other]], pcs, reach, highest, seen):
                    if mine.conflicts(theirs):
                        return False
                    if theirs.kind in ("set", "add"):
                        highest[theirs.number] += theirs.value
                        seen[theirs.number].add(theirs.value)
                    reach[other] += 1
                    moved = True
        return True

    def advance(self, state: State, thread: int) -> tuple[State, list[str]]:
        """The state after the next action of `thread`, and what is wrong with it. An error changes nothing else."""
        pcs, words, memory = state
        action = self.threads[thread][pcs[thread]]
        findings: list[str] = []
        if action.skipped and words[action.let_go]:
            pass
        elif action.kind == "fail":
            words = _with(words, action.number, 1)
        elif action.kind == "set":
            before = words[action.number]
            again = before >= action.value or (before and "free" in action.name)
            if action.value and again and not any(words[number] for number in self.failed):
                findings.append("set again")
            words = _with(words, action.number, action.value)
        elif action.kind == "add":
            words = _with(words, action.number, words[action.number] + 1)
        elif action.kind == "begin":
            findings += self._clashes(action, thread, state)
            found = bytes([memory[i] for i in action.source])
            if action.expected and found != action.expected and not self._has_failed(thread, words):
                findings += map(self._judge, found, action.expected)
            changed = bytearray(memory)
            for i, value in zip(action.target, found if action.values is None else action.values, strict=True):
                changed[i] = value
            memory = bytes(changed)
        pcs = (*pcs[:thread], pcs[thread] + 1, *pcs[thread + 1 :])
        return (pcs, words, memory), [finding for finding in findings if finding] if findings else findings

    def _has_failed(self, thread: int, words: Sequence[int]) -> bool:
        return bool(self.failed) and bool(words[self.failed[self.ranks[thread]]])

    def _clashes(self, action: Action, thread: int, state: State) -> Iterator[str]:
        """What is wrong with beginning `action` now, where other threads are in the middle of an access.

        A rank that has failed may read what it likes.
        """
        pcs, words, _ = state
        for other, (actions, pc) in enumerate(zip(self.threads, pcs, strict=True)):
            under_way = actions[pc]
            if under_way.kind != "end" or (under_way.skipped and words[under_way.let_go]):
                continue
            failed = [self._has_failed(each, words) for each in (thread, other)]
            if (under_way.writes & action.writes and not all(failed)) or (
                under_way.writes & action.reads and not failed[0]
            ):
                yield "torn"
            if under_way.reads & action.writes and not failed[1]:
                yield "overwritten"

    def _judge(self, found: int, expected: int) -> str:
        """What is wrong with data of tag `found` where `expected` should be."""
        if found == expected:
            return ""
        (call, _, what, _), (own_call, _, own_what, _) = self.tags[found], self.tags[expected]
        if call == own_call:
            return "misplaced" if what.split()[-1] == own_what.split()[-1] else "unlike"
        return "stale" if call < own_call else "overwritten"

    def over(self, state: State) -> bool:
        """Whether all ranks have failed: nobody's results matter any more."""
        return bool(self.failed) and all(state[1][number] for number in self.failed)

    def ending(self, state: State) -> list[str]:
        """What is wrong with a state where nothing can go on."""
        pcs, words, _ = state
        nexts = [(self.ranks[thread], self.threads[thread][pcs[thread]]) for thread in range(self.streams)]
        stuck = {rank for rank, action in nexts if action.kind != "done"}
        seen = {rank for rank, action in nexts if action.kind == "exactly" and action.name == "wait free"}
        if stuck:
            return ["stuck", "unseen"] if stuck - seen else ["stuck"]
        return ["left over"] if any(words) and not any(words[number] for number in self.failed) else []

    def describe(self, thread: int, state: State) -> str:
        return f"{self.owners[thread]}: {self.threads[thread][state[0][thread]].name}"


def _can(action: Action, pcs: Sequence[int], words: Sequence[int], seen: Sequence[set[int]] | None = None) -> bool:
    """Whether a thread can take `action` next, with the threads at `pcs`; `seen`: what words may also have been."""
    kind = action.kind
    if kind == "after":
        return pcs[action.number] >= action.value
    if kind in ("wait", "exactly") and action.let_go >= 0 and words[action.let_go]:
        return True
    if kind == "wait":
        return words[action.number] >= action.value
    if kind == "exactly":
        return words[action.number] == action.value if seen is None else action.value in seen[action.number]
    return kind != "done"


def _bytes(copy: Copy, place: Place, pitch: int, bases: Sequence[int]) -> tuple[int, ...]:
    start = bases[place.base] + place.offset
    return tuple(start + row * pitch + i for row in range(copy.height) for i in range(copy.width))


def _addresses(tagged: Bytes) -> tuple[int, ...]:
    return tuple(address for address, _ in tagged)


def _access(
    name: str, source: tuple[int, ...], target: tuple[int, ...], expected: bytes = b"", values: bytes | None = None
) -> list[Action]:
    reads, writes = sum(1 << i for i in source), sum(1 << i for i in target)
    begin = Action(f"{name} begins", "begin", 0, 0, reads, writes, source, target, expected, values)
    return [begin, replace(begin, name=f"{name} ends", kind="end")]


def _with(values: bytes, index: int, value: int) -> bytes:
    return values[:index] + bytes((value,)) + values[index + 1 :]


@dataclass
class Search:
    """What a search saw: how many states, and for each kind of finding how it came about."""

    states: int
    findings: dict[str, list[str]]


def explore(case: Case, reduced: bool = True, all_kinds: bool = False, until: str = "") -> Search:
    """Visit all reachable states (or enough of them: see `Model.moves`), or until something is wrong.

    With `all_kinds` the search goes on behind a finding, as if nothing had happened; so it does up to the kind `until`.
    """
    model = Model(case)
    came_from: dict[State, tuple[State, int] | None] = {model.start: None}
    stack = [model.start]
    findings: dict[str, list[str]] = {}
    while stack and (all_kinds or (until not in findings if until else not findings)):
        state = stack.pop()
        if model.over(state):
            continue
        threads = model.moves(state, reduced)
        for kind in () if threads else model.ending(state):
            findings.setdefault(kind, _history(model, came_from, state))
        for thread in threads:
            successor, kinds = model.advance(state, thread)
            for kind in kinds:
                if kind not in findings:
                    findings[kind] = [*_history(model, came_from, state), model.describe(thread, state)]
            if successor not in came_from:
                came_from[successor] = state, thread
                stack.append(successor)
    return Search(len(came_from), findings)


def _history(model: Model, came_from: dict[State, tuple[State, int] | None], state: State) -> list[str]:
    """The actions that led to `state`."""
    actions: list[str] = []
    while (step := came_from[state]) is not None:
        state, thread = step
        actions.append(model.describe(thread, state))
    return actions[::-1]
