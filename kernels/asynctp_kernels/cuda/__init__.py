"""The fused ops on NVIDIA GPUs: `run` runs a call, `explain` says how.

    calls             run a fused call               groups       the memory of a group
    bound_calls       one whose plan is found once   plan_cache   plans that were made
    moves             collectives without a matmul   facts        what decides how a call is run
    choices           how a call is run, and why     checks       why an implementation cannot run it
    implementations   the table of all of them

This module only gives their public names.
"""

from __future__ import annotations

import sys

from asynctp_kernels.cuda.bound_calls import bind
from asynctp_kernels.cuda.calls import run
from asynctp_kernels.cuda.choices import choice_for, explain, problem_of, variant_reason
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.choose.implementation import Choice
from asynctp_kernels.cuda.choose.select import forced
from asynctp_kernels.cuda.groups import last_implementation, memory_outlook, release, shared_bytes
from asynctp_kernels.cuda.moves import (
    Mover,
    bound_land,
    land,
    meet,
    run_bulk_all_reduce,
    run_bulk_gather,
    run_bulk_scatter,
)
from asynctp_kernels.cuda.plans.collectives import all_gather
from asynctp_kernels.cuda.runtime import interpreted

__all__ = [
    "Choice",
    "Mover",
    "all_gather",
    "bind",
    "bound_land",
    "choice_for",
    "explain",
    "forced",
    "land",
    "last_implementation",
    "meet",
    "memory_outlook",
    "problem_of",
    "release",
    "run",
    "run_bulk_all_reduce",
    "run_bulk_gather",
    "run_bulk_scatter",
    "shared_bytes",
    "variant_reason",
]

#: programs import them by these names
sys.modules.update({f"{__name__}.select": select, f"{__name__}.interpreted": interpreted})
