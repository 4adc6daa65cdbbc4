"""Polls: the vote on one deviation for one graph, what the ranks have said to it, and the outcome."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from asynctp_passes import compat, ops
from asynctp_passes.agreement import ledgers
from asynctp_passes.agreement.ledgers import LOOKED_AT, Ledger, kind_of
from asynctp_passes.agreement.waits import LONGEST_PAUSE_S, looks
from asynctp_passes.config import Config
from asynctp_passes.errors import DisagreementError
from asynctp_passes.ir import registry
from asynctp_passes.ir.records import Ballot
from asynctp_passes.planning.deviations import LOCAL, PLAIN
from asynctp_passes.reporting.internal import sources_digest
from asynctp_passes.waiting import ranks_named

__all__ = [
    "ACCEPTED",
    "REFUSED",
    "REFUSES_ALL",
    "Poll",
    "Votes",
    "disagreement",
    "done_elsewhere",
    "outcomes",
    "plain",
    "polls_of",
    "post",
    "reason_of",
    "with_provenance",
]

log = logging.getLogger(__name__)

LATE_S = 1.0
"""Seconds to wait for ranks that have let one wait pass without compiling what was asked: they have other graphs."""

ACCEPTED, REFUSED = "accepted", "refused "
REFUSES_ALL = "Config(deviate=False)"
"""Posted by a rank with this option, instead of its deviations."""

_NOT_DECISIVE = ("groups", "strict", "expect")

Votes = dict[tuple[str, str], str | None]
"""By group and text: None for a deviation that all ranks do, otherwise why it is not done."""


@dataclass(frozen=True)
class Poll:
    """One deviation that was put to the vote for the nth graph of a function with these collectives."""

    ledger: Ledger
    group: str
    key: str
    function: str
    number: int
    text: str

    @property
    def at(self) -> str:
        return f"{self.key}/{self.function}"

    @property
    def place(self) -> str:
        return f"{self.at}/{_hash(self.text)}"

    def post(self) -> None:
        """Say that this rank has a deviation in a graph, once; not where it has a size that only this rank knows."""
        counted = f"{self.place}/votes/{self.number}"
        with ledgers.lock:
            if counted in self.ledger.posted or LOCAL in plain(self.text):
                return
            self.ledger.posted |= {self.place, counted}
        self.ledger.store.set(f"{self.place}/in/{self.number}/{self.ledger.rank}", "1")
        self.ledger.store.add(counted, 1)

    def outcome(self) -> str | None:
        """The outcome, if there is one by now; this rank writes it down if it is the first to know."""
        store, place, world = self.ledger.store, self.place, len(self.ledger.ranks)
        if store.check([f"{place}/outcome"]):
            return str(store.get(f"{place}/outcome").decode())
        shown = store.add(f"{self.at}/shown/{self.number}", 0) >= world  # looked at before votes, which come first
        if store.add(f"{place}/votes/{self.number}", 0) >= world:
            self.ledger.late.clear()
            return self.decide(ACCEPTED)
        if shown:
            self.ledger.late.clear()
            return self.decide(REFUSED + self._difference())
        return None

    def elsewhere(self) -> str | None:
        """Refuse it where a rank without it has other graphs of this function; None where none has by now."""
        for rank in self.missing(LOOKED_AT):
            if told := self.ledger.difference(self.key, rank):
                return self.decide(f"{REFUSED}{told}: {plain(self.text)}")
        return None

    def decide(self, outcome: str) -> str:
        """Write an outcome down, unless there is one; what holds."""
        return str(self.ledger.store.compare_set(f"{self.place}/outcome", "", outcome).decode())

    def is_accepted(self) -> bool:
        """All ranks have agreed on it."""
        at = f"{self.place}/outcome"
        return bool(self.ledger.store.check([at]) and self.ledger.store.get(at).decode() == ACCEPTED)

    def refused_again(self) -> str | None:
        """Why this rank does not do in this graph what it did in an earlier one; None if it does, as far as known."""
        if self.is_lacked():
            return f"the other ranks know that this one compiles {self.function} without it: {plain(self.text)}"
        own = self.ledger.lacked[self.place]
        for rank in self.ledger.ranks[:LOOKED_AT]:
            if self._lacks(rank) > own:
                self.say_lacked()
                return f"rank {rank} compiled {self.function} anew without it: {plain(self.text)}"
        return None

    def _lacks(self, rank: int) -> int:
        at = f"{self.place}/lacks/{rank}"
        return int(self.ledger.store.get(at)) if self.ledger.store.check([at]) else 0

    def say_lacked(self) -> None:
        """Say that this rank has compiled the function without it, once more.

        Not where the others have not followed what it said before: then they follow both at once.
        """
        own = self.ledger.lacked[self.place]
        others = [self._lacks(rank) for rank in self.ledger.ranks if rank != self.ledger.rank]
        if own <= min(others):
            self.ledger.lacked[self.place] = max(own + 1, *others)
        self.ledger.departed[self.place] = self._graphs()
        self.ledger.store.set(f"{self.place}/lacks/{self.ledger.rank}", str(self.ledger.lacked[self.place]))

    def is_lacked(self) -> bool:
        """This rank has said so of the last graph of the function: perhaps when that came from a cache."""
        return self.ledger.departed.get(self.place) == self._graphs()

    def _graphs(self) -> int:
        return len(self.ledger.graphs.get((kind_of(self.key), self.function), ()))

    def not_lacking(self) -> list[int]:
        """The ranks that have not compiled the function without it as often as this one."""
        return [rank for rank in self.ledger.ranks if self._lacks(rank) < self.ledger.lacked[self.place]]

    def withdraw(self) -> None:
        """Take back that this rank has it in the nth graph."""
        counted = f"{self.place}/votes/{self.number}"
        if counted in self.ledger.posted:
            self.ledger.posted.remove(counted)
            self.ledger.store.add(counted, -1)
            self.ledger.store.delete_key(f"{self.place}/in/{self.number}/{self.ledger.rank}")

    def missing(self, most: int | None = None) -> list[int]:
        """The ranks that have not said that they have the deviation; the first `most` of them."""
        ranks, check, found = self.ledger.ranks, self.ledger.store.check, list[int]()
        for start in range(0, len(ranks), LOOKED_AT):
            at = {rank: f"{self.place}/in/{self.number}/{rank}" for rank in ranks[start : start + LOOKED_AT]}
            if not check(list(at.values())):  # one question for many ranks, mostly
                found += [rank for rank, key in at.items() if not check([key])]
            if most is not None and len(found) >= most:
                break
        return found[:most]

    def absent(self) -> list[int]:
        """Those of them that have compiled no graph of the function with these collectives."""
        return [rank for rank in self.missing() if not self.ledger.store.check([f"{self.at}/has/{rank}"])]

    def too_late(self, seconds: float) -> str:
        """Refuse it for want of answers."""
        missing = self.missing()
        return self.decide(
            f"{REFUSED}{ranks_named(missing)} compiled nothing like it within {seconds:g} s: {plain(self.text)}"
        )

    def _difference(self) -> str:
        """Who does not have it, and what they have instead."""
        missing = self.missing()
        own = plain(self.text)
        do = "do" if len(missing) > 1 else "does"
        told = f"{ranks_named(missing)} of the group's {len(self.ledger.ranks)} {do} not: {own}"
        for rank in missing[:1]:
            key = f"{self.at}/has/{rank}"
            theirs = json.loads(self.ledger.store.get(key)) if self.ledger.store.check([key]) else []
            kind = own.partition(" ")[0]
            instead = [text for text in map(plain, theirs) if text.startswith(kind) and text != own]
            told += f"; rank {rank} does: {'; '.join(instead)}" if instead else ""
            told += f"; rank {rank} has {REFUSES_ALL}" if REFUSES_ALL in theirs else ""
            versions = [text for text in theirs if plain(text) == own and text != self.text]
            told += f", with other versions or options: {_other(versions[0], self.text)}" if versions else ""
        return told


def polls_of(ledger: Ledger, ballot: Ballot, config: Config, function: str, number: int = 0) -> list[Poll]:
    """One for each deviation of a ballot."""
    texts = [with_provenance(text, config) for text in ballot.deviations]
    return [Poll(ledger, ballot.group, ledger.key_of(ballot), function, number, text) for text in texts]


def post(ballots: Iterable[Ballot], config: Config) -> list[Poll]:
    """Tell the other ranks of this rank's deviations, and then that these are all of a graph's."""
    polls: list[Poll] = []
    for one in ballots:
        ledger = ledgers.of_group(one.group)
        if ledger is None:
            continue
        key, function = ledger.key_of(one), compat.compiled_function()
        with ledgers.lock:
            ledger.count(key, function)
            name, number = ledger.last[key]
            shown = f"{key}/{name}/shown/{number}"
            new = shown not in ledger.shown  # else it came from a cache before
            ledger.shown.add(shown)
        ledger.tell(key, function)
        found = polls_of(ledger, one, config, name, number)
        for poll in found:
            poll.post()
        texts = [poll.text for poll in found] if config.deviate else [REFUSES_ALL]
        ledger.store.set(f"{key}/{name}/has/{ledger.rank}", json.dumps(texts))
        if new:
            ledger.store.add(shown, 1)
        polls += found
    return polls


def outcomes(polls: Sequence[Poll], until: float, meanwhile: Callable[[], object] = lambda: None) -> Votes:
    """Wait until all is decided, or until a time; `meanwhile` is called at each look."""
    found: Votes = {}
    limit, waiting = until - time.monotonic(), list(polls)
    for poll in polls:
        if LOCAL in plain(poll.text):
            found[poll.group, plain(poll.text)] = f"it has a size that only this rank knows: {plain(poll.text)}"
            waiting.remove(poll)
    if not waiting:
        return found

    def awaited() -> str:
        missing = ranks_named(waiting[0].missing())
        return f"{missing} to compile a graph with the same collectives; Config(deviate=False) waits for nobody"

    for passed in looks(limit, awaited, LONGEST_PAUSE_S * max(1, len(waiting[0].ledger.ranks) // 32)):
        meanwhile()
        for poll in list(waiting):
            outcome = poll.outcome() or poll.elsewhere()
            if outcome is not None:
                found[poll.group, plain(poll.text)] = reason_of(outcome)
                waiting.remove(poll)
        if not waiting:
            break
        if passed >= limit or (passed >= LATE_S and all(map(_is_late, waiting))):
            for poll in waiting:
                found[poll.group, plain(poll.text)] = _give_up(poll, passed)
            break
    return found


def _is_late(poll: Poll) -> bool:
    """True when all that is missing are ranks which did not come in time before, and have not come now.

    A full wait is due where their silence would not refuse it: they could come with a graph that cannot do it.
    """
    missing = poll.missing() if poll.ledger.late and not any(done_elsewhere(poll)) else []
    return bool(missing) and poll.ledger.late.issuperset(missing) and poll.absent() == missing


def done_elsewhere(poll: Poll) -> list[bool]:
    """For each set of deviations of other functions with the same collectives: whether it has this one."""
    return [poll.text in one for one in poll.ledger.sets.get(poll.key, ())] if poll.number == 0 else []


def _give_up(poll: Poll, seconds: float) -> str | None:
    missing, doing = poll.missing(), done_elsewhere(poll)
    if any(doing):  # a silent rank may run another function
        if not all(doing):
            raise disagreement(poll, f"{ranks_named(missing)} may run one with it, or one without it")
        return reason_of(poll.decide(ACCEPTED))
    outcome = poll.too_late(seconds)
    if outcome != ACCEPTED and not poll.ledger.late.issuperset(missing):
        log.warning(
            "asynctp: %s of group %r compiled no graph like this one within %.0f s (other graph breaks, or none?). "
            "What would change what ranks send is left out: %s. Raise ASYNCTP_AGREE_S where a rank is merely slow",
            *(ranks_named(missing), poll.group, seconds, plain(poll.text)),
        )
        poll.ledger.late.update(missing)
    return reason_of(outcome)


def disagreement(poll: Poll, why: str) -> DisagreementError:
    return DisagreementError(
        f"asynctp: all ranks of group {poll.group!r} have agreed to {plain(poll.text)}, in an earlier graph with "
        f"these collectives. This rank compiles {poll.function}, and {why}: unlike calls could meet. "
        "Config(deviate=False) lets ranks differ; or let all compile the same, with the same graph breaks. Where a "
        "rank is merely slow, raise ASYNCTP_AGREE_S, and the group's timeout: a wait takes a quarter of that at most"
    )


def reason_of(outcome: str) -> str | None:
    return None if outcome == ACCEPTED else outcome.removeprefix(REFUSED)


# --- words ----------------------------------------------------------------------------------------------------
def plain(text: str) -> str:
    """A deviation without the versions that it was found with."""
    return text.rpartition(" | ")[0] or text


def with_provenance(text: str, config: Config) -> str:
    """A deviation, and what it was found with.

    It is alike on ranks whose GPUs share memory; elsewhere nothing compares calls, and no rank does what others must do
    too. Torch's own collectives go everywhere.
    """
    gpus = f", {ops.compares_calls(0)[1]}" if compat.uses_gpus() and text != PLAIN else ""
    return f"{text} | {_provenance(config)}{gpus}"


def _provenance(config: Config) -> str:
    """Versions, registered ops and options: where they differ, equal texts may mean different things."""
    options = {name: value for name, value in config.decisive().items() if name not in _NOT_DECISIVE}
    told = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"asynctp {sources_digest()}, torch {torch.__version__}, ops {registry.digest()}, {told}"


def _other(theirs: str, own: str) -> str:
    """Provenance of a peer's deviation, where this rank has another."""
    known, facts = (text.rpartition(" | ")[2].split(", ") for text in (own, theirs))
    return ", ".join([fact for fact in facts if fact not in known] or facts)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
