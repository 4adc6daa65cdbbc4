"""Agreement: ranks that decided differently about one program are told so when they compile, instead of hanging later.

    rank 0: plan ─▶ store ◀─ plan :rank 1            each compares with every plan that is there

Each rank puts its plan (what it decided about every collective of a group, and with what) into the key-value store of
the default process group, under a key that the ranks of a program share, and reads those of its peers. There is no
collective, and nothing that could meet the program's own ones. docs/explanation/agreement-of-ranks.md says why this
neither hangs nor raises without cause.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asynctp_passes import compat, registry
from asynctp_passes.config import Config
from asynctp_passes.errors import DisagreementError
from asynctp_passes.report import Remark, Report

__all__ = ["WAIT_S", "agree", "plan_of", "sources_digest"]

log = logging.getLogger(__name__)

WAIT_S = 10.0
"""Seconds that a compile waits for the plans of the other ranks before it goes on without them."""

LARGE_GROUP = 32
"""Ranks of a larger group compare with two neighbours each; all with all would be a burden for the store."""

_OUT_OF_SCOPE = {"NO_MATMUL", "WEIGHT_GATHER", "SINGLE_RANK", "OTHER_COLLECTIVE"}
_LONGEST_PAUSE_S = 0.05
_lock = threading.Lock()


@dataclass
class _Plan:
    """A plan that this rank has published, the ranks whose plans have not been seen yet, and those with the same."""

    program: str
    key: str
    text: str
    report: Report
    rank: int
    missing: set[int]
    same: set[int] = field(default_factory=set)


@dataclass
class _Ledger:
    """What this process has published to one store.

    Attributes:
        published: How many plans, by program.
        standing: Those plans, by program, except where ranks disagreed.
        pending: The plans that not all ranks have answered yet.
    """

    published: Counter[str] = field(default_factory=Counter)
    standing: set[tuple[str, str]] = field(default_factory=set)
    pending: list[_Plan] = field(default_factory=list)


_ledgers: weakref.WeakKeyDictionary[Any, _Ledger] = weakref.WeakKeyDictionary()  # a store goes with its process group


def agree(report: Report, config: Config, *, waits: bool = True) -> None:
    """Compare this rank's plan with those of the other ranks of each group in a report.

    Does nothing without process groups, in groups of one rank, and with the fake backend.

    Args:
        report: What this rank decided.
        config: What it decided with; `config.agree=False` turns all of this off.
        waits: Wait up to `WAIT_S` for ranks that have not published theirs. A plan that came from a cache does not
            wait: its rank may have to run before the others compile.

    Raises:
        DisagreementError: A rank decided differently, now or about a program compiled earlier.
    """
    if not config.agree or not report.remarks:
        return
    groups = sorted({remark.group for remark in report.remarks if remark.group and _at_stake(report, remark.group)})
    found = [(group, peers) for group in groups if (peers := compat.peers_of(group)) is not None]
    if not found:
        return
    store = found[0][1].store
    with _lock:
        ledger = _ledgers.setdefault(store, _Ledger())
    plans = [plan for group, peers in found if (plan := _publish(ledger, report, config, group, peers)) is not None]
    if waits:
        _await(store, plans)
    _compare(store, ledger)
    for plan in plans if waits else ():
        if plan.missing:
            log.warning("asynctp: %s", _absent(plan))


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
    lines.append(f"group enrolled: {config.groups == 'auto' or group in config.groups}")
    place = {remark.collective: index for index, remark in enumerate(report.remarks)}
    lines += [f"collective {place[r.collective]}: {_decided(r)}" for r in report.remarks if r.group == group]
    for entry in report.coalesced:
        if entry.group == group:
            members = " ".join(str(place[name]) for name in entry.collectives)
            lines.append(f"coalesced {entry.reduce_op} {entry.dtype}: {members}")
    return "\n".join(lines)


def _decided(remark: Remark) -> str:
    return f"{remark.kind} {remark.outcome} {remark.op or f'{remark.code} {remark.name}'} ({len(remark.nodes)} nodes)"


@functools.cache
def sources_digest() -> str:
    """A hash of this package's sources and of the kernels', which decide what code a graph becomes."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    folders = [root, root.parent / "kernels" / "asynctp_kernels", root.parent / "asynctp_kernels"]
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- the store ------------------------------------------------------------------------------------------------
def _publish(ledger: _Ledger, report: Report, config: Config, group: str, peers: compat.Peers) -> _Plan | None:
    """Put the plan into the store; None when this rank has published the same one for the same program before."""
    text = plan_of(report, config, group)
    members = ".".join(map(str, peers.ranks))
    program = f"asynctp/{members}/{report.phase}/{report.program_digest}"
    own = f"{program}/{peers.rank}"  # of a rank, since ranks may be threads of one process
    with _lock:
        if (own, text) in ledger.standing:
            return None
        key = f"{program}/{ledger.published[own]}"
        plan = _Plan(own, key, text, report, peers.rank, _compared_with(peers))
        ledger.published[own] += 1
        ledger.standing.add((own, text))
        ledger.pending.append(plan)
    peers.store.set(f"{key}/{peers.rank}", text)
    return plan


def _compared_with(peers: compat.Peers) -> set[int]:
    """All other ranks; in a large group the two next to this one, since among neighbours every difference shows."""
    if len(peers.ranks) <= LARGE_GROUP:
        return set(peers.ranks) - {peers.rank}
    place = peers.ranks.index(peers.rank)
    return {peers.ranks[place - 1], peers.ranks[(place + 1) % len(peers.ranks)]}


def _await(store: Any, plans: Sequence[_Plan]) -> None:
    """Return when all ranks of the plans have published theirs, or `WAIT_S` have passed."""
    keys = [f"{plan.key}/{rank}" for plan in plans for rank in sorted(plan.missing)]
    deadline, pause = time.monotonic() + WAIT_S, 0.001
    while keys and not store.check(keys) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _compare(store: Any, ledger: _Ledger) -> None:
    """Compare every plan of ours with those that have come since; the first difference is raised."""
    with _lock:
        pending = list(ledger.pending)
    for plan in pending:
        arrived = [rank for rank in sorted(plan.missing) if store.check([f"{plan.key}/{rank}"])]
        texts = {rank: store.get(f"{plan.key}/{rank}").decode() for rank in arrived}
        others = {rank: text for rank, text in texts.items() if text != plan.text}
        plan.missing -= set(arrived)
        plan.same |= set(arrived) - set(others)
        with _lock:
            if (others or not plan.missing) and plan in ledger.pending:
                ledger.pending.remove(plan)
            if others:  # when it is mended, it is compared anew
                ledger.standing.discard((plan.program, plan.text))
        if others:
            raise DisagreementError(_disagreement(plan, others), plan.report)


# --- words ----------------------------------------------------------------------------------------------------
def _disagreement(plan: _Plan, others: dict[int, str]) -> str:
    rank, other = next(iter(others.items()))
    same = sorted({plan.rank, *plan.same})
    changed = difflib.unified_diff(plan.text.splitlines(), other.splitlines(), _ranks(same), _ranks([rank]), n=0)
    difference = [line for line in changed if not line.startswith("@@")]
    lines = [
        f"asynctp: the ranks of a group decided differently about {plan.report.graph} ({plan.report.phase}), and would "
        "wait for one another forever if they ran it. Give every rank the same asynctp, torch, options and ASYNCTP_* "
        "variables (agree=False turns this check off).",
        *("Difference:", *_indented(difference)),
        *(f"Plan of {_ranks(same)}:", *_indented(plan.text.splitlines())),
    ]
    for text in dict.fromkeys(others.values()):
        have = [rank for rank, theirs in others.items() if theirs == text]
        lines += [f"Plan of {_ranks(have)}:", *_indented(text.splitlines())]
    return "\n".join(lines)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line.rstrip()}" for line in lines]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _absent(plan: _Plan) -> str:
    have = sorted({plan.rank, *plan.same})
    return (
        f"{_ranks(sorted(plan.missing))} did not compile {plan.report.graph} ({plan.report.phase}) within {WAIT_S:g} s "
        f"of {_ranks(have)}; its plan is compared when they do. They may be slower, have agree=False, run another "
        "program, or have this one compiled or cached already, if this rank recompiled alone."
    )
