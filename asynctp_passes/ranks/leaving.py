"""A rank on which torch gives a function up that asynctp has compiled: it says so and raises, unless all ranks do so.

Its collectives would go by torch, while its peers wait in their graphs, on the group's own wire or with what they have
agreed to send otherwise. All ranks may leave alike, as under a stance that the program sets everywhere: so each rank
that leaves says so in the store of the graph's groups, and waits for the others. It waits in vain where one of them has
come to a call of a graph, or does not say so within the group's timeout. One record for each call of the function holds
what becomes of it, and who writes it first decides: no rank goes on while another one raises.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from asynctp_passes import ops
from asynctp_passes.config import Config
from asynctp_passes.errors import DisagreementError
from asynctp_passes.ops import run_check
from asynctp_passes.planning.legality import is_on_wire
from asynctp_passes.reporting.report import Report
from asynctp_passes.reporting.strictness import raise_uncompiled
from asynctp_passes.torch_private import giving_up, process_groups
from asynctp_passes.waiting import looks, ranks_named

__all__ = ["WARN_S", "note"]

log = logging.getLogger(__name__)

WARN_S = 10.0
"""Seconds of waiting after which a warning says for whom."""

_PAUSES_S = 0.0005, 0.02
_TOGETHER, _ALONE = "together", "alone"
_times: Counter[tuple[str, str]] = Counter()  # by group and place in its store: how often a function was given up


def note(report: Report, config: Config) -> None:
    """Note a graph that is compiled or came from a cache, should Dynamo give up the function that it is of."""
    dims = process_groups.mesh_dimensions()
    groups = (one.group for one in report.questions if is_on_wire(one.group, dims.get(one.group, ""), config))
    giving_up.note_groups(groups, given_up=_leave, failed=_told, left=functools.partial(_left, config))


def _waits(peers: process_groups.Peers) -> bool:
    """Whether the peers of a group wait for this rank, if it runs without its graph: on the wire, or to compare."""
    return _has_wire(len(peers.ranks)) or run_check.has_begun(peers.group)


def _has_wire(world_size: int) -> bool:
    return not ops.compares_calls(world_size)[0] if process_groups.uses_gpus() else ops.on_wire("cpu")


def _leave(given_up: giving_up.GivenUp) -> None:
    """Return if all ranks leave; else tell the peers, and raise.

    Raises:
        DisagreementError: A rank stays in its graph.
    """
    if (error := _told(given_up)) is not None:
        raise error


def _left(config: Config, given_up: giving_up.GivenUp) -> None:
    """Judge that all ranks leave, as a function that torch does not compile.

    Raises:
        StrictError, ExpectError: As `config` asks for.
    """
    raise_uncompiled(given_up.name, given_up.reason, given_up.remedy, config)


def _told(given_up: giving_up.GivenUp) -> DisagreementError | None:
    """The error of a rank that leaves alone, which its peers raise too; None if all ranks leave."""
    found = {name: process_groups.peers_of(name) for name in sorted(given_up.groups)}
    groups = {name: peers for name, peers in found.items() if peers is not None and _waits(peers)}
    if all(_all_leave(given_up.name, name, groups) for name in groups):
        return None
    error = DisagreementError(
        f"asynctp: rank {torch.distributed.get_rank()} leaves the compiled graph of {given_up.name}, since "
        f"{given_up.reason}. Its collectives would go by torch, while other ranks of group "
        f"{', '.join(map(repr, groups))} stay in theirs. Restart all ranks. Remedy: {given_up.remedy}"
    )
    for name, peers in groups.items():
        ops.leave(name, error)
        run_check.give_up(peers, str(error))
    return error


def _all_leave(function: str, group: str, groups: Mapping[str, process_groups.Peers]) -> bool:
    """Whether all ranks of one of a function's groups run this call of it without its graph."""
    peers = groups[group]
    if peers.life is None:
        return False
    place = f"asynctp/leaves/{peers.life}/{function}"
    _times[group, place] += 1
    number = _times[group, place]
    try:
        together = _outcome(f"{place}/{number}", peers, groups) == _TOGETHER
        if not together:  # so that ranks number the next call alike
            _times[group, place] -= 1
            _forget(f"{place}/{number}", peers, True)
        elif number > 1:  # whoever is in this call has read what became of the last one
            _forget(f"{place}/{number - 1}", peers, peers.rank == peers.ranks[0])
        return together
    except RuntimeError as error:  # the store is gone
        log.warning("asynctp: the store of group %r does not answer (%s)", group, error)
        return False


def _forget(prefix: str, peers: process_groups.Peers, outcome: bool) -> None:
    """Remove what this rank has said of a call, and the outcome of it."""
    for key in (str(peers.rank), *(["outcome"] if outcome else [])):
        peers.store.delete_key(f"{prefix}/{key}")


def _outcome(prefix: str, peers: process_groups.Peers, groups: Iterable[str]) -> str:
    """The outcome of a call. The first rank that knows it writes it down."""
    record, said = f"{prefix}/outcome", [f"{prefix}/{rank}" for rank in peers.ranks]
    peers.store.set(f"{prefix}/{peers.rank}", "1")
    limit = process_groups.group_timeout_s(peers.group)

    def warn() -> None:
        missing = [rank for rank, key in zip(peers.ranks, said, strict=True) if not peers.store.check([key])]
        log.warning("asynctp: waits up to %g s for %s to leave a compiled graph, too", limit, ranks_named(missing))

    for passed in looks(limit, warn, warn_after=WARN_S, pauses=_PAUSES_S):
        if peers.store.check([record]):
            break
        awaited = any(map(ops.is_awaited, groups)) or run_check.is_awaited(peers)
        over = awaited or passed >= limit  # first: who has said so waits nowhere
        if peers.store.check(said):
            peers.store.compare_set(record, "", _TOGETHER)
        elif over:
            peers.store.compare_set(record, "", _ALONE)
    return str(peers.store.get(record).decode())
