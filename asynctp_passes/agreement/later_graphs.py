"""Later graphs of a function: all ranks do in them what was accepted for an earlier one, or none does."""

from __future__ import annotations

import time
from collections.abc import Sequence

from asynctp_passes import compat
from asynctp_passes.agreement import ledgers
from asynctp_passes.agreement.ledgers import Ledger, keyed, kind_of
from asynctp_passes.agreement.polls import ACCEPTED, REFUSED, Poll, Votes, disagreement, plain, with_provenance
from asynctp_passes.agreement.waits import still
from asynctp_passes.config import Config
from asynctp_passes.ir.records import Ballot
from asynctp_passes.waiting import ranks_named

__all__ = ["in_later_graphs", "keep"]

AGAIN_S = 5.0
"""Seconds to wait for ranks that may not do in a later graph what was accepted for the function's first one."""


def in_later_graphs(
    polls: Sequence[Poll], ballots: Sequence[Ballot], votes: Votes, config: Config, until: float
) -> None:
    """See that all ranks do in later graphs of a function what was accepted for an earlier one, or that none does.

    Others may still run that graph. So a rank that compiles the function without a deviation waits until every rank has
    compiled it without. A rank that has it waits a moment for such ranks.
    """
    again: list[Poll] = []
    lacked: list[Poll] = []
    for one in ballots:
        if (ledger := ledgers.of_group(one.group)) is not None:
            own = {with_provenance(text, config) for text in one.deviations}
            earlier = _done_before(ledger, one.group, ledger.key_of(one))
            lacked += [poll for poll in earlier if poll.key != ledger.key_of(one) or poll.text not in own]
            kept = set(earlier).difference(lacked)
            again += [poll for poll in polls if poll in kept and votes[poll.group, plain(poll.text)] is None]
    for poll in lacked:
        poll.say_lacked()
    moment = min(until, time.monotonic() + AGAIN_S)
    for poll in again:
        votes[poll.group, plain(poll.text)] = poll.refused_again(moment)
    if not lacked:
        _withdraw_alone(polls, again, votes)
    for poll in lacked:
        _wait_for_others(poll, until)
    for one in ballots:
        if (ledger := ledgers.of_group(one.group)) is not None:
            _in_another_function(ledger, one, polls, votes, until)
    keep(polls, ballots, votes)


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
        done = poll.ledger.done.setdefault((kind_of(poll.key), poll.function), {})
        done.setdefault((poll.key, poll.text), function is None or not function.breaks)
    for ledger, key in keyed(ballots):
        found = frozenset(poll.text for poll in accepted if poll.ledger is ledger and poll.key == key)
        ledger.sets.setdefault(key, set()).add(found)


def _done_before(ledger: Ledger, group: str, key: str) -> list[Poll]:
    """The deviations that all ranks do in earlier graphs of the function whose graph was counted last.

    Those of graphs with other collectives count in the first graph with these, which may have other graph breaks. So do
    those of the whole function, where this is the rest of it after a break.
    """
    (name, number), kind = ledger.last[key], kind_of(key)
    found = [
        Poll(ledger, group, other, name, number, text)
        for other, text in ledger.done.get((kind, name), {})
        if other == key or number == 0
    ]
    base = ledger.bases[name]
    for (other_kind, function), done in ledger.done.items() if base != name and number == 0 else ():
        if other_kind == kind and function != name and ledger.bases[function] == base:
            whole = [at for at, is_whole in done.items() if is_whole]
            polls = [Poll(ledger, group, other, function, number, text) for other, text in whole]
            found += [poll for poll in polls if not poll.is_lacked()]  # it is, if this is its last graph's rest
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
