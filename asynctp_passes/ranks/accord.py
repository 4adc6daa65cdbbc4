"""One question a graph: do all ranks of a group deviate alike? The answer is an accord, which every call carries.

    rank 0: digest ─▶ store ◀─ digest :rank 1       yes, if every rank has it; no, if one came as far without it

The first rank that knows the outcome writes it down, and it stays. Every call of the graph in that group has the
accord, a hash of what was agreed, in its signature: unlike graphs raise at their first calls
(docs/internals/accord.md).

Keys in the store of the group, below `asynctp/<life>/<function>/<phase>`:

    forms/<rank>       the distinct forms of the function that a rank has compiled, in order: lists of digests
    <digest>/told      what it is a digest of
    <digest>/has       how many ranks have posted it
    <digest>/outcome   "yes", or "no" and why

The last two of a gather that is kept, and the yes of other digests, are also below `asynctp/<life>`, for all functions.
Errors of unlike calls quote `asynctp/accords/<accord>`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asynctp_passes import ops, waiting
from asynctp_passes.config import Config, agree_seconds
from asynctp_passes.errors import AsyncTPError, DisagreementError
from asynctp_passes.ir import registry
from asynctp_passes.ir.records import Answer, Question
from asynctp_passes.reporting.internal import sources_digest
from asynctp_passes.torch_private import dynamo, process_groups
from asynctp_passes.waiting import ranks_named

log = logging.getLogger(__name__)

WARN_S = 5.0
"""Seconds of waiting after which a warning says for whom."""

LATE_S = 1.0
"""Seconds to wait for ranks that have let one wait pass without compiling what was asked: they have other graphs."""

LOOKED_AT = 64
"""How many other ranks are asked for their forms."""

REFUSES_ALL = "Config(deviate=False)"
_SUPPRESSED = "torch._dynamo.config.suppress_errors lets a rank go on without the graph, should its compile fail"
_YES, _NO = "yes", "no "
_NOT_DECISIVE = ("groups", "strict", "expect")
_PAUSES_S = 0.002, 0.05
_ACCORDS = (1 << 31) - 1
_TOLD = 600
"""Characters of what an accord is about, in errors."""


def ask(questions: Sequence[Question], config: Config, only_looked_at: Sequence[Question] = ()) -> list[Answer]:
    """Ask the ranks of each group whether all of them do the same, and wait for the answers.

    Without process groups, in groups of one rank and with the fake backend all is agreed, and the accord is 0.

    Args:
        questions: One for each group that communicates in a graph, also where the graph has no deviations.
        config: With `deviate=False` this rank refuses all, and says so.
        only_looked_at: Those of the questions that are not waited for: they are refused if the answer is not known.

    Returns:
        The answer to each question.

    Raises:
        DisagreementError: The store failed after this rank had posted a deviation, on which others may count.
    """
    boards = [_board(one, config) for one in questions]
    asked = [one for one in boards if one is not None]
    awaited = [one for one in asked if one.question not in only_looked_at]
    try:
        for board in sorted(asked, key=awaited.__contains__):  # all is said before anything is waited for
            board.post()
        _wait(awaited)
        for board in awaited:
            board.give_up()
        for board in asked:
            board.is_open()
    except AsyncTPError:
        raise
    except (RuntimeError, OSError) as error:
        _tell_of_store(error, asked)
    pairs = zip(questions, boards, strict=True)
    return [_alone(one, config) if board is None else board.answer() for one, board in pairs]


def number_of(told: Sequence[str], text: str, store: Any) -> int:
    """The accord of what was agreed on, by its texts; errors of unlike calls quote `text` from the group's store."""
    accord = 1 + int(hashlib.sha256("\n".join(told).encode()).hexdigest(), 16) % _ACCORDS
    with contextlib.suppress(RuntimeError, OSError):
        store.set(f"asynctp/accords/{accord}", text)
    return accord


def refuse(questions: Sequence[Question], answers: Sequence[Answer] | None) -> None:
    """Refuse, after the question, to do what was asked about, since asynctp failed on the graph.

    Args:
        questions: What was asked.
        answers: The answers; None where asynctp failed before they were known.

    Raises:
        DisagreementError: All ranks have agreed on something that this one cannot do, or may have.
    """
    told = {} if answers is None else dict(zip(questions, answers, strict=True))
    asked = [one for one in questions if one not in told or one.with_answer(told[one]).done]
    asked = [one for one in asked if process_groups.peers_of(one.group) is not None]
    if texts := "; ".join(text for one in asked for text in (*one.deviations, *(() if told else one.keeps))):
        raise DisagreementError(
            "asynctp: this rank runs the graph as it was, since asynctp failed on it, but all ranks have agreed to "
            f"{texts}, and would wait for one another forever. Set deviate=False or compile without asynctp"
        )


def _alone(question: Question, config: Config) -> Answer:
    """The answer where there are no other ranks."""
    texts = (*question.deviations, *question.keeps)
    return Answer(frozenset(texts)) if config.deviate else Answer(refused=_all_refused(question, REFUSES_ALL))


def _all_refused(question: Question, reason: str) -> dict[str, str]:
    return {text: f"{reason}: {text}" for text in (*question.deviations, *question.keeps)}


def _tell_of_store(error: Exception, asked: Sequence[_Board]) -> None:
    """Refuse everything where the store fails before this rank has posted a deviation."""
    reason = f"the store of the group failed: {' '.join(str(error).split())[:200]}"
    told = [text for board in asked for text in board.told]
    if told:
        raise DisagreementError(
            f"asynctp: {reason}. Other ranks may count on this one to {'; '.join(told)}. Restart all ranks, or "
            "compile without asynctp"
        ) from error
    log.warning("asynctp: the ranks could not ask one another what they compile: %s", reason)
    for board in asked:
        board.outcomes = dict.fromkeys(board.items, f"{_NO}{reason}")


# --- what this rank has said ------------------------------------------------------------------------------------
@dataclass
class _Said:
    """This rank's posts in one process group.

    Attributes:
        forms: The forms of a function and phase, each once, by their place in the store.
        digests: Places of digests.
        late: Ranks that let a wait pass.
    """

    forms: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    late: set[int] = field(default_factory=set)


_said: weakref.WeakKeyDictionary[Any, _Said] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # ranks may be threads of one process


def _board(question: Question, config: Config) -> _Board | None:
    """The board of a question; None where there are no other ranks."""
    peers = process_groups.peers_of(question.group)
    if peers is None:
        return None
    with _lock:
        said = _said.setdefault(peers.group, _Said())
    return _Board(peers, said, question, config)


class _Board:
    """The places of one question in the store of its group.

    Attributes:
        question: The question.
        told: The deviations that this rank has posted.
        items: The texts that are asked about, by the digest that all ranks must have: the deviations together, and each
            gather that is kept.
        outcomes: By digest; those that are known.
        passed: Seconds that this rank has waited.
    """

    def __init__(self, peers: process_groups.Peers, said: _Said, question: Question, config: Config) -> None:
        self.question, self.told = question, list[str]()
        self._peers, self._store, self._said = peers, peers.store, said
        function = dynamo.compiled_function()
        self.function = f"a graph with {question.communicates}" if function is None else function.base
        self._at = f"asynctp/{peers.life}/{self.function}/{question.phase}"
        self._for_all = f"asynctp/{peers.life}"
        self._refuses = _refuses(peers, config, question)
        asked = [question.deviations, *((text,) for text in question.keeps)] if not self._refuses else [()]
        provenance = _provenance(config)
        self._told = {self._digest(texts, provenance): texts for texts in asked}
        self._form = tuple(self._told)
        self.items = {digest: texts for digest, texts in self._told.items() if texts}
        self.outcomes: dict[str, str] = {}
        self._provenance, self._index, self.passed = provenance, 0, 0.0

    def _digest(self, texts: Sequence[str], provenance: str) -> str:
        question = self.question
        told = (question.phase, question.communicates, provenance, self._refuses, *texts)
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]

    # --- posting ---------------------------------------------------------------------------------------------
    def post(self) -> None:
        """Tell the other ranks what this one does."""
        if self._peers.life is None:
            raise RuntimeError("it does not say which of its groups this is")
        with_all = {"with": self._provenance, "communicates": self.question.communicates, "refuses": self._refuses}
        for digest, texts in self._told.items():
            self._store.set(f"{self._at}/{digest}/told", json.dumps({"texts": texts, **with_all}))
        with _lock:
            forms = self._said.forms.setdefault(self._at, [])
            is_new = self._form not in forms
            if is_new:
                forms.append(self._form)
            self._index = forms.index(self._form)
            places = {digest: self._place(digest) for digest in self.items}
            new = [digest for digest, place in places.items() if place not in self._said.digests]
            self._said.digests.update(places.values())
        self.told = list(self.question.deviations) if self.items else []
        if is_new:
            self._store.set(f"{self._at}/forms/{self._peers.rank}", json.dumps(forms))
        for digest in new:
            self._store.add(f"{self._place(digest)}/has", 1)

    def _place(self, digest: str) -> str:
        """The place of a digest. That of a gather is for all functions: a rank that need not keep it can do so."""
        is_own = digest == self._form[0]  # the deviations come first
        return f"{self._at if is_own else self._for_all}/{digest}"

    # --- answers ---------------------------------------------------------------------------------------------
    @property
    def patience(self) -> float:
        """Seconds to wait for other ranks, which may wait meanwhile in a collective of this group."""
        return min(agree_seconds(), process_groups.group_timeout_s(self._peers.group) / 4)

    def is_open(self) -> bool:
        """Look again; whether anything is not known yet."""
        for digest in self.items:
            if digest not in self.outcomes and (found := self._outcome(digest)) is not None:
                self.outcomes[digest] = found
        return len(self.outcomes) < len(self.items)

    def _outcome(self, digest: str) -> str | None:
        """The outcome, if there is one by now; this rank writes it down if it is the first to know."""
        store, place = self._store, self._place(digest)
        if store.check([f"{place}/outcome"]):
            return str(store.get(f"{place}/outcome").decode())
        if store.add(f"{place}/has", 0) >= len(self._peers.ranks):
            self._said.late.clear()
            return self._decide(digest, _YES)
        for rank in self._others():
            theirs = self._forms_of(rank)
            if len(theirs) > self._index and not any(digest in form for form in theirs):
                return self._decide(digest, _NO + self._difference(digest, rank, theirs[self._index][0]))
        return None

    def _decide(self, digest: str, outcome: str) -> str:
        """Write an outcome down, unless there is one; what holds."""
        decided = str(self._store.compare_set(f"{self._place(digest)}/outcome", "", outcome).decode())
        if decided == _YES:
            self._store.set(f"{self._for_all}/{digest}/agreed", "")
        return decided

    def give_up(self) -> None:
        """Refuse what is not known yet, for want of answers."""
        for digest in [digest for digest in self.items if digest not in self.outcomes]:
            missing, text = self.missing(digest), "; ".join(self.items[digest])
            if self._store.check([f"{self._for_all}/{digest}/agreed"]) and not any(map(self._forms_of, missing)):
                self.outcomes[digest] = self._decide(digest, _YES)  # they run another function, in which all do it
                continue
            why = f"{ranks_named(missing)} compiled nothing like it within {self.passed:.1f} s: {text}"
            outcome = self.outcomes[digest] = self._decide(digest, _NO + why)
            if outcome != _YES and not self._said.late.issuperset(missing):
                log.warning(
                    "asynctp: %s of group %r compiled no graph of %s like this one within %.0f s (other graph breaks, "
                    "or none?). What would change what ranks send is left out: %s. Raise ASYNCTP_AGREE_S where a rank "
                    "is merely slow",
                    *(ranks_named(missing), self.question.group, self.function, self.passed, text),
                )
                self._said.late.update(missing)

    def missing(self, digest: str) -> list[int]:
        """The ranks that have not posted a digest."""
        return [rank for rank in self._others() if not any(digest in form for form in self._forms_of(rank))]

    def waits_for_late_ones(self) -> bool:
        """True where all that is missing are ranks which did not come in time before."""
        missing = [set(self.missing(digest)) for digest in self.items if digest not in self.outcomes]
        return bool(missing) and all(ranks and ranks <= self._said.late for ranks in missing)

    def awaited(self) -> str:
        """The ranks that this one waits for, in words."""
        digest = next(digest for digest in self.items if digest not in self.outcomes)
        return f"{ranks_named(self.missing(digest))} to compile {self.function} ({self.question.phase}) alike"

    def _others(self) -> list[int]:
        return [rank for rank in self._peers.ranks[: LOOKED_AT + 1] if rank != self._peers.rank]

    def _forms_of(self, rank: int) -> list[list[str]]:
        at = f"{self._at}/forms/{rank}"
        found: list[list[str]] = json.loads(self._store.get(at)) if self._store.check([at]) else []
        return found

    def _difference(self, digest: str, rank: int, theirs: str) -> str:
        """Why a rank that came as far has no such digest: what it has in place of it."""
        own = "; ".join(self.items[digest])
        said = f"rank {rank} of the group's {len(self._peers.ranks)} does not: {own}"
        at = f"{self._at}/{theirs}/told"
        if not self._store.check([at]):
            return said
        told = json.loads(self._store.get(at))
        if told["refuses"]:
            return f"{said}; on rank {rank}: {told['refuses']}"
        if told["communicates"] != self.question.communicates:
            return f"{said}; it compiled {self.function} with other collectives"
        if told["texts"] == list(self.items[digest]):
            facts = told["with"].split(", ")
            facts = [fact for fact in facts if fact not in self._provenance.split(", ")] or facts
            return f"{said}, with other versions or options: {', '.join(facts)}"
        instead = [text for text in told["texts"] if text not in self.items[digest]] if digest == self._form[0] else []
        return said + (f"; it does: {'; '.join(instead)}" if instead else "")

    # --- the answer ------------------------------------------------------------------------------------------
    def answer(self) -> Answer:
        """The answer as far as it is known now. What is not known is refused."""
        agreed, refused = self._followed(), dict[str, str]()
        for digest, texts in self.items.items():
            outcome = self.outcomes.get(digest, f"{_NO}it is not known yet")
            if outcome == _YES:
                agreed.update(texts)
            else:
                refused |= {text: outcome.removeprefix(_NO) for text in texts}
        if self._refuses:
            refused |= _all_refused(self.question, self._refuses)
        return Answer(frozenset(agreed), refused, self._accord(agreed), self.outcomes.keys() >= self.items.keys())

    def _followed(self) -> set[str]:
        """The gathers that this rank need not keep, and keeps since all ranks do where they communicate the same.

        Where no rank did so before, none does from now on: forms of a function may be run unlike.
        """
        why = f"{_NO}rank {self._peers.rank} compiled a graph that need not keep it"
        with contextlib.suppress(RuntimeError, OSError):
            texts = {self._digest((text,), self._provenance): text for text in self.question.can_keep}
            return {text for digest, text in texts.items() if self._decide(digest, f"{why}: {text}") == _YES}
        return set()

    def _accord(self, agreed: set[str]) -> int:
        """The hash of all that the ranks agreed on for this graph; errors of unlike calls quote what that is."""
        own = self.question.deviations if agreed.issuperset(self.question.deviations) else ()
        joint = [one for one in self.question.joint if one.done]
        texts = [*own, *(text for one in joint for text in one.deviations)]
        if not texts:
            return 0
        told = [self._provenance, self.question.phase, self.question.communicates, *own]
        told += [text for one in joint for text in (one.phase, one.communicates, *one.deviations)]
        return number_of(told, f"{self.function} ({self.question.phase}): {'; '.join(texts)}"[:_TOLD], self._store)


def _wait(boards: Sequence[_Board]) -> None:
    """Wait until all is known, or for as long as the most impatient group waits."""
    limit = min((board.patience for board in boards), default=0.0)
    is_open = list(boards)

    def warn() -> None:
        log.warning(
            "asynctp: waits up to %g s (ASYNCTP_AGREE_S, and a quarter of the group's timeout) for %s; "
            "Config(deviate=False) waits for nobody",
            *(limit, is_open[0].awaited()),
        )

    for passed in waiting.looks(limit, warn, warn_after=WARN_S, pauses=_PAUSES_S):
        is_open = [board for board in is_open if board.is_open()]
        for board in is_open:
            board.passed = passed
        if not is_open or (passed >= LATE_S and all(board.waits_for_late_ones() for board in is_open)):
            break


def _refuses(peers: process_groups.Peers, config: Config, question: Question) -> str:
    """Why this rank refuses all deviations in a group; empty if it does not."""
    if not config.deviate:
        return REFUSES_ALL
    if dynamo.suppresses_errors():
        return _SUPPRESSED
    if question.rank not in (-1, peers.ranks.index(peers.rank)):
        return f"the graph was compiled for rank {question.rank} of the group"
    reason = ops.compares_calls(len(peers.ranks))[0] if process_groups.uses_gpus() else ""
    return f"nothing compares calls of this group ({reason})" if reason else ""


def _provenance(config: Config) -> str:
    """Versions, registered ops and options: where they differ, equal texts may mean different things."""
    options = {name: value for name, value in config.decisive().items() if name not in _NOT_DECISIVE}
    told = ", ".join(f"{name}={value!r}" for name, value in options.items())
    gpus = f", {ops.compares_calls(0)[1]}" if process_groups.uses_gpus() else ""
    return f"asynctp {sources_digest()}, torch {torch.__version__}, ops {registry.digest()}, {told}{gpus}"
