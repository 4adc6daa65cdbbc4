"""A group agrees once, at its first call, on all that decides what travels; else all its ranks run the plain program.

`settle` looks at nothing but the facts of all ranks, so that no second exchange is needed to know what others will do.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from asynctp_kernels.cuda.choose import select, tables
from asynctp_kernels.cuda.runtime.machine import driver
from asynctp_kernels.errors import NotEnrolled
from asynctp_kernels.host import host_name
from asynctp_kernels.meeting import Meeting, boot_id
from asynctp_kernels.torch_private import symmetric_memory_backend

log = logging.getLogger(__name__)

UNKNOWN = "unknown"


RankFacts = dict[str, str]
"""The facts about one rank, as `rank_facts` has them. One of another version of this package knows more, or fewer."""

#: what must be alike for ranks to share memory and kernels, and what to do where it is not
_REQUIRED = {
    "gpu": ("unlike GPUs", "keep a group on GPUs of one model"),
    "sources": ("unlike files of asynctp_kernels", "install one version of asynctp-passes for all ranks"),
    "torch": ("unlike versions of torch", "install one version for all ranks"),
    "triton": ("unlike versions of triton", "install one version for all ranks"),
    "driver": ("unlike CUDA drivers", "let all ranks see one driver"),
    "backend": ("unlike symmetric memory of torch", "set TORCH_SYMMMEM to one value on all ranks, or unset it"),
}


def rank_facts(index: int | None, *, with_table: bool = True) -> RankFacts:
    """The facts about this rank, on GPU `index`.

    Raises:
        ValueError: The tuning table is damaged.
    """
    capability, processors, name = driver.machine(index)
    return {
        "host": host_name(),
        "boot": boot_id(),  # new with each start of a machine: two hosts may have one name
        "gpu": f"{name}, {processors} SMs, compute capability {'.'.join(map(str, capability))}",
        "sources": sources_digest(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": _known(driver.driver_version),  # the newest CUDA version that it knows
        "backend": UNKNOWN if driver.IN_ORDER else _known(symmetric_memory_backend),
        "implementation": os.environ.get(select.VARIABLE, "auto"),
        "table": tables.digest(select.tuned(), name) if with_table else UNKNOWN,
    }


def settle(found: Sequence[RankFacts]) -> str:
    """Which ranks of a group were tuned apart, so that only the shipped table counts; empty where none were.

    Raises:
        ValueError: The ranks force unlike implementations; all of them raise it.
        NotEnrolled: They differ in what they must share; all of them raise it.
    """
    asked = all("implementation" in facts for facts in found)  # another version need not tell
    if asked and (differ := _differ(found, "implementation")):
        raise ValueError(
            f"asynctp: {select.VARIABLE} differs among the ranks of a group ({differ}); set it to one value on all of "
            f"them, or unset it"
        )
    if refused := _hosts(found) or _versions(found):
        raise NotEnrolled(refused)
    return _differ(found, "table")


def enroll(board: Meeting, name: str, index: int | None) -> tables.Table:
    """Agree with all ranks of the group `name`; gives the tuning table that all of them choose by. Collective.

    Raises:
        ValueError, NotEnrolled: See `settle`.
    """
    texts = board.exchange("facts", json.dumps(rank_facts(index)))
    if not (unlike_tables := settle([json.loads(text) for text in texts])):
        return tables.merged(select.shipped(), select.tuned())
    log.warning(
        "group %s chooses implementations by the shipped table alone, as its ranks were tuned apart (digests: %s); let "
        "'asynctp tune' end before a program starts, or name one file in %s on all ranks",
        *(name, unlike_tables, select.TABLE_VARIABLE),
    )
    return select.shipped()


@functools.cache
def sources_digest() -> str:
    """A digest of all files of this package that decide anything."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for path in sorted(path for suffix in ("c", "json", "py") for path in root.rglob(f"*.{suffix}")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


@functools.cache
def reached(index: int) -> tuple[str, ...]:
    """Number and UUID of each GPU that GPU `index` reaches and that reaches it, its own among them.

    Two processes with the same ones reach each other's memory, as each names its own GPU too. And they have different
    numbers for different GPUs: torch's symmetric memory takes no group whose GPUs have one number, as where each
    process sees one alone (`CUDA_VISIBLE_DEVICES`).
    """
    return tuple(
        f"{each}: {torch.cuda.get_device_properties(each).uuid}"
        for each in range(torch.cuda.device_count())
        if each == index or (_access(index, each) and _access(each, index))
    )


def _access(one: int, other: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(one, other))


def _hosts(found: Sequence[RankFacts]) -> str:
    """Say why ranks of several machines cannot share memory; torch's rendezvous would not."""
    hosts = sorted({str(facts.get("host", UNKNOWN)) for facts in found})
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts ({', '.join(hosts)}), not on one"
    if differ := _differ(found, "boot"):
        return f"its ranks are on several machines that are all named '{hosts[0]}' (boot ids: {differ}), not on one"
    return ""


def _versions(found: Sequence[RankFacts]) -> str:
    for fact, (what, remedy) in _REQUIRED.items():
        if differ := _differ(found, fact):
            return f"its ranks have {what} ({differ}); {remedy}"
    return ""


def _differ(found: Sequence[RankFacts], fact: str) -> str:
    """The values of a fact, each with its ranks, as "ranks 0, 2: auto; rank 1: fused"; empty where all are alike."""
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(found):
        ranks.setdefault(str(facts.get(fact, UNKNOWN)), []).append(rank)
    if len(ranks) < 2:
        return ""
    each = (f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {value}" for value, of in ranks.items())
    return "; ".join(each)


def _known(ask: Callable[[], object]) -> str:
    """The answer as text; a driver, or a torch, that cannot say is not why a rank fails."""
    try:
        return str(ask())
    except (AttributeError, RuntimeError):
        return UNKNOWN
