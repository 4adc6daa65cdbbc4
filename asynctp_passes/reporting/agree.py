"""Agreement: what changes what ranks send is done by all ranks of a group, or by none. They vote when they compile.

    rank 0: deviations ─▶ store ◀─ deviations :rank 1          accepted if every rank has it, refused otherwise

Each rank puts the deviations of a graph (`deviations`) into the group's own key-value store, under what the group
communicates in that graph, and waits until every rank has the same one. It waits no longer than until every rank has
compiled as many graphs with these collectives, or for `ASYNCTP_AGREE_S` seconds. The outcome is one record for each
deviation, which the first rank to know it writes, and which all ranks obey from then on. A graph without deviations
waits for nobody. docs/explanation/agreement-of-ranks.md says why.

Keys, in the store of the group, below `asynctp/<life>/<hash of what is communicated>`:

    shown/<graph>              how many ranks have compiled this graph, and posted what they have
    has/<rank>                 the texts of a rank's last graph
    <hash of text>/votes       how many ranks have the deviation
    <hash of text>/<rank>      there, if this rank has it
    <hash of text>/outcome     "accepted", or "refused" and why
    <hash of text>/with/<graph>/<rank>  there, if this rank has it in this graph, after an earlier one
    <hash of text>/at/<graph>  the outcome for this graph
    <hash of text>/lacks/<function>/<rank>  there, if this rank has this function without it, after one with it

A graph is `n.r`: of the nth function with these collectives, compiled anew for the rth time. Ranks compile functions in
one order. One of them may compile a function anew by itself, for another Python number say.

Below `asynctp/<life>` itself:

    keys/<rank>                the keys of a rank's graphs, each once
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

from asynctp_passes import compat
from asynctp_passes.config import Config, agree_seconds
from asynctp_passes.ir import registry
from asynctp_passes.planning.deviations import LOCAL, Ballot
from asynctp_passes.reporting.errors import AsyncTPError, DisagreementError
from asynctp_passes.reporting.report import Report

__all__ = ["Votes", "agreed_before", "refuse", "sources_digest", "stands", "vote"]

log = logging.getLogger(__name__)

WARN_S = 5.0
"""Seconds of waiting after which a warning says for whom."""

LATE_S = 1.0
"""Seconds to wait for ranks that have let one wait pass without compiling what was asked: they have other graphs."""

AGAIN_S = 5.0
"""Seconds to wait for ranks that may not do in a later graph what was accepted for an earlier one."""

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
    """What this process has done in the store of one process group.

    Attributes:
        store: The store.
        rank: This rank.
        ranks: All ranks of the group.
        life: See `compat.Peers`.
        group: The process group; None where its timeout does not matter.
        compiles: Graphs that were compiled, by what is communicated.
        functions: By what is communicated, and by Dynamo's number of a function, the graph that was made last of it.
        graph: By what is communicated, the last graph.
        again: How many of the next ones were counted when they came from a cache.
        posted: Deviations that the others know of.
        late: Ranks that let a wait pass.
        first: By what is communicated, the number of this rank's first graph with a deviation.
        known: By rank, the keys of its graphs when this rank had voted last.
    """

    store: Any
    rank: int
    ranks: tuple[int, ...]
    life: str
    group: Any = None
    compiles: Counter[str] = field(default_factory=Counter)
    functions: dict[str, dict[Any, tuple[int, int]]] = field(default_factory=dict)
    graph: dict[str, str] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    posted: set[str] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    first: dict[str, dict[str, int]] = field(default_factory=dict)
    known: dict[int, frozenset[str]] = field(default_factory=dict)

    def count(self, key: str) -> bool:
        """Count a graph with these collectives; False for one that was counted when it came from a cache."""
        if self.again[key]:
            self.again[key] -= 1
            return False
        self.compiles[key] += 1
        functions, (function, first) = self.functions.setdefault(key, {}), compat.compiled_function()
        if first or function not in functions:
            newest = max((number for number, _ in functions.values()), default=0)
            functions[function] = newest + 1, 0
        else:
            number, times = functions[function]
            functions[function] = number, times + 1
        self.graph[key] = "{}.{}".format(*functions[function])
        return True

    @property
    def patience(self) -> float:
        """Seconds to wait for other ranks, which may wait meanwhile in a collective of this group."""
        return min(agree_seconds(), compat.group_timeout_s(self.group) / 4)

    def tell_keys(self) -> None:
        """Tell the other ranks the keys of this rank's graphs."""
        self.store.set(f"asynctp/{self.life}/keys/{self.rank}", json.dumps(sorted(self.compiles)))

    def keys_of(self, rank: int) -> frozenset[str]:
        """The keys of another rank's graphs, as far as it has told them."""
        at = f"asynctp/{self.life}/keys/{rank}"
        return frozenset(json.loads(self.store.get(at)) if self.store.check([at]) else ())

    def look_at_keys(self) -> None:
        """Keep the keys that the other ranks have told by now; in a large group, those of the first ranks."""
        self.known = {rank: self.keys_of(rank) for rank in self.ranks[:_LOOKED_AT]}


_ledgers: weakref.WeakKeyDictionary[Any, _Ledger] = weakref.WeakKeyDictionary()  # a ledger goes with its group


@dataclass(frozen=True)
class _Poll:
    """One deviation that was put to the vote for a graph with these collectives."""

    ledger: _Ledger
    group: str
    key: str
    graph: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.key}/{_hash(self.text)}"

    @property
    def function(self) -> str:
        """The number of the function that the graph is of."""
        return self.graph.partition(".")[0]

    def outcome(self) -> str | None:
        """The outcome, if there is one by now; this rank writes it down if it is the first to know."""
        store, place, world = self.ledger.store, self.place, len(self.ledger.ranks)
        if store.check([f"{place}/outcome"]):
            return str(store.get(f"{place}/outcome").decode())
        shown = store.add(f"{self.key}/shown/{self.graph}", 0) >= world  # looked at before votes, which come first
        if store.add(f"{place}/votes", 0) >= world:
            self.ledger.late.clear()
            return self.decide(_ACCEPTED)
        if shown:
            self.ledger.late.clear()
            return self.decide(_REFUSED + self._difference())
        return None

    def decide(self, outcome: str, record: str = "outcome") -> str:
        """Write an outcome down, unless there is one; what holds."""
        return str(self.ledger.store.compare_set(f"{self.place}/{record}", "", outcome).decode())

    def is_accepted(self) -> bool:
        """All ranks have agreed on it."""
        at = f"{self.place}/outcome"
        return bool(self.ledger.store.check([at]) and self.ledger.store.get(at).decode() == _ACCEPTED)

    def say_again(self) -> None:
        """Say that this rank has it in a later graph, too."""
        self.ledger.store.set(f"{self.place}/with/{self.graph}/{self.ledger.rank}", "1")

    def refused_again(self, until: float, first: bool) -> str | None:
        """Why this rank does not do in this graph what it did in an earlier one; None if it does.

        first: no rank has a graph of this function yet. Then one that compiles other graphs meanwhile has it in those.
        """
        store, record, other = self.ledger.store, f"at/{self.graph}", ""
        having = [f"{self.place}/with/{self.graph}/{rank}" for rank in self.ledger.ranks]

        def awaited() -> str:
            silent = [rank for rank, at in zip(self.ledger.ranks, having, strict=True) if not store.check([at])]
            return f"{_ranks(silent)} to compile what all agreed on before: {_plain(self.text)}"

        for _ in _looks(until - time.monotonic(), awaited):
            if store.check([f"{self.place}/{record}"]) or store.check(having):
                break
            if first and (other := self._elsewhere(having)):
                break
        outcome = self.decide(other or _ACCEPTED, record)
        if outcome == _ACCEPTED:
            return None
        self.say_lacked()
        return f"{_reason(outcome)}: {_plain(self.text)}"

    def _elsewhere(self, having: Sequence[str]) -> str:
        """The refusal for a rank without it that has graphs by now which this rank does not have; or nothing."""
        ledger = self.ledger
        for rank, at in zip(ledger.ranks[:_LOOKED_AT], having, strict=False):
            new = ledger.keys_of(rank) - ledger.known.get(rank, frozenset()) - ledger.compiles.keys()
            if new and not ledger.store.check([at]):
                return f"{_REFUSED}rank {rank} compiled graphs with other collectives (other graph breaks?)"
        return ""

    def say_lacked(self) -> None:
        """Say that this rank has this function without it."""
        self.ledger.store.set(f"{self.place}/lacks/{self.function}/{self.ledger.rank}", "1")

    def not_lacking(self) -> list[int]:
        """The ranks that have not said that they have this function without it."""
        store, at = self.ledger.store, f"{self.place}/lacks/{self.function}"
        return [rank for rank in self.ledger.ranks if not store.check([f"{at}/{rank}"])]

    def missing(self) -> list[int]:
        """The ranks that have not said that they have the deviation."""
        return [rank for rank in self.ledger.ranks if not self.ledger.store.check([f"{self.place}/{rank}"])]

    def absent(self) -> list[int]:
        """Those of them that have compiled no graph with these collectives."""
        return [rank for rank in self.missing() if not self.ledger.store.check([f"{self.key}/has/{rank}"])]

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
            key = f"{self.key}/has/{rank}"
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
        config: With `agree=False` all is accepted, and nobody learns of it.

    Returns:
        The outcomes. With `torch._dynamo.config.suppress_errors` this rank refuses all.

    Raises:
        DisagreementError: All ranks have agreed on something in an earlier graph with the same collectives, which this
            graph cannot do, and another rank has compiled no graph without it.
    """
    votes: Votes = {(one.group, text): None for one in ballots for text in one.deviations}
    if config.agree:
        if compat.suppresses_errors():
            keyed = [one for one in ballots if _ledger(one.group) is not None]
            votes |= {(one.group, text): _SUPPRESSED for one in keyed for text in one.deviations}
            ballots = [replace(one, deviations=()) for one in ballots]
        with _without_store_errors(ballots, votes, config):
            polls = _posted(ballots, config)
            votes |= _outcomes(polls, votes)
            _in_later_graphs(polls, ballots, votes, config)
    return votes


def agreed_before(ballot: Ballot, config: Config) -> set[str]:
    """Those of a ballot's deviations on which all ranks have agreed already, in an earlier graph like this one.

    Peers may still run that graph. A rank that can do the same, though it need not, does it.
    """
    ledger = _ledger(ballot.group) if config.agree else None
    if ledger is None:
        return set()
    found = set[str]()
    for poll in _polls(ledger, ballot, config):
        with contextlib.suppress(RuntimeError, OSError):
            if poll.is_accepted():
                found.add(_plain(poll.text))
    return found


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
    with _without_store_errors([*early, *late], votes, config):
        first, then = _posted(early, config), _posted(late, config)
        votes |= _outcomes(first, votes)
        _in_later_graphs(first, early, votes, config)
        if then:
            _wait_until_shown(early, config)
            found = {(one.group, _plain(one.text)): one.outcome() for one in then}
            votes |= {at: _reason(outcome or f"{_REFUSED}it is not known yet") for at, outcome in found.items()}
    refused = [reason for reason in votes.values() if reason is not None]
    if refused:
        for ledger, key in _keys([*early, *late]):
            ledger.again[key] += 1
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
            found += [_plain(poll.text) for poll in _polls(ledger, one, config) if poll.place in ledger.posted]
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


def _polls(ledger: _Ledger, ballot: Ballot, config: Config, graph: str = "") -> list[_Poll]:
    """One for each deviation of a ballot; for no graph, where only the outcome for all is asked."""
    texts = [_with_provenance(text, config) for text in ballot.deviations]
    return [_Poll(ledger, ballot.group, _key(ledger, ballot), graph, text) for text in texts]


def _posted(ballots: Iterable[Ballot], config: Config) -> list[_Poll]:
    """Tell the other ranks of this rank's deviations, and then that these are all of a graph's."""
    polls: list[_Poll] = []
    for one in ballots:
        ledger = _ledger(one.group)
        if ledger is None:
            continue
        key = _key(ledger, one)
        with _lock:
            counted, graph = ledger.count(key), ledger.graph[key]
        if ledger.compiles[key] == 1:
            ledger.tell_keys()
        found = _polls(ledger, one, config, graph)
        for poll in found:
            _post(poll)
        ledger.store.set(f"{key}/has/{ledger.rank}", json.dumps([poll.text for poll in found]))
        if counted:
            ledger.store.add(f"{key}/shown/{graph}", 1)
        polls += found
    return polls


def _post(poll: _Poll) -> None:
    """Say that this rank has a deviation, once; not where it has a size that only this rank knows."""
    with _lock:
        if poll.place in poll.ledger.posted or LOCAL in _plain(poll.text):
            return
        poll.ledger.posted.add(poll.place)
    poll.ledger.store.set(f"{poll.place}/{poll.ledger.rank}", "1")
    poll.ledger.store.add(f"{poll.place}/votes", 1)


def _in_later_graphs(polls: Sequence[_Poll], ballots: Sequence[Ballot], votes: Votes, config: Config) -> None:
    """See that what was accepted for an earlier graph with the same collectives is done by all ranks in this one.

    The outcome is a record for each number of a graph. A rank without the deviation refuses it, and sees that the
    others have a graph without it, too: they may still run an earlier one. A rank that has it waits a moment for those.
    """
    again: list[_Poll] = []
    lacked: list[_Poll] = []
    for one in ballots:
        if (ledger := _ledger(one.group)) is not None:
            key, own = _key(ledger, one), {_with_provenance(text, config) for text in one.deviations}
            with _lock:
                number, graph = ledger.compiles[key], ledger.graph[key]
                begun = ledger.first.setdefault(key, {})
                earlier = {text for text, at in begun.items() if at < number}
                begun |= dict.fromkeys(own - begun.keys(), number)
            lacked += [_Poll(ledger, one.group, key, graph, text) for text in sorted(earlier - own)]
            again += [poll for poll in polls if (poll.group, poll.key) == (one.group, key) and poll.text in earlier]
    lacked = [poll for poll in lacked if poll.is_accepted()]
    for poll in lacked:
        refusal = f"{_REFUSED}rank {poll.ledger.rank} cannot do it in a later graph"
        if poll.decide(refusal, f"at/{poll.graph}") == _ACCEPTED:
            raise _disagreement(poll, "others do it in this graph, too")
        poll.say_lacked()
    again = [poll for poll in again if votes[poll.group, _plain(poll.text)] is None]
    for poll in again:
        poll.say_again()
    first = compat.is_first_compile()
    patience = min((poll.ledger.patience for poll in again), default=0.0)
    until = time.monotonic() + (patience if first else min(AGAIN_S, patience))
    for poll in again:
        votes[poll.group, _plain(poll.text)] = poll.refused_again(until, first)
    for poll in lacked:
        _wait_for_others(poll)
    for ledger, _ in _keys(ballots):
        if any(ledger.first.values()):
            ledger.look_at_keys()


def _wait_for_others(poll: _Poll) -> None:
    """Wait until every rank has compiled a graph without what was accepted."""
    having, limit = poll.not_lacking(), poll.ledger.patience

    def awaited() -> str:
        return f"{_ranks(having)} to compile a graph without what all agreed on: {_plain(poll.text)}"

    for _ in _looks(limit, awaited):
        having = poll.not_lacking()
        if not having:
            return
    raise _disagreement(poll, f"{_ranks(having)} compiled no graph without it within {limit:g} s")


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
        f"asynctp: all ranks of group {poll.group!r} have agreed to {_plain(poll.text)}, in an earlier graph with the "
        f"same collectives. This rank's graph cannot do that, and {why}: unlike calls would meet. Let all ranks run "
        "the same program, raise ASYNCTP_AGREE_S where a rank is merely slow, or compile without asynctp"
    )


def _outcomes(polls: Sequence[_Poll], votes: Votes) -> Votes:
    """Wait until all is decided, for as long as that may take."""
    found: Votes = {}
    limit, waiting = min((poll.ledger.patience for poll in polls), default=0.0), list(polls)
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
            outcome = poll.outcome()
            if outcome is not None:
                found[poll.group, _plain(poll.text)] = _reason(outcome)
                waiting.remove(poll)
        if not waiting:
            break
        if passed >= limit or (passed >= LATE_S and all(_is_late(poll) for poll in waiting)):
            for poll in waiting:
                found[poll.group, _plain(poll.text)] = _give_up(poll, passed)
            break
    return found


def _is_late(poll: _Poll) -> bool:
    """True when all that is missing are ranks which did not come in time before, and have not come now."""
    missing = poll.missing() if poll.ledger.late else []
    return bool(missing) and poll.ledger.late.issuperset(missing) and poll.absent() == missing


def _give_up(poll: _Poll, seconds: float) -> str | None:
    missing = poll.missing()
    outcome = poll.too_late(seconds)
    if outcome != _ACCEPTED and not poll.ledger.late.issuperset(missing):
        log.warning(
            "asynctp: %s of group %r compiled no graph like this one within %.0f s (other graph breaks, or none?). "
            "What would change what ranks send is left out: %s. Raise ASYNCTP_AGREE_S where a rank is merely slow",
            *(_ranks(missing), poll.group, seconds, _plain(poll.text)),
        )
        poll.ledger.late.update(missing)
    return _reason(outcome)


def _wait_until_shown(ballots: Sequence[Ballot], config: Config) -> None:
    """Wait until every rank has compiled or found the graphs of these ballots, too."""
    begun = time.monotonic()
    for ledger, key in _keys(ballots):
        shown = f"{key}/shown/{ledger.graph[key]}"
        for _ in _looks(begun + ledger.patience - time.monotonic(), lambda: "all ranks to compile a forward"):
            if ledger.store.add(shown, 0) >= len(ledger.ranks):
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
    """What has to be the same besides for a text to mean the same: versions, registered ops, options."""
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
