"""Agreement: what changes what ranks send is done by all ranks of a group, or by none. They vote when they compile.

    rank 0: deviations ─▶ store ◀─ deviations :rank 1          accepted if every rank has it, refused otherwise

Each rank puts the deviations of a graph (`deviations`) into the group's own key-value store, under the function that is
compiled and a hash of the group's collectives in the graph. It waits until every rank has the same one. It waits no
longer than until every rank has compiled this function, or for `ASYNCTP_AGREE_S` seconds. The outcome is one record for
each deviation of a function. The first rank to know it writes the record, and all ranks obey it from then on. A graph
without deviations waits for nobody. docs/explanation/agreement-of-ranks.md says why.

Keys, in the store of the group, below `asynctp/<life>/<kind>/<hash of the collectives>/<function>`:

    shown/<n>                  how many ranks have compiled the nth such graph, and posted its deviations
    has/<rank>                 the texts of a rank's last graph
    <hash of text>/votes/<n>   how many ranks have the deviation in the nth graph
    <hash of text>/in/<n>/<rank>    there, if this rank has it in the nth graph
    <hash of text>/outcome     "accepted", or "refused" and why
    <hash of text>/lacks/<rank>     how often this rank has compiled the function without it, after a graph with it

A function goes by file, name and line, which all ranks share. One rank may compile it anew by itself, for another
Python number say. Below `asynctp/<life>` itself, for other ranks to see where a rank's graphs end:

    graphs/<kind>/<function>/<rank>   the hashes of a rank's graphs of a function, in order
    resumed/<function>/<rank>         the functions that are the rest of this one after a graph break
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from asynctp_passes import compat
from asynctp_passes.config import Config, agree_seconds
from asynctp_passes.ir import registry
from asynctp_passes.ir.nodes import phase_of
from asynctp_passes.ir.read import read_collectives
from asynctp_passes.ir.records import Ballot
from asynctp_passes.planning.deviations import LOCAL, Words, communicated
from asynctp_passes.reporting.errors import AsyncTPError, DisagreementError
from asynctp_passes.reporting.report import Report

__all__ = ["Votes", "agreed_before", "refuse", "sources_digest", "stands", "vote"]

log = logging.getLogger(__name__)

WARN_S = 5.0
"""Seconds of waiting after which a warning says for whom."""

LATE_S = 1.0
"""Seconds to wait for ranks that have let one wait pass without compiling what was asked: they have other graphs."""

AGAIN_S = 5.0
"""Seconds to wait for ranks that may not do in a later graph what was accepted for the function's first one."""

_NAMED, _LOOKED_AT = 4, 64
_PAUSES_S = (0.002, 0.05)
_ACCEPTED, _REFUSED = "accepted", "refused "
_SUPPRESSED = "torch._dynamo.config.suppress_errors lets this rank go on without the graph, should its compile fail"
_NOT_DECISIVE = ("groups", "strict", "expect")
_lock = threading.Lock()

Votes = dict[tuple[str, str], str | None]
"""By group and text: None for a deviation that all ranks do, otherwise why it is not done."""


@dataclass
class _Ledger:
    """A record of this process's graphs and posts in the store of one process group.

    Attributes:
        store: The store.
        rank: This rank.
        ranks: All ranks of the group.
        life: See `compat.Peers`.
        group: The process group; None where its timeout does not matter.
        compiles: How many graphs there were, by key.
        graphs: The keys of this rank's graphs, in order, by the kind of the key and the function.
        last: By key, the function and number of the last graph.
        bases: By function, the function in the program: another one for the rest of that after a graph break.
        resumed: Functions that are the rest of a function after a graph break, by that.
        done: Deviations that all ranks do, by the kind of the key and the function: each with its key, and whether the
            graph was of the whole function.
        departed: By place, how many graphs of the function there were when this rank compiled it without a deviation.
        lacked: How often this rank has compiled a function without a deviation after a graph with it, by place.
        sets: By key, the sets of deviations that were done in the graphs with these collectives, each once.
        posted: Deviations that the others know of.
        shown: Graphs that the others know of.
        late: Ranks that let a wait pass.
    """

    store: Any
    rank: int
    ranks: tuple[int, ...]
    life: str
    group: Any = None
    compiles: Counter[str] = field(default_factory=Counter)
    graphs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    last: dict[str, tuple[str, int]] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)
    resumed: dict[str, list[str]] = field(default_factory=dict)
    done: dict[tuple[str, str], dict[tuple[str, str], bool]] = field(default_factory=dict)
    lacked: Counter[str] = field(default_factory=Counter)
    departed: dict[str, int] = field(default_factory=dict)
    sets: dict[str, set[frozenset[str]]] = field(default_factory=dict)
    posted: set[str] = field(default_factory=set)
    shown: set[str] = field(default_factory=set)
    late: set[int] = field(default_factory=set)

    def count(self, key: str, function: compat.CompiledFunction | None) -> None:
        """Count a graph with these collectives."""
        name = f"graph {self.compiles[key]} of {key[-8:]}" if function is None else function.name
        self.compiles[key] += 1
        graphs = self.graphs.setdefault((_kind(key), name), [])
        self.last[key] = name, graphs.count(key)
        graphs.append(key)
        self.bases[name] = name if function is None else function.base
        if function is not None and function.resumes:
            resumed = self.resumed.setdefault(function.resumes, [])
            resumed += [] if name in resumed else [name]

    def discount(self, key: str) -> None:
        """Take back, once, the count of the last graph with these collectives: the next one has its number."""
        name, number = self.last[key]
        graphs = self.graphs[_kind(key), name]
        if graphs.count(key) > number:
            del graphs[len(graphs) - 1 - graphs[::-1].index(key)]
            self.compiles[key] -= 1

    def withdraw(self, key: str) -> None:
        """Take back the count of the last graph with these collectives, in the store too."""
        name, number = self.last[key]
        shown = f"{key}/{name}/shown/{number}"
        self.discount(key)
        self.shown.remove(shown)
        self.store.add(shown, -1)
        self._write(self._graphs_at(_kind(key), name), self.graphs[_kind(key), name])

    def others_came(self, key: str) -> bool:
        """True once all ranks have compiled as many such graphs of the function as this one."""
        name, number = self.last[key]
        return bool(self.store.add(f"{key}/{name}/shown/{number}", 0) >= len(self.ranks))

    @property
    def patience(self) -> float:
        """Seconds to wait for other ranks, which may wait meanwhile in a collective of this group."""
        return min(agree_seconds(), compat.group_timeout_s(self.group) / 4)

    def tell(self, key: str, function: compat.CompiledFunction | None) -> None:
        """Tell the other ranks which graphs this rank has of a function."""
        name, _ = self.last[key]
        self._write(self._graphs_at(_kind(key), name), self.graphs[_kind(key), name])
        if function is not None and function.resumes:
            self._write(self._resumed_at(function.resumes), self.resumed[function.resumes])

    def difference(self, key: str, rank: int) -> str:
        """How another rank's graphs of the function that is compiled differ from this rank's; or nothing."""
        name, _ = self.last[key]
        own, theirs = self.graphs[_kind(key), name], self._read(self._graphs_at(_kind(key), name), rank)
        if len(theirs) >= len(own) and theirs[len(own) - 1] != key:
            return f"rank {rank} compiled {name} with other collectives"
        base = self.bases[name]
        new = set(self._read(self._resumed_at(base), rank)).difference(self.resumed.get(base, ()))
        return f"rank {rank} breaks its graph: it compiled {min(new)}" if new else ""

    def has_backward(self, key: str) -> bool:
        """True where a deviation was done in a backward of the function that is compiled."""
        function = compat.compiled_function()
        return function is not None and (_kind(key), function.name) in self.done

    def silent(self, key: str) -> list[int]:
        """The ranks that are not known to have compiled the function of the last graph, in this way or another."""
        if self.others_came(key):
            return []
        name, _ = self.last[key]
        whole = self._graphs_at(_kind(key), self.bases[name])  # others may not break the graph of the function

        def is_known(rank: int) -> bool:
            has = self.store.check([f"{key}/{name}/has/{rank}"])
            return bool(has or self.difference(key, rank) or self._read(whole, rank))

        return [rank for rank in self.ranks[:_LOOKED_AT] if rank != self.rank and not is_known(rank)]

    def _graphs_at(self, kind: str, name: str) -> str:
        return f"asynctp/{self.life}/graphs/{kind}/{name}"

    def _resumed_at(self, base: str) -> str:
        return f"asynctp/{self.life}/resumed/{base}"

    def _write(self, at: str, values: list[str]) -> None:
        self.store.set(f"{at}/{self.rank}", json.dumps(values))

    def _read(self, at: str, rank: int) -> list[str]:
        at = f"{at}/{rank}"
        found: list[str] = json.loads(self.store.get(at)) if self.store.check([at]) else []
        return found


_ledgers: weakref.WeakKeyDictionary[Any, _Ledger] = weakref.WeakKeyDictionary()  # a ledger goes with its group


@dataclass(frozen=True)
class _Poll:
    """One deviation that was put to the vote for the nth graph of a function with these collectives."""

    ledger: _Ledger
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

    def outcome(self) -> str | None:
        """The outcome, if there is one by now; this rank writes it down if it is the first to know."""
        store, place, world = self.ledger.store, self.place, len(self.ledger.ranks)
        if store.check([f"{place}/outcome"]):
            return str(store.get(f"{place}/outcome").decode())
        shown = store.add(f"{self.at}/shown/{self.number}", 0) >= world  # looked at before votes, which come first
        if store.add(f"{place}/votes/{self.number}", 0) >= world:
            self.ledger.late.clear()
            return self.decide(_ACCEPTED)
        if shown:
            self.ledger.late.clear()
            return self.decide(_REFUSED + self._difference())
        return None

    def elsewhere(self) -> str | None:
        """Refuse it where a rank without it has other graphs of this function; None where none has by now."""
        for rank in self.missing()[:_LOOKED_AT]:
            if told := self.ledger.difference(self.key, rank):
                return self.decide(f"{_REFUSED}{told}: {_plain(self.text)}")
        return None

    def decide(self, outcome: str) -> str:
        """Write an outcome down, unless there is one; what holds."""
        return str(self.ledger.store.compare_set(f"{self.place}/outcome", "", outcome).decode())

    def is_accepted(self) -> bool:
        """All ranks have agreed on it."""
        at = f"{self.place}/outcome"
        return bool(self.ledger.store.check([at]) and self.ledger.store.get(at).decode() == _ACCEPTED)

    def refused_again(self, until: float) -> str | None:
        """Why this rank does not do in this graph what it did in an earlier one; None if it does."""
        other = ""

        def awaited() -> str:
            return f"{_ranks(self.missing())} to compile what all agreed on before: {_plain(self.text)}"

        for _ in _looks(until - time.monotonic(), awaited):
            if (other := self._lacked_elsewhere()) or not self.missing():
                break
        if not other:
            return None
        self.say_lacked()
        return f"{other}: {_plain(self.text)}"

    def _lacked_elsewhere(self) -> str:
        """The reason of a rank that has compiled the function once more without it than this one; or nothing."""
        own = self.ledger.lacked[self.place]
        ranks = [rank for rank in self.ledger.ranks[:_LOOKED_AT] if self._lacks(rank) > own]
        return f"rank {ranks[0]} compiled {self.function} anew without it" if ranks else ""

    def _lacks(self, rank: int) -> int:
        at = f"{self.place}/lacks/{rank}"
        return int(self.ledger.store.get(at)) if self.ledger.store.check([at]) else 0

    def say_lacked(self) -> None:
        """Say that this rank has compiled the function without it, once more."""
        self.ledger.lacked[self.place] += 1
        self.ledger.departed[self.place] = len(self.ledger.graphs.get((_kind(self.key), self.function), ()))
        self.ledger.store.set(f"{self.place}/lacks/{self.ledger.rank}", str(self.ledger.lacked[self.place]))

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

    def missing(self) -> list[int]:
        """The ranks that have not said that they have the deviation."""
        return [
            rank for rank in self.ledger.ranks if not self.ledger.store.check([f"{self.place}/in/{self.number}/{rank}"])
        ]

    def absent(self) -> list[int]:
        """Those of them that have compiled no graph of the function with these collectives."""
        return [rank for rank in self.missing() if not self.ledger.store.check([f"{self.at}/has/{rank}"])]

    def too_late(self, seconds: float) -> str:
        """Refuse it for want of answers."""
        missing = self.missing()
        return self.decide(
            f"{_REFUSED}{_ranks(missing)} compiled nothing like it within {seconds:g} s: {_plain(self.text)}"
        )

    def _difference(self) -> str:
        """Who does not have it, and what they have instead."""
        missing = self.missing()
        own = _plain(self.text)
        told = f"{_ranks(missing)} of {len(self.ledger.ranks)} {'do' if len(missing) > 1 else 'does'} not: {own}"
        for rank in missing[:1]:
            key = f"{self.at}/has/{rank}"
            theirs = json.loads(self.ledger.store.get(key)) if self.ledger.store.check([key]) else []
            kind = own.partition(" ")[0]
            instead = [text for text in map(_plain, theirs) if text.startswith(kind) and text != own]
            told += f"; rank {rank} does: {'; '.join(instead)}" if instead else ""
            versions = [text for text in theirs if _plain(text) == own and text != self.text]
            told += f", with other versions or options: {versions[0].rpartition(' | ')[2]}" if versions else ""
        return told


def vote(ballots: Sequence[Ballot], config: Config) -> Votes:
    """Put the deviations of a graph to the vote of each group, and wait for the outcome.

    Does nothing without process groups, in groups of one rank, and with the fake backend: then all is accepted.

    Args:
        ballots: One for each group that communicates in the graph, with its deviations, or none.
        config: With `agree=False` all is accepted, and nobody learns of it; with `deviate=False` all is refused.

    Returns:
        The outcomes. With `torch._dynamo.config.suppress_errors` this rank refuses all.

    Raises:
        DisagreementError: All ranks have agreed on a deviation that this graph cannot do, and another rank may run a
            graph with it.
    """
    votes: Votes = {(one.group, text): None for one in ballots for text in one.deviations}
    if not config.deviate:
        return dict.fromkeys(votes, "Config(deviate=False)")
    if config.agree:
        if compat.suppresses_errors():
            keyed = [one for one in ballots if _ledger(one.group) is not None]
            votes |= {(one.group, text): _SUPPRESSED for one in keyed for text in one.deviations}
            ballots = [replace(one, deviations=()) for one in ballots]
        with _without_store_errors(ballots, votes, config):
            polls, until = _posted(ballots, config), _until(ballots)
            votes |= _outcomes(polls, until)
            _in_later_graphs(polls, ballots, votes, config, until)
    return votes


def agreed_before(graph: fx.Graph, config: Config) -> frozenset[tuple[str, str]]:
    """The deviations on which all ranks have agreed in an earlier graph of this function, by group and text.

    Peers may still run that graph. A rank that can do the same, though it need not, does it. So these are such that any
    graph with the same collectives can do them: to keep a gather, and to leave a group's collectives to torch.
    """
    if not config.agree or compat.compiled_function() is None:
        return frozenset()
    collectives = read_collectives(graph)
    words, found = Words(collectives), set[tuple[str, str]]()
    for group, key in communicated(collectives, phase_of(graph)).items():
        kept = (words.of_kept(one) for one in collectives if one.group_key == group and one.kind == "all_gather")
        found |= {(group, text) for text in _accepted(Ballot(group, key, (words.of_plain(), *kept)), config)}
    return frozenset(found)


def _accepted(ballot: Ballot, config: Config) -> Iterator[str]:
    """Those of a ballot's deviations on which all ranks have agreed already."""
    ledger, function = _ledger(ballot.group), compat.compiled_function()
    for poll in () if ledger is None or function is None else _polls(ledger, ballot, config, function.name):
        with contextlib.suppress(RuntimeError, OSError):
            if poll.is_accepted():
                yield _plain(poll.text)


def stands(reports: Sequence[Report], config: Config, *, joint: bool) -> list[str]:
    """Vote on graphs that came from a cache, all at once; why they cannot run as they are, a text for each deviation.

    A backward that comes with its forward is not waited for: on other ranks it may be compiled only when it runs, which
    takes this rank's forward. So it stands if all ranks know it when they know the forward, and is compiled anew
    otherwise.

    Args:
        reports: Of the graphs.
        config: As for `vote`.
        joint: The graph that they were made of was not seen here either: its ballots are voted on too.
    """
    kept = [[one for one in report.ballots if joint or not one.joint] for report in reports]
    with_forward = any(report.phase != "backward" for report in reports)
    early: list[Ballot] = []
    late: list[Ballot] = []
    for report, ballots in zip(reports, kept, strict=True):
        for one in ballots:
            (late if report.phase == "backward" and with_forward and not one.joint else early).append(one)
    votes: Votes = {(one.group, text): None for one in (*early, *late) for text in one.deviations}
    if not config.agree:
        return []
    if any(ledger.has_backward(key) for ledger, key in _keys(late)):
        return ["its function was compiled before: ranks agree on this backward when it is compiled"]
    with _without_store_errors([*early, *late], votes, config):
        first, then, until = _posted(early, config), _posted(late, config), _until([*early, *late])
        votes |= _outcomes(first, until)
        _in_later_graphs(first, early, votes, config, until)
        if then:
            _wait_until_shown(early, until)
            found = {(one.group, _plain(one.text)): one.outcome() for one in then}
            votes |= {at: _reason(outcome or f"{_REFUSED}it is not known yet") for at, outcome in found.items()}
            _keep(then, late, votes)
    refused = [reason for reason in votes.values() if reason is not None]
    if refused:
        for ledger, key in _keys([*early, *late]):
            ledger.discount(key)
    return refused


@contextlib.contextmanager
def _without_store_errors(ballots: Sequence[Ballot], votes: Votes, config: Config) -> Iterator[None]:
    """Refuse everything where the store fails before this rank has said anything.

    Raises:
        DisagreementError: It has said that it has a deviation, and other ranks may count on that.
    """
    try:
        yield
    except AsyncTPError:
        raise
    except (RuntimeError, OSError) as error:
        reason = f"the store of the group failed: {' '.join(str(error).split())[:200]}"
        told = _told(ballots, config)
        if told:
            raise DisagreementError(
                f"asynctp: {reason}. Other ranks may count on this one to {'; '.join(told)}. Restart all ranks, or "
                "compile without asynctp"
            ) from error
        log.warning("asynctp: the ranks could not ask one another what they compile: %s", reason)
        votes.update(dict.fromkeys(votes, reason))


def _told(ballots: Sequence[Ballot], config: Config) -> list[str]:
    """The deviations that this rank has told others of, or may have."""
    found: list[str] = []
    for one in ballots:
        if (ledger := _ledger(one.group)) is not None:
            function, number = ledger.last.get(_key(ledger, one), ("", 0))
            polls = _polls(ledger, one, config, function, number)
            found += [_plain(poll.text) for poll in polls if poll.place in ledger.posted]
    return found


def refuse(ballots: Iterable[Ballot], votes: Votes | None, config: Config) -> None:
    """Refuse, after the vote, to do what was put to it, since asynctp failed on the graph.

    Args:
        ballots: What was put to the vote.
        votes: The outcome; None where asynctp failed before it was known.
        config: The configuration.

    Raises:
        DisagreementError: All ranks have agreed on something that this one cannot do, or may have.
    """
    asked = [one for one in ballots if config.agree and _ledger(one.group) is not None]
    open_or_agreed = [
        text for one in asked for text in one.deviations if votes is None or votes[one.group, text] is None
    ]
    if open_or_agreed:
        raise DisagreementError(
            "asynctp: this rank runs the graph as it was, since asynctp failed on it, but all ranks have agreed to "
            f"{'; '.join(open_or_agreed)}, and would wait for one another forever. Set agree=False or compile without "
            "asynctp"
        )


# --- the store ------------------------------------------------------------------------------------------------
def _keys(ballots: Iterable[Ballot]) -> Iterator[tuple[_Ledger, str]]:
    """Where the ballots of groups that can be asked are in their stores."""
    for one in ballots:
        if (ledger := _ledger(one.group)) is not None:
            yield ledger, _key(ledger, one)


def _ledger(group: str) -> _Ledger | None:
    peers = compat.peers_of(group)
    if peers is None:
        return None
    with _lock:
        return _ledgers.setdefault(peers.group, _Ledger(peers.store, peers.rank, peers.ranks, peers.life, peers.group))


def _key(ledger: _Ledger, ballot: Ballot) -> str:
    return f"asynctp/{ledger.life}/{'joint' if ballot.joint else 'graph'}/{ballot.key}"


def _kind(key: str) -> str:
    """The kind of graph that a key is of: a forward (`graph/f`), a backward (`graph/b`), or both (`joint/f`)."""
    joint, _, communicated = key.removeprefix("asynctp/").partition("/")[2].partition("/")
    return f"{joint}/{communicated[:1]}"


def _polls(ledger: _Ledger, ballot: Ballot, config: Config, function: str, number: int = 0) -> list[_Poll]:
    """One for each deviation of a ballot."""
    texts = [_with_provenance(text, config) for text in ballot.deviations]
    return [_Poll(ledger, ballot.group, _key(ledger, ballot), function, number, text) for text in texts]


def _until(ballots: Iterable[Ballot]) -> float:
    """The time when a vote ends: peers may wait for this rank in a collective of any group of the graph."""
    return time.monotonic() + min((ledger.patience for ledger, _ in _keys(ballots)), default=0.0)


def _posted(ballots: Iterable[Ballot], config: Config) -> list[_Poll]:
    """Tell the other ranks of this rank's deviations, and then that these are all of a graph's."""
    polls: list[_Poll] = []
    for one in ballots:
        ledger = _ledger(one.group)
        if ledger is None:
            continue
        key, function = _key(ledger, one), compat.compiled_function()
        with _lock:
            ledger.count(key, function)
            name, number = ledger.last[key]
            shown = f"{key}/{name}/shown/{number}"
            new = shown not in ledger.shown  # else it came from a cache before
            ledger.shown.add(shown)
        ledger.tell(key, function)
        found = _polls(ledger, one, config, name, number)
        for poll in found:
            _post(poll)
        ledger.store.set(f"{key}/{name}/has/{ledger.rank}", json.dumps([poll.text for poll in found]))
        if new:
            ledger.store.add(shown, 1)
        polls += found
    return polls


def _post(poll: _Poll) -> None:
    """Say that this rank has a deviation in a graph, once; not where it has a size that only this rank knows."""
    counted = f"{poll.place}/votes/{poll.number}"
    with _lock:
        if counted in poll.ledger.posted or LOCAL in _plain(poll.text):
            return
        poll.ledger.posted |= {poll.place, counted}
    poll.ledger.store.set(f"{poll.place}/in/{poll.number}/{poll.ledger.rank}", "1")
    poll.ledger.store.add(counted, 1)


def _in_later_graphs(
    polls: Sequence[_Poll], ballots: Sequence[Ballot], votes: Votes, config: Config, until: float
) -> None:
    """See that all ranks do in later graphs of a function what was accepted for an earlier one, or that none does.

    Others may still run that graph. So a rank that compiles the function without a deviation waits until every rank has
    compiled it without. A rank that has it waits a moment for such ranks.
    """
    again: list[_Poll] = []
    lacked: list[_Poll] = []
    for one in ballots:
        if (ledger := _ledger(one.group)) is not None:
            own = {_with_provenance(text, config) for text in one.deviations}
            earlier = _done_before(ledger, one.group, _key(ledger, one))
            lacked += [poll for poll in earlier if poll.key != _key(ledger, one) or poll.text not in own]
            kept = {poll.place for poll in earlier}.difference(poll.place for poll in lacked)
            again += [poll for poll in polls if poll.place in kept and votes[poll.group, _plain(poll.text)] is None]
    for poll in lacked:
        poll.say_lacked()
    moment = min(until, time.monotonic() + AGAIN_S)
    for poll in again:
        votes[poll.group, _plain(poll.text)] = poll.refused_again(moment)
    if not lacked:
        _withdraw_alone(polls, again, votes)
    for poll in lacked:
        _wait_for_others(poll, until)
    for one in ballots:
        if (ledger := _ledger(one.group)) is not None:
            _in_another_function(ledger, one, polls, votes, until)
    _keep(polls, ballots, votes)


def _withdraw_alone(polls: Sequence[_Poll], again: Sequence[_Poll], votes: Votes) -> None:
    """Take back what was posted for a graph that this rank compiled alone, and that does what all agreed on before.

    The next graph of the function has the same number on all ranks then.
    """
    done = [poll for poll in again if votes[poll.group, _plain(poll.text)] is None]
    alone = {poll.key: poll.ledger for poll in done if not poll.ledger.others_came(poll.key)}
    for poll in polls:
        if poll.key in alone:
            poll.withdraw()
    for key, ledger in alone.items():
        ledger.withdraw(key)


def _in_another_function(ledger: _Ledger, ballot: Ballot, polls: Sequence[_Poll], votes: Votes, until: float) -> None:
    """See that all ranks compile a function, where this graph does less than another with the same collectives.

    A silent rank may run that one.
    """
    key = _key(ledger, ballot)
    name, number = ledger.last[key]
    done = (poll for poll in polls if poll.key == key and votes[poll.group, _plain(poll.text)] is None)
    own = {poll.text for poll in done if poll.ledger is ledger}
    other = set[str]().union(*ledger.sets.get(key, ())) - own
    if number or not other:
        return
    for text in sorted(other):
        poll = _Poll(ledger, ballot.group, key, name, number, text)
        if poll.decide(f"{_REFUSED}rank {ledger.rank} compiled {name} without it") == _ACCEPTED:
            raise _disagreement(poll, "others do it in this function")
    why = "it may run another function, where all agreed on something"
    silent = _still(lambda: ledger.silent(key), until, f"to compile {name}: {why}")
    if silent:
        raise _disagreement(poll, f"{_ranks(silent)} did not compile {name}, and may run another function")


def _keep(polls: Sequence[_Poll], ballots: Sequence[Ballot], votes: Votes) -> None:
    """Note the deviations that all ranks do in these graphs."""
    function = compat.compiled_function()
    accepted = [poll for poll in polls if votes[poll.group, _plain(poll.text)] is None]
    for poll in accepted:
        done = poll.ledger.done.setdefault((_kind(poll.key), poll.function), {})
        done.setdefault((poll.key, poll.text), function is None or not function.breaks)
    for ledger, key in _keys(ballots):
        found = frozenset(poll.text for poll in accepted if poll.ledger is ledger and poll.key == key)
        ledger.sets.setdefault(key, set()).add(found)


def _done_before(ledger: _Ledger, group: str, key: str) -> list[_Poll]:
    """The deviations that all ranks do in earlier graphs of the function whose graph was counted last.

    Those of graphs with other collectives count in the first graph with these, which may have other graph breaks. So do
    those of the whole function, where this is the rest of it after a break.
    """
    (name, number), kind = ledger.last[key], _kind(key)
    found = [
        _Poll(ledger, group, other, name, number, text)
        for other, text in ledger.done.get((kind, name), {})
        if other == key or number == 0
    ]
    base = ledger.bases[name]
    for (other_kind, function), done in ledger.done.items() if base != name and number == 0 else ():
        if other_kind == kind and function != name and ledger.bases[function] == base:
            graphs = len(ledger.graphs[kind, function])  # it has departed already, if this is its last graph's rest
            whole = [at for at, is_whole in done.items() if is_whole]
            polls = [_Poll(ledger, group, other, function, number, text) for other, text in whole]
            found += [poll for poll in polls if ledger.departed.get(poll.place) != graphs]
    return found


def _wait_for_others(poll: _Poll, until: float) -> None:
    """Wait until every rank has compiled the function without a deviation that was accepted."""
    begun = time.monotonic()
    having = _still(
        poll.not_lacking, until, f"to compile {poll.function} without what all agreed on: {_plain(poll.text)}"
    )
    if having:
        seconds = time.monotonic() - begun
        raise _disagreement(
            poll, f"{_ranks(having)} did not compile it without that, as this rank does, within {seconds:.0f} s"
        )


def _still(ranks: Callable[[], list[int]], until: float, awaited: str) -> list[int]:
    """The ranks that are left at the end of a wait for them; none where it ends early."""
    left: list[int] = []
    for _ in _looks(until - time.monotonic(), lambda: f"{_ranks(ranks())} {awaited}"):
        left = ranks()
        if not left:
            break
    return left


def _looks(limit: float, awaited: Callable[[], str], longest: float = _PAUSES_S[1]) -> Iterator[float]:
    """The seconds that have passed at each look, until `limit`, with pauses in between that grow to `longest`.

    A warning tells for whom this rank waits, once that takes `WARN_S`.
    """
    start, warned, pause = time.monotonic(), False, _PAUSES_S[0]
    while True:
        passed = time.monotonic() - start
        yield passed
        if passed >= limit:
            return
        if passed >= WARN_S and not warned:
            warned = True
            log.warning(
                "asynctp: waits up to %g s (ASYNCTP_AGREE_S, and a quarter of the group's timeout) for %s",
                limit,
                awaited(),
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _disagreement(poll: _Poll, why: str) -> DisagreementError:
    return DisagreementError(
        f"asynctp: all ranks of group {poll.group!r} have agreed to {_plain(poll.text)}, in an earlier graph with "
        f"these collectives. This rank compiles {poll.function}, and {why}: unlike calls could meet. "
        "Config(deviate=False) lets ranks differ; or let all compile the same, with the same graph breaks. Where a "
        "rank is merely slow, raise ASYNCTP_AGREE_S, and the group's timeout: a wait takes a quarter of that at most"
    )


def _outcomes(polls: Sequence[_Poll], until: float) -> Votes:
    """Wait until all is decided, or until a time."""
    found: Votes = {}
    limit, waiting = until - time.monotonic(), list(polls)
    for poll in polls:
        if LOCAL in _plain(poll.text):
            found[poll.group, _plain(poll.text)] = f"it has a size that only this rank knows: {_plain(poll.text)}"
            waiting.remove(poll)
    if not waiting:
        return found

    def awaited() -> str:
        return f"{_ranks(waiting[0].missing())} to compile a graph with the same collectives; agree=False asks nobody"

    for passed in _looks(limit, awaited, _PAUSES_S[1] * max(1, len(waiting[0].ledger.ranks) // 32)):
        for poll in list(waiting):
            outcome = poll.outcome() or poll.elsewhere()
            if outcome is not None:
                found[poll.group, _plain(poll.text)] = _reason(outcome)
                waiting.remove(poll)
        if not waiting:
            break
        if passed >= limit or (passed >= LATE_S and all(map(_is_late, waiting))):
            for poll in waiting:
                found[poll.group, _plain(poll.text)] = _give_up(poll, passed)
            break
    return found


def _is_late(poll: _Poll) -> bool:
    """True when all that is missing are ranks which did not come in time before, and have not come now.

    A full wait is due where their silence would not refuse it: they could come with a graph that cannot do it.
    """
    missing = poll.missing() if poll.ledger.late and not any(_done_elsewhere(poll)) else []
    return bool(missing) and poll.ledger.late.issuperset(missing) and poll.absent() == missing


def _done_elsewhere(poll: _Poll) -> list[bool]:
    """For each set of deviations of other functions with the same collectives: whether it has this one."""
    return [poll.text in one for one in poll.ledger.sets.get(poll.key, ())] if poll.number == 0 else []


def _give_up(poll: _Poll, seconds: float) -> str | None:
    missing, doing = poll.missing(), _done_elsewhere(poll)
    if any(doing):  # a silent rank may run another function
        if not all(doing):
            raise _disagreement(poll, f"{_ranks(missing)} may run one with it, or one without it")
        return _reason(poll.decide(_ACCEPTED))
    outcome = poll.too_late(seconds)
    if outcome != _ACCEPTED and not poll.ledger.late.issuperset(missing):
        log.warning(
            "asynctp: %s of group %r compiled no graph like this one within %.0f s (other graph breaks, or none?). "
            "What would change what ranks send is left out: %s. Raise ASYNCTP_AGREE_S where a rank is merely slow",
            *(_ranks(missing), poll.group, seconds, _plain(poll.text)),
        )
        poll.ledger.late.update(missing)
    return _reason(outcome)


def _wait_until_shown(ballots: Sequence[Ballot], until: float) -> None:
    """Wait until every rank has compiled or found the graphs of these ballots, too."""
    for ledger, key in _keys(ballots):
        for _ in _looks(until - time.monotonic(), lambda: "all ranks to compile a forward"):
            if ledger.others_came(key):
                break


def _reason(outcome: str) -> str | None:
    return None if outcome == _ACCEPTED else outcome.removeprefix(_REFUSED)


# --- words ----------------------------------------------------------------------------------------------------
def _plain(text: str) -> str:
    """A deviation without the versions that it was found with."""
    return text.rpartition(" | ")[0] or text


def _with_provenance(text: str, config: Config) -> str:
    return f"{text} | {_provenance(config)}"


def _provenance(config: Config) -> str:
    """Versions, registered ops and options: where they differ, equal texts may mean different things."""
    options = {name: value for name, value in config.decisive().items() if name not in _NOT_DECISIVE}
    told = " ".join(f"{name}={value!r}" for name, value in options.items())
    return f"asynctp {sources_digest()}, torch {torch.__version__}, ops {registry.digest()}, {told}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _ranks(ranks: Sequence[int]) -> str:
    names = [*map(str, ranks[:_NAMED]), *(["..."] if len(ranks) > _NAMED else [])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"


@functools.cache
def sources_digest() -> str:
    """A hash of this package's sources and of the kernels', which decide what code a graph becomes."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    folders = [root, root.parent / "kernels" / "asynctp_kernels", root.parent / "asynctp_kernels"]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
