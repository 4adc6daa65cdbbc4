"""Vote on the deviations of a graph, and ask what was agreed before.

rank 0: deviations ─▶ store ◀─ deviations :rank 1          accepted if every rank has it, refused otherwise
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import fx

from asynctp_passes import compat, ops
from asynctp_passes.agreement import ledgers
from asynctp_passes.agreement.later_graphs import Later, keep
from asynctp_passes.agreement.ledgers import keyed
from asynctp_passes.agreement.polls import (
    REFUSED,
    REFUSES_ALL,
    Poll,
    Votes,
    done_elsewhere,
    outcomes,
    plain,
    polls_of,
    post,
    reason_of,
)
from asynctp_passes.agreement.waits import deadline, looks
from asynctp_passes.config import Config
from asynctp_passes.errors import AsyncTPError, DisagreementError
from asynctp_passes.ir.collectives import read_collectives
from asynctp_passes.ir.records import Ballot
from asynctp_passes.ir.traversal import phase_of
from asynctp_passes.planning.deviations import PLAIN, Words, communicated, is_for_any_graph
from asynctp_passes.reporting.report import Report

__all__ = ["Votes", "agreed_before", "refuse", "stands", "vote"]

log = logging.getLogger(__name__)

_SUPPRESSED = "torch._dynamo.config.suppress_errors lets this rank go on without the graph, should its compile fail"


def vote(ballots: Sequence[Ballot], config: Config) -> Votes:
    """Put the deviations of a graph to the vote of each group, and wait for the outcome.

    Does nothing without process groups, in groups of one rank, and with the fake backend: then all is accepted.

    Args:
        ballots: One for each group that communicates in the graph, with its deviations, or none.
        config: With `deviate=False` all is refused; the other ranks are told. None is waited for, unless all ranks do
            in an earlier graph what this one lacks so.

    Returns:
        The outcomes. With `torch._dynamo.config.suppress_errors` this rank refuses all, and where its GPUs cannot share
        memory with those of its peers.

    Raises:
        DisagreementError: All ranks have agreed on a deviation that this graph cannot do, and another rank may run a
            graph with it.
    """
    votes: Votes = {(one.group, text): None for one in ballots for text in one.deviations}
    if not config.deviate:
        votes = dict.fromkeys(votes, REFUSES_ALL)
        ballots = [replace(one, deviations=()) for one in ballots]
    ballots = [_without_refused(one, votes) for one in ballots]
    with _without_store_errors(ballots, votes, config):
        _decide(post(ballots, config), ballots, ballots, votes, config)
    return votes


def _decide(
    polls: Sequence[Poll], ballots: Sequence[Ballot], bounds: Sequence[Ballot], votes: Votes, config: Config
) -> None:
    """Say what graphs lack, wait for the outcomes of their polls, and write these into `votes`.

    bounds: The wait ends for the most impatient group of these.
    """
    later = Later.told(polls, ballots, config)
    votes |= outcomes(later.new, deadline(bounds), lambda: later.hear(votes))
    later.settle(votes)


def _without_refused(ballot: Ballot, votes: Votes) -> Ballot:
    """A ballot without those deviations that this rank refuses by itself; it writes them into `votes`."""
    reasons = {text: _refuses(ballot.group, text) for text in ballot.deviations}
    votes |= {(ballot.group, text): f"{reason}: {text}" for text, reason in reasons.items() if reason is not None}
    return replace(ballot, deviations=tuple(text for text, reason in reasons.items() if reason is None))


def _refuses(group: str, text: str) -> str | None:
    """Why this rank refuses a deviation by itself; None if it does not."""
    if (ledger := ledgers.of_group(group)) is None:
        return None
    if compat.suppresses_errors():
        return _SUPPRESSED
    reason = ops.compares_calls(len(ledger.ranks))[0] if compat.uses_gpus() and text != PLAIN else ""
    return f"nothing compares calls of this group ({reason})" if reason else None


def agreed_before(graph: fx.Graph, config: Config) -> frozenset[tuple[str, str]]:
    """The deviations on which all ranks have agreed before, by group and text: what peers may run beside this graph.

    That is in an earlier graph of this function, or in all other functions with the same collectives. A rank that can
    do the same, though it need not, does it. So these are such that any graph with these collectives can do them: to
    keep a gather, and to leave a group's collectives to torch.
    """
    if compat.compiled_function() is None:
        return frozenset()
    collectives = read_collectives(graph)
    words, found = Words(collectives), set[tuple[str, str]]()
    for group, key in communicated(collectives, phase_of(graph)).items():
        kept = (words.of_kept(one) for one in collectives if one.group_key == group and one.kind == "all_gather")
        found |= {(group, text) for text in _accepted(Ballot(group, key, (words.of_plain(), *kept)), config)}
    return frozenset(found)


def _accepted(ballot: Ballot, config: Config) -> Iterator[str]:
    """Those of a ballot's deviations on which all ranks have agreed already."""
    ledger, function = ledgers.of_group(ballot.group), compat.compiled_function()
    for poll in () if ledger is None or function is None else polls_of(ledger, ballot, config, function.name):
        others = done_elsewhere(poll)
        with contextlib.suppress(RuntimeError, OSError):
            if (others and all(others)) or poll.is_accepted():
                yield plain(poll.text)


def _left_out(ballots: Iterable[Ballot], config: Config) -> Iterator[str]:
    """Deviations that graphs from a cache lack, and would have if they were compiled now (`agreed_before`)."""
    for one in ballots:
        if (ledger := ledgers.of_group(one.group)) is not None:
            done = ledger.sets.get(ledger.key_of(one), ())
            known = {plain(text) for texts in done for text in texts}.difference(one.deviations)
            texts = tuple(sorted(filter(is_for_any_graph, known)))
            for text in _accepted(replace(one, deviations=texts), config):
                yield f"it leaves out what all ranks have agreed on in an earlier graph: {text}"


def stands(reports: Sequence[Report], config: Config, *, joint: bool, anew: bool = False) -> list[str]:
    """Vote on graphs that came from a cache, all at once; why they cannot run as they are, a text for each deviation.

    A backward that comes with its forward is not waited for: on other ranks it may be compiled only when it runs, which
    takes this rank's forward. So it stands if all ranks know it when they know the forward, and is compiled anew
    otherwise.

    Args:
        reports: Of the graphs.
        config: As for `vote`.
        joint: The graph that they were made of was not seen here either: its ballots are voted on too.
        anew: They can be compiled again, and then do what all ranks have agreed on before.
    """
    kept = [[one for one in report.ballots if joint or not one.joint] for report in reports]
    with_forward = any(report.phase != "backward" for report in reports)
    early: list[Ballot] = []
    late: list[Ballot] = []
    for report, ballots in zip(reports, kept, strict=True):
        for one in ballots:
            (late if report.phase == "backward" and with_forward and not one.joint else early).append(one)
    votes: Votes = {(one.group, text): None for one in (*early, *late) for text in one.deviations}
    alone = [reason for group, text in votes if (reason := _refuses(group, text)) is not None]
    if anew and config.deviate:
        alone += _left_out([*early, *late], config)
    if alone:
        return alone
    if any(ledger.has_backward(key) for ledger, key in keyed(late)):
        return ["its function was compiled before: ranks agree on this backward when it is compiled"]
    with _without_store_errors([*early, *late], votes, config):
        first, then, all_ballots = post(early, config), post(late, config), [*early, *late]
        _decide(first, early, all_ballots, votes, config)
        if then:
            _wait_until_shown(early, deadline(all_ballots))
            found = {(one.group, plain(one.text)): one.outcome() for one in then}
            votes |= {at: reason_of(outcome or f"{REFUSED}it is not known yet") for at, outcome in found.items()}
            keep(then, late, votes)
    refused = [reason for reason in votes.values() if reason is not None]
    if refused:
        for ledger, key in keyed([*early, *late]):
            ledger.discount(key)
    return refused


def _wait_until_shown(ballots: Sequence[Ballot], until: float) -> None:
    """Wait until every rank has compiled or found the graphs of these ballots, too."""
    for ledger, key in keyed(ballots):
        for _ in looks(until - time.monotonic(), lambda: "all ranks to compile a forward"):
            if ledger.others_came(key):
                break


def refuse(ballots: Iterable[Ballot], votes: Votes | None) -> None:
    """Refuse, after the vote, to do what was put to it, since asynctp failed on the graph.

    Args:
        ballots: What was put to the vote.
        votes: The outcome; None where asynctp failed before it was known.

    Raises:
        DisagreementError: All ranks have agreed on something that this one cannot do, or may have. What any graph can
            do is no such thing, once it is known.
    """
    asked = [(one.group, text) for one in ballots if ledgers.of_group(one.group) for text in one.deviations]
    open_or_agreed = [
        text for group, text in asked if votes is None or (votes[group, text] is None and not is_for_any_graph(text))
    ]
    if open_or_agreed:
        raise DisagreementError(
            "asynctp: this rank runs the graph as it was, since asynctp failed on it, but all ranks have agreed to "
            f"{'; '.join(open_or_agreed)}, and would wait for one another forever. Set deviate=False or compile "
            "without asynctp"
        )


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
        if (ledger := ledgers.of_group(one.group)) is not None:
            function, number = ledger.last.get(ledger.key_of(one), ("", 0))
            polls = polls_of(ledger, one, config, function, number)
            found += [plain(poll.text) for poll in polls if poll.place in ledger.posted]
    return found
