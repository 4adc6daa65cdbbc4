"""Faults between ranks, as exceptions that name the rank, the peer and the wait."""

from __future__ import annotations

import os

DEFAULT_TIMEOUT_S = 60.0
TIMEOUT_VARIABLE = "ASYNCTP_TIMEOUT_S"
SET_THE_BOUND = f"{TIMEOUT_VARIABLE} sets the bound in seconds."


class SymmetricMemoryError(RuntimeError):
    """Symmetric memory could not be set up, or a past failure left it unusable."""


class UnlikeCalls(SymmetricMemoryError):
    """Ranks of a group made unlike calls at the same place in its order of calls.

    Attributes:
        rank: this rank. own: its call, in words.
        peer: the other rank. theirs: that rank's call.
        forms: ranks may have run unlike forms of a compiled function.
    """

    def __init__(self, rank: int, own: str, peer: int, theirs: str, forms: bool = False) -> None:
        super().__init__(rank, own, peer, theirs, forms)
        self.rank, self.own, self.peer, self.theirs, self.forms = rank, own, peer, theirs, forms

    def __str__(self) -> str:
        alike = "All ranks of a group must make the same collectives, in the same order, of the same sizes and dtypes."
        remedy = (
            "Ranks ran unlike forms of a compiled function, or unlike functions. Config(deviate=False) on every rank "
            f"lets them mix these (docs/how-to/ranks-that-differ.md). {alike}"
        )
        return (
            f"unlike calls have met: rank {self.rank} makes {self.own}, rank {self.peer} makes {self.theirs}. "
            f"{remedy if self.forms else alike}"
        )


class NotEnrolled(SymmetricMemoryError):
    """All ranks of a group agree that it cannot share memory, so that all of them run the plain program."""


class PeerFailed(RuntimeError):
    """A rank other than this one failed in what all ranks of a group do together.

    Attributes:
        op: what was running, such as ``rendezvous``.
        rank: the rank that was told, or found out.
        peer: the rank that failed.
        cause: what the peer said, or what shows that it failed.
    """

    def __init__(self, op: str, rank: int, peer: int, cause: str) -> None:
        super().__init__(op, rank, peer, cause)
        self.op, self.rank, self.peer, self.cause = op, rank, peer, cause

    def __str__(self) -> str:
        return (
            f"{self.op}: rank {self.peer} failed, so that rank {self.rank} cannot go on: {self.cause}. Mend that, then "
            f"call asynctp_kernels.release(group) on every rank and try again, or restart all ranks."
        )


class PeerTimeout(TimeoutError):
    """A bounded wait for another rank ran out.

    Attributes:
        op: the call that waited, in words, such as ``rendezvous``.
        rank: the rank that waited.
        peer: the rank that it waited for.
        awaited: the thing that never came, such as ``message 'host'``.
        seconds: the bound that ran out.
        remedy: how the bound is set.
    """

    def __init__(
        self, op: str, rank: int, peer: int, awaited: str, seconds: float, remedy: str = SET_THE_BOUND
    ) -> None:
        super().__init__(op, rank, peer, awaited, seconds, remedy)
        self.op, self.rank, self.peer, self.awaited, self.seconds = op, rank, peer, awaited, seconds
        self.remedy = remedy

    def __str__(self) -> str:
        return (
            f"{self.op}: rank {self.rank} waited {self.seconds:g} s for {self.awaited} of rank {self.peer}. "
            f"Did rank {self.peer} fail, make another call, or run this one outside of compiled code (a graph break, "
            f"a recompile limit)? {self.remedy}"
        )


def timeout_s() -> float:
    """Seconds that any single wait may take: `ASYNCTP_TIMEOUT_S`, 60 when unset.

    Raises:
        ValueError: the variable is not a positive number.
    """
    return given_timeout_s() or DEFAULT_TIMEOUT_S


def given_timeout_s() -> float | None:
    """`ASYNCTP_TIMEOUT_S`; None when unset.

    Raises:
        ValueError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"asynctp: {TIMEOUT_VARIABLE}={text!r} is not valid; it must be a positive number of seconds")
    return seconds
