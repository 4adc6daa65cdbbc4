"""Agreement: ranks that decided differently about the same collectives are told so when they compile, and do not hang.

    rank 0: plans ─▶ store ◀─ plans :rank 1          each compares with every list of plans that is there

Each rank keeps the plans that it made for the collectives of a graph (what it decided about each of a group, and with
what) in the key-value store of the default process group, and reads those of its peers. Two ranks disagree if each has
a plan that the other lacks: who is merely ahead, behind, or compiles alone has no quarrel, so nobody waits for anybody.
There is no collective, and nothing that could meet the program's own ones. docs/explanation/agreement-of-ranks.md says
why this neither hangs nor raises without cause.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asynctp_passes import compat, registry
from asynctp_passes.config import Config
from asynctp_passes.errors import DisagreementError
from asynctp_passes.report import Remark, Report

__all__ = ["GRACE_S", "agree", "agree_again", "fall_back", "plan_of", "sources_digest", "withdraw"]

GRACE_S = 10.0
"""Seconds that a difference may last before it is an error: a rank may be about to make the plan that it lacks."""

LARGE_GROUP = 32
"""Ranks of a larger group compare with two neighbours each; all with all would be a burden for the store."""

_ACTS = {"BEHIND_PRODUCTS", "SCATTER_BEHIND_PRODUCTS", "RESULT_DROPPED", "REGATHERED", "KEPT"}
"""What becomes of collectives that are not fused, and do not stay as they are."""

_OUT_OF_SCOPE = {"NO_MATMUL", "OUTSIDE_GRAPH", "PRODUCT_GATHERED", "WEIGHT_GATHER", "SINGLE_RANK", "OTHER_COLLECTIVE"}
_COMPARED_AGAIN = 16
_PAUSE_S = 0.05
_lock = threading.Lock()


@dataclass
class _Program:
    """A program that this rank has compiled for a group.

    Attributes:
        key: Its key in the store, for each rank's own to be added.
        rank: This rank.
        report: That of the newest plan.
        plans: All different ones, newest last.
        refused: Those that ended in an error. They stay in the store, so that peers see them, until the next one.
        behind: The ranks to compare with that have not all of the plans.
    """

    key: str
    rank: int
    report: Report
    plans: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)

    def refuse(self, plans: Iterable[str]) -> None:
        """These plans end in an error, so there is nothing to compare any more."""
        self.refused.update(plans)
        self.behind.clear()


_Ledger = dict[str, _Program]
_ledgers: weakref.WeakKeyDictionary[Any, _Ledger] = weakref.WeakKeyDictionary()  # a store goes with its process group


def agree(report: Report, config: Config) -> None:
    """Tell the other ranks of each group in a report of this rank's plan, and compare it with theirs.

    Does nothing without process groups, in groups of one rank, and with the fake backend. Waits for no rank, unless one
    has another plan.

    Args:
        report: What this rank decided.
        config: What it decided with; `config.agree=False` turns all of this off.

    Raises:
        DisagreementError: A rank decided differently, now or about a program compiled earlier.
    """
    if not config.agree or not report.remarks:
        return
    groups = sorted({remark.group for remark in report.remarks if remark.group and _at_stake(report, remark.group)})
    for group in groups:
        peers = compat.peers_of(group)
        if peers is not None:
            _publish(_ledgers.setdefault(peers.store, {}), report, config, group, peers)
    agree_again()


def agree_again() -> None:
    """Compare the plans that this rank has published with those that came since.

    Raises:
        DisagreementError: A rank decided differently.
    """
    store = compat.default_store()
    if store is not None and store in _ledgers:
        _compare(store, _ledgers[store])


def withdraw(report: Report) -> None:
    """Say that the plans of a report will not run, since its compile ends in an error. Peers see them nevertheless."""
    for ledger in list(_ledgers.values()):
        for program in list(ledger.values()):
            if program.report is report:
                program.refuse([program.plans[-1]])


def fall_back(report: Report, config: Config, planned: Report | None) -> None:
    """Tell the other ranks that this one runs a graph as it was, since asynctp failed on it.

    Args:
        report: Of the graph as it was: nothing of it is fused.
        config: The configuration.
        planned: What the ranks were told before, and will not run; None where they were told nothing.

    Raises:
        DisagreementError: Another rank fuses what this one does not.
    """
    if planned is not None:
        withdraw(planned)
    agree(report, config)


def _at_stake(report: Report, group: str) -> bool:
    """False for groups that only gather parameters, or reduce what is far from matmuls: nothing changes for them."""
    decided = any(r.group == group and r.name not in _OUT_OF_SCOPE for r in report.remarks)
    small = any(entry.group == group for entry in report.coalesced)
    return decided or small


def plan_of(report: Report, config: Config, group: str) -> str:
    """What must be the same on all ranks of a group, a line for each thing.

    Sizes are not part of it: ranks may compile one program for static and for dynamic sizes. Nor are names of groups,
    as one rank's other groups are not those of its peers.
    """
    lines = [f"asynctp sources {sources_digest()}", f"torch {report.torch_version}"]
    lines.append(f"registered ops {registry.digest()}")
    lines += [f"{name}={value!r}" for name, value in config.decisive().items() if name != "groups"]
    lines.append(f"group enrolled: {config.enrolls(group)}")
    place = {remark.collective: index for index, remark in enumerate(report.remarks)}
    lines += [f"collective {place[r.collective]}: {_decided(r)}" for r in report.remarks if r.group == group]
    for entry in report.coalesced:
        if entry.group == group:
            members = " ".join(str(place[name]) for name in entry.collectives)
            lines.append(f"coalesced {entry.reduce_op} {entry.dtype}: {members}")
    return "\n".join(lines)


def _decided(remark: Remark) -> str:
    """What runs in place of a collective, and what it takes along, which each rank's proof takes all ranks to have.

    Why one stays is no matter: ranks may use one result in different ways.
    """
    if remark.outcome == "FUSED":
        products = f"{remark.op}, products: {remark.shapes.get('matmul', '').count(' @ ')}"
        return ", ".join([products, *remark.moved])
    return f"{remark.kind}, {remark.name if remark.name in _ACTS else 'as it is'}"


@functools.cache
def sources_digest() -> str:
    """A hash of this package's sources and of the kernels', which decide what code a graph becomes."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    folders = [root, root.parent / "kernels" / "asynctp_kernels", root.parent / "asynctp_kernels"]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- the store ------------------------------------------------------------------------------------------------
def _publish(ledger: _Ledger, report: Report, config: Config, group: str, peers: compat.Peers) -> None:
    """Put the plan into the store, unless it is there: of the program, and of any with the same collectives."""
    text, place = plan_of(report, config, group), f"asynctp/{'.'.join(map(str, peers.ranks))}/{report.phase}"
    for key in (f"{place}/{report.program_digest}", f"{place}/collectives/{report.collectives_digest}"):
        with _lock:
            program = ledger.setdefault(f"{key}/{peers.rank}", _Program(key, peers.rank, report))
            if text in program.plans and text not in program.refused:
                continue
            program.plans = [*(plan for plan in program.plans if plan not in program.refused), text]
            program.refused.clear()
            program.report = report
            program.behind = _compared_with(peers)
            peers.store.set(f"{key}/{peers.rank}", json.dumps(program.plans))


def _compared_with(peers: compat.Peers) -> set[int]:
    """All other ranks; in a large group the two next to this one, since among neighbours every difference shows."""
    if len(peers.ranks) <= LARGE_GROUP:
        return set(peers.ranks) - {peers.rank}
    place = peers.ranks.index(peers.rank)
    return {peers.ranks[place - 1], peers.ranks[(place + 1) % len(peers.ranks)]}


def _compare(store: Any, ledger: _Ledger) -> None:
    """Compare the newest programs with what the other ranks have; the first lasting difference is raised."""
    with _lock:
        open_ones = [program for program in ledger.values() if program.behind][-_COMPARED_AGAIN:]
    deadline = time.monotonic() + GRACE_S
    for program in open_ones:
        while others := _differing(store, program):
            if time.monotonic() >= deadline:
                refused = [own for own, _ in others.values()]
                for same in (one for one in open_ones if one.report is program.report):
                    same.refuse(refused)
                raise DisagreementError(_disagreement(program, others), program.report)
            time.sleep(_PAUSE_S)


def _differing(store: Any, program: _Program) -> dict[int, tuple[str, str]]:
    """For each rank that lacks a plan of this rank's and has one that this rank lacks: these two plans."""
    others: dict[int, tuple[str, str]] = {}
    for rank in sorted(program.behind):
        key = f"{program.key}/{rank}"
        theirs: list[str] = json.loads(store.get(key)) if store.check([key]) else []
        own, foreign = (
            [plan for plan in plans if plan not in others_plans]
            for plans, others_plans in ((program.plans, theirs), (theirs, program.plans))
        )
        if not own:
            program.behind.discard(rank)
        elif foreign:
            others[rank] = own[-1], foreign[-1]
    return others


# --- words ----------------------------------------------------------------------------------------------------
def _disagreement(program: _Program, others: dict[int, tuple[str, str]]) -> str:
    rank, (own, other) = next(iter(others.items()))
    changed = difflib.unified_diff(own.splitlines(), other.splitlines(), f"rank {program.rank}", f"rank {rank}", n=0)
    difference = [line for line in changed if not line.startswith("@@")]
    lines = [
        f"asynctp: the ranks of a group decided differently about {program.report.graph} ({program.report.phase}), and "
        "would wait for one another forever, or be wrong, if they ran it. Give every rank the same program, asynctp, "
        "torch, options and ASYNCTP_* variables, and let it use the same results (agree=False turns this check off).",
        *("Difference:", *_indented(difference)),
        *(f"Plan of rank {program.rank}:", *_indented(own.splitlines())),
    ]
    for text in dict.fromkeys(theirs for _, theirs in others.values()):
        have = [rank for rank, (_, theirs) in others.items() if theirs == text]
        lines += [f"Plan of {_ranks(have)}:", *_indented(text.splitlines())]
    return "\n".join(lines)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line.rstrip()}" for line in lines]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
