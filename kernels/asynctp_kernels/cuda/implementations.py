"""The implementations of each kind of call, as tables that choosing, explaining and making plans read.

A new one is the class of its plan, in `plans`, and a row here. The order is that of preference.
"""

from __future__ import annotations

import logging
from typing import Any

from asynctp_kernels.cuda.choose.implementation import Choice, Implementation
from asynctp_kernels.cuda.choose.select import offered
from asynctp_kernels.cuda.choose.wire import TRANSPORTS
from asynctp_kernels.cuda.facts import Facts
from asynctp_kernels.cuda.plans.decomposed import DecomposedAllReduce, DecomposedGather, DecomposedScatter
from asynctp_kernels.cuda.plans.direct import DirectAllReduce, DirectGather, DirectScatter
from asynctp_kernels.cuda.plans.fused import FusedAllReduce, FusedGather, FusedScatter
from asynctp_kernels.cuda.plans.sequential import (
    SequentialAllReduce,
    SequentialGather,
    SequentialScatter,
    WholeProgram,
)
from asynctp_kernels.cuda.runtime.memory import GroupMemory

log = logging.getLogger(__name__)

_TABLE: tuple[tuple[type[Implementation], ...], ...] = (
    # gather            scatter            all_reduce: a scatter whose sums are shared; one kernel; or NCCL's own
    (FusedGather,       FusedScatter,      FusedAllReduce),
    (DecomposedGather,  DecomposedScatter, DecomposedAllReduce),
    (DirectGather,      DirectScatter,     DirectAllReduce),
    (SequentialGather,  SequentialScatter, SequentialAllReduce),
    (WholeProgram,      WholeProgram,      WholeProgram),
)  # fmt: skip
#: by what `Problem.op` says
ENTRIES: dict[str, tuple[type[Implementation], ...]] = dict(
    zip(("gather", "scatter", "all_reduce"), zip(*_TABLE, strict=True), strict=True)
)
TRANSPORTS.update({each.name: each.transports for entries in ENTRIES.values() for each in entries})
IMPLEMENTATIONS = offered()


def make_plan(call: Facts, memory: GroupMemory, choice: Choice) -> Any:
    """The plan of a call."""
    log.debug("%s: %s", call.wire.told, choice)
    entry = next(each for each in ENTRIES[call.kind] if each.name == choice.implementation)
    return entry.plan(call, memory, choice)
