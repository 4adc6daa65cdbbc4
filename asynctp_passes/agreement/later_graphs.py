"""Later graphs of a function: all ranks do in them what was accepted for an earlier one, or none does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from asynctp_passes import compat
from asynctp_passes.agreement import ledgers
from asynctp_passes.agreement.ledgers import Ledger, keyed, kind_of
from asynctp_passes.agreement.polls import ACCEPTED, REFUSED, Poll, Votes, disagreement, plain, with_provenance
from asynctp_passes.agreement.waits import deadline, looks, still
from asynctp_passes.config import Config
from asynctp_passes.ir.records import Ballot
from asynctp_passes.waiting import ranks_named

__all__ = ["Later", "keep"]

AGAIN_S = 5.0
"""Seconds to wait for ranks that may not do in a later graph what was accepted for the function's first one."""


@dataclass
class Later:
    """Deviations that all ranks do in earlier graphs of the functions that are compiled.

    Attributes:
        polls: All of the graphs that are compiled.
        ballots: Theirs.
        config: The configuration that they are compiled with.
        again: Those of `polls` that were accepted for an earlier graph: this rank does the same, if all can.
        lacked: What was accepted for an earlier graph, and these do not have. Others may still run that graph. So this
            rank waits until every rank has compiled the function without.
    """

    polls: Sequence[Poll]
    ballots: Sequence[Ballot]
    config: Config
    again: list[Poll]
    lacked: list[Poll]

    @classmethod
    def told(cls, polls: Sequence[Poll], ballots: Sequence[Ballot], config: Config) -> Later:
        """Tell the other ranks what these graphs lack: all is said before anything is waited for."""
        again: list[Poll] = []
        lacked: list[Poll] = []
        for one in ballots:
            if (ledger := ledgers.of_group(one.group)) is not None:
                own = {with_provenance(text, config) for text in one.deviations}
                earlier = _done_before(ledger, one.group, ledger.key_of(one))
                missed = [poll for poll in earlier if poll.key != ledger.key_of(one) or poll.text not in own]
                kept = set(earlier).difference(missed)
                lacked += missed
                again += [poll for poll in polls if poll in kept]
        for poll in lacked:
            poll.say_lacked()
        return cls(polls, ballots, config, again, lacked)

    @property
    def new(self) -> list[Poll]:
        """The polls whose outcomes are not known."""
        return [poll for poll in self.polls if poll not in self.again]

    def hear(self, votes: Votes) -> list[Poll]:
        """Refuse what another rank has compiled without by now, and tell the others so. The polls to do again."""
        still_done: list[Poll] = []
        for poll in self.again:
            at = poll.group, plain(poll.text)
            votes[at] = votes[at] or poll.refused_again()
            if votes[at] is None:
                still_done.append(poll)
            elif not poll.not_lacking():
                poll.ledger.left.add(poll.place)
        return still_done

    def settle(self, votes: Votes) -> None:
        """See that all ranks do in these graphs what was accepted for an earlier one, or that none does.

        Each wait has a bound of its own, as those of the other ranks have.
        """
        self._wait_to_hear(votes)
        if not self.lacked:
            _withdraw_alone(self.polls, self.hear(votes), votes)
        until = deadline(self.ballots)
        for poll in self.lacked:
            if self.config.deviate or poll.place not in poll.ledger.left:
                _wait_for_others(poll, until)
            poll.ledger.left.add(poll.place)
        until = deadline(self.ballots)
        for one in self.ballots:
            if (ledger := ledgers.of_group(one.group)) is not None:
                _in_another_function(ledger, one, self.polls, votes, until)
        keep(self.polls, self.ballots, votes)

    def _wait_to_hear(self, votes: Votes) -> None:
        """Wait a moment for ranks that may not do the same: they say so first of all."""
        moment = min(AGAIN_S, deadline(self.ballots) - time.monotonic())
        for _ in looks(moment, lambda: "ranks to compile what all agreed on before"):
            if not any(poll.missing() for poll in self.hear(votes)):
                break


def _withdraw_alone(polls: Sequence[Poll], again: Sequence[Poll], votes: Votes) -> None:
    """Take back what was posted for a graph that this rank compiled alone, and that does what all agreed on before.

    The next graph of the function has the same number on all ranks then.
    """
    done = [poll for poll in again if votes[poll.group, plain(poll.text)] is None]
    alone = {(poll.ledger, poll.key) for poll in done if not poll.ledger.others_came(poll.key)}
    for poll in polls:
        if (poll.ledger, poll.key) in alone:
            poll.withdraw()
    for ledger, key in alone:
        ledger.withdraw(key)


def _in_another_function(ledger: Ledger, ballot: Ballot, polls: Sequence[Poll], votes: Votes, until: float) -> None:
    """See that all ranks compile a function, where this graph does less than another with the same collectives.

    A silent rank may run that one.
    """
    key = ledger.key_of(ballot)
    name, number = ledger.last[key]
    done = (poll for poll in polls if poll.key == key and votes[poll.group, plain(poll.text)] is None)
    own = {poll.text for poll in done if poll.ledger is ledger}
    other = set[str]().union(*ledger.sets.get(key, ())) - own
    if number or not other:
        return
    for text in sorted(other):
        poll = Poll(ledger, ballot.group, key, name, number, text)
        if poll.decide(f"{REFUSED}rank {ledger.rank} compiled {name} without it") == ACCEPTED:
            raise disagreement(poll, "others do it in this function")
    why = "it may run another function, where all agreed on something"
    silent = still(lambda: ledger.silent(key), until, f"to compile {name}: {why}")
    if silent:
        raise disagreement(poll, f"{ranks_named(silent)} did not compile {name}, and may run another function")


def keep(polls: Sequence[Poll], ballots: Sequence[Ballot], votes: Votes) -> None:
    """Note the deviations that all ranks do in these graphs."""
    function = compat.compiled_function()
    accepted = [poll for poll in polls if votes[poll.group, plain(poll.text)] is None]
    for poll in accepted:
        poll.ledger.left.discard(poll.place)
        done = poll.ledger.done.setdefault((kind_of(poll.key), poll.function), {})
        done.setdefault((poll.key, poll.text), function is None or not function.breaks)
    for ledger, key in keyed(ballots):
        found = frozenset(poll.text for poll in accepted if poll.ledger is ledger and poll.key == key)
        ledger.sets.setdefault(key, set()).add(found)


def _done_before(ledger: Ledger, group: str, key: str) -> list[Poll]:
    """The deviations that all ranks do in earlier graphs of the function whose graph was counted last.

    Those of graphs with other collectives count in the first graph with these, which may have other graph breaks. So do
    those of the whole function, where this is the rest of it after a break. Not so what all ranks have left since.
    """
    (name, number), kind = ledger.last[key], kind_of(key)
    polls = [Poll(ledger, group, other, name, number, text) for other, text in ledger.done.get((kind, name), {})]
    found = [poll for poll in polls if poll.key == key or (number == 0 and poll.place not in ledger.left)]
    base = ledger.bases[name]
    for (other_kind, function), done in ledger.done.items() if base != name and number == 0 else ():
        if other_kind == kind and function != name and ledger.bases[function] == base:
            whole = [at for at, is_whole in done.items() if is_whole]
            polls = [Poll(ledger, group, other, function, number, text) for other, text in whole]
            # it is lacked, if this is its last graph's rest
            found += [poll for poll in polls if not poll.is_lacked() and poll.place not in ledger.left]
    return found


def _wait_for_others(poll: Poll, until: float) -> None:
    """Wait until every rank has compiled the function without a deviation that was accepted."""
    begun = time.monotonic()
    having = still(
        poll.not_lacking, until, f"to compile {poll.function} without what all agreed on: {plain(poll.text)}"
    )
    if having:
        seconds = time.monotonic() - begun
        raise disagreement(
            poll, f"{ranks_named(having)} did not compile it without that, as this rank does, within {seconds:.0f} s"
        )
