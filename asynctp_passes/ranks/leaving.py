"""A rank on which torch gives a function up that asynctp has compiled: it runs as it is written.

Its collectives go by torch, while those of a rank that stays in its graph go by the group's own wire, or are fewer. So
ranks compare, before the first collective of such a call, as graphs do: on the wire by a call with an accord of its
own, on CPUs by a run check. Where all ranks leave, they go on. A call without collectives does nothing here.
"""

from __future__ import annotations

import functools

import torch

from asynctp_passes import ops
from asynctp_passes.config import Config
from asynctp_passes.ops import run_check
from asynctp_passes.ranks.accord import number_of
from asynctp_passes.reporting.report import Report
from asynctp_passes.reporting.strictness import raise_uncompiled
from asynctp_passes.torch_private import giving_up, process_groups


def note(report: Report, config: Config) -> None:
    """Note a graph that is compiled or came from a cache, should Dynamo give up the function that it is of."""
    groups: list[str] = []
    if report.questions:
        from asynctp_passes.planning.legality import is_on_wire

        dims = process_groups.mesh_dimensions()
        groups = [one.group for one in report.questions if is_on_wire(one.group, dims.get(one.group, ""), config)]
    giving_up.note_groups(groups, left=functools.partial(raise_uncompiled, config), communicates=_compare)


def _compare(given_up: giving_up.GivenUp, group: str, device: torch.device, may_be_on_wire: bool) -> bool:
    """Return if all ranks of a group leave the function, or where that changes nothing of what they send.

    False where the collective itself goes by torch on a rank with a graph, too, and the next one is to be compared.

    Raises:
        RuntimeError: A rank stays in its graph, and all ranks raise; or it does not come (`ops.meet`, `run_check`).
    """
    peers = process_groups.peers_of(group)
    if peers is None:
        return True
    if ops.on_wire(device.type) and not may_be_on_wire:
        return False
    told = f"{given_up.name} as it is written, since {given_up.reason}. Remedy: {given_up.remedy}"
    accord = number_of(["left", given_up.name], told, peers.store)
    if ops.on_wire(device.type):
        ops.meet(group, device, accord)
    elif run_check.has_begun(peers.group):
        run_check.run_check(accord, 1, group)
    return True
