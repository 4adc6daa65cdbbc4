"""The fused ops on NVIDIA GPUs: `run` runs a call, `explain` says how.

calls             run a fused call               groups   the memory of a group, and its plans
bound_calls       one whose plan is found once   facts    what decides how a call is run
moves             collectives without a matmul   checks   why an implementation cannot run it
choices           how a call is run, and why     implementations   the table of all of them
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

__all__ = [
    "Choice",
    "Mover",
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

#: programs import it by this name
sys.modules[f"{__name__}.select"] = select
